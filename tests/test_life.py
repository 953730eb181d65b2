"""The life of a run: whatever ends it, nothing is lost, nothing is left behind, and it goes on from there."""

import errno
import io
import json
import linecache
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import odd_envs
import probe_envs
import pytest
import torch
from conftest import (
    NAMES,
    call_main,
    checkpoint,
    equal,
    flags,
    fork,
    has,
    load_script,
    parts,
    plays,
    progress,
    quick,
    short,
    tiny,
    wait,
)

RHYTHM = dict(eval_every=64, checkpoint_every=64, total_timesteps=192)
SHARED = [name for name in NAMES if has(load_script(name), "shared_trunk")]
WHOLE = {}  # by script: how many functions a whole training calls, its log and its parts


def evaluations(run_dir="run") -> list[int]:
    """The steps of the evaluations in the log, which begins with its first row."""
    log = progress(run_dir) if Path(run_dir, "progress.jsonl").exists() else []
    return [row["step"] for row in log if "eval/return_mean" in row]


def resume(script, **changes):
    """Goes on with the run. changes are for the environment: what went wrong is mended."""
    args = script.parse_args(["--resume", "run"])
    return script.train(replace(args, env_kwargs=args.env_kwargs | changes))


# ---------------------------------------------------------------------------------------- whatever is raised
@pytest.mark.parametrize("what, phase, after", [
    ("step", "rollout", 150), ("reset", "rollout", 12), ("step", "evaluation", 25),
    ("render", "evaluation", 15), ("interrupt", "rollout", 150), ("local", "rollout", 150),
])  # fmt: skip
def test_whatever_an_environment_raises_leaves_the_newest_weights(script, seen, capsys, what, phase, after):
    kwargs = dict(what=what, phase=phase, after=after)
    args = short(script, "Fault", env_kwargs=kwargs, **RHYTHM | dict(checkpoint_every=10**6))
    args.capture_video = what == "render"
    with pytest.raises(dict(interrupt=KeyboardInterrupt, local=Exception).get(what, RuntimeError)):
        script.train(args)
    saved = checkpoint()
    assert saved["run"]["env_steps"] == seen.run.env_steps
    assert equal(saved["agent"], dict(seen["agent"].state_dict()))
    if seen.run.env_steps:
        out = capsys.readouterr().out
        assert f"step {seen.run.env_steps:,} is saved" in out and "--resume" in out
    assert seen.run.env_steps > 0 or not plays(script) or what != "step" or phase == "evaluation"
    odd_envs.forget()  # the expert of bc.py plays in an environment of its own
    assert len(resume(script, after=10**9)) == 2  # and it goes on from there
    assert checkpoint()["run"]["env_steps"] >= 192


def test_an_error_of_the_caller_leaves_the_newest_weights(script, seen, monkeypatch):
    """In code of the user that a training calls, here in the log."""
    log = script.Run.log

    def fails(run, metrics):
        log(run, metrics)
        if run.env_steps >= 100:
            raise ZeroDivisionError("a bug of the caller")

    monkeypatch.setattr(script.Run, "log", fails)
    with pytest.raises(ZeroDivisionError):
        quick(script, **RHYTHM | dict(checkpoint_every=10**6))
    assert checkpoint()["run"]["env_steps"] == seen.run.env_steps >= 100
    assert equal(checkpoint()["agent"], dict(seen["agent"].state_dict()))


def test_the_first_error_counts_where_saving_fails_too(ppo, monkeypatch):
    def fails(run, name, **parts):
        raise OSError("no disk any more")

    args = short(ppo, "Fault", env_kwargs=dict(after=40))
    monkeypatch.setattr(ppo.Run, "save", fails)
    monkeypatch.setattr(ppo.Run, "evaluate", lambda run: None)
    with pytest.raises(RuntimeError, match=r"a bug in step\(\)"):
        ppo.train(args)


