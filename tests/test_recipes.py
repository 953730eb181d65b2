"""Every recipe applies to its script as it is, does what its name says, and trains."""

import copy
import math
import sys
from types import SimpleNamespace

import cv2
import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from benchmark import goal_envs
from conftest import ALGOS, ROOT, checkpoint, equal, load_once, load_script, play, progress, script_of
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten
from torch.distributions import Categorical
from torch.nn import functional as F

SMALL = dict(
    num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=64, eval_every=0, eval_episodes=1,
    learning_starts=32, batch_size=16, buffer_size=200,
)  # fmt: skip
# Of recipes and scripts that refuse the actions of one
REACH, BITFLIP = "benchmark.goal_envs:Reach-v0", "benchmark.goal_envs:BitFlip-v0"
ENVS = dict(
    ddpg_td3=["Pendulum-v1"],
    dqn=["CartPole-v1"],
    sac=["Pendulum-v1"],
    sac_discrete=["CartPole-v1"],
    sac_her=[REACH],
)
PATCHES = sorted(path.stem for path in (ROOT / "recipes").glob("*.patch"))


@pytest.fixture(autouse=True)
def wandb(monkeypatch):
    """The calls of wandb, which is not among what the tests install."""
    calls, module = [], type(sys)("wandb")
    module.init = lambda **options: calls.append(options)
    module.finish = lambda exit_code: calls.append(exit_code)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.fixture
def fresh(monkeypatch):
    """fresh(name) -> the script as a module of its own, that a test may change; for options of scripts."""

    def load(name):
        monkeypatch.setitem(sys.modules, name, load_script(name))
        return load_once.__wrapped__(name, ALGOS / f"{name}.py")

    return load


def runs(module, folder, env_id="Pendulum-v1", **changes):
    small = {name: x for name, x in SMALL.items() if hasattr(module.Args, name)}
    args = module.make_args(env_id, **{**small, "run_dir": str(folder), **changes})
    assert math.isfinite(module.train(args).mean())
    return folder


class Pool:
    """As EnvPool's: made with a seed, with arrays of all environments. What is over is reset in the next
    step, which ignores its action, unless it was reset by its number before."""

    def __init__(self, env_id, env_type, num_envs, num_threads, seed, **kwargs):
        assert env_type == "gymnasium" and 1 <= num_threads <= num_envs
        self.envs, self.seed = [gym.make(env_id, **kwargs) for _ in range(num_envs)], seed
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.over = np.ones(num_envs, bool)

    def reset(self, ids=None):
        seeds = [self.seed + i for i in range(len(self.envs))] if ids is None else [None] * len(ids)
        ids = range(len(self.envs)) if ids is None else ids
        results = [self.envs[i].reset(seed=seed) for i, seed in zip(ids, seeds, strict=True)]
        self.over[list(ids)] = False
        return np.stack([obs for obs, _ in results]), {"env_id": np.array(ids)}

    def step(self, actions):
        results, late = [], self.over.copy()
        for env, action, over in zip(self.envs, actions, late, strict=True):
            results.append((env.reset()[0], 0.0, False, False) if over else env.step(action)[:4])
        obs, reward, terminated, truncated = map(np.stack, zip(*results, strict=True))
        self.over = terminated | truncated
        return obs, reward, terminated, truncated, {"cost": reward + 1, "other": late}


@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_envpool_gives_what_gymnasium_gives(cook, tmp_path, monkeypatch, actions):
    """The same environments in a stand-in for EnvPool, which is not among what the tests install."""
    module, fake = cook("ppo_envpool"), type(sys)("envpool")
    fake.make, fake.list_all_envs = Pool, lambda: ["probe_envs:Walk-v0"]
    monkeypatch.setitem(sys.modules, "envpool", fake)
    walk = dict(env_kwargs={"actions": actions, "edge": 2.0, "length": 9}, total_timesteps=256)
    walk |= dict(eval_every=64, checkpoint_every=48, normalize_obs=True)
    for name, envpool in (("gym", False), ("pool", True)):
        runs(module, tmp_path / name, "probe_envs:Walk-v0", envpool=envpool, info_keys=("cost",), **walk)
    a, b = (checkpoint(tmp_path / name) for name in ("gym", "pool"))
    assert equal(a["agent"], b["agent"]) and a["run"]["env_steps"] == b["run"]["env_steps"] == 256
    rows = [
        [{key: x for key, x in row.items() if "cost" not in key} for row in progress(tmp_path / name)]
        for name in ("gym", "pool")
    ]
    assert rows[0] == rows[1] and any("train/episode_return" in row for row in rows[1])
    costs = [row["info/cost"] for row in progress(tmp_path / "pool") if "info/cost" in row]
    assert costs and 0 not in costs
    monkeypatch.setitem(sys.modules, "envpool", None)  # who takes the policy away needs no EnvPool
    assert module.train(module.parse_args(["--evaluate", str(tmp_path / "pool")])).size == 1
    assert module.load_policy(tmp_path / "pool").agent


