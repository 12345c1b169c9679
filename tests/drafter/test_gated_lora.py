"""A gated LoRA: what it adds, what it never changes, and files that do not fit. Everything in float32 but where stated.

The oracle of an adapted projection is NumPy in float64, row by row.
"""

import dataclasses
import json
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

import tiny
from drafter import checkpoint, dflash, gated_lora, shapes
from drafter import config as configuration
from drafter import target as targets
from kernels.errors import UserError

GATE = (False, False, True, True, False, True)
TOKENS = mx.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
EVERYTHING = ("attention", "mlp", "delta", "delta_gates")
FLOAT32 = 3e-5  # relative to the largest output, of sums of up to 160 products
KINDS = {"llama": ("attention", "mlp"), "qwen3_5": EVERYTHING, "gemma3": ("mlp",), "qwen3_next": ("delta",)}


@pytest.fixture(scope="module")
def adapter(tiny_target):
    """make(kind, **changes): an adapter whose factors are random and far from zero."""

    def make(kind="llama", **changes):
        target = tiny_target(kind)
        options = {"rank": 3, "alpha": 7.0, "block_size": 5, "targets": KINDS[kind], "mask_token_id": 4}
        options |= {"noise_limit": tiny.VOCABULARY, "fingerprint": target.fingerprint} | changes
        return randomised(gated_lora.GatedLora(target, gated_lora.GatedLoraConfig(**options)))

    return make


