"""What ddpg_td3.py, sac.py and its children do alike where they play, and the first two alone: targets,
actors, rhythm."""

import math
from functools import partial

import conftest
import numpy as np
import probe_envs
import pytest
import torch
from conftest import CPU, call_main, checkpoint, equal, has, load_script, progress, scripts_with
from gymnasium.spaces import Box
from probe_envs import Boundary, boundary_length, boundary_reward, boundary_terminates

td3, sac, tqc, crossq = map(load_script, ("ddpg_td3", "sac", "tqc", "crossq"))
FAMILY = [x for x in map(load_script, scripts_with("ReplayBuffer")) if has(x, "learning_starts")]  # they play
NAME = lambda script: script.__name__
FOUR, TWO = sac.Layout((4,)), Box(-1, 1, (2,))
# 48 steps of two environments, of which the first 16 are random
short, quick = (
    partial(f, total_timesteps=96, learning_starts=32, updates_per_step=1.0)
    for f in (conftest.short, conftest.quick)
)


@pytest.fixture(params=FAMILY, ids=NAME)
def both(request):
    return request.param


# -------------------------------------------------------------------------------------------- replay memory
@pytest.mark.parametrize("num_envs, async_envs", [(1, False), (4, False), (2, True)])
def test_no_transition_joins_two_episodes_or_segments(both, seen, num_envs, async_envs):
    changes = dict(total_timesteps=60 * num_envs, checkpoint_every=20, buffer_size=400, async_envs=async_envs)
    quick(both, "Boundary", num_envs=num_envs, gamma=0.5, **changes)
    buffer, kinds = seen["buffer"], set()
    assert buffer.filled == 60 * num_envs
    batch = buffer.sample(3000)
    for obs, next_obs, reward, discount in zip(
        *(batch[name].tolist() for name in ("obs", "next_obs", "reward", "discount")), strict=True
    ):
        number, episode, t, end = map(int, obs)
        last = t + 1 == boundary_length(number, episode)
        terminates = last and boundary_terminates(number, episode)
        assert end == 0 and next_obs == [number, episode, t + 1, 1 if terminates else 2 if last else 0]
        assert reward == boundary_reward(episode, t + 1) and discount == (0 if terminates else 0.5)
        kinds.add((terminates, last))
    assert len(kinds) == 3 and len({tuple(x) for x in batch["obs"].tolist()}) >= 50 * num_envs


@pytest.mark.parametrize("n_step", [1, 3])
def test_n_step_transitions_are_those_of_brute_force(both, n_step):
    rng, n, steps, gamma = np.random.default_rng(0), 3, 50, 0.5
    buffer = both.ReplayBuffer(
        short(both, num_envs=n, n_step=n_step, gamma=gamma, buffer_size=90), FOUR, TWO, CPU
    )
    reward = rng.normal(size=(steps, n))
    terminated, truncated = rng.random((2, steps, n)) < 0.15
    done = terminated | truncated
    done[20] = True  # a segment ends
    state = lambda t: np.stack([np.full((n,), t), np.arange(n), np.zeros(n), np.zeros(n)], axis=1)
    for t in range(steps):
        step = dict(obs=state(t), action=np.zeros((n, 2)), next_obs=state(t + 1), terminated=terminated[t])
        buffer.add(**step, reward=reward[t], done=terminated[t] | truncated[t])
        if t == 20:
            buffer.cut()
    batch = buffer.sample(2000)
    for i in range(2000):
        t, env = map(int, batch["obs"][i, :2])
        assert t >= 20  # 30 rows of each environment are kept
        total, k = 0.0, 0
        while True:
            total += gamma**k * reward[t + k, env]
            k += 1
            if k == n_step or done[t + k - 1, env] or t + k == steps:
                break
        discount = 0.0 if terminated[t + k - 1, env] else gamma**k
        found = [batch[name][i].item() for name in ("reward", "discount")]
        assert found == pytest.approx([total, discount], abs=1e-5)
        assert batch["next_obs"][i, :2].tolist() == [t + k, env]


