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

import atexit, contextlib, errno, importlib, json, math, os, platform, random, shutil, signal, subprocess
import sys, time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch.func import functional_call, vmap
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
    checkpoint_every: int = 20_000  # steps of each environment between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 10  # episodes of one evaluation
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations
    sample_actions: ClassVar[bool] = False  # no option: the policies are deterministic
    capture_video: bool = False  # film an episode of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 32  # environments that step together, in each process of torchrun
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 1_000_000  # environment steps, until the generation that reaches them
    population: Count = 64  # members of a generation, over all processes
    episodes_per_member: Count = 1  # the fitness of a member is its mean return over these
    sigma: Annotated[float, (1e-12, math.inf)] = 0.1  # standard deviation of the noise in the parameters
    mirrored_sampling: bool = True  # members come in pairs, theta + sigma eps and theta - sigma eps
    common_starts: bool = True  # all members of a generation play from the same initial states
    fitness: Literal["rank", "zscore", "raw"] = "rank"  # what stands for F_i; rank: -1/2 to 1/2
    optimizer: Literal["adam", "sgd"] = "adam"  # what takes the step
    learning_rate: Rate = 0.03  # step size of the update
    anneal_lr: bool = False  # the learning rate falls linearly to 0
    weight_decay: Rate = 0.005  # pulls the parameters to 0: so much of theta is taken from the gradient
    gamma: Share = 0.99  # discount, of eval/discounted_return_mean only
    hidden_sizes: tuple[Count, ...] = (16,)  # widths of the hidden layers; none: a linear policy
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"  # between the layers
    normalize_obs: bool = False  # observations to mean 0 and variance 1, clipped to +-10


# -------------------------------------------------------------------------------------------- learning rule
def perturb(theta, noise, sigma, mirrored):
    """theta + sigma eps_i for all members i, (n, *theta.shape); mirrored: each eps with + and with -."""
    step = sigma * noise
    return theta + (torch.stack([step, -step], dim=1).flatten(0, 1) if mirrored else step)


def shape_fitness(fitness, how):
    """Weights (n,) for returns (n,): "rank" from -1/2 to 1/2, ties sharing theirs; "zscore"; or "raw"."""
    if how == "raw":
        return fitness
    if how == "zscore":
        return (fitness - fitness.mean()) / (fitness.std(correction=0) + 1e-8)
    below = (fitness < fitness[:, None]).sum(1)  # how many members each one beats
    above = (fitness > fitness[:, None]).sum(1)
    return (below - above) / (2 * max(len(fitness) - 1, 1))


