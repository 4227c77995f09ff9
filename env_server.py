"""
Many episodes at once over HTTP: the server, its client, and the launcher that keeps servers alive.

    rollout thread -> RemoteEpisode -> EnvClient  -- JSON -->  Flask -> Episodes -> a class of envs/

    EnvError           whatever keeps an episode from going on, the same on both sides of the wire
    Episode, Episodes  an environment with its last reply, and the table of all live ones
    create_app         the routes
    EnvClient          the routes as methods: pooled connections, safe retries, a deadline per call
    RemoteEpisode      one episode of a server, used like a local Gymnasium environment
    EnvServers         server processes on this machine that live exactly as long as this one

Why a server? Environments crash, hang, want Java or a browser, and hold Python's global lock. Over
HTTP they do so in processes of their own, on any host, in any language. The price is about a
millisecond a step (benchmarks/environments.py); the language model's turn takes a hundred or more.

Read envs/textcraft.py and envs/babyai.py first, agent.py next. Try it:

    python env_server.py --env textcraft --play
    python env_server.py --env textcraft --port 8000 & sleep 2; curl localhost:8000/health
"""

import hmac
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import gymnasium as gym
import tyro
import urllib3
import waitress
from flask import Flask, Response, request
from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError
from werkzeug.exceptions import HTTPException

import envs

VERSION = "1"  # of the wire: changes when a client of the old one would misunderstand the new one
SPLITS = ("train", "dev", "test")
MAX_BODY = 2**20  # bytes; no action is that long
START_SECONDS = 120.0  # for a server process to answer its first /health
READY = "env_server: ready on "  # begins the line that tells people, and launchers, the address
log = logging.getLogger("env_server")


class EnvError(Exception):
    """Raised in the server, sent as JSON, raised again in the client.

    code     one word for programs: unknown_id, wrong_turn, environment_crash, timeout, ...
    message  one sentence for people
    status   HTTP's; None where no reply arrived
    """

    def __init__(self, code: str, message: str, status: int | None = None):
        super().__init__(code, message, status)
        self.code, self.message, self.status = code, message, status

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


# --- JSON, strict in both directions ---


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is Python's, not JSON's")


