"""What every decoding command opens with: its options, its models, its card, and the place of its result."""

import argparse
import datetime
import pathlib
import tempfile

import edge
from kernels.errors import UserError

RUNS = edge.ROOT / "runs"
BLOCK = "a block is the pending token and at least one proposal"
PROBE_BYTES = 1 << 16  # of a result about to be written: a disk this full is refused before the work, not after
SMOKE = {"limit": 1, "max_tokens": 6, "repeats": 1, "warmup": 0}  # enough to run every line, too little to measure


def add_models(parser, omitted=None):
    """The options that name a target and its drafter.

    omitted: what stands in for a drafter that is not named; None where several may be named, and one must.
    """
    add = parser.add_argument
    add("--target", default="smollm2", help="a configs/target name, a folder or a hub id[@revision] (%(default)s)")
    kinds = "a checkpoint folder, a run folder (its best step) or .safetensors"
    if omitted:
        add("--drafter", "--adapter", dest="drafter", metavar="D", help=f"{kinds}; omitted: {omitted}")
    else:
        add("--drafter", "--adapter", dest="drafters", nargs="+", required=True, metavar="D", help=f"each {kinds}")
    add("--allow-target-mismatch", action="store_true", help="use a drafter made for another target; recorded")
    add("--alpha", type=float, metavar="A", help="of an adapter that does not say its own (16 times its rank)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--raw", action="store_true", help="feed prompts without the chat template")
    add("--limit", type=whole(1), metavar="N", help="take N prompts of a set, spread evenly over it (all)")


def add_plan(parser, command, *, prompts="suite", max_tokens=64, smoke=None, **sizes):
    """The options of every command that times arms on prompts.

    smoke: whether the sizes are to be those that only show that the command runs; sizes: the command's own for that.
    """
    add = parser.add_argument
    if prompts:
        add(
            "--prompts",
            nargs="+",
            default=[prompts],
            metavar="P",
            help=f"shipped sets' names, or JSON Lines: measured together ({prompts})",
        )
    add("--max-tokens", type=whole(1), default=max_tokens, metavar="N", help="cap of every answer (%(default)s)")
    add("--repeats", type=whole(1), default=2, metavar="N", help="timed runs of each arm and prompt (%(default)s)")
    add("--warmup", type=whole(0), default=1, metavar="N", help="untimed runs of each arm (%(default)s)")
    add("--seed", type=whole(0), default=0, metavar="N", help="draws whatever is drawn (%(default)s)")
    add("--include-disturbed", action="store_true", help="headlines count rows of a disturbed machine too; recorded")
    add("--criteria", type=pathlib.Path, metavar="FILE", help="pass rules written beforehand (YAML); judged by report")
    add("--out", type=pathlib.Path, metavar="FILE", help=f"result JSON (runs/{command}/TARGET-TIME.json)")
    add("--resume", action="store_true", help="go on with what a killed run of this --out left beside it")
    add("--smoke", action="store_true", help="sizes that only show that it runs; other options still win")
    if smoke:
        parser.set_defaults(**SMOKE | sizes)


def whole(least, why=None):
    """A converter to whole numbers of at least `least`; why: the reason for that, where it is not plain."""
    expected = f"expected a whole number, at least {least}{f': {why}' if why else ''}"

    def convert(text):
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"found {text!r}; {expected}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"found {value}; {expected}")
        return value

    return convert


def several(least, why=None):
    """A converter to different whole numbers, comma-separated, each at least `least`."""

    def convert(text):
        values = tuple(whole(least, why)(part) for part in text.split(","))
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise argparse.ArgumentTypeError(f"{twice[0]} stands twice in {text}; give each value once")
        return values

    return convert


def shares(text):
    """A converter to different numbers from 0 to below 1, comma-separated."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value < 1 for value in values) or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected different numbers from 0 to below 1, as in 0.2,0.5")
    return values


def unsigned(what):
    """A converter to numbers of at least 0; what: they are, for the line that refuses others."""

    def convert(text):
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"found {text!r}; expected {what}")
        return value

    return convert


ulps = unsigned("ULPs, a number of at least 0, for example 1")


def open_models(options, control=None):
    """(target, drafter, the drafter's identity), loaded in that order once the drafter's path is known to be there.

    control: {block_size, seed, kind} of the untrained drafter to draw where none was named; None for no drafter then.
    """
    from decode.lab import arms
    from drafter import checkpoint
    from drafter import target as targets

    path = options.drafter and checkpoint.resolve(options.drafter)
    target = targets.load(options.target, dtype=options.dtype)
    if path:
        asked = {"allow_mismatch": options.allow_target_mismatch, "alpha": options.alpha}
        return target, *arms.open_drafter(target, path, **asked)
    return target, *(arms.untrained(target, **control) if control else (None, None))


def open_target(options):
    """The target of a command that needs no tokenizer: one of its own, or a shape with random weights."""
    from drafter import shapes
    from drafter import target as targets

    shape = options.target.startswith(shapes.PREFIX)
    dtype = {"dtype": options.dtype} if options.dtype else {}
    return (shapes.build if shape else targets.load)(options.target, **dtype)


def prepare():
    """Ready this process for MLX: on a Linux CPU a BLAS must be in place before it is imported by anything."""
    from kernels import backend

    backend.load()


def default_out(command, target):
    """runs/<command>/<target>-<time>.json."""
    name = pathlib.PurePath(target.partition("@")[0]).name.replace(":", "-")
    return RUNS / command / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"


def refuse_unwritable(out):
    """Raise now, not after the work, where the result could not be written: write as much nearby and remove that."""
    from drafter import manifest

    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file in it, such as {out / 'ksweep.json'}")
    manifest.refuse_special(out)
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise UserError(f"--out {out}: {folder} is a file; choose a place in a folder")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".foredraft-", suffix=".partial") as stream:
            stream.write(b"\0" * PROBE_BYTES)
            stream.flush()
    except OSError as error:
        error.filename = str(out)
        raise


def progress(items, *, total, desc):
    """Items under a bar on standard error, with rate and time left."""
    import tqdm

    options = {"unit": " runs", "dynamic_ncols": True, "mininterval": 1.0, "disable": not total}
    return tqdm.tqdm(items, total=total, desc=desc, **options)


def identity_card(target, drafter):
    """The card's lines on what decodes."""
    from kernels import backend

    machine = backend.describe()
    mark = f"fingerprint {target.fingerprint[:16]}…" if target.fingerprint else "random weights"
    return {
        "target": f"{target.source} {target.dtype}  {mark}",
        "drafter": drafter_line(drafter),
        "device": f"{machine['device']} ({machine['reason']}), BLAS {machine['blas']['name']}, TF32 {machine['tf32']}",
    }


def drafter_line(drafter):
    """Which drafter, by digest where it has one."""
    if drafter is None:
        return "none: plain decoding"
    if drafter["path"] is None:
        return f"untrained control, seed {drafter['seed']}"
    mismatch = "  MADE FOR ANOTHER TARGET" if drafter["target_mismatch"] else ""
    return f"{drafter['path']}  sha256 {drafter['sha256'][:16]}…{mismatch}"


def show_card(lines, stream):
    """Print what is about to run, on what."""
    for name, line in lines.items():
        print(f"{name:<10} {line}", file=stream, flush=True)
