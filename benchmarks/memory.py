"""
Is `train.py --estimate` right? Updates of models of 100 million parameters and more, each in a process of its own.

    peak memory of a process during updates, minus what it held before  /  what estimate.py says

Reads VmHWM, the most that Linux ever gave the process, after setting it back; so it runs on Linux only. Models have
random weights: what they take does not depend on them. A first update on a few tokens makes Adam's moments; the one
that counts has two micro-batches, each of the whole token budget.

    python benchmarks/memory.py                       # the table: minutes on two cores
    python benchmarks/memory.py --model llama-110m --recompute
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# Tensors are given back the moment they are freed. By default glibc keeps some for later, and how many is chance (we saw
# a sixth more). It reads this once, as a process starts: so this one starts again.
if __name__ == "__main__" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
import tyro
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import estimate
import lora
import model as weights
import train
from agent import Trajectory, Turn
from rollout import Batch, collate

SHAPES = {
    "llama-110m": LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
        intermediate_size=2048, vocab_size=32000, tie_word_embeddings=True,
    ),
    "qwen-240m": Qwen2Config(
        hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816, vocab_size=32000, tie_word_embeddings=False,
    ),
}  # fmt: skip
TOKENS = 512


@dataclass(frozen=True)
class Case:
    """One measurement; all of them if --model is empty."""

    model: str = ""  # a name of SHAPES
    algo: str = "grpo"
    recompute: bool = False  # activation checkpointing
    lora_rank: int = 0
    tokens: int = TOKENS  # of a micro-batch

    @property
    def config(self) -> train.Config:
        """The flags of train.py that it stands for."""
        return train.Config(
            algo=self.algo, micro_tokens=self.tokens, activation_checkpointing=self.recompute,
            lora_rank=self.lora_rank, engine="hf",
        )  # fmt: skip


CASES = [
    Case("llama-110m"),
    Case("llama-110m", recompute=True),
    Case("llama-110m", lora_rank=16),
    Case("llama-110m", algo="ppo"),
    Case("qwen-240m"),
    Case("qwen-240m", recompute=True),
]


def predicted(case: Case) -> float:
    """Bytes, by estimate.py: what is held, and the fullest moment of an update."""
    with torch.device("meta"):
        shape = estimate.Shape.of(AutoModelForCausalLM.from_config(SHAPES[case.model]))
    settings = (shape, case.config, 1, estimate.MASTER)
    _, update = estimate.fullest(*settings)
    return sum(estimate.held(*settings, needs_copy=False).values()) + sum(update.values())


def status(key: str) -> int:
    """Bytes: VmRSS is what the process has now, VmHWM the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def played(tokens: int, rows: int) -> Batch:
    """Trajectories of so many tokens, all but eight the agent's, as they stand before an update."""
    trajectories = []
    for _ in range(rows):
        t = Trajectory("toy", "task", 0, 0, end="terminated")
        t.add_context(list(range(8)))
        t.turns.append(Turn("", "", "", "", 8, tokens, reward=1.0))
        t.ids, t.loss_mask = list(range(tokens)), t.loss_mask + [1] * (tokens - 8)
        t.logprobs = t.logprobs + [-10.0] * (tokens - 8)
        trajectories.append(t)
    batch = collate(trajectories)
    batch.advantages = batch.value_targets = batch.loss_mask.float()
    batch.old_values = torch.zeros_like(batch.rewards)
    return batch


def measured(case: Case) -> int:
    """Bytes by which the process grew at most."""
    config = case.config
    if case.lora_rank:
        import peft  # noqa: F401  50 MiB of code are no part of training
    with weights.distributed():
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        lm = AutoModelForCausalLM.from_config(SHAPES[case.model], attn_implementation="sdpa").eval()
        if case.lora_rank:
            weights.freeze(lm, torch.float32)
            lora.add(lm, case.lora_rank, 32.0, seed=0, base="")
        modules = {"actor": weights.Actor(lm)}
        if case.algo == "ppo":
            modules["critic"] = weights.Critic(lm)
        del lm
        for module in modules.values():
            weights.shard(module, weights.mesh(), recompute=case.recompute)
        optimizers = {name: weights.adamw(module, 1e-5) for name, module in modules.items()}
        actor, critic = modules["actor"], modules.get("critic")
        train.update(actor, critic, optimizers, played(16, 1), [0], config)
        train.update(actor, critic, optimizers, played(config.micro_tokens, 2), [0, 1], config)
        return status("VmHWM") - before


def main(case: Case) -> None:
    """Measure one case and print it as JSON, or all of them, each in a process of its own, as a table."""
    if case.model:
        print(json.dumps({"predicted": predicted(case), "measured": measured(case)}))
        return
    print(f"{'':52}{'estimated':>10}{'measured':>10}{'ratio':>8}")
    for each in CASES:
        flags = ["--model", each.model, "--algo", each.algo, "--lora-rank", str(each.lora_rank)]
        flags += ["--tokens", str(each.tokens)] + ["--recompute"] * each.recompute
        done = subprocess.run(
            [sys.executable, __file__, *flags], check=True, capture_output=True, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        ratio = found["predicted"] / found["measured"]
        mib = "".join(f"{found[key] / 2**20:6.0f} MiB" for key in ("predicted", "measured"))
        print(f"{' '.join(flags[1:]):52}{mib}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Case))
