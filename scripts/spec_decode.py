"""Decode speculatively, and measure what it buys.

    python scripts/spec_decode.py generate --drafter runs/smollm2-135m-dflash --prompt "Explain rain to a child."
    python scripts/spec_decode.py ksweep --drafter runs/smollm2-135m-dflash --prompts gsm8k --limit 12
    python scripts/spec_decode.py cost --target shape:qwen3_5_4b --widths 5,16 --contexts 1024,4096
    python scripts/spec_decode.py report runs/ksweep --out runs/reports

generate  writes an answer, streamed to standard output
ksweep    times mlx_lm, the plain loop, an n-gram control and DFlash at every block size, interleaved, and audits
          every output that differs from plain; ends with status "failed" where one is a defect
ties      audits the same arms, with and without a tie guard, and counts over plain's text how often a forward of W
          rows decides otherwise than a forward of one
cost      times plain steps, verifies, prefills and rollback beside mlx-lm's own, on a target or on a published shape
          with random weights
report    rebuilds the tables and plots of result files from their rows, on one page
"""

import argparse
import datetime
import pathlib
import sys
import tempfile

import edge
from kernels.errors import UserError

RUNS = edge.ROOT / "runs"
BLOCK_SIZES = (2, 4, 8, 16)
BLOCK = "a block is the pending token and at least one proposal"
UNRECORDED = ("command", "out", "resume", "criteria")  # options that are no part of what was measured
GUARD = "tokens whose top two logits are within ULPS of each other are decided by one row"
PROBE_BYTES = 1 << 16  # of a result about to be written: a disk this full is refused before the work, not after


def main(argv):
    """Run one subcommand; returns its closing figures."""
    options = build_parser().parse_args(argv)
    return {"generate": generate, "ksweep": ksweep, "ties": ties, "cost": cost, "report": report}[options.command](
        options, argv
    )


