"""Models behind an address: the same episodes as from local weights, and what a server may do to a request."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import api_model
import envs
import evaluate
import model as weights
import sft
from agent import FORMAT, Chat, Trajectory
from api_model import ApiClient, ApiEngine, ApiError, MessageChat, connect, read_reply, retry_after
from engines import HFEngine
from model import load
from rollout import Limits, RolloutError, check_errors, rollout

ROOT = Path(__file__).parents[1]
HELLO = [{"role": "user", "content": "hello"}]


def completion(text: str | None, read: int = 7, written: int = 3, why: str = "stop") -> dict:
    """What an OpenAI-compatible server sends back."""
    message = {"role": "assistant", "content": text}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": why}],
        "usage": {"prompt_tokens": read, "completion_tokens": written},
    }


@contextmanager
def api_server(answer):
    """A server in a thread: answer(body, headers) -> a completion, or (status, headers, anything).

    yields  its address; `answer.asked` lists what it was asked
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer.asked.append((self.path, body))
            reply = answer(body, self.headers)
            status, headers, payload = reply if isinstance(reply, tuple) else (200, {}, reply)
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    answer.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(monkeypatch):
    """ask(*replies) -> (the client's reply, how many requests it took); pauses are a hundredth of the real ones."""
    monkeypatch.setattr(ApiClient, "PAUSE", 0.01)
    monkeypatch.setattr(ApiClient, "PATIENCE", 5.0)

    def run(*replies, timeout: float = 5.0):
        left = iter(replies)

        def answer(body, headers):
            reply = next(left)
            return reply() if callable(reply) else reply

        with api_server(answer) as url:
            client = ApiClient(url, "toy", timeout)
            try:
                return client.ask(HELLO, 5, 0.5), len(answer.asked)
            finally:
                assert client.retries == len(answer.asked) - 1
                run.asked = answer.asked

    return run


# --- one request ---


def test_a_request_says_what_is_wanted_and_no_more(ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    seen = []

    def answer(body, headers):
        seen.append(headers["Authorization"])
        return completion("yes")

    with api_server(answer) as url:
        reply = ApiClient(url + "/", "toy").ask(HELLO, 5, 0.5)
        monkeypatch.delenv("OPENAI_API_KEY")
        ApiClient(url, "toy").ask(HELLO, 5, 0.5)
    assert reply == api_model.Reply("yes", False, 7, 3)
    body = {"model": "toy", "messages": HELLO, "max_tokens": 5, "temperature": 0.5}
    assert answer.asked == [("/v1/chat/completions", body)] * 2
    assert seen == ["Bearer sk-right", None]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_what_may_pass_is_asked_again(ask, status):
    busy = (status, {}, {"error": {"message": "busy"}})
    reply, asked = ask(busy, busy, completion("yes"))
    assert (reply.text, asked) == ("yes", 3)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 301])
def test_what_stays_refused_is_not(ask, status):
    with pytest.raises(ApiError, match=f"answered {status}: no and no") as refusal:
        ask((status, {}, b"no\nand   no"))
    assert refusal.value.status == status and len(ask.asked) == 1


def test_a_server_says_how_long_to_wait(ask):
    began = time.monotonic()
    reply, asked = ask((429, {"Retry-After": "1"}, {}), completion("yes"))
    assert (reply.text, asked) == ("yes", 2) and 1 <= time.monotonic() - began < 3
    began = time.monotonic()
    with pytest.raises(ApiError, match="429"):  # longer than anybody will wait: said at once
        ask((429, {"Retry-After": "3600"}, {}))
    assert time.monotonic() - began < 1


def test_retry_after_in_all_its_forms():
    assert retry_after({}) == 0 and retry_after({"Retry-After": "2.5"}) == 2.5
    assert retry_after({"Retry-After": "-3"}) == 0 and retry_after({"Retry-After": "soon"}) == 0
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    assert retry_after({"Retry-After": in_a_minute}) == pytest.approx(60, abs=2)
    assert retry_after({"Retry-After": formatdate(0, usegmt=True)}) == 0


def test_pauses_grow_and_differ(ask, monkeypatch):
    pauses = []
    monkeypatch.setattr(api_model.time, "sleep", pauses.append)
    monkeypatch.setattr(ApiClient, "PAUSE", 1.0)
    monkeypatch.setattr(ApiClient, "LONGEST", 4.0)
    ask(*[(500, {}, {})] * 5, completion("yes"))
    for pause, most in zip(pauses, [1, 2, 4, 4, 4], strict=True):
        assert most / 2 <= pause <= most
    assert len(set(pauses)) == 5


