"""
What makes large models fit changes no number: ranks, recomputation, offload, empty starts, adapters.

Where two ranks are compared with one, both are real processes on gloo.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from test_model import CLOSE, a_batch, learn, whole
from test_train import QUICK, environ, metrics, run, start  # noqa: F401 (start is a fixture)
from transformers import AutoModelForCausalLM

import lora
import model as weights
import train
from engines import HFEngine
from estimate import Shape

ROOT = Path(__file__).parents[1]


# --- processes ---


def worker(rank: int, world: int, folder: Path, function, args: tuple) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.save(function(*args), folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # The interpreter's own shutdown now and then finds a thread of gloo's still joinable, and aborts.
    os._exit(0)


def on_ranks(world: int, folder: Path, function, *args) -> list:
    """What `function(*args)` returns on each of so many ranks."""
    folder.mkdir()
    mp.spawn(worker, (world, folder, function, args), nprocs=world)
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]


def saved_policy(folder: Path, lm, tokenizer) -> str:
    lm.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return str(folder / "policy")


@pytest.fixture
def policy(make_lm, tokenizer, tmp_path) -> str:
    """The small random model, as a folder."""
    return saved_policy(tmp_path, make_lm(), tokenizer)


def opened(path: str, rank: int = 0, **settings) -> tuple[dict, dict, object]:
    """(modules, optimizers, tokenizer) of a sharded actor and critic, as train.py builds them."""
    lm, tokenizer = weights.load_once(path)
    if rank:
        weights.freeze(lm, torch.float32)
        lora.add(lm, rank, 8.0, seed=1, base=path)
    modules = {"critic": weights.Critic(lm), "actor": weights.Actor(lm)}
    modules = {
        name: weights.shard(module, weights.mesh(), **settings) for name, module in modules.items()
    }
    optimizers = {
        name: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
        for name, module in modules.items()
    }
    return modules, optimizers, tokenizer


def equal(left: dict, right: dict) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


# --- one copy for all ranks ---


def loaded_once(path: str) -> dict[str, bool]:
    """Whether what two ranks hold together is what one would read; with a reader that only rank 0 may call."""
    plain, _ = weights.load(path)
    if dist.get_rank():
        weights.load = None
    lm, _ = weights.load_once(path)
    is_empty = all(parameter.is_meta for parameter in lm.parameters())
    actor = weights.Actor(lm)
    twin = weights.sampler_copy(actor, False, torch.float32)
    critic = weights.shard(weights.Critic(lm), weights.mesh())
    weights.shard(actor, weights.mesh())
    HFEngine(twin, {0}).sync(weights.full_weights(actor), 1)
    own, backbone = dict(plain.named_parameters()), dict(plain.get_decoder().named_parameters())
    half = actor.lm.model.embed_tokens.weight.to_local()
    theirs = plain.model.embed_tokens.weight.chunk(2)[dist.get_rank()]
    ids, mask = a_batch()
    with torch.no_grad():
        expected, _ = weights.Actor(plain)(ids, mask)
        return {
            "empty elsewhere": is_empty == (dist.get_rank() > 0),
            "half": torch.equal(half, theirs),
            "parameters": equal(dict(weights.full_weights(actor)), own),
            "twin": equal(dict(twin.named_parameters()), own),
            "buffers": equal(dict(actor.lm.named_buffers()), dict(plain.named_buffers()))
            and equal(dict(twin.named_buffers()), dict(plain.named_buffers())),
            "critic": equal(
                {n: p.full_tensor() for n, p in critic.backbone.named_parameters()}, backbone
            ),
            "tied": actor.lm.lm_head.weight is actor.lm.model.embed_tokens.weight,
            "scores": torch.allclose(actor(ids, mask)[0], expected, atol=1e-6),
        }


def test_a_folder_that_does_not_load_is_an_error_on_every_rank(tmp_path, one_rank):
    with pytest.raises(ValueError, match="no model in"):
        weights.load_once(str(tmp_path / "none"))


# --- a checkpoint of so many ranks, continued by others ---


def trained_and_saved(path: str, folder: Path, rank: int) -> tuple[dict, dict]:
    """Everything that training depends on: when saved, and two updates later."""
    modules, optimizers, tokenizer = opened(path, rank)
    learn(modules, optimizers, 2)
    saved = whole(modules, optimizers)
    weights.save_checkpoint(folder, tokenizer, optimizers, modules, {"step": 2})
    learn(modules, optimizers, 2)
    return saved, whole(modules, optimizers)


def resumed(path: str, folder: Path, rank: int) -> tuple[dict, dict]:
    modules, optimizers, _ = opened(path if rank else str(folder), rank)
    state = weights.load_training_state(folder, optimizers, modules)
    assert state == {"step": 2}
    loaded = whole(modules, optimizers)
    learn(modules, optimizers, 2)
    return loaded, whole(modules, optimizers)


# --- what two ranks find, in two starts of two processes (their imports take longer than all the rest) ---

RANKS = {"whole": 0, "adapters": 4}  # all weights trained, and adapters


def first_two(path: str, folder: Path) -> dict:
    saved = {kind: trained_and_saved(path, folder / kind, rank) for kind, rank in RANKS.items()}
    return {"loaded": loaded_once(path), "saved": saved}


def second_two(path: str, folder: Path) -> dict:
    return {kind: resumed(path, folder / kind, rank) for kind, rank in RANKS.items()}


@pytest.fixture(scope="module")
def chain(make_lm, tokenizer, tmp_path_factory, one_rank) -> dict:
    """A checkpoint of two ranks, resumed and saved again by one, resumed by two: what each saw."""
    folder = tmp_path_factory.mktemp("chain")
    path = saved_policy(folder, make_lm(), tokenizer)
    seen = {"folder": folder, "two": on_ranks(2, folder / "a", first_two, path, folder / "two")}
    seen["one"], seen["one again"] = {}, {}
    for kind, rank in RANKS.items():
        seen["one"][kind] = resumed(path, folder / "two" / kind, rank)
        seen["one again"][kind] = trained_and_saved(path, folder / "one" / kind, rank)
    seen["two again"] = on_ranks(2, folder / "b", second_two, path, folder / "one")
    return seen


def test_one_rank_reads_and_two_hold_what_plain_loading_gives(chain):
    for found in chain["two"]:
        assert all(found["loaded"].values()), found["loaded"]


@pytest.mark.parametrize("kind", RANKS)
def test_a_checkpoint_resumes_at_another_number_of_ranks(chain, kind):
    two = [found["saved"][kind] for found in chain["two"]]
    then_two = [found[kind] for found in chain["two again"]]
    for before, after in (
        *((mine, chain["one"][kind]) for mine in two),
        *((chain["one again"][kind], theirs) for theirs in then_two),
    ):
        (saved, later), (loaded, continued) = before, after
        assert any(name.endswith("exp_avg_sq") for name in saved)
        assert equal(saved, loaded) and not equal(saved, later)
        for name, tensor in later.items():
            torch.testing.assert_close(continued[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_each_rank_writes_its_own_half_and_nothing_is_left_beside_it(chain):
    files = (chain["folder"] / "two/whole/training_state").glob("*.distcp")
    first, second = (file.stat().st_size for file in files)
    (only,) = (chain["folder"] / "one/whole/training_state").glob("*.distcp")
    assert 0.8 < first / second < 1.25 and first + second < 1.5 * only.stat().st_size
    assert sorted(path.name for path in (chain["folder"] / "two").iterdir()) == sorted(RANKS)


# --- recomputation, offload ---


SETTINGS = [{"recompute": True}, {"offload": True}, {"recompute": True, "offload": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_neither_recomputation_nor_offload_changes_a_bit(settings, policy, one_rank):
    plain, *_ = opened(policy)
    other, *_ = opened(policy, **settings)
    ids, mask = a_batch()
    for modules in (plain, other):
        logprobs, entropy = modules["actor"](ids, mask, entropy_grad=True)
        values, last = modules["critic"](ids, torch.tensor([9, 9]))
        ((logprobs.sum() + 0.1 * entropy.sum()) + values.square().sum() + last.sum()).backward()
    for name in plain:
        ours, theirs = (
            {n: p.grad.full_tensor() for n, p in modules[name].named_parameters()}
            for modules in (plain, other)
        )
        assert all(gradient.isfinite().all() for gradient in ours.values())
        assert equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(plain["actor"](ids, mask)[0], other["actor"](ids, mask)[0])


class Counted(torch.nn.Module):
    """Stands for a block's MLP, and counts how often it computes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


