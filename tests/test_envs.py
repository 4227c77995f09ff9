"""
The contract of an environment, held against every file in envs/, future ones included.

Every test takes `name`, one of envs.NAMES, and what it asks is what DESIGN promises to the server,
the agent and the trainer. A new environment is done when this file passes without a change to it.
"""

import concurrent.futures
import doctest
import gc
import importlib
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envs

REPO = Path(__file__).parent.parent
SPLITS = ("train", "dev", "test")
HORIZONS = {"textcraft": 30, "babyai": 20, "sciworld": 30, "searchqa": 10, "webarena": 15}
PATIENCE = 400  # turns after which an expert is lost; the longest known solution takes 322
SECONDS = 1.5  # a test that samples goes on for this long at most, once it has seen two tasks
GAMES: dict[
    str, tuple
] = {}  # of test_mangled_actions: (environment, its words, whether it is slow)
# Bytes that may come and go: Playwright holds on to the last message, which may be a page's tree.
SLACK = {"webarena": 400_000}

pytestmark = pytest.mark.parametrize("name", envs.NAMES)


def sample_tasks(env: gym.Env, count: int, purpose: str) -> list[str]:
    """Some tasks of every split, the same ones on every run of a test, others in another test."""
    tasks = [task for split in SPLITS for task in env.tasks(split)]
    return random.Random(purpose).sample(tasks, min(count, len(tasks)))


def in_time(tasks: list[str]):
    """As many of the tasks as fit in SECONDS, two at least: simulators differ a thousandfold."""
    start = time.monotonic()
    for index, task in enumerate(tasks):
        if index >= 2 and time.monotonic() - start > SECONDS:
            return
        yield task


def play(env: gym.Env, task: str):
    """The expert's game, yielded turn by turn, so that others may be played in between."""
    yield env.reset(options={"task": task}, seed=0)
    for thought, action in itertools.islice(env.expert(), PATIENCE):
        result = env.step(action)
        yield thought, action, *result
        if result[2] or result[3]:
            return


# --- tasks ---


def test_splits_are_disjoint_and_fixed(name):
    env = envs.make(name)
    tasks = {split: env.tasks(split) for split in SPLITS}
    everything = [task for split in SPLITS for task in tasks[split]]
    assert all(tasks.values()), "a split is empty"
    shared = [task for task, count in Counter(everything).items() if count > 1]
    assert not shared, f"in two splits, or twice in one: {shared[:5]}"
    assert all(isinstance(task, str) and task.strip() and task.isprintable() for task in everything)
    env.tasks("train").clear()  # what is handed out is the caller's own
    assert {split: envs.make(name).tasks(split) for split in SPLITS} == tasks


def test_an_unknown_split_is_named(name):
    for split in ("validation", "", None, 0):
        with pytest.raises(ValueError, match=repr(split)):
            envs.make(name).tasks(split)


@pytest.mark.parametrize("task", ["", "no such task", " ", 0, 1.5, True, b"", [], {}, ("a",)])
def test_an_unknown_task_is_an_error_that_names_it(name, task):
    """Falsy values too: a task id that came out wrong must not quietly become another task."""
    env = envs.make(name)
    for ask in (lambda: env.reset(options={"task": task}), lambda: env.category(task)):
        with pytest.raises(ValueError) as error:
            ask()
        assert repr(task) in str(error.value)


def test_a_refused_reset_leaves_the_game_going(name):
    env = envs.make(name)
    game = play(env, sample_tasks(env, 1, "refused reset")[0])
    next(game)
    with pytest.raises(ValueError):
        env.reset(options={"task": "no such task"}, seed=1)
    assert list(game)[-1][-1]["success"]


def test_without_a_task_the_seed_draws_one_of_train(name):
    env = envs.make(name)
    first = [env.reset(seed=seed)[0] for seed in (1, 2, 3, 4, 1)]
    assert first[0] == first[4] == env.reset(seed=1, options={})[0]
    assert len(set(first)) > 1  # not always the same


def test_the_task_alone_fixes_the_first_observation(name):
    env = envs.make(name)
    for task in sample_tasks(env, 4, "first observation"):
        assert len({env.reset(options={"task": task}, seed=seed)[0] for seed in (None, 1, 2)}) == 1


def test_category(name):
    env = envs.make(name)
    for task in sample_tasks(env, 5, "category"):
        category = env.category(task)
        assert isinstance(category, str) and category
        assert env.reset(options={"task": task})[1]["category"] == category


# --- Gymnasium's interface, and ours ---


