"""Tests of what only sac.py does; the rest is in test_off_policy.py and, for every script, elsewhere."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, load_script, progress
from gymnasium.spaces import Box, Discrete
from off_policy import Trainer, recorder
from probe_envs import Spaces, spaces_actions

sac = load_script(ALGOS / "sac.py")

quick = Trainer(sac)
quick_args = quick.args
record = pytest.fixture(recorder)


@pytest.fixture
def parts(monkeypatch) -> dict:
    return quick.watch(monkeypatch)


# -------------------------------------------------------------------------------------------- learning rule
def test_log_probability_equals_the_numerical_change_of_variables():
    """The share of draws that a small interval of actions gets, over its width, for several Gaussians."""
    for mean, log_std in [(0.0, 0.0), (0.7, -1.0), (-1.2, 0.3)]:
        u = mean + math.exp(log_std) * torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)
        noise = (u - mean) * math.exp(-log_std)
        columns = [torch.full((7, 1), x, dtype=torch.float64) for x in (mean, log_std)]
        action, log_prob = sac.squashed_gaussian(*columns, noise[:, None])
        torch.testing.assert_close(action.squeeze(-1), u.tanh())
        normal, width = torch.distributions.Normal(mean, math.exp(log_std)), 1e-5
        edges = [torch.atanh(action.squeeze(-1) + side * width) for side in (-1, 1)]
        density = (normal.cdf(edges[1]) - normal.cdf(edges[0])) / (2 * width)
        torch.testing.assert_close(log_prob, density.log(), atol=1e-5, rtol=1e-5)


def test_log_probability_sums_over_dimensions_and_stays_finite_at_the_edge():
    mean = torch.tensor([[0.3, 40.0], [-60.0, 0.1]], requires_grad=True)
    action, log_prob = sac.squashed_gaussian(mean, torch.zeros(2, 2), torch.zeros(2, 2))
    single = sac.squashed_gaussian(mean[:, :1], torch.zeros(2, 1), torch.zeros(2, 1))[1]
    other = sac.squashed_gaussian(mean[:, 1:], torch.zeros(2, 1), torch.zeros(2, 1))[1]
    torch.testing.assert_close(log_prob, single + other)
    log_prob.sum().backward()
    assert action.abs().max() == 1 and log_prob.isfinite().all() and mean.grad.isfinite().all()
    assert log_prob[0].item() == pytest.approx(2 * 40 - 2 * math.log(2) - math.log(2 * math.pi), abs=0.2)


def test_soft_value_of_a_draw_and_of_choices_equal_numbers_worked_out_by_hand():
    q_value, log_prob = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([-1.0, 0.5])
    assert sac.soft_value(q_value, log_prob, None, 0.2).tolist() == pytest.approx([1.2, 2.9])
    q_values = torch.tensor([[[1.0, 5.0]], [[2.0, 3.0]]])  # two critics, one state, two choices
    prob = torch.tensor([[0.25, 0.75]])
    expected = 0.25 * (1 - 0.2 * math.log(0.25)) + 0.75 * (3 - 0.2 * math.log(0.75))
    assert sac.soft_value(q_values, prob.log(), prob, 0.2).tolist() == pytest.approx([expected])


def test_smoothness_is_measured_row_by_row():
    one, other = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    assert sac.smoothness_loss(one, other) == 2.5


def test_the_actor_draws_what_it_says():
    actor = sac.Actor(Box(-1, 1, (4,)), Box(-1, 1, (2,)), quick_args("Box"))
    obs = torch.randn(1, 4).expand(20_000, -1)
    action, log_prob, prob = actor(obs)
    assert prob is None and action.shape == (20_000, 2) and log_prob.shape == (20_000,)
    mean = actor.mean(obs)[:1].atanh()
    log_std = actor.head(actor.trunk(obs[:1])).chunk(2, dim=-1)[1]
    u = action.double().atanh()
    torch.testing.assert_close(u.mean(0), mean[0].double(), atol=0.03, rtol=0)
    torch.testing.assert_close(u.std(0), log_std[0].exp().double(), atol=0.03, rtol=0)


def test_discrete_actors_draw_with_their_probabilities_and_critics_choose_the_taken_action():
    args, spaces = quick_args("Box"), (Box(-1, 1, (4,)), Discrete(3))
    actor, critic = sac.DiscreteActor(*spaces, args), sac.Critic(*spaces, 2, args)
    with torch.no_grad():
        actor.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    obs = torch.randn(1, 4).expand(20_000, -1)
    _, log_prob, prob = actor(obs)
    torch.testing.assert_close(prob.sum(-1), torch.ones(20_000))
    torch.testing.assert_close(log_prob.exp(), prob)
    shares = torch.bincount(actor.act(obs, actor.noise(20_000)), minlength=3) / 20_000
    torch.testing.assert_close(shares, prob[0].detach(), atol=0.02, rtol=0)
    assert actor.mean(obs)[0] == 2
    obs, action = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    q_values = critic(obs)
    assert q_values.shape == (2, 5, 3)
    torch.testing.assert_close(critic(obs, action), q_values[:, torch.arange(5), action])


@pytest.mark.parametrize("asked, kept", [(-90.0, -20.0), (90.0, 2.0)])
def test_the_spread_of_actions_stays_within_limits(asked, kept):
    actor = sac.Actor(Box(-1, 1, (4,)), Box(-1, 1, (2,)), quick_args("Box"))
    with torch.no_grad():
        actor.head.bias[2:] = asked
    obs, noise = torch.randn(5, 4), 0.1 * torch.randn(5, 2)
    limited = sac.squashed_gaussian(actor.mean(obs).atanh(), torch.tensor(kept).expand(5, 2), noise)
    torch.testing.assert_close(actor(obs, noise)[:2], limited)


# --------------------------------------------------------------------------------------------- temperature
@pytest.mark.parametrize("target", [-1.0, 0.0])
def test_the_temperature_brings_the_entropy_to_its_target(target, parts):
    """A bandit that pays for one action; target_entropy 0 is honoured."""
    changes = dict(gamma=0.0, learning_rate=0.01, batch_size=64, hidden_sizes=(16,), total_timesteps=1200)
    quick("Box", target_entropy=target, **changes, buffer_size=2000)
    rows = progress()
    assert float(rows[-1]["policy/entropy"]) == pytest.approx(target, abs=0.4)
    with torch.no_grad():
        log_prob = parts["actor"](torch.zeros(5000, 4))[1]
    assert -log_prob.mean().item() == pytest.approx(target, abs=0.4)


@pytest.mark.parametrize("target, sign", [(9.0, 1), (-9.0, -1)])
def test_the_temperature_rises_when_the_entropy_is_too_low(target, sign, parts):
    quick("Box", target_entropy=target, alpha=0.5)
    assert sign * (parts["temperature"]().item() - 0.5) > 0.005


def test_a_fixed_temperature_stays(parts):
    quick("Box", auto_alpha=False, alpha=0.3)
    assert parts["temperature"]().item() == pytest.approx(0.3)
    assert float(progress()[-1]["policy/alpha"]) == pytest.approx(0.3)


def test_a_run_that_learned_its_temperature_goes_on_with_a_fixed_one_if_asked():
    quick("Box")
    words = "--resume run --total-timesteps 100 --no-auto-alpha --alpha 0.05"
    sac.train(sac.parse_args(words.split()))
    assert float(progress()[-1]["policy/alpha"]) == pytest.approx(0.05)


def test_target_entropy_follows_the_action_space():
    for env, kwargs, expected in [("Box", {}, -2), ("Walk", {"actions": "discrete"}, 0.5 * math.log(2))]:
        quick(env, run_dir=env, env_kwargs=kwargs)
        assert json.loads(open(f"{env}/args.json").read())["target_entropy"] == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------- critics
def test_the_target_is_the_soft_value_of_the_target_critics(parts, record):
    losses, samples = record(sac, "critic_loss"), record(sac.ReplayBuffer, "sample")
    values, critics = record(sac, "soft_value"), record(sac.Critic, "forward")
    quick("Boundary", learning_rate=0.01, reward_scale=0.1, gamma=0.5, auto_alpha=False, alpha=0.3)
    batch = samples[-1][1]
    of_target = values[-2]  # the last but one: that of the actor's loss follows
    judge, states = critics[-3][0][:2]  # two calls of the online critics follow
    assert judge is parts["target_critic"] and torch.equal(states, batch["next_obs"])
    assert of_target[0][3] == pytest.approx(0.3) and of_target[0][0].shape == (2, 16)
    expected = 0.1 * batch["reward"] + batch["discount"] * of_target[1]
    torch.testing.assert_close(losses[-1][0][1], expected)
    assert 0 in batch["discount"] and 0.5 in batch["discount"]


# ------------------------------------------------------------------------------------------------- training
def test_choices_become_the_softmax_of_their_rewards_over_the_temperature(parts):
    """With gamma 0 Freedom is a bandit: at even times choice 0 pays 1, at odd times nothing pays."""
    changes = dict(gamma=0.0, reward_scale=10.0, auto_alpha=False, alpha=0.5, learning_rate=0.02)
    quick("probe_envs:Freedom-v0", **changes, total_timesteps=300, hidden_sizes=(16,), buffer_size=1000)
    _, _, prob = parts["actor"](torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]))
    best = 1 / (1 + math.exp(-1 / 0.5))
    assert prob[:, 0].tolist() == pytest.approx([best, 0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("caps", ["caps_temporal", "caps_spatial"])
def test_caps_is_added_to_the_loss_of_the_actor(caps, parts, record):
    distances, values = record(sac, "smoothness_loss"), record(sac, "soft_value")
    steps, samples = record(sac, "gradient_step"), record(sac.ReplayBuffer, "sample")
    means = record(sac.Actor, "mean")
    quick("Walk", **{caps: 10.0}, caps_epsilon=0.5, learning_rate=0.0)
    loss = [given[0] for given, _ in steps if given[1] is parts["actor_optimizer"]][-1]
    (action, near_action), distance = distances[-1]
    torch.testing.assert_close(loss, 10 * distance.detach() - values[-1][1].detach().mean())
    batch, mean = samples[-1][1], parts["actor"].mean
    torch.testing.assert_close(action, mean(batch["obs"]).detach())
    successors = torch.equal(near_action, mean(batch["next_obs"]).detach())
    assert successors == (caps == "caps_temporal") and distance > 0
    if caps == "caps_spatial":
        near, obs = (torch.cat([x[1] for x, _ in means if len(x[1]) == 16][i::2]) for i in (0, 1))
        assert (near - obs).std().item() == pytest.approx(0.5, rel=0.1)


def test_caps_makes_the_actor_smooth(parts):
    distances, starts = [], torch.randn(200, 2)
    for i, weight in enumerate((0.0, 10.0)):
        changes = dict(caps_temporal=weight, total_timesteps=300, learning_rate=0.01)
        quick("Walk", run_dir=f"run{i}", **changes)
        mean = parts["actor"].mean
        distances.append((mean(starts) - mean(starts + 0.1)).norm(dim=-1).mean().item())
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("ratio", [0.25, 1.0, 5.0])
def test_updates_per_step(ratio, parts, record):
    record_steps, targets = record(sac, "gradient_step"), record(sac, "polyak_update")
    quick("Walk", updates_per_step=ratio, total_timesteps=96, learning_starts=32)
    updates = int(ratio * 96) - int(ratio * 30)  # the first one follows the step that reaches 32
    assert len(targets) == updates and len(record_steps) == 3 * updates
    assert {given[1] for given, _ in record_steps} == {
        parts[f"{part}_optimizer"] for part in ("actor", "critic", "alpha")
    }


@pytest.mark.parametrize("env, noise_steps", [("Ones", 1), ("Ones", 4), ("Boundary", 4)])
def test_noise_is_kept_for_noise_steps_and_drawn_anew_for_each_segment(env, noise_steps, monkeypatch, record):
    """Of the actor's noise and of the random actions at first; a segment starts at step 66."""
    draws = [record(actor, "noise") for actor in (sac.Actor, sac.DiscreteActor)]
    used = [record(actor, "act") for actor in (sac.Actor, sac.DiscreteActor)]
    added = record(sac.ReplayBuffer, "add")
    quick(env, noise_steps=noise_steps, checkpoint_every=66, learning_starts=34,
          env_kwargs={"actions": "box" if env == "Ones" else "discrete"})  # fmt: skip
    draws, used = sum(draws, []), [arguments[-1] for arguments, _ in sum(used, [])]
    new = [t for t in range(48) if t == 33 or t % noise_steps == 0]
    assert len(draws) == len(new) and len(used) == 48 - 17
    for t in range(18, 48):
        assert torch.equal(used[t - 17], used[t - 18]) == (t not in new)
    first = [arguments[1] for arguments, _ in added[:17]]
    kept = [np.array_equal(*pair) for pair in zip(first, first[1:], strict=False)]
    wanted = [t not in new for t in range(1, 17)]
    assert kept == wanted if env == "Ones" else all(kept[t] for t in range(16) if wanted[t])


def test_images_and_choices_are_learned_from(parts):
    quick("Spaces", env_kwargs=dict(obs="small", action="discrete_start"), total_timesteps=40)
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in parts["critic"].encoder)
    assert all(torch.isfinite(x).all() for x in checkpoint()["agent"].values())


def test_choices_reach_the_environment_in_its_own_type():
    quick("Spaces", env_kwargs=dict(action="discrete_int8"), total_timesteps=40)
    assert {action.dtype for action in Spaces.actions} == {spaces_actions()["discrete_int8"].dtype}
