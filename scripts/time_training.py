"""Time a drafter's training step, and the same step in plain PyTorch beside it where PyTorch can be imported.

    python scripts/time_training.py
    python scripts/time_training.py --rows 2 --blocks 8 --arms foredraft,torch --rounds 3 --steps 2     (two CPU cores)

The target's taps are computed before: what is timed is the drafter's forward, loss, backward and update, on random
tokens with every slot supervised. PyTorch is no dependency: where it or its device is missing, the result says so.
Utilisation is of the speed of a large product in the same dtype on this device, not of a data sheet's.
"""

import argparse
import pathlib
import sys

import edge
from opening import default_out, identity_card, open_target, prepare, refuse_unwritable, show_card, whole

ARMS = ("foredraft", "foredraft update", "foredraft compiled", "torch", "torch compiled")


def main(argv):
    """Measure; returns the closing figures."""
    options = parse(argv)
    out = options.out or default_out("training_cost", options.target)
    refuse_unwritable(out)
    prepare()
    from decode.lab import experiment, report
    from decode.lab import training_cost as costs
    from drafter import config, manifest
    from drafter import target as targets

    options.dtype = options.dtype or targets.default_dtype()  # of a shape too
    target = open_target(options)
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    header = experiment.header("training_cost", argv, asked, target, None)
    show_card(identity_card(target, None), sys.stdout)
    shape = costs.Shape(options.rows, options.row_tokens, options.blocks, options.rows_per_chunk)
    drafter = config.DrafterConfig(num_hidden_layers=options.layers, block_size=options.block_size, mask_token_id=0)
    setup = costs.set_up(target, drafter, shape, 1 + options.warmup + options.rounds * options.steps)
    found = costs.measure(setup, shape, options.arms, options.steps, options.rounds, options.warmup, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(out, header | {"training_cost": found})
    print(report.text(header | {"training_cost": found}), flush=True)
    return closing(found, out)


def say(line):
    """Tell of progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="time_training.py", description=__doc__)
    add = parser.add_argument
    add("--target", default="shape:smollm2_135m", help="a target, or shape:NAME: random weights (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--layers", type=whole(1), default=5, metavar="N", help="of the drafter (%(default)s)")
    add("--block-size", type=whole(2), default=16, metavar="B", help="rows of a block (%(default)s)")
    add("--rows", type=whole(1), default=32, metavar="R", help="packed rows of a step (%(default)s)")
    add("--row-tokens", type=whole(8), default=512, metavar="T", help="tokens of each (%(default)s)")
    add("--blocks", type=whole(1), default=32, metavar="N", help="blocks of each (%(default)s)")
    add("--rows-per-chunk", type=whole(1), default=4096, metavar="N", help="slots scored at a time (%(default)s)")
    add("--arms", type=arm_names, default=ARMS, metavar="A,…", help=f"some of {', '.join(ARMS)} (all)")
    add("--steps", type=whole(1), default=20, metavar="K", help="steps of a timed run (%(default)s)")
    add("--rounds", type=whole(1), default=7, metavar="N", help="timed runs of each arm, in turns (%(default)s)")
    add("--warmup", type=whole(1), default=5, metavar="N", help="steps of each before them (%(default)s)")
    add("--out", type=pathlib.Path, metavar="FILE", help="result JSON (runs/training_cost/TARGET-TIME.json)")
    return parser.parse_args(argv)


def arm_names(text):
    """Names of ARMS, comma-separated, one of the project's own among them."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in ARMS]
    if unknown or len(set(names)) < len(names) or not any(name.startswith("foredraft") for name in names):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected different names of {', '.join(ARMS)}, one of foredraft's among them"
        )
    return names


def closing(found, out):
    """The closing figures: of the project's fastest arm, and PyTorch's seconds ÷ its."""
    best = found["arms"][found["best"]]
    over = {f"{name} / {found['best']}": ratio["median"] for name, ratio in found["over_best"].items()}
    figures = {name: best[name] for name in ("step_ms", "tokens_s", "block_tokens_s", "utilisation")}
    return {"status": "done", "out": str(out), "best": found["best"], **figures, "ratios": over}


if __name__ == "__main__":
    edge.run(main)
