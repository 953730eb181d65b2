"""Evolution Strategies: the estimate of the gradient, the episodes it is made of, and its processes."""

import math
import os
import socket
from collections import Counter
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, fork, load_script, parts, progress, tiny, wait
from gymnasium.spaces import Box, Discrete, MultiDiscrete

CPU = torch.device("cpu")


class Diary(gym.Wrapper):
    """Around the environment `env`; episodes are those of this process that were begun with a seed."""

    episodes: list = []

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self.page = dict(seed=seed, obs=[obs], actions=[], rewards=[], ended=False)
        if seed is not None:
            Diary.episodes.append(self.page)
        return obs, info

    def step(self, action):
        assert not self.page["ended"], "a step after the end of an episode"
        obs, reward, terminated, truncated, info = super().step(action)
        self.page["obs"].append(obs), self.page["actions"].append(action), self.page["rewards"].append(reward)
        self.page["ended"] = terminated or truncated
        return obs, reward, terminated, truncated, info


make_diary = lambda env, **kwargs: Diary(gym.make(env, **kwargs))
gym.register("Diary-v0", entry_point=make_diary, disable_env_checker=True)


@pytest.fixture
def es():
    return load_script("es")


@pytest.fixture
def diary():
    """diary() gives the training episodes in the order of their beginnings."""
    Diary.episodes.clear()
    known = probe_envs.EVALUATION_SEEDS
    return lambda: [page for page in Diary.episodes if page["actions"] and page["seed"] not in known]


@pytest.fixture
def members(es, monkeypatch):
    """The parameters of all members, a list of tensors (n, *shape) for each generation."""
    perturb, seen, per_generation = es.perturb, [], len([*make_agent(es).parameters()])

    def watch(*args, **kwargs):
        if not seen or len(seen[-1]) == per_generation:
            seen.append([])
        seen[-1].append(perturb(*args, **kwargs))
        return seen[-1][-1]

    monkeypatch.setattr(es, "perturb", watch)
    return seen


def short(es, env="Diary-v0", run_dir="run", **changes):
    """Arguments of one generation of walks, with a model before and after it."""
    kwargs = {"env": "probe_envs:Walk-v0", "actions": "box"} if env == "Diary-v0" else {}
    plain = dict(normalize_obs=False, eval_every=10**9, checkpoint_every=0, population=6, num_envs=3)
    return tiny(es, run_dir, **dict(env_id=env, env_kwargs=kwargs, total_timesteps=1) | plain | changes)


def make_agent(es, obs=None, action=None, **changes):
    spaces = obs or Box(-10, 10, (2,)), action or Box(-1, 1, (1,))
    return es.Agent(*spaces, es.Args(**dict(hidden_sizes=(8,)) | changes), CPU)


# -------------------------------------------------------------------------------------------------- gradient
def test_members_and_gradient_equal_numbers_worked_out_by_hand(es):
    theta, noise = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    assert es.perturb(theta, noise, 0.5, False).tolist() == [[10.5, 20], [11, 19.5]]
    assert es.perturb(theta, noise, 0.5, True).tolist() == [[10.5, 20], [9.5, 20], [11, 19.5], [9, 20.5]]
    # 1 / (2 x 0.5) (3 [1, 0] + 5 [2, -1]) and 1 / (4 x 0.5) ((3 - 1) [1, 0] + (5 - 9) [2, -1])
    assert es.es_gradient(torch.tensor([3.0, 5.0]), noise, 0.5, False).tolist() == [13, -5]
    assert es.es_gradient(torch.tensor([3.0, 1.0, 5.0, 9.0]), noise, 0.5, True).tolist() == [-3, 2]


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_gradient_is_that_of_the_smoothed_fitness(es, mirrored):
    """E F(theta + sigma eps) of F = sum of x^2 has the gradient 2 theta; parameters of any shape."""
    torch.manual_seed(0)
    theta = torch.randn(2, 3, dtype=torch.float64)
    noise = torch.randn(200_000, 2, 3, dtype=torch.float64)
    members = es.perturb(theta, noise, 0.3, mirrored)
    weights = members.square().sum((1, 2))
    gradient = es.es_gradient(weights, noise, 0.3, mirrored)
    assert torch.allclose(gradient, 2 * theta, atol=0.1)
    formula = sum(torch.einsum("i,ijk->ijk", weights, (members - theta) / 0.3)) / (len(members) * 0.3)
    assert torch.allclose(gradient, formula)


