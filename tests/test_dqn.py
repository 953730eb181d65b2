"""DQN's own tests. What every script must do (seeds, resume, signals, wrong inputs) is tested elsewhere."""

import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ALGOS, checkpoint, equal, load_script, points, progress
from gymnasium.spaces import Box, Discrete
from probe_envs import Probe, Spaces, boundary_length, boundary_reward, boundary_terminates
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

dqn = load_script(ALGOS / "dqn.py")
CPU = torch.device("cpu")

QUICK = dict(
    seed=1, device="cpu", eval_every=0, eval_episodes=2, checkpoint_every=0, log_every=50, num_envs=2,
    batch_size=16, buffer_size=1000, learning_starts=20, train_every=5, updates_per_train=1,
    target_update_every=10, hidden_sizes=(8,), total_timesteps=100,
)  # fmt: skip
VARIANTS = {
    "dqn": {}, "double": dict(double=True), "dueling": dict(dueling=True), "noisy": dict(noisy=True),
    "n_step": dict(n_step=4), "per": dict(per=True),
    "all": dict(double=True, dueling=True, noisy=True, n_step=4, per=True),
}  # fmt: skip


def quick_args(env: str, run_dir="run", env_kwargs=None, **changes):
    env_id = env if "-v" in env else f"probe_envs:{env}-v0"
    given = dict(env_id=env_id, env_kwargs=json.dumps(env_kwargs or {}), run_dir=str(run_dir))
    return dqn.Args(**QUICK | given | changes)


def quick(env: str, **changes) -> np.ndarray:
    """A training of a moment in one of the probe_envs, or in any environment by its id."""
    return dqn.train(quick_args(env, **changes))


@pytest.fixture
def seen(monkeypatch):
    """What a training does: its Run, and batches, updates, target updates and actions with their step."""
    log = SimpleNamespace(run=None, batches=[], asked=[], targets=[], taus=[], betas=[])

    class Watched(dqn.Run):
        def __init__(self, args, agent, **parts):
            log.run = self
            super().__init__(args, agent, **parts)

    gather, polyak, draw = dqn.ReplayBuffer.gather, dqn.polyak_update, dqn.Priorities.draw

    def watched_gather(buffer, index, *args):
        log.batches.append((log.run.env_steps, gather(buffer, index, *args)))
        log.asked.append(args)
        return log.batches[-1][1]

    def watched_polyak(*args):
        log.targets.append(log.run.env_steps)
        log.taus.append(args[2])
        polyak(*args)

    def watched_draw(self, batch_size, beta):
        log.betas.append((log.run.env_steps, beta))
        return draw(self, batch_size, beta)

    monkeypatch.setattr(dqn, "Run", Watched)
    monkeypatch.setattr(dqn.ReplayBuffer, "gather", watched_gather)
    monkeypatch.setattr(dqn, "polyak_update", watched_polyak)
    monkeypatch.setattr(dqn.Priorities, "draw", watched_draw)
    return log


# ------------------------------------------------------------------------------------------ the replay buffer
class Naive:
    """A replay buffer as simple as it can be: lists of episodes, with whole observations."""

    def __init__(self, num_envs):
        self.open, self.steps = [[] for _ in range(num_envs)], {}

    def add(self, rows, obs, action, reward, next_obs, terminated):
        for i, row in enumerate(rows):
            self.open[i].append((obs[i], action[i], reward[i], next_obs[i], terminated[i]))
            self.steps[row] = self.open[i], len(self.open[i]) - 1

    def cut(self, envs):
        for i in envs:
            self.open[i] = []

    def transition(self, row, gamma, n_step):
        episode, t = self.steps[row]
        steps = episode[t : t + n_step]
        return_ = sum(gamma**k * step[2] for k, step in enumerate(steps))
        discount = 0.0 if steps[-1][4] else gamma ** len(steps)
        return steps[0][0], steps[0][1], return_, discount, steps[-1][3]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("stack, size", [(1, 31), (4, 62), (4, 700)])
def test_the_buffer_equals_a_naive_one(stack, size, num_envs, n_step):
    """Random terminations, truncations and segment cuts, many laps of the ring, a reload in between; bits."""
    rng, gamma = np.random.default_rng(0), 0.9
    shape = (stack, 2, 3) if stack > 1 else (3,)
    space = Box(0, 255, shape, np.uint8) if stack > 1 else Box(-9, 9, shape, np.float32)
    make = lambda: dqn.ReplayBuffer(size, num_envs, space, Discrete(5), CPU, stack)
    draw = lambda: rng.integers(0, 256, (num_envs, *shape)).astype(space.dtype)
    buffer, naive, held = make(), Naive(num_envs), 0
    obs = draw()  # older images of a first stack are of any kind, not only zeros or copies
    buffer.start(obs)
    for t in range(150):
        action, reward = rng.integers(0, 5, num_envs), rng.normal(size=num_envs).astype(np.float32)
        next_obs = draw()
        if stack > 1:
            next_obs[:, :-1] = obs[:, 1:]
        terminated, truncated = rng.random((2, num_envs)) < 0.08
        rows = buffer.row.copy()
        buffer.add(action, reward, terminated, next_obs)
        naive.add(rows, obs, action, reward, next_obs, terminated)
        done, obs = terminated | truncated, next_obs
        naive.cut(np.flatnonzero(done))
        if done.any():
            obs = np.where(done.reshape(-1, *[1] * len(shape)), draw(), next_obs)
            buffer.start(obs, done)
        if t % 40 == 39:  # a new segment
            state, buffer, obs = buffer.state_dict(), make(), draw()
            buffer.load_state_dict(state)
            naive.cut(range(num_envs))
            buffer.start(obs)
        index = np.flatnonzero(buffer.valid)
        if len(index) and t % 5 == 0:
            batch = buffer.gather(index, gamma, n_step)
            held = max(held, len(index))
            for i, row in enumerate(index):
                expected = naive.transition(row, gamma, n_step)
                for name, k in {"obs": 0, "action": 1, "next_obs": 4}.items():
                    assert np.array_equal(batch[name][i].numpy(), expected[k]), name
                assert batch["reward"][i] == pytest.approx(expected[2], abs=1e-5)
                assert batch["discount"][i] == pytest.approx(expected[3], abs=1e-6)
    assert held > min(0.45 * size, 140 * num_envs)


