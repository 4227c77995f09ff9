"""
What learning costs beside the least it could: time of an update, and memory of the loss.

    tokens a second through train.update     /  bare forward and backward on the same tokens, nothing padded
    most memory of model.token_logprobs      /  all logits at once, log_softmax, gather

Time. Lengths are skewed: a few trajectories are ten times as long as most. `update` pads within micro-batches, scores,
clips, and lets AdamW make a step. Two baselines do none of that, with the weights unsharded. Both get the tokens of each
micro-batch laid end to end and cut into as many rows of equal length: the same tokens, no padding, batches just
as large and attention over almost the same lengths (one row at a time would be slower for so small a model).

    bare     lm(ids, labels).loss.backward(), as everybody writes it: logits of all tokens
    least    the same gradient, with logits only of the tokens that are learnt from

Memory. Forward and backward from hidden states, each version in a process of its own: the most that Linux gave it, minus what it
had when hidden states and projection were there. The gradient of the projection is in both.

    python benchmarks/training.py
    python benchmarks/training.py --model smollm2 --shares 0.2
"""

import copy
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import tyro
from torch import nn

import model as weights
import sft
import train
from agent import Trajectory
from benchmarks.memory import status
from rollout import Batch, collate, micro_batches

# Tensors are given back the moment they are freed. Without it glibc keeps some for later, and how many is chance.
IN_A_CHILD = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Config:
    """Every field is a flag: --shares 0.5"""

    model: str = "tiny"  # tiny (random weights), smollm2, or a folder
    shares: tuple[float, ...] = (0.2, 1.0)  # of tokens that are learnt from
    trajectories: int = 32
    length: int = 2000  # tokens of the longest
    repeats: int = 7  # the best of so many is reported: the machine's noise only ever adds time
    clock: Literal["wall", "cpu"] = "wall"  # cpu: seconds of all threads, for a busy machine
    vocab: int = 152_000  # for the memory of the loss: V,
    tokens: int = 4096  # trainable tokens,
    hidden: int = 896  # and width of the hidden states (Qwen2.5-0.5B's); 0 tokens leave it out
    child: Literal["", "ours", "naive"] = ""  # measure this version's memory, and nothing else


def starting_model(config: Config):
    """The language model to train, as the trainer would load it."""
    if config.model == "tiny":
        env = sft.envs.make("babyai")
        texts = [
            env.reset(options={"task": task})[0] + env.instructions for task in env.tasks("dev")
        ]
        return sft.make_tiny(sft.make_tokenizer(texts, 512), sft.Config()).eval()
    path = weights.smollm2() if config.model == "smollm2" else config.model
    return weights.load(path)[0].eval()


# --- time of an update ---