def test_too_large_a_buffer_is_refused_but_playing_needs_none(both, monkeypatch):
    trained = quick(both)
    monkeypatch.setattr(both, "free_memory", lambda device: 6e3)
    assert np.array_equal(both.train(both.parse_args(["--evaluate", "run"])), trained)
    with pytest.raises(both.UsageError, match="--buffer-size"):
        both.train(both.parse_args(["--resume", "run"]))


def test_a_buffer_that_no_machine_can_hold_is_refused(both, capsys):
    assert call_main(both, "--device", "cpu", "--buffer-size", "100_000_000_000_000") == 2
    assert "--buffer-size" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- critics
@pytest.mark.parametrize(
    "name, critics", [("ddpg", 1), ("td3", 2), ("sac", 2), ("tqc", 10), ("crossq", 2), ("simba", 2)]
)
def test_critics_learn_the_endless_sum_where_episodes_are_only_truncated(name, critics, seen):
    own = dict(algorithm=name) if name in ("ddpg", "td3") else dict(auto_alpha=False, alpha=1e-8)
    own |= dict(learning_rate=0.003, anneal_lr=True) if name == "crossq" else dict(learning_rate=0.01)
    changes = dict(gamma=0.8, tau=0.1, total_timesteps=800, buffer_size=1000)
    quick(load_script(name) if "alpha" in own else td3, "Ones", **changes, **own)
    value = seen["agent"].eval().critic(torch.zeros(1, 4), torch.zeros(1, 1)).flatten()
    assert value.tolist() == pytest.approx([5.0] * critics, rel=0.05)  # ten steps would be 4.5 at most


@pytest.mark.parametrize("both", [td3, sac])
def test_twin_critics_are_apart_and_each_is_what_it_is_alone(both):
    args = short(both, hidden_sizes=(8, 6))
    critic, obs, action = both.Critic(FOUR, TWO, args), torch.randn(50, 4), torch.rand(50, 2)
    values = critic(obs, action).view(2, 50)
    assert torch.sub(*values).abs().min() > 0
    for i in range(2):
        x = torch.cat([obs, action], dim=-1)
        for layer in critic.layers:
            x = x @ layer.weight[i] + layer.bias[i]
            x = x if layer is critic.layers[-1] else x.relu()
        torch.testing.assert_close(values[i], x.squeeze(-1))
    if both is td3:
        torch.testing.assert_close(critic(obs, action, n=1)[0], values[0])


@pytest.mark.parametrize("both", [x for x in FAMILY if hasattr(x, "critic_loss")], ids=NAME)
def test_critic_loss_equals_numbers_worked_out_by_hand(both):
    q_values, td_target = torch.tensor([[1.0, 2.0], [0.0, 5.0]]), torch.tensor([2.0, 4.0])
    assert both.critic_loss(q_values, td_target) == (1 + 4) / 2 + (4 + 1) / 2


def solve_lq(gamma: float):
    """States, actions, Q* and pi* of LQ on a grid, from the fixed point of the Riccati equation."""
    p = 0.0
    for _ in range(1000):
        p = 1 + gamma * p - (0.5 * gamma * p) ** 2 / (0.2 + 0.25 * gamma * p)
    x, u = (z.reshape(-1, 1) for z in torch.meshgrid(*[torch.linspace(-0.6, 0.6, 7)] * 2, indexing="ij"))
    q_value = -(x**2 + 0.2 * u**2 + gamma * p * (x + 0.5 * u) ** 2).squeeze(-1)
    return x, u, q_value, -0.5 * gamma * p / (0.2 + 0.25 * gamma * p) * x


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_critics_and_actor_solve_the_linear_quadratic_problem(name, seen):
    changes = dict(learning_rate=3e-3, anneal_lr=True, tau=0.02, batch_size=128, gamma=0.8, num_envs=1)
    changes |= dict(
        total_timesteps=2500, learning_starts=500, hidden_sizes=(32, 32), critic_sizes=None, buffer_size=5000
    )
    own = dict(algorithm=name, exploration_noise=0.3, target_noise=0.0)
    own = dict(auto_alpha=False, alpha=0.002) if name == "sac" else own
    quick(sac if name == "sac" else td3, "LQ", **changes, **own)
    obs, action, q_value, best = solve_lq(gamma=0.8)
    found = seen["agent"].critic(obs, action).view(-1, len(q_value))
    assert (found - q_value).abs().max() < 0.2  # Q* goes from -1.4 to 0
    greedy = torch.from_numpy(seen["agent"].act(obs.numpy(), {}))
    assert (greedy - best).abs().max() < 0.35  # pi* goes from -0.7 to 0.7


