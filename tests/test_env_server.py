"""
The wire, row by row: routes, error statuses, retries, capacity, the time-to-live, the client.

The environment here is `Tally`, which adds up numbers and does on command what real ones do by
accident: crash, hang, or send what no JSON can hold. test_env_server_processes.py has what takes
more than one process.
"""

import doctest
import gc
import json
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env_server
from env_server import EnvClient, EnvError, RemoteEpisode, create_app, make_server, parse_options


class Tally(gym.Env):
    """Adds up the numbers it is told; the task is the sum to reach."""

    instructions = "Say numbers. Reach the sum."
    max_turns = 5
    alive = 0  # environment objects that were built and not yet closed
    in_flight = most_in_flight = 0  # steps at the same moment, now and at most
    count_lock = threading.Lock()
    gate = threading.Event()  # "wait" steps wait for it

    def __init__(self):
        Tally.count(alive=1)
        self.ballast = bytearray(200_000)  # a leak of these is seen in the process's memory

    @classmethod
    def count(cls, **changes):
        with Tally.count_lock:
            for name, change in changes.items():
                setattr(Tally, name, getattr(Tally, name) + change)
            Tally.most_in_flight = max(Tally.most_in_flight, Tally.in_flight)

    def tasks(self, split):
        return {"train": ["3", "5", "crash", "number"], "dev": ["7"], "test": ["11"]}[split]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        task = options["task"]
        if task == "crash":
            raise KeyError("no such recipe")
        self.goal, self.sum = int(task) if task.isdigit() else 0, 0
        info = {"success": False, "category": "sums", "draw": self.np_random.integers(1000)}
        return 5 if task == "number" else f"reach {task}", info

    def step(self, action):
        Tally.count(in_flight=1)
        try:
            return self.act(action)
        finally:
            Tally.count(in_flight=-1)

    def act(self, action):
        info, reward, shown = {"invalid": False}, np.float32(0), None
        match action.split():
            case ["crash"]:
                raise RuntimeError("the ball is stuck")
            case ["exit"]:
                raise SystemExit(3)
            case ["wait"]:
                assert Tally.gate.wait(10)
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["reward", number]:
                reward = float(number)
            case ["surrogate"]:
                shown = "half \ud83d a pair"
            case ["numpy"]:
                info |= {"bit": np.bool_(True), "float": np.float32(0.5), "row": np.arange(3)}
            case ["nan"]:
                info["nan"] = float("nan")
            case ["object"]:
                info["object"] = object()
            case ["bytes"]:
                shown = b"bytes"
            case [number] if number.isdigit():
                self.sum += int(number)
            case _:
                info["invalid"] = True
        is_there = np.bool_(self.sum == self.goal)
        info["success"] = is_there
        return shown or f"sum {self.sum}", np.float32(is_there) or reward, is_there, False, info

    def available_actions(self):
        return [str(number) for number in range(1, 4)]

    def close(self):
        Tally.count(alive=-1)


@contextmanager
def served(make_env=Tally, **settings):
    """A server of this process, on a free port."""
    app = create_app(make_env, "tally", **{"capacity": 8, **settings})
    server = make_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}", app.extensions["episodes"]
    finally:
        Tally.gate.set()
        app.extensions["episodes"].close_all()
        server.task_dispatcher.shutdown()
        # An empty socket map ends the server's loop; the trigger wakes it up to notice.
        server.pull_trigger()
        server.asyncore.close_all(server._map)


@pytest.fixture(scope="module")
def shared():
    with served(capacity=64) as (url, _):
        yield url


@pytest.fixture
def client(shared):
    Tally.gate.clear()
    return EnvClient(shared, timeout=10)


@pytest.fixture
def episode(client):
    with RemoteEpisode(client) as episode:
        episode.reset("5")
        yield episode


