"""REINFORCE's own tests: whole episodes, no bias toward short ones, the exact gradient of a small problem."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script, points, progress
from gymnasium.spaces import Discrete
from probe_envs import Boundary, Boxes, boundary_length, boundary_return, boundary_reward
from torch.distributions import Normal

reinforce = load_script(ALGOS / "reinforce.py")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, num_envs=2, hidden_sizes=(8,),
    episodes_per_update=4, value_epochs=2, value_minibatches=2, total_timesteps=100, max_episode_steps=100,
)  # fmt: skip


def train_quick(module, env: str, run_dir="run", env_kwargs=None, **changes) -> np.ndarray:
    """A training of a moment in one of the probe_envs, or in any environment by its id."""
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    fields = module.Args.__dataclass_fields__
    values = {name: value for name, value in QUICK.items() if name in fields}
    return module.train(module.Args(**values | given | changes))


def quick(env: str, **changes) -> np.ndarray:
    return train_quick(reinforce, env, **changes)


def recorder(monkeypatch, owner, name: str) -> list[SimpleNamespace]:
    """The calls of owner.name from now on: args (keyword arguments at the end) and result, copied."""
    calls, original = [], getattr(owner, name)
    copy = lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x

    def recorded(*args, **kwargs):
        given = [copy(x) for x in (*args, *kwargs.values())]
        result = original(*args, **kwargs)
        results = tuple(map(copy, result)) if isinstance(result, tuple) else copy(result)
        calls.append(SimpleNamespace(args=given, result=results))
        return result

    monkeypatch.setattr(owner, name, recorded)
    return calls


def watch_runs(monkeypatch, module) -> list:
    """Every Run of the module that is made, with its agent."""
    made, original = [], module.Run.__init__

    def init(run, args, agent, *rest, **parts):
        made.append(run)
        original(run, args, agent, *rest, **parts)

    monkeypatch.setattr(module.Run, "__init__", init)
    return made


# ------------------------------------------------------------------------------------------- whole episodes
@pytest.mark.parametrize("async_envs", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_an_update_learns_from_the_same_number_of_whole_episodes_of_every_environment(
    num_envs, async_envs, monkeypatch
):
    forwards = recorder(monkeypatch, reinforce.Actor, "forward")
    losses = recorder(monkeypatch, reinforce, "policy_gradient_loss")
    sizes = dict(num_envs=num_envs, episodes_per_update=8, total_timesteps=130, checkpoint_every=60)
    quick("Boundary", async_envs=async_envs, gamma=0.9, **sizes)
    updates = [call.args[1] for call in forwards[::2]]  # the second forward only measures the KL
    assert len(updates) == len(losses) == len(progress()) == 3, "one step on each batch of episodes"
    seen = set()
    for obs, loss in zip(updates, losses, strict=True):
        _, weight, episodes = loss.args
        assert episodes == 8
        rows = [(*map(int, row[:3]), return_) for row, return_ in zip(obs, weight.tolist(), strict=True)]
        assert (obs[:, 3] == 0).all(), "no action is chosen in a final observation"
        played = {row[:2] for row in rows}
        assert len(played) == 8 and not played & seen, "each episode is learned from once"
        assert set(Counter(number for number, _ in played).values()) == {8 // num_envs}
        seen |= played
        truth = []
        for number, episode in played:
            return_ = 0.0
            for t in reversed(range(boundary_length(number, episode))):
                return_ = boundary_reward(episode, t + 1) + 0.9 * return_
                truth.append((number, episode, t, return_))
        assert [row[:3] for row in sorted(rows)] == [row[:3] for row in sorted(truth)], "from start to end"
        np.testing.assert_allclose(sorted(rows), sorted(truth), rtol=1e-5)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_steps_and_episodes_that_count_are_those_that_are_learned_from(num_envs, monkeypatch):
    """Not those of environments that wait for the others; also across checkpoints."""
    forwards = recorder(monkeypatch, reinforce.Actor, "forward")
    sizes = dict(num_envs=num_envs, episodes_per_update=6, checkpoint_every=90, total_timesteps=300)
    quick("Boundary", **sizes)
    updates = [call.args[1] for call in forwards[::2]]
    steps = np.cumsum([0, *map(len, updates)])
    assert [int(row["step"]) for row in progress()] == steps[1:].tolist()
    assert steps[-2] < 300 <= steps[-1] == checkpoint()["run"]["env_steps"], (
        "ends with the batch that gets there"
    )
    for name, truth in {"return": boundary_return, "length": boundary_length}.items():
        logged = points()[f"train/episode_{name}"]
        for obs, low, high in zip(updates, steps, steps[1:], strict=False):
            expected = sorted(truth(*played) for played in {(int(row[0]), int(row[1])) for row in obs})
            assert sorted(value for at, value in logged if low < at <= high) == expected
    total = len([step for step in Boundary.steps if not step[0]])
    assert total == steps[-1] if num_envs == 1 else total > steps[-1], "who waits is stepped, but not counted"


class Coin(probe_envs.Probe):
    """Episodes of 1 or 19 steps, which of them the toss of a coin decides at the reset."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.length = int(self.np_random.choice([1, 19]))
        return result

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == self.length, False, {}


