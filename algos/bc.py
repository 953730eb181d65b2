"""Behavioural cloning and DAgger (Pomerleau 1991; Ross, Gordon, Bagnell 2011, arXiv 1011.0686): learn to act
as an expert did, by supervised learning on its episodes; DAgger also asks it where the learner gets to.

    log_prob   L = -E[log pi(a* | s)]      for the action a* of the expert in state s
    mse        L = E[|a* - mean(s)|^2]     Box actions: the mean action of the policy, not a drawn one
    DAgger     D <- D + {(s, pi*(s))}      s in episodes that the learner plays, pi* the expert (alg. 3.1)

Differences from the papers:
 1. The expert plays the first episodes, the learner alone all later ones, greedily: beta is 1, then 0.
 2. An iteration of DAgger goes on with the weights of the one before.
 3. An episode is learned from or validated on, never both. An iteration ends when the loss on those
    for validation has not fallen for patience epochs, with the weights that had the least.
 4. An epoch is minibatches_per_epoch minibatches, drawn from all steps of the demonstrations. A step, in the
    log and in the options, is a gradient step: the steps of environments are not counted.
 5. Box actions are clipped to their bounds, as the environment does it, then learned.

    python algos/ppo.py --env-id CartPole-v1 --run-dir runs/expert
    python algos/bc.py --env-id CartPole-v1 --expert runs/expert
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, errno, importlib.util, inspect, json, math, os, platform, random, shutil, signal
import subprocess, sys, time
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Literal, get_args, get_type_hints
from zipfile import BadZipFile

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
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder or checkpoint.pt to continue; with --run-dir in a new folder
    init_from: str = ""  # .pt file whose weights a new run starts from
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to play and score, without training
    checkpoint_every: int = 1_000  # gradient steps between checkpoints; 0: only at the end
    eval_every: int = 1_000  # gradient steps between evaluations; 0: only at the end
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
    # expert
    expert: str = ""  # who demonstrates: run folder or .pt file of any script, or an .npz file of episodes
    expert_script: str = ""  # the script that made the .pt file; empty: the copy in its run folder
    dataset: str = ""  # id of a Minari dataset, in place of --expert
    expert_episodes: Count = 100  # episodes that the expert plays, or that are read at most
    # algorithm
    total_timesteps: Count = 20_000  # gradient steps at most, each iteration has an equal share
    dagger_iterations: Annotated[int, (0, math.inf)] = 0  # iterations after the first; 0: behavioural cloning
    dagger_episodes: Count = 10  # episodes of the learner before each of them
    loss: Literal["log_prob", "mse"] = "log_prob"  # mse: of the mean action, Box actions only
    batch_size: Count = 64  # demonstrations in a minibatch
    minibatches_per_epoch: Count = 16  # gradient steps between validations
    validation_share: Annotated[float, (0, 0.5)] = 0.1  # episodes kept to validate; 0.1: every tenth
    patience: Count = 100  # epochs without a lesser validation loss that end an iteration
    learning_rate: Rate = 1e-3  # step size of the updates
    max_grad_norm: Rate = math.inf  # global norm at which the gradient is clipped
    gamma: Share = 0.99  # discount, of eval/discounted_return_mean alone
    hidden_sizes: tuple[Count, ...] = (64, 64)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the hidden layers
    log_std_init: float = -1.0  # log standard deviation of Box actions at first, with mse always
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# -------------------------------------------------------------------------------------------- learning rule
def log_prob_loss(log_prob):
    """Minus the mean log-probability (B,) of the expert's actions."""
    return -log_prob.mean()


