"""Measures how the belief of algos/pearl.py about a point robot's goal narrows, episode by episode.

    python benchmark/posterior.py benchmark/runs/pearl__SparsePointRobot-v0__400000/1 --task 7
    python benchmark/figures.py pearl_posterior

benchmark/results/pearl_paths.csv gets, for one held-out task, where the greedy policy would go for 40 z drawn
from the belief before each episode, and the episode that was played (its draw is empty). pearl_beliefs.csv
gets the belief before each episode in 40 held-out tasks: mean and standard deviation of z.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from run import ROOT, load_script, write_table

EPISODES, DRAWS, TASKS = 4, 40, 40
PATHS, BELIEFS = (ROOT / f"benchmark/results/pearl_{name}.csv" for name in ("paths", "beliefs"))


def play(pearl, args, agent, tasks, z, seed, steps=None):
    """Positions (time, B, 2) of an episode of each task, acting on z. With steps z is drawn anew from the
    belief after them where the run does so, and they grow by what happens."""
    envs = pearl.make_task_envs(args, tasks)
    obs, _ = envs.reset(seed=seed)
    path = [obs]
    for t in range(args.horizon):
        if steps is not None and args.hold_z and t and t % args.hold_z == 0:
            z = pearl.draw(*agent.belief_after(steps, len(tasks)))
        action = agent.act(obs, {"z": z})
        next_obs, reward, *_ = envs.step(action)
        if steps is not None:
            steps.append(dict(obs=obs, action=action, reward=reward, next_obs=next_obs))
        obs = next_obs
        path.append(obs)
    return np.stack(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder or .pt file of algos/pearl.py, of a point robot")
    parser.add_argument("--task", type=int, default=0, help="the held-out task whose paths are kept")
    options, pearl = parser.parse_args(), load_script("pearl")
    args, agent = pearl.Args(**pearl.load(options.run)["args"]), pearl.load_policy(options.run).agent
    torch.manual_seed(args.eval_seed)
    tasks = pearl.sample_tasks(args, TASKS, np.random.default_rng(args.eval_seed))
    shown, steps, paths, beliefs = options.task % TASKS, [], [], []
    for episode in range(EPISODES):
        mean, var = agent.belief_after(steps, TASKS)
        for i, row in enumerate(np.concatenate([tasks, mean, var.sqrt()], axis=1)):
            beliefs.append([args.env_id, episode + 1, i, *(f"{x:.4f}" for x in row)])
        z = pearl.draw(mean[shown].expand(DRAWS, -1), var[shown].expand(DRAWS, -1))
        would = play(pearl, args, agent, np.repeat(tasks[[shown]], DRAWS, axis=0), z, args.eval_seed)
        seed = args.eval_seed + episode
        path = play(pearl, args, agent, tasks, pearl.draw(mean, var), seed, steps)[:, shown]
        for draw, positions in [*enumerate(would.transpose(1, 0, 2)), ("", path)]:
            paths += [
                [shown, episode + 1, draw, t, f"{x:.3f}", f"{y:.3f}"] for t, (x, y) in enumerate(positions)
            ]
    z = [f"{name}_{i + 1}" for name in ("mean", "std") for i in range(args.latent_dim)]
    write_table(BELIEFS, ["env_id", "episode", "task", "goal_x", "goal_y", *z], beliefs)
    write_table(PATHS, ["task", "episode", "draw", "step", "x", "y"], paths)


if __name__ == "__main__":
    main()
