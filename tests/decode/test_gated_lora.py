"""A gated LoRA drafts with the target's own weights and caches: the text is the target's all the same, in both modes.

The oracles are loops over mlx-lm's models (oracles.py). All in float32.
"""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import tiny
from decode.cycle import Loop, decode
from decode.proposers import GatedLoraProposer
from decode.schedule import Cut, Fixed
from drafter import config as configuration
from drafter import gated_lora, hybrid
from kernels.errors import UserError
from oracles import assert_same_caches, greedy_stepwise

SIZES = (1, 2, 4, 8, 16)
LENGTH = 23
FLOAT32 = 1e-4  # on cached keys, values and states of order 1, after rows fed in other pieces
MODES = {"resend": {}, "keep": {"keep": True}, "refined": {"refinements": 2}, "refined and kept":
         {"refinements": 1, "keep": True}, "always on": {"always_on": True}}  # fmt: skip


@pytest.fixture(scope="module")
def answer(tiny_target, prompt):
    """answer(kind): LENGTH greedy tokens by mlx-lm's model fed one token at a time, and its caches then."""
    found = {}

    def text(kind):
        if kind not in found:
            with hybrid.detached(tiny_target(kind).model) as model:
                cache = make_prompt_cache(model)
                found[kind] = greedy_stepwise(model, prompt, LENGTH, cache), cache
            assert len(set(found[kind][0])) > 9
        return found[kind]

    return text


@pytest.fixture(scope="module")
def adapter(tiny_target):
    """make(kind, size, **changes): an adapter with random factors, `size` times the deviation of a trained one's."""

    def make(kind, size=1.0, bits=None, **changes):
        target = tiny_target(kind, bits)
        found = {"rank": 3, "alpha": 6.0, "block_size": 4, "targets": ("attention", "mlp")}
        found |= {"mask_token_id": tiny.SPECIAL.index("<|spare|>"), "noise_limit": tiny.VOCABULARY} | changes
        drafter = gated_lora.GatedLora(target, gated_lora.GatedLoraConfig(**found))
        for number, name in enumerate(drafter):
            keys = mx.random.split(mx.random.key(number), 2)
            for factor, key in zip(("lora_a", "lora_b"), keys):
                drafter[name][factor] = 0.2 * size * mx.random.normal(drafter[name][factor].shape, key=key)
        return target, drafter

    return make


def run(target, prompt, proposer, size, cache=None, **options):
    """(ids, cycles) of a decode."""
    options = {"max_tokens": LENGTH} | options
    steps = list(decode(target, prompt, proposer, Fixed(size, least=1), cache, **options))
    return [token for step in steps for token in step.tokens], [step.cycle for step in steps[1:]]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize(
    ("mode", "size"), [(mode, size) for mode in MODES for size in (SIZES if mode in ("resend", "keep") else (4,))]
)
def test_the_text_is_the_targets_own(adapter, answer, prompt, kind, mode, size):
    target, drafter = adapter(kind)
    cache = target.make_cache()
    tokens, cycles = run(target, prompt, GatedLoraProposer(target, drafter, size, **MODES[mode]), size, cache)
    expected, held = answer(kind)
    assert tokens == expected
    assert sum(cycle.committed for cycle in cycles) == LENGTH - 1
    assert_same_caches(cache, held, FLOAT32)


@pytest.mark.filterwarnings("ignore:cache ArraysCache")
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("keep", [False, True])
def test_windows_experts_and_caches_of_unknown_kind_stay_lossless(adapter, tiny_target, prompt, kind, keep):
    targets = ("attention", "mlp") if kind != "lfm2" else ("self_attn.q_proj", "feed_forward.w1")
    target, drafter = adapter(kind, targets=("attention",) if kind == "qwen3_next" else targets)
    with hybrid.detached(target.model) as model:
        expected = greedy_stepwise(model, prompt, LENGTH, make_prompt_cache(model))
    assert run(target, prompt, GatedLoraProposer(target, drafter, 4, keep=keep), 4)[0] == expected


