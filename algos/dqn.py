"""Deep Q-network, DQN (Mnih et al. 2015, doi 10.1038/nature14236): a network learns the value Q(s, a) of each
action by Q-learning on transitions replayed from memory, towards targets from an older copy of itself.

    target     y = r + gamma max_a Q'(s', a)       Q' is the older copy    (van Hasselt et al. 2016, eq. 3)
    loss       Huber(y - Q(s, a)), mean over a batch drawn from the replay memory

Five switches, in any combination, with the papers that they are from:

    --double   y = r + gamma Q'(s', argmax_a Q(s', a))                   van Hasselt et al. 2016, 1509.06461
    --dueling  Q(s, a) = V(s) + A(s, a) - mean_b A(s, b)       (eq. 9)   Wang et al. 2016, 1511.06581
    --noisy    weights mu + sigma * noise explore, not epsilon (eq. 9)   Fortunato et al. 2018, 1706.10295
    --n-step   y = sum_{i<n} gamma^i r_{t+i} + gamma^n max_a Q'(s_{t+n}, a)   Sutton 1988
    --per      P(i) ~ (|y - Q(s, a)| + eps)^alpha              (eq. 1)   Schaul et al. 2016, 1511.05952

Differences from the papers:
 1. A time limit is no termination: y keeps its second term, with the true final observation.
 2. Adam in place of RMSprop; the gradient is clipped by its global norm.
 3. Vectors go through an MLP. Noise and dueling act on the last hidden layer and the output, so behind the
    CNN on all layers, as in the papers, but not on the first ones of a deep MLP.
 4. The trunk's gradient is not scaled by 1/sqrt(2) with dueling; noise is drawn anew in every forward pass.
 5. A transition that meets the end of its episode or of the record after k < n steps keeps those k.
 6. A life lost on Atari ends no episode.

    python algos/dqn.py --env-id CartPole-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "psutil", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, copy, errno, importlib, inspect, json, math, os, platform, random, shutil, signal
import subprocess, sys, time
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
    checkpoint_every: int = 20_000  # steps of each environment between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 10  # episodes of one evaluation
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations
    sample_actions: bool = False  # evaluations take a share epsilon of random actions, as training does
    log_every: int = 1_000  # environment steps between rows of the log
    capture_video: bool = False  # film an episode of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 1  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 50_000  # environment steps, rounded up to whole steps of all environments
    double: bool = False  # the online network chooses the next action, the target network judges it
    dueling: bool = False  # separate streams for the value of the state and the advantages of the actions
    noisy: bool = False  # explore by noise on the weights instead of epsilon
    n_step: Count = 1  # rewards before the value takes over
    per: bool = False  # draw transitions with large errors more often
    per_alpha: Share = 0.6  # how much more often; 0: uniform
    per_beta_start: Share = 0.4  # correction of that bias, rises linearly to 1
    per_eps: Annotated[float, (1e-12, 1)] = 1e-6  # added to each priority, so that none is 0
    learning_rate: Rate = 1e-3  # step size of the update
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    adam_eps: Rate = 1e-8  # added to the denominator of Adam
    gamma: Share = 0.99  # discount
    max_grad_norm: Rate = 10.0  # global norm at which the gradient is clipped; inf: never
    batch_size: Count = 64  # transitions in each update
    buffer_size: Count = 100_000  # rows kept for replay: one for each step and one more (Atari: 4) an episode
    learning_starts: int = 1_000  # environment steps of random actions before the first update
    train_every: Count = 1  # environment steps between trainings
    updates_per_train: Count = 1  # gradient steps in each training
    target_update_every: Count = 100  # environment steps between updates of the target network
    tau: Share = 1.0  # share of the new weights in each update of the target network
    epsilon_start: Share = 1.0  # share of random actions at first
    epsilon_end: Share = 0.04  # share of random actions in the end
    exploration_fraction: Share = 0.16  # share of the training in which epsilon falls
    hidden_sizes: tuple[Count, ...] = (256, 256)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "relu"  # between the hidden layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10
    clip_reward: bool = False  # rewards to their sign, for learning only
    reward_scale: float = 1.0  # rewards times this, for learning only


# -------------------------------------------------------------------------------------------- learning rule
def td_target(reward, discount, target_q_values, q_values=None):
    """y = R + gamma^k Q'(s_{t+k}, a*), all (B,): R is the discounted sum of the k rewards before s_{t+k}.

    discount is gamma^k, or 0 where s_{t+k} is terminal. target_q_values (B, A) are Q' of all actions, and a*
    is their argmax. In double DQN the online network chooses: a* is the argmax of its q_values (B, A).
    """
    best = (target_q_values if q_values is None else q_values).argmax(dim=1, keepdim=True)
    return reward + discount * target_q_values.gather(1, best).squeeze(1)


def q_loss(td_error, weight):
    """Mean of Huber's loss of the errors e (B,), times the weights (B,): e^2 / 2, or |e| - 1/2 beyond 1."""
    return (weight * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()


def epsilon_at(env_steps, args):
    """Share of random actions: 1 before learning starts, then linear from epsilon_start to epsilon_end."""
    if env_steps < args.learning_starts:
        return 1.0
    if args.noisy:  # the noise of the weights explores
        return 0.0
    share = min(1.0, env_steps / max(1.0, args.exploration_fraction * args.total_timesteps))
    return args.epsilon_start + share * (args.epsilon_end - args.epsilon_start)


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, obs, info = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    if args.evaluate:  # without the memory that training takes
        return Run(args, args.num_envs, agent=agent).evaluate()
    target_agent = copy.deepcopy(agent)
    graph = args.compile and device.type == "cuda"
    optimizer = Adam([(agent.parameters(), args.learning_rate)], device, args.adam_eps, graph)
    buffer = FrameBuffer(args, envs.single_observation_space, device)
    buffer.start(obs)

    def update(batch):
        """One gradient step on a batch of transitions (B, ...)."""
        with torch.no_grad():
            q_values = agent(batch["next_obs"]) if args.double else None
            y = td_target(batch["reward"], batch["discount"], target_agent(batch["next_obs"]), q_values)
        q_value = agent(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        td_error = y - q_value
        loss = q_loss(td_error, batch["weight"])
        optimizer.zero_grad()
        loss.backward()
        (grad_norm,) = clip_gradients(optimizer, args.max_grad_norm)
        optimizer.step()
        q_value, td_error = q_value.detach(), td_error.detach()
        return {
            "td_error": td_error, "loss/q": loss.detach(), "loss/td_error": td_error.abs().mean(),
            "q/mean": q_value.mean(), "q/max": q_value.max(), "q/target_mean": y.mean(),
            "grad/norm": grad_norm,
        }  # fmt: skip

    learn = CudaGraph(update) if graph else update
    run = Run(args, args.num_envs, agent=agent, target_agent=target_agent, optimizer=optimizer, buffer=buffer)
    if args.init_from:  # it has given its weights to the agent alone
        target_agent.load_state_dict(agent.state_dict())
    rewards, metrics = [], {}  # since the last row; of the last update
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
            buffer.start(obs)
            rewards, metrics = [], {}

        # Act and step
        progress = run.env_steps / args.total_timesteps
        agent.epsilon = epsilon_at(run.env_steps, args)
        if args.normalize_obs:
            agent.obs_norm.update(to_tensor(obs, device))
        action = agent.act(obs, info, greedy=False)
        next_obs, reward, terminated, truncated, next_info = envs.step(action)
        done = terminated | truncated
        run.count(reward, done)
        rewards.extend(reward)

        # Store
        reward = args.reward_scale * (np.sign(reward) if args.clip_reward else reward)
        buffer.add(action, reward, terminated, next_obs)
        obs, info = reset_done(envs, next_obs, next_info, done)
        if done.any():
            buffer.start(obs, done)

        # Update. Each environment step has its turn, so that both intervals are exact for any num_envs.
        if args.anneal_lr:
            for group in optimizer.param_groups:
                group["lr"].fill_(group["initial_lr"] * (1 - progress))
        beta = args.per_beta_start + progress * (1 - args.per_beta_start)
        for step in range(run.env_steps - args.num_envs + 1, run.env_steps + 1):
            if step >= args.learning_starts and step % args.train_every == 0:
                for _ in range(args.updates_per_train):
                    index, weight = buffer.sample(args.batch_size, beta)
                    metrics = learn(buffer.transitions(index) | {"weight": to_tensor(weight, device)})
                    buffer.set_priority(index, metrics.pop("td_error"))
            if step % args.target_update_every == 0:
                polyak_update(agent, target_agent, args.tau)

        # Log
        if run.due(args.log_every):
            run.log(metrics | {
                "reward/mean": np.mean(rewards), "schedule/epsilon": agent.epsilon,
                "schedule/learning_rate": optimizer.param_groups[0]["lr"],
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


class NoisyLinear(nn.Linear):
    """y = (mu_w + sigma_w * eps_w) x + mu_b + sigma_b * eps_b (Fortunato et al. 2018, eq. 9).

    mu (weight and bias) and sigma are learned; eps is drawn anew in each forward, and 0 in evaluations. It is
    factorized: of one number per input and one per output, eps_w has the products (eq. 10 and 11).
    """

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        bound, sigma = fan_in**-0.5, 0.5 * fan_in**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, sigma))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, sigma))

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        noise = torch.randn(self.out_features + self.in_features, device=x.device)
        noise = noise.sign() * noise.abs().sqrt()  # f of the paper
        bias_noise, input_noise = noise.split([self.out_features, self.in_features])
        weight_noise = bias_noise[:, None] * input_noise
        weight = torch.addcmul(self.weight, self.weight_sigma, weight_noise)
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, bias_noise))


