"""benchmark/: a kill loses nothing, the statistics are right, the pictures and the table are written."""

import csv
import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmark"
sys.path.insert(0, str(BENCHMARK))
TOTAL, EVALUATIONS, SEEDS = 10_240, [0, 2048, 4096, 6144, 8192, 10_240], [1, 2]
VOLATILE = "wall_time", "steps_per_second", "command", "git_commit"  # what may differ between equal runs
needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")


# A training in no time: its best policy scores 200, its last 100. It waits while a file `wait` exists.
FAKE = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--evaluate", type=Path)
parser.add_argument("--resume", type=Path)
parser.add_argument("--run-dir", type=Path)
args, _ = parser.parse_known_args()
if args.evaluate:
    file = args.evaluate / "checkpoint.pt" if args.evaluate.is_dir() else args.evaluate
    print(f"return mean {file.read_text()} std 0 min 0 max 500 over 100 episodes")
if args.evaluate or args.resume:
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved; go on with --resume"))
args.run_dir.mkdir(parents=True)
print("begun", flush=True)
while Path("wait").exists():
    time.sleep(0.02)
versions = dict.fromkeys(("python", "torch", "gymnasium", "numpy", "device"), "x")
(args.run_dir / "environment.json").write_text(json.dumps(versions))
names = "step,wall_time,eval/return_mean,eval/return_std,eval/return_min,eval/return_max,eval/episodes"
(args.run_dir / "progress.csv").write_text(f"{names}\\n0,0,200,0,0,500,10\\n9,1,100,0,0,500,10\\n")
for name, score in (("best", 200), ("checkpoint", 100)):
    (args.run_dir / f"{name}.pt").write_text(str(score))
"""


def command(script: str, *words) -> list[str]:
    return [sys.executable, str(BENCHMARK / script), *map(str, words)]


def smoke(folder: Path, seeds: int = 2) -> list[str]:
    words = "--suite", "smoke", "--seeds", seeds, "--jobs", 2, "--final-episodes", 5
    return command("run.py", *words, "--runs", folder / "runs", "--results", folder / "results")


def read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of one suite: seed 1 without a break, and both seeds killed in training and run again.

    Also the last logged step of each seed at the kill: at least one had passed the checkpoint of step 2048.
    """
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    progress = [killed / f"runs/ppo__CartPole-v1__{TOTAL}/{seed}/progress.csv" for seed in SEEDS]
    first = subprocess.Popen(smoke(killed), stdout=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 120
    while (
        max(map(lines, progress)) < 6 and time.monotonic() < end
    ):  # header, step 0, four rollouts of 512 steps
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)  # run.py and both trainings
    first.wait()
    cut_at = [int(read(path)[-1]["step"]) if lines(path) > 1 else -1 for path in progress]
    again = subprocess.Popen(smoke(killed), stdout=subprocess.PIPE, text=True)
    done = subprocess.run(smoke(whole, seeds=1), capture_output=True, text=True)
    output, _ = again.communicate()
    assert (again.returncode, done.returncode) == (0, 0), output + done.stdout + done.stderr
    return whole, killed, cut_at


def test_killed_benchmark_ends_like_an_uninterrupted_one(folders):
    whole, killed, cut_at = folders
    assert 2048 <= max(cut_at) < TOTAL, "the kill came too early or too late to show anything"
    whole_rows, rows = (read(folder / "results/ppo__CartPole-v1.csv") for folder in (whole, killed))
    for row in whole_rows + rows:
        for name in VOLATILE:
            row.pop(name)
    assert [row for row in rows if row["seed"] == "1"] == whole_rows
    for seed, step in zip(SEEDS, cut_at, strict=True):
        log = (killed / f"runs/ppo__CartPole-v1__{TOTAL}/{seed}.log").read_text()
        assert step < 2048 or log.count("step 0/") == 1, f"seed {seed} was begun anew:\n{log}"


