"""DQN: its learning rule, networks, replay memory and rhythm."""

import math
from functools import partial

import conftest
import numpy as np
import odd_envs
import pytest
import torch
from conftest import CPU, ROOT, checkpoint, equal, load_script, parts, progress
from gymnasium.spaces import Box, Discrete
from probe_envs import Boundary, boundary_length, boundary_reward, boundary_terminates
from torch.nn.functional import huber_loss

dqn = load_script("dqn")
ALL = dict(double=True, dueling=True, noisy=True, n_step=3, per=True)
# 48 steps of two environments, with an update after every fifth
RHYTHM = dict(total_timesteps=96, learning_starts=20, train_every=5, target_update_every=10)
short, quick = (partial(f, dqn, **RHYTHM) for f in (conftest.short, conftest.quick))


def new_agent(actions=3, **changes):
    dqn.set_seed(0)
    return dqn.Agent(dqn.Layout((4,)), Discrete(actions), short(**changes), CPU)


# -------------------------------------------------------------------------------------------- learning rule
def test_targets_and_losses_are_those_of_the_equations():
    target_q, online_q = torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.tensor([[3.0, 2.0], [0.0, 1.0]])
    reward, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    assert dqn.compute_td_target(reward, discount, target_q).tolist() == [3.5, 3]
    assert dqn.compute_td_target(reward, discount, target_q, online_q).tolist() == [
        1.5,
        2.5,
    ]  # it chooses only
    assert dqn.compute_td_target(reward, torch.zeros(2), target_q, online_q).tolist() == [1, 2]
    error, weight, zero = torch.randn(100) * 3, torch.rand(100), torch.zeros(100)
    huber = huber_loss(error, zero, reduction="none")
    torch.testing.assert_close(dqn.q_loss(error, weight, "huber"), (weight * huber).sum() / 100)
    torch.testing.assert_close(dqn.q_loss(error, weight, "mse"), (weight * error.square()).sum() / 200)


@pytest.mark.parametrize("change, expected", [
    ({}, [1, 1, 0.74, 0.5, 0.1, 0.1]), (dict(exploration_fraction=0.0), [1, 1, 0.1, 0.1, 0.1, 0.1]),
    (dict(noisy=True), [1, 1, 0, 0, 0, 0]),
])  # fmt: skip
def test_epsilon_falls_in_a_line_after_a_random_start(change, expected):
    given = dict(learning_starts=100, total_timesteps=1000, epsilon_start=0.9, epsilon_end=0.1)
    args = short(**given | dict(exploration_fraction=0.5) | change)
    assert [dqn.epsilon_at(at, args) for at in (0, 99, 100, 250, 500, 900)] == pytest.approx(expected)


