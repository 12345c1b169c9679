"""Targets: what is tapped, embedded and scored is what mlx-lm's model computes, and the model is left as it was.

The oracles walk mlx-lm's layers by hand. R rows, T tokens, D hidden.
"""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask

import tiny
from drafter import hybrid
from drafter import target as targets
from kernels.errors import UserError

HYBRIDS = ("qwen3_5", "qwen3_next")
KINDS = ("llama", "qwen2", "qwen3", "gemma3_text", "gemma3", "gemma2", "granite", "cohere", "llama-4bit", *HYBRIDS)
WINDOW = 11  # of the small gemma3
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}  # of the largest value: other shapes round otherwise, layer on layer
# gemma3 rounds √96 to bfloat16
EMBEDDING_SCALE = {"gemma3_text": 9.8125, "gemma3": 9.8125, "gemma2": 96**0.5, "granite": 3.0}
LOGIT_SCALE = {"granite": 1 / 5, "cohere": 0.25}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder below which the small models lie."""
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def load(base):
    """load(kind, dtype="float32"): a small target, loaded once; KIND-4bit is its conversion by mlx_lm.convert."""
    loaded = {}

    def load(kind, dtype="float32"):
        if (kind, dtype) not in loaded:
            name, _, quantised = kind.partition("-")
            folder = tiny.folder(name, base)
            loaded[kind, dtype] = targets.load(tiny.quantised(folder, base) if quantised else folder, dtype=dtype)
        return loaded[kind, dtype]

    return load


@pytest.fixture(scope="module")
def tokens():
    """Token ids [2,23], longer than the small gemma3's window."""
    return mx.array(np.random.default_rng(7).integers(5, tiny.VOCABULARY, (2, 23)))


def same(first, second):
    """Bit for bit."""
    return first.dtype == second.dtype and mx.array_equal(first, second).item()


def inner(model):
    """The module of a small model that owns embedding, layers and norm."""
    return model.language_model.model if "language_model" in model else model.model


def masks(kind, T, documents=None):
    """The attention mask of each layer [.., T,T], by hand."""
    causal = np.tril(np.ones((T, T), bool))
    if documents is not None:
        documents = np.array(documents)
        causal = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
    near = np.arange(T)[:, None] - np.arange(T)[None] < WINDOW
    count = tiny.SHAPES["gemma3_text" if kind == "gemma3" else kind]["num_hidden_layers"]
    sliding = [kind.startswith("gemma3") and (index + 1) % 3 != 0 for index in range(count)]
    return [mx.array(causal & near if slides else causal) for slides in sliding]


def by_hand(kind, model, tokens):
    """(first layer's input, each layer's output, hidden state) of a small model, layer after layer, by hand."""
    kind = kind.partition("-")[0]
    body = inner(model)
    h = first = body.embed_tokens(tokens) * EMBEDDING_SCALE.get(kind, 1.0)
    outputs = []
    with hybrid.detached(model):
        for layer, mask in zip(body.layers, masks(kind, tokens.shape[1])):
            h = layer(h, None if getattr(layer, "is_linear", False) else mask, None)
            outputs.append(h)
    return first, outputs, body.norm(h)


