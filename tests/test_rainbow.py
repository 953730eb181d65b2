"""Rainbow: the projection of a distribution, its loss, its network and what acts. DQN has its memory."""

import math
from functools import partial

import conftest
import numpy as np
import odd_envs
import pytest
import torch
from conftest import CPU, call_main, flags, load_script, progress
from gymnasium.spaces import Discrete
from torch import nn

rainbow = load_script("rainbow")
# 48 steps of two environments, with an update after every fifth
RHYTHM = dict(total_timesteps=96, learning_starts=20, train_every=5, target_update_every=10)
short, quick = (partial(f, rainbow, **RHYTHM) for f in (conftest.short, conftest.quick))


def new_agent(actions=3, **changes):
    rainbow.set_seed(0)
    return rainbow.Agent(rainbow.Layout((4,)), Discrete(actions), short(**changes), CPU)


@pytest.fixture
def quiet(monkeypatch):
    """Weights without noise, so that a second forward gives the same."""
    monkeypatch.setattr(rainbow.NoisyLinear, "forward", nn.Linear.forward)


# -------------------------------------------------------------------------------------------- learning rule
def projected_by_hand(reward, discount, probs, atoms):
    """The algorithm, atom by atom."""
    result, gap = np.zeros_like(probs), (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    for row in range(len(probs)):
        for atom, prob in zip(atoms, probs[row], strict=True):
            place = (np.clip(reward[row] + discount[row] * atom, atoms[0], atoms[-1]) - atoms[0]) / gap
            below = min(int(place), len(atoms) - 2)
            result[row, below] += prob * (below + 1 - place)
            result[row, below + 1] += prob * (place - below)
    return result


@pytest.mark.parametrize("v_min, v_max, num_atoms", [(-10.0, 10.0, 51), (0.0, 4.0, 5), (-1.0, 3.0, 2)])
def test_a_projection_is_the_one_of_the_loop_and_keeps_mass_and_mean(v_min, v_max, num_atoms):
    torch.manual_seed(0)
    atoms = torch.linspace(v_min, v_max, num_atoms)
    reward = torch.cat([3 * torch.randn(500), torch.tensor([0.0, 1.0, 2.0, -1.0, 99.0, -99.0])])
    discount = torch.cat([torch.rand(500).round(decimals=1), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])])
    probs = torch.rand(506, num_atoms).softmax(1)
    result = rainbow.project(reward, discount, probs, atoms)
    numbers = (x.double().numpy() for x in (reward, discount, probs, atoms))
    assert np.allclose(result, projected_by_hand(*numbers), atol=2e-5)
    assert (result >= 0).all() and torch.allclose(result.sum(1), torch.ones(506), atol=1e-5)
    clipped = (reward[:, None] + discount[:, None] * atoms).clamp(v_min, v_max)
    torch.testing.assert_close(result @ atoms, (clipped * probs).sum(1), rtol=0, atol=2e-4)


def test_atoms_that_fall_on_atoms_go_there_whole_and_a_terminal_state_is_worth_the_reward():
    atoms, probs = torch.linspace(-2, 2, 5), torch.tensor([[0.1, 0.2, 0.3, 0.25, 0.15]])
    one = lambda reward, discount: rainbow.project(
        torch.tensor([reward]), torch.tensor([discount]), probs, atoms
    )
    torch.testing.assert_close(one(0.0, 1.0), probs)
    torch.testing.assert_close(
        one(1.0, 1.0), torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4]])
    )  # the end takes the rest
    torch.testing.assert_close(one(1.0, 0.0), torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]]))
    torch.testing.assert_close(one(0.25, 0.0), torch.tensor([[0.0, 0.0, 0.75, 0.25, 0.0]]))
    torch.testing.assert_close(one(7.0, 0.0), torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]))


def test_the_loss_is_the_divergence_and_its_gradient_the_difference_of_the_distributions():
    logits, target = torch.randn(6, 9, requires_grad=True), torch.rand(6, 9).softmax(1)
    target[0] = torch.eye(9)[3]  # probabilities of 0
    loss = rainbow.kl_loss(logits.log_softmax(1), target)
    known = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(x) for x in (target, logits.softmax(1)))
    )
    torch.testing.assert_close(loss, known)
    loss.sum().backward()
    torch.testing.assert_close(logits.grad, logits.softmax(1).detach() - target)


