"""A2C's own tests. Heads, normalizers and evaluation are PPO's, letter by letter, and tested there."""

import copy
import json
import math
import shutil
from itertools import product
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script, progress
from gymnasium.spaces import Box
from probe_envs import Boxes, Spaces, boundary_length, boundary_reward, boundary_terminates
from torch.distributions import Normal
from torch.optim.optimizer import register_optimizer_step_pre_hook

a2c = load_script(ALGOS / "a2c.py")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, log_every=1, num_envs=2,
    num_steps=16, hidden_sizes=(8,), total_timesteps=96,
)  # fmt: skip


def quick(env: str, run_dir="run", env_kwargs=None, **changes) -> np.ndarray:
    """A training of a moment, three rollouts, in one of the probe_envs or in any environment by its id."""
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    return a2c.train(a2c.Args(**QUICK | given | changes))


def snapshot(x):
    """A copy of tensors and arrays, also those in dicts, lists and tuples."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    return [snapshot(value) for value in x] if isinstance(x, (list, tuple)) else copy.copy(x)


@pytest.fixture
def record(monkeypatch):
    """record(owner, name) lists the calls of owner.name from then on: copies of what goes in and out."""

    def start(owner, name: str) -> list[SimpleNamespace]:
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            call = SimpleNamespace(args=snapshot(args), kwargs=snapshot(kwargs))
            result = original(*args, **kwargs)
            call.result = snapshot(result)
            calls.append(call)
            return result

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return start


@pytest.fixture
def runs(monkeypatch):
    """Every Run that is made; its agent as it is at any time, and as it was at first."""
    made = []

    class Watched(a2c.Run):
        def __init__(self, args, agent, **parts):
            made.append(self)
            self.first_agent = copy.deepcopy(agent)
            super().__init__(args, agent, **parts)

    monkeypatch.setattr(a2c, "Run", Watched)
    return made


@pytest.fixture
def steps(runs):
    """What each step of the optimizer uses: rates, gradients and values of actor and critic."""
    seen = []

    def look(optimizer, *_):
        agent = runs[-1].agent
        step = SimpleNamespace(rates=[float(group["lr"]) for group in optimizer.param_groups])
        step.eps, step.kind = optimizer.param_groups[0]["eps"], type(optimizer).__name__
        for what in ("values", "grads"):
            parts = {"actor": [], "critic": []}
            for name, p in agent.named_parameters():
                x = p if what == "values" else p.grad
                parts["critic" if name.startswith("critic") else "actor"].append(x.detach().flatten().clone())
            setattr(step, what, {part: torch.cat(tensors) for part, tensors in parts.items()})
        step.grad_norm = torch.cat(list(step.grads.values())).norm().item()
        seen.append(step)

    handle = register_optimizer_step_pre_hook(look)
    yield seen
    handle.remove()


@pytest.fixture
def no_evaluation(monkeypatch):
    """Evaluations score 0 without playing, so that all steps of the environments are the training's."""
    names = ("returns", "discounted", "lengths", "terminated", "success")
    scores = lambda args, *_: {name: np.zeros(args.eval_episodes) for name in names}
    monkeypatch.setattr(a2c, "evaluate", scores)


# ----------------------------------------------------------------------------------------- episode boundaries
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_no_stored_transition_joins_two_episodes(num_envs, async_envs, record):
    rollouts = record(a2c.Storage, "to_device")
    sizes = dict(num_envs=num_envs, num_steps=5, total_timesteps=60 * num_envs)
    # the checkpoint is due after eight of twelve rollouts, in the middle of episodes
    quick("Boundary", async_envs=async_envs, checkpoint_every=40 * num_envs, **sizes)
    assert len(rollouts) == 12
    rows = {name: torch.cat([call.result[name] for call in rollouts]).numpy() for name in rollouts[0].result}
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
        assert rows["terminated"][:, i].any() and (rows["done"] > rows["terminated"])[:, i].any()
    if num_envs > 1:
        assert len(set(rows["obs"][0, :, 0])) == num_envs, "the environments differ"


