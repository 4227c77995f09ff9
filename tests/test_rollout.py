"""The multi-turn loop against scripted engines and environments, and against real ones."""

import math
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agent
import evaluate
from agent import Chat, Trajectory, Turn
from engines import HFEngine
from env_server import EnvError, EnvServers
from model import Actor
from rollout import (
    EnvPool,
    Limits,
    RolloutError,
    check_errors,
    collate,
    deal,
    micro_batches,
    reset_ahead,
    rollout,
    rollout_on_all_ranks,
)

# --- the loop ---


class Script:
    """An engine that says what it is told: one text for each turn, or a function of the key."""

    def __init__(self, chat: Chat, says, in_waves: bool = True):
        self.chat, self.says, self.in_waves, self.version = chat, says, in_waves, 3
        self.asked: dict[tuple, list[int]] = {}
        self.most: list[int] = []
        self.waiting: list[tuple] = []

    def add(self, key, ids, max_new_tokens, temperature):
        self.asked[key] = list(ids)
        self.most.append(max_new_tokens)
        self.waiting.append((key, max_new_tokens))

    def step(self):
        finished = []
        for key, most in self.waiting:
            text = self.says(key) if callable(self.says) else self.says[key[-1]]
            ids = (
                self.chat.tokenizer.encode(text, add_special_tokens=False) + [self.chat.end_of_turn]
            )[:most]
            finished.append((key, ids, [-0.5] * len(ids)))
        self.waiting = []
        return finished


class Room:
    """An environment in this process: ends after `steps`, reward 0.25 a step, success at the end."""

    def __init__(self, steps: int = 3, on_step=lambda room: None, says: str = "See: nothing."):
        self.steps, self.on_step, self.says, self.taken = steps, on_step, says, 0

    def step(self, action: str):
        self.on_step(self)
        self.taken += 1
        over = self.taken == self.steps
        return self.says, 0.25, over, False, {"success": over, "invalid": action == "jump"}

    def close(self):
        pass


class Rooms:
    """Stands in for EnvPool. `make(task, attempt)` returns a Room or raises."""

    instructions = "Do it."

    def __init__(self, make=lambda task, attempt: Room()):
        self.make, self.attempts, self.given_back = make, {}, []

    def start(self, preferred: int, task: str, seed: int):
        attempt = self.attempts[task] = self.attempts.get(task, -1) + 1
        room = self.make(task, attempt)
        return room, "See: nothing.", {"success": False, "category": "room"}

    def give_back(self, room):
        self.given_back.append(room)


GO = "Thought: a\nAction: go"


def run(chat, engine, rooms, count: int = 1, **limits) -> list[Trajectory]:
    blanks = [Trajectory("rooms", f"task {i}", i) for i in range(count)]
    return rollout(engine, chat, {"rooms": rooms}, blanks, Limits(**limits), ("test", 0))


class Weird(Room):
    """A room whose steps answer with whatever `answer` says."""

    def __init__(self, *answer):
        super().__init__()
        self.answer = answer

    def step(self, action: str):
        return self.answer


@pytest.mark.parametrize("in_waves", [True, False])
def test_an_episode_from_reset_to_the_end(chat, in_waves):  # BEHAVIOURS 1, 2, 10, 49
    engine, rooms = Script(chat, [GO] * 9, in_waves), Rooms()
    (t,) = run(chat, engine, rooms)
    assert (t.end, t.success, t.weights_version, t.category) == ("terminated", True, 3, "room")
    assert t.episode_return == 0.75 and len(t.turns) == 3 and len(rooms.given_back) == 1
    assert len(t.ids) == len(t.loss_mask) == len(t.logprobs)
    asked = [engine.asked[key] for key in sorted(engine.asked)]
    for shorter, longer in zip(asked, [*asked[1:], t.ids], strict=True):
        assert longer[: len(shorter)] == shorter  # the engine saw prefixes of what is trained on
    batch = collate([t])
    assert (
        batch.rewards * batch.loss_mask
    ).sum() == 0.75  # not one reward sits where the mask hides it
    for turn in t.turns:
        assert t.ids[turn.stop - 1] == chat.end_of_turn and batch.rewards[0, turn.stop - 1] == 0.25
        assert t.loss_mask[turn.start : turn.stop] == [1] * (turn.stop - turn.start)
    assert t.loss_mask[-1] == 0 and t.turns[-1].observation == "See: nothing."