def difference(found, expected):
    """The largest difference, as a fraction of the largest expected value."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    assert found.shape == expected.shape
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


def close(found, expected, dtype="float32"):
    assert difference(found, expected) <= TOLERANCE[dtype]


# --- what is computed


@pytest.mark.parametrize("kind", KINDS)
def test_a_tapped_forward_and_the_head_are_the_plain_model_bit_for_bit(load, tokens, kind):
    target = load(kind)
    plain = target.model(tokens)
    tapped = target.forward(tokens, taps=tuple(range(target.num_layers)))
    assert same(tapped.hidden, target.forward(tokens).hidden)
    assert same(target.score(tapped.hidden), plain)
    assert plain.std().item() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_taps_hidden_and_embedding_are_those_of_a_walk_over_the_layers(load, tokens, kind):
    target = load(kind)
    first, outputs, hidden = by_hand(kind, target.model, tokens)
    found = target.forward(tokens, taps=tuple(range(target.num_layers)))
    close(target.embed(tokens), first)
    for tap, output in zip(found.taps, outputs, strict=True):
        close(tap, output)
    close(found.hidden, hidden)
    assert min(np.abs(np.array(one - other)).max() for one, other in zip(outputs, outputs[1:])) > 0.1


def test_taps_come_in_the_order_asked(load, tokens):
    target = load("qwen3")
    each = target.forward(tokens, taps=(0, 1, 2, 3, 4)).taps
    for asked in ((3, 1), (4,), (2, 0, 4), ()):
        found = target.forward(tokens, taps=asked).taps
        assert len(found) == len(asked)
        assert all(same(tap, each[index]) for tap, index in zip(found, asked))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma3", "qwen3_5"])
def test_a_cached_forward_gives_the_taps_of_its_rows_and_fills_the_cache(load, tokens, kind):
    target = load(kind)
    whole = target.forward(tokens[:1], taps=(0, 2))
    cache = target.make_cache()
    parts = [
        target.forward(tokens[:1, start:stop], cache, taps=(0, 2)) for start, stop in ((0, 13), (13, 14), (14, 23))
    ]
    close(mx.concatenate([part.hidden for part in parts], axis=1), whole.hidden)
    for index in range(2):
        close(mx.concatenate([part.taps[index] for part in parts], axis=1), whole.taps[index])
    assert {entry.offset for entry in cache if hasattr(entry, "offset")} == {23}


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_scores_honour_the_soft_cap_and_the_multiplier(load, kind):
    target = load(kind)
    hidden = mx.random.normal((3, 2, 96), key=mx.random.key(2))
    table = target.model.lm_head.weight if kind == "granite" else inner(target.model).embed_tokens.weight
    expected = np.array(hidden) @ np.array(table).T * LOGIT_SCALE.get(kind, 1.0)
    if kind == "gemma2":
        assert np.abs(expected).max() > 3
        expected = np.tanh(expected / 1.5) * 1.5
    np.testing.assert_allclose(np.array(target.score(hidden)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(96,), (5, 96), (2, 3, 96), (2, 3, 5, 96)])
def test_scores_keep_the_leading_axes(load, shape):
    target = load("llama")
    hidden = mx.random.normal(shape, key=mx.random.key(2))
    expected = target.model.lm_head(hidden)
    found = target.score(hidden)
    assert found.shape == (*shape[:-1], tiny.VOCABULARY)
    close(found, expected)


def test_scores_differentiate_with_respect_to_hidden_states(load):
    target = load("gemma2")
    hidden = 0.1 * mx.random.normal((4, 96), key=mx.random.key(2))
    table = inner(target.model).embed_tokens.weight
    found = mx.grad(lambda h: target.score(h)[:, 7].sum())(hidden)
    expected = mx.grad(lambda h: (mx.tanh((h @ table.T) / 1.5) * 1.5)[:, 7].sum())(hidden)
    assert mx.abs(expected).max().item() > 0.05
    close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedding_scale_is_the_models(load, kind):
    assert load(kind).embedding_scale == pytest.approx(EMBEDDING_SCALE.get(kind, 1.0), rel=1e-6)


def test_sizes_are_those_of_the_configuration(load):
    for kind in ("llama", "gemma3"):
        target = load(kind)
        found = (target.hidden_size, target.vocab_size, target.max_length, target.eos_ids)
        assert found == (96, tiny.VOCABULARY, 512, {tiny.SPECIAL.index("<|im_end|>")})
    assert (load("llama").num_layers, load("gemma3").num_layers) == (3, 4)
    assert [type(entry).__name__ for entry in load("gemma3").make_cache()] == [
        "RotatingKVCache", "RotatingKVCache", "KVCache", "RotatingKVCache",
    ]  # fmt: skip


# --- the model is left as it was


def classes(model):
    return [type(module) for _, module in model.named_modules()]


def test_every_call_leaves_classes_and_parameters_as_they_were(load, tokens):
    target = load("gemma3")
    before, digest = classes(target.model), target.live_digest()
    hidden = target.forward(tokens, target.make_cache(), taps=(0, 3)).hidden
    target.embed(tokens)
    target.score(hidden)
    target.forward_packed(tokens, mx.ones(tokens.shape), taps=(1,))
    assert classes(target.model) == before
    assert target.live_digest() == digest


class Calls(nn.Module):
    """Calls a function where a norm stood, and returns what the norm would."""

    def __init__(self, norm, function):
        super().__init__()
        self.norm, self.function = norm, function

    def __call__(self, x):
        self.function()
        return self.norm(x)


def test_a_forward_that_fails_leaves_classes_as_they_were(base, tokens):
    target = targets.load(tiny.folder("llama", base), dtype="float32")
    target.model.model.norm = Calls(target.model.model.norm, lambda: 1 / 0)
    before = classes(target.model)
    with pytest.raises(ZeroDivisionError):
        target.forward(tokens, taps=(0, 2))
    assert classes(target.model) == before
    with pytest.raises(ValueError):
        target.score(mx.zeros((2, 95)))
    with pytest.raises(IndexError):
        target.forward(tokens, taps=(0, 3))
    assert classes(target.model) == before


def test_a_second_model_of_the_class_is_untouched_while_the_first_is_tapped(load, base, tokens):
    first = targets.load(tiny.folder("llama", base), dtype="float32")
    second = load("llama")
    alone, before, seen = second.model(tokens), classes(second.model), []
    norm = first.model.model.norm
    first.model.model.norm = Calls(norm, lambda: seen.append((classes(second.model), second.model(tokens))))
    first.forward(tokens, taps=(0, 1, 2))
    ((during, output),) = seen
    assert during == before
    assert same(output, alone)


def test_a_target_is_frozen(load):
    for kind in ("llama", "llama-4bit"):
        assert tree_flatten(load(kind).model.trainable_parameters()) == []


def test_the_live_digest_sees_one_changed_weight(base, tokens):
    target = targets.load(tiny.folder("llama", base), dtype="float32")
    before = target.live_digest()
    target.forward(tokens, taps=(0,))
    assert target.live_digest() == before
    weight = target.model.model.layers[1].mlp.up_proj.weight
    target.model.model.layers[1].mlp.up_proj.weight = mx.where(
        mx.arange(weight.size).reshape(weight.shape) == 7, 0, weight
    )
    assert target.live_digest() != before


# --- packed rows

DOCUMENTS = [[1] * 14 + [2] * 2 + [3] * 7, [1] * 4 + [2] * 16 + [0] * 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "granite", "qwen3_5"])
def test_packed_documents_are_as_each_alone(load, tokens, kind, dtype):
    target = load(kind, dtype)
    documents = mx.array(DOCUMENTS)
    packed = target.forward_packed(tokens, documents, taps=(1, 0))
    for row, ids in enumerate(DOCUMENTS):
        for document in set(ids) - {0}:
            places = [place for place, found in enumerate(ids) if found == document]
            span = slice(places[0], places[-1] + 1)
            alone = target.forward(tokens[row, span][None], taps=(1, 0))
            close(packed.hidden[row, span][None], alone.hidden, dtype)
            for tap, other in zip(packed.taps, alone.taps, strict=True):
                close(tap[row, span][None], other, dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma2", *HYBRIDS])
def test_other_tokens_in_other_documents_change_no_bit(load, tokens, kind):
    target = load(kind)
    documents = mx.array(DOCUMENTS)
    changed = mx.where(documents == 2, (tokens + 17) % 300, tokens)
    first, second = (target.forward_packed(ids, documents).hidden for ids in (tokens, changed))
    kept = (documents != 2)[..., None]
    assert same(mx.where(kept, first, 0), mx.where(kept, second, 0))
    assert not same(first, second)


def test_a_leak_between_documents_would_be_seen(load, tokens, monkeypatch):
    target = load("llama")
    assert target.rows_at_once is None  # found out before the leak is planted
    documents = mx.array(DOCUMENTS)
    apart = target.forward_packed(tokens, documents).hidden
    monkeypatch.setattr(
        targets.packed.PackedCache, "make_mask", lambda self, N, **options: create_causal_mask(N)[None, None]
    )
    assert difference(target.forward_packed(tokens, documents).hidden, apart) > 5 * TOLERANCE["bfloat16"]


def test_a_dtype_that_mlx_cannot_run_the_target_in_is_refused_in_one_line(base):
    """Experts on a CPU: MLX gathers their products in float32 alone."""
    with pytest.raises(UserError, match=r"MLX cannot run it in bfloat16 here \(.*float32.*\); choose another dtype"):
        targets.load(tiny.folder("qwen3_next", base), dtype="bfloat16")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_target_whose_attention_ignores_the_masks_is_refused(base, tokens, monkeypatch, kind):
    target = targets.load(tiny.folder(kind, base), dtype="float32")
    monkeypatch.setattr(
        targets.packed.PackedCache, "make_mask", lambda self, N, **options: create_causal_mask(N)[None, None]
    )
    with pytest.raises(UserError, match="does not keep packed documents apart"):
        target.forward_packed(tokens, mx.array(DOCUMENTS))


def test_a_model_that_takes_masks_for_heads_is_given_one_row_at_a_time(load):
    """gemma2 groups its heads on an axis of their own, so that a mask [R,1,T,T] would meet heads, not rows."""
    assert load("gemma2").rows_at_once == 1
    assert load("llama").rows_at_once is None and load("gemma3").rows_at_once is None


def test_a_target_with_a_state_that_masks_do_not_reach_is_refused(load, tokens):
    with pytest.raises(UserError, match="its layers keep ArraysCache.*cannot be trained"):
        load("lfm2").forward_packed(tokens, mx.array(DOCUMENTS))


# --- prompts


@pytest.fixture(scope="module")
def chat(base):
    """A small target with a chat template."""
    return targets.load(tiny.folder("llama", base, chat_template=True), dtype="float32")


def ids(text):
    return tiny.tokenizer().encode(text).ids


def test_a_prompt_is_put_in_the_chat_template(chat):
    user = "<|im_start|>user\nthe mill<|im_end|>\n<|im_start|>assistant\n"
    assert chat.encode("the mill") == ids(user) == chat.encode([{"role": "user", "content": "the mill"}])
    assert chat.encode("the mill", system="Be brief") == ids("<|im_start|>system\nBe brief<|im_end|>\n" + user)
    turns = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "the mill"))
    ]
    assert chat.encode(turns) == ids("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" + user)
    assert chat.raw_reason() is None


def test_a_prompt_is_fed_raw_when_asked_or_without_a_template_and_says_why(chat, load):
    turns = [{"role": "user", "content": "the mill"}, {"role": "user", "content": "a river"}]
    for target, raw in ((chat, True), (load("llama"), False)):
        assert target.encode("the mill", raw=raw) == ids("the mill")
        assert target.encode("the mill", raw=raw, system="Be brief") == ids("Be brief\nthe mill")
        assert target.encode(turns, raw=raw) == ids("the mill\na river")
    assert chat.raw_reason(raw=True) == "raw was asked for"
    assert load("llama").raw_reason() == f"target {load('llama').source} has no chat template"


def edited(folder, tmp, file, change):
    """A copy of a model folder with one JSON file changed."""
    copy = shutil.copytree(folder, tmp / "copy")
    content = json.loads((copy / file).read_text())
    change(content)
    (copy / file).write_text(json.dumps(content))
    return copy


@pytest.mark.parametrize("text", ["half \ud800 a character", b"a\xff".decode(errors="surrogateescape")])
def test_text_that_is_not_unicode_is_refused_in_one_line(load, text):
    for options in ({"prompt": text}, {"prompt": "fine", "system": text}):
        with pytest.raises(UserError, match="is not valid Unicode"):
            load("llama").encode(**options)


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_raw_and_not_before_a_template(base, tmp_path):
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    token = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {token["id"]: token}}
    folder = tiny.folder("llama", base, chat_template=True)
    target = targets.load(
        edited(folder, tmp_path, "tokenizer.json", lambda found: found.update(post_processor=processor)),
        dtype="float32",
    )
    assert target.encode("the mill", raw=True) == [0, *ids("the mill")]
    assert target.encode("the mill") == ids("<|im_start|>user\nthe mill<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_refuses_a_role_is_told_in_one_line(base, tmp_path):
    folder = tiny.folder("llama", base, chat_template=True)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    copy = edited(folder, tmp_path, "tokenizer_config.json", lambda found: found.update(chat_template=refusing))
    target = targets.load(copy, dtype="float32")
    assert target.encode("hi") == ids("x")
    with pytest.raises(UserError, match=r"refuses the roles system, user \(System role not supported\)"):
        target.encode("hi", system="Be brief")


# --- the mask token


def unchanged(found):
    """Leaves a file's content as it is."""


