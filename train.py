"""
The loop: play, compare, improve, and let the episodes grow longer.

    for each training step:
        max_turns     how long episodes may get now                  curriculum.py
        trajectories  G episodes for each of some tasks              rollout.py
        advantages    how much better than expected each one went    algorithms.py
        update        make what went better more likely
        sync          give the sampler the new weights

One process or many (`torchrun --nproc_per_node 8 train.py`): every rank plays its share of the tasks, all
trajectories go to all ranks, and each computes its share of the gradient.

Read curriculum.py first, evaluate.py next. Run it:

    python train.py                                  # BabyAI, a tiny model, GRPO, ScalingInter: minutes on a CPU
    python train.py --algo ppo --stages 12           # PPO with a critic, fixed horizon
"""

import dataclasses
import json
import os
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # spinning threads make a busy machine 20 times slower

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import envs
import model as weights
import report
from agent import Chat, Trajectory
from algorithms import (
    aggregate,
    combine_stats,
    dead_groups,
    explained_variance,
    gae_advantages,
    grpo_advantages,
    kl_divergence,
    loss_denominator,
    mismatch_stats,
    policy_loss,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    shape_rewards,
    truncated_importance_weights,
    value_loss,
    whiten,
)
from curriculum import adaptive_horizon, horizon, sample_tasks, seed_for
from evaluate import (
    check_common,
    find_model,
    gain,
    open_pools,
    play_split,
    summarise,
    table,
    transcript,
)
from rollout import (
    ENGINES,
    Batch,
    Limits,
    RolloutError,
    check_errors,
    collate,
    deal,
    micro_batches,
    rollout_on_all_ranks,
)

GROUP_BASELINES = ("grpo", "rloo")  # algorithms whose baseline is the group's mean


