"""The options that ppo_variants.py has and ppo.py has not. The contract tests take the rest."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ALGOS, Script, checkpoint, equal, load_script, progress
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from test_ppo import QUICK, gae, random_rollout
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.optim.optimizer import register_optimizer_step_pre_hook

PATH = ALGOS / "ppo_variants.py"
variants = load_script(PATH)

ONE_UPDATE = dict(update_epochs=1, num_minibatches=1)  # for each rollout: the loss is of the acting policy
MAX = dict(entropy_method="max", normalize_advantage=False, stop_entropy_gradient=True)


def train(env="Walk", run_dir="run", module=variants, **changes) -> np.ndarray:
    given = dict(env_id=f"probe_envs:{env}-v0", run_dir=str(run_dir))
    return module.train(module.Args(**QUICK | given | changes))


@pytest.fixture
def calls(monkeypatch):
    """calls(name) lists (inputs, result) of the function of that name from then on; tensors as they were."""

    def start(name):
        seen, original = [], getattr(variants, name)

        def recorded(*args, **kwargs):
            result = original(*args, **kwargs)
            copy = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (*args, result)]
            seen.append((copy[:-1], copy[-1]))
            return result

        monkeypatch.setattr(variants, name, recorded)
        return seen

    return start


# ----------------------------------------------------------------------------------------- n-step advantages
def brute_force_n_step(rewards, values, next_values, terminated, done, gamma, n_step):
    """The sum of up to n_step rewards and the value of where they led, minus the value: a double loop."""
    advantages = np.zeros(rewards.shape)
    for i in range(rewards.shape[1]):
        for t in range(len(rewards)):
            return_ = 0.0
            for k in range(n_step):
                return_ += gamma**k * rewards[t + k, i]
                if k == n_step - 1 or t + k == len(rewards) - 1 or done[t + k, i]:
                    if not terminated[t + k, i]:
                        return_ += gamma ** (k + 1) * next_values[t + k, i]
                    break
            advantages[t, i] = return_ - values[t, i]
    return advantages


def n_step_of(rollout, gamma, n_step):
    return variants.compute_n_step(*(torch.tensor(x, dtype=torch.float64) for x in rollout), gamma, n_step)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("n_step", [1, 2, 3, 7, 39, 40, 100])
def test_n_step_equals_the_brute_force_sum(n_step, gamma):
    for seed in range(5):
        rollout = random_rollout(seed)
        rewards, *_, terminated, done = rollout
        assert done[-1].any() and not done[-1].all() and (done > terminated).any() and terminated.any()
        expected = brute_force_n_step(*rollout, gamma, n_step)
        np.testing.assert_allclose(n_step_of(rollout, gamma, n_step), expected, atol=1e-12)


def test_one_step_is_the_td_error_and_the_whole_rollout_is_gae_with_lambda_1():
    rollout = rewards, values, next_values, terminated, _ = random_rollout(11)
    td_error = rewards + 0.97 * np.where(terminated, 0, next_values) - values
    np.testing.assert_allclose(n_step_of(rollout, 0.97, 1), td_error, atol=1e-12)
    for n_step in (len(rewards), 10 * len(rewards)):
        np.testing.assert_allclose(n_step_of(rollout, 0.97, n_step), gae(rollout, 0.97, 1.0), atol=1e-12)
    assert np.abs(n_step_of(rollout, 0.97, 5).numpy() - gae(rollout, 0.97, 1.0)).max() > 0.1


def test_advantage_chooses_the_estimator(calls):
    n_steps, gaes = calls("compute_n_step"), calls("compute_gae")
    losses = calls("policy_loss")
    train(advantage="n_step", n_step=3, gamma=0.93, normalize_advantage=False, **ONE_UPDATE)
    assert (len(n_steps), len(gaes)) == (3, 0)
    for (inputs, result), (used, _) in zip(n_steps, losses, strict=True):
        assert inputs[5:] == [0.93, 3]
        assert torch.equal(result.flatten().sort().values, used[2].sort().values)
    train(run_dir="run2", n_step=3)
    assert (len(n_steps), len(gaes)) == (3, 3)


def test_n_step_learns_cartpole():
    flags = "--env-id CartPole-v1 --device cpu --run-dir run --advantage n_step --n-step 32".split()
    returns = variants.train(
        variants.parse_args([*flags, "--total-timesteps", "50000", "--stop-return", "400"])
    )
    assert len(returns) == 10 and returns.mean() >= 400


# --------------------------------------------------------------------------------------------------- entropy
def exact_entropy(agent, obs, mask):
    """Entropy of the policy at each observation, by torch.distributions on the legal actions alone."""
    output = agent.head(agent.actor_trunk(agent.normalize(obs)))
    if mask is None:
        return Independent(Normal(output, agent.head.log_std.exp()), 1).entropy()
    rows = zip(output[:, 0], mask[:, 0], strict=True)
    return torch.stack([Categorical(logits=logits[legal]).entropy() for logits, legal in rows])


@pytest.mark.parametrize("softplus", [False, True], ids=["plain", "softplus"])
@pytest.mark.parametrize("env", ["Masked", "Box"])
@pytest.mark.parametrize("method", ["max", "regularized", "none"])
def test_entropy_goes_into_the_rewards_or_the_loss_or_nowhere(method, env, softplus, calls, monkeypatch):
    rollouts, runs, bonuses, read = [], [], [], []
    start, to_device, estimate = variants.Run.__init__, variants.Storage.to_device, variants.compute_gae

    def watched_start(run, args, agent, **parts):
        runs.append(agent)
        start(run, args, agent, **parts)

    def watched_to_device(storage):
        rollouts.append({name: x.clone() for name, x in to_device(storage).items()})
        return to_device(storage)

    def watched_estimate(rewards, *rest):
        flat = {name: x.flatten(0, 1) for name, x in rollouts[-1].items()}
        with torch.no_grad():
            bonuses.append(exact_entropy(runs[-1], flat["obs"], flat.get("mask")).view_as(rewards))
        read.append(rewards.clone())
        return estimate(rewards, *rest)

    monkeypatch.setattr(variants.Run, "__init__", watched_start)
    monkeypatch.setattr(variants.Storage, "to_device", watched_to_device)
    monkeypatch.setattr(variants, "compute_gae", watched_estimate)
    flags = MAX if method == "max" else dict(entropy_method=method)
    changes = dict(entropy_coef=0.3, value_coef=0.7, softplus_entropy=softplus, learning_rate=0.05)
    train(env, **ONE_UPDATE, **changes, **flags)
    assert len(rollouts) == 3 and len({x.mean().item() for x in bonuses}) == 3, "the policy moves"
    for rollout, entropy, rewards, row in zip(rollouts, bonuses, read, progress(), strict=True):
        bonus = 0.3 * (entropy.exp().log1p() if softplus else entropy)
        expected = rollout["reward"] + bonus if method == "max" else rollout["reward"]
        torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-5)
        rest = float(row["loss/total"]) - float(row["loss/policy"]) - 0.7 * float(row["loss/value"])
        in_loss = -bonus.mean().item() if method == "regularized" else 0.0
        assert rest == pytest.approx(in_loss, abs=2e-4 * max(1, float(row["loss/value"])))
        assert float(row["reward/mean"]) == pytest.approx(rollout["reward"].mean().item(), abs=1e-6)


def test_max_entropy_pays_the_bonus_on_top_of_the_sign_of_the_reward(calls):
    gaes = calls("compute_gae")
    train("Boundary", clip_reward=True, entropy_coef=0.5, **MAX, **ONE_UPDATE)
    bonus = gaes[0][0][0] - 1  # the rewards of Boundary are above 0
    torch.testing.assert_close(bonus, torch.full_like(bonus, 0.5 * math.log(2)), rtol=0, atol=0.01)


def test_max_entropy_pays_for_states_that_leave_a_choice():
    found = {}
    for coef in (0.0, 1.0):
        changes = dict(learning_rate=0.01, anneal_lr=False, num_steps=64, update_epochs=4)
        returns = train("Freedom", f"run{coef}", total_timesteps=2048, entropy_coef=coef, **MAX, **changes)
        found[coef] = returns.mean(), float(progress(f"run{coef}")[-1]["policy/entropy"])
    assert found[0.0][0] == pytest.approx(0.4), "the reward alone: it gives up its choice four times"
    assert found[1.0][0] == pytest.approx(0.0), "a choice is worth log 2 of entropy, more than 0.1"
    assert found[1.0][1] > 2 * found[0.0][1]


def test_softplus_of_the_entropy_is_never_negative_and_scales_its_gradient():
    entropy = torch.tensor([-30.0, -5.0, 0.0, 5.0, 30.0], requires_grad=True)
    bonus = variants.entropy_bonus(entropy, True)
    torch.testing.assert_close(bonus, entropy.exp().log1p())
    assert (bonus >= 0).all() and bonus[4].item() == pytest.approx(30)
    (gradient,) = torch.autograd.grad(bonus.sum(), entropy)
    torch.testing.assert_close(gradient, entropy.sigmoid())
    assert variants.entropy_bonus(entropy, False) is entropy


def test_softplus_weakens_the_push_of_the_entropy_on_a_narrow_gaussian(monkeypatch):
    """The gradient of the loss by each log standard deviation is -c_2, or -c_2 sigmoid(entropy)."""
    gradients, init = [], variants.GaussianHead.__init__

    def narrow(head, *args):
        init(head, *args)
        torch.nn.init.constant_(head.log_std, -2.0)

    def look(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append(next(p.grad.clone() for p in parameters if p.shape == (2,)))  # log_std is the first

    monkeypatch.setattr(variants.GaussianHead, "__init__", narrow)
    handle = register_optimizer_step_pre_hook(look)
    sizes = dict(total_timesteps=32, max_grad_norm=0.0, normalize_advantage=True) | ONE_UPDATE
    for number, flags in enumerate((dict(entropy_coef=0.0), {}, dict(softplus_entropy=True))):
        train("Box", f"run{number}", **sizes | dict(entropy_coef=3.0) | flags)
    handle.remove()
    base, plain, soft = gradients
    entropy = 2 * (-2.0 + 0.5 * math.log(2 * math.pi * math.e))
    torch.testing.assert_close(plain - base, torch.full((2,), -3.0), rtol=1e-4, atol=1e-4)
    expected = torch.full((2,), -3.0 / (1 + math.exp(-entropy)))
    torch.testing.assert_close(soft - base, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ divergence
SPACES = {
    "discrete": Discrete(4),
    "ragged": MultiDiscrete([2, 5, 3]),
    "masked": Discrete(4),
    "box": Box(-1, 1, (3,)),
}


def two_agents(space):
    """Two policies with other weights, other normalizers of observations and other deviations."""
    torch.manual_seed(5)
    observations = Box(-9, 9, (3,), np.float32)
    args = variants.Args(hidden_sizes=(8,), normalize_obs=True)
    agents = [variants.ActorCritic(observations, space, args) for _ in range(2)]
    for agent in agents:
        agent.obs_norm.update(torch.randn(50, 3) * 3 + 1)
        with torch.no_grad():
            for parameter in agent.head.parameters():
                parameter.add_(torch.randn_like(parameter))
    return agents


@pytest.mark.parametrize("kind", SPACES)
def test_policy_kl_equals_torch_distributions(kind):
    space, obs = SPACES[kind], torch.randn(6, 3)
    agents = two_agents(space)
    mask = agents[0].head.mask({}, 6)
    if kind == "masked":
        mask = np.array([[[1, 1, 0, 1]], [[0, 1, 0, 0]], [[1, 0, 1, 0]]] * 2, dtype=bool)
    assert (mask is not None) == (kind in ("masked", "ragged"))
    mask = None if mask is None else torch.tensor(mask)
    outputs = [agent.head(agent.actor_trunk(agent.normalize(obs))) for agent in agents]
    if kind == "box":
        one, two = (Normal(x, agent.head.log_std.exp()) for x, agent in zip(outputs, agents, strict=True))
        expected, reverse = kl_divergence(one, two).sum(-1), kl_divergence(two, one).sum(-1)
    else:
        exists = torch.ones_like(outputs[0], dtype=torch.bool) if mask is None else mask

        def exact(mine, theirs):
            choices = [
                [Categorical(logits=x[i, k][exists[i, k]]) for x in (mine, theirs)]
                for i in range(6)
                for k in range(exists.shape[1])
            ]
            return torch.stack([kl_divergence(*pair) for pair in choices]).view(6, -1).sum(-1)

        expected, reverse = exact(*outputs), exact(*outputs[::-1])
    got = variants.policy_kl(*agents, obs, mask)
    assert got.shape == (6,) and (got >= 0).all() and got.max() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (expected - reverse).abs().max() > 0.01, "the two directions differ here"
    torch.testing.assert_close(variants.policy_kl(agents[0], agents[0], obs, mask), torch.zeros(6))


def test_policy_kl_checks_no_values():
    """A check would wait for the device and could be in no CUDA graph; the run stops later."""
    agents = two_agents(Box(-1, 1, (3,)))
    assert variants.policy_kl(*agents, torch.full((1, 3), torch.nan)).isnan().all()


# ----------------------------------------------------------------------------------- attraction and repulsion
@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run folder of a policy that prefers the first action of Walk, which no learner would."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(run_dir=folder, normalize_obs=True, eval_every=32, hidden_sizes=(5,), total_timesteps=96)
    state = checkpoint(folder)
    state["agent"]["head.logits.bias"] = torch.tensor([1.0, -1.0])
    torch.save(state, folder / "checkpoint.pt")
    return folder


def divergence(run_dir, folder) -> float:
    """KL of the policy of a run to that of folder, the mean over places and times of Walk."""
    spaces = Box(-10, 10, (2,), np.float32), Discrete(2)
    policies = [variants.load_policy(str(path), *spaces, torch.device("cpu")) for path in (run_dir, folder)]
    obs = torch.cartesian_prod(torch.linspace(-1, 1, 11), torch.linspace(0, 0.95, 5))
    return variants.policy_kl(*policies, obs).mean().item()


LEARN = dict(total_timesteps=4096, num_steps=64, learning_rate=0.01, update_epochs=4, num_minibatches=4)


def test_attraction_keeps_the_policy_near_and_repulsion_drives_it_away(reference):
    train(run_dir="free", **LEARN)
    train(run_dir="near", attract_to=str(reference), attract_coef=10.0, **LEARN)
    train(run_dir="off", attract_to=str(reference), attract_coef=0.0, **LEARN)
    free, near = divergence("free", reference), divergence("near", reference)
    assert free > 0.2 and near < 0.05 * free
    assert divergence("off", reference) == pytest.approx(free)
    # away from what the free run becomes: the same seed without repulsion arrives there
    train(run_dir="away", repel_from="free", repel_coef=10.0, **LEARN)
    assert divergence("free", "free") == 0 and divergence("away", "free") > 0.5


@pytest.mark.parametrize("env", ["Walk", "Masked"])
def test_terms_of_attraction_and_repulsion_in_the_loss(env, calls):
    train(env, "old", seed=9, learning_rate=0.05, total_timesteps=320)
    kls = calls("policy_kl")
    for name, coef in (("attract_to", "attract_coef"), ("repel_from", "repel_coef")):
        kls.clear()
        flags = {name: "old", coef: 4.0, "value_coef": 0.7, "learning_rate": 0.1}
        train(env, name, **flags, **ONE_UPDATE)
        assert len(kls) == 3
        for (inputs, kl), row in zip(kls, progress(name), strict=True):
            assert inputs[0] is not inputs[1] and inputs[0].critic.weight.requires_grad
            assert not inputs[1].critic.weight.requires_grad
            assert (inputs[3] is not None) == (env == "Masked")
            rest = float(row["loss/total"]) - float(row["loss/policy"]) - 0.7 * float(row["loss/value"])
            term = kl.mean() if name == "attract_to" else (-kl).exp().mean()
            assert rest == pytest.approx(4 * term.item(), abs=1e-4)
            assert rest >= 0 and (name == "attract_to" or rest <= 4.001), "repulsion is bounded"


def test_the_repulsion_from_a_far_policy_pushes_no_more():
    agents = two_agents(Box(-1, 1, (3,)))
    with torch.no_grad():
        agents[0].head.mean.bias.fill_(60.0)
    kl = variants.policy_kl(*agents, torch.randn(6, 3))
    (gradient,) = torch.autograd.grad((-kl).exp().mean(), agents[0].head.mean.bias)
    assert kl.min() > 100 and gradient.abs().max() < 1e-12


def test_references_are_read_from_a_folder_or_a_file_and_stay_as_they_are(reference, monkeypatch):
    loaded, load = [], variants.load_policy
    before = {path: path.read_bytes() for path in reference.rglob("*") if path.is_file()}

    def watched(path, *args):
        loaded.append((path, load(path, *args)))
        return loaded[-1][1]

    monkeypatch.setattr(variants, "load_policy", watched)
    files = {"attract_to": str(reference), "repel_from": str(reference / "models" / "32.pt")}
    train(learning_rate=0.1, normalize_obs=True, **files)
    assert [path for path, _ in loaded] == list(files.values())
    saved = checkpoint(reference)["agent"], checkpoint(reference, "models/32.pt")["agent"]
    assert not equal(*saved)
    for (_, policy), state in zip(loaded, saved, strict=True):
        assert equal(dict(policy.state_dict()), dict(state)), "not even its normalizer moves"
        assert not any(parameter.requires_grad for parameter in policy.parameters())
        assert all(parameter.grad is None for parameter in policy.parameters())
    assert not equal(dict(checkpoint()["agent"]), dict(saved[0]))
    assert before == {path: path.read_bytes() for path in reference.rglob("*") if path.is_file()}


def test_a_resumed_run_with_all_options_repeats_an_uninterrupted_one(reference):
    options = dict(attract_to=str(reference), repel_from=str(reference / "best.pt"), advantage="n_step")
    flags = dict(entropy_coef=0.1, softplus_entropy=True, anneal_lr=False, checkpoint_every=64, **MAX)
    train(run_dir="whole", total_timesteps=128, **flags, **options)
    train(run_dir="parts", total_timesteps=64, **flags, **options)
    Script(PATH).resume("parts", total_timesteps=128)
    for part in ("agent", "optimizer", "reward_norm"):
        assert equal(checkpoint("whole")[part], checkpoint("parts")[part])


def test_evaluation_needs_no_reference(reference, capsys):
    shutil.copytree(reference, "old")
    train(attract_to="old", repel_from="old/best.pt")
    shutil.rmtree("old")
    assert Script(PATH).main("--evaluate", "run") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("return mean ")


@pytest.mark.parametrize("env", ["Walk", "Box"])
def test_the_defaults_train_as_ppo_does(env):
    changes = dict(learning_rate=0.01, entropy_coef=0.02, normalize_obs=True, normalize_reward=True)
    train(env, "ours", **changes)
    train(env, "ppo", module=load_script(ALGOS / "ppo.py"), **changes)
    assert progress("ours") == progress("ppo")
    for part in ("agent", "optimizer", "reward_norm"):
        assert equal(checkpoint("ours")[part], checkpoint("ppo")[part])


# -------------------------------------------------------------------------------------------------- refusals
WRONG = {
    "max normalizes advantages": (
        ["--entropy-method", "max", "--stop-entropy-gradient"],
        "--entropy-method max --no-normalize-advantage --stop-entropy-gradient",
    ),
    "max with gradient": (
        ["--entropy-method", "max", "--no-normalize-advantage"],
        "--entropy-method max --no-normalize-advantage --stop-entropy-gradient",
    ),
    "regularized without gradient": (
        ["--entropy-coef", "0.1", "--stop-entropy-gradient"],
        "--stop-entropy-gradient --entropy-method regularized",
    ),
    "unknown entropy method": (["--entropy-method", "min"], "--entropy-method min max"),
    "unknown advantage": (["--advantage", "td"], "--advantage td n_step"),
    "no step": (["--n-step", "0"], "--n-step at least 1"),
    "negative attraction": (["--attract-coef", "-1"], "--attract-coef at least 0"),
    "negative repulsion": (["--repel-coef", "-1"], "--repel-coef at least 0"),
    "attracted to nothing": (["--attract-to", "runs/none"], "runs/none args.json"),
    "repelled from nothing": (["--repel-from", "runs/none/best.pt"], "runs/none args.json"),
    "no such file in the run": (["--repel-from", "REFERENCE/none.pt"], "REFERENCE/none.pt"),
    "reference of another environment": (
        ["--env-id", "CartPole-v1", "--attract-to", "REFERENCE"],
        "REFERENCE/checkpoint.pt",
    ),
    "reference with other actions": (
        ["--env-id", "probe_envs:Walk-v0", "--env-kwargs", '{"actions": "box"}', "--repel-from", "REFERENCE"],
        "REFERENCE/checkpoint.pt",
    ),
}


def refused(capfd, *argv) -> str:
    """Exit code 2, one line on standard error, which it returns, and nothing written."""
    capfd.readouterr()
    before = sorted(Path().rglob("*"))
    code = Script(PATH).main(*argv)
    said = capfd.readouterr().err
    assert code == 2, said
    assert said.startswith("ppo_variants.py: ") and said.count("\n") == 1 and "Traceback" not in said
    assert sorted(Path().rglob("*")) == before
    return said


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_options_end_in_one_clear_line(mistake, reference, capfd):
    argv, words = WRONG[mistake]
    shutil.copytree(reference, "old")
    said = refused(capfd, "--run-dir", "run", *[word.replace("REFERENCE", "old") for word in argv])
    for word in words.replace("REFERENCE", "old").split():
        assert word in said, f"{word!r} is not in {said!r}"


@pytest.mark.parametrize("damage", ["empty", "cut", "number", "no agent", "args", "args of another script"])
def test_a_damaged_reference_is_refused_in_one_line(damage, reference, capfd):
    shutil.copytree(reference, "old")
    file = Path("old/checkpoint.pt")
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:700])
    elif damage == "number":
        torch.save(3, file)
    elif damage == "no agent":
        torch.save({"run": {}}, file)
    elif damage == "args":
        Path("old/args.json").write_text("{")
    else:
        Path("old/args.json").write_text(json.dumps({"env_id": "CartPole-v1"}))
    walk = ["--env-id", "probe_envs:Walk-v0", "--run-dir", "run"]
    assert "old" in refused(capfd, *walk, "--attract-to", "old")