@pytest.mark.parametrize("flags", [{}, dict(double=True), dict(per=True), dict(n_step=3), dict(loss="mse")])
def test_a_training_minimizes_what_its_flags_say(flags, seen, record, monkeypatch):
    """At each update; the errors, not the losses, become priorities, and the log tells the last update."""
    batches, samples = record(dqn.FrameBuffer, "transitions"), record(dqn.FrameBuffer, "sample")
    priorities, clips = record(dqn.FrameBuffer, "set_priority"), record(dqn, "clip_gradients")
    real, found, disagree = dqn.q_loss, [], []

    def watched(td_error, weight, loss):
        batch, agent, target = batches[-1][1], seen["agent"], seen["target_agent"]
        assert loss == flags.get("loss", "huber")
        with torch.no_grad():
            by_target, by_agent = (network(batch["next_obs"]) for network in (target, agent))
            q_values = agent(batch["obs"])
        best, rows = (by_agent if flags.get("double") else by_target).argmax(1), torch.arange(len(weight))
        q_value = q_values[rows, batch["action"]]
        found.append((batch["reward"] + batch["discount"] * by_target[rows, best] - q_value, q_value))
        disagree.append((by_target.argmax(1) != by_agent.argmax(1)).any())
        torch.testing.assert_close(td_error.detach(), found[-1][0])
        torch.testing.assert_close(weight.double(), torch.from_numpy(samples[-1][1][1]), rtol=1e-5, atol=1e-6)
        return real(td_error, weight, loss)

    monkeypatch.setattr(dqn, "q_loss", watched)
    slow = dict(gamma=0.9, tau=0.5, target_update_every=40, per_beta_start=0.2, max_grad_norm=0.3)
    quick(learning_rate=0.05, train_every=4, total_timesteps=160, updates_per_train=2, **slow, **flags)
    assert len(priorities) == len(found) == 72 and sum(disagree) > 5
    for sample, (priority, _), (error, _) in zip(samples, priorities, found, strict=True):
        (_, _, beta), (rows, _) = sample
        torch.testing.assert_close(priority[2], error)
        assert priority[1] is rows and beta == pytest.approx(0.2 + 0.8 * (sample.step - 2) / 160)
    (error, q_value), row = found[-1], progress()[-2]  # an evaluation follows
    names = "loss/td_error", "q/mean", "q/max", "q/target_mean"
    values = error.abs().mean(), q_value.mean(), q_value.max(), (error + q_value).mean()
    assert [row[name] for name in names] == pytest.approx([x.item() for x in values], rel=1e-4)
    assert clips[-1][0][1] == 0.3


def test_rewards_are_clipped_and_scaled_for_learning_also_those_in_memory(record):
    batches = record(dqn.FrameBuffer, "transitions")
    for change, expected in (({}, -1.5), (dict(clip_reward=True), -0.5)):
        batches.clear()
        quick("Ones", run_dir=f"{expected}", env_kwargs={"pay": -3.0}, reward_scale=0.5, **change)
        assert len(batches) > 10 and all((batch["reward"] == expected).all() for _, batch in batches)
    batches.clear()
    dqn.train(dqn.parse_args("--resume -1.5 --total-timesteps 120 --reward-scale 2".split()))
    assert all((batch["reward"] == -6).all() for _, batch in batches) and batches


@pytest.mark.parametrize("switches", [{}, ALL], ids="-".join)
def test_values_are_of_the_endless_sum_where_episodes_are_only_truncated(switches, seen):
    """1 per step for ever is worth 1 / (1 - 0.7) = 10 / 3; ten steps would be 2.6 in the mean."""
    often = dict(train_every=1, target_update_every=5, total_timesteps=400)
    quick("Ones", gamma=0.7, learning_rate=0.03, **often, **switches)
    q_values = seen["agent"].eval()(torch.zeros(1, 4))
    assert q_values.max().item() == pytest.approx(10 / 3, abs=0.15)


@pytest.mark.parametrize("flags", [{}, dict(double=True), dict(n_step=3), dict(dueling=True)], ids="-".join)
def test_the_next_action_is_a_legal_one(flags, seen, record):
    """Against a table of which actions are legal; what is illegal is worth the most."""
    targets, batches = record(dqn, "compute_td_target"), record(dqn.FrameBuffer, "transitions")
    quick("Loop", learning_rate=0.01, gamma=0.9, **flags)
    masks = torch.tensor(odd_envs.Loop.masks, dtype=torch.bool)
    for (given, td_target), (_, batch) in zip(targets, batches, strict=True):
        reward, discount, target_q_values, *q_values = given
        legal = masks[batch["next_obs"][:, 1].long()]  # one-hot states
        chooser = target_q_values if q_values[0] is None else q_values[0]
        assert torch.equal(chooser.isfinite(), legal)
        best = torch.where(legal, chooser, -1e9).argmax(1, keepdim=True)
        value = target_q_values.gather(1, best).squeeze(1)
        torch.testing.assert_close(td_target, reward + discount * value)
        assert td_target.isfinite().all()
        assert masks[batch["obs"][:, 1].long()].gather(1, batch["action"][:, None]).all()
    assert all(math.isfinite(x) for row in progress() for x in row.values())


