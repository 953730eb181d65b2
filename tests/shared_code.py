"""One name, one text: finds top-level names of algos/ whose source differs from script to script.

    python tests/shared_code.py                                 lists them; exit code 1 if there are any
    python tests/shared_code.py --push make_envs algos/ppo.py   gives the other copies the text of ppo.py
    python tests/shared_code.py --new idea --parent ppo         writes algos/idea.py, a child to start from

A text is the definition with its docstring, its decorators and the comments right above it.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ALGOS = Path(__file__).parents[1] / "algos"
EXEMPT = "Args TUNED Actor Critic ActorCritic Agent Policy QNetwork train".split()  # these differ on purpose
OWN = {
    "maml.py": {"evaluate", "film", "make_env", "make_envs"},
    "pearl.py": {"evaluate", "film", "make_env", "make_envs"},
}  # of tasks; Run and load_policy call these
ADDS = {"ppo_lstm.py": {"reset_done"}}  # these have lines of their own beside all those of the common text


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """Top-level functions, classes and constants: name to its lines [first, last)."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        else:
            continue
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
        while first and lines[first - 1].startswith("#") and not lines[first - 1].startswith("# ---"):
            first -= 1
        found |= dict.fromkeys(names, (first, node.end_lineno))
    return found


def texts(path: Path) -> dict[str, str]:
    source = path.read_text()
    lines = source.splitlines()
    return {name: "\n".join(lines[slice(*span)]) for name, span in definitions(source).items()}


def adds_to(common: str, text: str) -> bool:
    """Whether text has all lines of common, in their order."""
    lines = iter(text.splitlines())
    return all(line in lines for line in common.splitlines())


def differing(folder: Path) -> dict[str, list[list[str]]]:
    """Names with more than one text: groups of scripts that agree."""
    copies = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.py"), key=lambda path: (path.name in ADDS, path.name)):
        for name, text in texts(path).items():
            if name in ADDS.get(path.name, ()):  # counts as the text that it adds lines to
                text = next((common for common in copies[name] if adds_to(common, text)), text)
            if name not in EXEMPT and name not in OWN.get(path.name, ()):
                copies[name][text].append(path.name)
    return {name: list(groups.values()) for name, groups in copies.items() if len(groups) > 1}


def push(name: str, origin: Path, folder: Path) -> list[str]:
    """Gives the other copies of name, but not those of ADDS, the text in origin. Returns which changed."""
    if name in ADDS.get(origin.name, ()) or name in OWN.get(origin.name, ()):
        raise KeyError(f"{name} of {origin} has lines that the others must not have")
    text, changed = texts(origin)[name], []
    for path in sorted(folder.glob("*.py")):
        source = path.read_text()
        span = definitions(source).get(name)
        kept = name in ADDS.get(path.name, ()) or name in OWN.get(path.name, ())
        if span is None or path.resolve() == origin.resolve() or kept:
            continue
        lines = source.splitlines()
        lines[slice(*span)] = text.splitlines()
        if (new := "\n".join(lines) + "\n") != source:
            path.write_text(new)
            changed.append(path.name)
    return changed


def write_child(name: str, parent: Path) -> Path:
    """A copy of parent that calls itself name: the first line and the command of its docstring are to do."""
    source = parent.read_text().replace(f"algos/{parent.stem}.py", f"algos/{name}.py")
    sentence = f'"""TODO: what {name} does in a sentence, with its paper; it starts as {parent.stem}.\n\n'
    child = parent.with_name(f"{name}.py")
    with child.open("x") as file:  # never over a script
        file.write(re.sub(r'\A""".*?\n\n', lambda _: sentence, source, flags=re.DOTALL))
    return child


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--push", nargs=2, metavar=("NAME", "FILE"))
    parser.add_argument("--new", metavar="NAME", help="name of a script to write, without .py")
    parser.add_argument("--parent", default="ppo", help="script that it starts from")
    parser.add_argument("--algos", type=Path, default=ALGOS, help="folder of the scripts")
    args = parser.parse_args()
    try:
        if args.new:
            print(f"wrote {write_child(args.new, args.algos / f'{args.parent}.py')}")
            return 0
        if args.push:
            changed = push(args.push[0], Path(args.push[1]), args.algos)
            print(f"{args.push[0]}: changed {', '.join(changed) or 'nothing'}")
            return 0
    except (KeyError, OSError) as error:  # no such name; no such script, or one that is there
        print(f"shared_code.py: {error}", file=sys.stderr)
        return 2
    found = differing(args.algos)
    for name, groups in found.items():
        print(f"{name}: " + " | ".join(" = ".join(group) for group in groups))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
