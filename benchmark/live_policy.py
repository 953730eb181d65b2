"""Trains the small policy of docs/live.md with algos/ppo.py, and writes its weights for the browser.

    python benchmark/live_policy.py --out docs/live_policy.json

One seed, 100,000 steps of CartPole-v1, about half a minute on one core. The JSON holds the command of the
training, the mean return of 10 evaluation episodes, and the layers of the actor, input first: for each
its weights (outputs, inputs) and biases, rounded to five significant digits. Between layers comes tanh, and
the softmax of the last one gives the probabilities of a push to the left and to the right.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from run import ROOT, load_script

HIDDEN, SEED = 16, 1


def layers(run: Path) -> list[dict]:
    """The layers of the actor in the last checkpoint of a run."""
    agent = load_script("ppo").load_policy(run).agent
    rounded = lambda x: [float(f"{value:.5g}") for value in x]
    return [
        {"weights": [rounded(row) for row in layer.weight.tolist()], "biases": rounded(layer.bias.tolist())}
        for layer in (*agent.actor.layers, agent.head.logits)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="NAME.json")
    parser.add_argument("--steps", type=int, default=100_000, help="of the training")
    args = parser.parse_args()
    sizes, steps = f"--hidden-sizes {HIDDEN} {HIDDEN}", f"--eval-every 0 --total-timesteps {args.steps}"
    command = f"algos/ppo.py --env-id CartPole-v1 --seed {SEED} {sizes} --device cpu {steps}"
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, *shlex.split(command), "--run-dir", folder]
        subprocess.run(train, cwd=ROOT, check=True)
        rows = [json.loads(line) for line in (Path(folder) / "progress.jsonl").read_text().splitlines()]
        policy = {
            "command": f"python {command}",
            "eval_return_mean": next(row["eval/return_mean"] for row in rows if "eval/return_mean" in row),
            "layers": layers(Path(folder)),
        }
    args.out.write_text(json.dumps(policy) + "\n")
    print(f"{args.out}: {args.out.stat().st_size / 1000:.1f} kB, return {policy['eval_return_mean']:.1f}")


if __name__ == "__main__":
    main()
