"""
Is it better, by how much, and how sure are we: success rates with intervals, on tasks never trained on.

    a policy, a split  ->  trajectories (tasks x samples)  ->  success, return, turns, endings, pass@k

    summarise   trajectories -> one record of numbers, with the bootstrap intervals of compare.py
    table       that record, to read
    open_model  what plays: a model of this machine, or any behind an address (api_model.py)

The tasks are the sample, not the episodes: several tries at one task share its difficulty, so intervals
are drawn over tasks. `dev` is for choosing, `test` for reporting: look at it once.

Read train.py first, compare.py next. Run it:

    python evaluate.py --model out/train-001/checkpoints/step_40 --samples 4 --max-turns 4 8 12
    OPENAI_API_KEY=... python evaluate.py --model gpt-4o --api-url https://api.openai.com/v1 --max-new-tokens 256
    python evaluate.py --compare out/eval-001 out/eval-002
    python report.py out/eval-001                       # and read what it said and did
"""

import json
import math
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the default: 20 times slower on busy machines

import torch.distributed as dist

import api_model
import model as weights
import sft
from agent import Chat, Trajectory
from algorithms import pass_at_k
from compare import bootstrap, compare
from engines import check_engine, open_engine
from env_server import EnvServers, check_options, parse_options
from records import append_lines, as_line, public
from rollout import EnvPool, Limits, RolloutError, check_errors, rollout_on_all_ranks


@dataclass(frozen=True)
class Play:
    """How episodes are played: the flags that train.py and evaluate.py share."""

    # --- what, and where ---
    env: tuple[str, ...] = ("babyai",)  # files in envs/; several are mixed
    options: tuple[str, ...] = ()  # of the environment: levels=paper, or babyai.levels=paper
    env_urls: tuple[str, ...] = ()  # running servers, [env=]http://host:port; else local ones start
    env_token: str = ""  # what those servers want to hear
    replicas: int = 1  # server processes for each environment, where we start them
    model: str = "tiny"  # tiny (cloned from the expert first), smollm2, a folder, or a hub id
    engine: Literal["auto", "hf", "vllm"] = "auto"  # what samples; auto: vllm where a GPU has it
    vllm_memory: float = 0.5  # share of a GPU's memory for vLLM: its weights and its cache
    seed: int = 0
    name: str = ""  # the folder out/<name>; the next free number if empty
    # --- limits ---
    temperature: float = 1.0  # of sampling, 0 for greedy; the trainer scores tokens at the same one
    max_new_tokens: int = 64  # a turn
    max_tokens: int = 1536  # an episode: prompt, observations, completions
    max_observation_tokens: int = 256  # an observation; a longer one loses its middle
    episode_seconds: float = 600.0  # for an episode, retries included
    concurrency: int = 256  # episodes at once on each rank
    env_timeout: float = 60.0  # seconds for one call to an environment
    env_grace: float = 60.0  # seconds in which a server that does not answer may come back
    max_error_fraction: float = 0.1  # of episodes that may be lost to failures of servers

    def __post_init__(self):
        check_options(self.options, self.env)
        server_urls(self)
        check_engine(self.engine)
        check_least(
            self, 1, "max_new_tokens max_tokens max_observation_tokens concurrency replicas"
        )
        check_between(self, 0, math.inf, "episode_seconds env_timeout")
        check_between(self, 0, 1, "vllm_memory")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.name in (".", "..") or os.sep in self.name:
            raise ValueError(f"--name is one folder in out/, got {self.name!r}")

    def limits(self, max_turns: int, max_invalid: int = 0) -> Limits:
        """An episode's bounds at some turn limit."""
        return Limits(
            max_turns, self.max_new_tokens, self.max_tokens, self.max_observation_tokens,
            self.episode_seconds, max_invalid=max_invalid,
        )  # fmt: skip


def check_least(config, least: int, fields: str) -> None:
    """raises ValueError where a flag has a smaller value."""
    for field in fields.split():
        if (value := getattr(config, field)) < least:
            raise ValueError(f"--{field.replace('_', '-')} must be {least} or more, got {value}")


def check_between(config, low: float, high: float, fields: str) -> None:
    """raises ValueError where a flag is not above `low` and at most `high`, NaN included."""
    for field in fields.split():
        if not low < (value := getattr(config, field)) <= high:
            at_most = "" if high == math.inf else f" and at most {high:g}"
            raise ValueError(
                f"--{field.replace('_', '-')} must be above {low:g}{at_most}, got {value}"
            )