def skewed_batch(config: Config, share: float, vocab: int) -> Batch:
    """Trajectories in turns of 50 tokens, `share` of them the agent's; an eighth of them is long."""
    rng = random.Random(0)
    trajectories = []
    for row in range(config.trajectories):
        t = Trajectory("toy", "t", row // 8, row % 8, end="terminated")
        longest = config.length if row % 8 == 0 else config.length // 8
        t.add_context([rng.randrange(10, vocab)])  # the first token is never learnt from
        for _ in range(max(1, rng.randrange(longest // 2, longest) // 50)):
            said = round(50 * share)
            t.add_context([rng.randrange(10, vocab) for _ in range(50 - said)])
            t.ids += [rng.randrange(10, vocab) for _ in range(said)]
            t.loss_mask += [1] * said
            t.logprobs += [-6.0] * said
        trajectories.append(t)
    batch = collate(trajectories)
    batch.advantages = torch.randn(batch.input_ids.shape) * batch.loss_mask
    return batch


def unpadded(batch: Batch, max_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of each micro-batch: its tokens end to end, cut into as many rows of equal length."""
    parts = []
    for rows in micro_batches(batch.lengths.tolist(), max_tokens, pass_tokens=train.PASS_TOKENS):
        spans = [(row, slice(int(batch.lengths[row]))) for row in rows]
        ids = torch.cat([batch.input_ids[span] for span in spans])
        mask = torch.cat([batch.loss_mask[span] for span in spans])
        width = len(ids) // len(rows)
        labels = ids.where(mask, -100)
        parts.append(tuple(x[: width * len(rows)].view(len(rows), width) for x in (ids, labels)))
    return parts


def bare(lm, parts: list) -> None:
    """The forward and backward passes of a plain script."""
    for ids, labels in parts:
        lm(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    lm.zero_grad()


def least(lm, parts: list) -> None:
    """The same gradient for less: nothing is projected on the vocabulary that the loss does not need."""
    for ids, labels in parts:
        hidden = lm.get_decoder()(ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        logits = lm.get_output_embeddings()(hidden[targets >= 0])
        nn.functional.cross_entropy(logits, targets[targets >= 0]).backward()
    lm.zero_grad()


def best_in_turns(runs: list[Callable[[], None]], repeats: int, clock: Callable) -> list[float]:
    """Seconds of each one's fastest call, all of them called in turns, after one call that does not count."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, found in zip(runs, times, strict=True):
            began = clock()
            run()
            found.append(clock() - began)
    return [min(found[1:]) for found in times]


def compare_time(config: Config) -> None:
    """Print tokens a second of an update and of both baselines, for each share."""
    lm = starting_model(config).to(weights.device())
    plain, actor = copy.deepcopy(lm), weights.Actor(lm)
    weights.shard(actor, weights.mesh())
    optimizers = {"actor": weights.adamw(actor, 1e-6)}
    settings, rows = train.Config(), list(range(config.trajectories))
    for share in config.shares:
        batch = skewed_batch(config, share, min(400, lm.config.vocab_size))
        parts = [
            tuple(x.to(weights.device()) for x in part)
            for part in unpadded(batch, settings.micro_tokens)
        ]
        tokens = int(batch.lengths.sum())
        padded = sum(
            len(group) * int(batch.lengths[group].max())
            for group in micro_batches(
                batch.lengths.tolist(), settings.micro_tokens, pass_tokens=train.PASS_TOKENS
            )
        )
        ours, *others = best_in_turns(
            [
                lambda: train.update(actor, None, optimizers, batch, rows, settings),
                lambda: bare(plain, parts),
                lambda: least(plain, parts),
            ],
            config.repeats,
            time.process_time if config.clock == "cpu" else time.perf_counter,
        )
        print(
            f"{share:4.0%} trained, {len(parts)} micro-batches, {1 - tokens / padded:.0%} padding: "
            f"{tokens / ours:.0f} tokens/s, bare {tokens / others[0]:.0f} ({others[0] / ours:.2f}), "
            f"least {tokens / others[1]:.0f} ({others[1] / ours:.2f})",
            flush=True,
        )


# --- memory of the loss ---


def naive_logprobs(hidden: torch.Tensor, head: nn.Linear, input_ids: torch.Tensor) -> torch.Tensor:
    """What every tutorial has: (1, T, V) logits, (1, T, V) log-probabilities, and the few that are asked for."""
    logprobs = head(hidden[:, :-1]).log_softmax(-1)
    return logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]


def most_memory(config: Config) -> int:
    """Bytes that a forward and a backward pass of the loss add, at most. In a process of its own."""
    head = nn.Linear(config.hidden, config.vocab, bias=False)
    hidden = torch.randn(1, config.tokens + 1, config.hidden, requires_grad=True)
    ids = torch.randint(config.vocab, (1, config.tokens + 1))
    mask = torch.ones_like(ids).bool()
    mask[:, 0] = False
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    if config.child == "ours":
        logprobs, _ = weights.token_logprobs(hidden, head, ids, mask)
    else:
        logprobs = naive_logprobs(hidden, head, ids)
    logprobs.sum().backward()
    return status("VmHWM") - before


def compare_memory(config: Config) -> None:
    """Print both versions' memory and their ratio."""
    sizes = [f"--{name}={getattr(config, name)}" for name in ("vocab", "tokens", "hidden")]
    found = {}
    for version in ("ours", "naive"):
        command = [sys.executable, __file__, "--child", version, *sizes]
        done = subprocess.run(command, env=IN_A_CHILD, check=True, capture_output=True, text=True)
        found[version] = int(done.stdout)
    print(
        f"loss of {config.tokens} tokens, vocabulary {config.vocab}: {found['ours'] / 2**20:.0f} MiB, "
        f"naive {found['naive'] / 2**20:.0f} MiB: {found['ours'] / found['naive']:.2f} of it"
    )


def main(config: Config) -> None:
    """Print a line for each comparison."""
    if config.child:
        print(most_memory(config))
        return
    with weights.distributed():
        print(f"{config.model}, {weights.device()}, {torch.get_num_threads()} threads")
        compare_time(config)
    if config.tokens:
        compare_memory(config)


if __name__ == "__main__":
    main(tyro.cli(Config))
