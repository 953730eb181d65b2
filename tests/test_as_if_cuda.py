"""Every script as if on CUDA, on a machine without a GPU.

Each training runs in a fork, for the pretended device lasts as long as a process. It must give what the CPU gives,
bit for bit, with a graph and without one, and may wait only where it says so.
"""

import os
import pickle
import re
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
    total_timesteps=128, num_envs=2, num_steps=16, eval_every=32, eval_max_steps=5, checkpoint_every=16, log_every=32,
    learning_rate=0.01, anneal_lr=True, update_epochs=2, value_epochs=2, num_minibatches=2, hidden_sizes=(8,),
    learning_starts=40, train_every=4, updates_per_step=0.25, batch_size=8,
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
    "ppo, target_kl": ("ppo", dict(target_kl=1.0), 24),
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
EAGER = {"ppo", "a2c", "dqn, all", "ddpg_td3", "sac"}  # cases that run without a graph, too
PAUSES = {"__init__", "make_adam", "evaluate", "checkpoint", "log"}  # may wait as long as they like


def train(script, folder: str, steps: int | None = None, resume: bool = False, **fields) -> None:
    """Trains, or resumes, with these arguments; until env_steps is steps, as if a signal had come."""
    args = tiny(script, folder, **{**SHORT, **fields})
    if resume:
        graph = ["--compile" if args.compile else "--no-compile"] if has(script, "compile") else []
        args = script.parse_args(["--resume", folder, "--device", args.device, *graph])
    finished = script.Run.finished
    script.Run.finished = property(lambda run: finished.fget(run) or bool(steps) and run.env_steps >= steps)
    script.train(args)
    script.Run.finished = finished


def learned(folder: str):
    """All that a run has learned and logged; optimizers of different devices have different settings."""
    state = parts(folder)
    for part in state.values():
        for group in part.pop("param_groups", ()) if "state" in part else ():
            part.setdefault("rates", []).append(float(group["lr"]))
    return state, progress(folder)


def in_a_fork(action):
    """What action() returns in a fork of this process; RuntimeError with all that it wrote if it fails."""
    answer, log = Path("answer").absolute(), Path("log").absolute()
    if wait(fork(lambda: answer.write_bytes(pickle.dumps(action())), log)):
        raise RuntimeError(log.read_text())
    return pickle.loads(answer.read_bytes())


@cache
def on_the_cpu(case: str, steps: int | None):
    """What a case learns on the CPU."""
    name, fields, _ = CASES[case]
    train(load_script(name), folder := f"cpu-{len(os.listdir())}", steps, **fields)
    return learned(folder)


def problems(case: str, compile: bool, device="vgpu", steps=None, change=lambda text: text) -> list[str]:
    """What is wrong with a script whose text went through change, as if on CUDA."""
    name, fields, more_waits = CASES[case]
    expected = on_the_cpu(case, steps)

    def as_if():
        import as_if_cuda

        folder, path = f"run-{len(os.listdir())}", ALGOS / f"{name}.py"
        script = as_if_cuda.load(path, change(path.read_text()))
        with as_if_cuda.as_if_cuda(path) as gpu, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            try:
                train(script, folder, steps, device=device, compile=compile, **fields)
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]
        got = learned(folder)
        names = [name for name, a, b in zip(("state", "log"), got, expected, strict=True) if not equal(a, b)]
        found = [f"{name} differs from the CPU's" for name in names]
        found += [f"warning: {warning.message}" for warning in warned if warning.category is UserWarning]
        found += [f"race: {line}" for line in gpu.races] + [f"frozen: {line}" for line in gpu.frozen]
        if compile and gpu.replays <= 8 and steps is None:
            found.append(f"{gpu.replays} replays")
        waits = {
            line: n for line, n in gpu.waits.items() if not PAUSES & set(re.findall(r"\w+(?=:\d)", line))
        }
        updates = [line for line in waits if re.search(r"\bupdate\w*:\d", line) and name != "trpo"]
        found += [f"wait in an update: {line}" for line in updates]
        if sum(waits.values()) > got[0]["run"]["env_steps"] / 2 + more_waits:
            found.append(f"too many waits: {waits}")
        return found

    return in_a_fork(as_if)


@pytest.mark.parametrize("case", CASES)
def test_it_learns_what_the_cpu_learns_and_waits_once_for_each_step(case):
    if not has(load_script(CASES[case][0]), "compile") or case in EAGER:
        assert problems(case, compile=False) == []
    if has(load_script(CASES[case][0]), "compile"):
        assert problems(case, compile=True, device="vgpu:1") == []


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in CASES.values()))
def test_a_run_moves_to_cuda_and_back(name):
    state, log = on_the_cpu(name, None)

    def as_if():
        import as_if_cuda

        script, path, fields = load_script(name), ALGOS / f"{name}.py", CASES[name][1]
        train(script, "run", 32, **fields)
        with as_if_cuda.as_if_cuda(path):
            train(as_if_cuda.load(path), "run", 96, resume=True, device="vgpu", compile=True, **fields)
        train(script, "run", resume=True, device="cpu", **fields)
        return learned("run")

    assert equal(in_a_fork(as_if), (state, log))


