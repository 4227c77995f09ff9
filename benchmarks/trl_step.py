"""
A whole step of RL, ours beside TRL's GRPOTrainer: the same tiny model, the same tokens, slow environments.

    32 trajectories of 8 turns, 50 ms in every environment step  ->  rewards, advantages  ->  one update  ->  sampler told

Completions are scripted: neither sampler is on trial, and both sides train on the very same ids (checked). All run in one
process and take turns, step by step. Three ways to play such episodes in TRL, each beside ours:

    environment_factory         its documented way: the trainer parses tool calls and steps environments one by one
    environment_factory, async  the same with `async def`: it awaits the calls of one trajectory together, then the next one's
    rollout_func                its way out: you write the rollout. Ours here steps all environments at once, in threads

TRL has the settings that are fastest here: no activation checkpointing, float32, no reference model, no logs.
Both sides make one update on the whole batch, with AdamW, without KL. TRL is not in requirements.txt; to put version
1.16.0 into an environment of its own beside the repo's:

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements.txt trl==1.16.0
    .venv-trl/bin/python benchmarks/trl_step.py
"""

import asyncio
import copy
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import tyro
from transformers import PrinterCallback, TrainerCallback

import model as weights
import sft
import train
from agent import Chat, Trajectory
from engines import HFEngine
from records import rollout_metrics
from rollout import collate, rollout

SAYS = "See: red box 1, 1 ahead 1 right; grey door 1 locked, 5 ahead. Wall 6 ahead."
ASKED = "Goal: go to a red ball.\nSee: nothing. Wall 1 ahead."


@dataclass(frozen=True)
class Config:
    """Every field is a flag: --trajectories 64"""

    trajectories: int = 32
    group_size: int = 8
    turns: int = 8
    latency: float = 0.05  # seconds in each step of an environment
    repeats: int = 3  # steps of each side that count, after one that does not; medians are reported
    rows: tuple[int, ...] = (8, 32)  # TRL's per_device_train_batch_size; the fastest is reported


# --- what both sides share ---


class Episode:
    """An environment as TRL wants it: a public method is a tool, its docstring is for the model."""

    latency = 0.0

    def reset(self, **kwargs) -> None:
        pass

    def act(self, action: str) -> str:
        """Do something.

        Args:
            action: what to do
        """
        time.sleep(self.latency)
        return SAYS


class AsyncEpisode(Episode):
    """The same, without holding a thread while it waits."""

    async def act(self, action: str) -> str:
        await asyncio.sleep(self.latency)
        return SAYS

    act.__doc__ = Episode.act.__doc__


def says(row: int, turn: int) -> str:
    """A completion in both forms at once: ReAct's lines, which we read, and the tool call that TRL parses."""
    action = f"go to red box {row % 3 + 1}"
    call = json.dumps({"name": "act", "arguments": {"action": action}})
    thought = f"Thought: I see red box {turn % 3 + 1}, {row % 5} ahead."
    return f"{thought}\nAction: {action}\n<tool_call>\n{call}\n</tool_call>"


def tiny(config: Config, template: str) -> tuple:
    """The tiny architecture with random weights, its tokenizer (with Qwen2.5's chat template), the scripted ids."""
    env = sft.envs.make("babyai")
    texts = [env.reset(options={"task": task})[0] for task in env.tasks("dev")]
    texts += [says(row, turn) + template for row in range(15) for turn in range(3)]
    tokenizer = sft.make_tokenizer(texts, 1024)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    encode = lambda row, turn: tokenizer.encode(says(row, turn)) + [tokenizer.eos_token_id]
    script = [[encode(row, turn) for turn in range(config.turns)] for row in range(config.trajectories)]  # fmt: skip
    return sft.make_tiny(tokenizer, sft.Config()), tokenizer, script


# --- our side ---


class Pool:
    """Stands in for EnvPool. An environment's last step ends its episode, with a reward."""

    instructions = ""

    def __init__(self, config: Config, rewards: list[float]):
        self.config, self.rewards = config, rewards

    def start(self, preferred: int, task: str, seed: int) -> tuple:
        """An episode as rollout.py's EnvPool hands it out; its last turn pays the scripted reward."""
        turns = itertools.count(1)

        def step(action: str) -> tuple:
            is_last = next(turns) == self.config.turns
            # What the chat template puts around the answer of a tool.
            text = f"<tool_response>\n{Episode().act(action)}\n</tool_response>"
            return text, is_last * self.rewards[preferred], is_last, False, {"success": False}

        return SimpleNamespace(step=step), ASKED, {"success": False}

    def give_back(self, episode: SimpleNamespace) -> None:
        pass


