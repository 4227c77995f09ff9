"""What several test files share: a model and a tokenizer of a few kilobytes, a server in a thread, one rank."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import signal
import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import model as weights
import sft
from agent import Chat
from env_server import create_app, make_server

torch.set_num_threads(1)
# A shell that starts the tests in the background has SIGINT ignored, and every child would inherit that: tests
# of what Ctrl-C does would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

TEXTS = ["Thought: I see it.\nAction: go to the red key\nSee: nothing. 0123456789"] * 3


@pytest.fixture(scope="session")
def tokenizer():
    return sft.make_tokenizer(TEXTS, 300)


@pytest.fixture(scope="session")
def chat(tokenizer) -> Chat:
    return Chat(tokenizer)


@pytest.fixture(scope="session")
def make_lm(tokenizer):
    """A random Qwen2 with two layers and some 25,000 parameters; the same one for the same seed."""

    def make(seed: int = 0, vocab: int = len(tokenizer)) -> Qwen2ForCausalLM:
        shape = Qwen2Config(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
            initializer_range=0.2,  # large, so that the next token is neither certain nor anybody's
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Qwen2ForCausalLM(shape).eval()

    return make


@pytest.fixture
def lm(make_lm) -> Qwen2ForCausalLM:
    return make_lm()


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one, without which nothing can be sharded or saved."""
    with weights.distributed():
        yield
    weights.mesh.cache_clear()


@contextmanager
def served(make_env, capacity: int = 64):
    """A server of this process on a free port; yields its address."""
    app = create_app(make_env, "toy", capacity)
    server = make_server(app, "127.0.0.1", 0)
    threading.Thread(target=server.run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        app.extensions["episodes"].close_all()
        server.task_dispatcher.shutdown()
        server.pull_trigger()  # wakes its loop up, which ends when its socket map is empty
        server.asyncore.close_all(server._map)


@pytest.fixture
def serve():
    """serve(make_env) -> the address of a server that lives as long as the test."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(served(*args, **settings))
