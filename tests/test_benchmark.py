"""The tools of benchmark/: trainings become rows, rows become tables and pictures, speeds are paired."""

import csv
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from conftest import ALGOS, ROOT, fork, load_script, wait

BENCHMARK = ROOT / "benchmark"
sys.path.insert(0, str(BENCHMARK))


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARK / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*words, code=0) -> str:
    words = [sys.executable, str(BENCHMARK / words[0]), *map(str, words[1:])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A script of one's own, trained on two seeds by run.py, and the rows that came out."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "algos/ppo.py", folder / "my.py")
    words = [
        "--env-id",
        "CartPole-v1",
        "--steps",
        "2048",
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--final-episodes",
        "3",
    ]
    command = ["run.py", "--script", folder / "my.py", *words, "--runs", folder / "runs"]
    return folder, command, call(*command)


@pytest.mark.long
def test_any_script_is_trained_and_tabled(project):
    folder, _, text = project
    assert "my CartPole-v1 2,048 | 2" in text
    tables = [read(folder / f"runs/results/{name}.csv") for name in ("runs", "evaluations")]
    assert {(row["algo"], row["seed"]) for rows in tables for row in rows} == {("my", "1"), ("my", "2")}
    committed = (BENCHMARK / "results/runs.csv").read_text() + (
        BENCHMARK / "results/evaluations.csv"
    ).read_text()
    assert "\nppo," in committed and "\nmy," not in committed
    for seed in "12":
        (run,), own = ([row for row in rows if row["seed"] == seed] for rows in tables)
        log = (folder / f"runs/my__CartPole-v1__2048/{seed}/progress.jsonl").read_text().splitlines()
        logged = [row["eval/return_mean"] for row in map(json.loads, log) if "eval/return_mean" in row]
        assert [float(row["return_mean"]) for row in own] == pytest.approx(logged, rel=1e-5)
        returns = np.array(run["final_returns"].split(), float)
        for name in ("mean", "std", "min", "max"):
            assert getattr(returns, name)() == pytest.approx(float(run[f"final_return_{name}"]), rel=1e-5)
        assert run["final_episodes"] == "3" == str(len(returns)) and run["eval_episodes"] == "10"
        assert f"--seed {seed}" in run["command"] and run["torch"] and run["cpu"]


def test_what_is_done_is_skipped_and_lost_tables_come_back(project):
    folder, command, _ = project
    tables = [folder / f"runs/results/{name}.csv" for name in ("runs", "evaluations")]
    before, checkpoint = (
        [path.read_text() for path in tables],
        folder / "runs/my__CartPole-v1__2048/1/checkpoint.pt",
    )
    made = checkpoint.stat().st_mtime
    for path in tables:
        path.unlink()
    call(*command)
    assert [path.read_text() for path in tables] == before and checkpoint.stat().st_mtime == made


@pytest.mark.long
def test_a_run_that_was_cut_short_goes_on(project, tmp_path):
    folder, _, _ = project
    run = tool("run")
    cell = run.Cell("my", "CartPole-v1", 2048, seeds=1, script=str(folder / "my.py"))
    whole = folder / "runs/my__CartPole-v1__2048"
    cut = tmp_path / "my__CartPole-v1__2048"
    script = load_script("my", folder / "my.py")
    words = {"seed": 1, "total_timesteps": 2048, "checkpoint_every": 64, "run_dir": str(cut / "1")}

    def killed():
        log = script.Run.log
        die = lambda: os.kill(os.getpid(), signal.SIGKILL)
        script.Run.log = lambda self, row: die() if self.env_steps > 1024 else log(self, row)
        script.train(script.make_args("CartPole-v1", **words))

    assert wait(fork(killed)) == -signal.SIGKILL
    row, evaluations = run.run_seed(cell, 1, tmp_path, 3)
    assert row["final_episodes"] == 3 and evaluations[-1]["step"] == 2048
    kept = json.loads((cut / "1/environment.json").read_text())
    assert [entry["step"] for entry in kept] == [0, 1024] and (whole / "1").exists()


def test_a_folder_of_another_command_and_a_failing_seed_are_said(project):
    folder, command, _ = project
    record = folder / "runs/my__CartPole-v1__2048/2.json"
    text = record.read_text()
    record.write_text(text.replace('"--seed"', '"--sead"'))
    out = call(*command, code=1)
    assert "seed 2: FAILED" in out and "another command" in out and "seed 1: final mean" in out
    record.write_text(text)


def rows_of_a_run(seed: int, mean: float, **cell) -> tuple[dict, list[dict]]:
    """A run's row, and those of its two evaluations."""
    same = dict(algo="a", env_id="E-v0", total_timesteps=10, seed=seed) | cell
    return same | dict(final_return_mean=mean), [same | dict(step=step, return_mean=mean) for step in (9, 10)]


def test_rows_of_one_run_replace_only_their_own(tmp_path):
    run = tool("run")
    for seed, mean, steps in ((1, 1.0, 10), (2, 2.0, 10), (1, 3.0, 10), (1, 4.0, 9)):
        run.write_rows(*rows_of_a_run(seed, mean, total_timesteps=steps), tmp_path)
    expected = [("1", "4.0"), ("1", "3.0"), ("2", "2.0")]
    assert [(row["seed"], row["final_return_mean"]) for row in read(tmp_path / "runs.csv")] == expected
    rows = [(row["seed"], row["step"], row["return_mean"]) for row in read(tmp_path / "evaluations.csv")]
    assert rows == [(seed, step, mean) for seed, mean in expected for step in ("9", "10")]


def test_several_programs_write_the_same_tables_at_once(tmp_path):
    run = tool("run")

    def write(own):
        for seed in range(10):
            run.write_rows(*rows_of_a_run(seed, 1.0, algo=f"a{own}"), tmp_path)

    for child in [fork(lambda own=own: write(own)) for own in range(4)]:
        assert wait(child) == 0
    for name, count in (("runs", 1), ("evaluations", 2)):
        rows = [(row["algo"], row["seed"]) for row in read(tmp_path / f"{name}.csv")]
        assert rows == [
            (f"a{own}", str(seed)) for own in range(4) for seed in range(10) for _ in range(count)
        ]


def test_cells_are_read_in_the_order_of_their_patterns(tmp_path):
    run = tool("run")
    for algo, env_id, steps in (
        ("dqn-per", "ALE/Pong-v5", 10), ("dqn", "ALE/Pong-v5", 10), ("dqn", "E-v0", 10), ("dqn", "E-v0", 20),
    ):  # fmt: skip
        run.write_rows(*rows_of_a_run(1, 1.0, algo=algo, env_id=env_id, total_timesteps=steps), tmp_path)

    def cells(*patterns, **skip):
        runs, evaluations = run.read_cells(tmp_path, patterns, **skip)
        key = lambda row: (row["algo"], row["env_id"], row["total_timesteps"])
        assert [key(row) for row in evaluations] == [key(row) for row in runs for _ in range(2)]
        return [" ".join(key(row)) for row in runs]

    every = ["dqn ALE/Pong-v5 10", "dqn E-v0 10", "dqn E-v0 20", "dqn-per ALE/Pong-v5 10"]
    assert cells("*") == every and cells("dqn/*") == every[:3] and cells("dqn-*/*") == every[3:]
    assert cells("*/ALE/Pong-v5", "dqn/*", skip_steps=20) == [every[0], every[3], every[1]]
    with pytest.raises(SystemExit, match="has no ppo/E-v0 a/b"):
        cells("ppo/E-v0", "dqn/*", "a/b")


def test_every_cell_of_the_suites_makes_valid_arguments(tmp_path):
    suites, without = tool("suites"), tool("without")
    for cells in suites.SUITES.values():
        for cell in cells:
            script, steps, args = load_script(cell.algo), ["--total-timesteps", str(cell.steps)], [*cell.args]
            if cell.script:  # benchmark/without.py, which takes two of them
                part = args.pop(args.index("--without") + 1)
                args.remove("--without")
                (path := tmp_path / part).mkdir()
                (path / "rainbow.py").write_text(without.script_without(part))
                script = load_script("rainbow", path / "rainbow.py")
            words = ["--env-id", cell.env_id, "--device", "cpu", *steps, *args]
            script.set_up(script.parse_args(words))


@pytest.mark.long
def test_pictures_of_runs_and_of_results_are_written(project, tmp_path):
    folder, _, _ = project
    runs = sorted((folder / "runs/my__CartPole-v1__2048").glob("[12]"))
    call("plot.py", *runs, "--out", tmp_path / "plots")
    assert {"eval.png", "loss.png", "train.png"} <= {path.name for path in (tmp_path / "plots").iterdir()}
    words = [
        "plot.py",
        "--results",
        folder / "runs/results",
        "--out",
        tmp_path / "curves.png",
        "--cells",
        "my/*",
    ]
    call(*words)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "has no your/*" in call(*words, "your/*", code=1)


def test_a_film_becomes_a_small_animated_picture_at_the_same_pace(tmp_path):
    film, out = tmp_path / "film.mp4", tmp_path / "film.webp"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter_fourcc(*"vp09"), 50, (64, 48))
    for brightness in range(100):  # 2 seconds
        writer.write(np.full((48, 64, 3), 2 * brightness, np.uint8))
    writer.release()
    call("film.py", film, "--out", out, "--width", 32, "--seconds", 1)
    _, picture = cv2.imreadanimation(str(out))
    shown = [int(frame[..., :3].mean()) for frame in picture.frames]
    assert picture.frames[0].shape[:2] == (24, 32) and sum(picture.durations) == 1000
    assert shown == sorted(shown) and shown[0] < 20 and abs(shown[-1] - 2 * 50) < 20
    call("film.py", tmp_path / "none.mp4", "--out", out, code=1)


