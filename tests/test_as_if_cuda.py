"""Every script as if on CUDA, on a machine without a GPU.

Each training runs in a fork, for the pretended device lasts as long as a process. It must give what the CPU gives,
bit for bit, with a graph and without one, and may wait only where it says so.
"""

import os
import pickle
import re
import signal
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  the forks have it then
from conftest import ALGOS, equal, fork, has, load_script, parts, progress, tiny, wait

if torch.cuda.is_available() or not torch.__version__.startswith("2.13."):
    pytest.skip("there is a real GPU, or another torch", allow_module_level=True)

SHORT = dict(
    total_timesteps=128, num_envs=2, num_steps=16, eval_every=64, eval_max_steps=5, checkpoint_every=32,
    anneal_lr=True, learning_rate=0.01, learning_starts=80, train_every=4, batch_size=8, log_every=32,
    hidden_sizes=(8,), update_epochs=2, value_epochs=2, num_minibatches=2,
)  # fmt: skip
PROBE = "probe_envs:{}-v0".format
BOX = dict(env_kwargs={"actions": "box"})
IMAGE = dict(env_id=PROBE("Spaces"), env_kwargs={"obs": "small"}, normalize_obs=False)
# name: script, what differs from SHORT, and how often it may wait beyond once for each step of the environments
CASES = {
    "ppo": ("ppo", {}, 8),
    "ppo, box": ("ppo", BOX | dict(entropy_method="max", entropy_coef=0.1), 12),
    "ppo, mask": ("ppo", dict(env_id=PROBE("Masked"), env_kwargs={}), 8),
    "ppo, image": ("ppo", IMAGE | dict(shared_trunk=True), 8),
    "ppo, target_kl": ("ppo", dict(target_kl=1e-9), 12),
    "a2c": ("a2c", dict(num_steps=4), 32),
    "vpg": ("vpg", {}, 8),
    "trpo": ("trpo", dict(cg_iterations=3, max_backtracks=2), 8 + 4 * (3 + 2 * 2)),
    "reinforce": ("reinforce", {}, 0),
    "dqn": ("dqn", {}, 0),
    "dqn, all": ("dqn", dict(double=True, dueling=True, noisy=True, n_step=3, per=True), 13),
    "dqn, image": ("dqn", IMAGE, 0),
    "ddpg_td3": ("ddpg_td3", {}, 0),
    "sac": ("sac", {}, 0),
    "sac, choices": ("sac", dict(env_kwargs={"actions": "discrete"}, n_step=3), 0),
}
PAUSES = {"__init__", "make_adam", "evaluate", "checkpoint", "log"}  # may wait as long as they like


def train(script, folder: str, steps: int | None = None, resume: bool = False, **fields) -> None:
    """Trains, or resumes, with these arguments; until env_steps is steps, as if a signal had come."""
    args = tiny(script, folder, **{**SHORT, **fields})
    if resume:
        graph = ["--compile" if args.compile else "--no-compile"] if has(script, "compile") else []
        args = script.parse_args(["--resume", folder, "--device", args.device, *graph])
    finished = script.Run.finished
    script.Run.finished = property(lambda run: finished.fget(run) or run.env_steps == steps)
    script.train(args)
    script.Run.finished = finished


def learned(folder: str):
    """All that a run has learned and logged; optimizers of different devices have different settings."""
    state = parts(folder)
    for part in state.values():
        for group in part.pop("param_groups", ()) if "state" in part else ():
            part.setdefault("rates", []).append(group["lr"].item())
    return state, progress(folder)


def in_a_fork(action):
    """What action() returns in a fork of this process; RuntimeError with all that it wrote if it fails."""
    answer, log = Path("answer").absolute(), Path("log").absolute()
    if wait(fork(lambda: answer.write_bytes(pickle.dumps(action())), log)):
        raise RuntimeError(log.read_text())
    return pickle.loads(answer.read_bytes())


@cache
def on_the_cpu(case: str):
    """What a case learns on the CPU."""
    name, fields, _ = CASES[case]
    folder = f"cpu-{os.getpid()}-{len(os.listdir())}"
    train(load_script(name), folder, **fields)
    return learned(folder)


def problems(case: str, compile: bool, source: str | None = None, device="vgpu:0") -> list[str]:
    """What is wrong with a script, or with source in its place, as if on CUDA."""
    name, fields, more_waits = CASES[case]
    expected = on_the_cpu(case)

    def as_if():
        import as_if_cuda

        folder, path = f"run-{len(os.listdir())}", ALGOS / f"{name}.py"
        with as_if_cuda.as_if_cuda(path) as gpu, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                train(as_if_cuda.load(path, source), folder, device=device, compile=compile, **fields)
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]
        found, got = [], learned(folder)
        found += [f"differs from the CPU: {what}" for what, a, b in zip(("agent", "log"), got, expected) if not equal(a, b)]
        found += [f"warning: {warning.message}" for warning in warned if warning.category is UserWarning]
        found += [f"race: {line}" for line in gpu.races] + [f"frozen: {line}" for line in gpu.frozen]
        if compile and gpu.replays <= 8:
            found.append(f"{gpu.replays} replays")
        waits = {line: n for line, n in gpu.waits.items() if not PAUSES & set(re.findall(r"\w+(?=:\d)", line))}
        waits = {line: n for line, n in waits.items() if not line.startswith("capture")}
        found += [f"wait in an update: {line}" for line in waits if re.search(r"\bupdate\w*:\d", line) and name != "trpo"]
        if sum(waits.values()) > got[0]["run"]["env_steps"] // 2 + more_waits:
            found.append(f"too many waits: {waits}")
        return found

    return in_a_fork(as_if)


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_the_cpu_does_and_waits_once_for_each_step(case):
    assert problems(case, compile=False) == []
    if has(load_script(CASES[case][0]), "compile"):
        assert problems(case, compile=True) == []