# ------------------------------------------------------------------------------------------------- networks
def test_the_advantages_of_dueling_have_mean_zero():
    agent, obs = new_agent(dueling=True, hidden_sizes=(8, 16)), torch.randn(10, 4)
    q_values, features = agent(obs), agent.trunk(obs)
    value, advantage = agent.value(features), agent.advantage(features)
    assert value.shape == (10, 1) and value.std() > 0 < advantage.mean(1).abs().min()
    torch.testing.assert_close(q_values.mean(dim=1, keepdim=True), value)
    torch.testing.assert_close(q_values - q_values[:, :1], advantage - advantage[:, :1])


def noise_of(layer):
    """New noise on weights and biases, in multiples of sigma, and the output's sum."""
    dqn.redraw_noise(layer)
    size = layer.weight.shape[1]
    output = layer(torch.cat([torch.zeros(1, size), torch.eye(size)]))
    weight, bias = (output[1:] - output[0]).T, output[0]
    noise = (weight - layer.weight) / layer.weight_sigma, (bias - layer.bias) / layer.bias_sigma
    return *(x.detach() for x in noise), output.sum()


def test_noise_has_its_distribution_and_its_scale_is_learned():
    torch.manual_seed(0)
    layer, bound = dqn.NoisyLinear(9, 6, independent=False, noise_std=0.5), 1 / 3
    assert 0.9 * bound < layer.weight.abs().max() <= bound and 0 < layer.bias.abs().max() <= bound
    assert torch.cat([layer.weight_sigma.ravel(), layer.bias_sigma]).unique().item() == pytest.approx(0.5 / 3)
    weight, bias, output = noise_of(layer)  # f(a) f(b) on weights, f(a) on biases
    torch.testing.assert_close(weight / bias[:, None], (weight / bias[:, None])[:1].expand(6, 9))
    output.backward()
    grads = layer.weight_sigma.grad, layer.bias_sigma.grad
    torch.testing.assert_close(grads, (weight, 10 * bias), rtol=1e-3, atol=1e-3)
    draws = [noise_of(layer) for _ in range(2000)]
    weights, biases, outputs = (torch.stack(x) for x in zip(*draws, strict=True))
    assert len(outputs.unique()) > 1990
    assert torch.equal(layer(torch.eye(9)), layer(torch.eye(9)))  # until it is drawn again
    second = math.sqrt(2 / math.pi)  # f is the signed root: its square has mean E|x|
    for noise, power in ((weights, 2), (biases, 1)):
        assert noise.mean().item() == pytest.approx(0, abs=0.03)
        assert noise.square().mean().item() == pytest.approx(second**power, rel=0.06)
        assert noise.pow(4).mean().item() == pytest.approx(1, rel=0.1)
    torch.testing.assert_close(layer.eval()(torch.eye(9)), layer.weight.T + layer.bias)
    state = new_agent(noisy=True, dueling=True, hidden_sizes=(16,)).state_dict()
    sigmas = [round(x.max().item(), 6) for name, x in state.items() if "sigma" in name]  # of all layers
    assert len(sigmas) == 8 and {*sigmas} == {0.25, 0.125}


def test_independent_noise_is_a_number_for_each_weight():
    torch.manual_seed(0)
    layer = dqn.NoisyLinear(9, 6, independent=True, noise_std=0.5)
    weight, bias, _ = noise_of(layer)
    assert torch.linalg.matrix_rank(weight, atol=1e-2) == 6  # factorized noise has rank one
    draws = [noise_of(layer) for _ in range(2000)]
    for noise in (torch.stack(x) for x in list(zip(*draws, strict=True))[:2]):
        assert noise.mean().item() == pytest.approx(0, abs=0.03)
        assert noise.square().mean().item() == pytest.approx(1, rel=0.06)
    sigmas = torch.cat([layer.weight_sigma.ravel(), layer.bias_sigma])
    assert sigmas.unique().item() == pytest.approx(0.017)
    assert 0.9 * (3 / 9) ** 0.5 < layer.weight.abs().max() <= (3 / 9) ** 0.5
    quick(noisy=True, independent_noise=True)


