"""Tabular Q-learning's own tests. What every script must do is tested in test_contract.py."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ALGOS, ROOT, checkpoint, load_script, points, progress
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from probe_envs import boundary_length, boundary_reward, boundary_terminates

q_learning = load_script(ALGOS / "q_learning.py")

RULES = ["q", "sarsa", "expected_sarsa", "double_q"]
QUICK = dict(seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=2)


def quick(env: str, run_dir="run", env_kwargs=None, **changes) -> np.ndarray:
    """A training of a moment in one of the probe_envs, or in any environment by its id."""
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    return q_learning.train(q_learning.Args(**QUICK | given | changes))


def learned() -> np.ndarray:
    """The tables (K, S, A) of the last checkpoint."""
    return checkpoint()["agent"]["q_values"].numpy()


@pytest.fixture
def no_evaluation(monkeypatch):
    names = ("returns", "discounted", "lengths", "terminated", "success")
    scores = lambda args, *_: {name: np.zeros(args.eval_episodes) for name in names}
    monkeypatch.setattr(q_learning, "evaluate", scores)


@pytest.fixture
def agents(monkeypatch):
    """The agents that are made. Their values start at random, so that one can be told from the others."""
    made = []

    class Watched(q_learning.QTable):
        def __init__(self, *args):
            super().__init__(*args)
            self.q_values[:] = np.random.default_rng(5).normal(size=self.q_values.shape)
            made.append(self)

    monkeypatch.setattr(q_learning, "QTable", Watched)
    return made


@pytest.fixture
def record(monkeypatch):
    """record(name) lists from then on copies of (arguments, result) of the script's function of this name."""

    def start(name: str) -> list:
        calls, original = [], getattr(q_learning, name)

        def recorded(*args):
            given = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
            calls.append((given, original(*args)))
            return calls[-1][1]

        monkeypatch.setattr(q_learning, name, recorded)
        return calls

    return start


def transitions(env_id: str, **kwargs):
    """Model of a toy text environment: probability (S, A, S'), mean reward (S, A), both without what follows
    a terminal state, which is worth nothing."""
    table = gym.make(env_id, **kwargs).unwrapped.P
    num_states, num_actions = len(table), len(table[0])
    probability = np.zeros((num_states, num_actions, num_states))
    reward = np.zeros((num_states, num_actions))
    for s in range(num_states):
        for a in range(num_actions):
            for p, next_state, r, terminated in table[s][a]:
                probability[s, a, next_state] += p * (not terminated)
                reward[s, a] += p * r
    return probability, reward


def value_iteration(probability, reward, gamma, epsilon=0.0, sweeps=2000) -> np.ndarray:
    """Q (S, A) of the best policy; with epsilon, of the best of those that act randomly so often."""
    q_values = np.zeros_like(reward)
    for _ in range(sweeps):
        value = (1 - epsilon) * q_values.max(axis=1) + epsilon * q_values.mean(axis=1)
        q_values = reward + gamma * probability @ value
    return q_values


def visited(env_id: str, **kwargs) -> np.ndarray:
    """States (S,) that an episode can be in before its end, whatever the actions."""
    probability, _ = transitions(env_id, **kwargs)
    seen = gym.make(env_id, **kwargs).unwrapped.initial_state_distrib > 0
    for _ in range(len(seen)):
        seen = seen | (probability[seen].sum(axis=(0, 1)) > 0)
    return seen


# --------------------------------------------------------------------------------------------- learning rule
def test_next_value_equals_numbers_worked_out_by_hand():
    next_q = np.array([[1.0, 4.0, 2.0], [3.0, 0.0, -3.0]])
    judge_q = np.array([[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]])
    value = lambda rule: q_learning.next_value(rule, next_q, judge_q, np.array([2, 1]), 0.3).tolist()
    assert value("q") == [4, 3]
    assert value("sarsa") == [2, 0]
    assert value("expected_sarsa") == pytest.approx([0.7 * 4 + 0.3 * 7 / 3, 0.7 * 3 + 0.3 * 0])
    assert value("double_q") == [20, 40]  # the judge's value of the learner's best action