def es_gradient(weights, noise, sigma, mirrored):
    """1 / (n sigma) sum_i F_i eps_i from weights F (n,) and noise (n, *shape), mirrored (n / 2, *shape)."""
    n = len(weights)
    if mirrored:
        weights = weights[0::2] - weights[1::2]
    return torch.tensordot(weights, noise, dims=1) / (n * sigma)


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():  # of torchrun: a GPU for each process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = set_up(args)
    if args.mirrored_sampling and args.population % 2:
        raise UsageError(f"--population {args.population} is odd: --mirrored-sampling needs pairs")
    envs, _, _ = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    make_optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[args.optimizer]
    optimizer = make_optimizer(agent.parameters(), lr=args.learning_rate)
    run = (Follower if RANK else Run)(args, args.num_envs, agent=agent, optimizer=optimizer)
    if args.evaluate:
        return run.evaluate()
    if SIZE > 1:
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)  # else a thread of it may abort the exit of Python
    while True:
        # Pause: score, save, end, or go on from what was saved
        if run.due(args.eval_every) and not run.signal:
            run.evaluate()
        if run.due(args.checkpoint_every * args.num_envs):
            run.checkpoint()
        if decide(run.finished):
            return run.close(envs)
        if run.saved_at == run.env_steps:  # what follows depends on the checkpoint alone
            envs, _, _ = start_segment(args, run.env_steps, envs)
        left = 1 - run.env_steps / args.total_timesteps if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * left

        # Perturb. Every process knows the noise and the starts of all members from the seed and the step.
        member = np.arange(args.population).repeat(args.episodes_per_member)  # who plays each episode
        seeds = np.random.SeedSequence([args.seed, run.env_steps, 1]).generate_state(1 + len(member)) >> 2
        generator = torch.Generator().manual_seed(int(seeds[0]))
        noises = args.population // 2 if args.mirrored_sampling else args.population
        noise = [torch.randn(noises, *p.shape, generator=generator).to(device) for p in agent.parameters()]
        members = {
            name: perturb(p.detach(), eps, args.sigma, args.mirrored_sampling)
            for (name, p), eps in zip(agent.named_parameters(), noise, strict=True)
        }

        # Play this process's share of the episodes, and hear what the others gave
        starts = seeds[1:]
        if args.common_starts:
            starts = np.tile(starts[: args.episodes_per_member], args.population)
        mine = slice(RANK * len(member) // SIZE, (RANK + 1) * len(member) // SIZE)
        results = gather(play(envs, agent, members, member[mine], starts[mine]))
        returns, lengths = results[:, 0], results[:, 1]
        run.episodes = list(zip(returns.tolist(), lengths.tolist(), strict=True))
        run.chunk = int(lengths.sum())
        run.env_steps += run.chunk

        # Update
        fitness = torch.from_numpy(returns).view(args.population, -1).mean(1)
        weights = shape_fitness(fitness, args.fitness).float().to(device)
        gradient = [es_gradient(weights, eps, args.sigma, args.mirrored_sampling) for eps in noise]
        for p, ascent in zip(agent.parameters(), gradient, strict=True):
            p.grad = args.weight_decay * p.detach() - ascent
        optimizer.step()
        if args.normalize_obs:
            agent.obs_norm.update(run.chunk, *np.split(results[:, 2:].sum(0), 2))

        # Log
        run.log({
            "fitness/mean": fitness.mean(), "fitness/std": fitness.std(correction=0),
            "fitness/min": fitness.min(), "fitness/max": fitness.max(),
            "reward/mean": returns.sum() / run.chunk,
            "grad/norm": torch.stack([x.norm() for x in gradient]).norm(),
            "policy/parameter_norm": torch.stack([p.detach().norm() for p in agent.parameters()]).norm(),
            "schedule/learning_rate": optimizer.param_groups[0]["lr"],
        })  # fmt: skip


@torch.inference_mode()
def play(envs, agent, members, member, seeds):
    """Plays episodes i < E, each whole, with the parameters members[name][member[i]] and from seeds[i].

    An environment that is done takes the next episode. When none is left it rests until the others are done
    (with async_envs it goes on, in vain and uncounted). Returns (E, 2 + 2 D): return, length, and the sums of
    the observations acted from and of their squares.
    """
    space, none = envs.single_observation_space, len(seeds)  # episode number none is no episode
    results = np.zeros((none + 1, 2 + 2 * space.shape[0]))
    member, seeds = [*member, 0], [*seeds.tolist(), 0]
    params = {name: x.new_zeros(envs.num_envs, *x.shape[1:]) for name, x in members.items()}
    episode, begun, done = np.full(envs.num_envs, none), 0, np.full(envs.num_envs, True)
    local = list(getattr(envs, "envs", []))  # environments in this process
    while True:
        if done.any():
            episode[done] = np.arange(begun, begun + done.sum()).clip(max=none)
            begun += done.sum()
            if (episode == none).all():
                break
            for i in np.flatnonzero(done):
                if local and episode[i] == none:
                    envs.envs[i] = Resting(np.zeros(space.shape, space.dtype))
                for name, x in members.items():
                    params[name][i] = x[member[episode[i]]]
            obs, _ = envs.reset(seed=[seeds[i] for i in episode], options={"reset_mask": done})
        action = agent.act_each(params, obs)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        seen = obs.astype(np.float64)
        results[episode] += np.column_stack([reward, np.ones(len(reward)), seen, seen**2])
        obs, done = next_obs, terminated | truncated
    if local:
        envs.envs = local
    return results[:none]


class Resting:
    """Stands in a SyncVectorEnv for an environment that has no episode to play: it is not simulated."""

    def __init__(self, obs):
        self.obs = obs

    def reset(self, **_):
        return self.obs, {}

    def step(self, action):
        return self.obs, 0.0, False, False, {}


# ------------------------------------------------------------------------------------------------- networks
def orthogonal(layer, gain=2**0.5):
    """Orthogonal weights (Saxe et al. 2014) times gain, biases 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class RowLinear(nn.Linear):
    """A linear layer with the same result to the last bit in any batch, which batched products have not.

    So it does not matter for a member in which environment or process it plays.
    """

    def forward(self, x):
        return (self.weight * x.unsqueeze(-2)).sum(-1) + self.bias


class Agent(nn.Module):
    """An MLP for observations (B, D). It gives scores of K choices among up to N, or Box actions (B, A)."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if len(obs_space.shape) == 3:
            raise UsageError(f"{args.env_id} shows images, ES needs vectors: try ppo.py")
        self.device, self.action_shape, space = device, action_space.shape, action_space
        self.obs_norm = SumsNorm(obs_space.shape) if args.normalize_obs else nn.Identity()
        self.activation = getattr(F, args.activation)
        if isinstance(space, Box):
            exists, outputs = None, math.prod(space.shape)
        else:
            choices = torch.tensor([space.n] if isinstance(space, Discrete) else space.nvec.ravel())
            exists = torch.arange(choices.max()) < choices[:, None]  # (K, N)
            outputs = exists.numel()
        self.register_buffer("exists", exists, persistent=False)
        sizes = list(pairwise([*obs_space.shape, *args.hidden_sizes, outputs]))
        self.layers = nn.ModuleList(orthogonal(RowLinear(*size)) for size in sizes[:-1])
        self.output = orthogonal(RowLinear(*sizes[-1]), gain=0.01)
        self.to(device)

    def forward(self, obs):
        x = self.obs_norm(obs)
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.output(x)

    def choose(self, output):
        """Actions (B, *action_space.shape) from what forward gives (B, outputs)."""
        if self.exists is not None:
            scores = output.unflatten(1, self.exists.shape)  # (B, K, N)
            output = scores.masked_fill(~self.exists, -math.inf).argmax(-1)
        return output.cpu().numpy().reshape(-1, *self.action_shape)

    @torch.inference_mode()
    def act(self, obs, info, greedy=True):
        """Actions (num_envs, *action_space.shape) in a vector environment."""
        return self.choose(self(to_tensor(obs, self.device)))

    def act_each(self, params, obs):
        """Actions for observations (B, D), each from parameters of its own: params[name] is (B, *shape)."""
        forward = lambda params, row: functional_call(self, params, row[None])[0]
        return self.choose(vmap(forward)(params, to_tensor(obs, self.device)))


class SumsNorm(nn.Module):
    """(x - mean) / standard deviation of all x that update was told of, clipped to +-10."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, count: int, total: np.ndarray, squares: np.ndarray) -> None:
        """Adds count x by their sum and the sum of their squares, merging the moments (Chan et al. 1983)."""
        mean, mean_square = (torch.from_numpy(x / count).to(self.mean.device) for x in (total, squares))
        self.count += count
        share, delta = count / self.count, mean - self.mean
        var = (mean_square - mean.square()).clamp(min=0)
        self.var.lerp_(var, share).add_(delta.square() * share * (1 - share))
        self.mean.lerp_(mean, share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10).float()


# Own sweeps on one to three seeds; Swimmer after ARS (Mania et al. 2018): a linear policy, and few members.
TUNED = {
    "CartPole-v1": dict(total_timesteps=100_000, population=16, num_envs=16),
    "Acrobot-v1": dict(total_timesteps=300_000, population=16, num_envs=16, normalize_obs=True,
                       eval_every=25_000),
    "Pendulum-v1": dict(total_timesteps=2_000_000, num_envs=64, sigma=0.3, learning_rate=0.2,
                        hidden_sizes=(32,), normalize_obs=True, eval_every=100_000),
    "LunarLander-v3": dict(total_timesteps=4_000_000, num_envs=64, episodes_per_member=3,
                           fitness="zscore", learning_rate=0.05, weight_decay=0.0, normalize_obs=True,
                           eval_every=200_000),
    "InvertedPendulum-v5": dict(total_timesteps=300_000, population=16, num_envs=16, sigma=0.3,
                                learning_rate=0.1, eval_every=25_000),
    "Swimmer-v5": dict(total_timesteps=500_000, population=4, num_envs=4, sigma=0.05, learning_rate=0.05,
                       weight_decay=0.0, hidden_sizes=(), normalize_obs=True, eval_every=50_000),
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


# ------------------------------------------------------------------------------------ processes of torchrun
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # 0 of 1 without torchrun


def exchange(collective, *data) -> None:
    """Calls a collective of torch.distributed. If another process is lost, this one ends in one line."""
    try:
        collective(*data)
    except RuntimeError as error:
        why = str(error).partition(". ")[0]
        sys.exit(f"{Path(sys.argv[0]).name}: a process is lost; --resume goes on with any number ({why})")


def gather(results: np.ndarray) -> np.ndarray:
    """The rows of all processes, in the order of the episodes."""
    parts = [results] * SIZE
    if SIZE > 1:
        exchange(dist.all_gather_object, parts, results)
    return np.concatenate(parts)


def decide(finished: bool) -> bool:
    """What process 0 says: it alone evaluates and hears signals."""
    answer = [finished]
    if SIZE > 1:
        exchange(dist.broadcast_object_list, answer, 0)
    return answer[0]


class Follower(Run):
    """The Run of processes 1, 2, ...: it goes on as long as process 0 does, and writes nothing."""

    def open(self, script: Path) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # process 0 stops all

    def evaluate(self) -> np.ndarray:
        return np.empty(0)

    def log(self, metrics: dict) -> None:
        pass

    def checkpoint(self) -> None:
        self.saved_at = self.env_steps

    def close(self, envs) -> np.ndarray:
        envs.close()
        return np.empty(0)


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
