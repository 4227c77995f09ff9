"""Every formula against numbers to redo on paper, its gradient, and the bug it is known for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from algorithms import (
    aggregate,
    combine_stats,
    dead_groups,
    dpo_loss,
    explained_variance,
    gae_advantages,
    grpo_advantages,
    keep,
    kl_divergence,
    loss_denominator,
    masked_mean,
    mismatch_stats,
    overlong_penalty,
    pass_at_k,
    policy_loss,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    sft_loss,
    shape_rewards,
    truncated_importance_weights,
    value_loss,
    whiten,
)

NAN = float("nan")


def close(actual, expected, atol=2e-6):
    expected = torch.as_tensor(expected, dtype=torch.as_tensor(actual).dtype)
    torch.testing.assert_close(torch.as_tensor(actual), expected, atol=atol, rtol=1e-5)


# --- masks ---


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_what_is_masked_changes_neither_value_nor_gradient(dtype):  # BEHAVIOURS 19
    x = tensor([[1.0, NAN, 3.0]], requires_grad=True)
    mean = masked_mean(x, tensor([[1, 0, 1]]).to(dtype))
    mean.backward()
    close(mean, 2.0)
    close(x.grad, [[0.5, 0.0, 0.5]])


def test_an_empty_mask_gives_0_that_still_has_a_graph():
    x = tensor([[NAN, 1.0]], requires_grad=True)
    mean = masked_mean(x, torch.zeros(1, 2))
    mean.backward()
    assert mean.item() == 0 and x.grad.tolist() == [[0.0, 0.0]]


def test_whitened_values_have_mean_0_and_variance_1_over_the_mask_only():
    x, mask = tensor([[1.0, 2.0, 99.0], [3.0, NAN, NAN]]), tensor([[1, 1, 0], [1, 0, 0]])
    close(
        whiten(x, mask), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    )  # std of 1, 2, 3 is 1 (divided by N - 1)
    assert whiten(torch.full((1, 3), 0.1), torch.ones(1, 3)).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten(tensor([[5.0]]), torch.ones(1, 1)).tolist() == [[0.0]]


# --- advantages ---


def test_group_advantages_by_hand():
    returns, groups = tensor([1.0, 0, 0, 1, 0]), tensor([7, 7, 7, 7, 7])
    close(
        grpo_advantages(returns, groups),
        [1.095443, -0.730295, -0.730295, 1.095443, -0.730295],
        atol=1e-5,
    )
    close(grpo_advantages(returns, groups, scale_by_std=False), [0.6, -0.4, -0.4, 0.6, -0.4])
    close(rloo_advantages(returns, groups), [0.75, -0.5, -0.5, 0.75, -0.5])


def test_groups_may_be_unsorted_and_do_not_mix():
    returns, groups = tensor([1.0, 5.0, 0.0, 7.0]), tensor([3, -2, 3, -2])
    close(rloo_advantages(returns, groups), [1.0, -2.0, -1.0, 2.0])


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_a_constant_group_and_a_group_of_one_are_exactly_0(advantages):  # BEHAVIOURS 35
    seven = torch.full((7,), 0.1)  # whose mean in floating point is not 0.1, nor its deviation 0
    assert advantages(seven, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7
    assert advantages(tensor([3.0]), tensor([0])).tolist() == [0.0]
    assert dead_groups(tensor([0.1, 0.1, 1.0, 0.0, 2.0]), tensor([0, 0, 1, 1, 2])).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_scale_and_shift_of_rewards():
    returns, groups = tensor([0.3, 1.0, -2.0, 0.5]), tensor([0, 0, 0, 0])
    close(grpo_advantages(returns * 10, groups), grpo_advantages(returns, groups), atol=1e-4)
    close(rloo_advantages(returns + 5, groups), rloo_advantages(returns, groups), atol=1e-5)


VALUES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def two_turns(num_observed: int, value_there: float):
    """Three actions, an observation, three actions; reward 1 at the end: rewards, values, mask."""
    rewards = tensor([[0.0] * 3 + [0.0] * num_observed + [0.0, 0.0, 1.0]])
    values = tensor([VALUES[:3] + [value_there] * num_observed + VALUES[3:]])
    mask = tensor([[1] * 3 + [0] * num_observed + [1] * 3])
    return rewards, values, mask


@pytest.mark.parametrize("num_observed", [0, 1, 50])
@pytest.mark.parametrize("value_there", [0.0, 0.7, NAN])
def test_gae_does_not_see_observations(num_observed, value_there):  # BEHAVIOURS 11, 12, 13
    rewards, values, mask = two_turns(num_observed, value_there)
    inside = mask.bool()
    advantages, returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=0.95)
    close(advantages[inside], [0.76195, 0.69679, 0.6282, 0.556, 0.48, 0.4], atol=1e-5)
    close(returns[inside] - advantages[inside], VALUES)
    assert (advantages[~inside] == 0).all()
    advantages, _ = gae_advantages(rewards, values, mask, gamma=0.99, lam=0.95)
    close(advantages[inside], [0.721066, 0.662483, 0.601258, 0.537223, 0.4702, 0.4], atol=1e-5)


def test_gae_of_an_episode_cut_by_a_limit_goes_on_from_its_last_value():  # BEHAVIOURS 16
    rewards, values, mask = two_turns(2, 0.0)
    advantages, _ = gae_advantages(
        torch.zeros_like(rewards), values, mask, 0.99, 0.95, tensor([0.7])
    )
    close(
        advantages[mask.bool()],
        [0.495157, 0.422283, 0.345862, 0.265669, 0.181466, 0.093],
        atol=1e-5,
    )


def test_padding_changes_no_advantage():  # BEHAVIOURS 15
    rewards, values, mask = two_turns(2, 0.3)
    pad = lambda x, fill: torch.nn.functional.pad(x.float(), (0, 4), value=fill)
    plain, _ = gae_advantages(rewards, values, mask)
    padded, _ = gae_advantages(pad(rewards, NAN), pad(values, 9.0), pad(mask, 0))
    assert padded[:, :-4].equal(plain)


def test_reinforce_plus_plus_by_hand():  # BEHAVIOURS 10, 11
    mask = tensor([[1, 1, 0, 0, 1], [1, 0, 0, 0, 0]])
    rewards = tensor([[0.0, 0, 0, 0, 1], [0.0, 0, 0, 0, 0]])
    close(
        reinforce_plus_plus_advantages(rewards, mask), [[0.5, 0.5, 0, 0, 0.5], [-1.5, 0, 0, 0, 0]]
    )
    # gamma .9: returns .81 .9 1 | 0, mean .6775, deviation .458288
    close(
        reinforce_plus_plus_advantages(rewards, mask, gamma=0.9),
        [[0.289120, 0.485502, 0, 0, 0.703706], [-1.478328, 0, 0, 0, 0]],
        atol=1e-5,
    )


# --- losses ---


def test_the_clipped_loss_by_hand():
    ratio = tensor([[0.5, 0.9, 1.0, 1.25, 1.35, 5.0]])
    mask, old = torch.ones(1, 6), torch.zeros(1, 6)
    each = lambda advantage, high: [
        policy_loss(
            ratio[:, i : i + 1].log(), old[:, :1], tensor([[advantage]]), mask[:, :1], 0.2, high
        )[0].item()
        for i in range(6)
    ]
    close(each(1.0, 0.2), [-0.5, -0.9, -1.0, -1.2, -1.2, -1.2])
    close(each(1.0, 0.28), [-0.5, -0.9, -1.0, -1.25, -1.28, -1.28])
    close(each(-1.0, 0.2), [0.8, 0.9, 1.0, 1.25, 1.35, 5.0])  # what got worse is never let off


def test_the_clipped_losss_gradient_and_statistics():
    table = [  # ratio, advantage, mask, d loss / d logprob (times 3)
        (1.0, 2.0, 1, -2.0),
        (1.5, 1.0, 1, 0.0),  # its gain is capped
        (1.5, -1.0, 1, 1.5),
        (9.0, 9.0, 0, 0.0),
    ]
    ratio, advantages, mask, gradient = tensor(table).T[:, None]
    logprobs = ratio.log().requires_grad_()
    loss, stats = policy_loss(logprobs, torch.zeros(1, 4), advantages, mask)
    loss.backward()
    close(loss, -1.7 / 3)
    close(logprobs.grad, gradient / 3)
    assert stats["ratio_max"] == pytest.approx(1.5)
    assert stats["clip_fraction_high"] == pytest.approx(1 / 3) and stats["clip_fraction_low"] == 0
    assert stats["approx_kl"] == pytest.approx(-2 * math.log(1.5) / 3)


def test_on_fresh_data_the_gradient_is_reinforces():  # BEHAVIOURS 29
    logprobs = tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    advantages = tensor([[0.5, -2.0, 1.0]])
    loss, stats = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(1, 3))
    loss.backward()
    close(logprobs.grad, -advantages / 3)
    assert stats["ratio_max"] == 1 and stats["approx_kl"] == 0 and stats["clip_fraction_low"] == 0


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -float("inf"), 1e30])
def test_garbage_under_the_mask_is_inert_in_loss_and_gradient(garbage):  # BEHAVIOURS 18, 19
    logprobs = tensor([[-1.0, garbage]], requires_grad=True)
    loss, _ = policy_loss(
        logprobs,
        tensor([[-1.0, garbage]]),
        tensor([[1.0, garbage]]),
        tensor([[1, 0]]),
        weights=tensor([[1.0, garbage]]),
    )
    loss.backward()
    close(loss, -1.0)
    close(logprobs.grad, [[-1.0, 0.0]])


def test_a_huge_log_ratio_stays_finite():
    logprobs = tensor([[0.0]], requires_grad=True)
    loss, stats = policy_loss(logprobs, tensor([[-500.0]]), tensor([[-1.0]]), torch.ones(1, 1))
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(logprobs.grad).all()
    assert stats["ratio_max"] == pytest.approx(math.exp(20), rel=1e-4)


LOSSES, LOSS_MASK = tensor([[1.0, 1, 1, 1], [6.0, 0, 0, 0]]), tensor([[1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("aggregation", "length", "expected"),
    [
        ("token-mean", 0, 2.0),
        ("seq-mean-token-mean", 0, 3.5),
        ("seq-mean-token-sum-norm", 8, 0.625),
    ],
)
def test_each_aggregation_by_hand_whole_and_in_micro_batches(
    aggregation, length, expected
):  # BEHAVIOURS 33, 37
    total = loss_denominator(LOSS_MASK, aggregation, length)
    close(aggregate(LOSSES, LOSS_MASK, aggregation, total), expected)
    parts = [
        aggregate(LOSSES[i : i + 1], LOSS_MASK[i : i + 1], aggregation, total) for i in range(2)
    ]
    close(sum(parts), expected)


def test_the_mean_of_micro_batch_means_is_another_number():
    halves = [aggregate(LOSSES[i : i + 1], LOSS_MASK[i : i + 1]) for i in range(2)]
    close(sum(halves) / 2, 3.5)  # the classic bug: token-mean is 2.0


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(LOSSES, LOSS_MASK, "mean")
    with pytest.raises(ValueError, match="denominator"):
        aggregate(LOSSES, LOSS_MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="k1"):
        kl_divergence(LOSSES, LOSSES, "k4")


def test_the_value_loss_by_hand():
    values, targets = tensor([[0.9, 0.2, 0.5]]), tensor([[1.0, 1.0, 0.0]])
    each = [
        value_loss(values[:, i : i + 1], tensor([[0.5]]), targets[:, i : i + 1], torch.ones(1, 1))[
            0
        ].item()
        for i in range(3)
    ]
    close(each, [0.045, 0.32, 0.125])
    assert explained_variance(targets, targets, torch.ones(1, 3)) == 1.0
    assert explained_variance(targets, torch.full((1, 3), 0.4), torch.ones(1, 3)) == pytest.approx(
        0.0, abs=1e-6
    )
    assert explained_variance(torch.ones(1, 3), values, torch.ones(1, 3)) is None


def test_sft_and_dpo_by_hand():
    close(sft_loss(tensor([[-1.0, -3.0, NAN]]), tensor([[1, 1, 0]])), 2.0)
    # log sigmoid(0) = -log 2; a margin of 10 at beta .1 is sigmoid(1)
    close(dpo_loss(tensor([0.0]), tensor([0.0]), tensor([0.0]), tensor([0.0])), math.log(2))
    close(dpo_loss(tensor([4.0]), tensor([-6.0]), tensor([0.0]), tensor([0.0])), 0.313262)


# --- distances ---


def test_kl_estimators_by_hand():
    x = tensor([[-1.0, -0.1, 0.0, 0.1, 1.0]])
    close(kl_divergence(x, torch.zeros(1, 5), "k1"), x)
    close(kl_divergence(x, torch.zeros(1, 5), "k2"), [[0.5, 0.005, 0.0, 0.005, 0.5]])
    close(
        kl_divergence(x, torch.zeros(1, 5), "k3"), [[0.718282, 0.005171, 0.0, 0.004837, 0.367879]]
    )
    assert kl_divergence(tensor([[-60.0]]), tensor([[0.0]]), "k3").item() == 10.0  # not 1e26


def test_expected_gradients_on_a_policy_of_two_tokens():  # BEHAVIOURS 38
    """pi = (.8, .2), ref = (.5, .5), logits as parameters: sum over x of pi(x) grad k(x)."""
    reference = tensor([0.5, 0.5]).log()

    def expected_gradient(estimator: str) -> torch.Tensor:
        logits = tensor([0.8, 0.2]).log().requires_grad_()
        logprobs = logits.log_softmax(0)
        (
            logprobs.detach().exp() * kl_divergence(logprobs[None], reference[None], estimator)[0]
        ).sum().backward()
        return logits.grad

    # KL = sum p log(p/q); dKL/dz_1 = p1 p2 (log p1/q1 - log p2/q2) = .16 log 4; reverse: p1 - q1
    close(expected_gradient("k1"), [0.0, 0.0])
    close(expected_gradient("k2"), [0.221807, -0.221807])
    close(expected_gradient("k3"), [0.3, -0.3])


def test_importance_weights_are_capped_from_above_only():  # BEHAVIOURS 26, 27
    log_w = tensor([[-3.0, -0.1, 0.0, 0.5, 1.5]])
    close(
        truncated_importance_weights(log_w, torch.zeros(1, 5)),
        [[0.049787, 0.904837, 1.0, 1.648721, 2.0]],
    )
    stats = mismatch_stats(log_w, torch.zeros(1, 5), torch.ones(1, 5))
    assert stats["weight_clip_fraction"] == pytest.approx(0.2)
    assert stats["logprob_diff_mean"] == pytest.approx(1.02) and stats["logprob_diff_max"] == 3.0


def test_statistics_of_parts_combine_to_those_of_the_whole():
    parts = [
        {"num_tokens": 1.0, "x": 4.0, "x_max": 4.0},
        {"num_tokens": 3.0, "x": 0.0, "x_max": 9.0},
    ]
    assert combine_stats(parts) == {"num_tokens": 4.0, "x": 1.0, "x_max": 9.0}


# --- shaping, pass@k ---


def test_shaping_is_off_by_default_and_each_term_lands_where_it_should():
    rewards, mask = tensor([[0.0, 0, 1, 0]]), tensor([[1, 1, 1, 0]])
    ends, broken = tensor([[0.0, 1, 1, 0]]), tensor([[0.0, 1, 0, 0]])
    assert shape_rewards(rewards, mask).equal(rewards)
    close(shape_rewards(rewards, mask, turn_ends=ends, turn_penalty=0.1), [[0, -0.1, 0.9, 0]])
    close(shape_rewards(rewards, mask, format_errors=broken, format_penalty=0.5), [[0, -0.5, 1, 0]])
    close(
        shape_rewards(rewards, mask, kl=tensor([[1.0, 2, 3, NAN]]), kl_coef=0.1),
        [[-0.1, -0.2, 0.7, 0]],
    )
    close(shape_rewards(rewards, mask, overlong_buffer=2, max_length=4), [[0, 0, 0.5, 0]])
    with pytest.raises(ValueError, match="turn_ends"):
        shape_rewards(rewards, mask, turn_penalty=0.1)


def test_turns_come_from_the_record_so_zero_rewards_train_too():  # BEHAVIOURS 14
    shaped = shape_rewards(
        torch.zeros(1, 3), torch.ones(1, 3), turn_ends=tensor([[0.0, 1, 1]]), turn_penalty=1.0
    )
    assert shaped.tolist() == [[0.0, -1.0, -1.0]]


def test_the_overlong_penalty_by_hand():
    close(overlong_penalty(tensor([50, 80, 85, 100, 101]), 100, 20), [0.0, 0.0, -0.25, -1.0, -1.0])


def test_pass_at_k_by_hand():
    assert [pass_at_k(8, 2, k) for k in (1, 2, 4, 8)] == pytest.approx(
        [0.25, 0.464286, 0.785714, 1.0], abs=1e-6
    )
    assert pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 4, 1) == 1
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(2, 1, 3)


# --- the bugs these formulas are known for: each control must give another number ---


def test_masking_after_the_arithmetic_leaks_nan_into_the_gradient_and_ours_does_not():
    # BEHAVIOURS 19. exp(100) is inf in float32, and autograd multiplies it by the mask's 0.
    mask = tensor([[True, False]])
    x = tensor([[1.0, 100.0]], requires_grad=True)
    torch.where(mask, x.exp(), 0.0).sum().backward()
    assert x.grad[0, 1].isnan()  # the control: value fine, gradient NaN
    x = tensor([[1.0, 100.0]], requires_grad=True)
    keep(x, mask).exp().sum().backward()
    assert x.grad[0, 1].item() == 0.0
    assert (tensor([[1.0, NAN]]) * mask).isnan().any()  # and `x * mask` fails in value already


def test_seven_equal_rewards_have_a_deviation_and_still_no_advantage():  # BEHAVIOURS 35
    seven = torch.full((7,), 0.1, dtype=torch.float64)
    assert 0 < seven.std().item() < 1e-15  # the control: `if std == 0` would not notice
    assert grpo_advantages(seven, torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7
    mixed = grpo_advantages(tensor([0.1, 0.1, 0.0, 1.0]), tensor([4, 4, 9, 9]))
    assert mixed[:2].tolist() == [0.0, 0.0] and mixed[3] > 0.7


def test_scanning_over_observations_gives_another_advantage():  # BEHAVIOURS 12, 13
    rewards, values, mask = two_turns(50, 0.0)
    everything, _ = gae_advantages(rewards, values, torch.ones_like(mask), 1.0, 0.95)
    # .4 + .95 x .556 on the last observation, x .95^49 = .07518 on the first; then -.3 + .95 of it
    close(everything[mask.bool()][:3], [-0.0113, -0.1172, -0.2286], atol=1e-4)
    agent_only, _ = gae_advantages(rewards, values, mask, 1.0, 0.95)
    close(agent_only[mask.bool()][:3], [0.76195, 0.69679, 0.6282], atol=1e-5)


def test_with_gamma_and_lambda_1_the_advantage_is_the_return_minus_the_value():
    rewards, values, mask = two_turns(3, 0.7)
    advantages, returns = gae_advantages(rewards, values, mask)
    close(advantages[mask.bool()], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    close(returns, mask.float())


def test_the_paid_reward_reaches_every_token_of_the_trajectory():  # BEHAVIOURS 10
    # One reward per turn: what is still to come is 3, 3 | 2 before whitening, in any estimator.
    rewards, mask = tensor([[0.0, 1.0, 0.0, 2.0]]), tensor([[1, 1, 0, 1]])
    _, returns = gae_advantages(rewards, torch.zeros(1, 4), mask)
    close(returns, [[3.0, 3.0, 0.0, 2.0]])
    # The bug: a reward on the closing observation is paid to nobody, so rollout.py puts none there.
    _, lost = gae_advantages(tensor([[0.0, 0.0, 3.0, 0.0]]), torch.zeros(1, 4), mask)
    assert lost.abs().sum() == 0


def test_the_baseline_variant_of_reinforce_plus_plus_is_grpo_without_std_then_whitened():
    # two groups with returns 1 0 | 1 1, and 2 1 3 2 tokens: .5 .5 -.5 0 0 0 0 0, mean 1/16
    mask = tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    per_trajectory = grpo_advantages(tensor([1.0, 0, 1, 1]), tensor([0, 0, 1, 1]), False)
    whitened = whiten(per_trajectory[:, None].expand(4, 3), mask)
    close(whitened[:, 0], [1.365332, -1.755426, -0.195047, -0.195047])
    assert whitened[mask == 0].tolist() == [0.0] * 4


def test_a_value_that_runs_ahead_is_not_pulled_on_and_one_that_ran_away_is_pulled_back():
    values = tensor([[0.9, 0.2, 0.6]], requires_grad=True)  # was 0.5 everywhere; clip 0.2
    loss, stats = value_loss(values, torch.full((1, 3), 0.5), torch.ones(1, 3), torch.ones(1, 3))
    loss.backward()
    close(values.grad, [[0.0, -0.8 / 3, -0.4 / 3]])
    close(stats["value_clip_fraction"], 1 / 3)
    close(stats["value_mean"], 1.7 / 3)
    loss, stats = value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3), None)
    close(loss, (0.01 + 0.64 + 0.16) / 6)
    assert stats["value_clip_fraction"] == 0


def test_kl_in_the_reward_has_the_gradient_of_kl():  # BEHAVIOURS 38
    """pi = (.75, .25), ref = (.5, .5): each token a trajectory, weighted by its probability.
    dKL/dz_1 = p1 p2 (log p1/q1 - log p2/q2) = .1875 log 3 = .20599"""
    logits = tensor([0.75, 0.25]).log().requires_grad_()
    logprobs = logits.log_softmax(0)[:, None]  # (2, 1)
    mask = torch.ones(2, 1)
    k1 = kl_divergence(logprobs.detach(), torch.full((2, 1), 0.5).log(), "k1")
    shaped = shape_rewards(torch.zeros(2, 1), mask, kl=k1, kl_coef=1.0)
    loss, _ = policy_loss(
        logprobs, logprobs, shaped, mask, weights=logprobs.detach().exp(), denominator=1
    )
    loss.backward()
    close(logits.grad, [0.205990, -0.205990])


def test_the_clamp_on_k3_ends_its_gradient_too():
    logprobs = tensor([[-50.0, -1.0]], requires_grad=True)
    kl_divergence(logprobs, tensor([[0.0, 0.0]])).sum().backward()
    close(logprobs.grad, [[0.0, 1 - math.e]])


def test_dpo_pulls_a_pair_apart_less_the_further_apart_it_is():
    chosen, rejected = tensor([0.0, 40.0]).requires_grad_(), torch.zeros(2).requires_grad_()
    dpo_loss(chosen, rejected, torch.zeros(2), torch.zeros(2)).backward()
    # - beta sigmoid(-beta margin) / 2 pairs: .05 * .5 and .05 * .017986
    close(chosen.grad, [-0.025, -0.000899])
    close(rejected.grad, [0.025, 0.000899])


def test_weights_multiply_the_loss_and_leave_the_denominator():
    ones = torch.ones(1, 2)
    loss, _ = policy_loss(-ones, -ones, ones, ones, weights=tensor([[2.0, 0.5]]))
    close(loss, -(2.0 + 0.5) / 2)  # not / 2.5


def test_a_masked_out_trajectory_leaves_every_denominator():  # BEHAVIOURS 23, 34
    mask = torch.cat([LOSS_MASK, torch.zeros(1, 4)])
    losses = torch.cat([LOSSES, torch.full((1, 4), NAN)])
    for aggregation, length, total in [
        ("token-mean", 0, 5.0),
        ("seq-mean-token-mean", 0, 2.0),
        ("seq-mean-token-sum-norm", 8, 16.0),
    ]:
        assert loss_denominator(mask, aggregation, length) == total
        assert aggregate(losses, mask, aggregation, total).equal(
            aggregate(LOSSES, LOSS_MASK, aggregation, total)
        )
    close(aggregate(losses, mask, "seq-mean-token-mean"), 3.5)  # 2 trajectories, not 3
    with pytest.raises(ValueError, match="constant length"):
        loss_denominator(mask, "seq-mean-token-sum-norm")


def test_one_advantage_per_trajectory_spreads_over_its_tokens():
    logprobs = torch.zeros(2, 2)  # B = T, where plain broadcasting would take the wrong axis
    loss, _ = policy_loss(logprobs, logprobs, tensor([1.0, 10.0]), tensor([[1, 1], [0, 1]]))
    close(loss, -(1.0 + 1.0 + 10.0) / 3)


def test_only_logprobs_get_a_gradient():
    tensors = [torch.full((1, 2), -0.1, requires_grad=True) for _ in range(4)]
    logprobs, old, advantages, weights = tensors
    policy_loss(logprobs, old, advantages, torch.ones(1, 2), weights=weights)[0].backward()
    assert [x.grad is None for x in tensors] == [False, True, True, True]
    assert not truncated_importance_weights(logprobs, old).requires_grad


def test_an_errored_trajectory_must_be_left_out_not_passed_as_nan():
    with pytest.raises(ValueError, match="error"):
        grpo_advantages(tensor([1.0, NAN]), tensor([0, 0]))


# --- what must not matter ---


def losses_of(batch: dict, rows=slice(None), totals: tuple = (None, None, None)) -> list:
    """Every loss of some rows of a batch: [(loss, stats or None)], divided by the given totals."""
    part = {name: x[rows] for name, x in batch.items()}
    mask = part["loss_mask"]
    tokens, trajectories, constant = totals
    arguments = (part["logprobs"], part["old_logprobs"], part["advantages"], mask)
    kl = kl_divergence(part["logprobs"], part["ref_logprobs"])
    return [
        policy_loss(*arguments, weights=part["weights"], denominator=tokens),
        policy_loss(*arguments, aggregation="seq-mean-token-mean", denominator=trajectories),
        policy_loss(
            *arguments, aggregation="seq-mean-token-sum-norm", denominator=constant or 40.0
        ),
        value_loss(part["values"], part["old_values"], part["returns"], mask, denominator=tokens),
        (sft_loss(part["logprobs"], mask, tokens), None),
        (masked_mean(kl, mask, tokens), None),
    ]


FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights")
FIELDS += ("values", "old_values", "returns")


def random_batch(seed: int, B: int = 5, T: int = 7) -> dict:
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.randn(B, T, generator=generator, dtype=torch.float64) for name in FIELDS}
    batch["loss_mask"] = (torch.rand(B, T, generator=generator) < 0.6).long()
    batch["loss_mask"][0] = 0  # a trajectory with nothing to train on
    return batch


def gradients_of(batch: dict, **split) -> tuple[list, list]:
    """Values of all losses, and the gradients of their sum for logprobs and values."""
    leaves = {name: batch[name].clone().requires_grad_() for name in ("logprobs", "values")}
    results = losses_of({**batch, **leaves}, **split)
    sum(loss for loss, _ in results).backward()
    return [loss.detach() for loss, _ in results], [leaf.grad for leaf in leaves.values()]


@given(st.integers(0, 10**6), st.sampled_from([NAN, math.inf, -math.inf, 1e30]))
@settings(deadline=None, max_examples=25)
def test_garbage_under_the_mask_changes_no_loss_and_no_gradient(seed, garbage):
    # BEHAVIOURS 18, 19
    clean = random_batch(seed)
    outside = clean["loss_mask"] == 0
    dirty = {name: clean[name].masked_fill(outside, garbage) for name in FIELDS}
    dirty["loss_mask"] = clean["loss_mask"]
    values, gradients = gradients_of(clean)
    dirty_values, dirty_gradients = gradients_of(dirty)
    for a, b in zip(values + gradients, dirty_values + dirty_gradients, strict=True):
        assert a.equal(b)
    assert all((gradient[outside] == 0).all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long, torch.float32])
def test_the_dtype_of_the_mask_does_not_matter(dtype):
    batch = random_batch(1)
    values, gradients = gradients_of(batch)
    other_values, other_gradients = gradients_of(
        {**batch, "loss_mask": batch["loss_mask"].to(dtype)}
    )
    for a, b in zip(values + gradients, other_values + other_gradients, strict=True):
        assert a.equal(b)
    mask, rewards = batch["loss_mask"], batch["returns"]
    for estimate in (
        lambda m: gae_advantages(rewards, batch["values"], m, 0.9, 0.8)[0],
        lambda m: reinforce_plus_plus_advantages(rewards, m, 0.9),
        lambda m: shape_rewards(rewards, m, overlong_buffer=3, max_length=5),
    ):
        assert estimate(mask).equal(estimate(mask.to(dtype)))


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_micro_batches_divided_by_the_updates_totals_add_up_to_the_whole(seed, size):
    # BEHAVIOURS 33, 37
    batch = random_batch(seed)
    mask = batch["loss_mask"]
    totals = (
        loss_denominator(mask, "token-mean"),
        loss_denominator(mask, "seq-mean-token-mean"),
        loss_denominator(mask, "seq-mean-token-sum-norm", 8),
    )
    values, gradients = gradients_of(batch, totals=totals)
    parts = [
        gradients_of(batch, rows=slice(start, start + size), totals=totals)
        for start in range(0, 5, size)
    ]
    for whole, *pieces in zip(values, *(part[0] for part in parts), strict=True):
        torch.testing.assert_close(sum(pieces), whole)
    for whole, *pieces in zip(gradients, *(part[1] for part in parts), strict=True):
        torch.testing.assert_close(sum(pieces), whole)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_statistics_of_micro_batches_combine_to_those_of_the_whole_batch(seed):
    batch = random_batch(seed)
    for i in range(4):  # the losses that have statistics
        whole = losses_of(batch)[i][1]
        parts = [losses_of(batch, slice(start, start + 2))[i][1] for start in range(0, 5, 2)]
        assert combine_stats(parts) == pytest.approx(whole)
        assert list(combine_stats(parts)) == ["num_tokens", *list(whole)[:-1]]  # a stable order


def test_a_batch_without_a_single_trainable_token_trains_nothing_and_breaks_nothing():
    # BEHAVIOURS 19, 50
    batch = random_batch(3)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for totals in [(None, None, None), (9.0, 3.0, 40.0), (0.0, 0.0, 0.0)]:
        values, gradients = gradients_of(batch, totals=totals)
        assert [value.item() for value in values] == [0.0] * 6
        assert all((gradient == 0).all() for gradient in gradients)
    assert losses_of(batch)[0][1] == {
        "approx_kl": 0.0,
        "clip_fraction_low": 0.0,
        "clip_fraction_high": 0.0,
        "ratio_max": 0.0,
        "num_tokens": 0.0,
    }
    rewards, mask = batch["returns"], batch["loss_mask"]
    for advantages in (
        *gae_advantages(rewards, batch["values"], mask, bootstrap_values=torch.ones(5)),
        reinforce_plus_plus_advantages(rewards, mask),
        whiten(rewards, mask),
    ):
        assert advantages.shape == (5, 7) and (advantages == 0).all()
    assert shape_rewards(rewards, mask, overlong_buffer=1, max_length=1).equal(rewards)
    assert explained_variance(rewards, rewards, mask) is None


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_the_order_of_the_batch_does_not_matter(seed):
    batch = random_batch(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    mask, rewards, values = batch["loss_mask"], batch["returns"], batch["values"]
    returns, groups = rewards[:, 0], tensor([2, 0, 2, 0, 2])
    for estimate in (
        lambda rows: gae_advantages(rewards[rows], values[rows], mask[rows], 0.9, 0.8)[0],
        lambda rows: reinforce_plus_plus_advantages(rewards[rows], mask[rows], 0.9),
        lambda rows: grpo_advantages(returns[rows], groups[rows]),
        lambda rows: rloo_advantages(returns[rows], groups[rows]),
    ):
        torch.testing.assert_close(estimate(order), estimate(torch.arange(5))[order])
    torch.testing.assert_close(
        [loss for loss, _ in losses_of(batch, order)], [loss for loss, _ in losses_of(batch)]
    )


def slow_gae(rewards, values, mask, gamma, lam, bootstrap_values):
    """The definition, one trajectory and one token at a time."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        next_value, next_advantage = bootstrap_values[row], 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            advantages[row, t] = next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, t]
    return advantages


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_the_compacted_scan_is_gae_by_definition(seed, gamma, lam):
    batch = random_batch(seed)
    rewards, values, mask = batch["returns"], batch["values"], batch["loss_mask"]
    bootstrap = batch["weights"][:, 0]
    advantages, returns = gae_advantages(rewards, values, mask, gamma, lam, bootstrap)
    expected = slow_gae(rewards, values, mask, gamma, lam, bootstrap)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, keep(advantages + values, mask))