def test_noise_explores_in_place_of_epsilon_anew_after_updates_and_not_in_evaluations(record, seen):
    """All observations are equal, evaluations are of two environments, and nothing is learned."""
    actions, outputs = record(dqn.Agent, "act"), record(dqn.Agent, "forward")
    draws = record(dqn, "redraw_noise")
    quick("Ones", noisy=True, double=True, num_envs=9, total_timesteps=270, learning_rate=0.0)
    values = lambda size: [(x.step, x[1][0].detach().numpy().tobytes()) for x in outputs if len(x[1]) == size]
    acting = values(9)  # updates after steps 20, 25, ..., and steps of nine environments
    spans = [sum(call.step <= step for call in draws) for step, _ in acting]
    assert len({*zip(spans, (x for _, x in acting), strict=True)}) == len({x for _, x in acting})
    assert len({x for _, x in acting}) == len({*spans}) > 20 and len(acting) > len({*spans})
    assert len({x for _, x in values(2)}) == 1
    assert {x for _, x in values(2)}.isdisjoint(x for _, x in acting)
    updates = values(16)  # for the choice, by the target network, for the loss
    assert len({x for _, x in updates}) == 2 * len(updates) // 3 > 80
    chosen = [call[1] for call in actions if call.step >= 20 and len(call[1]) == 9]
    assert len(chosen) > 20 and all(len(set(action)) == 1 for action in chosen)


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_actions_are_random_with_probability_epsilon(epsilon):
    agent, n = new_agent(actions=4), 8000
    agent.epsilon = epsilon
    obs = np.full((n, 4), 0.5, dtype=np.float32)
    best = agent(torch.from_numpy(obs[:1]))[0].argmax().item()
    share = np.bincount(agent.act(obs, {}, greedy=False), minlength=4) / n
    assert share == pytest.approx(epsilon / 4 + (1 - epsilon) * np.eye(4)[best], abs=0.02)
    assert (agent.act(obs, {}) == best).all()


