"""PEARL (Rakelly et al. 2019, arXiv 1903.08254): meta-learning off policy. From transitions of a task, the
context c, an encoder infers a belief over a latent z; SAC's actor and critics learn all tasks, given z.

    belief   q(z | c) ~ prod_n N(z; mean(c_n), var(c_n)),   c_n = (s, a, r[, s']);   N(0, 1) if c is empty
    target   y = r + gamma (min_i Q'_i(s', a', z) - alpha log pi(a' | s', z)),   a' ~ pi(s', z)
    critics  L = sum_i E[(Q_i(s, a, z) - y)^2] + kl_lambda KL(q(z | c) || N(0, 1)),   z ~ q(z | c)
    actor    L = E[alpha log pi(a | s, z) - min_i Q_i(s, a, z)],   a = tanh(mean + std noise)

The loss of the critics is also that of the encoder, which learns from nothing else. In a new task z is drawn
from the prior, held for an episode, and drawn anew from q(z | c) of all that has been seen in this task.

Differences from the paper:
 1. Target critics and a learned temperature, as in sac.py; the paper's SAC has V, its target and a fixed one.
 2. Tasks are collected in rounds of num_envs tasks at once, those with the least data first; the paper takes
    one after the other, at random. The first actions are random, as in sac.py, on request those of a
    share of the tasks always.
 3. The KL is a mean over the tasks of a meta-batch, as the losses of actor and critics are.
 4. The encoder takes the step size of the critics.
 5. A time limit is no termination: y bootstraps from the value of the true final observation.
 6. On request z is drawn anew every hold_z steps, within an episode too.

    python algos/pearl.py --env-id PointRobot-v0
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "numpy", "opencv-python>=5",
#     "psutil", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, copy, errno, inspect, json, math, os, platform, random, shutil, signal, subprocess, sys
import time
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
from gymnasium.vector.utils import batch_space
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Count = Annotated[int, (1, math.inf)]  # numbers and their ranges, checked before anything runs
Steps = Annotated[int, (0, math.inf)]
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
    eval_episodes: Count = 20  # adapted episodes of one evaluation, of the test tasks in turn
    eval_max_steps: Count = 100_000  # steps after which an episode of an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations and of the test tasks
    sample_actions: bool = False  # evaluations draw actions from the policy in place of the greedy ones
    log_every: int = 1_000  # environment steps between rows of the log
    capture_video: bool = False  # film an adaptation of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "PointRobot-v0"  # family of tasks, in this file or module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 5  # environments that step together, in each round of as many training tasks
    horizon: Count = 200  # steps of an episode at most
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    num_train_tasks: Count = 80  # tasks that are learned from
    num_test_tasks: Count = 20  # tasks that evaluations adapt to
    adaptation_episodes: Count = 2  # episodes in a test task before the one that is scored
    # algorithm
    total_timesteps: Count = 100_000  # environment steps, rounded up to whole rounds
    learning_starts: int = 2_000  # environment steps of random actions before the first update
    random_share: Share = 0.0  # share of the tasks of a round whose actions stay random after that
    random_hold: Count = 1  # steps for which a random action is kept, to explore by longer moves
    steps_prior: Count = 100  # steps of a round with z of the prior; they become context
    steps_posterior: Steps = 0  # steps with z of the belief so far; they become context, too
    extra_steps_posterior: Steps = 100  # steps with z of the belief that are for replay alone
    buffer_size: Count = 1_000_000  # transitions kept for replay, of all training tasks together
    meta_batch_size: Count = 16  # tasks in each update
    batch_size: Count = 256  # transitions of each of them
    embedding_batch_size: Count = 64  # transitions of the context of each of them
    updates_per_step: Rate = 1.0  # updates for each environment step, also a fraction or many
    learning_rate: Rate = 3e-4  # step size of the updates
    actor_lr: Rate | None = None  # learning rate of the actor; None: learning_rate
    critic_lr: Rate | None = None  # learning rate of encoder and critics; None: learning_rate
    alpha_lr: Rate | None = None  # learning rate of the temperature; None: learning_rate
    anneal_lr: bool = False  # learning rates fall linearly to 0
    max_grad_norm: Rate = math.inf  # global norm to clip gradients of actor and critics at; inf: never
    gamma: Share = 0.99  # discount
    tau: Share = 0.005  # share of the new weights in each update of the target networks
    alpha: Annotated[float, (1e-8, math.inf)] = 1.0  # temperature: at first or, without auto_alpha, always
    auto_alpha: bool = True  # the temperature is learned, so that the entropy becomes target_entropy
    target_entropy: float | None = None  # in nats; None: minus the number of dimensions of the actions
    latent_dim: Count = 5  # dimensions of z
    hold_z: Steps = 0  # steps after which z is drawn anew; 0: it is held for an episode, as in the paper
    information_bottleneck: bool = True  # z is drawn, and the KL keeps it small; else z is the mean output
    kl_lambda: Rate = 0.1  # weight of the KL
    next_obs_in_context: bool = False  # the context has s', for tasks that differ in their dynamics
    mean_reg: Rate = 1e-3  # weight of the squared means of the policy, before tanh
    log_std_reg: Rate = 1e-3  # weight of its squared log standard deviations
    pre_tanh_reg: Rate = 0.0  # weight of its squared draws, before tanh
    reward_scale: float = 1.0  # rewards times this, for actor and critics only
    hidden_sizes: tuple[Count, ...] = (300, 300, 300)  # widths of the hidden layers of actor and critics
    encoder_sizes: tuple[Count, ...] = (200, 200, 200)  # widths of the hidden layers of the encoder
    activation: Literal["tanh", "relu", "elu", "silu"] = "relu"  # between the hidden layers


# -------------------------------------------------------------------------------------------- learning rule
def product_of_gaussians(mean, var):
    """Mean and variance (T, Z) of the normalized product of N Gaussians each, mean and var (T, N, Z).

    1 / var = sum_n 1 / var_n,   mean = var sum_n mean_n / var_n
    """
    product_var = 1 / (1 / var).sum(dim=1)
    return product_var * (mean / var).sum(dim=1), product_var


def kl_to_prior(mean, var):
    """KL(N(mean, var) || N(0, 1)), (T,), of independent dimensions (T, Z)."""
    return 0.5 * (var + mean.square() - 1 - var.log()).sum(dim=-1)


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
    if args.num_envs > args.num_train_tasks:
        raise UsageError(f"--num-envs {args.num_envs}: at most --num-train-tasks {args.num_train_tasks}")
    envs, obs, info = start_segment(args)
    spaces = envs.single_observation_space, envs.single_action_space
    agent = Agent(*spaces, args, device)
    if args.evaluate:  # playing needs no memory
        return Run(args, args.num_envs, agent=agent).evaluate()
    rates = (args.learning_rate if x is None else x for x in (args.actor_lr, args.critic_lr, args.alpha_lr))
    actor_lr, critic_lr, alpha_lr = rates
    graph = args.compile and device.type == "cuda"
    actor_optimizer = Adam([(agent.actor.parameters(), actor_lr)], device, graph=graph)
    critic_parameters = [*agent.encoder.parameters(), *agent.critic.parameters()]
    critic_optimizer = Adam([(critic_parameters, critic_lr)], device, graph=graph)
    alpha_optimizer = Adam([([agent.log_alpha], alpha_lr)], device, graph=graph)
    context_steps = args.steps_prior + args.steps_posterior
    round_steps = context_steps + args.extra_steps_posterior
    tasks = sample_tasks(args, args.num_train_tasks, np.random.default_rng(args.seed))
    buffer = TaskBuffer(args, tasks, *spaces, context_steps, round_steps, device)
    target_entropy = -math.prod(spaces[1].shape) if args.target_entropy is None else args.target_entropy

    def update_critic(batch):
        """One gradient step of encoder and critics, on transitions (T * B, ...) and contexts (T, N, W)."""
        mean, var = agent.belief(batch["context"])
        z = draw(mean, var).repeat_interleave(args.batch_size, dim=0)
        with torch.no_grad():
            next_action, log_prob, _ = agent.policy(batch["next_obs"], z)
            next_q_values = agent.target_critic(batch["next_obs"], next_action, z)
            next_value = soft_value(next_q_values, log_prob, agent.log_alpha.exp())
            td_target = batch["reward"] + args.gamma * (1 - batch["terminated"]) * next_value
        q_values = agent.critic(batch["obs"], batch["action"], z)
        loss = critic_loss(q_values, td_target)
        kl = kl_to_prior(mean, var).mean() if args.information_bottleneck else torch.zeros_like(loss)
        grad_norm = gradient_step(loss + args.kl_lambda * kl, critic_optimizer, args.max_grad_norm)
        return {
            "loss/critic": loss.detach(), "grad/critic_norm": grad_norm,
            "q/mean": q_values.detach().mean(), "q/target_mean": td_target.mean(),
            "latent/kl": kl.detach(), "latent/std": var.detach().sqrt().mean(),
        }  # fmt: skip

    def update_actor(batch):
        """One gradient step of the actor and one of the temperature; the targets follow."""
        with torch.no_grad():  # the encoder learns from the critics alone
            z = draw(*agent.belief(batch["context"])).repeat_interleave(args.batch_size, dim=0)
        action, log_prob, (mean, log_std, u) = agent.policy(batch["obs"], z)
        alpha = agent.log_alpha.detach().exp()
        loss = -soft_value(agent.critic(batch["obs"], action, z), log_prob, alpha).mean()
        for weight, x in ((args.mean_reg, mean), (args.log_std_reg, log_std), (args.pre_tanh_reg, u)):
            loss = loss + weight * x.square().mean()
        grad_norm = gradient_step(loss, actor_optimizer, args.max_grad_norm)
        entropy = -log_prob.detach().mean()
        if args.auto_alpha:
            gradient_step(alpha_loss(agent.log_alpha, entropy, target_entropy), alpha_optimizer, math.inf)
        polyak_update(agent.critic, agent.target_critic, args.tau)
        return {
            "loss/actor": loss.detach(), "grad/actor_norm": grad_norm,
            "policy/alpha": alpha, "policy/entropy": entropy,
        }  # fmt: skip

    learn_critic = CudaGraph(update_critic) if graph else update_critic
    learn_actor = CudaGraph(update_actor) if graph else update_actor
    run = Run(
        args, args.num_envs * round_steps, agent=agent, actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer, buffer=buffer,
    )  # fmt: skip
    if not args.auto_alpha:  # also where the resumed run had another one
        nn.init.constant_(agent.log_alpha, math.log(args.alpha))
    rewards, result = [], {}
    while True:
        # Pause: score, save, end, or go on with the next round
        if run.due(args.eval_every) and not run.signal:
            run.evaluate()
        if run.due(args.checkpoint_every * args.num_envs):
            run.checkpoint()
        if run.finished:
            return run.close(envs)
        if run.saved_at == run.env_steps:  # what follows depends on the checkpoint alone
            envs, obs, info = start_segment(args, run.env_steps, envs)
            rewards, result = [], {}
        if args.anneal_lr:
            for optimizer in (actor_optimizer, critic_optimizer, alpha_optimizer):
                group = optimizer.param_groups[0]
                group["lr"].fill_(group["initial_lr"] * (1 - run.env_steps / args.total_timesteps))

        # Collect a round of other tasks: z is of the prior, then of what the round has shown of each of them
        chosen = buffer.least_known(args.num_envs)
        set_tasks(envs, buffer.tasks[chosen])
        obs, info = envs.reset()
        run.episode_return[:] = run.episode_length[:] = 0  # those in progress were cut
        share = args.random_share if run.env_steps >= args.learning_starts else 1.0
        explores = np.random.random(args.num_envs) < share
        steps, z, begins = [], torch.zeros((), device=device), np.ones(args.num_envs, dtype=bool)
        for t in range(round_steps):
            # Act and step. z is held for an episode, but not beyond the steps of the prior
            begins |= t == args.steps_prior or args.hold_z > 0 and t % args.hold_z == 0
            if begins.any():
                seen = steps[:context_steps] if t >= args.steps_prior else []
                changes = to_tensor(begins, device)[:, None] > 0
                z = torch.where(changes, draw(*agent.belief_after(seen, args.num_envs)), z)
            if t % args.random_hold == 0:
                random_action = envs.action_space.sample()
            action = agent.act(obs, info | {"z": z}, greedy=False)
            action[explores] = random_action[explores]
            next_obs, reward, terminated, truncated, next_info = envs.step(action)
            begins = terminated | truncated
            run.count(reward, begins)
            rewards.append(reward)

            # Store
            step = dict(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated)
            steps.append(step)
            obs, info = reset_done(envs, next_obs, next_info, begins)
        buffer.add(chosen, steps, agent.context(steps[:context_steps]))

        # Update. The number of an update follows from the step, so a resumed run keeps the rhythm.
        if run.env_steps >= args.learning_starts:
            first = int(args.updates_per_step * (run.env_steps - run.chunk))
            for _ in range(first, int(args.updates_per_step * run.env_steps)):
                batch = buffer.sample(args.meta_batch_size, args.batch_size, args.embedding_batch_size)
                batch["reward"] *= args.reward_scale
                result |= learn_critic(batch)
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


class MLP(nn.Module):
    """Vectors (..., fan_in) to features (..., width)."""

    def __init__(self, fan_in, hidden_sizes, activation):
        super().__init__()
        sizes = [fan_in, *hidden_sizes]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(*size)) for size in pairwise(sizes))
        self.activation, self.width = getattr(F, activation), sizes[-1]

    def forward(self, x):
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


class Encoder(nn.Module):
    """What a transition (..., fan_in) of a context says of z: mean and variance, (..., latent_dim) each."""

    def __init__(self, fan_in, args):
        super().__init__()
        self.trunk = MLP(fan_in, args.encoder_sizes, args.activation)
        self.head = nn.Linear(self.trunk.width, 2 * args.latent_dim)

    def forward(self, context):
        mean, var = self.head(self.trunk(context)).chunk(2, dim=-1)
        return mean, F.softplus(var) + 1e-7


class Critic(nn.Module):
    """The values Q_i(s, a, z) of two critics, (2, B), for vectors (B, ...)."""

    def __init__(self, fan_in, args):
        super().__init__()
        sizes = [fan_in, *args.hidden_sizes, 1]
        self.layers = nn.ModuleList(StackedLinear(2, *size) for size in pairwise(sizes))
        self.activation = getattr(F, args.activation)

    def forward(self, obs, action, z):
        x = torch.cat([obs, action.flatten(1), z], dim=-1).expand(2, -1, -1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x).squeeze(-1)


class Actor(nn.Module):
    """Mean and log standard deviation before tanh, (B, A) each, of pi(. | s, z)."""

    def __init__(self, fan_in, outputs, args):
        super().__init__()
        self.trunk = MLP(fan_in, args.hidden_sizes, args.activation)
        self.head = orthogonal(nn.Linear(self.trunk.width, 2 * outputs), gain=0.01)

    def forward(self, obs, z):
        mean, log_std = self.head(self.trunk(torch.cat([obs, z], dim=-1))).chunk(2, dim=-1)
        return mean, log_std.clamp(-20, 2)


class Agent(nn.Module):
    """Encoder, actor and critics, the target critics and the temperature."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if not isinstance(action_space, Box) or not action_space.is_bounded():
            raise UsageError(f"{args.env_id} has {action_space} actions, PEARL needs a bounded Box")
        self.device, self.action_shape = device, action_space.shape
        self.latent_dim, self.bottleneck = args.latent_dim, args.information_bottleneck
        self.next_obs = args.next_obs_in_context
        obs, action = math.prod(obs_space.shape), math.prod(action_space.shape)
        self.encoder = Encoder(obs + action + 1 + obs * args.next_obs_in_context, args)
        self.actor = Actor(obs + args.latent_dim, action, args)
        self.critic = Critic(obs + action + args.latent_dim, args)
        self.target_critic = copy.deepcopy(self.critic)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.to(device)

    def belief(self, context, known=None):
        """Mean and variance of q(z | c), (T, Z), of contexts (T, N, W); known (T, N) tells which rows count.

        Without the information bottleneck z is the mean of the outputs, and has no variance.
        """
        mean, var = self.encoder(context)
        if not self.bottleneck:
            var = torch.ones_like(var)
        if known is not None:
            var = var.masked_fill(known[..., None] == 0, math.inf)
        mean, var = product_of_gaussians(mean, var)
        return mean, var if self.bottleneck else torch.zeros_like(var)

    def context(self, steps):
        """Contexts (num_envs, N, W) of N steps of all environments, each a dict of what happened."""
        names = ["obs", "action", "reward"] + ["next_obs"] * self.next_obs
        parts = (np.stack([step[name] for step in steps], axis=1) for name in names)
        parts = [x.reshape(*x.shape[:2], -1) for x in parts]
        return to_tensor(np.concatenate(parts, axis=-1, dtype=np.float32), self.device)

    @torch.no_grad()
    def belief_after(self, steps, n):
        """Mean and variance of q(z | c) in n environments after these steps; before the first the prior.

        step["known"] (n,) may tell in which of the environments a step counts.
        """
        prior = torch.zeros(n, self.latent_dim, device=self.device)
        if not steps:
            return prior, prior + self.bottleneck
        known = np.stack([step.get("known", np.ones(n)) for step in steps], axis=1)
        return self.belief(self.context(steps), to_tensor(known, self.device))

    def policy(self, obs, z):
        """Drawn actions (B, A), their log_prob (B,); to regularize, mean, log_std, draw before tanh."""
        mean, log_std = self.actor(obs, z)
        noise = torch.randn_like(mean)
        return *squashed_gaussian(mean, log_std, noise), (mean, log_std, mean + log_std.exp() * noise)

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs, *action_space.shape) in a vector environment: greedy ones, or drawn.

        z is info["z"] (num_envs, Z), or the mean of the belief after info["steps"], those of the task so far:
        a list of dict(obs=..., action=..., reward=..., next_obs=...) of all environments.
        """
        z = info["z"] if "z" in info else self.belief_after(info.get("steps", []), len(obs))[0]
        obs = to_tensor(obs, self.device)
        action = self.actor(obs, z)[0].tanh() if greedy else self.policy(obs, z)[0]
        return action.cpu().numpy().reshape(-1, *self.action_shape)


def draw(mean, var):
    """z of N(mean, var), so that gradients reach both."""
    return mean + var.sqrt() * torch.randn_like(mean)


# ---------------------------------------------------------------------------------------------------- tasks
POINTS = {  # families in the plane: starts and goals lie in squares from -x to x, the third is sparse
    "PointNavigation-v0": dict(start=0.0, goal=0.5),
    "PointRobot-v0": dict(start=1.0, goal=1.0),
    "SparsePointRobot-v0": dict(start=0.0, goal=1.0),  # its goals: on the half circle of radius 1
}
CHEETAHS = ("HalfCheetahDir-v0", "HalfCheetahVel-v0")


class PointTasks(gym.vector.VectorEnv):
    """Points that step at most 0.1 along each axis, each towards a goal that it does not see, its task.

    Reward: minus the distance to the goal; sparse: 1 - distance within 0.2 of it, else 0.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED, "render_fps": 10}

    def __init__(self, args, tasks, render_mode=None):
        self.task, self.num_envs, self.horizon = tasks, len(tasks), args.horizon
        self.render_mode, self.envs = render_mode, [self]  # a film asks the first one
        self.start, self.sparse = POINTS[args.env_id]["start"], args.env_id.startswith("Sparse")
        self.single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = Box(-1, 1, (2,), np.float32)
        spaces = self.single_observation_space, self.single_action_space
        self.observation_space, self.action_space = (batch_space(space, self.num_envs) for space in spaces)
        self.position, self.t = np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, int)

    def set_attr(self, name, values):
        setattr(self, name, np.stack(values))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        again = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.position[again] = self.np_random.uniform(-self.start, self.start, (again.sum(), 2))
        self.t[again] = 0
        if again[0]:
            self.path = [self.position[0].copy()]
        return self.position.copy(), {}

    def step(self, actions):
        self.position += 0.1 * np.clip(actions, -1, 1)
        self.t += 1
        self.path.append(self.position[0].copy())
        distance = np.linalg.norm(self.position - self.task, axis=1)
        reward = np.where(distance <= 0.2, 1 - distance, 0.0) if self.sparse else -distance
        return self.position.copy(), reward, np.zeros(self.num_envs, bool), self.t >= self.horizon, {}

    def render(self):
        """The path of the first point in black, its goal in red, on [-1.5, 1.5]^2."""
        frame, pixel = np.full((300, 300, 3), 255, np.uint8), lambda x: np.int32([150, 150] + x * [100, -100])
        cv2.circle(frame, pixel(self.task[0]).tolist(), 5, (255, 0, 0), -1)
        return cv2.polylines(frame, [pixel(np.stack(self.path))], False, (0, 0, 0), 2)


