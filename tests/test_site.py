"""The notebook runs, and the policy of the live page balances Gymnasium's pole."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ALGOS, ROOT
from site_in_browser import probabilities

POLICY = json.loads((ROOT / "docs/live_policy.json").read_text())


def cells() -> list[dict]:
    return json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]


def test_the_notebook_runs_cell_by_cell(empty_folder, monkeypatch):
    """From the folder of the notebook, each training shorter than there."""
    plt, video = pytest.importorskip("matplotlib.pyplot"), []
    plt.switch_backend("agg")
    display = types.ModuleType("IPython.display")
    display.Video = lambda path, **_: video.append(Path(path).stat().st_size)
    package = types.ModuleType("IPython")
    package.version_info = (9, 0)  # for Matplotlib
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "ppo", raising=False)
    shutil.copytree(ALGOS, "algos", ignore=shutil.ignore_patterns("__pycache__"))
    Path("docs").mkdir()
    monkeypatch.chdir("docs")
    names, shorter = {}, {"50_000": "2048", "5_000": "1024", "60000": "3072"}
    for source in ("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"):
        for steps, fewer in shorter.items():
            source = source.replace(steps, fewer)
        exec(source, names)
    assert Path.cwd() == empty_folder and Path(names["ppo"].__file__).parent == empty_folder / "algos"
    assert names["entries"][-1]["step"] == 2048 and len(names["returns"]) == 10
    assert names["total"] >= 8 and video[0] > 1000
    assert Path(names["run_dir"], "models/3072.pt").exists()  # resumed
    plt.close("all")


def test_the_notebook_is_small_and_has_run():
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert (ROOT / "docs/notebook.ipynb").stat().st_size < 300_000
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [x for x in outputs if x["output_type"] == "error" or x.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_policy_of_the_live_page_balances_the_pole():
    """All steps of ten episodes, by the reckoning that the browser is compared with."""
    env = gym.make("CartPole-v1")
    for seed in range(10):
        obs, ended, steps = env.reset(seed=seed)[0], False, 0
        while not ended:
            obs, _, ended, truncated, _ = env.step(int(np.argmax(probabilities(POLICY, obs))))
            steps += 1
            ended |= truncated
        assert steps == 500


def test_the_policy_of_the_live_page_is_made_as_it_says(empty_folder):
    """Its script, in a short training: layers of the same shapes, and the command that it ran."""
    command = [sys.executable, ROOT / "benchmark/live_policy.py", "--out", "policy.json", "--steps", "512"]
    subprocess.run(command, check=True, timeout=120)
    made = json.loads(Path("policy.json").read_text())
    shapes = lambda policy: [np.shape(layer["weights"]) for layer in policy["layers"]]
    assert shapes(made) == shapes(POLICY) == [(16, 4), (16, 16), (2, 16)]
    assert made["command"].replace(" 512", " 100000") == POLICY["command"]
    assert POLICY["eval_return_mean"] == 500 and (ROOT / "docs/live_policy.json").stat().st_size < 6000
