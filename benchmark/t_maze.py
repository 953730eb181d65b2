"""Draws how long PPO keeps a cue with an LSTM, a GRU and no memory, from results of benchmark/run.py.

    python benchmark/run.py --suite t_maze_ablation
    python benchmark/t_maze.py --out docs/img/t_maze.png

The return of an episode of the T-maze is 1 if its cue was still known at the junction, by chance 0.5.
"""

import argparse
import csv
import statistics
import sys
from pathlib import Path

from plot import COLOURS, STYLE, make_panels, plt, save
from run import ROOT, slug
from suites import MEMORIES, SUITES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help="where the CSVs are")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    args = parser.parse_args()
    points = {memory: {} for memory in MEMORIES}  # {memory: {delay: returns of the seeds}}
    for cell in SUITES["t_maze_ablation"]:
        memory, delay = cell.variant.split("_")
        path = args.results / f"{cell.name}__{slug(cell.env_id)}.csv"
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if row["kind"] == "final"]
            points[memory][int(delay)] = [float(row["eval_return_mean"]) for row in rows]
    points = {memory: found for memory, found in points.items() if found}
    if not points:
        sys.exit(f"t_maze.py: {args.results} has none: python benchmark/run.py --suite t_maze_ablation")
    plt.rcParams.update(STYLE)
    figure, (axes, *_) = make_panels(1)
    legend = {}
    for shift, (memory, found), colour in zip((0.96, 1, 1.04), points.items(), COLOURS, strict=False):
        for delay, returns in found.items():
            axes.plot([delay * shift] * len(returns), returns, "o", color=colour, alpha=0.5, markersize=4)
        axes.plot([x * shift for x in found], [statistics.mean(x) for x in found.values()], color=colour)
        legend[{"none": "ppo.py, no memory"}.get(memory, f"ppo_lstm.py, {memory}")] = plt.Line2D(
            [], [], color=colour
        )
    delays = sorted({delay for found in points.values() for delay in found})
    axes.set(xscale="log", xlabel="steps from the cue to the junction", ylabel="share of right turns")
    axes.set_xticks(delays, delays)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=1.3)
    save(figure, "T-maze after 60,000 steps: seeds and their mean", args.out, legend)


if __name__ == "__main__":
    main()
