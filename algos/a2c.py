"""Advantage Actor-Critic (Mnih et al. 2016, arXiv 1602.01783): one gradient step of actor and critic on each
short rollout, whose returns end in the critic's value instead of waiting for the episode to end.

    policy     L_PG = E[A_t log pi(a_t | s_t)]
    total      L = L_PG - c_1/2 (V(s_t) - R_t)^2 + c_2 entropy(pi), R_t = A_t + V(s_t), A_t constants
    advantage  A_t = sum_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
               lambda = 1: A_t = r_t + gamma r_{t+1} + ... + gamma^(n-t) V(s_n) - V(s_t)      (Algorithm S3)

Differences from the paper:
 1. Synchronous: all environments step together and one gradient is the mean over their steps. In the paper's
    A3C, asynchronous workers each sum over steps of their own and write to shared parameters.
 2. Adam in place of RMSprop; the gradient is clipped by its global norm.
 3. lambda may be below 1 (Schulman et al. 2016, arXiv 1506.02438, eq. 16), and advantages may be normalized.
 4. The value error carries a factor 1/2; actor and critic share no layers by default.
 5. A time limit is no termination: A_t bootstraps from the value of the true final observation.
 6. Box actions are Gaussian with one standard deviation per dimension, on [-1, 1] stretched to the bounds of
    the space; they are clipped only on their way into the environment.
 7. Images: Nature CNN (Mnih et al. 2015); on Atari shared by actor and critic, and rewards become their sign.

    python algos/a2c.py --env-id CartPole-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
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
    log_every: int = 1_000  # environment steps between rows of the log
    eval_episodes: Count = 10  # episodes of one evaluation
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations
    sample_actions: bool = False  # evaluations draw actions from the policy in place of the likeliest ones
    capture_video: bool = False  # film an episode of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 4  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 1_000_000  # environment steps, rounded up to whole rollouts
    num_steps: Count = 32  # steps of each environment in a rollout
    learning_rate: Rate = 1e-3  # step size of the update
    critic_lr: Rate | None = None  # learning rate of the critic; None: learning_rate
    anneal_lr: bool = False  # learning rates fall linearly to 0
    adam_eps: Rate = 1e-5  # added to the denominator of Adam
    gamma: Share = 0.99  # discount
    gae_lambda: Share = 0.95  # lambda of the advantage; 1: returns to the end of the rollout, then V
    normalize_advantage: bool = False  # to mean 0 and standard deviation 1 in each rollout
    value_coef: Rate = 0.5  # c_1, weight of the value error
    entropy_coef: float = 0.0  # c_2, weight of the entropy
    entropy_method: Literal["none", "regularized", "max"] = "regularized"  # add it to: nothing, loss, rewards
    max_grad_norm: Rate = 0.5  # global norm at which the gradient is clipped
    hidden_sizes: tuple[Count, ...] = (64, 64)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the hidden layers
    shared_trunk: bool = False  # actor and critic share all layers but the last
    log_std_init: float = -1.0  # log standard deviation of Box actions at first
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10
    normalize_reward: bool = False  # rewards over the standard deviation of the running discounted return
    clip_reward: bool = False  # rewards to their sign, for learning only


# -------------------------------------------------------------------------------------------- learning rule
def compute_gae(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16; PPO eq. 11, 12).

    All inputs and the result are (num_steps, num_envs). next_value[t] is V of the true successor of step t,
    also of a final observation. A termination ends the return, a truncation only the recursion.
    """
    td_error = reward + gamma * (1 - terminated) * next_value - value
    advantage, decay = td_error.numpy(), (gamma * gae_lambda * (1 - done)).numpy()  # faster on small arrays
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += decay[t] * advantage[t + 1]
    return torch.from_numpy(advantage)


