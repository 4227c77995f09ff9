"""Samplers: the same tokens alone and in company, from new weights at once, and never from stale keys."""

import json
import math
import random

import pytest
import torch

from agent import Trajectory
from engines import HFEngine, SlotCache, sample
from model import Actor, load

# --- the sampler ---


@pytest.fixture
def lm(make_lm):
    return make_lm(vocab=64)


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
        finished = drain(engine)
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


def drain(engine: HFEngine) -> list[tuple]:
    """What all waiting requests get, stragglers included."""
    finished = []
    while part := engine.step():
        finished += part
    return finished


def test_stragglers_are_not_waited_for_and_lose_nothing(lm):
    engine = HFEngine(lm, {-1}, seed=1)
    lengths = [30, 25] + [2, 3] * 8  # of the 18 rows of this wave two are an eighth, rounded down
    for i, most in enumerate(lengths):
        engine.add(("x", i, 0), [11 + i, 12, 13], most, 0.7)
    waves = [{key[1]: rest for key, *rest in engine.step()}]
    assert set(waves[0]) == set(range(2, 18))
    engine.add(("x", 5, 1), [11 + 5, 12, 13, *waves[0][5][0], 20], 4, 0.7)  # others join them
    waves += [{key[1]: rest for key, *rest in engine.step()}]
    assert set(waves[1]) == {0, 1, 5} and engine.step() == []
    for wave, row, turn in ((0, 7, 0), (1, 0, 0), (1, 1, 0), (1, 5, 1)):
        most = 4 if turn else lengths[row]
        prompt = [11 + row, 12, 13] + ([*waves[0][row][0], 20] if turn else [])
        fresh = HFEngine(lm, {-1}, seed=1)
        fresh.add(("x", row, turn), prompt, most, 0.7)
        ((_, ids, logprobs),) = fresh.step()
        assert waves[wave][row][0] == ids and len(ids) == most
        assert waves[wave][row][1] == pytest.approx(logprobs, abs=1e-5)


def alone(lm, key: tuple, ids: list[int], most: int, temperature: float = 0.7):
    """One request to an engine of its own: (ids, logprobs)."""
    engine = HFEngine(lm, {5, 6, 7, 8, 9}, seed=1)
    engine.add(key, ids, most, temperature)
    return engine.step()[0][1:]


def test_a_row_gets_the_same_tokens_alone_and_in_company(lm):
    rows = {("x", i, 0): ([11 + i, 12, 13 + 2 * i][: 1 + i % 3], 1 + 5 * i) for i in range(9)}
    engine = HFEngine(lm, {5, 6, 7, 8, 9}, seed=1)
    for key in random.Random(0).sample(sorted(rows), 9):
        engine.add(key, *rows[key], 0.7)
    for key, ids, logprobs in drain(engine):
        # company may ask for more tokens, and so for more random numbers, than this row does
        own_ids, own_logprobs = alone(lm, key, *rows[key])
        assert ids == own_ids and len(ids) <= rows[key][1]
        assert logprobs == pytest.approx(own_logprobs, abs=1e-5)
    assert alone(lm, ("x", 8, 0), *rows["x", 8, 0]) != alone(lm, ("x", 8, 1), *rows["x", 8, 0])


def test_greedy_and_sampled_rows_share_a_wave(lm):
    engine = HFEngine(lm, {-1}, seed=1)
    for i, temperature in enumerate([0.0, 1.0, 0.5]):
        engine.add((i, 0), [11, 12, 13], 8, temperature)
    greedy, hot, cool = (result[1:] for result in engine.step())
    ids = torch.tensor([[11, 12, 13, *greedy[0]]])
    rows = lm(ids).logits[0, 2:-1]
    assert greedy[0] == rows.argmax(-1).tolist() and greedy[0] != hot[0]
    assert greedy[1] == pytest.approx(rows.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
    for (sampled, logprobs), temperature in ((hot, 1.0), (cool, 0.5)):
        ids = torch.tensor([[11, 12, 13, *sampled]])
        plain = (lm(ids).logits[0, 2:-1] / temperature).log_softmax(-1)
        plain = plain.gather(1, ids[0, 3:, None])[:, 0]  # BEHAVIOURS 24
        assert logprobs == pytest.approx(plain.tolist(), abs=1e-4)


# What instruct models ship in generation_config.json, for `generate` and for servers. A sampler that took any of it
# would sample from another distribution than the one trained.
SHIPPED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
}


