"""Whatever is proposed, the tokens are the plain loop's, and the caches hold what was emitted and nothing else.

The oracles are loops over mlx-lm's models (oracles.py) and mlx-lm's own generator. All in float32.
"""

import itertools
import math
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from decode import cycle as cycles
from decode.cycle import Cycle, Loop, Quantization, decode
from decode.proposers import DFlashProposer, PromptLookup, Scripted
from decode.schedule import Fixed
from decode.verify import Verdict
from drafter import hybrid
from oracles import assert_same_caches, cache_rows, greedy_stepwise, greedy_uncached

KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_5")
LENGTH = 41
FLOAT32 = 1e-4  # on cached keys and values of order 1, after prompts fed in different pieces
VARIED = 15  # distinct tokens at least in a text of LENGTH, or it could not tell a wrong loop from a right one


@pytest.fixture(scope="module")
def answer(tiny_target, prompt):
    """answer(kind, bits): LENGTH greedy tokens by mlx-lm's model fed one token at a time."""
    found = {}

    def text(kind, bits=None):
        if (kind, bits) not in found:
            with hybrid.detached(tiny_target(kind, bits).model) as model:
                found[kind, bits] = greedy_stepwise(model, prompt, LENGTH, make_prompt_cache(model))
            assert len(set(found[kind, bits])) >= VARIED
        return found[kind, bits]

    return text


def run(target, prompt, proposer, block_size, max_tokens=LENGTH, **options):
    """(tokens, cycle records) of a whole decode."""
    schedule = Fixed(block_size) if proposer else None
    steps = list(decode(target, prompt, proposer, schedule, max_tokens=max_tokens, **options))
    return [token for step in steps for token in step.tokens], [step.cycle for step in steps[1:]]


def right_until(text, slot):
    """A script that is right in the first `slot` slots of every block and wrong in all later ones."""

    def script(position, count):
        ahead = text[position : position + count]
        return [token if index < slot else (token + 1) % 300 for index, token in enumerate(ahead)]

    return Scripted(script)


