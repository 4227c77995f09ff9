"""
What a run wrote, read back: by report.py for its page, whatever a crash or an older version left in the files.

    out/<name>/metrics.jsonl, eval.jsonl, trajectories.jsonl  ->  gather  ->  data, trajectories as JSON

    stream        the objects of a JSON-lines file
    curves        metrics.jsonl as columns, and an interval for success
    evaluations   eval.jsonl, with gains
    trajectory    a line of trajectories.jsonl, and token_numbers its tokens
    gather        all of it

Part of report.py; records.py writes what is read here.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compare import bootstrap, gain

MOST_STEPS = 2000  # points of a curve: more than a screen has pixels
WINDOW = 5  # training steps that a smoothed value and its interval look back over


# --- reading ---


def stream(path: Path, notes: list[str], newest: int | None = None) -> Iterator[dict]:
    """The objects of a JSON-lines file, one by one. A line that holds none is left out, and noted.

    newest   look at no more than so many bytes at the file's end
    """
    if not path.exists():
        return
    bad = []
    with open(path, "rb") as file:
        skipped = max(0, path.stat().st_size - newest) if newest is not None else 0
        if skipped:
            file.seek(skipped - 1)
            file.readline()  # what is left of a line that began before
            notes.append(f"{path}: only the newest {newest / 1e6:g} MB, as the run was still going")
        for place, raw in enumerate(file, 1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                yield line
            elif raw.strip():
                place = f"{place} of these" if skipped else str(place)
                bad.append(place if raw.endswith(b"\n") else f"{place} (cut off)")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        notes.append(f"{path}: no JSON object in line {', '.join(bad[:5])}{more}: left out")


def read_lines(path: Path, notes: list[str] | None = None) -> list[dict]:
    """All objects of a JSON-lines file; [] where there is none yet. A last line cut off by a crash is left out."""
    return list(stream(path, [] if notes is None else notes))


def number(value: object) -> float | str | None:
    """A number for the page, to six digits. JSON has no NaN: such a value becomes its name; no number, None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def smooth(values: list[float | None], width: int = WINDOW) -> list[float | None]:
    """Mean over up to `width` values ending here: a training step's few tasks make a noisy rate. None is no value."""
    windows = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    known = [[value for value in window if value is not None] for window in windows]
    return [sum(window) / len(window) if window else None for window in known]


# --- numbers for the page ---


def encode(value: object) -> str:
    """JSON that may stand inside <script>: ASCII, without a character that HTML could read as its own."""
    plain = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def curves(metrics: list[dict], outcomes: dict[int, dict], notes: list[str]) -> dict:
    """Every number of metrics.jsonl as a column, and success smoothed, with an interval.

    outcomes   training step -> {task's group: [success of each episode]}

    The interval is a 95 % bootstrap over the tasks of the last WINDOW steps, episodes of a task staying
    together, as in evaluate.py: they share the task's difficulty.
    """
    steps = [m["step"] for m in metrics]
    names = {name: None for m in metrics for name in m if number(m[name]) is not None}
    columns = {name: [m.get(name) for m in metrics] for name in names}
    success = [number(m.get("success_rate")) for m in metrics]
    columns["success_smooth"] = smooth([None if isinstance(v, str) else v for v in success])
    every = 1 + max(0, len(steps) - 1) // MOST_STEPS
    if every > 1:
        notes.append(f"of {len(steps):,} training steps, curves show one in {every}")
    columns["success_low"], columns["success_high"] = [None] * len(steps), [None] * len(steps)
    for i in range(0, len(steps), every):
        window = steps[max(0, i + 1 - WINDOW) : i + 1]
        if all(step in outcomes for step in window):
            rates = [sum(g) / len(g) for step in window for g in outcomes[step].values()]
            low, high = bootstrap(rates, resamples=400)
            columns["success_low"][i], columns["success_high"][i] = low, high
    return {name: [number(v) for v in column[::every]] for name, column in columns.items()}


def evaluations(path: Path, run: int, notes: list[str]) -> list[dict]:
    """The records of an eval.jsonl for the page; train.py's last one of a kind with its gain over the first."""
    records = list(shaped(path, lambda record: evaluation(record, run), notes))
    kinds: dict[tuple, list[dict]] = {}
    for record in records:
        kind = (record["split"], record["temperature"], record["max_turns"])
        if record["step"] is not None:
            kinds.setdefault(kind, []).append(record)
    for same in kinds.values():
        if len(same) > 1 and same[0]["per_task"].keys() & same[-1]["per_task"].keys():
            same[-1]["gain"] = [number(value) for value in gain(same[0], same[-1])]
    return [{name: record[name] for name in record if name != "per_task"} for record in records]


def evaluation(record: dict, run: int) -> dict:
    """A line of eval.jsonl for the page.

    raises   TypeError, AttributeError, ... where something in it is of another kind than expected
    """
    numbers = "step temperature max_turns tasks episodes errors success_rate return_mean turns_mean"
    line = {name: number(record.get(name)) for name in numbers.split()}
    low, high = record.get("success_interval") or (None, None)
    line |= {"run": run, "split": text(record.get("split")), "model": text(record.get("model"))}
    line |= {"low": number(low), "high": number(high), "gain": None}
    for name in ("ends", "pass_at", "by_category"):
        line[name] = {key: number(value) for key, value in (record.get(name) or {}).items()}
    rates = record.get("per_task") or {}
    return line | {"per_task": {task: float(rate) for task, rate in rates.items()}}


def text(value: object) -> str:
    """What stands where a text should be, as one."""
    return "" if value is None else str(value)


