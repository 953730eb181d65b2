"""Compares the speed of our scripts with Stable-Baselines3 (an optional package; TRPO is in sb3-contrib),
with SBX, its twin in JAX (sbx-rl), and with older scripts of ours, at equal settings and networks.

    python benchmark/speed.py --tasks CartPole-v1 "a2c CartPole-v1" --pairs 5
    python benchmark/speed.py --tasks "sac Pendulum-v1" --against /tmp/older/sac.py --no-peer
    python benchmark/speed.py --solve --pairs 5

A machine drifts by tens of percent within minutes, so the sides take turns, A B A B, each time in a new
process, and what counts is the median of the ratios. Nothing else may run meanwhile. Rows of today's script
and of the peer go to benchmark/results/speed.csv; the older script is only printed.
"""

import argparse
import csv
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from run import ROOT, commit, cpu_name

OURS, SB3, SBX, OLDER = "plainrl", "stable-baselines3", "sbx", "older script"
COLUMNS = """
    kind task library pair steps_per_second seconds env_steps solved threads num_envs num_steps update_epochs
    num_minibatches python torch gymnasium numpy library_version device cpu cores git_commit memory_gb
""".split()


class Task(NamedTuple):
    algo: str
    env_id: str
    num_envs: int
    num_steps: int
    update_epochs: int
    num_minibatches: int
    window: int  # rollouts, each with its updates, that are timed
    warmup: int  # rollouts before them
    threads: int  # of torch; 0: torch decides
    peer: str = SB3
    learning_starts: int = 1_000  # steps before the first update of SAC, TD3 and DQN


