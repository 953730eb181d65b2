"""Steps per second of our scripts: beside others, at best, with faster simulators, and in several processes.

    python benchmark/speed.py --tasks CartPole-v1 "a2c CartPole-v1" --pairs 5
    python benchmark/speed.py --tasks "sac Pendulum-v1" --against /tmp/older/sac.py
    python benchmark/speed.py floor > benchmark/results/floor.txt
    python benchmark/speed.py envpool --pairs 3 > benchmark/results/envpool.txt
    python benchmark/speed.py processes
    python benchmark/speed.py curves

Without another word it compares our scripts with Stable-Baselines3 (TRPO, PPO with memory: sb3-contrib), with
SBX, its twin in JAX (sbx-rl), or with an older script of ours, at equal settings and networks. A machine
drifts by tens of percent within minutes, so the sides take turns, A B A B, each time in a new process, and
what counts is the median of the ratios. The rows go to benchmark/results/speed.csv; a comparison with an
older script is only printed.

floor: how fast a step of SAC or TD3 could be at best.
envpool: ppo.py in environments of Gymnasium and, with the recipe ppo_envpool, of EnvPool.
processes: one run of ppo.py over several, by the recipe ppo_torchrun; to processes_speed.csv.
curves: what one process and two learn on CartPole-v1; to processes.csv.

Nothing else may run meanwhile. More, and the columns: benchmark/README.md.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from run import ROOT, commit, cpu_name, load_script, replace_rows, rows_of

RESULTS = ROOT / "benchmark/results"
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
PEERS = {  # the peer's library and name of our algorithm, where they are others
    "ddpg_td3": ("stable_baselines3", "TD3"), "trpo": ("sb3_contrib", "TRPO"),
    "ppo_lstm": ("sb3_contrib", "RecurrentPPO"),
}  # fmt: skip
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


def machine() -> dict:
    return dict(cpu=cpu_name(), cores=os.cpu_count(), git_commit=commit())


def start(words: list[str]) -> subprocess.Popen:
    """Starts a command from the project's folder; its output and its errors are read from stdout."""
    # Both sides set the threads of torch themselves; the shell must not decide for one of them.
    env = {name: x for name, x in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(words, cwd=ROOT, env=env, **pipes)


def failed(process: subprocess.Popen, text: str) -> None:
    """Ends this program with the last lines of one that it started."""
    command, last = " ".join(process.args)[:200], "\n".join(text.splitlines()[-5:])
    sys.exit(f"{Path(sys.argv[0]).name}: exit code {process.returncode} of {command}\n{last}")


def call(words: list[str]) -> tuple[str, float, float]:
    """Runs a command. Returns its output, its seconds from start to exit, and at most how many GB it held."""
    begin, process = time.perf_counter(), start(words)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - begin, os.waitstatus_to_exitcode(status)
    if process.returncode:
        failed(process, text)
    return text, seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


# ------------------------------------------------------------------------------------------------------- ours
def run_ours(script: Path, flags: list[str], threads: int, launcher=()) -> tuple[list[dict], dict, str]:
    """One training: the rows of its log, what the CSV says of it, and its output."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--device", "cpu", *flags, "--torch-threads", str(threads), "--run-dir", str(run)]
        text, _, memory = call([*(launcher or [sys.executable]), str(script), *words])
        rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
        about = json.loads((run / "environment.json").read_text())[-1]
    versions = {name: about[name].split()[0] for name in ("python", "torch", "gymnasium", "numpy")}
    return rows, versions | dict(memory_gb=round(memory, 3)), text


@contextlib.contextmanager
def ppo_with(recipe: str):
    """A copy of ppo.py with a recipe, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "algos").mkdir()
        script = Path(shutil.copy(ROOT / "algos/ppo.py", f"{folder}/algos"))
        subprocess.run(["git", "init", "-q", folder], check=True)
        subprocess.run(["git", "apply", str(ROOT / f"recipes/{recipe}.patch")], cwd=folder, check=True)
        yield script


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
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "gymnasium", "numpy")}
    library = importlib.import_module(SBX if request["peer"] == SBX else "stable_baselines3")
    versions |= dict(python=platform.python_version(), library_version=library.__version__)
    return versions | speed_in_peer(Task(**request))


def peer_class(algo: str, sbx=False) -> type:
    """The peer's class of our algorithm."""
    library, name = PEERS.get(algo, ("stable_baselines3", algo.upper()))
    return getattr(importlib.import_module(SBX if sbx else library), name)


