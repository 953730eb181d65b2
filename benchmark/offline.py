"""Trains iql.py and bc.py on data sets of several kinds, and writes the table of docs/iql.md.

    python benchmark/offline.py Pendulum-v1      # docs/iql.md has the commands that make its data sets
    python benchmark/offline.py                  # only the table
    python benchmark/tables.py                   # puts it on the page

Data sets are runs/data/ENVIRONMENT/KIND.npz; a kind whose file is missing is left out. Rows go to
benchmark/results/offline.csv, the table to offline.txt beside it; what is there is not trained again. A row
is a mean return: of 100 episodes of the last policy of a seed, or of the episodes of a data set.
"""

import argparse
import csv
import shutil

import numpy as np
from plot import stratified_bootstrap
from run import ROOT, iqm, load_script

KINDS, SEEDS = ("random", "medium_replay", "beginner", "mix", "expert"), range(1, 6)
BOTH = dict(hidden_sizes=(64, 64), batch_size=256, total_timesteps=5_000, torch_threads=1)
OF = dict(  # an algorithm's own
    bc=dict(expert_episodes=10**9, loss="mse", activation="relu"), iql=dict(learning_rate=1e-3)
)
IN = {  # what IQL needs in an environment, where TUNED has nothing else
    "Pendulum-v1": {},
    "InvertedPendulum-v5": dict(normalize_reward=False),  # an expert's returns are all equal
}
DATA, TABLE = ROOT / "runs/data", ROOT / "benchmark/results/offline.csv"
COLUMNS = ["env_id", "data", "algo", "seed", "total_timesteps", "return_mean"]


def mean_return(file) -> float:
    data = np.load(file)
    return data["reward"].sum() / len(data["lengths"])


def train(algo: str, env_id: str, kind: str, seed: int) -> tuple[int, float]:
    """Gradient steps and mean return of the policy that a seed ends with."""
    script, folder = load_script(algo), ROOT / f"benchmark/runs/offline/{env_id}-{kind}-{algo}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut short
    source = {"expert" if algo == "bc" else "dataset": str(DATA / env_id / f"{kind}.npz")}
    options = BOTH | OF[algo] | source | dict(seed=seed, eval_every=0, checkpoint_every=0)
    options |= IN[env_id] if algo == "iql" else {}
    script.train(script.make_args(env_id, run_dir=str(folder), **options))
    steps = script.load(folder)["run"]["env_steps"]
    words = ["--evaluate", str(folder), "--eval-episodes", "100"]
    return steps, script.train(script.parse_args(words)).mean()


def table(rows: dict) -> str:
    """Interquartile means over seeds with their 95% intervals."""
    lines = [f"{'':28}{'data set':>10}{'behavioral cloning':>31}{'IQL':>31}"]
    for env_id, kind in dict.fromkeys(key[:2] for key in rows):
        name, mean = (
            f"{env_id.rpartition('-')[0]}, {kind.replace('_', ' ')}",
            rows[env_id, kind, "data set", ""],
        )
        line = f"{name:28}{mean[1]:10.1f}"
        for algo in OF:
            scores = [x for key, (_, x) in rows.items() if key[:3] == (env_id, kind, algo)]
            if scores:
                middle, low, high = (x[0] for x in stratified_bootstrap([np.array(scores)[:, None]], iqm))
                line += f"{f'{middle:.1f} ({low:.1f} to {high:.1f})':>31}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("env_ids", nargs="*", metavar="ENV_ID", help=" ".join(IN))
    args, rows = parser.parse_args(), {}
    if TABLE.exists():
        for *key, steps, score in list(csv.reader(TABLE.open()))[1:]:
            rows[tuple(key)] = steps, float(score)
    for env_id, kind in ((env_id, kind) for env_id in args.env_ids for kind in KINDS):
        if not (DATA / env_id / f"{kind}.npz").exists():
            continue
        rows.setdefault((env_id, kind, "data set", ""), ("", mean_return(DATA / env_id / f"{kind}.npz")))
        for algo, seed in ((algo, seed) for algo in OF for seed in SEEDS):
            if (key := (env_id, kind, algo, str(seed))) not in rows:
                rows[key] = train(algo, env_id, kind, seed)
            with TABLE.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerows([COLUMNS, *((*key, steps, f"{x:.2f}") for key, (steps, x) in rows.items())])
    TABLE.with_suffix(".txt").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