def test_csv_is_tidy_and_complete(folders):
    rows = read(folders[1] / "results/ppo__CartPole-v1.csv")
    curve = [(int(row["seed"]), int(row["step"])) for row in rows if row["kind"] == "curve"]
    assert curve == [(seed, step) for seed in SEEDS for step in EVALUATIONS]
    finals = [row for row in rows if row["kind"] == "final"]
    assert [(row["seed"], row["step"], row["eval_episodes"]) for row in finals] == [
        (str(seed), str(TOTAL), "5") for seed in SEEDS
    ]
    assert len(rows) == len(curve) + len(finals)
    for row in rows:
        optional = {"git_commit"} | ({"steps_per_second"} if row["step"] == "0" else set())
        assert all(value or name in optional for name, value in row.items()), row
        low, mean, high = (float(row[f"eval_return_{name}"]) for name in ("min", "mean", "max"))
        assert 1 <= low <= mean <= high <= 500
        assert row["command"].startswith(f"python algos/ppo.py --env-id CartPole-v1 --seed {row['seed']} ")
    assert rows[0]["eval_return_mean"] != rows[len(rows) // 2]["eval_return_mean"], "both seeds are one"


def test_what_is_done_is_skipped_and_a_lost_csv_comes_back(folders):
    folder = folders[1]
    table, log = folder / "results/ppo__CartPole-v1.csv", folder / f"runs/ppo__CartPole-v1__{TOTAL}/1.log"
    before = table.read_text(), log.read_text()
    table.unlink()
    done = subprocess.run(smoke(folder), capture_output=True, text=True)
    assert (table.read_text(), log.read_text()) == before
    last = done.stdout.splitlines()[-1]
    finals = [float(row["eval_return_mean"]) for row in read(table) if row["kind"] == "final"]
    mean, spread = np.mean(finals), np.std(finals, ddof=1)
    assert [word.strip() for word in last.split("|")] == [
        "ppo CartPole-v1 10,240", "2", f"{mean:.1f} ± {spread:.1f}", "-", "-",
    ]  # fmt: skip


def test_run_of_another_command_is_not_taken_for_this_one(folders):
    import run

    cell = run.SUITES["smoke"][0]._replace(args=("--eval-every", "1024"))
    with pytest.raises(run.Failed, match="another command"):
        run.run_seed(cell, 1, folders[0] / "runs", 5)


def test_seed_waits_for_a_training_that_outlived_its_benchmark(tmp_path):
    import run

    entered = threading.Event()

    def enter():
        with run.exclusive(tmp_path / "1.lock"):
            entered.set()

    with (tmp_path / "1.lock").open("w") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_EX)
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.5)
    assert entered.wait(5)
    thread.join()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in tmp_path with the benchmark of this one and FAKE as its ppo.py; run works in it too."""
    import run

    for name in ("benchmark", "algos"):
        (tmp_path / name).mkdir()
    for name in ("run.py", "suites.py"):
        shutil.copy(BENCHMARK / name, tmp_path / "benchmark")
    (tmp_path / "algos/ppo.py").write_text(FAKE)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    yield tmp_path
    (tmp_path / "wait").unlink(missing_ok=True)  # a training that a failed test left behind ends


def start(project: Path, output: str) -> subprocess.Popen:
    """Both seeds of the smoke suite, one after the other; the output goes to this file of the project."""
    words = sys.executable, project / "benchmark/run.py", "--suite", "smoke"
    with (project / output).open("w") as file:
        return subprocess.Popen(words, stdout=file, stderr=file)


def wait_for(word: str, file: Path) -> None:
    end = time.monotonic() + 30
    while not (file.exists() and word in file.read_text()):
        assert time.monotonic() < end, f"no {word!r} in {file}"
        time.sleep(0.02)


def test_final_evaluation_is_of_the_last_policy_and_not_of_the_best(project):
    import run

    *curve, final = run.run_seed(run.Cell("ppo", "E-v0", 9, 1), 1, project / "runs", 100)
    assert [row["eval_return_mean"] for row in curve] == ["200", "100"] and final["kind"] == "final"
    assert final["eval_return_mean"] == "100"


def test_command_of_a_row_can_be_pasted(project):
    import run

    options = ("--env-kwargs", '{"slippery": false, "name": "it\'s"}')
    row = run.run_seed(run.Cell("ppo", "E-v0", 9, 1, args=options), 1, project / "runs", 100)[-1]
    words = shlex.split(row["command"])
    assert words[:4] == ["python", "algos/ppo.py", "--env-id", "E-v0"]
    assert tuple(words[-4:-2]) == options


def test_commands_of_the_results_can_be_pasted():
    for path in sorted((BENCHMARK / "results").glob("*__*.csv")):
        for row in read(path):
            words = shlex.split(row["command"])
            kwargs = [words[i + 1] for i, word in enumerate(words) if word == "--env-kwargs"]
            assert all(isinstance(json.loads(word), dict) for word in kwargs), f"{path}: {row['command']}"


def flags_and_values(words):
    """{"--env-id": ["E-v0"], ...}: the words of a command line by flag, whatever their order."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[next(reversed(flags))].append(word)
    return flags