class Stream(nn.Module):
    """The last hidden layer and the output: features (B, fan_in) to (B, fan_out); noisy if args say so."""

    def __init__(self, fan_in, fan_out, args):
        super().__init__()
        width = args.hidden_sizes[-1]
        if args.noisy:
            self.hidden, self.output = NoisyLinear(fan_in, width), NoisyLinear(width, fan_out)
        else:
            self.hidden = orthogonal(nn.Linear(fan_in, width))
            self.output = orthogonal(nn.Linear(width, fan_out), gain=1.0)
        self.activation = getattr(F, args.activation)

    def forward(self, features):
        return self.output(self.activation(self.hidden(features)))


class Agent(nn.Module):
    """The values Q(s, a) of all actions (B, A) in observations (B, *obs_space.shape)."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if not isinstance(action_space, Discrete):
            raise UsageError(f"{args.env_id} has {action_space} actions, DQN needs Discrete: try ppo.py")
        if not args.hidden_sizes:
            raise UsageError("--hidden-sizes is empty: give the width of at least one layer")
        self.device, self.num_actions = device, int(action_space.n)
        self.epsilon = epsilon_at(args.total_timesteps, args)  # training sets it anew for each step
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        self.trunk = Trunk(obs_space, args.hidden_sizes[:-1], args.activation)
        self.advantage = Stream(self.trunk.width, self.num_actions, args)  # without dueling it is Q itself
        self.value = Stream(self.trunk.width, 1, args) if args.dueling else None
        self.to(device)

    def forward(self, obs):
        features = self.trunk(self.obs_norm(obs))
        advantage = self.advantage(features)
        if self.value is None:
            return advantage
        return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)  # Wang et al., eq. 9

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs,) in a vector environment: the best ones; if not greedy, some of them random."""
        best = self(to_tensor(obs, self.device)).argmax(dim=1).cpu().numpy()
        explore = np.random.random(len(obs)) < (0.0 if greedy else self.epsilon)
        return np.where(explore, np.random.randint(self.num_actions, size=len(obs)), best)


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
class SumTree:
    """Masses in N leaves, to draw leaves in proportion to them in O(log N).

    levels[0] are the leaves in groups of WIDTH; levels[k + 1] are the sums of the groups of levels[k].
    """

    WIDTH = 32  # NumPy visits 4 levels for a million leaves; a binary tree would have 20

    def __init__(self, size: int):
        self.levels = []
        while not self.levels or size > 1:
            size = math.ceil(size / self.WIDTH)
            self.levels.append(np.zeros((size, self.WIDTH)))

    def set(self, index: np.ndarray, mass: np.ndarray | float) -> None:
        """Sets the masses of leaves (B,). The sums above are made anew, so that no rounding adds up."""
        for level in self.levels:
            level.reshape(-1)[index] = mass
            index = index // self.WIDTH
            mass = level[index].sum(axis=1)

    def draw(self, batch_size: int) -> np.ndarray:
        """Leaves (B,), one from each B-th part of the total mass."""
        batch, leaf = np.arange(batch_size), np.zeros(batch_size, np.int64)
        mass = (batch + np.random.random(batch_size)) / batch_size * self.levels[-1].sum()
        for level in reversed(self.levels):
            sums = level[leaf].cumsum(axis=1)  # (B, WIDTH)
            mass = np.minimum(mass, np.nextafter(sums[:, -1], 0))  # rounding must not lead to an empty leaf
            child = (sums > mass[:, None]).argmax(axis=1)
            mass -= np.where(child > 0, sums[batch, child - 1], 0)  # what lies to the left
            leaf = leaf * self.WIDTH + child
        return leaf


