"""benchmark/gpu.py, rehearsed on the pretended GPU: no minute on a real one may be lost to a typo."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, load_script

sys.path.insert(0, str(ROOT / "benchmark"))
import gpu

TASKS, VARIANTS = ["ppo Pong", "sac HalfCheetah"], ["4_step", "4_step_per"]


def rehearse(out: Path, run: str, *words) -> str:
    """Calls gpu.py and stops it once these runs of all trainings have updated. Returns what it printed."""
    command = [sys.executable, gpu.__file__, "--pretend", "--out", str(out), *words]
    command += ["--tasks", *TASKS, "--trainings", *VARIANTS]
    logs = [out / f"runs/ALE/Pong-v5/{name}-{run}/progress.jsonl" for name in VARIANTS]
    printed, end = out.with_suffix(".txt"), time.monotonic() + 300
    with printed.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while not all(log.exists() and "loss/q" in log.read_text() for log in logs):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                pytest.fail(printed.read_text())
            time.sleep(0.2)
        process.terminate()
    assert process.returncode == 0, printed.read_text()
    return printed.read_text()


def results(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.cluster
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_a_rehearsal_measures_all_and_a_second_one_continues(empty_folder):
    first, second = empty_folder / "first", empty_folder / "second"
    text = rehearse(first, "01")
    rows = results(first)
    assert (rows[0]["kind"], rows[0]["gpu"], rows[0]["torch"]) == ("call", "pretended", torch.__version__)
    (tests,) = [row for row in rows if row["kind"] == "tests"]
    assert tests["exit_code"] == 0 and tests["skipped"] > 50 and not tests["failed"], "they need a real GPU"
    speeds = {(row["task"], row["side"]): row["steps_per_second"] for row in rows if row["kind"] == "speed"}
    assert (
        speeds.keys() == {(task, side) for task in TASKS for side in gpu.SIDES} and min(speeds.values()) > 0
    )
    profiles = {(row["task"], row["side"]): row for row in rows if row["kind"] == "profile"}
    assert profiles.keys() == {key for key in speeds if key[1] != "CPU"}
    for row in profiles.values():
        assert 0 < row["shares"]["environments"] < 1

    for title in ("tests/test_cuda.py", "environment steps per second", "share of the time", "DQN on Pong"):
        assert f"\n{title}\n" in text
    for name in VARIANTS:
        with tarfile.open(first / f"{name}.tar.gz") as archive:
            assert sorted(archive.getnames()) == sorted(f"{name}-01/{x}" for x in (*gpu.LOGS, "weights.pt"))
    names = {path.name for path in first.iterdir()}
    assert names == {"results.jsonl", "runs", *(f"{name}.tar.gz" for name in VARIANTS)}

    rehearse(second, "02", "--resume", str(first))
    assert results(second)[: len(rows)] == rows
    new = results(second)[len(rows) :]
    assert [row["kind"] for row in new] == ["call", "training", "training"], "the rest was known"
    for name, row in zip(VARIANTS, new[1:], strict=True):
        runs = second / "runs/ALE/Pong-v5"
        before, now = (json.loads((runs / f"{name}-{n}/args.json").read_text()) for n in ("01", "02"))
        done = torch.load(runs / f"{name}-01/weights.pt", weights_only=True)["run"]["env_steps"]
        assert now["init_from"] == str(runs / f"{name}-01/weights.pt")
        assert now["total_timesteps"] == before["total_timesteps"] - done and row["steps"] > done > 0
        left = 1 - done / before["total_timesteps"]
        assert now["learning_rate"] == pytest.approx(left * before["learning_rate"])
        assert now["epsilon_start"] == now["epsilon_end"] == before["epsilon_end"]
        assert 1 - now["per_beta_start"] == pytest.approx(left * (1 - before["per_beta_start"]))
        with tarfile.open(second / f"{name}.tar.gz") as archive:
            weights = [x for x in archive.getnames() if x.endswith(".pt")]
            assert weights == [f"{name}-02/weights.pt"] and f"{name}-01/progress.jsonl" in archive.getnames()


def test_every_task_and_training_is_a_valid_command():
    for task in gpu.TASKS.values():
        script = load_script(task.algo)
        for side in gpu.SIDES.values():
            args = script.parse_args(f"{task.words} {side}".split())
            assert hasattr(args, "num_steps") == (task.algo in ("ppo", "a2c", "pqn"))
    for name, cell in gpu.TRAININGS.items():
        args = load_script("dqn").parse_args(["--env-id", cell.env_id, *cell.args])
        assert args.env_kwargs == {"repeat_action_probability": 0}
        assert args.n_step == int(name[0]) and all(getattr(args, x) for x in name.split("_")[2:])
    parts = "1_step", "4_step", "4_step_double", "4_step_dueling", "4_step_noisy", "4_step_per"
    assert tuple(gpu.TRAININGS) == parts


def test_shares_of_a_profile():
    event = lambda cat, name, ts, dur, n=0: dict(cat=cat, name=name, ts=ts, dur=dur, args={"correlation": n})
    trace = [
        {"ph": "M", "name": "process_name"}, event("user_annotation", "environments", 300, 300),
        event("user_annotation", "act", 0, 60), event("gpu_user_annotation", "act", 20, 50),
        event("cuda_runtime", "cudaLaunchKernel", 10, 5, 1), event("kernel", "gemm", 20, 40, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 5, 2), event("gpu_memcpy", "Memcpy HtoD", 60, 10, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 30, 20, 3),
        event("cuda_runtime", "cudaGraphLaunch", 70, 10, 4), event("kernel", "gemm", 80, 100, 4),
        event("kernel", "adam", 180, 100, 4), event("gpu_memcpy", "Memcpy DtoD", 300, 50, 4),
        event("user_annotation", "act", 600, 60), event("cuda_driver", "cuLaunchKernel", 610, 5, 5),
        event("kernel", "gemm", 620, 10, 5),
    ]  # fmt: skip
    expected = dict(acting=0.05, updating=0.2, copying=0.06, idle=0.69, environments=0.3, waiting=0.02)
    assert gpu.shares(trace, 1e-3) == expected
    assert gpu.longest(trace, 1e-3)[:2] == [("gemm", 3, 0.15), ("adam", 1, 0.1)]


@pytest.mark.parametrize("answer, code", [("exit(3)", 3), ("None", -signal.SIGKILL)])
def test_time_is_never_exceeded(answer, code):
    child = f"""
import signal, time
signal.signal(signal.SIGINT, lambda *_: {answer})
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
    words = [sys.executable, "-c", child]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        start = time.monotonic()
        gpu.finish([process], until=start + 0.5, grace=2)
        assert process.returncode == code and 0.5 < time.monotonic() - start < 10