@pytest.mark.parametrize("num_envs, total", [(1, 48), (3, 100), (2, 1)])
def test_total_timesteps_are_transitions_rounded_up_to_rollouts(num_envs, total, record, capsys):
    rollouts = record(a2c.Storage, "to_device")
    quick("Boundary", num_envs=num_envs, num_steps=16, total_timesteps=total)
    rounded = math.ceil(total / (16 * num_envs)) * 16 * num_envs
    played = [step[4] for step in probe_envs.Boundary.steps if not step[0]]
    assert len(played) == rounded == checkpoint()["run"]["env_steps"]
    assert (f"rounded up to {rounded}" in capsys.readouterr().out) == (rounded != total)
    stored = np.concatenate([call.result["action"].flatten() for call in rollouts])
    assert stored.tolist() == played, "what is stored was played"


@pytest.mark.parametrize("num_steps", [20, 5])
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(
    num_steps, runs, record, monkeypatch
):
    rollouts, seen, compute_gae = record(a2c.Storage, "to_device"), [], a2c.compute_gae

    def watched(*inputs):
        rollout, agent = rollouts[-1].result, runs[0].agent  # the networks that collected the rollout
        values = [agent.value(rollout[name].flatten(0, 1)).view(-1, 4) for name in ("obs", "next_obs")]
        result = compute_gae(*inputs)
        seen.append(snapshot((rollout, values, inputs, result)))
        return result

    monkeypatch.setattr(a2c, "compute_gae", watched)
    changes = dict(gamma=0.8, gae_lambda=0.7, learning_rate=0.01)
    quick("Boundary", num_envs=4, num_steps=num_steps, total_timesteps=240, **changes)
    assert len(seen) == 60 / num_steps
    for rollout, (value, next_value), inputs, result in seen:
        for got, expected in zip(inputs[:3], (rollout["reward"], value, next_value), strict=True):
            torch.testing.assert_close(got, expected)
        end = rollout["next_obs"][..., 3]
        assert torch.equal(inputs[3], (end == 1).float()) and torch.equal(inputs[4], (end > 0).float())
        assert inputs[5:] == [0.8, 0.7]
        arrays = [rollout["reward"], value, next_value, end == 1, end > 0]
        expected = brute_force_gae(*(x.double().numpy() for x in arrays), 0.8, 0.7)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert any((rollout["next_obs"][..., 3] == 2).any() for rollout, *_ in seen), "an episode is truncated"


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_critic_learns_the_endless_sum_where_episodes_are_only_truncated(optimizer, runs):
    changes = dict(num_envs=4, num_steps=5, total_timesteps=8000, log_every=4000, max_grad_norm=0.0)
    quick("Ones", learning_rate=0.01, gamma=0.9, optimizer=optimizer, **changes)
    value = runs[0].agent.value(torch.zeros(1, 4)).item()
    assert value == pytest.approx(1 / (1 - 0.9), rel=0.03), "the sum of ten steps is 6.5 at most"


def brute_force_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """The sum of the paper, term by term: O(T^2), without the recursion."""
    advantages = np.zeros(rewards.shape)
    for i in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                target = rewards[k, i] + (0 if terminated[k, i] else gamma * next_values[k, i])
                advantages[t, i] += (gamma * gae_lambda) ** (k - t) * (target - values[k, i])
                if done[k, i]:
                    break
    return advantages


def random_rollout(seed, num_steps=12, num_envs=5):
    """rewards, values, next_values, terminated, done in float64; ends also on the last step."""
    rng = np.random.default_rng(seed)
    rewards, values, finals = rng.normal(size=(3, num_steps, num_envs))
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.1
    terminated[-1, 0], truncated[-1, 1], terminated[-1, 1] = True, True, False
    done = terminated | truncated
    ends = done | (np.arange(num_steps) == num_steps - 1)[:, None]
    return rewards, values, np.where(ends, finals, np.roll(values, -1, axis=0)), terminated, done


def gae(rollout, gamma, gae_lambda):
    columns = (torch.tensor(x, dtype=torch.float64) for x in rollout)
    return a2c.compute_gae(*columns, gamma, gae_lambda).numpy()


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_the_brute_force_sum(gamma, gae_lambda):
    for seed in range(5):
        rollout = random_rollout(seed)
        expected = brute_force_gae(*rollout, gamma, gae_lambda)
        np.testing.assert_allclose(gae(rollout, gamma, gae_lambda), expected, atol=1e-12)