gym.register("Coin-v0", entry_point=Coin, disable_env_checker=True, max_episode_steps=20)


def test_short_episodes_are_not_favoured():
    """The mean length is 10. Of the first 16 episodes to end in 8 environments most would be of 1 step."""
    quick("Coin-v0", num_envs=8, episodes_per_update=16, total_timesteps=20_000)
    lengths = [length for _, length in points()["train/episode_length"]]
    error = 9 / len(lengths) ** 0.5  # of the mean: each length is 9 from it
    assert len(lengths) > 1000 and abs(np.mean(lengths) - 10) < 3 * error


# ------------------------------------------------------------------------- the gradient of a small problem
# Three states, two actions, three steps: TRANSITIONS[state][action] lists (probability, next state or None).
HORIZON = 3
TRANSITIONS = [
    [[(0.7, 1), (0.3, None)], [(1.0, 2)]],
    [[(0.5, 0), (0.5, 2)], [(1.0, None)]],
    [[(1.0, 0)], [(0.6, 1), (0.4, 2)]],
]
REWARDS = [[1.0, -0.5], [2.0, 3.0], [0.5, 4.0]]
LOGITS = torch.tensor([[0.3, -0.2], [-0.5, 0.4], [0.1, 0.6]], dtype=torch.float64)


def exact_values(logits, gamma=1.0):
    """Values (HORIZON + 1, 3) of the states by the number of steps done; the last row is 0."""
    values = [torch.zeros(3, dtype=torch.float64)]
    for _ in range(HORIZON):
        rows = []
        for state, policy in enumerate(logits.softmax(-1)):
            q = [
                REWARDS[state][a] + gamma * sum(p * values[0][s] for p, s in ways if s is not None)
                for a, ways in enumerate(TRANSITIONS[state])
            ]
            rows.append(sum(p * x for p, x in zip(policy, q, strict=True)))
        values.insert(0, torch.stack(rows))
    return torch.stack(values)


