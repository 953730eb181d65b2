"""Steps per second of our scripts on a GPU, with --compile and without, and on the CPU of that machine.

    python benchmark/cuda_speed.py --out benchmark/results/cuda_speed.csv      # at most 9 minutes
    python benchmark/cuda_speed.py --sb3-python peer/bin/python                # beside Stable-Baselines3, too

Each training runs for some seconds in a process of its own; what counts is a window after its warm-up.
LeanRL's own figures, of an H100, stand beside them (frames per second, with compile and CUDA graphs).
"""

import argparse
import csv
import sys
from pathlib import Path

from run import ROOT
from speed import TASKS, run_peer, speed_of_ours

SHORT = dict(num_envs=16, num_steps=128, warmup=2, window=10)
ROWS = {  # name: task of speed.py, and LeanRL's frames per second where it tells them
    "ppo ALE/Pong-v5 8x128": (TASKS["ALE/Pong-v5"]._replace(warmup=4, window=20), 6809),
    "ppo HalfCheetah-v5 1x2048": (TASKS["HalfCheetah-v5"]._replace(window=4), 1774),
    "ppo HalfCheetah-v5 16x128": (TASKS["CartPole-v1"]._replace(env_id="HalfCheetah-v5", **SHORT), None),
    "sac HalfCheetah-v5": (TASKS["sac HalfCheetah-v5"], 725),
    "td3 HalfCheetah-v5": (TASKS["td3 HalfCheetah-v5"], 936),
    "dqn ALE/Pong-v5": (TASKS["dqn ALE/Pong-v5"], None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sb3-python", help="interpreter with Stable-Baselines3, to measure it on the CPU")
    parser.add_argument("--out", type=Path, help="CSV to write")
    args = parser.parse_args()
    sides = {words: f"--device {words}".split() for words in ("cuda", "cpu", "cuda --compile")}
    table = csv.writer(args.out.open("w", newline="") if args.out else sys.stdout, lineterminator="\n")
    table.writerow(["task", *sides, "LeanRL on an H100", "Stable-Baselines3 on the CPU"])
    for name, (task, published) in ROWS.items():
        script = ROOT / f"algos/{task.algo}.py"
        speeds = [speed_of_ours(script, task, words)["steps_per_second"] for words in sides.values()]
        peer = run_peer(args.sb3_python, **task._asdict())["steps_per_second"] if args.sb3_python else ""
        table.writerow([name, *speeds, published, peer])


if __name__ == "__main__":
    main()