def things() -> dict:
    """What a training must leave as it was: of the process, and of Python."""
    return {
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "children": multiprocessing.active_children(),
        "threads": [thread.name for thread in threading.enumerate()],
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]
                        if os.path.exists(f"/proc/self/fd/{fd}")),
        "path": [path for path in sys.path if path],
        "folder": os.getcwd(), "argv": list(sys.argv),
    }  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux only")
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
def test_a_training_leaves_nothing_behind_however_it_ends(script, async_envs):
    few = RHYTHM | dict(async_envs=async_envs, total_timesteps=96, eval_every=0)
    fault = lambda folder, **kwargs: short(script, "Fault", folder, env_kwargs=kwargs, **few)
    ends = {
        "its end": lambda: quick(script, run_dir="end", **few),
        "a bug of the environment": lambda: script.train(fault("bug", what="step", after=40)),
        "a number that is none": lambda: script.train(fault("nan", what="nan", after=40)),
        "an evaluation": lambda: script.train(fault("eval", phase="evaluation", after=5)),
        "a wrong argument": lambda: script.train(replace(short(script, run_dir="seed"), seed=-1)),
        "a wrong environment": lambda: quick(script, "Nowhere-v0", run_dir="env"),
    }  # fmt: skip
    if async_envs:
        ends = {why: ends[why] for why in ("its end", "a bug of the environment", "a number that is none")}
    for end in ends.values():  # some things are made once for all
        try:
            end()
        except (script.UsageError, RuntimeError, FloatingPointError):
            pass
    before, empty = things(), sys.path.count("")
    for why, end in ends.items():
        for folder in {"end", "bug", "nan", "eval"} & {*os.listdir(".")}:
            Path(folder).rename(f"{folder}-before-{why}")
        try:
            end()
        except (script.UsageError, RuntimeError, FloatingPointError):
            pass
        assert things() == before, f"after {why}"
    assert sys.path.count("") == empty <= 1  # the folder of the user is on the path, once


@pytest.mark.parametrize("what, code", [("nan", 1), ("exit", 99), ("step", 99), ("shape", 2), ("local", 99)])
def test_an_error_beside_processes_ends_them_all_at_once_with_one_traceback(script, what, code, tmp_path):
    """Not even one environment goes on or waits. A process that was lost is named."""
    if not plays(script):
        pytest.skip("its experts play without processes of their own")
    args = short(script, "Fault", env_kwargs=dict(what=what, after=20), async_envs=True, **RHYTHM)
    started, out = time.monotonic(), tmp_path / "out"

    def run():
        code = call_main(script, *flags(args))
        sys.exit(code)

    assert wait(fork(run, out)) == code
    assert time.monotonic() - started < 30
    text = out.read_text()
    assert text.count("Traceback (most recent call last)") == (code == 99), text
    assert "exit code 3" in text or what != "exit"
    assert "Local: a bug in step()" in text or what != "local"
    here = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in here


# ---------------------------------------------------------------------------------------------------- signals
def stopped(script, args, out: Path) -> int:
    return wait(fork(lambda: sys.exit(call_main(script, *flags(args))), out))


@pytest.mark.parametrize("after", ["the first", "the last"])
def test_an_evaluation_that_a_signal_cut_is_not_counted_and_made_up_for(script, tmp_path, after):
    """Episodes of 20 steps in two environments."""
    whole = short(script, run_dir="whole", **RHYTHM)
    script.train(whole)
    steps = probe_envs.Walk.count["evaluation"]
    every = evaluations("whole")
    probe_envs.forget()
    number = 5 if after == "the first" else steps - 5
    args = short(script, env_kwargs=dict(signal="SIGTERM", phase="evaluation", after=number), **RHYTHM)
    assert stopped(script, args, tmp_path / "out") == 143
    cut = every[0] if after == "the first" else every[-1]
    text = (tmp_path / "out").read_text()
    assert cut not in evaluations() and f"step {cut:,}  return" not in text
    assert f"stopped at step {cut:,}, saved" in text and checkpoint()["run"]["env_steps"] == cut
    returns = resume(script, signal="")
    assert evaluations() == every == sorted(set(every)) and len(returns) == 2
    assert progress() == progress("whole") and returns.tolist() == parts("whole")["run"]["returns"]