def ask(url, method, path, body=None, headers=None):
    """One request, written by hand: its status and its JSON, whatever they are."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        body = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
        assert response.getheader("Content-Type") == "application/json", data
        return response.status, json.loads(data)
    finally:
        connection.close()


def refusal(call, *args):
    with pytest.raises(EnvError) as caught:
        call(*args)
    return caught.value.status, caught.value.code


def wait_until(is_true, seconds=5.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# --- the table of routes ---


def test_every_route_answers_in_the_promised_shape(shared):
    status, health = ask(shared, "GET", "/health")
    assert (status, health) == (
        200,
        {
            "status": "ok",
            "env": "tally",
            "version": env_server.VERSION,
            "episodes": 0,
            "capacity": 64,
            "max_turns": 5,
            "num_tasks": {"train": 4, "dev": 1, "test": 1},
        },
    )
    assert ask(shared, "GET", "/tasks?split=dev") == (200, {"tasks": ["7"]})
    said = {"instructions": "Say numbers. Reach the sum."}
    assert ask(shared, "GET", "/instructions") == (200, said)

    status, created = ask(shared, "POST", "/create", {})
    assert status == 200
    assert list(created) == ["id"]
    assert len(created["id"]) >= 20
    assert ask(shared, "GET", "/health")[1]["episodes"] == 1

    status, start = ask(shared, "POST", "/reset", {**created, "task": "5", "seed": 1})
    assert (status, start["observation"]) == (200, "reach 5")
    assert start["info"]["success"] is False
    query = f"?id={created['id']}"
    assert ask(shared, "GET", "/observation" + query) == (200, {"observation": "reach 5"})
    actions = {"available_actions": ["1", "2", "3"]}
    assert ask(shared, "GET", "/available_actions" + query) == (200, actions)

    step = {**created, "action": "2", "turn": 0}
    assert ask(shared, "POST", "/step", step) == (
        200,
        {
            "observation": "sum 2",
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "info": {"invalid": False, "success": False},
        },
    )
    assert ask(shared, "GET", "/observation" + query) == (200, {"observation": "sum 2"})
    status, end = ask(shared, "POST", "/step", {**created, "action": "3", "turn": 1})
    assert (end["reward"], end["terminated"], end["info"]["success"]) == (1.0, True, True)
    assert ask(shared, "GET", "/available_actions" + query) == (200, {"available_actions": []})

    for _ in range(2):  # and once more: closing is idempotent
        assert ask(shared, "POST", "/close", created) == (200, {"closed": True})
    assert ask(shared, "POST", "/close", {"id": "never was"}) == (200, {"closed": True})
    assert ask(shared, "POST", "/step", step)[0] == 404


def test_ids_cannot_be_guessed(client):
    ids = [client.create() for _ in range(20)]
    assert len(set(ids)) == 20
    assert not {len(id) for id in ids} - {22}  # 16 random bytes
    assert len({id[:4] for id in ids}) > 15  # no common beginning, no counter
    for id in ids:
        client.close(id)


MALFORMED = [  # body of a /step whose good fields are id, action "1" and turn 0
    "",
    "{",
    "[]",
    '"text"',
    "null",
    "NaN",
    b"\xff\xfe{}",
    b'{"id": "\xed\xa0\x80"}',
    "[" * 100_000,
    '{"a":' * 50_000,
    '{"turn": ' + "9" * 5000 + "}",
    {"action": None},
    {"action": 1},
    {"action": ["1"]},
    {"action": "\ud800"},
    {"turn": "0"},
    {"turn": True},
    {"turn": False},
    {"turn": 0.0},
    {"turn": None},
    {"turn": float("nan")},
    {"turn": float("inf")},
    {"id": 7},
    {"id": "\udfff"},
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body)[:24])
def test_malformed_bodies_are_400(shared, episode, body):
    if isinstance(body, dict):
        body = {"id": episode.id, "action": "1", "turn": 0} | body
    status, reply = ask(shared, "POST", "/step", body)
    assert (status, reply["error"]["code"]) == (400, "malformed")
    assert set(reply["error"]) == {"code", "message"}
    assert episode.step("4")[0] == "sum 4"  # nothing of it reached the environment


@pytest.mark.parametrize("missing", ["id", "action", "turn"])
def test_a_missing_field_is_named(shared, episode, missing):
    body = {"id": episode.id, "action": "1", "turn": 0}
    del body[missing]
    status, reply = ask(shared, "POST", "/step", body)
    assert status == 400
    assert f'"{missing}"' in reply["error"]["message"]


@pytest.mark.parametrize("seed", [-1, 2**63, True, "1", 1.0, [1]])
def test_a_seed_is_a_whole_number(shared, episode, seed):
    body = {"id": episode.id, "task": "3", "seed": seed}
    assert ask(shared, "POST", "/reset", body)[0] == 400


def test_seed_reaches_the_environment(episode):
    draws = [episode.reset("5", seed=seed)[1]["draw"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert episode.reset("5", seed=2**63 - 1)[0] == "reach 5"


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("GET", "/", None, 404),
        ("GET", "/nothing", None, 404),
        ("POST", "/step/", "{}", 404),
        ("GET", "/step", None, 405),
        ("PUT", "/create", "{}", 405),
        ("POST", "/health", "{}", 405),
        ("GET", "/tasks", None, 400),
        ("GET", "/tasks?split=everything", None, 404),
        ("GET", "/tasks?split=", None, 404),
        ("GET", "/observation", None, 400),
        ("GET", "/observation?id=x", None, 404),
        ("GET", "/observation?id=%ff%00", None, 404),
        ("GET", "/available_actions?id=x", None, 404),
        ("POST", "/reset", {"id": "x", "task": "5"}, 404),
        ("POST", "/step", {"id": "x", "action": "", "turn": 0}, 404),
        ("POST", "/close", {}, 400),
        ("POST", "/close", {"id": None}, 400),
        ("POST", "/step", " " * (2**20 + 1), 413),
        ("POST", "/step", " " * 2**20, 400),
    ],
)
def test_errors_have_a_true_status_and_are_json(shared, method, path, body, status):
    got, reply = ask(shared, method, path, body)
    assert got == status
    assert reply["error"].keys() == {"code", "message"}
    assert all(isinstance(text, str) and text for text in reply["error"].values())


def test_a_chunked_body_is_no_way_around_the_size_limit(shared):
    status, _ = ask(shared, "POST", "/step", iter([b" " * 2**19] * 3))
    assert status == 413


def test_token_guards_every_route():
    with served(token="s3cret") as (url, _):
        for method, path in [("GET", "/health"), ("POST", "/create"), ("GET", "/no/such/route")]:
            for header in ("", "s3cret", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer \xe9"):
                status, reply = ask(url, method, path, headers={"Authorization": header})
                assert (status, reply["error"]["code"]) == (401, "unauthorized"), (path, header)
            assert ask(url, method, path)[0] == 401
        assert ask(url, "GET", "/health", headers={"Authorization": "bearer s3cret"})[0] == 200
        assert EnvClient(url, token="s3cret").health()["status"] == "ok"
        assert refusal(EnvClient(url, token="guess").create) == (401, "unauthorized")


# --- turns ---


def test_the_same_turn_again_returns_the_stored_reply(client, episode):
    first = client.step(episode.id, "2", 0)
    assert client.step(episode.id, "2", 0) == first  # a lost reply, asked for again
    assert client.step(episode.id, "1", 1)["observation"] == "sum 3"  # and 2 was added once
    assert client.step(episode.id, "2", 2)["terminated"] is True
    assert client.step(episode.id, "2", 2)["terminated"] is True  # the last one's too


def test_any_other_turn_is_409(client, episode):
    client.step(episode.id, "1", 0)
    client.step(episode.id, "1", 1)
    for action, turn in [("1", 0), ("2", 1), ("1", 3), ("1", -1), ("1", 10**30)]:
        assert refusal(client.step, episode.id, action, turn) == (409, "wrong_turn"), (action, turn)
    assert client.step(episode.id, "1", 2)["observation"] == "sum 3"


def test_a_step_needs_a_reset_before_and_none_is_left_after_the_end(client):
    with RemoteEpisode(client) as episode:
        assert refusal(episode.step, "1") == (409, "not_reset")
        assert refusal(client.observation, episode.id) == (409, "not_reset")
        assert refusal(episode.available_actions) == (409, "not_reset")
        episode.reset("3")
        assert episode.step("3")[2] is True
        assert refusal(episode.step, "1") == (409, "episode_over")
        episode.reset("3")  # starts again, from turn 0
        assert episode.step("1")[0] == "sum 1"


def test_a_failed_reset_leaves_the_episode_as_it_was(client, episode):
    draw = client.reset(episode.id, "5", 4)["info"]["draw"]
    client.step(episode.id, "2", 0)
    for task, expected in [("6", (404, "unknown_task")), ("", (404, "unknown_task"))]:
        assert refusal(client.reset, episode.id, task, 9) == expected
    assert refusal(client.reset, episode.id, 5) == (400, "malformed")
    assert client.observation(episode.id) == "sum 2"
    assert client.step(episode.id, "2", 0)["observation"] == "sum 2"  # the stored reply, still
    assert client.step(episode.id, "3", 1)["terminated"] is True
    assert client.reset(episode.id, "5", 4)["info"]["draw"] == draw


def test_two_threads_with_the_same_step_act_once(client, episode):
    Tally.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(client.step, episode.id, "wait", 0) for _ in range(2)]
        wait_until(lambda: Tally.in_flight == 1)
        time.sleep(0.05)
        assert Tally.in_flight == 1
        Tally.gate.set()
        assert steps[0].result() == steps[1].result()
    assert client.step(episode.id, "1", 1)["observation"] == "sum 1"


# --- crashes ---


CRASHES = ["crash", "exit", "reward nan", "reward inf", "nan", "object", "bytes"]


@pytest.mark.parametrize("action", CRASHES)
def test_a_crash_is_a_500_and_gives_the_slot_back(client, action, caplog):
    alive, episodes = Tally.alive, client.health()["episodes"]
    episode = RemoteEpisode(client)
    episode.reset("5")
    assert refusal(episode.step, action) == (500, "environment_crash")
    assert "Traceback" in caplog.text  # in the server's log, which is its stderr
    assert refusal(episode.step, action) == (404, "unknown_id")
    assert client.health()["episodes"] == episodes
    assert Tally.alive == alive


def test_a_crash_in_reset_and_in_the_constructor(client):
    for task, cause in [("crash", "KeyError"), ("number", "TypeError")]:
        episode = RemoteEpisode(client)
        with pytest.raises(EnvError, match=cause):
            episode.reset(task)
        assert refusal(episode.reset, "5") == (404, "unknown_id")

    built = []

    def build_once():
        if built:
            raise OSError("no Java here")
        built.append(Tally())
        return built[0]

    with served(build_once, capacity=1) as (url, episodes):
        for _ in range(3):  # with a slot lost, the second would be a 503
            assert refusal(EnvClient(url).create) == (500, "environment_crash")
        assert len(episodes) == 0


def test_numpy_and_broken_text_become_json(episode):
    *_, info = episode.step("numpy")
    assert info == {
        "invalid": False,
        "bit": True,
        "float": 0.5,
        "row": [0, 1, 2],
        "success": False,
    }
    assert episode.step("surrogate")[0] == "half ? a pair"
    assert episode.step("réponse 中文 🎈")[4]["invalid"] is True


# --- capacity, time-to-live, threads ---


def test_capacity_holds_under_concurrent_creates():
    class SlowToBuild(Tally):
        def __init__(self):
            time.sleep(0.02)  # wide open for a check that is apart from its use
            super().__init__()

    before = Tally.alive
    with served(SlowToBuild, capacity=5) as (url, episodes):
        client = EnvClient(url)

        def try_to_create(_):
            try:
                return client.create()
            except EnvError as error:
                assert (error.status, error.code) == (503, "at_capacity")

        with ThreadPoolExecutor(16) as pool:
            ids = [id for id in pool.map(try_to_create, range(32)) if id]
        assert len(ids) == len(episodes) == Tally.alive - before == 5
        client.close(ids[0])
        assert client.create()
    assert Tally.alive == before  # the end of a server closes every environment


def test_idle_episodes_are_reaped_and_their_slots_come_back():
    before = Tally.alive
    with served(capacity=3, ttl=0.4) as (url, episodes):
        killed, steady = EnvClient(url), RemoteEpisode(EnvClient(url))
        ids = [killed.create() for _ in range(2)]  # whose client is never heard of again
        steady.reset("5")
        assert refusal(killed.create) == (503, "at_capacity")
        for _ in range(10):
            time.sleep(0.1)
            steady.step("0")  # a used one lives on
        assert len(episodes) == Tally.alive - before == 1
        assert refusal(killed.reset, ids[0], "5") == (404, "unknown_id")
        assert killed.create()
        assert steady.step("5")[2] is True


def test_a_slow_step_outlives_the_time_to_live():
    with served(ttl=0.2) as (url, episodes):
        with RemoteEpisode(EnvClient(url)) as episode:
            episode.reset("5")
            assert episode.step("sleep 0.7")[0] == "sum 0"
            assert episode.step("5")[2] is True
        assert len(episodes) == 0


def test_at_capacity_the_expired_go_first():
    """Without waiting for the reaper, whose rounds are up to five seconds apart."""
    with served(capacity=1, ttl=0.3) as (url, episodes):
        episodes._is_shut.set()  # stops the reaper
        time.sleep(0.1)
        episodes._is_shut.clear()
        client = EnvClient(url)
        client.create()
        assert refusal(client.create) == (503, "at_capacity")
        time.sleep(0.35)
        assert client.create()


def test_close_does_not_wait_for_a_hung_step():
    with served(capacity=1) as (url, _):
        client = EnvClient(url)
        episode = RemoteEpisode(client)
        episode.reset("5")
        before = Tally.alive
        Tally.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            hung = pool.submit(episode.step, "wait")
            wait_until(lambda: Tally.in_flight == 1)
            start = time.monotonic()
            client.close(episode.id)
            assert time.monotonic() - start < 1
            assert refusal(client.observation, episode.id) == (404, "unknown_id")
            assert Tally.alive == before  # not pulled from under the step...
            assert refusal(client.create) == (503, "at_capacity")  # ...whose slot is still in use
            Tally.gate.set()
            assert hung.result()[0] == "sum 0"
        wait_until(lambda: Tally.alive == before - 1)
        assert client.create()


def test_32_steps_are_in_flight_at_once(client):
    """And a slow one in one episode does not hold up another: each has a lock and a thread."""
    episodes = [RemoteEpisode(client) for _ in range(32)]
    for episode in episodes:
        episode.reset("5")
    Tally.gate.clear()
    Tally.most_in_flight = 0
    with ThreadPoolExecutor(32) as pool:
        steps = [pool.submit(episode.step, "wait") for episode in episodes]
        wait_until(lambda: Tally.most_in_flight == 32)
        with RemoteEpisode(client) as quick:
            quick.reset("5")
            assert quick.step("1")[0] == "sum 1"
        Tally.gate.set()
        assert [step.result()[0] for step in steps] == ["sum 0"] * 32
    for episode in episodes:
        episode.close()


def memory_mb():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


def test_a_thousand_episodes_leave_nothing_behind(client):
    def cycle(times):
        for _ in range(times):
            with RemoteEpisode(client) as episode:
                episode.reset("5")
                episode.step("1")
        gc.collect()
        return memory_mb(), threading.active_count(), Tally.alive

    first_mb, *first = cycle(100)
    last_mb, *last = cycle(1000)
    assert last == first
    assert last_mb - first_mb < 20  # Tally's ballast alone would be 190


# --- any body at all ---

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
bodies = (
    st.binary()
    | values
    | st.fixed_dictionaries(
        {},
        optional={"id": values | st.just("ID"), "task": values, "seed": values}
        | {"action": values, "turn": values},
    )
)


@settings(max_examples=150, deadline=None)
@given(route=st.sampled_from(["create", "reset", "step", "close"]), body=bodies)
def test_junk_is_never_a_server_error(junk_target, route, body):
    flask, episode_id = junk_target
    if isinstance(body, dict) and body.get("id") == "ID":
        body["id"] = episode_id
        if route == "close":
            return
    if isinstance(body, dict) and body.get("action") in CRASHES:
        return
    data = body if isinstance(body, bytes) else json.dumps(body)
    response = flask.post(f"/{route}", data=data)
    assert response.status_code in (200, 400, 404, 409)
    reply = json.loads(response.data, parse_constant=lambda name: pytest.fail(name))
    assert ("error" in reply) == (response.status_code != 200)
    if "id" in reply:
        assert flask.post("/close", json=reply).json == {"closed": True}


@pytest.fixture(scope="module")
def junk_target():
    app = create_app(Tally, capacity=8)
    flask = app.test_client()
    episode_id = flask.post("/create").json["id"]
    yield flask, episode_id
    app.extensions["episodes"].close_all()


# --- the client ---


class Lossy:
    """A network between client and server: passes requests on, and loses the first replies."""

    def __init__(self, url, losses, before=False):
        self.url, self.losses, self.before, self.seen = url, losses, before, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.relay, args=(connection,), daemon=True).start()

    def relay(self, near):
        far = socket.create_connection(self.url.removeprefix("http://").split(":"))
        with near, far:
            while data := near.recv(2**16):
                while b"\r\n\r\n" not in data or data.endswith(b"\r\n\r\n") and b"POST" in data:
                    data += near.recv(2**16)  # headers and body travel in two packets
                self.seen.append(data.split()[1].decode().partition("?")[0])
                if self.losses and self.before:
                    self.losses -= 1
                    return
                far.sendall(data)
                reply = far.recv(2**16)
                while not reply.endswith(b"}"):
                    reply += far.recv(2**16)
                if self.losses:
                    self.losses -= 1
                    return
                near.sendall(reply)


@pytest.mark.parametrize("before", [True, False], ids=["request lost", "reply lost"])
def test_a_lost_reply_costs_nothing(shared, before):
    net = Lossy(shared, losses=0, before=before)
    with RemoteEpisode(EnvClient(net.address, timeout=10)) as episode:
        net.losses = 2
        assert episode.reset("5")[0] == "reach 5"
        net.losses = 2
        assert episode.step("2")[0] == "sum 2"
        net.losses = 1
        assert episode.step("3")[:3] == ("sum 5", 1.0, True)
        net.losses = 1
        assert episode.client.observation(episode.id) == "sum 5"
    assert net.seen.count("/step") == 5


def test_a_create_that_may_have_arrived_is_not_repeated(shared):
    net = Lossy(shared, losses=1)
    assert refusal(EnvClient(net.address, timeout=5).create) == (None, "unreachable")
    assert net.seen == ["/create"]
    assert EnvClient(net.address).create()


def test_a_refused_connection_is_tried_again_even_for_create():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = EnvClient(f"http://127.0.0.1:{port}", timeout=10)
    start = time.monotonic()
    assert refusal(client.create) == (None, "unreachable")
    assert time.monotonic() - start < 3  # the pauses' sum is about one second

    def serve_late():
        time.sleep(0.4)
        server = make_server(create_app(Tally, capacity=2), "127.0.0.1", port)
        server.run()

    threading.Thread(target=serve_late, daemon=True).start()
    assert client.create()


def test_a_call_ends_at_its_deadline(shared):
    client = EnvClient(shared, timeout=0.5)
    episode = RemoteEpisode(client)
    episode.reset("5")
    start = time.monotonic()
    Tally.gate.clear()
    assert refusal(episode.step, "wait") == (None, "timeout")
    assert 0.4 < time.monotonic() - start < 1.5
    Tally.gate.set()
    assert episode.step("wait")[0] == "sum 0"  # the same turn: its reply is there by now
    episode.close()


def test_a_silent_server_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        client = EnvClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        start = time.monotonic()
        for call in (client.health, client.create):
            assert refusal(call) == (None, "timeout")
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"error": "text"}', b'{"error": {}}', b"{}"])
def test_another_program_on_the_port_is_an_enverror(body):
    def answer():
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: "
                connection.sendall(head + str(len(body)).encode() + b"\r\n\r\n" + body)

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, daemon=True).start()
    client = EnvClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
    assert refusal(client.health) == (200, "bad_reply")


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(EnvError("timeout", "too slow", 500)))
    assert (error.code, error.message, error.status) == ("timeout", "too slow", 500)
    assert str(error) == "too slow [timeout]"


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://host", "http://"])
def test_an_address_needs_a_scheme(url):
    with pytest.raises(ValueError, match="http://127.0.0.1:8000"):
        EnvClient(url)


# --- options ---


def test_doctests():
    assert doctest.testmod(env_server).failed == 0


@pytest.mark.parametrize(
    "options, names, said",
    [
        (["levels"], ["babyai"], "key=value"),
        (["=paper"], ["babyai"], "key=value"),
        (["babyai.=paper"], ["babyai"], "key=value"),
        (["--levels=paper"], ["babyai"], "key=value"),
        (["levels=paper"], ["textcraft", "babyai"], "babyai.levels=paper"),
        (["sciworld.x=1"], ["textcraft", "babyai"], "sciworld"),
        (["a=1", "babyai.a=2"], ["babyai"], "twice"),
    ],
)
def test_options_say_what_is_wrong(options, names, said):
    with pytest.raises(ValueError, match=said):
        parse_options(options, names)


def test_options_keep_everything_after_the_first_equals_sign():
    assert parse_options(["a=b=c.d", "x="], ["babyai"]) == {"babyai": {"a": "b=c.d", "x": ""}}
    assert parse_options([], ["textcraft"]) == {"textcraft": {}}
