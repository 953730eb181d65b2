"""Q-learning (Watkins 1989; Watkins and Dayan 1992): a table with one value Q(s, a) for each state and
action; every step of the environment moves one of them a little towards a better estimate.

    Q(S, A) <- Q(S, A) + alpha (y - Q(S, A))     after state S, action A, reward R, next state S'

The rules (--update-rule) differ in the target y; the equations are those of Sutton and Barto 2018:

    q_learning      y = R + gamma max_a Q(S', a)              the best next action                   (eq. 6.8)
    sarsa           y = R + gamma Q(S', A')                   the next action taken                  (eq. 6.7)
    expected_sarsa  y = R + gamma sum_a pi(a | S') Q(S', a)   the mean over the policy               (eq. 6.9)
    double          y = R + gamma Q2(S', argmax_a Q1(S', a))  Q1 learns, Q2 judges; or Q1, Q2 swap  (eq. 6.10)

The policy pi is epsilon-greedy: a random action with probability epsilon, else that of the largest Q(S, a).
Nothing follows a terminal state, so y = R there.

Differences from the papers and the book:
 1. A time limit is no terminal state: y keeps its second term, with the state in which the episode was cut.
 2. Several environments step together. If k of them are in the same S and take the same A, Q(S, A) moves as
    far as in k updates in a row towards the mean of their k targets.
 3. A' is drawn before Q(S, A) moves, whatever the rule.
 4. The observations of a Box are numbered by the cells of a grid.

    python algos/q_learning.py --env-id FrozenLake-v1
"""
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "gymnasium[classic-control,box2d,mujoco]>=1.4", "ale-py>=0.12", "numpy",
#     "opencv-python>=5", "tensorboard", "tqdm", "tyro",
# ]
# ///

import contextlib, errno, importlib, json, math, os, platform, random, shutil, signal, subprocess, sys, time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Literal, get_args, get_type_hints

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Count = Annotated[int, (1, math.inf)]  # numbers and their ranges, checked before anything runs
Share = Annotated[float, (0, 1)]
Json = Annotated[dict, tyro.conf.arg(constructor=json.loads, metavar="JSON")]


@dataclass
class Args:
    # run
    seed: int = 1  # seed of everything random
    device: Literal["cpu"] = "cpu"  # a table gains nothing from a GPU
    run_dir: str = ""  # folder of this run; empty: runs/{env_id}/{algo}/{seed}-{date}
    resume: str = ""  # run folder or checkpoint.pt to continue; with --run-dir in a new folder
    init_from: str = ""  # .pt file whose table a new run starts from
    evaluate: str = ""  # run folder (its checkpoint.pt) or .pt file to play and score, without training
    checkpoint_every: int = 20_000  # steps of each environment between checkpoints; 0: only at the end
    eval_every: int = 10_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: Count = 10  # episodes of one evaluation
    eval_max_steps: Count = 100_000  # steps after which an evaluation ends, finished or not
    eval_seed: int = 10_000_000  # seed of all evaluations
    sample_actions: bool = False  # evaluations take a share epsilon of random actions, too
    log_every: int = 1_000  # environment steps between rows of the log
    capture_video: bool = False  # film an episode of each evaluation
    torch_threads: int = 1  # CPU threads of torch; 0: torch decides
    # environment
    env_id: str = "FrozenLake-v1"  # Gymnasium id; also module:Env-v0
    env_kwargs: Json = field(default_factory=dict)  # JSON object of arguments for the environment
    num_envs: Count = 4  # environments that step together
    async_envs: bool = False  # one process per environment, for slow ones
    stop_return: float = math.inf  # stop when the mean return of an evaluation reaches this
    # algorithm
    total_timesteps: Count = 500_000  # environment steps, rounded up to whole steps of all environments
    update_rule: Literal["q_learning", "sarsa", "expected_sarsa", "double"] = "q_learning"  # the target y
    learning_rate: Share = 0.1  # alpha; above 1 values would overshoot their targets
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    gamma: Share = 0.99  # discount
    epsilon_start: Share = 0.9  # share of random actions at first
    epsilon_decay: Share = 0.9999  # factor of epsilon after each episode
    epsilon_min: Share = 0.01  # where epsilon stops falling
    initial_value: float = 0.0  # of every Q(s, a); above all that can be earned, every action gets its trial
    grid_size: tuple[Count, ...] = (10,)  # cells per dimension of a Box: one number for all or one for each
    obs_low: tuple[float, ...] = ()  # lower ends of the grid, per dimension; empty: the bounds of the Box
    obs_high: tuple[float, ...] = ()  # upper ends of the grid, per dimension; empty: the bounds of the Box


# -------------------------------------------------------------------------------------------- learning rule
def next_value(update_rule, next_q_values, judge_q_values, next_action, epsilon):
    """What the next state is worth, (B,): the part of the target y that gamma discounts.

    next_q_values and judge_q_values are the rows (B, A) of S' in the table that learns and in the one that
    judges; only "double" has two. next_action (B,) is A'. Equations: Sutton and Barto 2018.
    """
    rows = np.arange(len(next_q_values))
    if update_rule == "q_learning":
        return next_q_values.max(axis=1)  # eq. 6.8
    if update_rule == "sarsa":
        return next_q_values[rows, next_action]  # eq. 6.7
    if update_rule == "expected_sarsa":
        return (1 - epsilon) * next_q_values.max(axis=1) + epsilon * next_q_values.mean(axis=1)  # eq. 6.9
    return judge_q_values[rows, next_q_values.argmax(axis=1)]  # double, eq. 6.10


