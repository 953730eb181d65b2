"""Many runs: a cluster of Ray that loses a machine, and the search for better settings."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import get_type_hints

import pytest
from conftest import ALGOS, ROOT, fork, wait
from test_benchmark import call, read, tool

# A script that keeps the contract with run.py and tune.py and starts in no time. Each step adds a draw, of
# the seed and the step, times a scale: the larger, the better.
WALK = """
import json, random, signal, sys, time
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Args:
    env_id: str = ""
    eval_every: int = 1
    eval_episodes: int = 10
    total_timesteps: int = 12
    scale: float = 2.0
    offset: float = 0.0
    pace: float = 0.1

TUNED = {"Walk-v0": dict(eval_episodes=1)}

def make_args(env_id):
    return Args(**TUNED.get(env_id, {}) | {"env_id": env_id})

def main():
    words = {word[2:]: value for word, value in zip(sys.argv[1::2], sys.argv[2::2])}
    old = words.get("resume") or words.get("evaluate")
    fresh = {"scale": 2, "offset": 0, "pace": 0.1, **words, "step": 0, "sum": 0.0}
    state = json.loads((Path(old) / "checkpoint.pt").read_text()) if old else fresh
    if "evaluate" in words:
        n = int(words["eval-episodes"])
        told = {f"eval/return_{x}": state["sum"] for x in ("mean", "std", "min", "max")}
        print(json.dumps(told | dict(step=state["step"], episodes=n, returns=n * [state["sum"]])))
        return
    folder = Path(old or words["run-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    log, about = folder / "progress.jsonl", folder / "environment.json"
    entries = json.loads(about.read_text()) if about.exists() else []
    versions = dict(python="3 x", torch="2", gymnasium="1", numpy="2", device="cpu", step=state["step"])
    about.write_text(json.dumps([*entries, versions]))
    (folder / "args.json").write_text(json.dumps(dict(eval_episodes=1)))
    if old:
        rows = [row for row in log.read_text().splitlines() if json.loads(row)["step"] <= state["step"]]
        assert len(rows) == state["step"] + 1, "the log lost rows on its way"
        log.write_text("".join(f"{row}\\n" for row in rows))
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    while True:
        if not old:
            row = {f"eval/return_{x}": state["sum"] for x in ("mean", "std", "min", "max")}
            with log.open("a") as file:
                file.write(json.dumps(dict(row, step=state["step"], seconds=state["step"] / 7)) + "\\n")
            (folder / "checkpoint.part").write_text(json.dumps(state))
            (folder / "checkpoint.part").replace(folder / "checkpoint.pt")
        old = None
        if stopped:
            sys.exit(143)
        if state["step"] == int(state["total-timesteps"]):
            break
        time.sleep(float(state["pace"]))
        state["step"] += 1
        draw = random.Random(f"{state['seed']} {state['step']}").random()
        state["sum"] += draw * float(state["scale"]) + float(state["offset"])

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cluster():
    """Two machines of two cores, as far as Ray can tell, with nothing in common but the network."""
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False))
    machines.add_node(num_cpus=2)
    yield machines
    machines.shutdown()


def walks(folder: Path, *options, seeds=12) -> list[str]:
    """The words of run.py that train the walk and leave everything in folder."""
    folder.mkdir(exist_ok=True)
    script = folder.parent / "walk.py"
    script.write_text(WALK)
    words = ["--script", script, "--env-id", "Walk-v0", "--steps", 12, "--args=--pace 0.3 --scale 2"]
    words += ["--variant", "slow", "--seeds", seeds, "--final-episodes", 3]
    return list(map(str, [*words, "--runs", folder / "runs", "--results", folder / "results", *options]))


def start(program: str, *words) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([sys.executable, str(ROOT / "benchmark" / program), *words], **pipes)


def steps(folder: Path) -> dict[str, int]:
    """How far the runs are whose files came home, by seed."""
    return {path.parent.name: json.loads(path.read_text())["step"] for path in folder.rglob("checkpoint.pt")}