@dataclass(frozen=True)
class Config:
    """Train an LLM agent by multi-turn RL. Every field is a flag: --group-size 16"""

    # --- what to learn ---
    env: tuple[str, ...] = ("babyai",)  # files in envs/; several are mixed
    options: tuple[
        str, ...
    ] = ()  # of the environment's class: levels=paper, or babyai.levels=paper
    env_urls: tuple[
        str, ...
    ] = ()  # running servers, as http://host:port or env=http://host:port; else local ones start
    env_token: str = ""  # what those servers want to hear
    replicas: int = 1  # server processes for each environment, where we start them
    model: str = "tiny"  # tiny (cloned from the expert first), smollm2, a folder, or a hub id
    # --- the algorithm ---
    algo: Literal["grpo", "ppo", "reinforce++", "rloo"] = "grpo"  # where advantages come from
    steps: int = 120  # training steps: a batch of trajectories and its updates
    budget_tokens: int = (
        0  # stop early, once this many tokens have been sampled in training; 0 for no such limit
    )
    tasks_per_step: int = 12  # groups
    group_size: int = 8  # G, trajectories a task
    stages: tuple[int, ...] = (
        4,
        8,
        12,
    )  # turn limits, one a curriculum stage; a single one is a fixed horizon
    interval: int = 20  # training steps a stage
    patience: int = (
        0  # instead of the interval: steps without a new best success that end a stage; 0 for off
    )
    epochs: int = 1  # passes over a batch
    minibatches: int = 3  # optimizer updates a pass
    lr: float = 2e-4  # peak learning rate of the policy
    critic_lr: float = 1e-3  # of PPO's critic
    critic_warmup: int = 2  # steps in which only the critic learns
    warmup: int = 5  # steps in which learning rates rise from 0
    decay: float = 0.4  # share of all steps, at the end, in which they fall to 0 again
    max_grad_norm: float = 1.0  # longer gradients are shortened to this
    clip_low: float = 0.2  # how far a probability may fall in a step, as a ratio below 1
    clip_high: float = 0.2  # and rise, above 1
    value_clip: float = 0.2  # how far a value may move in a step
    gamma: float = 1.0  # discount, a trainable token
    lam: float = 0.95  # GAE's lambda
    bootstrap_truncated: bool = (
        True  # PPO: an episode cut by a limit is worth its last state's value, not 0
    )
    scale_by_std: bool = True  # GRPO: divide advantages by their group's standard deviation
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    kl_coef: float = 0.0  # leash to the starting policy; 0 loads no reference
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k2", "k3"] = (
        "k3"  # in the loss, where k1 would have no gradient; in the reward it is k1
    )
    entropy_coef: float = 0.0  # bonus for staying undecided
    importance_cap: float = 2.0  # of the weights that correct for the sampler's own arithmetic
    keep_dead_groups: bool = (
        False  # update on groups whose returns are all equal too (only KL and entropy act there)
    )
    mask_truncated: bool = False  # learn nothing from trajectories that a limit cut off
    # --- reward shaping, all off; logged returns stay raw ---
    format_penalty: float = 0.0  # for a turn that could not be parsed
    turn_penalty: float = 0.0  # for each turn
    overlong_buffer: int = 0  # trainable tokens before max_tokens over which a penalty grows to 1
    # --- limits of an episode ---
    temperature: float = 1.0  # of sampling; the trainer scores tokens at the same one
    max_new_tokens: int = 64  # a turn
    max_tokens: int = 1536  # an episode: prompt, observations, completions
    max_observation_tokens: int = 256  # an observation; a longer one loses its middle
    max_invalid: int = 3  # the Nth invalid action or broken form ends the episode; 0 for never
    env_timeout: float = 60.0  # seconds for one call to an environment
    env_grace: float = 60.0  # seconds in which a server that does not answer may come back
    episode_seconds: float = 600.0  # for an episode, retries included
    max_error_fraction: float = 0.5  # stop when more episodes of a step fail than this
    concurrency: int = 256  # episodes at once on each rank
    # --- machine ---
    engine: Literal["auto", "hf"] = "auto"  # what samples
    micro_tokens: int = (
        4096  # padded tokens in one forward pass; a matter of memory, not of results
    )
    # --- watching ---
    eval_every: int = 20  # steps between evaluations on dev; 0 for no evaluation at all, before and after included
    eval_limit: int = 120  # dev tasks, for evaluations on the way
    test_samples: int = 2  # episodes for each test task, before and after
    save_every: int = 10  # steps between checkpoints; the last step is always saved
    keep: int = 2  # newest checkpoints to keep, besides the best on dev
    log_tokens: int = 8  # trajectories of a step logged with their tokens
    seed: int = 0
    name: str = ""  # the folder out/<name>; the next free number if empty
    resume: bool = False  # continue out/<name> from its newest checkpoint

    def __post_init__(self):
        check_common(self)
        horizon(1, self.stages, self.interval)  # raises for stages that do not increase
        at_least_1 = (
            "steps",
            "tasks_per_step",
            "group_size",
            "epochs",
            "minibatches",
            "micro_tokens",
            "save_every",
        )
        for field in at_least_1:
            if getattr(self, field) < 1:
                raise ValueError(
                    f"--{field.replace('_', '-')} must be 1 or more, got {getattr(self, field)}"
                )
        if self.algo in GROUP_BASELINES and self.group_size < 2:
            raise ValueError(
                f"{self.algo} compares the trajectories of a group: --group-size must be 2 or more, got 1"
            )
        if self.temperature == 0:
            raise ValueError(
                "--temperature 0 is greedy: all trajectories of a group would be the same. Use 1.0"
            )
        if not 0 <= self.decay <= 1:
            raise ValueError(f"--decay is a share of the steps, 0 to 1, got {self.decay}")
        if self.kl_coef < 0 or self.entropy_coef < 0:
            raise ValueError("--kl-coef and --entropy-coef must be 0 or more")
        if self.resume and not self.name:
            raise ValueError("--resume continues a named run: say which with --name")

    def limits(self, max_turns: int) -> Limits:
        """An episode's bounds, at the present horizon."""
        return Limits(
            max_turns, self.max_new_tokens, self.max_tokens, self.max_observation_tokens,
            self.episode_seconds, max_invalid=self.max_invalid,
        )  # fmt: skip


# --- scoring and credit ---