ACT, SEND = "choose(pi, greedy).cpu().numpy()", "tensor.pin_memory().to(device, non_blocking=True)"
FORK = "fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])"
# what it is: case, the right text, the wrong text, and what must be found; on the second GPU and with a graph
MISTAKES = {
    "a number read in the update": ("ppo", '"grad/actor_norm": actor_norm', '"grad/actor_norm": actor_norm.item()',
                                    "_local_scalar_dense is not permitted"),
    "a branch on a value": ("ppo", "loss.backward()", "loss.backward() if loss.isfinite() else None", "not permitted"),
    "rows by a mask": ("ppo", "F.mse_loss(value, batch", "F.mse_loss(value[value < 9], batch", "count of a mask"),
    "order on the CPU": ("ppo", "randperm(batch_size, device=device)", "randperm(batch_size)", "one device"),
    "order by another generator": ("ppo", "randperm(batch_size, device=device",
                                   "randperm(batch_size, device=device, generator=torch.Generator()", "a generator of the CPU"),
    "mask on the CPU": ("ppo, mask", 'to_tensor(info["action_mask"], self.device)', 'torch.as_tensor(info["action_mask"])',
                        "indexing mixes|one device"),
    "not capturable": ("ppo", "fused=True, capturable=", "fused=True, capturable=False and ", "not capturable"),
    "rate as a number": ("a2c", 'group["lr"].fill_', 'group["lr"] = float', "state differs"),
    "rate in a new tensor": ("a2c", 'group["lr"].fill_', 'group["lr"] = torch.full_like(group["lr"], 1) * ', "state differs"),
    "rate on the CPU": ("ppo", "torch.tensor(lr, device=device)", "torch.tensor(lr)", "not pinned|frozen"),
    "a setting in a tensor on the CPU": ("ppo", "args.value_coef *", "torch.tensor(args.value_coef) *", "frozen"),
    "a count in Python": ("ppo", "        optimizer.zero_grad()\n",
                          "        args.value_coef *= 0.9\n        optimizer.zero_grad()\n", "state differs"),
    "capture of the batch that is given": ("ppo", "self.update(self.batch, self.rows)", "self.update(batch, rows)", "differs"),
    "rows stay": ("ppo", "self.rows.copy_(rows)", "pass", "state differs"),
    "rollout stays": ("ppo", "if batch is not self.source", "if self.source is None", "state differs"),
    "metrics overwritten": ("ppo", "x.clone() for name, x in self.m", "x for name, x in self.m", "log differs"),
    "side stream too early": ("ppo", "self.stream.wait_stream(torch.cuda.current_stream())", "pass", "race: a stream"),
    "main stream too early": ("a2c", "torch.cuda.current_stream().wait_stream(self.stream)", "pass", "race: a stream"),
    "first GPU's stream": ("ppo", "torch.cuda.set_device(device)", "pass", "on a stream of device 0"),
    "pinned memory used again": ("ppo", SEND, "to_tensor.__dict__.setdefault((tensor.shape, tensor.dtype), tensor.pin_memory())"
                                 ".copy_(tensor).to(device, non_blocking=True)", "race: overwritten"),
    "pageable memory": ("ppo", SEND, "tensor.to(device)", "too many waits"),
    "actions not waited for": ("ppo", ACT, 'choose(pi, greedy).to("cpu", non_blocking=True).numpy()', "race: read"),
    "actions left there": ("ppo", ACT, "choose(pi, greedy).numpy()", "can't convert cuda"),
    "normalizer in new memory": ("ppo", "self.mean.lerp_(mean, share)", "self.mean = self.mean.lerp(mean, share)", "state differs"),
    "normalizer on the host": ("ppo", "len(x) / self.count", "len(x) / self.count.item()", "wait in an update"),
    "gradients in another layout": ("ppo, image", "optimizer.step()",
                                    "[setattr(p, 'grad', p.grad.contiguous()) for p in agent.parameters()]; optimizer.step()",
                                    "same layout"),
    "warnings": ("ppo", FORK, "fork_rng()", "warning: VGPU reports"),
    "target in new memory": ("sac", "torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau)",
                             "[setattr(t, 'data', t.lerp(n, tau)) for t, n in zip(target.parameters(), network.parameters())]",
                             "state differs"),
    "noise from the CPU": ("sac", "torch.randn_like(mean)", "torch.randn(mean.shape)", "one device"),
    "noise from NumPy": ("sac", "torch.randn_like(mean)", "to_tensor(np.random.randn(*mean.shape), mean.device)", "differs"),
    "delay within the graph": ("ddpg_td3", "if number % policy_delay == 0:", "if True:", "differs"),
    "rows in a list": ("dqn", "self.obs.index_select(0, to_tensor(frames.ravel(), self.device))", "self.obs[frames.ravel()]",
                       "too many waits"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_finds(mistake):
    case, right, wrong, expected = MISTAKES[mistake]
    steps = 64 if case.startswith("ppo") else None

    def change(text):
        assert right in text, "the right text is gone"
        return text.replace(right, wrong)

    found = problems(case, True, "vgpu:1", steps, change)
    assert any(re.search(expected, problem) for problem in found), found
