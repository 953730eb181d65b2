"""Policy gradients, alike where they are alike. A script belongs here if it has a loss of log-probabilities
and what they are weighted with."""

import copy
import inspect
import math
from functools import partial
from itertools import pairwise

import conftest
import numpy as np
import probe_envs
import pytest
import torch
from conftest import CPU, checkpoint, equal, has, load_script, progress, scripts_with
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.optim.optimizer import register_optimizer_step_pre_hook


def losses(module) -> dict[str, inspect.Signature]:
    """The losses of the policy, whatever their names and the order of their arguments are."""
    functions = [(name, f) for name, f in vars(module).items() if inspect.isfunction(f)]
    signatures = {name: inspect.signature(f) for name, f in functions}
    known = lambda x: "log_prob" in x.parameters and x.parameters.keys() & {"advantage", "return_"}
    return {name: signature for name, signature in signatures.items() if known(signature)}


FAMILY = [name for name in scripts_with("GaussianHead") if losses(load_script(name))]
FAMILY = [name for name in FAMILY if not has(load_script(name), "meta_batch_size")]
CRITICS = [name for name in scripts_with("compute_gae") if name in FAMILY]
RATIO = [
    name for name in FAMILY
    if any("old_log_prob" in x.parameters for x in losses(load_script(name)).values())
]  # fmt: skip


@pytest.fixture(params=FAMILY)
def family(request):
    return load_script(request.param)


@pytest.fixture(params=CRITICS)
def critics(request):
    """Those that bootstrap from a critic."""
    return load_script(request.param)


@pytest.fixture
def trpo():
    return load_script("trpo")


# One rollout of 64 steps, with a model before and after it; novelty pays nothing
ROLLOUT = dict(total_timesteps=1, eval_every=10**9, extrinsic_coef=1.0, intrinsic_coef=0.0)
short = partial(conftest.short, **ROLLOUT, initial_obs_steps=0)
quick = partial(conftest.quick, **ROLLOUT, initial_obs_steps=0)


def updates(run_dir="run") -> list[dict]:
    """The rows of progress.jsonl that a rollout made."""
    return [row for row in progress(run_dir) if "reward/mean" in row]


def watch_loss(module, monkeypatch) -> list[dict]:
    """What the loss of the policy is called with."""
    calls = []
    for name, signature in losses(module).items():
        function = getattr(module, name)

        def watch(*args, function=function, signature=signature, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            calls.append({n: x.detach().clone() for n, x in given.items() if torch.is_tensor(x)})
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watch)
    return calls


# ------------------------------------------------------------------------------------------------ advantages
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_is_the_sum_over_the_rest_of_the_episode(ppo, gae_lambda):
    torch.manual_seed(0)
    steps, n, gamma = 40, 3, 0.95
    reward, value, next_value = torch.randn(3, steps, n)
    terminated, truncated = (torch.rand(2, steps, n) < 0.1).float()
    done = torch.maximum(terminated, truncated)
    assert terminated.sum() > 3 < (done - terminated).sum()
    got = ppo.compute_gae(reward, value, next_value, terminated, done, gamma, gae_lambda)
    for i in range(n):
        for start in range(steps):
            total = 0.0
            for t in range(start, steps):
                bootstrap = 0.0 if terminated[t, i] else float(next_value[t, i])
                error = float(reward[t, i]) + gamma * bootstrap - float(value[t, i])
                total += (gamma * gae_lambda) ** (t - start) * error
                if done[t, i]:
                    break
            assert float(got[start, i]) == pytest.approx(total, abs=1e-4)


def test_a_time_limit_is_no_termination(critics):
    """Pays 1 per step and never ends; a time limit cuts it every 10 steps: the value is 1 / (1 - gamma)."""
    has_epochs = has(critics, "update_epochs") or has(critics, "value_epochs")
    args = short(critics, "Ones", gamma=0.9, learning_rate=0.01, critic_lr=0.1, num_steps=8)
    critics.train(critics.replace(args, total_timesteps=1600 if has_epochs else 4800))
    assert np.mean([row["value/mean"] for row in updates()[-10:]]) == pytest.approx(10, abs=0.7)


def test_advantages_are_those_of_the_true_successors(critics, monkeypatch):
    """With a known value of [number, episode, t, end] each temporal difference of a rollout is known."""
    value = lambda x: 5 * x[..., 1] + x[..., 2] + 50 * x[..., 3]
    known = lambda v, x: value(x) + 0 * v if torch.is_tensor(v) else [value(x) + 0 * part for part in v]

    class Known(critics.Agent):
        def forward(self, obs, *memory):
            pi, values, *memory = super().forward(obs, *memory)
            return pi, known(values, obs), *memory

        def value(self, obs):
            return known(super().value(obs), obs)

    monkeypatch.setattr(critics, "Agent", Known)
    calls = watch_loss(critics, monkeypatch)
    options = dict(gamma=0.5, gae_lambda=0.0, normalize_advantage=False, update_epochs=1, num_minibatches=1)
    quick(critics, "Boundary", num_steps=32, **options)
    truth = []
    for evaluates, number, episode, t, _, reward in probe_envs.Boundary.steps:
        last = t == probe_envs.boundary_length(number, episode)
        terminated = last and probe_envs.boundary_terminates(number, episode)
        now, then = np.array([[number, episode, t - 1, 0], [number, episode, t, 2.0 * last]])
        if not evaluates:
            truth.append(reward + 0.5 * (1 - terminated) * value(then) - value(now))
    assert len(truth) == 64 and sorted(calls[0]["advantage"].tolist()) == pytest.approx(sorted(truth))


