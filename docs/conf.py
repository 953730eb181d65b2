"""The site: `sphinx-build -W docs site` makes it from the Markdown files here, the scripts and the recipes.

These files are read on GitHub too, so they hold Markdown alone. When the site is made,
- a link to ../algos/NAME.py#function or ../recipes/NAME.patch leads to a page with that file,
- the command `diff algos/PARENT.py algos/CHILD.py`, alone in its block, is followed by what it shows of the
  learning rule and of `train`,
- a paragraph that begins `**[PART](../algos/NAME.py#function).**` is followed by that part of the script: a
  function, or a phase of `train`, from its comment to the next empty line,
- the comment `<!-- toctree ... -->` of index.md is the navigation,
- the comment `<!-- curves -->` of curves.md becomes all curves of benchmark/results, drawn by curves.js,
- the comment `<!-- live -->` of live.md becomes the cart and pole of live.js, balanced by live_policy.json,
- notebook.ipynb becomes a page with its outputs and a link to the file.
Links that lead nowhere are warnings, and -W makes them errors.
"""

import ast
import base64
import csv
import difflib
import json
import re
import shutil
import textwrap
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.images import get_image_size

DOCS = Path(__file__).parent
ALGOS, RECIPES, PAGES = DOCS.parent / "algos", DOCS.parent / "recipes", DOCS / "source"

project = html_title = "PlainRL"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # a notebook is turned into Markdown first
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_copy_source = html_show_copyright = False
html_show_search_summary = False  # a page that is opened as a file cannot fetch the others
# MathJax from a package, in one file with its glyphs: nothing is fetched when a page is read.
mathjax_path = "tex-svg.js"
# Plotly likewise, for the page of all curves.
html_static_path = [
    "site.css", "curves.js", "live.js",
    str(Path(find_spec("sphinx-mathjax-offline").origin).parent / "static/mathjax" / mathjax_path),
    str(Path(find_spec("plotly").origin).parent / "package_data/plotly.min.js"),
]  # fmt: skip
html_css_files = ["site.css"]


def script_page(script: Path) -> str:
    """Markdown with the whole source, a heading in front of each function and class with its comments."""
    lines, starts = script.read_text().splitlines(), {1: ""}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min(part.lineno for part in [node, *node.decorator_list])
            while lines[first - 2].startswith("#"):
                first -= 1
            starts[first] = f"## {node.name}\n\n"
    firsts, page = sorted(starts), [f"# algos/{script.name}\n"]
    for first, end in zip(firsts, [*firsts[1:], len(lines) + 1], strict=True):
        code = "\n".join(lines[first - 1 : end - 1]).rstrip()
        page.append(f"{starts[first]}~~~~{{code-block}} python\n:lineno-start: {first}\n\n{code}\n~~~~\n")
    return "\n".join(page)


def write_source_pages(app, config):
    PAGES.mkdir(exist_ok=True)
    pages = {path.stem: script_page(path) for path in ALGOS.glob("*.py")}
    for path in RECIPES.glob("*.patch"):
        pages[path.stem] = f"# recipes/{path.name}\n\n~~~~diff\n{path.read_text()}~~~~\n"
    for name, page in pages.items():
        (PAGES / f"{name}.md").write_text(f"---\norphan: true\n---\n{page}")


def remove_source_pages(app, exception):
    shutil.rmtree(PAGES)