def mixture(text, seed):
    """A script that is right four times in five."""
    draws = random.Random(seed)
    return Scripted(
        lambda position, count: [
            token if draws.random() < 0.8 else draws.randrange(5, 300) for token in text[position : position + count]
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracles_agree_without_a_cache(tiny_target, prompt, answer, kind):
    assert greedy_uncached(tiny_target(kind).model, prompt, LENGTH) == answer(kind)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_is_the_greedy_loop(tiny_target, prompt, answer, kind, bits):
    tokens, records = run(tiny_target(kind, bits), prompt, None, None)
    assert tokens == answer(kind, bits)
    assert records == [Cycle(1, 0, 0, 1)] * (LENGTH - 1)


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_right_until_any_slot_leave_the_text_as_it_is(tiny_target, prompt, answer, kind, block_size):
    expected = answer(kind)
    for slot in range(block_size):
        tokens, records = run(tiny_target(kind), prompt, right_until(prompt + expected, slot), block_size)
        assert tokens == expected
        assert all(record.accepted == min(slot, record.proposed) for record in records)
        assert all(record.committed == record.accepted + 1 for record in records)
        assert len(records) == math.ceil((LENGTH - 1) / (slot + 1))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_mixture_leaves_the_text_as_it_is(tiny_target, prompt, answer, kind, bits):
    expected = answer(kind, bits)
    for seed, block_size in itertools.product(range(3), (3, 7)):
        tokens, records = run(tiny_target(kind, bits), prompt, mixture(prompt + expected, seed), block_size)
        assert tokens == expected
        assert len({record.accepted for record in records}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_twenty_texts_of_a_hybrid_survive_adversarial_proposals(tiny_target, kind, block_size):
    target = tiny_target(kind)
    for seed in range(20):
        given = np.random.default_rng(seed).integers(5, 300, 3 + 7 * seed).tolist()
        with hybrid.detached(target.model) as model:
            expected = greedy_stepwise(model, given, 128, make_prompt_cache(model))
        for proposer in (right_until(given + expected, seed % block_size), mixture(given + expected, seed)):
            assert run(target, given, proposer, block_size, max_tokens=128)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_lookup_and_a_drafter_leave_the_text_as_it_is(tiny_target, tiny_drafter, prompt, answer, kind):
    target = tiny_target(kind)
    for proposer in (PromptLookup(3, 1), DFlashProposer(target, tiny_drafter(target, block_size=6))):
        assert run(target, prompt, proposer, 6)[0] == answer(kind)


@pytest.mark.parametrize("prefill_step_size", [1, 4, 26, 500])
def test_the_prompt_may_be_fed_in_any_pieces_and_the_drafter_sees_every_row_once(
    tiny_target, tiny_drafter, prompt, answer, prefill_step_size
):
    target, text = tiny_target("gemma3_text"), prompt + answer("gemma3_text")
    drafter = tiny_drafter(target, block_size=6)
    proposer, script = DFlashProposer(target, drafter), mixture(text, 4).script
    proposer.propose = lambda pending, count: cycles.Proposal(tuple(script(proposer.cache.offset + 1, count)))
    tokens, _ = run(target, prompt, proposer, 6, prefill_step_size=prefill_step_size)
    assert prompt + tokens == text
    fresh = drafter.make_cache()
    drafter.extend(fresh, drafter.fuse(target.forward(mx.array([text[:-1]]), taps=proposer.taps).taps))
    assert_same_caches(proposer.cache.layers, fresh.layers, FLOAT32)


def greedy_mlx_lm(target, prompt, **options):
    return [token for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=LENGTH, **options)]


@pytest.mark.parametrize("start", [0, 9, 27, 30, 45])
def test_quantised_caches_give_mlx_lms_own_text_wherever_they_begin(tiny_target, prompt, start):
    target, bits = tiny_target("qwen3"), 2  # so coarse that a row quantised too late or too early changes the text
    kv = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": 10}
    expected = greedy_mlx_lm(target, prompt, **kv)
    quantization = Quantization(bits, 32, start)
    text = prompt + expected
    for proposer in (None, right_until(text, 2), right_until(text, 5), mixture(text, 0)):
        tokens, _ = run(target, prompt, proposer, 6, quantization=quantization, prefill_step_size=10)
        assert tokens == expected


def test_a_pinned_window_gives_the_plain_text(tiny_target, prompt):
    target = tiny_target("qwen3")
    expected, _ = run(target, prompt, None, None, cache=make_prompt_cache(target.model, 19))
    assert expected == greedy_mlx_lm(target, prompt, max_kv_size=19)
    for slot in (0, 1, 5):
        cache = make_prompt_cache(target.model, 19)
        assert run(target, prompt, right_until(prompt + expected, slot), 6, cache=cache)[0] == expected


def test_state_that_cannot_be_trimmed_is_rerun_and_the_text_stays(tiny_target, tiny_drafter, prompt, answer):
    target, text = tiny_target("lfm2"), prompt + answer("lfm2")
    drafter = DFlashProposer(target, tiny_drafter(target, block_size=6))
    for proposer in (drafter, *(right_until(text, slot) for slot in range(6)), mixture(text, 0)):
        cache = target.make_cache()
        with pytest.warns(UserWarning, match="cache ArraysCache: no way to take rows back") as told:
            tokens, _ = run(target, prompt, proposer, 6, cache=cache)
        assert prompt + tokens == text
        assert len(told) == 1
    fresh = make_prompt_cache(target.model)
    target.model(mx.array([text[:-1]]), cache=fresh)
    probe = mx.array([[7, 8]])
    found, expected = (np.array(target.model(probe, cache=held)) for held in (cache, fresh))
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7])
def test_no_more_than_max_tokens_are_drafted_or_emitted(tiny_target, prompt, answer, max_tokens):
    expected = answer("llama")
    for proposer in (None, Scripted(prompt + expected), right_until(prompt + expected, 0)):
        tokens, records = run(tiny_target("llama"), prompt, proposer, 6, max_tokens=max_tokens)
        assert tokens == expected[:max_tokens]
        left = max_tokens - 1
        for record in records:
            assert record.proposed + 1 <= left
            left -= record.committed
        assert left == 0