def test_every_valid_row_is_drawn_equally_often():
    buffer = dqn.ReplayBuffer(60, 2, Box(-1, 1, (1,)), Discrete(2), CPU)
    zeros = np.zeros(2)
    buffer.start(zeros[:, None])
    for t in range(70):
        buffer.add(zeros, zeros, zeros > 0, zeros[:, None])
        if t % 4 == 0:
            buffer.start(zeros[:, None], np.array([True, t % 8 == 0]))
    np.random.seed(0)
    count = np.bincount(buffer.draw(60_000), minlength=60)
    assert 30 < buffer.valid.sum() < 58 and not count[~buffer.valid].any()
    expected = 60_000 / buffer.valid.sum()
    assert ((count[buffer.valid] - expected) ** 2 / expected).sum() < 100  # chi-square, about 45 degrees


def test_a_million_atari_steps_fit_into_7_5_gb_and_too_large_a_buffer_is_refused(monkeypatch, capsys):
    space = Box(0, 255, (4, 84, 84), np.uint8)
    monkeypatch.setattr(dqn, "free_memory", lambda device: 7.5e9)
    buffer = dqn.ReplayBuffer(1_000_000, 1, space, Discrete(6), CPU, 4)
    arrays = [buffer.obs.numpy(), *(getattr(buffer, name) for name in buffer.COLUMNS)]
    bytes_ = sum(array.nbytes for array in arrays)
    assert len(buffer.obs) == 1_000_000 and bytes_ <= 7.5e9
    assert f"{bytes_ / 1e9:.2f} GB" in capsys.readouterr().out
    monkeypatch.setattr(dqn, "free_memory", lambda device: bytes_ - 1)
    with pytest.raises(dqn.UsageError, match=r"7\.07 GB.*--buffer-size"):
        dqn.ReplayBuffer(1_000_000, 1, space, Discrete(6), CPU, 4)
    with pytest.raises(dqn.UsageError, match="--buffer-size 10 .*18"):
        dqn.ReplayBuffer(10, 2, space, Discrete(6), CPU, 4)


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_the_smallest_buffer_always_has_a_step_to_draw(stack):
    space = Box(0, 255, (stack, 3, 3), np.uint8)
    buffer = dqn.ReplayBuffer(2 * stack + 1, 1, space, Discrete(2), CPU, stack)
    obs = np.zeros((1, stack, 3, 3), np.uint8)
    buffer.start(obs)
    for length in (1, 2, 3, 5, 9) * 5:
        for _ in range(length):
            buffer.add(np.zeros(1, int), np.zeros(1), np.zeros(1, bool), obs)
            assert buffer.valid.any()
        buffer.start(obs)
        assert buffer.valid.any(), "also after the first rows of a new episode"


def test_a_container_s_memory_is_free_only_as_far_as_it_is_not_in_use(monkeypatch):
    texts = {"memory.max": "8000\n", "memory.current": "7000\n", "meminfo": "MemAvailable:  9000 kB"}
    texts["memory.stat"] = (
        "anon 6000\nfile 1000\ninactive_file 300\nactive_file 200\n"  # given back when asked for
    )
    exists, read_text = Path.exists, Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: path.name in texts or exists(path))
    monkeypatch.setattr(Path, "read_text", lambda path: texts.get(path.name) or read_text(path))
    assert dqn.free_memory(CPU) == 1500
    texts["memory.max"] = "max\n"
    assert dqn.free_memory(CPU) == 9000 * 1024


def test_a_checkpoint_holds_only_the_filled_part_of_the_buffer_and_refuses_another_size():
    make = lambda size, num_envs=2: dqn.ReplayBuffer(size, num_envs, Box(-1, 1, (9,)), Discrete(2), CPU)
    buffer, file = make(100_000), io.BytesIO()
    buffer.start(np.zeros((2, 9)))
    for _ in range(5):
        buffer.add(np.zeros(2), np.zeros(2), np.zeros(2) > 0, np.zeros((2, 9)))
    torch.save(buffer.state_dict(), file)
    assert len(file.getvalue()) < 10_000
    for other in (make(90_000), make(100_000, 1)):
        with pytest.raises(ValueError, match="--buffer-size"):
            other.load_state_dict(buffer.state_dict())


