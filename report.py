"""
A run as a page: curves, evaluations, and every trajectory down to its tokens, in one HTML file.

    out/<name>/metrics.jsonl, eval.jsonl, trajectories.jsonl  ->  gather, choose, write  ->  report.html
    the same, success alone                                   ->  draw                   ->  curve.png

    choose    which trajectories fit into --max-mb
    write     the page, made so that nothing of what it shows can run
    refresh   the same while a run goes on, for a small share of its time
    draw      the success curve as a picture

history.py reads the files; report.html, beside this script, is the page's own code. The page needs no
network and no server: a browser opens the file. Read evaluate.py first. Run it:

    python report.py out/train-001                     # writes out/train-001/report.html
    python report.py out/train-001 out/ppo12 out/eval-001 --html compare.html
    python report.py out/train-001 --png curve.png     # the success curve as a picture, too
"""

import base64
import hashlib
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from history import WINDOW, encode, gather, read_lines, smooth, token_texts

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class Config:
    """Write a run, or several to compare, as one HTML page."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]  # folders: out/train-001 out/eval-001
    html: Path | None = None  # the page; report.html (of several: compare.html) in the first folder
    png: Path | None = None  # draw the success curve here, too
    max_mb: float = 50.0  # the page's size; what does not fit is left out, and the page says what

    def __post_init__(self):
        if not self.runs:
            raise ValueError("expected a run's folder, got none: python report.py out/train-001")
        if not self.max_mb > 0:
            raise ValueError(f"--max-mb must be above 0, got {self.max_mb:g}")


# --- the page ---


def choose(items: list[tuple], room: int) -> tuple[list[int], set[int]]:
    """Which trajectories to show, and which of them with tokens, in `room` bytes: (their indices, a subset).

    All if they fit. Else four fifths of the room are for trajectories, and what is left is for tokens. First comes the
    first trajectory of every step of every split, then every second one, ...: no step loses more than another.
    """
    texts = [len(item[1]) + 3 for item in items]  # 3: a comma and two ends of lines
    tokens = [len(item[2]) for item in items]
    everything = range(len(items))
    if sum(texts) + sum(tokens) <= room:
        return list(everything), {i for i in everything if tokens[i]}
    seen: dict[tuple, int] = {}
    rank = []
    for key, *_ in items:
        rank.append(seen.get(key, 0))
        seen[key] = rank[-1] + 1
    in_turn = sorted(everything, key=lambda i: rank[i])
    shown, used = [], 0
    for i in in_turn:
        if used + texts[i] <= 0.8 * room:
            shown.append(i)
            used += texts[i]
    detailed = set()
    for i in shown:
        if tokens[i] and used + tokens[i] <= room:
            detailed.add(i)
            used += tokens[i]
    return sorted(shown), detailed


def write(folders: list[Path], html: Path, max_mb: float = 50.0, newest: int | None = None) -> None:
    """Write the page, whole or not at all.

    raises   ValueError where there is nothing to show, or no room for even the curves
    """
    data, items = gather(folders, newest)
    template = TEMPLATE.read_text(encoding="utf-8")
    # Only this very script may run, says the page's Content-Security-Policy: nothing that slipped in could.
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    texts = [
        token_texts(folder, {i for key, _, _, ids in items if key[0] == run for i in ids})
        for run, folder in enumerate(folders)
    ]
    for run, folder in enumerate(folders):
        if not texts[run] and any(key[0] == run and ids for key, _, _, ids in items):
            data["notes"].append(
                f"{folder}: no checkpoints/*/tokenizer.json, so tokens are shown as their ids"
            )
    data["texts"] = texts
    room = int(max_mb * 1e6) - len(template.encode()) - len(encode(data)) - 1000  # 1000: the notes
    if room < 0:
        raise ValueError(
            f"--max-mb {max_mb:g} is too small: without any trajectory the page has {max_mb - room / 1e6:.2f} MB"
        )
    shown, detailed = choose(items, room)
    if len(shown) < len(items):
        data["notes"].append(
            f"to stay within {max_mb:g} MB, {len(items) - len(shown):,} of {len(items):,} trajectories are left "
            "out: of every step the last ones"
        )
    with_tokens = sum(bool(items[i][2]) for i in shown)
    if len(detailed) < with_tokens:
        data["notes"].append(
            f"to stay within {max_mb:g} MB, the token detail of {with_tokens - len(detailed):,} of {with_tokens:,} "
            "trajectories is left out"
        )
    parts = {
        "HASH": digest,
        "DATA": encode(data),
        "TRAJECTORIES": "[" + ",\n".join(items[i][1] for i in shown) + "]",
        "TOKENS": "\n".join(items[i][2] if i in detailed else "" for i in shown),
    }
    page = re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], template)
    part = html.with_name(f".{html.name}.part{os.getpid()}")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(html)
    finally:
        part.unlink(missing_ok=True)


def refresh(
    run: Path, due: float = 0.0, newest: int | None = 8_000_000, share: float = 0.02
) -> float:
    """Rewrite a run's report.html while it trains, if it is time; returns when it is time again (time.monotonic).

    A page costs little (it holds the newest `newest` bytes of trajectories), and the next has to wait until it is at
    most `share` of the time. That it can't be written is said, and is no reason to end a run.
    """
    began = time.monotonic()
    if began < due:
        return due
    try:
        write([run], run / "report.html", newest=newest)
    except Exception as error:  # a full disk, a strange line: whatever it is, the run is worth more
        print(f"{run / 'report.html'} not written: {error!r}", file=sys.stderr)
    return began + (time.monotonic() - began) / share


# --- the picture ---


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
        metrics = [m for m in read_lines(run / "metrics.jsonl") if "step" in m]
        if not metrics:
            raise ValueError(
                f"{run} holds no training step yet: expected lines in {run / 'metrics.jsonl'}"
            )
        steps, success = [m["step"] for m in metrics], [m.get("success_rate") for m in metrics]
        label = f"{run.name}, training tasks (mean of {WINDOW} steps)"
        known = lambda values: [math.nan if value is None else value for value in values]  # noqa: E731
        (line,) = axis.plot(steps, known(smooth(success)), label=label)
        axis.plot(steps, known(success), color=line.get_color(), alpha=0.25, linewidth=1)
        for record in read_lines(run / "eval.jsonl"):
            if record.get("temperature", 1) > 0 and "step" in record and record.get("episodes"):
                low, high = record["success_interval"]
                rate = record["success_rate"]
                axis.errorbar(
                    record["step"], rate, [[max(0, rate - low)], [max(0, high - rate)]], capsize=3,
                    color=line.get_color(), marker="o" if record["split"] == "test" else "x",
                )  # fmt: skip
        if len(runs) == 1:
            _shade_horizons(axis, [m for m in metrics if "max_turns" in m])
    axis.set(xlabel="training step", ylabel="success rate", ylim=(0, 1))
    title = "o test, x dev, with 95 % intervals"
    axis.legend(loc="lower right", title=title, fontsize="small", title_fontsize="small")
    figure.savefig(png, dpi=120)
    plt.close(figure)


def _shade_horizons(axis, metrics: list[dict]) -> None:
    for shade, stage in enumerate(dict.fromkeys(m["max_turns"] for m in metrics)):
        steps = [m["step"] for m in metrics if m["max_turns"] == stage]
        alpha = 0.06 + 0.08 * (shade % 2)
        axis.axvspan(min(steps) - 0.5, max(steps) + 0.5, color="0.5", alpha=alpha, linewidth=0)
        axis.text(min(steps), 0.98, f"{stage} turns", va="top", fontsize="small")


def main(config: Config) -> None:
    """Write the page, draw the picture if wanted, and say where."""
    runs = list(config.runs)
    html = config.html or runs[0] / ("report.html" if len(runs) == 1 else "compare.html")
    write(runs, html, config.max_mb)
    print(html)
    if config.png:
        draw(runs, config.png)
        print(config.png)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        sys.exit(2)
