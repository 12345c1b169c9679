"""Modify a target as its community would: for asking whether a drafter carries over, offline.

    python scripts/make_variant.py quantised --bits 4 --out runs/variants/smollm2-4bit
    python scripts/make_variant.py tuned --steps 40 --out runs/variants/smollm2-python
    python scripts/make_variant.py merged --with runs/variants/smollm2-python --out runs/variants/smollm2-half
    python scripts/make_variant.py ablated --prompts gsm8k humaneval --out runs/variants/smollm2-ablated

quantised  every matrix in 4 or 8 bits, by mlx-lm's conversion
tuned      a LoRA fine-tune, fused, on text files (by default Python's standard library: an instruct model turned coder)
merged     the target's weights moved a share of the way to another's of the same shape
ablated    the direction that tells two prompt sets apart, projected out of what writes to the residual stream

Each is a model folder whose manifest names its parent; spec_decode.py transfer takes them as --variants.
"""

import pathlib

import edge
from kernels.errors import UserError

PROMPTS = 32  # of each set, for a direction: assumed enough for a mean
FILES = 64  # of the standard library, for a fine-tune: more text than a few dozen steps read


def main(argv):
    """Make one variant; returns the closing figures."""
    options = build_parser().parse_args(argv)
    refuse_values(options)
    from kernels import backend

    backend.load()
    from drafter import variants

    variants.refuse_taken(options.out)
    target = variants.open_parent(options.target, dtype=options.dtype)
    parent = target.identity()
    print(f"parent     {target.source} {target.dtype}  fingerprint {target.fingerprint[:16]}…", flush=True)
    make = {"quantised": quantised, "tuned": tuned, "merged": merged, "ablated": ablated}[options.recipe]
    record, data = make(target, options)
    fingerprint = variants.save(target, options.out, record, parent=parent, data=data, argv=argv)
    print(f"variant    {options.out}  fingerprint {fingerprint[:16]}…", flush=True)
    return {"status": "done", "out": str(options.out), "fingerprint": fingerprint, **record}


def build_parser():
    """The parser of all recipes."""
    parser = edge.Parser(prog="make_variant.py", description=__doc__)
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    for name, add in (
        ("quantised", add_quantised), ("tuned", add_tuned), ("merged", add_merged), ("ablated", add_ablated),
    ):  # fmt: skip
        recipe = recipes.add_parser(name, help=add.__doc__)
        recipe.add_argument(
            "--target", default="smollm2", help="the parent: a name, a folder or a hub id (%(default)s)"
        )
        recipe.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="what it is stored in")
        recipe.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="the new model folder")
        add(recipe.add_argument)
    return parser


def add_quantised(add):
    """quantise its matrices"""
    add("--bits", type=int, choices=(4, 8), default=4, help="bits of a weight (%(default)s)")
    add("--group-size", type=int, choices=(32, 64, 128), default=64, help="weights that share a scale (%(default)s)")


def add_tuned(add):
    """fine-tune it and fuse"""
    add("--text", nargs="+", metavar="FILE", help="UTF-8 files to learn from (Python's standard library)")
    add("--steps", type=int, default=40, metavar="N", help="steps (%(default)s: about three minutes on two CPU cores)")
    add("--rank", type=int, default=8, metavar="N", help="rank of the update (%(default)s)")
    add("--learning-rate", type=float, default=2e-4, metavar="X", help="of Adam (%(default)s)")
    add("--rows", type=int, default=2, metavar="N", help="windows of a step (%(default)s)")
    add("--row-tokens", type=int, default=128, metavar="N", help="tokens of a window (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="draws adapters and windows (%(default)s)")


def add_merged(add):
    """blend it with another"""
    add("--with", dest="other", required=True, metavar="T", help="the other target: same shape, other weights")
    add("--share", type=float, default=0.5, metavar="X", help="how far towards it, 0 to 1 (%(default)s)")


def add_ablated(add):
    """take a direction out"""
    add("--prompts", nargs=2, required=True, metavar="P", help="two prompt sets: names of shipped ones, or JSON Lines")
    add("--layer", type=int, metavar="N", help="layer after which the direction is read, from 0 (the middle one)")
    add("--limit", type=int, default=PROMPTS, metavar="N", help="prompts of each set (%(default)s)")


def refuse_values(options):
    """Raise for numbers that no recipe could use, naming option, value and what is expected."""
    least = {"steps": 1, "rank": 1, "rows": 1, "row_tokens": 2, "seed": 0, "limit": 1}
    for name, smallest in least.items():
        found = getattr(options, name, smallest)
        if found < smallest:
            raise UserError(f"--{name.replace('_', '-')} {found}: expected a whole number, at least {smallest}")
    if not 0 < getattr(options, "learning_rate", 0.5) < 1:
        raise UserError(f"--learning-rate {options.learning_rate}: expected a number above 0 and below 1")
    if not 0 < getattr(options, "share", 0.5) <= 1:
        raise UserError(f"--share {options.share}: expected above 0 (the target itself) up to 1 (the other one)")


def quantised(target, options):
    """The quantised variant's record and data."""
    from drafter import variants

    return variants.quantised(target, bits=options.bits, group_size=options.group_size), ()


def tuned(target, options):
    """The fine-tuned variant's record and data."""
    from drafter import library, variants

    if options.text:
        files = [library.read_file(existing(name), name) for name in options.text]
    else:
        files = library.read(max_files=FILES).train
    plan = {name: getattr(options, name) for name in ("steps", "rank", "learning_rate", "rows", "row_tokens", "seed")}
    record = variants.tuned(target, [file.text for file in files], **plan, say=Progress(options.steps))
    return record, [{"name": f"{len(files)} text files", "sha256": library.digest(files)}]


class Progress:
    """Prints a line every tenth of a fine-tune, with the time left."""

    def __init__(self, steps):
        import time

        self.steps, self.clock = steps, time.monotonic
        self.began = self.clock()

    def __call__(self, step, loss):
        if step % max(self.steps // 10, 1) == 0 or step == self.steps:
            left = (self.clock() - self.began) / step * (self.steps - step)
            print(f"step {step:4d} of {self.steps}  loss {loss:.4f}  {left:.0f} s left", flush=True)


def existing(name):
    """The path of a text file. Raises UserError where there is none."""
    path = pathlib.Path(name)
    if not path.is_file():
        raise UserError(f"--text {name}: no such file; name UTF-8 text files")
    return path


def merged(target, options):
    """The merged variant's record and data."""
    from drafter import variants

    return variants.merged(target, variants.open_parent(options.other, dtype=target.dtype), share=options.share), ()


def ablated(target, options):
    """The ablated variant's record and data."""
    from decode.lab import prompts
    from drafter import variants

    sets = [prompts.load(source, options.limit) for source in options.prompts]
    towards, away = ([prompt.text for prompt in one.prompts] for one in sets)
    record = variants.ablated(target, towards, away, layer=options.layer)
    return record, [{"name": one.name, "sha256": one.sha256} for one in sets]


if __name__ == "__main__":
    edge.run(main)
