"""What README, docs/ and .ci/run name exists: commands, files, options, functions, tests."""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from conftest import SCRIPTS, load_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Commands of the page's bash blocks, && taken apart, as words without their comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def set_up_lines() -> list[str]:
    """The lines of README that begin from nothing."""
    return [
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")
    ]


def options(script: Path) -> set[str]:
    names = [field.name.replace("_", "-") for field in fields(load_script(script).Args)]
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names} | {"--help"}


def test_readme_has_two_commands_for_a_bare_machine():
    train, test = set_up_lines()
    assert ".venv/bin/python algos/ppo.py --env-id" in train
    assert test.endswith("&& .venv/bin/python -m pytest -n auto --dist worksteal")
    for line in (train, test):
        assert "-r requirements.txt" in line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_existing_files_and_options(page):
    by_name = {f"algos/{script.name}": script for script in SCRIPTS}
    for words in commands(page):
        for word in words:
            if re.fullmatch(r"[\w./]+\.(py|txt)", word) and not word.startswith("/"):
                assert (ROOT / word).is_file(), f"{page.name} names {word}"
        run = next((word for word in words if word.endswith(".py")), None)
        if run in by_name:
            own = words[words.index(run) :]  # what stands before is of torchrun
            given = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert given <= options(by_name[run]), f"{page.name}: {' '.join(words)}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_options_in_the_text_of_a_page_exist(script):
    text = (ROOT / "docs" / f"{script.stem}.md").read_text()
    found = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert found and found <= options(script)


def test_ci_runs_the_test_command_of_the_readme():
    """.ci/run takes the line out of README.md; here that line of .ci/run shows what it took."""
    ci = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    head = ci.partition('bash -euo pipefail -c "${test_command//')
    assert head[1] and "set -euo pipefail" in head[0]
    take = re.search(r"^test_command=.*$", head[0], re.M)[0]
    shown = subprocess.run(
        ["bash", "-euc", f'{take}\necho "$test_command"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == [set_up_lines()[1]]
    for word in ('ruff" check', 'ruff" format', "--check", 'mkdocs" build --strict'):
        assert word in head[2], word


def test_ci_pins_what_it_installs():
    for name in ("requirements.txt", "tests/requirements.txt", "docs/requirements.txt"):
        lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        for line in lines:
            assert not line or line.startswith("-r ") or "==" in line, f"{name}: {line}"
    assert "ruff==" in (ROOT / "tests" / "requirements.txt").read_text()


def test_links_to_functions_lead_to_functions():
    links = []
    for page in (ROOT / "docs").glob("*.md"):
        links += re.findall(r"\]\(\.\./algos/(\w+\.py)#(\w+)\)", page.read_text())
    for file, name in links:
        source = (ROOT / "algos" / file).read_text()
        assert name in {getattr(node, "name", None) for node in ast.parse(source).body}, f"{file}#{name}"
    assert {("ppo.py", name) for name in ("compute_gae", "policy_loss", "value_loss", "train")} <= set(links)


def test_links_between_files_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_is_listed_once():
    rows = re.findall(
        r"^\| `([a-z]+/[a-z_]+)` \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    tags = [tag for tag, _, _ in rows]
    assert len(tags) > 20 and len(tags) == len(set(tags))
    assert tags == re.findall(
        r"^\| `(\w+/\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M
    )  # no cell is missing


def test_tests_named_in_the_docs_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    defined = set(re.findall(r"^def (test_\w+)", tests, re.M))
    named = set(re.findall(r"`(test_\w+)`", "\n".join(page.read_text() for page in PAGES)))
    assert named and not named - defined


def test_every_feature_names_a_test_that_shows_it():
    text = (ROOT / "docs" / "feature_map.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "feature"]
    assert len(rows) > 40
    for feature, _, state, *test in rows:
        assert state in ("done", "variants", "planned"), feature
        assert state == "planned" or re.search("`test_[a-z0-9_]+`", " ".join(test)), f"no test of: {feature}"


def test_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)
        ]

    assert sorted(pages(site["nav"])) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_citation_can_be_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    for field in ("title", "message", "authors"):
        assert citation[field]
    assert "Copyright (c) 2026 The PlainRL authors" in (ROOT / "LICENSE").read_text()


def test_the_notebook_example_of_the_readme_trains(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert "50_000" in block
    code = block.replace("50_000", "512, eval_every=0, eval_episodes=2").replace(
        '"algos"', repr(str(ROOT / "algos"))
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(len(returns))"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