def test_no_reply_in_time_is_asked_again(ask):
    reply, asked = ask(lambda: time.sleep(1) or completion("late"), completion("yes"), timeout=0.2)
    assert (reply.text, asked) == ("yes", 2)


def test_nobody_there(monkeypatch):
    monkeypatch.setattr(ApiClient, "PATIENCE", 0.0)
    with pytest.raises(ApiError, match="no reply from http://127.0.0.1:9/v1"):
        ApiClient("http://127.0.0.1:9/v1", "toy").ask(HELLO, 5, 0.5)


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>hello</html>",
        b'{"choices": [',
        b"[]",
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        completion(None),
        completion(None, why="content_filter"),
        {
            "choices": [{"message": {"content": "yes"}}]
        },  # no usage: nothing to hold max_tokens against
        {"error": {"message": "in a reply of status 200"}},
    ],
)
def test_a_reply_that_is_none_is_said_and_not_asked_for_again(ask, reply):
    with pytest.raises(ApiError, match="expected a chat completion"):
        ask((200, {}, reply))


def test_a_model_that_thought_until_it_was_cut_off_has_said_nothing():
    data = json.dumps(completion(None, why="length")).encode()
    assert read_reply(data) == api_model.Reply("", True, 7, 3)


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {
            "message": "This model's maximum context length is 4096 tokens. However, you requested 5000."
        },
    ],
)
def test_a_conversation_that_no_longer_fits_has_ended_and_is_no_error(said):
    def answer(body, headers):
        return 400, {}, said

    with api_server(answer) as url:
        engine = ApiEngine(ApiClient(url, "toy"), max_tokens=8000)
        engine.add(("k",), [*HELLO], 5)
        finished = []
        while not finished:
            finished = engine.step()
    assert finished == [(("k",), [], [])]


def test_a_key_is_never_shown(ask, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(
        ApiError, match="401: .*no such key as <key>.*; set OPENAI_API_KEY"
    ) as refusal:
        ask((401, {}, {"error": {"message": "no such key as sk-secret"}}))
    assert "secret" not in str(refusal.value)
    for status, reply in ((401, b"x" * 296 + b"sk-secret"), (200, b"thanks for sk-secret")):
        with pytest.raises(
            ApiError
        ) as refusal:  # at the very place where the text is cut, and in a bad reply
            ask((status, {}, reply))
        assert "sk-" not in str(refusal.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(ValueError, match="OPENAI_API_KEY must be ASCII") as refusal:
        ApiClient("http://127.0.0.1:9/v1", "toy")
    assert "secret" not in str(refusal.value)


# --- before long work ---


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"api_url": "localhost:8000/v1"}, "--api-url takes an address like http://"),
        ({"api_url": "http:///v1"}, "--api-url takes an address like http://"),
        ({"api_url": "http://me:secret@host/v1"}, "put the key into OPENAI_API_KEY"),
        ({"api_url": "http://host/v1?key=secret"}, "put the key into OPENAI_API_KEY"),
        ({"api_url": "http://host/v1", "engine": "hf"}, "give one of them"),
        ({"prompt_price": -1.0}, "--prompt-price"),
    ],
)
def test_a_wrong_flag_is_refused(flags, says):
    with pytest.raises(ValueError, match=says) as refusal:
        evaluate.Config(**flags)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("status", "reply", "says"),
    [
        (404, {"error": {"message": "no such model"}}, 'no such model"}}; is there a model'),
        (404, {"detail": "Not Found"}, "does --api-url end as it should"),
        (401, b"who are you?", "401: who are you?; set OPENAI_API_KEY"),
        (400, b"temperature must be 1", "400: temperature must be 1"),
        (200, {"choices": []}, "expected a chat completion"),
    ],
)
def test_the_first_request_finds_what_is_wrong(one_rank, status, reply, says):
    with api_server(lambda body, headers: (status, {}, reply)) as url:
        with pytest.raises(ValueError, match="--model toy can't be asked") as refusal:
            connect(ApiClient(url, "toy"), 1.0, 100)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_first_request_learns_how_a_server_wants_to_be_asked(one_rank):
    def answer(body, headers):
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return 400, {}, {"error": {"message": said}}
        if body["messages"][0]["role"] == "system":
            return 400, {}, {"error": {"message": "System role not supported"}}
        return completion("yes")

    with api_server(answer) as url:
        chat, engine = connect(ApiClient(url, "toy"), 1.0, 100)
        engine.add(("x", 0), chat.prompt("Do it.", "See."), 5)
        assert finish(engine)[0][1][-2]["content"] == "yes"
    body = answer.asked[-1][1]
    assert body["messages"] == [{"role": "user", "content": f"Do it.\n\n{FORMAT}\n\nSee."}]
    assert body["max_completion_tokens"] == 5 and len(answer.asked) == 4


