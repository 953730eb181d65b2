"""Compares the speed of ppo.py, a2c.py, trpo.py, dqn.py, sac.py and ddpg_td3.py with Stable-Baselines3 (an
optional package; TRPO is in sb3-contrib) and with SBX, its twin in JAX (sbx-rl), at equal settings.

    python benchmark/speed.py --tasks CartPole-v1 "a2c CartPole-v1" --pairs 5
    python benchmark/speed.py --solve --pairs 5

A machine drifts by tens of percent within minutes, so the two sides take turns, A B A B, each time in a new
process, and what counts is the median of the ratios. Nothing else may run meanwhile. Rows go to
benchmark/results/speed.csv.
"""

import argparse
import csv
import importlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from run import ROOT, commit, cpu_name

OURS, SB3, SBX = "plainrl", "stable-baselines3", "sbx"
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
    learning_starts: int | None = None  # steps before the first update of DQN; None: as DQN says


# Networks: 64x64 tanh, actor and critic apart; on Pong the Nature CNN with 512 features, shared. Nothing but
# advantages is normalized. HalfCheetah has the defaults of Stable-Baselines3: 10 epochs, minibatches of 64.
# Pong: our environments are ale-py's, theirs make_atari_env with VecFrameStack; both have sticky actions.
# A2C: Adam on both sides, and the number of steps of Stable-Baselines3.
# TRPO: rollouts of two episodes of 200 steps from each environment, 15 iterations of the conjugate gradient,
# and for the critic 10 passes of 16 minibatches.
# SAC and TD3: two hidden layers of 256, relu, batches of 256, one update for each step from step 1,000 on.
# DQN: an update after each "rollout" of 10 steps with a batch of 128, 120 and 84 hidden units; on Pong 4
# steps, 32, and the Nature CNN with 512 features. Learning starts at 2,000 and 1,000 steps.
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
    "dqn CartPole-v1": Task("dqn", "CartPole-v1", 1, 10, 1, 1, window=2000, warmup=210, threads=1),
    "dqn ALE/Pong-v5": Task("dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=1000, warmup=275, threads=0),
    # 100,000 random steps fill the buffer: for the memory, and for the speed of what is not learning.
    "dqn ALE/Pong-v5 filling": Task(
        "dqn", "ALE/Pong-v5", 1, 4, 1, 1, window=24_900, warmup=100, threads=0, learning_starts=200_000
    ),
}
ACTOR_CRITIC = "sac", "ddpg_td3"  # one step and one update are one rollout of theirs
for name, task in list(TASKS.items()):
    if task.algo in ACTOR_CRITIC:
        TASKS[f"{name} {SBX}"] = task._replace(peer=SBX)
# What the other side must be able to import, with the package that has it.
PACKAGES = {
    "stable_baselines3": "stable-baselines3", "sb3_contrib": "sb3-contrib", "sbx": "sbx-rl",
    "mujoco": "gymnasium[mujoco]", "ale_py": "ale-py", "cv2": "opencv-python",
}  # fmt: skip
LEARNING = [name for name in TASKS if not name.endswith("filling")]  # measured unless --tasks says so
DQN = {
    "CartPole-v1": dict(batch_size=128, learning_starts=2_000, buffer_size=10_000, target_update_every=500),
    "ALE/Pong-v5": dict(batch_size=32, learning_starts=1_000, buffer_size=100_000, target_update_every=1_000),
}
SOLVE = dict(
    env_id="CartPole-v1", stop_return=475, total_timesteps=100_000, eval_every=10_000, eval_episodes=10
)


def dqn_settings(task: Task) -> dict:
    changes = {} if task.learning_starts is None else {"learning_starts": task.learning_starts}
    return DQN[task.env_id] | changes