class CheetahTask(gym.Wrapper):
    """A HalfCheetah paid for running in a direction, or at a velocity; its task is 1 or -1, or in [0, 3]."""

    def __init__(self, env, by_direction):
        super().__init__(env)
        self.by_direction, self.task = by_direction, 1.0

    def set_task(self, task):
        self.task = float(task[0])

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        velocity = info["x_velocity"]
        reward = self.task * velocity if self.by_direction else -abs(velocity - self.task)
        return obs, reward + info["reward_ctrl"], terminated, truncated, {}


class TaskSetter(gym.Wrapper):
    """Lets a vector set the task of each of its environments, as the attribute task."""

    task = property(lambda self: None, lambda self, task: self.get_wrapper_attr("set_task")(task))


def make_task_env(args, **kwargs) -> gym.Env:
    """An environment of a family that is no point: a HalfCheetah, or of the user."""
    if "" not in sys.path:
        sys.path.append("")  # module:Env-v0 finds a module in the folder of the user
    cheetah = args.env_id in CHEETAHS
    try:
        env_id = "HalfCheetah-v5" if cheetah else args.env_id
        env = gym.make(env_id, max_episode_steps=args.horizon, **{**args.env_kwargs, **kwargs})
    except (gym.error.Error, ImportError, TypeError) as error:
        if isinstance(error, TypeError) and "argument" not in str(error):
            raise  # a bug of the environment keeps its traceback
        raise UsageError(f"cannot make {args.env_id}: {error}") from error
    if cheetah:
        env = CheetahTask(env, args.env_id == CHEETAHS[0])
    elif not (env.has_wrapper_attr("sample_task") and env.has_wrapper_attr("set_task")):
        families = ", ".join((*POINTS, *CHEETAHS))
        text = f"is no family of tasks: it has no sample_task(rng) and set_task(task). There are {families}"
        raise UsageError(f"{args.env_id} {text}")
    if len(env.observation_space.shape or ()) == 3:
        raise UsageError(f"{args.env_id} shows images, a family of tasks needs vectors")
    return TaskSetter(standardize(env))