def test_the_endings_are_kept_apart(chat):  # BEHAVIOURS 16
    def end(make=lambda task, attempt: Room(), **limits) -> tuple[str, bool]:
        (t,) = run(chat, Script(chat, [GO] * 9), Rooms(make), **limits)
        return t.end, t.success

    ok = {"success": False}
    won = {"success": True}
    assert end() == ("terminated", True)
    assert end(lambda *_: Weird("lost", 0.0, True, False, ok)) == ("terminated", False)
    assert end(max_turns=2) == ("max_turns", False)
    assert end(max_turns=3) == ("terminated", True)  # on the last turn, by itself
    assert end(lambda *_: Weird("late", 0.0, False, True, ok)) == ("max_turns", False)
    assert end(lambda *_: Weird("won", 0.0, True, True, won)) == ("terminated", True)
    (whole,) = run(chat, Script(chat, [GO] * 9), Rooms())
    assert end(max_tokens=whole.turns[-1].stop - 1) == ("max_tokens", False)  # one more would do
    assert end(lambda *_: 1 / 0) == ("error", False)


def test_an_episode_that_ends_in_an_error_was_no_success(chat):  # BEHAVIOURS 42
    class Won(Room):
        def step(self, action):
            observation, reward, *_ = super().step(action)
            if self.taken == 2:
                raise EnvError("environment_crash", "on the way home", 500)
            return observation, reward, False, False, {"success": True}

    (t,) = run(chat, Script(chat, [GO] * 9), Rooms(lambda *_: Won()))
    assert (t.end, t.success) == ("error", False) and "on the way home" in t.error


def test_an_episode_that_keeps_failing_is_an_error_with_its_reason(chat):  # BEHAVIOURS 42
    broken = Rooms(lambda task, attempt: 1 / 0)
    (t,) = run(chat, Script(chat, [GO] * 9), broken, retries=4)
    assert (t.end, t.success, broken.attempts["task 0"]) == ("error", False, 4)
    assert t.error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "answer",
    [
        ("fine", 0.0, False, False, {}),  # no success
        ("fine", 0.0, False, False, {"success": "yes"}),
        ("fine", 0.0, False, False, None),
        ("fine", None, False, False, {"success": False}),
        ("fine", math.nan, False, False, {"success": False}),
        ("fine", math.inf, False, False, {"success": False}),
        ("fine", 10**400, False, False, {"success": False}),
        (None, 0.0, False, False, {"success": False}),
    ],
)
def test_a_servers_nonsense_ends_its_episode_and_nobody_elses(chat, answer):  # BEHAVIOURS 43
    odd = Rooms(lambda task, attempt: Weird(*answer) if task == "task 1" else Room())
    done = run(chat, Script(chat, [GO] * 9), odd, 3)
    assert [t.end for t in done] == ["terminated", "error", "terminated"]
    assert "bad_reply" in done[1].error
    assert collate([t for t in done if t.end != "error"]).returns.tolist() == [0.75, 0.75]


def test_rewards_of_all_turns_count_wherever_they_fall(chat):  # BEHAVIOURS 10, 49
    class Payday(Room):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, [0.0, 2.0, -0.5][self.taken - 1], *rest

    (t,) = run(chat, Script(chat, [GO, "hm", GO, GO]), Rooms(lambda *_: Payday()))
    assert [turn.reward for turn in t.turns] == [0.0, 0.0, 2.0, -0.5] and t.episode_return == 1.5
    batch = collate([t])
    assert batch.rewards[0, batch.loss_mask[0]].sum() == batch.returns[0] == 1.5
    assert batch.rewards[0, ~batch.loss_mask[0]].sum() == 0
    assert batch.rewards[0, t.turns[2].stop - 1] == 2.0  # the turn that earned it


def test_budgets_to_the_token(chat):  # BEHAVIOURS 20, 22
    (whole,) = run(chat, Script(chat, [GO] * 9), Rooms())
    (exact,) = run(chat, Script(chat, [GO] * 9), Rooms(), max_tokens=len(whole.ids))
    assert exact.ids == whole.ids and exact.end == "terminated"
    last = whole.turns[-1]
    (fits,) = run(chat, Script(chat, [GO] * 9), Rooms(), max_tokens=last.stop)
    assert (fits.end, fits.success, fits.ids) == ("terminated", True, whole.ids[: last.stop])
    steps = []
    counted = Rooms(lambda task, attempt: Room(on_step=steps.append))
    (cut,) = run(chat, Script(chat, [GO] * 9), counted, max_tokens=last.stop - 1)
    assert (cut.end, cut.success, len(cut.ids)) == ("max_tokens", False, last.stop - 1)
    assert len(steps) == 2  # the action that was cut off never reached the environment
    (short,) = run(chat, Script(chat, [GO] * 9), Rooms(), max_tokens=3)
    assert short.weights_version == 3  # of the engine, though it was never asked
    assert short.end == "max_tokens" and not any(
        short.loss_mask
    )  # BEHAVIOURS 6: nothing to train on