def test_a_reward_is_learned_from_as_the_options_say(critics):
    """gamma = 0: the target of a step is its reward, which is 3 here."""
    for folder, target, options in (
        ("plain", 3.0, {}),
        ("sign", 1.0, dict(clip_reward=True)),
        ("entropy", 3 + 0.5 * math.log(2), dict(entropy_method="max", entropy_coef=0.5)),
        ("loss", 3.0, dict(entropy_method="regularized", entropy_coef=0.5)),
    ):
        quick(critics, "Ones", folder, env_kwargs={"pay": 3.0}, gamma=0.0, **options)
        (row,) = updates(folder)
        assert row["value/target_mean"] == pytest.approx(target, abs=1e-3)
        assert row["reward/mean"] == row["reward/max"] == 3.0  # as the environment gave it


def test_signs_of_rewards_can_be_normalized(critics):
    """A sign comes first: afterwards it would undo the scale."""
    quick(
        critics, "Ones", "both", env_kwargs={"pay": 3.0}, gamma=0.5, clip_reward=True, normalize_reward=True
    )
    quick(critics, "Ones", "ones", env_kwargs={"pay": 1.0}, gamma=0.5, normalize_reward=True)
    quick(critics, "Ones", "signs", env_kwargs={"pay": 3.0}, gamma=0.5, clip_reward=True)
    (both,), (ones,), (signs,) = updates("both"), updates("ones"), updates("signs")
    assert both["value/target_mean"] == ones["value/target_mean"] != signs["value/target_mean"]


@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_only_episodes_that_are_learned_from_are_logged(name, monkeypatch):
    """Environments that have played their share go on until the last one has, with short episodes."""
    script, ended = load_script(name), []
    count = script.Run.count
    counted = lambda run, obs, reward, done, info: (
        ended.append(done.sum()),
        count(run, obs, reward, done, info),
    )
    monkeypatch.setattr(script.Run, "count", counted)
    quick(script, "Boundary", num_envs=4, episodes_per_update=8, total_timesteps=400)
    assert sum(ended) == 8 * len(updates()) > 0


@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_normalized_in_each_minibatch_or_not_at_all(critics, monkeypatch, normalize):
    calls = watch_loss(critics, monkeypatch)
    quick(critics, normalize_advantage=normalize, update_epochs=1, learning_rate=1e-9)
    for call in calls:
        mean, std = call["advantage"].mean(), call["advantage"].std()
        assert (abs(mean) < 1e-5 and abs(std - 1) < 1e-4) == normalize
    if not normalize:  # then their mean is that of return minus value
        row = updates()[0]
        mean = torch.cat([call["advantage"] for call in calls]).mean()
        assert float(mean) == pytest.approx(row["value/target_mean"] - row["value/mean"], abs=1e-4)


# --------------------------------------------------------------------------------------- what a critic is for
def test_explained_variance_is_the_share_of_the_returns_that_the_values_explain(critics, record):
    advantages = record(critics, "compute_gae")
    quick(critics, total_timesteps=128, learning_rate=0.01, critic_lr=0.01)
    # the extrinsic ones; novelty has others, which are computed after them
    of_rollouts = advantages[:: len(advantages) // len(updates())]
    for ((_, value, *_), advantage), row in zip(of_rollouts, updates(), strict=True):
        residual, total = advantage.numpy(), (advantage + value).numpy()
        assert row["value/explained_variance"] == pytest.approx(1 - residual.var() / total.var(), abs=1e-4)
        assert abs(residual.var() / value.numpy().var() - residual.var() / total.var()) > 1e-3


def test_the_sums_that_scale_rewards_stop_at_time_limits_too(critics, record):
    if not has(critics, "normalize_reward"):
        pytest.skip("it does not scale rewards")
    scaled, advantages = record(critics.RewardNorm, "forward"), record(critics, "compute_gae")
    quick(critics, "Boundary", normalize_reward=True)
    (_, _, done), _ = scaled[0]
    terminated = advantages[0][0][3]
    assert torch.equal(done, advantages[0][0][4]) and done.sum() > terminated.sum() > 0


@pytest.mark.parametrize("name", [name for name in CRITICS if has(load_script(name), "shared_trunk")])
def test_a_shared_trunk_learns_from_the_value_error(name, monkeypatch):
    script = load_script(name)
    for loss, signature in losses(script).items():
        place = [*signature.parameters].index("log_prob")
        monkeypatch.setattr(script, loss, lambda *args, place=place: 0 * args[place].sum())
    quick(script, shared_trunk=True)
    before, after = (checkpoint(name=file)["agent"] for file in ("models/0.pt", "checkpoint.pt"))
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"actor", "critic", "value_head"}  # actor and critic are one network


@pytest.mark.parametrize("normalize", [True, False])
def test_positive_advantages_begin_at_0_in_each_minibatch(critics, monkeypatch, normalize):
    calls = watch_loss(critics, monkeypatch)
    quick(critics, positive_advantage=True, normalize_advantage=normalize, learning_rate=1e-9)
    assert calls and all(call["advantage"].min() == 0 for call in calls)
    assert all((abs(call["advantage"].std() - 1) < 1e-4) == normalize for call in calls)


