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
import math
import os
import random
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the default: 20 times slower on busy machines

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import estimate
import lora
import model as weights
import report
from agent import Chat, Trajectory
from algorithms import (
    aggregate,
    combine_stats,
    dead_groups,
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
from compare import before_and_after
from curriculum import adaptive_horizon, horizon, sample_tasks, seed_for
from engines import open_engine
from evaluate import (
    Play,
    check_between,
    check_least,
    check_splits,
    find_model,
    longest,
    open_pools,
    play_split,
    summarise,
    table,
    transcript,
)
from records import (
    Trackers,
    append_lines,
    as_line,
    check_trackers,
    one_line,
    public,
    rollout_metrics,
    take_back,
    update_metrics,
)
from rollout import (
    Batch,
    RolloutError,
    check_errors,
    collate,
    deal,
    micro_batches,
    reset_ahead,
    rollout_on_all_ranks,
)

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# Between vLLM's arithmetic and the trainer's, in bfloat16, some 0.02 nats a token; a stale tensor makes 0.3.
PROBE_LIMIT = 0.1
PASS_TOKENS = 128  # the fixed cost of a forward and backward pass, in tokens
GROUP_BASELINES = ("grpo", "rloo")  # algorithms whose baseline is the group's mean


@dataclass(frozen=True)
class Config(Play):
    """Train an LLM agent by multi-turn RL. Every field is a flag: --group-size 16"""

    # --- the algorithm ---
    algo: Literal["grpo", "ppo", "reinforce++", "rloo"] = "grpo"  # where advantages come from
    steps: int = 200  # training steps: a batch of trajectories and its updates
    budget_tokens: int = 0  # stop once so many tokens have been sampled in training; 0 for no limit
    tasks_per_step: int = 24  # groups
    group_size: int = 4  # G, trajectories a task
    stages: tuple[int, ...] = (4, 8, 12)  # turn limits, one a curriculum stage; one alone is fixed
    interval: int = 15  # training steps a stage
    patience: int = 0  # or: steps without a new best success that end a stage; 0 for off
    epochs: int = 1  # passes over a batch
    minibatches: int = 1  # optimizer updates a pass
    lr: float = 4e-4  # peak learning rate of the policy
    critic_lr: float = 1e-3  # of PPO's critic
    critic_warmup: int = 2  # steps in which only the critic learns
    warmup: int = 5  # steps in which learning rates rise from 0
    decay: float = 1.0  # share of all steps, at the end, in which they fall to 0 again
    max_grad_norm: float = 1.0  # longer gradients are shortened to this
    clip_low: float = 0.2  # how far a probability may fall in a step, as a ratio below 1
    clip_high: float = 0.2  # and rise, above 1
    value_clip: float = 0.2  # how far a value may move in a step
    gamma: float = 1.0  # discount, a trainable token
    lam: float = 1.0  # GAE's lambda; below 1 advantages lean on a critic that knows little at first
    bootstrap_truncated: bool = True  # PPO: a cut episode is worth its last state's value, not 0
    scale_by_std: bool = True  # GRPO: divide advantages by their group's standard deviation
    aggregation: Aggregation = "token-mean"  # how tokens' losses become one
    kl_coef: float = 0.0  # leash to the starting policy; 0 loads no reference
    kl_in: Literal["loss", "reward"] = "loss"  # where it pulls
    kl_estimator: Literal["k2", "k3"] = "k3"  # in the loss, where k1 has no gradient; else k1
    entropy_coef: float = 0.0  # bonus for staying undecided
    importance_cap: float = 2.0  # of the weights that correct for the sampler's own arithmetic
    keep_dead_groups: bool = False  # update on groups of equal returns too: KL and entropy act
    mask_truncated: bool = False  # learn nothing from trajectories that a limit cut off
    # --- reward shaping, all off; logged returns stay raw ---
    format_penalty: float = 0.0  # for a turn that could not be parsed
    turn_penalty: float = 0.0  # for each turn
    overlong_length: int = 512  # trainable tokens of an episode at which a penalty is 1,
    overlong_buffer: int = 0  # and how many before it the penalty begins to grow; 0 for none
    # --- limits of an episode, besides the shared ones ---
    max_invalid: int = 3  # the Nth invalid action or broken form ends the episode; 0 for never
    max_error_fraction: float = 0.5  # stop when more episodes of a step fail than this
    # --- machine ---
    micro_tokens: int = 4096  # padded tokens in a forward pass: a matter of memory, not of results
    activation_checkpointing: bool = False  # compute blocks again in the backward pass
    offload_reference: bool = False  # the reference policy waits in the CPU's memory
    offload_optimizer: bool = False  # so do float32 weights and Adam's moments; updates run there
    lora_rank: int = 0  # train adapters of this rank in place of the weights; 0 for off
    lora_alpha: float = 32.0  # adapters count alpha / rank times
    estimate: tuple[int, ...] | None = None  # only print the memory that so many GPUs need: 1 8
    # --- watching ---
    eval_every: int = 30  # steps between those on dev; 0 for none, before and after RL too
    eval_limit: int = 120  # dev tasks, for evaluations on the way
    test_samples: int = 2  # episodes for each test task, before and after
    save_every: int = 10  # steps between checkpoints; the last step is always saved
    keep: int = 2  # newest checkpoints to keep, besides the best on dev
    log_tokens: int = 8  # trajectories of a step logged with their tokens
    tensorboard: bool = False  # also to out/<name>/tensorboard: pip install tensorboard
    wandb: str = ""  # also to this project of Weights & Biases: pip install wandb
    resume: bool = False  # continue out/<name> from its newest checkpoint

    def __post_init__(self):
        super().__post_init__()
        horizon(1, self.stages, self.interval)  # raises for stages that do not increase
        check_least(self, 1, "steps tasks_per_step group_size epochs minibatches micro_tokens")
        check_least(self, 1, "save_every keep test_samples overlong_length")
        check_least(self, 0, "budget_tokens patience eval_every eval_limit max_invalid log_tokens")
        check_least(self, 0, "kl_coef entropy_coef lora_rank overlong_buffer critic_warmup warmup")
        check_between(self, 0, math.inf, "lr critic_lr max_grad_norm clip_high value_clip")
        check_between(self, 0, 1, "clip_low gamma")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"--lam lies between 0 and 1, got {self.lam}")
        if self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"--overlong-buffer lies below --overlong-length, {self.overlong_length}; got {self.overlong_buffer}"
            )
        if self.importance_cap <= 0:
            raise ValueError(f"--importance-cap must be above 0, got {self.importance_cap:g}")
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
        if self.lora_alpha <= 0:
            raise ValueError(
                f"--lora-alpha must be above 0 (adapters count alpha / rank times), got {self.lora_alpha:g}"
            )
        if self.lora_rank:
            lora.check_installed()
        if any(count < 1 for count in self.estimate or ()):
            raise ValueError(f"--estimate takes numbers of GPUs, 1 or more, got {self.estimate}")
        if self.resume and not self.name:
            raise ValueError("--resume continues a named run: say which with --name")
        check_trackers(self.tensorboard, self.wandb)