def test_a_turns_limit_and_a_trajectorys_are_two_limits(chat):  # BEHAVIOURS 20, 21
    size = len(chat.tokenizer.encode(GO, add_special_tokens=False)) + 1
    endless = lambda *_: Room(steps=99)
    for max_tokens in range(100, 400, 7):
        engine, rooms = Script(chat, [GO] * 99), Rooms(endless)
        (t,) = run(chat, engine, rooms, max_new_tokens=size, max_tokens=max_tokens, max_turns=50)
        assert t.end == "max_tokens" and len(t.ids) <= max_tokens
        assert len(engine.asked) == len(t.turns)  # nothing was generated that is not in here
        assert all(most <= size for most in engine.most)
        for key, ids in engine.asked.items():
            assert len(ids) + engine.most[key[-1]] <= max_tokens  # never asked for more than fits
        # every turn went to the environment, but for one that was cut off
        cut = t.ids[t.turns[-1].stop - 1] != chat.end_of_turn
        taken = rooms.given_back[0].taken
        assert taken == len(t.turns) - cut
        assert len(t.ids) == len(t.loss_mask) == len(t.logprobs)
        assert all(turn.stop <= len(t.ids) for turn in t.turns)


def test_a_turn_cut_by_its_own_limit_is_closed_parsed_and_goes_on(chat):  # BEHAVIOURS 7, 20
    size = len(chat.tokenizer.encode(GO, add_special_tokens=False))
    (t,) = run(chat, Script(chat, [GO] * 9), Rooms(), max_new_tokens=size)
    assert t.end == "terminated" and t.turns[0].action == "go"
    stop = t.turns[0].stop
    assert (t.ids[stop], t.loss_mask[stop]) == (chat.end_of_turn, 0)


def test_broken_form_costs_a_turn_and_no_call(chat):
    steps = []
    rooms = Rooms(lambda task, attempt: Room(steps=1, on_step=steps.append))
    (t,) = run(chat, Script(chat, ["hm", GO]), rooms)
    assert [turn.format_error for turn in t.turns] == [True, False] and len(steps) == 1
    assert t.turns[1].observation.startswith("No action found")
    (t,) = run(chat, Script(chat, ["hm"] * 9), Rooms(), max_invalid=2)
    assert (t.end, len(t.turns), t.success) == ("terminated", 2, False)
    (t,) = run(
        chat, Script(chat, ["Action: jump"] * 9), Rooms(lambda *_: Room(steps=9)), max_invalid=3
    )
    assert (t.end, len(t.turns)) == ("terminated", 3)


def test_the_last_allowed_mistake_is_an_end_and_no_success(chat):
    # on the last turn too: such an episode is worth what it earned, not the value of a next state
    (t,) = run(chat, Script(chat, ["hm"] * 9), Rooms(), max_invalid=2, max_turns=2)
    assert (t.end, t.success, len(t.turns)) == ("terminated", False, 2)
    solved_but_open = Weird("fine", 1.0, False, False, {"success": True, "invalid": True})
    (t,) = run(chat, Script(chat, [GO] * 9), Rooms(lambda *_: solved_but_open), max_invalid=1)
    assert (t.end, t.success) == ("terminated", False)
    (t,) = run(chat, Script(chat, ["hm"] * 9), Rooms(), max_invalid=0, max_turns=6)
    assert (t.end, len(t.turns)) == ("max_turns", 6)  # 0: never


def test_a_long_observation_is_clipped_before_it_is_read(chat):
    (t,) = run(
        chat,
        Script(chat, [GO] * 9),
        Rooms(lambda *_: Room(says="See: " + "wall " * 500)),
        max_observation_tokens=80,
    )
    assert "left out" in t.turns[1].observation and len(t.ids) < 400


def test_all_environments_of_a_turn_are_called_at_once(chat):  # BEHAVIOURS 46
    barrier = threading.Barrier(32, timeout=10)  # passes only when 32 threads stand at it
    rooms = Rooms(lambda *_: Room(on_step=lambda room: barrier.wait()))
    assert all(t.end == "terminated" for t in run(chat, Script(chat, [GO] * 9), rooms, 32))


def test_no_more_episodes_are_open_than_allowed_and_all_get_their_turn(chat):
    open_now, most, lock = set(), [0], threading.Lock()

    class Counted(Rooms):
        def start(self, preferred, task, seed):
            with lock:
                open_now.add(task)
                most[0] = max(most[0], len(open_now))
            return super().start(preferred, task, seed)

    def leave(room):
        if room.taken == 2:  # its last step
            with lock:
                open_now.discard(room.task)

    def make(task, attempt):
        room = Room(on_step=leave)
        room.task = task
        return room

    blanks = [Trajectory("rooms", f"task {i}", i) for i in range(10)]
    pools, key = {"rooms": Counted(make)}, ("test", 0)
    done = rollout(Script(chat, [GO] * 9), chat, pools, blanks, Limits(), key, concurrency=3)
    assert [t.task for t in done] == [f"task {i}" for i in range(10)]
    assert all(t.success for t in done) and most[0] == 3