def test_gymnasium_has_no_complaint(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(envs.make(name))
    complaints = [str(warning.message) for warning in caught]
    # Rendering is not part of a text environment, and the checker cannot know.
    assert [text for text in complaints if "render modes" not in text] == []


def test_attributes(name):
    env = envs.make(name)
    assert isinstance(type(env).instructions, str) and type(env).instructions.strip()
    assert type(env.max_turns) is int and env.max_turns == HORIZONS.get(name, env.max_turns) > 0


def test_every_turn_has_the_promised_types(name):
    env = envs.make(name)
    (observation, info), *turns = play(env, sample_tasks(env, 1, "types")[0])
    assert type(info["success"]) is bool and not info["success"]
    assert env.observation_space.contains(observation)
    for thought, action, observation, reward, terminated, truncated, info in turns:
        assert isinstance(thought, str) and env.action_space.contains(action)
        assert env.observation_space.contains(observation)
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        assert type(info["success"]) is bool and type(info["invalid"]) is bool
    json.dumps(info)  # it travels over HTTP


def test_closing_twice_is_closing_once(name):
    unused, used = envs.make(name), envs.make(name)
    used.reset(options={"task": used.tasks("dev")[0]})
    for env in (unused, unused, used, used):
        assert env.close() is None


def test_options_are_checked_by_name(name):
    with pytest.raises(ValueError, match="colour") as error:
        envs.make(name, colour="red")
    for option in inspect.signature(type(envs.make(name))).parameters:
        assert option in str(error.value)
    with pytest.raises(ValueError, match=name):  # the message lists what there is
        envs.make(name + "x")


def test_the_docstring_is_a_transcript_that_holds(name):
    result = doctest.testmod(importlib.import_module(f"envs.{name}"))
    assert result.attempted and result.failed == 0


# --- the expert ---


def test_the_expert_solves_what_it_is_given(name):
    env = envs.make(name)
    for task in in_time(sample_tasks(env, 40, "expert")):
        (_, _), *turns = play(env, task)
        assert turns[-1][-1]["success"] and turns[-1][4], task
        assert all(info["success"] is False for *_, info in turns[:-1])
        assert not any(info["invalid"] for *_, info in turns), task


def test_the_expert_plans_from_wherever_it_finds_itself(name):
    """sft.py mixes in mistakes, so that a model learns to recover: advice must stay right."""
    env, chance = envs.make(name), random.Random("interleaved")
    num_played = num_solved = 0
    for task in in_time(sample_tasks(env, 40, "interleaved")):
        env.reset(options={"task": task}, seed=0)
        expert, is_over, success = env.expert(), False, False
        for turn in range(PATIENCE):
            actions = env.available_actions()
            is_detour = turn < 20 and chance.random() < 0.3 and actions
            advice = None if is_detour else next(expert, None)
            if not is_detour and advice is None:
                break
            _, _, terminated, truncated, info = env.step(
                advice[1] if advice else chance.choice(actions)
            )
            assert not (advice and info["invalid"]), (task, advice)
            is_over, success = terminated or truncated, info["success"]
            if is_over:
                break
        if not (is_over and is_detour and not success):  # the detour itself can lose the game
            num_played, num_solved = num_played + 1, num_solved + success
    assert num_played and num_solved >= 0.8 * num_played, f"{num_solved} of {num_played}"


def test_available_actions_are_accepted(name):
    env, chance = envs.make(name), random.Random("available")
    for task in in_time(sample_tasks(env, 10, "available")):
        env.reset(options={"task": task}, seed=0)
        path = [action for _, action in itertools.islice(played(env), chance.randrange(4))]
        env.reset(options={"task": task}, seed=0)
        for action in path:
            env.step(action)
        actions = env.available_actions()
        assert len(set(actions)) == len(actions)
        for action in chance.sample(actions, min(6, len(actions))):
            env.reset(options={"task": task}, seed=0)
            for earlier in path:
                env.step(earlier)
            assert not env.step(action)[-1]["invalid"], (task, path, action)


def played(env: gym.Env):
    """The expert's advice, followed as it comes, short of the turn that ends the game."""
    for thought, action in env.expert():
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return
        yield thought, action


# --- junk ---

JUNK = [
    *(
        "",
        " ",
        "\n",
        "xyzzy",
        "get",
        "craft",
        "go to",
        "pick up",
        "click",
        "search",
        "0",
        "-1",
        ".",
    ),
    *("\ud800", "\x00", "١٢٣", "get ٣ oak logs", "İ" * 50, "get " + "9" * 5000 + " oak logs"),
    *("a" * 2**20, "craft 1 a using " + "1 b, " * 200_000, "(" * 5000, "[" * 5000, "%s {0} \\1"),
]


def check_junk(env: gym.Env, action: str) -> dict:
    observation, reward, terminated, truncated, info = env.step(action)
    observation.encode()  # no lone surrogate comes back to break the reply
    assert len(observation) < 10_000  # nor the megabyte that was sent
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    return info


def test_junk_is_an_observation(name):
    env = envs.make(name)
    env.reset(options={"task": sample_tasks(env, 1, "junk")[0]}, seed=0)
    has_grammar = bool(env.available_actions())
    for action in JUNK:
        start = time.monotonic()
        info = check_junk(env, action)
        assert time.monotonic() - start < 2, f"slow on {action[:20]!r}"
        assert info["invalid"] or not has_grammar, action[:50]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mangled_actions_raise_nothing(name, data):
    """Text made of the words of real actions, which gets further into a parser than noise does."""
    if name not in GAMES:
        env, began = envs.make(name), time.monotonic()
        env.reset(options={"task": env.tasks("train")[0]}, seed=0)
        is_slow = time.monotonic() - began > 0.1
        words = sorted({word for action in env.available_actions()[:30] for word in action.split()})
        GAMES[name] = env, words, is_slow
    env, words, is_slow = GAMES[name]
    # A reset for each example where that is cheap, so that Hypothesis can make it smaller.
    if not is_slow or env.step("")[2]:
        env.reset(options={"task": env.tasks("train")[0]}, seed=0)
    word = st.sampled_from(words or ["search"]) | st.text(max_size=5) | st.integers().map(str)
    action = " ".join(data.draw(st.lists(word, max_size=8)))
    observation, reward, _, _, info = env.step(action)
    observation.encode()
    assert reward == 0.0 or not info["invalid"]


# --- many episodes in one process, and one episode in many processes ---


def test_games_do_not_disturb_each_other(name):
    """Alone, in turns with others, and in threads: the same game, word by word."""
    tasks = list(in_time(sample_tasks(envs.make(name), 6, "isolation")))
    alone = [list(play(envs.make(name), task)) for task in tasks]
    together = [play(envs.make(name), task) for task in tasks]
    turns = list(itertools.zip_longest(*together))
    in_turns = [[turn for turn in game if turn is not None] for game in zip(*turns, strict=True)]
    assert in_turns == alone
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        in_threads = list(pool.map(lambda task: list(play(envs.make(name), task)), tasks))
    assert in_threads == alone


def test_one_environment_carries_nothing_over(name):
    env = envs.make(name)
    first, second = sample_tasks(env, 2, "carry over")
    before = list(play(env, first))
    list(itertools.islice(play(env, second), 3))  # broken off in the middle
    assert list(play(env, first)) == before


FINGERPRINT = """
import hashlib, itertools, json, os, pathlib, sys, threading
sys.path.insert(0, sys.argv[1])
import envs
name = sys.argv[2]
env = envs.make(name)
tasks = [env.tasks(split) for split in ("train", "dev", "test")]
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
print("children", children.read_text().split() if children.exists() else [])
own = (f"envs.{name}", f"envs.{name}_")  # an environment may have a folder of its own
print("foreign", [m for m in sys.modules if m.startswith("envs.") and not m.startswith(own)])
seen = []
for task in [part[i] for part in tasks for i in (0, len(part) // 2, -1)][: int(sys.argv[3])]:
    seen.append([env.reset(options={"task": task}, seed=0), env.category(task)])
    for thought, action in itertools.islice(env.expert(), 12):
        seen.append([thought, action, env.available_actions(), env.step(action)])
        if seen[-1][3][2] or seen[-1][3][3]:
            break
print("print", hashlib.sha256(json.dumps([tasks, seen]).encode()).hexdigest())
"""


def test_processes_agree_whatever_their_hash_seed(name):
    """Nor does one import another environment, start a process before reset, or outlive its end."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", FINGERPRINT, str(REPO), name, "9"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [run.communicate(timeout=120)[0].splitlines() for run in runs]  # never closed: exits
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1]
    assert outputs[0][:2] == ["children []", "foreign []"]


def test_memory_does_not_grow(name):
    env = envs.make(name)
    tasks = sample_tasks(env, 3, "memory")

    def play_all(seconds: float, at_least: int) -> int:
        start, count = time.monotonic(), 0
        while count < at_least or time.monotonic() - start < seconds:
            for task in tasks:
                list(itertools.islice(play(env, task), 4))
            count += 1
        gc.collect()
        return count

    play_all(0.1, at_least=2)  # caches fill
    tracemalloc.start()
    try:
        play_all(0.1, at_least=2)
        before = tracemalloc.get_traced_memory()[0]
        count = play_all(SECONDS, at_least=2)
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < SLACK.get(name, 20_000) + 100 * count, (
        f"{growth} bytes in {count} rounds of {len(tasks)} games"
    )