# --- scoring and credit ---


def passes(batch: Batch, rows: list[int], config: Config) -> list[list[int]]:
    """Those rows, in groups that share a forward pass: for all ranks, see `deal`."""
    lengths = [int(batch.lengths[row]) for row in rows]
    groups = micro_batches(lengths, config.micro_tokens, dist.get_world_size(), PASS_TOKENS)
    return [[rows[i] for i in group] for group in groups]


def score(forward, batch: Batch, rows: list[int], config: Config) -> Tensor:
    """Run `forward` (a Batch -> (b, t)) over some rows without gradients: (B, T), on every rank, 0 elsewhere."""
    scored = torch.zeros(batch.input_ids.shape)
    groups = passes(batch, rows, config)
    with torch.no_grad():
        for mine in deal(groups, dist.get_rank(), dist.get_world_size()):
            part = forward(batch.select(mine, weights.device())).cpu()
            if mine:
                scored[mine, : part.shape[1]] = part
    dist.all_reduce(scored)  # each row was some rank's; the others hold zeros
    return scored


def shaped_rewards(batch: Batch, config: Config, kl: Tensor | None = None) -> Tensor:
    """What is learnt from: the environment's rewards and what the flags add to them, (B, T)."""
    return shape_rewards(
        batch.rewards,
        batch.loss_mask,
        kl=kl,
        kl_coef=config.kl_coef if kl is not None else 0.0,
        turn_ends=batch.turn_ends,
        turn_penalty=config.turn_penalty,
        format_errors=batch.format_errors,
        format_penalty=config.format_penalty,
        overlong_buffer=config.overlong_buffer,
        max_length=config.overlong_length,
    )