@pytest.mark.parametrize("phase", ["rollout", "evaluation"])
def test_a_signal_is_heard_where_no_episode_ends(script, phase, tmp_path):
    endless = dict(signal="SIGINT", phase=phase, after=120, length=10**9, edge=1e9)
    few = 40 if phase == "rollout" else 10**6
    steps = dict(total_timesteps=10**6, eval_every=10**6, eval_max_steps=few, horizon=few)
    args = short(script, env_kwargs=endless, **steps)
    started = time.monotonic()
    assert stopped(script, args, tmp_path / "out") == 130
    assert time.monotonic() - started < 60 and "saved; to continue" in (tmp_path / "out").read_text()
    checkpoint()


def test_ctrl_c_in_python_saves_and_raises_and_the_next_one_does_not_kill(script):
    def session():
        """As in a notebook: a cell is interrupted, the next one too, and the kernel lives."""
        args = short(script, env_kwargs=dict(signal="SIGINT", after=100), **RHYTHM)
        with pytest.raises(KeyboardInterrupt):
            script.train(args)
        checkpoint()
        assert len(progress()) > 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        impatient = dict(signal="SIGINT", after=probe_envs.Walk.count["rollout"] + 60, times=2)
        with pytest.raises(KeyboardInterrupt):
            script.train(short(script, run_dir="other", env_kwargs=impatient, **RHYTHM))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not multiprocessing.active_children()
        checkpoint("other")
        assert len(resume(script, signal="")) == 2

    assert wait(fork(session, Path("session"))) == 0, Path("session").read_text()


def test_a_training_in_another_thread(script):
    result = []
    thread = threading.Thread(target=lambda: result.append(quick(script, **RHYTHM)))
    thread.start()
    thread.join()
    assert len(result) == 1 and len(result[0]) == 2


def count_calls(script, *signals: tuple[int, signal.Signals]) -> list[int]:
    """Counts the functions that Python calls from where signals are caught on, in a list of one number.

    When it has called its n-th function, this process gets a signal, for each pair of n and the signal. n is
    drawn, so it is anywhere: in a library, between two lines of a save, in an evaluation.
    """
    enter, calls, due = script.Run.__enter__, [0], sorted(signals)

    def called(frame, event, argument):
        if event == "call":
            calls[0] += 1
            while due and calls[0] >= due[0][0]:
                os.kill(os.getpid(), due.pop(0)[1])

    def entered(run):
        result = enter(run)
        sys.setprofile(called)
        return result

    script.Run.__enter__ = entered
    return calls


def whole(script) -> tuple[int, list[dict], dict]:
    """How many functions a whole training calls, its log and its parts."""
    if script.__name__ not in WHOLE:

        def count():
            calls = count_calls(script)
            script.train(short(script, run_dir="whole", **RHYTHM))
            sys.setprofile(None)
            Path("calls").write_text(str(calls[0]))

        assert wait(fork(count)) == 0
        WHOLE[script.__name__] = int(Path("calls").read_text()), progress("whole"), parts("whole")
    return WHOLE[script.__name__]


@pytest.mark.parametrize("draw", range(5))  # times the number of scripts: a hundred
def test_a_signal_at_any_moment_loses_nothing(script, draw):
    """SIGKILL, SIGTERM, SIGINT and a hasty second one, at moments that are drawn over the whole training."""
    rng = random.Random(f"{script.__name__} {draw}")
    (total, log, state), kind = whole(script), ("kill", "int", "term", "hasty", "kill")[draw]
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(kind, signal.SIGINT)
    at = rng.randrange(total)
    signals = [(at, number)] + [(at + rng.randrange(3000), number)] * (kind == "hasty")

    def run():
        count_calls(script, *signals)
        code = call_main(script, *flags(short(script, **RHYTHM)))
        sys.setprofile(None)
        sys.exit(code)

    code = wait(fork(run, Path("out")))
    allowed = {"kill": (-9,), "term": (143, -15, 0), "int": (130, 0), "hasty": (130, 0, -2)}[kind]
    assert code in allowed, (at, total, Path("out").read_text())
    if code != -9 and kind != "hasty":
        assert "Traceback" not in Path("out").read_text()
    if not Path("run/checkpoint.pt").exists():  # before its first one
        assert kind in ("kill", "hasty")
        return
    checkpoint(), [checkpoint(name=str(path.relative_to("run"))) for path in Path("run").glob("models/*.pt")]
    assert len(resume(script)) == 2
    steps = [(row["step"], "eval/return_mean" in row) for row in progress()]
    assert steps == sorted(steps, key=lambda x: x[0]) and len(set(steps)) == len(steps)
    first = next(row["step"] for row in log if "eval/return_mean" in row)
    assert first in evaluations() and evaluations()[-1] == steps[-1][0] >= 192
    if kind == "kill":
        assert progress() == log and equal(parts(), state)


