"""Every picture in docs/img that is made from data: how it is drawn, and from which results.

    python benchmark/figures.py                   draws the pictures whose data have changed
    python benchmark/figures.py ppo family        draws these
    python benchmark/figures.py --check           draws nothing; exit code 1 if a picture is out of date

docs/img/figures.json remembers the data of each picture, as a checksum. Some pictures need more than their
data, such as run folders or a training of their own: these are drawn only if they are named. Films are made
elsewhere (benchmark/README.md).
"""

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from plot import COLOURS, STYLE, draw_cells, make_panels, plt, save
from run import ROOT, read_cells, short
from suites import MEMORIES

RESULTS, PICTURES = ROOT / "benchmark/results", ROOT / "docs/img"
KNOWN = PICTURES / "figures.json"
DRAWN = "algo env_id total_timesteps seed step return_mean final_return_mean".split()  # columns


def draw_meta(_, evaluations: list[dict], out: Path) -> None:
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


def draw_t_maze(runs: list[dict], _, out: Path) -> None:
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


class Figure(NamedTuple):
    data: str  # patterns of cells, as those of plot.py; of a command: a file in benchmark/results
    draw: Callable = draw_cells  # from the runs and evaluations of the cells
    skip_steps: int | None = None
    command: str = ""  # that draws it, if it is not drawn from cells
    needs: str = ""  # what else it is drawn from


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
    "dqn_ablation": Figure(
        variants("dqn", "plain double dueling noisy 3_step per all all_but_noisy", LANDER)
    ),
    "dqn_pong": Figure(variants("dqn", "1_step 1_step_sticky 4_step 4_step_sticky", PONG)),
    "dqn_pong_variants": Figure(
        variants("dqn", "1_step 4_step 4_step_double 4_step_dueling 4_step_noisy 4_step_per", PONG)
    ),
    "td3_ablation": Figure(
        variants("ddpg_td3", "ddpg ddpg_twin ddpg_twin_delay ddpg_twin_delay_gaussian td3", "Pendulum-v1")
    ),
    "pearl_maml": Figure(of("pearl maml", "PointRobot-v0"), draw_meta),
    "doors": Figure("ppo_lstm-masks/*:Doors-v0 ppo_lstm-no_masks/*:Doors-v0"),
    "t_maze": Figure("ppo*:TMaze-v0", draw_t_maze),
    # not of cells
    "time_to_bar": Figure("time_to_bar.csv", command="time_to_bar.py --draw {out}"),
    "bc_episodes": Figure("bc_episodes.csv", command="bc_episodes.py --out {out}"),
    "maml_paths": Figure(
        "maml_steps.csv", command="maml_paths.py --out {out}", needs="the run folders of the suite maml"
    ),
    "caps": Figure("caps.csv", command="caps.py --out {out}", needs="the run folders of the suite caps"),
    "pearl_posterior": Figure(
        "",
        command="posterior.py benchmark/runs/pearl__SparsePointRobot-v0__400000/1 --task 7 --out {out}",
        needs="a run folder of the suite pearl",
    ),
    "visits": Figure("", command="visits.py --out {out}", needs="trainings, a minute"),
    "cliff": Figure("cliff.csv", command="q_table.py --cliff {out}", needs="trainings, minutes"),
    "taxi_masks": Figure("taxi_masks.csv", command="q_table.py --taxi {out}", needs="trainings, minutes"),
    "processes": Figure(
        "processes.csv", command="processes.py curves", needs="trainings in two processes, minutes"
    ),
}


def cells_of(figure: Figure) -> tuple[list[dict], list[dict]]:
    return read_cells(RESULTS, figure.data.split(), figure.skip_steps)


def checksum(figure: Figure) -> str:
    """Of what is drawn: of the rows of its cells, or of its file."""
    digest = hashlib.sha256()
    if not figure.command:
        for row in (row for table in cells_of(figure) for row in table):
            digest.update(",".join(row.get(name, "") for name in DRAWN).encode() + b"\n")
    elif figure.data:
        content = (RESULTS / figure.data).read_bytes().replace(b"\r\n", b"\n")
        digest.update(figure.data.encode() + b"\n" + content)
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
    if figure.command:
        program, *words = shlex.split(figure.command.replace("{out}", shlex.quote(str(out))))
        subprocess.run([sys.executable, str(ROOT / "benchmark" / program), *words], cwd=ROOT, check=True)
    else:
        plt.rcParams.update(STYLE)
        figure.draw(*cells_of(figure), out)
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
        if FIGURES[name].needs and name not in args.names:
            print(f"{name} is out of date, and needs {FIGURES[name].needs}: name it to draw it")
        else:
            draw(name)


if __name__ == "__main__":
    main()
