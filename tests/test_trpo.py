"""TRPO's own tests: the trust region step. Advantages and entropy are as in VPG, episodes as in REINFORCE."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import ALGOS, equal, load_script, progress
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from test_ppo import brute_force_gae
from test_reinforce import recorder, train_quick, watch_runs
from torch.distributions import Categorical, Normal, kl_divergence

trpo = load_script(ALGOS / "trpo.py")
vpg = load_script(ALGOS / "vpg.py")

SPACES = {"discrete": Discrete(3), "ragged": MultiDiscrete([2, 4]), "box": Box(-1, 1, (2,))}


def quick(env: str, **changes) -> np.ndarray:
    return train_quick(trpo, env, **changes)


def make_agent(space, seed=0, dtype=torch.float64):
    """An agent with a policy far from uniform, observations, actions and legal actions."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    agent = trpo.ActorCritic(Box(-1, 1, (4,)), space, trpo.Args(hidden_sizes=(6,))).to(dtype)
    actor = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
    with torch.no_grad():
        for p in actor:
            p.add_(0.5 * torch.randn_like(p))
    obs, mask = torch.randn(20, 4, dtype=dtype), agent.head.mask({}, 20)
    mask = None if mask is None else torch.tensor(mask)
    policy = agent.head(agent.actor_trunk(obs), mask)
    action = agent.head.sample(policy.detach().numpy(), None, agent.head.noise(20))
    return agent, actor, obs, mask, torch.from_numpy(action)


def kl_to_itself(agent, obs, mask):
    policy = agent.head(agent.actor_trunk(obs), mask)
    log_std = agent.head.log_std.detach().clone() if hasattr(agent.head, "log_std") else None
    return lambda: trpo.mean_kl(
        agent.head, agent.head(agent.actor_trunk(obs), mask), policy.detach(), log_std
    )


# ------------------------------------------------------------------------------------------ the mathematics
def test_conjugate_gradient_solves_a_known_system():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(12, 12))
    a, b = torch.tensor(root @ root.T + np.eye(12)), torch.tensor(rng.normal(size=12))
    x = trpo.conjugate_gradient(lambda v: a @ v, b, iterations=30, tolerance=1e-20)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-6)


def test_conjugate_gradient_needs_one_iteration_for_each_eigenvalue_and_ends_at_the_tolerance():
    a, calls = torch.diag(torch.tensor([1.0, 1.0, 5.0, 5.0, 9.0], dtype=torch.float64)), []
    product = lambda v: (calls.append(1), a @ v)[1]
    b = torch.arange(1.0, 6.0, dtype=torch.float64)
    for iterations, exact in [(2, False), (3, True)]:
        x = trpo.conjugate_gradient(product, b, iterations, tolerance=0.0)
        assert torch.allclose(a @ x, b, atol=1e-9) == exact
    calls.clear()
    trpo.conjugate_gradient(product, b, 100, tolerance=1e-10)
    assert len(calls) == 3
    x = trpo.conjugate_gradient(product, 0 * b, 100, tolerance=1e-10)
    assert not x.any(), "nothing to solve"


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_hessian_product_equals_the_finite_difference_of_gradients(space):
    agent, actor, obs, mask, _ = make_agent(space)
    kl = kl_to_itself(agent, obs, mask)
    start = trpo.flatten(actor).detach()
    for _ in range(3):
        v, gradients = torch.randn_like(start), []
        for sign in (1, -1):
            with torch.no_grad():
                trpo.assign(actor, start + sign * 1e-5 * v)
            gradients.append(trpo.flatten(torch.autograd.grad(kl(), actor)))
        with torch.no_grad():
            trpo.assign(actor, start)
        expected = (gradients[0] - gradients[1]) / 2e-5
        product = trpo.hessian_product(kl(), actor, damping=0.0)
        torch.testing.assert_close(product(v), expected, rtol=1e-6, atol=1e-7)
        assert v @ product(v) > 0, "the Fisher matrix is positive"
        damped = trpo.hessian_product(kl(), actor, damping=0.1)
        torch.testing.assert_close(damped(v), product(v) + 0.1 * v)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_kl_equals_torch_distributions_and_is_0_without_gradient_at_the_old_policy(space):
    (old, _, obs, mask, _), (new, actor, *_) = make_agent(space), make_agent(space, seed=1)
    policies = [agent.head(agent.actor_trunk(obs), mask) for agent in (old, new)]
    if isinstance(space, Box):
        pair = [Normal(x, agent.head.log_std.exp()) for x, agent in zip(policies, (old, new), strict=True)]
        log_std = old.head.log_std
    else:
        pair, log_std = [Categorical(logits=x) for x in policies], None
    result = trpo.mean_kl(new.head, policies[1], policies[0], log_std)
    torch.testing.assert_close(result, kl_divergence(*pair).sum(-1).mean())
    assert result > 0.01
    kl = kl_to_itself(new, obs, mask)()
    assert abs(kl.item()) < 1e-12
    assert trpo.flatten(torch.autograd.grad(kl, actor)).abs().max() < 1e-12


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_the_gradient_of_the_surrogate_is_the_policy_gradient(space):
    """Which test_vpg.py compares with the exact one; the mean is over steps here, over episodes there."""
    agent, actor, obs, mask, action = make_agent(space)
    log_prob, _ = agent(obs, action, mask)
    advantage = torch.randn(20, dtype=torch.float64)
    surrogate = trpo.surrogate(log_prob, log_prob.detach(), advantage)
    loss = vpg.policy_gradient_loss(log_prob, advantage, episodes=4)
    one, two = (trpo.flatten(torch.autograd.grad(x, actor, retain_graph=True)) for x in (surrogate, loss))
    torch.testing.assert_close(20 * one, -4 * two)


