"""The memory that `train.py --estimate` foretells: counted by hand, and measured."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from transformers import Qwen2ForCausalLM

import train
from estimate import Shape, activations, fullest, held, skeleton

ROOT = Path(__file__).parents[1]
SEVEN = "Qwen/Qwen2.5-7B-Instruct"
# Their makers' numbers of parameters.
SIZES = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    SEVEN: 7_615_616_512,
}


@pytest.mark.parametrize("name", SIZES)
def test_the_shapes_it_knows_are_those_of_the_models(name):
    assert Shape.of(skeleton(name)).total == SIZES[name]


def test_a_shape_counts_what_the_model_has(make_lm):
    lm = make_lm()
    shape = Shape.of(lm)
    assert shape.total == sum(p.numel() for p in lm.parameters())  # tied embeddings once
    assert shape.root == lm.model.embed_tokens.weight.numel() + lm.model.norm.weight.numel()
    # four heads of 8 and two of keys; q, k, v, o, gate, up, down
    assert (shape.queries, shape.keys, shape.inner) == (32, 16, 64)
    assert shape.linear == (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)


# A model of 100 parameters: two blocks of 30, and 40 outside them.
SMALL = Shape(
    total=100, block=30, layers=2, linear=10, hidden=4, inner=6, queries=4, keys=2, vocab=10
)


def flags(**changes) -> train.Config:
    return dataclasses.replace(train.Config(micro_tokens=10), **changes)


def test_what_is_held_by_hand():
    on = lambda config, ranks: held(SMALL, config, ranks, compute=2, needs_copy=False)
    assert on(flags(), 1) == {"weights": 400, "Adam's two moments": 800}
    assert on(flags(), 4) == {"weights": 100, "Adam's two moments": 200}
    assert on(flags(kl_coef=0.1), 4)["reference"] == 50
    assert on(flags(kl_coef=0.1, offload_reference=True), 4)["reference"] == 0
    assert sum(on(flags(offload_optimizer=True), 4).values()) == 0
    # tied embeddings: the critic leaves out nothing; a weight and two moments for each of its parameters
    assert on(flags(algo="ppo"), 1)["critic and its moments"] == 1200
    # adapters of rank 2: 2 x 10 parameters in each of two blocks, beside 100 frozen ones in bfloat16; no reference
    assert on(flags(lora_rank=2, kl_coef=0.1), 1) == {
        "weights": 2 * 100 + 4 * 40,
        "Adam's two moments": 8 * 40,
    }
    assert held(SMALL, flags(), 4, 2, needs_copy=True)["the sampler's copy"] == 200


def test_activations_by_hand():
    # a token, in bytes of bfloat16: each norm (4 + 2 + 2) x 4, attention 2 x (2 x 4 + 2 x 2), MLP 2 x 4 x 6
    block = 2 * 32 + 24 + 48
    assert activations(SMALL, flags(), 2) == (10 * (2 * block + 32), 0)
    less = flags(activation_checkpointing=True)
    assert activations(SMALL, less, 2) == (10 * (2 * 2 * 4 + 32), 10 * block)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_each_flag_saves_what_it_is_for(algo):
    shape = Shape.of(skeleton(SEVEN))

    def total(ranks=8, **changes) -> float:
        config = train.Config(algo=algo, micro_tokens=16384, kl_coef=0.001, **changes)
        update = fullest(shape, config, ranks, 2)[1]
        return (sum(held(shape, config, ranks, 2, False).values()) + sum(update.values())) / 2**30

    plain = total()
    for changes in (
        {"activation_checkpointing": True},
        {"offload_reference": True},
        {"offload_optimizer": True},
        {"lora_rank": 16},
        {"ranks": 16},
    ):
        assert total(**changes) < plain - 1
    assert plain > 80 > total(activation_checkpointing=True)  # why runs/qwen_*.sh has that flag


def test_the_command_prints_a_table_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", SEVEN, "--kl-coef", "0.1", "--engine", "hf", "--estimate", "1", "8"]
    train.main(tyro.cli(train.Config, args=flags))
    text = capsys.readouterr().out
    assert "7.62 billion" in text and "of so many:" in text
    rows = {line[:62].strip(): line[62:].split() for line in text.splitlines()}
    assert rows["held throughout: weights"] == ["28.4", "3.5"]
    assert rows["held throughout: the sampler's copy"] == ["14.2", "14.2"]
    assert float(rows["updating, in all"][0]) > float(rows["updating, in all"][1])
    train.main(tyro.cli(train.Config, args=["--estimate"]))  # this machine, and the tiny model
    assert "tiny" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_it_cannot_know_it_says(tmp_path):
    with pytest.raises(ValueError, match="config.json.*one of Qwen"):
        skeleton(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="1 or more, got \\(0,\\)"):
        train.Config(estimate=(0,))


def test_a_folders_shape_is_read_from_its_config_alone(make_lm, tmp_path):
    make_lm().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    lm = skeleton(str(tmp_path))
    assert isinstance(lm, Qwen2ForCausalLM) and all(p.is_meta for p in lm.parameters())
    assert Shape.of(lm) == Shape.of(make_lm())


@pytest.mark.slow
@pytest.mark.parametrize("case", [["llama-110m"], ["qwen-240m", "--recompute"]], ids=str)
def test_it_is_within_15_percent_of_what_two_updates_take(case):
    script = ROOT / "benchmarks/memory.py"
    done = subprocess.run(
        [sys.executable, str(script), "--model", *case], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.15)
