"""The family tree of docs/contributing.md: how far a script is from its parent, and how long each one is.

The numbers are those of the day they were written. Lower one when it falls; raise one only with a reason.
"""

import difflib
import re

import pytest
from conftest import ROOT, SCRIPTS

PARENT = {
    "vpg": "reinforce", "a2c": "vpg", "trpo": "vpg", "ppo": "a2c", "ppo_variants": "ppo", "ppo_lstm": "ppo",
    "ppo_rnd": "ppo", "dqn": "q_learning", "sac": "ddpg_td3",
}  # fmt: skip
# Lines removed and lines added on the way from the parent.
CHANGED = {
    "vpg": 162, "a2c": 442, "trpo": 224, "ppo": 204, "ppo_variants": 97, "dqn": 815, "sac": 310,
}  # fmt: skip
LINES = {  # above the rule line of the utilities, in all
    "reinforce": (308, 982), "vpg": (390, 1064), "a2c": (412, 1194), "trpo": (450, 1124),
    "ppo": (447, 1194), "ppo_variants": (518, 1265), "q_learning": (291, 906), "dqn": (479, 1325),
    "ddpg_td3": (392, 1214), "sac": (455, 1260), "es": (291, 1074),
}  # fmt: skip

SOURCE = {path.stem: path.read_text() for path in SCRIPTS}
PAIRS = [(parent, child) for child, parent in PARENT.items() if {parent, child} <= SOURCE.keys()]


def contributing() -> str:
    return (ROOT / "docs" / "contributing.md").read_text()


def changed_lines(parent: str, child: str) -> int:
    """As diff counts them: a line that differs is one removed and one added."""
    old, new = parent.splitlines(), child.splitlines()
    edits = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(i2 - i1 + j2 - j1 for what, i1, i2, j1, j2 in edits if what != "equal")


def lines_above_utilities(source: str) -> int:
    rules = [i for i, line in enumerate(source.splitlines()) if re.match(r"# -{10,} utilities, ", line)]
    assert len(rules) == 1, "one rule line begins the utilities"
    return rules[0]


def documented_budget(name: str) -> int:
    """The lines above the utilities that docs/contributing.md allows the script."""
    text = " ".join(contributing().split())
    (sentence,) = re.findall(r"Budgets, counted up to the utilities' line: (.*?)\. ", text)
    parts = re.findall(r"\b(\d+)(?: lines)? for (.*?)(?=, \d+ for |$)", sentence)
    found = [int(number) for number, names in parts if name in re.findall(r"\w+", names)]
    assert len(found) == 1, f"docs/contributing.md names {len(found)} budgets for {name}"
    return found[0]


def test_changed_lines_are_counted_as_removed_and_added():
    assert changed_lines("a\nb\nc\n", "a\nb\nc\n") == 0
    assert changed_lines("a\nb\nc\n", "a\nB\nc\n") == 2
    assert changed_lines("a\nb\nc\n", "a\nb\nnew\nc\n") == 1
    assert changed_lines("a\nb\nc\n", "c\n") == 2
    common = "\n" * 400  # lines that are everywhere count too
    assert changed_lines(common + "a\n", common + "\nb\n") == 3


def test_the_tree_in_the_docs_is_the_tree_of_the_test():
    tree = contributing().partition("## Family tree")[2].split("```")[1]
    assert set(re.findall(r"\w+", tree)) >= PARENT.keys() | set(PARENT.values()) | SOURCE.keys()
    for family in re.findall(r"^\w+ -.*$", tree, re.M):
        names = re.findall(r"\w+", family)
        for parent, child in zip(names, names[1:], strict=False):
            assert PARENT[child] == parent


@pytest.mark.parametrize("parent, child", PAIRS, ids=[child for _, child in PAIRS])
def test_a_child_differs_from_its_parent_by_no_more_than_its_budget(parent, child):
    count = changed_lines(SOURCE[parent], SOURCE[child])
    print(f"{parent}.py -> {child}.py: {count} changed lines")
    assert count <= CHANGED.get(child, 0), f"algos/{child}.py has {count} lines that differ from {parent}.py"


@pytest.mark.parametrize("name", SOURCE)
def test_a_script_is_no_longer_than_its_budget(name):
    above, total = lines_above_utilities(SOURCE[name]), len(SOURCE[name].splitlines())
    print(f"{name}.py: {above} lines above the utilities, {total} in all")
    allowed = LINES.get(name, (documented_budget(name), total))
    assert allowed[0] <= documented_budget(name)
    assert above <= allowed[0], f"{name}.py has {above} lines above the utilities"
    assert total <= allowed[1], f"{name}.py has {total} lines"


@pytest.mark.parametrize("name", SOURCE)
def test_the_first_equation_stands_before_line_140(name):
    lines = SOURCE[name].splitlines()
    numbers = [i for i, line in enumerate(lines, 1) if re.search(r"\S = \S.*\b(eq\.|Algorithm) \d", line)]
    assert numbers and numbers[0] < 140