def rule_and_train(name: str) -> tuple[list[str], int]:
    """The lines of a script from its first function, of the learning rule, through train; how many before."""
    source = (ALGOS / f"{name}.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    first = functions[0].lineno - 1
    last = next(node.end_lineno for node in functions if node.name == "train")
    return source.splitlines()[first:last], first


def diff(found: re.Match) -> str:
    """The command itself and what it shows, with the numbers of the child's lines."""
    (old, _), (new, before) = rule_and_train(found[1]), rule_and_train(found[2])
    shown = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        shown.append(f"@@ from line {before + group[0][3] + 1} of {found[2]}.py @@")
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                shown += [f" {line}" for line in old[i1:i2]]
            else:
                shown += [f"-{line}" for line in old[i1:i2]] + [f"+{line}" for line in new[j1:j2]]
    heading = "What it shows of the learning rule and of `train`:"
    return "\n".join([found[0], heading, "", "~~~~diff", *shown, "~~~~", ""])


def part_of_script(found: re.Match) -> str:
    """The paragraph itself and the lines it is about."""
    part, name, function = found[1], found[2], found[3]
    source = (ALGOS / f"{name}.py").read_text()
    lines, outer = source.splitlines(), {x.name: x for x in ast.parse(source).body if hasattr(x, "name")}
    if function not in outer:
        raise ExtensionError(f"{found[0]}: algos/{name}.py has no {function}")
    inner = {x.name: x for x in outer[function].body if isinstance(x, ast.FunctionDef)}
    if node := outer.get(part) or inner.get(part):
        first, last = node.lineno - 1, node.end_lineno
    else:
        begins = "while run.pause():" if part == "Pause" else f"# {part}"
        phases = [i for i, line in enumerate(lines) if line.strip().startswith(begins)]
        if len(phases) != 1:
            raise ExtensionError(f"{found[0]}: algos/{name}.py has {len(phases)} parts of this name")
        first, last = phases[0], lines.index("", phases[0])
    code = textwrap.dedent("\n".join(lines[first:last]))
    return f"{found[0]}\n~~~~{{code-block}} python\n:lineno-start: {first + 1}\n\n{code}\n~~~~\n"


def all_curves() -> str:
    """HTML with all committed trainings: {environment: {algorithm: {seed: [steps, returns]}}}."""
    curves = {}
    with (DOCS.parent / "benchmark/results/evaluations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lengths = defaultdict(set)
    for row in rows:
        lengths[row["algo"], row["env_id"]].add(row["total_timesteps"])
    for row in rows:
        several = len(lengths[row["algo"], row["env_id"]]) > 1
        name = f"{row['algo']} of {row['total_timesteps']} steps" if several else row["algo"]
        if row["algo"].startswith("bc"):
            name += " (gradient steps)"
        env_id = row["env_id"].partition(":")[2] or row["env_id"]
        seeds = curves.setdefault(env_id, {}).setdefault(name, {})
        steps, returns = seeds.setdefault(row["seed"], ([], []))
        steps.append(int(row["step"]))
        returns.append(round(float(row["return_mean"]), 3))
    return f"""```{{raw}} html
<div class="controls">
<label>Environment <select id="environment"></select></label>
<label><input type="checkbox" id="logarithmic"> logarithmic steps</label>
<label><input type="checkbox" id="seeds"> each seed</label>
</div>
<div id="curves"></div>
<script src="_static/plotly.min.js"></script>
<script>const CURVES = {json.dumps(curves, sort_keys=True)};</script>
<script src="_static/curves.js"></script>
```"""


def live_cart_pole() -> str:
    """HTML with the canvas and the buttons of live.js, and the policy."""
    policy = json.dumps({"layers": json.loads((DOCS / "live_policy.json").read_text())["layers"]})
    return f"""```{{raw}} html
<noscript><p>The animation needs JavaScript.</p></noscript>
<div id="live">
<canvas id="live-canvas" role="img" aria-label="A cart on a track with a pole that stands on it"></canvas>
<p id="live-says"></p>
<div id="live-odds"><span id="live-left"></span><span id="live-bar"></span><span id="live-right"></span></div>
<div class="controls">
<button id="live-push-left">← push left</button><button id="live-push-right">push right →</button>
</div>
<div class="controls">
<button id="live-reset">Reset</button><button id="live-pause">Pause</button>
<label><input type="checkbox" id="live-policy" checked> policy acts</label>
</div>
</div>
<script>const POLICY = {policy};</script>
<script src="_static/live.js"></script>
```"""


def notebook(name: str, text: str) -> str:
    """Markdown of a Jupyter notebook: its text, its code and what that printed and drew."""
    parts = []
    for number, cell in enumerate(json.loads(text)["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"~~~~python\n{source}\n~~~~")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                picture = PAGES / f"{name}_{number}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![what the code above draws]({PAGES.name}/{picture.name})")
            elif "text/html" in data:
                parts.append(f"```{{raw}} html\n{''.join(data['text/html'])}\n```")
            elif printed := "".join(data["text/plain"]).strip():
                parts.append(f"~~~~{{code-block}} text\n:class: output\n\n{printed}\n~~~~")
        if number == 0:
            parts.append(f"{{download}}`Download this notebook <{name}.ipynb>`")
    return "\n\n".join(parts)


def for_the_site(app, docname, source):
    """Rewrites the Markdown that GitHub shows, before it is parsed."""
    text = source[0]
    if (DOCS / f"{docname}.ipynb").exists():
        text = notebook(docname, text)
    if not docname.startswith("source/"):
        part = r"^\*\*\[`?([\w ]+)`?\]\(\.\./algos/(\w+)\.py#(\w+)\)\.\*\*.*?\n(?=\n)"
        text = re.sub(part, part_of_script, text, flags=re.M | re.S)
        script = r"\]\(\.\./algos/(\w+)\.py(#\w+)?\)"
        text = re.sub(script, lambda found: f"](source/{found[1]}.md{(found[2] or '').lower()})", text)
        text = re.sub(r"\]\(\.\./recipes/(\w+)\.patch\)", r"](source/\1.md)", text)
        command = r"^```bash\ndiff algos/(\w+)\.py algos/(\w+)\.py\n```\n"
        text = re.sub(command, diff, text, flags=re.M)
        text = text.replace("<!-- curves -->", all_curves() if docname == "curves" else "")
        text = text.replace("<!-- live -->", live_cart_pole() if docname == "live" else "")
        text = re.sub(r"<!-- toctree\n(.*?)-->", r"```{toctree}\n:hidden:\n\1```", text, flags=re.S)
    source[0] = text


def size_pictures(app, doctree):
    """Plots have 150 dots per inch, videos 96; a picture with a width is a link to its full size."""
    for image in doctree.findall(nodes.image):
        if size := get_image_size(DOCS / image["uri"]):  # none where there is no such file
            image["width"] = f"{size[0] * 96 // (150 if image['uri'].endswith('.png') else 96)}px"


def keep_options_whole(app, pagename, templatename, context, doctree):
    """A command that is too long for its line is not wrapped after the hyphens of an option."""
    whole = lambda found: re.sub(r"(?<=[\s>])--?\w[\w-]*", r'<span class="option">\g<0></span>', found[0])
    commands = r'<div class="highlight-bash .*?</pre>'
    context["body"] = re.sub(commands, whole, context.get("body", ""), flags=re.S)


def setup(app):
    app.connect("config-inited", write_source_pages)
    app.connect("source-read", for_the_site)
    app.connect("doctree-read", size_pictures)
    app.connect("html-page-context", keep_options_whole)
    app.connect("build-finished", remove_source_pages)
