"""A compiled step against the module's own forward, in float32 by plain operations: hidden states, taps, caches, tapes.

W rows. Tolerances are of float32 sums in another order, relative to values of size 1 to 4.
"""

import copy

import mlx.core as mx
import numpy as np
import pytest

import tiny
from drafter import layers, steps, target

TOLERANCE = 6e-5 if mx.default_device() == mx.cpu else 2e-4  # of values up to 13; a GPU sums in yet other orders
WIDTHS = (1, 1, 5, 8, 1, 16, 3, 17)
TAPS = (0, 2)


@pytest.fixture(scope="module", params=["qwen3_5", "llama", "qwen3"])
def known(request, tmp_path_factory):
    return target.load(str(tiny.folder(request.param, tmp_path_factory.mktemp("steps"))), dtype="float32")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch, request):
    """On a CPU, MLX calls a C++ compiler for each trace: half a minute of it, which one slow case below spends."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(mx, "compile", lambda function: function)


@pytest.fixture
def step(known):
    return steps.for_model(known.model, known.backbone, layers.PLAIN)


def close(found, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=tolerance, rtol=0)


def contents(entry):
    """The arrays that a cache holds of its rows."""
    if isinstance(entry.state[0], list):
        return entry.cache
    return [value[:, :, : entry.offset] for value in (entry.keys, entry.values)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(contents(one), contents(other), strict=True):
            close(mine, theirs)


def arm(caches):
    for entry in caches:
        if hasattr(entry, "arm"):
            entry.arm()


def take_back(caches, W, n):
    """Keep n of the W rows just fed."""
    for entry in caches:
        if hasattr(entry, "arm"):
            entry.keep(n)
        else:
            entry.offset -= W - n


def tokens_for(known, count, seed=3):
    return mx.random.randint(5, 300, (1, count), key=mx.random.key(seed))


@pytest.mark.slow
def test_compiled_steps_equal_the_modules_forward(known, step):
    mine, theirs = known.make_cache(), known.make_cache()
    for W in (6, 1, 1, 7):
        rows = tokens_for(known, W, seed=W)
        close(step(rows, mine, TAPS)[0], known.forward(rows, theirs, TAPS).hidden)
    assert_same(mine, theirs)


def test_steps_of_any_width_equal_the_modules_forward(known, step):
    text, mine, theirs = tokens_for(known, 80), known.make_cache(), known.make_cache()
    for caches in (mine, theirs):
        known.forward(text[:, :11], caches)
    done = 11
    for W in WIDTHS:
        rows = text[:, done : done + W]
        assert step.fits(rows, mine)
        hidden, taps = step(rows, mine, TAPS)
        expected = known.forward(rows, theirs, TAPS)
        close(hidden, expected.hidden)
        for one, other in zip(taps, expected.taps, strict=True):
            close(one, other)
        close(step.score(hidden), known.score(expected.hidden))
        assert_same(mine, theirs)
        done += W


@pytest.mark.parametrize("W", [2, 8, 17])
def test_rows_can_be_taken_back(known, step, W):
    text = tokens_for(known, 40)
    for n in {0, 1, W // 2, W}:
        mine, theirs = known.make_cache(), known.make_cache()
        for caches in (mine, theirs):
            known.forward(text[:, :7], caches)
        arm(mine)
        step(text[:, 7 : 7 + W], mine)
        whole = copy.deepcopy(theirs)
        known.forward(text[:, 7 : 7 + W], whole)
        assert_same(mine, whole)  # read before it is known what is kept
        take_back(mine, W, n)
        if n:
            known.forward(text[:, 7 : 7 + n], theirs)
        assert_same(mine, theirs)


def test_a_step_may_be_the_first_of_a_text_and_may_grow_the_buffers(known, step, monkeypatch):
    monkeypatch.setattr(steps, "GROWTH", 8)
    text, mine, theirs = tokens_for(known, 31), known.make_cache(), known.make_cache()
    for start in range(0, 31, 6):
        found, _ = step(text[:, start : start + 6], mine)
        close(found, known.forward(text[:, start : start + 6], theirs).hidden)
    assert_same(mine, theirs)


def test_only_what_it_was_made_for_fits(known, step):
    caches = known.make_cache()
    assert step.fits(tokens_for(known, 24), caches)
    assert not step.fits(tokens_for(known, 25), caches)
    assert not step.fits(mx.zeros((2, 3), mx.int32), caches)
    assert not step.fits(tokens_for(known, 3), None)
    if any(isinstance(entry.state[0], list) for entry in caches):
        caches[0].lengths = mx.array([3])
        assert not step.fits(tokens_for(known, 3), caches)


def test_many_rows_are_not_scored(known, step):
    assert step.score(mx.zeros((2, 13, known.hidden_size))) is None


def test_a_cpu_never_runs_a_step(known):
    assert known.step is None


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "qwen2", "lfm2"])
def test_a_model_that_is_not_known_has_no_step(kind, tmp_path):
    other = target.load(str(tiny.folder(kind, tmp_path)), dtype="float32")
    assert steps.for_model(other.model, other.backbone) is None


def test_a_quantised_model_is_stepped_too(tmp_path):
    folder = tiny.quantised(tiny.folder("qwen3", tmp_path), tmp_path)
    stored = target.load(str(folder), dtype="float32")
    step, caches = steps.for_model(stored.model, stored.backbone, layers.PLAIN), [stored.make_cache() for _ in range(2)]
    rows = tokens_for(stored, 9)
    hidden, _ = step(rows, caches[0])
    close(hidden, stored.forward(rows, caches[1]).hidden, 3e-4)  # quantised products sum in another order still


def test_rows_kept_of_several_cycles_are_what_feeding_them_leaves(known, step):
    """A commit leaves what it owes to the state to the next step's kernel; other forwards read it settled."""
    text, mine, theirs = tokens_for(known, 60), known.make_cache(), known.make_cache()
    for caches in (mine, theirs):
        known.forward(text[:, :7], caches)
    done = 7
    for W, n in ((8, 3), (8, 1), (5, 5), (16, 2), (8, 0), (3, 2)):
        arm(mine)
        step(text[:, done : done + W], mine)
        take_back(mine, W, n)
        if n:
            known.forward(text[:, done : done + n], theirs)
        done += n
    assert any(getattr(entry, "owed", None) for entry in mine) == any(hasattr(entry, "owed") for entry in mine)
    assert_same(mine, theirs)


