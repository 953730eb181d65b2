"""Writes the table of algorithms in README.md and the results in docs/, each between two comments, from data.

    python benchmark/tables.py            # after benchmark/run.py, speed.py or a change in algos/
    python benchmark/tables.py --check    # exit code 1 if a page is out of date

What a script measured and printed into results/NAME.txt stands between <!-- output:NAME:start --> and
<!-- output:NAME:end --> in docs/ and in benchmark/README.md. Names come from the docstring of each script,
results and speed from benchmark/results. The tables of docs/performance.md are made in the same way.
"""

import argparse
import ast
import math
import re
import statistics
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
from plot import stratified_bootstrap
from run import ROOT, iqm, passes, read_cells, rows_of, short
from speed import OURS, SB3, SBX, TASKS
from suites import PUBLISHED, SUITES
from time_to_bar import RACES

NOTE = """
Lines to read: those of the algorithm; the rest are utilities, nearly the same in every script. Bars: how many
of the results that have a bar reach it (interquartile mean over seeds, and 80% of the seeds, of 100 episodes
with the last policy, greedy except on SparseGrid). Speed: environment steps per second over
those of Stable-Baselines3 on CartPole-v1 (SAC and TD3: HalfCheetah-v5; TRPO: Pendulum-v1) at equal settings
and networks, median of pairs on a CPU. Papers, seeds, intervals, other tasks and published results are on the
pages.
""".strip()
RESULTS = ROOT / "benchmark/results"
PEERS = {SB3: "Stable-Baselines3", SBX: "SBX"}
LABELS = {
    "ppo": "PPO", "a2c": "A2C", "trpo": "TRPO", "ppo_lstm": "PPO with memory", "dqn": "DQN", "sac": "SAC",
    "ddpg_td3": "TD3",
}  # fmt: skip


@cache
def finals() -> dict[tuple, list[float]]:
    """Final means of the seeds that were measured, by algorithm with variant, environment and steps."""
    found = defaultdict(list)
    for run in read_cells(RESULTS, ["*"])[0]:
        if run["final_episodes"] != "100":
            sys.exit(
                "tables.py: runs.csv has a final evaluation that is not of 100 episodes, as the note says"
            )
        found[run["algo"], run["env_id"], int(run["total_timesteps"])].append(float(run["final_return_mean"]))
    return found


def scored(algo: str, ablations: bool) -> list[tuple]:
    """(title, cell, final means) of the algorithm's cells, each once, with or without those of ablations.
    There are no means if a cell was not run."""
    suites = [name for name in SUITES if name != "smoke" and (ablations or not name.endswith("_ablation"))]
    cells = dict.fromkeys(cell for name in suites for cell in SUITES[name] if cell.algo == algo)
    title = lambda cell: f"{cell.env_id.rpartition(':')[2]} {cell.variant.replace('_', ' ')}".strip()
    return [(title(cell), cell, finals().get((cell.name, cell.env_id, cell.steps), [])) for cell in cells]


def number(score: float, mean: float) -> str:
    return f"{score:.1f}" if abs(mean) > 1 else f"{score:.3f}"  # a return of FrozenLake is at most 1


def first_result(algo: str) -> tuple[str, str]:
    """A result in the first environment and how many bars are reached, ablations aside, for the README."""
    found = [row for row in scored(algo, ablations=False) if row[2]]
    judged = [passes(scores, cell.bar) for _, cell, scores in found if cell.bar is not None]
    if not found:
        return offline_result(algo), "–"
    same = [(title, scores) for title, cell, scores in found if cell.env_id == found[0][1].env_id]
    title, scores = min(same, key=lambda x: len(x[0]))  # without a variant, if there is such a one
    mean = statistics.mean(scores)
    return f"{title} {number(mean, mean)}", f"{sum(judged)}/{len(judged)}"


def offline_result(algo: str) -> str:
    """A result on the first data set of benchmark/offline.py, for the README."""
    rows = [row for row in rows_of(RESULTS / "offline.csv") if row["algo"] == algo]
    if not rows:
        return "–"
    env_id, data = rows[0]["env_id"], rows[0]["data"]
    mean = statistics.mean(
        float(x["return_mean"]) for x in rows if (x["env_id"], x["data"]) == (env_id, data)
    )
    return f"{env_id}, {data.replace('_', ' ')} data {number(mean, mean)}"


