"""commit(n) leaves what feeding exactly those n rows would have left, for every cache of mlx-lm and for unknown ones.

The oracle is mlx-lm alone (recurrent layers detached): a deep copy of the caches from before, fed the n rows one at a
time. What is compared is logical: rows in temporal order, offset, states, and the logits of the next step.
"""

import copy
import functools
import warnings

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.utils import load_model

import tiny
from decode.transaction import Transaction, TransactionError
from drafter import hybrid, recurrent_cache
from kernels import causal_conv, gated_delta
from oracles import assert_same_caches

FLOAT32 = 2e-5  # wide and narrow products round differently; logits here are of order 10
RECURRENT = 5e-5  # states and logits of order 5 after a chunked prefill, and steps whose sums come in another order
REPLAY = 2e-6  # of the largest state value: float32 sums of the same rows
QUANTISED = 4e-2  # a rounding difference may move a stored code by one step: 1/255 of a group's range, 10 at most here
WINDOW = 11
PROMPTS = (3, 10, 11, 12, 30)  # well inside, about to fill, full, over and well over the window

CACHES = {
    "kv": KVCache,
    "concatenate": ConcatenateKVCache,
    "rotating": lambda: RotatingKVCache(max_size=WINDOW),
    "pinned": lambda: RotatingKVCache(max_size=WINDOW, keep=4),
    "quantised": lambda: QuantizedKVCache(group_size=32, bits=8),
}


HYBRIDS = ("qwen3_5", "qwen3_next")  # key heads ≠ value heads, Dk ≠ Dv, attention in between
BOUNDS = {"quantised": QUANTISED, **dict.fromkeys(HYBRIDS, RECURRENT)}


