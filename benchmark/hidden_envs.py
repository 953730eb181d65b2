"""Environments that hide what matters, for ppo_lstm.py, or the reward, for ppo_rnd.py and variants of dqn.py.
From this project:

    python algos/ppo_lstm.py --env-id benchmark.hidden_envs:CartPoleNoVel-v1
    python algos/ppo_lstm.py --env-id benchmark.hidden_envs:TMaze-v0 --env-kwargs '{"delay": 30}'
    python algos/ppo_lstm.py --env-id benchmark.hidden_envs:Recall-v0 --total-timesteps 150000
    python algos/ppo_lstm.py --env-id benchmark.hidden_envs:Doors-v0 --total-timesteps 100000
    python algos/ppo_rnd.py --env-id benchmark.hidden_envs:SparseGrid-v0
    python algos/dqn.py --env-id benchmark.hidden_envs:Chain-v0 --noisy --total-timesteps 15000

Suite dqn_switches has the settings for Chain-v0, Gambles-v0 and Lock-v0. Elsewhere copy this file beside the
script and write hidden_envs:CartPoleNoVel-v1.
"""

from functools import partial

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up


class Partly(gym.ObservationWrapper):
    """Only these entries of the observations of an environment."""

    def __init__(self, env_id: str, entries: list[int], **kwargs):
        super().__init__(gym.make(env_id, max_episode_steps=-1, disable_env_checker=True, **kwargs))
        space, self.entries = self.env.observation_space, entries
        self.observation_space = Box(space.low[entries], space.high[entries], dtype=space.dtype)

    def observation(self, obs):
        return obs[self.entries]