def test_an_engine_without_waves_does_not_wait_for_slow_environments(chat):
    quick_is_done = threading.Event()

    def on_step(room):
        if room.task == "task 0":
            assert quick_is_done.wait(2)  # answers only once the other episode is over
        elif room.taken == 2:
            quick_is_done.set()

    def make(task, attempt):
        room = Room(on_step=on_step)
        room.task = task
        return room

    done = run(chat, Script(chat, [GO] * 9, in_waves=False), Rooms(make), 2, retries=0)
    assert [t.end for t in done] == ["terminated", "terminated"]


def test_closing_a_stuck_environment_does_not_hold_up_the_next_attempt(chat):
    played_again = threading.Event()

    class Stuck(Room):
        def step(self, action):
            raise EnvError("timeout", "no answer")

        def close(self):
            assert played_again.wait(10)  # as a server that hangs keeps /close waiting, too
            closed.append(True)

    closed = []
    ends = lambda room: played_again.set() if room.taken == 2 else None
    rooms = Rooms(lambda task, attempt: Room(on_step=ends) if attempt else Stuck())
    (t,) = run(chat, Script(chat, [GO] * 9), rooms)
    assert t.end == "terminated" and closed == [True]


def test_dead_and_hanging_environments_hold_nobody_up(chat):  # BEHAVIOURS 42, 43, 45
    def make(task: str, attempt: int) -> Room:
        if task == "task 3":
            raise EnvError("unreachable", "gone")
        # a client raises once its deadline is over; this one hangs half a second, always
        return Room(
            on_step=(lambda room: time.sleep(0.5) or 1 / 0)
            if task == "task 5"
            else (lambda room: None)
        )

    began = time.monotonic()
    done = run(chat, Script(chat, [GO] * 9), Rooms(make), 16, episode_seconds=1.2)
    assert time.monotonic() - began < 5
    assert [t.task for t in done if t.end == "error"] == ["task 3", "task 5"]
    assert sum(t.success for t in done) == 14
    assert [t.task for t in done] == [f"task {i}" for i in range(16)]  # in the order given


def test_a_failed_episode_is_played_again_from_a_clean_start(chat):
    def make(task: str, attempt: int) -> Room:
        crash = attempt == 0
        return Room(on_step=lambda room: 1 / 0 if crash and room.taken == 1 else None)

    (t,) = run(chat, Script(chat, [GO] * 9), Rooms(make))
    assert (t.end, t.success, len(t.turns), t.episode_return) == ("terminated", True, 3, 0.75)


def test_an_episode_may_not_take_for_ever(chat):  # BEHAVIOURS 45
    slow = Rooms(lambda *_: Room(steps=100, on_step=lambda room: time.sleep(0.1)))
    (t,) = run(chat, Script(chat, [GO] * 100), slow, episode_seconds=0.35, max_turns=100)
    assert t.end == "error" and "0.35 s" in t.error
    assert slow.attempts["task 0"] == 0  # no time is left for another attempt


def test_too_many_failures_stop_the_run_with_the_first_ones_words():  # BEHAVIOURS 44
    bad = Trajectory("rooms", "t", end="error", error="EnvError: gone")
    good = Trajectory("rooms", "t", end="terminated")
    check_errors([bad, good], 0.5)
    with pytest.raises(RolloutError, match="2 of 3 .* EnvError: gone"):
        check_errors([bad, bad, good], 0.5)
    with pytest.raises(RolloutError):
        check_errors([bad, bad], 1.0)
    check_errors([], 0.5)  # nothing was played, so nothing failed


def test_a_server_killed_in_the_middle_costs_no_episode(chat):  # BEHAVIOURS 42, 48
    with EnvServers("textcraft", {"max_depth": "1"}) as servers:
        pool = EnvPool(servers.urls, grace=30)
        pool.check("textcraft")
        tasks = pool.clients[0].tasks("dev")[:8]
        killed = []

        def says(key: tuple) -> str:
            if key[-1] == 2 and not killed:
                killed.append(servers.pids[0])
                os.kill(servers.pids[0], signal.SIGKILL)
            return "Thought: a\nAction: inventory"

        blanks = [Trajectory("textcraft", task, i) for i, task in enumerate(tasks)]
        done = rollout(
            Script(chat, says),
            chat,
            {"textcraft": pool},
            blanks,
            Limits(max_turns=4, max_tokens=4000),
            ("x",),
        )
        assert killed and [t.end for t in done] == ["max_turns"] * 8
        assert all(len(t.turns) == 4 for t in done)
        pool.close()


