"""
Server processes from birth to death: the launcher, the command line, and playing by hand.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from env_server import EnvClient, EnvError, EnvServers, RemoteEpisode

REPO = Path(__file__).parent.parent
SCRIPT = str(REPO / "env_server.py")


def is_running(pid):
    """Zombies don't count: whoever should bury them may be gone or busy."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_true, seconds=10.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def run_cli(*flags, stdin="", seconds=30):
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_replicas_serve_and_end():
    with EnvServers("textcraft", {"max_depth": "1"}, replicas=2, capacity=4) as servers:
        assert len(set(servers.urls)) == 2
        pids = servers.pids
        for url in servers.urls:
            client = EnvClient(url)
            assert client.health()["capacity"] == 4
            with RemoteEpisode(client) as episode:
                observation, info = episode.reset(client.tasks("dev")[0])
                assert observation
                assert info["success"] is False
                assert episode.step("inventory")[4]["invalid"] is False
        modules = Path(f"/proc/{pids[0]}/maps").read_text()
        assert "libtorch" not in modules  # or every replica would pay a second and 200 MB for it
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_do_not_outlive_their_launcher(how):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from env_server import EnvServers\n"
        "with EnvServers('textcraft', capacity=2, replicas=2) as servers:\n"
        "    print(*servers.pids, flush=True)\n"
        "    time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(REPO)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        parent.send_signal(how)
        parent.wait(10)
        wait_until(lambda: not any(map(is_running, pids)), 5)


def test_a_killed_server_is_started_again_on_its_port():
    with EnvServers("textcraft", capacity=4) as servers:
        (url,) = servers.urls
        client = EnvClient(url, timeout=10)
        episode = RemoteEpisode(client)
        episode.reset(client.tasks("dev")[0])
        for kill_again in (True, False):
            (pid,) = servers.pids
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_running(pid))
            if kill_again:
                servers.ensure_alive()  # the loop's own call
            else:
                wait_until(lambda pid=pid: servers.pids != [pid])  # the watching thread
                servers.ensure_alive()  # waits for the one being started
            assert servers.urls == [url]
            assert client.health()["status"] == "ok"
        with pytest.raises(EnvError, match="unknown_id"):
            episode.step("inventory")
        with RemoteEpisode(client) as again:
            assert again.reset(client.tasks("dev")[0])[0]


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="ended with code 2.*max_dept.*max_depth"):
        EnvServers("textcraft", {"max_dept": "2"})


def test_a_hung_server_is_ended_too():
    with EnvServers("textcraft", capacity=2) as servers:
        process = servers._replicas[0].process
        os.kill(process.pid, signal.SIGSTOP)
        servers._replicas[0].end(time.monotonic() + 0.2)
        assert not is_running(process.pid)


def test_token_reaches_launched_servers_and_not_their_command_line():
    with EnvServers("textcraft", capacity=2, token="s3cret") as servers:
        with pytest.raises(EnvError, match="unauthorized"):
            EnvClient(servers.urls[0]).health()
        assert EnvClient(servers.urls[0], token="s3cret").health()["env"] == "textcraft"
        pid = servers.pids[0]
        assert "s3cret" not in Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_command_serves_until_a_signal(replicas, how):
    flags = ["--port", "0", "--replicas", str(replicas), "--capacity", "2", "--ttl", "60"]
    command = [sys.executable, SCRIPT, "--env", "textcraft", *flags, "--options", "max_depth=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            urls = [server.stdout.readline().split()[-1] for _ in range(replicas)]
            for url in urls:
                assert EnvClient(url).health()["env"] == "textcraft"
            server.send_signal(how)
            assert server.wait(10) == 0
        finally:
            server.kill()
    for url in urls:
        with pytest.raises(EnvError):
            EnvClient(url, timeout=0.2).health()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--env", "chess"], "textcraft"),
        (["--env", "textcraft", "--options", "max_dept=2"], "max_depth"),
        (["--options", "max_depth"], "key=value"),
        (["--capacity", "0"], "positive"),
        (["--ttl", "nan"], "positive"),
        (["--port", "65536"], "port"),
        (["--port", "65535", "--replicas", "2"], "port"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--task", "chest"], "--play"),
        (["--token", "two words"], "ASCII"),
        (["--play", "--task", "no such task"], "no such task"),
        (["--prot", "8000"], "--port"),
    ],
)
def test_a_users_mistake_is_one_message_and_code_2(flags, said):
    code, out, err = run_cli(*flags)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert err.startswith("╭") or err.count("\n") == 1  # tyro's box, or one line


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run_cli("--port", port)
        assert (code, err.count("\n")) == (2, 1)
        assert port in err
        assert "--port" in err


def test_play_from_a_pipe():
    play = ["--env", "textcraft", "--play", "--task", "stick"]
    code, out, _ = run_cli(*play, stdin="?\nget 2 bamboo\ncraft 1 stick using 2 bamboo\n")
    assert code == 0
    assert "stick" in out
    assert "get 1 " in out or "craft " in out  # what ? listed
    assert out.endswith("2 turns, reward 1, success True\n")


@pytest.mark.parametrize("stdin", ["", "quit\n", "nonsense\nquit\n"])
def test_play_can_stop_early(stdin):
    code, out, _ = run_cli("--env", "textcraft", "--play", stdin=stdin)
    assert code == 0
    assert out.endswith("success False\n")
