"""The target: load, freeze, fingerprint, tap, embed, score.

R rows, T tokens, D hidden, V vocabulary. Everything mlx-lm loads with a list of layers is a candidate. Taps, embedding
and head are read by giving *instances* a subclass of their own class for the length of one call: no class or module
global changes, parameter names stay, and a second model in the process is never touched.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten, tree_unflatten

from drafter import fingerprint, hybrid, packed, sources, steps, trial
from drafter.watch import Reached, recording, returning, stopping, watched
from kernels import backend, selfcheck
from kernels.blas import cache_folder
from kernels.errors import UserError, compiler_fault

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Forward:
    """One forward of the target: `hidden` [R,T,D] after the final norm, `taps` of [R,T,D] in the order asked."""

    hidden: mx.array
    taps: tuple = ()


@dataclasses.dataclass(frozen=True)
class Target:
    """A frozen model whose output is authoritative. Build it with `load`."""

    model: nn.Module
    tokenizer: object  # mlx-lm's TokenizerWrapper
    config: dict
    path: pathlib.Path
    source: str
    dtype: str
    fingerprint: str
    tokenizer_sha256: str
    template_sha256: str | None
    backbone: nn.Module
    hidden_size: int
    vocab_size: int

    @property
    def num_layers(self):
        """How many decoder layers the target has."""
        return len(self.model.layers)

    @property
    def settings(self):
        """The text model's configuration: config.json, or its `text_config` where there is one."""
        return self.config.get("text_config", self.config)

    @property
    def max_length(self):
        """The context in tokens, or None where the configuration does not say."""
        return self.settings.get("max_position_embeddings")

    @property
    def eos_ids(self):
        """The token ids that end an answer."""
        return frozenset(self.tokenizer.eos_token_ids)

    @functools.cached_property
    def embedding_scale(self):
        """What the model multiplies its embedding table by (Gemma's √D); 1.0 where it does not, or has no table."""
        table = getattr(self.backbone, "embed_tokens", None)
        if table is None:
            return 1.0
        tokens = mx.arange(2, 6)[None]
        stored, fed = table(tokens).astype(mx.float32), self.embed(tokens).astype(mx.float32)
        ratio = (mx.sum(stored * fed) / mx.sum(stored * stored)).item()
        return 1.0 if abs(ratio - 1) < 1e-3 else ratio

    def spare_id(self):
        """An id that no text of this target holds, for a drafter's mask token: (id, why).

        The tokenizer's own mask token, else the first embedding row past the tokenizer's vocabulary, else the first
        special token that neither ends, begins, pads nor stands in the chat template.
        """
        tokenizer = self.tokenizer
        if tokenizer.mask_token_id is not None:
            return tokenizer.mask_token_id, "the tokenizer's mask token"
        unused = max(tokenizer.get_vocab().values()) + 1
        if unused < self.vocab_size:
            return unused, "the first embedding row past the tokenizer's vocabulary"
        spoken = str(tokenizer.chat_template) if tokenizer.has_chat_template else ""
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        taken = self.eos_ids | {getattr(tokenizer, name) for name in names}
        for index, token in sorted(tokenizer.added_tokens_decoder.items()):
            if token.special and index not in taken and token.content not in spoken:
                return index, f"the unused special token {token.content}"
        raise UserError(f"target {self.source}: no spare token id for the mask; name one with drafter.mask_token_id=ID")

    def identity(self):
        """What a manifest or result records of this target."""
        names = ("source", "fingerprint", "tokenizer_sha256", "template_sha256", "dtype")
        return {name: getattr(self, name) for name in names}

    def live_digest(self):
        """The fingerprint of the parameters in memory: equal before and after training, or something moved."""
        return fingerprint.of_arrays(dict(tree_flatten(self.model.parameters())))

    def make_cache(self, max_kv_size=None):
        """New, empty caches, one a layer: mlx-lm's own, and states that can take rows back where layers carry one."""
        return hybrid.make_cache(self.model, max_kv_size)

    @functools.cached_property
    def step(self):
        """The compiled forward of few rows, or None where this target or this machine has none."""
        step = steps.for_model(self.model, self.backbone)
        return step if step and step.ready else None

    def forward(self, tokens, cache=None, taps=()):
        """Run the target on tokens [R,T]; taps names the 0-based layers whose outputs come back. Returns Forward."""
        if self.step and self.step.fits(tokens, cache):
            return Forward(*self.step(tokens, cache, taps))
        return self.by_modules(tokens, cache, taps)

    def by_modules(self, tokens, cache=None, taps=()):
        """`forward` by the model's own modules."""
        layers = [self.model.layers[index] for index in taps]
        with watched(layers, recording) as held:
            hidden = self.backbone(tokens, cache=cache)
        return Forward(hidden, tuple(held[id(layer)] for layer in layers))

    def forward_packed(self, tokens, documents, taps=()):
        """Run packed rows: tokens [R,T] and document ids [R,T]; no token sees another document. Returns Forward.

        Raises UserError for a target whose layers would let documents see each other.
        """
        if self.rows_at_once is None or len(tokens) == 1:
            return self.masked(tokens, documents, taps)
        ones = [self.masked(tokens[row][None], documents[row][None], taps) for row in range(len(tokens))]
        taps = zip(*(one.taps for one in ones))
        return Forward(mx.concatenate([one.hidden for one in ones]), tuple(mx.concatenate(tap) for tap in taps))

    def masked(self, tokens, documents, taps=()):
        """`forward_packed` in one forward of all rows, without asking whether the model keeps rows apart."""
        return self.forward(tokens, packed.caches(self.make_cache(), documents), taps)

    @functools.cached_property
    def rows_at_once(self):
        """How many packed rows the model takes in one forward: None for any number, or 1; tried once, on this model."""
        foreign = packed.foreign(self.make_cache())
        if foreign:
            raise UserError(
                f"target {self.source}: its layers keep {', '.join(foreign)}, which may carry one document's state into"
                " the next; a drafter for it cannot be trained by this version"
            )
        for rows, answer in ((2, None), (1, 1)):
            if packed.separates(lambda *row: self.masked(*row).hidden, rows):
                return answer
        raise UserError(
            f"target {self.source}: its attention does not keep packed documents apart; a drafter for it cannot be"
            " trained by this version"
        )

    def embed(self, tokens):
        """What the first layer is given for tokens [R,T], embedding scale included: [R,T,D]."""
        with watched([self.model.layers[0]], stopping):
            try:
                self.backbone(tokens)
            except Reached as reached:
                return reached.value
        raise UserError(f"target {self.source}: its model never called its first layer; it cannot be embedded")

    def score(self, hidden, differentiable=False):
        """Logits [..., V] of hidden [..., D] by the target's own head, with its soft-cap and multiplier.

        differentiable: whether gradients are wanted, which the kernel that scores few rows does not give.
        """
        if not differentiable and self.step and (logits := self.step.score(hidden)) is not None:
            return logits
        return self.by_head(hidden)

    def by_head(self, hidden):
        """`score` by the model's own head."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        with watched([self.backbone], returning) as held:
            held[id(self.backbone)] = rows
            logits = self.model(mx.zeros(rows.shape[:2], mx.uint32))
        return logits.reshape(*hidden.shape[:-1], -1)

    def raw_reason(self, raw=False):
        """Why a prompt is fed without a chat template, or None when the template is applied."""
        if raw:
            return "raw was asked for"
        return None if self.tokenizer.has_chat_template else f"target {self.source} has no chat template"

    def encode(self, prompt, *, raw=False, system=None, options=None):
        """Token ids of a prompt (text, or a list of {role, content}), with the chat template and options unless raw."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        for text in [system or "", *(message["content"] for message in messages)]:
            check_text(text)
        if self.raw_reason(raw):
            text = "\n".join([*([system] if system else []), *(message["content"] for message in messages)])
            return list(self.tokenizer.encode(text))
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return list(self.tokenizer.encode(self.render(messages, options), add_special_tokens=False))

    def render(self, messages, options=None, *, generation=True):
        """The chat template's text of messages, up to where the assistant is to go on; options: more keywords."""
        options = {"add_generation_prompt": generation} | (options or {})
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is the checkpoint's own program
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split())
            raise UserError(f"target {self.source}: its chat template refuses the roles {roles} ({reason})") from error


