"""Evolution Strategies (Salimans et al. 2017, arXiv 1703.03864): play with many noisy copies of the
parameters, and move the parameters towards the noise of the copies that scored best.

    members    theta_i = theta + sigma eps_i, eps_i ~ N(0, I), i = 1 ... n             (Algorithm 1, line 3)
    fitness    F_i = return of whole episodes played with theta_i                      (Algorithm 1, line 4)
    update     theta = theta + alpha / (n sigma) sum_i F_i eps_i                       (Algorithm 1, line 5)

As in the paper: mirrored sampling (eps and -eps in pairs), ranks in place of F_i, weight decay, and processes
that know each other's noise from shared seeds and send nothing but what their episodes gave (Algorithm 2).

Differences from the paper:
 1. Noise is drawn anew in each generation, not taken from a large block drawn once. No episode is cut short.
 2. All members of a generation start from the same states, so luck does not decide between them.
 3. Members of equal fitness have equal rank, so that they cancel. Adam takes the step; --optimizer sgd takes
    it as in line 5.
 4. Policies are deterministic MLPs: argmax over choices, or the output itself for Box actions, on [-1, 1]
    stretched to the bounds of the space. There is no virtual batch normalization, and there are no images.
 5. A generation is whole episodes: training ends with the first one that reaches total_timesteps.

    python algos/es.py --env-id CartPole-v1
    torchrun --nproc-per-node 2 algos/es.py --env-id CartPole-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import atexit, contextlib, csv, importlib.util, io, json, math, multiprocessing, os, platform, random
import re, shlex, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
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
    num_envs: int = 32  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    max_episode_steps: int = 0  # time limit of an episode; 0: the environment's own
    stop_return: float | None = None  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: int = 1_000_000  # environment steps, rounded up to whole rollouts
    population: int = 64  # members of a generation, over all processes
    episodes_per_member: int = 1  # the fitness of a member is its mean return over these
    sigma: float = 0.1  # standard deviation of the noise in the parameters
    mirrored_sampling: bool = True  # members come in pairs, theta + sigma eps and theta - sigma eps
    common_starts: bool = True  # all members of a generation play from the same initial states
    fitness: Literal["rank", "zscore", "raw"] = "rank"  # what stands for F_i; rank: -1/2 to 1/2
    optimizer: Literal["adam", "sgd"] = "adam"  # what takes the step
    learning_rate: float = 0.03  # step size of the update
    anneal_lr: bool = False  # learning rates fall linearly to 0
    weight_decay: float = 0.005  # pulls the parameters to 0: so much of theta is taken from the gradient
    gamma: float = 0.99  # discount
    hidden_sizes: tuple[int, ...] = (16,)  # widths of the hidden layers (behind the CNN on images)
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the hidden layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# Own sweeps on one to three seeds; Swimmer after ARS (Mania et al. 2018): a linear policy, and few members.
TUNED = {
    "CartPole-v1": dict(total_timesteps=100_000, population=16, num_envs=16),
    "Acrobot-v1": dict(total_timesteps=300_000, population=16, num_envs=16, normalize_obs=True,
                       eval_every=25_000),
    "Pendulum-v1": dict(total_timesteps=2_000_000, num_envs=64, sigma=0.3, learning_rate=0.2,
                        hidden_sizes=(32,), normalize_obs=True, eval_every=100_000),
    "LunarLander-v3": dict(total_timesteps=4_000_000, num_envs=64, episodes_per_member=3, sigma=0.05,
                           fitness="zscore", learning_rate=0.02, weight_decay=0.0, eval_every=200_000),
    "InvertedPendulum-v5": dict(total_timesteps=300_000, population=16, num_envs=16, sigma=0.3,
                                learning_rate=0.1, eval_every=25_000),
    "Swimmer-v5": dict(total_timesteps=500_000, population=4, num_envs=4, sigma=0.05, learning_rate=0.05,
                       weight_decay=0.0, hidden_sizes=(), normalize_obs=True, eval_every=50_000),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Policy(nn.Module):
    """An MLP for observations (B, D) whose parameters are one vector, theta (P,): noise is added to it.

    K independent choices among up to N give actions (B, K), Box actions are (B, A).
    """

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.obs_norm = SumsNorm(obs_space.shape) if args.normalize_obs else None
        self.activation = {"tanh": torch.tanh, "relu": F.relu, "elu": F.elu, "silu": F.silu}[args.activation]
        if isinstance(action_space, Box):
            outputs, choices = action_space.shape[0], None
        else:
            sizes = [action_space.n] if isinstance(action_space, Discrete) else action_space.nvec
            choices = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]  # (K, N): which exist
            outputs = choices.numel()
        self.register_buffer("choices", choices, persistent=False)
        widths = [*obs_space.shape, *args.hidden_sizes, outputs]
        self.shapes = list(zip(widths, widths[1:], strict=False))
        layers = [orthogonal(nn.Linear(*shape)) for shape in self.shapes]
        layers[-1].weight.data *= 0.01  # the first actions depend on little but the noise
        parts = [part for layer in layers for part in (layer.weight.data.T.flatten(), layer.bias.data)]
        self.theta = nn.Parameter(torch.cat(parts))

    def forward(self, theta, obs):
        """Greedy actions of B members with parameters theta (B, P), each from its own row of obs (B, D).

        Products and sums in place of torch.bmm, whose last bits depend on where in the batch a member is.
        """
        x, start = obs if self.obs_norm is None else self.obs_norm(obs), 0
        for fan_in, fan_out in self.shapes:
            x = self.activation(x) if start else x
            weight = theta[:, start : start + fan_in * fan_out].unflatten(1, (fan_in, fan_out))
            start += (fan_in + 1) * fan_out
            x = (weight * x.unsqueeze(2)).sum(1) + theta[:, start - fan_out : start]
        if self.choices is None:
            return x
        logits = x.unflatten(1, self.choices.shape)
        return logits.masked_fill(~self.choices, -math.inf).argmax(-1)


# --------------------------------------------------------------------------------------- the learning rule
def perturb(theta, noise, sigma, mirrored):
    """Parameters (n, P) of the members: theta + sigma eps_i; mirrored: each eps twice, with + and with -."""
    steps = sigma * noise
    return theta + (torch.stack([steps, -steps], dim=1).flatten(0, 1) if mirrored else steps)


def shape_fitness(fitness, how):
    """Weights (n,) for returns (n,): "rank" from -1/2 to 1/2, ties sharing theirs; "zscore"; or "raw"."""
    if how == "raw":
        return fitness
    if how == "zscore":
        return (fitness - fitness.mean()) / (fitness.std(correction=0) + 1e-8)
    ordered, n = fitness.sort().values, len(fitness)
    below = torch.searchsorted(ordered, fitness)
    above = n - torch.searchsorted(ordered, fitness, right=True)
    return (below - above) / (2 * max(n - 1, 1))


def es_gradient(weights, noise, sigma, mirrored):
    """1 / (n sigma) sum_i F_i eps_i (P,) from weights F (n,) and noise (n, P), mirrored (n / 2, P)."""
    n = len(weights)
    if mirrored:
        weights = weights[0::2] - weights[1::2]
    return (weights[:, None] * noise).sum(0) / (n * sigma)


def generation_seeds(seed, env_steps, count):
    """count seeds below 2^30 that belong to the generation which starts at env_steps."""
    return (np.random.SeedSequence([seed, env_steps, 1]).generate_state(count) >> 2).tolist()


def play(envs, policy, members, seeds):
    """Plays one whole episode of each of the members (E, P), number i from seeds[i].

    An environment that is done takes the next episode that waits. When none waits it rests until the others
    are done (one in a process of its own goes on, in vain): what it adds goes to a spare row.
    Returns (E, 2 + 2 D): return, length, sums of the observations acted from and of their squares.
    """
    space, num_envs, last = envs.single_observation_space, envs.num_envs, len(members) - 1
    table = np.zeros((len(members) + 1, 2 + 2 * space.shape[0]))
    theta = members[:1].repeat(num_envs, 1)  # what each environment is played with
    episode, waiting, done = np.zeros(num_envs, dtype=int), 0, np.ones(num_envs, dtype=bool)
    local = list(getattr(envs, "envs", ()))  # environments in this process
    while True:
        if done.any():
            episode[done] = np.arange(waiting, waiting + done.sum())
            waiting += done.sum()
            if episode.min() > last:
                break
            for i in np.flatnonzero(done & (episode > last)) if local else ():
                envs.envs[i] = Resting(np.zeros(space.shape, space.dtype))
            theta[done] = members[episode[done].clip(max=last)]
            starts = [seeds[i] for i in episode.clip(max=last)]
            obs, _ = envs.reset(seed=starts, options={"reset_mask": done})
        action = policy(theta, to_tensor(obs, theta.device)).cpu().numpy()
        next_obs, reward, terminated, truncated, _ = envs.step(action.reshape(envs.action_space.shape))
        seen = obs.astype(np.float64)
        table[episode.clip(max=last + 1)] += np.column_stack([reward, np.ones(num_envs), seen, seen**2])
        obs, done = next_obs, terminated | truncated
    if local:
        envs.envs = local
    return table[:-1]


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device, team = set_up(args), Team()
    episodes = args.population * args.episodes_per_member
    if episodes < team.size:
        raise UsageError(f"{episodes} episodes are too few for {team.size} processes: raise --population")
    if not args.sigma:
        raise UsageError("--sigma is 0; it must be above 0, or all members are the same")
    if args.mirrored_sampling and args.population % 2:
        raise UsageError(f"--population {args.population} is odd; --mirrored-sampling needs pairs")
    envs, obs, _ = start_segment(args, env_steps=0)
    if obs.ndim != 2:
        raise UsageError(f"es.py needs vector observations; {args.env_id} has {obs.shape[1:]}: try ppo.py")
    agent = Policy(envs.single_observation_space, envs.single_action_space, args).to(device)
    adam_or_sgd = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[args.optimizer]
    optimizer = adam_or_sgd([agent.theta], lr=args.learning_rate, weight_decay=args.weight_decay)
    noises = args.population // 2 if args.mirrored_sampling else args.population

    @torch.inference_mode()
    def greedy(obs, info):
        return agent(agent.theta.expand(len(obs), -1), to_tensor(obs, device)).cpu().numpy()

    team.join()
    run = (Leader if team.rank == 0 else Follower)(team, args, agent, optimizer=optimizer)
    while run.proceed(greedy):
        if run.new_segment:
            envs, _, _ = start_segment(args, run.env_steps, envs)
        fraction_left = max(0.0, 1 - run.env_steps / args.total_timesteps) if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * fraction_left

        # Perturb. Every process knows the noise of all members from the seed and the step.
        seeds = generation_seeds(args.seed, run.env_steps, 1 + episodes)
        generator = torch.Generator().manual_seed(seeds[0])
        noise = torch.randn(noises, agent.theta.numel(), generator=generator).to(device)
        starts = seeds[1:]
        if args.common_starts:
            starts = starts[: args.episodes_per_member] * args.population

        # Play this process's share of the episodes, and learn what the others gave.
        with torch.inference_mode():
            members = perturb(agent.theta, noise, args.sigma, args.mirrored_sampling)
            members = members.repeat_interleave(args.episodes_per_member, dim=0)
            mine = team.share(episodes, team.rank)
            table = team.exchange(play(envs, agent, members[mine], starts[mine]), episodes)
        returns, lengths = table[:, 0], table[:, 1]
        run.count_episodes(returns, lengths)
        run.check_finite(observation=table[:, 2:], reward=returns)

        # Update
        fitness = torch.from_numpy(returns).view(args.population, -1).mean(1)
        weights = shape_fitness(fitness, args.fitness).float().to(device)
        gradient = es_gradient(weights, noise, args.sigma, args.mirrored_sampling)
        agent.theta.grad = -gradient
        optimizer.step()
        if args.normalize_obs:
            agent.obs_norm.merge(lengths.sum(), *np.split(table[:, 2:].sum(0), 2))

        # Log
        run.log({f"fitness/{name}": getattr(fitness, name)().item() for name in ("mean", "min", "max")})
        run.log({"fitness/std": fitness.std(correction=0).item()})
        run.log({"reward/mean": float(returns.sum() / lengths.sum())})
        run.log({"grad/norm": gradient.norm(), "policy/parameter_norm": agent.theta.detach().norm()})
        run.log({"schedule/learning_rate": args.learning_rate * fraction_left})
    envs.close()
    team.close()
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
    """Checks the ranges of the arguments, seeds everything random and picks the device."""
    for name, hint in get_type_hints(Args, include_extras=True).items():
        for part in (hint, *get_args(hint)):  # the type, or the types inside it
            for low, high in (x for x in getattr(part, "__metadata__", ()) if isinstance(x, tuple)):
                if any(x is not None and not low <= x <= high for x in np.ravel(getattr(args, name))):
                    value = f"--{name.replace('_', '-')} {getattr(args, name)}"
                    raise UsageError(f"{value}: must be from {low} to {high}")
    if args.capture_video and sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "MUJOCO_GL"}:
        os.environ["MUJOCO_GL"] = "egl"
        print("no display: MuJoCo renders with MUJOCO_GL=egl")
    set_seed(args.seed)
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    try:
        device = torch.device(args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
        device = torch.empty(0, device=device).device  # with its number
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, graphs and pinned memory belong to the current one
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {args.device}: torch finds none here; cpu always works") from None
    return device


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
    """Observations become float vectors or byte images (C, H, W); actions Discrete or MultiDiscrete from 0,
    or Boxes whose bounded dimensions are [-1, 1], and what exceeds them is clipped."""
    space, actions = env.observation_space, env.action_space
    if is_image(space) and space.shape[2] < space.shape[0]:  # (H, W, C)
        turned = Box(0, 255, (space.shape[2], *space.shape[:2]), np.uint8)
        env = gym.wrappers.TransformObservation(env, lambda x: np.moveaxis(x, -1, 0), turned)
    elif not is_image(space) and not (isinstance(space, Box) and len(space.shape) == 1):
        env = gym.wrappers.FlattenObservation(env)
    if not is_image(space) and env.observation_space.dtype not in (np.float32, np.float64):
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


MAKE_ERRORS = gym.error.Error, ImportError, TypeError, ValueError, LookupError, OSError, AssertionError


def make_envs(args, num_envs: int, **kwargs) -> gym.vector.VectorEnv:
    """num_envs environments with standard spaces. Episodes end explicitly: reset_done follows every step."""
    kwargs = {**args.env_kwargs, **kwargs}

    def make_env():
        if args.async_envs:  # in its process: the parent decides when to stop
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


def reset_done(envs, info: dict, next_obs, next_info: dict, done: np.ndarray) -> tuple[np.ndarray, dict]:
    """Starts new episodes where done. Returns what the policy acts from; next_obs is the true successor."""
    for given in (info, next_info):  # a mask from some environments only would be 0 for the others
        if "action_mask" in {*info, *next_info} and not given.get("_action_mask", np.False_).all():
            raise UsageError("the environment must give info['action_mask'] in all steps and resets, or none")
    if not done.any():
        return next_obs, next_info
    obs, new_info = envs.reset(options={"reset_mask": done})
    if "action_mask" in new_info:
        new_info["action_mask"] = np.where(done[:, None], new_info["action_mask"], next_info["action_mask"])
        new_info["_action_mask"] |= ~done
    return obs, new_info


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


class SumsNorm(RunningNorm):
    """A RunningNorm for observations of which only sums are known, as when others have seen them."""

    def merge(self, count: float, total: np.ndarray, squares: np.ndarray) -> None:
        """Adds count observations by their sum and the sum of their squares, both (*shape) in float64."""
        mean = total / count
        var = np.maximum(squares / count - mean**2, 0)
        mean, var = to_tensor(mean, self.mean.device), to_tensor(var, self.mean.device)
        self.count += count
        share, delta = count / self.count, mean - self.mean
        self.var.lerp_(var, share).add_(delta.square() * share * (1 - share))
        self.mean.lerp_(mean, share)


class Resting:
    """Stands in a SyncVectorEnv for an environment that has no episode to play: it costs no time."""

    def __init__(self, obs: np.ndarray):
        self.obs = obs

    def reset(self, **_):
        return self.obs, {}

    def step(self, action):
        return self.obs, 0.0, False, False, {}


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


def checksum(theta: torch.Tensor) -> float:
    """A number that tells parameters apart which differ."""
    return theta.detach().cpu().double().sum().item()


class Team:
    """The processes that torchrun started, on one machine or several; without torchrun this one alone."""

    def __init__(self):
        self.rank, self.size = (int(os.environ.get(name, x)) for name, x in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.on_loss = lambda: "start it again"

    def join(self) -> None:
        """Waits for the others, after all checks of the arguments: nobody waits for one that has left."""
        if self.size > 1:
            dist.init_process_group("gloo")

    def share(self, count: int, rank: int) -> slice:
        """The part of count episodes that a process plays."""
        return slice(rank * count // self.size, (rank + 1) * count // self.size)

    def talk(self, operation, *args, **kwargs) -> None:
        """One operation of all processes. If it fails, since one is gone, this one ends with exit code 1."""
        try:
            if self.size > 1:
                operation(*args, **kwargs)
        except RuntimeError as error:
            lost = f"lost one of {self.size} processes ({str(error).splitlines()[0][:200]})"
            print(f"{Path(sys.argv[0]).name}: {lost}; {self.on_loss()}", file=sys.stderr)
            sys.exit(1)

    def exchange(self, rows: np.ndarray, count: int) -> np.ndarray:
        """All count rows, in the order of the episodes, from the rows that each process has of its share.

        Process 0 gathers and sends on: a ring, as in all_reduce, takes a message from every process in turn.
        """
        if self.size == 1:
            return rows
        blocks = torch.zeros(self.size, math.ceil(count / self.size), rows.shape[1], dtype=torch.float64)
        block = torch.zeros_like(blocks[0])
        block[: len(rows)] = torch.from_numpy(rows)
        self.talk(dist.gather, block, list(blocks) if self.rank == 0 else None)
        shares = [self.share(count, rank) for rank in range(self.size)]
        table = torch.cat([b[: s.stop - s.start] for b, s in zip(blocks, shares, strict=True)])
        self.talk(dist.broadcast, table, src=0)
        return table.numpy()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Leader(Run):
    """The Run of process 0: counts whole episodes, and tells the other processes how to go on."""

    def __init__(self, team, args, agent, **parts):
        super().__init__(args, agent, **parts)
        self.team, self.safe, team.on_loss = team, False, self.rescue
        state = {name: part.state_dict() for name, part in (parts | {"agent": agent}).items()}
        team.talk(dist.broadcast_object_list, [self.env_steps, state])

    def count_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """One after the other, in the order of the members, whichever environment played them when."""
        self.safe = False
        for return_, length in zip(returns.tolist(), lengths.astype(int).tolist(), strict=True):
            self.env_steps += length
            self.episodes.append([self.env_steps, return_, length])
            self.recent.append(return_)

    def proceed(self, policy) -> bool:
        go_on = self.safe = False
        try:
            go_on = self.safe = super().proceed(policy)
        finally:
            word = [go_on, go_on and self.new_segment, self.env_steps, checksum(self.agent.theta)]
            self.team.talk(dist.broadcast, torch.tensor(word, dtype=torch.float64), src=0)
        return go_on

    def rescue(self) -> str:
        """Saves the generation's start: nothing of it was learned yet. Returns where, for the last line."""
        if self.safe and self.env_steps > self.saved_at:
            self.checkpoint()
        how = shlex.join(["python", sys.argv[0], "--resume", str(self.folder)])
        return f"{self.folder} has {self.kept}; to go on with any number of processes: {how}"