@dataclass(frozen=True)
class Config(Play):
    """Evaluate a policy. Every field is a flag: --split dev"""

    # --- how much of it ---
    split: Literal["train", "dev", "test"] = "test"  # tune on dev
    samples: int = 1  # episodes a task: avg@k and pass@k
    max_turns: tuple[int, ...] = ()  # turn limits, a table each; none: the environment's own
    limit: int = 0  # only the first so many tasks; 0 for all
    # --- a model behind an address, where --api-url is given; its key is read from OPENAI_API_KEY ---
    api_url: str = ""  # an OpenAI-compatible server: http://host:8000/v1; --model is its name there
    api_timeout: float = 120.0  # seconds for one reply
    prompt_price: float = 0.0  # dollars for a million tokens read; without prices no cost is shown
    completion_price: float = 0.0  # dollars for a million tokens written
    # --- or play nothing ---
    compare: tuple[Path, ...] = ()  # two earlier results, out/eval-001 out/eval-002, task by task

    def __post_init__(self):
        super().__post_init__()
        if self.compare and len(self.compare) != 2:
            raise ValueError(f"--compare takes two results, A and B, got {len(self.compare)}")
        if self.api_url:
            api_model.check_url(self.api_url)
            if self.engine != "auto":
                raise ValueError(
                    f"--engine {self.engine} samples on this machine, --api-url elsewhere: give one of them"
                )
        if self.prompt_price < 0 or self.completion_price < 0:
            raise ValueError("--prompt-price and --completion-price must be 0 or more")
        if self.api_timeout <= 0:
            raise ValueError(f"--api-timeout must be above 0 seconds, got {self.api_timeout:g}")
        check_least(self, 1, "samples")
        check_least(self, 0, "limit")
        if any(turns < 1 for turns in self.max_turns):
            raise ValueError(f"--max-turns must be 1 or more, got {self.max_turns}")


# --- where the environments are ---


def server_urls(config) -> dict[str, list[str]]:
    """--env-urls by environment; raises ValueError where an address can't be told to belong to one."""
    urls: dict[str, list[str]] = {name: [] for name in config.env}
    for item in config.env_urls:
        name, has_name, url = (
            item.partition("=") if not item.startswith("http") else (config.env[0], "=", item)
        )
        if not has_name or name not in urls or (item == url and len(urls) > 1):
            raise ValueError(
                f"--env-urls takes http://host:port, or env=http://host:port with several --env, got {item!r}"
            )
        urls[name].append(url)
    missing = [name for name, known in urls.items() if config.env_urls and not known]
    if missing:
        raise ValueError(f"--env-urls has no address for {', '.join(missing)}")
    return urls


def open_pools(config, stack: ExitStack) -> dict[str, EnvPool]:
    """A pool of remote episodes for each environment; local servers are started where no address is given.

    One rank of each node starts them. They end with `stack`. Collective.
    raises  ValueError where a server does not answer, or serves something else
    """
    urls = server_urls(config)
    if not config.env_urls:
        starts = weights.local_rank() == 0
        launched = weights.on_all_ranks(lambda: launch(config, stack) if starts else {})
        urls = launched[dist.get_rank() - weights.local_rank()]
    pools = {}
    for name, addresses in urls.items():
        pools[name] = EnvPool(
            addresses, token=config.env_token, timeout=config.env_timeout, grace=config.env_grace
        )
        stack.callback(pools[name].close)
        weights.on_all_ranks(partial(pools[name].check, name))
    return pools


def launch(config, stack: ExitStack) -> dict[str, list[str]]:
    """Start this node's servers, which end with `stack`; returns their addresses by environment.

    raises  ValueError with a server's last words where it ends before it answers
    """
    options, urls = parse_options(config.options, config.env), {}
    capacity = config.concurrency * max(1, weights.local_world_size()) + 16
    for name in config.env:
        try:
            servers = EnvServers(name, options[name], config.replicas, capacity)
        except RuntimeError as error:
            raise ValueError(f"could not start a server for {name}: {error}") from error
        urls[name] = stack.enter_context(servers).urls
    return urls


def check_splits(pools: dict[str, EnvPool], *splits: str) -> None:
    """raises ValueError where an environment has no task in a split that will be played."""
    for name, pool in pools.items():
        for split in splits:
            if not pool.tasks[split]:
                raise ValueError(
                    f"{name} has no task in its {split} split: give it some (--options), or don't play that split"
                )


