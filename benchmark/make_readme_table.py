"""Writes the table of algorithms in README.md and the results in docs/, each between two comments, from data.

    python benchmark/make_readme_table.py            # after benchmark/run.py, speed.py or a change in algos/
    python benchmark/make_readme_table.py --check    # exit code 1 if README.md is out of date

What a script measured and printed into results/NAME.txt stands between <!-- output:NAME:start --> and
<!-- output:NAME:end --> in docs/ and benchmark/README.md. Name and paper come from the docstring of each
script, results and speed from benchmark/results.
"""

import argparse
import ast
import csv
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from run import ROOT, slug
from speed import OURS, SB3, TASKS
from suites import PUBLISHED, SUITES

START, END = "<!-- table:start -->", "<!-- table:end -->"
DOCS_START, DOCS_END = "<!-- results:start -->", "<!-- results:end -->"
NOTE = """
Result: mean return over seeds of 100 greedy episodes with the last policy (steps of training, seeds);
✓ reaches the bar of `benchmark/suites.py`, ✗ does not. Speed: our environment steps per second over those of
Stable-Baselines3, or of SBX where it says so, at equal settings, median of paired runs on a CPU (torch
threads, pairs; `benchmark/README.md`).
""".strip()
EPISODES = "100"  # of a final evaluation, as the note says


