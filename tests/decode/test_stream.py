"""Text, stops, caches handed on, and what is refused. The oracle is mlx-lm's own stream_generate on the same model."""

import json
import warnings

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import tiny
from decode.proposers import DFlashProposer, PromptLookup, Scripted
from decode.schedule import Cut
from decode.stream import Writer, generate, stream_generate
from drafter import hybrid
from drafter import target as targets
from kernels.errors import UserError
from oracles import assert_same_caches

LENGTH = 40
FLOAT32 = 1e-4
KINDS = ("llama", "gemma3_text", "qwen3_5")


@pytest.fixture(scope="module")
def reference(tiny_target, prompt):
    """reference(kind): mlx-lm's responses for LENGTH tokens."""
    found = {}

    def responses(kind):
        if kind not in found:
            target = tiny_target(kind)
            with hybrid.detached(target.model) as model:
                found[kind] = list(mlx_lm.stream_generate(model, target.tokenizer, prompt, max_tokens=LENGTH))
        return found[kind]

    return responses


def ids(responses):
    return [response.token for response in responses]


def right(prompt, reference, kind):
    """A proposer that is always right."""
    return Scripted(prompt + ids(reference(kind)))


def stopping_at(target, *eos):
    """The target's tokenizer with other end tokens."""
    return TokenizerWrapper(target.tokenizer._tokenizer, type(target.tokenizer.detokenizer), eos_token_ids=eos)


def fresh_cache(target, tokens):
    cache = make_prompt_cache(target.model)
    target.model(mx.array([tokens]), cache=cache)
    return cache


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_responses_are_mlx_lms_field_by_field(tiny_target, prompt, reference, kind, speculative):
    drafter = {"drafter": right(prompt, reference, kind), "block_size": 6} if speculative else {}
    ours = list(stream_generate(tiny_target(kind), None, prompt, max_tokens=LENGTH, **drafter))
    for mine, theirs in zip(ours, reference(kind), strict=True):
        for name in ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason"):
            assert getattr(mine, name) == getattr(theirs, name)
        np.testing.assert_allclose(np.array(mine.logprobs), np.array(theirs.logprobs), atol=1e-3)
        assert min(mine.prompt_tps, mine.generation_tps, mine.peak_memory) > 0
    assert (ours[0].cycle, ours[-1].finish_reason) == (None, "length")


def test_only_accepted_proposals_come_from_the_draft(tiny_target, prompt, reference):
    drafter = right(prompt, reference, "llama")
    ours = list(stream_generate(tiny_target("llama"), None, prompt, drafter, max_tokens=14, block_size=6))
    assert [response.from_draft for response in ours] == [False, *[True] * 5, False, *[True] * 5, False, False]
    assert [response.cycle and response.cycle.committed for response in ours] == [None, *[6] * 12, 1]


def test_text_is_the_detokenized_ids_and_generate_joins_it(tiny_target, prompt, reference, capsys):
    target, drafter = tiny_target("llama"), right(prompt, reference, "llama")
    options = {"max_tokens": LENGTH, "block_size": 5}
    text = generate(target, target.tokenizer, prompt, drafter, **options)
    assert text == target.tokenizer.decode(ids(reference("llama"))).removeprefix(" ")  # mlx-lm drops a first space
    assert generate(target, target.tokenizer, prompt, drafter, verbose=True, **options) == text
    assert f"Generation: {LENGTH} tokens" in capsys.readouterr().out


def test_a_prompt_may_be_text_ids_or_an_array(tiny_target):
    target, text = tiny_target("qwen3"), "the river ran past"
    tokens = target.tokenizer.encode(text)
    expected = ids(mlx_lm.stream_generate(target.model, target.tokenizer, text, max_tokens=9))
    for prompt in (text, tokens, tuple(tokens), mx.array(tokens), np.array(tokens)):
        assert ids(stream_generate(target, None, prompt, max_tokens=9)) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1, 6, 7, 9, 12])
