"""Random Network Distillation (Burda et al. 2018, arXiv 1810.12894): PPO with a second reward, for novelty:
the error of a network that learns to predict the outputs of a fixed random network on past observations.

    novelty    i_t = ||f'(s_{t+1}) - f(s_{t+1})||^2, f fixed and random, f' trained to lower it     (sec. 2.2)
    returns    episodic for r_t, not for i_t, since novelty outlasts the episode                    (sec. 2.3)
    advantage  A_t = c_E A_t(r, V_E, gamma) + c_I A_t(i, V_I, gamma_I), for L_CLIP of ppo.py        (sec. 2.3)
    scale      i_t / running standard deviation of sum_k gamma_I^k i_{t-k}; f and f' see whitened
               observations, clipped to +-5                                                         (sec. 2.4)

Differences from the paper:
 1. PPO is that of ppo.py, with its differences; one critic predicts both values.
 2. s_{t+1} of an episode's last step is its true final observation; the first observation of the next
    episode earns nothing, since no action led to it.
 3. i_t is the mean over the outputs of f, not the sum: scaling removes the difference. It is clipped to +-10.
 4. Steps of the untrained policy, not of a random agent, initialize the normalizer of f and f'.
 5. After the CNN, f has one more hidden layer than the authors'. Units are ReLU, not leaky.

    python algos/ppo_rnd.py --env-id MountainCar-v0
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, errno, importlib, inspect, json, linecache, math, os, platform, random, re, signal
import subprocess, sys, time, traceback
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError, dumps, loads
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Count = Annotated[int, (1, math.inf)]  # numbers and their ranges, checked before anything runs
Seed = Annotated[int, (0, 2**30)]
Rate = Annotated[float, (0, math.inf)]
Share = Annotated[float, (0, 1)]
Json = Annotated[dict, tyro.conf.arg(constructor=json.loads, metavar="JSON")]
Graph = Annotated[bool, tyro.conf.arg(aliases=["--compile"])]
Bonus = Literal["none", "regularized", "softplus", "max"]


@dataclass
class Args:
    # run
    seed: Seed = 1  # seed of everything random
    device: Literal["auto", "cpu", "cuda"] = "auto"  # device of the networks; auto: CUDA if available
    cuda_graph: Graph = False  # on CUDA: capture the update as a CUDA graph
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder or checkpoint.pt to continue; with --run-dir, in a new folder
    init_from: str = ""  # .pt file whose weights initialize a new run
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to evaluate, without training
    checkpoint_every: int = 20_000  # steps per environment between checkpoints, which cut episodes; 0: at end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 10  # episodes per evaluation, each in its own environment
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: Seed = 10_000_000  # seed of all evaluations
    sample_actions: bool = False  # evaluations sample actions instead of taking the most likely ones
    capture_video: bool = False  # record a video of the first episode of each evaluation
    info_keys: tuple[str, ...] = ()  # numbers in the environment's info to log, averaged over each episode
    torch_threads: Annotated[int, (0, math.inf)] = 1  # CPU threads of PyTorch; 0: PyTorch decides
    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 4  # environments stepped together
    async_envs: bool = False  # one process per environment, for slow environments
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 1_000_000  # environment steps, rounded up to whole rollouts
    num_steps: Count = 128  # steps per environment in each rollout
    update_epochs: Count = 10  # passes over each rollout
    num_minibatches: Count = 4  # gradient steps in each pass
    learning_rate: Rate = 3e-4  # step size of Adam
    critic_lr: Rate | None = None  # learning rate of the critic; None: learning_rate
    anneal_lr: bool = False  # decay the learning rates linearly to 0
    adam_eps: Annotated[float, (1e-12, math.inf)] = 1e-5  # epsilon of Adam, added to the denominator
    gamma: Share = 0.99  # discount factor
    gamma_intrinsic: Share = 0.99  # discount factor of intrinsic rewards
    extrinsic_coef: float = 2.0  # c_E, weight of the advantage from the environment's rewards
    intrinsic_coef: float = 1.0  # c_I, weight of the advantage from novelty
    initial_obs_steps: Annotated[int, (0, math.inf)] = 6_400  # uncounted first steps: normalize novelty
    predictor_lr: Rate = 3e-4  # learning rate of the predictor
    predictor_proportion: Share = 0.25  # share of each minibatch that trains the predictor
    newest_channels: Annotated[int, (0, math.inf)] = 0  # of the newest frame, used for novelty; 0: all
    gae_lambda: Share = 0.95  # lambda of GAE; 1: returns to the end of the rollout, then V
    normalize_advantage: bool = True  # to mean 0 and standard deviation 1 in each minibatch
    positive_advantage: bool = False  # subtract the smallest advantage of each minibatch
    clip_coef: Rate = 0.2  # eps of eq. 7, clip range of the ratio
    clip_value: Rate = math.inf  # clip range of the value around its old value; inf: no clipping
    value_coef: Rate = 0.5  # c_1, weight of the value loss
    entropy_coef: float = 0.0  # c_2, weight of the entropy bonus
    entropy_method: Bonus = "regularized"  # entropy or its softplus in the loss; max: entropy in the rewards
    max_grad_norm: Rate = 0.5  # clip the gradient to this global norm
    target_kl: Rate = math.inf  # stop the epochs when the KL from the old policy exceeds this
    hidden_sizes: tuple[Count, ...] = (64, 64)  # widths of the hidden layers (after the CNN on images)
    critic_sizes: tuple[Count, ...] | None = None  # hidden layers of the critic; None: hidden_sizes
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # after each hidden layer
    shared_trunk: bool = False  # actor and critic share all layers but the last
    log_std_init: float = -1.0  # initial log standard deviation of Box actions
    normalize_obs: bool = False  # scale observations to mean 0 and variance 1, clip to +-10
    normalize_reward: bool = False  # divide rewards by the std of the running discounted return; clip to +-10
    clip_reward: bool = False  # learn from the sign of rewards


# -------------------------------------------------------------------------------------------- learning rule
def compute_gae(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16; PPO eq. 11, 12).

    All inputs and the result are (num_steps, num_envs). next_value[t] is V of the true successor of step t,
    final observations included. A termination ends the return; a truncation bootstraps from next_value.
    """
    td_error = reward + gamma * (1 - terminated) * next_value - value
    td_error, decay = td_error.numpy(), (gamma * gae_lambda * (1 - done)).numpy()  # NumPy: faster here
    advantage, last = np.empty_like(td_error), np.zeros_like(td_error[0])
    for t in reversed(range(len(td_error))):
        advantage[t] = last = td_error[t] + decay[t] * last
    return torch.from_numpy(advantage)


def clipped_policy_loss(log_prob, old_log_prob, advantage, clip_coef):
    """-L_CLIP (PPO eq. 7): no gain from moving the ratio more than clip_coef away from 1. Inputs (B,)."""
    ratio = (log_prob - old_log_prob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantage).mean()


def value_loss(value, old_value, return_, clip_value):
    """Half the mean squared error (B,), or if larger, that of V clipped to within clip_value of the old V."""
    if clip_value == math.inf:
        return 0.5 * F.mse_loss(value, return_)
    near_value = old_value + (value - old_value).clamp(-clip_value, clip_value)
    return 0.5 * torch.maximum((value - return_).square(), (near_value - return_).square()).mean()


def predictor_loss(error, proportion):
    """Mean of a random share of the errors (B,), so that a large batch does not train it faster."""
    chosen = (torch.rand_like(error) < proportion).float()
    return (error * chosen).sum() / chosen.sum().clamp(min=1)


