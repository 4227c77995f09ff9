"""Every formula against numbers that can be redone on paper, its gradient, and the bug it is known for."""

import math

import pytest
import torch
from torch import tensor

from algorithms import (
    aggregate,
    combine_stats,
    dead_groups,
    dpo_loss,
    explained_variance,
    gae_advantages,
    grpo_advantages,
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
    """pi = (.8, .2), ref = (.5, .5), logits as parameters: sum_x pi(x) grad k(x), token by token."""
    reference = tensor([0.5, 0.5]).log()

    def expected_gradient(estimator: str) -> torch.Tensor:
        logits = tensor([0.8, 0.2]).log().requires_grad_()
        logprobs = logits.log_softmax(0)
        (
            logprobs.detach().exp() * kl_divergence(logprobs[None], reference[None], estimator)[0]
        ).sum().backward()
        return logits.grad

    # KL = sum p log(p/q); dKL/dz_1 = p1 p2 (log p1/q1 - log p2/q2) = .16 log 4;  reverse: p1 - q1 = .3
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
