"""Two evaluations, compared task by task: numbers that can be worked out by hand, and what is refused."""

import json
from pathlib import Path

import pytest

import compare
import evaluate
from compare import bootstrap, gain, in_words


def record(rates: dict[str, float] | list[float], **fields) -> dict:
    """A line of eval.jsonl; a list of rates is that of tasks babyai/0, babyai/1, ..."""
    if isinstance(rates, list):
        rates = {f"babyai/{i}": rate for i, rate in enumerate(rates)}
    line = {"split": "test", "max_turns": 20, "temperature": 1.0, "errors": 0}
    return line | {"success_rate": sum(rates.values()) / len(rates), "per_task": rates} | fields


def write(folder: Path, *records: dict) -> Path:
    folder.mkdir()
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return folder


# --- numbers ---


def test_the_bootstrap_has_the_binomials_width():
    low, high = bootstrap([1.0] * 50 + [0.0] * 50)
    assert low == pytest.approx(0.402, abs=0.025) and high == pytest.approx(0.598, abs=0.025)
    assert bootstrap([0.3] * 20) == (pytest.approx(0.3), pytest.approx(0.3))
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])  # seeded


def test_a_gain_is_paired_by_task():
    before = {"per_task": {f"t{i}": i / 100 for i in range(100)}}
    after = {"per_task": {f"t{i}": i / 100 + 0.1 for i in range(100)}}
    # Every task gained 0.1: no interval at all. Unpaired, the spread of the tasks would drown it.
    assert gain(before, after) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
    del after["per_task"]["t0"]
    assert gain(before, after)[0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("won", "lost", "verdict"),
    [
        (10, 0, "significantly better"),  # draws: binomial of 100 and 0.1, 95 % of it in 5 to 16
        (0, 10, "significantly worse"),
        (3, 0, "no significant difference (the interval holds 0)"),  # none drawn: e^-3, over 2.5 %
        (5, 0, "no significant difference (only 5 tasks came out differently)"),  # 2 in 2^5
        (10, 8, "no significant difference (the interval holds 0)"),  # +0.02 and -0.06 to +0.10
        (0, 0, "no significant difference (the interval holds 0)"),
    ],
)
def test_what_is_significant_by_hand(won, lost, verdict):
    a = record([0.0] * won + [1.0] * lost + [0.5] * (100 - won - lost))
    b = record([1.0] * won + [0.0] * lost + [0.5] * (100 - won - lost))
    mean, low, high = gain(a, b)
    assert mean == pytest.approx((won - lost) / 100)
    if (won, lost) == (10, 0):
        assert low == pytest.approx(0.05, abs=0.0101) and high == pytest.approx(0.16, abs=0.0101)
    line = in_words("x", a, b)
    assert line.endswith(f"over 100 tasks: {verdict}")
    rates = f"{a['success_rate']:.3f} -> {b['success_rate']:.3f}"
    assert line.startswith(f"x: success {rates}, gain {(won - lost) / 100:+.3f} [")


# --- results on disk ---


def test_two_folders_are_compared_and_the_same_lines_say_so_after_training(tmp_path, capsys):
    a = write(tmp_path / "a", record([0.0] * 8))
    b = write(tmp_path / "b", record([1.0] * 8))
    evaluate.main(evaluate.Config(compare=(a, b / "eval.jsonl")))
    heading, line = capsys.readouterr().out.splitlines()
    assert heading == f"{a} -> {b / 'eval.jsonl'}"
    said = "success 0.000 -> 1.000, gain +1.000 [+1.000, +1.000] over 8 tasks: significantly better"
    assert line == f"babyai test, 20 turns, temperature 1: {said}"
    run = write(tmp_path / "run", record([0.0] * 8, step=0), record([1.0] * 8, step=9))
    assert compare.before_and_after(run) == f"test, sampled: {said}"


def test_records_of_the_same_kind_are_paired_and_the_last_one_counts(tmp_path):
    before, after = [record([rate] * 8) for rate in (0.25, 0.75)]
    wrong = record([0.0] * 8)
    a = write(
        tmp_path / "a",
        *({**before, "max_turns": turns, "temperature": t} for turns in (4, 8) for t in (0.0, 1.0)),
    )
    b = write(
        tmp_path / "b",
        {**wrong, "max_turns": 8},  # before training, in a run's folder
        {**wrong, "split": "dev", "max_turns": 8},
        {**after, "max_turns": 8},
        {**after, "max_turns": 8, "temperature": 0.0},
    )
    lines = compare.compare(a, b).splitlines()
    assert [line.partition(":")[0] for line in lines[1:3]] == [
        "babyai test, 8 turns, temperature 0",
        "babyai test, 8 turns, temperature 1",
    ]
    assert all("0.250 -> 0.750" in line for line in lines[1:3])
    assert "4 turns, temperature 0 and" in lines[3] and "babyai dev, 8 turns" in lines[4]


def test_greedy_and_sampled_can_be_compared_where_it_is_clear_which(tmp_path):
    a = write(tmp_path / "a", record([0.0] * 8, temperature=0.0))
    b = write(tmp_path / "b", record([1.0] * 8, temperature=0.7))
    assert "temperature 0 -> temperature 0.7: success" in compare.compare(a, b)
    c = write(tmp_path / "c", record([1.0] * 8, temperature=0.7), record([1.0] * 8))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare.compare(a, c)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (record([1.0] * 8, split="dev"), "test, 20 turns.*; .*babyai dev"),
        (record([1.0] * 8, max_turns=8), "20 turns.*; .*8 turns"),
        (record({f"textcraft/{i}": 1.0 for i in range(8)}), "babyai test.*; .*textcraft test"),
        (record([1.0] * 9), "b has 1 that .*a has not, 'babyai/8'.*--limit"),
        (record([1.0] * 7), "a has 1 that .*b has not, 'babyai/7'.*--limit"),
        ({"split": "test", "tasks": 0, "episodes": 0, "errors": 8}, "no evaluation with a valid"),
        ({"step": 3}, "no evaluation with a valid"),
    ],
)
def test_what_is_not_alike_is_refused(tmp_path, other, says):
    a, b = write(tmp_path / "a", record([0.0] * 8)), write(tmp_path / "b", other)
    with pytest.raises(ValueError, match=says) as refusal:
        compare.compare(a, b)
    assert "\n" not in str(refusal.value)


def test_a_task_whose_every_episode_failed_is_left_out_of_both(tmp_path):
    a = write(tmp_path / "a", record([0.0] * 8))
    b = write(tmp_path / "b", record([1.0] * 7, errors=1))
    assert "gain +1.000 [+1.000, +1.000] over 7 tasks" in compare.compare(a, b)


def test_no_result_is_refused_and_half_a_line_is_not_read(tmp_path):
    a = write(tmp_path / "a", record([0.0] * 8))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("not JSON\n")
    for nothing in ("missing", "empty", "text"):
        with pytest.raises(ValueError, match="expected a folder with eval.jsonl"):
            compare.compare(a, tmp_path / nothing)
    with open(a / "eval.jsonl", "a") as file:
        file.write('{"split": "te')
    assert "gain +0.000" in compare.compare(a, a)


def test_two_results_are_needed():
    with pytest.raises(ValueError, match="--compare takes two results, A and B, got 1"):
        evaluate.Config(compare=(Path("a"),))


def test_results_that_share_no_task_are_refused(tmp_path):
    a = write(tmp_path / "a", record({"babyai/1": 1.0}, errors=1))
    b = write(tmp_path / "b", record({"babyai/2": 1.0}, errors=1))
    with pytest.raises(ValueError, match="share none"):
        compare.compare(a, b)
