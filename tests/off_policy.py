"""Trainings of a moment with the actor-critics that learn from a replay buffer, and a look into them."""

import json

import numpy as np
import torch

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=2, hidden_sizes=(8,),
    total_timesteps=96, learning_starts=32, batch_size=16, buffer_size=400,
)  # fmt: skip


class Trainer:
    """Calls train of a script, in one of the probe_envs or in any environment by its id."""

    def __init__(self, script, **always):
        self.script, self.always = script, always

    def args(self, env: str, run_dir="run", env_kwargs=None, **changes):
        env_id = env if "-v" in env else f"probe_envs:{env}-v0"
        kwargs = {} if env in ("Box", "LQ") or "-v" in env else {"actions": "box"}
        given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or kwargs), run_dir=str(run_dir))
        return self.script.Args(**QUICK | self.always | given | changes)

    def __call__(self, env: str, **changes) -> np.ndarray:
        return self.script.train(self.args(env, **changes))

    def watch(self, monkeypatch) -> dict:
        """The parts of the last Run: actor, critic, buffer, ..., as they are at any time."""
        found = {}

        class Watched(self.script.Run):
            def __init__(self, args, agent, *rest, **others):
                found.update(actor=agent, run=self, **others)
                super().__init__(args, agent, *rest, **others)

        monkeypatch.setattr(self.script, "Run", Watched)
        return found


def recorder(monkeypatch):
    """record(owner, name) lists (arguments, result) of the calls of owner.name from then on."""

    def record(owner, name):
        calls, original = [], getattr(owner, name)

        def recorded(*args, **kwargs):
            given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
            calls.append((given, original(*args, **kwargs)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return record


def solve_lq(gamma: float):
    """States, actions, Q* and pi* of LQ on a grid, from the fixed point of the Riccati equation."""
    p = 0.0
    for _ in range(1000):
        p = 1 + gamma * p - (0.5 * gamma * p) ** 2 / (0.2 + 0.25 * gamma * p)
    x, u = (z.reshape(-1, 1) for z in torch.meshgrid(*[torch.linspace(-0.6, 0.6, 7)] * 2, indexing="ij"))
    q_value = -(x**2 + 0.2 * u**2 + gamma * p * (x + 0.5 * u) ** 2).squeeze(-1)
    return x, u, q_value, -0.5 * gamma * p / (0.2 + 0.25 * gamma * p) * x