# -------------------------------------------------------------------------------------- wherever it is called
def test_a_script_pasted_into_a_notebook_works(script):
    """A cell has no file: its source is where Python keeps what it shows in a traceback."""
    source = Path(script.__file__).read_text()
    file = f"<ipython-input-{script.__name__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules["cell"] = cell = types.ModuleType("cell")
    exec(compile(source, file, "exec"), vars(cell))
    assert not hasattr(cell, "__file__")
    args = short(script, **RHYTHM | dict(total_timesteps=96))
    out = StringIO()
    with redirect_stdout(out):
        returns = cell.train(cell.Args(**vars(args) | dict(run_dir="")))
        (folder,) = Path("runs").glob("*/notebook/*")
        assert (folder / "notebook.py").read_text() == source
        assert len(cell.train(cell.parse_args(["--resume", str(folder), "--total-timesteps", "128"]))) == 2
        assert len(returns) == 2 and cell.load_policy(folder).agent
    hint = re.search(r"to watch it: (.*)$", out.getvalue(), re.M)[1]
    assert hint.startswith("train(parse_args(['--evaluate'")
    assert len(eval(hint.replace(", '--capture-video'", ""), vars(cell))) == 2


def test_hints_are_what_the_caller_would_type(ppo, capsys, monkeypatch):
    quick(ppo)
    assert "train(parse_args(['--evaluate', 'run/best.pt', '--capture-video']))" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["algos/ppo.py"])
    quick(ppo, run_dir="other")
    assert "python algos/ppo.py --evaluate other/best.pt --capture-video" in capsys.readouterr().out
    quick(ppo, run_dir="one more")
    assert 'python algos/ppo.py --evaluate "one more/best.pt" --capture-video' in capsys.readouterr().out


def test_a_script_runs_without_its_docstrings_and_asserts(script, capsys):
    """python -OO"""
    source = Path(script.__file__).read_text()
    sys.modules["bare"] = bare = types.ModuleType("bare")
    bare.__file__ = script.__file__
    exec(compile(source, script.__file__, "exec", optimize=2), vars(bare))
    assert bare.__doc__ is None
    assert call_main(bare, "--help") == 0 and "--seed" in capsys.readouterr().out
    bare.train(bare.Args(**vars(short(script, **RHYTHM | dict(total_timesteps=96)))))


