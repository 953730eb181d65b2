"""The utilities, which are one text in every script, on ppo.py."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import odd_envs
import probe_envs
import pytest
import torch
from conftest import (
    CPU,
    TESTS,
    call_main,
    checkpoint,
    equal,
    flags,
    fork,
    load_script,
    parts,
    probe,
    progress,
    quick,
    short,
    tiny,
    wait,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def fails(ppo, capsys, *argv) -> str:
    """The one line with which a mistake of the user ends, before anything was made."""
    before = set(os.listdir("."))
    assert call_main(ppo, *argv) == 2
    err = capsys.readouterr().err.strip()
    assert "Traceback" not in err and set(os.listdir(".")) == before
    return err


# ---------------------------------------------------------------------------------------------- command line
def test_arguments_come_from_the_command_line_then_tuned_then_family(ppo, monkeypatch):
    monkeypatch.setitem(ppo.TUNED, "mujoco", dict(gamma=0.5, num_envs=3, num_steps=7))
    monkeypatch.setitem(ppo.TUNED, "Hopper-v5", dict(num_envs=5, num_steps=9))
    args = ppo.parse_args(["--env-id", "Hopper-v5", "--num-steps", "11"])
    assert (args.gamma, args.num_envs, args.num_steps) == (0.5, 5, 11)
    assert args.clip_coef == ppo.Args.clip_coef
    assert vars(ppo.make_args("Hopper-v5", num_steps=11)) == vars(args)


def test_a_name_without_version_means_the_latest(ppo):
    assert ppo.make_args("CartPole").env_id == "CartPole-v1"
    args = ppo.parse_args(["--env-id", "CartPole"])
    assert args.env_id == "CartPole-v1" and args.num_envs == ppo.TUNED["CartPole-v1"]["num_envs"]


@pytest.mark.parametrize(
    "flag, value",
    [
        ("num-envs", 0),
        ("gamma", 1.5),
        ("gamma", "nan"),
        ("hidden-sizes", -3),
        ("critic-lr", -1),
        ("torch-threads", -1),
    ],
)
def test_a_number_out_of_range_is_refused(ppo, capsys, flag, value):
    assert f"--{flag}" in fails(ppo, capsys, f"--{flag}", value)


def test_only_fields_with_a_range_have_one(ppo):
    assert ppo.set_up(replace(tiny(ppo), entropy_coef=-0.5, log_std_init=-3.0)) == CPU


@pytest.mark.parametrize(
    "words, what",
    [
        (["--env-id", "CartPol-v1"], "Did you mean: `CartPole`"),
        (["--env-id", "no_such_module:X-v0"], "no_such_module"),
        (["--env-kwargs", '{"nope": 1}'], "nope"),
        (["--env-kwargs", "[1]"], "--env-kwargs [1]: must be a JSON object"),
        (["--run-dir", "taken"], "taken"),
        (["--run-dir", "taken/run"], "taken/run"),
        (["--env-id", "a:b:CartPole-v1"], "a:b:CartPole-v1"),
        (["--num-minibatches", "7"], "try 4"),
        (["--resume", "nowhere"], "nowhere"),
        (["--evaluate", "nowhere.pt"], "nowhere.pt"),
        (["--env-id", "probe_envs:Spaces-v0", "--env-kwargs", '{"action": "dict"}'], "Dict"),
        (["--env-id", "probe_envs:Spaces-v0", "--env-kwargs", '{"action": "int8"}'], "int8"),
    ],
)
def test_a_mistake_ends_in_one_line_before_anything_is_made(ppo, capsys, words, what):
    Path("taken").write_text("a file")
    err = fails(ppo, capsys, *words)
    assert what in err and len(err.splitlines()) == 1


def test_a_word_that_is_no_flag_ends_with_code_2(ppo, capsys):
    for words in (["--nope", "1"], ["--env-kwargs", "{a"], ["--num-envs", "many"]):
        assert call_main(ppo, *words) == 2
        assert words[0] in capsys.readouterr().err


def test_a_damaged_checkpoint_and_one_of_another_script_are_refused(ppo, capsys):
    ppo.train(tiny(ppo))
    whole = Path("run/checkpoint.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[:1000])
    assert "cut.pt" in fails(ppo, capsys, "--resume", "cut.pt")
    state = checkpoint()
    state["args"]["of_another"] = 1
    torch.save(state, "other.pt")
    assert "was not saved by this script" in fails(ppo, capsys, "--resume", "other.pt")
    for thing in (torch.ones(3), [1], {"agent": 3}):
        torch.save(thing, "thing.pt")
        for flag in ("--resume", "--evaluate", "--init-from"):
            assert "thing.pt" in fails(ppo, capsys, flag, "thing.pt")
    assert "does not fit" in fails(ppo, capsys, "--resume", "run", "--hidden-sizes", "9")


def test_weights_only_are_refused_by_resume_and_taken_by_init_from(ppo, capsys):
    ppo.train(tiny(ppo))
    err = fails(ppo, capsys, "--resume", "run/best.pt")
    assert "--init-from" in err and "best.pt" in err
    weights = checkpoint("run", "checkpoint.pt")["agent"]
    long = replace(tiny(ppo, "new"), init_from="run/checkpoint.pt", total_timesteps=64, learning_rate=0.0)
    ppo.train(replace(long, normalize_obs=True))
    learned = [name for name, _ in ppo.load_policy("new").agent.named_parameters()]
    assert all(torch.equal(checkpoint("new")["agent"][name], weights[name]) for name in learned)
    assert progress("new")[0]["step"] == 0


# ---------------------------------------------------------------------------------------------- environments
def test_an_environment_in_the_users_folder_is_found(ppo, capsys):
    Path("my_envs.py").write_text("""
