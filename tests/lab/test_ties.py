"""The divergence audit on planted logits of every class, and on a decode loop whose rollback is broken."""

import math

import mlx.core as mx
import numpy as np
import pytest

from decode import verify
from decode.lab import ties

V = 11
PLAIN, OTHER, THIRD = 3, 7, 5


def logits(plain, other, third=-30.0, dtype=mx.float32):
    """A row [V] that is −40 everywhere else."""
    row = [-40.0] * V
    row[PLAIN], row[OTHER], row[THIRD] = plain, other, third
    return mx.array(row, dtype)


@pytest.mark.parametrize("dtype, numpy_dtype", [(mx.float32, np.float32), (mx.float16, np.float16)])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 1.5, 2.0, 15.99, 16.0, 1e-3, 6e-8])
def test_ulp_is_the_distance_to_the_next_value(dtype, numpy_dtype, magnitude):
    stored = numpy_dtype(magnitude)
    assert verify.ulp(float(stored), dtype) == float(np.spacing(stored))


@pytest.mark.parametrize("magnitude, expected", [(1.0, 2**-7), (1.99, 2**-7), (20.0, 2**-3), (32.0, 2**-2)])
def test_ulp_of_bfloat16_has_seven_fraction_bits(magnitude, expected):
    assert verify.ulp(magnitude, mx.bfloat16) == expected


ULP = {mx.bfloat16: 2**-3, mx.float16: 2**-6, mx.float32: 2**-19}  # at 20
# (plain's and the other's logit above 20 in narrow, the same in wide, both in ULPs; a third's logit) -> class
JUDGED = {
    "exact, broken differently by the two widths": ((0, 0), (0, 0), -30, "tie"),
    "one ULP in narrow": ((1, 0), (0, 2), -30, "tie"),
    "one ULP in wide only": ((2, 0), (0, 1), -30, "tie"),
    "two ULPs, each width its own token": ((2, 0), (0, 2), -30, "width_sensitive"),
    "several ULPs, each width its own token": ((7, 0), (0, 5), -30, "width_sensitive"),
    "both widths say plain": ((4, 0), (4, 0), -30, "defect"),
    "both widths say the other": ((0, 4), (0, 4), -30, "defect"),
    "crossed": ((0, 4), (4, 0), -30, "defect"),
    "a clear preference, and a wrong token": ((900, 0), (900, 0), -30, "defect"),
    # the two are one ULP apart, but both lose to a third: no tie can have emitted either
    "a tie below the best": ((1, 0), (0, 1), 25, "defect"),
}


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("name", JUDGED)
def test_planted_logits_fall_in_their_class(name, dtype):
    narrow, wide, third, kind = JUDGED[name]
    rows = [logits(20 + a * ULP[dtype], 20 + b * ULP[dtype], third, dtype=dtype) for a, b in (narrow, wide)]
    found = ties.judge(*rows, PLAIN, OTHER)
    assert found.kind == kind
    if max(*narrow, *wide) < 96:  # still below 32, where a ULP is as large as at 20
        assert found.gap_ulps == (abs(narrow[0] - narrow[1]), abs(wide[0] - wide[1]))


def test_a_third_token_of_the_wide_route_is_a_defect():
    assert ties.judge(logits(20.5, 20), logits(20, 20.5, third=25), PLAIN, OTHER).kind == "defect"


BF = mx.bfloat16


def test_the_judgement_reports_logits_and_gaps_narrow_first():
    found = ties.judge(logits(20.25, 20, dtype=BF), logits(20, 20.5, dtype=BF), PLAIN, OTHER)
    assert found.logits == ((20.25, 20.0), (20.0, 20.5))
    assert found.gap_ulps == (2.0, 4.0)


@pytest.mark.parametrize(
    "plain, other, expected",
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)],
)
def test_first_divergence(plain, other, expected):
    assert ties.first_divergence(plain, other) == expected


def test_an_output_that_goes_on_past_the_other_is_a_defect():
    record = ties.audit(None, [1], [4, 5], [4, 5, 6], ties.Verify(1, (4, 5)))
    assert record["class"] == "defect" and "stops" in record["reason"]


def test_a_different_prefill_token_is_a_defect():
    assert ties.audit(None, [1], [4, 5], [6, 5], None)["class"] == "defect"


def test_repeats_that_diverge_alike_are_counted_once():
    one = {"prompt": "p", "position": 4, "tokens": [1, 2], "class": "tie"}
    records = [one, dict(one), {**one, "position": 9}, {**one, "prompt": "q", "class": "defect"}]
    assert ties.count(records) == {"tie": 2, "width_sensitive": 0, "defect": 1}


class Counting:
    """A target whose logits at a row depend on every row before it: the next token is the sum of all, modulo V."""

    def make_cache(self):
        return [Sum()]

    def forward(self, tokens, cache):
        return cache[0].feed(tokens)

    def score(self, hidden):
        return 4.0 * (mx.arange(V) == hidden[..., None] % V).astype(mx.float32)


class Sum:
    """The cache of a Counting target."""

    def __init__(self):
        self.state = mx.array(0)

    def feed(self, tokens):
        sums = self.state + mx.cumsum(tokens, axis=-1)
        self.state = sums[0, -1]
        return type("Forward", (), {"hidden": sums})


def decode(prompt, count, broken):
    """Speculate one proposal a cycle, always wrong, and take it back; `broken` leaves it in the cache.

    Returns the emitted tokens and every Verify with its logits.
    """
    target = Counting()
    cache = target.make_cache()
    pending = target.score(target.forward(mx.array([prompt]), cache).hidden)[0, -1].argmax().item()
    tokens, verifies = [pending], []
    while len(tokens) < count:
        before = cache[0].state
        rows = (tokens[-1], 2)
        found = target.score(target.forward(mx.array([rows]), cache).hidden)[0]
        verifies.append(ties.Verify(len(tokens), rows, found))
        tokens.append(found[0].argmax().item())
        if not broken:
            cache[0].state = before + rows[0]
    return tokens, verifies


def test_a_broken_rollback_is_a_defect_and_its_recorded_logits_show_it():
    prompt = [1, 2]
    plain, _ = decode(prompt, 6, broken=False)
    assert plain == [3, 6, 1, 2, 4, 8]  # 1+2, +3, +6, +1, +2, +4 modulo 11
    tokens, verifies = decode(prompt, 6, broken=True)
    position = ties.first_divergence(plain, tokens)
    verify = next(one for one in verifies if one.start == position)
    record = ties.audit(Counting(), prompt, plain, tokens, verify)
    assert record["class"] == "defect"
    assert record["logits"]["wide"][0] == 4.0  # afresh, the verify's own rows yield the plain token
    assert record["recorded_difference"] == pytest.approx(4.0)  # while decoding they did not


def test_a_sound_rollback_reproduces_its_recorded_logits():
    prompt = [1, 2]
    plain, verifies = decode(prompt, 6, broken=False)
    claimed = [*plain[:3], 9]  # a divergence that never was: what counts is the recorded difference
    record = ties.audit(Counting(), prompt, plain[:4], claimed, verifies[2])
    assert record["recorded_difference"] == 0.0 and not math.isnan(record["gap_ulps"]["wide"])