def wait_until(condition, child: subprocess.Popen, seconds=120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and child.poll() is None, child.communicate()[0]
        time.sleep(0.05)


def starts(folder: Path) -> list[list[int]]:
    """The steps at which each run began and went on."""
    return [[x["step"] for x in json.loads(path.read_text())] for path in folder.rglob("environment.json")]


def tables(folder: Path) -> list[list[dict]]:
    """Runs and evaluations, without what a clock measured."""
    clocks = dict(wall_time="", steps_per_second="")
    clean = lambda row: row | clocks | {"command": row.get("command", "").replace(str(folder), "")}
    return [[clean(row) for row in read(folder / f"results/{name}.csv")] for name in ("runs", "evaluations")]


@pytest.mark.cluster
def test_a_cluster_that_loses_a_machine_loses_no_run(cluster, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    call("run.py", *walks(here, "--jobs", 6))
    child = start("run.py", *walks(there, "--engine", "ray", "--address", cluster.address))
    wait_until(lambda: sum(2 <= step <= 9 for step in steps(there).values()) >= 3, child)  # of 2 on each
    lost = cluster.list_all_nodes()[-1]
    cluster.remove_node(lost, allow_graceful=False)
    text = child.communicate(timeout=240)[0]
    cluster.add_node(num_cpus=2)
    assert child.returncode == 0 and "walk-slow Walk-v0 12 | 12 " in text, text
    assert tables(there) == tables(here) and [len(x) for x in tables(there)] == [12, 12 * 13]
    assert all(began == [0] for began in starts(here))
    again = [began for began in starts(there) if len(began) > 1]
    assert 1 <= len(again) <= 2 and any(1 <= began[1] < 12 for began in again), starts(there)


@pytest.mark.cluster
def test_what_a_stopped_program_had_done_on_a_cluster_came_home(cluster, tmp_path):
    words = walks(tmp_path / "runs", "--args=--pace 0.6 --scale 2", seeds=6)
    child = start("run.py", *words, "--engine", "ray", "--address", cluster.address)
    wait_until(lambda: sum(step >= 2 for step in steps(tmp_path).values()) >= 3, child)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    before = steps(tmp_path)
    assert child.returncode == 143 and len(before) == 4 and max(before.values()) < 12, before
    call("run.py", *words, "--jobs", 6)
    began = sorted(start[1] for start in starts(tmp_path) if len(start) > 1)
    assert began == sorted(before.values()) and [len(x) for x in tables(tmp_path / "runs")] == [6, 6 * 13]


@pytest.mark.cluster
def test_a_cluster_trains_a_script_to_the_same_table(cluster, tmp_path):
    words = ["--script", ALGOS / "q_learning.py", "--env-id", "FrozenLake-v1", "--steps", 20_000]
    words += ["--seeds", 1, "--final-episodes", 3]
    found = []
    for options in (["--jobs", 2], ["--engine", "ray", "--address", cluster.address]):
        folder = tmp_path / options[0]
        call("run.py", *words, *options, "--runs", folder / "runs", "--results", folder / "results")
        found.append(tables(folder))
    assert found[0] == found[1] and [len(x) for x in found[0]] == [1, 3]


def highest_and_lowest(spaces: dict) -> list[dict]:
    end = lambda space, i: space[-i] if isinstance(space, list) else space[("low", "high")[i]]
    return [{name: end(space, i) for name, space in spaces.items()} for i in (0, 1)]


def test_what_is_tried_is_around_the_own_value_and_accepted_by_the_script(script):
    tune = tool("tune")
    env_id = next((name for name in script.TUNED if name.endswith("-v1")), "CartPole-v1")
    own = script.make_args(env_id, device="cpu")
    space = tune.spaces(own, [], {})
    assert "gamma" in space and not {"seed", "device", "eval_every", "total_timesteps"} & set(space)
    assert set(tune.inside(own, space)) == set(space)  # trial 0 is in the space
    for settings in highest_and_lowest(space):
        words = ["--env-id", env_id, "--device", "cpu", *tune.flags(settings)]
        args = script.parse_args(words)
        for name, value in settings.items():
            assert getattr(args, name) == (tuple(value) if isinstance(value, list) else value)
        script.set_up(args)


def test_the_range_of_a_field_follows_from_its_type_and_value(ppo):
    tune, hints = tool("tune"), get_type_hints(ppo.Args, include_extras=True)
    space = lambda name, value: tune.space_of(hints[name], value)
    assert space("num_steps", 128) == [32, 64, 128, 256, 512] and space("update_epochs", 1) == [1, 2, 4]
    assert space("learning_rate", 3e-4) == {"low": 3e-5, "high": 3e-3, "log": True}
    assert space("critic_lr", 1e-3) == {"low": 1e-4, "high": 1e-2, "log": True}
    assert space("gamma", 0.99) == [0.9, 0.96, 0.98, 0.99, 0.995, 0.9975, 0.999]
    assert space("gamma", 1.0)[-1] == 1 and space("gamma", 0.2) == {"low": 0.02, "high": 1, "log": True}
    assert space("clip_coef", 0.9) == {"low": 0.09, "high": 9.0, "log": True}
    assert tune.space_of(bool | None, True) == [False, True]
    assert space("anneal_lr", True) == [False, True] and "relu" in space("activation", "tanh")
    assert space("hidden_sizes", (64, 8))[0] == [16, 2]
    assert space("critic_lr", None) is None and space("entropy_coef", 0.0) is None
    assert space("target_kl", math.inf) is None


def test_a_wrong_field_or_one_without_a_range_is_said(tmp_path):
    walks(tmp_path / "runs")
    words = ["tune.py", "--script", tmp_path / "walk.py", "--env-id", "Walk-v0", "--trials", 1]
    assert "there is no scales in Args" in call(*words, "--params", "pace,scales", code=1)
    assert "--space: Expecting" in call(*words, "--space", "{scale: 3}", code=2)
    assert "--space: " in call(*words, "--space", tmp_path / "none.json", code=2)
    assert "offset say no range" in call(*words, "--params", "offset,scale", code=1)


def search(folder: Path, *options) -> list[str]:
    """The words of tune.py that search a better scale of the walk, whose own one is 2."""
    walks(folder / "runs")
    (folder / "space.json").write_text(json.dumps({"scale": {"low": 0.5, "high": 8.0, "log": True}}))
    words = ["--script", folder / "walk.py", "--env-id", "Walk-v0", "--space", folder / "space.json"]
    words += ["--seeds", 2, "--final-episodes", 3, "--runs", folder / "runs"]
    return list(map(str, [*words, *options]))


def check(words: list[str], folder: Path, text: str, count: int) -> None:
    """What was printed names the best scale, and the worse ones were stopped before their end."""
    trials = [(int(i), x, words) for i, x, words in re.findall(r"trial (\d+): (\S+) (.*)", text)]
    assert len(trials) == count and (own := trials.pop(trials.index(min(trials))))[2] == "(the own settings)"
    scores = {float(words.split()[-1]): float(x) for _, x, words in trials if x != "pruned"}
    pruned = [float(words.split()[-1]) for _, x, words in trials if x == "pruned"]
    best = max(scores)
    sums = [sum(Random(f"{seed} {i}").random() for i in range(1, 13)) for seed in (101, 102)]
    for scale, mean in [(2.0, float(own[1])), *scores.items()]:
        assert mean == pytest.approx(scale * sum(sums) / 2, abs=0.06)
    assert pruned and max(pruned) < best > 2 and max(scores.values()) == scores[best] > float(own[1])
    cut = [path.parent for path in folder.rglob("checkpoint.pt") if json.loads(path.read_text())["step"] < 12]
    assert cut and not any(json.loads(run.with_suffix(".json").read_text())["trained"] for run in cut)
    source, entry = re.findall(r"((?:    # .*\n)+)(    \"Walk.*)", text)[0]
    assert eval(f"{{{entry}}}") == {"Walk-v0": dict(eval_episodes=1, scale=best)}
    told = (
        f"python benchmark/tune.py {shlex.join(words)}: {scores[best]} on seeds 101 to 102, before {own[1]}"
    )
    assert " ".join(source.replace("#", "").split()) == told


def test_a_search_finds_a_better_setting_and_goes_on_after_a_stop(tmp_path):
    words = search(tmp_path, "--trials", 9, "--args=--pace 0.2")
    child = start("tune.py", *words)
    wait_until(lambda: 2 <= steps(tmp_path).get("102", 0) <= 6, child)  # the second seed of trial 0
    child.send_signal(signal.SIGTERM)
    text = child.communicate(timeout=120)[0]
    assert child.returncode == 143 and "trial 0" not in text, text
    check(words, tmp_path, call("tune.py", *words), 9)
    again = [began for began in starts(tmp_path) if len(began) > 1]
    assert len(again) == 1 and again[0][1] >= 2  # trial 0 went on
    assert "trial" not in call("tune.py", *words).partition("The best")[0]  # all is done
    assert "another search" in call("tune.py", *words, "--seeds", 3, code=1)


@pytest.mark.cluster
def test_a_search_on_a_cluster_finds_a_better_setting(cluster, tmp_path):
    ray = ["--jobs", 2, "--engine", "ray", "--address", cluster.address]
    words = search(tmp_path, "--trials", 6, "--args=--pace 0.3", *ray)
    check(words, tmp_path, call("tune.py", *words), 6)


def test_settings_that_fail_are_said_and_those_of_the_script_end_the_search(tmp_path):
    words = ["tune.py", *search(tmp_path), "--seeds", 1, "--trials", 4]
    (tmp_path / "space.json").write_text(json.dumps({"scale": ["x", 3]}))
    text = call(*words, "--args=--pace 0.01")
    assert "FAILED: exit code 1: ValueError" in text and "scale=3)," in text
    text = call(*words, "--args=--pace x", "--runs", tmp_path / "other", code=1)
    assert "trial 0: FAILED" in text and "trial 1" not in text


def test_a_machine_given_up_for_dead_may_not_write_any_more(tmp_path):
    home = tool("run").Home(tmp_path)
    home.load("run/1", "first")
    assert not home.keep("run/1", "first", {"run/1/checkpoint.pt": b"1", "run/1/x.tfevents.1": b"1"})
    assert home.load("run/1", "second") == {"run/1/checkpoint.pt": b"1"}
    assert home.keep("run/1", "first", {"run/1/checkpoint.pt": b"2"})
    assert (tmp_path / "run/1/checkpoint.pt").read_bytes() == b"1"
    home.stop("run/1", True)
    assert home.keep("run/1", "second", {"run/1/checkpoint.pt": b"3"})
    assert (tmp_path / "run/1/checkpoint.pt").read_bytes() == b"3"
    (tmp_path / "run/1/checkpoint.pt").unlink()  # killed before the first one: nothing to go on from
    assert home.load("run/1", "third") == {} and not (tmp_path / "run/1").exists()


def test_files_come_home_with_an_evaluation_or_a_checkpoint_and_the_record_first(tmp_path):
    new, seen = tool("run").new_files, {}
    (tmp_path / "run/1").mkdir(parents=True)
    for name in (
        "run/1/a.jsonl",
        "run/1/checkpoint.pt",
        "run/1/z.part",
        "run/1.json",
        "run/1.log",
        "run/2.json",
    ):
        (tmp_path / name).write_text(name)
    assert list(new(tmp_path, "run/1", seen)) == [
        "run/1.json",
        "run/1/checkpoint.pt",
        "run/1.log",
        "run/1/a.jsonl",
    ]
    (tmp_path / "run/1/a.jsonl").write_text("more")
    assert new(tmp_path, "run/1", seen) == {}
    (tmp_path / "run/1/best.pt").write_text("b")
    assert new(tmp_path, "run/1", seen) == {"run/1/a.jsonl": b"more", "run/1/best.pt": b"b"}
    (tmp_path / "run/1.log").write_text("error")
    assert new(tmp_path, "run/1", seen, logs=True) == {"run/1.log": b"error"}


@pytest.mark.cluster
@pytest.mark.skipif(not shutil.which("setpriv"), reason="Linux only")
def test_a_training_on_a_cluster_dies_with_the_process_that_started_it(tmp_path):
    run = tool("run")
    run.ON_NODE = True
    sleep = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    file = (tmp_path / "pid").as_posix()
    with (tmp_path / "lock").open("w") as lock:
        words = ["-c", sleep.replace("pid'", f"{file}'", 1)]
        parent = fork(lambda: run.call(words, tmp_path / "log", lock, bool))
        end = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
    os.kill(parent, signal.SIGKILL)
    wait(parent)
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