def test_envpool_refuses_what_it_lacks(cook, tmp_path, monkeypatch):
    module = cook("ppo_envpool")
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(module.UsageError, match="pip install envpool"):
        runs(module, tmp_path / "none", "CartPole-v1", envpool=True)
    fake = type(sys)("envpool")
    fake.make, fake.list_all_envs = Pool, lambda: ["CartPole-v1"]
    monkeypatch.setitem(sys.modules, "envpool", fake)
    with pytest.raises(module.UsageError, match="EnvPool has no Acrobot-v1"):
        runs(module, tmp_path / "none", "Acrobot-v1", envpool=True)
    with pytest.raises(module.UsageError, match="cannot make CartPole-v1: .*nonsense"):
        runs(module, tmp_path / "none", "CartPole-v1", envpool=True, env_kwargs={"nonsense": 1})
    other = lambda env_id, *args, **kwargs: Pool("Acrobot-v1", *args, **kwargs)
    monkeypatch.setattr(fake, "make", other)
    with pytest.raises(module.UsageError, match="CartPole-v1 has other spaces there"):
        runs(module, tmp_path / "none", "CartPole-v1", envpool=True)
    assert not (tmp_path / "none").exists()


class Asked(gym.Env):
    """Actions of many parts: a choice and a number that the observation asks for, and a switch. Pays 1 a step
    less the distance of the number. masked: the mask leaves the choice alone, and all others raise."""

    def __init__(self, nested: bool = False, masked: bool = False):
        self.nested, self.masked = nested, masked
        kind, number = Discrete(3, start=2), Box(np.float32([0, -2]), np.float32([4, 2]))
        parts = (kind, Tuple((number, MultiBinary(2), MultiDiscrete([2, 3]))))
        self.action_space = Dict(kind=kind, rest=parts[1]) if nested else Tuple((kind, number))
        self.observation_space = Box(-1, 1, (2,), np.float32)
        if masked:
            choices = 3 + 5 * nested
            self.observation_space = Dict(obs=self.observation_space, action_mask=MultiBinary(choices))

    def look(self):
        self.kind, self.number = int(self.np_random.integers(3)), self.np_random.uniform(-1, 1)
        obs = np.array([self.kind - 1, self.number], np.float32)
        if not self.masked:
            return obs
        mask = np.zeros(3 + 5 * self.nested, np.int8)
        mask[[self.kind, 3, 6][: 1 + 2 * self.nested]] = 1
        return dict(obs=obs, action_mask=mask)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        kind, rest = (action["kind"], action["rest"]) if self.nested else action
        number, _, more = rest if self.nested else (rest, None, (0, 1))
        assert not self.masked or (kind - 2, *more) == (self.kind, 0, 1), "illegal"
        reward = float(kind - 2 == self.kind) - float(number[1] - 2 * self.number) ** 2 / 4
        self.t += 1
        return self.look(), reward, self.t == 10, False, {}


gym.register("Asked-v0", entry_point=Asked, disable_env_checker=True)


@pytest.mark.parametrize("recipe, env_id", [
    (recipe, env_id) for recipe in PATCHES
    for env_id in ENVS.get(recipe, ENVS.get(script_of(recipe), ["Pendulum-v1", "CartPole-v1"]))
])  # fmt: skip
def test_applies_and_trains(cook, tmp_path, recipe, env_id):
    runs(cook(recipe), tmp_path / "run", env_id)


PAIRS = [
    (one, other) for one in PATCHES for other in PATCHES if one < other and script_of(one) == script_of(other)
]


@pytest.mark.parametrize("one, other", PAIRS, ids=[f"{one}-{other}" for one, other in PAIRS])
def test_any_two_recipes_for_one_script_apply_together_and_train(cook, tmp_path, one, other):
    runs(cook(one, other), tmp_path / "run", BITFLIP if "sac_her" in (one, other) else "CartPole-v1")


def test_reference_policy_pulls_and_pushes(cook, tmp_path, monkeypatch):
    ppo = cook("ppo_reference_policy")
    old = runs(ppo, tmp_path / "old", num_steps=64)
    probe = torch.randn(64, 3)

    def kl(run):
        agents = [ppo.load_policy(path).agent for path in (old, run)]
        return agents[0].head.kl(*(agent.policy(probe) for agent in agents)).mean().item()

    long = dict(num_steps=64, total_timesteps=1024, reference_coef=10.0, seed=2)
    near = kl(runs(ppo, tmp_path / "near", attract_to=(str(old),), **long))
    free = kl(runs(ppo, tmp_path / "free", **long))
    far = kl(runs(ppo, tmp_path / "far", repel_from=(str(old),), **long))
    assert near < 0.5 * free < 0.5 * far
    with pytest.raises(ppo.UsageError, match="does not fit"):
        runs(ppo, tmp_path / "other", "CartPole-v1", attract_to=(str(old),))
    orders, kl_of = set(), ppo.GaussianHead.kl

    def watched(head, first, second):
        orders.add((first.requires_grad, second.requires_grad))
        return kl_of(head, first, second)

    monkeypatch.setattr(ppo.GaussianHead, "kl", watched)
    runs(ppo, tmp_path / "watched", attract_to=(str(old),), num_steps=64)
    assert orders == {(False, True)}  # KL(saved || policy), not the other way round


@pytest.mark.parametrize("name, off", [
    ("ppo_n_step_advantage", {}), ("ppo_noise_steps", {}), ("ppo_joint_actions", {}), ("ppo_wandb", {}),
    ("ppo_reference_policy", {"reference_coef": 9.0}),
])  # fmt: skip
def test_a_recipe_whose_option_is_not_given_changes_nothing(cook, tmp_path, name, off):
    runs(load_script("ppo"), tmp_path / "plain")
    runs(cook(name), tmp_path / "run", **off)
    assert equal(checkpoint(tmp_path / "run")["agent"], checkpoint(tmp_path / "plain")["agent"])


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


