"""exercises/: what is taken out is missed, what is put back is right, and mistakes are found."""

import ast
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "exercises"))
import check
import make

pytestmark = pytest.mark.long
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(make.ALGOS.glob("*.py"))}
TOOLS = {"exercises/make.py": make.main, "exercises/check.py": check.main}


@pytest.fixture(autouse=True)
def few_examples(monkeypatch):
    monkeypatch.setattr(check, "EXAMPLES", 12)


def function(source: str, part: str) -> str:
    node = make.parts(source)[part]
    return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


def with_part(text: str, part: str, new: str) -> str:
    """A script with another text of one function."""
    return text.replace(function(text, part), new)


def verdicts(name: str, text: str, capsys) -> dict[str, str]:
    """What check.py says of each function, and whether its exit code agrees."""
    Path(f"{name}_exercise.py").write_text(text, encoding="utf-8")
    code = check.main([f"{name}_exercise.py", "--seconds", "0"])
    said = dict(re.findall(r"^(\w+): (right|not written|wrong)", capsys.readouterr().out, re.M))
    assert code == int(set(said.values()) != {"right"}) and list(said) == list(make.parts(text))
    return said


def planted(node: ast.FunctionDef) -> str:
    """The function with its first + or - turned round; without one, a minus less, or a * for a /."""
    swaps = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.USub: ast.UAdd}
    operations = [x for x in ast.walk(node) if type(getattr(x, "op", None)) in swaps]
    order = [(ast.Add, ast.Sub), ast.USub, (ast.Mult, ast.Div)]
    first = min(operations, key=lambda x: [isinstance(x.op, kind) for kind in order].index(True))
    first.op = swaps[type(first.op)]()
    return ast.unparse(node)


@pytest.mark.parametrize("name", SOURCES)
def test_bodies_are_missed_until_they_are_put_back(name, capsys):
    assert make.main([name]) == 0
    path, source = Path(f"{name}_exercise.py"), SOURCES[name]
    exercise, rule = path.read_text(encoding="utf-8"), make.parts(source)
    for part, node in make.parts(exercise).items():
        assert ast.get_docstring(node) == ast.get_docstring(rule[part])
        assert ast.unparse(node.args) == ast.unparse(rule[part].args) and len(node.body) == 2
        hints = re.findall(r"^    # (.*)$", function(exercise, part), re.M)
        assert 1 <= len(hints) <= 2, f"{part} needs one or two hints in make.py"
        assert f'raise NotImplementedError("your turn: {part}")' in function(exercise, part)
    assert verdicts(name, exercise, capsys) == dict.fromkeys(rule, "not written")

    first, *others = rule
    exercise = with_part(exercise, first, function(source, first))
    assert verdicts(name, exercise, capsys) == {first: "right"} | dict.fromkeys(others, "not written")
    for part in others:
        exercise = with_part(exercise, part, function(source, part))
    assert exercise == source.replace(f"algos/{name}.py", f"{name}_exercise.py")
    assert verdicts(name, exercise, capsys) == dict.fromkeys(rule, "right")


@pytest.mark.parametrize("name", SOURCES)
def test_a_mistake_in_any_function_is_found(name, capsys):
    text = SOURCES[name]
    for part, node in make.parts(text).items():
        node.decorator_list = []  # they stand above the lines that are replaced
        text = with_part(text, part, planted(node))
    assert set(verdicts(name, text, capsys).values()) == {"wrong"}


MISTAKES = {
    "the sign is wrong": ("vpg", "policy_loss", "return -", "return "),
    "expected gradient with respect to log_prob": (
        "vpg",
        "policy_loss",
        "(log_prob *",
        "(log_prob.detach() *",
    ),
    r"expected tensor of floats, shape \(\), got .* \(4,\)": ("vpg", "policy_loss", ".mean()", ""),
    r"NameError: name 'typo' is not defined \(line \d+\)": ("vpg", "policy_loss", "-(", "typo("),
    "expected tensor .* got array": ("vpg", "compute_gae", "torch.from_numpy(advantage)", "advantage"),
    "your reward after the call": ("reinforce", "compute_returns", "reward.numpy().copy()", "reward.numpy()"),
    "expected a number, got NoneType": ("dqn", "epsilon_at", "return 1.0", "return None"),
    "expected 2 results, got 1": ("ppo", "policy_change", "return kl,", "return"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_it_says_what_is_wrong(words, capsys):
    name, part, old, new = MISTAKES[words]
    path, text = Path(f"{name}_exercise.py"), SOURCES[name]
    path.write_text(with_part(text, part, function(text, part).replace(old, new)), encoding="utf-8")
    assert check.main([path.name, "--seconds", "0"]) == 1
    out = capsys.readouterr().out
    assert re.search(words, out) and out.count(": wrong") == 1, out


def test_a_file_that_is_no_exercise_or_does_not_run_is_refused(capsys):
    Path("notes.py").touch()
    for file in ("notes.py", "ppo_missing.py"):
        with pytest.raises(SystemExit) as refused:
            check.main([file])
        assert refused.value.code == 2
    Path("ppo_exercise.py").write_text("def compute_gae(:\n")
    capsys.readouterr()
    assert check.main(["ppo_exercise.py"]) == 2
    assert "ppo_exercise.py does not run: SyntaxError" in capsys.readouterr().err


def test_an_exercise_is_never_overwritten_and_may_be_of_some_functions(capsys):
    assert make.main(["ppo", "value_loss"]) == 0
    path = Path("ppo_exercise.py")
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"your turn: (\w+)", text) == ["value_loss"]
    assert make.main(["ppo"]) == 1 and path.read_text(encoding="utf-8") == text
    said = capsys.readouterr().err
    assert "ppo_exercise.py exists already" in said and said.count("\n") == 1
    with pytest.raises(SystemExit):
        make.main(["vpg", "value_loss"])
    assert "compute_gae, policy_loss" in capsys.readouterr().err and not Path("vpg_exercise.py").exists()


def test_every_hint_is_of_a_function():
    assert {part for part, _ in make.all_hints()} == {
        part for x in SOURCES.values() for part in make.parts(x)
    }


def test_a_finished_exercise_trains(capfd):
    text = SOURCES["ppo"].replace("dict(total_timesteps=100_000", "dict(total_timesteps=1_024", 1)
    Path("ppo_ada.py").write_text(text, encoding="utf-8")
    assert check.main(["ppo_ada.py", "--seconds", "3000"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^mean return \d+\.\d on CartPole-v1 after 1,024 steps\n.* is 475$", out, re.M), out
    assert len([*Path("runs/ppo_ada").iterdir()]) == 1


def test_a_training_ends_when_its_time_is_over():
    Path("endless.py").write_text("import time\ntime.sleep(300)\n")
    Path("broken.py").write_text("raise SystemExit(3)\n")
    assert check.run(1, "endless.py") == 0 and check.run(600, "broken.py") == 3


def test_commands_of_the_page_run():
    page = (ROOT / "exercises/README.md").read_text(encoding="utf-8")
    for line in "".join(re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)).splitlines():
        python, tool, *words = shlex.split(line, comments=True)
        if tool == "exercises/make.py":
            Path(f"{words[0]}_exercise.py").unlink(missing_ok=True)
        elif not Path(words[0]).exists():  # under another name
            shutil.copy("ppo_exercise.py", words[0])
        seconds = ["--seconds", "0"] if tool == "exercises/check.py" else []
        assert python == "python" and TOOLS[tool]([*words, *seconds]) == bool(seconds)
