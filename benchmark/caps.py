"""Measures how smooth the actions of trained policies of algos/sac.py are, and draws them.

    python benchmark/run.py --suite caps --jobs 2
    python benchmark/caps.py --out docs/img/caps.png

The measure is Sm of Mysore et al. 2021 (arXiv 2012.06644): twice the mean over the frequencies, up to half of
the sampling frequency f_s, of amplitude times frequency over f_s, of the deterministic policy's actions in an
episode, here in the units of the environment. Smaller is smoother. Policies with CAPS and without play the
same 20 episodes. Rows, one a seed, go to benchmark/results/caps.csv.
"""

import argparse
import csv
import statistics
import sys
from pathlib import Path

import numpy as np
from plot import COLOURS, STYLE, make_panels, plt, save
from run import ROOT, load_script

SIDES = ("sac", "sac-caps")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    args = parser.parse_args()
    plt.rcParams.update(STYLE)
    figure, panels = make_panels(2, 5.0, 3.0)
    sac, rows = load_script("sac"), []
    for name, axes, colour in zip(SIDES, panels, COLOURS, strict=False):
        runs = (ROOT / "benchmark/runs" / f"{name}__Pendulum-v1__40000").glob("*/checkpoint.pt")
        runs = sorted(runs, key=lambda path: int(path.parent.name))
        if not runs:
            sys.exit(f"caps.py: no runs of {name}: python benchmark/run.py --suite caps")
        for run in runs:
            episodes, returns = play(sac, run.parent)
            if run == runs[0]:
                axes.plot(episodes[0][:, 0], color=colour, linewidth=1.2)
            smooth = round(statistics.mean(map(smoothness, episodes)), 5)
            rows.append([name, run.parent.name, EPISODES, smooth, round(statistics.mean(returns), 2)])
        axes.set(title=f"{name}, seed 1, one episode", xlabel="step", ylabel="action (torque)")
        axes.set_ylim(-2.1, 2.1)
    with (ROOT / "benchmark/results/caps.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["algo", "seed", "episodes", "smoothness", "return_mean"])
        table.writerows(rows)
    mean = lambda column: [statistics.mean(row[column] for row in rows if row[0] == name) for name in SIDES]
    (plain, caps), (return_plain, return_caps) = mean(3), mean(4)
    print(f"smoothness measure {plain:.4f} without CAPS, {caps:.4f} with it: {1 - caps / plain:.0%} less")
    print(f"return {return_plain:.1f} without CAPS, {return_caps:.1f} with it ({EPISODES} episodes a seed)")
    save(figure, "", args.out, {})


if __name__ == "__main__":
    main()
