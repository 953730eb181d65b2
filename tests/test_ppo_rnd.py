"""Random network distillation: what is new, how it is scaled, and that its returns never end."""

from dataclasses import replace
from functools import partial

import conftest
import numpy as np
import probe_envs
import pytest
import torch
from conftest import CPU, ROOT, checkpoint, equal, load_script, parts, progress


@pytest.fixture
def rnd():
    return load_script("ppo_rnd")


# One rollout of 64 steps and one update; nothing is normalized but what novelty needs
ROLLOUT = dict(normalize_advantage=False, update_epochs=1, num_minibatches=1, total_timesteps=1)
short, quick = (partial(f, **ROLLOUT) for f in (conftest.short, conftest.quick))


def played() -> list[tuple]:
    """(number, observation, reward, next observation, terminated, done) of the steps of no evaluation."""
    found = []
    for evaluates, number, episode, t, _, reward in probe_envs.Boundary.steps:
        done = t == probe_envs.boundary_length(number, episode)
        terminated = done and probe_envs.boundary_terminates(number, episode)
        obs, next_obs = np.array([[number, episode, t - 1, 0], [number, episode, t, 2 * done - terminated]])
        if not evaluates:
            found.append((number, obs, reward, next_obs, terminated, done))
    return found


NOVELTY = lambda x: 1 + x[..., 2] + 7 * x[..., 3] + 3 * x[..., 1]  # of [number, episode, t, end]
V_E, V_I = lambda x: 5 * x[..., 1] + x[..., 2] + 50 * x[..., 3], lambda x: 2 - x[..., 2] + 20 * x[..., 3]