def assign_credit(batch: Batch, last_values: Tensor | None, config: Config) -> Batch:
    """Fill in advantages (and PPO's value targets) for a whole batch; returns a new Batch."""
    kl = None
    if has_kl_in_reward(config):
        kl = kl_divergence(batch.old_logprobs, batch.ref_logprobs, "k1")
    rewards = shaped_rewards(batch, config, kl)
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


def has_kl_in_reward(config: Config) -> bool:
    """Whether --kl-coef and --kl-in take the distance from the start off the rewards."""
    return config.kl_coef > 0 and config.kl_in == "reward"


def trainable_rows(trajectories: list[Trajectory], batch: Batch, config: Config) -> list[int]:
    """Rows that take part in the update. The others stand in no denominator either."""
    # Of what is learnt from: a penalty may part episodes that the environment paid alike. A KL in the reward
    # parts all.
    is_dead = dead_groups(shaped_rewards(batch, config).sum(1), batch.group_ids)
    keeps_dead = config.keep_dead_groups or has_kl_in_reward(config)
    rows = []
    for row, trajectory in enumerate(trajectories):
        drop_dead = config.algo in GROUP_BASELINES and not keeps_dead and bool(is_dead[row])
        drop_cut = config.mask_truncated and trajectory.end in ("max_turns", "max_tokens")
        if any(trajectory.loss_mask) and not drop_dead and not drop_cut:
            rows.append(row)
    return rows


# --- the update ---