# --- over HTTP ---


class Doors(gym.Env):
    """Three doors; success behind the third. The task may be a trap, on one or on every server."""

    instructions, max_turns = "Open doors.", 10
    gate = threading.Event()
    is_faulty = False  # a server all of whose episodes crash at the second door

    def tasks(self, split):
        return {
            "train": [f"house {i}" for i in range(16)],
            "dev": ["dev"],
            "test": ["dead", "hang"],
        }[split]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task, self.opened = options["task"], 0
        return "See: nothing.", {"success": False, "category": "doors"}

    def step(self, action):
        self.opened += 1
        if self.opened == 2 and (self.task == "dead" or self.is_faulty):
            raise RuntimeError("the hinge broke")
        if self.opened == 2 and self.task == "hang":
            Doors.gate.wait(20)
        is_over = self.opened == 3
        return (
            f"See: {action} {self.opened}",
            float(is_over),
            is_over,
            False,
            {"success": is_over, "invalid": False},
        )


class FaultyDoors(Doors):
    is_faulty = True


def pool_of(*urls: str, **settings) -> dict[str, EnvPool]:
    pool = EnvPool(list(urls), **settings)
    pool.check("toy")
    return {"doors": pool}


def test_a_whole_episode_over_http(chat, serve):  # BEHAVIOURS 1, 10, 49
    pools = pool_of(serve(Doors))
    engine = Script(chat, [GO] * 9)
    blanks = [Trajectory("doors", f"house {i}", i) for i in range(8)]
    done = rollout(engine, chat, pools, blanks, Limits(), ("x",))
    for t in done:
        assert (t.end, t.success, t.category, t.episode_return) == ("terminated", True, "doors", 1)
        seen = [turn.observation for turn in t.turns] + [t.observation]
        assert seen == ["See: nothing.", "See: go 1", "See: go 2", "See: go 3"]
        assert t.ids[: len(engine.asked["x", t.group, 0, 0])] == chat.prompt(
            "Open doors.", "See: nothing."
        )
    client = pools["doors"].clients[0]
    assert client.health()["episodes"] == 8  # kept for the next rollout ...
    rollout(engine, chat, pools, blanks, Limits(), ("x",))
    assert client.health()["episodes"] == 8
    pools["doors"].close()
    assert client.health()["episodes"] == 0  # ... and closed in the end


def test_with_one_environment_dead_and_one_hanging_the_others_are_trained_on(chat, serve):
    # BEHAVIOURS 42, 43
    Doors.gate.clear()
    pools = pool_of(serve(Doors), timeout=0.5, grace=1.0)
    tasks = [f"house {i}" for i in range(14)] + ["dead", "hang"]
    random.Random(0).shuffle(tasks)
    blanks = [Trajectory("doors", task, i) for i, task in enumerate(tasks)]
    began = time.monotonic()
    limits = Limits(episode_seconds=1.5)
    done = rollout(Script(chat, [GO] * 9), chat, pools, blanks, limits, ("x",))
    took = time.monotonic() - began
    Doors.gate.set()
    assert took < 1.5 + 3 * 0.5 + 2  # its deadline, the calls in flight, slack
    assert [t.task for t in done] == tasks
    reasons = {t.task: t.error for t in done if t.end == "error"}
    assert reasons.keys() == {"dead", "hang"}
    assert "the hinge broke" in reasons["dead"] and not any(t.success for t in done if t.error)
    valid = [t for t in done if t.end != "error"]
    assert len(valid) == 14 and all(t.success for t in valid)
    assert collate(valid).returns.tolist() == [1.0] * 14
    check_errors(done, 0.5)


def test_an_episode_that_fails_on_one_replica_is_played_on_another(chat, serve):  # BEHAVIOURS 42
    pools = pool_of(serve(FaultyDoors), serve(Doors))
    blanks = [Trajectory("doors", f"house {i}", i) for i in range(6)]
    done = rollout(Script(chat, [GO] * 9), chat, pools, blanks, Limits(retries=1), ("x",))
    assert [(t.end, len(t.turns)) for t in done] == [("terminated", 3)] * 6


def test_an_episode_starts_on_another_replica_where_one_is_gone(chat, serve):
    pools = pool_of(serve(Doors), grace=5.0)
    pool = pools["doors"]
    pool.clients.insert(0, EnvPool(["http://127.0.0.1:9"]).clients[0])  # nobody listens there
    pool._idle.append([])
    blanks = [Trajectory("doors", f"house {i}", i) for i in range(4)]
    done = rollout(Script(chat, [GO] * 9), chat, pools, blanks, Limits(retries=0), ("x",))
    assert all(t.success for t in done)