def gaussian_noise(envs, std: float):
    from stable_baselines3.common.noise import NormalActionNoise

    size = envs.action_space.shape[0]
    return NormalActionNoise([0.0] * size, [std] * size)


def make_model(task: Task):
    """The peer's model of this task; what is not given is its default, which FLAGS has for our side."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    pong = task.env_id.startswith("ALE/")
    if pong:
        gym.register_envs(importlib.import_module("ale_py"))
        one_frame = {"frameskip": 1, "repeat_action_probability": 0.25}  # AtariWrapper skips the frames
        envs = VecFrameStack(make_atari_env(task.env_id, task.num_envs, seed=1, env_kwargs=one_frame), 4)
    else:
        envs = make_vec_env(task.env_id, n_envs=task.num_envs, seed=1)
    settings = dict(
        policy="CnnPolicy" if pong else "MlpPolicy", env=envs, seed=1,
        policy_kwargs={} if pong else dict(net_arch=list(task.hidden)),  # PPO, A2C, TRPO: tanh, two networks
        device="cpu" if task.peer == SB3 else "auto",
    )  # fmt: skip
    if task.algo in ("sac", "ddpg_td3", "dqn"):
        replay = ("batch_size", "buffer_size", "learning_starts")
        settings |= {name: getattr(task, name) for name in replay}
    else:
        settings |= dict(n_steps=task.num_steps)
    if task.algo in ("ppo", "ppo_lstm", "trpo"):
        epochs = "n_critic_updates" if task.algo == "trpo" else "n_epochs"
        settings |= {"batch_size": task.rollout // task.num_minibatches, epochs: task.update_epochs}
    if task.algo == "ddpg_td3":
        settings |= dict(action_noise=gaussian_noise(envs, 0.1))
    if task.algo == "dqn":
        settings |= dict(train_freq=task.num_steps, gradient_steps=1, exploration_fraction=0.5)
        settings |= dict(target_update_interval=task.target_update_every)
    if task.algo == "a2c":
        settings |= dict(use_rms_prop=False)  # Adam on both sides
    if task.algo == "ppo_lstm":
        settings |= dict(policy="MlpLstmPolicy", policy_kwargs=dict(net_arch=[], lstm_hidden_size=64))
    return peer_class(task.algo, task.peer == SBX)(**settings)


def speed_in_peer(task: Task) -> dict:
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Reads the time before every rollout; the updates of the rollout before are done by then."""

        times = []

        def _on_rollout_start(self):
            self.times.append(time.perf_counter())

        def _on_step(self):
            return True

    clock, end = Clock(), task.warmup + task.window
    make_model(task).learn((end + 1) * task.rollout, callback=clock)
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


def beside_peers(args: argparse.Namespace) -> None:
    """Compares with the peer of each task, or with an older script."""
    same = lambda row: (row["task"], str(row["threads"]))
    order = lambda row: (*same(row), int(row["pair"]), row["library"])
    for name in args.tasks:
        task = TASKS[name] if args.threads is None else TASKS[name]._replace(threads=args.threads)
        settings = {field: getattr(task, field) for field in set(COLUMNS) & set(Task._fields)}
        script = ROOT / f"algos/{task.algo}.py"
        sides = {OURS: lambda script=script, task=task: speed_of_ours(script, task)}
        if args.against:
            sides[OLDER] = lambda task=task: speed_of_ours(args.against.resolve(), task)
        else:
            sides[task.peer] = lambda task=task: run_peer(args.sb3_python, **task._asdict())
        rows = compare(name, sides, machine() | dict(device="cpu") | settings, args.pairs)
        if not args.against:
            replace_rows(args.out, COLUMNS, rows, same, order)


# ------------------------------------------------------------------------------------------------- the floor
class Network:
    """Linear layers of n networks, (n, rows, in) to (n, rows, out), of which only products are run, with
    random numbers, into memory that exists."""

    def __init__(self, n, rows, sizes):
        self.weights = [torch.randn(n, *size) for size in itertools.pairwise(sizes)]
        self.x = [torch.randn(n, rows, size) for size in sizes]
        self.weight_grads, self.x_grads = ([torch.randn_like(x) for x in xs] for xs in (self.weights, self.x))

    def forward(self):
        for weight, x, y in zip(self.weights, self.x[:-1], self.x[1:], strict=True):
            torch.bmm(x, weight, out=y)

    def gradients(self, of_weights, of_input):
        """Products of a backward pass that starts with the gradient of the output."""
        for i in reversed(range(len(self.weights))):
            if of_weights:
                torch.bmm(self.x[i].mT, self.x_grads[i + 1], out=self.weight_grads[i])
            if i > 0 or of_input:
                torch.bmm(self.x_grads[i + 1], self.weights[i].mT, out=self.x_grads[i])