def losses(
    actor, critic, part: Batch, totals: dict[str, float], config: Config
) -> tuple[Tensor, dict[str, float]]:
    """The scalar to descend for one micro-batch, divided by the whole update's totals, and its statistics.

    Where the part has no old log-probabilities, those of this very forward pass are that, and are left in it.
    """
    logprobs, entropy = actor(
        part.input_ids, part.loss_mask, config.temperature, config.entropy_coef > 0
    )
    if part.old_logprobs is None:
        part.old_logprobs = logprobs.detach()
    old_logprobs = part.old_logprobs
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
    """One optimizer update on some rows of a batch, whose old log-probabilities it fills in if there are none. Collective.

    returns   statistics, 1 where a gradient that was not finite made the update be skipped (else 0), gradient norm
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mask = batch.loss_mask[rows]
    totals = {
        "policy": loss_denominator(mask, config.aggregation, config.max_tokens),
        "tokens": float(mask.sum()),
    }
    parts, is_scored = [], batch.old_logprobs is not None
    found = None if is_scored else torch.zeros(batch.input_ids.shape)
    for mine in deal(passes(batch, rows, config), rank, world):
        part = batch.select(mine, weights.device())
        loss, stats = losses(actor, critic, part, totals, config)
        if mine and not is_scored:
            found[mine, : part.old_logprobs.shape[1]] = part.old_logprobs.cpu()
        (
            loss * world
        ).backward()  # FSDP averages over ranks, and the totals are already everybody's
        parts.append(stats)
    if not is_scored:
        dist.all_reduce(found)  # each row was some rank's; the others hold zeros
        batch.old_logprobs = found
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


def positive_logprob_change(actor, batch: Batch, rows: list[int], config: Config) -> float | None:
    """How much likelier the update made tokens of positive advantage: mean change of their log-probability.

    Below 0 for many steps is the slow unlearning that ends in collapse ("lazy likelihood displacement").
    Measured on one micro-batch; None where nothing had a positive advantage. Collective.
    """
    positive = [row for row in rows if (batch.advantages[row] > 0).any()]
    if not positive or batch.old_logprobs is None:
        return None
    largest = max(passes(batch, positive, config), key=len)
    part = batch.select(largest, weights.device())
    with torch.no_grad():
        now, _ = actor(part.input_ids, part.loss_mask, config.temperature)
    where = part.loss_mask & (part.advantages > 0)
    return float((now - part.old_logprobs)[where].mean())


def padding(batch: Batch, groups: list[list[int]]) -> float | None:
    """Share of padding in the forward passes of some groups of rows; None for no group."""
    lengths = [batch.lengths[group] for group in groups]
    padded = sum(len(some) * int(some.max()) for some in lengths)
    return 1 - sum(int(some.sum()) for some in lengths) / padded if groups else None


def minibatches_of(rows: list[int], count: int, seed: int) -> list[list[int]]:
    """Shuffle rows and cut them into `count` nearly equal parts; fewer where there are fewer rows."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    parts = [order[i::count] for i in range(count)]
    return [part for part in parts if part]


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
    free = {"resume", "name", "save_every", "keep", "log_tokens"} | (
        set() if config.decay else {"steps"}
    )
    free |= {"env_urls", "env_token", "replicas", "env_timeout", "env_grace"}
    free |= {"tensorboard", "wandb"}
    free |= {"activation_checkpointing", "offload_reference", "offload_optimizer", "estimate"}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    saved = json.loads(json.dumps(defaults)) | saved  # a flag that is newer than the run
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


def open_run(config: Config, step: int) -> Path:
    """The run's folder. A new one gets its config.json; a resumed one is taken back to `step` (-1: to nothing)."""
    if not config.resume:
        run = weights.new_run(config.name, "train")
        (run / "config.json").write_text(json.dumps(public(config), indent=1))
        return run
    run = Path("out") / config.name
    weights.clear_leftovers(run / "checkpoints")
    for file in ("metrics.jsonl", "trajectories.jsonl", "eval.jsonl"):
        take_back(run / file, step)
    return run


def learning_rate(step: int, config: Config) -> float:
    """Share of the peak: rises over `warmup` steps, stays, and falls in a straight line over the last `decay` (1: from the start).

    The fall matters: at a constant rate the last updates' noise stays in the weights that are evaluated.
    """
    rise = step / max(1, config.warmup)
    fall = (config.steps + 1 - step) / max(1.0, config.decay * config.steps)
    return min(1.0, rise, fall)


