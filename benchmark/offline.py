"""Trains bc.py, iql.py and TD3+BC on data sets of several kinds, and writes the table of docs/iql.md.

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
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from plot import stratified_bootstrap
from run import ROOT, iqm, load_script

KINDS, SEEDS = ("random", "medium_replay", "policies", "beginner", "mix", "expert"), range(1, 6)
LOCOMOTION = ("HalfCheetah-v5", "Hopper-v5")
BOTH = dict(hidden_sizes=(64, 64), batch_size=256, total_timesteps=5_000, torch_threads=1)
LARGER = dict(hidden_sizes=(128, 128), batch_size=128, total_timesteps=20_000)  # for locomotion
OF = dict(  # an algorithm's own
    bc=dict(expert_episodes=10**9, loss="mse", activation="relu"),
    td3_bc=dict(normalize_obs=True, tau=0.01),  # the recipe ddpg_td3_bc
    iql=dict(learning_rate=1e-3),
    iql_online=dict(learning_rate=1e-3, total_timesteps=7_500, finetune_steps=2_500),
)
NAMES = dict(bc="cloning", td3_bc="TD3+BC", iql="IQL", iql_online="2,500 steps online")
IN = {  # what an algorithm needs in an environment, where TUNED has nothing else
    ("iql", "InvertedPendulum-v5"): dict(normalize_reward=False),  # rewards of 1 as they come
    ("iql_online", "InvertedPendulum-v5"): dict(normalize_reward=False),
    ("td3_bc", "Pendulum-v1"): dict(gamma=0.98, bc_alpha=20),  # 2.5 is hardly better than cloning
}
DATA, TABLE = ROOT / "runs/data", ROOT / "benchmark/results/offline.csv"
COLUMNS = ["env_id", "data", "algo", "seed", "total_timesteps", "return_mean"]


def mean_return(file) -> float:
    data = np.load(file)
    return data["reward"].sum() / len(data["lengths"])


def script_of(algo: str):
    """The script as a module; TD3+BC is ddpg_td3.py with its recipe applied."""
    if algo != "td3_bc":
        return load_script(algo.removesuffix("_online"))
    source, recipe = ROOT / "algos/ddpg_td3.py", ROOT / "recipes/ddpg_td3_bc.patch"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "algos/ddpg_td3.py"
        copy.parent.mkdir()
        shutil.copy(source, copy)
        subprocess.run(["git", "apply", str(recipe)], cwd=folder, check=True)
        return load_script("ddpg_td3_bc", copy)


def train(algo: str, env_id: str, kind: str, seed: int) -> tuple[int, float]:
    """Gradient steps and mean return of the policy that a seed ends with."""
    script, folder = script_of(algo), ROOT / f"benchmark/runs/offline/{env_id}-{kind}-{algo}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut short
    source = {"expert" if algo == "bc" else "dataset": str(DATA / env_id / f"{kind}.npz")}
    options = BOTH | (LARGER if env_id in LOCOMOTION else {}) | OF[algo] | IN.get((algo, env_id), {}) | source
    run = dict(seed=seed, run_dir=str(folder), eval_every=0, checkpoint_every=0)
    script.train(script.make_args(env_id, **options | run))
    steps = script.load(folder)["run"]["env_steps"]
    words = ["--evaluate", str(folder), "--eval-episodes", "100"]
    return steps, script.train(script.parse_args(words)).mean()


def table(rows: dict) -> str:
    """Interquartile means over seeds with their 95% intervals."""
    lines = [f"{'':28}{'data set':>10}" + "".join(f"{NAMES[algo]:>26}" for algo in OF)]
    for env_id, kind in dict.fromkeys(key[:2] for key in rows):
        name, mean = (
            f"{env_id.rpartition('-')[0]}, {kind.replace('_', ' ')}",
            rows[env_id, kind, "data set", ""],
        )
        line = f"{name:28}{mean[1]:10.0f}"
        for algo in OF:
            scores = [x for key, (_, x) in rows.items() if key[:3] == (env_id, kind, algo)]
            cell = "–"
            if scores:
                middle, low, high = (x[0] for x in stratified_bootstrap([np.array(scores)[:, None]], iqm))
                cell = f"{middle:.0f} ({low:.0f} to {high:.0f})"
            line += f"{cell:>26}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("env_ids", nargs="*", metavar="ENV_ID", help="such as Pendulum-v1")
    args, rows = parser.parse_args(), {}
    if TABLE.exists():
        for *key, steps, score in list(csv.reader(TABLE.open()))[1:]:
            rows[tuple(key)] = steps, float(score)
    for env_id, kind in ((env_id, kind) for env_id in args.env_ids for kind in KINDS):
        if not (DATA / env_id / f"{kind}.npz").exists():
            continue
        rows.setdefault((env_id, kind, "data set", ""), ("", mean_return(DATA / env_id / f"{kind}.npz")))
        for algo, seed in ((algo, seed) for algo in OF for seed in SEEDS):
            if env_id in LOCOMOTION and algo == "iql_online":  # not measured: minutes a seed
                continue
            if (key := (env_id, kind, algo, str(seed))) not in rows:
                rows[key] = train(algo, env_id, kind, seed)
            with TABLE.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerows([COLUMNS, *((*key, steps, f"{x:.2f}") for key, (steps, x) in rows.items())])
    TABLE.with_suffix(".txt").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
