"""Trust Region Policy Optimization (Schulman et al. 2015, arXiv 1502.05477): the policy takes the step along
the natural gradient that is as long as a limit on the KL divergence to the old policy allows.

    problem    max L = E[r_t A_t], r_t = pi(a_t | s_t) / pi_old(a_t | s_t), so that KL <= max_kl     (eq. 14)
    direction  H s = g, g the gradient of L, H the Hessian of KL = E[KL(pi_old(. | s_t) || pi(. | s_t))]
    step       sqrt(2 max_kl / (s^T H s)) s, shrunk until L rises and KL <= max_kl
    advantage  A_t = sum_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t)  (GAE)

Differences from the paper:
 1. Advantages are those of GAE with a value network, normalized over the rollout; those of the paper are sums
    of rewards. The critic is fitted by minibatches of Adam, or by L-BFGS.
 2. H is the Hessian of the mean KL over all steps, by double backward, plus hvp_damping times the identity.
 3. A time limit is no termination: A_t bootstraps from V of the true final observation.
 4. Box actions are Gaussian with one standard deviation per dimension, on [-1, 1] stretched to the bounds of
    the space; they are clipped only on their way into the environment.

    python algos/trpo.py --env-id CartPole-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import atexit, contextlib, csv, importlib.util, io, itertools, json, math, multiprocessing, os, platform
import random, re, shlex, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # run
    seed: int = 1  # seed of everything random
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where networks live; auto: cuda if there is one
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder to continue
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to play and score, without training
    checkpoint_every: int = 50_000  # environment steps between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of one evaluation
    capture_video: bool = False  # film an episode of each evaluation
    render: bool = False  # show an episode of each evaluation in a window
    track: Literal["none", "wandb", "trackio"] = "none"  # also log to this service
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: str = "{}"  # JSON object of arguments for the environment, besides the tuned ones
    num_envs: int = 4  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    max_episode_steps: int = 0  # time limit of an episode; 0: the environment's own
    stop_return: float | None = None  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: int = 200_000  # environment steps, rounded up to whole rollouts
    episodes_per_update: int = 8  # complete episodes in a rollout, the same number from each environment
    noise_steps: int = 1  # steps for which the noise of an action is kept, to explore by longer moves
    max_kl: float = 0.01  # limit of the mean KL divergence from the old to the new policy
    cg_iterations: int = 10  # of the conjugate gradient method
    cg_tolerance: float = 1e-10  # squared norm of the residual at which it ends
    hvp_damping: float = 1e-5  # times the identity, added to the Hessian
    backtrack_ratio: float = 0.8  # by which a step that is refused is shrunk
    max_backtracks: int = 15  # steps that are tried
    value_optimizer: Literal["adam", "lbfgs"] = "adam"  # what fits the critic; lbfgs: value_epochs iterations
    learning_rate: float = 1e-3  # step size of the update
    value_epochs: int = 10  # passes of the critic over each rollout
    value_minibatches: int = 16  # gradient steps of the critic in each pass
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.98  # lambda of the advantage; 1: returns to the end of the rollout, then V
    normalize_advantage: bool = True  # to mean 0 and standard deviation 1 in each minibatch
    positive_adv: bool = False  # advantages minus the smallest one, so that none is negative
    entropy_coef: float = 0.0  # c_2, weight of the entropy
    entropy_method: Literal["none", "regularized", "max"] = "regularized"  # add it to: nothing, loss, rewards
    softplus_entropy: bool = False  # softplus(entropy), never negative, in place of the entropy
    stop_entropy_gradient: bool = False  # no gradient through the entropy; max needs it
    hidden_sizes: tuple[int, ...] = (64, 64)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the hidden layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# Own trials, results in benchmark/results; LunarLander: one seed. MuJoCo was not run: steps, lambda, damping,
# critic and normalizer are those of RL Baselines3 Zoo's trpo.yml.
TUNED = {
    "CartPole-v1": dict(total_timesteps=100_000),
    "Acrobot-v1": dict(total_timesteps=100_000, episodes_per_update=4, value_epochs=20, normalize_obs=True),
    "Pendulum-v1": dict(total_timesteps=100_000, gamma=0.95, value_epochs=20),
    "MountainCarContinuous-v0": dict(total_timesteps=50_000, num_envs=1, episodes_per_update=2,
                                     noise_steps=16, value_epochs=20, normalize_obs=True),
    "LunarLander-v3": dict(total_timesteps=200_000, hvp_damping=0.01, value_epochs=15, eval_every=20_000),
    "mujoco": dict(total_timesteps=1_000_000, num_envs=2, episodes_per_update=2, gae_lambda=0.95,
                   hvp_damping=0.1, value_epochs=20, normalize_obs=True, eval_every=50_000),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_mlp(width, hidden_sizes, activation):
    """Vectors (B, width) to features (B, hidden_sizes[-1])."""
    nonlinearity = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}[activation]
    layers = []
    for size in hidden_sizes:
        layers += [orthogonal(nn.Linear(width, size)), nonlinearity()]
        width = size
    return nn.Sequential(*layers)


class CategoricalHead(nn.Module):
    """K independent choices among up to N (Discrete: K = 1). Logits (B, K, N), actions (B, K)."""

    def __init__(self, fan_in, space):
        super().__init__()
        choices = torch.tensor([space.n] if isinstance(space, Discrete) else space.nvec)
        exists = torch.arange(choices.max()) < choices[:, None]  # (K, N)
        self.exists, self.ragged = exists.numpy(), not exists.all()
        self.logits = orthogonal(nn.Linear(fan_in, exists.numel()), gain=0.01)

    def forward(self, features, mask=None):
        logits = self.logits(features).view(-1, *self.exists.shape)
        return logits if mask is None else logits.masked_fill(~mask, -1e8)

    def mask(self, info, num_envs):
        """Legal actions (num_envs, K, N): info["action_mask"] lists them choice by choice. None: all are."""
        if "action_mask" not in info:
            return np.tile(self.exists, (num_envs, 1, 1)) if self.ragged else None
        mask = np.zeros((num_envs, *self.exists.shape), dtype=bool)
        mask[:, self.exists] = info["action_mask"]
        return mask

    def noise(self, *shape):
        """Gumbel noise (*shape, K, N): the argmax of logits + noise is a draw from softmax(logits)."""
        return np.random.gumbel(size=(*shape, *self.exists.shape)).astype(np.float32)

    def sample(self, logits, mask, noise):
        """Actions (B, K) on the host; noise 0: the most likely ones."""
        logits = logits.reshape(-1, *self.exists.shape) + noise
        return (logits if mask is None else np.where(mask, logits, -np.inf)).argmax(-1)

    def log_prob(self, logits, action):
        surprise = F.cross_entropy(logits.flatten(0, 1), action.flatten(), reduction="none")
        return -surprise.view_as(action).sum(-1)  # (B,)

    def entropy(self, logits):
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum((-2, -1))  # (B,)


class GaussianHead(nn.Module):
    """Box actions (B, A): their mean from the features, and one free log standard deviation per dimension."""

    def __init__(self, fan_in, space):
        super().__init__()
        self.mean = orthogonal(nn.Linear(fan_in, space.shape[0]), gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(space.shape[0]))

    def forward(self, features, mask=None):
        return self.mean(features)

    def mask(self, info, num_envs):
        return None

    def noise(self, *shape):
        """Noise (*shape, A) with the standard deviations of the policy."""
        std = self.log_std.detach().exp().cpu().numpy()
        return std * np.random.standard_normal((*shape, len(std))).astype(np.float32)

    def sample(self, mean, mask, noise):
        return mean + noise  # (B, A) on the host; noise 0: the mean

    def log_prob(self, mean, action):
        z = (action - mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)  # (B,)

    def entropy(self, mean):
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(mean))  # (B,)


class ActorCritic(nn.Module):
    """Policy and value of observations (B, D), in separate networks."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else None
        self.actor_trunk = make_mlp(obs_space.shape[0], args.hidden_sizes, args.activation)
        self.critic_trunk = make_mlp(obs_space.shape[0], args.hidden_sizes, args.activation)
        head = GaussianHead if isinstance(action_space, Box) else CategoricalHead
        self.head = head(args.hidden_sizes[-1], action_space)
        self.critic = orthogonal(nn.Linear(args.hidden_sizes[-1], 1), gain=1.0)

    def normalize(self, obs):
        return obs if self.obs_norm is None else self.obs_norm(obs)

    def value(self, obs):
        return self.critic(self.critic_trunk(self.normalize(obs))).squeeze(-1)  # (B,)

    def forward(self, obs, action, mask=None):
        """Log-probability of the actions (B,), logits or mean of the policy."""
        policy = self.head(self.actor_trunk(self.normalize(obs)), mask)
        return self.head.log_prob(policy, action), policy