def test_rows_owed_to_a_state_survive_a_forward_that_is_taken_back(known, step):
    text, mine, theirs = tokens_for(known, 40), known.make_cache(), known.make_cache()
    arm(mine)
    step(text[:, :8], mine)
    take_back(mine, 8, 3)
    known.forward(text[:, :3], theirs)
    for again in (step, known.forward):
        arm(mine)
        again(text[:, 3:9], mine)
        take_back(mine, 6, 0)
    arm(mine)  # and one that was not fed at all
    take_back(mine, 0, 0)
    assert_same(mine, theirs)


@pytest.mark.parametrize("n", [0, 3, 9, 17])
def test_rows_fed_in_two_steps_can_be_taken_back(known, step, n):
    """Each step pads its rows to a kernel's tile; what a transaction holds of them is the rows alone."""
    text, mine, theirs = tokens_for(known, 40), known.make_cache(), known.make_cache()
    for caches in (mine, theirs):
        known.forward(text[:, :7], caches)
    arm(mine)
    step(text[:, 7:12], mine)
    step(text[:, 12:24], mine)
    take_back(mine, 17, n)
    if n:
        known.forward(text[:, 7 : 7 + n], theirs)
    assert_same(mine, theirs)


def test_what_a_step_needs_is_what_is_measured_for_its_model():
    """Every verdict that `needed` asks for is one that the modules' checks would record, at Qwen3.5's proportions."""
    from drafter import shapes
    from kernels import selfcheck

    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    delta = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    known = shapes.build("shape:qwen3_5_4b", dtype="bfloat16", **small, **heads, **delta)
    step = steps.for_model(known.model, known.backbone)
    measured = {(check.kernel, check.case) for check in selfcheck.checks_for(selfcheck.dims_of(known.model))}
    needed = layers.needed(step.layers, step.head)
    assert layers.served(step.layers, step.head)
    assert {kernel for kernel, _ in needed} == {
        "small_matmul.product", "block_attention.attend_rows", "fused_rows.rotate_heads", "fused_rows.gated_norm",
        "fused_layer.layer_step",
    }  # fmt: skip
    assert needed <= measured


def test_heads_that_the_kernels_do_not_know_have_no_ready_step(known, step):
    assert not layers.served(step.layers, step.head)  # float32, and heads of 32


def test_a_layer_with_a_window_is_not_known(tmp_path):
    path = tiny.folder(
        "llama", tmp_path, sliding_window=9, layer_types=["full_attention", "sliding_attention", "full_attention"]
    )
    windowed = target.load(str(path), dtype="float32")
    assert any(layer.use_sliding for layer in windowed.model.layers)
    assert steps.for_model(windowed.model, windowed.backbone) is None


def test_taps_may_count_from_the_end(known, step):
    rows = tokens_for(known, 3)
    found, expected = step(rows, known.make_cache(), (-1, 0)), known.forward(rows, known.make_cache(), (-1, 0))
    for one, other in zip(found[1], expected.taps, strict=True):
        close(one, other)


def test_what_pads_is_finite_wherever_the_rows_are(known, step):
    """The last row pads: an id that no text holds, such as 0, may have an embedding that is not finite."""
    table = known.backbone.embed_tokens
    kept, rows = mx.array(table.weight), tokens_for(known, 5)
    expected = step(rows, known.make_cache())[0]
    table.weight[0] = mx.nan
    try:
        close(step(rows, known.make_cache())[0], expected, 0)
    finally:
        table.weight = kept


def test_a_hidden_state_of_another_dtype_is_left_to_the_models_own_head(known, step):
    assert step.score(mx.zeros((1, 2, known.hidden_size), mx.bfloat16)) is None
