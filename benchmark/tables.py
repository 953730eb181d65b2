"""Writes the table of algorithms in README.md and the results in docs/, each between two comments, from data.

    python benchmark/tables.py            # after benchmark/run.py, speed.py or a change in algos/
    python benchmark/tables.py --check    # exit code 1 if a page is out of date

What a script measured and printed into results/NAME.txt stands between <!-- output:NAME:start --> and
<!-- output:NAME:end --> in docs/. Name and paper come from the docstring of each script, results and speed
from benchmark/results.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from run import ROOT, rows_of, short, slug
from speed import OURS, SB3, TASKS
from suites import PUBLISHED, SUITES

NOTE = """
Result: mean return over seeds of 100 greedy episodes with the last policy (steps of training, seeds);
✓ reaches the bar of `benchmark/suites.py`, ✗ does not. Speed: our environment steps per second over those of
Stable-Baselines3, or of SBX where it says so, at equal settings, median of paired runs on a CPU (torch
threads, pairs; `benchmark/README.md`).
""".strip()
RESULTS = ROOT / "benchmark/results"


def finals(cell) -> list[float]:
    """Final means of the seeds of a cell that were measured."""
    path, kind = RESULTS / f"{cell.name}__{slug(cell.env_id)}.csv", ("final", str(cell.steps))
    rows = [row for row in rows_of(path) if (row["kind"], row["total_timesteps"]) == kind]
    if any(row["eval_episodes"] != "100" for row in rows):
        sys.exit(f"tables.py: {path} has a final evaluation that is not of 100 episodes, as the note says")
    return [float(row["eval_return_mean"]) for row in rows]


def measured(algo: str, ablations: bool) -> list[tuple]:
    """(title, cell, final means) of the algorithm's cells, each once, with or without those of ablations."""
    suites = [name for name in SUITES if name != "smoke" and (ablations or not name.endswith("_ablation"))]
    cells = dict.fromkeys(cell for name in suites for cell in SUITES[name] if cell.algo == algo)
    title = lambda cell: f"{cell.env_id} {cell.variant.replace('_', ' ')}".strip()
    return [(title(cell), cell, scores) for cell in cells if (scores := finals(cell))]


def number(score: float, mean: float) -> str:
    return f"{score:.1f}" if abs(mean) > 1 else f"{score:.3f}"  # a return of FrozenLake is at most 1


def count_of(things: int | str, name: str) -> str:
    return f"{things} {name}{'s' if int(things) > 1 else ''}"


def results(algo: str) -> str:
    """One line a cell, for the README, without the ablations."""
    lines = []
    for title, cell, scores in measured(algo, ablations=False):
        mean = statistics.mean(scores)
        mark = "" if cell.bar is None else f" {'✓' if mean >= cell.bar else '✗'}"
        seeds = count_of(len(scores), "seed")
        lines.append(f"{title} {number(mean, mean)}{mark} ({short(cell.steps)}, {seeds})")
    return "<br>".join(lines) or "–"


def results_table(algo: str) -> str:
    """The table of docs/{algo}.md: ours, the bar and what others published."""
    lines = ["| environment | steps | seeds | final return, mean ± std over seeds | bar | published |"]
    lines.append("|---" * 6 + "|")
    for title, cell, scores in measured(algo, ablations=True):
        mean = statistics.mean(scores)
        ours = number(mean, mean)
        if len(scores) > 1:
            ours += f" ± {number(statistics.stdev(scores), mean)}"
        bar = "–" if cell.bar is None else f"{cell.bar:g}"
        published = PUBLISHED.get((cell.name, cell.env_id), "–")
        lines.append(f"| {title} | {short(cell.steps)} | {len(scores)} | {ours} | {bar} | {published} |")
    return "\n".join(lines)


def speeds(algo: str) -> str:
    """Median ratios to the peers, and seconds to solve CartPole-v1."""
    found, names = defaultdict(lambda: defaultdict(list)), list(TASKS)
    for row in rows_of(RESULTS / "speed.csv"):
        if TASKS[row["task"]].algo == algo:
            key = row["kind"] == "solve", names.index(row["task"]), row["threads"]
            found[key][row["library"]].append(row)  # in the order of the pairs
    lines, middle = [], statistics.median
    for (solve, index, threads), rows in sorted(found.items()):
        name, ours, peer = names[index], rows[OURS], TASKS[names[index]].peer
        if not solve:
            pairs = zip(
                *([float(row["steps_per_second"]) for row in rows[x]] for x in (OURS, peer)), strict=True
            )
            ratio = middle(a / b for a, b in pairs)
            what = name[name.index(TASKS[name].env_id) :].removesuffix(f" {peer}")
            other = "" if peer == SB3 else f" {peer.upper()}"
            torch_threads = "" if threads == "0" else f"{count_of(threads, 'thread')}, "
            lines.append(f"{what} {ratio:.2f}×{other} ({torch_threads}{count_of(len(ours), 'pair')})")
            continue
        seeds = count_of(len(ours), "seed")
        solved = [float(row["seconds"]) for row in ours if row["solved"] == "True"]
        if len(solved) == len(ours):
            lines.append(f"{name} solved {middle(solved):.0f} s after the command ({seeds})")
        else:  # the seeds that got there are the lucky ones: their time is not that of the task
            lines.append(f"{name} solved by {len(solved)} of {seeds}")
    return "<br>".join(lines) or "–"


def name_and_paper(script: Path) -> tuple[str, str]:
    """From a docstring that begins `Name of the Algorithm (Authors year, arXiv 1234.56789): ...`."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    found = re.match(r"([^(]+) \(([^()]+)\)", docstring)
    if not found:
        sys.exit(f"tables.py: {script} has no docstring that begins `Name (authors, year, arXiv id)`")
    link = r"[arXiv \1](https://arxiv.org/abs/\1)"
    return " ".join(found[1].split()), re.sub(r"arXiv (\d+\.\d+)", link, " ".join(found[2].split()))


def table() -> str:
    lines = [("algorithm", "file", "paper", "lines", "result", "speed"), ("---",) * 6]
    for script in sorted((ROOT / "algos").glob("*.py")):
        name, paper = name_and_paper(script)
        length = len(script.read_text(encoding="utf-8").splitlines())
        link = f"[`algos/{script.name}`](algos/{script.name})"
        lines.append((name, link, paper, str(length), results(script.stem), speeds(script.stem)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def content(page: Path, name: str) -> str:
    """What belongs between the comments of this name on this page."""
    if name == "table":
        return f"{table()}\n\n{NOTE}"
    if name == "results":
        return results_table(page.stem)
    printed = (RESULTS / f"{name.removeprefix('output:')}.txt").read_text(encoding="utf-8")
    return "```text\n" + printed.strip("\n") + "\n```"


def filled(page: Path) -> str:
    """The text of the page with what the data say."""
    block = lambda x: f"<!-- {x[1]}:start -->\n{content(page, x[1])}\n<!-- {x[1]}:end -->"
    marks = r"<!-- (table|results|output:\w+):start -->.*?<!-- \1:end -->"
    return re.sub(marks, block, page.read_text(encoding="utf-8"), flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    args = parser.parse_args()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = filled(page)
        if not args.check:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            sys.exit(f"{page} is out of date: run python benchmark/tables.py")


if __name__ == "__main__":
    main()