def test_a_program_without_a_console_trains(script, monkeypatch):
    """pythonw has neither stdout nor stderr."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    quick(script, **RHYTHM | dict(total_timesteps=96))
    assert script.train(script.parse_args(["--evaluate", "run"])).size == 2


def test_a_console_that_knows_no_such_letters_gets_others(ppo, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii"))
    quick(ppo, **RHYTHM | dict(total_timesteps=96))
    assert b"actions: " in raw.getvalue()


def test_an_environment_that_changes_to_another_folder_loses_nothing(script):
    here = os.getcwd()
    args = short(script, "Fault", env_kwargs=dict(what="folder", after=20), **RHYTHM)
    args.capture_video = True
    try:
        script.train(args)
    finally:
        os.chdir(here)
    assert checkpoint()["run"]["env_steps"] >= 192 and evaluations() and Path("run/videos").is_dir()


def test_a_kill_while_a_run_is_described_does_not_end_it(ppo):
    quick(ppo, **RHYTHM | dict(total_timesteps=96))
    Path("run/environment.json").write_text('[{"torch": "2')
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "192"]))
    assert (
        checkpoint()["run"]["env_steps"] == 192
        and len(json.loads(Path("run/environment.json").read_text())) == 1
    )


def test_what_is_logged_of_info_may_change_when_a_run_goes_on(ppo, seen):
    kwargs = dict(env_kwargs={"kind": "number"}, **RHYTHM)
    quick(ppo, "Infos", **kwargs | dict(total_timesteps=96))
    state = checkpoint()
    state["run"]["episodes"] = [(5.0, 5.0)]  # as where a signal came between two log entries
    torch.save(state, "run/checkpoint.pt")
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "192", "--info-keys", "cost"]))
    assert {row["info/cost"] for row in progress() if "info/cost" in row} == {3.0}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_ends_in_one_line(ppo, monkeypatch, capsys, number):
    """torch's writer turns what the file raises into an error of its own."""
    save = ppo.torch.save

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ppo.torch, "save", lambda state, file: save(state, Full()))
    assert call_main(ppo, *flags(short(ppo, **RHYTHM))) == 1
    assert os.strerror(number) in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_reader_that_goes_away_stops_no_training(ppo):
    """python ppo.py | head -1"""

    def into_a_closed_pipe(*words):
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        sys.stdout = open(1, "w", closefd=False)
        sys.exit(call_main(ppo, *words))

    assert wait(fork(lambda: into_a_closed_pipe(*flags(tiny(ppo))), Path("out"))) == 0, Path(
        "out"
    ).read_text()
    assert checkpoint()["run"]["env_steps"] == 192 and len(progress()) > 5
    code = wait(fork(lambda: into_a_closed_pipe("--help"), Path("help")))
    assert code == -signal.SIGPIPE and "Traceback" not in Path("help").read_text()


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(ppo, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-120000")
    args = short(ppo, run_dir="", total_timesteps=64)
    pids = [fork(lambda: ppo.train(args)) for _ in range(4)]
    assert [wait(pid) for pid in pids] == [0] * 4
    folders = sorted(Path("runs").glob("*/ppo/*"))
    assert len(folders) == 4 and folders[0].name == "1-20260101-120000"
    for folder in folders:
        assert checkpoint(folder)["run"]["env_steps"] == 64 and json.loads((folder / "args.json").read_text())


@pytest.mark.parametrize("words", [
    ["--seed", "-1"], ["--seed", "4294967296"], ["--eval-seed", "4294967296"], ["--eval-seed", "-5"],
    ["--seed", "1000000000000000000000000"],
])  # fmt: skip
def test_a_seed_that_no_library_takes_is_refused_in_one_line(script, words, capsys):
    assert call_main(script, *words) == 2
    err = capsys.readouterr().err.strip()
    assert words[0] in err and len(err.splitlines()) == 1 and not os.listdir(".")


@pytest.mark.parametrize("env_id, today", [
    ("BreakoutNoFrameskip-v4", "ALE/Breakout-v5"), ("Pendulum-v0", "Pendulum-v1"),
    ("PongDeterministic-v4", "ALE/Pong-v5"), ("LunarLander-v2", "LunarLander-v3"),
    ("ale_py:BreakoutNoFrameskip-v4", "ALE/Breakout-v5"), ("ale_py:ALE/Pong-v5", "ALE/Pong-v5"),
])  # fmt: skip
def test_an_environment_of_yesterday_is_named_as_it_is_today(ppo, env_id, today, capsys):
    """Also after ale_py was imported, which has its games under their old names, too."""
    ppo.todays_name("Pong")
    assert call_main(ppo, "--env-id", env_id) == 2
    err = capsys.readouterr().err.strip()
    assert f"Its name is now {today}" in err and len(err.splitlines()) == 1


def test_an_argument_that_an_environment_does_not_have_is_not_blamed_on_its_name(ppo, capsys):
    for env_id in ("CartPole-v1", "ALE/Pong-v5"):
        assert call_main(ppo, "--env-id", env_id, "--env-kwargs", '{"nonsense": 1}') == 2
        err = capsys.readouterr().err.strip()
        assert "nonsense" in err and "name is now" not in err and len(err.splitlines()) == 1


def test_games_that_would_restart_after_each_lost_life_are_refused(ppo, capsys):
    assert call_main(ppo, "--env-id", "ALE/Breakout-v5", "--env-kwargs", '{"episodic_life": true}') == 2
    err = capsys.readouterr().err.strip()
    assert "episodic_life" in err and len(err.splitlines()) == 1


def test_an_option_of_yesterday_is_still_an_option(ppo):
    assert ppo.parse_args(["--compile"]).cuda_graph and not ppo.parse_args([]).cuda_graph


def test_an_integer_where_a_number_is_asked_for_is_one(script):
    """In Python there is no command line that makes a float of it."""
    numbers = dict(learning_rate=1, log_std_init=0, gamma=1, reward_scale=2, adam_eps=1, max_grad_norm=1)
    args = short(script, **RHYTHM | dict(total_timesteps=96), **numbers)
    whole = replace(args, run_dir="whole")
    for name, value in numbers.items():
        if has(script, name):
            setattr(whole, name, float(value))
    script.train(args), script.train(whole)
    assert equal(parts()["agent"], parts("whole")["agent"]) and progress() == progress("whole")


def test_one_environment_one_step_and_one_minibatch_are_enough(script):
    ones = """num_envs num_steps num_minibatches update_epochs value_epochs episodes_per_update batch_size
    log_every updates_per_train train_every minibatches_per_epoch expert_episodes meta_batch_size
    eval_episodes"""
    few = dict(total_timesteps=66, learning_starts=60, dagger_iterations=0, validation_share=0.0)
    quick(script, "Ones", **dict.fromkeys(ones.split(), 1), **few)
    rows = [row for row in progress() if "reward/mean" in row or "loss/policy" in row]
    assert rows and all(np.isfinite(list(row.values())).all() for row in progress())


# -------------------------------------------------------------------- from folder to folder, and side by side
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("shared", [False, True])
def test_weights_of_other_layers_are_refused_in_one_line(name, shared, capsys):
    """With a shared trunk, actor and critic have the same names in a file, and one would get both weights.
    Vice versa both get the same ones, which is right; but Adam's moments fit no more."""
    script = load_script(name)
    quick(script, shared_trunk=shared, critic_sizes=None)
    other = "--no-shared-trunk" if shared else "--shared-trunk"
    before = checkpoint(), checkpoint(name="best.pt")
    init = [*flags(short(script, run_dir="new", critic_sizes=None)), "--init-from", "run/best.pt", other]
    resumed = ["--resume", "run", "--total-timesteps", "600", other]
    for words in [resumed] if shared else [resumed, ["--evaluate", "run", other], init]:
        assert call_main(script, *words) == 2
        (*_, line) = capsys.readouterr().err.strip().splitlines()
        assert "does not fit these arguments" in line
    assert equal((checkpoint(), checkpoint(name="best.pt")), before)


def test_layers_that_do_not_exist_have_no_sizes(capsys):
    for name in SHARED:
        script = load_script(name)
        assert call_main(script, *flags(short(script, shared_trunk=True, critic_sizes=(3,)))) == 2
        assert "--critic-sizes" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [192, 256])  # those of the whole run, and more