def randomised(drafter):
    for number, name in enumerate(drafter):
        keys = mx.random.split(mx.random.key(number), 2)
        for factor, key in zip(("lora_a", "lora_b"), keys):
            drafter[name][factor] = 0.2 * mx.random.normal(drafter[name][factor].shape, key=key)
    mx.eval(drafter.parameters())
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_that_is_off_is_the_target_bit_for_bit(adapter, kind):
    drafter = adapter(kind)
    plain = drafter.target.forward(TOKENS, drafter.target.make_cache()).hidden
    assert mx.array_equal(drafter.forward(TOKENS, [False] * 6, drafter.target.make_cache()), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_before_the_first_that_is_on_keep_their_bits_and_later_ones_move(adapter, kind):
    drafter = adapter(kind)
    plain = drafter.target.forward(TOKENS, drafter.target.make_cache()).hidden
    found = drafter.forward(TOKENS, GATE, drafter.target.make_cache())
    assert mx.array_equal(found[:, :2], plain[:, :2])
    assert mx.abs(found - plain)[:, 2:].max(axis=(0, 2)).min() > 1e-2


def test_a_projection_adds_its_low_rank_product_in_the_rows_that_are_on(adapter):
    drafter = adapter(rank=3, alpha=7.0)
    name = "model.layers.1.mlp.up_proj"
    view = drafter.view(gated_lora.runs_of(GATE))
    x = mx.random.normal((2, 6, 96), key=mx.random.key(1))
    weight = np.array(drafter.target.model.layers[1].mlp.up_proj.weight, np.float64)
    a, b = (np.array(drafter[name][factor], np.float64) for factor in ("lora_a", "lora_b"))
    expected = np.zeros((2, 6, 160))
    for row, t in np.ndindex(2, 6):
        one = np.array(x[row, t], np.float64)
        expected[row, t] = weight @ one + GATE[t] * 7.0 / 3 * (one @ a) @ b
    found = np.array(view.layers[1].mlp.up_proj(x))
    np.testing.assert_allclose(found, expected, atol=FLOAT32 * np.abs(expected).max(), rtol=0)


def test_rows_that_are_off_cost_no_low_rank_work(adapter, monkeypatch):
    drafter, seen = adapter(), []
    update = gated_lora.GatedLinear.update
    monkeypatch.setattr(
        gated_lora.GatedLinear, "update", lambda self, x, dtype: (seen.append(x.shape[1]), update(self, x, dtype))[1]
    )
    drafter.forward(TOKENS, [False] * 6)
    assert not seen
    drafter.forward(TOKENS, GATE)
    assert sum(seen) == 3 * len(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_adapting_leaves_the_target_as_it_was(adapter, kind):
    drafter = adapter(kind)
    target = drafter.target
    before, classes = target.live_digest(), [type(module) for module in target.model.modules()]
    drafter.forward(TOKENS, GATE, target.make_cache())
    assert target.live_digest() == before
    assert [type(module) for module in target.model.modules()] == classes
    assert not target.model.training


def test_two_adapters_and_two_gates_interleave_without_a_trace(adapter):
    """Within one forward of one adapter, another's forward of another gate runs; neither notices."""
    first, second = adapter(), adapter(rank=5)
    alone = [one.forward(TOKENS, gate) for one, gate in ((first, GATE), (second, [True] * 6))]
    view = first.view(gated_lora.runs_of(GATE))
    inner, layer = [], view.layers[1].mlp

    class Nesting(type(layer)):
        def __call__(self, x):
            inner.append(second.forward(TOKENS, [True] * 6))
            return super().__call__(x)

    layer.__class__ = Nesting
    assert mx.array_equal(first.forward(TOKENS, GATE), alone[0])
    assert mx.array_equal(inner[0], alone[1])


def test_two_threads_with_different_gates_do_not_disturb_each_other(adapter):
    drafter = adapter()
    gates = [GATE, (True,) * 6]
    expected = [np.array(drafter.forward(TOKENS, gate)) for gate in gates]
    wrong = []

    def work(index):
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(8):
                if not np.array_equal(np.array(drafter.forward(TOKENS, gates[index])), expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_gate_of_another_length_is_refused(adapter):
    with pytest.raises(ValueError, match="a gate of 5 for 6 rows"):
        adapter().forward(TOKENS, GATE[:5])


def test_a_compiled_step_serves_the_gate_that_is_off_and_never_the_one_that_is_on(adapter):
    drafter, asked = adapter(), []

    class Counting:
        def forward(self, tokens, cache=None, taps=()):
            asked.append(tokens.shape)
            return type("Forward", (), {"hidden": tokens})

        def __getattr__(self, name):
            return getattr(target, name)

    target = drafter.target
    object.__setattr__(drafter, "target", Counting())
    drafter.forward(TOKENS, [False] * 6)
    assert asked == [(2, 6)]
    drafter.forward(TOKENS, GATE)
    assert asked == [(2, 6)]


def test_an_untrained_adapter_changes_nothing(tiny_target):
    target = tiny_target("llama")
    shape = gated_lora.config_for(target, configuration.AdapterConfig(), 4)
    drafter = gated_lora.initialise(gated_lora.GatedLora(target, shape), 3)
    found = drafter.forward(TOKENS, [True] * 6)
    assert mx.array_equal(found, target.forward(TOKENS).hidden)
    spread = np.concatenate([np.array(drafter[name].lora_a).ravel() for name in drafter])
    assert abs(spread.std() / 0.01 - 1) < 0.02
    assert shape.alpha == 16 * 16


def test_bidirectional_noise_sees_its_block_and_the_pending_row_does_not(adapter):
    drafter = adapter(causal=False)
    other = mx.concatenate([TOKENS[:, :-1], TOKENS[:, -1:] + 1], axis=1)
    found = []
    for tokens in (TOKENS, other):
        cache = drafter.target.make_cache()
        drafter.target.forward(mx.array([[20, 21, 22]] * 2), cache)
        found.append(drafter.draft(tokens, cache))
        assert not any("make_mask" in vars(entry) for entry in cache)
    moved = mx.abs(found[0] - found[1]).max(axis=(0, 2))
    assert moved[0] == 0
    assert moved[1:].min() > 1e-3


def test_a_hybrid_has_no_bidirectional_blocks(adapter):
    with pytest.raises(UserError, match="adapter.causal=true"):
        adapter("qwen3_5", causal=False)


def test_noise_is_keyed_and_stays_inside_its_ids(adapter):
    drafter = adapter(noise_limit=23)
    ids = np.array(drafter.noise((3000,), mx.random.key(1)))
    assert set(ids) == set(range(1, 23))
    assert np.array_equal(ids, np.array(drafter.noise((3000,), mx.random.key(1))))
    masks = adapter(noise="mask", mask_token_id=9).noise((2, 5), mx.random.key(1))
    assert np.array_equal(np.array(masks), np.full((2, 5), 9))


def test_noise_ends_at_a_mask_id_behind_the_text_and_not_at_one_among_the_first(tiny_target):
    target = tiny_target("llama")
    assert gated_lora.noise_limit(target, 300) == 300
    assert gated_lora.noise_limit(target, 4) == tiny.VOCABULARY


def test_a_projection_that_is_not_there_is_named(adapter):
    with pytest.raises(UserError, match="no linear layer 'delta'"):
        adapter("llama", targets=("attention", "delta"))


# Files.


@pytest.fixture
def bare(adapter, tmp_path):
    """write(kind, change): an adapter file without metadata or anything beside it; change edits its tensors."""

    def write(kind="qwen3_5", change=lambda arrays: None, **options):
        drafter = adapter(kind, **options)
        arrays = dict(tree_flatten(drafter.parameters()))
        change(arrays)
        path = tmp_path / "adapter.safetensors"
        mx.save_safetensors(str(path), arrays)
        return path, drafter

    return write


def test_a_bare_adapter_is_read_off_its_tensors(bare):
    path, drafter = bare()
    loaded = checkpoint.load_drafter(path, drafter.target, allow_mismatch=True)
    config = loaded.drafter.config
    assert (config.rank, config.alpha, config.block_size, loaded.kind) == (3, 48, 4, "gated_lora")
    assert loaded.mismatch == {"trained_for": None, "used_with": drafter.target.fingerprint}
    found = dict(tree_flatten(loaded.drafter.parameters()))
    assert all(mx.array_equal(value, found[name]) for name, value in tree_flatten(drafter.parameters()))
    told = checkpoint.load_drafter(path, drafter.target, allow_mismatch=True, alpha=5.0)
    assert told.drafter.config.alpha == 5.0


def test_a_bare_adapter_that_names_no_target_is_refused_until_allowed(bare):
    path, drafter = bare()
    with pytest.raises(UserError, match="does not say which target"):
        checkpoint.load_drafter(path, drafter.target)


Q = "language_model.model.layers.2.self_attn.q_proj"
CHANGES = {
    "a missing tensor": (lambda a: a.pop(f"{Q}.lora_b"), f"missing {Q}.lora_b"),
    "a layer too many": (lambda a: a.update({f"{Q}.lora_a".replace("2", "9"): mx.zeros((9, 3))}), "unexpected .*9[.]"),
    "another width": (lambda a: a.update({f"{Q}.lora_a": mx.zeros((95, 3))}), r"lora_a is \(95, 3\), not \(96, 3\)"),
    "another rank": (lambda a: a.update({f"{Q}.lora_b": mx.zeros((4, 256))}), r"ranks \[3, 4\]"),
    "another kind of tensor": (lambda a: a.update({"norm.weight": mx.zeros(3)}), "tensor 'norm.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(bare, change):
    edit, message = CHANGES[change]
    path, drafter = bare(change=edit)
    with pytest.raises(UserError, match=message) as refusal:
        checkpoint.load_drafter(path, drafter.target, allow_mismatch=True)
    assert "\n" not in str(refusal.value)


def test_an_adapter_of_another_architecture_lists_the_first_differences(bare, tiny_target):
    path, _ = bare("qwen3_5", targets=("attention",))
    with pytest.raises(UserError, match="missing model.layers.0.*missing.*missing.* and .* more"):
        checkpoint.load_drafter(path, tiny_target("llama"), allow_mismatch=True)


def test_a_saved_adapter_comes_back_alone_or_in_its_folder(adapter, tmp_path):
    drafter = adapter("qwen3_5", noise="mask")
    checkpoint.save_drafter(tmp_path / "whole", drafter)
    file = tmp_path / "whole" / "model.safetensors"
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(file.read_bytes())
    _, metadata = mx.load(str(file), return_metadata=True)
    assert json.loads(metadata["kind"]) == "gated_lora"
    assert json.loads(metadata["fingerprint"]) == drafter.target.fingerprint
    for path in (tmp_path / "whole", alone):
        loaded = checkpoint.load_drafter(path, drafter.target, allow_mismatch=path != alone)
        assert loaded.drafter.config == drafter.config
        assert loaded.kind == "gated_lora"
        found = dict(tree_flatten(loaded.drafter.parameters()))
        assert all(mx.array_equal(value, found[name]) for name, value in tree_flatten(drafter.parameters()))


def test_an_adapter_alone_is_refused_on_another_target(adapter, tmp_path, tiny_target):
    checkpoint.save_drafter(tmp_path, adapter("llama"))
    (tmp_path / "config.json").unlink()
    other = tiny_target("llama", seed=2)
    with pytest.raises(UserError, match="made for the target"):
        checkpoint.load_drafter(tmp_path / "model.safetensors", other)
    loaded = checkpoint.load_drafter(tmp_path / "model.safetensors", other, allow_mismatch=True)
    assert loaded.mismatch["used_with"] == other.fingerprint


@pytest.fixture(scope="module")
def qwen3_5_4b():
    """The Qwen3.5-4B-shaped target, none of whose weights is ever computed."""
    config = shapes.SHAPES["qwen3_5_4b"]
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(dict(config)))
    return targets.Target(
        model=model, tokenizer=None, config=config, path=None, source="shape", dtype="bfloat16", fingerprint=None,
        tokenizer_sha256=None, template_sha256=None, backbone=model.language_model.model, hidden_size=2560,
        vocab_size=248320,
    )  # fmt: skip


def test_the_published_adapter_has_its_modules_tensors_and_parameters(qwen3_5_4b):
    shape = gated_lora.GatedLoraConfig(16, 256, 4, ("attention", "mlp"), 248070, 248070)
    drafter = gated_lora.GatedLora(qwen3_5_4b, shape)
    tensors = dict(tree_flatten(drafter.parameters()))
    assert (len(list(drafter)), len(tensors)) == (128, 256)
    assert dflash.parameter_count(drafter) == 21_233_664
    assert sum(value.nbytes for value in tensors.values()) == 84_934_656
    first = "language_model.model.layers.3.self_attn.q_proj"
    assert tensors[f"{first}.lora_a"].shape == (2560, 16)
    assert tensors[f"{first}.lora_b"].shape == (16, 2 * 16 * 256)  # queries and their gates
    assert sum("self_attn" in name for name in drafter) == 8 * 4
    assert {name.split(".layers.")[1].split(".")[0] for name in drafter} == {str(i) for i in range(32)}


def test_the_published_layout_needs_no_metadata(qwen3_5_4b, monkeypatch):
    monkeypatch.setattr(targets.Target, "spare_id", lambda self: (248070, "as published"))
    own = gated_lora.GatedLora(qwen3_5_4b, gated_lora.GatedLoraConfig(16, 256, 4, ("attention", "mlp"), 248070, 248070))
    shapes_of = {name: value.shape for name, value in tree_flatten(own.parameters())}
    config = gated_lora.inferred(shapes_of, qwen3_5_4b)
    assert (config.rank, config.alpha, config.noise_limit) == (16, 256, 248070)
    again = gated_lora.GatedLora(qwen3_5_4b, config)
    assert {name: value.shape for name, value in tree_flatten(again.parameters())} == shapes_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": -1.0}, "alpha"),
        ({"noise": "pink"}, "'pink'"),
        ({"noise_limit": 1}, "limit"),
    ],
)
def test_a_shape_that_cannot_draft_is_refused(adapter, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(adapter().config, **changes)