def test_a_task_that_no_server_knows_fails_at_once_with_the_reason(chat, serve):
    pools = pool_of(serve(Doors), grace=30.0)
    (t,) = rollout(
        Script(chat, [GO] * 9), chat, pools, [Trajectory("doors", "castle")], Limits(), ("x",)
    )
    assert t.end == "error" and "castle" in t.error


def test_episodes_that_a_restarted_server_has_forgotten_are_not_tried_one_by_one(chat, serve):
    pools = pool_of(serve(Doors), grace=2.0)
    pool = pools["doors"]
    stale = [pool._take(0) for _ in range(40)]
    for episode in stale:
        episode.close()  # over there; here they still count as idle
        pool.give_back(episode)
    began = time.monotonic()
    episode, *_ = pool.start(0, "house 1", seed=0)
    assert time.monotonic() - began < 1.0
    assert pool._idle == [[]] and episode not in stale


def test_a_rollout_on_one_rank_of_one_is_a_rollout(chat, serve, one_rank):
    blanks = [Trajectory("doors", f"house {g}", g, n) for g in (2, 0, 1) for n in (1, 0)]
    pools = pool_of(serve(Doors))
    args = (Script(chat, [GO] * 9), chat, pools, blanks, Limits(), ("x",))
    done = rollout_on_all_ranks(*args)
    assert [(t.group, t.sample) for t in done] == [(g, n) for g in (0, 1, 2) for n in (0, 1)]
    assert all(t.task == f"house {t.group}" and t.success for t in done)


class CountedDoors(Doors):
    """Doors that note every reset, and may be broken for a while."""

    resets: list[tuple[str, int]] = []
    is_broken = False

    def reset(self, *, seed=None, options=None):
        self.resets.append((options["task"], seed))
        if self.is_broken:
            raise RuntimeError("the house is on fire")
        return super().reset(seed=seed, options=options)


@pytest.fixture
def ahead(chat, serve, one_rank, monkeypatch):
    """(pools, blanks, play) over counted doors, where nothing has been reset yet."""
    monkeypatch.setattr(CountedDoors, "resets", [])
    pools = pool_of(serve(CountedDoors), grace=0.5)
    blanks = [Trajectory("doors", f"house {g}", g, n) for g in range(3) for n in range(2)]
    play = lambda: rollout_on_all_ranks(
        Script(chat, [GO] * 9), chat, pools, blanks, Limits(), ("x", 1)
    )
    yield pools, blanks, play
    pools["doors"].close()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_environments_are_reset_ahead_of_the_rollout_and_once(ahead):
    pools, blanks, play = ahead
    plain = play()
    as_ever = sorted(CountedDoors.resets)
    CountedDoors.resets.clear()
    reset_ahead(pools, blanks, ("x", 1), 0, concurrency=4)
    wait_for(
        lambda: len(CountedDoors.resets) == 4
    )  # before anybody plays, and no more than allowed
    done = play()
    assert sorted(CountedDoors.resets) == as_ever  # the same tasks with the same seeds
    assert [t.ids for t in done] == [t.ids for t in plain] and all(t.success for t in done)


def test_what_its_server_has_closed_meanwhile_is_reset_again(ahead):
    pools, blanks, play = ahead
    reset_ahead(pools, blanks, ("x", 1))
    wait_for(lambda: all(future.done() for future in pools["doors"]._ahead.values()))
    lost = list(pools["doors"]._ahead.values())[:4]
    for future in lost:
        future.result()[0].close()  # as a restarted server has, or one with a short --ttl
    assert all(t.success for t in play())
    assert len(CountedDoors.resets) == 10


def test_what_waits_in_line_behind_a_server_that_hangs_is_begun_by_the_rollout(ahead, monkeypatch):
    pools, blanks, play = ahead
    pools["doors"]._threads = ThreadPoolExecutor(1)
    gate = threading.Event()
    pools["doors"]._threads.submit(gate.wait, 20)
    reset_ahead(pools, blanks, ("x", 1))
    assert all(t.success for t in play())
    gate.set()


def test_an_evaluation_has_the_room_of_what_was_reset_ahead(chat, serve, one_rank, monkeypatch):
    monkeypatch.setattr(CountedDoors, "resets", [])
    pools = pool_of(serve(CountedDoors, capacity=6), grace=1.0)
    blanks = [Trajectory("doors", f"house {g}", g) for g in range(6)]
    reset_ahead(pools, blanks, ("x", 1))
    engine, config = Script(chat, [GO] * 9), evaluate.Play()
    done = evaluate.play_split(
        engine, chat, pools, "train", config, Limits(), ("y",), 1, 1.0, limit=6
    )
    assert all(t.success for t in done) and len(done) == 6
    pools["doors"].close()


