"""Makes an exercise of a script in algos/: a copy whose learning rule is yours to write.

python exercises/make.py ppo               writes ppo_exercise.py into this folder
python exercises/make.py ppo compute_gae   takes out this function alone
"""

import argparse
import ast
import sys
from pathlib import Path

ALGOS = Path(__file__).resolve().parents[1] / "algos"

# What a teacher would say, one or two sentences per function.
HINTS = """
compute_returns: Walk backwards from the last step: a return is a reward plus gamma times the next return.
compute_returns: At the end of an episode nothing follows. Leave reward as it is and work on a copy.
policy_gradient_loss: The optimizer goes downhill, but a good return should become more likely. Which sign?
policy_gradient_loss: Sum over all steps, then divide by the number of episodes.
compute_gae: Begin with the TD errors of all steps at once. Which flag removes the value of the next state?
compute_gae: Then walk backwards and add gamma lambda times the next advantage. Which flag cuts this sum?
policy_loss: Each log-probability is weighted by its advantage. The optimizer minimizes: mind the sign.
clipped_policy_loss: The probability ratio is the exponential of a difference of log-probabilities.
clipped_policy_loss: For each sample take the smaller objective, clipped or not; then the mean and the sign.
group_advantage: view(-1, group_size) has a group in each row; flatten the result again.
group_advantage: The standard deviation has correction=0, and 1e-8 is added to it.
kl_estimate: -log(x) with x = other / pi is unbiased, but may be negative. Add x - 1, whose mean is 0.
value_loss: With an infinite clip_value this is the plain error. Otherwise compute two errors per sample:
value_loss: one of the value, one of the value moved at most clip_value from the old one. The larger counts.
policy_change: The mean of -log(ratio) is the KL, but one sample may be negative. Add ratio - 1, of mean 0.
policy_change: The second result is a share: how many ratios are further than clip_coef from 1?
whole_sequences: For each step find its place within its sequence and the length of that sequence.
whole_sequences: Sort by place, then by length; a stable sort keeps ties in the order of chosen.
predictor_loss: Draw a uniform number for each error with torch.rand_like; keep those below proportion.
predictor_loss: Divide by how many you kept. What if there are none?
surrogate: The old policy collected the data, so each advantage is weighted by the ratio new / old.
surrogate: This is an objective to maximize: no minus sign here.
hessian_product: Differentiate twice: value, keeping the graph, and then (gradient of value) @ v.
hessian_product: Return a function of v. It is called many times, so the graph must be retained.
conjugate_gradient: Start at x = 0. What is the residual there? It is also the first search direction.
conjugate_gradient: One product per iteration. The new direction is the residual plus part of the old one.
line_search: Try fractions 1, ratio, ratio^2, ... Always write start + fraction * step with copy_.
line_search: step is one long vector: split it into the sizes of the parameters. Keep a copy of the start.
next_value: Which rule takes A', which the best action, which an average, and which asks the other table?
next_value: expected_sarsa: with probability epsilon any legal action, otherwise the best one.
update_table: index[:, None] == index shows which pairs are equal: count them and average their targets.
update_table: Write into q_values itself. Equal pairs then write the same number.
epsilon_after: It shrinks by the factor epsilon_decay with every episode, but not below epsilon_min.
compute_td_target: One table of Q-values chooses the action; its value always comes from target_q_values.
compute_td_target: argmax with keepdim=True gives the index that gather needs.
q_loss: F.huber_loss with reduction="none" has one number per error. Weight them before you average.
epsilon_at: Three cases: before learning_starts; with noisy weights, which explore alone (0); and the line.
epsilon_at: The line reaches epsilon_end after exploration_fraction of total_timesteps, and stays there.
project: Move every atom to reward + discount * atom and clip. Where does it lie, counted in atoms: 7.25?
project: The atoms 7 and 8 then share its probability. scatter_add sums where several fall on one atom.
kl_loss: Atoms of probability 0 add 0, but 0 * log 0 is not a number: torch.xlogy knows that.
quantile_loss: target[:, None] - quantiles[:, :, None] has all pairs, (B, Z, K). Level i is (i + 1/2) / Z.
quantile_loss: A quantile below the target is weighted with its level, one above it with 1 - level.
q_lambda_returns: Start from the one-step return, and correct it by gamma lambda (R_{t+1} - next_value[t]).
q_lambda_returns: Go backwards. Beyond the rollout no return is known; the last next_value replaces it.
linear_epsilon: What share of exploration_fraction * total_timesteps is over? No more than 1.
linear_epsilon: An exploration_fraction of 0 must not divide by 0: take at least one step.
smooth_action: There are two clips: one of the noise, one of the sum.
clipped_double_q: The minimum is over the critics, the first dimension.
clipped_double_q: discount is already 0 where the episode terminated.
critic_loss: The mean is over the batch (the last dimension), the sum over the critics.
explore: Draw with np.random.standard_normal, times std, as float32.
explore: Without "gaussian", add it to what is left of the last noise. Which share is left?
squashed_gaussian: u - mean is std * noise, so the exponent of the normal density is noise^2 / 2.
squashed_gaussian: 1 - tanh(u)^2 is 4 / (e^u + e^-u)^2. Take its logarithm by hand, with F.softplus.
soft_value: Take the minimum over the critics, then add the bonus for actions that were not likely.
residual_block: Inside out: normalize, go up, drop, cut off what is negative, come down.
residual_block: Then add x itself, as it came in.
expectile_loss: A weight for each squared error: which sign has the error of an action better than V?
imitation_weight: The exponential of beta times the advantage, and then clamp.
gaussian_log_prob: Standardize: (action - mean) / std. Then the exponent is minus half of its square.
gaussian_log_prob: Subtract the log of std and half the log of 2 pi for each dimension; sum over dimensions.
alpha_loss: alpha should rise when the entropy is too low. Check the sign of the gradient.
caps_loss: Euclidean distance over the action dimensions, then the mean over the batch.
truncate: Put the quantiles of all critics into one pool and sort it, for each sample of the batch.
truncate: dropped counts per critic, so how many leave the pool?
soft_quantiles: The entropy bonus of SAC: every quantile of a sample moves by the same amount.
quantile_huber_loss: Quantile m, from 0, has the level t = (m + 1/2) / M. Broadcast to (N, M, k, B).
quantile_huber_loss: A target above its quantile weighs t, one below weighs 1 - t. F.huber_loss does the rest.
perturb: theta broadcasts over the members. Mirrored, their order is +eps_1, -eps_1, +eps_2, -eps_2, ...
shape_fitness: rank: how many members does each beat, and how many beat it? Ties then share a rank.
shape_fitness: zscore: the standard deviation has correction=0, and 1e-8 keeps it from being 0.
es_gradient: It is a weighted sum of the noise: torch.tensordot.
es_gradient: Mirrored, two neighbors share one noise with opposite signs. n still counts all members.
log_prob_loss: Maximum likelihood: the expert's actions should become likely. The optimizer minimizes.
mse_loss: Sum over the action dimensions, mean over the batch.
fit_baseline: Features in float64: obs clipped to +-10, its square, t / 100, its square and its cube, and 1.
fit_baseline: Normal equations of the playing steps, with 1e-5 added to the diagonal. Return float32.
inner_step: A task depends only on its own row, so one gradient of the summed loss serves all tasks.
inner_step: create_graph=True lets later gradients flow through this one. When is that wanted?
adapt: p.expand(tasks, *p.shape) is a copy for each task; agent.log_prob(params, rollout)[0] uses them.
adapt: One inner_step per rollout. Those beyond max(args.inner_steps, 1) take half of args.inner_lr.
outer_objective: vpg takes the log-probability, trpo the ratio, ppo the ratio clipped as in PPO, eq. 7.
outer_objective: weight averages over the steps of a task; then comes the mean over tasks.
product_of_gaussians: Precisions, 1 / var, add up.
product_of_gaussians: A mean counts in proportion to its precision.
kl_to_prior: The closed form has four terms per dimension: var, mean^2, a constant and log(var).
"""


