"""Writes a data set of episodes, for algos/iql.py and algos/bc.py. The format is on docs/iql.md.

    python benchmark/record.py runs/expert --episodes 100 --out expert.npz         # of a run's policy
    python benchmark/record.py runs/expert/models/5000.pt --sample --out early.npz  # actions are sampled
    python benchmark/record.py --env-id Pendulum-v1 --out random.npz               # of random actions
    python benchmark/record.py runs/expert --replay --out replay.npz               # all that the run played
    python benchmark/record.py runs/expert --replay --first 40000 --out early.npz  # its first 40,000 steps
    python benchmark/record.py --merge random.npz expert.npz --out mix.npz

--replay reads the replay buffer in a checkpoint of ddpg_td3.py, sac.py, tqc.py, crossq.py or simba.py.
"""

import argparse
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete, flatten
from run import load_script


def load_run(path: Path):
    """The script that made a run folder or a .pt file, from the newest copy in the folder, and the state."""
    folder = path if path.is_dir() else path.parent.parent if path.parent.name == "models" else path.parent
    copies = sorted(folder.glob("*.py"), key=lambda copy: copy.stat().st_mtime)
    if not copies:
        sys.exit(f"record.py: {folder} has no copy of the script that made {path}")
    script = load_script("recorded", copies[-1])
    return script, script.load(path)


def flat(mask) -> np.ndarray | None:
    """A mask of legal choices as one array; for MultiDiscrete it may be a tuple of arrays."""
    if mask is None:
        return None
    parts = mask if isinstance(mask, tuple) else [mask]
    return np.concatenate([np.ravel(x) > 0 for x in parts]).astype(np.int8)


def sample(space, mask: np.ndarray | None):
    """A random action, a legal one if there is a mask."""
    if mask is not None and isinstance(space, MultiDiscrete):
        mask = tuple(np.split(mask, np.cumsum(space.nvec.ravel())[:-1]))
    return space.sample(mask)


def play(env, policy, episodes: int, seed: int, greedy: bool) -> dict[str, np.ndarray]:
    """Whole episodes of policy, or of random actions if it is None."""
    steps, lengths, nested = [], [], env.observation_space.shape is None
    keep = lambda obs: flatten(env.observation_space, obs) if nested else np.array(obs)
    env.action_space.seed(seed)
    torch.manual_seed(seed)
    for episode in range(episodes):
        (obs, info), length, over = env.reset(seed=seed + episode), 0, False
        if policy:
            policy.reset()
        while not over:
            mask, before = flat(info.get("action_mask")), keep(obs)  # some environments write into one array
            legal = flat(obs.get("action_mask")) if isinstance(obs, dict) and mask is None else mask
            action = policy(obs, info, greedy=greedy) if policy else sample(env.action_space, legal)
            next_obs, reward, terminated, truncated, next_info = env.step(action)
            step = dict(obs=before, action=np.array(action), reward=float(reward), next_obs=keep(next_obs))
            step |= dict(terminated=bool(terminated), truncated=bool(truncated))
            steps.append(step | ({} if mask is None else {"action_mask": mask}))
            obs, info, length, over = next_obs, next_info, length + 1, terminated or truncated
        lengths.append(length)
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]} | {"lengths": lengths}


def replayed(script, state: dict, first: float) -> dict[str, np.ndarray]:
    """The oldest transitions of a replay buffer in the order in which they were played, one environment after
    the other. The last episodes may be unfinished: neither terminated nor truncated."""
    buffer, args = state.get("buffer", {}), script.Args(**state["args"])
    if "next_obs" not in buffer:
        sys.exit(f"record.py: a checkpoint of {args.env_id} without a replay buffer of transitions")
    env = script.make_env(args)
    env.close()
    space = env.env.observation_space
    if len(space.shape or ()) != 1 or space.dtype.kind != "f":
        sys.exit(f"record.py: --replay needs observations that are vectors of floats, not {space}")
    kept, num_envs = len(buffer["reward"]) // buffer["num_envs"], buffer["num_envs"]
    oldest = buffer["position"] // num_envs if kept * num_envs == buffer["size"] else 0
    steps = math.ceil(min(kept, first / num_envs))
    rows = (np.arange(steps) + oldest) % kept * num_envs
    rows = np.concatenate([rows + i for i in range(num_envs)])
    if buffer["obs"].shape[1:] != space.shape:
        sys.exit("record.py: --replay knows no masks: record the run without it")
    names = ("obs", "action", "reward", "next_obs", "terminated", "done")
    obs, action, reward, next_obs, terminated, done = (buffer[name].numpy()[rows] for name in names)
    ends = done > 0
    ends[steps - 1 :: steps] = True
    return dict(
        obs=obs, action=np.stack([env.to_action(x) for x in action]), reward=reward, next_obs=next_obs,
        terminated=terminated > 0, truncated=(done > 0) & (terminated == 0),
        lengths=np.diff(np.flatnonzero(ends), prepend=-1),
    )  # fmt: skip


def merged(paths: list[Path]) -> dict[str, np.ndarray]:
    files = [dict(np.load(path)) for path in paths]
    if len({(*file,) for file in files}) > 1:
        sys.exit(f"record.py: {' and '.join(map(str, paths))} have different arrays")
    return {name: np.concatenate([file[name] for file in files]) for name in files[0]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="run folder or .pt file of any script")
    parser.add_argument("--env-id", default="", help="environment of random actions, without a run")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode, the next one has seed + 1")
    parser.add_argument("--sample", action="store_true", help="sampled actions instead of greedy ones")
    parser.add_argument("--replay", action="store_true", help="write the replay buffer of the run instead")
    parser.add_argument("--first", type=int, default=math.inf, help="with --replay: only its oldest steps")
    parser.add_argument("--merge", type=Path, nargs="+", help="files to write one after the other instead")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    args = parser.parse_args(argv)
    if sum(map(bool, (args.run, args.env_id, args.merge))) != 1 or args.replay and not args.run:
        parser.error("give either a run, with or without --replay, or --env-id, or --merge")
    if args.first < 1 or args.first < math.inf and not args.replay:
        parser.error("--first, at least 1, needs --replay")
    sys.path.append("")  # module:Env-v0 finds modules in the current folder
    if args.merge:
        data = merged(args.merge)
    elif args.replay:
        data = replayed(*load_run(args.run), args.first)
    else:
        env_id, kwargs, policy = args.env_id, {}, None
        if args.run:
            script, state = load_run(args.run)
            env_id, kwargs = state["args"]["env_id"], state["args"]["env_kwargs"]
            policy = script.load_policy(args.run)
        if env_id.startswith("ALE/"):
            parser.error(f"{env_id}: frames of Atari are stacked, so a data set cannot hold them")
        env = gym.make(env_id, **kwargs)
        if env.action_space.shape is None:
            parser.error(f"{env_id}: a data set cannot hold Dict or Tuple actions")
        data = play(env, policy, args.episodes, args.seed, not args.sample)
        env.close()
    np.savez_compressed(args.out, **data)
    returns = np.add.reduceat(data["reward"], np.cumsum(data["lengths"]) - data["lengths"])
    told = f"{len(returns):,} episodes, {len(data['reward']):,} steps, mean return {returns.mean():.1f}"
    print(f"{args.out}: {told} ({returns.min():.1f} to {returns.max():.1f})")


if __name__ == "__main__":
    main()
