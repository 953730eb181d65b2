"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv 1812.05905): a random actor climbs the value that
twin critics give to its actions, plus alpha times its entropy; all learn from a replay buffer.

    target       y = r + gamma (min_i Q'_i(s', a') - alpha log pi(a' | s')),   a' ~ pi(s')   (eq. 3, 5)
    critics      L = sum_i E[(Q_i(s, a) - y)^2]                                              (eq. 5)
    actor        L = E[alpha log pi(a | s) - min_i Q_i(s, a)],   a = tanh(mean + std noise)  (eq. 7, 9)
    temperature  L = E[-alpha (log pi(a | s) + H)], with H the entropy that alpha aims at    (eq. 18)
    targets      w' <- tau w + (1 - tau) w', for the weights of Q'

Differences from the paper:
 1. The squared errors of the critics carry no factor 1/2.
 2. A time limit is no termination: y bootstraps from the value of the true final observation.
 3. Discrete actions (Christodoulou 2019, arXiv 1910.07207): expectations over a are sums over all actions.
 4. Actions and their densities live on [-1, 1], stretched to the bounds of each dimension.
 5. Images: the convolutions of the Nature CNN (Mnih et al. 2015), one for the actor, one for both critics.
 6. On request CAPS (Mysore et al. 2021, arXiv 2012.06644), n-step targets, noise that is kept for some steps.

    python algos/sac.py --env-id Pendulum-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import atexit, contextlib, copy, csv, importlib.util, io, json, math, multiprocessing, os, platform
import random, re, shlex, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
from collections import deque
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
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
    compile: bool = False  # CUDA: capture the update as a graph; CPU: torch.compile the loss
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder to continue
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to play and score, without training
    checkpoint_every: int = 50_000  # environment steps between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of one evaluation
    log_every: int = 1_000  # environment steps between rows of the log
    capture_video: bool = False  # film an episode of each evaluation
    render: bool = False  # show an episode of each evaluation in a window
    track: Literal["none", "wandb", "trackio"] = "none"  # also log to this service
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "Pendulum-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: str = "{}"  # JSON object of arguments for the environment, besides the tuned ones
    num_envs: int = 1  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    max_episode_steps: int = 0  # time limit of an episode; 0: the environment's own
    stop_return: float | None = None  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: int = 1_000_000  # environment steps, rounded up to whole rollouts
    learning_starts: int = 5_000  # environment steps of random actions before the first update
    buffer_size: int = 1_000_000  # rows kept for replay: one for each step and one more for each episode
    batch_size: int = 256  # transitions in each update
    noise_steps: int = 1  # steps for which the noise of an action is kept, to explore by longer moves
    updates_per_step: float = 1.0  # updates for each environment step, also a fraction or many
    learning_rate: float = 3e-4  # step size of the update
    actor_lr: float | None = None  # learning rate of the actor; None: learning_rate
    critic_lr: float | None = None  # learning rate of the critic; None: learning_rate
    alpha_lr: float | None = None  # learning rate of the temperature; None: learning_rate
    anneal_lr: bool = False  # learning rates fall linearly to 0
    gamma: float = 0.99  # discount
    tau: float = 0.005  # share of the new weights in each update of the target networks
    n_step: int = 1  # rewards before the value takes over
    alpha: float = 1.0  # temperature: the weight of the entropy, at first or, without auto_alpha, always
    auto_alpha: bool = True  # the temperature is learned, so that the entropy becomes target_entropy
    target_entropy: float | None = None  # in nats; None: -dimensions of a Box, 0.5 log n of Discrete(n)
    caps_temporal: float = 0.0  # weight of the distance between the mean actions of successive states
    caps_spatial: float = 0.0  # weight of the distance between the mean actions of a state and one near it
    caps_epsilon: float = 0.05  # standard deviation of the noise that makes a state near another
    reward_scale: float = 1.0  # rewards times this, for learning only
    max_grad_norm: float = 0.0  # global norm at which the gradient is clipped; 0: never
    hidden_sizes: tuple[int, ...] = (256, 256)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "relu"  # between the hidden layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# Own trials; BipedalWalker (there with gSDE, never run here) and mujoco follow RL Baselines3 Zoo's sac.yml
TUNED = {
    "Pendulum-v1": dict(total_timesteps=20_000, learning_starts=1_000, gamma=0.98, hidden_sizes=(64, 64),
                        batch_size=128, learning_rate=1e-3, eval_every=2_500),
    "CartPole-v1": dict(total_timesteps=50_000, learning_starts=500, hidden_sizes=(64, 64), batch_size=128,
                        learning_rate=1e-3, eval_every=5_000),
    "MountainCarContinuous-v0": dict(total_timesteps=50_000, learning_starts=1_000, gamma=0.9999, tau=0.01,
                                     hidden_sizes=(64, 64), auto_alpha=False, alpha=0.1, noise_steps=16,
                                     eval_every=5_000),
    "LunarLanderContinuous-v3": dict(total_timesteps=200_000, learning_rate=7.3e-4, anneal_lr=True, tau=0.01,
                                     n_step=3, hidden_sizes=(64, 64), batch_size=128),
    "BipedalWalker-v3": dict(total_timesteps=500_000, learning_starts=10_000, learning_rate=7.3e-4,
                             gamma=0.98, tau=0.02, buffer_size=300_000, eval_every=50_000),
    "mujoco": dict(learning_starts=10_000, eval_every=20_000, checkpoint_every=100_000, torch_threads=2),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Pixels(nn.Module):
    """Images (B, C, H, W) to float in channels-last memory, which convolves faster; bytes to [0, 1]."""

    def forward(self, x):
        pixels = x.to(memory_format=torch.channels_last).float()
        return pixels.div_(255) if x.dtype == torch.uint8 else pixels


class Trunk(nn.Sequential):
    """nn.Sequential without the hooks of its layers, whose calls cost a quarter of a small one's time."""

    def forward(self, x):
        for layer in self:
            x = layer.forward(x)
        return x


def make_trunk(space, hidden_sizes, activation):
    """Observations (B, *space.shape) to features (B, hidden_sizes[-1]): an MLP, behind a CNN for images."""
    layers, width = [], space.shape[0]
    if is_image(space):
        # Nature CNN (Mnih et al. 2015); below 36 pixels it is too coarse and two 3x3 layers take its place.
        nature = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        layers = [Pixels()]
        for channels, kernel, stride in nature if min(space.shape[1:]) >= 36 else [(16, 3, 1), (32, 3, 1)]:
            layers += [orthogonal(nn.Conv2d(width, channels, kernel, stride)), nn.ReLU(inplace=True)]
            width = channels
        layers.append(nn.Flatten())
        width = nn.Sequential(*layers)(torch.zeros(1, *space.shape)).shape[1]
    nonlinearity = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}[activation]
    for size in hidden_sizes:
        layers += [orthogonal(nn.Linear(width, size)), nonlinearity()]
        width = size
    return Trunk(*layers).to(memory_format=torch.channels_last)


class StackedLinear(nn.Module):
    """n linear layers with their own weights, in one product: (m, B, fan_in) to (m, B, fan_out), m <= n."""

    def __init__(self, n, fan_in, fan_out):
        super().__init__()
        bound = fan_in**-0.5  # as nn.Linear starts
        self.weight = nn.Parameter(torch.empty(n, fan_in, fan_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n, 1, fan_out).uniform_(-bound, bound))

    def forward(self, x):  # a slice of all weights would cost time in the backward pass
        weight, bias = (p if len(x) == len(p) else p[: len(x)] for p in (self.weight, self.bias))
        if weight.shape[2] == 1:  # for one output a sum of products is faster
            return torch.linalg.vecdot(x, weight.mT)[..., None] + bias
        return torch.baddbmm(bias, x, weight)


class Critic(nn.Module):
    """n values Q_i of normalized observations (B, *obs_space.shape) and actions, by networks side by side."""

    def __init__(self, obs_space, action_space, n, args):
        super().__init__()
        self.n, self.discrete = n, isinstance(action_space, Discrete)
        self.encoder = make_trunk(obs_space, (), args.activation)  # of images; vectors pass as they are
        features = self.encoder(torch.zeros(1, *obs_space.shape)).shape[1]
        sizes = [features if self.discrete else features + action_space.shape[0], *args.hidden_sizes]
        self.hidden = nn.ModuleList([StackedLinear(n, *size) for size in pairwise(sizes)])
        self.value = StackedLinear(n, sizes[-1], action_space.n if self.discrete else 1)
        self.activation = torch.relu_ if args.activation == "relu" else getattr(F, args.activation)

    def forward(self, obs, action=None):
        """(n, B); without an action (n, B, A), the values of all choices."""
        x = self.encoder.forward(obs)
        x = (x if self.discrete else torch.cat([x, action], dim=-1)).expand(self.n, -1, -1)
        for layer in self.hidden:
            x = self.activation(layer.forward(x))
        q_values = self.value.forward(x)
        if self.discrete and action is not None:
            return q_values.gather(-1, action.expand(self.n, -1)[..., None]).squeeze(-1)
        return q_values if self.discrete else q_values.squeeze(-1)


class Actor(nn.Module):
    """Gaussian actions squashed to [-1, 1], (B, A), for normalized observations (B, *obs_space.shape)."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else None
        self.trunk = make_trunk(obs_space, args.hidden_sizes, args.activation)
        outputs = action_space.n if isinstance(action_space, Discrete) else 2 * action_space.shape[0]
        self.head = orthogonal(nn.Linear(args.hidden_sizes[-1], outputs), gain=0.01)

    def normalize(self, obs):
        return obs if self.obs_norm is None else self.obs_norm(obs)

    def mean(self, obs):
        """The action in the middle of the distribution, (B, A)."""
        return self.head(self.trunk.forward(obs)).chunk(2, dim=-1)[0].tanh()

    def noise(self, n):  # for n actions, (n, A)
        return torch.randn(n, self.head.out_features // 2, device=self.head.weight.device)

    def forward(self, obs, noise=None):
        """A drawn action (B, A), its log-density (B,), and None: the expectation is that of the draw."""
        mean, log_std = self.head(self.trunk.forward(obs)).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if noise is None else noise
        return *squashed_gaussian(mean, log_std.clamp(*LOG_STD_RANGE), noise), None

    def act(self, obs, noise):
        return self(obs, noise)[0]


class DiscreteActor(Actor):
    """Choices (B,) for normalized observations: a softmax of the head."""

    def mean(self, obs):
        """The most likely choice, (B,)."""
        return self.head(self.trunk.forward(obs)).argmax(dim=-1)

    def noise(self, n):  # Gumbel's, (n, A): log-probabilities with it have their maximum at a drawn choice
        return -torch.empty(n, self.head.out_features, device=self.head.weight.device).exponential_().log()

    def forward(self, obs):
        """None, log-probabilities and probabilities of all choices, (B, A)."""
        log_prob = self.head(self.trunk.forward(obs)).log_softmax(dim=-1)
        return None, log_prob, log_prob.exp()

    def act(self, obs, noise):
        return (self(obs)[1] + noise).argmax(dim=-1)


class Temperature(nn.Module):
    """alpha >= 0, the weight of the entropy, learned by its logarithm."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(float(alpha)).log())

    def forward(self):
        return self.log_alpha.exp()


# -------------------------------------------------------------------------------------------- learning rule
LOG_STD_RANGE = -20, 2  # of the Gaussian before it is squashed


def squashed_gaussian(mean, log_std, noise):
    """Actions a = tanh(u), u = mean + std noise, (B, A), and their log-densities on [-1, 1] (appendix C).

    log pi(a | s) = log N(u; mean, std) - sum_A log(1 - tanh(u)^2); the logarithm of the slope is written so
    that it stays exact where tanh(u) rounds to 1.
    """
    u = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return u.tanh(), (log_normal - log_slope).sum(dim=-1)


def expectation(x, prob):
    """Over the choices: of x (..., A) with prob (..., A). With prob None x is of a drawn action."""
    return x if prob is None else (prob * x).sum(dim=-1)


def soft_value(q_value, log_prob, prob, alpha):
    """V(s) = E[min_i Q_i(s, a) - alpha log pi(a | s)] (eq. 3), (B,), from (n, B) and (B,).

    With prob (B, A) the expectation over the choices is exact, from q_value (n, B, A) and log_prob (B, A).
    """
    return expectation(q_value.amin(dim=0) - alpha * log_prob, prob)


def smoothness_loss(action, near_action):
    """Mean distance between the actions of a state and of one near it, row by row, both (B, A) (CAPS)."""
    return (action - near_action).norm(dim=-1).mean()


def critic_loss(q_value, td_target):
    """Sum over the critics (n, B) of their mean squared distance from y, td_target (B,) (DDPG eq. 4)."""
    return (q_value - td_target).square().mean(dim=-1).sum()


def gradient_step(loss, optimizer, max_norm=0.0):  # 0: never clipped
    """Moves the optimizer's own parameters down the loss, and no others. Returns their gradient's norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(loss, parameters)
    grad_norm = torch.stack(torch._foreach_norm(gradients)).norm()
    if max_norm:
        torch._foreach_mul_(gradients, (max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return grad_norm


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    args = replace(args, total_timesteps=round_up(args.total_timesteps, args.num_envs))
    envs, obs, info = start_segment(args, env_steps=0)
    spaces = envs.single_observation_space, envs.single_action_space
    discrete = isinstance(spaces[1], Discrete)
    if not discrete and not isinstance(spaces[1], Box):
        raise UsageError(f"sac.py needs Box or Discrete actions; {args.env_id} has {spaces[1]}: try ppo.py")
    if not discrete and not np.isfinite(spaces[1].low).all():
        raise UsageError(f"sac.py needs bounded actions; those of {args.env_id} are not: try ppo.py")
    if discrete and (args.caps_temporal or args.caps_spatial):
        raise UsageError(f"--caps-temporal and --caps-spatial need Box actions, not {spaces[1]}")
    if args.caps_spatial and spaces[0].dtype == np.uint8 and not args.normalize_obs:
        raise UsageError("--caps-spatial adds noise to observations: bytes need --normalize-obs for it")
    if args.auto_alpha and not args.alpha:
        raise UsageError("--alpha 0 cannot be learned from: give a start above 0, or --no-auto-alpha")
    if args.target_entropy is None:
        args.target_entropy = 0.5 * math.log(spaces[1].n) if discrete else -float(spaces[1].shape[0])
    actor = (DiscreteActor if discrete else Actor)(*spaces, args).to(device)
    critic = Critic(*spaces, 2, args).to(device)
    target_critic, temperature = copy.deepcopy(critic), Temperature(args.alpha).to(device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), fused=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), fused=True)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), fused=True)
    learning_rates = {
        actor_optimizer: args.learning_rate if args.actor_lr is None else args.actor_lr,
        critic_optimizer: args.learning_rate if args.critic_lr is None else args.critic_lr,
        alpha_optimizer: args.learning_rate if args.alpha_lr is None else args.alpha_lr,
    }

    @torch.inference_mode()
    def greedy(obs, info):
        return actor.mean(actor.normalize(to_tensor(obs, device))).cpu().numpy()

    @torch.inference_mode()
    def act(obs, noise):
        return actor.act(actor.normalize(to_tensor(obs, device)), noise).cpu().numpy()

    def compute_critic_loss(batch):
        """The distance from y of what the critics say, and what they say, (n, B)."""
        obs, next_obs = actor.normalize(batch["obs"]), actor.normalize(batch["next_obs"])
        reward = args.reward_scale * batch["reward"]
        with torch.no_grad():
            next_action, log_prob, prob = actor(next_obs)
            next_value = soft_value(target_critic(next_obs, next_action), log_prob, prob, temperature())
            td_target = reward + batch["discount"] * next_value
        q_value = critic(obs, batch["action"])
        return critic_loss(q_value, td_target), q_value

    def compute_actor_loss(batch):
        """Minus the soft value of the actor's actions, and their entropy."""
        obs = actor.normalize(batch["obs"])
        action, log_prob, prob = actor(obs)
        loss = -soft_value(critic(obs, action), log_prob, prob, temperature().detach()).mean()
        if args.caps_temporal:
            next_action = actor.mean(actor.normalize(batch["next_obs"]))
            loss = loss + args.caps_temporal * smoothness_loss(actor.mean(obs), next_action)
        if args.caps_spatial:
            near_action = actor.mean(obs + args.caps_epsilon * torch.randn_like(obs))
            loss = loss + args.caps_spatial * smoothness_loss(actor.mean(obs), near_action)
        return loss, -expectation(log_prob, prob).mean()

    def update_critic(batch):
        """One step of the critics. Nothing in it waits for the device."""
        loss, q_value = compute_critic_loss(batch)
        grad_norm = gradient_step(loss, critic_optimizer, args.max_grad_norm)
        q_value, reward = q_value.detach(), batch["reward"]
        metrics = {"loss/critic": loss.detach(), "grad/critic_norm": grad_norm}
        metrics |= {"q/mean": q_value.mean(), "q/max": q_value.max()}
        return metrics | {"reward/mean": reward.mean(), "reward/max": reward.max()}

    def update_actor(batch):
        """One step of the actor, one of the temperature, and of the target networks after them."""
        loss, entropy = compute_actor_loss(batch)
        grad_norm = gradient_step(loss, actor_optimizer, args.max_grad_norm)
        entropy, alpha = entropy.detach(), temperature()
        if args.auto_alpha:
            gradient_step(alpha * (entropy - args.target_entropy), alpha_optimizer)
        polyak_update(critic, target_critic, args.tau)
        metrics = {"loss/actor": loss.detach(), "grad/actor_norm": grad_norm}
        return metrics | {"policy/entropy": entropy, "policy/alpha": alpha.detach()}

    if graph := args.compile and device.type == "cuda":
        update_critic, update_actor = CudaGraph(update_critic), CudaGraph(update_actor)
    elif args.compile:
        compute_critic_loss = torch.compile(compute_critic_loss)
        compute_actor_loss = torch.compile(compute_actor_loss)
    rows = 100 * args.num_envs if args.evaluate else args.buffer_size  # playing needs no memory
    buffer = ReplayBuffer(rows, args.num_envs, *spaces, device)
    run = Run(
        args, actor, args.log_every, critic=critic, target_critic=target_critic, temperature=temperature,
        actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer,
        buffer=buffer,
    )  # fmt: skip
    if not args.auto_alpha:  # also where the resumed run had another one
        temperature.load_state_dict(Temperature(args.alpha).state_dict())
    for optimizer in learning_rates:  # a learning rate in a tensor can change inside a CUDA graph
        optimizer.param_groups[0].update(lr=torch.zeros((), device=device), capturable=graph)
    while run.proceed(greedy):
        if run.new_segment:
            envs, obs, info = start_segment(args, run.env_steps, envs)
            buffer.start(obs)

        # Act and step
        if run.new_segment or run.env_steps // args.num_envs % args.noise_steps == 0:
            noise = actor.noise(args.num_envs)
            random_action = envs.action_space.sample() if run.env_steps < args.learning_starts else None
        action = random_action if run.env_steps < args.learning_starts else act(obs, noise)
        run.check_finite(action=action)
        next_obs, reward, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        run.count(reward, done)
        run.check_finite(observation=next_obs, reward=reward)

        # Store
        buffer.add(action, reward, terminated, next_obs)
        if args.normalize_obs:
            actor.obs_norm.update(to_tensor(next_obs, device))
        obs, info = reset_done(envs, next_obs, info, done)
        if done.any():
            buffer.start(obs, done)

        # Update. Their number follows from the step, so a resumed run keeps the rhythm.
        if run.env_steps < args.learning_starts:
            continue
        fraction_left = 1 - run.env_steps / args.total_timesteps if args.anneal_lr else 1.0
        for optimizer, learning_rate in learning_rates.items():
            optimizer.param_groups[0]["lr"].fill_(learning_rate * fraction_left)
        done_before = int(args.updates_per_step * (run.env_steps - args.num_envs))
        for _ in range(done_before, int(args.updates_per_step * run.env_steps)):
            batch = buffer.sample(args.batch_size, args.gamma, args.n_step)
            run.log(update_critic(batch))
            run.log(update_actor(batch))
        run.log({"schedule/learning_rate": learning_rates[actor_optimizer] * fraction_left})
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


def round_up(total_timesteps: int, chunk: int) -> int:
    """Whole chunks of environment steps; says so if there is a difference."""
    rounded = math.ceil(total_timesteps / chunk) * chunk
    if rounded != total_timesteps:
        print(f"total_timesteps {total_timesteps} is rounded up to {rounded}, whole rollouts of {chunk}")
    return rounded


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


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on the device; infinity where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits, group = [math.inf], Path("/sys/fs/cgroup")  # Linux; the second is of a container
    if Path("/proc/meminfo").exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limits += [1024 * int(available[1])] if available else []
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()).isdigit():
        cache = re.findall(r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        limits.append(int(limit) - int((group / "memory.current").read_text()) + sum(map(int, cache)))
    return min(limits)


class ReplayBuffer:
    """The last buffer_size rows of experience, from one ring of rows for each environment.

    A row holds one observation, and if it is valid also the step that was taken from it; the observation of
    the next row is the successor. So an episode of T steps fills T + 1 rows, the last without a step, nothing
    is stored twice, and a truncated step keeps its true successor. With stack > 1 observations are the last
    `stack` images: a row holds only the newest, and the older ones at an episode's start get rows too.
    Row t of environment i lies at index t * num_envs + i, so the next row of an index is num_envs further on.
    """

    COLUMNS = "action reward terminated valid".split()  # on the host; the observations are on the device
    ROW_BYTES = 6  # of a row: reward, terminated, valid

    def __init__(self, buffer_size: int, num_envs: int, obs_space: Box, action_space, device, stack: int = 1):
        self.num_envs, self.size, self.stack = num_envs, buffer_size // num_envs * num_envs, stack
        self.row = np.arange(num_envs) - num_envs  # index of the newest row of each environment
        self.filled = 0  # all indices in use are below
        self.marked = None  # a list here is told of every row that mark() changes
        dtype = np.dtype(np.uint8 if obs_space.dtype == np.uint8 else np.float32)
        shape = obs_space.shape[1:] if stack > 1 else obs_space.shape
        action_bytes = math.prod(action_space.shape) * action_space.dtype.itemsize
        size = self.size * (math.prod(shape) * dtype.itemsize + action_bytes + self.ROW_BYTES)
        free = free_memory(device)
        what = f"a replay buffer of {self.size} steps takes {size / 1e9:.2f} GB"
        if size > free:
            raise UsageError(f"{what}, {free / 1e9:.2f} GB are free: use a smaller --buffer-size")
        if self.size < (least := num_envs * (2 * stack + 1)):  # a new episode must leave a step of an old one
            raise UsageError(f"--buffer-size {buffer_size} is too small: use {least} or more")
        print(f"{what} on {device}, {free / 1e9:.2f} GB are free")
        # Zeros of NumPy take memory only as they are written to.
        self.obs = torch.from_numpy(np.zeros((self.size, *shape), dtype=dtype)).to(device)
        self.action = np.zeros((self.size, *action_space.shape), dtype=action_space.dtype)
        self.reward = np.zeros(self.size, dtype=np.float32)
        self.terminated, self.valid = np.zeros(self.size, dtype=bool), np.zeros(self.size, dtype=bool)

    def start(self, obs: np.ndarray, mask: np.ndarray | None = None) -> None:
        """First observations (num_envs, ...) of new episodes: where mask is true, or everywhere."""
        envs = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        for age in range(self.stack)[::-1]:
            self.write(envs, obs[envs] if self.stack == 1 else obs[envs, -1 - age])

    def add(self, action, reward, terminated, next_obs: np.ndarray) -> None:
        """One step (num_envs, ...) of all; next_obs is the true successor, also where an episode ends."""
        self.action[self.row], self.reward[self.row], self.terminated[self.row] = action, reward, terminated
        self.mark(self.row, True)
        self.write(slice(None), next_obs if self.stack == 1 else next_obs[:, -1])

    def write(self, envs: np.ndarray | slice, image: np.ndarray) -> None:
        """Moves these environments on to their next row and puts an observation there."""
        row = self.row[envs] = (self.row[envs] + self.num_envs) % self.size
        self.filled = max(self.filled, int(row.max()) + 1)
        for later in range(self.stack):  # steps that lose a part of their observation
            self.mark((row + later * self.num_envs) % self.size, False)
        if self.obs.device.type == "cpu":
            self.obs.numpy()[row] = image
        else:
            self.obs[torch.from_numpy(row).to(self.obs.device)] = to_tensor(image, self.obs.device)

    def mark(self, index: np.ndarray, valid: bool) -> None:
        """Says of rows whether they can be drawn: a step that is whole, with all of its observation."""
        self.valid[index] = valid
        if self.marked is not None:
            self.marked.append(index.copy())  # self.row moves on

    def draw(self, batch_size: int) -> np.ndarray:
        """Indices (B,) of valid rows, each as likely as the others."""
        index = np.random.randint(self.filled, size=batch_size)
        while not (valid := self.valid[index]).all():
            index[~valid] = np.random.randint(self.filled, size=batch_size - valid.sum())
        return index

    def sample(self, batch_size: int, gamma: float, n_step: int = 1) -> dict[str, torch.Tensor]:
        """Steps drawn from all: obs, action, reward, discount and next_obs, (B, ...) each, on the device.

        They are n-step transitions that stop early, after k < n steps, where an episode or the record ends:
        reward is sum_{i<k} gamma^i r_{t+i}, next_obs s_{t+k}, discount gamma^k, and 0 if s_{t+k} is terminal.
        """
        return self.gather(self.draw(batch_size), gamma, n_step)

    def gather(self, index: np.ndarray, gamma: float, n_step: int = 1) -> dict[str, torch.Tensor]:
        """The n-step transitions from these rows."""
        steps = np.arange(n_step)[:, None]
        rows = (index + steps * self.num_envs) % self.size  # (n, B)
        going = np.logical_and.accumulate(self.valid[rows])  # the row after an end is never valid
        k = going.sum(0)
        reward = (gamma**steps * going * self.reward[rows]).sum(0)
        discount = gamma**k * ~(going & self.terminated[rows]).any(0)
        obs, next_obs = self.observations(np.stack([index, index + k * self.num_envs]))
        device = self.obs.device
        reward, discount = to_tensor(np.stack([reward, discount]), device)
        action = to_tensor(self.action.take(index, axis=0), device)
        return {"obs": obs, "action": action, "reward": reward, "discount": discount, "next_obs": next_obs}

    def observations(self, index: np.ndarray) -> torch.Tensor:
        """Observations (*index.shape, ...) of these rows, stacked if they are images of a stack."""
        shape = (*index.shape, *self.obs.shape[1:])
        if self.stack > 1:
            index = index[..., None] + self.num_envs * np.arange(1 - self.stack, 1)  # oldest first
            shape = (*index.shape, *self.obs.shape[1:])
        index = torch.from_numpy((index % self.size).ravel()).to(self.obs.device)
        return self.obs.index_select(0, index).view(shape)

    def state_dict(self) -> dict:
        """The rows in use, without a copy of them on a CPU."""
        columns = {"obs": self.obs[: self.filled].cpu().numpy()}
        columns |= {name: getattr(self, name)[: self.filled] for name in self.COLUMNS}
        state = {name: torch.from_numpy(column) for name, column in columns.items()}
        return state | {"size": self.size, "row": self.row.tolist()}

    def load_state_dict(self, state: dict) -> None:
        if (state["size"], len(state["row"])) != (self.size, self.num_envs):
            saved = f"{state['size']} steps of {len(state['row'])} environments"
            raise ValueError(f"its replay buffer is of {saved}: keep --buffer-size and --num-envs")
        self.row, self.filled = np.array(state["row"]), len(state["obs"])
        self.obs[: self.filled] = state["obs"]
        for name in self.COLUMNS:
            getattr(self, name)[: self.filled] = state[name].numpy()


def polyak_update(network: nn.Module, target: nn.Module, tau: float) -> None:
    """target <- tau network + (1 - tau) target, all parameters at once."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)


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


class CudaGraph:
    """Calls update(batch) thrice as it is, then captures and replays it: one launch instead of hundreds."""

    def __init__(self, update):
        self.update, self.calls = update, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls <= 3:  # off the main stream, as a capture asks; these are updates like any other
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                metrics = self.update(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return metrics
        if self.calls == 4:
            self.batch = {name: x.clone() for name, x in batch.items()}
            with torch.cuda.graph(self.graph):
                self.metrics = self.update(self.batch)
        for name, x in batch.items():
            self.batch[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.metrics.items()}


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
