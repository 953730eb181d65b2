"""The family tree: how far a script may be from its parent, and how long it may be. Upper limits only."""

import ast
import difflib

import pytest
from conftest import ALGOS, NAMES
from shared_code import definitions

ABOVE = dict(dqn=620, maml=620, pearl=620, rainbow=620, ppo_lstm=560, ppo_rnd=560, trpo=520, bc=520)
USUAL, UTILITIES = 500, 1165  # lines above the utilities of the other scripts, and of the utilities to main
RULE, TRAIN = 140, 220  # the line before which the learning rule and train begin
CHANGED = {  # (parent, child): lines removed plus lines added, without docstring and TUNED
    ("reinforce", "grpo"): 120,
    ("dqn", "rainbow"): 165,
    ("reinforce", "vpg"): 175, ("vpg", "a2c"): 140, ("a2c", "ppo"): 80, ("vpg", "trpo"): 150,
    ("ppo", "ppo_lstm"): 170, ("ppo", "ppo_rnd"): 115, ("ppo", "pqn"): 265, ("ddpg_td3", "sac"): 170,
    ("sac", "tqc"): 60, ("sac", "crossq"): 90, ("sac", "simba"): 130, ("sac", "pearl"): 880,
    ("sac", "iql"): 400,
}  # fmt: skip

SOURCE = {name: (ALGOS / f"{name}.py").read_text() for name in NAMES}
PAIRS = [pair for pair in CHANGED if {*pair} <= SOURCE.keys()]


def compared(source: str) -> list[str]:
    """What a diff between relatives shows: the lines but for the docstring and TUNED."""
    lines, spans = source.splitlines(), [(0, ast.parse(source).body[0].end_lineno)]
    spans += [span for name, span in definitions(source).items() if name == "TUNED"]
    return [line for i, line in enumerate(lines) if not any(a <= i < b for a, b in spans)]


def changed_lines(parent: str, child: str) -> int:
    """As diff counts them: a line that differs is one removed and one added."""
    matcher = difflib.SequenceMatcher(None, compared(parent), compared(child), autojunk=False)
    edits = [edit[1:] for edit in matcher.get_opcodes() if edit[0] != "equal"]
    return sum(i2 - i1 + j2 - j1 for i1, i2, j1, j2 in edits)


def test_changed_lines_are_counted_as_removed_and_added():
    source = '"""Doc\n\nof one."""\nA = 1\nB = 2\n# of TUNED\nTUNED = {\n    1: 2,\n}\nC = 3\n'
    for old, new, count in (
        ("", "", 0), ("B = 2\n", "", 1), ("C = 3", "C = 4", 2), ("C = 3", "C = 3\nD = 4", 1),
        ("of one", "of\ntwo", 0), ("    1: 2,\n", "", 0), ("# of", "# by", 0),
    ):  # fmt: skip
        assert changed_lines(source, source.replace(old, new)) == count
    common = "\n" * 400  # lines that are everywhere count too
    assert changed_lines('""\n' + common + "a\n", '""\n' + common + "\nb\n") == 3


@pytest.mark.parametrize("parent, child", PAIRS, ids=[child for _, child in PAIRS])
def test_a_child_is_near_its_parent(parent, child):
    count = changed_lines(SOURCE[parent], SOURCE[child])
    assert count <= CHANGED[parent, child]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short_and_begins_with_what_the_paper_says(name):
    lines = SOURCE[name].splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("# ----") and "utilities" in line]
    assert len(rules) == 1, "one rule line begins the utilities"
    spans = definitions(SOURCE[name])
    functions = [n.lineno for n in ast.parse(SOURCE[name]).body if isinstance(n, ast.FunctionDef)]
    begins, train = functions[0], spans["train"][0]
    assert rules[0] <= ABOVE.get(name, USUAL) and spans["main"][0] - rules[0] <= UTILITIES
    assert begins < RULE and train < TRAIN
    longest = max(map(len, lines))
    assert longest <= 110