class FrameBuffer:
    """The last buffer_size rows of experience, in a ring of rows for each environment.

    A row holds an observation and the step that was taken from it; the next row holds its successor. So an
    episode of T steps fills T + 1 rows, the last without a step: nothing is stored twice, and a truncated
    step keeps its true successor. On Atari an observation is a stack of frames: a row holds only the newest,
    and the older ones of an episode's first observation get rows too.
    Row t of environment i lies at index t * num_envs + i, so the row after an index is num_envs further on.
    A row is drawn in proportion to its mass, which is 0 if its step or its observation is not whole.
    """

    def __init__(self, args, obs_space: Box, device: torch.device):
        self.args, self.obs_shape, self.device, self.num_envs = args, obs_space.shape, device, args.num_envs
        self.stack = obs_space.shape[0] if args.env_id.startswith("ALE/") else 1
        self.depth = obs_space.shape[0] // self.stack  # of a frame: its extent along the first axis
        self.size = size = args.buffer_size // args.num_envs * args.num_envs
        if size < (least := args.num_envs * (2 * self.stack + 1)):  # a new episode must leave an old step
            raise UsageError(f"--buffer-size {args.buffer_size} is too small: use {least} or more")
        dtype = np.dtype(np.uint8 if len(obs_space.shape) == 3 else np.float32)
        frame = (self.depth, *obs_space.shape[1:])
        needed = size * (math.prod(frame) * dtype.itemsize + 8 + 4 + 1 + 8)  # a row of the five arrays below
        needed += 9 * size * args.per  # leaves of the tree and the sums above
        free = free_memory(torch.device("cpu"))
        text = f"the replay buffer takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
        if needed > free:
            raise UsageError(f"{text}: use a smaller --buffer-size")
        print(text)
        self.obs = np.zeros((size, *frame), dtype)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.terminated, self.mass = np.zeros(size, bool), np.zeros(size)
        self.tree = SumTree(size) if args.per else None
        self.largest = 1.0  # mass so far, which new steps get
        self.row = np.arange(args.num_envs) - args.num_envs  # the newest of each environment
        self.filled = 0  # all rows in use are below

    def start(self, obs: np.ndarray, new: np.ndarray | None = None) -> None:
        """First observations (num_envs, ...) of new episodes: of all, or where new (num_envs,) is true."""
        envs = np.arange(self.num_envs) if new is None else np.flatnonzero(new)
        for frame in np.split(obs[envs], self.stack, axis=1):
            self.write(envs, frame)

    def add(self, action, reward, terminated, next_obs: np.ndarray) -> None:
        """One step (num_envs, ...) of all; next_obs is the true successor, also where an episode ends."""
        self.action[self.row], self.reward[self.row], self.terminated[self.row] = action, reward, terminated
        self.set_mass(self.row, self.largest)
        self.write(np.arange(self.num_envs), next_obs[:, -self.depth :])

    def write(self, envs: np.ndarray, frame: np.ndarray) -> None:
        """Puts a frame of each of these environments into its next row."""
        row = self.row[envs] = (self.row[envs] + self.num_envs) % self.size
        self.filled = max(self.filled, row.max() + 1)
        self.obs[row] = frame
        for later in range(self.stack):  # the oldest observations lose a frame
            self.set_mass((row + later * self.num_envs) % self.size, 0.0)

    def set_mass(self, index: np.ndarray, mass: np.ndarray | float) -> None:
        self.mass[index] = mass
        if self.tree:
            self.tree.set(index, mass)

    def set_priority(self, index: np.ndarray, td_error: torch.Tensor) -> None:
        """With --per, the mass of rows (B,) becomes (|td_error| + eps)^alpha (Schaul et al. 2016, eq. 1)."""
        if self.tree:
            mass = (td_error.abs().cpu().double().numpy() + self.args.per_eps) ** self.args.per_alpha
            self.largest = max(self.largest, float(mass.max()))
            self.set_mass(index, mass)

    def sample(self, batch_size: int, beta: float) -> tuple[np.ndarray, np.ndarray]:
        """Rows (B,) with a step, and the weights (B,) in the loss that correct how often each is drawn.

        The weights are (N P(i))^-beta over their maximum, so N and the total mass cancel.
        """
        if self.tree:
            index = self.tree.draw(batch_size)
            mass = self.mass[index]
            return index, (mass / mass.min()) ** -beta
        index = np.random.randint(self.filled, size=batch_size)
        while (empty := self.mass[index] == 0).any():
            index[empty] = np.random.randint(self.filled, size=empty.sum())
        return index, np.ones(batch_size)

    def transitions(self, index: np.ndarray) -> dict[str, torch.Tensor]:
        """The n-step transitions (B, ...) from these rows (B,), on the device.

        They stop early, after k < n steps, where an episode or the record ends: reward is sum_{i<k} gamma^i
        r_{t+i}, next_obs is s_{t+k}, discount is gamma^k, and 0 if s_{t+k} is terminal.
        """
        steps, gamma = np.arange(self.args.n_step)[:, None], self.args.gamma
        rows = (index + steps * self.num_envs) % self.size  # (n, B)
        going = np.logical_and.accumulate(self.mass[rows] > 0)  # the row after an end has no step
        k = going.sum(axis=0)
        reward = (gamma**steps * going * self.reward[rows]).sum(axis=0)
        discount = gamma**k * ~(going & self.terminated[rows]).any(axis=0)
        both = np.stack([index, index + k * self.num_envs])
        frames = (both[..., None] + self.num_envs * np.arange(1 - self.stack, 1)) % self.size  # oldest first
        obs, next_obs = to_tensor(self.obs[frames], self.device).view(2, len(index), *self.obs_shape)
        action, reward, discount = (to_tensor(x, self.device) for x in (self.action[index], reward, discount))
        return dict(obs=obs, action=action, reward=reward, discount=discount, next_obs=next_obs)

    def state_dict(self) -> dict:
        """The rows in use, cut in NumPy: of a slice of a tensor torch would save the whole."""
        names = "obs", "action", "reward", "terminated", "mass"
        state = {name: torch.from_numpy(getattr(self, name)[: self.filled]) for name in names}
        return state | dict(size=self.size, row=self.row.tolist(), largest=self.largest)

    def load_state_dict(self, state: dict) -> None:
        if (state["size"], len(state["row"])) != (self.size, self.num_envs):
            raise ValueError("its replay buffer has another shape: keep --buffer-size and --num-envs")
        self.row, self.filled, self.largest = np.array(state["row"]), len(state["obs"]), state["largest"]
        for name in ("obs", "action", "reward", "terminated"):
            getattr(self, name)[: self.filled] = state[name].numpy()
        self.set_mass(np.arange(self.filled), state["mass"].numpy())


