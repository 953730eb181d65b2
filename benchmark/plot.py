"""Draws learning curves: of any run folders, or of many seeds from benchmark/results.

    python benchmark/plot.py runs/CartPole-v1/ppo/1-20270131-120000
    python benchmark/plot.py runs/CartPole-v1/*/* --out compared
    python benchmark/plot.py --cells "ppo/*" "a2c/CartPole-v1" --out curves.png

What can be compared shares a panel; with --apart each gets its own.

Runs: a picture for each family of logged names, a panel for each name. Runs whose arguments differ in the
seed alone are one group: its mean, and a band from minimum to maximum.

Cells: a panel for each environment, and a last one that joins those with a bar. A lone curve has mean
(solid) and interquartile mean (dashed) over seeds, several curves have the mean, as Agarwal et al. 2021
(arXiv 2108.13264) recommend. More in benchmark/README.md.
"""

import argparse
import json
import math
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from run import ROOT, iqm, read_cells, short
from suites import SUITES

plt.switch_backend("Agg")  # no window
# Okabe and Ito 2008, with grey in place of their yellow, which is too light on white
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "font.size": 10, "axes.titlesize": 10, "axes.formatter.use_mathtext": True, "legend.frameon": False,
    "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.08, "savefig.dpi": 150,
}  # fmt: skip
DIAMOND = dict(marker="D", linestyle="", markeredgecolor="white", markersize=7, zorder=3, clip_on=False)


# ------------------------------------------------------------------------------------------------- statistics
def mean(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean over the runs: scores (..., runs), weights (runs,) -> (...)."""
    return (scores * weights).sum(-1) / weights.sum()


def stratified_bootstrap(strata, statistic, resamples=2000):
    """Estimate, lower and upper bound (points,) of a 95% percentile interval of a statistic.

    Runs are drawn with replacement in each stratum, (runs, points) of one environment; all weigh the same.
    """
    weights = np.concatenate([np.full(len(runs), 1 / len(runs)) for runs in strata])
    rng, draws = np.random.default_rng(0), []
    for _ in range(resamples):
        drawn = [runs[rng.integers(len(runs), size=len(runs))] for runs in strata]
        draws.append(statistic(np.concatenate(drawn).T, weights))
    lower, upper = np.quantile(draws, [0.025, 0.975], axis=0)
    return statistic(np.concatenate(strata).T, weights), lower, upper


def on_one_grid(seeds: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (points,) that all seeds reached, and values (seeds, points), interpolated if need be."""
    start, end = max(steps[0] for steps, _ in seeds), min(steps[-1] for steps, _ in seeds)
    grid = np.unique(np.concatenate([steps for steps, _ in seeds]))
    grid = grid[(grid >= start) & (grid <= end)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in seeds])


# ----------------------------------------------------------------------------------------------------- panels
def make_panels(count: int, width=4.5, height=3.0):
    """A figure with count panels. Two columns are 9 inches wide: text of 10 points is read on a page."""
    columns, rows = min(count, 2), math.ceil(count / 2)
    width, height = (max(width, 6.5), max(height, 3.4)) if count == 1 else (width, height)
    figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=(width * columns, height * rows + 0.8))
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


def colours(names: list[str]) -> dict:
    """A colour for each name, no two the same."""
    names = list(dict.fromkeys(names))
    many = plt.get_cmap("turbo")(np.linspace(0, 1, len(names)))
    return dict(zip(names, COLOURS if len(names) <= len(COLOURS) else many, strict=False))