def test_the_loss_of_quantiles_is_that_of_a_loop_over_all_pairs():
    quantiles, target = torch.randn(4, 3), 2 * torch.randn(4, 5)
    target[0, 0] = quantiles[0, 0]
    for got, z, y in zip(rainbow.quantile_loss(quantiles, target), quantiles, target, strict=True):
        total = 0.0
        for level, quantile in zip((1 / 6, 1 / 2, 5 / 6), z.tolist(), strict=True):
            for sample in y.tolist():
                u = sample - quantile
                huber = u**2 / 2 if abs(u) <= 1 else abs(u) - 1 / 2
                total += abs(level - (u < 0)) * huber
        assert got.item() == pytest.approx(total / 15, rel=1e-5)


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_training_fits_quantiles_to_those_of_the_next_state(n_step, seen, record, quiet, monkeypatch):
    """Shifted by the rewards and discounted; the online network chooses, the loss becomes the priority."""
    batches, priorities = (
        record(rainbow.FrameBuffer, "transitions"),
        record(rainbow.FrameBuffer, "set_priority"),
    )
    real, found, disagree = rainbow.quantile_loss, [], []

    def watched(quantiles, target):
        batch, agent, older = batches[-1][1], seen["agent"], seen["target_agent"]
        rows = torch.arange(len(quantiles))
        with torch.no_grad():
            by_target, by_agent, now = older(batch["next_obs"]), agent(batch["next_obs"]), agent(batch["obs"])
        best = by_agent.mean(2).argmax(1)
        disagree.append((best != by_target.mean(2).argmax(1)).any())
        torch.testing.assert_close(quantiles.detach(), now[rows, batch["action"]])
        for i in range(len(rows)):
            expected = batch["reward"][i] + batch["discount"][i] * by_target[i, best[i]]
            torch.testing.assert_close(target[i], expected)
        found.append((real(quantiles, target).detach(), quantiles.detach(), target))
        return real(quantiles, target)

    monkeypatch.setattr(rainbow, "quantile_loss", watched)
    slow = dict(learning_rate=0.05, tau=0.5, target_update_every=40, num_atoms=7, quantiles=True)
    quick(train_every=4, total_timesteps=160, n_step=n_step, **slow)
    assert len(priorities) == len(found) == 36 and sum(disagree) > 2
    for (priority, _), (loss, *_) in zip(priorities, found, strict=True):
        torch.testing.assert_close(priority[2], loss)
    (_, quantiles, target), row = found[-1], progress()[-2]  # an evaluation follows
    assert row["q/mean"] == pytest.approx(quantiles.mean().item(), rel=1e-4)
    assert row["q/target_mean"] == pytest.approx(target.mean().item(), rel=1e-4)
    assert "loss/quantile" in row and "loss/kl" not in row and "q/at_ends" not in row


def test_quantiles_have_no_range(seen):
    """10 / 3 with atoms up to 2."""
    often = dict(train_every=1, target_update_every=5, total_timesteps=400)
    quick("Ones", gamma=0.7, learning_rate=0.03, v_max=2.0, quantiles=True, **often)
    q_values = seen["agent"].eval().q_values(torch.zeros(1, 4))
    assert q_values.max().item() == pytest.approx(10 / 3, abs=0.2)


