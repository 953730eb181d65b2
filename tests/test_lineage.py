"""The family tree of docs/contributing.md: how far a script is from its parent, and how long each one is.

A budget is the number of the day it was written. Lower it when the number falls; raise it only with a reason.
"""

import ast
import difflib
import re

import pytest
from conftest import ALGOS, ROOT, SCRIPTS

# child: (parent, changed lines; a line that differs counts twice, as removed and as added)
FAMILY = {
    "vpg": ("reinforce", 0), "a2c": ("vpg", 0), "trpo": ("vpg", 0), "ppo": ("a2c", 0),
    "ppo_variants": ("ppo", 93), "ppo_lstm": ("ppo", 0), "ppo_rnd": ("ppo", 0),
    "dqn": ("q_learning", 0), "sac": ("ddpg_td3", 0),
}  # fmt: skip

# script: (lines above the rule line of the utilities, lines in all)
LINES = {"ppo": (432, 1037), "ppo_variants": (499, 1104)}

# "Budgets" of docs/contributing.md: what LINES may rise to
PLAIN, MIDDLE, LARGE = 380, 450, 560


def changed_lines(parent: str, child: str) -> int:
    """Lines removed and lines added, as diff shows them."""
    old, new = parent.splitlines(), child.splitlines()
    edits = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(i2 - i1 + j2 - j1 for what, i1, i2, j1, j2 in edits if what != "equal")


def utilities_line(source: str) -> int:
    """Number (from 1) of the rule line above the utilities."""
    (number,) = (i for i, line in enumerate(source.splitlines(), 1) if re.match(r"# -{10,} utilities, ", line))
    return number


def budget(name: str) -> int:
    """The number that docs/contributing.md names for the script."""
    text = " ".join((ROOT / "docs" / "contributing.md").read_text().split())
    (sentence,) = re.findall(r"Budgets, counted up to the utilities' line: (.*?)\. ", text)
    found = [
        int(part[0]) for part in re.findall(r"(\d+)(?: lines)? for ([^\d]+)", sentence)
        if name in re.findall(r"\w+", part[1])
    ]  # fmt: skip
    assert len(found) == 1, f"docs/contributing.md names {len(found)} budgets for {name}"
    return found[0]