def longest(pools: dict[str, EnvPool]) -> int:
    """The environments' own turn limit; of a mixture the largest."""
    return max(pool.max_turns for pool in pools.values())


# --- numbers ---


def by_task(trajectories: list[Trajectory]) -> dict[tuple[str, str], list[Trajectory]]:
    """The valid trajectories of each (environment, task): those whose environment did not fail."""
    tasks: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.end != "error":
            tasks.setdefault((trajectory.env, trajectory.task), []).append(trajectory)
    return tasks


def summarise(trajectories: list[Trajectory], seed: int = 0) -> dict:
    """One record of what an evaluation found. Errors are counted, and left out of everything else.

    success_rate (avg@k) is the mean over tasks of the share of successful samples, pass@k the unbiased chance that
    one of k samples succeeds, return_mean the mean sum of rewards. Success and return are both reported,
    because an environment may pay for more, or less, than success.
    """
    tasks = by_task(trajectories)
    valid = [trajectory for group in tasks.values() for trajectory in group]
    record = {"tasks": len(tasks), "episodes": len(valid), "errors": len(trajectories) - len(valid)}
    if not valid:
        return record
    rates = [_mean(t.success for t in group) for group in tasks.values()]
    fewest = min(len(group) for group in tasks.values())
    categories = sorted({(t.env, t.category) for t in valid})
    return record | {
        "success_rate": _mean(rates),
        "success_interval": bootstrap(rates, seed),
        "return_mean": _mean(t.episode_return for t in valid),
        "turns_mean": _mean(len(t.turns) for t in valid),
        "ends": dict(Counter(t.end for t in valid)),
        "pass_at": {
            str(k): _mean(
                pass_at_k(len(group), sum(t.success for t in group), k) for group in tasks.values()
            )
            for k in sorted({2**i for i in range(fewest.bit_length())} | {fewest})
        },
        "by_category": {
            f"{env}/{category}": _mean(
                t.success for t in valid if (t.env, t.category) == (env, category)
            )
            for env, category in categories
        },
        "per_task": {f"{env}/{task}": rate for (env, task), rate in zip(tasks, rates, strict=True)},
    }


def _mean(values) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values)


def table(record: dict, title: str) -> str:
    """A record as lines of text."""
    if not record["episodes"]:
        return f"{title}: no valid episode ({record['errors']} errors)"
    low, high = record["success_interval"]
    ends = ", ".join(f"{count} {end}" for end, count in sorted(record["ends"].items()))
    lines = [
        f"{title}: success {record['success_rate']:.3f} [{low:.3f}, {high:.3f}], return {record['return_mean']:.3f}, "
        f"{record['turns_mean']:.1f} turns, {record['tasks']} tasks, {record['episodes']} episodes, {record['errors']} errors",
        f"    ended by: {ends}",
        "    " + ", ".join(f"{name} {rate:.2f}" for name, rate in record["by_category"].items()),
    ]
    if len(record["pass_at"]) > 1:
        lines.append(
            "    " + ", ".join(f"pass@{k} {rate:.3f}" for k, rate in record["pass_at"].items())
        )
    if "usage" in record:
        lines.append(f"    {api_model.in_words(record['usage'])}")
    return "\n".join(lines)


def transcript(trajectory: Trajectory, chat: Chat, color: bool) -> str:
    """A whole trajectory as the model reads it, the agent's own tokens coloured by loss_mask (or «marked»)."""
    out = []
    opening, closing = ("\033[32m", "\033[0m") if color else ("«", "»")
    pieces: list[tuple[int, list[int]]] = []
    for token, mask in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if not pieces or pieces[-1][0] != mask:
            pieces.append((mask, []))
        pieces[-1][1].append(token)
    for inside, ids in pieces:
        text = chat.tokenizer.decode(ids)
        out.append(f"{opening}{text}{closing}" if inside else text)
    return (
        "".join(out)
        + f"\n[{trajectory.end}, success {trajectory.success}, return {trajectory.episode_return:g}]"
    )


# --- running it ---