def test_n_step_takes_the_place_of_lambda(cook, tmp_path):
    """With one step the advantage is that of lambda 0."""
    ppo = cook("ppo_n_step_advantage")
    one, zero = dict(n_step=1, gae_lambda=0.7), dict(gae_lambda=0.0)
    agents = [
        checkpoint(runs(ppo, tmp_path / f"{i}", **x))["agent"]
        for i, x in enumerate((one, zero, dict(n_step=5)))
    ]
    assert all(torch.allclose(x, agents[1][name], atol=1e-4) for name, x in agents[0].items())
    assert not equal(agents[0], agents[2])


def test_parts_of_a_joint_action_are_those_of_their_own_heads(cook):
    ppo = cook("ppo_joint_actions")
    torch.manual_seed(1)
    to_action, space = ppo.action_map(Asked(nested=True).action_space)
    head = ppo.JointHead(5, space, False, -0.5)
    old, pi = head(torch.randn(7, 5), None), head(torch.randn(7, 5), None)
    action = head.choose(pi, greedy=False)
    assert action.shape == (7, *space.shape) == (7, 7) and len(pi) == 4
    own = list(zip(head.heads, pi, action.split([1, 2, 2, 2], dim=1), strict=True))
    for got, total in (
        (head.log_prob(pi, action), sum(one.log_prob(x, part) for one, x, part in own)),
        (head.entropy(pi), sum(one.entropy(x) for one, x, _ in own)),
        (head.kl(old, pi), sum(one.kl(y, x) for (one, x, _), y in zip(own, old, strict=True))),
    ):
        torch.testing.assert_close(got, total)
    assert all(Asked(nested=True).action_space.contains(to_action(x)) for x in action.detach().numpy())
    greedy = head.choose(pi, greedy=True)
    assert torch.equal(greedy[:, 0], pi[0].argmax(-1)[:, 0]) and torch.equal(greedy[:, 1:3], pi[1][:, :2])


@pytest.mark.parametrize("nested, masked", [(False, False), (False, True), (True, False), (True, True)])
def test_joint_actions_train_and_are_taken_in_the_environment_itself(cook, tmp_path, capsys, nested, masked):
    ppo = cook("ppo_joint_actions")
    kwargs = {"nested": nested, "masked": masked}
    run = runs(ppo, tmp_path / "run", "Asked-v0", env_kwargs=kwargs, eval_episodes=3, sample_actions=masked)
    text = "3 choices + 2 numbers" + " + 2 × 2 choices + 2 × 3 choices" * nested + ", masked" * masked
    assert f"actions: {text} ·" in capsys.readouterr().out
    args, policy = ppo.Args(**checkpoint(run)["args"]), ppo.load_policy(run)
    args.sample_actions = False
    returns, _ = ppo.evaluate(args, policy.agent)
    assert play(policy, args) == pytest.approx(returns.tolist(), abs=1e-4)
    batch = gym.vector.SyncVectorEnv([lambda: Asked(**kwargs)] * 3)
    actions = policy(batch.reset(seed=args.eval_seed)[0])
    assert batch.action_space.contains(actions)


def test_joint_actions_are_learned(cook, tmp_path):
    ppo = cook("ppo_joint_actions")
    fast = dict(num_envs=16, num_minibatches=4, learning_rate=1e-2, anneal_lr=True, total_timesteps=4096)
    run = runs(ppo, tmp_path / "run", "Asked-v0", eval_episodes=10, **fast)
    assert progress(run)[-1]["eval/return_mean"] > 8


def test_clip_value_is_the_larger_of_two_errors(fresh):
    ppo = fresh("ppo")
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


def test_positive_advantage_leaves_none_below_zero(fresh, tmp_path, monkeypatch):
    vpg = fresh("vpg")
    lowest = []
    loss = vpg.policy_loss
    watch = lambda log_prob, advantage: lowest.append(float(advantage.min())) or loss(log_prob, advantage)
    monkeypatch.setattr(vpg, "policy_loss", watch)
    runs(vpg, tmp_path / "run", positive_advantage=True)
    assert lowest and all(x == 0 for x in lowest)


def test_softplus_entropy_hardly_pushes_a_narrow_policy(tmp_path):
    # Where the entropy is far below 0 the derivative of its softplus is near 0.
    changes = dict(num_steps=64, total_timesteps=1024, log_std_init=-8.0, entropy_coef=1.0)
    changes |= dict(learning_rate=1e-2, normalize_reward=False)
    run = runs(load_script("ppo"), tmp_path / "softplus", entropy_method="softplus", **changes)
    plain = load_script("ppo")
    other = runs(plain, tmp_path / "plain", **changes)
    widths = [float(plain.load(path)["agent"]["head.log_std"]) for path in (run, other)]
    assert widths[0] < -7.8 < -7.5 < widths[1]


def test_a_window_shows_the_first_episode(cook, tmp_path, monkeypatch):
    ppo, shown = cook("ppo_render"), []
    monkeypatch.delenv("DISPLAY", raising=False), monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ppo.UsageError, match="--render"):  # OpenCV aborts the process that tries
        runs(ppo, tmp_path / "blind", "probe_envs:Boundary-v0", render=True)
    assert not (tmp_path / "blind").exists(), "before the training"
    monkeypatch.setattr(sys, "executable", "true")  # the process that tries succeeds
    monkeypatch.setattr(cv2, "imshow", lambda title, frame: shown.append((title, frame.shape)))
    monkeypatch.setattr(cv2, "waitKey", lambda milliseconds: shown.append(milliseconds))
    monkeypatch.setattr(cv2, "destroyAllWindows", lambda: shown.append("closed"))
    runs(ppo, tmp_path / "run", "probe_envs:Boundary-v0", render=True, eval_episodes=3)
    length = probe_envs.boundary_length(0, 0)
    assert shown == [("probe_envs:Boundary-v0", (48, 64, 3)), 50] * length + ["closed"]
    assert not (tmp_path / "run/videos").exists()


