"""Tests of Evolution Strategies' own parts. What every script must do is tested elsewhere."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ALGOS, TESTS, checkpoint, equal, fork, load_script, points, progress, wait
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe_envs import Boundary, Boxes, Spaces, boundary_length, boundary_return

es = load_script(ALGOS / "es.py")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=3, population=6,
    episodes_per_member=1, hidden_sizes=(8,), total_timesteps=1,
)  # fmt: skip


def quick_args(env: str, run_dir="run", env_kwargs=None, **changes):
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    return es.Args(**QUICK | given | changes)


def quick(env: str, **changes) -> np.ndarray:
    """A training of a moment; with total_timesteps=1 it is one generation."""
    return es.train(quick_args(env, **changes))


@pytest.fixture
def generations(monkeypatch):
    """What each generation had and did: theta before, members, seeds, table, gradient."""
    seen, real = [], {name: getattr(es, name) for name in ("perturb", "play", "es_gradient")}

    def perturb(theta, noise, *args):
        seen.append(dict(theta=theta.clone(), noise=noise.clone()))
        return real["perturb"](theta, noise, *args)

    def play(envs, policy, members, seeds):
        table = real["play"](envs, policy, members, seeds)
        seen[-1] |= dict(members=members.clone(), seeds=list(seeds), table=table.copy())
        return table

    def es_gradient(weights, *args):
        gradient = real["es_gradient"](weights, *args)
        seen[-1] |= dict(weights=weights.clone(), gradient=gradient.clone())
        return gradient

    for function in (perturb, play, es_gradient):
        monkeypatch.setattr(es, function.__name__, function)
    return seen


# --------------------------------------------------------------------------------------------- gradient
def estimates(fitness, theta, n, sigma, mirrored, repeats):
    """Estimates (repeats, P) of the gradient of fitness at theta, each from n members."""
    found = []
    for _ in range(repeats):
        noise = torch.randn(n // 2 if mirrored else n, len(theta), dtype=torch.float64)
        members = es.perturb(theta, noise, sigma, mirrored)
        assert members.shape == (n, len(theta))
        found.append(es.es_gradient(fitness(members), noise, sigma, mirrored))
    return torch.stack(found)


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_gradient_of_a_linear_fitness_is_right_in_expectation(mirrored):
    torch.manual_seed(0)
    theta, slope = torch.randn(2, 5, dtype=torch.float64)
    found = estimates(lambda members: members @ slope + 0.3, theta, 20, 0.5, mirrored, 4000)
    error = found.std(0) / 4000**0.5
    assert (found.mean(0) - slope).abs().max() < 4 * error.max() < 0.1 * slope.norm()


def test_mirrored_sampling_halves_the_variance():
    """F(x) = c + a x: each coordinate has the variance (c^2 / sigma^2 + |a|^2 + a_j^2) / n; mirrored, without
    the constant but from half the noise, 2 (|a|^2 + a_j^2) / n. With this c that is half on average."""
    torch.manual_seed(0)
    theta, slope = torch.zeros(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    n, sigma, linear = 20, 0.5, (slope.square().sum() + slope.square()) / 20
    constant = sigma * (3 * n * linear.mean()).sqrt()
    fitness = lambda members: constant + members @ slope
    variances = [estimates(fitness, theta, n, sigma, m, 8_000).var(0).mean() for m in (False, True)]
    assert variances[1] / (2 * linear.mean()) == pytest.approx(1, abs=0.03)
    assert variances[1] / variances[0] == pytest.approx(0.5, abs=0.02)


def test_a_constant_fitness_moves_nothing():
    noise = torch.randn(8, 5)
    assert not es.es_gradient(torch.full((16,), 7.0), noise, 0.1, True).any()
    for how in ("rank", "zscore"):
        assert not es.shape_fitness(torch.full((16,), 7.0, dtype=torch.float64), how).any()


def test_the_gradient_equals_numbers_worked_out_by_hand():
    noise = torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    # 1 / (2 x 0.5) (3 [1, 0] + 5 [2, -1])
    assert es.es_gradient(torch.tensor([3.0, 5.0]), noise, 0.5, False).tolist() == [13.0, -5.0]
    # 1 / (4 x 0.5) ((3 - 1) [1, 0] + (5 - 9) [2, -1])
    assert es.es_gradient(torch.tensor([3.0, 1.0, 5.0, 9.0]), noise, 0.5, True).tolist() == [-3.0, 2.0]
    members = es.perturb(torch.tensor([10.0, 20.0]), noise, 0.5, True)
    assert members.tolist() == [[10.5, 20.0], [9.5, 20.0], [11.0, 19.5], [9.0, 20.5]]
    assert es.perturb(torch.tensor([10.0, 20.0]), noise, 0.5, False).tolist() == members[::2].tolist()


# ---------------------------------------------------------------------------------------------- fitness
def test_ranks_equal_numbers_worked_out_by_hand_and_ties_share_theirs():
    rank = lambda *values: es.shape_fitness(torch.tensor(values, dtype=torch.float64), "rank").tolist()
    assert rank(3.0, -1.0, 200.0, 4.0, 0.5) == [0.0, -0.5, 0.5, 0.25, -0.25]
    assert rank(1.0, 1.0, 5.0, 0.0, 1.0) == [0.0, 0.0, 0.5, -0.5, 0.0]
    assert rank(2.0) == [0.0]


def test_ranks_are_invariant_under_monotone_maps():
    torch.manual_seed(0)
    fitness = torch.randn(50, dtype=torch.float64)
    fitness[10:20] = fitness[5]
    weights = es.shape_fitness(fitness, "rank")
    for change in (torch.exp, torch.atan, lambda x: 1e6 * x - 3, lambda x: x**3):
        assert torch.equal(es.shape_fitness(change(fitness), "rank"), weights)
    assert not torch.equal(es.shape_fitness(-fitness, "rank"), weights)


def test_zscore_and_raw():
    fitness = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert torch.equal(es.shape_fitness(fitness, "raw"), fitness)
    expected = (fitness.numpy() - 3) / np.std([1, 2, 6])
    np.testing.assert_allclose(es.shape_fitness(fitness, "zscore"), expected, rtol=1e-6)


# ----------------------------------------------------------------------------------------------- policy
SPACES = {
    "discrete": Discrete(4), "multi_discrete": MultiDiscrete([2, 5, 3]), "box": Box(-1, 1, (3,)),
}  # fmt: skip


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("hidden_sizes", [(), (8,), (33, 7)])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_each_member_acts_as_a_network_of_its_own_would(space, hidden_sizes, activation):
    torch.manual_seed(0)
    args = es.Args(hidden_sizes=hidden_sizes, activation=activation, normalize_obs=True)
    policy = es.Policy(Box(-1, 1, (6,)), space, args)
    policy.obs_norm.merge(100.0, np.full(6, 50.0), np.full(6, 425.0))  # mean 0.5, variance 4
    members, obs = torch.randn(10, policy.theta.numel()), torch.randn(10, 6)
    for theta, x, action in zip(members, obs, policy(members, obs).detach(), strict=True):
        layers, x = [], (x - 0.5) / 2
        for fan_in, fan_out in zip([6, *hidden_sizes], [*hidden_sizes, policy.shapes[-1][1]], strict=True):
            layers.append(torch.nn.Linear(fan_in, fan_out))
            layers[-1].weight.data = theta[: fan_in * fan_out].view(fan_in, fan_out).T
            layers[-1].bias.data = theta[fan_in * fan_out : (fan_in + 1) * fan_out]
            theta = theta[(fan_in + 1) * fan_out :]
        assert not len(theta), "every parameter is used"
        for layer in layers[:-1]:
            x = getattr(torch.nn.functional, activation)(layer(x))
        x = layers[-1](x).detach()
        if isinstance(space, Box):
            torch.testing.assert_close(action, x)
        else:
            sizes = [4] if isinstance(space, Discrete) else [2, 5, 3]
            choices = [row[:size].argmax() for row, size in zip(x.view(len(sizes), -1), sizes, strict=True)]
            assert action.tolist() == choices


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("widths", [(4, 16, 2), (17, 33, 6), (376, 13, 17), (3, 1)])
def test_an_action_does_not_depend_on_the_rest_of_the_batch_in_any_bit(widths, activation):
    torch.manual_seed(0)
    args = es.Args(hidden_sizes=widths[1:-1], activation=activation)
    policy = es.Policy(Box(-1, 1, (widths[0],)), Box(-1, 1, (widths[-1],)), args)
    members, obs = torch.randn(70, policy.theta.numel()), torch.randn(70, widths[0])
    whole = policy(members, obs)
    for size in (1, 2, 3, 5, 8, 16, 31, 64):
        rows = torch.randperm(70)[:size]
        assert torch.equal(policy(members[rows], obs[rows]), whole[rows])


def test_the_first_actions_are_near_0_and_the_layers_orthogonal():
    policy = es.Policy(Box(-1, 1, (6,)), Box(-1, 1, (3,)), es.Args(hidden_sizes=(8,)))
    first, last = policy.theta[:48].view(6, 8), policy.theta[56:80].view(8, 3)
    torch.testing.assert_close(first @ first.T, 2 * torch.eye(6))
    torch.testing.assert_close(last.T @ last, 2e-4 * torch.eye(3))
    assert not policy.theta[48:56].any() and not policy.theta[80:].any(), "biases"


def test_the_normalizer_equals_numpy():
    rng, norm = np.random.default_rng(0), es.SumsNorm((3,))
    seen = np.empty((0, 3))
    for size in (1, 7, 300, 2, 1000):
        batch = rng.normal([1000.0, 0.0, -5.0], [2.0, 0.1, 30.0], (size, 3))
        norm.merge(float(size), batch.sum(0), (batch**2).sum(0))
        seen = np.concatenate([seen, batch])
        np.testing.assert_allclose(norm.mean, seen.mean(0), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(norm.var.sqrt(), seen.std(0), rtol=2e-3, atol=1e-5)
    x = torch.tensor(seen[:50], dtype=torch.float32)
    np.testing.assert_allclose(norm(x), (seen[:50] - seen.mean(0)) / seen.std(0), atol=0.01)


# ----------------------------------------------------------------------------------------------- episodes
def play_all(env: str, num_envs: int, members, seeds, **changes):
    """play() with the policy and as many of the members as there are seeds; the steps that Boundary saw."""
    args = quick_args(env, num_envs=num_envs, **changes)
    envs = es.make_envs(args, num_envs)
    torch.manual_seed(0)
    policy = es.Policy(envs.single_observation_space, envs.single_action_space, args)
    if members is None:
        members = torch.randn(len(seeds), policy.theta.numel())
    Boundary.steps.clear()
    with torch.inference_mode():
        table = es.play(envs, policy, members, seeds)
    envs.close()
    return table


@pytest.mark.parametrize("num_envs", [1, 3, 4, 7, 12])
def test_episodes_are_whole_and_credited_to_their_member(num_envs):
    """7 episodes; with 12 environments, or when the last ones play, some have none and count for nothing."""
    seeds = [40, 11, 52, 33, 74, 25, 66]
    table = play_all("Boundary", num_envs, None, seeds)
    free_at, played = [0] * num_envs, [0] * num_envs
    for i in range(7):
        env = min(range(num_envs), key=lambda k: free_at[k])  # the first that is free
        number = seeds[env] if env < 7 else seeds[-1]  # of the first reset
        episode = played[env]
        length = boundary_length(number, episode)
        assert table[i, :2].tolist() == [boundary_return(number, episode), length]
        # observations [number, episode, t, end] for t = 0 ... length - 1, the final one is not acted from
        times = sum(range(length))
        squares = sum(t**2 for t in range(length))
        expected = [length * number, length * episode, times, 0]
        expected += [length * number**2, length * episode**2, squares, 0]
        assert table[i, 2:].tolist() == expected
        free_at[env] += length
        played[env] += 1
    assert len(table) == 7
    assert len(Boundary.steps) == table[:, 1].sum(), "environments without an episode rest"


REAL = ["Walk", "CartPole-v1", "Pendulum-v1", "LunarLander-v3", "InvertedPendulum-v5"]


@pytest.mark.parametrize("env_id", REAL)
def test_an_episode_does_not_depend_on_its_environment_in_any_bit(env_id):
    seeds = list(range(100, 111))
    limit = dict(max_episode_steps=60)
    tables = [play_all(env_id, n, None, seeds, **limit) for n in (1, 4, 16)]
    tables.append(play_all(env_id, 4, None, seeds, async_envs=True, **limit))
    assert len(set(tables[0][:, 1])) > 1 or env_id == "Pendulum-v1", "lengths differ"
    for table in tables[1:]:
        assert np.array_equal(table, tables[0])


def test_steps_and_episodes_are_counted_member_by_member(generations):
    """total_timesteps is reached by whole generations; logged episodes are those of the table, in order."""
    quick("Boundary", total_timesteps=200, checkpoint_every=100, num_envs=4)
    assert all(len(generation["table"]) == 6 for generation in generations)
    table = np.concatenate([generation["table"] for generation in generations])
    ends = np.cumsum(table[:, 1]).astype(int)
    assert ends[-7] < 200 <= ends[-1]
    assert points()["train/episode_return"] == list(zip(ends, table[:, 0], strict=True))
    assert points()["train/episode_length"] == list(zip(ends, table[:, 1], strict=True))
    assert checkpoint()["run"]["env_steps"] == ends[-1]
    assert [int(row["step"]) for row in progress()] == ends[5::6].tolist()
    for row, generation in zip(progress(), generations, strict=True):
        returns = generation["table"][:, 0]
        assert float(row["fitness/mean"]) == returns.mean() and float(row["fitness/max"]) == returns.max()
        assert float(row["fitness/min"]) == returns.min() and float(row["fitness/std"]) == returns.std()
        assert float(row["reward/mean"]) == returns.sum() / generation["table"][:, 1].sum()


def test_members_start_alike_or_each_from_a_state_of_its_own(generations):
    quick("Walk", episodes_per_member=2, total_timesteps=200)
    assert len(generations) > 1
    for generation in generations:
        seeds = generation["seeds"]
        assert seeds == seeds[:2] * 6 and seeds[0] != seeds[1]
    assert generations[0]["seeds"] != generations[1]["seeds"]
    quick("Walk", run_dir="other", common_starts=False, episodes_per_member=2)
    assert len(set(generations[-1]["seeds"])) == 12


def test_fitness_is_the_mean_over_the_episodes_of_a_member(generations):
    quick("Walk", episodes_per_member=3, fitness="raw")
    (generation,) = generations
    assert len(generation["members"]) == 18
    for i, weight in enumerate(generation["weights"]):
        rows = slice(3 * i, 3 * i + 3)
        assert torch.equal(generation["members"][rows], generation["members"][3 * i].expand(3, -1))
        assert weight.item() == pytest.approx(generation["table"][rows, 0].mean(), rel=1e-6)
    assert len(np.unique(generation["members"], axis=0)) == 6


# ------------------------------------------------------------------------------------------------- update
@pytest.fixture
def before_and_after(monkeypatch):
    """theta at the start and at the end of a training."""
    agents = []

    class Watched(es.Leader):
        def __init__(self, team, args, agent, **parts):
            agents.append(agent)
            self.first = copy.deepcopy(agent)
            agents.append(self.first)
            super().__init__(team, args, agent, **parts)

    monkeypatch.setattr(es, "Leader", Watched)
    return lambda: (agents[-1].theta.detach(), agents[-2].theta.detach())


def test_one_step_of_sgd_with_weight_decay(before_and_after, generations):
    quick("Walk", optimizer="sgd", learning_rate=0.1, weight_decay=0.3, fitness="zscore")
    before, after = before_and_after()
    (generation,) = generations
    assert torch.equal(generation["theta"], before)
    expected = before + 0.1 * (generation["gradient"] - 0.3 * before)
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)
    fitness = torch.from_numpy(generation["table"][:, 0])
    torch.testing.assert_close(generation["weights"], es.shape_fitness(fitness, "zscore").float())
    assert generation["gradient"].abs().min() > 0


def test_one_step_of_adam_moves_by_the_learning_rate(before_and_after, generations):
    quick("Walk", optimizer="adam", learning_rate=0.1, weight_decay=0.0)
    before, after = before_and_after()
    expected = before + 0.1 * generations[0]["gradient"].sign()
    torch.testing.assert_close(after, expected, atol=1e-3, rtol=0)


def test_the_learning_rate_falls_to_0_if_asked():
    quick("Walk", total_timesteps=500, anneal_lr=True, learning_rate=0.1)
    rows = progress()
    steps = [0, *(int(row["step"]) for row in rows[:-1])]
    expected = [0.1 * (1 - step / 500) for step in steps]
    assert [float(row["schedule/learning_rate"]) for row in rows] == pytest.approx(expected)
    quick("Walk", run_dir="other", total_timesteps=500, learning_rate=0.1)
    assert {row["schedule/learning_rate"] for row in progress("other")} == {"0.1"}


def test_noise_differs_between_generations_and_seeds_and_members(generations):
    quick("Walk", total_timesteps=300)
    quick("Walk", run_dir="other", seed=2)
    noise = [generation["noise"] for generation in generations]
    assert len(noise) >= 3
    rows = torch.cat(noise)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert all(x.shape[0] == 3 for x in noise), "half of the population"
    assert abs(torch.corrcoef(rows).fill_diagonal_(0)).max() < 0.6, "no row is another one scaled"


def test_sigma_is_the_deviation_of_the_members(generations):
    quick("Walk", sigma=0.25, population=200, mirrored_sampling=False)
    (generation,) = generations
    assert generation["noise"].shape[0] == 200
    steps = generation["members"] - generation["theta"]
    assert steps.std().item() == pytest.approx(0.25, rel=0.03)


def test_normalize_obs_sees_every_observation_of_all_members(generations):
    quick("Walk", normalize_obs=True, total_timesteps=200)
    count = sum(g["table"][:, 1].sum() for g in generations)
    total, squares = np.split(sum(g["table"][:, 2:].sum(0) for g in generations), 2)
    agent = checkpoint()["agent"]
    assert agent["obs_norm.count"] == count == checkpoint()["run"]["env_steps"]
    np.testing.assert_allclose(agent["obs_norm.mean"], total / count, rtol=1e-5)
    np.testing.assert_allclose(agent["obs_norm.var"], squares / count - (total / count) ** 2, rtol=1e-4)


ACTIONS = ["discrete_start", "multi_discrete", "multi_binary_2d", "box_2d", "unbounded"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("obs", ["float64", "discrete", "dict"])
def test_spaces(action, obs):
    Spaces.actions.clear()
    quick("Spaces", env_kwargs={"obs": obs, "action": action})
    assert len(Spaces.actions) > 40  # the environment asserts that each is legal


def test_actions_are_stretched_to_the_bounds_of_each_dimension():
    quick("Box", population=30, sigma=3.0)
    low, high = np.min(Boxes.actions, axis=0), np.max(Boxes.actions, axis=0)
    assert low.tolist() == [-1, -2] and high.tolist() == [3, 2]


def test_wrong_options_end_in_one_clear_line(capsys):
    def said(*flags: str) -> str:
        before, sys.argv = sys.argv, ["es.py", *flags]
        try:
            es.main()
        except SystemExit as stop:
            assert stop.code == 2
        finally:
            sys.argv = before
        return capsys.readouterr().err

    assert "--population 5 is odd" in said("--population", "5")
    assert "--sigma is 0" in said("--sigma", "0")
    assert "--population is 0" in said("--population", "0")
    image = json.dumps({"obs": "hwc"})
    line = said("--env-id", "probe_envs:Spaces-v0", "--env-kwargs", image)
    assert "vector" in line and "ppo.py" in line and line.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_checkpoint_leaves_no_trace():
    quick("Walk", total_timesteps=500)
    quick("Walk", run_dir="other", total_timesteps=500, checkpoint_every=100)
    assert progress("other") == progress() and equal(checkpoint("other")["agent"], checkpoint()["agent"])


# ------------------------------------------------------------------------------------- several processes
LONGER = dict(total_timesteps=700, eval_every=200, checkpoint_every=300, normalize_obs=True, population=10)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def team(size: int, action, *args) -> list[int]:
    """Starts action(rank, ...) in `size` processes, set up as torchrun does. Returns their exit codes."""
    place = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())

    def process(rank):
        os.environ.update(place, RANK=str(rank))
        action(rank, *args)

    pids = [fork(lambda rank=rank: process(rank), Path(f"output-{rank}")) for rank in range(size)]
    return [wait(pid) for pid in pids]


def train_rank(rank, changes):
    es.train(quick_args("Walk", **LONGER | changes))


def same_numbers(one, two):
    """Parameters, optimizer, normalizer, log: everything but the clock."""
    assert progress(one) == progress(two) and points(one) == points(two)
    states = [checkpoint(run) for run in (one, two)]
    for state in states:
        state["run"]["row"] = {k: v for k, v in state["run"]["row"].items() if k[:6] != "speed/"}
        state["run"]["seconds"] = 0
    assert equal(*states)


@pytest.mark.parametrize("size, num_envs", [(2, 3), (3, 1)])
def test_any_number_of_processes_gives_the_numbers_of_one(size, num_envs):
    quick("Walk", **LONGER)
    assert team(size, train_rank, dict(run_dir="team", num_envs=num_envs)) == [0] * size
    same_numbers("run", "team")
    assert len(points()["train/episode_return"]) > 30


def test_processes_share_the_episodes_and_exchange_only_their_results():
    """Each process plays its part; what travels is that part of the table, the table, and four numbers."""

    def watched(rank):
        played, sent = [], []
        real_play, real_gather, real_broadcast = es.play, es.dist.gather, es.dist.broadcast

        def play(envs, policy, members, seeds):
            played.append(len(members))
            return real_play(envs, policy, members, seeds)

        def gather(block, blocks):
            sent.append(["gather", *block.shape])
            real_gather(block, blocks)

        def broadcast(values, src):
            sent.append(["broadcast", *values.shape])
            real_broadcast(values, src)

        es.play, es.dist.gather, es.dist.broadcast = play, gather, broadcast
        es.train(quick_args("Walk", population=10, total_timesteps=200))
        Path(f"seen-{rank}").write_text(json.dumps([played, sent]))

    assert team(3, watched) == [0] * 3
    for rank, share in enumerate((3, 3, 4)):
        played, sent = json.loads(Path(f"seen-{rank}").read_text())
        assert played == [share] * len(played) and len(played) > 1
        generation = [["broadcast", 4], ["gather", 4, 2 + 2 * 2], ["broadcast", 10, 2 + 2 * 2]]
        assert sent == generation * len(played) + [["broadcast", 4]]


def test_a_lost_process_leaves_a_checkpoint_that_any_number_of_processes_resumes():
    def killed(rank):
        fatal = {"signal": "SIGKILL", "after": 150} if rank == 1 else {}
        sys.argv = ["es.py"]
        es.train(quick_args("Walk", run_dir="team", env_kwargs=fatal, **LONGER))

    assert team(2, killed) == [1, -signal.SIGKILL]
    said = Path("output-0").read_text().splitlines()[-1]
    steps = [int(row["step"]) for row in progress("team")]
    how = "to go on with any number of processes: python es.py --resume team"
    assert said.startswith("es.py: lost one of 2 processes (")
    assert said.endswith(f" has the checkpoint of step {steps[-1]}; {how}")
    assert checkpoint("team")["run"]["env_steps"] == steps[-1] > 0
    assert steps[-1] % 300, "not a checkpoint that was due anyway"
    args = json.loads(Path("team/args.json").read_text()) | {"env_kwargs": "{}"}
    Path("team/args.json").write_text(json.dumps(args))

    def resumed(rank):
        es.train(es.parse_args(["--resume", "team"]))

    for path in Path("team").glob("events*"):  # as in conftest.age
        second = path.name.split(".")[3]
        path.rename(path.with_name(path.name.replace(second, str(int(second) - 10), 1)))
    assert team(3, resumed) == [0, 0, 0]
    quick("Walk", **LONGER)
    assert equal(checkpoint("team")["agent"], checkpoint("run")["agent"])
    assert progress("team") == progress("run")


def test_the_loss_of_process_0_ends_the_others():
    def killed(rank):
        fatal = {"signal": "SIGKILL", "after": 150} if rank == 0 else {}
        es.train(quick_args("Walk", run_dir="team", env_kwargs=fatal, **LONGER))

    assert team(2, killed) == [-signal.SIGKILL, 1]
    assert "lost one of 2 processes" in Path("output-1").read_text().splitlines()[-1]


def test_a_reward_that_is_not_finite_ends_all_processes_with_one_line():
    def broken(rank):
        sys.argv = ["es.py"]
        es.parse_args = lambda: quick_args(
            "Broken", run_dir="team", env_kwargs={"what": "reward", "after": 100}, **LONGER
        )
        es.main()

    assert team(2, broken) == [1, 1]
    said = [Path(f"output-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert "es.py: reward is not finite at step" in said[0][-1]
    assert not [line for line in said[1] if "es.py" in line]


def test_processes_whose_parameters_differ_stop():
    def drifts(rank):
        real = es.es_gradient
        es.es_gradient = lambda *args: real(*args) * (1 + 1e-3 * rank)
        es.train(quick_args("Walk", run_dir="team", **LONGER))

    assert team(2, drifts) == [1, 1]
    assert "process 1 has other parameters than process 0" in Path("output-1").read_text()


def test_too_few_episodes_for_the_processes_end_in_one_line():
    def starts(rank):
        sys.argv = ["es.py", "--population", "2", "--num-envs", "1", "--run-dir", "team"]
        es.main()

    assert team(3, starts) == [2, 2, 2]
    for rank in range(3):
        line = "es.py: 2 episodes are too few for 3 processes: raise --population"
        assert Path(f"output-{rank}").read_text().splitlines() == [line]


def test_torchrun_with_two_processes_stops_and_resumes_at_a_signal():
    launch = "-m torch.distributed.run --nproc-per-node 2 --master-port"
    words = [sys.executable, *launch.split(), free_port()]
    flags = "--env-id probe_envs:Walk-v0 --population 200 --num-envs 16 --run-dir run"
    flags += " --total-timesteps 1000000 --eval-every 0 --checkpoint-every 1000 --device cpu"
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([*words, str(ALGOS / "es.py"), *flags.split()], env=env, **pipes) as torchrun:
        deadline = time.time() + 60
        while not (Path("run/checkpoint.pt").exists() and checkpoint()["run"]["env_steps"]):
            assert torchrun.poll() is None and time.time() < deadline, torchrun.stderr.read()
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGTERM)
        said = torchrun.communicate(timeout=60)[1]
    assert f"has the checkpoint of step {checkpoint()['run']['env_steps']}; to go on: python " in said
    saved = checkpoint()["run"]["env_steps"]
    assert progress()[-1]["step"] == str(saved)
    es.train(es.replace(es.parse_args(["--resume", "run"]), total_timesteps=saved + 300))
    assert checkpoint()["run"]["env_steps"] >= saved + 300


# -------------------------------------------------------------------------------------------------- learning
LEARN = dict(device="cpu", eval_every=0, checkpoint_every=0, eval_episodes=20, run_dir="run")


def test_cartpole_is_learned():
    args = es.parse_args(["--env-id", "CartPole-v1", "--seed", "1"])
    assert es.train(es.replace(args, total_timesteps=50_000, **LEARN)).mean() >= 475