def test_update_moves_each_value_towards_its_target_by_the_learning_rate():
    values = np.array([0.0, 1.0, 2.0, 3.0])
    q_learning.update(values, np.array([3, 1]), np.array([7.0, -1.0]), 0.25)
    assert values.tolist() == [0, 0.5, 2, 4]


def test_update_with_the_same_pair_many_times_equals_updates_in_a_row():
    """64 environments that start in one state must not move its value 64 learning rates far."""
    values, one_by_one = np.array([0.0, 5.0]), 0.0
    q_learning.update(values, np.zeros(64, dtype=int), np.ones(64), 0.1)
    for _ in range(64):
        one_by_one += 0.1 * (1 - one_by_one)
    assert values == pytest.approx([one_by_one, 5.0])
    values = np.zeros(3)
    q_learning.update(values, np.array([2, 0, 2, 2]), np.array([1.0, 9.0, 4.0, 7.0]), 0.5)
    assert values == pytest.approx([4.5, 0, 4 * (1 - 0.5**3)])  # 4 is the mean target of the pair 2


def test_update_does_not_depend_on_the_order_of_the_environments():
    index, target = np.array([4, 1, 4, 4, 0, 1]), np.arange(6.0)
    one, two = np.ones(5), np.ones(5)
    q_learning.update(one, index, target, 0.3)
    q_learning.update(two, index[::-1], target[::-1], 0.3)
    assert one == pytest.approx(two)


@pytest.mark.parametrize("env", ["Taxi-v4", "CliffWalking-v1"])
def test_sweeps_of_the_update_reach_the_values_of_value_iteration(env):
    """Every transition of the known table once per sweep; they are deterministic, so alpha 1 is right."""
    table = gym.make(env).unwrapped.P
    rows = [(s, a, *table[s][a][0][1:]) for s in table for a in table[s]]
    state, action, next_state, reward, terminated = map(np.array, zip(*rows, strict=True))
    q_values = np.zeros((len(table), len(table[0])))
    for _ in range(60):
        value = q_learning.next_value("q", q_values[next_state], None, None, 0.0)
        target = reward + 0.9 * (1 - terminated) * value
        index = np.ravel_multi_index((state, action), q_values.shape)
        q_learning.update(q_values.reshape(-1), index, target, 1.0)
    assert q_values == pytest.approx(value_iteration(*transitions(env), 0.9, sweeps=60))


# ------------------------------------------------------------------------------------ training, step by step
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_every_update_is_of_a_true_transition(
    rule, num_envs, async_envs, agents, record, no_evaluation, monkeypatch
):
    """State, action, reward and true successor are of one episode; targets bootstrap behind a truncation and
    not behind a termination. SARSA's next action is the one that is taken."""
    if async_envs and rule != "sarsa":
        pytest.skip("one rule shows it")
    values, updates, tables = record("next_value"), record("update"), []
    real = q_learning.next_value
    monkeypatch.setattr(
        q_learning, "next_value", lambda *a: (tables.append(agents[-1].q_values.copy()), real(*a))[1]
    )
    sizes = (100, 20, 10, 3)  # a cell for each (number, episode, t, end) of the environment Boundary
    steps = 60 * num_envs
    quick(
        "Boundary", update_rule=rule, num_envs=num_envs, async_envs=async_envs, total_timesteps=steps,
        checkpoint_every=2 * steps // 3, grid_size=sizes, obs_low=(0, 0, 0, 0), obs_high=sizes, gamma=0.9,
    )  # fmt: skip
    assert (
        len(updates) == len(values) == 60
    )  # checkpoint and new environments after 40, in the middle of episodes
    taken = [np.unravel_index(call[0][1], tables[0].shape) for call in updates]
    for i in range(num_envs):
        due = None  # where the next transition has to start
        for k, ((_, next_q, judge_q, next_action, _), value) in enumerate(values):
            table, state, action = (x[i] for x in taken[k])
            number, episode, t, end = np.unravel_index(state, sizes)
            assert end == 0, "no action is chosen in a final state"
            if k in (0, 40):
                assert (episode, t) == (0, 0)
            else:
                assert due == (number, episode, t)
            last = t + 1 == boundary_length(number, episode)
            terminates = last and boundary_terminates(number, episode)
            successor = np.ravel_multi_index((number, episode, t + 1, 1 if terminates else 2 * last), sizes)
            assert np.array_equal(next_q[i], tables[k][table, successor])
            judge = 1 - table if rule == "double_q" else table
            assert np.array_equal(judge_q[i], tables[k][judge, successor])
            target = boundary_reward(episode, t + 1) + 0.9 * (not terminates) * value[i]
            assert updates[k][0][2][i] == pytest.approx(target)
            if k not in (39, 59) and not last:
                assert next_action[i] == taken[k + 1][2][i], "A' is the action that is taken next"
            due = (number, episode + 1, 0) if last else (number, episode, t + 1)
    assert {len(np.unique(table)) for table in zip(*(t[0] for t in taken), strict=True)} == {
        1 + (rule == "double_q")
    }


