"""Attached recurrent layers compute what mlx-lm's own compute, take rows back, and leave everything else untouched.

The oracle is mlx-lm's own class, which `detached` gives back: a loop over time that shares nothing with `kernels/`
but the layer's weights. R rows, T tokens.
"""

import contextlib
import copy
import functools

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from builds import BUILD
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache, KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model

import tiny
from drafter import cpu_layers, fingerprint, hybrid, packed, recurrent_cache
from drafter import target as targets
from drafter.recurrent_cache import RecurrentCache
from kernels import fused_layer, gated_delta, plain_delta

KINDS = {"qwen3_5": qwen3_5.GatedDeltaNet, "qwen3_next": qwen3_next.Qwen3NextGatedDeltaNet}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest value: other orders of sums; 2^-8 and a few roundings
GRADIENT = 1e-4  # of a parameter's largest gradient, float32: through 23 steps and five layers
REPLAY = 2e-6  # of the largest state value: chunks sum in another order than the loop
WIDTH = 3  # K−1 rows of convolution state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(kind): a small hybrid's folder."""
    return lambda kind: tiny.folder(kind, tmp_path_factory.getbasetemp())


@pytest.fixture
def model(folder):
    """model(kind, dtype="float32"): mlx-lm's model of it, not attached; always a new one."""

    def load(kind, dtype="float32"):
        made = load_model(folder(kind))[0]
        made.set_dtype(getattr(mx, dtype))
        return made

    return load


def ids(seed, *shape):
    return mx.array(np.random.default_rng(seed).integers(5, tiny.VOCABULARY, shape))


def rows(seed, R, T, dtype="float32"):
    return mx.random.normal((R, T, 96), key=mx.random.key(seed)).astype(getattr(mx, dtype))


def recurrent(model):
    """The first gated-delta layer."""
    return model.layers[0].linear_attn


def bits(model, tokens):
    """The logits as bytes."""
    return bytes(memoryview(np.array(model(tokens))))


def close(found, expected, dtype="float32"):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    found, expected = (np.array(value.astype(mx.float32)) for value in (found, expected))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype] * np.abs(expected).max(), rtol=0)


def close_states(found, expected, dtype="float32"):
    close(found[0], expected[0], dtype)
    close(found[1], expected[1], dtype)
    for mine, theirs in zip(found.state[1:], expected.state[1:], strict=True):
        assert (mine is None and theirs is None) or mx.array_equal(mine, theirs)


