"""VPG's own tests: baselines, advantages, entropy. Whole episodes are tested in test_reinforce.py."""

import itertools

import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, load_script, progress
from test_ppo import brute_force_gae
from test_reinforce import (
    columns,
    exact_gradient,
    gradient,
    moments,
    recorder,
    train_quick,
    trajectories,
    watch_runs,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

vpg = load_script(ALGOS / "vpg.py")
MAX = dict(entropy_method="max", normalize_advantage=False, stop_entropy_gradient=True)


def quick(env: str, **changes) -> np.ndarray:
    return train_quick(vpg, env, **changes)


# ------------------------------------------------------------------------------- estimators of the gradient
def advantage(x, baseline_value: bool, gae_lambda=1.0):
    """Advantages (B,) of an episode, with the true value of the states or with 0 in its place."""
    values = [v * baseline_value for v in (x.values, x.next_values)]
    return vpg.compute_gae(x.rewards, *values, x.end, x.end, 1.0, gae_lambda).flatten()


def estimates(baseline_value, gae_lambda=1.0):
    for p, steps in trajectories():
        x = columns(steps)
        weight = advantage(x, baseline_value, gae_lambda)
        yield p, gradient(vpg.policy_gradient_loss, x.states, x.actions, weight)


def estimates_with_mean_baseline():
    """Over all pairs of episodes: each has the mean return of the other for a baseline."""
    for (p, first), (q, second) in itertools.product(trajectories(), repeat=2):
        x, y = columns(first), columns(second)
        returns = torch.cat([advantage(x, False), advantage(y, False)])
        episode = torch.tensor([0] * len(first) + [1] * len(second))
        weight = returns - vpg.mean_of_others(returns, episode)
        states, actions = x.states + y.states, x.actions + y.actions
        yield p * q, gradient(vpg.policy_gradient_loss, states, actions, weight, episodes=2)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.7, 0.0])
def test_with_true_values_the_expected_estimate_is_the_exact_gradient_for_every_lambda(gae_lambda):
    torch.testing.assert_close(moments(list(estimates(True, gae_lambda)))[0], exact_gradient())


def test_without_baseline_the_expected_estimate_is_the_exact_gradient():
    torch.testing.assert_close(moments(list(estimates(False)))[0], exact_gradient())


def test_with_the_mean_baseline_the_expected_estimate_is_the_exact_gradient():
    torch.testing.assert_close(moments(list(estimates_with_mean_baseline()))[0], exact_gradient())


def test_variance_falls_from_returns_to_baseline_to_gae():
    """Exact variances, in units of that of REINFORCE; two episodes halve that of the mean baseline."""
    variance = {"reinforce": moments(list(estimates(False)))[1]}
    variance["mean"] = 2 * moments(list(estimates_with_mean_baseline()))[1]
    variance["value"] = moments(list(estimates(True)))[1]
    variance["gae 0.5"] = moments(list(estimates(True, 0.5)))[1]
    variance["gae 0"] = moments(list(estimates(True, 0.0)))[1]
    print({name: round(x / variance["reinforce"], 3) for name, x in variance.items()})
    falls = list(variance.values())
    assert falls[1] < falls[0] and falls[2] < 0.5 * falls[0]
    assert falls[2] > falls[3] > falls[4]


def test_mean_of_others_equals_a_loop():
    rng = np.random.default_rng(0)
    returns, episode = rng.normal(size=30), rng.permutation(np.repeat([0, 1, 2, 4], [5, 9, 1, 15]))
    expected = [returns[episode != number].mean() for number in episode]
    result = vpg.mean_of_others(torch.tensor(returns).float(), torch.tensor(episode))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------- in the training