def results_table(algo: str) -> str:
    """The table of docs/{algo}.md: ours, the bar and what others published."""
    lines = [
        "| environment | steps | seeds | mean ± std | IQM, 95% interval | bar | reached by | published |"
    ]
    lines.append("|---" * 8 + "|")
    waiting = []
    for title, cell, scores in scored(algo, ablations=True):
        if not scores:
            waiting.append(f"{title} ({short(cell.steps)} steps)")
            continue
        mean, bar = statistics.mean(scores), "– | –"
        show = lambda score, mean=mean: number(score, mean)
        ours = f"{show(mean)} | –"
        if len(scores) > 1:
            middle, low, high = (x[0] for x in stratified_bootstrap([np.array(scores)[:, None]], iqm))
            ours = f"{show(mean)} ± {show(statistics.stdev(scores))}"
            ours += f" | {show(middle)}, {show(low)} to {show(high)}"
        if cell.bar is not None:
            mark = "✓" if passes(scores, cell.bar) else "✗"
            bar = f"{cell.bar:g} | {sum(x >= cell.bar for x in scores)} of {len(scores)} {mark}"
        published = PUBLISHED.get((cell.name, cell.env_id), "–")
        lines.append(f"| {title} | {short(cell.steps)} | {len(scores)} | {ours} | {bar} | {published} |")
    if waiting:
        lines += ["", f"In `benchmark/suites.py`, but not run: {', '.join(waiting)}."]
    return "\n".join(lines)


def first_speed(algo: str) -> str:
    """Median ratio to Stable-Baselines3 on the first task that was measured."""
    tasks = [name for name, task in TASKS.items() if (task.algo, task.peer) == (algo, SB3)]
    for name in tasks:
        rows = [row for row in rows_of(RESULTS / "speed.csv") if row["task"] == name]
        sides = [[float(row["steps_per_second"]) for row in rows if row["library"] == x] for x in (OURS, SB3)]
        if rows:
            return f"{statistics.median(a / b for a, b in zip(*sides, strict=True)):.2f}×"
    return "–"


def spread(values: list[float], digits: int) -> str:
    """The median, and the range of the values."""
    show = lambda x: f"{x:,.{digits}f}"
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def processor(rows: list[dict]) -> str:
    (found,) = {row["cpu"] for row in rows}  # both sides ran on one machine
    return found.replace("(R)", "").removesuffix(" Processor")


def speeds(peer: str) -> str:
    """Steps per second of each task beside a peer, medians of pairs."""
    rows = rows_of(RESULTS / "speed.csv")
    lines = [f"| script and environment | PlainRL | {PEERS[peer]} | ratio (range over pairs) | processor |"]
    lines.append("|---" * 5 + "|")
    for name, task in TASKS.items():
        of_task = [row for row in rows if row["task"] == name]
        if task.peer != peer or not of_task:
            continue
        sides = [[float(r["steps_per_second"]) for r in of_task if r["library"] == x] for x in (OURS, peer)]
        algo = LABELS[task.algo]
        middle = " | ".join(f"{statistics.median(side):,.0f}" for side in sides)
        ratios = spread([a / b for a, b in zip(*sides, strict=True)], 2)
        lines.append(f"| {algo}, {task.env_id} | {middle} | {ratios} | {processor(of_task)} |")
    return "\n".join(lines)


def races() -> str:
    """Seconds until a policy reaches the bar and stays there, on the tasks of both sides."""
    rows = rows_of(RESULTS / "time_to_bar.csv")
    lines = ["| script and environment | bar | PlainRL | Stable-Baselines3 | ratio | processor |"]
    lines.append("|---" * 6 + "|")
    for cell in RACES:
        of_cell = [row for row in rows if row["cell"] == cell]
        if not any(row["library"] == SB3 for row in of_cell):
            continue
        medians, sides = [], []
        for library in (OURS, SB3):
            of_side = [row for row in of_cell if row["library"] == library]
            seconds = [float(row["seconds"]) if row["solved"] == "True" else math.inf for row in of_side]
            ends = [float(row["trained_seconds"]) for row in of_side if row["solved"] != "True"]
            medians.append(statistics.median(seconds))
            reached = len(of_side) - len(ends)
            if not ends:
                sides.append(spread(seconds, 1))
            elif reached:
                sides.append(f"{reached} of {len(of_side)} seeds, after {min(seconds):.0f}")
            else:
                sides.append(f"not reached in {min(ends):.0f} to {max(ends):.0f}")
        ratio = f"{medians[1] / medians[0]:.1f}" if math.isfinite(sum(medians)) else ""
        algo, env_id = cell.split()
        title = f"{LABELS[algo]}, {env_id.rpartition(':')[2]}"
        bar = of_cell[0]["bar"]
        lines.append(f"| {title} | {bar} | {' | '.join(sides)} | {ratio} | {processor(of_cell)} |")
    return "\n".join(lines)


