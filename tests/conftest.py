"""The harness: every script of the folder ALGOS is tested by existing.

PLAINRL_ALGOS names another folder of scripts, as a copy with a mistake put in to see a test fail.
"""

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: forks need it, and the numbers must not depend on it

import gymnasium as gym
import probe_envs
import pytest
import torch

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ALGOS = Path(os.environ.get("PLAINRL_ALGOS", ROOT / "algos")).resolve()
SCRIPTS = sorted(ALGOS.glob("*.py"))

# A training of a second or less; a script takes the fields that its Args has.
TINY = dict(
    seed=1, device="cpu", total_timesteps=384, eval_every=128, checkpoint_every=128, eval_episodes=2,
    num_envs=2, num_steps=32, update_epochs=2, num_minibatches=2, batch_size=16, buffer_size=400,
    learning_starts=64, train_every=16, hidden_sizes=(8,), normalize_obs=True, normalize_reward=True,
    activation="tanh", shared_trunk=False, population=4, log_every=64, episodes_per_update=2, value_epochs=2,
    value_minibatches=2,
)  # fmt: skip


@cache
def load_script(path: Path):
    """The script as a module, under the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Script:
    """A script of ALGOS: as a module in this process, in a fork of it, or as a command of its own."""

    def __init__(self, path: Path):
        self.path, self.name, self.module = path, path.stem, load_script(path)
        default_env = gym.make(self.module.Args.env_id)
        boxes = isinstance(default_env.action_space, gym.spaces.Box)
        self.discrete_obs = isinstance(default_env.observation_space, gym.spaces.Discrete)
        self.actions = "box" if boxes else "discrete"

    def has(self, field: str) -> bool:
        return field in self.module.Args.__dataclass_fields__

    @property
    def whole_episodes(self) -> bool:
        """A rollout is a number of episodes, not of steps."""
        return self.has("episodes_per_update") or self.has("population")

    @property
    def step_by_step(self) -> bool:
        """It can be stopped after every step of the environments, not only after a rollout."""
        return self.has("log_every") and not self.has("num_steps")

    def env(self, name: str, **kwargs) -> dict:
        """Arguments for an environment of probe_envs that this script can act in."""
        if name not in ("Box", "Masked", "Spaces"):
            kwargs["actions"] = self.actions
        if name == "Walk":
            kwargs["discrete_obs"] = self.discrete_obs
        limit = {}
        if self.whole_episodes:  # a rollout of 64 steps in all, as with num_steps and num_envs of TINY
            limit = {} if self.has("population") else {"max_episode_steps": 100}
            if name in ("Walk", "Broken"):
                kwargs["length"] = 16 if self.has("population") else 32
            if name == "Walk":
                kwargs["edge"] = 100
        return dict(env_id=f"probe_envs:{name}-v0", env_kwargs=json.dumps(kwargs)) | limit

    def args(self, run_dir="run", **fields):
        """Args with the settings of TINY in the Walk environment, then those given."""
        values = TINY | self.env("Walk") | {"run_dir": str(run_dir)} | fields
        return self.module.Args(**{name: value for name, value in values.items() if self.has(name)})

    def flags(self, run_dir="run", **fields) -> list[str]:
        """The same as a command line."""
        words, given = [], vars(self.args(run_dir, **fields))
        for name in given.keys() & (TINY | self.env("Walk") | {"run_dir": 0} | fields).keys():
            flag, value = name.replace("_", "-"), given[name]
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        return words

    def train(self, run_dir="run", **fields):
        return self.module.train(self.args(run_dir, **fields))

    def resume(self, run_dir="run", **fields):
        """As --resume: the arguments are those of the run."""
        args = self.module.parse_args(["--resume", str(run_dir)])
        return self.module.train(self.module.replace(args, **fields))

    def main(self, *argv) -> int:
        """Runs main as the command would. Returns the exit code."""
        before = sys.argv
        sys.argv = [self.path.name, *map(str, argv)]
        try:
            self.module.main()
            return 0
        except SystemExit as stop:
            return stop.code or 0
        finally:
            sys.argv = before

    def command(self, folder: Path, *argv, timeout=120) -> subprocess.CompletedProcess:
        """Copies the file alone into folder and runs it there."""
        shutil.copy(self.path, folder)
        env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, self.path.name, *map(str, argv)]
        return subprocess.run(
            words,
            cwd=folder,
            env=env,
            timeout=timeout,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )


def fork(action, output: Path = Path(os.devnull)):
    """Starts action() in a fork of this process, which has the imports already. Returns its process id.

    The child exits with the code of SystemExit, with 0 at the end, and with 99 and a traceback else.
    """
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    signal.alarm(120)  # one that waits for ever dies of SIGALRM
    try:
        where = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(where, 1), os.dup2(where, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        action()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a fork; minus the number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def progress(run_dir="run") -> list[dict[str, str]]:
    """Rows of progress.csv without what a clock measured and without empty cells."""
    with (Path(run_dir) / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    clock = ("wall_time", "speed/")
    return [{k: v for k, v in row.items() if v and not k.startswith(clock)} for row in rows]


def points(run_dir="run") -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: tag to its (step, value) in order, without the speed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("speed/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(tags)}


def age(run_dir="run") -> None:
    """Makes the event files of a run older by ten seconds in their names, which tell TensorBoard their order.

    Writers of the same second would be in no order; a person who resumes a run is slower than that.
    """
    for path in Path(run_dir).glob("events.out.tfevents.*"):
        second = path.name.split(".")[3]
        path.rename(path.with_name(path.name.replace(second, str(int(second) - 10), 1)))


def checkpoint(run_dir="run", name="checkpoint.pt") -> dict:
    return torch.load(Path(run_dir) / name, map_location="cpu", weights_only=True)


def equal(a, b) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture(scope="session", params=SCRIPTS, ids=lambda path: path.stem)
def script(request) -> Script:
    return Script(request.param)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test works in an empty folder; signals, the path and the probes are as before after it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    handlers, path = [signal.getsignal(number) for number in signals], list(sys.path)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: pytest.fail(f"nobody caught signal {number}"))
    probe_envs.Walk.forget()
    probe_envs.Broken.steps = 0
    for log in (probe_envs.Boundary.steps, probe_envs.Boxes.actions, probe_envs.Spaces.actions):
        log.clear()
    yield folder
    sys.path[:] = path
    for number, handler in zip(signals, handlers, strict=True):
        signal.signal(number, handler)