# -------------------------------------------------------------------------------------------- learning rule
def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16; PPO eq. 11, 12).

    All inputs and the result are (num_steps, num_envs). next_values[t] is V of the true successor of step t,
    also of a final observation. A termination ends the return, a truncation only the recursion.
    """
    td_error = rewards + gamma * (1 - terminated) * next_values - values
    decay = gamma * gae_lambda * (1 - done)
    advantages, advantage = [], torch.zeros_like(td_error[0])
    for delta, factor in zip(td_error.flip(0), decay.flip(0), strict=True):  # from the last step to the first
        advantage = delta + factor * advantage
        advantages.append(advantage)
    return torch.stack(advantages).flip(0)


def entropy_bonus(entropy, softplus):
    """The entropy, or softplus(entropy): that of a narrow Gaussian is negative, its softplus is not."""
    return F.softplus(entropy) if softplus else entropy


def surrogate(log_prob, old_log_prob, advantage):
    """L of TRPO eq. 14, the mean of ratio times advantage (B,); at the old policy with the gradient of J."""
    return ((log_prob - old_log_prob).exp() * advantage).mean()


def mean_kl(head, policy, old_policy, old_log_std):
    """Mean over states of KL(old || new), exact. Policies are logits (B, K, N) or means (B, A)."""
    if isinstance(head, GaussianHead):
        shift, spread = (old_policy - policy) * (-head.log_std).exp(), 2 * (old_log_std - head.log_std)
        return 0.5 * (shift.square() + spread.exp() - 1 - spread).sum(-1).mean()
    old_log_probs, log_probs = old_policy.log_softmax(-1), policy.log_softmax(-1)
    return (old_log_probs.exp() * (old_log_probs - log_probs)).sum((-2, -1)).mean()


def flatten(tensors):
    return torch.cat([x.reshape(-1) for x in tensors])


def hessian_product(value, parameters, damping):
    """v -> (H + damping I) v, H the Hessian of value: H v is the gradient of (gradient of value)^T v."""
    gradient = flatten(torch.autograd.grad(value, parameters, create_graph=True))
    return lambda v: flatten(torch.autograd.grad(gradient @ v, parameters, retain_graph=True)) + damping * v


def conjugate_gradient(product, b, iterations, tolerance):
    """x with A x = b, for a positive definite A of which only product(v) = A v is known (Hestenes and Stiefel
    1952). Ends when the squared norm of the residual is at most tolerance."""
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    squared = residual @ residual
    for _ in range(iterations):
        if squared <= tolerance:
            break
        image = product(direction)
        length = squared / (direction @ image)
        x, residual = x + length * direction, residual - length * image
        previous, squared = squared, residual @ residual
        direction = residual + squared / previous * direction
    return x


@torch.no_grad()
def line_search(parameters, step, measure, objective, max_kl, backtrack_ratio, max_backtracks):
    """Shrinks step until it raises the objective and keeps KL <= max_kl; measure() gives both.

    If no step does, the parameters stay as they were, bit for bit. Returns the share of step that was taken,
    0 for none, and the objective and KL that it led to.
    """
    start, share = flatten(parameters), 1.0
    for _ in range(max_backtracks):
        assign(parameters, start + share * step)
        new_objective, kl = measure()
        if kl <= max_kl and new_objective > objective:
            return share, new_objective, kl
        share *= backtrack_ratio
    assign(parameters, start)
    return 0.0, objective, torch.zeros_like(objective)


def assign(parameters, vector):
    """Writes the vector into the parameters, in the order of flatten."""
    for parameter, x in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(x.view_as(parameter))


# ------------------------------------------------------------------------------------------------- training
def episodes_of_each(args):
    """How many episodes each environment plays in a rollout: the same number, and those that are done wait.
    To take the first episodes that end, whichever environment played them, would favour the short ones."""
    if args.episodes_per_update % args.num_envs:
        numbers = f"{args.episodes_per_update} must be a multiple of --num-envs {args.num_envs}"
        raise UsageError(f"--episodes-per-update {numbers}: all environments play the same number")
    if not args.max_episode_steps and gym.spec(args.env_id.split(":")[-1]).max_episode_steps is None:
        raise UsageError(f"{args.env_id} has no time limit and might never end: give --max-episode-steps")
    return args.episodes_per_update // args.num_envs


def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, obs, info = start_segment(args, env_steps=0)
    if is_image(envs.single_observation_space):
        raise UsageError(f"{args.env_id} observes images: a2c.py and ppo.py have a CNN for them")
    share = episodes_of_each(args)
    if args.entropy_method == "max" and (args.normalize_advantage or not args.stop_entropy_gradient):
        raise UsageError("--entropy-method max needs --no-normalize-advantage and --stop-entropy-gradient")
    if args.entropy_method == "regularized" and args.entropy_coef and args.stop_entropy_gradient:
        raise UsageError("--stop-entropy-gradient leaves --entropy-method regularized without effect")
    agent = ActorCritic(envs.single_observation_space, envs.single_action_space, args).to(device)
    critic = [p for name, p in agent.named_parameters() if name.startswith("critic")]
    actor = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
    critic_optimizer = torch.optim.Adam(critic, args.learning_rate, fused=True)

    host_policy = on_host(agent.obs_norm, agent.actor_trunk, agent.head)

    def act(obs, info, noise=0.0):
        """Actions (B, K or A), drawn with noise from the head; noise 0 acts greedily."""
        return agent.head.sample(host_policy(obs), agent.head.mask(info, len(obs)), noise)

    def update(batch):
        """One step of the policy on whole episodes, (B, ...) tensors of their steps."""
        advantage = batch["advantage"]
        if args.normalize_advantage and len(advantage) > 1:
            std, mean = torch.std_mean(advantage)
            advantage = (advantage - mean) / (std + 1e-8)
        if args.positive_adv:
            advantage = advantage - advantage.min()
        old_log_std = agent.head.log_std.detach().clone() if isinstance(agent.head, GaussianHead) else None
        with torch.no_grad():
            old_log_prob, old_policy = agent(batch["obs"], batch["action"], batch.get("mask"))

        def measure():
            """What is maximized and what is limited."""
            log_prob, policy = agent(batch["obs"], batch["action"], batch.get("mask"))
            objective = surrogate(log_prob, old_log_prob, advantage)
            if args.entropy_coef and args.entropy_method == "regularized":
                bonus = entropy_bonus(agent.head.entropy(policy), args.softplus_entropy)
                objective = objective + args.entropy_coef * bonus.mean()
            return objective, mean_kl(agent.head, policy, old_policy, old_log_std)

        objective, kl = measure()
        gradient = flatten(torch.autograd.grad(objective, actor, retain_graph=True))
        product = hessian_product(kl, actor, args.hvp_damping)
        direction = conjugate_gradient(product, gradient, args.cg_iterations, args.cg_tolerance)
        length = (2 * args.max_kl / (direction @ product(direction)).clamp(min=1e-30)).sqrt()
        step = length * direction  # without a gradient it is 0, and refused
        search = args.max_kl, args.backtrack_ratio, args.max_backtracks
        share, new_objective, new_kl = line_search(actor, step, measure, objective.detach(), *search)
        return {
            "loss/policy": -objective.detach(), "grad/norm": gradient.norm(), "policy/kl_before": kl.detach(),
            "policy/kl": new_kl, "policy/accepted": float(share > 0), "policy/step_share": share,
            "policy/expected_improvement": gradient @ step * (share or 1.0),
            "policy/improvement": new_objective - objective.detach(), "policy/log_prob": old_log_prob.mean(),
            "policy/entropy": agent.head.entropy(old_policy).mean(),
        }  # fmt: skip

    def update_critic(batch):
        """value_epochs passes of Adam, or as many iterations of L-BFGS. Returns the mean loss."""
        losses = []

        def loss(rows=slice(None)):
            losses.append(0.5 * F.mse_loss(agent.value(batch["obs"][rows]), batch["return"][rows]))
            critic_optimizer.zero_grad()
            losses[-1].backward()
            return losses[-1].detach()

        if args.value_optimizer == "lbfgs":
            torch.optim.LBFGS(critic, max_iter=args.value_epochs, line_search_fn="strong_wolfe").step(loss)
        for _ in range(args.value_epochs if args.value_optimizer == "adam" else 0):
            for rows in torch.randperm(len(batch["obs"]), device=device).chunk(args.value_minibatches):
                loss(rows)
                critic_optimizer.step()
        return {"loss/value": torch.stack(losses).detach().mean()} if losses else {}

    run = Run(args, agent, critic_optimizer=critic_optimizer)
    while run.proceed(act):
        if run.new_segment:
            envs, obs, info = start_segment(args, run.env_steps, envs)
        else:
            obs, info = envs.reset()

        # Act and step until every environment has played its share; the others step on, unseen.
        steps, left = [], np.full(args.num_envs, share)
        while (playing := left > 0).any():
            mask = agent.head.mask(info, args.num_envs)
            step = dict(obs=obs, playing=playing) | ({} if mask is None else dict(mask=mask))
            if len(steps) % args.noise_steps == 0:
                noise = agent.head.noise(args.num_envs)
            action = act(obs, info, noise)
            next_obs, reward, terminated, truncated, info = envs.step(action.reshape(envs.action_space.shape))
            done = terminated | truncated
            step |= dict(action=action, next_obs=next_obs, reward=reward, terminated=terminated, done=done)
            steps.append(step)
            run.count(reward, done, playing)
            left = left - done
            obs, info = reset_done(envs, next_obs, info, done)

        # Advantages. The steps of environments that waited are left out of all that follows.
        rollout = {name: to_tensor(np.stack([step[name] for step in steps]), device) for name in steps[0]}
        batch = {name: x[rollout["playing"]] for name, x in rollout.items()}
        finite = {"observation": batch["next_obs"], "reward": batch["reward"]}
        run.check_finite(**{name: x.numpy(force=True) for name, x in finite.items()})
        reward, terminated, done = (rollout[name].float() for name in ("reward", "terminated", "done"))
        with torch.no_grad():
            if args.entropy_method == "max":  # the entropy is part of what is earned
                _, policy = agent(batch["obs"], batch["action"], batch.get("mask"))
                bonus = entropy_bonus(agent.head.entropy(policy), args.softplus_entropy)
                reward[rollout["playing"]] += args.entropy_coef * bonus
            value = agent.value(rollout["obs"].flatten(0, 1)).view_as(reward)
            next_value = agent.value(rollout["next_obs"].flatten(0, 1)).view_as(reward)
        advantage = compute_gae(reward, value, next_value, terminated, done, args.gamma, args.gae_lambda)
        batch["advantage"], batch["return"] = (x[rollout["playing"]] for x in (advantage, advantage + value))

        # Update
        run.log(update(batch))
        unexplained, variance = (batch[name].var(correction=0) for name in ("advantage", "return"))
        explained = 1 - unexplained / variance.clamp(min=1e-8)
        run.log(update_critic(batch) | {"value/explained_variance": explained})
        if args.normalize_obs:
            agent.obs_norm.update(batch["obs"])

        # Log
        run.log({"reward/mean": batch["reward"].mean(), "reward/max": batch["reward"].max()})
    envs.close()
    return run.close()


# ------------------------------------------------------------------ utilities, the same text in every script
class UsageError(ValueError):
    """A mistake of the user: main prints it in one line and exits with code 2."""


def run_folder(path: str) -> Path:
    """The run folder that path is or lies in."""
    for folder in (Path(path), *Path(path).parents):
        if (folder / "args.json").is_file():
            return folder
    raise UsageError(f"{path} is no run: give a folder with args.json, as runs/CartPole-v1/ppo/1-20270131")


def env_family(env_id: str) -> str:
    """classic, toy_text, box2d, mujoco or atari for environments of Gymnasium and ale-py; else empty."""
    entry = str(gym.registry[env_id].entry_point) if env_id in gym.registry else ""
    family = re.match(r"gymnasium\.envs\.(classic|toy_text|box2d|mujoco)", entry)
    return "atari" if env_id.startswith("ALE/") else family[1] if family else ""


def parse_args(argv: list[str] | None = None) -> Args:
    """Command line > the run of --resume or --evaluate > TUNED[env id] > TUNED[family] > Args."""
    argv = sys.argv[1:] if argv is None else argv
    words = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    early = {flag.replace("_", "-"): value for flag, value in zip(words, words[1:], strict=False)}
    if run := early.get("--resume") or early.get("--evaluate"):
        saved = run_folder(run) / "args.json"
        try:
            defaults = json.loads(saved.read_text()) | {"resume": "", "evaluate": ""}
            defaults = Args(**{name: tuple(v) if isinstance(v, list) else v for name, v in defaults.items()})
        except (TypeError, json.JSONDecodeError) as error:
            raise UsageError(f"{saved} is not of this script: {error}") from None
    else:
        env_id = early.get("--env-id", Args.env_id)
        defaults = Args(**TUNED.get(env_family(env_id), {}) | TUNED.get(env_id, {}))
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            summary = __doc__.partition("\n\n")[0]
            args = tyro.cli(Args, args=argv, default=defaults, description=summary)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        text = message.getvalue().partition("For full helptext")[0]
        raise UsageError(" ".join(re.sub(r"[─-╿]|Parsing error", " ", text).split())) from None
    with contextlib.suppress(TypeError, ValueError):  # of what is no JSON object make_envs tells
        args.env_kwargs = json.dumps(json.loads(defaults.env_kwargs) | json.loads(args.env_kwargs))
    return args


def set_up(args) -> torch.device:
    """Checks the arguments, sets the threads of torch and picks the device."""
    counts = """eval_episodes num_envs total_timesteps num_steps update_epochs num_minibatches hidden_sizes
                n_step batch_size buffer_size train_every updates_per_train target_update_every policy_delay
                episodes_per_update population episodes_per_member value_minibatches cg_iterations grid_size
                log_every noise_steps"""
    shares = """gamma gae_lambda tau epsilon_start epsilon_end epsilon_min epsilon_decay exploration_fraction
                per_alpha per_beta_start backtrack_ratio"""
    signed = "stop_return target_entropy obs_low obs_high"
    for name, value in vars(args).items():
        low = 1 if name in counts.split() else -math.inf if name in signed.split() else 0
        high = 1 if name in shares.split() else math.inf
        if name == "hidden_sizes" and not value:
            raise UsageError("--hidden-sizes is empty: give the width of at least one layer")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not low <= number <= high:
                limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise UsageError(f"--{name.replace('_', '-')} is {number}; it must be {limit}")
    if args.resume and args.evaluate:
        raise UsageError("--resume trains on and --evaluate only plays: give one of them")
    if args.stop_return is not None and not args.eval_every:
        raise UsageError("--stop-return looks at evaluations: it needs --eval-every above 0")
    if args.track != "none" and not importlib.util.find_spec(args.track):
        raise UsageError(f"--track {args.track} needs a package that is missing: pip install {args.track}")
    if args.render and sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        raise UsageError("--render needs a display and there is none; --capture-video writes a film")
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = args.device if args.device != "auto" else "cuda" if found["cuda"] else "cpu"
    if not found[device]:
        raise UsageError(f"--device {device}: torch finds none here; --device cpu always works")
    return torch.device(device)


def is_image(space: gym.Space) -> bool:
    """Boxes of 2 or 3 dimensions, but for those with a side too short to convolve."""
    if not isinstance(space, Box) or len(space.shape) not in (2, 3):
        return False
    return min(space.shape[:2] if channels_last(space) else space.shape[-2:]) >= 5


def channels_last(space: Box) -> bool:
    """Images (H, W, C), not (C, H, W) or (H, W)."""
    return len(space.shape) == 3 and space.shape[-1] == min(space.shape)


def has_image(space: gym.Space) -> bool:
    """Whether it is one or has one anywhere inside."""
    parts = space.values() if isinstance(space, Dict) else space if isinstance(space, Tuple) else ()
    return is_image(space) or any(map(has_image, parts))


def standardize(env: gym.Env) -> gym.Env:
    """Leaves few spaces to the algorithm. Observations: float vectors or images (C, H, W). Actions: Discrete
    or MultiDiscrete from 0, or a flat Box: bounded dimensions become [-1, 1], what exceeds them is cut."""
    name, space, actions = env.spec.id, env.observation_space, env.action_space
    if has_image(space) and not is_image(space):
        raise UsageError(f"{name} has an image inside a {type(space).__name__}: wrap it to observe only that")
    if isinstance(space, Text) or not space.is_np_flattenable:
        raise UsageError(f"{name} observes {space}, which has no fixed size: wrap it to give a Box")
    if not is_image(space):
        if not isinstance(space, Box) or len(space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        if env.observation_space.dtype not in (np.float32, np.float64):
            env = gym.wrappers.DtypeObservation(env, np.float32)
    elif len(space.shape) == 2 or channels_last(space):
        turn = lambda x: x[None] if x.ndim == 2 else np.moveaxis(x, -1, 0)
        turned = Box(turn(space.low), turn(space.high), dtype=space.dtype)
        env = gym.wrappers.TransformObservation(env, turn, turned)
    if isinstance(actions, Discrete) and actions.start == 0 and actions.dtype == np.int64:
        return env
    if isinstance(actions, Box):
        whole, wide = actions.dtype.kind in "iu", np.result_type(actions.dtype, np.float32)
        low, high = actions.low.ravel().astype(wide), actions.high.ravel().astype(wide)
        bounded = np.isfinite(low) & np.isfinite(high)
        left, right = np.where(bounded, low, -1), np.where(bounded, high, 1)  # the rest stays as it is
        center, scale = (left + right) / 2, (right - left) / 2
        unit = Box(*np.float32([np.where(bounded, -1, -np.inf), np.where(bounded, 1, np.inf)]))
        cut = lambda a: np.minimum(np.maximum(center + scale * a, low), high)  # faster than np.clip
        convert = (lambda a: np.rint(cut(a))) if whole else cut
    elif isinstance(actions, (Discrete, MultiDiscrete)):
        unit = Discrete(actions.n) if isinstance(actions, Discrete) else MultiDiscrete(actions.nvec.ravel())
        convert = lambda a: a + np.ravel(actions.start)
    elif isinstance(actions, MultiBinary):
        unit, convert = MultiDiscrete(np.full(actions.shape, 2).ravel()), lambda a: a
    else:
        raise UsageError(f"{name} takes {actions}: use Discrete, MultiDiscrete, MultiBinary or Box actions")
    to_env = lambda a: convert(a).reshape(actions.shape).astype(actions.dtype, copy=False)
    return gym.wrappers.TransformAction(env, to_env, unit)


MAKE_ERRORS = gym.error.Error, ImportError, TypeError, ValueError, LookupError, OSError, AssertionError


def make_envs(args, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """num_envs environments with standard spaces. Episodes end explicitly: reset_done follows every step."""
    atari = args.env_id.startswith("ALE/")

    def make_env() -> gym.Env:
        if multiprocessing.parent_process():  # in a worker of async_envs: the parent decides when to stop
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        return standardize(gym.make(args.env_id, **kwargs))

    try:
        extra = json.loads(args.env_kwargs)
        if not isinstance(extra, dict):
            raise TypeError('--env-kwargs must be a JSON object such as {"gravity": 9.8}')
        if args.max_episode_steps and atari:  # ale-py counts frames
            kwargs["max_num_frames_per_episode"] = extra.get("frameskip", 4) * args.max_episode_steps
        elif args.max_episode_steps:
            kwargs["max_episode_steps"] = args.max_episode_steps
        kwargs |= extra
        if atari:
            if not extra.get("grayscale", True) or extra.get("continuous"):
                raise TypeError("of Atari games only grayscale images and discrete actions are learned from")
            gym.register_envs(importlib.import_module("ale_py"))
            return gym.make_vec(args.env_id, num_envs, "vector_entry_point", reward_clipping=False, **kwargs)
        if os.getcwd() not in sys.path:  # so that module:Env-v0 finds a module where the user is
            sys.path.append(os.getcwd())
        vector = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
        envs = vector([make_env] * num_envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
        if args.async_envs:  # a run that ends early must not leave its workers to complain
            atexit.register(envs.close)
        return envs
    except UsageError:
        raise
    except MAKE_ERRORS as error:
        what = f"--env-id {args.env_id} --env-kwargs '{args.env_kwargs}'"
        raise UsageError(f"cannot make {what}: {' '.join(str(error).split()) or repr(error)}") from None


def reset_done(envs, next_obs: np.ndarray, info: dict, done: np.ndarray) -> tuple[np.ndarray, dict]:
    """Starts new episodes where done. Returns what the policy acts from; next_obs is the true successor."""
    if not done.any():
        return next_obs, info
    obs, reset_info = envs.reset(options={"reset_mask": done})
    if "action_mask" in info:
        new_mask = reset_info.get("action_mask", np.ones_like(info["action_mask"]))  # no mask: all are legal
        reset_info["action_mask"] = np.where(done[:, None], new_mask, info["action_mask"])
    return obs, reset_info


def start_segment(args, env_steps: int, old_envs=None) -> tuple[gym.vector.VectorEnv, np.ndarray, dict]:
    """New environments, and everything random seeded from (seed, env_steps).

    A segment starts after every checkpoint, and when one is loaded: what follows depends on the checkpoint
    alone, so a resumed run repeats an uninterrupted one bit for bit. Episodes in progress count as truncated.
    """
    if old_envs is not None:
        old_envs.close()
        atexit.unregister(old_envs.close)
    seed = int(np.random.SeedSequence([args.seed, env_steps]).generate_state(1)[0] >> 2)  # ale-py: 30 bits
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    envs = make_envs(args, args.num_envs)
    envs.action_space.seed(seed)
    return envs, *envs.reset(seed=seed)


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device; float64 becomes float32 on the way."""
    return torch.as_tensor(array, dtype=torch.float32 if array.dtype == np.float64 else None, device=device)


