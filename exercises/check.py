"""Says which functions of an exercise are right, and trains with them once all are.

    python exercises/check.py ppo_exercise.py

Each function gets random arguments, and so does the one in algos/. Results, gradients and changes of the
arguments must agree. A function that calls another one of the rule gets that of algos/, so each is checked on
its own. Exit code 0: all are right; 1: not yet; 2: there is nothing to check.
"""

import argparse
import contextlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from make import ALGOS, parts
from torch import nn
from torch import rand as U
from torch import randn as R

ROOT, EXAMPLES = ALGOS.parent, 40  # of each function

# ------------------------------------------------------------------------------------------------- arguments
one_of = lambda *values: random.choice(values)
leaf = lambda *shape: R(shape, requires_grad=True)
flags = lambda *shape: (U(shape) < 0.3).float()


def hill():
    parameters, slope = [R(3, 1), R(2)], R(5)
    where = lambda: torch.cat([p.flatten() for p in parameters])
    start = where()
    kl = lambda: (where() - start).square().sum() / 4
    measure = lambda: (slope @ (where() - start) - kl(), kl())
    return dict(parameters=parameters, step=R(5), measure=measure, objective=torch.zeros(()))


def logistic(Args):
    agent, k = nn.Linear(2, 1), one_of(0, 1, 3)
    logit = lambda params, obs: (obs @ params["weight"].mT).squeeze(-1) + params["bias"]
    agent.log_prob = lambda params, rollout: (nn.functional.logsigmoid(logit(params, rollout["obs"])), None)
    rollouts = [dict(obs=R(2, 4, 2), advantage=R(2, 4), weight=U(2, 4)) for _ in range(k)]
    return dict(agent=agent, rollouts=rollouts, args=Args(inner_lr=0.5, inner_steps=one_of(0, 1, 2)))


