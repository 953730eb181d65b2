"""Model-Agnostic Meta-Learning (Finn, Abbeel, Levine 2017, arXiv 1703.03400): learn parameters from which a
policy-gradient step on a few episodes of a new task makes a good policy for that task.

    inner step  theta'_i = theta - inner_lr grad L_i(theta)      on episodes of task i by pi_theta    (alg. 3)
    inner loss  L_i(theta) = -E[log pi_theta(a_t | s_t) A_t]                    its gradient is that of eq. 4
    outer step  theta <- theta - outer_lr grad_theta sum_i L_i(theta'_i)      on new episodes by pi_theta'_i,
                through the inner steps (eq. 1). vpg: this; ppo: with PPO's clipped ratio; trpo: as far as
                the KL divergence between the adapted policies, old and new, allows, as in the paper
    advantage   A_t = R_t - V_i(s_t, t), V_i linear in s, s^2, t, t^2, t^3, fitted to each batch of a task

Differences from the paper:
 1. Advantages are normalized within a task, and gradients are means over steps, not sums.
 2. trpo: products with the Hessian of the KL divergence are exact, by double backward.
 3. ppo after its first epoch and trpo in its line search know the inner step of the present theta on episodes
    of the old one: its loss has their log-probabilities under the present theta, without a ratio.
 4. PointNavigation-v0 goes on at its goal until the horizon; velocities of HalfCheetahVel-v0 reach to 3.
 5. The horizon ends the return, for the baseline knows the time. Each environment plays one episode for each
    policy; what is over early steps on, unseen, but counted, until all are over.
 6. Box actions are Gaussian with one standard deviation per dimension, on [-1, 1] stretched to the bounds of
    the space; they are clipped only on their way into the environment. There are no other actions.
 7. An evaluation scores a greedy episode on each of its held-out tasks, after one inner step.

    python algos/maml.py --env-id PointNavigation-v0
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[mujoco]>=1.4", "numpy", "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, errno, inspect, json, math, os, platform, random, shutil, signal, subprocess, sys, time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from gymnasium.vector.utils import batch_space
from torch.func import functional_call
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
    checkpoint_every: int = 4_000  # steps of each environment between checkpoints; 0: only at the end
    eval_every: int = 800_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 40  # held-out tasks of one evaluation
    eval_inner_steps: Count = 3  # inner steps on each of them; it is scored before and after each
    eval_seed: int = 10_000_000  # seed of all evaluations and their tasks
    sample_actions: bool = False  # evaluations draw the actions that they score, too
    capture_video: bool = False  # film a task of each evaluation, before and after one step
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # tasks
    env_id: str = "PointNavigation-v0"  # family of tasks: see the section of them; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    horizon: Count = 100  # steps of an episode at most
    meta_batch_size: Count = 20  # tasks of one outer step
    episodes_per_task: Count = 20  # episodes of each task before each inner step and after the last one
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 8_000_000  # environment steps, rounded up to whole outer steps
    inner_steps: Annotated[int, (0, math.inf)] = 1  # 0: one policy for all tasks, nothing is adapted
    inner_lr: Rate = 0.1  # alpha of the paper, size of an inner step
    first_order: bool = False  # the outer gradient takes those of the inner steps for constants
    outer: Literal["vpg", "ppo", "trpo"] = "trpo"  # how theta learns
    outer_lr: Rate = 1e-2  # vpg, ppo: step size of Adam
    outer_epochs: Count = 5  # ppo: gradient steps on each batch of tasks
    clip_coef: Rate = 0.3  # ppo: the ratio is clipped to 1 +- this
    max_kl: Rate = 0.01  # trpo: limit of the KL divergence of one step
    cg_iterations: Count = 10  # trpo: steps of conjugate gradient
    cg_tolerance: Rate = 1e-10  # trpo: squared residual at which conjugate gradient ends
    hvp_damping: Rate = 1e-5  # trpo: multiple of the identity added to the Hessian
    backtrack_ratio: Share = 0.8  # trpo: by which the step shrinks
    max_backtracks: Count = 15  # trpo: sizes that are tried before it is given up
    gamma: Share = 0.99  # discount
    hidden_sizes: tuple[Count, ...] = (64, 64)  # widths of the hidden layers
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the hidden layers
    log_std_init: float = 0.0  # log standard deviation of Box actions at first

    @property
    def num_envs(self) -> int:
        return self.meta_batch_size * self.episodes_per_task


# -------------------------------------------------------------------------------------------- learning rule
def compute_returns(reward, done, gamma):
    """Discounted sum of the rewards from each step to the end of its episode; all (num_steps, num_envs)."""
    return_ = reward.clone()
    for t in reversed(range(len(return_) - 1)):
        return_[t] += gamma * (1 - done[t]) * return_[t + 1]
    return return_


def fit_baseline(obs, t, return_, playing):
    """V (tasks, B): least squares on the returns of the steps that count, of each task (Duan et al. 2016,
    arXiv 1604.06778: the linear feature baseline). obs is (tasks, B, D), all other (tasks, B)."""
    x, t = obs.double().clamp(-10, 10), t.double()[..., None] / 100
    x = torch.cat([x, x.square(), t, t**2, t**3, torch.ones_like(t)], dim=-1)
    counted = x.mT * playing[:, None]
    ridge = 1e-5 * torch.eye(x.shape[-1], dtype=x.dtype)
    weights = torch.linalg.solve(counted @ x + ridge, counted @ return_.double()[..., None])
    return (x @ weights).squeeze(-1).float()


def inner_step(loss, params, inner_lr, first_order):
    """theta' = theta - inner_lr * gradient of the loss (alg. 3). The loss (tasks,) of each task moves its row
    of params, name to (tasks, *shape). In first order the gradient is a constant."""
    gradients = torch.autograd.grad(loss.sum(), [*params.values()], create_graph=not first_order)
    return {name: p - inner_lr * g for (name, p), g in zip(params.items(), gradients, strict=True)}


def adapt(agent, tasks, rollouts, args, first_order=True):
    """Parameters of each task after an inner step on each of its rollouts, in the graph of those of agent.

    The loss of a step is minus the mean of A_t log pi(a_t | s_t), pi with the parameters of the step before.
    """
    params = {name: p.expand(tasks, *p.shape) for name, p in agent.named_parameters()}
    for k, rollout in enumerate(rollouts):
        log_prob, _ = agent.log_prob(params, rollout)
        loss = -(rollout["weight"] * rollout["advantage"] * log_prob).sum(dim=1)
        inner_lr = args.inner_lr if k < max(args.inner_steps, 1) else args.inner_lr / 2  # was not trained for
        params = inner_step(loss, params, inner_lr, first_order)
    return params


def outer_objective(args, log_prob, old_log_prob, advantage, weight):
    """What the outer step maximizes, mean over tasks. Inputs are (tasks, B), a row of weight sums to 1."""
    ratio = (log_prob - old_log_prob).exp()
    objective = advantage * (log_prob if args.outer == "vpg" else ratio)
    if args.outer == "ppo":
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        objective = torch.minimum(objective, advantage * clipped)
    return (weight * objective).sum(dim=1).mean()


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, *_ = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    theta = list(agent.parameters())
    optimizer = Adam([(theta, args.outer_lr)], device)  # trpo takes its steps without it

    def update(rollouts):
        """The outer step: on the last rollout, through the inner steps on those before it."""
        *before, last = rollouts
        params = adapt(agent, args.meta_batch_size, before, args)
        old_log_prob, old_pi = (x.detach() for x in agent.log_prob(params, last))

        @torch.enable_grad()
        def measure():
            """What is maximized and what is limited, as functions of theta."""
            params = adapt(agent, args.meta_batch_size, before, args, args.first_order)
            log_prob, pi = agent.log_prob(params, last)
            objective = outer_objective(args, log_prob, old_log_prob, last["advantage"], last["weight"])
            return objective, mean_kl(old_pi, pi)

        metrics = {"policy/entropy": agent.head.entropy(old_pi).mean()}
        if args.outer == "trpo":
            return metrics | trust_region_step(theta, measure, args)
        for _ in range(args.outer_epochs if args.outer == "ppo" else 1):
            objective, _ = measure()
            optimizer.zero_grad()
            (-objective).backward()
            optimizer.step()
        gradient, kl = flatten(x.grad for x in theta), measure()[1]
        return metrics | {
            "loss/policy": -objective.detach(), "policy/kl": kl.detach(), "grad/actor_norm": gradient.norm()
        }  # fmt: skip

    run = Run(args, args.num_envs, agent=agent, optimizer=optimizer)
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
            envs, *_ = start_segment(args, run.env_steps, envs)

        # New tasks; on each of them episodes by theta, then after each inner step by what was adapted
        tasks = sample_tasks(args, args.meta_batch_size, np.random.default_rng([args.seed, run.env_steps]))
        set_tasks(envs, tasks)
        rollouts, run.chunk = [], 0
        for _ in range(args.inner_steps + 1):
            params = adapt(agent, len(tasks), rollouts, args)
            steps = play_episodes(envs, partial(agent.act, greedy=False, params=params))
            run.episode_return[:] = run.episode_length[:] = 0
            for step in steps:
                run.count(step["reward"], step["done"])
            run.chunk += len(steps) * args.num_envs
            rollouts.append(make_rollout(steps, len(tasks), args, device))

        # Update
        metrics = update(rollouts)

        # Log
        returns = [float(rollout["reward"].sum()) / args.num_envs for rollout in rollouts]
        run.log(metrics | {
            "adaptation/return_before": returns[0], "adaptation/return_after": returns[-1],
            "reward/mean": rollouts[-1]["reward"].mean(), "reward/max": rollouts[-1]["reward"].max(),
            "value/explained_variance": rollouts[-1]["explained_variance"],
            "schedule/learning_rate": args.inner_lr,
        })  # fmt: skip


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


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
    """Policy of observations (B, obs_dim), with its own parameters or with those of each task."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if not isinstance(action_space, Box):
            raise UsageError(f"{args.env_id} has {action_space} actions: maml.py takes a Box")
        self.device, self.action_shape = device, action_space.shape
        sizes = [*obs_space.shape, *args.hidden_sizes]
        self.layers = nn.ModuleList(orthogonal(nn.Linear(*size)) for size in pairwise(sizes))
        self.activation = getattr(F, args.activation)
        self.head = GaussianHead(sizes[-1], action_space, args.log_std_init)
        self.to(device)

    def forward(self, obs):
        """pi(. | s) as its head describes it."""
        for layer in self.layers:
            obs = self.activation(layer(obs))
        return self.head(obs)

    def policies(self, params, obs):
        """pi of the steps (tasks, B, obs_dim) of each task by its parameters, one after the other: the same
        forward, with params, name to (tasks, *shape), in the place of those of the module."""
        policy = torch.vmap(lambda params, obs: functional_call(self, params, (obs,)))
        return policy(params, obs).flatten(0, 1)

    def log_prob(self, params, rollout):
        """Log-probabilities (tasks, B) of the actions of a rollout, and pi."""
        pi = self.policies(params, rollout["obs"])
        return self.head.log_prob(pi, rollout["action"]).view(rollout["obs"].shape[:2]), pi

    @torch.inference_mode()
    def act(self, obs, info, greedy=True, params=None):
        """Actions (num_envs, *action_space.shape) in a vector environment: the likeliest ones, or drawn. With
        params each task of it has its own, else all have those of the module."""
        obs = to_tensor(obs, self.device)
        if params is None:
            pi = self(obs)
        else:
            tasks = len(params["head.log_std"])
            pi = self.policies(params, obs.unflatten(0, (tasks, -1)))
        return self.head.choose(pi, greedy).cpu().numpy().reshape(-1, *self.action_shape)