def save(figure, title: str, out: Path, legend: dict) -> None:
    """Writes the picture, with a title and a legend {label: line} below all panels if there are such."""
    if title:
        figure.suptitle(title, fontsize=11)
    if legend:
        fit = int(11 * figure.get_figwidth() / (max(map(len, legend)) + 8))  # eleven letters in an inch
        columns = max(1, min(4, len(legend), fit))
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    if out.suffix == ".png":  # with 256 colors it is a third as large
        near = dict(method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
        with Image.open(out) as picture:
            picture.convert("RGB").quantize(**near).save(out, optimize=True, dpi=picture.info["dpi"])
    print(out)


# ---------------------------------------------------------------------------------------------------- results
class Curve(NamedTuple):
    """An algorithm in an environment, trained for one number of steps."""

    env_id: str
    name: str  # in the legend
    steps: np.ndarray  # (points,)
    returns: np.ndarray  # (seeds, points)
    final: float  # mean over the seeds
    bar: float | None


def curves_of(runs: list[dict], evaluations: list[dict]) -> list[Curve]:
    key = lambda row: (row["algo"], row["env_id"], int(row["total_timesteps"]))
    points, finals = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for row in evaluations:
        points[key(row)][row["seed"]].append((int(row["step"]), float(row["return_mean"])))
    for run in runs:
        finals[key(run)].append(float(run["final_return_mean"]))
    bars = {(cell.name, cell.env_id, cell.steps): cell.bar for suite in SUITES.values() for cell in suite}
    curves = []
    for key, seeds in points.items():
        algo, env_id, total = key
        several = sum(other[:2] == key[:2] for other in points) > 1
        name = f"{algo} {short(total)}" if several else algo
        grid = on_one_grid([np.array(sorted(seed)).T for seed in seeds.values()])
        curves.append(Curve(env_id, name, *grid, np.mean(finals[key]), bars.get(key)))
    return curves


def draw(axes, x, strata: list[np.ndarray], final: float, colour, alone: bool) -> None:
    """One curve with its interval and the diamond of its final evaluation, alone also with its IQM."""
    for statistic in (mean, iqm) if alone and len(strata[0]) > 1 else (mean,):
        estimate, lower, upper = stratified_bootstrap(strata, statistic)
        dashes, alpha = ("-", 0.18) if statistic is mean else ("--", 0.1)
        axes.plot(x, estimate, dashes, color=colour, linewidth=1.6)
        axes.fill_between(x, lower, upper, color=colour, alpha=alpha, linewidth=0)
    axes.plot(x[-1], final, color=colour, **DIAMOND)


def draw_cells(runs: list[dict], evaluations: list[dict], out: Path, apart: bool = False) -> None:
    """One panel per environment, or apart per curve, and one over all environments with a bar."""
    curves = curves_of(runs, evaluations)
    if not curves:
        sys.exit("plot.py: these cells have no evaluation: nothing to draw")
    colour, panels, joint = colours([curve.name for curve in curves]), defaultdict(list), defaultdict(list)
    for curve in curves:
        panels[(curve.env_id, curve.name) if apart else curve.env_id].append(curve)
        if curve.bar is not None:
            joint[curve.name].append(curve)
    joint = {name: own for name, own in joint.items() if len(own) > 1}
    figure, axes_of = make_panels(len(panels) + bool(joint))
    for axes, where in zip(axes_of, sorted(panels), strict=False):
        own, bars = panels[where], defaultdict(list)
        for curve in own:
            draw(axes, curve.steps, [curve.returns], curve.final, colour[curve.name], len(own) == 1)
            if curve.bar is not None:
                bars[curve.bar].append(colour[curve.name])
        for bar, owners in bars.items():
            axes.axhline(bar, color=owners[0] if len(owners) == 1 else "black", linestyle=":", linewidth=1.3)
        counts = sorted({len(curve.returns) for curve in own})
        seeds = f"{'–'.join(map(str, counts))} seed{'s' if counts != [1] else ''}"
        title = [own[0].env_id.rpartition(":")[2], seeds]
        title += [f"bar {', '.join(f'{bar:g}' for bar in sorted(bars))}"] if bars else []
        title = f"{own[0].name}\n{', '.join(title)}" if apart else ", ".join(title)
        axes.set(title=title, xlabel="environment steps", ylabel="return")
        axes.xaxis.set_major_formatter(short)
    if joint:
        axes, share = axes_of[-1], np.linspace(0, 1, 51)
        for name, own in joint.items():
            strata, finals = [], []
            for curve in own:
                done, start = curve.steps / curve.steps[-1], curve.returns[:, 0].mean()
                seeds = (curve.returns - start) / (curve.bar - start)
                strata.append(np.stack([np.interp(share, done, seed) for seed in seeds]))
                finals.append((curve.final - start) / (curve.bar - start))
            draw(axes, share, strata, np.mean(finals), colour[name], len(joint) == 1)
        axes.axhline(1, color="black", linestyle=":", linewidth=1.3)
        title = "all environments with a bar"
        axes.set(title=title, xlabel="share of the training", ylabel="0: untrained, 1: bar")
    line = lambda *style, color="black", **more: plt.Line2D([], [], *style, color=color, **more)
    several = any(len(curve.returns) > 1 for curve in curves)
    legend = {f"{name}, mean" if several else name: line(color=colour[name]) for name in colour}
    if several and any(len(own) == 1 for own in panels.values()):
        legend["interquartile mean"] = line(linestyle="--")
    legend["final evaluation"] = line(**DIAMOND)
    if any(curve.bar is not None for curve in curves):
        legend["bar"] = line(linestyle=":")
    intervals = ", 95% bootstrap intervals over seeds" if several else ""
    save(figure, f"Evaluations during training{intervals}", out, legend)


# ------------------------------------------------------------------------------------------------------- runs
def group_runs(runs: list[Path]) -> dict[str, list[Path]]:
    """{label: runs whose arguments differ in the seed alone}; a label says what differs between groups."""
    groups = defaultdict(list)
    for run in runs:
        settings = json.loads((run / "args.json").read_text())
        settings = {k: v for k, v in settings.items() if k not in ("seed", "run_dir", "resume")}
        settings["script"] = min((path.stem for path in run.glob("*.py")), key=len, default="")
        groups[json.dumps(settings)].append(run)
    every, labels = [json.loads(text) for text in groups], []
    for own in every:
        same = [x for x in every if x["script"] == own["script"] and x["env_id"] == own["env_id"]]
        names = [name for name in own if any(x.get(name) != own[name] for x in same)]
        labels.append(", ".join([own["script"], own["env_id"], *(f"{name} {own[name]}" for name in names)]))
    return dict(zip(labels, groups.values(), strict=True))


def draw_runs(runs: list[Path], out: Path, apart: bool) -> None:
    """Writes out/{family}.png: a panel for each logged name that starts with family/, a line per group."""
    groups = group_runs(runs)
    logged = defaultdict(lambda: defaultdict(list))
    for label, members in groups.items():
        for run in members:
            rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
            for name in dict.fromkeys(name for row in rows for name in row if "/" in name):
                points = [(row["step"], row[name]) for row in rows if name in row]
                logged[name][label].append(np.array(points).T)
    if not logged:
        sys.exit("plot.py: nothing is logged yet")
    colour = colours(list(groups))
    for family in dict.fromkeys(name.partition("/")[0] for name in logged):
        panels = [(name, list(lines)) for name, lines in logged.items() if name.startswith(f"{family}/")]
        if apart:
            panels = [(name, [label]) for name, labels in panels for label in labels]
        figure, axes_of = make_panels(len(panels), height=2.6)
        first = {}
        for axes, (name, labels) in zip(axes_of, panels, strict=True):
            if name in first:
                axes.sharey(first[name])
            first.setdefault(name, axes)
            for label in labels:
                steps, values = on_one_grid(logged[name][label])
                window = np.full(max(1, len(steps) // 50), 1.0)  # smooth, so that the eye finds the trend
                smooth = lambda x, n=window: np.convolve(x, n / len(n), mode="valid")
                axes.plot(smooth(steps), smooth(values.mean(0)), color=colour[label], linewidth=1.4)
                if len(values) > 1:
                    band = smooth(values.min(0)), smooth(values.max(0))
                    axes.fill_between(smooth(steps), *band, color=colour[label], alpha=0.18, linewidth=0)
            title = [name.removeprefix(f"{family}/"), *(textwrap.wrap(labels[0], 48) if apart else ())]
            axes.set(title="\n".join(title), xlabel="environment steps")
            axes.xaxis.set_major_formatter(short)
            axes.ticklabel_format(axis="y", scilimits=(-3, 5))
        counts = {label: len(members) for label, members in groups.items()}
        text = {label: f"{label} ({n} seeds)" if n > 1 else label for label, n in counts.items()}
        legend = {textwrap.fill(text[x], 48): plt.Line2D([], [], color=colour[x]) for x in groups}
        many = " · mean and range of the seeds" if max(counts.values()) > 1 else ""
        save(figure, family + many, out / f"{family}.png", legend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; others are passed over")
    parser.add_argument("--cells", nargs="+", metavar="ALGO/ENV_ID", help="patterns, as dqn-*/LunarLander-v3")
    where = "folder with the tables of benchmark/run.py that have the cells; default: benchmark/results"
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help=where)
    parser.add_argument("--out", type=Path, help="picture of --cells, or folder; default: RUN/plots")
    parser.add_argument("--apart", action="store_true", help="a panel for each, in place of one for all")
    parser.add_argument("--skip-steps", type=int, help="with --cells: leave out trainings of so many steps")
    args = parser.parse_args()
    runs = [path for path in args.runs if (path / "progress.jsonl").is_file()]
    if bool(args.cells) == bool(runs) or (args.cells and not args.out):
        parser.error("give either run folders or --cells PATTERNS --out PICTURE")
    plt.rcParams.update(STYLE)
    if runs:
        draw_runs(runs, args.out or runs[0] / "plots", args.apart)
    else:
        draw_cells(*read_cells(args.results, args.cells, args.skip_steps), args.out, args.apart)


if __name__ == "__main__":
    main()