def finish(loop, prompt):
    """Run a loop to its end; the tokens emitted."""
    tokens = list(loop.prefill(prompt).tokens)
    while not loop.finished:
        tokens += loop.cycle().tokens
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", range(6))
def test_eos_inside_a_block_ends_the_text_there_and_leaves_nothing_after_it_in_the_caches(
    tiny_target, prompt, answer, kind, slot
):
    target, expected = tiny_target(kind), answer(kind)
    end = next(i for i in range(7 + slot, LENGTH) if i % 6 == (1 + slot) % 6 and expected[i] not in expected[:i])
    cache = target.make_cache()
    loop = Loop(target, cache, Scripted(prompt + expected), Fixed(6), max_tokens=LENGTH, eos_ids={expected[end]})
    tokens = finish(loop, prompt)
    assert tokens == expected[: end + 1]
    fresh = make_prompt_cache(target.model)
    target.model(mx.array([prompt + tokens[:-1]]), cache=fresh)
    assert_same_caches(cache, fresh, FLOAT32)
    loop.settle()
    target.model(mx.array([tokens[-1:]]), cache=fresh)
    assert_same_caches(cache, fresh, FLOAT32)


@pytest.mark.parametrize("proposing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_settled_caches_are_mlx_lms(tiny_target, prompt, answer, kind, proposing, length):
    target = tiny_target(kind)
    proposer = mixture(prompt + answer(kind), 1) if proposing else None
    ours, theirs = target.make_cache(), make_prompt_cache(target.model)
    loop = Loop(target, ours, proposer, Fixed(5), max_tokens=length)
    finish(loop, prompt)
    loop.settle()
    loop.settle()  # once is enough
    for _ in generate_step(mx.array(prompt), target.model, max_tokens=length, prompt_cache=theirs):
        pass
    assert_same_caches(ours, theirs, FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_can_be_cut_after_any_token(tiny_target, prompt, answer, kind):
    target, expected = tiny_target(kind), answer(kind)
    for n in range(1, 7):
        cache = target.make_cache()
        loop = Loop(target, cache, Scripted(prompt + expected), Fixed(6), max_tokens=LENGTH)
        loop.prefill(prompt)
        loop.cycle()
        assert loop.cycle().tokens == tuple(expected[7:13])
        loop.cut(n)
        loop.settle()
        assert loop.finished
        fresh = make_prompt_cache(target.model)
        target.model(mx.array([prompt + expected[: 7 + n]]), cache=fresh)
        assert_same_caches(cache, fresh, FLOAT32)


def break_off(loop, where, monkeypatch):
    """Let the loop's next cycle be interrupted: while it judges, half way through its commit, or after it."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def half(n):
        for mark in loop.transaction.marks[::2]:
            mark.keep(loop.transaction.rows, n)
        interrupt()

    owner, name = {
        "accept": (cycles, "accept"),
        "commit": (loop.transaction, "commit"),
        "observe": (loop, "_observe"),
        "schedule": (loop.schedule, "observe"),
    }[where]
    monkeypatch.setattr(owner, name, half if where == "commit" else interrupt)


@pytest.mark.parametrize("where", ["accept", "commit", "observe", "schedule"])
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_5"])
def test_a_block_that_breaks_off_leaves_the_caches_as_they_were(tiny_target, prompt, answer, kind, where, monkeypatch):
    target = tiny_target(kind)
    loops = [
        Loop(target, target.make_cache(), Scripted(prompt + answer(kind)), Fixed(6), max_tokens=LENGTH) for _ in "ab"
    ]
    for loop in loops:
        loop.prefill(prompt)
        assert loop.cycle().tokens == tuple(answer(kind)[1:7])
    broken, whole = loops
    with monkeypatch.context() as patch:
        break_off(broken, where, patch)
        with pytest.raises(KeyboardInterrupt):
            broken.cycle()
    if where == "accept":  # the proposer knows no more than the caches: the text goes on
        assert broken.cycle().tokens == whole.cycle().tokens == tuple(answer(kind)[7:13])
    for loop in loops:
        loop.settle()
    for mine, theirs in zip(broken.cache, whole.cache, strict=True):
        for one, other in zip(rows_of(mine), rows_of(theirs), strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(other))


def rows_of(entry):
    """The arrays of a recurrent cache, or keys and values of the rows that count, in temporal order."""
    return entry.cache if hasattr(entry, "recording") else cache_rows(entry)


@pytest.fixture
def waits(monkeypatch):
    """What the process waited for: one entry for each mx.eval, however many arrays it was given."""
    seen, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: seen.append(arrays) or evaluate(*arrays))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_cycle_waits_for_the_device_once(tiny_target, tiny_drafter, prompt, waits, kind):
    target = tiny_target(kind)
    for proposer in (DFlashProposer(target, tiny_drafter(target, block_size=6)), PromptLookup(2, 1)):
        loop = Loop(target, target.make_cache(), proposer, Fixed(6), max_tokens=LENGTH)
        loop.prefill(prompt)
        waits.clear()
        for _ in range(4):
            loop.cycle()
        assert len(waits) == 4


def test_a_draft_that_cannot_be_read_yet_is_verified_without_being_read(tiny_target, tiny_drafter, prompt, monkeypatch):
    target = tiny_target("llama")
    proposer = DFlashProposer(target, tiny_drafter(target, block_size=6))
    loop = Loop(target, target.make_cache(), proposer, Fixed(6), max_tokens=LENGTH)
    loop.prefill(prompt)
    judged = []

    def accept(logits, proposals):
        judged.append(proposals.shape)
        return Verdict(0, 5, (1.0,), (5,))  # judged without evaluating anything

    monkeypatch.setattr(mx, "eval", lambda *arrays: pytest.fail("the draft was waited for"))
    monkeypatch.setattr(cycles, "accept", accept)
    loop.cycle()
    assert judged == [(5,)]


def test_an_instrumented_pass_times_each_stage_and_emits_the_same(tiny_target, tiny_drafter, prompt, answer):
    target = tiny_target("llama")
    ticks = itertools.count()
    for proposer in (None, DFlashProposer(target, tiny_drafter(target, block_size=6))):
        tokens, records = run(target, prompt, proposer, 6, clock=lambda: float(next(ticks)))
        assert tokens == answer("llama")
        assert all(set(record.seconds) == {"draft", "verify", "commit"} for record in records)
        assert all(record.seconds["verify"] == 1.0 for record in records)
        assert all(record.seconds["commit"] == (1.0 if proposer else 0.0) for record in records)


def test_margins_and_logits_belong_to_the_committed_tokens(tiny_target, prompt, answer):
    target, expected = tiny_target("qwen3"), answer("qwen3")
    steps = list(decode(target, prompt, mixture(prompt + expected, 2), Fixed(6), max_tokens=LENGTH))
    text = list(prompt)
    for step in steps:
        assert step.logits.shape == (len(step.tokens), target.vocab_size)
        for index, token in enumerate(step.tokens):
            row = np.sort(np.array(target.model(mx.array([text]))[0, -1]))
            text.append(token)
            if step.cycle:
                np.testing.assert_allclose(step.cycle.margins[index], row[-1] - row[-2], atol=1e-3)
            assert step.logits[index].max().item() == pytest.approx(row[-1], abs=1e-3)


def test_a_cut_record_counts_nothing_after_the_cut():
    record = Cycle(8, 7, 5, 6, (6.0, 5.0, 4.0, 3.0, 2.0, 1.0), {"draft": 1.0})
    assert record.cut(3) == Cycle(8, 7, 3, 3, (6.0, 5.0, 4.0), {"draft": 1.0})
    assert record.cut(6) == record


def test_progress_reports_the_prompt_from_none_to_all(tiny_target, prompt):
    told = []
    options = {"prefill_step_size": 10, "progress": lambda *at: told.append(at)}
    run(tiny_target("llama"), prompt, None, None, max_tokens=2, **options)
    assert told == [(0, 27), (10, 27), (20, 27), (26, 27), (27, 27)]


def test_a_schedule_hears_of_every_cycle_and_a_proposer_of_every_committed_row(tiny_target, prompt, answer):
    class Noting(Scripted):
        def begin(self, tokens, taps):
            self.rows = []
            super().begin(tokens, taps)

        def observe(self, tokens, taps):
            self.rows += tokens
            super().observe(tokens, taps)

    heard, expected = [], answer("llama")
    schedule, proposer = Fixed(4), Noting(mixture(prompt + expected, 3).script)
    schedule.observe = heard.append
    steps = list(decode(tiny_target("llama"), prompt, proposer, schedule, max_tokens=LENGTH, prefill_step_size=8))
    assert heard == [step.cycle for step in steps[1:]]
    assert proposer.rows == prompt + expected[:-1]
