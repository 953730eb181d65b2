"""Environments that scripts meet outside of textbooks: --env-id odd_envs:Legal-v0, tests/ on the path.

Like those of probe_envs they count on nothing but their arguments and the seed of their first reset.
"""

import os
import tempfile

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from probe_envs import Probe


class Legal(Probe):
    """Few of fifty actions are legal, others at each step, and the rest raises. Pays 1 for the highest one.

    The mask is in info, or in the observation: where is "info", "dict" or "bool". multi: two choices, among
    3 and among 47, each with one legal option. single: one legal option of Discrete actions instead of three.
    """

    def __init__(self, where="info", multi=False, single=True, start=0, length=10, render_mode=None):
        self.where, self.multi, self.single, self.length = where, multi, single, length
        self.action_space = MultiDiscrete([3, 47]) if multi else Discrete(50, start=start)
        self.start, self.render_mode = start, render_mode
        vector = Box(-1, 1, (2,), np.float32)
        with_mask = Dict(action_mask=MultiBinary(50), obs=vector)
        self.observation_space = vector if where in ("info", "bool") else with_mask

    def observe(self):
        self.legal = np.zeros(50, dtype=bool if self.where == "bool" else np.int8)
        if self.multi:
            self.legal[[self.np_random.integers(3), 3 + self.np_random.integers(47)]] = 1
        else:
            self.legal[self.np_random.permutation(50)[: 1 if self.single else 3]] = 1
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs if self.where in ("info", "bool") else dict(obs=obs, action_mask=self.legal)

    def info(self) -> dict:
        parts = self.legal[:3], self.legal[3:]
        return {"action_mask": parts if self.multi else self.legal} if self.where in ("info", "bool") else {}

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.info()

    def step(self, action):
        options = [action[0], 3 + action[1]] if self.multi else [action - self.start]
        if not self.legal[options].all():
            raise RuntimeError(
                f"{action} is illegal at time {self.t}: {np.flatnonzero(self.legal)} are legal"
            )
        self.t += 1
        reward = float(options[-1] == np.flatnonzero(self.legal)[-1])
        obs, end = self.observe(), self.t == self.length
        if end:
            self.legal[:] = 0  # nothing is left to do
        return obs, reward, end, False, self.info()


