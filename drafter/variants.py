"""Community-style modifications of a target, for asking how far a drafter carries to a checkpoint it never saw.

    quantised   affine, 4 or 8 bits (mlx-lm's own conversion)
    tuned       a LoRA fine-tune on text, fused into the weights (mlx-lm's own layers)
    merged      W + share · (W′ − W), with W′ of another target of the same shape
    ablated     one direction of the residual stream projected out of everything that writes to it ("abliterated")

D hidden, L layers, n prompts, R rows, T tokens. Each modifies the model of a loaded Target, which is then used up, and
returns what the variant's manifest says of it; `save` writes the model folder. A variant has a fingerprint of its own,
so drafters made for its parent are refused for it unless the mismatch is allowed by name.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import quantize_model

from drafter import checkpoint, hybrid, manifest, rng
from drafter import target as targets
from kernels.errors import UserError

KIND = "variant"
TEXT_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("*.jinja", "chat_template*", "generation_config.json"),
)  # what of a parent's folder says how text becomes tokens, and back
LORA_SCALE = 20.0  # mlx-lm's default
WRITERS = ("o_proj", "out_proj", "down_proj", "w2")  # last names of the modules that write to the residual stream
LEFT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # share of the direction that rounding leaves (assumed)


def open_parent(name, *, dtype=None):
    """The Target to modify. Raises UserError for one whose weights are quantised: rounding twice is another study."""
    parent = targets.load(name, dtype=dtype)
    if "quantization" in parent.config:
        raise UserError(f"target {parent.source}: its weights are quantised already; name the one it was made from")
    return parent


def quantised(target, *, bits, group_size):
    """Quantise every matrix whose rows are whole groups; returns the manifest's record."""
    with contextlib.redirect_stdout(sys.stderr):  # mlx-lm reports its bits a weight
        _, config = quantize_model(target.model, target.config, group_size, bits)
    if not any(name.endswith(".scales") for name, _ in tree_flatten(target.model.parameters())):
        raise UserError(
            f"target {target.source}: no matrix has rows of whole groups of {group_size}, so none can be quantised; "
            "choose a smaller --group-size"
        )
    target.config.update(config)
    return {"recipe": "quantised", "bits": bits, "group_size": group_size}


# A fine-tune.


def tuned(target, texts, *, steps, rank, learning_rate, rows, row_tokens, seed, say=lambda step, loss: None):
    """Fine-tune LoRA on windows of texts (a list of str) and fuse it; returns the manifest's record.

    rows, row_tokens: windows of a step and their length. say: called with (step, loss) after each.
    Raises UserError for texts shorter than one window, and where the loss is no number.
    """
    tokens = joined(target, texts, row_tokens)
    mx.random.seed(seed)  # mlx-lm draws its adapters from the global stream
    losses = []
    with hybrid.detached(target.model) as model:
        linear_to_lora_layers(model, target.num_layers, {"rank": rank, "scale": LORA_SCALE, "dropout": 0.0})
        model.train()
        optimizer = optim.Adam(learning_rate=learning_rate)
        step_loss = nn.value_and_grad(model, next_token_loss)
        for step in range(steps):
            loss, gradients = step_loss(model, windows(tokens, rows, row_tokens, seed, step))
            optimizer.update(model, gradients)
            mx.eval(model.trainable_parameters(), optimizer.state)
            losses.append(loss.item())
            say(step + 1, losses[-1])
            if not np.isfinite(losses[-1]):
                raise UserError(f"step {step + 1}: the loss is {losses[-1]}; lower --learning-rate")
        fuse(model)
        model.eval()
    sizes = {"steps": steps, "rank": rank, "learning_rate": learning_rate, "rows": rows, "row_tokens": row_tokens}
    return {"recipe": "tuned", **sizes, "seed": seed, "first_loss": losses[0], "last_loss": losses[-1]}


def joined(target, texts, row_tokens):
    """All texts as one row of ids [n] int32, each ended by the target's end of text."""
    end = target.tokenizer.eos_token_id
    tokens = np.array([token for text in texts for token in (*target.tokenizer.encode(text), end)], np.int32)
    if len(tokens) <= row_tokens:
        raise UserError(f"{len(tokens)} tokens of text are less than one row of {row_tokens}; give more text")
    return tokens


def windows(tokens, rows, row_tokens, seed, step):
    """Windows [R,T+1] of the text, drawn by (seed, step)."""
    starts = rng.numpy_rng(seed, "fine-tune windows", step).integers(0, len(tokens) - row_tokens, rows)
    return mx.array(tokens[starts[:, None] + np.arange(row_tokens + 1)])


def next_token_loss(model, tokens):
    """Mean cross-entropy of every next token of rows [R,T+1], in float32."""
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def fuse(model):
    """Replace every adapted module by one with the update in its weights."""
    fused = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))


# A merge.


def merged(target, other, *, share):
    """Move the weights towards another Target's of the same shape; returns the manifest's record.

    Raises UserError naming the first tensor that the two do not share.
    """
    ours, theirs = (dict(tree_flatten(one.model.parameters())) for one in (target, other))
    for name in sorted(ours.keys() | theirs.keys()):
        shapes = [None if name not in one else tuple(one[name].shape) for one in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{name} is {shapes[0]} in {target.source} and {shapes[1]} in {other.source}; only targets of one "
                "shape can be merged"
            )
    pairs = [(name, ours[name].astype(mx.float32), theirs[name].astype(mx.float32)) for name in ours]
    blend = [(name, (one + share * (two - one)).astype(ours[name].dtype)) for name, one, two in pairs]
    target.model.update(tree_unflatten(blend))
    return {"recipe": "merged", "share": share, "with": other.identity()}


