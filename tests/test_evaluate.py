"""Success rates with intervals, checked on records small enough to count by hand."""

import json

import pytest

from agent import Trajectory, Turn
from evaluate import first, summarise, table
from report import draw, read_lines, smooth


def played(
    task: str, success: bool, end: str = "terminated", turns: int = 1, category: str = "easy"
) -> Trajectory:
    t = Trajectory("toy", task, end=end, success=success, category=category)
    t.turns = [Turn("", "", "", "", 0, 1) for _ in range(turns)]
    t.turns[-1].reward = 2.0 * success
    return t


def record() -> dict:
    """Two tasks: one solved in both samples, one in neither, and a third whose environment broke."""
    trajectories = [
        played("a", True, turns=2),
        played("a", True, turns=4),
        played("b", False, "max_turns", turns=6, category="hard"),
        played("b", False, "max_tokens", turns=8, category="hard"),
        played("c", False, "error"),
    ]
    return summarise(trajectories)


def test_a_record_counts_what_can_be_counted_by_hand():  # BEHAVIOURS 41, 42
    r = record()
    assert (r["tasks"], r["episodes"], r["errors"]) == (2, 4, 1)
    assert r["success_rate"] == 0.5  # c is in no average: its failure says nothing about the policy
    assert r["return_mean"] == 1.0  # rewards of 2: success and return are not the same number
    assert r["turns_mean"] == 5.0
    assert r["ends"] == {"terminated": 2, "max_turns": 1, "max_tokens": 1}
    assert r["by_category"] == {"toy/easy": 1.0, "toy/hard": 0.0}
    assert r["pass_at"] == {"1": 0.5, "2": 0.5}
    assert r["per_task"] == {"toy/a": 1.0, "toy/b": 0.0}
    assert "0.500" in table(r, "dev") and "1 errors" in table(r, "dev")


def test_tasks_weigh_the_same_however_many_of_their_samples_survived():
    r = summarise([played("a", True), played("a", True), played("a", True), played("b", False)])
    assert r["success_rate"] == 0.5  # a mean over episodes would say 0.75


def test_nothing_valid_is_said_and_not_divided_by():
    r = summarise([played("a", False, "error")])
    assert r == {"tasks": 0, "episodes": 0, "errors": 1}
    assert table(r, "dev") == "dev: no valid episode (1 errors)"


def test_a_limit_of_0_is_no_limit():
    assert first(["a", "b", "c"], 0) == ["a", "b", "c"] and first(["a", "b", "c"], 2) == ["a", "b"]


def test_a_curve_is_drawn_from_a_run_and_refused_without_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match="no training step"):
        draw(run, tmp_path / "curve.png")
    lines = [
        {"step": step, "success_rate": step / 10, "max_turns": 4 if step < 3 else 8}
        for step in range(1, 6)
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "succ'
    )
    assert (
        read_lines(run / "metrics.jsonl") == lines
    )  # the cut-off line of a killed run is no error
    (run / "eval.jsonl").write_text(
        json.dumps({"step": 0, "split": "test", "temperature": 1.0, **record()}) + "\n"
    )
    draw(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_mean_of_the_last_few():
    assert smooth([0.0, 1.0, 0.0, 1.0], 2) == [0.0, 0.5, 0.5, 0.5]
