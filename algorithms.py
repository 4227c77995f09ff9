"""
Rewards in, gradients out: every formula of the trainer, as a pure function on tensors.

    rewards (B, T)  ->  advantages (B, T)  ->  per-token losses (B, T)  ->  loss ()

    masks       keep, masked_mean, whiten, token_stats, combine_stats
    rewards     shape_rewards, overlong_penalty             DAPO: Yu et al. 2025, Eq. 13
    advantages  dead_groups, grpo_advantages                Shao et al. 2024, Sec. 4.1.2
                rloo_advantages                             Ahmadian et al. 2024
                gae_advantages                              Schulman et al. 2015, Eq. 16
                reinforce_plus_plus_advantages              Hu et al. 2025
    losses      aggregate, loss_denominator                 Yu et al.; Dr. GRPO: Liu et al. 2025
                policy_loss                                 PPO: Schulman et al. 2017, Eq. 7
                value_loss, explained_variance
                sft_loss, dpo_loss                          Rafailov et al. 2023, Eq. 7
    distances   kl_divergence                               Schulman 2020; k3: Shao et al., Eq. 4
                truncated_importance_weights, mismatch_stats   Yao et al. 2025
    evaluation  pass_at_k                                   Chen et al. 2021, Eq. 1

Three conventions hold everywhere:
- B trajectories, padded to T tokens; entry t describes token t. `loss_mask` is 1 on the tokens the
  agent sampled, 0 on prompt, observations and padding, in any dtype. Whatever stands under a 0, NaN
  included, changes no value and no gradient.
- Sums are divided by totals of the whole update, not of the micro-batch at hand: that is what the
  `denominator` arguments are for.
- Advantages are computed once a step, on the whole batch, before it is split over ranks.
`returns` is a quantity here, so docstrings call what a function gives back its `result`.

Read rollout.py first, curriculum.py and train.py next. No model and no I/O in here, so all of it
can be checked on paper:

    python -m pytest tests/test_algorithms.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 is 5e8: a ratio far beyond any clip, and float32 still holds its square
MAX_K3 = 10.0


# --- masks ---


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is 1, a clean 0 elsewhere; x may be (B, 1) and spread over tokens.

    Comes before any arithmetic. `x * mask` would not do: 0 * NaN is NaN. Nor would masking the
    result, for autograd multiplies the zero it gets from outside by the local derivative: in
    where(mask, exp(x), 0) that derivative is exp(x), and where x overflows, 0 * inf is NaN again.
    """
    x = x if x.is_floating_point() else x.float()
    return torch.where(mask != 0, x, torch.zeros_like(x))


