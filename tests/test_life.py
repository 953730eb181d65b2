"""The life of a run: whatever happens, the newest weights are kept and nothing else is left behind."""

import json
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import cv2
import numpy as np
import odd_envs
import pytest
from conftest import ALGOS, TESTS, call_main, checkpoint, flags, fork, has, load_script, plays, probe
from conftest import progress, scripts_with, tiny, wait

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def forget():
    odd_envs.forget()


def surroundings() -> dict:
    """What a training must leave as it was."""
    return {
        "handlers": [signal.getsignal(number) for number in NUMBERS], "path": [x for x in sys.path if x],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "threads": {thread.name for thread in threading.enumerate() if "tqdm" not in type(thread).__module__},
    }  # fmt: skip


def fault(script, what, phase="rollout", after=150, **changes):
    return tiny(script, **probe(script, "Fault", what=what, phase=phase, after=after), **changes)


# ---------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("what, phase, after", [
    ("step", "rollout", 150), ("reset", "rollout", 12), ("step", "evaluation", 45),
    ("reset", "evaluation", 7),
])  # fmt: skip
def test_an_error_keeps_the_newest_weights_and_its_traceback(script, what, phase, after):
    if not plays(script) or script.__name__ in ("maml", "pearl"):
        pytest.skip("its environments are played by another program, or as tasks")
    before, changes = surroundings(), dict(checkpoint_every=10_000, eval_every=128)
    with pytest.raises(RuntimeError, match=f"a bug in {what}"):
        script.train(fault(script, what, phase, after, **changes))
    assert surroundings() == before
    state = checkpoint()
    logged = [row["step"] for row in progress()]
    assert state["run"]["env_steps"] >= max(logged) and state["run"]["env_steps"] > 0
    kwargs = probe(script, "Fault", what="nothing")["env_kwargs"]
    script.train(script.parse_args(["--resume", "run", "--env-kwargs", json.dumps(kwargs)]))


@pytest.mark.parametrize("what", ["step", "exit", "nan", "shape"])
def test_an_error_beside_processes_ends_them_and_the_run(ppo, what):
    before = surroundings()
    with pytest.raises((RuntimeError, EOFError, FloatingPointError, ConnectionError, ValueError)):
        ppo.train(fault(ppo, what, after=40, async_envs=True, eval_every=0))
    assert surroundings() == before and checkpoint()["run"]["env_steps"] > 0


def test_a_mistake_after_processes_were_made_leaves_none(script):
    """One environment in this process tells the spaces; others are made when all is checked."""
    if not has(script, "hidden_sizes"):
        pytest.skip("has no networks")
    before = surroundings()
    args = tiny(script, async_envs=True)
    args.init_from = "nowhere.pt"
    with pytest.raises(script.UsageError, match="nowhere"):
        script.train(args)
    assert surroundings() == before


@pytest.mark.parametrize("what", ["nan", "inf", "obs"])
def test_a_number_that_is_not_finite_is_named_by_its_cause(script, what, capsys):
    if not plays(script) or script.__name__ == "q_learning":
        pytest.skip("plays no environment while it learns, or knows no numbers")
    assert call_main(script, *flags(fault(script, what))) == 1
    cause = "observation[1]" if what == "obs" else "reward"
    assert f"{cause} of environment" in capsys.readouterr().err


def test_a_simulator_of_which_one_may_run_trains_and_is_evaluated(script):
    if not plays(script) or script.__name__ in ("maml", "pearl"):
        pytest.skip("plays several tasks or the environments of another program")
    one = dict(num_envs=1, num_minibatches=1, episodes_per_update=1, eval_every=0, eval_episodes=1)
    assert script.train(tiny(script, **probe(script, "Single"), **one)).tolist() == [10]
    assert odd_envs.Single.running == 0


@pytest.mark.parametrize("kind", odd_envs.Infos.KINDS)
def test_what_is_in_info_stops_no_run_and_success_counts_where_it_is_a_number(ppo, kind, capsys):
    ppo.train(tiny(ppo, **probe(ppo, "Infos", kind=kind), eval_every=0))
    (row,) = [row for row in progress() if "eval/return_mean" in row]
    told = kind in ("none", "late", "array", "bool", "number")
    assert row.get("eval/success_rate") == (1.0 if told else None)
    assert ("success 100%" in capsys.readouterr().out) == told


def test_chosen_numbers_of_info_are_logged_as_means_over_episodes(script):
    if not plays(script):
        pytest.skip("its steps are those of the gradient")
    script.train(
        tiny(script, **probe(script, "Infos", kind="number", length=5), info_keys=("cost", "nothing"))
    )
    rows = [row for row in progress() if "info/cost" in row]
    assert rows and all(row["info/cost"] == 3.0 and row["info/nothing"] == 0 for row in rows)  # of 1 to 5


@pytest.mark.parametrize("kind", odd_envs.Rewards.KINDS)
def test_a_reward_is_a_number_or_refused_by_name(ppo, kind, capsys):
    args = tiny(ppo, **probe(ppo, "Rewards", kind=kind), async_envs=kind in ("array1", "none"))
    if kind in ("none", "str", "array2"):
        assert call_main(ppo, *flags(args)) == 2 and "reward is" in capsys.readouterr().err
    else:
        assert ppo.train(args).tolist() == [10 if "bool" in kind else 20] * 2


@pytest.mark.parametrize("old", ["reset", "step"])
def test_the_interface_of_before_gymnasium_is_refused_by_name(script, old, capsys):
    if not plays(script) or script.__name__ in ("maml", "pearl"):
        pytest.skip("plays the environments of another program, or tasks")
    assert call_main(script, *flags(tiny(script, **probe(script, "OldApi", old=old)))) == 2
    assert f"{old}() must return" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("name", scripts_with("train"))