# ----------------------------------------------------------------------------------------- prioritized replay
@pytest.mark.parametrize("size", [1, 128, 129, 20_000])
def test_sum_tree_finds_the_leaf_of_each_share_and_never_an_empty_one(size):
    rng, tree = np.random.default_rng(size), dqn.SumTree(size)
    mass = np.where(rng.random(size) < 0.4, 0.0, rng.random(size))
    mass[size // 2] = 3.0
    tree.set(np.arange(size), rng.random(size))
    tree.set(np.arange(size), mass)
    share = np.concatenate([rng.random(2000), [0.0, np.nextafter(1, 0)]])
    leaf = tree.find(share)
    assert leaf.max() < size and (mass[leaf] > 0).all()
    ends = mass.cumsum()
    value = share * ends[-1]
    assert (value <= ends[leaf] + 1e-9).all() and (value >= ends[leaf] - mass[leaf] - 1e-9).all()


def test_sums_stay_right_at_a_million_leaves():
    rng, tree = np.random.default_rng(0), dqn.SumTree(1_000_000)
    for _ in range(100):  # magnitudes that would leave traces in running sums; indices may repeat
        index = rng.integers(0, 1_000_000, 32)
        tree.set(np.concatenate([index, index[:3]]), 10.0 ** rng.uniform(-6, 6, 35))
    total = tree.mass.sum()
    for level in tree.levels:
        assert level.sum() == pytest.approx(total, rel=1e-12)
    tree.set(np.arange(1_000_000), np.zeros(1_000_000))
    assert tree.levels[-1].sum() == 0


def filled(size=40, **kwargs):
    """A buffer with priorities, and 30 steps in it."""
    buffer = dqn.ReplayBuffer(size, 1, Box(-1, 1, (1,)), Discrete(2), CPU)
    priorities = dqn.Priorities(buffer, **dict(alpha=0.6, eps=0.01) | kwargs)
    buffer.start(np.zeros((1, 1)))
    for _ in range(30):
        step(buffer)
    return buffer, priorities


def step(buffer, done=False):
    buffer.add(np.zeros(1), np.zeros(1), np.array([done]), np.zeros((1, 1)))
    if done:
        buffer.start(np.zeros((1, 1)))


def test_prioritized_frequencies_and_weights():
    buffer, priorities = filled()
    error = np.linspace(-2, 3, 30)
    priorities.refresh()
    priorities.drawn, priorities.td_error = np.arange(30), torch.tensor(error)
    np.random.seed(0)
    drawn, weight = zip(*(priorities.draw(50, beta=0.7) for _ in range(1000)), strict=True)
    p = (np.abs(error) + 0.01) ** 0.6
    p = p / p.sum()
    expected, count = 50_000 * p, np.bincount(np.concatenate(drawn), minlength=30)
    assert ((count - expected) ** 2 / expected).sum() < 60  # chi-square, 29 degrees
    w = (30 * p) ** -0.7  # (N P(i))^-beta
    for index, w_batch in zip(drawn, weight, strict=True):
        assert w_batch == pytest.approx(w[index] / w[index].max(), rel=1e-6)
    # one from each 50th part of the mass
    part = np.searchsorted(p.cumsum(), (np.arange(51)) / 50 - 1e-9).clip(max=29)
    assert all((index >= part[:-1]).all() and (index <= part[1:]).all() for index in drawn)


def test_new_transitions_get_the_largest_priority_and_lost_rows_none():
    buffer, priorities = filled(eps=0.5)
    priorities.refresh()
    assert (priorities.tree.mass[:30] == 1).all() and not priorities.tree.mass[30:].any()
    priorities.draw(4, beta=1.0)
    priorities.drawn, priorities.td_error = np.array([3, 4, 29]), torch.tensor([-7.5, 1.5, 0.0])
    for _ in range(14):  # the ring goes round: rows 0 to 4 are lost
        step(buffer)
    step(buffer, done=True)
    priorities.refresh()
    mass = priorities.tree.mass
    assert ((mass[:40] > 0) == buffer.valid).all() and not mass[40:].any()
    assert mass[29] == 0.5**0.6 and mass[10] == 1
    assert mass[3] == mass[35] == 8.0**0.6, "new ones at the maximum, also where an old error had its place"
    other, copy = filled(eps=0.5)
    other.load_state_dict(buffer.state_dict())
    copy.load_state_dict(priorities.state_dict())
    copy.refresh()
    assert all(np.array_equal(a, b) for a, b in zip(priorities.tree.levels, copy.tree.levels, strict=True))
    assert copy.largest == 8.0
    priorities.drawn, priorities.td_error = np.array([10]), torch.tensor([0.1])
    step(buffer)
    assert len(priorities.state_dict()["mass"]) == buffer.filled and priorities.td_error is None
    assert mass[10] == pytest.approx(0.6**0.6) and priorities.largest == 8.0, "it never falls"


def test_beta_rises_to_1_and_priorities_are_errors_not_losses(seen, monkeypatch):
    errors = []
    refresh = dqn.Priorities.refresh

    def watched(self):
        rows, td_error, new = self.drawn, self.td_error, np.concatenate([*self.buffer.marked, []])
        refresh(self)
        if td_error is not None:
            once = [np.sum(rows == row) == 1 and row not in new for row in rows]
            errors.append((self.tree.mass[rows][once], td_error.abs().numpy()[once]))

    monkeypatch.setattr(dqn.Priorities, "refresh", watched)
    own = dict(per_beta_start=0.2, per_alpha=0.5, per_eps=0.25, updates_per_train=2)
    quick("Boundary", per=True, total_timesteps=400, **own)
    assert len(errors) == len(seen.betas) > 60, "the errors of every update"
    for mass, error in errors:
        assert len(mass) and mass == pytest.approx((error + 0.25) ** 0.5, rel=1e-5)
    for env_steps, beta in seen.betas:
        assert beta == pytest.approx(0.2 + 0.8 * (env_steps - 2) / 400)
    assert seen.betas[-1][1] > 0.99


# ---------------------------------------------------------------------------------------------- the equations
def test_td_target_bootstrap_and_loss_equal_numbers_worked_out_by_hand():
    target_q, online_q = torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.tensor([[3.0, 2.0], [0.0, 1.0]])
    assert dqn.bootstrap_value(target_q).tolist() == [5, 4]
    assert dqn.bootstrap_value(target_q, online_q).tolist() == [1, 2], "online chooses, target judges"
    y = dqn.td_target(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), torch.tensor([10.0, 10.0]))
    assert y.tolist() == [6, 2]
    error = torch.tensor([0.5, -3.0])
    assert dqn.q_loss(error, "huber").item() == (0.125 + 2.5) / 2
    assert dqn.q_loss(error, "mse").item() == (0.125 + 4.5) / 2
    assert dqn.q_loss(error, "huber", torch.tensor([1.0, 0.2])).item() == pytest.approx((0.125 + 0.5) / 2)
    random = torch.randn(100) * 3
    assert dqn.q_loss(random, "huber") == pytest.approx(F.huber_loss(random, torch.zeros(100)).item())