# --- the same numbers


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_an_attached_layer_gives_mlx_lms_outputs_and_states(model, kind, dtype):
    layer = recurrent(model(kind, dtype))
    own, theirs = RecurrentCache(2), ArraysCache(2)
    for seed, T in enumerate((19, 1, 2, 70, 1)):
        x = rows(seed, 3, T, dtype)
        expected = layer(x, cache=theirs)
        hybrid.attach(layer)
        close(layer(x, cache=own), expected, dtype)
        hybrid.detach(layer)
        close_states(own, theirs, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_a_cache_or_with_mlx_lms_own_cache_does_the_same(model, kind):
    layer, x = recurrent(model(kind)), rows(1, 2, 21)
    expected = layer(x)
    hybrid.attach(layer)
    cache = ArraysCache(2)
    parts = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 13), (13, 14), (14, 21))]
    close(layer(x), expected)
    close(mx.concatenate(parts, axis=1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_rows_in_one_kernel_are_the_same_rows(model, kind, monkeypatch):
    monkeypatch.setattr(hybrid, "allowed", lambda kernel, case: kernel == "fused_layer.layer_step")
    monkeypatch.setattr(fused_layer, "layer_step", functools.partial(fused_layer.layer_step, build=BUILD))
    monkeypatch.setattr(hybrid, "by_parts", lambda *arguments: pytest.fail("the parts were run"))
    layer = recurrent(model(kind))
    own, theirs = RecurrentCache(2), ArraysCache(2)
    for seed, T in enumerate((1, 7, 17)):
        x, some = rows(seed, 2, T), copy.deepcopy(theirs)
        expected = layer(x, cache=theirs)
        if n := T // 2:
            layer(x[:, :n], cache=some)
        hybrid.attach(layer)
        own.arm()
        close(layer(x, cache=own), expected)
        hybrid.detach(layer)
        close_states(own, theirs)
        fewer = copy.deepcopy(own)
        fewer.keep(n)
        if n:
            close_states(fewer, some)
        own.keep(T)


def padded(kind, padding, lengths):
    cache = kind(2, left_padding=padding)
    if lengths:
        cache.prepare(lengths=lengths)
    return cache


@pytest.mark.parametrize(("padding", "lengths"), [([0, 3, 9], None), (None, [11, 4, 7]), ([2, 0, 14], [17, 13, 14])])
def test_padding_on_either_side_is_as_in_mlx_lm(model, padding, lengths):
    layer = recurrent(model("qwen3_5"))
    own, theirs = padded(RecurrentCache, padding, lengths), padded(ArraysCache, padding, lengths)
    for seed, T in enumerate((11, 5, 1)):
        x = rows(seed, 3, T)
        mask = theirs.make_mask(T)
        expected = layer(x, mask, theirs)
        hybrid.attach(layer)
        found = layer(x, own.make_mask(T), own)
        hybrid.detach(layer)
        close(*(mx.where(mask[..., None], value, 0) for value in (found, expected)))
        close_states(own, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_mlx_lms_loop(model, kind):
    made = model(kind)
    made.train()
    tokens = ids(3, 2, 23)

    def loss(model, tokens):
        return mx.mean(mx.sin(model(tokens)))

    with_loop = nn.value_and_grad(made, loss)(made, tokens)
    hybrid.attach(made)
    value, found = nn.value_and_grad(made, loss)(made, tokens)
    assert value.item() == pytest.approx(with_loop[0].item(), rel=1e-4, abs=1e-6)
    expected, found = dict(tree_flatten(with_loop[1])), dict(tree_flatten(found))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = mx.abs(gradient).max().item()
        assert largest > 0 or "mlp" in name, name  # an expert that no token asked for has none
        np.testing.assert_allclose(
            np.array(found[name]), np.array(gradient), atol=GRADIENT * largest, rtol=0, err_msg=name
        )


def test_batches_of_unequal_prompts_through_mlx_lms_generator_give_its_own_text(folder):
    target = targets.load(str(folder("qwen3_5")), dtype="float32")
    prompts = [ids(seed, length).tolist() for seed, length in enumerate((5, 19, 2, 11))]
    ask = lambda: mlx_lm.batch_generate(target.model, target.tokenizer, prompts, max_tokens=9).texts
    found = ask()
    with hybrid.detached(target.model):
        assert found == ask()
    assert len(set(found)) == 4


# --- one instance, and nothing else


@pytest.mark.parametrize("kind", KINDS)
def test_attaching_touches_one_model_and_detaching_restores_it(model, kind):
    mine, other = model(kind), model(kind)
    tokens = ids(5, 1, 17)
    before, names = bits(other, tokens), [name for name, _ in tree_flatten(mine.parameters())]
    held = {name: id(value) for name, value in tree_flatten(mine.parameters())}
    methods = {base: vars(base)["__call__"] for base in (*KINDS.values(), *cpu_layers.FORWARDS)}
    types = list(map(type, mine.modules()))
    hybrid.attach(mine)
    layers = list(filter(hybrid.is_recurrent, mine.modules()))
    assert len(layers) == sum(layer.is_linear for layer in mine.layers) > 1
    assert all(isinstance(layer, KINDS[kind]) for layer in layers)
    assert not any(hybrid.is_attached(module) for module in other.modules())
    assert bits(other, tokens) == before
    assert bits(mine, tokens) != before  # the sums do come in another order, so this test can see what ran
    hybrid.attach(mine)
    assert all(type(layer).__base__ is KINDS[kind] for layer in layers)
    hybrid.detach(mine)
    assert all(type(layer) is KINDS[kind] for layer in layers)
    assert list(map(type, mine.modules())) == types
    assert bits(mine, tokens) == before
    assert [name for name, _ in tree_flatten(mine.parameters())] == names
    assert {name: id(value) for name, value in tree_flatten(mine.parameters())} == held
    assert methods == {base: vars(base)["__call__"] for base in methods}


def test_detached_gives_the_layers_back_also_after_an_error(model):
    mine = model("qwen3_5")
    hybrid.attach(mine)
    hybrid.detach(mine.layers[1])
    attached = [hybrid.is_attached(module) for module in mine.modules()]
    with contextlib.suppress(KeyboardInterrupt), hybrid.detached(mine) as bare:
        assert not any(hybrid.is_attached(module) for module in bare.modules())
        raise KeyboardInterrupt
    assert [hybrid.is_attached(module) for module in mine.modules()] == attached
    assert sum(map(hybrid.is_recurrent, mine.modules())) == 3


def test_a_subclass_of_a_known_layer_is_left_alone(model):
    """It may compute something else."""
    mine = model("qwen3_5")
    layer = recurrent(mine)
    layer.__class__ = type("Changed", (type(layer),), {})
    hybrid.attach(mine)
    assert not hybrid.is_attached(layer)
    assert [type(entry) for entry in hybrid.make_cache(mine)] == [
        ArraysCache, RecurrentCache, KVCache, RecurrentCache, RecurrentCache,
    ]  # fmt: skip


def test_a_target_is_attached_by_load_and_keeps_its_digests(folder, model, tmp_path):
    target = targets.load(str(folder("qwen3_5")), dtype="float32")
    assert hybrid.is_attached(recurrent(target.model))
    untouched = dict(tree_flatten(model("qwen3_5").parameters()))
    assert target.live_digest() == fingerprint.of_arrays(untouched)
    assert target.fingerprint == fingerprint.of_folder(folder("qwen3_5"), tmp_path / "fingerprints.json")


def test_decay_rates_keep_the_precision_they_are_stored_in(folder):
    """mlx-lm casts everything but A_log: exp(A_log) in bfloat16 would move every gate."""
    target = targets.load(str(folder("qwen3_5")), dtype="bfloat16")
    dtypes = {name.rpartition(".")[2]: value.dtype for name, value in tree_flatten(target.model.parameters())}
    assert dtypes.pop("A_log") == mx.float32
    assert set(dtypes.values()) == {mx.bfloat16}


def test_a_model_without_recurrent_layers_gets_mlx_lms_caches(tmp_path_factory):
    made = load_model(tiny.folder("gemma3_text", tmp_path_factory.getbasetemp()))[0]
    hybrid.attach(made)
    kinds = [type(entry) for entry in make_prompt_cache(made)]
    assert [type(entry) for entry in hybrid.make_cache(made)] == kinds
    assert not any(hybrid.is_attached(module) for module in made.modules())


# --- the cache


def filled(kind, R, seed):
    cache = kind(2)
    cache.cache = [mx.random.normal((R, WIDTH, 17), key=mx.random.key(seed)), mx.ones((R, 3, 5, 7)) * seed]
    return cache


def test_a_recurrent_cache_is_an_arrays_cache_wherever_mlx_lm_handles_one():
    def handled(kind):
        merged = kind.merge([filled(kind, 1, 1), filled(kind, 1, 2)])
        merged.extend(filled(kind, 3, 3))
        merged.filter(mx.array([0, 3, 1]))
        merged.left_padding = mx.array([2, 0, 1])
        return merged, merged.extract(1), kind.from_state(merged.state), kind.merge([kind(2)] * 2)

    for own, theirs in zip(handled(RecurrentCache), handled(ArraysCache), strict=True):
        assert type(own) is RecurrentCache and not own.recording and own.rows == 0 and own.documents is None
        assert [mx.array_equal(*pair) for pair in zip(own.cache, theirs.cache) if pair[0] is not None].count(False) == 0
        assert own.batch_size == theirs.batch_size and own.empty() == theirs.empty() and own.nbytes == theirs.nbytes


def test_caches_go_through_mlx_lms_files(model, tmp_path):
    made, file = model("qwen3_5"), str(tmp_path / "cache.safetensors")
    hybrid.attach(made)
    cache = hybrid.make_cache(made)
    made(ids(1, 1, 9), cache=cache)
    save_prompt_cache(file, cache)
    loaded = hybrid.adopt(made, load_prompt_cache(file))
    assert list(map(type, loaded)) == list(map(type, cache))
    loaded[0].arm()
    cache[0].arm()
    assert mx.array_equal(*(made(ids(2, 1, 3), cache=held) for held in (loaded, cache)))
    for held in (loaded, cache):
        held[0].keep(2)
    assert mx.array_equal(loaded[0][1], cache[0][1])


def test_a_tape_is_left_between_arm_and_keep_only_and_its_size_is_that_of_the_rows(model):
    made = model("qwen3_5")
    hybrid.attach(made)
    sizes = {}
    for prompt in (5, 300):
        cache = hybrid.make_cache(made)
        entry = cache[0]
        made(ids(1, 1, prompt), cache=cache)
        assert entry.tape is entry.window is None
        entry.arm()
        made(ids(2, 1, 6), cache=cache)
        sizes[prompt] = [value.nbytes for value in (*vars(entry.tape).values(), entry.window)]
        entry.keep(4)
        made(ids(3, 1, 9), cache=cache)
        assert entry.rows == 6  # nothing was added
    assert sizes[5] == sizes[300] == [6 * 6 * 48 * 4, 6 * 2 * 32 * 4, 6 * 6 * 4, (WIDTH + 6) * 416 * 4]


@pytest.mark.parametrize("pieces", [(7,), (1, 1, 1, 1, 1, 1, 1), (3, 4), (1, 5, 1)])
@pytest.mark.parametrize("held", [0, 2, 20])
def test_keep_leaves_what_the_first_rows_leave_however_they_were_fed(model, held, pieces):
    made = model("qwen3_5")
    hybrid.attach(made)
    layer, x = recurrent(made), rows(7, 2, 7)
    start = RecurrentCache(2)
    if held:
        layer(rows(8, 2, held), cache=start)
    for n in range(8):
        cache, expected = copy.deepcopy(start), copy.deepcopy(start)
        cache.arm()
        at = 0
        for size in pieces:
            layer(x[:, at : at + size], cache=cache)
            at += size
        assert cache.rows == 7
        cache.keep(n)
        if n:
            layer(x[:, :n], cache=expected)
            close_states(cache, expected)
        else:
            assert [id(value) for value in cache.cache] == [id(value) for value in expected.cache] or held


def test_rows_that_are_all_kept_are_not_replayed(model):
    made = model("qwen3_5")
    hybrid.attach(made)
    cache = RecurrentCache(2)
    cache.arm()
    recurrent(made)(rows(7, 2, 5), cache=cache)
    before = [*cache.cache]
    cache.keep(5)
    assert all(one is other for one, other in zip(cache.cache, before, strict=True))


def indebted(model, n=2):
    """(a cache owed n rows of a tape, the state it stands for)."""
    layer, x, cache, expected = recurrent(model), rows(7, 2, 5), RecurrentCache(2), RecurrentCache(2)
    cache.arm()
    layer(x, cache=cache)
    cache.keep(n)
    layer(x[:, :n], cache=expected)
    assert cache.owed
    return cache, expected


def write(cache, seed):
    """Other states, in place, as mlx-lm's own layers write them."""
    cache[0], cache[1] = (mx.random.normal(value.shape, key=mx.random.key(seed)) for value in cache.cache)


def assign(cache, seed):
    """Other states, without a look at those that are there, of which S may be owed rows."""
    cache.cache = [
        mx.random.normal(value.shape, key=mx.random.key(seed)) for value in filled(RecurrentCache, 2, 1).cache
    ]


@pytest.mark.parametrize("change", [None, write, assign])
def test_a_state_that_is_owed_rows_is_what_a_commit_of_none_comes_back_to(model, change):
    made = model("qwen3_5")
    hybrid.attach(made)
    cache, expected = indebted(made)
    cache.arm()
    if change:
        change(cache, 3)
    cache.keep(0)
    close_states(cache, expected)


def test_a_state_written_in_place_while_armed_can_be_taken_back(model):
    made = model("qwen3_5")
    hybrid.attach(made)
    cache, expected = RecurrentCache(2), RecurrentCache(2)
    for each in (cache, expected):
        recurrent(made)(rows(7, 2, 5), cache=each)
    cache.arm()
    write(cache, 3)
    cache.keep(0)
    close_states(cache, expected)


@pytest.mark.parametrize("kept", [None, 0, 1, 3999])
def test_of_a_prompt_no_more_than_its_end_stays_in_memory(model, kept):
    """Its window has 4,003 rows of 416 channels: 6.7 MB, of which the convolution state is three rows."""
    made = model("qwen3_5")
    hybrid.attach(made)
    cache = RecurrentCache(2)
    if kept is not None:
        cache.arm()
    recurrent(made)(rows(7, 1, 4000), cache=cache)
    if kept is not None:
        cache.keep(kept)
        cache.arm()  # lets go of the tape and its window
        cache.keep(0)
    mx.eval(*(value for value in cache.cache if value is not None))
    held = mx.get_active_memory()
    cache.held = [None if value is None else value + 0 for value in cache.cache]
    mx.eval(*(value for value in cache.held if value is not None))
    cache.before = None
    assert held - mx.get_active_memory() < 1e6


@pytest.mark.parametrize(("padding", "lengths"), [([0, 8, 10], None), (None, [14, 3, 9])])
def test_keep_minds_padding_and_lengths_row_by_row(model, padding, lengths):
    made = model("qwen3_5")
    hybrid.attach(made)
    layer, x = recurrent(made), rows(7, 3, 6)
    start = padded(RecurrentCache, padding, lengths)
    layer(rows(8, 3, 7), start.make_mask(7), start)
    for n in range(7):
        cache, expected = copy.deepcopy(start), copy.deepcopy(start)
        cache.arm()
        layer(x, cache.make_mask(6), cache)
        cache.keep(n)
        if n:
            layer(x[:, :n], expected.make_mask(n), expected)
        close_states(cache, expected)


def drawn(T):
    """q, k, v, g, beta of T tokens: two rows, three value heads over one key head, Dk 32, Dv 5; one gate is a reset."""
    keys = mx.random.split(mx.random.key(T), 5)
    q, k = (mx.random.normal((2, T, 1, 32), key=key) / 32**0.5 for key in keys[:2])
    g, beta = (mx.random.uniform(0.1, 1.0, (2, T, 3), key=key) for key in keys[2:4])
    g = mx.where(mx.arange(T)[:, None] == 4, 0, g)
    return q, k, mx.random.normal((2, T, 3, 5), key=keys[4]), g, beta


@pytest.mark.parametrize("build", [None, "host"])
def test_keep_is_the_serial_rule_on_the_same_inputs_for_every_n_and_width(build, monkeypatch):
    """Bit for bit where one body serves both: the kernel, and the loop up to 16 rows, past which chunks record."""
    monkeypatch.setattr(recurrent_cache, "replay", functools.partial(gated_delta.replay, build=build))
    rule = functools.partial(gated_delta.step, build=build) if build else gated_delta.gated_delta
    start = [mx.random.normal((2, WIDTH, 7), key=mx.random.key(1)), mx.random.normal((2, 3, 5, 32))]
    for T in range(1, 18):
        inputs, window = drawn(T), mx.random.normal((2, WIDTH + T, 7), key=mx.random.key(T))
        tape = rule(*inputs, start[1], record=True)[2]
        for n in range(T):
            cache = RecurrentCache(2)
            cache.cache = [*start]
            cache.arm()
            cache.record(tape, window)
            cache.cache = [None, None]  # what T rows leave is not what is asked for
            cache.keep(n)
            expected = rule(*(value[:, :n] for value in inputs), start[1])[1] if n else start[1]
            assert mx.array_equal(cache[0], window[:, n : n + WIDTH] if n else start[0])
            bound = 0 if build or T <= plain_delta.LOOP else REPLAY * mx.abs(expected).max().item()
            assert mx.abs(cache[1] - expected).max().item() <= bound


# --- packed rows


def test_a_document_that_begins_empties_the_state_and_the_convolution(model):
    made = model("qwen3_next")
    hybrid.attach(made)
    layer, x = recurrent(made), rows(3, 2, 12)
    documents = mx.array([[1] * 5 + [2] + [3] * 6, [1] * 2 + [2] * 7 + [0] * 3])
    cache = packed.caches([RecurrentCache(2)], documents)[0]
    found = layer(x, cache.make_mask(12), cache)
    for row, start, stop in ((0, 0, 5), (0, 5, 6), (0, 6, 12), (1, 0, 2), (1, 2, 9)):
        close(found[row, start:stop], layer(x[row, start:stop][None])[0])


def test_documents_apart_pass_gradients_apart(model):
    made = model("qwen3_5")
    hybrid.attach(made)
    made.train()
    documents = mx.array([[1] * 7 + [2] * 9])

    def second(x):
        cache = packed.caches([RecurrentCache(2)], documents)[0]
        return mx.sum(mx.sin(recurrent(made)(x, cache=cache)[:, 7:]))

    gradient = mx.grad(second)(rows(5, 1, 16))
    assert mx.abs(gradient[:, :7]).max().item() == 0
    assert mx.abs(gradient[:, 7:]).max().item() > 0
