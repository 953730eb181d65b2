"""maml.py: gradients through inner steps, the baseline, whose episodes and policies they are, and tasks."""

import copy
import random
from dataclasses import replace
from functools import partial

import cv2
import numpy as np
import pytest
import torch
from conftest import call_main, checkpoint, equal, flags, load_script, parts, progress, tiny
from gymnasium.spaces import Box
from torch.func import functional_call

maml = load_script("maml")
CPU = torch.device("cpu")
POINTS = ("PointNavigation-v0", "PointRobot-v0", "SparsePointRobot-v0")


def arguments(**changes):
    return maml.Args(**dict(device="cpu", hidden_sizes=(5,), inner_lr=0.3, run_dir="run") | changes)


def make_agent(args, obs=3, actions=2, dtype=torch.float64):
    """With parameters that are far from 0, so that curvature shows."""
    torch.manual_seed(0)
    agent = maml.Agent(maml.Layout((obs,)), Box(-1, 1, (actions,)), args, CPU).to(dtype)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return agent


def make_rollouts(number, tasks=2, steps=6, obs=3, actions=2, dtype=torch.float64):
    draw = lambda *shape: torch.randn(*shape, dtype=dtype)
    weight = torch.full((tasks, steps), 1 / steps, dtype=dtype)
    return [
        dict(obs=draw(tasks, steps, obs), action=draw(tasks * steps, actions),
             advantage=draw(tasks, steps), weight=weight) for _ in range(number)
    ]  # fmt: skip


def objective(agent, rollouts, args, old_log_prob, first_order=False):
    *before, last = rollouts
    params = maml.adapt(agent, len(last["obs"]), before, args, first_order)
    log_prob, _ = agent.log_prob(params, last)
    return maml.outer_objective(args, log_prob, old_log_prob, last["advantage"], last["weight"])


def gradients(agent, *given, **more):
    return torch.cat(
        [x.flatten() for x in torch.autograd.grad(objective(agent, *given, **more), agent.parameters())]
    )