@pytest.mark.parametrize(("recompute", "calls"), [(False, 1), (True, 2)])
def test_with_recomputation_a_block_computes_again_in_the_backward_pass(
    recompute, calls, make_lm, one_rank
):
    lm = make_lm()
    counter = lm.model.layers[0].mlp = Counted(lm.model.layers[0].mlp)
    actor = weights.shard(weights.Actor(lm), weights.mesh(), recompute=recompute)
    actor(*a_batch())[0].sum().backward()
    assert counter.calls == calls


@pytest.mark.parametrize("offload", [False, True])
def test_every_part_of_a_module_is_offloaded_or_none(offload, make_lm, one_rank, monkeypatch):
    seen, real = [], weights.fully_shard
    monkeypatch.setattr(
        weights,
        "fully_shard",
        lambda *args, **settings: (
            seen.append(type(settings["offload_policy"]).__name__) or real(*args, **settings)
        ),
    )
    weights.shard(weights.Actor(make_lm()), weights.mesh(), offload=offload)
    assert seen == ["CPUOffloadPolicy" if offload else "OffloadPolicy"] * 3  # two blocks, the rest


# --- LoRA ---


def plain_scores(lm, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lm(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, 1:]


def scores(actor, ids, mask) -> torch.Tensor:
    with torch.no_grad():
        return actor(ids, mask)[0][:, 2:]


def test_frozen_weights_take_half_the_room_and_buffers_keep_theirs(make_lm):
    lm = make_lm()
    weights.freeze(lm, torch.bfloat16)
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in lm.parameters())
    assert {buffer.dtype for buffer in lm.buffers()} == {torch.float32}
    lora.add(lm, 4, 8.0, seed=1, base="")
    for name, parameter in lm.named_parameters():
        assert (
            parameter.requires_grad == lora.is_adapter(name) == (parameter.dtype == torch.float32)
        )