class Run:
    """All that lives as long as a run: models, optimizers, sampler, environments, its folder and its state."""

    def __init__(self, config: Config, stack: ExitStack):
        self.config = config
        self.is_main = dist.get_rank() == 0
        checkpoint = weights.on_rank_0(lambda: resume_point(config))
        # A resumed run keeps the model it started from: the name `tiny` means another one once its source has changed.
        known = weights.on_rank_0(lambda: weights.saved_state(checkpoint) if checkpoint else {})
        start = known.get("start") or find_model(config)
        self.load_policy(start, checkpoint)
        stack.callback(self.engine.close)
        self.state = {
            "step": 0,
            "version": 0,
            "history": [],
            "best": -1.0,
            "sampled_tokens": 0,
            "start": start,
        }
        if checkpoint:
            self.state = weights.load_training_state(checkpoint, self.optimizers, self.modules)
        self.pools = open_pools(config, stack)
        check_splits(self.pools, "train", *(("dev", "test") if config.eval_every else ()))
        # Everything that a wrong flag could break has been tried: from here on there is a run.
        self.folder = weights.on_rank_0(
            lambda: open_run(config, self.state["step"] if checkpoint else -1)
        )
        if self.is_main:
            self.trackers = stack.enter_context(Trackers(config, self.folder))
        self.is_new = checkpoint is None
        self.page_due = 0.0  # when report.html may be written again
        self.sync(self.state["version"])
        self.tasks = [
            (name, task) for name, pool in self.pools.items() for task in pool.tasks["train"]
        ]
        self.say(
            f"{self.folder}: {config.algo} on {' '.join(config.env)}, {len(self.tasks)} training tasks, "
            f"from {start}" + (f", resumed after step {self.state['step']}" if checkpoint else "")
        )

    def load_policy(self, start: str, checkpoint: Path | None) -> None:
        """The policy in three roles: one that learns, one that samples, one that stays behind (if asked for)."""
        config, dtype = self.config, weights.compute_dtype()
        # A run with adapters starts again from the model that it started from: only they have changed.
        source = start if config.lora_rank else str(checkpoint or start)
        lm, self.tokenizer = weights.load_once(source)
        weights.check_fits(lm, config.max_tokens)
        self.chat = Chat(self.tokenizer)
        self.actor = weights.Actor(lm)
        is_shared = dist.get_world_size() == 1 and dtype == torch.float32 and not config.lora_rank
        self.engine = open_engine(
            config.engine, start, lambda: weights.sampler_copy(self.actor, is_shared, dtype),
            self.chat.stop_ids, config.seed, config.max_tokens, config.vllm_memory,
        )  # fmt: skip
        if config.lora_rank:
            weights.freeze(lm, dtype)
            seed = seed_for(config.seed, "adapters")
            lora.add(lm, config.lora_rank, config.lora_alpha, seed, start)
        self.shard_all(lm, start, dtype)
        if self.engine.in_waves:
            weights.share(self.engine.lm, self.actor)
        self.modules = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        self.rates = {"actor": config.lr, "critic": config.critic_lr}
        self.optimizers = {
            name: weights.adamw(module, self.rates[name]) for name, module in self.modules.items()
        }

    def shard_all(self, lm, start: str, dtype: torch.dtype) -> None:
        """Spread the actor, PPO's critic and the reference over all ranks."""
        config = self.config
        shard = partial(
            weights.shard,
            mesh=weights.mesh(),
            compute_dtype=dtype,
            recompute=config.activation_checkpointing,
        )
        self.critic = self.reference = None
        if config.algo == "ppo":  # a copy of the actor, of its adapters too
            self.critic = shard(weights.Critic(lm), offload=config.offload_optimizer)
        shard(self.actor, offload=config.offload_optimizer)
        if config.kl_coef and config.lora_rank:
            self.reference = self.actor  # with its adapters off
        elif config.kl_coef:  # read only now: rank 0 holds one whole model at a time
            reference, _ = weights.load_once(start)
            weights.freeze(reference, dtype)
            self.reference = shard(weights.Actor(reference), offload=config.offload_reference)

    def blanks(self, step: int) -> list[Trajectory]:
        """The trajectories of a step, not played yet: groups of one task each."""
        config = self.config
        chosen = sample_tasks(self.tasks, step, config.tasks_per_step, config.seed)
        return [
            Trajectory(env, task, group, sample)
            for group, (env, task) in enumerate(chosen)
            for sample in range(config.group_size)
        ]

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation on dev follows a step."""
        return self.config.eval_every > 0 and step % self.config.eval_every == 0

    def prepare(self, step: int) -> None:
        """Begin resetting the environments of a step that is about to be played, while the trainer works."""
        if not self.evaluates_after(step - 1):  # an evaluation needs all the servers' room
            key, config = ("train", step), self.config
            reset_ahead(self.pools, self.blanks(step), key, config.seed, config.concurrency)

    def is_out_of_budget(self) -> bool:
        """Whether as many tokens have been sampled as --budget-tokens allows."""
        return 0 < self.config.budget_tokens <= self.state["sampled_tokens"]

    def say(self, text: str) -> None:
        """A line for the person who watches, above the progress bar."""
        if self.is_main:
            tqdm.write(text)

    def write(self, file: str, lines: list[dict]) -> None:
        """Add lines to one of the run's files. Collective: a full disk stops all ranks, not one."""
        weights.on_rank_0(lambda: append_lines(self.folder / file, lines))
        if self.is_main:
            self.trackers.log(file, lines)

    def sync(self, version: int) -> float:
        """Give the sampler the present weights, and see that it has them. Collective.

        returns   mean distance of the sampler's log-probabilities from the trainer's, on some tokens that the
                  sampler writes: numeric noise, or the weights are not the same
        raises    RolloutError above PROBE_LIMIT: everything learnt from there on would be wrong
        """
        self.engine.wake()
        self.engine.sync(weights.full_weights(self.actor), version)
        prompt = self.chat.prompt("", "Nothing has happened yet.")
        self.engine.add(("probe", version, 0), prompt, 8, 0.0)
        while not (finished := self.engine.step()):
            pass  # vLLM writes a token a step
        ((_, sampled, logprobs),) = finished
        ids = torch.tensor([prompt + sampled], device=weights.device())
        mask = torch.arange(ids.shape[1], device=ids.device)[None] >= len(prompt)
        with torch.no_grad():
            ours, _ = self.actor(ids, mask)
        distance = (ours[mask].cpu() - torch.tensor(logprobs)).abs().mean()
        dist.all_reduce(distance, dist.ReduceOp.MAX)
        if not distance <= PROBE_LIMIT:  # NaN is none of the numbers below it
            raise RolloutError(
                f"after the update to version {version} the sampler's log-probabilities are {distance:.3f} nats a "
                f"token from the trainer's (expected under {PROBE_LIMIT}): it does not sample from the trained weights"
            )
        return float(distance)

    def evaluate(
        self, split: str, step: int, temperature: float, samples: int, limit: int = 0
    ) -> dict:
        """Play a split with the present weights, print and log the result. Collective."""
        # Without the cap on mistakes and at the environment's own horizon: as evaluate.py does it.
        config, max_turns = self.config, longest(self.pools)
        limits = config.limits(max_turns)
        began = time.perf_counter()
        played = play_split(
            self.engine, self.chat, self.pools, split, config, limits, ("evaluate", split, step), samples,
            temperature, limit,
        )  # fmt: skip
        check_errors(played, config.max_error_fraction)
        record = {"step": step, "split": split, "temperature": temperature, "max_turns": max_turns}
        record |= summarise(played, config.seed)
        self.say(table(record, f"step {step}, {split}, {'sampled' if temperature else 'greedy'}"))
        self.write("eval.jsonl", [record | {"seconds": time.perf_counter() - began}])
        self.write("trajectories.jsonl", [as_line(t, step, split, temperature) for t in played])
        return record

    def evaluate_on_test(self) -> None:
        """Sampled, as in training, and greedy."""
        step = self.state["step"]
        self.evaluate("test", step, self.config.temperature, self.config.test_samples)
        self.evaluate("test", step, 0.0, 1)

    def evaluate_on_dev(self) -> None:
        """On the way; the best policy so far is kept."""
        config, step = self.config, self.state["step"]
        dev = self.evaluate("dev", step, config.temperature, 1, config.eval_limit)
        if dev.get("success_rate", -1.0) > self.state["best"]:
            self.state["best"] = dev["success_rate"]
            weights.save_policy(self.folder / "checkpoints" / "best", self.actor, self.tokenizer)

    def save(self) -> None:
        """A checkpoint of the step just finished. Collective."""
        folder = self.folder / "checkpoints" / f"step_{self.state['step']}"
        weights.save_checkpoint(folder, self.tokenizer, self.optimizers, self.modules, self.state)
        weights.on_rank_0(lambda: weights.keep_newest(self.folder, self.config.keep))
        if self.is_main:
            self.page_due = report.refresh(self.folder, self.page_due)

    @contextmanager
    def saved_if_servers_fail(self):
        """Nothing learnt so far is lost with the environments' servers. Collective."""
        try:
            yield
        except RolloutError as error:
            self.save()
            raise RolloutError(
                f"{error}\nA checkpoint was saved in {self.folder}: once that is mended, the same command with "
                f"--resume --name {self.folder.name} goes on from step {self.state['step']}"
            ) from None

    def score_all(self, batch: Batch, rows: list[int]) -> Tensor | None:
        """Fill in the batch's old and reference log-probabilities and values; returns PPO's last values (B,)."""
        config, everything = self.config, list(range(len(batch.lengths)))

        def logprobs(policy):
            return lambda part: policy(part.input_ids, part.loss_mask, config.temperature)[0]

        if has_kl_in_reward(config):
            rows = everything  # the baselines are means over all of them
        # With a single update on fresh samples its own forward pass gives the old log-probabilities, see `losses`.
        if config.epochs * config.minibatches > 1 or has_kl_in_reward(config):
            batch.old_logprobs = score(logprobs(self.actor), batch, rows, config)
        if self.reference:
            with lora.adapters_off(self.reference):
                batch.ref_logprobs = score(logprobs(self.reference), batch, rows, config)
        if not self.critic:
            return None
        values = lambda part: self.critic(part.input_ids, part.lengths)[0]  # noqa: E731
        last_value = lambda part: self.critic(part.input_ids, part.lengths)[1][:, None]  # noqa: E731
        batch.old_values = score(values, batch, everything, config)
        return score(last_value, batch, everything, config)[:, 0]

    def improve(self, batch: Batch, rows: list[int], step: int) -> dict:
        """All of a step's optimizer updates; returns what they report for metrics.jsonl. Collective."""
        config, parts, norms, skipped, groups = self.config, [], [], 0, []
        train_actor = not (self.critic and step <= config.critic_warmup)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.rates[name] * learning_rate(step, config)
        for epoch in range(config.epochs):
            seed = seed_for(config.seed, "minibatches", step, epoch)
            for part in minibatches_of(rows, config.minibatches, seed):
                stats, was_skipped, norm = update(
                    self.actor, self.critic, self.optimizers, batch, part, config, train_actor
                )
                skipped, norms, parts = skipped + was_skipped, [*norms, norm], [*parts, stats]
                groups += passes(batch, part, config)
        return update_metrics(parts, batch, rows, config) | {
            "positive_logprob_change": positive_logprob_change(self.actor, batch, rows, config),
            "grad_norm": max(norms, default=None),
            "skipped_updates": skipped,
            "padding_fraction": padding(batch, groups),
            "lr": self.optimizers["actor"].param_groups[0]["lr"] if train_actor else 0.0,
        }