def finite_differences(agent, *given):
    found = []
    for parameter in agent.parameters():
        flat = parameter.data.view(-1)
        for i in range(len(flat)):
            values = []
            for shift in (1e-5, -2e-5):  # up, then down
                flat[i] += shift
                values.append(objective(agent, *given).item())
            flat[i] += 1e-5
            found.append((values[0] - values[1]) / 2e-5)
    return torch.tensor(found, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- learning rule
@pytest.mark.parametrize("outer", ["vpg", "ppo", "trpo"])
@pytest.mark.parametrize("inner_steps", [0, 1, 2])
def test_the_outer_gradient_is_that_through_the_inner_steps(outer, inner_steps):
    args = arguments(outer=outer, inner_steps=inner_steps)
    agent, rollouts = make_agent(args), make_rollouts(inner_steps + 1)
    old_log_prob = -4 * torch.rand(2, 6, dtype=torch.float64)  # ratios are far from 1, also clipped ones
    exact = gradients(agent, rollouts, args, old_log_prob)
    torch.testing.assert_close(
        exact, finite_differences(agent, rollouts, args, old_log_prob), rtol=1e-5, atol=1e-8
    )
    # First order: another one, the gradient at the adapted parameters as if it were that at theta
    first = gradients(agent, rollouts, args, old_log_prob, first_order=True)
    assert (first - exact).abs().max() > 0.01 or inner_steps == 0
    *before, last = rollouts
    params = {name: x.detach().requires_grad_() for name, x in maml.adapt(agent, 2, before, args).items()}
    log_prob, _ = agent.log_prob(params, last)
    value = maml.outer_objective(args, log_prob, old_log_prob, last["advantage"], last["weight"])
    at = torch.cat([x.sum(0).flatten() for x in torch.autograd.grad(value, [*params.values()])])
    torch.testing.assert_close(first, at)


def test_inner_steps_are_gradient_steps_of_each_task_one_after_the_other():
    args = arguments(inner_steps=2)
    agent, rollouts = make_agent(args), make_rollouts(3)
    adapted = [maml.adapt(agent, 2, rollouts[:k], args) for k in (0, 1, 2, 3)]
    for task in (0, 1):
        alone = copy.deepcopy(agent)  # a plain network, without functional_call
        for k, rollout in enumerate(rollouts):
            pi, action = alone(rollout["obs"][task]), rollout["action"].view(2, 6, -1)[task]
            loss = -(rollout["advantage"][task] * alone.head.log_prob(pi, action)).mean()
            alone.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, parameter in alone.named_parameters():
                    # the third step was not trained for: half the size
                    parameter -= (0.3 if k < 2 else 0.15) * parameter.grad
                    torch.testing.assert_close(adapted[k + 1][name][task], parameter.data)
                    assert (adapted[k + 1][name][task] != adapted[k][name][task]).any()


def test_outer_objectives_equal_numbers_worked_out_by_hand():
    log_prob, old = torch.log(torch.tensor([[0.2, 0.9], [0.5, 0.1]])), torch.log(torch.full((2, 2), 0.5))
    advantage, weight = (torch.tensor([[1.0, 2.0], [-1.0, -3.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    of = lambda outer: maml.outer_objective(
        arguments(outer=outer, clip_coef=0.3), log_prob, old, advantage, weight
    )
    assert of("trpo").item() == pytest.approx(((0.4 + 3.6) / 2 - 1) / 2)
    assert of("ppo").item() == pytest.approx(((0.4 + 2.6) / 2 - 1) / 2)
    expected = (0.5 * np.log(0.2) + np.log(0.9) - np.log(0.5)) / 2
    assert of("vpg").item() == pytest.approx(expected, rel=1e-5)


def test_the_baseline_is_fitted_to_each_task_and_batch():
    obs, t = torch.randn(2, 300, 3), torch.arange(300.0).expand(2, 300) % 100
    playing = (torch.rand(2, 300) < 0.8).float()
    truth = 2 * obs[..., 0] - obs[..., 1].square() + 0.03 * t + (t / 100) ** 3 - 5
    returns = torch.stack([truth[0], -3 * truth[1]]) + 1000 * (1 - playing)  # what is unseen may be anything
    value = maml.fit_baseline(obs, t, returns, playing)
    torch.testing.assert_close(value[0], truth[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(value[1], -3 * truth[1], rtol=1e-3, atol=1e-3)
    other = maml.fit_baseline(obs, t, returns * torch.tensor([[1.0], [5.0]]), playing)
    assert torch.equal(other[0], value[0]) and not torch.equal(other[1], value[1])


def make_steps(number=8, envs=4, lengths=(8, 3, 5, 8)):
    rng, lengths = np.random.default_rng(0), np.array(lengths)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return [
        dict(obs=draw(envs, 3), action=draw(envs, 2), reward=draw(envs), done=t + 1 == lengths,
             playing=t < lengths, terminated=t + 1 == lengths, success=draw(envs)) for t in range(number)
    ]  # fmt: skip


def test_a_rollout_has_returns_minus_the_baseline_normalized_within_a_task():
    args, steps = arguments(gamma=0.9), make_steps()
    rollout = maml.make_rollout(steps, 2, args, CPU)
    for task in (0, 1):
        rows = [
            (step["obs"][i], sum(0.9 ** (k - t) * steps[k]["reward"][i] for k in range(t, length)), t)
            for i, length in ((0, 8), (1, 3), (2, 5), (3, 8))[2 * task : 2 * task + 2]
            for t, step in enumerate(steps[:length])
        ]  # fmt: skip
        obs, returns, t = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
        features = np.column_stack([obs, obs**2, t / 100, (t / 100) ** 2, (t / 100) ** 3, np.ones_like(t)])
        ridge = np.linalg.solve(features.T @ features + 1e-5 * np.eye(10), features.T @ returns)
        error = returns - features @ ridge
        expected = (error - error.mean()) / error.std()
        counted = rollout["weight"][task] > 0
        got = rollout["advantage"][task][counted].view(-1)
        order = np.lexsort(obs.T)  # steps come in another order
        mine = rollout["obs"][task][counted].numpy()
        np.testing.assert_allclose(got[np.lexsort(mine.T)], expected[order], rtol=1e-3, atol=1e-3)
        assert rollout["weight"][task][counted].tolist() == pytest.approx([1 / len(t)] * len(t))


def test_steps_after_an_episode_change_nothing_that_is_learned():
    args, agent = arguments(), make_agent(arguments(), dtype=torch.float32)
    adapted = []
    for noise in (0.0, 7.0):
        steps = make_steps()
        for step in steps:
            for name in ("obs", "reward", "action"):
                step[name][~step["playing"]] += noise
        adapted.append(maml.adapt(agent, 2, [maml.make_rollout(steps, 2, args, CPU)], args))
    for name in adapted[0]:
        torch.testing.assert_close(adapted[0][name], adapted[1][name], rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------- training
@pytest.fixture
def seen(monkeypatch):
    """What the functions of the script were given and gave, name to a list of (arguments, result)."""
    calls = {}
    for name in (
        "adapt",
        "make_rollout",
        "outer_objective",
        "play_episodes",
        "set_tasks",
        "trust_region_step",
    ):
        function = getattr(maml, name)

        def watched(*given, name=name, function=function, **more):
            result = function(*given, **more)
            calls.setdefault(name, []).append(((*given, *more.values()), result))
            return result

        monkeypatch.setattr(maml, name, watched)
    return calls


def small(run_dir="run", **changes):
    """A short training in the plane."""
    fields = dict(
        env_id="PointNavigation-v0", env_kwargs={}, horizon=5, meta_batch_size=3, episodes_per_task=4
    )
    fields |= dict(total_timesteps=1, eval_every=0, checkpoint_every=0, eval_episodes=1, eval_inner_steps=1)
    return tiny(maml, run_dir, **fields | changes)


@pytest.mark.parametrize("outer", ["vpg", "ppo", "trpo"])
def test_episodes_and_log_probabilities_of_the_outer_step_are_of_the_adapted_policies(
    outer, seen, monkeypatch
):
    """With almost no noise an action is the mean of the policy that took it."""
    monkeypatch.setattr(maml.Run, "evaluate", lambda run: None)
    start = make_agent(arguments(hidden_sizes=(8,), log_std_init=-6.0), 2, 2, torch.float32)
    with torch.no_grad():
        start.head.log_std.fill_(-6.0)
    monkeypatch.setattr(maml, "Agent", lambda *_: start)
    before = {name: x.clone() for name, x in start.named_parameters()}
    maml.train(small(outer=outer, inner_steps=2, inner_lr=1e-5, outer_lr=1e-6))
    rollouts = [result for _, result in seen["make_rollout"]]
    assert len(rollouts) == 3
    with torch.no_grad():
        now = {name: x.clone() for name, x in start.named_parameters()}
        for name, x in start.named_parameters():
            x.copy_(before[name])
    args = small(outer=outer, inner_steps=2, inner_lr=1e-5)
    means = []
    for k, rollout in enumerate(rollouts):
        params = maml.adapt(start, 3, rollouts[:k], args)
        log_prob, pi = start.log_prob(params, rollout)
        means.append(pi.chunk(2, -1)[0])
        assert (rollout["action"] - means[-1]).abs().max() < 0.02  # five deviations of the noise
        unadapted, _ = start.log_prob(maml.adapt(start, 3, [], args), rollout)
        if k:
            assert (log_prob - unadapted).abs().mean() > 1
    (_, given, old, *_), _ = seen["outer_objective"][0]
    torch.testing.assert_close(given, log_prob)
    torch.testing.assert_close(old, log_prob.detach())  # the ratio is 1 at first
    assert not equal(now, before)


def test_more_inner_steps_play_more_and_move_more(seen):
    for inner_steps in (0, 1, 3):
        seen.clear()
        maml.train(small(f"run-{inner_steps}", inner_steps=inner_steps))
        assert checkpoint(f"run-{inner_steps}")["run"]["env_steps"] == (inner_steps + 1) * 12 * 5
        acted = [given[1].keywords["params"] for given, _ in seen["play_episodes"] if "params" in getattr(
            given[1], "keywords", {})]  # fmt: skip
        assert len(acted) == inner_steps + 1
        for one, next_one in zip(acted, acted[1:], strict=False):
            assert all((one[name] != next_one[name]).any() for name in one)
        assert all((x == x[:1]).all() for x in acted[0].values())  # theta for all tasks
        assert inner_steps == 0 or all((x != x[:1]).any() for x in acted[-1].values())


def test_first_order_and_second_order_learn_different_things():
    for folder, first_order in (("first", True), ("second", False)):
        maml.train(small(folder, first_order=first_order))
    assert not equal(parts("first")["agent"], parts("second")["agent"])


def test_a_trust_region_step_keeps_to_the_limit_or_takes_none(seen, monkeypatch):
    for max_kl in (0.01, 0.05):
        maml.train(small(f"run-{max_kl}", max_kl=max_kl, total_timesteps=600, horizon=20))
        rows = [row for row in progress(f"run-{max_kl}") if "policy/kl" in row]
        assert all(0 <= row["policy/kl"] <= max_kl for row in rows)
        assert any(row["policy/kl"] > max_kl / 2 and row["policy/improvement"] > 0 for row in rows)
    monkeypatch.setattr(maml, "conjugate_gradient", lambda product, gradient, *_: -gradient)  # to the worse
    maml.train(small("none", max_backtracks=3))
    start = maml.Agent(maml.Layout((2,)), Box(-1, 1, (2,)), small(), CPU)
    (row,) = [row for row in progress("none") if "policy/kl" in row]
    assert row["policy/accepted"] == row["policy/kl"] == 0
    assert {x.shape for x in start.parameters()} == {x.shape for x in checkpoint("none")["agent"].values()}


def test_ppo_takes_its_epochs_and_vpg_one_step(seen):
    for outer, epochs, steps in (("vpg", 5, 1), ("ppo", 5, 5), ("ppo", 2, 2)):
        maml.train(small(f"{outer}-{epochs}", outer=outer, outer_epochs=epochs))
        state = checkpoint(f"{outer}-{epochs}")["optimizer"]["state"]
        assert {float(x["step"]) for x in state.values()} == {steps}


@pytest.mark.parametrize("outer", ["vpg", "ppo", "trpo"])
def test_all_parameters_learn(outer):
    for folder, steps in (("one", 1), ("more", 500)):
        maml.train(small(folder, outer=outer, total_timesteps=steps))
    one, more = parts("one")["agent"], parts("more")["agent"]
    assert all((one[name] != more[name]).any() for name in one)


def test_a_policy_of_each_task_is_the_network_with_its_parameters():
    args = arguments()
    agent, params = make_agent(args, dtype=torch.float32), None
    params = maml.adapt(agent, 2, make_rollouts(1, dtype=torch.float32), args)
    obs = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    got = agent.act(obs, {}, params=params)
    for task, rows in ((0, slice(0, 3)), (1, slice(3, 6))):
        own = {name: x[task] for name, x in params.items()}
        mean = functional_call(agent, own, (torch.from_numpy(obs[rows]),)).chunk(2, -1)[0]
        np.testing.assert_allclose(got[rows], mean.detach(), rtol=1e-5, atol=1e-6)
    assert np.abs(got - agent.act(obs, {})).max() > 0.01
    drawn = agent.act(np.zeros((4000, 3)), {}, greedy=False, params=params).reshape(2, 2000, 2)
    assert drawn.std(axis=1) == pytest.approx(params["head.log_std"].exp().detach().numpy(), rel=0.1)


@pytest.mark.parametrize("change", ["tanh", "negative", "layer_norm"])
def test_what_acts_is_what_learns(change, monkeypatch, seen):
    """A changed forward changes acting, adapting and evaluating, from the first step on."""
    forward, functional = maml.Agent.forward, torch.nn.functional
    changes = {
        "tanh": lambda self, obs: forward(self, obs).tanh(),
        "negative": lambda self, obs: forward(self, -1 - obs),
        "layer_norm": lambda self, obs: forward(self, functional.layer_norm(obs + torch.eye(2)[0], (2,))),
    }
    maml.train(small("as_it_was"))
    first = {name: x for (_, x) in seen["adapt"][1:2] for name, x in x.items()}
    seen.clear()
    monkeypatch.setattr(maml.Agent, "forward", changes[change])
    maml.train(small("changed"))
    second = {name: x for (_, x) in seen["adapt"][1:2] for name, x in x.items()}
    assert any(not torch.equal(first[name], second[name]) for name in first)
    rollouts = seen["make_rollout"]
    assert not equal(parts("as_it_was")["agent"], parts("changed")["agent"]) and rollouts
    one, two = (
        [row for row in progress(x) if "eval/return_mean" in row][0] for x in ("as_it_was", "changed")
    )
    assert one != two


def test_it_learns_to_learn():
    """Far better after one step than before it, on goals that it has never seen."""
    args = maml.make_args(
        "PointNavigation-v0", device="cpu", run_dir="run", meta_batch_size=10, episodes_per_task=10,
        horizon=50, total_timesteps=120_000, eval_every=0, checkpoint_every=0, max_kl=0.03, log_std_init=-0.5,
    )  # fmt: skip
    maml.train(args)
    row = [row for row in progress() if "eval/return_mean" in row][-1]
    assert row["eval/return_after_0"] < -17 and row["eval/return_after_1"] > -12  # staying: -19.1


# -------------------------------------------------------------------------------------------------- meta-test
def test_a_meta_test_adapts_to_held_out_tasks_and_changes_nothing(seen):
    args = small(eval_episodes=3, eval_inner_steps=2, horizon=7)
    agent = make_agent(args, 2, 2, torch.float32)
    state, draws = copy.deepcopy(agent.state_dict()), []
    for _ in range(2):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        returns, metrics = maml.evaluate(args, agent)
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert draws == [(torch.rand(1).item(), np.random.rand(), random.random())] * 2
    assert equal(state, dict(agent.state_dict())) and agent.training
    assert returns.shape == (3,) and metrics["eval/return_after_1"] == metrics["eval/return_mean"]
    assert {name for name in metrics if "after" in name} == {f"eval/return_after_{k}" for k in range(3)}
    # The score before the first step is that of the agent itself on those tasks
    tasks = maml.sample_tasks(args, 3, np.random.default_rng(args.eval_seed))
    envs = maml.make_task_envs(args, tasks)
    steps = maml.play_episodes(envs, partial(agent.act, greedy=True))
    alone = sum(step["reward"] for step in steps)
    assert metrics["eval/return_after_0"] == pytest.approx(alone.mean(), rel=1e-5)
    # and after a step that of the policies that were adapted without the episodes of the score
    rollouts = [result for _, result in seen["make_rollout"]][:2]
    assert [rollout["obs"].shape[1] for rollout in rollouts] == [4 * 7] * 2
    for k in (1, 2):
        params = maml.adapt(agent, 3, rollouts[:k], args)
        steps = maml.play_episodes(envs, partial(agent.act, params=params))
        score = sum(step["reward"] for step in steps)
        assert metrics[f"eval/return_after_{k}"] == pytest.approx(score.mean(), rel=1e-4)
        if k == 1:
            assert returns == pytest.approx(score, rel=1e-4)


def test_the_score_is_of_drawn_actions_if_asked():
    args = small(eval_episodes=3)
    agent = make_agent(args, 2, 2, torch.float32)
    greedy, drawn = (maml.evaluate(replace(args, sample_actions=x), agent)[0] for x in (False, True))
    assert (greedy != drawn).all()


def test_best_is_by_the_return_after_one_step():
    maml.train(small(total_timesteps=600, eval_every=120, eval_episodes=3))
    rows = [row for row in progress() if "eval/return_mean" in row]
    best = max(rows, key=lambda row: row["eval/return_after_1"])
    assert checkpoint(name="best.pt")["run"]["env_steps"] == best["step"]
    assert len({row["eval/return_after_1"] for row in rows}) == len(rows) > 3


def test_held_out_tasks_are_always_the_same_and_none_of_training(seen):
    maml.train(small(total_timesteps=600, eval_episodes=3))
    trained = np.concatenate([given[1] for given, _ in seen["set_tasks"] if given[0].num_envs == 12])
    held_out = maml.sample_tasks(small(), 3, np.random.default_rng(small().eval_seed))
    assert len(np.unique(trained, axis=0)) == len(trained) == 15
    assert not {*map(tuple, trained)} & {*map(tuple, held_out)}


def test_what_is_loaded_can_be_adapted():
    args = small(inner_steps=2, total_timesteps=200)
    maml.train(args)
    tasks = np.array([[0.5, 0.5], [-0.5, 0.1], [0.3, -0.4]], dtype=np.float32)
    policy, adapted = maml.load_policy("run"), maml.load_adapted("run", tasks)
    obs = maml.make_task_envs(args, tasks, 2).reset()[0]
    assert adapted(obs, {}).shape == policy(obs, {}).shape == (6, 2)
    assert np.ptp(policy(obs, {}), axis=0).max() == 0 < np.ptp(adapted(obs, {}), axis=0).min()
    assert (adapted(obs, {})[::2] == adapted(obs, {})[1::2]).all()  # two environments of each task


def test_a_film_shows_a_task_before_and_after_a_step():
    maml.train(small(capture_video=True, eval_inner_steps=3, horizon=9))
    film = cv2.VideoCapture("run/videos/216.webm")
    frames = []
    while (frame := film.read())[0]:
        frames.append(frame[1])
    assert len(frames) == 2 * 9 and frames[0].shape == (300, 300, 3)
    assert (frames[8] != frames[17]).any()  # another path
    blue, green, red = frames[0][..., 0], frames[0][..., 1], frames[0][..., 2]
    assert ((red > 180) & (green < 90) & (blue < 90)).sum() > 20  # the goal


# ------------------------------------------------------------------------------------------------------ tasks
def walk(args, tasks, towards):
    """The mean return of points that go straight to what towards says."""
    envs = maml.make_task_envs(args, tasks)
    obs, _ = envs.reset(seed=1)
    total, done = 0, np.zeros(1, bool)
    while not done.any():
        obs, reward, terminated, done, _ = envs.step(10 * (towards(tasks) - obs))
        assert not terminated.any() and (reward.shape, done.shape) == ((len(tasks),),) * 2
        total = total + reward
    assert done.all()
    return total.mean()


@pytest.mark.parametrize(
    "family, horizon, optimum, staying",
    [("PointNavigation-v0", 100, -0.51, -38.3), ("PointRobot-v0", 20, -5.19, None),
     ("SparsePointRobot-v0", 20, 13.36, 0.0)],
)  # fmt: skip
def test_points_earn_what_they_should(family, horizon, optimum, staying):
    assert maml.make_args(family).horizon == horizon
    args = arguments(env_id=family, horizon=horizon)
    tasks = maml.sample_tasks(args, 20_000, np.random.default_rng(0))
    assert tasks.shape == (20_000, 2) and tasks.dtype == np.float32
    assert walk(args, tasks, lambda goal: goal) == pytest.approx(optimum, rel=0.02)
    if staying is not None:
        assert walk(args, tasks, np.zeros_like) == pytest.approx(staying, rel=0.01)


def test_goals_are_where_they_should_be():
    draw = lambda family: maml.sample_tasks(arguments(env_id=family), 5000, np.random.default_rng(0))
    for family, side in (("PointNavigation-v0", 0.5), ("PointRobot-v0", 1.0)):
        assert np.abs(draw(family)).max(axis=0) == pytest.approx([side, side], rel=0.01)
        assert draw(family).mean(axis=0) == pytest.approx([0, 0], abs=0.03)
    half = draw("SparsePointRobot-v0")
    assert np.linalg.norm(half, axis=1) == pytest.approx(np.ones(5000))
    assert half[:, 1].min() >= 0 and half[:, 0].mean() == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("family", POINTS)
def test_points_step_at_most_a_tenth_and_are_reset_alone(family):
    args = arguments(env_id=family, horizon=3)
    tasks = maml.sample_tasks(args, 2, np.random.default_rng(1))
    envs = maml.make_task_envs(args, tasks, 2)
    first, _ = envs.reset(seed=3)
    again, _ = maml.make_task_envs(args, tasks, 2).reset(seed=3)
    assert np.array_equal(first, again) and (family == "PointRobot-v0") == (np.ptp(first) > 0)
    obs, reward, *_ = envs.step(np.array([[9, -9], [0.5, 0], [1, 1], [0, 0]], np.float32))
    moved = [[0.1, -0.1], [0.05, 0], [0.1, 0.1], [0, 0]]
    assert obs - first == pytest.approx(np.array(moved), abs=1e-6) and obs.dtype == np.float32
    distance = np.linalg.norm(obs - np.repeat(tasks, 2, axis=0), axis=1)  # task i has rows 2 i and 2 i + 1
    sparse = np.where(distance <= 0.2, 1 - distance, 0)
    assert reward == pytest.approx(sparse if "Sparse" in family else -distance)
    kept, _ = envs.reset(options={"reset_mask": np.array([True, False, False, True])})
    assert np.array_equal(kept[1:3], obs[1:3]) and not np.array_equal(kept[0], obs[0])


def test_time_ends_the_episodes_of_points_one_by_one():
    envs = maml.make_task_envs(arguments(env_id="PointNavigation-v0", horizon=3), np.zeros((2, 2)))
    envs.reset()
    ends = []
    for t in range(6):
        *_, done, _ = envs.step(np.zeros((2, 2)))
        ends.append(done.tolist())
        if t == 0:
            envs.reset(options={"reset_mask": np.array([True, False])})
        elif done.any():
            envs.reset(options={"reset_mask": done})
    assert ends == [[False] * 2, [False] * 2, [False, True], [True, False], [False] * 2, [False, True]]


@pytest.mark.parametrize("family", ["HalfCheetahDir-v0", "HalfCheetahVel-v0"])
def test_cheetahs_are_paid_for_their_task(family):
    args = arguments(env_id=family, horizon=4)
    tasks = maml.sample_tasks(args, 400, np.random.default_rng(0))
    if "Dir" in family:
        draw = lambda seed: maml.sample_tasks(args, 2, np.random.default_rng(seed)).ravel().tolist()
        assert {*tasks.ravel().tolist()} == {-1.0, 1.0} and tasks.mean() == 0
        assert all(sorted(draw(seed)) == [-1, 1] for seed in range(20)), "two tasks are the two directions"
    else:
        assert 0 <= tasks.min() < 0.1 and 2.9 < tasks.max() <= 3
    tasks = np.array([[1.0], [-1.0]] if "Dir" in family else [[0.5], [2.0]], np.float32)
    envs = maml.make_task_envs(args, tasks, 2)
    envs.reset(seed=[5, 5, 5, 5])
    for t in range(4):
        at = [env.unwrapped.data.qpos[0] for env in envs.envs]
        action = np.broadcast_to(np.sin(np.arange(6) + t).astype(np.float32), (4, 6))
        obs, reward, terminated, truncated, info = envs.step(action)
        assert (
            info == {} and obs.shape == (4, 17) and np.ptp(obs, axis=0).max() == 0
        )  # nothing shows the task
        velocity = (envs.envs[0].unwrapped.data.qpos[0] - at[0]) / 0.05
        cost = 0.1 * np.square(action[0]).sum()
        task = np.repeat(tasks[:, 0], 2)
        paid = task * velocity if "Dir" in family else -np.abs(velocity - task)
        assert reward == pytest.approx(paid - cost)
        assert not terminated.any() and truncated.tolist() == [t == 3] * 4
    maml.set_tasks(envs, tasks[::-1])
    envs.reset(seed=[5, 5, 5, 5])
    _, reward, *_ = envs.step(np.broadcast_to(np.sin(np.arange(6)).astype(np.float32), (4, 6)))
    assert reward[0] != reward[2]
    envs.close()


def test_a_family_of_the_user_and_what_is_none():
    args = tiny(maml)
    envs = maml.make_task_envs(args, np.array([[0.25], [-0.5]], np.float32), 2)
    assert [env.unwrapped.task for env in envs.envs] == [0.25, 0.25, -0.5, -0.5]
    assert maml.sample_tasks(args, 7, np.random.default_rng(0)).shape == (7, 1)
    envs.close()


@pytest.mark.parametrize("obs, size", [("dict", 5), ("tuple", 5), ("discrete", 5), ("multi_binary", 4)])
def test_families_show_any_space_as_a_vector(obs, size):
    args = arguments(env_id="probe_envs:Spaces-v0", env_kwargs={"obs": obs, "action": "box"})
    envs = maml.make_task_envs(args, np.zeros((2, 1), np.float32), 1)
    assert envs.reset(seed=1)[0].shape == (2, size)
    envs.close()


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(env_id="CartPole-v1"), "CartPole-v1 is not a family of tasks"),
        (dict(env_id="Nowhere-v0"), "cannot make Nowhere-v0"),
        (dict(env_kwargs={"x": 1}), "PointNavigation-v0 has no --env-kwargs"),
        (dict(env_id="probe_envs:Spaces-v0", env_kwargs={"obs": "hwc", "action": "box"}), "has image"),
        (dict(inner_lr=-1.0), "--inner-lr -1.0: must be at least 0"),
        (dict(meta_batch_size=0), "--meta-batch-size 0: must be at least 1"),
        (dict(inner_steps=-1), "--inner-steps -1: must be at least 0"),
    ],
)
def test_mistakes_end_before_training_in_one_line(changes, says, capsys):
    assert call_main(maml, *flags(small(**changes))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("maml.py: ") and says in line
