"""Measures everything that needs a GPU, in one command of a few minutes that never uses the network.

    python benchmark/gpu.py --out runs/gpu --minutes 8
    python benchmark/gpu.py --out runs/gpu2 --minutes 8 --resume runs/gpu

 1. Runs tests/test_cuda.py.
 2. Measures environment steps per second on the GPU, there with a CUDA graph, and on the CPU, and profiles
    what the GPU does meanwhile.
 3. Trains six variants of DQN on Pong side by side until the minutes are over.

Each result is appended to results.jsonl as soon as it is known; tables are printed last. With --resume, tests
run again unless all passed, only missing speeds are measured, and trainings continue. Ctrl-C and SIGTERM end
everything early, as if the minutes were over.

Each training leaves an archive of a few megabytes: logs and weights, without the replay memory and Adam's
moments. A continued training is therefore a new run from these weights. It keeps its place in the schedules
but first refills the memory with 10,000 random steps.
"""

import argparse
import bisect
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import psutil
import torch
from run import ROOT, commit, cpu_name, load_script
from suites import SUITES
from torch.profiler import profile, record_function


class Task(NamedTuple):
    algo: str  # algos/{algo}.py
    words: str  # its arguments
    lean_rl: int | None = None  # frames per second that LeanRL reports for an H100


PONG = "--env-id ALE/Pong-v5 --num-envs 8 --num-steps 128"
CHEETAH = "--env-id HalfCheetah-v5 --learning-starts 200"
TASKS = {  # the most important first, in case the time runs out
    "ppo Pong": Task("ppo", f"{PONG} --update-epochs 4 --num-minibatches 4", 6809),
    "sac HalfCheetah": Task("sac", CHEETAH, 725),
    "td3 HalfCheetah": Task("ddpg_td3", CHEETAH, 936),
    "ppo HalfCheetah": Task("ppo", "--env-id HalfCheetah-v5 --num-envs 1 --num-steps 2048", 1774),
    "dqn Pong": Task("dqn", "--env-id ALE/Pong-v5 --learning-starts 200 --buffer-size 100000"),
    "pqn Pong": Task("pqn", f"{PONG} --update-epochs 4 --num-minibatches 4"),
    "a2c Pong": Task("a2c", PONG),
    "tqc HalfCheetah": Task("tqc", CHEETAH),
    "crossq HalfCheetah": Task("crossq", CHEETAH),
}
SIDES = {"GPU": "--device cuda", "GPU, graph": "--device cuda --cuda-graph", "CPU": "--device cpu"}
TRAININGS = {  # cells of the suites by variant: 1_step, 4_step, 4_step_double, ...
    cell.variant: cell
    for cell in SUITES["dqn_pong"] + SUITES["dqn_pong_variants"]
    if not cell.variant.endswith("sticky")
}
LOGS = "args.json", "environment.json", "progress.jsonl"  # of a run; they return in the archive
REFILL = 10_000  # random steps before a continued training learns again
# Further arguments with --pretend: of tasks that collect rollouts, of those that replay, and of trainings
TINY_ROLLOUTS = "--hidden-sizes 16 --torch-threads 1 --num-envs 2 --num-steps 16"
TINY_REPLAY = "--hidden-sizes 16 --torch-threads 1 --learning-starts 40 --batch-size 8"
TINY_TRAINING = f"{TINY_REPLAY} --buffer-size 400 --log-every 20 --eval-episodes 1 --eval-max-steps 20"
SECONDS = 3.0  # of a measurement, after half of that to warm up
SHARES = "acting", "updating", "copying", "idle", "environments", "waiting"
GPU, HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")  # kinds of traced events
STOP = threading.Event()  # set by Ctrl-C and SIGTERM


# --------------------------------------------------------------------------------------------------- results
def add(out: Path, kind: str, **result) -> None:
    """Appends a result. The row "call" before it has the machine and the commit."""
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, **result}) + "\n")
    print(kind, *(f"{name}: {value}" for name, value in result.items()), sep="\n    ", flush=True)


def results(out: Path, kind: str, *key: str) -> dict[tuple, dict]:
    """The newest result of this kind for each value of the fields in key."""
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {tuple(row[name] for name in key): row for row in rows if row["kind"] == kind}


