"""Tests of DDPG and TD3. What every script must do (seeds, resume, signals, ...) is tested elsewhere."""

import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script
from gymnasium.spaces import Box
from probe_envs import Boxes, boundary_length, boundary_reward, boundary_terminates

ddpg_td3 = load_script(ALGOS / "ddpg_td3.py")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=2, hidden_sizes=(8,),
    total_timesteps=96, learning_starts=32, batch_size=16, buffer_size=400,
)  # fmt: skip


def quick_args(env: str, run_dir="run", env_kwargs=None, **changes):
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    kwargs = {} if env in ("Box", "LQ-v0", "Pendulum-v1") else {"actions": "box"}
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or kwargs), run_dir=str(run_dir))
    return ddpg_td3.Args(**QUICK | given | changes)


def quick(env: str, **changes) -> np.ndarray:
    """A training of a moment in one of the probe_envs, or in any environment by its id."""
    return ddpg_td3.train(quick_args(env, **changes))


@pytest.fixture
def parts(monkeypatch):
    """The parts of the last Run: actor, critic, buffer, ..., as they are at any time."""
    found = {}

    class Watched(ddpg_td3.Run):
        def __init__(self, args, agent, *rest, **others):
            found.update(actor=agent, run=self, **others)
            super().__init__(args, agent, *rest, **others)

    monkeypatch.setattr(ddpg_td3, "Run", Watched)
    return found


