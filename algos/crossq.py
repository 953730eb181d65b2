"""CrossQ (Bhatt et al. 2024, arXiv 1902.05605): SAC without target networks. Batch renormalization in wide
critics keeps them stable, for it sees the present and the next states and actions as one joint batch.

    critics      Q_i(s, a) and Q_i(s', a') from one pass of the batch [(s, a); (s', a')],   a' ~ pi(s')
    target       y = r + gamma (min_i Q_i(s', a') - alpha log pi(a' | s')), held constant
    loss         L = sum_i E[(Q_i(s, a) - y)^2]
    actor        L = E[alpha log pi(a | s) - min_i Q_i(s, a)], in every policy_delay-th update
    temperature  L = -alpha E[log pi(a | s) + H],   for H the entropy that alpha aims at, with the actor
    layers       x' = weight ((x - m_B) / s_B r + d) + bias with the mean m_B and deviation s_B of the batch,
                 r = clip(s_B / s, 1/3, 3), d = clip((m_B - m) / s, -5, 5) with their running means m and s;
                 x' = weight (x - m) / s + bias in evaluation mode (Ioffe 2017, arXiv 1702.03275, alg. 1)

The critics are in training mode in their own update alone, the actor in its own: whatever acts, is evaluated,
judges the actor or draws a' is in evaluation mode.

Differences from the paper:
 1. A time limit is no termination: y bootstraps from the value of the true final observation.
 2. Actions and their densities live on [-1, 1], stretched to the bounds of each dimension.
 3. Running means are of the deviations, as Ioffe has them; the authors' code averages variances.
 4. The squared errors of the critics carry no factor 1/2.
 5. On request n-step targets, without the entropies of the steps between; images go through a Nature CNN
    (Mnih et al. 2015), which the critics share and which has no normalization of its own.

    python algos/crossq.py --env-id Pendulum-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "psutil", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, errno, importlib, inspect, json, math, os, platform, random, shutil, signal, subprocess
import sys, time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Literal, get_args, get_type_hints

import cv2
import gymnasium as gym
import numpy as np
import psutil
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Count = Annotated[int, (1, math.inf)]  # numbers and their ranges, checked before anything runs
Rate = Annotated[float, (0, math.inf)]
Share = Annotated[float, (0, 1)]
Json = Annotated[dict, tyro.conf.arg(constructor=json.loads, metavar="JSON")]


@dataclass
class Args:
    # run
    seed: int = 1  # seed of everything random
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where networks live; auto: cuda if there is one
    compile: bool = False  # on CUDA: capture the update as a graph
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder or checkpoint.pt to continue; with --run-dir in a new folder
    init_from: str = ""  # .pt file whose weights a new run starts from
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to play and score, without training
    checkpoint_every: int = 50_000  # steps of each environment between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 10  # episodes of one evaluation
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations
    sample_actions: bool = False  # evaluations draw actions from the policy in place of the greedy ones
    log_every: int = 1_000  # environment steps between rows of the log
    capture_video: bool = False  # film an episode of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "Pendulum-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 1  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 1_000_000  # environment steps, rounded up to whole steps of all environments
    learning_starts: int = 5_000  # environment steps of random actions before the first update
    random_hold: Count = 1  # steps for which a random action is kept, to explore by longer moves
    buffer_size: Count = 1_000_000  # transitions kept for replay
    batch_size: Count = 256  # transitions in each update
    updates_per_step: Rate = 1.0  # updates for each environment step, also a fraction or many
    policy_delay: Count = 3  # updates of the critics for each of the actor and the temperature
    learning_rate: Rate = 1e-3  # step size of the updates
    actor_lr: Rate | None = None  # learning rate of the actor; None: learning_rate
    critic_lr: Rate | None = None  # learning rate of the critics; None: learning_rate
    alpha_lr: Rate | None = None  # learning rate of the temperature; None: learning_rate
    anneal_lr: bool = False  # learning rates fall linearly to 0
    max_grad_norm: Rate = math.inf  # global norm to clip gradients of actor and critics at; inf: never
    gamma: Share = 0.99  # discount
    n_step: Count = 1  # rewards before the value takes over
    renorm_warmup: int = 100_000  # updates of a network before r and d count: batch normalization until then
    alpha: Annotated[float, (1e-8, math.inf)] = 1.0  # temperature: at first or, without auto_alpha, always
    auto_alpha: bool = True  # the temperature is learned, so that the entropy becomes target_entropy
    target_entropy: float | None = None  # in nats; None: minus the number of dimensions of the actions
    reward_scale: float = 1.0  # rewards times this, for learning only
    hidden_sizes: tuple[Count, ...] = (256, 256)  # widths of the hidden layers of the actor
    critic_sizes: tuple[Count, ...] = (2048, 2048)  # and of the critics (both behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "relu"  # between the hidden layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# -------------------------------------------------------------------------------------------- learning rule
def squashed_gaussian(mean, log_std, noise):
    """Actions a = tanh(u), u = mean + std noise, (B, A), and their log-densities (B,) (appendix C).

    log pi(a | s) = log N(u; mean, std) - sum_A log(1 - tanh(u)^2); the logarithm of the slope is written so
    that it stays exact where tanh(u) rounds to 1.
    """
    u = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return u.tanh(), (log_normal - log_slope).sum(dim=-1)


def soft_value(q_values, log_prob, alpha):
    """min_i Q_i(s, a) - alpha log pi(a | s), (B,), from q_values (n, B); its mean over a is V(s) (eq. 3)."""
    return q_values.amin(dim=0) - alpha * log_prob


def critic_loss(q_values, td_target):
    """Sum over the critics (n, B) of their mean squared distance from y, td_target (B,) (DDPG eq. 4)."""
    return (q_values - td_target).square().mean(dim=-1).sum()


def alpha_loss(log_alpha, entropy, target_entropy):
    """-alpha E[log pi(a | s) + H] (eq. 18), with the policy's mean entropy in place of E[-log pi(a | s)]."""
    return log_alpha.exp() * (entropy - target_entropy)


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, obs, info = start_segment(args)
    spaces = envs.single_observation_space, envs.single_action_space
    agent = Agent(*spaces, args, device)
    if args.evaluate:  # playing needs no memory
        return Run(args, args.num_envs, agent=agent).evaluate()
    rates = (args.learning_rate if x is None else x for x in (args.actor_lr, args.critic_lr, args.alpha_lr))
    actor_lr, critic_lr, alpha_lr = rates
    graph = args.compile and device.type == "cuda"
    actor_optimizer = Adam([(agent.actor.parameters(), actor_lr)], device, graph=graph)
    critic_optimizer = Adam([(agent.critic.parameters(), critic_lr)], device, graph=graph)
    for optimizer in (actor_optimizer, critic_optimizer):
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)  # as in the paper
    alpha_optimizer = Adam([([agent.log_alpha], alpha_lr)], device, graph=graph)
    buffer = ReplayBuffer(args, *spaces, device)
    target_entropy = -math.prod(spaces[1].shape) if args.target_entropy is None else args.target_entropy

    def update_critic(batch):
        """One gradient step of the critics on a batch of transitions (B, ...)."""
        agent.eval().critic.train()  # the critics alone normalize by their batch
        obs, next_obs = agent.obs_norm(batch["obs"]), agent.obs_norm(batch["next_obs"])
        with torch.no_grad():
            next_action, log_prob = agent.policy(next_obs)
        both_actions = torch.cat([batch["action"].flatten(1), next_action])
        q_values, next_q_values = agent.critic(torch.cat([obs, next_obs]), both_actions).chunk(2, dim=1)
        next_value = soft_value(next_q_values.detach(), log_prob, agent.log_alpha.detach().exp())
        td_target = batch["reward"] + batch["discount"] * next_value
        loss = critic_loss(q_values, td_target)
        grad_norm = gradient_step(loss, critic_optimizer, args.max_grad_norm)
        return {
            "loss/critic": loss.detach(), "grad/critic_norm": grad_norm,
            "q/mean": q_values.detach().mean(), "q/target_mean": td_target.mean(),
        }  # fmt: skip

    def update_actor(batch):
        """One gradient step of the actor and one of the temperature."""
        agent.eval().actor.train()  # the actor alone normalizes by its batch
        obs = agent.obs_norm(batch["obs"])
        action, log_prob = agent.policy(obs)
        alpha = agent.log_alpha.detach().exp()
        loss = -soft_value(agent.critic(obs, action), log_prob, alpha).mean()
        grad_norm = gradient_step(loss, actor_optimizer, args.max_grad_norm)
        entropy = -log_prob.detach().mean()
        if args.auto_alpha:
            gradient_step(alpha_loss(agent.log_alpha, entropy, target_entropy), alpha_optimizer, math.inf)
        return {
            "loss/actor": loss.detach(), "grad/actor_norm": grad_norm,
            "policy/alpha": alpha, "policy/entropy": entropy,
        }  # fmt: skip

    learn_critic = CudaGraph(update_critic) if graph else update_critic
    learn_actor = CudaGraph(update_actor) if graph else update_actor
    run = Run(
        args, args.num_envs, agent=agent, actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer,
        alpha_optimizer=alpha_optimizer, buffer=buffer,
    )  # fmt: skip
    if not args.auto_alpha:  # also where the resumed run had another one
        nn.init.constant_(agent.log_alpha, math.log(args.alpha))
    rewards, result = [], {}
    while True:
        # Pause: score, save, end, or go on from what was saved
        if run.due(args.eval_every) and not run.signal:
            run.evaluate()
        if run.due(args.checkpoint_every * args.num_envs):
            run.checkpoint()
        if run.finished:
            return run.close(envs)
        if run.saved_at == run.env_steps:  # what follows depends on the checkpoint alone
            envs, obs, info = start_segment(args, run.env_steps, envs)
            buffer.cut()
            rewards, result = [], {}
        if args.anneal_lr:
            for optimizer in (actor_optimizer, critic_optimizer, alpha_optimizer):
                group = optimizer.param_groups[0]
                group["lr"].fill_(group["initial_lr"] * (1 - run.env_steps / args.total_timesteps))

        # Act and step
        if args.normalize_obs:
            agent.obs_norm.update(to_tensor(obs, device))
        if run.env_steps < args.learning_starts:
            if run.env_steps // args.num_envs % args.random_hold == 0 or run.saved_at == run.env_steps:
                action = envs.action_space.sample()  # a new one also where a segment starts
        else:
            action = agent.act(obs, info, greedy=False)
        next_obs, reward, terminated, truncated, next_info = envs.step(action)
        done = terminated | truncated
        run.count(reward, done)
        rewards.append(reward)

        # Store
        buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, done=done)
        obs, info = reset_done(envs, next_obs, next_info, done)

        # Update. The number of an update follows from the step, so a resumed run keeps the rhythm.
        if run.env_steps >= args.learning_starts:
            first = int(args.updates_per_step * (run.env_steps - args.num_envs))
            for number in range(first, int(args.updates_per_step * run.env_steps)):
                batch = buffer.sample(args.batch_size)
                batch["reward"] *= args.reward_scale
                result |= learn_critic(batch)
                if number % args.policy_delay == 0:
                    result |= learn_actor(batch)

        # Log
        if run.due(args.log_every):
            run.log(result | {
                "reward/mean": np.mean(rewards), "reward/max": np.max(rewards),
                "schedule/learning_rate": actor_optimizer.param_groups[0]["lr"],
            })  # fmt: skip
            rewards = []


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class NatureCNN(nn.Sequential):
    """Images (B, C, H, W) to features (B, F) (Mnih et al. 2015); below 36 pixels by two smaller layers."""

    def __init__(self, channels, height, width):
        sizes = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        if min(height, width) < 36:
            sizes = [(channels, 16, 3, 1), (16, 32, 3, 1)]
        convolutions = [orthogonal(nn.Conv2d(*size)) for size in sizes]
        super().__init__(*(layer for conv in convolutions for layer in (conv, nn.ReLU())), nn.Flatten())
        self.to(memory_format=torch.channels_last)  # convolves faster

    def forward(self, image):
        pixels = image.to(torch.float32, memory_format=torch.channels_last)
        return super().forward(pixels / 255 if image.dtype == torch.uint8 else pixels)