# --- whole episodes ---


def finish(engine: ApiEngine) -> list[tuple]:
    """The next turn to come back."""
    deadline = time.monotonic() + 10
    while not (finished := engine.step()):
        assert time.monotonic() < deadline
    return finished


class Signs:
    """An environment in this process: take what the sign names, and the next sign is up. `black` ends it all."""

    def __init__(self, task: str):
        self.left = task.split()

    def reset(self) -> str:
        return f"Sign: {self.left[0]}."

    def step(self, action: str):
        sign = self.left[0]
        if action == f"take {sign}":
            self.left.pop(0)
        lost, won = sign == "black" and action != "take black", not self.left
        seen = "Lost." if lost else "Done." if won else f"Sign: {self.left[0]}."
        return seen, float(won), lost or won, False, {"success": won}

    def close(self):
        pass


class SignPool:
    """Stands in for EnvPool."""

    instructions = "Take what the sign names."

    def start(self, preferred: int, task: str, seed: int):
        episode = Signs(task)
        return episode, episode.reset(), {"success": False, "category": task.split()[-1]}

    def give_back(self, episode):
        pass


TASKS = ["red green", "green blue red", "blue grey", "black red", "green black", "red red blue"]
# What the model below has learnt by heart. On grey it does what changes nothing, on black what ends the episode.
LEARNT = {"red": "red", "green": "green", "blue": "blue", "grey": "red", "black": "blue"}
ALWAYS = "Thought: I go.\nAction: go to green box 1"  # and this in BabyAI
TURNS = 4


def demonstrations() -> list[sft.Demonstration]:
    """Episodes of a player who knows LEARNT, and of one who says ALWAYS."""
    demos = []
    for task in [*TASKS, *map(" ".join, itertools.product(LEARNT, repeat=2))]:
        game, turns, is_over = Signs(task), [], False
        first = game.reset()
        while not is_over and len(turns) < TURNS:
            sign = game.left[0]
            words = f"Thought: I see {sign}.\nAction: take {LEARNT[sign]}"
            seen, _, is_over, *_ = game.step(words.partition("Action: ")[2])
            turns.append((words, True, seen))
        demos.append(sft.Demonstration("signs", task, first, turns))
    env = envs.make("babyai")
    for task in env.tasks("test")[:10]:
        turns, is_over = [], False
        first, _ = env.reset(options={"task": task})
        while not is_over and len(turns) < TURNS:
            seen, _, is_over, *_ = env.step(ALWAYS.partition("Action: ")[2])
            turns.append((ALWAYS, True, seen))
        demos.append(sft.Demonstration("babyai", task, first, turns))
    return demos


@pytest.fixture(scope="module")
def parrot(one_rank, tmp_path_factory) -> str:
    """The folder of a model that has learnt those by heart, so that it writes nothing but their tokens.

    A model that writes a word in other tokens than its tokenizer would plays another episode behind an address: the
    server reads its words again, as the tokenizer spells them. (BEHAVIOURS 1)
    """
    demos = demonstrations()
    texts = [
        text for demo in demos for turn in demo.turns for text in (demo.first, turn[0], turn[2])
    ]
    tokenizer = sft.make_tokenizer(texts, 400)
    chat = Chat(tokenizer)
    config = sft.Config(updates=100, batch_tokens=600, hidden=64, layers=2, lr=5e-3)
    actor = weights.Actor(sft.make_tiny(tokenizer, config))
    sft.clone(actor, [sft.as_trajectory(demo, chat, "") for demo in demos], config, 0)
    folder = tmp_path_factory.mktemp("parrot")
    actor.lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def greedy_server(path: str):
    """What `vllm serve` does, greedily: the model's own chat template, text in, text out."""
    lm, tokenizer = load(path)
    lm.eval()
    stop, one_at_a_time = Chat(tokenizer).stop_ids, threading.Lock()

    def answer(body, headers):
        assert body["temperature"] == 0
        text = tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        with one_at_a_time, torch.inference_mode():
            out = lm.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=body["max_tokens"],
                eos_token_id=sorted(stop), pad_token_id=0,
            )  # fmt: skip
        written = out[0, len(prompt) :].tolist()
        why = "stop" if written[-1] in stop else "length"
        text = tokenizer.decode(written, skip_special_tokens=True)
        return completion(text, len(prompt), len(written), why)

    return answer


