"""Seconds from the command until a policy is good, beside Stable-Baselines3 (TRPO: sb3-contrib) with the
tuned settings of RL Baselines3 Zoo: what a user feels.

    python benchmark/time_to_bar.py --cells "ppo CartPole-v1" "sac Pendulum-v1" --seeds 3
    python benchmark/figures.py time_to_bar

Both sides have their own best settings and are scored alike: every so many steps 20 greedy episodes, all at
once. The clock runs from the start of the process to the first of three scores in a row that reach the bar,
or of the last ones of a training that ends before. The sides take turns; nothing else may run meanwhile.
With --limit a training that is below the bar after so many seconds ends there and counts as never good.
"""

import argparse
import importlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from run import ROOT, replace_rows
from speed import OURS, RESULTS, SB3, failed, gaussian_noise, machine, peer_class, start
from suites import HIDDEN

COLUMNS = """
    cell library seed bar seconds env_steps solved trained_seconds torch gymnasium library_version cpu cores
    git_commit
""".split()
EPISODES, IN_A_ROW = 20, 3
SCORE = re.compile(r"step ([\d,]+)  return (\S+)")


class Race(NamedTuple):
    bar: float
    eval_every: int  # environment steps
    peer: dict | None = None  # Zoo's settings, hyperparams/{algo}.yml, commit 22e3ff2; None: ours alone


LINEAR = lambda start: {"linear": start}  # falls to 0 with the steps
WIDE = dict(policy_kwargs=dict(net_arch=[256, 256]))
DQN = dict(
    learning_rate=6.3e-4, batch_size=128, buffer_size=50_000, learning_starts=0, target_update_interval=250,
    train_freq=4, gradient_steps=-1, exploration_fraction=0.12, exploration_final_eps=0.1, **WIDE,
)  # fmt: skip
RECURRENT = dict(total=150_000, n_envs=8, n_steps=128, batch_size=256)
NORMAL_NOISE = dict(noise=0.1, policy_kwargs=dict(net_arch=[400, 300]))
RACES = {
    "ppo CartPole-v1": Race(475, 5_000, dict(
        total=100_000, n_envs=8, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20,
        learning_rate=LINEAR(1e-3), clip_range=LINEAR(0.2))),
    "ppo Acrobot-v1": Race(-100, 10_000, dict(
        total=1_000_000, n_envs=16, normalize=True, n_steps=256, gae_lambda=0.94, n_epochs=4)),
    "ppo Pendulum-v1": Race(-200, 10_000, dict(
        total=100_000, n_envs=4, n_steps=1024, gamma=0.9, learning_rate=1e-3, use_sde=True,
        sde_sample_freq=4)),
    "ppo LunarLander-v3": Race(200, 50_000, dict(
        total=1_000_000, n_envs=16, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4,
        ent_coef=0.01)),
    "dqn CartPole-v1": Race(475, 5_000, dict(
        total=50_000, learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1_000,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
        exploration_final_eps=0.04, **WIDE)),
    "dqn Acrobot-v1": Race(-100, 5_000, dict(total=100_000, **DQN)),
    "dqn LunarLander-v3": Race(200, 20_000, dict(total=100_000, **DQN)),
    "a2c CartPole-v1": Race(475, 10_000, dict(total=500_000, n_envs=8)),
    "trpo Pendulum-v1": Race(-200, 10_000, dict(
        total=100_000, n_envs=2, n_steps=1024, gamma=0.9, n_critic_updates=15, use_sde=True,
        sde_sample_freq=4)),
    "sac Pendulum-v1": Race(-180, 1_000, dict(total=20_000, learning_rate=1e-3)),
    "sac LunarLanderContinuous-v3": Race(200, 10_000, dict(
        total=500_000, learning_rate=LINEAR(7.3e-4), tau=0.01, learning_starts=10_000,
        policy_kwargs=dict(net_arch=[400, 300]))),
    "ddpg_td3 Pendulum-v1": Race(-180, 1_000, dict(
        total=20_000, gamma=0.98, buffer_size=200_000, learning_starts=10_000, **NORMAL_NOISE)),
    "ddpg_td3 LunarLanderContinuous-v3": Race(200, 10_000, dict(
        total=300_000, gamma=0.98, buffer_size=200_000, learning_starts=10_000, **NORMAL_NOISE)),
    # the defaults of RecurrentPPO with 8 environments, for Zoo has no settings for tasks of memory
    f"ppo_lstm {HIDDEN}Recall-v0": Race(0.95, 5_000, RECURRENT),
    f"ppo_lstm {HIDDEN}LongRecall-v0": Race(0.95, 5_000, RECURRENT),
    # without another side: relatives beside each other
    "reinforce CartPole-v1": Race(475, 5_000), "vpg CartPole-v1": Race(475, 5_000),
    "trpo CartPole-v1": Race(475, 5_000), "grpo CartPole-v1": Race(475, 5_000),
    "es CartPole-v1": Race(475, 5_000),
    "rainbow CartPole-v1": Race(475, 5_000), "rainbow Acrobot-v1": Race(-100, 5_000),
    "pqn CartPole-v1": Race(475, 5_000), "pqn Acrobot-v1": Race(-100, 10_000),
    "pqn LunarLander-v3": Race(200, 50_000),
    "tqc Pendulum-v1": Race(-180, 1_000), "crossq Pendulum-v1": Race(-180, 1_000),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ both sides
def measure(words: list[str], bar: float, limit: float) -> dict:
    """Runs a training that prints its scores until it has passed the bar, to its end, or to the limit."""
    begin, passed, lines = time.perf_counter(), [], []
    with start([words[0], "-u", *words[1:]]) as process:
        for line in process.stdout:
            lines.append(line)
            if score := SCORE.search(line):
                step, good = int(score[1].replace(",", "")), float(score[2]) >= bar
                passed = [*passed, (time.perf_counter() - begin, step)] if good else []
            late = not passed and time.perf_counter() - begin > limit
            if len(passed) == IN_A_ROW or late:
                process.kill()
                break
    if process.returncode > 0:
        failed(process, "".join(lines))
    seconds, steps = passed[0] if passed else ("", "")
    versions = next((json.loads(line) for line in lines if line.startswith("{")), {})
    trained = round(time.perf_counter() - begin, 2)
    seconds = round(seconds, 2) if passed else ""
    return versions | dict(seconds=seconds, env_steps=steps, solved=bool(passed), trained_seconds=trained)


def ours(cell: str, seed: int, limit: float) -> dict:
    algo, env_id = cell.split()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, f"algos/{algo}.py", "--env-id", env_id, "--seed", str(seed)]
        words += ["--device", "cpu", "--eval-every", str(RACES[cell].eval_every), "--run-dir", folder]
        return measure([*words, "--eval-episodes", str(EPISODES)], RACES[cell].bar, limit)