def test_a_stream_is_merged_by_hand():
    named = [
        ("embed.weight", torch.ones(1)),
        ("q.base_layer.weight", torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ("q.base_layer.bias", torch.tensor([5.0, 6.0])),
        ("q.lora_A.default.weight", torch.tensor([[1.0, 10.0]])),  # r = 1
        ("q.lora_B.default.weight", torch.tensor([[2.0], [3.0]])),
        ("norm.weight", torch.ones(1)),
    ]
    merged = dict(lora.merged(named, scale=0.5))
    assert list(merged) == ["embed.weight", "q.bias", "q.weight", "norm.weight"]
    assert torch.equal(merged["q.weight"], torch.tensor([[2.0, 12.0], [4.5, 19.0]]))
    assert torch.equal(merged["q.bias"], torch.tensor([5.0, 6.0]))


def test_adapters_start_at_nothing_are_all_that_trains_and_can_be_switched_off(policy, one_rank):
    plain, _ = weights.load(policy)
    modules, optimizers, _ = opened(policy, rank=4)
    actor, (ids, mask) = modules["actor"], a_batch()
    torch.testing.assert_close(scores(actor, ids, mask), plain_scores(plain, ids), **CLOSE)
    before = whole(modules, optimizers)
    adapters = [p.numel() for name, p in actor.named_parameters() if lora.is_adapter(name)]
    assert sum(adapters) == 4 * Shape.of(plain).linear * 2  # of rank 4, in two blocks
    learn(modules, optimizers, 3)
    after = whole(modules, optimizers)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if lora.is_adapter(name) or ".head." in name}
    assert (scores(actor, ids, mask) - plain_scores(plain, ids)).abs().max() > 0.01
    with lora.adapters_off(actor):
        torch.testing.assert_close(scores(actor, ids, mask), plain_scores(plain, ids), **CLOSE)
    assert (scores(actor, ids, mask) - plain_scores(plain, ids)).abs().max() > 0.01


def test_a_sampler_gets_merged_weights_by_their_plain_names(policy, one_rank):
    plain, _ = weights.load(policy)
    modules, optimizers, _ = opened(policy, rank=4)
    learn(modules, optimizers, 3)
    HFEngine(plain, {0}).sync(weights.full_weights(modules["actor"]), 1)
    ids, mask = a_batch()
    plain.set_attn_implementation("sdpa")
    torch.testing.assert_close(
        scores(modules["actor"], ids, mask), plain_scores(plain, ids), atol=1e-4, rtol=1e-4
    )


