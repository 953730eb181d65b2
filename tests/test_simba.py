"""SimBa: its blocks and their weights, AdamW, normalized observations, REDQ and DroQ. SAC has the losses."""

import copy
from functools import partial

import conftest
import numpy as np
import pytest
import torch
from conftest import CPU, checkpoint, equal, load_script
from gymnasium.spaces import Box
from torch.nn import functional as F

simba = load_script("simba")
FOUR, TWO = simba.Layout((4,)), Box(-1, 1, (2,))
RHYTHM = dict(total_timesteps=96, learning_starts=32, updates_per_step=1.0)
short, quick = (partial(f, simba, **RHYTHM) for f in (conftest.short, conftest.quick))


def jolted(network):
    """The network with weights that are all different, those of its normalizations, too."""
    for p in network.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    return network


# -------------------------------------------------------------------------------------------------- networks
@pytest.mark.parametrize("n, blocks", [(2, 2), (1, 1), (3, 3)])
def test_each_network_is_what_a_loop_over_its_own_layers_computes(n, blocks):
    torch.manual_seed(0)
    network, x = jolted(simba.ResidualNetwork(n, 5, 6, blocks, 2)), torch.randn(n, 7, 5)
    result = network(x)
    assert result.shape == (n, 7, 2) and len(network.blocks) == blocks
    for i in range(n):
        linear = lambda layer, h, i=i: h @ layer.weight[i] + layer.bias[i]

        def norm(layer, h, i=i):
            h = h - h.mean(dim=1, keepdim=True)
            h = h / (h.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
            return layer.weight[i] * h + layer.bias[i]

        h = linear(network.embedding, x[i])
        for normalize, up, _, down in network.blocks:
            wide = linear(up, norm(normalize, h))
            assert wide.shape == (7, 24)
            h = h + linear(down, wide.relu())
        torch.testing.assert_close(result[i], linear(network.head, norm(network.norm, h)))


def test_weights_start_orthogonal_or_as_he_drew_them_in_each_network_apart():
    torch.manual_seed(0)
    network = simba.ResidualNetwork(2, 10, 64, 1, 3, gain=0.5)
    embedding, head = network.embedding.weight.detach(), network.head.weight.detach()
    _, up, _, down = network.blocks[0]
    for i in range(2):
        torch.testing.assert_close(embedding[i] @ embedding[i].T, torch.eye(10), atol=1e-5, rtol=0)
        torch.testing.assert_close(head[i].T @ head[i], 0.25 * torch.eye(3), atol=1e-5, rtol=0)
        for layer, fan_in in ((up, 64), (down, 256)):
            assert layer.weight[i].std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.03)
    for layer in (network.embedding, up, down, network.head):
        assert layer.bias.abs().max() == 0 and (layer.weight[0] != layer.weight[1]).any()
    assert sum(p.numel() for p in network.parameters()) == 2 * (
        11 * 64 + 2 * 64 + 65 * 256 + 257 * 64 + 2 * 64 + 65 * 3
    )


def test_critics_and_actor_have_the_sizes_that_were_asked_for():
    args = short(actor_width=6, actor_blocks=3, critic_width=10, critic_blocks=4, num_critics=5)
    agent = simba.Agent(FOUR, TWO, args, CPU)
    assert agent.critic.network.embedding.weight.shape == (5, 6, 10) and len(agent.critic.network.blocks) == 4
    assert agent.actor.network.embedding.weight.shape == (1, 4, 6) and len(agent.actor.network.blocks) == 3
    obs, action = torch.randn(7, 4), torch.rand(7, 2)
    assert agent.critic(obs, action).shape == (5, 7) and agent.actor(obs)[0].shape == (7, 2)
    assert equal(agent.critic.state_dict(), agent.target_critic.state_dict())


def test_temperature_and_its_target_start_as_in_the_paper(record):
    losses = record(simba, "alpha_loss")
    quick("Box")  # two dimensions
    assert simba.Args().alpha == 0.01 and losses[0][0][0].exp().item() == pytest.approx(0.01)
    assert {given[2] for given, _ in losses} == {-1.0}