@pytest.mark.parametrize("name", scripts_with("value_loss"))
def test_a_value_beyond_the_clip_gains_nothing_by_going_further(name):
    script = load_script(name)
    old, return_ = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, -1.0])
    value = torch.tensor([0.1, 0.5, -0.5, -0.5], requires_grad=True)
    loss = script.value_loss(value, old, return_, 0.2)
    worse = [0.9**2, 0.8**2, 1.5**2, 0.8**2]
    assert float(loss) == pytest.approx(np.mean(worse) / 2)
    loss.backward()
    assert value.grad.tolist() == pytest.approx([-0.9 / 4, 0, -1.5 / 4, 0])
    assert float(script.value_loss(value, old, return_, math.inf)) == pytest.approx(
        np.mean([0.9**2, 0.5**2, 1.5**2, 0.5**2]) / 2
    )


# ---------------------------------------------------------------------------------------- acting and learning
CHANGES = {
    "layer_norm": lambda agent: agent.actor.register_forward_hook(layer_norm),
    "symlog": lambda agent: agent.obs_norm.register_forward_pre_hook(lambda _, x: symlog(x[0])),
    "tanh_mean": lambda agent: agent.head.register_forward_hook(lambda _, x, pi: tanh_mean(pi)),
    "relu": lambda agent: setattr(agent.actor, "activation", torch.nn.ReLU()),
    "negative": lambda agent: agent.actor.register_forward_pre_hook(lambda _, x: (-x[0], *x[1:])),
}


def layer_norm(_, given, out):
    norm = lambda features: torch.nn.functional.layer_norm(features, (16,))
    return (norm(out[0]), *out[1:]) if isinstance(out, tuple) else norm(out)


def symlog(obs):
    return obs.sign() * obs.abs().log1p()


def tanh_mean(pi):
    mean, log_std = pi.chunk(2, dim=-1)
    return torch.cat([mean.tanh() - 0.5, log_std], dim=-1)