def test_results_are_of_the_settings_in_the_suites():
    """A cell that gets other settings is measured again: no curve of the old passes for one of the new."""
    import suites

    cells = {}  # a cell may be in two suites, with the same settings or for another number of steps
    for cell in (cell for suite in suites.SUITES.values() for cell in suite):
        cells.setdefault((cell.name, cell.env_id), []).append((cell.steps, flags_and_values(cell.args)))
    told = 0
    for path in sorted((BENCHMARK / "results").glob("*__*.csv")):
        for row in read(path):
            flags = flags_and_values(shlex.split(row["command"])[2:])
            for flag in ("--env-id", "--seed", "--total-timesteps", "--run-dir"):
                flags.pop(flag)
            trained = int(row["total_timesteps"]), flags
            assert trained in cells[row["algo"], row["env_id"]], f"{path.name}: {row['command']}"
            told += 1
    assert told


@pytest.mark.parametrize("broken", ["folder", "progress.csv", "environment.json", "../1.json"])
def test_seed_whose_files_are_gone_or_cut_fails_alone(broken, project):
    folder = project / f"benchmark/runs/ppo__CartPole-v1__{TOTAL}/1"
    assert start(project, "first.txt").wait() == 0
    if broken == "folder":
        shutil.rmtree(folder)
    else:
        (folder / broken).write_text("")
    assert start(project, "again.txt").wait() == 1
    output = (project / "again.txt").read_text()
    assert re.search(r"^ppo CartPole-v1 seed 1: FAILED: .*gone or damaged.*\.json away$", output, re.M)
    assert "seed 2: final mean 100.0" in output and "Traceback" not in output


def test_second_start_waits_for_the_training_of_a_killed_benchmark(project):
    (project / "wait").touch()
    log = project / f"benchmark/runs/ppo__CartPole-v1__{TOTAL}/1.log"
    first = start(project, "first.txt")
    wait_for("begun", log)
    first.kill()  # run.py alone: its training lives on
    first.wait()
    second = start(project, "second.txt")
    wait_for("still at work", project / "second.txt")
    (project / "wait").unlink()
    assert second.wait() == 0
    assert log.read_text().count("begun") == 1, "the second start went on with what the first had left"


def test_stop_of_the_benchmark_is_passed_on_to_its_trainings(project):
    (project / "wait").touch()
    log = project / f"benchmark/runs/ppo__CartPole-v1__{TOTAL}/1.log"
    first = start(project, "first.txt")
    wait_for("begun", log)
    first.terminate()
    wait_for("saved; go on with --resume", log)
    assert first.wait() == 143
    assert not log.with_name("2.log").exists(), "the seed that waited must not start"


def test_failed_seed_is_reported_with_its_reason(tmp_path):
    import run

    cell = run.Cell("ppo", "NoSuchEnv-v0", 512, seeds=1)
    with pytest.raises(run.Failed, match=r"exit code 2: .*NoSuchEnv.*1\.log"):
        run.run_seed(cell, 1, tmp_path, 5)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            "--algos dqn --envs ALE/Pong-v5",
            ["dqn-1_step", "dqn-1_step_sticky", "dqn-4_step", "dqn-4_step_sticky"],
        ),
        ("--algos dqn-4_step", ["dqn-4_step"]),
        ("--algos dqn-5_step", "--algos dqn-5_step: suite dqn_pong has dqn dqn-1_step dqn-1_step_sticky"),
        ("--envs ALE/Pong-v4", "--envs ALE/Pong-v4: suite dqn_pong has ALE/Pong-v5"),
    ],
)
def test_algorithms_variants_and_environments_of_a_suite_can_be_chosen(words, names, monkeypatch, capsys):
    import run

    started = []
    monkeypatch.setattr(run, "run_local", lambda jobs, _: started.extend(jobs) or ())
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "dqn_pong", "--seeds", "1", *words.split()])
    if isinstance(names, str):
        with pytest.raises(SystemExit):
            run.main()
        assert names in capsys.readouterr().err
    else:
        assert run.main() == 0
        assert [cell.name for cell, *_ in started] == names


def test_rows_of_one_seed_replace_only_their_own(tmp_path):
    import run

    same = dict(algo="a", env_id="ALE/E-v5", kind="final", step=9)
    make = lambda seed, total, score: same | dict(seed=seed, total_timesteps=total, eval_return_mean=score)
    for row in (make(2, 9, 1.0), make(1, 9, 2.0), make(1, 10, 3.0), make(2, 9, 4.0)):
        run.write_rows([row], tmp_path)
    names = "seed", "total_timesteps", "eval_return_mean"
    found = [tuple(map(row.get, names)) for row in read(tmp_path / "a__ALE-E-v5.csv")]
    assert found == [("1", "9", "2.0"), ("2", "9", "4.0"), ("1", "10", "3.0")]


