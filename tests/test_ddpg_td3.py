"""Tests of what only ddpg_td3.py does; the rest is in test_off_policy.py and, for every script, elsewhere."""

import json

import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, load_script
from off_policy import Trainer, recorder
from probe_envs import Boundary

ddpg_td3 = load_script(ALGOS / "ddpg_td3.py")

quick = Trainer(ddpg_td3)
quick_args = quick.args
record = pytest.fixture(recorder)


@pytest.fixture
def parts(monkeypatch) -> dict:
    return quick.watch(monkeypatch)


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


@pytest.mark.parametrize("kind", ["gaussian", "ou"])
def test_exploration_noise_is_forgotten_where_an_episode_or_a_segment_starts(kind, record):
    """A checkpoint, after which a segment starts, follows steps 20 and 40 of both environments."""
    explored, resets = record(ddpg_td3, "explore"), record(ddpg_td3, "reset_done")
    quick("Boundary", noise=kind, exploration_noise=0.3, learning_starts=0, checkpoint_every=40)
    assert len(explored) == 48 and all(given[1:] == [kind, 0.3] for given, _ in explored)
    for t, ((old_noise, *_), _) in enumerate(explored):
        starts = np.ones(2, dtype=bool) if t in (0, 20, 40) else resets[t - 1][0][3]
        assert np.array_equal(old_noise[:, 0] == 0, starts), t


def test_the_actor_climbs_the_value_of_the_first_critic(parts, record):
    steps, samples = record(ddpg_td3, "gradient_step"), record(ddpg_td3.ReplayBuffer, "sample")
    quick("Walk", learning_rate=0.0)
    number = max(i for i, (given, _) in enumerate(steps) if given[1] is parts["actor_optimizer"])
    updates = sum(given[1] is parts["critic_optimizer"] for given, _ in steps[:number])
    obs = samples[updates - 1][1]["obs"]
    first, second = parts["critic"](obs, parts["actor"](obs)).mean(dim=-1)
    torch.testing.assert_close(steps[number][0][0], -first.detach())
    assert abs(first - second) > 1e-3


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


def test_normalized_rewards_are_divided_by_the_present_deviation_of_the_returns_and_clipped(parts, record):
    losses, samples = record(ddpg_td3, "critic_loss"), record(ddpg_td3.ReplayBuffer, "sample")
    quick("Boundary", normalize_reward=True, reward_scale=20.0, gamma=0.5, target_noise=0.0, tau=0.0)
    batch, norm = samples[-1][1], parts["reward_norm"]
    returns, return_ = [], {}
    for evaluates, number, _, t, _, reward in Boundary.steps:
        if not evaluates:
            return_[number] = reward + 0.5 * (return_[number] if t > 1 else 0)
            returns.append(return_[number])
    assert norm.count == 96 == len(returns) and norm.var.item() == pytest.approx(np.var(returns))
    reward = 20 * batch["reward"] / norm.var.sqrt()
    assert reward.max() > 10 > reward.min(), "some are clipped and some are not"
    with torch.no_grad():
        action = parts["target_actor"](batch["next_obs"])
        next_value = parts["target_critic"](batch["next_obs"], action).amin(dim=0)
    expected = reward.clamp(-10, 10) + batch["discount"] * next_value
    torch.testing.assert_close(losses[-1][0][1], expected, rtol=1e-4, atol=1e-4)


def test_weights_decay_as_asked_also_in_a_resumed_run():
    decay = lambda: [checkpoint()[f"{part}_optimizer"]["param_groups"][0]["weight_decay"]
                     for part in ("actor", "critic")]  # fmt: skip
    quick("Walk", total_timesteps=36, actor_weight_decay=0.1, critic_weight_decay=0.2)
    assert decay() == [0.1, 0.2]
    words = "--resume run --total-timesteps 40 --critic-weight-decay 0.5"
    ddpg_td3.train(ddpg_td3.parse_args(words.split()))
    assert decay() == [0.1, 0.5]


def test_images_are_seen(parts):
    env = dict(env="Spaces", env_kwargs=dict(obs="small", action="box"))
    quick(**env, total_timesteps=40)
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in parts["critic"].encoder)
    assert all(torch.isfinite(x).all() for x in checkpoint()["agent"].values())
