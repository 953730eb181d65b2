"""Behavioural cloning and DAgger: who demonstrates, what is learned from, and what is only validated on."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import probe_envs
import pytest
import torch
from conftest import call_main, checkpoint, equal, flags, load_script, make_expert, progress, tiny
from torch.distributions import Categorical, Normal

ASKED = """
plain_reset_done = reset_done


def reset_done(envs, next_obs, next_info, done):
    obs, after = plain_reset_done(envs, next_obs, next_info, done)
    after["asked"] = np.where(done, 0, next_info["asked"] + 1)
    return obs, after


def load_policy(path):
    class Agent:
        def act(self, obs, info, greedy=True):
            return info.setdefault("asked", np.zeros(len(obs), dtype=int)) % 2
    class P: agent = Agent()
    return P
"""  # has a memory: its action is the parity of the steps of the episode
EMPTY = np.zeros(0, dtype=int)


@pytest.fixture
def bc():
    return load_script("bc")


def short(bc, env="Walk", run_dir="run", env_kwargs=None, **changes):
    """Arguments of behavioral cloning on a probe, evaluated at the end only."""
    plain = dict(env_id=f"probe_envs:{env}-v0", env_kwargs=env_kwargs or {}, eval_every=0, checkpoint_every=0)
    plain |= dict(dagger_iterations=0, normalize_obs=False, total_timesteps=16)
    return tiny(bc, run_dir, **plain | changes)


def data(**changes) -> str:
    """An .npz file of four episodes of Walk with discrete actions; None takes an array away."""
    arrays = dict(obs=np.random.default_rng(0).normal(size=(18, 2)).astype(np.float32), reward=np.ones(18))
    arrays |= dict(action=np.arange(18) // 2 % 2, lengths=np.array([3, 5, 4, 6])) | changes
    np.savez("data.npz", **{name: x for name, x in arrays.items() if x is not None})
    return "data.npz"


def demonstrations(part: str, run_dir="run") -> dict:
    return checkpoint(run_dir)["demonstrations"][part]


def test_losses_equal_numbers_worked_out_by_hand(bc):
    assert float(bc.log_prob_loss(torch.tensor([-1.0, -2, -6]))) == 3
    mean, action = torch.tensor([[0.0, 1], [2, 2]]), torch.tensor([[3.0, 1], [2, 0]])
    assert float(bc.mse_loss(mean, action)) == (9 + 4) / 2


@pytest.mark.parametrize("kind, loss", [("discrete", "log_prob"), ("box", "log_prob"), ("box", "mse")])
def test_the_loss_is_of_the_experts_actions_and_of_the_mean_action(bc, kind, loss):
    bc.train(short(bc, env_kwargs={"actions": kind}, loss=loss, learning_rate=0.0, log_std_init=1.5))
    held_out, policy = demonstrations("validation"), bc.load_policy("run").agent
    pi = policy.policy(held_out["obs"]).detach()
    if kind != "box":
        expected = -Categorical(logits=pi[:, 0]).log_prob(held_out["action"]).mean()
    else:
        mean = torch.tensor(policy.act(held_out["obs"].numpy(), {}))
        normal = Normal(mean, torch.tensor(1.5).exp())
        assert held_out["action"].abs().max() == 1, "clipped as the environment does it"
        error = (held_out["action"] - mean).square().mean()
        expected = error if loss == "mse" else -normal.log_prob(held_out["action"]).mean()
    row = progress()[0]
    assert row["loss/validation"] == pytest.approx(float(expected), rel=1e-5)
    assert abs(row["loss/policy"] - row["loss/validation"]) < 5 * row["loss/policy_std"] + 0.05


def test_what_is_validated_on_is_never_learned_from(bc, monkeypatch):
    """Observations name their episode. Neither gradients nor the normalizer see one that is held out."""
    learned, encode = set(), bc.Agent.policy

    def watch(agent, obs):
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            learned.update(map(tuple, obs.tolist()))
        return encode(agent, obs)

    monkeypatch.setattr(bc.Agent, "policy", watch)
    bc.train(short(bc, "Boundary", total_timesteps=64, dagger_iterations=1, normalize_obs=True, num_envs=3))
    train, held_out = demonstrations("training")["obs"], demonstrations("validation")["obs"]
    episodes = lambda obs: {(x[0], x[1]) for x in obs.tolist()}
    assert learned <= set(map(tuple, train.tolist())) and len(episodes(held_out)) == 24 // 4
    assert not episodes(train) & episodes(held_out) and len(episodes(train)) == 24 - 24 // 4
    for number, episode in episodes(held_out):
        steps = (held_out[:, :2] == torch.tensor([number, episode])).all(1).sum()
        assert steps == probe_envs.boundary_length(int(number), int(episode))
    assert np.allclose(checkpoint()["agent"]["obs_norm.mean"], train.double().mean(0))


def test_dagger_asks_the_expert_where_the_learner_gets_to_and_stores_each_answer_once(bc):
    """The expert remembers how often it was asked in an episode, also while the learner plays."""
    options = dict(num_envs=1, expert_episodes=4, dagger_iterations=2, dagger_episodes=5, total_timesteps=48)
    args = short(bc, "Boundary", learning_rate=0.0, validation_share=0.0, checkpoint_every=16, **options)
    bc.train(replace(args, expert=make_expert(args, source=ASKED)))
    steps = [step for step in probe_envs.Boundary.steps if not step[0]]
    stored = demonstrations("training")
    assert stored["obs"].tolist() == [[number, episode, t - 1, 0] for _, number, episode, t, _, _ in steps]
    parity = [(t - 1) % 2 for _, _, _, t, _, _ in steps]
    assert stored["action"].tolist() == parity
    ends = [i for i in range(len(steps)) if i + 1 == len(steps) or steps[i + 1][3] == 1]
    taken, first = [step[4] for step in steps], ends[3] + 1
    learner = bc.load_policy("run").agent.act(stored["obs"].numpy(), {}).tolist()  # has learned nothing
    assert taken == parity[:first] + learner[first:] and learner[first:] != parity[first:]
    returns = [probe_envs.boundary_return(*steps[i][1:3]) for i in ends]
    rows = [row for row in progress() if "reward/mean" in row]
    assert rows[0]["expert/return_mean"] == pytest.approx(np.mean(returns[:4])) and len(rows) == 3
    told = [row["train/episode_return"] for row in rows[1:]]
    assert told == pytest.approx([np.mean(returns[4:9]), np.mean(returns[9:])])
    assert progress()[-2]["demonstrations/steps"] == len(steps)


@pytest.mark.parametrize("path", ["teacher", "teacher/best.pt", "teacher/models/{}.pt", "lone.pt"])
@pytest.mark.parametrize("name", ["ppo", "es"])
def test_an_expert_of_another_script_acts_as_it_does_there(bc, name, path):
    """With the normalizer of its own; Box actions are learned as the environment carries them out."""
    script = load_script(name)
    kwargs, lone = {"actions": "box"}, ["--expert-script", f"teacher/{name}.py"]
    script.train(tiny(script, "teacher", env_kwargs=kwargs, log_std_init=2.0, learning_rate=0.3))
    path = path.format(max(int(x.stem) for x in Path("teacher/models").iterdir()))
    os.link("teacher/best.pt", "lone.pt")
    Path("teacher/script_before.py").write_text("no script")  # of two copies the newer one counts
    os.utime("teacher/script_before.py", (0, 0))
    args = short(bc, env_kwargs=kwargs, expert=path, expert_episodes=5)
    assert call_main(bc, *flags(args), *(lone if path == "lone.pt" else [])) == 0
    stored = demonstrations("training")
    wanted = script.load_policy(path).agent.act(stored["obs"].numpy(), {})
    assert np.allclose(stored["action"], wanted.clip(-1, 1), atol=1e-6) and len(np.unique(wanted)) > 20


@pytest.mark.parametrize("obs, action", [
    ("hwc", "discrete_start"), ("discrete_start", "multi_discrete_start"), ("float64", "box"),
    ("vector", "half_bounded"), ("multi_discrete", "multi_binary_2d"),
])  # fmt: skip
@pytest.mark.parametrize("source", ["npz", "minari"])
@pytest.mark.filterwarnings("ignore")  # of Minari, which would like to know more
def test_a_dataset_is_as_the_environment_gives_and_takes_it(bc, obs, action, source, monkeypatch):
    """Loaded, its observations are those that an agent sees, and its actions arrive as they were."""
    env, seen, taken = probe_envs.Spaces(obs, action), [], []
    env.action_space.seed(0)
    for episode in range(3):
        seen += [env.reset(seed=episode)[0], *(env.observe() for _ in range(7))]
        taken += [env.action_space.sample() for _ in range(7)]
    first = [i for i in range(24) if i % 8 < 7]  # Minari has the last observation too
    arrays = dict(obs=np.stack(seen)[first], action=np.stack(taken), reward=np.ones(21))
    np.savez("data.npz", **arrays, lengths=np.full(3, 7))
    where = dict(expert="data.npz")
    if source == "minari":
        minari, where = pytest.importorskip("minari"), dict(dataset="probe/spaces-v0")
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("minari").absolute()))
        from minari.data_collector import EpisodeBuffer

        episodes = [
            EpisodeBuffer(
                observations=np.stack(seen[8 * i : 8 * i + 8]), actions=np.stack(taken[7 * i : 7 * i + 7]),
                rewards=[1.0] * 7, terminations=[False] * 7, truncations=[False] * 6 + [True],
            ) for i in range(3)
        ]  # fmt: skip
        spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
        minari.create_dataset_from_buffers("probe/spaces-v0", episodes, jpeg_encoding=False, **spaces)
    bc.train(short(bc, "Spaces", env_kwargs=dict(obs=obs, action=action), validation_share=0.0, **where))
    stored = demonstrations("training")
    envs = bc.make_envs(bc.Args(**checkpoint()["args"]), 1)
    assert len(stored["obs"]) == 21 and np.allclose(stored["obs"][7], envs.reset(seed=1)[0][0])
    probe_envs.Spaces.actions.clear()
    for choice in stored["action"].numpy():
        envs.reset()
        envs.step(choice[None])
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(probe_envs.Spaces.actions, taken, strict=True))


@pytest.mark.parametrize("changes, words", [
    (dict(obs=np.zeros((18, 3))), "obs (3,)"), (dict(obs=np.full((18, 2), np.nan)), "not finite"),
    (dict(reward=np.full(18, np.inf)), "not finite"), (dict(action=np.full(18, 2)), "action Discrete(2)"),
    (dict(action=np.zeros((18, 1))), "action (1,) Discrete(2)"), (dict(action=np.zeros(18)), "float64"),
    (dict(lengths=np.array([3, 14])), "lengths"), (dict(lengths=np.array([19, -1])), "lengths"),
    (dict(obs=np.zeros((0, 2)), action=EMPTY, reward=EMPTY, lengths=EMPTY), "no episodes"),
    (dict(action=None), "action"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_in_one_line(bc, capsys, changes, words):
    args = short(bc, expert=data(**changes))
    refused(bc, capsys, args, f"data.npz {words}")


@pytest.mark.parametrize("changes, words", [
    (dict(expert=""), "--expert --dataset"), (dict(dataset="probe/x-v0"), "--expert --dataset"),
    (dict(expert="", dataset="probe/nowhere-v0"), "probe/nowhere-v0"), (dict(expert="no.npz"), "no.npz"),
    (dict(expert="expert/reinforce.py"), "cannot load reinforce.py"), (dict(loss="mse"), "mse Box"),
    (dict(expert="data.npz", dagger_iterations=1), "--dagger-iterations acts"),
    (dict(env_id="probe_envs:Ones-v0"), "expert Walk Ones"), (dict(expert="bare"), "bare --expert-script"),
    (dict(expert_script="bare/notes.txt"), "notes.txt"), (dict(validation_share=0.6), "--validation-share"),
    (dict(env_id="ALE/Pong-v5", env_kwargs={}, expert="data.npz"), "Atari --expert"),
])  # fmt: skip
def test_who_cannot_demonstrate_is_refused_in_one_line(bc, capsys, changes, words):
    data()
    args = short(bc)
    make_expert(args, "bare")
    os.remove("bare/reinforce.py")
    Path("bare/notes.txt").write_text("no script")
    refused(bc, capsys, replace(args, **changes), words)


def refused(bc, capsys, args, words):
    assert call_main(bc, *flags(args)) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and all(word in err for word in words.split()), err
    assert not Path("run").exists()


def test_a_run_ends_patience_epochs_after_its_least_validation_loss_with_the_weights_of_it(bc):
    """Every fourth episode is held out, and there the expert does the opposite of what it did before."""
    action = np.repeat([0, 0, 0, 1], [3, 5, 4, 6])
    same = dict(learning_rate=0.1, minibatches_per_epoch=2, total_timesteps=1000)
    bc.train(short(bc, expert=data(action=action), patience=5, **same))
    losses = [row["loss/validation"] for row in progress() if "loss/validation" in row]
    assert len(losses) == 6 and losses[0] == min(losses) and checkpoint()["run"]["env_steps"] == 12
    bc.train(short(bc, expert="data.npz", init_from="run", run_dir="again", **same | dict(learning_rate=0.0)))
    assert progress("again")[0]["loss/validation"] == pytest.approx(losses[0], rel=1e-6)
    assert bc.train(bc.parse_args(["--resume", "run"])).size == 2, "a run that ended is at its end"
    assert checkpoint()["run"]["env_steps"] == 12


def test_another_script_goes_on_from_the_weights_of_a_clone(bc):
    bc.train(short(bc))
    reinforce = load_script("reinforce")
    changes = dict(init_from="run", total_timesteps=64, learning_rate=0.0, normalize_obs=False)
    reinforce.train(replace(tiny(reinforce, "warm"), **changes))
    clone, warm = checkpoint("run")["agent"], checkpoint("warm")["agent"]
    assert all(torch.equal(warm[name], clone[name]) for name in warm)


def test_each_iteration_has_a_least_loss_of_its_own(bc):
    iteration = bc.Iteration(torch.nn.Linear(1, 1))
    for step, loss in ((0, 1.0), (8, 5.0)):
        iteration.begin(step)
        iteration.count_epoch(loss)
        assert iteration.least == loss and iteration.epochs_since == 0 and iteration.weights
        resumed = bc.Iteration(iteration.agent)
        resumed.load_state_dict(iteration.state_dict())
        assert equal(vars(resumed) | {"agent": 0}, vars(iteration) | {"agent": 0})
        iteration.restore_best()


def test_without_episodes_to_validate_on_every_iteration_has_its_share_of_the_steps(bc):
    bc.train(short(bc, validation_share=0.0, dagger_iterations=2, total_timesteps=96, patience=1))
    rows = [row for row in progress() if "loss/policy" in row]
    assert [row["step"] for row in rows if "reward/mean" in row] == [8, 40, 72]
    assert rows[-1]["step"] == 96 and not any("loss/validation" in row for row in rows)