@pytest.mark.parametrize(
    ("max_tokens", "ends"),
    [
        (1500, {"terminated": 5, "max_turns": 1}),
        (50, {"terminated": 3, "max_tokens": 3}),  # full in the middle of a third turn
        (45, {"terminated": 3, "max_tokens": 3}),  # full before it
    ],
)
def test_a_model_plays_the_same_behind_an_address(one_rank, parrot, max_tokens, ends):
    lm, tokenizer = load(parrot)
    limits = Limits(max_turns=TURNS, max_tokens=max_tokens)

    def play(engine, chat) -> list[Trajectory]:
        blanks = [Trajectory("signs", task, i) for i, task in enumerate(TASKS)]
        return rollout(
            engine, chat, {"signs": SignPool()}, blanks, limits, ("test",), temperature=0
        )

    chat, answer = Chat(tokenizer), greedy_server(parrot)
    here = play(HFEngine(lm.eval(), chat.stop_ids), chat)
    with api_server(answer) as url:
        messages, engine = connect(ApiClient(url, "parrot"), 0.0, max_tokens)
        there = play(engine, messages)
    for a, b in zip(here, there, strict=True):
        assert (a.task, a.end, a.success, a.error) == (b.task, b.end, b.success, "")
        assert (a.episode_return, a.category) == (b.episode_return, b.category)
        assert [turn.observation for turn in a.turns] == [turn.observation for turn in b.turns]
        # The server's count of tokens is ours, turn by turn. Only a last turn that does not fit is another one: our
        # sampler is stopped at the limit, the server writes on, and neither is acted on.
        last = len(a.turns) - (a.end == "max_tokens")
        assert [turn.action for turn in a.turns[:last]] == [turn.action for turn in b.turns[:last]]
        assert [turn.stop for turn in a.turns[:last]] == [turn.stop for turn in b.turns[:last]]
    assert Counter(t.end for t in there) == ends
    assert [t.success for t in there if t.end == "terminated"].count(True) >= 1
    assert all(t.turns[0].action == f"take {LEARNT[t.task.split()[0]]}" for t in there)
    system, first = answer.asked[1][1]["messages"][:2]
    text = f"{SignPool.instructions}\n\n{FORMAT}"
    assert system == {"role": "system", "content": text} and first["role"] == "user"


class Counting:
    """An environment in this process that counts: 3 turns, then success; `says` is what is seen."""

    def __init__(self, says: str):
        self.says, self.taken = says, 0

    def step(self, action: str):
        self.taken += 1
        return self.says, 0.5, self.taken == 3, False, {"success": self.taken == 3}

    def close(self):
        pass


class Counters:
    """Stands in for EnvPool: what an episode sees is the name of its task."""

    instructions = "Count."

    def start(self, preferred: int, task: str, seed: int):
        return Counting(task), task, {"success": False}

    def give_back(self, episode):
        pass


GO = "Thought: a\nAction: go"


def play(url: str, count: int, max_tokens: int = 10**6, **limits) -> tuple[list, ApiEngine]:
    engine = ApiEngine(ApiClient(url, "toy"), max_tokens)
    blanks = [Trajectory("toy", f"task {i}", i) for i in range(count)]
    limits = Limits(max_tokens=max_tokens, **limits)
    return rollout(engine, MessageChat(), {"toy": Counters()}, blanks, limits, ("test",)), engine


def test_requests_are_really_under_way_together(one_rank):
    together = threading.Barrier(12)

    def answer(body, headers):
        together.wait(timeout=20)  # nobody is answered before all twelve have asked
        return completion(GO)

    with api_server(answer) as url:
        done, _ = play(url, 12)
    assert all(t.success and len(t.turns) == 3 for t in done)


def test_tokens_are_added_up_and_priced(one_rank):
    counter = itertools.count(1)

    def answer(body, headers):
        if next(counter) == 3:
            return 500, {}, {}
        return completion(GO, read=100 * len(body["messages"]), written=7)

    with api_server(answer) as url:
        _, engine = play(url, 2)
    engine.client.prices = (2.0, 10.0)  # dollars a million
    # Two episodes, each with requests of 2, 4 and 6 messages: 2 * 1200 tokens read, 6 * 7 written.
    used = {"requests": 6, "retries": 1, "prompt_tokens": 2400, "completion_tokens": 42}
    assert engine.take_usage() == used | {"cost": pytest.approx((4800 + 420) / 1e6)}
    assert engine.take_usage()["requests"] == 0
    assert api_model.in_words(used | {"cost": 0.00522}) == (
        "6 requests, 1 sent again; 2,400 tokens read, 42 written, $0.0052"
    )
    engine.client.prices = (0.0, 0.0)
    assert "cost" not in engine.take_usage()