def theirs(cell: str, seed: int, limit: float, python: str) -> dict:
    words = [python, str(Path(__file__).resolve()), "--peer", cell, str(seed)]
    return measure(words, RACES[cell].bar, limit)


def run_peer(cell: str, seed: int) -> None:
    """The side of Stable-Baselines3, in a process of its own; prints its scores as our scripts do."""
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    class Scores(EvalCallback):
        def _on_step(self) -> bool:
            super()._on_step()
            if self.n_calls % self.eval_freq == 0:
                print(f"step {self.num_timesteps}  return {self.last_mean_reward:.5g}", flush=True)
            return True

    sys.path.append(str(ROOT))  # for benchmark.hidden_envs
    algo, env_id = cell.split()
    race, settings = RACES[cell], dict(RACES[cell].peer)
    make = peer_class(algo)
    print(json.dumps(dict(library_version=sys.modules[make.__module__.partition(".")[0]].__version__)))
    total, n_envs = settings.pop("total"), settings.pop("n_envs", 1)
    envs = make_vec_env(env_id, n_envs=n_envs, seed=seed)
    judges = make_vec_env(env_id, n_envs=EPISODES, seed=10_000_000)
    if settings.pop("normalize", False):
        envs, judges = VecNormalize(envs), VecNormalize(judges, training=False, norm_reward=False)
    for key, value in settings.items():
        if isinstance(value, dict) and "linear" in value:
            settings[key] = lambda left, start=value["linear"]: start * left
    if noise := settings.pop("noise", None):
        settings["action_noise"] = gaussian_noise(envs, noise)
    policy = "MlpLstmPolicy" if algo == "ppo_lstm" else "MlpPolicy"
    model = make(policy, envs, device="cpu", seed=seed, **settings)
    judge = Scores(
        judges, eval_freq=race.eval_every // n_envs, n_eval_episodes=EPISODES, verbose=0, warn=False
    )
    model.learn(total, callback=judge)


# --------------------------------------------------------------------------------------------------- results
def compare(cell: str, args: argparse.Namespace) -> None:
    """Lets the sides take turns, one seed after the other, and writes their rows."""
    sides, rows = {OURS: lambda seed: ours(cell, seed, args.limit)}, []
    if RACES[cell].peer:
        sides[SB3] = lambda seed: theirs(cell, seed, args.limit, args.sb3_python)
    about = dict(cell=cell, bar=RACES[cell].bar) | machine()
    about |= {name: importlib.import_module(name).__version__ for name in ("torch", "gymnasium")}
    for seed in range(1, args.seeds + 1):
        for library, side in sides.items():
            rows.append(about | dict(library=library, seed=seed) | side(seed))
            result = f"{rows[-1]['seconds']} s" if rows[-1]["solved"] else "never good"
            print(
                f"{cell} seed {seed} {library}: {result} (trained {rows[-1]['trained_seconds']} s)",
                flush=True,
            )
    order = lambda row: (row["cell"], row["library"], int(row["seed"]))
    replace_rows(args.out, COLUMNS, rows, lambda row: (row["cell"], int(row["seed"])), order)
    of = lambda library: [float(row["seconds"] or "inf") for row in rows if row["library"] == library]
    medians = [statistics.median(of(library)) for library in sides]
    if len(medians) == 2:
        ratio = f", {medians[1] / medians[0]:.2f} times as fast" if math.isfinite(sum(medians)) else ""
        print(f"{cell}: {medians[0]:.1f} s and {medians[1]:.1f} s (medians; inf: never good){ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=RACES, default=list(RACES), help="what to measure")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to N on each side")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a side gives up")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--out", type=Path, default=RESULTS / "time_to_bar.csv", help="the CSV")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)  # in the process of the peer
    args = parser.parse_args()
    if args.peer:
        run_peer(args.peer[0], int(args.peer[1]))
    else:
        for cell in args.cells:
            compare(cell, args)


if __name__ == "__main__":
    main()