# ----------------------------------------------------------------------------------------------------- AdamW
def test_weights_decay_apart_from_the_step_along_the_gradient(seen):
    """With gradients of 0 (a critic that nothing judges) a step of AdamW is the decay alone."""
    quick(actor_weight_decay=0.5, critic_weight_decay=0.25, actor_lr=0.1, critic_lr=0.2)
    for part, share in (("actor", 0.1 * 0.5), ("critic", 0.2 * 0.25)):
        optimizer, network = seen[f"{part}_optimizer"], getattr(seen["agent"], part)
        for state in optimizer.state.values():  # forget the past
            state["exp_avg"].zero_()
        before = [p.detach().clone() for p in network.parameters()]
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for old, new in zip(before, network.parameters(), strict=True):
            torch.testing.assert_close(new.detach(), (1 - share) * old)


def test_a_step_of_the_optimizer_equals_numbers_worked_out_by_hand(seen):
    """w = 2, gradient 3, rate 0.1, decay 0.5: decay to 1.9, then Adam's first step, which is the rate."""
    quick(actor_weight_decay=0.5, actor_lr=0.1)
    optimizer = seen["actor_optimizer"]
    optimizer.state.clear()
    for p in optimizer.param_groups[0]["params"]:
        p.data.fill_(2.0)
        p.grad = torch.full_like(p, 3.0)
    optimizer.step()
    for p in optimizer.param_groups[0]["params"]:
        torch.testing.assert_close(p.data, torch.full_like(p, 1.8))  # L2 would give 1.9


def test_the_decay_is_apart_also_in_a_resumed_run_and_the_temperature_has_none():
    groups = lambda: [checkpoint()[f"{x}_optimizer"]["param_groups"][0] for x in ("actor", "critic", "alpha")]
    quick(total_timesteps=36)
    for resumed in (False, True):
        assert [group["weight_decay"] for group in groups()] == [0.01, 0.01, 0.0]
        assert [group["decoupled_weight_decay"] for group in groups()[:2]] == [True, True]
        if not resumed:
            simba.train(simba.parse_args("--resume run --total-timesteps 40".split()))


# ------------------------------------------------------------------------------------------------- statistics
def test_statistics_are_saved_and_used_but_not_changed_by_who_only_plays(seen, record):
    """What acts or learns is given normalized observations: tests/test_off_policy.py."""
    quick("Boundary")
    norm, saved = seen["agent"].obs_norm, checkpoint()["agent"]
    assert norm.count == 96 and equal(norm.mean, saved["obs_norm.mean"])
    policy, best = simba.load_policy("run"), simba.load_policy("run/best.pt")
    assert equal(policy.agent.obs_norm.state_dict(), norm.state_dict())
    seen_by_actor = record(simba.Actor, "forward")
    obs = np.array([3.0, 1.0, 2.0, 0.0], dtype=np.float32)
    policy(obs)
    expected = (obs - norm.mean.numpy()) / (norm.var.numpy() + 1e-8) ** 0.5
    np.testing.assert_allclose(seen_by_actor[-1][0][1][0].numpy(), expected.clip(-10, 10), rtol=1e-5)
    before = copy.deepcopy(norm.state_dict())
    simba.train(simba.parse_args("--evaluate run --eval-episodes 3".split()))
    best(obs), policy(obs)
    for agent in (seen["agent"], policy.agent):
        assert equal(agent.obs_norm.state_dict(), before)


def test_online_and_target_critics_judge_the_same_normalized_next_states(seen, record, drawn):
    batches, judged = drawn(simba), record(simba.Critic, "forward")
    quick("Boundary")
    agent, batch = seen["agent"], batches[-1]
    calls = judged[-3:]  # the target, the online critics, and those that judge the actor
    assert [call[0][0] is agent.target_critic for call in calls] == [True, False, False]
    for call, name in zip(calls, ("next_obs", "obs", "obs"), strict=True):
        by_hand = (batch[name] - agent.obs_norm.mean) / (agent.obs_norm.var + 1e-8).sqrt()
        torch.testing.assert_close(call[0][1], by_hand.clamp(-10, 10).float())


