"""Horizons and task order depend on the training step alone: no state, so nothing to resume."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curriculum import adaptive_horizon, horizon, sample_tasks, seed_for

NAN = float("nan")


# --- horizon ---


def test_the_horizon_follows_its_timetable_and_the_last_stage_stays():
    turns = [
        horizon(step, (10, 20, 30), 100) for step in (1, 2, 100, 101, 200, 201, 300, 301, 9999)
    ]
    assert turns == [10, 10, 10, 20, 20, 30, 30, 30, 30]


def test_an_interval_of_one_step_changes_stage_every_step():
    assert [horizon(step, (4, 8, 12), 1) for step in (1, 2, 3, 4)] == [4, 8, 12, 12]


def test_a_fixed_horizon_is_a_curriculum_of_one_stage():
    assert {horizon(step, [20], 7) for step in range(1, 100)} == {20}


def test_resuming_at_any_step_gives_the_schedule_of_a_run_that_never_stopped():  # BEHAVIOURS 53
    schedule = [10] * 3 + [20] * 3 + [30] * 4
    for resumed_at in range(1, 11):  # a resumed process knows the step it resumes at, and no more
        rest = [horizon(step, (10, 20, 30), 3) for step in range(resumed_at, 11)]
        assert rest == schedule[resumed_at - 1 :]


def test_a_scheduler_with_a_counter_gets_it_wrong():  # BEHAVIOURS 53
    """The control: AgentGym-RL restores its counter to the saved step, one behind what it plays."""
    stage, counter, num_wrong = 100 // 100, 100, 0  # as restored from a checkpoint of step 100
    for step in range(101, 301):
        num_wrong += (10, 20, 30)[stage] != horizon(step, (10, 20, 30), 100)
        stage = min(stage + (counter % 100 == 0), 2)
        counter += 1
    assert num_wrong == 99  # steps 102-200 play 30 turns instead of 20


@pytest.mark.parametrize(
    ("step", "stages", "interval", "message"),
    [
        (1, (), 5, "stages"),
        (1, (0, 5), 5, "stages"),
        (1, (-4,), 5, "stages"),
        (1, (8, 8), 5, "increasing"),
        (1, (8, 4), 5, "increasing"),
        (1, (4, 8), 0, "interval must be 1 .* got 0"),
        (0, (4, 8), 5, "count from 1, got step 0"),
    ],
)
def test_an_impossible_schedule_is_refused_with_what_came(step, stages, interval, message):
    with pytest.raises(ValueError, match=message):
        horizon(step, stages, interval)


# --- adaptive horizon ---


def test_the_adaptive_horizon_grows_when_success_has_stalled_for_patience_steps():
    rates = [0.1, 0.2, 0.2, 0.15, 0.3, 0.5, 0.4]
    #        best best stall stall | best best stall          patience 2
    turns = [adaptive_horizon(rates[:done], (4, 8, 12), 2) for done in range(len(rates) + 1)]
    assert turns == [4, 4, 4, 4, 8, 8, 8, 8]


def test_a_new_stage_starts_with_a_clean_slate():
    # 0.9 at 4 turns, 0.1 at 8: that is a first measurement, not a second stall
    assert adaptive_horizon([0.9, 0.9, 0.1], (4, 8, 12), 1) == 8
    assert adaptive_horizon([0.9, 0.9, 0.1, 0.1], (4, 8, 12), 1) == 12


def test_the_adaptive_horizon_stays_at_its_last_stage():
    assert adaptive_horizon([0.5] * 1000, (4, 8), 3) == 8


def test_a_stage_of_the_adaptive_horizon_lasts_patience_and_one_steps_at_least():
    assert [adaptive_horizon([0.0] * done, (4, 8), 3) for done in range(6)] == [4, 4, 4, 4, 8, 8]


def test_steps_without_a_measurement_count_as_no_progress_and_poison_nothing():
    assert adaptive_horizon([NAN, 0.1, 0.2, 0.3], (4, 8), 2) == 4
    assert adaptive_horizon([NAN, NAN], (4, 8), 2) == 8


def test_a_resumed_adaptive_run_that_has_its_history_has_its_horizon():  # BEHAVIOURS 53
    draw = random.Random(0)
    history = [draw.random() for _ in range(60)]
    seen = [adaptive_horizon(history[:done], (4, 8, 12, 16), 4) for done in range(61)]
    assert seen == sorted(seen) and seen[0] == 4 and seen[-1] == 16  # never shrinks, and does grow


def test_adaptive_horizon_checks_its_arguments():
    with pytest.raises(ValueError, match="patience must be 1 .* got 0"):
        adaptive_horizon([], (4, 8), 0)
    with pytest.raises(ValueError, match="increasing"):
        adaptive_horizon([], (8, 4), 2)


# --- tasks ---


def stream(tasks, num_steps: int, tasks_per_step: int, seed: int = 0) -> list:
    return [
        task
        for step in range(1, num_steps + 1)
        for task in sample_tasks(tasks, step, tasks_per_step, seed)
    ]


@given(
    num_tasks=st.integers(1, 12), tasks_per_step=st.integers(1, 30), seed=st.integers(-5, 10**12)
)
def test_every_task_comes_once_per_epoch_and_never_twice_in_a_step_that_has_room(
    num_tasks, tasks_per_step, seed
):
    tasks = [f"task-{i}" for i in range(num_tasks)]
    drawn = stream(tasks, 9, tasks_per_step, seed)
    assert len(drawn) == 9 * tasks_per_step
    for start in range(0, len(drawn) - num_tasks + 1, num_tasks):  # whole epochs, straddled or not
        assert sorted(drawn[start : start + num_tasks]) == sorted(tasks)
    at_most = -(-tasks_per_step // num_tasks)  # copies that can't be avoided, rounded up
    for start in range(0, len(drawn), tasks_per_step):
        copies = Counter(drawn[start : start + tasks_per_step])
        assert max(copies.values()) <= at_most + (tasks_per_step > num_tasks)


def test_cutting_shuffled_epochs_without_care_would_repeat_a_task_within_a_step():
    """The control: plain concatenation of shuffles, same seeds, has such a step; ours has none."""

    def careless(num_steps: int) -> list[str]:
        draws = []
        for epoch in range(num_steps):
            order = list("abcde")
            random.Random(seed_for(0, "tasks", epoch)).shuffle(order)
            draws += order
        return draws

    def has_repeat(draws: list[str]) -> bool:
        return any(len(set(draws[i : i + 3])) < 3 for i in range(0, 150, 3))

    assert has_repeat(careless(30)) and not has_repeat(stream("abcde", 50, 3))


def test_tasks_of_a_step_need_nothing_but_the_step():  # BEHAVIOURS 51
    tasks = [f"task-{i}" for i in range(7)]
    in_order = [sample_tasks(tasks, step, 3, 5) for step in range(1, 20)]
    backwards = [sample_tasks(tasks, step, 3, 5) for step in range(19, 0, -1)]
    assert in_order == backwards[::-1]


def test_epochs_differ_and_seeds_differ():
    tasks = list(range(20))
    first, second = sample_tasks(tasks, 1, 20, 0), sample_tasks(tasks, 2, 20, 0)
    assert first != second and first != tasks and sample_tasks(tasks, 1, 20, 1) != first


def test_sampling_leaves_the_task_list_and_the_global_generators_alone():
    tasks = ["b", "a", "c"]
    random.seed(0), torch.manual_seed(0)
    expected = random.random(), torch.rand(1).item()
    random.seed(0), torch.manual_seed(0)
    sample_tasks(tasks, 4, 2, 0)
    assert tasks == ["b", "a", "c"] and (random.random(), torch.rand(1).item()) == expected


def test_several_environments_are_mixed_by_their_number_of_tasks():
    tasks = [("textcraft", str(i)) for i in range(6)] + [("babyai", str(i)) for i in range(2)]
    drawn = stream(tasks, 8, 3)  # 24 draws: three epochs of eight
    assert Counter(env for env, _ in drawn) == {"textcraft": 18, "babyai": 6}


def test_equal_and_unhashable_tasks_are_no_trouble():
    assert sorted(stream(["x", "x", "y"], 2, 3)) == ["x", "x", "x", "x", "y", "y"]
    assert sorted(stream([[1], [2]], 2, 1)) == [[1], [2]]


def test_sample_tasks_checks_its_arguments():
    with pytest.raises(ValueError, match="got none"):
        sample_tasks([], 1, 1, 0)
    with pytest.raises(ValueError, match="count from 1, got step 0"):
        sample_tasks(["a"], 0, 1, 0)
    with pytest.raises(ValueError, match="tasks_per_step must be 1 or more, got 0"):
        sample_tasks(["a"], 1, 0, 0)


# --- seeds ---


def test_a_seed_is_the_same_on_every_machine_and_for_ever():
    # A change of this number would silently change every run: published results depend on it.
    assert seed_for(0, "sampling", 1, "task", 0, 0) == 7848560276566572554


def test_a_seed_survives_pythons_salted_hashes():  # BEHAVIOURS 51
    code = (
        "from curriculum import sample_tasks, seed_for; "
        "print(seed_for(1, 'x', ('env', 'task')), sample_tasks('abcdef', 2, 4, 3))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": salt},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1 and outputs.pop()


def test_each_part_its_order_and_its_type_make_another_seed():
    seeds = [
        seed_for(0),
        seed_for(1),
        seed_for("0"),
        seed_for(0, 0),
        seed_for((0, 0)),
        seed_for(0, "a", 1),
        seed_for(0, 1, "a"),
        seed_for(0, "a,1"),
        seed_for("0", "a", 1),
    ]
    assert len(set(seeds)) == len(seeds)


@given(st.lists(st.integers() | st.text()))
def test_a_seed_fits_every_generator(parts):
    seed = seed_for(*parts)
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("part", [1.0, True, None, [1], torch.tensor(1), object(), (1, 2.0)])
def test_parts_whose_print_is_not_their_identity_are_refused(part):
    with pytest.raises(ValueError, match="integers, strings and tuples"):
        seed_for(0, part)
