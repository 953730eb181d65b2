"""Trains algos/bc.py with few and many episodes that the expert labels, and draws the returns.

    python benchmark/bc_episodes.py --out docs/img/bc_episodes.png

Behavioural cloning: the expert plays all of them. DAgger: it plays the first one; the others, in four
iterations, are the learner's. Both have the same number of gradient steps. Rows, one a seed, go to
benchmark/results/bc_episodes.csv; what is there already is not trained again. The experts are those of the
suite bc: docs/bc.md tells how they are made.
"""

import argparse
import csv
import statistics
from pathlib import Path

from plot import COLOURS, STYLE, make_panels, plt  # says so if matplotlib is missing
from run import ROOT, load_script

EXPERTS = {"CartPole-v1": "ppo", "Pendulum-v1": "sac"}
EPISODES, SEEDS, SCORED = (1, 5, 9, 17, 33), (1, 2, 3, 4, 5), "100"
COLUMNS = ("env_id", "method", "episodes", "seed", "return_mean")


def score(script, folder: Path) -> float:
    return script.train(script.parse_args(["--evaluate", str(folder), "--eval-episodes", SCORED])).mean()


def train(bc, env_id: str, method: str, episodes: int, seed: int, runs: Path) -> float:
    """Mean return of a learner that was trained with so many episodes."""
    rest = (episodes - 1) // 4  # of each iteration
    dagger = dict(expert_episodes=1, dagger_iterations=4, dagger_episodes=rest)
    changes = dagger if method == "DAgger" and rest else dict(expert_episodes=episodes)
    folder = runs / f"{method}-{env_id}-{episodes}-{seed}"
    changes |= dict(expert=str(ROOT / "runs/experts" / env_id), eval_every=0, checkpoint_every=0)
    bc.train(bc.make_args(env_id, seed=seed, run_dir=str(folder), **changes))
    return score(bc, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--runs", type=Path, default=ROOT / "benchmark/runs/bc_episodes")
    parser.add_argument("--table", type=Path, default=ROOT / "benchmark/results/bc_episodes.csv")
    args = parser.parse_args()
    rows = {}
    if args.table.exists():
        with args.table.open(newline="") as file:
            rows = {tuple(row)[:4]: float(row[4]) for row in list(csv.reader(file))[1:]}
    bc, methods = load_script("bc"), ("behavioural cloning", "DAgger")
    for env_id, algo in EXPERTS.items():
        expert = (env_id, "expert", "", "")
        rows[expert] = rows.get(expert) or score(load_script(algo), ROOT / "runs/experts" / env_id)
        for cell in ((m, e, s) for s in SEEDS for e in EPISODES for m in methods):
            if (key := (env_id, *map(str, cell))) not in rows:
                rows[key] = train(bc, env_id, *cell, args.runs)
            with args.table.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(
                    [COLUMNS, *((*k, round(x, 2)) for k, x in rows.items())]
                )
    plt.rcParams.update(STYLE)
    figure, panels = make_panels(2, 4.5, 3.2)
    for axes, env_id in zip(panels, EXPERTS, strict=True):
        axes.axhline(rows[env_id, "expert", "", ""], color="black", linestyle=":", label="expert")
        for method, colour in zip(methods, COLOURS, strict=False):
            seeds = [[rows[env_id, method, str(e), str(s)] for s in SEEDS] for e in EPISODES]
            axes.plot(EPISODES, [statistics.mean(x) for x in seeds], "o-", color=colour, label=method)
            axes.fill_between(
                EPISODES, [min(x) for x in seeds], [max(x) for x in seeds], color=colour, alpha=0.2
            )
        axes.set(title=env_id, xlabel="episodes labelled by the expert", ylabel="return", xscale="log")
        axes.set_xticks(EPISODES, EPISODES)
    panels[0].legend()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