def test_wandb_follows_the_run(cook, tmp_path, wandb):
    ppo = cook("ppo_wandb")
    runs(ppo, tmp_path / "run", wandb_project="mine")
    (start, code), folder = wandb, str(tmp_path / "run")
    assert start["project"] == "mine" and start["name"] == "run" and start["config"]["num_envs"] == 2
    assert start["sync_tensorboard"] and start["resume"] == "allow" and code == 0
    assert start["id"] == (tmp_path / "run/wandb_id").read_text()
    ppo.train(ppo.parse_args(["--resume", folder]))
    assert wandb.pop(2)["id"] == start["id"] and wandb.pop() == 0  # it continues the curves
    with pytest.raises(KeyError):
        runs(ppo, tmp_path / "fails", "probe_envs:Raises-v0")
    assert wandb[2]["id"] != start["id"] and wandb[3] == 1


def test_masked_actions_are_never_taken(fresh, tmp_path, monkeypatch):
    """Masked raises at an illegal action. The update sees the masks of its rows: the first ratio is 1."""
    ppo, ratios = fresh("ppo"), []
    loss = ppo.clipped_policy_loss
    keep = lambda new, old, *rest: ratios.append((new - old).exp()) or loss(new, old, *rest)
    monkeypatch.setattr(ppo, "clipped_policy_loss", keep)
    changes = dict(total_timesteps=640, eval_every=320, eval_episodes=3, sample_actions=True)
    runs(ppo, tmp_path / "run", "probe_envs:Masked-v0", **changes)
    assert torch.allclose(ratios[0], torch.ones_like(ratios[0]), atol=1e-5) and ratios[1].std() > 0


def test_a_mask_that_is_given_only_at_reset_is_refused(fresh, tmp_path):
    ppo = fresh("ppo")
    with pytest.raises(ppo.UsageError, match="action_mask"):
        runs(ppo, tmp_path / "run", "probe_envs:Sometimes-v0", env_kwargs={"at_reset": True})


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 5, 3])])
def test_a_masked_choice_is_torchs(fresh, space):
    ppo = fresh("ppo")
    torch.manual_seed(1)
    sizes = [space.n] if isinstance(space, Discrete) else space.nvec.tolist()
    head, features, mask = (
        ppo.CategoricalHead(5, space, True),
        3 * torch.randn(6, 5),
        torch.ones(6, sum(sizes)),
    )
    mask[0, 0] = mask[1, 1] = mask[2, -1] = mask[3:, sum(sizes) - 2] = 0
    pi, logits = (
        head(features, torch.cat([torch.randn(6, 2), mask], dim=1)),
        head.logits(features).view(6, len(sizes), -1),
    )
    truths = [
        Categorical(logits=logits[:, k, :size].masked_fill(legal == 0, -math.inf))
        for k, (size, legal) in enumerate(zip(sizes, mask.split(sizes, dim=1), strict=True))
    ]
    action = torch.stack([truth.sample() for truth in truths], dim=1)
    log_prob = sum(truth.log_prob(action[:, k]) for k, truth in enumerate(truths))
    entropy = sum(-(t.probs * t.probs.clamp(min=1e-30).log()).sum(-1) for t in truths)
    assert torch.allclose(head.log_prob(pi, action), log_prob, atol=1e-4)
    assert torch.allclose(head.entropy(pi), entropy, atol=1e-4)


@pytest.mark.parametrize("scale, changes, low, high", [
    (1.0, dict(clip_return=2.0), -2, 2),
    (-1.0, dict(clip_return=2.0), -2, 2),
    (1.0, dict(clip_return=2.0, clip_positive_returns=True), -2, 0),
    (-1.0, dict(clip_positive_returns=True), -math.inf, 0),
])  # fmt: skip
def test_targets_are_kept_within_their_bounds(fresh, tmp_path, record, scale, changes, low, high):
    """Pendulum's rewards are below 0."""
    td3 = fresh("ddpg_td3")
    targets, losses = record(td3, "clipped_double_q"), record(td3, "critic_loss")
    runs(td3, tmp_path / "run", reward_scale=scale, **changes)
    targets, learned = torch.stack([y for _, y in targets]), torch.stack([given[1] for given, _ in losses])
    assert targets.min() < low or targets.max() > high
    assert torch.equal(learned, targets.clamp(low, high))