def policy_loss(log_prob, advantage):
    """-L_PG: its gradient is that of the policy gradient theorem, with the sign turned. Inputs (B,)."""
    return -(log_prob * advantage).mean()


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device, batch_size = set_up(args), args.num_envs * args.num_steps
    envs, obs, info = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    critic_lr = args.learning_rate if args.critic_lr is None else args.critic_lr
    critic = [*agent.critic.parameters(), *agent.value_head.parameters()]
    actor = [*agent.shared.parameters(), *agent.actor.parameters(), *agent.head.parameters()]
    graph = args.compile and device.type == "cuda"
    optimizer = Adam([(actor, args.learning_rate), (critic, critic_lr)], device, args.adam_eps, graph)
    reward_norm = RewardNorm(args.gamma)

    def update(batch):
        """One gradient step on a rollout of tensors (B, ...)."""
        features = agent.encode(batch["obs"])
        pi, value = agent.policy(features), agent.value(features)
        log_prob, entropy = agent.head.log_prob(pi, batch["action"]), agent.head.entropy(pi).mean()
        advantage = batch["advantage"]
        if args.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        loss_policy = policy_loss(log_prob, advantage)
        loss_value = 0.5 * F.mse_loss(value, batch["return_"])
        loss = loss_policy + args.value_coef * loss_value
        if args.entropy_coef and args.entropy_method == "regularized":
            loss = loss - args.entropy_coef * entropy
        optimizer.zero_grad()
        loss.backward()
        actor_norm, critic_norm = clip_gradients(optimizer, args.max_grad_norm)
        optimizer.step()
        return {
            "loss/policy": loss_policy.detach(), "loss/value": loss_value.detach(),
            "policy/entropy": entropy.detach(),
            "grad/actor_norm": actor_norm, "grad/critic_norm": critic_norm,
        }  # fmt: skip

    learn = CudaGraph(update) if graph else update
    run = Run(args, batch_size, agent=agent, optimizer=optimizer, reward_norm=reward_norm)
    if args.evaluate:
        return run.evaluate()
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
            reward_norm.return_ = 0.0
        if args.anneal_lr:
            for group in optimizer.param_groups:
                group["lr"].fill_(group["initial_lr"] * (1 - run.env_steps / args.total_timesteps))

        # Act and step. Only the actor runs here; values follow in one batch.
        steps = []
        for _ in range(args.num_steps):
            action = agent.act(obs, info, greedy=False)
            next_obs, reward, terminated, truncated, next_info = envs.step(action)
            done = terminated | truncated
            steps.append(dict(
                obs=obs, action=action, reward=np.float32(reward), next_obs=next_obs, terminated=terminated,
                done=done,
            ))  # fmt: skip
            run.count(reward, done)
            obs, info = reset_done(envs, next_obs, next_info, done)

        # Advantages, by the networks that collected the rollout; their recursion runs on the host
        rollout = stack_steps(steps)  # tensors (num_steps, num_envs, ...)
        flat = {name: to_tensor(x.flatten(0, 1), device) for name, x in rollout.items()}
        batch = {name: flat[name] for name in ("obs", "action")}
        with torch.no_grad():
            features = agent.encode(batch["obs"])
            pi, value = agent.policy(features), agent.value(features)
            next_value = agent.value(agent.encode(flat["next_obs"]))
        reward, terminated, done = rollout["reward"], rollout["terminated"], rollout["done"]
        value, next_value = torch.stack([value, next_value]).cpu().view(2, *reward.shape)
        if args.normalize_reward:
            reward = reward_norm(reward, done)
        if args.clip_reward:
            reward = reward.sign()
        if args.entropy_method == "max":
            reward = reward + args.entropy_coef * agent.head.entropy(pi).cpu().view_as(reward)
        advantage = compute_gae(reward, value, next_value, terminated, done, args.gamma, args.gae_lambda)
        batch["advantage"] = to_tensor(advantage.flatten(), device)
        batch["return_"] = to_tensor((advantage + value).flatten(), device)

        # Update, once on the whole rollout
        metrics = learn(batch)
        if args.normalize_obs:  # only now: the values of the rollout are under the old normalizer
            agent.obs_norm.update(batch["obs"])

        # Log
        if run.due(args.log_every):
            run.log(metrics | {
                "value/mean": value.mean(), "value/target_mean": (advantage + value).mean(),
                "value/explained_variance": 1 - advantage.var() / (advantage + value).var().clamp(min=1e-8),
                "reward/mean": rollout["reward"].mean(), "reward/max": rollout["reward"].max(),
                "schedule/learning_rate": optimizer.param_groups[0]["lr"],
            })  # fmt: skip


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


class CategoricalHead(nn.Module):
    """K independent choices among up to N (Discrete: K = 1). pi holds their log-probabilities (B, K, N)."""

    def __init__(self, fan_in, space):
        super().__init__()
        choices = torch.tensor([space.n] if isinstance(space, Discrete) else space.nvec.ravel())
        self.register_buffer("exists", torch.arange(choices.max()) < choices[:, None], persistent=False)
        self.ragged = not self.exists.all()
        self.logits = orthogonal(nn.Linear(fan_in, self.exists.numel()), gain=0.01)

    def forward(self, features):
        logits = self.logits(features).view(-1, *self.exists.shape)
        if self.ragged:
            logits = logits.masked_fill(~self.exists, -1e8)
        return logits.log_softmax(-1)

    def choose(self, pi, greedy):
        """Actions (B, K). The argmax of log p + Gumbel noise is a draw from p."""
        return (pi if greedy else pi - torch.empty_like(pi).exponential_().log()).argmax(-1)

    def log_prob(self, pi, action):
        return pi.gather(-1, action.view(len(pi), -1, 1)).sum((-2, -1))  # (B,)

    def entropy(self, pi):
        return -(pi.exp() * pi).sum((-2, -1))  # (B,)