@pytest.mark.parametrize("change", CHANGES)
def test_what_acts_is_what_learns(family, monkeypatch, change):
    """With hardly any noise, the density of the actions is high only where the learner has the same mean."""

    class Changed(family.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.head.mean.weight.data *= 100  # so that a difference shows
            if changed:
                CHANGES[change](self)

    monkeypatch.setattr(family, "Agent", Changed)
    calls, actions, returns = watch_loss(family, monkeypatch), {}, {}
    kwargs, sizes = {"actions": "box", "edge": 9.0}, dict(hidden_sizes=(16,), memory_size=16)
    for changed in (False, True):
        args = short(family, env_kwargs=kwargs, run_dir=f"{changed}", log_std_init=-8.0, **sizes)
        calls.clear()
        family.train(args)
        z_squared = 2 * (8.0 - 0.5 * math.log(2 * math.pi) - calls[0]["log_prob"])
        assert 0.3 < z_squared.mean() < 2.5
        returns[changed] = [row["eval/return_mean"] for row in progress(f"{changed}") if row["step"] == 0]
        agent = Changed(family.Layout((2,)), Box(-1, 1, (1,)), args, CPU)
        agent.load_state_dict(checkpoint(f"{changed}", "models/0.pt")["agent"])
        actions[changed] = agent.act(np.linspace(-1, 1, 8).reshape(4, 2), {})
    assert returns[False] != returns[True]  # evaluations see it
    assert np.abs(actions[False] - actions[True]).max() > 0.002


def test_learns_from_the_action_that_was_drawn_not_the_clipped_one(family, monkeypatch):
    drawn, act = [], family.Agent.act

    def watch(agent, obs, info, greedy=True):
        action = act(agent, obs, info, greedy)
        if not greedy:
            drawn.append(action)
        return action

    monkeypatch.setattr(family.Agent, "act", watch)
    calls = watch_loss(family, monkeypatch)
    one = dict(num_minibatches=1, num_envs=1, episodes_per_update=1)
    quick(family, "Box", log_std_init=1.0, **one)
    action = torch.tensor(np.concatenate(drawn))
    assert (action.abs() > 1).float().mean() > 0.3  # the environment asserts that what arrives is in bounds
    agent = family.load_policy("run/models/0.pt").agent
    zeros = torch.zeros(len(action), 4)  # all that this environment shows, so there is nothing to remember
    recurrent = hasattr(agent, "empty_memory")
    pi = agent(zeros, agent.empty_memory(len(zeros)))[0] if recurrent else agent.policy(zeros)
    mean, log_std = pi.chunk(2, dim=-1)
    truth = Normal(mean, log_std.exp()).log_prob(action).sum(-1)
    assert torch.allclose(calls[0]["log_prob"].sort()[0], truth.sort()[0], atol=1e-4)


@pytest.mark.parametrize("env, kwargs", [("Box", {}), ("Spaces", {"action": "multi_discrete"})])
@pytest.mark.parametrize("name", RATIO)
def test_the_first_ratio_is_one(name, monkeypatch, env, kwargs):
    """Also with ragged choices, and a normalizer that has moved on by the second rollout."""
    script, first = load_script(name), []
    calls, log = watch_loss(script, monkeypatch), script.Run.log
    monkeypatch.setattr(script.Run, "log", lambda run, row: first.append(len(calls)) or log(run, row))
    changes = dict(normalize_obs=True, total_timesteps=192, learning_rate=1e-2)
    quick(script, env, env_kwargs=kwargs, **changes)
    starts = [at for at in [0, *first] if at < len(calls)]
    assert len(starts) >= 3
    for at in starts:
        assert torch.allclose(calls[at]["log_prob"], calls[at]["old_log_prob"], atol=1e-5)


def test_every_parameter_learns(family):
    for shared_trunk in [False, True]:
        if shared_trunk and not hasattr(family.Args, "shared_trunk"):
            continue
        folder = f"shared_{shared_trunk}"
        kwargs = dict(shared_trunk=shared_trunk, hidden_sizes=(16, 16), value_coef=0.5, learning_rate=1e-3)
        quick(family, run_dir=folder, env_kwargs={"actions": "box"}, **kwargs)
        before, after = (checkpoint(folder, name)["agent"] for name in ("models/0.pt", "checkpoint.pt"))
        assert before.keys() == after.keys() and "head.log_std" in before
        assert [name for name in before if torch.equal(before[name], after[name])] == []
        for name in before:  # each output of a head
            if "head" in name:
                assert (
                    (before[name] != after[name]).flatten(1).any(-1).all() if before[name].dim() > 1 else True
                )


def test_actor_and_critic_have_rates_of_their_own(critics):
    def moved(folder, **rates):
        quick(critics, run_dir=folder, num_minibatches=2, **rates)
        before, after = (checkpoint(folder, name)["agent"] for name in ("models/0.pt", "checkpoint.pt"))
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        return {name.split(".")[0] for name in changed}

    assert moved("critic", learning_rate=0.0, critic_lr=0.01, max_kl=1e-12) >= {"critic", "value_head"}
    assert moved("actor", learning_rate=0.01, critic_lr=0.0) == {"actor", "head"}
    if hasattr(critics.Args, "learning_rate"):
        assert moved("critic_only", learning_rate=0.0, critic_lr=0.01) == {"critic", "value_head"}
    if hasattr(critics.Args, "value_coef"):
        assert moved("no_weight", learning_rate=0.01, critic_lr=0.01, value_coef=0.0) == {"actor", "head"}


def test_learning_rates_fall_to_zero(family):
    rates = dict(learning_rate=0.1, critic_lr=0.1, predictor_lr=0.1)
    quick(family, anneal_lr=True, total_timesteps=192, **rates)
    rows = updates()
    begins = [0, *(row["step"] for row in rows[:-1])]
    truth = [0.1 * (1 - begin / 192) for begin in begins]
    assert len(rows) >= 3 and [row["schedule/learning_rate"] for row in rows] == pytest.approx(truth)
    optimizers = [part for part in checkpoint().values() if "param_groups" in part]
    last = [float(group["lr"]) for part in optimizers for group in part["param_groups"]]
    assert last and last == pytest.approx([truth[-1]] * len(last))


def test_first_weights_are_orthogonal_with_the_gains_of_the_file(ppo):
    args = short(ppo, hidden_sizes=(8, 8))
    for action_space in (Box(-1, 1, (3,)), Discrete(3)):
        agent = ppo.Agent(ppo.Layout((4,)), action_space, args, CPU)
        for part, gain in (
            (agent.actor, 2**0.5),
            (agent.critic, 2**0.5),
            (agent.head, 0.01),
            (agent.value_head, 1),
        ):
            for weight in (p for p in part.parameters() if p.dim() == 2):
                values = torch.linalg.svdvals(weight)
                assert torch.allclose(values, torch.full_like(values, gain), rtol=1e-4)
        assert all((p == 0).all() for name, p in agent.named_parameters() if name.endswith("bias"))


# ----------------------------------------------------------------------------------------------------- heads
def test_a_gaussian_is_torchs(ppo):
    head = ppo.GaussianHead(5, Box(-1, 1, (2, 3)), -0.7)
    head.log_std.data += torch.randn(6)
    pi, action = head(torch.randn(7, 5), None), torch.randn(7, 2, 3)
    mean, log_std = pi.chunk(2, dim=-1)
    truth = Independent(Normal(mean, log_std.exp()), 1)
    assert torch.allclose(head.log_prob(pi, action), truth.log_prob(action.flatten(1)), atol=1e-4)
    assert torch.allclose(head.entropy(pi), truth.entropy(), atol=1e-5)
    assert torch.equal(head.choose(pi, greedy=True), mean)
    draws = head.choose(pi[:1].expand(40_000, -1), greedy=False)
    assert torch.allclose(draws.mean(0), mean[0], atol=0.1)
    assert torch.allclose(draws.std(0), log_std[0].exp(), rtol=0.03)


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 5, 3])])
def test_a_choice_is_torchs(ppo, space):
    torch.manual_seed(1)
    sizes = [space.n] if isinstance(space, Discrete) else space.nvec.ravel().tolist()
    head, features = ppo.CategoricalHead(5, space, masked=False), 3 * torch.randn(6, 5)
    head.logits.weight.data *= 100
    pi, logits = head(features, None), head.logits(features).view(6, len(sizes), -1)
    truths = [Categorical(logits=logits[:, k, :size]) for k, size in enumerate(sizes)]
    for k, size in enumerate(sizes):
        assert torch.allclose(pi[:, k, :size].exp(), truths[k].probs, atol=1e-5)
        assert (pi[:, k, size:].exp() == 0).all()  # choices that do not exist
    action = torch.stack([truth.sample() for truth in truths], dim=1)
    log_prob = sum(truth.log_prob(action[:, k]) for k, truth in enumerate(truths))
    assert torch.allclose(head.log_prob(pi, action), log_prob, atol=1e-4)
    assert torch.allclose(head.entropy(pi), sum(truth.entropy() for truth in truths), atol=1e-4)
    assert torch.equal(head.choose(pi, True), torch.stack([t.probs.argmax(-1) for t in truths], dim=1))
    draws = head.choose(pi[:1].expand(40_000, -1, -1), greedy=False)
    for k, truth in enumerate(truths):
        counts = torch.bincount(draws[:, k], minlength=sizes[k]) / 40_000
        assert torch.allclose(counts, truth.probs[0], atol=0.015) and len(counts) == sizes[k]
    (head.entropy(pi).mean() + head.log_prob(pi, action).mean()).backward()
    assert head.logits.weight.grad.isfinite().all()