def test_replayed_rewards_are_over_the_present_deviation_of_the_returns(fresh, tmp_path, record, drawn):
    """Segments of 10 steps, so that returns begin anew also where no episode ends."""
    td3 = fresh("ddpg_td3")
    targets, batches = record(td3, "clipped_double_q"), drawn(td3)
    options = dict(normalize_reward=True, reward_scale=20.0, gamma=0.5, checkpoint_every=10)
    boundary = dict(env_id="probe_envs:Boundary-v0", env_kwargs={"actions": "box"})
    run = runs(td3, tmp_path / "run", **boundary, **options)
    norm, returns, return_ = td3.load(run)["reward_norm"], [], {}
    for evaluates, number, _, t, _, reward in probe_envs.Boundary.steps:
        if not evaluates:
            return_[number] = reward + 0.5 * (return_[number] if t > 1 else 0)
            returns.append(return_[number])
    assert norm["statistics.count"] == 64 == len(returns) and norm["statistics.var"].item() == pytest.approx(
        np.var(returns)
    )
    reward = 20 * (batches[-1]["reward"] / norm["statistics.var"].sqrt()).clamp(-10, 10)
    assert reward.max() > 10  # only the normalized ones are clipped
    torch.testing.assert_close(targets[-1][0][0], reward, check_dtype=False)


def test_weights_decay_as_asked_also_in_a_resumed_run(fresh, tmp_path):
    td3 = fresh("ddpg_td3")
    decay = lambda run: [td3.load(run)[f"{part}_optimizer"]["param_groups"][0]["weight_decay"]
                         for part in ("actor", "critic")]  # fmt: skip
    size = lambda run, part: sum(x.square().sum() for name, x in td3.load(run)["agent"].items()
                                 if name.startswith(f"{part}."))  # fmt: skip
    free = runs(td3, tmp_path / "free", learning_rate=0.01)
    actor = runs(td3, tmp_path / "actor", learning_rate=0.01, actor_weight_decay=100.0)
    critic = runs(td3, tmp_path / "critic", learning_rate=0.01, critic_weight_decay=100.0)
    assert size(actor, "actor") < 0.7 * size(free, "actor")
    assert size(critic, "critic") < 0.7 * size(free, "critic")
    assert decay(actor) == [100.0, 0.0] and decay(critic) == [0.0, 100.0]
    td3.train(td3.parse_args(f"--resume {critic} --total-timesteps 68 --critic-weight-decay 0.5".split()))
    assert decay(critic) == [0.0, 0.5]


def test_independent_noise_is_gaussian_and_apart_for_each_weight(fresh, tmp_path):
    dqn = fresh("dqn")
    torch.manual_seed(0)
    layer, x = dqn.NoisyLinear(9, 6, True, 0.5), torch.cat([torch.zeros(1, 9), torch.eye(9)])
    assert 0.9 * 3**-0.5 < layer.weight.abs().max() <= 3**-0.5 and layer.bias.abs().max() <= 3**-0.5
    sigma = torch.cat([layer.weight_sigma.ravel(), layer.bias_sigma]).unique().item()
    assert sigma == pytest.approx(0.017)
    output = torch.stack([(dqn.redraw_noise(layer), layer(x))[1] for _ in range(3000)]).detach()
    bias, weight = output[:, 0], (output[:, 1:] - output[:, :1]).mT  # (3000, 6), (3000, 6, 9)
    noise = torch.cat([(weight - layer.weight).flatten(1), bias - layer.bias], dim=1).detach() / sigma
    torch.testing.assert_close(noise.T.cov(), torch.eye(60), atol=0.12, rtol=0)
    assert noise.pow(4).mean().item() == pytest.approx(3, rel=0.03)
    assert torch.linalg.matrix_rank(noise[0, :54].view(6, 9), rtol=1e-2) == 6
    torch.testing.assert_close(layer.eval()(torch.eye(9)), layer.weight.T + layer.bias)
    runs(dqn, tmp_path / "run", "CartPole-v1", noisy=True, independent_noise=True)


def test_mse_loss_is_half_the_weighted_mean_square(fresh):
    error, weight = torch.tensor([3.0, -0.1, -8.0, 0.0]), torch.tensor([1.0, 0.5, 0.25, 1.0])
    loss = fresh("dqn").q_loss(error, weight, "mse")
    assert loss.item() == pytest.approx((9 + 0.5 * 0.01 + 0.25 * 64) / 2 / 4)


@pytest.mark.parametrize("term", ["caps_temporal", "caps_spatial"])
def test_caps_adds_the_distance_between_greedy_actions_to_the_loss(fresh, tmp_path, record, drawn, term):
    sac = fresh("sac")
    sac.orthogonal = lambda layer, gain=0.0, plain=sac.orthogonal: plain(layer)  # means that tanh changes
    distances, values = record(sac, "caps_loss"), record(sac, "soft_value")
    actors, steps = record(sac.Actor, "forward"), record(sac, "gradient_step")
    batches = drawn(sac)
    changes = {term: 10.0, "caps_epsilon": 0.5, "learning_rate": 0.0, "normalize_obs": True}
    agent = sac.load_policy(runs(sac, tmp_path / "run", batch_size=200, **changes)).agent
    (action, near_action), distance = distances[-1]
    loss = steps[-2][0][0]  # that of the temperature follows
    torch.testing.assert_close(loss, 10 * distance.detach() - values[-1][1].detach().mean())
    obs, next_obs = (agent.obs_norm(batches[-1][name]) for name in ("obs", "next_obs"))
    near, seen = [given[1] for given, _ in actors if len(given[1]) == 200][-2:]
    greedy = lambda obs: agent.actor(obs)[0].tanh().detach()
    assert torch.equal(seen, obs) and torch.equal(near, next_obs) == (term == "caps_temporal")
    torch.testing.assert_close([action, near_action], [greedy(obs), greedy(near)])
    if term == "caps_spatial":
        assert (near - obs).std().item() == pytest.approx(0.5, rel=0.1)
    one, other = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    assert sac.caps_loss(one, other) == 2.5


