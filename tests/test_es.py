"""Evolution Strategies: the estimate of the gradient, the episodes it is made of, and its processes."""

import math
import os
import re
import signal
import socket
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, fork, load_once, load_script, parts, progress, tiny, wait
from gymnasium.spaces import Box, Discrete, MultiDiscrete


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


gym.register("Diary-v0", lambda env, **kwargs: Diary(gym.make(env, **kwargs)), disable_env_checker=True)
generations = lambda: [row for row in progress() if "fitness/mean" in row]  # the others are evaluations


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
    """The parameters of all members: tensors (n, *shape), one for each parameter in each generation."""
    perturb, seen = es.perturb, []
    monkeypatch.setattr(es, "perturb", lambda *x, **y: seen.append(perturb(*x, **y)) or seen[-1])
    return seen


def short(es, env="Diary-v0", run_dir="run", **changes):
    """Arguments of one generation of walks, with a model before and after it."""
    kwargs = {"env": "probe_envs:Walk-v0", "actions": "box"} if env == "Diary-v0" else {}
    plain = dict(normalize_obs=False, eval_every=10**9, checkpoint_every=0, population=6, num_envs=3)
    return tiny(es, run_dir, **dict(env_id=env, env_kwargs=kwargs, total_timesteps=1) | plain | changes)


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
    """That of F = sum of x^2 is 2 theta; the constant that is taken off F makes the estimate a good one."""
    torch.manual_seed(0)
    theta, noise = torch.randn(2, 3, dtype=torch.float64), torch.randn(100_000, 2, 3, dtype=torch.float64)
    members = es.perturb(theta, noise, 0.3, mirrored)
    weights = members.square().sum((1, 2)) - theta.square().sum()
    gradient = es.es_gradient(weights, noise, 0.3, mirrored)
    eps = (members - theta) / 0.3
    assert torch.allclose(gradient, (weights[:, None, None] * eps).sum(0) / (len(members) * 0.3))
    assert torch.allclose(gradient, 2 * theta, atol=0.1)


def test_fitness_equals_numbers_worked_out_by_hand_and_ties_share_a_rank(es):
    shape = lambda how, *values: es.shape_fitness(torch.tensor(values, dtype=torch.float64), how).tolist()
    assert shape("rank", 3, -1, 200, 4, 0.5) == [0, -0.5, 0.5, 0.25, -0.25]
    assert shape("rank", 1, 1, 5, 0, 1) == [0, 0, 0.5, -0.5, 0]
    assert shape("rank", 7, 7, 7, 9) == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0.5])
    assert shape("rank", 2) == [0] and shape("raw", 2, -9) == [2, -9]
    assert shape("zscore", 1, 2, 6) == pytest.approx([x / math.sqrt(14 / 3) for x in (-2, -1, 3)])
    assert not any(shape("rank", 7, 7, 7) + shape("zscore", 7, 7, 7)), "no difference, no step"


# ------------------------------------------------------------------------------------------------ generation
@pytest.mark.parametrize("way", [
    dict(), dict(mirrored_sampling=False, fitness="zscore"), dict(common_starts=False, fitness="raw"),
    dict(optimizer="adam", weight_decay=0.0, hidden_sizes=()),
], ids=str)  # fmt: skip
def test_a_generation_is_algorithm_1(es, diary, members, way):
    """Its members are told from each other by what they would do in the episodes that were played."""
    options = dict(optimizer="sgd", learning_rate=0.1, weight_decay=0.3, sigma=0.2) | way
    args = short(es, episodes_per_member=2, **options)
    agent = es.Agent(es.Layout((2,)), Box(-1, 1, (1,)), args, torch.device("cpu"))
    es.train(args)
    before, after = checkpoint("run", "models/0.pt")["agent"], checkpoint()["agent"]
    generation = dict(zip([name for name, _ in agent.named_parameters()], members, strict=True))
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
    (row,), statistics = generations(), (np.mean(fitness), np.std(fitness), min(fitness), max(fitness))
    assert [row[f"fitness/{name}"] for name in ("mean", "std", "min", "max")] == pytest.approx(statistics)
    ranks, z_score = np.argsort(np.argsort(fitness)) / 5 - 0.5, (fitness - np.mean(fitness)) / np.std(fitness)
    weights = torch.tensor({"rank": ranks, "zscore": z_score, "raw": np.array(fitness)}[args.fitness])
    for name, x in generation.items():
        eps = (x - before[name]).double() / 0.2
        gradient = torch.tensordot(weights, eps, dims=1) / (6 * 0.2)
        step = gradient - args.weight_decay * before[name]
        expected = step if args.optimizer == "sgd" else step.sign()  # the first step of Adam
        assert torch.allclose(after[name] - before[name], 0.1 * expected.float(), atol=1e-4)


