"""spec_decode.py's layouts: what sharing a prefix buys a gated LoRA's training."""

import os
import pathlib
import sys

from kernels.errors import UserError
from opening import (
    default_out,
    identity_card,
    open_target,
    progress,
    refuse_unwritable,
    several,
    show_card,
    whole,
)


def add_options(parser):
    """layouts' options."""
    add = parser.add_argument
    add("--target", default="smollm2", help="as elsewhere, or shape:NAME[@4bit]: random weights (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--window", type=whole(8), default=128, metavar="T", help="tokens of a window (%(default)s)")
    add("--rows", type=whole(1), default=4, metavar="R", help="windows of a step (%(default)s)")
    add(
        "--block-size", type=whole(2), default=4, metavar="B", help="the pending row and B − 1 noise rows (%(default)s)"
    )
    add("--anchors", type=several(1), default=(16,), metavar="N,…", help="blocks a window of the shared layout (16)")
    add("--rank", type=whole(1), default=16, metavar="r", help="of the adapter (%(default)s)")
    add("--loss", default="total_variation", metavar="NAME", help="one of drafter/losses.py (%(default)s)")
    add("--rows-per-chunk", type=whole(1), default=256, metavar="N", help="rows scored at a time (%(default)s)")
    add("--rounds", type=whole(1), default=11, metavar="N", help="timed steps of each (%(default)s)")
    add("--out", type=pathlib.Path, metavar="FILE", help="result JSON (runs/layouts/TARGET-TIME.json)")


def run(options, argv):
    """Time training steps of a gated LoRA in both layouts: supervised noise rows a second, on the same windows."""
    out = options.out or default_out("layouts", options.target)
    refuse_unwritable(out)
    os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")  # as in training
    from decode.lab import experiment, report
    from decode.lab import layouts as compared
    from drafter import losses, manifest

    if options.loss not in losses.LOSSES:
        raise UserError(f"--loss {options.loss}: expected one of {', '.join(losses.LOSSES)}")
    if options.window < 2 * options.block_size:
        raise UserError(f"--window {options.window}: expected at least two blocks of {options.block_size}")
    target = open_target(options)
    asked = {name: value for name, value in vars(options).items() if name not in ("command", "out")}
    header = experiment.header("layouts", argv, asked, target, None)
    show_card(identity_card(target, None), sys.stdout)
    windows = compared.draw(target, options.rows, options.window)
    shape = {"rank": options.rank, "loss": options.loss, "rows_per_chunk": options.rows_per_chunk}
    arms = compared.arms(target, windows, options.block_size, options.anchors, **shape)
    found = compared.measure(arms, options.rounds, progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(out, header | {"layouts": found})
    print(report.text(header | {"layouts": found}), flush=True)
    return {"status": "done", "out": str(out), "over_suffix": {name: one["over_suffix"] for name, one in found.items()}}
