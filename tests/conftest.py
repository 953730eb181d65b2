"""The harness: every script of the folder ALGOS is tested by existing.

PLAINRL_ALGOS names another folder of scripts, such as a copy with a mistake put in to see a test fail.
"""

import importlib.util
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
import zlib
from dataclasses import fields
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: forks need it, and the numbers must not depend on it

import gymnasium as gym
import numpy as np
import odd_envs
import probe_envs
import pytest
import torch
from gymnasium.spaces import Box, flatten

subprocess.getoutput = cache(subprocess.getoutput)  # every training asks git for the same commit

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ALGOS = Path(os.environ.get("PLAINRL_ALGOS", ROOT / "algos")).resolve()
NAMES = sorted(path.stem for path in ALGOS.glob("*.py"))
CPU = torch.device("cpu")
AGENTS = {}  # of the scripts that were loaded

# A training of a second or less; a script takes the fields that its Args has.
TINY = dict(
    device="cpu", total_timesteps=192, eval_every=64, checkpoint_every=32, eval_episodes=2, num_envs=2,
    num_steps=16, update_epochs=2, value_epochs=2, num_minibatches=2, batch_size=16, buffer_size=200,
    learning_starts=32, train_every=8, updates_per_step=0.25, hidden_sizes=(8,), normalize_obs=True,
    normalize_reward=True,
    population=4, log_every=32, episodes_per_update=2, num_critics=2, num_quantiles=5, critic_sizes=(8,),
    actor_width=8, critic_width=8,
    initial_obs_steps=4, expert_episodes=20, dagger_iterations=2, minibatches_per_epoch=8,
    dagger_episodes=4, validation_share=0.25, meta_batch_size=2, episodes_per_task=1, horizon=10,
    num_train_tasks=4, num_test_tasks=2, adaptation_episodes=1, steps_prior=8, steps_posterior=8,
    extra_steps_posterior=8, embedding_batch_size=4, latent_dim=2, encoder_sizes=(8,),
)  # fmt: skip
EXPERT = """
def load_policy(path):
    space, agent = standard_spaces(Args(**load(path)["args"]))[1], nn.Identity()

    def act(obs, info):
        obs = obs.reshape(len(obs), -1)
        action = 3.0 * np.sign(-obs[:, :1]) if isinstance(space, Box) else (obs[:, 0] < 0).astype(int)
        return np.broadcast_to(action.reshape(len(obs), *[1] * len(space.shape)), (len(obs), *space.shape))

    agent.act = act
    return Policy(agent, None)
"""  # steers the walk back to 0, beyond the bounds of the actions


# ---------------------------------------------------------------------------------------------------- scripts
def load_script(name: str, path: Path | None = None):
    """A script of ALGOS, or another file, as the module of this name."""
    sys.modules[name] = module = load_once(name, path or ALGOS / f"{name}.py")
    return module