@pytest.mark.parametrize("per", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_a_training_minimizes_what_its_flags_say(loss, double, per, seen, monkeypatch):
    real, draw = dqn.q_loss, dqn.Priorities.draw
    drawn, errors, differs = [], [], 0

    def watched_draw(*args):
        drawn.append(draw(*args))
        return drawn[-1]

    @torch.no_grad()
    def check(td_error, kind, weight):
        nonlocal differs
        batch, agent, target = seen.batches[-1][1], seen.run.agent, seen.run.parts["target"]
        rows = torch.arange(len(td_error))
        by_target, by_agent = target(batch["next_obs"]), agent(batch["next_obs"])
        best = (by_agent if double else by_target).argmax(1)
        differs += (by_target.argmax(1) != by_agent.argmax(1)).any().item()
        q_value = agent(batch["obs"])[rows, batch["action"]]
        expected = batch["reward"] + batch["discount"] * by_target[rows, best] - q_value
        torch.testing.assert_close(td_error, expected)
        assert kind == loss and (weight is not None) == per
        if per:
            torch.testing.assert_close(weight.double(), torch.from_numpy(drawn[-1][1]), rtol=1e-5, atol=1e-6)
        errors.append((expected, q_value))

    def watched_loss(td_error, kind, weight):
        check(td_error.detach(), kind, weight)
        return real(td_error, kind, weight)

    monkeypatch.setattr(dqn, "q_loss", watched_loss)
    monkeypatch.setattr(dqn.Priorities, "draw", watched_draw)
    flags = dict(loss=loss, double=double, per=per, n_step=3, gamma=0.9, tau=0.5)
    quick("Walk", learning_rate=0.05, adam_eps=0.125, target_update_every=50, total_timesteps=200, **flags)
    assert len(errors) > 30 and differs > 5, "online and target networks disagree about the best action"
    assert set(seen.asked) == {(0.9, 3)} and set(seen.taus) == {0.5}
    assert checkpoint()["optimizer"]["param_groups"][0]["eps"] == 0.125
    (td_error, q_value), row = errors[-1], progress()[-1]
    assert float(row["loss/td_error"]) == pytest.approx(td_error.abs().mean().item(), rel=1e-4)
    assert float(row["q/max"]) == pytest.approx(q_value.max().item(), rel=1e-4)
    assert float(row["q/mean"]) == pytest.approx(q_value.mean().item(), rel=1e-4)


def network(**changes):
    torch.manual_seed(0)
    args = quick_args("Walk", hidden_sizes=(16,), **changes)
    return dqn.QNetwork(Box(-1, 1, (3,)), 4, args)


@pytest.mark.parametrize("noisy", [False, True])
def test_dueling_advantages_have_mean_zero(noisy):
    net, obs = network(dueling=True, noisy=noisy).eval(), torch.randn(10, 3)
    value, advantage = net.value(obs), net.advantage(obs)
    assert value.shape == (10, 1) and advantage.shape == (10, 4)
    assert torch.allclose(net(obs).mean(dim=1, keepdim=True), value, atol=1e-6)
    assert torch.allclose(net(obs) - value, advantage - advantage.mean(1, keepdim=True), atol=1e-6)
    assert (net(obs).argmax(1) == advantage.argmax(1)).all()


@pytest.mark.parametrize("kind", ["factorized", "independent"])
def test_noise(kind):
    torch.manual_seed(0)
    layer = dqn.NoisyLinear(9, 6, kind)
    draws = [layer.noise() for _ in range(2000)]
    eps_w, eps_b = draws[0]
    assert eps_w.shape == (6, 9) and eps_b.shape == (6,)
    assert torch.linalg.matrix_rank(eps_w) == (1 if kind == "factorized" else 6)
    if kind == "factorized":  # f(a) f(b) in the weights, f(a) in the biases
        row = eps_w / eps_b[:, None]
        assert torch.allclose(row, row[:1].expand(6, -1), rtol=1e-4)
    weights, biases = (torch.stack(x) for x in zip(*draws, strict=True))
    variance = 2 / torch.pi if kind == "factorized" else 1  # of f(x) it is E|x|
    assert biases.square().mean() == pytest.approx(variance**0.5 if kind == "factorized" else 1, rel=0.05)
    assert weights.square().mean() == pytest.approx(variance, rel=0.05)
    assert abs(weights.mean()) < 0.02 and abs(biases.mean()) < 0.02
    bound, sigma = ((1 / 9) ** 0.5, 0.5 / 3) if kind == "factorized" else ((3 / 9) ** 0.5, 0.017)
    assert 0.9 * bound < layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
    assert (layer.weight_sigma == sigma).all() and (layer.bias_sigma == sigma).all()
    x = torch.randn(5, 9)
    layer.noise = lambda: (eps_w, eps_b)
    by_hand = x @ (layer.weight + layer.weight_sigma * eps_w).T + layer.bias + layer.bias_sigma * eps_b
    assert torch.allclose(layer(x), by_hand, atol=1e-5)
    assert torch.equal(layer.eval()(x), F.linear(x, layer.weight, layer.bias)), "no noise in evaluation"


@pytest.mark.parametrize("kind", ["factorized", "independent"])
def test_both_streams_have_the_noise_and_the_activation_that_were_asked_for(kind):
    net = network(noisy=True, dueling=True, noise_type=kind, activation="tanh")
    for stream in (net.advantage, net.value):
        first, nonlinearity, last = stream
        assert isinstance(nonlinearity, torch.nn.Tanh)
        assert all(isinstance(layer, dqn.NoisyLinear) for layer in (first, last))
        assert {first.factorized, last.factorized} == {kind == "factorized"}


def test_values_start_small_and_of_the_scale_of_their_features():
    head = network().advantage[-1].weight.detach()  # 4 actions from 16 features, orthogonal
    torch.testing.assert_close(head @ head.T, torch.eye(4), atol=1e-5, rtol=0)


def test_noise_is_drawn_anew_in_each_pass_and_apart_for_both_networks():
    net, obs = network(noisy=True), torch.randn(1, 3)
    outputs = torch.stack([net(obs) for _ in range(4)])
    assert len(outputs.unique(dim=0)) == 4
    net.eval()
    assert torch.equal(net(obs), net(obs))
    names = {name.split(".")[0] for name, _ in network(noisy=True, dueling=True).named_parameters()}
    assert names == {"advantage", "value"}, "all layers of a network with one hidden layer are noisy"
    plain = dict(network(noisy=False).named_parameters())
    assert not any("sigma" in name for name in plain)


def test_each_pass_of_an_update_has_noise_of_its_own(monkeypatch):
    """Both networks in the next states and the online one in the states, two layers each."""
    drawn, updates, noise, loss = [], [], dqn.NoisyLinear.noise, dqn.q_loss

    def watched_noise(self):
        drawn.append(noise(self))
        return drawn[-1]

    def watched_loss(*args):
        updates.append(drawn.copy())
        drawn.clear()
        return loss(*args)

    monkeypatch.setattr(dqn.NoisyLinear, "noise", watched_noise)
    monkeypatch.setattr(dqn, "q_loss", watched_loss)
    monkeypatch.setattr(dqn, "on_host", lambda *_: lambda obs: np.zeros((len(obs), 2)))  # no noise of acting
    quick("Walk", noisy=True, double=True)
    assert len(updates) > 5
    for update in updates:
        assert len(update) == 3 * 2, "three passes through two layers"
        assert len({weight[0].numpy().tobytes() for weight in update}) == 6


def test_the_network_of_atari_is_that_of_mnih_et_al():
    trunk = dqn.make_trunk(Box(0, 255, (4, 84, 84), np.uint8), (512,), "relu")
    shapes = [tuple(p.shape) for p in trunk.parameters() if p.ndim > 1]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]
    assert [layer.stride[0] for layer in trunk if isinstance(layer, torch.nn.Conv2d)] == [4, 2, 1]


