"""What every script promises, whatever it learns: runs, resumes, stops and stands alone."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import probe_envs
import pytest
import torch
from conftest import (
    NAMES,
    call_main,
    checkpoint,
    command,
    equal,
    flags,
    fork,
    has,
    load_script,
    parts,
    progress,
)
from conftest import tiny, wait


def test_a_run_leaves_what_the_readme_says(script):
    returns = script.train(tiny(script))
    assert returns.shape == (2,) and np.isfinite(returns).all()
    names = {"args.json", "environment.json", "progress.jsonl", "checkpoint.pt", "best.pt", "models"}
    assert names | {f"{script.__name__}.py"} <= set(os.listdir("run"))
    assert any(name.startswith("events.out.tfevents") for name in os.listdir("run"))
    state = checkpoint()
    steps = state["run"]["env_steps"]
    assert steps >= 384 and f"{steps}.pt" in os.listdir("run/models")
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
    script.train(tiny(script, "whole"))
    seen = []

    def stop_early():
        log = script.Run.log

        def log_and_die(self, metrics):
            log(self, metrics)
            seen.append(self.env_steps)
            if self.env_steps >= 256 and self.saved_at > 0:
                os.kill(os.getpid(), signal.SIGKILL)

        script.Run.log = log_and_die
        script.train(tiny(script, "killed"))

    assert wait(fork(stop_early)) == -signal.SIGKILL
    saved = checkpoint("killed")["run"]["env_steps"]
    assert 0 < saved < 384 + 256
    script.train(script.parse_args(["--resume", "killed"]))
    assert equal(parts("whole"), parts("killed"))
    assert progress("whole") == progress("killed")
    # A cold start from its weights is another run.
    script.train(replace(tiny(script, "cold"), init_from="killed"))
    assert not equal(parts("whole")["agent"], parts("cold")["agent"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase, after", [("rollout", 200), ("evaluation", 60)])
def test_a_signal_saves_and_says_how_to_go_on(script, number, phase, after, tmp_path):
    args = tiny(script)
    args.env_kwargs |= dict(signal=number.name, phase=phase, after=after)
    out = tmp_path / "out"
    assert wait(fork(lambda: call_main(script, *flags(args)) and sys.exit(128 + number), out)) == 128 + number
    assert "--resume run" in out.read_text()
    steps = checkpoint()["run"]["env_steps"]
    resumed = script.parse_args(["--resume", "run", "--env-kwargs", json.dumps(tiny(script).env_kwargs)])
    assert steps < 3000 and len(script.train(resumed)) == 2
    assert checkpoint()["run"]["env_steps"] >= 384


def test_help_shows_the_tuned_values(script, capsys):
    env_id = next(iter(script.TUNED))
    key, value = next((k, v) for k, v in script.TUNED[env_id].items() if isinstance(v, int) and v > 1)
    if "-v" not in env_id:  # a family
        env_id = {"mujoco": "HalfCheetah-v5", "atari": "ALE/Pong-v5"}[env_id]
    assert call_main(script, "--env-id", env_id, "--help") == 0
    text = capsys.readouterr().out
    assert f"--{key.replace('_', '-')}" in text and str(value) in text


@pytest.mark.parametrize("name", NAMES)
def test_alone_in_an_empty_folder(name, empty_folder):
    script = load_script(name)
    done = command(name, empty_folder, *flags(tiny(script)))
    assert done.returncode == 0, done.stderr
    assert (empty_folder / "run" / f"{name}.py").exists()


def test_evaluate_prints_all_statistics(script, capsys):
    script.train(tiny(script))
    capsys.readouterr()
    assert call_main(script, "--evaluate", "run/best.pt", "--eval-episodes", "3") == 0
    out = capsys.readouterr().out
    assert "over 3 episodes" in out
    for word in ("return_mean", "return_std", "return_min", "return_max", "discounted_return_mean",
                 "length_mean", "termination_rate", "success_rate"):  # fmt: skip
        assert word in out


def test_every_tuned_entry_makes_valid_arguments(script):
    families = {"mujoco": "HalfCheetah-v5", "atari": "ALE/Pong-v5", "toy_text": "Taxi-v4"}
    for key in script.TUNED:
        args = script.make_args(families.get(key, key), device="cpu")
        script.set_up(args)
        for name, value in script.TUNED[key].items():
            assert getattr(args, name) == value


def test_no_transition_joins_two_episodes_and_returns_are_true(script):
    if script.__name__ in ("q_learning", "es"):
        pytest.skip("they learn from a vector of indices, and from returns alone")
    actions = "box" if script.__name__ in ("ddpg_td3", "sac") else "discrete"
    args = tiny(script, env_id="probe_envs:Boundary-v0", env_kwargs={"actions": actions}, normalize_obs=False)
    script.train(replace(args, checkpoint_every=0))
    truth = {
        number: [probe_envs.boundary_return(number, episode) for episode in range(200)]
        for number in range(100)
    }
    rows = [row for row in progress() if "train/episode_return" in row]
    assert rows
    low, high = min(map(min, truth.values())), max(map(max, truth.values()))
    assert all(low <= row["train/episode_return"] <= high for row in rows)
    assert all(3 <= row["train/episode_length"] <= 9 for row in rows)
    counted = checkpoint()["run"]["env_steps"]
    assert counted == sum(not step[0] for step in probe_envs.Boundary.steps)  # every step simulated, once


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_a_number_that_is_not_finite_stops_by_name(script, what, capsys):
    if script.__name__ == "q_learning" and what == "observation":
        pytest.skip("a grid has no NaN")
    actions = "box" if script.__name__ in ("ddpg_td3", "sac") else "discrete"
    args = tiny(script, env_id="probe_envs:Broken-v0", env_kwargs=dict(actions=actions, what=what, after=250))
    if script.__name__ == "q_learning":
        args = replace(args, obs_low=(-5.0,), obs_high=(5.0,)) if has(script, "obs_low") else args
    assert call_main(script, *flags(replace(args, total_timesteps=2000))) == 1
    assert "not finite" in capsys.readouterr().err
    saved = checkpoint()
    assert all(torch.isfinite(x).all() for x in saved["agent"].values() if x.is_floating_point())


def test_an_environment_of_the_user_keeps_its_traceback(script):
    actions = "box" if script.__name__ in ("ddpg_td3", "sac") else "discrete"
    args = tiny(script, env_id="probe_envs:Raises-v0", env_kwargs={"actions": actions})
    if script.__name__ == "q_learning":
        args = replace(args, obs_low=(-5.0,), obs_high=(5.0,)) if has(script, "obs_low") else args
    with pytest.raises(KeyError, match="a bug of the user"):
        call_main(script, *flags(args))


def test_what_is_loaded_in_python_acts_as_the_run_does(script):
    script.train(tiny(script))
    args = script.Args(**checkpoint()["args"])
    policy = script.load_policy("run")
    envs = script.make_envs(args, 3)
    obs, info = envs.reset(seed=5)
    for _ in range(5):
        action = policy(obs, info)
        assert action.shape == envs.action_space.shape
        obs, _, _, _, info = envs.step(action)
    again = script.load_policy("run/checkpoint.pt")
    assert np.array_equal(policy(obs, info), again(obs, info))


def test_speed_of_a_second_start_is_not_counted_twice(script):
    script.train(tiny(script))
    before = checkpoint()["run"]["seconds"]
    time.sleep(0.3)
    args = script.parse_args(["--resume", "run", "--total-timesteps", "640"])
    script.train(args)
    assert checkpoint()["run"]["seconds"] >= before
    assert [row["step"] for row in progress()] == sorted(row["step"] for row in progress())
