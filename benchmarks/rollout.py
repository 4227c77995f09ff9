"""
Playing and sampling beside the least they could cost, measured in one run (learning: benchmarks/training.py).

    rollout    32 trajectories of up to 8 turns, 50 ms in every environment call  /  the engine alone, same requests
    sampling   HFEngine's tokens a second                                         /  transformers' generate

and with --engine vllm, where it is installed:

    rollout    as above  /  the same requests without environments: as many at once as trajectories, and all at once
    lock-step  in every turn another episode's step takes 1 s, turns of 16 tokens /  a loop that waits for everybody

    python benchmarks/rollout.py                        # the tiny architecture, random weights
    python benchmarks/rollout.py --model smollm2        # a pretrained model of 135 million parameters
"""

import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import tyro

import model as weights
import sft
from agent import Chat, Trajectory
from engines import HFEngine, VLLMEngine
from rollout import Limits, rollout


@dataclass(frozen=True)
class Config:
    """Every field is a flag: --trajectories 64"""

    model: str = "tiny"  # tiny (random weights), smollm2, or a folder
    engine: Literal["hf", "vllm"] = "hf"
    trajectories: int = 32
    turns: int = 8
    new_tokens: int = 32  # a turn
    latency: float = 0.05  # seconds in each call to an environment
    repeats: int = 3  # the best of so many is reported: the machine's noise only ever adds time


class SlowEpisode:
    """An environment that says a sentence after a while, and never ends."""

    def __init__(self, latency: float):
        self.latency = latency

    def step(self, action: str) -> tuple:
        time.sleep(self.latency)
        return (
            "See: red box 1, 1 ahead 1 right; grey door 1 locked, 5 ahead. Wall 6 ahead.",
            0.0,
            False,
            False,
            {"success": False},
        )


class SlowPool:
    """Stands in for EnvPool."""

    instructions = ""

    def __init__(self, latency: float):
        self.latency = latency

    def start(self, preferred: int, task: str, seed: int) -> tuple:
        time.sleep(self.latency)
        return (
            SlowEpisode(self.latency),
            "Goal: go to a red ball.\nSee: nothing. Wall 1 ahead.",
            {"success": False},
        )

    def give_back(self, episode: SlowEpisode) -> None:
        pass


class Straggler(SlowEpisode):
    """One of `size` episodes, of which another one is slow in every turn."""

    def __init__(self, place: int, size: int, seconds: float):
        super().__init__(0.0)
        self.place, self.size, self.seconds, self.turn = place, size, seconds, 0

    def step(self, action: str) -> tuple:
        self.latency = self.seconds if self.turn % self.size == self.place else 0.0
        self.turn += 1
        return super().step(action)


class StragglerPool(SlowPool):
    """Gives each of its `size` episodes a turn to be slow in."""

    def __init__(self, size: int, seconds: float = 1.0):
        super().__init__(0.0)
        self.size, self.seconds = size, seconds

    def start(self, preferred: int, task: str, seed: int) -> tuple:
        _, observation, info = super().start(preferred, task, seed)
        return Straggler(preferred, self.size, self.seconds), observation, info


class LockStep:
    """An engine whose loop waits for every observation, and then for every completion."""

    in_waves = True

    def __init__(self, engine):
        self.engine, self.version = engine, 0
        self.add = engine.add

    def step(self) -> list:
        finished = []
        while self.engine.keys:
            finished += self.engine.step()
        return finished


