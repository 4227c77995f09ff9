"""
The loop as a whole: what it refuses, what it computes, and what survives a kill.

The slow tests start real processes with real environment servers; `pytest -m "not slow"` leaves them out.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

import evaluate
import model as weights
import records
import train
from agent import Trajectory, Turn
from engines import HFEngine
from rollout import RolloutError, collate

ROOT = Path(__file__).parents[1]
# One thread and the smallest model that still runs: these tests are about the loop, not about learning.
QUICK = (
    "--steps 4 --tasks-per-step 2 --group-size 4 --stages 2 3 --interval 2 --minibatches 2 --eval-every 0 "
    "--save-every 1 --max-new-tokens 24 --micro-tokens 600"
).split()


def run(script: str, *flags: str, cwd: Path, **extra) -> subprocess.CompletedProcess:
    """A script of ours in a folder of its own, as a user would start it."""
    return subprocess.run(
        command(script, *flags),
        cwd=cwd,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=300,
        **extra,
    )


def command(script: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *flags]


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A clone of a few demonstrations: bad, but it speaks the form, and now and then it is right."""
    folder = tmp_path_factory.mktemp("start")
    flags = "--demos 120 --updates 40 --hidden 64 --layers 2".split()
    done = run("sft.py", *flags, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return str(next((folder / "out/models").glob("tiny-babyai-*")).resolve())


# --- what is refused, in one line and before any work ---


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--algo", "grpo", "--group-size", "1"], "--group-size must be 2 or more"),
        (["--stages", "8", "4"], "strictly increasing"),
        (["--env", "nowhere"], "nowhere"),
        (["--model", "out/no/such/folder"], "out/no/such/folder"),
        (["--env-urls", "http://127.0.0.1:9"], "no environment server at http://127.0.0.1:9"),
        (["--options", "levels=imaginary"], "imaginary"),
        (["--resume"], "--name"),
        (["--temperature", "0"], "greedy"),
        (["--replicas", "0"], "--replicas must be 1 or more"),
        (["--keep", "0"], "--keep must be 1 or more"),
        (["--importance-cap", "0"], "--importance-cap must be above 0"),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--clip-high", "-1"], "--clip-high must be above 0"),
        (["--clip-low", "5"], "--clip-low must be above 0 and at most 1, got 5"),
        (["--gamma", "2"], "--gamma must be above 0 and at most 1"),
        (["--lam", "-1"], "--lam lies between 0 and 1"),
        (["--name", "../evil"], "--name is one folder in out/, got '../evil'"),
        (["--patience", "-1"], "--patience must be 0 or more"),
        (["--overlong-buffer", "600"], "--overlong-buffer lies below --overlong-length, 512"),
        (["--test-samples", "0"], "--test-samples must be 1 or more"),
        (["--eval-limit", "-1"], "--eval-limit must be 0 or more"),
        (["--lora-rank", "4", "--lora-alpha", "0"], "--lora-alpha must be above 0"),
        (["--max-tokens", "5000"], "context of 4096 tokens"),
        (["--no-such-flag"], "no-such-flag"),
        (
            ["--top-p", "0.9"],
            "top-p",
        ),  # the trainer scores at a temperature, and knows no other distribution
    ],
)
def test_a_users_mistake_is_said_and_ends_with_code_2(flags, says, tmp_path, start):
    model = [] if "--model" in flags else ["--model", start]
    done = run("train.py", *QUICK, *model, *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*"))  # so that the corrected command can use the same --name


def test_a_folder_that_holds_a_run_is_never_written_to(tmp_path, start):
    folder = tmp_path / "out/mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("precious\n")
    done = run("train.py", *QUICK, "--model", start, "--name", "mine", cwd=tmp_path)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert (folder / "metrics.jsonl").read_text() == "precious\n"
    assert len(list(folder.iterdir())) == 1


# --- resuming ---


def metrics(folder: Path) -> list[dict]:
    """Lines of metrics.jsonl without what a clock wrote."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith("seconds_")}
        for line in lines
    ]


def final_weights(folder: Path) -> bytes:
    return (folder / "checkpoints/step_4/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_run_killed_again_and_again_is_bit_for_bit_one_that_was_not(
    algo, tmp_path, start
):  # BEHAVIOURS 51, 53
    flags = [*QUICK, "--model", start, "--algo", algo, "--critic-warmup", "1"]
    done = run("train.py", *flags, "--name", "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]

    resume: list[str] = []
    for seconds_after in (
        0.0,
        0.3,
        1.0,
    ):  # after a line appears: in its save, in the next rollout, later
        process = subprocess.Popen(
            command("train.py", *flags, "--name", "killed", *resume), cwd=tmp_path, env=environ(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        lines = tmp_path / "out/killed/metrics.jsonl"
        before = lines.read_text().count("\n") if lines.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if lines.exists() and lines.read_text().count("\n") != before:
                break
            time.sleep(0.01)
        time.sleep(seconds_after)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resume = ["--resume"]
    done = run("train.py", *flags, "--name", "killed", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert metrics(tmp_path / "out/killed") == metrics(tmp_path / "out/whole")
    assert final_weights(tmp_path / "out/killed") == final_weights(tmp_path / "out/whole")
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "out/killed/trajectories.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(steps) and steps.count(1) == steps.count(4) == 8

    # It may have been stopped after its last step, too: then nothing is left to play.
    again = run("train.py", *flags, "--name", "killed", "--resume", cwd=tmp_path)
    assert again.returncode == 0 and "done in" in again.stdout, again.stderr[-2000:]
    assert metrics(tmp_path / "out/killed") == metrics(tmp_path / "out/whole")

    changed = run("train.py", *flags, "--name", "killed", "--resume", "--lr", "0.5", cwd=tmp_path)
    assert changed.returncode == 2 and f"--lr was {train.Config().lr}, now 0.5" in changed.stderr


@pytest.mark.slow
def test_a_tracked_run_is_the_same_run_and_is_continued(tmp_path, start, monkeypatch):
    pytest.importorskip("wandb")
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    flags = [*QUICK, "--model", start]
    refused = run("train.py", *flags, "--wandb", "toy", "--name", "tracked", cwd=tmp_path)
    assert refused.returncode == 2 and "WANDB_MODE=offline" in refused.stdout + refused.stderr
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags += ["--tensorboard", "--wandb", "toy", "--name", "tracked"]
    for resume in ([], ["--resume"]):
        done = run("train.py", *flags, *resume, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        shutil.rmtree(tmp_path / "out/tracked/checkpoints/step_4")  # as if killed before its save
    folder = tmp_path / "out/tracked"
    plain = run("train.py", *flags[:-5], "--name", "plain", cwd=tmp_path)
    assert plain.returncode == 0 and metrics(folder) == metrics(tmp_path / "out/plain")
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    returns = events.Scalars("train/return_mean")
    assert [event.step for event in returns] == [1, 2, 3, 4]
    assert [event.value for event in returns] == pytest.approx(
        [line["return_mean"] for line in metrics(folder)]
    )
    # Two processes, one run of Weights & Biases: the folder's name ends in the run's id.
    sessions = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert len(sessions) == 2
    assert {name.rpartition("-")[2] for name in sessions} == {(folder / "wandb-id.txt").read_text()}


def test_lines_newer_than_the_checkpoint_are_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "split": "test"}\n{"step": 1}\n{"step": 2}\n{"step": 2, "split": "test"}\n{"ste'
    )
    records.take_back(path, 1)
    assert path.read_text() == '{"step": 0, "split": "test"}\n{"step": 1}\n'
    records.take_back(path, -1)
    assert path.read_text() == ""


# --- environments that die ---


@pytest.mark.slow
def test_a_server_killed_in_the_middle_is_replaced_and_no_episode_is_scored_0(tmp_path, start):
    flags = [*QUICK, "--model", start, "--name", "shot", "--steps", "6", "--stages", "6"]
    process = subprocess.Popen(
        command("train.py", *flags), cwd=tmp_path, env=environ(), text=True, stderr=subprocess.PIPE
    )
    wait_for_lines(tmp_path / "out/shot/metrics.jsonl", 2, process)
    kill_servers_of(process.pid)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]
    assert "restarting" in errors
    lines = metrics(tmp_path / "out/shot")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["error_fraction"] == 0 for line in lines)


@pytest.mark.slow
def test_servers_gone_for_good_stop_the_run_with_a_checkpoint_and_a_reason(
    tmp_path, start
):  # BEHAVIOURS 44
    server = subprocess.Popen(
        command("env_server.py", "--env", "babyai", "--port", "18431"),
        cwd=tmp_path,
        env=environ(),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(18431)
        flags = [
            *QUICK,
            "--model",
            start,
            "--name",
            "orphan",
            "--steps",
            "200",
            "--save-every",
            "100",
        ]
        flags += ["--env-urls", "http://127.0.0.1:18431", "--env-grace", "1"]
        process = subprocess.Popen(
            command("train.py", *flags),
            cwd=tmp_path,
            env=environ(),
            text=True,
            stderr=subprocess.PIPE,
        )
        wait_for_lines(tmp_path / "out/orphan/metrics.jsonl", 2, process)
    finally:
        server.kill()
        server.wait()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert (
        "of 8 episodes failed" in errors and "unreachable" in errors and "Traceback" not in errors
    )
    saved = weights.newest_checkpoint(tmp_path / "out/orphan")
    assert saved is not None
    assert int(saved.name[5:]) == len(metrics(tmp_path / "out/orphan"))


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()[-2000:]
        time.sleep(0.05)


def wait_for_port(port: int) -> None:
    from env_server import EnvClient, EnvError

    deadline = time.monotonic() + 60
    while True:
        try:
            EnvClient(f"http://127.0.0.1:{port}").health()
            return
        except EnvError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def kill_servers_of(parent: int) -> None:
    """SIGKILL to every env_server.py that `parent` started."""
    killed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            started_by = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if started_by == parent and any(word.endswith(b"env_server.py") for word in words):
            os.kill(int(folder.name), signal.SIGKILL)
            killed += 1
    assert killed == 1


# --- the sampler has the trainer's weights ---


def test_a_sampler_that_missed_an_update_stops_the_run(make_lm, chat, one_rank):  # BEHAVIOURS 30
    class Deaf(HFEngine):
        def sync(self, named_weights, version):
            self._forget()

    run = train.Run.__new__(train.Run)
    run.chat, run.actor = chat, weights.Actor(make_lm())
    for engine in (HFEngine, Deaf):
        run.engine = engine(make_lm(), chat.stop_ids)
        assert run.sync(1) < 1e-4  # the same weights to start with
    with torch.no_grad():
        for parameter in run.actor.parameters():
            parameter += 0.1 * torch.ones_like(parameter).cumsum(0).sin()
    with pytest.raises(RolloutError, match="version 2.*does not sample from the trained weights"):
        run.sync(2)
    run.engine = HFEngine(make_lm(), chat.stop_ids)
    assert run.sync(3) < 1e-4


# --- what is kept ---


def test_the_best_policy_on_dev_is_kept(tmp_path, monkeypatch):  # BEHAVIOURS 40
    run = train.Run.__new__(train.Run)
    run.config, run.folder, run.actor, run.tokenizer = train.Config(), tmp_path, None, None
    run.state = {"step": 0, "best": -1.0}
    rates = iter([0.3, 0.5, 0.4, 0.5, None, 0.6])
    saved = []
    monkeypatch.setattr(weights, "save_policy", lambda folder, *_: saved.append(run.state["step"]))
    # an evaluation in which every episode failed has no success rate, and is not the best
    results = ({} if rate is None else {"success_rate": rate} for rate in rates)
    monkeypatch.setattr(run, "evaluate", lambda *_: next(results))
    for step in range(1, 7):
        run.state["step"] = step
        run.evaluate_on_dev()
    assert saved == [1, 2, 6] and run.state["best"] == 0.6


def test_a_run_that_was_given_no_name_is_resumed_by_its_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out/train-001"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(train.Config())))
    assert train.resume_point(train.Config(name="train-001", resume=True)) is None  # no step yet
    with pytest.raises(ValueError, match=f"--lr was {train.Config().lr}, now 0.1"):
        train.resume_point(train.Config(name="train-001", resume=True, lr=0.1))


def test_servers_that_fail_in_an_evaluation_on_the_way_cost_nothing_learnt(monkeypatch):
    run = train.Run.__new__(train.Run)
    run.folder, run.state = Path("out/mine"), {"step": 7}
    saved = []
    monkeypatch.setattr(run, "save", lambda: saved.append(True))
    monkeypatch.setattr(run, "evaluate_on_dev", lambda: train.check_errors([lost], 0.5))
    lost = Trajectory("toy", "t", end="error", error="EnvError: gone")
    says = r"gone\nA checkpoint was saved .* --resume --name mine goes on from step 7"
    with pytest.raises(RolloutError, match=says), run.saved_if_servers_fail():
        run.evaluate_on_dev()
    assert saved == [True]


# --- what is begun early ---


def test_the_next_steps_environments_are_reset_early_unless_an_evaluation_comes_first(monkeypatch):
    run = train.Run.__new__(train.Run)
    run.config, run.pools = train.Config(eval_every=2, tasks_per_step=2, group_size=3), {}
    run.tasks = [("babyai", f"task {i}") for i in range(9)]
    begun = {}
    monkeypatch.setattr(
        train, "reset_ahead", lambda _, blanks, key, *rest: begun.update({key: blanks})
    )
    for step in range(2, 6):
        run.prepare(step)
    assert list(begun) == [("train", 2), ("train", 4)]  # steps 2 and 4 end with an evaluation
    assert begun["train", 2] == run.blanks(2) and len(run.blanks(2)) == 6


# --- one rank or two ---


def some_trajectories() -> list[Trajectory]:
    """Three groups of very unequal lengths: [win, lose], [lose, win, lose], [lose, lose] (dead)."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for group, outcomes in enumerate([(1, 0), (0, 1, 0), (0, 0)]):
        for sample, success in enumerate(outcomes):
            t = Trajectory(
                "toy", f"task {group}", group, sample, end="terminated" if success else "max_turns"
            )
            t.add_context(torch.randint(4, 60, (5,), generator=generator).tolist())
            for turn in range(1 + 3 * ((group + sample) % 3)):
                start, length = len(t.ids), 3 + turn
                t.ids += torch.randint(4, 60, (length,), generator=generator).tolist()
                t.loss_mask += [1] * length
                t.logprobs += (-4 - torch.rand(length, generator=generator)).tolist()
                t.turns.append(Turn("", "", "", "", start, start + length))
                t.add_context([1, 5, 6])
            t.turns[-1].reward = float(success)
            made.append(t)
    return made


def gradients(
    rank: int, world: int, algo: str, rows: list[int] | None, store: str, results
) -> None:
    """Gradients of one update on `some_trajectories`, whole, by parameter name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config = train.Config(
        algo=algo, micro_tokens=40, kl_coef=0.1, entropy_coef=0.01, max_grad_norm=1e9
    )
    torch.manual_seed(3)  # the same small model everywhere
    lm = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0)
    )  # fmt: skip
    critic = (
        weights.shard(weights.Critic(lm), weights.mesh()) if algo == "ppo" else None
    )  # copies lm unsharded
    actor = weights.shard(weights.Actor(lm), weights.mesh())
    trajectories = some_trajectories()
    batch = collate(trajectories)
    everything = list(range(len(trajectories)))
    batch.old_logprobs = train.score(
        lambda p: actor(p.input_ids, p.loss_mask)[0] + 0.1, batch, everything, config
    )
    batch.ref_logprobs = batch.old_logprobs - 0.3
    last_values = None
    if critic:
        batch.old_values = train.score(
            lambda p: critic(p.input_ids, p.lengths)[0], batch, everything, config
        )
        last_values = train.score(
            lambda p: critic(p.input_ids, p.lengths)[1][:, None], batch, everything, config
        )[:, 0]
    batch = train.assign_credit(batch, last_values, config)
    rows = train.trainable_rows(trajectories, batch, config) if rows is None else rows

    class Keeper:
        """In place of an optimizer: keeps the gradients it is given."""

        def __init__(self, module):
            self.module, self.param_groups = module, [{"params": list(module.parameters())}]

        def step(self):
            self.kept = {
                name: p.grad.full_tensor().clone() for name, p in self.module.named_parameters()
            }

        def zero_grad(self):
            self.module.zero_grad()

    keepers = {"actor": Keeper(actor)} | ({"critic": Keeper(critic)} if critic else {})
    train.update(actor, critic, keepers, batch, rows, config)
    if rank == 0:
        kept = {
            f"{name}.{key}": grad
            for name, keeper in keepers.items()
            for key, grad in keeper.kept.items()
        }
        torch.save(kept, results)
    # A step's only update finds the old log-probabilities itself, those of other ranks' rows included.
    scored = train.score(lambda p: actor(p.input_ids, p.loss_mask)[0], batch, rows, config)
    batch.old_logprobs = None
    train.update(actor, critic, keepers, batch, rows, config)
    assert scored.abs().sum() > 0 and torch.allclose(batch.old_logprobs, scored, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()
    # The interpreter's own shutdown now and then finds a thread of gloo's still joinable, and aborts.
    os._exit(0)


@pytest.mark.parametrize("algo", ["grpo", "rloo", "reinforce++", "ppo"])
@pytest.mark.parametrize(
    "rows", [None, [1]]
)  # [1]: a single micro-batch, so one of two ranks has nothing at all
def test_two_ranks_give_the_gradients_of_one(algo, rows, tmp_path):  # BEHAVIOURS 17, 33, 36, 50
    for world in (1, 2):
        mp.spawn(
            gradients,
            (world, algo, rows, str(tmp_path / f"store{world}"), tmp_path / f"{world}.pt"),
            nprocs=world,
        )
    one, two = torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "2.pt")
    assert one.keys() == two.keys() and any(grad.abs().max() > 1e-3 for grad in one.values())
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=1e-5, msg=name)


# --- who takes part ---


def test_dead_groups_and_cut_trajectories_stay_out_where_asked():  # BEHAVIOURS 23, 34
    trajectories = some_trajectories()
    batch = collate(trajectories)
    config = train.Config()
    assert train.trainable_rows(trajectories, batch, config) == [
        0,
        1,
        2,
        3,
        4,
    ]  # the last group is dead
    assert train.trainable_rows(
        trajectories, batch, dataclasses.replace(config, keep_dead_groups=True)
    ) == list(range(7))
    assert train.trainable_rows(
        trajectories, batch, dataclasses.replace(config, mask_truncated=True)
    ) == [0, 3]
    assert train.trainable_rows(
        trajectories, batch, dataclasses.replace(config, algo="ppo")
    ) == list(range(7))


def test_a_penalty_revives_a_group_that_the_environment_paid_alike():
    trajectories = some_trajectories()
    trajectories[6].turns[0].format_error = True  # in the group that is dead without it
    batch = collate(trajectories)
    rows = lambda **flags: train.trainable_rows(trajectories, batch, train.Config(**flags))  # noqa: E731
    assert rows() == [0, 1, 2, 3, 4]
    assert rows(format_penalty=0.2) == list(range(7))
    assert rows(turn_penalty=0.1) == list(range(7))  # its two episodes differ in length
    assert rows(kl_coef=0.1) == [0, 1, 2, 3, 4]
    assert rows(kl_coef=0.1, kl_in="reward") == list(range(7))
    advantages = train.assign_credit(batch, None, train.Config(format_penalty=0.2)).advantages
    assert advantages[5].max() > 0 > advantages[6].min()


def test_only_what_the_trainer_scored_is_logged_under_its_name():
    (t, *_) = trajectories = some_trajectories()
    batch = collate(trajectories)
    batch.old_logprobs, batch.advantages = batch.rollout_logprobs * 2, batch.rewards
    scored = records.as_line(t, 1, "train", 1.0, 0, batch, is_scored=True)["tokens"]
    assert scored["old_logprobs"] == [2 * x for x in scored["rollout_logprobs"]]
    assert records.as_line(t, 1, "train", 1.0, 0, batch)["tokens"]["old_logprobs"] is None


def test_padding_is_the_share_of_padded_positions_by_hand():
    batch = collate(some_trajectories())
    batch.lengths[:4] = torch.tensor([100, 50, 40, 20])
    assert train.padding(batch, [[0, 1], [2, 3]]) == pytest.approx(1 - 210 / (200 + 80))
    assert train.padding(batch, []) is None


def test_a_split_without_a_task_is_said_before_any_work():
    class Pool:
        tasks = {"train": ["a"], "dev": [], "test": ["b"]}

    evaluate.check_splits({"searchqa": Pool()}, "train", "test")
    with pytest.raises(ValueError, match="searchqa has no task in its dev split"):
        evaluate.check_splits({"searchqa": Pool()}, "train", "dev")


def test_a_runs_configuration_does_not_hold_the_servers_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train.open_run(train.Config(name="quiet", env_token="secret"), -1)
    assert "secret" not in (folder / "config.json").read_text()
    again = train.Config(name="quiet", env_token="other", resume=True)
    assert train.resume_point(again) is None  # and the same run it is, whatever the token


def test_a_trajectory_without_a_sampled_token_is_counted_and_not_trained_on():  # BEHAVIOURS 6
    trajectories = some_trajectories()
    trajectories[0].loss_mask = [0] * len(trajectories[0].ids)
    batch = collate(trajectories)
    assert 0 not in train.trainable_rows(trajectories, batch, train.Config())
    assert records.rollout_metrics(trajectories, batch)["empty_trajectories"] == 1


def test_the_learning_rate_rises_stays_and_falls():
    config = train.Config(steps=10, warmup=2, decay=0.4)
    shares = [train.learning_rate(step, config) for step in range(1, 11)]
    assert shares == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    falling = dataclasses.replace(config, decay=1.0)
    assert [train.learning_rate(step, falling) for step in (1, 2, 6, 10)] == [0.5, 0.9, 0.5, 0.1]
    flat = dataclasses.replace(config, warmup=0, decay=0.0)
    assert [train.learning_rate(step, flat) for step in (1, 5, 10)] == [1.0, 1.0, 1.0]


def test_minibatches_hold_every_row_once():
    parts = train.minibatches_of(list(range(10)), 3, seed=1)
    assert sorted(sum(parts, [])) == list(range(10)) and [len(part) for part in parts] == [4, 3, 3]
    assert train.minibatches_of([7], 3, seed=1) == [[7]]
    assert train.minibatches_of([], 3, seed=1) == []
