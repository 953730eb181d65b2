"""Q-learning: its four rules, its table, its states and what it explores."""

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import checkpoint, load_script, progress, tiny
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Tuple

learned = lambda: checkpoint()["agent"]["q_values"].numpy()  # (tables, S, A)
rollout = lambda: [step for step in probe_envs.Boundary.steps if not step[0]]


@pytest.fixture
def ql():
    return load_script("q_learning")


def short(ql, env, run_dir="run", env_kwargs=None, **changes):
    """Arguments for a probe, or for the environment of an id with a version; evaluated at the end only."""
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    plain = dict(env_id=env_id, env_kwargs=env_kwargs or {}, eval_every=0, checkpoint_every=0)
    return tiny(ql, run_dir, **plain | changes)


def test_next_value_equals_numbers_worked_out_by_hand(ql):
    learner, judge = np.array([[1.0, 4, 2], [3, 0, -3]]), np.array([[10.0, 20, 30], [40, 50, 60]])
    value = lambda rule: ql.next_value(rule, learner, judge, np.array([2, 1]), 0.3).tolist()
    assert value("q_learning") == [4, 3] and value("sarsa") == [2, 0]
    assert value("expected_sarsa") == pytest.approx([0.7 * 4 + 0.3 * 7 / 3, 0.7 * 3])
    assert value("double") == [20, 40], "the judge's value of the learner's best action"