@needs_matplotlib
def test_iqm_is_the_mean_of_the_middle_half():
    from plot import iqm

    equal = np.ones(8)
    assert iqm(np.array([100, 1, 2, -50, 3, 4, 0, 900.0]), equal) == pytest.approx((1 + 2 + 3 + 4) / 4)
    # Five runs: a quartile is 1.25 runs, so the second and the fourth count by three quarters.
    assert iqm(np.array([9, 0, 1, 5, 2.0]), np.ones(5)) == pytest.approx((0.75 * 1 + 2 + 0.75 * 5) / 2.5)
    # Weights 1/2, 1/4, 1/4 of the values 0, 4, 8: the middle half is a quarter of 0 and a quarter of 4.
    assert iqm(np.array([8, 0, 4.0]), np.array([0.25, 0.5, 0.25])) == pytest.approx(2.0)
    assert iqm(np.array([[1, 1, 1], [3, 3, 3.0]]), np.ones(3)) == pytest.approx([1, 3])


@needs_matplotlib
def test_bootstrap_against_values_computed_by_hand():
    from plot import mean, stratified_bootstrap

    # Two runs, 0 and 1: a resample is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4. So the 20% and
    # 80% quantiles are 0 and 1, and the 30% and 70% quantiles are 1/2.
    runs = [np.array([[0.0], [1.0]])]
    for level, low, high in ((0.6, 0, 1), (0.4, 0.5, 0.5)):
        found = stratified_bootstrap(runs, mean, level=level)
        assert [x.item() for x in found] == pytest.approx([0.5, low, high])
    # Strata that do not vary leave no interval, however far apart they are; drawing across them would.
    apart = [np.zeros((2, 3)), np.full((4, 3), 100.0)]
    for bound in stratified_bootstrap(apart, mean):  # and each weighs the same, with 2 runs or 4
        assert bound == pytest.approx([50, 50, 50])


@needs_matplotlib
def test_curves_of_other_steps_are_interpolated_on_one_grid():
    from plot import on_one_grid

    line = lambda steps: (np.array(steps), 2.0 * np.array(steps))
    grid, returns = on_one_grid([line([0, 10, 20, 30]), line([0, 15, 33])])
    assert list(grid) == [0, 10, 15, 20, 30], "up to where both came"
    assert returns == pytest.approx(np.stack([2 * grid, 2 * grid]))


@needs_matplotlib
def test_legend_calls_the_solid_line_mean_and_the_dashed_one_iqm():
    import plot

    figure, axes = plot.plt.subplots()
    runs = np.array([[0.0], [1], [2], [97]])
    plot.draw(axes, np.zeros(1), [runs], "ppo", "black")
    found = {line.get_label(): (line.get_linestyle(), line.get_ydata()[0]) for line in axes.lines}
    plot.plt.close(figure)
    assert found == {"ppo, mean": ("-", 25), "ppo, IQM": ("--", 1.5)}


@needs_matplotlib
@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_no_two_curves_of_a_plot_have_one_colour(count):
    from matplotlib.colors import to_hex
    from plot import colours

    assert len({to_hex(colour) for colour in colours(count)}) == count


@needs_matplotlib
def test_plots_are_written(folders, tmp_path):
    table, run = folders[1] / "results/ppo__CartPole-v1.csv", folders[1] / f"runs/ppo__CartPole-v1__{TOTAL}/1"
    import plot

    plot.draw_results([table], tmp_path / "deep/curves.png")
    pictures = [tmp_path / "deep/curves.png", *plot.draw_run(run)]
    families = {name.partition("/")[0] for name in read(run / "progress.csv")[0] if "/" in name}
    assert {path.name for path in (run / "plots").iterdir()} == {f"{family}.png" for family in families}
    for path in pictures:
        picture, blue = plot.plt.imread(path)[..., :3], plot.matplotlib.colors.to_rgb(plot.COLOURS[0])
        assert min(picture.shape[:2]) > 300
        assert (np.abs(picture - blue).max(-1) < 0.05).sum() > 300, f"{path} has no curve"