@pytest.mark.parametrize("baseline", ["none", "mean", "value"])
def test_advantages_of_every_baseline_in_whole_rollouts(baseline, monkeypatch):
    """Truncation bootstraps from the final observation with baseline value, termination never does."""
    runs = watch_runs(monkeypatch, vpg)
    gaes, losses = (
        recorder(monkeypatch, vpg, "compute_gae"),
        recorder(monkeypatch, vpg, "policy_gradient_loss"),
    )
    values = recorder(monkeypatch, vpg.ActorCritic, "value")
    gae_lambda = 0.7 if baseline == "value" else 1.0
    changes = dict(baseline=baseline, gae_lambda=gae_lambda, gamma=0.8, normalize_advantage=False)
    quick("Boundary", num_envs=2, episodes_per_update=6, total_timesteps=1, value_epochs=0, **changes)
    *arrays, gamma, lambda_ = gaes[0].args
    assert (gamma, lambda_) == (0.8, gae_lambda)
    rewards, value, next_value, terminated, done = (x.double().numpy() for x in arrays)
    expected = brute_force_gae(rewards, value, next_value, terminated, done, 0.8, gae_lambda)
    ended = np.cumsum(done, 0) - done
    playing = ended < 3
    assert playing.sum() == runs[0].env_steps < playing.size, "an environment had to wait"
    if baseline == "value":
        obs, next_obs = (call.args[1].view(*rewards.shape, 4) for call in values[:2])
        agent = runs[0].agent
        torch.testing.assert_close(arrays[1], agent.value(obs.flatten(0, 1)).view_as(arrays[1]))
        torch.testing.assert_close(arrays[2], agent.value(next_obs.flatten(0, 1)).view_as(arrays[2]))
        end = next_obs[..., 3].numpy()
        assert np.array_equal(terminated, end == 1) and np.array_equal(done, end > 0)
        assert (end == 2).any(), "next_obs is the true final observation"
    else:
        assert not value.any() and not next_value.any()
    result = expected[playing]
    if baseline == "mean":
        number = (2 * ended + np.arange(2))[playing]
        result = result - np.array([result[number != n].mean() for n in number])
    np.testing.assert_allclose(losses[0].args[1], result, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("normalize, positive", [(True, False), (False, False), (False, True), (True, True)])
def test_advantages_are_normalized_by_their_standard_deviation_and_made_positive(
    normalize, positive, monkeypatch
):
    losses = recorder(monkeypatch, vpg, "policy_gradient_loss")
    flags = dict(normalize_advantage=normalize, positive_adv=positive, total_timesteps=1, baseline="none")
    quick("Boundary", **flags)
    quick("Boundary", run_dir="raw", **flags | dict(normalize_advantage=False, positive_adv=False))
    used, raw = losses[0].args[1], losses[1].args[1]
    expected = (raw - raw.mean()) / raw.std() if normalize else raw
    expected = expected - expected.min() if positive else expected
    torch.testing.assert_close(used, expected, rtol=1e-4, atol=1e-5)
    assert raw.std() > 5


def test_critic_learns_the_endless_sum_where_episodes_are_only_truncated(monkeypatch):
    runs = watch_runs(monkeypatch, vpg)
    changes = dict(gamma=0.9, gae_lambda=0.9, critic_lr=0.02, value_epochs=10, value_minibatches=2)
    quick("Ones", num_envs=4, episodes_per_update=8, total_timesteps=8000, **changes)
    value = runs[0].agent.value(torch.zeros(1, 4)).item()
    assert value == pytest.approx(1 / (1 - 0.9), rel=0.03), "the sum of ten steps is 6.5 at most"


@pytest.fixture
def rates():
    """The learning rate of each step of an optimizer from now on."""
    rates = []
    look = lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    hook = register_optimizer_step_pre_hook(look)
    yield rates
    hook.remove()


def test_every_pass_of_the_critic_sees_every_step_once_and_its_learning_rate_is_its_own(monkeypatch, rates):
    values = recorder(monkeypatch, vpg.ActorCritic, "value")
    quick("Ones", value_epochs=3, value_minibatches=4, total_timesteps=1, learning_rate=0.5, critic_lr=0.1)
    assert rates == [0.5] + 12 * [0.1]
    sizes = [len(call.args[1]) for call in values[2:]]
    assert sizes == [10] * 12 and len(values[0].args[1]) == 40


def test_no_critic_learns_without_the_baseline_value(rates):
    quick("Ones", baseline="mean", total_timesteps=100)
    assert len(rates) == len(progress()) == 3 and "loss/value" not in progress()[-1]


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("env", ["Masked", "Box"])
def test_max_entropy_adds_the_entropy_of_each_step_to_its_reward(env, softplus, monkeypatch):
    gaes, forwards = (
        recorder(monkeypatch, vpg, "compute_gae"),
        recorder(monkeypatch, vpg.ActorCritic, "forward"),
    )
    runs = watch_runs(monkeypatch, vpg)
    for run_dir, coef in {"plain": 0.0, "run": 0.3}.items():
        changes = dict(entropy_coef=coef, softplus_entropy=softplus, learning_rate=0.0, total_timesteps=1)
        quick(env, run_dir=run_dir, **MAX | changes)
    bonus = gaes[1].args[0] - gaes[0].args[0]
    entropy = runs[0].agent.head.entropy(forwards[0].result[1]).detach()
    expected = torch.nn.functional.softplus(entropy) if softplus else entropy
    torch.testing.assert_close(bonus.flatten().sort().values, 0.3 * expected.sort().values, atol=1e-4, rtol=0)
    reward = [float(progress(name)[-1]["reward/mean"]) for name in ("plain", "run")]
    assert reward[0] == pytest.approx(reward[1]), "what is logged is what the environment paid"


def test_regularized_entropy_keeps_the_policy_random_and_none_does_not():
    entropy = {}
    for method, coef in [("regularized", 1.0), ("none", 1.0), ("regularized", 0.0)]:
        name = f"{method}{coef}"
        changes = dict(entropy_method=method, entropy_coef=coef, learning_rate=0.03, total_timesteps=1000)
        quick("Masked", run_dir=name, baseline="mean", **changes)
        entropy[name] = float(progress(name)[-1]["policy/entropy"])
    most = 2 / 3 * np.log(2)  # two of three times there are two legal actions
    assert (
        entropy["none1.0"] == entropy["regularized0.0"] < 0.4 * most < 0.8 * most < entropy["regularized1.0"]
    )


WRONG = {
    "max with centered advantages": (
        dict(entropy_method="max", stop_entropy_gradient=True), "max --no-normalize-advantage",
    ),
    "max without stop gradient": (
        dict(entropy_method="max", normalize_advantage=False), "max --stop-entropy-gradient",
    ),
    "regularized without gradient": (
        dict(entropy_coef=0.1, stop_entropy_gradient=True), "--stop-entropy-gradient regularized effect",
    ),
    "lambda without values": (dict(baseline="none", gae_lambda=0.9), "--gae-lambda 0.9 --baseline value"),
    "the mean of nothing": (
        dict(baseline="mean", num_envs=1, episodes_per_update=1), "mean --episodes-per-update 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["vpg", "trpo"])
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_options_are_refused_in_clear_words(mistake, name):
    module, (changes, words) = load_script(ALGOS / f"{name}.py"), WRONG[mistake]
    if changes.keys() - module.Args.__dataclass_fields__.keys():
        pytest.skip(f"{name} has no such option")
    with pytest.raises(module.UsageError) as error:
        train_quick(module, "Ones", **changes)
    for word in words.split():
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["reinforce", "vpg", "trpo"])
def test_a_rollout_of_one_step_gives_no_nan(name):
    sizes = dict(num_envs=1, episodes_per_update=1, total_timesteps=3)
    train_quick(load_script(ALGOS / f"{name}.py"), "Success", **sizes)
    assert len(progress()) == 3
    assert all(np.isfinite(float(value)) for row in progress() for value in row.values())
    assert all(x.isfinite().all() for x in checkpoint()["agent"].values())


@pytest.mark.parametrize("name", ["reinforce", "vpg", "trpo"])
@pytest.mark.parametrize("noise_steps", [1, 3])
def test_noise_is_kept_for_noise_steps_and_drawn_anew_for_each_rollout(name, noise_steps, monkeypatch):
    script = load_script(ALGOS / f"{name}.py")
    calls = recorder(monkeypatch, script.GaussianHead, "sample")
    train_quick(
        script, "Box", num_envs=2, episodes_per_update=2, max_episode_steps=8, total_timesteps=30,
        noise_steps=noise_steps,
    )  # fmt: skip
    noises = [call.args[3] for call in calls if isinstance(call.args[3], np.ndarray)]
    assert len(noises) == 16, "two rollouts of eight steps; evaluations have no noise"
    for t, (last, noise) in enumerate(zip(noises, noises[1:], strict=False), start=1):
        assert np.array_equal(last, noise) == (t % 8 % noise_steps != 0)


def test_cartpole_is_learned():
    returns = quick(
        "CartPole-v1", total_timesteps=20_000, num_envs=4, episodes_per_update=8, hidden_sizes=(64, 64),
        learning_rate=3e-3, value_epochs=10, value_minibatches=4, eval_episodes=10, max_episode_steps=0,
    )  # fmt: skip
    assert returns.mean() > 200
    assert checkpoint()["critic_optimizer"]["state"], "the critic has learned too"