def test_the_noise_begins_as_large_as_asked():
    for noise_std in (0.5, 0.1):
        state = new_agent(noise_std=noise_std, hidden_sizes=(16,)).state_dict()
        assert (state["value.output.weight_sigma"] == noise_std / 4).all()
        assert (state["advantage.hidden.bias_sigma"] == noise_std / 2).all()


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_training_minimizes_the_divergence_from_the_projected_target(
    n_step, seen, record, quiet, monkeypatch
):
    """At each update; the online network chooses, the divergence becomes the priority."""
    batches, samples = record(rainbow.FrameBuffer, "transitions"), record(rainbow.FrameBuffer, "sample")
    priorities, clips = record(rainbow.FrameBuffer, "set_priority"), record(rainbow, "clip_gradients")
    real, found, disagree = rainbow.kl_loss, [], []

    def watched(log_probs, target):
        batch, agent, older = batches[-1][1], seen["agent"], seen["target_agent"]
        rows, atoms = torch.arange(len(log_probs)), torch.linspace(-10, 10, 51)
        with torch.no_grad():
            by_target, by_agent, now = older(batch["next_obs"]), agent(batch["next_obs"]), agent(batch["obs"])
        best = (by_agent.exp() * atoms).sum(2).argmax(1)
        disagree.append((best != (by_target.exp() * atoms).sum(2).argmax(1)).any())
        probs = by_target[rows, best].exp()
        numbers = [x.double().numpy() for x in (batch["reward"], batch["discount"], probs, atoms)]
        assert np.allclose(target, projected_by_hand(*numbers), atol=1e-5)
        torch.testing.assert_close(log_probs.detach(), now[rows, batch["action"]])
        found.append((real(log_probs, target).detach(), log_probs.detach().exp() @ atoms, target))
        return real(log_probs, target)

    monkeypatch.setattr(rainbow, "kl_loss", watched)
    slow = dict(gamma=0.9, tau=0.5, target_update_every=40, per_beta_start=0.2, max_grad_norm=0.3)
    quick(learning_rate=0.05, train_every=4, total_timesteps=160, updates_per_train=2, n_step=n_step, **slow)
    assert len(priorities) == len(found) == 72 and sum(disagree) > 5
    for sample, (priority, _), (kl, *_) in zip(samples, priorities, found, strict=True):
        (_, _, beta), (rows, _) = sample
        torch.testing.assert_close(priority[2], kl)
        assert priority[1] is rows and beta == pytest.approx(0.2 + 0.8 * (sample.step - 2) / 160)
    (kl, q_value, target), row = found[-1], progress()[-2]  # an evaluation follows
    weight = torch.from_numpy(samples[-1][1][1])
    mean, ends = (target @ torch.linspace(-10, 10, 51)).mean(), target[:, [0, -1]].sum(1).mean()
    values = (weight * kl).mean(), q_value.mean(), q_value.max(), mean, ends
    names = "loss/kl", "q/mean", "q/max", "q/target_mean", "q/at_ends"
    assert [row[name] for name in names] == pytest.approx([x.item() for x in values], rel=1e-4, abs=1e-6)
    assert clips[-1][0][1] == 0.3 and len({x.item() for x in weight}) > 1


def test_values_are_of_the_endless_sum_where_episodes_are_only_truncated(seen):
    """1 per step for ever is worth 1 / (1 - 0.7) = 10 / 3; ten steps would be 2.6 in the mean."""
    often = dict(train_every=1, target_update_every=5, total_timesteps=400)
    quick("Ones", gamma=0.7, learning_rate=0.03, v_min=0.0, **often)
    q_values = seen["agent"].eval().q_values(torch.zeros(1, 4))
    assert q_values.max().item() == pytest.approx(10 / 3, abs=0.2)


def test_a_return_beyond_the_atoms_is_the_last_one_and_the_log_says_so(seen):
    """10 / 3 with atoms up to 2."""
    often = dict(train_every=1, target_update_every=5, total_timesteps=400)
    quick("Ones", gamma=0.7, learning_rate=0.03, v_min=0.0, v_max=2.0, **often)
    q_values = seen["agent"].eval().q_values(torch.zeros(1, 4))
    assert q_values.max().item() == pytest.approx(2, abs=0.1) and progress()[-2]["q/at_ends"] > 0.8


def test_the_next_action_is_a_legal_one(seen, record, quiet):
    """Against a table of which actions are legal; what is illegal is worth the most."""
    chosen, batches = record(rainbow.Agent, "q_values"), record(rainbow.FrameBuffer, "transitions")
    quick("Loop", learning_rate=0.01, gamma=0.9)
    masks = torch.tensor(odd_envs.Loop.masks, dtype=torch.bool)
    assert len(chosen) > 50
    for (_, obs), q_values in chosen:
        assert torch.equal(q_values.isfinite(), masks[obs[:, 1].long()])  # one-hot states
    for _, batch in batches:
        assert masks[batch["obs"][:, 1].long()].gather(1, batch["action"][:, None]).all()
    assert all(math.isfinite(x) for row in progress() for x in row.values())


