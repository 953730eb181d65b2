"""Tests of what ddpg_td3.py and sac.py do alike: boundaries, critics, actions, noise, checkpoints."""

import shutil

import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script
from gymnasium.spaces import Box
from off_policy import Trainer, recorder, solve_lq
from probe_envs import Boxes, boundary_length, boundary_reward, boundary_terminates

td3, sac = load_script(ALGOS / "ddpg_td3.py"), load_script(ALGOS / "sac.py")
FIXED = dict(auto_alpha=False, alpha=0.0)
TRAINERS = {"ddpg": Trainer(td3, algorithm="ddpg"), "td3": Trainer(td3), "sac": Trainer(sac)}


@pytest.fixture(params=["td3", "sac"])
def quick(request) -> Trainer:
    return TRAINERS[request.param]


@pytest.fixture
def parts(quick, monkeypatch) -> dict:
    return quick.watch(monkeypatch)


record = pytest.fixture(recorder)


# ------------------------------------------------------------------------------------ episode boundaries
@pytest.mark.parametrize("num_envs, async_envs", [(1, False), (4, False), (4, True)])
def test_no_transition_joins_two_episodes(num_envs, async_envs, quick, parts):
    changes = dict(total_timesteps=60 * num_envs, checkpoint_every=20 * num_envs, async_envs=async_envs)
    quick("Boundary", num_envs=num_envs, **changes)
    buffer = parts["buffer"]
    batch = buffer.gather(np.flatnonzero(buffer.valid), gamma=0.5)
    assert len(batch["obs"]) == 60 * num_envs, "every step is kept"
    seen = set()
    for obs, next_obs, reward, discount in zip(
        *(batch[name].tolist() for name in ("obs", "next_obs", "reward", "discount")), strict=True
    ):
        number, episode, t, end = map(int, obs)
        last = t + 1 == boundary_length(number, episode)
        terminates = last and boundary_terminates(number, episode)
        assert end == 0, "no step starts from a final observation"
        assert next_obs == [number, episode, t + 1, 1 if terminates else 2 if last else 0]
        assert reward == boundary_reward(episode, t + 1)
        assert discount == (0 if terminates else 0.5)
        seen.add(2 * last - terminates)
    assert seen == {0, 1, 2}, "steps within episodes, terminations and truncations"


@pytest.mark.parametrize("name, critics", [("ddpg", 1), ("td3", 2), ("sac", 2)])
def test_critics_learn_the_endless_sum_where_episodes_are_only_truncated(name, critics, monkeypatch):
    parts = TRAINERS[name].watch(monkeypatch)
    changes = dict(gamma=0.8, learning_rate=0.01, tau=0.1, total_timesteps=800)
    TRAINERS[name]("Ones", **changes | (FIXED if name == "sac" else {}))
    value = parts["critic"](torch.zeros(1, 4), torch.zeros(1, 1))
    assert value.shape == (critics, 1)
    assert value.detach().numpy() == pytest.approx(1 / (1 - 0.8), rel=0.05), "ten steps would be 4.5 at most"


# --------------------------------------------------------------------------------------------------- critics
def test_twin_critics_start_apart_and_stay_apart(quick, parts):
    quick("Box", total_timesteps=400, learning_rate=0.01)
    start = quick.script.Critic(Box(-1, 1, (4,)), Box(-1, 1, (2,)), 2, quick.args("Box"))
    for critic in (start, parts["critic"]):
        for parameter in critic.parameters():
            assert (parameter[0] - parameter[1]).abs().min() > 0
        assert torch.sub(*critic(torch.randn(50, 4), torch.rand(50, 2))).abs().max() > 1e-3


def test_side_by_side_is_one_by_one(quick):
    args, spaces = quick.args("Box", hidden_sizes=(8, 6)), (Box(-1, 1, (4,)), Box(-1, 1, (2,)))
    critic = quick.script.Critic(*spaces, 2, args)
    obs, action = torch.randn(5, 4), torch.rand(5, 2)
    for i in range(2):
        x = torch.cat([obs, action], dim=-1)
        for layer in (*critic.hidden, critic.value):
            x = x @ layer.weight[i] + layer.bias[i]
            x = x if layer is critic.value else x.relu()
        torch.testing.assert_close(critic(obs, action)[i], x.squeeze(-1))
    if quick.script is td3:
        torch.testing.assert_close(critic(obs, action, n=1), critic(obs, action)[:1])