# ------------------------------------------------------------------------------------------------- training
def test_a_gradient_step_moves_its_own_parameters_only(both):
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer, before = torch.optim.SGD(one.parameters(), lr=0.1), one.weight.detach().clone()
    loss = lambda: 100 * two(one(torch.ones(1, 2))).sum()
    norm_of = lambda: torch.stack([p.grad.norm() for p in one.parameters()]).norm().item()
    assert both.gradient_step(loss(), optimizer, 0.5) > 0.5
    assert two.weight.grad is None and not torch.equal(one.weight, before)
    assert norm_of() == pytest.approx(0.5, rel=1e-4)
    assert both.gradient_step(loss(), optimizer, math.inf) == pytest.approx(norm_of()) != 0.5


def test_learning_rates_are_each_ones_own_and_fall_to_0_if_asked(both, seen):
    given = dict(actor_lr=0.01, critic_lr=0.02) | ({} if both is td3 else dict(alpha_lr=0.03))
    rates = lambda: [float(seen[x.replace("lr", "optimizer")].param_groups[0]["lr"]) for x in given]
    for i, (changes, expected) in enumerate([
        ({}, [0.1] * len(given)), (given, list(given.values())), (dict(anneal_lr=True), [0.1 / 18] * 3),
    ]):  # fmt: skip
        quick(both, run_dir=f"run{i}", learning_rate=0.1, total_timesteps=36, **changes)
        assert rates() == pytest.approx(expected[: len(given)])


@pytest.mark.parametrize("ratio, delay", [(0.25, 2), (1.0, 3), (5.0, 1)])
def test_updates_per_step_and_policy_delay_count_updates(both, seen, record, ratio, delay):
    steps, moves = record(both, "gradient_step"), [] if both is crossq else record(both, "polyak_update")
    quick(both, updates_per_step=ratio, policy_delay=delay, checkpoint_every=20, tau=0.3)
    mine = lambda part: sum(given[1] is seen[f"{part}_optimizer"] for given, _ in steps)
    first, last = int(ratio * 30), int(ratio * 96)  # the first update follows the step that reaches 32
    actors = sum(number % (delay if both in (td3, crossq) else 1) == 0 for number in range(first, last))
    assert (mine("critic"), mine("actor")) == (last - first, actors)
    agent, names = seen["agent"], {td3: ("actor", "critic"), crossq: ()}.get(both, ("critic",))
    assert len(moves) == actors * len(names)
    pairs = {(getattr(agent, name), getattr(agent, f"target_{name}"), 0.3) for name in names}
    assert {tuple(given) for given, _ in moves} == pairs


def updates() -> list[dict]:
    return [row for row in progress() if "loss/critic" in row]


def test_rewards_are_scaled_after_they_are_normalized(both):
    """The other way round, the limit of 10 would be one of scaled rewards."""
    quick(
        both,
        "Ones",
        env_kwargs={"pay": 3.0, "actions": "box"},
        gamma=0.0,
        normalize_reward=True,
        reward_scale=50,
    )
    assert updates()[-1]["q/target_mean"] == pytest.approx(500)