# -------------------------------------------------------------------------------------------- trust region
def trust_region_step(parameters, measure, args):
    """A step of TRPO (Schulman et al. 2015, arXiv 1502.05477); measure() gives the objective and the KL."""
    objective, kl = measure()
    gradient = flatten(torch.autograd.grad(objective, parameters, retain_graph=True))
    product = hessian_product(kl, parameters, args.hvp_damping)
    direction = conjugate_gradient(product, gradient, args.cg_iterations, args.cg_tolerance)
    length = (2 * args.max_kl / (direction @ product(direction)).clamp(min=1e-30)).sqrt()
    step, objective = length * direction, objective.detach()  # without a gradient it is 0, and refused
    search = args.max_kl, args.backtrack_ratio, args.max_backtracks
    share, new_objective, new_kl = line_search(parameters, step, measure, objective, *search)
    return {
        "loss/policy": -objective, "policy/kl": new_kl.detach(), "policy/step_share": share,
        "policy/accepted": float(share > 0), "policy/improvement": (new_objective - objective).detach(),
        "grad/actor_norm": gradient.norm(),
    }  # fmt: skip


def mean_kl(old_pi, pi):
    """Mean over states of KL(old || new), exact."""
    if pi.dim() == 3:  # log-probabilities (B, K, N)
        return (old_pi.exp() * (old_pi - pi)).sum((-2, -1)).mean()
    (old_mean, old_log_std), (mean, log_std) = old_pi.chunk(2, dim=-1), pi.chunk(2, dim=-1)
    shift, spread = (old_mean - mean) * (-log_std).exp(), 2 * (old_log_std - log_std)
    return 0.5 * (shift.square() + spread.exp() - 1 - spread).sum(-1).mean()


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
    start, share = [parameter.clone() for parameter in parameters], 1.0
    steps = step.split([parameter.numel() for parameter in parameters])
    for _ in range(max_backtracks):
        for parameter, old, change in zip(parameters, start, steps, strict=True):
            parameter.copy_(old + share * change.view_as(old))
        new_objective, kl = measure()
        if kl <= max_kl and new_objective > objective:
            return share, new_objective, kl
        share *= backtrack_ratio
    torch._foreach_copy_(parameters, start)
    return 0.0, objective, torch.zeros_like(objective)


