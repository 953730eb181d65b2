"""The two maps between an environment and a policy: what the network sees, what the environment gets."""

import math
import re
from dataclasses import replace

import gymnasium as gym
import numpy as np
import odd_envs
import probe_envs
import pytest
import torch
from conftest import (
    CPU,
    NAMES,
    call_main,
    checkpoint,
    equal,
    flags,
    has,
    load_script,
    make_expert,
    parts,
    play,
    plays,
    progress,
    quick,
    reads,
    short,
    takers,
    takes,
)
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

OBSERVATIONS, ACTIONS = probe_envs.observation_spaces(), probe_envs.action_spaces()
NEVER_READ, NEVER_TAKEN = ("sequence", "text", "dict_text"), ("dict", "text", "int8", "uint8", "int32")
# Images (C, H, W) of the observations that have any, and the axes that they were before
IMAGES = {
    "hwc": [(3, 40, 40)], "chw": [(3, 40, 40)], "small": [(4, 10, 10)], "hw": [(1, 10, 12)],
    "many_channels": [(16, 10, 10)], "square": [(10, 10, 10)], "stack": [(4, 10, 12)],
    "stack_hwc": [(6, 10, 12)], "stack_chw": [(6, 10, 12)], "dict_image": [(3, 12, 11)],
    "tuple_image": [(3, 12, 11)], "nested_image": [(3, 12, 11), (1, 10, 10)],
    "only_images": [(3, 12, 11), (4, 10, 10)],
}  # fmt: skip
FEW = dict(total_timesteps=64, num_steps=16, learning_starts=32, log_every=32, batch_size=8,
           expert_episodes=2, checkpoint_every=0, horizon=8, dagger_iterations=0)  # fmt: skip


def channels_first(image: np.ndarray) -> np.ndarray:
    """By hand: (C, H, W) of each image in the table."""
    if image.ndim == 2:
        return image[None]
    if image.ndim == 4 and image.shape[-1] == 3:
        image = image.transpose(0, 3, 1, 2)
    elif image.ndim == 3 and image.shape[-1] in (3, 4):
        image = image.transpose(2, 0, 1)
    return image.reshape(-1, *image.shape[-2:])


def parts_of(x) -> list:
    """By hand: what nested Dicts and Tuples hold, of spaces or of values."""
    if isinstance(x, (Dict, dict)):
        return [y for key in sorted(x.keys()) for y in parts_of(x[key])]
    return [y for part in x for y in parts_of(part)] if isinstance(x, (Tuple, tuple)) else [x]


def spaces_args(module, obs="vector", action=None, **changes):
    action = action or ("discrete" if takes(module.__name__, "discrete") else "box")
    return short(module, "Spaces", env_kwargs=dict(obs=obs, action=action), **FEW | changes)


# ---------------------------------------------------------------------------------------------- observations
@pytest.mark.parametrize("name", [name for name in OBSERVATIONS if name not in NEVER_READ])
def test_an_observation_becomes_one_array(ppo, name):
    space = OBSERVATIONS[name]
    space.seed(1)
    to_array, layout = ppo.observation_map(space)
    raw = space.sample()
    array = to_array(raw)
    assert array.shape == layout.shape and layout.contains(np.asarray(array, layout.dtype))
    assert layout.images == IMAGES.get(name, []) and not layout.masked
    if image_alone := isinstance(space, Box) and name in IMAGES:
        assert layout.dtype == array.dtype == np.uint8 and np.array_equal(array, channels_first(raw))
    if not image_alone:
        pairs = list(zip(parts_of(space), parts_of(raw), strict=True))
        size = lambda s: min(channels_first(np.zeros(s.shape)).shape[1:])
        is_image = lambda s: s.dtype == np.uint8 and len(s.shape or ()) > 1 and size(s) >= 5
        scale = lambda s: 255 if s.dtype == np.uint8 else 1
        numbers = [gym.spaces.flatten(s, x) / scale(s) for s, x in pairs if not is_image(s)]
        pixels = [channels_first(x).ravel() / 255 for s, x in pairs if is_image(s)]
        assert np.allclose(array, np.concatenate(numbers + pixels), atol=1e-3)  # float16 is as it is
        assert array.dtype.kind == "f" and layout.sizes == [
            sum(map(len, numbers)), *map(len, pixels), 0
        ]  # fmt: skip


