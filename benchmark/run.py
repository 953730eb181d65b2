"""Trains a suite or any script, each seed in its own process. Writes runs.csv and evaluations.csv.

    python benchmark/run.py --suite ppo --jobs 2
    python benchmark/run.py --suite ppo --engine ray --address 10.0.0.1:6379
    python benchmark/run.py --script my.py --env-id CartPole-v1 --seeds 3
    python benchmark/run.py --script my.py --env-id CartPole-v1 --variant slow --args="--learning-rate 1e-4"

What is done is skipped and what was cut short goes on, so the command may be killed and given again at any
time. Columns, files and traps: benchmark/README.md.
"""

import argparse
import contextlib
import csv
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from suites import SUITES, Cell

try:
    import fcntl
except ImportError:  # Windows: start this program once at a time
    fcntl = None

ROOT = Path(__file__).resolve().parents[1]
RUNS = """
    algo env_id total_timesteps seed final_episodes final_return_mean final_return_std final_return_min
    final_return_max steps_per_second eval_episodes python torch gymnasium numpy device cpu cores git_commit
    command final_returns
""".split()
EVALUATIONS = """
    algo env_id total_timesteps seed step return_mean return_std return_min return_max wall_time
    steps_per_second
""".split()
STOP = threading.Event()  # all that train save and stop, all that wait never start
ON_NODE = "PLAINRL_COMMIT" in os.environ  # on a machine of a cluster, for a run.py elsewhere


class Failed(Exception):
    """One seed could not be trained or evaluated; the others go on."""