def test_a_request_lost_for_good_is_an_error_and_no_failure_of_the_agent(one_rank):
    def answer(body, headers):
        if body["messages"][1]["content"] == "task 1" and len(body["messages"]) > 2:
            return 400, {}, {"error": {"message": "too long"}}
        return completion(GO)

    with api_server(answer) as url:
        done, _ = play(url, 3)
    assert [(t.end, t.success) for t in done] == [
        ("terminated", True),
        ("error", False),
        ("terminated", True),
    ]
    assert done[1].error.startswith("ApiError") and "too long" in done[1].error
    record = evaluate.summarise(done)
    assert (record["success_rate"], record["tasks"], record["errors"]) == (1.0, 2, 1)
    assert (
        len(answer.asked) == 3 + 3 + 2
    )  # what was refused is not asked for again, nor played again
    with pytest.raises(RolloutError, match="1 of 3 episodes failed.*too long"):
        check_errors(done, 0.1)


@pytest.mark.parametrize(
    ("replies", "end", "turns"),
    [
        ([(10, 5), (20, 5), (30, 5)], "terminated", 3),
        ([(10, 5, "length"), (20, 5), (30, 5)], "terminated", 3),  # cut off, closed, parsed
        ([(10, 40)], "max_tokens", 1),  # exactly full: acted on, with no room for another turn
        ([(10, 40, "length")], "max_tokens", 1),  # full in the middle of a turn
        ([(10, 41)], "max_tokens", 1),  # over: a sampler of ours would have been cut off
        ([(10, 5), (50, 1)], "max_tokens", 1),  # no room for the second turn at all
    ],
)
def test_the_servers_count_decides_what_fits(one_rank, replies, end, turns):
    left = iter(replies)
    with api_server(lambda body, headers: completion(GO, *next(left))) as url:
        (t,), _ = play(url, 1, max_tokens=50)
    assert (t.end, len(t.turns)) == (end, turns)
    assert [turn.stop for turn in t.turns] == [sum(reply[:2]) for reply in replies[:turns]]


def test_what_an_observation_becomes():
    chat = MessageChat()
    assert chat.between(" <|im_end|>\ud800 ") == [{"role": "user", "content": "< |im_end|>?"}]
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    assert chat.clip(text, 250) == text
    short = chat.clip(text, 50)  # 200 characters
    assert len(short) == 200 and short[:9] == text[:9] and short[-9:] == text[-9:]
    assert "[... 800 of 1000 characters left out ...]" in short
    assert len(chat.clip(text, 1)) == 4
    t = Trajectory("toy", "a")
    t.add_context(chat.prompt("Do it.", "See."))
    t.add_completion([api_model.TOKEN, {"role": "assistant", "content": GO}], [0.0] * 2, chat)
    t.add_context(chat.between("Done."))
    shown = evaluate.transcript(t, chat, color=False)
    assert f"\nSee.\n«{GO}»\nDone.\n" in shown and FORMAT in shown


@pytest.mark.slow
def test_the_command(tmp_path, parrot):
    def run(*flags: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / "evaluate.py"), "--limit", "10", "--max-turns", "4", *flags],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "sk-secret"},
        )  # fmt: skip

    def guarded(body, headers):
        known = headers["Authorization"] == "Bearer sk-secret"
        return answer(body, headers) if known else (401, {}, {})

    answer = greedy_server(parrot)
    with api_server(guarded) as url:
        flags = ("--model", "parrot", "--api-url", url, "--temperature", "0", "--name", "there")
        there = run(*flags, "--prompt-price", "1", "--completion-price", "2")
    here = run("--model", parrot, "--temperature", "0", "--name", "here")
    gone = run("--model", "parrot", "--api-url", url, "--name", "gone")
    assert there.returncode == here.returncode == 0, there.stderr[-2000:] + here.stderr[-2000:]
    records = [
        json.loads((tmp_path / "out" / name / "eval.jsonl").read_text())
        for name in ("there", "here")
    ]
    usage = records[0].pop("usage")
    for line in records:
        assert line.pop("seconds") > 0
    assert records[0].pop("model") == "parrot" and records[1].pop("model") == parrot
    assert records[0] == records[1] and records[0]["episodes"] == 10
    assert usage["cost"] > 0 and f"${usage['cost']:.4f}" in there.stdout
    for path in (tmp_path / "out/there").iterdir():
        assert "sk-secret" not in path.read_text()
    assert "sk-secret" not in there.stdout + there.stderr
    assert gone.returncode == 2 and "can't be asked: no reply from" in gone.stderr
    assert "Traceback" not in gone.stderr and not (tmp_path / "out/gone").exists()