@pytest.mark.parametrize("name", NEVER_READ)
def test_what_cannot_be_read_is_refused_in_one_line(ppo, name, capsys):
    assert call_main(ppo, *flags(spaces_args(ppo, name))) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and ("Text" in err or "Sequence" in err) and "cannot be read" in err


@pytest.mark.parametrize("where, mask", [("info", 50), ("bool", 50), ("dict", 50)])
@pytest.mark.parametrize("multi", [False, True])
def test_a_mask_is_what_an_observation_ends_with(ppo, where, mask, multi):
    args = short(ppo, "Legal", env_kwargs=dict(where=where, multi=multi))
    envs = ppo.make_envs(args, 2)
    layout = envs.single_observation_space
    assert layout.masked and layout.sizes == [2, mask] and layout.shape == (52,)
    obs, info = envs.reset(seed=3)
    assert info == {} and ((obs[:, 2:] == 0) | (obs[:, 2:] == 1)).all()
    for env, row in zip(envs.envs, obs, strict=True):
        assert np.array_equal(row[2:], env.unwrapped.legal)
    envs.close()


def test_the_first_lines_say_what_the_network_sees(ppo, capsys):
    for env, text in (
        (dict(env="Legal"), "obs: 2 numbers · actions: 50 choices, masked"),
        (dict(env="Legal", env_kwargs={"multi": True}), "actions: 3 × 47 choices, masked"),
        (dict(env="Box"), "obs: 4 numbers · actions: 2 numbers"),
        (dict(env="Spaces", env_kwargs={"obs": "dict_image"}),
         "obs: image 3×12×11 + 5 numbers · actions: 2 choices"),
        (dict(env="Spaces", env_kwargs={"obs": "nested_image", "action": "multi_binary"}),
         "obs: image 3×12×11 + image 1×10×10 + 5 numbers · actions: 2 × 2 × 2 choices"),
    ):  # fmt: skip
        quick(ppo, run_dir=text.replace(" ", ""), **env, **FEW)
        out = capsys.readouterr().out
        parameters = sum(x.numel() for x in ppo.load_policy(text.replace(" ", "")).agent.parameters())
        assert re.search(
            rf"^{re.escape(env['env'])}|{re.escape(text)}.* · {parameters:,} parameters$", out, re.M
        )
        assert text in out and f"{parameters:,} parameters" in out


@pytest.mark.parametrize("name", ["matrix", "cards", "slice", "thin", "bits", "small_bytes"])
def test_what_is_flattened_is_said(ppo, name, capsys):
    ppo.train(spaces_args(ppo, name))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    (line,) = notes
    assert str(OBSERVATIONS[name].dtype) in line and str(OBSERVATIONS[name].shape) in line and "CNN" in line


@pytest.mark.parametrize("name", NAMES)
def test_every_image_reaches_a_cnn_as_numbers_from_0_to_1(name, monkeypatch, seen):
    """Wherever it is; and the CNN learns."""
    script = load_script(name)
    kinds = [kind for kind in IMAGES if reads(name, kind)]
    if not kinds:
        assert has(script, "meta_batch_size") or name == "q_learning"
        pytest.skip("it says that it takes no images")
    looked, forward = {}, torch.nn.Conv2d.forward

    def watched(layer, x):
        looked.setdefault(id(layer), {}).setdefault(tuple(x.shape[1:]), []).append((x.min(), x.max()))
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", watched)
    for kind in ("hwc", "hw", "stack_hwc", "nested_image"):
        looked.clear()
        script.train(spaces_args(script, kind, run_dir=kind, eval_every=10**9, learning_rate=0.01))
        firsts = [cnn[0] for cnn in seen["agent"].modules() if isinstance(cnn, script.NatureCNN)]
        firsts = [layer if hasattr(layer, "in_channels") else layer[0] for layer in firsts]
        found = set()
        for layer in firsts:
            for shape, ranges in looked.get(id(layer), {}).items():
                low, high = (f(x) for f, x in zip((min, max), zip(*ranges, strict=True), strict=True))
                assert 0 <= low < 0.1 and 0.9 < high <= 1
                found.add(shape)
        assert found >= set(IMAGES[kind]) and len(firsts) >= len(IMAGES[kind])
        before, after = (checkpoint(kind, file)["agent"] for file in ("models/0.pt", "checkpoint.pt"))
        kernels = [key for key, x in before.items() if x.dim() == 4 and "target" not in key]
        assert not any(torch.equal(before[key], after[key]) for key in kernels)