# One step and one update are one rollout of SAC and TD3, an update after each 10 or 4 steps one of DQN.
TASKS = {
    "CartPole-v1": Task("ppo", "CartPole-v1", 4, 128, 4, 4, window=120, warmup=10, threads=1),
    "HalfCheetah-v5": Task("ppo", "HalfCheetah-v5", 1, 2048, 10, 32, window=6, warmup=2, threads=1),
    "ALE/Pong-v5": Task("ppo", "ALE/Pong-v5", 8, 128, 4, 4, window=6, warmup=2, threads=0),
    "a2c CartPole-v1": Task("a2c", "CartPole-v1", 4, 5, 1, 1, window=5000, warmup=250, threads=1),
    "trpo Pendulum-v1": Task("trpo", "Pendulum-v1", 4, 400, 10, 16, window=25, warmup=3, threads=1),
    "sac HalfCheetah-v5": Task("sac", "HalfCheetah-v5", 1, 1, 1, 1, window=4000, warmup=2000, threads=2),
    "sac Pendulum-v1": Task("sac", "Pendulum-v1", 1, 1, 1, 1, window=4000, warmup=2000, threads=2),
    "td3 HalfCheetah-v5": Task("ddpg_td3", "HalfCheetah-v5", 1, 1, 1, 1, window=4000, warmup=2000, threads=2),
    "td3 Pendulum-v1": Task("ddpg_td3", "Pendulum-v1", 1, 1, 1, 1, window=4000, warmup=2000, threads=2),
    "a2c ALE/Pong-v5": Task("a2c", "ALE/Pong-v5", 16, 5, 1, 1, window=100, warmup=25, threads=0),
    "dqn CartPole-v1": Task("dqn", "CartPole-v1", 1, 10, 1, 1, 2000, 210, threads=1, learning_starts=2_000),
    "dqn ALE/Pong-v5": Task("dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=1000, warmup=275, threads=0),
    # 100,000 random steps fill the buffer: for the memory, and for the speed of what is not learning.
    "dqn ALE/Pong-v5 filling": Task(
        "dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=24_900, warmup=100, threads=0, learning_starts=200_000
    ),
}
for name in [name for name in TASKS if name.startswith(("sac", "td3"))]:
    TASKS[f"{name} {SBX}"] = TASKS[name]._replace(peer=SBX)
LEARNING = [name for name in TASKS if not name.endswith("filling")]  # measured unless --tasks says so

# What differs from the defaults of Stable-Baselines3 is set on its side, in peer(); the rest is set here.
FLAGS = {
    "ppo": """--num-steps {num_steps} --update-epochs {update_epochs} --num-minibatches {num_minibatches}
        --learning-rate 3e-4 --critic-lr None --gae-lambda 0.95 --entropy-coef 0 --no-normalize-reward""",
    "a2c": """--num-steps {num_steps} --learning-rate 7e-4 --critic-lr None --gae-lambda 1 --entropy-coef 0
        --no-normalize-advantage --no-normalize-reward""",
    "trpo": """--num-steps {num_steps} --value-epochs {update_epochs} --num-minibatches {num_minibatches}
        --critic-lr 1e-3 --gae-lambda 0.95 --cg-iterations 15 --hvp-damping 0.1 --no-normalize-reward""",
    "sac": """--learning-rate 3e-4 --batch-size 256 --learning-starts {learning_starts} --updates-per-step 1
        --tau 0.005 --max-grad-norm inf""",
    "ddpg_td3": """--learning-rate 1e-3 --batch-size 256 --learning-starts {learning_starts}
        --updates-per-step 1 --tau 0.005 --max-grad-norm inf --exploration-noise 0.1""",
    "dqn": """--learning-rate 1e-4 --learning-starts {learning_starts} --train-every {num_steps}
        --updates-per-train 1 --tau 1 --exploration-fraction 0.5 --epsilon-end 0.05 --max-grad-norm 10""",
}
NETWORKS = {  # Pong: behind the Nature CNN, which the peers have by themselves
    "ppo": "--hidden-sizes 64 64 --activation tanh --no-shared-trunk",
    "a2c": "--hidden-sizes 64 64 --activation tanh --no-shared-trunk",
    "trpo": "--hidden-sizes 64 64 --activation tanh",
    "sac": "--hidden-sizes 256 256 --activation relu",
    "ddpg_td3": "--hidden-sizes 256 256 --activation relu",
    "dqn": "--hidden-sizes 120 84 --activation relu",
}
PONG_NETWORKS = {
    "ppo": "--hidden-sizes 512 --activation relu --shared-trunk",
    "a2c": "--hidden-sizes 512 --activation relu --shared-trunk",
    "dqn": "--hidden-sizes 512 --activation relu",
}
DQN = {  # by the names of both sides: batch, rows of the buffer, steps between copies of the network
    "CartPole-v1": (128, 10_000, 500),
    "ALE/Pong-v5": (32, 100_000, 1_000),
}
SOLVE = dict(
    env_id="CartPole-v1", stop_return=475, total_timesteps=100_000, eval_every=10_000, eval_episodes=10
)


def flags_of(task: Task) -> list[str]:
    """The command line of our script for this task."""
    rollouts = task.warmup + task.window + 1
    words = f"""--env-id {task.env_id} --num-envs {task.num_envs} --gamma 0.99 --no-anneal-lr
        --total-timesteps {rollouts * task.num_envs * task.num_steps} --no-normalize-obs --eval-every 0
        --eval-episodes 1 --checkpoint-every 0 {FLAGS[task.algo].format(**task._asdict())} """
    words += (PONG_NETWORKS if task.env_id.startswith("ALE/") else NETWORKS)[task.algo]
    if task.algo == "dqn":
        batch, rows, every = DQN[task.env_id]
        words += f" --batch-size {batch} --buffer-size {rows} --target-update-every {every}"
    return words.split()


def call(words: list[str]) -> tuple[str, float, float]:
    """Runs a command from the project's folder. Returns its output, seconds from start to exit, and GB of
    memory that it held at most."""
    # Both sides set the threads of torch themselves; the shell must not decide for one of them.
    env = {name: x for name, x in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=err, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        texts = [(file.seek(0), file.read())[1].strip() for file in (out, err)]
    if process.returncode:
        last = "\n".join((texts[1] or texts[0] or "it printed nothing").splitlines()[-5:])
        sys.exit(f"speed.py: exit code {process.returncode} of {' '.join(words)[:200]}\n{last}")
    return texts[0], seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


# ------------------------------------------------------------------------------------------------------- ours
def read_log(run: Path) -> list[dict]:
    """Rows of the log with step and seconds; the first edition of the scripts wrote a progress.csv."""
    if (run / "progress.jsonl").exists():
        return [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
    with (run / "progress.csv").open(newline="") as file:
        rows = [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]
    return [row | {"seconds": row["wall_time"]} for row in rows]


def run_ours(script: Path, flags: list[str], threads: int) -> tuple[list[dict], dict, float]:
    """One training: the rows of its log, what the CSV says of it, and its seconds from command to exit."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [*flags, "--torch-threads", str(threads), "--device", "cpu", "--run-dir", str(run)]
        _, seconds, memory = call([sys.executable, str(script), *words])
        rows, about = read_log(run), json.loads((run / "environment.json").read_text())
    about = about[-1] if isinstance(about, list) else about  # the first edition has one entry
    versions = {name: about[name].split()[0] for name in ("python", "torch", "gymnasium", "numpy")}
    return rows, versions | dict(memory_gb=round(memory, 3)), seconds


def speed_of_ours(script: Path, task: Task) -> dict:
    """Environment steps per second between two rows of the log, logging included."""
    rows, about, _ = run_ours(script, flags_of(task), task.threads)
    batch = task.num_envs * task.num_steps
    begin, end = task.warmup * batch, (task.warmup + task.window) * batch
    # A row of the log has the time of the evaluation before it; the only one is at the end of the training.
    rows = [row for row in rows if begin <= row["step"] <= end and "eval/return_mean" not in row]
    if len(rows) < 2:
        sys.exit(f"speed.py: --window {task.window} spans less than two rows of the log: give a longer one")
    steps, seconds = (rows[-1][name] - rows[0][name] for name in ("step", "seconds"))
    return about | dict(env_steps=int(steps), seconds=round(seconds, 3), steps_per_second=steps / seconds)


def solve_ours(seed: int, threads: int) -> dict:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SOLVE.items()]
    rows, about, seconds = run_ours(ROOT / "algos/ppo.py", [*words, f"--seed={seed}"], threads)
    solved = rows[-1]["eval/return_mean"] >= SOLVE["stop_return"]
    return about | dict(env_steps=int(rows[-1]["step"]), seconds=round(seconds, 3), solved=solved)


# ------------------------------------------------------------------------------------------ Stable-Baselines3
def run_peer(python: str, **request) -> tuple[dict, float]:
    """Starts this file with the interpreter that has Stable-Baselines3; it answers with one line of JSON.
    Returns the answer and the seconds from command to exit."""
    text, seconds, memory = call([python, str(Path(__file__).resolve()), "--request", json.dumps(request)])
    return json.loads(text.splitlines()[-1]) | dict(memory_gb=round(memory, 3)), seconds


def speed_of_peer(python: str, task: Task) -> dict:
    answer, _ = run_peer(python, **task._asdict())
    return answer | dict(steps_per_second=answer["env_steps"] / answer["seconds"])


def solve_peer(python: str, seed: int, threads: int) -> dict:
    answer, seconds = run_peer(python, seed=seed, threads=threads, solve=SOLVE)
    return answer | dict(seconds=round(seconds, 3))


def answer(request: dict) -> dict:
    """The side of the peer, in its own process."""
    import torch

    if request["threads"]:
        torch.set_num_threads(request["threads"])
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "gymnasium", "numpy")}
    library = importlib.import_module("sbx" if request.get("peer") == SBX else "stable_baselines3")
    versions |= dict(python=platform.python_version(), library_version=library.__version__)
    if solve := request.get("solve"):
        return versions | solve_in_peer(library.PPO, request["seed"], **solve)
    return versions | speed_in_peer(library, Task(**request))


def solve_in_peer(algorithm, seed, env_id, stop_return, total_timesteps, eval_every, eval_episodes) -> dict:
    """RL Baselines3 Zoo's hyperparameters for CartPole-v1 (hyperparams/ppo.yml, commit 22e3ff2)."""
    from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.env_util import make_vec_env

    model = algorithm(
        "MlpPolicy", make_vec_env(env_id, n_envs=8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8,
        gamma=0.98, n_epochs=20, ent_coef=0.0, learning_rate=lambda left: 0.001 * left,
        clip_range=lambda left: 0.2 * left, device="cpu", seed=seed,
    )  # fmt: skip
    evaluation = EvalCallback(
        make_vec_env(env_id, n_envs=1, seed=10_000_000), n_eval_episodes=eval_episodes, verbose=0,
        callback_on_new_best=StopTrainingOnRewardThreshold(stop_return), eval_freq=eval_every // 8,
    )  # fmt: skip
    model.learn(total_timesteps, callback=evaluation)
    return dict(env_steps=model.num_timesteps, solved=bool(evaluation.best_mean_reward >= stop_return))


def make_model(library, task: Task):
    """The peer's model of this task; what is not given is its default, and set on our side in FLAGS."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecFrameStack

    pong, batch = task.env_id.startswith("ALE/"), task.num_envs * task.num_steps
    if pong:
        importlib.import_module("gymnasium").register_envs(importlib.import_module("ale_py"))
        one_frame = {"frameskip": 1, "repeat_action_probability": 0.25}  # AtariWrapper skips the frames
        envs = make_atari_env(task.env_id, n_envs=task.num_envs, seed=1, env_kwargs=one_frame)
        envs = VecFrameStack(envs, 4)
    else:
        envs = make_vec_env(task.env_id, n_envs=task.num_envs, seed=1)
    same = dict(policy="CnnPolicy" if pong else "MlpPolicy", env=envs, seed=1, device="cpu")
    if task.algo in ("sac", "ddpg_td3"):
        same |= dict(policy_kwargs=dict(net_arch=[256, 256]), batch_size=256)
        same |= dict(learning_starts=task.learning_starts)
        same |= {} if task.peer == SB3 else dict(device="auto")
        if task.algo == "sac":
            return library.SAC(**same)
        shape = envs.action_space.shape
        return library.TD3(action_noise=NormalActionNoise([0.0] * shape[0], [0.1] * shape[0]), **same)
    if task.algo == "dqn":
        batch, rows, every = DQN[task.env_id]
        return library.DQN(
            train_freq=task.num_steps, gradient_steps=1, exploration_fraction=0.5, batch_size=batch,
            buffer_size=rows, target_update_interval=every, learning_starts=task.learning_starts,
            policy_kwargs={} if pong else dict(net_arch=[120, 84]), **same,
        )  # fmt: skip
    if task.algo == "a2c":
        return library.A2C(n_steps=task.num_steps, use_rms_prop=False, **same)  # Adam on both sides
    same |= dict(n_steps=task.num_steps, batch_size=batch // task.num_minibatches)
    if task.algo == "trpo":
        contrib = importlib.import_module("sb3_contrib")
        return contrib.TRPO(n_critic_updates=task.update_epochs, **same)
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

    clock, batch = Clock(), task.num_envs * task.num_steps
    make_model(library, task).learn((task.warmup + task.window + 1) * batch, callback=clock)
    seconds = clock.times[task.warmup + task.window] - clock.times[task.warmup]
    return dict(env_steps=task.window * batch, seconds=round(seconds, 3))


# -------------------------------------------------------------------------------------------------- the sides
def write_rows(rows: list[dict], path: Path) -> None:
    """Puts these rows in place of older ones of the same kind, task and threads."""
    same = lambda row: (row["kind"], row["task"], str(row["threads"]))
    new, old = {same(row) for row in rows}, []
    if path.exists():
        with path.open(newline="") as file:
            old = [row for row in csv.DictReader(file) if same(row) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(old + rows, key=lambda row: (*same(row), int(row["pair"]), row["library"])))
    part.replace(path)


def compare(kind: str, task: str, sides: dict, common: dict, pairs: int) -> list[dict]:
    """Measures A B A B ...; each side is a function of the pair's number. Prints and returns the rows."""
    rows = []
    unit = "steps_per_second" if kind == "speed" else "seconds"
    for pair in range(1, pairs + 1):
        for library, measure in sides.items():
            row = common | dict(kind=kind, task=task, library=library, pair=pair) | measure(pair)
            row["steps_per_second"] = round(row["steps_per_second"], 1) if kind == "speed" else ""
            rows.append(row)
            solved = "" if row.get("solved", True) else " NOT SOLVED"
            memory = f", {row['memory_gb']:.2f} GB" if "memory_gb" in row else ""
            print(f"{kind} {task} pair {pair} {library}: {row[unit]:.1f} {unit}{solved}{memory}", flush=True)
    ours, *others = ([row[unit] for row in rows if row["library"] == library] for library in sides)
    for library, theirs in zip(list(sides)[1:], others, strict=True):
        ratios = [a / b if kind == "speed" else b / a for a, b in zip(ours, theirs, strict=True)]
        middle = statistics.median
        print(
            f"{kind} {task}: {OURS} {middle(ours):.1f}, {library} {middle(theirs):.1f} {unit} (medians); "
            f"{OURS} is {middle(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=LEARNING, help="what to measure")
    parser.add_argument(
        "--solve", action="store_true", help="instead: seconds from command to CartPole solved"
    )
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side; seeds with --solve")
    parser.add_argument("--window", type=int, help="rollouts that are timed; default: by task")
    parser.add_argument("--threads", type=int, help="threads of torch on all sides, 0: torch decides")
    parser.add_argument("--against", type=Path, help="an older script, or a folder of them, as a third side")
    parser.add_argument("--no-peer", action="store_true", help="leave out the peer, and write no rows")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed.csv", help="the CSV")
    parser.add_argument("--request", help=argparse.SUPPRESS)  # in the process of the peer
    args = parser.parse_args()
    if args.request:
        print(json.dumps(answer(json.loads(args.request))))
        return
    if args.pairs < 1 or (args.window is not None and args.window < 1):
        parser.error("--pairs and --window must be at least 1")
    common = dict(cpu=cpu_name(), cores=os.cpu_count(), device="cpu", git_commit=commit())
    if args.solve:
        threads = 1 if args.threads is None else args.threads
        sides = {
            OURS: lambda seed: solve_ours(seed, threads),
            SB3: lambda seed: solve_peer(args.sb3_python, seed, threads),
        }
        rows = compare("solve", SOLVE["env_id"], sides, common | dict(threads=threads), args.pairs)
        write_rows(rows, args.out)
        return
    for name in args.tasks:
        task = TASKS[name]
        task = task._replace(
            threads=task.threads if args.threads is None else args.threads, window=args.window or task.window
        )
        sides = {OURS: lambda _, task=task: speed_of_ours(ROOT / f"algos/{task.algo}.py", task)}
        if args.against:
            script = args.against.resolve()
            script = script / f"{task.algo}.py" if script.is_dir() else script
            sides[OLDER] = lambda _, task=task, script=script: speed_of_ours(script, task)
        if not args.no_peer:
            sides[task.peer] = lambda _, task=task: speed_of_peer(args.sb3_python, task)
        settings = {field: value for field, value in task._asdict().items() if field in COLUMNS}
        rows = compare("speed", name, sides, common | settings, args.pairs)
        if not args.no_peer:
            write_rows([row for row in rows if row["library"] != OLDER], args.out)


if __name__ == "__main__":
    main()