def score(forward, batch: Batch, rows: list[int], config: Config) -> Tensor:
    """Run `forward` (a Batch -> (b, t)) over some rows without gradients: (B, T), on every rank, 0 elsewhere."""
    scored = torch.zeros(batch.input_ids.shape)
    groups = micro_batches([int(batch.lengths[row]) for row in rows], config.micro_tokens)
    with torch.no_grad():
        for group in deal(groups, dist.get_rank(), dist.get_world_size()):
            mine = [rows[i] for i in group]
            part = forward(batch.select(mine, weights.device())).cpu()
            if mine:
                scored[mine, : part.shape[1]] = part
    dist.all_reduce(scored)  # each row was some rank's; the others hold zeros
    return scored


def assign_credit(batch: Batch, last_values: Tensor | None, config: Config) -> Batch:
    """Fill in advantages (and PPO's value targets) for a whole batch; returns a new Batch."""
    kl = None
    if config.kl_coef and config.kl_in == "reward":
        kl = kl_divergence(batch.old_logprobs, batch.ref_logprobs, "k1")
    rewards = shape_rewards(
        batch.rewards,
        batch.loss_mask,
        kl=kl,
        kl_coef=config.kl_coef if kl is not None else 0.0,
        turn_ends=batch.turn_ends,
        turn_penalty=config.turn_penalty,
        format_errors=batch.format_errors,
        format_penalty=config.format_penalty,
        overlong_buffer=config.overlong_buffer,
        max_length=config.max_tokens,
    )  # (B, T)
    if config.algo == "ppo":
        bootstrap = last_values * ~batch.terminated if config.bootstrap_truncated else None
        advantages, targets = gae_advantages(
            rewards, batch.old_values, batch.loss_mask, config.gamma, config.lam, bootstrap
        )
        return dataclasses.replace(
            batch, advantages=whiten(advantages, batch.loss_mask), value_targets=targets
        )
    if config.algo == "reinforce++":
        advantages = reinforce_plus_plus_advantages(rewards, batch.loss_mask, config.gamma)
    elif config.algo == "grpo":
        advantages = grpo_advantages(rewards.sum(1), batch.group_ids, config.scale_by_std)
    else:
        advantages = rloo_advantages(rewards.sum(1), batch.group_ids)
    advantages = advantages.reshape(len(rewards), -1).expand_as(rewards) * batch.loss_mask
    return dataclasses.replace(batch, advantages=advantages)


def trainable_rows(trajectories: list[Trajectory], batch: Batch, config: Config) -> list[int]:
    """Rows that take part in the update. The others stand in no denominator either."""
    is_dead = dead_groups(batch.returns, batch.group_ids)
    rows = []
    for row, trajectory in enumerate(trajectories):
        drop_dead = (
            config.algo in GROUP_BASELINES and not config.keep_dead_groups and bool(is_dead[row])
        )
        drop_cut = config.mask_truncated and trajectory.end in ("max_turns", "max_tokens")
        if any(trajectory.loss_mask) and not drop_dead and not drop_cut:
            rows.append(row)
    return rows


# --- the update ---


def losses(
    actor, critic, part: Batch, totals: dict[str, float], config: Config
) -> tuple[Tensor, dict[str, float]]:
    """The scalar to descend for one micro-batch, divided by the whole update's totals, and its statistics."""
    logprobs, entropy = actor(
        part.input_ids, part.loss_mask, config.temperature, config.entropy_coef > 0
    )
    old_logprobs = logprobs.detach() if part.old_logprobs is None else part.old_logprobs
    tis = truncated_importance_weights(old_logprobs, part.rollout_logprobs, config.importance_cap)
    loss, stats = policy_loss(
        logprobs, old_logprobs, part.advantages, part.loss_mask, config.clip_low, config.clip_high,
        config.aggregation, tis, totals["policy"],
    )  # fmt: skip
    add = lambda per_token: aggregate(
        per_token, part.loss_mask, config.aggregation, totals["policy"]
    )  # noqa: E731
    if config.kl_coef and config.kl_in == "loss":
        loss = loss + config.kl_coef * add(
            kl_divergence(logprobs, part.ref_logprobs, config.kl_estimator)
        )
    if config.entropy_coef:
        loss = loss - config.entropy_coef * add(entropy)
    inside = part.loss_mask.sum().clamp(min=1)
    stats["entropy"] = float((entropy.detach() * part.loss_mask).sum() / inside)
    stats |= mismatch_stats(
        old_logprobs, part.rollout_logprobs, part.loss_mask, config.importance_cap
    )
    if part.ref_logprobs is not None:
        k3 = kl_divergence(logprobs.detach(), part.ref_logprobs, "k3")
        stats["ref_kl"] = float((k3 * part.loss_mask).sum() / inside)
    if critic is not None:
        values, _ = critic(part.input_ids, part.lengths)
        value, value_stats = value_loss(
            values,
            part.old_values,
            part.value_targets,
            part.loss_mask,
            config.value_clip,
            totals["tokens"],
        )
        # One backward pass for both: they share no parameter, so neither sees the other's gradient.
        loss, stats = loss + value, stats | value_stats
    return loss, stats