def test_scaling_rewards_leaves_reinforce_plus_plus_alone():
    batch = random_batch(4)
    rewards, mask = batch["returns"], batch["loss_mask"]
    torch.testing.assert_close(
        reinforce_plus_plus_advantages(rewards * 1000, mask),
        reinforce_plus_plus_advantages(rewards, mask),
        rtol=1e-6,
        atol=1e-6,
    )


def test_functions_leave_their_arguments_alone():
    batch = random_batch(6)
    before = {name: x.clone() for name, x in batch.items()}
    losses_of(batch)
    mask, rewards = batch["loss_mask"], batch["returns"]
    gae_advantages(rewards, batch["values"], mask)
    shape_rewards(rewards, mask, kl=batch["weights"], kl_coef=1.0, overlong_buffer=1, max_length=2)
    whiten(rewards, mask), grpo_advantages(rewards[:, 0], torch.zeros(5, dtype=torch.long))
    assert all(batch[name].equal(before[name]) for name in batch)
    assert shape_rewards(rewards, mask) is not rewards


def test_whole_numbers_and_mixed_precision_are_accepted():
    close(grpo_advantages(tensor([1, 0]), tensor([0, 0]), False), [0.5, -0.5])
    rewards, mask = tensor([[0, 0, 1]]), torch.ones(1, 3)
    close(gae_advantages(rewards, torch.zeros(1, 3), mask, 0.5)[0], [[0.25, 0.5, 1.0]])
    close(reinforce_plus_plus_advantages(rewards, mask), torch.zeros(1, 3))
    assert gae_advantages(rewards.double(), torch.zeros(1, 3), mask)[0].dtype == torch.float64