@needs_matplotlib
def test_joint_panel_scales_each_environment_from_untrained_to_bar(tmp_path, monkeypatch):
    import plot
    import run

    cells = [run.Cell("ppo", "A-v0", 100, 2, bar=10), run.Cell("ppo", "B-v0", 200, 2, bar=-100)]
    monkeypatch.setattr(plot, "SUITES", {"s": cells})
    for cell, first, last in zip(cells, (0, -300), (10, 0), strict=True):  # ends at 1 and 1.5
        for seed in SEEDS:
            same = dict(algo="ppo", env_id=cell.env_id, total_timesteps=cell.steps, seed=seed, kind="curve")
            points = ((0, first), (cell.steps, last))
            run.write_rows([same | dict(step=x, eval_return_mean=y) for x, y in points], tmp_path)
    drawn = {}
    monkeypatch.setattr(plot, "draw", lambda axes, x, strata, label, *_: drawn.update({label: (x, strata)}))
    plot.draw_results(sorted(tmp_path.glob("*.csv")), tmp_path / "x.png")
    share, strata = drawn["ppo (2 environments)"]
    assert (share[0], share[-1]) == (0, 1)
    assert [(s[:, 0].mean(), s[:, -1].mean()) for s in strata] == [(0, 1), (0, pytest.approx(1.5))]


@needs_matplotlib
def test_algorithms_together_share_the_panel_of_an_environment_in_the_order_of_the_files(
    tmp_path, monkeypatch
):
    import plot
    import run

    cells = [run.Cell("vpg", "A-v0", 200, 2, bar=10), run.Cell("ppo", "A-v0", 100, 2, bar=10)]
    monkeypatch.setattr(plot, "SUITES", {"s": cells})
    for cell in cells:
        for seed in SEEDS:
            same = dict(algo=cell.algo, env_id="A-v0", total_timesteps=cell.steps, seed=seed, kind="curve")
            points = ((0, 1), (cell.steps, 10))
            run.write_rows([same | dict(step=x, eval_return_mean=y) for x, y in points], tmp_path)
    files, drawn = [tmp_path / f"{algo}__A-v0.csv" for algo in ("vpg", "ppo")], []
    monkeypatch.setattr(plot, "draw", lambda axes, x, *rest: drawn.append((axes, x[-1], *rest[1:])))
    plot.draw_results(files, tmp_path / "x.png", together=True)
    (panel, *first), (other, *second) = drawn
    assert panel is other and [line.get_ydata()[0] for line in panel.lines] == [10], "one bar for both"
    assert first == [200, "vpg (2 seeds)", plot.COLOURS[0], (plot.mean,)]
    assert second == [100, "ppo (2 seeds)", plot.COLOURS[1], (plot.mean,)]
    drawn.clear()
    plot.draw_results(files, tmp_path / "x.png")
    assert drawn[0][0] is not drawn[1][0], "apart, lengths are not mixed"


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """The panels of a picture of these runs (algo, env_id, steps, bar, last return, final mean)."""
    import plot
    import run

    def draw(runs: list[tuple], together: bool) -> list:
        cells = [run.Cell(algo, env_id, steps, 2, bar=bar) for algo, env_id, steps, bar, *_ in runs]
        monkeypatch.setattr(plot, "SUITES", {"s": cells})
        for cell, (*_, last, final) in zip(cells, runs, strict=True):
            for seed in SEEDS:
                same = dict(algo=cell.algo, env_id=cell.env_id, total_timesteps=cell.steps, seed=seed)
                points = [("curve", 0, 0, 10), ("curve", cell.steps, last, 10)]
                points += [("final", cell.steps, final + 2 * seed - 3, 100)]
                names = "kind", "step", "eval_return_mean", "eval_episodes"
                rows = [same | dict(zip(names, point, strict=True)) for point in points]
                run.write_rows(rows, tmp_path)
        figures = []
        monkeypatch.setattr(plot.plt, "close", figures.append)
        plot.draw_results(sorted(tmp_path.glob("*.csv")), tmp_path / "x.png", together)
        monkeypatch.undo()
        plot.plt.close(figures[0])
        return figures[0].axes

    return draw


@needs_matplotlib
def test_legend_of_many_curves_covers_none(panels):
    axes, *others = panels([("ppo", "A-v0", 100, 10, 5, 8), ("a2c", "A-v0", 200, 20, 5, 30)], True)
    assert not others and axes.get_legend().get_window_extent().x0 >= axes.bbox.x1


