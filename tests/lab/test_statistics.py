"""Every figure against a value worked by hand, and the interval's coverage by simulation."""

import math

import numpy as np
import pytest

from decode.lab import intervals, statistics


def row(arm="a", prompt="p", repeat=0, tokens=(1, 2, 3), seconds=1.0, cycles=(), loop=0.0):
    """A row whose cycles are (proposed, accepted, committed)."""
    columns = [list(column) for column in zip(*cycles, strict=True)] or [[], [], []]
    return {
        "arm": arm,
        "prompt": prompt,
        "repeat": repeat,
        "tokens": list(tokens),
        "seconds": seconds,
        "loop_fraction": loop,
        "disturbed": [],
        "proposed_per_cycle": columns[0],
        "accepted_per_cycle": columns[1],
        "committed_per_cycle": columns[2],
    }


# Percentage points of Student's t, two-sided 5 % and one-sided 1 %, as printed tables give them.
@pytest.mark.parametrize(
    "probability, freedom, expected",
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 11, 2.201),
        (0.975, 26, 2.056),
        (0.975, 120, 1.980),
        (0.99, 5, 3.365),
        (0.95, 10, 1.812),
    ],
)
def test_t_quantile_agrees_with_the_printed_table(probability, freedom, expected):
    assert intervals.t_quantile(probability, freedom) == pytest.approx(expected, abs=6e-4)


def test_loop_fraction_counts_starts_already_seen():
    cycle = [1, 2, 3]  # 12 tokens: 8-gram starts 0..4; starts 3 and 4 repeat starts 0 and 1
    assert statistics.loop_fraction(cycle * 4) == pytest.approx(2 / 5)
    assert statistics.loop_fraction(list(range(40))) == 0
    assert statistics.loop_fraction([5] * 7) == 0  # too short to hold an 8-gram
    assert statistics.loop_fraction([5] * 9) == pytest.approx(1 / 2)
    # a phrase of seven tokens repeated apart is no loop
    assert statistics.loop_fraction([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9]) == 0


def test_speedup_is_the_ratio_of_pooled_times_not_the_mean_of_ratios():
    found = statistics.speedup({"a": (4.0, 4), "b": (3.0, 4)}, {"a": (4.0, 4), "b": (1.0, 4)})
    assert found["ratio"] == pytest.approx(7 / 5)  # the mean of the two ratios is 2
    assert found["range"] == pytest.approx([1, 3])


def test_speedup_is_per_token_where_outputs_differ_in_length():
    # baseline 6 s for 12 tokens = .5 s each; arm 6 s for 24 tokens = .25 s each
    assert statistics.speedup({"a": (6.0, 12)}, {"a": (6.0, 24)})["ratio"] == pytest.approx(2)


def test_speedup_leaves_out_prompts_that_ended_at_their_first_token():
    found = statistics.speedup({"a": (6.0, 12), "b": (0.0, 0)}, {"a": (3.0, 12), "b": (0.0, 0)})
    assert found["prompts"] == 1 and found["ratio"] == pytest.approx(2)
    assert statistics.speedup({"b": (0.0, 0)}, {"b": (0.0, 0)}) is None


def test_below_ten_prompts_there_is_a_range_and_no_interval():
    times = {str(i): (1.0 + i, 10) for i in range(10)}
    nine = {id: times[id] for id in list(times)[:9]}
    assert statistics.speedup(nine, nine)["low"] is None
    assert statistics.speedup(times, times)["low"] is not None


def test_repeats_are_averaged_before_prompts_are_pooled():
    rows = [row(repeat=0, seconds=1.0), row(repeat=1, seconds=3.0), row(prompt="q", seconds=5.0, tokens=range(9))]
    assert statistics.timings(rows) == {"p": (2.0, 2.0), "q": (5.0, 8.0)}


