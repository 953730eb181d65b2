"""Trains a suite or any script, each seed in its own process, and writes what came out as tidy CSV files.

    python benchmark/run.py --suite ppo --jobs 2
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
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from suites import SUITES, Cell

try:
    import fcntl
except ImportError:  # Windows: start this program once at a time
    fcntl = None

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = """
    algo env_id total_timesteps seed kind step eval_episodes eval_return_mean eval_return_std eval_return_min
    eval_return_max wall_time steps_per_second python torch gymnasium numpy device cpu cores git_commit
    command
""".split()
FINAL = re.compile(  # what --evaluate prints, by column
    r"return_mean (?P<eval_return_mean>\S+) return_std (?P<eval_return_std>\S+) return_min "
    r"(?P<eval_return_min>\S+) return_max (?P<eval_return_max>\S+) .*over (?P<eval_episodes>\d+) episodes"
)
STOP, CHILDREN = threading.Event(), set()


class Failed(Exception):
    """One seed could not be trained or evaluated; the others go on."""


def load_script(name: str, path: Path | None = None):
    """The script as a module; without path, algos/{name}.py."""
    spec = importlib.util.spec_from_file_location(name, path or ROOT / "algos" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def commit() -> str:
    """The commit that is checked out, with "+changes" if algos/ differs from it; empty without git."""
    if not shutil.which("git"):
        return ""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    return git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain", "algos") else "")


# --------------------------------------------------------------------------------------------------- one seed
@contextlib.contextmanager
def exclusive(path: Path):
    """Waits until no other process works on this seed: the training of a killed benchmark lives on and holds
    the lock. Yields the lock, which children inherit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for attempt in itertools.count() if fcntl else ():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == 0:
                print(f"{shown(path)}: still at work from an earlier start; waiting for it", flush=True)
            if STOP.wait(0.2):
                raise Failed("stopped")
        yield file


def call(words: list[str], log: Path, lock) -> str:
    """Runs python with these words from the project's folder. Returns and logs what it printed."""
    if STOP.is_set():
        raise Failed("stopped")
    with log.open("a+") as file:
        start = file.seek(0, os.SEEK_END)
        pipes = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if fcntl:
            pipes["pass_fds"] = [lock.fileno()]
        child = subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes)
        CHILDREN.add(child)
        if STOP.is_set():  # came between the check above and this line
            child.terminate()
        code = child.wait()
        CHILDREN.discard(child)
        file.seek(start)
        text = file.read()
    if code:
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        raise Failed(f"exit code {code}: {last[0]} (all of it: {shown(log)})")
    return text


def run_seed(cell: Cell, seed: int, runs: Path, final_episodes: int) -> list[dict]:
    """Trains one seed, or goes on with it, plays the final evaluation, and returns the rows of the CSV.

    Beside the run folder NAME lie NAME.log with all output and NAME.json with what is done already.
    """
    folder = runs / f"{cell.name}__{slug(cell.env_id)}__{cell.steps}" / str(seed)
    record_file, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    command = [cell.script or f"algos/{cell.algo}.py", "--env-id", cell.env_id, "--seed", str(seed)]
    command += ["--total-timesteps", str(cell.steps), *cell.args, "--run-dir", shown(folder)]
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
            if record["commits"][-1:] != [commit()]:
                keep(commits=[*record["commits"], commit()], cpu=cpu_name(), cores=os.cpu_count())
            if (folder / "checkpoint.pt").exists():
                call([command[0], "--resume", shown(folder)], log, lock)
            else:  # killed before its first checkpoint, if it ever started
                shutil.rmtree(folder, ignore_errors=True)
                call(command, log, lock)
            keep(trained=True)
        if record["final"].get("eval_episodes") != str(final_episodes):
            play = [command[0], "--evaluate", shown(folder), "--eval-episodes", str(final_episodes)]
            score = FINAL.search(call(play, log, lock))
            if not score:
                raise Failed(f"its --evaluate printed no line `return mean ...` ({shown(log)})")
            keep(final=score.groupdict())
        return tidy_rows(cell, seed, folder, record)