class Strange(KVCache):
    """A kind the transaction has never heard of, whose trim must not be trusted."""

    def trim(self, n):
        raise AssertionError("an unknown cache was trimmed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny.folder("llama", tmp_path_factory.getbasetemp()))[0]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """{kind: attached model of two recurrent layers and one of attention}."""
    tmp = tmp_path_factory.getbasetemp()
    made = {kind: load_model(tiny.folder(kind, tmp, num_hidden_layers=3))[0] for kind in HYBRIDS}
    for model in made.values():
        hybrid.attach(model)
    return made


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return load_model(tiny.folder("gemma3_text", tmp_path_factory.getbasetemp()))[0]


def ids(seed, count):
    return mx.array(np.random.default_rng(seed).integers(5, tiny.VOCABULARY, count))


def feed(model, cache, tokens):
    """Logits [T,V] of token ids [T] fed in one forward."""
    return model(tokens[None], cache=cache)[0]


def one_by_one(model, cache, tokens):
    with hybrid.detached(model):
        for token in tokens:
            feed(model, cache, token[None])


def check_every_commit(model, start, rows, tolerance):
    """One transaction of `rows` rows from a copy of `start` for every n, against a copy fed n rows one at a time."""
    tokens, probe, oracle = ids(rows, rows), ids(100 + rows, 2), copy.deepcopy(start)
    for n in range(rows + 1):
        one_by_one(model, oracle, tokens[n - 1 : n] if n else [])
        cache = copy.deepcopy(start)
        transaction = Transaction(cache, None)
        transaction.begin(rows)
        mx.eval(feed(model, cache, tokens))
        transaction.commit(n)
        assert_same_caches(cache, oracle, tolerance)
        for width in (1, 2):  # the next step through the in-place and through the concatenating path
            found, expected = (feed(model, copy.deepcopy(held), probe[:width]) for held in (cache, oracle))
            np.testing.assert_allclose(np.array(found), np.array(expected), atol=10 * tolerance, rtol=0)


def new_caches(model, kind):
    """Empty caches of a kind, one a layer; the model's own where the kind is a model's."""
    if kind == "quantised" and not quantised_products():
        pytest.skip("MLX has no quantised product of few float32 rows here")
    made = {**CACHES, "strange": Strange}.get(kind)
    return [made() for _ in model.layers] if made else hybrid.make_cache(model)


@functools.cache
def quantised_products():
    """Whether MLX can attend through quantised keys on this device: its CUDA build cannot."""
    if mx.default_device() == mx.cpu:
        return True
    try:
        keys = mx.quantize(mx.ones((2, 1, 4, 32)), group_size=32, bits=8)
        mx.eval(mx.quantized_matmul(mx.ones((2, 2, 3, 32)), *keys, transpose=True, group_size=32, bits=8))
    except RuntimeError:
        return False
    return True


def prefilled(model, kind, prompt):
    """Caches of a kind after a prompt of that many tokens, and the tolerance that the kind allows."""
    cache = new_caches(model, kind)
    feed(model, cache, ids(prompt, prompt))
    mx.eval([entry.state for entry in cache])
    return cache, BOUNDS.get(kind, FLOAT32)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", CACHES)
def test_commit_equals_feeding_the_kept_rows_for_every_n(model, kind, prompt):
    start, tolerance = prefilled(model, kind, prompt)
    for rows in (1, 2, 5):
        check_every_commit(model, start, rows, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", range(1, 26))
@pytest.mark.parametrize("kind", CACHES)
def test_commit_equals_feeding_the_kept_rows_for_every_n_width_and_prompt(model, kind, prompt):
    start, tolerance = prefilled(model, kind, prompt)
    for rows in range(1, 10):
        check_every_commit(model, start, rows, tolerance)


@pytest.mark.parametrize("prompt", [0, 2, 30])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_states_are_committed_for_every_n_and_width(hybrids, kind, prompt):
    """Widths up to 17: the loop over rows serves the narrow ones, chunks the widest."""
    model = hybrids[kind]
    start = hybrid.make_cache(model)
    one_by_one(model, start, ids(prompt, prompt) if prompt else [])
    everything = kind == "qwen3_5" and prompt == 30
    for rows in range(1, 18) if everything else (1, 6, 17):
        check_every_commit(model, start, rows, RECURRENT)


def test_in_bfloat16_a_commit_equals_a_forward_as_wide_whose_other_rows_are_masked(tmp_path):
    """Products of other widths round otherwise, by 2^-8 a layer; of the same width they do not, so this bound is tight:
    the replay's order of float32 sums. The oracle takes no row back: mlx-lm's `lengths` keep the last ones out."""
    model = load_model(tiny.folder("qwen3_5", tmp_path))[0]
    model.set_dtype(mx.bfloat16)
    hybrid.attach(model)
    start, tokens = hybrid.make_cache(model), ids(4, 9)
    feed(model, start, ids(3, 21))
    for n in range(1, 9):
        cache, oracle = copy.deepcopy(start), copy.deepcopy(start)
        transaction = Transaction(cache, None)
        transaction.begin(9)
        feed(model, cache, tokens)
        transaction.commit(n)
        masked = [entry for entry in oracle if isinstance(entry, ArraysCache)]
        for entry in masked:
            entry.prepare(lengths=[n])
        feed(model, oracle, tokens)
        for mine, theirs in zip([entry for entry in cache if isinstance(entry, ArraysCache)], masked, strict=True):
            assert mx.array_equal(mine[0], theirs[0])
            assert mx.abs(mine[1] - theirs[1]).max().item() <= REPLAY * mx.abs(theirs[1]).max().item()


@pytest.fixture
def through_host(monkeypatch):
    """Recurrent layers and their replay run the kernels' own bodies, in the host build."""

    def rule(*arrays, record, differentiable):
        return gated_delta.step(*arrays, record=record, build=BUILD)

    monkeypatch.setattr(hybrid, "gated_delta", rule)
    monkeypatch.setattr(recurrent_cache, "replay", functools.partial(gated_delta.replay, build=BUILD))
    monkeypatch.setattr(hybrid, "causal_conv", functools.partial(causal_conv.causal_conv, build=BUILD))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_kernels_own_bodies_commit_the_same_states(hybrids, kind, through_host):
    model = hybrids[kind]
    start = hybrid.make_cache(model)
    feed(model, start, ids(21, 21))
    for rows in (1, 5):
        check_every_commit(model, start, rows, RECURRENT)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 16, 65, 129])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_states_are_committed_whatever_came_before(hybrids, kind, prompt):
    start = hybrid.make_cache(hybrids[kind])
    one_by_one(hybrids[kind], start, ids(prompt, prompt) if prompt else [])
    for rows in range(1, 18):
        check_every_commit(hybrids[kind], start, rows, RECURRENT)


