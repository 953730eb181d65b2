"""What every script promises, whatever it learns: runs, resumes, stops and stands alone."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import probe_envs
import pytest
import torch
from conftest import (
    ALGOS,
    NAMES,
    ROOT,
    TESTS,
    call_main,
    checkpoint,
    equal,
    flags,
    fork,
    has,
    load_script,
    parts,
    play,
    plays,
    probe,
    progress,
    tiny,
    wait,
    with_data,
)

FAMILIES = {"mujoco": "HalfCheetah-v5", "atari": "ALE/Pong-v5", "toy_text": "Taxi-v4"}


def test_a_run_leaves_what_the_readme_says(script):
    returns = script.train(tiny(script))
    assert returns.shape == (2,) and np.isfinite(returns).all()
    names = {"args.json", "environment.json", "progress.jsonl", "checkpoint.pt", "best.pt", "models"}
    assert names | {f"{script.__name__}.py"} <= set(os.listdir("run"))
    assert any(name.startswith("events.out.tfevents") for name in os.listdir("run"))
    state = checkpoint()
    steps = state["run"]["env_steps"]
    assert steps >= 192 and f"{steps}.pt" in os.listdir("run/models")
    assert checkpoint(name="best.pt")["args"] == state["args"]  # every file carries its arguments
    rows = progress()
    evaluations = [row for row in rows if "eval/return_mean" in row]
    assert [row["step"] for row in evaluations] == sorted({row["step"] for row in evaluations})
    assert evaluations[-1]["eval/return_mean"] == pytest.approx(returns.mean())
    assert any("schedule/learning_rate" in row for row in rows) and any("reward/mean" in row for row in rows)


def test_the_seed_decides_all(script):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.train(tiny(script, folder, seed=seed))
    assert equal(parts("a"), parts("b")) and progress("a") == progress("b")
    assert not equal(parts("a")["agent"], parts("c")["agent"])


def test_killed_and_resumed_equals_uninterrupted_and_not_a_cold_start(script):
    apart = (
        {"log_every": 100} if has(script, "log_every") else {}
    )  # rows begin before a checkpoint and end after
    script.train(tiny(script, "whole", **apart))
    log = script.Run.log

    def log_and_die(run, metrics):
        log(run, metrics)
        if run.env_steps > run.saved_at > 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        script.Run.log = log_and_die
        script.train(tiny(script, "killed", **apart))

    assert wait(fork(killed)) == -signal.SIGKILL
    assert 0 < checkpoint("killed")["run"]["env_steps"] < progress("killed")[-1]["step"] < 192
    script.train(script.parse_args(["--resume", "killed"]))
    assert equal(parts("whole"), parts("killed"))
    assert progress("whole") == progress("killed")
    # A cold start from its weights is another run.
    script.train(replace(tiny(script, "cold"), init_from="killed"))
    assert not equal(parts("whole")["agent"], parts("cold")["agent"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase, after", [("rollout", 104), ("evaluation", 30)])
def test_a_signal_saves_and_says_how_to_go_on(script, number, phase, after, tmp_path):
    args = tiny(script)
    args.env_kwargs |= dict(signal=number.name, phase=phase, after=after)
    out = tmp_path / "out"
    assert wait(fork(lambda: call_main(script, *flags(args)) and sys.exit(128 + number), out)) == 128 + number
    assert "--resume run" in out.read_text()
    steps = checkpoint()["run"]["env_steps"]
    resumed = script.parse_args(["--resume", "run", "--env-kwargs", json.dumps(tiny(script).env_kwargs)])
    kept = phase == "rollout" and plays(script) and not has(script, "population")  # es: whole generations
    assert (100 if kept else 0) <= steps < 192
    assert len(script.train(resumed)) == 2
    assert checkpoint()["run"]["env_steps"] >= 192


def test_help_shows_the_tuned_values(script, capsys):
    env_id = next(iter(script.TUNED))
    key, value = next((k, v) for k, v in script.TUNED[env_id].items() if isinstance(v, int) and v > 1)
    if "-v" not in env_id:  # a family
        env_id = {"mujoco": "HalfCheetah-v5", "atari": "ALE/Pong-v5"}[env_id]
    assert call_main(script, "--env-id", env_id, "--help") == 0
    text = capsys.readouterr().out
    assert f"--{key.replace('_', '-')}" in text and str(value) in text


ALONE = """
import json, os, runpy, sys
import cv2, gymnasium, tensorboard, torch, tyro  # once for all

for name, words in json.loads(sys.argv[1]).items():
    if not (pid := os.fork()):
        os.chdir(name)
        sys.path[0], sys.argv = os.getcwd(), [f"{name}.py", *words]
        for stream in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    os.waitpid(pid, 0)
