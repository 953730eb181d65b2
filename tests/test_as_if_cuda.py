"""Every script as if on CUDA, on a machine without a GPU.

Each training runs in a fork, for the pretended device lasts as long as a process. It must give what the CPU
gives, bit for bit, with a graph and without one, and may wait only where it says so.
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
from conftest import ALGOS, ROOT, equal, fork, has, load_script, parts, progress, tiny, wait

if torch.cuda.is_available():
    pytest.skip("there is a real GPU", allow_module_level=True)

pytestmark = pytest.mark.long
SHORT = dict(
    total_timesteps=128, num_envs=2, num_steps=16, eval_every=32, eval_max_steps=5, checkpoint_every=16,
    log_every=32, learning_rate=0.01, anneal_lr=True, update_epochs=2, value_epochs=2, num_minibatches=2,
    hidden_sizes=(8,), learning_starts=40, train_every=4, updates_per_step=0.25, batch_size=8,
)  # fmt: skip
PROBE = "probe_envs:{}-v0".format
BOX = dict(env_kwargs={"actions": "box"})
IMAGE = dict(env_id=PROBE("Spaces"), env_kwargs={"obs": "small"}, normalize_obs=False)
# name: script, what differs from SHORT, and how often it may wait beyond once for each step
CASES = {
    "ppo": ("ppo", {}, 8),
    "ppo, box": ("ppo", BOX | dict(entropy_method="max", entropy_coef=0.1), 12),
    "ppo, image": ("ppo", IMAGE | dict(shared_trunk=True), 8),
    "ppo, target_kl": ("ppo", dict(target_kl=1.0), 24),
    "ppo_lstm": ("ppo_lstm", {}, 8),
    "ppo_lstm, gru": ("ppo_lstm", BOX | dict(memory="gru", entropy_method="max", entropy_coef=0.1), 12),
    "ppo_lstm, image": ("ppo_lstm", IMAGE | dict(shared_trunk=True), 8),
    "pqn": ("pqn", {}, 8),
    "pqn, image": ("pqn", IMAGE, 8),
    "ppo_rnd": ("ppo_rnd", {}, 24),
    "ppo_rnd, image": ("ppo_rnd", IMAGE | dict(shared_trunk=True, newest_channels=1), 24),
    "a2c": ("a2c", dict(num_steps=4), 32),
    "vpg": ("vpg", {}, 8),
    "trpo": ("trpo", dict(cg_iterations=3, max_backtracks=2), 8 + 4 * (3 + 2 * 2)),
    "reinforce": ("reinforce", {}, 0),
    "grpo": ("grpo", dict(reference_every=40), 8),
    "grpo, box": ("grpo", BOX | dict(dr=True, entropy_coef=0.1), 8),
    "dqn": ("dqn", {}, 1),
    "dqn, all": ("dqn", dict(double=True, dueling=True, noisy=True, n_step=3, per=True), 24),
    "dqn, image": ("dqn", IMAGE, 1),
    "rainbow": ("rainbow", {}, 24),
    "rainbow, image": ("rainbow", IMAGE, 24),
    "es": ("es", dict(population=4), 1000),  # the moments of the observations come from the host
    "ddpg_td3": ("ddpg_td3", {}, 0),
    "sac": ("sac", {}, 0),
    "iql": ("iql", {}, 0),
    "maml": ("maml", dict(cg_iterations=3, max_backtracks=2), 64),
    "maml, ppo": ("maml", dict(outer="ppo", inner_steps=2), 8),
    "pearl": ("pearl", dict(pre_tanh_reg=0.1), 8),
    "bc": ("bc", {}, 32),  # in 80 steps of the learner, and in 16 epochs, each of which may be the last
    "bc, mse": ("bc", dict(env_kwargs={"actions": "box"}, loss="mse"), 32),
    "tqc": ("tqc", dict(n_step=3), 0),
    "crossq": ("crossq", dict(renorm_warmup=6), 0),
    "simba": ("simba", {}, 0),
    "simba, redq": ("simba", dict(num_critics=4, critic_dropout=0.1), 0),
    "simba, image": ("simba", IMAGE | dict(env_kwargs={"obs": "small", "action": "box"}), 0),
}
# Cases that run without a graph, too
EAGER = {"ppo", "pqn", "ppo_rnd", "a2c", "dqn, all", "rainbow", "ddpg_td3", "sac", "tqc", "crossq", "pearl"}
EAGER |= {"simba, redq", "iql"}
SOLVERS = r"\b(conjugate_gradient|line_search):\d"  # look at a number before they go on
PAUSES = {"__init__", "evaluate", "checkpoint", "log"}  # may wait as long as they like


def train(script, folder: str, steps: int | None = None, resume: bool = False, **fields) -> None:
    """Trains, or resumes, with these arguments; until env_steps is steps, as if a signal had come."""
    args = tiny(script, folder, **{**SHORT, **fields})
    if resume:
        words = ["--resume", folder, "--device", args.device]
        if has(script, "cuda_graph"):
            words.append("--cuda-graph" if args.cuda_graph else "--no-cuda-graph")
        args = script.parse_args(words)
    finished = script.Run.finished
    script.Run.finished = property(lambda run: finished.fget(run) or bool(steps) and run.env_steps >= steps)
    script.train(args)
    script.Run.finished = finished


def learned(folder: str):
    """All that a run has learned, and five digits of what it logged, since sums may run in another order;
    optimizers of different devices have different settings."""
    state = parts(folder)
    for part in state.values():
        for group in part.pop("param_groups", ()) if "state" in part else ():
            part.setdefault("rates", []).append(float(group["lr"]))
    return state, [{name: f"{value:.5g}" for name, value in row.items()} for row in progress(folder)]


def in_a_fork(action):
    """What action() returns in a fork of this process; RuntimeError with all that it wrote if it fails."""
    answer, log = Path("answer").absolute(), Path("log").absolute()
    if wait(fork(lambda: answer.write_bytes(pickle.dumps(action())), log)):
        raise RuntimeError(log.read_text())
    return pickle.loads(answer.read_bytes())


@pytest.fixture(autouse=True)
def pinned_torch():
    """Fails with another torch than the pinned one: the pretended GPU reaches into private parts of it."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    if torch.__version__.partition("+")[0] != pinned:
        pytest.fail(f"this is PyTorch {torch.__version__}, the pretended GPU needs {pinned}", pytrace=False)