def test_surrogate_equals_numbers_worked_out_by_hand():
    new, old = torch.tensor([0.3, 0.5]).log(), torch.tensor([0.2, 1.0]).log()
    assert trpo.surrogate(new, old, torch.tensor([2.0, -4.0])).item() == pytest.approx(
        (1.5 * 2 - 0.5 * 4) / 2
    )


# --------------------------------------------------------------------------------------------- line search
def search(measure_at, step=1.0, start=0.1, **changes):
    """A line search from start along step, over one parameter: share, objective, KL and where it ended."""
    x = torch.nn.Parameter(torch.tensor([start]))
    measure = lambda: tuple(map(torch.as_tensor, measure_at(x.item())))
    settings = dict(max_kl=0.5, backtrack_ratio=0.5, max_backtracks=4) | changes
    objective = measure()[0]
    share, objective, kl = trpo.line_search([x], torch.tensor([step]), measure, objective, **settings)
    return share, objective.item(), kl.item(), x.item()


def test_line_search_takes_the_first_step_that_rises_within_the_limit():
    assert search(lambda x: (x, 0.4))[::3] == (1.0, pytest.approx(1.1)), "the whole step"
    assert search(lambda x: (x, x))[::3] == (0.25, pytest.approx(0.35)), "a quarter keeps the KL below 0.5"
    share, objective, kl, x = search(lambda x: (-((x - 0.2) ** 2), 0.0))
    assert share == 0.125 and objective > -0.01 and x == pytest.approx(0.225), "the objective has to rise"


@pytest.mark.parametrize("reason", ["falls", "too far", "nan", "nan kl", "equal"])
def test_a_refused_step_changes_nothing_bit_for_bit(reason):
    measures = {
        "falls": lambda x: (-x, 0.0), "too far": lambda x: (x, 0.6), "nan": lambda x: (math.nan, 0.0),
        "nan kl": lambda x: (x, math.nan), "equal": lambda x: (1.0, 0.0),
    }  # fmt: skip
    for start in (0.1, 1 / 3, 1e-8):
        result = search(measures[reason], start=start)
        assert result[0] == 0 and result[2] == 0
        assert result[3] == torch.tensor(start).item()


# ------------------------------------------------------------------------------------------ in the training
@pytest.mark.parametrize("env", ["Walk", "Box", "Masked"])
def test_every_step_keeps_the_limit_and_rises_or_is_refused(env):
    quick(env, num_envs=2, episodes_per_update=8, total_timesteps=2000, max_kl=0.02)
    rows = [{name: float(value) for name, value in row.items()} for row in progress() if "policy/kl" in row]
    assert len(rows) > 10 and sum(row["policy/accepted"] for row in rows) > 0.8 * len(rows)
    for row in rows:
        assert row["policy/kl_before"] == pytest.approx(0, abs=1e-6)
        assert row["policy/kl"] <= 0.02 and row["policy/expected_improvement"] > 0
        assert (
            (row["policy/accepted"] == 1) == (row["policy/improvement"] > 0) == (row["policy/step_share"] > 0)
        )
        if row["policy/accepted"]:
            assert row["policy/step_share"] in [pytest.approx(0.8**k) for k in range(15)]
    assert max(row["policy/kl"] for row in rows) > 0.01, "the limit is used"


def test_the_step_is_as_long_as_the_limit_says(monkeypatch):
    """To second order the KL of the whole step is max_kl, whatever max_kl is."""
    products, seen, search = recorder(monkeypatch, trpo, "hessian_product"), [], trpo.line_search

    def watched(parameters, step, *rest):
        seen.append(0.5 * (step @ products[-1].result(step)).item())
        return search(parameters, step, *rest)

    monkeypatch.setattr(trpo, "line_search", watched)
    for max_kl in (0.001, 0.1):
        quick("Walk", run_dir=f"run{max_kl}", max_kl=max_kl, total_timesteps=1)
    assert seen == pytest.approx([0.001, 0.1], rel=1e-3)


