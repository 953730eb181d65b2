"""Searches with Optuna for better settings of a script, and prints them as an entry of its TUNED.

    python benchmark/tune.py --script algos/sac.py --env-id Pendulum-v1 --trials 40 --jobs 2
    python benchmark/tune.py --script algos/ppo.py --env-id Acrobot-v1 --trials 40 --params gamma,num_steps

A trial trains the script with some settings on several seeds, one after the other, and its score is the mean
over the seeds of the final evaluation. Trial 0 has the script's own settings. A trial whose evaluations are
worse than the median of the others is stopped. The same command goes on with a search that was cut short.
What is tried, and how to say it: docs/many_runs.md.
"""

import argparse
import hashlib
import json
import math
import shlex
import signal
import statistics
import sys
import textwrap
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from run import ROOT, STOP, Failed, add_engine, engine, exclusive, load_script, name_of, run_all, shown, slug
from suites import Cell

FACTORS = (0.25, 0.5, 1, 2, 4)  # of counts and sizes: halves and doubles still divide each other


# ---------------------------------------------------------------------------------------------------- space
def space_of(hint, value):
    """What to try for a field of this type that has this value: a list of choices, or a range around it.
    None where they say neither: 0, None and inf switch something off."""
    if hint is bool or isinstance(value, bool):
        return [False, True]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(value, tuple) and value and all(isinstance(x, int) for x in value):
        return [[max(1, round(factor * x)) for x in value] for factor in FACTORS]
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        return None
    ranges = [part.__metadata__[0] for part in (hint, *get_args(hint)) if hasattr(part, "__metadata__")]
    low, high = ranges[0] if ranges else (-math.inf, math.inf)
    if isinstance(value, int):
        return sorted({min(max(round(factor * value), low, 1), high) for factor in FACTORS})
    if high == 1 and value > 0.5:  # 0.99 is as far from 0.9 as from 0.999
        rest = 1 - value or 0.01
        return sorted({value, *(round(1 - min(f * rest, 1), 9) for f in (0.1, *FACTORS, 10))})
    return {"low": round(max(value / 10, low), 9), "high": round(min(value * 10, high), 9), "log": True}


def spaces(own, names: list[str], given: dict) -> dict:
    """What to try, by field. Without names: the fields of given, or those of the algorithm with a range."""
    known, hints = [field.name for field in fields(own)], get_type_hints(type(own), include_extras=True)
    if wrong := [name for name in [*names, *given] if name not in known]:
        sys.exit(f"tune.py: there is no {', '.join(wrong)} in Args, but {', '.join(known)}")
    algorithm = known[known.index("total_timesteps") + 1 :]
    find = lambda name: given.get(name) or space_of(hints[name], getattr(own, name))
    found = {name: find(name) for name in names or given or algorithm}
    if none := [name for name in names if found[name] is None]:
        sys.exit(f"tune.py: type and value of {', '.join(none)} say no range: give one in --space")
    return {name: space for name, space in found.items() if space is not None}


def distribution(space) -> optuna.distributions.BaseDistribution:
    """The same for Optuna, whose choices are words here."""
    if isinstance(space, list):
        return optuna.distributions.CategoricalDistribution([json.dumps(choice) for choice in space])
    ints = isinstance(space["low"], int) and isinstance(space["high"], int)
    return getattr(optuna.distributions, "IntDistribution" if ints else "FloatDistribution")(**space)


def setting(x):
    """What Optuna drew as a value. Numbers have three digits, so that what is printed is what was trained."""
    return json.loads(x) if isinstance(x, str) else float(f"{x:.3g}") if isinstance(x, float) else x


def inside(own, space: dict) -> dict:
    """The own values as Optuna would draw them, of the fields where it could."""
    values = {name: json.loads(json.dumps(getattr(own, name))) for name in space}
    has = lambda space, x: x in space if isinstance(space, list) else space["low"] <= x <= space["high"]
    words = lambda space, x: json.dumps(x) if isinstance(space, list) else x
    return {name: words(space[name], x) for name, x in values.items() if has(space[name], x)}


def flags(settings: dict) -> list[str]:
    """The settings as words of a command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return words


# --------------------------------------------------------------------------------------------------- trials
def evaluations(run: Path) -> list[float]:
    """The mean returns of a run's evaluations so far."""
    log = run / "progress.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["eval/return_mean"] for row in rows if "eval/return_mean" in row]


def score(trial: optuna.Trial, cell: Cell, args, one) -> float:
    """The mean over seeds of the final evaluation. Raises TrialPruned where the trial is not worth its time:
    each evaluation, as the mean over the seeds so far, is compared with the same one of other trials."""
    curves, finals, reported, pruned = [], [], set(), False

    def look(run: Path) -> bool:
        nonlocal pruned
        curves[-1] = evaluations(run)
        for i in range(len(curves[-1])):
            step = 10_000 * (len(curves) - 1) + i
            if step not in reported and not pruned:
                mean = statistics.mean(curve[min(i, len(curve) - 1)] for curve in curves)
                trial.report(mean, step)
                reported.add(step)
                pruned = trial.should_prune()
        return pruned

    for seed in range(args.first_seed, args.first_seed + args.seeds):
        curves.append([])
        watch = partial(look, args.runs / name_of(cell, seed))
        rows = one((cell, seed, args.runs, args.final_episodes), watch)
        if watch() and not STOP.is_set():
            raise optuna.TrialPruned
        if isinstance(rows, str):
            raise Failed(rows)
        finals.append(float(rows[0]["final_return_mean"]))
    return statistics.mean(finals)