# --------------------------------------------------------------------------------------------------- actions
@pytest.mark.parametrize("name", [name for name in ACTIONS if name not in NEVER_TAKEN])
def test_an_action_becomes_one_of_the_environment(ppo, name):
    space, rng = ACTIONS[name], np.random.default_rng(0)
    to_action, flat = ppo.action_map(space)
    if not isinstance(space, Box):
        assert isinstance(flat, (Discrete, MultiDiscrete)) and (
            flat.start == 0 if name[:3] == "dis" else True
        )
        flat.seed(1)
        given = [flat.sample() for _ in range(300)]
        sent = [to_action(x) for x in given]
        assert all(space.contains(x) for x in sent)
        known = {(str(x), str(y)) for x, y in zip(given, sent, strict=True)}
        assert len(known) == len({x for x, _ in known}) == len({y for _, y in known}) > 1  # one to one
        return
    low, high = space.low.ravel().astype(float), space.high.ravel().astype(float)
    bounded = high - low < 1e30
    assert flat.shape == (len(low),) and flat.dtype == np.float32
    assert (flat.high == np.where(bounded, 1, np.inf)).all() and (flat.low == -flat.high).all()
    for scale in (0.5, 5.0, 1e30):
        a = (scale * rng.normal(size=len(low))).astype(np.float32)
        sent = to_action(a)
        assert space.contains(sent) and np.isfinite(sent).all() and sent.dtype == space.dtype
        start = np.where(low > -1e30, low + 1, np.where(high < 1e30, high - 1, 0))  # beside a single bound
        stretched = np.where(bounded, low + (a + 1) / 2 * (np.where(bounded, high - low, 1)), start + a)
        assert np.allclose(np.ravel(sent), stretched.clip(low, high), atol=1e-5)
    ends = [np.ravel(to_action(np.full(len(low), x, np.float32))) for x in (-1, 1)]
    assert np.allclose(ends[0][bounded], low[bounded]) and np.allclose(ends[1][bounded], high[bounded])


def test_an_action_is_a_new_array_each_time(ppo):
    for name in ("multi_discrete", "multi_binary_2d", "box", "box_2d", "unbounded"):
        to_action, flat = ppo.action_map(ACTIONS[name])
        flat.seed(1)
        given = flat.sample()
        kept = given.copy()
        to_action(given)[...] = 0
        assert np.array_equal(given, kept) and not np.shares_memory(given, to_action(given))


@pytest.mark.parametrize("action", NEVER_TAKEN)
def test_what_cannot_be_decided_is_refused_in_one_line(ppo, action, capsys):
    assert call_main(ppo, *flags(spaces_args(ppo, action=action))) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and "ppo_joint_actions" in err and "Box of floats" in err


def test_a_dict_or_tuple_of_actions_is_refused_by_all_and_the_recipe_is_named(script, capsys):
    for kind in ("dict", "tuple"):
        args = short(script, "Pair", env_kwargs={"kind": kind}, **FEW)
        assert call_main(script, *flags(args)) == 2
        err = capsys.readouterr().err.strip()
        assert len(err.splitlines()) == 1 and "ppo_joint_actions" in err


