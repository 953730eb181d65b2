"""The checker of "one name, one text", on folders made here, and on algos/ itself."""

import subprocess
import sys

import pytest
from conftest import ALGOS, TESTS, load_script

ONE = '''"""Doc of one.

    python algos/one.py
"""
import math

LIMIT = 3


# ------------------------------------------------------------------ utilities
# Why it is so.
@staticmethod
def square(x):
    """x times x."""
    return x * x  # the comment counts


class Args:
    a: int = 1


def last():
    return LIMIT
'''


def shared_code(folder, *args):
    command = [sys.executable, TESTS / "shared_code.py", "--algos", folder, *args]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(ONE)
    return tmp_path


def test_algos_is_clean():
    assert shared_code(ALGOS) == (0, "", "")


def test_equal_copies_and_exempt_names_pass(folder):
    (folder / "two.py").write_text(ONE.replace("a: int = 1", "a: int = 2"))
    assert shared_code(folder) == (0, "", "")


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("square", "x times x.", "x squared."),
        ("square", "# the comment counts", "# another"),
        ("square", "# Why it is so.", "# Why is it so?"),
        ("square", "@staticmethod\n", ""),
        ("LIMIT", "LIMIT = 3", "LIMIT: int = 3"),
        ("last", "return LIMIT", "return -LIMIT"),
    ],
)
def test_a_different_copy_is_named_and_push_repairs_it(folder, name, old, new):
    (folder / "two.py").write_text(ONE.replace(old, new))
    assert shared_code(folder) == (1, f"{name}: one.py = three.py | two.py\n", "")
    code, said, _ = shared_code(folder, "--push", name, folder / "one.py")
    assert (code, said) == (0, f"{name}: changed two.py\n")
    assert [path.read_text() for path in sorted(folder.glob("*.py"))] == [ONE] * 3


LONGER = ONE.replace("    return LIMIT", "    more = 1\n    return LIMIT")


def test_a_text_that_may_add_lines_has_all_lines_of_the_common_one(folder):
    script = folder / "ppo_lstm.py"
    last, reset_done = "def last", "def reset_done"  # the name that may
    for path in folder.glob("*.py"):
        path.write_text(ONE.replace(last, reset_done))
    script.write_text(LONGER.replace(last, reset_done))
    assert shared_code(folder) == (0, "", "")
    for wrong in (LONGER.replace("return LIMIT", "return -LIMIT"), LONGER.replace("    return LIMIT", "")):
        script.write_text(wrong.replace(last, reset_done))
        assert shared_code(folder) == (1, "reset_done: one.py = three.py = two.py | ppo_lstm.py\n", "")
    script.write_text(LONGER.replace(last, reset_done))
    assert (
        shared_code(folder, "--push", "reset_done", folder / "one.py")[1] == "reset_done: changed nothing\n"
    )
    code, _, error = shared_code(folder, "--push", "reset_done", script)
    assert code == 2 and "reset_done" in error and len(error.splitlines()) == 1
    (folder / "one.py").write_text(ONE)
    script.write_text(LONGER)  # another name may not
    assert shared_code(folder)[0] == 1


def test_push_inserts_nothing_where_the_name_is_absent_and_knows_its_names(folder):
    without = ONE[: ONE.index("def last")]
    (folder / "three.py").write_text(without)
    (folder / "one.py").write_text(ONE.replace("return LIMIT", "return 7"))
    assert shared_code(folder, "--push", "last", folder / "one.py")[1] == "last: changed two.py\n"
    assert (folder / "three.py").read_text() == without
    code, _, error = shared_code(folder, "--push", "nothing", folder / "one.py")
    assert code == 2 and "nothing" in error and len(error.splitlines()) == 1


def test_a_new_child_is_its_parent_under_another_name_and_trains(folder):
    (folder / "ppo.py").write_text((ALGOS / "ppo.py").read_text())
    assert shared_code(folder, "--new", "idea")[0] == 0
    child = (folder / "idea.py").read_text()
    assert "python algos/idea.py" in child and "algos/ppo.py" not in child and "TODO" in child
    assert child.partition("import")[2] == (folder / "ppo.py").read_text().partition("import")[2]
    script = load_script("idea", folder / "idea.py")
    few = dict(total_timesteps=64, num_steps=8, num_minibatches=2, eval_every=0, eval_episodes=2)
    assert len(script.train(script.make_args("CartPole-v1", run_dir="run", **few))) == 2
    code, _, error = shared_code(folder, "--new", "idea", "--parent", "one")
    assert code == 2 and "idea.py" in error and (folder / "idea.py").read_text() == child