# ---------------------------------------------------------------------------------------------------- losses
def test_the_gradient_of_a_policy_loss_makes_good_actions_likelier(family):
    """-E[A grad log pi], at the policy that acted: whatever the name and the form of the loss."""
    log_prob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 0.0])
    known = dict(log_prob=log_prob, old_log_prob=log_prob.detach(), advantage=advantage, return_=advantage)
    ((name, signature),) = losses(family).items()
    known |= dict(clip_coef=0.2, episodes=2)  # REINFORCE takes the mean over two episodes, not three steps
    loss = getattr(family, name)(*(known[x] for x in signature.parameters))
    loss = -loss if name == "surrogate" else loss
    loss.backward()
    assert torch.allclose(log_prob.grad, -advantage / (2 if "episodes" in signature.parameters else 3))


def test_ppo_gains_nothing_outside_the_clip(ppo):
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5])
    for sign in (1.0, -1.0):
        log_prob = ratio.log().requires_grad_()
        loss = ppo.clipped_policy_loss(log_prob, torch.zeros(4), torch.full((4,), sign), 0.2)
        worse = [min(r * sign, np.clip(r, 0.8, 1.2) * sign) for r in ratio.tolist()]
        assert float(loss) == pytest.approx(-np.mean(worse), abs=1e-6)
        loss.backward()
        assert (log_prob.grad != 0).tolist() == (
            [True, True, True, False] if sign > 0 else [False, True, True, True]
        )


def test_the_estimate_of_kl_is_exact_in_the_mean(ppo):
    """Four actions drawn as often as the old policy says."""
    old, new = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.3, 0.3, 0.4])
    action = torch.tensor([0, 0, 1, 2])
    kl, clipped = ppo.policy_change(new[action].log(), old[action].log(), 0.25)
    assert float(kl) == pytest.approx(float(kl_divergence(Categorical(old), Categorical(new))), abs=1e-6)
    assert float(clipped) == 0.75  # ratios .6, .6, 1.2, 1.6