def exact_gradient():
    """Of the expected return of episodes that begin in state 0."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(exact_values(logits)[0, 0], logits)[0]


def trajectories(state=0, t=0):
    """All episodes: (probability, [(state, action, reward, next state or None, end), ...])."""
    for action, ways in enumerate(TRANSITIONS[state]):
        for p, after in ways:
            probability = p * LOGITS[state].softmax(-1)[action].item()
            end = after is None or t == HORIZON - 1
            step = (state, action, REWARDS[state][action], after, end)
            for rest, steps in [(1.0, [])] if end else trajectories(after, t + 1):
                yield probability * rest, [step, *steps]


def columns(steps):
    """Fields of an episode (T, 1) as the rollout has them; the horizon belongs to the problem: a terminal."""
    states, actions, rewards, after, end = zip(*steps, strict=True)
    column = lambda x: torch.tensor(x, dtype=torch.float64)[:, None]
    value = exact_values(LOGITS)
    values = torch.stack([value[t, s] for t, s in enumerate(states)])[:, None]
    following = [value[t + 1, s if s is not None else 0] for t, s in enumerate(after)]
    return SimpleNamespace(
        states=states, actions=actions, rewards=column(rewards), end=column([float(x) for x in end]),
        values=values, next_values=torch.stack(following)[:, None],
    )  # fmt: skip


def moments(estimates):
    """Mean and total variance of a gradient over all episodes: [(probability, gradient), ...]."""
    mean = sum(p * g for p, g in estimates)
    return mean, sum(p * (g - mean).square().sum() for p, g in estimates).item()


def gradient(loss_function, states, actions, weight, episodes=1):
    """The estimate of the gradient of the expected return by a loss of steps and their weights (B,)."""
    logits = LOGITS.clone().requires_grad_()
    log_prob = logits.log_softmax(-1)[list(states), list(actions)]
    return -torch.autograd.grad(loss_function(log_prob, weight, episodes), logits)[0]


def test_all_episodes_have_probability_1_and_the_return_of_the_exact_value():
    episodes = list(trajectories())
    assert sum(p for p, _ in episodes) == pytest.approx(1)
    mean = sum(p * sum(step[2] for step in steps) for p, steps in episodes)
    assert mean == pytest.approx(exact_values(LOGITS)[0, 0].item())


def test_the_expected_estimate_is_the_exact_gradient():
    estimates = []
    for p, steps in trajectories():
        x = columns(steps)
        weight = reinforce.compute_returns(x.rewards, x.end, 1.0).flatten()
        estimates.append((p, gradient(reinforce.policy_gradient_loss, x.states, x.actions, weight)))
    torch.testing.assert_close(moments(estimates)[0], exact_gradient())


def test_several_episodes_give_the_mean_of_their_estimates():
    """So that longer episodes count with more steps, as in the sum of the policy gradient."""
    (_, first), (_, second) = sorted(trajectories(), key=lambda x: len(x[1]))[
        :: len(list(trajectories())) - 1
    ]
    assert len(first) < len(second)
    alone, states, actions, weights = [], [], [], []
    for steps in (first, second):
        x = columns(steps)
        weights.append(reinforce.compute_returns(x.rewards, x.end, 1.0).flatten())
        alone.append(gradient(reinforce.policy_gradient_loss, x.states, x.actions, weights[-1]))
        states, actions = states + list(x.states), actions + list(x.actions)
    both = gradient(reinforce.policy_gradient_loss, states, actions, torch.cat(weights), episodes=2)
    torch.testing.assert_close(both, (alone[0] + alone[1]) / 2)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_equal_the_brute_force_sum(gamma):
    rng = np.random.default_rng(0)
    rewards, done = rng.normal(size=(20, 3)), rng.random((20, 3)) < 0.2
    expected = np.zeros((20, 3))
    for t, i in itertools.product(range(20), range(3)):
        for k in range(t, 20):
            expected[t, i] += gamma ** (k - t) * rewards[k, i]
            if done[k, i]:
                break
    result = reinforce.compute_returns(torch.tensor(rewards), torch.tensor(done).double(), gamma)
    np.testing.assert_allclose(result, expected, rtol=1e-10)


# ------------------------------------------------------------------------------------------------- the rest
def test_log_probabilities_are_of_the_unclipped_action_and_only_the_environment_gets_a_clipped_one(
    monkeypatch,
):
    runs = watch_runs(monkeypatch, reinforce)
    forwards = recorder(monkeypatch, reinforce.Actor, "forward")
    quick("Box", learning_rate=0.0, num_envs=1, episodes_per_update=4, total_timesteps=40)
    _, obs, action, _ = forwards[0].args
    assert action.abs().max() > 1.5
    sent = np.clip([1, 0] + 2 * action.numpy(), [-1, -2], [3, 2])
    np.testing.assert_allclose(np.array(Boxes.actions)[:40], sent, atol=1e-6)
    agent = runs[0].agent
    mean = agent.head.mean(agent.actor_trunk(obs))
    expected = Normal(mean, agent.head.log_std.exp()).log_prob(action).sum(-1)
    torch.testing.assert_close(forwards[0].result[0], expected.detach())


def test_the_normalizer_sees_the_steps_that_count_and_moves_after_the_update(monkeypatch):
    runs = watch_runs(monkeypatch, reinforce)
    quick("Boundary", normalize_obs=True, learning_rate=0.0)
    assert runs[0].agent.obs_norm.count == runs[0].env_steps
    for row in progress():
        assert float(row.get("policy/kl") or 0) == pytest.approx(0, abs=1e-6), "nothing was learned"


@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_with_the_steps_that_are_done(anneal):
    quick("Ones", learning_rate=0.02, anneal_lr=anneal, total_timesteps=100)
    logged = [float(row["schedule/learning_rate"]) for row in progress()]
    np.testing.assert_allclose(logged, [0.02, 0.012, 0.004] if anneal else [0.02] * 3, rtol=1e-6)


def test_every_parameter_learns(monkeypatch):
    runs = watch_runs(monkeypatch, reinforce)
    quick("Walk", env_kwargs={"actions": "box"}, total_timesteps=1)
    before = [p.clone() for p in runs[0].agent.parameters()]
    quick("Walk", env_kwargs={"actions": "box"}, run_dir="run2", total_timesteps=100)
    assert not any(equal(a, b) for a, b in zip(before, runs[1].agent.parameters(), strict=True))


def test_action_masks_are_obeyed_and_part_of_the_update(monkeypatch):
    forwards = recorder(monkeypatch, reinforce.Actor, "forward")
    quick("Masked", num_envs=1)
    _, obs, action, mask = forwards[0].args
    legal = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)[obs.argmax(-1)]
    assert torch.equal(mask[:, 0], legal) and legal.gather(1, action).all()


def spaces(**kwargs) -> list[str]:
    return ["--env-id", "probe_envs:Spaces-v0", "--env-kwargs", json.dumps(kwargs)]


WRONG = {
    "episodes that cannot be shared": (["--episodes-per-update", "6"], "--episodes-per-update --num-envs 4"),
    "no time limit": (["--env-id", "Blackjack-v1"], "Blackjack-v1 time limit --max-episode-steps"),
    "images": (spaces(obs="hwc"), "images a2c.py ppo.py"),
    "no episodes": (["--episodes-per-update", "0"], "--episodes-per-update at least 1"),
}


@pytest.mark.parametrize("name", ["reinforce", "vpg", "trpo"])
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_options_end_in_one_clear_line(mistake, name, capsys, monkeypatch):
    module, (argv, words) = load_script(ALGOS / f"{name}.py"), WRONG[mistake]
    monkeypatch.setattr(module.sys, "argv", [f"{name}.py", "--num-envs", "4", *argv])
    with pytest.raises(SystemExit) as stop:
        module.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    for word in words.split():
        assert word in said


def test_a_time_limit_of_the_user_is_enough():
    quick("Ones", max_episode_steps=5, total_timesteps=30)
    assert {length for _, length in points()["train/episode_length"]} == {5}


def test_cartpole_is_learned():
    """500 is the most, 20 what chance gives. 30k steps take 3 seconds."""
    returns = quick(
        "CartPole-v1", total_timesteps=30_000, num_envs=4, episodes_per_update=8, hidden_sizes=(64, 64),
        learning_rate=3e-3, eval_episodes=10, max_episode_steps=0,
    )  # fmt: skip
    assert returns.mean() > 200


def test_choices_are_drawn_with_the_probability_that_the_gradient_is_of():
    head = reinforce.CategoricalHead(1, Discrete(3))
    np.random.seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    draws = head.sample(logits.numpy(), None, head.noise(20_000))
    draws = torch.from_numpy(draws).flatten().bincount() / 20_000
    torch.testing.assert_close(draws, logits.flatten().softmax(0), atol=0.012, rtol=0)  # 3 standard errors