# A direction.


def ablated(target, towards, away, *, layer=None):
    """Project one direction out of every matrix that writes to the residual stream; returns the manifest's record.

    The direction is the difference of the mean activations of two lists of prompts (texts) at the last prompt token
    after `layer`, normalised: r. A writer W [D,·] becomes W − r(rᵀW), and an embedding row e becomes e − (e·r)r
    (Arditi et al., arXiv 2406.11717, where both lists are instructions, refused and answered). layer: 0-based; None is
    the middle one (assumed; the published choices lie between .3 and .7 of the depth).
    Raises UserError where the direction cannot be told, or is still there afterwards: a model with norms or other
    writers of its own after the matrices.
    """
    layer = target.num_layers // 2 if layer is None else layer
    if not 0 <= layer < target.num_layers:
        raise UserError(f"layer {layer}: {target.source} has layers 0 to {target.num_layers - 1}; choose one of them")
    means = [mean_activation(target, texts, layer) for texts in (towards, away)]
    difference = means[0] - means[1]
    size = mx.linalg.norm(difference).item()
    if size <= 1e-6 * mx.linalg.norm(means[0]).item():
        raise UserError("the two lists of prompts have the same mean activation; give lists that differ in one thing")
    direction = difference / size
    project(target, direction)
    probe = [target.encode(text) for text in towards[:2]]
    left = max(direction_share(target, tokens, direction) for tokens in probe)
    if left > LEFT[target.dtype]:
        raise UserError(
            f"target {target.source}: {left:.1%} of its residual stream still lies along the direction, so something "
            "other than its embedding and output projections writes to it; this kind of model cannot be ablated here"
        )
    return {"recipe": "ablated", "layer": layer, "prompts": [len(towards), len(away)], "left": left}


def mean_activation(target, texts, layer):
    """The mean over prompts of a layer's output at the last prompt token: [D] float32."""
    total = mx.zeros((target.hidden_size,), mx.float32)
    for text in texts:
        (tap,) = target.forward(mx.array([target.encode(text)]), taps=(layer,)).taps
        total = total + tap[0, -1].astype(mx.float32)
        mx.eval(total)
    return total / len(texts)


def project(target, direction):
    """Take a unit direction [D] out of the embedding table and every writer, in float32, stored as they were."""
    table = getattr(target.backbone, "embed_tokens", None)
    found = [module for layer in target.model.layers for module in writers(layer)]
    if table is None or len(found) < 2 * target.num_layers:
        raise UserError(
            f"target {target.source}: found {len(found)} output projections ({', '.join(WRITERS)}) in "
            f"{target.num_layers} layers, expected two or more a layer; this kind of model cannot be ablated here"
        )
    table.weight = without(table.weight, direction, axis=-1)
    for module in found:
        module.weight = without(module.weight, direction, axis=-2)
        if "bias" in module:
            module.bias = without(module.bias, direction, axis=-1)
    mx.eval(target.model.parameters())


def writers(layer):
    """The modules of a layer whose last name is in WRITERS."""
    return [module for name, module in layer.named_modules() if name.rpartition(".")[2] in WRITERS]


def without(array, direction, axis):
    """An array with its part along a unit direction removed from one axis of length D."""
    wide = mx.moveaxis(array.astype(mx.float32), axis, -1)
    wide = wide - (wide @ direction)[..., None] * direction
    return mx.moveaxis(wide, -1, axis).astype(array.dtype)


def direction_share(target, tokens, direction):
    """The largest |h·r| ÷ |h| over all layers' outputs for a prompt of token ids."""
    taps = target.forward(mx.array([tokens]), taps=tuple(range(target.num_layers))).taps
    wide = [tap.astype(mx.float32) for tap in taps]
    return max(mx.max(mx.abs(tap @ direction) / mx.linalg.norm(tap, axis=-1)).item() for tap in wide)


# The folder.


def save(target, out, record, *, parent, data=(), argv=()):
    """Write the modified target as a model folder with a manifest that names its parent; returns its fingerprint.

    parent: the unmodified target's `identity()`. Written beside `out` and moved there whole. Raises UserError where
    `out` is taken.
    """
    out = pathlib.Path(out)
    refuse_taken(out)
    partial = out.with_name(f".{out.name}{manifest.PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        checkpoint.save_arrays(partial / checkpoint.WEIGHTS, dict(tree_flatten(target.model.parameters())))
        manifest.write_json(partial / "config.json", target.config)
        for file in text_files(target.path):
            shutil.copyfile(file, partial / file.name)
        fingerprint = targets.load(str(partial), dtype=target.dtype).fingerprint  # and it loads
        extra = record | {"parent": parent, "fingerprint": fingerprint}
        manifest.write(partial, kind=KIND, target=parent, data=data, argv=argv, extra=extra)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return fingerprint


def refuse_taken(out):
    """Raise UserError where a folder of results already lies at `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: already there and not empty; choose a new folder")


def text_files(folder):
    """The files of a model folder that belong to its tokenizer, sorted."""
    named = [folder.glob(pattern) for pattern in TEXT_FILES]
    return sorted({path for path in itertools.chain(*named) if path.is_file()})


def parent_of(folder):
    """The identity of the target that a variant's folder was made from; None for a folder that is no variant."""
    if not (pathlib.Path(folder) / manifest.NAME).is_file():
        return None
    record = manifest.read(folder)
    return record.extra["parent"] if record.kind == KIND else None
