"""Draws the return in held-out tasks against the steps of training, of algos/pearl.py and algos/maml.py.

    python benchmark/run.py --suite meta
    python benchmark/meta.py --out docs/img/pearl_maml.png

PEARL is scored after two episodes in a task, MAML after a gradient step on its
--episodes-per-task; both are drawn at every evaluation, mean over seeds, from the least to the best.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
from plot import COLOURS, STYLE, plt, save, short
from run import ROOT, rows_of

ENV, LABELS = "PointRobot-v0", {"pearl": "PEARL, after 2 episodes", "maml": "MAML, after 20 episodes"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help="where the CSVs lie")
    args = parser.parse_args()
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    axes.axhline(-5.19, color="black", linestyle=":", label="optimum, if the goal is known")
    for (algo, label), colour in zip(LABELS.items(), COLOURS, strict=False):
        curves = defaultdict(list)  # returns of all seeds by step
        for row in rows_of(args.results / f"{algo}__{ENV}.csv"):
            if row["kind"] == "curve" and int(row["step"]):
                curves[int(row["step"])].append(float(row["eval_return_mean"]))
        seeds = max(map(len, curves.values()))
        steps = sorted(step for step, returns in curves.items() if len(returns) == seeds)
        returns = np.array([curves[step] for step in steps])
        axes.plot(steps, returns.mean(axis=1), color=colour, label=f"{label} (seeds: {seeds})")
        axes.fill_between(steps, returns.min(axis=1), returns.max(axis=1), color=colour, alpha=0.2)
    axes.set(xlabel="environment steps of training", ylabel="return in held-out tasks")
    axes.xaxis.set_major_formatter(short)
    axes.legend(loc="lower right", fontsize=8)
    save(figure, ENV, args.out, {})


if __name__ == "__main__":
    main()
