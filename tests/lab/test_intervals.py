"""Coverage of every interval by simulation against truths worked out by hand, and rates against published values."""

import math

import numpy as np
import pytest

from decode.lab import intervals, statistics

SIMULATIONS = 2000
REPEATS = 4
SHAPE = 2.5  # of the gamma whose skewed draws are the prompts' log-speedups: skewness 2/√2.5 = 1.26
SCALE, SHIFT = 0.12, -0.1
SHARED, ALONE = 0.04, 0.03  # log noise of an arm's seconds: common to a prompt's repeats, and a repeat's own


def draw(rng, prompts):
    """(baseline [n,k], arm [n,k] seconds, tokens [n]) of one simulated run; effects are skewed, repeats correlated.

    The baseline takes one second a token. The arm's log-speedup is SHIFT + SCALE·gamma(SHAPE), one draw a prompt.
    """
    tokens = rng.integers(10, 129, prompts).astype(float)
    effect = SHIFT + SCALE * rng.gamma(SHAPE, size=prompts)
    noise = SHARED * rng.standard_normal((2, prompts, 1)) + ALONE * rng.standard_normal((2, prompts, REPEATS))
    base, arm = tokens[:, None] * np.exp(noise)
    return base, arm * np.exp(-effect)[:, None], tokens


# E[e^−g] of a gamma is (1 + SCALE)^−SHAPE; both arms' noise has the same mean, and lengths are independent of all.
TRUE_RATIO = (1 + SCALE) ** SHAPE * math.exp(SHIFT)
TRUE_LOG = SHIFT + SCALE * SHAPE  # the noise of both has mean 0 in the log


def simulated(prompts, seed=17):
    """Coverage of {pooled: ours, log: ours, rows: naive, resampled: percentile bootstrap} over SIMULATIONS runs."""
    rng, hits = np.random.default_rng(seed), dict.fromkeys(("pooled", "log", "rows", "resampled"), 0)
    for _ in range(SIMULATIONS):
        base, arm, tokens = draw(rng, prompts)
        pairs = [list(zip(some.mean(1).tolist(), tokens.tolist(), strict=True)) for some in (base, arm)]
        low, high = statistics.ratio_interval(*pairs)
        hits["pooled"] += low <= TRUE_RATIO <= high
        logs = [statistics.log_ratio([pair]) for pair in zip(*pairs, strict=True)]
        _, low, high = intervals.mean_interval(logs)
        hits["log"] += low <= TRUE_LOG <= high
        hits["rows"] += covers(np.log(base / arm).ravel(), TRUE_LOG)
        hits["resampled"] += resampled(rng, base.mean(1), arm.mean(1))
    return {name: count / SIMULATIONS for name, count in hits.items()}


def covers(sample, truth):
    """Whether mean ± 1.96·sd/√n of a sample holds the truth: every row taken for a draw of its own."""
    half = 1.96 * sample.std(ddof=1) / math.sqrt(len(sample))
    return abs(sample.mean() - truth) <= half


def resampled(rng, base, arm, draws=400):
    """Whether the percentile bootstrap over prompts holds the true ratio."""
    chosen = rng.integers(0, len(base), (draws, len(base)))
    low, high = np.quantile(base[chosen].sum(1) / arm[chosen].sum(1), [0.025, 0.975])
    return low <= TRUE_RATIO <= high


@pytest.mark.parametrize("prompts", [12, 27, 80])
def test_intervals_cover_the_truth_where_rows_taken_for_prompts_do_not(prompts):
    found = simulated(prompts)
    assert 0.93 <= found["pooled"] <= 0.97
    assert 0.93 <= found["log"] <= 0.97
    assert found["rows"] < 0.80  # four correlated repeats of a prompt are no four prompts
    if prompts == 12:
        assert found["resampled"] < 0.93  # why the interval is a jackknife with Student's t


def test_the_family_interval_covers_all_arms_at_once_where_single_ones_do_not():
    rng, arms, runs = np.random.default_rng(3), 6, 400
    family = single = 0
    for _ in range(runs):
        held = np.array([True, True])
        for _ in range(arms):
            base, arm, tokens = draw(rng, 27)
            pairs = [list(zip(some.mean(1).tolist(), tokens.tolist(), strict=True)) for some in (base, arm)]
            ends = [statistics.ratio_interval(*pairs, confidence) for confidence in (1 - 0.05 / arms, 0.95)]
            held &= [low <= TRUE_RATIO <= high for low, high in ends]
        family, single = family + held[0], single + held[1]
    assert 0.90 <= family / runs <= 0.98
    assert single / runs < 0.80  # .95^6 = .735 for independent arms


def test_the_detectable_effect_is_found_in_four_runs_of_five():
    rng, found = np.random.default_rng(8), 0
    effect = (2.0687 + 0.8583) * 0.3 / math.sqrt(24)  # t(.975, 23), t(.80, 23), true sd .3
    for _ in range(SIMULATIONS):
        _, low, high = intervals.mean_interval((effect + 0.3 * rng.standard_normal(24)).tolist())
        found += low > 0 or high < 0
    assert found / SIMULATIONS == pytest.approx(0.80, abs=0.025)
    sample = [0.1, 0.7, -0.2, 0.4, 0.3]
    expected = (2.776445 + 0.940965) * np.std(sample, ddof=1) / math.sqrt(5)  # t(.975, 4), t(.80, 4)
    assert intervals.detectable(sample) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [([(5, 10)], 0.2366, 0.7634), ([(0, 10)], 0.0, 0.2775), ([(1, 29)], 0.0061, 0.1718)],  # Newcombe 1998's examples
)
def test_a_rate_of_one_cluster_has_wilsons_interval(counts, low, high):
    assert intervals.rate_interval(counts)[1:] == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_a_rate_is_covered_whether_events_bunch_in_few_texts_or_not(spread):
    rng, hits, naive = np.random.default_rng(4), 0, 0
    for _ in range(SIMULATIONS):
        shares = np.clip(0.08 * np.exp(spread * rng.standard_normal(30) - spread**2 / 2), 0, 1)
        events = rng.binomial(60, shares)
        _, low, high = intervals.rate_interval([(int(k), 60) for k in events])
        hits += low <= 0.08 <= high
        whole = intervals.rate_interval([(int(events.sum()), 1800)])
        naive += whole[1] <= 0.08 <= whole[2]
    assert 0.92 <= hits / SIMULATIONS <= 0.98
    assert naive / SIMULATIONS < 0.75 if spread else naive / SIMULATIONS > 0.93
