"""What only a GPU can show. A test that also makes sense on the CPU runs there too, and so stays in order."""

import contextlib
import signal

import numpy as np
import pytest
import torch
from conftest import ALGOS, Script, checkpoint, equal, load_script, progress

ppo = load_script(ALGOS / "ppo.py")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = {graph: pytest.param("cuda", graph, marks=needs_gpu) for graph in (False, True)}
CPU_AND_GPU = [pytest.param("cpu", False), *GPU.values()]  # (device, compile): eager, eager, CUDA graph


def agree(one: dict, other: dict, atol: float = 3e-4) -> None:
    """Two agents have the same parameters, rounding apart."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=atol)


@pytest.fixture
def draws_from_the_cpu(monkeypatch):
    """The order of minibatches comes from the generator of the CPU on every device. No TF32."""
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, device="cpu": randperm(n).to(device))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


# ------------------------------------------------------------------------------ the numbers of the CPU
PROBES = {
    "discrete": ("Walk", {}, dict(normalize_obs=True, normalize_reward=True)),
    "box": ("Box", {}, dict(normalize_obs=True)),
    "mask": ("Masked", {}, {}),
    "image": ("Spaces", dict(obs="hwc"), dict(shared_trunk=True)),
}


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("device, graph", CPU_AND_GPU)
def test_ten_updates_give_the_losses_and_parameters_of_the_cpu(probe, device, graph, draws_from_the_cpu):
    env, env_kwargs, fields = PROBES[probe]
    harness = Script(ALGOS / "ppo.py")
    fields = harness.env(env, **env_kwargs) | dict(normalize_obs=False, normalize_reward=False) | fields
    fields |= dict(num_steps=32, total_timesteps=64, update_epochs=5, num_minibatches=2, anneal_lr=False)
    fields |= dict(learning_rate=1e-3, eval_every=0, checkpoint_every=0)
    harness.train("reference", **fields, device="cpu")
    harness.train("run", **fields, device=device, compile=graph)
    expected, got = progress("reference")[-1], progress("run")[-1]
    names = [name for name in expected if not name.startswith("eval/")]
    assert {"loss/policy", "loss/value", "policy/kl", "grad/norm"} <= set(names)
    for name in names:
        assert float(got[name]) == pytest.approx(float(expected[name]), rel=2e-3, abs=2e-4), name
    agree(checkpoint("run")["agent"], checkpoint("reference")["agent"])
    # ten steps of 1e-3, each of which moves a parameter by more than the tolerance
    assert {state["step"].item() for state in checkpoint("run")["optimizer"]["state"].values()} == {10}


def last_returns(device: str, graph: bool, seed: int) -> float:
    """Mean return of the training episodes in the last quarter of 12,000 steps of CartPole."""
    run_dir = f"{device}-{graph}-{seed}"
    flags = f"--env-id CartPole-v1 --total-timesteps 12000 --run-dir {run_dir} --seed {seed} --eval-every 0"
    ppo.train(ppo.parse_args([*flags.split(), "--device", device, *["--compile"] * graph]))
    rows = [row for row in progress(run_dir) if "train/episode_return" in row]
    return float(np.mean([float(row["train/episode_return"]) for row in rows[-len(rows) // 4 :]]))


@pytest.mark.parametrize("device, graph", GPU.values())
def test_learning_curve_is_that_of_the_cpu_within_noise(device, graph):
    on_cpu = np.mean([last_returns("cpu", False, seed) for seed in (1, 2, 3)])
    elsewhere = np.mean([last_returns(device, graph, seed) for seed in (1, 2, 3)])
    assert min(on_cpu, elsewhere) > 100, "both learn: a random policy gets 22"
    assert 0.67 < elsewhere / on_cpu < 1.5


# -------------------------------------------------------------------------------------------- waits
class Guard:
    """While it is armed, what makes the host wait for the device is an error. On the CPU: what would."""

    READS = ("item", "tolist", "__bool__", "__float__", "__int__")

    def __init__(self, device: str, monkeypatch):
        self.device, self.armed, self.copies = device, False, 0
        guard, copy_to_host = self, torch.Tensor.cpu

        def cpu(tensor, *args, **kwargs):
            guard.copies += guard.armed
            with guard.off():
                return copy_to_host(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "cpu", cpu)  # actions on their way to the environments
        for name in self.READS if device == "cpu" else ():
            monkeypatch.setattr(torch.Tensor, name, self.refusing(name, getattr(torch.Tensor, name)))

    def refusing(self, name: str, read):
        def guarded(tensor, *args):
            if self.armed:
                raise RuntimeError(f"{name} waits for the device")
            return read(tensor, *args)

        return guarded

    def arm(self, on: bool) -> None:
        self.armed = on
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    @contextlib.contextmanager
    def off(self):
        before = self.armed
        self.arm(False)
        try:
            yield
        finally:
            self.arm(before)


@pytest.fixture
def guard(request, monkeypatch):
    guard = Guard(request.param, monkeypatch)
    yield guard
    guard.arm(False)


@pytest.mark.parametrize(
    "guard", ["cpu", pytest.param("cuda", marks=needs_gpu)], indirect=True, ids=["cpu", "cuda"]
)
def test_the_guard_finds_a_wait(guard):
    x = torch.ones(3, device=guard.device)
    guard.arm(True)
    with pytest.raises(RuntimeError):
        x.sum().item()
    with pytest.raises(RuntimeError):
        float(x[0])
    assert x.cpu().shape == (3,) and guard.copies == 1, "wanted, counted, allowed"


@pytest.mark.parametrize("guard, graph", CPU_AND_GPU, indirect=["guard"])
@pytest.mark.parametrize("probe", PROBES)
def test_rollout_and_update_never_wait_but_for_the_actions(probe, guard, graph, monkeypatch):
    class Watched(ppo.Run):
        """Arms the guard between two calls of proceed, from the second rollout on: the first one warms up."""

        rollouts = 0

        def proceed(self, policy):
            with guard.off():
                go_on = super().proceed(policy)
            self.rollouts += 1
            guard.arm(go_on and self.rollouts > 1)
            return go_on

    monkeypatch.setattr(ppo, "Run", Watched)
    env, env_kwargs, fields = PROBES[probe]
    harness = Script(ALGOS / "ppo.py")
    fields = harness.env(env, **env_kwargs) | dict(normalize_obs=False, normalize_reward=False) | fields
    fields |= dict(num_steps=8, total_timesteps=64, update_epochs=2, num_minibatches=2)
    harness.train(**fields, device=guard.device, compile=graph, eval_every=0, checkpoint_every=0)
    in_torch = guard.device == "cuda" or probe == "image"
    copies = 8 * in_torch + (probe == "box")  # the actions of each step, the standard deviations of the noise
    assert guard.copies == 3 * copies, "of three rollouts"


# ------------------------------------------------------------------------------------ graph and resume
def skip_without(script: Script, *names: str) -> None:
    if missing := [name for name in names if not script.has(name)]:
        pytest.skip(f"{script.name}.py has no {missing[0]}")


@needs_gpu
def test_graph_and_eager_give_the_same_parameters(script):
    """The learning rate falls, so a graph that keeps the rate of its capture ends elsewhere."""
    skip_without(script, "device", "compile")
    for graph in (False, True):
        changes = dict(anneal_lr=True, learning_rate=0.002, eval_every=0, checkpoint_every=0)
        script.train(f"run{graph}", device="cuda", compile=graph, **changes)
    agree(checkpoint("runFalse")["agent"], checkpoint("runTrue")["agent"], atol=1e-3)


@pytest.mark.parametrize("device, graph", CPU_AND_GPU)
def test_a_stopped_and_resumed_run_ends_where_an_uninterrupted_one_does(script, device, graph, monkeypatch):
    skip_without(script, "device", "compile")
    fields = dict(device=device, compile=graph, learning_rate=0.002, anneal_lr=True)
    script.train("whole", **fields)
    proceed = script.module.Run.proceed

    def stop_at_the_checkpoint(run, policy):
        run.signal = signal.SIGTERM if run.env_steps >= 128 else None
        return proceed(run, policy)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(script.module.Run, "proceed", stop_at_the_checkpoint)
        script.train("run", **fields)
    assert 128 <= checkpoint("run")["run"]["env_steps"] < 384
    script.resume("run")
    whole, resumed = checkpoint("whole"), checkpoint("run")
    assert whole["run"]["env_steps"] == resumed["run"]["env_steps"] == 384
    if device == "cpu":
        assert equal(whole["agent"], resumed["agent"])
    agree(whole["agent"], resumed["agent"], atol=1e-3)


MOVES = [
    pytest.param("cpu", "cpu", False, False, id="cpu to cpu"),
    pytest.param("cuda", "cpu", True, False, id="graph to cpu", marks=needs_gpu),
    pytest.param("cuda", "cpu", False, False, id="cuda to cpu", marks=needs_gpu),
    pytest.param("cpu", "cuda", False, True, id="cpu to graph", marks=needs_gpu),
    pytest.param("cuda", "cuda", False, True, id="cuda to graph", marks=needs_gpu),
]


@pytest.mark.parametrize("before, after, graph_before, graph_after", MOVES)
def test_a_checkpoint_loads_on_another_device(script, before, after, graph_before, graph_after):
    skip_without(script, "device", "compile")
    script.train(device=before, compile=graph_before, total_timesteps=128)
    played = script.resume(device=after, compile=False, resume="", evaluate="run")
    assert len(played) == 2 and np.isfinite(played).all()
    agent = checkpoint()["agent"]
    script.resume(device=after, compile=graph_after, total_timesteps=384)
    resumed = checkpoint()
    assert resumed["run"]["env_steps"] == 384 and not equal(resumed["agent"], agent)


def test_a_checkpoint_as_a_graph_leaves_it_loads_on_the_cpu_and_learns_on(script):
    """On CUDA the optimizer is marked as capturable; that mark is of the device, not of the run."""
    skip_without(script, "compile")
    script.train(total_timesteps=128)
    saved = checkpoint()
    groups = lambda state: [group for part in state.values() for group in part.get("param_groups", ())]
    for group in groups(saved):
        group["capturable"] = True
    torch.save(saved, "run/checkpoint.pt")
    script.resume(total_timesteps=384)
    resumed = checkpoint()
    assert resumed["run"]["env_steps"] == 384 and not equal(resumed["agent"], saved["agent"])
    assert not any(group["capturable"] for group in groups(resumed))