@pytest.mark.parametrize("name", NAMES)
def test_every_action_that_arrives_is_legal_and_bounds_are_reached(name):
    script = load_script(name)
    kinds = [kind for kind in ACTIONS if kind not in NEVER_TAKEN and takes(name, kind)]
    assert len(kinds) > 2
    loud = dict(log_std_init=2.0, exploration_noise=1.0, sigma=3.0, epsilon_start=1.0, learning_starts=48)
    for kind in kinds:
        probe_envs.forget()
        script.train(spaces_args(script, action=kind, run_dir=kind, **loud))  # the environment checks each
        seen = np.array([np.ravel(action) for action in probe_envs.Spaces.actions], dtype=float)
        space = ACTIONS[kind]
        assert np.isfinite(seen).all() and len(seen) >= 64 * plays(script)
        if not isinstance(space, Box):
            assert all(len(set(column)) > 1 for column in seen.T)
        elif plays(script):
            low, high = space.low.ravel(), space.high.ravel()
            finite = (high - low < 1e30) & (low < high)
            reach = 0.1 * (high - low)[finite]
            assert (seen.min(0)[finite] < low[finite] + reach).all()
            assert (seen.max(0)[finite] > high[finite] - reach).all()


def test_a_choice_that_is_not_there_is_never_made(ppo):
    """Ragged choices share a table in the head, whose missing entries have no probability."""
    head = ppo.CategoricalHead(3, MultiDiscrete([2, 5, 3]), masked=False)
    assert head(torch.randn(4, 3), None).exp()[:, ~head.exists].max() == 0


# --------------------------------------------------------------------------------------- a policy taken away
PAIRS = [
    ("vector", "box"), ("float64", "discrete_start"), ("scalar", "multi_discrete_start"),
    ("discrete_start", "box_2d"), ("multi_discrete", "multi_binary_2d"), ("multi_binary", "box_scalar"),
    ("tuple", "box_locked"), ("dict", "half_bounded"), ("hw", "discrete_int8"), ("stack_hwc", "box_float64"),
    ("dict_image", "discrete"), ("nested_image", "multi_discrete_2d"), ("matrix", "unbounded"),
    ("discrete", "discrete"), ("vector", "discrete"),
]  # fmt: skip


def start(policy, num_envs: int) -> None:
    """Starts new episodes; a belief over tasks would be drawn at random."""
    policy.reset()
    if hasattr(policy.agent, "latent_dim"):
        policy.info["z"] = torch.zeros(num_envs, policy.agent.latent_dim)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_on_raw_observations_scores_as_the_evaluation_does(name):
    """Its actions are members of the action space; a batch of observations gives a batch of actions."""
    script, tried = load_script(name), 0
    for obs, action in PAIRS:
        if not reads(name, obs) or not takes(name, action):
            continue
        tried += 1
        args = spaces_args(script, obs, action, run_dir=f"{obs}-{action}", normalize_obs=reads(name, "hw"))
        returns = script.train(args)
        policy = script.load_policy(args.run_dir)
        assert not policy.agent.training
        played = play(policy, args)
        if not has(script, "meta_batch_size"):  # they were adapted before they were scored
            assert played == pytest.approx(returns.tolist(), abs=1e-4)
        play(policy, args, 1, greedy=False)
        vector = gym.make_vec(args.env_id, 3, vectorization_mode="sync", **args.env_kwargs)
        many, _ = vector.reset(seed=1)
        start(policy, 3)
        batch = policy(many)
        assert batch.dtype == vector.action_space.dtype and batch.shape == vector.action_space.shape
        for i, single in enumerate(gym.vector.utils.iterate(vector.observation_space, many)):
            start(policy, 1)
            one = policy(single)
            assert ACTIONS[action].contains(one) and np.allclose(one, batch[i], atol=1e-5)
        vector.close()
    assert tried >= 2


def test_a_policy_of_atari_is_for_what_make_envs_gives(ppo):
    few = dict(num_envs=1, num_steps=8, total_timesteps=8, num_minibatches=1, eval_episodes=1)
    args = ppo.make_args("ALE/Pong-v5", device="cpu", run_dir="run", eval_max_steps=20, **few)
    ppo.train(args)
    policy, envs = ppo.load_policy("run"), ppo.make_envs(args, 1)
    obs, _ = envs.reset(seed=args.eval_seed)
    assert policy(obs).shape == (1,) and policy(obs[0]) == policy(obs)[0] == policy.agent.act(obs, {})[0]
    envs.close()


