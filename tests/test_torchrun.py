"""One run over several processes, by the recipe: what they add up to, how they end and how they go on.

Most processes here are forks, set up as torchrun does; two tests start torchrun itself.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # noqa: F401  the forks have it then
from conftest import (
    ALGOS,
    NAMES,
    ROOT,
    TESTS,
    checkpoint,
    equal,
    flags,
    fork,
    load_once,
    load_script,
    parts,
    progress,
    tiny,
    wait,
)

pytestmark = pytest.mark.cluster
PARTED = [name for name in ("a2c", "ppo") if name in NAMES]
COPIES = tempfile.TemporaryDirectory()  # of the scripts, with recipes/NAME_torchrun.patch
PATCHED = Path(COPIES.name) / "algos"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ROLLOUT = dict(num_envs=4, num_steps=8, update_epochs=1, num_minibatches=1, normalize_advantage=True)


@pytest.fixture(scope="module", autouse=True)
def recipe():
    PATCHED.mkdir(exist_ok=True)
    for name in PARTED:
        shutil.copy(ALGOS / f"{name}.py", PATCHED)
        patch = ROOT / "recipes" / f"{name}_torchrun.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=COPIES.name, check=True)


@pytest.fixture(params=PARTED)
def name(request):
    return request.param


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def team(name: str, size: int, action) -> list[int]:
    """action(script, rank) in `size` processes as torchrun sets them up. Returns their exit codes."""
    place = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))

    def process(rank):
        os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
        action(
            load_script(name, PATCHED / f"{name}.py"), rank
        )  # anew: it looks for its place when it is loaded

    pids = [fork(lambda rank=rank: process(rank), Path(f"output-{rank}")) for rank in range(size)]
    return [wait(pid) for pid in pids]


def walk(name: str, run_dir="run", **changes):
    """Arguments of a short walk of four environments."""
    return tiny(load_script(name), run_dir, **dict(num_envs=4, num_steps=8, log_every=32) | changes)


def train(rank_1=None, **changes):
    """An action for team: trains in the folder team with these arguments of walk; process 1 has some more."""

    def action(script, rank):
        script.train(walk(script.__name__, "team", **changes | (rank_1 or {} if rank == 1 else {})))

    return action


def resume(script, rank):
    """An action for team: goes on with the run in the folder team."""
    script.train(script.parse_args(["--resume", "team"]))


# ------------------------------------------------------------------------------------------------ arithmetic
def same_data(script, seeds, file: str) -> None:
    """Environments i start from seeds[i] and actions follow from observations; the first gradient is kept."""

    def start_segment(run):
        script.set_seed(run.args.seed)
        run.envs = script.make_envs(run.args, len(seeds))
        return run.envs, *run.envs.reset(seed=[seed + 1000 * run.env_steps for seed in seeds])

    def clip_gradients(optimizer, max_norm):
        if not Path(file).exists():
            groups = [group["params"] for group in optimizer.param_groups]
            torch.save([p.grad.clone() for p in chain(*groups)], file)
        return clip(optimizer, max_norm)

    clip, script.clip_gradients = script.clip_gradients, clip_gradients
    script.Run.start_segment = start_segment
    script.Agent.act = lambda self, obs, info, greedy=True: (
        obs.sum(1) + 0.1 * np.sin(99 * obs[:, 0]) > 0
    ).astype(int)


@pytest.mark.parametrize("size", [2, 4])
def test_the_first_gradient_and_all_statistics_are_those_of_one_process_on_the_same_data(name, size):
    make = lambda run_dir: walk(name, run_dir, **ROLLOUT, total_timesteps=64)

    def part(script, rank):
        same_data(script, range(rank * 4 // size, (rank + 1) * 4 // size), f"gradient-{rank}.pt")
        script.train(make("team"))

    def one(script, rank):
        same_data(script, range(4), "gradient.pt")
        script.train(make("run"))

    assert team(name, size, part) == [0] * size and team(name, 1, one) == [0]
    whole, *others = [torch.load(f"gradient{part}.pt") for part in ["", *(f"-{i}" for i in range(size))]]
    assert all(equal(gradient, others[0]) for gradient in others)
    for mine, expected in zip(others[0], whole, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-6) and expected.abs().max() > 1e-4
    mine, expected = parts("team"), parts("run")
    assert mine["run"]["env_steps"] == expected["run"]["env_steps"] == 64
    assert mine["agent"]["obs_norm.count"] == mine["reward_norm"]["statistics.count"] == 64
    for part in ("agent", "reward_norm"):
        for key, x in expected[part].items():
            rtol = 1e-12 if "norm" in key or "statistics" in key else 1e-4
            assert torch.allclose(mine[part][key], x, rtol=rtol, atol=1e-5), key


def test_each_process_has_environments_and_noise_of_its_own_in_every_segment(name):
    def action(script, rank):
        start, act, seen, first = script.Run.start_segment, script.Agent.act, [], []

        def start_segment(run):
            first.append([])
            return start(run)

        def watched(self, obs, info, greedy=True):
            action = act(self, obs, info, greedy)
            if not greedy:
                seen.extend(obs[obs[:, 1] > 0, 0].tolist())  # positions but for those at a start
                first[-1] = first[-1] or [action.tolist()]
            return action

        script.Run.start_segment, script.Agent.act = start_segment, watched
        script.train(walk(name, "team", normalize_obs=False, checkpoint_every=8, total_timesteps=640))
        torch.save((seen, [action for segment in first for action in segment]), f"seen-{rank}.pt")

    assert team(name, 2, action) == [0, 0]
    (seen, first), (other, others_first) = torch.load("seen-0.pt"), torch.load("seen-1.pt")
    assert len(seen) > 200 and not set(seen) & set(other), "other environments"
    assert len(first) == len(others_first) == 20 and first != others_first, "other noise, from equal states"
    assert len(set(seen)) > 0.99 * len(seen), "and other ones in each segment"


def test_target_kl_compares_the_mean_of_all_processes_and_stops_them_together():
    """Process 0 measures what is given here, process 1 measures 0."""

    def action(script, rank):
        change, clip, kls, updates = script.policy_change, script.clip_gradients, iter(measured), []
        measure = lambda *x: (torch.tensor(0.0 if rank else next(kls)), change(*x)[1])
        script.policy_change = measure
        script.clip_gradients = lambda *x: updates.append(1) or clip(*x)
        script.train(
            walk("ppo", "team", **ROLLOUT | dict(num_minibatches=4, total_timesteps=32), target_kl=1.0)
        )
        Path(f"updates-{rank}").write_text(str(len(updates)))

    for measured, count in (([1.9, 1.5, 2.1, 0.0], 3), ([1.9, 1.9, 1.9, 1.9], 4)):
        shutil.rmtree("team", ignore_errors=True)
        assert team("ppo", 2, action) == [0, 0]
        assert [int(Path(f"updates-{rank}").read_text()) for rank in (0, 1)] == [count, count]
        assert progress("team")[1]["policy/kl"] == pytest.approx(np.mean(measured[:count]) / 2)


def test_a_process_whose_parameters_differ_ends_the_run_before_it_is_saved(name):
    def action(script, rank):
        clip, calls = script.clip_gradients, []

        def clip_gradients(optimizer, max_norm):
            calls.append(1)
            if rank == 1 and len(calls) == 5:
                optimizer.param_groups[0]["params"][0].grad[0, 0] += 1e-3
            return clip(optimizer, max_norm)

        script.clip_gradients = clip_gradients
        script.train(walk(name, "team", **ROLLOUT, checkpoint_every=8))

    assert team(name, 2, action) == [99, 99]
    for rank in (0, 1):
        last = Path(f"output-{rank}").read_text().splitlines()[-1]
        assert last == "FloatingPointError: the parameters of the processes differ at step 160"
    assert checkpoint("team")["run"]["env_steps"] == 128


def test_the_prediction_of_speed_is_the_formula_that_it_names(monkeypatch):
    """alpha 2 s, beta 10 bytes/s. Two processes: 2 (2 + 40 / 20) for gradients, 2 + 5 / 10 for advantages."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    predicted = __import__("speed").predicted
    task = dict(updates=3, gradients=40, advantages=5, rewards=0, observations=0, check=20)
    assert predicted(100.0, task, 1, 2.0, 10.0) == 100
    assert predicted(100.0, task, 2, 2.0, 10.0) == pytest.approx(100 + 3 * (8 + 2.5) + 4)
    more = task | dict(rewards=40, observations=30)
    assert predicted(100.0, more, 2, 2.0, 10.0) == pytest.approx(100 + 3 * (8 + 2.5) + 4 + 2 * 4 + 5)
    assert predicted(100.0, task, 5, 2.0, 10.0) == pytest.approx(100 + 3 * (8 * (2 + 0.8) + 4 * 2.5) + 4 * 4)


