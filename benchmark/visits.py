"""Counts which states trainings of ppo.py and ppo_rnd.py visit, at equal settings, in each quarter.

    python benchmark/visits.py                   # trainings of a minute in all
    python benchmark/figures.py visits

Counts what steps led to: the places of the grid (327 are free), and MountainCar's positions and velocities on
a raster. The counts go to benchmark/results/visits.csv, a row for each place.
"""

import argparse
import tempfile
from dataclasses import fields

import numpy as np
from run import ROOT, load_script, write_table

GRID = "benchmark.hidden_envs:SparseGrid-v0"
STEPS = {GRID: 60_000, "MountainCar-v0": 40_000}
SETTINGS = {GRID: dict(num_envs=16, num_steps=64, update_epochs=4, learning_rate=1e-3, predictor_lr=1e-3)}
QUARTERS, RASTER = 4, (28, 36)  # rows and columns of MountainCar's
TABLE = ROOT / "benchmark/results/visits.csv"


def places(env_id: str, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Row and column (B,) of each observation, and how many there are."""
    if env_id == GRID:  # two choices, one-hot: the column, then the row among 9
        return obs[:, -9:].argmax(1), obs[:, :-9].argmax(1), (9, obs.shape[1] - 9)
    position, velocity = (obs[:, 0] + 1.2) / 1.8, (obs[:, 1] + 0.07) / 0.14
    scaled = np.stack([velocity, position]) * np.array(RASTER)[:, None]
    row, column = np.minimum(scaled.astype(int), np.array(RASTER)[:, None] - 1)
    return row, column, RASTER


def visits(algo: str, env_id: str, seed: int) -> np.ndarray:
    """How often each quarter of a training led to each place, (rows, columns, QUARTERS)."""
    script, seen = load_script(algo), []
    stack = script.stack_steps
    script.stack_steps = lambda steps: seen.extend(step["next_obs"] for step in steps) or stack(steps)
    with tempfile.TemporaryDirectory() as folder:
        changes = dict(total_timesteps=STEPS[env_id], eval_every=0, eval_episodes=1, checkpoint_every=0)
        changes |= dict(seed=seed, run_dir=folder) | SETTINGS.get(env_id, {})
        settings = vars(load_script("ppo_rnd").make_args(env_id, **changes))
        names = {field.name for field in fields(script.Args)}
        script.train(script.Args(**{name: x for name, x in settings.items() if name in names}))
    obs = np.concatenate(seen)
    row, column, shape = places(env_id, obs)
    counts = np.zeros((*shape, QUARTERS), int)
    np.add.at(counts, (row, column, np.arange(len(obs)) * QUARTERS // len(obs)), 1)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    args, rows = parser.parse_args(), []
    for env_id, algo in ((env_id, algo) for env_id in STEPS for algo in ("ppo", "ppo_rnd")):
        counts = visits(algo, env_id, args.seed)
        rows += [[algo, env_id, *place, *counts[place]] for place in np.ndindex(counts.shape[:2])]
    columns = ["algo", "env_id", "row", "column", *(f"quarter_{i + 1}" for i in range(QUARTERS))]
    write_table(TABLE, columns, rows)


if __name__ == "__main__":
    main()
