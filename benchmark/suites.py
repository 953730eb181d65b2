"""The suites of benchmark/run.py as plain data: what is trained, how long, on how many seeds, and the bar.

A bar is the mean over seeds of the final evaluation that says "this works as it should". It is None where
nothing comparable is published at that length.
"""

from typing import NamedTuple


class Cell(NamedTuple):
    algo: str  # algos/{algo}.py
    env_id: str
    steps: int  # environment steps of training
    seeds: int  # seeds 1, 2, ..., seeds
    bar: float | None = None
    args: tuple[str, ...] = ()  # further arguments of the script


LONG = ("--eval-every", "20000")  # 50 evaluations in 1M steps draw the same curve as 100

SUITES = {
    # Ten seconds, to see that everything works. It says nothing about learning.
    "smoke": [
        Cell(
            "ppo", "CartPole-v1", 10_240, seeds=2,
            args=("--eval-every", "2048", "--checkpoint-every", "2048", "--eval-episodes", "4"),
        )
    ],
    "ppo": [
        Cell("ppo", "CartPole-v1", 100_000, seeds=5, bar=475),
        Cell("ppo", "Acrobot-v1", 300_000, seeds=5, bar=-81),
        Cell("ppo", "Pendulum-v1", 100_000, seeds=5, bar=-180),  # published: -172 and -175
        Cell("ppo", "LunarLander-v3", 1_000_000, seeds=3, bar=240, args=LONG),
        Cell("ppo", "LunarLanderContinuous-v3", 1_000_000, seeds=3, bar=270, args=LONG),
        Cell("ppo", "HalfCheetah-v5", 300_000, seeds=5),
    ],
    # Hours, and a GPU for Atari. The bars were measured otherwise: HalfCheetah is one run of RL Baselines3
    # Zoo, the other MuJoCo tasks are Tianshou's maximum over training, both on -v3; Atari had no sticky
    # actions. Pong and BeamRider are single runs of RL Baselines3 Zoo; Breakout is a mean of training returns
    # of CleanRL on EnvPool.
    "ppo_long": [
        Cell("ppo", "HalfCheetah-v5", 1_000_000, seeds=5, bar=5819, args=LONG),
        Cell("ppo", "Hopper-v5", 1_000_000, seeds=5, bar=2609, args=LONG),
        Cell("ppo", "Walker2d-v5", 1_000_000, seeds=5, bar=3589, args=LONG),
        Cell("ppo", "Ant-v5", 1_000_000, seeds=5, bar=3258, args=LONG),
        Cell("ppo", "ALE/Pong-v5", 10_000_000, seeds=3, bar=21),
        Cell("ppo", "ALE/Breakout-v5", 10_000_000, seeds=3, bar=466),
        Cell("ppo", "ALE/BeamRider-v5", 10_000_000, seeds=3, bar=3397),
    ],
}  # fmt: skip

# Published results, which docs/{algo}.md puts beside ours; each was measured in its own way, as it says.
PUBLISHED = {
    (
        "ppo",
        "CartPole-v1",
    ): "500 at 100k (RL Baselines3 Zoo, one run); 490 at 500k (CleanRL, training return)",
    ("ppo", "Acrobot-v1"): "-81.3 at 300k (SLM-Lab, training return); -73.5 at 1M (Zoo, one run)",
    ("ppo", "Pendulum-v1"): "-172.2 at 100k (RL Baselines3 Zoo, one run, with gSDE)",
    ("ppo", "LunarLander-v3"): "242.1 at 1M on -v2 (RL Baselines3 Zoo, one run)",
    ("ppo", "LunarLanderContinuous-v3"): "270.9 at 1M on -v2 (RL Baselines3 Zoo, one run)",
    ("ppo", "HalfCheetah-v5"): "1442.6 at 1M on -v4 (CleanRL, training return); none known at 300k",
}