@pytest.mark.parametrize("keep", [False, True])
def test_an_adapter_that_turns_everything_over_changes_no_token(adapter, answer, prompt, keep):
    target, drafter = adapter("qwen3_5", size=50.0, targets=("attention", "mlp", "delta", "delta_gates"))
    tokens, cycles = run(target, prompt, GatedLoraProposer(target, drafter, 5, keep=keep), 5)
    assert tokens == answer("qwen3_5")[0]
    assert {cycle.accepted for cycle in cycles[:-1]} <= {1, 2}  # little but the first, which is the target's own


@pytest.mark.parametrize("keep", [False, True])
def test_a_verify_cut_by_confidence_leaves_the_text_as_it_is(adapter, answer, prompt, keep):
    target, drafter = adapter("llama")
    policy = Cut(4, "confidence", 0.02, least=1)
    steps = list(decode(target, prompt, GatedLoraProposer(target, drafter, 4, keep=keep), policy, max_tokens=LENGTH))
    assert [token for step in steps for token in step.tokens] == answer("llama")[0]
    offered = [step.cycle.proposed for step in steps[1:]]
    assert min(offered) < max(offered)
    assert all(len(step.cycle.confidence) == step.cycle.proposed for step in steps[1:])


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("ulps", [30.0, 3e4, 1e9])
def test_a_tie_guard_decides_by_single_rows_and_leaves_the_text_as_it_is(adapter, answer, prompt, kind, ulps):
    target, drafter = adapter(kind)
    cache = target.make_cache()
    tokens, cycles = run(target, prompt, GatedLoraProposer(target, drafter, 4), 4, cache, tie_guard=ulps)
    expected, held = answer(kind)
    assert tokens == expected
    assert_same_caches(cache, held, FLOAT32)
    if ulps == 1e9:  # everything is in doubt: a block, taken back, and its first row alone
        assert {(cycle.committed, cycle.redecided, cycle.forwards) for cycle in cycles[:-1]} == {(1, 1, 3)}


def test_a_kept_pending_row_cannot_be_guarded(adapter):
    target, drafter = adapter("llama")
    proposer = GatedLoraProposer(target, drafter, 4, keep=True)
    with pytest.raises(UserError, match="draft without keep"):
        Loop(target, target.make_cache(), proposer, Fixed(4), max_tokens=3, tie_guard=1)


class Foresight(gated_lora.GatedLora):
    """Knows what the target will write after `start` tokens: of a block's noise rows the first `right` are true."""

    def fill(self, text, start, right):
        for name, value in {"text": text, "start": start, "right": right}.items():
            object.__setattr__(self, name, value)
        return self

    def draft(self, tokens, cache, gate=None):
        at = next(entry.offset for entry in cache if hasattr(entry, "offset")) - self.start
        ahead = (self.text + [7] * tokens.shape[1])[at + 1 : at + tokens.shape[1]]
        noise = [token if row < self.right else (token + 1) % 300 for row, token in enumerate(ahead)]
        return self.target.forward(mx.array([[tokens[0, 0].item(), *noise]]), cache).hidden


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_proposals_that_turn_wrong_at_any_row_are_cut_there(adapter, answer, prompt, kind, keep, right):
    target, drafter = adapter(kind)
    expected, held = answer(kind)
    knowing = Foresight(target, drafter.config).fill(expected, len(prompt), right)
    cache = target.make_cache()
    tokens, cycles = run(target, prompt, GatedLoraProposer(target, knowing, 4, keep=keep), 4, cache)
    assert tokens == expected
    assert {cycle.accepted for cycle in cycles[:-1]} == {min(right + 1, 4)}
    assert_same_caches(cache, held, FLOAT32)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_text_that_ends_inside_a_block_leaves_no_row_too_many(adapter, answer, prompt, kind, keep):
    target, drafter = adapter(kind)
    expected, _ = answer(kind)
    for end in range(1, 8):
        loop = Loop(target, target.make_cache(), GatedLoraProposer(target, drafter, 4, keep=keep),
                    Fixed(4, least=1), max_tokens=LENGTH, eos_ids={expected[end]})  # fmt: skip
        tokens = list(loop.prefill(prompt).tokens)
        while not loop.finished:
            tokens += loop.cycle().tokens
        stop = expected.index(expected[end]) + 1
        assert tokens == expected[:stop]
        loop.settle()
        with hybrid.detached(target.model) as model:
            cache = make_prompt_cache(model)
            for token in prompt + expected[:stop]:
                model(mx.array([[token]]), cache=cache)
        assert_same_caches(loop.cache, cache, FLOAT32)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_an_interrupt_leaves_the_caches_at_what_was_emitted(adapter, answer, prompt, kind, keep):
    target, drafter = adapter(kind)
    expected, _ = answer(kind)
    loop = Loop(target, target.make_cache(), GatedLoraProposer(target, drafter, 4, keep=keep), Fixed(4, least=1),
                max_tokens=LENGTH)  # fmt: skip
    tokens = [*loop.prefill(prompt).tokens, *loop.cycle().tokens]
    loop.schedule.observe = lambda cycle: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.cycle()
    loop.settle()
    with hybrid.detached(target.model) as model:
        cache = make_prompt_cache(model)
        for token in prompt + tokens:
            model(mx.array([[token]]), cache=cache)
    assert tokens == expected[: len(tokens)]
    assert_same_caches(loop.cache, cache, FLOAT32)