@torch.no_grad()
def policy_change(log_prob, old_log_prob, clip_coef):
    """An unbiased, nonnegative estimate of KL(old || new), and the fraction of clipped ratios."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    kl = (ratio - 1 - log_ratio).mean()  # k3 of Schulman 2020, "Approximating KL divergence"
    return kl, ((ratio - 1).abs() > clip_coef).float().mean()


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only evaluates. Returns the episode returns of the last evaluation."""
    device, batch_size = set_up(args), args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        batch = f"{args.num_envs} environments × {args.num_steps} steps = {batch_size}"
        near = next(n for n in range(args.num_minibatches, 0, -1) if batch_size % n == 0)
        raise UsageError(f"--num-minibatches {args.num_minibatches} does not divide {batch}; try {near}")
    agent = Agent(*standard_spaces(args), args, device)
    if args.evaluate:
        return Run(args, agent=agent).evaluate()
    novelty = Novelty(agent.obs_space, args, device)
    actor = [*agent.actor.parameters(), *agent.head.parameters()]
    critic = [*(() if args.shared_trunk else agent.critic.parameters()), *agent.value_head.parameters()]
    predictor = [*novelty.predictor.parameters()]
    critic_lr = args.learning_rate if args.critic_lr is None else args.critic_lr
    graph = args.cuda_graph and device.type == "cuda"
    groups = [(actor, args.learning_rate), (critic, critic_lr), (predictor, args.predictor_lr)]
    optimizer = Adam(groups, device, args.adam_eps, graph)
    reward_norm, intrinsic_norm = RewardNorm(args.gamma), RewardNorm(args.gamma_intrinsic)

    def update(batch):
        """One gradient step on a minibatch of tensors (B, ...)."""
        pi, (value, value_i) = agent(batch["obs"])
        log_prob, entropy = agent.head.log_prob(pi, batch["action"]), agent.head.entropy(pi)
        advantage = batch["advantage"]
        if args.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        if args.positive_advantage:
            advantage = advantage - advantage.min()
        loss_policy = clipped_policy_loss(log_prob, batch["log_prob"], advantage, args.clip_coef)
        loss_value = value_loss(value, batch["value"], batch["return_"], args.clip_value)
        loss_value_i = value_loss(value_i, batch["value_i"], batch["return_i"], args.clip_value)
        loss_predictor = predictor_loss(novelty.error(batch), args.predictor_proportion)
        loss = loss_policy + args.value_coef * (loss_value + loss_value_i) + loss_predictor
        if args.entropy_coef and args.entropy_method == "regularized":
            loss = loss - args.entropy_coef * entropy.mean()
        if args.entropy_coef and args.entropy_method == "softplus":
            loss = loss - args.entropy_coef * F.softplus(entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        actor_norm, critic_norm, predictor_norm = clip_gradients(optimizer, args.max_grad_norm)
        optimizer.step()
        kl, clip_fraction = policy_change(log_prob, batch["log_prob"], args.clip_coef)
        return {
            "loss/policy": loss_policy.detach(), "loss/value": loss_value.detach(),
            "loss/intrinsic_value": loss_value_i.detach(), "loss/predictor": loss_predictor.detach(),
            "policy/kl": kl, "policy/clip_fraction": clip_fraction, "policy/entropy": entropy.detach().mean(),
            "grad/actor_norm": actor_norm, "grad/critic_norm": critic_norm,
            "grad/predictor_norm": predictor_norm,
        }  # fmt: skip

    learn = CudaGraph(update) if graph else update
    parts = dict(agent=agent, novelty=novelty, optimizer=optimizer)
    with Run(args, **parts, reward_norm=reward_norm, intrinsic_norm=intrinsic_norm) as run:
        if run.env_steps == 0 and novelty.obs_norm.count < args.initial_obs_steps:  # resumed runs have it
            novelty.obs_norm.count.zero_()  # starts again, if an error or a signal ended this
            run.envs = make_envs(args, args.num_envs)
            obs, info = run.envs.reset(seed=segment_seed(args, 0))
            for _ in range(0, args.initial_obs_steps, args.num_envs):
                if run.signal:
                    break
                action = agent.act(obs, info, greedy=False)
                next_obs, reward, terminated, truncated, next_info = run.envs.step(action)
                check_step(next_obs, reward, 0)
                novelty.obs_norm.update(novelty.newest(to_tensor(next_obs, device)))
                obs, info = reset_done(run.envs, next_obs, next_info, terminated | truncated)
            close_envs(run.envs, kill=False)
            run.envs = None
        while run.pause():  # evaluates and saves when due; False at the end
            if run.new_segment:  # new environments and seeds at each checkpoint: a resumed run is identical
                envs, obs, info = run.start_segment()
                reward_norm.start_segment()
                intrinsic_norm.start_segment()
            if args.anneal_lr:
                for group in optimizer.param_groups:
                    group["lr"].fill_(group["initial_lr"] * (1 - run.env_steps / args.total_timesteps))

            # Act and step. Only the actor runs here; values and log-probabilities come later, in one batch.
            steps = []
            for _ in range(args.num_steps):
                action = agent.act(obs, info, greedy=False)
                next_obs, reward, terminated, truncated, next_info = envs.step(action)
                done = terminated | truncated
                run.count(next_obs, reward, done, next_info)
                steps.append(dict(
                    obs=obs, action=action, reward=np.float32(reward), next_obs=next_obs,
                    terminated=terminated, done=done,
                ))  # fmt: skip
                obs, info = reset_done(envs, next_obs, next_info, done)

            # Novelty and advantages, from the networks that collected the rollout; recursions run on the host
            rollout = stack_steps(steps)  # tensors (num_steps, num_envs, ...) on the host
            reward, terminated, done = (rollout[name] for name in ("reward", "terminated", "done"))
            flat = lambda x: to_tensor(x.flatten(0, 1), device)
            batch = {name: flat(rollout[name]) for name in ("obs", "action")}
            with torch.no_grad():
                pi, (batch["value"], batch["value_i"]) = agent(batch["obs"])
                batch["log_prob"] = agent.head.log_prob(pi, batch["action"])
                next_obs = flat(rollout["next_obs"])
                next_value = agent.value(next_obs)[0].cpu().view_as(reward)
                last_value_i = agent.value(to_tensor(obs, device))[1].cpu()
                batch["newest"] = novelty.whiten(next_obs)
                batch["target"] = novelty.target(batch["newest"])
                intrinsic = novelty.error(batch).cpu().view_as(reward)
            value, value_i = (batch[name].cpu().view_as(reward) for name in ("value", "value_i"))
            next_value_i = torch.cat([value_i[1:], last_value_i[None]])  # a reset is a step like any other
            if args.clip_reward:
                reward = reward.sign()
            if args.normalize_reward:
                reward = reward_norm(reward, done)
            if args.entropy_method == "max":
                reward = reward + args.entropy_coef * agent.head.entropy(pi).cpu().view_as(reward)
            advantage = compute_gae(reward, value, next_value, terminated, done, args.gamma, args.gae_lambda)
            never = torch.zeros_like(done)  # returns of novelty never end
            intrinsic, decays = intrinsic_norm(intrinsic, never), (args.gamma_intrinsic, args.gae_lambda)
            advantage_i = compute_gae(intrinsic, value_i, next_value_i, never, never, *decays)
            both = args.extrinsic_coef * advantage + args.intrinsic_coef * advantage_i
            batch |= {"advantage": flat(both), "return_": flat(advantage + value)}
            batch["return_i"] = flat(advantage_i + value_i)

            # Update. Every epoch visits the whole rollout in a new order.
            epochs = [torch.randperm(batch_size, device=device) for _ in range(args.update_epochs)]
            updates = []
            for rows in torch.cat(epochs).split(batch_size // args.num_minibatches):
                updates.append(learn({name: x.index_select(0, rows) for name, x in batch.items()}))
                if args.target_kl < math.inf and updates[-1]["policy/kl"] > args.target_kl:
                    break
            if args.normalize_obs:  # only now, so that the ratio compares policies under the same normalizer
                agent.obs_norm.update(batch["obs"])
            novelty.obs_norm.update(novelty.newest(next_obs))

            # Log
            last_epoch = updates[-args.num_minibatches :]
            metrics = {name: torch.stack([m[name] for m in last_epoch]).mean() for name in last_epoch[0]}
            unexplained = advantage.var(correction=0) / (advantage + value).var(correction=0).clamp(min=1e-8)
            run.log(metrics | {
                "value/mean": value.mean(), "value/target_mean": (advantage + value).mean(),
                "value/explained_variance": 1 - unexplained,
                "reward/mean": rollout["reward"].mean(), "reward/max": rollout["reward"].max(),
                "reward/intrinsic_mean": intrinsic.mean(),
                "schedule/learning_rate": optimizer.param_groups[0]["lr"],
            })  # fmt: skip
    return np.array(run.returns)


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal initialization (Saxe et al. 2014), scaled by gain; biases are 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class NatureCNN(nn.Sequential):
    """Images (B, C, H, W) to features (B, F) (Mnih et al. 2015); two smaller layers if below 36 pixels."""

    def __init__(self, channels, height, width):
        sizes = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        if min(height, width) < 36:
            sizes = [(channels, 16, 3, 1), (16, 32, 3, 1)]
        convolutions = [orthogonal(nn.Conv2d(*size)) for size in sizes]
        super().__init__(*(layer for conv in convolutions for layer in (conv, nn.ReLU())), nn.Flatten())
        self.to(memory_format=torch.channels_last)  # faster convolutions

    def forward(self, image):
        pixels = image.to(torch.float32, memory_format=torch.channels_last)
        return super().forward(pixels / 255 if image.dtype == torch.uint8 else pixels)


class Trunk(nn.Module):
    """Observations (B, *layout.shape) to features (B, width): a CNN for each image, then an MLP."""

    def __init__(self, layout, hidden_sizes, activation):
        super().__init__()
        self.layout = layout
        self.cnns = nn.ModuleList(NatureCNN(*shape) for shape in layout.images)
        sizes = [self.features(torch.zeros(1, *layout.shape)).shape[1], *hidden_sizes]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(*size)) for size in pairwise(sizes))
        self.activation, self.width = getattr(F, activation), sizes[-1]

    def features(self, obs):
        """The numbers of observations and the CNN features of their images, without the mask."""
        if obs.dim() == 4:  # one image and nothing else
            return self.cnns[0](obs)
        numbers, *images = obs.split(self.layout.sizes, dim=1)[: 1 + len(self.cnns)]
        shapes = zip(self.cnns, images, self.layout.images, strict=True)
        return torch.cat([numbers, *(cnn(x.unflatten(1, shape)) for cnn, x, shape in shapes)], dim=1)

    def forward(self, obs):
        x = self.features(obs) if self.layout.images or self.layout.masked else obs
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class CategoricalHead(nn.Module):
    """K independent choices among up to N (Discrete: K = 1). pi holds their log-probabilities (B, K, N)."""

    def __init__(self, fan_in, space, masked):
        super().__init__()
        choices = torch.tensor([space.n] if isinstance(space, Discrete) else space.nvec)
        exists = torch.arange(choices.max()) < choices[:, None]  # (K, N)
        self.register_buffer("exists", exists, persistent=False)
        self.register_buffer("index", exists.flatten().nonzero()[:, 0], persistent=False)
        self.logits = orthogonal(nn.Linear(fan_in, exists.numel()), gain=0.01)
        self.masked, self.plain = masked, bool(exists.all()) and not masked

    def forward(self, features, obs):
        """pi from features (B, fan_in). A mask of legal choices is the last part of obs."""
        logits = self.logits(features).view(-1, *self.exists.shape)
        if self.plain:  # all choices have the same number of options, and all are legal
            return logits.log_softmax(-1)
        legal = self.exists
        if self.masked:
            mask = torch.zeros_like(logits.flatten(1)).index_copy(1, self.index, obs[:, -len(self.index) :])
            legal = mask.view_as(logits) > 0
            legal = torch.where(legal.any(-1, keepdim=True), legal, self.exists)  # none: the episode is over
        return logits.masked_fill(~legal, -1e8).log_softmax(-1)

    def choose(self, pi, greedy):
        """Actions (B, K). The argmax of log p + Gumbel noise is a sample from p."""
        return (pi if greedy else pi - torch.empty_like(pi).exponential_().log()).argmax(-1)

    def log_prob(self, pi, action):
        return pi.gather(-1, action.view(len(pi), -1, 1).long()).sum((-2, -1))  # (B,)

    def entropy(self, pi):
        return -(pi.exp() * pi).sum((-2, -1))  # (B,)

    def kl(self, old, new):
        return (old.exp() * (old - new)).sum((-2, -1))  # KL(old || new), (B,)