class TMaze(gym.Env):
    """A corridor of delay steps that ends in a junction: left or right? Only the first observation tells.

    Observes [cue, junction]: cue is -1 or 1 at the entrance, else 0; junction is 1 there, else 0. Every step
    leads onwards; the action at the junction, 0 if the cue was -1, 1 if it was 1, pays 1 and all else 0. So
    the return is the share of right turns, and 0.5 what can be had without memory (Bakker 2001, where the
    walk through the corridor is to be learned too).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(2)

    def __init__(self, delay: int = 10, render_mode: str | None = None):
        self.delay, self.render_mode = delay, render_mode

    def observe(self):
        return np.array([self.cue if self.t == 0 else 0, self.t == self.delay], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, self.np_random.choice([-1, 1])
        return self.observe(), {}

    def step(self, action):
        end = self.t == self.delay
        right = bool(end and action == (self.cue + 1) // 2)
        self.t += 1
        return self.observe(), float(right), bool(end), False, {"is_success": right}

    def render(self):
        """The corridor from left to right: walls dark, the cue green where the reward is, the agent blue."""
        image = np.full((3, self.delay + 2, 3), 40, dtype=np.uint8)
        image[1, :-1] = image[:, self.delay] = 255
        image[1 + self.cue, self.delay] = 0, 160, 0
        image[1, min(self.t, self.delay)] = 0, 0, 255
        return image.repeat(16, axis=0).repeat(16, axis=1)


class Recall(gym.Env):
    """One of so many cues at first, silence for delay steps, then the question: which was it?

    Observes a number per cue, 1 for the one that is shown and 0 otherwise, and whether it is time to answer.
    The right answer pays 1 and ends the episode, a wrong one only ends it; guessing earns 1 / cues.
    """

    def __init__(self, cues: int = 4, delay: int = 20):
        self.cues, self.delay = cues, delay
        self.observation_space, self.action_space = Box(0, 1, (cues + 1,), np.float32), Discrete(cues)

    def observe(self):
        obs = np.zeros(self.cues + 1, np.float32)
        obs[self.cue], obs[-1] = self.t == 0, self.t == self.delay
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(self.cues))
        return self.observe(), {}

    def step(self, action):
        end = self.t == self.delay
        right = bool(end and action == self.cue)
        self.t += 1
        return self.observe(), float(right), bool(end), False, {"is_success": right}


class Doors(gym.Env):
    """A T-maze with walls across the corridor: each has so many doors, and one of them is open.

    Observes the cue, -1 or 1 at the entrance and else 0; whether this is the junction; and for each door
    whether it is open. A closed door costs a step. At the junction the first and the last door are open: the
    first one pays 1 if the cue was -1, the last one if it was 1. With masks, info["action_mask"] allows only
    open doors.
    """

    def __init__(self, walls: int = 20, doors: int = 8, masks: bool = True):
        self.walls, self.masks = walls, masks
        self.observation_space, self.action_space = Box(-1, 1, (2 + doors,), np.float32), Discrete(doors)

    def at_wall(self, cue=0):
        """Observation and info in front of the next wall."""
        self.open = np.zeros(self.action_space.n, np.int8)
        self.open[[0, -1] if self.passed == self.walls else self.np_random.integers(len(self.open))] = 1
        return self.observe(cue)

    def observe(self, cue=0):
        obs = np.array([cue, self.passed == self.walls, *self.open], dtype=np.float32)
        return obs, {"action_mask": self.open} if self.masks else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.passed, self.cue = 0, self.np_random.choice([-1, 1])
        return self.at_wall(self.cue)

    def step(self, action):
        if not self.open[action]:
            obs, info = self.observe()
            return obs, 0.0, False, False, info | {"is_success": False}
        end = self.passed == self.walls
        right = bool(end and action == (0 if self.cue < 0 else len(self.open) - 1))
        self.passed += not end
        obs, info = self.at_wall()
        return obs, float(right), end, False, info | {"is_success": right}


class SparseGrid(gym.Env):
    """Rooms in a row with doors at the bottom and at the top in turns; a reward of 1 only in the far corner.

    Observes (column, row). A step against a wall changes nothing. The way through four rooms of 9 x 9 has 70
    steps; in the 200 of an episode a random walk sees little more than the first room.
    """

    def __init__(self, rooms: int = 4, size: int = 9):
        self.columns, self.size = rooms * (size + 1) - 1, size
        self.goal = (self.columns - 1, 0 if rooms % 2 == 0 else size - 1)  # not on the side of the last door
        self.observation_space, self.action_space = MultiDiscrete([self.columns, size]), Discrete(4)

    def is_free(self, column: int, row: int) -> bool:
        room, inside = divmod(column, self.size + 1)
        door = self.size - 1 if room % 2 == 0 else 0
        inner = 0 <= column < self.columns and 0 <= row < self.size
        return inner and (inside < self.size or row == door)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = (0, 0)
        return np.array(self.place), {}

    def step(self, action):
        place = self.place[0] + MOVES[action][0], self.place[1] + MOVES[action][1]
        self.place = place if self.is_free(*place) else self.place
        won = self.place == self.goal
        return np.array(self.place), float(won), won, False, {"is_success": won}


class Chain(gym.Env):
    """A row of places. Each step moves one place to the left or to the right, from the second place on.

    A step that ends in the last place pays 1, in the first 0.001, elsewhere nothing. An episode has size + 9
    steps. Always moving right returns 12, the maximum; random moves hardly ever reach the last place. The
    observation (size,) is 1 up to the current place and 0 beyond (Osband et al. 2016, arXiv 1602.04621).
    """

    action_space = Discrete(2)

    def __init__(self, size: int = 20, render_mode: str | None = None):
        self.size, self.render_mode = size, render_mode
        self.observation_space = Box(0, 1, (size,), np.float32)

    def observe(self):
        return (np.arange(self.size) <= self.place).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.t = 1, 0
        return self.observe(), {}

    def step(self, action):
        self.place = min(max(self.place + (1 if action else -1), 0), self.size - 1)
        self.t += 1
        reward = 1.0 if self.place == self.size - 1 else 0.001 if self.place == 0 else 0.0
        return self.observe(), reward, False, self.t == self.size + 9, {}


class Gambles(gym.Env):
    """So many rounds, one gamble in each. Action 0 walks away with nothing; each other action pays a normally
    distributed reward, mean -0.1 and standard deviation 1, and leads to the next round.

    Always gambling returns -1 on average, walking away 0, the best. Among nine estimates of -0.1 the largest
    is often positive (van Hasselt et al. 2016, arXiv 1509.06461). The observation is the round as a one-hot.
    """

    def __init__(self, rounds: int = 10, actions: int = 10):
        self.rounds = rounds
        self.observation_space, self.action_space = Box(0, 1, (rounds,), np.float32), Discrete(actions)

    def observe(self):
        return (np.arange(self.rounds) == self.round).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.round = 0
        return self.observe(), {}

    def step(self, action):
        self.round += 1
        reward = 0.0 if action == 0 else self.np_random.normal(-0.1)
        return self.observe(), reward, action == 0 or self.round == self.rounds, False, {}


class Lock(gym.Env):
    """A combination lock. In each place one of two actions leads on, the other one back to the start.

    The last place pays 1 and ends the episode. Which action is right was drawn once, the same for all. Of
    2^size random tries one succeeds, so hardly any transition has a reward (as the blind cliff walk of Schaul
    et al. 2016, arXiv 1511.05952). The observation is the place as a one-hot.
    """

    def __init__(self, size: int = 12):
        self.right = np.random.default_rng(0).integers(2, size=size)
        self.observation_space, self.action_space = Box(0, 1, (size,), np.float32), Discrete(2)

    def observe(self):
        return (np.arange(len(self.right)) == self.place).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.observe(), {}

    def step(self, action):
        self.place = self.place + 1 if action == self.right[self.place] else 0
        opened = self.place == len(self.right)
        return self.observe(), float(opened), opened, False, {"is_success": opened}


NO_VELOCITY = {"CartPole-v1": ([0, 2], 500), "Pendulum-v1": ([0, 1], 200),
               "MountainCarContinuous-v0": ([0], 999)}  # fmt: skip
for name, (entries, max_steps) in NO_VELOCITY.items():
    maker = partial(Partly, name, entries)
    gym.register(name.replace("-", "NoVel-"), entry_point=maker, max_episode_steps=max_steps)
gym.register("TMaze-v0", entry_point=TMaze)
gym.register("Recall-v0", entry_point=Recall)
gym.register("LongRecall-v0", entry_point=Recall, kwargs=dict(delay=40))
gym.register("Doors-v0", entry_point=Doors, max_episode_steps=100)
gym.register("SparseGrid-v0", entry_point=SparseGrid, max_episode_steps=200)
gym.register("Chain-v0", entry_point=Chain)
gym.register("Gambles-v0", entry_point=Gambles)
gym.register("Lock-v0", entry_point=Lock, max_episode_steps=100)