# From RL Baselines3 Zoo's dqn.yml, changed by own trials. Atari: CleanRL. Rewards of a tenth make errors
# small: beyond 1 the gradient of Huber's loss is bounded.
TUNED = {
    "CartPole-v1": dict(learning_rate=2e-3, n_step=5, train_every=4, target_update_every=250,
                        hidden_sizes=(128, 128), reward_scale=0.1),
    "Acrobot-v1": dict(total_timesteps=100_000, learning_rate=6.3e-4, n_step=3, batch_size=128,
                       buffer_size=50_000, train_every=4, updates_per_train=2, target_update_every=250,
                       exploration_fraction=0.12, epsilon_end=0.03, hidden_sizes=(128, 128)),
    "MountainCar-v0": dict(total_timesteps=120_000, learning_rate=4e-3, batch_size=128, buffer_size=10_000,
                           gamma=0.98, n_step=4, train_every=16, updates_per_train=8, target_update_every=600,
                           exploration_fraction=0.2, epsilon_end=0.07, hidden_sizes=(128, 128),
                           normalize_obs=True),
    "LunarLander-v3": dict(total_timesteps=300_000, learning_rate=6.3e-4, n_step=3, train_every=4,
                           updates_per_train=4, target_update_every=1_000, exploration_fraction=0.12,
                           epsilon_end=0.05, hidden_sizes=(128, 128), reward_scale=0.1, eval_every=25_000),
    "atari": dict(total_timesteps=10_000_000, learning_rate=1e-4, batch_size=32, buffer_size=1_000_000,
                  learning_starts=80_000, train_every=4, target_update_every=1_000, exploration_fraction=0.1,
                  epsilon_end=0.01, hidden_sizes=(512,), clip_reward=True, eval_every=500_000,
                  torch_threads=0, checkpoint_every=1_000_000),
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


@torch.no_grad()
def polyak_update(network: nn.Module, target: nn.Module, tau: float) -> None:
    """target <- tau network + (1 - tau) target; buffers, as of normalizers, are copied."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)
    for old, new in zip(target.buffers(), network.buffers(), strict=True):
        old.copy_(new)


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
