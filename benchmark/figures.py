"""Every picture in docs/img that is made from data: how it is drawn, and from which results.

    python benchmark/figures.py                   draws the pictures whose data have changed
    python benchmark/figures.py ppo family        draws these
    python benchmark/figures.py --check           draws nothing; exit code 1 if a picture is out of date

docs/img/figures.json remembers the data of each picture, as a checksum. Some pictures need more than their
data, such as run folders or a training of their own: these are drawn only if they are named. Films are made
elsewhere (benchmark/README.md).
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from run import ROOT

RESULTS, PICTURES = ROOT / "benchmark/results", ROOT / "docs/img"
KNOWN = PICTURES / "figures.json"


class Figure(NamedTuple):
    data: str  # patterns of files in benchmark/results
    command: str = "plot.py --results {data} --out {out}"
    needs: str = ""  # what else it is drawn from


def of(variants: str, env: str, algo: str = "") -> str:
    """Patterns of the results of several algorithms, or variants of one, in one environment."""
    return " ".join(f"{algo}{'-' * bool(algo)}{name}__{env}.csv" for name in variants.split())


ONE_ALGORITHM = "reinforce vpg a2c ppo ppo_lstm grpo trpo pqn rainbow tqc crossq simba es pearl".split()
BREAKOUT, PONG = "benchmark.minatar_envs-MinAtar-Breakout-v1", "ALE-Pong-v5"
FIGURES = {name: Figure(f"{name}__*.csv") for name in ONE_ALGORITHM} | {
    "ppo_rnd": Figure("ppo_rnd__*.csv ppo-no_novelty__benchmark.hidden_envs-SparseGrid-v0.csv"),
    "q_learning": Figure("q_learning__*.csv q_learning-not_slippery__*.csv"),
    "dqn": Figure(
        "dqn__CartPole-v1.csv dqn__Acrobot-v1.csv dqn__MountainCar-v0.csv dqn-double_per__LunarLander-v3.csv"
    ),
    "ddpg_td3": Figure("ddpg_td3__*.csv ddpg_td3-td3__*.csv ddpg_td3-ddpg__*.csv"),
    # the trainings of 40,000 steps belong to the suite caps
    "sac": Figure("sac__*.csv", "plot.py --results {data} --skip-steps 40000 --out {out}"),
    "maml": Figure("maml__*.csv maml-ppo__*.csv maml-vpg__*.csv maml-no_adaptation__*.csv"),
    # comparisons
    "family": Figure(of("reinforce vpg a2c trpo ppo", "CartPole-v1")),
    "grpo_ppo": Figure(
        " ".join(of("ppo grpo", f"{env}-v1") for env in ("CartPole", "Acrobot", "Pendulum"))
        + " grpo-dr__CartPole-v1.csv"
    ),
    "minatar": Figure(of("ppo pqn dqn", BREAKOUT)),
    "dqn_ablation": Figure(
        of("plain double dueling noisy 3_step per all all_but_noisy", "LunarLander-v3", "dqn")
    ),
    "dqn_pong": Figure(of("1_step 1_step_sticky 4_step 4_step_sticky", PONG, "dqn")),
    "dqn_pong_variants": Figure(
        of("1_step 4_step 4_step_double 4_step_dueling 4_step_noisy 4_step_per", PONG, "dqn")
    ),
    "td3_ablation": Figure(
        of("ddpg ddpg_twin ddpg_twin_delay ddpg_twin_delay_gaussian td3", "Pendulum-v1", "ddpg_td3")
    ),
    "pearl_maml": Figure("pearl__*.csv maml__*.csv", "meta.py --out {out}"),
    "doors": Figure(of("masks no_masks", "benchmark.hidden_envs-Doors-v0", "ppo_lstm")),
    "t_maze": Figure("ppo*TMaze-v0.csv", "t_maze.py --out {out}"),
    "time_to_bar": Figure("time_to_bar.csv", "time_to_bar.py --draw {out}"),
    "bc_episodes": Figure("bc_episodes.csv", "bc_episodes.py --out {out}"),
    # more than data
    "maml_paths": Figure("maml_steps.csv", "maml_paths.py --out {out}", "the run folders of the suite maml"),
    "caps": Figure("caps.csv", "caps.py --out {out}", "the run folders of the suite caps"),
    "pearl_posterior": Figure(
        "",
        "posterior.py benchmark/runs/pearl__SparsePointRobot-v0__400000/1 --task 7 --out {out}",
        "a run folder of the suite pearl",
    ),
    "visits": Figure("", "visits.py --out {out}", "trainings, a minute"),
    "cliff": Figure("cliff.csv", "q_table.py --cliff {out}", "trainings, minutes"),
    "taxi_masks": Figure("taxi_masks.csv", "q_table.py --taxi {out}", "trainings, minutes"),
    "processes": Figure("processes.csv", "processes.py curves", "trainings in two processes, minutes"),
}


def files_of(figure: Figure) -> list[Path]:
    found = {pattern: sorted(RESULTS.glob(pattern)) for pattern in figure.data.split()}
    if missing := [pattern for pattern, files in found.items() if not files]:
        sys.exit(f"figures.py: benchmark/results has no {' '.join(missing)}")
    return list(dict.fromkeys(path for files in found.values() for path in files))


def checksum(figure: Figure) -> str:
    """Of the names and contents of all its data."""
    digest = hashlib.sha256()
    for path in files_of(figure):
        digest.update(path.name.encode() + b"\n" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def known() -> dict[str, str]:
    return json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}


def stale() -> list[str]:
    """The pictures that are missing, or whose data have changed since they were drawn."""
    drawn = known()
    there = lambda name: (PICTURES / f"{name}.png").exists()
    return [name for name, x in FIGURES.items() if not there(name) or drawn.get(name) != checksum(x)]


def draw(name: str) -> None:
    figure, out = FIGURES[name], PICTURES / f"{name}.png"
    words = shlex.split(figure.command)
    files = [str(path) for path in files_of(figure)]
    words = [y for x in words for y in (files if x == "{data}" else [x.replace("{out}", str(out))])]
    subprocess.run([sys.executable, str(ROOT / "benchmark" / words[0]), *words[1:]], cwd=ROOT, check=True)
    KNOWN.write_text(json.dumps(known() | {name: checksum(figure)}, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(FIGURES))
    parser.add_argument("--check", action="store_true", help="only say which pictures are out of date")
    args = parser.parse_args()
    if unknown := set(args.names) - FIGURES.keys():
        parser.error(f"no picture {' '.join(sorted(unknown))}; there are {' '.join(FIGURES)}")
    old = stale()
    if args.check:
        others = {path.stem for path in PICTURES.glob("*.png")} - FIGURES.keys()
        if others:
            print(f"not in figures.py: {' '.join(sorted(others))}")
        if old:
            print(f"out of date: {' '.join(old)}; run python benchmark/figures.py")
        sys.exit(bool(old or others))
    for name in args.names or old:
        if FIGURES[name].needs and name not in args.names:
            print(f"{name} is out of date, and needs {FIGURES[name].needs}: name it to draw it")
        else:
            draw(name)


if __name__ == "__main__":
    main()