class RunningNorm(nn.Module):
    """(x - mean) / standard deviation of all x that update has seen, clipped to +-10."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, x: torch.Tensor) -> None:
        """Adds a batch (B, *shape), merging the moments (Chan et al. 1983)."""
        var, mean = torch.var_mean(x.float(), dim=0, correction=0)
        self.count += len(x)
        share, delta = len(x) / self.count, mean - self.mean
        self.var.lerp_(var, share).add_(delta.square() * share * (1 - share))
        self.mean.lerp_(mean, share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.float() - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


HOST_LAYERS = {  # what NumPy does for them, from x and the tensors of the layer
    nn.Linear: lambda x, weight, bias: x @ weight.T + bias,
    nn.Tanh: np.tanh,
    nn.ReLU: lambda x: np.maximum(x, 0),
    RunningNorm: lambda x, mean, var, count: ((x - mean) / np.sqrt(var + 1e-8)).clip(-10, 10),
}


def on_host(*modules: nn.Module | None) -> Callable[[np.ndarray], np.ndarray]:
    """The modules in a row, those that are not None, as a function of arrays (B, ...) for acting.

    On the CPU it runs in NumPy, on the very memory of the weights: with the few rows of a step torch spends
    its time on calls and takes thrice as long. On a GPU, or with other layers than those above, torch runs.
    It sees layers, not what a changed forward does between them, so now and then torch checks the result.
    """
    chain = nn.Sequential(*(module for module in modules if module is not None))
    layers = [layer for layer in chain.modules() if not list(layer.children())]
    device = next(chain.parameters()).device

    @torch.inference_mode()
    def run_torch(x):
        return chain(to_tensor(x, device)).cpu().numpy()

    if device.type != "cpu" or not all(type(layer) in HOST_LAYERS for layer in layers):
        return run_torch
    tensors = [[x.numpy() for x in layer.state_dict().values()] for layer in layers]
    calls = itertools.count()

    def run(obs):
        x = obs.astype(np.float32, copy=False)
        for layer, values in zip(layers, tensors, strict=True):
            x = HOST_LAYERS[type(layer)](x, *values)
        if next(calls) % 1000 == 0 and np.isfinite(x).all():
            error = np.abs(x - run_torch(obs).reshape(x.shape)).max()
            if error > 1e-3 * max(1, np.abs(x).max()):
                raise RuntimeError("a forward does more than its layers: let on_host return run_torch")
        return x

    return run


STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
LOAD_ERRORS = (
    OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
EVALUATION_SEED = 10_000_000


class Film:
    """Frames of the first environment of an evaluation, for an mp4 (VP9: browsers play it) and a window."""

    def __init__(self, args, path: Path | None):
        self.args, self.path, self.writer, self.twin = args, path, None, None
        if args.env_id.startswith("ALE/"):  # cannot render as a vector: a twin in colour plays the same game
            self.twin = make_envs(args, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)

    def shoot(self, envs, actions: np.ndarray | None = None) -> None:
        """Takes the frame after actions; without them, that of the reset."""
        if self.twin is None:
            frame, fps = None, envs.metadata.get("render_fps") or 30
            with contextlib.suppress(NotImplementedError):  # of gym.Env.render, where nobody wrote another
                frame = envs.envs[0].render()
            if not isinstance(frame, np.ndarray) or (frame.dtype, frame.ndim) != (np.uint8, 3):
                raise UsageError(f"{self.args.env_id} cannot be filmed: it renders no bytes (H, W, 3)")
        else:
            start = actions is None
            obs = (self.twin.reset(seed=EVALUATION_SEED) if start else self.twin.step(actions[:1]))[0]
            frame, fps = obs[0, 0], 15
        frame = np.ascontiguousarray(frame[..., ::-1])  # OpenCV wants blue first
        if self.path and self.writer is None:
            self.path.parent.mkdir(exist_ok=True)
            codec, part = cv2.VideoWriter_fourcc(*"vp09"), str(self.path.with_suffix(".part.mp4"))
            self.writer = cv2.VideoWriter(part, codec, fps, frame.shape[1::-1])
        if self.writer:
            self.writer.write(frame)
        if self.args.render:
            cv2.imshow(self.args.env_id, frame)
            cv2.waitKey(max(1, round(1000 / fps)))  # 0 would wait for a key

    def close(self) -> None:
        if self.writer:
            self.writer.release()
            self.path.with_suffix(".part.mp4").replace(self.path)
        if self.twin:
            self.twin.close()


def evaluate(args, policy, video: Path | None = None, stopped=lambda: False) -> dict[str, np.ndarray] | None:
    """Plays eval_episodes episodes, the same at every call, in its own environments; training is untouched.

    policy maps (obs, info) to actions. Every environment plays one episode, so short ones are not favoured.
    Returns returns, discounted, lengths, terminated and success, (eval_episodes,) each, or None if stopped.
    """
    n, random_states = args.eval_episodes, (random.getstate(), np.random.get_state())
    film = Film(args, video) if video or args.render else None
    render = {"render_mode": "rgb_array"} if film and film.twin is None else {}
    envs = make_envs(replace(args, async_envs=False), n, **render)
    scores = {name: np.zeros(n) for name in ("returns", "discounted", "lengths", "terminated", "success")}
    playing, t = np.ones(n, dtype=bool), 0
    obs, info = envs.reset(seed=EVALUATION_SEED)
    if film:
        film.shoot(envs)
    while playing.any() and not stopped():
        actions = policy(obs, info).reshape(envs.action_space.shape)
        obs, reward, terminated, truncated, info = envs.step(actions)
        if film and playing[0]:
            film.shoot(envs, actions)
        scores["returns"] += reward * playing
        scores["discounted"] += args.gamma**t * reward * playing
        scores["lengths"] += playing
        scores["terminated"] += terminated & playing
        success = np.asarray(info.get("is_success", info.get("success", np.zeros(n))), dtype=bool)
        scores["success"] = np.maximum(scores["success"], success & playing)
        playing &= ~(terminated | truncated)
        obs, info = reset_done(envs, obs, info, terminated | truncated)
        t += 1
    envs.close()
    if film:
        film.close()
    random.setstate(random_states[0])
    np.random.set_state(random_states[1])
    return None if playing.any() else scores


class Run:
    """The folder of a run: counters, log, evaluations, checkpoints. `while run.proceed(policy)` trains.

    parts are all that learning depends on, objects with state_dict and load_state_dict; agent is what plays.
    """

    # The row that is not yet in the log is in the checkpoint of its step: none is lost and none doubled.
    SAVED = "env_steps seconds best logged_at evaluated_at saved_at row episodes".split()

    def __init__(self, args, agent, log_every: int = 1, **parts):
        self.args, self.agent, self.parts = args, agent, {"agent": agent, "run": self, **parts}
        self.log_every, self.next_stop = log_every, 0  # environment steps: between rows, of the next pause
        self.env_steps, self.seconds, self.best = 0, 0.0, -math.inf
        self.logged_at = self.evaluated_at = self.saved_at = -1  # env_steps of the last row, evaluation, save
        self.row, self.episodes = {}, []  # since the last row; an episode is [env_steps, return, length]
        self.episode_return, self.episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
        self.recent, self.returns, self.signal, self.started = deque(maxlen=100), None, None, False
        self.kept = "no checkpoint yet"
        limit = args.max_episode_steps or gym.spec(args.env_id.split(":")[-1]).max_episode_steps
        if not limit and env_family(args.env_id) != "atari":
            what = "evaluations wait for their episodes to end; --max-episode-steps sets a limit"
            print(f"{args.env_id} has no time limit: {what}")
        if args.capture_video or args.render:  # one frame: what cannot be filmed is refused before training
            with tempfile.TemporaryDirectory() as folder:
                film = Path(folder) / "0.mp4"
                evaluate(replace(args, eval_episodes=1, render=False), None, film, stopped=lambda: True)
        if args.resume or args.evaluate:
            self.folder = run_folder(args.resume or args.evaluate)
            self.load(Path(args.evaluate) if args.evaluate.endswith(".pt") else self.folder / "checkpoint.pt")
        if not args.evaluate:
            self.open_log(Path(sys.modules[train.__module__].__file__))

    def open_log(self, script: Path) -> None:
        args = self.args
        if not args.resume:
            name = f"{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            env = re.sub("[/:]", "-", args.env_id)
            self.folder = Path(args.run_dir or f"runs/{env}/{script.stem}/{name}")
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if any(self.folder.iterdir()):
                    raise UsageError(f"{self.folder} is not empty: choose another --run-dir, or --resume it")
                shutil.copy(script, self.folder)
            except OSError as error:
                raise UsageError(f"cannot write to --run-dir {self.folder}: {error}") from None
        ask = dict(cwd=script.parent, capture_output=True, text=True)
        has_git = shutil.which("git")
        git = lambda *words: subprocess.run(["git", *words], **ask).stdout.strip() if has_git else ""
        environment = {
            "command": sys.argv, "python": platform.python_version(), "platform": platform.platform(),
            "torch": torch.__version__, "gymnasium": gym.__version__, "numpy": np.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain")),
        }  # fmt: skip
        self.writer = SummaryWriter(str(self.folder), purge_step=self.logged_at + 1 if args.resume else None)
        for name, values in {"args": asdict(args), "environment": environment}.items():
            (self.folder / f"{name}.json").write_text(json.dumps(values, indent=2))
            text = "\n".join(f"    {key}: {value}" for key, value in values.items())
            self.writer.add_text(name, text, self.env_steps)
        self.table, self.rows, self.columns = self.folder / "progress.csv", [], []
        if args.resume and self.table.exists():
            with self.table.open(newline="") as file:  # what came after the checkpoint is done again
                self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= self.logged_at]
            self.write_table()
        self.tracker = importlib.import_module(args.track) if args.track != "none" else None
        if self.tracker:  # wandb and trackio share this interface
            identity = {"id": self.folder.name} if args.track == "wandb" else {}
            self.tracker.init(
                project="plainrl", name=self.folder.name, config=asdict(args), resume="allow", **identity
            )
        total, hide = args.total_timesteps, not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=self.env_steps, unit=" steps", disable=hide, dynamic_ncols=True)
        self.started_at = self.row_time = self.print_time = time.perf_counter()
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.signal(number, self.catch) for number in STOP_SIGNALS}

    def catch(self, number: int, frame) -> None:
        """SIGINT, SIGTERM, SIGUSR1: save and stop at the next safe point; a second SIGINT stops at once."""
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = number

    def state_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)

    def save(self, path: Path, **parts) -> bool:
        """Writes a whole file or none: a kill or a full disk leaves the previous one as it was."""
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(exist_ok=True)
            with part.open("wb") as file:
                torch.save({name: value.state_dict() for name, value in parts.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            return True
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            print(f"warning: {path} was not saved, training goes on: {error}", file=sys.stderr)
            part.unlink(missing_ok=True)
            return False

    def checkpoint(self) -> None:
        """Saves all that the run depends on, if it is sound, after what it takes for written."""
        state = self.agent.state_dict().items()
        self.check_finite(**{name: x.cpu().numpy() for name, x in state if isinstance(x, torch.Tensor)})
        self.tensorboard(SummaryWriter.flush, again=True)
        now = time.perf_counter()
        self.seconds, self.started_at = self.seconds + now - self.started_at, now
        self.saved_at = self.env_steps
        if self.save(self.folder / "checkpoint.pt", **self.parts):
            self.kept = f"the checkpoint of step {self.env_steps}"

    def tensorboard(self, write, again: bool = False) -> None:
        """Calls write(writer). A full disk ends the writer's thread; again begins another file after that."""
        try:
            if again and not self.writer:
                self.writer = SummaryWriter(str(self.folder))
            if self.writer:
                write(self.writer)
        except OSError as error:
            print(f"warning: TensorBoard's log has a gap, training goes on: {error}", file=sys.stderr)
            self.writer = None

    def load(self, path: Path) -> None:
        try:
            if damaged := zipfile.ZipFile(path).testzip():  # torch.load does not look at the check sums
                raise ValueError(f"{damaged} is damaged")
            play = bool(self.args.evaluate)  # the agent alone, without reading the rest
            state = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            if not play and state.keys() != self.parts.keys():
                raise ValueError("the parts of its training are others: keep the flags of the run")
            for name in ["agent"] if play else state:
                part = self.parts[name]
                options = [dict(group, params=None) for group in getattr(part, "param_groups", ())]
                part.load_state_dict(state[name])
                for group, option in zip(getattr(part, "param_groups", ()), options, strict=True):
                    group.update(option, params=group["params"])  # the command line wins
            self.kept = f"the checkpoint of step {self.env_steps}"
        except LOAD_ERRORS as error:
            raise UsageError(f"cannot load {path}: {' '.join(str(error).split())[:200]}") from None

    def count(self, reward: np.ndarray, done: np.ndarray, playing: np.ndarray | bool = True) -> None:
        """Counts a step of every environment that is playing; reward is as the environment gave it."""
        self.env_steps += len(reward) if playing is True else int(playing.sum())
        self.episode_return += reward * playing
        self.episode_length += playing
        for i in np.flatnonzero(done & playing):
            self.episodes.append([self.env_steps, float(self.episode_return[i]), int(self.episode_length[i])])
            self.recent.append(self.episodes[-1][1])
            self.episode_return[i], self.episode_length[i] = 0, 0

    def log(self, metrics: dict[str, torch.Tensor | float]) -> None:
        """Adds metrics to the row that is written next. Tensors are read only then, all in one transfer."""
        self.row |= metrics

    def check_finite(self, **values) -> None:
        """Stops the run before a NaN or an infinity reaches a checkpoint."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                where = f"{self.folder} has {self.kept}"
                raise FloatingPointError(f"{name} is not finite at step {self.env_steps}: stopped; {where}")

    def evaluate(self, policy) -> None:
        """Scores the policy; keeps it in models/, and in best.pt if its mean return is the best so far."""
        name = f"{Path(self.args.evaluate).stem}-{time.time():.0f}" if self.args.evaluate else self.env_steps
        video = self.folder / "videos" / f"{name}.mp4" if self.args.capture_video else None
        scores = evaluate(self.args, policy, video, lambda: self.signal)
        if scores is None:
            return
        self.evaluated_at, self.returns = self.env_steps, scores["returns"]
        for name in ("mean", "std", "min", "max"):
            self.row[f"eval/return_{name}"] = float(getattr(self.returns, name)())
        self.row["eval/episodes"] = len(self.returns)
        self.row["eval/discounted_return_mean"] = float(scores["discounted"].mean())
        self.row["eval/length_mean"] = float(scores["lengths"].mean())
        self.row["eval/termination_rate"] = float(scores["terminated"].mean())
        self.row["eval/success_rate"] = float(scores["success"].mean())
        if not self.args.evaluate:
            self.save(self.folder / "models" / f"{self.env_steps}.pt", agent=self.agent)
            if self.returns.mean() > self.best:
                self.best = float(self.returns.mean())
                self.save(self.folder / "best.pt", agent=self.agent)

    def proceed(self, policy) -> bool:
        """Between two updates: evaluates, saves and logs when due. Says whether the training goes on."""
        args = self.args
        if args.evaluate:
            self.evaluate(policy)
            for episode, return_ in enumerate(self.returns, start=1):
                print(f"episode {episode} return {return_:.1f}")
            mean, std, low, high = (getattr(self.returns, name)() for name in ("mean", "std", "min", "max"))
            over = f"over {len(self.returns)} episodes"
            print(f"return mean {mean:.5g} std {std:.5g} min {low:.5g} max {high:.5g} {over}")
            return False
        if self.started and not self.signal and self.env_steps < self.next_stop:
            self.new_segment = False
            return True
        tensors = {name: value for name, value in self.row.items() if isinstance(value, torch.Tensor)}
        values = torch.stack(list(tensors.values())).tolist() if tensors else []
        self.row |= dict(zip(tensors, values, strict=True))
        due = lambda every, last: every and self.env_steps // every > last // every
        if self.started:
            steps, seconds = self.env_steps - max(self.logged_at, 0), time.perf_counter() - self.row_time
            self.row["speed/steps_per_second"] = steps / seconds
        self.check_finite(**self.row)
        reached = lambda: args.stop_return is not None and self.best >= args.stop_return
        finished = self.env_steps >= args.total_timesteps or reached()
        if not self.signal and (due(args.eval_every, self.evaluated_at) or finished):
            try:
                self.evaluate(policy)
            except Exception:  # of the environment; the training until here is kept
                if self.started:
                    self.checkpoint()
                raise
            finished = finished or reached()
        stop = self.signal  # read once: one that comes from here on waits for the next call
        save = finished or stop or due(args.checkpoint_every, self.saved_at)
        save = save and self.env_steps > self.saved_at
        if save:
            self.checkpoint()
        self.new_segment, self.started = save or not self.started, True
        if self.new_segment:
            self.episode_return[:], self.episode_length[:] = 0, 0
        self.write_row()
        if stop:
            go_on = shlex.join(["python", sys.argv[0], "--resume", str(self.folder)])
            what = f"{signal.Signals(stop).name}: stopped at step {self.env_steps}"
            print(f"{what}; {self.folder} has {self.kept}; to go on: {go_on}", file=sys.stderr)
            self.close()
            raise SystemExit(128 + stop)
        self.row_time = time.perf_counter()
        intervals = filter(None, (self.log_every, args.eval_every, args.checkpoint_every))
        pauses = [every * (self.env_steps // every + 1) for every in intervals]
        self.next_stop = min(args.total_timesteps, *pauses)
        return not finished

    def write_row(self) -> None:
        """Writes what was logged since the last row to progress.csv, TensorBoard and the tracker."""
        if not self.row or self.env_steps == self.logged_at:
            return
        step, now = self.env_steps, time.perf_counter()
        if self.episodes:
            self.row["train/episode_return"] = float(np.mean([return_ for _, return_, _ in self.episodes]))
            self.row["train/episode_length"] = float(np.mean([length for _, _, length in self.episodes]))
        row = {"step": step, "wall_time": round(self.seconds + now - self.started_at, 3), **self.row}
        self.rows.append(row)
        try:
            if set(row) <= set(self.columns):
                with self.table.open("a", newline="") as file:
                    csv.DictWriter(file, self.columns).writerow(row)
            else:
                self.write_table()
        except OSError as error:  # a full disk; the next row writes the whole table anew
            print(f"warning: {self.table} was not written, training goes on: {error}", file=sys.stderr)
            self.columns = []
        scalars = {name: value for name, value in self.row.items() if not name.startswith("train/")}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]

        def write(writer):
            writer.file_writer.add_summary(Summary(value=values), step)  # one event for all
            for ended_at, return_, length in self.episodes:  # one point per episode
                writer.add_scalar("train/episode_return", return_, ended_at)
                writer.add_scalar("train/episode_length", length, ended_at)

        self.tensorboard(write)
        if self.tracker:
            self.tracker.log(self.row, step=step)
        text = f"return {np.mean(self.recent):.1f}" if self.recent else "no episode yet"
        text += f" evaluation {self.returns.mean():.1f}" if self.returns is not None else ""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and ("eval/return_mean" in self.row or now - self.print_time > 10):
            speed = self.row.get("speed/steps_per_second", 0)
            print(f"step {step}/{self.args.total_timesteps} {speed:.0f} steps/s {text}", flush=True)
            self.print_time = now
        self.row, self.episodes, self.logged_at = {}, [], step

    def write_table(self) -> None:
        """Writes progress.csv anew: its header has every column seen so far."""
        self.columns = list(dict.fromkeys(name for row in self.rows for name in row))
        part = self.table.with_suffix(".part")
        with part.open("w", newline="") as file:
            table = csv.DictWriter(file, self.columns)
            table.writeheader()
            table.writerows(self.rows)
        part.replace(self.table)

    def close(self) -> np.ndarray:
        """Returns the returns of the last evaluation, one per episode."""
        if not self.args.evaluate:
            self.tensorboard(SummaryWriter.close)
            self.bar.close()
            if self.tracker:
                self.tracker.finish()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        return self.returns


def main() -> None:
    try:
        train(parse_args())
    except (UsageError, FloatingPointError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
