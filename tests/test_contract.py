"""What every script promises to its users, for every script of algos/. A new script is tested by existing."""

import ast
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ROOT, SCRIPTS, age, checkpoint, equal, fork, points, progress, wait
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tensorboard.summary.writer.record_writer import RecordWriter


@pytest.fixture(scope="session")
def plain(script, tmp_path_factory):
    """The folder of an uninterrupted training and what train returned."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    returns = script.train(folder)
    return folder, returns


def learned(run_dir="run") -> dict:
    """All that a checkpoint holds but for the clock."""
    state = checkpoint(run_dir)
    counters = state["run"] | {"seconds": 0, "row": {}}
    counters["row"] = {k: v for k, v in state["run"]["row"].items() if not k.startswith("speed/")}
    return state | {"run": counters}


def same_run(one, two) -> None:
    """Rows, points of TensorBoard and everything in the checkpoint are equal bit for bit."""
    assert progress(one) == progress(two)
    assert points(one) == points(two)
    assert equal(learned(one), learned(two))


# ------------------------------------------------------------------------------------------ training a little
def test_the_file_alone_in_an_empty_folder_trains(script, empty_folder, plain):
    flags = script.flags()
    del flags[flags.index("--run-dir") : flags.index("--run-dir") + 2]
    done = script.command(empty_folder, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in empty_folder.iterdir()} - {"__pycache__"} == {script.path.name, "runs"}
    (run,) = empty_folder.glob(f"runs/probe_envs-Walk-v0/{script.name}/*")
    assert re.fullmatch(r"1-\d{8}-\d{6}", run.name)

    names = {path.name for path in run.iterdir()}
    (events,) = (name for name in names if name.startswith("events.out.tfevents"))
    files = "args.json environment.json progress.csv checkpoint.pt best.pt models".split()
    assert names == {events, script.path.name, *files}
    assert {path.name for path in (run / "models").iterdir()} == {"0.pt", "128.pt", "256.pt", "384.pt"}
    assert (run / script.path.name).read_bytes() == script.path.read_bytes()
    given = json.loads(json.dumps(asdict(script.args("")), default=list))
    saved = json.loads((run / "args.json").read_text())
    unset = {name for name, value in given.items() if value is None}  # the script may write what it chose
    assert given.keys() == saved.keys() and {name for name in given if given[name] != saved[name]} <= unset
    environment = json.loads((run / "environment.json").read_text())
    assert environment["command"] == [script.path.name, *flags]
    assert environment["torch"] == torch.__version__
    assert environment.keys() >= {"python", "gymnasium", "numpy", "device", "git_commit", "git_dirty"}
    assert re.search(r"^step 384/384 \d+ steps/s return -?[\d.]+ evaluation -?[\d.]+$", done.stdout, re.M)
    same_run(run, plain[0])  # another process, the same numbers


def test_train_returns_the_returns_of_the_last_evaluation(script, plain):
    folder, returns = plain
    assert isinstance(returns, np.ndarray) and returns.shape == (2,)
    last = progress(folder)[-1]
    assert last["step"] == "384"
    assert float(last["eval/return_mean"]) == returns.mean()
    assert float(last["eval/return_min"]) == returns.min() < returns.max() == float(last["eval/return_max"])


def test_tensorboard_and_csv_agree(script, plain):
    curves = points(plain[0])
    rows = progress(plain[0])
    for tag, curve in curves.items():
        if not tag.startswith("train/"):
            table = [(int(row["step"]), float(row[tag])) for row in rows if tag in row]
            assert [step for step, _ in table] == [step for step, _ in curve]
            assert np.allclose([value for _, value in table], [value for _, value in curve], rtol=1e-6)
    assert {tag for row in rows for tag in row} == curves.keys() | {"step"}


def test_same_seed_same_numbers_and_another_seed_others(script, plain):
    script.train("run")
    same_run("run", plain[0])
    script.train("other", seed=2)
    losses = [tag for tag in progress()[-1] if tag.startswith(("loss/", "reward/"))]
    assert losses
    assert all(points("other")[tag] != points("run")[tag] for tag in losses)
    assert not equal(checkpoint("other")["agent"], checkpoint("run")["agent"])


def test_environments_in_processes_give_the_same_numbers(script, plain):
    script.train("run", async_envs=True)
    same_run("run", plain[0])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_steps_and_episodes_are_counted_as_they_happen(script, num_envs):
    """total_timesteps counts transitions; logged returns are of whole episodes, also across checkpoints."""
    if script.whole_episodes:
        pytest.skip("plays whole episodes: tests/test_reinforce.py and tests/test_es.py count them")
    boundary = script.env("Boundary")
    script.train("run", num_envs=num_envs, num_steps=64 // num_envs, num_minibatches=1, **boundary)
    steps = [step for step in probe_envs.Boundary.steps if not step[0]]
    total = checkpoint()["run"]["env_steps"]
    assert len(steps) == total and 384 <= total < 384 + 64
    truth = []
    for count, (_, number, episode, t, _, _) in enumerate(steps, start=1):
        if t == probe_envs.boundary_length(number, episode):
            at = math.ceil(count / num_envs) * num_envs
            truth.append((at, probe_envs.boundary_return(number, episode), t))
    assert len(truth) > 20
    assert points()["train/episode_return"] == [(at, return_) for at, return_, _ in truth]
    assert points()["train/episode_length"] == [(at, length) for at, _, length in truth]


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_changes_nothing_of_the_training(script):
    script.train("often", eval_every=64)
    script.train("last", eval_every=0)
    trained = [
        [{k: v for k, v in row.items() if k[:5] != "eval/"} for row in progress(r)] for r in ("often", "last")
    ]
    assert trained[0][1:] == trained[1]  # the first row has only the evaluation at step 0
    assert equal(checkpoint("often")["agent"], checkpoint("last")["agent"])
    assert [row["step"] for row in progress("last") if "eval/return_mean" in row] == ["384"]


@pytest.mark.parametrize("what", ["", "/checkpoint.pt", "/models/384.pt"])
def test_evaluate_repeats_the_last_evaluation(script, plain, capsys, what):
    folder, returns = plain
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert script.main("--evaluate", f"{folder}{what}") == 0
    episodes = [f"episode {i} return {r:.1f}" for i, r in enumerate(returns, start=1)]
    m, s, low, high = returns.mean(), returns.std(), returns.min(), returns.max()
    line = f"return mean {m:.5g} std {s:.5g} min {low:.5g} max {high:.5g} over 2 episodes"
    assert [said for said in capsys.readouterr().out.splitlines() if "return" in said] == [*episodes, line]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    args = script.module.parse_args(["--evaluate", f"{folder}{what}"])
    assert np.array_equal(script.module.train(args), returns)


def test_best_is_the_model_with_the_best_evaluation(script, plain, monkeypatch):
    marks = iter([1.0, 3.0, 2.0, 3.0])
    real = script.module.evaluate

    def evaluate(*args):
        scores = real(*args)
        scores["returns"][:] = next(marks)
        return scores

    monkeypatch.setattr(script.module, "evaluate", evaluate)
    script.train("run")
    assert equal(checkpoint("run", "best.pt"), checkpoint("run", "models/128.pt"))
    assert not equal(checkpoint("run", "best.pt"), checkpoint("run", "models/384.pt"))
    assert checkpoint("run")["run"]["best"] == 3


def test_stop_return_stops(script, monkeypatch):
    real, calls = script.module.evaluate, []

    def evaluate(*args):
        calls.append(real(*args))
        calls[-1]["returns"][:] = len(calls)
        return calls[-1]

    monkeypatch.setattr(script.module, "evaluate", evaluate)
    returns = script.train("run", stop_return=3.0)
    assert returns.tolist() == [3, 3]
    assert progress("run")[-1]["step"] == "256"
    assert checkpoint("run")["run"]["env_steps"] == 256
    age()
    returns = script.resume("run")  # there is nothing left to do
    assert returns.tolist() == [4, 4] and progress("run")[-1]["step"] == "256"
    script.resume("run", stop_return=None)
    assert progress("run")[-1]["step"] == "384"


def test_success_rate(script):
    script.train("run", eval_episodes=4, **script.env("Success"))
    assert progress()[-1]["eval/success_rate"] == "0.5"
    assert progress()[-1]["eval/termination_rate"] == "1.0"


def film(path: Path) -> list[float]:
    """Brightness of each frame."""
    video, frames = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        assert read[1].shape == (48, 64, 3)
        frames.append(float(read[1].mean()))
    return frames


def test_video_has_every_frame_of_the_first_episode(script):
    """The first of three environments plays the shortest episode."""
    length = probe_envs.boundary_length(number=script.module.EVALUATION_SEED % 100, episode=0)
    script.train("run", capture_video=True, eval_episodes=3, **script.env("Boundary"))
    assert float(progress()[-1]["eval/length_mean"]) > length
    steps = [row["step"] for row in progress() if "eval/return_mean" in row]
    assert len(steps) >= 4 and (steps == ["0", "128", "256", "384"] or script.whole_episodes)
    trained = {Path(f"run/videos/{step}.mp4") for step in steps}
    assert set(Path("run/videos").iterdir()) == trained
    assert script.main("--evaluate", "run", "--capture-video") == 0
    (evaluated,) = set(Path("run/videos").iterdir()) - trained  # the films of the training stay
    for path in (*trained, evaluated):
        frames = film(path)
        assert len(frames) == length + 1  # and the one of the reset
        assert np.abs(np.array(frames) - 10 * np.arange(length + 1)).max() < 8  # frame t is grey 10 t


# -------------------------------------------------------------------------------- checkpoints, kills, signals
def test_checkpoints_are_safe_to_load(script, plain):
    files = sorted(plain[0].rglob("*.pt"))
    assert len(files) == 6
    for path in files:
        assert "agent" in torch.load(path, map_location="cpu", weights_only=True)
    assert not list(plain[0].rglob("*.part"))


def test_three_arms_of_resume(script, plain, monkeypatch):
    """Uninterrupted equals killed and resumed, bit for bit, and differs from a cold start at that step."""
    walk = script.env("Walk")
    kwargs = json.loads(walk["env_kwargs"]) | {"signal": "SIGKILL", "after": 250}
    code = wait(fork(lambda: script.train("run", env_id=walk["env_id"], env_kwargs=json.dumps(kwargs))))
    assert code == -signal.SIGKILL
    assert checkpoint()["run"]["env_steps"] == 128
    assert progress()[-1]["step"] == "192"  # is done again
    shutil.copytree("run", "cold")
    resume = dict(env_kwargs=walk["env_kwargs"])
    age("run")
    assert np.array_equal(script.resume("run", **resume), plain[1])
    same_run("run", plain[0])

    counters = checkpoint("cold")["run"]
    with monkeypatch.context() as patch:
        patch.setattr(script.module.Run, "load", lambda run, _: run.load_state_dict(counters))
        script.resume("cold", **resume)
    after = [[row for row in progress(folder) if int(row["step"]) > 128] for folder in ("cold", "run")]
    assert len(after[0]) == len(after[1]) == 4
    assert all(one != two for one, two in zip(*after, strict=True))
    assert not equal(checkpoint("cold")["agent"], checkpoint("run")["agent"])


def kill_here(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(monkeypatch, module, moment):
    """Kills this process in the middle of the second checkpoint or of the row that follows it."""
    saves = []
    real_save, real_fsync, real_replace = torch.save, os.fsync, Path.replace
    real_write = RecordWriter.write

    def save(state, file):
        saves.append("run" in state)
        if moment == "save" and sum(saves) == 2 and saves[-1]:
            file.write(b"half")
            file.flush()
            kill_here()
        real_save(state, file)

    def replace(path, target):
        second = Path(target).name == "checkpoint.pt" and sum(saves) == 2
        if moment == "before replace" and second:
            kill_here()
        real_replace(path, target)
        if moment in ("after replace", "slow events") and second:
            kill_here()

    def fsync(file):
        if moment == "fsync" and sum(saves) == 2 and saves[-1]:
            kill_here()
        real_fsync(file)

    def add_scalar(writer, tag, *args):
        if moment == "tensorboard" and sum(saves) == 2 and tag.startswith("train/"):
            writer.flush()
            kill_here()
        return type(writer).real_add_scalar(writer, tag, *args)

    def write(writer, data):
        time.sleep(0.003 if moment == "slow events" else 0)
        real_write(writer, data)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(RecordWriter, "write", write)
    monkeypatch.setattr(Path, "replace", replace)
    writer = module.SummaryWriter
    monkeypatch.setattr(writer, "real_add_scalar", writer.add_scalar, raising=False)
    monkeypatch.setattr(writer, "add_scalar", add_scalar)


MOMENTS = ["save", "fsync", "before replace", "after replace", "slow events", "tensorboard"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_saving_and_logging_loses_nothing(script, plain, monkeypatch, moment):
    def killed():
        kill_at(monkeypatch, script.module, moment)
        script.train("run")

    assert wait(fork(killed)) == -signal.SIGKILL
    done = 128 if moment in ("after replace", "slow events", "tensorboard") else 0
    assert checkpoint()["run"]["env_steps"] == done
    age("run")
    script.resume("run")
    same_run("run", plain[0])
    assert not list(Path("run").rglob("*.part"))


def ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_kills_at_random_moments(script):
    """A loadable checkpoint always remains; after many kills all rows and points are as if there was none."""
    long = dict(total_timesteps=2048, checkpoint_every=64, eval_every=256)
    script.train("whole", **long)
    rng, codes, steps, path = random.Random(3), [], [-1], Path("run/checkpoint.pt")
    while steps[-1] < 2048 and len(steps) <= 12:
        age("run")
        pid = fork((lambda: script.resume("run")) if path.exists() else (lambda: script.train("run", **long)))
        for _ in range(rng.randint(2, 5)):  # checkpoints from here, and then a moment
            stamp = path.stat().st_mtime_ns if path.exists() else 0
            while not ended(pid) and (not path.exists() or path.stat().st_mtime_ns == stamp):
                time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        codes.append(wait(pid))
        steps.append(checkpoint()["run"]["env_steps"])
    assert set(codes[:-1]) == {-signal.SIGKILL} and codes[-1] in (-signal.SIGKILL, 0)
    assert steps == sorted(set(steps))
    age("run")
    script.resume("run")
    same_run("run", "whole")


def in_update(script, number, at):
    """Sends the signal at the optimizer step `at` of this process."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps = []

    def hook(*_):
        steps.append(1)
        if len(steps) == at:
            os.kill(os.getpid(), number)

    return register_optimizer_step_pre_hook(hook)


