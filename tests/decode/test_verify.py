"""Greedy acceptance against a loop over Python lists."""

import mlx.core as mx
import numpy as np
import pytest

from decode.verify import accept


def judged(rows, proposals):
    """(accepted, tokens, margins) by walking lists of logits; the first of equal logits wins, as in argmax."""
    tokens, margins = [], []
    for position, row in enumerate(rows):
        best = row.index(max(row))
        tokens.append(best)
        margins.append(row[best] - max(value for index, value in enumerate(row) if index != best))
        if position == len(proposals) or proposals[position] != best:
            break
    return len(tokens) - 1, tokens, margins


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_equals_a_walk_over_lists(dtype):
    draws = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        count, vocabulary = int(draws.integers(0, 7)), 5
        logits = mx.array(draws.normal(size=(count + 1, vocabulary))).astype(dtype)
        rows = logits.astype(mx.float32).tolist()
        right = [row.index(max(row)) for row in rows]
        proposals = [token if draws.random() < 0.7 else (token + 1) % vocabulary for token in right[:count]]
        verdict = accept(logits, proposals)
        accepted, tokens, margins = judged(rows, proposals)
        assert (verdict.accepted, list(verdict.tokens), verdict.next_token) == (accepted, tokens, tokens[-1])
        np.testing.assert_allclose(verdict.margins, margins, rtol=1e-6, atol=0)
        seen.add((count, accepted))
    assert len(seen) > 15  # all kinds of outcome came up


def test_a_right_proposal_after_a_wrong_one_is_not_accepted():
    logits = mx.eye(4)  # row i says token i
    verdict = accept(logits, [0, 3, 2])
    assert (verdict.accepted, verdict.tokens, verdict.next_token) == (1, (0, 1), 1)


def test_no_proposals_yield_the_next_token_alone():
    verdict = accept(mx.array([[0.5, 2.0, -1.0]]), ())
    assert (verdict.accepted, verdict.tokens, verdict.margins) == (0, (1,), (1.5,))


def test_equal_logits_are_a_margin_of_zero_and_the_first_wins():
    verdict = accept(mx.array([[1.0, 3.0, 3.0]]), ())
    assert (verdict.tokens, verdict.margins) == ((1,), (0.0,))


def test_proposals_may_be_an_array_that_nobody_has_evaluated():
    logits = mx.eye(3)
    assert accept(logits, mx.argmax(logits[:2], axis=-1)).accepted == 2


def test_a_count_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="3 verify rows for 1 proposals; expected 2"):
        accept(mx.eye(3), [0])