@pytest.mark.parametrize("rule", RULES)
def test_values_of_an_endless_task_are_the_endless_sum(rule):
    """It pays 1 per step and is cut every 10 steps: 1 / (1 - gamma), not the sum up to the cut."""
    box = dict(grid_size=(1,))
    quick(
        "Ones", update_rule=rule, gamma=0.9, total_timesteps=4000, learning_rate=0.5, epsilon_start=0.5, **box
    )
    assert learned() == pytest.approx(np.full(learned().shape, 10.0), rel=0.01)


def test_epsilon_falls_once_for_each_finished_episode_down_to_its_minimum():
    given = dict(num_envs=3, epsilon_start=0.8, epsilon_decay=0.9, log_every=30)
    quick("Ones", total_timesteps=300, epsilon_min=0.2, **given)
    epsilons = [float(row["schedule/epsilon"]) for row in progress()]
    assert epsilons == pytest.approx([max(0.2, 0.8 * 0.9 ** (3 * cut)) for cut in range(1, 11)])
    assert checkpoint()["agent"]["epsilon"] == 0.2


def test_epsilon_is_the_share_of_random_actions_and_ties_go_to_the_first():
    args = q_learning.Args(epsilon_start=0.3)
    agent = q_learning.QTable(q_learning.Grid(Discrete(3), args), 4, args)
    agent.q_values[0] = [[0, 2, 2, 1], [5, 5, 5, 5], [0, 0, 0, 1]]
    assert agent.greedy(np.array([0, 1, 2, 0])).tolist() == [1, 0, 3, 1]
    np.random.seed(0)
    actions = agent.act(np.full(40_000, 2))
    share = np.bincount(actions, minlength=4) / len(actions)
    # five standard deviations of a share of 40,000 draws
    assert share == pytest.approx([0.075, 0.075, 0.075, 0.775], abs=5 * (0.25 / 40_000) ** 0.5)


def test_both_tables_of_double_q_choose_the_action():
    args = q_learning.Args(update_rule="double_q")
    agent = q_learning.QTable(q_learning.Grid(Discrete(1), args), 3, args)
    agent.q_values[:, 0] = [[5, 0, 3], [0, 5, 3]]
    assert agent.greedy(np.array([0])).tolist() == [2]


def test_initial_value_and_learning_rate_that_falls_to_0_if_asked(record):
    updates = record("update")
    given = dict(num_envs=2, total_timesteps=20, learning_rate=0.5, initial_value=7.0)
    quick("FrozenLake-v1", **given)
    assert [call[0][3] for call in updates] == pytest.approx([0.5 * (1 - 2 * k / 20) for k in range(10)])
    assert learned()[0, 10:].min() == 7
    updates.clear()
    quick("FrozenLake-v1", run_dir="flat", anneal_lr=False, **given)
    assert [call[0][3] for call in updates] == [0.5] * 10