@cache
def on_the_cpu(case: str, steps: int | None):
    """What a case learns on the CPU."""
    name, fields, _ = CASES[case]
    train(load_script(name), folder := f"cpu-{len(os.listdir())}", steps, **fields)
    return learned(folder)


def problems(case: str, graph: bool, steps=None, change=lambda text: text) -> list[str]:
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
                train(script, folder, steps, device="vgpu", cuda_graph=graph, **fields)
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]
        got = learned(folder)
        names = [name for name, a, b in zip(("state", "log"), got, expected, strict=True) if not equal(a, b)]
        found = [f"{name} differs from the CPU's" for name in names]
        texts = [str(warning.message) for warning in warned if warning.category is UserWarning]
        # torch warns so of the three updates before the capture
        found += [f"warning: {text}" for text in texts if "constructed with capturable=True" not in text]
        found += [f"race: {line}" for line in gpu.races] + [f"frozen: {line}" for line in gpu.frozen]
        if graph and gpu.replays <= 8 and steps is None:
            found.append(f"{gpu.replays} replays")
        waits = {
            line: n
            for line, n in gpu.waits.items()
            if not PAUSES & set(re.findall(r"\w+(?=:\d)", line)) and not line.startswith("capture")
        }
        updates = [
            line
            for line in waits
            if re.search(r"\bupdate\w*:\d", line) and not re.search(SOLVERS, line) and name != "es"
        ]
        found += [f"wait in an update: {line}" for line in updates]
        if sum(waits.values()) > got[0]["run"]["env_steps"] / 2 + more_waits:
            found.append(f"too many waits: {waits}")
        return found

    return in_a_fork(as_if)


@pytest.mark.parametrize("case", CASES)
def test_it_learns_what_the_cpu_learns_and_waits_once_for_each_step(case):
    if not has(load_script(CASES[case][0]), "cuda_graph") or case in EAGER:
        assert problems(case, graph=False) == []
    if has(load_script(CASES[case][0]), "cuda_graph"):
        assert problems(case, graph=True) == []


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in CASES.values()))
def test_a_run_moves_to_cuda_and_back(name):
    state, log = on_the_cpu(name, None)

    def as_if():
        import as_if_cuda

        script, path, fields = load_script(name), ALGOS / f"{name}.py", CASES[name][1]
        train(script, "run", 32, **fields)
        with as_if_cuda.as_if_cuda(path):
            train(as_if_cuda.load(path), "run", 96, resume=True, device="vgpu", cuda_graph=True, **fields)
        train(script, "run", resume=True, device="cpu", **fields)
        return learned("run")

    assert equal(in_a_fork(as_if), (state, log))


