"""Cost of an update of algos/sac.py and algos/ddpg_td3.py against the floor that their matrix products set.

    python benchmark/update_cost.py | tee benchmark/results/update_cost.txt

An update draws a batch of 256, moves critics, actor (of TD3 at every second update) and targets; two hidden
layers of 256, HalfCheetah-v5. Twenty updates follow each step, so that the environment hardly counts. The
floor: the multiplications and additions of all matrix products of an update, as the dispatcher of torch sees
them, over the rate of one product of two matrices of 2,048 x 2,048 on the same threads.
"""

import contextlib
import io
import statistics
import tempfile
import time

import torch
from run import load_script
from torch.utils.flop_counter import FlopCounterMode

PER_STEP, STEPS = 20, 30  # updates for each step; steps that are timed
START = 300  # steps before the first update


def rate(threads: int, size: int = 2048) -> float:
    """Operations a second of a large matrix product, the best of ten."""
    torch.set_num_threads(threads)
    a, b, times = torch.randn(size, size), torch.randn(size, size), []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def measure(name: str, threads: int) -> tuple[float, float]:
    """Seconds (median) and operations in matrix products of an update, from a short training."""
    script = load_script(name)
    marks, counter = [], FlopCounterMode(display=False)

    class Watched(script.Run):
        """Looks at the clock before every step, and counts the operations of the last one."""

        def proceed(self, policy):
            marks.append(time.perf_counter())
            if self.env_steps == self.args.total_timesteps - 1:
                counter.__enter__()
            elif self.env_steps == self.args.total_timesteps:
                counter.__exit__(None, None, None)
            return super().proceed(policy)

    with tempfile.TemporaryDirectory() as folder:
        words = f"""--env-id HalfCheetah-v5 --hidden-sizes 256 256 --batch-size 256 --learning-starts {START}
                    --updates-per-step {PER_STEP} --total-timesteps {START + STEPS + 1} --device cpu
                    --torch-threads {threads} --eval-every 0 --eval-episodes 1 --checkpoint-every 0
                    --max-episode-steps 50 --run-dir {folder}/run"""
        script.Run = Watched
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            script.train(script.parse_args(words.split()))
    times = [after - before for before, after in zip(marks[START:-2], marks[START + 1 :], strict=False)]
    return statistics.median(times) / PER_STEP, counter.get_total_flops() / PER_STEP


def main() -> None:
    print(f"{'':8} {'threads':>8} {'update':>9} {'operations':>12} {'floor':>9} {'update / floor':>15}")
    for threads in (1, 2):
        best = rate(threads)
        for name, label in (("sac", "SAC"), ("ddpg_td3", "TD3")):
            seconds, operations = measure(name, threads)
            floor = operations / best
            ours, least = f"{seconds * 1e3:6.2f} ms", f"{floor * 1e3:6.2f} ms"
            print(f"{label:8} {threads:8} {ours} {operations / 1e6:10.0f} M {least} {seconds / floor:15.1f}")
        print(f"one large product on {threads} thread{'s' * (threads > 1)}: {best / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