class Follower:
    """Stands for Run in the other processes: no folder, no log; goes on and stops as process 0 says."""

    def __init__(self, team, args, agent, **parts):
        self.team, self.agent = team, agent
        for number in STOP_SIGNALS:  # process 0 saves and decides when to stop
            signal.signal(number, signal.SIG_IGN)
        message = [None, None]
        team.talk(dist.broadcast_object_list, message)
        self.env_steps, state = message
        for name, part in (parts | {"agent": agent}).items():
            part.load_state_dict(state[name])

    def count_episodes(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        self.env_steps += int(lengths.sum())

    def proceed(self, policy) -> bool:
        word = torch.zeros(4, dtype=torch.float64)
        self.team.talk(dist.broadcast, word, src=0)
        go_on, self.new_segment, *state = word.tolist()
        if go_on and state != [self.env_steps, checksum(self.agent.theta)]:
            name, rank = Path(sys.argv[0]).name, self.team.rank
            print(f"{name}: process {rank} has other parameters than process 0: stopped", file=sys.stderr)
            sys.exit(1)
        return bool(go_on)

    def log(self, metrics: dict) -> None:
        pass

    def check_finite(self, **values) -> None:
        if not all(np.isfinite(value).all() for value in values.values()):
            sys.exit(1)  # process 0 says why

    def close(self) -> np.ndarray:
        return np.empty(0)


def main() -> None:
    try:
        train(parse_args())
    except (UsageError, FloatingPointError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