# ------------------------------------------------------------------------------------------------- episodes
def play_episodes(envs, act, watch=lambda playing: None, stopped=lambda: False):
    """Steps (num_envs, ...) of an episode in each environment; those that are over go on, unseen."""
    obs, info = envs.reset()
    steps, playing = [], np.ones(envs.num_envs, dtype=bool)
    while playing.any() and not stopped():
        action = act(obs, info)
        next_obs, reward, terminated, truncated, next_info = envs.step(action)
        done = terminated | truncated
        success = next_info.get("is_success", next_info.get("success", np.zeros_like(reward)))
        steps.append(dict(
            obs=obs, action=action, reward=np.float32(reward), done=done, playing=playing,
            terminated=terminated, success=np.float32(success),
        ))  # fmt: skip
        watch(playing)
        playing = playing & ~done
        obs, info = reset_done(envs, next_obs, next_info, done)
    return steps


def make_rollout(steps, tasks, args, device):
    """Steps of play_episodes as tensors (tasks, B, ...) with their advantages, and what is logged of them."""
    rollout = stack_steps(steps)  # tensors (T, num_envs, ...)
    rollout["return_"] = compute_returns(rollout["reward"], rollout["done"], args.gamma)
    rollout["t"] = torch.arange(len(steps)).unsqueeze(1).expand_as(rollout["done"])
    rollout = {name: x.unflatten(1, (tasks, -1)).transpose(0, 1).flatten(1, 2) for name, x in rollout.items()}
    obs, action, return_, t, playing = (rollout[x] for x in ("obs", "action", "return_", "t", "playing"))
    advantage = return_ - fit_baseline(obs, t, return_, playing)
    counted, weight = playing > 0, playing / playing.sum(dim=1, keepdim=True)
    about = {
        "reward": rollout["reward"][counted],
        "explained_variance": 1 - advantage[counted].var() / return_[counted].var().clamp(min=1e-8),
    }  # fmt: skip
    # their mean is 0 already, for the baseline has a constant
    advantage /= (weight * advantage.square()).sum(dim=1, keepdim=True).sqrt() + 1e-8
    batch = dict(obs=obs, action=action.flatten(0, 1), advantage=advantage, weight=weight)
    return {name: to_tensor(x, device) for name, x in batch.items()} | about


