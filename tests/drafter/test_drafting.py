"""Compiled drafting against the drafter's own modules: hidden states of blocks after contexts that came in pieces.

B block. By plain operations in float32 the routes differ in the order of sums alone. In bfloat16, through the kernels'
host build, every operation of three layers rounds: there the bound is on the distance, √(Σ difference² ÷ Σ value²).
"""

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

import tiny
from drafter import drafting, layers, target, trial
from kernels import selfcheck, verdicts

FLOAT32 = 3e-5
BFLOAT16 = 2e-2
PIECES = (30, 1, 5, 24, 2)  # rows of a prompt, more than a step takes, then of cycles


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """On a CPU, MLX calls a C++ compiler for each trace."""
    monkeypatch.setattr(mx, "compile", lambda function: function)


@pytest.fixture
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture
def drafter(llama, tiny_config, random_drafter):
    return random_drafter(tiny_config(llama, block_size=7))


@pytest.fixture
def wide(tmp_path, tiny_config, random_drafter):
    """(target, drafter) in bfloat16 whose sizes the kernels take."""
    known = target.load(str(tiny.folder("llama", tmp_path, hidden_size=128, head_dim=32)), dtype="bfloat16")
    drafter = random_drafter(tiny_config(known, head_dim=64, intermediate_size=192, block_size=7))
    drafter.set_dtype(mx.bfloat16)
    return known, drafter


def drawn(drafter, n, seed):
    """Taps of n rows."""
    D, dtype = drafter.config.hidden_size, drafter.norm.weight.dtype
    keys = mx.random.split(mx.random.key(seed), len(drafter.config.target_layer_ids))
    return tuple(mx.random.normal((1, n, D), key=key).astype(dtype) for key in keys)


def blocks(route, drafter, pieces=PIECES, sizes=(7, 2, 4)):
    """Hidden states of blocks of each size after each piece of the context."""
    cache, found = route.make_cache(), []
    for seed, n in enumerate(pieces):
        route.extend(cache, drawn(drafter, n, seed))
        found += [route.draft(cache, mx.array([[20 + seed]], mx.uint32), B) for B in sizes]
    assert cache.offset == sum(pieces)
    return found


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=FLOAT32, rtol=0)


def test_blocks_are_the_modules_own_whatever_the_pieces_of_the_context(llama, drafter):
    compiled = drafting.Compiled(llama, drafter, layers.PLAIN)
    close(blocks(compiled, drafter), blocks(drafting.ByModules(llama, drafter), drafter))


def test_buffers_grow(llama, drafter, monkeypatch):
    monkeypatch.setattr(drafting.steps, "GROWTH", 8)
    compiled = drafting.Compiled(llama, drafter, layers.PLAIN)
    close(blocks(compiled, drafter), blocks(drafting.ByModules(llama, drafter), drafter))


def test_a_draft_leaves_the_context_as_it_was(llama, drafter):
    compiled = drafting.Compiled(llama, drafter, layers.PLAIN)
    cache = compiled.make_cache()
    compiled.extend(cache, drawn(drafter, 9, 0))
    before = [np.array(each) for each in compiled.state(cache)]
    compiled.draft(cache, mx.array([[8]], mx.uint32), 5)
    assert cache.offset == 9
    for one, other in zip(before, compiled.state(cache), strict=True):
        np.testing.assert_array_equal(one, np.array(other))


def test_the_kernels_bodies_draft_the_same(wide):
    known, drafter = wide
    built = {field.name: getattr(layers.KERNELS, field.name) for field in dataclasses.fields(layers.Route)}
    route = layers.Route(**{name: functools.partial(call, build=BUILD) for name, call in built.items()})
    found = blocks(drafting.Compiled(known, drafter, route), drafter, (30, 5), (7, 3))
    for one, other in zip(found, blocks(drafting.ByModules(known, drafter), drafter, (30, 5), (7, 3)), strict=True):
        assert trial.distance(one, other) < BFLOAT16


# --- which route serves


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine that seems to have a GPU, and what was found right on it so far: nothing."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)
    monkeypatch.setattr(selfcheck, "ensure", lambda dims: None)
    verdicts.decided.cache_clear()
    yield
    verdicts.decided.cache_clear()


def find_right(drafter):
    for kernel, case in drafting.needed(drafter):
        verdicts.record(kernel, case, "slow", "")


@pytest.mark.parametrize(("seconds", "kind"), [((1.0, 2.0), drafting.Compiled), ((2.0, 1.0), drafting.ByModules)])
def test_the_faster_route_serves_and_is_measured_once(gpu, wide, monkeypatch, seconds, kind):
    find_right(wide[1])
    calls = []
    monkeypatch.setattr(drafting, "measure", lambda *given: calls.append(1) or (1e-3, *seconds))
    routes = [drafting.fastest(*wide) for _ in range(2)]
    assert [type(route) for route in routes] == [kind, kind] and len(calls) == 1


def test_a_route_that_is_far_off_does_not_serve(gpu, wide, monkeypatch):
    find_right(wide[1])
    monkeypatch.setattr(drafting, "measure", lambda *given: (1.0, 1.0, 2.0))
    assert type(drafting.fastest(*wide)) is drafting.ByModules
    assert verdicts.state(drafting.NAME, drafting.case(wide[1])).verdict == "wrong"


def test_kernels_that_were_not_found_right_are_not_compiled(gpu, wide, monkeypatch):
    monkeypatch.setattr(drafting, "measure", None)
    assert type(drafting.fastest(*wide)) is drafting.ByModules


def test_what_it_needs_is_products_attention_and_rotation(wide):
    assert drafting.known(wide[1])
    assert {kernel for kernel, _ in drafting.needed(wide[1])} == {
        "small_matmul.product", "block_attention.attend_rows", "fused_rows.rotate_heads",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ("sliding_attention",) * 3, "sliding_window": 9},
        {"is_causal": True},
        {"head_dim": 24},
        {"intermediate_size": 200},
        {"block_size": 25},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}},
    ],
)
def test_drafters_that_the_kernels_do_not_know_draft_by_their_modules(gpu, wide, random_drafter, changes):
    config = dataclasses.replace(wide[1].config, **changes)
    drafter = random_drafter(config)
    drafter.set_dtype(mx.bfloat16)
    assert not drafting.known(drafter)
    assert type(drafting.fastest(wide[0], drafter)) is drafting.ByModules


def test_both_routes_are_measured_over_the_same_cycles(llama, drafter, monkeypatch):
    monkeypatch.setattr(trial, "ROUNDS", 2)
    error, mine, theirs = drafting.measure(llama, drafter, drafting.Compiled(llama, drafter, layers.PLAIN))
    assert 0 < error < 1e-5 and mine > 0 and theirs > 0