# ------------------------------------------------------------------------------------------------- processes
def test_what_cannot_be_split_is_refused(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, load_script(name))  # what is loaded now is of this test alone
    script = load_once.__wrapped__(name, PATCHED / f"{name}.py")
    monkeypatch.setattr(script, "SIZE", 3)
    for change in (dict(num_envs=4), dict(num_envs=6, cuda_graph=True)):
        with pytest.raises(script.UsageError, match="torchrun: 3 processes must divide.*cuda-graph"):
            script.train(walk(name, **change))
    assert not Path("run").exists()


def test_one_process_of_torchrun_does_what_a_plain_one_does(name):
    load_script(name).train(walk(name))
    assert team(name, 1, train()) == [0]
    assert progress("team") == progress() and equal(parts("team"), parts())


def test_a_lost_process_ends_the_others_in_one_line_and_fewer_go_on(name):
    dies = {"signal": "SIGKILL", "after": 150}
    options = dict(checkpoint_every=16, total_timesteps=480)
    assert team(name, 3, train(num_envs=6, num_steps=8, rank_1=dict(env_kwargs=dies), **options)) == [
        1,
        -9,
        1,
    ]
    for rank in (0, 2):
        text = Path(f"output-{rank}").read_text()
        assert (
            len(re.findall(r"^.*: a process is lost; --resume goes on with any number \(.*\)$", text, re.M))
            == 1
        )
        assert "Traceback" not in text
    saved = checkpoint("team")["run"]["env_steps"]
    assert saved == 384, "of 450 steps"
    assert team(name, 2, resume) == [0, 0]
    assert checkpoint("team")["run"]["env_steps"] == 480 and checkpoint("team")["args"]["num_envs"] == 6
    steps = [row["step"] for row in progress("team") if "loss/policy" in row]
    assert steps == list(range(48, 481, 48)), "no row is lost or doubled"