class Recorder(HFEngine):
    """Remembers what it was asked, a list of requests for each wave, and never stops a turn early."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waves: list[dict] = []

    def step(self):
        self.waves.append({key: (list(ids), *rest) for key, (ids, *rest) in self.waiting.items()})
        return super().step()


def best(run, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def rollout_ratio(lm, chat: Chat, config: Config) -> None:
    """Multi-turn rollouts with slow environments, beside the same engine fed the same requests at once."""
    limits = Limits(config.turns, config.new_tokens, 10**6, 256)
    engine = Recorder(lm, {-1}, seed=1)

    def play() -> None:
        engine.waves.clear()
        engine.sync([], 0)
        blanks = [Trajectory("toy", "t", group, 0) for group in range(config.trajectories)]
        # No form can be broken: the action is whatever was said, so every turn goes to the environment.
        rollout(engine, chat, {"toy": SlowPool(config.latency)}, blanks, limits, ("benchmark",))

    whole = best(play, config.repeats)
    waves = list(engine.waves)
    alone = HFEngine(lm, {-1}, seed=1)

    def replay() -> None:
        alone.sync([], 0)
        for wave in waves:
            for key, request in wave.items():
                alone.add(key, *request)
            alone.step()

    engine_only = best(replay, config.repeats)
    print(
        f"rollout    {whole:.2f} s with {1000 * config.latency:.0f} ms a call, engine alone {engine_only:.2f} s: {whole / engine_only:.2f} times"
    )


def vllm_ratios(folder: str, chat: Chat, config: Config) -> None:
    """vLLM in the multi-turn loop, beside itself without environments, and beside itself in lock-step."""
    engine = VLLMEngine(folder, set(), seed=1, max_tokens=4096)
    requests: list[tuple] = []

    def play(engine, pool, new_tokens: int) -> None:
        requests.clear()
        engine_of = getattr(engine, "engine", engine)
        engine_of.llm.llm_engine.reset_prefix_cache()
        engine_of.prompt_tokens = engine_of.cached_tokens = 0
        limits = Limits(config.turns, new_tokens, 4096, 256)
        blanks = [Trajectory("toy", "t", group, 0) for group in range(config.trajectories)]
        rollout(engine, chat, {"toy": pool}, blanks, limits, ("benchmark",))

    plain_add = engine.add

    def recording_add(key, ids, *rest) -> None:
        requests.append((key, list(ids), *rest))
        plain_add(key, ids, *rest)

    engine.add = recording_add
    whole = best(lambda: play(engine, SlowPool(config.latency), config.new_tokens), config.repeats)
    hits = engine.cached_tokens / engine.prompt_tokens
    engine.add = plain_add

    def offline(at_once: int) -> None:
        engine.llm.llm_engine.reset_prefix_cache()
        waiting = requests[::-1]
        while waiting or engine.keys:
            while waiting and len(engine.keys) < at_once:
                engine.add(*waiting.pop())
            engine.step()

    # As many rows as there are trajectories, and all of them: a batch of 256 is one that no rollout can have,
    # since a turn's prompt is not known before the turns that precede it.
    same = best(lambda: offline(config.trajectories), config.repeats)
    alone = best(lambda: offline(len(requests)), config.repeats)
    print(
        f"rollout    {whole:.2f} s with {1000 * config.latency:.0f} ms a call; the same requests without environments, "
        f"{config.trajectories} at once: {same:.2f} s ({whole / same:.2f} times), all {len(requests)} at once: "
        f"{alone:.2f} s ({whole / alone:.2f} times); {hits:.0%} of prompt tokens from the prefix cache"
    )
    n = config.trajectories
    free = best(lambda: play(engine, StragglerPool(n), 16), config.repeats)
    lock_step = best(lambda: play(LockStep(engine), StragglerPool(n), 16), config.repeats)
    print(
        f"lock-step  {lock_step:.2f} s, continuous {free:.2f} s: {lock_step / free:.2f} times faster"
    )
    engine.close()


def sampling_ratio(lm, config: Config) -> None:
    """One turn of 64 tokens after prompts of 64: our engine beside `generate`."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 400) for _ in range(64)] for _ in range(config.trajectories)]
    engine = HFEngine(lm, {-1})

    def ours() -> None:
        engine.sync([], 0)
        for row, prompt in enumerate(prompts):
            engine.add((row, 0), prompt, 64, 1.0)
        engine.step()

    ids = torch.tensor(prompts, device=lm.device)

    def theirs() -> None:
        with torch.inference_mode():
            lm.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=64,
                max_new_tokens=64, pad_token_id=0,
            )  # fmt: skip

    tokens = 64 * config.trajectories
    speed, base = tokens / best(ours, config.repeats), tokens / best(theirs, config.repeats)
    print(f"sampling   {speed:.0f} tokens/s, generate {base:.0f}: {speed / base:.2f} times")


def main(config: Config) -> None:
    """Print a line for each comparison."""
    with weights.distributed():
        if config.model == "tiny":
            env = sft.envs.make("babyai")
            texts = [
                env.reset(options={"task": task})[0] + env.instructions for task in env.tasks("dev")
            ]
            tokenizer = sft.make_tokenizer(texts, 512)
            lm = sft.make_tiny(tokenizer, sft.Config())
        else:
            lm, tokenizer = weights.load(
                weights.smollm2() if config.model == "smollm2" else config.model
            )
        lm = lm.to(weights.device()).eval()
        print(
            f"{config.model}: {sum(p.numel() for p in lm.parameters()) / 1e6:.1f}M parameters, {weights.device()}, {torch.get_num_threads()} threads"
        )
        import agent

        agent.parse_react = lambda text: (
            "",
            text or "-",
            "",
        )  # random weights keep no form; see rollout_ratio
        if config.engine == "vllm":
            with tempfile.TemporaryDirectory() as folder:
                lm.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                vllm_ratios(folder, Chat(tokenizer), config)
            return
        rollout_ratio(lm, Chat(tokenizer), config)
        sampling_ratio(lm, config)


if __name__ == "__main__":
    main(tyro.cli(Config))
