"""Compares algos/dqn.py with Stable-Baselines3 at equal settings, and prioritized with uniform replay.

    python benchmark/dqn_speed.py --pairs 5 --sb3-python PYTHON     # CartPole-v1 and ALE/Pong-v5
    python benchmark/dqn_speed.py --replay                          # cost of a batch from a million entries

The two sides take turns, each time in a new process; the median of the ratios counts. Only steps after
learning starts are timed. Memory is the peak of the process: with --tasks ALE/Pong-v5 --window 100000 that of
100k steps.
"""

import argparse
import csv
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import ROOT, load_script

# The update: batch, environment steps between updates and between target updates, hidden layers, threads.
TASKS = {
    "CartPole-v1": dict(
        batch_size=128, train_every=10, target_update_every=500, learning_starts=2_000, buffer_size=10_000,
        window=20_000, threads=1,
    ),
    "ALE/Pong-v5": dict(
        batch_size=32, train_every=4, target_update_every=1_000, learning_starts=1_000, buffer_size=100_000,
        window=4_000, threads=0,
    ),
}  # fmt: skip


def ours(env_id: str, task: dict) -> dict:
    """Seconds between the first row after learning starts and the last before the final evaluation."""
    warmup, every = task["learning_starts"], max(100, task["window"] // 20)
    total = warmup + task["window"] + 3 * every
    sizes = ["512"] if env_id.startswith("ALE/") else ["120", "84"]
    words = ["--env-id", env_id, "--total-timesteps", total, "--log-every", every, "--eval-every", 0]
    words += ["--eval-episodes", 1, "--checkpoint-every", 0, "--device", "cpu", "--num-envs", 1]
    words += ["--updates-per-train", 1, "--hidden-sizes", *sizes, "--torch-threads", task["threads"]]
    words += ["--exploration-fraction", 0.5, "--epsilon-end", 0.05, "--max-episode-steps", 0]
    for name in ("batch_size", "train_every", "target_update_every", "learning_starts", "buffer_size"):
        words += [f"--{name.replace('_', '-')}", task[name]]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "algos/dqn.py", *map(str, words), "--run-dir", f"{folder}/run"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        with Path(folder, "run/progress.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if warmup + every <= int(row["step"]) < total]
    seconds = float(rows[-1]["wall_time"]) - float(rows[0]["wall_time"])
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    return dict(speed=(int(rows[-1]["step"]) - int(rows[0]["step"])) / seconds, memory=memory)


def peer(env_id: str, task: dict) -> dict:
    """The side of Stable-Baselines3, in its own process."""
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if task["threads"]:
        torch.set_num_threads(task["threads"])
    start = task["learning_starts"] + 100
    total = start + task["window"]

    class Clock(BaseCallback):
        times = {}

        def _on_step(self):
            if self.num_timesteps in (start, total):
                self.times[self.num_timesteps] = time.perf_counter()
            return True

    atari = env_id.startswith("ALE/")
    if atari:
        importlib.import_module("gymnasium").register_envs(importlib.import_module("ale_py"))
        one_frame = {"frameskip": 1, "repeat_action_probability": 0.25}  # AtariWrapper skips the frames
        envs = VecFrameStack(make_atari_env(env_id, n_envs=1, seed=1, env_kwargs=one_frame), 4)
    else:
        envs = make_vec_env(env_id, n_envs=1, seed=1)
    model = DQN(
        "CnnPolicy" if atari else "MlpPolicy", envs,
        batch_size=task["batch_size"], train_freq=task["train_every"],
        buffer_size=task["buffer_size"], learning_starts=task["learning_starts"], gradient_steps=1, seed=1,
        target_update_interval=task["target_update_every"], exploration_fraction=0.5, device="cpu",
        policy_kwargs={} if atari else dict(net_arch=[120, 84]),
    )  # fmt: skip
    clock = Clock()
    model.learn(total, callback=clock)
    speed = task["window"] / (clock.times[total] - clock.times[start])
    return dict(speed=speed, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def replay_cost(batch_size: int = 32, entries: int = 1_000_000, repeats: int = 2_000) -> None:
    """Microseconds of a batch of vectors and of Atari stacks, uniform and prioritized with its update."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box, Discrete

    dqn = load_script("dqn")
    for name, space, stack in (
        ("vectors of 17", Box(-1, 1, (17,), np.float32), 1),
        ("stacks 4x84x84", Box(0, 255, (4, 84, 84), np.uint8), 4),
    ):
        buffer = dqn.ReplayBuffer(entries, 1, space, Discrete(6), torch.device("cpu"), stack)
        priorities = dqn.Priorities(buffer, alpha=0.6, eps=1e-6)
        buffer.valid[4:-4], buffer.filled = True, entries
        buffer.obs.fill_(1)
        buffer.marked = [np.arange(entries)]
        priorities.refresh()
        error = torch.rand(batch_size)

        def prioritized(buffer=buffer, priorities=priorities, error=error):
            index, weight = priorities.draw(batch_size, beta=0.5)
            batch = buffer.gather(index, 0.99) | {"weight": torch.from_numpy(weight)}
            priorities.td_error = error
            return batch

        costs = {"uniform": [], "prioritized": []}
        for _ in range(5):
            for kind, draw in {
                "uniform": lambda buffer=buffer: buffer.sample(batch_size, 0.99),
                "prioritized": prioritized,
            }.items():
                start = time.perf_counter()
                for _ in range(repeats):
                    draw()
                costs[kind].append((time.perf_counter() - start) / repeats * 1e6)
        one, two = (statistics.median(costs[kind]) for kind in costs)
        times = f"{one:.0f} us, prioritized {two:.0f} us, {two / one:.2f} x"
        print(f"{name}, batch {batch_size} of {entries}: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what to measure")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--window", type=int, help="environment steps that are timed")
    parser.add_argument("--replay", action="store_true", help="instead: cost of drawing a batch")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # a request, in a process of its own
    args = parser.parse_args()
    if args.side:
        request = json.loads(args.side)
        side = {"ours": ours, "peer": peer}[request["side"]]
        print(json.dumps(side(request["env_id"], request["task"])))
        return
    if args.replay:
        replay_cost()
        return
    for env_id in args.tasks:
        task = TASKS[env_id] | ({"window": args.window} if args.window else {})
        ratios = []
        for pair in range(1, args.pairs + 1):
            answers = {}
            for side, python in {"ours": sys.executable, "peer": args.sb3_python}.items():
                request = json.dumps(dict(side=side, env_id=env_id, task=task))
                words = [python, str(Path(__file__).resolve()), "--side", request]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                answers[side] = json.loads(done.stdout.strip().splitlines()[-1])
            ratios.append(answers["ours"]["speed"] / answers["peer"]["speed"])
            text = ", ".join(f"{s} {a['speed']:.0f} steps/s {a['memory']:.2f} GB" for s, a in answers.items())
            print(f"{env_id} pair {pair}: {text}, {ratios[-1]:.2f} x", flush=True)
        print(f"{env_id}: {statistics.median(ratios):.2f} x as fast (median)")


if __name__ == "__main__":
    main()
