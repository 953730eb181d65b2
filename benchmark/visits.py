"""Which states trainings of ppo.py and ppo_rnd.py visit, at equal settings: a picture of their four quarters.

    python benchmark/visits.py --out docs/img/visits.png

Counts what steps led to: the places of the grid (327 are free), and MountainCar's positions and velocities on
a raster. Prints how many places were visited up to the end of each quarter.
"""

import argparse
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
from plot import STYLE, plt, save
from run import load_script, short

GRID = "benchmark.hidden_envs:SparseGrid-v0"
STEPS = {GRID: 60_000, "MountainCar-v0": 40_000}
SETTINGS = {GRID: dict(num_envs=16, num_steps=64, update_epochs=4, learning_rate=1e-3, predictor_lr=1e-3)}
QUARTERS, RASTER = 4, (28, 36)  # rows and columns of MountainCar's


def places(env_id: str, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Row and column (B,) of each observation, and how many there are."""
    if env_id == GRID:  # two choices, one-hot: the column, then the row among 9
        return obs[:, -9:].argmax(1), obs[:, :-9].argmax(1), (9, obs.shape[1] - 9)
    position, velocity = (obs[:, 0] + 1.2) / 1.8, (obs[:, 1] + 0.07) / 0.14
    scaled = np.stack([velocity, position]) * np.array(RASTER)[:, None]
    row, column = np.minimum(scaled.astype(int), np.array(RASTER)[:, None] - 1)
    return row, column, RASTER


def visits(algo: str, env_id: str, seed: int) -> np.ndarray:
    """How often each quarter of a training led to each place, (QUARTERS, rows, columns)."""
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
    counts = np.zeros((QUARTERS, *shape))
    np.add.at(counts, (np.arange(len(obs)) * QUARTERS // len(obs), row, column), 1)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("visits.png"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    plt.rcParams.update(STYLE | {"axes.grid": False})
    rows = [(env_id, algo) for env_id in STEPS for algo in ("ppo", "ppo_rnd")]
    figure, grid = plt.subplots(len(rows), QUARTERS, figsize=(9, 7.5), squeeze=False)
    print("script  environment       places visited after each quarter")
    for line, (env_id, algo) in zip(grid, rows, strict=True):
        counts = visits(algo, env_id, args.seed)
        name = env_id.partition(":")[2] or env_id
        seen = (counts.cumsum(0) > 0).sum((1, 2))
        print(f"{algo:8}{name:18}{' '.join(map(str, seen))}", flush=True)
        for quarter, axes in enumerate(line):
            picture = np.where(counts[quarter] > 0, np.log10(counts[quarter].clip(1)), np.nan)
            axes.imshow(picture, cmap="viridis_r", vmin=0, aspect="auto", origin="upper")
            axes.set(xticks=[], yticks=[])
            end = short(STEPS[env_id] * (quarter + 1) / QUARTERS)
            axes.set_title(f"to step {end}: {seen[quarter]} places", fontsize=9)
        line[0].set_ylabel(f"{algo}\n{name}", fontsize=9)
    save(figure, "States visited in each quarter of a training (darker: more often)", args.out, {})


if __name__ == "__main__":
    main()
