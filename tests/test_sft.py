"""Demonstrations, the tiny model and its tokenizer, and the cache of starting policies."""

import dataclasses
import itertools
from itertools import islice

import pytest
import torch
import torch.distributed as dist

import model as weights
import sft
from agent import Chat

CONFIG = sft.Config(demos=40, updates=3, batch_tokens=600, hidden=32, layers=1)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    torch.set_num_threads(1)
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if started_here:
        dist.destroy_process_group()
        weights.mesh.cache_clear()


@pytest.fixture(scope="module")
def demos() -> list[sft.Demonstration]:
    return sft.demonstrate("babyai", {}, 40, CONFIG)


def tokenizer_for(demos, vocab: int = 512):
    return sft.make_tokenizer(
        [text for demo in demos for turn in demo.turns for text in (demo.first, turn[0], turn[2])],
        vocab,
    )


def test_demonstrations_are_successes_with_some_noise(demos):
    assert len(demos) == 40 and all(demo.turns[-1][2] == "Goal reached." for demo in demos)
    turns = [turn for demo in demos for turn in demo.turns]
    noise = sum(not is_experts for _, is_experts, _ in turns) / len(turns)
    assert 0.05 < noise < 0.25
    assert demos == sft.demonstrate("babyai", {}, 40, CONFIG)  # seeded
    assert demos != sft.demonstrate("babyai", {}, 40, dataclasses.replace(CONFIG, seed=1))


@pytest.mark.parametrize("env", ["babyai", "textcraft", "searchqa"])
def test_demonstrations_show_refusals_and_how_to_go_on(env):
    """The clone of demonstrations without refusals answered "You have not seen such an object." with noise."""
    demos = sft.demonstrate(env, {}, 60, dataclasses.replace(CONFIG, noise=0.3))
    mistakes = [turn for demo in demos for turn in demo.turns if not turn[1]]
    replies = [reply for _, _, reply in mistakes]
    assert any(reply.startswith("No action found") for reply in replies)
    assert any(reply.startswith("2 actions found") for reply in replies)
    here = [
        action == other
        for completion, _, _ in mistakes
        if completion.count("Action:") == 2
        for action, other in [completion.split("\nAction: ")[1:]]
    ]
    assert not all(here)  # actions of other moments are among them
    assert any(  # and the expert goes on from there
        not is_experts and then_experts
        for demo in demos
        for (_, is_experts, _), (_, then_experts, _) in itertools.pairwise(demo.turns)
    )
    if env == "babyai":
        assert any(reply == "You have not seen such an object." for reply in replies)
        assert not any(
            reply == "You have not seen such an object."
            for demo in demos
            for _, is_experts, reply in demo.turns
            if is_experts
        )


def test_only_the_experts_words_are_learnt(demos):
    chat = Chat(tokenizer_for(demos))
    demo = next(demo for demo in demos if not all(is_experts for _, is_experts, _ in demo.turns))
    t = sft.as_trajectory(demo, chat, "Do it.")
    learnt = chat.tokenizer.decode([i for i, mask in zip(t.ids, t.loss_mask, strict=True) if mask])
    assert learnt == "".join(f"{words}<|end|>" for words, is_experts, _ in demo.turns if is_experts)
    assert len(t.ids) == len(t.loss_mask) == len(t.logprobs)


def test_the_tiny_tokenizer_spells_anything_and_knows_the_common_words(demos):
    tokenizer = tokenizer_for(demos)
    for text in ("Thought: I want red key.", "naïve 日本 \x00 \n\n  x"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode(" Thought", add_special_tokens=False)) <= 2
    assert len(tokenizer) <= 512
    assert Chat(tokenizer).end_of_turn == tokenizer.eos_token_id


@pytest.mark.parametrize("env", ["babyai", "textcraft", "searchqa"])
def test_a_clone_reads_the_ids_that_it_has_learnt(env, tmp_path):
    """Beside a Qwen2 a saved tokenizer comes back as Qwen2's, which cuts " 1" in two: all ids would differ."""
    config = dataclasses.replace(CONFIG, env=(env,), demos=20)
    demos, instructions = sft.gather_demonstrations(config)
    folder = sft.starting_policy(config, tmp_path)
    made, found = tokenizer_for(demos, config.vocab), weights.load(folder)[1]
    assert len(made) == len(found) == len(found.get_vocab())
    for demo in demos:
        learnt, read = (sft.as_trajectory(demo, Chat(t), instructions[env]) for t in (made, found))
        assert learnt.ids == read.ids
    for text in (
        " 12 planks, 3x",
        "a-b (c).\n\nThought: 10",
        "<|endoftext|>",
        "naïve 日本 \t\r\n x",
        "I'm IT'S",
    ):
        ids = [t.encode(text, add_special_tokens=False) for t in (made, found)]
        assert ids[0] == ids[1] and max(ids[0]) < weights.load(folder)[0].config.vocab_size


def test_the_order_of_demonstrations_repeats_none_before_all_have_been_seen():
    stream = list(islice(sft.shuffled(list("abcde"), ("x",)), 15))
    assert sorted(stream[:5]) == sorted(stream[5:10]) == sorted(stream[10:]) == list("abcde")
    assert stream[:5] != stream[5:10]


def test_a_starting_policy_is_made_once_and_again_when_anything_changes(tmp_path, monkeypatch):
    folder = sft.starting_policy(CONFIG, tmp_path)
    made = []
    monkeypatch.setattr(sft, "gather_demonstrations", lambda config: made.append(config) or 1 / 0)
    assert sft.starting_policy(CONFIG, tmp_path) == folder and not made
    with pytest.raises(ZeroDivisionError):
        sft.starting_policy(dataclasses.replace(CONFIG, lr=1e-3), tmp_path)
    lm, tokenizer = weights.load(folder)
    assert lm.config.hidden_size == 32 and tokenizer.chat_template


def test_cloning_lowers_the_loss(demos):
    tokenizer = tokenizer_for(demos)
    chat = Chat(tokenizer)
    trajectories = [sft.as_trajectory(demo, chat, "") for demo in demos]

    def loss_after(updates: int) -> float:
        actor = weights.shard(weights.Actor(sft.make_tiny(tokenizer, CONFIG)), weights.mesh())
        return sft.clone(
            actor,
            trajectories,
            dataclasses.replace(CONFIG, updates=updates),
            tokenizer.pad_token_id,
        )

    assert loss_after(30) < loss_after(2) - 1.0


def test_an_expert_that_hardly_ever_succeeds_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="raise --demo-turns"):
        sft.demonstrate("textcraft", {}, 10, dataclasses.replace(CONFIG, demo_turns=1))


@pytest.mark.parametrize("layers", [2, 4])
def test_a_model_with_a_copy_head_repeats_what_it_has_never_seen(demos, layers):
    """Untrained, on random tokens: nothing but the pair of heads can tell what comes next."""
    tokenizer = tokenizer_for(demos)
    once = torch.randint(4, len(tokenizer), (8, 24), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([once, once], 1)

    def share_right(copy_head: bool) -> float:
        config = dataclasses.replace(CONFIG, hidden=128, layers=layers, copy_head=copy_head)
        with torch.no_grad():
            says = sft.make_tiny(tokenizer, config)(ids).logits.argmax(-1)
        return (says[:, 24:-1] == ids[:, 25:]).float().mean().item()

    assert share_right(True) > 0.6
    assert share_right(False) < 0.1


def test_a_copy_head_needs_two_layers():
    with pytest.raises(ValueError, match="--layers 1"):
        sft.Config(copy_head=True, layers=1)