def test_a_models_own_settings_of_sampling_are_not_used(make_lm, tokenizer, tmp_path):
    # BEHAVIOURS 24, 25: the first update's ratio is 1
    make_lm().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(SHIPPED))
    lm, _ = load(str(tmp_path))
    assert (lm.generation_config.top_k, lm.generation_config.top_p) == (20, 0.8)
    engine, actor, ranks = HFEngine(lm, {-1}, seed=1), Actor(lm), []
    prompt = [11, 12, 13] * 4
    for i in range(8):
        engine.add(("x", i, 0), prompt, 16, 1.3)
    for _, sampled, logprobs in drain(engine):
        ids = torch.tensor([prompt + sampled])
        mask = torch.arange(ids.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            old_logprobs, _ = actor(ids, mask, 1.3)
            rows = lm(ids).logits[0, len(prompt) - 1 : -1]
        ratio = (old_logprobs[mask] - torch.tensor(logprobs)).exp()
        torch.testing.assert_close(ratio, torch.ones(16), atol=1e-3, rtol=0)
        ranks += (rows > rows.gather(1, ids[0, len(prompt) :, None])).sum(1).tolist()
    assert max(ranks) >= 20  # top_k would not have let this through
    lm.save_pretrained(tmp_path / "checkpoint")  # and what is trained from it can be saved


def test_the_same_question_may_be_asked_again(lm):
    # after one sampled token the cache holds exactly the question: nothing of it is new
    engine = HFEngine(lm, {-1})
    answers = []
    for turn in range(3):
        engine.add(("x", turn), [11, 12, 13], 1, 0.0)
        answers.append(engine.step()[0][1:])
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert engine.step() == []  # and no question is no answer


def test_only_what_is_new_is_read(lm):
    read = []
    engine = HFEngine(lm, {-1}, seed=1)
    forward = engine._forward
    engine._forward = lambda rows, ids, start: read.append(ids.numel()) or forward(rows, ids, start)
    history = list(range(10, 40))
    engine.add(("x", 0), history, 4)
    history = history + engine.step()[0][1] + [50, 51]
    assert read == [30, 1, 1, 1]
    read.clear()
    engine.add(("x", 1), history, 1)
    engine.step()
    assert read == [3]  # the last token sampled, which nobody has read yet, and two of context
    read.clear()
    engine.sleep()  # gives its memory back: BEHAVIOURS 31
    engine.wake()
    engine.add(("x", 2), history, 1)
    engine.step()
    assert read == [len(history)]


def test_slots_keep_what_they_hold_while_the_cache_grows_and_moves():
    cache = SlotCache()

    def write(rows: slice, positions: list[list[int]], value: float):
        cache.rows, cache.positions = rows, torch.tensor(positions)
        cache.columns = int(cache.positions.max()) + 1
        new = torch.full((rows.stop - rows.start, 2, len(positions[0]), 3), value)
        keys, values = cache.update(new, -new, 0)
        assert torch.equal(keys, -values)
        return keys[:, 0, :, 0].tolist()

    assert write(slice(0, 1), [[0, 1]], 1.0) == [[1, 1]]
    assert write(slice(0, 2), [[2], [0]], 2.0) == [[1, 1, 2], [2, 0, 0]]
    assert write(slice(1, 2), [[1]], 3.0) == [[2, 3]]
    cache.move(torch.tensor([0, 1]), torch.tensor([1, 0]))  # an exchange
    assert write(slice(0, 2), [[2], [3]], 4.0) == [[2, 3, 4, 0], [1, 1, 2, 4]]
    sizes = set()
    for column in range(3, 64):
        write(slice(0, 1), [[column]], 5.0)
        sizes.add(cache.keys[0].shape[2])
    assert len(sizes) <= 6  # by doubling, not by one
    assert write(slice(0, 2), [[64], [4]], 6.0)[1][:5] == [1, 1, 2, 4, 6]


def test_new_weights_are_used_at_once_and_no_old_key_or_value_survives(lm):
    # BEHAVIOURS 30, 31
    engine = HFEngine(lm, {-1}, seed=1)
    history = [11, 12, 13, 14]
    old = {name: p.detach().clone() for name, p in lm.named_parameters()}
    new = {name: p + 0.05 * torch.ones_like(p).cumsum(0).sin() for name, p in old.items()}

    def next_turn(engine, turn: int) -> tuple[list[int], list[float]]:
        engine.add(("x", turn), history, 6)
        return engine.step()[0][1:]

    for turn, weights in enumerate([None, new, None, old, new]):  # in the middle of a trajectory
        if weights:
            engine.sync(weights.items(), version=turn)
            assert engine.version == turn
        ids, logprobs = next_turn(engine, turn)
        fresh_ids, fresh_logprobs = next_turn(HFEngine(lm, {-1}, seed=1), turn)
        assert ids == fresh_ids and logprobs == pytest.approx(fresh_logprobs, abs=1e-5)
        history = history + ids + [20, 21]
    before = next_turn(engine, 9)[1]
    engine.sync(old.items(), version=9)
    assert next_turn(engine, 9)[1] != before


def test_another_history_under_the_same_key_is_read_from_its_start(lm):
    # an episode that is played again may see other things the second time
    engine = HFEngine(lm, {-1}, seed=1)
    engine.add(("x", 0), [11, 12, 13], 4, 0.7)
    engine.step()
    other = list(range(30, 45))
    engine.add(("x", 1), other, 4, 0.7)
    ids, logprobs = engine.step()[0][1:]
    fresh = HFEngine(lm, {-1}, seed=1)
    fresh.add(("x", 1), other, 4, 0.7)
    assert (ids, pytest.approx(logprobs, abs=1e-5)) == fresh.step()[0][1:]


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


def test_the_last_uniform_never_falls_on_a_token_without_probability():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 50, generator=generator)
    logits[:, 40:] = -math.inf  # the end of the vocabulary is impossible
    logits[:, :5] = -math.inf  # and so is its start
    for uniform in (1 - 2**-24, 0.0):  # the largest and the smallest that torch.rand can give
        tokens, logprobs = sample(logits, torch.ones(400), torch.full((400,), uniform))
        assert logprobs.isfinite().all()
        assert (tokens == (39 if uniform else 5)).all()


def test_tokens_come_as_often_as_their_probabilities_say():
    n, p = 40_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample(p.log().expand(n, 4), torch.ones(n), uniforms)
    frequency = tokens.bincount(minlength=4) / n
    assert (frequency - p).abs().max() < 0.01  # four standard deviations are 0.01
    cooled = p**2 / (p**2).sum()
    tokens, _ = sample(p.log().expand(n, 4), torch.full((n,), 0.5), uniforms)
    assert (tokens.bincount(minlength=4) / n - cooled).abs().max() < 0.01