def test_fitness_equals_numbers_worked_out_by_hand_and_ties_share_a_rank(es):
    shape = lambda how, *values: es.shape_fitness(torch.tensor(values, dtype=torch.float64), how).tolist()
    assert shape("rank", 3, -1, 200, 4, 0.5) == [0, -0.5, 0.5, 0.25, -0.25]
    assert shape("rank", 1, 1, 5, 0, 1) == [0, 0, 0.5, -0.5, 0]
    assert shape("rank", 7, 7, 7, 9) == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0.5])
    assert shape("rank", 2) == [0] and shape("raw", 2, -9) == [2, -9]
    assert shape("zscore", 1, 2, 6) == pytest.approx([x / math.sqrt(14 / 3) for x in (-2, -1, 3)])
    assert not any(shape("rank", 7, 7, 7) + shape("zscore", 7, 7, 7)), "no difference, no step"


# ------------------------------------------------------------------------------------------------ generation
WAYS = [
    dict(), dict(mirrored_sampling=False, fitness="zscore"), dict(common_starts=False, fitness="raw"),
    dict(optimizer="adam", weight_decay=0.0, hidden_sizes=(3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_generation_is_algorithm_1(es, diary, members, way):
    """Its members are told from each other by what they would do in the episodes that were played."""
    options = dict(optimizer="sgd", learning_rate=0.1, weight_decay=0.3, sigma=0.2) | way
    args = short(es, episodes_per_member=2, **options)
    agent = make_agent(es, hidden_sizes=args.hidden_sizes)
    es.train(args)
    before, after = checkpoint("run", "models/0.pt")["agent"], checkpoint()["agent"]
    names = [name for name, _ in agent.named_parameters()]
    generation = dict(zip(names, sum(members, []), strict=True))
    assert len(diary()) == 12 and all(page["ended"] for page in diary())
    fitness, starts = [], []
    for i in range(6):
        agent.load_state_dict(before | {name: x[i] for name, x in generation.items()})
        act = lambda page: agent.act(np.stack(page["obs"][:-1]), {}).clip(-1, 1)
        mine = [page for page in diary() if np.allclose(act(page), page["actions"], atol=1e-5)]
        assert len(mine) == 2
        fitness.append(np.mean([sum(page["rewards"]) for page in mine]))
        starts.append({page["seed"] for page in mine})
    if args.common_starts:
        assert len(starts[0]) == 2 and all(start == starts[0] for start in starts)
    else:
        assert len(set.union(*starts)) == 12
    (row,) = [row for row in progress() if "fitness/mean" in row]
    assert row["fitness/mean"] == pytest.approx(np.mean(fitness))
    assert row["fitness/std"] == pytest.approx(np.std(fitness))
    assert (row["fitness/min"], row["fitness/max"]) == pytest.approx((min(fitness), max(fitness)))
    ranks = np.argsort(np.argsort(fitness)) / 5 - 0.5
    z_score = (fitness - np.mean(fitness)) / np.std(fitness)
    weights = torch.tensor({"rank": ranks, "zscore": z_score, "raw": np.array(fitness)}[args.fitness])
    for name in names:
        eps = (generation[name] - before[name]).double() / 0.2
        if args.mirrored_sampling:
            assert torch.allclose(eps[0::2], -eps[1::2], atol=1e-5)
        assert torch.unique(eps.abs().flatten(1), dim=0, return_inverse=True)[1].unique().numel() >= 3
        gradient = torch.tensordot(weights, eps, dims=1) / (6 * 0.2)
        step = gradient - args.weight_decay * before[name]
        expected = step if args.optimizer == "sgd" else step.sign()  # the first step of Adam
        assert torch.allclose(after[name] - before[name], 0.1 * expected.float(), atol=1e-4)


def test_noise_is_normal_and_new_in_each_generation_for_each_seed(es, members):
    es.train(short(es, population=100, sigma=0.25, total_timesteps=3000, learning_rate=1e-9))
    es.train(short(es, run_dir="other", population=100, sigma=0.25, seed=2))
    noise = [torch.cat([x.flatten(1) for x in m], dim=1)[0::2] for m in members]
    noise = torch.cat([(x - 0) for x in noise])
    steps = torch.cat([torch.cat([(x[0::2] - x[1::2]).flatten(1) / 2 for x in m], dim=1) for m in members])
    assert len(members) >= 3 and len(steps) == 50 * len(members)
    assert steps.mean().abs() < 0.01 and steps.std() == pytest.approx(0.25, rel=0.03)
    assert steps.T.corrcoef().fill_diagonal_(0).abs().max() < 0.5  # of parameters
    assert steps.corrcoef().fill_diagonal_(0).abs().max() < 0.9  # of members, 33 numbers each


@pytest.mark.parametrize("common", [True, False])
def test_starts_are_common_to_a_generation_or_to_nobody(es, diary, common):
    es.train(short(es, common_starts=common, episodes_per_member=2, total_timesteps=500))
    pages = diary()
    generations = [Counter(page["seed"] for page in pages[i : i + 12]) for i in range(0, len(pages), 12)]
    assert len(generations) > 1
    assert all(sorted(seeds.values()) == ([6, 6] if common else [1] * 12) for seeds in generations)
    assert len(set().union(*generations)) == (2 if common else 12) * len(generations)


def test_steps_and_episodes_are_counted_by_whole_generations(es, diary):
    """Environments with nothing left to play rest, and the normalizer is told of what was acted from."""
    kwargs = {"env": "probe_envs:Walk-v0", "edge": 0.3, "actions": "box"}
    es.train(short(es, env_kwargs=kwargs, num_envs=4, total_timesteps=200, normalize_obs=True))
    pages, rows = diary(), [row for row in progress() if "fitness/mean" in row]
    lengths, returns = np.array([(len(page["rewards"]), sum(page["rewards"])) for page in pages]).T
    assert len(pages) == 6 * len(rows) > 12 and all(page["ended"] for page in pages)
    assert len(set(lengths)) > 3
    lengths, returns = lengths.reshape(-1, 6), returns.reshape(-1, 6)
    ends = lengths.sum(1).cumsum()
    assert [row["step"] for row in rows] == ends.tolist() and ends[-2] < 200 <= ends[-1]
    for row, length, return_ in zip(rows, lengths, returns, strict=True):
        assert (row["fitness/min"], row["fitness/max"]) == pytest.approx((min(return_), max(return_)))
        assert row["train/episode_return"] == row["fitness/mean"] == pytest.approx(return_.mean())
        assert row["train/episode_length"] == pytest.approx(length.mean())
        assert row["reward/mean"] == pytest.approx(return_.sum() / length.sum())
    state, seen = checkpoint(), np.concatenate([page["obs"][:-1] for page in pages]).astype(float)
    assert state["run"]["env_steps"] == state["agent"]["obs_norm.count"] == len(seen) == ends[-1]
    assert np.allclose(state["agent"]["obs_norm.mean"], seen.mean(0))
    assert np.allclose(state["agent"]["obs_norm.var"], seen.var(0))


@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly_if_asked(es, anneal):
    es.train(short(es, total_timesteps=500, anneal_lr=anneal, learning_rate=0.1))
    rows = [row for row in progress() if "fitness/mean" in row]
    expected = [0.1 * (1 - anneal * step / 500) for step in [0, *(row["step"] for row in rows[:-1])]]
    assert [row["schedule/learning_rate"] for row in rows] == pytest.approx(expected) and len(rows) > 3


# ---------------------------------------------------------------------------------------------------- policy
@pytest.mark.parametrize("hidden_sizes", [(), (8,), (33, 7)])
@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 5, 3]), Box(-1, 1, (3,))], ids=str)
def test_the_policy_is_a_plain_network_without_choices_that_do_not_exist(es, space, hidden_sizes):
    torch.manual_seed(0)
    agent = make_agent(es, Box(-1, 1, (6,)), space, hidden_sizes=hidden_sizes, activation="relu")
    for p in agent.parameters():
        p.data.normal_()
    x = obs = torch.randn(50, 6)
    layers = [*pairwise(agent.parameters())][::2]
    assert [len(bias) for _, bias in layers[:-1]] == [*hidden_sizes]
    for i, (weight, bias) in enumerate(layers):
        x = torch.nn.functional.linear(x.relu() if i else x, weight, bias)
    if isinstance(space, MultiDiscrete):
        x = torch.stack([row[:, :n].argmax(1) for row, n in zip(x.chunk(3, 1), [2, 5, 3], strict=True)], 1)
    x = x.argmax(1) if isinstance(space, Discrete) else x
    assert np.allclose(agent.act(obs.numpy(), {}), x.detach(), atol=1e-5)


