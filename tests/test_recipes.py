"""Every recipe applies to its script as it is, does what its name says, and trains."""

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import probe_envs
import pytest
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch.distributions import Categorical
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=64, eval_every=0, eval_episodes=1)


@pytest.fixture
def cook(tmp_path):
    """cook(recipe) -> the script as a module, patched in a folder of its own."""

    def patched(recipe):
        script = recipe.split("_")[0]
        (tmp_path / "algos").mkdir(exist_ok=True)
        shutil.copy(ROOT / "algos" / f"{script}.py", tmp_path / "algos")
        patch = ["git", "apply", str(ROOT / "recipes" / f"{recipe}.patch")]
        subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
        subprocess.run(patch, cwd=tmp_path, check=True)
        path = tmp_path / "algos" / f"{script}.py"
        spec = importlib.util.spec_from_file_location(recipe, path)
        sys.modules[recipe] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return patched


@pytest.fixture(autouse=True)
def wandb(monkeypatch):
    """The calls of wandb, which is not among what the tests install."""
    calls, module = [], type(sys)("wandb")
    module.init = lambda **options: calls.append(options)
    module.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def runs(module, folder, env_id="Pendulum-v1", **changes):
    small = {name: x for name, x in SMALL.items() if hasattr(module.Args, name)}
    args = module.make_args(env_id, **{**small, "run_dir": str(folder), **changes})
    assert math.isfinite(module.train(args).mean())
    return folder


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.patch")), ids=lambda path: path.stem)
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_applies_and_trains(cook, tmp_path, path, env_id):
    runs(cook(path.stem), tmp_path / "run", env_id)


def test_reference_policy_pulls_and_pushes(cook, tmp_path):
    ppo = cook("ppo_reference_policy")
    old = runs(ppo, tmp_path / "old", num_steps=64)
    probe = torch.randn(64, 3)

    def kl(run):
        agents = [ppo.load_policy(path).__self__ for path in (old, run)]
        return ppo.policy_kl(*(agent.policy(agent.encode(probe)) for agent in agents)).item()

    long = dict(num_steps=64, total_timesteps=1024, reference_coef=10.0, seed=2)
    near = kl(runs(ppo, tmp_path / "near", attract_to=(str(old),), **long))
    free = kl(runs(ppo, tmp_path / "free", **long))
    far = kl(runs(ppo, tmp_path / "far", repel_from=(str(old),), **long))
    assert near < 0.5 * free < 0.5 * far


def test_n_step_advantage_is_the_sum_of_n_errors(cook):
    ppo = cook("ppo_n_step_advantage")
    torch.manual_seed(0)
    reward, value, next_value = torch.randn(3, 12, 3)
    terminated, truncated = (torch.rand(2, 12, 3) < 0.15).float()
    done = torch.maximum(terminated, truncated)
    got = ppo.compute_n_step(reward, value, next_value, terminated, done, 0.9, 4)
    error = reward + 0.9 * (1 - terminated) * next_value - value
    for i in range(3):
        for t in range(12):
            total = 0.0
            for k in range(min(4, 12 - t)):
                total += 0.9**k * error[t + k, i]
                if done[t + k, i]:
                    break
            assert got[t, i] == pytest.approx(float(total), abs=1e-5)


def test_clip_value_is_the_larger_of_two_errors(cook):
    ppo = cook("ppo_clip_value")
    value, old, return_ = torch.tensor([3.0, 0.1]), torch.tensor([1.0, 0.0]), torch.tensor([3.0, 1.0])
    near = 0.5 * torch.tensor([(1.2 - 3.0) ** 2, 0.9**2]).mean()
    assert torch.isclose(ppo.value_loss(value, old, return_, 0.2), near)
    assert torch.isclose(ppo.value_loss(value, old, return_, math.inf), 0.5 * F.mse_loss(value, return_))


def test_noise_steps_repeats_the_noise(cook, tmp_path, monkeypatch):
    ppo = cook("ppo_noise_steps")
    noise = []
    act = ppo.Agent.act

    def watch(self, obs, info, greedy=True):
        action = act(self, obs, info, greedy)
        if not greedy:
            noise.append(torch.as_tensor(action - act(self, obs, info)))
        return action

    monkeypatch.setattr(ppo.Agent, "act", watch)
    runs(ppo, tmp_path / "run", noise_steps=4)
    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(noise, noise[1:], strict=False)]
    assert same[:15] == [(t + 1) % 4 != 0 for t in range(15)]