@pytest.mark.parametrize("name", TRAINERS)
def test_critics_and_actor_solve_the_linear_quadratic_problem(name, monkeypatch):
    parts = TRAINERS[name].watch(monkeypatch)
    changes = dict(learning_rate=3e-3, anneal_lr=True, tau=0.02, batch_size=128, gamma=0.8, num_envs=1)
    changes |= dict(total_timesteps=2500, learning_starts=500, hidden_sizes=(32, 32), buffer_size=5000)
    own = FIXED | {"alpha": 0.002} if name == "sac" else dict(exploration_noise=0.3, target_noise=0.0)
    TRAINERS[name]("LQ", **changes, **own)
    obs, action, q_value, best = solve_lq(gamma=0.8)
    greedy = parts["actor"].mean if name == "sac" else parts["actor"]
    assert (parts["critic"](obs, action) - q_value).abs().max() < 0.2  # Q* goes from -1.4 to 0
    assert (greedy(obs) - best).abs().max() < 0.2  # pi* goes from -0.7 to 0.7


# ------------------------------------------------------------------------------------------------- training
def test_a_gradient_step_moves_its_own_parameters_only(quick):
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer, before = torch.optim.SGD(one.parameters(), lr=0.1), one.weight.detach().clone()
    loss = lambda: 100 * two(one(torch.ones(1, 2))).sum()
    norm_of = lambda: torch.stack([p.grad.norm() for p in one.parameters()]).norm().item()
    norm = quick.script.gradient_step(loss(), optimizer, 0.5)
    assert norm > 0.5 and two.weight.grad is None
    assert not torch.equal(one.weight, before)
    assert norm_of() == pytest.approx(0.5, rel=1e-4)
    assert quick.script.gradient_step(loss(), optimizer) == pytest.approx(norm_of()) != 0.5, "never clipped"


def test_gradients_of_critics_and_actor_are_clipped_if_asked(quick, parts):
    quick("Walk", max_grad_norm=1e-4)
    for name in ("actor", "critic"):
        norm = torch.stack([p.grad.norm() for p in parts[name].parameters()]).norm().item()
        assert norm == pytest.approx(1e-4, rel=0.05), name


def test_learning_rates_are_given_and_fall_to_0_if_asked(quick, parts):
    given = dict(actor_lr=0.01, critic_lr=0.02) | (dict(alpha_lr=0.03) if quick.script is sac else {})
    optimizers = [name.replace("lr", "optimizer") for name in given]
    rates = lambda: [round(float(parts[name].param_groups[0]["lr"]), 6) for name in optimizers]
    for i, (changes, expected) in enumerate([
        ({}, [0.1] * len(given)), (given, list(given.values())), (dict(anneal_lr=True), [0] * len(given)),
    ]):  # fmt: skip
        quick("Walk", run_dir=f"run{i}", learning_rate=0.1, total_timesteps=36, **changes)
        assert rates() == expected


def test_each_target_network_moves_to_its_own_network_by_tau(quick, parts, record):
    moves = record(quick.script, "polyak_update")
    quick("Walk", tau=0.3)
    pairs = {(part, parts["target_" + name]) for name, part in parts.items() if "target_" + name in parts}
    assert {tuple(given[:2]) for given, _ in moves} == pairs
    assert {given[2] for given, _ in moves} == {0.3}


def test_actions_live_on_the_unit_cube_and_reach_the_environment_in_its_bounds(quick, parts):
    loud = {} if quick.script is sac else dict(exploration_noise=1.0)
    quick("Box", total_timesteps=200, batch_size=64, **loud)
    stored = parts["buffer"].action[parts["buffer"].valid].reshape(-1, 2)
    sent = np.array(Boxes.actions)
    for action in stored * [2, 2] + [1, 0]:  # what the environment was sent
        assert np.abs(sent - action).sum(axis=1).min() < 1e-5
    assert len(stored) == 200 and np.abs(stored).max() <= 1
    assert sent[:, 1].min() < -1.5 and sent[:, 0].max() > 2.5
    if loud:  # the noise leads beyond the bounds, and is cut there
        assert sent.min(0).tolist() == [-1, -2] and sent.max(0).tolist() == [3, 2]


def test_environments_explore_apart(quick, parts):
    quick("Ones", num_envs=4, total_timesteps=200, learning_starts=4)  # all observe the same
    actions = parts["buffer"].action[parts["buffer"].valid].reshape(-1, 4)[1:]
    assert np.abs(actions[:, 1:] - actions[:, :1]).min() > 0


def test_n_step_reaches_the_buffer(quick, record):
    samples = record(quick.script.ReplayBuffer, "sample")
    quick("Boundary", n_step=3, gamma=0.5)
    discounts = {x for _, batch in samples for x in batch["discount"].tolist()}
    assert discounts == {0, 0.5, 0.25, 0.125}


