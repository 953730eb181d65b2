"""Draws learning curves of many seeds from benchmark/results, or every logged curve of any runs.

    python benchmark/plot.py --results benchmark/results/ppo__*.csv --out curves.png
    python benchmark/plot.py --results benchmark/results/*__CartPole-v1.csv --together --out compared.png
    python benchmark/plot.py runs/CartPole-v1/ppo/1-20270131-120000
    python benchmark/plot.py runs/CartPole-v1/*/* --out compared

Per environment: mean (solid) and interquartile mean (dashed) over seeds with 95% intervals of a stratified
bootstrap, as Agarwal et al. 2021 (arXiv 2108.13264) recommend. The last panel joins all environments with
a bar, on a scale where 0 is the untrained policy and 1 the bar. --together compares algorithms: one panel per
environment with the means alone, of trainings of any length, in the order of the files, and no joint panel.
A diamond at the end of a curve is the final evaluation, of more episodes than a point of the curve.
"""

import argparse
import csv
import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from suites import SUITES

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("plot.py needs a package that is missing: pip install matplotlib")

# Okabe and Ito 2008, with grey in place of their yellow, which is too light on white
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "font.size": 10, "axes.titlesize": 11, "axes.formatter.use_mathtext": True, "legend.frameon": False,
    "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.08, "savefig.dpi": 130,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- statistics