def test_learning_may_start_with_the_last_step(both):
    quick(both, learning_starts=192, total_timesteps=192)
    assert "loss/critic" in updates()[-1]
    with pytest.raises(both.UsageError, match="learning-starts 193"):
        quick(both, run_dir="other", learning_starts=193, total_timesteps=192)


@pytest.mark.parametrize("both", [x for x in FAMILY if has(x, "tau")], ids=NAME)
def test_targets_move_by_tau_and_copy_the_statistics_of_layers(both):
    network, target = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    network(torch.randn(9, 2))
    before = target[0].weight.detach().clone()
    both.polyak_update(network, target, 0.25)
    torch.testing.assert_close(target[0].weight, 0.75 * before + 0.25 * network[0].weight)
    assert equal(dict(target.named_buffers()), dict(network.named_buffers()))


def test_actions_are_stored_on_the_unit_cube_and_sent_in_the_bounds(both, seen):
    loud = dict(exploration_noise=1.0) if both is td3 else {}
    quick(both, "Box", total_timesteps=200, batch_size=64, **loud)
    buffer, sent = seen["buffer"], np.array(probe_envs.Boxes.actions)
    stored = buffer.data["action"][: buffer.filled].numpy().reshape(-1, 2)
    low, high = sent.min(axis=0), sent.max(axis=0)
    scaled = stored * [2, 2] + [1, 0]  # the bounds are [-1, 3] and [-2, 2]
    assert max(np.abs(sent - action).sum(axis=1).min() for action in scaled) < 1e-5
    assert len(stored) == 200 and np.abs(stored).max() <= 1 and low[1] < -1.5 and high[0] > 2.5


def test_environments_explore_apart(both, seen):
    quick(both, "Ones", num_envs=4, total_timesteps=200, learning_starts=4)  # all observe the same
    actions = seen["buffer"].data["action"][8 : seen["buffer"].filled].view(-1, 4)
    assert (actions[:, 1:] - actions[:, :1]).abs().min() > 0


@pytest.mark.parametrize("both", [x for x in FAMILY if has(x, "tau")], ids=NAME)
def test_what_acts_or_learns_sees_normalized_observations_only(both, seen, record):
    normed = record(both.RunningNorm, "forward")
    calls = [record(both.Critic, "forward"), record(both.Actor, "forward")]
    quick(both, "Boundary", normalize_obs=True, eval_episodes=3)
    known = {x.numpy().tobytes() for _, x in normed}
    given = [arguments[1] for arguments, _ in sum(calls, [])]
    assert {len(x) for x in given} == {2, 3, 16}  # rollout, evaluation, batch
    assert all(x.numpy().tobytes() in known for x in given)
    # it has seen what was acted from, first observations of episodes, too
    norm = seen["agent"].obs_norm
    rows = [
        [number, episode, t - 1, 0] for evaluates, number, episode, t, *_ in Boundary.steps if not evaluates
    ]
    assert norm.count == 96 == len(rows)
    torch.testing.assert_close(norm.mean, torch.tensor(rows, dtype=torch.float64).mean(dim=0))


def test_images_are_learned_from(both):
    kwargs = dict(obs="small", action="box")
    quick(both, "Spaces", env_kwargs=kwargs, total_timesteps=40)
    state = checkpoint()["agent"]
    assert any(x.ndim == 4 for x in state.values()) and all(x.isfinite().all() for x in state.values())