@needs_matplotlib
def test_final_mean_is_marked_at_the_end_of_its_curve(panels):
    first, _, joint = panels([("ppo", "A-v0", 100, 10, 5, 8), ("ppo", "B-v0", 200, 20, 5, 30)], False)
    ends = lambda axes: [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axes.lines
        if line.get_marker() == "D" and len(line.get_xdata())
    ]
    legend = lambda axes: [text.get_text() for text in axes.get_legend().get_texts()]
    assert ends(first) == [(100, 8)] and "final mean, 100 episodes" in legend(first)
    assert ends(joint) == [(1, pytest.approx((8 / 10 + 30 / 20) / 2))] and "final mean" in legend(joint)


@needs_matplotlib
def test_two_lengths_of_an_algorithm_in_one_panel_have_two_names_and_two_colours(panels):
    runs = [
        ("sac", "A-v0", 20_000, 10, 9, 9),
        ("sac", "A-v0", 40_000, 10, 9, 9),
        ("ppo", "A-v0", 100, 9, 9, 9),
    ]
    (axes,) = panels(runs, together=True)
    found = {line.get_label(): line.get_color() for line in axes.lines if "seeds" in line.get_label()}
    assert set(found) == {f"{name} (2 seeds), mean" for name in ("sac 20k", "sac 40k", "ppo")}
    assert len(set(found.values())) == 3