# ------------------------------------------------------------------------------------------------- networks
def test_the_distribution_is_a_softmax_over_atoms_of_value_and_centered_advantage():
    agent, obs = new_agent(actions=4, num_atoms=7).eval(), torch.randn(5, 4)
    features = agent.trunk(obs)
    value, advantage = agent.value(features), agent.advantage(features).view(5, 4, 7)
    logits = torch.stack([value + advantage[:, a] - advantage.sum(1) / 4 for a in range(4)], dim=1)
    torch.testing.assert_close(agent(obs).exp(), logits.softmax(2))
    means = (agent(obs).exp() * torch.linspace(-10, 10, 7)).sum(2)
    torch.testing.assert_close(agent.q_values(obs), means)
    assert agent.act(obs.numpy(), {}).tolist() == means.argmax(1).tolist()


@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_all_steps_are_random_at_first_then_a_share_of_epsilon_and_none_in_evaluations(epsilon, record, seen):
    """All observations are equal, so actions of the same step differ by chance only."""
    actions, n = record(rainbow.Agent, "act"), 600
    sizes = dict(num_envs=n, total_timesteps=8 * n, learning_starts=3 * n, train_every=n, buffer_size=20 * n)
    quick("Ones", epsilon=epsilon, eval_every=4 * n, eval_episodes=n, **sizes)
    evaluations = [chosen for (*_, last), chosen in actions if last is not False]
    assert len(evaluations) > 1 and all(len(set(chosen)) == 1 for chosen in evaluations)
    for call in actions:
        if call[0][-1] is False:
            share = epsilon if call.step >= 3 * n else 1.0
            count, num_actions = np.bincount(call[1]), seen["agent"].num_actions
            assert count.max() / n == pytest.approx(share / num_actions + 1 - share, abs=0.08)


def test_noise_explores_and_is_absent_in_evaluations(record, seen):
    forwards, means = record(rainbow.NoisyLinear, "forward"), record(rainbow.Agent, "q_values")
    quick(eval_every=48, learning_starts=40)
    noisy = {}
    for call in forwards:
        layer, x = call[0]
        with torch.inference_mode():
            same = torch.allclose(call[1], nn.functional.linear(x, layer.weight, layer.bias), atol=1e-7)
        noisy.setdefault(len(x), []).append(not same)
    assert all(noisy[16]), "updates"  # batches of 16
    by_step = [len(given[1]) for given, _ in means]
    assert by_step.count(2) >= 28 and any(noisy[2]) and not all(noisy[2])  # both acts and evaluations have 2


def test_the_noise_stays_until_an_update_draws_it_anew_for_both_networks(record, seen):
    """All observations are equal, and nothing is learned; updates are of batches of 16."""
    outputs, draws = record(rainbow.Agent, "forward"), record(rainbow, "redraw_noise")
    quick("Ones", num_envs=9, train_every=18, total_timesteps=540, learning_rate=0.0, eval_every=0)
    bytes_of = lambda size: [
        (x.step, x[1][0].detach().numpy().tobytes()) for x in outputs if len(x[0][1]) == size
    ]
    acting = bytes_of(9)
    spans = [sum(call.step <= step for call in draws) for step, _ in acting]
    pairs = {*zip(spans, (x for _, x in acting), strict=True)}
    assert len({x for _, x in acting}) == len({*spans}) == len(pairs) > 10 and len(acting) > len(pairs)
    updates = [x for _, x in bytes_of(16)]  # for the choice, by the target network, for the loss
    assert all(a == c != b for a, b, c in zip(updates[::3], updates[1::3], updates[2::3], strict=True))
    assert len({*updates}) == 2 * len(updates) // 3 > 50


