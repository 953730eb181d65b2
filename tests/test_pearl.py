"""pearl.py: the belief, whose gradient it follows, and which steps of which task it is of."""

import math

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import call_main, checkpoint, equal, flags, load_script, parts, progress, tiny
from gymnasium.spaces import Box, Discrete
from torch.distributions import Normal, kl_divergence

pearl = load_script("pearl")
CPU, THREE, TWO = torch.device("cpu"), pearl.Layout((3,)), Box(-1, 1, (2,))


class Tagged(gym.Env):
    """Observes [task, round, step of the round]: a round begins with a task. Pays 10 task + round.

    Episodes last 3 steps, or 5 in every other environment.
    """

    observation_space, action_space = Box(-1e6, 1e6, (3,), np.float32), Box(-1.0, 1.0, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    task, round, step_of_round, rounds = 0, 0, 0, {}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def sample_task(self, rng):
        return rng.integers(1, 1000, 1)

    def set_task(self, task):
        self.task, self.step_of_round = int(task[0]), 0
        self.round = Tagged.rounds[self.task] = Tagged.rounds.get(self.task, 0) + 1

    def observe(self):
        return np.array([self.task, self.round, self.step_of_round], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = self.length if hasattr(self, "length") else 3 + 2 * ((seed or 0) % 2)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t, self.step_of_round = self.t + 1, self.step_of_round + 1
        reward = 10.0 * self.task + self.round
        return self.observe(), reward, False, self.t == self.length, {}

    def render(self):
        return np.full((48, 64, 3), 10 * self.t, dtype=np.uint8)


class Sides(gym.Env):
    """Pays the place on a line, or minus the place, as the task says; a step is 0.3 at most."""

    observation_space, action_space = Box(-9.0, 9.0, (1,), np.float32), Box(-1.0, 1.0, (1,), np.float32)

    def sample_task(self, rng):
        return rng.choice([-1.0, 1.0], 1)

    def set_task(self, task):
        self.task = float(task[0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = np.zeros(1, np.float32), 0
        return self.x, {}

    def step(self, action):
        self.x, self.t = (self.x + 0.3 * action).clip(-1, 1), self.t + 1
        return self.x, self.task * float(self.x[0]), False, self.t == 6, {}


gym.register("Sides-v0", entry_point=Sides, disable_env_checker=True)
gym.register("Tagged-v0", entry_point=Tagged, disable_env_checker=True)


@pytest.fixture
def seen(monkeypatch):
    """The parts of the last Run, by name, as they are at any time."""
    found, init = {}, pearl.Run.__init__

    def watched(self, args, **parts):
        found.update(parts)
        init(self, args, **parts)

    monkeypatch.setattr(pearl.Run, "__init__", watched)
    Tagged.rounds.clear()
    return found


def arguments(env="probe_envs:Walk-v0", **changes):
    """Four rounds of 2 tasks, 4 + 3 + 5 steps each; updates from the second round on."""
    kwargs = {"actions": "box"} if env.startswith("probe") else {}
    plain = dict(
        env_id=env, env_kwargs=kwargs, total_timesteps=96, learning_starts=48, updates_per_step=0.25,
        eval_every=0, checkpoint_every=0, steps_prior=4, steps_posterior=3, extra_steps_posterior=5,
        batch_size=6, embedding_batch_size=5, meta_batch_size=3, latent_dim=3, num_envs=2, num_train_tasks=5,
    )  # fmt: skip
    return tiny(pearl, **plain | changes)


def quick(env="probe_envs:Walk-v0", **changes):
    return pearl.train(arguments(env, **changes))


def make_agent(**changes):
    torch.manual_seed(0)
    args = arguments(**changes)
    return pearl.Agent(THREE, TWO, args, CPU), args


def steps_of(n, count, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=(n, *shape)).astype(np.float32)
    return [dict(obs=draw(3), action=draw(2), reward=draw(), next_obs=draw(3)) for _ in range(count)]


# --------------------------------------------------------------------------------------------- learning rule
def test_a_product_of_gaussians_is_that_of_their_densities():
    mean, var = (
        torch.tensor([[0.5, -1.0], [1.5, 2.0], [-0.3, 0.2]]),
        torch.tensor([[0.5, 2], [1, 0.7], [3, 1]]),
    )
    found_mean, found_var = pearl.product_of_gaussians(mean[None], var[None])
    grid = torch.linspace(-10, 10, 20_001, dtype=torch.float64)[:, None, None]
    density = Normal(mean.double(), var.double().sqrt()).log_prob(grid).sum(dim=1).exp()  # (grid, Z)
    density /= density.sum(dim=0)
    expected = (grid[:, 0] * density).sum(dim=0)
    torch.testing.assert_close(found_mean[0], expected.float(), rtol=1e-4, atol=1e-4)
    spread = ((grid[:, 0] - expected).square() * density).sum(dim=0)
    torch.testing.assert_close(found_var[0], spread.float(), rtol=1e-4, atol=1e-4)


def test_the_divergence_from_the_prior_is_that_of_torch():
    mean, var = torch.randn(4, 3), torch.rand(4, 3) + 0.1
    expected = kl_divergence(Normal(mean, var.sqrt()), Normal(0.0, 1.0)).sum(dim=-1)
    torch.testing.assert_close(pearl.kl_to_prior(mean, var), expected)


def test_soft_value_equals_numbers_worked_out_by_hand():
    value = pearl.soft_value(torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([-1.0, 0.5]), 0.2)
    assert value.tolist() == pytest.approx([1.2, 2.9])


def test_the_actor_draws_what_it_says_within_limits_and_plays_its_mean():
    agent = pearl.Agent(THREE, TWO, arguments(), CPU)
    obs, z = torch.randn(6, 3), torch.randn(6, agent.latent_dim)
    with torch.no_grad():
        agent.actor.head.bias.copy_(torch.tensor([0.5, -0.5, 90.0, -90.0]))
        action, log_prob, (mean, log_std, u) = agent.policy(obs, z)
    assert log_std.tolist() == [[2.0, -20.0]] * 6 and log_prob.shape == (6,)
    assert torch.equal(action, u.tanh()) and (u - mean)[:, 0].std() > 1 > (u - mean)[:, 1].abs().max()
    np.testing.assert_allclose(agent.act(obs.numpy(), {"z": z}), mean.tanh().numpy())
    assert mean[:, 0].min() > 0.3


def test_z_has_the_moments_it_is_drawn_with_and_gradients_reach_both():
    torch.manual_seed(0)
    mean, var = (
        torch.tensor([[1.0, -2.0]], requires_grad=True),
        torch.tensor([[4.0, 0.25]], requires_grad=True),
    )
    z = pearl.draw(mean.expand(20_000, -1), var.expand(20_000, -1))
    torch.testing.assert_close(z.mean(0), mean[0].detach(), atol=0.05, rtol=0)
    torch.testing.assert_close(z.var(0), var[0].detach(), atol=0, rtol=0.05)
    z.square().mean(0).sum().backward()  # E[z^2] = mean^2 + var
    torch.testing.assert_close(mean.grad, 2 * mean.detach(), atol=0.1, rtol=0)
    torch.testing.assert_close(var.grad, torch.ones(1, 2), atol=0, rtol=0.1)


def test_twin_critics_are_apart_and_each_is_what_it_is_alone():
    agent, _ = make_agent(hidden_sizes=(8, 6))
    obs, action, z = torch.randn(50, 3), torch.rand(50, 2), torch.randn(50, 3)
    values = agent.critic(obs, action, z)
    assert values.shape == (2, 50) and torch.sub(*values).abs().min() > 0
    for i in range(2):
        x = torch.cat([obs, action, z], dim=-1)
        for layer in agent.critic.layers:
            x = x @ layer.weight[i] + layer.bias[i]
            x = x if layer is agent.critic.layers[-1] else x.relu()
        torch.testing.assert_close(values[i], x.squeeze(-1))
    assert equal(agent.critic.state_dict(), agent.target_critic.state_dict())


def test_twin_critics_stay_apart_in_training(seen):
    quick(total_timesteps=192)
    for layer in seen["agent"].critic.layers:
        assert torch.sub(*layer.weight).abs().max() > 0.01


# --------------------------------------------------------------------------------------------------- belief
def test_the_order_of_a_context_is_no_matter_and_a_row_that_is_not_known_is_as_none():
    agent, _ = make_agent()
    context = torch.randn(2, 6, 6)
    mean, var = agent.belief(context)
    torch.testing.assert_close(agent.belief(context.flip(1)), (mean, var))
    known = torch.tensor([[1.0, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    found = agent.belief(context, known)
    for i in range(2):
        alone = agent.belief(context[i : i + 1, known[i] > 0])
        torch.testing.assert_close([x[i : i + 1] for x in found], list(alone))
    assert (found[1] > var).all()  # who knows less is less sure


def test_before_the_first_step_the_belief_is_the_prior():
    agent, _ = make_agent()
    mean, var = agent.belief_after([], 4)
    assert mean.shape == (4, 3) and mean.eq(0).all() and var.eq(1).all()


def test_without_the_bottleneck_z_is_the_mean_of_the_outputs_and_no_divergence_counts(seen, record):
    steps = record(pearl, "gradient_step")
    agent, _ = make_agent(information_bottleneck=False)
    context = torch.randn(2, 6, 6)
    mean, var = agent.belief(context)
    torch.testing.assert_close(mean, agent.encoder(context)[0].mean(dim=1))
    assert var.eq(0).all() and torch.equal(pearl.draw(mean, var), mean)
    assert agent.belief_after([], 2)[1].eq(0).all()
    losses = record(pearl, "critic_loss")
    quick(information_bottleneck=False, kl_lambda=100.0)
    mine = [given[0] for given, _ in steps if given[1] is seen["critic_optimizer"]]
    assert [x.item() for x in mine] == [x.item() for _, x in losses]
    assert {row["latent/kl"] for row in progress() if "latent/kl" in row} == {0.0}


@pytest.mark.parametrize("next_obs", [False, True])
def test_a_context_is_what_happened_side_by_side(next_obs):
    agent, _ = make_agent(next_obs_in_context=next_obs)
    steps = steps_of(2, 4)
    context = agent.context(steps)
    assert context.shape == (2, 4, 9 if next_obs else 6)
    for i in range(2):
        for t, step in enumerate(steps):
            row = [*step["obs"][i], *step["action"][i], step["reward"][i]]
            row += [*step["next_obs"][i]] if next_obs else []
            assert context[i, t].tolist() == pytest.approx(row)
    agent.belief(context)


@pytest.mark.parametrize("bottleneck", [True, False])
def test_the_encoder_learns_from_the_loss_of_the_critics_and_the_divergence_alone(
    bottleneck, seen, monkeypatch
):
    """The gradient of each step's loss; the actor's loss knows nothing of the encoder."""
    step, losses, divergences, targets = pearl.gradient_step, [], [], []
    keep = lambda kept, f: lambda *given: (kept.append(f(*given)), kept[-1])[1]
    constant = lambda q, y, loss=pearl.critic_loss: (targets.append(y), loss(q, y))[1]
    monkeypatch.setattr(pearl, "critic_loss", keep(losses, constant))
    monkeypatch.setattr(pearl, "kl_to_prior", keep(divergences, pearl.kl_to_prior))
    checked = {"critic": 0, "actor": 0}

    def watched(loss, optimizer, max_norm):
        weights = list(seen["agent"].encoder.parameters()) if seen else []
        gradient = lambda x: torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True)
        if optimizer is seen.get("actor_optimizer"):
            assert gradient(loss) == (None,) * len(weights)
            checked["actor"] += 1
        elif optimizer is seen.get("critic_optimizer"):
            expected = losses[-1] + (0.3 * divergences[-1].mean() if bottleneck else 0)
            torch.testing.assert_close(gradient(loss), gradient(expected))
            assert not targets[-1].requires_grad
            assert any(x.abs().max() > 0 for x in gradient(losses[-1]) if x is not None)
            assert set(weights) <= set(optimizer.param_groups[0]["params"])
            checked["critic"] += 1
        return step(loss, optimizer, max_norm)

    monkeypatch.setattr(pearl, "gradient_step", watched)
    quick(kl_lambda=0.3, information_bottleneck=bottleneck)
    assert checked["critic"] == checked["actor"] > 5


def test_an_actor_that_learns_alone_leaves_the_encoder_and_one_that_does_not_does_not(seen):
    before = lambda agent: {name: x.clone() for name, x in agent.encoder.state_dict().items()}
    quick(critic_lr=0.0, eval_every=24)
    first = torch.load("run/models/0.pt", weights_only=True)["agent"]
    same = lambda part: all(torch.equal(x, first[name]) for name, x in checkpoint()["agent"].items()
                            if name.startswith(part))  # fmt: skip
    assert same("encoder.") and same("critic.") and not same("actor.")
    pearl.train(arguments(run_dir="other", actor_lr=0.0, eval_every=24))
    after = {name: x for name, x in checkpoint("other")["agent"].items() if name.startswith("encoder.")}
    assert not all(torch.equal(x, first[name]) for name, x in after.items())
    assert before(seen["agent"]).keys() == {name.removeprefix("encoder.") for name in after}


def test_an_update_is_one_pass_for_all_tasks_of_the_meta_batch(seen, record):
    encoders, critics = record(pearl.Encoder, "forward"), record(pearl.Critic, "forward")
    quick(total_timesteps=48, learning_starts=47, eval_episodes=1)  # 6 updates in the second round
    shapes = [given[1].shape for given, _ in encoders if len(given[1]) == 3]
    assert shapes == [(3, 5, 4)] * 12  # each of critics and actor: three tasks, 5 rows of obs, action, reward
    assert {given[1].shape for given, _ in critics} == {(3 * 6, 2)} and len(critics) == 3 * 6


def test_each_transition_is_beside_the_z_of_its_task(seen, record):
    """Without noise in z: the mean of what the encoder says of the context of this task."""
    critics, beliefs = record(pearl.Critic, "forward"), record(pearl.Agent, "belief")
    quick(information_bottleneck=False, learning_rate=0.0, eval_every=0)
    for (_, _, _, z), _ in critics[-3:]:
        mean = next(x for _, (x, _) in reversed(beliefs) if len(x) == 3)
        assert torch.sub(*mean[:2]).abs().max() > 1e-4
        torch.testing.assert_close(z, mean[:, None].expand(-1, 6, -1).flatten(0, 1))


# ---------------------------------------------------------------------------------------------- whose steps
def test_contexts_are_of_their_task_and_its_last_round_and_replay_of_all_its_rounds(seen):
    """Also of steps that become context alone: those after them are for replay."""
    quick("Tagged-v0", total_timesteps=24 * 10, learning_starts=0, horizon=100)
    buffer, phases = seen["buffer"], set()
    assert (buffer.added == 12 * 4).all()  # 10 rounds of 2 for 5 tasks, the least known first
    for _ in range(50):
        batch = buffer.sample(3, 6, 5)
        rows, context = batch["obs"].view(3, 6, 3), batch["context"]
        for i in range(3):
            (task,) = set(rows[i, :, 0].tolist())
            assert task in buffer.tasks and set(context[i, :, 0].tolist()) == {task}
            last = max(buffer.data["obs"][buffer.data["obs"][:, 0] == task][:, 1]).item()
            assert set(context[i, :, 1].tolist()) == {last} and context[i, :, 2].max() < 4 + 3
            assert torch.equal(context[i, :, 5], 10 * context[i, :, 0] + context[i, :, 1])
            phases |= {("context", t) for t in context[i, :, 2].tolist()}
            phases |= {("replay", t) for t in rows[i, :, 2].tolist()}
            phases |= {("round", x - last) for x in rows[i, :, 1].tolist()}
        assert batch["next_obs"][:, 2].eq(batch["obs"][:, 2] + 1).all()
        paid = 10 * batch["obs"][:, 0] + batch["obs"][:, 1]
        assert torch.equal(batch["reward"], paid) and not batch["terminated"].any()
    found = lambda kind: sorted(x for name, x in phases if name == kind)
    assert found("context") == [*range(7)] and found("replay") == [*range(12)]
    assert len(found("round")) == 4  # all rounds


def test_a_ring_of_each_task_keeps_its_last_steps():
    args = arguments(buffer_size=5 * 20)
    tasks = np.arange(5, dtype=np.float32)[:, None]
    agent = pearl.Agent(THREE, TWO, args, CPU)
    buffer = pearl.TaskBuffer(args, tasks, agent, 7, 12)
    rng, truth = np.random.default_rng(0), {task: [] for task in range(5)}
    for number in range(9):
        chosen = buffer.least_known(2)
        known = {task: len(steps) for task, steps in truth.items()}
        assert sorted(known[task] for task in chosen) == sorted(known.values())[:2]
        steps = [
            dict(
                obs=rng.normal(size=(2, 3)), action=rng.normal(size=(2, 2)), reward=np.ones(2) * t,
                next_obs=rng.normal(size=(2, 3)), terminated=np.array([t == 3, False]),
            )
            for t in range(12)
        ]  # fmt: skip
        buffer.add(chosen, steps, torch.full((2, 7, 6), float(number)))
        for i, task in enumerate(chosen):
            truth[task] += [{name: np.float32(x[i]) for name, x in step.items()} for step in steps]
    assert sorted(map(len, truth.values())) == [36, 36, 48, 48, 48]
    batch, drawn = buffer.sample(5, 150, 2), set()
    for i in range(750):
        row = {name: x[i].numpy() for name, x in batch.items() if name != "context"}
        (found,) = [(task, t) for task in truth for t, step in enumerate(truth[task])
                    if np.allclose(step["obs"], row["obs"])]  # fmt: skip
        step = truth[found[0]][found[1]]
        assert all(np.allclose(step[name], x) for name, x in row.items())
        drawn.add((found[0], len(truth[found[0]]) - found[1]))
    assert {age for _, age in drawn} == {*range(1, 21)} and len(drawn) > 90


def test_z_is_of_the_prior_first_then_of_the_round_and_held_for_an_episode(seen, record, monkeypatch):
    beliefs, played, act = record(pearl.Agent, "belief_after"), [], pearl.Agent.act

    def watched(self, obs, info, greedy=True):
        played.append((greedy, obs.copy(), info["z"].clone()))
        return act(self, obs, info, greedy)

    monkeypatch.setattr(pearl.Agent, "act", watched)
    monkeypatch.setattr(Tagged, "length", 3, raising=False)  # steps 0 3 | 4 6 9
    quick("Tagged-v0", total_timesteps=24 * 3, horizon=100, learning_starts=0)
    rollout = [(obs, z) for greedy, obs, z in played if not greedy]
    assert len(rollout) == 36
    calls = [(given[1], result) for given, result in beliefs if given[2] == 2][: 3 * 5]
    for number in range(3):
        of_round = rollout[12 * number : 12 * number + 12]
        assert [len(steps) for steps, _ in calls[5 * number : 5 * number + 5]] == [0, 0, 4, 6, 7]
        for steps, _ in calls[5 * number : 5 * number + 5]:
            for t, step in enumerate(steps):  # those of this round, from its beginning
                assert np.array_equal(step["obs"], of_round[t][0])
        changed = [t for t in range(1, 12) if not torch.equal(of_round[t][1], of_round[t - 1][1])]
        assert changed == [3, 4, 6, 9]


@pytest.mark.parametrize("hold, changes", [(0, [3, 4, 6, 9]), (2, [2, 3, 4, 6, 8, 9, 10])])
def test_z_may_be_drawn_more_often_than_for_each_episode(hold, changes, monkeypatch):
    played, act = [], pearl.Agent.act

    def watched(self, obs, info, greedy=True):
        played.append((greedy, info["z"].clone()))
        return act(self, obs, info, greedy)

    monkeypatch.setattr(pearl.Agent, "act", watched)
    monkeypatch.setattr(Tagged, "length", 3, raising=False)
    quick("Tagged-v0", total_timesteps=24, horizon=100, learning_starts=0, hold_z=hold)
    z = [x for greedy, x in played if not greedy]
    assert [t for t in range(1, 12) if not torch.equal(z[t], z[t - 1])] == changes
    z = [x for greedy, x in played if greedy]  # two episodes of 3 steps
    expected = [2, 3, 5] if hold else [3]
    assert [t for t in range(1, 6) if not torch.equal(z[t], z[t - 1])] == expected


def test_the_target_is_the_soft_value_of_the_target_critics(seen, record):
    losses, values = record(pearl, "critic_loss"), record(pearl, "soft_value")
    policies, critics = record(pearl.Agent, "policy"), record(pearl.Critic, "forward")
    drawn, sample = [], pearl.TaskBuffer.sample

    def watched(self, *given):
        batch = sample(self, *given)
        drawn.append({name: x.clone() for name, x in batch.items()})
        return batch

    record(pearl.TaskBuffer, "sample")
    pearl.TaskBuffer.sample = watched  # monkeypatch puts the first one back
    quick("Tagged-v0", horizon=100, reward_scale=0.1, gamma=0.5, auto_alpha=False, alpha=0.3)
    next_value = values[-2]  # that of the actor's loss follows
    torch.testing.assert_close(losses[-1][0][1], 0.1 * drawn[-1]["reward"] + 0.5 * next_value[1])
    assert next_value[0][2] == pytest.approx(0.3)
    judge = critics[-3][0][0]  # two calls of the online critics follow
    assert judge is seen["agent"].target_critic and drawn[-1]["context"][:, :, 5].min() > 10  # not scaled
    obs, next_obs = policies[-1][0][1], policies[-2][0][1]
    assert torch.equal(obs, drawn[-1]["obs"]) and torch.equal(next_obs, drawn[-1]["next_obs"])


def test_nothing_follows_an_end_but_much_a_time_limit(seen, record):
    losses, values = record(pearl, "critic_loss"), record(pearl, "soft_value")
    kwargs = dict(actions="box", terminates=True)
    quick("probe_envs:Ones-v0", env_kwargs=kwargs, steps_prior=20, total_timesteps=112, batch_size=99)
    ends = losses[-1][0][1] == 1.0
    assert 0 < ends.sum() < len(ends) and values[-2][1].abs().min() > 0


def test_critics_learn_the_endless_sum_where_episodes_are_only_truncated(seen):
    changes = dict(gamma=0.8, learning_rate=0.01, tau=0.1, auto_alpha=False, alpha=1e-8, mean_reg=0.0)
    quick("probe_envs:Ones-v0", **changes, total_timesteps=24 * 30, updates_per_step=1.0, horizon=100)
    agent = seen["agent"]
    value = agent.critic(torch.zeros(1, 4), torch.zeros(1, 1), agent.belief_after([], 1)[0]).flatten()
    assert value.tolist() == pytest.approx([5.0, 5.0], rel=0.05)  # ten steps would be 4.5 at most


@pytest.mark.parametrize("name", ["mean_reg", "log_std_reg", "pre_tanh_reg"])
def test_regularizers_of_the_policy_have_a_gradient(name, seen, monkeypatch):
    """A weight of 10 more adds 10 times the gradient of the mean square, which is not 0."""
    gradients, step, policy = {}, pearl.gradient_step, pearl.Agent.policy

    def watched(loss, optimizer, max_norm):
        if optimizer is seen.get("actor_optimizer"):
            weights, squares = optimizer.param_groups[0]["params"], outputs[name].square().mean()
            kept = [torch.cat([x.flatten() for x in torch.autograd.grad(y, weights, retain_graph=True)])
                    for y in (loss, squares)]  # fmt: skip
            gradients.setdefault(weight, kept)
        return step(loss, optimizer, max_norm)

    def kept(self, obs, z):
        result = policy(self, obs, z)
        outputs.update(zip(("mean_reg", "log_std_reg", "pre_tanh_reg"), result[2], strict=True))
        return result

    monkeypatch.setattr(pearl, "gradient_step", watched)
    monkeypatch.setattr(pearl.Agent, "policy", kept)
    off = dict(mean_reg=0.0, log_std_reg=0.0, pre_tanh_reg=0.0)
    for weight in (0.0, 10.0):
        outputs = {}
        quick(run_dir=f"run{weight}", **off | {name: weight}, total_timesteps=48, learning_starts=47)
    (plain, squares), (with_it, _) = gradients[0.0], gradients[10.0]
    assert squares.abs().max() > 1e-4
    torch.testing.assert_close(with_it - plain, 10 * squares, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ evaluation
def test_an_evaluation_adapts_to_held_out_tasks_from_its_own_episodes(seen, monkeypatch):
    calls, belief_after = [], pearl.Agent.belief_after

    def watched(self, steps, n):
        calls.append(list(steps))
        return belief_after(self, steps, n)

    monkeypatch.setattr(pearl.Agent, "belief_after", watched)
    args = arguments("Tagged-v0", horizon=100, eval_episodes=5, num_test_tasks=3, adaptation_episodes=2)
    pearl.train(args)
    tasks = pearl.sample_tasks(args, 3, np.random.default_rng(args.eval_seed)).ravel()
    assert not set(tasks) & set(seen["buffer"].tasks.ravel())
    calls = calls[-3:]
    assert [len(steps) for steps in calls] == [0, 5, 10]  # as long as the longest of the episodes
    for t, step in enumerate(calls[-1]):
        assert step["obs"][:, 0].tolist() == tasks[np.arange(5) % 3].tolist()
        assert step["known"].tolist() == [t % 5 < (3 if i % 2 == 0 else 5) for i in range(5)]
    (row,) = [row for row in progress() if "eval/return_mean" in row]
    assert row["eval/return_mean"] == row["eval/return_after_2"] > 0
    length = np.array([3, 5, 3, 5, 3])
    returns = length * 10 * tasks[np.arange(5) % 3]  # and the round
    assert row["eval/return_after_0"] == pytest.approx(returns.mean(), rel=0.01)
    assert row["eval/length_mean"] == length.mean()


def test_the_first_episode_of_a_test_task_knows_nothing_and_the_next_only_what_it_saw():
    quick(adaptation_episodes=1)
    agent = pearl.load_policy("run").agent
    assert equal(agent.belief_after([], 2), (torch.zeros(2, 3), torch.ones(2, 3)))
    names = [name for name in checkpoint(name="best.pt") if name not in ("args", "run")]
    assert names == ["agent"]  # no memory of training tasks is there


def test_what_is_loaded_adapts_in_the_environment_itself_as_an_evaluation_does():
    """Without the bottleneck nothing is sampled: the same returns, from raw observations of one task."""
    changes = dict(information_bottleneck=False, next_obs_in_context=True, hold_z=4, eval_episodes=3)
    scored = quick(**changes, learning_rate=0.01, updates_per_step=1.0, horizon=20)
    args, policy = pearl.Args(**checkpoint()["args"]), pearl.load_policy("run")
    tasks = pearl.sample_tasks(args, args.num_test_tasks, np.random.default_rng(args.eval_seed))
    env = gym.make(args.env_id, max_episode_steps=args.horizon, **args.env_kwargs)
    for i in range(3):
        env.unwrapped.set_task(tasks[i % len(tasks)])
        env.reset(seed=args.eval_seed + i)
        policy.reset()
        for _ in range(args.adaptation_episodes + 1):
            (obs, _), done, total = env.reset(), False, 0.0
            while not done:
                action = policy(obs)
                assert env.action_space.contains(action)
                obs, reward, terminated, truncated, _ = env.step(action)
                total, done = total + reward, terminated or truncated
                pearl.tell(policy, reward, obs, done)
        assert total == pytest.approx(scored[i], rel=1e-5)


def test_what_is_loaded_holds_a_z_of_the_prior_until_an_episode_ends():
    quick()
    policy = pearl.load_policy("run/best.pt")
    rng = np.random.default_rng(0)
    obs, told = rng.normal(size=(2, 2)).astype(np.float32)
    knows_nothing = policy(obs)
    z = policy.info["z"]
    pearl.tell(policy, 5.0, told, False)
    assert np.array_equal(policy(obs), knows_nothing)
    pearl.tell(policy, -3.0, told, True)
    assert not torch.equal(policy.info["z"], z) and not np.array_equal(policy(obs), knows_nothing)
    assert [step["reward"].tolist() for step in policy.info["steps"]] == [[5.0], [-3.0]]
    assert np.array_equal(policy.info["steps"][0]["next_obs"][0], told)
    policy.reset()
    policy(obs)
    assert "steps" not in policy.info and not torch.equal(policy.info["z"], z)


def test_a_film_shows_all_episodes_of_an_adaptation():
    quick("Tagged-v0", horizon=4, eval_seed=10_000_000, capture_video=True, adaptation_episodes=2)
    film = cv2.VideoCapture("run/videos/96.webm")
    count = 0
    while film.read()[0]:
        count += 1
    assert count == 3 * 3  # of the first environment


def test_a_resumed_run_keeps_its_tasks(seen):
    quick(seed=1)
    before = seen["buffer"].tasks.copy()
    pearl.train(pearl.parse_args("--resume run --total-timesteps 144 --seed 5".split()))
    assert np.array_equal(seen["buffer"].tasks, before)
    assert np.array_equal(checkpoint()["buffer"]["tasks"], before)


# --------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("hold", [1, 4])
def test_random_actions_come_first_and_are_held(hold, seen):
    quick(random_hold=hold, learning_starts=48)
    action = seen["buffer"].data["action"].view(5, -1, 1)[:, :12].numpy()  # the first round of each task
    played = [task for task in range(5) if seen["buffer"].added[task]]
    for task in played[:4]:
        same = [t for t in range(1, 12) if np.array_equal(action[task, t], action[task, t - 1])]
        assert same in ([t for t in range(1, 12) if t % hold], [])  # tasks of the first two rounds are random
    first = sum(action[task, 1] == action[task, 0] for task in played).item()
    assert first == (4 if hold > 1 else 0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_tasks_may_stay_random(share, seen):
    quick(
        random_share=share, random_hold=4, learning_starts=0, total_timesteps=480, num_envs=4, buffer_size=480
    )
    action = seen["buffer"].data["action"].view(-1, 12)  # of a task and a round
    action = action[action.abs().sum(dim=1) > 0]
    held = (action[:, 1:4] == action[:, :1]).all(dim=1).float()
    assert len(action) == 40 and (held.mean() == share if share in (0, 1) else 0.2 < held.mean() < 0.8)


def test_updates_per_step_count_updates(seen, record):
    steps = record(pearl, "gradient_step")
    quick(updates_per_step=0.3, learning_starts=40)  # rounds of 24 steps: the first updates follow the second
    mine = lambda part: sum(given[1] is seen[f"{part}_optimizer"] for given, _ in steps)
    assert mine("critic") == mine("actor") == mine("alpha") == int(0.3 * 96) - int(0.3 * 24)


def test_learning_rates_are_each_ones_own_and_fall_to_0_if_asked(seen):
    given = dict(actor_lr=0.01, encoder_lr=0.05, critic_lr=0.02, alpha_lr=0.03)
    groups = lambda: [
        x for name in ("actor", "critic", "alpha") for x in seen[f"{name}_optimizer"].param_groups
    ]
    rates = lambda: [float(group["lr"]) for group in groups()]
    cases = [({}, [0.1] * 4), (given, [*given.values()]), (dict(anneal_lr=True), [0.1 / 4] * 4)]
    cases.append((dict(critic_lr=0.02), [0.1, 0.02, 0.02, 0.1]))  # the encoder follows the critics
    for i, (changes, expected) in enumerate(cases):
        quick(run_dir=f"run{i}", learning_rate=0.1, **changes)
        assert rates() == pytest.approx(expected)


def test_a_fixed_temperature_stays_and_a_learned_one_rises_when_the_entropy_is_too_low(seen):
    quick(auto_alpha=False, alpha=0.05)
    assert seen["agent"].log_alpha.exp().item() == pytest.approx(0.05)
    for target, sign in ((9.0, 1), (-9.0, -1)):
        quick(run_dir=f"run{target}", alpha=0.5, target_entropy=target)
        assert sign * (seen["agent"].log_alpha.exp().item() - 0.5) > 0.001


def test_it_learns_to_learn():
    """Which of two goals pays, only rewards tell: who does not know it gets as much as who stays at 0."""
    changes = dict(
        steps_prior=6, steps_posterior=6, extra_steps_posterior=6, num_envs=8, num_train_tasks=8,
        num_test_tasks=8, eval_episodes=8, total_timesteps=2_880, learning_starts=576, updates_per_step=0.2,
        batch_size=16, embedding_batch_size=8, meta_batch_size=8, learning_rate=3e-3, gamma=0.8,
        hidden_sizes=(32, 32), encoder_sizes=(32,), reward_scale=5.0, random_hold=6, buffer_size=20_000,
    )  # fmt: skip
    quick("Sides-v0", **changes)
    (row,) = [row for row in progress() if "eval/return_mean" in row]
    assert row["eval/return_after_0"] < 1 and row["eval/return_after_1"] > 2


# ------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("changes, says", [
    (dict(num_envs=6), "--num-train-tasks 5"),
    (dict(env_id="Pendulum-v1", env_kwargs={}), "is not a family of tasks"),
    (dict(env_kwargs={"actions": "discrete"}), "bounded Box"),
    (dict(env_id="probe_envs:Spaces-v0", env_kwargs={"obs": "hwc", "action": "box"}), "image observations"),
    (dict(steps_prior=0), "--steps-prior 0"),
    (dict(seed=3, eval_seed=3), "--eval-seed 3"),
    (dict(learning_starts=97), "--learning-starts 97"),
    (dict(steps_posterior=-1), "--steps-posterior -1"),
    (dict(env_id="PointRobot-v0"), "--env-kwargs"),
])  # fmt: skip
def test_mistakes_end_before_training_in_one_line(changes, says, capsys):
    assert call_main(pearl, *flags(arguments(**changes))) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_too_large_a_buffer_is_refused_but_playing_needs_none(monkeypatch):
    trained = quick()
    monkeypatch.setattr(pearl, "free_memory", lambda device: 1e3)
    assert np.array_equal(pearl.train(pearl.parse_args(["--evaluate", "run"])), trained)
    with pytest.raises(pearl.UsageError, match="--buffer-size"):
        pearl.train(pearl.parse_args(["--resume", "run"]))


def test_a_run_of_other_tasks_is_not_resumed():
    quick()
    with pytest.raises(pearl.UsageError, match="shape"):
        pearl.train(pearl.parse_args("--resume run --num-train-tasks 4".split()))
    assert math.isfinite(parts()["run"]["best"])


# --------------------------------------------------------------------------------------------------- families
@pytest.mark.parametrize("family, optimum", [("PointRobot-v0", -5.19), ("SparsePointRobot-v0", 13.36)])
def test_the_best_return_of_the_points_is_the_known_one(family, optimum):
    args = pearl.make_args(family)
    tasks = pearl.sample_tasks(args, 20_000, np.random.default_rng(0))
    envs = pearl.make_task_envs(args, tasks)
    obs, _ = envs.reset(seed=1)
    total, done = np.zeros(len(tasks)), np.zeros(len(tasks), bool)
    while not done.any():
        obs, reward, _, done, _ = envs.step(((tasks - obs) / 0.1).clip(-1, 1))
        total += reward
    assert total.mean() == pytest.approx(optimum, abs=0.05)


def test_discrete_actions_are_refused_by_the_agent():
    with pytest.raises(pearl.UsageError, match="bounded Box"):
        pearl.Agent(THREE, Discrete(2), arguments(), CPU)
