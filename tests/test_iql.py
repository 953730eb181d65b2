"""Implicit Q-learning: what is learned from a data set, how, and what becomes of it online; record.py."""

import importlib.util
import math
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import conftest
import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import CPU, ROOT, call_main, checkpoint, equal, flags, fork, load_script, parts, progress, wait
from gymnasium.spaces import flatten
from torch.distributions import Normal

iql = load_script("iql")
short, quick = (partial(f, iql, finetune_steps=0) for f in (conftest.short, conftest.quick))
LENGTHS = np.array([3, 5, 4, 6])
ENDS = LENGTHS.cumsum() - 1


def data(file="data.npz", **changes) -> str:
    """Four episodes of Walk with Box actions, of which the second and the last terminate. An observation is
    (episode, t); None takes an array away."""
    episode = np.repeat(np.arange(4), LENGTHS)
    t = np.concatenate([np.arange(length) for length in LENGTHS])
    rng = np.random.default_rng(0)
    arrays = dict(obs=np.stack([episode, t], axis=1).astype(np.float32), reward=rng.normal(size=18))
    arrays |= dict(next_obs=arrays["obs"] + np.array([0, 1], np.float32), lengths=LENGTHS)
    arrays |= dict(action=rng.uniform(-1, 1, (18, 1)), terminated=np.isin(np.arange(18), ENDS[[1, 3]]))
    np.savez(file, **{name: x for name, x in (arrays | changes).items() if x is not None})
    return str(Path(file).absolute())


def returns_of(file="data.npz") -> np.ndarray:
    return np.array([x.sum() for x in np.split(np.load(file)["reward"], ENDS[:-1] + 1)])


