"""Trains algos/bc.py on few and many episodes that the expert labels.

    python benchmark/bc_episodes.py
    python benchmark/figures.py bc_episodes

DAgger: the expert plays one of them and answers in the others, the learner's, in up to four iterations. Rows
go to benchmark/results/bc_episodes.csv; what is there is not trained again. docs/bc.md tells of the experts.
"""

import argparse
import shutil
from pathlib import Path

from run import ROOT, load_script

EXPERTS = {"CartPole-v1": ("ppo", 2_000), "Pendulum-v1": ("sac", 5_000)}
EPISODES, SEEDS = {"behavioral cloning": (1, 2, 5, 17), "DAgger": (2, 5, 17)}, (1, 2, 3)
TABLE = ROOT / "benchmark/results/bc_episodes.csv"


def score(script, folder: Path) -> float:
    return script.train(script.parse_args(["--evaluate", str(folder), "--eval-episodes", "100"])).mean()


def train(bc, env_id: str, method: str, episodes: int, seed: int) -> float:
    """Mean return of a learner from so many episodes."""
    options = dict(expert_episodes=episodes, seed=seed, eval_every=0, checkpoint_every=0)
    if method == "DAgger":
        n = min(4, episodes - 1)
        options |= dict(expert_episodes=1, dagger_iterations=n, dagger_episodes=(episodes - 1) // n)
    folder = ROOT / f"benchmark/runs/bc_episodes/{method}-{env_id}-{episodes}-{seed}"
    options |= dict(expert=str(ROOT / "runs/experts" / env_id), total_timesteps=EXPERTS[env_id][1])
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut short
    bc.train(bc.make_args(env_id, run_dir=str(folder), **options))
    return score(bc, folder)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    bc, rows = load_script("bc"), {}
    if TABLE.exists():
        table = [line.split(",") for line in TABLE.read_text().splitlines()[1:]]
        rows = {(*key,): float(x) for *key, x in table}
    for env_id, (algo, _) in EXPERTS.items():
        expert = (env_id, "expert", "", "")
        if expert not in rows:
            rows[expert] = score(load_script(algo), ROOT / "runs/experts" / env_id)
        for seed, method, episodes in ((s, m, n) for s in SEEDS for m in EPISODES for n in EPISODES[m]):
            if (key := (env_id, method, str(episodes), str(seed))) not in rows:
                rows[key] = train(bc, env_id, method, episodes, seed)
            lines = [f"{','.join(key)},{x:.2f}" for key, x in rows.items()]
            TABLE.write_text("\n".join(["env_id,method,episodes,seed,return_mean", *lines, ""]))


if __name__ == "__main__":
    main()