def test_numbers_are_normalized_and_images_are_not():
    shapes = dict(numbers=(3,), image=(2, 5, 5))
    layout = simba.Layout((53,), images=[shapes["image"]])
    agent = simba.Agent(layout, TWO, short(), CPU)
    obs = torch.cat([5 + 2 * torch.randn(1000, 3), torch.rand(1000, 50)], dim=1)
    agent.obs_norm.update(obs)
    normed = agent.obs_norm(obs)
    assert equal(normed[:, 3:], obs[:, 3:]) and agent.obs_norm.mean.shape == (3,)
    torch.testing.assert_close(normed[:, :3].mean(dim=0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(normed[:, :3].std(dim=0), torch.ones(3), atol=1e-2, rtol=0)


def test_an_image_alone_goes_to_the_cnn_as_bytes(seen, record):
    given = record(simba.NatureCNN, "forward")
    quick("Spaces", env_kwargs=dict(obs="small", action="box"), total_timesteps=40)
    assert {x.dtype for (_, x), _ in given[-8:]} == {torch.uint8}
    assert not [name for name in checkpoint()["agent"] if name.startswith("obs_norm")]


# ------------------------------------------------------------------------------------- options: REDQ and DroQ
def test_targets_take_the_minimum_over_a_random_pair_and_the_actor_the_mean_over_all(seen, record):
    critics, values = record(simba.Critic, "forward"), record(simba, "soft_value")
    quick(num_critics=5)
    pairs, at = set(), {id(call): i for i, call in enumerate(record.all)}
    for (target, _, actor), used, of_actor in zip(
        zip(*[iter(critics)] * 3, strict=True), values[::2], values[1::2], strict=True
    ):
        assert at[id(target)] < at[id(used)] < at[id(actor)] < at[id(of_actor)]
        rows = [i for i in range(5) if any(equal(target[1][i], row) for row in used[0][0])]
        assert len(rows) == 2 and used[0][0].shape == (2, 16)
        pairs.add(tuple(rows))
        torch.testing.assert_close(of_actor[0][0], actor[1].mean(dim=0, keepdim=True).detach())
    assert len(pairs) == 10  # all of them


@pytest.mark.parametrize("n", [1, 2])
def test_up_to_two_critics_are_those_of_sac_and_draw_no_pair(n, seen, record):
    critics, values = record(simba.Critic, "forward"), record(simba, "soft_value")
    quick(num_critics=n)
    assert equal(values[-2][0][0], critics[-3][1]) and equal(values[-1][0][0], critics[-1][1].detach())
    assert len(values[-2][0][0]) == n


def test_dropout_is_inside_the_blocks_of_the_critics_and_only_in_training():
    torch.manual_seed(0)
    agent, x = simba.Agent(FOUR, TWO, short(critic_dropout=0.3, critic_width=64), CPU), torch.randn(500, 4)
    action = torch.rand(500, 2)
    for critic in (agent.critic, agent.target_critic):
        assert not equal(critic(x, action), critic(x, action))
    assert equal(agent.actor(x), agent.actor(x))
    normalize, up, dropout, down = agent.critic.network.blocks[0]
    given = []
    down.register_forward_pre_hook(lambda layer, inputs: given.append(inputs[0]))
    wide = up(normalize(torch.randn(2, 500, 64)))
    simba.residual_block(torch.randn(2, 500, 64), lambda _: _, lambda _: wide, dropout, down)
    kept = given[0][wide > 0] != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)
    torch.testing.assert_close(given[0][wide > 0][kept], wide[wide > 0][kept] / 0.7)
    agent.eval()
    assert equal(agent.critic(x, action), agent.critic(x, action))


def test_a_network_without_blocks_to_add_is_linear_but_for_its_normalization():
    """What the paper calls the bias: with W2 = 0 the output is W LayerNorm(W s)."""
    network, x = simba.ResidualNetwork(1, 3, 8, 2, 1), torch.randn(1, 9, 3)
    for block in network.blocks:
        torch.nn.init.zeros_(block[3].weight)
    expected = F.layer_norm(x[0] @ network.embedding.weight[0], (8,)) @ network.head.weight[0]
    torch.testing.assert_close(network(x)[0], expected)