def play_split(
    engine,
    chat,
    pools,
    split: str,
    config,
    limits: Limits,
    key: tuple,
    samples: int,
    temperature: float,
    limit: int = 0,
):
    """`samples` episodes of each task of a split. Collective; returns all trajectories on every rank."""
    tasks = [
        (name, task) for name, pool in pools.items() for task in first(pool.tasks[split], limit)
    ]
    for pool in pools.values():
        pool.drop_ahead()
    blanks = [
        Trajectory(env, task, group, n)
        for group, (env, task) in enumerate(tasks)
        for n in range(samples)
    ]
    return rollout_on_all_ranks(
        engine, chat, pools, blanks, limits, key, temperature, config.seed, config.concurrency
    )


def first(tasks: list[str], limit: int) -> list[str]:
    """The first `limit` tasks, all for 0. The order of a split is made so that its start is a fair sample of it."""
    return tasks[:limit] if limit else tasks


def find_model(config) -> str:
    """The folder or hub id behind --model; makes `tiny` (by cloning) and `smollm2` on first use. Collective."""
    if config.model == "tiny":
        return sft.starting_policy(
            sft.Config(env=config.env, options=config.options, seed=config.seed)
        )
    return weights.on_rank_0(weights.smollm2) if config.model == "smollm2" else config.model


def open_model(config: Config, stack: ExitStack):
    """What plays: (its path or name, its chat template, its engine). Ends with `stack`. Collective."""
    if config.api_url:
        prices = (config.prompt_price, config.completion_price)
        client = api_model.ApiClient(config.api_url, config.model, config.api_timeout, prices)
        return config.model, *api_model.connect(client, config.temperature, config.max_tokens)
    path = find_model(config)
    lm, tokenizer = weights.load(path, weights.compute_dtype())
    weights.check_fits(lm, config.max_tokens)
    chat = Chat(tokenizer)
    engine = open_engine(
        config.engine, path, lambda: lm.to(weights.device()).eval(), chat.stop_ids, config.seed,
        config.max_tokens, config.vllm_memory,
    )  # fmt: skip
    stack.callback(engine.close)
    return path, chat, engine


def play_at(max_turns: int, path: str, chat, engine, pools, config: Config) -> tuple[dict, list]:
    """Evaluate at one turn limit: a line of eval.jsonl, and the trajectories. Collective.

    raises  RolloutError where more episodes were lost than --max-error-fraction allows
    """
    started = time.perf_counter()
    trajectories = play_split(
        engine, chat, pools, config.split, config, config.limits(max_turns), ("evaluate", max_turns),
        config.samples, config.temperature, config.limit,
    )  # fmt: skip
    usage = {"usage": engine.take_usage()} if config.api_url else {}
    try:
        check_errors(trajectories, config.max_error_fraction)
    except RolloutError:  # it is no result, but it was paid for
        if usage and dist.get_rank() == 0:
            print(api_model.in_words(usage["usage"]))
        raise
    record = {
        "model": path,
        "split": config.split,
        "max_turns": max_turns,
        "temperature": config.temperature,
    }
    record |= summarise(trajectories, config.seed) | usage
    return record | {"seconds": time.perf_counter() - started}, trajectories


def main(config: Config) -> None:
    """Evaluate on every requested turn limit, print tables; out/<name>/ gets eval.jsonl and trajectories.jsonl."""
    if config.compare:
        print(compare(*config.compare, config.seed))
        return
    with ExitStack() as stack:
        stack.enter_context(weights.distributed())
        weights.check_free(config.name)  # before any work
        path, chat, engine = open_model(config, stack)
        pools = open_pools(config, stack)
        check_splits(pools, config.split)
        run = weights.on_rank_0(lambda: weights.new_run(config.name, "eval"))
        for max_turns in config.max_turns or (longest(pools),):
            record, trajectories = play_at(max_turns, path, chat, engine, pools, config)
            lines = [as_line(t, None, config.split, config.temperature) for t in trajectories]
            weights.on_rank_0(lambda: append_lines(run / "trajectories.jsonl", lines))
            weights.on_rank_0(lambda: append_lines(run / "eval.jsonl", [record]))
            if dist.get_rank() == 0:
                title = f"{config.split}, {max_turns} turns, temperature {config.temperature:g}"
                print(table(record, title))
        if dist.get_rank() == 0:
            (run / "config.json").write_text(json.dumps(public(config), indent=1))
            print(transcript(trajectories[0], chat, sys.stdout.isatty()))


if __name__ == "__main__":
    weights.run_command(main, Config, RolloutError, OSError)
