"""Measures algos/es.py: a generation in one batch against one by one, and the parts of one on many workers.

    python benchmark/es_speed.py                    # CartPole-v1, population 256, 5 pairs
    python benchmark/es_speed.py --workers 1000     # the prediction is for two members per worker

Three ways to play a generation: in one batch; one member after the other by the same code, as --num-envs 1
does; and one after the other in a loop as slim as it gets, layers of torch in a plain environment. All play
the same members from the same states, before training and with a policy that has learned. They take turns,
A B C A B C, since a machine drifts; what counts is the median of the ratios. Nothing else may run meanwhile.
The prediction adds measured parts: the longest share of the episodes, noise and update, messages between
processes of this machine. Time on a network between machines is not measured.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time

import numpy as np
import torch
from run import load_script


es = load_script("es")


# ------------------------------------------------------------------------------------------- the three ways
def generation(args, theta: torch.Tensor, number: int) -> tuple[torch.Tensor, list[int]]:
    """Members (n, P) around theta and their seeds, as train makes them."""
    seeds = es.generation_seeds(args.seed, number, 2)
    noise = torch.randn(
        args.population // 2, theta.numel(), generator=torch.Generator().manual_seed(seeds[0])
    )
    return es.perturb(theta, noise, args.sigma, mirrored=True), seeds[1:] * args.population


def in_batch(args, envs, policy, members: torch.Tensor, seeds: list[int]) -> int:
    """Steps of a generation that es.py plays as it trains."""
    return int(es.play(envs, policy, members, seeds)[:, 1].sum())


def one_by_one(args, envs, policy, members: torch.Tensor, seeds: list[int]) -> int:
    """The same code and network, for one member and one environment at a time."""
    one = es.make_envs(args, 1)
    steps = 0
    for i in range(len(members)):
        steps += int(es.play(one, policy, members[i : i + 1], seeds[i : i + 1])[:, 1].sum())
    one.close()
    return steps


def slim_loop(args, envs, policy, members: torch.Tensor, seeds: list[int]) -> int:
    """The same network from layers of torch, in one plain environment, with nothing counted but the steps."""
    env = es.standardize(es.gym.make(args.env_id))
    layers = []
    for fan_in, fan_out in policy.shapes:
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.Tanh()]
    network, steps = torch.nn.Sequential(*layers[:-1]), 0
    for theta, seed in zip(members, seeds, strict=True):
        start = 0
        for layer, (fan_in, fan_out) in zip(network[::2], policy.shapes, strict=True):
            layer.weight.data = theta[start : start + fan_in * fan_out].view(fan_in, fan_out).T.contiguous()
            start += (fan_in + 1) * fan_out
            layer.bias.data = theta[start - fan_out : start].clone()
        obs, done = env.reset(seed=seed)[0], False
        while not done:
            action = int(network(torch.from_numpy(obs)).argmax())
            obs, _, terminated, truncated, _ = env.step(action)
            done, steps = terminated or truncated, steps + 1
    env.close()
    return steps


SIDES = {"batch": in_batch, "one by one": one_by_one, "slim loop": slim_loop}


def compare(args, theta, policy, pairs: int, what: str) -> None:
    """Measures and prints generations/s of the three ways and the ratios of the batch to the other two."""
    envs, rates = es.make_envs(args, args.num_envs), []
    with torch.inference_mode():
        for pair in range(pairs + 1):
            members, seeds = generation(args, theta, pair)
            rate = {}
            for side, play in SIDES.items():
                start = time.perf_counter()
                steps = play(args, envs, policy, members, seeds)
                rate[side] = 1 / (time.perf_counter() - start)
            if pair:  # the first one warms up
                rates.append(rate)
                said = ", ".join(f"{side} {x:.3f}" for side, x in rate.items())
                print(f"{what} pair {pair}: {said} generations/s of {steps} steps", flush=True)
    envs.close()
    for side in list(SIDES)[1:]:
        ratios = [rate["batch"] / rate[side] for rate in rates]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        batch, other = (statistics.median(rate[name] for rate in rates) for name in ("batch", side))
        print(
            f"{what}, population {args.population}: batch {batch:.3f}, {side} {other:.3f} generations/s "
            f"(medians); the batch is {middle:.2f} times as fast ({low:.2f} to {high:.2f})"
        )


# ------------------------------------------------------------------------------------------- the prediction
def seconds(action, repeats: int, clock=time.perf_counter) -> float:
    """Median time of an action."""
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)


def exchange_process(rank: int, size: int, port: int, count: int, columns: int, queue) -> None:
    """One of `size` processes that exchange the messages of a generation, as es.py does."""
    torch.set_num_threads(1)
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=size)
    os.environ.update({name: str(value) for name, value in place.items()})
    team = es.Team()
    team.join()
    word, mine = torch.zeros(4, dtype=torch.float64), team.share(count, rank)
    rows = np.zeros((mine.stop - mine.start, columns))

    def generation():
        team.talk(es.dist.broadcast, word, src=0)
        team.exchange(rows, count)

    generation()
    queue.put((rank, seconds(generation, 30), seconds(generation, 30, time.process_time)))
    team.talk(es.dist.barrier)
    team.close()


def exchange(size: int, count: int, columns: int) -> tuple[float, float]:
    """Seconds of a generation's messages between `size` processes here, and CPU seconds of process 0."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = (size, probe.getsockname()[1], count, columns, queue)
    processes = [context.Process(target=exchange_process, args=(rank, *common)) for rank in range(size)]
    for process in processes:
        process.start()
    answers = sorted(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return max(wall for _, wall, _ in answers), answers[0][2]


def predict(args, theta, policy, workers: int) -> None:
    """Time of a generation when one process plays it all, and when each worker plays two members of it."""
    envs, size = es.make_envs(args, args.num_envs), theta.numel()
    columns = 2 + 2 * envs.single_observation_space.shape[0]
    pair_envs = es.make_envs(args, 2)
    with torch.inference_mode():
        members, seeds = generation(args, theta, 0)
        start = time.perf_counter()
        lengths = es.play(envs, policy, members, seeds)[:, 1]
        play = time.perf_counter() - start
        slowest = int(lengths.reshape(-1, 2).max(1).argmax()) * 2  # the share that all wait for
        share = slice(slowest, slowest + 2)
        share_time = seconds(lambda: es.play(pair_envs, policy, members[share], seeds[share]), 5)
    envs.close()
    pair_envs.close()
    generator = torch.Generator().manual_seed(0)
    draw = seconds(lambda: torch.randn(args.population // 2, size, generator=generator), 5)
    noise, weights = torch.randn(args.population // 2, size), torch.randn(args.population)
    steps = seconds(lambda: es.perturb(theta, noise, args.sigma, mirrored=True), 5)
    update = seconds(lambda: es.es_gradient(weights, noise, args.sigma, mirrored=True), 5)
    nbytes = 8 * args.population * columns
    print(f"population {args.population}, {size} parameters, {lengths.mean():.1f} steps per episode")
    print(
        f"in one process: play {play:.4f} s, noise {draw:.5f} s, perturb {steps:.5f} s, update {update:.5f} s"
    )
    print(
        f"a generation's table: {nbytes} bytes; a worker sends {nbytes // workers} and receives {nbytes + 32}"
    )
    sizes = (2, 8, 32)
    messages = [exchange(k, args.population, columns) for k in sizes]
    for k, (wall, cpu) in zip(sizes, messages, strict=True):
        print(f"messages between {k} processes here: {wall:.5f} s, {cpu:.5f} s of the CPU of process 0")
    # Process 0 serves the workers one after the other, whatever the network is; this part grows with them.
    serial = messages[-1][1] / sizes[-1] * workers
    alone, own = play + draw + steps + update, draw + steps + update
    together = share_time + own + serial
    print(
        f"predicted for {workers} workers: {together:.4f} s a generation, with one {alone:.4f} s: "
        f"{alone / together:.0f} times as fast. The longest share takes {share_time:.4f} s; noise, update, "
        f"which all do, {own:.4f} s; messages {serial:.4f} s and the time of the network, not measured"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--population", type=int, default=256)
    parser.add_argument("--num-envs", type=int, default=64, help="environments of the batch")
    parser.add_argument("--train-steps", type=int, default=50_000, help="for the policy that learned")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1000, help="of the prediction, two members each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tuned = es.parse_args(["--env-id", given.env_id])
    args = es.replace(tuned, population=given.population, num_envs=given.num_envs, device="cpu")
    envs = es.make_envs(args, 1)
    policy = es.Policy(envs.single_observation_space, envs.single_action_space, args)
    envs.close()
    compare(args, policy.theta.data.clone(), policy, given.pairs, "before training")
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(run_dir=f"{folder}/run", eval_every=0, checkpoint_every=0, device="cpu")
        es.train(es.replace(tuned, total_timesteps=given.train_steps, **quiet))
        state = torch.load(f"{folder}/run/checkpoint.pt", weights_only=True)
    policy.load_state_dict(state["agent"])
    theta = policy.theta.data.clone()
    compare(args, theta, policy, given.pairs, "after training")
    predict(es.replace(args, population=2 * given.workers), theta, policy, given.workers)


if __name__ == "__main__":
    main()
