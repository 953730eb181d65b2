"""Draws what algos/q_learning.py learned; measures the cliff of Sutton and Barto 2018 and what masks save.

    python benchmark/q_table.py --run runs/FrozenLake-v1/q_learning/1-20270131-120000
    python benchmark/q_table.py --cliff
    python benchmark/q_table.py --taxi
    python benchmark/figures.py cliff taxi_masks

--run writes RUN/plots/values.png, the value max_a Q(s, a) of each state, and RUN/plots/policy.png, the action
of that value. --cliff trains SARSA and Q-learning with epsilon 0.1, and writes the return of each episode
while they learn to benchmark/results/cliff.csv. --taxi trains on Taxi-v4 with and without its masks of legal
actions, and writes the return of the greedy policy to benchmark/results/taxi_masks.csv.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from plot import COLOURS, STYLE, make_panels, plt, save
from run import ROOT, load_script, write_table

WORLDS = {  # a symbol for each action, and the grid of the states where they are numbers alone
    "FrozenLake": ("←↓→↑", lambda world: world.desc.shape),
    "CliffWalking": ("↑→↓←", lambda world: world.shape),
    "Taxi": ("↓↑→←PD", lambda world: (5, 5, 5, 4)),  # row, column, place of the passenger, destination
    "MountainCar": ("←·→", None),
    "CartPole": ("←→", None),
    "Blackjack": ("SH", None),
}
PLACES = ["red", "green", "yellow", "blue", "taxi"]  # of Taxi
SEEDS, EPISODES = 50, 500  # of each rule on the cliff
TAXI_SEEDS = 10  # with masks and without


# ------------------------------------------------------------------------------------------ values and policy
def pictures_of(table: np.ndarray, env: gym.Env, grid) -> dict[str, np.ndarray]:
    """Cuts numbers of the states, (cells of each dimension), into titled pictures (rows, columns)."""
    if isinstance(env.observation_space, gym.spaces.Box) and table.ndim > 1:
        # The two dimensions with the most cells; of the others the middle.
        x, y = sorted(np.argsort(table.shape, kind="stable")[-2:])
        middle = tuple(slice(None) if i in (x, y) else n // 2 for i, n in enumerate(table.shape))
        return {f"dimension {x} to the right, {y} upwards": table[middle].T[::-1]}
    table = np.atleast_2d(table.reshape(grid(env.unwrapped)) if grid else table)
    title = lambda *rest: f"last parts {', '.join(map(str, rest))}" if rest else ""
    if env.spec.id.startswith("Taxi"):
        title = lambda here, to: f"from {PLACES[here]} to {PLACES[to]}"
    return {title(*rest): table[(slice(None), slice(None), *rest)] for rest in np.ndindex(table.shape[2:])}


def draw_table(run: Path) -> None:
    """Writes RUN/plots/values.png and RUN/plots/policy.png. States that were never left stay white."""
    args = json.loads((run / "args.json").read_text())
    agent = torch.load(run / "checkpoint.pt", weights_only=True)["agent"]
    env = gym.make(args["env_id"], **args["env_kwargs"])
    q_values, sizes = agent["q_values"].numpy(), agent["_extra_state"][0].long().tolist()
    seen = (q_values != args["initial_value"]).any(axis=(0, 2))
    q_values = q_values.mean(axis=0)
    count = q_values.shape[1]
    known = (world for name, world in WORLDS.items() if args["env_id"].startswith(name))
    symbols, grid = next(known, (list(map(str, range(count))), None))
    colours = ListedColormap([COLOURS[i % len(COLOURS)] for i in range(count)])
    values, actions = (np.where(seen, x, np.nan) for x in (q_values.max(axis=1), q_values.argmax(axis=1)))
    for what, numbers, label, style in (
        ("values", values, "max$_a$ Q(s, a)", dict(vmin=np.nanmin(values), vmax=np.nanmax(values))),
        ("policy", actions, "action of the largest Q(s, a)", dict(cmap=colours, vmin=-0.5, vmax=count - 0.5)),
    ):
        pictures = pictures_of(numbers.reshape(sizes), env, grid)
        rows, columns = next(iter(pictures.values())).shape
        width = min(4.5, max(2.0, 0.42 * columns))
        figure, panels = make_panels(len(pictures), width, width * min(1.0, rows / columns) + 0.4)
        for axes, (title, picture) in zip(panels, pictures.items(), strict=True):
            image = axes.imshow(picture, aspect="auto", **style)
            axes.set_title(title, fontsize=9)
            axes.set(xticks=[], yticks=[])  # and so no grid
            if what == "policy" and columns <= 12:  # with more a symbol in each cell cannot be read
                for y, x in np.argwhere(np.isfinite(picture)):
                    axes.text(x, y, symbols[int(picture[y, x])], ha="center", va="center", color="white")
        bar = figure.colorbar(image, ax=panels)
        if what == "policy":
            bar.set_ticks(range(count), labels=list(symbols))
        title = f"{args['env_id']}, {args['update_rule']}\n{label}"
        save(figure, title, run / "plots" / f"{what}.png", {})


# ------------------------------------------------------------------------------------------------- the cliff
def episode_returns(rule: str, seed: int) -> list[float]:
    """Returns of the first episodes while learning, as in the example, which leaves alpha open (0.5 here)."""
    q_learning, returns = load_script("q_learning"), []

    class Watched(q_learning.Run):
        def log(self, metrics):
            returns.extend(return_ for return_, _ in self.episodes)
            super().log(metrics)

    q_learning.Run = Watched
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        q_learning.train(q_learning.Args(
            env_id="CliffWalking-v1", env_kwargs=dict(max_episode_steps=10_000), update_rule=rule, seed=seed,
            run_dir=f"{folder}/run", num_envs=1, total_timesteps=10_000 + 30 * EPISODES, eval_every=0,
            eval_episodes=1, checkpoint_every=0, log_every=1_000, learning_rate=0.5, anneal_lr=False,
            gamma=1.0, epsilon_start=0.1, epsilon_decay=1.0, epsilon_min=0.0,
        ))  # fmt: skip
    return returns[:EPISODES]


def measure_cliff() -> None:
    rows = []
    for rule in ("sarsa", "q_learning"):
        returns = [episode_returns(rule, seed) for seed in range(1, SEEDS + 1)]
        mean, std = np.mean(returns, axis=0).round(3), np.std(returns, axis=0).round(3)
        rows += [[rule, i + 1, SEEDS, float(mean[i]), float(std[i])] for i in range(EPISODES)]
        print(f"{rule}: mean return of the last 100 episodes {mean[-100:].mean():.1f}")
    columns = ["update_rule", "episode", "seeds", "return_mean", "return_std"]
    write_table(ROOT / "benchmark/results/cliff.csv", columns, rows)


# ----------------------------------------------------------------------------------------------------- masks
class Unmasked(gym.Wrapper):
    """Taxi-v4 without the masks of legal actions in its info."""

    def __init__(self):
        super().__init__(gym.make("Taxi-v4"))

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        return *super().step(action)[:4], {}


def greedy_returns(env_id: str, seed: int) -> list[tuple[int, float]]:
    """(step, mean return of 50 greedy episodes) in a training with the settings of Taxi-v4, but shorter."""
    q_learning = load_script("q_learning")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = q_learning.make_args(
            "Taxi-v4", seed=seed, run_dir=f"{folder}/run", total_timesteps=150_000, eval_every=5_000,
            eval_episodes=50,
        )  # fmt: skip
        q_learning.train(q_learning.replace(args, env_id=env_id))
        rows = [json.loads(line) for line in Path(f"{folder}/run/progress.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval/return_mean"]) for row in rows if "eval/return_mean" in row]


def measure_taxi() -> None:
    gym.register("Unmasked-v0", Unmasked)
    rows = []
    for env_id, label in (("Taxi-v4", "with masks"), ("Unmasked-v0", "without")):
        curves = [greedy_returns(env_id, seed) for seed in range(1, TAXI_SEEDS + 1)]
        for seed, curve in enumerate(curves, start=1):
            rows += [[env_id == "Taxi-v4", seed, step, round(score, 3)] for step, score in curve]
        reach = [next(step for step, score in curve if score >= 7) for curve in curves]
        print(f"{label}: a return of 7 after {np.median(reach):,.0f} steps (median of the seeds)")
    columns = ["masks", "seed", "step", "eval_return_mean"]
    write_table(ROOT / "benchmark/results/taxi_masks.csv", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="run folder of q_learning.py")
    what.add_argument("--cliff", action="store_true", help="SARSA against Q-learning")
    what.add_argument("--taxi", action="store_true", help="with and without masks of legal actions")
    args = parser.parse_args()
    if args.cliff:
        measure_cliff()
    elif args.taxi:
        measure_taxi()
    else:
        plt.rcParams.update(STYLE)
        draw_table(args.run)


if __name__ == "__main__":
    main()