# ---------------------------------------------------------------------------------------- epochs and metrics
def test_every_epoch_visits_the_whole_rollout_in_a_new_order(ppo, monkeypatch):
    calls = watch_loss(ppo, monkeypatch)
    args = short(ppo, num_steps=32, update_epochs=3, num_minibatches=4, normalize_advantage=False)
    ppo.train(args)
    epochs = torch.stack([call["advantage"] for call in calls]).view(3, 64)
    assert len(calls) == 12 and len(epochs[0].unique()) == 64
    assert all(torch.equal(epoch.sort()[0], epochs[0].sort()[0]) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


def test_metrics_are_means_over_the_last_epoch(ppo, monkeypatch):
    calls = watch_loss(ppo, monkeypatch)
    quick(ppo, update_epochs=3, num_minibatches=4, learning_rate=0.02, target_kl=math.inf)
    ratio = torch.stack([call["log_prob"] - call["old_log_prob"] for call in calls[-4:]]).exp()
    (row,) = updates()
    kl = (ratio - 1 - ratio.log()).mean()
    assert row["policy/kl"] == pytest.approx(float(kl), rel=1e-3) and kl > 1e-4
    assert row["policy/clip_fraction"] == pytest.approx(float(((ratio - 1).abs() > 0.2).float().mean()))


def test_metrics_do_not_depend_on_the_number_of_minibatches(critics):
    """Nothing moves at a learning rate of 0, so the parts of an epoch have the mean of the whole."""
    rows = {}
    for n in (1, 4):
        still = dict(learning_rate=0.0, critic_lr=0.0, max_kl=1e-12, normalize_advantage=False)
        changes = dict(run_dir=f"{n}", num_envs=4, num_minibatches=n, env_kwargs={"actions": "box"})
        quick(critics, **changes, **still)
        (rows[n],) = updates(f"{n}")
    for name in (
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "value/explained_variance",
        "policy/clip_fraction",
    ):
        if name in rows[1]:
            assert rows[1][name] == pytest.approx(rows[4][name], abs=1e-5)
    assert 0 < rows[1]["grad/critic_norm"] < math.inf and 0 < rows[1]["grad/actor_norm"] < math.inf


def test_the_value_error_is_half_the_mean_square(critics):
    still = dict(learning_rate=0.0, critic_lr=0.0, max_kl=1e-12, gamma=0.0, gae_lambda=0.0)
    quick(critics, "Ones", env_kwargs={"pay": 3.0}, **still)
    (row,) = updates()  # all observations are equal, so is the value
    assert row["loss/value"] == pytest.approx(0.5 * (3 - row["value/mean"]) ** 2, rel=1e-4)


@pytest.mark.parametrize("target_kl", [math.inf, 1e-10, 1e-3])
def test_the_epochs_end_at_the_first_minibatch_beyond_target_kl(ppo, monkeypatch, target_kl):
    calls = watch_loss(ppo, monkeypatch)
    quick(ppo, update_epochs=3, num_minibatches=4, learning_rate=0.02, target_kl=target_kl)
    ratios = [(call["log_prob"] - call["old_log_prob"]).exp() for call in calls]
    kl = [float((ratio - 1 - ratio.log()).mean()) for ratio in ratios]
    if target_kl == math.inf:
        assert len(kl) == 12 and kl[-1] > 1e-3
    else:
        assert len(kl) < 12 and all(x <= target_kl for x in kl[:-1]) and kl[-1] > target_kl


def test_a_minibatch_of_one_gives_no_nan(ppo):
    quick(ppo, num_envs=1, num_steps=4, num_minibatches=4, total_timesteps=8)
    assert all(math.isfinite(x) for row in updates() for x in row.values())


def test_the_entropy_bonus_widens_the_policy(critics):
    final = {}
    for coef, method in (
        (1.0, "regularized"),
        (-1.0, "regularized"),
        (1.0, "softplus"),
        (1.0, "none"),
        (0.0, "regularized"),
    ):
        options = dict(entropy_coef=coef, entropy_method=method, learning_rate=0.01, max_kl=0.05)
        folder = f"{coef}-{method}"
        quick(critics, run_dir=folder, env_kwargs={"actions": "box"}, total_timesteps=512, **options)
        final[coef, method] = checkpoint(folder)["agent"]
    width = {key: float(agent["head.log_std"]) for key, agent in final.items()}
    assert width[1.0, "regularized"] > width[0.0, "regularized"] + 0.005
    assert width[1.0, "softplus"] > width[0.0, "regularized"] + 0.001
    assert not equal(final[1.0, "softplus"], final[1.0, "regularized"])
    assert width[-1.0, "regularized"] < width[0.0, "regularized"] - 0.005
    assert equal(final[1.0, "none"], final[0.0, "regularized"])


# --------------------------------------------------------------------------------------------------- TRPO
def test_conjugate_gradient_solves_a_known_system(trpo):
    torch.manual_seed(0)
    root = torch.randn(8, 8, dtype=torch.float64)
    matrix, x = root @ root.T + torch.eye(8), torch.randn(8, dtype=torch.float64)
    found = trpo.conjugate_gradient(lambda v: matrix @ v, matrix @ x, 20, 1e-20)
    assert torch.allclose(found, x, atol=1e-6)
    count = []
    trpo.conjugate_gradient(lambda v: count.append(1) or matrix @ v, matrix @ x, 3, 0.0)
    assert len(count) == 3
    rough = trpo.conjugate_gradient(lambda v: matrix @ v, matrix @ x, 20, 1.0)
    assert 1e-9 < float((matrix @ rough - matrix @ x).square().sum()) <= 1.0


def test_the_hessian_product_is_that_of_the_whole_hessian(trpo):
    torch.manual_seed(0)
    w, b, v = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(8)
    value = lambda w, b: ((w.sin() @ b) ** 2).sum() + (w * b).exp().sum()
    product = trpo.hessian_product(value(w, b), [w, b], 0.1)
    blocks = torch.autograd.functional.hessian(
        lambda flat: value(flat[:6].view(3, 2), flat[6:]), torch.cat([w.flatten(), b])
    )
    assert torch.allclose(product(v), blocks @ v + 0.1 * v, atol=1e-3)


@pytest.mark.parametrize("kind", ["gaussian", "choices"])
def test_the_kl_of_trpo_is_torchs(trpo, kind):
    torch.manual_seed(0)
    if kind == "gaussian":
        head, (old, new) = trpo.GaussianHead(1, Box(-1, 1, (3,)), 0.0), torch.randn(2, 5, 6)
        one, two = (Normal(pi[:, :3], pi[:, 3:].exp()) for pi in (old, new))
        truth = kl_divergence(one, two).sum(-1).mean()
    else:
        head = trpo.CategoricalHead(1, MultiDiscrete([4, 4]), False)
        old, new = torch.randn(2, 5, 2, 4).log_softmax(-1)
        truth = kl_divergence(Categorical(logits=old), Categorical(logits=new)).sum(-1).mean()
    assert torch.allclose(head.kl(old, new).mean(), truth, atol=1e-5)


def test_a_step_is_shrunk_until_it_is_good_or_not_taken(trpo):
    x = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
    y = torch.nn.Parameter(torch.tensor([[0.1]]))
    start = [x.detach().clone(), y.detach().clone()]
    measure = lambda: (x.sum() + y.sum(), (x.detach() - start[0]).norm())  # the KL is the distance
    step = torch.tensor([1.0, 0.0, 0.5])
    share, objective, kl = trpo.line_search([x, y], step, measure, measure()[0].detach(), 0.3, 0.5, 10)
    assert share == 0.25 and float(kl) == 0.25 and float(objective) == pytest.approx(1.1 + 0.375)
    assert x.tolist() == [0.25, 1.0] and float(y) == pytest.approx(0.225)
    for limit, sign, times in ((0.3, -1.0, 10), (1e-9, 1.0, 5)):  # worse, or always too far
        before = x.detach().clone(), y.detach().clone()
        start[0] = before[0]
        result = trpo.line_search([x, y], sign * step, measure, measure()[0].detach(), limit, 0.5, times)
        assert result[0] == 0 and torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_a_whole_step_of_trpo_spends_what_the_kl_may_be(trpo):
    """Where the KL is all but quadratic, 1/2 x H x = max_kl holds before any search."""
    few = dict(
        total_timesteps=320, num_steps=32, cg_iterations=50, cg_tolerance=0.0, hvp_damping=0.0, max_kl=1e-4
    )
    quick(trpo, env_kwargs={"actions": "box"}, hidden_sizes=(), **few)
    rows = [row for row in progress() if row.get("policy/step_share") == 1]
    assert rows and [row["policy/kl"] for row in rows] == pytest.approx([1e-4] * len(rows), rel=0.1)


def test_each_step_of_trpo_keeps_to_its_limit_and_improves(trpo):
    quick(trpo, env_kwargs={"actions": "box"}, total_timesteps=640, max_kl=0.02, hvp_damping=1e-3)
    rows = updates()
    taken = [row for row in rows if row["policy/accepted"]]
    assert len(taken) >= 8
    assert np.median([row["policy/kl"] for row in taken]) > 0.01  # steps go as far as they may
    for row in taken:
        assert 0 < row["policy/kl"] <= 0.02 and row["policy/improvement"] > 0
        assert row["policy/expected_improvement"] > 0 and 0 < row["policy/step_share"] <= 1
    assert all(
        row["policy/kl"] == 0 == row["policy/improvement"] for row in rows if not row["policy/accepted"]
    )


# ------------------------------------------------------------------------------------------ REINFORCE and VPG
def test_reinforce_learns_from_whole_episodes_and_counts_every_step(monkeypatch):
    reinforce = load_script("reinforce")
    calls = watch_loss(reinforce, monkeypatch)
    steps = []
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    args = short(reinforce, "Boundary", num_envs=3, episodes_per_update=6, total_timesteps=150, gamma=1.0)
    try:
        reinforce.train(args)
    finally:
        hook.remove()
    played = [step for step in probe_envs.Boundary.steps if not step[0]]
    assert checkpoint()["run"]["env_steps"] == len(played) >= 150
    rows = updates()
    assert len(rows) == len(calls) == len(steps) >= 2  # one update for each batch of episodes
    starts = [0] + [row["step"] for row in rows]
    for call, first, last in zip(calls, starts, starts[1:], strict=False):
        batch, number_of = played[first:last], {}
        for _, number, episode, *_ in batch:
            number_of.setdefault(number, []).append(episode)
        truth = []
        for number, episodes in number_of.items():
            for episode in sorted(set(episodes))[:2]:  # two of each environment; the others only wait
                length = probe_envs.boundary_length(number, episode)
                rewards = [probe_envs.boundary_reward(episode, t) for t in range(1, length + 1)]
                truth += [sum(rewards[t:]) for t in range(length)]
        assert sorted(call["return_"].tolist()) == sorted(truth)


def test_discounted_returns_stop_at_the_end_of_an_episode():
    reinforce = load_script("reinforce")
    reward = torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None]
    done = torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None]
    assert reinforce.compute_returns(reward, done, 0.5)[:, 0].tolist() == [2, 2, 8, 8]


