"""The harness: every script of the folder ALGOS is tested by existing.

PLAINRL_ALGOS names another folder of scripts, as a copy with a mistake put in to see a test fail.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import fields
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
NAMES = sorted(path.stem for path in ALGOS.glob("*.py"))

# A training of a second or less; a script takes the fields that its Args has.
TINY = dict(
    device="cpu", total_timesteps=384, eval_every=128, checkpoint_every=64, eval_episodes=2, num_envs=2,
    num_steps=32, update_epochs=2, value_epochs=2, num_minibatches=2, batch_size=16, buffer_size=400,
    learning_starts=64, train_every=16, updates_per_step=0.25, hidden_sizes=(8,), normalize_obs=True,
    normalize_reward=True,
    population=4, log_every=64, episodes_per_update=2, num_critics=2, num_quantiles=5, critic_sizes=(8,),
    initial_obs_steps=4, expert_episodes=20, dagger_iterations=2, minibatches_per_epoch=8,
    dagger_episodes=4, validation_share=0.25, meta_batch_size=2, episodes_per_task=1, horizon=10,
    num_train_tasks=4, num_test_tasks=2, adaptation_episodes=1, steps_prior=8, steps_posterior=8,
    extra_steps_posterior=8, embedding_batch_size=4, latent_dim=2, encoder_sizes=(8,),
)  # fmt: skip
BOXES = ("ddpg_td3", "sac", "tqc", "crossq", "maml", "pearl")  # they get Box actions in tests
EXPERT = """
def load_policy(path):
    space = make_envs(Args(**load(path)["args"]), 1).single_action_space

    def act(obs, info):
        action = 3.0 * np.sign(-obs[:, :1]) if isinstance(space, Box) else (obs[:, 0] < 0).astype(int)
        return np.broadcast_to(action.reshape(len(obs), *[1] * len(space.shape)), (len(obs), *space.shape))

    return act
"""  # steers the walk back to 0, beyond the bounds of the actions


@cache
def load_script(name: str, path: Path | None = None):
    """A script of ALGOS as a module, under the name of its file."""
    spec = importlib.util.spec_from_file_location(name, path or ALGOS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has(module, name: str) -> bool:
    return name in {field.name for field in fields(module.Args)}


def make_expert(args, folder="expert", source=EXPERT) -> str:
    """Writes what a run of reinforce.py for the environment of args leaves, with the policy of source."""
    script, folder = load_script("reinforce"), Path(folder).absolute()
    folder.mkdir(exist_ok=True)
    known = {name: value for name, value in vars(args).items() if has(script, name)}
    torch.save(dict(args=known), folder / "checkpoint.pt")
    (folder / "reinforce.py").write_text(Path(script.__file__).read_text() + source)
    return str(folder)


def tiny(module, run_dir="run", **changes):
    """Arguments of a tiny training in the Walk environment; changes come on top where there are fields."""
    actions = "box" if module.__name__ in BOXES else "discrete"
    kwargs = dict(actions=actions, discrete_obs=module.__name__ == "q_learning")
    values = dict(env_id="probe_envs:Walk-v0", env_kwargs=kwargs, run_dir=str(run_dir)) | TINY | changes
    args = module.Args(**{name: value for name, value in values.items() if has(module, name)})
    if has(module, "expert") and not (args.expert or args.dataset):
        args.expert = make_expert(args)
    return args


def flags(args) -> list[str]:
    """The same arguments as a command line."""
    words = []
    for name, value in vars(args).items():
        if value == getattr(type(args)(), name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else [value]
            words += [f"--{flag}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return words


def call_main(module, *argv) -> int:
    """Runs main as the command would. Returns the exit code."""
    before, sys.argv = sys.argv, [f"{module.__name__}.py", *map(str, argv)]
    try:
        module.main()
        return 0
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.argv = before


def command(name: str, folder: Path, *argv, timeout=120) -> subprocess.CompletedProcess:
    """Copies the file alone into folder and runs it there."""
    shutil.copy(ALGOS / f"{name}.py", folder)
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, f"{name}.py", *map(str, argv)]
    options = dict(cwd=folder, env=env, timeout=timeout, stdin=subprocess.DEVNULL)
    return subprocess.run(words, capture_output=True, text=True, **options)


def fork(action, output: Path = Path(os.devnull)) -> int:
    """Starts action() in a fork of this process, which has the imports already. Returns its process id.

    The child exits with the code of SystemExit (1 for a message), with 0 at the end, and with 99 and a
    traceback else.
    """
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork():
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
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a fork; minus the number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def progress(run_dir="run") -> list[dict]:
    """Rows of progress.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (Path(run_dir) / "progress.jsonl").read_text().splitlines()]
    clock = ("seconds", "speed/steps_per_second")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


def checkpoint(run_dir="run", name="checkpoint.pt") -> dict:
    return torch.load(Path(run_dir) / name, map_location="cpu", weights_only=True)


def parts(run_dir="run") -> dict:
    """All of a checkpoint but its arguments and the clock."""
    state = checkpoint(run_dir)
    return {name: value for name, value in state.items() if name != "args"} | {
        "run": {name: value for name, value in state["run"].items() if name != "seconds"}
    }


def equal(a, b) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def batches(script, record) -> list[dict]:
    """Copies of all that is drawn from the buffer, before the script changes it."""
    drawn, sample = [], script.ReplayBuffer.sample

    def watched(self, batch_size):
        batch = sample(self, batch_size)
        drawn.append({name: x.clone() for name, x in batch.items()})
        return batch

    record(script.ReplayBuffer, "sample")
    script.ReplayBuffer.sample = watched  # monkeypatch puts the first one back
    return drawn


def spaces(obs=None, action=None) -> tuple[gym.Space, gym.Space]:
    """Of observations and actions; vectors of 4 and two choices where none is given."""
    return obs or gym.spaces.Box(-1, 1, (4,)), action or gym.spaces.Discrete(2)


@pytest.fixture(params=NAMES)
def script(request):
    """Each script of ALGOS as a module."""
    return load_script(request.param)


@pytest.fixture
def ppo():
    return load_script("ppo")


def script_of(recipe: str) -> str:
    """The script whose name a recipe begins with; of ppo and ppo_lstm the longer one."""
    return max((name for name in NAMES if recipe.startswith(f"{name}_")), key=len)


@pytest.fixture
def cook(tmp_path):
    """cook(recipe) -> the script as a module, patched in a folder of its own."""

    def patched(recipe):
        script = script_of(recipe)
        (tmp_path / "algos").mkdir(exist_ok=True)
        shutil.copy(ALGOS / f"{script}.py", tmp_path / "algos")
        patch = ["git", "apply", str(ROOT / "recipes" / f"{recipe}.patch")]
        subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
        subprocess.run(patch, cwd=tmp_path, check=True)
        path = tmp_path / "algos" / f"{script}.py"
        spec = importlib.util.spec_from_file_location(recipe, path)
        sys.modules[recipe] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return patched


@pytest.fixture
def record(monkeypatch):
    """record(owner, name) lists (arguments, result) of the calls of owner.name from then on."""

    def record(owner, name):
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
            calls.append((given, original(*args, **kwargs)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return record


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test works in an empty folder; signals, the path and the probes are as before after it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    path = list(sys.path)
    probe_envs.forget()
    yield folder
    sys.path[:] = path
    for number, handler in handlers.items():
        signal.signal(number, handler)