# ------------------------------------------------------------------------------------ against value iteration
@pytest.mark.parametrize("rule", ["q", "double_q"])
@pytest.mark.parametrize("env", ["FrozenLake-v1", "CliffWalking-v1"])
def test_values_of_a_deterministic_world_equal_value_iteration(env, rule):
    """With alpha 1, and although episodes are cut after 50 steps."""
    kwargs = {"is_slippery": False}
    quick(
        env, env_kwargs=kwargs, update_rule=rule, num_envs=32, total_timesteps=64_000, log_every=64_000,
        learning_rate=1.0, anneal_lr=False, gamma=0.9, epsilon_start=0.7, epsilon_decay=1.0,
        max_episode_steps=50,
    )  # fmt: skip
    best, where = value_iteration(*transitions(env, **kwargs), gamma=0.9), visited(env, **kwargs)
    for table in learned():
        assert table[where] == pytest.approx(best[where], abs=1e-6)


SLIPPERY = [("q", 0.0), ("double_q", 0.0), ("sarsa", 0.4), ("expected_sarsa", 0.4)]


@pytest.mark.parametrize("rule, epsilon", SLIPPERY, ids=[rule for rule, _ in SLIPPERY])
def test_values_of_a_slippery_lake_approach_value_iteration(rule, epsilon):
    """On-policy rules learn what the policy is worth that explores on; Q-learning what the best one is."""
    lake = dict(desc=["SFF", "FHF", "FFG"])
    quick(
        "FrozenLake-v1", env_kwargs=lake, update_rule=rule, num_envs=32, total_timesteps=96_000, gamma=0.9,
        learning_rate=0.05, epsilon_start=epsilon or 1.0, epsilon_decay=1.0, log_every=96_000,
    )  # fmt: skip
    model, where = transitions("FrozenLake-v1", **lake), visited("FrozenLake-v1", **lake)
    best, other = (value_iteration(*model, gamma=0.9, epsilon=e)[where] for e in (epsilon, 0.4 - epsilon))
    values = learned()[:, where].mean(axis=0)
    assert np.abs(values - best).mean() < 0.03  # of values up to 0.7
    assert np.abs(values - other).mean() > 0.08


@pytest.mark.parametrize(
    "env, settings, bar",
    [
        ("FrozenLake-v1", dict(env_kwargs='{"is_slippery": false}'), 1.0),
        ("FrozenLake-v1", {}, 0.7),
        ("CliffWalking-v1", {}, -13),
    ],
    ids=["lake", "slippery lake", "cliff"],
)
def test_learns_to_the_bar(env, settings, bar):
    """With the settings of TUNED, but fewer steps."""
    args = q_learning.parse_args(["--env-id", env])
    settings = (
        QUICK
        | dict(run_dir="run", total_timesteps=50_000, eval_episodes=100, num_envs=args.num_envs)
        | settings
    )
    assert q_learning.train(q_learning.replace(args, **settings)).mean() >= bar


def test_sarsa_keeps_away_from_the_cliff_and_q_learning_walks_along_it():
    """Sutton and Barto 2018, example 6.6. Q-learning knows the better path, but exploring costs it more."""
    given = dict(num_envs=1, total_timesteps=12_000, learning_rate=0.5, anneal_lr=False, gamma=1.0)
    given |= dict(epsilon_start=0.1, epsilon_decay=1.0, max_episode_steps=1000)
    online, greedy = {}, {}
    for rule in ("q", "sarsa"):
        greedy[rule] = quick("CliffWalking-v1", run_dir=rule, update_rule=rule, **given).mean()
        online[rule] = np.mean([return_ for _, return_ in points(rule)["train/episode_return"][100:400]])
    assert greedy["q"] == -13 > greedy["sarsa"]
    assert online["sarsa"] > -35 and online["q"] < online["sarsa"] - 10


# ---------------------------------------------------------------------------------------------------- states
def grid_of(space, **args):
    return q_learning.Grid(space, q_learning.Args(**args))


