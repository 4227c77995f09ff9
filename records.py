"""
What a run writes down: a line a training step, a line an episode, and both in words.

    trajectories, batch  ->  rollout_metrics  ->  metrics.jsonl
    an update's stats    ->  update_metrics   ->  metrics.jsonl
    a trajectory         ->  as_line          ->  trajectories.jsonl
    lines of these files ->  Trackers         ->  TensorBoard, Weights & Biases (where asked for)

The README's table says what each number means and what bad looks like. Part of train.py: read that first.
"""

import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tqdm import tqdm

from agent import Trajectory
from algorithms import combine_stats, dead_groups, explained_variance
from rollout import Batch

# --- a training step ---


def rollout_metrics(trajectories: list[Trajectory], batch: Batch) -> dict:
    """What a step's episodes looked like. Errors are counted and left out of all the rest."""
    valid = [t for t in trajectories if t.end != "error"]
    n = max(1, len(valid))
    repeated = sum(
        a == b
        for t in valid
        for turn in t.turns
        for a, b in _neighbours(t.ids[turn.start : turn.stop])
    )
    sampled = int(batch.loss_mask.sum())
    return {
        "return_mean": sum(t.episode_return for t in valid) / n,
        "success_rate": sum(t.success for t in valid) / n,
        "turns_mean": sum(len(t.turns) for t in valid) / n,
        "truncated_fraction": sum(t.end in ("max_turns", "max_tokens") for t in valid) / n,
        "format_error_fraction": sum(turn.format_error for t in valid for turn in t.turns)
        / max(1, sum(len(t.turns) for t in valid)),
        "invalid_fraction": sum(turn.invalid for t in valid for turn in t.turns)
        / max(1, sum(len(t.turns) for t in valid)),
        "error_fraction": 1 - len(valid) / len(trajectories),
        "errors": _counts(f"{t.env}/{t.task}" for t in trajectories if t.end == "error"),
        "success_by_env": {
            env: _mean([t.success for t in valid if t.env == env])
            for env in sorted({t.env for t in valid})
        },
        "dead_group_fraction": float(dead_groups(batch.returns, batch.group_ids).float().mean()),
        "empty_trajectories": sum(not any(t.loss_mask) for t in valid),
        "repeated_token_fraction": repeated / max(1, sampled),
        "env_steps": sum(turn.is_sent for t in valid for turn in t.turns),
        "sampled_tokens": sampled,
    }


def _neighbours(ids: list[int]):
    return zip(ids, ids[1:], strict=False)


def _mean(values: list) -> float:
    return sum(float(value) for value in values) / max(1, len(values))


def _counts(names) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def as_line(
    t: Trajectory, step: int | None, split: str, temperature: float, row: int | None = None, batch: Batch | None = None,
    is_scored: bool = False,
) -> dict:  # fmt: skip
    """One line of trajectories.jsonl; `row` of `batch` says where its tokens' numbers are, None leaves them out.

    step        of training; None for an evaluation that belongs to none
    is_scored   whether the trainer scored this row before the step's updates (else its old_logprobs are null)
    """
    line = {
        "step": step, "split": split, "env": t.env, "task": t.task, "category": t.category, "group": t.group,
        "sample": t.sample, "temperature": temperature, "weights_version": t.weights_version, "max_turns": t.max_turns, "end": t.end,
        "error": t.error, "success": t.success, "return": t.episode_return,
        "turns": [
            {"observation": turn.observation, "completion": turn.completion, "thought": turn.thought,
             "action": turn.action, "reward": turn.reward}
            for turn in t.turns
        ],
        "last_observation": t.observation,
    }  # fmt: skip
    if row is not None:
        n = len(t.ids)
        line["tokens"] = {
            "ids": t.ids,
            "loss_mask": t.loss_mask,
            "rollout_logprobs": t.logprobs,
            "old_logprobs": batch.old_logprobs[row, :n].tolist() if is_scored else None,
            "advantages": batch.advantages[row, :n].tolist(),
        }
    return line


def public(config) -> dict:
    """A run's flags, but for the token that its servers want to hear: folders and pages get passed on."""
    return {key: value for key, value in asdict(config).items() if key != "env_token"}


def append_lines(path: Path, lines: list[dict]) -> None:
    """Add JSON lines to a file, on disk before we go on: a resumed run takes back what is newer than its checkpoint."""
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def take_back(path: Path, step: int) -> None:
    """Drop the lines that the checkpoint of `step` does not know, and what a crash cut off.

    So do lines of a closing evaluation (on test, after step 0): it comes after the last checkpoint, and again.
    """
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines(keepends=True):
        line = json.loads(text) if text.endswith("\n") else {"step": step + 1}
        is_closing = line.get("split") == "test" and line["step"] > 0
        if line["step"] <= step and not is_closing:
            kept.append(text)
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def update_metrics(parts: list[dict], batch: Batch, rows: list[int], config) -> dict:
    """Statistics of a step's updates under the names of metrics.jsonl; None where there was no update."""
    names = (
        "entropy ref_kl approx_kl clip_fraction_low clip_fraction_high ratio_max value_clip_fraction "
        "mismatch_kl weight_clip_fraction logprob_diff_mean logprob_diff_max"
    ).split()
    stats = combine_stats(parts) if parts else {}
    metrics = {name: stats.get(name) for name in names}
    metrics["first_ratio_max"] = (
        parts[0]["ratio_max"] if parts else None
    )  # 1 where the first update is on-policy
    metrics["trained_tokens"] = config.epochs * int(batch.loss_mask[rows].sum())
    metrics["explained_variance"] = None
    if batch.old_values is not None:
        metrics["explained_variance"] = explained_variance(
            batch.value_targets, batch.old_values, batch.loss_mask
        )
    return metrics