def tidy_rows(cell: Cell, seed: int, folder: Path, record: dict) -> list[dict]:
    """One row per evaluation of the training (kind: curve) and one for the final evaluation (kind: final)."""
    environment = json.loads((folder / "environment.json").read_text())[-1]
    same = dict(algo=cell.name, env_id=cell.env_id, total_timesteps=cell.steps, seed=seed)
    same |= {name: environment[name] for name in ("torch", "gymnasium", "numpy", "device")}
    same |= dict(python=environment["python"].split()[0], cpu=record["cpu"], cores=record["cores"])
    same |= dict(git_commit=" ".join(record["commits"]), command=shlex.join(["python", *record["command"]]))
    same["eval_episodes"] = json.loads((folder / "args.json").read_text())["eval_episodes"]
    log = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    middle = lambda speeds: round(statistics.median(speeds), 1) if speeds else ""
    rows, speeds, new_speeds = [], [], []
    for before, line in zip([log[0], *log], log, strict=False):
        if "eval/return_mean" in line:
            scores = {f"eval_return_{x}": line[f"eval/return_{x}"] for x in ("mean", "std", "min", "max")}
            at = dict(kind="curve", step=line["step"], wall_time=round(line["seconds"], 3))
            rows.append(same | at | scores | {"steps_per_second": middle(new_speeds)})
            new_speeds = []
        elif line["step"] > before["step"]:  # without the time of an evaluation
            new_speeds.append((line["step"] - before["step"]) / (line["seconds"] - before["seconds"]))
            speeds.append(new_speeds[-1])
    return [*rows, rows[-1] | {"kind": "final", "steps_per_second": middle(speeds)} | record["final"]]


def attempt(job: tuple) -> list[dict] | str:
    """The rows of one seed, or why there are none; the others go on."""
    try:
        return run_seed(*job)
    except Failed as error:
        return str(error)
    except (OSError, LookupError, ValueError) as error:
        return f"its files are gone or damaged ({error}): move what is left of it and its .json away"


# -------------------------------------------------------------------------------------------------- all seeds
def run_local(jobs: list[tuple], workers: int):
    """Yields (job, its rows or why it failed), as they come."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(attempt, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # Ctrl-C, SIGTERM: the trainings save and stop, the waiting ones never start
            STOP.set()
            for child in list(CHILDREN):
                child.terminate()
            pool.shutdown(cancel_futures=True)


def run_ray(jobs: list[tuple], workers: int):
    """As run_local on a Ray cluster (RAY_ADDRESS), whose machines share this folder, or on this machine."""
    import ray

    where = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False, **where)
    remote = ray.remote(num_cpus=1, max_retries=0)(lambda job: importlib.import_module("run").attempt(job))
    futures = {remote.remote(job): job for job in jobs}
    try:
        while futures:
            (ready,), _ = ray.wait(list(futures), num_returns=1)
            yield futures.pop(ready), ray.get(ready)
    finally:
        ray.shutdown()


def rows_of(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


def write_rows(rows: list[dict], results: Path) -> None:
    """Puts the rows of one seed into {algo}__{env}.csv in place of its old ones; other seeds stay."""
    path = results / f"{rows[0]['algo']}__{slug(rows[0]['env_id'])}.csv"
    same = lambda row: (int(row["total_timesteps"]), int(row["seed"]))
    replace_rows(path, COLUMNS, rows, same, lambda row: (*same(row), row["kind"], int(row["step"])))


def iqm(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Interquartile mean, of the middle half of the weight: scores (..., runs), weights (runs,) -> (...).
    A run that straddles a quartile counts with the part that lies inside, so any number of runs will do."""
    order = scores.argsort(-1)
    share = (weights / weights.sum())[order]
    upper = share.cumsum(-1)
    inside = (np.minimum(upper, 0.75) - np.maximum(upper - share, 0.25)).clip(min=0)
    return (np.take_along_axis(scores, order, -1) * inside).sum(-1) / inside.sum(-1)


def summary(finals: dict[Cell, list[float]]) -> str:
    """A table of the final means of the seeds of each cell, and whether their mean reaches the bar."""
    lines = [("cell", "seeds", "mean ± std over seeds", "IQM", "worst seed", "bar", "reached")]
    for cell, means in finals.items():
        scores = ["-"] * 3
        if means:
            spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
            middle = iqm(np.array(means), np.ones(len(means)))
            scores = [f"{statistics.mean(means):.1f}{spread}", f"{middle:.1f}", f"{min(means):.1f}"]
        reached = means and cell.bar is not None and statistics.mean(means) >= cell.bar
        bar = ("-", "-") if cell.bar is None else (f"{cell.bar:g}", "yes" if reached else "no")
        lines.append((f"{cell.name} {cell.env_id} {cell.steps:,}", str(len(means)), *scores, *bar))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


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
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; more than cores is slower")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="who runs the processes")
    parser.add_argument("--final-episodes", type=int, default=100, help="episodes of the final evaluation")
    parser.add_argument("--runs", type=Path, default=ROOT / "benchmark/runs", help="where the run folders go")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help="where the CSVs go")
    args = parser.parse_args()
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
    finals, failed, start = {cell: [] for cell in cells}, 0, time.monotonic()
    for (cell, seed, *_), rows in (run_ray if args.engine == "ray" else run_local)(jobs, args.jobs):
        name = f"{cell.name} {cell.env_id} seed {seed}"
        if isinstance(rows, str):
            failed += 1
            print(f"{name}: FAILED: {rows}", file=sys.stderr, flush=True)
            continue
        write_rows(rows, args.results)
        finals[cell].append(float(rows[-1]["eval_return_mean"]))
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