def test_a_box_is_cut_into_cells_of_equal_width_and_the_outermost_reach_on():
    grid = grid_of(Box(-1, 1, (2,), np.float32), grid_size=(4, 5), obs_low=(0, -1), obs_high=(2, 1))
    assert grid.num_states == 20
    x, y = np.array([-9, 0, 0.49, 0.51, 1.9, 2, 9]), np.array([-1, -0.61, -0.59, 0, 0.59, 0.61, 7])
    columns = [0, 0, 0, 1, 3, 3, 3]
    rows = [0, 0, 1, 2, 3, 4, 4]
    expected = 5 * np.array(columns) + np.array(rows)
    assert grid(np.stack([x, y], axis=1)).tolist() == expected.tolist()


def test_grid_takes_the_bounds_of_the_space_and_one_size_for_all_dimensions():
    car = gym.make("MountainCar-v0").observation_space
    grid = grid_of(car, grid_size=(8,))
    assert grid.num_states == 64
    middle = (car.low + car.high) / 2
    assert grid(np.stack([car.low, car.high, middle + 1e-4])).tolist() == [0, 63, 8 * 4 + 4]


def test_infinite_bounds_need_numbers():
    pole = gym.make("CartPole-v1").observation_space
    with pytest.raises(q_learning.UsageError, match="--obs-low and --obs-high"):
        grid_of(pole)
    tuned = q_learning.TUNED["CartPole-v1"]
    grid = grid_of(pole, **{name: tuned[name] for name in ("grid_size", "obs_low", "obs_high")})
    huge = np.float32([[9e9] * 4, [-9e9] * 4])
    assert grid(huge).tolist() == [grid.num_states - 1, 0]


@pytest.mark.parametrize(
    "space, sizes",
    [
        (Discrete(7), [7]),
        (Discrete(5, start=3), [5]),
        (MultiDiscrete([3, 4]), [3, 4]),
        (Tuple([Discrete(3), Discrete(4, start=-1), Discrete(2)]), [3, 4, 2]),
    ],
    ids=["Discrete", "start", "MultiDiscrete", "Tuple"],
)
def test_every_value_of_a_discrete_space_has_a_state_of_its_own(space, sizes):
    """In the order of an array of the shape `sizes`, from what FlattenObservation makes of the values."""
    values = np.array(list(np.ndindex(*sizes)))
    starts = [part.start for part in space] if isinstance(space, Tuple) else getattr(space, "start", 0)
    given = [tuple(map(int, row)) for row in values + starts]
    given = [row[0] for row in given] if isinstance(space, Discrete) else given
    given = [np.array(row) for row in given] if isinstance(space, MultiDiscrete) else given
    grid = grid_of(space)
    obs = np.float32([gym.spaces.flatten(space, value) for value in given])
    assert grid.sizes.tolist() == sizes
    assert grid(obs).tolist() == list(range(len(values)))


def test_learns_from_a_tuple_of_discrete_observations():
    quick("Blackjack-v1", total_timesteps=400, num_envs=4, learning_rate=0.5)
    assert learned().shape == (1, 32 * 11 * 2, 2)
    assert 10 < (learned() != 0).sum() < 400


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(grid_size=(3, 4)), "--grid-size 2 CartPole-v1 4"),
        (dict(obs_low=(0,)), "--obs-low 1 CartPole-v1 4"),
        (dict(obs_low=(0, 0, 0, 0), obs_high=(1, 1, 0, 1)), "--obs-low --obs-high"),
        (dict(grid_size=(100,)), "CartPole-v1 10 million --grid-size dqn.py"),
        (dict(learning_rate=1.5), "--learning-rate 1.5"),
        (dict(epsilon_min=0.5, epsilon_start=0.1), "--epsilon-min 0.5 --epsilon-start 0.1"),
        (dict(env_id="Pendulum-v1"), "Pendulum-v1 Discrete Box ppo.py"),
        (dict(env_id="ALE/Pong-v5"), "ALE/Pong-v5 images dqn.py"),
    ],
    ids=["sizes", "low", "order", "too many", "learning rate", "epsilon", "actions", "images"],
)
def test_wrong_options_end_in_one_clear_line(changes, words):
    tuned = dict(obs_low=(-1, -1, -1, -1), obs_high=(1, 1, 1, 1))
    with pytest.raises(q_learning.UsageError) as error:
        q_learning.train(
            q_learning.Args(**QUICK | dict(env_id="CartPole-v1", run_dir="run") | tuned | changes)
        )
    for word in words.split():
        assert word in str(error.value)


