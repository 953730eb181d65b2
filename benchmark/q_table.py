"""Draws what algos/q_learning.py has learned, and the cliff example of Sutton and Barto 2018.

    python benchmark/q_table.py --run runs/FrozenLake-v1/q_learning/1-20270131-120000
    python benchmark/q_table.py --cliff docs/img/cliff.png

--run writes RUN/plots/values.png, the value max_a Q(s, a) of each state, and RUN/plots/policy.png, the action
of that value. --cliff trains SARSA and Q-learning with epsilon 0.1, and draws the return of each episode
while they learn; its numbers are in benchmark/results/cliff.csv.
"""

import argparse
import contextlib
import csv
import io
import json
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from plot import COLOURS, STYLE, make_panels, matplotlib, plt  # says so if matplotlib is missing
from run import ROOT, load_script

SYMBOLS = {
    "FrozenLake": "←↓→↑", "CliffWalking": "↑→↓←", "Taxi": "↓↑→←PD", "MountainCar": "←·→", "CartPole": "←→",
    "Blackjack": "SH",
}  # fmt: skip
TAXI = (5, 5, 5, 4)  # row, column, place of the passenger (4: in the taxi), destination
LARGEST_TEXT = 12  # with more columns a symbol in each cell cannot be read


# ------------------------------------------------------------------------------------------ values and policy
def pictures_of(table: np.ndarray, env: gym.Env) -> dict[str, np.ndarray]:
    """Cuts numbers of the states, in the shape of the grid, into titled pictures (rows, columns)."""
    name, world = env.spec.id.partition("-")[0], env.unwrapped
    if isinstance(env.observation_space, gym.spaces.Box):
        if table.ndim == 1:
            return {"": table[None]}
        # The two dimensions with the most cells; of the others the middle.
        x, y = sorted(np.argsort(table.shape, kind="stable")[-2:])
        middle = tuple(slice(None) if i in (x, y) else n // 2 for i, n in enumerate(table.shape))
        return {f"dimension {x} to the right, {y} upwards": table[middle].T[::-1]}
    if name == "Taxi":
        table = table.reshape(TAXI)
        places = ["red", "green", "yellow", "blue", "taxi"]
        title = lambda here, to: f"from {places[here]} to {places[to]}"
    else:
        if name.startswith("FrozenLake"):
            table = table.reshape(world.nrow, world.ncol)
        elif name.startswith("CliffWalking"):
            table = table.reshape(world.shape)
        title = lambda *rest: f"last parts {', '.join(map(str, rest))}" if rest else ""
    table = np.atleast_2d(table)
    return {title(*rest): table[(slice(None), slice(None), *rest)] for rest in np.ndindex(table.shape[2:])}


def draw_table(run: Path) -> None:
    """Writes RUN/plots/values.png and RUN/plots/policy.png. States that were never left stay white."""
    args = json.loads((run / "args.json").read_text())
    agent = torch.load(run / "checkpoint.pt", weights_only=True)["agent"]
    env = gym.make(args["env_id"], **args["env_kwargs"])
    q_values, sizes = agent["q_values"].numpy(), agent["_extra_state"][0].long().tolist()
    seen = (q_values != args["initial_value"]).any(axis=(0, 2))
    q_values = q_values.mean(axis=0)
    known = next((SYMBOLS[name] for name in SYMBOLS if env.spec.id.startswith(name)), None)
    symbols = known or [str(action) for action in range(q_values.shape[1])]
    colours = matplotlib.colors.ListedColormap([COLOURS[i % len(COLOURS)] for i in range(len(symbols))])
    shape = lambda numbers: pictures_of(np.where(seen, numbers, np.nan).reshape(sizes), env)
    values, policy = shape(q_values.max(axis=1)), shape(q_values.argmax(axis=1))
    (run / "plots").mkdir(exist_ok=True)
    for what, pictures in {"values": values, "policy": policy}.items():
        rows, columns = next(iter(pictures.values())).shape
        width = min(4.5, max(2.0, 0.42 * columns))
        figure, panels = make_panels(len(pictures), width, width * min(1.0, rows / columns) + 0.4)
        limits = dict(vmin=np.nanmin(q_values.max(1)[seen]), vmax=np.nanmax(q_values.max(1)[seen]))
        if what == "policy":
            limits = dict(vmin=-0.5, vmax=len(symbols) - 0.5)
        for axes, (title, picture) in zip(panels, pictures.items(), strict=True):
            image = axes.imshow(
                picture, cmap=colours if what == "policy" else "viridis", aspect="auto", **limits
            )
            axes.set_title(title, fontsize=9)
            axes.set(xticks=[], yticks=[])
            axes.grid(False)
            if what == "policy" and columns <= LARGEST_TEXT:
                for (y, x), action in np.ndenumerate(picture):
                    if np.isfinite(action):
                        axes.text(x, y, symbols[int(action)], ha="center", va="center", color="white")
        bar = figure.colorbar(image, ax=panels)
        if what == "policy":
            bar.set_ticks(range(len(symbols)), labels=list(symbols))
        label = {"values": "max$_a$ Q(s, a)", "policy": "action of the largest Q(s, a)"}[what]
        figure.suptitle(f"{args['env_id']}, {args['update_rule']}\n{label}", fontsize=10)
        figure.savefig(run / "plots" / f"{what}.png")
        plt.close(figure)
        print(run / "plots" / f"{what}.png")


# ------------------------------------------------------------------------------------------------- the cliff
def episode_returns(q_learning, rule: str, seed: int, episodes: int) -> list[float]:
    """Returns of the first episodes while learning, as in the example, which leaves alpha open (0.5 here)."""
    returns = []

    class Watched(q_learning.Run):
        def log(self, metrics):
            returns.extend(return_ for return_, _ in self.episodes)
            super().log(metrics)

    q_learning.Run, run = Watched, q_learning.Run
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        q_learning.train(q_learning.Args(
            env_id="CliffWalking-v1", env_kwargs=dict(max_episode_steps=10_000), update_rule=rule, seed=seed,
            run_dir=f"{folder}/run", num_envs=1, total_timesteps=10_000 + 30 * episodes, eval_every=0,
            eval_episodes=1, checkpoint_every=0, log_every=1_000, learning_rate=0.5, anneal_lr=False,
            gamma=1.0, epsilon_start=0.1, epsilon_decay=1.0, epsilon_min=0.0,
        ))  # fmt: skip
    q_learning.Run = run
    if len(returns) < episodes:
        sys.exit(f"q_table.py: {rule} with seed {seed} finished {len(returns)} episodes of {episodes}")
    return returns[:episodes]


def draw_cliff(out: Path, table: Path, seeds: int, episodes: int) -> None:
    q_learning = load_script("q_learning")
    figure, (axes,) = make_panels(1, 6.0, 3.6)
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["update_rule", "episode", "seeds", "return_mean", "return_std"])
        for (rule, label), colour in zip(
            {"sarsa": "SARSA", "q_learning": "Q-learning"}.items(), COLOURS, strict=False
        ):
            returns = [episode_returns(q_learning, rule, seed, episodes) for seed in range(1, seeds + 1)]
            mean, std = np.mean(returns, axis=0), np.std(returns, axis=0)
            for episode, numbers in enumerate(zip(mean.tolist(), std.tolist(), strict=True), start=1):
                rows.writerow([rule, episode, seeds, *(round(number, 3) for number in numbers)])
            smooth = np.convolve(mean, np.ones(10) / 10, mode="valid")
            axes.plot(np.arange(len(smooth)) + 5.5, smooth, color=colour, label=label)
            print(f"{label}: mean return of the last 100 episodes {mean[-100:].mean():.1f}")
    axes.axhline(-13, color="black", linestyle=":", linewidth=1.3, label="best possible")
    axes.set(ylim=(-100, -5), xlabel="episode", ylabel="return while learning")
    axes.set_title(f"CliffWalking-v1, epsilon 0.1; mean of {seeds} seeds and 10 episodes", fontsize=10)
    axes.legend(fontsize=9)
    figure.savefig(out)
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="run folder of q_learning.py")
    parser.add_argument("--cliff", type=Path, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--seeds", type=int, default=50, help="trainings of each rule; goes with --cliff")
    parser.add_argument("--episodes", type=int, default=500, help="episodes of each; goes with --cliff")
    parser.add_argument("--table", type=Path, default=ROOT / "benchmark" / "results" / "cliff.csv")
    args = parser.parse_args()
    if bool(args.run) == bool(args.cliff):
        parser.error("give one of --run FOLDER and --cliff PICTURE")
    plt.rcParams.update(STYLE)
    if args.cliff:
        draw_cliff(args.cliff, args.table, args.seeds, args.episodes)
    elif not (args.run / "checkpoint.pt").is_file():
        sys.exit(f"q_table.py: {args.run} has no checkpoint.pt: give the folder of a run of q_learning.py")
    else:
        draw_table(args.run)


if __name__ == "__main__":
    main()
