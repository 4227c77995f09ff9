"""
Where the time of a step in a real browser goes.

    a walk round the bundled shop  ->  milliseconds a step, by part

The walk is a search, a click on what was found, a click on the menu: every step loads a page. What HTTP
and many clients add, and memory, is in benchmarks/environments.py.

    python benchmarks/webarena.py --seconds 5
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs
from envs.webarena_parts import browser

TASK = "price/violet-hammer"
WALK = ("type [6] [violet] [1]", "click [8]", "click [1]")


@dataclass(frozen=True)
class Config:
    """Measure steps per second, and time by part."""

    seconds: float = 5.0  # for each


def walk(step: Callable, until: float) -> int:
    """Steps taken until then, by an agent that costs nothing itself."""
    turns = 0
    while time.monotonic() < until:
        step(WALK[turns % len(WALK)])
        turns += 1
    return turns


def measure_parts(env, seconds: float) -> dict[str, float]:
    """Milliseconds a step, by part: the same walk, with a clock around the tab's own methods."""
    spent: dict[str, float] = defaultdict(float)

    def clocked(name: str, function: Callable) -> Callable:
        async def timed(*args):
            began = time.perf_counter()
            try:
                return await function(*args)
            finally:
                spent[name] += time.perf_counter() - began

        return timed

    def clocked_elements(nodes: list) -> list:
        began = time.perf_counter()
        found = plain(nodes)
        spent["tree into text"] += time.perf_counter() - began
        return found

    plain, rest, look = browser.elements, browser.Tab.rest, browser.Tab.look
    browser.elements = clocked_elements
    browser.Tab.rest = clocked("until the page is at rest", rest)
    browser.Tab.look = clocked("reading the page", look)
    try:
        turns = walk(env.step, time.monotonic() + seconds)
    finally:
        browser.elements, browser.Tab.rest, browser.Tab.look = plain, rest, look
    spent["mouse, keys, Python"] = seconds - spent["until the page is at rest"]
    spent["mouse, keys, Python"] -= spent["reading the page"]
    spent["reading the page"] -= spent["tree into text"]
    return {name: 1000 * total / turns for name, total in spent.items()}


def main(config: Config) -> None:
    """Print the table."""
    env = envs.make("webarena")
    began = time.monotonic()
    env.reset(options={"task": TASK})
    print(f"first reset, Chromium's start included: {time.monotonic() - began:.2f} s")
    began = time.monotonic()
    for _ in range(5):
        env.reset(options={"task": TASK})
    print(f"reset: {1000 * (time.monotonic() - began) / 5:.0f} ms")
    turns = walk(env.step, time.monotonic() + config.seconds)
    print(f"\n{'':24} steps/s  ms a step")
    print(f"{'in process':24} {turns / config.seconds:7.1f} {1000 * config.seconds / turns:10.0f}")
    env.reset(options={"task": TASK})
    parts = measure_parts(env, config.seconds)
    for name, spent in parts.items():
        print(f"  {name:30} {spent:10.1f}")
    env.close()


if __name__ == "__main__":
    main(tyro.cli(Config))