def spare(base, tmp_path, change=unchanged, **overrides):
    """The spare id of a small target with a template whose tokenizer_config.json was changed."""
    folder = tiny.folder("llama", base, chat_template=True, **overrides)
    return targets.load(edited(folder, tmp_path, "tokenizer_config.json", change), dtype="float32").spare_id()


def test_the_spare_id_is_the_tokenizers_mask_token_first(base, tmp_path):
    found = spare(base, tmp_path, lambda config: config.update(mask_token="<|spare|>"), vocab_size=320)
    assert found == (4, "the tokenizer's mask token")


def test_the_spare_id_is_the_first_row_past_the_vocabulary_second(base, tmp_path):
    assert spare(base, tmp_path, vocab_size=320) == (311, "the first embedding row past the tokenizer's vocabulary")


def test_the_spare_id_is_an_unused_special_token_third(base, tmp_path):
    """<|endoftext|> begins, <|im_end|> ends, <|im_start|> stands in the template, <|pad|> pads."""
    assert spare(base, tmp_path) == (4, "the unused special token <|spare|>")


def test_a_target_without_a_spare_id_asks_for_one(base, tmp_path):
    with pytest.raises(UserError, match="no spare token id for the mask; name one with drafter.mask_token_id=ID"):
        spare(base, tmp_path, lambda config: config.update(chat_template="<|im_start|><|spare|>"))


