"""Decode speculatively, and measure what it buys.

    python scripts/spec_decode.py generate --drafter runs/smollm2-135m-dflash --prompt "Explain rain to a child."
    python scripts/spec_decode.py ksweep --drafter runs/smollm2-135m-dflash --prompts gsm8k --limit 12
    python scripts/spec_decode.py cost --target shape:qwen3_5_4b --widths 5,16 --contexts 1024,4096
    python scripts/spec_decode.py report runs/ksweep --out runs/reports

generate  writes an answer, streamed to standard output
ksweep    times mlx_lm, the plain loop, an n-gram control and a drafter at every block size, interleaved, and audits
          every output that differs from plain; ends with status "failed" where one is a defect
ties      audits the same arms, with and without a tie guard, and counts over plain's text how often a forward of W
          rows decides otherwise than a forward of one
cost      times plain steps, verifies, prefills and rollback beside mlx-lm's own, on a target or on a published shape
          with random weights
context   times the same documents cut at several lengths
controls  times a drafter beside an untrained and a shuffled one, prompt lookup, and the baseline's own twin
adaptive  times block sizes chosen as the text goes against fixed ones; confidence cuts by what the drafter says
decompose what of a speedup is the weights' and what is drafting's: two factors, four cells
staged    times blocks of which only a part is verified at once
transfer  one drafter on its own target and on variants of it: what it keeps, and whether to keep, adapt or retrain it
walk      what drafters would serve over prompt sets, walked over the target's greedy texts in batches; times nothing
layouts   times training steps of a gated LoRA, many blocks behind one reading of a window beside one block a window
report    rebuilds the tables and plots of result files from their rows, on one page
"""

import argparse
import pathlib
import sys

import walking

import edge
import evaluate
import layouts
from kernels.errors import UserError
from measuring import SIZES, best, card, encoded, finish, heading, measured, open_stock, opened, swept
from opening import (
    BLOCK,
    add_models,
    add_plan,
    default_out,
    identity_card,
    open_models,
    open_target,
    prepare,
    progress,
    refuse_unwritable,
    several,
    show_card,
    ulps,
    whole,
)

CHANGES = ("keep", "refine2", "refine4", "always_on")  # those of decode.lab.arms, which must not load yet
GUARD = "tokens whose top two logits are within ULPS of each other are decided by one row"


def main(argv):
    """Run one subcommand; returns its closing figures."""
    options = build_parser(smoke="--smoke" in argv).parse_args(argv)
    prepare()  # first: some commands would import MLX before they open anything
    own = {"generate": generate, "ksweep": ksweep, "ties": ties, "cost": cost, "report": report}
    own |= {"walk": walking.run, "layouts": layouts.run}
    return (own | {name: run for name, (_, run) in evaluate.COMMANDS.items()})[options.command](options, argv)