def test_the_baselines_of_vpg(monkeypatch):
    vpg = load_script("vpg")
    calls = watch_loss(vpg, monkeypatch)
    for baseline in ("none", "mean", "value"):
        args = short(vpg, run_dir=baseline, baseline=baseline, normalize_advantage=False, gamma=0.0)
        vpg.train(args)  # gamma = 0: the return of a step is its reward
        (row,) = updates(baseline)
        known = {"none": 0.0, "mean": row["reward/mean"], "value": row["value/mean"]}
        advantage = float(calls[-1]["advantage"].mean())
        assert advantage == pytest.approx(row["reward/mean"] - known[baseline], abs=1e-4)
        assert abs(row["value/mean"]) > 1e-3


# ------------------------------------------------------------------------------------------------------ GRPO
@pytest.fixture
def grpo():
    return load_script("grpo")


def test_returns_are_compared_within_their_group_alone(grpo):
    return_ = torch.tensor([3.0, 1.0, 2.0, -500.0, -90.0, -70.0, 7.0, 7.0, 7.0], dtype=torch.float64)
    groups = return_.numpy().reshape(3, 3)
    centered = [[x - np.mean(group) for x in group] for group in groups]
    standardized = [[x / (np.std(group) or 1) for x in group - np.mean(group)] for group in groups]
    for dr, truth in ((True, centered), (False, standardized)):
        got = grpo.group_advantage(return_, 3, dr)
        assert got.tolist() == pytest.approx(np.ravel(truth).tolist(), abs=1e-6)
    assert grpo.group_advantage(torch.full((7,), 0.1).double(), 7, False).abs().max() < 1e-6  # all the same


def test_the_estimate_of_the_kl_to_the_reference_is_exact_in_the_mean(grpo):
    """Over all actions, as likely as the policy says; its gradient is that of KL(reference || pi)."""
    torch.manual_seed(0)
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(0)
    log_prob = logits.log_softmax(0)
    estimate = grpo.kl_estimate(log_prob, reference)
    pi, other = (Categorical(logits=x) for x in (logits, reference))
    assert (estimate >= 0).all()
    assert torch.allclose((log_prob.exp() * estimate).sum(), kl_divergence(pi, other))
    drawn = log_prob.exp().detach()  # actions are drawn first; no gradient goes through that
    (got,) = torch.autograd.grad((drawn * estimate).sum(), logits)
    (truth,) = torch.autograd.grad(kl_divergence(other, Categorical(logits=logits)), logits)
    assert torch.allclose(got, truth, atol=1e-6)


def test_the_episodes_of_a_group_start_alike_and_no_others(grpo, record):
    rollouts = record(grpo, "stack_steps")
    sizes = dict(num_envs=2, episodes_per_update=12, group_size=4, total_timesteps=500)
    quick(grpo, "CartPole-v1", **sizes)
    for (steps,), _ in rollouts:
        starts = {}
        for step in steps:
            for i in range(2):
                if step["age"][i] == 0 and step["episode"][i] < 12:
                    starts[int(step["episode"][i])] = step["obs"][i]
        assert sorted(starts) == list(range(12))
        assert all(np.array_equal(starts[n], starts[n - n % 4]) for n in starts)
        assert len({starts[n].tobytes() for n in (0, 4, 8)}) == 3
    first = [steps[0]["obs"].tobytes() for (steps,), _ in rollouts]
    assert len(rollouts) >= 2 and len(set(first)) == len(first)  # each rollout has starts of its own