# What an argument of this name is, or that of a function, or several of function() that depend on each other:
# one of a list, normal numbers of a shape, or what a function of the script's Args returns. All others are
# normal numbers of shape (4,), or of (3, 2) where an argument done says that these are rollouts.
NUMBERS = "gamma gae_lambda lambda_ clip_coef clip alpha sigma std proportion damping epsilon max_kl inner_lr"
NUMBERS += " beta expectile"
ARGUMENTS = dict.fromkeys(NUMBERS.split(), lambda _: round(random.uniform(0.1, 0.9), 2)) | {
    "iterations": [1, 2, 9], "tolerance": [1e-9, 1.0], "max_backtracks": [2, 6], "tasks": [2],
    "dropped": [0, 1, 2], "episodes": [3], "epsilon_after.episodes": [0, 3, 99],
    "env_steps": [0, 99, 100, 300, 2000], "mirrored": [False, True], "first_order": [False, True],
    "clip_value": [math.inf, 0.3], "loss": ["mse", "huber"], "kind": ["gaussian", "ou"],
    "how": ["rank", "zscore", "raw"], "backtrack_ratio": [0.5], "target_entropy": [-1.5],
    "update_rule": ["q_learning", "sarsa", "expected_sarsa", "double"],
    "mean": (4, 3), "log_std": (4, 3), "noise": (4, 3), "action": (4, 3), "near_action": (4, 3), "b": (4,),
    "q_values": (2, 4), "next_q_values": (2, 4), "target_q_values": (4, 3), "log_alpha": (), "entropy": (),
    "quantiles": (2, 5, 4), "soft_quantiles.quantiles": (8, 4), "quantile_huber_loss.y": (3, 4),
    "quantile_loss.quantiles": (4, 5), "quantile_loss.target": (4, 3),
    "product_of_gaussians.mean": (2, 3, 2), "theta": (3, 2), "perturb.noise": (4, 3, 2),
    "next_probs": lambda _: R(4, 6).softmax(1), "atoms": lambda _: torch.linspace(-2, 2, 6),
    "log_probs": (4, 6), "kl_loss.target": lambda _: R(4, 6).softmax(1),
    "weight": lambda _: U(4), "error": lambda _: U(4), "discount": lambda _: 0.9 * (1 - flags(4)),
    "var": lambda _: U(4, 3) + 0.1, "product_of_gaussians.var": lambda _: U(2, 3, 2) + 0.1,
    "done": lambda _: flags(3, 2), "terminated": lambda _: flags(3, 2),
    "squashed_gaussian.mean": lambda _: R(4, 3) * one_of(1, 30),  # far out the slope of tanh rounds to 0
    "compute_td_target.q_values": lambda _: one_of(None, R(4, 3)),
    "fitness": lambda _: torch.randint(4, (one_of(1, 6),)).double(),
    "product": lambda _: (R(4, 9).cov() + torch.eye(4)).mv,
    "explore.noise": lambda _: np.random.randn(2, 3).astype(np.float32),
    "update_table.q_values": lambda _: np.random.randn(6), "td_target": lambda _: np.random.randn(4),
    "index": lambda _: np.random.randint(3, size=4), "judge_q_values": lambda _: np.random.randn(4, 3),
    "epsilon_after.args": lambda Args: Args(epsilon_start=0.9, epsilon_decay=0.8, epsilon_min=0.1),
    "epsilon_at.args": lambda Args: Args(total_timesteps=999, learning_starts=100, noisy=one_of(False, True)),
    "linear_epsilon.args": lambda Args: Args(total_timesteps=999, exploration_fraction=one_of(0.0, 0.5)),
    "next_value()": lambda _: dict(next_action=(a := np.random.randint(3, size=4)), next_q_values=np.where(
        (np.random.rand(4, 3) < 0.7) | (np.arange(3) == a[:, None]), np.random.randn(4, 3), -np.inf)),
    "es_gradient()": lambda _: dict(
        mirrored=(m := one_of(False, True)), weights=R(4), noise=R(2 if m else 4, 3, 2)),
    "residual_block()": lambda _: dict(
        x=leaf(2, 4, 3), norm=nn.LayerNorm(3), up=nn.Linear(3, 12), dropout=nn.Dropout(0.0),
        down=nn.Linear(12, 3)),
    "expectile_loss.error": (4,), "imitation_weight.advantage": lambda _: one_of(1, 20) * R(4),
    "group_advantage.return_": (6,), "group_size": [2, 3], "dr": [False, True],
    "whole_sequences()": lambda _: dict(done=flags(6, 3), chosen=torch.randperm(3)[:2]),
    "hessian_product()": lambda _: dict(
        parameters=[(w := leaf(3, 1)), (b := leaf(2))], value=(w * b + b.sin()).square().sum()),
    "inner_step()": lambda _: dict(
        params={"w": (w := leaf(2, 3)), "b": (b := leaf(2))}, loss=w.pow(3).sum(1) * b.sin()),
    "fit_baseline()": lambda _: dict(
        obs=6 * R(2, 12, 1), t=torch.arange(12).expand(2, 12), return_=R(2, 12),
        playing=(torch.arange(12) < torch.tensor([[8], [12]])).float()),
    "outer_objective()": lambda Args: dict(
        args=Args(outer=one_of("vpg", "trpo", "ppo"), clip_coef=0.2), weight=R(2, 4).softmax(1),
        log_prob=leaf(2, 4), old_log_prob=R(2, 4), advantage=R(2, 4)),
    "line_search()": lambda _: hill(), "adapt()": logistic,
}  # fmt: skip
# Those that learn: the gradients with respect to them must agree, too
LEARNED = """
    log_prob log_probs value q_values mean log_std action near_action var quantiles log_alpha error td_error
"""


def example(part: str, reference, seed: int) -> dict:
    """Arguments for a function of the rule, by name."""
    for seed_library in (random.seed, np.random.seed, torch.default_generator.manual_seed):
        seed_library(seed)
    names = inspect.signature(getattr(reference, part)).parameters
    given = ARGUMENTS.get(f"{part}()", lambda _: {})(reference.Args)
    for name in [name for name in names if name not in given]:
        normal = (3, 2) if "done" in names else (4,)
        x = ARGUMENTS.get(f"{part}.{name}", ARGUMENTS.get(name, normal))
        x = one_of(*x) if isinstance(x, list) else R(x) if isinstance(x, tuple) else x(reference.Args)
        learns = name in LEARNED.split() and "done" not in names and isinstance(x, torch.Tensor)
        given[name] = x.requires_grad_() if learns else x
    if "terminated" in names:
        given["terminated"] *= given["done"]
    return {name: given[name] for name in names}