class Trunk(nn.Module):
    """Observations (B, *space.shape) to features (B, width): an MLP, behind a CNN for images."""

    def __init__(self, space, hidden_sizes, activation):
        super().__init__()
        self.cnn = NatureCNN(*space.shape) if len(space.shape) == 3 else nn.Identity()
        sizes = [self.cnn(torch.zeros(1, *space.shape)).shape[1], *hidden_sizes]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(*size)) for size in pairwise(sizes))
        self.activation, self.width = getattr(F, activation), sizes[-1]

    def forward(self, obs):
        x = self.cnn(obs)
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


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


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe 2017, algorithm 1) of x (..., B, F), with moments (..., 1, F)."""

    def __init__(self, *shape, warmup):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("batches", torch.zeros(()))
        self.warmup = warmup

    def forward(self, x):
        if not self.training:
            return (x - self.mean) * (self.weight / self.std) + self.bias
        mean = x.mean(dim=-2, keepdim=True)
        x = x - mean
        std = (x.square().mean(dim=-2, keepdim=True) + 1e-3).sqrt()  # torch.var is slow along this dimension
        with torch.no_grad():
            warm = self.batches >= self.warmup  # until then r is 1 and d is 0
            r = torch.where(warm, (std / self.std).clamp(1 / 3, 3), 1.0)
            d = torch.where(warm, ((mean - self.mean) / self.std).clamp(-5, 5), 0.0)
            self.mean.lerp_(mean, 0.01)
            self.std.lerp_(std, 0.01)
            self.batches += 1
        return torch.addcmul(self.weight * d + self.bias, x, self.weight * r / std)


class Critic(nn.Module):
    """The values Q_i(s, a) of two critics, (2, B), for observations (B, *obs_space.shape) and actions."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.encoder = Trunk(obs_space, (), args.activation)  # of images; vectors pass as they are
        sizes = [self.encoder.width + math.prod(action_space.shape), *args.critic_sizes, 1]
        norms = (BatchRenorm(2, 1, size, warmup=args.renorm_warmup) for size in sizes)
        layers = (StackedLinear(2, *size) for size in pairwise(sizes))
        self.layers = nn.ModuleList(map(nn.Sequential, norms, layers))
        self.activation = getattr(F, args.activation)

    def forward(self, obs, action):
        x = torch.cat([self.encoder(obs), action.flatten(1)], dim=-1).expand(2, -1, -1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x).squeeze(-1)