class Scripted(HFEngine):
    """Says what the script says in training; samples, as ever, when the trainer probes it after a sync."""

    def __init__(self, lm, stop_ids: set[int], script: list[list[list[int]]], group_size: int):
        super().__init__(lm, stop_ids)
        self.script, self.group_size = script, group_size
        self.logprobs = [[[0.0] * len(ids) for ids in turns] for turns in script]

    def step(self) -> list:
        if any(key[0] == "probe" for key in self.waiting):
            return super().step()
        keys, self.waiting = list(self.waiting), {}
        rows = [group * self.group_size + sample for *_, group, sample, _ in keys]
        return [
            (key, list(self.script[row][key[-1]]), self.logprobs[row][key[-1]])
            for key, row in zip(keys, rows, strict=True)
        ]


class Ours(train.Run):
    """A training run without files, servers and evaluations: what is left of `train.main` is its step."""

    def __init__(self, config: Config, lm, chat: Chat, script: list, rewards: list[float]):
        self.config = train.Config(minibatches=1, lr=1e-6, warmup=0, decay=0.0, max_tokens=4096)
        self.sizes, self.chat, self.version = config, chat, 0
        self.pools = {"toy": Pool(config, rewards)}
        self.actor, self.critic, self.reference = weights.Actor(lm), None, None
        twin = weights.sampler_copy(self.actor, True, torch.float32)
        self.engine = Scripted(twin, chat.stop_ids, script, config.group_size)
        weights.shard(self.actor, weights.mesh())
        weights.share(twin, self.actor)
        self.modules, self.rates = {"actor": self.actor}, {"actor": self.config.lr}
        self.optimizers = {"actor": weights.adamw(self.actor, 1e-3)}
        self.trajectories = self.play()
        batch = collate(self.trajectories)
        logprobs = train.score(
            lambda part: self.actor(part.input_ids, part.loss_mask)[0],
            batch, list(range(len(batch.lengths))), self.config,
        )  # fmt: skip
        # From now on the script's log-probabilities are the model's.
        for row, trajectory in enumerate(self.trajectories):
            spans = [slice(turn.start, turn.stop) for turn in trajectory.turns]
            self.engine.logprobs[row] = [logprobs[row, span].tolist() for span in spans]

    def play(self) -> list[Trajectory]:
        size, limits = self.sizes.group_size, self.config.limits(self.sizes.turns)
        blanks = [
            Trajectory("toy", "t", row // size, row % size)
            for row in range(self.sizes.trajectories)
        ]
        return rollout(self.engine, self.chat, self.pools, blanks, limits, ("train", self.version))

    def step(self) -> None:
        """Parts 2 to 5 of the loop in train.main."""
        self.trajectories = self.play()
        self.engine.sleep()
        batch = collate(self.trajectories, self.chat.tokenizer.pad_token_id)
        rollout_metrics(self.trajectories, batch)
        rows = train.trainable_rows(self.trajectories, batch, self.config)
        batch = train.assign_credit(batch, self.score_all(batch, rows), self.config)
        self.improve(batch, rows, 1)
        self.version += 1
        self.sync(self.version)


# --- TRL's side ---


class Alternate(TrainerCallback):
    """Times TRL's steps, and takes one of ours, timed too, after each: seconds of the clock, seconds of the CPU."""

    def __init__(self, ours: Callable[[], None]):
        self.ours, self.marks = ours, []

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.mark()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.mark()
        self.ours()
        self.mark()

    def medians(self, side: int) -> list[float]:
        """side 0 is TRL, 1 is ours. The first step of each does not count."""
        steps = list(zip(self.marks[side::3], self.marks[side + 1 :: 3], strict=True))[1:]
        spent = [[b - a for a, b in zip(*step, strict=True)] for step in steps]
        return [statistics.median(kind) for kind in zip(*spent, strict=True)]


def in_threads(config: Config, script: list, opening: list[int], between: list[int]) -> Callable:
    """A rollout_func that plays all episodes at once: the parallelism is ours, the trainer TRL's."""

    def play(row: int) -> tuple[list[int], list[int]]:
        ids, mask = [], []
        for said in script[row]:
            time.sleep(config.latency)
            ids += said + between
            mask += [1] * len(said) + [0] * len(between)
        return ids, mask

    def rollout_func(prompts: list, trainer) -> dict[str, list]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            ids, masks = zip(*threads.map(play, range(len(prompts))), strict=True)
        return {
            "prompt_ids": [opening] * len(prompts),
            "completion_ids": list(ids),
            "logprobs": [[0.0] * len(row) for row in ids],  # not read where vLLM does not sample
            "env_mask": list(masks),
        }  # fmt: skip

    return rollout_func


def their_trainer(
    config: Config, lm, tokenizer, rewards: list[float], rows: int, folder: str, **way
):
    """A GRPOTrainer whose update is ours: one for all trajectories, `rows` of them in a pass."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=folder, max_steps=config.repeats + 1, num_generations=config.group_size, max_completion_length=4096,
        per_device_train_batch_size=rows, gradient_accumulation_steps=config.trajectories // rows,
        gradient_checkpointing=False, bf16=False, use_cpu=True, learning_rate=1e-6, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    tasks = [[{"role": "user", "content": ASKED}]] * (config.trajectories // config.group_size)
    return GRPOTrainer(
        copy.deepcopy(lm), lambda completions, **kwargs: rewards, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": tasks}), **way,
    )  # fmt: skip


def follow_script(trainer, script: list, ours: Ours) -> None:
    """Let a trainer's sampler say what is scripted, and check that it trains on the tokens that we train on."""
    turn, generate = 0, trainer._generate

    def say(prompt_ids: list, *args, **kwargs) -> tuple[list[list[int]], None]:
        nonlocal turn
        turn += 1  # one past the last: nothing more to say, which ends the trainer's loop
        return [list(turns[turn - 1]) if turn <= len(turns) else [] for turns in script], None

    def checked(prompts: list):
        nonlocal turn
        turn = 0
        found = generate(prompts)
        for opening, ids, mask, t in zip(*found[:3], ours.trajectories, strict=True):
            assert opening + ids == t.ids and mask == t.loss_mask[len(opening) :], "other tokens"
        return found

    trainer._generate_single_turn, trainer._generate = say, checked


def main(config: Config) -> None:
    """Print a line for each way and each number of rows."""
    from trl.chat_template_utils import qwen2_5_chat_template

    lm, tokenizer, script = tiny(config, qwen2_5_chat_template)
    rewards = [float(row % 2) for row in range(config.trajectories)]
    Episode.latency = config.latency
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], tools=[Episode().act], add_generation_prompt=True, return_dict=False
    )  # fmt: skip
    chat = Chat(tokenizer)
    chat.prompt = lambda instructions, observation: list(opening)  # with the list of tools
    between = chat.between(f"<tool_response>\n{SAYS}\n</tool_response>")
    ways = {
        "environment_factory": {"environment_factory": Episode},
        "environment_factory, async": {"environment_factory": AsyncEpisode},
        "rollout_func, in threads": {"rollout_func": in_threads(config, script, opening, between)},
    }
    with weights.distributed(), tempfile.TemporaryDirectory() as folder:
        ours = Ours(config, copy.deepcopy(lm), chat, script, rewards)
        tokens = sum(len(t.ids) for t in ours.trajectories)
        print(
            f"{config.trajectories} trajectories of {config.turns} turns, {tokens} tokens, "
            f"{sum(sum(t.loss_mask) for t in ours.trajectories) / tokens:.0%} of them trained on; "
            f"{sum(p.numel() for p in lm.parameters()) / 1e6:.1f}M parameters, {torch.get_num_threads()} threads"
        )
        for (name, way), rows in itertools.product(ways.items(), config.rows):
            trainer = their_trainer(config, lm, tokenizer, rewards, rows, folder, **way)
            follow_script(trainer, script, ours)
            trainer.remove_callback(PrinterCallback)
            clock = Alternate(ours.step)
            trainer.add_callback(clock)
            trainer.train()
            (theirs, their_cpu), (mine, my_cpu) = clock.medians(0), clock.medians(1)
            print(
                f"{name:27} {rows:3} rows a pass   TRL {theirs:6.2f} s ({their_cpu:.2f} of them CPU)   "
                f"ours {mine:6.2f} s ({my_cpu:.2f})   {theirs / mine:5.2f} times", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Config))
