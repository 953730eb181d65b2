"""Cost of updates against the floor that their matrix products and convolutions set.

    python benchmark/update_cost.py | tee benchmark/results/update_cost.txt

SAC and TD3: an update draws a batch of 256, moves critics, actor (of TD3 at every second update) and targets;
two hidden layers of 256, HalfCheetah-v5. DQN: a batch of 32 from Pong; of these three 20 updates follow each
step, so that the environment hardly counts. PPO: a whole iteration on Pong, 8 environments x 128 steps with
their acting, then 16 updates of 256. The floor: the multiplications and additions of all products, as the
dispatcher of torch sees them, over the rate of one product of two matrices of 2,048 x 2,048 on the same
threads.
"""

import contextlib
import io
import statistics
import tempfile
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from run import load_script
from torch.utils.flop_counter import FlopCounterMode


class Work(NamedTuple):
    script: str
    start: int  # iterations of the training loop before the first update
    timed: int  # iterations that are timed
    batch: int  # environment steps of an iteration
    updates: int  # in an iteration
    words: str


OFF_POLICY = "--env-id HalfCheetah-v5 --hidden-sizes 256 256 --batch-size 256 --max-episode-steps 50"
WORK = {
    "SAC": Work("sac", 300, 30, 1, 20, f"{OFF_POLICY} --learning-starts 300 --updates-per-step 20"),
    "TD3": Work("ddpg_td3", 300, 30, 1, 20, f"{OFF_POLICY} --learning-starts 300 --updates-per-step 20"),
    "DQN Pong": Work(
        "dqn", 300, 12, 1, 20,
        """--env-id ALE/Pong-v5 --hidden-sizes 512 --batch-size 32 --buffer-size 2000 --learning-starts 300
           --train-every 1 --updates-per-train 20 --max-episode-steps 50""",
    ),
    "PPO Pong": Work(
        "ppo", 1, 5, 1024, 1,
        """--env-id ALE/Pong-v5 --num-envs 8 --num-steps 128 --update-epochs 4 --num-minibatches 4
           --max-episode-steps 200""",
    ),
}  # fmt: skip


def rate(threads: int, size: int = 2048) -> float:
    """Operations a second of a large matrix product, the best of ten."""
    torch.set_num_threads(threads)
    a, b, times = torch.randn(size, size), torch.randn(size, size), []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def measure(work: Work, threads: int) -> tuple[float, float]:
    """Seconds (median) and operations in products of an update, from a short training."""
    script = load_script(work.script)
    marks, counter, last = [], FlopCounterMode(display=False), work.start + work.timed + 1

    class Watched(script.Run):
        """Looks at the clock before every iteration, and counts the operations of the last one."""

        def proceed(self, policy):
            marks.append(time.perf_counter())
            if len(marks) == last:
                counter.__enter__()
            elif len(marks) == last + 1:
                counter.__exit__(None, None, None)
            return super().proceed(policy)

    with tempfile.TemporaryDirectory() as folder:
        words = f"""{work.words} --total-timesteps {last * work.batch} --device cpu --torch-threads {threads}
                    --eval-every 0 --eval-episodes 1 --checkpoint-every 0 --run-dir {folder}/run"""
        script.Run = Watched
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            script.train(script.parse_args(words.split()))
    times = [after - before for before, after in pairwise(marks[work.start : last])]
    return statistics.median(times) / work.updates, counter.get_total_flops() / work.updates


def main() -> None:
    print(f"{'':8} {'threads':>8} {'update':>10} {'operations':>12} {'floor':>10} {'update / floor':>15}")
    for threads in (1, 2):
        best = rate(threads)
        for label, work in WORK.items():
            seconds, operations = measure(work, threads)
            floor = operations / best
            ours, least = f"{seconds * 1e3:7.2f} ms", f"{floor * 1e3:7.2f} ms"
            print(f"{label:8} {threads:8} {ours} {operations / 1e6:10.0f} M {least} {seconds / floor:15.1f}")
        print(f"one large product on {threads} thread{'s' * (threads > 1)}: {best / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