class GaussianHead(nn.Module):
    """Box actions with A dimensions. pi holds their means and log standard deviations (B, 2A)."""

    def __init__(self, fan_in, space, log_std_init):
        super().__init__()
        size = math.prod(space.shape)
        self.mean = orthogonal(nn.Linear(fan_in, size), gain=0.01)
        self.log_std = nn.Parameter(torch.full((size,), float(log_std_init)))

    def forward(self, features, obs):
        mean = self.mean(features)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)

    def choose(self, pi, greedy):
        mean, log_std = pi.chunk(2, dim=-1)
        return mean if greedy else mean + log_std.exp() * torch.randn_like(mean)  # (B, A)

    def log_prob(self, pi, action):
        mean, log_std = pi.chunk(2, dim=-1)
        z = (action.flatten(1) - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)  # (B,)

    def entropy(self, pi):
        return (pi.chunk(2, dim=-1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)  # (B,)

    def kl(self, old, new):
        (old_mean, old_log_std), (mean, log_std) = old.chunk(2, dim=-1), new.chunk(2, dim=-1)
        shift, spread = (old_mean - mean) * (-log_std).exp(), 2 * (old_log_std - log_std)
        return 0.5 * (shift.square() + spread.exp() - 1 - spread).sum(-1)  # KL(old || new), (B,)


class Agent(nn.Module):
    """Policy and value for observations (B, *obs_space.shape), in separate networks or on a shared trunk."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        self.device, self.obs_space, self.action_space = device, obs_space, action_space
        self.obs_norm = RunningNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        self.actor = self.critic = Trunk(obs_space, args.hidden_sizes, args.activation)
        if args.shared_trunk and args.critic_sizes is not None:
            raise UsageError("--critic-sizes: with --shared-trunk the critic has the actor's hidden layers")
        if not args.shared_trunk:
            critic_sizes = args.hidden_sizes if args.critic_sizes is None else args.critic_sizes
            self.critic = Trunk(obs_space, critic_sizes, args.activation)
        if isinstance(action_space, Box):
            self.head = GaussianHead(self.actor.width, action_space, args.log_std_init)
        else:
            self.head = CategoricalHead(self.actor.width, action_space, obs_space.masked)
        self.value_head = orthogonal(nn.Linear(self.critic.width, 2), gain=1.0)
        self.to(device)

    def forward(self, obs):
        """Parameters of pi(. | s) for the head; V_E and V_I, (B,) each. A shared trunk runs once."""
        x = self.obs_norm(obs)
        features = self.actor(x)
        pi = self.head(features, obs)
        features = features if self.critic is self.actor else self.critic(x)
        return pi, self.value_head(features).unbind(-1)

    def policy(self, obs):
        return self.head(self.actor(self.obs_norm(obs)), obs)

    def value(self, obs):
        return self.value_head(self.critic(self.obs_norm(obs))).unbind(-1)

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs, *action_space.shape) for a vector environment: the most likely, or sampled."""
        action = self.head.choose(self.policy(to_tensor(obs, self.device)), greedy)
        return action.cpu().numpy().reshape(-1, *self.action_space.shape)


class Novelty(nn.Module):
    """Novelty of observations (B, *obs_space.shape): the error of a predictor, trained on past observations,
    of the outputs of a target, a fixed random network."""

    def __init__(self, obs_space, args, device):
        super().__init__()
        layout, self.first = obs_space, 0
        if args.newest_channels:
            channels, *size = obs_space.shape if obs_space.dtype == np.uint8 else [0]
            if args.newest_channels > channels:
                what = f"observations with {args.newest_channels} channels, not {obs_space}"
                raise UsageError(f"--newest-channels {args.newest_channels} needs {what}")
            shape, self.first = (args.newest_channels, *size), channels - args.newest_channels
            layout = Layout(shape, np.uint8, [shape])
        self.obs_norm = RunningNorm(layout.shape)
        make_trunk = lambda: Trunk(layout, args.hidden_sizes, "relu")
        trunk = make_trunk()
        make_layer = lambda: orthogonal(nn.Linear(trunk.width, trunk.width))
        self.target = nn.Sequential(trunk, make_layer()).requires_grad_(False)
        self.predictor = nn.Sequential(make_trunk(), make_layer(), nn.ReLU(), make_layer())
        self.to(device)

    def newest(self, obs):
        return obs[:, self.first :]

    def whiten(self, obs):
        return self.obs_norm(self.newest(obs)).clamp(-5, 5)

    def error(self, batch):
        return (self.predictor(batch["newest"]) - batch["target"]).square().mean(-1)  # (B,)


class RunningNorm(nn.Module):
    """(x - mean) / standard deviation of all x that update has seen, clipped to +-10."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))  # float32 would stall
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


class RewardNorm(nn.Module):
    """Divides rewards by the standard deviation of the running discounted return, clipped to +-10."""

    def __init__(self, gamma: float):
        super().__init__()
        self.gamma, self.statistics = gamma, RunningNorm(())
        self.start_segment()

    def start_segment(self) -> None:
        self.return_ = 0.0  # of the episodes in progress, (num_envs,) after the first step

    def forward(self, reward: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Scales rewards (num_steps, num_envs) of the steps since the last call; done marks episode ends."""
        rewards, goes_on = reward.numpy(), (1 - done).numpy()  # NumPy: faster here
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            returns[t] = rewards[t] + self.gamma * self.return_
            self.return_ = returns[t] * goes_on[t]
        self.statistics.update(torch.from_numpy(returns).flatten())
        return (reward * (self.statistics.var + 1e-8).rsqrt()).clamp(-10, 10).float()


# MountainCar comes from our own sweep on one seed: with gamma 0.99 it keeps swinging three times (-145), with
# the paper's 0.999 it finds two swings. Atari follows the paper, but with 32 instead of 128 environments, so
# that whole minibatches train the predictor, and with 50,000 instead of 819,200 random steps.
TUNED = {
    "MountainCar-v0": dict(total_timesteps=500_000, num_envs=16, num_minibatches=8, update_epochs=4,
                           learning_rate=1e-3, gamma=0.999, gae_lambda=0.98, entropy_coef=0.01,
                           normalize_obs=True, normalize_reward=True, anneal_lr=True, eval_every=25_000),
    "atari": dict(total_timesteps=50_000_000, num_envs=32, update_epochs=4, learning_rate=1e-4,
                  predictor_lr=1e-4, predictor_proportion=1.0, gamma=0.999, clip_coef=0.1, entropy_coef=0.001,
                  initial_obs_steps=50_000, newest_channels=1, shared_trunk=True, hidden_sizes=(512,),
                  activation="relu", clip_reward=True, eval_every=500_000, checkpoint_every=50_000,
                  torch_threads=0),
}  # fmt: skip


# ------------------------------------------------------------------ utilities, the same text in every script
class UsageError(ValueError):
    """A user error: main prints one line and exits with code 2."""


# --- arguments
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
        anew = dict(run_dir="", resume="", evaluate="", init_from="")
        default = saved_args(path, **anew | ({"capture_video": False} if first.evaluate else {}))
    args = tyro.cli(Args, args=argv, default=default, description=(__doc__ or "").partition("\n\n")[0])
    return replace(args, env_id=make_args(args.env_id).env_id)


def check_ranges(args) -> None:
    """Refuses numbers outside the range of their field. Integers become floats where a float is expected."""
    for name, hint in get_type_hints(Args, include_extras=True).items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        parts = (hint, *get_args(hint))  # the type, or the types inside it
        if dict in parts and type(value) is not dict:
            raise UsageError(f'{flag} {json.dumps(value)}: must be a JSON object, such as {{"name": 1}}')
        choices = next((get_args(part) for part in parts if get_origin(part) is Literal), (value,))
        if value is not None and value not in choices:
            raise UsageError(f"{flag} {value}: must be one of {', '.join(choices)}")
        if type(value) is int and any(part is float or float in get_args(part) for part in parts):
            setattr(args, name, float(value))
        for low, high in (x for part in parts for x in getattr(part, "__metadata__", ()) if type(x) is tuple):
            if any(x is not None and not low <= x <= high for x in np.ravel(value)):
                span = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise UsageError(f"{flag} {value}: must be {span}")


def set_up(args) -> torch.device:
    """Checks the arguments, seeds everything random and picks the device."""
    check_ranges(args)
    if sum(map(bool, (args.resume, args.evaluate, args.init_from))) > 1:
        raise UsageError("--resume, --evaluate and --init-from exclude each other")
    if args.capture_video and sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "MUJOCO_GL"}:
        os.environ["MUJOCO_GL"] = "egl"  # MuJoCo renders without a display
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(True)  # numbers below 1e-38, such as fading moments of Adam, slow a CPU down
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; --device cpu always works")
    set_seed(segment_seed(args, 0))
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def set_seed(seed: int) -> None:
    for seed_library in (random.seed, np.random.seed, torch.manual_seed):
        seed_library(seed)