# ------------------------------------------------------------------------------------------------ the memory
class Naive:
    """A replay memory as simple as it can be: for each environment a list of rows with whole observations."""

    def __init__(self, num_envs, stack, capacity):
        self.rows, self.stack, self.capacity = [[] for _ in range(num_envs)], stack, capacity
        self.episode, self.mass, self.largest = [None] * num_envs, {}, 1.0

    def start(self, envs):
        for i in envs:
            self.rows[i] += [None] * self.stack
            self.episode[i] = []

    def add(self, *step):
        for i, (obs, *rest) in enumerate(zip(*step, strict=True)):
            self.rows[i][-1:] = [(self.episode[i], len(self.episode[i])), None]
            self.episode[i].append((obs.tobytes(), *rest))
            self.mass[obs.tobytes()] = self.largest

    def transitions(self, gamma, n_step) -> dict:
        """(action, reward, discount, next_obs) by obs, of those whose observation is whole."""
        found = {}
        for rows in self.rows:
            for episode, t in filter(None, rows[-self.capacity :][self.stack - 1 :]):
                steps = episode[t : t + n_step]
                reward = sum(gamma**k * step[2] for k, step in enumerate(steps))
                discount = 0.0 if steps[-1][3] else gamma ** len(steps)
                found[steps[0][0]] = (steps[0][1], reward, discount, steps[-1][4].tobytes())
        return found


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("shape, stack, num_envs, size, per", [
    ((3,), 1, 1, 31, False), ((3,), 1, 3, 62, True), ((3,), 1, 2, 700, True), ((3, 2, 5), 1, 2, 40, False),
    ((4, 2, 5), 4, 3, 64, True), ((4, 2, 5), 4, 1, 37, False), ((4, 2, 5), 4, 2, 700, False),
])  # fmt: skip
def test_the_memory_equals_a_naive_one(shape, stack, num_envs, size, per, n_step):
    """Random ends of both kinds, segments that end, laps of the ring, new priorities, reloads in between."""
    rng, env_id = np.random.default_rng(0), "ALE/Pong-v5" if stack > 1 else "Walk"
    given = dict(num_envs=num_envs, buffer_size=size, n_step=n_step, per_eps=0.1, per_alpha=0.7)
    args, dtype = short(env_id, gamma=0.9, **given), np.uint8 if shape[1:] else np.float32
    np.random.seed(0)
    make = lambda: dqn.FrameBuffer(args, Box(0, 255, shape, dtype), CPU, per)
    draw = lambda: rng.integers(0, 256, (num_envs, *shape)).astype(dtype)
    buffer, naive, obs = make(), Naive(num_envs, stack, size // num_envs), draw()
    buffer.start(obs), naive.start(range(num_envs))
    for t in range(160):
        action, reward = rng.integers(0, 5, num_envs), rng.normal(size=num_envs).astype(np.float32)
        terminated, truncated = rng.random((2, num_envs)) < 0.08
        done, next_obs = terminated | truncated, draw()
        next_obs[:, : stack - 1] = obs[:, 1:stack]
        buffer.add(action, reward, terminated, next_obs)
        naive.add(obs, action, reward, terminated, next_obs)
        obs = np.where(done.reshape(-1, *[1] * len(shape)), draw(), next_obs)
        if done.any():
            buffer.start(obs, done), naive.start(np.flatnonzero(done))
        if t % 40 == 39:
            state, buffer, obs = buffer.state_dict(), make(), draw()
            buffer.load_state_dict(state)
            buffer.start(obs), naive.start(range(num_envs))
        if t % 4:
            continue
        truth, (index, weight) = naive.transitions(0.9, n_step), buffer.sample(12 * size, beta=0.5)
        index, first, count = np.unique(index, return_index=True, return_counts=True)
        batch = {name: x.numpy() for name, x in buffer.transitions(index).items()}
        names = [x.tobytes() for x in batch["obs"]]
        assert sorted(names) == sorted(truth)
        for i, name in enumerate(names):
            *numbers, successor = truth[name]
            assert batch["next_obs"][i].tobytes() == successor
            assert [batch[x][i] for x in ("action", "reward", "discount")] == pytest.approx(numbers, abs=1e-5)
        mass = np.array([naive.mass[name] for name in names])
        assert weight[first] == pytest.approx((mass / mass.min()) ** -0.5)
        expected, limit = 12 * size * mass / mass.sum(), len(mass) + 9 * len(mass) ** 0.5
        assert ((count - expected) ** 2 / expected).sum() < limit  # chi-square
        some, td_error = rng.random(len(index)) < 0.5, rng.normal(size=len(index))
        if some.any():
            buffer.set_priority(index[some], torch.from_numpy(td_error[some]))
            naive.mass |= {names[i]: (abs(td_error[i]) + 0.1) ** (0.7 * per) for i in np.flatnonzero(some)}
            naive.largest = max(naive.largest, *naive.mass.values())


@pytest.mark.parametrize("size", [1, 31, 33, 1100, 2500])
def test_each_leaf_is_drawn_from_its_part_of_the_mass(size, monkeypatch):
    rng, tree, batch = np.random.default_rng(size), dqn.SumTree(size), 4000
    for _ in range(20):  # magnitudes that would leave traces in running sums
        tree.set(rng.integers(0, size, 50), 10.0 ** rng.uniform(-9, 9, 50))
    some_empty = lambda: np.maximum(rng.random(size) * (rng.random(size) < 0.6), np.arange(size) == size // 2)
    tree.set(np.arange(size), mass := some_empty())
    leaf, end, part = tree.draw(batch), mass.cumsum(), mass.sum() * np.linspace(0, 1, batch + 1)
    assert (end[leaf] > part[:-1] - 1e-9).all() and (end[leaf] - mass[leaf] < part[1:] + 1e-9).all()
    for share, which in ((0.0, 0), (np.nextafter(1, 0), -1)):  # no rounding leads to an empty leaf
        monkeypatch.setattr(np.random, "random", lambda size, share=share: np.full(size, share))
        for _ in range(100):
            tree.set(np.arange(size), mass := some_empty())
            assert tree.draw(1)[0] == np.flatnonzero(mass)[which]


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_the_smallest_memory_always_has_a_step_to_draw_and_a_smaller_one_is_refused(stack):
    space, frame = Box(0, 255, (stack, 3, 3), np.uint8), np.zeros((2, stack, 3, 3), np.uint8)
    game = dict(env="ALE/Pong-v5", env_kwargs={"stack_num": stack})
    make = lambda size: dqn.FrameBuffer(short(**game, buffer_size=size), space, CPU, prioritized=True)
    least = 2 * (2 * stack + 1)
    with pytest.raises(dqn.UsageError, match=rf"--buffer-size {least - 1} .*\b{least}\b"):
        make(least - 1)
    buffer = make(least)
    buffer.start(frame)
    for length in (1, 2, 3, 5, 9, 1, 2, 3, 5, 9):
        for _ in range(length):
            buffer.add(np.zeros(2), np.zeros(2), np.zeros(2), frame)
        buffer.start(frame)
        assert buffer.sample(1, beta=1.0)[1] == 1  # it would not be a number


def test_a_large_memory_says_what_it_takes_and_a_checkpoint_takes_what_is_filled(monkeypatch, capsys):
    args, space = short("ALE/Pong-v5", num_envs=1, buffer_size=10**6), Box(0, 255, (4, 84, 84), np.uint8)
    make = lambda **changes: dqn.FrameBuffer(dqn.replace(args, **changes), space, CPU, False)
    monkeypatch.setattr(dqn, "free_memory", lambda device: 7.5e9)
    trained, buffer = quick(), make()
    needed = sum(x.nbytes for x in vars(buffer).values() if hasattr(x, "nbytes") and len(x) == 10**6)
    assert 7e9 < needed < 7.5e9 and f"{needed / 1e9:.3g} of 7.5 GB free" in capsys.readouterr().out
    state = buffer.state_dict()  # its storages are what torch saves
    assert sum(x.untyped_storage().nbytes() for x in state.values() if torch.is_tensor(x)) < 10_000
    for other in (make(buffer_size=90_000), make(num_envs=2)):
        with pytest.raises(ValueError, match="--buffer-size"):
            other.load_state_dict(state)
    monkeypatch.setattr(dqn, "free_memory", lambda device: 0)
    with pytest.raises(dqn.UsageError, match="smaller --buffer-size"):
        make()
    assert np.array_equal(dqn.train(dqn.parse_args(["--evaluate", "run"])), trained)  # needs no memory


# ------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("num_envs", [1, 4])
def test_no_transition_joins_two_episodes_and_a_time_limit_keeps_its_true_successor(num_envs, record):
    batches, starts, kinds = record(dqn.FrameBuffer, "transitions"), record(dqn.FrameBuffer, "start"), set()
    quick("Boundary", num_envs=num_envs, total_timesteps=400, checkpoint_every=25, batch_size=64, gamma=0.5)
    for _, batch in batches:
        columns = (batch[name].tolist() for name in ("obs", "reward", "discount", "next_obs"))
        for obs, reward, discount, next_obs in zip(*columns, strict=True):
            number, episode, t, end = map(int, obs)
            last = t + 1 == boundary_length(number, episode)
            terminates = last and boundary_terminates(number, episode)
            assert end == 0 and next_obs == [number, episode, t + 1, 1 if terminates else 2 if last else 0]
            assert (reward, discount) == (boundary_reward(episode, t + 1), 0 if terminates else 0.5)
            kinds.add((last, terminates))
    ended = sum(t == boundary_length(i, e) for evaluates, i, e, t, *_ in Boundary.steps if not evaluates)
    assert len(kinds) == 3 and sum(args[2].sum() for args, _ in starts if len(args) > 2) == ended


def test_atari_transitions_are_the_stacks_that_were_seen_and_a_lost_life_ends_nothing(record):
    starts, adds = record(dqn.FrameBuffer, "start"), record(dqn.FrameBuffer, "add")
    batches, resets = record(dqn.FrameBuffer, "transitions"), record(dqn, "reset_done")
    small = dict(total_timesteps=200, learning_starts=100, train_every=10, batch_size=8, eval_max_steps=3)
    quick("ALE/Breakout-v5", buffer_size=100, **small)
    pairs, obs = set(), starts[0][0][1]
    for (_, action, _, terminated, next_obs), _ in adds:
        assert not terminated.any()
        pairs |= {(x.tobytes(), y.tobytes(), z) for x, y, z in zip(obs, next_obs, action, strict=True)}
        obs = next_obs
    for _, batch in batches:
        columns = (batch[name].numpy() for name in ("obs", "next_obs", "action"))
        assert pairs.issuperset((x.tobytes(), y.tobytes(), z) for x, y, z in zip(*columns, strict=True))
    assert len(batches) == 11 and len({args[2]["lives"][0] for args, _ in resets}) > 1


@pytest.mark.parametrize("num_envs", [1, 3, 24])
def test_updates_and_copies_come_in_order_at_exact_steps_also_after_a_resume(num_envs, seen, record):
    record(dqn, "q_loss"), (copies := record(dqn, "polyak_update"))
    every = dict(train_every=7, updates_per_train=2, target_update_every=10, learning_starts=40)
    quick("Boundary", num_envs=num_envs, total_timesteps=120, tau=0.3, **every)
    dqn.train(dqn.parse_args("--resume run --total-timesteps 240".split()))
    expected = []
    for step in range(1, 241):
        at = math.ceil(step / num_envs) * num_envs
        expected += [("q_loss", at)] * 2 * (step >= 40 and step % 7 == 0)
        expected += [("polyak_update", at)] * (step % 10 == 0)
    assert [(call.name, call.step) for call in record.all] == expected
    networks = seen["agent"], seen["target_agent"]
    assert copies[-1][0] == [*networks, 0.3] and networks[0] is not networks[1]


def test_a_training_follows_its_schedules(seen, record):
    """All observe the same, and hardly anything is learned, so that the greedy action stays the same."""
    adds = record(dqn.FrameBuffer, "add")
    line = dict(epsilon_start=0.8, epsilon_end=0.2, exploration_fraction=0.5, learning_starts=1000)
    many = dict(num_envs=200, total_timesteps=8000, buffer_size=800, train_every=1000, log_every=200)
    quick("Ones", learning_rate=1e-9, **many, **line)
    greedy = seen["agent"].act(np.zeros((1, 4)), {})[0]
    for add, row in zip(adds, progress()[:-1], strict=True):
        ((_, action, *_), _), step, t = add, add.step, add.step - 200
        epsilon = 1 if t < 1000 else max(0.2, 0.8 - 0.6 * t / 4000)
        assert np.mean(action != greedy) == pytest.approx(epsilon / 2, abs=0.12)
        told = [row["schedule/epsilon"], 1e9 * row["schedule/learning_rate"]]
        assert row["step"] == step and told == pytest.approx([epsilon, 1 - t / 8000], rel=1e-4)


@pytest.mark.parametrize("switches", [{}, dict(per=True), ALL], ids="-".join)
def test_neither_a_stop_nor_evaluations_change_a_training(switches, monkeypatch):
    """With priorities and noise, when the ring is full, and evaluations that draw random actions."""
    given = dict(total_timesteps=160, checkpoint_every=25, buffer_size=70, sample_actions=True, **switches)
    quick("Boundary", run_dir="whole", **given)
    stop = lambda run, f=dqn.Run.checkpoint: f(run) or setattr(run, "signal", 15 * (run.env_steps == 100))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(dqn.Run, "checkpoint", stop)
        quick("Boundary", eval_every=20, **given)
    dqn.train(dqn.parse_args(["--resume", "run"]))
    same = [equal(x, parts()[name]) for name, x in parts("whole").items() if name != "run"]
    assert same == [True] * 4
    assert len([row for row in progress() if "eval/return_mean" in row]) == 9


def test_weights_to_start_from_are_those_of_the_target_too():
    quick(run_dir="first")
    quick(run_dir="second", seed=2, init_from="first", train_every=1000, target_update_every=1000)
    first = checkpoint("first")["agent"]
    assert equal(checkpoint("second")["agent"], first) and equal(checkpoint("second")["target_agent"], first)


def test_a_small_game_of_atari_is_an_image_for_the_cnn(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    args = short("benchmark.minatar_envs:MinAtar/Breakout-v1")
    env, played = dqn.make_envs(args, 1, render_mode="rgb_array"), []
    for _ in range(2):
        obs, _ = env.reset(seed=3)
        assert obs.shape == (1, 4, 10, 10) and obs.dtype == np.uint8 and set(np.unique(obs)) == {0, 255}
        played.append([obs, *(env.step(np.array([i % 3]))[0].copy() for i in range(4))])
    assert np.array_equal(*played) and not np.array_equal(played[0][0], played[0][1])
    (frame,) = env.render()
    assert frame.shape == (160, 160, 3) and frame.dtype == np.uint8 and len(np.unique(frame)) > 2
    agent = dqn.Agent(env.single_observation_space, env.single_action_space, args, CPU)
    assert isinstance(agent.trunk.cnns[0], dqn.NatureCNN)


def test_a_chain_pays_at_its_far_end(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    args = short("benchmark.hidden_envs:Chain-v0", env_kwargs={"size": 6})
    env, returns = dqn.make_envs(args, 1), []
    for action in (0, 1):
        obs, _ = env.reset(seed=1)
        assert obs.tolist() == [[1, 1, 0, 0, 0, 0]]
        steps = [env.step(np.array([action])) for _ in range(15)]
        returns.append(sum(reward[0] for _, reward, *_ in steps))
        assert [step[3][0] for step in steps] == [False] * 14 + [True] and not any(s[2][0] for s in steps)
    assert np.allclose(returns, [0.015, 12]) and obs.sum() == 2 and steps[-1][0].all()


def test_gambles_lose_a_tenth_each_and_walking_away_costs_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    env, returns = dqn.make_envs(short("benchmark.hidden_envs:Gambles-v0"), 1), []
    for episode in range(400):
        rounds = []
        obs, _ = env.reset(seed=episode)
        for i in range(10):
            assert obs.argmax() == i and obs.sum() == 1
            obs, reward, terminated, truncated, _ = env.step(np.array([1 + i % 9]))
            rounds.append(reward[0])
            assert terminated[0] == (i == 9) and not truncated[0]
        returns.append(sum(rounds))
    assert np.mean(returns) == pytest.approx(-1, abs=0.5) and np.std(returns) == pytest.approx(10**0.5, 0.1)
    env.reset(seed=1)
    _, reward, terminated, *_ = env.step(np.array([0]))
    assert reward[0] == 0 and terminated[0]


def test_a_lock_opens_to_one_sequence_of_actions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    env, right = dqn.make_envs(short("benchmark.hidden_envs:Lock-v0", env_kwargs={"size": 5}), 1), []
    for place in range(5):
        found = []
        for action in (0, 1):
            env.reset(seed=1)
            *before, (obs, reward, terminated, *_) = [env.step(np.array([a])) for a in (*right, action)]
            assert not any(step[1][0] or step[2][0] for step in before)
            moved = bool(terminated[0]) if place == 4 else obs[0, place + 1] == 1
            assert moved or obs[0, 0] == 1 and not terminated[0]
            assert reward[0] == (moved and place == 4)
            found += [action] if moved else []
        assert len(found) == 1, "the other action leads back"
        right += found
    assert len(set(right)) == 2, "not always the same action"
