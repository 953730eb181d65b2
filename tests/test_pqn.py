"""PQN: the returns of Q(lambda), exploration, one network with normalized layers."""

from functools import partial

import conftest
import numpy as np
import odd_envs
import probe_envs
import pytest
import torch
from conftest import CPU, call_main, checkpoint, flags, load_script, progress, tiny
from gymnasium.spaces import Box, Discrete
from torch import nn

short, quick = (
    partial(f, total_timesteps=1) for f in (conftest.short, conftest.quick)
)  # one rollout of 64 steps


@pytest.fixture
def pqn():
    return load_script("pqn")


def agent_of(module, obs=None, actions=2, **changes):
    layout = module.observation_map(obs or Box(-1, 1, (4,)))[1]
    return module.Agent(layout, Discrete(actions), tiny(module, normalize_obs=False, **changes), CPU)


def updates() -> list[dict]:
    return [row for row in progress() if "reward/mean" in row]


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_q_lambda_is_the_mixture_of_n_step_returns(pqn, lambda_):
    """lambda = 0 leaves the one-step target, lambda = 1 the rewards up to the end."""
    torch.manual_seed(0)
    steps, n, gamma = 40, 3, 0.95
    reward, next_value = torch.randn(2, steps, n)
    terminated, truncated = (torch.rand(2, steps, n) < 0.1).float()
    done = torch.maximum(terminated, truncated)
    assert terminated.sum() > 3 < (done - terminated).sum()
    given = [x.clone() for x in (reward, next_value, terminated, done)]
    got = pqn.q_lambda_returns(*given, gamma, lambda_)
    assert all(map(torch.equal, given, (reward, next_value, terminated, done)))  # inputs stay as they are
    for i in range(n):
        for start in range(steps):
            ends = [t for t in range(start, steps) if done[t, i]]
            last = ends[0] if ends else steps - 1
            rewards, returns = 0.0, []
            for t in range(start, last + 1):
                rewards += gamma ** (t - start) * float(reward[t, i])
                bootstrap = 0.0 if terminated[t, i] else float(next_value[t, i])
                returns.append(rewards + gamma ** (t - start + 1) * bootstrap)
            weight = [(1 - lambda_) * lambda_**k for k in range(len(returns) - 1)] + [
                lambda_ ** (len(returns) - 1)
            ]
            assert float(got[start, i]) == pytest.approx(np.dot(weight, returns), abs=1e-4)


def test_epsilon_falls_with_the_steps_and_each_environment_draws_alone(pqn):
    options = dict(epsilon_start=0.8, epsilon_end=0.2, exploration_fraction=0.5, total_timesteps=512)
    quick(pqn, "Ones", **options)
    told = {row["step"]: row["schedule/epsilon"] for row in updates()}  # of the last step of the rollout
    assert told == pytest.approx({step: max(0.8 - 0.6 * (step - 2) / 256, 0.2) for step in told})
    agent = agent_of(pqn, actions=4)
    obs = np.zeros((4000, 4), np.float32)
    np.random.seed(0)
    (greedy,) = set(agent.act(obs, {}))
    agent.epsilon = 0.4
    share = np.bincount(agent.act(obs, {}, greedy=False), minlength=4) / 4000
    assert share == pytest.approx([0.7 if action == greedy else 0.1 for action in range(4)], abs=0.03)


def test_returns_are_those_of_the_true_successors(pqn, monkeypatch):
    """With known values of [number, episode, t, end] the target of each step of a rollout is known."""
    value = lambda x: 5 * x[..., 1] + x[..., 2] + 50 * x[..., 3]
    forward = pqn.Agent.forward
    known = lambda agent, obs: 0 * forward(agent, obs) + value(obs)[:, None]
    monkeypatch.setattr(pqn.Agent, "forward", known)
    seen, returns = [], pqn.q_lambda_returns
    monkeypatch.setattr(pqn, "q_lambda_returns", lambda *args: seen.append(returns(*args)) or seen[-1])
    quick(pqn, "Boundary", num_steps=32, gamma=0.5, q_lambda=0.0)
    truth = []
    for evaluates, number, episode, t, _, reward in probe_envs.Boundary.steps:
        last = t == probe_envs.boundary_length(number, episode)
        terminated = last and probe_envs.boundary_terminates(number, episode)
        now = np.array([number, episode, t, 2.0 * last])
        if not evaluates:
            truth.append(reward + 0.5 * (1 - terminated) * value(now))
    assert len(truth) == 64 and sorted(seen[0].flatten().tolist()) == pytest.approx(sorted(truth))