def test_noise_is_normal_mirrored_and_new_in_each_generation_for_each_seed(es, members):
    es.train(short(es, population=100, sigma=0.25, total_timesteps=3000, learning_rate=1e-9))
    es.train(short(es, run_dir="other", population=100, sigma=0.25, seed=2))
    theta = torch.cat([x.mean(0).flatten() for x in members])
    flat = torch.cat([x.flatten(1) for x in members], dim=1) - theta
    assert torch.allclose(flat[0::2], -flat[1::2], atol=1e-6)
    steps = torch.cat(flat[0::2].split(33, dim=1))  # 33 parameters
    assert steps.mean().abs() < 0.01 and steps.std() == pytest.approx(0.25, rel=0.03)
    assert len(steps) >= 150 and steps.corrcoef().fill_diagonal_(0).abs().max() < 0.9


@pytest.mark.parametrize("anneal", [True, False])
def test_steps_and_episodes_are_counted_by_whole_generations(es, diary, anneal):
    """Environments with nothing left to play rest, and the normalizer is told of what was acted from."""
    kwargs = {"env": "probe_envs:Walk-v0", "edge": 0.3, "actions": "box"}
    options = dict(normalize_obs=True, anneal_lr=anneal, learning_rate=0.1)
    es.train(short(es, env_kwargs=kwargs, num_envs=4, total_timesteps=200, **options))
    pages, rows = diary(), generations()
    assert len(pages) == 6 * len(rows) > 12 and all(page["ended"] for page in pages)
    by_6 = lambda what: np.array([what(page) for page in pages]).reshape(-1, 6)
    lengths, returns = by_6(lambda page: len(page["rewards"])), by_6(lambda page: sum(page["rewards"]))
    starts, ends = by_6(lambda page: page["seed"]), lengths.sum(1).cumsum()
    assert (starts == starts[:, :1]).all() and len(set(starts[:, 0])) == len(starts), "new in each generation"
    assert [row["step"] for row in rows] == ends.tolist() and ends[-2] < 200 <= ends[-1]
    for row, begin, length, return_ in zip(rows, [0, *ends], lengths, returns, strict=False):
        assert row["train/episode_return"] == pytest.approx(return_.mean())
        assert row["train/episode_length"] == pytest.approx(length.mean())
        assert row["reward/mean"] == pytest.approx(return_.sum() / length.sum())
        assert row["schedule/learning_rate"] == pytest.approx(0.1 * (1 - anneal * begin / 200))
    state, seen = checkpoint(), np.concatenate([page["obs"][:-1] for page in pages]).astype(float)
    assert state["run"]["env_steps"] == state["agent"]["obs_norm.count"] == len(seen) == ends[-1]
    assert np.allclose(state["agent"]["obs_norm.mean"], seen.mean(0))
    assert np.allclose(state["agent"]["obs_norm.var"], seen.var(0))


# ---------------------------------------------------------------------------------------------------- policy
@pytest.mark.parametrize("hidden_sizes", [(), (8,), (33, 7)])
@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 5, 3]), Box(-1, 1, (3,))], ids=str)
def test_the_policy_is_a_plain_network_without_choices_that_do_not_exist(es, space, hidden_sizes):
    torch.manual_seed(0)
    args = es.Args(hidden_sizes=hidden_sizes, activation="relu", normalize_obs=True)
    agent = es.Agent(es.Layout((60,)), space, args, torch.device("cpu"))
    seen = {"obs_norm.mean": torch.full((60,), 0.5), "obs_norm.var": torch.full((60,), 4.0)}
    agent.load_state_dict(seen, strict=False)
    for p in agent.parameters():
        p.data.normal_()
    obs = torch.randn(50, 60)
    x = (obs - 0.5) / 2
    layers = [*pairwise(agent.parameters())][::2]
    assert [len(bias) for _, bias in layers[:-1]] == [*hidden_sizes]
    for i, (weight, bias) in enumerate(layers):
        x = torch.nn.functional.linear(x.relu() if i else x, weight, bias)
    if isinstance(space, MultiDiscrete):
        x = torch.stack([row[:, :n].argmax(1) for row, n in zip(x.chunk(3, 1), [2, 5, 3], strict=True)], 1)
    x = x.argmax(1) if isinstance(space, Discrete) else x
    action = agent.act(obs.numpy(), {})
    assert np.allclose(action, x.detach(), atol=1e-3)
    assert np.array_equal(agent.act(obs[:3].numpy(), {}), action[:3])  # to the last bit


@pytest.mark.parametrize("action", ["discrete_start", "multi_discrete_2d", "multi_binary_2d", "box_2d"])
@pytest.mark.parametrize("obs", ["float64", "dict"])
def test_every_action_is_legal(es, obs, action):
    es.train(short(es, "probe_envs:Spaces-v0", env_kwargs={"obs": obs, "action": action}, sigma=3.0))
    assert len(probe_envs.Spaces.actions) > 40  # the environment asserts that each is legal