@pytest.fixture
def tool(monkeypatch):
    """benchmark/record.py as a function of its words."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    spec = importlib.util.spec_from_file_location("record", ROOT / "benchmark/record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield lambda *words: module.main([*map(str, words)])
    sys.modules.pop("recorded", None)


# -------------------------------------------------------------------------------------------- learning rule
def test_losses_equal_numbers_worked_out_by_hand():
    error = torch.tensor([2.0, -1.0, 0.0, -3.0])
    assert float(iql.expectile_loss(error, 0.9)) == pytest.approx((0.9 * 4 + 0.1 * 1 + 0.1 * 9) / 4)
    assert float(iql.expectile_loss(error, 0.5)) == pytest.approx((4 + 1 + 9) / 8)
    weight = iql.imitation_weight(torch.tensor([0.0, 0.5, -0.5, 2.0]), beta=3.0)
    assert weight.tolist() == pytest.approx([1, math.exp(1.5), math.exp(-1.5), 100])
    mean, log_std, action = torch.randn(3, 5, 2).unbind()
    expected = Normal(mean, log_std.exp()).log_prob(action).sum(-1)
    assert torch.allclose(iql.gaussian_log_prob(mean, log_std, action), expected, atol=1e-5)


@pytest.mark.parametrize("expectile", [0.7, 0.95])
def test_v_is_the_expectile_of_the_action_values(expectile):
    """Above it lie errors that are smaller by (1 - expectile) / expectile; at 0.5 it is the mean."""
    values, v = torch.randn(1000), torch.zeros(1, requires_grad=True)
    for _ in range(2000):
        (slope,) = torch.autograd.grad(iql.expectile_loss(values - v, expectile), v)
        v = (v - 0.5 * slope).detach().requires_grad_()
    above, below = (x.clamp(min=0).mean().item() for x in (values - v, v - values))
    assert expectile * above == pytest.approx((1 - expectile) * below, abs=1e-4)


def test_updates_equal_brute_force(drawn):
    """V first, against the target critics; then the actor and the critics, with the new V; then the targets.
    The rates are large, so that another order is another result."""
    rates = dict(actor_lr=0.03, critic_lr=0.02, value_lr=0.1, anneal_lr=False)
    rule = dict(expectile=0.8, beta=2.0, tau=0.3, gamma=0.9)
    batches = drawn(iql)
    args = short(dataset=data(), total_timesteps=3, eval_every=1, batch_size=64, **rates, **rule)
    iql.train(args)
    agent = iql.Agent(*iql.standard_spaces(args), args, CPU)
    agent.load_state_dict(checkpoint(name="models/0.pt")["agent"])
    adam = lambda network, lr: torch.optim.Adam(network.parameters(), lr)
    v_adam, actor_adam, q_adam = adam(agent.value, 0.1), adam(agent.actor, 0.03), adam(agent.critic, 0.02)

    def step(loss, optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert len(batches) == 3
    for batch in batches:
        obs, action, next_obs, discount = (batch[name] for name in ("obs", "action", "next_obs", "discount"))
        assert (discount == 0).any() and discount.max() == pytest.approx(0.9)
        q = torch.minimum(*agent.target_critic(obs, action)).detach()
        error = q - agent.value(obs)
        step(((0.8 * (error > 0) + 0.2 * (error < 0)) * error**2).mean(), v_adam)

        weight = torch.exp(2.0 * (q - agent.value(obs).detach())).clamp(max=100)
        mean = torch.tanh(agent.actor.head(agent.actor.trunk(obs)))
        log_prob = Normal(mean, agent.actor.log_std.exp()).log_prob(action)[:, 0]
        step(-(weight * log_prob).mean(), actor_adam)

        y = (batch["reward"] + discount * agent.value(next_obs)).detach()
        first, second = agent.critic(obs, action)
        step(((first - y) ** 2).mean() + ((second - y) ** 2).mean(), q_adam)
        for old, new in zip(agent.target_critic.parameters(), agent.critic.parameters(), strict=True):
            old.data = 0.3 * new.data + 0.7 * old.data

    learned = checkpoint()["agent"]
    for name, x in agent.state_dict().items():
        assert torch.allclose(learned[name], x, atol=1e-5), name


# ------------------------------------------------------------------------------------------------ data sets
def test_a_transition_never_joins_two_episodes_and_only_terminations_end_the_return(drawn):
    """Observations are (episode, t). At a time limit the value of the true final observation counts."""
    batches = drawn(iql)
    quick(dataset=data(), total_timesteps=40, batch_size=64, gamma=0.5)
    obs, next_obs, discount = (
        torch.cat([x[name] for x in batches]) for name in ("obs", "next_obs", "discount")
    )
    assert len(obs.unique(dim=0)) == 18, "all steps are drawn"
    assert torch.equal(next_obs, obs + torch.tensor([0.0, 1.0]))
    last = obs[:, 1] == torch.tensor(LENGTHS)[obs[:, 0].long()] - 1
    terminal = last & (obs[:, 0] % 2 == 1)
    assert torch.equal(discount, 0.5 * (~terminal).float()) and (last & ~terminal).any() and terminal.any()


@pytest.mark.parametrize("normalize", [False, True])
def test_rewards_are_scaled_by_the_returns_in_the_data_set_and_evaluations_are_not(record, seen, normalize):
    """The factor makes 0 and the returns span 1000. Online it stays: Ones pays 3 a step."""
    calls = record(iql, "critic_loss")
    ones = dict(env="Ones", env_kwargs=dict(pay=3.0), gamma=0.0, batch_size=64, total_timesteps=60)
    rewards = np.random.default_rng(1).normal(size=18) + 2  # returns are positive, 0 is not among them
    episodes = dict(obs=np.zeros((18, 4)), next_obs=np.zeros((18, 4)), reward=rewards)
    args = dict(dataset=data(**episodes), normalize_reward=normalize, reward_scale=0.5, finetune_steps=30)
    returns = quick(**ones, **args)
    assert returns.tolist() == [30, 30]
    assert all(row["reward/mean"] == 3 for row in progress() if "reward/mean" in row)
    assert {x["train/episode_return"] for x in progress() if "train/episode_return" in x} == {30}
    scale = 0.5 * (1000 / np.ptp([0.0, *returns_of()]) if normalize else 1)
    offline, online = (
        {round(float(x), 3) for call in calls if (call.step > 30) == late for x in call[0][1]}
        for late in (0, 1)
    )
    expected = {round(float(x), 3) for x in (np.load("data.npz")["reward"] * scale).astype(np.float32)}
    close = lambda a, b: np.allclose(sorted(a), sorted(b), atol=2e-3)
    assert close(offline, expected) and close(online, expected | {round(3 * scale, 3)})


def test_observations_are_scaled_by_the_data_set_alone_and_a_policy_carries_that_away():
    """Not by what is played online, nor by next observations."""
    few = dict(normalize_obs=True, total_timesteps=96, finetune_steps=64, eval_every=32)
    scores = quick(dataset=data(), **few)
    obs = np.load("data.npz")["obs"].astype(float)
    for name in ("checkpoint.pt", "best.pt", "models/0.pt"):
        agent = checkpoint(name=name)["agent"]
        assert np.allclose(agent["obs_norm.mean"], obs.mean(0)) and np.allclose(
            agent["obs_norm.var"], obs.var(0)
        )
        assert agent["obs_norm.count"] == 18
    os.remove("data.npz")  # neither an evaluation nor a policy needs it
    args = iql.Args(**checkpoint()["args"])
    assert conftest.play(iql.load_policy("run"), args) == pytest.approx(scores.tolist(), rel=1e-5)
    again = iql.train(iql.parse_args(["--evaluate", "run"]))
    assert again.tolist() == pytest.approx(scores.tolist(), rel=1e-5)
    policy, x = iql.load_policy("run"), np.array([1.0, 2.0], np.float32)
    seen = torch.tensor((x - obs.mean(0)) / np.sqrt(obs.var(0) + 1e-8)).float()
    assert np.allclose(policy(x), policy.agent.actor(seen[None])[0].detach().numpy()[0], atol=1e-5)


def test_actions_are_learned_as_the_environment_carries_them_out(drawn):
    """Between its own bounds, here -1 to 3 and -2 to 2; beyond them they are clipped."""
    action = np.array([[3, -2], [1, 0], [-1, 2], [9, -9]])[np.arange(18) % 4].astype(float)
    zeros = np.zeros((18, 4))
    batches = drawn(iql)
    quick("Box", dataset=data(obs=zeros, next_obs=zeros, action=action), batch_size=64, total_timesteps=9)
    seen = {tuple(x) for batch in batches for x in batch["action"].tolist()}
    assert seen == {(1, -1), (0, 0), (-1, 1)}


@pytest.mark.filterwarnings("ignore")  # of Minari, which would like to know more
def test_a_minari_data_set_says_the_same_as_a_file(drawn, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("minari").absolute()))
    from minari.data_collector import EpisodeBuffer

    file = np.load(data())
    whole = {name: np.split(file[name], ENDS[:-1] + 1) for name in ("obs", "next_obs", "action", "reward")}
    ended = np.split(file["terminated"], ENDS[:-1] + 1)
    last = [np.arange(len(x)) == len(x) - 1 for x in ended]
    episodes = [
        EpisodeBuffer(
            observations=np.concatenate([whole["obs"][i], whole["next_obs"][i][-1:]]),
            actions=whole["action"][i].astype(np.float32), rewards=list(whole["reward"][i]),
            terminations=list(ended[i]), truncations=list(last[i] & ~ended[i]),
        ) for i in range(4)
    ]  # fmt: skip
    env = gym.make("probe_envs:Walk-v0", actions="box")
    spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
    minari.create_dataset_from_buffers("probe/walk-v0", episodes, **spaces)
    batches = drawn(iql)
    for folder, source in (("a", "data.npz"), ("b", "probe/walk-v0")):
        quick(run_dir=folder, dataset=source, total_timesteps=5)
    assert all(torch.allclose(a[x], b[x]) for a, b in zip(batches[:5], batches[5:], strict=True) for x in a)


def test_nested_observations_come_as_gymnasium_flattens_them(drawn):
    env = probe_envs.Spaces("nested_image", "box")
    env.observation_space.seed(0)
    raw = [env.observation_space.sample() for _ in range(18)]
    flat = np.stack([flatten(env.observation_space, x) for x in raw])
    batches, kwargs = drawn(iql), dict(obs="nested_image", action="box")
    args = short("Spaces", env_kwargs=kwargs, dataset=data(obs=flat, next_obs=flat, action=np.zeros((18, 2))))
    args.total_timesteps, args.batch_size = 2, 64
    iql.train(args)
    to_array, _ = iql.observation_map(env.observation_space)
    expected = {to_array(x).tobytes() for x in raw}
    assert {x.numpy().tobytes() for x in batches[0]["obs"]} <= expected


ZEROS = np.zeros((18, 1))


@pytest.mark.parametrize("changes, words", [
    (dict(obs=np.zeros((18, 3))), "obs (3,) Box"), (dict(next_obs=np.zeros((18, 3))), "next_obs (3,) Box"),
    (dict(action=np.zeros(18)), "action () Box"), (dict(reward=ZEROS), "reward (1,)"),
    (dict(terminated=ZEROS), "terminated (1,)"), (dict(obs=np.full((18, 2), np.nan)), "not finite"),
    (dict(next_obs=np.full((18, 2), np.inf)), "not finite"), (dict(reward=np.full(18, np.nan)), "not finite"),
    (dict(terminated=np.ones(18, bool)), "episode 0 goes on after"), (dict(next_obs=None), "next_obs"),
    (dict(terminated=None), "terminated"), (dict(lengths=None), "lengths"), (dict(action=None), "action"),
    (dict(lengths=np.array([3, 14])), "lengths"), (dict(lengths=np.array([17, 1, 0])), "lengths"),
    (dict(reward=np.zeros(17)), "lengths"), (dict(action=np.full((18, 1), "left")), "action <U4"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_in_one_line(capsys, changes, words):
    refused(capsys, short(dataset=data(**changes)), f"data.npz {words}")


@pytest.mark.parametrize(
    "damage", [lambda whole: b"", lambda whole: whole[:400], lambda whole: whole[:70] + whole[90:]]
)
def test_a_damaged_file_is_refused_in_one_line(capsys, damage):
    with np.load(data()) as file:
        np.savez_compressed("whole.npz", **file)
    Path("data.npz").write_bytes(damage(Path("whole.npz").read_bytes()))
    refused(capsys, short(dataset="data.npz"), "cannot read data.npz")


@pytest.mark.parametrize("changes, words", [
    (dict(dataset="none.npz"), "none.npz"), (dict(dataset="probe/nowhere-v0"), "probe/nowhere-v0"),
    (dict(dataset=""), "--dataset is missing"), (dict(env_id="probe_envs:Box-v0", env_kwargs={}), "obs (2,)"),
    (dict(env_kwargs={"actions": "discrete"}), "Box bc.py"), (dict(expectile=1.1), "--expectile"),
    (dict(env_id="ALE/Pong-v5", env_kwargs={"continuous": True}), "Atari"),
    (dict(normalize_reward=True, reward=np.zeros(18)), "--normalize-reward returns"),
])  # fmt: skip
def test_what_cannot_be_learned_is_refused_in_one_line(capsys, changes, words):
    reward = {"reward": changes.pop("reward")} if "reward" in changes else {}
    changes = dict(changes)
    args = short(dataset=data(**reward))
    for name, x in changes.items():
        setattr(args, name, x)
    refused(capsys, args, words)


def refused(capsys, args, words):
    assert call_main(iql, *flags(args)) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and all(word in err for word in words.split()), err
    assert not Path("run").exists()


# ------------------------------------------------------------------------------------------ offline, online
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("finetune_steps", [0, 60, 99, 200])
def test_the_environment_is_not_stepped_before_its_time_then_once_for_each_update(
    record, num_envs, finetune_steps, capsys
):
    updates = record(iql, "critic_loss")
    quick(
        dataset=data(),
        total_timesteps=100,
        finetune_steps=finetune_steps,
        num_envs=num_envs,
        checkpoint_every=16,
    )
    offline = max(100 - finetune_steps, 0)
    online = math.ceil((100 - offline) / num_envs) * num_envs
    assert probe_envs.Walk.count["rollout"] == online
    assert ("all steps are online" in capsys.readouterr().out) == (not offline)
    assert len(updates) == checkpoint()["run"]["env_steps"] == offline + online


def test_the_data_set_is_kept_and_what_is_played_is_appended(seen, drawn):
    """No step is lost or overwritten, and batches are drawn from both."""
    zeros, batches = np.zeros((18, 4), np.float32), drawn(iql)
    args = dict(dataset=data(obs=zeros - 1, next_obs=zeros), finetune_steps=71, num_envs=2, batch_size=64)
    quick("Boundary", **args, total_timesteps=91, checkpoint_every=16)
    held, file = seen["buffer"].data, np.load("data.npz")
    assert seen["buffer"].filled == 18 + 72
    for name in ("obs", "action", "reward", "next_obs", "terminated"):
        assert np.allclose(held[name][:18], file[name])
    steps = [step[1:] for step in probe_envs.Boundary.steps if not step[0]]
    expected = [[number, episode, t - 1, 0] for number, episode, t, _, _ in steps]
    assert held["obs"][18:90].tolist() == expected
    assert held["reward"][18:90].tolist() == [step[-1] for step in steps]
    assert np.allclose(held["action"][18:90], np.array([step[3] for step in steps]).clip(-1, 1))
    terminal = [
        t == probe_envs.boundary_length(number, episode) and probe_envs.boundary_terminates(number, episode)
        for number, episode, t, *_ in steps
    ]
    assert held["terminated"][18:90].tolist() == terminal
    drawn_from = {tuple(x) for batch in batches for x in batch["obs"].tolist()}
    assert drawn_from <= {tuple(x) for x in expected} | {(-1, -1, -1, -1)} and len(drawn_from) > 60


@pytest.mark.parametrize("finetune_steps", [0, 92, 172])
def test_killed_and_resumed_equals_uninterrupted_in_both_phases(finetune_steps):
    """The first checkpoint is after 64 steps, and the kill comes after it."""
    args = dict(finetune_steps=finetune_steps, log_every=100, checkpoint_every=32, total_timesteps=192)
    quick(run_dir="whole", **args)
    log = iql.Run.log

    def log_and_die(run, metrics):
        log(run, metrics)
        if run.env_steps > run.saved_at > 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        iql.Run.log = log_and_die
        quick(run_dir="killed", **args)

    assert wait(fork(killed)) == -signal.SIGKILL
    assert checkpoint("killed")["run"]["env_steps"] == 64
    iql.train(iql.parse_args(["--resume", "killed"]))
    assert equal(parts("whole"), parts("killed")) and progress("whole") == progress("killed")


def test_a_run_on_data_goes_on_online_and_further_online():
    quick(dataset=data(), total_timesteps=64)
    go_on = lambda *words: iql.train(iql.parse_args(["--resume", "run", *words]))
    go_on("--finetune-steps", "36", "--total-timesteps", "100")
    assert probe_envs.Walk.count["rollout"] == 36 and len(checkpoint()["buffer"]["reward"]) == 36
    go_on("--total-timesteps", "120")
    assert probe_envs.Walk.count["rollout"] == 56 and len(checkpoint()["buffer"]["reward"]) == 56


def test_another_data_set_is_refused_when_a_run_is_resumed_and_the_same_elsewhere_is_not(capsys):
    quick(dataset=data(), total_timesteps=32)
    shutil.move("data.npz", "moved.npz")
    on = ["--resume", "run", "--total-timesteps", "64"]
    assert call_main(iql, *on) == 2 and "data.npz" in capsys.readouterr().err
    reward = np.load("moved.npz")["reward"]
    for change in (dict(reward=reward + 1e-6), dict(lengths=np.array([8, 4, 6]), terminated=None)):
        terminated = np.isin(np.arange(18), [7, 17])
        data(
            **{"reward": reward, "terminated": terminated}
            | {k: x for k, x in change.items() if x is not None}
        )
        assert call_main(iql, *on) == 2
        err = capsys.readouterr().err.strip()
        assert "data set" in err and len(err.splitlines()) == 1
    assert call_main(iql, *on, "--dataset", "moved.npz") == 0
    assert checkpoint()["run"]["env_steps"] == 64


def test_the_actors_rate_follows_a_cosine_to_0_and_is_whole_again_online():
    quick(dataset=data(), total_timesteps=60, finetune_steps=20, learning_rate=0.5, num_envs=1, log_every=1)
    rates = [row["schedule/learning_rate"] for row in progress() if "loss/actor" in row]
    expected = [0.25 * (1 + math.cos(math.pi * i / 40)) for i in range(40)] + [0.5] * 20
    assert rates == pytest.approx(expected, abs=1e-6)
    rates = {float(group["lr"]) for group in iql.load("run")["value_optimizer"]["param_groups"]}
    assert rates == {0.5}


def test_it_learns_to_walk_to_where_a_random_data_set_pays():
    """Half of the actions in each state are right. Imitation of all of them would stand still."""
    rng = np.random.default_rng(1)
    obs = rng.uniform(-1, 1, (400, 2)).astype(np.float32)
    action = rng.uniform(-1, 1, (400, 1))
    reward = -np.abs(action[:, 0] - np.sign(obs[:, 0]))
    arrays = dict(obs=obs, next_obs=obs, action=action, reward=reward, lengths=np.ones(400, int))
    arrays |= dict(terminated=np.ones(400, bool))
    args = dict(total_timesteps=600, learning_rate=3e-3, hidden_sizes=(32,), batch_size=64)
    quick(dataset=data(**arrays), **args)
    policy = iql.load_policy("run")
    right = np.array([policy(o)[0] * np.sign(o[0]) for o in obs])
    assert right.mean() > 0.25, right.mean()


# ------------------------------------------------------------------------------------------------ record.py
def test_episodes_of_a_policy_are_recorded_as_they_were_played(tool, capsys):
    quick(total_timesteps=16)
    for words in ([], ["--sample"]):
        tool("run", "--episodes", 3, "--seed", 7, *words, "--out", "played.npz")
        file, policy = np.load("played.npz"), iql.load_policy("run")
        assert set(file) == {*"obs action reward next_obs terminated truncated lengths".split()}
        starts = file["lengths"].cumsum() - file["lengths"]
        env, returns = gym.make("probe_envs:Walk-v0", actions="box"), []
        for i, (first, length) in enumerate(zip(starts, file["lengths"], strict=True)):
            obs, _ = env.reset(seed=7 + i)
            for row in range(first, first + length):
                assert np.array_equal(file["obs"][row], obs)
                if not words:
                    assert np.allclose(policy(obs), file["action"][row])
                obs, reward, *ends, _ = env.step(file["action"][row])
                assert reward == pytest.approx(file["reward"][row]) and np.array_equal(
                    file["next_obs"][row], obs
                )
                assert ends == [file["terminated"][row], file["truncated"][row]]
                assert any(ends) == (row == first + length - 1)
            returns.append(file["reward"][first : first + length].sum())
        assert (
            f"3 episodes, {len(file['obs'])} steps, mean return {np.mean(returns):.1f}"
            in capsys.readouterr().out
        )
    assert not all(np.allclose(policy(o), a) for o, a in zip(file["obs"], file["action"], strict=True))


def test_random_episodes_merged_with_others_are_learned_by_both_scripts(tool):
    env = ["--env-id", "probe_envs:LQ-v0", "--episodes", 4]
    tool(*env, "--out", "a.npz"), tool(*env, "--seed", 9, "--out", "b.npz")
    tool("--merge", "a.npz", "b.npz", "--out", "both.npz")
    a, b, both = map(np.load, ("a.npz", "b.npz", "both.npz"))
    assert all(np.array_equal(both[name], np.concatenate([a[name], b[name]])) for name in both)
    assert len(both["lengths"]) == 8 and not np.array_equal(a["obs"], b["obs"])
    quick("LQ", dataset="both.npz", total_timesteps=8)
    bc = load_script("bc")
    conftest.quick(bc, "LQ", "clone", expert="both.npz", dagger_iterations=0, total_timesteps=8)
    stored = checkpoint("clone")["demonstrations"]
    assert stored["episodes"] == 8 and stored["steps"] == both["lengths"].sum()


@pytest.mark.parametrize("size, num_envs, first", [(1000, 2, 80), (40, 2, 1000), (33, 1, 40), (40, 2, 21)])
def test_a_replay_buffer_is_written_as_it_was_played_episode_by_episode(tool, size, num_envs, first):
    """Also after the oldest steps were overwritten, and with episodes that a checkpoint cut."""
    sac = load_script("sac")
    options = dict(buffer_size=size, num_envs=num_envs, total_timesteps=80, checkpoint_every=15)
    conftest.quick(sac, "Boundary", "played", **options, env_kwargs={"actions": "box"})
    tool("played", "--replay", "--first", first, "--out", "replay.npz")
    file, steps = np.load("replay.npz"), [step[1:] for step in probe_envs.Boundary.steps if not step[0]]
    kept = steps[-(size // num_envs * num_envs) :][: math.ceil(first / num_envs) * num_envs]
    expected = [step for i in range(num_envs) for step in kept[i::num_envs]]
    number, episode, t, action, reward = map(np.array, zip(*expected, strict=True))
    assert np.array_equal(file["obs"][:, :3], np.stack([number, episode, t - 1], axis=1))
    assert np.array_equal(file["next_obs"][:, 2], t) and np.allclose(file["reward"], reward)
    assert np.allclose(file["action"], action, atol=1e-6)
    ends = [t == probe_envs.boundary_length(n, e) for n, e, t in zip(number, episode, t, strict=True)]
    truth = [probe_envs.boundary_terminates(n, e) for n, e in zip(number, episode, strict=True)]
    assert np.array_equal(file["terminated"], np.array(ends) & truth)
    splits = file["lengths"].cumsum()[:-1]
    same = [np.ptp(x) == 0 for x in np.split(100 * number + episode, splits)]
    assert all(same) and file["lengths"].sum() == len(expected)
    changes = np.flatnonzero((np.diff(number) != 0) | (np.diff(episode) != 0)) + 1
    assert np.array_equal(splits, changes)
    assert (file["truncated"] & file["terminated"]).sum() == 0 and file["truncated"].any()
    quick("Boundary", dataset="replay.npz", total_timesteps=8)


@pytest.mark.parametrize("kwargs", [
    dict(where="info"), dict(where="bool"), dict(where="dict"), dict(where="info", multi=True),
])  # fmt: skip
def test_random_actions_obey_masks_wherever_they_are(tool, kwargs):
    gym.register("Legal-v7", "odd_envs:Legal", kwargs=kwargs)  # it refuses illegal actions
    try:
        tool("--env-id", "Legal-v7", "--episodes", "3", "--out", "random.npz")
        file = np.load("random.npz")
        assert ("action_mask" in file) == (kwargs["where"] != "dict") and file["lengths"].tolist() == [10] * 3
    finally:
        gym.registry.pop("Legal-v7")


def test_actions_of_several_kinds_cannot_be_recorded(tool, capsys):
    with pytest.raises(SystemExit):
        tool("--env-id", "odd_envs:Pair-v0", "--out", "joint.npz")
    assert "Dict or Tuple actions" in capsys.readouterr().err and not Path("joint.npz").exists()


@pytest.mark.parametrize("words, told", [
    (["--replay"], "a run"), (["run", "--env-id", "CartPole-v1"], "either"),
    (["run", "--replay"], "replay buffer"),
    (["run", "--first", "5"], "needs --replay"), (["run", "--replay", "--first", "0"], "at least 1"),
    (["--merge", "a.npz", "b.npz"], "different arrays"), (["empty"], "no copy"),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(tool, capsys, words, told):
    Path("empty").mkdir()
    np.savez("a.npz", obs=np.zeros(3)), np.savez("b.npz", reward=np.zeros(3))
    reinforce = load_script("reinforce")
    conftest.quick(reinforce, total_timesteps=16)
    with pytest.raises(SystemExit) as stop:
        tool(*words, "--out", "out.npz")
    assert told in f"{stop.value} {capsys.readouterr().err}" and not Path("out.npz").exists()


def test_the_comparison_with_cloning_trains_what_is_missing_and_writes_its_table(tool, monkeypatch):
    offline = importlib.import_module("offline")
    small = dict(hidden_sizes=(8,), total_timesteps=16, device="cpu", env_kwargs={"actions": "box"})
    small |= dict(batch_size=16)
    walk, table = "probe_envs:Walk-v0", Path("offline.csv").absolute()
    new = dict(BOTH=small, SEEDS=(1, 2), TABLE=table, ROOT=Path.cwd())
    new["OF"] = offline.OF | dict(iql_online=dict(total_timesteps=24, finetune_steps=8))
    for name, x in (new | dict(DATA=Path("data"))).items():
        monkeypatch.setattr(offline, name, x)
    monkeypatch.setattr(sys, "argv", ["offline.py", walk])
    Path("data", walk).mkdir(parents=True)
    data(f"data/{walk}/random.npz")
    for name in ("algos", "recipes"):
        Path(name).symlink_to(conftest.ROOT / name)
    offline.main()
    first, (head, *rows) = table.read_text(), [line.split(",") for line in table.read_text().splitlines()]
    assert head == "env_id data algo seed total_timesteps return_mean".split()
    assert [row[2:4] for row in rows] == [
        ["data set", ""],
        *(["bc", x] for x in "12"),
        *([algo, x] for algo in ("td3_bc", "iql", "iql_online") for x in "12"),
    ]
    assert float(rows[0][-1]) == pytest.approx(returns_of(f"data/{walk}/random.npz").mean(), abs=0.01)
    policy = iql.load_policy(f"benchmark/runs/offline/{walk}-random-iql-2")
    args = iql.Args(**checkpoint(f"benchmark/runs/offline/{walk}-random-iql-2")["args"])
    assert float(rows[6][-1]) == pytest.approx(np.mean(conftest.play(policy, args, 100)), abs=0.01)
    assert "bc_alpha" in checkpoint(f"benchmark/runs/offline/{walk}-random-td3_bc-1")["args"]
    shutil.rmtree("benchmark")
    offline.main()
    assert table.read_text() == first and not Path("benchmark").exists(), "nothing is trained again"
    assert "Walk, random" in Path("offline.txt").read_text()
