"""
What a web page costs: steps per second in process and over HTTP, where a step's time goes, and memory.

    one process, no HTTP  ->  HTTP with 1, 8, 32 clients and 1, 2 replicas  ->  a table

Every client is a thread with an episode of its own that walks round the bundled shop: a search, a click
on what was found, a click on the menu; so every step loads a page. Memory is what Chromium, Playwright's
driver and the server hold together (proportional set size: shared pages are counted once).

    python benchmarks/webarena.py --seconds 5
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs
from env_server import EnvClient, EnvServers, RemoteEpisode
from envs.webarena_parts import browser

TASK = "price/violet-hammer"
WALK = ("type [6] [violet] [1]", "click [8]", "click [1]")


@dataclass(frozen=True)
class Config:
    """Measure steps per second, time by part, and memory by episode."""

    seconds: float = 5.0  # for each row
    clients: tuple[int, ...] = (1, 8, 32)  # threads
    replicas: tuple[int, ...] = (1, 2)  # server processes
    episodes: tuple[int, ...] = (1, 8, 32)  # open at once while memory is read


def walk(step: Callable, until: float) -> int:
    """Steps taken until then, by an agent that costs nothing itself."""
    turns = 0
    while time.monotonic() < until:
        step(WALK[turns % len(WALK)])
        turns += 1
    return turns


def memory(pid: int) -> float:
    """MiB of a process and of all below it."""
    total, top = 0, psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 2**20


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


def measure_http(servers: EnvServers, clients: int, seconds: float) -> tuple[float, float]:
    """(steps per second of all, milliseconds a step for one)."""
    connections = [EnvClient(url, timeout=120.0) for url in servers.urls]
    episodes = [RemoteEpisode(connections[i % len(connections)]) for i in range(clients)]
    for episode in episodes:
        episode.reset(TASK)
    turns, until = [], time.monotonic() + seconds
    threads = [
        threading.Thread(target=lambda e=e: turns.append(walk(e.step, until))) for e in episodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for episode in episodes:
        episode.close()
    return sum(turns) / seconds, 1000 * seconds * clients / sum(turns)


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
    for replicas in config.replicas:
        with EnvServers("webarena", replicas=replicas) as servers:
            for clients in config.clients:
                rate, wait = measure_http(servers, clients, config.seconds)
                print(
                    f"{f'HTTP {clients:2} clients, {replicas} servers':24} {rate:7.1f} {wait:10.0f}"
                )
    with EnvServers("webarena") as servers:
        client, episodes = EnvClient(servers.urls[0], timeout=120.0), []
        for count in config.episodes:
            while len(episodes) < count:
                episodes.append(RemoteEpisode(client))
                episodes[-1].reset(TASK)
            total = memory(servers.pids[0])
            print(f"memory with {count:2} episodes: {total:6.0f} MiB")


if __name__ == "__main__":
    main(tyro.cli(Config))
