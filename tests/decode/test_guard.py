"""The tie guard: what a block leaves in doubt is decided by one row, whatever the block would have said."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from decode import verify
from decode.cycle import Loop, decode
from decode.proposers import DFlashProposer, PromptLookup, Scripted
from decode.schedule import Fixed
from drafter import hybrid
from oracles import assert_same_caches, greedy_stepwise
from widened import REACH, widened

LENGTH = 31


@pytest.mark.parametrize(("dtype", "step"), [(mx.bfloat16, 2**-3), (mx.float16, 2**-6), (mx.float32, 2**-19)])
def test_certain_counts_the_tokens_before_the_first_near_tie(dtype, step):
    rows = [[0.0] * 7 for _ in range(4)]  # at 20 a step is one ULP of the dtype
    for row, gap in zip(rows, (5, 3, 0, 9), strict=True):
        row[2], row[4] = 20.0 + gap * step, 20.0
    logits = mx.array(rows, dtype)
    margins = verify.margins(logits, mx.argmax(logits, axis=-1)).tolist()
    found = [verify.certain(logits, margins, guard) for guard in (0, 2.9, 3, 4.9, 5, 100)]
    assert found == [2, 2, 1, 1, 0, 0]
    assert verify.certain(logits[:2], margins[:2], 1) == 2 and verify.certain(logits[3:], margins[3:], 8) == 1


def run(target, prompt, proposer, **options):
    """(tokens, cycle records) of a decode in blocks of five."""
    steps = list(decode(target, prompt, proposer, Fixed(5), max_tokens=LENGTH, **options))
    return [token for step in steps for token in step.tokens], [step.cycle for step in steps[1:]]


@pytest.fixture(scope="module")
def plain(tiny_target, prompt):
    """plain(kind, make): the plain loop's text over make(target)."""

    def text(kind, make=lambda target: target):
        steps = decode(make(tiny_target(kind)), prompt, max_tokens=LENGTH)
        return [token for step in steps for token in step.tokens]

    return text


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_guard_over_everything_decides_every_token_by_one_row(tiny_target, prompt, plain, kind):
    text = plain(kind)
    tokens, cycles = run(tiny_target(kind), prompt, Scripted([*prompt, *text]), tie_guard=1e9)
    assert tokens == text
    assert all(cycle.committed == cycle.redecided == 1 and cycle.accepted == 0 for cycle in cycles[:-1])


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_planted_width_effect_changes_the_text_and_a_guard_as_wide_restores_it(tiny_target, prompt, plain, kind):
    target, text = widened(tiny_target(kind)), plain(kind, widened)
    for proposer in (Scripted([*prompt, *text]), PromptLookup(2)):
        bare, _ = run(target, prompt, proposer)
        guarded, cycles = run(target, prompt, proposer, tie_guard=REACH)
        assert guarded == text
        assert sum(cycle.committed for cycle in cycles) == LENGTH - 1
        if isinstance(proposer, Scripted):
            assert bare != text
            assert 0 < sum(cycle.redecided for cycle in cycles) < len(cycles)  # not every cycle was in doubt
            assert any(cycle.committed > 1 for cycle in cycles)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5"])
def test_under_a_guard_the_caches_hold_what_was_emitted_wherever_a_step_is_cut(tiny_target, prompt, plain, kind):
    target, text = widened(tiny_target(kind)), plain(kind, widened)
    for stop in range(2, 12, 3):
        cache = target.make_cache()
        loop = Loop(target, cache, Scripted([*prompt, *text]), Fixed(5), max_tokens=LENGTH, tie_guard=REACH)
        emitted = list(loop.prefill(prompt).tokens)
        while len(emitted) < stop:
            emitted += loop.cycle().tokens
        loop.cut(len(loop.tokens) - (len(emitted) - stop))
        loop.settle()
        assert emitted[:stop] == text[:stop]
        with hybrid.detached(target.model) as model:
            reference = make_prompt_cache(model)
            greedy_stepwise(model, [*prompt, *text[:stop]], 1, reference)
        assert_same_caches(cache, reference, 1e-4)


def test_a_drafter_and_a_schedule_hear_of_guarded_cycles_as_of_others(tiny_target, tiny_drafter, prompt, plain):
    target = widened(tiny_target("llama"))
    heard = []
    schedule = Fixed(5)
    schedule.observe = heard.append
    drafter = DFlashProposer(target, tiny_drafter(target))
    steps = list(decode(target, prompt, drafter, schedule, max_tokens=LENGTH, tie_guard=REACH))
    assert [token for step in steps for token in step.tokens] == plain("llama", widened)
    assert heard == [step.cycle for step in steps[1:]]
    assert drafter.cache.offset == len(prompt) + LENGTH - 1  # every committed row, once