def test_the_next_value_is_of_a_legal_action(pqn, record):
    """Against a table of which actions are legal."""
    returns, outputs = record(pqn, "q_lambda_returns"), record(pqn.Agent, "forward")
    quick(pqn, "Loop", num_steps=32, total_timesteps=128)
    masks = torch.tensor(odd_envs.Loop.masks, dtype=torch.bool)
    for given, return_ in returns:
        assert given[1].isfinite().all() and return_.isfinite().all()
    for (_, obs), q_values in outputs:
        legal = masks[obs[:, 1].long()]  # one-hot states
        assert torch.equal(q_values.isfinite(), legal)
    of_rollout = [call for call in outputs if len(call[1]) == 64][1 if len(outputs[0][1]) == 64 else 0]
    best = torch.where(of_rollout[1].isfinite(), of_rollout[1], -1e9).amax(1)
    assert any(torch.equal(given[1].flatten(), best) for given, _ in returns)


@pytest.mark.parametrize("terminates, q_lambda, value", [(0, 0.0, 10), (0, 0.8, 10), (1, 0.0, 1 / 0.19)])
def test_a_time_limit_is_no_termination(pqn, terminates, q_lambda, value):
    """1 per step, for ever: 1 / (1 - gamma). If each tenth step ends it: v = 1 + 0.9 gamma v."""
    options = dict(env_kwargs={"terminates": bool(terminates)}, gamma=0.9, q_lambda=q_lambda, num_steps=10)
    options |= dict(learning_rate=0.03, num_minibatches=1, update_epochs=4, total_timesteps=4000)
    quick(pqn, "Ones", **options)
    assert updates()[-1]["q/mean"] == pytest.approx(value, rel=0.05)


def test_a_checkpoint_holds_one_network_and_no_memory(pqn):
    quick(pqn, "Walk")
    assert set(checkpoint()) == {"args", "run", "agent", "optimizer", "reward_norm"}
    shapes = [tuple(x.shape) for x in checkpoint()["agent"].values()]
    assert shapes == [(8, 2), (8,), (8,), (8,), (2, 8), (2,)]  # a layer, its normalization, the output


@pytest.mark.parametrize(
    "obs", [None, Box(0, 255, (3, 40, 40), np.uint8), Box(0, 255, (4, 10, 10), np.uint8)]
)
def test_each_hidden_layer_is_normalized(pqn, obs):
    """So what is added to all of its units changes nothing."""
    agent = agent_of(pqn, obs, hidden_sizes=(16, 16))
    x = torch.as_tensor(np.stack([agent.obs_space.sample() for _ in range(5)]))
    layers = [module for module in agent.modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear))]
    before, after = agent(x).detach(), []
    for layer in layers:
        layer.bias.data += 3
        after.append(agent(x).detach())
    assert len(layers) >= 3 and before.std() > 1e-3
    for values in after[:-1]:
        torch.testing.assert_close(values, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after[-1], before + 3, rtol=1e-3, atol=1e-3)


def test_the_activation_follows_the_normalization(pqn, monkeypatch):
    """Nothing that a layer hands on is below 0; normalized after the activation half of it would be."""
    for obs in (None, Box(0, 255, (4, 10, 10), np.uint8)):
        agent = agent_of(pqn, obs, hidden_sizes=(64, 64), activation="relu")
        into = []
        for layer in [x for x in agent.modules() if isinstance(x, (nn.Conv2d, nn.Linear))]:
            layer.register_forward_pre_hook(lambda _, x, into=into: into.append(x[0]))
        agent(torch.as_tensor(np.stack([agent.obs_space.sample() for _ in range(5)])))
        assert len(into) >= 3 and all((x >= 0).all() and (x == 0).any() for x in into[1:])


def test_other_actions_are_refused_in_one_line(pqn, capsys):
    for kwargs in ({"actions": "box"}, {}):
        env = "Walk" if kwargs else "Spaces"
        args = short(pqn, env, env_kwargs=kwargs or {"action": "multi_discrete"})
        assert call_main(pqn, *flags(args)) == 2
        error = capsys.readouterr().err
        assert "Discrete" in error and "ppo.py" in error and error.count("\n") == 1
