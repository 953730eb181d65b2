"""What only a GPU can show, with PyTorch 2.11 to 2.13; skipped without one. test_as_if_cuda.py shows the rest."""

import contextlib
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import checkpoint, flags, load_script, progress, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GRAPHS = "ppo pqn ppo_rnd a2c dqn rainbow ddpg_td3 sac tqc crossq simba iql pearl".split()
DRAW = "ppo_rnd rainbow ddpg_td3 sac tqc crossq simba pearl".split()  # their updates draw random numbers
ALL = [(name, graph) for name in GRAPHS for graph in (False, True)]
ALL += [(name, False) for name in ("vpg", "trpo", "reinforce", "maml")]
TEN_UPDATES = dict(
    total_timesteps=64, num_steps=16, eval_every=0, checkpoint_every=0, update_epochs=5, value_epochs=5,
    num_minibatches=1, learning_starts=24, train_every=4, updates_per_step=0.25, log_every=16,
    learning_rate=1e-3,
)  # fmt: skip


def train(name: str, folder: str, device: str, graph: bool = False, **fields) -> dict:
    """Trains for about ten updates. Returns the parameters and the last row of losses in the log."""
    script, short = load_script(name), dict(num_steps=3) if name == "a2c" else {}
    words = flags(tiny(script, folder, device=device, **TEN_UPDATES | short | fields))
    script.train(script.parse_args(words + ["--cuda-graph"] * graph))
    rows = [row for row in progress(folder) if any(key.startswith("loss/") for key in row)]
    return {name: x.double() for name, x in checkpoint(folder)["agent"].items()} | rows[-1]


def assert_same(one: dict, other: dict) -> None:
    """Rounding apart; with a learning rate of 1e-3 each of the ten updates moves a parameter by more."""
    torch.testing.assert_close(one, other, rtol=2e-3, atol=3e-4)


@pytest.fixture
def draws_of_the_cpu(monkeypatch):
    """On each device the random numbers come from the generator of the CPU, so a graph must not draw any."""
    for name in ("randperm", "randint", "randn"):
        draw = getattr(torch, name)
        on_cpu = lambda *size, draw=draw, device="cpu", **kwargs: draw(*size, **kwargs).to(device)
        monkeypatch.setattr(torch, name, on_cpu)
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.randn(x.shape, device=x.device))
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.rand(x.shape).to(x.device))
    for name in ("exponential_", "normal_"):
        draw = getattr(torch.Tensor, name)
        fill = lambda x, *args, draw=draw, **more: x.copy_(draw(torch.empty(x.shape), *args, **more))
        monkeypatch.setattr(torch.Tensor, name, fill)


@pytest.mark.parametrize("name, graph", [case for case in ALL if case not in [(name, True) for name in DRAW]])
def test_ten_updates_give_the_losses_and_parameters_of_the_cpu(name, graph, draws_of_the_cpu):
    assert_same(train(name, "gpu", "cuda", graph), train(name, "cpu", "cpu"))


IMAGE = dict(env_id="probe_envs:Spaces-v0", env_kwargs={"obs": "hwc"}, normalize_obs=False, shared_trunk=True)
VARIANTS = [
    ("ppo", IMAGE),
    ("ppo", dict(async_envs=True)),
    *((name, dict(anneal_lr=True)) for name in GRAPHS),
]


@pytest.mark.parametrize("name, fields", VARIANTS)
def test_a_graph_gives_what_eager_updates_give(name, fields):
    assert_same(train(name, "eager", "cuda", **fields), train(name, "graph", "cuda", True, **fields))


@contextlib.contextmanager
def waits_of(script):
    """Counts by line where the script waits for the GPU. In an update that is an error, in a pause it is free."""
    modes, waits = ["default"], Counter()

    def watch(frame, event, arg):
        if event in ("call", "return") and frame.f_code.co_filename == script.__file__:
            name = frame.f_code.co_name
            if event == "return":
                modes.pop()
            elif "error" in modes or name.startswith("update"):
                modes.append("error")
            elif name in ("__init__", "Adam", "pause", "evaluate", "checkpoint", "log"):
                modes.append("default")
            else:
                modes.append("warn" if name == "train" else modes[-1])
            torch.cuda.set_sync_debug_mode(modes[-1])

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("always", "called a synchronizing")
        patch.setattr(
            warnings, "showwarning", lambda text, kind, file, line, *_: waits.update([f"{file}:{line}"])
        )
        sys.setprofile(watch)
        try:
            yield waits
        finally:
            sys.setprofile(None)
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "name, graph", [case for case in ALL if case[0] not in ("trpo", "maml")]
)  # they wait
def test_an_update_never_waits_and_a_step_waits_once(name, graph):
    with waits_of(load_script(name)) as waits:
        train(name, "run", "cuda", graph)
    steps = checkpoint("run")["run"]["env_steps"] / 2
    assert 0 < waits.total() <= steps * (4 / 3 if name == "a2c" else 17 / 16), waits  # once more in a rollout


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("graph", [False, True])
def test_ten_thousand_updates_take_no_more_memory(name, graph, monkeypatch):
    script, taken = load_script(name), []
    log = script.Run.log

    def log_memory(run, metrics):
        log(run, metrics)
        taken.append(torch.cuda.memory_allocated())

    monkeypatch.setattr(script.Run, "log", log_memory)
    fields = dict(total_timesteps=5_056, train_every=1, updates_per_step=1.0, updates_per_train=2)
    train(name, "run", "cuda", graph, **fields, update_epochs=64)
    half = len(taken) // 2
    assert half > 50 and max(taken[half:]) <= max(taken[:half]) + 2**16


@pytest.mark.parametrize("name, graph", ALL)
def test_a_run_moves_to_the_gpu_and_back(name, graph):
    train(name, "run", "cpu")
    script = load_script(name)
    for steps, device in ((128, "cuda"), (192, "cpu")):
        words = ["--resume", "run", "--device", device, "--total-timesteps", str(steps)]
        script.train(script.parse_args(words + ["--cuda-graph"] * graph))
    assert checkpoint("run")["run"]["env_steps"] >= 192


@pytest.mark.parametrize("graph", [False, True])
def test_the_learning_curve_is_that_of_the_cpu_within_noise(graph):
    script, returns = load_script("ppo"), {"cpu": [], "cuda": []}
    words = "--env-id CartPole-v1 --total-timesteps 20480 --eval-every 0 --checkpoint-every 0".split()
    for device in returns:
        for seed in (1, 2, 3):
            run_dir = f"{device}-{seed}"
            run = ["--seed", str(seed), "--run-dir", run_dir, "--device", device]
            script.train(script.parse_args(words + run + ["--cuda-graph"] * graph))
            rows = [row["train/episode_return"] for row in progress(run_dir) if "train/episode_return" in row]
            returns[device].append(np.mean(rows[-len(rows) // 4 :]))
    cpu, gpu = np.mean(returns["cpu"]), np.mean(returns["cuda"])
    assert min(cpu, gpu) > 50, "both learn: a random policy gets 22"
    assert 0.67 < gpu / cpu < 1.5
