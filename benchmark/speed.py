"""Compares the speed of our scripts with Stable-Baselines3 (TRPO, PPO with memory: sb3-contrib), with SBX,
its twin in JAX (sbx-rl), or with an older script of ours, at equal settings and networks.

    python benchmark/speed.py --tasks CartPole-v1 "a2c CartPole-v1" --pairs 5
    python benchmark/speed.py --tasks "sac Pendulum-v1" --against /tmp/older/sac.py

A machine drifts by tens of percent within minutes, so the sides take turns, A B A B, each time in a new
process, and what counts is the median of the ratios. Nothing else may run meanwhile. The rows go to
benchmark/results/speed.csv; a comparison with an older script is only printed.
"""

import argparse
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from run import ROOT, commit, cpu_name, replace_rows

OURS, SB3, SBX, OLDER = "plainrl", "stable-baselines3", "sbx", "older script"
COLUMNS = """
    task library pair steps_per_second seconds env_steps threads num_envs num_steps update_epochs
    num_minibatches python torch gymnasium numpy library_version device cpu cores git_commit memory_gb
""".split()


class Task(NamedTuple):
    algo: str
    env_id: str
    num_envs: int
    num_steps: int  # steps of each environment in a rollout; for SAC, TD3 and DQN the steps for each update
    update_epochs: int
    num_minibatches: int
    window: int  # rollouts, each with its updates, that are timed
    warmup: int  # rollouts before them
    threads: int  # of torch; 0: torch decides
    hidden: tuple[int, ...] = (64, 64)  # layers; on Pong the Nature CNN, whose last layer has 512 units
    peer: str = SB3
    learning_starts: int = 1_000  # this and the next are of SAC, TD3 and DQN
    batch_size: int = 256
    buffer_size: int = 1_000_000
    target_update_every: int = 1_000  # steps between copies of DQN's network

    @property
    def rollout(self) -> int:
        """Environment steps of all environments."""
        return self.num_envs * self.num_steps