@pytest.mark.parametrize("kind", [*CACHES, "gemma", *HYBRIDS])
def test_several_transactions_in_a_row_stay_equal(model, gemma, hybrids, kind):
    model = {"gemma": gemma, **hybrids}.get(kind, model)
    cache = new_caches(model, kind)
    oracle, tolerance = copy.deepcopy(cache), BOUNDS.get(kind, FLOAT32)
    transaction = Transaction(cache, None)
    draws = np.random.default_rng(7)
    for cycle in range(14):  # wraps the window several times, width-1 steps in between
        rows = int(draws.integers(1, 10))
        n, tokens = int(draws.integers(0, rows + 1)), ids(cycle, rows)
        transaction.begin(rows)
        mx.eval(feed(model, cache, tokens))
        transaction.commit(n)
        one_by_one(model, oracle, tokens[:n])
        assert_same_caches(cache, oracle, tolerance)
        step = ids(100 + cycle, 1)
        found, expected = feed(model, cache, step), feed(model, oracle, step)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=10 * tolerance, rtol=0)


def test_a_prompt_of_single_steps_then_blocks_stays_equal(gemma):
    cache = gemma.make_cache()
    one_by_one(gemma, cache, ids(1, 25))  # the ring is filled in place: its start lies in the middle of memory
    for rows in (1, 4, 9):
        check_every_commit(gemma, cache, rows, FLOAT32)


def test_rows_fed_one_at_a_time_inside_a_transaction_can_be_taken_back(gemma):
    cache = gemma.make_cache()
    feed(gemma, cache, ids(3, 17))
    oracle, tokens = copy.deepcopy(cache), ids(4, 5)
    transaction = Transaction(cache, None)
    transaction.begin(5)
    one_by_one(gemma, cache, tokens)
    transaction.commit(2)
    one_by_one(gemma, oracle, tokens[:2])
    assert_same_caches(cache, oracle, FLOAT32)


@pytest.mark.parametrize("kind", [*CACHES, "strange", "qwen3_5"])
def test_a_commit_may_be_repeated_with_fewer_rows_until_the_next_begin(model, hybrids, kind):
    model = hybrids.get(kind, model)
    cache = new_caches(model, kind)
    feed(model, cache, ids(3, 17))
    oracle, tokens = copy.deepcopy(cache), ids(4, 6)
    transaction = Transaction(cache, lambda kept: feed(model, cache, kept))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transaction.begin(6, tokens)
    feed(model, cache, tokens)
    for n in (6, 4, 4, 3, 1):
        transaction.commit(n)
        expected = copy.deepcopy(oracle)
        one_by_one(model, expected, tokens[:n])
        assert_same_caches(cache, expected, BOUNDS.get(kind, FLOAT32))
    with pytest.raises(TransactionError, match="expected 0 to 1"):
        transaction.commit(2)