def test_a_branch_can_be_resumed_and_evaluated_from_its_start(ppo, capsys, steps):
    quick(ppo, **RHYTHM)
    assert call_main(ppo, "--resume", "run", "--run-dir", "new", "--total-timesteps", str(steps)) == 0
    out = capsys.readouterr().out
    assert ("nothing is left to do" in out) == (steps == 192) and "new/best.pt" in out
    assert call_main(ppo, "--evaluate", "new/best.pt") == call_main(ppo, "--resume", "new") == 0
    assert evaluations("new")[0] == 192


def test_an_error_in_the_first_steps_of_a_branch_leaves_a_checkpoint(ppo, capsys):
    quick(ppo, "Fault", env_kwargs=dict(after=10**6), **RHYTHM)
    args = ppo.parse_args(["--resume", "run", "--run-dir", "new", "--total-timesteps", "256"])
    with pytest.raises(RuntimeError):
        ppo.train(replace(args, env_kwargs=args.env_kwargs | dict(after=20)))
    assert "--resume new" in capsys.readouterr().out.replace("'", "").replace(", ", " ")
    assert checkpoint("new")["run"]["env_steps"] >= 192


def test_the_best_model_survives_a_kill(ppo, monkeypatch):
    """best.pt may be newer than the checkpoint that a killed run goes on from."""
    evaluate, marks = ppo.evaluate, iter([1.0, 50.0, 500.0, 3.0, 4.0])
    monkeypatch.setattr(ppo, "evaluate", lambda *args: (0 * (x := evaluate(*args))[0] + next(marks), x[1]))
    quick(ppo, **RHYTHM | dict(total_timesteps=64))
    old = Path("run/checkpoint.pt").read_bytes()
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "128"]))
    Path("run/checkpoint.pt").write_bytes(old)
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "192"]))
    assert checkpoint(name="best.pt")["run"]["best"] == checkpoint()["run"]["best"] == 500


