"""Draws how the belief of algos/pearl.py about a point robot's goal narrows, episode by episode.

    python benchmark/posterior.py runs/sparse --task 7 --out docs/img/pearl_posterior.png

Above, one held-out task: where the greedy policy would go (grey) for 60 z drawn from the belief before each
episode, the episode that was played (black) and the goal (red). Below, several held-out tasks, a colour for
each angle of the goal: mean and one standard deviation of the belief, in the two dimensions of z whose means
differ most in the end.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.patches import Ellipse
from plot import STYLE, plt, save
from run import load_script

EPISODES, DRAWS, TASKS = 4, 60, 40


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="run folder or .pt file of algos/pearl.py, of a point robot")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--task", type=int, default=0, help="which held-out task the upper row shows")
    options, pearl = parser.parse_args(), load_script("pearl")
    args, agent = pearl.Args(**pearl.load(options.run)["args"]), pearl.load_policy(options.run).agent
    torch.manual_seed(args.eval_seed)
    tasks = pearl.sample_tasks(args, TASKS, np.random.default_rng(args.eval_seed))
    shown, steps, beliefs = options.task % TASKS, [], []
    plt.rcParams.update(STYLE)
    figure, panels = plt.subplots(2, EPISODES, figsize=(3 * EPISODES, 6))
    for episode, axes in enumerate(panels[0]):
        mean, var = agent.belief_after(steps, TASKS)
        beliefs.append((mean.numpy(), var.sqrt().numpy()))
        z = pearl.draw(mean[shown].expand(DRAWS, -1), var[shown].expand(DRAWS, -1))
        would = play(
            pearl, args, agent, np.repeat(tasks[shown : shown + 1], DRAWS, axis=0), z, args.eval_seed
        )
        axes.plot(*would.transpose(2, 0, 1), color="0.6", linewidth=0.7, alpha=0.7)
        path = play(pearl, args, agent, tasks, pearl.draw(mean, var), args.eval_seed + episode, steps)[
            :, shown
        ]
        axes.plot(*path.T, color="black", linewidth=1.5)
        axes.add_patch(plt.Circle(tasks[shown], 0.2, color="#D55E00", alpha=0.5, linewidth=0))
        axes.set(title=f"episode {episode + 1}", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    first, second = np.argsort(beliefs[-1][0].std(axis=0))[-2:]
    far = 1.1 * max(np.abs(mean[:, [first, second]]).max() for mean, _ in beliefs)
    colours = plt.cm.hsv(np.arctan2(tasks[:, 1], tasks[:, 0]) / (2 * np.pi) % 1)
    for axes, (mean, std) in zip(panels[1], beliefs, strict=True):
        for i in range(TASKS):
            at, size = mean[i, [first, second]], 2 * std[i, [first, second]]
            axes.add_patch(Ellipse(at, *size, facecolor="none", edgecolor=colours[i]))
            axes.plot(*at, ".", color=colours[i])
        axes.set(xlim=(-far, far), ylim=(-far, far), aspect="equal", xlabel=f"z, dimension {first + 1}")
    panels[1, 0].set_ylabel(f"z, dimension {second + 1}")
    save(figure, f"The belief before each episode, {args.env_id}", options.out, {})


if __name__ == "__main__":
    main()
