"""One run of ppo.py over several processes, by recipes/ppo_torchrun.patch: does it learn the same, what does
it send, and where does it stop paying?

    python benchmark/processes.py curves --seeds 5       # 1 process x 8 environments beside 2 x 4
    python benchmark/processes.py speed                  # measured with 1 and 2 processes, predicted for more

curves writes benchmark/results/processes.csv and docs/img/processes.png, speed writes
benchmark/results/processes_speed.csv. benchmark/README.md has the table.

A prediction is for processes with a core each, each taking as many steps as one alone does (num_envs grows
with them), and whose messages go around a ring, as gloo's do. With K of them a rollout and its updates take

    T(K) = T(1) + U (A(K, gradients) + G(K, advantages)) + G(K, check) + 2 G(K, rewards) + G(K, observations)
    A(K, b) = 2 (K - 1) (alpha + b / (K beta))       all_reduce of b bytes
    G(K, b) = (K - 1) (alpha + b / beta)             all_gather of b bytes from each

with U minibatches; alpha is the time of a message without content, beta bytes per second. Measured are T(1),
as processor time, so that other work on the machine does not count, and alpha and beta between two processes
here. Rewards (with the ends of episodes) and observations are sent where they are normalized. Beside that,
one and two processes are timed by the clock (the fastest tenth of their rollouts), which other work slows.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from plot import COLOURS, STYLE, mean, on_one_grid, plt, stratified_bootstrap
from run import ROOT, commit, cpu_name, load_script, rows_of

RESULTS = ROOT / "benchmark" / "results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COLUMNS = """
    env_id kind processes num_envs steps_per_second seconds_per_rollout processor_seconds load
    bytes_per_update bytes_per_rollout alpha_us beta_mb updates_per_rollout python torch cpu cores git_commit
""".split()
TASKS = {"CartPole-v1": 40, "HalfCheetah-v5": 4, "ALE/Pong-v5": 2}  # rollouts that are timed
ALONE = ["ALE/Pong-v5"]  # two processes are not measured, only predicted


def about() -> dict:
    versions = dict(python=sys.version.split()[0], torch=torch.__version__)
    return versions | dict(cpu=cpu_name(), cores=os.cpu_count(), git_commit=commit())


def command(processes: int, words: list, folder: str) -> list[str]:
    """The command that trains ppo.py, with the recipe where it is for several processes, from this folder."""
    script = Path(folder, "algos", "ppo.py")
    script.parent.mkdir()
    shutil.copy(ROOT / "algos" / "ppo.py", script)
    launcher = [sys.executable]
    if processes > 1:
        recipe = ROOT / "recipes" / "ppo_torchrun.patch"
        subprocess.run(["git", "apply", str(recipe)], cwd=folder, check=True)
        launcher = [*TORCHRUN, str(processes)]
    return [*launcher, str(script), "--device", "cpu", "--run-dir", f"{folder}/run", *map(str, words)]


def train(processes: int, words: list) -> list[dict]:
    """Trains in a folder that is thrown away. Returns the rows of its log."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(processes, words, folder)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
        rows = Path(folder, "run", "progress.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def alone(words: list) -> tuple[float, float]:
    """Seconds of a rollout here: of the processor (median), and by the clock (the fastest tenth)."""
    ppo, times = load_script("ppo"), []
    log = ppo.Run.log

    def watched(run, metrics):
        if "loss/policy" in metrics:
            times.append((time.process_time(), time.perf_counter()))
        log(run, metrics)

    ppo.Run.log = watched
    with tempfile.TemporaryDirectory() as folder:
        ppo.train(ppo.parse_args([*map(str, words), "--device", "cpu", "--run-dir", f"{folder}/run"]))
    processor, clock = np.diff(times, axis=0).T
    return float(np.median(processor)), float(np.quantile(clock, 0.1))


def write(path: Path, columns: list[str], rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# -------------------------------------------------------------------------------------------------- learning
def curves(seeds: int) -> None:
    """CartPole with 8 environments, in one process and in two."""
    path = RESULTS / "processes.csv"
    columns = ["env_id", "processes", "seed", "step", "eval_return_mean", *about()]
    rows = rows_of(path)
    done = {(int(row["processes"]), int(row["seed"])) for row in rows}
    for seed in range(1, seeds + 1):
        for processes in (1, 2):
            if (processes, seed) in done:
                continue
            words = ["--env-id", "CartPole-v1", "--seed", seed, "--eval-every", 5000, "--num-envs", 8]
            log = train(processes, words)
            rows += [
                dict(env_id="CartPole-v1", processes=processes, seed=seed, step=row["step"],
                     eval_return_mean=row["eval/return_mean"]) | about()
                for row in log if "eval/return_mean" in row
            ]  # fmt: skip
            write(path, columns, rows)
            print(f"{processes} processes, seed {seed}: {rows[-1]['eval_return_mean']}", flush=True)
    draw(rows_of(path), ROOT / "docs" / "img" / "processes.png")


def draw(rows: list[dict], out: Path) -> None:
    """Mean over the seeds, with 95% intervals of a bootstrap over them."""
    series = {}
    for row in rows:
        steps, values = series.setdefault(int(row["processes"]), {}).setdefault(row["seed"], ([], []))
        steps.append(float(row["step"]))
        values.append(float(row["eval_return_mean"]))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.5, 3.6))
        for (processes, seeds), colour in zip(sorted(series.items()), COLOURS, strict=False):
            steps, values = on_one_grid([tuple(map(np.array, seed)) for seed in seeds.values()])
            middle, low, high = stratified_bootstrap([values], mean)
            name = f"{processes} process{'es' * (processes > 1)} × {8 // processes} environments"
            axes.plot(steps, middle, color=colour, label=f"{name}, {len(seeds)} seeds")
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel="environment steps", ylabel="evaluation return", title="CartPole-v1")
        axes.legend(loc="lower right")
        figure.savefig(out)