def segment_seed(args, env_steps: int) -> int:
    """The seed of everything that follows a checkpoint at this step."""
    return int(np.random.SeedSequence([args.seed, env_steps]).generate_state(1)[0] >> 2)  # ale-py: 30 bits


def say(text: str) -> None:
    """Prints above the progress bar. A missing console, or one that has gone, does not matter."""
    try:
        if sys.stdout:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            tqdm.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
    except OSError:  # a closed pipe (`| head`) or terminal
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the two maps between an environment and a policy
class Layout(Box):
    """The space of observations as networks see them.

    Bytes (C, H, W) for one image and nothing else. Otherwise a vector: numbers, then images with pixels in
    [0, 1], then the mask of legal actions; sizes has the length of each part.
    """

    def __init__(self, shape, dtype=np.float32, images=(), mask=0, flattened=()):
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        super().__init__(low, high, shape, dtype)
        pixels = [math.prod(image) for image in images]
        self.sizes = [math.prod(shape) - sum(pixels) - mask, *pixels, mask]
        self.images, self.masked, self.flattened = images, mask > 0, flattened

    def __str__(self):
        images = [f"image {'×'.join(map(str, image))}" for image in self.images]
        n = self.sizes[0]
        return " + ".join(images + [f"{n} number{'s' * (n > 1)}"] * (n > 0))


def leaves(space, x=None):
    """(space, value) of each part of nested Dicts and Tuples; a mask of legal actions comes last."""
    if isinstance(space, spaces.Dict):
        names = sorted(space.keys(), key=lambda name: name == "action_mask")
    elif isinstance(space, spaces.Tuple):
        names = range(len(space))
    else:
        return [(space, x)]
    return [leaf for name in names for leaf in leaves(space[name], None if x is None else x[name])]


def as_image(x: np.ndarray) -> np.ndarray:
    """(H, W), (C, H, W), (H, W, C) or a stack of K of these as (C, H, W); channels are the shortest axis."""
    if x.ndim == 2:
        return x[None]
    if x.shape[-1] < min(x.shape[-3:-1]):
        x = np.moveaxis(x, -1, -3)
    return x.reshape(-1, *x.shape[-2:])


def image_shape(space) -> tuple[int, ...] | None:
    """(C, H, W) of bytes with 2 to 4 dimensions, if they have the 5 pixels that a CNN needs; else None."""
    if isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3, 4):
        shape = as_image(np.empty(space.shape, np.uint8)).shape
        return shape if min(shape[1:]) >= 5 else None
    return None