def test_a_kept_row_is_sent_once(adapter, prompt):
    target, drafter = adapter("llama")
    widths = []

    class Counted(GatedLoraProposer):
        def share(self, cache, transaction):
            begin = transaction.begin
            transaction.begin = lambda rows, tokens=None: (widths.append(rows), begin(rows, tokens))
            super().share(cache, transaction)

    for keep, verify in ((False, 5), (True, 4)):
        widths.clear()
        cycles = run(target, prompt, Counted(target, drafter, 4, keep=keep), 4)[1]
        assert widths[:4] == [4, verify, 4, verify]
        assert {cycle.forwards for cycle in cycles} <= {1, 2}


def test_noise_belongs_to_the_cycle_and_the_seed(adapter, prompt):
    target, drafter = adapter("llama")
    seen = []
    object.__setattr__(drafter, "draft", lambda tokens, cache, gate=None: (
        seen.append(tokens[0, 1:].tolist()), drafter.forward(tokens, (False,) + (True,) * (tokens.shape[1] - 1), cache)
    )[1])  # fmt: skip
    drawn = {}
    for seed in (0, 0, 1):
        seen.clear()
        run(target, prompt, GatedLoraProposer(target, drafter, 4, seed=seed), 4)
        assert drawn.setdefault(seed, list(seen)) == seen
    assert drawn[0][0] != drawn[0][1]
    assert drawn[0][0] != drawn[1][0]


def test_the_pending_row_cannot_be_kept_where_it_is_adapted(adapter):
    target, drafter = adapter("llama")
    with pytest.raises(UserError, match="always_on"):
        GatedLoraProposer(target, drafter, keep=True, always_on=True)


@pytest.mark.parametrize("keep", [False, True])
def test_a_bidirectional_block_and_mask_tokens_stay_lossless(adapter, answer, prompt, keep):
    target, drafter = adapter("llama", causal=False, noise="mask")
    assert run(target, prompt, GatedLoraProposer(target, drafter, 6, keep=keep), 6)[0] == answer("llama")[0]


@pytest.mark.parametrize("keep", [False, True])
def test_quantised_weights_are_adapted_too(adapter, prompt, keep):
    target, drafter = adapter("llama", bits=4)
    expected = greedy_stepwise(target.model, prompt, LENGTH, make_prompt_cache(target.model))
    assert run(target, prompt, GatedLoraProposer(target, drafter, 4, keep=keep), 4)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep", [False, True])
def test_smollm2_writes_its_own_text_whatever_its_adapter_drafts(smollm2, keep, size):
    shape = gated_lora.config_for(smollm2, configuration.AdapterConfig(rank=4), 4)
    drafter = gated_lora.initialise(gated_lora.GatedLora(smollm2, shape), 0)
    for number, name in enumerate(drafter):
        drawn = mx.random.normal(drafter[name].lora_b.shape, key=mx.random.key(number))
        drafter[name].lora_b = 0.02 * drawn
    for text in ("Explain rain to a child.", "Write a function that reverses a list."):
        tokens = smollm2.encode(text)
        options = {"max_tokens": 40, "eos_ids": smollm2.eos_ids}
        plain = [token for step in decode(smollm2, tokens, **options) for token in step.tokens]
        assert run(smollm2, tokens, GatedLoraProposer(smollm2, drafter, size, keep=keep), size, **options)[0] == plain