@pytest.fixture
def record(monkeypatch):
    """record(owner, name) lists (arguments, result) of the calls of owner.name from then on."""

    def start(owner, name):
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
            calls.append((given, original(*args, **kwargs)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return start


class LQ(gym.Env):
    """x' = x + u / 2 costs x^2 + u^2 / 5; truncated after 5 steps, never terminated."""

    observation_space, action_space = Box(-10, 10, (1,), np.float32), Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1), 0
        return np.array([self.x], dtype=np.float32), {}

    def step(self, action):
        u = float(action[0])
        reward = -(self.x**2 + 0.2 * u**2)
        self.x, self.t = self.x + 0.5 * u, self.t + 1
        return np.array([self.x], dtype=np.float32), reward, False, self.t == 5, {}


gym.register("LQ-v0", entry_point=LQ, disable_env_checker=True)


def solve_lq(gamma: float):
    """States, actions, Q* and pi* on a grid, from the fixed point of the Riccati equation."""
    p = 0.0
    for _ in range(1000):
        p = 1 + gamma * p - (0.5 * gamma * p) ** 2 / (0.2 + 0.25 * gamma * p)
    x, u = (z.reshape(-1, 1) for z in torch.meshgrid(*[torch.linspace(-0.6, 0.6, 7)] * 2, indexing="ij"))
    q_value = -(x**2 + 0.2 * u**2 + gamma * p * (x + 0.5 * u) ** 2).squeeze(-1)
    return x, u, q_value, -0.5 * gamma * p / (0.2 + 0.25 * gamma * p) * x


# ------------------------------------------------------------------------------------ episode boundaries
@pytest.mark.parametrize("num_envs, async_envs", [(1, False), (4, False), (4, True)])
def test_no_transition_joins_two_episodes(num_envs, async_envs, parts):
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


@pytest.mark.parametrize("algorithm", ["ddpg", "td3"])
def test_critics_learn_the_endless_sum_where_episodes_are_only_truncated(algorithm, parts):
    changes = dict(gamma=0.8, learning_rate=0.01, tau=0.1, total_timesteps=800)
    quick("Ones", algorithm=algorithm, **changes)
    value = parts["critic"](torch.zeros(1, 4), torch.zeros(1, 1))
    assert value.shape == (2 if algorithm == "td3" else 1, 1)
    assert value.detach().numpy() == pytest.approx(1 / (1 - 0.8), rel=0.05), "ten steps would be 4.5 at most"


# -------------------------------------------------------------------------------------------- learning rule
def test_the_target_is_the_reward_and_the_discounted_minimum_of_the_target_critics(parts, record):
    losses, samples = record(ddpg_td3, "critic_loss"), record(ddpg_td3.ReplayBuffer, "sample")
    quick("Boundary", learning_rate=0.01, reward_scale=0.1, gamma=0.5, target_noise=0.0, tau=0.0)
    batch = samples[-1][1]
    with torch.no_grad():
        action = parts["target_actor"](batch["next_obs"])
        both = parts["target_critic"](batch["next_obs"], action)
    assert (both[0] - both[1]).abs().min() > 1e-4
    expected = 0.1 * batch["reward"] + batch["discount"] * torch.minimum(*both)
    torch.testing.assert_close(losses[-1][0][1], expected)
    assert 0 in batch["discount"] and 0.5 in batch["discount"]


def test_critic_loss_equals_numbers_worked_out_by_hand():
    q_value, td_target = torch.tensor([[1.0, 2.0], [0.0, 5.0]]), torch.tensor([2.0, 4.0])
    assert ddpg_td3.critic_loss(q_value, td_target) == (1 + 4) / 2 + (4 + 1) / 2


def test_smooth_action_clips_the_noise_and_the_action():
    action, noise = torch.tensor([[0.0, 0.8], [-0.9, 0.1]]), torch.tensor([[0.3, 0.9], [-0.4, -2.0]])
    expected = torch.tensor([[0.3, 1.0], [-1.0, -0.4]])
    torch.testing.assert_close(ddpg_td3.smooth_action(action, noise, 0.5), expected)


def test_target_noise_is_drawn_for_every_sample_and_dimension(record):
    smoothed = record(ddpg_td3, "smooth_action")
    quick("Box", target_noise=0.3, target_noise_clip=0.4, batch_size=200)
    noise = torch.stack([given[1] for given, _ in smoothed])
    assert noise.shape[1:] == (200, 2) and noise.std().item() == pytest.approx(0.3, rel=0.02)
    assert len(noise.unique()) > 0.99 * noise.numel()
    assert all(given[2] == 0.4 for given, _ in smoothed)


@pytest.mark.parametrize("clip", [dict(clip_return=3.0), dict(clip_return=3.0, clip_positive_returns=True)])
def test_targets_are_clipped(clip, record):
    losses = record(ddpg_td3, "critic_loss")
    quick("Boundary", **clip)
    targets = torch.stack([given[1] for given, _ in losses])
    assert targets.max() == (0 if "clip_positive_returns" in clip else 3) and targets.min() >= -3


def test_exploration_noise_has_its_size_and_its_memory():
    np.random.seed(1)
    for kind, std, correlation in [("gaussian", 0.2, 0.0), ("ou", 0.2 / (1 - 0.85**2) ** 0.5, 0.85)]:
        noise, series = np.zeros((4, 2), dtype=np.float32), []
        for _ in range(5000):
            noise = ddpg_td3.explore(noise, kind, 0.2)
            series.append(noise)
        series = np.stack(series)[100:]
        assert series.std() == pytest.approx(std, rel=0.05) and abs(series.mean()) < 0.05
        flat = series.reshape(len(series), -1)
        assert np.mean(flat[1:] * flat[:-1]) / flat.var() == pytest.approx(correlation, abs=0.03)
        between = np.corrcoef(flat.T) - np.eye(8)
        assert np.abs(between).max() < 0.25, "each environment and dimension has noise of its own"


def test_a_gradient_step_moves_its_own_parameters_only():
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer, before = torch.optim.SGD(one.parameters(), lr=0.1), one.weight.detach().clone()
    norm = ddpg_td3.gradient_step(100 * two(one(torch.ones(1, 2))).sum(), optimizer, 0.5)
    assert norm > 0.5 and two.weight.grad is None
    assert not torch.equal(one.weight, before)
    clipped = torch.stack([p.grad.norm() for p in one.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.5, rel=1e-4)


# --------------------------------------------------------------------------------------------------- critics
def test_twin_critics_start_apart_and_stay_apart(parts):
    quick("Box", total_timesteps=400, learning_rate=0.01)
    start = ddpg_td3.Critic(Box(-1, 1, (4,)), Box(-1, 1, (2,)), 2, quick_args("Box"))
    for critic in (start, parts["critic"]):
        for parameter in critic.parameters():
            assert (parameter[0] - parameter[1]).abs().min() > 0
        gap = torch.sub(*critic(torch.randn(50, 4), torch.rand(50, 2)))
        assert gap.abs().max() > 1e-3


def test_side_by_side_is_one_by_one():
    critic = ddpg_td3.Critic(Box(-1, 1, (4,)), Box(-1, 1, (2,)), 2, quick_args("Box", hidden_sizes=(8, 6)))
    obs, action = torch.randn(5, 4), torch.rand(5, 2)
    layers = [*critic.hidden, critic.value]
    for i in range(2):
        x = torch.cat([obs, action], dim=-1)
        for layer in layers:
            x = x @ layer.weight[i] + layer.bias[i]
            x = x if layer is critic.value else x.relu()
        torch.testing.assert_close(critic(obs, action)[i], x.squeeze(-1))
    torch.testing.assert_close(critic(obs, action, n=1), critic(obs, action)[:1])


@pytest.mark.parametrize("algorithm", ["ddpg", "td3"])
def test_critics_and_actor_solve_the_linear_quadratic_problem(algorithm, parts):
    changes = dict(learning_rate=3e-3, anneal_lr=True, tau=0.02, exploration_noise=0.3, batch_size=128)
    changes |= dict(num_envs=1, total_timesteps=2500, learning_starts=500, hidden_sizes=(32, 32))
    quick("LQ-v0", algorithm=algorithm, gamma=0.8, target_noise=0.0, buffer_size=5000, **changes)
    obs, action, q_value, best = solve_lq(gamma=0.8)
    assert (parts["critic"](obs, action) - q_value).abs().max() < 0.2  # Q* goes from -1.4 to 0
    assert (parts["actor"](obs) - best).abs().max() < 0.2  # pi* goes from -0.7 to 0.7


# ------------------------------------------------------------------------------------------------- training
def test_presets_fill_what_is_not_given():
    for algorithm, expected in [("ddpg", [False, 1, 0.0, "ou"]), ("td3", [True, 2, 0.2, "gaussian"])]:
        quick("Walk", run_dir=algorithm, algorithm=algorithm)
        saved = json.loads(open(f"{algorithm}/args.json").read())
        names = ("twin_critics", "policy_delay", "target_noise", "noise")
        assert [saved[name] for name in names] == expected
    quick("Walk", run_dir="mixed", algorithm="ddpg", twin_critics=True, target_noise=0.1)
    saved = json.loads(open("mixed/args.json").read())
    assert [saved[name] for name in names] == [True, 1, 0.1, "ou"]


@pytest.mark.parametrize("ratio, delay", [(0.25, 2), (1.0, 3), (5.0, 2)])
def test_updates_per_step_and_policy_delay_count_updates(ratio, delay, parts, record):
    record_steps, targets = record(ddpg_td3, "gradient_step"), record(ddpg_td3, "polyak_update")
    quick("Walk", updates_per_step=ratio, policy_delay=delay, total_timesteps=96, learning_starts=32)
    mine = lambda part: sum(given[1] is parts[f"{part}_optimizer"] for given, _ in record_steps)
    first, last = int(ratio * 30), int(ratio * 96)  # the first update follows the step that reaches 32
    assert mine("critic") == last - first
    assert mine("actor") == sum(number % delay == 0 for number in range(first, last))
    assert len(targets) == 2 * mine("actor"), "both target networks move with the actor"


def test_the_rhythm_of_the_delay_survives_a_checkpoint(parts, record):
    changes = dict(policy_delay=3, num_envs=1, checkpoint_every=50, learning_starts=32)
    calls = record(ddpg_td3, "gradient_step")
    order = lambda: [given[1] is parts["actor_optimizer"] for given, _ in calls]
    quick("Walk", run_dir="whole", total_timesteps=80, **changes)
    whole = order()
    calls.clear()
    quick("Walk", run_dir="part", total_timesteps=50, **changes)
    first = order()
    args = ddpg_td3.parse_args(["--resume", "part", "--total-timesteps", "80"])
    calls.clear()
    ddpg_td3.train(args)
    assert first + order() == whole and True in whole


def test_actions_live_on_the_unit_cube_and_reach_the_bounds_of_each_dimension(parts):
    quick("Box", total_timesteps=200, exploration_noise=1.0, batch_size=64)
    stored = parts["buffer"].action[parts["buffer"].valid].reshape(-1, 2)
    sent = np.array(Boxes.actions)
    for action in stored * [2, 2] + [1, 0]:  # what the environment was sent
        assert np.abs(sent - action).sum(axis=1).min() < 1e-5
    assert len(stored) == 200
    assert stored.min() == -1 and stored.max() == 1
    assert sent.min(0).tolist() == [-1, -2] and sent.max(0).tolist() == [3, 2]


def test_environments_explore_apart(parts):
    quick("Ones", num_envs=4, total_timesteps=200, learning_starts=4)  # all observe the same
    actions = parts["buffer"].action[parts["buffer"].valid].reshape(-1, 4)[1:]
    assert np.abs(actions[:, 1:] - actions[:, :1]).min() > 0


def test_n_step_reaches_the_buffer(record):
    samples = record(ddpg_td3.ReplayBuffer, "sample")
    quick("Boundary", n_step=3, gamma=0.5)
    discounts = {x for _, batch in samples for x in batch["discount"].tolist()}
    assert discounts == {0, 0.5, 0.25, 0.125}


def test_normalized_rewards_are_divided_by_the_present_deviation_of_the_returns_and_clipped(parts, record):
    losses, samples = record(ddpg_td3, "critic_loss"), record(ddpg_td3.ReplayBuffer, "sample")
    quick("Boundary", normalize_reward=True, reward_scale=20.0, gamma=0.5, target_noise=0.0, tau=0.0)
    batch, norm = samples[-1][1], parts["reward_norm"]
    assert norm.count == 96
    reward = 20 * batch["reward"] / norm.var.sqrt()
    assert reward.max() > 10 > reward.min(), "some are clipped and some are not"
    with torch.no_grad():
        action = parts["target_actor"](batch["next_obs"])
        next_value = parts["target_critic"](batch["next_obs"], action).amin(dim=0)
    expected = reward.clamp(-10, 10) + batch["discount"] * next_value
    torch.testing.assert_close(losses[-1][0][1], expected, rtol=1e-4, atol=1e-4)


def test_normalize_obs_reaches_actor_and_critic(parts):
    quick("Boundary", normalize_obs=True)
    norm = parts["actor"].obs_norm
    assert norm.count == 96 and norm.var.max() > 1
    saved = checkpoint()["agent"]
    assert torch.equal(saved["obs_norm.mean"], norm.mean)


def test_learning_rates_fall_to_0_if_asked(parts):
    quick("Walk", anneal_lr=True, learning_rate=0.1, actor_lr=0.01)
    actor, critic = (parts[f"{part}_optimizer"].param_groups[0]["lr"] for part in ("actor", "critic"))
    assert (float(actor), float(critic)) == (0, 0)
    quick("Walk", run_dir="fixed", learning_rate=0.1, actor_lr=0.01, actor_weight_decay=0.5)
    groups = [parts[f"{part}_optimizer"].param_groups[0] for part in ("actor", "critic")]
    assert [round(float(group["lr"]), 6) for group in groups] == [0.01, 0.1]
    assert [group["weight_decay"] for group in groups] == [0.5, 0]


def test_wrong_actions_end_in_one_clear_line(capsys, monkeypatch):
    cases = {
        ("--env-id", "CartPole-v1"): "dqn.py or sac.py",
        ("--env-id", "probe_envs:Spaces-v0", "--env-kwargs", '{"action": "multi_binary"}'): "ppo.py",
        ("--env-id", "probe_envs:Spaces-v0", "--env-kwargs", '{"action": "half_bounded"}'): "ppo.py",
        ("--env-id", "Pendulum-v1", "--buffer-size", "2000000"): "--buffer-size",
    }
    monkeypatch.setattr(ddpg_td3, "free_memory", lambda device: 1e6)
    for words, hint in cases.items():
        monkeypatch.setattr("sys.argv", ["ddpg_td3.py", *words])
        with pytest.raises(SystemExit) as stop:
            ddpg_td3.main()
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and hint in said, said


def test_images_are_seen(parts):
    env = dict(env="Spaces", env_kwargs=dict(obs="small", action="box"))
    quick(**env, total_timesteps=40)
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in parts["critic"].encoder)
    assert all(torch.isfinite(x).all() for x in checkpoint()["agent"].values())


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
def test_checkpoints_with_and_without_compile_load_in_each_other():
    for compiled in (False, True):
        run = f"run{compiled}"
        quick("Walk", run_dir=run, compile=compiled, total_timesteps=40)
        before = checkpoint(run)["agent"]
        args = ddpg_td3.parse_args(["--resume", run])
        ddpg_td3.train(ddpg_td3.replace(args, total_timesteps=48, compile=not compiled))
        after = checkpoint(run)["agent"]
        assert before.keys() == after.keys() and not equal(before, after)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_td3_learns_pendulum(seed):
    args = ddpg_td3.parse_args(["--env-id", "Pendulum-v1", "--run-dir", "run", "--seed", str(seed)])
    fast = dict(total_timesteps=12_000, learning_starts=400, batch_size=64, gamma=0.95, tau=0.01)
    fast |= dict(learning_rate=2e-3, eval_every=1000, checkpoint_every=0, stop_return=-200)
    assert ddpg_td3.train(ddpg_td3.replace(args, **fast)).mean() >= -200