def peak_memory_gb() -> float | None:
    """The most that this process's tensors ever took on its GPU, in GiB; None on a CPU."""
    on_gpu = weights.device().type == "cuda"
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


def main(config: Config) -> None:
    """Train from start to report. Everything a run writes goes to out/<name>/."""
    if config.estimate is not None:
        return estimate.show(config) if int(os.environ.get("RANK", 0)) == 0 else None
    with ExitStack() as stack:
        stack.enter_context(weights.distributed())
        started = time.perf_counter()
        run = Run(config, stack)
        if config.eval_every and run.is_new:
            run.evaluate_on_test()
        bar = tqdm(
            total=config.steps, initial=run.state["step"], desc="training", disable=None if run.is_main else True
        )  # fmt: skip
        has_learnt = not run.is_new
        valid = []  # a run that was stopped during its closing evaluation has no step left to play
        last = run.state["step"] if run.is_out_of_budget() else config.steps
        for step in range(run.state["step"] + 1, last + 1):
            clock = [time.perf_counter()]

            # 1. How long, and what. Pure functions of the step: nothing to restore after a crash.
            if config.patience:
                max_turns = adaptive_horizon(run.state["history"], config.stages, config.patience)
            else:
                max_turns = horizon(step, config.stages, config.interval)

            # 2. Play.
            with run.saved_if_servers_fail():
                trajectories = rollout_on_all_ranks(
                    run.engine, run.chat, run.pools, run.blanks(step), config.limits(max_turns, config.max_invalid), ("train", step),
                    config.temperature, config.seed, config.concurrency,
                )  # fmt: skip
                check_errors(trajectories, config.max_error_fraction)
            run.engine.sleep()
            if step < last:
                run.prepare(step + 1)
            clock.append(time.perf_counter())

            # 3. Compare. An episode whose environment failed is in no baseline and no average.
            valid = [t for t in trajectories if t.end != "error"]
            batch = collate(valid, run.tokenizer.pad_token_id or 0)
            metrics = {"step": step, "max_turns": max_turns, **rollout_metrics(trajectories, batch)}
            rows = trainable_rows(valid, batch, config)
            last_values = run.score_all(batch, rows)
            batch = assign_credit(batch, last_values, config)

            # 4. Improve.
            metrics |= run.improve(batch, rows, step)
            has_learnt |= metrics["trained_tokens"] > 0
            clock.append(time.perf_counter())

            # 5. Tell the sampler.
            metrics["probe_distance"] = run.sync(run.state["version"] + 1)
            clock.append(time.perf_counter())

            # 6. Write down.
            run.state |= {
                "step": step,
                "version": run.state["version"] + 1,
                "history": [*run.state["history"], metrics["success_rate"]],
                "sampled_tokens": run.state["sampled_tokens"] + metrics["sampled_tokens"],
            }
            spent = [after - before for before, after in zip(clock, clock[1:], strict=False)]
            metrics |= dict(
                zip(("seconds_rollout", "seconds_train", "seconds_sync"), spent, strict=True)
            )
            metrics |= {
                "weights_version": run.state["version"],
                "seconds_total": time.perf_counter() - clock[0],
                "peak_memory_gb": peak_memory_gb(),
            }
            row_of = {id(t): row for row, t in enumerate(valid)}
            run.write("trajectories.jsonl", [
                as_line(
                    t, step, "train", config.temperature, row_of.get(id(t)) if i < config.log_tokens else None, batch,
                    is_scored=batch.old_logprobs is not None and row_of.get(id(t)) in rows,
                )
                for i, t in enumerate(trajectories)
            ])  # fmt: skip
            run.write("metrics.jsonl", [metrics])
            run.say(one_line(metrics))
            bar.set_postfix(success=f"{metrics['success_rate']:.2f}", horizon=max_turns)
            bar.update()
            if run.evaluates_after(step) and step < config.steps:
                with run.saved_if_servers_fail():
                    run.evaluate_on_dev()
            if step % config.save_every == 0 or step == config.steps or run.is_out_of_budget():
                run.save()
            if run.is_out_of_budget():
                break
        bar.close()
        if not has_learnt:
            run.say(
                "NOTHING WAS LEARNT: in no step was there anything to compare (dead_group_fraction and "
                "truncated_fraction in metrics.jsonl say why). Too hard a task, a start that was cloned for another "
                "one, or --max-tokens too small?"
            )

        if config.eval_every:
            run.evaluate_on_test()
        if run.is_main:
            if valid:
                print(transcript(valid[0], run.chat, os.isatty(1)))
            if config.eval_every:
                print(before_and_after(run.folder))
            report.draw(run.folder, run.folder / "curve.png")
            # More than a page has room for, less than memory has.
            report.refresh(run.folder, newest=1_000_000_000)
            seconds = time.perf_counter() - started
            print(
                f"{run.folder}: done in {seconds:.0f} s; curves and trajectories in {run.folder / 'report.html'}"
            )


if __name__ == "__main__":
    weights.run_command(main, Config, RolloutError, OSError)