# ----------------------------------------------------------------------------------------------------- masks
CHOOSES = takers("discrete")
EXPERT = """
def load_policy(path):
    agent = nn.Identity()
    mask = lambda obs: obs[:, -50:] + 1e-3 * np.arange(50)  # the highest legal action, all where none is
    agent.act = lambda obs, info: np.stack([x.argmax(1) for x in np.split(mask(obs), agent.ends, axis=1)], 1)
    agent.ends = [3] if Args(**load(path)["args"]).env_kwargs["multi"] else []
    if not agent.ends:
        agent.act = lambda obs, info: mask(obs).argmax(1)
    return Policy(agent, None)
"""
MASKS = {
    "info": {}, "array": {"single": False, "start": 7}, "dict": {"where": "dict"}, "bool": {"where": "bool"},
    "multi": {"multi": True}, "multi_dict": {"multi": True, "where": "dict"},
}  # fmt: skip


def masked_args(script, kind, **changes):
    kwargs = dict(multi=False) | MASKS[kind]
    changes = (
        FEW | dict(total_timesteps=128, eval_every=64, checkpoint_every=16, sample_actions=True) | changes
    )
    args = short(script, "Legal", env_kwargs=kwargs, **changes)
    if has(script, "expert"):
        args.expert = make_expert(args, source=EXPERT)
    return args


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", CHOOSES)
def test_an_illegal_action_is_never_sent(name, kind):
    """In training, random exploration, both kinds of evaluation, load_policy, and after a resume: the
    environment raises. One of fifty actions is legal."""
    script = load_script(name)
    if "multi" in kind and not takes(name, "multi_discrete"):
        pytest.skip("it chooses one thing at a time")
    args = masked_args(script, kind, learning_starts=64, epsilon_start=1.0, learning_rate=0.01)
    script.train(args)
    resumed = script.parse_args(["--resume", "run", "--total-timesteps", "192"])
    resumed.sample_actions = False
    returns = script.train(resumed)
    if kind != "array":  # one legal action, which pays 1
        assert returns.tolist() == [getattr(args, "horizon", 10)] * 2
    policy = script.load_policy("run")
    for greedy in (True, False):
        played = play(policy, args, 3, greedy)
        assert kind == "array" or played == [10] * 3
    assert all(math.isfinite(x) for row in progress() for x in row.values())


@pytest.mark.parametrize("at_reset", [True, False])
@pytest.mark.parametrize("name", CHOOSES)
def test_a_mask_given_at_reset_or_in_steps_only_is_refused_by_name(name, at_reset, capsys):
    script = load_script(name)
    args = short(script, "Sometimes", env_kwargs={"at_reset": at_reset}, **FEW)
    assert call_main(script, *flags(args)) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    late = "0 entries in info['action_mask'], not 3"
    what = late if at_reset else "info['action_mask'] is missing after reset()"
    assert f"Sometimes-v0: {what}" in err


WRONG = dict(image=np.full((8, 8, 3), 0.5), numbers=np.zeros(3), action_mask=np.ones(2))


@pytest.mark.parametrize("key, wrong", WRONG.items(), ids=WRONG)
def test_an_observation_that_its_space_does_not_have_is_refused_by_its_part(ppo, key, wrong, capsys):
    """Fractions in an image of bytes would all become 0 without a word; in one's own loop as well."""
    args = short(ppo, "Parts", **FEW)
    ppo.train(args)
    policy, obs = ppo.load_policy("run"), gym.make(args.env_id).reset()[0]
    policy(obs)
    with pytest.raises(ppo.UsageError, match=re.escape(f"{wrong.shape} is not an observation of")):
        policy(obs | {key: wrong})
    again = replace(args, run_dir="again", env_kwargs={"key": key, "wrong": wrong.tolist()})
    with pytest.raises(ppo.UsageError, match=re.escape(f"{wrong.shape} is not an observation of")):
        ppo.train(again)