def test_with_lambda_1_the_advantage_is_the_n_step_return_minus_the_value():
    """As Algorithm S3: R = V of the last state, or 0 at a terminal one, then R <- r + gamma R backwards."""
    rollout = rewards, values, next_values, terminated, done = random_rollout(7)
    got = gae(rollout, 0.9, 1.0)
    for i in range(rewards.shape[1]):
        return_ = next_values[-1, i]
        for t in reversed(range(len(rewards))):
            if done[t, i]:
                return_ = 0.0 if terminated[t, i] else next_values[t, i]
            return_ = rewards[t, i] + 0.9 * return_
            assert got[t, i] == pytest.approx(return_ - values[t, i], abs=1e-12)


# ------------------------------------------------------------------------- the gradient of a three-state MDP
REWARD = [[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]]  # of state and action
LENGTH = 3


class Triangle(probe_envs.Probe):
    """Starts in state 0 of 3; the next is (state + action + 1) mod 3. Terminates after three steps."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.observation_space, self.state = Box(0, 1, (3,), np.float32), 0

    def reset(self, *, seed=None, options=None):
        self.state = 0
        return super().reset(seed=seed)

    def observe(self):
        return np.eye(3, dtype=np.float32)[self.state]

    def step(self, action):
        reward, self.t = REWARD[self.state][action], self.t + 1
        self.state = (self.state + int(action) + 1) % 3
        return self.observe(), reward, self.t == LENGTH, False, {}


gym.register("Triangle-v0", entry_point=Triangle, disable_env_checker=True)


def episodes():
    """(states, actions, rewards) of all that can happen."""
    for actions in product((0, 1), repeat=LENGTH):
        states = [0]
        for action in actions:
            states.append((states[-1] + action + 1) % 3)
        yield states[:-1], list(actions), [REWARD[s][a] for s, a in zip(states, actions, strict=False)]


def expected_return(log_probs):
    """J = sum over episodes of their probability times their return; log_probs (state, action)."""
    return sum(log_probs[s, a].sum().exp() * sum(r) for s, a, r in episodes())


def exact_values(log_probs):
    """V (time, state) of the policy, one time more than there are steps."""
    values = np.zeros((LENGTH + 1, 3))
    for t in reversed(range(LENGTH)):
        for s, a in product(range(3), (0, 1)):
            values[t, s] += math.exp(log_probs[s, a]) * (REWARD[s][a] + values[t + 1, (s + a + 1) % 3])
    return values


@pytest.mark.parametrize("num_steps", [1, 2, 3], ids="rollouts of {}".format)
@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_the_estimate_is_in_expectation_the_exact_gradient_of_a_three_state_mdp(gae_lambda, num_steps):
    """With the true values, whatever lambda and the length of a rollout. Every episode counts with its
    probability, so there is no noise: only rounding is left."""
    torch.manual_seed(0)
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(expected_return(logits.log_softmax(-1)), logits)
    log_probs = logits.log_softmax(-1)
    values, estimate = exact_values(log_probs.detach()), torch.zeros_like(logits)
    for states, actions, rewards in episodes():
        probability = log_probs[states, actions].sum().exp().item()
        for start in range(0, LENGTH, num_steps):  # the episode in rollouts
            rows = slice(start, min(start + num_steps, LENGTH))
            times = np.arange(LENGTH)[rows]
            successors = [(s + a + 1) % 3 for s, a in zip(states, actions, strict=True)][rows]
            columns = [rewards[rows], values[times, states[rows]], values[times + 1, successors], times == 2]
            column = [torch.tensor(x, dtype=torch.float64)[:, None] for x in columns]
            advantage = a2c.compute_gae(*column, column[-1], 1.0, gae_lambda).flatten()
            loss = a2c.advantage_loss(log_probs[states[rows], actions[rows]], advantage)
            (gradient,) = torch.autograd.grad(-len(times) * loss, logits, retain_graph=True)
            estimate += probability * gradient
    torch.testing.assert_close(estimate, exact)


def test_with_lambda_1_and_whole_episodes_any_value_is_a_baseline_without_bias():
    torch.manual_seed(1)
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    log_probs, wrong = logits.log_softmax(-1), torch.tensor([5.0, -3.0, 2.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad(expected_return(log_probs), logits, retain_graph=True)
    estimate = torch.zeros_like(logits)
    for states, actions, rewards in episodes():
        end = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)[:, None]
        rewards = torch.tensor(rewards, dtype=torch.float64)[:, None]
        values = wrong[states][:, None]
        advantage = a2c.compute_gae(rewards, values, values.roll(-1, 0), end, end, 1.0, 1.0).flatten()
        loss = a2c.advantage_loss(log_probs[states, actions], advantage)
        (gradient,) = torch.autograd.grad(-LENGTH * loss, logits, retain_graph=True)
        estimate += log_probs[states, actions].sum().exp().item() * gradient
    torch.testing.assert_close(estimate, exact)


def test_the_gradient_of_a_training_is_on_average_that_of_the_expected_return(steps, runs, no_evaluation):
    """20,000 episodes with the first policy (the learning rate is 0) and a critic that knows nothing."""
    sizes = dict(num_envs=8, num_steps=300, total_timesteps=60_000, hidden_sizes=(6,), gae_lambda=1.0)
    quick("Triangle-v0", gamma=1.0, learning_rate=0.0, max_grad_norm=0.0, normalize_advantage=False, **sizes)
    agent = runs[0].first_agent
    logits = agent.head(agent.actor_trunk(torch.eye(3)))[:, 0]
    exact = torch.autograd.grad(
        expected_return(logits.log_softmax(-1)), [*agent.actor_trunk.parameters(), *agent.head.parameters()]
    )
    exact = torch.cat([x.flatten() for x in exact])
    estimate = -LENGTH * torch.stack([step.grads["actor"] for step in steps]).mean(0)
    # two runs of half the length differ by a hundredth or two: that is the noise to allow for
    assert (estimate - exact).norm() < 0.05 * exact.norm()


# ------------------------------------------------------------------------------------------------ update
def test_one_gradient_step_per_rollout_on_all_of_it(record, no_evaluation, steps):
    losses, advantages = record(a2c, "advantage_loss"), record(a2c, "compute_gae")
    quick("CartPole-v1", normalize_advantage=False)
    assert len(losses) == len(advantages) == len(steps) == 3
    for loss, advantage in zip(losses, advantages, strict=True):
        assert torch.equal(loss.args[1], advantage.result.flatten())


@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_normalized_by_their_standard_deviation(normalize, record, no_evaluation):
    losses, advantages = record(a2c, "advantage_loss"), record(a2c, "compute_gae")
    quick("Boundary", normalize_advantage=normalize)
    for loss, advantage in zip(losses, advantages, strict=True):
        raw = advantage.result.flatten()
        assert raw.std() > 5, "far from normal by itself"
        expected = (raw - raw.mean()) / raw.std() if normalize else raw
        torch.testing.assert_close(loss.args[1], expected, rtol=1e-4, atol=1e-5)


def test_a_rollout_of_one_step_gives_no_nan():
    quick("CartPole-v1", num_envs=1, num_steps=1, total_timesteps=3, normalize_advantage=True)
    learned = [row[name] for row in progress() for name in row if name.startswith(("loss/", "grad/"))]
    assert learned and all(math.isfinite(float(value)) for value in learned)
    assert all(torch.isfinite(x).all() for x in checkpoint()["agent"].values())


def test_advantage_loss_equals_numbers_worked_out_by_hand():
    log_prob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss = a2c.advantage_loss(log_prob, torch.tensor([2.0, -1.0, 4.0]))
    assert loss.item() == pytest.approx((2 - 2 + 2) / 3)
    loss.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([-2.0, 1.0, -4.0]) / 3)


def test_loss_is_the_sum_of_its_parts_and_the_value_error_is_halved(record, no_evaluation):
    forwards, advantages = record(a2c.ActorCritic, "forward"), record(a2c, "compute_gae")
    quick("Walk", value_coef=0.7, entropy_coef=0.3, log_every=32)
    first, row = forwards[0], {name: float(value) for name, value in progress()[0].items()}
    log_prob, logits, value = first.result
    advantage, old_value = advantages[0].result.flatten(), advantages[0].args[1].flatten()
    torch.testing.assert_close(value, old_value)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean().item()
    assert row["loss/policy"] == pytest.approx(-(log_prob * advantage).mean().item(), rel=1e-4)
    assert row["loss/value"] == pytest.approx(0.5 * advantage.square().mean().item(), rel=1e-4)
    parts = row["loss/policy"] + 0.7 * row["loss/value"] - 0.3 * entropy
    assert row["loss/total"] == pytest.approx(parts, abs=1e-5)


def test_log_probabilities_are_of_the_unclipped_action_and_only_the_environment_gets_a_clipped_one(
    runs, record, no_evaluation
):
    rollouts, acts = record(a2c.Storage, "to_device"), record(a2c.GaussianHead, "sample")
    forwards = record(a2c.ActorCritic, "forward")
    quick("Box", num_steps=50, total_timesteps=100)
    sampled = torch.from_numpy(np.stack([call.result for call in acts[-50:]]))
    action = rollouts[0].result["action"]
    assert torch.equal(action, sampled) and action.abs().max() > 1.5
    low, high = np.array([-1, -2]), np.array([3, 2])
    sent = np.array(Boxes.actions).reshape(50, 2, 2)
    np.testing.assert_allclose(sent, np.clip([1, 0] + 2 * action.numpy(), low, high), atol=1e-6)
    agent, flat = runs[0].first_agent, action.flatten(0, 1)
    mean = agent.head.mean(agent.actor_trunk(rollouts[0].result["obs"].flatten(0, 1)))
    expected = Normal(mean, agent.head.log_std.exp()).log_prob(flat).sum(-1)
    torch.testing.assert_close(forwards[0].result[0], expected.detach())


def test_rmsprop_equals_a_plain_loop_with_eps_inside_the_root():
    rng, eps, rates = np.random.default_rng(0), 0.1, (0.5, 0.25, 0.0)
    parameters = [torch.nn.Parameter(torch.tensor(rng.normal(size=size))) for size in (3, 5)]
    theta, g = [p.detach().numpy().copy() for p in parameters], [np.zeros(3), np.zeros(5)]
    optimizer = a2c.RMSprop([{"params": [p]} for p in parameters], eps=eps, alpha=0.9)
    for rate in rates:
        for i, p in enumerate(parameters):
            gradient = rng.normal(size=len(p))
            p.grad = torch.tensor(gradient)
            optimizer.param_groups[i]["lr"] = torch.tensor(rate)
            g[i] = 0.9 * g[i] + 0.1 * gradient**2
            theta[i] -= rate * gradient / np.sqrt(g[i] + eps)
        optimizer.step()
        for p, expected in zip(parameters, theta, strict=True):
            np.testing.assert_allclose(p.detach(), expected, rtol=1e-7)
    assert len(optimizer.state_dict()["state"]) == 2, "g is in the checkpoint"


def test_as_one_vector_shares_memory_with_parameters_and_gradients():
    module = a2c.make_trunk(Box(0, 1, (3, 12, 9)), (5,), "tanh")
    before, x = copy.deepcopy(module), torch.rand(4, 3, 12, 9)
    vector = a2c.as_one_vector(list(module.parameters()))
    assert torch.equal(module(x), before(x)) and len(vector) == sum(p.numel() for p in before.parameters())
    module(x).sum().backward()
    before(x).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in before.parameters()])
    torch.testing.assert_close(vector.grad.norm(), gradient.norm())
    with torch.no_grad():
        vector.sub_(2 * vector.grad)
    for p, old in zip(module.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, old - 2 * old.grad)
        assert p.stride() == old.stride(), "convolutions keep their layout in memory"
    module.load_state_dict(before.state_dict())
    assert torch.equal(vector.norm(), a2c.as_one_vector(list(before.parameters())).norm())


# ------------------------------------------------------------------------ flags: each shown by its effect
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_optimizer_trunk_and_sizes_and_every_parameter_learns(optimizer, shared, runs, steps):
    sizes = dict(hidden_sizes=(5, 7), adam_eps=0.003)
    quick("Walk", optimizer=optimizer, shared_trunk=shared, **sizes)
    agent = runs[0].agent
    assert (agent.actor_trunk is agent.critic_trunk) == shared
    assert len(list(agent.parameters())) == 8 + 4 * (not shared)
    for trunk in (agent.actor_trunk, agent.critic_trunk):
        assert [layer.out_features for layer in trunk if hasattr(layer, "out_features")] == [5, 7]
    assert {step.kind for step in steps} == {{"adam": "Adam", "rmsprop": "RMSprop"}[optimizer]}
    assert {step.eps for step in steps} == {0.003} and len(steps) == 3
    for now, before in zip(agent.parameters(), runs[0].first_agent.parameters(), strict=True):
        assert not torch.equal(now, before)


@pytest.mark.parametrize("anneal", [True, False])
def test_learning_rates_of_actor_and_critic_fall_to_0_if_asked(anneal, steps):
    quick("Walk", learning_rate=0.02, critic_lr=0.1, anneal_lr=anneal, total_timesteps=128)
    fractions = [1, 0.75, 0.5, 0.25] if anneal else [1] * 4
    expected = [[0.02 * fraction, 0.1 * fraction] for fraction in fractions]
    np.testing.assert_allclose([step.rates for step in steps], expected, rtol=1e-6)
    logged = [float(row["schedule/learning_rate"]) for row in progress() if "loss/policy" in row]
    np.testing.assert_allclose(logged, [0.02 * fraction for fraction in fractions], rtol=1e-6)


def test_critic_lr_moves_the_critic_alone(steps):
    quick("Walk", learning_rate=0.0, critic_lr=0.1)
    assert equal(steps[-1].values["actor"], steps[0].values["actor"])
    assert not equal(steps[-1].values["critic"], steps[0].values["critic"])
    steps.clear()
    quick("Walk", run_dir="run2", learning_rate=0.1)
    assert steps[0].rates == pytest.approx([0.1]), "one optimizer group without critic_lr"


def test_value_coef_0_teaches_the_critic_nothing(steps):
    quick("Walk", value_coef=0.0)
    assert equal(steps[-1].values["critic"], steps[0].values["critic"])
    assert not equal(steps[-1].values["actor"], steps[0].values["actor"])


def test_entropy_coef_keeps_the_policy_random(no_evaluation):
    entropy = {}
    for coef in (0.0, 3.0):
        changes = dict(learning_rate=0.03, anneal_lr=False, total_timesteps=1536, num_steps=8)
        quick("Masked", run_dir=f"run{coef}", entropy_coef=coef, **changes)
        entropy[coef] = float(progress(f"run{coef}")[-1]["policy/entropy"])
    most = 2 / 3 * math.log(2)  # two of three times there are two legal actions
    assert entropy[0.0] < 0.2 * most and 0.8 * most < entropy[3.0]


def test_max_grad_norm(steps):
    for limit in (0.01, 0.0):
        quick("Boundary", run_dir=f"run{limit}", max_grad_norm=limit)
    clipped, free = [step.grad_norm for step in steps[:3]], [step.grad_norm for step in steps[3:]]
    assert len(free) == 3 and clipped == pytest.approx([0.01] * 3, rel=1e-3)
    assert min(free) > 1, "0 switches it off"
    for limit, norm in ((0.01, 0.01), (0.0, free[0])):
        row = progress(f"run{limit}")[0]
        assert float(row["grad/norm_clipped"]) == pytest.approx(norm, rel=1e-3)
        assert float(row["grad/norm"]) > 1


def test_gamma_and_gae_lambda_reach_the_advantages(record):
    calls = record(a2c, "compute_gae")
    quick("Walk", gamma=0.83, gae_lambda=0.41)
    assert {tuple(call.args[5:]) for call in calls} == {(0.83, 0.41)}


def test_clip_reward_learns_from_signs_and_logs_rewards_as_they_are(record, no_evaluation):
    rollouts, advantages = record(a2c.Storage, "to_device"), record(a2c, "compute_gae")
    quick("Boundary", clip_reward=True)
    for k, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        reward = rollout.result["reward"]
        assert torch.equal(advantage.args[0], reward.sign()) and reward.max() > 1
        row = progress()[k]
        assert float(row["reward/mean"]) == pytest.approx(reward.mean().item())
        assert float(row["reward/max"]) == pytest.approx(reward.max().item())


def test_normalize_reward_through_episode_ends_and_segments(record, no_evaluation):
    rollouts, advantages = record(a2c.Storage, "to_device"), record(a2c, "compute_gae")
    quick("Boundary", normalize_reward=True, gamma=0.9, checkpoint_every=64, total_timesteps=128)
    sums, running = [], 0.0
    for k, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        running = 0.0 if k == 2 else running  # a segment starts here
        reward, done = rollout.result["reward"].numpy(), rollout.result["done"].numpy() == 1
        for t in range(16):
            running = reward[t] + 0.9 * running
            sums.extend(running)
            running = np.where(done[t], 0, running)
        np.testing.assert_allclose(advantage.args[0], (reward / np.std(sums)).clip(-10, 10), rtol=1e-4)
    assert checkpoint()["reward_norm"]["var"].item() == pytest.approx(np.var(sums), rel=1e-4)


def test_normalizers_see_every_observation_after_its_update_and_are_frozen_in_evaluation(runs, record):
    rollouts, forwards = record(a2c.Storage, "to_device"), record(a2c.ActorCritic, "forward")
    updates = record(a2c.RunningNorm, "update")
    changes = dict(env="Walk", normalize_obs=True, normalize_reward=True, eval_every=32, log_every=32)
    trained = quick(**changes)
    seen = torch.cat([call.result["obs"].flatten(0, 1) for call in rollouts]).double().numpy()
    saved = checkpoint()
    np.testing.assert_allclose(saved["agent"]["obs_norm.mean"], seen.mean(0), rtol=1e-5, atol=1e-5)
    assert saved["agent"]["obs_norm.count"] == saved["reward_norm"]["count"] == 96
    assert len(updates) == 6, "observations and rewards of three rollouts"
    first = runs[0].first_agent  # the update meets the normalizer under which it acted: here none
    expected = first(*(rollouts[0].result[name].flatten(0, 1) for name in ("obs", "action")))
    torch.testing.assert_close(forwards[0].result[0], expected[0].detach())
    updates.clear()
    replayed = quick(**changes, evaluate="run")
    assert replayed.tolist() == trained.tolist(), "the reloaded policy plays as the saved one did"
    assert not updates and equal(runs[-1].agent.state_dict(), saved["agent"])


def test_a_row_is_written_every_log_every_steps_and_is_whole(record, no_evaluation):
    measured = record(a2c.CategoricalHead, "entropy")
    quick("Walk", num_steps=4, log_every=40, total_timesteps=160)
    rows = progress()
    assert [row["step"] for row in rows] == ["40", "80", "120", "160"]
    whole = {"loss/policy", "loss/value", "loss/total", "grad/norm", "grad/norm_clipped", "policy/entropy",
             "policy/log_prob", "value/explained_variance", "reward/mean", "reward/max",
             "schedule/learning_rate"}  # fmt: skip
    assert all(whole <= row.keys() for row in rows)
    assert len(measured) == 4, "what only the log needs is computed only for the log"


# ------------------------------------------------------------------------------------------------- spaces
REFUSED = ("dict_image", "nested_image", "sequence", "text")
OBSERVATIONS = [name for name in probe_envs.spaces_observations() if name not in REFUSED]
ACTIONS = [name for name in probe_envs.spaces_actions() if name not in ("dict", "text")]


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space(name, record):
    rollouts = record(a2c.Storage, "to_device")
    quick("Spaces", env_kwargs=dict(obs=name), num_steps=5, total_timesteps=20, shared_trunk=True)
    space = probe_envs.spaces_observations()[name]
    image = isinstance(space, Box) and len(space.shape) > 1 and name not in ("thin", "cards", "slice")
    stored = rollouts[0].result["obs"]
    kept = {np.dtype(np.uint8): torch.uint8, np.dtype(np.bool_): torch.bool} if image else {}
    assert stored.dtype == kept.get(space.dtype, torch.float32)
    assert math.prod(stored.shape[2:]) == gym.spaces.flatdim(space) and stored.ndim == 2 + (3 if image else 1)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_of_every_space(name, record):
    rollouts = record(a2c.Storage, "to_device")
    quick("Spaces", env_kwargs=dict(action=name), num_steps=10, total_timesteps=20)
    space = probe_envs.spaces_actions()[name]
    assert len(Spaces.actions) >= 20 and all(space.contains(sent) for sent in Spaces.actions)
    action = rollouts[0].result["action"]
    assert action.dtype == (torch.float32 if isinstance(space, Box) else torch.int64)
    if not isinstance(space, Box):
        sent = np.array(Spaces.actions[:20]).reshape(action.shape)
        np.testing.assert_array_equal(sent, action.numpy() + np.ravel(getattr(space, "start", 0)))
        assert len({tuple(row) for row in sent.reshape(20, -1).tolist()}) > 1


def test_action_masks_reach_the_policy_and_the_update(record, no_evaluation):
    rollouts, forwards = record(a2c.Storage, "to_device"), record(a2c.ActorCritic, "forward")
    quick("Masked")  # an illegal action raises in the environment
    mask, action = (rollouts[0].result[name] for name in ("mask", "action"))
    assert mask.gather(-1, action.unsqueeze(-1)).all()
    single = mask.sum(-1).flatten() == 1
    log_prob = forwards[0].result[0]
    assert single.any() and (log_prob[single] == 0).all() and (log_prob[~single] < 0).all()


def test_atari_frames_are_skipped_once_and_the_score_is_raw_while_the_sign_is_learned_from(record):
    counts, advantages = record(a2c.Run, "count"), record(a2c, "compute_gae")
    given = vars(a2c.parse_args(["--env-id", "ALE/MsPacman-v5", "--device", "cpu"]))
    assert json.loads(given["env_kwargs"])["repeat_action_probability"] == 0.25, "explicit"
    small = dict(run_dir="run", num_envs=2, num_steps=40, hidden_sizes=(16,), eval_every=0, eval_episodes=1)
    small |= dict(
        checkpoint_every=0, total_timesteps=240, torch_threads=1, max_episode_steps=110, log_every=80
    )
    envs = a2c.make_envs(a2c.Args(**given | small), 2)
    obs, info = envs.reset(seed=1)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    after = envs.step(np.zeros(2, dtype=int))[4]
    assert (after["episode_frame_number"] - info["episode_frame_number"]).tolist() == [4, 4]
    envs.close()
    a2c.train(a2c.Args(**given | small))
    rewards, done = (np.array([call.args[k] for call in counts]) for k in (1, 2))
    assert done.nonzero()[0].tolist() == [109, 109], "max_episode_steps counts steps, not frames"
    assert rewards.max() >= 10 and max(call.args[0].max() for call in advantages) == 1
    played = np.mean(rewards[:110].sum(0))
    assert [float(row["train/episode_return"]) for row in progress() if "train/episode_return" in row] == [
        played
    ]


# --------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
def test_checkpoints_with_and_without_compile_load_in_each_other():
    for compiled in (False, True):
        run = f"run{compiled}"
        quick("Walk", run_dir=run, compile=compiled, total_timesteps=32)
        first = checkpoint(run)
        resumed = a2c.parse_args(["--resume", run])
        a2c.train(a2c.replace(resumed, total_timesteps=64, compile=not compiled))
        assert checkpoint(run)["run"]["env_steps"] == 64 and not equal(first, checkpoint(run))
    one, other = checkpoint("runFalse")["agent"], checkpoint("runTrue")["agent"]
    assert one.keys() == other.keys()
    for name in one:  # the same mathematics: rounding apart, the same parameters
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fields", [dict(optimizer="rmsprop"), dict(critic_lr=0.01), dict(shared_trunk=True)])
def test_resumed_equals_uninterrupted_with_each_optimizer(fields):
    quick("Walk", run_dir="whole", checkpoint_every=64, total_timesteps=192, anneal_lr=False, **fields)
    quick("Walk", run_dir="part", checkpoint_every=64, total_timesteps=64, anneal_lr=False, **fields)
    a2c.train(a2c.replace(a2c.parse_args(["--resume", "part"]), total_timesteps=192))
    for part in ("agent", "optimizer"):
        assert equal(checkpoint("whole")[part], checkpoint("part")[part])
    state = checkpoint("part")["optimizer"]["state"]
    assert all(x.abs().sum() > 0 for entry in state.values() for x in entry.values())


# ------------------------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("seed", [1, 2])
def test_cartpole_is_learned(seed):
    flags = ["--env-id", "CartPole-v1", "--seed", str(seed), "--device", "cpu", "--run-dir", "run"]
    args = a2c.parse_args([*flags, "--stop-return", "475"])
    assert args.total_timesteps <= 200_000
    assert a2c.train(args).mean() >= 475