def update_table(q_values, index, td_target, alpha):
    """Q(S, A) <- Q(S, A) + alpha (y - Q(S, A)) in place, for B pairs (S, A) at index (B,) of a flat table.

    Adding up the changes of k equal pairs would overshoot, and writing one over the other would forget all
    but one. Such a pair moves 1 - (1 - alpha)^k of the way to the mean of its targets.
    """
    same = index[:, None] == index  # (B, B)
    k = same.sum(axis=1)
    mean_target = same @ td_target / k
    q_values[index] += (1 - (1 - alpha) ** k) * (mean_target - q_values[index])  # equal pairs write the same


def epsilon_after(episodes, args):
    """Share of random actions after so many episodes, those of all environments together."""
    return max(args.epsilon_min, args.epsilon_start * args.epsilon_decay**episodes)


# ------------------------------------------------------------------------------------------------- training
def train(args: Args) -> np.ndarray:
    """Trains, or with args.evaluate only plays. Returns the episode returns of the last evaluation."""
    device = set_up(args)
    envs, obs, info = start_segment(args)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args, device)
    episodes = Episodes()
    run = Run(args, args.num_envs, agent=agent, episodes=episodes)
    if args.evaluate:
        return run.evaluate()
    rewards = []  # since the last row
    while True:
        # Pause: score, save, end, or go on from what was saved
        if run.due(args.eval_every) and not run.signal:
            run.evaluate()
        if run.due(args.checkpoint_every * args.num_envs):
            run.checkpoint()
        if run.finished:
            return run.close(envs)
        agent.epsilon = epsilon_after(episodes.finished, args)
        if run.env_steps in (0, run.saved_at):  # what follows depends on the checkpoint alone
            envs, obs, info = start_segment(args, run.env_steps, envs)
            state, action = agent.grid(obs), agent.act(obs, info, greedy=False)
            rewards = []

        # Step. A' is drawn in the true successor, also where the episode was cut there.
        alpha = args.learning_rate
        if args.anneal_lr:
            alpha *= 1 - run.env_steps / args.total_timesteps
        next_obs, reward, terminated, truncated, next_info = envs.step(action)
        done = terminated | truncated
        run.count(reward, done)
        rewards.extend(reward)
        next_state, next_action = agent.grid(next_obs), agent.act(next_obs, next_info, greedy=False)

        # Update. Of two tables, a coin says for each transition which one learns; the other one judges.
        q_values = agent.q_values.numpy()  # the same memory; NumPy is faster on small arrays
        table = np.random.randint(len(q_values), size=args.num_envs)
        judge = len(q_values) - 1 - table
        next_q_values, judge_q_values = q_values[table, next_state], q_values[judge, next_state]
        value = next_value(args.update_rule, next_q_values, judge_q_values, next_action, agent.epsilon)
        td_target = reward + args.gamma * (1 - terminated) * value
        q_value = q_values[table, state, action]
        index = np.ravel_multi_index((table, state, action), q_values.shape)
        update_table(q_values.reshape(-1), index, td_target, alpha)

        # Go on with A', or in a new episode with an action of its own
        obs, info = reset_done(envs, next_obs, next_info, done)
        state, action = next_state, next_action
        if done.any():
            episodes.finished += int(done.sum())
            state, action = agent.grid(obs), np.where(done, agent.act(obs, info, greedy=False), action)

        # Log
        if run.due(args.log_every):
            run.log({
                "loss/td_error": np.abs(td_target - q_value).mean(),
                "q/mean": q_value.mean(), "q/max": q_value.max(), "q/target_mean": td_target.mean(),
                "reward/mean": np.mean(rewards), "schedule/epsilon": agent.epsilon,
                "schedule/learning_rate": alpha,
            })  # fmt: skip
            rewards = []