def update_critics(actor, critics):
    actor.forward()  # the next actions, then their values, those of the batch, and their gradients
    critics.forward()
    critics.forward()
    critics.gradients(of_weights=True, of_input=False)


def update_actor(actor, critics):
    actor.forward()
    critics.forward()
    critics.gradients(of_weights=False, of_input=True)
    actor.gradients(of_weights=True, of_input=False)


def milliseconds(function, *args, repeats=200):
    """Median over the calls, after as many to warm up."""
    seconds = []
    for _ in range(2 * repeats):
        begin = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - begin)
    return 1000 * statistics.median(seconds[repeats:])


@torch.inference_mode()
def floor() -> None:
    """Times the matrix products of forwards and gradients, and the environment. No activation, loss,
    optimizer, target network, replay or Python between them is counted."""
    task = TASKS["sac HalfCheetah-v5"]
    torch.set_num_threads(task.threads)
    env = gym.make(task.env_id)
    env.reset(seed=1)
    obs_size, action_size = env.observation_space.shape[0], env.action_space.shape[0]
    network = lambda n, inputs, outputs: Network(n, task.batch_size, (inputs, *task.hidden, outputs))
    step = milliseconds(env.step, env.action_space.sample())
    critics = network(2, obs_size + action_size, 1)
    print("algorithm   products   environment   at best")
    for name, outputs, judges, delay in (("SAC", 2 * action_size, critics, 1), ("TD3", action_size, None, 2)):
        actor = network(1, obs_size, outputs)
        judges = judges or network(1, obs_size + action_size, 1)  # TD3 asks the first critic
        products = milliseconds(update_critics, actor, critics)
        products += milliseconds(update_actor, actor, judges) / delay
        speed = 1000 / (products + step)
        print(f"{name}         {products:5.2f} ms      {step:5.2f} ms      {speed:.0f} steps/s")


# ---------------------------------------------------------------------------------------------------- EnvPool
ENVPOOL = {"CartPole-v1": 60_000, "Acrobot-v1": 30_000, "LunarLander-v3": 30_000, "HalfCheetah-v5": 30_000,
           "Hopper-v5": 30_000}  # fmt: skip


def speed_with(script: Path, env_id: str, *words: str) -> float:
    """Steps per second of a training with 16 environments, all else as in TUNED, from its first update to its
    last one: neither the start nor an evaluation counts."""
    flags = f"--env-id {env_id} --num-envs 16 --num-steps 128 --total-timesteps {ENVPOOL[env_id]}".split()
    flags += "--eval-every 0 --eval-episodes 1 --eval-max-steps 1".split()
    first, *_, last = (row for row in run_ours(script, [*flags, *words], 1)[0] if "loss/value" in row)
    return (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])


def envpool(count: int) -> None:
    """Lets Gymnasium and EnvPool take turns, count times, and prints a table."""
    versions = " ".join(f"{name} {version(name)}" for name in ("gymnasium", "envpool", "torch"))
    print(f"{cpu_name()}, {os.cpu_count()} cores; {versions}; steps per second, medians of {count}")
    print(f"{'':16} Gymnasium  EnvPool  ratio (range)")
    with ppo_with("ppo_envpool") as script:
        for env_id in ENVPOOL:
            sides = [
                [speed_with(script, env_id, *words) for words in ((), ("--envpool",))] for _ in range(count)
            ]
            ratios = sorted(theirs / ours for ours, theirs in sides)
            ours, theirs = (statistics.median(x) for x in zip(*sides, strict=True))
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{env_id:16} {ours:9,.0f}  {theirs:7,.0f}  {ratio}", flush=True)


# ------------------------------------------------------------------------------------------ several processes
PROCESSES_COLUMNS = """
    env_id kind processes num_envs steps_per_second seconds_per_rollout processor_seconds load
    bytes_per_update bytes_per_rollout alpha_us beta_mb updates_per_rollout python torch cpu cores git_commit
""".split()
ROLLOUTS = {"CartPole-v1": 40, "HalfCheetah-v5": 4, "ALE/Pong-v5": 2}  # that are timed
ALONE = ["ALE/Pong-v5"]  # two processes are not measured, only predicted
TWO = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
# Runs a command in a network of its own, and prints the bytes that were sent over its loopback.
COUNT = """
import subprocess, sys
from pathlib import Path
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
code = subprocess.run(sys.argv[1:]).returncode
line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
print(line.split(":")[1].split()[8])
sys.exit(code)
"""