def parts(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of the learning rule: under that heading, with a docstring, and no environments."""
    lines = source.splitlines()
    headings = [i for i, line in enumerate(lines) if line.startswith("# ---")]
    first = next(i for i in headings if lines[i].endswith(" learning rule"))
    last = next(i for i in headings if i > first)
    # The empty lines keep the line numbers of the file.
    section = ast.parse("\n" * first + "\n".join(lines[first:last])).body
    rule = [f for f in section if isinstance(f, ast.FunctionDef) and ast.get_docstring(f)]
    return {f.name: f for f in rule if "envs" not in [argument.arg for argument in f.args.args]}


def exercise(name: str, chosen: list[str] = ()) -> str:
    """The text of algos/{name}.py without the bodies of the chosen functions; of none chosen: of all."""
    source = (ALGOS / f"{name}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    for part, node in reversed(parts(source).items()):
        if not chosen or part in chosen:
            hints = [f"    # {hint}" for of, hint in all_hints() if of == part]
            todo = f'    raise NotImplementedError("your turn: {part}")'
            lines[node.body[0].end_lineno : node.end_lineno] = [*hints, todo]
    return "\n".join(lines).replace(f"algos/{name}.py", f"{name}_exercise.py") + "\n"


def all_hints() -> list[list[str]]:
    return [line.split(": ", 1) for line in HINTS.strip().splitlines()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in ALGOS.glob("*.py"))
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("functions", nargs="*", help="the functions to take out; default: the whole rule")
    args = parser.parse_args(argv)
    known = parts((ALGOS / f"{args.name}.py").read_text(encoding="utf-8"))
    if unknown := [name for name in args.functions if name not in known]:
        parser.error(f"{', '.join(unknown)}: the learning rule of {args.name} is {', '.join(known)}")
    path = Path(f"{args.name}_exercise.py")
    try:
        with path.open("x", encoding="utf-8") as file:  # never over somebody's work
            file.write(exercise(args.name, args.functions))
    except FileExistsError:
        print(f"make.py: {path} exists already; move it away to start anew", file=sys.stderr)
        return 1
    print(f"wrote {path}: {', '.join(args.functions or known)}")
    print(f"to check it: python {Path(sys.argv[0]).with_name('check.py')} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
