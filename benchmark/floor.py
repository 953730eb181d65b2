"""How fast a step of SAC or TD3 could be at best: its matrix products and its environment, nothing else.

    python benchmark/floor.py > benchmark/results/floor.txt

HalfCheetah-v5 as in benchmark/speed.py: an update of 256 transitions for each step, two layers of 256, two
threads. The products are those of forwards and gradients, with random numbers, into memory that exists; no
activation, loss, optimizer, target network, replay or Python between them is counted. Nothing else may run.
"""

import statistics
import time
from itertools import pairwise

import gymnasium as gym
import torch

ROWS, HIDDEN, REPEATS = 256, (256, 256), 200


class Network:
    """Linear layers of n networks, (n, rows, in) to (n, rows, out), of which only products are run."""

    def __init__(self, n, sizes):
        self.weights = [torch.randn(n, *size) for size in pairwise(sizes)]
        self.x = [torch.randn(n, ROWS, size) for size in sizes]
        self.weight_grads, self.x_grads = ([torch.randn_like(x) for x in xs] for xs in (self.weights, self.x))

    def forward(self):
        for weight, x, y in zip(self.weights, self.x[:-1], self.x[1:], strict=True):
            torch.bmm(x, weight, out=y)

    def gradients(self, of_weights, of_input):
        """Products of a backward pass that starts with the gradient of the output."""
        for i in reversed(range(len(self.weights))):
            if of_weights:
                torch.bmm(self.x[i].mT, self.x_grads[i + 1], out=self.weight_grads[i])
            if i > 0 or of_input:
                torch.bmm(self.x_grads[i + 1], self.weights[i].mT, out=self.x_grads[i])


def update_critics(actor, critics):
    actor.forward()  # the next actions, then their values, those of the batch, and their gradients
    critics.forward()
    critics.forward()
    critics.gradients(of_weights=True, of_input=False)


def update_actor(actor, critics):
    actor.forward()
    critics.forward()
    critics.gradients(of_weights=False, of_input=True)
    actor.gradients(of_weights=True, of_input=False)


def milliseconds(function, *args):
    """Median over REPEATS calls, after as many to warm up."""
    seconds = []
    for _ in range(2 * REPEATS):
        start = time.perf_counter()
        function(*args)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[REPEATS:])


@torch.inference_mode()
def main():
    torch.set_num_threads(2)
    env = gym.make("HalfCheetah-v5")
    env.reset(seed=1)
    obs_size, action_size = env.observation_space.shape[0], env.action_space.shape[0]
    step = milliseconds(env.step, env.action_space.sample())
    critics = Network(2, (obs_size + action_size, *HIDDEN, 1))
    print("algorithm   products   environment   at best")
    for name, outputs, judges, delay in (("SAC", 2 * action_size, critics, 1), ("TD3", action_size, None, 2)):
        actor = Network(1, (obs_size, *HIDDEN, outputs))
        judges = judges or Network(1, (obs_size + action_size, *HIDDEN, 1))  # TD3 asks the first critic
        products = milliseconds(update_critics, actor, critics)
        products += milliseconds(update_actor, actor, judges) / delay
        speed = 1000 / (products + step)
        print(f"{name}         {products:5.2f} ms      {step:5.2f} ms      {speed:.0f} steps/s")


if __name__ == "__main__":
    main()