def test_adapters_are_saved_merged_and_alone(policy, tokenizer, tmp_path, one_rank):
    from peft import PeftModel

    modules, optimizers, _ = opened(policy, rank=4)
    learn(modules, optimizers, 3)
    folder, (ids, mask) = tmp_path / "saved", a_batch()
    weights.save_policy(folder, modules["actor"], tokenizer)
    assert load_file(folder / "model.safetensors").keys() == load_file(
        Path(policy) / "model.safetensors"
    ).keys()  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(folder)
    alone = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(policy), folder / "adapter"
    )
    ours = scores(modules["actor"], ids, mask)
    assert (ours - plain_scores(AutoModelForCausalLM.from_pretrained(policy), ids)).abs().max() > 0.01  # fmt: skip
    torch.testing.assert_close(plain_scores(merged, ids), ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plain_scores(alone, ids), ours, atol=1e-4, rtol=1e-4)
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == policy and settings["r"] == 4


def test_without_peft_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    train.Config()
    with pytest.raises(ValueError, match="--lora-rank needs peft: pip install"):
        train.Config(lora_rank=4)
    with pytest.raises(ValueError, match="--lora-rank must be 0"):
        train.Config(lora_rank=-1)


# --- whole runs ---


def torchrun(ranks: int, *flags: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]  # fmt: skip
    return subprocess.run(
        [*command, str(ROOT / "train.py"), *QUICK, *flags],
        cwd=cwd, env=environ(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_of_dead_groups_and_tasks_that_no_rank_count_divides(tmp_path, start):  # noqa: F811
    # One turn solves nothing, so each of three groups, on two ranks, is dead: no update, and no rank waits.
    flags = ["--model", start, "--stages", "1", "--tasks-per-step", "3", "--steps", "2"]
    done = torchrun(2, *flags, "--name", "dead", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in metrics(tmp_path / "out/dead"):
        assert line["dead_group_fraction"] == 1 and line["trained_tokens"] == 0
        assert line["grad_norm"] is None and line["skipped_updates"] == 0


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks_after_one_in_which_a_rank_had_nothing_to_play(
    tmp_path,
    start,  # noqa: F811
):
    flags = ["--model", start, "--name", "shrunk", "--algo", "ppo", "--tasks-per-step", "1"]
    flags += ["--decay", "0", "--critic-warmup", "1", "--kl-coef", "0.01", "--entropy-coef", "0.01"]
    flags += ["--offload-reference", "--offload-optimizer", "--activation-checkpointing"]
    done = torchrun(2, *flags, "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    done = run("train.py", *QUICK, *flags, "--steps", "3", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = metrics(tmp_path / "out/shrunk")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["probe_distance"] < 1e-3 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_run_with_adapters_resumes_to_the_bit(algo, tmp_path, start):  # noqa: F811
    flags = [*QUICK, "--model", start, "--lora-rank", "4", "--lr", "1e-2", "--kl-coef", "0.01"]
    flags += ["--algo", algo, "--critic-warmup", "1", "--keep-dead-groups", "--entropy-coef", "0.01", "--decay", "0"]  # fmt: skip
    for name, steps in (("whole", ["4"]), ("cut", ["2", "4"])):
        for i, last in enumerate(steps):
            resume = ["--resume"] * bool(i)
            done = run("train.py", *flags, "--name", name, "--steps", last, *resume, cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-2000:]
    lines = metrics(tmp_path / "out/whole")
    assert lines == metrics(tmp_path / "out/cut")
    for line in (
        lines
    ):  # 1 but for rounding: rows are scored in other micro-batches than they are trained in
        assert line["first_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert lines[-1]["ref_kl"] > 0
    assert all(line["probe_distance"] < 1e-3 for line in lines)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (tmp_path / "out" / name / "checkpoints/step_4" / file for name in ("whole", "cut"))  # fmt: skip
        assert one.read_bytes() == two.read_bytes()


def raised_on_rank_1() -> tuple[list, str]:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no Java on node 2")

    everybodys = weights.on_all_ranks(lambda: dist.get_rank() * 10)
    try:
        weights.on_all_ranks(fails)
    except ValueError as error:
        return everybodys, str(error)
    return everybodys, ""


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path):
    assert on_ranks(2, tmp_path / "ranks", raised_on_rank_1) == [([0, 10], "no Java on node 2")] * 2
