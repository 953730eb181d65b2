"""Small environments that show what a script does to them: --env-id probe_envs:Walk-v0, tests/ on the path.

They count on nothing but their arguments and the seed of their first reset, so every number can be foretold.
"""

import os
import random
import signal
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

EVALUATION_SEEDS = range(10_000_000, 10_001_000)  # evaluations reset with these, rollouts with other seeds


def action_space_of(kind: str) -> gym.Space:
    return {"discrete": Discrete(2), "box": Box(-1.0, 1.0, (1,), np.float32)}[kind]


class Probe(gym.Env):
    """Knows the seed of its first reset, whether it is played for an evaluation, and draws grey frames.

    It is a family of tasks, too: a number, that only Walk heeds.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    first_seed, t, task = None, 0, 0.0

    def __init__(self, actions: str = "discrete", render_mode: str | None = None):
        self.action_space, self.render_mode = action_space_of(actions), render_mode
        self.observation_space = Box(-1e6, 1e6, (4,), np.float32)

    def sample_task(self, rng) -> np.ndarray:
        return rng.uniform(-0.5, 0.5, 1)

    def set_task(self, task: np.ndarray) -> None:
        self.task = float(task[0])

    @property
    def evaluates(self) -> bool:
        return self.first_seed in EVALUATION_SEEDS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first_seed, self.t = seed if self.first_seed is None else self.first_seed, 0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.zeros(4, dtype=np.float32)

    def render(self):
        return np.full((48, 64, 3), min(10 * self.t, 255), dtype=np.uint8)


# The truth about episode `episode` (0, 1, ...) of the Boundary environment called `number`.
def boundary_length(number: int, episode: int) -> int:
    return 3 + (5 * episode + number) % 7  # 3 to 9 steps, another length each time


def boundary_terminates(number: int, episode: int) -> bool:
    return (number + episode) % 2 == 0  # else it is truncated


def boundary_reward(episode: int, t: int) -> float:
    """Reward of the step that leads to time t (1, 2, ..., length)."""
    return float(10 * episode + t)


def boundary_return(number: int, episode: int) -> float:
    return sum(boundary_reward(episode, t) for t in range(1, boundary_length(number, episode) + 1))


class Boundary(Probe):
    """Observes [number, episode, t, end]; end is 0 within an episode, else 1 if terminated, 2 if truncated.

    number is the argument, or the seed of the first reset modulo 100: neighbours in a vector differ by 1.
    Boundary.steps lists (evaluates, number, episode, t, action, reward) of every step in this process.
    """

    steps: list = []

    def __init__(self, number: int = -1, **kwargs):
        super().__init__(**kwargs)
        self.number, self.episode, self.end = number, -1, 0

    def reset(self, *, seed=None, options=None):
        if self.number < 0:
            self.number = (seed or 0) % 100
        self.episode, self.end = self.episode + 1, 0
        return super().reset(seed=seed, options=options)

    def observe(self):
        return np.array([self.number, self.episode, self.t, self.end], dtype=np.float32)

    def step(self, action):
        assert not self.end, "a step after the end of an episode"
        self.t += 1
        last = self.t == boundary_length(self.number, self.episode)
        terminated = last and boundary_terminates(self.number, self.episode)
        truncated = last and not terminated
        self.end = 1 if terminated else 2 if truncated else 0
        reward = boundary_reward(self.episode, self.t)
        Boundary.steps.append((self.evaluates, self.number, self.episode, self.t, action, reward))
        return self.observe(), reward, terminated, truncated, {}


class Ones(Probe):
    """Pays 1 per step, or for action 1 alone; every 10 steps it is truncated, or terminates."""

    def __init__(self, pay: float = 1.0, terminates: bool = False, choosy: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.pay, self.terminates, self.choosy = pay, terminates, choosy

    def step(self, action):
        self.t += 1
        end, reward = self.t == 10, self.pay * float(action if self.choosy else 1)
        return self.observe(), reward, end and self.terminates, end and not self.terminates, {}


class Boxes(Probe):
    """Bounds differ per dimension. Boxes.actions lists what arrives, info["action"] too. Pays for (2, -1)."""

    actions: list = []

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode=render_mode)
        self.action_space = Box(np.array([-1, -2], np.float32), np.array([3, 2], np.float32))

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.t += 1
        Boxes.actions.append(np.array(action))
        reward = -float(np.abs(action - np.array([2, -1])).sum())
        return self.observe(), reward, False, self.t == 10, {"action": np.array(action)}


class Masked(Probe):
    """Three actions of which one or two are legal, others at each step. Pays 1 for the highest legal one.

    Neighbours in a vector have episodes of 8 and of 9 steps.
    """

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode=render_mode)
        self.action_space = Discrete(3)

    def mask(self) -> np.ndarray:
        return np.array([[1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=np.int8)[self.t % 3]

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.t % 3]

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, {"action_mask": self.mask()}

    def step(self, action):
        mask = self.mask()
        if not mask[action]:
            raise ValueError(f"action {action} is illegal at time {self.t}, the mask is {mask}")
        self.t += 1
        reward = float(action == np.flatnonzero(mask)[-1])
        end = self.t == 8 + (self.first_seed or 0) % 2
        return self.observe(), reward, False, end, {"action_mask": self.mask()}


def observation_spaces() -> dict[str, gym.Space]:
    byte = dict(low=0, high=255, dtype=np.uint8)
    pose = {"position": Box(-1, 1, (3,), np.float32), "mode": Discrete(2)}
    camera = Box(shape=(12, 11, 3), **byte)
    return {
        "vector": Box(-1, 1, (3,), np.float32), "float64": Box(-1, 1, (3,), np.float64),
        "float16": Box(-1, 1, (3,), np.float16), "scalar": Box(-1, 1, (), np.float32),
        "ram": Box(shape=(128,), **byte), "matrix": Box(-1, 1, (12, 9), np.float32),
        "thin": Box(-1, 1, (3, 2), np.float32), "cards": Box(0, 1, (8, 4, 13), np.float32),
        "slice": Box(0, 1, (10, 3, 10), np.float32), "bits": Box(0, 1, (10, 9), np.bool_),
        "discrete": Discrete(5), "discrete_start": Discrete(5, start=3),
        "multi_discrete": MultiDiscrete([3, 4]), "multi_binary": MultiBinary(4),
        "tuple": Tuple(list(pose.values())), "dict": Dict(pose), "small_bytes": Box(shape=(4, 9, 3), **byte),
        "hwc": Box(shape=(40, 40, 3), **byte), "chw": Box(shape=(3, 40, 40), **byte),
        "small": Box(shape=(10, 10, 4), **byte), "hw": Box(shape=(10, 12), **byte),
        "many_channels": Box(shape=(16, 10, 10), **byte), "square": Box(shape=(10, 10, 10), **byte),
        "stack": Box(shape=(4, 10, 12), **byte), "stack_hwc": Box(shape=(2, 10, 12, 3), **byte),
        "stack_chw": Box(shape=(2, 3, 10, 12), **byte),
        "dict_image": Dict({"camera": camera, **pose}), "tuple_image": Tuple([Discrete(2), camera]),
        "nested_image": Dict({"robot": Dict({"left": camera, "right": Box(shape=(10, 10), **byte)}), **pose}),
        "only_images": Dict({"a": camera, "b": Box(shape=(4, 10, 10), **byte)}),
        "sequence": Sequence(Discrete(3)), "text": Text(5), "dict_text": Dict({"text": Text(5), **pose}),
    }  # fmt: skip


def action_spaces() -> dict[str, gym.Space]:
    inf, low, high = np.inf, np.array([-1, -2], np.float32), np.array([3, 2], np.float32)
    most = np.finfo(np.float32).max
    return {
        "discrete": Discrete(2), "discrete_start": Discrete(3, start=5),
        "discrete_int8": Discrete(3, dtype=np.int8),
        "multi_discrete": MultiDiscrete([2, 5, 3]), "multi_discrete_2d": MultiDiscrete([[2, 3], [4, 2]]),
        "multi_discrete_start": MultiDiscrete([2, 5], start=[1, -3]),
        "multi_binary": MultiBinary(3), "multi_binary_2d": MultiBinary([2, 3]),
        "box": Box(low, high), "box_2d": Box(-2, 1, (2, 3), np.float32),
        "box_scalar": Box(2, 3, (), np.float32), "box_float64": Box(-3, 5, (2,), np.float64),
        "box_locked": Box(np.array([-2, 0.5], np.float32), np.array([2, 0.5], np.float32)),
        "unbounded": Box(-inf, inf, (2,), np.float32), "float_max": Box(-most, most, (2,), np.float32),
        "half_bounded": Box(np.array([0, -inf], np.float32), np.array([inf, 1], np.float32)),
        "int8": Box(-128, 127, (2,), np.int8), "uint8": Box(100, 250, (2,), np.uint8),
        "int32": Box(-3, 3, (2,), np.int32), "dict": Dict({"a": Discrete(2)}), "text": Text(5),
    }  # fmt: skip


class Spaces(Probe):
    """Any observation space with any action space, by name. Spaces.actions lists what arrives.

    The reward depends on observation and action.
    """

    actions: list = []

    def __init__(self, obs: str = "vector", action: str = "discrete", render_mode: str | None = None):
        self.observation_space, self.action_space = observation_spaces()[obs], action_spaces()[action]
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        return super().reset(seed=seed)

    def observe(self):
        self.obs = self.observation_space.sample()
        return self.obs

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        Spaces.actions.append(action)
        known = gym.spaces.flatten(self.observation_space, self.obs).mean(dtype=np.float64)
        chosen = gym.spaces.flatten(self.action_space, action).astype(np.float64).clip(-9, 9)
        reward = np.cos(known + chosen @ np.arange(1, len(chosen) + 1))
        return self.observe(), float(reward), False, self.t == 7, {}


class Broken(Probe):
    """After `after` steps in rollouts the observation is NaN or the reward inf, as what says."""

    steps = 0

    def __init__(self, what: str = "observation", after: int = 100, length: int = 10, **kwargs):
        super().__init__(**kwargs)
        self.what, self.after, self.length = what, after, length

    def step(self, action):
        self.t += 1
        Broken.steps += not self.evaluates
        broken = Broken.steps > self.after and not self.evaluates
        obs, reward = self.observe() + 0.1 * self.t, 1.0
        if broken and self.what == "observation":
            obs[1] = np.nan
        elif broken:
            reward = np.inf
        return obs, reward, False, self.t == self.length, {}


class Success(Probe):
    """Two steps. In both info["is_success"] says whether the seed of the episode is even."""

    def step(self, action):
        self.t += 1
        return self.observe(), 0.5, self.t == 2, False, {"is_success": self.first_seed % 2 == 0}


class Walk(Probe):
    """A noisy walk; pays for staying near its task, 0 unless told, terminates beyond +-edge, is truncated
    after length steps.

    signal is sent to this process, `times` times, at step number `after` of the rollouts ("rollout") or of
    the evaluations ("evaluation") that this process has played since forget().
    """

    count = {"rollout": 0, "evaluation": 0}

    def __init__(
        self, signal="", phase="rollout", after=0, times=1, discrete_obs=False, length=20, edge=1.0, **kwargs
    ):
        super().__init__(**kwargs)
        self.signal, self.phase, self.after, self.times = signal, phase, after, times
        self.length, self.edge = length, edge
        self.discrete_obs, self.x = discrete_obs, 0.0
        self.observation_space = Discrete(30) if discrete_obs else Box(-10, 10, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.x = 0.0
        return super().reset(seed=seed)

    def observe(self):
        if self.discrete_obs:
            return int(np.clip(10 * self.x + 15, 0, 29))
        return np.array([self.x, self.t / 20], dtype=np.float32)

    def step(self, action):
        phase = "evaluation" if self.evaluates else "rollout"
        Walk.count[phase] += 1
        if self.signal and phase == self.phase and Walk.count[phase] == self.after:
            for _ in range(self.times):
                os.kill(os.getpid(), getattr(signal, self.signal))
                time.sleep(0.02)  # two that wait for Python at once are one
        self.t += 1
        push = 2.0 * action - 1 if isinstance(self.action_space, Discrete) else float(action[0])
        self.x += 0.15 * push + self.np_random.normal(0, 0.1)
        return self.observe(), 1 - abs(self.x - self.task), abs(self.x) > self.edge, self.t == self.length, {}


class LQ(gym.Env):
    """x' = x + u / 2 costs x^2 + u^2 / 5; truncated after 5 steps, never terminated."""

    observation_space, action_space = Box(-10, 10, (1,), np.float32), Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1), 0
        return np.array([self.x], dtype=np.float32), {}

    def step(self, action):
        u = float(action[0])
        reward = -(self.x**2 + 0.2 * u**2)
        self.x, self.t = self.x + 0.5 * u, self.t + 1
        return np.array([self.x], dtype=np.float32), reward, False, self.t == 5, {}