@pytest.mark.parametrize("why", ["the KL is too large", "no gradient"])
def test_a_refused_step_leaves_the_policy_as_it_was(why, monkeypatch):
    runs, agents, start = watch_runs(monkeypatch, trpo), [], trpo.Run.__init__

    def init(run, args, agent, **parts):
        agents.append(copy.deepcopy(agent))
        start(run, args, agent, **parts)

    monkeypatch.setattr(trpo.Run, "__init__", init)
    if why == "no gradient":
        changes = dict(env_kwargs={"actions": "box"}, gae_lambda=0.0, gamma=0.0, value_epochs=0)
        monkeypatch.setattr(trpo, "compute_gae", lambda rewards, *_: torch.zeros_like(rewards))
    else:
        changes, real = {}, trpo.mean_kl
        monkeypatch.setattr(trpo, "mean_kl", lambda *args: real(*args) + 1.0)
    quick("Walk", **changes)
    assert all(float(row["policy/accepted"]) == 0 == float(row["policy/kl"]) for row in progress())
    before, after = agents[0].state_dict(), runs[0].agent.state_dict()
    actor = [name for name in before if not name.startswith("critic")]
    assert actor and all(equal(before[name], after[name]) for name in actor)
    if why != "no gradient":
        assert not equal(before["critic.weight"], after["critic.weight"]), "the critic learns on"


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_critic_learns_the_endless_sum_where_episodes_are_only_truncated(optimizer, monkeypatch):
    runs = watch_runs(monkeypatch, trpo)
    changes = dict(gamma=0.9, gae_lambda=0.9, learning_rate=0.02, value_epochs=10, value_minibatches=2)
    quick(
        "Ones", num_envs=4, episodes_per_update=8, total_timesteps=8000, value_optimizer=optimizer, **changes
    )
    value = runs[0].agent.value(torch.zeros(1, 4)).item()
    assert value == pytest.approx(1 / (1 - 0.9), rel=0.03), "the sum of ten steps is 6.5 at most"


def test_lbfgs_fits_the_critic_by_itself_and_leaves_the_actor_alone(monkeypatch):
    runs = watch_runs(monkeypatch, trpo)
    gaes = recorder(monkeypatch, trpo, "compute_gae")
    quick(
        "Boundary", value_optimizer="lbfgs", value_epochs=100, total_timesteps=1, max_backtracks=1, max_kl=0.0
    )
    rewards, values, *_, done, _, _ = gaes[0].args
    target = gaes[0].result + values
    losses = float(progress()[-1]["loss/value"])
    assert losses < 0.5 * 0.5 * target[target > 0].square().mean()
    assert not runs[0].parts["critic_optimizer"].state_dict()["state"], "Adam has done nothing"


def test_advantages_bootstrap_from_the_final_observation_of_a_truncated_episode(monkeypatch):
    runs = watch_runs(monkeypatch, trpo)
    gaes, losses = recorder(monkeypatch, trpo, "compute_gae"), recorder(monkeypatch, trpo, "surrogate")
    values = recorder(monkeypatch, trpo.ActorCritic, "value")
    changes = dict(normalize_advantage=False, gamma=0.8, gae_lambda=0.7, value_epochs=0, total_timesteps=1)
    quick("Boundary", num_envs=2, episodes_per_update=6, **changes)
    rewards, value, next_value, terminated, done = (x.double().numpy() for x in gaes[0].args[:5])
    next_obs = values[1].args[1].view(*rewards.shape, 4)
    end = next_obs[..., 3].numpy()
    assert np.array_equal(terminated, end == 1) and np.array_equal(done, end > 0) and (end == 2).any()
    fitted = runs[0].agent.value(next_obs.flatten(0, 1)).view(rewards.shape)
    np.testing.assert_allclose(next_value, fitted.detach(), rtol=1e-5)
    playing = np.cumsum(done, 0) - done < 3
    expected = brute_force_gae(rewards, value, next_value, terminated, done, 0.8, 0.7)[playing]
    np.testing.assert_allclose(losses[0].args[2], expected, rtol=1e-4, atol=1e-3)
    assert playing.sum() == runs[0].env_steps < playing.size


def test_regularized_entropy_is_part_of_what_is_maximized():
    entropy = {}
    for method in ("regularized", "none"):
        changes = dict(entropy_method=method, entropy_coef=2.0, max_kl=0.1, total_timesteps=1500)
        quick("Masked", run_dir=method, **changes)
        entropy[method] = float(progress(method)[-1]["policy/entropy"])
    assert entropy["none"] < 0.5 * entropy["regularized"]


def test_cartpole_is_learned():
    returns = quick(
        "CartPole-v1", total_timesteps=30_000, num_envs=4, episodes_per_update=8, hidden_sizes=(64, 64),
        value_epochs=10, value_minibatches=16, eval_episodes=10, max_episode_steps=0,
    )  # fmt: skip
    assert returns.mean() > 300