def one_trial(study: optuna.Study, space: dict, script, steps: int, args, one) -> str:
    """Asks the study for settings and tells it their score. Returns what to print."""
    trial = study.ask({name: distribution(space[name]) for name in space})
    settings = {} if "own" in trial.user_attrs else {name: setting(x) for name, x in trial.params.items()}
    trial.set_user_attr("settings", settings)
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8] if settings else "own"
    words, path = (*args.args, *flags(settings)), shown(args.script.resolve())
    try:
        value = score(trial, Cell(script.__name__, args.env_id, steps, 0, None, words, key, path), args, one)
        study.tell(trial, value)
        said = f"{value:.5g}"
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
        said = "pruned"
    except Failed as error:
        if STOP.is_set():
            raise  # the trial stays as one that was cut short
        trial.set_user_attr("error", str(error))
        study.tell(trial, state=TrialState.FAIL)
        said = f"FAILED: {error}"
    return f"trial {trial.number}: {said} {shlex.join(flags(settings)) or '(the own settings)'}"


def open_study(file: Path, what: dict, own: dict, warmup: int) -> tuple[optuna.Study, int]:
    """The study of this file, new or as it was left, and how many of its trials are over."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=warmup)
    one = dict(study_name="tune", storage=storage, load_if_exists=True)
    study = optuna.create_study(**one, pruner=pruner, direction="maximize")
    study.sampler = optuna.samplers.TPESampler(seed=1 + len(study.trials))  # new draws after a resume
    if not study.trials:
        study.set_user_attr("what", what)
        study.enqueue_trial(own, user_attrs={"own": True})
    if study.user_attrs["what"] != json.loads(json.dumps(what)):
        sys.exit(f"tune.py: {shown(file)} is of another search: move it away, or give other --runs")
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # cut short: its runs go on
        study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=TrialState.FAIL)
    failed = lambda trial: trial.state == TrialState.FAIL and "error" not in trial.user_attrs  # cut short
    return study, sum(trial.state.is_finished() and not failed(trial) for trial in study.trials)


def entry(script, env_id: str, settings: dict, source: str) -> str:
    """TUNED's entry with the settings on top, without what it need not say."""
    old = script.TUNED.pop(env_id, {})
    plain = script.make_args(env_id)
    new = {name: tuple(x) if isinstance(x, list) else x for name, x in (old | settings).items()}
    words = ", ".join(f"{name}={x!r}" for name, x in new.items() if x != getattr(plain, name))
    head, wrap = f'    "{env_id}": dict(', partial(textwrap.wrap, width=110, break_on_hyphens=False)
    body = wrap(f"{words}),", initial_indent=head, subsequent_indent=" " * len(head))
    return "\n".join([*wrap(source, initial_indent="    # ", subsequent_indent="    # "), *body])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--script", type=Path, required=True, help="the script to tune")
    parser.add_argument("--env-id", required=True, help="the environment")
    parser.add_argument("--trials", type=int, required=True, help="trials in all, earlier ones included")
    parser.add_argument("--params", default="", help="fields to search, as gamma,num_steps; default: all")
    parser.add_argument("--space", default="{}", help="JSON, or a file of it: what to try, by field")
    parser.add_argument("--steps", type=int, help="steps to train; default: the script's own")
    parser.add_argument("--args", type=shlex.split, default=[], help="further arguments of the script")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each trial")
    parser.add_argument("--first-seed", type=int, default=101, help="so that seeds 1, 2, ... can judge")
    parser.add_argument("--final-episodes", type=int, default=100, help="episodes of the final evaluation")
    parser.add_argument("--runs", type=Path, default=ROOT / "benchmark/runs/tune", help="where all files go")
    add_engine(parser)
    args = parser.parse_args()
    if not args.script.is_file() or min(args.trials, args.seeds, args.jobs, args.final_episodes) < 1:
        parser.error("--script is a file; --trials, --seeds, --jobs and --final-episodes are at least 1")
    args.runs = args.runs.resolve()
    script = load_script(args.script.stem, args.script.resolve())
    own = script.make_args(args.env_id)
    steps = args.steps or own.total_timesteps
    try:
        given = json.loads(args.space if args.space.startswith("{") else Path(args.space).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--space: {error}")
    space = spaces(own, args.params.split(",") if args.params else [], given)
    print(f"what is tried: {json.dumps(space)}", flush=True)
    seeds = f"seeds {args.first_seed} to {args.first_seed + args.seeds - 1}"
    what = dict(space=space, args=args.args, seeds=seeds, episodes=args.final_episodes)
    file = args.runs / f"{args.script.stem}__{slug(args.env_id)}__{steps}.journal"
    warmup = steps // own.eval_every // 4 if own.eval_every else 0  # evaluations that say little
    with exclusive(file.with_suffix(".lock")):
        study, done = open_study(file, what, inside(own, space), warmup)
        one = engine(args) if done < args.trials else None
        try_one = lambda _: one_trial(study, space, script, steps, args, one)
        for _, line in run_all(range(done, args.trials), try_one, args.jobs):
            print(line, flush=True)
            if line.startswith("trial 0: FAILED"):
                return 1
    whole = study.get_trials(states=[TrialState.COMPLETE])
    if not whole:
        sys.exit("tune.py: no trial came to its end")
    best = study.best_trial
    before = next((trial.value for trial in whole if "own" in trial.user_attrs), math.nan)
    scores = f"{best.value:.5g} on {seeds}, before {before:.5g}"
    source = f"python benchmark/tune.py {shlex.join(sys.argv[1:])}: {scores}"
    print(f"\nThe best is trial {best.number}. It was lucky, too: train it on other seeds to judge it.")
    print(entry(script, args.env_id, {"total_timesteps": steps} | best.user_attrs["settings"], source))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("tune.py: stopped; the same command goes on")