# --------------------------------------------------------------------------------------------------- tables
class Grid:
    """Numbers the states from 0, row by row as in an array of the shape sizes.

    A Box has grid_size cells of equal width in each dimension, between its bounds; what lies outside belongs
    to the nearest cell. A Discrete observation, and each part of a MultiDiscrete or a Tuple of Discrete, is a
    dimension with a cell for each value; make_envs gives it one-hot, as (0, 0, 1, 0) for the third of four.
    """

    def __init__(self, space: gym.Space, args: Args):
        self.is_box, parts = isinstance(space, Box), space if isinstance(space, Tuple) else [space]
        if self.is_box:
            self.low, self.high, self.sizes = box_bounds(space, args)
        elif isinstance(space, MultiDiscrete):
            self.sizes = space.nvec.ravel()
        elif all(isinstance(part, Discrete) for part in parts):
            self.sizes = np.array([part.n for part in parts])
        else:
            known = "Box, Discrete, MultiDiscrete or a Tuple of Discrete"
            raise UsageError(f"{args.env_id} observes {space}, Q-learning needs {known}: try dqn.py")
        self.num_states = math.prod(self.sizes.tolist())
        if self.num_states > 10_000_000:
            many = f"{args.env_id} has more than 10 million states"
            raise UsageError(f"{many} with this --grid-size: lower it, or try dqn.py, which needs no table")
        strides = self.num_states // np.cumprod(self.sizes)  # states between neighbours, per dimension
        one_hot = [stride * np.arange(n) for stride, n in zip(strides, self.sizes, strict=True)]
        self.weight = strides if self.is_box else np.concatenate(one_hot)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Observations (B, D) to the numbers of their states (B,)."""
        if self.is_box:
            obs = np.floor((obs - self.low) * (self.sizes / (self.high - self.low))).clip(0, self.sizes - 1)
        return (obs @ self.weight).astype(np.int64)


def box_bounds(space: Box, args: Args) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower ends, upper ends and number of cells of a grid over the Box, (D,) each."""
    low, high = np.float64(args.obs_low or space.low.ravel()), np.float64(args.obs_high or space.high.ravel())
    sizes = np.array(args.grid_size * space.low.size if len(args.grid_size) == 1 else args.grid_size)
    for flag, numbers in {"--obs-low": low, "--obs-high": high, "--grid-size": sizes}.items():
        if len(numbers) != space.low.size:
            have = f"{args.env_id} has {space.low.size} dimensions"
            raise UsageError(f"{flag} has {len(numbers)} numbers, but {have}")
    if not (np.isfinite(high - low) & (low < high)).all():
        where = f"from {low.tolist()} to {high.tolist()}"
        raise UsageError(f"no grid {where}: give --obs-low and --obs-high, finite and in this order")
    return low, high, sizes


class Agent(nn.Module):
    """The values Q(s, a) of all states and actions, and the policies that follow from them."""

    def __init__(self, obs_space, action_space, args, device):
        super().__init__()
        if not isinstance(action_space, Discrete):
            have = f"{args.env_id} has {action_space} actions"
            raise UsageError(f"{have}, Q-learning needs Discrete: try ppo.py")
        self.epsilon = args.epsilon_min  # training sets it anew for each step
        # obs_space has vectors of all observations; the grid has to know what they were
        self.grid = Grid(gym.make(args.env_id, **args.env_kwargs).observation_space, args)
        shape = (2 if args.update_rule == "double" else 1, self.grid.num_states, int(action_space.n))
        self.register_buffer("q_values", torch.full(shape, args.initial_value, dtype=torch.float64))

    def act(self, obs, info, greedy=True):
        """Actions (num_envs,) in a vector environment: the first of the best; if not greedy, some random."""
        q_values = self.q_values.numpy()[:, self.grid(obs)].sum(axis=0)  # two tables vote together
        random_action = np.random.randint(q_values.shape[1], size=len(obs))
        explore = np.random.random(len(obs)) < (0.0 if greedy else self.epsilon)
        return np.where(explore, random_action, q_values.argmax(axis=1))

    def get_extra_state(self):
        """What the numbers of the states mean. It is saved, and a table is not loaded into another grid."""
        bounds = [self.grid.low, self.grid.high] if self.grid.is_box else []
        return torch.tensor(np.stack([self.grid.sizes, *bounds]))

    def set_extra_state(self, state):
        if not torch.equal(state, self.get_extra_state()):
            raise ValueError("its table has another grid")


class Episodes:
    """How many are finished: what epsilon follows from. It belongs to the training, not to the table."""

    finished = 0

    def state_dict(self):
        return {"finished": self.finished}

    def load_state_dict(self, state):
        self.finished = state["finished"]


# Own sweeps, results in benchmark/results.
TUNED = {
    "FrozenLake-v1": dict(total_timesteps=200_000, num_envs=64),
    # it has no time limit, and a greedy policy may walk in circles
    "CliffWalking-v1": dict(total_timesteps=50_000, num_envs=8, env_kwargs={"max_episode_steps": 200},
                            learning_rate=0.5, epsilon_start=0.1),
    # python benchmark/tune.py --script algos/q_learning.py --env-id Taxi-v4 --trials 4 --seeds 2 --params
    # learning_rate,epsilon_decay,anneal_lr: 7.81 on seeds 101 to 102, before 7.76
    "Taxi-v4": dict(total_timesteps=300_000, num_envs=16, learning_rate=0.174, epsilon_decay=0.99),
    "MountainCar-v0": dict(total_timesteps=1_000_000, num_envs=16, learning_rate=0.5, gamma=1.0,
                           epsilon_start=0.1, epsilon_decay=0.999, epsilon_min=0.0, grid_size=(40,),
                           eval_every=50_000),
    "CartPole-v1": dict(learning_rate=0.2, epsilon_start=0.5, epsilon_decay=0.999,
                        grid_size=(3, 3, 12, 12), obs_low=(-2.4, -3.0, -0.21, -3.0),
                        obs_high=(2.4, 3.0, 0.21, 3.0), eval_every=50_000),
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