def test_a_mask_of_another_length_and_one_that_allows_nothing_are_refused(ppo, monkeypatch, capsys):
    monkeypatch.setattr(probe_envs.Masked, "mask", lambda env: np.ones(2, np.int8))
    assert call_main(ppo, *flags(short(ppo, "Masked", **FEW))) == 2
    assert "2 entries in info['action_mask'], not 3" in capsys.readouterr().err
    monkeypatch.setattr(probe_envs.Masked, "mask", lambda env: np.zeros(3, np.int8))
    assert call_main(ppo, *flags(short(ppo, "Masked", "other", **FEW))) == 2
    assert "action_mask forbids all actions" in capsys.readouterr().err


def test_a_head_gives_all_probability_to_legal_choices(ppo):
    torch.manual_seed(0)
    for space, sizes in ((Discrete(5), [5]), (MultiDiscrete([2, 4, 3]), [2, 4, 3])):
        head, features = ppo.CategoricalHead(6, space, masked=True), torch.randn(200, 6)
        head.logits.weight.data.normal_()
        mask = (torch.rand(200, sum(sizes)) < 0.5).float()
        mask[:, np.cumsum([0, *sizes[:-1]])] = 1  # one is legal
        obs = torch.cat([torch.randn(200, 3), mask], dim=1)
        pi, logits = head(features, obs), head.logits(features).view(200, len(sizes), -1)
        for k, legal in enumerate(mask.split(sizes, dim=1)):
            allowed = logits[:, k, : sizes[k]].masked_fill(legal == 0, -math.inf)
            assert torch.allclose(pi[:, k, : sizes[k]].exp(), allowed.softmax(-1), atol=1e-6)
        assert torch.isfinite(head.entropy(pi)).all()
        for greedy in (True, False):
            for k, legal in enumerate(mask.split(sizes, dim=1)):
                assert legal.gather(1, head.choose(pi, greedy)[:, k : k + 1]).all()
        nothing = head(features, torch.zeros(200, 3 + sum(sizes)))  # after an end: as without a mask
        plain = ppo.CategoricalHead(6, space, masked=False)
        plain.load_state_dict(head.state_dict())
        assert torch.equal(nothing, plain(features, None))


# ------------------------------------------------------------------------- environments that do odd things
@pytest.mark.parametrize("name", NAMES)
def test_what_an_environment_does_to_its_arrays_changes_nothing(name):
    """It writes into the action that it got and gives the same array for each observation."""
    script = load_script(name)
    kinds = {"discrete": "discrete", "multi_discrete": "multi_discrete", "multi_binary": "multi_binary",
             "box": "box", "unbounded": "unbounded"}  # fmt: skip
    for kind in [kind for kind, known in kinds.items() if takes(name, known)]:
        for meddles in (False, True):
            kwargs = dict(actions=kind, meddles=meddles)
            low_high = dict(obs_low=(-9, -9), obs_high=(9, 9)) if name == "q_learning" else {}
            quick(script, "Meddler", f"{kind}-{meddles}", env_kwargs=kwargs, **FEW, **low_high)
        one, two = (f"{kind}-{meddles}" for meddles in (False, True))
        assert progress(one) == progress(two) and equal(parts(one), parts(two))


@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("kind", odd_envs.Rewards.KINDS)
def test_a_reward_is_the_number_in_it_or_refused_by_name(ppo, capsys, kind, async_envs):
    if async_envs and kind not in ("array1", "none"):
        pytest.skip("two kinds are enough")
    args = short(ppo, "Rewards", env_kwargs={"kind": kind}, async_envs=async_envs, **FEW)
    if kind in ("none", "str", "array2"):
        assert call_main(ppo, *flags(args)) == 2
        assert "its reward is" in capsys.readouterr().err.strip().splitlines()[-1]
    else:
        ppo.train(args)
        assert {row["reward/mean"] for row in progress() if "reward/mean" in row} == {
            1.0 + ("bool" not in kind)
        }


@pytest.mark.parametrize("kind", odd_envs.Infos.KINDS)
def test_info_of_any_kind_is_survived_and_success_is_a_number_or_nothing(ppo, kind, capsys):
    quick(ppo, "Infos", env_kwargs={"kind": kind}, **FEW)
    rates = [row.get("eval/success_rate") for row in progress() if "eval/return_mean" in row]
    told = {"none": 1, "late": 1, "array": 1, "bool": 1, "number": 1}.get(kind)
    assert rates == [told] and ("success 100%" in capsys.readouterr().out) == (told == 1)