@cache
def load_once(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if path.parent == ALGOS:
        AGENTS.setdefault(name, module.Agent)  # a test may put another one in its place
    return module


def has(module, name: str) -> bool:
    return name in {field.name for field in fields(module.Args)}


def plays(module) -> bool:
    """Whether its steps are those of environments; those of a script that has data are of the gradient."""
    return not has(module, "dataset")


def scripts_with(*names: str) -> list[str]:
    """The scripts that define all of these names."""
    return [name for name in NAMES if all(hasattr(load_script(name), x) for x in names)]


@cache
def decides(name: str, obs: str, action: str) -> bool:
    """Whether a script has an agent for these spaces, keys of those of probe_envs."""
    module = load_script(name)
    args = module.Args(**{key: value for key, value in TINY.items() if has(module, key)})
    args.env_id, args.env_kwargs = "probe_envs:Spaces-v0", dict(obs=obs, action=action)
    try:
        AGENTS[name](*module.standard_spaces(args), args, CPU)
    except module.UsageError:
        return False
    return True


def takes(name: str, action: str) -> bool:
    """Whether a script decides among such actions."""
    return decides(name, "vector", action)


def reads(name: str, obs: str) -> bool:
    """Whether a script acts on such observations."""
    return decides(name, obs, "discrete" if takes(name, "discrete") else "box")


def takers(*actions: str) -> list[str]:
    """The scripts that decide among all of these actions."""
    return [name for name in NAMES if all(takes(name, action) for action in actions)]


# -------------------------------------------------------------------------------------------------- arguments
def make_expert(args, folder="expert", source=EXPERT) -> str:
    """Writes what a run of reinforce.py for the environment of args leaves, with the policy of source."""
    script, folder = load_script("reinforce"), Path(folder).absolute()
    folder.mkdir(exist_ok=True)
    known = {name: value for name, value in vars(args).items() if has(script, name)}
    torch.save(dict(args=known), folder / "checkpoint.pt")
    (folder / "reinforce.py").write_text(Path(script.__file__).read_text() + source)
    return str(folder)


def make_dataset(args, file="dataset.npz") -> str:
    """Writes three episodes in the spaces of the environment of args, which is not stepped."""
    try:
        env, rng = gym.make(args.env_id, **args.env_kwargs), np.random.default_rng(0)
    except gym.error.Error:  # the script will say it
        return file
    obs_space, action_space, lengths = env.observation_space, env.action_space, np.array([20, 7, 15])
    env.close()
    obs_space.seed(0), action_space.seed(0)

    def draw(space):
        if isinstance(space, Box) and space.dtype.kind == "f":
            return rng.normal(size=space.shape).clip(space.low, space.high).astype(space.dtype)
        return space.sample() if space.shape is not None else flatten(space, space.sample())

    steps = range(lengths.sum())
    arrays = dict(obs=[draw(obs_space) for _ in steps], next_obs=[draw(obs_space) for _ in steps])
    arrays |= dict(action=[draw(action_space) for _ in steps], reward=rng.normal(size=len(steps)))
    terminated = np.isin(steps, lengths.cumsum()[:2] - 1)  # the last episode is truncated
    np.savez(file, **arrays, terminated=terminated, lengths=lengths)
    return str(Path(file).absolute())


def with_data(args):
    """args with an expert or a data set, if the script needs one and args names none."""
    if hasattr(args, "dataset") and not (args.dataset or getattr(args, "expert", "")):
        if hasattr(args, "expert"):
            args.expert = make_expert(args)
        else:
            args.dataset = make_dataset(args)
    return args


def accepts(environment: type, name: str) -> bool:
    """Whether an environment has an argument of this name."""
    for base in environment.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            if name in parameters or not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
                return name in parameters
    return False


def probe(module, env: str, **kwargs) -> dict:
    """Fields for an environment of probe_envs or odd_envs, with actions that the script can take."""
    where = probe_envs if hasattr(probe_envs, env) else odd_envs
    if accepts(getattr(where, env), "actions"):
        kwargs = {"actions": "discrete" if takes(module.__name__, "discrete") else "box"} | kwargs
    return dict(env_id=f"{where.__name__}:{env}-v0", env_kwargs=kwargs)


def tiny(module, run_dir="run", **changes):
    """Arguments of a tiny training in the Walk environment; changes come on top where there are fields."""
    grid = {"discrete_obs": True} if module.__name__ == "q_learning" else {}
    values = probe(module, "Walk", **grid) | dict(run_dir=str(run_dir)) | TINY | changes
    values = dict(finetune_steps=max(values["total_timesteps"] - 32, 0)) | values  # iql: 32 offline
    if values.get("shared_trunk"):  # the critic has no layers of its own
        values = dict(values, critic_sizes=changes.get("critic_sizes"))
    args = module.Args(**{name: value for name, value in values.items() if has(module, name)})
    return with_data(args)


def short(module, env: str = "Walk", run_dir="run", env_kwargs: dict | None = None, **changes):
    """tiny in a probe or in the environment of an id with a version: nothing is normalized, one evaluation
    and one checkpoint at the end."""
    where = dict(env_id=env, env_kwargs={}) if "-v" in env else probe(module, env)
    where["env_kwargs"] |= env_kwargs or {}
    plain = dict(normalize_obs=False, normalize_reward=False, eval_every=0, checkpoint_every=0)
    return tiny(module, run_dir, **where | plain | changes)


def quick(module, env: str = "Walk", run_dir="run", **changes):
    """Trains with the arguments of short. Returns what train does."""
    return module.train(short(module, env, run_dir, **changes))


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


# ------------------------------------------------------------------------------------------------- processes
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in a shell's background ignores it
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


# ------------------------------------------------------------------------------------------ what a run leaves
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


def play(policy, args, episodes: int | None = None, greedy=True) -> list[float]:
    """The returns of a policy of load_policy in the environment itself, with the seeds of an evaluation."""
    env, returns = gym.make(args.env_id, **args.env_kwargs), []
    for i in range(episodes or args.eval_episodes):
        obs, info = env.reset(seed=args.eval_seed + i)
        policy.reset()
        returns.append(0.0)
        for _ in range(getattr(args, "eval_max_steps", 100_000)):
            action = policy(obs, info, greedy=greedy)
            assert env.action_space.contains(action), f"{action!r} is not in {env.action_space}"
            obs, reward, terminated, truncated, info = env.step(action)
            returns[-1] += float(reward)
            if terminated or truncated:
                break
    env.close()
    return returns


# --------------------------------------------------------------------------------------------------- choice
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of what is tested in every script alike, a third is not marked long: each of these tests with some of
    the scripts, and each script with some of the tests."""
    alike = {"test_contract", "test_fields", "test_life", "test_spaces"}
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.stem in alike and any(isinstance(x, str) and x in NAMES for x in values):
            if zlib.crc32(item.nodeid.encode()) % 3:
                item.add_marker(pytest.mark.long)


# --------------------------------------------------------------------------------------------------- fixtures
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
    """cook(*recipes) -> the script as a module, patched in a folder of its own."""

    def patched(*recipes):
        script, recipe = script_of(recipes[0]), "_and_".join(recipes)
        (tmp_path / "algos").mkdir(exist_ok=True)
        shutil.copy(ALGOS / f"{script}.py", tmp_path / "algos")
        subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
        for name in recipes:
            patch = ["git", "apply", str(ROOT / "recipes" / f"{name}.patch")]
            subprocess.run(patch, cwd=tmp_path, check=True)
        path = tmp_path / "algos" / f"{script}.py"
        spec = importlib.util.spec_from_file_location(recipe, path)
        sys.modules[recipe] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return patched


class Call(tuple):
    """(arguments, result) of a call, and the step of the run at which it came."""

    name, step = "", 0


@pytest.fixture
def record(monkeypatch):
    """record(owner, name) lists the calls of owner.name from then on; record.all has those of all names."""

    def record(owner, name):
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            given = [
                x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (*args, *kwargs.values())
            ]
            call = Call((given, original(*args, **kwargs)))
            call.name, call.step = name, record.steps()
            calls.append(call), record.all.append(call)
            return call[1]

        monkeypatch.setattr(owner, name, recorded)
        return calls

    record.all, record.steps = [], lambda: getattr(Latest.run, "env_steps", 0)
    return record


class Latest:
    run = None

    def __getitem__(self, part: str):
        return self.run.parts[part]


@pytest.fixture
def seen(monkeypatch):
    """The parts of the latest run of any script, by name, as they are at any time; seen.run is the run."""
    Latest.run = None
    for module in map(load_script, NAMES):

        def watched(run, args, init=module.Run.__init__, **parts):
            Latest.run = run
            init(run, args, **parts)

        monkeypatch.setattr(module.Run, "__init__", watched)
    return Latest()


@pytest.fixture
def drawn(record):
    """drawn(script) lists copies of all batches from its replay buffer, before the script changes them."""

    def drawn(script):
        batches, sample = [], script.ReplayBuffer.sample

        def watched(self, *args):
            batch = sample(self, *args)
            batches.append({name: x.clone() for name, x in batch.items()})
            return batch

        record(script.ReplayBuffer, "sample")
        script.ReplayBuffer.sample = watched  # monkeypatch puts the first one back
        return batches

    return drawn


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test works in an empty folder and leaves no process; signals, the path and the probes are as they
    were after it."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    path = list(sys.path)
    probe_envs.forget(), odd_envs.forget()
    yield folder
    left = multiprocessing.active_children()
    for process in left:  # they would keep others waiting
        process.kill()
    sys.path[:] = path
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not left, "the test left processes"
