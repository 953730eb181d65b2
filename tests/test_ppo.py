"""PPO's own tests. What every script must do (seeds, resume, signals, wrong inputs) is tested elsewhere."""

import copy
import csv
import json
import math
import random
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script, points, progress
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from probe_envs import (
    Boundary,
    Boxes,
    Broken,
    Masked,
    Probe,
    Spaces,
    Walk,
    boundary_length,
    boundary_return,
    boundary_reward,
    boundary_terminates,
    spaces_actions,
    spaces_observations,
)
from torch.distributions import Categorical, Normal
from torch.optim.optimizer import register_optimizer_step_pre_hook

ppo = load_script(ALGOS / "ppo.py")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=2, num_steps=16,
    update_epochs=2, num_minibatches=2, hidden_sizes=(8,), total_timesteps=96,
)  # fmt: skip


def quick_args(env: str, run_dir="run", env_kwargs=None, **changes):
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    return ppo.Args(**QUICK | given | changes)


def quick(env: str, **changes) -> np.ndarray:
    """A training of a moment in one of the probe_envs, or in any environment by its id."""
    return ppo.train(quick_args(env, **changes))


def snapshot(x):
    """A copy of tensors and arrays, also those in dicts, lists and tuples."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    return [snapshot(value) for value in x] if isinstance(x, (list, tuple)) else x


class Call(NamedTuple):
    args: list
    kwargs: dict
    result: object


@pytest.fixture
def record(monkeypatch):
    """record(owner, name) lists the calls of owner.name from then on: copies of what goes in and out."""

    def start(owner, name: str) -> list[Call]:
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            given = snapshot(args), snapshot(kwargs)
            result = original(*args, **kwargs)
            calls.append(Call(*given, snapshot(result)))
            return result

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return start


@pytest.fixture
def runs(monkeypatch):
    """Every Run that is made; its agent as it is at any time, and as it was at first."""
    made = []

    class Watched(ppo.Run):
        def __init__(self, args, agent, **parts):
            made.append(self)
            self.first_agent = copy.deepcopy(agent)
            super().__init__(args, agent, **parts)

    monkeypatch.setattr(ppo, "Run", Watched)
    return made


@pytest.fixture
def steps(runs):
    """What each step of the optimizer uses: norm of the gradient; rates and values of actor and critic."""
    seen = []

    def look(optimizer, *_):
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        named = list(runs[-1].agent.named_parameters())
        step = SimpleNamespace(rates={}, values={}, eps=optimizer.param_groups[0]["eps"])
        step.grad_norm = torch.stack([p.grad.norm() for _, p in named]).norm().item()
        assert sorted(rates) == sorted(id(p) for _, p in named), "every parameter is optimized"
        for part in ("actor", "critic"):
            own = [p for name, p in named if name.startswith("critic") == (part == "critic")]
            step.values[part] = snapshot(own)
            (step.rates[part],) = {rates[id(p)] for p in own}
        seen.append(step)

    handle = register_optimizer_step_pre_hook(look)
    yield seen
    handle.remove()


@pytest.fixture
def no_evaluation(monkeypatch):
    """Evaluations score 0 without playing, so that all steps of the environments are the training's."""
    names = ("returns", "discounted", "lengths", "terminated", "success")
    scores = lambda args, *_: {name: np.zeros(args.eval_episodes) for name in names}
    monkeypatch.setattr(ppo, "evaluate", scores)


# ------------------------------------------------------------------------------------ episode boundaries


@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_no_stored_transition_joins_two_episodes(num_envs, async_envs, record):
    rollouts = record(ppo.Storage, "to_device")
    sizes = dict(num_envs=num_envs, num_steps=20, total_timesteps=60 * num_envs)
    # the checkpoint is due after the second of three rollouts, in the middle of episodes
    quick("Boundary", async_envs=async_envs, checkpoint_every=40 * num_envs, **sizes)
    rollouts = [call.result for call in rollouts]
    assert len(rollouts) == 3
    rows = {name: torch.cat([rollout[name] for rollout in rollouts]).numpy() for name in rollouts[0]}
    for i in range(num_envs):
        due = None  # what the next row has to start from
        for t in range(60):
            number, episode, time, end = map(int, rows["obs"][t, i])
            if t in (0, 40):  # segments start with new environments
                assert (episode, time) == (0, 0)
                assert t == 0 or number != due[0], "the segment has a seed of its own"
            else:
                assert [number, episode, time] == due, "nothing between a transition and the next"
            assert end == 0, "no action is chosen in a final observation"
            last = time + 1 == boundary_length(number, episode)
            terminates = last and boundary_terminates(number, episode)
            successor = [number, episode, time + 1, 1 if terminates else 2 if last else 0]
            assert rows["next_obs"][t, i].tolist() == successor, "next_obs is the true successor"
            assert rows["reward"][t, i] == boundary_reward(episode, time + 1)
            assert rows["terminated"][t, i] == terminates and rows["done"][t, i] == last
            due = [number, episode + 1, 0] if last else successor[:3]
        assert rows["done"][:20, i].any() and rows["terminated"][:, i].any()
        assert (rows["done"] > rows["terminated"])[:, i].any(), "an episode that is truncated"
    if num_envs > 1:
        assert len(set(rows["obs"][0, :, 0])) == num_envs, "the environments differ"


def played() -> list[tuple]:
    """(number, episode, t, action, reward) of the steps of Boundary outside evaluations."""
    return [step[1:] for step in Boundary.steps if not step[0]]


@pytest.mark.parametrize("num_envs, total", [(1, 48), (3, 100), (2, 1)])
def test_total_timesteps_are_transitions_of_the_environment_rounded_up_to_rollouts(
    num_envs, total, record, capsys
):
    rollouts = record(ppo.Storage, "to_device")
    quick("Boundary", num_envs=num_envs, num_steps=16, num_minibatches=1, total_timesteps=total)
    rounded = math.ceil(total / (16 * num_envs)) * 16 * num_envs
    assert len(played()) == rounded
    assert (f"rounded up to {rounded}" in capsys.readouterr().out) == (rounded != total)
    stored = np.concatenate([call.result["action"].flatten() for call in rollouts])
    assert stored.tolist() == [step[3] for step in played()], "what is stored was played"
    assert checkpoint()["run"]["env_steps"] == rounded and int(progress()[-1]["step"]) == rounded
    assert json.loads(open("run/args.json").read())["total_timesteps"] == rounded