def check_text(text):
    """Raise UserError for text that is not Unicode: bytes that a shell could not decode, or half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt: character {error.start} is not valid Unicode ({error.reason}); save it as UTF-8"
        ) from None


def load(name, *, dtype=None, revision=None):
    """Load and freeze a target.

    name: a name under configs/target, a model folder, a .gguf file, a `pypi:` source, or a hub id with an optional
    @revision. dtype: compute dtype (float32, bfloat16, float16); None is the device's own: float32 on CPU, where only
    that is fast, bfloat16 elsewhere. Raises UserError where the target is missing, damaged or unknown to mlx-lm.
    """
    backend.check()
    dtype = dtype or default_dtype()
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    location = sources.locate(name, dtype=dtype, revision=revision)
    model, config = load_model(location)
    cast(model, getattr(mx, dtype))
    model.freeze()
    hybrid.attach(model)
    selfcheck.ensure(selfcheck.dims_of(model))
    backbone = find_backbone(model, location)
    try:
        hidden_size, vocab_size = probe(model, backbone, location)
    except RuntimeError as error:  # MLX's own: an operation that this device does not know in this dtype
        if fault := compiler_fault(error):
            raise UserError(f"target {location.source}: {fault}") from error
        reason = " ".join(str(error).split())
        raise UserError(
            f"target {location.source}: MLX cannot run it in {dtype} here ({reason}); choose another dtype"
        ) from error
    tokenizer = load_tokenizer(location, config)
    tokenizer_sha256, template_sha256 = tokenizer_digests(tokenizer)
    target = Target(
        model=model,
        tokenizer=tokenizer,
        config=config,
        path=location.folder,
        source=location.source,
        dtype=dtype,
        fingerprint=stored_fingerprint(location),
        tokenizer_sha256=tokenizer_sha256,
        template_sha256=template_sha256,
        backbone=backbone,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    trial.ensure(target)
    return target


def default_dtype():
    """The device's own compute dtype."""
    return "float32" if mx.default_device() == mx.cpu else "bfloat16"