class Actor(nn.Module):
    """Mean and log standard deviation before tanh, (B, A) each, for observations (B, *obs_space.shape)."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.trunk = Trunk(obs_space, args.hidden_sizes, args.activation)
        self.head = orthogonal(nn.Linear(self.trunk.width, 2 * math.prod(action_space.shape)), gain=0.01)
        norm = lambda layer: BatchRenorm(1, layer.in_features, warmup=args.renorm_warmup)
        self.trunk.layers = nn.ModuleList(nn.Sequential(norm(layer), layer) for layer in self.trunk.layers)
        self.head = nn.Sequential(norm(self.head), self.head)

    def forward(self, obs):
        mean, log_std = self.head(self.trunk(obs)).chunk(2, dim=-1)
        return mean, log_std.clamp(-20, 2)


class Agent(nn.Module):
    """Actor and critics of normalized observations and the temperature."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if not isinstance(action_space, Box) or not action_space.is_bounded():
            raise UsageError(f"{args.env_id} has {action_space} actions, not a bounded Box: try ppo.py")
        self.device, self.action_shape = device, action_space.shape
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        self.actor = Actor(obs_space, action_space, args)
        self.critic = Critic(obs_space, action_space, args)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.to(device)

    def policy(self, obs):
        """Drawn actions (B, A) and their log_prob (B,)."""
        mean, log_std = self.actor(obs)
        return squashed_gaussian(mean, log_std, torch.randn_like(mean))

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs, *action_space.shape) in a vector environment: greedy ones, or drawn."""
        self.eval()  # an update leaves a network in training mode
        obs = self.obs_norm(to_tensor(obs, self.device))
        action = self.actor(obs)[0].tanh() if greedy else self.policy(obs)[0]
        return action.cpu().numpy().reshape(-1, *self.action_shape)


class RunningNorm(nn.Module):
    """(x - mean) / standard deviation of all x that update has seen, clipped to +-10."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))  # float32 would freeze
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: torch.Tensor) -> None:
        """Adds a batch (B, *shape), merging the moments (Chan et al. 1983)."""
        var, mean = torch.var_mean(x.double(), dim=0, correction=0)
        self.count += len(x)
        share, delta = len(x) / self.count, mean - self.mean
        self.var.lerp_(var, share).add_(delta.square() * share * (1 - share))
        self.mean.lerp_(mean, share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10).float()