@pytest.mark.parametrize("script, words, hint", [
    (td3, "CartPole-v1", "ppo.py"),
    (td3, 'probe_envs:Spaces-v0 --env-kwargs {"action":"half_bounded"}', "ppo.py"),
    (sac, "CartPole-v1", "ppo.py"),
    (tqc, 'probe_envs:Spaces-v0 --env-kwargs {"action":"multi_discrete"}', "ppo.py"),
    (crossq, 'probe_envs:Spaces-v0 --env-kwargs {"action":"half_bounded"}', "ppo.py"),
    (sac, "Pendulum-v1 --alpha 0", "--alpha"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_with_a_way_out(script, words, hint):
    words = f"--device cpu --env-id {words}".split()
    with pytest.raises(script.UsageError, match=hint):
        script.train(script.parse_args(words))


@pytest.mark.parametrize("name", [*scripts_with("ReplayBuffer"), *scripts_with("FrameBuffer")])
def test_actions_that_a_script_cannot_take_are_refused(name):
    script = load_script(name)
    env_id, needs = (
        ("Pendulum-v1", "Discrete") if hasattr(script, "FrameBuffer") else ("CartPole-v1", "bounded Box")
    )
    with pytest.raises(script.UsageError, match=f"{env_id} are not .*{needs}"):
        script.train(script.make_args(env_id, device="cpu"))


# ---------------------------------------------------------------------------------------------- ddpg and td3
def test_the_target_is_the_reward_and_the_least_value_of_targets(seen, record, drawn):
    losses, batches = record(td3, "critic_loss"), drawn(td3)
    options = dict(learning_rate=0.01, reward_scale=0.1, gamma=0.5, target_noise=0.0, tau=0.0)
    quick(td3, "Boundary", **options)
    batch, agent = batches[-1], seen["agent"]
    with torch.no_grad():
        values = agent.target_critic(batch["next_obs"], agent.target_actor(batch["next_obs"]))
    assert (values[0] - values[1]).abs().min() > 1e-4
    target = 0.1 * batch["reward"] + batch["discount"] * torch.minimum(*values)
    torch.testing.assert_close(losses[-1][0][1], target)
    assert torch.cat([batch["discount"] for batch in batches]).unique().tolist() == [0, 0.5]


def test_smooth_action_clips_the_noise_and_the_action():
    action, noise = torch.tensor([[0.0, 0.8], [-0.9, 0.1]]), torch.tensor([[0.3, 0.9], [-0.4, -2.0]])
    expected = torch.tensor([[0.3, 1.0], [-1.0, -0.4]])
    torch.testing.assert_close(td3.smooth_action(action, noise, 0.5), expected)


def test_target_noise_is_drawn_for_every_sample_and_dimension(record):
    smoothed = record(td3, "smooth_action")
    quick(td3, "Box", target_noise=0.3, target_noise_clip=0.4, batch_size=200)
    noise = torch.stack([given[1] for given, _ in smoothed])
    assert noise.shape[1:] == (200, 2) and noise.std().item() == pytest.approx(0.3, rel=0.02)
    assert len(noise.unique()) > 0.99 * noise.numel() and all(given[2] == 0.4 for given, _ in smoothed)


def test_exploration_noise_has_its_size_and_its_memory():
    np.random.seed(1)
    for kind, std, correlation in [("gaussian", 0.2, 0.0), ("ou", 0.2 / (1 - 0.85**2) ** 0.5, 0.85)]:
        noise, series = np.zeros((4, 2), dtype=np.float32), []
        for _ in range(5000):
            noise = td3.explore(noise, kind, 0.2)
            series.append(noise.ravel())
        series = np.stack(series)[100:]
        assert series.std() == pytest.approx(std, rel=0.05) and abs(series.mean()) < 0.05
        assert np.mean(series[1:] * series[:-1]) / series.var() == pytest.approx(correlation, abs=0.03)
        assert np.abs(np.corrcoef(series.T) - np.eye(8)).max() < 0.25


def test_exploration_noise_is_forgotten_where_an_episode_or_a_segment_starts(record):
    """A checkpoint, after which a segment starts, follows steps 20 and 40 of both environments."""
    explored, resets = record(td3, "explore"), record(td3, "reset_done")
    quick(td3, "Boundary", noise_type="ou", exploration_noise=0.3, learning_starts=0, checkpoint_every=20)
    done = [given[3] for given, _ in resets][:48]  # the evaluation follows
    assert len(explored) == 48
    for t, ((old_noise, kind, std), _) in enumerate(explored):
        assert (kind, std) == ("ou", 0.3)
        starts = np.ones(2, dtype=bool) if t in (0, 20, 40) else done[t - 1]
        assert np.array_equal(old_noise[:, 0] == 0, starts), t


def test_the_actor_climbs_the_value_of_the_first_critic(seen, record, drawn):
    steps, batches = record(td3, "gradient_step"), drawn(td3)
    quick(td3, learning_rate=0.0)
    number = max(i for i, (given, _) in enumerate(steps) if given[1] is seen["actor_optimizer"])
    updates = sum(given[1] is seen["critic_optimizer"] for given, _ in steps[:number])
    agent, obs = seen["agent"], batches[updates - 1]["obs"]
    first, second = agent.critic(obs, agent.actor(obs)).mean(dim=-1)
    torch.testing.assert_close(steps[number][0][0], -first.detach())
    assert abs(first - second) > 1e-3


def test_presets_fill_what_is_not_given():
    names = ("twin_critics", "policy_delay", "target_noise", "noise_type")
    chosen = lambda **given: [td3.ingredient(td3.Args(**given), name) for name in names]
    assert chosen(algorithm="ddpg") == [False, 1, 0.0, "ou"] and chosen() == [True, 2, 0.2, "gaussian"]
    assert chosen(algorithm="ddpg", twin_critics=True, target_noise=0.1) == [True, 1, 0.1, "ou"]


# ------------------------------------------------------------------------------------------------------- sac
def test_log_probability_equals_the_numerical_change_of_variables():
    """The share of draws that a small interval of actions gets, over its width, for several Gaussians."""
    for mean, log_std in [(0.0, 0.0), (0.7, -1.0), (-1.2, 0.3)]:
        u = mean + math.exp(log_std) * torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)
        noise = (u - mean) * math.exp(-log_std)
        columns = [torch.full((7, 1), x, dtype=torch.float64) for x in (mean, log_std)]
        action, log_prob = sac.squashed_gaussian(*columns, noise[:, None])
        torch.testing.assert_close(action.squeeze(-1), u.tanh())
        normal, width = torch.distributions.Normal(mean, math.exp(log_std)), 1e-5
        edges = [torch.atanh(action.squeeze(-1) + side * width) for side in (-1, 1)]
        density = (normal.cdf(edges[1]) - normal.cdf(edges[0])) / (2 * width)
        torch.testing.assert_close(log_prob, density.log(), atol=1e-5, rtol=1e-5)


def test_log_probability_sums_over_dimensions_and_stays_finite_at_the_edge():
    mean = torch.tensor([[0.3, 40.0], [-60.0, 0.1]], requires_grad=True)
    action, log_prob = sac.squashed_gaussian(mean, torch.zeros(2, 2), torch.zeros(2, 2))
    one, other = (sac.squashed_gaussian(x, torch.zeros(2, 1), torch.zeros(2, 1))[1] for x in mean.split(1, 1))
    torch.testing.assert_close(log_prob, one + other)
    log_prob.sum().backward()
    assert action.abs().max() == 1 and log_prob.isfinite().all() and mean.grad.isfinite().all()


def test_soft_value_equals_numbers_worked_out_by_hand():
    q_values = torch.tensor([[1.0, 5.0], [2.0, 3.0]])  # two critics, two states
    value = sac.soft_value(q_values, torch.tensor([-1.0, 0.5]), 0.2)
    assert value.tolist() == pytest.approx([1.2, 2.9])


@pytest.mark.parametrize("asked, log_std", [(-1.0, -1.0), (-90.0, -20.0), (90.0, 2.0)])
def test_the_actor_draws_what_it_says_within_limits(asked, log_std, record):
    torch.manual_seed(1)
    agent, squashed = sac.Agent(FOUR, TWO, short(sac), CPU), record(sac, "squashed_gaussian")
    with torch.no_grad():
        agent.actor.head.bias[:] = torch.tensor([0.5, 0.5, asked, asked])
        obs = torch.randn(1, 4).expand(20_000, -1)
        action, log_prob = agent.policy(obs)
        mean, greedy = agent.actor(obs[:1])[0], agent.act(obs[:1].numpy(), {})
    (((given_mean, given_log_std, noise), drawn),) = squashed
    assert given_log_std.std() < 0.2 and given_log_std.mean().item() == pytest.approx(log_std, abs=0.2)
    assert given_log_std.min() >= -20 and given_log_std.max() <= 2
    torch.testing.assert_close(noise.mean(0), torch.zeros(2), atol=0.03, rtol=0)
    torch.testing.assert_close(noise.std(0), torch.ones(2), atol=0.03, rtol=0)
    assert torch.equal(action, drawn[0]) and torch.equal(log_prob, drawn[1])
    torch.testing.assert_close(given_mean[:1], mean)
    torch.testing.assert_close(torch.from_numpy(greedy), mean.tanh())


@pytest.mark.parametrize("target", [-1.0, 0.0])
def test_the_temperature_brings_the_entropy_to_its_target(target, seen):
    """A bandit that pays for one action; target_entropy 0 is honoured."""
    changes = dict(gamma=0.0, learning_rate=0.01, batch_size=64, hidden_sizes=(16,), total_timesteps=1200)
    quick(sac, "Box", target_entropy=target, **changes, buffer_size=2000)
    with torch.no_grad():
        log_prob = seen["agent"].policy(torch.zeros(5000, 4))[1]
    assert -log_prob.mean().item() == pytest.approx(target, abs=0.4)
    assert progress()[-2]["policy/entropy"] == pytest.approx(target, abs=0.5)


@pytest.mark.parametrize("target, sign", [(9.0, 1), (-9.0, -1)])
def test_the_temperature_rises_when_the_entropy_is_too_low(target, sign, seen):
    quick(sac, "Box", target_entropy=target, alpha=0.5)
    assert sign * (seen["agent"].log_alpha.exp().item() - 0.5) > 0.005


def test_a_fixed_temperature_stays_also_in_a_run_that_learned_one_before(seen):
    quick(sac, "Box")
    sac.train(sac.parse_args("--resume run --total-timesteps 200 --no-auto-alpha --alpha 0.05".split()))
    assert seen["agent"].log_alpha.exp().item() == pytest.approx(0.05)
    rows = [row for row in progress() if "policy/alpha" in row]
    assert rows[-1]["policy/alpha"] == pytest.approx(0.05) != rows[0]["policy/alpha"]


@pytest.mark.parametrize("env, expected", [("Box", -2), ("Walk", -1)])
def test_target_entropy_follows_the_action_space(env, expected, record):
    losses = record(sac, "alpha_loss")
    quick(sac, env)
    assert losses[-1][0][2] == pytest.approx(expected)


def test_the_target_is_the_soft_value_of_the_target_critics(seen, record, drawn):
    losses, values, batches = record(sac, "critic_loss"), record(sac, "soft_value"), drawn(sac)
    critics = record(sac.Critic, "forward")
    quick(sac, "Boundary", learning_rate=0.01, reward_scale=0.1, gamma=0.5, auto_alpha=False, alpha=0.3)
    batch, of_target = batches[-1], values[-2]  # that of the actor's loss follows
    judge, states = critics[-3][0][:2]  # two calls of the online critics follow
    assert judge is seen["agent"].target_critic and torch.equal(states, batch["next_obs"])
    assert of_target[0][2] == pytest.approx(0.3) and of_target[0][0].shape == (2, 16)
    torch.testing.assert_close(losses[-1][0][1], 0.1 * batch["reward"] + batch["discount"] * of_target[1])
    assert torch.cat([batch["discount"] for batch in batches]).unique().tolist() == [0, 0.5]


@pytest.mark.parametrize("hold", [1, 4])
def test_random_actions_are_held_for_random_hold_steps(seen, hold):
    quick(sac, "Ones", random_hold=hold, learning_starts=80, checkpoint_every=22)  # a segment after step 22
    actions = seen["buffer"].data["action"][:80].view(40, 2).numpy()
    for t in range(1, 40):
        assert np.array_equal(actions[t], actions[t - 1]) == (t % hold != 0 and t != 22), t


# ------------------------------------------------------------------------------------------- options of all
def test_rewards_are_stored_as_they_came_and_scaled_when_they_are_replayed(both, seen, drawn, record):
    """So --reward-scale holds for what a resumed run has in its memory, too."""
    losses = record(both, "critic_loss" if hasattr(both, "critic_loss") else "quantile_huber_loss")
    alone = dict(env_kwargs={"pay": 3.0}, gamma=0.0)
    quick(both, "Ones", **alone)
    both.train(both.parse_args("--resume run --total-timesteps 120 --reward-scale 0.5".split()))
    assert seen["buffer"].data["reward"][: seen["buffer"].filled].unique().tolist() == [3.0]
    targets = [call[0][1] for call in losses]
    assert targets[0].unique().tolist() == [3.0] and targets[-1].unique().tolist() == [1.5]


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return(both, record, seen):
    losses = record(both, "critic_loss" if hasattr(both, "critic_loss") else "quantile_huber_loss")
    quick(both, "Boundary", normalize_reward=True, gamma=0.0, batch_size=2000)
    rewards = np.array([step[5] for step in Boundary.steps if not step[0]])
    targets, stored = losses[-1][0][1].unique(), np.unique(rewards)
    assert np.allclose(targets.sort()[0], (stored / rewards.std()).clip(-10, 10), rtol=1e-3)
    assert set(seen["buffer"].data["reward"][:96].unique().tolist()) == set(stored)


@pytest.mark.parametrize("positive", [False, True])
def test_targets_are_clipped(both, record, positive):
    losses = record(both, "critic_loss" if hasattr(both, "critic_loss") else "quantile_huber_loss")
    for pay, clipped in ((3.0, 0.0 if positive else 2.0), (-3.0, -2.0)):
        options = dict(clip_return=2.0, clip_positive_returns=positive)
        quick(both, "Ones", run_dir=f"{pay}", env_kwargs={"pay": pay}, gamma=0.0, **options)
        assert losses[-1][0][1].unique().tolist() == [clipped]


def test_actor_and_critics_have_weight_decays_of_their_own(both, seen):
    quick(both, actor_weight_decay=0.1, critic_weight_decay=0.2)
    decay = lambda part: seen[f"{part}_optimizer"].param_groups[0]["weight_decay"]
    assert (decay("actor"), decay("critic")) == (0.1, 0.2)
    assert both is td3 or decay("alpha") == 0


@pytest.mark.parametrize("both", [x for x in FAMILY if has(x, "caps_temporal")], ids=NAME)
def test_a_smooth_policy_is_asked_for_by_the_distance_of_its_actions(both, record):
    a, b = torch.tensor([[0.0, 3.0], [1.0, 1.0]]), torch.tensor([[4.0, 0.0], [1.0, 1.0]])
    assert both.caps_loss(a, b).item() == 2.5
    calls = record(both, "caps_loss")
    quick(both, caps_temporal=0.5, caps_spatial=0.5, caps_epsilon=1e-4)
    assert len(calls) % 2 == 0 and calls[1][1] < 0.01 * calls[0][1]  # near states have near actions


def test_training_that_would_never_learn_is_refused(both, capsys):
    assert call_main(both, "--total-timesteps", "1500", "--learning-starts", "1501") == 2
    line = capsys.readouterr().err
    assert "--learning-starts 1501" in line and "try 150" in line and line.count("\n") == 1