def trajectory(line: dict, run: int) -> dict:
    """A line of trajectories.jsonl as the page wants it, without its tokens.

    raises  TypeError, AttributeError, ... where something in it is of another kind than expected
    """
    turns = []
    for turn in line.get("turns") or []:
        said = {name: text(turn.get(name)) for name in ("observation", "thought", "action")}
        said["reward"] = number(turn.get("reward"))
        completion = text(turn.get("completion"))
        if completion != f"Thought: {said['thought']}\nAction: {said['action']}":
            said["completion"] = completion  # else it is those two lines: no need to hold it twice
        turns.append(said)
    return {
        "run": run, "step": number(line.get("step")), "split": text(line.get("split")), "env": text(line.get("env")),
        "task": text(line.get("task")), "category": text(line.get("category")), "group": number(line.get("group")),
        "sample": number(line.get("sample")), "temperature": number(line.get("temperature")),
        "version": number(line.get("weights_version")),
        "max_turns": number(line.get("max_turns")), "end": text(line.get("end")), "error": text(line.get("error")),
        "success": bool(line.get("success")), "return": number(line.get("return")), "turns": turns,
        "last": text(line.get("last_observation")),
    }  # fmt: skip


def token_numbers(tokens: dict | None) -> dict | None:
    """A trajectory's `tokens` for the page. The difference is taken before rounding: it is often 1e-7."""
    if not tokens:
        return None
    names = ("ids", "loss_mask", "rollout_logprobs", "old_logprobs", "advantages")
    ids, mask, sampler, trainer, advantages = (tokens[name] for name in names)
    trainer = trainer or [None] * len(ids)  # that trajectory was not scored by the trainer
    rows = list(zip(ids, mask, sampler, trainer, advantages, strict=True))
    return {
        "ids": [int(row[0]) for row in rows],
        "mask": [int(row[1]) for row in rows],
        "sampler": [number(row[2]) for row in rows],
        "trainer": [number(row[3]) for row in rows],
        "difference": [None if row[3] is None else number(row[2] - row[3]) for row in rows],
        "advantage": [number(row[4]) for row in rows],
    }


def token_texts(folder: Path, ids: set[int]) -> dict[int, str]:
    """What each id stands for, by the tokenizer in the run's newest checkpoint; {} where there is none."""
    found = sorted(folder.glob("checkpoints/*/tokenizer.json"), key=lambda p: p.stat().st_mtime)
    if not found or not ids:
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(found[-1]))
    # Behind an "a", since some tokenizers drop the space that a text's first token begins with.
    before = tokenizer.encode("a", add_special_tokens=False).ids
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    return {i: decode([*before, i])[len(decode(before)) :] for i in sorted(ids)}


def gather(folders: list[Path], newest: int | None = None) -> tuple[dict, list[tuple]]:
    """Everything of some runs: the page's data without trajectories, and a list of those.

    newest    look at no more than so many bytes of trajectories.jsonl, at its end
    returns   data, [((run, split, step, turn limit), JSON of the trajectory, JSON of its tokens or "", the tokens' ids)]
    raises    ValueError where a folder holds nothing to show
    """
    notes: list[str] = []
    data = {
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "notes": notes,
        "runs": [],
        "evaluations": [],
    }
    items: list[tuple] = []
    names = [folder.resolve().name for folder in folders]
    for run, folder in enumerate(folders):
        metrics = read_lines(folder / "metrics.jsonl", notes)
        metrics = [m for m in metrics if isinstance(m.get("step"), int)]
        records = evaluations(folder / "eval.jsonl", run, notes)
        before, outcomes = len(items), {}
        shape = lambda line: (trajectory(line, run), token_numbers(line.get("tokens")))  # noqa: E731
        for t, tokens in shaped(folder / "trajectories.jsonl", shape, notes, newest):
            key = (run, t["split"], t["step"], t["max_turns"])
            detail = encode(tokens) if tokens else ""
            items.append((key, encode(t), detail, tokens["ids"] if tokens else []))
            if t["split"] == "train" and t["end"] != "error":
                group = (t["env"], t["task"], t["group"])
                outcomes.setdefault(t["step"], {}).setdefault(group, []).append(t["success"])
        lines = folder / "trajectories.jsonl"
        if newest is not None and outcomes and lines.stat().st_size > newest:
            del outcomes[min(outcomes)]  # the step that the window begins in may be half there
        if not metrics and not records and len(items) == before:
            raise ValueError(
                f"{folder} holds nothing to show: expected lines in its metrics.jsonl, eval.jsonl or "
                "trajectories.jsonl. Give the folder of a run of train.py or evaluate.py: out/<name>"
            )
        name = names[run] if names.count(names[run]) == 1 else str(folder)
        config = read_config(folder / "config.json", notes)
        columns = curves(metrics, outcomes, notes)
        data["runs"].append({"name": name, "config": config, "curves": columns})
        data["evaluations"] += records
    return data, items


def shaped(
    path: Path, shape: Callable[[dict], object], notes: list[str], newest: int | None = None
) -> Iterator:
    """`shape` of every object of a file; one that it can't read is left out, and noted."""
    strange = 0
    for line in stream(path, notes, newest):
        try:
            yield shape(line)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
            strange += 1
    if strange:
        notes.append(f"{path}: {strange} lines of another form than ours: left out")


def read_config(path: Path, notes: list[str]) -> dict[str, str]:
    """The run's flags as text, but for the token that its servers want to hear: pages get passed on."""
    try:
        config = dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError):
        notes.append(f"{path}: no JSON object: left out")
        config = {}
    return {name: json.dumps(value) for name, value in config.items() if name != "env_token"}