def test_info_is_survived_by_every_script(script):
    for kind in ("none", "two", "number"):
        quick(script, "Infos", kind, env_kwargs={"kind": kind, "length": 4}, **FEW | dict(horizon=4))
        (rate,) = {row.get("eval/success_rate") for row in progress(kind) if "eval/return_mean" in row}
        assert rate == (None if kind == "two" else 1)


def test_numbers_in_info_are_logged_as_means_over_each_episode_and_a_misspelt_one_is_told(script, capsys):
    changes = FEW | dict(horizon=4, dagger_iterations=1, info_keys=("cost", "nowhere"))
    quick(script, "Infos", env_kwargs={"kind": "number", "length": 4}, **changes)
    out = capsys.readouterr().out
    assert out.count("note: info/nowhere is 0") == 1 and "note: info/cost" not in out
    rows = [row for row in progress() if "train/episode_return" in row]
    assert rows and all((row["info/cost"], row["info/nowhere"]) == (2.5, 0) for row in rows)  # 1, 2, 3, 4


def test_an_observation_that_is_no_number_names_the_step(script, capsys):
    if not reads(script.__name__, "float16"):
        pytest.skip("it knows no such numbers")
    args = short(script, "NanEnd", **FEW | dict(horizon=20))
    assert call_main(script, *flags(args)) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"observation\[0\] of environment \d+ at step \d+ is nan", err)


@pytest.mark.parametrize("actions", ["discrete", "box"])  # an environment of choices is reset once more
@pytest.mark.parametrize("old, method", [
    ("step", "step"), ("reset", "reset"), ("seed", "reset"), ("two", "reset"), ("info", "step"),
    ("array", "step"),
])  # fmt: skip
def test_the_interface_of_before_gymnasium_is_named(ppo, old, method, actions, capsys):
    kwargs = {"old": old, "actions": actions}
    assert call_main(ppo, *flags(short(ppo, "OldApi", env_kwargs=kwargs, **FEW))) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"OldApi-v0: {method}() must " in err


@pytest.mark.parametrize("lie", odd_envs.Liar.LIES)
def test_an_observation_that_is_none_of_its_space_is_refused_when_it_comes(ppo, lie, capsys):
    assert call_main(ppo, *flags(short(ppo, "Liar", env_kwargs={"lie": lie}, **FEW))) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("Liar-v0: .* is not (in )?an observation of ", err), err


@pytest.mark.parametrize("mask", odd_envs.Masks.MASKS)
def test_a_mask_that_is_none_is_refused_before_an_action(ppo, mask, capsys):
    assert call_main(ppo, *flags(short(ppo, "Masks", env_kwargs={"mask": mask}, **FEW))) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Masks-v0" in err and "mask" in err


@pytest.mark.parametrize("what, word", [("huge", "reward"), ("first", r"observation\[1\] after reset\(\)")])
def test_a_number_that_no_network_can_read_is_named(ppo, what, word, capsys):
    args = short(ppo, "Fault", env_kwargs=dict(what=what, after=5), **FEW)
    assert call_main(ppo, *flags(args)) == 1
    assert re.search(f"{word}.* is .*, not finite", capsys.readouterr().err.strip().splitlines()[-1])


@pytest.mark.parametrize("high", [1, 15, 255])
def test_pixels_are_as_bright_as_their_space_says(ppo, high):
    pixels = Box(0, high, (6, 6), np.uint8)
    to_array, _ = ppo.observation_map(pixels)
    assert to_array(np.full((6, 6), high, np.uint8)).tolist() == [[[255] * 6] * 6]
    to_array, _ = ppo.observation_map(Dict(a=pixels))
    assert to_array({"a": np.full((6, 6), high, np.uint8)}).tolist() == [1.0] * 36


def test_observations_of_nothing_are_refused(ppo):
    for space in (Dict(), Box(-1, 1, (0,)), Dict(a=Tuple(()))):
        with pytest.raises(ppo.UsageError, match="empty"):
            ppo.observation_map(space)


