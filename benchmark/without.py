"""Rainbow without one of its parts, for the suite rainbow_ablation.

It changes a line of algos/rainbow.py and runs that with the other arguments.

    python benchmark/without.py --without dueling --env-id Acrobot-v1 --run-dir runs/no_dueling
    python benchmark/without.py --evaluate runs/no_dueling

Two parts are arguments of rainbow.py: --n-step 1 leaves out the n-step targets, --per-alpha 0 the priorities.
"""

import runpy
import sys
import tempfile
from pathlib import Path

RAINBOW = Path(__file__).resolve().parent.parent / "algos/rainbow.py"
CHANGES = {  # part: what stands in rainbow.py, and instead
    "distribution": ("num_atoms: Annotated[int, (2, math.inf)]", "num_atoms: Annotated[int, (1, math.inf)]"),
    "double": ('best = agent.q_values(batch["next_obs"])', 'best = target_agent.q_values(batch["next_obs"])'),
    "dueling": ("return_ = value + advantage - advantage.mean(dim=1, keepdim=True)", "return_ = advantage"),
    "noise": ("        if not self.training:\n            return mean", "        return mean"),
}


def script_without(part: str) -> str:
    """The text of rainbow.py without a part. Without the distribution, --quantiles --num-atoms 1 predicts one
    number: half the Huber loss of dqn.py pulls it to the target."""
    text, (old, new) = RAINBOW.read_text(encoding="utf-8"), CHANGES[part]
    if text.count(old) != 1:
        sys.exit(f"without.py: {RAINBOW} no longer has exactly one {old!r}")
    return text.replace(old, new)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rainbow.py"
        if "--without" in sys.argv:
            at = sys.argv.index("--without")
            path.write_text(script_without(sys.argv[at + 1]), encoding="utf-8")
            del sys.argv[at : at + 2]
        else:  # the run folder has a copy of what trained there
            flag = "--evaluate" if "--evaluate" in sys.argv else "--resume"
            path = Path(sys.argv[sys.argv.index(flag) + 1]) / "rainbow.py"
        runpy.run_path(str(path), run_name="__main__")