def test_interval_agrees_with_the_jackknife_written_out():
    rng = np.random.default_rng(3)
    base = [(seconds, tokens) for seconds, tokens in zip(rng.uniform(1, 3, 11), rng.integers(5, 60, 11), strict=True)]
    arm = [(seconds, tokens) for seconds, tokens in zip(rng.uniform(1, 3, 11), rng.integers(5, 60, 11), strict=True)]
    b, a = np.array(base), np.array(arm)
    logs = []
    for keep in ~np.eye(11, dtype=bool):
        (sb, nb), (sa, na) = b[keep].sum(0), a[keep].sum(0)
        logs.append(np.log(sb * na / nb / sa))
    whole = np.log(b[:, 0].sum() * a[:, 1].sum() / b[:, 1].sum() / a[:, 0].sum())
    centre = 11 * whole - 10 * np.mean(logs)
    half = 2.228139 * np.sqrt(10 / 11 * np.sum((logs - np.mean(logs)) ** 2))  # t(.975, 10)
    assert statistics.ratio_interval(base, arm) == pytest.approx(np.exp([centre - half, centre + half]), rel=1e-6)


def test_interval_of_a_constant_ratio_is_that_ratio():
    base = [(3.0 * i, 7 * i) for i in range(1, 13)]
    arm = [(2.0 * i, 7 * i) for i in range(1, 13)]
    assert statistics.ratio_interval(base, arm) == pytest.approx((1.5, 1.5))


def test_both_ratios_are_given_and_differ_where_prompts_do():
    base = {str(i): (10.0 * i, 10 * i) for i in range(1, 12)}
    arm = {str(i): (10.0 * i / (2 if i < 11 else 1), 10 * i) for i in range(1, 12)}  # the longest prompt gains nothing
    found = statistics.speedup(base, arm, compared=4)
    assert found["ratio"] == pytest.approx(66 / (55 / 2 + 11))
    assert found["mean_log"]["ratio"] == pytest.approx(2 ** (10 / 11))
    logs = [math.log(2)] * 10 + [0.0]
    half = 2.228139 * np.std(logs, ddof=1) / math.sqrt(11)  # t(.975, 10)
    ends = [found["mean_log"][end] for end in ("low", "high")]
    assert ends == pytest.approx(np.exp([np.mean(logs) - half, np.mean(logs) + half]), rel=1e-6)
    assert found["family"][0] < found["low"] and found["family"][1] > found["high"] and found["compared"] == 4
    assert found["detectable"] > 1


def test_drift_compares_the_last_repeat_with_the_first_prompt_by_prompt():
    rows = [row(prompt=str(i), repeat=k, seconds=(1 + i) * (1 + 0.1 * k)) for k in range(3) for i in range(11)]
    found = statistics.drift(rows)
    assert found["paired"] and found["ratio"] == pytest.approx(1.2) and found["low"] == pytest.approx(1.2)
    once = statistics.drift([row(prompt=str(i), seconds=2.0 if i < 5 else 3.0) for i in range(10)])
    assert once == {"ratio": pytest.approx(1.5), "low": None, "high": None, "paired": False}
    assert statistics.drift([]) is None


def test_an_effect_inside_the_twins_interval_is_not_beyond_it():
    floor = {"low": 0.97, "high": 1.04}
    verdicts = [
        statistics.beyond({"low": low, "high": high}, floor) for low, high in [(1.05, 1.2), (1.0, 1.2), (0.8, 0.9)]
    ]
    assert verdicts == [True, False, True]
    assert statistics.beyond({"low": None, "high": None}, floor) is statistics.beyond(None, floor) is None
    arms = [{"name": "mlx_lm", "speedup": 1}, {"name": "mlx_lm-twin", "speedup": floor}]
    assert statistics.twin_floor(arms) is floor and statistics.twin_floor(arms[:1]) is None