def sample_tasks(args, n: int, rng: np.random.Generator) -> np.ndarray:
    """n tasks (n, task_dim) of the family args.env_id, float32."""
    if args.env_id == "SparsePointRobot-v0":
        angle = rng.uniform(0, math.pi, n)
        return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    if args.env_id in POINTS:
        side = POINTS[args.env_id]["goal"]
        return rng.uniform(-side, side, (n, 2)).astype(np.float32)
    if args.env_id == "HalfCheetahDir-v0":  # as many forwards as backwards
        return rng.permutation(np.resize([-1, 1], (n, 1))).astype(np.float32)
    if args.env_id == "HalfCheetahVel-v0":
        return rng.uniform(0, 3, (n, 1)).astype(np.float32)
    with contextlib.closing(make_task_env(args)) as env:
        sample_task = env.get_wrapper_attr("sample_task")
        return np.stack([np.float32(sample_task(rng)).reshape(-1) for _ in range(n)])


def set_tasks(envs: gym.vector.VectorEnv, tasks: np.ndarray) -> None:
    """Gives each task an equal share of the environments, in their order, from the next reset on."""
    envs.set_attr("task", [*np.repeat(tasks, envs.num_envs // len(tasks), axis=0)])


def make_task_envs(args, tasks: np.ndarray, episodes: int = 1, **kwargs) -> gym.vector.VectorEnv:
    """len(tasks) * episodes environments with standard spaces: task i has rows i * episodes and following.

    Episodes end explicitly: reset_done follows every step.
    """
    rows, training = np.repeat(tasks, episodes, axis=0), os.getpid()

    def make_env():
        if os.getpid() != training:  # in a process of its own: the training decides when to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return make_task_env(args, **kwargs)

    if args.env_id in POINTS:
        if args.env_kwargs:
            raise UsageError(f"{args.env_id} has no --env-kwargs")
        return PointTasks(args, rows, **kwargs)
    vector = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
    envs = vector([make_env] * len(rows), autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    set_tasks(envs, rows)
    return envs


def make_envs(args, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """num_envs environments, each with a task of its own."""
    return make_task_envs(args, sample_tasks(args, num_envs, np.random.default_rng(args.seed)), **kwargs)


# ------------------------------------------------------------------------------------------- replay memory
class TaskBuffer:
    """The training tasks; for each its last transitions, in a ring, and the context of its last round."""

    def __init__(self, args, tasks, obs_space, action_space, context_steps, round_steps, device):
        self.tasks, self.device = tasks, device
        self.size = max(args.buffer_size // len(tasks), round_steps)  # rows of a task
        self.added = np.zeros(len(tasks), dtype=np.int64)  # steps of each task so far
        host, number = torch.device("cpu"), torch.zeros(())
        obs, action = (to_tensor(np.zeros(x.shape, x.dtype), host) for x in (obs_space, action_space))
        rows = dict(obs=obs, action=action, reward=number, next_obs=obs, terminated=number)
        count = len(tasks) * self.size
        needed, free = count * sum(x.nbytes for x in rows.values()), free_memory(device)
        text = f"{count} transitions takes {needed / 1e9:.2f} of {free / 1e9:.2f} GB free on {device}"
        if needed > free:
            raise UsageError(f"a replay buffer of {text}: use a smaller --buffer-size")
        print(f"a replay buffer of {text}")
        self.data = {name: x.new_zeros(count, *x.shape, device=device) for name, x in rows.items()}
        width = obs.numel() * (1 + args.next_obs_in_context) + action.numel() + 1
        self.context = torch.zeros(len(tasks), context_steps, width, device=device)

    def least_known(self, n: int) -> np.ndarray:
        """n tasks with the fewest steps so far; chance decides between equals."""
        return np.lexsort((np.random.random(len(self.tasks)), self.added))[:n]

    def add(self, tasks, steps, context) -> None:
        """A round: steps of all tasks side by side. Their context becomes that of the round."""
        row = tasks[None] * self.size + (self.added[tasks] + np.arange(len(steps))[:, None]) % self.size
        row = to_tensor(row, self.device)
        for name, x in self.data.items():
            x[row] = to_tensor(np.stack([step[name] for step in steps]), self.device).to(x.dtype)
        self.context[to_tensor(tasks, self.device)] = context
        self.added[tasks] += len(steps)

    def sample(self, num_tasks, batch_size, embedding_batch_size) -> dict[str, torch.Tensor]:
        """Transitions (T * B, ...) of T tasks, B of each side by side, and contexts (T, N, W) of them."""
        seen = self.added.nonzero()[0]
        tasks = np.random.choice(seen, num_tasks, replace=len(seen) < num_tasks)
        filled = to_tensor(self.added[tasks].clip(max=self.size), self.device)
        tasks = to_tensor(tasks, self.device)
        draw = torch.rand(num_tasks, batch_size, dtype=torch.float64, device=self.device)
        row = (tasks[:, None] * self.size + (draw * filled[:, None]).long()).flatten()
        batch = {name: x.index_select(0, row) for name, x in self.data.items()}
        shape = num_tasks, embedding_batch_size
        at = torch.randint(self.context.shape[1], shape, device=self.device)
        return batch | dict(context=self.context[tasks[:, None], at])

    def state_dict(self) -> dict:
        """The rows in use. A tensor would be saved with all of its storage, so each is cut in NumPy."""
        n, longest = len(self.tasks), min(self.added.max(), self.size)
        rows = {name: x.view(n, self.size, *x.shape[1:])[:, :longest] for name, x in self.data.items()}
        rows = {name: x.cpu().numpy() for name, x in (rows | dict(context=self.context)).items()}
        rows |= dict(tasks=self.tasks, added=self.added)
        return {name: torch.from_numpy(x.copy()) for name, x in rows.items()} | dict(size=self.size)

    def load_state_dict(self, state: dict) -> None:
        if state["size"] != self.size or state["context"].shape != self.context.shape:
            raise ValueError(
                "its buffer has another shape: keep --buffer-size and the numbers of tasks and steps"
            )
        self.tasks, self.added = state["tasks"].numpy().copy(), state["added"].numpy().copy()
        self.context.copy_(state["context"])
        for name, x in self.data.items():
            rows = x.view(len(self.tasks), self.size, *x.shape[1:])
            rows[:, : state[name].shape[1]] = state[name]


# Points: own trials. HalfCheetah: tasks, horizon and embedding batch (of Vel) of the authors' code
# (katerakelly/oyster), but twice its cost of control, smaller networks, batches and rounds, and larger steps
POINT = dict(horizon=20, num_envs=80, num_train_tasks=400, num_test_tasks=40, eval_episodes=40,
             total_timesteps=240_000, learning_starts=24_000, random_hold=20, steps_prior=20,
             steps_posterior=20, extra_steps_posterior=20, batch_size=32, embedding_batch_size=40,
             updates_per_step=0.06, learning_rate=1e-3, gamma=0.9, tau=0.01, reward_scale=20.0,
             hold_z=10, eval_every=24_000, log_every=12_000, checkpoint_every=1_000)  # fmt: skip
CHEETAH = dict(total_timesteps=1_000_000, num_train_tasks=100, num_test_tasks=30, reward_scale=5.0,
               steps_prior=200, extra_steps_posterior=200, embedding_batch_size=100, batch_size=64,
               updates_per_step=0.1, learning_rate=1e-3, learning_starts=20_000, hidden_sizes=(256, 256),
               eval_every=20_000, eval_episodes=30, checkpoint_every=10_000)  # fmt: skip
TUNED = {
    "PointRobot-v0": POINT | dict(hidden_sizes=(128, 128), encoder_sizes=(128, 128, 128), latent_dim=10),
    "SparsePointRobot-v0": POINT | dict(hidden_sizes=(64, 64), encoder_sizes=(128, 128),
                                        total_timesteps=400_000, learning_starts=72_000, random_share=0.25),
    "HalfCheetahVel-v0": CHEETAH,
    "HalfCheetahDir-v0": CHEETAH | dict(num_envs=2, num_train_tasks=2, num_test_tasks=2, meta_batch_size=4,
                                        eval_episodes=20),
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
    """Adapts in eval_episodes environments, of the test tasks in turn, and scores the episode after that.

    Returns the return of each and the means of what is measured; the first one becomes the film. Training is
    untouched: own environments, own random numbers.
    """
    n, count = args.eval_episodes, args.adaptation_episodes + 1
    steps, returns = [], []  # of the task so far; of its episodes
    states = random.getstate(), np.random.get_state()
    agent.eval()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        set_seed(args.eval_seed)
        tasks = sample_tasks(args, args.num_test_tasks, np.random.default_rng(args.eval_seed))
        render = {"render_mode": "rgb_array"} if film else {}
        envs = make_task_envs(replace(args, async_envs=False), tasks[np.arange(n) % len(tasks)], **render)
        envs.reset(seed=args.eval_seed)
        for _ in range(count):
            totals = np.zeros((5, n))  # return, discounted return, length, terminations, successes
            playing, t = np.ones(n, dtype=bool), 0
            obs, info = envs.reset(options={"reset_mask": playing.copy()})
            while playing.any() and t < args.eval_max_steps and not stopped():
                if t == 0 or args.hold_z > 0 and t % args.hold_z == 0:
                    z = draw(*agent.belief_after(steps, n))
                action = agent.act(obs, info | {"z": z}, greedy=not args.sample_actions)
                next_obs, reward, terminated, truncated, next_info = envs.step(action)
                step = dict(obs=obs, action=action, reward=reward, next_obs=next_obs, known=playing.copy())
                steps.append(step)
                if film and playing[0]:
                    frame = envs.envs[0].render()
                    if not isinstance(frame, np.ndarray):
                        what = f"its render() gives {frame}, no image"
                        raise UsageError(f"{args.env_id} cannot be filmed: {what}")
                    if len(steps) == 1:  # VP9: browsers play it
                        codec, fps = cv2.VideoWriter_fourcc(*"vp09"), envs.metadata.get("render_fps") or 15
                        writer = cv2.VideoWriter(str(film), codec, fps, frame.shape[1::-1])
                    writer.write(np.ascontiguousarray(frame[..., ::-1]))  # blue first, as OpenCV wants it
                success = next_info.get("is_success", next_info.get("success", np.zeros(n)))
                totals += playing * [reward, args.gamma**t * reward, np.ones(n), terminated, success]
                playing &= ~(terminated | truncated)
                obs, info = reset_done(envs, next_obs, next_info, terminated | truncated)
                t += 1
            returns.append(totals[0])
        envs.close()
    agent.train()
    random.setstate(states[0])
    np.random.set_state(states[1])
    metrics = {f"eval/return_{name}": getattr(totals[0], name)() for name in ("mean", "std", "min", "max")}
    names = "discounted_return_mean", "length_mean", "termination_rate", "success_rate"
    means = totals[1].mean(), totals[2].mean(), totals[3].mean(), (totals[4] > 0).mean()
    metrics |= {f"eval/{name}": mean for name, mean in zip(names, means, strict=True)}
    return totals[0], metrics | {f"eval/return_after_{k}": x.mean() for k, x in enumerate(returns)}


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
