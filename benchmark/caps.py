"""Measures how smooth the actions of trained policies of algos/sac.py are.

    python benchmark/run.py --suite caps --jobs 2
    python benchmark/caps.py
    python benchmark/figures.py caps

The measure is Sm of Mysore et al. 2021 (arXiv 2012.06644): twice the mean over the frequencies, up to half of
the sampling frequency f_s, of amplitude times frequency over f_s, of the deterministic policy's actions in an
episode, here in the units of the environment. Smaller is smoother. Policies with CAPS and without play the
same 20 episodes. Rows, one a seed, go to benchmark/results/caps.csv; the actions of the first seed in its
first episode go to caps_actions.csv.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
from run import ROOT, load_script, write_table

SIDES, RESULTS = ("sac", "sac-caps"), ROOT / "benchmark/results"
FIRST_SEED, EPISODES = 20_000_000, 20  # of the episodes; no training has seen these starts


def smoothness(actions: np.ndarray) -> float:
    """Sm of actions (T, A) without their constant part: 2/n sum_i M_i f_i / f_s, mean over the dimensions."""
    amplitude = 2 / len(actions) * np.abs(np.fft.rfft(actions, axis=0))[1:]
    frequency = np.fft.rfftfreq(len(actions))[1:, None]  # over f_s
    return float((2 * (amplitude * frequency).mean(axis=0)).mean())


def play(sac, run: Path) -> tuple[list[np.ndarray], list[float]]:
    """Actions (T, A) and returns of the episodes that the last policy of a run plays without noise."""
    policy, env = sac.load_policy(run), sac.gym.make(sac.load(run)["args"]["env_id"])
    episodes, returns = [], []
    for episode in range(EPISODES):
        (obs, info), done, actions, total = env.reset(seed=FIRST_SEED + episode), False, [], 0.0
        while not done:
            action = policy(obs, info)
            obs, reward, terminated, truncated, info = env.step(action)
            actions.append(action)
            done, total = terminated or truncated, total + float(reward)
        episodes.append(np.stack(actions))
        returns.append(total)
    env.close()
    return episodes, returns


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    sac, rows, shown = load_script("sac"), [], []
    for name in SIDES:
        runs = (ROOT / "benchmark/runs" / f"{name}__Pendulum-v1__40000").glob("*/checkpoint.pt")
        runs = sorted(runs, key=lambda path: int(path.parent.name))
        if not runs:
            sys.exit(f"caps.py: no runs of {name}: python benchmark/run.py --suite caps")
        for run in runs:
            episodes, returns = play(sac, run.parent)
            if run == runs[0]:
                shown += [[name, step, f"{action:.3f}"] for step, action in enumerate(episodes[0][:, 0])]
            smooth = round(statistics.mean(map(smoothness, episodes)), 5)
            rows.append([name, run.parent.name, EPISODES, smooth, round(statistics.mean(returns), 2)])
    write_table(RESULTS / "caps.csv", ["algo", "seed", "episodes", "smoothness", "return_mean"], rows)
    write_table(RESULTS / "caps_actions.csv", ["algo", "step", "action"], shown)
    mean = lambda column: [statistics.mean(row[column] for row in rows if row[0] == name) for name in SIDES]
    (plain, caps), (return_plain, return_caps) = mean(3), mean(4)
    print(f"smoothness measure {plain:.4f} without CAPS, {caps:.4f} with it: {1 - caps / plain:.0%} less")
    print(f"return {return_plain:.1f} without CAPS, {return_caps:.1f} with it ({EPISODES} episodes a seed)")


if __name__ == "__main__":
    main()