@pytest.mark.parametrize("kind", [*CACHES, "strange", "qwen3_5"])
def test_abort_restores_whatever_was_fed(model, hybrids, kind):
    model = hybrids.get(kind, model)
    cache = new_caches(model, kind)
    feed(model, cache, ids(3, 17))
    oracle = copy.deepcopy(cache)
    transaction = Transaction(cache, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transaction.begin(4, ids(1, 4))
    model.layers[0](mx.zeros((1, 3, 96)), cache=cache[0])  # the forward broke off after one layer
    transaction.abort()
    assert_same_caches(cache, oracle, 0.0)
    assert not transaction.open


def test_quantising_between_transactions_is_seen(model):
    cache = new_caches(model, "kv")
    feed(model, cache, ids(3, 7))
    transaction = Transaction(cache, None)
    transaction.begin(3)
    feed(model, cache, ids(1, 3))
    transaction.commit(1)
    new_caches(model, "quantised")  # skips where they cannot be used
    cache[:] = [entry.to_quantized(group_size=32, bits=8) for entry in cache]
    oracle = copy.deepcopy(cache)
    transaction.begin(4)
    feed(model, cache, ids(2, 4))
    transaction.commit(2)
    one_by_one(model, oracle, ids(2, 4)[:2])
    assert_same_caches(cache, oracle, QUANTISED)


def test_an_unknown_cache_reruns_the_kept_rows_and_says_so_once(model):
    cache = [Strange(), KVCache(), RotatingKVCache(max_size=WINDOW)]
    feed(model, cache, ids(3, 17))
    oracle, fed = copy.deepcopy(cache), []

    def forward(kept):
        fed.append(kept.tolist())
        return feed(model, cache, kept)

    transaction = Transaction(cache, forward)
    with pytest.warns(UserWarning, match="Strange") as announced:
        for n in (2, 0, 4):
            tokens = ids(20 + n, 4)
            transaction.begin(4, tokens)
            feed(model, cache, tokens)
            transaction.commit(n)
            one_by_one(model, oracle, tokens[:n])
            assert_same_caches(cache, oracle, FLOAT32)
    assert len(announced) == 1
    assert fed == [ids(22, 4)[:2].tolist()]  # nothing is re-run when all rows or none stay


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pinned_rows_stay_visible_to_rows_that_are_rerun(model, prompt):
    class Other(RotatingKVCache):
        """A kind the transaction has never heard of."""

    kinds = (RotatingKVCache, Other, RotatingKVCache)
    start, tokens = [kind(max_size=WINDOW, keep=4) for kind in kinds], ids(4, 5)
    one_by_one(model, start, ids(3, prompt))
    for n in range(6):
        cache, oracle = copy.deepcopy(start), copy.deepcopy(start)
        transaction = Transaction(cache, lambda kept, cache=cache: feed(model, cache, kept))
        with pytest.warns(UserWarning, match="Other"):
            transaction.begin(5, tokens)
        feed(model, cache, tokens)
        transaction.commit(n)
        one_by_one(model, oracle, tokens[:n])
        assert_same_caches(cache, oracle, FLOAT32)
        assert all("make_mask" not in vars(entry) for entry in cache)


def test_recurrent_state_is_restored_and_rerun():
    state = ArraysCache(1)
    state[0] = mx.array([1.0])

    def forward(tokens):
        for token in tokens.tolist():
            state[0] = state[0] * 0.5 + token

    transaction = Transaction([state], forward)
    tokens = mx.array([3, 5, 7])
    with pytest.warns(UserWarning, match="ArraysCache"):
        transaction.begin(3, tokens)
    forward(tokens)
    transaction.commit(2)
    assert state[0].item() == (0.5 + 3) * 0.5 + 5


def test_a_batch_commits_every_row_alike_whatever_padding_it_began_with(hybrids):
    model, text, tokens = hybrids["qwen3_5"], ids(5, 33).reshape(3, 11), ids(6, 18).reshape(3, 6)
    start = hybrid.make_cache(model)
    for entry in start:
        if isinstance(entry, ArraysCache):
            entry.left_padding = mx.array([0, 4, 13])  # the last row's text begins inside the block
    model(text, cache=start)
    for n in range(7):
        cache, oracle = copy.deepcopy(start), copy.deepcopy(start)
        transaction = Transaction(cache, None)
        transaction.begin(6)
        model(tokens, cache=cache)
        transaction.commit(n)
        with hybrid.detached(model):
            for column in range(n):
                model(tokens[:, column : column + 1], cache=oracle)
        assert_same_caches(cache, oracle, RECURRENT)
        paddings = [entry.left_padding for held in (cache, oracle) for entry in held if isinstance(entry, ArraysCache)]
        assert all(mx.array_equal(padding, paddings[0]) for padding in paddings)


def test_a_batch_over_an_unknown_cache_reruns_the_kept_columns(hybrids):
    model, tokens = hybrids["qwen3_5"], ids(6, 15).reshape(3, 5)
    cache = [Strange() if type(entry) is KVCache else entry for entry in hybrid.make_cache(model)]
    model(ids(5, 21).reshape(3, 7), cache=cache)
    oracle = copy.deepcopy(cache)
    transaction = Transaction(cache, lambda kept: model(kept, cache=cache))
    with pytest.warns(UserWarning, match="Strange"):
        transaction.begin(5, tokens)
    model(tokens, cache=cache)
    transaction.commit(3)
    model(tokens[:, :3], cache=oracle)
    assert_same_caches(cache, oracle, FLOAT32)


def test_states_that_mlx_lms_caches_hold_are_rerun_to_where_the_tape_leads(hybrids):
    """The fallback as oracle: restore and re-forward against restore and replay."""
    model, tokens = hybrids["qwen3_next"], ids(9, 7)
    replayed, rerun = hybrid.make_cache(model), model.make_cache()
    for cache in (replayed, rerun):
        feed(model, cache, ids(8, 20))
        transaction = Transaction(cache, lambda kept, cache=cache: feed(model, cache, kept))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            transaction.begin(7, tokens)
        feed(model, cache, tokens)
        transaction.commit(4)
        assert len(told) == (cache is rerun)
    assert_same_caches(replayed, rerun, RECURRENT)


def test_a_begin_that_is_refused_leaves_no_cache_recording(hybrids):
    cache = [*hybrid.make_cache(hybrids["qwen3_5"]), Strange()]
    with pytest.raises(TransactionError, match="needs the 2 token ids"):
        Transaction(cache, None).begin(2)
    assert not any(getattr(entry, "recording", False) for entry in cache)


def test_a_list_of_caches_is_committed_member_by_member(model):
    members = [KVCache(), RotatingKVCache(max_size=WINDOW)]
    nested, attention = CacheList(*members), model.layers[0].self_attn
    rows = [mx.random.normal((1, count, 96), key=mx.random.key(count)) for count in (17, 5)]
    for member in members:
        attention(rows[0], cache=member)
    oracle = copy.deepcopy(members)
    transaction = Transaction([nested], None)
    transaction.begin(5)
    for member in members:
        attention(rows[1], cache=member)
    transaction.commit(3)
    for member in oracle:
        attention(rows[1][:, :3], cache=member)
    assert_same_caches(list(nested.caches), oracle, FLOAT32)


@pytest.mark.parametrize("kind", ["concatenate", "rotating", "pinned", "qwen3_5"])
def test_a_first_block_of_which_nothing_is_kept_leaves_the_caches_empty(model, hybrids, kind):
    model = hybrids.get(kind, model)
    cache = new_caches(model, kind)
    transaction = Transaction(cache, None)
    transaction.begin(3)
    feed(model, cache, ids(1, 3))
    transaction.commit(0)
    assert all(entry.empty() for entry in cache if type(entry) is not KVCache)


def test_what_was_restored_and_written_to_can_be_restored_again(model):
    """A single kept row goes into the ring in place; the snapshot must not see it."""
    cache = [RotatingKVCache(max_size=WINDOW) for _ in model.layers]
    one_by_one(model, cache, ids(3, 17))
    oracle, transaction = copy.deepcopy(cache), Transaction(cache, None)
    transaction.begin(4)
    feed(model, cache, ids(4, 4))
    for n in (1, 0):
        transaction.commit(n)
    assert_same_caches(cache, oracle, 0.0)


@pytest.mark.parametrize("keep", [0, 4])
def test_rows_that_a_window_has_forgotten_cannot_be_kept_but_are_taken_back(model, keep):
    """Fed one at a time, more rows than the ring holds overwrite each other."""
    cache, tokens = [RotatingKVCache(max_size=WINDOW, keep=keep) for _ in model.layers], ids(4, WINDOW + 1)
    one_by_one(model, cache, ids(3, 17))
    oracle, transaction = copy.deepcopy(cache), Transaction(cache, None)
    transaction.begin(len(tokens))
    one_by_one(model, cache, tokens)
    with pytest.raises(TransactionError, match=f"fed piecewise through a window of {WINDOW}"):
        transaction.commit(5)
    transaction.abort()
    assert_same_caches(cache, oracle, 0.0)


def test_a_model_whose_window_is_narrower_than_a_pinned_cache_gets_the_caches_own_mask(model):
    cache = [RotatingKVCache(max_size=WINDOW, keep=4)]
    cache[0].update_and_fetch(*[mx.zeros((1, 1, 7, 8))] * 2)
    narrow, wide = (cache[0].make_mask(3, window_size=size, return_array=True) for size in (5, None))
    Transaction(cache, None).begin(3)
    assert mx.array_equal(cache[0].make_mask(3, window_size=5, return_array=True), narrow)
    assert cache[0].make_mask(3, return_array=True).shape == wide.shape


@pytest.mark.parametrize("tokens", [None, ids(1, 3), ids(1, 4).reshape(2, 2)[:, :1]])
def test_an_unknown_cache_wants_the_ids_of_exactly_its_rows(tokens):
    with pytest.raises(TransactionError, match=r"begin\(2\) over Strange needs the 2 token ids"):
        Transaction([Strange()], None).begin(2, tokens)


def test_commit_of_a_key_value_cache_touches_no_array(model):
    cache = [KVCache() for _ in model.layers]
    feed(model, cache, ids(3, 17))
    transaction = Transaction(cache, None)
    transaction.begin(5)
    feed(model, cache, ids(4, 5))
    before = [(id(entry.keys), id(entry.values)) for entry in cache]
    transaction.commit(2)
    assert before == [(id(entry.keys), id(entry.values)) for entry in cache]
    assert [entry.offset for entry in cache] == [19] * 3


def test_a_rotating_cache_never_outgrows_window_and_block(model):
    cache = [RotatingKVCache(max_size=WINDOW) for _ in model.layers]
    transaction = Transaction(cache, None)
    for cycle in range(20):
        transaction.begin(6)
        feed(model, cache, ids(cycle, 6))
        transaction.commit(cycle % 7)
        assert all(entry.keys is None or entry.keys.shape[2] < WINDOW + 6 for entry in cache)


def test_pinned_rows_stay_visible_to_every_row_of_a_block_and_the_cache_is_handed_back_untouched(model):
    cache = [RotatingKVCache(max_size=WINDOW, keep=4) for _ in model.layers]
    one_by_one(model, cache, ids(3, 30))
    oracle, tokens = copy.deepcopy(cache), ids(4, 5)
    transaction = Transaction(cache, None)
    transaction.begin(5)
    wide = np.array(feed(model, cache, tokens))
    transaction.commit(5)
    narrow = np.concatenate([np.array(feed(model, oracle, token[None])) for token in tokens])
    np.testing.assert_allclose(wide, narrow, atol=10 * FLOAT32, rtol=0)
    assert all("make_mask" not in vars(entry) for entry in cache)


def test_a_snapshot_is_a_new_array_because_a_reference_moves_with_the_original():
    original = mx.zeros(3)
    reference, held = original, copy.deepcopy(original)
    original[1] = 5
    assert reference.tolist() == [0, 5, 0]
    assert held.tolist() == [0, 0, 0]


def test_misuse_is_named(model):
    cache = [KVCache() for _ in model.layers]
    transaction = Transaction(cache, None)
    with pytest.raises(TransactionError, match="without begin"):
        transaction.commit(0)
    with pytest.raises(TransactionError, match="at least one row"):
        transaction.begin(0)
    transaction.begin(3)
    with pytest.raises(TransactionError, match="3 rows is open"):
        transaction.begin(2)
    feed(model, cache, ids(1, 2))
    with pytest.raises(TransactionError, match="begin\\(3\\), but 2 rows"):
        transaction.commit(1)
    with pytest.raises(TransactionError, match="expected 0 to 3"):
        transaction.commit(4)
    transaction.abort()
    with pytest.raises(TransactionError, match="Strange needs the 2 token ids"):
        Transaction([Strange()], None).begin(2)
