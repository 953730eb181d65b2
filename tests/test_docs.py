"""What README and docs/ name exists: commands, files, options, metrics; and their examples run."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import ALGOS, NAMES, ROOT, load_script, progress, tiny
from test_lineage import PAIRS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_readme_has_two_commands_for_a_bare_machine():
    train, test = [
        x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith("python3 -m venv")
    ]
    assert ".venv/bin/python algos/ppo.py --env-id" in train and "-r requirements.txt" in train
    assert test.endswith("&& .venv/bin/python -m pytest -n auto --dist worksteal")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_existing_files_and_options(page):
    for line in "\n".join(blocks(page, "bash")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        scripts = [word for word in words if re.fullmatch(r"algos/\w+\.py", word)]
        for word in scripts + [
            word for word in words if re.match(r"(benchmark|tests|recipes)/\w+\.\w+$", word)
        ]:
            assert (ROOT / word).is_file(), f"{page.name} names {word}"
        if scripts and "sed" not in words:
            names = {field.name.replace("_", "-") for field in fields(load_script(scripts[0][6:-3]).Args)} | {
                "help"
            }
            given = {
                word[2:].partition("=")[0] for word in words[words.index(scripts[0]) :] if word[:2] == "--"
            }
            given = {name.removeprefix("no-") for name in given}
            others = {"tests/shared_code.py", "benchmark/run.py", "benchmark/tune.py"}
            if page.name != "recipes.md" and not others & set(words):
                assert given <= names, f"{page.name}: {line}"


@cache
def names_of(script: Path) -> set[str]:
    """The functions and classes of a file."""
    return {node.name for node in ast.parse(script.read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_functions(page):
    for target in re.findall(r"\]\(([^)#\s]+(?:#\w+)?)\)", page.read_text()):
        path, _, name = target.partition("#")
        if "://" in path or not path:
            continue
        file = (page.parent / path).resolve()
        assert file.exists(), f"{page.name}: {target}"
        if file.suffix == ".py" and name:
            assert name in names_of(file), f"{page.name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_every_script_has_a_page_with_the_same_headings(name):
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / f"{name}.md").read_text(), re.M)
    for heading in (
        "Quick facts",
        "Equations",
        "The code",
        "Differences from the paper",
        "Metrics",
        "Results",
    ):
        assert heading in headings
    navigation = re.findall(r"<!-- toctree\n(.*?)-->", (ROOT / "docs/index.md").read_text(), re.S)
    assert name in " ".join(navigation).split()


@pytest.mark.parametrize("parent, child", PAIRS, ids=[child for _, child in PAIRS])
def test_the_page_of_a_child_has_the_command_that_the_site_puts_the_diff_under(parent, child):
    page = ROOT / "docs" / f"{child}.md"
    assert f"diff algos/{parent}.py algos/{child}.py\n" in blocks(page, "bash")
    assert not blocks(page, "diff"), "a diff that is typed does not follow the scripts"


def test_every_logged_metric_is_documented_and_every_documented_one_is_logged(script):
    known = set(re.findall(r"^\| `([\w/]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.M))
    script.train(tiny(script))
    logged = {name for row in progress() for name in row if "/" in name}
    assert logged <= known
    source = "".join((ALGOS / f"{name}.py").read_text() for name in NAMES)
    for name in known:  # in some script
        assert name in source or name.startswith("eval/"), name


def test_python_of_the_readme_trains_tuned(empty_folder, monkeypatch):
    (example,) = [block for block in blocks(ROOT / "README.md", "python") if "import ppo" in block]
    monkeypatch.syspath_prepend(str(ALGOS))
    names = {}
    exec(example.replace("total_timesteps=50_000", "total_timesteps=1024"), names)
    assert names["args"].num_envs == 8 and len(names["returns"]) == 10


@pytest.mark.parametrize(
    "name, env_id, run_dir",
    [
        ("maml", "PointNavigation-v0", "runs/maml"),
        ("pearl", "PointRobot-v0", "runs/pearl"),
        ("ppo_lstm", "benchmark.hidden_envs:CartPoleNoVel-v1", "runs/memory"),
    ],
)
def test_python_of_a_page_runs_after_a_training(name, env_id, run_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    script, names = load_script(name), {}
    script.train(tiny(script, run_dir, env_id=env_id, env_kwargs={}))
    for block in blocks(ROOT / "docs" / f"{name}.md", "python"):
        exec(block, names)
    assert np.isfinite(names["obs"]).all()
    if name == "maml":  # its second block is two methods of an environment
        assert names["sample_task"](None, np.random.default_rng(1)).shape == (3,)


@pytest.mark.long
def test_tutorials_run_as_they_stand(empty_folder):
    """Every block in its order, each training a little longer than the one before."""
    for folder in ("algos", "benchmark"):
        shutil.copytree(
            ROOT / folder, folder, ignore=shutil.ignore_patterns("runs", "results", "__pycache__")
        )
    text, steps = (ROOT / "docs/tutorials.md").read_text(), iter(range(2048, 10**6, 2048))
    text = re.sub(r"((?:total.time)?steps[ =])(\d[\d_]+)", lambda found: f"{found[1]}{next(steps)}", text)
    text = text.replace("--seeds 5", "--seeds 1")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        if language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block]
        elif file := re.match(r"# (\w+\.py)\n", block):
            Path(file[1]).write_text(block)
            continue
        elif block.startswith("    def forward(self, obs):\n        x = self.features"):  # of Trunk in a copy
            source = Path("algos/ppo.py").read_text()
            forward = r"    def forward\(self, obs\):\n        x = self.features.*?\n\n"
            source, count = re.subn(forward, lambda _, new=block: f"{new}\n\n", source, flags=re.S)
            assert count == 1
            Path("own.py").write_text(source)
            command = [sys.executable, "own.py", "--total-timesteps", "2048", "--run-dir", "runs/own"]
        else:
            command = [sys.executable, "-c", block]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    films = [path for path in Path("runs/demo/models/videos").iterdir() if path.stat().st_size > 1000]
    assert len(films) == len([*Path("runs/demo/models").glob("*.pt")]) >= 2
    assert Path("compared").is_dir() and Path("runs/own/best.pt").exists()


def test_the_site_begins_with_the_commands_and_the_example_of_the_readme():
    readme, index = ROOT / "README.md", ROOT / "docs/index.md"
    assert blocks(index, "bash")[0] == blocks(readme, "bash")[0]
    assert blocks(index, "python") == blocks(readme, "python")[:1]


@pytest.mark.parametrize("patch", sorted((ROOT / "docs/puzzles").glob("*.patch")), ids=lambda path: path.stem)
def test_a_puzzle_plants_one_bug_in_a_rule_that_still_runs(patch, tmp_path):
    """Its lesson names it, and the patched script trains; what the bug does is measured in the lesson."""
    shutil.copytree(ALGOS, tmp_path / "algos")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    changed = [
        path.stem
        for path in (tmp_path / "algos").glob("*.py")
        if path.read_text() != (ALGOS / path.name).read_text()
    ]
    assert len(changed) == 1 and patch.read_text().count("\n@@") == 1
    module = load_script(changed[0], tmp_path / f"algos/{changed[0]}.py")
    module.train(tiny(module))
    assert f"docs/puzzles/{patch.name}" in (ROOT / f"docs/{patch.stem}.md").read_text()


def test_recipes_are_told():
    text = (ROOT / "docs/recipes.md").read_text()
    for patch in (ROOT / "recipes").glob("*.patch"):
        assert f"`{patch.stem}`" in text