@pytest.mark.parametrize("low, high", [(5, np.inf), (-np.inf, -5), (0, np.inf), (3e38, np.inf)])
def test_an_action_with_one_bound_can_move_both_ways_from_where_it_starts(ppo, low, high):
    to_action, actions = ppo.action_map(Box(low, high, (1,), np.float32))
    less, start, more = (float(to_action(np.array([a]))[0]) for a in (-0.5, 0.0, 0.5))
    assert low <= less <= start <= more <= high and not actions.is_bounded()
    assert less < start < more or abs(low) > 1e38
    edge = to_action(np.array([-1e9 if low > -np.inf else 1e9]))
    assert edge == np.float32(low if low > -np.inf else high)


def test_an_environment_that_is_found_has_no_other_name(ppo, capsys):
    assert call_main(ppo, "--env-id", "odd_envs:OldApi-v0", "--env-kwargs", '{"size": 3}') == 2
    err = capsys.readouterr().err.strip()
    assert "unexpected keyword argument 'size'" in err and "Its name is now" not in err


def test_a_simulator_that_runs_only_once_is_trained_and_evaluated_in_turn(script):
    one = dict(num_envs=1, eval_episodes=1, num_minibatches=1, episodes_per_update=1, adaptation_episodes=1)
    if has(script, "meta_batch_size"):
        pytest.skip("it plays several tasks at a time")
    returns = quick(script, "Single", **FEW | one)
    assert returns.tolist() == [10] and odd_envs.Single.running == 0


# ----------------------------------------------------------------------------------------------------- Atari
@pytest.mark.parametrize("kwargs, shape", [
    ({}, (4, 84, 84)), ({"grayscale": False}, (12, 84, 84)), ({"stack_num": 1}, (1, 84, 84)),
    ({"grayscale": False, "stack_num": 1, "img_height": 60, "img_width": 50}, (3, 60, 50)),
])  # fmt: skip
def test_atari_in_gray_or_color_with_any_stack(ppo, kwargs, shape):
    args = ppo.Args(env_id="ALE/Pong-v5", env_kwargs=kwargs)
    envs = ppo.make_envs(args, 2)
    obs, _ = envs.reset(seed=1)
    layout = envs.single_observation_space
    assert obs.shape == (2, *shape) and layout.shape == shape and layout.images == [shape]
    next_obs, *_ = envs.step(np.array([0, 1]))
    assert next_obs.shape == (2, *shape) and next_obs.dtype == np.uint8
    if kwargs.get("grayscale") is False and shape[0] == 12:  # frame after frame, each with three colors
        assert np.array_equal(next_obs[0, :9], obs[0, 3:])
    assert ppo.Agent(layout, envs.single_action_space, args, CPU).act(obs, {}).shape == (2,)
    envs.close()


def test_continuous_actions_of_atari_are_rescaled(ppo):
    envs = ppo.make_envs(ppo.Args(env_id="ALE/Pong-v5", env_kwargs={"continuous": True}), 1)
    flat = envs.single_action_space
    assert isinstance(flat, Box) and (flat.low == -1).all() and (flat.high == 1).all()
    envs.reset(seed=1)
    envs.step(np.full((1, *flat.shape), 5, np.float32))  # clipped: the game would refuse it
    envs.close()


def test_atari_pays_what_the_game_pays(ppo):
    envs, rewards = ppo.make_envs(ppo.Args(env_id="ALE/MsPacman-v5"), 1), []
    envs.reset(seed=1)
    for _ in range(100):
        rewards.append(float(envs.step(np.array([3]))[1][0]))
    assert max(rewards) >= 10  # a pill; its sign would be 1


def test_atari_has_sticky_actions_unless_told_otherwise(ppo):
    args, games = ppo.make_args("ALE/Pong-v5"), []
    for kwargs in ({}, {"repeat_action_probability": 0.25}, {"repeat_action_probability": 0.0}):
        envs = ppo.make_envs(ppo.replace(args, env_kwargs=kwargs), 2)
        envs.reset(seed=3)
        actions = np.random.default_rng(0).integers(0, 6, (60, 2))
        games.append([envs.step(action)[0] for action in actions][-1])
    assert np.array_equal(games[0], games[1]) and not np.array_equal(games[0], games[2])
