"""
Each environment in numbers: its tasks, its expert, what a step costs and what an episode weighs.

    tasks(split), category()      ->  how many of each
    the expert on a sample        ->  solved, turns, tokens of an observation
    the same games, played again  ->  milliseconds a step: in this process, over HTTP
    1, 8, 32 clients; 1, 2 servers->  steps per second, and who spends the CPU
    open episodes, many resets    ->  memory of the server, with all the processes below it

Games are the expert's, recorded first, so that whoever plays them costs nothing. Each client is a
thread with an episode of its own, as in rollout.py. Run it on a machine that does nothing else:

    python benchmarks/environments.py --env textcraft babyai
"""

import itertools
import math
import os
import random
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

import envs
import model as weights
from env_server import EnvClient, EnvServers, RemoteEpisode

SPLITS = ("train", "dev", "test")
Game = tuple[str, list[str]]  # a task, and the actions that solve it


@dataclass(frozen=True)
class Config:
    """Measure every environment, or some."""

    env: tuple[str, ...] = tuple(envs.NAMES)  # files in envs/
    tasks: int = 100  # on which the expert is tried, from all splits
    patience: float = 60.0  # seconds after which it is tried on no more of them
    games: int = 12  # of its games are played again for the clocks; short ones
    seconds: float = 5.0  # for each rate
    warm: float = 1.0  # and before it, uncounted; a JVM's compiler wants ten or more
    clients: tuple[int, ...] = (1, 8, 32)  # threads
    replicas: tuple[int, ...] = (1, 2)  # server processes
    episodes: int = 32  # open at once while memory is read
    resets: int = 1000  # one after another, while memory is watched; 0 for none


def try_expert(name: str, config: Config, tokenizer) -> list[Game]:
    """Print what there is to solve and how the expert does; returns its shortest games."""
    env = envs.make(name)
    tasks = {split: env.tasks(split) for split in SPLITS}
    everything = [task for split in SPLITS for task in tasks[split]]
    categories = {env.category(task) for task in everything}
    chosen = random.Random(0).sample(everything, min(config.tasks, len(everything)))
    games, failed, texts, began = [], [], [], time.monotonic()
    for task in chosen:
        if time.monotonic() - began > config.patience:
            break
        texts.append(env.reset(options={"task": task}, seed=0)[0])
        actions, success = [], False
        for _, action in itertools.islice(env.expert(), 400):
            text, _, terminated, truncated, info = env.step(action)
            actions, success = [*actions, action], info["success"]
            texts.append(text)
            if terminated or truncated:
                break
        games.append((task, actions)) if success else failed.append(task)
    env.close()
    tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    print(f"\n== {name}")
    print("tasks, train / dev / test:   " + " / ".join(str(len(tasks[s])) for s in SPLITS))
    print(f"categories:                  {len(categories)}")
    print(f"expert solved:               {len(games)} of {len(games) + len(failed)}", *failed)
    turns = statistics.mean(len(actions) for _, actions in games)
    print(f"expert's turns, mean:        {turns:.1f}")
    print(
        f"tokens of an observation:    {statistics.mean(tokens):.0f} (mean), {max(tokens)} (most)"
    )
    return sorted(games, key=lambda game: len(game[1]))[: config.games]


class InProcess:
    """The environment without a server, called like a RemoteEpisode."""

    def __init__(self, name: str):
        self.env = envs.make(name)
        self.step, self.close = self.env.step, self.env.close

    def reset(self, task: str) -> None:
        self.env.reset(options={"task": task})


def replay(episode, games: list[Game], until: float, first: int = 0) -> tuple[list, list]:
    """Games one after another, from the `first` on, until then: seconds of each step, of each reset."""
    steps, resets = [], []
    for task, actions in itertools.islice(itertools.cycle(games), first, None):
        began = time.perf_counter()
        episode.reset(task)
        resets.append(time.perf_counter() - began)
        for action in actions:
            if time.monotonic() > until:
                return steps, resets
            began = time.perf_counter()
            episode.step(action)
            steps.append(time.perf_counter() - began)