def test_interquartile_mean_is_the_mean_of_the_middle_half():
    plot = tool("plot")
    scores = np.array([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -100.0])
    assert float(plot.iqm(scores, np.ones(8))) == pytest.approx(3.5)


def test_speed_takes_turns_and_the_median_of_the_ratios(capsys):
    speed, order = tool("speed"), []
    values = {"ours": iter([200.0, 300.0, 100.0]), "theirs": iter([100.0, 100.0, 100.0])}

    def side(name):
        return lambda: order.append(name) or {"steps_per_second": next(values[name])}

    speed.compare("task", {"ours": side("ours"), "theirs": side("theirs")}, {}, 3)
    assert order == ["ours", "theirs"] * 3
    assert "2.00 times as fast (1.00 to 3.00)" in capsys.readouterr().out


def test_arguments_of_the_speed_tasks_are_those_of_the_scripts(monkeypatch):
    speed, seen = tool("speed"), []

    def run_ours(path, arguments, threads):
        script = load_script(path.stem)
        script.set_up(script.parse_args([*arguments, "--device", "cpu"]))
        seen.append(path.stem)
        raise SystemExit

    monkeypatch.setattr(speed, "run_ours", run_ours)
    for task in speed.TASKS.values():
        with pytest.raises(SystemExit):
            speed.speed_of_ours(ALGOS / f"{task.algo}.py", task)
    assert set(seen) == {"ppo", "ppo_lstm", "a2c", "trpo", "dqn", "sac", "ddpg_td3"}