def update(
    actor,
    critic,
    optimizers: dict,
    batch: Batch,
    rows: list[int],
    config: Config,
    train_actor: bool = True,
) -> tuple[dict[str, float], int, float]:
    """One optimizer update on some rows of a batch. Collective.

    returns   statistics, 1 where a gradient that was not finite made the update be skipped (else 0), gradient norm
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mask = batch.loss_mask[rows]
    totals = {
        "policy": loss_denominator(mask, config.aggregation, config.max_tokens),
        "tokens": float(mask.sum()),
    }
    parts = []
    for group in deal(
        micro_batches([int(batch.lengths[row]) for row in rows], config.micro_tokens), rank, world
    ):
        part = batch.select([rows[i] for i in group], weights.device())
        loss, stats = losses(actor, critic, part, totals, config)
        (
            loss * world
        ).backward()  # FSDP averages over ranks, and the totals are already everybody's
        parts.append(stats)
    everybodys: list = [None] * world
    dist.all_gather_object(everybodys, parts)
    stats = combine_stats([part for parts in everybodys for part in parts])
    norms = {
        name: float(weights.clip_gradients(optimizer, config.max_grad_norm))
        for name, optimizer in optimizers.items()
    }
    is_finite = all(torch.isfinite(torch.tensor(norm)) for norm in norms.values())
    for name, optimizer in optimizers.items():
        if is_finite and (train_actor or name != "actor"):
            optimizer.step()
        optimizer.zero_grad()
    return stats, int(not is_finite), norms["actor"]


def split(rows: list[int], count: int, seed: int) -> list[list[int]]:
    """Shuffle rows and cut them into `count` nearly equal minibatches; fewer where there are fewer rows."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    parts = [order[i::count] for i in range(count)]
    return [part for part in parts if part]


# --- records ---


def rollout_metrics(trajectories: list[Trajectory], batch: Batch) -> dict:
    """What a step's episodes looked like. Errors are counted and left out of all the rest."""
    valid = [t for t in trajectories if t.end != "error"]
    n = max(1, len(valid))
    repeated = sum(
        a == b
        for t in valid
        for turn in t.turns
        for a, b in _neighbours(t.ids[turn.start : turn.stop])
    )
    sampled = int(batch.loss_mask.sum())
    return {
        "return_mean": sum(t.episode_return for t in valid) / n,
        "success_rate": sum(t.success for t in valid) / n,
        "turns_mean": sum(len(t.turns) for t in valid) / n,
        "truncated_fraction": sum(t.end in ("max_turns", "max_tokens") for t in valid) / n,
        "format_error_fraction": sum(turn.format_error for t in valid for turn in t.turns)
        / max(1, sum(len(t.turns) for t in valid)),
        "invalid_fraction": sum(turn.invalid for t in valid for turn in t.turns)
        / max(1, sum(len(t.turns) for t in valid)),
        "error_fraction": 1 - len(valid) / len(trajectories),
        "errors": _counts(f"{t.env}/{t.task}" for t in trajectories if t.end == "error"),
        "success_by_env": {
            env: _mean([t.success for t in valid if t.env == env])
            for env in sorted({t.env for t in valid})
        },
        "dead_group_fraction": float(dead_groups(batch.returns, batch.group_ids).float().mean()),
        "empty_trajectories": sum(not any(t.loss_mask) for t in valid),
        "repeated_token_fraction": repeated / max(1, sampled),
        "env_steps": sum(len(t.turns) - sum(turn.format_error for turn in t.turns) for t in valid),
        "sampled_tokens": sampled,
        "padding_fraction": 1 - float(batch.lengths.sum()) / batch.input_ids.numel(),
    }


