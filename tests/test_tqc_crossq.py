"""The ideas of tqc.py and crossq.py, children of sac.py; test_off_policy.py has what they share with it."""

import numpy as np
import pytest
import torch
from conftest import checkpoint, equal
from test_off_policy import FOUR, TWO, crossq, quick, short, tqc

BOUNDARY = dict(learning_rate=0.01, reward_scale=0.1, gamma=0.5, auto_alpha=False, alpha=0.3, batch_size=64)


def buffers(module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in module.named_buffers()}


# ------------------------------------------------------------------------------------------------------- tqc
def test_quantile_huber_loss_equals_a_plain_loop():
    torch.manual_seed(1)
    quantiles, td_target = 2 * torch.randn(2, 5, 7), 2 * torch.randn(4, 7)
    total, far = 0.0, 0
    for (_, m, b), z in np.ndenumerate(quantiles.numpy()):
        for y in td_target[:, b].tolist():
            u, level = y - z, (2 * m + 1) / 10
            huber = u * u / 2 if abs(u) <= 1 else abs(u) - 0.5
            total, far = total + abs(level - (u < 0)) * huber / (5 * 4 * 7), far + (abs(u) > 1)
    assert 50 < far < 230  # both branches
    assert tqc.quantile_huber_loss(quantiles, td_target).item() == pytest.approx(total)


@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_the_largest_of_the_pool_are_dropped_whichever_critic_they_are_of(dropped):
    torch.manual_seed(1)
    quantiles = torch.randn(3, 4, 12) + torch.tensor([0.0, 9.0, -9.0])[:, None, None]
    kept = tqc.truncate(quantiles, dropped)
    for b in range(12):
        pool = sorted(quantiles[:, :, b].flatten().tolist())
        assert kept[:, b].tolist() == pool[: 3 * (4 - dropped)]
    if dropped == 1:  # three of the critic that promises most, none of the others
        assert (kept > 4.5).sum(dim=0).eq(1).all() and len(kept) == 9


def test_each_critic_gives_its_own_quantiles():
    args = short(tqc, hidden_sizes=(8,), num_critics=3, num_quantiles=5)
    critic, obs, action = tqc.Critic(FOUR, TWO, args), torch.randn(10, 4), torch.rand(10, 2)
    quantiles = critic(obs, action)
    assert quantiles.shape == (3, 5, 10)
    first, last = critic.layers
    x = torch.cat([obs, action], dim=-1)
    for n in range(3):
        alone = (x @ first.weight[n] + first.bias[n]).relu() @ last.weight[n] + last.bias[n]
        torch.testing.assert_close(quantiles[n], alone.T)


def test_each_kept_quantile_of_the_target_critics_becomes_a_target(seen, record, drawn):
    losses, batches = record(tqc, "quantile_huber_loss"), drawn(tqc)
    critics, policies = record(tqc.Critic, "forward"), record(tqc.Agent, "policy")
    quick(tqc, "Boundary", **BOUNDARY, dropped_quantiles=1)
    batch, (judge, states, _), pool = batches[-1], *critics[-3]  # two calls of the online critics follow
    assert judge is seen["agent"].target_critic and torch.equal(states, batch["next_obs"])
    _, log_prob = policies[-2][1]
    assert pool.shape == (2, 5, 64) and log_prob.shape == (64,)
    kept = pool.flatten(0, 1).sort(dim=0).values[:8]
    expected = 0.1 * batch["reward"] + batch["discount"] * (kept - 0.3 * log_prob)
    torch.testing.assert_close(losses[-1][0][1], expected)
    assert 0 in batch["discount"] and 0.5 in batch["discount"]


def test_the_actor_climbs_the_mean_of_all_quantiles(seen, record):
    critics, policies = record(tqc.Critic, "forward"), record(tqc.Agent, "policy")
    steps = record(tqc, "gradient_step")
    quick(tqc, **BOUNDARY)
    loss = [given[0] for given, _ in steps if given[1] is seen["actor_optimizer"]][-1]
    log_prob = policies[-1][1][1]
    torch.testing.assert_close(loss, (0.3 * log_prob).mean().detach() - critics[-1][1].mean().detach())


@pytest.mark.parametrize("dropped", [-1, 5])
def test_some_quantiles_must_be_left(dropped):
    with pytest.raises(tqc.UsageError, match="--dropped-quantiles"):
        tqc.train(short(tqc, num_quantiles=5, dropped_quantiles=dropped))


