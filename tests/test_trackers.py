"""TensorBoard and Weights & Biases: they get what the run's files get, once, and can't stop a run."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import records
import train
from records import Trackers, append_lines, numbers, take_back

EVAL = {
    "step": 0, "split": "test", "temperature": 0.0, "max_turns": 20, "success_rate": 0.25, "errors": 0,
    "success_interval": [0.1, 0.4], "pass_at": {"1": 0.25}, "per_task": {"babyai/a": 0.25},
}  # fmt: skip


def line(step: int, success: float) -> dict:
    return {"step": step, "success_rate": success, "grad_norm": None, "errors": {"babyai/a": 1}}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    pytest.importorskip("tensorboard", reason="pip install -r requirements-dev.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def track(folder: Path, *lines: dict, **flags) -> None:
    """A process of a run: it opens its trackers and writes some lines."""
    with Trackers(train.Config(**flags), folder) as trackers:
        for added in lines:
            file = "eval.jsonl" if "split" in added else "metrics.jsonl"
            append_lines(folder / file, [added])
            trackers.log(file, [added])
            trackers.log("trajectories.jsonl", [{"step": added["step"], "split": "train"}])


def test_numbers_are_found_wherever_they_are():
    assert numbers(
        {"step": 3, "a": 1, "b": None, "c": {"x": 0.5, "y": {"z": True}}, "d": "no"}
    ) == {
        "a": 1.0,
        "c/x": 0.5,
        "c/y/z": 1.0,
    }
    assert numbers(EVAL, "test/") == {
        "test/temperature": 0.0, "test/max_turns": 20.0, "test/success_rate": 0.25, "test/pass_at/1": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_any_work(monkeypatch, flag):
    pytest.importorskip(flag)
    monkeypatch.setenv("WANDB_MODE", "offline")
    specs = {"there": ModuleSpec(flag, None, origin="x.py"), "folder": ModuleSpec(flag, None)}
    for found in ("there", "folder", None):  # wandb makes a folder of its own name where it is run
        monkeypatch.setattr(records, "find_spec", lambda name, found=found: specs.get(found))
        train.Config()
        if found == "there":
            train.Config(**{flag: True if flag == "tensorboard" else "project"})
            continue
        with pytest.raises(ValueError, match=f"--{flag} .* missing: pip install {flag}"):
            train.Config(**{flag: True if flag == "tensorboard" else "project"})


def test_without_a_flag_nothing_is_opened(tmp_path):
    track(tmp_path, line(1, 0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_shows_each_step_once_however_often_the_run_was_killed(tmp_path):
    track(tmp_path, EVAL, line(1, 0.1), line(2, 0.2), line(3, 0.3), tensorboard=True)
    assert scalars(tmp_path)["train/success_rate"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    for file in ("metrics.jsonl", "eval.jsonl"):
        take_back(tmp_path / file, 1)  # the newest checkpoint is that of step 1
    track(tmp_path, line(2, 0.25), tensorboard=True)
    shown = scalars(tmp_path)
    assert shown["train/success_rate"] == [(1, 0.1), (2, 0.25)]
    assert shown["test_greedy/success_rate"] == [(0, 0.25)]
    assert shown["test_greedy/pass_at/1"] == [(0, 0.25)]
    assert not any("errors" in tag or "per_task" in tag or "grad_norm" in tag for tag in shown)


def test_a_run_that_was_not_tracked_from_its_start_is_shown_from_its_start(tmp_path):
    track(tmp_path, EVAL, line(1, 0.1))
    track(tmp_path, line(2, 0.2), tensorboard=True)
    assert scalars(tmp_path)["train/success_rate"] == [(1, 0.1), (2, 0.2)]


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    got = []
    with Trackers(train.Config(tensorboard=True), tmp_path) as trackers:

        def broken(values, step):
            got.append(step)
            raise OSError("network\nis gone")

        trackers.senders["broken"] = broken
        for step in (1, 2):
            trackers.log("metrics.jsonl", [line(step, 0.5)])
        trackers.closers["closes badly"] = lambda failed: 1 / 0
    assert got == [1]
    said = capsys.readouterr().err
    assert said.count("broken failed and gets no more of this run: network is gone") == 1
    assert "closes badly failed" in said
    assert [step for step, _ in scalars(tmp_path)["train/success_rate"]] == [1, 2]


def test_a_tracker_that_can_not_even_start_costs_no_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    track(tmp_path, line(1, 0.5), tensorboard=True)
    assert "TensorBoard failed and gets no more of this run" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
