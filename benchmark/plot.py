"""Draws learning curves: of any run folders, or of many seeds from benchmark/results.

    python benchmark/plot.py runs/CartPole-v1/ppo/1-20270131-120000
    python benchmark/plot.py runs/CartPole-v1/*/* --names eval/return_mean loss/policy --out compared
    python benchmark/plot.py --results benchmark/results/ppo__*.csv --out curves.png

What can be compared shares a panel; with --apart each gets its own.

Runs: a picture for each family of logged names, a panel for each name. Runs whose arguments differ in the
seed alone are one group: its mean, and a band from minimum to maximum.

Results: a panel for each environment. A lone curve has mean (solid) and interquartile mean (dashed) over
seeds, several curves have the mean, with 95% intervals of a stratified bootstrap, as Agarwal et al. 2021
(arXiv 2108.13264) recommend. A diamond is the final evaluation, of more episodes than a point of the curve.
The last panel joins the environments with a bar, on a scale where 0 is the untrained policy and 1 the bar.
"""

import argparse
import csv
import json
import math
import sys
import textwrap
from collections import defaultdict
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
    "font.size": 10, "axes.titlesize": 10, "axes.formatter.use_mathtext": True, "legend.frameon": False,
    "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.08, "savefig.dpi": 150,
}  # fmt: skip
DIAMOND = dict(marker="D", linestyle="", markeredgecolor="white", markersize=7, zorder=3, clip_on=False)


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


def on_one_grid(seeds: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Steps (points,) that all seeds reached, and values (seeds, points), interpolated if need be."""
    start, end = max(steps[0] for steps, _ in seeds), min(steps[-1] for steps, _ in seeds)
    grid = np.unique(np.concatenate([steps for steps, _ in seeds]))
    grid = grid[(grid >= start) & (grid <= end)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in seeds])


# ----------------------------------------------------------------------------------------------------- panels
def steps_label(value: float, _=None) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def make_panels(count: int, columns=2, width=4.5, height=3.0):
    """A figure with count panels. Two columns are 9 inches wide: text of 10 points is read on a page."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    width, height = (max(width, 6.5), max(height, 3.4)) if count == 1 else (width, height)
    figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=(width * columns, height * rows + 0.8))
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


def colours(names: list[str]) -> dict:
    """A colour for each name, no two the same."""
    many = plt.get_cmap("turbo")(np.linspace(0, 1, len(names)))
    return dict(zip(names, COLOURS if len(names) <= len(COLOURS) else many, strict=False))


def save(figure, title: str, out: Path, legend: dict | None = None) -> None:
    """Writes the picture, with a legend {label: line} below all panels."""
    figure.suptitle(title, fontsize=11)
    if legend:
        columns = min(4, len(legend)) if max(map(len, legend)) < 22 else 2
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    print(out)


# ---------------------------------------------------------------------------------------------------- results
def read_results(files: list[Path]) -> tuple[dict, dict]:
    """{(env_id, algo, total_timesteps): [(steps, returns) of each seed]} and {same: mean of the finals}."""
    curves, finals = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = row["env_id"], row["algo"], int(row["total_timesteps"])
                score = float(row["eval_return_mean"])
                if row["kind"] == "curve":
                    curves[key][row["seed"]].append((int(row["step"]), score))
                else:
                    finals[key].append(score)
    seeds = {key: [np.array(sorted(x)).T for x in runs.values()] for key, runs in curves.items()}
    return seeds, {key: np.mean(scores) for key, scores in finals.items()}


def find_bar(env_id: str, algo: str, total: int) -> float | None:
    cells = [cell for suite in SUITES.values() for cell in suite]
    return next((c.bar for c in cells if (c.env_id, c.name, c.steps) == (env_id, algo, total)), None)


def draw(axes, x, strata, colour, statistics) -> None:
    for statistic in statistics:
        estimate, lower, upper = stratified_bootstrap(strata, statistic)
        dashes, alpha = ("-", 0.18) if statistic is mean else ("--", 0.1)
        axes.plot(x, estimate, dashes, color=colour, linewidth=1.6)
        axes.fill_between(x, lower, upper, color=colour, alpha=alpha, linewidth=0)


