"""vLLM, the real one: its CPU build where there is no GPU. Slow to start, so one engine serves several tests."""

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip(
    "vllm", reason="vLLM is not installed: `make test` installs its CPU build beside a CPU torch"
)

from engines import VLLMEngine
from model import token_logprobs

CLOSE = 0.02  # nats: vLLM's kernels add up in another order


@pytest.fixture(scope="module", params=["tied", "untied"])
def sampler(request, tmp_path_factory, tokenizer):
    """(engine, a Hugging Face model with the same weights)."""
    # Loaded objects that vLLM's search for kernels must not touch; numba, which vLLM needs, brings them.
    pytest.importorskip("llvmlite.binding")

    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=request.param == "tied",
        initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = Qwen2ForCausalLM(shape).eval()
    folder = tmp_path_factory.mktemp(request.param)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # As instruct models ship it: every test here also shows that none of it is used.
    shipped = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    (folder / "generation_config.json").write_text(json.dumps(shipped))
    engine = VLLMEngine(str(folder), {5}, seed=1, max_tokens=256)
    yield engine, lm
    engine.close()


def finish(engine) -> dict:
    """Step until nothing is left: key -> (ids, logprobs)."""
    made = {}
    while engine.keys:
        made |= {key: (ids, logprobs) for key, ids, logprobs in engine.step()}
    return made


def plain(lm, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
    """The log-probabilities that the trainer gives to sampled tokens."""
    ids = torch.tensor([prompt + sampled])
    mask = torch.arange(ids.shape[1])[None] >= len(prompt)
    with torch.no_grad():
        hidden = lm.get_decoder()(ids, use_cache=False).last_hidden_state
        scores, _ = token_logprobs(hidden, lm.get_output_embeddings(), ids, mask, temperature)
    return scores[mask].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_distribution_sampled(sampler, temperature):  # BEHAVIOURS 24
    engine, lm = sampler
    prompts = {("a", i, 0): list(range(10 + i, 30 + 2 * i)) for i in range(6)}
    for key, prompt in prompts.items():
        engine.add(key, prompt, 12, temperature)
    made = finish(engine)
    assert made.keys() == prompts.keys()
    for key, (ids, logprobs) in made.items():
        assert 1 <= len(ids) <= 12 and 5 not in ids[:-1]
        assert logprobs == pytest.approx(plain(lm, prompts[key], ids, temperature), abs=CLOSE)


def test_a_models_own_settings_of_sampling_are_not_used(sampler):  # BEHAVIOURS 24, 25
    engine, lm = sampler
    prompt, ranks = [11, 12, 13] * 4, []  # repetition_penalty would act on these
    for i in range(8):
        engine.add(("own", i), prompt, 16, 1.3)
    for ids, logprobs in finish(engine).values():
        assert logprobs == pytest.approx(plain(lm, prompt, ids, 1.3), abs=CLOSE)
        with torch.no_grad():
            rows = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        ranks += (rows > rows.gather(1, torch.tensor(ids)[:, None])).sum(1).tolist()
    assert max(ranks) >= 20  # top_k would not have let this through


def test_greedy_is_the_most_likely_token_of_the_trainer(sampler):
    engine, lm = sampler
    prompt = list(range(20, 40))
    engine.add(("g", 0), prompt, 10, 0.0)
    ids, logprobs = finish(engine)["g", 0]
    with torch.no_grad():
        rows = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert logprobs == pytest.approx(rows.amax(-1).tolist(), abs=CLOSE)  # ties apart, the same ids


def test_new_weights_are_sampled_from_at_once(sampler):  # BEHAVIOURS 30, 31
    engine, lm = sampler
    prompt = list(range(30, 94))  # whole cache blocks: a stale one would be found again
    generator = torch.Generator().manual_seed(0)
    for version in (1, 2):
        engine.add(("before", version), prompt, 6, 1.0)
        finish(engine)
        with torch.no_grad():  # every parameter changes, the tied ones too
            for parameter in lm.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        engine.sync(((name, p.detach()) for name, p in lm.named_parameters()), version)
        engine.add(("after", version), prompt, 6, 1.0)
        ids, logprobs = finish(engine)["after", version]
        assert logprobs == pytest.approx(plain(lm, prompt, ids, 1.0), abs=CLOSE)
        assert engine.version == version


def test_a_turn_reads_only_what_is_new(sampler):
    engine, _ = sampler
    history = list(range(10, 138))
    engine.add(("t", 0), history, 8, 1.0)
    ids, _ = finish(engine)["t", 0]
    known, asked = engine.cached_tokens, engine.prompt_tokens
    engine.add(("t", 1), history + ids + [7] * 20, 8, 1.0)
    finish(engine)
    assert engine.prompt_tokens - asked == len(history) + len(ids) + 20
    assert engine.cached_tokens - known == len(history)  # 128: whole blocks, of 16 or of 128 tokens