@pytest.mark.parametrize("phase", ["rollout", "update", "evaluation"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_says_how_to_go_on(script, plain, capsys, name, phase):
    if phase == "update" and "torch.optim" not in script.path.read_text():
        pytest.skip("has no optimizer")
    number = getattr(signal, name)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    walk = script.env("Walk")
    kwargs = json.loads(walk["env_kwargs"])
    if phase == "update":
        one_step = not any(map(script.has, ("update_epochs", "value_epochs", "train_every")))
        at = 3 if one_step else 8 if script.has("train_every") else 11
        hook = in_update(script, number, at)
    else:
        second = 43 if script.has("train_every") else 75 if script.has("episodes_per_update") else 45
        after = {"rollout": 170, "evaluation": second}[phase]  # in the second evaluation
        kwargs |= {"signal": name, "phase": phase, "after": after}
    code = script.main(*script.flags("run", env_id=walk["env_id"], env_kwargs=json.dumps(kwargs)))
    if phase == "update":
        hook.remove()
    assert code == 128 + number
    saved = r"stopped at step (\d+); run has the checkpoint of step \1"
    line = rf"{name}: {saved}; to go on: python {script.path.name} --resume run\n"
    step = int(re.fullmatch(line, capsys.readouterr().err)[1])
    step_by_step = script.step_by_step
    stops = range(170 if phase == "rollout" else 64, 193) if step_by_step else (192,)
    assert step in ((128, 256) if phase == "evaluation" else stops)
    assert "eval/return_mean" not in progress()[-1]
    assert checkpoint()["run"]["env_steps"] == step and progress()[-1]["step"] == str(step)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers

    age("run")
    script.resume("run", env_kwargs=walk["env_kwargs"])
    if not step_by_step:  # else the signal costs a row of its own
        assert [row["step"] for row in progress()] == [row["step"] for row in progress(plain[0])]
    evaluated = [[row["step"] for row in progress(f) if "eval/return_mean" in row] for f in ("run", plain[0])]
    assert evaluated[0] == evaluated[1]
    same = lambda at: at < step if step_by_step else at <= step
    until = [row for row in progress() if same(int(row["step"]))]
    assert until and until == progress(plain[0])[: len(until)]
    curves, whole = points(), points(plain[0])
    for tag in curves:
        assert [p for p in curves[tag] if same(p[0])] == [p for p in whole[tag] if same(p[0])]
        # Episodes differ: a new segment starts at the checkpoint.
        if not tag.startswith("train/") and not step_by_step:
            assert [p[0] for p in curves[tag]] == [p[0] for p in whole[tag]]


def test_a_signal_while_a_row_is_written_saves_at_the_step_it_names(script, monkeypatch, capsys):
    """Where this call has decided already not to save."""
    real, late = script.module.Run.write_row, []

    def write_row(run):
        real(run)
        if not late and run.env_steps > run.saved_at >= 0:
            late.append(run.env_steps)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(script.module.Run, "write_row", write_row)
    assert script.main(*script.flags("run", checkpoint_every=10_000)) == 128 + signal.SIGTERM
    step = int(re.search(r"SIGTERM: stopped at step (\d+);", capsys.readouterr().err)[1])
    assert checkpoint()["run"]["env_steps"] == step > late[0]


def test_a_second_interrupt_ends_at_once(script):
    walk = script.env("Walk")
    kwargs = json.loads(walk["env_kwargs"]) | {"signal": "SIGINT", "after": 170, "times": 2}
    code = wait(fork(lambda: script.train("run", env_id=walk["env_id"], env_kwargs=json.dumps(kwargs))))
    assert code == 128 + signal.SIGINT
    assert checkpoint()["run"]["env_steps"] == 128


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("write failed")])
def test_a_full_disk_costs_a_warning(script, plain, monkeypatch, capsys, error):
    real, saves = torch.save, []

    def save(state, file):
        saves.append("run" in state)
        if sum(saves) >= 3:
            file.write(b"half of it")
            raise error
        real(state, file)

    monkeypatch.setattr(torch, "save", save)

    def stop(run):
        run.writer.close()  # its thread must not outlive the test's folder
        raise KeyboardInterrupt

    monkeypatch.setattr(script.module.Run, "close", stop)
    with pytest.raises(KeyboardInterrupt):
        script.train("run")  # the third checkpoint fails, and the fourth
    warning = capsys.readouterr().err
    assert "warning: run/checkpoint.pt was not saved, training goes on: " in warning and str(error) in warning
    assert checkpoint()["run"]["env_steps"] == 128
    assert not list(Path("run").rglob("*.part"))
    assert progress()[-1]["step"] == "384"  # and the training went on