def test_noisy_training_explores_without_epsilon_and_evaluates_without_noise(seen, monkeypatch):
    modes, evaluates = [], [False]
    forward, evaluate = dqn.NoisyLinear.forward, dqn.evaluate

    def watched_forward(self, x):
        modes.append((evaluates[0], self.training, len(x)))
        return forward(self, x)

    def watched_evaluate(*args):
        evaluates[0] = True
        scores = evaluate(*args)
        evaluates[0] = False
        return scores

    monkeypatch.setattr(dqn.NoisyLinear, "forward", watched_forward)
    monkeypatch.setattr(dqn, "evaluate", watched_evaluate)
    quick("Walk", noisy=True, total_timesteps=200, eval_every=50, env_kwargs=dict(actions="discrete"))
    assert all(training != evaluating for evaluating, training, _ in modes)
    acted = sum(1 for evaluating, _, n in modes if n == 2 and not evaluating) / 2  # layers
    assert acted == (200 - 20) / 2, "after the random start the network chooses every action"
    assert all(row["schedule/epsilon"] == "0.0" for row in progress()[1:])


# ----------------------------------------------------------------------------------------- episode boundaries
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs, async_envs", [(1, False), (4, False), (4, True)])
def test_no_trained_transition_joins_two_episodes(num_envs, async_envs, n_step, seen):
    quick("Boundary", num_envs=num_envs, async_envs=async_envs, n_step=n_step, gamma=0.9, batch_size=64,
          total_timesteps=400, checkpoint_every=100, buffer_size=200)  # fmt: skip
    ends = set()
    for _, batch in seen.batches:
        columns = (batch[name].numpy() for name in ("obs", "reward", "discount", "next_obs"))
        for obs, reward, discount, next_obs in zip(*columns, strict=True):
            number, episode, t, end = map(int, obs)
            k = int(next_obs[2]) - t
            assert end == 0 and next_obs[:2].tolist() == [number, episode], "one episode"
            assert 1 <= k <= n_step
            last = t + k == boundary_length(number, episode)
            terminated = last and boundary_terminates(number, episode)
            assert next_obs[3] == (1 if terminated else 2 if last else 0)
            return_ = sum(0.9**i * boundary_reward(episode, t + 1 + i) for i in range(k))
            assert reward == pytest.approx(return_, rel=1e-5)
            assert discount == pytest.approx(0 if terminated else 0.9**k, rel=1e-5)
            ends.add((k, last, terminated))
    assert ends >= {(n_step, False, False), (1, True, True), (1, True, False)}


@pytest.mark.parametrize("variant", ["dqn", "n_step"])
def test_values_are_of_the_endless_sum_where_episodes_are_only_truncated(variant, seen):
    """1 per step for ever is worth 1 / (1 - 0.8) = 5; the truncated sum of 10 steps would be at most 4.5."""
    settings = dict(total_timesteps=1000, train_every=1, learning_rate=0.03, loss="mse",
                    target_update_every=6, epsilon_end=1.0)  # fmt: skip
    quick("Ones", gamma=0.8, **settings, **VARIANTS[variant])
    q = seen.run.agent(torch.zeros(1, 4))
    assert q.flatten().tolist() == pytest.approx([5, 5], abs=0.05)


# ------------------------------------------------------------------------------------ intervals and schedules
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_updates_come_at_exact_intervals_of_environment_steps(num_envs, seen):
    """Neither interval is a multiple of the other or of num_envs; and after a resume they go on alike."""
    due = dict(num_envs=num_envs, train_every=7, updates_per_train=2, target_update_every=10,
               learning_starts=40, checkpoint_every=48)  # fmt: skip
    quick("Boundary", total_timesteps=120, **due)
    args = dqn.replace(quick_args("Boundary", total_timesteps=240, **due), run_dir="", resume="run")
    dqn.train(args)
    steps = np.arange(40, 241)
    after = lambda multiples: [int(np.ceil(step / num_envs) * num_envs) for step in multiples]
    assert [step for step, _ in seen.batches] == np.repeat(after(steps[steps % 7 == 0]), 2).tolist()
    assert seen.targets == after(steps[steps % 10 == 0])