def mse_loss(mean, action):
    """Squared distance of the expert's action from the mean action, both (B, A), mean over the batch."""
    return (action - mean).square().sum(dim=-1).mean()


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, *_ = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    optimizer = Adam([(list(agent.parameters()), args.learning_rate)], device)
    demonstrations = Demonstrations(envs.single_action_space, args.validation_share, device)
    iteration = Iteration(agent)

    def imitation_loss(batch):
        """Loss and entropy on demonstrations, (B, ...) tensors of obs and action."""
        pi = agent.policy(agent.encode(batch["obs"]))
        entropy = agent.head.entropy(pi).mean()
        if args.loss == "mse":
            return mse_loss(agent.head.choose(pi, greedy=True), batch["action"].flatten(1)), entropy
        return log_prob_loss(agent.head.log_prob(pi, batch["action"])), entropy

    def update(batch):
        """One gradient step on a minibatch."""
        loss, entropy = imitation_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        (actor_norm,) = clip_gradients(optimizer, args.max_grad_norm)
        optimizer.step()
        return loss.detach(), entropy.detach(), actor_norm

    @torch.no_grad()
    def validate():
        """Mean loss on all demonstrations for validation, a thousand at a time."""
        stored, count = demonstrations.validation, len(demonstrations.validation["obs"])
        batches = ({name: x[i : i + 1000] for name, x in stored.items()} for i in range(0, count, 1000))
        return float(sum(len(batch["obs"]) * imitation_loss(batch)[0] for batch in batches) / count)

    parts = dict(agent=agent, optimizer=optimizer, demonstrations=demonstrations, iteration=iteration)
    if args.evaluate:  # playing needs no expert
        return Run(args, args.minibatches_per_epoch, **parts).evaluate()
    if bool(args.expert) == bool(args.dataset):
        raise UsageError("who demonstrates? give --expert or --dataset")
    if args.loss == "mse" and not isinstance(envs.single_action_space, Box):
        raise UsageError(f"--loss mse is for Box actions, {args.env_id} has {envs.single_action_space}")
    recorded = read_episodes(args) if args.dataset or args.expert.endswith(".npz") else []
    if recorded and args.dagger_iterations:
        raise UsageError("--dagger-iterations needs an expert that acts: a run folder or a .pt file")
    expert = None if recorded else load_expert(args)
    run = Run(args, args.minibatches_per_epoch, **parts)
    steps_of_each = args.total_timesteps / (1 + args.dagger_iterations)
    while True:
        # Pause: score, save, end, or go on from what was saved
        if run.due(args.eval_every) and not run.signal:
            run.evaluate()
        if run.due(args.checkpoint_every):
            run.checkpoint()
        if run.finished:
            return run.close(envs)
        if run.saved_at == run.env_steps:  # what follows depends on the checkpoint alone
            envs, *_ = start_segment(args, run.env_steps, envs)

        # An iteration begins: episodes of the expert at first, then its answers in episodes of the learner
        result = {}
        if iteration.over:
            episodes = []
            if iteration.number == 0:
                episodes = recorded or demonstrate(envs, None, expert, args.expert_episodes)
            elif iteration.number <= args.dagger_iterations:
                episodes = demonstrate(envs, agent.act, expert, args.dagger_episodes)
            if episodes:
                rewards = np.concatenate([episode["reward"] for episode in episodes])
                result |= {"reward/mean": rewards.mean(), "reward/max": rewards.max()}
                returns = [float(episode["reward"].sum()) for episode in episodes]
                if iteration.number == 0:
                    result |= {"expert/return_mean": np.mean(returns), "expert/return_std": np.std(returns)}
                else:
                    lengths = [float(len(episode["reward"])) for episode in episodes]
                    run.episodes += zip(returns, lengths, strict=True)
                new_obs = demonstrations.add(episodes)
                if args.normalize_obs and len(new_obs):
                    agent.obs_norm.update(new_obs)
            iteration.begin(run.env_steps)

        # Epoch
        batches = (demonstrations.sample(args.batch_size) for _ in range(args.minibatches_per_epoch))
        losses, entropies, actor_norms = map(torch.stack, zip(*map(update, batches), strict=True))
        run.env_steps += args.minibatches_per_epoch
        result |= {
            "loss/policy": losses.mean(), "loss/policy_std": losses.std(correction=0),
            "policy/entropy": entropies.mean(), "grad/actor_norm": actor_norms.mean(),
            "demonstrations/steps": demonstrations.steps,
            "demonstrations/episodes": demonstrations.episodes,
        }  # fmt: skip

        # Validate. An iteration ends with the weights of its least loss, the last one ends the run.
        if demonstrations.validation:
            result["loss/validation"] = loss = validate()
            iteration.count_epoch(loss)
        last_step = min(iteration.first_step + steps_of_each, args.total_timesteps)
        if iteration.epochs_since >= args.patience or run.env_steps >= last_step:
            iteration.end()
            if iteration.number > args.dagger_iterations:
                run.args = replace(args, total_timesteps=run.env_steps)  # this is the end

        # Log
        run.log(result | {"schedule/learning_rate": optimizer.param_groups[0]["lr"]})


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
    """Policy of observations (B, *obs_space.shape)."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        self.device, self.action_shape = device, action_space.shape
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        self.actor = Trunk(obs_space, args.hidden_sizes, args.activation)
        if isinstance(action_space, Box):
            self.head = GaussianHead(self.actor.width, action_space, args.log_std_init)
        else:
            self.head = CategoricalHead(self.actor.width, action_space)
        self.to(device)

    def encode(self, obs):
        """What goes into the network, of observations (B, ...)."""
        return self.obs_norm(obs)

    def policy(self, features):
        """pi(. | s) as its head describes it."""
        return self.head(self.actor(features))

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


# ------------------------------------------------------------------------------------------- demonstrations
class Demonstrations:
    """What the expert does in the states of whole episodes: each is for training or for validation."""

    def __init__(self, action_space, validation_share, device):
        self.space, self.share, self.device = action_space, validation_share, device
        self.episodes, self.steps, self.training, self.validation = 0, 0, {}, {}

    def add(self, episodes):
        """Stores episodes, one of 1 / share for validation. Returns the new observations to train on."""
        chosen, old_steps = {"training": [], "validation": []}, len(self.training.get("obs", ()))
        for episode in episodes:
            before, self.episodes = int(self.share * self.episodes), self.episodes + 1
            self.steps += len(episode["obs"])
            chosen["validation" if int(self.share * self.episodes) > before else "training"].append(episode)
        for part, stored in (("training", self.training), ("validation", self.validation)):
            for name in ("obs", "action"):
                arrays = [self.prepare(name, episode[name]) for episode in chosen[part] if name in episode]
                if arrays:
                    new = to_tensor(np.concatenate(arrays), self.device)
                    stored[name] = torch.cat([stored[name], new]) if name in stored else new
        return self.training["obs"][old_steps:]

    def prepare(self, name, array):
        """Actions as the environment carries them out, in the type of the networks; the rest as it is."""
        if name == "action" and isinstance(self.space, Box):
            return array.clip(self.space.low, self.space.high).astype(np.float32)
        return array.astype(np.int64) if name == "action" else array

    def sample(self, batch_size):
        """A minibatch of batch_size demonstrations, drawn from all that are for training."""
        rows = torch.randint(len(self.training["obs"]), (batch_size,), device=self.device)
        return {name: x[rows] for name, x in self.training.items()}

    def state_dict(self):
        names = ("episodes", "steps", "training", "validation")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state):
        for part in (state["training"], state["validation"]):
            part |= {name: x.to(self.device) for name, x in part.items()}
        vars(self).update(state)


class Iteration:
    """The epochs on the same demonstrations, and the weights that had the least validation loss."""

    def __init__(self, agent):
        self.agent, self.number, self.over = agent, 0, True

    def begin(self, env_steps):
        self.number, self.over, self.first_step = self.number + 1, False, env_steps
        self.least, self.epochs_since, self.weights = math.inf, 0, {}

    def count_epoch(self, validation_loss):
        self.epochs_since += 1
        if validation_loss < self.least:
            self.least, self.epochs_since = validation_loss, 0
            self.weights = {name: x.clone() for name, x in self.agent.state_dict().items()}

    def end(self):
        if self.weights:  # there is a validation
            self.agent.load_state_dict(self.weights)
        self.over, self.weights = True, {}

    def state_dict(self):
        return {name: x for name, x in vars(self).items() if name != "agent"}

    def load_state_dict(self, state):
        vars(self).update(state)


def demonstrate(envs, learner, expert, episodes):
    """Whole episodes, with the expert's action for each of their steps; the learner acts, or without one it.

    Each environment plays its share of them, so that short ones are not favoured.
    """
    (ask, go_on), (obs, info) = expert, envs.reset()
    left = np.array([len(share) for share in np.array_split(range(episodes), envs.num_envs)])
    steps, played = [[] for _ in left], []
    while (left > 0).any():
        answer = ask(obs, info)
        action = learner(obs, info) if learner else answer
        next_obs, reward, terminated, truncated, next_info = envs.step(action)
        done = terminated | truncated
        for i in np.flatnonzero(left > 0):
            steps[i].append(dict(obs=obs[i], action=answer[i], reward=reward[i]))
            if done[i]:
                played.append({name: np.stack([step[name] for step in steps[i]]) for name in steps[i][0]})
                steps[i] = []
        left = left - done
        obs, info = go_on(envs, next_obs, info | next_info, done)
    return played


def load_expert(args):
    """The policy of --expert, and how its script goes on to the next step: a policy may have a memory."""
    path = Path(args.expert)
    folder = path if path.is_dir() else path.parent.parent if path.parent.name == "models" else path.parent
    state, copies = load(path), sorted(folder.glob("*.py"), key=os.path.getmtime)  # one for each start
    script = args.expert_script or (copies and copies[-1])
    if not script:
        raise UsageError(f"{folder} has no copy of the script that made {path}: name it by --expert-script")
    try:
        if state["args"]["env_id"] != args.env_id:
            raise ValueError(f"it learned {state['args']['env_id']}, not {args.env_id}")
        spec = importlib.util.spec_from_file_location("expert", script)
        sys.modules["expert"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.load_policy(path), module.reset_done
    except (AttributeError, KeyError, OSError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"no expert by {script} from {path}: {error}") from None


def read_episodes(args):
    """Episodes of an .npz file or of a Minari dataset, in the standard spaces of make_envs.

    The file has obs, action and reward of all steps, one episode after the other, as the environment gives
    and takes them, and lengths, the number of steps of each episode.
    """
    name = args.dataset or args.expert
    if args.env_id.startswith("ALE/"):
        raise UsageError(f"{name}: for Atari, whose frames are stacked, give an --expert that acts")
    try:
        if args.dataset:
            dataset = importlib.import_module("minari").load_dataset(name)
            found = [(x.observations, x.actions, x.rewards) for x in islice(dataset, args.expert_episodes)]
        else:
            file = np.load(name)
            *arrays, lengths = (file[key] for key in ("obs", "action", "reward", "lengths"))
            if (lengths < 1).any() or any(len(x) != lengths.sum() for x in arrays):
                raise ValueError("obs, action and reward must be as long as all lengths, each over 0")
            spans = [*zip(lengths.cumsum() - lengths, lengths.cumsum(), strict=True)][: args.expert_episodes]
            found = [[x[first:end] for x in arrays] for first, end in spans]
    except (BadZipFile, ImportError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read {name}: {error}") from None
    if not found:
        raise UsageError(f"{name} has no episodes")
    raw, changes, episodes = gym.make(args.env_id, **args.env_kwargs), [], []
    env, spaces = standardize(raw), (raw.observation_space, raw.action_space)
    while env is not raw:  # what make_envs does to observations, from the inside out
        changes = [env.observation, *changes] if isinstance(env, gym.ObservationWrapper) else changes
        env = env.env
    for number, (obs, action, reward) in enumerate(found):
        where, obs = f"episode {number} of {name}", np.asarray(obs)
        for what, x, space in (("obs", obs, spaces[0]), ("action", action, spaces[1])):
            if x.shape[1:] != space.shape or not np.can_cast(x.dtype, space.dtype, "same_kind"):
                have = f"{what} of shape {x.shape[1:]} and type {x.dtype}"
                raise UsageError(f"{where} has {have}, but {args.env_id} has {space}")
            if not np.isfinite(x).all() or not np.isfinite(reward).all():
                raise UsageError(f"{where} has numbers that are not finite")
            if not isinstance(space, Box) and not all(map(space.contains, x)):
                raise UsageError(f"{where} has {what} that {args.env_id} has not: {space}")
        obs = obs[: len(action)]  # Minari has one more, the last
        for change in changes:
            obs = np.stack([change(x) for x in obs])
        episodes.append(dict(obs=obs, action=to_standard(action, spaces[1]), reward=reward))
    raw.close()
    return episodes


def to_standard(action, space):
    """Actions as make_envs takes them: bounded dimensions of a Box on [-1, 1], choices from 0."""
    if not isinstance(space, Box):
        return action - getattr(space, "start", 0)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    return 2 * (action - low) / (high - low) - 1


# Own trials, results in benchmark/results; docs/bc.md has the commands that train the experts.
TUNED = {
    "CartPole-v1": dict(total_timesteps=2_000, expert_episodes=10, eval_every=500),
    "Pendulum-v1": dict(total_timesteps=10_000, expert_episodes=40, loss="mse", batch_size=256,
                        activation="relu"),
    "HalfCheetah-v5": dict(total_timesteps=10_000, expert_episodes=20, loss="mse", batch_size=256,
                           hidden_sizes=(256, 256), activation="relu", normalize_obs=True, eval_every=2_500),
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
