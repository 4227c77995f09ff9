"""
What to practise, and for how long: the horizon of a rollout and the tasks of a training step.

    training step  ->  max_turns, tasks  ->  rollout.py

    seed_for          one integer for each random choice of the whole program
    horizon           ScalingInter-RL (Xi et al. 2025, arXiv 2509.08755): turn limits on a timetable
    adaptive_horizon  turn limits that wait for progress: our baseline, not in the paper
    sample_tasks      epochs of shuffled tasks, cut into training steps

Nothing here remembers anything. Each answer is computed afresh from the training step (or from the
recorded successes), so a run that stops and resumes has no scheduler to restore or to get wrong.
The plain baseline, a fixed horizon, is a curriculum of one stage: `--stages 20`.

Read algorithms.py first, train.py next. Try it:

    python -c "from curriculum import horizon; print([horizon(s, (4, 8), 2) for s in range(1, 6)])"
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

Task = TypeVar("Task")  # a task id, or (environment, task id) where several environments are mixed


# --- seeds ---


def seed_for(*parts: int | str | tuple) -> int:
    """One stable seed for one random choice: it depends on the parts and on nothing else.

        seed_for(seed, "sampling", step, task, sample, turn)

    Every random choice in this program has a generator of its own, seeded from its name. One
    generator shared by all would let each draw depend on how many came before it: on which episode
    finished first, on the number of ranks, on whether the run was resumed. Name the purpose, or two
    choices with equal numbers draw equal "random" values. Python's `hash` won't do: it salts
    strings anew in each process.

    parts    integers, strings, tuples of them: their repr is the same in every process
    returns  0 <= seed < 2**63, which torch, numpy and random all accept
    """
    for part in parts:
        if not _is_plain(part):
            raise ValueError(
                f"seed_for takes integers, strings and tuples of them, "
                f"got {part!r} ({type(part).__name__}); convert it first, e.g. int(step)"
            )
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _is_plain(part: object) -> bool:
    # Exactly int and str: True and numpy's integers print unlike the numbers they equal, so the
    # same step would silently get another seed. Objects, whose repr is an address, are worse.
    if type(part) is tuple:
        return all(_is_plain(item) for item in part)
    return type(part) in (int, str)


# --- how many turns ---


def horizon(step: int, stages: Sequence[int], interval: int) -> int:
    """The turn limit of a training step, by timetable: ScalingInter-RL.

        h(step) = stages[ min( (step - 1) // interval, last ) ]

    With stages 10, 20, 30 and interval 100, steps 1-100 may take 10 turns, 101-200 take 20, and all
    later ones 30. Short episodes first: rollouts are cheap and credit is easy to assign; long ones
    once there is a policy worth exploring with. An episode that is cut is truncated, not failed.

    A pure function of `step`, on purpose. The paper writes the schedule as increments (every so
    often h grows by delta) and its released code keeps a counter, which is one step off in a
    resumed run: resuming at step 100 jumps over all but one step of the second stage.

    step      the training step, counted from 1
    stages    turn limits, strictly increasing; one stage is a fixed horizon
    interval  training steps per stage
    """
    _check_stages(stages)
    if interval < 1:
        raise ValueError(f"interval must be 1 training step or more, got {interval}")
    if step < 1:
        raise ValueError(f"training steps count from 1, got step {step}")
    return stages[min((step - 1) // interval, len(stages) - 1)]


def adaptive_horizon(history: Sequence[float], stages: Sequence[int], patience: int) -> int:
    """The turn limit of the next training step, by progress: it grows once success has stalled.

    Replays the run. A step either sets a new best success rate of its stage or it does not; after
    `patience` steps in a row that did not, the next stage begins with a clean slate, because
    success at 10 turns says nothing about what is good at 20. A stage's first step is always a
    best, so a stage lasts patience + 1 steps or more. "Better" has no tolerance: the rate of one
    batch is noisy, and records get rarer by themselves; what to tune is the patience.

    history   success rate of every training step so far, oldest first (metrics.jsonl has them);
              NaN, for a step that could not be measured, counts as no improvement
    stages    turn limits, strictly increasing
    patience  training steps without a new best before the limit grows
    """
    _check_stages(stages)
    if patience < 1:
        raise ValueError(f"patience must be 1 training step or more, got {patience}")
    nothing_yet = float("-inf")
    stage, best, num_stalled = 0, nothing_yet, 0
    for success_rate in history:
        if success_rate > best:
            best, num_stalled = success_rate, 0
        else:
            num_stalled += 1
        if num_stalled == patience:
            stage, best, num_stalled = min(stage + 1, len(stages) - 1), nothing_yet, 0
    return stages[stage]


def _check_stages(stages: Sequence[int]) -> None:
    is_increasing = all(shorter < longer for shorter, longer in itertools.pairwise(stages))
    if not stages or stages[0] < 1 or not is_increasing:
        raise ValueError(
            f"stages must be positive, strictly increasing turn limits such as 4 8 12, got {stages}"
        )


# --- which tasks ---


def sample_tasks(tasks: Sequence[Task], step: int, tasks_per_step: int, seed: int) -> list[Task]:
    """The tasks of one training step: step s takes entries (s-1) n ... s n - 1 of a stream.

    The stream is one shuffle of all tasks after another, an epoch each: no task comes a second time
    before every other came once. (Drawing with replacement misses about a third of the tasks in as
    many draws as there are tasks.) Epochs need not divide into steps, and nothing is dropped: where
    a step straddles two epochs, the tasks it already has move back within the new epoch. So a step
    repeats a task only if it must (n > len(tasks)), and an epoch still holds each task once.

        tasks a b c d e, n = 2, shuffles  d a e b c  and  c e a d b
        steps  d a,  e b,  c e,  c a,  d b         the third has c already, so e comes before it

    What moves depends on the epoch before, so the stream is replayed from its start: one shuffle an
    epoch, next to nothing beside a rollout, and no state to save.

    tasks           anything, in a fixed order. For several environments, concatenate (environment,
                    task) pairs: each environment's share is its number of tasks
    step            the training step, counted from 1
    tasks_per_step  n, the groups of a step
    seed            of the run
    returns         n tasks, in the order in which they are played
    """
    if not tasks:
        raise ValueError("expected one task or more to sample from, got none: is the split empty?")
    if step < 1:
        raise ValueError(f"training steps count from 1, got step {step}")
    if tasks_per_step < 1:
        raise ValueError(f"tasks_per_step must be 1 or more, got {tasks_per_step}")
    stream: list[int] = []  # positions in `tasks`, so that equal or unhashable tasks are no trouble
    epoch = 0
    while len(stream) < step * tasks_per_step:
        order = list(range(len(tasks)))
        random.Random(seed_for(seed, "tasks", epoch)).shuffle(order)
        num_begun = len(stream) % tasks_per_step  # drawn already for the step that straddles
        begun = set(stream[len(stream) - num_begun :])
        first = [index for index in order if index not in begun][: tasks_per_step - num_begun]
        is_first = set(first)
        stream += first + [index for index in order if index not in is_first]
        epoch += 1
    return [tasks[index] for index in stream[(step - 1) * tasks_per_step : step * tasks_per_step]]