def build_parser(smoke=False):
    """The parser of all subcommands; smoke: whether evaluations are only to show that they run."""
    parser = edge.Parser(prog="spec_decode.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="write an answer", description=generate.__doc__))
    add_ksweep(commands.add_parser("ksweep", help="measure block sizes", description=ksweep.__doc__), smoke)
    add_ties(commands.add_parser("ties", help="audit where outputs differ", description=ties.__doc__), smoke)
    add_cost(commands.add_parser("cost", help="time steps and verifies", description=cost.__doc__), smoke)
    evaluate.add_commands(commands, smoke)
    walking.add_options(
        commands.add_parser("walk", help="compare drafters' tau", description=walking.run.__doc__), smoke
    )
    layouts.add_options(commands.add_parser("layouts", help="time training steps", description=layouts.run.__doc__))
    add_report(commands.add_parser("report", help="rebuild tables from results", description=report.__doc__))
    return parser


def add_generate(parser):
    """generate's options."""
    add_models(parser, omitted="plain decoding")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the prompt (standard input when neither is given)")
    source.add_argument("--prompts", metavar="P", help="a shipped set's name, or JSON Lines with `turns` or `prompt`")
    add("--system", metavar="TEXT", help="a system turn put before every prompt")
    add("--block-size", type=whole(1), metavar="B", help="rows of a draft pass (the drafter's own)")
    add("--max-tokens", type=whole(1), default=256, metavar="N", help="longest answer (%(default)s)")
    add("--tie-guard", type=ulps, metavar="ULPS", help=f"with --drafter: {GUARD}")


def add_ksweep(parser, smoke):
    """ksweep's options."""
    add_sweep(parser, "ksweep", smoke)
    parser.add_argument("--tie-guard", type=ulps, metavar="ULPS", help=f"speculate under a guard: {GUARD}")


def add_ties(parser, smoke):
    """ties' options."""
    add_sweep(parser, "ties", smoke)
    add = parser.add_argument
    add("--tie-guard", type=ulps, default=1, metavar="ULPS", help=f"of the guarded arms: {GUARD} (%(default)s)")
    add("--widths", type=several(2), metavar="W,…", help="rows of the census' forwards (the block sizes)")


def add_sweep(parser, command, smoke):
    """The options of the commands that compare block sizes."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--block-sizes", type=several(1), metavar="B,…", help="of D's arms (2,4,8,16, DFlash as far as it was trained)")
    add("--changes", type=changes, default=(), metavar="C,…",
        help=f"of a gated LoRA, arms more: {', '.join(CHANGES)}")  # fmt: skip
    add("--untrained", choices=("dflash", "gated_lora"), default="dflash", help="control without D (%(default)s)")
    add("--ngram", type=several(1), default=(3,), metavar="N,…", help="prompt lookup controls (3)")
    add("--ngram-block-size", type=whole(2, BLOCK), default=8, metavar="B", help="rows of their blocks (%(default)s)")
    add_plan(parser, command, smoke=smoke, block_sizes=(2, 4))


def add_cost(parser, smoke):
    """cost's options."""
    add = parser.add_argument
    add("--target", default="smollm2", help="as elsewhere, or shape:NAME[@4bit]: random weights (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    add("--drafter", "--adapter", dest="drafter", metavar="D", help="time its draft passes too, for the fitted model")
    add("--allow-target-mismatch", action="store_true", help="use a drafter made for another target; recorded")
    add("--survival-of", type=pathlib.Path, metavar="FILE", help="a ksweep's result, whose best block size to foretell")
    add("--widths", type=several(2), default=(5, 16), metavar="W,…", help="rows of a verify (5,16)")
    add("--contexts", type=several(1), default=(1024,), metavar="T,…", help="rows before them (1024)")
    add("--prefills", type=several(2), default=(2048,), metavar="T,…", help="prompts to prefill (2048)")
    add("--rounds", type=whole(1), default=21, metavar="N", help="timed units of each (%(default)s)")
    add("--cycles", type=whole(8), default=200, metavar="N", help="cycles whose memory is watched (%(default)s)")
    add("--smoke", action="store_true", help="sizes that only show that it runs; other options still win")
    add("--out", type=pathlib.Path, metavar="FILE", help="result JSON (runs/cost/TARGET-TIME.json)")
    if smoke:
        parser.set_defaults(widths=(2, 4), contexts=(16, 32), prefills=(16,), rounds=2, cycles=8)


def add_report(parser):
    """report's options."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files, or folders of them")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder for report.html, plots, and .md and .txt tables"
    )


def changes(text):
    """Names of CHANGES, comma-separated."""
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in CHANGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {', '.join(CHANGES)}")
    return found


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


def ksweep(options, argv):
    """Time every arm on every prompt, interleaved, and write the result with all its rows."""
    *_, result, save, out = sweep(options, argv)
    return finish(result, save, out) | best(result) | loop_free(result)


def ties(options, argv):
    """Audit every output that differs from plain, with and without a tie guard, and take the census of decisions."""
    target, prompts, result, save, out = sweep(options, argv)
    from decode.lab import census, experiment

    widths = options.widths or result["config"]["block_sizes"]
    experiment.take_census(result, target, prompts, widths, progress, save)
    found = census.summarise(result["census"])
    rates = {"disagreement": {W: figures["rate"] for W, figures in found.items()}}
    return finish(result, save, out) | best(result) | loop_free(result) | rates


def sweep(options, argv):
    """Compare block sizes: (target, encoded prompts, result, how it is saved and where)."""
    chosen, out = opened(options)
    target, drafter, identity = open_stock(options, max(SIZES))
    sizes = swept(options, drafter)
    from decode.lab import arms

    compared = arms.ksweep(target, drafter, sizes, options.ngram, options.ngram_block_size, options.changes)
    if options.tie_guard is not None:
        compared = arms.guarded(compared, options.tie_guard, beside=options.command == "ties")
    prompts = encoded(options, target, chosen)
    header = heading(options, argv, target, identity, chosen, block_sizes=sizes)
    show_card(card(options, target, identity, chosen) | {"arms": ", ".join(arm.name for arm in compared)}, sys.stdout)
    return target, prompts, *measured(options, out, header, compared, prompts), out


def loop_free(result):
    """How many prompts' plain continuations do not loop."""
    from decode.lab import experiment

    return {"loop_free_prompts": len(result["config"]["prompts"]["used"]) - len(experiment.loops(result))}


def cost(options, argv):
    """Time a target's plain steps, verifies, prefills and rollback, mlx-lm's own beside them."""
    out = options.out or default_out("cost", options.target)
    refuse_unwritable(out)
    from decode.lab import cost as costs
    from decode.lab import experiment
    from drafter import manifest

    survival = options.survival_of and widest_survival(options.survival_of)
    target = open_target(options)
    refuse_too_long(target, options)
    drafter, identity = open_priced(target, options)
    asked = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(options).items()}
    asked = {name: value for name, value in asked.items() if name not in ("command", "out")}
    header = experiment.header("cost", argv, asked, target, identity)
    show_card(identity_card(target, identity), sys.stdout)
    out.parent.mkdir(parents=True, exist_ok=True)
    plan = options.widths, options.contexts, options.prefills, options.rounds, options.cycles
    found = costs.measure(target, *plan, lambda result: manifest.write_json(out, header | {"cost": result}))
    for W in (1, *options.widths):
        print(" ".join(f"{name} W={W} {row[W]['ms']:.2f} ms" for name, row in found["widths"].items()))
    found["model"] = fitted(target, drafter, options, found, survival)
    manifest.write_json(out, header | {"cost": found})
    figures = {"status": "done", "out": str(out), **found["headline"], "floor_ms": found["floor_ms"]}
    return figures | ({"best": found["model"]["best"]} if survival else {})


def refuse_too_long(target, options):
    """Raise UserError where rows, contexts or prefills do not fit in the target's context."""
    longest = max(max(options.contexts) + max(options.widths), *options.prefills)
    if target.max_length and longest > target.max_length:
        raise UserError(
            f"--contexts {max(options.contexts)} with --widths {max(options.widths)}, or --prefills "
            f"{max(options.prefills)}, exceed the context of {target.max_length} of {options.target}; lower them"
        )


def open_priced(target, options):
    """(the full drafter whose draft passes are timed, its identity), or (None, None). Raises UserError for another."""
    from decode.lab import arms
    from drafter.dflash import DFlash

    if options.drafter is None:
        return None, None
    drafter, identity = arms.open_drafter(target, options.drafter, allow_mismatch=options.allow_target_mismatch)
    if not isinstance(drafter, DFlash):
        raise UserError(
            f"--drafter {options.drafter}: a gated LoRA drafts by forwards of the target, which --widths times; leave "
            "it out"
        )
    return drafter, identity


def widest_survival(path):
    """The survival of the widest block size of a sweep's result. Raises UserError where it has none."""
    from decode.lab import experiment, record

    result = record.read(path)
    arms = experiment.summarise(result) if "rows" in result else []
    arms = [arm for arm in arms if arm["kind"] == "dflash" and arm["survival"]]
    if not arms:
        raise UserError(f"--survival-of {path}: no arm of a drafter in it; name a result of ksweep")
    return max(arms, key=lambda arm: arm["block_size"])["survival"]


def fitted(target, drafter, options, found, survival):
    """The cost model of what was measured, printed; with a survival, the block size that it makes best."""
    from decode.lab import forecast, shown

    sizes = drafter and [B for B in options.widths if drafter.config.block_size >= B]
    drafted = forecast.drafting(target, drafter, sizes, options.contexts, options.rounds) if sizes else None
    model = forecast.model(found, drafted)
    for title, header, rows, notes in forecast.cost_tables(model):
        print("\n".join(["", title, "", shown.as_text(header, rows), *notes]))
    if survival:
        B, speed = forecast.best(survival, model["costs"])
        model |= {"best": {"B": B, "over_plain": speed}}
        print(f"\nwith the survival of {options.survival_of}, B = {B} is best: {speed:.2f} times plain")
    return model


def report(options, argv):
    """Rebuild the tables and plots of result files from their rows, and check the stored figures against them."""
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