def draw_results(files: list[Path], out: Path, apart: bool = False) -> None:
    """One panel per environment, or apart per curve, and one over all environments with a bar."""
    curves, finals = read_results(files)
    if not curves:
        sys.exit(f"plot.py: no evaluation in {' '.join(map(str, files))}: nothing to draw")
    lengths = defaultdict(set)
    for env_id, algo, total in curves:
        lengths[env_id, algo].add(total)
    names = {
        key: f"{key[1]} {steps_label(key[2])}" if len(lengths[key[:2]]) > 1 else key[1] for key in curves
    }
    colour, panels = colours(list(dict.fromkeys(names.values()))), defaultdict(list)
    for key in curves:
        panels[key if apart else key[0]].append(key)
    joint, joint_finals, share = defaultdict(list), defaultdict(list), np.linspace(0, 1, 51)
    for key, seeds in curves.items():
        steps, returns = on_one_grid(seeds)
        bar, start = find_bar(*key), returns[:, 0].mean()
        if bar is not None and steps[0] == 0 and bar != start and key in finals:
            score = (returns - start) / (bar - start)
            joint[names[key]].append(np.stack([np.interp(share, steps / steps[-1], x) for x in score]))
            joint_finals[names[key]].append((finals[key] - start) / (bar - start))
    joint = {name: strata for name, strata in joint.items() if len(strata) > 1}
    figure, axes_of = make_panels(len(panels) + bool(joint))
    dashed = False
    for axes, where in zip(axes_of, sorted(panels), strict=False):
        keys = panels[where]
        statistics = (mean, iqm) if len(keys) == 1 else (mean,)
        dashed |= len(keys) == 1
        bars = defaultdict(list)
        for key in keys:
            steps, returns = on_one_grid(curves[key])
            draw(axes, steps, [returns], colour[names[key]], statistics)
            if key in finals:
                axes.plot(steps[-1], finals[key], color=colour[names[key]], **DIAMOND)
            if (bar := find_bar(*key)) is not None:
                bars[bar].append(colour[names[key]])
        for bar, owners in bars.items():
            axes.axhline(bar, color=owners[0] if len(owners) == 1 else "black", linestyle=":", linewidth=1.3)
        counts = sorted({len(curves[key]) for key in keys})
        title = [keys[0][0], f"{'–'.join(map(str, counts))} seed{'s' if counts != [1] else ''}"]
        title += [f"bar {', '.join(f'{bar:g}' for bar in sorted(bars))}"] if bars else []
        title = [names[keys[0]], ", ".join(title)] if apart else [", ".join(title)]
        axes.set(title="\n".join(title), xlabel="environment steps", ylabel="return")
        axes.xaxis.set_major_formatter(steps_label)
    if joint:
        axes = axes_of[-1]
        for name, strata in joint.items():
            draw(axes, share, strata, colour[name], (mean, iqm) if len(joint) == 1 else (mean,))
            axes.plot(1, np.mean(joint_finals[name]), color=colour[name], **DIAMOND)
        axes.axhline(1, color="black", linestyle=":", linewidth=1.3)
        axes.set(title="all environments with a bar", xlabel="share of the training")
        axes.set_ylabel("0: untrained, 1: bar")
    line = lambda *style, color="black", **more: plt.Line2D([], [], *style, color=color, **more)
    legend = {f"{name}, mean": line(color=colour[name]) for name in colour}
    if dashed:
        legend["interquartile mean"] = line(linestyle="--")
    if finals:
        legend["final evaluation"] = line(**DIAMOND)
    if any(find_bar(*key) is not None for key in curves):
        legend["bar"] = line(linestyle=":")
    save(figure, "Greedy evaluation during training, 95% bootstrap intervals over seeds", out, legend)


# ------------------------------------------------------------------------------------------------------- runs
def group_runs(runs: list[Path]) -> dict[str, list[Path]]:
    """{label: runs whose arguments differ in the seed alone}; a label says what differs between groups."""
    groups = defaultdict(list)
    for run in runs:
        try:
            settings = json.loads((run / "args.json").read_text())
        except OSError:
            sys.exit(f"plot.py: {run} has no args.json: give the folder of a run")
        settings = {k: v for k, v in settings.items() if k not in ("seed", "run_dir", "resume")}
        settings["script"] = min((path.stem for path in run.glob("*.py")), key=len, default="")
        groups[json.dumps(settings)].append(run)
    every, labels = [json.loads(text) for text in groups], []
    for own in every:
        same = [x for x in every if x["script"] == own["script"] and x["env_id"] == own["env_id"]]
        names = [name for name in own if any(x.get(name) != own[name] for x in same)]
        labels.append(", ".join([own["script"], own["env_id"], *(f"{name} {own[name]}" for name in names)]))
    return dict(zip(labels, groups.values(), strict=True))


def draw_runs(runs: list[Path], out: Path, names: list[str] = (), apart: bool = False) -> None:
    """Writes out/{family}.png: a panel for each logged name that starts with family/, a line per group."""
    groups = group_runs(runs)
    families = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for label, members in groups.items():
        for run in members:
            points = defaultdict(list)
            for line in (run / "progress.jsonl").read_text().splitlines():
                row = json.loads(line)
                for name in row:
                    if "/" in name and (not names or name in names):
                        points[name].append((row["step"], row[name]))
            for name, found in points.items():
                families[name.partition("/")[0]][name][label].append(np.array(found).T)
    if not families:
        sys.exit(f"plot.py: nothing is logged yet{' of ' + ' '.join(names) if names else ''}")
    colour = colours(list(groups))
    for family, logged in families.items():
        panels = [(name, list(lines)) for name, lines in logged.items()]
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
            title = name.partition("/")[2]
            axes.set_title("\n".join([title, *textwrap.wrap(labels[0], 48)]) if apart else title)
            axes.set_xlabel("environment steps")
            axes.xaxis.set_major_formatter(steps_label)
            axes.ticklabel_format(axis="y", scilimits=(-3, 5))
        counts = {label: len(members) for label, members in groups.items()}
        text = {label: f"{label} ({n} seeds)" if n > 1 else label for label, n in counts.items()}
        legend = {textwrap.fill(text[x], 48): plt.Line2D([], [], color=colour[x]) for x in groups}
        many = " · mean and range of the seeds" if max(counts.values()) > 1 else ""
        save(figure, family + many, out / f"{family}.png", legend)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; files among them are passed over")
    parser.add_argument("--results", nargs="+", type=Path, help="CSV files of benchmark/run.py")
    parser.add_argument("--out", type=Path, help="picture of --results, or folder; default: RUN/plots")
    parser.add_argument("--names", nargs="+", default=[], help="with runs: only these logged names")
    parser.add_argument("--apart", action="store_true", help="a panel for each, in place of one for all")
    args = parser.parse_args()
    runs = [path for path in args.runs if path.is_dir()]
    if bool(args.results) == bool(runs) or (args.results and not args.out):
        parser.error("give either run folders or --results FILES --out PICTURE")
    plt.rcParams.update(STYLE)
    if runs:
        draw_runs(runs, args.out or runs[0] / "plots", args.names, args.apart)
    else:
        draw_results(args.results, args.out, args.apart)


if __name__ == "__main__":
    main()