def tree(pids: list[int]) -> list[psutil.Process]:
    """These processes and all below them: a server's JVM, its browser and the browser's tabs."""
    tops = [psutil.Process(pid) for pid in pids]
    return [p for top in tops for p in (top, *top.children(recursive=True))]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory(servers: EnvServers) -> float:
    """MiB of a server and of all below it; what processes share is counted once."""
    total = 0
    for process in tree(servers.pids):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 2**20


def measure(episodes: list, games: list[Game], seconds: float) -> tuple[float, float, float]:
    """All play at once: steps per second in all, median milliseconds of a step, and of a reset."""
    results, until = [], time.monotonic() + seconds

    def play(i: int) -> None:
        results.append(replay(episodes[i], games, until, first=i))

    threads = [threading.Thread(target=play, args=(i,)) for i in range(len(episodes))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.monotonic() - began
    steps, resets = ([t for result in results for t in result[i]] for i in (0, 1))
    # Where a JVM's start took all the time there is no step to look at.
    middles = (1000 * statistics.median(times or [math.nan]) for times in (steps, resets))
    return len(steps) / spent, *middles


def measure_steps(name: str, games: list[Game], config: Config) -> None:
    """Rates and waits, in this process and over HTTP, and the CPU of both sides a step."""
    print(f"{'':28} steps/s   ms a step  ms a reset   client CPU   server CPU")
    episode = InProcess(name)
    measure([episode], games, config.warm)
    rate, step, reset = measure([episode], games, config.seconds)
    episode.close()
    print(f"{'in process':26} {rate:9.0f} {step:11.2f} {reset:11.2f}")
    for replicas, clients in itertools.product(config.replicas, config.clients):
        with EnvServers(name, replicas=replicas) as servers:
            connections = [EnvClient(url, timeout=120.0) for url in servers.urls]
            remote = [RemoteEpisode(connections[i % replicas]) for i in range(clients)]
            measure(remote, games, config.warm)
            sides = [psutil.Process()], tree(servers.pids)
            before, began = [cpu_seconds(side) for side in sides], time.monotonic()
            rate, step, reset = measure(remote, games, config.seconds)
            total = rate * (time.monotonic() - began)
            used = [
                1000 * (cpu_seconds(side) - b) / total
                for side, b in zip(sides, before, strict=True)
            ]
            for episode in remote:
                episode.close()
        label = f"HTTP, {clients} clients, {replicas} servers"
        print(f"{label:26} {rate:9.0f} {step:11.2f} {reset:11.2f} {used[0]:12.2f} {used[1]:12.2f}")


def measure_memory(name: str, games: list[Game], config: Config) -> None:
    """What an open episode adds to a server that has warmed up, and what a thousand resets leave behind."""
    with EnvServers(name, capacity=config.episodes + 1) as servers:
        client = EnvClient(servers.urls[0], timeout=120.0)
        one = RemoteEpisode(client)
        replay(one, games, time.monotonic() + 2.0)
        before, held = memory(servers), []
        for i in range(config.episodes):
            held.append(RemoteEpisode(client))
            task, actions = games[i % len(games)]
            held[-1].reset(task)
            for action in actions[: len(actions) // 2]:
                held[-1].step(action)
        each = (memory(servers) - before) / config.episodes
        fit = (8 * 1024 - before) / max(each, 0.001)
        print(
            f"memory: {before:.0f} MiB for the server, {each:.2f} MiB an open episode "
            f"(of {config.episodes}); in 8 GiB fit about {fit:,.0f}"
        )
        for episode in held:
            episode.close()
        tasks = client.tasks("train")
        for count in range(config.resets + 1):
            if count in (0, config.resets // 10, config.resets // 2, config.resets):
                print(f"memory after {count:4} resets: {memory(servers):.0f} MiB", flush=True)
            one.reset(tasks[count % len(tasks)])
            one.step("")


def main(config: Config) -> None:
    """A paragraph for each environment."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**weights.smollm2_file())
    for name in config.env:
        games = try_expert(name, config, tokenizer)
        measure_steps(name, games, config)
        measure_memory(name, games, config)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(tyro.cli(Config))