def test_a_bar_is_reached_by_the_middle_of_the_seeds_and_by_four_of_five():
    passes = tool("run").passes
    assert passes([500, 500, 500, 480, 100], 475) and passes([-13.0] * 5, -13)
    assert not passes([500, 500, 500, 100, 100], 475)  # three of five
    assert not passes([476, 476, 476, 476, 476, 476, 476, 476, 100, 0], 476.5)
    assert not passes([400, 400, 400, 400, 9000], 475)  # a lucky one


def test_the_leaderboard_has_the_fastest_first_and_those_that_missed_the_bar_last(tmp_path, monkeypatch):
    tables = tool("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    row = "{} CartPole-v1,{},1,475,{},{},{},9,2.13,1.4,,Intel Xeon,2,{}"
    rows = [
        row.format("dqn", "plainrl", 8.5, 20000, True, "abcdefgh"),
        row.format("a2c", "plainrl", "", "", False, 1),
    ]
    rows += [
        row.format("ppo", "plainrl", 2.5, 15360, True, 2),
        row.format("ppo", "stable-baselines3", 1, 1, True, 3),
    ]
    head = "cell,library,seed,bar,seconds,env_steps,solved,trained_seconds,torch,gymnasium,library_version"
    (tmp_path / "time_to_bar.csv").write_text("\n".join([f"{head},cpu,cores,git_commit", *rows]))
    entries = tables.leaderboard().splitlines()[2:]
    assert [entry.split(" | ")[1] for entry in entries] == ["ppo.py", "dqn.py", "a2c.py"]
    steps = "20,000 (20,000 to 20,000)"
    assert entries[1] == (
        f"| CartPole-v1, 475 | dqn.py | 1 of 1 | 8.5 (8.5 to 8.5) | {steps} | Intel Xeon | `abcdefg` |"
    )
    assert " 0 of 1 | – | – | " in entries[2]


def test_the_time_to_the_bar_ends_when_three_scores_in_a_row_reach_it(tmp_path):
    race = tool("time_to_bar")

    def measured(*scores, bar=10.0, end="", limit=60):
        script = tmp_path / "script.py"
        prints = "".join(
            f"time.sleep(0.2); print('step {i}  return {x} ± 0.0')\n" for i, x in enumerate(scores)
        )
        script.write_text(f"import time\n{prints}{end}")
        return race.measure([sys.executable, str(script)], bar, limit)

    found = measured(9, 10, 11, 9, 12, 10, 10, 99, end="time.sleep(60)")
    assert (found["solved"], found["env_steps"]) == (True, 4) and 1 < found["seconds"] < 8
    assert found["seconds"] < found["trained_seconds"] < 20  # it was stopped
    found = measured(9, 10, 11)
    assert (found["solved"], found["env_steps"]) == (True, 1)  # good to its end
    assert not measured(10, 10, 9)["solved"]
    found = measured(9, 9, 10, end="time.sleep(60)", limit=0.1)
    assert not found["solved"] and found["seconds"] == "" and found["trained_seconds"] < 20  # given up
    assert measured(10, 10, 10, end="time.sleep(60)", limit=0.1)["solved"]  # it was good by then
    assert not measured(10, 9, 10, 10, limit=0.1)["solved"]  # it was not, after one lucky score
    with pytest.raises(SystemExit):
        measured(10, end="raise ValueError")


@pytest.mark.long
def test_time_to_the_bar_is_measured_and_drawn(tmp_path):
    race, figures = tool("time_to_bar"), tool("figures")
    for cell in race.RACES:
        algo, env_id = cell.split()
        assert load_script(algo).make_args(env_id).eval_episodes  # there is such a script
    table, picture = tmp_path / "time.csv", tmp_path / "time.png"
    call("time_to_bar.py", "--cells", "pqn CartPole-v1", "--seeds", 1, "--out", table)
    (row,) = read(table)
    assert row["library"] == "plainrl" and float(row["trained_seconds"]) > 1
    for seconds in (row["seconds"], "", "7.5"):  # as measured, never good, good
        figures.time_to_bar([row | {"seconds": seconds}], picture)
        assert cv2.imread(str(picture)).std() > 5


def test_readme_and_docs_show_what_was_measured():
    call("tables.py", "--check")
    call("figures.py", "--check")


def test_a_picture_is_out_of_date_when_its_data_have_changed(tmp_path, monkeypatch, capsys):
    figures = tool("figures")
    tables = [tmp_path / "runs.csv", tmp_path / "evaluations.csv"]
    for path in tables:
        head, *rows = (figures.RESULTS / path.name).read_text().splitlines(keepends=True)
        path.write_text(head + "".join(row for row in rows if row.startswith(("a2c,Cart", "ppo,Cart"))))
    for name, path in (("RESULTS", tmp_path), ("PICTURES", tmp_path), ("KNOWN", tmp_path / "figures.json")):
        monkeypatch.setattr(figures, name, path)
    monkeypatch.setattr(figures, "FIGURES", {"ppo": figures.Figure("ppo/CartPole-v1")})

    def change(path: Path, old: str, new: str) -> None:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    def check() -> int:
        monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
        with pytest.raises(SystemExit) as stop:
            figures.main()
        return stop.value.code

    assert check() == 1 and "ppo" in capsys.readouterr().out  # there is none
    figures.draw("ppo")
    assert check() == 0 and cv2.imread(str(tmp_path / "ppo.png")).std() > 5
    change(tables[0], "a2c,CartPole", "a2c,CartPolo")  # another cell
    change(tables[0], "python algos/ppo.py", "python algos/ppo2.py")  # nothing that is drawn
    assert check() == 0
    for path in tables:
        start = re.search(r"ppo,CartPole-v1,.*,500,", path.read_text())[0]
        change(path, start, start.replace(",500,", ",499,", 1))
        assert check() == 1
        figures.draw("ppo")
        assert check() == 0
    shutil.copy(tmp_path / "ppo.png", tmp_path / "another.png")
    assert check() == 1 and "another" in capsys.readouterr().out


@pytest.mark.long
def test_special_pictures_are_drawn_from_their_tables_in_few_colors(tmp_path, monkeypatch):
    figures = tool("figures")
    monkeypatch.setattr(figures, "PICTURES", tmp_path)
    monkeypatch.setattr(figures, "KNOWN", tmp_path / "figures.json")
    names = [name for name, figure in figures.FIGURES.items() if figure.draw is not figures.draw_cells]
    assert len(names) == 11  # PEARL beside MAML, the T-maze and those of a table of their own
    for name in names:
        figures.draw(name)
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.mode == "P" and round(picture.info["dpi"][0]) == 150
            assert np.array(picture.convert("L")).std() > 5
    assert set(json.loads(figures.KNOWN.read_text())) == set(names)


def test_what_is_visited_is_counted(tmp_path, monkeypatch):
    visits = tool("visits")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(visits, "STEPS", {visits.GRID: 1024, "MountainCar-v0": 2048})
    monkeypatch.setattr(visits, "TABLE", tmp_path / "visits.csv")
    monkeypatch.setattr(sys, "argv", ["visits.py"])
    visits.main()
    counts = {}
    for row in read(tmp_path / "visits.csv"):
        numbers = [int(row[f"quarter_{i}"]) for i in (1, 2, 3, 4)]
        counts.setdefault((row["env_id"], row["algo"]), []).append(numbers)
    assert [*counts] == [(env_id, algo) for env_id in visits.STEPS for algo in ("ppo", "ppo_rnd")]
    for (env_id, _), numbers in counts.items():
        quarters = np.array(numbers).sum(0)  # equally many steps in each
        assert quarters.sum() >= visits.STEPS[env_id] and len(set(quarters.tolist())) == 1
        assert 10 < (np.array(numbers).sum(1) > 0).sum() < len(numbers)
    corner = visits.places("MountainCar-v0", np.array([[-1.2, -0.07], [0.6, 0.07]]))
    assert [x.tolist() for x in corner[:2]] == [[0, 27], [0, 35]]
