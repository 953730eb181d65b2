"""Every field of Args does something: with another value, the same training learns or logs something else.

A new field is tested by existing. Only fields that say where, how long and how often are left to other tests.
"""

import contextlib
import io
import math
import os
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from conftest import NAMES, equal, load_script, parts, progress, tiny

ELSEWHERE = set("""
    device cuda_graph run_dir resume init_from evaluate checkpoint_every eval_every eval_max_steps
    capture_video info_keys torch_threads env_id env_kwargs async_envs stop_return expert expert_script
    dataset expert_max_steps max_steps max_episode_steps patience
""".split()) | {"es num_envs"}  # fmt: skip
LOGGED = set(
    """
    eval_episodes eval_seed sample_actions log_every adaptation_episodes num_test_tasks eval_inner_steps
    minibatches_per_epoch
""".split()
) | {"es gamma", "bc gamma"}  # what these change is the log alone
VALUES = dict(
    clip_value=0.001, clip_return=0.1, target_kl=1e-9, max_grad_norm=1e-3, critic_lr=0.1, actor_lr=0.1,
    alpha_lr=0.1, encoder_lr=0.1, predictor_lr=0.1, target_entropy=-5.0, critic_sizes=(5,), n_step=2,
    learning_starts=128, log_std_init=1.0, buffer_size=100, newest_channels=1, memory_span=4,
    grid_size=(3, 3), total_timesteps=256, obs_low=(-9.0, 0.0), obs_high=(9.0, 9.0),
    train_every=4, random_hold=2, exploration_fraction=1.0, eval_seed=5, cg_iterations=1, max_backtracks=1,
    dropped_quantiles=3, renorm_warmup=2, num_train_tasks=3, inner_steps=2, validation_share=0.5,
    num_minibatches=1, num_envs=1, noise_type="ou", policy_delay=5, target_noise=0.5, twin_critics=False,
    group_size=2, reference_every=100,
    clip_coef=1e-3, cg_tolerance=1e9, epsilon_decay=0.5, outer_lr=0.1, epsilon_start=0.0, epsilon_end=0.9,
    epsilon_min=0.9, value_lr=0.1,
)  # fmt: skip
NUMBERS = dict(env_kwargs={"actions": "discrete"})
BOX, FIXED_ALPHA, BONUS = dict(env_kwargs={"actions": "box"}), dict(auto_alpha=False), dict(entropy_coef=0.5)
IMAGE = dict(env_id="probe_envs:Spaces-v0", env_kwargs={"obs": "small"}, normalize_obs=False)
CONTEXT = dict(  # what a field needs, to matter
    entropy_method=BONUS, caps_epsilon=dict(caps_spatial=1.0), alpha=FIXED_ALPHA, per_alpha=dict(per=True),
    per_beta_start=dict(per=True), per_eps=dict(per=True), log_std_init=BOX, newest_channels=IMAGE,
    clip_coef=dict(outer="ppo", learning_rate=0.1), outer_lr=dict(outer="ppo"),
    outer_epochs=dict(outer="ppo"), group_size=dict(episodes_per_update=8),
    backtrack_ratio=dict(max_kl=3.0), double=dict(learning_rate=0.1), independent_noise=dict(noisy=True),
    noise_std=dict(noisy=True),
    epsilon_min=dict(epsilon_decay=0.1), num_envs=dict(num_minibatches=1), grid_size=NUMBERS,
    obs_low=NUMBERS, obs_high=NUMBERS, clip_positive_returns=dict(reward_scale=10.0),
    epsilon_start=dict(exploration_fraction=1.0), sample_actions=dict(epsilon_end=0.9),
    num_test_tasks=dict(eval_episodes=4),
) | {"bc loss": BOX, "rainbow sample_actions": dict(noise_std=4.0, eval_every=16)}  # fmt: skip


def other(script, field) -> dict:
    """A value of the field that is not the one of tiny."""
    if field.name in VALUES:
        return {field.name: VALUES[field.name]}
    value, hint = getattr(tiny(script, "other"), field.name), get_type_hints(script.Args)[field.name]
    if get_origin(hint) is Literal:
        options = get_args(hint)
        return {field.name: options[(options.index(value) + 1) % len(options)]}
    if isinstance(value, bool):
        return {field.name: not value}
    if isinstance(value, tuple):
        return {field.name: (*value, 5)}
    if isinstance(value, float):  # a half is within all ranges
        return {field.name: value / 2 if value and value < math.inf else 0.5}
    return {field.name: 2 * value or 1}


def trained(name: str, **changes) -> tuple:
    """The agent that a training ends with, and the log without what the arguments say by themselves."""
    script, folder = load_script(name), f"run-{len(os.listdir())}"
    with contextlib.redirect_stdout(io.StringIO()):
        script.train(tiny(script, folder, **dict(eval_every=0, checkpoint_every=0) | changes))
    said = lambda key: key.startswith("schedule/")
    return parts(folder)["agent"], [{k: x for k, x in row.items() if not said(k)} for row in progress(folder)]


BASES = {}  # by script and context
PAIRS = [
    (name, field)
    for name in NAMES
    for field in fields(load_script(name).Args)
    if not {field.name, f"{name} {field.name}"} & ELSEWHERE
]


@pytest.mark.parametrize("name, field", PAIRS, ids=lambda x: getattr(x, "name", x))
def test_another_value_is_another_training(name, field):
    script = load_script(name)
    context = CONTEXT.get(f"{name} {field.name}") or CONTEXT.get(field.name, {})
    if (key := (name, str(context))) not in BASES:
        BASES[key] = trained(name, **context)
    (agent, log), (other_agent, other_log) = BASES[key], trained(name, **context, **other(script, field))
    if field.name in LOGGED or f"{name} {field.name}" in LOGGED:
        assert not equal(log, other_log)
    else:
        assert not equal(agent, other_agent)


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(load_script(name), "clip_gradients")])
def test_every_gradient_is_clipped_at_the_norm_that_was_asked_for(name, monkeypatch):
    script, norms = load_script(name), []
    clip = script.clip_gradients
    monkeypatch.setattr(script, "clip_gradients", lambda x, norm: norms.append(norm) or clip(x, norm))
    trained(name, max_grad_norm=0.123, auto_alpha=False)  # the temperature is not clipped
    assert set(norms) == {0.123}