def test_terms_of_shaped_rewards_add_up_and_stay_on_sampled_tokens():  # BEHAVIOURS 18
    everywhere = torch.ones(2, 4)
    shaped = shape_rewards(
        torch.zeros(2, 4),
        tensor([[0, 1, 0, 1], [0, 0, 0, 0]]),
        kl=everywhere,
        kl_coef=0.1,
        turn_ends=everywhere,
        turn_penalty=0.02,
        format_errors=everywhere,
        format_penalty=0.003,
        overlong_buffer=2,
        max_length=2,
    )
    close(shaped, [[0, -0.123, 0, -1.123], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="0 < buffer <= max_length"):
        shape_rewards(torch.zeros(1, 1), torch.ones(1, 1), overlong_buffer=5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
def test_a_masked_kl_sends_no_garbage_into_the_gradient_and_an_unmasked_nan_shows(
    estimator, garbage
):  # BEHAVIOURS 18, 19
    logprobs = tensor([[-1.0, garbage]], requires_grad=True)
    kl = kl_divergence(logprobs, tensor([[-2.0, -1.0]]), estimator)
    assert kl[0, 1].isnan().item() == math.isnan(garbage)
    masked_mean(kl, tensor([[1, 0]])).backward()
    assert logprobs.grad[0, 1].item() == 0 and logprobs.grad[0, 0].item() > 0.6
