"""
Is B better than A: two evaluations of the same tasks, compared task by task.

    eval.jsonl of A, eval.jsonl of B  ->  records of the same kind, in pairs  ->  gain, interval, verdict

    bootstrap  95 % interval of a mean over tasks           Efron 1979, the percentile method
    gain       mean difference in success, paired by task, and its interval
    in_words   that gain as a line, and whether it is significant
    compare    two results on disk

Some tasks are hard for both and some easy for both. Taking the difference task by task cancels that out, and
what is left is much less noise than two success rates side by side have.

Part of evaluate.py: read that first. Run it:

    python evaluate.py --compare out/eval-001 out/eval-002
"""

import json
import random
from pathlib import Path

from curriculum import seed_for

# --- statistics ---


def bootstrap(values: list[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean: draw as many tasks with replacement, take the mean, again and again.

    values   one a task, already averaged over its samples
    returns  (low, high); a single task gives no interval but itself
    """
    rng = random.Random(seed_for(seed, "bootstrap"))
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


def gain(before: dict, after: dict, seed: int = 0) -> tuple[float, float, float]:
    """Mean gain in success between two records on the same tasks, and its 95 % interval.

    Paired: the difference is taken task by task, so that how hard the tasks are cancels out.
    """
    changes = differences(before, after)
    return sum(changes) / len(changes), *bootstrap(changes, seed)


def differences(before: dict, after: dict) -> list[float]:
    """after - before, for each task that both records have."""
    shared = before["per_task"].keys() & after["per_task"].keys()
    return [after["per_task"][task] - before["per_task"][task] for task in sorted(shared)]


# Five tasks that differ all point the same way in 2 of 2^5 = 32 coin tosses, more often than 1 in 20. The
# bootstrap can't see that: it takes the few for all there is.
FEWEST = 6


def in_words(title: str, before: dict, after: dict, seed: int = 0) -> str:
    """One line: both success rates, the gain with its interval, and whether that is significant.

    Significant means that the interval leaves 0 out, and that FEWEST tasks or more came out differently.
    """
    changes = differences(before, after)
    mean, low, high = gain(before, after, seed)
    changed = sum(change != 0 for change in changes)
    if low <= 0 <= high:
        verdict = "no significant difference (the interval holds 0)"
    elif changed < FEWEST:
        verdict = f"no significant difference (only {changed} tasks came out differently)"
    else:
        verdict = "significantly better" if mean > 0 else "significantly worse"
    return (
        f"{title}: success {before['success_rate']:.3f} -> {after['success_rate']:.3f}, "
        f"gain {mean:+.3f} [{low:+.3f}, {high:+.3f}] over {len(changes)} tasks: {verdict}"
    )


def before_and_after(run: Path) -> str:
    """A training run's first and last evaluation on test, at each temperature."""
    records = [record for record in read_records(run) if record["split"] == "test"]
    lines = []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        first, *_, last = [record for record in records if record["temperature"] == temperature]
        lines.append(in_words(f"test, {'sampled' if temperature else 'greedy'}", first, last))
    return "\n".join(lines)


# --- two results on disk ---


def compare(a: Path, b: Path, seed: int = 0) -> str:
    """A line for each record of A that has its like in B.

    a, b     a folder with eval.jsonl in it, of evaluate.py or of train.py, or such a file. Of records of the same
             kind the last one counts: for a run of train.py, the one after training
    raises   ValueError, in one sentence, where nothing can be compared, or the tasks are not the same
    """
    both = [{kind_of(record): record for record in read_records(path)} for path in (a, b)]
    pairs = in_pairs(*both)
    if not pairs:
        has = [" and ".join(map(kind_in_words, kinds)) for kinds in both]
        raise ValueError(
            f"nothing to compare: {a} has {has[0]}; {b} has {has[1]}. "
            "Split, environment and turn limit must be the same"
        )
    lines = [f"{a} -> {b}"]
    for left, right in pairs:
        before, after = both[0][left], both[1][right]
        check_tasks(before, after, a, b)
        title = kind_in_words(left)
        title += "" if left == right else f" -> temperature {right[3]:g}"
        lines.append(in_words(title, before, after, seed))
    paired = {kind for pair in pairs for kind in pair}
    for path, kinds in zip((a, b), both, strict=True):
        alone = [kind_in_words(kind) for kind in kinds if kind not in paired]
        lines += [f"only in {path}: {' and '.join(alone)}"] if alone else []
    return "\n".join(lines)


def read_records(path: Path) -> list[dict]:
    """The records of an evaluation that hold a result, oldest first; raises ValueError where there is none."""
    file = path / "eval.jsonl" if path.is_dir() else path
    try:
        lines = file.read_text().splitlines(keepends=True)
        # A run that was killed may have left half a line.
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [record for record in records if record.get("per_task")]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"no evaluation in {path} ({error}): expected a folder with eval.jsonl in it, or such a file"
        ) from None
    if not found:
        raise ValueError(f"{file} holds no evaluation with a valid episode: evaluate again")
    return found


def kind_of(record: dict) -> tuple:
    """What two records must share to be compared: (split, environments, turn limit, temperature)."""
    names = sorted({task.partition("/")[0] for task in record["per_task"]})
    return record["split"], " ".join(names), record["max_turns"], record["temperature"]


def kind_in_words(kind: tuple) -> str:
    split, env, max_turns, temperature = kind
    return f"{env} {split}, {max_turns} turns, temperature {temperature:g}"


def in_pairs(a: dict[tuple, dict], b: dict[tuple, dict]) -> list[tuple[tuple, tuple]]:
    """Kinds that belong together: the same ones, and single ones that differ in temperature alone.

    >>> greedy, warm = ("test", "babyai", 20, 0.0), ("test", "babyai", 20, 1.0)
    >>> in_pairs({greedy: {}, warm: {}}, {warm: {}})
    [(('test', 'babyai', 20, 1.0), ('test', 'babyai', 20, 1.0))]
    >>> in_pairs({greedy: {}}, {warm: {}})
    [(('test', 'babyai', 20, 0.0), ('test', 'babyai', 20, 1.0))]
    """
    pairs = [(kind, kind) for kind in a if kind in b]
    for kind in a:
        like = [other for other in b if other[:3] == kind[:3]]
        if kind not in b and len(like) == 1 == sum(other[:3] == kind[:3] for other in a):
            pairs.append((kind, like[0]))
    return pairs


def check_tasks(before: dict, after: dict, a: Path, b: Path) -> None:
    """raises ValueError unless both were evaluated on the same tasks.

    A task of which every episode failed is missing from its record; there are at most as many as errors.
    """
    for one, other, here, there in ((before, after, a, b), (after, before, b, a)):
        missing = sorted(one["per_task"].keys() - other["per_task"].keys())
        if len(missing) > other["errors"]:
            raise ValueError(
                f"not the same tasks: {here} has {len(missing)} that {there} has not, {missing[0]!r} for one. "
                "Evaluate both with the same --split, --options and --limit"
            )
    if not before["per_task"].keys() & after["per_task"].keys():
        raise ValueError(
            f"not the same tasks: {a} and {b} share none that was played without an error"
        )