"""


def test_alone_in_an_empty_folder(empty_folder):
    """One new Python for all of them, which knows nothing of the project."""
    words = {}
    for name in NAMES:
        words[name] = flags(tiny(load_script(name)))
        (empty_folder / name).mkdir()
        shutil.copy(ALGOS / f"{name}.py", empty_folder / name)
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", ALONE, json.dumps(words)], cwd=empty_folder, env=env, check=True)
    for name in NAMES:
        done = (empty_folder / name / "run/checkpoint.pt").exists()
        assert done, f"{name}: {Path(name, 'output.txt').read_text()}"


def test_evaluate_prints_all_statistics(script, capsys):
    script.train(tiny(script))
    capsys.readouterr()
    assert call_main(script, "--evaluate", "run/best.pt", "--eval-episodes", "3") == 0
    line, numbers = capsys.readouterr().out.strip().splitlines()
    told = json.loads(numbers)  # for programs
    names = "return_mean return_std return_min return_max discounted_return_mean length_mean termination_rate"
    assert {"step", "episodes", *(f"eval/{name}" for name in names.split())} <= told.keys()
    returns = np.array(told["returns"])
    assert len(returns) == 3 and returns.mean() == pytest.approx(told["eval/return_mean"])
    assert told["episodes"] == 3 and "eval/success_rate" not in told  # the walk knows no success
    start = f"step {told['step']:,}  return {told['eval/return_mean']:.1f} ± {told['eval/return_std']:.1f} ("
    assert line.startswith(start) and "success" not in line and len(line) < 100


def test_every_tuned_entry_is_valid_and_starts(script, monkeypatch):
    class Started(Exception):
        pass

    def run(args, *_, **__):
        raise Started

    monkeypatch.setattr(script, "Run", run)  # comes after all checks, environments, networks and buffers
    for key, values in script.TUNED.items():
        small = dict(device="cpu") | (dict(num_envs=4) if key == "atari" else {})  # games take long to start
        if has(script, "buffer_size"):
            small["buffer_size"] = 2000
        args = script.make_args(FAMILIES.get(key, key), **small)
        args = with_data(args)
        assert all(getattr(args, name) == value for name, value in values.items() if name not in small)
        with pytest.raises(Started):
            script.train(args)


def test_steps_and_episodes_are_counted_as_they_happened(script):
    """Each row tells the mean of the episodes that ended since the row before; no checkpoint joins two."""
    if not plays(script):
        pytest.skip("its steps are not those of environments")
    script.train(tiny(script, **probe(script, "Boundary"), initial_obs_steps=0))
    at, ended = 0, []
    for evaluates, number, episode, t, _, _ in probe_envs.Boundary.steps:
        at += not evaluates
        if not evaluates and t == probe_envs.boundary_length(number, episode):
            ended.append((at, probe_envs.boundary_return(number, episode), t))
    assert at == checkpoint()["run"]["env_steps"] and len(ended) > 20
    for row in progress():
        now = [episode[1:] for episode in ended if episode[0] <= row["step"]]
        ended = ended[len(now) :]
        told = row.get("train/episode_return"), row.get("train/episode_length")
        assert told == (pytest.approx(np.mean(now, axis=0)) if now else (None, None))


def test_checkpoints_count_the_steps_of_each_environment(script, monkeypatch):
    """With many environments episodes would never finish else: each checkpoint cuts them."""
    if not plays(script):
        pytest.skip("its checkpoints cut no episode")
    at, save = [], script.Run.checkpoint
    monkeypatch.setattr(script.Run, "checkpoint", lambda run: at.append(run.env_steps) or save(run))
    many = dict(
        num_envs=4,
        num_steps=16,
        episodes_per_update=4,
        eval_every=0,
        total_timesteps=1024,
        checkpoint_every=64,
    )
    script.train(tiny(script, **many, meta_batch_size=2, episodes_per_task=2))
    assert [steps // 256 for steps in at] == [0, 1, 2, 3, 4]


def test_a_normalizer_sees_what_is_acted_from(script):
    """Also the observations of resets, and no final one."""
    if not has(script, "normalize_obs"):
        pytest.skip("has no normalizer")
    if script.__name__ == "iql":
        pytest.skip("its normalizer is that of the data set: tests/test_iql.py")
    one = dict(num_envs=1, num_minibatches=1, episodes_per_update=1, initial_obs_steps=0)
    script.train(tiny(script, **probe(script, "Boundary"), **one, validation_share=0.0))
    steps = [step for step in probe_envs.Boundary.steps if not step[0]]
    seen = np.array([[number, episode, t - 1, 0] for _, number, episode, t, _, _ in steps], dtype=float)
    agent = checkpoint()["agent"]
    assert agent["obs_norm.mean"].dtype == agent["obs_norm.var"].dtype == torch.float64
    assert np.allclose(agent["obs_norm.mean"], seen.mean(0)) and np.allclose(
        agent["obs_norm.var"], seen.var(0)
    )


def test_rewards_are_logged_as_the_environment_gave_them(script):
    options = dict(clip_reward=True, reward_scale=0.5, n_step=3, normalize_reward=True)
    script.train(tiny(script, **probe(script, "Ones", pay=3.0), **options))
    rows = [row for row in progress() if "reward/mean" in row]
    assert rows and all(row["reward/mean"] == row.get("reward/max", 3.0) == 3.0 for row in rows)
    assert {row["train/episode_return"] for row in progress() if "train/episode_return" in row} == {30.0}


def test_environments_in_processes_give_the_same_numbers(script):
    script.train(tiny(script, "sync"))
    script.train(tiny(script, "async", async_envs=True))
    assert progress("sync") == progress("async") and equal(parts("sync"), parts("async"))


def test_without_checkpoints_and_evaluations_there_is_one_of_each_at_the_end(script):
    script.train(tiny(script, eval_every=0, checkpoint_every=0))
    (row,) = [row for row in progress() if "eval/return_mean" in row]
    assert row["step"] == checkpoint()["run"]["env_steps"] >= 192


def test_an_environment_that_never_ends_trains_and_is_evaluated(script):
    limits = "eval_max_steps horizon max_steps expert_max_steps max_episode_steps".split()
    few = dict.fromkeys(limits, 50)
    returns = script.train(tiny(script, **probe(script, "Endless"), **few, eval_every=0))
    assert returns.tolist() == [50, 50]


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_a_number_that_is_not_finite_stops_by_name(script, what, capsys):
    if script.__name__ == "q_learning" and what == "observation":
        pytest.skip("a grid has no NaN")
    args = tiny(script, **probe(script, "Broken", what=what, after=250), total_timesteps=2000)
    assert call_main(script, *flags(args)) == 1
    assert "not finite" in capsys.readouterr().err
    saved = checkpoint()
    assert all(torch.isfinite(x).all() for x in saved["agent"].values() if x.is_floating_point())


def test_an_environment_of_the_user_keeps_its_traceback(script):
    with pytest.raises(KeyError, match="a bug of the user"):
        call_main(script, *flags(tiny(script, **probe(script, "Raises"))))


def test_what_is_loaded_in_python_scores_in_the_environment_as_the_run_does(script):
    returns = script.train(tiny(script))
    args, scores = script.Args(**checkpoint()["args"]), []
    for path in ("run", "run/checkpoint.pt"):
        torch.manual_seed(0)  # for a policy that draws what it believes
        scores.append(play(script.load_policy(path), args))
    assert scores[0] == scores[1]
    if script.__name__ not in ("maml", "pearl"):  # these are evaluated after they have adapted
        assert scores[0] == pytest.approx(returns.tolist(), rel=1e-5)


def test_speed_of_a_second_start_is_not_counted_twice(script):
    script.train(tiny(script))
    before = checkpoint()["run"]["seconds"]
    time.sleep(0.3)
    args = script.parse_args(["--resume", "run", "--total-timesteps", "640"])
    script.train(args)
    assert checkpoint()["run"]["seconds"] >= before
    assert [row["step"] for row in progress()] == sorted(row["step"] for row in progress())


def packages(text: str) -> set[str]:
    return {re.match(r"[\w-]+", line)[0] for line in text.splitlines() if line and line[0] not in "#-"}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_lists_the_packages_that_it_imports_and_nothing_of_the_project(name):
    source = (ALGOS / f"{name}.py").read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", source, re.M)[1]
    assert 'requires-python = ">=3.10"' in block
    least = re.search(r"tried with torch (\S+) and", (ROOT / "README.md").read_text())[1]
    assert f'"torch>={least}"' in block
    listed = re.findall(r'"([^"]+)"', block.partition("dependencies")[2])
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("tensorboard" if "tensorboard" in node.module else node.module)
    if "ale_py" in source:  # imported only where it is needed
        names.add("ale-py")
    top = {name.split(".")[0].replace("cv2", "opencv-python") for name in names} - sys.stdlib_module_names
    assert top == packages("\n".join(listed))
    assert top <= packages((ROOT / "requirements.txt").read_text())