def test_a_resumed_run_of_as_many_processes_repeats_one_that_was_not_stopped(name):
    options = dict(checkpoint_every=16, total_timesteps=256)
    assert team(name, 2, train(**options)) == [0, 0]
    os.rename("team", "whole")
    dies = {"signal": "SIGKILL", "after": 100}
    assert team(name, 2, train(rank_1=dict(env_kwargs=dies), **options)) == [1, -9]
    assert checkpoint("team")["run"]["env_steps"] == 192
    assert team(name, 2, resume) == [0, 0]
    assert progress("team") == progress("whole") and equal(parts("team"), parts("whole"))


def test_process_0_hears_a_signal_and_stops_all(name):
    """All processes get it, as from torchrun, and each at another moment."""
    stop = lambda after: {"signal": "SIGTERM", "after": after}
    codes = team(name, 2, train(env_kwargs=stop(70), checkpoint_every=48, rank_1=dict(env_kwargs=stop(20))))
    assert codes == [128 + signal.SIGTERM, 0]
    assert checkpoint("team")["run"]["env_steps"] == 160, "each process took 70 of 80 steps when it was heard"


def test_all_end_when_process_0_has_seen_the_return_that_was_asked_for(name):
    assert team(name, 2, train(stop_return=-1e9, eval_every=64, checkpoint_every=32)) == [0, 0]
    assert checkpoint("team")["run"]["env_steps"] == 0