@pytest.mark.parametrize("space", [Dict(a=Discrete(2)), MultiBinary(3), Tuple([Box(0, 1), Discrete(2)])])
def test_other_spaces_are_refused(space):
    with pytest.raises(q_learning.UsageError, match="Box, Discrete, MultiDiscrete"):
        grid_of(space)


@pytest.mark.parametrize(
    "changes",
    [dict(obs_high=(9, 9)), dict(obs_low=(-3, -3)), dict(grid_size=(5, 4)), dict(update_rule="double_q")],
)
def test_a_table_of_another_grid_is_refused(changes):
    box, args = Box(-2, 2, (2,)), dict(grid_size=(4, 5))
    make = lambda **args: q_learning.QTable(grid_of(box, **args), 3, q_learning.Args(**args))
    saved = make(**args).state_dict()
    make(**args).load_state_dict(saved)
    with pytest.raises(ValueError, match="another"):
        make(**args | changes).load_state_dict(saved)


# -------------------------------------------------------------------------------------------------- pictures
@pytest.fixture
def q_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    return pytest.importorskip("q_table")


@pytest.mark.parametrize(
    "env, settings, size, count",
    [
        ("FrozenLake-v1", dict(), (4, 4), 1),
        ("CliffWalking-v1", dict(max_episode_steps=20), (4, 12), 1),
        ("Taxi-v4", dict(), (5, 5), 20),
        ("MountainCar-v0", dict(grid_size=(6, 9)), (9, 6), 1),
        ("CartPole-v1", dict(grid_size=(1, 3, 4, 5), obs_low=(-1,) * 4, obs_high=(1,) * 4), (5, 4), 1),
    ],
)
def test_values_and_policy_are_drawn(env, settings, size, count, q_table, monkeypatch, no_evaluation):
    pictures, real = [], q_table.pictures_of
    monkeypatch.setattr(q_table, "pictures_of", lambda *args: pictures.append(real(*args)) or pictures[-1])
    quick(env, total_timesteps=400, **settings)
    q_table.draw_table(Path("run"))
    assert [(len(p), {x.shape for x in p.values()}) for p in pictures] == [(count, {size})] * 2
    assert {path.name for path in Path("run/plots").iterdir()} == {"values.png", "policy.png"}
    drawn = np.sort(np.concatenate([x.ravel() for x in pictures[0].values()]))
    best = learned()[0].max(axis=1)[(learned()[0] != 0).any(axis=1)]
    assert set(drawn[np.isfinite(drawn)]) <= set(best) and np.isfinite(drawn).any()


def test_pictures_lie_as_the_worlds_do(q_table):
    car, taxi = gym.make("MountainCar-v0"), gym.make("Taxi-v4")
    (picture,) = q_table.pictures_of(np.arange(6).reshape(2, 3), car).values()
    assert picture.tolist() == [[2, 5], [1, 4], [0, 3]]  # position to the right, velocity upwards
    pictures = q_table.pictures_of(np.arange(500), taxi)
    state = taxi.unwrapped.encode(3, 1, 4, 2)
    assert pictures["from taxi to yellow"][3, 1] == state


def test_the_cliff_is_drawn(q_table, capsys):
    q_table.draw_cliff(Path("cliff.png"), Path("cliff.csv"), seeds=1, episodes=8)
    lines = Path("cliff.csv").read_text().splitlines()
    assert lines[0] == "update_rule,episode,seeds,return_mean,return_std" and len(lines) == 1 + 2 * 8
    assert lines[1].startswith("sarsa,1,1,-") and lines[-1].startswith("q,8,1,-")
    assert Path("cliff.png").stat().st_size > 10_000