def test_logged_returns_and_lengths_are_true_also_across_a_checkpoint():
    num_envs = 2
    quick("Boundary", num_envs=num_envs, num_steps=25, checkpoint_every=100, total_timesteps=300)
    expected = {"train/episode_return": [], "train/episode_length": []}
    started = set()
    for k, (number, episode, t, _, _) in enumerate(played()):
        started.add((k // 100, number, episode))
        if t == boundary_length(number, episode):
            ended_at = (k // num_envs + 1) * num_envs
            expected["train/episode_return"].append((ended_at, boundary_return(number, episode)))
            expected["train/episode_length"].append((ended_at, float(t)))
    logged = points()
    assert {name: logged[name] for name in expected} == expected
    assert len(started) > len(expected["train/episode_return"]) + num_envs, "segments cut episodes"
    for name, column in expected.items():
        for row in progress():
            step = int(row["step"])
            values = [value for ended_at, value in column if step - 50 < ended_at <= step]
            assert float(row[name]) == pytest.approx(np.mean(values))


def test_a_rollout_of_one_step_gives_no_nan():
    """The variance of one number is 0, not undefined."""
    quick("Boundary", num_envs=1, num_steps=1, num_minibatches=1, total_timesteps=3)
    assert [row["value/explained_variance"] for row in progress()[1:]] and progress()[-1]["step"] == "3"


def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(runs, record, monkeypatch):
    rollouts, seen, compute_gae = record(ppo.Storage, "to_device"), [], ppo.compute_gae

    def watched(*inputs):
        rollout, agent = rollouts[-1].result, runs[0].agent  # the networks that collected the rollout
        values = [agent.value(rollout[name].flatten(0, 1)).view(20, 4) for name in ("obs", "next_obs")]
        result = compute_gae(*inputs)
        seen.append(snapshot((rollout, values, inputs, result)))
        return result

    monkeypatch.setattr(ppo, "compute_gae", watched)
    changes = dict(gamma=0.8, gae_lambda=0.7, learning_rate=0.01)
    quick("Boundary", num_envs=4, num_steps=20, total_timesteps=240, **changes)
    assert len(seen) == 3
    for rollout, (value, next_value), inputs, result in seen:
        for got, expected in zip(inputs[:3], (rollout["reward"], value, next_value), strict=True):
            torch.testing.assert_close(got, expected)
        end = rollout["next_obs"][..., 3]
        assert torch.equal(inputs[3], (end == 1).float()) and torch.equal(inputs[4], (end > 0).float())
        assert inputs[5:] == [0.8, 0.7]
        truncated = end[:-1] == 2
        assert truncated.any()
        fresh = value[1:][truncated]  # the value of the first observation of the next episode: the trap
        assert (next_value[:-1][truncated] - fresh).abs().min() > 1e-4
        arrays = [rollout["reward"], value, next_value, end == 1, end > 0]
        expected = brute_force_gae(*(x.double().numpy() for x in arrays), 0.8, 0.7)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_critic_learns_the_endless_sum_where_episodes_are_only_truncated(runs):
    rates = dict(learning_rate=0.01, gamma=0.9, update_epochs=5, num_minibatches=4)
    quick("Ones", num_envs=4, num_steps=32, total_timesteps=8192, max_grad_norm=0.0, **rates)
    value = runs[0].agent.value(torch.zeros(1, 4)).item()
    assert value == pytest.approx(1 / (1 - 0.9), rel=0.03), "the sum of ten steps is 6.5 at most"


# ------------------------------------------------------------------------------------------------ update
POLICIES = {
    "discrete": dict(env="CartPole-v1"),
    "normalize_obs": dict(env="Boundary", normalize_obs=True, normalize_reward=True),
    "mask": dict(env="Masked"),
    "multi_discrete": dict(env="Spaces", env_kwargs=dict(action="multi_discrete")),
    "box": dict(env="Box", normalize_obs=True),
    "image": dict(env="Spaces", env_kwargs=dict(obs="small"), normalize_obs=True, shared_trunk=True),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_ratio_is_1_on_the_first_minibatch_of_every_rollout(policy, record, no_evaluation):
    losses = record(ppo, "policy_loss")
    sizes = dict(num_steps=32, total_timesteps=192, update_epochs=2, num_minibatches=4)
    quick(**policy, **sizes, learning_rate=0.02)
    log_ratios = [call.args[0] - call.args[1] for call in losses]
    assert len(log_ratios) == 3 * 2 * 4
    for k, log_ratio in enumerate(log_ratios):
        if k % 8 == 0:
            assert log_ratio.abs().max() < 1e-5
            assert (log_ratio.exp() - 1 - log_ratio).mean().abs() < 1e-9, "KL"
        elif k % 8 == 7:
            assert log_ratio.abs().max() > 1e-3, "later minibatches meet a policy that has moved"


def test_a_minibatch_of_one_gives_no_nan():
    quick("CartPole-v1", num_envs=1, num_steps=4, num_minibatches=4, total_timesteps=8)
    assert all(math.isfinite(float(value)) for row in progress() for value in row.values())
    assert all(torch.isfinite(x).all() for x in checkpoint()["agent"].values())


def test_every_epoch_visits_every_transition_once_in_a_new_order(record, no_evaluation):
    losses, advantages = record(ppo, "policy_loss"), record(ppo, "compute_gae")
    quick("CartPole-v1", normalize_advantage=False, update_epochs=3, num_minibatches=4, total_timesteps=32)
    assert [len(call.args[2]) for call in losses] == [8] * 12
    epochs = torch.cat([call.args[2] for call in losses]).view(3, 32)
    whole = advantages[0].result.flatten()
    assert len(set(whole.tolist())) == 32
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, whole.sort().values)
    assert not torch.equal(epochs[0], whole) and not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_normalized_by_the_standard_deviation_of_their_minibatch(
    normalize, record, no_evaluation
):
    losses, advantages = record(ppo, "policy_loss"), record(ppo, "compute_gae")
    quick("Boundary", normalize_advantage=normalize, update_epochs=1, num_minibatches=1, total_timesteps=32)
    quick("Boundary", run_dir="run2", normalize_advantage=normalize, num_minibatches=4, total_timesteps=32)
    raw, used = advantages[0].result.flatten().sort().values, losses[0].args[2].sort().values
    expected = (raw - raw.mean()) / raw.std() if normalize else raw
    torch.testing.assert_close(used, expected, rtol=1e-4, atol=1e-5)
    assert raw.std() > 5, "far from normal by itself"
    for call in losses[1:]:
        normal = abs(call.args[2].mean()) < 1e-5 and abs(call.args[2].std() - 1) < 1e-4
        assert normal == normalize


def test_log_probabilities_are_of_the_unclipped_action_and_only_the_environment_gets_a_clipped_one(
    runs, record, no_evaluation
):
    rollouts, acts = record(ppo.Storage, "to_device"), record(ppo.GaussianHead, "sample")
    forwards = record(ppo.ActorCritic, "forward")
    quick("Box", num_steps=50, total_timesteps=100)
    sampled = torch.from_numpy(np.stack([call.result for call in acts[-50:]]))
    action = rollouts[0].result["action"]
    assert torch.equal(action, sampled) and action.abs().max() > 1.5
    low, high = np.array([-1, -2]), np.array([3, 2])
    sent = np.array(Boxes.actions).reshape(50, 2, 2)
    np.testing.assert_allclose(sent, np.clip([1, 0] + 2 * action.numpy(), low, high), atol=1e-6)
    assert sent.min((0, 1)).tolist() == low.tolist() and sent.max((0, 1)).tolist() == high.tolist()
    agent, flat = runs[0].first_agent, action.flatten(0, 1)
    mean = agent.head.mean(agent.actor_trunk(rollouts[0].result["obs"].flatten(0, 1)))
    expected = Normal(mean, agent.head.log_std.exp()).log_prob(flat).sum(-1)
    assert torch.equal(forwards[0].kwargs["action"], flat)
    torch.testing.assert_close(forwards[0].result[0], expected.detach())


# ------------------------------------------------------------------------ flags: each shown by its effect
def test_sizes_of_the_update_and_of_the_networks(runs, steps):
    quick("Walk", update_epochs=3, num_minibatches=4, total_timesteps=64, hidden_sizes=(5, 7), adam_eps=0.3)
    assert len(steps) == 2 * 3 * 4 and steps[0].eps == 0.3
    for trunk in (runs[0].agent.actor_trunk, runs[0].agent.critic_trunk):
        assert [layer.out_features for layer in trunk if hasattr(layer, "out_features")] == [5, 7]


def test_images_of_bytes_count_as_their_255th_part():
    image = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    out = ppo.Pixels()(image)
    assert torch.equal(out, image.float() / 255) and out.is_contiguous(memory_format=torch.channels_last)
    for image in (torch.rand(2, 3, 5, 7), torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last)):
        before = image.clone()
        assert torch.equal(ppo.Pixels()(image), before) and torch.equal(image, before)


def test_two_networks_can_look_at_the_same_image():
    """Images of floats that are laid out already are passed on, not copied: nothing may write to them."""
    image = torch.rand(2, 3, 40, 40).contiguous(memory_format=torch.channels_last)
    one, two = (ppo.make_trunk(Box(0, 1, (3, 40, 40)), (8,), "tanh") for _ in range(2))
    (one(image) + two(image)).sum().backward()
    assert one[1].weight.grad.abs().sum() > 0 and two[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
def test_activation(activation):
    torch.manual_seed(0)
    trunk, x = ppo.make_trunk(Box(-1, 1, (3,)), (5,), activation), torch.randn(9, 3)
    function = torch.tanh if activation == "tanh" else getattr(torch.nn.functional, activation)
    torch.testing.assert_close(trunk(x), function(trunk[0](x)))
    weight = trunk[0].weight  # orthogonal with gain sqrt(2): weight^T weight = 2 I
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(3))


def test_loss_is_the_sum_of_its_parts(record):
    quick("Walk", value_coef=0.7, entropy_coef=0.3)
    for row in progress():
        row = {name: float(value) for name, value in row.items()}
        parts = row["loss/policy"] + 0.7 * row["loss/value"] - 0.3 * row["policy/entropy"]
        assert row["loss/total"] == pytest.approx(parts, abs=1e-5)


def test_policy_change_equals_numbers_worked_out_by_hand():
    ratio = torch.tensor([0.5, 1.0, 1.1, 2.0])
    change = ppo.policy_change(ratio.log(), torch.zeros(4), clip_coef=0.2)
    expected = np.mean([r - 1 - math.log(r) for r in (0.5, 1.0, 1.1, 2.0)])
    assert change["policy/kl"].item() == pytest.approx(expected, abs=1e-6)
    assert change["policy/clip_fraction"].item() == 0.5


def test_explained_variance_and_log_prob_are_what_their_names_say(record, no_evaluation):
    gae, forwards = record(ppo, "compute_gae"), record(ppo.ActorCritic, "forward")
    quick("Walk", total_timesteps=32, update_epochs=1, num_minibatches=1)
    (row,) = progress()
    value, advantage = gae[0].args[1], gae[0].result
    error = advantage.var(correction=0) / (advantage + value).var(correction=0)
    assert float(row["value/explained_variance"]) == pytest.approx(1 - error.item(), rel=1e-4)
    assert float(row["policy/log_prob"]) == pytest.approx(forwards[-1].result[0].mean().item(), rel=1e-4)


def test_torch_takes_the_threads_it_is_given(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for threads in (3, 0):
        ppo.set_up(quick_args("Walk", torch_threads=threads))
    assert given == [3], "0 leaves it to torch"


def test_max_episode_steps_cuts_episodes():
    quick("Ones", max_episode_steps=5)
    assert {length for _, length in points()["train/episode_length"]} == {5}


def test_kl_is_of_the_update_and_not_of_the_normalizer_that_moves_after_it():
    quick("Walk", learning_rate=0.0, normalize_obs=True)
    for row in progress():
        assert float(row.get("policy/kl") or 0) == pytest.approx(0, abs=1e-9), "nothing was learned"


def test_entropy_coef_keeps_the_policy_random(no_evaluation):
    entropy = {}
    for coef in (0.0, 1.0):
        changes = dict(learning_rate=0.03, anneal_lr=False, total_timesteps=512, num_minibatches=1)
        quick("Masked", run_dir=f"run{coef}", entropy_coef=coef, **changes)
        entropy[coef] = float(progress(f"run{coef}")[-1]["policy/entropy"])
    most = 2 / 3 * math.log(2)  # two of three times there are two legal actions
    assert entropy[0.0] < 0.2 * most and 0.8 * most < entropy[1.0]


def test_value_coef_0_teaches_the_critic_nothing(steps):
    quick("Walk", value_coef=0.0)
    assert equal(steps[-1].values["critic"], steps[0].values["critic"])
    assert not equal(steps[-1].values["actor"], steps[0].values["actor"])


@pytest.mark.parametrize("anneal", [True, False])
def test_learning_rates_of_actor_and_critic_fall_to_0_if_asked(anneal, steps):
    quick("Walk", learning_rate=0.02, critic_lr=0.1, anneal_lr=anneal, total_timesteps=128)
    fractions = [1, 0.75, 0.5, 0.25] if anneal else [1] * 4
    for part, rate in {"actor": 0.02, "critic": 0.1}.items():
        expected = [rate * fraction for fraction in fractions for _ in range(4)]
        np.testing.assert_allclose([step.rates[part] for step in steps], expected, rtol=1e-6)
    logged = [float(row["schedule/learning_rate"]) for row in progress()]
    np.testing.assert_allclose(logged, [0.02 * fraction for fraction in fractions], rtol=1e-6)


def test_critic_lr_moves_the_critic_alone(steps):
    quick("Walk", learning_rate=0.0, critic_lr=0.1)
    assert equal(steps[-1].values["actor"], steps[0].values["actor"])
    assert not equal(steps[-1].values["critic"], steps[0].values["critic"])
    steps.clear()
    quick("Walk", run_dir="run2", learning_rate=0.1)
    assert steps[0].rates == pytest.approx({"actor": 0.1, "critic": 0.1}), "without critic_lr"


@pytest.mark.parametrize("shared", [True, False])
def test_shared_trunk_and_every_parameter_learns(shared, runs, steps):
    quick("Walk", shared_trunk=shared, hidden_sizes=(8, 8))
    agent = runs[0].agent
    assert (agent.actor_trunk is agent.critic_trunk) == shared
    assert len(list(agent.parameters())) == 8 + 4 * (not shared)
    assert len(steps) == 3 * 2 * 2
    for now, before in zip(agent.parameters(), runs[0].first_agent.parameters(), strict=True):
        assert not torch.equal(now, before)
    obs, action = torch.randn(5, 2), torch.zeros(5, 1, dtype=torch.long)
    torch.testing.assert_close(agent(obs, action)[2], agent.value(obs))


def test_max_grad_norm(steps):
    for limit in (0.01, 0.0):
        quick("Boundary", run_dir=f"run{limit}", max_grad_norm=limit)
    clipped, free = [step.grad_norm for step in steps[:12]], [step.grad_norm for step in steps[12:]]
    assert len(free) == 12 and clipped == pytest.approx([0.01] * 12, rel=1e-3)
    assert min(free) > 1, "0 switches it off"
    for limit, mean in ((0.01, 0.01), (0.0, np.mean(free[:4]))):
        row = progress(f"run{limit}")[0]
        assert float(row["grad/norm_clipped"]) == pytest.approx(mean, rel=1e-3)
        assert float(row["grad/norm"]) > 1


@pytest.mark.parametrize("clip_value", [True, False])
def test_clip_value(clip_value, record):
    losses, policy_losses = record(ppo, "value_loss"), record(ppo, "policy_loss")
    quick("Boundary", clip_value=clip_value, clip_coef=0.13, learning_rate=0.05)
    assert {call.args[3] for call in losses} == {0.13 if clip_value else None}
    assert {call.args[3] for call in policy_losses} == {0.13}
    moved = [(call.args[0] - call.args[1]).abs().max() for call in losses]
    assert moved[0] < 1e-5 and max(moved) > 0.13, "old values are those of the rollout"


def test_target_kl_ends_the_epochs(record):
    losses = record(ppo, "policy_loss")
    updates = {}
    for target in (1e-4, 1e9):
        before = len(losses)
        quick("Walk", run_dir=f"run{target}", target_kl=target, update_epochs=6, learning_rate=0.1)
        updates[target] = len(losses) - before
    assert updates == {1e-4: 3 * 2, 1e9: 3 * 2 * 6}, "three rollouts of two minibatches"


def test_gamma_and_gae_lambda_reach_the_advantages(record):
    calls = record(ppo, "compute_gae")
    quick("Walk", gamma=0.83, gae_lambda=0.41)
    assert {tuple(call.args[5:]) for call in calls} == {(0.83, 0.41)}


@pytest.mark.parametrize("env", ["Boundary", "Box"])
def test_clip_reward_learns_from_signs_and_logs_scores_as_they_are(env, record, no_evaluation):
    rollouts, advantages = record(ppo.Storage, "to_device"), record(ppo, "compute_gae")
    quick(env, clip_reward=True)
    episodes, running = [], np.zeros(2)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        reward = rollout.result["reward"]
        assert torch.equal(advantage.args[0], reward.sign()) and not torch.equal(reward, reward.sign())
        for row, done in zip(reward.numpy(), rollout.result["done"].numpy(), strict=True):
            running += row
            episodes += running[done == 1].tolist()
            running[done == 1] = 0
    logged = [value for _, value in points()["train/episode_return"]]
    assert len(logged) > 5 and logged == pytest.approx(episodes, rel=1e-5)
    assert float(progress()[0]["reward/mean"]) == pytest.approx(rollouts[0].result["reward"].mean().item())
    assert float(progress()[0]["reward/max"]) == pytest.approx(rollouts[0].result["reward"].max().item())


def normalized_rewards(rollouts, gamma: float, segment_starts) -> tuple[list[np.ndarray], float]:
    """Rewards (num_steps, num_envs) over the deviation of all discounted sums so far, by a plain loop."""
    results, sums, running = [], [], 0.0
    for k, (reward, done) in enumerate(rollouts):
        running = 0.0 if k in segment_starts else running
        for t in range(len(reward)):
            running = reward[t] + gamma * running
            sums.extend(running)
            running = np.where(done[t], 0, running)
        results.append((reward / np.std(sums)).clip(-10, 10))
    return results, float(np.var(sums))


def test_normalize_reward_through_episode_ends_and_segments(record, no_evaluation):
    rollouts, advantages = record(ppo.Storage, "to_device"), record(ppo, "compute_gae")
    quick("Boundary", normalize_reward=True, gamma=0.9, checkpoint_every=64, total_timesteps=128)
    raw = [(call.result["reward"].numpy(), call.result["done"].numpy() == 1) for call in rollouts]
    expected, var = normalized_rewards(raw, 0.9, segment_starts=(0, 2))
    for call, rewards in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(call.args[0], rewards, rtol=1e-4)
    assert checkpoint()["reward_norm"]["var"].item() == pytest.approx(var, rel=1e-4)
    assert rollouts[0].result["reward"].max() > 10 * advantages[0].args[0].max() / 3
    last = [value for _, value in points()["train/episode_return"]][-1]
    assert last == int(last) > 10, "logged as the environment pays"


def test_normalize_obs_sees_every_observation_and_reaches_actor_and_critic(runs, record):
    rollouts = record(ppo.Storage, "to_device")
    quick("Boundary", normalize_obs=True)
    seen = torch.cat([call.result["obs"].flatten(0, 1) for call in rollouts]).double().numpy()
    norm, agent = checkpoint()["agent"], runs[0].agent
    np.testing.assert_allclose(norm["obs_norm.mean"], seen.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm["obs_norm.var"], seen.var(0), rtol=1e-4, atol=1e-5)
    assert norm["obs_norm.count"] == len(seen)
    # observations in another unit with a normalizer in that unit: the same policy, the same value
    other = copy.deepcopy(agent)
    other.obs_norm.mean.mul_(5).add_(3)
    other.obs_norm.var.mul_(25)
    obs = torch.tensor(seen[:9], dtype=torch.float32)
    action = torch.zeros(9, *agent.head.exists.shape[:1], dtype=torch.int64)
    torch.testing.assert_close(other.value(5 * obs + 3), agent.value(obs), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        other.head(other.actor_trunk(other.obs_norm(5 * obs + 3))),
        agent.head(agent.actor_trunk(agent.obs_norm(obs))),
        rtol=1e-3,
        atol=1e-3,
    )
    for got, expected in zip(other(5 * obs + 3, action), agent(obs, action), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_normalizers_are_saved_and_frozen_in_evaluation(runs, record):
    changes = dict(env="Walk", normalize_obs=True, normalize_reward=True, eval_every=32)
    trained = quick(**changes)
    saved = checkpoint()
    assert saved["agent"]["obs_norm.count"] == saved["reward_norm"]["count"] == 96
    updates = record(ppo.RunningNorm, "update")
    replayed = quick(**changes, evaluate="run")
    assert replayed.tolist() == trained.tolist(), "the reloaded policy plays as the saved one did"
    assert not updates and equal(runs[-1].agent.state_dict(), saved["agent"])


def test_evaluations_during_training_change_nothing_of_it():
    for every in (0, 32):
        changes = dict(normalize_obs=True, normalize_reward=True, eval_every=every)
        quick("Walk", run_dir=f"run{every}", **changes)
    plain, evaluated = checkpoint("run0"), checkpoint("run32")
    assert equal(plain["agent"], evaluated["agent"]) and equal(plain["optimizer"], evaluated["optimizer"])
    keep = lambda row: {name: value for name, value in row.items() if not name.startswith("eval/")}
    before, *rows = map(keep, progress("run32"))
    assert before == {"step": "0"} and rows == list(map(keep, progress("run0")))
    assert sum("eval/return_mean" in row for row in progress("run32")) == 4


# -------------------------------------------------------------------------------------------- evaluation
def zero_policy(obs, info):
    return np.zeros(len(obs), dtype=int)


def test_evaluate_plays_one_whole_episode_in_every_environment():
    args = quick_args("Boundary", eval_episodes=9, gamma=0.9)
    scores = ppo.evaluate(args, zero_policy)
    # the environments are called 0 to 8, after the seeds of their resets
    lengths = [boundary_length(number, 0) for number in range(9)]
    assert len(set(lengths)) > 5, "short and long ones"
    assert scores["lengths"].tolist() == lengths
    assert scores["returns"].tolist() == [boundary_return(number, 0) for number in range(9)]
    discounted = [sum(0.9 ** (t - 1) * boundary_reward(0, t) for t in range(1, n + 1)) for n in lengths]
    np.testing.assert_allclose(scores["discounted"], discounted)
    assert scores["terminated"].tolist() == [boundary_terminates(number, 0) for number in range(9)]
    assert not scores["success"].any()


def test_evaluate_plays_the_same_episodes_at_every_call_and_touches_no_random_state():
    args = quick_args("Walk", eval_episodes=5)

    def policy(obs, info):  # as environments do that draw from the global generators
        return zero_policy(obs, info) + 0 * int(random.random() + np.random.random())

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    states = lambda: (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    before = states()
    first, second = ppo.evaluate(args, policy), ppo.evaluate(args, policy)
    assert states() == before
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert len(set(first["returns"])) == 5, "the episodes of one evaluation differ"


def test_success_and_termination_rate_are_logged():
    quick("Success", eval_episodes=5)
    row = progress()[-1]
    assert float(row["eval/success_rate"]) == 0.6, "three of five seeds are even"
    assert float(row["eval/termination_rate"]) == 1 and float(row["eval/length_mean"]) == 1
    quick("Ones", run_dir="ones", eval_episodes=5, gamma=0.9)
    row = {name: float(value) for name, value in progress("ones")[-1].items()}
    assert row["eval/success_rate"] == row["eval/termination_rate"] == 0
    assert row["eval/discounted_return_mean"] == pytest.approx(10 * (1 - 0.9**10))
    assert row["eval/return_mean"] == row["eval/length_mean"] == 10


def test_evaluation_acts_greedily(record):
    acts = record(ppo.GaussianHead, "sample")
    quick("Box", eval_episodes=3)
    noise = [call.args[3] for call in acts if not isinstance(call.args[3], np.ndarray)]
    assert noise == [0.0] * 11, "once for the storage, then ten steps"


# ---------------------------------------------------------------------------------------------- arguments
def test_command_line_goes_before_the_tuned_environment_its_family_and_the_defaults(monkeypatch):
    family = dict(gamma=0.5, num_envs=3, learning_rate=0.25, hidden_sizes=(9,))
    monkeypatch.setattr(
        ppo, "TUNED", {"classic": family, "Acrobot-v1": dict(num_envs=5, learning_rate=0.125)}
    )
    forms = ["--env-id Acrobot-v1", "--env-id=Acrobot-v1", "--env_id Acrobot-v1", "--env_id=Acrobot-v1"]
    for form in forms:
        for rate in ("--learning-rate 0.75", "--learning_rate=0.75"):
            args = ppo.parse_args([*form.split(), *rate.split()])
            assert args.env_id == "Acrobot-v1"
            assert args.learning_rate == 0.75, "command line"
            assert args.num_envs == 5, "environment"
            assert args.gamma == 0.5 and args.hidden_sizes == (9,), "family"
            assert args.num_steps == ppo.Args.num_steps, "default"
    assert ppo.parse_args(["--env-id", "Acrobot-v1"]).learning_rate == 0.125
    assert ppo.parse_args(["--env-id", "MountainCar-v0"]).num_envs == 3
    assert ppo.parse_args([]).gamma == 0.5, "the default environment has its family too"
    assert ppo.parse_args(["--env-id", "LunarLander-v3"]).gamma == ppo.Args.gamma
    assert ppo.parse_args(["--env-id", "probe_envs:Walk-v0"]).gamma == ppo.Args.gamma


def test_families():
    ids = {"CartPole-v1": "classic", "Taxi-v4": "toy_text", "LunarLander-v3": "box2d", "Ant-v5": "mujoco"}
    ids |= {"ALE/Pong-v5": "atari", "probe_envs:Walk-v0": "", "NoSuchEnv-v0": ""}
    assert {env_id: ppo.env_family(env_id) for env_id in ids} == ids


def fits(value, hint) -> bool:
    """Whether a value is of a type as Args writes it; a whole number does as float."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if options := get_args(hint):
        return any(fits(value, option) for option in options)
    return type(value) in ((int, float) if hint is float else (hint,))


def test_tuned_settings_are_fields_of_args_with_values_of_their_types():
    hints = get_type_hints(ppo.Args)
    assert {field.name for field in fields(ppo.Args)} == hints.keys()
    assert all(fits(getattr(ppo.Args, name), hint) for name, hint in hints.items())
    for key, settings in ppo.TUNED.items():
        family = key in ("classic", "toy_text", "box2d", "mujoco", "atari")
        assert family or key in gym.registry or key.startswith("ALE/"), key
        wrong = {name: v for name, v in settings.items() if name not in hints or not fits(v, hints[name])}
        assert not wrong, key
        args = ppo.Args(**settings)
        assert args.num_envs * args.num_steps % args.num_minibatches == 0, key
        assert isinstance(json.loads(args.env_kwargs), dict), key
        if not family:
            parsed = ppo.parse_args(["--env-id", key])
            assert {name: getattr(parsed, name) for name in settings} == settings


# ------------------------------------------------------------------------------------------------- spaces
REFUSED = ("dict_image", "nested_image", "sequence", "text", "dict")


def smoke(record, **env_kwargs) -> dict[str, torch.Tensor]:
    """One rollout, two minibatches, an evaluation; the environment checks actions. Returns the rollout."""
    rollouts = record(ppo.Storage, "to_device")
    quick("Spaces", env_kwargs=env_kwargs, num_steps=10, update_epochs=1, total_timesteps=20)
    assert len(rollouts) == 1
    return rollouts[0].result


@pytest.mark.parametrize("name", [n for n in spaces_observations() if n not in REFUSED or n == "dict"])
def test_observations_of_every_space(name, record):
    space = spaces_observations()[name]
    stored = smoke(record, obs=name)["obs"]
    image = isinstance(space, Box) and len(space.shape) > 1 and name not in ("thin", "cards", "slice")
    kept = {np.dtype(np.uint8): torch.uint8, np.dtype(np.bool_): torch.bool} if image else {}
    assert stored.dtype == kept.get(space.dtype, torch.float32), "no float64 reaches a device"
    shapes = {"matrix": (1, 12, 9), "hwc": (3, 40, 40), "chw": (3, 40, 40), "small": (4, 10, 10)}
    shapes["bits"] = (1, 10, 9)
    assert stored.shape[2:] == (shapes[name] if image else (gym.spaces.flatdim(space),))
    env = gym.make("probe_envs:Spaces-v0", obs=name)
    flat = space if image else gym.spaces.utils.flatten_space(space)
    raw, _ = env.reset(seed=3)
    got, _ = ppo.standardize(env).reset(seed=3)
    if image:
        turned = raw[None] if raw.ndim == 2 else raw if name == "chw" else np.moveaxis(raw, -1, 0)
        np.testing.assert_array_equal(got, turned)
    else:
        np.testing.assert_allclose(got, gym.spaces.flatten(space, raw), rtol=1e-6)
        assert got.shape == flat.shape


@pytest.mark.parametrize("obs", ["hwc", "small", "bits", "discrete", "ram"])
def test_normalize_obs_takes_bytes_too(obs, record):
    rollouts = record(ppo.Storage, "to_device")
    kwargs = dict(obs=obs)
    quick("Spaces", env_kwargs=kwargs, normalize_obs=True, num_steps=10, update_epochs=1, total_timesteps=40)
    seen = torch.cat([call.result["obs"].flatten(0, 1) for call in rollouts]).double()
    torch.testing.assert_close(checkpoint()["agent"]["obs_norm.mean"].double(), seen.mean(0))


@pytest.mark.parametrize("name", [n for n in spaces_actions() if n not in REFUSED])
def test_actions_of_every_space(name, record):
    space = spaces_actions()[name]
    action = smoke(record, action=name)["action"]
    assert len(Spaces.actions) >= 20 and all(space.contains(sent) for sent in Spaces.actions)
    choices = 1 if isinstance(space, Discrete) else math.prod(space.shape)
    assert action.shape == (10, 2, choices)
    assert action.dtype == (torch.float32 if isinstance(space, Box) else torch.int64)
    if not isinstance(space, Box):
        sent = np.array(Spaces.actions[:20]).reshape(10, 2, choices)
        np.testing.assert_array_equal(sent, action.numpy() + np.ravel(getattr(space, "start", 0)))
        assert len({tuple(row) for row in sent.reshape(20, -1).tolist()}) > 1


BOXES = {  # action of the policy, what the environment gets
    "box": ([[0.5, -0.5], [2, -9]], [[2, -1], [3, -2]]),
    "box_2d": ([[0, 1, -1, 3, -3, 0.5]], [[[-0.5, 1, -2], [1, -2, 0.25]]]),
    "box_float64": ([[0.5, -5]], [[3, -3]]),
    "int8": ([[-1, 1], [0, 0.5]], [[-128, 127], [0, 63]]),
    "uint8": ([[-1, 1], [0, 0.5]], [[100, 250], [175, 212]]),
    "int32": ([[-1, 1], [-0.5, 0.3]], [[-3, 3], [-2, 1]]),
    "unbounded": ([[-7, 0.25]], [[-7, 0.25]]),
    "half_bounded": ([[-2, 3], [5, -8]], [[0, 1], [5, -8]]),
}


@pytest.mark.parametrize("name", BOXES)
def test_actions_are_stretched_from_1_to_the_bounds_of_each_dimension_and_clipped(name):
    env = ppo.standardize(gym.make("probe_envs:Spaces-v0", action=name))
    assert env.action_space.shape == (math.prod(spaces_actions()[name].shape),)
    for action, expected in zip(*BOXES[name], strict=True):
        env.reset(seed=0)
        env.step(np.array(action, dtype=np.float32))
        sent = Spaces.actions[-1]
        assert sent.tolist() == expected and sent.dtype == spaces_actions()[name].dtype


def test_action_masks_reach_the_policy_and_the_update(runs, record, no_evaluation):
    rollouts, forwards = record(ppo.Storage, "to_device"), record(ppo.ActorCritic, "forward")
    quick("Masked", total_timesteps=64)  # an illegal action raises in the environment
    obs, mask, action = (rollouts[0].result[name] for name in ("obs", "mask", "action"))
    legal = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    assert torch.equal(mask[:, :, 0], legal[obs[..., :3].argmax(-1)])
    assert mask.gather(-1, action.unsqueeze(-1)).all()
    single = mask.sum(-1).flatten() == 1
    log_prob, logits, _ = forwards[0].result
    entropy = ppo.CategoricalHead.entropy(None, logits)
    assert (log_prob[single] == 0).all() and (entropy[single] == 0).all() and (log_prob[~single] < 0).all()


def test_a_reset_of_one_environment_leaves_observation_and_mask_of_the_other():
    envs = ppo.make_envs(quick_args("Masked"), 2)
    envs.reset(seed=1)
    envs.envs[0].unwrapped.t = 7  # one step before the end; the other is at its start
    next_obs, _, terminated, truncated, info = envs.step(np.array([1, 1]))
    done = terminated | truncated
    assert done.tolist() == [True, False]
    obs, info = ppo.reset_done(envs, next_obs, info, done)
    assert next_obs.argmax(1).tolist() == [2, 1] and obs.argmax(1).tolist() == [0, 1]
    assert info["action_mask"].tolist() == [[1, 1, 0], [0, 1, 0]], "at time 0 and at time 1"


def test_a_reset_without_a_mask_makes_all_actions_legal(monkeypatch):
    monkeypatch.setattr(
        Masked, "reset", lambda self, *, seed=None, options=None: Probe.reset(self, seed=seed)
    )
    envs = ppo.make_envs(quick_args("Masked"), 2)
    envs.reset(seed=1)
    envs.envs[0].unwrapped.t = 7
    next_obs, _, terminated, truncated, info = envs.step(np.array([1, 1]))
    _, info = ppo.reset_done(envs, next_obs, info, terminated | truncated)
    assert info["action_mask"].tolist() == [[1, 1, 1], [0, 1, 0]]


def test_async_environments_give_the_same_training_as_sync_ones():
    for async_envs in (False, True):
        quick("Walk", run_dir=f"run{async_envs}", async_envs=async_envs)
    assert equal(checkpoint("runFalse")["agent"], checkpoint("runTrue")["agent"])


# --------------------------------------------------------------------------------------------- compile
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
def test_checkpoints_with_and_without_compile_load_in_each_other():
    for compiled in (False, True):
        run = f"run{compiled}"
        quick("Walk", run_dir=run, compile=compiled, total_timesteps=32)
        first = checkpoint(run)
        resumed = ppo.parse_args(["--resume", run])
        ppo.train(ppo.replace(resumed, total_timesteps=64, compile=not compiled))
        assert checkpoint(run)["run"]["env_steps"] == 64 and not equal(first, checkpoint(run))
    one, other = checkpoint("runFalse")["agent"], checkpoint("runTrue")["agent"]
    assert one.keys() == other.keys()
    for name in one:  # the same mathematics: rounding apart, the same parameters
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------- Atari
def test_actions_for_a_box_of_whole_numbers_go_to_the_nearest_one():
    env = ppo.standardize(gym.make("probe_envs:Spaces-v0", action="int32"))
    env.reset(seed=0)
    pushes = np.linspace(-1, 1, 61, dtype=np.float32)
    for push in pushes:
        env.step(np.array([push, push]))
    sent = np.array(Spaces.actions[-61:])[:, 0]
    assert set(sent) == set(range(-3, 4)) and np.abs(sent - 3 * pushes).max() < 0.501


def atari_args(game: str, **changes):
    given = vars(ppo.parse_args(["--env-id", f"ALE/{game}-v5", "--device", "cpu"]))
    small = dict(run_dir="run", num_envs=2, num_steps=8, hidden_sizes=(16,), eval_every=0, eval_episodes=1,
                 checkpoint_every=0, total_timesteps=16, torch_threads=1)  # fmt: skip
    return ppo.Args(**given | small | changes)


def test_atari_steps_are_4_frames_and_pay_unclipped_scores():
    envs = ppo.make_envs(atari_args("MsPacman"), 2)
    obs, info = envs.reset(seed=1)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    rewards, envs_rng = [], np.random.default_rng(0)
    for _ in range(100):
        before = info["episode_frame_number"]
        _, reward, terminated, truncated, info = envs.step(envs_rng.integers(9, size=2))
        assert not (terminated | truncated).any()
        assert (info["episode_frame_number"] - before).tolist() == [4, 4], "4 frames once, not 16"
        rewards += reward.tolist()
    envs.close()
    assert max(rewards) >= 10 and set(rewards) <= {0, 10, 20, 50, 60, 200, 210}


def test_atari_sticky_actions_are_explicit_logged_and_real():
    args = atari_args("MsPacman", max_episode_steps=20)
    assert json.loads(args.env_kwargs)["repeat_action_probability"] == 0.25
    ppo.train(args)
    kwargs = json.loads(json.loads(open("run/args.json").read())["env_kwargs"])
    assert kwargs["repeat_action_probability"] == 0.25
    frames = {}
    for probability in (0.0, 1.0):
        kwargs = json.dumps({"repeat_action_probability": probability})
        envs = ppo.make_envs(atari_args("MsPacman", env_kwargs=kwargs), 1)
        for action in (2, 3):  # right, left
            envs.reset(seed=7)
            for _ in range(90):
                obs = envs.step(np.array([action]))[0]
            frames[probability, action] = obs
        envs.close()
    assert np.array_equal(frames[1.0, 2], frames[1.0, 3]), "the first action is repeated for ever"
    assert not np.array_equal(frames[0.0, 2], frames[0.0, 3])


@pytest.mark.parametrize("frameskip", [1, 4])
def test_max_episode_steps_of_atari_counts_steps_of_any_number_of_frames(frameskip):
    kwargs = json.dumps({"frameskip": frameskip})
    envs = ppo.make_envs(atari_args("MsPacman", max_episode_steps=20, env_kwargs=kwargs), 1)
    envs.reset(seed=1)
    ends = [bool(envs.step(np.array([0]))[3][0]) for _ in range(20)]
    envs.close()
    assert ends == [False] * 19 + [True]


def test_atari_life_loss_neither_ends_nor_restarts_the_game_and_the_score_is_of_the_whole_game():
    args = atari_args("Breakout", eval_episodes=2)
    script = np.random.default_rng(1).integers(4, size=5000).tolist()
    left = iter(script)
    scores = ppo.evaluate(args, lambda obs, info: np.full(len(obs), next(left)))
    envs = ppo.make_envs(args, 1)
    _, info = envs.reset(seed=ppo.EVALUATION_SEED)
    frames, lives, total, steps, done = [info["episode_frame_number"][0]], [5], 0, 0, False
    while not done:
        _, reward, terminated, truncated, info = envs.step(np.array([script[steps]]))
        done, steps, total = (terminated | truncated)[0], steps + 1, total + reward[0]
        frames.append(info["episode_frame_number"][0])
        lives.append(info["lives"][0])
    envs.close()
    assert set(np.diff(frames[:-1])) == {4} and 1 <= frames[-1] - frames[-2] <= 4, "no other game"
    assert sorted(set(lives), reverse=True) == [5, 4, 3, 2, 1, 0] and lives[-2] == 1
    assert (scores["returns"][0], scores["lengths"][0]) == (total, steps) and total > 0


def test_atari_logs_raw_scores_of_time_limited_games_and_learns_from_signs(record):
    counts, advantages = record(ppo.Run, "count"), record(ppo, "compute_gae")
    changes = dict(num_steps=120, max_episode_steps=110, update_epochs=1, num_minibatches=2)
    ppo.train(atari_args("MsPacman", total_timesteps=240, **changes))
    rewards, done = (np.array([call.args[k] for call in counts]) for k in (1, 2))
    assert done.nonzero()[0].tolist() == [109, 109], "max_episode_steps counts steps, not frames"
    score = rewards[:110].sum(0)
    assert score.max() >= 20
    assert [value for _, value in points()["train/episode_return"]] == score.tolist()
    assert advantages[0].args[0].max() == 1 and float(progress()[-1]["reward/max"]) >= 10
    assert float(progress()[-1]["eval/length_mean"]) == 110


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_the_film_of_an_atari_game_shows_the_game_that_is_evaluated(sticky, monkeypatch, tmp_path):
    frames, newest, rng = [], [], np.random.default_rng(0)

    class Writer:
        def __init__(self, path, codec, fps, size):
            assert (fps, size) == (15, (160, 210))
            open(path, "w").close()

        def write(self, frame):
            frames.append(frame.copy())

        def release(self):
            self.released = True

    def policy(obs, info):
        newest.append(obs[0, -1].copy())
        return rng.integers(4, size=len(obs))

    monkeypatch.setattr(ppo.cv2, "VideoWriter", Writer)
    kwargs = json.dumps({"repeat_action_probability": sticky})
    args = atari_args("Breakout", eval_episodes=3, max_episode_steps=60, env_kwargs=kwargs)
    ppo.evaluate(args, policy, tmp_path / "videos" / "0.mp4")
    assert (tmp_path / "videos" / "0.mp4").exists()
    assert len(newest) == 60 and len(frames) == 61, "one for the reset and one for each step"
    for frame, seen in zip(frames, newest, strict=False):
        grey = cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY)
        small = cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)
        assert np.abs(small.astype(int) - seen).max() <= 1
    assert len({frame.tobytes() for frame in frames}) > 40, "and the picture moves"


# ------------------------------------------------------------------------- what a user has made is not lost
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's thread
def test_a_full_disk_costs_tensorboard_a_gap_and_not_the_training(monkeypatch, capsys):
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, calls = RecordWriter.write, []

    def fill_up(self, data):
        calls.append(data)
        if len(calls) == 8:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", fill_up)
    quick("Walk", total_timesteps=320, checkpoint_every=64)
    said = capsys.readouterr().err
    assert "warning: TensorBoard's log has a gap, training goes on: " in said and "No space left" in said
    assert [row["step"] for row in progress()] == [str(32 * k) for k in range(1, 11)]
    assert checkpoint()["run"]["env_steps"] == 320
    assert points()["loss/total"][-1][0] == 320, "a new file goes on"


@pytest.mark.parametrize("eval_every, step", [(0, 96), (64, 64)])
def test_the_training_is_kept_if_an_evaluation_fails(eval_every, step, runs, monkeypatch):
    evaluate = ppo.evaluate

    def fail(*given):
        if runs[-1].env_steps:
            raise RuntimeError("the simulator has crashed")
        return evaluate(*given)

    monkeypatch.setattr(ppo, "evaluate", fail)
    with pytest.raises(RuntimeError, match="simulator"):
        quick("Walk", eval_every=eval_every)
    runs[-1].writer.close()
    monkeypatch.setattr(ppo, "evaluate", evaluate)
    assert checkpoint()["run"]["env_steps"] == step
    ppo.train(ppo.parse_args(["--resume", "run"]))
    assert [row["step"] for row in progress() if "eval/return_mean" in row][-1] == "96"


def test_an_evaluation_that_fails_of_nan_weights_leaves_the_last_good_checkpoint(runs, monkeypatch):
    evaluate = ppo.evaluate

    def fail(*given):
        if runs[-1].env_steps > 64:
            next(runs[-1].agent.parameters()).data.fill_(math.nan)
            raise RuntimeError("the simulator does not like NaN")
        return evaluate(*given)

    monkeypatch.setattr(ppo, "evaluate", fail)
    with pytest.raises(FloatingPointError, match="run has the checkpoint of step 64"):
        quick("Walk", checkpoint_every=64)
    runs[-1].writer.close()
    assert checkpoint()["run"]["env_steps"] == 64


def test_a_stop_tells_which_checkpoint_there_is_and_how_to_go_on_from_it(monkeypatch, capsys):
    stopped = dict(signal="SIGTERM", after=50)
    Walk.forget()
    with pytest.raises(SystemExit):
        quick("Walk", run_dir="a run", env_kwargs=stopped)
    said = capsys.readouterr().err
    assert "a run has the checkpoint of step 64; to go on: " in said
    assert shlex.split(said)[-2:] == ["--resume", "a run"]

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", refuse)
    Walk.forget()
    with pytest.raises(SystemExit):
        quick("Walk", run_dir="full", env_kwargs=stopped)
    assert "SIGTERM: stopped at step 64; full has no checkpoint yet; " in capsys.readouterr().err
    Broken.steps = 0
    with pytest.raises(FloatingPointError, match="run has no checkpoint yet"):
        quick("Broken", env_kwargs={"after": 40})


def test_what_cannot_be_filmed_is_refused_before_training(monkeypatch):
    for picture in (np.zeros((48, 64, 3)), np.zeros((48, 64), np.uint8), ["text"], None):
        monkeypatch.setattr(Probe, "render", lambda _, picture=picture: picture)
        with pytest.raises(ppo.UsageError, match="Walk-v0 cannot be filmed"):
            quick("Walk", capture_video=True)
    monkeypatch.setattr(Probe, "render", gym.Env.render)  # raises NotImplementedError
    with pytest.raises(ppo.UsageError, match="Walk-v0 cannot be filmed"):
        quick("Walk", capture_video=True)
    assert not Path("run").exists()


@pytest.mark.parametrize("fps, expected", [(20, 20), (None, 30)])
def test_a_film_runs_as_fast_as_the_environment_says(fps, expected, monkeypatch):
    monkeypatch.setitem(Probe.metadata, "render_fps", fps)
    quick("Walk", capture_video=True)
    assert cv2.VideoCapture("run/videos/96.mp4").get(cv2.CAP_PROP_FPS) == expected


def test_resume_takes_the_options_of_the_optimizer_from_the_command_line():
    quick("Walk")
    assert checkpoint()["optimizer"]["param_groups"][0]["eps"] == ppo.Args.adam_eps
    before = checkpoint()["optimizer"]["state"][0]["step"]
    flags = ["--resume", "run", "--total-timesteps", "192", "--adam-eps", "0.5"]
    ppo.train(ppo.parse_args(flags))
    after = checkpoint()["optimizer"]
    assert after["param_groups"][0]["eps"] == 0.5 and after["state"][0]["step"] == 2 * before


def test_the_arguments_of_the_caller_stay_as_they_are():
    args = quick_args("Walk", total_timesteps=1)
    before = copy.copy(args)
    ppo.train(args)
    assert args == before


def test_wall_time_goes_on_through_a_resume():
    quick("Walk", total_timesteps=96)
    first = [float(row["wall_time"]) for row in times()]
    time.sleep(0.3)  # a pause is not counted
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "192"]))
    wall = [float(row["wall_time"]) for row in times()]
    assert wall[:2] == first[:2] and wall[2] == pytest.approx(first[2], abs=0.1)
    assert (np.diff(wall) > 0).all()
    speeds = [float(row["speed/steps_per_second"]) for row in times()]
    assert 0.5 < speeds[1] / (32 / (wall[1] - wall[0])) < 20, "steps per second of rollout and update"


def times() -> list[dict[str, str]]:
    with open("run/progress.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_workers_of_async_environments_end_quietly_when_a_run_is_refused():
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    words = [sys.executable, ALGOS / "ppo.py", "--async-envs", "--num-envs", "2", "--run-dir", "full"]
    done = subprocess.run([*words, "--device", "cpu"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("ppo.py: full is not empty") and done.stderr.count("\n") == 1


def test_an_environment_without_a_time_limit_is_named(capsys):
    quick("Walk")
    assert "Walk-v0 has no time limit" in capsys.readouterr().out
    quick("Walk", run_dir="limited", max_episode_steps=9)
    quick("CartPole-v1", run_dir="registered")
    assert "time limit" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "env, kwargs, word",
    [
        ("LunarLander-v3", {"gravity": 5}, "gravity"),  # an AssertionError
        ("HalfCheetah-v5", {"xml_file": "/nothing.xml"}, "nothing.xml"),  # an OSError
    ],
)
def test_arguments_that_an_environment_refuses_are_told_in_one_line(env, kwargs, word):
    with pytest.raises(ppo.UsageError, match=rf"cannot make --env-id {env} .*{word}"):
        ppo.make_envs(quick_args(env, env_kwargs=kwargs), 1)


def test_env_kwargs_come_on_top_of_the_tuned_ones_and_those_of_a_resumed_run():
    parse = lambda *argv: json.loads(ppo.parse_args([*argv]).env_kwargs)
    sticky = {"repeat_action_probability": 0.25}
    assert parse("--env-id", "ALE/Pong-v5", "--env-kwargs", '{"frameskip": 2}') == {"frameskip": 2, **sticky}
    assert parse("--env-id", "ALE/Pong-v5", "--env-kwargs", '{"repeat_action_probability": 0}') == {
        "repeat_action_probability": 0
    }
    quick("Walk", env_kwargs={"length": 9, "edge": 2.0})
    assert parse("--resume", "run", "--env-kwargs", '{"edge": 3.0}') == {"length": 9, "edge": 3.0}


# ----------------------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_within_100k_steps(seed):
    flags = ["--env-id", "CartPole-v1", "--seed", str(seed), "--device", "cpu", "--run-dir", "run"]
    args = ppo.parse_args([*flags, "--stop-return", "475"])
    assert args.total_timesteps <= 100_000
    returns = ppo.train(args)
    assert len(returns) == 10 and returns.mean() >= 475


# ------------------------------------------------------------------------------------------ learning rule
def brute_force_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """The sum of the paper, term by term: O(T^2), in float64, without the recursion."""
    advantages = np.zeros(rewards.shape)
    for i in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                target = rewards[k, i] + (0 if terminated[k, i] else gamma * next_values[k, i])
                advantages[t, i] += (gamma * gae_lambda) ** (k - t) * (target - values[k, i])
                if done[k, i]:
                    break
    return advantages


def random_rollout(seed, num_steps=40, num_envs=6):
    """rewards, values, next_values, terminated, done; next_values agree with values inside an episode."""
    rng = np.random.default_rng(seed)
    rewards, values, finals = rng.normal(size=(3, num_steps, num_envs))
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.1
    terminated[-1, 0], truncated[-1, 1], terminated[-1, 1] = True, True, False  # also on the last step
    terminated[-1, 2], truncated[-1, 2] = False, False
    done = terminated | truncated
    next_values = np.where(
        done | (np.arange(num_steps) == num_steps - 1)[:, None], finals, np.roll(values, -1, 0)
    )
    return rewards, values, next_values, terminated, done


def gae(rollout, gamma, gae_lambda):
    return ppo.compute_gae(
        *(torch.tensor(x, dtype=torch.float64) for x in rollout), gamma, gae_lambda
    ).numpy()


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_the_brute_force_sum(gamma, gae_lambda):
    for seed in range(5):
        rollout = random_rollout(seed)
        expected = brute_force_gae(*rollout, gamma, gae_lambda)
        np.testing.assert_allclose(gae(rollout, gamma, gae_lambda), expected, atol=1e-12)


def test_gae_with_lambda_1_is_the_return_minus_the_value():
    rollout = rewards, values, next_values, terminated, done = random_rollout(7)
    expected = np.zeros(rewards.shape)
    for i in range(rewards.shape[1]):
        return_ = next_values[-1, i]
        for t in reversed(range(len(rewards))):
            if done[t, i]:
                return_ = 0.0 if terminated[t, i] else next_values[t, i]
            return_ = rewards[t, i] + 0.9 * return_
            expected[t, i] = return_ - values[t, i]
    np.testing.assert_allclose(gae(rollout, 0.9, 1.0), expected, atol=1e-12)


def test_policy_loss_equals_numbers_worked_out_by_hand_and_has_no_gradient_where_the_clip_binds():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1, 0.95])
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0, 1.0, -1.0])
    # min(1.5 2, 1.2 2), min(0.5 2, 0.8 2), min(-1.5 2, -1.2 2), min(-0.5 2, -0.8 2), 1.1, -0.95
    gained = [2.4, 1.0, -3.0, -1.6, 1.1, -0.95]
    old_log_prob = torch.full((6,), -1.3)
    log_prob = (ratio.log() + old_log_prob).requires_grad_()
    loss = ppo.policy_loss(log_prob, old_log_prob, advantage, 0.2)
    assert loss.item() == pytest.approx(-sum(gained) / 6, abs=1e-6)
    loss.backward()
    # d ratio / d log_prob = ratio, so -ratio A / B where the clip does not bind, and 0 where it does
    expected = torch.tensor([0.0, -1.0, 3.0, 0.0, -1.1, 0.95]) / 6
    torch.testing.assert_close(log_prob.grad, expected, atol=1e-6, rtol=0)


def test_value_loss_equals_numbers_worked_out_by_hand():
    value, old_value, return_ = (torch.tensor(x) for x in ([1.0, 3.0, 0.9], [0.0, 0.0, 1.0], [2.0, 2.0, 0.0]))
    assert ppo.value_loss(value, old_value, return_).item() == pytest.approx(0.5 * (1 + 1 + 0.81) / 3)
    # kept within 0.2 of the old value: 0.2, 0.2 and 0.9, whose errors are 1.8^2, 1.8^2 and 0.9^2
    assert ppo.value_loss(value, old_value, return_, 0.2).item() == pytest.approx(0.5 * (3.24 * 2 + 0.81) / 3)
    value.requires_grad_()
    ppo.value_loss(value, old_value, return_, 0.2).backward()
    torch.testing.assert_close(value.grad, torch.tensor([0.0, 0.0, 0.3]))


# ------------------------------------------------------------------------------------------------- heads
SPACES = {
    "discrete": Discrete(4), "multi_discrete": MultiDiscrete([3, 3]), "ragged": MultiDiscrete([3, 2, 5]),
}  # fmt: skip


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_categorical_head_equals_torch_distributions(space):
    torch.manual_seed(0)
    head, features = ppo.CategoricalHead(8, space).double(), torch.randn(50, 8, dtype=torch.float64)
    torch.nn.init.normal_(head.logits.weight)
    mask = head.mask({}, 50)
    logits = head(features, None if mask is None else torch.tensor(mask))
    sizes = [space.n] if isinstance(space, Discrete) else space.nvec
    parts = [Categorical(logits=logits[:, k, :size]) for k, size in enumerate(sizes)]
    action = torch.stack([part.sample() for part in parts], dim=-1)
    log_prob, entropy = head.log_prob(logits, action), head.entropy(logits)
    expected = sum(part.log_prob(action[:, k]) for k, part in enumerate(parts))
    torch.testing.assert_close(log_prob, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts), atol=1e-6, rtol=0)


def test_gaussian_head_equals_torch_distributions():
    torch.manual_seed(0)
    head = ppo.GaussianHead(8, Box(-1, 1, (3,))).double()
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([-1.0, 0.0, 0.7]))
    mean = head(torch.randn(50, 8, dtype=torch.float64))
    normal = Normal(mean, head.log_std.exp())
    action = normal.sample() * 2
    log_prob, entropy = head.log_prob(mean, action), head.entropy(mean)
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, normal.entropy().sum(-1), atol=1e-6, rtol=0)


def test_gumbel_max_draws_as_often_as_the_softmax_says():
    np.random.seed(0)
    head, draws = ppo.CategoricalHead(8, MultiDiscrete([4, 3])), 50_000
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5], [2.0, 0.0, 1.0, -1e8]])
    action = torch.from_numpy(head.sample(logits.numpy(), None, head.noise(draws)))  # (draws, 2)
    for k, size in enumerate([4, 3]):
        expected = draws * logits[k, :size].softmax(-1)
        counts = torch.bincount(action[:, k], minlength=size)
        chi_square = ((counts - expected).square() / expected).sum().item()
        assert chi_square < {4: 16.3, 3: 13.8}[size], (
            "beyond the 99.9% quantile"
        )  # 3 and 2 degrees of freedom


def test_gaussian_samples_have_the_mean_and_deviation_of_the_head():
    np.random.seed(0)
    head, mean = ppo.GaussianHead(8, Box(-1, 1, (2,))), torch.tensor([0.5, -2.0])
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([-1.0, 0.5]))
    samples = torch.from_numpy(head.sample(mean.numpy(), None, head.noise(40_000)))
    torch.testing.assert_close(samples.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(samples.std(0), head.log_std.exp().detach(), atol=0, rtol=0.03)
    assert abs(torch.corrcoef(samples.T)[0, 1]) < 0.03, "every dimension has a noise of its own"


@pytest.mark.parametrize("activation, in_numpy", [("tanh", True), ("relu", True), ("elu", False)])
def test_on_host_computes_what_the_modules_do_with_their_newest_weights(activation, in_numpy, monkeypatch):
    torch.manual_seed(0)
    norm, trunk = ppo.RunningNorm((5,)), ppo.make_trunk(Box(-1, 1, (5,)), (8, 6), activation)
    head, x = ppo.CategoricalHead(6, MultiDiscrete([4, 3])), 3 * torch.randn(7, 5)
    norm.update(x)
    torch.nn.init.normal_(head.logits.weight)
    with_norm, without = ppo.on_host(norm, trunk, head), ppo.on_host(None, trunk, head)
    far = torch.full((7, 5), 1e4)  # clipped by the normalizer
    for _ in range(2):  # once as they are, once after the weights and moments have moved
        for obs in (x, far):
            expected = head(trunk(norm(obs))).detach().numpy()
            found = with_norm(obs.numpy()).reshape(expected.shape)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        expected = head(trunk(x)).detach().numpy()
        found = without(x.double().numpy())
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
        assert found.dtype == np.float32
        with torch.no_grad():
            for p in (*trunk.parameters(), *head.parameters()):
                p.mul_(1.5).add_(0.1)
        norm.update(x + 2)
    monkeypatch.setattr(ppo, "to_tensor", None)
    if in_numpy:
        with_norm(x.numpy())  # torch has no part in it
    else:
        with pytest.raises(TypeError):
            with_norm(x.numpy())


def test_on_host_refuses_a_forward_that_does_more_than_its_layers():
    class Squashed(ppo.GaussianHead):
        def forward(self, features, mask=None):
            return self.mean(features).tanh()

    head = Squashed(6, Box(-1, 1, (2,)))
    torch.nn.init.normal_(head.mean.weight)
    with pytest.raises(RuntimeError, match="does more than its layers"):
        ppo.on_host(None, head)(np.ones((3, 6)))


def test_noise_0_acts_greedily():
    head = ppo.CategoricalHead(8, Discrete(3))
    assert head.sample(np.array([[0.0, 2.0, 1.0]]), None, 0.0).tolist() == [[1]]
    assert head.sample(np.array([[0.0, 2.0, 1.0]]), np.array([[[True, False, True]]]), 0.0).tolist() == [[2]]
    mean = np.array([[0.3, -4.0]])
    assert np.array_equal(ppo.GaussianHead(8, Box(-1, 1, (2,))).sample(mean, None, 0.0), mean)


def test_masked_actions_have_probability_0_and_are_never_drawn():
    torch.manual_seed(0)
    head, features = ppo.CategoricalHead(8, MultiDiscrete([4, 3])), torch.randn(500, 8)
    torch.nn.init.normal_(head.logits.weight)  # far from uniform, so that the mask has to win against logits
    legal = torch.rand(500, 7) < 0.5
    legal[:, [0, 4]] = True  # at least one action of each choice
    legal[:250, 1:4] = False  # only one: no freedom, no entropy
    mask = torch.tensor(head.mask({"action_mask": legal.numpy().astype(np.int8)}, 500))
    assert torch.equal(mask[:, 0], legal[:, :4]) and torch.equal(mask[:, 1, :3], legal[:, 4:])
    assert not mask[:, 1, 3].any(), "the second choice has no fourth action"
    logits = head(features, mask)
    assert (logits.softmax(-1)[~mask] == 0).all()
    for _ in range(20):
        action = torch.from_numpy(head.sample(head(features).detach().numpy(), mask.numpy(), head.noise(500)))
        assert mask.gather(-1, action.unsqueeze(-1)).all()
    log_prob, entropy = head.log_prob(logits, action), head.entropy(logits)
    expected = sum(
        torch.stack(
            [Categorical(logits=row[ok]).entropy() for row, ok in zip(logits[:, k], mask[:, k], strict=True)]
        )
        for k in (0, 1)
    )
    torch.testing.assert_close(entropy, expected)
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(head.logits.weight.grad).all()


# ------------------------------------------------------------------------------------------ normalizers
def test_running_norm_equals_numpy_over_batches_of_differing_size():
    rng, norm = np.random.default_rng(0), ppo.RunningNorm((3,))
    seen = np.empty((0, 3))
    for size in (1, 7, 300, 2, 1000):
        batch = rng.normal([1000.0, 0.0, -5.0], [2.0, 0.1, 30.0], (size, 3))
        norm.update(torch.tensor(batch, dtype=torch.float32))
        seen = np.concatenate([seen, batch])
        np.testing.assert_allclose(norm.mean, seen.mean(0), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(norm.var.sqrt(), seen.std(0), rtol=2e-3, atol=1e-5)
    x = torch.tensor(seen[:50], dtype=torch.float32)
    np.testing.assert_allclose(norm(x), (seen[:50] - seen.mean(0)) / seen.std(0), atol=0.01)
    assert norm(torch.full((1, 3), 1e6)).tolist() == [[10.0, 10.0, 10.0]], "clipped"


def test_reward_norm_equals_a_loop_and_is_cut_at_episode_ends_and_segment_starts():
    rng, gamma, norm = np.random.default_rng(0), 0.9, ppo.RewardNorm(0.9)
    returns, running = [], np.zeros(3)
    for call in range(6):
        reward, done = rng.normal(3, 1, (20, 3)), rng.random((20, 3)) < 0.2
        if call == 3:
            norm.return_, running = 0.0, np.zeros(3)  # what train does where a segment starts
        got = norm(torch.tensor(reward, dtype=torch.float32), torch.tensor(done, dtype=torch.float32))
        for t in range(20):
            running = reward[t] + gamma * running
            returns.extend(running)
            running = running * ~done[t]
        np.testing.assert_allclose(got, (reward / np.std(returns)).clip(-10, 10), rtol=1e-3)
    assert norm(torch.full((1, 3), 1e6), torch.zeros(1, 3)).max() <= 10