def test_a_signal_at_any_moment_saves_and_what_follows_is_whole(name):
    """Six random moments a script, in forks; about a hundred together."""
    script, draw = load_script(name), random.Random(name)
    for attempt in range(6):
        folder, number = f"run{attempt}", draw.choice(NUMBERS)
        args = tiny(script, folder, total_timesteps=100_000, eval_every=200, checkpoint_every=200)
        pid = fork(lambda args=args: call_main(script, *flags(args)) and sys.exit(7), Path(f"out{attempt}"))
        while not Path(folder, "checkpoint.pt").exists():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.4))
        os.kill(pid, number)
        assert wait(pid) in (7, 128 + number), Path(f"out{attempt}").read_text()
        state, said = checkpoint(folder), Path(f"out{attempt}").read_text()
        assert (
            f"stopped at step {state['run']['env_steps']:,}, saved" in said and f"--resume {folder}" in said
        )
        scored = [row["step"] for row in progress(folder) if "eval/return_mean" in row]
        printed = [line for line in said.splitlines() if line.startswith("step ")]
        assert len(scored) == len(set(scored)) == len(printed)  # what was cut short is not counted
    steps = max(state["run"]["env_steps"], 200)
    script.train(script.parse_args(["--resume", folder, "--total-timesteps", str(steps)]))
    last = progress(folder)[-1]  # also where the signal cut its evaluation short
    assert last["step"] >= steps and "eval/return_mean" in last


def test_ctrl_c_in_python_saves_raises_and_gives_the_handlers_back(script):
    before = surroundings()
    args = tiny(script, total_timesteps=10**6, eval_every=0)
    for folder, presses in (("once", 1), ("twice", 2)):
        args.run_dir = folder

        def press(saved, times):
            while not saved.exists():
                time.sleep(0.01)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.005)

        thread = threading.Thread(target=press, args=(Path(folder, "checkpoint.pt"), presses))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            script.train(args)
            time.sleep(1)  # for the second one, if the first was enough
        thread.join()
        assert surroundings() == before and checkpoint(folder)


# -------------------------------------------------------------------------------------- from Python and pipes
def test_a_script_pasted_into_a_cell_trains_and_keeps_its_source(monkeypatch):
    source = (ALGOS / "ppo.py").read_text().replace('if __name__ == "__main__":\n    main()\n', "")
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(source), None, source.splitlines(True), "<cell 1>"))
    cell = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    exec(compile(source, "<cell 1>", "exec"), cell.__dict__)
    cell.train(tiny(load_script("ppo")))
    assert Path("run/notebook.py").read_text() == source


def test_a_missing_console_and_a_closed_pipe_stop_no_training(ppo, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None), patch.setattr(sys, "stderr", None)
        ppo.train(tiny(ppo, "silent"))

    def closed():
        read, write = os.pipe()
        os.close(read)
        sys.stdout = os.fdopen(write, "w")
        ppo.train(tiny(ppo, "closed"))

    assert wait(fork(closed, tmp_path / "out")) == 0, (tmp_path / "out").read_text()
    assert checkpoint("silent")["run"]["env_steps"] == checkpoint("closed")["run"]["env_steps"] == 384


def test_help_through_head_and_without_docstrings_ends_quietly():
    command = f"set -o pipefail; {sys.executable} -OO {ALGOS}/ppo.py --help | head -1"
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert "usage" in done.stdout and not done.stderr


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(ppo, monkeypatch):
    monkeypatch.setattr(ppo.time, "strftime", lambda *_: "now")
    for _ in range(3):
        ppo.train(tiny(ppo, "", total_timesteps=64, eval_every=0))
    assert len({path.parent for path in Path("runs").rglob("checkpoint.pt")}) == 3


def test_names_of_yesterday_and_seeds_out_of_range_end_in_one_line(ppo, capsys):
    for words, hint in (
        (["--env-id", "BreakoutNoFrameskip-v4"], "ALE/Breakout-v5"),
        (["--env-id", "Pendulum-v0"], "Pendulum-v1"),
        (["--seed", "-1"], "--seed -1"), (["--eval-seed", "4294967296"], "--eval-seed 4294967296"),
    ):  # fmt: skip
        assert call_main(ppo, *words) == 2 and hint in capsys.readouterr().err


def test_integers_stand_for_real_numbers(ppo):
    args = tiny(ppo, learning_rate=1, log_std_init=0, anneal_lr=True, **probe(ppo, "Walk", actions="box"))
    ppo.train(args)
    rates = [row["schedule/learning_rate"] for row in progress() if "schedule/learning_rate" in row]
    assert 0 < min(rates) < 1


# ---------------------------------------------------------------------------------------------------- videos
@pytest.mark.parametrize("kind", ["rgb", "rgba", "gray", "gray1", "odd", "tiny", "grow"])
def test_a_video_has_a_frame_for_each_step_whatever_kind_they_are(ppo, kind):
    ppo.train(
        tiny(ppo, **probe(ppo, "Films", render=kind), capture_video=True, total_timesteps=64, eval_every=0)
    )
    video, shots = cv2.VideoCapture("run/videos/64.webm"), []
    while (shot := video.read())[0]:
        shots.append(shot[1].mean())
    assert len(shots) == 10 and (kind == "grow" or np.diff(shots).min() > 10)


@pytest.mark.parametrize("kind", ["none", "float", "flat"])
def test_what_is_no_image_is_refused_before_training(ppo, kind, capsys):
    args = tiny(ppo, **probe(ppo, "Films", render=kind), capture_video=True)
    assert call_main(ppo, *flags(args)) == 2 and "cannot be filmed" in capsys.readouterr().err
