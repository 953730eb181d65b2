"""The scripts of algos/ as pages of the site, made when it is built: an anchor at every function and class.

The pages of docs/ link to ../algos/NAME.py#function, a file of the repository. On the site the link leads to
the page made from that file, and `mkdocs build --strict` fails where there is no such function.
"""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File

ALGOS = Path(__file__).parents[1] / "algos"


def source_page(script: Path) -> str:
    """Markdown with the whole source, a heading in front of each top-level function and class."""
    source = script.read_text()
    starts = {1: f"# algos/{script.name}"}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min(part.lineno for part in [node, *node.decorator_list])
            starts[first] = f"## {node.name} {{#{node.name}}}"
    lines, firsts, page = source.splitlines(), sorted(starts), []
    for first, end in zip(firsts, [*firsts[1:], len(lines) + 1], strict=True):
        code = "\n".join(lines[first - 1 : end - 1]).rstrip()
        page.append(f'{starts[first]}\n\n~~~~ {{.python linenums="{first}"}}\n{code}\n~~~~\n')
    return "\n".join(page)


def on_files(files, config):
    for script in sorted(ALGOS.glob("*.py")):
        files.append(File.generated(config, f"source/{script.stem}.md", content=source_page(script)))
    return files


def on_page_markdown(markdown, **_):
    return re.sub(r"\]\(\.\./algos/(\w+)\.py", r"](source/\1.md", markdown)
