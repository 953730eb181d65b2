"""Atari games of 10 x 10 pixels (Young & Tian 2019): images from which a CPU learns in minutes.

    pip install minatar
    python algos/dqn.py --env-id benchmark.minatar_envs:MinAtar/Breakout-v1

A channel for each kind of object, also for where it was, so no frames are stacked. Actions are the few that
a game knows, one in ten is the one before it, and games get harder as they go on. Elsewhere copy this file
beside the script and write minatar_envs:MinAtar/Breakout-v1.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from minatar.gym import BaseEnv


class Pixels(gym.ObservationWrapper):
    """Bytes in place of truth values, so that scripts take them for images; films of 160 x 160 pixels."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = Box(0, 255, env.observation_space.shape, np.uint8)
        self.metadata = env.metadata | {"render_fps": 10}

    def observation(self, observation):
        return np.uint8(255) * observation

    def render(self):
        frame = super().render()  # floats, (10, 10, 3)
        return np.uint8(255 * frame).repeat(16, axis=0).repeat(16, axis=1)


def make(game, render_mode=None, **kwargs):
    return Pixels(BaseEnv(game, render_mode, use_minimal_action_set=True, **kwargs))


for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders"):
    name = game.title().replace("_", "")
    gym.register(f"MinAtar/{name}-v1", entry_point=make, kwargs=dict(game=game), max_episode_steps=10_000)