class GaussianHead(nn.Module):
    """Box actions of A dimensions. pi holds their means and log standard deviations (B, 2A)."""

    def __init__(self, fan_in, space, log_std_init):
        super().__init__()
        self.mean = orthogonal(nn.Linear(fan_in, math.prod(space.shape)), gain=0.01)
        self.log_std = nn.Parameter(torch.full((math.prod(space.shape),), log_std_init))

    def forward(self, features):
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)

    def choose(self, pi, greedy):
        mean, log_std = pi.chunk(2, dim=-1)
        return mean if greedy else mean + log_std.exp() * torch.randn_like(mean)  # (B, A)

    def log_prob(self, pi, action):
        mean, log_std = pi.chunk(2, dim=-1)
        z = (action.view_as(mean) - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)  # (B,)

    def entropy(self, pi):
        return (pi.chunk(2, dim=-1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)  # (B,)


class Agent(nn.Module):
    """Policy and value of observations (B, *obs_space.shape), in separate networks or on a shared trunk."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        self.device, self.action_shape = device, action_space.shape
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        make_trunk = lambda: Trunk(obs_space, args.hidden_sizes, args.activation)
        trunk = make_trunk()
        if args.shared_trunk:
            self.shared, self.actor, self.critic = trunk, nn.Identity(), nn.Identity()
        else:
            self.shared, self.actor, self.critic = nn.Identity(), trunk, make_trunk()
        if isinstance(action_space, Box):
            self.head = GaussianHead(trunk.width, action_space, args.log_std_init)
        else:
            self.head = CategoricalHead(trunk.width, action_space)
        self.value_head = orthogonal(nn.Linear(trunk.width, 1), gain=1.0)
        self.to(device)

    def encode(self, obs):
        """What actor and critic share of their work on observations (B, ...)."""
        return self.shared(self.obs_norm(obs))

    def policy(self, features):
        """pi(. | s) as its head describes it."""
        return self.head(self.actor(features))

    def value(self, features):
        return self.value_head(self.critic(features)).squeeze(-1)  # (B,)

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs, *action_space.shape) in a vector environment: the likeliest ones, or drawn."""
        pi = self.policy(self.encode(to_tensor(obs, self.device)))
        return self.head.choose(pi, greedy).cpu().numpy().reshape(-1, *self.action_shape)


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


class RewardNorm(RunningNorm):
    """Rewards over the standard deviation of the running discounted return, clipped to +-10."""

    def __init__(self, gamma: float):
        super().__init__(())
        self.gamma, self.return_ = gamma, 0.0  # return_ starts from 0 in each segment

    def forward(self, reward: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Rewards and episode ends (num_steps, num_envs) of the steps that follow the last call."""
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            returns[t] = reward[t] + self.gamma * self.return_
            self.return_ = returns[t] * (1 - done[t])
        self.update(returns.flatten())
        return (reward * (self.var + 1e-8).rsqrt()).clamp(-10, 10).float()


# Own trials, results in benchmark/results; LunarLander, where seeds differ by 250, starts from RL
# Baselines3 Zoo's a2c.yml.
TUNED = {
    "CartPole-v1": dict(total_timesteps=200_000, num_envs=8, num_steps=8, critic_lr=3e-3, anneal_lr=True),
    "Acrobot-v1": dict(total_timesteps=300_000, num_envs=16, num_steps=16, learning_rate=2e-3, anneal_lr=True,
                       normalize_advantage=True, normalize_obs=True, normalize_reward=True,
                       eval_every=25_000),
    "Pendulum-v1": dict(num_envs=8, num_steps=8, critic_lr=3e-3, anneal_lr=True, gamma=0.9, gae_lambda=0.9,
                        log_std_init=0.0, normalize_reward=True, eval_every=100_000),
    "MountainCarContinuous-v0": dict(total_timesteps=100_000, num_steps=200, learning_rate=1.5e-3,
                                     anneal_lr=True, gamma=0.9999, gae_lambda=0.98, log_std_init=0.0,
                                     normalize_obs=True, normalize_reward=True),
    "LunarLander-v3": dict(total_timesteps=200_000, num_envs=8, num_steps=5, learning_rate=3e-3,
                           anneal_lr=True, gamma=0.995, gae_lambda=1.0, value_coef=1.0),
    "mujoco": dict(num_steps=64, learning_rate=2e-3, critic_lr=5e-3, anneal_lr=True, log_std_init=0.0,
                   normalize_advantage=True, normalize_obs=True, normalize_reward=True, eval_every=50_000),
    # after RL Baselines3 Zoo's settings for Atari, which has RMSprop
    "atari": dict(total_timesteps=10_000_000, num_envs=16, num_steps=5, gae_lambda=1.0, learning_rate=7e-4,
                  value_coef=0.25, entropy_coef=0.01, shared_trunk=True, hidden_sizes=(512,),
                  activation="relu", clip_reward=True, eval_every=500_000, checkpoint_every=50_000,
                  torch_threads=0),
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


def stack_steps(steps: list[dict]) -> dict[str, torch.Tensor]:
    """Tensors (num_steps, num_envs, ...) on the host, of all that the steps have."""
    host = torch.device("cpu")
    return {name: to_tensor(np.stack([step[name] for step in steps]), host) for name in steps[0]}


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