class Sometimes(Masked):
    """Gives a mask at reset only, or in steps only."""

    def __init__(self, at_reset: bool = True, render_mode: str | None = None):
        super().__init__(render_mode=render_mode)
        self.at_reset = at_reset

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, info if self.at_reset else {}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(np.flatnonzero(self.mask())[0])
        return obs, reward, terminated, truncated, {} if self.at_reset else info


class Greedy(Walk):
    """Draws from the global random states of NumPy and torch in evaluations."""

    def step(self, action):
        if self.evaluates:
            np.random.random(3), torch.rand(3), random.random()
        return super().step(action)


class Raises(Probe):
    """A bug: step raises KeyError."""

    def step(self, action):
        return {}["a bug of the user"]


class Slow(Walk):
    """A step takes 2 ms."""

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


class Endless(Probe):
    """Never ends by itself and has no time limit."""

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, False, {}


def forget() -> None:
    """All counts and lists of this process are empty again."""
    Walk.count = {"rollout": 0, "evaluation": 0}
    Broken.steps = 0
    for log in (Boundary.steps, Boxes.actions, Spaces.actions):
        log.clear()


PROBES = (
    Boundary,
    Ones,
    Boxes,
    Masked,
    Spaces,
    Broken,
    Success,
    Walk,
    LQ,
    Sometimes,
    Greedy,
    Raises,
    Slow,
    Endless,
)
for entry in PROBES:
    name = {"Boxes": "Box"}.get(entry.__name__, entry.__name__)
    gym.register(f"{name}-v0", entry_point=entry, disable_env_checker=True)