def _neighbours(ids: list[int]):
    return zip(ids, ids[1:], strict=False)


def _mean(values: list) -> float:
    return sum(float(value) for value in values) / max(1, len(values))


def _counts(names) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def as_line(t: Trajectory, step: int, split: str, row: int | None, batch: Batch | None) -> dict:
    """One line of trajectories.jsonl; `row` of `batch` says where its tokens' numbers are, None leaves them out."""
    line = {
        "step": step, "split": split, "env": t.env, "task": t.task, "category": t.category, "group": t.group,
        "sample": t.sample, "weights_version": t.weights_version, "max_turns": t.max_turns, "end": t.end,
        "error": t.error, "success": t.success, "return": t.episode_return,
        "turns": [
            {"observation": turn.observation, "completion": turn.completion, "thought": turn.thought,
             "action": turn.action, "reward": turn.reward}
            for turn in t.turns
        ],
        "last_observation": t.observation,
    }  # fmt: skip
    if row is not None:
        old = batch.old_logprobs if batch.old_logprobs is not None else batch.rollout_logprobs
        n = len(t.ids)
        line["tokens"] = {
            "ids": t.ids,
            "loss_mask": t.loss_mask,
            "rollout_logprobs": t.logprobs,
            "old_logprobs": old[row, :n].tolist(),
            "advantages": batch.advantages[row, :n].tolist(),
        }
    return line


def append_lines(path: Path, lines: list[dict]) -> None:
    """Add JSON lines to a file, on disk before we go on: a resumed run takes back what is newer than its checkpoint."""
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def take_back(path: Path, step: int) -> None:
    """Drop the lines that the checkpoint of `step` does not know, and what a crash cut off.

    So do lines of a closing evaluation (on test, after step 0): it comes after the last checkpoint, and again.
    """
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines(keepends=True):
        line = json.loads(text) if text.endswith("\n") else {"step": step + 1}
        is_closing = line.get("split") == "test" and line["step"] > 0
        if line["step"] <= step and not is_closing:
            kept.append(text)
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def positive_logprob_change(actor, batch: Batch, rows: list[int], config: Config) -> float | None:
    """How much likelier the update made tokens of positive advantage: mean change of their log-probability.

    Below 0 for many steps is the slow unlearning that ends in collapse ("lazy likelihood displacement").
    Measured on one micro-batch; None where nothing had a positive advantage. Collective.
    """
    positive = [row for row in rows if (batch.advantages[row] > 0).any()]
    if not positive or batch.old_logprobs is None:
        return None
    rows = micro_batches([int(batch.lengths[row]) for row in positive], config.micro_tokens)[
        -1
    ]  # the shortest ones
    part = batch.select([positive[i] for i in rows], weights.device())
    with torch.no_grad():
        now, _ = actor(part.input_ids, part.loss_mask, config.temperature)
    where = part.loss_mask & (part.advantages > 0)
    return float((now - part.old_logprobs)[where].mean())


def update_metrics(parts: list[dict], batch: Batch, rows: list[int], config: Config) -> dict:
    """Statistics of a step's updates under the names of metrics.jsonl; None where there was no update."""
    names = (
        "entropy ref_kl approx_kl clip_fraction_low clip_fraction_high ratio_max value_clip_fraction "
        "mismatch_kl weight_clip_fraction logprob_diff_mean logprob_diff_max"
    ).split()
    stats = combine_stats(parts) if parts else {}
    metrics = {name: stats.get(name) for name in names}
    metrics["first_ratio_max"] = (
        parts[0]["ratio_max"] if parts else None
    )  # 1 where the first update is on-policy
    metrics["trained_tokens"] = config.epochs * int(batch.loss_mask[rows].sum())
    metrics["explained_variance"] = None
    if batch.old_values is not None:
        metrics["explained_variance"] = explained_variance(
            batch.value_targets, batch.old_values, batch.loss_mask
        )
    return metrics