def test_k_equal_pairs_move_as_far_as_k_updates_in_a_row_to_their_mean_target(ql):
    index, target = np.array([4, 1, 4, 4, 0, 1]), np.array([1.0, 9, 4, 7, 2, 7])  # means 4, 8, 2
    for order in slice(None), slice(None, None, -1):
        values = np.array([5.0, 6, 7, 8, 9])
        ql.update_table(values, index[order], target[order], 0.3)
        assert values == pytest.approx([2 + 0.7 * 3, 8 - 0.7**2 * 2, 7, 8, 4 + 0.7**3 * 5])


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("rule", ["q_learning", "sarsa", "expected_sarsa", "double"])
def test_every_update_is_of_a_true_transition(ql, monkeypatch, rule, num_envs):
    """A terminal state has no future, one where a time limit cuts has. A coin for each transition."""
    sizes, seen = (100, 10, 10, 3), {}  # a cell for each [number, episode, t, end]

    class Watched(ql.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.q_values.copy_(torch.randn(self.q_values.shape))

        def act(self, obs, info, greedy=True):
            action = super().act(obs, info, greedy)
            if not greedy:
                seen.setdefault(len(rollout()), (self.q_values.numpy().copy(), action))
            return action

    monkeypatch.setattr(ql, "Agent", Watched)
    options = dict(learning_rate=0.5, anneal_lr=False, gamma=0.9, epsilon_start=0.3, epsilon_decay=1.0)
    options |= dict(total_timesteps=40 * num_envs, checkpoint_every=20, num_envs=num_envs)
    options |= dict(grid_size=sizes, obs_low=(0,) * 4, obs_high=sizes)
    ql.train(short(ql, "Boundary", update_rule=rule, **options))
    steps, coins = rollout(), []
    seen[41 * num_envs] = learned(), None
    for k in range(1, 41):
        (before, drawn), (after, _) = seen[k * num_envs], seen[k * num_envs + num_envs]
        expected = before.copy()
        for i in range(num_envs):
            _, number, episode, t, action, reward = steps[(k - 1) * num_envs + i]
            last = t == probe_envs.boundary_length(number, episode)
            terminates = last and probe_envs.boundary_terminates(number, episode)
            ends = [(number, episode, t - 1, 0), (number, episode, t, 1 if terminates else 2 * last)]
            state, successor = np.ravel_multi_index(np.transpose(ends), sizes)
            (table,) = np.flatnonzero(before[:, state, action] != after[:, state, action])
            row, judge = before[table, successor], before[-1 - table, successor]
            value = {
                "q_learning": row.max(), "expected_sarsa": 0.7 * row.max() + 0.3 * row.mean(),
                "sarsa": row[drawn[i]], "double": judge[row.argmax()],
            }[rule]  # fmt: skip
            target = reward + 0.9 * (not terminates) * value
            expected[table, state, action] += 0.5 * (target - before[table, state, action])
            coins.append(table)
            if not last and k not in (20, 40):  # a checkpoint cuts the episodes
                assert steps[k * num_envs + i][4] == drawn[i], "A' is the action that is taken next"
        assert np.allclose(after, expected, rtol=0, atol=1e-12)
    flips = {len({*coins[i : i + 3]}) for i in range(0, len(coins), 3)}
    assert flips == ({1, 2} if rule == "double" else {1})


def dynamic_programming(epsilon, **kwargs) -> np.ndarray:
    """Q (S, A) of the best of the policies that act at random with probability epsilon."""
    model = gym.make("FrozenLake-v1", **kwargs).unwrapped.P  # nothing in it is random
    back_up = lambda value, _, s, reward, end: reward + 0.9 * (not end) * value[s]
    q_values = np.zeros((len(model), 4))
    for _ in range(200):
        value = (1 - epsilon) * q_values.max(1) + epsilon * q_values.mean(1)
        q_values = np.array([[back_up(value, *model[s][a][0]) for a in range(4)] for s in model])
    return q_values


@pytest.mark.parametrize("rule, epsilon, alpha", [
    ("q_learning", 0, 1), ("double", 0, 1), ("expected_sarsa", 0.6, 1), ("sarsa", 0.6, 0.1),
])  # fmt: skip
def test_values_of_a_deterministic_lake_are_those_of_dynamic_programming(ql, rule, epsilon, alpha):
    """On-policy rules learn what it is worth to explore on. Episodes are cut, which changes nothing."""
    lake = dict(desc=["SFF", "FHG"], is_slippery=False)
    options = dict(learning_rate=alpha, anneal_lr=alpha < 1, epsilon_start=epsilon or 1.0, epsilon_decay=1.0)
    options |= dict(num_envs=16, total_timesteps=48_000 if rule == "sarsa" else 12_000, log_every=10**9)
    options |= dict(env_kwargs=lake | dict(max_episode_steps=9), update_rule=rule, gamma=0.9)
    ql.train(short(ql, "FrozenLake-v1", **options))
    assert np.abs(learned() - dynamic_programming(epsilon, **lake)).max() < (1e-6 if alpha == 1 else 0.06)


@pytest.mark.parametrize("anneal", [False, True])
def test_the_learning_rate_falls_linearly_if_asked(ql, anneal):
    """One state that pays 1: the distance to 1 shrinks by 1 - alpha with each update."""
    options = dict(learning_rate=0.1, anneal_lr=anneal, gamma=0.0, epsilon_start=0.0, epsilon_min=0.0)
    ql.train(short(ql, "Ones", total_timesteps=20, initial_value=0.2, grid_size=(1,), log_every=2, **options))
    alpha = [0.1 * (1 - anneal * step / 20) for step in range(0, 20, 2)]
    assert learned()[0, 0] == pytest.approx([1 - 0.8 * np.prod(1 - np.array(alpha)) ** 2, 0.2])
    assert [row["schedule/learning_rate"] for row in progress()[:10]] == pytest.approx(alpha)


def test_epsilon_falls_with_every_finished_episode_and_goes_on_after_a_resume(ql):
    options = dict(num_envs=3, epsilon_start=0.8, epsilon_decay=0.9, epsilon_min=0.2, log_every=30)
    ql.train(short(ql, "Ones", total_timesteps=120, grid_size=(1,), **options))
    ql.train(ql.replace(ql.parse_args(["--resume", "run"]), total_timesteps=240))
    ql.train(short(ql, "Ones", "new", total_timesteps=30, grid_size=(1,), init_from="run", **options))
    epsilons = [row["schedule/epsilon"] for row in progress() if "schedule/epsilon" in row]
    assert epsilons == pytest.approx([max(0.2, 0.8 * 0.9 ** (3 * cut)) for cut in range(8)])
    assert progress("new")[0]["schedule/epsilon"] == 0.8  # it is no part of the table


def test_a_training_explores_with_its_epsilon(ql):
    """It is 1 until the first episode ends, then 0. Nothing is learned: the best action is always 0."""
    options = dict(learning_rate=0.0, epsilon_start=1.0, epsilon_decay=0.0, epsilon_min=0.0)
    ql.train(short(ql, "Boundary", total_timesteps=60, num_envs=2, grid_size=(1,), **options))
    ends = [t == probe_envs.boundary_length(number, episode) for _, number, episode, t, *_ in rollout()]
    actions, first = [step[4] for step in rollout()], 2 * (ends.index(True) // 2)
    assert any(actions[: first + 2]) and not any(actions[first + 4 :])  # A' was drawn before the end


def test_a_share_epsilon_of_the_actions_is_random_and_ties_go_to_the_first(ql):
    agent = ql.Agent(ql.Layout((16,)), Discrete(4), ql.Args(epsilon_min=0.3), torch.device("cpu"))
    agent.q_values[0, :3] = torch.tensor([[0, 2, 2, 1], [5, 5, 5, 5], [0, 0, 0, 1.0]])
    assert agent.act(np.eye(16)[[0, 1, 2, 0]], {}).tolist() == [1, 0, 3, 1]
    np.random.seed(0)
    actions = agent.act(np.eye(16)[np.full(40_000, 2)], {}, greedy=False)
    assert np.bincount(actions) / 40_000 == pytest.approx([0.075, 0.075, 0.075, 0.775], abs=0.01)
    agent = ql.Agent(ql.Layout((16,)), Discrete(4), ql.Args(update_rule="double"), torch.device("cpu"))
    agent.q_values[:, 7] = torch.tensor([[5, 0, 3, 1], [0, 5, 3, 1.0]])
    assert agent.act(np.eye(16)[[7]], {}) == [2], "two tables vote together"


def test_a_box_has_cells_of_equal_width_and_the_outermost_reach_on(ql):
    args = ql.Args(grid_size=(4, 5), obs_low=(0, -1), obs_high=(2, 1))
    x, y = [-9, 0, 0.49, 0.51, 1.9, 2, 9], [-1, -0.61, -0.59, 0, 0.59, 0.61, 7]
    cells = np.array([[0, 0, 0, 1, 3, 3, 3], [0, 0, 1, 2, 3, 4, 4]])
    states = ql.Grid(Box(-1, 1, (2,)), args)(np.transpose([x, y]))
    assert states.tolist() == (cells[0] * 5 + cells[1]).tolist()
    grid = ql.Grid(Box(np.float32([-4, 0]), np.float32([4, 1])), ql.Args(grid_size=(8,)))  # its own bounds
    obs = np.float32([[-4, 0], [-2.5, 0], [-4, 0.126], [4, 1], [9e9, -9e9]])
    assert grid.num_states == 64 and grid(obs).tolist() == [0, 8, 1, 63, 56]


@pytest.mark.parametrize("space, sizes", [
    (Discrete(7), [7]), (Discrete(5, start=3), [5]), (MultiDiscrete([3, 4]), [3, 4]),
    (MultiDiscrete([[2, 3], [4, 2]]), [2, 3, 4, 2]), (Tuple([Discrete(3), Discrete(4, start=-1)]), [3, 4]),
])  # fmt: skip
def test_every_value_of_a_discrete_space_has_a_state_of_its_own(ql, space, sizes):
    """In the order of an array with a dimension for each part; make_envs gives each part one-hot."""
    obs = [np.concatenate([np.eye(n)[i] for n, i in zip(sizes, x, strict=True)]) for x in np.ndindex(*sizes)]
    assert len(obs[0]) == gym.spaces.flatdim(space)
    assert ql.Grid(space, ql.Args())(np.float32(obs)).tolist() == list(range(len(obs)))


@pytest.mark.parametrize("env, changes, words", [
    ("CartPole-v1", {}, "--obs-low --obs-high"), ("Walk", dict(obs_low=(0, 0), obs_high=(1, 0)), "--obs-low"),
    ("Walk", dict(obs_low=(0,)), "Walk --obs-low 1 2"), ("Walk", dict(obs_high=(0,)), "Walk --obs-high 1 2"),
    ("Walk", dict(grid_size=(1, 2, 3)), "--grid-size 3 2"), ("Walk", dict(grid_size=(4000,)), "10 million"),
    ("Walk", dict(env_kwargs={"actions": "box"}), "Walk Discrete ppo.py"),
    *(("Spaces", {"env_kwargs": {"obs": obs}}, "dqn.py") for obs in ("hwc", "dict", "multi_binary", "tuple")),
])  # fmt: skip
def test_what_has_no_table_is_refused_by_name(ql, env, changes, words):
    with pytest.raises(ql.UsageError) as error:
        ql.train(short(ql, env, **changes))
    assert all(word in str(error.value) for word in words.split())


@pytest.mark.parametrize("changes", [
    dict(obs_high=(9, 9)), dict(obs_low=(-9, -9)), dict(grid_size=(5, 4)), dict(update_rule="double"),
])  # fmt: skip
def test_a_table_is_not_loaded_into_another_grid(ql, changes):
    options = dict(total_timesteps=1, grid_size=(4, 5))
    ql.train(short(ql, "Walk", **options))
    ql.train(short(ql, "Walk", "same", init_from="run", **options))
    with pytest.raises(ql.UsageError, match="run does not fit these arguments"):
        ql.train(short(ql, "Walk", "other", init_from="run", **options | changes))