def test_a_member_plays_alike_in_any_company_with_images_too(es):
    args = es.Args(hidden_sizes=(4,))
    layout = es.Layout((3, 12, 12), np.uint8, [(3, 12, 12)])
    agent = es.Agent(layout, Discrete(3), args, torch.device("cpu"))
    members = {name: torch.randn(6, *p.shape) for name, p in agent.named_parameters()}
    obs = np.random.default_rng(0).integers(0, 256, (6, 3, 12, 12), dtype=np.uint8)
    together = agent.act_each(members, obs)
    for i in range(6):
        assert (
            agent.act_each({name: x[i : i + 1] for name, x in members.items()}, obs[i : i + 1]) == together[i]
        )
    es.train(short(es, "probe_envs:Spaces-v0", env_kwargs={"obs": "hwc"}, population=4, total_timesteps=50))


def test_odd_populations_are_refused(es):
    with pytest.raises(es.UsageError, match="--population 5 is odd"):
        es.train(short(es, population=5))
    es.train(short(es, population=5, mirrored_sampling=False))


def test_another_optimizer_is_refused_by_resume(es):
    es.train(short(es, optimizer="adam"))
    with pytest.raises(es.UsageError, match="--init-from"):
        es.train(es.parse_args(["--resume", "run", "--optimizer", "sgd"]))


def test_a_generation_ends_without_a_time_limit(es):
    es.train(short(es, "probe_envs:Endless-v0", max_episode_steps=7, eval_max_steps=7, population=4))
    assert {row["train/episode_length"] for row in generations()} == {7.0}


# ------------------------------------------------------------------------------------------------- processes
def longer(es, env, run_dir, **changes):
    options = dict(total_timesteps=400, eval_every=150, checkpoint_every=20, normalize_obs=True)
    return short(es, env, run_dir, population=10, hidden_sizes=(33,), **options | changes)


def team(size, args, rank_1=None) -> list[int]:
    """Trains in `size` processes, set up as torchrun does, process 1 with rank_1. Returns the exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))

    def process(rank):
        os.environ.update(place, RANK=str(rank))
        es = load_once.__wrapped__("es", ALGOS / "es.py")  # anew: it looks for its place when it is loaded
        es.train(es.Args(**vars(rank_1 if rank == 1 and rank_1 else args)))

    pids = [fork(lambda rank=rank: process(rank), Path(f"output-{rank}")) for rank in range(size)]
    return [wait(pid) for pid in pids]


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_numbers_do_not_depend_on_the_environments_and_processes_in_any_bit(es, env):
    make = lambda name, **x: longer(es, env, name, env_kwargs={"max_episode_steps": 25}, **x)
    es.train(make("run"))
    es.train(make("one", num_envs=1))
    es.train(make("many", num_envs=16))
    es.train(make("async", num_envs=4, async_envs=True))
    assert team(3, make("team", num_envs=2)) == [0, 0, 0]
    for other in ("one", "many", "async", "team"):
        assert progress(other) == progress() and equal(parts(other), parts()), other


def test_process_0_hears_a_signal_and_stops_all_and_one_process_goes_on(es):
    """Both processes get the signal, as from torchrun."""
    walk = {"length": 16, "edge": 100}  # 5 episodes of 16 steps for each process
    make = lambda name, **x: longer(es, "probe_envs:Walk-v0", name, env_kwargs=walk | x, eval_every=0)
    assert team(2, make("team", signal="SIGTERM", after=100)) == [128 + signal.SIGTERM, 0]
    assert checkpoint("team")["run"]["env_steps"] == 160, "the second generation was not finished"
    es.train(es.replace(es.parse_args(["--resume", "team"]), env_kwargs=walk))
    es.train(make("run"))
    assert progress("team") == progress() and equal(parts("team"), parts())


def test_a_lost_process_ends_the_others_in_one_line_and_fewer_go_on(es):
    walk = {"length": 16, "edge": 100}  # 160 steps a generation
    make = lambda name, **x: longer(es, "probe_envs:Walk-v0", name, env_kwargs=walk | x, checkpoint_every=1)
    assert team(3, make("team"), rank_1=make("team", signal="SIGKILL", after=130)) == [1, -9, 1]
    for rank in (0, 2):
        text = Path(f"output-{rank}").read_text()
        line = r"^.*: a process is lost; --resume goes on with any number \(.*\)$"
        assert len(re.findall(line, text, re.M)) == 1 and "Traceback" not in text
    assert checkpoint("team")["run"]["env_steps"] == 320, "of 400 steps and more"
    resumed = es.replace(es.parse_args(["--resume", "team"]), env_kwargs=walk)
    assert team(2, resumed) == [0, 0]
    es.train(make("run"))
    assert progress("team") == progress() and equal(parts("team"), parts())