# --- identity


def test_identity_names_the_checkpoint_whatever_the_compute_dtype(load):
    first, second = load("llama"), load("llama", "bfloat16")
    assert first.identity() == second.identity() | {"dtype": "float32"}
    assert second.dtype == "bfloat16" and second.forward(mx.array([[5, 6]])).hidden.dtype == mx.bfloat16
    assert first.identity().keys() == {"source", "fingerprint", "tokenizer_sha256", "template_sha256", "dtype"}


def test_quantising_or_other_weights_make_another_target(load, base):
    found = [load("llama"), load("llama-4bit"), targets.load(tiny.folder("llama", base, seed=2), dtype="float32")]
    assert len({target.fingerprint for target in found}) == 3
    assert len({target.tokenizer_sha256 for target in found}) == 1


def test_template_and_vocabulary_have_digests_of_their_own(load, chat, base, tmp_path):
    plain = load("llama")
    assert plain.template_sha256 is None and chat.template_sha256 is not None
    assert (chat.fingerprint, chat.tokenizer_sha256) == (plain.fingerprint, plain.tokenizer_sha256)

    def add_token(found):
        found["added_tokens"].append(found["added_tokens"][-1] | {"id": 311, "content": "<|new|>"})

    copy = edited(tiny.folder("llama", base, vocab_size=320), tmp_path, "tokenizer.json", add_token)
    assert targets.load(copy, dtype="float32").tokenizer_sha256 != plain.tokenizer_sha256


