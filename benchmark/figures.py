"""Every picture in docs/img that is made from data: how it is drawn, and from which results.

    python benchmark/figures.py                   draws the pictures whose data have changed
    python benchmark/figures.py ppo family        draws these
    python benchmark/figures.py --check           draws nothing; exit code 1 if a picture is out of date

docs/img/figures.json remembers the data of each picture, as a checksum. Films are made elsewhere
(benchmark/README.md).
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.patches import Ellipse
from plot import (
    COLOURS, STYLE, draw_cells, make_panels, mean, on_one_grid, plt, save, stratified_bootstrap,
)  # fmt: skip
from run import ROOT, read_cells, rows_of, short
from speed import OURS, SB3
from suites import HIDDEN, MEMORIES
from time_to_bar import RACES
from visits import STEPS

RESULTS, PICTURES = ROOT / "benchmark/results", ROOT / "docs/img"
KNOWN = PICTURES / "figures.json"
DRAWN = "algo env_id total_timesteps seed step return_mean final_return_mean".split()  # columns


# --------------------------------------------------------------------------------------------- drawings
def series(rows: list[dict], *names: str) -> dict:
    """Rows by their values in these columns, in the order of the file."""
    found = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def floats(rows: list[dict], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def time_to_bar(rows: list[dict], out: Path) -> None:
    """A line for each cell: dots are seeds, strokes their medians; one that never passed only counts."""
    cells = [cell for cell in RACES if any(row["cell"] == cell for row in rows)]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(cells) + 1.4))
    legend, sides = {}, series(rows, "cell", "library")
    for line, cell in enumerate(reversed(cells)):
        for library, shift, colour in ((OURS, 0.15, COLOURS[0]), (SB3, -0.15, COLOURS[1])):
            found = sides[cell, library]
            seconds = [float(row["seconds"]) for row in found if row["seconds"]]
            axes.plot(seconds, [line + shift] * len(seconds), "o", color=colour, alpha=0.6, markersize=5)
            median = statistics.median([float(row["seconds"] or "inf") for row in found] or [math.inf])
            if median < math.inf:
                axes.plot([median], [line + shift], "|", color=colour, markersize=14, mew=3)
            if len(seconds) < len(found):
                end = max(float(row["trained_seconds"]) for row in found)
                text = f"{len(seconds)} of {len(found)} passed within {end:.0f} s"
                axes.plot([end], [line + shift], alpha=0)  # nothing to see, but the axis reaches so far
                beside = axes.get_yaxis_transform()  # x in widths of the picture, y in lines
                axes.text(1.01, line + shift, text, va="center", fontsize=8, color=colour, transform=beside)
            legend[library] = plt.Line2D([], [], color=colour, marker="o", linestyle="")
    labels = [f"{cell.replace(HIDDEN, '')} to {RACES[cell].bar:g}" for cell in reversed(cells)]
    axes.set_yticks(range(len(cells)), labels)
    axes.set(xscale="log", xlabel="seconds from the command, two cores (logarithmic)")
    axes.set_ylim(-0.6, len(cells) - 0.4)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    save(figure, "Time until the policy is good, each with its own best settings", out, legend)


def bc_episodes(rows: list[dict], out: Path) -> None:
    """Mean over the seeds, from the least to the best, against the episodes that the expert labels."""
    env_ids, points = series(rows, "env_id"), series(rows, "env_id", "method", "episodes")
    figure, panels = make_panels(len(env_ids))
    for axes, (env_id,) in zip(panels, env_ids, strict=True):
        ((_, expert),) = [(key, found) for key, found in points.items() if key[:2] == (env_id, "expert")]
        axes.axhline(float(expert[0]["return_mean"]), color="black", linestyle=":", label="expert")
        for method, colour in zip(("behavioral cloning", "DAgger"), COLOURS, strict=False):
            own = {
                int(n): found for (env, name, n), found in points.items() if (env, name) == (env_id, method)
            }
            scores = np.array([floats(found, "return_mean") for found in own.values()])
            axes.plot(list(own), scores.mean(1), "o-", color=colour, label=method)
            axes.fill_between(list(own), scores.min(1), scores.max(1), color=colour, alpha=0.2)
        axes.set(title=env_id, xlabel="episodes labelled by the expert", ylabel="return", xscale="log")
        axes.set_xticks((1, 2, 5, 17), (1, 2, 5, 17))
        axes.minorticks_off()
    axes.legend()
    save(figure, "", out, {})


def visits(rows: list[dict], out: Path) -> None:
    """Counts of the places in four quarters of a training, a line for each training."""
    trainings, quarters = series(rows, "env_id", "algo"), [name for name in rows[0] if "quarter" in name]
    with plt.rc_context({"axes.grid": False}):
        figure, grid = plt.subplots(len(trainings), len(quarters), figsize=(9, 7.5), squeeze=False)
    for line, ((env_id, algo), places) in zip(grid, trainings.items(), strict=True):
        shape = [int(places[-1][name]) + 1 for name in ("row", "column")]
        counts = np.array([floats(places, name).reshape(shape) for name in quarters])
        seen = (counts.cumsum(0) > 0).sum((1, 2))
        for quarter, axes in enumerate(line):
            picture = np.where(counts[quarter] > 0, np.log10(counts[quarter].clip(1)), np.nan)
            axes.imshow(picture, cmap="viridis_r", vmin=0, aspect="auto", origin="upper")
            axes.set(xticks=[], yticks=[])
            end = short(STEPS[env_id] * (quarter + 1) / len(quarters))
            axes.set_title(f"to step {end}: {seen[quarter]} places", fontsize=9)
        line[0].set_ylabel(f"{algo}\n{env_id.rpartition(':')[2]}", fontsize=9)
    save(figure, "States visited in each quarter of a training (darker: more often)", out, {})


def cliff(rows: list[dict], out: Path) -> None:
    """Returns of SARSA and Q-learning while they learn, mean over the seeds and ten episodes."""
    figure, (axes,) = make_panels(1)
    for ((rule,), found), colour in zip(series(rows, "update_rule").items(), COLOURS, strict=False):
        smooth = np.convolve(floats(found, "return_mean"), np.ones(10) / 10, mode="valid")
        label = "SARSA" if rule == "sarsa" else "Q-learning"
        axes.plot(np.arange(len(smooth)) + 5.5, smooth, color=colour, label=label)
    axes.axhline(-13, color="black", linestyle=":", linewidth=1.3, label="best possible")
    title = f"CliffWalking-v1, epsilon 0.1; mean of {rows[0]['seeds']} seeds and 10 episodes"
    axes.set(title=title, ylim=(-100, -5), xlabel="episode", ylabel="return while learning")
    axes.legend(fontsize=9)
    save(figure, "", out, {})


def taxi_masks(rows: list[dict], out: Path) -> None:
    """Returns of the greedy policy with masks of legal actions and without: mean and range of the seeds."""
    figure, (axes,) = make_panels(1)
    for ((masks,), found), colour in zip(series(rows, "masks").items(), COLOURS, strict=False):
        seeds = series(found, "seed").values()
        returns, steps = np.array([floats(seed, "eval_return_mean") for seed in seeds]), series(found, "step")
        steps = [int(step) for (step,) in steps]
        label = "with masks" if masks == "True" else "without"
        axes.plot(steps, returns.mean(axis=0), color=colour, label=label)
        axes.fill_between(steps, returns.min(axis=0), returns.max(axis=0), color=colour, alpha=0.18, lw=0)
    title = f"Q-learning on Taxi-v4; mean and range of {len(seeds)} seeds"
    axes.set(title=title, xlabel="environment steps", ylabel="return of the greedy policy")
    axes.xaxis.set_major_formatter(short)
    axes.legend(fontsize=9)
    save(figure, "", out, {})


def processes(rows: list[dict], out: Path) -> None:
    """Learning in one process and in two: mean over the seeds, and its bootstrap intervals over them."""
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    for ((count,), found), colour in zip(sorted(series(rows, "processes").items()), COLOURS, strict=False):
        seeds = series(found, "seed").values()
        steps, values = on_one_grid([(floats(x, "step"), floats(x, "eval_return_mean")) for x in seeds])
        middle, low, high = stratified_bootstrap([values], mean)
        name = f"{count} process{'es' * (count != '1')} × {8 // int(count)} environments"
        axes.plot(steps, middle, color=colour, label=f"{name}, {len(seeds)} seeds")
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="environment steps", ylabel="evaluation return", title="CartPole-v1")
    axes.legend(loc="lower right")
    save(figure, "", out, {})


def pearl_maml(_, evaluations: list[dict], out: Path) -> None:
    """The return in held-out tasks against the steps of training: mean and range of the seeds. PEARL is
    scored after two episodes in a task, MAML after a gradient step on its --episodes-per-task."""
    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    axes.axhline(-5.19, color="black", linestyle=":", label="optimum, if the goal is known")
    labels = {"pearl": "PEARL, after 2 episodes", "maml": "MAML, after 20 episodes"}
    for (algo, label), colour in zip(labels.items(), COLOURS, strict=False):
        curves = defaultdict(list)  # returns of all seeds by step
        for row in evaluations:
            if row["algo"] == algo and int(row["step"]):
                curves[int(row["step"])].append(float(row["return_mean"]))
        seeds = max(map(len, curves.values()))
        steps = sorted(step for step, returns in curves.items() if len(returns) == seeds)
        returns = np.array([curves[step] for step in steps])
        axes.plot(steps, returns.mean(axis=1), color=colour, label=f"{label} (seeds: {seeds})")
        axes.fill_between(steps, returns.min(axis=1), returns.max(axis=1), color=colour, alpha=0.2)
    axes.set(xlabel="environment steps of training", ylabel="return in held-out tasks")
    axes.xaxis.set_major_formatter(short)
    axes.legend(loc="lower right", fontsize=8)
    save(figure, evaluations[0]["env_id"], out, {})


def t_maze(runs: list[dict], _, out: Path) -> None:
    """How long PPO keeps a cue with an LSTM, a GRU and no memory. The return of an episode of the T-maze is 1
    if its cue was still known at the junction, by chance 0.5."""
    returns, legend = defaultdict(list), {}  # of the seeds, by memory and delay
    for run in runs:
        memory, delay = run["algo"].partition("-")[2].split("_")
        returns[memory, int(delay)].append(float(run["final_return_mean"]))
    delays = sorted({delay for _, delay in returns})
    figure, (axes,) = make_panels(1)
    for shift, memory, colour in zip((0.96, 1, 1.04), MEMORIES, COLOURS, strict=False):
        for delay in delays:
            scores = returns[memory, delay]
            axes.plot([delay * shift] * len(scores), scores, "o", color=colour, alpha=0.5, markersize=4)
        means = [statistics.mean(returns[memory, delay]) for delay in delays]
        (line,) = axes.plot([delay * shift for delay in delays], means, color=colour)
        legend["ppo.py, no memory" if memory == "none" else f"ppo_lstm.py, {memory}"] = line
    axes.set(xscale="log", xlabel="steps from the cue to the junction", ylabel="share of right turns")
    axes.set_xticks(delays, delays)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=1.3)
    save(figure, "T-maze after 60,000 steps: seeds and their mean", out, legend)


def maml_paths(returns: list[dict], positions: list[dict], out: Path) -> None:
    """Greedy paths to ten goals before and after inner steps, and the returns of all variants: mean and range
    of the seeds."""
    figure, panels = make_panels(4)
    for axes, ((k,), found) in zip(panels, series(positions, "inner_steps").items(), strict=False):
        for path, colour in zip(series(found, "goal").values(), 2 * COLOURS, strict=False):
            axes.plot(floats(path, "x"), floats(path, "y"), color=colour)
            goal = float(path[0]["goal_x"]), float(path[0]["goal_y"])
            axes.plot(*goal, "x", color=colour, markersize=8, markeredgewidth=2)
        title = f"after {k} step{'s' * (k != '1')}" if k != "0" else "before"
        axes.set(title=title, xlim=(-0.65, 0.65), ylim=(-0.65, 0.65), aspect="equal")
    names = [name for name in returns[0] if name.startswith("after_")]
    for ((algo,), seeds), colour in zip(series(returns, "algo").items(), COLOURS, strict=False):
        scores = np.stack([floats(seeds, name) for name in names])
        panels[3].plot(scores.mean(1), "o-", color=colour, label=algo)
        panels[3].fill_between(range(len(names)), scores.min(1), scores.max(1), color=colour, alpha=0.2)
    title = "PointNavigation-v0, 100 goals"
    panels[3].set(title=title, xlabel="inner steps", ylabel="return", xticks=range(len(names)))
    panels[3].legend()
    save(figure, "", out, {})


def caps(actions: list[dict], out: Path) -> None:
    """The actions of one episode without CAPS and with it."""
    figure, panels = make_panels(2, 5.0, 3.0)
    for axes, ((algo,), steps), colour in zip(panels, series(actions, "algo").items(), COLOURS, strict=False):
        axes.plot(floats(steps, "action"), color=colour, linewidth=1.2)
        axes.set(title=f"{algo}, seed 1, one episode", xlabel="step", ylabel="action (torque)")
        axes.set_ylim(-2.1, 2.1)
    save(figure, "", out, {})


def pearl_posterior(paths: list[dict], beliefs: list[dict], out: Path) -> None:
    """Above, one task: where the policy would go for z drawn from the belief before each episode (grey), the
    episode that was played (black), the goal (red). Below, all tasks, a colour for each angle of the goal:
    mean and one standard deviation of the belief, in the two dimensions of z whose means differ most in the
    end."""
    episodes, played = series(beliefs, "episode"), series(paths, "episode")
    columns = lambda rows, *names: np.stack([floats(rows, name) for name in names], axis=1)
    names = [name for name in beliefs[0] if name.startswith("mean_")]
    last = columns(beliefs[-len(series(beliefs, "task")) :], *names)
    dims = [names[i].removeprefix("mean_") for i in np.argsort(last.std(axis=0))[-2:]]
    centers = [f"mean_{dim}" for dim in dims]
    far = 1.1 * np.abs(columns(beliefs, *centers)).max()
    figure, panels = plt.subplots(2, len(episodes), figsize=(3 * len(episodes), 6))
    for episode, above, below in zip(episodes, *panels, strict=True):
        for (draw,), path in series(played[episode], "draw").items():
            line = dict(color="0.6", linewidth=0.7, alpha=0.7) if draw else dict(color="black", linewidth=1.5)
            above.plot(floats(path, "x"), floats(path, "y"), **line)
        goals = columns(episodes[episode], "goal_x", "goal_y")
        goal = goals[int(paths[0]["task"])]
        above.add_patch(plt.Circle(goal, 0.2, color="#D55E00", alpha=0.5, linewidth=0))
        above.set(title=f"episode {episode[0]}", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
        hues = plt.cm.hsv(np.arctan2(goals[:, 1], goals[:, 0]) / (2 * np.pi) % 1)
        where = columns(episodes[episode], *centers)
        width = 2 * columns(episodes[episode], *(f"std_{dim}" for dim in dims))
        for center, axes_of_it, colour in zip(where, width, hues, strict=True):
            below.add_patch(Ellipse(center, *axes_of_it, facecolor="none", edgecolor=colour))
            below.plot(*center, ".", color=colour)
        below.set(xlim=(-far, far), ylim=(-far, far), aspect="equal", xlabel=f"z, dimension {dims[0]}")
    panels[1, 0].set_ylabel(f"z, dimension {dims[1]}")
    save(figure, f"The belief before each episode, {beliefs[0]['env_id']}", out, {})


# --------------------------------------------------------------------------------------------- pictures
class Figure(NamedTuple):
    data: str  # patterns of cells, as those of plot.py, or CSV files in benchmark/results
    draw: Callable = draw_cells  # of the cells' runs and evaluations, or of the rows of each file
    skip_steps: int | None = None


def of(algos: str, *env_ids: str) -> str:
    """Patterns of the results of several algorithms in each of the environments."""
    return " ".join(f"{algo}/{env_id}" for env_id in env_ids for algo in algos.split())


def variants(algo: str, names: str, env_id: str) -> str:
    return of(" ".join(f"{algo}-{name}" for name in names.split()), env_id)


ONE_ALGORITHM = "reinforce vpg a2c ppo ppo_lstm grpo trpo pqn rainbow tqc crossq simba es pearl".split()
BREAKOUT, PONG, LANDER = "benchmark.minatar_envs:MinAtar/Breakout-v1", "ALE/Pong-v5", "LunarLander-v3"
FIGURES = {name: Figure(f"{name}/*") for name in ONE_ALGORITHM} | {
    "ppo_rnd": Figure("ppo_rnd/* ppo-no_novelty/*:SparseGrid-v0"),
    "q_learning": Figure("q_learning/* q_learning-not_slippery/*"),
    "dqn": Figure("dqn/CartPole-v1 dqn/Acrobot-v1 dqn/MountainCar-v0 dqn-double_per/LunarLander-v3"),
    "ddpg_td3": Figure("ddpg_td3/* ddpg_td3-td3/* ddpg_td3-ddpg/*"),
    "sac": Figure("sac/*", skip_steps=40_000),  # those belong to the suite caps
    "maml": Figure("maml/* maml-ppo/* maml-vpg/* maml-no_adaptation/*"),
    # comparisons
    "family": Figure(of("reinforce vpg a2c trpo ppo", "CartPole-v1")),
    "grpo_ppo": Figure(of("ppo grpo", "CartPole-v1", "Acrobot-v1", "Pendulum-v1") + " grpo-dr/CartPole-v1"),
    "minatar": Figure(of("ppo pqn dqn", BREAKOUT)),
    "rainbow_minatar": Figure(of("rainbow-200k dqn-200k", BREAKOUT)),
    "dqn_ablation": Figure(
        variants("dqn", "plain double dueling noisy 3_step per all all_but_noisy", LANDER)
    ),
    "dqn_switches": Figure(
        f"{variants('dqn', 'plain double dueling noisy 3_step per', 'Acrobot-v1')} "
        f"{variants('dqn', 'plain double', f'{HIDDEN}Gambles-v0')} "
        f"{variants('dqn', 'plain_40 noisy_40', f'{HIDDEN}Chain-v0')} "
        f"{variants('dqn', 'plain per', f'{HIDDEN}Lock-v0')}"
    ),
    "rainbow_ablation": Figure(
        variants(
            "rainbow",
            "full no_distribution no_double no_dueling no_noise no_n_step no_priorities",
            "Acrobot-v1",
        )
    ),
    "dqn_pong": Figure(variants("dqn", "1_step 1_step_sticky 4_step 4_step_sticky", PONG)),
    "dqn_pong_variants": Figure(
        variants("dqn", "1_step 4_step 4_step_double 4_step_dueling 4_step_noisy 4_step_per", PONG)
    ),
    "td3_ablation": Figure(
        variants("ddpg_td3", "ddpg ddpg_twin ddpg_twin_delay ddpg_twin_delay_gaussian td3", "Pendulum-v1")
    ),
    "pearl_maml": Figure(of("pearl maml", "PointRobot-v0"), pearl_maml),
    "doors": Figure("ppo_lstm-masks/*:Doors-v0 ppo_lstm-no_masks/*:Doors-v0"),
    "t_maze": Figure("ppo*:TMaze-v0", t_maze),
    # of other tables
    "time_to_bar": Figure("time_to_bar.csv", time_to_bar),
    "bc_episodes": Figure("bc_episodes.csv", bc_episodes),
    "visits": Figure("visits.csv", visits),
    "cliff": Figure("cliff.csv", cliff),
    "taxi_masks": Figure("taxi_masks.csv", taxi_masks),
    "processes": Figure("processes.csv", processes),
    "maml_paths": Figure("maml_steps.csv maml_paths.csv", maml_paths),
    "caps": Figure("caps_actions.csv", caps),
    "pearl_posterior": Figure("pearl_paths.csv pearl_beliefs.csv", pearl_posterior),
}


def tables_of(figure: Figure) -> tuple[list[dict], ...]:
    """Rows of each of its files, or the runs and the evaluations of its cells."""
    if figure.data.endswith(".csv"):
        return tuple(rows_of(RESULTS / name) for name in figure.data.split())
    return read_cells(RESULTS, figure.data.split(), figure.skip_steps)


def checksum(figure: Figure) -> str:
    """Of what is drawn: of the rows of its cells, or of its files."""
    digest = hashlib.sha256()
    if figure.data.endswith(".csv"):
        for name in figure.data.split():
            content = (RESULTS / name).read_bytes().replace(b"\r\n", b"\n")
            digest.update(name.encode() + b"\n" + content)
    else:
        for row in (row for table in tables_of(figure) for row in table):
            digest.update(",".join(row.get(name, "") for name in DRAWN).encode() + b"\n")
    return digest.hexdigest()[:16]


def known() -> dict[str, str]:
    return json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}


def stale() -> list[str]:
    """The pictures that are missing, or whose data have changed since they were drawn."""
    drawn = known()
    there = lambda name: (PICTURES / f"{name}.png").exists()
    return [name for name, x in FIGURES.items() if not there(name) or drawn.get(name) != checksum(x)]


def draw(name: str) -> None:
    figure, out = FIGURES[name], PICTURES / f"{name}.png"
    with plt.rc_context(STYLE):
        figure.draw(*tables_of(figure), out)
    KNOWN.write_text(json.dumps(known() | {name: checksum(figure)}, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(FIGURES))
    parser.add_argument("--check", action="store_true", help="only say which pictures are out of date")
    args = parser.parse_args()
    if unknown := set(args.names) - FIGURES.keys():
        parser.error(f"no picture {' '.join(sorted(unknown))}; there are {' '.join(FIGURES)}")
    old = stale()
    if args.check:
        others = {path.stem for path in PICTURES.glob("*.png")} - FIGURES.keys()
        if others:
            print(f"not in figures.py: {' '.join(sorted(others))}")
        if old:
            print(f"out of date: {' '.join(old)}; run python benchmark/figures.py")
        sys.exit(bool(old or others))
    for name in args.names or old:
        draw(name)


if __name__ == "__main__":
    main()
