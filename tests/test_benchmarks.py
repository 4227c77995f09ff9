"""
Benchmarks run, and say what they promise to say. Sizes are tiny: their numbers mean nothing here, but for memory.

(benchmarks/trl_step.py needs TRL, which is not among our requirements: run it by hand.)
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow  # each in a process of its own, seconds to import torch


def output_of(name: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rollout():
    sizes = "--trajectories 4 --turns 2 --new-tokens 4 --latency 0 --repeats 1"
    said = output_of("rollout", *sizes.split())
    assert re.search(r"^rollout .* engine alone [\d.]+ s", said, re.MULTILINE)
    assert re.search(r"^sampling .* generate \d+", said, re.MULTILINE)


def test_environments():
    sizes = "--tasks 3 --games 2 --seconds 0.1 --clients 1 2 --replicas 1 --episodes 2 --resets 10"
    said = output_of("environments", "--env", "textcraft", *sizes.split())
    assert "394 / 50 / 100" in said and "expert solved:               3 of 3" in said
    assert all(re.search(rf"HTTP, {n} clients, 1 servers +\d+", said) for n in (1, 2))
    assert "in 8 GiB fit about" in said and "memory after   10 resets" in said


def test_time_of_training():
    sizes = "--trajectories 8 --length 200 --repeats 1 --shares 0.2 1 --tokens 0"
    said = output_of("training", *sizes.split())
    assert re.findall(r"^ *(\d+)% trained, .* bare \d+ .* least \d+", said, re.MULTILINE) == [
        "20",
        "100",
    ]


def test_the_loss_takes_a_third_of_the_naive_versions_memory():
    """At the real vocabulary, with narrow hidden states: it is the logits that count."""
    sizes = "--trajectories 2 --length 100 --repeats 1 --shares 1 --tokens 2048 --hidden 16"
    said = output_of("training", *sizes.split())
    ours, naive = map(int, re.search(r"152000: (\d+) MiB, naive (\d+) MiB", said).groups())
    assert naive >= 3 * 2048 * 152_000 * 4 / 2**20  # logits, log-probabilities, and a gradient
    assert ours < naive / 3