def evaluate(args, agent, film: Path | None = None, stopped=lambda: False) -> tuple[np.ndarray, dict]:
    """Meta-test: scores eval_episodes held-out tasks before and after each of eval_inner_steps inner steps.

    Each time there is one episode for the score, the greedy one unless actions are sampled, and beside it the
    episodes_per_task of which the step learns. Returns the return of each task after one step, the means of
    what is measured there, and the mean return after each number of steps; the first task becomes the film,
    before and after one step. Training is untouched: own environments, own random numbers.
    """
    n, envs_of_each = args.eval_episodes, args.episodes_per_task + 1
    scored = np.arange(n * envs_of_each) % envs_of_each == 0
    states = random.getstate(), np.random.get_state()
    totals = np.zeros((args.eval_inner_steps + 1, 5, n))  # return, discounted, length, termination, success
    agent.eval()

    def film_frame(playing):
        if film and playing[0] and len(rollouts) < 2:
            writer.write(np.ascontiguousarray(envs.envs[0].render()[..., ::-1]))  # blue first, for OpenCV

    with torch.random.fork_rng(range(torch.cuda.device_count())):
        set_seed(args.eval_seed)
        tasks = sample_tasks(args, n, np.random.default_rng(args.eval_seed))
        render = {"render_mode": "rgb_array"} if film else {}
        envs = make_task_envs(replace(args, async_envs=False), tasks, envs_of_each, **render)
        envs.reset(seed=args.eval_seed)
        if film:
            frame = envs.envs[0].render()
            if not isinstance(frame, np.ndarray):
                raise UsageError(f"{args.env_id} cannot be filmed: its render() gives {frame}, no image")
            codec, fps = cv2.VideoWriter_fourcc(*"vp09"), envs.metadata.get("render_fps") or 15
            writer = cv2.VideoWriter(str(film), codec, fps, frame.shape[1::-1])  # VP9: browsers play it
        rollouts = []
        for total in totals:
            params = adapt(agent, n, rollouts, args)

            def act(obs, info, params=params):
                drawn, best = (agent.act(obs, info, x, params) for x in (False, not args.sample_actions))
                return np.where(scored.reshape(-1, *[1] * (drawn.ndim - 1)), best, drawn)

            steps = play_episodes(envs, act, film_frame, stopped)
            if stopped():
                break
            for t, step in enumerate(steps):
                reward, playing = step["reward"][scored], step["playing"][scored]
                ends, success = step["terminated"][scored], step["success"][scored]
                total += playing * [reward, args.gamma**t * reward, np.ones(n), ends, success]
            drawn = [{name: x[~scored] for name, x in step.items()} for step in steps]
            rollouts.append(make_rollout(drawn, n, args, agent.device))
        envs.close()
    agent.train()
    random.setstate(states[0])
    np.random.set_state(states[1])
    score = totals[min(args.inner_steps, 1)]  # a policy that was not trained to adapt is scored as it is
    metrics = {f"eval/return_{name}": getattr(score[0], name)() for name in ("mean", "std", "min", "max")}
    names = "discounted_return_mean", "length_mean", "termination_rate", "success_rate"
    means = *score[1:4].mean(axis=1), (score[4] > 0).mean()
    metrics |= {f"eval/{name}": mean for name, mean in zip(names, means, strict=True)}
    return score[0], metrics | {f"eval/return_after_{k}": x[0].mean() for k, x in enumerate(totals)}