# -------------------------------------------------------------------------------------------------- torchrun
def worker(agent: int, rank: int) -> int:
    """The process id of a rank that torchrun started."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"torchrun has no process {rank}")


def wait_for(condition, what: str, seconds: float = 60):
    """What condition() gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds the processes of torchrun in /proc"
)
def test_torchrun_restarts_a_run_from_its_last_checkpoint_and_sigterm_saves_it():
    """One process is killed; after the restart torchrun itself is asked to stop."""
    args = walk("ppo", "run", env_id="probe_envs:Slow-v0", num_steps=16, checkpoint_every=32, eval_every=0,
                total_timesteps=10**6)  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    words = [*TORCHRUN, *options, "--master-port", str(free_port()), str(PATCHED / "ppo.py"), *flags(args)]
    steps = lambda: Path("run/checkpoint.pt").exists() and checkpoint()["run"]["env_steps"]
    starts = lambda: json.loads(Path("run/environment.json").read_text())
    with open("output", "w") as output:
        torchrun = subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(steps, "a first checkpoint")
        os.kill(worker(torchrun.pid, 1), signal.SIGKILL)
        wait_for(lambda: len(starts()) == 2, "a restart")
        resumed_at = starts()[1]["step"]
        wait_for(lambda: steps() > resumed_at > 0, "a later checkpoint")
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(60)
    finally:
        torchrun.kill()
    text = Path("output").read_text()
    assert len(re.findall("^ppo.py: a process is lost; --resume goes on with any number", text, re.M)) == 1, (
        text
    )
    stopped_at = int(re.search(r"stopped at step (\d+), saved; to continue: python .* --resume run", text)[1])
    assert checkpoint()["run"]["env_steps"] == stopped_at > resumed_at
    rows = [row["step"] for row in progress() if "loss/policy" in row]
    assert rows == list(range(64, stopped_at + 1, 64)), "no row is lost or doubled"


@pytest.mark.parametrize("script", [PATCHED / f"{name}.py" for name in PARTED] + [ALGOS / "es.py"])
def test_processes_leave_their_group_before_python_ends(script):
    """Where a thread of gloo outlives it, some runs end in an abort: on a busy machine every second one."""
    code = """
import atexit, runpy, sys, torch.distributed as dist
atexit.register(lambda: print("in a group:", dist.is_initialized()))  # runs after those that follow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    args = tiny(load_script(script.stem), num_envs=4)
    env = os.environ | dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    env |= dict(PYTHONPATH=str(TESTS), TORCHELASTIC_RESTART_COUNT="0")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(script), *flags(args)],
            env=env | dict(RANK=rank, LOCAL_RANK=rank), stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert [text.splitlines()[-1] for text in said] == ["in a group: False"] * 2


@pytest.fixture
def hosts():
    """Two hosts: the words that run a command on each, its address and its network device."""
    mark = f"{os.getpid() % 10**5}"
    names, links = [f"plainrl{mark}{x}" for x in "ab"], [f"p{mark}{x}" for x in "ab"]
    ip = lambda words: subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=True)
    try:
        try:
            ip(f"link add {links[0]} type veth peer name {links[1]}")
            for i, (host, link) in enumerate(zip(names, links, strict=True)):
                ip(f"netns add {host}")
                ip(f"link set {link} netns {host}")
                ip(f"-n {host} addr add 10.213.7.{i + 1}/24 dev {link}")
                ip(f"-n {host} link set {link} up")
                ip(f"-n {host} link set lo up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces are not permitted here: {why}")
        yield [(["ip", "netns", "exec", host], f"10.213.7.{i + 1}", links[i]) for i, host in enumerate(names)]
    finally:
        for words in [f"link del {links[0]}", *(f"netns del {host}" for host in names)]:
            subprocess.run(["ip", *words.split()], capture_output=True)


def test_two_hosts_do_what_two_processes_of_one_host_do(hosts):
    args = walk("ppo", "run", num_steps=16)
    running = []
    for i, (there, address, link) in enumerate(hosts):
        env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link}
        options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {hosts[0][1]}:29400"
        options += f" --rdzv-conf is_host={1 - i} --local-addr {address}"  # their names tell nothing here
        words = [*there, *TORCHRUN, *options.split(), str(PATCHED / "ppo.py"), *flags(args)]
        output = open(f"output-{address}", "w")
        running.append(subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT))
    try:
        assert [torchrun.wait(100) for torchrun in running] == [0, 0]
    finally:
        for torchrun in running:
            torchrun.kill()
    assert team("ppo", 2, train(num_steps=16)) == [0, 0]
    assert progress() == progress("team") and equal(parts(), parts("team"))