@pytest.mark.parametrize("dr", [False, True])
def test_grpo_weights_steps_as_the_objective_says(grpo, monkeypatch, dr):
    """Each step counts as A_i / (N T_i), with dr as (R_i - mean) / N, and idle steps not at all."""
    calls = watch_loss(grpo, monkeypatch)
    sizes = dict(num_envs=3, episodes_per_update=6, group_size=3, update_epochs=2)
    quick(grpo, "Boundary", dr=dr, total_timesteps=150, **sizes)
    played = [step for step in probe_envs.Boundary.steps if not step[0]]
    rows = updates()
    assert checkpoint()["run"]["env_steps"] == len(played) == rows[-1]["step"] >= 150
    assert len(calls) == 2 * len(rows) >= 4
    ends = [0] + [row["step"] for row in rows]
    for k, (first, last) in enumerate(pairwise(ends)):
        seen, truth = {}, []
        for _, number, episode, *_ in played[first:last]:
            if episode not in seen.setdefault(number, []):
                seen[number].append(episode)
        for j in range(2):  # a group of three: the j-th episode of each environment
            episodes = [(probe_envs.boundary_length(number, e[j]), e[j]) for number, e in seen.items()]
            returns = [sum(probe_envs.boundary_reward(e, t) for t in range(1, n + 1)) for n, e in episodes]
            for (length, _), return_ in zip(episodes, returns, strict=True):
                centered = return_ - np.mean(returns)
                truth += [(centered if dr else centered / np.std(returns) / length) / 6] * length
        for call in calls[2 * k : 2 * k + 2]:  # every epoch has the whole rollout
            got = call["advantage"] / len(call["advantage"])  # the loss is a mean over steps
            assert sorted(got.tolist()) == pytest.approx(sorted(truth), abs=1e-5)


def test_one_step_of_dr_grpo_is_reinforce_with_the_group_as_baseline(grpo, monkeypatch):
    """sum of log-probability times centered return, mean over the episodes."""
    gradients = []
    clip = grpo.clip_gradients
    copied = lambda x: [p.grad.clone() for group in x.param_groups for p in group["params"]]
    monkeypatch.setattr(grpo, "clip_gradients", lambda x, norm: gradients.append(copied(x)) or clip(x, norm))
    sizes = dict(num_envs=2, episodes_per_update=4, group_size=4, update_epochs=1, total_timesteps=1)
    rolled = []
    stack = grpo.stack_steps
    monkeypatch.setattr(grpo, "stack_steps", lambda steps: rolled.append(steps) or stack(steps))
    args = short(grpo, dr=True, kl_coef=0.0, **sizes)
    grpo.train(args)
    agent = grpo.load_policy("run/models/0.pt").agent
    log_probs, returns = {}, {}
    for step in rolled[0]:
        pi = agent.policy(torch.as_tensor(step["obs"]))
        log_prob = agent.head.log_prob(pi, torch.as_tensor(step["action"]))
        for i, n in enumerate(step["episode"].tolist()):
            log_probs[n] = log_probs.get(n, 0) + log_prob[i]
            returns[n] = returns.get(n, 0) + float(step["reward"][i])
    mean = np.mean([returns[n] for n in range(4)])
    loss = -sum((returns[n] - mean) * log_probs[n] for n in range(4)) / 4
    truth = torch.autograd.grad(loss, [*agent.actor.parameters(), *agent.head.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients[0], truth, strict=True))


def test_an_episode_is_cut_after_max_steps(grpo):
    quick(
        grpo,
        env_kwargs={"length": 10**6, "edge": math.inf},
        max_steps=5,
        eval_max_steps=5,
        episodes_per_update=4,
    )
    (row,) = updates()
    assert row["train/episode_length"] == 5 and row["step"] == 20


def test_the_reference_is_the_policy_of_the_last_multiple_of_reference_every(grpo, monkeypatch):
    """Until then it is the first policy, or that of a file."""
    quick(grpo, run_dir="first", total_timesteps=200, reference_every=0)
    first = checkpoint("first")
    assert equal(first["reference"], checkpoint("first", "models/0.pt")["agent"])
    assert not equal(first["reference"], first["agent"])
    steps, expected, log = [0], [first["agent"]], grpo.Run.log

    def watch(run, row):
        if "policy/kl" in row:
            agent, reference = (
                copy.deepcopy(run.parts[name].state_dict()) for name in ("agent", "reference")
            )
            if run.env_steps // 100 > steps[-1] // 100:
                expected.append(agent)
            steps.append(run.env_steps)
            assert equal(reference, expected[-1])
        log(run, row)

    monkeypatch.setattr(grpo.Run, "log", watch)
    quick(grpo, run_dir="second", init_from="first/checkpoint.pt", reference_every=100, total_timesteps=400)
    assert len(steps) > len(expected) + 2 >= 6


def test_a_large_kl_coefficient_keeps_the_policy_near_the_reference(grpo):
    far = {}
    for kl_coef in (0.0, 10.0):
        options = dict(kl_coef=kl_coef, reference_every=0, total_timesteps=1500, learning_rate=0.02)
        quick(grpo, run_dir=f"{kl_coef}", episodes_per_update=8, env_kwargs={"actions": "box"}, **options)
        far[kl_coef] = updates(f"{kl_coef}")[-1]["policy/reference_kl"]
    assert far[10.0] < far[0.0] / 3