def one_line(m: dict) -> str:
    """A training step for a person to read."""
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    speed = m["sampled_tokens"] / max(1e-9, m["seconds_total"])
    return (
        f"step {m['step']:3d}  horizon {m['max_turns']:2d}  success {m['success_rate']:.2f}  return {m['return_mean']:.2f}  "
        f"turns {m['turns_mean']:4.1f}  cut {m['truncated_fraction']:.0%}  dead {m['dead_group_fraction']:.0%}  "
        f"errors {m['error_fraction']:.0%}  entropy {number(m['entropy'], '.3f')}  kl {number(m['approx_kl'], '.4f')}  "
        f"grad {number(m['grad_norm'], '.2f')}  {speed:.0f} tokens/s  {m['seconds_total']:.1f} s"
    )


def compare(run: Path) -> str:
    """Before and after on test, from eval.jsonl: success, and the gain with its interval over tasks."""
    records = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    records = [record for record in records if record["split"] == "test"]
    lines = []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        first, *_, last = [record for record in records if record["temperature"] == temperature]
        mean, low, high = gain(first, last)
        lines.append(
            f"test, {'greedy' if temperature == 0 else 'sampled'}: success {first['success_rate']:.3f} -> "
            f"{last['success_rate']:.3f}, gain {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
    return "\n".join(lines)


# --- start and resume ---


def resume_point(config: Config) -> Path | None:
    """The checkpoint to continue from; None to start afresh.

    raises  ValueError where there is nothing to resume, it was another configuration, or the name is taken
    """
    run = Path("out") / config.name
    if not config.resume:
        weights.check_free(config.name)
        return None
    if not (run / "config.json").exists():
        raise ValueError(f"there is no run to resume in {run}: start it without --resume")
    saved = json.loads((run / "config.json").read_text())
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    # What may differ changes nothing that has been computed already.
    free = {"resume", "save_every", "keep", "log_tokens"} | (set() if config.decay else {"steps"})
    free |= {"env_urls", "env_token", "replicas", "env_timeout", "env_grace"}
    changed = [
        f"--{key.replace('_', '-')} was {saved.get(key)}, now {now[key]}"
        for key in now
        if key not in free and now[key] != saved.get(key)
    ]
    if changed:
        raise ValueError(
            f"{run} was started with another configuration ({'; '.join(changed)}): "
            "use the same flags, or a new --name"
        )
    return weights.newest_checkpoint(run)


def open_run(config: Config) -> Path:
    """The run's folder; a new one gets its config.json."""
    if config.resume:
        return Path("out") / config.name
    run = weights.new_run(config.name, "train")
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
    return run


def learning_rate(step: int, config: Config) -> float:
    """Share of the peak: rises over `warmup` steps, stays, and falls in a straight line over the last `decay`.

    The fall matters: at a constant rate the last updates' noise stays in the weights that are evaluated.
    """
    rise = step / max(1, config.warmup)
    fall = (config.steps + 1 - step) / max(1.0, config.decay * config.steps)
    return min(1.0, rise, fall)


def main(config: Config) -> None:
    """Train from start to report. Everything a run writes goes to out/<name>/."""
    with ExitStack() as stack:
        stack.enter_context(weights.distributed())
        world, is_main = dist.get_world_size(), dist.get_rank() == 0
        device, mesh, dtype = weights.device(), weights.mesh(), weights.compute_dtype()
        checkpoint = weights.on_rank_0(lambda: resume_point(config))
        started = time.perf_counter()

        # The policy in three roles: one that learns, one that samples, one that stays behind (if asked for).
        start = find_model(config)
        lm, tokenizer = weights.load(str(checkpoint or start))
        weights.check_fits(lm, config.max_tokens)
        chat = Chat(tokenizer)
        actor = weights.Actor(lm).to(device)
        twin = weights.sampler_copy(actor, world, dtype)
        critic = reference = None
        if config.algo == "ppo":
            critic = weights.shard(weights.Critic(lm).to(device), mesh, dtype)
        if config.kl_coef:
            reference = weights.shard(
                weights.Actor(weights.load(start)[0]).to(device).requires_grad_(False), mesh, dtype
            )
        weights.shard(actor, mesh, dtype)
        weights.share(twin, actor)
        engine = ENGINES[config.engine](twin, chat.stop_ids, config.seed)
        modules = {"actor": actor} | ({"critic": critic} if critic else {})
        rates = {"actor": config.lr, "critic": config.critic_lr}
        optimizers = {
            name: torch.optim.AdamW(m.parameters(), lr=rates[name], weight_decay=0.0)
            for name, m in modules.items()
        }

        state = {"step": 0, "version": 0, "history": [], "best": -1.0, "sampled_tokens": 0}
        if checkpoint:
            state = weights.load_training_state(checkpoint, optimizers, modules)
        pools = open_pools(config, stack)
        # Everything that a wrong flag could break has been tried: from here on there is a run.
        run = weights.on_rank_0(lambda: open_run(config))
        if is_main and config.resume:
            for file in ("metrics.jsonl", "trajectories.jsonl", "eval.jsonl"):
                take_back(run / file, state["step"] if checkpoint else -1)
            print(f"resuming {run} after step {state['step']}")
        engine.sync(weights.full_weights(actor), state["version"])
        tasks = [
            (name, task) for name, pool in pools.items() for task in pool.clients[0].tasks("train")
        ]
        if is_main:
            print(
                f"{run}: {config.algo} on {' '.join(config.env)}, {len(tasks)} training tasks, from {start}"
            )

        def evaluate(
            split: str, step: int, temperature: float, samples: int, limit: int = 0
        ) -> dict:
            """Play a split with the present weights, print and log the result. Collective."""
            # Without the cap on mistakes and at the environment's own horizon: as evaluate.py does it.
            max_turns = max(envs.make(name).max_turns for name in config.env)
            limits = dataclasses.replace(config.limits(max_turns), max_invalid=0)
            began = time.perf_counter()
            played = play_split(
                engine,
                chat,
                pools,
                split,
                config,
                limits,
                ("evaluate", split, step),
                samples,
                temperature,
                limit,
            )
            check_errors(played, config.max_error_fraction)
            record = {
                "step": step,
                "split": split,
                "temperature": temperature,
                "max_turns": max_turns,
                **summarise(played, config.seed),
            }
            if is_main:
                tqdm.write(
                    table(
                        record,
                        f"step {step}, {split}, {'greedy' if temperature == 0 else 'sampled'}",
                    )
                )
                append_lines(
                    run / "eval.jsonl", [record | {"seconds": time.perf_counter() - began}]
                )
                append_lines(
                    run / "trajectories.jsonl",
                    [as_line(t, step, split, None, None) for t in played],
                )
            return record

        def save(step: int) -> None:
            weights.save_checkpoint(
                run / "checkpoints" / f"step_{step}", tokenizer, optimizers, modules, state
            )
            if is_main:
                weights.keep_newest(run, config.keep)

        if config.eval_every and not checkpoint:
            evaluate("test", 0, config.temperature, config.test_samples)
            evaluate("test", 0, 0.0, 1)

        bar = tqdm(
            total=config.steps,
            initial=state["step"],
            desc="training",
            disable=None if is_main else True,
        )
        for step in range(state["step"] + 1, config.steps + 1):
            began = time.perf_counter()

            # 1. How long, and what. Pure functions of the step: nothing to restore after a crash.
            if config.patience:
                max_turns = adaptive_horizon(state["history"], config.stages, config.patience)
            else:
                max_turns = horizon(step, config.stages, config.interval)
            chosen = sample_tasks(tasks, step, config.tasks_per_step, config.seed)

            # 2. Play.
            blanks = [
                Trajectory(env, task, g, n)
                for g, (env, task) in enumerate(chosen)
                for n in range(config.group_size)
            ]
            try:
                trajectories = rollout_on_all_ranks(
                    engine, chat, pools, blanks, config.limits(max_turns), ("train", step), config.temperature,
                    config.seed, config.concurrency,
                )  # fmt: skip
                check_errors(trajectories, config.max_error_fraction)
            except RolloutError:
                save(step - 1)  # nothing learnt so far is lost with the servers
                raise
            engine.sleep()
            seconds_rollout = time.perf_counter() - began

            # 3. Compare. An episode whose environment failed is in no baseline and no average.
            valid = [t for t in trajectories if t.end != "error"]
            batch = collate(valid, tokenizer.pad_token_id or 0)
            metrics = {"step": step, "max_turns": max_turns, **rollout_metrics(trajectories, batch)}
            rows = trainable_rows(valid, batch, config)
            everything = list(range(len(valid)))
            logprobs = lambda policy: (
                lambda part: policy(part.input_ids, part.loss_mask, config.temperature)[0]
            )  # noqa: E731
            if config.epochs * config.minibatches > 1 or (
                config.kl_coef and config.kl_in == "reward"
            ):
                batch.old_logprobs = score(logprobs(actor), batch, rows, config)
            if reference:
                batch.ref_logprobs = score(logprobs(reference), batch, rows, config)
            last_values = None
            if critic:
                batch.old_values = score(
                    lambda part: critic(part.input_ids, part.lengths)[0], batch, everything, config
                )
                last_values = score(
                    lambda part: critic(part.input_ids, part.lengths)[1][:, None],
                    batch,
                    everything,
                    config,
                )[:, 0]
            batch = assign_credit(batch, last_values, config)

            # 4. Improve.
            version, skipped, norms, parts = state["version"], 0, [], []
            train_actor = not (critic and step <= config.critic_warmup)
            for name, optimizer in optimizers.items():
                for group in optimizer.param_groups:
                    group["lr"] = rates[name] * learning_rate(step, config)
            for epoch in range(config.epochs):
                for part in split(
                    rows, config.minibatches, seed_for(config.seed, "minibatches", step, epoch)
                ):
                    stats, was_skipped, norm = update(
                        actor, critic, optimizers, batch, part, config, train_actor
                    )
                    skipped, norms, parts = skipped + was_skipped, [*norms, norm], [*parts, stats]
            metrics |= {
                "positive_logprob_change": positive_logprob_change(actor, batch, rows, config)
            }
            seconds_train = time.perf_counter() - began - seconds_rollout

            # 5. Tell the sampler.
            state["version"] = version + 1
            engine.wake()
            engine.sync(weights.full_weights(actor), state["version"])
            seconds_sync = time.perf_counter() - began - seconds_rollout - seconds_train

            # 6. Write down.
            state["step"] = step
            state["history"] = [*state["history"], metrics["success_rate"]]
            metrics |= update_metrics(parts, batch, rows, config)
            metrics |= {
                "grad_norm": max(norms, default=None),
                "skipped_updates": skipped,
                "lr": optimizers["actor"].param_groups[0]["lr"] if train_actor else 0.0,
                "weights_version": state["version"],
                "seconds_rollout": seconds_rollout,
                "seconds_train": seconds_train,
                "seconds_sync": seconds_sync,
                "seconds_total": time.perf_counter() - began,
                "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30
                if device.type == "cuda"
                else None,
            }
            if is_main:
                row_of = {id(t): row for row, t in enumerate(valid)}
                lines = [
                    as_line(
                        t,
                        step,
                        "train",
                        row_of.get(id(t)) if i < config.log_tokens else None,
                        batch,
                    )
                    for i, t in enumerate(trajectories)
                ]
                append_lines(run / "trajectories.jsonl", lines)
                append_lines(run / "metrics.jsonl", [metrics])
                tqdm.write(one_line(metrics))
                bar.set_postfix(success=f"{metrics['success_rate']:.2f}", horizon=max_turns)
                bar.update()
            if config.eval_every and step % config.eval_every == 0 and step < config.steps:
                dev = evaluate("dev", step, config.temperature, 1, config.eval_limit)
                if dev.get("success_rate", 0.0) > state["best"]:
                    state["best"] = dev["success_rate"]
                    weights.save_policy(run / "checkpoints" / "best", actor, tokenizer)
            state["sampled_tokens"] += metrics["sampled_tokens"]
            is_last = step == config.steps or 0 < config.budget_tokens <= state["sampled_tokens"]
            if step % config.save_every == 0 or is_last:
                save(step)
            if is_last:
                break
        bar.close()

        if config.eval_every:
            evaluate("test", state["step"], config.temperature, config.test_samples)
            evaluate("test", state["step"], 0.0, 1)
        if is_main:
            if config.eval_every:
                print(transcript(valid[0], chat, os.isatty(1)))
                print(compare(run))
            report.draw(run, run / "curve.png")
            print(
                f"{run}: done in {time.perf_counter() - started:.0f} s; learning curve in {run / 'curve.png'}"
            )


if __name__ == "__main__":
    weights.run_command(main, Config, RolloutError, OSError)