@pytest.mark.parametrize("env", ["Walk", "Loop"])  # a mask may forbid what was held
def test_actions_are_held_for_random_hold_steps_before_learning_starts(env, record, seen):
    acts = record(rainbow.Agent, "act")
    quick(env, learning_starts=80, random_hold=4, checkpoint_every=22)  # two environments: a segment at 44
    begins = range(0, 80, 8) if env == "Walk" else range(0, 80, 2)
    steps = [call.step for call in acts if call[0][-1] is False]  # not those of evaluations
    assert steps == sorted({*begins, 44, *range(80, 96, 2)})


def test_actions_before_learning_are_uniform_and_legal_ones_of_a_policy_are_the_best():
    agent, obs = new_agent(actions=4), np.full((4000, 4), 0.5, dtype=np.float32)
    agent.epsilon = 1.0
    share = np.bincount(agent.act(obs, {}, greedy=False), minlength=4) / 4000
    assert share == pytest.approx([0.25] * 4, abs=0.03)
    assert len(set(agent.act(obs, {}))) == 1


@pytest.mark.parametrize(
    "ends", [dict(v_min=1.0, v_max=1.0), dict(v_min=2.0, v_max=1.0), dict(v_max=math.inf)]
)
def test_atoms_need_a_range(ends, capsys):
    assert call_main(rainbow, *flags(short(**ends))) == 2
    err = capsys.readouterr().err.strip()
    assert "--v-min" in err and "--v-max" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("quantiles", [False, True])
def test_the_range_of_atoms_is_said_before_anything_is_learned(quantiles, capsys):
    quick(v_min=-3.0, v_max=70.0, quantiles=quantiles, total_timesteps=32)
    first = capsys.readouterr().out.partition("run folder")[0]
    assert ("--v-min -3" in first and "--v-max 70" in first) != quantiles


# ------------------------------------------------------------------------------------------ one part left out
@pytest.fixture
def rainbow_without(tmp_path):
    """rainbow_without(part) is the script that benchmark/without.py runs."""
    without = load_script("without", conftest.ROOT / "benchmark/without.py")

    def load(part):
        (path := tmp_path / part / "rainbow.py").parent.mkdir()
        path.write_text(without.script_without(part))
        return load_script("rainbow", path)

    return load


def test_without_a_distribution_one_number_is_fitted_by_half_the_huber_loss(rainbow_without):
    module = rainbow_without("distribution")
    module.check_ranges(module.Args(num_atoms=1))
    q_value, target = 3 * torch.randn(20), 3 * torch.randn(20)
    huber = nn.functional.huber_loss(q_value, target, reduction="none")
    torch.testing.assert_close(module.quantile_loss(q_value[:, None], target[:, None]), huber / 2)


def test_without_dueling_or_noise_the_advantages_are_all_and_weights_are_still(rainbow_without):
    obs, space = torch.randn(5, 4), rainbow.Layout((4,))
    module = rainbow_without("dueling")
    agent = module.Agent(space, Discrete(3), short(quantiles=True), CPU)
    torch.testing.assert_close(agent(obs), agent.advantage(agent.trunk(obs)).view(5, 3, -1))
    module = rainbow_without("noise")
    agent, before = module.Agent(space, Discrete(3), short(), CPU), []
    for _ in range(2):
        module.redraw_noise(agent)
        before.append(agent.train()(obs))
    assert torch.equal(*before)


def test_without_double_the_target_network_chooses(rainbow_without, record):
    module = rainbow_without("double")
    chosen, acts = record(module.Agent, "q_values"), record(module.Agent, "act")
    conftest.quick(module, **RHYTHM)
    assert len({id(given[0]) for given, _ in chosen}) == 2  # the agent acts, its target chooses
    assert sum(given[0] is not acts[0][0][0] for given, _ in chosen) > 10


def test_weights_of_another_run_leave_the_range_of_values_as_asked_for(record):
    quick(run_dir="narrow", quantiles=False, v_max=1.0)
    agents = record(rainbow.Agent, "mean")
    quick(run_dir="wide", quantiles=False, v_max=99.0, init_from="narrow")
    rainbow.load_policy("wide")(np.zeros(2, np.float32))
    assert {float(given[0].atoms[-1]) for given, _ in agents} == {99.0} and len(agents) > 10