def test_targets_are_updated_between_the_right_updates_of_one_vector_step(monkeypatch):
    """With more environments than an interval, updates and target updates keep the order of their steps."""
    order = []
    sample, polyak = dqn.ReplayBuffer.sample, dqn.polyak_update
    monkeypatch.setattr(dqn.ReplayBuffer, "sample", lambda *args: (order.append("u"), sample(*args))[1])
    monkeypatch.setattr(dqn, "polyak_update", lambda *args: (order.append("t"), polyak(*args)))
    quick("Boundary", num_envs=12, learning_starts=13, train_every=2, target_update_every=6,
          total_timesteps=24)  # fmt: skip
    assert "".join(order) == "uuutuuut"


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_tau_moves_the_target(tau):
    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    expected = [(1 - tau) * b + tau * a for a, b in zip(one.parameters(), two.parameters(), strict=True)]
    before = [p.clone() for p in one.parameters()]
    dqn.polyak_update(one, two, tau)
    assert all(torch.allclose(p, e) for p, e in zip(two.parameters(), expected, strict=True))
    assert all(map(torch.equal, one.parameters(), before))
    assert tau < 1 or all(map(torch.equal, one.parameters(), two.parameters()))


def test_epsilon_falls_linearly_after_a_random_start(monkeypatch):
    asked = []
    random = np.random.random
    monkeypatch.setattr(np.random, "random", lambda size: asked.append(size) or np.linspace(0, 0.999, size))
    monkeypatch.setattr(dqn, "on_host", lambda *modules: lambda obs: np.array([[0.0, 1.0]] * len(obs)))
    monkeypatch.setattr(np.random, "randint", lambda *args, size: np.zeros(size, dtype=int))
    monkeypatch.setattr(dqn.ReplayBuffer, "draw", lambda self, n: np.flatnonzero(self.valid)[:n])
    monkeypatch.setattr(dqn.ReplayBuffer, "add", lambda self, action, *_: taken.append(action.tolist()))
    taken = []
    quick("Boundary", num_envs=10, learning_starts=40, train_every=1000, total_timesteps=200,
          epsilon_start=0.9, epsilon_end=0.1, exploration_fraction=0.5, eval_every=0)  # fmt: skip
    monkeypatch.setattr(np.random, "random", random)
    share = [actions.count(0) / 10 for actions in taken]  # 0 is random, 1 greedy
    assert share[:4] == [1.0] * 4
    expected = [max(0.1, 0.9 - 0.8 * step / 100) for step in range(40, 200, 10)]
    assert share[4:] == pytest.approx(expected, abs=0.1)
    assert share[-1] == pytest.approx(0.1, abs=0.05) and asked


def test_rewards_are_clipped_and_scaled_for_learning_only(seen):
    quick("Boundary", clip_reward=True, reward_scale=0.5)
    assert all((batch["reward"] == 0.5).all() for _, batch in seen.batches)
    assert max(return_ for _, return_ in points()["train/episode_return"]) > 100


def test_max_grad_norm_and_learning_rate(seen, monkeypatch):
    steps = []
    step = torch.optim.Adam.step

    def watched(self, *args):
        (group,) = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        steps.append((seen.run.env_steps, float(group["lr"]), norm.item()))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    quick("Boundary", max_grad_norm=0.5, learning_rate=0.01)
    assert max(norm for *_, norm in steps) == pytest.approx(0.5, rel=1e-3)
    for env_steps, rate, _ in steps:
        assert rate == pytest.approx(0.01 * (1 - (env_steps - 2) / 100))
    assert float(progress()[-1]["grad/norm"]) > 0.5 == float(progress()[-1]["grad/norm_clipped"])
    steps.clear()
    quick("Boundary", run_dir="two", max_grad_norm=0.0, anneal_lr=False, learning_rate=0.01)
    assert max(norm for *_, norm in steps) > 0.5
    assert all(rate == pytest.approx(0.01) for _, rate, _ in steps)


def test_normalizer_is_shared_saved_and_frozen_in_evaluation(seen):
    quick("Boundary", normalize_obs=True, eval_every=50)
    agent = seen.run.agent
    target = seen.run.parts["target"]
    assert target.obs_norm is agent.obs_norm and agent.obs_norm.count == 100
    assert agent.obs_norm.mean[3] == 0, "it sees what is acted from, so no observation that ends an episode"
    assert checkpoint()["agent"]["obs_norm.count"] == 100
    assert equal(checkpoint()["target"]["obs_norm.mean"], agent.obs_norm.mean)