def to_plain(value: Any) -> Any:
    """Numpy's scalars and arrays know their plain twins; anything else is the environment's bug."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} can't be sent as JSON")


# Made once, where json.loads and json.dumps make a new one for every call that has arguments.
DECODER = json.JSONDecoder(parse_constant=refuse_constant)
ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=to_plain)


def encode(payload: dict) -> bytes:
    # Half of a surrogate pair may stand in a Python string, but in no encoding: it becomes "?".
    return ENCODER.encode(payload).encode(errors="replace")


def malformed(message: str) -> EnvError:
    return EnvError("malformed", message, 400)


def read_body() -> dict:
    """The request's JSON object; no body at all counts as {}."""
    try:
        body = DECODER.decode(request.get_data(cache=False).decode() or "{}")
    except RecursionError:
        raise malformed("the JSON is nested too deeply") from None
    except ValueError as error:  # JSON's, Unicode's, and that of integers with thousands of digits
        raise malformed(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise malformed(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def field(body: dict, name: str, kind: type) -> Any:
    """One required field. Compared by type(), since isinstance takes True for an integer."""
    if name not in body:
        raise malformed(f'the field "{name}" is missing')
    value = body[name]
    if type(value) is not kind:
        raise malformed(f'"{name}" must be {kind.__name__}, got {type(value).__name__}')
    if kind is str and value != value.encode(errors="replace").decode():
        raise malformed(f'"{name}" holds half of a surrogate pair')
    return value


# --- episodes ---


class Episode:
    """One environment, and what a retry may ask for again. Use it with its lock held."""

    def __init__(self):
        self.env: gym.Env | None = None
        self.lock = threading.Lock()
        self.last_used = time.monotonic()
        self.is_closing = False
        self.turn: int | None = None  # the turn that comes next; None before the first reset
        self.action: str | None = None  # of the turn before it, the only one whose reply is kept
        self.reply = b""
        self.observation = ""
        self.is_over = False

    def reset(self, task: str, seed: int | None) -> bytes:
        """Begin `task`, however far the last one had got; returns the encoded reply."""
        observation, info = self.env.reset(seed=seed, options={"task": task})
        self._remember(observation, info=info)
        self.turn, self.action, self.is_over = 0, None, False
        return self.reply

    def step(self, action: str, turn: int) -> bytes:
        """Act once per turn, however often the request for it arrives.

        The client counts turns. If a reply is lost on its way, the client sends the request again;
        its number is one behind ours by then, and it gets the stored reply. Without the number
        that retry would act twice, and without a retry one lost packet would end the episode.
        """
        self.require_task()
        if turn == self.turn - 1 and action == self.action:
            return self.reply
        if turn != self.turn:
            what = (
                "another action was taken in turn" if turn == self.turn - 1 else "this is not turn"
            )
            raise EnvError("wrong_turn", f"{what} {turn}: turn {self.turn} comes next", 409)
        if self.is_over:
            raise EnvError("episode_over", "the episode has ended: /reset or /close it", 409)
        observation, reward, terminated, truncated, info = self.env.step(action)
        ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
        self._remember(observation, reward=float(reward), **ends, info=info)
        self.turn, self.action, self.is_over = turn + 1, action, any(ends.values())
        return self.reply

    def require_task(self) -> None:
        if self.turn is None:
            raise EnvError("not_reset", "the episode has no task yet: /reset it first", 409)

    def _remember(self, observation: str, **rest: Any) -> None:
        """Encoded at once: what can't be sent (a NaN reward, say) is a crash of this very turn."""
        if not isinstance(observation, str):
            raise TypeError(f"an observation must be text, got {type(observation).__name__}")
        self.reply = encode({"observation": observation, **rest})
        self.observation = observation


class Episodes:
    """The table of live episodes: as long as there are environment objects, at every moment."""

    def __init__(self, make_env: Callable[[], gym.Env], capacity: int, ttl: float):
        self.make_env, self.capacity, self.ttl = make_env, capacity, ttl
        self._table: dict[str, Episode] = {}
        self._table_lock = threading.Lock()
        self._is_shut = threading.Event()
        threading.Thread(target=self._reap_often, name="reaper", daemon=True).start()

    def __len__(self) -> int:
        return len(self._table)

    def create(self) -> str:
        """A new episode's id. raises EnvError at_capacity where no slot is free and no episode idle."""
        episode_id, episode = secrets.token_urlsafe(16), Episode()
        if len(self) >= self.capacity:
            self.reap()
        with self._table_lock:
            if self._is_shut.is_set() or len(self) >= self.capacity:
                message = f"all {self.capacity} episodes are in use: close some or raise --capacity"
                raise EnvError("at_capacity", message, 503)
            self._table[episode_id] = episode  # the slot is taken first: building may be slow
        with self.using(episode_id):
            episode.env = self.make_env()
        return episode_id

    @contextmanager
    def using(self, episode_id: str) -> Iterator[Episode]:
        """An episode, locked. One whose environment raises is closed: its state may be anything."""
        unknown = EnvError("unknown_id", "no such episode: closed, crashed, or idle too long", 404)
        episode = self._table.get(episode_id)
        if episode is None or episode.is_closing:
            raise unknown
        try:
            with episode.lock:
                if episode.is_closing:  # while we waited for the lock
                    raise unknown
                episode.last_used = time.monotonic()
                try:
                    yield episode
                finally:
                    episode.last_used = time.monotonic()
        except EnvError:
            raise  # the client's mistake: the environment has not seen it
        except (Exception, SystemExit) as error:
            log.exception("an environment crashed; its episode is closed")
            episode.is_closing = True
            message = f"{type(error).__name__}: {error} (traceback in the server's log)"
            raise EnvError("environment_crash", message, 500) from error
        finally:
            self._bury(episode_id, episode)

    def close(self, episode_id: str) -> None:
        """Doesn't wait for a step in progress: a hung environment must not hang its closer."""
        if episode := self._table.get(episode_id):
            episode.is_closing = True
            self._bury(episode_id, episode)

    def _bury(self, episode_id: str, episode: Episode) -> None:
        """Close a doomed environment, unless it is in use: its user comes here after unlocking.

        Each side marks or unlocks first and tries the lock second, so one of them gets through.
        """
        if not episode.is_closing or not episode.lock.acquire(blocking=False):
            return
        try:
            if episode_id in self._table and episode.env is not None:
                episode.env.close()
        except Exception:
            log.exception("an environment failed to close")
        finally:
            self._table.pop(episode_id, None)  # last: a slot is free when what it held is
            episode.lock.release()

    def reap(self) -> None:
        """Close what no one used for the time-to-live. A slow step holds its lock and is spared."""
        for episode_id, episode in list(self._table.items()):
            if episode.lock.acquire(blocking=False):
                if time.monotonic() - episode.last_used > self.ttl:
                    episode.is_closing = True
                episode.lock.release()
                self._bury(episode_id, episode)

    def _reap_often(self) -> None:
        while not self._is_shut.wait(min(self.ttl / 4, 5.0)):
            self.reap()

    def close_all(self) -> None:
        with self._table_lock:
            self._is_shut.set()
        for episode_id in list(self._table):
            self.close(episode_id)


# --- routes ---


def create_app(
    make_env: Callable[[], gym.Env],
    name: str = "",
    capacity: int = 256,
    ttl: float = 600.0,
    token: str = "",
) -> Flask:
    """The Flask application around `make_env`, which builds the environment of one episode.

    Its `extensions["episodes"]` is the table; call `close_all()` on it in the end.
    """
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    env = make_env()  # asked once for what all episodes share
    tasks = {split: list(env.tasks(split)) for split in SPLITS}
    constants = {"env": name, "version": VERSION, "capacity": capacity, "max_turns": env.max_turns}
    constants["num_tasks"] = {split: len(tasks[split]) for split in SPLITS}
    instructions = env.instructions
    env.close()
    episodes = app.extensions["episodes"] = Episodes(make_env, capacity, ttl)
    add_error_handlers(app)
    add_episode_routes(app, episodes, {task for split in SPLITS for task in tasks[split]})

    @app.before_request
    def check_token() -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # compare_digest takes as long for a near miss as for a wild guess: timing teaches nothing.
        is_right = hmac.compare_digest(given.encode(), token.encode())
        if token and not (is_right and scheme.lower() == "bearer"):
            raise EnvError("unauthorized", "send Authorization: Bearer <the server's --token>", 401)

    @app.get("/health")
    def health() -> Response:
        return send({"status": "ok", "episodes": len(episodes), **constants})

    @app.get("/tasks")
    def list_tasks() -> Response:
        split = field(request.args, "split", str)
        if split not in tasks:
            raise EnvError("unknown_split", f"split must be one of {', '.join(SPLITS)}", 404)
        return send({"tasks": tasks[split]})

    @app.get("/instructions")
    def show_instructions() -> Response:
        return send({"instructions": instructions})

    return app


def add_episode_routes(app: Flask, episodes: Episodes, known_tasks: set[str]) -> None:
    """The routes that name an episode; what is wrong with a request is raised, as EnvError."""

    @app.post("/create")
    def create() -> Response:
        read_body()
        return send({"id": episodes.create()})

    @app.post("/reset")
    def reset() -> Response:
        body = read_body()
        episode_id, task = field(body, "id", str), field(body, "task", str)
        seed = None if body.get("seed") is None else field(body, "seed", int)
        if seed is not None and not 0 <= seed < 2**63:
            raise malformed('"seed" must be from 0 to 2**63 - 1')
        with episodes.using(episode_id) as episode:
            # Checked here, not by the environment: what it never sees can't leave it half reset.
            if task not in known_tasks:
                raise EnvError("unknown_task", f"{task[:80]!r} is not in /tasks?split=", 404)
            return send(episode.reset(task, seed))

    @app.post("/step")
    def step() -> Response:
        body = read_body()
        action, turn = field(body, "action", str), field(body, "turn", int)
        with episodes.using(field(body, "id", str)) as episode:
            return send(episode.step(action, turn))

    @app.get("/observation")
    def observation() -> Response:
        with episodes.using(field(request.args, "id", str)) as episode:
            episode.require_task()
            return send({"observation": episode.observation})

    @app.get("/available_actions")
    def available_actions() -> Response:
        with episodes.using(field(request.args, "id", str)) as episode:
            episode.require_task()
            actions = [] if episode.is_over else list(episode.env.available_actions())
            return send({"available_actions": actions})

    @app.post("/close")
    def close() -> Response:
        # True for any id: a client whose first /close got no answer must be able to ask again.
        episodes.close(field(read_body(), "id", str))
        return send({"closed": True})


def send(payload: dict | bytes, status: int = 200) -> Response:
    data = payload if isinstance(payload, bytes) else encode(payload)
    return Response(data, status, mimetype="application/json")


def add_error_handlers(app: Flask) -> None:
    """Every error is JSON, with a true status: a client can't mistake it for an observation."""

    def answer(code: str, message: str, status: int) -> Response:
        return send({"error": {"code": code, "message": message}}, status)

    @app.errorhandler(EnvError)
    def ours(error: EnvError) -> Response:
        return answer(error.code, error.message, error.status or 500)

    @app.errorhandler(HTTPException)
    def flasks(error: HTTPException) -> Response:  # unknown route, wrong method, body too large
        code = error.name.lower().replace(" ", "_")
        response = answer(code, error.description, error.code)
        if error.code == 405:
            response.headers["Allow"] = ", ".join(error.valid_methods)
        return response

    @app.errorhandler(Exception)
    def a_bug(error: Exception) -> Response:
        log.exception("a bug in the server")
        return answer("server_bug", f"{type(error).__name__}: {error}", 500)


# --- serving ---


def make_server(app: Flask, host: str, port: int) -> waitress.server.BaseWSGIServer:
    """Waitress around the app, already listening; `run()` serves until Ctrl-C or SystemExit.

    A thread per episode, because a step may wait for a browser or a Java process: with fewer, slow
    episodes would hold up quick ones. 256 idle threads cost 4 MB. The spare ones answer /health
    and /close when every episode is busy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        message = f"can't listen on {host} port {port} ({error}): try another --port or --host"
        raise ValueError(message) from None
    capacity = app.extensions["episodes"].capacity
    return waitress.create_server(
        app,
        sockets=[listener],
        threads=capacity + 16,
        connection_limit=2 * capacity + 100,  # clients' pools keep idle connections open
        asyncore_use_poll=True,  # select() fails at file descriptor 1024
        max_request_body_size=16 * MAX_BODY,  # read to the end, so that Flask's 413 gets through
    )


def end_with_launcher() -> None:
    """The launcher never writes to our stdin: this read returns when it is gone, SIGKILL or not."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(8)  # waitress gives busy threads 5 seconds
    os.killpg(0, signal.SIGKILL)  # something hangs: end it, and any browser or Java process too


def serve(config: "Config", make_env: Callable[[], gym.Env]) -> None:
    """Be one server process until a signal comes."""
    token = config.token or os.environ.get("ENV_TOKEN", "")
    app = create_app(make_env, config.env, config.capacity, config.ttl, token)
    server = make_server(app, config.host, config.port)
    if not token and config.host not in ("127.0.0.1", "localhost", "::1"):
        log.warning("no --token: whoever can reach %s can use up all episodes", config.host)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if os.environ.pop("ENV_OWNED", ""):  # set by Replica; popped, so that our children don't see it
        threading.Thread(target=end_with_launcher, daemon=True).start()
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"{READY}http://{host}:{server.effective_port}", flush=True)
    try:
        server.run()
    finally:
        app.extensions["episodes"].close_all()


# --- client ---


class EnvClient:
    """One server's routes as methods, for any number of threads. They raise EnvError, nothing else.

    Every call has a deadline, retries included. A request is sent again where doing it twice
    changes nothing: reading, /close, /reset, and /step, whose turn number makes it so. A /create
    that may have arrived is not: it would take a second slot.

    urllib3, not requests, which is a layer on top of it: 0.2 ms of CPU a call instead of 0.6, time
    in which no other thread of the trainer can run Python.
    """

    PAUSES = (0.05, 0.2, 0.8)  # seconds before each retry; a restarted replica takes about one

    def __init__(self, url: str, token: str = "", timeout: float = 60.0, connections: int = 256):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected an address like http://127.0.0.1:8000, got {url!r}")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._folder = parts.path.rstrip("/")
        self._pool = urllib3.connection_from_url(url, maxsize=connections)  # opened when needed
        self._headers = {"Content-Type": "application/json"}
        if token := token or os.environ.get("ENV_TOKEN", ""):
            self._headers["Authorization"] = f"Bearer {token}"

    def health(self) -> dict[str, Any]:
        """What /health says: env, max_turns, episodes, capacity, ..."""
        return self._get("/health", "status")

    def tasks(self, split: str) -> list[str]:
        """Task ids of "train", "dev" or "test"."""
        return self._get("/tasks", "tasks", split=split)["tasks"]

    def instructions(self) -> str:
        """What the agent is told of rules and actions, once an episode."""
        return self._get("/instructions", "instructions")["instructions"]

    def create(self) -> str:
        """The id of a new episode, which is not reset yet."""
        return self._post("/create", "id")["id"]

    def reset(self, episode_id: str, task: str, seed: int | None = None) -> dict[str, Any]:
        """Begin `task`; returns {"observation", "info"}."""
        return self._post("/reset", "info", id=episode_id, task=task, seed=seed)

    def step(self, episode_id: str, action: str, turn: int) -> dict[str, Any]:
        """Act in turn 0, 1, ...; returns {"observation", "reward", "terminated", "truncated", "info"}."""
        return self._post("/step", "info", id=episode_id, action=action, turn=turn)

    def observation(self, episode_id: str) -> str:
        """The newest observation once more."""
        return self._get("/observation", "observation", id=episode_id)["observation"]

    def available_actions(self, episode_id: str) -> list[str]:
        """Actions that would be accepted now."""
        answer = "available_actions"
        return self._get("/available_actions", answer, id=episode_id)[answer]

    def close(self, episode_id: str) -> None:
        """Give the episode and its slot back."""
        self._post("/close", "closed", id=episode_id)

    def _get(self, route: str, answer: str, **query: str) -> dict[str, Any]:
        return self._read(self._send("GET", f"{route}?{urlencode(query)}", None), answer)

    def _post(self, route: str, answer: str, **fields: Any) -> dict[str, Any]:
        return self._read(self._send("POST", route, json.dumps(fields).encode()), answer)

    def _send(self, method: str, route: str, body: bytes | None) -> urllib3.BaseHTTPResponse:
        deadline = time.monotonic() + self.timeout
        for pause in (*self.PAUSES, math.inf):
            # Timeout's total covers connecting and the wait for the reply's first byte.
            left = urllib3.Timeout(total=max(deadline - time.monotonic(), 0.001))
            settings = {"retries": False, "redirect": False, "timeout": left}
            try:
                path = self._folder + route
                return self._pool.urlopen(method, path, body, self._headers, **settings)
            except HTTPError as error:
                # A refused connection carried nothing, so nothing can happen twice.
                is_refused = isinstance(error, NewConnectionError)
                is_safe = is_refused or route != "/create"
                if not is_safe or time.monotonic() + pause >= deadline:
                    is_late = isinstance(error, TimeoutError) and not is_refused
                    code = "timeout" if is_late else "unreachable"
                    raise EnvError(code, f"{method} {self.url}{route}: {error}") from error
                time.sleep(pause)
        raise AssertionError("unreachable: the last pause is longer than any deadline")

    def _read(self, response: urllib3.BaseHTTPResponse, answer: str) -> dict[str, Any]:
        with suppress(ValueError):
            match json.loads(response.data):
                case dict(reply) if response.status == 200 and answer in reply:
                    return reply
                case {"error": {"code": str(code), "message": str(message)}}:
                    raise EnvError(code, message, response.status)
        message = f"{self.url} is not a server of ours: {response.status} {response.data[:80]!r}"
        raise EnvError("bad_reply", message, response.status)


class RemoteEpisode:
    """One episode on a server, with the return values of a local Gymnasium environment.

    with RemoteEpisode(EnvClient("http://127.0.0.1:8000")) as episode:
        observation, info = episode.reset("a task")
        observation, reward, terminated, truncated, info = episode.step("an action")

    It can be reset again and again, and used by any thread, one at a time. After an EnvError with
    code timeout or unreachable the same step may be tried again: `turn` counts what arrived.
    """

    def __init__(self, client: EnvClient):
        self.client = client
        self.id = client.create()
        self.turn = 0

    def reset(self, task: str, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin `task`; returns observation, info."""
        reply = self.client.reset(self.id, task, seed)
        self.turn = 0
        return reply["observation"], reply["info"]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Returns observation, reward, terminated, truncated, info."""
        reply = self.client.step(self.id, action, self.turn)
        self.turn += 1
        ends = reply["terminated"], reply["truncated"]
        return reply["observation"], reply["reward"], *ends, reply["info"]

    def available_actions(self) -> list[str]:
        """Actions that would be accepted now."""
        return self.client.available_actions(self.id)

    def close(self) -> None:
        """Give the episode back to its server; never raises."""
        # A server out of reach reaps the episode by itself; raising would hide why we are closing.
        with suppress(EnvError):
            self.client.close(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


# --- launcher ---


class Replica:
    """One server process of ours, started again and again on the port it got first."""

    def __init__(self, flags: Sequence[str], token: str, port: int):
        self.command = [sys.executable, os.path.abspath(__file__), *flags]
        self.port, self.url, self.token = port, "", token
        self.start()

    def start(self) -> None:
        """Start the process, on the port of the last one; `wait` waits until it answers."""
        self.is_ready, self.last_lines = threading.Event(), deque(maxlen=5)
        self.process = subprocess.Popen(
            [*self.command, "--port", str(self.port)],
            stdin=subprocess.PIPE,  # open as long as we live, see end_with_launcher
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches us alone, and we decide
            # Replicas are the parallelism, so one numeric thread each. `ps` shows no environment.
            env={**os.environ, "OMP_NUM_THREADS": "1", "ENV_OWNED": "1", "ENV_TOKEN": self.token},
        )
        threading.Thread(target=self._pass_on, args=(self.process.stdout,), daemon=True).start()

    def _pass_on(self, lines: Iterator[bytes]) -> None:
        """The server's output, tracebacks included, goes to our stderr."""
        for line in lines:
            text = line.decode(errors="replace").strip()
            if found := re.fullmatch(rf"{READY}(\S+:(\d+))", text):
                self.url, self.port = found[1], int(found[2])
                self.is_ready.set()
                continue
            self.last_lines.append(text)
            os.write(2, line)  # sys.stderr is off limits to daemon threads while Python exits

    def wait(self) -> None:
        """Until it answers. Else RuntimeError, with the last it said."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready.wait(0.02):
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                time.sleep(0.1)  # for its last lines to arrive
                how = "is not ready in time" if code is None else f"ended with code {code}"
                said = " | ".join(self.last_lines)
                raise RuntimeError(f"the server {how} ({' '.join(self.command[1:])}): {said}")
        EnvClient(self.url, self.token, timeout=30.0).health()

    def end(self, deadline: float) -> None:
        """Let it close its episodes until `deadline` (of time.monotonic), then kill it and all that it started."""
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        with suppress(ProcessLookupError):  # the whole group: a crash may leave a browser behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class EnvServers:
    """Server processes of one environment on this machine, kept alive until closed.

    with EnvServers("textcraft", {"max_depth": "2"}, replicas=2) as servers:
        clients = [EnvClient(url) for url in servers.urls]

    However this process ends, they end: each reads a pipe that only we hold open. One that dies is
    started again on its port; its episodes are lost, so their next call is a 404.
    """

    def __init__(
        self,
        env: str,
        options: dict[str, str] | None = None,
        replicas: int = 1,
        capacity: int = 256,
        ttl: float = 600.0,
        token: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        token = token or os.environ.get("ENV_TOKEN", "")  # where clients look, too
        flags = ["--env", env, "--capacity", str(capacity), "--ttl", str(ttl), "--host", host]
        if options:
            flags += ["--options", *(f"{key}={value}" for key, value in options.items())]
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._replicas: list[Replica] = []
        try:
            for index in range(replicas):  # start all, then wait: each takes a second or more
                self._replicas.append(Replica(flags, token, port and port + index))
            for replica in self._replicas:
                replica.wait()
        except BaseException:  # Ctrl-C too: nobody else holds this object yet
            self.close()
            raise
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self._replicas]

    @property
    def pids(self) -> list[int]:
        return [replica.process.pid for replica in self._replicas]

    def ensure_alive(self) -> None:
        """Start dead servers again and wait for them. A thread does this twice a second anyway."""
        with self._lock:
            for replica in self._replicas:
                code = replica.process.poll()
                if code is not None and not self._is_closed.is_set():
                    log.warning("server %s died with code %s: restarting it", replica.url, code)
                    replica.end(time.monotonic())
                    replica.start()
                    replica.wait()

    def _watch(self) -> None:
        pause = 0.5
        while not self._is_closed.wait(pause):
            try:
                self.ensure_alive()
                pause = 0.5
            except (RuntimeError, EnvError) as error:
                pause = min(2 * pause, 30.0)  # its port may have been taken meanwhile: don't spin
                log.warning("%s; next try in %g s", error, pause)

    def close(self) -> None:
        self._is_closed.set()
        with self._lock:
            for replica in self._replicas:  # tell all, then wait for each
                replica.process.stdin.close()
            deadline = time.monotonic() + 10.0
            for replica in self._replicas:
                replica.end(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


# --- command line ---


def parse_options(options: Sequence[str], env_names: Sequence[str]) -> dict[str, dict[str, str]]:
    """What --options means on every command line of this repo.

    >>> parse_options(["levels=paper"], ["babyai"])
    {'babyai': {'levels': 'paper'}}
    >>> parse_options(["babyai.levels=paper"], ["textcraft", "babyai"])
    {'textcraft': {}, 'babyai': {'levels': 'paper'}}
    """
    parsed: dict[str, dict[str, str]] = {name: {} for name in env_names}
    for option in options:
        left, equals, value = option.partition("=")
        env, dot, key = left.rpartition(".")
        if not equals or not key.isidentifier():
            raise ValueError(f"--options takes key=value or env.key=value, got {option!r}")
        if not dot and len(parsed) > 1:
            choices = " or ".join(f"{name}.{option}" for name in parsed)
            raise ValueError(f"say whose option {option!r} is: {choices}")
        env = env if dot else env_names[0]
        if env not in parsed:
            raise ValueError(f"{option!r} is an option of {env!r}; --env is {' '.join(parsed)}")
        if key in parsed[env]:
            raise ValueError(f"{env} got option {key} twice: {parsed[env][key]!r} and {value!r}")
        parsed[env][key] = value
    return parsed


def check_options(options: Sequence[str], env_names: Sequence[str]) -> None:
    """raises ValueError where --env or --options name what does not exist, or can't be."""
    for name in env_names:
        if name not in envs.NAMES:
            raise ValueError(f"--env must be among {', '.join(envs.NAMES)}, got {name!r}")
    for name, given in parse_options(options, env_names).items():
        envs.make(name, **given).close()


@dataclass(frozen=True)
class Config:
    """Serve an environment over HTTP, or play it yourself with --play."""

    env: str = "textcraft"  # a file in envs/
    options: tuple[str, ...] = ()  # keyword arguments of its class: --options levels=paper
    port: int = 8000  # of the first replica, the others take the next ones; 0: any free port
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines in: set a token then
    replicas: int = 1  # server processes
    capacity: int = 256  # episodes at once in each of them
    ttl: float = 600.0  # seconds until an unused episode is closed
    token: str = ""  # what clients must send; better in the variable ENV_TOKEN: `ps` shows flags
    play: bool = False  # no server: you are the agent
    task: str | None = None  # what to play; without it, any task of the train split

    def __post_init__(self):
        if self.env not in envs.NAMES:
            raise ValueError(f"--env must be one of {', '.join(envs.NAMES)}, got {self.env!r}")
        if min(self.replicas, self.capacity) < 1 or not 0 < self.ttl < math.inf:
            given = f"{self.replicas}, {self.capacity} and {self.ttl:g}"
            raise ValueError(f"--replicas, --capacity and --ttl must be positive, got {given}")
        if not 0 <= self.port <= 65536 - self.replicas:
            raise ValueError(f"all --replicas need a port from 0 to 65535, got --port {self.port}")
        if not re.fullmatch(r"[!-~]*", self.token):
            raise ValueError("--token must be ASCII without spaces: it travels in a header")
        if self.task is not None and not self.play:
            raise ValueError("--task goes with --play: a server's clients choose theirs at /reset")
        parse_options(self.options, [self.env])


def play(env: gym.Env, task: str | None) -> None:
    """A person in the agent's place, or lines from a pipe."""
    observation, info = env.reset(options={} if task is None else {"task": task})
    print(f"{env.instructions}\n\n{observation}\n\n(? lists actions, quit ends)")
    episode_return, turns, is_over = 0.0, 0, False
    while not is_over:
        try:
            action = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if action == "quit":
            break
        if action == "?":
            print("\n".join(env.available_actions()) or "(free text)")
            continue
        observation, reward, terminated, truncated, info = env.step(action)
        print(observation)
        episode_return += reward
        turns, is_over = turns + 1, terminated or truncated
    print(f"\n{turns} turns, reward {episode_return:g}, success {info['success']}")


def main(config: Config) -> None:
    """Play in the terminal, serve, or start replicas and wait, as the flags say."""
    options = parse_options(config.options, [config.env])[config.env]
    make_env = lambda: envs.make(config.env, **options)
    if config.play:
        env = make_env()
        try:
            play(env, config.task)
        finally:
            env.close()
    elif config.replicas == 1:
        serve(config, make_env)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        shared = (config.capacity, config.ttl, config.token, config.host, config.port)
        servers = EnvServers(config.env, options, config.replicas, *shared)
        with servers, suppress(KeyboardInterrupt):
            print("\n".join(READY + url for url in servers.urls), flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(format="env_server: %(message)s")
    try:
        main(tyro.cli(Config))
    except (ValueError, RuntimeError) as error:
        print(f"env_server.py: {error}", file=sys.stderr)
        sys.exit(2)