# -------------------------------------------------------------------------------------- expected against got
def leaves(x) -> list:
    """All tensors, arrays and numbers in it."""
    x = dict(x.named_parameters()) if isinstance(x, nn.Module) else x
    x = [x[key] for key in sorted(x, key=str)] if isinstance(x, dict) else x
    return [y for inside in x for y in leaves(inside)] if isinstance(x, (list, tuple)) else [x]


def outcome(module, part: str, reference, seed: int) -> dict:
    """What a function makes of an example: the result, its gradients, and the arguments after the call."""
    arguments = example(part, reference, seed)
    result = getattr(module, part)(*arguments.values())
    result = result(R(5)) if callable(result) else result
    found = {"result": result}
    learned = lambda x: [y for y in leaves(x) if isinstance(y, torch.Tensor) and y.requires_grad]
    if outputs := learned(result):
        total = sum((x * torch.linspace(1, 2, x.numel()).view_as(x)).sum() for x in outputs)
        for name in arguments:
            if inputs := [x for x in learned(arguments[name]) if x.is_leaf]:
                options = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
                found[f"gradient with respect to {name}"] = torch.autograd.grad(total, inputs, **options)
    return found | {f"{name} after the call": x for name, x in arguments.items()}


def values(x) -> np.ndarray:
    return np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)


def form(x) -> str:
    if not isinstance(x, (torch.Tensor, np.ndarray)):
        return "a number" if isinstance(x, (int, float)) else type(x).__name__
    kind = "tensor" if isinstance(x, torch.Tensor) else "array"
    held = dict(f="floats", i="integers").get(values(x).dtype.kind, "booleans")
    return f"{kind} of {held}, shape {tuple(x.shape)}"


def difference(expected, got) -> str | None:
    """What is wrong with got: empty if that is a matter of numbers, None if nothing is."""
    expected, got = leaves(expected), leaves(got)
    if len(expected) != len(got):
        return f"expected {len(expected)} results, got {len(got)}"
    for a, b in zip(expected, got, strict=True):
        if isinstance(a, float):
            with contextlib.suppress(TypeError, ValueError):
                b = float(b)
        if isinstance(a, (torch.Tensor, np.ndarray, float)):
            if form(a) != form(b):
                return f"expected {form(a)}, got {form(b)}"
            if not np.allclose(values(a), values(b), rtol=1e-4, atol=1e-5):
                return "the sign is wrong" if np.allclose(values(a), -1 * values(b), rtol=1e-4) else ""
    return None


def shown(x) -> str:
    if hasattr(x, "env_id"):  # Args
        return ", ".join(f"{name}={y}" for name, y in vars(x).items() if y != getattr(type(x), name, y))
    if callable(x) and not isinstance(x, nn.Module):
        return "a function"
    with np.printoptions(precision=4, suppress=True):
        return re.sub(r", (requires_grad|grad_fn)=[^)]*", "", f"{x:.4g}" if isinstance(x, float) else repr(x))


def raised(error: Exception, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def verdict(part: str, student, reference) -> tuple[str, dict]:
    """Whether a function is right, not written or wrong, and what is wrong with it."""
    problems = []
    for seed in range(EXAMPLES):
        expected = outcome(reference, part, reference, seed)
        try:
            got = outcome(student, part, reference, seed)
        except Exception as error:  # whatever somebody wrote
            if "your turn" in str(error):
                return "not written", {}
            problems.append((seed, {"raised": raised(error, student.__file__)}))
            continue
        notes = {what: difference(x, got.get(what)) for what, x in expected.items()}
        if what := next((what for what, note in notes.items() if note is not None), None):
            lines = {f"expected {what}": shown(expected[what]), f"your {what}": shown(got.get(what))}
            problems.append((seed, lines | ({"note": notes[what]} if notes[what] else {})))
    if not problems:
        return "right", {}
    seed, lines = problems[0]
    arguments = {name: shown(x) for name, x in example(part, reference, seed).items()}
    return f"wrong in {len(problems)} of {EXAMPLES} examples. The first one:", arguments | lines


# ------------------------------------------------------------------------------------------------- training
def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(seconds: float, *words) -> int:
    """Runs a script, for so long at most. Returns its exit code; 0 if its time was over."""
    with subprocess.Popen([sys.executable, *map(str, words)]) as child:
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()  # it saves and stops
    return 0 if child.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM) else child.returncode