def test_caps_refuses_images(fresh, tmp_path):
    sac = fresh("sac")
    with pytest.raises(sac.UsageError, match="--caps-spatial"):
        kwargs = dict(obs="small", action="box")
        runs(sac, tmp_path / "run", "probe_envs:Spaces-v0", env_kwargs=kwargs, caps_spatial=1.0)


def test_choices_are_drawn_with_their_probabilities(cook):
    sac = cook("sac_discrete")
    torch.manual_seed(1)
    agent = sac.Agent(sac.Layout((4,)), Discrete(3), sac.Args(), torch.device("cpu"))
    with torch.no_grad():
        agent.actor.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
        prob = agent.policy(torch.ones(1, 4))[0].exp()
    obs = np.ones((20_000, 4), np.float32)
    drawn = np.bincount(agent.act(obs, {}, greedy=False)) / 20_000
    assert prob.sum() == pytest.approx(1) and drawn == pytest.approx(prob.numpy(), abs=0.02)
    assert agent.act(obs[:50], {}).tolist() == [2] * 50
    with pytest.raises(sac.UsageError, match="not Discrete"):
        sac.Agent(sac.Layout((4,)), Box(-1, 1, (2,)), sac.Args(), torch.device("cpu"))


def test_soft_value_of_choices_is_their_mean(cook):
    q_values = torch.tensor([[[1.0, 5.0]], [[2.0, 3.0]]])  # two critics, one state, two choices
    prob = torch.tensor([[0.25, 0.75]])
    expected = 0.25 * (1 - 0.2 * math.log(0.25)) + 0.75 * (3 - 0.2 * math.log(0.75))
    value = cook("sac_discrete").soft_value(q_values, prob.log(), 0.2)
    assert value.tolist() == pytest.approx([expected])


def test_choices_become_the_softmax_of_their_rewards_over_the_temperature(cook, tmp_path):
    """With gamma 0 it is a bandit; action 1 pays 1, action 0 nothing."""
    sac = cook("sac_discrete")
    changes = dict(gamma=0.0, reward_scale=2.0, auto_alpha=False, alpha=1.5, learning_rate=0.02)
    changes |= dict(total_timesteps=500, hidden_sizes=(16,), env_kwargs={"choosy": True})
    run = runs(sac, tmp_path / "run", "probe_envs:Ones-v0", **changes)
    log_prob = sac.load_policy(run).agent.policy(torch.zeros(1, 4))
    assert log_prob[0, 1].exp().item() == pytest.approx(1 / (1 + math.exp(-2 / 1.5)), abs=0.02)


def test_the_value_of_choices_counts_the_entropy_of_all_steps_to_come(cook, tmp_path):
    """Both choices always pay 1, so Q = 1 + gamma V and V = Q + alpha log 2."""
    sac = cook("sac_discrete")
    changes = dict(gamma=0.8, auto_alpha=False, alpha=0.5, learning_rate=0.01, tau=0.1)
    changes |= dict(total_timesteps=800, hidden_sizes=(16,), buffer_size=1000)
    run = runs(sac, tmp_path / "run", "probe_envs:Ones-v0", **changes)
    q_values = sac.load_policy(run).agent.critic(torch.zeros(1, 4))
    expected = 1 + 0.8 * (1 + 0.5 * math.log(2)) / (1 - 0.8)
    assert q_values.shape == (2, 1, 2)
    assert q_values.flatten().tolist() == pytest.approx([expected] * 4, rel=0.05)


def test_targets_and_losses_of_choices_are_of_their_probabilities(cook, tmp_path, record, drawn):
    sac = cook("sac_discrete")
    sac.orthogonal = lambda layer, gain=0.0, plain=sac.orthogonal: plain(layer)  # far from uniform
    critics, temperatures = record(sac, "critic_loss"), record(sac, "alpha_loss")
    steps, batches = record(sac, "gradient_step"), drawn(sac)
    changes = dict(learning_rate=0.0, normalize_obs=True, alpha=0.3, tau=0.0)

    def another(critic):
        target = copy.deepcopy(critic)
        target.layers[-1].bias.data += 1
        return target

    sac.copy = SimpleNamespace(deepcopy=another)  # a target critic that differs
    run = runs(sac, tmp_path / "run", "probe_envs:Boundary-v0", **changes)
    agent, batch = sac.load_policy(run).agent, batches[-1]
    obs, next_obs = (agent.obs_norm(batch[name]) for name in ("obs", "next_obs"))
    pi, next_pi = (Categorical(logits=agent.policy(batch[name])) for name in ("obs", "next_obs"))
    value = lambda critic, x, pi: (pi.probs * critic(x).amin(dim=0)).sum(dim=-1) + 0.3 * pi.entropy()
    (q_values, td_target), _ = critics[-1]
    made = agent.critic(obs)[:, torch.arange(len(obs)), batch["action"].long()]
    torch.testing.assert_close(q_values, made.detach())
    expected = batch["reward"] + batch["discount"] * value(agent.target_critic, next_obs, next_pi)
    torch.testing.assert_close(td_target, expected.detach())
    torch.testing.assert_close(
        steps[-2][0][0], -value(agent.critic, obs, pi).mean().detach()
    )  # that of the actor
    (_, entropy, target_entropy), _ = temperatures[-1]
    torch.testing.assert_close(entropy, pi.entropy().mean().detach())
    assert target_entropy == pytest.approx(0.5 * math.log(2))