def modules_of_peer(task: Task) -> set[str]:
    """What the other side imports for this task."""
    modules = {"stable_baselines3"}
    modules |= {"sb3_contrib"} if task.algo == "trpo" else set()
    modules |= {"sbx"} if task.peer == SBX else set()
    modules |= {"mujoco"} if task.env_id.startswith("HalfCheetah") else set()
    return modules | ({"ale_py", "cv2"} if task.env_id.startswith("ALE/") else set())


def missing(python: str, tasks: list[str]) -> list[str]:
    """Packages of these tasks that the interpreter of the other side lacks."""
    wanted = set().union(*(modules_of_peer(TASKS[name]) for name in tasks))
    look = "import importlib.util as u, sys; print(*[x for x in sys.argv[1:] if not u.find_spec(x)])"
    try:
        found = subprocess.run([python, "-c", look, *wanted], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"speed.py: --sb3-python {python} is no interpreter that works: {error}")
    return [package for module, package in PACKAGES.items() if module in found.stdout.split()]


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
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    if process.returncode:
        last = (texts[1].strip() or texts[0].strip() or "it printed nothing").splitlines()[-1]
        sys.exit(f"speed.py: exit code {process.returncode} of {' '.join(words)[:200]}: {last}")
    return texts[0], seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


# ------------------------------------------------------------------------------------------------------- ours
def run_ours(algo: str, arguments: list[str], threads: int) -> tuple[list[dict], dict, float]:
    """One training of algos/{algo}.py: the rows of its log, its versions, its seconds in all."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, f"algos/{algo}.py", *arguments, "--torch-threads", str(threads)]
        _, seconds, memory = call([*words, "--device", "cpu", "--run-dir", f"{folder}/run"])
        environment = json.loads(Path(folder, "run/environment.json").read_text())[-1]
        rows = [json.loads(line) for line in Path(folder, "run/progress.jsonl").read_text().splitlines()]
    versions = {name: environment[name].split()[0] for name in ("python", "torch", "gymnasium", "numpy")}
    return rows, versions | dict(memory_gb=round(memory, 3)), seconds


def speed_of_ours(task: Task) -> dict:
    """Environment steps per second between two rows of the log, logging included."""
    batch, rollouts = task.num_envs * task.num_steps, task.warmup + task.window + 1
    words = ["--env-id", task.env_id, "--total-timesteps", str(rollouts * batch)]
    words += ["--num-envs", str(task.num_envs), "--no-normalize-obs"]
    if task.algo in ACTOR_CRITIC:
        words += ["--batch-size", "256", "--learning-starts", "1000", "--updates-per-step", "1"]
        words += ["--hidden-sizes", "256", "256", "--activation", "relu", "--max-grad-norm", "inf"]
    elif task.algo == "dqn":
        words += [f"--{name.replace('_', '-')}={value}" for name, value in dqn_settings(task).items()]
        words += [f"--train-every={task.num_steps}", "--updates-per-train=1"]
        words += ["--exploration-fraction=0.5", "--epsilon-end=0.05"]
        words += ["--hidden-sizes", *(["512"] if task.env_id.startswith("ALE/") else ["120", "84"])]
    else:
        words += ["--num-steps", str(task.num_steps), "--no-normalize-reward"]
    if task.algo == "trpo":
        words += ["--cg-iterations", "15", "--value-epochs", str(task.update_epochs)]
        words += ["--num-minibatches", str(task.num_minibatches)]
    elif task.algo == "ppo":
        words += ["--update-epochs", str(task.update_epochs), "--num-minibatches", str(task.num_minibatches)]
    elif task.algo == "a2c":
        words += ["--critic-lr", "None", "--entropy-coef", "0", "--gae-lambda", "1"]
        words += ["--no-normalize-advantage"]
    if not task.env_id.startswith("ALE/") and task.algo not in (*ACTOR_CRITIC, "dqn"):
        words += ["--hidden-sizes", "64", "64", "--activation", "tanh"]
        words += [] if task.algo == "trpo" else ["--no-shared-trunk"]
    words += ["--eval-every", "0", "--eval-episodes", "1", "--checkpoint-every", "0"]
    rows, versions, _ = run_ours(task.algo, words, task.threads)
    # A row per rollout, or per 1,000 steps for a2c, dqn, sac and td3. The last row has the final evaluation
    # in its time, so the window ends before it.
    begin, end = task.warmup * batch, (task.warmup + task.window) * batch
    rows = [row for row in rows if begin <= row["step"] <= end and "eval/return_mean" not in row]
    if len(rows) < 2:
        sys.exit(f"speed.py: --window {task.window} spans less than two rows of the log: give a longer one")
    first, last = rows[0], rows[-1]
    steps, seconds = last["step"] - first["step"], last["seconds"] - first["seconds"]
    return versions | dict(env_steps=steps, seconds=round(seconds, 3), steps_per_second=steps / seconds)


def solve_ours(seed: int, threads: int) -> dict:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SOLVE.items()]
    rows, versions, seconds = run_ours("ppo", [*words, f"--seed={seed}"], threads)
    solved = rows[-1]["eval/return_mean"] >= SOLVE["stop_return"]
    return versions | dict(env_steps=int(rows[-1]["step"]), seconds=round(seconds, 3), solved=solved)


# ------------------------------------------------------------------------------------------ Stable-Baselines3
def run_peer(python: str, **request) -> tuple[dict, float, float]:
    """Starts this file with the interpreter that has Stable-Baselines3; it answers with one line of JSON.
    Returns the answer, seconds and GB of the process."""
    text, seconds, memory = call([python, str(Path(__file__).resolve()), "--peer", json.dumps(request)])
    return json.loads(text.strip().splitlines()[-1]), seconds, memory


def speed_of_peer(python: str, task: Task) -> dict:
    answer, _, memory = run_peer(python, **task._asdict())
    speed = answer["env_steps"] / answer["seconds"]
    return answer | dict(steps_per_second=speed, memory_gb=round(memory, 3))


def solve_peer(python: str, seed: int, threads: int) -> dict:
    answer, seconds, _ = run_peer(python, seed=seed, threads=threads, solve=SOLVE)
    return answer | dict(seconds=round(seconds, 3))


def peer(request: dict) -> dict:
    """The side of Stable-Baselines3, in its own process."""
    import torch
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback, EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if request["threads"]:
        torch.set_num_threads(request["threads"])
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "gymnasium", "numpy")}
    library = importlib.import_module("sbx" if request.get("peer") == SBX else "stable_baselines3")
    versions |= dict(python=platform.python_version(), library_version=library.__version__)
    if solve := request.get("solve"):
        # RL Baselines3 Zoo's hyperparameters for CartPole-v1 (hyperparams/ppo.yml, commit 22e3ff2)
        envs = make_vec_env(solve["env_id"], n_envs=8, seed=request["seed"])
        model = PPO(
            "MlpPolicy", envs, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20,
            ent_coef=0.0, learning_rate=lambda left: 0.001 * left, clip_range=lambda left: 0.2 * left,
            device="cpu", seed=request["seed"],
        )  # fmt: skip
        stop = StopTrainingOnRewardThreshold(reward_threshold=solve["stop_return"], verbose=0)
        evaluation = EvalCallback(
            make_vec_env(solve["env_id"], n_envs=1, seed=10_000_000), callback_on_new_best=stop, verbose=0,
            n_eval_episodes=solve["eval_episodes"], eval_freq=solve["eval_every"] // 8,
        )  # fmt: skip
        model.learn(solve["total_timesteps"], callback=evaluation)
        solved = bool(evaluation.best_mean_reward >= solve["stop_return"])
        return versions | dict(env_steps=model.num_timesteps, solved=solved)

    class Clock(BaseCallback):
        """Reads the time before every rollout; the updates of the rollout before are done by then."""

        times = []

        def _on_rollout_start(self):
            self.times.append(time.perf_counter())

        def _on_step(self):
            return True

    task = Task(**{name: request[name] for name in Task._fields})
    env_id, batch = task.env_id, task.num_envs * task.num_steps
    atari = env_id.startswith("ALE/")
    if atari:
        importlib.import_module("gymnasium").register_envs(importlib.import_module("ale_py"))
        one_frame = {"frameskip": 1, "repeat_action_probability": 0.25}  # AtariWrapper skips the frames
        envs = VecFrameStack(make_atari_env(env_id, n_envs=task.num_envs, seed=1, env_kwargs=one_frame), 4)
    else:
        envs = make_vec_env(env_id, n_envs=task.num_envs, seed=1)
    same = dict(policy="CnnPolicy" if atari else "MlpPolicy", env=envs, seed=1, device="cpu")
    if task.algo in ACTOR_CRITIC:
        layers = dict(policy_kwargs=dict(net_arch=[256, 256]))
        same |= {} if task.peer == SB3 else dict(device="auto")
        algorithm = {"sac": library.SAC, "ddpg_td3": library.TD3}[task.algo]
        model = algorithm(batch_size=256, learning_starts=1000, **layers, **same)
    elif task.algo == "dqn":
        sizes = dqn_settings(task)
        model = library.DQN(
            train_freq=task.num_steps, gradient_steps=1, exploration_fraction=0.5,
            target_update_interval=sizes.pop("target_update_every"),
            policy_kwargs={} if atari else dict(net_arch=[120, 84]), **sizes, **same,
        )  # fmt: skip
    elif task.algo == "ppo":
        model = PPO(
            n_steps=task.num_steps,
            n_epochs=task.update_epochs,
            batch_size=batch // task.num_minibatches,
            **same,
        )
    elif task.algo == "trpo":
        model = importlib.import_module("sb3_contrib").TRPO(
            n_steps=task.num_steps,
            n_critic_updates=task.update_epochs,
            batch_size=batch // task.num_minibatches,
            **same,
        )
    else:
        model = A2C(n_steps=task.num_steps, use_rms_prop=False, **same)  # Adam on both sides
    clock = Clock()
    model.learn((task.warmup + task.window + 1) * batch, callback=clock)
    seconds = clock.times[task.warmup + task.window] - clock.times[task.warmup]
    return versions | dict(env_steps=task.window * batch, seconds=round(seconds, 3))


# ---------------------------------------------------------------------------------------------- the two sides
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
    ours, theirs = ([row[unit] for row in rows if row["library"] == library] for library in sides)
    ratios = [a / b if kind == "speed" else b / a for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.median
    print(
        f"{kind} {task}: {OURS} {middle(ours):.1f}, {list(sides)[1]} {middle(theirs):.1f} {unit} (medians); "
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
    parser.add_argument(
        "--window", type=int, help="rollouts that are timed; default: by task, 10 s to a minute"
    )
    parser.add_argument("--threads", type=int, help="threads of torch on both sides, 0: torch decides")
    parser.add_argument("--sb3-python", default=sys.executable, help="interpreter with Stable-Baselines3")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed.csv", help="the CSV")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # a request, in the process of the other side
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(peer(json.loads(args.peer))))
        return
    if args.pairs < 1 or (args.window is not None and args.window < 1):
        parser.error("--pairs and --window must be at least 1")
    if packages := missing(args.sb3_python, [SOLVE["env_id"]] if args.solve else args.tasks):
        sys.exit(
            f"speed.py: {args.sb3_python} lacks what these tasks need: pip install {shlex.join(packages)} "
            "(or name an interpreter that has it with --sb3-python)"
        )
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
        sides = {
            OURS: lambda _, task=task: speed_of_ours(task),
            task.peer: lambda _, task=task: speed_of_peer(args.sb3_python, task),
        }
        settings = {field: value for field, value in task._asdict().items() if field in COLUMNS}
        write_rows(compare("speed", name, sides, common | settings, args.pairs), args.out)


if __name__ == "__main__":
    main()
