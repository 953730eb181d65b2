"""What a step of adaptation does in PointNavigation-v0: paths of one policy, and the returns of all variants.

    python benchmark/run.py --suite maml
    python benchmark/maml_paths.py
    python benchmark/figures.py maml_paths

benchmark/results/maml_paths.csv gets greedy paths to ten goals, before and after one and three inner steps,
by the run of seed 1 with --outer trpo. maml_steps.csv gets the returns of the final evaluations of all seeds
of the suite, on 100 goals, before and after each step.
"""

import argparse
import csv
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from run import ROOT, load_script, write_table
from suites import SUITES

FAMILY, GOALS = "PointNavigation-v0", 10
TABLE, PATHS = (ROOT / f"benchmark/results/{name}.csv" for name in ("maml_steps", "maml_paths"))
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


def paths(maml, run: Path) -> list[list]:
    """Rows of PATHS: greedy paths to GOALS goals, before and after one and three inner steps."""
    torch.manual_seed(1)
    agent, args = maml.load_policy(run).agent, maml.Args(**maml.load(run)["args"])
    goals = maml.sample_tasks(args, GOALS, np.random.default_rng(args.eval_seed))
    envs, rollouts, rows = maml.make_task_envs(args, goals, args.episodes_per_task), [], []
    for k in range(4):
        params = maml.adapt(agent, GOALS, rollouts, args)
        if k != 2:
            steps = maml.play_episodes(maml.make_task_envs(args, goals), partial(agent.act, params=params))
            path = np.stack([step["obs"] for step in steps])  # (T, GOALS, 2)
            for i, t in np.ndindex(GOALS, len(path)):
                rows.append([k, i, t, *(f"{x:.4f}" for x in (*goals[i], *path[t, i]))])
        steps = maml.play_episodes(envs, partial(agent.act, greedy=False, params=params))
        rollouts.append(maml.make_rollout(steps, GOALS, args, agent.device))
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    table, cells = read_table(), [cell for cell in SUITES["maml"] if cell.env_id == FAMILY]
    for cell in cells:
        if seeds := table.get(cell.name, {}) | returns_of(cell):
            table[cell.name] = seeds
    names = [f"after_{k}" for k in range(max(len(x) for seeds in table.values() for x in seeds.values()))]
    rows = [
        [algo, seed, *(f"{y:.5g}" for y in x)]
        for algo, seeds in table.items()
        for seed, x in sorted(seeds.items())
    ]
    write_table(TABLE, ["algo", "seed", *names], rows)
    columns = ["inner_steps", "goal", "step", "goal_x", "goal_y", "x", "y"]
    write_table(PATHS, columns, paths(load_script("maml"), folder(cells[0], 1)))


if __name__ == "__main__":
    main()
