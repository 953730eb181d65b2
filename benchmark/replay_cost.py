"""Cost of drawing a batch from a million entries in algos/dqn.py: uniformly, and by priority with its update.

python benchmark/replay_cost.py | tee benchmark/results/replay_cost.txt
"""

import contextlib
import io
import statistics
import time

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from run import load_script


def main(batch_size: int = 32, entries: int = 1_000_000, repeats: int = 2_000) -> None:
    """Microseconds of a batch of vectors and of Atari stacks, uniform and prioritized with its update."""
    dqn = load_script("dqn")
    for name, space, stack in (
        ("vectors of 17", Box(-1, 1, (17,), np.float32), 1),
        ("stacks 4x84x84", Box(0, 255, (4, 84, 84), np.uint8), 4),
    ):
        with contextlib.redirect_stdout(io.StringIO()):  # it says how large it is
            buffer = dqn.ReplayBuffer(entries, 1, space, Discrete(6), torch.device("cpu"), stack)
        priorities = dqn.Priorities(buffer, alpha=0.6, eps=1e-6)
        buffer.valid[4:-4], buffer.filled = True, entries
        buffer.obs.fill_(1)
        buffer.marked = [np.arange(entries)]
        priorities.refresh()
        error = torch.rand(batch_size)

        def prioritized(buffer=buffer, priorities=priorities, error=error):
            index, weight = priorities.draw(batch_size, beta=0.5)
            batch = buffer.gather(index, 0.99) | {"weight": torch.from_numpy(weight)}
            priorities.td_error = error
            return batch

        uniform = lambda buffer=buffer: buffer.sample(batch_size, 0.99)
        costs = {uniform: [], prioritized: []}
        for _ in range(5):
            for draw in costs:
                start = time.perf_counter()
                for _ in range(repeats):
                    draw()
                costs[draw].append((time.perf_counter() - start) / repeats * 1e6)
        one, two = map(statistics.median, costs.values())
        times = f"{one:.0f} us, prioritized {two:.0f} us, {two / one:.2f} x"
        print(f"{name}, batch {batch_size} of {entries}: {times}")


if __name__ == "__main__":
    main()