def leaderboard() -> str:
    """Our scripts that race to the same bar, the fastest first, with the commit that was timed."""
    rows = [row for row in rows_of(RESULTS / "time_to_bar.csv") if row["library"] == OURS]
    entries = []
    for cell in RACES:
        if not (of_cell := [row for row in rows if row["cell"] == cell]):
            continue
        (algo, env_id), solved = cell.split(), [row for row in of_cell if row["solved"] == "True"]
        seconds = [float(row["seconds"]) for row in solved]
        steps = [int(row["env_steps"]) for row in solved]
        shown = [spread(seconds, 1), spread(steps, 0)] if solved else ["–", "–"]
        commits = " ".join(dict.fromkeys(f"`{row['git_commit'][:7]}`" for row in of_cell))
        place = -len(solved) / len(of_cell), statistics.median(seconds or [math.inf])
        shown = [f"{algo}.py", f"{len(solved)} of {len(of_cell)}", *shown, processor(of_cell), commits]
        entries.append((env_id.rpartition(":")[2], float(of_cell[0]["bar"]), place, " | ".join(shown)))
    lines = ["| environment, bar | script | seeds | seconds | steps | processor | commit |", "|---" * 7 + "|"]
    return "\n".join(lines + [f"| {env}, {bar:g} | {entry} |" for env, bar, _, entry in sorted(entries)])


def name_of(script: Path) -> str:
    """From a docstring that begins `Name of the Algorithm (Authors year, arXiv 1234.56789): ...`."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    found = re.match(r"([^(]+) \([^()]+\)", docstring)
    if not found:
        sys.exit(f"tables.py: {script} has no docstring that begins `Name (authors, year, arXiv id)`")
    return " ".join(found[1].split())


def table() -> str:
    lines = [("algorithm", "script", "lines to read", "first result", "bars", "speed"), ("---",) * 6]
    for script in sorted((ROOT / "algos").glob("*.py")):
        lines_of = script.read_text(encoding="utf-8").splitlines()
        to_read = next(i for i, line in enumerate(lines_of) if re.match("# -+ utilities", line))
        page, source = f"docs/{script.stem}.md", f"algos/{script.name}"
        links = f"[{name_of(script)}]({page})", f"[{script.name}]({source})", f"{to_read} of {len(lines_of)}"
        lines.append((*links, *first_result(script.stem), first_speed(script.stem)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def content(page: Path, name: str) -> str:
    """What belongs between the comments of this name on this page."""
    if name == "table":
        return f"{table()}\n\n{NOTE}"
    if name == "results":
        return results_table(page.stem)
    if name == "time_to_bar":
        return races()
    if name == "leaderboard":
        return leaderboard()
    if name.startswith("speed:"):
        return speeds(name.removeprefix("speed:"))
    printed = (RESULTS / f"{name.removeprefix('output:')}.txt").read_text(encoding="utf-8")
    return "```text\n" + printed.strip("\n") + "\n```"


def filled(page: Path) -> str:
    """The text of the page with what the data say."""
    block = lambda x: f"<!-- {x[1]}:start -->\n{content(page, x[1])}\n<!-- {x[1]}:end -->"
    marks = (
        r"<!-- (table|results|time_to_bar|leaderboard|speed:[\w-]+|output:\w+):start -->.*?<!-- \1:end -->"
    )
    return re.sub(marks, block, page.read_text(encoding="utf-8"), flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    args = parser.parse_args()
    for page in [ROOT / "README.md", ROOT / "benchmark" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = filled(page)
        if not args.check:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            sys.exit(f"{page} is out of date: run python benchmark/tables.py")


if __name__ == "__main__":
    main()