def here() -> dict:
    return dict(python=platform.python_version(), torch=torch.__version__) | machine()


def in_two(words: list[str], launcher=TWO) -> tuple[list[dict], str]:
    """The log and the output of a training in two processes."""
    with ppo_with("ppo_torchrun") as script:
        rows, _, text = run_ours(script, words, 1, launcher)
    return rows, text


def curves(seeds: int) -> None:
    """CartPole with 8 environments, in one process and in two; what is there is not trained again."""
    path, same = RESULTS / "processes.csv", lambda row: (int(row["seed"]), int(row["processes"]))
    done = set(map(same, rows_of(path)))
    for seed, processes in itertools.product(range(1, seeds + 1), (1, 2)):
        if (seed, processes) in done:
            continue
        words = f"--env-id CartPole-v1 --seed {seed} --eval-every 5000 --num-envs 8".split()
        log = in_two(words)[0] if processes == 2 else run_ours(ROOT / "algos/ppo.py", words, 1)[0]
        rows = [
            dict(env_id="CartPole-v1", processes=processes, seed=seed, step=row["step"],
                 eval_return_mean=row["eval/return_mean"]) | here()
            for row in log if "eval/return_mean" in row
        ]  # fmt: skip
        replace_rows(path, list(rows[0]), rows, same, lambda row: (*same(row), int(row["step"])))
        print(f"{processes} processes, seed {seed}: {rows[-1]['eval_return_mean']}", flush=True)


def alone(words: list[str]) -> tuple[float, float]:
    """Seconds of a rollout here: of the processor (median), and by the clock (the fastest tenth)."""
    ppo, times = load_script("ppo"), []
    log = ppo.Run.log

    def watched(run, metrics):
        if "loss/policy" in metrics:
            times.append((time.process_time(), time.perf_counter()))
        log(run, metrics)

    ppo.Run.log = watched
    with tempfile.TemporaryDirectory() as folder:
        more = ["--torch-threads", "1", "--device", "cpu", "--run-dir", f"{folder}/run"]
        ppo.train(ppo.parse_args([*words, *more]))
    processor, clock = np.diff(times, axis=0).T
    return float(np.median(processor)), float(np.quantile(clock, 0.1))