# ----------------------------------------------------------------------------------------------------- speed
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
    args = [(rank, 29513, sizes, 200, queue) for rank in (0, 1)]
    processes = [context.Process(target=exchange, args=each) for each in args]
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
    """Seconds of a rollout and its updates with k processes."""
    reduce = 2 * (k - 1) * (alpha + task["gradients"] / (k * beta))
    gather = lambda size: (k - 1) * (alpha + size / beta) if size else 0.0
    once = 2 * gather(task["rewards"] / 2) + gather(task["observations"]) + gather(task["check"])
    return one + task["updates"] * (reduce + gather(task["advantages"])) + once


def loopback() -> int:
    """Bytes that went over the loopback device of this host."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split(":")[1].split()[8])


COUNT = """
import subprocess, sys
from pathlib import Path
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
code = subprocess.run(sys.argv[1:], stdout=2).returncode
line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
print(line.split(":")[1].split()[8])  # bytes that were sent
sys.exit(code)
"""


def sent(env_id: str, task: dict, rollouts: int) -> float:
    """Bytes that two processes send in a rollout and its updates, headers of TCP included.

    Counted on the loopback of a network namespace of their own: what a longer run sends more than a shorter.
    """
    totals = []
    for count in (1, 1 + rollouts):
        with tempfile.TemporaryDirectory() as folder:
            words = command(2, words_for(env_id, task, 2, count), folder)
            words = ["unshare", "-rn", sys.executable, "-c", COUNT, *words]
            done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        totals.append(int(done.stdout.split()[-1]))
    return (totals[1] - totals[0]) / rollouts


def words_for(env_id: str, task: dict, processes: int, rollouts: int) -> list:
    steps = processes * task["steps"] * rollouts
    words = ["--env-id", env_id, "--num-envs", processes * task["num_envs"], "--total-timesteps", steps]
    return [*words, *"--torch-threads 1 --eval-every 0 --eval-episodes 1 --checkpoint-every 1000000".split()]


def speed(tasks: list[str]) -> None:
    """Measures all of TASKS that are asked for, and predicts."""
    alpha, beta = alpha_and_beta()
    print(f"alpha {alpha * 1e6:.0f} us, beta {beta / 1e6:.0f} MB/s", flush=True)
    path = RESULTS / "processes_speed.csv"
    rows = [row for row in rows_of(path) if row["env_id"] not in tasks]
    for env_id in tasks:
        task, rollouts = messages(env_id), TASKS[env_id]
        one, clock = alone(words_for(env_id, task, 1, 1 + rollouts))
        rows_here = [
            dict(kind="measured", processes=1, seconds_per_rollout=clock, processor_seconds=round(one, 4))
        ]
        if env_id not in ALONE:
            log = train(2, words_for(env_id, task, 2, 1 + rollouts))
            ends = [row["seconds"] for row in log if "loss/policy" in row]
            row = dict(
                kind="measured", processes=2, seconds_per_rollout=float(np.quantile(np.diff(ends), 0.1))
            )
            bytes_ = sent(env_id, task, 2)
            row |= dict(bytes_per_rollout=round(bytes_), bytes_per_update=round(bytes_ / task["updates"]))
            rows_here.append(row)
        for row in rows_here:
            row["load"] = round(os.getloadavg()[0], 1)
        for k in (1, 2, 8, 64, 1024):
            time_of = predicted(one, task, k, alpha, beta)
            rows_here.append(dict(kind="predicted", processes=k, seconds_per_rollout=time_of))
        for row in rows_here:
            k, time_of = row["processes"], row["seconds_per_rollout"]
            row |= dict(env_id=env_id, num_envs=k * task["num_envs"], updates_per_rollout=task["updates"])
            row |= dict(steps_per_second=round(k * task["steps"] / time_of))
            row |= dict(seconds_per_rollout=round(time_of, 4), alpha_us=round(1e6 * alpha, 1))
            rows.append(row | dict(beta_mb=round(beta / 1e6)) | about())
            print(row, flush=True)
        half = next(k for k in range(2, 10**6) if predicted(one, task, k, alpha, beta) > 2 * one)
        print(f"{env_id}: half of the time is messages from {half} processes on; {task}", flush=True)
        write(path, COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["curves", "speed"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = parser.parse_args()
    curves(args.seeds) if args.what == "curves" else speed(args.tasks)


if __name__ == "__main__":
    main()