def test_table_of_the_readme_is_checked_and_written(folders, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- table:start -->\nold\n<!-- table:end -->\nbelow\n", encoding="utf-8")
    results = tmp_path / "results"
    results.mkdir()
    measured = (folders[1] / "results/ppo__CartPole-v1.csv").read_text().replace(f",{TOTAL},", ",100000,")
    table = results / "ppo__CartPole-v1.csv"
    table.write_text(measured)  # its finals are of 5 episodes
    make = command("make_readme_table.py", "--readme", readme, "--results", results)
    check = lambda: subprocess.run([*make, "--check"], capture_output=True, text=True)
    other = check()
    assert other.returncode == 1 and re.search(rf"{table} .* of 5 episodes, .* 100", other.stderr)
    table.write_text(re.sub(",final,100000,5,", ",final,100000,100,", measured.replace(f"{TOTAL}", "100000")))
    before = check()
    assert before.returncode == 1 and "out of date" in before.stderr
    assert "\nold\n" in readme.read_text(encoding="utf-8"), "--check must not write"
    assert subprocess.run(make).returncode == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("above\n<!-- table:start -->\n| algorithm") and text.endswith("end -->\nbelow\n")
    assert "old" not in text
    rows = read(table)
    finals = [float(row["eval_return_mean"]) for row in rows if row["kind"] == "final"]
    mark = "✓" if np.mean(finals) >= 475 else "✗"
    assert f"CartPole-v1 {np.mean(finals):.1f} {mark} (100k, 2 seeds)" in text
    assert "[arXiv 1707.06347](https://arxiv.org/abs/1707.06347)" in text
    assert check().returncode == 0
    readme.write_text(text.replace("2 seeds", "5 seeds"), encoding="utf-8")
    assert check().returncode == 1
    readme.write_text("no markers", encoding="utf-8")
    assert check().returncode == 2


@pytest.mark.parametrize(
    ("scores", "shown"),
    [([481.0, 490.0, 499.0], "490.0 ± 9.0"), ([490.0], "490.0"), ([0.25, 0.75], "0.500 ± 0.354")],
)
def test_table_of_a_page_shows_the_deviation_between_seeds(scores, shown, monkeypatch, tmp_path):
    import make_readme_table

    cell = make_readme_table.SUITES["ppo"][0]
    monkeypatch.setattr(make_readme_table, "finals", lambda *_, **__: [(cell, scores)])
    row = make_readme_table.results_table("ppo", tmp_path).splitlines()[-1]
    assert row.startswith(f"| CartPole-v1 | 100k | {len(scores)} | {shown} | 475 |")


def speed_csv(folder: Path, rows: list[tuple]) -> Path:
    """A speed.csv of rows (kind, task, threads, pair, library, steps per second or seconds, solved)."""
    import speed

    found = []
    for kind, task, threads, pair, library, value, solved in rows:
        unit = "steps_per_second" if kind == "speed" else "seconds"
        same = dict(kind=kind, task=task, threads=threads, pair=pair, library=library, solved=solved)
        found.append(same | {unit: value})
    speed.write_rows(found, folder / "speed.csv")
    return folder


def test_ratio_of_speeds_says_of_how_many_pairs_it_is_the_median(tmp_path):
    import make_readme_table

    sac, pong = "sac Pendulum-v1 sbx", "ALE/Pong-v5"
    rows = [("speed", sac, 2, 1, "plainrl", 90, ""), ("speed", sac, 2, 1, "sbx", 100, "")]
    for pair, ours in ((1, 300), (2, 100), (3, 200)):
        rows += [("speed", pong, 0, pair, "plainrl", ours, "")]
        rows += [("speed", pong, 0, pair, "stable-baselines3", 100, "")]
    folder = speed_csv(tmp_path, rows)
    assert make_readme_table.speeds("sac", folder) == "Pendulum-v1 0.90× SBX (2 threads, 1 pair)"
    assert make_readme_table.speeds("ppo", folder) == "ALE/Pong-v5 2.00× (3 pairs)"


@pytest.mark.parametrize(
    ("solved", "shown"),
    [
        ((True, True, True), "CartPole-v1 solved 20 s after the command (3 seeds)"),
        ((True, False, True), "CartPole-v1 solved by 2 of 3 seeds"),
        ((False, False, False), "CartPole-v1 solved by 0 of 3 seeds"),
    ],
)
def test_time_of_a_run_that_did_not_solve_is_no_time_of_solving(solved, shown, tmp_path):
    import make_readme_table

    rows = []
    for pair, (seconds, ours) in enumerate(zip((10, 20, 30), solved, strict=True), start=1):
        rows += [("solve", "CartPole-v1", 1, pair, "plainrl", seconds, ours)]
        rows += [("solve", "CartPole-v1", 1, pair, "stable-baselines3", 40, False)]
    assert make_readme_table.speeds("ppo", speed_csv(tmp_path, rows)) == shown


def test_published_numbers_stand_beside_the_variant_that_they_are_of():
    import make_readme_table

    page = make_readme_table.results_table("ddpg_td3", BENCHMARK / "results")
    row = {line.split(" | ")[0]: line for line in page.splitlines()}
    published = {"td3": "| -151.9 at 20k", "ddpg": "| -152.1 at 20k", "ddpg twin": "| – | – |"}
    assert all(text in row[f"| Pendulum-v1 {variant}"] for variant, text in published.items())
    assert "-157.0" not in make_readme_table.results_table("sac", BENCHMARK / "results").split("caps")[1]
    names = {cell.name for cell in make_readme_table.cells(ablations=True)}
    assert {name for name, _ in make_readme_table.PUBLISHED} <= names


def test_ablations_are_on_the_page_and_not_in_the_readme():
    import make_readme_table

    results = BENCHMARK / "results"
    page = make_readme_table.results_table("dqn", results)
    readme = make_readme_table.results("dqn", results)
    row = {line.split(" | ")[0]: line for line in page.splitlines()}
    assert row["| LunarLander-v3 noisy"].endswith("| – | – |")  # the published one is of another length
    assert "265.9" in row["| LunarLander-v3 double per"]
    assert "double per" in readme and "noisy" not in readme


def test_readme_and_docs_show_what_was_measured():
    done = subprocess.run(command("make_readme_table.py", "--check"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_speed_says_which_package_is_missing(tmp_path):
    empty = tmp_path / "python"  # an interpreter that sees only the standard library
    empty.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    empty.chmod(0o755)
    done = subprocess.run(command("speed.py", "--sb3-python", empty), capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install stable-baselines3" in done.stderr and len(done.stderr.splitlines()) == 1


def test_speed_asks_the_other_side_for_what_the_chosen_tasks_need(tmp_path):
    import speed

    sb3 = tmp_path / "python"  # an interpreter that sees Stable-Baselines3 and nothing else
    (tmp_path / "stable_baselines3.py").touch()
    sb3.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    sb3.chmod(0o755)
    assert speed.missing(str(sb3), ["CartPole-v1", "dqn CartPole-v1"]) == []
    assert speed.missing(str(sb3), ["trpo Pendulum-v1", "sac Pendulum-v1 sbx"]) == ["sb3-contrib", "sbx-rl"]
    words = "--tasks", "CartPole-v1", "trpo Pendulum-v1", "--sb3-python", sb3, "--out", tmp_path / "x.csv"
    done = subprocess.run(command("speed.py", *words), capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, "it says so before it measures"
    assert "pip install sb3-contrib" in done.stderr and len(done.stderr.splitlines()) == 1


def test_readme_installs_what_the_tasks_of_speed_need():
    import speed

    text = (BENCHMARK / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"peer/bin/pip install (.*)", text)
    needed = {module for name in speed.LEARNING for module in speed.modules_of_peer(speed.TASKS[name])}
    packages = {speed.PACKAGES[module] for module in needed - {"cv2"}}  # comes with [extra]
    assert packages <= {word.removesuffix("[extra]") for word in shlex.split(line)}


def test_readme_has_the_commands_that_made_what_the_docs_show():
    text = (BENCHMARK / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for name in ("replay_memory", "es_speed"):
        (line,) = re.findall(rf"(python .*) \| tee benchmark/results/{name}\.txt", text)
        pairs = set(re.findall(r"pair \d+", (BENCHMARK / f"results/{name}.txt").read_text()))
        assert f"--pairs {len(pairs)} " in f"{line} ", line
        # rows in results/speed.csv would put the memory's random steps into the README's table of speeds
        assert name != "replay_memory" or "--out benchmark/runs/" in line


def test_speed_does_not_measure_the_filling_of_a_buffer_unless_told():
    import speed

    assert [name for name in speed.TASKS if name not in speed.LEARNING] == ["dqn ALE/Pong-v5 filling"]


def test_speed_counts_only_whole_rollouts_after_the_warm_up(monkeypatch):
    import speed

    task = speed.TASKS["CartPole-v1"]._replace(warmup=2, window=3)
    clock = [
        9.0,
        10.0,
        11.0,
        12.0,
        14.0,
        99.0,
    ]  # end of each rollout; the last has the final evaluation in it
    rows = [{"step": 512 * (i + 1), "wall_time": x} for i, x in enumerate(clock)]
    asked = []
    monkeypatch.setattr(speed, "run_ours", lambda _, words, *__: asked.append(words) or (rows, {}, 0.0))
    found = speed.speed_of_ours(task)
    assert (found["env_steps"], found["seconds"]) == (3 * 512, 14.0 - 10.0)
    assert found["steps_per_second"] == pytest.approx(3 * 512 / 4)
    assert asked[0][asked[0].index("--total-timesteps") + 1] == str(6 * 512)


def test_speed_takes_turns_and_takes_the_median_of_the_ratios(capsys):
    import speed

    order = []
    sides = {
        speed.OURS: lambda pair: order.append("A") or {"steps_per_second": [30.0, 20.0, 80.0][pair - 1]},
        speed.SB3: lambda pair: order.append("B") or {"steps_per_second": [10.0, 20.0, 20.0][pair - 1]},
    }
    rows = speed.compare("speed", "CartPole-v1", sides, {"threads": 1}, pairs=3)
    assert order == list("ABABAB") and len(rows) == 6
    assert "3.00 times as fast (1.00 to 4.00)" in capsys.readouterr().out


def test_half_of_the_seconds_is_twice_as_fast(capsys):
    import speed

    sides = {
        speed.OURS: lambda pair: {"seconds": [10.0, 5.0, 5.0][pair - 1]},
        speed.SB3: lambda pair: {"seconds": [10.0, 10.0, 20.0][pair - 1]},
    }
    speed.compare("solve", "CartPole-v1", sides, {"threads": 1}, pairs=3)
    assert "2.00 times as fast (1.00 to 4.00)" in capsys.readouterr().out


@needs_matplotlib
def test_smoothness_is_amplitude_times_frequency():
    from caps import smoothness

    time_ = np.arange(100)[:, None]
    wave = lambda amplitude, periods: amplitude * np.sin(2 * np.pi * periods * time_ / 100) + 0.7
    assert smoothness(np.full((100, 1), 0.7)) == pytest.approx(0, abs=1e-12)
    # the one frequency, 10/100 of the sampling frequency, among 50
    assert smoothness(wave(0.5, 10)) == pytest.approx(2 * 0.5 * 0.1 / 50)
    assert smoothness(wave(0.5, 40)) == pytest.approx(4 * smoothness(wave(0.5, 10)))
    both = np.concatenate([wave(0.5, 10), wave(1.5, 10)], axis=1)
    assert smoothness(both) == pytest.approx(2 * 1.0 * 0.1 / 50)


def test_processes_of_the_es_benchmark_exchange_a_table():
    code = "import es_speed as e; seconds, cpu = e.exchange(2, 64, 10); assert 0 < seconds < 10 and cpu > 0"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARK, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()


@needs_matplotlib
def test_speed_of_q_learning_is_compared_with_its_environments():
    from q_table import steps_per_second
    from run import load_script

    training, alone = steps_per_second(load_script("q_learning"), 16, 20_000)
    assert 0 < training < alone
