"""ppo_lstm.py: what is remembered, from where to where, and that learning sees what acting saw."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CPU, call_main, flags, load_script, play, probe, tiny
from test_on_policy import quick, short, updates, watch_loss

import benchmark.hidden_envs as hidden_envs

KINDS = [("lstm", False), ("gru", False), ("lstm", True)]  # of memory; shared by actor and critic


@pytest.fixture
def ppo_lstm():
    return load_script("ppo_lstm")


def make_agent(script, memory="lstm", shared=False, **changes):
    torch.manual_seed(0)
    args = tiny(script, memory=memory, shared_trunk=shared, normalize_obs=False, **changes)
    return script.Agent(script.Layout((3,)), gym.spaces.Discrete(4), args, CPU)


def random_ends(steps=30, envs=5):
    done = (torch.rand(steps, envs, generator=torch.Generator().manual_seed(1)) < 0.15).float()
    done[:, 1], done[:, 2] = 0, 1  # one that never ends, one that always does
    return done


def test_sequences_are_the_episodes_of_the_chosen_environments(ppo_lstm):
    done, chosen = random_ends(), torch.tensor([3, 1, 2])
    rows, sizes = ppo_lstm.whole_sequences(done, chosen)
    sequences = [[] for _ in range(sizes[0])]
    for part in rows.split(sizes.tolist()):
        for sequence, row in zip(sequences, part.tolist(), strict=False):
            sequence.append(divmod(row, 5))
    truth = []
    for env in chosen.tolist():
        ends = [-1, *done[:, env].nonzero().flatten().tolist(), 29]
        truth += [[(t, env) for t in range(a + 1, b + 1)] for a, b in zip(ends, ends[1:], strict=False)]
    assert sorted(sequences) == sorted(sequence for sequence in truth if sequence)
    assert [len(x) for x in sequences] == sorted(map(len, sequences), reverse=True)


@pytest.mark.parametrize("memory, shared", KINDS)
def test_a_call_with_all_sequences_is_step_by_step_with_nothing_in_mind_after_an_end(
    ppo_lstm, memory, shared
):
    agent, done = make_agent(ppo_lstm, memory, shared), random_ends()
    outputs = lambda pi, value: torch.cat([pi.flatten(1), value[:, None]], dim=1)
    obs, now = torch.randn(30, 5, 3), torch.randn_like(agent.empty_memory(5))
    known, before, after = [], [], []
    for t in range(30):
        before.append(now)
        pi, value, now = agent(obs[t], now)
        known.append(outputs(pi, value))
        after.append(now)
        now = now * (1 - done[t])[:, None, None]
    before, after, known = torch.cat(before), torch.cat(after), torch.cat(known)
    rows, sizes = ppo_lstm.whole_sequences(done, torch.arange(5))
    pi, value, last = agent(obs.flatten(0, 1)[rows], before[rows][: sizes[0]], sizes)
    all_at_once = outputs(pi, value)
    assert torch.allclose(all_at_once, known[rows], atol=1e-6)
    lengths = (sizes[:, None] > torch.arange(len(last))).sum(0)
    ends = torch.stack([rows.split(sizes.tolist())[n - 1][i] for i, n in enumerate(lengths.tolist())])
    assert torch.allclose(last, after[ends], atol=1e-6)
    for _, part in agent.named_parameters():  # each part of a memory is used
        part.grad = None
    all_at_once.sum().backward()
    assert all((p.grad != 0).any() for name, p in agent.named_parameters() if "cell" in name)


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@pytest.mark.parametrize("span", [1, 50])
def test_gates_that_keep_start_open_for_up_to_memory_span(ppo_lstm, memory, span):
    cell = make_agent(ppo_lstm, memory, memory_span=span).actor.cell
    gates = cell.bias_hh_l0.detach().view(-1, 64)
    low, high = gates[1].exp().min(), gates[1].exp().max()
    assert 1 <= low <= 1 + span / 10 and 0.9 * span <= high <= span + 1e-4
    assert (gates[[0, *range(2, len(gates))]] == 0).all() and (cell.bias_ih_l0 == 0).all()


def test_memory_is_handed_on_and_is_nothing_where_an_episode_or_a_segment_begins(ppo_lstm, monkeypatch):
    seen, act, start = [], ppo_lstm.Agent.act, ppo_lstm.Run.start_segment

    def watch(agent, obs, info, greedy=True):
        before = info["memory"].clone() if "memory" in info else None
        action = act(agent, obs, info, greedy)
        if not greedy:
            seen.append((obs[:, 2], before, info["memory"].clone()))
        return action

    monkeypatch.setattr(ppo_lstm.Agent, "act", watch)
    monkeypatch.setattr(ppo_lstm.Run, "start_segment", lambda run: seen.clear() or start(run))
    quick(ppo_lstm, "Boundary", total_timesteps=192, checkpoint_every=32, num_minibatches=1)
    assert len(seen) == 32 and (seen[0][1] == 0).all()  # an update every 32 steps of each environment
    for (_, _, before), (t, memory, _) in zip(seen, seen[1:], strict=False):
        begins = torch.tensor(t == 0)
        assert (memory[begins] == 0).all() and torch.equal(memory[~begins], before[~begins])
        assert (before != 0).any(-1).all()
    assert sum((t == 0).sum() for t, *_ in seen) > 8


@pytest.mark.parametrize("memory, shared", KINDS)
def test_learning_begins_at_the_policy_that_acted(ppo_lstm, monkeypatch, memory, shared):
    """Episodes of 20 steps, rollouts of 32: the second one begins amid them."""
    calls, log, first = watch_loss(ppo_lstm, monkeypatch), ppo_lstm.Run.log, []
    monkeypatch.setattr(ppo_lstm.Run, "log", lambda run, row: first.append(len(calls)) or log(run, row))
    many = dict(num_envs=4, num_steps=32, num_minibatches=2, total_timesteps=384, learning_rate=0.02)
    box = dict(actions="box", edge=9.0)
    many["log_std_init"] = -3.0
    quick(ppo_lstm, memory=memory, shared_trunk=shared, env_kwargs=box, **many)
    for at in sorted({0, *first} - {len(calls)}):
        assert torch.allclose(calls[at]["log_prob"], calls[at]["old_log_prob"], atol=1e-5)
    assert len(calls) == 12 and all(len(call["log_prob"]) == 64 for call in calls)  # nothing is padded
    assert (calls[-1]["log_prob"] - calls[-1]["old_log_prob"]).abs().max() > 1e-3


def test_every_epoch_visits_every_environment_whole(ppo_lstm, monkeypatch):
    calls = watch_loss(ppo_lstm, monkeypatch)
    quick(ppo_lstm, num_envs=4, num_steps=32, num_minibatches=4, update_epochs=3, normalize_advantage=False)
    epochs = torch.stack([call["advantage"] for call in calls]).view(3, 4, 32)
    sets = [sorted(sorted(part.tolist()) for part in epoch) for epoch in epochs]
    assert sets[0] == sets[1] == sets[2] and len(epochs[0].unique()) == 128
    assert not torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])


def test_the_next_value_is_of_the_memory_one_step_further(ppo_lstm, record, seen):
    values, resets = record(ppo_lstm, "compute_gae"), record(ppo_lstm, "reset_done")
    quick(ppo_lstm, "Boundary", num_steps=32, memory_size=8)
    (_, value, next_value, _, done, *_), _ = values[0]
    goes_on = done[:-1] == 0
    assert torch.allclose(next_value[:-1][goes_on], value[1:][goes_on], atol=1e-5) and done.sum() > 8
    # of final observations, too: what follows each observation, played anew with the agent that acted
    agent, known = ppo_lstm.load_policy("run/models/0.pt").agent, []
    memory = agent.empty_memory(2)
    state = lambda number, episode: [number, episode, 0, 0]  # that an episode begins with
    rollout = [given for given, _ in resets if given[0] is seen.run.envs]
    obs = torch.tensor([state(number, 0) for number in rollout[0][1][:, 0]])
    for _, next_obs, _, ended in rollout:
        _, _, memory = agent(obs, memory)
        known.append(agent(torch.tensor(next_obs), memory)[1])
        memory = memory * torch.tensor(~ended)[:, None, None]
        begins = torch.tensor([state(x[0], x[1] + 1) for x in next_obs])
        obs = torch.where(torch.tensor(ended)[:, None], begins, torch.tensor(next_obs))
    assert torch.allclose(next_value, torch.stack(known), atol=1e-5)


def test_environments_that_cannot_be_split_are_refused(ppo_lstm, capsys):
    assert call_main(ppo_lstm, *flags(tiny(ppo_lstm, num_envs=3, num_minibatches=2))) == 2
    err = capsys.readouterr().err
    assert "--num-minibatches" in err and "--num-envs 3" in err and len(err.splitlines()) == 1


def test_a_policy_taken_away_remembers_until_it_is_reset(ppo_lstm):
    ppo_lstm.train(tiny(ppo_lstm, **probe(ppo_lstm, "Walk", actions="box"), eval_episodes=3))
    args = ppo_lstm.Args(**torch.load("run/best.pt", weights_only=True)["args"])
    policy = ppo_lstm.load_policy("run")
    evaluated, _ = ppo_lstm.evaluate(args, policy.agent)
    assert play(policy, args) == pytest.approx(evaluated.tolist())
    obs, acts = np.float32([0.3, 0.1]), lambda x: [policy(x) for _ in range(4)]
    policy.reset()
    first, later = acts(obs), acts(obs)
    policy.reset()
    assert np.array_equal(acts(obs), first) and not np.allclose(first, later)
    policy.reset()
    batch = np.stack(acts(np.tile(obs, (3, 1))))
    assert batch.shape == (4, 3, 1) and np.allclose(batch[:, 1], first, atol=1e-6)


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_learns_what_only_a_memory_can(ppo_lstm, memory):
    maze = dict(env="benchmark.hidden_envs:TMaze-v0", env_kwargs={"delay": 3}, eval_episodes=40)
    fast = dict(num_envs=16, num_steps=32, num_minibatches=2, update_epochs=10, total_timesteps=8192)
    args = short(ppo_lstm, **maze | fast, learning_rate=0.005, hidden_sizes=(16,), memory=memory)
    assert ppo_lstm.train(args).mean() == 1 and updates()


def test_hidden_environments_hide():
    for name, entries in (("CartPoleNoVel-v1", [0, 2]), ("PendulumNoVel-v1", [0, 1])):
        part, whole = gym.make(name), gym.make(name.replace("NoVel", ""))
        a, b = part.reset(seed=3)[0], whole.reset(seed=3)[0]
        assert part.spec.max_episode_steps == whole.spec.max_episode_steps
        for _ in range(5):
            assert a.tolist() == b[entries].tolist() and part.observation_space.contains(a)
            action = whole.action_space.sample()
            a, b = part.step(action)[0], whole.step(action)[0]
    assert gym.make("MountainCarContinuousNoVel-v0").observation_space.shape == (1,)
    maze = hidden_envs.TMaze(delay=4)
    for seed in range(8):
        (cue, junction), _ = maze.reset(seed=seed)
        known = cue
        for t in range(4):
            assert (cue in (-1, 1), junction) == (t == 0, 0)
            (cue, junction), reward, end, _, _ = maze.step(seed % 2)
            assert reward == 0 and not end
        assert (cue, junction) == (0, 1) and maze.render().shape == (48, 96, 3)
        _, reward, end, _, info = maze.step(seed % 2)
        assert end and reward == info["is_success"] == (seed % 2 == (known > 0))


def test_a_maze_with_doors_shows_which_one_is_open():
    for masks in (True, False):
        maze, rng = hidden_envs.Doors(walls=3, doors=4, masks=masks), np.random.default_rng(1)
        for seed in range(8):
            obs, info = maze.reset(seed=seed)
            cue, passed = obs[0], 0
            assert cue in (-1, 1)
            for _ in range(200):
                assert info.get("action_mask", maze.open).tolist() == obs[2:].tolist() and masks == bool(info)
                assert obs[1] == (passed == 3) and obs[2:].sum() == 1 + obs[1]
                action = rng.integers(4)
                was_open, at_junction = obs[2 + action], obs[1]
                obs, reward, end, _, info = maze.step(action)
                assert end == bool(at_junction and was_open)
                assert reward == info.pop("is_success") == (end and action == (0 if cue < 0 else 3))
                if end:
                    break
                passed += int(was_open)
                assert obs[0] == 0
            assert end


def test_a_policy_forgets_only_the_episodes_that_have_ended(ppo_lstm):
    quick(ppo_lstm)
    policy, obs = ppo_lstm.load_policy("run"), np.float32([[0.5] * 4, [-0.5] * 4])
    obs = obs[:, : policy.env.env.observation_space.shape[0]]
    policy(obs)
    before = policy.info["memory"].clone()
    policy.reset(np.array([True, False]))
    assert (
        not policy.info["memory"][0].any() and policy.info["memory"][1].equal(before[1]) and before[0].any()
    )
    policy.reset()
    assert not policy.info
