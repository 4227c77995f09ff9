"""
A run as a picture: success over training steps, the horizon's stages behind it.

    out/<name>/metrics.jsonl, eval.jsonl  ->  curve.png

Read evaluate.py first. Run it:

    python report.py out/train-001 --png curve.png
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Config:
    """Draw the learning curve of one run or of several."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # folders: out/train-001
    png: Path | None = None  # the picture; curve.png in the first run's folder if not given


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; [] where there is none yet. A last line cut off by a crash is left out."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Mean over up to `width` values ending here: a training step's few tasks make a noisy rate."""
    windows = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw(runs: Path | list[Path], png: Path) -> None:
    """Write the learning curve of one run, or of several in one picture.

    raises  ValueError where a folder holds no training step
    """
    import matplotlib

    matplotlib.use("Agg")  # no window: training machines have no screen
    import matplotlib.pyplot as plt

    runs = [runs] if isinstance(runs, Path) else runs
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        metrics = read_lines(run / "metrics.jsonl")
        if not metrics:
            raise ValueError(
                f"{run} holds no training step yet: expected lines in {run / 'metrics.jsonl'}"
            )
        steps = [m["step"] for m in metrics]
        success = [m["success_rate"] for m in metrics]
        (line,) = axis.plot(
            steps, smooth(success), label=f"{run.name}, training tasks (mean of 5 steps)"
        )
        axis.plot(steps, success, color=line.get_color(), alpha=0.25, linewidth=1)
        for record in read_lines(run / "eval.jsonl"):
            if record["temperature"] > 0 and record["episodes"]:
                low, high = record["success_interval"]
                rate = record["success_rate"]
                axis.errorbar(
                    record["step"], rate, [[max(0, rate - low)], [max(0, high - rate)]], capsize=3,
                    color=line.get_color(), marker="o" if record["split"] == "test" else "x",
                )  # fmt: skip
        if len(runs) == 1:
            _shade_horizons(axis, metrics)
    axis.set(xlabel="training step", ylabel="success rate", ylim=(0, 1))
    axis.legend(
        loc="lower right",
        title="o test, x dev, with 95 % intervals",
        fontsize="small",
        title_fontsize="small",
    )
    figure.savefig(png, dpi=120)
    plt.close(figure)


def _shade_horizons(axis, metrics: list[dict]) -> None:
    stages = list(dict.fromkeys(m["max_turns"] for m in metrics))
    for shade, stage in enumerate(stages):
        steps = [m["step"] for m in metrics if m["max_turns"] == stage]
        axis.axvspan(
            min(steps) - 0.5,
            max(steps) + 0.5,
            color="0.5",
            alpha=0.06 + 0.08 * (shade % 2),
            linewidth=0,
        )
        axis.text(min(steps), 0.98, f"{stage} turns", va="top", fontsize="small")


def main(config: Config) -> None:
    """Draw, and say where."""
    png = config.png or config.runs[0] / "curve.png"
    draw(list(config.runs), png)
    print(png)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except ValueError as error:
        sys.exit(f"report.py: {error}")