def test_closing_waits_for_a_server_that_hangs_once_and_not_for_each_episode(chat, serve):
    pools = pool_of(serve(Doors))
    pool = pools["doors"]
    for i in range(6):
        pool.give_back(pool.start(0, f"house {i}", i)[0])
    asked = []

    def hang(episode_id):
        asked.append(episode_id)
        raise EnvError("timeout", "no answer")

    pool.clients[0].close = hang
    pool.close()
    assert len(asked) == 1


def test_a_reset_ahead_that_failed_is_begun_again(ahead, monkeypatch):
    pools, blanks, play = ahead
    monkeypatch.setattr(CountedDoors, "is_broken", True)
    reset_ahead(pools, blanks, ("x", 1))
    wait_for(lambda: len(CountedDoors.resets) == 6)
    monkeypatch.setattr(CountedDoors, "is_broken", False)
    assert all(t.success for t in play())


def test_what_was_reset_ahead_and_never_played_is_closed(ahead):
    pools, blanks, _ = ahead
    reset_ahead(pools, blanks, ("x", 1))
    pools["doors"].close()
    assert pools["doors"].clients[0].health()["episodes"] == 0


def test_wrong_servers_are_named(chat):
    with pytest.raises(ValueError, match="no environment server at http://127.0.0.1:9"):
        EnvPool(["http://127.0.0.1:9"]).check("textcraft")
    with (
        EnvServers("textcraft") as servers,
        pytest.raises(ValueError, match="serves textcraft, but --env is babyai"),
    ):
        EnvPool(servers.urls).check("babyai")


# --- engine and loop together ---


def test_a_rollout_depends_on_its_seeds_and_not_on_time_and_scores_what_it_saw(
    make_lm, chat, monkeypatch
):
    # BEHAVIOURS 1, 24, 29
    monkeypatch.setattr(agent, "parse_react", lambda text: ("", text.strip() or "?", ""))
    lm = make_lm()  # says anything; here anything is an action

    class Echo(Room):
        def step(self, action):
            time.sleep(pause())
            _, *rest = super().step(action)
            return f"See: {len(action)} {action[:5]}", *rest

    def play(seed: int, concurrency: int = 99) -> list[Trajectory]:
        engine = HFEngine(lm, chat.stop_ids, seed=seed)
        rooms = Rooms(lambda task, attempt: Echo(steps=2 + int(task[-1]) % 3))
        blanks = [Trajectory("rooms", f"task {g}", g, n) for g in range(4) for n in range(2)]
        limits = Limits(max_new_tokens=12)
        return rollout(
            engine, chat, {"rooms": rooms}, blanks, limits, ("t", 1), 0.7, seed, concurrency
        )

    pause = lambda: 0.0
    once = play(0)
    jitter = random.Random(0)
    pause = lambda: 0.01 * jitter.random()
    again, few, other = play(0), play(0, concurrency=3), play(1)
    assert [t.ids for t in once] == [t.ids for t in again] == [t.ids for t in few]
    assert [t.ids for t in once] != [t.ids for t in other]
    assert once[0].ids != once[1].ids  # samples of a group differ
    assert {len(t.turns) for t in once} == {2, 3, 4}
    for t in once:
        ids, mask = torch.tensor([t.ids]), torch.tensor([t.loss_mask])
        with torch.no_grad():
            scored, _ = Actor(lm)(ids, mask, 0.7)
        torch.testing.assert_close(scored[0], torch.tensor(t.logprobs), atol=1e-4, rtol=1e-4)


# --- tensors ---


def three_turns() -> Trajectory:
    t = Trajectory("toy", "t", group=4, end="terminated", success=True)
    t.ids = [1, 2, 30, 31, 9, 3, 32, 9, 3, 33, 34, 9, 4]
    t.loss_mask = [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0]
    t.logprobs = [-0.1 * mask for mask in t.loss_mask]
    t.turns = [
        Turn("", "", "", "", 2, 5, 0.5),
        Turn("", "", "", "", 6, 8, format_error=True),
        Turn("", "", "", "", 9, 11, 1.0),
    ]
    return t


def test_collate_on_three_turns():
    short = Trajectory(
        "toy", "t", group=1, ids=[1, 5], loss_mask=[0, 1], logprobs=[0.0, -1.0], end="max_turns"
    )
    short.turns = [Turn("", "", "", "", 1, 2)]
    batch = collate([three_turns(), short], pad_id=99)
    assert batch.loss_mask.int().tolist() == [
        [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0],
        [0, 1] + [0] * 11,
    ]
    assert batch.rewards[0].nonzero()[:, 0].tolist() == [4, 10] and batch.rewards[
        0, [4, 10]
    ].tolist() == [0.5, 1.0]
    assert batch.turn_ends[0].nonzero()[:, 0].tolist() == [4, 7, 10] and batch.format_errors[
        0
    ].nonzero().tolist() == [[7]]
    assert batch.input_ids[1].tolist() == [1, 5] + [99] * 11
    assert (batch.lengths.tolist(), batch.returns.tolist(), batch.group_ids.tolist()) == (
        [13, 2],
        [1.5, 0.0],
        [4, 1],
    )
    assert batch.terminated.tolist() == [True, False]
    assert batch.rollout_logprobs[0, [1, 2, 5, 12]].tolist() == pytest.approx([0, -0.1, 0, 0])
    part = batch.select([1])
    assert (
        part.input_ids.tolist() == [[1, 5]]
        and part.loss_mask.int().tolist() == [[0, 1]]
        and part.old_logprobs is None
    )
    assert not batch.select([]).loss_mask.any() and batch.select([]).input_ids.shape == (1, 13)


