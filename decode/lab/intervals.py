"""Intervals over n independent units (prompts): Student's t, jackknife, rates, and what a run could have detected.

A sample here is a list of n numbers, one a prompt. Everything is two-sided.
"""

import functools
import math
from statistics import NormalDist

CONFIDENCE = 0.95
POWER = 0.80  # of the minimum detectable effect; the customary figure
BISECTIONS = 80  # halvings of [0, 1000]: to the last bit of a double


@functools.cache
def t_quantile(probability, freedom):
    """Quantile of Student's t, by bisection on its distribution function; probability > .5, whole degrees of freedom.

    For whole degrees of freedom the distribution is a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1e3
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, freedom) < probability else (low, middle)
    return low


def t_distribution(t, freedom):
    """P(T <= t) for t >= 0."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for index in range(1 + odd, freedom, 2):  # cos^1, cos^3 … or cos^0, cos^2 …, each times (index)/(index+1)
        total += term
        term *= math.cos(angle) ** 2 * index / (index + 1)
    central = math.sin(angle) * total
    if odd:
        central = (angle + central) * 2 / math.pi
    return 0.5 + central / 2


def mean_interval(sample, confidence=CONFIDENCE):
    """(mean, low, high): mean ± t(n−1)·sd/√n of a sample of n ≥ 2 numbers."""
    mean, error = mean_error(sample)
    half = t_quantile((1 + confidence) / 2, len(sample) - 1) * error
    return mean, mean - half, mean + half


def mean_error(sample):
    """(mean, its standard error sd/√n with n−1 in sd)."""
    n = len(sample)
    mean = sum(sample) / n
    return mean, math.sqrt(sum((value - mean) ** 2 for value in sample) / (n - 1) / n)


def pseudo_values(units, figure):
    """Jackknife pseudo-values p_i = n·θ − (n−1)·θ_(−i) (Tukey 1958) of figure(units), to be treated as n draws."""
    n, whole = len(units), figure(units)
    return [n * whole - (n - 1) * figure(units[:i] + units[i + 1 :]) for i in range(n)]


def jackknife(units, figure, confidence=CONFIDENCE):
    """The t interval (low, high) of figure(units) from its pseudo-values; units: a list with one entry a prompt."""
    return mean_interval(pseudo_values(units, figure), confidence)[1:]


def detectable(sample, confidence=CONFIDENCE, power=POWER):
    """The least true mean that a two-sided test would find different from 0 with this power, at this spread and n.

    (t(n−1; confidence) + t(n−1; power)) · sd/√n: the usual two-quantile approximation, a little short at n = 10.
    """
    freedom = len(sample) - 1
    return (t_quantile((1 + confidence) / 2, freedom) + t_quantile(power, freedom)) * mean_error(sample)[1]


def rate_interval(counts, confidence=CONFIDENCE):
    """(rate, low, high) of events among trials that come in clusters; counts: (events, trials) of each cluster.

    Wilson's interval at the effective number of trials: their number over the design effect, which is the variance of
    the clustered rate (by linearisation) over that of as many independent trials, and at least 1. So a rate of 0 still
    has an upper end, and events that bunch in few texts widen it (Korn & Graubard 1998, with Wilson for exact).
    """
    events, trials = (sum(column) for column in zip(*counts, strict=True))
    rate, clusters = events / trials, len(counts)
    simple = rate * (1 - rate) / trials
    spread = sum((k - rate * n) ** 2 for k, n in counts) / trials**2 * clusters / max(clusters - 1, 1)
    size = trials / max(1.0, spread / simple if simple else 1.0)
    tail = (1 + confidence) / 2
    z = t_quantile(tail, clusters - 1) if clusters > 1 else NormalDist().inv_cdf(tail)
    centre = (rate + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * math.sqrt(rate * (1 - rate) / size + z**2 / (4 * size**2))
    return rate, max(0.0, centre - half), min(1.0, centre + half)