def rows_of(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def name_and_paper(script: Path) -> tuple[str, str]:
    """From a docstring that begins `Name of the Algorithm (Authors year, arXiv 1234.56789): ...`."""
    found = re.match(
        r"([^(]+) \(([^()]+)\)", ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    )
    if not found:
        sys.exit(
            f"make_readme_table.py: {script} has no docstring that begins `Name (authors, year, arXiv id)`"
        )
    paper = re.sub(r"arXiv (\S+)", r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(found[2].split()))
    return " ".join(found[1].split()), paper


def steps(count: int) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"


def title(cell) -> str:
    return f"{cell.env_id} {cell.variant.replace('_', ' ')}".strip()


def cells(ablations: bool) -> list:
    """All cells in the order of the suites, each once, with or without those that only an ablation has."""
    suites = [name for name in SUITES if name != "smoke" and (ablations or not name.endswith("_ablation"))]
    return list(dict.fromkeys(cell for name in suites for cell in SUITES[name]))


def finals(algo: str, folder: Path, ablations: bool) -> list[tuple]:
    """(cell, final means of its seeds) of every cell that was measured."""
    measured = []
    for cell in cells(ablations):
        if cell.algo != algo:
            continue
        path, scores = folder / f"{cell.name}__{slug(cell.env_id)}.csv", []
        for row in rows_of(path):
            if row["kind"] == "final" and row["total_timesteps"] == str(cell.steps):
                if row["eval_episodes"] != EPISODES:
                    sys.exit(
                        f"make_readme_table.py: {path} has a final evaluation of {row['eval_episodes']} "
                        f"episodes, the table is of {EPISODES}: run.py makes them without --final-episodes"
                    )
                scores.append(float(row["eval_return_mean"]))
        if scores:
            measured.append((cell, scores))
    return measured


def number(score: float, mean: float) -> str:
    return f"{score:.1f}" if abs(mean) > 1 else f"{score:.3f}"  # a return of FrozenLake is at most 1


def count_of(things: int | str, name: str) -> str:
    return f"{things} {name}{'s' if int(things) > 1 else ''}"


def results(algo: str, folder: Path) -> str:
    """One line a cell, for the README, without the ablations."""
    lines = []
    for cell, scores in finals(algo, folder, ablations=False):
        mean = statistics.mean(scores)
        mark = "" if cell.bar is None else f" {'✓' if mean >= cell.bar else '✗'}"
        seeds = count_of(len(scores), "seed")
        lines.append(f"{title(cell)} {number(mean, mean)}{mark} ({steps(cell.steps)}, {seeds})")
    return "<br>".join(lines) or "–"


def results_table(algo: str, folder: Path) -> str:
    """The table of docs/{algo}.md: ours, the bar and what others published."""
    lines = [
        "| environment | steps | seeds | final return, mean ± std over seeds | bar | published |",
        "|---|" + "---|" * 5,
    ]
    for cell, scores in finals(algo, folder, ablations=True):
        mean = statistics.mean(scores)
        ours = number(mean, mean)
        if len(scores) > 1:
            ours += f" ± {number(statistics.stdev(scores), mean)}"
        bar = "–" if cell.bar is None else f"{cell.bar:g}"
        published = PUBLISHED.get((cell.name, cell.env_id), "–")
        lines.append(
            f"| {title(cell)} | {steps(cell.steps)} | {len(scores)} | {ours} | {bar} | {published} |"
        )
    return "\n".join(lines)


def speeds(algo: str, folder: Path) -> str:
    """Median ratios to Stable-Baselines3, and seconds to solve CartPole-v1."""
    pairs = defaultdict(lambda: defaultdict(dict))
    for row in rows_of(folder / "speed.csv"):
        if TASKS[row["task"]].algo != algo:
            continue
        key, pair = (row["kind"], row["task"], row["threads"]), int(row["pair"])
        pairs[key][pair][row["library"]] = row
    lines = []
    order = lambda item: (item[0][0] == "solve", list(TASKS).index(item[0][1]), item[0][2])
    for (kind, task, threads), measured in sorted(pairs.items(), key=order):
        ours = [pair[OURS] for pair in measured.values()]
        if kind == "speed":
            peer = TASKS[task].peer
            speed = lambda row: float(row["steps_per_second"])
            middle = statistics.median(speed(pair[OURS]) / speed(pair[peer]) for pair in measured.values())
            what = task[task.index(TASKS[task].env_id) :].removesuffix(f" {peer}")
            other = "" if peer == SB3 else f" {peer.upper()}"
            torch_threads = "" if threads == "0" else f"{count_of(threads, 'thread')}, "
            lines.append(f"{what} {middle:.2f}×{other} ({torch_threads}{count_of(len(ours), 'pair')})")
            continue
        seeds = count_of(len(ours), "seed")
        solved = [float(row["seconds"]) for row in ours if row["solved"] == "True"]
        if len(solved) == len(ours):
            lines.append(f"{task} solved {statistics.median(solved):.0f} s after the command ({seeds})")
        else:  # the seeds that got there are the lucky ones: their time is not that of the task
            lines.append(f"{task} solved by {len(solved)} of {seeds}")
    return "<br>".join(lines) or "–"


def table(folder: Path) -> str:
    head = ("algorithm", "file", "paper", "lines", "result", "speed")
    lines = [head, ("---",) * len(head)]
    for script in sorted((ROOT / "algos").glob("*.py")):
        name, paper = name_and_paper(script)
        length = len(script.read_text(encoding="utf-8").splitlines())
        link = f"[`algos/{script.name}`](algos/{script.name})"
        row = (name, link, paper, str(length), results(script.stem, folder), speeds(script.stem, folder))
        lines.append(row)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the two markers")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help="where the CSVs are")
    args = parser.parse_args()
    wanted = [(args.readme, START, END, f"{table(args.results)}\n\n{NOTE}")]
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "benchmark/README.md"]
    for page in pages if args.readme == ROOT / "README.md" else ():
        text = page.read_text(encoding="utf-8")
        if DOCS_START in text:
            wanted.append((page, DOCS_START, DOCS_END, results_table(page.stem, args.results)))
        for name in re.findall(r"<!-- output:(\w+):start -->", text):
            printed = args.results / f"{name}.txt"
            if not printed.exists():
                print(f"{page} shows {printed}, which is missing: measure it first", file=sys.stderr)
                return 2
            output = printed.read_text(encoding="utf-8").strip("\n")
            marks = (f"<!-- output:{name}:{place} -->" for place in ("start", "end"))
            wanted.append((page, *marks, f"```text\n{output}\n```"))
    for file, mark, end_mark, content in wanted:
        text = file.read_text(encoding="utf-8")
        before, start, rest = text.partition(mark)
        _, end, after = rest.partition(end_mark)
        if not (start and end):
            print(f"{file} lacks the lines {mark} and {end_mark}", file=sys.stderr)
            return 2
        new = f"{before}{mark}\n{content}\n{end_mark}{after}"
        if new != text and args.check:
            print(f"{file} is out of date: run python benchmark/make_readme_table.py", file=sys.stderr)
            return 1
        if new != text:
            file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
