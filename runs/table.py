"""
The README's comparison: algorithms and horizons from one start, at one budget of sampled tokens.

    python runs/table.py                 # 6 settings x 3 seeds, two at a time, one thread each
    python runs/table.py --show          # only print the table of what has been run

Every run starts from the same cloned policy and stops once it has sampled `budget` tokens in training, so a
setting with short episodes makes more updates. Each final policy then plays every test task twice.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402

from compare import bootstrap  # noqa: E402

# Stages and interval for the grown horizon are set so that each stage gets about a third of the budget.
SETTINGS = {
    "GRPO, ScalingInter 4-8-12": "--algo grpo --stages 4 8 12 --interval {interval}",
    "GRPO, fixed 4": "--algo grpo --stages 4",
    "GRPO, fixed 12": "--algo grpo --stages 12",
    "RLOO, ScalingInter 4-8-12": "--algo rloo --stages 4 8 12 --interval {interval}",
    "REINFORCE++, ScalingInter 4-8-12": "--algo reinforce++ --stages 4 8 12 --interval {interval}",
    "PPO, ScalingInter 4-8-12": "--algo ppo --stages 4 8 12 --interval {interval}",
}


@dataclass(frozen=True)
class Config:
    """Every field is a flag: --seeds 0 1"""

    seeds: tuple[int, ...] = (0, 1, 2)
    start_seed: int = 0  # whose clone all runs start from
    budget: int = 300_000  # tokens sampled in training, a run
    interval: int = 11  # training steps a stage, for the grown horizon
    start: str = ""  # another policy than that clone
    limit: int = 0  # only so many test tasks; 0 for all
    parallel: int = 2  # runs at once, each with one thread
    show: bool = False  # run nothing


def folder(setting: str, seed: int) -> str:
    return "table-" + "".join(c if c.isalnum() else "-" for c in setting.lower()) + f"-seed{seed}"


def script(*words: str) -> str:
    """Run a script of ours on one thread, return what it printed; raises CalledProcessError with that shown."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    done.check_returncode()
    return done.stdout


def evaluation(name: str) -> dict | None:
    """The record of a finished evaluation, or None."""
    path = ROOT / "out" / name / "eval.jsonl"
    return json.loads(path.read_text().splitlines()[-1]) if path.exists() else None


def same_as_before(name: str, **flags) -> None:
    """SystemExit where out/<name> was made with other flags: a table must not mix them."""
    saved = json.loads((ROOT / "out" / name / "config.json").read_text())
    for flag, value in flags.items():
        if saved[flag] != value:
            raise SystemExit(
                f"out/{name} has {flag} {saved[flag]}, not {value}: move it away to run it again"
            )


def evaluate(model: str, seed: int, name: str, limit: int) -> None:
    """Two sampled episodes of every test task, once."""
    if evaluation(name) is not None:
        same_as_before(name, model=model, limit=limit)
    else:
        script(
            "evaluate.py", "--model", model, "--samples", "2", "--seed", str(seed), "--name", name,
            "--limit", str(limit),
        )  # fmt: skip


def run(setting: str, seed: int, start: str, config: Config) -> None:
    """Train one setting with one seed, and evaluate its last checkpoint."""
    name = folder(setting, seed)
    run_folder = ROOT / "out" / name
    flags = SETTINGS[setting].format(interval=config.interval).split()
    if (run_folder / "checkpoints").exists():
        same_as_before(name, model=start, budget_tokens=config.budget)
    else:  # a constant rate, since nobody knows the number of steps; half the usual one, which gets worse late
        script(
            "train.py", *flags, "--lr", "2e-4", "--model", start, "--seed", str(seed), "--name", name, "--eval-every", "0",
            "--steps", "1000", "--decay", "0", "--budget-tokens", str(config.budget), "--save-every", "1000",
        )  # fmt: skip
    (checkpoint,) = (run_folder / "checkpoints").glob("step_*")
    evaluate(str(checkpoint), seed, name + "-test", config.limit)
    print(
        f"{setting}, seed {seed}: success {evaluation(name + '-test')['success_rate']:.3f}",
        flush=True,
    )


def show(config: Config) -> None:
    """Print the table as Markdown; settings that have not been run are left out."""
    starts = [evaluation(f"table-start-seed{seed}") for seed in config.seeds]
    rates = lambda record: record["per_task"]  # noqa: E731

    def pooled(records: list[dict]) -> list[float]:
        # One value a task, the mean over seeds: tasks are what we draw from.
        return [
            sum(rates(r)[task] for r in records) / len(records)
            for task in sorted(rates(records[0]))
        ]

    def row(name: str, records: list[dict], extra: str) -> None:
        values = pooled(records)
        low, high = bootstrap(values)
        each = " ".join(f"{record['success_rate']:.3f}" for record in records)
        gains = [a - b for a, b in zip(values, pooled(starts), strict=True)]
        gain_low, gain_high = bootstrap(gains)
        gain = (
            f"{sum(gains) / len(gains):+.3f} [{gain_low:+.3f}, {gain_high:+.3f}]"
            if records is not starts
            else ""
        )
        print(
            f"| {name} | {sum(values) / len(values):.3f} [{low:.3f}, {high:.3f}] | {gain} | {each} | {extra} |"
        )

    print(
        "| setting | success on test | gain over the start | each seed | steps, minutes a run |\n|---|---|---|---|---|"
    )
    row("start (cloned)", starts, "")
    for setting in SETTINGS:
        records = [evaluation(folder(setting, seed) + "-test") for seed in config.seeds]
        if all(records):
            logs = [
                (ROOT / "out" / folder(setting, seed) / "metrics.jsonl").read_text().splitlines()
                for seed in config.seeds
            ]
            steps = [len(lines) for lines in logs]
            minutes = [
                sum(json.loads(line)["seconds_total"] for line in lines) / 60 for lines in logs
            ]
            row(
                setting,
                records,
                f"{sum(steps) / len(steps):.0f}, {sum(minutes) / len(minutes):.1f}",
            )


def main(config: Config) -> None:
    """Run what is missing, then print the table."""
    if not config.show:
        start = config.start
        if not start:  # made once, found again by every run
            said = script("sft.py", "--seed", str(config.start_seed))
            start = said.split("starting policy: ")[1].split()[0]
        with ThreadPoolExecutor(config.parallel) as pool:
            jobs = [
                pool.submit(evaluate, start, seed, f"table-start-seed{seed}", config.limit)
                for seed in config.seeds
            ]
            jobs += [
                pool.submit(run, setting, seed, start, config)
                for seed in config.seeds
                for setting in SETTINGS
            ]
            for job in jobs:
                job.result()
    show(config)


if __name__ == "__main__":
    main(tyro.cli(Config))
