"""Two tasks with goals, for hindsight (docs/sac.md): rewards are -1 until the goal is reached, then 0.

    git apply recipes/sac_her.patch
    python algos/sac.py --env-id benchmark.goal_envs:Reach-v0 --total-timesteps 6000 --learning-starts 500

An observation is a Dict of observation, achieved_goal and desired_goal, as in gymnasium-robotics. Episodes
end by their time limit alone.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class GoalEnv(gym.Env):
    """goal, self.goal and state are vectors of size numbers; near is how close counts as reached."""

    size, near = 2, 0.05

    def __init__(self):
        box = Box(-1, 1, (self.size,), np.float32)
        self.observation_space = Dict(observation=box, achieved_goal=box, desired_goal=box)

    def compute_reward(self, achieved_goal, desired_goal, info) -> np.ndarray:
        """(..., size) -> (...)."""
        far = np.linalg.norm(achieved_goal - desired_goal, axis=-1) > self.near
        return -far.astype(np.float64)

    def observe(self) -> dict:
        return dict(
            observation=self.state.copy(), achieved_goal=self.state.copy(), desired_goal=self.goal.copy()
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.goal = self.draw(), self.draw()
        return self.observe(), {}

    def step(self, action):
        self.move(action)
        reward = float(self.compute_reward(self.state, self.goal, {}))
        return self.observe(), reward, False, False, {"is_success": reward == 0}


class Reach(GoalEnv):
    """A point in a square moves at most 0.1 a step in each direction. Goals are drawn anywhere in it."""

    action_space = Box(-1, 1, (2,), np.float32)

    def draw(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def move(self, action):
        self.state = (self.state + 0.1 * action).clip(-1, 1).astype(np.float32)


class BitFlip(GoalEnv):
    """An action flips one of the bits, -1 or 1. The goal is another pattern (Andrychowicz et al. 2017)."""

    def __init__(self, bits: int = 16):
        self.size, self.action_space = bits, Discrete(bits)
        super().__init__()

    def draw(self):
        return self.np_random.choice([-1.0, 1.0], self.size).astype(np.float32)

    def move(self, action):
        self.state[action] *= -1


gym.register("Reach-v0", Reach, max_episode_steps=50)
gym.register("BitFlip-v0", BitFlip, max_episode_steps=16)