def test_selecting_rows_trims_to_the_longest_and_keeps_their_order():
    rows = []
    for n in (3, 6, 4):
        rows.append(Trajectory("toy", "t", n, ids=[n] * n, loss_mask=[0] + [1] * (n - 1)))
        rows[-1].logprobs = [-0.5 * mask for mask in rows[-1].loss_mask]
    batch = collate(rows)
    batch.advantages = torch.arange(18.0).view(3, 6)
    part = batch.select([2, 0])
    assert part.input_ids.tolist() == [[4, 4, 4, 4], [3, 3, 3, 0]]
    assert part.advantages.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert (part.lengths.tolist(), part.group_ids.tolist()) == ([4, 3], [4, 3])
    assert part.loss_mask.sum() == 5 and part.ref_logprobs is None
    nothing = batch.select([])  # of a rank without work: one row to run, and nothing to learn
    assert nothing.input_ids.tolist() == [[3, 3, 3]] and not nothing.loss_mask.any()
    assert batch.loss_mask.sum() == 10  # the original is as it was


def test_trajectories_without_a_turn_make_a_batch_like_any_other():  # BEHAVIOURS 6
    mute = Trajectory("toy", "t", ids=[1, 2], loss_mask=[0, 0], logprobs=[0.0, 0.0])
    batch = collate([mute])
    assert batch.returns.dtype == torch.float32 and not batch.loss_mask.any()
    with pytest.raises(AssertionError, match="no trajectories"):
        collate([])


def test_micro_batches_by_hand():
    assert micro_batches([5, 90, 6, 100], max_tokens=200) == [[3, 1], [2, 0]]
    assert micro_batches([7, 300], max_tokens=200) == [[1], [0]]  # too long for any, so alone
    assert micro_batches([], max_tokens=200) == []
    groups = [[0], [1], [2]]
    assert [deal(groups, rank, 2) for rank in range(2)] == [[[0], [2]], [[1], []]]
    assert deal([], 0, 2) == []


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 120), st.integers(0, 60)
)
def test_the_cheapest_cut_is_the_best_of_all_cuts(lengths, budget, cost):
    order = sorted(lengths, reverse=True)

    def price(sizes) -> float:  # of cutting `order` into groups of so many rows
        total, begin = 0, 0
        for size in sizes:
            padded = size * order[begin]
            if size > 1 and padded > budget:
                return float("inf")
            total, begin = total + padded + cost, begin + size
        return total

    def ways(rest: int):
        yield from (
            [[]]
            if rest == 0
            else ([n, *more] for n in range(1, rest + 1) for more in ways(rest - n))
        )

    groups = micro_batches(lengths, budget, pass_tokens=cost)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert [lengths[row] for group in groups for row in group] == order
    assert price([len(group) for group in groups]) == min(price(way) for way in ways(len(lengths)))


def test_several_ranks_get_even_groups_in_no_more_rounds():
    # a full group, and a rest: one rank would wait while the other computes 20 rows
    lengths = [10] * 21
    assert [len(group) for group in micro_batches(lengths, 200)] == [20, 1]
    assert [len(group) for group in micro_batches(lengths, 200, ranks=2)] == [11, 10]
    assert [len(group) for group in micro_batches(lengths, 200, ranks=4)] == [6, 6, 6, 3]
    assert micro_batches([300, 7], 200, ranks=2) == [[0], [1]] and micro_batches([], 200, 2) == []


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.integers(1, 5)
)
def test_micro_batches_hold_each_row_once_within_the_budget_and_ranks_get_equally_many(
    lengths, budget, world
):  # BEHAVIOURS 36
    groups = micro_batches(lengths, budget, world)
    assert -(-len(groups) // world) <= -(-len(micro_batches(lengths, budget)) // world)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= budget
    dealt = [deal(groups, rank, world) for rank in range(world)]
    assert len({len(mine) for mine in dealt}) == 1
    assert sorted(row for mine in dealt for group in mine for row in group) == list(
        range(len(lengths))
    )