def test_a_row_that_a_full_disk_refused_is_written_with_the_next(script, plain, monkeypatch, capsys):
    real, refused = Path.open, []

    def open_unless_full(path, mode="r", *args, **kwargs):
        if path.name == "progress.csv" and mode == "a" and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_unless_full)
    script.train("run")
    assert (
        refused and "warning: run/progress.csv was not written, training goes on: " in capsys.readouterr().err
    )
    assert progress("run") == progress(plain[0])


BROKEN_FILES = {
    "cut": lambda whole: whole[: len(whole) // 2], "empty": lambda whole: b"", "text": lambda whole: b"hello",
    "flipped": lambda whole: whole[:2000] + bytes(200) + whole[2200:],
    "foreign": lambda whole: pickled({"a": 1}), "unsafe": lambda whole: pickled(Path("x")),
    "list": lambda whole: pickled([1, 2]), "number": lambda whole: pickled(1),
    "tensor": lambda whole: pickled(torch.zeros(2)), "shallow": lambda whole: pickled({"agent": 1}),
}  # fmt: skip


def pickled(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("damage", BROKEN_FILES)
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_damaged_checkpoint_is_refused_in_one_line(script, plain, one_line, damage, flag):
    shutil.copytree(plain[0], "run")
    whole = Path("run/checkpoint.pt").read_bytes()
    Path("run/checkpoint.pt").write_bytes(BROKEN_FILES[damage](whole))
    before = {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    assert "run/checkpoint.pt" in one_line(flag, "run")
    assert {path: path.read_bytes() for path in Path("run").rglob("*.*")} == before


def test_resume_with_more_steps_goes_on(script, plain):
    shutil.copytree(plain[0], "run")
    assert script.main("--resume", "run", "--total-timesteps", "512") == 0
    assert progress()[: len(progress(plain[0]))] == progress(plain[0])
    assert [row["step"] for row in progress()[-2:]] == ["448", "512"]
    assert checkpoint()["run"]["env_steps"] == 512
    assert json.loads(Path("run/args.json").read_text())["total_timesteps"] == 512
    steps = [step for step, _ in points()["eval/return_mean"]]
    assert steps == [0, 128, 256, 384, 512]


# --------------------------------------------------------------------------------------------------- mistakes
@pytest.fixture
def one_line(script, capfd, monkeypatch):
    """Runs main with wrong input: exit code 2 and exactly one line on stderr, which it returns."""

    def run(*argv) -> str:
        def show(message, category, filename, number, file=None, line=None):
            sys.stderr.write(warnings.formatwarning(message, category, filename, number, line))

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            monkeypatch.setattr(warnings, "showwarning", show)
            monkeypatch.setattr(script.module.Run, "proceed", lambda *_: pytest.fail("the training started"))
            capfd.readouterr()
            code = script.main(*argv)
        said = capfd.readouterr().err
        assert code == 2, said
        assert said.startswith(f"{script.path.name}: ") and said.count("\n") == 1, said
        assert "Traceback" not in said and len(said) < 400
        return said

    return run


def spaces(**kwargs):
    return ["--env-id", "probe_envs:Spaces-v0", "--env-kwargs", json.dumps(kwargs)]


WRONG = {
    "unknown environment": (["--env-id", "CartPool-v1"], "CartPool-v1 CartPole"),
    "unknown module": (["--env-id", "no_such_module:Env-v0"], "no_such_module"),
    "unknown environment of a module": (["--env-id", "probe_envs:Nothing-v0"], "Nothing"),
    "unknown Atari game": (["--env-id", "ALE/Nothing-v5"], "ALE/Nothing-v5"),
    "malformed id": (["--env-id", "Cart Pole!"], "Cart Pole!"),
    "wrong env kwargs": (["--env-id", "CartPole-v1", "--env-kwargs", '{"wind": 3}'], "wind --env-kwargs"),
    "env kwargs are no JSON": (["--env-kwargs", "{wind: 3}"], "--env-kwargs"),
    "env kwargs are a number": (["--env-kwargs", "3"], "--env-kwargs"),
    "env kwargs are a list": (["--env-kwargs", '["abc"]'], "--env-kwargs object"),
    "env kwargs are an empty list": (["--env-kwargs", "[]"], "--env-kwargs object"),
    "env kwargs that it does not find": (
        ["--env-id", "FrozenLake-v1", "--env-kwargs", '{"map_name": "9x9"}'],
        "FrozenLake-v1 9x9",
    ),
    "Atari in colour": (["--env-id", "ALE/Pong-v5", "--env-kwargs", '{"grayscale": false}'], "grayscale"),
    "folder that cannot be made": (["--run-dir", "/dev/null/run"], "--run-dir /dev/null/run"),
    "unknown flag": (["--lerning-rate", "1"], "--lerning-rate"),
    "flag without value": (["--seed"], "--seed"),
    "word for a number": (["--seed", "one"], "--seed one"),
    "fraction for an integer": (["--total-timesteps", "1e5"], "--total-timesteps 1e5"),
    "unknown choice": (["--device", "tpu"], "--device tpu cpu cuda"),
    "stray word": (["CartPole-v1"], "CartPole-v1"),
    "no steps": (["--total-timesteps", "0"], "--total-timesteps at least 1"),
    "negative steps": (["--total-timesteps", "-5"], "--total-timesteps at least 1"),
    "no environments": (["--num-envs", "0"], "--num-envs at least 1"),
    "no episodes": (["--eval-episodes", "0"], "--eval-episodes at least 1"),
    "negative interval": (["--eval-every", "-1"], "--eval-every at least 0"),
    "negative learning rate": (["--learning-rate", "-0.1"], "--learning-rate at least 0"),
    "learning rate is nan": (["--learning-rate", "nan"], "--learning-rate nan"),
    "negative seed": (["--seed", "-1"], "--seed at least 0"),
    "gamma above 1": (["--gamma", "1.01"], "--gamma 1.01 between 0 and 1"),
    "no layer": (["--hidden-sizes"], "--hidden-sizes"),
    "empty layer": (["--hidden-sizes", "8", "0"], "--hidden-sizes at least 1"),
    "minibatches that do not divide": (
        ["--num-envs", "2", "--num-steps", "33", "--num-minibatches", "4"],
        "--num-minibatches divide 66",
    ),
    "CUDA without a GPU": (["--device", "cuda"], "--device cuda cpu"),
    "resume of nothing": (["--resume", "runs/none"], "runs/none args.json"),
    "evaluate of nothing": (["--evaluate", "runs/none/best.pt"], "runs/none args.json"),
    "stop return without evaluations": (
        ["--stop-return", "9", "--eval-every", "0"],
        "--stop-return --eval-every",
    ),
    "wandb is missing": (["--track", "wandb"], "--track wandb pip install wandb"),
    "trackio is missing": (["--track", "trackio"], "--track trackio pip install trackio"),
    "render without display": (["--render"], "--render display --capture-video"),
    "image in a Dict": (spaces(obs="dict_image"), "Spaces-v0 image Dict"),
    "image in a Dict in a Dict": (spaces(obs="nested_image"), "Spaces-v0 image Dict"),
    "sequence observations": (spaces(obs="sequence"), "Spaces-v0 Sequence Box"),
    "text observations": (spaces(obs="text"), "Spaces-v0 Text Box"),
    "Dict actions": (spaces(action="dict"), "Spaces-v0 Dict Discrete Box"),
    "text actions": (spaces(action="text"), "Spaces-v0 Text Discrete Box"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_input_ends_in_one_clear_line(script, one_line, empty_folder, monkeypatch, mistake):
    argv, words = WRONG[mistake]
    for flag in argv:
        if flag.startswith("--") and flag != "--lerning-rate" and not script.has(flag[2:].replace("-", "_")):
            pytest.skip(f"{script.name} has no {flag}")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    find = script.module.importlib.util.find_spec
    missing = lambda name: None if name in ("wandb", "trackio") else find(name)
    monkeypatch.setattr(script.module.importlib.util, "find_spec", missing)
    said = one_line(*argv)
    for word in words.split():
        assert word in said, f"{word!r} is not in {said!r}"
    assert not list(empty_folder.iterdir())


def test_a_folder_in_use_is_refused(script, one_line, empty_folder):
    (empty_folder / "full").mkdir()
    (empty_folder / "full" / "notes.txt").write_text("mine")
    said = one_line(*script.flags("full"))
    assert "full" in said and "--run-dir" in said and "--resume" in said
    assert [path.name for path in empty_folder.rglob("*")] == ["full", "notes.txt"]


def test_resume_needs_a_whole_run(script, plain, one_line, empty_folder):
    shutil.copytree(plain[0], "run")
    Path("run/checkpoint.pt").unlink()
    assert "run/checkpoint.pt" in one_line("--resume", "run")
    assert "run/checkpoint.pt" in one_line("--evaluate", "run")
    assert "run/none.pt" in one_line("--evaluate", "run/none.pt")
    Path("run/args.json").write_text("{")
    assert "run/args.json" in one_line("--resume", "run")
    Path("run/args.json").write_text('{"no_such_field": 1}')
    assert "run/args.json" in one_line("--resume", "run")


def test_resume_and_evaluate_exclude_each_other(script, plain, one_line):
    said = one_line("--resume", plain[0], "--evaluate", plain[0])
    assert "--resume" in said and "--evaluate" in said


def test_a_checkpoint_of_another_network_is_refused(script, plain, one_line):
    if not script.has("hidden_sizes"):
        pytest.skip("has no layers to change")
    shutil.copytree(plain[0], "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    assert "run/checkpoint.pt" in one_line("--resume", "run", "--hidden-sizes", "16")
    assert "run/checkpoint.pt" in one_line("--evaluate", "run", "--hidden-sizes", "8", "8")
    assert {path: path.read_bytes() for path in Path("run").rglob("*.*")} == before


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_not_finite_input_stops_the_run(script, capsys, what):
    broken = script.env("Broken", what=what, after=200)
    assert script.main(*script.flags("run", **broken)) == 1
    said = capsys.readouterr().err
    at = "(20[1-9]|2[1-4].)" if script.step_by_step else 256  # at that step or at the end of the rollout
    assert re.fullmatch(
        rf"{script.path.name}: {what} is not finite at step {at}: .* run has the checkpoint of step 128\n",
        said,
    )
    state = checkpoint()
    assert state["run"]["env_steps"] == 128
    tensors = [x for x in state["agent"].values() if isinstance(x, torch.Tensor)]
    assert tensors and all(x.isfinite().all() for x in tensors)
    assert [row["step"] for row in progress()] == ["0", "64", "128", "192"]
    learning = [tag for tag in points() if tag.startswith(("loss/", "grad/"))]
    assert [step for step, _ in points()[learning[0]]] == [64, 128, 192]
    probe_envs.Broken.steps = -1000  # healed: the run goes on
    script.resume("run")
    assert progress()[-1]["step"] == "384"


def test_not_finite_loss_stops_the_run(script, capsys):
    """Gradients turn to NaN at one optimizer step: the name of what is not finite and the step are said."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if "torch.optim" not in script.path.read_text():
        pytest.skip("has no optimizer")
    steps = []

    def spoil(optimizer, *_):
        steps.append(1)
        several = any(map(script.has, ("update_epochs", "value_epochs", "train_every")))  # steps for each row
        if len(steps) == (14 if several else 3):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.fill_(math.nan)

    hook = register_optimizer_step_pre_hook(spoil)
    try:
        code = script.main(*script.flags("run"))
    finally:  # or the tests after a failure learn NaN too
        hook.remove()
    said = capsys.readouterr().err
    assert code == 1 and said.count("\n") == 1
    names = r"action|(?:loss|grad|policy|q)/\w+"
    where = re.search(rf"({names}) is not finite at step (\d+): .*checkpoint of step (\d+)", said)
    assert where and int(where[3]) <= int(where[2])
    state = checkpoint()
    assert state["run"]["env_steps"] == int(where[3])
    tensors = [x for x in state["agent"].values() if isinstance(x, torch.Tensor)]
    assert tensors and all(x.isfinite().all() for x in tensors)


# ---------------------------------------------------------------------------------- command line and tracking
def test_help_names_every_field(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert script.main("--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    for field, (_, comment) in argument_lines(script.path).items():
        assert f"--{field.replace('_', '-')}" in said
        assert comment in said


def test_precedence_of_the_command_line(script, monkeypatch):
    """Command line > TUNED[env id] > TUNED[family] > Args."""
    tuned = {"classic": dict(seed=5, total_timesteps=7), "CartPole-v1": dict(seed=6)}
    monkeypatch.setattr(script.module, "TUNED", tuned)
    parse = script.module.parse_args
    args = parse(["--env-id", "CartPole-v1"])
    assert (args.seed, args.total_timesteps) == (6, 7)
    assert parse(["--env-id=Acrobot-v1"]).seed == 5
    assert parse(["--env-id", "CartPole-v1", "--seed", "8"]).seed == 8
    assert parse(["--env_id", "Acrobot-v1"]).seed == 5
    assert parse(["--seed=8", "--env-id", "CartPole-v1"]).seed == 8
    plain = parse(["--env-id", "FrozenLake-v1"])
    assert plain == script.module.Args(env_id="FrozenLake-v1")


FAMILIES = {
    "classic": "Acrobot-v1", "toy_text": "FrozenLake-v1", "box2d": "LunarLander-v3", "mujoco": "Walker2d-v5",
    "atari": "ALE/Pong-v5",
}  # fmt: skip


def test_help_shows_the_tuned_values(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    tuned = script.module.TUNED
    assert tuned
    for key, values in tuned.items():
        assert values.keys() <= {field.name for field in fields(script.module.Args)}
        env_id = FAMILIES.get(key, key)
        assert script.main("--help", "--env-id", env_id) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for name, value in (values | tuned.get(env_id, {})).items():
            value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            flag = f"--{name.replace('_', '-')}"
            shown = re.search(rf"{flag}[ ,].*?\(default: (.*?)\)( --| ╰|$)", said)
            assert shown and shown[1].strip("'") == str(value), f"{env_id} {flag}"


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_tracking(script, monkeypatch, service, plain):
    calls = []
    module = ModuleType(service)
    module.__spec__ = object()
    recorder = lambda call: lambda *args, **kwargs: calls.append((call, args, kwargs))
    for name in ("init", "log", "finish"):
        setattr(module, name, recorder(name))
    monkeypatch.setitem(sys.modules, service, module)
    script.train("run", track=service, total_timesteps=256)
    assert [name for name, _, _ in calls] == ["init", *["log"] * 5, "finish"]
    init = calls[0][2]
    assert init["project"] == "plainrl" and init["name"] == "run" and init["config"]["track"] == service
    logs = [(kwargs["step"], args[0]) for name, args, kwargs in calls if name == "log"]
    assert [step for step, _ in logs] == [0, 64, 128, 192, 256]
    for (step, values), row in zip(logs, progress(), strict=True):
        told = {k: str(v) for k, v in values.items() if not k.startswith("speed/")}
        assert told | {"step": str(step)} == row
    calls.clear()
    script.resume("run", total_timesteps=320)
    assert calls[0][0] == "init" and calls[0][2]["resume"] == "allow"
    assert calls[0][2].get("id") == init.get("id")
    assert [kwargs["step"] for name, _, kwargs in calls if name == "log"] == [256, 320]


# ------------------------------------------------------------------------------ what the files say and import
def third_party(path: Path) -> set[str]:
    """Modules outside the standard library that a script imports, also by importlib.import_module("name")."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports from the project"
            found.add(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    if "torch.utils.tensorboard" in found:
        found.add("tensorboard")
    return {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)


def argument_lines(path: Path) -> dict[str, tuple[str, str]]:
    """Fields of Args: name to type and trailing comment."""
    source = path.read_text()
    lines = source.splitlines()
    (args,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    found = {}
    for node in args.body:
        if isinstance(node, ast.AnnAssign):
            comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
            found[node.target.id] = ast.unparse(node.annotation), comment
    return found


def pins() -> dict[str, str]:
    """requirements.txt: package to version."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    lines = [line.split("#")[0].strip() for line in lines if not line.startswith("-")]
    found = {}
    for requirement in map(Requirement, filter(None, lines)):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        (exact,) = requirement.specifier
        assert exact.operator == "==", f"{requirement} is not pinned"
        found[canonicalize_name(requirement.name)] = exact.version
    return found


def script_block(path: Path) -> tuple[str, list[Requirement]]:
    """requires-python and dependencies of the PEP 723 block."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(), re.M)[1]
    text = "\n".join(line[2:] for line in block.splitlines())
    python = re.search(r'requires-python = "(.*)"', text)[1]
    return python, [Requirement(d) for d in re.findall(r'"([^"]+)"', text.partition("dependencies")[2])]


PACKAGES = {"cv2": "opencv-python", "ale_py": "ale-py"}


def test_a_script_needs_only_its_packages(script):
    python, dependencies = script_block(script.path)
    assert python == ">=3.10"
    names = {canonicalize_name(dependency.name) for dependency in dependencies}
    assert names == {PACKAGES.get(module, module) for module in third_party(script.path)}
    pinned = pins()
    for dependency in dependencies:
        version = pinned.get(canonicalize_name(dependency.name))
        assert version, f"{dependency} is not in requirements.txt"
        assert dependency.specifier.contains(version), f"{dependency} against {version} in requirements.txt"


def test_scripts_import_nothing_of_the_project(script):
    project = {path.stem for path in SCRIPTS} | {p.stem for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert not third_party(script.path) & project
    assert not (script.path.parent / "__init__.py").exists()


def test_every_field_has_a_help_text(script):
    lines = argument_lines(script.path)
    assert lines.keys() == {field.name for field in fields(script.module.Args)}
    for name, (_, comment) in lines.items():
        assert comment, f"{name} has no comment"
    for field in fields(script.module.Args):
        assert field.default is not MISSING


def test_equal_fields_have_equal_types_and_help():
    seen = {}
    for path in SCRIPTS:
        for name, (type_, help_) in argument_lines(path).items():
            line = (re.sub(r"Literal\[.*\]", "Literal", type_), help_)  # each has the choices that suit it
            other, first = seen.setdefault(name, (line, path.name))
            assert line == other, f"{name} differs in {first} and {path.name}"


CONTRACT = """seed device compile run_dir resume evaluate checkpoint_every eval_every eval_episodes
    capture_video render track torch_threads env_id env_kwargs num_envs max_episode_steps stop_return
    total_timesteps"""


def test_common_fields_are_there(script):
    """compile and num_envs only where they make sense, so a script may leave those two out."""
    assert set(CONTRACT.split()) - {"compile", "num_envs"} <= argument_lines(script.path).keys()


def documented_metrics() -> set[str]:
    return set(re.findall(r"`([a-z]+/\w+)`", (ROOT / "docs" / "metrics.md").read_text()))


def test_every_metric_is_documented(script, plain):
    written = {tag for row in progress(plain[0]) for tag in row} | points(plain[0]).keys()
    written = written - {"step"} | {"speed/steps_per_second"}
    with (plain[0] / "progress.csv").open() as file:
        header = file.readline().strip().split(",")
    assert set(header) == written | {"step", "wall_time"}
    strings = {n.value for n in ast.walk(ast.parse(script.path.read_text())) if isinstance(n, ast.Constant)}
    families = "loss|policy|q|value|grad|schedule|eval|train|reward|speed"
    named = {s for s in strings if isinstance(s, str) and re.fullmatch(rf"({families})/[a-z_]*[a-z]", s)}
    missing = (written | named) - documented_metrics()
    assert not missing, f"docs/metrics.md lacks {sorted(missing)}"


def test_documentation_is_there(script):
    page = (ROOT / "docs" / f"{script.name}.md").read_text()
    for heading in (
        "Quick facts",
        "Equations",
        "Differences from the paper",
        "Metrics",
        "Results",
        "References",
    ):
        assert re.search(rf"^## .*{heading}", page, re.M), heading
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"algos/{script.name}.py" in row for row in rows)


def test_the_docstring_says_how_to_run(script):
    text = script.module.__doc__
    assert f"python algos/{script.name}.py --env-id " in text
    assert "Differences from the paper" in text
    with redirect_stdout(io.StringIO()) as out:
        assert script.main("--help") == 0
    assert " ".join(text.partition("\n\n")[0].split())[:60] in " ".join(out.getvalue().split())