def mean(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over the runs: scores (..., runs), weights (runs,) -> (...)."""
    return (scores * weights).sum(-1) / weights.sum()


def iqm(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Interquartile mean, of the middle half of the weight: scores (..., runs), weights (runs,) -> (...).

    A run that straddles a quartile counts with the part that lies inside, so any number of runs will do.
    """
    order = scores.argsort(-1)
    share = (weights / weights.sum())[order]
    upper = share.cumsum(-1)
    inside = (np.minimum(upper, 0.75) - np.maximum(upper - share, 0.25)).clip(min=0)
    return (np.take_along_axis(scores, order, -1) * inside).sum(-1) / inside.sum(-1)


def stratified_bootstrap(strata, statistic, resamples=2000, level=0.95, seed=0):
    """Estimate and percentile interval of a statistic, drawing runs with replacement in each stratum alone.

    strata is a list of arrays (runs, points), one per environment; each environment weighs the same, whatever
    its number of runs. Returns estimate, lower and upper bound, (points,) each.
    """
    weights = np.concatenate([np.full(len(runs), 1 / len(runs)) for runs in strata])
    rng = np.random.default_rng(seed)
    draws = np.empty((resamples, strata[0].shape[1]))
    for i in range(resamples):
        drawn = [runs[rng.integers(len(runs), size=len(runs))] for runs in strata]
        draws[i] = statistic(np.concatenate(drawn).T, weights)
    lower, upper = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return statistic(np.concatenate(strata).T, weights), lower, upper


# --------------------------------------------------------------------------------------- curves of many seeds
def read_curves(files: list[Path]) -> dict:
    """{(env_id, algo, total_timesteps): [(steps, returns) of each seed]} from CSVs of run.py."""
    runs = defaultdict(list)
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["kind"] == "curve":
                    key = row["env_id"], row["algo"], int(row["total_timesteps"])
                    runs[(*key, int(row["seed"]))].append((int(row["step"]), float(row["eval_return_mean"])))
    curves = defaultdict(list)
    for (*key, _), points in runs.items():
        curves[tuple(key)].append(tuple(map(np.array, zip(*sorted(points), strict=True))))
    return curves


def read_finals(files: list[Path]) -> dict:
    """{(env_id, algo, total_timesteps): (mean over seeds of the final evaluations, episodes of each)}."""
    runs = defaultdict(list)
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["kind"] == "final":
                    key = row["env_id"], row["algo"], int(row["total_timesteps"])
                    runs[key].append((float(row["eval_return_mean"]), int(row["eval_episodes"])))
    return {key: tuple(np.mean(found, axis=0)) for key, found in runs.items()}


def on_one_grid(seeds: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (points,) up to where all seeds came, and returns (seeds, points), interpolated if need be."""
    end = min(steps[-1] for steps, _ in seeds)
    grid = np.unique(np.concatenate([steps for steps, _ in seeds]))
    grid = grid[grid <= end]
    return grid, np.stack([np.interp(grid, steps, returns) for steps, returns in seeds])


def find_bar(env_id: str, algo: str, total: int) -> float | None:
    cells = [cell for suite in SUITES.values() for cell in suite]
    return next((c.bar for c in cells if (c.env_id, c.name, c.steps) == (env_id, algo, total)), None)


def steps_label(value: float, _=None) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def make_panels(count: int, width: float, height: float):
    """A figure with count panels of this size (inches) in rows of up to four."""
    columns = count if count <= 3 else min(4, math.ceil(count / 2))
    rows = math.ceil(count / columns)
    size = (width * columns + 0.6, height * rows + 0.5)
    figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=size)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


def colours(count: int) -> list:
    """As many colours, no two the same."""
    return COLOURS[:count] if count <= len(COLOURS) else list(plt.get_cmap("turbo")(np.linspace(0, 1, count)))


def draw(axes, x, strata, label: str, colour: str, statistics=(mean, iqm)) -> None:
    for statistic in statistics:
        estimate, lower, upper = stratified_bootstrap(strata, statistic)
        name, dashes = {mean: ("mean", "-"), iqm: ("IQM", "--")}[statistic]
        axes.plot(x, estimate, dashes, color=colour, linewidth=1.6, label=f"{label}, {name}")
        axes.fill_between(
            x, lower, upper, color=colour, alpha=0.18 if statistic is mean else 0.1, linewidth=0
        )


def draw_finals(axes, ends: list[tuple], label: str) -> None:
    """A diamond at each (x, y) in the colour of its curve, and one in the legend for all of them."""
    style = dict(marker="D", linestyle="", markeredgecolor="white", markersize=6, zorder=3)
    for x, y, colour in ends:
        axes.plot(x, y, color=colour, clip_on=False, **style)
    if ends:
        axes.plot([], [], color=ends[0][2] if len(ends) == 1 else "black", label=label, **style)


def draw_results(files: list[Path], out: Path, together: bool = False) -> None:
    """One panel per (environment, length), and one over all environments with a bar if there are two; or,
    together, one panel per environment."""
    curves, finals = read_curves(files), read_finals(files)
    if not curves:
        sys.exit(f"plot.py: no evaluation in {' '.join(map(str, files))}: nothing to draw")
    place = lambda env, total: (env, 0 if together else total)
    panels, joint = sorted({place(env, total) for env, _, total in curves}), defaultdict(list)
    lengths = Counter((env, algo) for env, algo, _ in curves)
    ambiguous = lambda env, algo: together and lengths[env, algo] > 1  # of two lengths in one panel
    name = lambda env, algo, total: f"{algo} {steps_label(total)}" if ambiguous(env, algo) else algo
    names = list(dict.fromkeys(name(*key) for key in curves))
    colour = dict(zip(names, colours(len(names)), strict=True))
    share, joint_ends = np.linspace(0, 1, 51), defaultdict(list)
    for (env_id, algo, total), seeds in sorted(curves.items()):
        steps, returns = on_one_grid(seeds)
        bar, start = find_bar(env_id, algo, total), returns[:, 0].mean()
        if bar is not None and steps[0] == 0 and bar != start:
            score = (returns - start) / (bar - start)
            joint[algo].append(np.stack([np.interp(share, steps / steps[-1], run) for run in score]))
            final, _ = finals.get((env_id, algo, total), (np.nan, 0))
            joint_ends[algo].append((final - start) / (bar - start))
    joint = {algo: strata for algo, strata in joint.items() if len(strata) > 1 and not together}
    count = len(panels) + bool(joint)
    figure, panel = make_panels(count, 6.6 if together else 4.4, 3.3)
    # Many curves leave no room among them.
    beside = dict(loc="upper left", bbox_to_anchor=(1, 1)) if together else {}
    for axes, where in zip(panel, panels, strict=False):
        bars, ends, episodes = {}, [], 0
        for (env_id, algo, total), seeds in curves.items():
            if place(env_id, total) == where:
                steps, returns = on_one_grid(seeds)
                curve = name(env_id, algo, total)
                label = f"{curve} ({len(returns)} seed{'s' if len(returns) > 1 else ''})"
                draw(axes, steps, [returns], label, colour[curve], (mean,) if together else (mean, iqm))
                if (bar := find_bar(env_id, algo, total)) is not None:
                    bars.setdefault(bar, []).append(colour[curve])
                if (env_id, algo, total) in finals:
                    final, episodes = finals[env_id, algo, total]
                    ends.append((steps[-1], final, colour[curve]))
        draw_finals(axes, ends, f"final mean, {episodes:g} episodes")
        for bar, owners in bars.items():
            shared = owners[0] if len(owners) == 1 else "black"
            axes.axhline(bar, color=shared, linestyle=":", linewidth=1.3, label=f"bar {bar:g}")
        axes.set(title=where[0], xlabel="environment steps", ylabel="return of the evaluation")
        axes.xaxis.set_major_formatter(steps_label)
        axes.legend(fontsize=8, **beside)
    if joint:
        axes = panel[-1]
        for algo, strata in joint.items():
            draw(axes, share, strata, f"{algo} ({len(strata)} environments)", colour[algo])
        ends = [(1, np.mean(joint_ends[algo]), colour[algo]) for algo in joint]
        draw_finals(axes, [end for end in ends if np.isfinite(end[1])], "final mean")
        axes.axhline(1, color="black", linestyle=":", linewidth=1.3, label="bar")
        axes.set(title="All environments with a bar", xlabel="share of the training")
        axes.set_ylabel("0: untrained, 1: bar")
        axes.legend(fontsize=8)
    title = "Greedy evaluation during training", "95% bootstrap intervals over seeds"
    figure.suptitle((", " if count > 1 else "\n").join(title), fontsize=12)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    print(out)


# --------------------------------------------------------------------------------------------- curves of runs
def draw_runs(runs: list[Path], out: Path) -> list[Path]:
    """Writes out/{family}.png: a panel for each logged name that starts with family/, a line for each run."""
    families = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if not (run / "progress.jsonl").is_file():
            sys.exit(f"plot.py: {run} has no progress.jsonl: give the folder of a run")
        for line in (run / "progress.jsonl").read_text().splitlines():
            row = json.loads(line)
            for name, value in row.items():
                family, _, metric = name.partition("/")
                if metric:
                    families[family][metric].setdefault(run, []).append((row["step"], value))
    if not families:
        sys.exit("plot.py: nothing is logged yet")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for family, metrics in families.items():
        figure, panel = make_panels(len(metrics), 4.0, 2.7)
        for axes, (metric, lines) in zip(panel, metrics.items(), strict=True):
            for run, points in lines.items():
                steps, values = np.array(points).T
                window = max(1, len(values) // 50)  # smooth long curves so that the eye finds the trend
                smooth = lambda x, n=window: np.convolve(x, np.full(n, 1 / n), mode="valid")
                label = "/".join(run.resolve().parts[-2:]) if len(runs) > 1 and axes is panel[0] else None
                colour = COLOURS[runs.index(run) % len(COLOURS)]
                axes.plot(smooth(steps), smooth(values), color=colour, label=label, linewidth=1.4)
            axes.set(title=metric, xlabel="environment steps")
            axes.xaxis.set_major_formatter(steps_label)
            axes.ticklabel_format(axis="y", scilimits=(-3, 5))
        if len(runs) > 1:
            figure.legend(loc="outside lower center", fontsize=8, ncols=min(3, len(runs)))
        figure.suptitle(family if len(runs) > 1 else f"{family} · {runs[0].resolve().name}", fontsize=12)
        written.append(out / f"{family}.png")
        figure.savefig(written[-1])
        plt.close(figure)
        print(written[-1])
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, compared in the same panels")
    parser.add_argument("--results", nargs="+", type=Path, help="CSV files of benchmark/run.py")
    parser.add_argument("--out", type=Path, help="picture of --results, or folder; default: RUN/plots")
    parser.add_argument("--together", action="store_true", help="algorithms in one panel per environment")
    args = parser.parse_args()
    if bool(args.results) == bool(args.runs) or (args.results and not args.out):
        parser.error("give either run folders or --results FILES --out PICTURE")
    plt.rcParams.update(STYLE)
    if args.runs:
        draw_runs(args.runs, args.out or args.runs[0] / "plots")
    else:
        draw_results(args.results, args.out, args.together)


if __name__ == "__main__":
    main()