def test_a_run_is_one_of_a_new_one_a_resumed_one_and_an_evaluation(script, capsys):
    quick(script)
    for first, second in (("--resume", "--init-from"), ("--evaluate", "--resume")):
        assert call_main(script, first, "run", second, "run/checkpoint.pt") == 2
        assert "exclude each other" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_two_trainings_never_share_a_folder(script):
    """The second one ends at once, with the folder as it was; when the first one has ended, it may go on."""
    first = fork(lambda: script.train(short(script, **RHYTHM | dict(total_timesteps=10**7))))
    while not Path("run/checkpoint.pt").exists():
        time.sleep(0.05)
    second = fork(lambda: sys.exit(call_main(script, "--resume", "run")), Path("out"))
    try:
        assert wait(second) == 2 and "another training runs in run" in Path("out").read_text()
    finally:
        os.kill(first, signal.SIGKILL)
        wait(first)
    steps = str(checkpoint()["run"]["env_steps"] + 64)
    assert call_main(script, "--resume", "run", "--total-timesteps", steps) == 0


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_goes_away_stops_a_training_unless_it_is_under_nohup(ppo, nohup):
    def run():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        count_calls(ppo, (5_000, signal.SIGHUP))
        sys.exit(call_main(ppo, *flags(short(ppo, **RHYTHM))))

    assert wait(fork(run, Path("out"))) == (0 if nohup else 128 + signal.SIGHUP)
    steps, said = checkpoint()["run"]["env_steps"], Path("out").read_text()
    assert (steps == 192) == nohup and ("stops and saves" in said) == (not nohup)
    assert nohup or f"stopped at step {steps}, saved" in said


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux only")
def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_has_loaded(script, monkeypatch):
    """Else the disk holds the old file beside the new one until the training ends."""
    quick(script, **RHYTHM)
    save, held = script.Run.checkpoint, []

    def looked(run):
        save(run)
        held.append("checkpoint.pt" in Path("/proc/self/maps").read_text())

    monkeypatch.setattr(script.Run, "checkpoint", looked)
    script.train(script.parse_args(["--resume", "run", "--total-timesteps", "320"]))
    assert held and not any(held)


def test_a_film_that_cannot_be_written_hides_no_score(script, capsys):
    quick(script)
    Path(f"run/videos/{checkpoint()['run']['env_steps']}-seed10000000.webm").mkdir(parents=True)
    words = ["--capture-video", "--eval-seed", "10000000"]
    assert call_main(script, "--evaluate", "run", *words) == 2
    out, err = capsys.readouterr()
    assert len(json.loads(out.strip().splitlines()[-1])["returns"]) == 2 and "cannot write" in err


def test_a_policy_holds_no_environment_open(ppo):
    quick(ppo, "Single", num_envs=1, eval_episodes=1, eval_every=0)
    policy = ppo.load_policy("run")
    env = ppo.gym.make("odd_envs:Single-v0")  # only one may run
    policy(env.reset(seed=1)[0])
    env.close()


def test_a_file_of_another_script_is_refused_by_name(ppo):
    script = load_script("dqn")
    quick(script)
    for path in ("run", "run/best.pt"):
        with pytest.raises(ppo.UsageError, match="was not saved by this script"):
            ppo.load_policy(path)


def test_a_name_of_a_folder_is_no_command(ppo, tmp_path):
    folder = tmp_path / "$(touch hacked)"
    folder.mkdir()
    (folder / "copy.py").write_text(Path(ppo.__file__).read_text())
    copy = load_script("a_copy", folder / "copy.py")
    copy.train(copy.Args(**vars(short(ppo))))
    assert not Path("hacked").exists() and not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("field, value", [("device", "gpu"), ("entropy_method", "x"), ("activation", "exp")])
def test_choices_are_checked_in_python_too(ppo, field, value):
    with pytest.raises(ppo.UsageError, match=f"--{field.replace('_', '-')} {value}: must be one of"):
        quick(ppo, **{field: value})