# ---------------------------------------------------------------------------------------------------- crossq
def test_batch_renormalization_equals_its_definition():
    """Two batches of the warm-up, where it is batch normalization, then r and d, also at their limits."""
    torch.manual_seed(1)
    norm, limits = crossq.BatchRenorm(2, 1, 3, warmup=2), set()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(2, 1, 3)), norm.bias.copy_(torch.randn(2, 1, 3))
    running_mean, running_std = torch.zeros(2, 1, 3).double(), torch.ones(2, 1, 3).double()
    for i, (scale, shift) in enumerate([(2, 1), (0.5, -3), (1.1, 0.1), (9, 0), (0.1, 0), (1, 9), (1, -9)]):
        x = (scale * torch.randn(2, 8, 3) + shift).requires_grad_()
        x64, direction = x.detach().double().requires_grad_(), torch.randn(2, 8, 3)
        mean, std = x64.mean(1, keepdim=True), (x64.var(1, correction=0, keepdim=True) + 1e-3).sqrt()
        r, d = torch.ones(2, 1, 3), torch.zeros(2, 1, 3)
        if i >= 2:  # held constant
            r = (std / running_std).detach().clamp(1 / 3, 3)
            d = ((mean - running_mean) / running_std).detach().clamp(-5, 5)
        limits |= {round(z, 3) for z in [*r.flatten().tolist(), *d.flatten().tolist()]}
        expected = norm.weight.detach() * ((x64 - mean) / std * r + d) + norm.bias.detach()
        running_mean = 0.99 * running_mean + 0.01 * mean.detach()
        running_std = 0.99 * running_std + 0.01 * std.detach()
        y, close = norm(x, train=True), dict(rtol=1e-4, atol=1e-4)
        gradients = [torch.autograd.grad((z * direction).sum(), at)[0] for z, at in ((y, x), (expected, x64))]
        for found, true in [(y, expected), gradients, (norm.mean, running_mean), (norm.std, running_std)]:
            torch.testing.assert_close(found, true.float(), **close)
    assert limits >= {0.333, 3.0, -5.0, 5.0, 1.0, 0.0}
    before, x = buffers(norm), torch.randn(2, 4, 3)
    expected = norm.weight * (x - running_mean) / running_std + norm.bias
    torch.testing.assert_close(norm(x, train=False), expected.float(), **close)
    assert equal(buffers(norm), before)


def test_one_pass_of_present_and_next_gives_values_and_targets(seen, record, drawn, monkeypatch):
    modes, held, loss = [], [], crossq.critic_loss
    for part in (crossq.Actor, crossq.Critic):

        def watched(self, *given, forward=part.forward, **kwargs):
            modes.append((type(self).__name__, kwargs.get("train", given[-1] is True)))
            return forward(self, *given, **kwargs)

        monkeypatch.setattr(part, "forward", watched)
    monkeypatch.setattr(crossq, "critic_loss", lambda q, y: held.append(not y.requires_grad) or loss(q, y))
    critics, losses = record(crossq.Critic, "forward"), record(crossq, "critic_loss")
    batches, policies = drawn(crossq), record(crossq.Agent, "policy")
    quick(crossq, "Boundary", **BOUNDARY, policy_delay=1)
    critics_and_actors = [("Actor", False), ("Critic", True), ("Actor", True), ("Critic", False)]
    assert critics_and_actors in [modes[i : i + 4] for i in range(len(modes))]  # the two updates
    assert all(held)
    batch, ((_, obs, action, _), joint) = batches[-1], critics[-2]
    next_action, log_prob = policies[-2][1]
    assert torch.equal(obs, torch.cat([batch["obs"], batch["next_obs"]]))
    assert torch.equal(action, torch.cat([batch["action"], next_action]))
    (q_values, td_target), _ = losses[-1]
    assert torch.equal(q_values, joint[:, :64])
    value = joint[:, 64:].amin(dim=0) - 0.3 * log_prob
    torch.testing.assert_close(td_target, (0.1 * batch["reward"] + batch["discount"] * value).detach())
    assert 0 in batch["discount"] and 0.5 in batch["discount"]


def test_each_half_of_the_joint_batch_changes_the_statistics_and_the_other_half():
    torch.manual_seed(1)
    critic = crossq.Critic(FOUR, TWO, short(crossq))
    obs, action = torch.randn(16, 4), torch.rand(16, 2)
    values = critic(obs, action, train=True)
    for changed in (slice(0, 8), slice(8, 16)):
        other, before = obs.clone(), buffers(critic)
        other[changed] += 1
        new = critic(other, action, train=True)
        assert all(not torch.equal(x, before[name]) for name, x in buffers(critic).items())
        untouched = slice(8, 16) if changed.start == 0 else slice(0, 8)
        assert (new - values)[:, untouched].abs().min() > 1e-6


def test_statistics_move_in_the_update_of_their_network_alone_and_are_saved(seen):
    quick(crossq, policy_delay=4, total_timesteps=96, eval_every=10, checkpoint_every=30)
    saved, updates = checkpoint()["agent"], range(30, 96)  # the first follows the step that reaches 32
    count = {name: int(x) for name, x in saved.items() if name.endswith("batches")}
    critics, actors = len(updates), sum(number % 4 == 0 for number in updates)
    assert (
        count == {name: critics if name.startswith("critic.") else actors for name in count}
        and len(count) == 4
    )
    assert not any("target" in name for name in saved)
    agent = seen["agent"].train()  # as an evaluation leaves it
    before, obs = buffers(agent), np.random.default_rng(0).normal(size=(3, 2))
    action = agent.act(obs, {})
    assert equal(buffers(agent), before) and equal(before, {name: saved[name] for name in before})
    one_by_one = [agent.train().act(obs[i : i + 1], {})[0] for i in range(3)]
    np.testing.assert_allclose(action, one_by_one, atol=1e-6)  # others of the batch do not count
    assert np.array_equal(crossq.load_policy("run")(obs, {}), action)


def test_adam_forgets_faster_in_actor_and_critics_also_in_a_resumed_run():
    betas = lambda: [
        checkpoint()[f"{x}_optimizer"]["param_groups"][0]["betas"] for x in ("actor", "critic", "alpha")
    ]
    quick(crossq, total_timesteps=36)
    assert betas() == [(0.5, 0.999), (0.5, 0.999), (0.9, 0.999)]
    crossq.train(crossq.parse_args("--resume run --total-timesteps 40".split()))
    assert betas() == [(0.5, 0.999), (0.5, 0.999), (0.9, 0.999)]
