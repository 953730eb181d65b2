"""What a step of adaptation does in PointNavigation-v0: paths of one policy, and the returns of all variants.

    python benchmark/run.py --suite maml
    python benchmark/maml_paths.py --out docs/img/maml_paths.png

The left panels show greedy paths on ten goals, before and after one and three inner steps, by the run of seed
1 with --outer trpo. The last one, and benchmark/results/maml_steps.csv, have the returns of the final
evaluations of all seeds of the suite, on 100 goals, before and after each step.
"""

import argparse
import csv
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from plot import COLOURS, STYLE, make_panels, plt, save
from run import ROOT, load_script
from suites import SUITES

FAMILY, GOALS = "PointNavigation-v0", 10
TABLE = ROOT / "benchmark/results/maml_steps.csv"
RUNS = ROOT / "benchmark/runs"


def folder(cell, seed: int) -> Path:
    return RUNS / f"{cell.name}__{FAMILY}__{cell.steps}" / str(seed)


def returns_of(cell) -> dict[int, list[float]]:
    """Seed to mean returns after 0, 1, ... inner steps, as its final --evaluate printed them."""
    found = {}
    for seed in range(1, cell.seeds + 1):
        log = folder(cell, seed).with_suffix(".log")
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines:
            result = json.loads(line) if line.startswith("{") else {}
            if result.get("episodes") == 100:
                found[seed] = [x for name, x in result.items() if "return_after_" in name]
    return found


def read_table() -> dict[str, dict[int, list[float]]]:
    found = {}
    if TABLE.exists():
        for row in csv.DictReader(TABLE.open(newline="")):
            found.setdefault(row["algo"], {})[int(row["seed"])] = [
                float(value) for name, value in row.items() if name.startswith("after_")
            ]
    return found


def paths(maml, run: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Goals, and the greedy paths (T, GOALS, 2) before and after one and three inner steps."""
    torch.manual_seed(1)
    agent, args = maml.load_policy(run).agent, maml.Args(**maml.load(run)["args"])
    goals = maml.sample_tasks(args, GOALS, np.random.default_rng(args.eval_seed))
    envs, rollouts, found = maml.make_task_envs(args, goals, args.episodes_per_task), [], []
    for k in range(4):
        params = maml.adapt(agent, GOALS, rollouts, args)
        if k != 2:
            steps = maml.play_episodes(maml.make_task_envs(args, goals), partial(agent.act, params=params))
            found.append(np.stack([step["obs"] for step in steps]))
        steps = maml.play_episodes(envs, partial(agent.act, greedy=False, params=params))
        rollouts.append(maml.make_rollout(steps, GOALS, args, agent.device))
    return goals, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    args, maml, table = parser.parse_args(), load_script("maml"), read_table()
    cells = [cell for cell in SUITES["maml"] if cell.env_id == FAMILY]
    for cell in cells:
        if seeds := table.get(cell.name, {}) | returns_of(cell):
            table[cell.name] = seeds
    names = [f"after_{k}" for k in range(max(len(x) for seeds in table.values() for x in seeds.values()))]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["algo", "seed", *names])
        writer.writerows(
            [algo, seed, *x] for algo, seeds in table.items() for seed, x in sorted(seeds.items())
        )
    plt.rcParams.update(STYLE)
    figure, panels = make_panels(4)
    goals, found = paths(maml, folder(cells[0], 1))
    for axes, title, path in zip(panels, ("before", "after 1 step", "after 3 steps"), found, strict=False):
        for i, goal in enumerate(goals):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(*path[:, i].T, color=colour)
            axes.plot(*goal, "x", color=colour, markersize=8, markeredgewidth=2)
        axes.set(title=title, xlim=(-0.65, 0.65), ylim=(-0.65, 0.65), aspect="equal")
    for (algo, seeds), colour in zip(table.items(), COLOURS, strict=False):
        scores = np.array(list(seeds.values()))
        panels[3].plot(scores.mean(0), "o-", color=colour, label=algo)
        panels[3].fill_between(range(len(names)), scores.min(0), scores.max(0), color=colour, alpha=0.2)
    panels[3].set(
        title=f"{FAMILY}, 100 goals", xlabel="inner steps", ylabel="return", xticks=range(len(names))
    )
    panels[3].legend()
    save(figure, "", args.out, {})


if __name__ == "__main__":
    main()