def one_line(m: dict) -> str:
    """A training step for a person to read."""
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    speed = m["sampled_tokens"] / max(1e-9, m["seconds_total"])
    return (
        f"step {m['step']:3d}  horizon {m['max_turns']:2d}  success {m['success_rate']:.2f}  return {m['return_mean']:.2f}  "
        f"turns {m['turns_mean']:4.1f}  cut {m['truncated_fraction']:.0%}  dead {m['dead_group_fraction']:.0%}  "
        f"errors {m['error_fraction']:.0%}  entropy {number(m['entropy'], '.3f')}  kl {number(m['approx_kl'], '.4f')}  "
        f"grad {number(m['grad_norm'], '.2f')}  {speed:.0f} tokens/s  {m['seconds_total']:.1f} s"
    )


# --- watched from elsewhere ---


def check_trackers(tensorboard: bool, wandb: str) -> None:
    """raises ValueError, in one sentence, where a package is missing or nobody is logged in."""
    for flag, wanted, package in (
        ("--tensorboard", tensorboard, "tensorboard"),
        ("--wandb", wandb, "wandb"),
    ):
        # Without an origin it is a mere folder of that name, such as wandb makes where it is run.
        if wanted and getattr(find_spec(package), "origin", None) is None:
            raise ValueError(f"{flag} needs a package that is missing: pip install {package}")
    if wandb:
        import wandb as library

        is_online = library.setup().settings.mode == "online"
        if is_online and not library.login(prompt=False, verify=False):
            raise ValueError(
                "--wandb: nobody is logged in to Weights & Biases on this machine. Run `wandb login`, set "
                "WANDB_API_KEY, or set WANDB_MODE=offline to keep the run here (`wandb sync` sends it later)"
            )


class Trackers:
    """Lines of metrics.jsonl and eval.jsonl, sent on to TensorBoard and Weights & Biases where asked for.

    On resuming the files are sent from their start: what the run has taken back, or never got round to writing, is
    then right there too. One that fails (no network, a full disk) is dropped with a line, and the run goes on.

    with Trackers(config, folder) as trackers:
        trackers.log("metrics.jsonl", [{"step": 1, "success_rate": 0.5}])
    """

    def __init__(self, config, folder: Path):
        self.senders: dict[str, Callable] = {}  # by name: what takes (values, step)
        self.closers: dict[str, Callable] = {}  # by name: what takes whether the run has failed
        if config.tensorboard:
            self._try("TensorBoard", self._open_tensorboard, folder)
        if config.wandb:
            self._try("Weights & Biases", self._open_wandb, config, folder)
        history = [
            (line["step"], file, line)
            for file in ("metrics.jsonl", "eval.jsonl")
            if (folder / file).exists()
            for line in map(json.loads, (folder / file).read_text().splitlines())
        ]
        for _, file, line in sorted(history, key=lambda entry: entry[0]):
            self.log(file, [line])

    def log(self, file: str, lines: list[dict]) -> None:
        """Send on what was added to one of the run's files."""
        for line in lines if file in ("metrics.jsonl", "eval.jsonl") else ():
            kind = "train"
            if "split" in line:
                kind = f"{line['split']}_{'sampled' if line['temperature'] else 'greedy'}"
            for name, send in list(self.senders.items()):
                self._try(name, send, numbers(line, f"{kind}/"), line["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_) -> None:
        for name, close in self.closers.items():
            self._try(name, close, kind is not None)

    def _try(self, name: str, call: Callable, *args) -> None:
        try:
            call(*args)
        except Exception as error:  # whatever it is, it is not worth a run
            self.senders.pop(name, None)
            reason = " ".join(str(error).split())
            tqdm.write(f"{name} failed and gets no more of this run: {reason}", file=sys.stderr)

    def _open_tensorboard(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: whatever an earlier process has written of this run does not count.
        writer = SummaryWriter(folder / "tensorboard", purge_step=0)

        def send(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self.senders["TensorBoard"] = send
        self.closers["TensorBoard"] = lambda failed: writer.close()

    def _open_wandb(self, config, folder: Path) -> None:
        import wandb

        known = folder / "wandb-id.txt"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        run = wandb.init(
            project=config.wandb, name=folder.name, id=known.read_text(), resume="allow",
            dir=folder, config=public(config), settings=wandb.Settings(console="off"),
        )  # fmt: skip

        def send(values: dict[str, float], step: int) -> None:
            # Its steps can't be taken back: of those played again after a crash, the first version stays.
            if step >= run.step:
                run.log(values, step=step)

        self.senders["Weights & Biases"] = send
        self.closers["Weights & Biases"] = lambda failed: run.finish(exit_code=int(failed))


def numbers(line: dict, prefix: str = "") -> dict[str, float]:
    """A line's numbers by name, nested ones as outer/inner; texts, nulls, lists, and what has a name a task are not.

    >>> numbers({"step": 3, "grad_norm": None, "success_by_env": {"babyai": 0.5}}, "train/")
    {'train/success_by_env/babyai': 0.5}
    """
    found = {}
    for name, value in line.items():
        if name in ("step", "per_task", "errors"):
            continue
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found