def test_each_process_of_torchrun_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")

    def as_if():
        import as_if_cuda

        path = ALGOS / "es.py"
        with as_if_cuda.as_if_cuda(path) as gpu:
            train(as_if_cuda.load(path), "run", device="vgpu", population=4)
            return gpu.current

    assert in_a_fork(as_if) == 1


# case: right text -> wrong text -> what is found, with a graph.
MISTAKES = """
ppo: policy/kl": kl -> policy/kl": kl.item() -> _local_scalar_dense is not permitted
ppo: loss.backward() -> loss.isfinite() and loss.backward() -> not permitted while a graph is captured
ppo: mse_loss(value, return_) -> mse_loss(value[value < 9], return_) -> count of a mask is not permitted
ppo: randperm(batch_size, device=device) -> randperm(batch_size) -> all tensors must be on one device
ppo: device=device) for -> device=device, generator=torch.Generator()) for -> a generator of the CPU
ppo: capturable=graph -> capturable=False -> an optimizer that is not capturable
a2c: group["lr"].fill_( -> group["lr"] = float( -> state differs
a2c: group["lr"].fill_( -> group["lr"] = 0 * group["lr"] + ( -> state differs
ppo: lr=torch.tensor(float(lr), device=device) -> lr=torch.tensor(float(lr)) -> frozen: aten._fused_adam_
ppo: + args.value_coef -> + torch.tensor(args.value_coef) -> frozen
ppo: optimizer.step() -> optimizer.step(); args.value_coef *= 0.9 -> state differs
ppo: self.update(self.batch) -> self.update(batch) -> state differs
ppo: self.batch[name].copy_(x) -> pass -> state differs
ppo: x.clone() for name, x in self.metrics -> x for name, x in self.metrics -> log differs
ppo: self.stream.wait_stream(torch.cuda.current_stream()) -> pass -> race: a stream does not wait
a2c: torch.cuda.current_stream().wait_stream(self.stream) -> pass -> race: a stream does not wait
ppo: tensor.pin_memory() -> vars(to_tensor).setdefault((tensor.shape, tensor.dtype), tensor.pin_memory())
    .copy_(tensor) -> race: overwritten before it was copied
ppo: .pin_memory().to(device, non_blocking=True) -> .to(device) -> too many waits
ppo: action.cpu() -> action.to("cpu", non_blocking=True) -> race: read before it was copied
ppo: action.cpu() -> action -> can't convert cuda
ppo_lstm: to_tensor(~done[:, None, None], next_info["memory"].device)
    -> torch.tensor(~done[:, None, None]) -> all tensors must be on one device
ppo_lstm: update(batch, to_tensor(rows, device), sizes) -> update(batch, rows.to(device), sizes)
    -> too many waits
ppo_lstm: memory.transpose(0, 1).contiguous() -> memory.transpose(0, 1) -> a contiguous state
ppo: self.mean.lerp_( -> self.mean = self.mean.lerp( -> state differs
ppo: / self.count, -> / self.count.item(), -> wait in an update
ppo, image: loss.backward() -> loss.backward(); [setattr(p, "grad", p.grad.contiguous())
     for p in agent.parameters()] -> same layout
ppo_rnd: torch.rand_like(error) -> torch.rand(len(error)) -> all tensors must be on one device
sac: torch.randn_like(mean) -> torch.randn(mean.shape) -> all tensors must be on one device
sac: torch.randn_like(mean) -> to_tensor(np.random.randn(*mean.shape), mean.device) -> state differs
sac: torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), tau) -> [setattr(t, "data",
     t.lerp(n, tau)) for t, n in zip(target.parameters(), network.parameters())] -> state differs
crossq: self.std.lerp_(std, 0.01) -> self.std = self.std.lerp(std, 0.01) -> state differs
dqn: to_tensor(self.obs[frames], self.device) -> torch.as_tensor(self.obs[frames]).to(self.device)
    -> too many waits
"""


@pytest.mark.parametrize("mistake", MISTAKES.replace("\n    ", " ").strip().splitlines())
def test_it_finds(mistake):
    (case, _, change), expected = mistake.partition(": "), mistake.split(" -> ")[-1]
    right, wrong, _ = change.split(" -> ")
    assert right in (ALGOS / f"{CASES[case][0]}.py").read_text(), "the right text is gone"
    steps = 64 if case.startswith("ppo") else None
    found = problems(case, True, steps, lambda text: text.replace(right, wrong))
    assert expected in "\n".join(found)