def masked_mean(x: Tensor, mask: Tensor, denominator: float | Tensor | None = None) -> Tensor:
    """Sum of x over the mask, divided by `denominator`, or by the size of the mask if that is None.

    An empty mask gives a 0 that is still part of the graph: a rank with nothing to train on must
    call backward like all others, or they wait for it forever.
    """
    denominator = (mask != 0).sum() if denominator is None else denominator
    return keep(x, mask).sum() / (denominator if denominator > 0 else 1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and variance 1 over the mask; 0 elsewhere.

    The variance is the unbiased one (N - 1), as in verl; OpenRLHF divides by N. Entries that are
    all equal, or fewer than two, become exactly 0: there is nothing to compare.
    """
    x = keep(x, mask)
    entries = x[mask != 0]  # (N,)
    if len(entries) < 2 or entries.max() == entries.min():
        return torch.zeros_like(x)
    return keep((x - entries.mean()) / (entries.std() + 1e-8), mask)


@torch.no_grad()
def token_stats(loss_mask: Tensor, **per_token: Tensor) -> dict[str, float]:
    """The mean of each (B, T) tensor over the mask, or where its name ends in `_max` the maximum,
    for logs; 0 where the mask is empty. `num_tokens` comes along for `combine_stats`."""
    stats = {
        name: keep(x, loss_mask).max() if name.endswith("_max") else masked_mean(x, loss_mask)
        for name, x in per_token.items()
    }
    stats["num_tokens"] = (loss_mask != 0).sum()
    return {name: float(value) for name, value in stats.items()}


def combine_stats(parts: list[dict[str, float]]) -> dict[str, float]:
    """The stats of several micro-batches or ranks as those of the batch they make up.

    Means are weighted by `num_tokens`, a plain mean of means would not be one; `_max` take the
    maximum. All parts must have the same names.
    """
    total = sum(part["num_tokens"] for part in parts)
    combined = {"num_tokens": total}
    for name in parts[0]:
        if name.endswith("_max"):
            combined[name] = max(part[name] for part in parts)
        elif name != "num_tokens":
            weighted = sum(part[name] * part["num_tokens"] for part in parts)
            combined[name] = weighted / max(total, 1)
    return combined


# --- rewards ---


def shape_rewards(
    rewards: Tensor,
    loss_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    turn_ends: Tensor | None = None,
    turn_penalty: float = 0.0,
    format_errors: Tensor | None = None,
    format_penalty: float = 0.0,
    overlong_buffer: int = 0,
    max_length: int = 0,
) -> Tensor:
    """What is trained on instead of the environment's own rewards. Everything is off by default.

        r_t  -  kl_coef k1_t                   on every trainable token: a leash to the reference
             -  turn_penalty                   on the last sampled token of each turn: be brief
             -  format_penalty                 there too, in turns that could not be parsed
             +  overlong_penalty(length)       on the trajectory's last trainable token

    Coefficients are positive; the signs are here. Length counts trainable tokens, since what the
    environment says at length is not the agent's fault. Shaped rewards are an invitation to be
    gamed: judge a run by the raw returns, which is what gets logged.

    rewards        (B, T)  a turn's reward on its last sampled token
    kl             (B, T)  log pi_old - log pi_ref, kl_divergence's k1
    turn_ends      (B, T)  1 on each turn's last sampled token, from the rollout's record: a reward
                           of 0 ends a turn like any other, so boundaries can't be read off rewards
    format_errors  (B, T)  1 on that token where the turn broke the format
    result         (B, T)  a new tensor; outside the mask, the rewards as they came
    """
    shaped = rewards.clone() if rewards.is_floating_point() else rewards.float()
    costs = {
        "kl": (kl, kl_coef),
        "turn_ends": (turn_ends, turn_penalty),
        "format_errors": (format_errors, format_penalty),
    }
    for name, (where, coefficient) in costs.items():
        if coefficient and where is None:
            raise ValueError(f"a coefficient of {coefficient} needs the tensor `{name}`, got None")
        if coefficient:
            shaped = shaped - coefficient * keep(where, loss_mask)
    if overlong_buffer:
        inside = loss_mask != 0
        num_left = inside.flip(1).cumsum(1).flip(1)  # (B, T) trainable tokens from t to the end
        penalty = overlong_penalty(inside.sum(1), max_length, overlong_buffer)  # (B,)
        shaped = shaped + keep(penalty[:, None].to(shaped), inside & (num_left == 1))
    return shaped


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to max_length - buffer, then a straight line down to -1 at max_length, -1 beyond.
    (Yu et al. 2025, Eq. 13; its cache is our buffer.)   lengths (B,), returns (B,)"""
    if not 0 < buffer <= max_length:
        raise ValueError(f"expected 0 < buffer <= max_length, got {buffer} and {max_length}")
    return -((lengths - (max_length - buffer)) / buffer).clamp(0, 1)


# --- advantages: how much better than expected ---


def dead_groups(returns: Tensor, group_ids: Tensor) -> Tensor:
    """True for the trajectories whose group has nothing to teach: all its returns are equal.

    A group of one is dead too. Compared by max == min, because rounding leaves seven returns of 0.1
    with a standard deviation of 1e-17, and noise divided by noise is an advantage of ordinary size.

    returns    (B,)
    group_ids  (B,)  equal for the G trajectories of one task; any integers, in any order
    result     (B,)  bool
    """
    if returns.isnan().any():
        raise ValueError(f"got NaN in {returns}: leave trajectories that ended in an error out")
    is_dead = torch.ones_like(returns, dtype=torch.bool)
    for group in group_ids.unique():
        members = returns[group_ids == group]  # (G,)
        is_dead[group_ids == group] = members.max() == members.min()
    return is_dead


def grpo_advantages(returns: Tensor, group_ids: Tensor, scale_by_std: bool = True) -> Tensor:
    """The return above its group's mean, in units of the group's spread.  (Shao et al., Sec. 4.1.2)

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)        R: the G returns of i's task

    The other tries at the same task are the critic: what the task was worth is what they got. The
    paper doesn't say which std; ours is unbiased (G - 1), as in verl, TRL and OpenRLHF.
    `scale_by_std=False` is Dr. GRPO (Liu et al. 2025): dividing by the std weights a task more, the
    nearer its success rate is to 0 or 1. A dead group gets exactly 0; verl hands a group of one its
    raw return instead.

    returns, group_ids  (B,)  without trajectories that ended in an error: those are not zeros
    result              (B,)  one advantage for every trainable token of the trajectory
    """
    returns = returns if returns.is_floating_point() else returns.float()
    is_dead = dead_groups(returns, group_ids)
    advantages = torch.zeros_like(returns)
    for group in group_ids[~is_dead].unique():
        members = returns[group_ids == group]  # (G,)
        scale = members.std() + 1e-6 if scale_by_std else 1.0
        advantages[group_ids == group] = (members - members.mean()) / scale
    return advantages


def rloo_advantages(returns: Tensor, group_ids: Tensor) -> Tensor:
    """The return above the mean of the other trajectories of its group.  (Ahmadian et al. 2024)

        A_i = R_i - mean_{j != i} R_j  =  G / (G - 1) (R_i - mean(R))

    A baseline that leaves i out doesn't depend on i's actions, so the gradient stays unbiased. The
    paper also takes the KL into R and has no clip; here both are left to the caller.

    returns, group_ids  (B,)
    result              (B,)
    """
    centred = grpo_advantages(returns, group_ids, scale_by_std=False)
    sizes = (group_ids[:, None] == group_ids[None, :]).sum(1)  # (B,) G of each one's group
    return centred * sizes / (sizes - 1).clamp(min=1)


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the agent's own tokens.  (Schulman et al. 2015, Eq. 16)

        delta_i = r_i + gamma V_{i+1} - V_i             i counts trainable tokens only
        A_i     = delta_i + gamma lam A_{i+1}           returns_i = A_i + V_i

    To the agent, the last token of a turn and the first of its next one are neighbours: what lies
    between them is the environment's. So V_{i+1} is never read on an observation token, where no
    loss ever trained the critic (AgentGym-RL's code does), and a long observation discounts nothing
    (in OpenRLHF and slime, which scan all T tokens, fifty of them at lam 0.95 shrink the credit of
    earlier turns to a thirteenth). verl and AReaL do as we do.

    rewards           (B, T)  what lies outside the mask is not paid: put rewards on sampled tokens
    values            (B, T)  V before token t was chosen, that is, from the position before it
    loss_mask         (B, T)
    bootstrap_values  (B,)    V after the last token. 0 where the environment ended the episode, the
                              critic's value where a limit cut it: being cut off is not a failure
    result            (B, T), (B, T)  advantages, not whitened, and the critic's targets
    """
    inside = loss_mask != 0
    B, N = len(inside), int(inside.sum(1).max()) if inside.any() else 0
    # Push each row's trainable tokens to the left, in order. The scan then takes N steps, the most
    # tokens any trajectory has, not T, and rows that have fewer are filled up on the right.
    order = inside.int().argsort(dim=1, descending=True, stable=True)[:, :N]  # (B, N)
    is_token = inside.gather(1, order)  # (B, N), 0 on filling
    values = keep(values, inside)
    r, v = keep(rewards, inside).gather(1, order), values.gather(1, order)  # (B, N), (B, N)
    next_value = v.new_zeros(B) if bootstrap_values is None else bootstrap_values.to(v)  # (B,)
    next_advantage = v.new_zeros(B)
    columns = []
    for i in reversed(range(N)):
        advantage = r[:, i] + gamma * next_value - v[:, i] + gamma * lam * next_advantage
        # Filling comes first in a backward scan: there, both carries pass through unchanged.
        next_advantage = torch.where(is_token[:, i], advantage, next_advantage)
        next_value = torch.where(is_token[:, i], v[:, i], next_value)
        columns.append(next_advantage)
    scanned = torch.stack(columns[::-1], dim=1) if columns else v  # (B, N)
    advantages = keep(scanned.new_zeros(inside.shape).scatter(1, order, scanned), inside)  # (B, T)
    return advantages, advantages + values


def reinforce_plus_plus_advantages(
    rewards: Tensor, loss_mask: Tensor, gamma: float = 1.0
) -> Tensor:
    """Reward still to come, whitened over all trainable tokens of the batch.  (Hu et al. 2025)

        A_i = whiten( sum_{k >= i} gamma^(k-i) r_k )            i, k count trainable tokens only

    The baseline is the whole batch's, so it needs no groups and no critic, but a hard task looks
    like bad play. The reward to go is GAE with a critic that says 0 and lam 1. The paper's KL
    penalty goes into the rewards first: shape_rewards. For its "baseline" variant, whiten
    grpo_advantages(..., scale_by_std=False), spread over tokens.

    rewards, loss_mask  (B, T)
    result              (B, T)  0 outside the mask
    """
    rewards_to_go, _ = gae_advantages(rewards, torch.zeros_like(rewards), loss_mask, gamma, lam=1.0)
    return whiten(rewards_to_go, loss_mask)


# --- losses ---

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _check_aggregation(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {AGGREGATIONS}, got {aggregation!r}")


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """From a loss per token to one number: whose tokens weigh how much?

        token-mean               sum_it l_it / N          long trajectories weigh more (DAPO)
        seq-mean-token-mean      sum_it (l_it / n_i) / B  all weigh the same, so tokens of long
                                                          ones weigh less (GRPO as published)
        seq-mean-token-sum-norm  sum_it l_it / (B L)      L constant: no length bias (Dr. GRPO)

    N trainable tokens, n_i of them in trajectory i, B trajectories that have any. Where an update
    is split into micro-batches, `denominator` must be the N, B or B L of all of it, over all ranks;
    then the parts add up to the whole. The mean of the parts' own means is another number.

    denominator  loss_denominator, summed over the update; None: this batch's own
    """
    _check_aggregation(aggregation)
    if aggregation == "seq-mean-token-sum-norm" and denominator is None:
        raise ValueError(
            "seq-mean-token-sum-norm needs a denominator: the number of trajectories times a "
            "constant length, e.g. the token limit of an episode"
        )
    if aggregation != "seq-mean-token-mean":
        return masked_mean(per_token, loss_mask, denominator)
    num_tokens = (loss_mask != 0).sum(1)  # (B,)
    per_trajectory = keep(per_token, loss_mask).sum(1) / num_tokens.clamp(min=1)  # (B,)
    return masked_mean(per_trajectory, num_tokens > 0, denominator)


def loss_denominator(loss_mask: Tensor, aggregation: str, constant_length: int = 0) -> float:
    """What these trajectories add to the `denominator` of an update: N, B or B L above. Sum it over
    micro-batches and ranks. Trajectories without a trainable token, masked out or padding of the
    batch, are not counted."""
    _check_aggregation(aggregation)
    num_tokens = (loss_mask != 0).sum(1)  # (B,)
    if aggregation == "token-mean":
        return float(num_tokens.sum())
    num_trajectories = float((num_tokens > 0).sum())
    if aggregation == "seq-mean-token-mean":
        return num_trajectories
    if constant_length < 1:
        raise ValueError(f"{aggregation} needs a constant length >= 1, got {constant_length}")
    return num_trajectories * constant_length


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: str = "token-mean",
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate, negated, so that descent improves the policy.  (PPO, Eq. 7)

        rho_t = pi(x_t) / pi_old(x_t)                           (the paper's r_t, no reward)
        l_t   = - w_t min( rho_t A_t,  clip(rho_t, 1 - clip_low, 1 + clip_high) A_t )

    The min makes the clip one-sided. Once a token has moved far enough in the direction that its
    advantage asks for, pushing it further earns nothing and its gradient is 0; what has moved the
    wrong way is never let off. On fresh data rho is 1 and the gradient is REINFORCE's,
    - A grad log pi. `clip_high` above `clip_low` (DAPO: 0.28) lets rare tokens rise. Left out is
    dual-clip, a cap on the loss where A < 0 and rho is huge: masks, the clamp on log rho and
    gradient clipping have to do.

    logprobs      (B, T)  of the weights being trained; the only argument that gets a gradient
    old_logprobs  (B, T)  of this trainer's weights before the step's first update
    advantages    (B, T)  or (B,), one for all tokens of a trajectory
    loss_mask     (B, T)
    weights       (B, T)  w, for the sampler's mismatch; they leave the denominator alone
    denominator   see aggregate
    result        (), and token_stats over this call's tokens: put calls together by combine_stats
        approx_kl           mean of log pi_old - log pi, can be negative
        clip_fraction_low   share of tokens that the clip froze on their way down (A < 0) ...
        clip_fraction_high  ... and on their way up (A > 0)
        ratio_max           largest rho
    """
    log_ratio = keep(logprobs - old_logprobs.detach(), loss_mask)  # (B, T)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()  # all ones in a step's first update
    advantages = advantages.detach() if advantages.dim() == 2 else advantages.detach()[:, None]
    advantages = keep(advantages, loss_mask)  # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if weights is not None:
        per_token = per_token * keep(weights.detach(), loss_mask)
    stats = token_stats(
        loss_mask,
        approx_kl=-log_ratio,
        clip_fraction_low=(ratio < 1 - clip_low) & (advantages < 0),
        clip_fraction_high=(ratio > 1 + clip_high) & (advantages > 0),
        ratio_max=ratio,
    )
    return aggregate(per_token, loss_mask, aggregation, denominator), stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    clip: float | None = 0.2,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Half the squared error of the critic, clipped like the policy; mean over tokens.

        l_t = 1/2 max( (V_t - R_t)^2,  (clip(V_t, V_old - clip, V_old + clip) - R_t)^2 )

    The max is pessimistic: a value that went further than `clip` from where the step began gets no
    more pull, unless it went away from its target. Not in the PPO paper but in its authors' code
    (OpenAI baselines). verl, OpenRLHF and AgentGym-RL clip at 0.5; None means no clip.

    values      (B, T)  V, of the critic being trained; the only argument that gets a gradient
    old_values  (B, T)  before the step's first update
    returns     (B, T)  R, the second result of gae_advantages, never whitened
    result      (), and token_stats: value_clip_fraction, value_mean
    """
    values = keep(values, loss_mask)
    old_values, targets = keep(old_values.detach(), loss_mask), keep(returns.detach(), loss_mask)
    squared_error = (values - targets).square()  # (B, T)
    worst, is_clipped = squared_error, torch.zeros_like(loss_mask)
    if clip is not None:
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        clipped_error = (near_old - targets).square()
        worst, is_clipped = (
            torch.maximum(squared_error, clipped_error),
            clipped_error > squared_error,
        )
    stats = token_stats(loss_mask, value_clip_fraction=is_clipped, value_mean=values)
    return masked_mean(worst / 2, loss_mask, denominator), stats


def explained_variance(returns: Tensor, values: Tensor, loss_mask: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) over the mask: 1 is a perfect critic, 0 one that only knows the mean,
    below 0 one that does harm. None where the returns don't vary: there is nothing to explain."""
    inside = loss_mask != 0
    R, V = keep(returns, inside)[inside], keep(values, inside)[inside]  # (N,), (N,)
    if len(R) < 2 or R.max() == R.min():
        return None
    return 1 - float((R - V).var() / R.var())


def sft_loss(
    logprobs: Tensor, loss_mask: Tensor, denominator: float | Tensor | None = None
) -> Tensor:
    """Behaviour cloning: minus the mean log-probability of the expert's tokens, nothing else's.

    logprobs, loss_mask  (B, T)
    """
    return -masked_mean(logprobs, loss_mask, denominator)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Learn from pairs, a better trajectory and a worse one.  (Rafailov et al. 2023, Eq. 7)

        L = mean of  - log sigmoid( beta ( (chosen - ref_chosen) - (rejected - ref_rejected) ) )

    beta times log(pi / pi_ref) plays the reward's part: the loss says that the chosen one's should
    be higher, and the sigmoid lets go of pairs that are already far apart.

    all four  (B,)  log-probabilities of whole trajectories, summed over trainable tokens only
    """
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())  # (B,)
    return -F.logsigmoid(beta * margin).mean()


# --- distances between distributions ---


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """KL(pi || pi_ref) estimated on each sampled token.  (Schulman 2020, joschu.net/blog/kl-approx)

        x = log pi - log pi_ref        k1 = x        k2 = x^2 / 2        k3 = exp(-x) - 1 + x

    As values, sampled from pi: k1 and k3 are unbiased, k3 is never negative, k2 is biased. In a
    loss it is the expected gradient that counts, and only k2 has the one it promises:

        k1  0, since the mean of grad log pi is 0: never put it in a loss
        k2  grad KL(pi || pi_ref)
        k3  grad KL(pi_ref || pi): the other direction, which pulls hardest where pi has lost mass
            (GRPO's choice, and what AgentGym-RL's scripts use)

    k1 taken off the reward (shape_rewards) has k2's gradient. All of it assumes samples from pi: in
    a step's later updates they are pi_old's, and without a ratio in front the estimates are off.

    x is clamped to +-20, k3 to 10; beyond, the gradient is 0. Unbounded, one token that the model
    did not really choose gives a k3 of 1e19.

    logprobs, ref_logprobs  (B, T)
    result                  (B, T)  unmasked: feed it to aggregate or masked_mean
    """
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"estimator must be one of 'k1', 'k2', 'k3', got {estimator!r}")
    # There is no mask here, and none is needed: clamp's backward pass gives a plain 0 to whatever
    # is out of range, NaN included, so nothing multiplies a NaN that the caller masks.
    x = (logprobs - ref_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    return (torch.expm1(-x) + x).clamp(max=MAX_K3)  # expm1: exp(-x) - 1 without cancellation


@torch.no_grad()
def truncated_importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float = 2.0
) -> Tensor:
    """min( pi_old / mu, cap ) per token: policy_loss's `weights`.  (Yao et al. 2025, a blog post)

    mu is the sampler. vLLM and the trainer hold the same weights, but other kernels and roundings
    make slightly different distributions of them, and the gradient expects samples of pi_old. The
    cap trades a little bias for a bounded variance. Per token: a product over a long trajectory
    would be 0 or the cap, hardly ever between. Both log-probabilities must be those of the
    distribution sampled from: at its temperature, without top-p or top-k.

    old_logprobs      (B, T)  the trainer's, before the step's first update
    rollout_logprobs  (B, T)  the sampler's
    result            (B, T)  constants, without a gradient
    """
    log_weights = (old_logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_weights.exp().clamp(max=cap)


def mismatch_stats(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cap: float = 2.0
) -> dict[str, float]:
    """How far sampler and trainer disagree about the same weights; token_stats.

        mismatch_kl           KL(mu || pi_old), by k3: the tokens are mu's
        weight_clip_fraction  share of tokens whose weight hit the cap
        logprob_diff_mean     mean and
        logprob_diff_max      maximum of |log pi_old - log mu|

    Watch the mean from the first step: it is a property of the engine, not of learning. A jump
    after an update usually means that the sampler kept its old weights.
    """
    old_logprobs, mu = keep(old_logprobs, loss_mask), keep(rollout_logprobs, loss_mask)
    difference = (old_logprobs - mu).abs()  # (B, T)
    return token_stats(
        loss_mask,
        mismatch_kl=kl_divergence(mu, old_logprobs, "k3"),
        weight_clip_fraction=old_logprobs - mu > math.log(cap),
        logprob_diff_mean=difference,
        logprob_diff_max=difference,
    )


# --- evaluation ---


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k tries succeeds, from n >= k tries of which c did.  (Eq. 1)

        1 - C(n - c, k) / C(n, k)

    Averages over every choice of k of the n: unbiased, where 1 - (1 - c/n)^k is too low. Python's
    integers are exact, so unlike the paper we need no product that avoids overflow.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"expected 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)
