"""
What a step costs over HTTP, next to the same step in this process.

    one process, no HTTP  ->  HTTP with 1, 8, 32 clients  ->  a table

Every client is a thread with an episode of its own, as in rollout.py. All clients share one process
and its global lock; the server has a process of its own. Milliseconds of CPU are given for both,
because the wall clock also shows whatever else the machine is doing.

    python benchmarks/env_server.py --env babyai --seconds 2
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs
from env_server import EnvClient, EnvServers, RemoteEpisode


@dataclass(frozen=True)
class Config:
    """Measure steps per second, in-process and over HTTP."""

    env: str = "babyai"  # a file in envs/
    seconds: float = 2.0  # for each row
    clients: tuple[int, ...] = (1, 8, 32)  # threads


def play(reset: Callable, step: Callable, task: str, until: float) -> int:
    """Steps taken until then, by an agent that costs nothing itself."""
    turns, is_over = 0, True
    while time.monotonic() < until:
        if is_over:
            reset(task)
        _, _, terminated, truncated, _ = step("turn left" if turns % 2 else "move forward")
        turns, is_over = turns + 1, terminated or truncated
    return turns


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_http(servers: EnvServers, clients: int, seconds: float) -> str:
    """One row: all threads play at the same time, each an episode of its own."""
    client = EnvClient(servers.urls[0])
    task = client.tasks("train")[0]
    episodes = [RemoteEpisode(client) for _ in range(clients)]
    ours, theirs = psutil.Process(), psutil.Process(servers.pids[0])
    before = cpu_seconds(ours), cpu_seconds(theirs)
    turns, until = [], time.monotonic() + seconds
    threads = [
        threading.Thread(target=lambda e=e: turns.append(play(e.reset, e.step, task, until)))
        for e in episodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(turns)
    used = [
        1000 * (cpu_seconds(p) - b) / total for p, b in zip((ours, theirs), before, strict=True)
    ]
    for episode in episodes:
        episode.close()
    wait = 1000 * seconds * clients / total
    memory = theirs.memory_info().rss / 2**20
    return f"{total / seconds:9.0f} {wait:9.2f} {used[0]:12.2f} {used[1]:12.2f} {memory:10.0f}"


def main(config: Config) -> None:
    """Print the table."""
    print(f"{config.env:14}   steps/s  wait, ms   client CPU   server CPU  server MB")
    env = envs.make(config.env)
    task = env.tasks("train")[0]
    turns = play(
        lambda task: env.reset(options={"task": task}),
        env.step,
        task,
        time.monotonic() + config.seconds,
    )
    print(f"{'in-process':14} {turns / config.seconds:9.0f} {1000 * config.seconds / turns:9.2f}")
    with EnvServers(config.env) as servers:
        for clients in config.clients:
            row = measure_http(servers, clients, config.seconds)
            print(f"HTTP {clients:2} clients {row}")


if __name__ == "__main__":
    main(tyro.cli(Config))