def load_model(location):
    """mlx-lm's model and configuration, its refusals put in one line."""
    for file in sorted(location.folder.glob("model*.safetensors")):
        fingerprint.header(file)  # a damaged file is named here, not deep inside a loader
    try:
        return mlx_lm.utils.load_model(location.folder)
    except json.JSONDecodeError as error:
        raise UserError(f"{location.folder}/config.json: not JSON ({error}); copy it again") from error
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"target {location.source}: mlx-lm {mlx_lm.__version__} cannot load it ({reason}); "
            "scripts/doctor.py --target says whether a newer mlx-lm knows it"
        ) from error


def cast(model, dtype):
    """Give the floating-point parameters the compute dtype, but for those that the model keeps as they are stored."""
    wanted = getattr(model, "cast_predicate", lambda name: True)
    parameters = [(name, value) for name, value in tree_flatten(model.parameters()) if wanted(name)]
    floating = [(name, value) for name, value in parameters if mx.issubdtype(value.dtype, mx.floating)]
    model.update(tree_unflatten([(name, value.astype(dtype)) for name, value in floating]))


def load_tokenizer(location, config):
    """mlx-lm's wrapped tokenizer, its refusals put in one line."""
    try:
        tokenizer = mlx_lm.utils.load_tokenizer(location.folder, eos_token_ids=config.get("eos_token_id"))
        if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):  # transformers makes up an empty one
            raise ValueError("it knows special tokens and no others")
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"target {location.source}: its tokenizer cannot be read ({reason}); copy tokenizer.json and"
            f" tokenizer_config.json to {location.folder} again"
        ) from error
    return tokenizer


def find_backbone(model, location):
    """The module that owns the layers mlx-lm exposes: what maps tokens to hidden states."""
    first = model.layers[0]
    for _, module in model.named_modules():
        if any(isinstance(value, list) and any(layer is first for layer in value) for value in module.values()):
            return module
    raise UserError(f"target {location.source}: found no module that owns its list of layers; it cannot be tapped")


def probe(model, backbone, location):
    """(D, V), after checking that a tapped forward plus the head equals the plain forward bit for bit."""
    tokens = mx.array([[1, 2, 3, 5, 8]])
    plain = model(tokens)
    with watched(list(model.layers), recording) as taps:
        hidden = backbone(tokens)
    with watched([backbone], returning) as held:
        held[id(backbone)] = hidden
        again = model(mx.zeros_like(tokens))  # as `score` asks: hidden states alone must decide
    if len(taps) != len(set(map(id, model.layers))) or not mx.array_equal(plain, again, equal_nan=True).item():
        raise UserError(
            f"target {location.source}: its tapped forward differs from its plain forward; it cannot be used"
        )
    return hidden.shape[-1], plain.shape[-1]


def stored_fingerprint(location):
    """The fingerprint of the parameters as stored; of a conversion, that of the file it was converted from."""
    cache = cache_folder() / "fingerprints.json"
    found = fingerprint.of_folder(location.folder, cache)
    record = location.folder / "source.json"
    if not record.is_file():
        return found
    try:
        source = json.loads(record.read_text())
        intact = source["converted"] == found
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise UserError(f"{location.folder}: changed since it was converted; delete that folder and run again")
    return source["fingerprint"]


def tokenizer_digests(tokenizer):
    """SHA-256 of the vocabulary (what each id means, whatever file it came in), and of the chat template's text."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
    template = str(tokenizer.chat_template).encode() if tokenizer.has_chat_template else None
    return hashlib.sha256(vocabulary).hexdigest(), template and hashlib.sha256(template).hexdigest()