import gymnasium as gym
import probe_envs
gym.register("Mine-v0", entry_point=probe_envs.Ones)
gym.register("Bug-v0", entry_point=lambda **_: len(1))
""")
    args = tiny(ppo, env_id="my_envs:Mine-v0", env_kwargs={}, total_timesteps=64)
    assert call_main(ppo, *flags(args)) == 0
    assert Path("run/progress.jsonl").exists()
    with pytest.raises(TypeError, match="no len"):  # its own mistakes keep their traceback
        call_main(ppo, "--env-id", "my_envs:Bug-v0")


@pytest.mark.parametrize("async_envs", [False, True])
def test_reset_done_starts_only_what_ended_and_keeps_the_true_successor(ppo, async_envs):
    args = tiny(ppo, env_id="probe_envs:Boundary-v0", env_kwargs={}, async_envs=async_envs)
    envs = ppo.make_envs(args, 3)
    obs, info = envs.reset(seed=100)
    for _ in range(30):
        next_obs, _, terminated, truncated, next_info = envs.step(np.zeros(3, dtype=int))
        done = terminated | truncated
        assert (next_obs[:, 3] == terminated + 2 * truncated).all()
        assert (next_obs[:, 1] == obs[:, 1]).all() and (next_obs[:, 2] == obs[:, 2] + 1).all()
        obs, info = ppo.reset_done(envs, next_obs, next_info, done)
        assert (obs[done, 2] == 0).all() and (obs[~done] == next_obs[~done]).all()
    envs.close()


def test_to_tensor_gives_float32(ppo):
    for array in (np.zeros(3), np.zeros(3, dtype=bool), np.zeros(3, dtype=np.float32)):
        assert ppo.to_tensor(array, CPU).dtype == torch.float32
    assert ppo.to_tensor(np.zeros(3, dtype=np.uint8), CPU).dtype == torch.uint8
    assert ppo.to_tensor(np.zeros(3, dtype=np.int64), CPU).dtype == torch.int64


def test_torch_gets_the_threads_that_are_asked_for(ppo):
    before = torch.get_num_threads()
    for asked, given in ((3, 3), (0, 3), (1, 1)):
        ppo.set_up(ppo.Args(torch_threads=asked))
        assert torch.get_num_threads() == given
    torch.set_num_threads(before)


def test_numbers_too_small_for_a_cpu_to_be_fast_count_as_0(ppo):
    torch.set_flush_denormal(False)
    assert torch.tensor(1e-30) * 1e-10 > 0
    ppo.set_up(ppo.Args())
    assert torch.tensor(1e-30) * 1e-10 == 0


def test_a_segment_depends_on_seed_and_step_alone(ppo):
    args, draws = tiny(ppo), []
    for env_steps, seed in ((64, 1), (64, 1), (128, 1), (64, 2)):
        np.random.random(7), torch.rand(7), random.random()
        run = ppo.Run(replace(args, seed=seed), agent=torch.nn.Identity())
        run.env_steps = env_steps
        envs, obs, _ = run.start_segment()
        actions = [envs.action_space.sample().tolist() for _ in range(8)]
        obs, *_ = envs.step(np.zeros(2, dtype=int))
        draws.append([obs.tolist(), np.random.random(), random.random(), torch.rand(1).item(), actions])
        envs.close()
    assert draws[0] == draws[1]
    for other in draws[2:]:
        assert all(a != b for a, b in zip(draws[0], other, strict=True))


def test_a_segment_closes_the_environments_of_the_one_before(ppo):
    run = ppo.Run(tiny(ppo), agent=torch.nn.Identity())
    first, *_ = run.start_segment()
    second, *_ = run.start_segment()
    assert first.closed and not second.closed
    second.close()


# ----------------------------------------------------------------------------------------------- normalizers
def test_running_statistics_are_those_of_all_that_was_seen(ppo):
    norm, x = ppo.RunningNorm((3,)), torch.randn(1000, 3) * torch.tensor([1.0, 5.0, 0.1]) + 7
    for part in x.split([1, 10, 489, 500]):
        norm.update(part)
    assert torch.allclose(norm.mean, x.double().mean(0)) and torch.allclose(
        norm.var, x.double().var(0, correction=0)
    )
    assert torch.allclose(norm(x).mean(0), torch.zeros(3), atol=1e-4) and norm(x).dtype == torch.float32
    assert norm(torch.full((1, 3), 1e9)).max() == 10


def test_running_statistics_do_not_freeze(ppo):
    norm = ppo.RunningNorm(())
    norm.count += 3e8
    norm.mean += 1000.0
    for _ in range(1000):
        norm.update(torch.full((1000,), 1003.0))
    assert norm.mean.item() == pytest.approx(1000 + 3 * 1e6 / (3e8 + 1e6), abs=1e-6)


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sums(ppo):
    torch.manual_seed(0)
    reward, done = torch.randn(50, 2), (torch.rand(50, 2) < 0.1).float()
    reward[3] = 99
    norm, sums, running = ppo.RewardNorm(0.9), [], torch.zeros(2)
    halves = [norm(reward[:20], done[:20]), norm(reward[20:], done[20:])]
    for r, d in zip(reward, done, strict=True):
        running = r + 0.9 * running
        sums.append(running)
        running = running * (1 - d)
    std = torch.stack(sums).double().std(correction=0)
    assert torch.allclose(norm.statistics.var.sqrt(), std, rtol=1e-5)
    assert torch.allclose(halves[1], (reward[20:] / std).float(), atol=1e-4)
    outlier = torch.zeros(500, 2)
    outlier[0] = 1e6
    assert norm(outlier, done[:1].expand(500, 2)).max() == 10
    norm.start_segment()  # sums of the episodes before are forgotten, statistics are not
    assert norm.return_ == 0 and norm.statistics.count == 1100


# ------------------------------------------------------------------------------------------------ optimizers
def test_gradients_are_clipped_by_their_joint_norm(ppo):
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = ppo.Adam([([a], 0.1), ([b], 0.2)], CPU)
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    norms = ppo.clip_gradients(optimizer, 1.0)
    assert [float(norm) for norm in norms] == pytest.approx([3, 4])
    assert torch.allclose(a.grad, torch.tensor([0.6, 0])) and torch.allclose(b.grad, torch.tensor([0, 0.8]))
    ppo.clip_gradients(optimizer, float("inf"))
    assert torch.allclose(a.grad, torch.tensor([0.6, 0.0]))
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])


def test_adam_takes_the_steps_of_torch_and_keeps_no_graph(ppo):
    torch.manual_seed(0)
    ours, torchs = (torch.nn.Linear(3, 2) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    optimizers = (
        ppo.Adam([(ours.parameters(), 0.1)], CPU, 1e-5),
        torch.optim.Adam(torchs.parameters(), 0.1, eps=1e-5, fused=True),
    )
    for x in torch.randn(5, 4, 3):
        for layer, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight, torchs.weight, rtol=1e-6) and ours.weight.is_leaf
    moments = [optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in optimizers]
    assert torch.allclose(*moments, rtol=1e-6)


def test_a_start_does_not_wait_for_torchs_compiler():
    train = "import conftest, sys; ppo = conftest.load_script('ppo'); ppo.train(conftest.tiny(ppo))"
    code = f"{train}; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(TESTS)}, check=True)


def test_the_command_line_wins_over_the_optimizer_in_a_checkpoint(ppo):
    ppo.train(tiny(ppo, learning_rate=0.1, anneal_lr=False, adam_eps=1e-3))
    words = ["--resume", "run", "--learning-rate", "0.02", "--adam-eps", "0.5", "--total-timesteps", "512"]
    ppo.train(ppo.parse_args(words))
    rates = [row["schedule/learning_rate"] for row in progress() if "schedule/learning_rate" in row]
    assert rates[-1] == pytest.approx(0.02) and rates[0] == pytest.approx(0.1)
    group = checkpoint()["optimizer"]["param_groups"][0]
    assert group["eps"] == 0.5 and float(group["lr"]) == pytest.approx(0.02)


# ------------------------------------------------------------------------------------------------ evaluation
def test_statistics_of_an_evaluation_are_right(ppo):
    args = tiny(ppo, env_id="probe_envs:Success-v0", env_kwargs={}, eval_episodes=5, gamma=0.5)
    ppo.train(replace(args, total_timesteps=64))
    returns, metrics = ppo.evaluate(args, ppo.load_policy("run").agent)
    assert returns.tolist() == [1.0] * 5
    # is_success where the seed is even: eval_seed, eval_seed + 2, ...
    assert metrics["eval/success_rate"] == pytest.approx(3 / 5) and metrics["eval/termination_rate"] == 1
    ones = replace(args, env_id="probe_envs:Ones-v0")
    returns, metrics = ppo.evaluate(ones, ppo.load_policy("run").agent)
    assert returns.tolist() == [10] * 5 and metrics["eval/length_mean"] == 10
    assert metrics["eval/discounted_return_mean"] == pytest.approx(sum(0.5**t for t in range(10)))
    assert metrics["eval/termination_rate"] == 0 and metrics["eval/return_std"] == 0


def test_evaluations_are_the_same_each_time_and_sampled_if_asked(ppo):
    args = tiny(ppo, eval_episodes=4)
    ppo.train(args)
    agent = ppo.load_policy("run").agent
    first, again = (ppo.evaluate(args, agent)[0].tolist() for _ in range(2))
    other = ppo.evaluate(replace(args, eval_seed=5), agent)[0].tolist()
    sampled = [replace(args, sample_actions=True, seed=seed) for seed in (1, 2)]
    drawn = [ppo.evaluate(args, agent)[0].tolist() for args in sampled]
    assert first == again and first != other and drawn[0] == drawn[1] != first


def test_a_file_from_elsewhere_cannot_run_code(ppo):
    torch.save({"args": Path("anything")}, "strange.pt")  # an object, which would be made by its own code
    with pytest.raises(ppo.UsageError, match="strange.pt"):
        ppo.load("strange.pt")


def test_evaluating_gives_the_random_states_back(ppo):
    args = tiny(ppo, sample_actions=True)
    ppo.train(args)
    agent = ppo.load_policy("run").agent
    states = lambda: [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    ppo.set_seed(7)
    before = states()
    ppo.evaluate(args, agent)
    assert states() == before


def test_evaluating_changes_nothing_of_the_training(ppo):
    for folder, every, env in (("a", 0, "Greedy"), ("b", 64, "Greedy"), ("c", 64, "Walk")):
        args = tiny(ppo, folder, env_id=f"probe_envs:{env}-v0", eval_every=every, sample_actions=True)
        ppo.train(args)
    assert equal(parts("a")["agent"], parts("b")["agent"]) and equal(parts("b")["agent"], parts("c")["agent"])
    frozen = checkpoint("b")["agent"]["obs_norm.count"]
    assert frozen == checkpoint("a")["agent"]["obs_norm.count"] == 192


def test_the_interval_between_checkpoints_never_shapes_the_data(ppo):
    args = ppo.make_args("CartPole-v1", num_envs=256, num_steps=8, num_minibatches=1, update_epochs=1)
    assert args.checkpoint_every * args.num_envs > 500 * args.num_envs  # whole episodes fit between two
    args = tiny(ppo, env_id="probe_envs:Ones-v0", env_kwargs={}, num_envs=16, num_steps=8, num_minibatches=2)
    ppo.train(replace(args, checkpoint_every=16, total_timesteps=16 * 64, run_dir="short"))
    lengths = [row["train/episode_length"] for row in progress("short") if "train/episode_length" in row]
    assert lengths and set(lengths) == {10.0}


# ----------------------------------------------------------------------------------------------------- films
def frames(path):
    film, found = cv2.VideoCapture(str(path)), []
    while (shot := film.read())[0]:
        found.append(shot[1])
    return found


def test_a_film_has_a_frame_for_each_step_of_the_first_episode(ppo):
    args = tiny(ppo, env_id="probe_envs:Ones-v0", env_kwargs={}, capture_video=True, total_timesteps=64)
    ppo.train(args)
    assert sorted(os.listdir("run/videos")) == ["0.webm", "64.webm"]
    shots = frames("run/videos/64.webm")
    assert len(shots) == 10 and shots[0].shape == (48, 64, 3)
    assert np.diff([shot.mean() for shot in shots]).min() > 5  # gray rises by 10 with each step
    assert call_main(ppo, "--evaluate", "run", "--eval-seed", "4", "--capture-video") == 0
    assert "64-seed4.webm" in os.listdir("run/videos")


def test_a_film_ends_with_its_episode_though_others_are_longer(ppo):
    ppo.train(tiny(ppo, **probe(ppo, "Boundary"), eval_episodes=3, capture_video=True))
    assert len(frames("run/videos/0.webm")) == probe_envs.boundary_length(0, 0) == 3


@pytest.mark.parametrize("kind", ["rgb", "rgba", "gray", "gray1", "odd", "tiny", "grow"])
def test_a_frame_of_any_kind_is_filmed(ppo, kind):
    quick(ppo, "Films", env_kwargs={"render": kind}, total_timesteps=1, eval_every=10**9, capture_video=True)
    shots, (height, width) = frames("run/videos/0.webm"), (48, 66) if kind == "grow" else (48, 64)
    height, width = odd_envs.Films.SHAPES.get(kind, (height, width))[:2]
    assert len(shots) == 10 and shots[0].shape == (height // 2 * 2, width // 2 * 2, 3)  # VP8 is of even size
    if kind != "grow":  # brighter from step to step
        assert np.allclose([shot.mean() for shot in shots], 20 * np.arange(1, 11), atol=12)


@pytest.mark.parametrize("kind", ["none", "float", "flat", "empty"])
def test_what_is_no_frame_is_refused_before_training(ppo, capsys, kind):
    args = short(ppo, "Films", env_kwargs={"render": kind}, eval_every=64, capture_video=True)
    assert call_main(ppo, *flags(args)) == 2
    (*_, line) = capsys.readouterr().err.strip().splitlines()
    assert "Films-v0: render() returns" in line and checkpoint()["run"]["env_steps"] == 0


def test_an_environment_without_frames_is_refused_before_training(ppo):
    with pytest.raises(ppo.UsageError, match="render_mode"):
        ppo.train(short(ppo, "LQ", capture_video=True, eval_every=64))
    assert checkpoint()["run"]["env_steps"] == 0


@pytest.mark.parametrize(
    "fps, shots, rate",
    [(20, 10, 20), (60, 5, 30), (100, 3, 25), (None, 10, 15), ("20", 10, 20), (-5, 10, 15)],
)
def test_a_film_has_at_most_30_frames_a_second_and_the_pace_of_the_environment(ppo, fps, shots, rate):
    kwargs = {"env_kwargs": {"fps": fps}}
    quick(ppo, "Films", **kwargs, total_timesteps=1, eval_every=10**9, capture_video=True)
    film = cv2.VideoCapture("run/videos/0.webm")
    assert (
        film.get(cv2.CAP_PROP_FPS) == pytest.approx(rate, rel=0.01)
        and len(frames("run/videos/0.webm")) == shots
    )
    code = int(film.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little")
    assert code == b"VP80"  # which browsers play


def test_a_film_of_atari_is_of_the_same_game_in_color(ppo, monkeypatch):
    args = ppo.make_args("ALE/Pong-v5", eval_max_steps=60, device="cpu")
    agent = ppo.Agent(*ppo.standard_spaces(args), args, CPU)
    played, random_play = [], np.random.default_rng(0)

    def act(obs, info, greedy):
        played.append(obs[0, -1].astype(float))
        return random_play.integers(0, 6, 1)

    monkeypatch.setattr(agent, "act", act)
    ppo.film(args, agent, Path("pong.webm"))
    shots = frames("pong.webm")
    assert len(shots) == 60 and shots[0].shape == (210, 160, 3)
    blue, green, red = shots[-1].astype(int).mean((0, 1))
    assert red > green > blue + 20  # the brown field
    small = [cv2.resize(cv2.cvtColor(shot, cv2.COLOR_BGR2GRAY), (84, 84)) for shot in shots]
    apart = [np.abs(gray - obs).mean() for gray, obs in zip(small, played[1:], strict=False)]
    assert max(apart) - min(apart) < 0.5  # the film is of the game that is played, sticky actions and all


def test_films_without_a_display_ask_mujoco_for_egl(ppo, monkeypatch, capsys):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    ppo.set_up(tiny(ppo))
    assert "MUJOCO_GL" not in os.environ
    ppo.set_up(tiny(ppo, capture_video=True))
    assert os.environ.pop("MUJOCO_GL") == "egl" and capsys.readouterr().out == ""
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    ppo.set_up(tiny(ppo, capture_video=True))
    assert os.environ["MUJOCO_GL"] == "osmesa"


# --------------------------------------------------------------------------------------------------- the run
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_and_every_row_once(ppo):
    args = tiny(ppo, "killed", total_timesteps=1280)
    ppo.train(replace(args, run_dir="whole"))
    for attempt in range(6):
        words = ["--resume", "killed"] if Path("killed/checkpoint.pt").exists() else flags(args)
        pid = fork(lambda words=words: call_main(ppo, *words))
        time.sleep(0.15 + 0.1 * attempt)
        os.kill(pid, signal.SIGKILL)
        wait(pid)
        if Path("killed/checkpoint.pt").exists():
            checkpoint("killed")
        elif Path("killed").exists():  # killed before its first checkpoint
            Path("killed").rename(f"gone{attempt}")
    words = ["--resume", "killed"] if Path("killed/checkpoint.pt").exists() else flags(args)
    assert call_main(ppo, *words) == 0
    assert progress("killed") == progress("whole") and equal(parts("killed"), parts("whole"))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "moment", ["half a file", "before the move", "after the move", "half a row", "a row more"]
)
def test_a_kill_at_the_worst_moment_leaves_the_run_as_it_would_have_been(ppo, moment):
    """In the middle of the second checkpoint, of step 64, or of the row of step 96."""
    saves, torch_save, move, log = [], torch.save, Path.replace, ppo.Run.log

    def save(state, file):
        saves.append("optimizer" in state)
        if moment == "half a file" and sum(saves) == 2:
            file.write(b"half"), file.flush(), die()
        torch_save(state, file)

    def replace_file(path, target):
        second = target.name == "checkpoint.pt" and sum(saves) == 2
        second and moment == "before the move" and die()
        move(path, target)
        second and moment == "after the move" and die()

    def log_row(run, metrics):
        if moment == "half a row" and run.env_steps == 96:
            with run.progress.open("a") as file:
                file.write('{"step": 96, "sec')
            die()
        log(run, metrics)
        run.env_steps == 96 and (run.writer.flush(), die())

    def killed():
        torch.save, Path.replace, ppo.Run.log = save, replace_file, log_row
        ppo.train(tiny(ppo))

    assert wait(fork(killed)) == -signal.SIGKILL
    assert checkpoint()["run"]["env_steps"] == (0 if moment in ("half a file", "before the move") else 64)
    for events in Path("run").glob("events.*"):  # TensorBoard sorts them by the second in their name
        events.rename(events.with_name(re.sub(r"\d+", "1", events.name, count=1)))
    ppo.train(ppo.parse_args(["--resume", "run"]))
    ppo.train(tiny(ppo, "whole"))
    assert progress() == progress("whole") and points() == points("whole") and equal(parts(), parts("whole"))
    assert not list(Path("run").glob("*.part"))


@pytest.mark.parametrize("checkpoint_every", [0, 64])  # the first environments are there before the handlers
def test_ctrl_c_reaches_the_processes_of_the_environments_too_and_saves(ppo, checkpoint_every):
    changes = dict(checkpoint_every=checkpoint_every, total_timesteps=10**6)
    args = tiny(ppo, env_id="probe_envs:Slow-v0", async_envs=True, **changes)
    pid = fork(lambda: os.setsid() or sys.exit(call_main(ppo, *flags(args))))
    while not Path("run/progress.jsonl").exists() or len(progress()) < 3:
        time.sleep(0.05)
    os.killpg(pid, signal.SIGINT)
    assert wait(pid) == 130 and checkpoint()["run"]["env_steps"] > 0


def test_a_second_signal_stops_at_once(ppo):
    args = tiny(ppo, total_timesteps=10**6)
    args.env_kwargs |= dict(signal="SIGINT", after=50, times=2)
    assert wait(fork(lambda: sys.exit(call_main(ppo, *flags(args))))) == 130
    assert checkpoint()["run"]["env_steps"] == 0


def test_a_full_disk_ends_the_run_in_one_line_with_the_last_checkpoint_whole(ppo, capsys, monkeypatch):
    save = ppo.Run.checkpoint

    def fill_disk_and_save(run):
        if run.env_steps > 128:
            os.symlink("/dev/full", "run/checkpoint.part")
        save(run)

    monkeypatch.setattr(ppo.Run, "checkpoint", fill_disk_and_save)
    assert call_main(ppo, *flags(tiny(ppo))) == 1
    err = capsys.readouterr().err
    assert "No space left" in err and "Traceback" not in err
    assert checkpoint()["run"]["env_steps"] == 128
    monkeypatch.setattr(ppo.Run, "checkpoint", save)
    os.remove("run/checkpoint.part")
    ppo.train(ppo.parse_args(["--resume", "run"]))


def test_other_errors_of_the_system_keep_their_traceback(ppo, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        call_main(ppo, *flags(tiny(ppo)))


def test_a_run_is_not_overwritten_and_a_branch_leaves_it_alone(ppo, capsys):
    ppo.train(tiny(ppo))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert "not empty" in fails(ppo, capsys, *flags(tiny(ppo)))
    assert call_main(ppo, "--resume", "run", "--run-dir", "new", "--total-timesteps", "640") == 0
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    steps = [row["step"] for row in progress("new")]
    assert min(steps) == 192 and max(steps) == 640  # a log of its own, from its first evaluation on
    assert checkpoint("new", "best.pt")["run"]["env_steps"] in steps
    assert checkpoint("new")["args"]["run_dir"] == "new"
    assert call_main(ppo, "--resume", "new/checkpoint.pt", "--total-timesteps", "700") == 0
    assert progress("new")[-1]["step"] == 704


def test_each_start_is_in_environment_json_and_its_source_lies_beside_the_others(ppo):
    ppo.train(tiny(ppo))
    source = Path("run/ppo.py").read_text()
    ppo.train(ppo.parse_args(["--resume", "run", "--total-timesteps", "224"]))
    copy = Path("changed.py").absolute()
    copy.write_text(source + "\n# changed\n")
    changed = load_script("changed", copy)
    changed.train(changed.parse_args(["--resume", "run", "--total-timesteps", "256"]))
    sources = {path.name: path.read_text() for path in Path("run").glob("*.py")}
    assert sources == {"ppo.py": source, "ppo-192.py": source, "changed-224.py": copy.read_text()}
    history = json.loads(Path("run/environment.json").read_text())
    assert [entry["step"] for entry in history] == [0, 192, 224]
    assert {"torch", "gymnasium", "numpy", "python", "git", "command", "device"} <= history[0].keys()
    assert json.loads(Path("run/args.json").read_text())["total_timesteps"] == 256


def test_stop_return_ends_the_training(ppo):
    ppo.train(tiny(ppo, env_id="probe_envs:Ones-v0", env_kwargs={}, stop_return=10.0))
    assert checkpoint()["run"]["env_steps"] == 0  # it pays 10 from the start


def test_a_finished_run_has_nothing_left_to_do(ppo):
    returns = ppo.train(tiny(ppo))
    rows = progress()
    assert ppo.train(ppo.parse_args(["--resume", "run"])).tolist() == returns.tolist()
    assert progress() == rows


def test_best_is_the_model_with_the_best_evaluation(ppo, monkeypatch):
    marks, evaluate = iter([1.0, 3.0, 2.0, 3.0]), ppo.evaluate

    def graded(*args):
        returns, metrics = evaluate(*args)
        return np.full_like(returns, next(marks)), metrics

    monkeypatch.setattr(ppo, "evaluate", graded)
    ppo.train(tiny(ppo))
    best, later = (checkpoint("run", name)["agent"] for name in ("models/64.pt", "models/192.pt"))
    assert equal(checkpoint("run", "best.pt")["agent"], best) and not equal(best, later)
    assert checkpoint()["run"]["best"] == 3


def test_evaluate_writes_nothing(ppo):
    ppo.train(tiny(ppo))
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    returns = ppo.train(ppo.parse_args(["--evaluate", "run"]))
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert returns.tolist() == checkpoint()["run"]["returns"]  # of the last evaluation of the training


def test_due_is_true_once_for_each_multiple(ppo):
    run = ppo.Run(tiny(ppo, total_timesteps=10**6), agent=torch.nn.Identity())
    for chunk in (1, 3, 7, 64):
        done_at = []
        for run.env_steps in range(0, 1000, chunk):
            if run.due(100, done_at[-1] if done_at else -1):
                assert not run.due(100, run.env_steps)  # not twice at one step
                done_at.append(run.env_steps)
        assert [step // 100 for step in done_at] == list(range(10))
    assert not run.due(0, -1)


def points(run_dir="run") -> dict[str, list]:
    """All that TensorBoard would show, without what a clock measured."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("speed/")]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def test_tensorboard_has_every_row(ppo):
    ppo.train(tiny(ppo))
    assert points().keys() == {name for row in progress() for name in row} - {"step"}
    for name, curve in points().items():
        rows = [(row["step"], row[name]) for row in progress() if name in row]
        assert np.allclose(curve, rows, rtol=1e-5)