# ------------------------------------------------------------------------------------------- replay memory
class ReplayBuffer:
    """The last buffer_size transitions, in a ring; those of one step of all environments lie side by side."""

    def __init__(self, args, obs_space, action_space, device: torch.device):
        self.num_envs, self.n_step, self.gamma, self.device = args.num_envs, args.n_step, args.gamma, device
        self.size = max(args.buffer_size // self.num_envs, 1) * self.num_envs
        self.row = self.filled = 0  # where the next step goes; how many rows are in use
        host, number = torch.device("cpu"), torch.zeros(())
        obs, action = (to_tensor(np.zeros(x.shape, x.dtype), host) for x in (obs_space, action_space))
        rows = dict(obs=obs, action=action, reward=number, next_obs=obs, terminated=number, done=number)
        needed, free = self.size * sum(x.nbytes for x in rows.values()), free_memory(device)
        text = f"{self.size} transitions takes {needed / 1e9:.2f} of {free / 1e9:.2f} GB free on {device}"
        if needed > free:
            raise UsageError(f"a replay buffer of {text}: use a smaller --buffer-size")
        print(f"a replay buffer of {text}")
        self.data = {name: x.new_empty(self.size, *x.shape, device=device) for name, x in rows.items()}

    def add(self, **step: np.ndarray) -> None:
        """One step (num_envs, ...) of all; next_obs is the true successor, also where an episode ends."""
        for name, x in step.items():
            self.data[name][self.row : self.row + self.num_envs] = to_tensor(x, self.device)
        self.filled = max(self.filled, self.row + self.num_envs)
        self.row = (self.row + self.num_envs) % self.size

    def cut(self) -> None:
        """Ends the episodes in progress, for a new segment starts."""
        newest = (self.row - self.num_envs) % self.size
        self.data["done"][newest : newest + self.num_envs] = 1.0

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        """n-step transitions (B, ...) drawn from all: obs, action, reward, discount and next_obs.

        They stop early, after k < n steps, where an episode or the record ends: reward is sum_{i<k} gamma^i
        r_{t+i}, next_obs is s_{t+k}, discount is gamma^k, and 0 if s_{t+k} is terminal.
        """
        take = lambda name, row: self.data[name].index_select(0, row)
        first = last = torch.randint(self.filled, (batch_size,), device=self.device)
        newest = (self.row - self.num_envs) % self.size
        reward, discount = take("reward", first), torch.full((batch_size,), self.gamma, device=self.device)
        for _ in range(self.n_step - 1):
            goes_on = (take("done", last) == 0) & (last // self.num_envs != newest // self.num_envs)
            last = torch.where(goes_on, (last + self.num_envs) % self.size, last)
            reward += goes_on * discount * take("reward", last)
            discount = torch.where(goes_on, self.gamma * discount, discount)
        discount = discount * (1 - take("terminated", last))
        obs, action, next_obs = take("obs", first), take("action", first), take("next_obs", last)
        return dict(obs=obs, action=action, reward=reward, discount=discount, next_obs=next_obs)

    def state_dict(self) -> dict:
        """The rows in use. A tensor would be saved with all of its storage, so each is cut in NumPy."""
        rows = {name: torch.from_numpy(x[: self.filled].cpu().numpy()) for name, x in self.data.items()}
        return rows | dict(row=self.row, size=self.size, num_envs=self.num_envs)

    def load_state_dict(self, state: dict) -> None:
        if (state["size"], state["num_envs"]) != (self.size, self.num_envs):
            raise ValueError("its replay buffer has another shape: keep --buffer-size and --num-envs")
        self.row, self.filled = state["row"], len(state["reward"])
        for name, x in self.data.items():
            x[: self.filled] = state[name]  # which load has mapped to the file, so it takes no memory


# Own trials. Critics of 2048 units, the paper's, need a GPU: two cores carry 128, and 256 on HalfCheetah
TUNED = {
    "Pendulum-v1": dict(total_timesteps=20_000, learning_starts=1_000, gamma=0.98, hidden_sizes=(64, 64),
                        critic_sizes=(128, 128), batch_size=128, updates_per_step=0.5, eval_every=2_500),
    "LunarLanderContinuous-v3": dict(total_timesteps=200_000, anneal_lr=True, n_step=3, hidden_sizes=(64, 64),
                                     critic_sizes=(128, 128), batch_size=128, updates_per_step=0.5,
                                     eval_every=20_000),
    "mujoco": dict(eval_every=20_000, checkpoint_every=100_000, torch_threads=2),
}  # fmt: skip


# ------------------------------------------------------------------ utilities, the same text in every script
class UsageError(ValueError):
    """A mistake of the user: main prints it in one line and exits with code 2."""


def make_args(env_id: str, **changes) -> Args:
    """The arguments for an environment: changes > TUNED[env id] > TUNED[family] > Args."""
    env_id = max((name for name in gym.registry if name.startswith(f"{env_id}-v")), default=env_id)
    entry = str(gym.registry[env_id].entry_point) if env_id in gym.registry else ""
    family = "atari" if env_id.startswith("ALE/") else entry.removeprefix("gymnasium.envs.").split(".")[0]
    return Args(**{**TUNED.get(family, {}), **TUNED.get(env_id, {}), **changes, "env_id": env_id})


def parse_args(argv: list[str] | None = None) -> Args:
    """Command line > the run of --resume or --evaluate > make_args."""
    argv = sys.argv[1:] if argv is None else argv
    first = tyro.cli(Args, args=[word for word in argv if word not in ("-h", "--help")])
    default = make_args(first.env_id)
    if path := first.resume or first.evaluate:
        try:
            default = Args(**load(path)["args"] | dict(run_dir="", resume="", evaluate="", init_from=""))
        except (KeyError, TypeError) as error:
            raise UsageError(f"{path} is not of this script: {error}") from None
    args = tyro.cli(Args, args=argv, default=default, description=__doc__.partition("\n\n")[0])
    return replace(args, env_id=make_args(args.env_id).env_id)


def set_up(args) -> torch.device:
    """Checks the ranges of the arguments and picks the device."""
    for name, hint in get_type_hints(Args, include_extras=True).items():
        for part in (hint, *get_args(hint)):  # the type, or the types inside it
            for low, high in (x for x in getattr(part, "__metadata__", ()) if isinstance(x, tuple)):
                if any(x is not None and not low <= x <= high for x in np.ravel(getattr(args, name))):
                    value = f"--{name.replace('_', '-')} {getattr(args, name)}"
                    raise UsageError(f"{value}: must be from {low} to {high}")
    if args.capture_video and sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "MUJOCO_GL"}:
        os.environ["MUJOCO_GL"] = "egl"
        print("no display: MuJoCo renders with MUJOCO_GL=egl")
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    torch.set_flush_denormal(True)  # numbers below 1e-38, as moments of Adam that fade, slow a CPU down
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds none here; cpu always works")
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def set_seed(seed: int) -> None:
    for seed_library in (random.seed, np.random.seed, torch.manual_seed):
        seed_library(seed)


def standardize(env: gym.Env) -> gym.Env:
    """Observations become float vectors or byte images (C, H, W); actions Discrete or MultiDiscrete from 0,
    or Boxes whose bounded dimensions are [-1, 1], and what exceeds them is clipped."""
    space, actions = env.observation_space, env.action_space
    image = space.dtype == np.uint8 and len(space.shape or ()) == 3
    if image and space.shape[2] < space.shape[0]:  # (H, W, C)
        turned = Box(0, 255, (space.shape[2], *space.shape[:2]), np.uint8)
        env = gym.wrappers.TransformObservation(env, lambda x: np.moveaxis(x, -1, 0), turned)
    elif not image and not (isinstance(space, Box) and len(space.shape) == 1):
        env = gym.wrappers.FlattenObservation(env)
    if not image and env.observation_space.dtype not in (np.float32, np.float64):
        env = gym.wrappers.DtypeObservation(env, np.float32)
    if isinstance(actions, Box) and actions.dtype.kind == "f":
        bounded = np.isfinite(actions.low) & np.isfinite(actions.high)
        low, high = np.where(bounded, -1, actions.low), np.where(bounded, 1, actions.high)
        env = gym.wrappers.RescaleAction(env, low, high)
        env = gym.wrappers.TransformAction(env, lambda a: a.clip(low, high), env.action_space)
    elif isinstance(actions, MultiBinary):
        env = gym.wrappers.TransformAction(env, lambda a: a, MultiDiscrete(np.full(actions.shape, 2)))
    elif not isinstance(actions, (Discrete, MultiDiscrete)):
        raise UsageError(f"{actions} actions: use Discrete, MultiDiscrete, MultiBinary or a Box of floats")
    elif np.any(actions.start):
        from_0 = Discrete(actions.n) if isinstance(actions, Discrete) else MultiDiscrete(actions.nvec)
        env = gym.wrappers.TransformAction(env, lambda a: a + actions.start, from_0)
    return env


def make_envs(args, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """num_envs environments with standard spaces. Episodes end explicitly: reset_done follows every step."""
    kwargs, training = {**args.env_kwargs, **kwargs}, os.getpid()

    def make_env():
        if os.getpid() != training:  # in a process of its own: the training decides when to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return standardize(gym.make(args.env_id, **kwargs))

    try:
        if args.env_id.startswith("ALE/"):
            gym.register_envs(importlib.import_module("ale_py"))
            kwargs = {"reward_clipping": False, **kwargs}
            return gym.make_vec(args.env_id, num_envs, "vector_entry_point", **kwargs)
        sys.path.append("")  # module:Env-v0 finds a module in the folder of the user
        vector = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
        return vector([make_env] * num_envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    except (gym.error.Error, ImportError, TypeError) as error:
        if isinstance(error, TypeError) and "argument" not in str(error):
            raise  # a bug of the environment keeps its traceback
        raise UsageError(f"cannot make {args.env_id}: {error}") from error


def start_segment(args, env_steps=0, old_envs=None) -> tuple[gym.vector.VectorEnv, np.ndarray, dict]:
    """New environments, and everything random seeded from (seed, env_steps).

    A segment starts after every checkpoint, and when one is loaded: what follows depends on the checkpoint
    alone, so a resumed run repeats an uninterrupted one bit for bit. Episodes in progress count as truncated.
    """
    if old_envs is not None:
        old_envs.close()
    seed = int(np.random.SeedSequence([args.seed, env_steps]).generate_state(1)[0] >> 2)  # ale-py: 30 bits
    set_seed(seed)
    envs = make_envs(args, args.num_envs)
    envs.action_space.seed(seed)
    return envs, *envs.reset(seed=seed)


def reset_done(envs, next_obs: np.ndarray, next_info: dict, done: np.ndarray) -> tuple[np.ndarray, dict]:
    """Starts new episodes where done. Returns what the policy acts from; next_obs is the true successor."""
    obs, info = envs.reset(options={"reset_mask": done}) if done.any() else (next_obs, next_info)
    return obs, info


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device; float64 and bool become float32. Nothing waits for the copy to a GPU."""
    tensor = torch.as_tensor(array, dtype=torch.float32 if array.dtype in (np.float64, np.bool_) else None)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Adam(torch.optim.Adam):
    """Adam for groups (parameters, learning rate); a rate in a tensor can change inside a CUDA graph.

    Methods without their wrappers: these import torch's compiler, a second at the start of every run.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)

    def __init__(self, groups, device: torch.device, eps: float = 1e-8, graph: bool = False):
        groups = [dict(params=p, lr=torch.tensor(lr, device=device), initial_lr=lr) for p, lr in groups]
        super().__init__(groups, eps=eps, fused=True, capturable=graph)

    def load_state_dict(self, state: dict) -> None:
        """Takes what the steps have left; rates and the like stay those of the command line."""
        state = state | {"param_groups": self.state_dict()["param_groups"]}
        inspect.unwrap(torch.optim.Adam.load_state_dict)(self, state)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> list[torch.Tensor]:
    """Scales all gradients so that their joint norm is at most max_norm. Returns each group's norm before."""
    gradients = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    norms = [torch.stack(torch._foreach_norm(group)).norm() for group in gradients]
    scale = (max_norm / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([gradient for group in gradients for gradient in group], scale)
    return norms


def gradient_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Moves the optimizer's own parameters down the loss, and no others. Returns their gradient's norm."""
    optimizer.zero_grad()
    loss.backward(inputs=[p for group in optimizer.param_groups for p in group["params"]])
    (grad_norm,) = clip_gradients(optimizer, max_norm)
    optimizer.step()
    return grad_norm


class CudaGraph:
    """update(batch), captured after three calls and then replayed: one launch instead of hundreds."""

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


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; a limit of a container is not seen."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def evaluate(args, agent, film: Path | None = None, stopped=lambda: False) -> tuple[np.ndarray, dict]:
    """Plays eval_episodes episodes, one in each environment, so that short ones are not favoured.

    Returns the return of each and the means of what is measured; the first one becomes the film. Training is
    untouched: own environments, own random numbers.
    """
    n, atari = args.eval_episodes, args.env_id.startswith("ALE/")
    totals = np.zeros((5, n))  # return, discounted return, length, terminations, successes
    playing, t, states = np.ones(n, dtype=bool), 0, (random.getstate(), np.random.get_state())
    agent.eval()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        set_seed(args.eval_seed)
        render = {"render_mode": "rgb_array"} if film and not atari else {}
        envs = make_envs(replace(args, async_envs=False), n, **render)
        obs, info = envs.reset(seed=args.eval_seed)
        if film and atari:  # a vector of games is gray: a twin in colour plays the same game
            twin = make_envs(args, 1, grayscale=False, stack_num=1, img_height=210, img_width=160)
            twin.reset(seed=args.eval_seed)
        while playing.any() and t < args.eval_max_steps and not stopped():
            action = agent.act(obs, info, greedy=not args.sample_actions)
            next_obs, reward, terminated, truncated, next_info = envs.step(action)
            if film and playing[0]:
                frame = twin.step(action[:1])[0][0, 0] if atari else envs.envs[0].render()
                if not isinstance(frame, np.ndarray):
                    raise UsageError(f"{args.env_id} cannot be filmed: its render() gives {frame}, no image")
                if t == 0:  # VP9: browsers play it
                    codec, fps = cv2.VideoWriter_fourcc(*"vp09"), envs.metadata.get("render_fps") or 15
                    writer = cv2.VideoWriter(str(film), codec, fps, frame.shape[1::-1])
                writer.write(np.ascontiguousarray(frame[..., ::-1]))  # blue first, as OpenCV wants it
            success = next_info.get("is_success", next_info.get("success", np.zeros(n)))
            totals += playing * [reward, args.gamma**t * reward, np.ones(n), terminated, success]
            playing &= ~(terminated | truncated)
            info |= next_info  # what else a policy keeps in it stays, such as a memory
            obs, info = reset_done(envs, next_obs, info, terminated | truncated)
            t += 1
        envs.close()
    agent.train()
    random.setstate(states[0])
    np.random.set_state(states[1])
    metrics = {f"eval/return_{name}": getattr(totals[0], name)() for name in ("mean", "std", "min", "max")}
    names = "discounted_return_mean", "length_mean", "termination_rate", "success_rate"
    means = totals[1].mean(), totals[2].mean(), totals[3].mean(), (totals[4] > 0).mean()
    return totals[0], metrics | {f"eval/{name}": mean for name, mean in zip(names, means, strict=True)}


def load(path: str | Path) -> dict:
    """The state in a .pt file, or in the checkpoint.pt of a run folder."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise UsageError(f"cannot load {path}: {error}") from None


def load_policy(path: str | Path):
    """policy(obs, info) -> actions for environments of make_envs, from a .pt file or a run folder."""
    state = load(path)
    args = Args(**state["args"])
    envs = make_envs(args, 1)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, torch.device("cpu"))
    agent.load_state_dict(state["agent"])
    return agent.eval().act


class Run:
    """The folder of a run: its counters, log, evaluations and checkpoints.

    chunk is the number of environment steps between two pauses. parts are all that learning depends on,
    objects with state_dict and load_state_dict; agent is what plays.
    """

    def __init__(self, args, chunk: int, **parts):
        self.args, self.chunk, self.parts, self.signal, self.handlers = args, chunk, parts, 0, {}
        self.env_steps, self.saved_at, self.seconds, self.best = 0, -1, 0.0, -math.inf
        self.returns, self.episodes = [], []  # of the last evaluation; (return, length) since the last row
        self.episode_return, self.episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs)
        script = Path(sys.modules[train.__module__].__file__)
        name = f"{args.env_id.replace(':', '-')}/{script.stem}/{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(args.run_dir or f"runs/{name}")
        if path := args.resume or args.evaluate or args.init_from:
            self.load(Path(path))
        if not args.evaluate:
            self.open(script)

    def load(self, path: Path) -> None:
        """Takes all parts for --resume, the agent alone for --evaluate and --init-from."""
        state, whole = load(path), bool(self.args.resume)
        if whole and not self.parts.keys() <= state.keys():
            raise UsageError(f"{path} is no whole checkpoint: --init-from starts a new run from its weights")
        try:
            for name in self.parts if whole else ["agent"]:
                self.parts[name].load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"{path} does not fit these arguments: {error}") from None
        if self.args.init_from:
            return
        vars(self).update(state["run"], saved_at=state["run"]["env_steps"])
        if self.args.resume and self.args.run_dir:  # a branch has a log and a best model of its own
            self.best = -math.inf
        else:
            self.folder = path if path.is_dir() else path.parent

    def open(self, script: Path) -> None:
        """Makes the folder, or goes on in it; what was logged after the checkpoint is done again."""
        args, self.progress = self.args, self.folder / "progress.jsonl"
        if any(self.folder.glob("*")) and (args.run_dir or not args.resume):
            raise UsageError(f"{self.folder} is not empty: choose another --run-dir, or --resume it")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.progress.exists():
            rows = self.progress.read_bytes().splitlines(keepends=True)
            kept = [row for row in rows if row.endswith(b"\n") and json.loads(row)["step"] <= self.env_steps]
            os.truncate(self.progress, sum(map(len, kept)))
        git = subprocess.getoutput(f'git -C "{script.parent}" describe --always --dirty')
        about = {module.__name__: module.__version__ for module in (torch, gym, np)} | dict(
            python=sys.version, git=git, command=sys.argv, step=self.env_steps,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        )  # fmt: skip
        environment = self.folder / "environment.json"
        history = json.loads(environment.read_text()) if environment.exists() else []
        environment.write_text(json.dumps([*history, about], indent=2))
        (self.folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
        shutil.copy(script, self.folder / (f"{script.stem}-{self.env_steps}.py" if history else script.name))
        self.writer = SummaryWriter(str(self.folder), purge_step=self.env_steps + 1)
        self.writer.add_text("args", json.dumps(asdict(args) | about, indent=4), self.env_steps)
        self.bar = tqdm(total=args.total_timesteps, initial=self.env_steps, unit=" steps", disable=None)
        self.started_at = time.perf_counter() - self.seconds
        print(f"run folder: {self.folder}")
        with contextlib.suppress(ValueError):  # signals reach the main thread only
            self.handlers = {n: signal.signal(n, self.catch) for n in (signal.SIGINT, signal.SIGTERM)}

    def catch(self, number: int, frame) -> None:
        """Stops at the next pause; a second signal stops at once."""
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def count(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Counts one step of every environment; reward is as the environment gave it."""
        self.env_steps += len(reward)
        self.episode_return += reward
        self.episode_length += 1
        for i in done.nonzero()[0]:
            self.episodes.append((float(self.episode_return[i]), float(self.episode_length[i])))
            self.episode_return[i] = self.episode_length[i] = 0

    @property
    def finished(self) -> bool:
        """Whether the training is over, or a signal asks to stop."""
        reached = self.env_steps >= self.args.total_timesteps or self.best >= self.args.stop_return
        return reached or self.signal > 0

    def due(self, every: int) -> bool:
        """Whether the last chunk of steps reached a multiple of every, or the end; not right after a load."""
        now = self.finished or every > 0 and self.env_steps % every < self.chunk
        return now and self.saved_at < self.env_steps

    def evaluate(self) -> np.ndarray:
        """Scores the agent, logs it, keeps it in models/, and in best.pt if it is the best so far."""
        args, film = self.args, None
        if args.capture_video:
            seed = f"-seed{args.eval_seed}" if args.evaluate else ""
            film = self.folder / "videos" / f"{self.env_steps}{seed}.mp4"
            film.parent.mkdir(exist_ok=True)
        returns, metrics = evaluate(args, self.parts["agent"], film, lambda: self.signal)
        text = " ".join(f"{name.removeprefix('eval/')} {value:.5g}" for name, value in metrics.items())
        tqdm.write(f"step {self.env_steps} {text} over {len(returns)} episodes {film or ''}")
        if args.evaluate or self.signal:
            return returns
        self.returns = returns.tolist()
        self.log(metrics)
        self.save(f"models/{self.env_steps}.pt", agent=self.parts["agent"])
        if returns.mean() > self.best:
            self.best = float(returns.mean())
            self.save("best.pt", agent=self.parts["agent"])
        return returns

    def log(self, metrics: dict[str, torch.Tensor | float]) -> None:
        """Writes a row to progress.jsonl and TensorBoard. The only place where metrics are waited for."""
        row = {name: float(value) for name, value in metrics.items()}
        self.check_finite(row)
        if self.episodes:
            row["train/episode_return"], row["train/episode_length"] = np.mean(self.episodes, axis=0)
            self.bar.set_postfix(episode_return=row["train/episode_return"], refresh=False)
            self.episodes = []
        self.seconds = time.perf_counter() - self.started_at
        row["speed/steps_per_second"] = self.env_steps / self.seconds
        for name, value in row.items():
            self.writer.add_scalar(name, value, self.env_steps)
        with self.progress.open("a") as file:
            file.write(json.dumps({"step": self.env_steps, "seconds": self.seconds, **row}) + "\n")
        self.bar.update(self.env_steps - self.bar.n)

    def check_finite(self, values: dict) -> None:
        """Stops the run before a NaN or an infinity reaches a file."""
        if bad := [name for name, x in values.items() if not torch.as_tensor(x).isfinite().all()]:
            what = f"{', '.join(bad)} not finite at step {self.env_steps}"
            raise FloatingPointError(f"{what}; {self.folder} has the checkpoint of step {self.saved_at}")

    def save(self, name: str, **parts) -> None:
        """Writes a whole file or none: a kill or a full disk leaves the previous one as it was."""
        states = {name: part.state_dict() for name, part in parts.items()}
        self.check_finite(states["agent"])
        run = {name: getattr(self, name) for name in ("env_steps", "seconds", "best", "returns", "episodes")}
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.with_suffix(".part").open("wb") as file:
            torch.save(dict(args=asdict(self.args), run=run, **states), file)
            os.fsync(file.fileno())
        path.with_suffix(".part").replace(path)

    def checkpoint(self) -> None:
        """Saves all that what follows depends on; episodes in progress are dropped."""
        self.writer.flush()
        self.save("checkpoint.pt", **self.parts)
        self.saved_at = self.env_steps
        self.episode_return[:] = self.episode_length[:] = 0

    def close(self, envs) -> np.ndarray:
        """Returns the returns of the last evaluation, one per episode."""
        envs.close()
        self.writer.close()
        self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.signal:
            go_on = f"python {sys.argv[0]} --resume {self.folder}"
            print(f"stopped at step {self.env_steps}, saved; to go on: {go_on}", file=sys.stderr)
            sys.exit(128 + self.signal)
        return np.array(self.returns)


def main() -> None:
    try:
        train(parse_args())
    except (UsageError, FloatingPointError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