def load_adapted(path: str | Path, tasks: np.ndarray):
    """policy(obs, info) -> actions for environments of make_task_envs(args, tasks), adapted to each task:
    plays episodes_per_task episodes of it and learns from them, inner_steps times, as in training."""
    args, agent = Args(**load(path)["args"]), load_policy(path).__self__
    envs, rollouts = make_task_envs(args, tasks, args.episodes_per_task), []
    envs.reset(seed=args.eval_seed)
    learn = lambda: adapt(agent, len(tasks), rollouts, args)
    for _ in range(max(args.inner_steps, 1)):
        steps = play_episodes(envs, partial(agent.act, greedy=False, params=learn()))
        rollouts.append(make_rollout(steps, len(tasks), args, agent.device))
    envs.close()
    return partial(agent.act, params=learn())


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


# Tasks, episodes, horizon, networks, inner_lr, max_kl and the first standard deviation as in T. Deleu's
# pytorch-maml-rl, but for the cheetahs 20 x 10 episodes, not 40 x 20, velocities to 3, not 2, and twice the
# cost of control. All else are own trials.
TUNED = {
    "PointNavigation-v0": dict(total_timesteps=800_000, eval_every=400_000),
    "PointRobot-v0": dict(horizon=20), "SparsePointRobot-v0": dict(horizon=20),
    "HalfCheetahDir-v0": dict(total_timesteps=4_000_000, eval_every=400_000, episodes_per_task=10,
                              eval_episodes=10),
    "HalfCheetahVel-v0": dict(total_timesteps=4_000_000, eval_every=400_000, episodes_per_task=10,
                              eval_episodes=10),
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