def test_actor_and_critics_see_normalized_observations_and_no_others(quick, parts, record):
    script = quick.script
    samples = record(script.ReplayBuffer, "sample")
    seen = {network: record(network, "forward") for network in (script.Actor, script.Critic)}
    quick("Boundary", normalize_obs=True)
    norm, buffer = parts["actor"].obs_norm, parts["buffer"]
    batches = [batch for _, batch in samples[-2:]]  # two environments: two updates since norm last changed
    assert norm.count == 96 and norm.var.max() > 1
    successors = buffer.gather(np.flatnonzero(buffer.valid), gamma=0.5)["next_obs"]
    torch.testing.assert_close(norm.mean, successors.mean(0), msg="it follows what steps lead to")
    assert torch.equal(checkpoint()["agent"]["obs_norm.mean"], norm.mean)
    allowed = [norm(batch[name]) for batch in batches for name in ("obs", "next_obs")]
    assert not torch.equal(allowed[0], batches[0]["obs"])
    for calls in seen.values():
        given = [arguments[1] for arguments, _ in calls if len(arguments[1]) == len(batches[0]["obs"])][-2:]
        assert len(given) == 2
        for x in given:
            assert any(torch.equal(x, y) for y in allowed)


def test_nothing_acts_or_learns_from_an_observation_that_is_not_normalized(quick, record):
    """Also the actor's mean, in an evaluation of three episodes, and in CAPS."""
    script = quick.script
    normed, caps = record(script.RunningNorm, "forward"), dict(caps_temporal=1.0) if script is sac else {}
    owners = [(script.Critic, "forward"), (script.Actor, "forward")]
    calls = [record(*owner) for owner in owners + [(script.Actor, "mean")] * (script is sac)]
    quick("Boundary", normalize_obs=True, eval_episodes=3, **caps)
    known = {x.numpy().tobytes() for _, x in normed}
    given = [arguments[1] for arguments, _ in sum(calls, [])]
    assert {len(x) for x in given} == {2, 3, 16}, "rollout, evaluation, batch"
    assert all(x.numpy().tobytes() in known for x in given)


SPACES = "probe_envs:Spaces-v0", "--env-kwargs"


@pytest.mark.parametrize("name, words, hint", [
    ("both", (*SPACES, '{"action": "multi_binary"}'), "ppo.py"),
    ("both", (*SPACES, '{"action": "half_bounded"}'), "ppo.py"),
    ("both", ("Pendulum-v1", "--buffer-size", "2000000"), "--buffer-size"),
    ("td3", ("CartPole-v1",), "dqn.py or sac.py"),
    ("sac", ("CartPole-v1", "--caps-temporal", "1"), "--caps-temporal"),
    ("sac", ("Pendulum-v1", "--alpha", "0"), "--no-auto-alpha"),
    ("sac", (*SPACES, '{"obs": "small", "action": "box"}', "--caps-spatial", "1"), "--normalize-obs"),
])  # fmt: skip
def test_wrong_input_ends_in_one_clear_line(name, words, hint, capsys, monkeypatch):
    for script in (td3, sac) if name == "both" else (TRAINERS[name].script,):
        monkeypatch.setattr(script, "free_memory", lambda device: 1e6)
        monkeypatch.setattr("sys.argv", ["script.py", "--env-id", *words])
        with pytest.raises(SystemExit) as stop:
            script.main()
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and hint in said, said


def test_playing_needs_no_room_for_a_replay_buffer(quick, monkeypatch):
    trained = quick("Walk")
    monkeypatch.setattr(quick.script, "free_memory", lambda device: 6e3)
    played = quick.script.train(quick.script.parse_args(["--evaluate", "run"]))
    assert np.array_equal(played, trained)
    with pytest.raises(quick.script.UsageError, match="--buffer-size"):
        quick.script.train(quick.script.parse_args(["--resume", "run"]))


def test_training_leaves_its_arguments_as_they_were(quick):
    given, same = (quick.args("Walk", total_timesteps=35) for _ in range(2))
    quick.script.train(given)
    assert given == same


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
def test_checkpoints_with_and_without_compile_load_in_each_other(quick):
    for compiled in (False, True):
        run = f"run{compiled}"
        quick("Walk", run_dir=run, compile=compiled, total_timesteps=40)
        before = checkpoint(run)["agent"]
        args = quick.script.parse_args(["--resume", run])
        quick.script.train(quick.script.replace(args, total_timesteps=48, compile=not compiled))
        after = checkpoint(run)["agent"]
        assert before.keys() == after.keys() and not equal(before, after)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_pendulum(seed, quick):
    args = quick.script.parse_args(["--env-id", "Pendulum-v1", "--run-dir", "run", "--seed", str(seed)])
    fast = dict(total_timesteps=12_000, learning_starts=400, batch_size=64, gamma=0.95, tau=0.01)
    fast |= dict(learning_rate=2e-3, eval_every=1000, checkpoint_every=0, stop_return=-200)
    assert quick.script.train(quick.script.replace(args, **fast)).mean() >= -200