# --------------------------------------------------------------------------------------------- probe problems
class OneStep(Probe):
    """One step; two states; the action that equals the state pays 1, the other -1."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self.observe(), info

    def observe(self):
        return np.eye(4, dtype=np.float32)[getattr(self, "state", 0)]

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0 if action == self.state else -1.0, True, False, {}


class TwoSteps(Probe):
    """Nothing, then 2: the value of the first state is 2 gamma, of the second 2, whatever is done."""

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.t]

    def step(self, action):
        self.t += 1
        return self.observe(), 2.0 * (self.t == 2), self.t == 2, False, {}


class Delayed(Probe):
    """The first action alone decides what the third step pays: 1 for action 1, else -1."""

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.t] * (1.0 if self.t == 0 or self.choice else -1.0)

    def step(self, action):
        self.choice = action if self.t == 0 else self.choice
        self.t += 1
        return self.observe(), (1.0 if self.choice else -1.0) * (self.t == 3), self.t == 3, False, {}


for entry in (OneStep, TwoSteps, Delayed):
    gym.register(f"{entry.__name__}-v0", entry_point=entry, disable_env_checker=True)

EYE = torch.eye(4)
TRUTH = {  # states, the values of both actions there, and which states the best policy visits
    "OneStep-v0": (EYE[:2], [[1, -1], [-1, 1]], [0, 1]),
    "TwoSteps-v0": (EYE[:2], [[1, 1], [2, 2]], [0, 1]),
    "Delayed-v0": (torch.stack([EYE[0], EYE[1], -EYE[1], EYE[2], -EYE[2]]),
                   [[-0.25, 0.25], [0.5, 0.5], [-0.5, -0.5], [1, 1], [-1, -1]], [0, 1, 3]),
}  # fmt: skip


@pytest.mark.parametrize("env_id", TRUTH)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_solves_the_probes_exactly(variant, env_id, seen):
    """All values of all actions; with noise, which stops trying the worse ones, those of the best policy."""
    returns = quick(env_id, gamma=0.5, hidden_sizes=(32,), learning_rate=0.01, total_timesteps=1200,
                    train_every=2, target_update_every=20, learning_starts=100, epsilon_end=1.0, loss="mse",
                    **VARIANTS[variant])  # fmt: skip
    obs, truth, visited = TRUTH[env_id]
    q, truth = seen.run.agent.eval()(obs), torch.tensor(truth, dtype=torch.float32)
    if VARIANTS[variant].get("noisy"):
        q, truth = q.max(dim=1).values[visited], truth.max(dim=1).values[visited]
    assert torch.allclose(q, truth, atol=0.05), q
    assert (returns == (2 if env_id == "TwoSteps-v0" else 1)).all()


def test_all_32_combinations_train_and_resume():
    names = "double dueling noisy n_step per".split()
    for on in itertools.product([False, True], repeat=5):
        switches = {name: (4 if name == "n_step" else True) for name, x in zip(names, on, strict=True) if x}
        run = "-".join(["run", *switches])
        quick("Boundary", run_dir=run, total_timesteps=60, **switches)
        args = quick_args("Boundary", run_dir="", resume=run, total_timesteps=80, **switches)
        assert len(dqn.train(args)) == 2
        assert progress(run)[-1]["step"] == "80" and "loss/q" in progress(run)[-1]


@pytest.fixture
def kill_and_resume(monkeypatch):
    """Trains until the checkpoint of a step is written, dies there, and goes on from it."""

    def run(step, env, **settings):
        def kill(self, path, **parts):
            saved = save(self, path, **parts)
            if path.name == "checkpoint.pt" and self.env_steps == step:
                self.writer.close()
                raise KeyboardInterrupt
            return saved

        save = dqn.Run.save
        monkeypatch.setattr(dqn.Run, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            quick(env, **settings)
        monkeypatch.setattr(dqn.Run, "save", save)
        dqn.train(dqn.parse_args(["--resume", "run"]))

    return run


@pytest.mark.parametrize("variant", ["per", "all"])
def test_a_killed_run_ends_as_an_uninterrupted_one_with_priorities_and_noise_too(variant, kill_and_resume):
    settings = VARIANTS[variant] | dict(checkpoint_every=50, buffer_size=80, normalize_obs=True)
    quick("Boundary", run_dir="whole", total_timesteps=150, **settings)
    kill_and_resume(100, "Boundary", total_timesteps=150, **settings)
    whole, resumed = checkpoint("whole"), checkpoint()
    assert whole.keys() == resumed.keys() >= {"priorities", "buffer", "target"}
    assert all(equal(whole[part], resumed[part]) for part in whole.keys() - {"run"})


def test_a_resumed_run_logs_what_the_uninterrupted_one_does_where_no_update_is_near(kill_and_resume):
    settings = dict(checkpoint_every=40, log_every=10, train_every=30, total_timesteps=80)
    quick("Walk", run_dir="whole", **settings)
    whole = progress("whole")
    kill_and_resume(40, "Walk", **settings)
    assert progress() == whole
    assert "loss/q" in whole[3] and "loss/q" not in whole[4], "after a checkpoint there is no last update"


def test_priorities_must_be_there_from_the_start():
    quick("Walk")
    with pytest.raises(dqn.UsageError, match="keep the flags of the run"):
        dqn.train(dqn.parse_args(["--resume", "run", "--per", "--total-timesteps", "200"]))
    quick("Walk", run_dir="per", per=True)
    with pytest.raises(dqn.UsageError, match="keep the flags of the run"):
        dqn.train(dqn.parse_args(["--resume", "per", "--no-per", "--total-timesteps", "200"]))


def test_a_signal_does_not_save_what_is_not_finite(seen):
    quick("Walk", total_timesteps=100)
    kept = checkpoint()["run"]["env_steps"]

    def spoil(optimizer, *_):
        if seen.run.env_steps > 130:
            next(seen.run.agent.parameters()).data.fill_(float("nan"))
            seen.run.signal = 15

    handle = register_optimizer_step_post_hook(spoil)
    args = ["--resume", "run", "--total-timesteps", "2000", "--log-every", "1000"]
    with pytest.raises(FloatingPointError, match=f"run has the checkpoint of step {kept}"):
        dqn.train(dqn.parse_args(args))
    handle.remove()
    seen.run.writer.close()
    assert checkpoint()["run"]["env_steps"] == kept


def test_a_stack_of_eight_images_is_played_too():
    """--evaluate makes the smallest buffer there is, for a stack of any height."""
    given = vars(
        dqn.parse_args(["--env-id", "ALE/Pong-v5", "--env-kwargs", '{"stack_num": 8}', "--device", "cpu"])
    )
    small = dict(run_dir="run", total_timesteps=30, buffer_size=100, learning_starts=20, batch_size=4,
                 hidden_sizes=(8,), eval_every=0, eval_episodes=1, max_episode_steps=5)  # fmt: skip
    dqn.train(dqn.Args(**given | small))
    assert len(dqn.train(dqn.parse_args(["--evaluate", "run"]))) == 1


@pytest.mark.parametrize("env_id, words", [("Pendulum-v1", ["Discrete", "Box", "sac.py"])])
def test_other_action_spaces_are_refused(env_id, words):
    with pytest.raises(dqn.UsageError) as error:
        quick(env_id)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("obs", ["float64", "hwc", "small", "discrete_start"])
def test_observations_become_what_networks_take_and_actions_are_legal(obs, seen):
    """float64 is stored as float32, images as bytes; actions of a space that starts at 5 are from there."""
    quick("Spaces", env_kwargs=dict(obs=obs, action="discrete_start"), total_timesteps=40)
    stored = seen.run.parts["buffer"].obs
    assert stored.dtype == (torch.uint8 if obs in ("hwc", "small") else torch.float32)
    assert seen.run.parts["buffer"].stack == 1, "only the images of Atari are stacks"
    assert set(map(int, Spaces.actions)) == {5, 6, 7}


@pytest.mark.parametrize("variant", ["dqn", "all"])
def test_compiled_and_plain_checkpoints_load_in_each_other(variant, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f: lambda *args: f(*args))
    for compiled in (False, True):
        run = f"run{compiled}"
        quick("Boundary", run_dir=run, compile=compiled, total_timesteps=60, **VARIANTS[variant])
        dqn.train(quick_args("Boundary", run_dir="", resume=run, compile=not compiled, total_timesteps=80,
                             **VARIANTS[variant]))  # fmt: skip
    assert equal(checkpoint("runTrue")["agent"], checkpoint("runFalse")["agent"])


# ------------------------------------------------------------------------------------------------------ Atari
def atari_args(game: str, **changes):
    given = vars(dqn.parse_args(["--env-id", f"ALE/{game}-v5", "--device", "cpu"]))
    small = dict(run_dir="run", num_envs=2, hidden_sizes=(16,), eval_every=0, eval_episodes=1, batch_size=8,
                 checkpoint_every=0, total_timesteps=240, torch_threads=1, buffer_size=300, log_every=100,
                 learning_starts=100, max_episode_steps=70)  # fmt: skip
    return dqn.Args(**given | small | changes)


def test_atari_batches_are_the_stacks_that_were_seen(seen, monkeypatch):
    """Bit-equal to the observations of the environment, over resets of games and the ring's seam."""
    pairs, taken = [], []
    add, start = dqn.ReplayBuffer.add, dqn.ReplayBuffer.start

    def watched_start(self, obs, mask=None):
        for i in range(2) if mask is None else np.flatnonzero(mask):
            taken[i : i + 1] = [obs[i].copy()]
        start(self, obs, mask)

    def watched_add(self, action, reward, terminated, next_obs):
        for i in range(2):
            pairs.append((taken[i].tobytes(), next_obs[i].tobytes(), int(action[i]), float(reward[i])))
            taken[i] = next_obs[i].copy()
        add(self, action, reward, terminated, next_obs)

    monkeypatch.setattr(dqn.ReplayBuffer, "start", watched_start)
    monkeypatch.setattr(dqn.ReplayBuffer, "add", watched_add)
    dqn.train(atari_args("MsPacman", total_timesteps=400, checkpoint_every=150, eval_episodes=1))
    buffer = seen.run.parts["buffer"]
    assert buffer.obs.shape == (300, 84, 84) and buffer.obs.dtype == torch.uint8 and buffer.stack == 4
    known = set(pairs)
    for _, batch in seen.batches:
        columns = (batch[name].numpy() for name in ("obs", "next_obs", "action", "reward"))
        for obs, next_obs, action, reward in zip(*columns, strict=True):
            assert (obs.tobytes(), next_obs.tobytes(), int(action), float(reward)) in known
    assert len(seen.batches) > 50
    assert {reward for *_, reward in pairs} == {0.0, 1.0}, "signs are learned from"
    assert max(return_ for _, return_ in points()["train/episode_return"]) >= 20, "scores are as they are"


