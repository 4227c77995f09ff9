"""
Any model behind an OpenAI-compatible server, in the place of a local one: messages out, text back.

    instructions, observations  ->  POST <url>/chat/completions  ->  the agent's turns; tokens and dollars

    ApiClient    one request, sent again while it may still succeed
    MessageChat  what agent.Chat is for token ids, for messages: the chat template is the server's
    ApiEngine    an engine as in engines.py: `add` sends, `step` returns a turn that has come back
    connect      all three, after a request that shows whether address, key and model are right

rollout.py plays with these as it plays with a tokenizer and a sampler, because a Trajectory never looks at its
ids: here an id is a whole message, and TOKEN stands for each further token that the server has counted.

    ids        system user TOKEN TOKEN ... assistant END user TOKEN ... assistant END user
    loss_mask    .     .     s     s          s       s    .    s           s      s    .

So len(ids) is the server's own count, and max_tokens means what it means for a local model. Two things are not as
they are there. The server reads the agent's words as text: a model that spelled one in unusual tokens finds other
tokens in its history than it wrote. And only temperature is sent: further settings of sampling are the server's
(`vllm serve --generation-config vllm` has none), and what is drawn at a temperature above 0 differs every time.

Read rollout.py and evaluate.py first.
"""

import json
import os
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import count
from urllib.parse import urlsplit

import torch.distributed as dist
import urllib3

from agent import FORMAT
from model import on_rank_0

TOKEN, END = "token", "end"  # ids that are no messages

# --- requests ---


class ApiError(RuntimeError):
    """A request that failed for good. status is HTTP's; None where no reply came, or none that can be read."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    @property
    def is_full(self) -> bool:
        """Whether the conversation no longer fits the model's context, in the words of OpenAI's servers and vLLM's."""
        return self.status == 400 and bool(re.search("context_length|context length", str(self)))


@dataclass(frozen=True)
class Reply:
    """A turn as the server wrote and counted it."""

    text: str
    is_cut: bool  # by max_new_tokens
    prompt_tokens: int
    completion_tokens: int