def test_eos_anywhere_in_a_block_ends_text_count_and_cache(tiny_target, prompt, reference, kind, index):
    target, expected = tiny_target(kind), ids(reference(kind))
    end = next(i for i in range(index, LENGTH) if expected[i] not in expected[:i])
    tokenizer = stopping_at(target, expected[end])
    theirs = list(mlx_lm.stream_generate(target.model, tokenizer, prompt, max_tokens=LENGTH))
    for drafter in (None, right(prompt, reference, kind)):
        cache, records = target.make_cache(), []
        block = {"block_size": 6} if drafter else {}
        ours = list(
            stream_generate(
                target, tokenizer, prompt, drafter,
                max_tokens=LENGTH, prompt_cache=cache, on_cycle=records.append, **block,
            )
        )  # fmt: skip
        assert ids(ours) == ids(theirs) == expected[: end + 1]
        assert [response.text for response in ours] == [response.text for response in theirs]
        assert (ours[-1].finish_reason, ours[-1].generation_tokens) == ("stop", end + 1)
        assert sum(record.committed for record in records) == end  # the prefill's token belongs to no cycle
        assert all(record.accepted <= record.committed <= record.accepted + 1 for record in records)
        assert_same_caches(cache, fresh_cache(target, prompt + expected[: end + 1]), FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculative", [False, True])
def test_a_stop_string_ends_the_text_before_it_wherever_it_falls(tiny_target, prompt, reference, kind, speculative):
    target, expected = tiny_target(kind), reference(kind)
    whole = "".join(response.text for response in expected)
    for begin in range(2, 26, 3):
        stop = whole[begin : begin + 4].rstrip()  # the detokenizer itself holds a last space back
        found = whole.index(stop)
        cache, records = target.make_cache(), []
        options = {"drafter": right(prompt, reference, kind), "block_size": 7} if speculative else {}
        ours = list(
            stream_generate(
                target, None, prompt,
                max_tokens=LENGTH, stop=stop, prompt_cache=cache, on_cycle=records.append, **options,
            )
        )  # fmt: skip
        assert "".join(response.text for response in ours) == whole[:found]
        assert ours[-1].finish_reason == "stop"
        count = len(ours)
        assert ids(ours) == ids(expected)[:count]
        assert stop in target.tokenizer.decode(ids(ours))
        assert stop not in target.tokenizer.decode(ids(ours)[:-1])
        assert sum(record.committed for record in records) == count - 1
        assert_same_caches(cache, fresh_cache(target, prompt + ids(ours)), FLOAT32)


def test_the_first_of_several_stop_strings_wins_and_none_found_changes_nothing(tiny_target, prompt, reference):
    target, whole = tiny_target("llama"), "".join(response.text for response in reference("llama"))
    stops = [whole[20:23], whole[10:12], "no such text"]
    first = min(whole.index(stop) for stop in stops[:2])
    assert generate(target, None, prompt, max_tokens=LENGTH, stop=stops) == whole[:first]
    assert generate(target, None, prompt, max_tokens=LENGTH, stop=whole[-3:] + "x") == whole


class Spelling:
    """A detokenizer whose tokens are text already; `finalize` gives out what it kept back."""

    def __init__(self):
        self.last_segment, self.kept = "", ""

    def add_token(self, token):
        self.last_segment, self.kept = self.kept + token.rstrip("_"), "_" * token.count("_")

    def finalize(self):
        self.last_segment, self.kept = self.kept, ""


@pytest.mark.parametrize(
    ("tokens", "stops", "pieces"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""]),
        (["ab", "cd"], ["xyz"], ["ab", "cd", ""]),
        (["a<", "b", "<e", "nd>", "c"], ["<end>"], ["a", "<b", "", ""]),  # held, let go, held, stopped
        (["a<e", "n"], ["<end>"], ["a", "", "<en"]),  # an unfinished stop is text after all
        (["aab"], ["ab"], ["a"]),
        (["a", "a", "b"], ["ab"], ["", "a", ""]),
        (["xabyab"], ["by", "ab"], ["x"]),
        (["x", "__"], ["x_"], ["", "", ""]),  # shows only when the detokenizer is flushed
    ],
)
def test_text_that_may_begin_a_stop_is_held_back(tokens, stops, pieces):
    writer, found = Writer(Spelling(), stops), []
    for token in tokens:
        text, reason = writer.add(token)
        found.append(text)
        if reason:
            break
    else:
        found.append(writer.finish()[0])
    assert found == pieces
    assert writer.ended == any(stop in "".join(tokens) for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculative", [False, True])
def test_closing_after_any_token_leaves_the_cache_at_that_token(tiny_target, prompt, reference, kind, speculative):
    target, expected = tiny_target(kind), ids(reference(kind))
    for count in (1, 2, 4, 7, 8, 12):
        cache = target.make_cache()
        options = {"drafter": right(prompt, reference, kind), "block_size": 6} if speculative else {}
        stream = stream_generate(target, None, prompt, max_tokens=LENGTH, prompt_cache=cache, **options)
        for _ in range(count):
            next(stream)
        stream.close()
        assert_same_caches(cache, fresh_cache(target, prompt + expected[:count]), FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_handed_on_continues_as_mlx_lm_continues(tiny_target, prompt, reference, kind):
    target = tiny_target(kind)
    caches = [target.make_cache() for _ in range(3)]
    turns = [prompt, [9, 8, 7], [30]]
    for turn in turns:
        options = {"max_tokens": 11, "prompt_cache": caches[0]}
        expected = ids(mlx_lm.stream_generate(target.model, target.tokenizer, turn, **options))
        for drafter, cache in ((None, caches[1]), (PromptLookup(2, 1), caches[2])):
            block = {"block_size": 5} if drafter else {}
            ours = stream_generate(target, None, turn, drafter, max_tokens=11, prompt_cache=cache, **block)
            assert ids(ours) == expected
            assert_same_caches(cache, caches[0], FLOAT32)


def test_a_cache_of_mlx_lms_own_making_takes_rows_back_too(tiny_target, prompt, reference):
    target, expected = tiny_target("qwen3_5"), ids(reference("qwen3_5"))
    cache = make_prompt_cache(target.model)
    wrong = Scripted(lambda position, count: [299] * count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is re-run, which would be announced
        ours = stream_generate(target, None, prompt, wrong, max_tokens=LENGTH, block_size=4, prompt_cache=cache)
        assert ids(ours) == expected
    assert_same_caches(cache, fresh_cache(target, prompt + expected), FLOAT32)


def test_a_pinned_cache_of_max_kv_size_gives_mlx_lms_text(tiny_target, prompt):
    target = tiny_target("qwen3")
    expected = ids(mlx_lm.stream_generate(target.model, target.tokenizer, prompt, max_tokens=LENGTH, max_kv_size=17))
    free = ids(mlx_lm.stream_generate(target.model, target.tokenizer, prompt, max_tokens=LENGTH))
    assert expected != free
    drafter = Scripted(prompt + expected)
    ours = stream_generate(target, None, prompt, drafter, max_tokens=LENGTH, block_size=6, max_kv_size=17)
    assert ids(ours) == expected


def test_a_quantised_cache_gives_mlx_lms_text(tiny_target, prompt):
    target = tiny_target("llama")
    options = {"max_tokens": LENGTH, "kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 31}
    expected = ids(mlx_lm.stream_generate(target.model, target.tokenizer, prompt, **options))
    assert ids(stream_generate(target, None, prompt, Scripted(prompt + expected), block_size=6, **options)) == expected
    assert expected != ids(stream_generate(target, None, prompt, max_tokens=LENGTH))


def test_no_cap_runs_to_eos(tiny_target, prompt, reference):
    target, expected = tiny_target("llama"), ids(reference("llama"))
    end = next(i for i in range(20, LENGTH) if expected[i] not in expected[:i])
    ours = list(stream_generate(target, stopping_at(target, expected[end]), prompt, max_tokens=-1))
    assert (ids(ours), ours[-1].finish_reason) == (expected[: end + 1], "stop")


@pytest.fixture(scope="module")
def short_target(tmp_path_factory):
    """A target whose context is 40 tokens."""
    path = tiny.folder("llama", tmp_path_factory.getbasetemp(), max_position_embeddings=40)
    return targets.load(str(path), dtype="float32")


def test_the_context_ends_the_text_and_says_so_first(short_target, prompt):
    for drafter in (None, PromptLookup(2, 1)):
        block = {"block_size": 8} if drafter else {}
        with pytest.warns(UserWarning, match="context of 40 ends the text after 13 tokens, before max_tokens 30"):
            stream = stream_generate(short_target, None, prompt, drafter, max_tokens=30, **block)
        ours = list(stream)
        assert (len(ours), ours[-1].finish_reason) == (13, "length")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(stream_generate(short_target, None, prompt, max_tokens=13))) == 13
        assert len(list(stream_generate(short_target, None, prompt, max_tokens=-1))) <= 13


def test_a_prompt_that_fills_the_context_is_refused_with_numbers(short_target, prompt):
    with pytest.raises(UserError, match="prompt: 40 tokens leave no room in the target's context of 40; shorten it"):
        stream_generate(short_target, None, [5] * 40)
    cache = short_target.make_cache()
    list(stream_generate(short_target, None, prompt, max_tokens=2, prompt_cache=cache))
    with pytest.raises(UserError, match="11 tokens after 29 tokens in prompt_cache leave no room"):
        stream_generate(short_target, None, [5] * 11, prompt_cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": max}, "sampler: cannot be honoured; decoding here is greedy"),
        ({"logits_processors": [max]}, "logits_processors: cannot be honoured"),
        ({"temperature": 0.7}, "temperature: cannot be honoured"),
        ({"draft_model": 1}, "draft_model: cannot be honoured; pass a DFlash drafter"),
        ({"num_draft_tokens": 3}, "num_draft_tokens: cannot be honoured; pass block_size="),
        ({"max_token": 3}, "max_token: unknown argument; did you mean max_tokens?"),
        ({"zzz": 3}, "zzz: unknown argument$"),
        ({"max_tokens": 0}, "max_tokens 0: expected 1 or more"),
        ({"max_tokens": -2}, "max_tokens -2: expected 1 or more"),
        ({"prefill_step_size": 0}, "prefill_step_size 0"),
        ({"max_kv_size": 4}, "max_kv_size 4: mlx-lm pins"),
        ({"max_kv_size": 64}, "max_kv_size 64: target .* makes its own caches"),
        ({"block_size": 4}, "block_size 4: there is no drafter"),
        ({"drafter": PromptLookup(2)}, "block_size: ngram-2 has none of its own"),
        ({"drafter": PromptLookup(2), "block_size": 1}, "block size 1: .*give 2 or more"),
        ({"drafter": "folder"}, "drafter: expected a DFlash drafter"),
        ({"stop": [""]}, "stop \\[''\\]: expected non-empty"),
        ({"prompt_cache": []}, "prompt_cache: 0 entries for a target of 3"),
        ({"kv_bits": 7}, "kv_bits 7, kv_group_size 64: .*bits 7 is not supported"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_bits 8, kv_group_size 48: .*group size 48 is not supported"),
        ({"kv_bits": 8, "prompt_cache": [RotatingKVCache(9)] * 3}, "kv_bits 8: mlx-lm cannot quantise a Rotating"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line_before_anything_runs(tiny_target, prompt, options, message):
    with pytest.raises(UserError, match=message) as refusal:
        stream_generate(tiny_target("llama"), None, prompt, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "empty"), ([3, 311], "token id 311 .* vocabulary of 311"), ([-1], "token id -1"),
     ([[1, 2]], "flat list"), ([{"role": "user"}], "encode messages with target.encode")],
)  # fmt: skip
def test_a_prompt_that_cannot_be_fed_is_refused(tiny_target, prompt, message):
    with pytest.raises(UserError, match=f"prompt: .*{message}"):
        stream_generate(tiny_target("llama"), None, prompt)


def test_mlx_lms_defaults_may_be_spelled_out(tiny_target, prompt, reference):
    spelled = {"sampler": None, "logits_processors": None, "draft_model": None, "temp": 0.0, "prompt_cache": None}
    ours = stream_generate(tiny_target("llama"), None, prompt, max_tokens=LENGTH, **spelled)
    assert ids(ours) == ids(reference("llama"))


def test_a_model_in_the_place_of_a_target_is_named(tiny_target, prompt):
    with pytest.raises(UserError, match="expected a Target, found Model; drafter.target.load makes one"):
        stream_generate(tiny_target("llama").model, None, prompt)


def test_a_block_larger_than_the_drafter_was_trained_for_is_refused_and_its_own_is_the_default(
    tiny_target, tiny_drafter, prompt, reference
):
    target = tiny_target("llama")
    drafter, records = tiny_drafter(target, block_size=6), []
    with pytest.raises(UserError, match="block size 7: the drafter was trained at block size 6"):
        stream_generate(target, None, prompt, drafter, block_size=7)
    ours = stream_generate(target, None, prompt, drafter, max_tokens=LENGTH, on_cycle=records.append)
    assert ids(ours) == ids(reference("llama"))
    assert {record.block_size for record in records} >= {6}


def test_a_text_can_be_written_to_json(tiny_target, prompt):
    """Response counters are plain numbers, not arrays that keep a graph alive."""
    response = next(stream_generate(tiny_target("llama"), None, prompt))
    plain = {name: value for name, value in vars(response).items() if name not in ("logprobs", "cycle")}
    assert json.loads(json.dumps(plain)) == plain


def test_a_schedule_decides_the_block_and_leaves_the_text_alone(tiny_target, tiny_drafter, prompt):
    target = tiny_target("llama")
    drafter, seen = tiny_drafter(target), []
    ask = lambda **options: [one.token for one in stream_generate(target, None, prompt, max_tokens=23, **options)]
    policy = Cut(6, "confidence", 0.02)
    found = ask(drafter=DFlashProposer(target, drafter, 2), schedule=policy, on_cycle=seen.append)
    assert found == ask()
    widths = {cycle.proposed for cycle in seen if cycle.block_size == 6}
    assert len(widths) > 1 and all(len(cycle.confidence) == cycle.proposed for cycle in seen)
    with pytest.raises(UserError, match="block_size 3: the schedule decides it"):
        ask(drafter=drafter, block_size=3, schedule=policy)
    with pytest.raises(UserError, match="schedule: there is no drafter to use it"):
        ask(schedule=policy)