def test_a_lost_life_ends_no_episode_and_games_are_scored_whole(seen, monkeypatch):
    """Breakout without a move loses a life every few dozen steps; the record goes on."""
    monkeypatch.setattr(np.random, "randint", lambda high, size: np.ones(size, dtype=int) % high)
    monkeypatch.setattr(dqn.ReplayBuffer, "draw", lambda self, n: np.flatnonzero(self.valid)[:n])
    args = atari_args("Breakout", num_envs=1, total_timesteps=200, learning_starts=10_000,
                      max_episode_steps=0)  # fmt: skip
    real, lives = dqn.reset_done, []

    def watched(envs, next_obs, info, done):
        lives.append(int(info["lives"][0]))
        assert not done.any() or lives[-1] == 0
        return real(envs, next_obs, info, done)

    monkeypatch.setattr(dqn, "reset_done", watched)
    monkeypatch.setattr(dqn, "evaluate", lambda args, *_: {name: np.zeros(1) for name in (
        "returns", "discounted", "lengths", "terminated", "success")})  # fmt: skip
    dqn.train(args)
    first = lives[: lives.index(0)] if 0 in lives else lives
    assert len(set(first)) >= 2, "lives were lost"
    assert not seen.run.parts["buffer"].terminated[: len(first)].any()


# --------------------------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_within_50k_steps(seed):
    flags = f"--env-id CartPole-v1 --seed {seed} --device cpu --run-dir run --checkpoint-every 0".split()
    args = dqn.parse_args([*flags, "--stop-return", "475", "--eval-every", "5000"])
    returns = dqn.train(args)
    assert args.total_timesteps <= 50_000
    assert len(returns) == 10 and returns.mean() >= 475