def brightness(space) -> np.uint8:
    """The factor that scales bytes up to 255 if the maximum of their space is lower, such as 1."""
    return np.uint8(255 // max(int(space.high.max()), 1))


def as_numbers(space, x) -> np.ndarray:
    """A flat vector: one-hot for choices, bytes in [0, 1]."""
    return spaces.flatten(space, x) / (255 if space.dtype == np.uint8 and space.high.max() == 255 else 1)


def observation_map(space):
    """Returns a function from an observation to one array, and the Layout of that array."""
    kinds = [kind for kind, _ in leaves(space)]
    for kind in kinds:
        if not isinstance(kind, (Box, Discrete, MultiDiscrete, MultiBinary)):
            raise UsageError(f"{kind} observations cannot be read: turn them into numbers with a wrapper")
    masked = isinstance(space, spaces.Dict) and "action_mask" in space.keys()
    mask = math.prod(kinds.pop().shape) if masked else 0
    shapes = [image_shape(kind) for kind in kinds]
    images = [shape for shape in shapes if shape]
    factors = [shape and brightness(kind) for kind, shape in zip(kinds, shapes, strict=True)]
    if image_shape(space):
        to_bytes = lambda x: (as_image(np.asarray(x)) * factors[0]).astype(np.uint8)
        return to_bytes, Layout(images[0], np.uint8, images)
    vectors = [kind for kind, shape in zip(kinds, shapes, strict=True) if not shape]
    size = sum(map(spaces.flatdim, vectors)) + sum(map(math.prod, images)) + mask
    if not size:
        raise UsageError(f"{space} observations are empty: return at least one number, if only a constant")
    flattened = [kind for kind in vectors if len(kind.shape or ()) > 1]
    layout = Layout((size,), images=images, mask=mask, flattened=flattened)
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return lambda x: np.asarray(x, space.dtype), layout

    def to_vector(obs):
        values = [x for _, x in leaves(space, obs)]
        legal = [np.ravel(values.pop())] if masked else []
        parts = list(zip(kinds, factors, values, strict=True))
        numbers = [as_numbers(kind, x) for kind, factor, x in parts if not factor]
        pixels = [as_image(np.asarray(x)).ravel() * factor / 255 for _, factor, x in parts if factor]
        return np.concatenate(numbers + pixels + legal, dtype=np.float32)

    return to_vector, layout


def action_map(space):
    """Returns a function from a policy's action to one of the space, and the space of the policy's actions:
    choices count from 0, and bounded dimensions of a Box are [-1, 1]. See box_scale for the others."""
    if isinstance(space, Discrete):
        start = int(space.start)
        return lambda a: start + int(a), Discrete(int(space.n))
    if isinstance(space, MultiDiscrete):
        flat = MultiDiscrete(space.nvec.ravel())
        return lambda a: (space.start + a.reshape(space.shape)).astype(space.dtype), flat
    if isinstance(space, MultiBinary):
        flat = MultiDiscrete([2] * math.prod(space.shape))
        return lambda a: a.reshape(space.shape).astype(space.dtype), flat
    if isinstance(space, Box) and space.dtype.kind == "f":
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        middle, half, bounded = box_scale(space)
        limit = np.where(bounded, 1, np.inf).ravel().astype(np.float32)
        stretch = lambda a: (middle + half * a.reshape(space.shape)).clip(low, high).astype(space.dtype)
        return stretch, Box(-limit, limit, dtype=np.float32)
    other = "; for a Dict or Tuple of these there is the recipe ppo_joint_actions"
    raise UsageError(f"{space} actions: use Discrete, MultiDiscrete, MultiBinary or a Box of floats{other}")


def box_scale(space) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle and half width of each dimension of a Box, and whether it is bounded. Next to a single bound a
    dimension is 2 wide, so that a policy starts where it can move; without bounds it is [-1, 1]."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    huge = np.finfo(np.float32).max / 2
    bounded = (low > -huge) & (high < huge)
    bottom = np.where(low > -huge, low, np.where(high < huge, high - 2, -1))
    top = np.where(bounded, high, bottom + 2)
    return (bottom + top) / 2, (top - bottom) / 2, bounded


def num_choices(space) -> int:
    """The length of a mask of legal actions; 0 if actions are not choices."""
    return spaces.flatdim(space) if isinstance(space, (Discrete, MultiDiscrete)) else 0


def number(x) -> float:
    """A number, a bool or an array of one of these as a float; nan for anything else."""
    try:
        return np.asarray(x, dtype=np.float64).item()
    except Exception:  # of any object
        return math.nan


def raised_outside(error: Exception) -> bool:
    """Whether Gymnasium or this file noticed the error, not the environment's own code."""
    error = error.__cause__ or error  # gym.make wraps a TypeError
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return file == raised_outside.__code__.co_filename or Path(gym.__file__).parent in Path(file).parents


def misfit(error: Exception, text: str) -> Exception:
    """A UsageError if a method of the environment has other arguments or results than Gymnasium and this file
    expect; otherwise the error itself."""
    misfits = any(words in str(error) for words in ("unpack", "unexpected keyword", "truth value"))
    misfits |= isinstance(error, (AssertionError, gym.error.Error))  # of Gymnasium's own checks
    return UsageError(f"{text} ({error})") if misfits and raised_outside(error) else error


def portable(method):
    """The method, with errors that can be sent to another process."""

    def call(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except Exception as error:
            try:
                loads(dumps(error))
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from None
            raise

    return call


class StandardEnv(gym.Wrapper):
    """An environment as networks see it, by the two maps. Rewards are floats.

    A mask in info["action_mask"] becomes part of the observation. Otherwise info keeps success and
    args.info_keys, if they are numbers, and drops the rest, so that nothing in it can stop a run.
    """

    def __init__(self, env, args, mask_in_info: bool = False):
        super().__init__(env)
        self.choices, space = num_choices(env.action_space), env.observation_space
        in_obs = isinstance(space, spaces.Dict) and "action_mask" in space.keys()
        self.id, self.mask_in_info = args.env_id, mask_in_info and not in_obs
        self.keys = {"is_success", "success", *args.info_keys}
        if self.mask_in_info:
            space = spaces.Dict(obs=space, action_mask=MultiBinary(self.choices))
        self.to_array, self.observation_space = observation_map(space)
        self.to_action, self.action_space = action_map(env.action_space)
        self.masked = self.observation_space.masked
        choices = [x for x, _ in leaves(env.action_space) if isinstance(x, (Discrete, MultiDiscrete))]
        sizes = [n for x in choices for n in np.ravel(x.n if isinstance(x, Discrete) else x.nvec)]
        self.starts = np.cumsum([0, *sizes[:-1]])  # of each choice, in a mask
        kinds = [kind for kind, _ in leaves(env.observation_space)]
        self.floats = all(isinstance(kind, Box) and kind.dtype.kind == "f" for kind in kinds)
        if self.masked and self.observation_space.sizes[-1] != self.choices:
            raise UsageError(f"{self.id}: action_mask needs one entry for each choice of {env.action_space}")

    def observe(self, obs, info, over=False) -> np.ndarray:
        """The array of an environment's observation. Once an episode is over, no action need be legal."""
        try:
            if self.mask_in_info:
                mask = info.get("action_mask", ())
                mask = np.concatenate(mask) if isinstance(mask, tuple) and mask else np.ravel(mask)
                obs = dict(obs=obs, action_mask=mask.astype(np.float32))
            array = self.to_array(obs)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            what = "observation or action_mask" if self.mask_in_info else "observation"
            kind = f"{self.env.observation_space}: {error!r}"
            raise UsageError(f"{self.id}: this is not an {what} of {kind}") from None
        if self.mask_in_info and len(mask) != self.choices:
            raise UsageError(f"{self.id}: {len(mask)} entries in info['action_mask'], not {self.choices}")
        if array.shape != self.observation_space.shape:
            shapes = f"{array.shape}; its space has {self.observation_space.shape}"
            raise UsageError(f"{self.id}: an observation has shape {shapes}")
        if self.masked and not over:
            legal = array[-self.choices :] > 0
            if not np.logical_or.reduceat(legal, self.starts).all():
                raise UsageError(f"{self.id}: action_mask forbids all actions of a choice; 1 is legal")
        return array

    def check(self, obs) -> None:
        """Refuses an observation that is not of its space; but numbers of a Box may exceed its bounds."""
        try:
            parts = [(space, np.asarray(x)) for space, x in leaves(self.env.observation_space, obs)]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            kind = f"{self.env.observation_space}: {error!r}"
            raise UsageError(f"{self.id}: this is not an observation of {kind}") from None
        for space, x in parts:
            if not isinstance(space, Box) and space.contains(x):
                continue
            fits = x.size == math.prod(space.shape) and x.dtype.kind in "biuf"
            if fits and (not isinstance(space, Box) or space.dtype.kind in "iu" and x.dtype != space.dtype):
                x = x.reshape(space.shape)
                with np.errstate(invalid="ignore"):
                    whole = x.astype(space.dtype)
                fits = (whole == x).all() and (isinstance(space, Box) or space.contains(whole))
            if not fits:
                span = f" from {x.min()} to {x.max()}" if x.size and x.dtype.kind in "iuf" else ""
                what = f"{x.dtype}{span} of shape {x.shape}"
                raise UsageError(f"{self.id}: {what} is not an observation of {space}")

    def reset(self, **kwargs):
        text = f"{self.id}: reset() must take seed and options and return obs, info"
        try:
            obs, info = self.env.reset(**kwargs)
        except (AssertionError, TypeError, ValueError, gym.error.Error) as error:
            raise misfit(error, text) from None
        if not isinstance(info or {}, dict):
            raise UsageError(f"{text}; info is a dict")
        self.info = info or {}
        if not self.masked and "action_mask" in self.info and not self.choices:
            raise UsageError(f"{self.id}: a mask in info needs Discrete or MultiDiscrete actions")
        self.check(obs)
        array = self.observe(obs, self.info)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            i = int(np.argwhere(~np.isfinite(array))[0, 0])
            raise FloatingPointError(f"{self.id}: observation[{i}] after reset() is {array[i]}, not finite")
        return array, {}

    def step(self, action):
        text = f"{self.id}: step() must return obs, reward, terminated, truncated, info"
        try:
            obs, reward, terminated, truncated, info = self.env.step(self.to_action(action))
            terminated, truncated = bool(terminated), bool(truncated)
        except (AssertionError, TypeError, ValueError, gym.error.Error) as error:
            raise misfit(error, text) from None
        if not isinstance(reward, (float, np.floating)):
            if math.isnan(number(reward)):
                raise UsageError(f"{self.id}: its reward is {reward!r}, not a number")
            reward = number(reward)
        if info and not isinstance(info, dict):
            raise UsageError(f"{text}; info is a dict")
        if not self.floats:
            self.check(obs)
        obs, info = self.observe(obs, info or {}, terminated or truncated), info or {}
        if info:
            if self.choices and not self.masked and "action_mask" in info:
                raise UsageError(f"{self.id}: info['action_mask'] is missing after reset()")
            info = {key: number(info[key]) for key in self.keys & info.keys()}
            info = {key: x for key, x in info.items() if not math.isnan(x)}
        return obs, reward, terminated, truncated, info


# --- environments
def todays_name(env_id: str) -> str:
    """A hint for environments that have a new name, such as Atari games and old versions."""
    with contextlib.suppress(ImportError):
        gym.register_envs(importlib.import_module("ale_py"))
    name = env_id.rpartition(":")[2].removeprefix("ALE/")
    game = re.escape(re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", name))
    names = [name for name in gym.registry if re.fullmatch(rf"(ALE/)?{game}-v\d+", name)]
    today = max(names, key=lambda name: ("/" in name, name), default="")
    if today in ("", env_id, name):
        return ""
    return f" Its name is now {today}: see docs/from_cleanrl.md or docs/from_sb3.md."


def make_env(args, mask_in_info: bool = False, **kwargs) -> StandardEnv:
    return StandardEnv(gym.make(args.env_id, **{**args.env_kwargs, **kwargs}), args, mask_in_info)


def make_envs(args, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """num_envs standard environments. Nothing resets by itself: call reset_done after every step."""
    training = os.getpid()

    def make():
        env = make_env(args, mask_in_info, **kwargs)
        if os.getpid() != training:
            env.reset, env.step = portable(env.reset), portable(env.step)
            if hasattr(os, "setpgrp"):
                os.setpgrp()  # Ctrl-C reaches the training alone, which decides when to stop
        return env

    try:
        if args.env_id.startswith("ALE/"):
            return make_atari(args.env_id, num_envs, **{**args.env_kwargs, **kwargs})
        if "" not in sys.path:  # module:Env-v0 finds modules in the current folder
            sys.path.append("")
        env, mask_in_info = make_env(args, **kwargs), False
        if "ale_py" in str(env.spec.entry_point):  # a game under a name that hides it from make_atari
            raise gym.error.NameNotFound("under this name it would not be preprocessed.")
        if env.choices:  # only a reset shows whether info has a mask
            env.reset()
            mask_in_info = "action_mask" in env.info
        env.close()
        vector = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
        return vector([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    except UsageError:
        raise
    except (AttributeError, gym.error.Error, ImportError, TypeError, ValueError) as error:
        if not isinstance(error, (gym.error.Error, ImportError)) and not raised_outside(error):
            raise  # a bug in the environment keeps its traceback
        raise UsageError(f"cannot make {args.env_id}: {error}{todays_name(args.env_id)}") from error


def make_atari(env_id: str, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """Atari games, stepped and preprocessed together by ale-py; rewards are the game's own."""
    if kwargs.get("episodic_life"):
        raise UsageError("episodic_life would restart the game after every lost life: leave it out")
    gym.register_envs(importlib.import_module("ale_py"))
    envs = gym.make_vec(env_id, num_envs, "vector_entry_point", **{"reward_clipping": False, **kwargs})
    to_array, layout = observation_map(envs.single_observation_space)
    if layout.shape != envs.single_observation_space.shape:  # color
        stack = lambda obs: np.stack([to_array(x) for x in obs])
        envs = gym.wrappers.vector.TransformObservation(envs, stack, single_observation_space=layout)
    to_action, actions = action_map(envs.single_action_space)
    if isinstance(actions, Box):
        stack = lambda action: np.stack([to_action(x) for x in action])
        envs = gym.wrappers.vector.TransformAction(envs, stack, single_action_space=actions)
    envs.single_observation_space = layout
    return envs


def standard_spaces(args) -> tuple[Layout, gym.Space]:
    """The spaces of observations and actions as networks see them."""
    envs = make_envs(replace(args, async_envs=False), 1)
    envs.close()
    return envs.single_observation_space, envs.single_action_space


def close_envs(envs, kill: bool) -> None:
    """Closes environments; kill ends their processes, whatever they are doing."""
    processes = getattr(envs, "processes", []) if kill else []
    for process in processes:
        process.kill()
        process.join()
    with contextlib.suppress(Exception) if processes else contextlib.nullcontext():  # the pipes are broken
        envs.close(**({"terminate": True} if processes else {}))
    envs.closed = True


def reset_done(envs, next_obs: np.ndarray, next_info: dict, done: np.ndarray) -> tuple[np.ndarray, dict]:
    """Starts new episodes where done. Returns what the policy acts on; next_obs stays the true successor."""
    obs, info = envs.reset(options={"reset_mask": done}) if done.any() else (next_obs, next_info)
    return obs, info


def check_step(obs: np.ndarray, reward: np.ndarray, step: int) -> None:
    """Raises an error that names the first number that is not finite, before anything learns from it."""
    limit = np.finfo(np.float32).max
    for what, x in (("observation", obs), ("reward", reward)):
        if x.dtype.kind == "f" and not float(np.vdot(x, x)) < 1e76 and not (np.abs(x) <= limit).all():
            i = tuple(np.argwhere(~(np.abs(x) <= limit))[0].tolist())
            name = f"{what}{list(i[1:]) or ''} of environment {i[0]}"
            raise FloatingPointError(f"{name} at step {step:,} is {x[i]}, not finite in float32")


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on the device; float64 and bool become float32. Copies to a GPU are asynchronous."""
    tensor = torch.as_tensor(array, dtype=torch.float32 if array.dtype in (np.float64, np.bool_) else None)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def stack_steps(steps: list[dict]) -> dict[str, torch.Tensor]:
    """One tensor (num_steps, num_envs, ...) on the host for each field of the steps."""
    host = torch.device("cpu")
    return {name: to_tensor(np.stack([step[name] for step in steps]), host) for name in steps[0]}


# --- optimizer
class Adam(torch.optim.Adam):
    """Adam for groups (parameters, learning rate); a rate in a tensor can change inside a CUDA graph.

    A start-up shortcut: the decorated methods of torch import its compiler, which takes a second.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)

    def __init__(self, groups, device: torch.device, eps=1e-8, graph=False, weight_decay=0.0):
        rate = lambda lr: dict(lr=torch.tensor(float(lr), device=device), initial_lr=lr)
        groups = [dict(params=parameters, **rate(lr)) for parameters, lr in groups]
        super().__init__(groups, eps=eps, weight_decay=weight_decay, fused=True, capturable=graph)

    def load_state_dict(self, state: dict) -> None:
        """Restores the moments; learning rates and other settings keep their current values."""
        groups = self.state_dict()["param_groups"]
        if [len(x["params"]) for x in groups] != [len(x["params"]) for x in state["param_groups"]]:
            raise ValueError("its optimizer has other parameters")
        state = state | {"param_groups": groups}
        inspect.unwrap(torch.optim.Adam.load_state_dict)(self, state)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> list[torch.Tensor]:
    """Scales all gradients so that their joint norm is at most max_norm. Returns each group's norm before."""
    gradients = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    norms = [torch.stack(torch._foreach_norm(group)).norm() for group in gradients]
    if max_norm < math.inf:
        scale = (max_norm / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([gradient for group in gradients for gradient in group], scale)
    return norms


class CudaGraph:
    """update(batch), captured after three calls and then replayed: one launch instead of about a hundred."""

    def __init__(self, update):
        self.update, self.calls = update, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls <= 3:  # ordinary updates, on a side stream as CUDA requires before a capture
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


# --- evaluation
@contextlib.contextmanager
def evaluation_envs(args, agent, num_envs: int, **kwargs):
    """Separate environments and random numbers: an evaluation leaves the training as it was."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        set_seed(args.eval_seed)
        envs = make_envs(replace(args, async_envs=False), num_envs, **kwargs)
        agent.eval()
        try:
            yield envs
        finally:
            envs.close()
            agent.train()
            random.setstate(states[0])
            np.random.set_state(states[1])


def evaluate(args, agent, stopped=lambda: False) -> tuple[np.ndarray, dict]:
    """Plays eval_episodes episodes, one in each environment, so that short ones are not favored.

    Returns each episode's return, and the metrics; the success rate only if info reports success.
    """
    n = args.eval_episodes
    totals = np.zeros((4, n))  # return, discounted return, length, terminations
    success, playing, t = np.full(n, np.nan), np.ones(n, dtype=bool), 0
    with evaluation_envs(args, agent, n) as envs:
        obs, info = envs.reset(seed=args.eval_seed)
        while playing.any() and t < args.eval_max_steps and not stopped():
            action = agent.act(obs, info, greedy=not args.sample_actions)
            next_obs, reward, terminated, truncated, next_info = envs.step(action)
            check_step(next_obs, reward, t)
            totals += playing * [reward, args.gamma**t * reward, np.ones(n), terminated]
            for key in {"is_success", "success"} & next_info.keys():
                told = playing & next_info[f"_{key}"]
                success[told] = np.fmax(success, next_info[key])[told]
            playing &= ~(terminated | truncated)
            info |= next_info  # keeps a policy's own entries, such as a memory
            obs, info = reset_done(envs, next_obs, info, terminated | truncated)
            t += 1
    metrics = {f"eval/return_{name}": getattr(totals[0], name)() for name in ("mean", "std", "min", "max")}
    names = "discounted_return_mean", "length_mean", "termination_rate"
    metrics |= {f"eval/{name}": total.mean() for name, total in zip(names, totals[1:], strict=True)}
    if not np.isnan(success).all():
        metrics["eval/success_rate"] = (success > 0).mean()
    return totals[0], metrics


def film(args, agent, path: Path, stopped=lambda: False) -> None:
    """Films the first episode of an evaluation in VP8, which browsers play, at up to 30 frames a second."""
    atari, writer, done, t = args.env_id.startswith("ALE/"), None, np.zeros(1, dtype=bool), 0
    with evaluation_envs(args, agent, 1, **({} if atari else {"render_mode": "rgb_array"})) as envs:
        obs, info = envs.reset(seed=args.eval_seed)
        if atari:  # a vector of games is gray: a twin in color plays the same game
            color = dict(grayscale=False, stack_num=1, img_height=210, img_width=160)
            twin = make_atari(args.env_id, 1, **{**args.env_kwargs, **color})
            twin.reset(seed=args.eval_seed)
        fps = number(envs.metadata.get("render_fps"))
        fps = fps if 0 < fps < math.inf else 15
        every = math.ceil(fps / 30)
        while not done[0] and t < args.eval_max_steps and not stopped():
            action = agent.act(obs, info, greedy=not args.sample_actions)
            next_obs, _, terminated, truncated, next_info = envs.step(action)
            frame = as_frame(twin.step(action)[0][0] if atari else envs.envs[0].render(), args.env_id)
            if writer is None:
                size = frame.shape[1::-1]
                writer = open_film(path, fps / every, size)
            if t % every == 0:
                writer.write(frame if frame.shape[1::-1] == size else cv2.resize(frame, size))
            done, t = terminated | truncated, t + 1
            obs, info = reset_done(envs, next_obs, info | next_info, done)
    if writer is not None:
        writer.release()


def open_film(path: Path, fps: float, size: tuple[int, int]) -> cv2.VideoWriter:
    """A VP8 writer. Opening it is muted: OpenCV warns about the format, and then writes it."""
    null, stderr = os.open(os.devnull, os.O_WRONLY), None
    with contextlib.suppress(OSError):  # nobody listens
        stderr = os.dup(2)
        os.dup2(null, 2)
    try:
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"VP80"), fps, size)
    finally:
        if stderr is not None:
            os.dup2(stderr, 2), os.close(stderr)
        os.close(null)
    if not writer.isOpened():
        raise UsageError(f"cannot write {path}: is its folder writable, and does OpenCV have VP8?")
    return writer


def as_frame(image, env_id: str) -> np.ndarray:
    """A frame for OpenCV, bytes (H, W, 3) with blue first, from gray, RGB or RGBA bytes."""
    image = np.asarray(image)
    if image.ndim == 3 and image.shape[0] == 3:  # of Atari
        image = np.moveaxis(image, 0, -1)
    gray = image.ndim == 2 or image.ndim == 3 and image.shape[2] == 1
    color = image.ndim == 3 and image.shape[2] in (3, 4)
    if image.dtype != np.uint8 or not image.size or not gray and not color:
        what = f"{image.dtype} of shape {image.shape}"
        raise UsageError(f"{env_id}: render() returns {what}; a video needs bytes (H, W, 3)")
    if gray:
        return cv2.cvtColor(image.reshape(image.shape[:2]), cv2.COLOR_GRAY2BGR)
    return cv2.cvtColor(image, cv2.COLOR_RGB2BGR if image.shape[2] == 3 else cv2.COLOR_RGBA2BGR)


# --- files
def load(path: str | Path) -> dict:
    """The state in a .pt file, or in the checkpoint.pt of a run folder."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise UsageError(f"cannot load {path}: {error}") from None
    if not isinstance(state, dict):
        raise UsageError(f"{path} was not saved by this script: it holds a {type(state).__name__}")
    return state


def saved_args(path: str | Path, **changes) -> Args:
    """The arguments in a .pt file or in a run folder, with changes."""
    try:
        return Args(**load(path)["args"] | changes)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} was not saved by this script: {error}") from None


class Policy:
    """policy(obs, info=None, greedy=True): the environment's observation in, an action for it out.

    A batch of observations from a vector environment yields a batch of actions. Of info only action_mask is
    read. Call reset() before each episode, or for a batch reset(done), with done (num_envs,) where episodes
    have ended: a policy with memory forgets them.
    """

    def __init__(self, agent, env):
        self.agent, self.env = agent.eval(), env
        self.reset()

    def reset(self, done=None) -> None:
        kept = {} if done is None else self.info  # the memory (num_envs, 1, size) of a policy that has one
        self.info = {name: x * torch.as_tensor(~np.asarray(done))[:, None, None] for name, x in kept.items()}

    def __call__(self, obs, info=None, greedy=True):
        space, masks = self.env.env.observation_space, (info or {}).get("action_mask")
        kind, x = leaves(space, obs)[0]
        batched = np.ndim(x) > len(kind.shape or ())
        if batched:
            obs = list(iterate(batch_space(space, len(x)), obs))
        else:
            obs, masks = [obs], masks if masks is None else [masks]
        infos = [{}] * len(obs) if masks is None else [{"action_mask": mask} for mask in masks]
        self.env.check(obs[0])
        arrays = np.stack([self.env.observe(*pair, over=True) for pair in zip(obs, infos, strict=True)])
        actions = [self.env.to_action(action) for action in self.agent.act(arrays, self.info, greedy)]
        space = self.env.env.action_space
        return concatenate(space, actions, create_empty_array(space, len(x))) if batched else actions[0]


def load_policy(path: str | Path) -> Policy:
    """The policy in a .pt file or a run folder, for the original environment (Atari: for make_envs's)."""
    args = saved_args(path)
    agent = Agent(*standard_spaces(args), args, torch.device("cpu"))
    agent.load_state_dict(load(path)["agent"])
    if not args.env_id.startswith("ALE/"):
        env = make_env(args, agent.obs_space.masked)
        env.close()  # only its maps are needed
        return Policy(agent, env)
    games = gym.Env()  # those of make_envs, which preprocesses and stacks frames
    games.observation_space, games.action_space = agent.obs_space, agent.action_space
    return Policy(agent, StandardEnv(games, args))


# --- the run
class Run:
    """The folder of a run: its counters, log, evaluations and checkpoints; and the environments to train in.

    parts is everything that learning depends on, with state_dict and load_state_dict; agent plays.
    """

    def __init__(self, args, **parts):
        self.args, self.parts, self.signal, self.envs = args, parts, 0, None
        self.env_steps, self.seconds, self.best = 0, 0.0, -math.inf
        self.saved_at, self.scored_at, self.logged_at = -1, -1, 0  # step of the last one; -1: none yet
        self.returns = []  # of the last evaluation
        self.episodes = []  # since the last log entry: return, length, means of info_keys
        self.running = np.zeros((2 + len(args.info_keys), args.num_envs))  # sums over episodes in progress
        self.unconfirmed = [f"info/{key}" for key in args.info_keys]  # until an episode ends
        self.checkpoint_every = args.checkpoint_every * args.num_envs
        self.over = False  # True ends the training before total_timesteps
        self.source = Path(train.__code__.co_filename)  # in a notebook there is no such file
        self.algo = self.source.stem if self.source.is_file() else "notebook"
        name = f"{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(args.run_dir or f"runs/{args.env_id.replace(':', '-')}/{self.algo}/{name}")
        self.here = Path.cwd()
        if path := args.resume or args.evaluate or args.init_from:
            self.load(Path(path))

    @property
    def files(self) -> Path:
        """The folder, also after an environment has changed the working directory."""
        return self.here / self.folder

    def load(self, path: Path) -> None:
        """Loads all parts for --resume, only the agent for --evaluate and --init-from."""
        state, whole = load(path), bool(self.args.resume)
        if whole and not self.parts.keys() <= state.keys():
            raise UsageError(f"{path} is not a full checkpoint; --init-from starts a run from its weights")
        try:
            for name in self.parts if whole else ["agent"]:
                part = state[name]  # a buffer copies it; others would keep the mapped file on the disk
                self.parts[name].load_state_dict(part if name == "buffer" else loads(dumps(part)))
            loaded = self.parts["agent"].state_dict().items()
            if any(not torch.equal(x.cpu(), state["agent"][name]) for name, x in loaded):
                raise ValueError("two of its networks are one here: see --shared-trunk")
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            headline, *layers = str(error).splitlines() or [""]
            reason = layers[0].strip() if layers else headline  # the first of many layers says enough
            raise UsageError(f"{path} does not fit these arguments: {reason}") from None
        if self.args.init_from:
            return
        vars(self).update(state["run"], saved_at=state["run"]["env_steps"])
        self.episodes = [x for x in self.episodes if len(x) == len(self.running)]  # of other --info-keys
        if whole and self.args.run_dir:  # a branch has a log, a checkpoint and a best model of its own
            self.best, self.saved_at, self.scored_at = -math.inf, -1, -1
            return
        self.folder = path if path.is_dir() else path.parent
        if whole and (best := self.folder / "best.pt").exists():  # after a kill, newer than the checkpoint
            self.best = max(self.best, load(best)["run"]["best"])

    def __enter__(self):
        self.open()
        self.handlers = {}
        numbers = [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # the terminal has gone; Windows has none
        if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # as under nohup
            numbers.append(hangup)
        with contextlib.suppress(ValueError):  # signals reach the main thread only
            for number in numbers:
                self.handlers[number] = signal.signal(number, self.catch)
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Whatever ends the training: saves the latest weights, closes everything, restores signals."""
        first = getattr(error, "__context__", None) or error  # torch.save hides what interrupts it
        at_once = self.signal and isinstance(first, KeyboardInterrupt)  # a second Ctrl-C
        processes = getattr(self.envs, "processes", [])
        for process in processes if isinstance(error, (EOFError, ConnectionError)) else ():
            process.join(0.1)  # one is gone; its exit code comes a moment later
        codes = [process.exitcode for process in processes]
        quiet = contextlib.suppress(Exception if error else ())  # the first error counts
        with quiet, contextlib.ExitStack() as last:  # all of these happen, in reverse order
            for number, handler in self.handlers.items():
                last.callback(signal.signal, number, handler)
            last.callback(self.lock.close)
            last.callback(self.bar.close)
            last.callback(self.writer.close)
            if self.envs is not None:
                last.callback(close_envs, self.envs, kill=error is not None)
            if error and not at_once and self.saved_at < self.env_steps:
                self.checkpoint()
        for i, code in enumerate(codes):
            if error and code:
                say(f"the process of environment {i} ended with exit code {code}")
        go_on = self.command("--resume", str(self.folder))
        if error and self.saved_at > 0:
            why = "stopped at once" if at_once else "an error ended the training"
            say(f"{why}; step {self.saved_at:,} is saved; to continue: {go_on}")
        if at_once:
            raise KeyboardInterrupt from None
        if not error and self.signal:
            say(f"stopped at step {self.env_steps:,}, saved; to continue: {go_on}")
            raise KeyboardInterrupt if self.signal == signal.SIGINT else SystemExit(128 + self.signal)
        if not error and self.best > -math.inf:
            watch = self.command("--evaluate", str(self.folder / "best.pt"), "--capture-video")
            say(f"best mean return {self.best:.1f}; to watch it: {watch}")

    def command(self, *words: str) -> str:
        """These options as the caller would type them: on the command line, or in Python."""
        if Path(sys.argv[0]).name == self.source.name:
            return " ".join(f'"{word}"' if " " in word else word for word in ["python", sys.argv[0], *words])
        return f"train(parse_args({list(words)}))"

    def open(self) -> None:
        """Creates the folder, or continues in it, without the log entries after the checkpoint."""
        args, agent, name = self.args, self.parts["agent"], self.folder.name
        if args.run_dir and any(self.folder.glob("*")):
            whole = (self.folder / "checkpoint.pt").exists()
            what = "--resume it" if whole else "delete it, for it has no checkpoint"
            raise UsageError(f"{self.folder} is not empty: choose another --run-dir, or {what}")
        try:
            while not (args.run_dir or args.resume):  # runs of the same second get their own folders
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir(parents=True)
                    break
                twins = len(list(self.folder.parent.glob(f"{name}*")))
                self.folder = self.folder.with_name(f"{name}-{twins + 1}")
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {self.folder}: {error.strerror}") from None
        self.lock = (self.files / "lock").open("w")  # one training at a time, however the last one ended
        try:
            fcntl = importlib.import_module("fcntl")
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another training runs in {self.folder}") from None
        except (ImportError, OSError):  # Windows, and some network drives
            pass
        self.progress = self.files / "progress.jsonl"
        if self.progress.exists():
            rows = self.progress.read_bytes().splitlines(keepends=True)
            kept = [row for row in rows if row.endswith(b"\n") and json.loads(row)["step"] <= self.env_steps]
            os.truncate(self.progress, sum(map(len, kept)))
        describe, git = ["git", "-C", str(self.source.parent), "describe", "--always", "--dirty"], ""
        with contextlib.suppress(OSError):  # no git
            git = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
        about = {module.__name__: module.__version__ for module in (torch, gym, np)} | dict(
            python=sys.version, git=git, command=sys.argv, step=self.env_steps,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        )  # fmt: skip
        environment = self.folder / "environment.json"
        history = []
        with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: a kill while it was written
            history = json.loads(environment.read_text())
        environment.write_text(json.dumps([*history, about], indent=2))
        (self.folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
        copied = self.folder / (f"{self.algo}-{self.env_steps}.py" if history else f"{self.algo}.py")
        copied.write_text("".join(linecache.getlines(str(self.source))), encoding="utf-8")
        self.writer = SummaryWriter(str(self.files), purge_step=self.env_steps + 1)
        text = json.dumps(dict(args=asdict(args), environment=about), indent=4)
        self.writer.add_text("args", text, self.env_steps)
        disable = None if sys.stderr else True  # None: where stderr is no terminal
        self.bar = tqdm(total=args.total_timesteps, initial=self.env_steps, unit=" steps", disable=disable)
        self.started_at = time.perf_counter() - self.seconds
        parameters = sum(p.numel() for p in agent.parameters())
        actions = action_text(agent.action_space) + ", masked" * agent.obs_space.masked
        say(f"{args.env_id} obs: {agent.obs_space} · actions: {actions} · {parameters:,} parameters")
        for kind in agent.obs_space.flattened:
            say(f"note: {kind.dtype} obs {kind.shape} are flattened for the MLP; a CNN takes bytes (uint8)")
        say(f"run folder: {self.folder}")
        if args.resume and self.finished:
            goal = "stop-return" if self.env_steps < args.total_timesteps else "total-timesteps"
            say(f"nothing is left to do after step {self.env_steps:,}: raise --{goal}")

    def catch(self, number: int, frame) -> None:
        """Stops at the next pause; a second signal stops at once."""
        self.signal = number
        with contextlib.suppress(OSError):  # print would fail if this interrupts one
            os.write(2, b"\nstops and saves after this rollout or evaluation; once more: at once\n")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    @property
    def new_segment(self) -> bool:
        """Whether a segment starts here: after every checkpoint, and when one was loaded."""
        return self.envs is None or self.saved_at == self.env_steps

    def start_segment(self) -> tuple[gym.vector.VectorEnv, np.ndarray, dict]:
        """New envs, their first obs and info; everything random is seeded from (seed, env_steps).

        What follows depends on the checkpoint alone, so a resumed run repeats an uninterrupted one bit for
        bit. Episodes in progress count as truncated.
        """
        if self.envs is not None:
            close_envs(self.envs, kill=False)
        seed = segment_seed(self.args, self.env_steps)
        set_seed(seed)
        self.envs = make_envs(self.args, self.args.num_envs)
        self.envs.action_space.seed(seed)
        return self.envs, *self.envs.reset(seed=seed)

    def count(self, next_obs: np.ndarray, reward: np.ndarray, done: np.ndarray, info: dict) -> None:
        """Counts one step of every environment, with the environment's own rewards."""
        self.env_steps += len(reward)
        check_step(next_obs, reward, self.env_steps)
        returns, lengths, *sums = self.running
        returns += reward
        lengths += 1
        for sum_, key in zip(sums, self.args.info_keys, strict=True):
            sum_ += info.get(key, 0)
        for i in done.nonzero()[0]:
            return_, length, *sums = self.running[:, i].tolist()
            self.episodes.append((return_, length, *(x / length for x in sums)))
            self.running[:, i] = 0

    def pause(self) -> bool:
        """Between two updates: evaluates and saves when it is time. Whether the training goes on."""
        if self.finished and self.envs is not None:  # before an evaluation: some simulators run only once
            close_envs(self.envs, kill=False)
        if self.due(self.args.eval_every, self.scored_at) and not self.signal:
            self.evaluate()
        if self.due(self.checkpoint_every, self.saved_at):
            self.checkpoint()
        return not self.finished

    @property
    def finished(self) -> bool:
        """Whether the training is over, or a signal asks to stop."""
        reached = self.env_steps >= self.args.total_timesteps or self.best >= self.args.stop_return
        return reached or self.over or self.signal > 0

    def due(self, every: int, last: int) -> bool:
        """Whether a multiple of every lies between the steps last and now, or the training ends here."""
        now = self.finished or every > 0 and self.env_steps // every > last // every
        return now and last < self.env_steps

    def evaluate(self) -> np.ndarray:
        """Scores the agent, logs it, keeps it in models/, and in best.pt if it is the best so far."""
        args, agent, path = self.args, self.parts["agent"], ""
        returns, metrics = evaluate(args, agent, lambda: self.signal)
        spread = f"± {returns.std():.1f} ({returns.min():.1f} to {returns.max():.1f})"
        success = f"  success {metrics['eval/success_rate']:.0%}" if "eval/success_rate" in metrics else ""
        if args.capture_video:
            seed = f"-seed{args.eval_seed}" if args.evaluate else ""
            path = self.folder / "videos" / f"{self.env_steps}{seed}.webm"
        length = f"length {metrics['eval/length_mean']:.1f}{success}  {path}"
        text = f"step {self.env_steps:,}  return {returns.mean():.1f} {spread}  {length}".rstrip()
        if args.evaluate and not self.signal:  # before the film, which may fail
            say(text)
            say(json.dumps(dict(step=self.env_steps, episodes=len(returns), **metrics, returns=[*returns])))
        if path:
            (self.files / "videos").mkdir(exist_ok=True)
            film(args, agent, self.here / path, lambda: self.signal)
        if args.evaluate or self.signal:  # if it was cut short, --resume repeats it
            return returns
        say(text)
        self.returns, self.scored_at = returns.tolist(), self.env_steps
        self.log(metrics)
        self.save(f"models/{self.env_steps}.pt", agent=agent)
        if returns.mean() > self.best:
            self.best = float(returns.mean())
            self.save("best.pt", agent=agent)
        return returns

    def log(self, metrics: dict[str, torch.Tensor | float]) -> None:
        """Writes a log entry to progress.jsonl and TensorBoard. Only here does the host wait for metrics."""
        row = {name: float(value) for name, value in metrics.items()}
        self.check_finite(row)
        if self.episodes:
            keys = [f"info/{key}" for key in self.args.info_keys]
            names = ["train/episode_return", "train/episode_length", *keys]
            row |= zip(names, np.mean(self.episodes, axis=0), strict=True)
            for key in self.unconfirmed:
                if row[key] == 0:
                    say(f"note: {key} is 0 so far; does the environment put a number there, under this name?")
            self.unconfirmed = []
            self.bar.set_postfix(episode_return=row["train/episode_return"], refresh=False)
            self.episodes = []
        self.logged_at, self.seconds = self.env_steps, time.perf_counter() - self.started_at
        row["speed/steps_per_second"] = self.env_steps / self.seconds
        for name, value in row.items():
            self.writer.add_scalar(name, value, self.env_steps)
        with self.progress.open("a") as file:
            file.write(json.dumps({"step": self.env_steps, "seconds": self.seconds, **row}) + "\n")
        self.bar.update(self.env_steps - self.bar.n)

    def check_finite(self, values: dict) -> None:
        """Stops the run before a NaN or an infinity reaches a file."""
        if bad := [name for name, x in values.items() if not torch.as_tensor(x).isfinite().all()]:
            what = f"{', '.join(bad)} not finite at step {self.env_steps:,}"
            if self.saved_at >= 0:
                what += f"; {self.folder} has the checkpoint of step {self.saved_at:,}"
            raise FloatingPointError(what)

    def save(self, name: str, **parts) -> None:
        """Writes a whole file or none: a kill or a full disk leaves the previous one as it was."""
        states = {name: part.state_dict() for name, part in parts.items()}
        self.check_finite(states["agent"])
        names = ("env_steps", "scored_at", "logged_at", "seconds", "best", "returns", "episodes")
        run = {name: getattr(self, name) for name in names}
        path = self.files / name
        path.parent.mkdir(exist_ok=True)
        with path.with_suffix(".part").open("wb") as file:
            try:
                torch.save(dict(args=asdict(self.args), run=run, **states), file)
            except RuntimeError as error:
                full = isinstance(error.__context__, OSError)  # which torch hides
                raise (error.__context__ if full else error) from None
            os.fsync(file.fileno())
        path.with_suffix(".part").replace(path)

    def checkpoint(self) -> None:
        """Saves everything that the rest of the training depends on. Episodes in progress are dropped."""
        self.save("checkpoint.pt", **self.parts)
        self.saved_at = self.env_steps
        self.running[:] = 0
        self.writer.flush()


def action_text(space) -> str:
    """A policy's actions, in words."""
    if isinstance(space, Box):
        n = math.prod(space.shape)
        return f"{n} number{'s' * (n > 1)}"
    return f"{' × '.join(map(str, np.ravel(space.n if isinstance(space, Discrete) else space.nvec)))} choices"


def main() -> None:
    if hasattr(signal, "SIGPIPE"):  # --help | head
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        args = parse_args()
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        train(args)
    except (UsageError, FloatingPointError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