def exchange(rank: int, port: int, sizes: list[int], calls: int, queue) -> None:
    """Times all_reduce of two processes; the fastest tenth counts, for the machine may have other work."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for size in sizes:
        x, seconds = torch.ones(size // 4), []
        for _ in range(calls):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(x)
            seconds.append(time.perf_counter() - begin)
        if rank == 0:
            queue.put((size, float(np.quantile(seconds, 0.1))))
    dist.destroy_process_group()


def alpha_and_beta() -> tuple[float, float]:
    """Seconds of a message without content, and bytes per second, so that A(2, b) = 2 alpha + b / beta."""
    context = torch.multiprocessing.get_context("spawn")
    queue, sizes = context.Queue(), [4, 4_000, 40_000, 400_000, 4_000_000]
    processes = [context.Process(target=exchange, args=(i, 29513, sizes, 200, queue)) for i in (0, 1)]
    for process in processes:
        process.start()
    seconds = dict(queue.get(timeout=300) for _ in sizes)
    for process in processes:
        process.join()
    alpha = seconds[sizes[0]] / 2
    return alpha, sizes[-1] / (seconds[sizes[-1]] - 2 * alpha)


def messages(env_id: str) -> dict:
    """Bytes of the messages of a process, from the arguments and the agent."""
    ppo = load_script("ppo")
    args = ppo.make_args(env_id)
    envs = ppo.make_envs(args, 1)
    space = envs.single_observation_space
    agent = ppo.Agent(space, envs.single_action_space, args, torch.device("cpu"))
    steps = args.num_envs * args.num_steps
    seen = torch.as_tensor(np.zeros(1, space.dtype)).float().element_size() if space.dtype != np.uint8 else 1
    return dict(
        num_envs=args.num_envs, updates=args.update_epochs * args.num_minibatches, steps=steps,
        gradients=4 * (1 + sum(p.numel() for p in agent.parameters())),
        advantages=4 * steps // args.num_minibatches * args.normalize_advantage,
        rewards=2 * 4 * steps * args.normalize_reward, check=16,
        observations=seen * int(np.prod(space.shape)) * steps * args.normalize_obs,
    )  # fmt: skip


def predicted(one: float, task: dict, k: int, alpha: float, beta: float) -> float:
    """Seconds of a rollout and its updates with k processes: the formula of benchmark/README.md."""
    reduce = 2 * (k - 1) * (alpha + task["gradients"] / (k * beta))
    gather = lambda size: (k - 1) * (alpha + size / beta) if size else 0.0
    once = 2 * gather(task["rewards"] / 2) + gather(task["observations"]) + gather(task["check"])
    return one + task["updates"] * (reduce + gather(task["advantages"])) + once


def words_for(env_id: str, task: dict, processes: int, rollouts: int) -> list[str]:
    steps = processes * task["steps"] * rollouts
    words = f"--env-id {env_id} --num-envs {processes * task['num_envs']} --total-timesteps {steps}"
    return f"{words} --eval-every 0 --eval-episodes 1 --checkpoint-every 1000000".split()


def sent(env_id: str, task: dict, rollouts: int) -> float:
    """Bytes that two processes send in a rollout and its updates, headers of TCP included: what a longer run
    sends more than a shorter."""
    counted = ["unshare", "-rn", sys.executable, "-c", COUNT, *TWO]
    texts = [in_two(words_for(env_id, task, 2, count), counted)[1] for count in (1, 1 + rollouts)]
    shorter, longer = (int(text.split()[-1]) for text in texts)
    return (longer - shorter) / rollouts


def in_processes(env_ids: list[str]) -> None:
    """Measures one process and two, and predicts for more."""
    alpha, beta = alpha_and_beta()
    print(f"alpha {alpha * 1e6:.0f} us, beta {beta / 1e6:.0f} MB/s", flush=True)
    for env_id in env_ids:
        task, rollouts = messages(env_id), ROLLOUTS[env_id]
        one, clock = alone(words_for(env_id, task, 1, 1 + rollouts))
        rows = [
            dict(kind="measured", processes=1, seconds_per_rollout=clock, processor_seconds=round(one, 4))
        ]
        if env_id not in ALONE:
            log, _ = in_two(words_for(env_id, task, 2, 1 + rollouts))
            ends = [row["seconds"] for row in log if "loss/policy" in row]
            fastest, bytes_ = float(np.quantile(np.diff(ends), 0.1)), sent(env_id, task, 2)
            row = dict(kind="measured", processes=2, seconds_per_rollout=fastest)
            row |= dict(bytes_per_rollout=round(bytes_), bytes_per_update=round(bytes_ / task["updates"]))
            rows.append(row)
        for row in rows:
            row["load"] = round(os.getloadavg()[0], 1)
        for k in (1, 2, 8, 64, 1024):
            time_of = predicted(one, task, k, alpha, beta)
            rows.append(dict(kind="predicted", processes=k, seconds_per_rollout=time_of))
        for row in rows:
            k, time_of = row["processes"], row["seconds_per_rollout"]
            row |= dict(env_id=env_id, num_envs=k * task["num_envs"], updates_per_rollout=task["updates"])
            row |= dict(steps_per_second=round(k * task["steps"] / time_of), beta_mb=round(beta / 1e6))
            row |= dict(seconds_per_rollout=round(time_of, 4), alpha_us=round(1e6 * alpha, 1)) | here()
            print(row, flush=True)
        half = next(k for k in range(2, 10**6) if predicted(one, task, k, alpha, beta) > 2 * one)
        print(f"{env_id}: half of the time is messages from {half} processes on; {task}", flush=True)
        order = lambda row: ([*ROLLOUTS].index(row["env_id"]), row["kind"], int(row["processes"]))
        same = lambda row: row["env_id"]
        replace_rows(RESULTS / "processes_speed.csv", PROCESSES_COLUMNS, rows, same, order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = ("peers", "floor", "envpool", "processes", "curves")
    parser.add_argument("what", nargs="?", choices=what, default="peers", help="peers unless given")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=LEARNING, help="of peers and processes")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side; of curves, seeds")
    parser.add_argument("--threads", type=int, help="threads of torch on both sides, 0: torch decides")
    parser.add_argument("--against", type=Path, help="an older script in place of the peer; writes no rows")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--out", type=Path, default=RESULTS / "speed.csv", help="the CSV of peers")
    parser.add_argument("--request", help=argparse.SUPPRESS)  # in the process of the peer
    args = parser.parse_args()
    if args.request:
        print(json.dumps(answer(json.loads(args.request))))
    elif args.what == "floor":
        floor()
    elif args.what == "envpool":
        envpool(args.pairs)
    elif args.what == "processes":
        in_processes([env_id for env_id in ROLLOUTS if env_id in args.tasks])
    elif args.what == "curves":
        curves(args.pairs)
    else:
        beside_peers(args)


if __name__ == "__main__":
    main()
