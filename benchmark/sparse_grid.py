"""Rooms in a row with doors at the bottom and at the top in turns; a reward of 1 only in the far corner.

    python algos/ppo_rnd.py --env-id benchmark.sparse_grid:SparseGrid-v0    # in the project's folder

The way through four rooms of 9 x 9 has 70 steps; in the 200 of an episode a random walk sees little more than
the first room.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up


class SparseGrid(gym.Env):
    """Observes (column, row). A step against a wall changes nothing."""

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


gym.register("SparseGrid-v0", entry_point=SparseGrid, max_episode_steps=200)