def check_url(url: str) -> None:
    """raises ValueError, in one sentence, for what is no address, or holds a secret."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--api-url takes an address like http://127.0.0.1:8000/v1, got {url!r}")
    if parts.username or parts.password or parts.query:
        raise ValueError("--api-url is printed and saved: put the key into OPENAI_API_KEY instead")


class ApiClient:
    """One model on one server, for any number of threads.

    prices   dollars for a million tokens read, and written; (0, 0) where they are not known
    """

    PAUSE = 1.0  # seconds before the first retry, doubled before each further one
    LONGEST = 30.0  # of those pauses
    FIRST_PATIENCE, PATIENCE = 5.0, 300.0  # seconds after which a request is not sent again

    def __init__(
        self, url: str, model: str, timeout: float = 120.0, prices: tuple[float, float] = (0.0, 0.0)
    ):
        self.url, self.model, self.timeout, self.prices = url.rstrip("/"), model, timeout, prices
        self.limit_name, self.has_system = "max_tokens", True  # `adapt` may learn otherwise
        self.patience, self.retries = self.PATIENCE, 0
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", self._key):
            raise ValueError("OPENAI_API_KEY must be ASCII without spaces: it travels in a header")
        self._headers = {"Content-Type": "application/json"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._pool = urllib3.PoolManager(maxsize=256)  # connections are opened when needed

    def ask(self, messages: list[dict], max_new_tokens: int, temperature: float) -> Reply:
        """The model's next message.

        Sent again after a growing, random pause (or as long as Retry-After says) where that may help: no reply in
        time, 408, 409, 429, any 5xx. What else is refused stays refused.
        raises  ApiError
        """
        deadline = time.monotonic() + self.patience
        body = json.dumps(self._body(messages, max_new_tokens, temperature)).encode()
        for attempt in count():
            # Random, or all that were turned away at once would come back at once.
            pause = random.uniform(0.5, 1.0) * min(self.PAUSE * 2**attempt, self.LONGEST)
            try:
                response = self._pool.urlopen(
                    "POST", f"{self.url}/chat/completions", body=body, headers=self._headers,
                    retries=False, redirect=False, timeout=urllib3.Timeout(total=self.timeout),
                )  # fmt: skip
                if response.status == 200:
                    return self._read(response.data)
                fault = self._refusal(response.status, response.data)
                if response.status not in (408, 409, 429) and response.status < 500:
                    raise fault
                pause += retry_after(response.headers)
            except urllib3.exceptions.HTTPError as error:
                fault = ApiError(f"no reply from {self.url}: {error}")
            if time.monotonic() + pause > deadline:
                raise fault
            self.retries += 1
            time.sleep(pause)
        raise AssertionError("unreachable: the loop has no end")

    def adapt(self, messages: list[dict], temperature: float) -> tuple[str, bool]:
        """Ask once, without much patience, and see how this server wants to be asked.

        Some models take max_completion_tokens in place of max_tokens, some chat templates know no system role:
        both are told by a refusal with status 400.
        returns  what was learnt: the limit's name, whether there is a system role
        """
        self.patience = self.FIRST_PATIENCE
        while True:
            try:
                self.ask(messages, 16, temperature)
                self.patience = self.PATIENCE
                return self.limit_name, self.has_system
            except ApiError as error:
                said = str(error).lower() if error.status == 400 else ""
                if "max_completion_tokens" in said and self.limit_name == "max_tokens":
                    self.limit_name = "max_completion_tokens"
                elif "system" in said and self.has_system:
                    self.has_system = False
                else:
                    raise

    def _body(self, messages: list[dict], max_new_tokens: int, temperature: float) -> dict:
        if not self.has_system and messages[0]["role"] == "system":
            system, user, *rest = messages
            text = f"{system['content']}\n\n{user['content']}"
            messages = [{"role": "user", "content": text}, *rest]
        limit = {self.limit_name: max_new_tokens, "temperature": temperature}
        return {"model": self.model, "messages": messages, **limit}

    def _refusal(self, status: int, data: bytes) -> ApiError:
        advice = {
            401: "; set OPENAI_API_KEY to a key that it takes",
            403: "; set OPENAI_API_KEY to a key that it takes",
            404: f"; is there a model {self.model!r}, and does --api-url end as it should (/v1, mostly)?",
        }
        said = self._quoted(data, 300)
        return ApiError(f"{self.url} answered {status}: {said}{advice.get(status, '')}", status)

    def _read(self, data: bytes) -> Reply:
        reply = read_reply(data)
        if reply is None:
            raise ApiError(
                "expected a chat completion with choices[0].message.content and usage, "
                f"got {self._quoted(data, 200)!r}"
            )
        return reply

    def _quoted(self, data: bytes, most: int) -> str:
        """The start of what a server said, on one line. Some repeat the key: it is taken out first, then the text cut."""
        said = " ".join(data.decode(errors="replace").split())
        return (said.replace(self._key, "<key>") if self._key else said)[:most]


def read_reply(data: bytes) -> Reply | None:
    """A chat completion's text and token counts; None where it is none, or has no text."""
    try:
        match json.loads(data):
            case {
                "choices": [{"message": {"content": str() | None as text}, **choice}, *_],
                "usage": {"prompt_tokens": int(read), "completion_tokens": int(written)},
            }:
                is_cut = choice.get("finish_reason") == "length"
                # A model that thinks out of sight may use up its tokens with that: it has said nothing.
                if text is not None or is_cut:
                    return Reply(text or "", is_cut, read, written)
    except ValueError:  # not JSON
        pass
    return None


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait, given as a number or as a date; 0 where it does not ask."""
    value = headers.get("Retry-After", "0")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


# --- in the place of a tokenizer's chat template ---


class MessageChat:
    """agent.Chat's methods, for ids that are messages."""

    CHARACTERS = 4  # to a token, roughly: only the server can count, and an observation must be cut before it is sent

    end_of_turn = END

    def __init__(self):
        self.tokenizer = self  # transcripts want one to decode with

    def prompt(self, instructions: str, observation: str) -> list:
        """The messages before the agent speaks for the first time."""
        system = {"role": "system", "content": f"{instructions}\n\n{FORMAT}"}
        return [system, *self.between(observation)]

    def between(self, observation: str) -> list:
        """The message between two turns of the agent."""
        text = observation.encode("utf-8", "replace").decode("utf-8").strip()
        # A web page that contains "<|im_end|>" must not end its own turn, where a server reads that as a token.
        return [{"role": "user", "content": text.replace("<|", "< |")}]

    def decode(self, ids: list) -> str:
        """The text of messages; what is not the agent's stands on lines of its own."""
        texts = [(m["content"].strip(), m["role"] == "assistant") for m in messages_in(ids)]
        return "".join(text if is_agents else f"\n{text}\n" for text, is_agents in texts)

    def clip(self, observation: str, max_tokens: int) -> str:
        """Cut an observation's middle out, visibly, where it has more than CHARACTERS * max_tokens characters."""
        most = self.CHARACTERS * max_tokens
        if len(observation) <= most:
            return observation
        mark = f" [... {len(observation) - most} of {len(observation)} characters left out ...] "
        keep = max(0, most - len(mark))
        text = observation[: (keep + 1) // 2] + mark + observation[len(observation) - keep // 2 :]
        return text[:most]


def messages_in(ids: list) -> list[dict]:
    return [item for item in ids if isinstance(item, dict)]


# --- in the place of a sampler ---


class ApiEngine:
    """Each request in a thread of its own; the server does the batching.

    max_tokens   of an episode: a turn that the server found no room for is left out
    """

    in_waves = False
    version = 0
    MOMENT = (
        0.02  # seconds that `step` waits: meanwhile environments answer, and the loop has to look
    )

    def __init__(self, client: ApiClient, max_tokens: int):
        self.client, self.max_tokens = client, max_tokens
        self.replies: queue.SimpleQueue = queue.SimpleQueue()
        self.used: Counter[str] = Counter()

    def add(self, key: tuple, ids: list, max_new_tokens: int, temperature: float = 1.0) -> None:
        """Ask for the turn after `ids`."""
        messages, known = messages_in(ids), len(ids)

        def run() -> None:
            try:
                reply = self.client.ask(messages, max_new_tokens, temperature)
            except Exception as error:  # whatever it is, it ends one episode and not the run
                reply = error
            self.replies.put((key, known, reply))

        # A daemon, so that Ctrl-C need not wait for it. rollout.py sees to it that there are not too many.
        threading.Thread(target=run, daemon=True).start()

    def step(self) -> list[tuple[tuple, list | Exception, list[float]]]:
        """The turn that has come back, if one does within a moment; an exception in its place where none will."""
        try:
            key, known, reply = self.replies.get(timeout=self.MOMENT)
        except queue.Empty:
            return []
        if isinstance(reply, ApiError) and reply.is_full:
            return [(key, [], [])]  # this server's context is smaller than max_tokens
        if isinstance(reply, Exception):
            return [(key, reply, [])]
        self.used.update(
            requests=1, prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
        )
        if reply.prompt_tokens >= self.max_tokens:
            return [(key, [], [])]  # a sampler of ours would have had no token left to write
        total = reply.prompt_tokens + reply.completion_tokens
        message = {"role": "assistant", "content": reply.text}
        # Without END a turn counts as cut off: where it was, and where it ran over the episode's limit.
        closing = [message] if reply.is_cut or total > self.max_tokens else [message, END]
        ids = [TOKEN] * (total - known - len(closing)) + closing
        return [(key, ids, [0.0] * len(ids))]

    def take_usage(self) -> dict:
        """Requests, tokens and, where prices are known, dollars, since this was last asked. Collective."""
        mine = self.used | Counter(retries=self.client.retries)
        self.used, self.client.retries = Counter(), 0
        everybodys: list = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, mine)
        usage: dict = {name: sum(used[name] for used in everybodys) for name in NAMES}
        reading, writing = self.client.prices
        if reading or writing:
            cost = usage["prompt_tokens"] * reading + usage["completion_tokens"] * writing
            usage["cost"] = cost / 1e6
        return usage


NAMES = ("requests", "retries", "prompt_tokens", "completion_tokens")


def in_words(usage: dict) -> str:
    """Usage as a line of the table."""
    cost = f", ${usage['cost']:.4f}" if "cost" in usage else ""
    return (
        f"{usage['requests']} requests, {usage['retries']} sent again; {usage['prompt_tokens']:,} tokens read, "
        f"{usage['completion_tokens']:,} written{cost}"
    )


def connect(
    client: ApiClient, temperature: float, max_tokens: int
) -> tuple[MessageChat, ApiEngine]:
    """What rollout.py plays with. Collective.

    raises  ValueError, in one sentence, where a first short request fails: better now than in every episode
    """
    chat = MessageChat()
    hello = chat.prompt("This is a test.", "Say yes.")

    def ask() -> tuple[str, bool]:
        try:
            return client.adapt(hello, temperature)
        except ApiError as error:
            raise ValueError(f"--model {client.model} can't be asked: {error}") from None

    client.limit_name, client.has_system = on_rank_0(ask)
    client.retries = 0
    return chat, ApiEngine(client, max_tokens)