def load_script(name: str, path: Path | None = None):
    """The script as a module; without path, algos/{name}.py."""
    spec = importlib.util.spec_from_file_location(name, path or ROOT / "algos" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits(number: float) -> str:
    return f"{number:.6g}"


def slug(env_id: str) -> str:
    return re.sub("[/:]", "-", env_id)


def short(steps: float, _=None) -> str:
    """100k for 100,000; with the arguments of a formatter of matplotlib."""
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k" if steps >= 1e3 else f"{steps:g}"


def shown(path: Path) -> str:
    """The path as one would type it in the project's folder."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def commit(path: str = "algos") -> str:
    """The commit that is checked out, with "+changes" if the path differs from it; empty without git."""
    if ON_NODE:  # it has the files, without their history
        return os.environ["PLAINRL_COMMIT"]
    if not shutil.which("git"):
        return ""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    return git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain", path) else "")


# --------------------------------------------------------------------------------------------------- one seed
@contextlib.contextmanager
def exclusive(path: Path):
    """Waits until no other process holds this lock: of a seed, whose training may outlive a killed run.py, or
    of tables, which several run.py may write. Yields the lock, which children inherit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for attempt in itertools.count() if fcntl else ():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == 5:  # after a second
                print(f"{shown(path)}: another process is still at work; waiting for it", flush=True)
            if STOP.wait(0.2):
                raise Failed("stopped")
        yield file


def call(words: list[str], log: Path, lock, watch) -> str:
    """Runs python with these words from the project's folder. Returns and logs what it printed.
    Ends it by SIGTERM, which saves and stops a training, once watch() or STOP says so."""
    if STOP.is_set():
        raise Failed("stopped")
    with log.open("a+") as file:
        start = file.seek(0, os.SEEK_END)
        pipes = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if fcntl:
            pipes["pass_fds"] = [lock.fileno()]
        # on Linux a machine's trainings end with the worker of Ray that started them, if that is killed
        guard = ["setpriv", "--pdeathsig", "KILL"] if ON_NODE and shutil.which("setpriv") else []
        child, asked = subprocess.Popen([*guard, sys.executable, *words], cwd=ROOT, **pipes), False
        try:
            while child.poll() is None:
                if not asked and (watch() or STOP.is_set()):
                    child.terminate()
                    asked = True  # a second signal would end it at once
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
        except BaseException:
            child.terminate()
            raise
        file.seek(start)
        text = file.read()
    if code := child.returncode:
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        raise Failed(f"exit code {code}: {last[0]} (all of it: {shown(log)})")
    return text


def name_of(cell: Cell, seed: int) -> str:
    """The run folder within the folder of all runs."""
    return f"{cell.name}__{slug(cell.env_id)}__{cell.steps}/{seed}"


def run_seed(cell: Cell, seed: int, runs: Path, final_episodes: int, watch=bool, work=None) -> tuple:
    """Trains one seed, or goes on with it, plays the final evaluation, and returns its `tidy_rows`.

    Beside the run folder NAME lie NAME.log with all output and NAME.json with what is done already. It stops
    once watch() is true. On a machine that does not have the folder of all runs, work stands for it.
    """
    folder = (work or runs) / name_of(cell, seed)
    record_file, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    command = [cell.script or f"algos/{cell.algo}.py", "--env-id", cell.env_id, "--seed", str(seed)]
    home = shown(runs / name_of(cell, seed))
    command += ["--total-timesteps", str(cell.steps), *cell.args, "--run-dir", home]
    with exclusive(folder.with_suffix(".lock")) as lock:
        fresh = {"command": command, "commits": [], "trained": False, "final": {}}
        record = json.loads(record_file.read_text()) if record_file.exists() else fresh
        if record["command"] != command:
            raise Failed(f"{shown(folder)} is of another command: move it away to run {shlex.join(command)}")

        def keep(**values) -> None:
            part = record_file.with_suffix(".part")
            part.write_text(json.dumps(record | values, indent=2))
            part.replace(record_file)
            record.update(values)

        if not record["trained"]:
            if record["commits"][-1:] != [now := commit(command[0])]:  # a script needs no other file
                keep(commits=[*record["commits"], now], cpu=cpu_name(), cores=os.cpu_count())
            if (folder / "checkpoint.pt").exists():
                call([command[0], "--resume", shown(folder)], log, lock, watch)
            else:  # killed before its first checkpoint, if it ever started
                shutil.rmtree(folder, ignore_errors=True)
                call([*command[:-1], shown(folder)], log, lock, watch)
            keep(trained=True)
        if record["final"].get("final_episodes") != final_episodes:
            play = [command[0], "--evaluate", shown(folder), "--eval-episodes", str(final_episodes)]
            keep(final=final_score(call(play, log, lock, watch), log))
        return tidy_rows(cell, seed, folder, record)


def final_score(text: str, log: Path) -> dict:
    """What --evaluate prints last, a line of JSON, by column."""
    try:
        score = json.loads(text.strip().splitlines()[-1])
        names = ("mean", "std", "min", "max")
        returns = {f"final_return_{name}": digits(score[f"eval/return_{name}"]) for name in names}
        returns["final_returns"] = " ".join(map(digits, score["returns"]))
        return returns | {"final_episodes": score["episodes"]}
    except (IndexError, KeyError, ValueError):
        raise Failed(f"its --evaluate printed no line of JSON with its returns ({shown(log)})") from None


def tidy_rows(cell: Cell, seed: int, folder: Path, record: dict) -> tuple[dict, list[dict]]:
    """The run's row of runs.csv, and those of evaluations.csv."""
    environment = json.loads((folder / "environment.json").read_text())[-1]
    same = dict(algo=cell.name, env_id=cell.env_id, total_timesteps=cell.steps, seed=seed)
    log = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    middle = lambda speeds: digits(statistics.median(speeds)) if speeds else ""
    evaluations, speeds, new_speeds = [], [], []
    for before, line in zip([log[0], *log], log, strict=False):
        if "eval/return_mean" in line:
            scores = {f"return_{x}": digits(line[f"eval/return_{x}"]) for x in ("mean", "std", "min", "max")}
            times = dict(wall_time=digits(line["seconds"]), steps_per_second=middle(new_speeds))
            evaluations.append(same | {"step": line["step"]} | scores | times)
            new_speeds = []
        elif line["step"] > before["step"]:  # without the time of an evaluation
            new_speeds.append((line["step"] - before["step"]) / (line["seconds"] - before["seconds"]))
            speeds.append(new_speeds[-1])
    run = same | record["final"] | {"steps_per_second": middle(speeds)}
    run |= {name: environment[name] for name in ("torch", "gymnasium", "numpy", "device")}
    run |= dict(python=environment["python"].split()[0], cpu=record["cpu"], cores=record["cores"])
    run |= dict(git_commit=" ".join(record["commits"]), command=shlex.join(["python", *record["command"]]))
    run["eval_episodes"] = json.loads((folder / "args.json").read_text())["eval_episodes"]
    return run, evaluations


def attempt(job: tuple, watch=bool, work: Path | None = None) -> tuple | str:
    """The `tidy_rows` of one seed, or why there are none; the others go on."""
    try:
        return run_seed(*job, watch, work)
    except Failed as error:
        return str(error)
    except (OSError, LookupError, ValueError) as error:
        return f"its files are gone or damaged ({error}): move what is left of it and its .json away"


# -------------------------------------------------------------------------------------------------- all seeds
def run_all(jobs: list[tuple], one, workers: int):
    """Yields (job, its rows or why it failed), as they come from one(job), for so many at a time."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(one, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # Ctrl-C, SIGTERM: the trainings save and stop, the waiting ones never start
            STOP.set()
            pool.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------------- many machines
class Home:
    """An actor of Ray on the machine of this program, which has the run folders: what a run needs is taken
    from here to another machine, and what it writes comes back here at each evaluation and checkpoint."""

    def __init__(self, runs: Path):
        self.runs, self.takers, self.stopped = runs, {}, set()

    def load(self, name: str, taker: str) -> dict[str, bytes]:
        """What a run goes on from; nothing without a checkpoint, and then nothing of it stays here either."""
        self.takers[name] = taker
        folder = self.runs / name
        if not (folder / "checkpoint.pt").exists():
            shutil.rmtree(folder, ignore_errors=True)
        beside = [folder.with_suffix(".json"), folder.with_suffix(".log")]
        paths = beside + [path for path in folder.glob("*") if "tfevents" not in path.name]
        return {path.relative_to(self.runs).as_posix(): path.read_bytes() for path in paths if path.is_file()}

    def keep(self, name: str, taker: str, files: dict[str, bytes]) -> bool:
        """Writes what is new of a run. Returns whether it is to stop, as one given up for dead has to."""
        if self.takers[name] == taker:
            write_files(self.runs, files)
        return self.takers[name] != taker or name in self.stopped

    def stop(self, name: str, yes: bool) -> None:
        self.stopped = self.stopped | {name} if yes else self.stopped - {name}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Each whole or not at all, in reverse order: the checkpoint last but one, the record of the run last."""
    for name, data in reversed(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(data)
        part.replace(path)


def new_files(work: Path, name: str, seen: dict[Path, int], logs=False) -> dict[str, bytes]:
    """What changed of a run since the last call, if that is more than logs, or logs will do. The record of
    the run is read first and the checkpoint next, so that no log is older than they are."""
    folder = work / name
    first = [folder.with_suffix(".json"), folder / "checkpoint.pt", folder.with_suffix(".log")]
    paths = [path for path in dict.fromkeys([*first, *folder.rglob("*")]) if path.suffix != ".part"]
    stamps = {path: path.stat().st_mtime_ns for path in paths if path.is_file()}
    changed = [path for path in stamps if stamps[path] != seen.get(path)]
    if not logs and not any(path.suffix in (".json", ".pt") for path in changed):
        return {}
    seen |= stamps
    return {path.relative_to(work).as_posix(): path.read_bytes() for path in changed}


def run_on_node(home, job: tuple) -> str:
    """One seed on a machine of the cluster, from what came home of it. Returns why it failed, or nothing."""
    import ray

    name, seen = name_of(*job[:2]), {}
    with tempfile.TemporaryDirectory() as folder:
        work, taker = Path(folder), f"{platform.node()}{folder}"
        write_files(work, ray.get(home.load.remote(name, taker)))
        new_files(work, name, seen, logs=True)

        def send(logs=False) -> bool:
            return ray.get(home.keep.remote(name, taker, new_files(work, name, seen, logs)))

        rows = "stopped" if send() else attempt(job, send, work)
        send(logs=True)
    return rows.replace(folder, str(job[2])) if isinstance(rows, str) else ""


def on_ray(runs: Path, workers: int, address: str | None, gpus: float):
    """What `attempt` does, done on the Ray cluster at this address, or on this machine. Ray decides where
    and when, sends the project's files there, and starts a run again that lost its machine."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    paths = os.pathsep.join(filter(None, ["benchmark", os.environ.get("PYTHONPATH", "")]))
    env_vars = {"PYTHONPATH": paths, "PLAINRL_COMMIT": commit()}
    excludes = [".git", ".venv", "/docs", "/runs", "/benchmark/runs"]
    files = dict(working_dir=str(ROOT), excludes=excludes, env_vars=env_vars)
    where = dict(address="local", num_cpus=workers, include_dashboard=False)
    handler = signal.getsignal(signal.SIGTERM)  # Ray puts in its own
    ray.init(**(dict(address=address) if address else where), runtime_env=files, logging_level="ERROR")
    signal.signal(signal.SIGTERM, handler)
    on_this_machine = On(ray.get_runtime_context().get_node_id(), soft=False)
    home = ray.remote(num_cpus=0, scheduling_strategy=on_this_machine)(Home).remote(runs)
    # There this file is the module run. A task whose main thread waits for an answer gives its CPU away.
    in_a_thread = lambda *words: ThreadPoolExecutor(1).submit(*words).result()
    there = lambda *words: in_a_thread(importlib.import_module("run").run_on_node, *words)
    remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=-1)(there)

    def one(job: tuple, watch=bool) -> tuple | str:
        home.stop.remote(name_of(*job[:2]), False)
        future = remote.remote(home, (*job[:2], Path(shown(runs)), *job[3:]))
        while not ray.wait([future], timeout=0.5)[0]:
            if watch() or STOP.is_set():
                home.stop.remote(name_of(*job[:2]), True)
        try:
            return ray.get(future) or attempt(job)  # all of it came home: attempt only reads it
        except ray.exceptions.RayError as error:
            return f"Ray gave it up: {error}"

    return one


def rows_of(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, columns: list[str], rows: Iterable) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def replace_rows(path: Path, columns: list[str], rows: list[dict], same, order) -> None:
    """Puts rows into a CSV in place of those of the same kind, same(row), and sorts all by order(row)."""
    new = {same(row) for row in rows}
    old = [row for row in rows_of(path) if same(row) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(old + rows, key=order))
    part.replace(path)


def write_rows(run: dict, evaluations: list[dict], results: Path) -> None:
    """Puts one run into the tables in place of its old rows. Other runs stay, also if several run.py write.
    Evaluations come first: a run that runs.csv lists has them, even after a kill."""
    same = lambda row: (row["algo"], row["env_id"], int(row["total_timesteps"]), int(row["seed"]))
    by_step = lambda row: (*same(row), int(row["step"]))
    with exclusive(results / "tables.lock"):
        replace_rows(results / "evaluations.csv", EVALUATIONS, evaluations, same, by_step)
        replace_rows(results / "runs.csv", RUNS, [run], same, same)


def read_cells(results: Path, patterns: list[str], skip_steps: int | None = None) -> tuple[list, list]:
    """Rows of runs.csv and of evaluations.csv, in the order of the patterns that they match. Patterns are of
    ALGO/ENV_ID: ppo/CartPole-v1, dqn-*/LunarLander-v3. Runs of skip_steps steps are left out."""
    runs, evaluations = (rows_of(results / f"{name}.csv") for name in ("runs", "evaluations"))
    cell = lambda row: f"{row['algo']}/{row['env_id']}"
    cells = dict.fromkeys(map(cell, runs))
    found = {pattern: [x for x in cells if fnmatchcase(x, pattern)] for pattern in patterns}
    if missing := [pattern for pattern in patterns if not found[pattern]]:
        sys.exit(f"{shown(results)}/runs.csv has no {' '.join(missing)}")
    place = {x: i for i, x in enumerate(dict.fromkeys(x for matches in found.values() for x in matches))}
    wanted = lambda row: cell(row) in place and row["total_timesteps"] != str(skip_steps)
    ordered = lambda rows: sorted(filter(wanted, rows), key=lambda row: place[cell(row)])
    return ordered(runs), ordered(evaluations)


def iqm(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Interquartile mean, of the middle half of the weight: scores (..., runs), weights (runs,) -> (...).
    A run that straddles a quartile counts with the part that lies inside, so any number of runs will do."""
    order = scores.argsort(-1)
    share = (weights / weights.sum())[order]
    upper = share.cumsum(-1)
    inside = (np.minimum(upper, 0.75) - np.maximum(upper - share, 0.25)).clip(min=0)
    return (np.take_along_axis(scores, order, -1) * inside).sum(-1) / inside.sum(-1)


def passes(scores: list[float], bar: float) -> bool:
    """Whether the interquartile mean of the seeds reaches the bar, and at least 80% of them do."""
    share = sum(score >= bar for score in scores) / len(scores)
    middle = iqm(np.array(scores), np.ones(len(scores)))
    return bool((middle >= bar or math.isclose(middle, bar)) and share >= 0.8)


def summary(finals: dict[Cell, list[float]]) -> str:
    """A table of the final means of the seeds of each cell, and whether they pass the bar."""
    lines = [("cell", "seeds", "mean ± std over seeds", "IQM", "worst seed", "bar", "reached")]
    for cell, means in finals.items():
        scores = ["-"] * 3
        if means:
            spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
            middle = iqm(np.array(means), np.ones(len(means)))
            scores = [f"{statistics.mean(means):.1f}{spread}", f"{middle:.1f}", f"{min(means):.1f}"]
        reached = means and cell.bar is not None and passes(means, cell.bar)
        bar = ("-", "-") if cell.bar is None else (f"{cell.bar:g}", "yes" if reached else "no")
        lines.append((f"{cell.name} {cell.env_id} {cell.steps:,}", str(len(means)), *scores, *bar))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options of `engine`."""
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; more than cores is slower")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="who runs the processes")
    where = "with --engine ray: HOST:PORT of a cluster; default: RAY_ADDRESS, or --jobs cores of this machine"
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help=where)
    parser.add_argument("--gpus", type=float, default=0, help="with --engine ray: GPUs for each run, as 0.25")


def engine(args):
    """one(job, watch) that gives the rows of a seed, where the options say."""
    if args.engine == "local":
        return attempt
    return on_ray(args.runs.resolve(), args.jobs, args.address, args.gpus)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", choices=SUITES, help="the cells to run (benchmark/suites.py)")
    what.add_argument("--script", type=Path, help="any script to train and table; needs --env-id")
    parser.add_argument("--env-id", help="with --script: the environment")
    parser.add_argument("--steps", type=int, help="with --script: steps to train; default: the script's own")
    parser.add_argument("--args", type=shlex.split, default=[], help="with --script: arguments of the script")
    parser.add_argument("--variant", default="", help="with --args: a name for them")
    parser.add_argument("--algos", nargs="+", help="only these algorithms of the suite, as dqn or dqn-4_step")
    parser.add_argument("--envs", nargs="+", help="only these environments of the suite")
    parser.add_argument("--seeds", type=int, help="seeds 1 to N; default: what the suite says of each cell")
    add_engine(parser)
    parser.add_argument("--final-episodes", type=int, default=100, help="episodes of the final evaluation")
    parser.add_argument("--runs", type=Path, default=ROOT / "benchmark/runs", help="where the run folders go")
    where = "where the tables go; default: benchmark/results for a suite, RUNS/results for smoke and --script"
    parser.add_argument("--results", type=Path, help=where)
    args = parser.parse_args()
    trial = args.script or args.suite == "smoke"  # not among the published results
    args.results = args.results or (args.runs / "results" if trial else ROOT / "benchmark/results")
    if args.script:
        if not args.env_id or not args.script.is_file() or bool(args.args) != bool(args.variant):
            parser.error("--script is a file and needs --env-id; --args and --variant go together")
        path = args.script.resolve()
        steps = args.steps or load_script(path.stem, path).make_args(args.env_id).total_timesteps
        cells = [Cell(path.stem, args.env_id, steps, 3, None, tuple(args.args), args.variant, shown(path))]
    else:
        cells = SUITES[args.suite]
    names = {"algos": lambda cell: {cell.algo, cell.name}, "envs": lambda cell: {cell.env_id}}
    for option, keys in names.items():
        known, wanted = set().union(*map(keys, cells)), set(getattr(args, option) or ())
        if wanted - known:
            parser.error(f"--{option} {' '.join(sorted(wanted - known))}: there is {' '.join(sorted(known))}")
        cells = [cell for cell in cells if not wanted or keys(cell) & wanted]
    if min(args.jobs, args.final_episodes, 1 if args.seeds is None else args.seeds) < 1:
        parser.error("--jobs, --seeds and --final-episodes must be at least 1")
    seeds = lambda cell: range(1, (args.seeds or cell.seeds) + 1)
    jobs = [(cell, seed, args.runs.resolve(), args.final_episodes) for cell in cells for seed in seeds(cell)]
    workers = len(jobs) if args.engine == "ray" else args.jobs  # Ray knows how many at a time
    finals, failed, start = {cell: [] for cell in cells}, 0, time.monotonic()
    for (cell, seed, *_), rows in run_all(jobs, engine(args), workers):
        name = f"{cell.name} {cell.env_id} seed {seed}"
        if isinstance(rows, str):
            failed += 1
            print(f"{name}: FAILED: {rows}", file=sys.stderr, flush=True)
            continue
        write_rows(*rows, args.results)
        finals[cell].append(float(rows[0]["final_return_mean"]))
        minutes = (time.monotonic() - start) / 60
        print(f"{name}: final mean {finals[cell][-1]:.1f} ({minutes:.1f} min since the start)", flush=True)
    print(summary(finals))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("run.py: stopped; the same command goes on from the last checkpoints")