def test_a_disturbed_row_leaves_with_the_row_it_is_paired_with():
    rows = [row("mlx_lm", id, k, seconds=4.0) for id in "pq" for k in range(2)]
    rows += [row("dflash-4", id, k, seconds=2.0 if k else 1.0) for id in "pq" for k in range(2)]
    rows += [row("plain", id, k, seconds=4.0) for id in "pq" for k in range(2)]
    rows[0]["disturbed"] = ["noise"]  # mlx_lm on p, repeat 0: the arm's own row of that round leaves too
    arms = [
        {"name": "mlx_lm", "kind": "mlx_lm", "block_size": None},
        {"name": "dflash-4", "kind": "d", "block_size": 4},
    ]
    quiet, every = (statistics.summarise(rows, arms, which)[1] for which in (statistics.QUIET, statistics.EVERY))
    assert quiet["speedup"]["ratio"] == pytest.approx((4 + 4) / (2 + 1.5))
    assert every["speedup"]["ratio"] == quiet["speedup_every_row"]["ratio"] == pytest.approx(8 / 3)
    assert quiet["rows"] == {"counted": 4, "of": 4}  # what is left out is the pair, not the arm's row


CYCLES = [(3, 3, 4), (3, 0, 1), (1, 1, 2)]  # proposed, accepted, committed


def test_tau_is_given_pooled_over_cycles_and_as_mean_of_prompts():
    rows = [row(cycles=CYCLES), row(prompt="q", cycles=[(3, 0, 1)])]
    assert statistics.tau(rows) == {"pooled": pytest.approx(8 / 4), "per_prompt": pytest.approx((7 / 3 + 1) / 2)}


def test_tau_of_repeats_is_the_tau_of_one():
    once = [row(cycles=CYCLES), row(prompt="q", cycles=[(3, 0, 1)])]
    thrice = [{**one, "repeat": repeat} for one in once for repeat in range(3)]
    assert statistics.tau(thrice) == statistics.tau(once)


def test_acceptance_rate_is_accepted_over_offered():
    assert statistics.acceptance_rate([row(cycles=CYCLES)]) == pytest.approx(4 / 7)
    assert statistics.acceptance_rate([row(cycles=[(0, 0, 1)])]) is None  # a lookup that never matched


def test_survival_counts_only_cycles_that_offered_that_many():
    # j=1: accepted 3, 0, 1 of three cycles; j=2 and j=3: accepted 3, 0 of the two that offered three
    assert statistics.survival([row(cycles=CYCLES)]) == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert statistics.survival([row()]) == []


def test_a_prompt_is_identical_only_when_every_repeat_is():
    plain = [row(prompt=id, repeat=repeat) for id in "pqr" for repeat in range(2)]
    ours = [dict(one) for one in plain]
    ours[3] = {**ours[3], "tokens": [1, 2, 4]}  # q, second repeat
    ours[4] = {**ours[4], "tokens": [1, 2]}  # r, first repeat: a prefix is not identity
    assert statistics.identical(ours, plain) == 1


def test_summary_keeps_looping_prompts_out_of_the_loop_free_speedup():
    rows = []
    for id, seconds, loop in [("p", 2.0, 0.0), ("q", 1.0, 0.05), ("r", 4.0, 0.049)]:
        rows += [row("mlx_lm", id, seconds=4.0), row("plain", id, seconds=4.0, loop=loop)]
        rows += [row("dflash-4", id, seconds=seconds, cycles=CYCLES)]
    arms = [
        {"name": name, "kind": name.split("-")[0], "block_size": size}
        for name, size in [("mlx_lm", None), ("plain", None), ("dflash-4", 4)]
    ]
    baseline, plain, dflash = statistics.summarise(rows, arms)
    assert baseline["speedup"]["ratio"] == plain["speedup"]["ratio"] == 1
    assert dflash["speedup"]["ratio"] == pytest.approx(12 / 7)
    assert dflash["speedup_loop_free"]["ratio"] == pytest.approx(8 / 6)
    assert dflash["speedup_loop_free"]["prompts"] == 2
    assert dflash["tok_s"] == pytest.approx(6 / 7)  # two tokens after the first, three prompts
    assert (dflash["prompts"], dflash["identical"], dflash["identical_mlx_lm"]) == (3, 3, 3)
    assert baseline["tau"] is None and dflash["block_size"] == 4
