"""Steps per second of ppo.py in environments of Gymnasium and, with the recipe ppo_envpool, of EnvPool.

    pip install envpool
    python benchmark/envpool.py > benchmark/results/envpool.txt

Each training has 16 environments and rollouts of 128 steps, everything else as in TUNED; it begins in a new
process, and the two sides take turns. What is counted lies between the first update and the last one, so
neither the start nor an evaluation is. Nothing else may run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from run import ROOT, cpu_name

STEPS = {"CartPole-v1": 60_000, "Acrobot-v1": 30_000, "LunarLander-v3": 30_000, "HalfCheetah-v5": 30_000,
         "Hopper-v5": 30_000}  # fmt: skip
WORDS = "--num-envs 16 --num-steps 128 --eval-every 0 --eval-episodes 1 --eval-max-steps 1 --device cpu"


def steps_per_second(script: Path, env_id: str, *words: str) -> float:
    """Of one training, from its first update to its last one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--env-id", env_id, *WORDS.split(), *words]
        command += ["--total-timesteps", str(STEPS[env_id]), "--run-dir", f"{folder}/run"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "run/progress.jsonl").read_text().splitlines()]
    first, *_, last = (row for row in rows if "loss/value" in row)
    return (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="trainings on each side")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "algos").mkdir()
        script = Path(shutil.copy(ROOT / "algos/ppo.py", f"{folder}/algos"))
        subprocess.run(["git", "init", "-q", folder], check=True)
        subprocess.run(["git", "apply", str(ROOT / "recipes/ppo_envpool.patch")], cwd=folder, check=True)
        versions = " ".join(f"{name} {version(name)}" for name in ("gymnasium", "envpool", "torch"))
        print(f"{cpu_name()}, {os.cpu_count()} cores; {versions}; steps per second, medians of {args.pairs}")
        print(f"{'':16} Gymnasium  EnvPool  ratio (range)")
        for env_id in STEPS:
            pairs = [
                (steps_per_second(script, env_id), steps_per_second(script, env_id, "--envpool"))
                for _ in range(args.pairs)
            ]
            ratios = sorted(theirs / ours for ours, theirs in pairs)
            ours, theirs = (statistics.median(x) for x in zip(*pairs, strict=True))
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{env_id:16} {ours:9,.0f}  {theirs:7,.0f}  {ratio}", flush=True)


if __name__ == "__main__":
    main()