class Loop(gym.Env):
    """Two states, three actions, each state without one of them. The best one of all would be illegal.

    Action a in state s pays table[s][a] and leads to the other state; never ends but by a time limit.
    """

    observation_space, action_space = Discrete(2), Discrete(3)
    table, masks = [[1.0, 0.0, 50.0], [0.0, 50.0, 2.0]], [[1, 1, 0], [1, 0, 1]]

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def info(self) -> dict:
        return {"action_mask": np.array(self.masks[self.state], np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.t = int(self.np_random.integers(2)), 0
        return self.state, self.info()

    def step(self, action):
        assert self.masks[self.state][action], f"{action} is illegal in state {self.state}"
        reward = self.table[self.state][action]
        self.state, self.t = 1 - self.state, self.t + 1
        return self.state, reward, False, self.t == 10, self.info()


def kinds_of_actions() -> dict[str, gym.Space]:
    return {
        "discrete": Discrete(3), "multi_discrete": MultiDiscrete([3, 3]), "multi_binary": MultiBinary(2),
        "box": Box(-2, 2, (2,), np.float32), "unbounded": Box(-np.inf, np.inf, (2,), np.float32),
    }  # fmt: skip


class Meddler(Probe):
    """A walk in the plane. If it meddles, it writes into its action and returns one array again and again."""

    def __init__(self, actions="discrete", meddles=False, render_mode=None):
        self.action_space, self.meddles = kinds_of_actions()[actions], meddles
        self.observation_space, self.render_mode = Box(-9, 9, (2,), np.float32), render_mode
        self.array = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        self.x = np.zeros(2)
        return super().reset(seed=seed)

    def observe(self):
        self.array[:] = self.x
        return self.array if self.meddles else self.array.copy()

    def step(self, action):
        push = np.resize(np.ravel(action).astype(float), 2).clip(-1, 2) - 0.5
        if self.meddles and isinstance(action, np.ndarray):
            action[:] = 0
        self.t += 1
        self.x = (0.9 * self.x + 0.2 * push + self.np_random.normal(0, 0.1, 2)).clip(-9, 9)
        return self.observe(), -float(np.abs(self.x - 0.5).sum()), False, self.t == 12, {}


class Infos(Probe):
    """What people put into info. The number that --info-keys may log is cost: 1, 2, 3, ... in an episode."""

    KINDS = "none late array two str nan bool number other mixed grow nested object keys".split()

    def __init__(self, kind="number", actions="discrete", length=5, render_mode=None):
        super().__init__(actions, render_mode)
        self.kind, self.length = kind, length

    def step(self, action):
        self.t += 1
        end, odd = self.t == self.length, self.t % 2
        info = {
            "none": {"is_success": True if end else None}, "late": {"is_success": True} if end else {},
            "array": {"success": np.array([end])}, "two": {"success": np.array([end, end])},
            "str": {"success": "yes" if end else "no"}, "nan": {"is_success": np.nan},
            "bool": {"is_success": np.bool_(end)}, "number": {"success": float(end), "cost": self.t},
            "other": {"score": None if odd else 1.0}, "mixed": {"cost": self.t if odd else "none"},
            "grow": {"path": np.zeros(self.t)}, "nested": {"a": {"b": [1] * self.t, "c": None}},
            "object": {"self": self, "call": print}, "keys": {f"key{self.t}": 1, "": 2, "_x": 3},
        }[self.kind]  # fmt: skip
        return self.observe(), 1.0, end, False, info


class Rewards(Probe):
    """A reward of 2 (1 where it is a bool) as environments give it, and ends of other types than bool."""

    KINDS = "float int f32 f64 bool npbool array0 array1 list none str array2".split()

    def __init__(self, kind="float", actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        self.kind = kind

    def step(self, action):
        self.t += 1
        reward = {
            "float": 2.0, "int": 2, "f32": np.float32(2), "f64": np.float64(2), "bool": True,
            "npbool": np.bool_(True), "array0": np.array(2.0), "array1": np.array([2.0]), "list": [2.0],
            "none": None, "str": "2 points", "array2": np.array([1.0, 2.0]),
        }[self.kind]  # fmt: skip
        return self.observe(), reward, np.bool_(False), int(self.t == 10), {}


class Fault(Probe):
    """Does what goes wrong at its `after`-th call in this process, in rollouts or evaluations, as phase says.

    what: "step", "reset", "render" raise RuntimeError, "local" an error that cannot be sent to another
    process; "exit" ends the process; "nan", "inf", "huge" and "obs" are no numbers, "first" is none after a
    reset; "shape" is an observation of another shape; "interrupt" is a KeyboardInterrupt; "folder" changes
    to another folder.
    """

    calls = 0

    def __init__(self, what="step", phase="rollout", after=30, actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        self.what, self.phase, self.after = what, phase, after

    def fails(self, *whats: str) -> bool:
        Fault.calls += self.what in whats and self.evaluates == (self.phase == "evaluation")
        return (
            self.what in whats and Fault.calls > self.after and self.evaluates == (self.phase == "evaluation")
        )

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        if self.fails("reset"):
            raise RuntimeError("a bug in reset()")
        if self.fails("first"):
            result[0][1] = np.nan
        return result

    def render(self):
        if self.fails("render"):
            raise RuntimeError("a bug in render()")
        return super().render()

    def step(self, action):
        self.t += 1
        obs, reward = self.observe(), 1.0
        if self.fails("step", "local", "exit", "nan", "inf", "huge", "obs", "shape", "interrupt", "folder"):
            if self.what == "local":
                raise type("Local", (Exception,), {})("a bug in step()")
            if self.what == "folder":
                os.chdir(tempfile.gettempdir())
            if self.what == "step":
                raise RuntimeError("a bug in step()")
            if self.what == "exit":
                os._exit(3)
            if self.what == "interrupt":
                raise KeyboardInterrupt
            reward = {"nan": np.nan, "inf": np.inf, "huge": 1e39}.get(self.what, reward)
            obs[1] = np.nan if self.what == "obs" else obs[1]
            obs = np.zeros(7, np.float32) if self.what == "shape" else obs
        return obs, reward, False, self.t == 10, {}


class NanEnd(Probe):
    """Where an episode terminates there is no state: the observation is NaN."""

    def step(self, action):
        self.t += 1
        end = self.t == 10
        return np.full(4, np.nan if end else 0.1 * self.t, np.float32), 1.0, end, False, {}


class Liar(Probe):
    """From its third step on it gives something else than its space of observations says."""

    PIXELS = Box(0, 255, (6, 6), np.uint8)
    LIES = {
        "start": (Discrete(4, start=1), 1, 0), "choice": (Discrete(4), 0, 4),
        "choices": (MultiDiscrete([3, 3]), [0, 0], [3, 0]), "bits": (MultiBinary(3), [0, 1, 0], [2, 0, 1]),
        "fraction": (PIXELS, np.ones((6, 6)), np.full((6, 6), 0.5)),
        "negative": (PIXELS, np.ones((6, 6), int), np.full((6, 6), -1)),
        "bright": (PIXELS, np.ones((6, 6), int), np.full((6, 6), 256)),
        "black": (Dict(a=PIXELS), {"a": np.ones((6, 6))}, {"a": np.full((6, 6), np.nan)}),
        "nothing": (Box(-1, 1, (2,)), np.zeros(2), ["a", None]),
        "ragged": (Box(-1, 1, (2,)), np.zeros(2), [1, [2, 3]]),
        "missing": (Dict(a=PIXELS), {"a": np.ones((6, 6))}, {"b": np.ones((6, 6))}),
    }  # fmt: skip

    def __init__(self, lie="start", actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        self.observation_space, self.truth, self.lie = self.LIES[lie]

    def observe(self):
        return self.truth if self.t < 3 else self.lie

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 10, False, {}


class Masks(Probe):
    """A mask in info as people give it; action 0, and 0 of the first choice, is illegal."""

    MASKS = {
        "one_choice": (MultiDiscrete([3, 3]), [0, 0, 0, 1, 1, 1]), "logits": (Discrete(3), [-1e9, 0, 0]),
        "infinite": (Discrete(3), [-np.inf, 0, 0]), "words": (Discrete(3), ["no", "yes", "yes"]),
        "bits": (MultiBinary(3), [0, 1, 1]), "box": (Box(-1, 1, (3,)), [0, 1, 1]),
    }  # fmt: skip

    def __init__(self, mask="logits", render_mode=None):
        super().__init__(render_mode=render_mode)
        self.action_space, self.mask = self.MASKS[mask]

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": self.mask}

    def step(self, action):
        raise RuntimeError("an illegal action")


class OldApi(Probe):
    """The interface of before Gymnasium: reset gives one value, or takes no seed; step gives four. Or, with
    a Dict of two, reset gives one that looks like two; info is a list, or terminated an array."""

    def __init__(self, old="step", actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        self.old = old
        if old == "seed":
            self.reset = lambda: (self.observe(), {})
        if old == "two":
            self.observation_space = Dict(a=self.observation_space, b=self.observation_space)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        if self.old == "two":
            return {"a": obs, "b": obs}
        return obs if self.old == "reset" else (obs, info)

    def step(self, action):
        self.t += 1
        if self.old in ("info", "array"):
            end = np.array([False, False]) if self.old == "array" else False
            return self.observe(), 1.0, end, False, [1] if self.old == "info" else {}
        return self.observe(), 1.0, self.t == 10, {}


class Single(Probe):
    """A simulator of which one may run at a time. Single.running counts them."""

    running = 0

    def __init__(self, actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        if Single.running:
            raise OSError("port 5005 is in use: another simulator runs")
        Single.running += 1
        self.closed = False

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 10, {}

    def close(self):
        Single.running -= not self.closed
        self.closed = True


class Films(Probe):
    """Ten steps, and frames of any kind: gray of 20 times the step where it is a shape."""

    SHAPES = {"rgb": (48, 64, 3), "rgba": (48, 64, 4), "gray": (48, 64), "gray1": (48, 64, 1),
              "odd": (47, 63, 3), "tiny": (5, 5, 3), "empty": (0, 0, 3)}  # fmt: skip

    def __init__(self, render="rgb", fps=20, actions="discrete", render_mode=None):
        super().__init__(actions, render_mode)
        self.kind, self.metadata = render, {"render_modes": ["rgb_array"], "render_fps": fps}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 10, {}

    def render(self):
        if self.kind == "none":
            return None
        if self.kind == "float":
            return np.full((48, 64, 3), self.t / 10)
        if self.kind == "flat":
            return np.zeros((48, 64, 2), np.uint8)
        if self.kind == "grow":
            return np.full((48, 64 + 2 * self.t, 3), 99, np.uint8)
        return np.full(self.SHAPES[self.kind], 20 * self.t, np.uint8)


class Pair(Probe):
    """Actions in a Dict or a Tuple, which need a recipe."""

    def __init__(self, kind="dict", render_mode=None):
        super().__init__(render_mode=render_mode)
        choice, force = Discrete(3, start=2), Box(0, 4, (2,), np.float32)
        self.action_space = Dict(move=choice, force=force) if kind == "dict" else Tuple((choice, force))

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self.observe(), 1.0, False, self.t == 10, {}


class Parts(Probe):
    """A Dict of an image, numbers and a mask, where one of them may be another than its space says."""

    def __init__(self, key=None, wrong=None, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.wrong = {key: np.array(wrong)} if key else {}
        self.observation_space = Dict(
            image=Box(0, 255, (8, 8, 3), np.uint8), numbers=Box(-1, 1, (2,)), action_mask=MultiBinary(3)
        )
        self.action_space = Discrete(3)

    def observe(self):
        obs = dict(image=np.ones((8, 8, 3), np.uint8), numbers=np.zeros(2), action_mask=np.ones(3))
        return obs | self.wrong

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 10, {}


def forget() -> None:
    """All counts of this process are as at its start."""
    Fault.calls = Single.running = 0


for entry in (
    Legal,
    Loop,
    Meddler,
    Infos,
    Rewards,
    Fault,
    NanEnd,
    OldApi,
    Single,
    Films,
    Pair,
    Parts,
    Liar,
    Masks,
):
    gym.register(f"{entry.__name__}-v0", entry_point=entry, disable_env_checker=True)