def expected(steps, intrinsic: bool, scale, gamma, gae_lambda) -> list[float]:
    """Advantages of all steps, by sums over what follows in its environment and its rollout of 32 steps."""
    advantages = []
    for number in dict.fromkeys(step[0] for step in steps):
        own = [step for step in steps if step[0] == number]
        for start in range(64):
            total, weight = 0.0, 1.0
            for t in range(start, 64 if start >= 32 else 32):
                _, obs, reward, next_obs, terminated, done = own[t]
                if intrinsic:  # goes on with the first observation of the next episode
                    follows = np.array([number, next_obs[1] + 1, 0, 0]) if done else next_obs
                    delta = NOVELTY(next_obs) / scale[t // 32] + gamma * V_I(follows) - V_I(obs)
                else:
                    delta = reward + gamma * (not terminated) * V_E(next_obs) - V_E(obs)
                total, weight = total + weight * delta, weight * gamma * gae_lambda
                if done and not intrinsic:
                    break
            advantages.append(total)
    return advantages


@pytest.mark.parametrize("intrinsic", [True, False])
def test_returns_of_novelty_never_end_and_its_scale_runs_along_time(rnd, monkeypatch, intrinsic):
    """Two rollouts with known values and a known novelty, against brute force."""

    class KnownAgent(rnd.Agent):
        def forward(self, obs):
            pi, values = super().forward(obs)
            return pi, [v(obs) + 0 * x for v, x in zip((V_E, V_I), values, strict=True)]

        def value(self, obs):
            return self(obs)[1]

    class KnownNovelty(rnd.Novelty):
        def whiten(self, obs):
            return obs

        def error(self, batch):
            return NOVELTY(batch["newest"]) + 0 * super().error(batch)

    advantages, loss = [], rnd.clipped_policy_loss
    watch = lambda *args: advantages.append(args[2]) or loss(*args)
    monkeypatch.setattr(rnd, "clipped_policy_loss", watch)
    monkeypatch.setattr(rnd, "Agent", KnownAgent)
    monkeypatch.setattr(rnd, "Novelty", KnownNovelty)
    coefs = dict(intrinsic_coef=3.0 * intrinsic, extrinsic_coef=2.0 * (not intrinsic), gae_lambda=0.9)
    gammas = dict(gamma_intrinsic=0.8, gamma=0.7, initial_obs_steps=0, total_timesteps=128, num_steps=32)
    quick(rnd, "Boundary", **coefs, **gammas)
    steps, seen = played(), [0.0, 0.0]
    assert sum(done for *_, done in steps) > 10
    for _, _, _, next_obs, _, _ in steps:  # the two environments in turns, each with its discounted sum
        seen.append(NOVELTY(next_obs) + 0.8 * seen[-2])
    scale = np.std(seen[2:66]), np.std(seen[2:])  # in the first and in the second rollout
    truth = expected(steps, intrinsic, scale, 0.8 if intrinsic else 0.7, 0.9)
    got = torch.cat(advantages) / (3 if intrinsic else 2)
    assert sorted(got.tolist()) == pytest.approx(sorted(truth), rel=1e-3, abs=1e-3)


def test_the_predictor_learns_from_the_stated_share(rnd):
    for share in (0.25, 1.0, 0.0):
        error = torch.rand(20_000, requires_grad=True)
        loss = rnd.predictor_loss(error, share)
        loss.backward()
        chosen = error.grad != 0
        assert float(chosen.float().mean()) == pytest.approx(share, abs=0.02)
        assert loss.item() == pytest.approx(error.detach()[chosen].mean().nan_to_num().item(), rel=1e-4)
    for share in (0.0, 0.5):
        quick(rnd, "Walk", run_dir=f"{share}", predictor_proportion=share)
    none, half = (checkpoint(folder)["novelty"] for folder in ("0.0", "0.5"))
    assert {name.split(".")[0] for name in none if not torch.equal(none[name], half[name])} == {"predictor"}


def test_novelty_falls_on_what_was_seen_often_and_the_target_never_changes(rnd, monkeypatch):
    saved, save = [], rnd.Run.checkpoint
    copy = lambda run: {name: x.clone() for name, x in run.parts["novelty"].state_dict().items()}
    monkeypatch.setattr(rnd.Run, "checkpoint", lambda run: saved.append(copy(run)) or save(run))
    learns = dict(num_minibatches=4, update_epochs=10, predictor_proportion=1.0, predictor_lr=3e-3)
    args = short(rnd, "Walk", total_timesteps=1920, checkpoint_every=480, hidden_sizes=(32,), **learns)
    rnd.train(args)
    first, last = saved[0], saved[-1]
    assert equal(checkpoint()["novelty"], last) and len(saved) == 3
    assert all(torch.equal(first[name], last[name]) for name in first if name.startswith("target"))
    novelty, error = rnd.Novelty(rnd.Layout(first["obs_norm.mean"].shape), args, CPU), {}
    direction = torch.randn(200, *first["obs_norm.mean"].shape)
    for state in (first, last):
        novelty.load_state_dict(state | {name: last[name] for name in last if name.startswith("obs_norm")})
        for reach in (0.5, 4.0):  # standard deviations from what was seen
            newest = novelty.whiten(last["obs_norm.mean"] + reach * direction * last["obs_norm.var"].sqrt())
            batch = dict(newest=newest, target=novelty.target(newest))
            error[state is last, reach] = novelty.error(batch).mean()
    assert error[True, 0.5] < 0.1 * error[False, 0.5] and error[True, 4.0] > 10 * error[True, 0.5]
    rows = [row["reward/intrinsic_mean"] for row in progress() if "reward/intrinsic_mean" in row]
    assert np.mean(rows[-3:]) < 0.3 * np.mean(rows[:3])


def test_only_the_newest_frame_of_a_stack_is_looked_at(rnd):
    images = dict(env="Spaces", env_kwargs={"obs": "small"})  # (10, 10, 4)
    for channels, shape in ((1, (1, 10, 10)), (0, (4, 10, 10))):
        args = short(rnd, **images, run_dir=f"{channels}", newest_channels=channels)
        rnd.train(args)
        assert checkpoint(f"{channels}")["novelty"]["obs_norm.mean"].shape == shape
        novelty = rnd.Novelty(rnd.Layout((4, 10, 10), np.uint8, [(4, 10, 10)]), args, CPU)
        obs = torch.randint(0, 255, (3, 4, 10, 10), dtype=torch.uint8)
        older, newer = obs.clone(), obs.clone()
        older[:, :3] = 0
        newer[:, 3] = 0
        assert torch.equal(novelty.whiten(obs), novelty.whiten(older)) == bool(channels)
        assert not torch.equal(novelty.whiten(obs), novelty.whiten(newer))
        assert novelty.whiten(obs).abs().max() == 5  # clipped: nothing was seen yet
    assert rnd.make_args("ALE/MontezumaRevenge-v5").newest_channels == 1


def test_random_steps_fill_the_normalizer_once_and_then_episodes_start_anew(rnd):
    quick(rnd, "Boundary", run_dir="whole", initial_obs_steps=20, num_steps=32)
    assert len(played()) == 20 + 64 == 20 + checkpoint("whole")["run"]["env_steps"]
    assert [int(obs[2]) for _, obs, *_ in played()[20:22]] == [0, 0]  # t
    probe_envs.forget()
    quick(
        rnd, "Boundary", initial_obs_steps=20, num_steps=32, eval_every=64, stop_return=-1e9
    )  # ends before the first rollout
    for total in (64, 128):
        words = ["--resume", "run", "--stop-return", "inf", "--total-timesteps", str(total)]
        rnd.train(rnd.parse_args(words))
        assert len(played()) == 20 + total, "no random steps again"
    seen = np.array([next_obs for _, _, _, next_obs, *_ in played()])  # no first observation of an episode
    state = checkpoint()["novelty"]
    assert state["obs_norm.count"] == 148 and np.allclose(state["obs_norm.mean"], seen.mean(0))
    assert np.allclose(state["obs_norm.var"], seen.var(0))


def test_a_grid_whose_reward_is_far_away(rnd, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    env = rnd.make_envs(rnd.Args(env_id="benchmark.hidden_envs:SparseGrid-v0"), 1)
    obs, _ = env.reset()
    assert obs.shape == (1, 48) and obs.sum() == 2
    way = [1] * 8 + [0] * 10 + [3] * 8 + [0] * 10 + [1] * 8 + [0] * 10 + [3] * 8 + [0] * 8
    rewards = [env.step(np.array([action]))[1][0] for action in way]
    assert rewards[-1] == 1 and sum(rewards) == 1


def test_both_values_learn(rnd):
    quick(rnd, intrinsic_coef=0.0, extrinsic_coef=0.0, eval_every=10**9, value_coef=0.5)
    before, after = (checkpoint(name=name)["agent"] for name in ("models/0.pt", "checkpoint.pt"))
    weight, bias = (before[f"value_head.{x}"] != after[f"value_head.{x}"] for x in ("weight", "bias"))
    assert weight.any(1).all() and bias.all()  # a row for each
    (row,) = [row for row in progress() if "loss/value" in row]
    assert row["loss/value"] > 0 < row["loss/intrinsic_value"]


def test_the_normalizer_starts_again_where_an_error_ended_its_first_steps(rnd, capsys):
    args = short(rnd, "Fault", env_kwargs=dict(after=10**6), initial_obs_steps=40, num_steps=32, num_envs=2)
    with pytest.raises(RuntimeError):
        rnd.train(replace(args, env_kwargs=args.env_kwargs | dict(after=12)))
    rnd.train(replace(args, run_dir="whole"))
    assert 0 < checkpoint()["novelty"]["obs_norm.count"] < 40
    again = rnd.parse_args(["--resume", "run"])
    rnd.train(replace(again, env_kwargs=args.env_kwargs))
    assert equal(parts(), parts("whole"))