def test_positive_advantage_leaves_none_below_zero(cook, tmp_path, monkeypatch):
    vpg = cook("vpg_positive_advantage")
    lowest = []
    loss = vpg.policy_loss
    watch = lambda log_prob, advantage: lowest.append(float(advantage.min())) or loss(log_prob, advantage)
    monkeypatch.setattr(vpg, "policy_loss", watch)
    runs(vpg, tmp_path / "run", positive_advantage=True)
    assert lowest and all(x == 0 for x in lowest)


def test_softplus_entropy_hardly_pushes_a_narrow_policy(cook, tmp_path):
    # Where the entropy is far below 0 the derivative of its softplus is near 0.
    changes = dict(
        num_steps=64, total_timesteps=1024, log_std_init=-8.0, entropy_coef=1.0, learning_rate=1e-2
    )
    run = runs(cook("ppo_softplus_entropy"), tmp_path / "recipe", **changes)
    spec = importlib.util.spec_from_file_location("plain", ROOT / "algos/ppo.py")
    sys.modules["plain"] = plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    other = runs(plain, tmp_path / "plain", **changes)
    widths = [float(plain.load(path)["agent"]["head.log_std"]) for path in (run, other)]
    assert widths[0] < -7.8 < -7.5 < widths[1]


def test_a_window_shows_the_first_episode(cook, tmp_path, monkeypatch):
    ppo, shown = cook("ppo_render"), []
    monkeypatch.setattr(cv2, "imshow", lambda title, frame: shown.append((title, frame.shape)))
    monkeypatch.setattr(cv2, "waitKey", lambda milliseconds: shown.append(milliseconds))
    runs(ppo, tmp_path / "run", "probe_envs:Boundary-v0", render=True, eval_episodes=3)
    length = probe_envs.boundary_length(0, 0)
    assert shown == [("probe_envs:Boundary-v0", (48, 64, 3)), 50] * length
    assert not (tmp_path / "run/videos").exists()


def test_wandb_follows_the_run(cook, tmp_path, wandb):
    ppo = cook("ppo_wandb")
    runs(ppo, tmp_path / "run", wandb_project="mine")
    start, end = wandb
    assert start["project"] == "mine" and start["id"] == "run" and start["config"]["num_envs"] == 2
    assert start["sync_tensorboard"] and start["resume"] == "allow" and end == "finish"


def test_masked_actions_are_never_taken(cook, tmp_path, monkeypatch):
    """Masked raises at an illegal action. The update sees the masks of its rows: the first ratio is 1."""
    ppo, ratios = cook("ppo_action_masks"), []
    loss = ppo.clipped_policy_loss
    keep = lambda new, old, *rest: ratios.append((new - old).exp()) or loss(new, old, *rest)
    monkeypatch.setattr(ppo, "clipped_policy_loss", keep)
    changes = dict(total_timesteps=640, eval_every=320, eval_episodes=3, sample_actions=True)
    runs(ppo, tmp_path / "run", "probe_envs:Masked-v0", **changes)
    assert torch.allclose(ratios[0], torch.ones_like(ratios[0]), atol=1e-5) and ratios[1].std() > 0


@pytest.mark.parametrize("at_reset", [True, False])
def test_a_mask_that_is_given_only_sometimes_is_refused(cook, tmp_path, at_reset):
    ppo = cook("ppo_action_masks")
    with pytest.raises(ppo.UsageError, match="action_mask"):
        runs(ppo, tmp_path / "run", "probe_envs:Sometimes-v0", env_kwargs={"at_reset": at_reset})


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 5, 3])])
def test_a_masked_choice_is_torchs(cook, space):
    ppo = cook("ppo_action_masks")
    torch.manual_seed(1)
    sizes = [space.n] if isinstance(space, Discrete) else space.nvec.tolist()
    head, features, mask = ppo.CategoricalHead(5, space), 3 * torch.randn(6, 5), torch.ones(6, sum(sizes))
    mask[0, 0] = mask[1, 1] = mask[2, -1] = mask[3:, sum(sizes) - 2] = 0
    pi, logits = head(features, mask.to(torch.int8)), head.logits(features).view(6, len(sizes), -1)
    truths = [
        Categorical(logits=logits[:, k, :size].masked_fill(legal == 0, -math.inf))
        for k, (size, legal) in enumerate(zip(sizes, mask.split(sizes, dim=1), strict=True))
    ]
    action = torch.stack([truth.sample() for truth in truths], dim=1)
    log_prob = sum(truth.log_prob(action[:, k]) for k, truth in enumerate(truths))
    entropy = sum(-(t.probs * t.probs.clamp(min=1e-30).log()).sum(-1) for t in truths)
    assert torch.allclose(head.log_prob(pi, action), log_prob, atol=1e-4)
    assert torch.allclose(head.entropy(pi), entropy, atol=1e-4)