def test_quantised_weights_stay_quantised_in_any_compute_dtype(load):
    for dtype in ("float32", "bfloat16"):
        layer = load("llama-4bit", dtype).model.model.layers[0].mlp.up_proj
        assert isinstance(layer, nn.QuantizedLinear)
        assert layer.weight.dtype == mx.uint32 and str(layer.scales.dtype) == f"mlx.core.{dtype}"


# --- what is refused


def refusal(name, **options):
    """The one line with which loading is refused."""
    with pytest.raises(UserError) as caught:
        targets.load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_dtype_is_refused_with_the_choices(base):
    line = refusal(tiny.folder("llama", base), dtype="float64")
    assert line == "dtype 'float64': expected one of float32, bfloat16, float16"


def test_an_architecture_mlx_lm_does_not_know_is_refused_with_its_version(base, tmp_path):
    copy = edited(tiny.folder("llama", base), tmp_path, "config.json", lambda found: found.update(model_type="llama9"))
    line = refusal(copy)
    assert f"mlx-lm {mlx_lm.__version__} cannot load it (Model type llama9 not supported.)" in line
    assert "scripts/doctor.py --target" in line


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "cannot load it"),
        ("config.json", "{}", "cannot load it"),
        ("config.json", "", "config.json: not JSON"),
        ("model.safetensors", "{", "model.safetensors: not a whole safetensors file"),
        ("model.safetensors", "", "model.safetensors: not a whole safetensors file"),
        ("tokenizer.json", "{", "its tokenizer cannot be read"),
        ("tokenizer.json", "{}", "its tokenizer cannot be read"),
        ("tokenizer_config.json", "{", "its tokenizer cannot be read"),
    ],
)
def test_a_damaged_file_is_refused_by_name(base, tmp_path, file, content, named):
    copy = shutil.copytree(tiny.folder("llama", base), tmp_path / "copy")
    (copy / file).write_text(content)
    assert named in refusal(copy)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("files", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_without_a_tokenizer_is_refused(base, tmp_path, kind, files):
    """Without its words, too: for some kinds transformers then makes up a tokenizer that reads every text as empty."""
    copy = shutil.copytree(tiny.folder(kind, base), tmp_path / "copy")
    for file in files:
        (copy / file).unlink()
    assert "its tokenizer cannot be read" in refusal(copy)


def test_weights_that_do_not_fit_the_configuration_are_refused(base, tmp_path):
    copy = edited(tiny.folder("llama", base), tmp_path, "config.json", lambda found: found.update(num_hidden_layers=4))
    assert "cannot load it" in refusal(copy)


def test_a_model_that_does_more_than_embed_layers_and_norm_is_not_taken_silently(base, monkeypatch):
    """A head that also reads the tokens cannot be scored from hidden states alone."""
    real = llama.Model.__call__
    monkeypatch.setattr(
        llama.Model, "__call__", lambda self, inputs, **options: real(self, inputs, **options) + inputs[..., None]
    )
    assert "its tapped forward differs from its plain forward" in refusal(tiny.folder("llama", base))