CHEETAH = dict(window=4000, warmup=2000, threads=2, hidden=(256, 256))  # and Pendulum
DQN_PONG = dict(hidden=(512,), threads=0, batch_size=32, buffer_size=100_000)
TASKS = {
    "CartPole-v1": Task("ppo", "CartPole-v1", 4, 128, 4, 4, window=120, warmup=10, threads=1),
    "HalfCheetah-v5": Task("ppo", "HalfCheetah-v5", 1, 2048, 10, 32, window=6, warmup=2, threads=1),
    "ALE/Pong-v5": Task("ppo", "ALE/Pong-v5", 8, 128, 4, 4, window=6, warmup=2, threads=0, hidden=(512,)),
    "a2c CartPole-v1": Task("a2c", "CartPole-v1", 4, 5, 1, 1, window=5000, warmup=250, threads=1),
    "trpo Pendulum-v1": Task("trpo", "Pendulum-v1", 4, 400, 10, 16, window=25, warmup=3, threads=1),
    # A memory of 64 units sees the observations, with no layers before it and none behind.
    "ppo_lstm CartPole-v1": Task("ppo_lstm", "CartPole-v1", 8, 128, 4, 4, 30, warmup=3, threads=1, hidden=()),
    "sac HalfCheetah-v5": Task("sac", "HalfCheetah-v5", 1, 1, 1, 1, **CHEETAH),
    "sac Pendulum-v1": Task("sac", "Pendulum-v1", 1, 1, 1, 1, **CHEETAH),
    "td3 HalfCheetah-v5": Task("ddpg_td3", "HalfCheetah-v5", 1, 1, 1, 1, **CHEETAH),
    "td3 Pendulum-v1": Task("ddpg_td3", "Pendulum-v1", 1, 1, 1, 1, **CHEETAH),
    "a2c ALE/Pong-v5": Task("a2c", "ALE/Pong-v5", 16, 5, 1, 1, 100, warmup=25, threads=0, hidden=(512,)),
    "dqn CartPole-v1": Task(
        "dqn", "CartPole-v1", 1, 10, 1, 1, window=2000, warmup=210, threads=1, hidden=(120, 84),
        learning_starts=2_000, batch_size=128, buffer_size=10_000, target_update_every=500,
    ),
    "dqn ALE/Pong-v5": Task("dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=1000, warmup=275, **DQN_PONG),
    # 100,000 random steps fill the buffer: for the memory, and for the speed of what is not learning.
    "dqn ALE/Pong-v5 filling": Task(
        "dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=24_900, warmup=100, learning_starts=200_000, **DQN_PONG
    ),
}  # fmt: skip
for name in [name for name in TASKS if name.startswith(("sac", "td3"))]:
    TASKS[f"{name} {SBX}"] = TASKS[name]._replace(peer=SBX)
LEARNING = [name for name in TASKS if not name.endswith("filling")]  # measured unless --tasks says so
# Our settings where the peer has its defaults, or the task says both.
PPO = """--num-steps {num_steps} --update-epochs {update_epochs} --num-minibatches {num_minibatches}
    --learning-rate 3e-4 --critic-lr None --gae-lambda 0.95 --entropy-coef 0 --no-normalize-reward"""
FLAGS = {
    "ppo": PPO,
    "ppo_lstm": PPO + " --memory lstm --memory-size 64",
    "a2c": """--num-steps {num_steps} --learning-rate 7e-4 --critic-lr None --gae-lambda 1 --entropy-coef 0
        --no-normalize-advantage --no-normalize-reward""",
    "trpo": """--num-steps {num_steps} --value-epochs {update_epochs} --num-minibatches {num_minibatches}
        --critic-lr 1e-3 --gae-lambda 0.95 --cg-iterations 15 --hvp-damping 0.1 --no-normalize-reward""",
    "sac": """--learning-rate 3e-4 --updates-per-step 1 --max-grad-norm inf --tau 0.005
        --batch-size {batch_size} --buffer-size {buffer_size} --learning-starts {learning_starts}""",
    "ddpg_td3": """--learning-rate 1e-3 --updates-per-step 1 --max-grad-norm inf --tau 0.005
        --batch-size {batch_size} --buffer-size {buffer_size} --learning-starts {learning_starts}
        --exploration-noise 0.1""",
    "dqn": """--learning-rate 1e-4 --train-every {num_steps} --updates-per-train 1 --max-grad-norm 10 --tau 1
        --batch-size {batch_size} --buffer-size {buffer_size} --learning-starts {learning_starts}
        --target-update-every {target_update_every} --exploration-fraction 0.5 --epsilon-end 0.05""",
}


def flags_of(task: Task) -> list[str]:
    """The command line of our script for this task."""
    pong, steps = task.env_id.startswith("ALE/"), (task.warmup + task.window + 1) * task.rollout
    activation = "tanh" if task.algo in ("ppo", "ppo_lstm", "a2c", "trpo") and not pong else "relu"
    words = f"""--env-id {task.env_id} --num-envs {task.num_envs} --total-timesteps {steps} --gamma 0.99
        --no-anneal-lr --no-normalize-obs --eval-every 0 --eval-episodes 1 --checkpoint-every 0
        --hidden-sizes {" ".join(map(str, task.hidden))} --activation {activation} """
    words += FLAGS[task.algo].format(**task._asdict())
    if task.algo in ("ppo", "a2c"):
        words += " --shared-trunk" if pong else " --no-shared-trunk"
    return words.split()


def call(words: list[str]) -> tuple[str, float, float]:
    """Runs a command from the project's folder. Returns its output, seconds from start to exit, and GB of
    memory that it held at most."""
    # Both sides set the threads of torch themselves; the shell must not decide for one of them.
    env = {name: x for name, x in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    start = time.perf_counter()
    process = subprocess.Popen(words, cwd=ROOT, env=env, **pipes)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = "\n".join(text.splitlines()[-5:])
        sys.exit(f"speed.py: exit code {process.returncode} of {' '.join(words)[:200]}\n{last}")
    return text, seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


# ------------------------------------------------------------------------------------------------------- ours
def run_ours(script: Path, flags: list[str], threads: int) -> tuple[list[dict], dict, float]:
    """One training: the rows of its log, what the CSV says of it, and its seconds from command to exit."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--device", "cpu", *flags, "--torch-threads", str(threads), "--run-dir", str(run)]
        _, seconds, memory = call([sys.executable, str(script), *words])
        rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
        about = json.loads((run / "environment.json").read_text())[-1]
    versions = {name: about[name].split()[0] for name in ("python", "torch", "gymnasium", "numpy")}
    return rows, versions | dict(memory_gb=round(memory, 3)), seconds


def speed_of_ours(script: Path, task: Task, words: tuple[str, ...] = ()) -> dict:
    """Environment steps per second between two rows of the log, logging included."""
    rows, about, _ = run_ours(script, [*flags_of(task), *words], task.threads)
    begin, end = task.warmup * task.rollout, (task.warmup + task.window) * task.rollout
    # A row of the log has the time of the evaluation before it; the only one is at the end of the training.
    rows = [row for row in rows if begin <= row["step"] <= end and "eval/return_mean" not in row]
    steps, seconds = (rows[-1][name] - rows[0][name] for name in ("step", "seconds"))
    speed = dict(env_steps=steps, seconds=round(seconds, 3), steps_per_second=round(steps / seconds, 1))
    return about | speed


# ------------------------------------------------------------------------------------------ Stable-Baselines3
def run_peer(python: str, **request) -> dict:
    """Starts this file with the interpreter that has Stable-Baselines3; it answers with one line of JSON.
    The seconds are those from command to exit unless the answer has others."""
    text, seconds, memory = call([python, str(Path(__file__).resolve()), "--request", json.dumps(request)])
    (line,) = re.findall(r"^{.*}$", text, re.M)  # warnings may stand before it and after
    return dict(seconds=round(seconds, 3), memory_gb=round(memory, 3)) | json.loads(line)


def answer(request: dict) -> dict:
    """The side of the peer, in its own process."""
    import torch

    if request["threads"]:
        torch.set_num_threads(request["threads"])
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "gymnasium", "numpy")}
    library = importlib.import_module("sbx" if request.get("peer") == SBX else "stable_baselines3")
    versions |= dict(python=platform.python_version(), library_version=library.__version__)
    return versions | speed_in_peer(library, Task(**request))


def make_model(library, task: Task):
    """The peer's model of this task; what is not given is its default, which FLAGS has for our side."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecFrameStack

    pong = task.env_id.startswith("ALE/")
    if pong:
        importlib.import_module("gymnasium").register_envs(importlib.import_module("ale_py"))
        one_frame = {"frameskip": 1, "repeat_action_probability": 0.25}  # AtariWrapper skips the frames
        envs = VecFrameStack(make_atari_env(task.env_id, task.num_envs, seed=1, env_kwargs=one_frame), 4)
    else:
        envs = make_vec_env(task.env_id, n_envs=task.num_envs, seed=1)
    same = dict(
        policy="CnnPolicy" if pong else "MlpPolicy", env=envs, seed=1,
        policy_kwargs={} if pong else dict(net_arch=list(task.hidden)),  # PPO, A2C, TRPO: tanh, two networks
        device="cpu" if task.peer == SB3 else "auto",
    )  # fmt: skip
    replay = {name: getattr(task, name) for name in ("batch_size", "buffer_size", "learning_starts")}
    if task.algo == "sac":
        return library.SAC(**replay, **same)
    if task.algo == "ddpg_td3":
        size = envs.action_space.shape[0]
        return library.TD3(action_noise=NormalActionNoise([0.0] * size, [0.1] * size), **replay, **same)
    if task.algo == "dqn":
        same |= dict(target_update_interval=task.target_update_every, exploration_fraction=0.5)
        return library.DQN(train_freq=task.num_steps, gradient_steps=1, **replay, **same)
    same |= dict(n_steps=task.num_steps)
    if task.algo == "a2c":
        return library.A2C(use_rms_prop=False, **same)  # Adam on both sides
    same |= dict(batch_size=task.rollout // task.num_minibatches)
    if task.algo == "trpo":
        return importlib.import_module("sb3_contrib").TRPO(n_critic_updates=task.update_epochs, **same)
    if task.algo == "ppo_lstm":
        same |= dict(policy="MlpLstmPolicy", policy_kwargs=dict(net_arch=[], lstm_hidden_size=64))
        return importlib.import_module("sb3_contrib").RecurrentPPO(n_epochs=task.update_epochs, **same)
    return library.PPO(n_epochs=task.update_epochs, **same)


def speed_in_peer(library, task: Task) -> dict:
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Reads the time before every rollout; the updates of the rollout before are done by then."""

        times = []

        def _on_rollout_start(self):
            self.times.append(time.perf_counter())

        def _on_step(self):
            return True

    clock, end = Clock(), task.warmup + task.window
    make_model(library, task).learn((end + 1) * task.rollout, callback=clock)
    seconds, steps = clock.times[end] - clock.times[task.warmup], task.window * task.rollout
    return dict(env_steps=steps, seconds=round(seconds, 3), steps_per_second=round(steps / seconds, 1))


# -------------------------------------------------------------------------------------------------- the sides
def compare(task: str, sides: dict, common: dict, pairs: int) -> list[dict]:
    """Measures A B A B ...; each side is a function. Prints and returns the rows."""
    rows, middle = [], statistics.median
    for pair in range(1, pairs + 1):
        for library, measure in sides.items():
            row = common | dict(task=task, library=library, pair=pair) | measure()
            rows.append(row)
            memory = f", {row['memory_gb']:.2f} GB" if "memory_gb" in row else ""
            speed = f"{row['steps_per_second']:.1f} steps_per_second"
            print(f"{task} pair {pair} {library}: {speed}{memory}", flush=True)
    ours, theirs = ([row["steps_per_second"] for row in rows if row["library"] == x] for x in sides)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        f"{task}: {OURS} {middle(ours):.1f}, {[*sides][1]} {middle(theirs):.1f} steps_per_second (medians); "
        f"{OURS} is {middle(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return rows


def sides_of(task: Task, args: argparse.Namespace) -> dict:
    """What is compared: names and functions."""
    ours = lambda: speed_of_ours(ROOT / f"algos/{task.algo}.py", task)
    if args.against:
        return {OURS: ours, OLDER: lambda: speed_of_ours(args.against.resolve(), task)}
    return {OURS: ours, task.peer: lambda: run_peer(args.sb3_python, **task._asdict())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=LEARNING, help="what to measure")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--threads", type=int, help="threads of torch on both sides, 0: torch decides")
    parser.add_argument("--against", type=Path, help="an older script in place of the peer; writes no rows")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed.csv", help="the CSV")
    parser.add_argument("--request", help=argparse.SUPPRESS)  # in the process of the peer
    args = parser.parse_args()
    if args.request:
        print(json.dumps(answer(json.loads(args.request))))
        return
    same = lambda row: (row["task"], str(row["threads"]))
    order = lambda row: (*same(row), int(row["pair"]), row["library"])
    common = dict(cpu=cpu_name(), cores=os.cpu_count(), device="cpu", git_commit=commit())
    for name in args.tasks:
        task = TASKS[name] if args.threads is None else TASKS[name]._replace(threads=args.threads)
        settings = {field: getattr(task, field) for field in set(COLUMNS) & set(Task._fields)}
        rows = compare(name, sides_of(task, args), common | settings, args.pairs)
        if not args.against:
            replace_rows(args.out, COLUMNS, rows, same, order)


if __name__ == "__main__":
    main()