# ------------------------------------------------------------------------------------------------- hindsight
@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_hindsight_pretends_goals_that_the_same_episode_reached_later(cook, tmp_path, share):
    """Against the episodes as they were, with laps of the ring, ends by time, and cuts by checkpoints."""
    sac = cook("sac_her")
    add, cut, sample = sac.ReplayBuffer.add, sac.ReplayBuffer.cut, sac.ReplayBuffer.sample
    steps, episode, pretended, looked_ahead = {}, [0, 0], [], set()
    env = gym.make(REACH).unwrapped

    def watched_add(buffer, **step):
        add(buffer, **step)
        for i in range(2):
            obs, next_obs = (step[name][i].astype(np.float32) for name in ("obs", "next_obs"))
            steps[obs.tobytes()] = (i, episode[i], len(steps), next_obs.copy(), float(step["reward"][i]))
            episode[i] += step["done"][i]

    def watched_cut(buffer):
        cut(buffer)
        episode[:] = [number + 1 for number in episode]

    def watched_sample(buffer, size):
        batch = sample(buffer, size)
        goal, reached = buffer.part["desired_goal"], buffer.part["achieved_goal"]
        starts = {np.frombuffer(start, np.float32)[reached].tobytes(): x for start, x in steps.items()}
        for obs, next_obs, reward in zip(
            *(batch[x].numpy() for x in ("obs", "next_obs", "reward")), strict=True
        ):
            i, number, at, true_next, paid = starts[obs[reached].tobytes()]  # no two begin alike
            assert np.array_equal(next_obs[reached], true_next[reached])
            assert np.array_equal(obs[goal], next_obs[goal])
            later = [x for x in steps.values() if x[:2] == (i, number) and x[2] >= at]
            pretended.append(not np.array_equal(obs[goal], true_next[goal]))
            if pretended[-1]:
                (found,) = [x[2] for x in later if np.array_equal(x[3][reached], obs[goal])]
                looked_ahead.add((found - at) // 2)
                assert reward == float(env.compute_reward(next_obs[reached], next_obs[goal], {}))
            else:
                assert reward == paid
        return batch

    sac.ReplayBuffer.add, sac.ReplayBuffer.cut, sac.ReplayBuffer.sample = (
        watched_add,
        watched_cut,
        watched_sample,
    )
    sizes = dict(num_envs=2, buffer_size=60, total_timesteps=200, checkpoint_every=31, learning_starts=40)
    sizes |= dict(hidden_sizes=(8,), updates_per_step=0.5)
    runs(sac, tmp_path / "run", REACH, env_kwargs={"max_episode_steps": 7}, her_share=share, **sizes)
    assert np.mean(pretended) == pytest.approx(share, abs=0.05) and len(pretended) > 1000
    assert looked_ahead == (set(range(7)) if share else set())


def test_hindsight_continues_after_a_kill_as_if_it_had_not_been_stopped(cook, tmp_path):
    sac = cook("sac_her")
    few = dict(checkpoint_every=32, hidden_sizes=(8,))
    whole = runs(sac, tmp_path / "whole", REACH, total_timesteps=128, **few)
    cut = runs(sac, tmp_path / "cut", REACH, total_timesteps=64, **few)
    sac.train(sac.parse_args(["--resume", str(cut), "--total-timesteps", "128"]))
    assert equal(checkpoint(cut)["agent"], checkpoint(whole)["agent"])


@pytest.mark.parametrize("env_id, changes", [("Pendulum-v1", {}), (REACH, dict(n_step=3))])
def test_hindsight_refuses_what_has_no_goals(cook, tmp_path, env_id, changes):
    sac = cook("sac_her")
    with pytest.raises(sac.UsageError, match="hindsight needs"):
        runs(sac, tmp_path / "run", env_id, **changes)


class Square(goal_envs.Reach):
    """Reach, with goals of shape (1, 2)."""

    def __init__(self):
        box = Box(-1, 1, (1, 2), np.float32)
        self.observation_space = Dict(observation=box, achieved_goal=box, desired_goal=box)

    def observe(self):
        return {name: x[None] for name, x in super().observe().items()}

    def compute_reward(self, achieved, desired, info):
        paid = super().compute_reward(achieved, desired, info)
        return paid if achieved.ndim == 1 else paid[:, 0]


def test_hindsight_asks_for_rewards_in_the_shape_of_the_goals(cook, tmp_path, monkeypatch):
    sac, shapes = cook("sac_her"), set()
    gym.register("Square-v0", Square, max_episode_steps=7)
    reward = Square.compute_reward
    watched = lambda env, x, *rest: shapes.add(x.shape) or reward(env, x, *rest)
    monkeypatch.setattr(Square, "compute_reward", watched)
    runs(sac, tmp_path / "run", "Square-v0", hidden_sizes=(8,))
    assert shapes == {(2,), (2, 1, 2), (SMALL["batch_size"], 1, 2)}


@pytest.mark.parametrize("reward", [
    lambda env, reached, goal, info: 0.0 if np.linalg.norm(reached - goal) < 0.05 else -1.0,
    lambda env, reached, goal, info: -1.0 if np.linalg.norm(reached - goal, axis=-1) > 0.05 else 0.0,
])  # fmt: skip
def test_hindsight_refuses_rewards_for_one_goal_at_a_time(cook, tmp_path, monkeypatch, reward):
    sac = cook("sac_her")
    monkeypatch.setattr(goal_envs.GoalEnv, "compute_reward", reward)
    with pytest.raises(sac.UsageError, match="many goals at once"):
        runs(sac, tmp_path / "run", REACH)


# ------------------------------------------------------------------------------------------------- TD3+BC
def half_right(**changes) -> None:
    """A data set of single steps of Walk with random actions. It pays to have the sign of the position."""
    rng = np.random.default_rng(1)
    obs, action = rng.uniform(-1, 1, (400, 2)).astype(np.float32), rng.uniform(-1, 1, (400, 1))
    arrays = dict(obs=obs, next_obs=2 * obs + 1, action=action, lengths=np.ones(400, int))
    arrays |= dict(reward=-np.abs(action[:, 0] - np.sign(obs[:, 0])), terminated=np.ones(400, bool)) | changes
    np.savez("data.npz", **{name: x for name, x in arrays.items() if x is not None})


def offline(module, folder, **changes):
    walk = dict(env_kwargs={"actions": "box"}, dataset="data.npz", num_envs=1, learning_starts=10**6)
    walk["buffer_size"] = 1000
    return runs(
        module, folder, "probe_envs:Walk-v0", **walk | dict(hidden_sizes=(32,), batch_size=64) | changes
    )


def test_td3_bc_weighs_values_against_imitation(cook):
    module = cook("ddpg_td3_bc")
    q_value, action = torch.tensor([[1.0, -3.0]], requires_grad=True), torch.tensor([[0.5], [0.0]])
    loss = module.imitating_actor_loss(q_value, action, torch.tensor([[1.0], [0.0]]), 2.5)
    assert float(loss.detach()) == pytest.approx(0.25 / 2 - 2.5 / 2 * (1 - 3) / 2)
    loss.backward()
    assert q_value.grad.tolist() == [pytest.approx([-0.625, -0.625])], "the mean of |Q| is a constant"


def test_td3_bc_learns_what_pays_from_data_alone(cook, tmp_path):
    """With the values weighed by 0 it imitates, and random actions mean nothing."""
    module, right = cook("ddpg_td3_bc"), {}
    half_right()
    for alpha in (0.0, 10.0):
        run = offline(module, tmp_path / str(alpha), bc_alpha=alpha, total_timesteps=500, learning_rate=3e-3)
        policy, obs = module.load_policy(run), np.load("data.npz")["obs"]
        right[alpha] = np.mean([policy(x)[0] * np.sign(x[0]) for x in obs])
    assert right[10.0] > 0.4 > 0.15 > abs(right[0.0])
    assert probe_envs.Walk.count["rollout"] == 0


def test_td3_bc_knows_the_data_as_networks_see_them_and_resumes(cook, tmp_path, monkeypatch):
    module, batches = cook("ddpg_td3_bc"), []
    half_right()
    loss = module.critic_loss
    monkeypatch.setattr(module, "critic_loss", lambda q, y: batches.append(y.clone()) or loss(q, y))
    run = offline(module, tmp_path / "run", normalize_obs=True, total_timesteps=64)
    state, file = checkpoint(run), np.load("data.npz")
    assert np.allclose(state["agent"]["obs_norm.mean"], file["obs"].mean(0))
    for name in ("obs", "action", "reward", "next_obs", "terminated"):
        assert np.allclose(state["buffer"][name], file[name])
    assert len(batches) == 64 and {x for y in batches for x in y.tolist()} <= set(
        file["reward"].astype(np.float32)
    )
    module.train(module.parse_args(["--resume", str(run), "--total-timesteps", "96"]))
    assert len(batches) == 96 and checkpoint(run)["run"]["env_steps"] == 96


def test_td3_bc_takes_nested_observations_as_gymnasium_flattens_them(cook, tmp_path):
    module, env = cook("ddpg_td3_bc"), probe_envs.Spaces("nested_image", "box")
    env.observation_space.seed(0)
    raw = [env.observation_space.sample() for _ in range(20)]
    flat, kwargs = (
        np.stack([flatten(env.observation_space, x) for x in raw]),
        dict(obs="nested_image", action="box"),
    )
    half_right(obs=flat, next_obs=flat, action=np.zeros((20, 2)), reward=np.zeros(20), terminated=np.ones(20))
    where = dict(env_kwargs=kwargs, dataset="data.npz", num_envs=1, buffer_size=40, learning_starts=10**6)
    run = runs(module, tmp_path / "run", "probe_envs:Spaces-v0", **where)
    to_array, _ = module.observation_map(env.observation_space)
    assert np.allclose(checkpoint(run)["buffer"]["obs"], np.stack([to_array(x) for x in raw]))


@pytest.mark.parametrize("changes, words", [
    (dict(obs=np.zeros((400, 3))), "cannot learn from data.npz"), (dict(terminated=None), "terminated"),
    (dict(reward=np.full(400, np.nan)), "not finite"), (dict(buffer_size=100), "--buffer-size"),
    (dict(num_envs=2), "--num-envs"), (dict(n_step=3), "--n-step"), (dict(dataset="no.npz"), "no.npz"),
    (dict(reward=np.zeros(1)), "different lengths"),
])  # fmt: skip
def test_td3_bc_refuses_what_does_not_fit(cook, tmp_path, changes, words):
    options = {
        name: changes.pop(name) for name in {"buffer_size", "num_envs", "n_step", "dataset"} & {*changes}
    }
    module = cook("ddpg_td3_bc")
    half_right(**changes)
    with pytest.raises(module.UsageError, match=words):
        offline(module, tmp_path / "run", **options)