@pytest.mark.parametrize("action", ["discrete_start", "multi_discrete", "multi_binary_2d", "box_2d", "unbounded"])
@pytest.mark.parametrize("obs", ["float64", "discrete", "dict"])
def test_every_action_is_legal(es, obs, action):
    es.train(short(es, "probe_envs:Spaces-v0", env_kwargs={"obs": obs, "action": action}, sigma=3.0))
    assert len(probe_envs.Spaces.actions) > 40  # the environment asserts that each is legal


def test_images_and_odd_populations_are_refused(es):
    with pytest.raises(es.UsageError, match="Spaces-v0 shows images.* ppo.py"):
        es.train(short(es, "probe_envs:Spaces-v0", env_kwargs={"obs": "hwc"}))
    with pytest.raises(es.UsageError, match="--population 5 is odd"):
        es.train(short(es, population=5))
    es.train(short(es, population=5, mirrored_sampling=False))


# ------------------------------------------------------------------------------------------------- processes
def long(es, env, run_dir, **changes):
    options = dict(total_timesteps=700, eval_every=200, checkpoint_every=40, normalize_obs=True)
    return short(es, env, run_dir, population=10, hidden_sizes=(33,), **options | changes)


def team(size, args, kwargs_of_0=None) -> list[int]:
    """Trains in `size` processes, set up as torchrun does. Returns their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def process(rank):
        place = dict(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update(place)
        es = load_script("es", ALGOS / "es.py")  # anew: it looks where it is when it is loaded
        es.train(es.Args(**vars(args) | (kwargs_of_0 if kwargs_of_0 and not rank else {})))

    return [wait(pid) for pid in [fork(lambda r=r: process(r), Path(f"output-{r}")) for r in range(size)]]


@pytest.mark.parametrize("env", ["probe_envs:Walk-v0", "CartPole-v1", "Pendulum-v1"])
def test_the_numbers_do_not_depend_on_the_environments_and_processes_in_any_bit(es, env):
    limit = {"max_episode_steps": 25}
    make = lambda run_dir, **changes: long(es, env, run_dir, env_kwargs=limit, **changes)
    es.train(make("run"))
    es.train(make("one", num_envs=1))
    es.train(make("many", num_envs=16))
    es.train(make("async", num_envs=4, async_envs=True))
    assert team(2, make("team", num_envs=2)) == [0, 0]
    for other in ("one", "many", "async", "team"):
        assert progress(other) == progress() and equal(parts(other), parts()), other


def test_a_signal_to_process_0_stops_all_and_one_process_goes_on(es):
    pass