def table(title: str, head: tuple, rows: list[tuple]) -> str:
    """Aligned columns, as text."""
    show = lambda x: f"{x:,.1f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x or "")
    text = [[show(x) for x in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return "\n".join([f"\n{title}", *(" | ".join(map(str.ljust, row, widths)).rstrip() for row in text)])


def print_summary(out: Path) -> None:
    """Prints everything that is known as tables."""
    tests = [(row["passed"], row["skipped"], row["failed"]) for row in results(out, "tests").values()]
    speeds, profiles = results(out, "speed", "task", "side"), results(out, "profile", "task", "side")
    speed = lambda *key: speeds[key]["steps_per_second"] if key in speeds else None
    tasks = [(name, *(speed(name, side) for side in SIDES), task.lean_rl) for name, task in TASKS.items()]
    shares = [(*key, *(f"{row['shares'][name]:.0%}" for name in SHARES)) for key, row in profiles.items()]
    trained = "name", "steps", "steps_per_second", "episode_return", "evaluation"
    trainings = [tuple(map(row.get, trained)) for row in results(out, "training", "name").values()]
    print(table("tests/test_cuda.py", ("passed", "skipped", "failed"), tests))
    print(table("environment steps per second", ("task", *SIDES, "LeanRL on an H100"), tasks))
    print(table("share of the time", ("task", "side", *SHARES), shares))
    print(table("DQN on Pong", trained, trainings))


# ------------------------------------------------------------------------------------------------- processes
def start(request: dict, **options) -> subprocess.Popen:
    """Starts a child of this program that does what the request says."""
    words = [sys.executable, __file__, "--request", json.dumps(request)]
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **options)


def over(until: float) -> bool:
    return STOP.is_set() or time.monotonic() > until


def finish(processes: list[subprocess.Popen], until: float, grace: float) -> None:
    """Waits for all processes. Once time is over, the rest get SIGINT: trainings save and pytest reports.
    Whatever still runs after the grace period is killed."""
    running = lambda: [process for process in processes if process.poll() is None]
    while running() and not over(until):
        time.sleep(0.1)
    for process in running():
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + grace
    while running() and time.monotonic() < end:
        time.sleep(0.1)
    for process in running():
        os.killpg(process.pid, signal.SIGKILL)  # with its own children
        process.wait()


@contextlib.contextmanager
def loaded(algo: str, pretend: bool):
    """The script as a module; if pretend, on the pretended GPU of tests/as_if_cuda.py."""
    if not pretend:
        yield load_script(algo)
        return
    sys.path.append(str(ROOT / "tests"))
    import as_if_cuda

    path = ROOT / f"algos/{algo}.py"
    with as_if_cuda.as_if_cuda(path):
        yield as_if_cuda.load(path)


def answer(out: str, pretend: bool, algo: str, words: list[str], task: str = "", sides: tuple = ()) -> None:
    """The work of a child: a training, or the speed of a task on these sides."""
    device = lambda words: ["vgpu" if pretend and word == "cuda" else word for word in words]
    if not task:
        with loaded(algo, pretend) as script:
            script.train(script.parse_args(device(words)))
    for side in sides:
        report = lambda kind, side=side, **found: add(Path(out), kind, task=task, side=side, **found)
        with tempfile.TemporaryDirectory() as folder, loaded(algo, pretend and side != "CPU") as script:
            args = script.parse_args(device([*words, *SIDES[side].split(), "--run-dir", f"{folder}/run"]))
            try:
                measure(script, args, 0.2 if pretend else SECONDS, report)
            except Exception:  # the other sides can still be measured
                traceback.print_exc()


# ------------------------------------------------------------------------------------------------- measuring
class Measured(Exception):
    """Ends a training that has been measured."""


def measure(script, args, seconds: float, report) -> None:
    """Trains until the speed is known and, on a GPU, a profile too."""
    act, make_envs, span = script.Agent.act, script.make_envs, contextlib.nullcontext
    rollout = vars(args).get("num_steps", 1)

    def phases():
        """Goes on after each call of act, when the action is on the host and so the GPU has done its work."""
        nonlocal span
        yield from range(2 * rollout)  # the first updates, and the capture of a graph
        start = time.perf_counter()
        while time.perf_counter() - start < seconds / 2:
            yield from range(rollout)
        start, steps = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            yield from range(rollout)
            steps += rollout * args.num_envs
        report("speed", steps_per_second=round(steps / passed, 1))
        if args.device != "cpu":
            with profile() as profiler:
                span, start = record_function, time.perf_counter()
                yield from range(max(rollout, 32))
                passed = time.perf_counter() - start
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # a file, for profiler.events() takes ten times as long
                profiler.export_chrome_trace(path := f"{folder}/trace.json")
                trace = json.loads(Path(path).read_text())["traceEvents"]
            report("profile", shares=shares(trace, passed), longest=longest(trace, passed))
        raise Measured

    def named(name, function):
        def call(*args, **kwargs):
            with span(name):
                return function(*args, **kwargs)

        return call

    def watched_act(*args, **kwargs):
        action = named("act", act)(*args, **kwargs)
        next(phase)
        return action

    def watched_envs(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        envs.step = named("environments", envs.step)
        return envs

    phase, script.Agent.act, script.make_envs = phases(), watched_act, watched_envs
    with contextlib.suppress(Measured):
        script.train(args)


def of(trace: list[dict], *kinds: str) -> list[dict]:
    return [event for event in trace if event.get("cat") in kinds]


def shares(trace: list[dict], seconds: float) -> dict[str, float]:
    """Shares of the time: of the GPU up to "idle", then of the host in environments and waiting for the GPU.

    The GPU acts where the host launched something within Agent.act; all else but copies is updating.
    """
    times = dict.fromkeys(SHARES, 0.0)
    spans = sorted((x["ts"], x["ts"] + x["dur"]) for x in of(trace, "user_annotation") if x["name"] == "act")
    launches, acting = of(trace, *HOST), set()
    for x in launches:
        i = bisect.bisect(spans, (x["ts"], math.inf)) - 1
        if i >= 0 and x["ts"] < spans[i][1]:
            acting.add(x["args"].get("correlation"))
    for x in of(trace, *GPU):
        acts = x["args"].get("correlation") in acting
        times["copying" if x["cat"] == "gpu_memcpy" else "acting" if acts else "updating"] += x["dur"]
    times["idle"] = 1e6 * seconds - sum(times.values())
    times["environments"] = sum(x["dur"] for x in of(trace, "user_annotation") if x["name"] == "environments")
    times["waiting"] = sum(x["dur"] for x in launches if "Synchronize" in x["name"])
    return {name: round(x / 1e6 / seconds, 3) for name, x in times.items()}


def longest(trace: list[dict], seconds: float) -> list[tuple[str, int, float]]:
    """What took most of the time on the GPU, and in CUDA on the host: name, calls, share of the time."""
    times, calls = Counter(), Counter()
    for x in of(trace, *GPU, *HOST):
        times[x["name"][:60]] += x["dur"]
        calls[x["name"][:60]] += 1
    return [(name, calls[name], round(x / 1e6 / seconds, 3)) for name, x in times.most_common(12)]


# ------------------------------------------------------------------------------------------------ the stages
def run_tests(out: Path, until: float, grace: float) -> None:
    """Runs tests/test_cuda.py, unless it has passed before."""
    if any(row["exit_code"] == 0 for row in results(out, "tests").values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        report, workers = Path(folder, "report.xml"), min(8, os.cpu_count())
        words = (
            f"pytest tests/test_cuda.py -v --tb=short -p no:cacheprovider -n {workers} --junitxml {report}"
        )
        pytest = [sys.executable, "-m", *words.split()]
        process = subprocess.Popen(pytest, cwd=ROOT, start_new_session=True)
        finish([process], until, grace)
        cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
    having = lambda *tags: [case.get("name") for case in cases if any(part.tag in tags for part in case)]
    failed, skipped = having("failure", "error"), len(having("skipped"))
    passed = len(cases) - len(failed) - skipped
    add(out, "tests", exit_code=process.returncode, passed=passed, skipped=skipped, failed=failed)


def run_speeds(out: Path, until: float, grace: float, tasks: list[str], pretend: bool) -> None:
    """Measures the sides of each task that are missing, one task after the other."""
    for name in tasks:
        known = results(out, "speed", "task", "side")
        words = f"{TASKS[name].words} --eval-every 0 --checkpoint-every 0"
        if pretend:
            words += f" {TINY_ROLLOUTS if '--num-steps' in words else TINY_REPLAY}"
        request = dict(out=str(out), pretend=pretend, algo=TASKS[name].algo, words=words.split(), task=name)
        sides = [side for side in SIDES if (name, side) not in known]
        if sides and not over(until):
            finish([start(request | dict(sides=sides))], until, grace)


def continued(weights: Path) -> list[str]:
    """Arguments for the remaining steps of a training, where its schedules go on."""
    state = torch.load(weights, weights_only=True)
    args, steps = state["args"], state["run"]["env_steps"]
    share, beta = steps / args["total_timesteps"], args["per_beta_start"]
    words = {
        "init-from": weights, "total-timesteps": args["total_timesteps"] - steps, "learning-starts": REFILL,
        "learning-rate": args["learning_rate"] * (1 - share), "epsilon-start": args["epsilon_end"],
        "per-beta-start": beta + share * (1 - beta),
    }  # fmt: skip
    return [word for name, x in words.items() for word in (f"--{name}", str(x))]


def run_trainings(out: Path, until: float, grace: float, names: list[str], pretend: bool) -> None:
    """Trains or continues all of these at once, each in a new run folder."""
    runs, processes = out / "runs/ALE/Pong-v5", {}
    runs.mkdir(parents=True, exist_ok=True)
    for archive in out.glob("*.tar.gz"):
        with tarfile.open(archive) as file:
            file.extractall(runs, filter="data")
    done = results(out, "training", "name")
    for name in names:
        cell, weights = TRAININGS[name], sorted(runs.glob(f"{name}-*/weights.pt"))
        if over(until) or (name,) in done and done[name,]["steps"] >= cell.steps:
            continue
        run = runs / f"{name}-{len([*runs.glob(f'{name}-*/args.json')]) + 1:02}"
        words = ["--env-id", cell.env_id, "--total-timesteps", str(cell.steps), *cell.args]
        words += continued(weights[-1]) if weights else []
        words += [*SIDES["GPU, graph"].split(), "--torch-threads", "1", "--run-dir", str(run)]
        words += TINY_TRAINING.split() if pretend else []
        with run.with_suffix(".log").open("w") as log:
            request = dict(out=str(out), pretend=pretend, algo=cell.algo, words=words)
            processes[name, run] = start(request, stdout=log, stderr=log)
    finish([*processes.values()], until, grace)
    for name, run in processes:
        if (run / "checkpoint.pt").exists():
            pack(out, name, run)
        else:
            print(f"{name} left no checkpoint:\n{run.with_suffix('.log').read_text()}")


def pack(out: Path, name: str, run: Path) -> None:
    """Adds the result of a training and packs the logs of all its runs with the weights of the last."""
    state = torch.load(run / "checkpoint.pt", weights_only=True, mmap=True)
    torch.save({part: state[part] for part in ("args", "run", "agent")}, run / "weights.pt")
    logs = sorted(run.parent.glob(f"{name}-*/progress.jsonl"))
    with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
        for path in (run / "weights.pt", *(path.with_name(x) for path in logs for x in LOGS)):
            archive.add(path, path.relative_to(run.parent))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in logs]
    latest = lambda name: next((row[name] for row in reversed(sum(rows, [])) if name in row), None)
    add(
        out, "training", name=name, steps=sum(part[-1]["step"] for part in rows if part),
        steps_per_second=latest("speed/steps_per_second"), episode_return=latest("train/episode_return"),
        evaluation=latest("eval/return_mean"),
    )  # fmt: skip


def main() -> None:
    begin = time.monotonic() - (time.time() - psutil.Process().create_time())  # before the imports
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results; default: that of --resume")
    parser.add_argument("--minutes", type=float, default=8, help="time for everything, at most")
    parser.add_argument("--resume", type=Path, help="folder of an earlier call to continue from")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="what to time")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=[*TRAININGS], help="variants")
    parser.add_argument("--pretend", action="store_true", help="rehearse, tiny, on a pretended GPU")
    parser.add_argument("--request", type=json.loads, help=argparse.SUPPRESS)  # in a child
    args = parser.parse_args()
    if args.request:
        answer(**args.request)
        return
    out = args.out or args.resume
    if not args.pretend and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --pretend rehearses without one")
    if args.resume and not (args.resume / "results.jsonl").exists():
        parser.error(f"--resume {args.resume}: there is no results.jsonl")
    if not out or not args.resume and (out / "results.jsonl").exists():
        parser.error("give a new folder as --out, or the folder of an earlier call as --resume")
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    if args.resume and args.resume.resolve() != out:
        for path in (args.resume / "results.jsonl", *args.resume.glob("*.tar.gz")):
            shutil.copy(path, out)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOP.set())
    add(
        out, "call", gpu="pretended" if args.pretend else torch.cuda.get_device_name(), cpu=cpu_name(),
        cores=os.cpu_count(), torch=torch.__version__, cuda=torch.version.cuda, commit=commit(),
    )  # fmt: skip
    seconds = 60 * args.minutes
    grace = min(15, seconds / 20)
    stages = {  # by the share of the time at which each must be over
        0.3: lambda until: run_tests(out, until, grace),
        0.8: lambda until: run_speeds(out, until, grace, args.tasks, args.pretend),
        1 - 2 * grace / seconds: lambda until: run_trainings(out, until, grace, args.trainings, args.pretend),
    }
    for share, stage in stages.items():
        try:
            stage(begin + share * seconds)
        except Exception:  # the next stages can still run
            traceback.print_exc()
    print_summary(out)


if __name__ == "__main__":
    main()
