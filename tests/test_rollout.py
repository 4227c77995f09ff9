"""The sampler against plain forward passes, and the multi-turn loop against scripted engines and environments."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

import sft
from agent import Chat, Trajectory, Turn
from env_server import EnvError, EnvServers
from rollout import (
    EnvPool,
    HFEngine,
    Limits,
    RolloutError,
    check_errors,
    collate,
    deal,
    micro_batches,
    rollout,
    sample,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(shape).eval()


def play(
    lm, wave_order: int, prefill_tokens: int = 60, temperature: float = 0.7
) -> dict[int, Trajectory]:
    """Twelve trajectories over six waves; some end, some join later. Stop tokens 5 to 9, up to 12 new ones a turn."""
    engine = HFEngine(lm, {5, 6, 7, 8, 9}, seed=1, prefill_tokens=prefill_tokens)
    made = {}
    for wave in range(6):
        live = [i for i in range(12) if i // 3 <= wave < i // 3 + 3]
        for i in live[::wave_order]:
            t = made.setdefault(i, Trajectory("toy", str(i)))
            t.add_context(
                [(7 * i + 3 * wave + j) % 50 + 10 for j in range(2 + (5 * i + wave) % 11)]
            )
            engine.add(("play", i, wave), t.ids, 1 + (i + wave) % 12, temperature)
        finished = engine.step()
        assert sorted(key[1] for key, _, _ in finished) == live
        for (_, i, _), ids, logprobs in finished:
            assert len(ids) <= 1 + (i + wave) % 12 and not set(ids[:-1]) & {5, 6, 7, 8, 9}
            made[i].ids += ids
            made[i].loss_mask += [1] * len(ids)
            made[i].logprobs += logprobs
    return made


def test_logprobs_are_those_of_a_plain_forward_pass_at_the_sampling_temperature(
    lm,
):  # BEHAVIOURS 24
    for t in play(lm, 1).values():
        ids = torch.tensor([t.ids])
        plain = (lm(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(t.loss_mask[1:]).bool()
        torch.testing.assert_close(
            torch.tensor(t.logprobs[1:])[mask], plain[mask], atol=2e-5, rtol=1e-4
        )


def test_results_depend_on_keys_alone(lm):
    forwards, backwards, whole = play(lm, 1), play(lm, -1), play(lm, 1, prefill_tokens=10**6)
    for i, t in forwards.items():
        assert t.ids == backwards[i].ids == whole[i].ids


def test_greedy_is_generates_greedy(lm):
    engine = HFEngine(lm, {-1})
    prompt = [11, 12, 13, 14]
    engine.add((0, 0), prompt, 20, 0.0)
    ((_, ids, _),) = engine.step()
    out = lm.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=20,
        min_new_tokens=20,
        pad_token_id=0,
    )
    assert ids == out[0, 4:].tolist()


def test_new_weights_are_used_at_once_and_no_old_key_or_value_survives(lm):  # BEHAVIOURS 30, 31
    engine = HFEngine(lm, {-1})
    prompt = [11, 12, 13, 14]

    def answer(turn: int) -> list[float]:
        engine.add((0, turn), prompt, 5, 0.0)
        return engine.step()[0][2]

    before = answer(0)
    old = {name: p.detach().clone() for name, p in lm.named_parameters()}
    engine.sync(
        [(name, p + 0.05 * torch.ones_like(p).cumsum(0).sin()) for name, p in old.items()],
        version=1,
    )
    after = answer(1)
    assert engine.version == 1 and before != after
    fresh = HFEngine(lm, {-1})
    fresh.add((0, 1), prompt, 5, 0.0)
    assert after == pytest.approx(fresh.step()[0][2], abs=1e-6)
    engine.sync(old.items(), version=2)
    assert answer(2) == pytest.approx(before, abs=1e-6)


def test_sampling_by_hand():
    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().expand(6, 4)
    tokens, logprobs = sample(
        logits, torch.ones(6), torch.tensor([0.0, 0.05, 0.15, 0.29, 0.31, 1 - 1e-7])
    )
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]  # 2 has no probability and is never drawn
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.2, 0.7, 0.7]))
    tokens, logprobs = sample(logits[:1], torch.zeros(1), torch.zeros(1))
    assert tokens.tolist() == [3] and logprobs.exp().item() == pytest.approx(0.7)
    _, logprobs = sample(logits[:1], torch.tensor([0.5]), torch.tensor([0.999]))
    assert logprobs.exp().item() == pytest.approx(0.49 / 0.54)  # .01 .04 0 .49 of .54


# --- the loop ---


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(sft.make_tokenizer(["Thought: a\nAction: go\nSee: nothing 0123456789"] * 3, 300))


class Script:
    """An engine that says what it is told: one text for each turn, or a function of the key."""

    def __init__(self, chat: Chat, says, in_waves: bool = True):
        self.chat, self.says, self.in_waves, self.version = chat, says, in_waves, 3
        self.asked: dict[tuple, list[int]] = {}
        self.waiting: list[tuple] = []

    def add(self, key, ids, max_new_tokens, temperature):
        self.asked[key] = list(ids)
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
    """An environment in this process: `lengths` steps, reward 0.25 a step, success at the end."""

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


def test_the_endings_are_kept_apart(chat):  # BEHAVIOURS 16, 20, 21
    assert run(chat, Script(chat, [GO] * 9), Rooms())[0].end == "terminated"
    assert run(chat, Script(chat, [GO] * 9), Rooms(), max_turns=2)[0].end == "max_turns"
    broken = Rooms(lambda task, attempt: 1 / 0)
    (t,) = run(chat, Script(chat, [GO] * 9), broken)
    assert (t.end, t.success, broken.attempts["task 0"]) == (
        "error",
        False,
        2,
    ) and "ZeroDivisionError" in t.error


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
    assert short.end == "max_tokens" and not any(
        short.loss_mask
    )  # BEHAVIOURS 6: nothing to train on


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


def test_a_long_observation_is_clipped_before_it_is_read(chat):
    (t,) = run(
        chat,
        Script(chat, [GO] * 9),
        Rooms(lambda *_: Room(says="See: " + "wall " * 500)),
        max_observation_tokens=80,
    )
    assert "left out" in t.turns[1].observation and len(t.ids) < 400


def test_all_environments_of_a_turn_are_called_at_once():  # BEHAVIOURS 46
    chat = Chat(sft.make_tokenizer(["Thought: a\nAction: go"], 300))
    barrier = threading.Barrier(32, timeout=10)  # passes only when 32 threads stand at it
    rooms = Rooms(lambda *_: Room(on_step=lambda room: barrier.wait()))
    assert all(t.end == "terminated" for t in run(chat, Script(chat, [GO] * 9), rooms, 32))


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


def test_too_many_failures_stop_the_run_with_the_first_ones_words():  # BEHAVIOURS 44
    bad = Trajectory("rooms", "t", end="error", error="EnvError: gone")
    good = Trajectory("rooms", "t", end="terminated")
    check_errors([bad, good], 0.5)
    with pytest.raises(RolloutError, match="2 of 3 .* EnvError: gone"):
        check_errors([bad, bad, good], 0.5)
    with pytest.raises(RolloutError):
        check_errors([bad, bad], 1.0)


def test_a_server_killed_in_the_middle_costs_no_episode(chat):  # BEHAVIOURS 42, 48
    with EnvServers("textcraft", {"max_depth": "1"}) as servers:
        pool = EnvPool(servers.urls, grace=30)
        pool.check("textcraft")
        tasks = pool.clients[0].tasks("dev")[:8]
        killed = []

        def says(key: tuple) -> str:
            if key[-1] == 2 and not killed:
                import os
                import signal

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


def test_wrong_servers_are_named(chat):
    with pytest.raises(ValueError, match="no environment server at http://127.0.0.1:9"):
        EnvPool(["http://127.0.0.1:9"]).check("textcraft")
    with (
        EnvServers("textcraft") as servers,
        pytest.raises(ValueError, match="serves textcraft, but --env is babyai"),
    ):
        EnvPool(servers.urls).check("babyai")


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
    part = batch.select([1])
    assert (
        part.input_ids.tolist() == [[1, 5]]
        and part.loss_mask.int().tolist() == [[0, 1]]
        and part.old_logprobs is None
    )
    assert not batch.select([]).loss_mask.any() and batch.select([]).input_ids.shape == (1, 13)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120), st.integers(1, 5)
)
def test_micro_batches_hold_each_row_once_within_the_budget_and_ranks_get_equally_many(
    lengths, budget, world
):  # BEHAVIOURS 36
    groups = micro_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= budget
    dealt = [deal(groups, rank, world) for rank in range(world)]
    assert len({len(mine) for mine in dealt}) == 1
    assert sorted(row for mine in dealt for group in mine for row in group) == list(
        range(len(lengths))
    )