def train(path: Path, name: str, reference, seconds: float) -> int:
    """Trains on the first environment that the script is tuned for, and says the return."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for benchmark.hidden_envs
    env_id, suites = next(iter(reference.TUNED)), load("suites", ROOT / "benchmark/suites.py").SUITES
    cells = [
        cell for suite in suites.values() for cell in suite if (cell.algo, cell.env_id) == (name, env_id)
    ]
    bar = min([(len(cell.args), cell.bar) for cell in cells if cell.bar is not None], default=[math.inf])[-1]
    folder = f"runs/{path.stem}/{time.strftime('%Y%m%d-%H%M%S')}"
    task, start = ["--env-id", env_id, f"--stop-return={bar}"], time.monotonic()
    print(f"training on {env_id} for {seconds:g} seconds at most", flush=True)
    if hasattr(reference.Args, "expert"):
        run(seconds / 2, ALGOS / "ppo.py", *task, "--run-dir", f"{folder}-expert")
        task += ["--expert", f"{folder}-expert"]
    elif hasattr(reference.Args, "dataset"):  # what a beginner played
        run(seconds / 2, ALGOS / "sac.py", *task, "--run-dir", f"{folder}-data")
        run(seconds, ROOT / "benchmark/record.py", f"{folder}-data", "--replay", "--out", f"{folder}.npz")
        task += ["--dataset", f"{folder}.npz"]
    code = run(seconds - (time.monotonic() - start), path, *task, "--run-dir", folder)
    if code or not Path(folder, "checkpoint.pt").exists():
        print(f"check.py: the training ended with exit code {code} and saved nothing", file=sys.stderr)
        return 1
    played = subprocess.run([sys.executable, path, "--evaluate", folder], stdout=subprocess.PIPE, text=True)
    score = json.loads(played.stdout.splitlines()[-1])
    print(f"mean return {score['eval/return_mean']:.1f} on {env_id} after {score['step']:,} steps")
    if bar < math.inf:
        print(f"the bar, the return that {name} must reach, is {bar:g}")
    return 0


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("file", type=Path, help="an exercise; its name begins with that of its script")
    parser.add_argument("--seconds", type=float, default=60, help="longest training; 0: no training")
    args = parser.parse_args(argv)
    scripts = [script for script in ALGOS.glob("*.py") if args.file.stem.startswith(script.stem)]
    if not scripts or not args.file.is_file():
        parser.error(f"{args.file} is no file that make.py wrote, such as ppo_exercise.py")
    script, path = max(scripts, key=lambda script: len(script.stem)), args.file.resolve()
    rule = list(parts(script.read_text(encoding="utf-8")))
    reference = load(f"algos.{script.stem}", script)
    try:
        student = load(path.stem, path)
    except Exception as error:
        print(f"check.py: {args.file} does not run: {raised(error, str(path))}", file=sys.stderr)
        return 2
    own, right = {part: getattr(student, part, None) for part in rule}, 0
    for part in rule:
        vars(student).update({other: getattr(reference, other) for other in rule} | {part: own[part]})
        status, lines = verdict(part, student, reference)
        print(f"{part}: {status}")
        width = max(map(len, lines), default=0)
        for name, text in lines.items():
            print(f"    {name:{width}}  {text}".replace("\n", "\n" + " " * (width + 6)))
        right += status == "right"
    print(f"{right} of {len(rule)} functions are right", flush=True)
    if right < len(rule):
        return 1
    return train(args.file, script.stem, reference, args.seconds) if args.seconds else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("check.py: stopped")
