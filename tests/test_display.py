"""What a person sees of a run: the progress bar, the window, the texts in TensorBoard."""

import json
import re
import sys
from pathlib import Path


def test_a_progress_bar_on_a_terminal_and_plain_lines_elsewhere(script, capsys, monkeypatch):
    script.train("plain")
    plain = capsys.readouterr()
    lines = re.findall(r"^step (\d+)/384 \d+ steps/s return \S+ evaluation \S+$", plain.out, re.M)
    assert (lines[-1], plain.err) == ("384", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    script.train("terminal")
    terminal = capsys.readouterr()
    assert "steps/s" not in terminal.out
    last = terminal.err.rstrip().split("\r")[-1]
    assert "384/384" in last and "steps/s" in last and re.search(r"return -?\d+\.\d evaluation -?\d", last)


def test_render_shows_one_episode_in_a_window(script, monkeypatch):
    shown = []
    show = lambda title, frame: shown.append((title, frame[0, 0, 0]))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(script.module.cv2, "imshow", show)
    monkeypatch.setattr(script.module.cv2, "waitKey", lambda milliseconds: shown.append(milliseconds))
    script.train("run", **script.env("Ones"), render=True, eval_every=0, eval_episodes=3, num_steps=16)
    frames, pauses = shown[::2], shown[1::2]
    assert frames == [("probe_envs:Ones-v0", 10 * t) for t in range(11)], "the reset and ten steps"
    assert pauses == [1000 // 20] * 11, "at the speed of the environment"
    assert not Path("run/videos").exists()


def test_tensorboard_shows_arguments_and_versions(script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script.train("run")
    events = EventAccumulator("run")
    events.Reload()
    for name in ("args", "environment"):
        (event,) = events.Tensors(f"{name}/text_summary")
        text = event.tensor_proto.string_val[0].decode()
        for key, value in json.loads(Path(f"run/{name}.json").read_text()).items():
            value = tuple(value) if isinstance(value, list) and name == "args" else value
            assert f"    {key}: {value}" in text.splitlines()