def build_parser():
    """The parser of all subcommands."""
    parser = edge.Parser(prog="spec_decode.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="write an answer", description=generate.__doc__))
    add_ksweep(commands.add_parser("ksweep", help="measure block sizes", description=ksweep.__doc__))
    add_ties(commands.add_parser("ties", help="audit where outputs differ", description=ties.__doc__))
    add_cost(commands.add_parser("cost", help="time steps and verifies", description=cost.__doc__))
    add_report(commands.add_parser("report", help="rebuild tables from results", description=report.__doc__))
    return parser


def add_models(parser, omitted):
    """The options that both decoding commands share; omitted: what stands in for a drafter that is not named."""
    add = parser.add_argument
    add("--target", default="smollm2", help="a configs/target name, a folder or a hub id[@revision] (%(default)s)")
    add("--drafter", "--adapter", dest="drafter", metavar="D",
        help=f"a checkpoint folder, a run folder (its best step) or .safetensors; omitted: {omitted}")  # fmt: skip
    add("--allow-target-mismatch", action="store_true", help="use a drafter made for another target; recorded")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--raw", action="store_true", help="feed prompts without the chat template")
    add("--limit", type=whole(1), metavar="N", help="take N prompts, spread evenly over the set (all)")


def add_generate(parser):
    """generate's options."""
    add_models(parser, omitted="plain decoding")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the prompt (standard input when neither is given)")
    source.add_argument("--prompts", metavar="P", help="a shipped set's name, or JSON Lines with `turns` or `prompt`")
    add("--system", metavar="TEXT", help="a system turn put before every prompt")
    add("--block-size", type=whole(2, BLOCK), metavar="B", help="rows of a draft pass (the drafter's own)")
    add("--max-tokens", type=whole(1), default=256, metavar="N", help="longest answer (%(default)s)")
    add("--tie-guard", type=ulps, metavar="ULPS", help=f"with --drafter: {GUARD}")


def add_ksweep(parser):
    """ksweep's options."""
    add_sweep(parser, "ksweep")
    parser.add_argument("--tie-guard", type=ulps, metavar="ULPS", help=f"speculate under a guard: {GUARD}")


def add_ties(parser):
    """ties' options."""
    add_sweep(parser, "ties")
    add = parser.add_argument
    add("--tie-guard", type=ulps, default=1, metavar="ULPS", help=f"of the guarded arms: {GUARD} (%(default)s)")
    add("--widths", type=several(2), metavar="W,…", help="rows of the census' forwards (the block sizes)")


def add_sweep(parser, command):
    """The options of the commands that compare block sizes."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--prompts", default="suite", metavar="P", help="a shipped set's name, or JSON Lines (%(default)s)")
    add("--block-sizes", type=several(2, BLOCK), metavar="B,…", help="DFlash arms (2,4,8,16, as far as D was trained)")
    add("--ngram", type=several(1), default=(3,), metavar="N,…", help="prompt lookup controls (3)")
    add("--ngram-block-size", type=whole(2, BLOCK), default=8, metavar="B", help="rows of their blocks (%(default)s)")
    add("--max-tokens", type=whole(1), default=64, metavar="N", help="cap of every answer (%(default)s)")
    add("--repeats", type=whole(1), default=2, metavar="N", help="timed runs of each arm and prompt (%(default)s)")
    add("--warmup", type=whole(0), default=1, metavar="N", help="untimed runs of each arm (%(default)s)")
    add("--seed", type=whole(0), default=0, metavar="N", help="draws the untrained control (%(default)s)")
    add_evaluation(parser, command)


def add_evaluation(parser, command):
    """The options of every evaluation that measures arms."""
    add = parser.add_argument
    add("--include-disturbed", action="store_true", help="headlines count rows of a disturbed machine too; recorded")
    add("--criteria", type=pathlib.Path, metavar="FILE", help="pass rules written beforehand (YAML); judged by report")
    add("--out", type=pathlib.Path, metavar="FILE", help=f"result JSON (runs/{command}/TARGET-TIME.json)")
    add("--resume", action="store_true", help="go on with what a killed run of this --out left beside it")


def add_cost(parser):
    """cost's options."""
    add = parser.add_argument
    add("--target", default="smollm2", help="as elsewhere, or shape:NAME[@4bit]: random weights (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--widths", type=several(2), default=(5, 16), metavar="W,…", help="rows of a verify (5,16)")
    add("--contexts", type=several(1), default=(1024,), metavar="T,…", help="rows before them (1024)")
    add("--prefills", type=several(2), default=(2048,), metavar="T,…", help="prompts to prefill (2048)")
    add("--rounds", type=whole(1), default=21, metavar="N", help="timed units of each (%(default)s)")
    add("--cycles", type=whole(8), default=200, metavar="N", help="cycles whose memory is watched (%(default)s)")
    add("--out", type=pathlib.Path, metavar="FILE", help="result JSON (runs/cost/TARGET-TIME.json)")


def add_report(parser):
    """report's options."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files, or folders of them")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder for report.html, plots, and .md and .txt tables"
    )


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


def ulps(text):
    """A converter to ULPs, a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected ULPs, a number of at least 0, for example 1")
    return value


def generate(options, argv):
    """Write an answer to each prompt: --prompt, --prompts or standard input. Without --drafter it decodes plainly."""
    texts = read_prompts(options)
    target, drafter, identity = open_models(options)
    reason = target.raw_reason(options.raw)
    template = {"template": f"fed raw: {reason}" if reason else "chat template applied"}
    show_card(identity_card(target, identity) | template, sys.stderr)
    prompts = [target.encode(text, raw=options.raw, system=options.system) for text in texts]
    cycles, tokens, seconds = [], 0, 0.0
    for prompt in prompts:
        last = show_answer(target, prompt, drafter, options, cycles)
        tokens += last.generation_tokens
        seconds += last.generation_tokens / last.generation_tps
    tau = sum(cycle.committed for cycle in cycles) / len(cycles) if drafter is not None and cycles else None
    figures = {"tokens": tokens, "tok_s": tokens / seconds, "tau": tau, "finish": last.finish_reason, "raw": reason}
    return {"status": "done", "out": None} | figures


def show_answer(target, prompt, drafter, options, cycles):
    """Stream one answer to standard output, its cycles appended to `cycles`; returns the last response."""
    from decode import stream

    asked = {"max_tokens": options.max_tokens, "block_size": options.block_size, "tie_guard": options.tie_guard}
    asked |= {"on_cycle": cycles.append}
    for response in stream.stream_generate(target, target.tokenizer, prompt, drafter, **asked):
        print(response.text, end="", flush=True)
    print(flush=True)
    return response


def read_prompts(options):
    """The texts to answer, from wherever this command takes them."""
    if options.prompts:
        from decode.lab import prompts

        return [prompt.text for prompt in prompts.load(options.prompts, options.limit).prompts]
    if options.limit:
        raise UserError("--limit belongs to --prompts, and there is one prompt here; leave it out")
    if options.prompt is None and sys.stdin.isatty():
        raise UserError("no prompt: give --prompt TEXT or --prompts P, or pipe a text to standard input")
    text = sys.stdin.read() if options.prompt is None else options.prompt
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt TEXT or pipe a text to standard input")
    return [text]


def open_models(options, control=None):
    """(target, drafter, the drafter's identity), loaded in that order once the drafter's path is known to be there.

    control: {block_size, seed} of the untrained drafter to draw where none was named; None for no drafter then.
    """
    prepare()
    from decode.lab import arms
    from drafter import checkpoint
    from drafter import target as targets

    path = options.drafter and checkpoint.resolve(options.drafter)
    target = targets.load(options.target, dtype=options.dtype)
    if path:
        return target, *arms.open_drafter(target, path, allow_mismatch=options.allow_target_mismatch)
    return target, *(arms.untrained(target, **control) if control else (None, None))


def prepare():
    """Ready this process for MLX: on a Linux CPU a BLAS must be in place before it loads."""
    from kernels import backend

    backend.load()


def ksweep(options, argv):
    """Time every arm on every prompt, interleaved, and write the result with all its rows."""
    *_, result, _ = sweep(options, argv)
    return closing(result, options.out)


def ties(options, argv):
    """Audit every output that differs from plain, with and without a tie guard, and take the census of decisions."""
    target, prompts, result, save = sweep(options, argv)
    from decode.lab import census, experiment, shown, tables

    widths = options.widths or result["config"]["block_sizes"]
    experiment.take_census(result, target, prompts, widths, progress, save)
    found = census.summarise(result["census"])
    for _, header, rows, _ in tables.with_rows([tables.disagreement(result), tables.by_margin(result)]):
        print(f"{shown.as_text(header, rows)}\n", flush=True)
    return closing(result, options.out) | {"disagreement": {W: figures["rate"] for W, figures in found.items()}}


def sweep(options, argv):
    """Compare block sizes: (target, encoded prompts, result, how it is saved); options.out says where it lies."""
    from decode.lab import prompts

    chosen = prompts.load(options.prompts, options.limit)
    options.out = options.out or default_out(options.command, options.target)
    refuse_unwritable(options.out)
    control = {"block_size": max(options.block_sizes or BLOCK_SIZES), "seed": options.seed}
    target, drafter, identity = open_models(options, control)
    from decode.lab import arms, criteria, experiment, report, statistics, timing

    sizes = options.block_sizes or tuple(size for size in BLOCK_SIZES if size <= drafter.config.block_size)
    compared = arms.ksweep(target, drafter, sizes, options.ngram, options.ngram_block_size)
    if options.tie_guard is not None:
        compared = arms.guarded(compared, options.tie_guard, beside=options.command == "ties")
    headline = statistics.EVERY if options.include_disturbed else statistics.QUIET
    plan = timing.Plan(options.max_tokens, options.repeats, options.warmup, headline)
    encoded = experiment.encode(target, chosen.prompts, plan, raw=options.raw)
    asked = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    found = {"block_sizes": sizes, "prompts": chosen.identity(), "raw_reason": target.raw_reason(options.raw)}
    rules = options.criteria and criteria.register(options.criteria, [arm.name for arm in compared])
    header = experiment.header(options.command, argv, asked | found, target, identity)
    header |= {"criteria": rules} if rules else {}
    show_card(ksweep_card(target, identity, chosen, compared, plan, found["raw_reason"]), sys.stdout)
    save, earlier = storage(options.out, header, options.resume)
    result = experiment.run(header, target, compared, encoded, plan, progress, save, earlier)
    print(report.text(result, result["arms"]), flush=True)
    return target, encoded, result, save


def storage(out, header, resume):
    """(how an evaluation saves: its result so far beside `out`, the whole one in it; what it goes on with, or None).

    resume: raises UserError where it finds no run cut short there that is the same as this one.
    """
    from decode.lab import record
    from drafter import manifest

    partial = out.with_name(f"{record.stem(out)}.partial.json")
    earlier = record.unfinished(partial, header) if resume else None
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(result):
        manifest.write_json(out if result["complete"] else partial, result)
        if result["complete"]:
            partial.unlink(missing_ok=True)

    return save, earlier


def cost(options, argv):
    """Time a target's plain steps, verifies, prefills and rollback, mlx-lm's own beside them."""
    out = options.out or default_out("cost", options.target)
    refuse_unwritable(out)
    prepare()
    from decode.lab import cost as costs
    from decode.lab import experiment
    from drafter import manifest, shapes
    from drafter import target as targets

    shape = options.target.startswith(shapes.PREFIX)
    dtype = {"dtype": options.dtype} if options.dtype else {}
    target = (shapes.build if shape else targets.load)(options.target, **dtype)
    asked = {name: value for name, value in vars(options).items() if name not in ("command", "out")}
    header = experiment.header("cost", argv, asked, target, None)
    show_card(identity_card(target, None), sys.stdout)
    out.parent.mkdir(parents=True, exist_ok=True)
    plan = options.widths, options.contexts, options.prefills, options.rounds, options.cycles
    found = costs.measure(target, *plan, lambda result: manifest.write_json(out, header | {"cost": result}))
    for W in (1, *options.widths):
        print(" ".join(f"{name} W={W} {row[W]['ms']:.2f} ms" for name, row in found["widths"].items()))
    return {"status": "done", "out": str(out), **found["headline"], "floor_ms": found["floor_ms"]}


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


def ksweep_card(target, drafter, chosen, compared, plan, raw_reason):
    """The card's lines of a ksweep."""
    template = f"fed raw: {raw_reason}" if raw_reason else "chat template applied"
    return {
        **identity_card(target, drafter),
        "prompts": f"{len(chosen.prompts)} of {chosen.total} of {chosen.name}  sha256 {chosen.sha256[:16]}…  "
        f"({chosen.identity()['turns']}; {template})",
        "arms": ", ".join(arm.name for arm in compared),
        "plan": f"at most {plan.max_tokens} tokens, {plan.repeats} repeat(s) after {plan.warmup} warm-up run(s) an arm",
    }


def show_card(lines, stream):
    """Print what is about to run, on what."""
    for name, line in lines.items():
        print(f"{name:<10} {line}", file=stream, flush=True)


def closing(result, out):
    """The closing figures of a ksweep: its best drafting arm, how many prompts' plain continuations do not loop, and
    whether any divergence is a defect."""
    from decode.lab import criteria, experiment

    drafted = [arm for arm in result["arms"] if arm["kind"] == "dflash" and arm["speedup"]]
    best = max(drafted, key=lambda arm: arm["speedup"]["ratio"], default=None)
    defects = sum(arm["divergences"]["defect"] for arm in result["arms"] if arm["divergences"])
    figures = {"best": None} if best is None else {
        "best": best["name"],
        "speedup": best["speedup"]["ratio"],
        "interval": [best["speedup"]["low"], best["speedup"]["high"]],
        "tau": best["tau"] and best["tau"]["pooled"],
        "identical": best["identical"],
        "prompts": best["prompts"],
    }  # fmt: skip
    flagged = len(result["health"]["flagged_rows"])
    if "criteria" in result:
        said = [one["verdict"] for one in criteria.judge(result["criteria"], result["arms"])]
        figures |= {"criteria": {verdict: said.count(verdict) for verdict in criteria.VERDICTS}}
    return {
        "status": "failed" if defects else "done",
        "out": str(out),
        **figures,
        "loop_free_prompts": len(result["config"]["prompts"]["used"]) - len(experiment.loops(result)),
        "defects": defects,
        "flagged_rows": flagged,
    }


def report(options, argv):
    """Rebuild the tables and plots of result files from their rows, and check the stored figures against them."""
    prepare()
    from decode.lab import plots, record
    from decode.lab import report as reports

    results = record.find(options.paths)
    options.out.mkdir(parents=True, exist_ok=True)
    if not plots.available():
        print("no plots: matplotlib is not installed; pip install -e '.[report]'", file=sys.stderr)
    told = reports.write(results, options.out)
    for file, (content, names) in told.items():
        print(f"{file}\n\n{content}", flush=True)
        if names:
            print(f"{file}: the stored figures of {', '.join(names)} are not what its rows give", file=sys.stderr)
    changed = {str(file): names for file, (_, names) in told.items() if names}
    figures = {"files": len(results), "page": str(options.out / reports.PAGE), "changed": changed}
    return {"status": "failed" if changed else "done", "out": str(options.out), **figures}


if __name__ == "__main__":
    edge.run(main)
