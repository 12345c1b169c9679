"""The evaluations besides ksweep: what each asks, how it is set up, and what its closing line says."""

import dataclasses
import functools
import pathlib
import sys

from kernels.errors import UserError
from measuring import (
    DRAFTED,
    SIZES,
    beside,
    best,
    card,
    encoded,
    finish,
    headed,
    heading,
    measured,
    open_full,
    open_stock,
    opened,
    opened_apart,
    place,
    plan_line,
    registered,
    size_for,
    size_within,
    sizes_for,
    storage,
    swept,
    timing_plan,
)
from opening import (
    BLOCK,
    add_models,
    add_plan,
    identity_card,
    progress,
    several,
    shares,
    show_card,
    whole,
)

HELP = {
    "adaptive": "measure changing block sizes",
    "confidence": "measure cuts by confidence",
    "context": "measure against context length",
    "controls": "measure beside controls",
    "decompose": "tell weights from drafting",
    "staged": "draft more than is verified",
    "transfer": "measure on other targets",
}


def add_transfer(parser, smoke):
    """transfer's options."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--variants", nargs="+", required=True, metavar="T", help="modified targets: folders, names or hub ids")
    add("--block-sizes", type=several(2, BLOCK), metavar="B,…", help=f"of D's arms ({DRAFTED}, or as D was trained)")
    add_plan(parser, "transfer", smoke=smoke)


def transfer(options, argv):
    """Measure one drafter on its own target and on variants of it, and say whether to keep, adapt or retrain it."""
    chosen, out = opened(options)
    parts = named((options.target, *options.variants))
    stock, drafter, identity = open_stock(options)
    refuse_shapes(options.variants, stock, options.dtype)
    sizes = sizes_for(options, drafter)
    header = heading(options, argv, stock, identity, chosen, block_sizes=sizes)
    lines = {"variants": ", ".join([*parts][1:]), "arms": f"mlx_lm and its twin, plain, the drafter at {sizes}"}
    show_card(card(options, stock, identity, chosen) | lines, sys.stdout)
    result, save = on_every_target(options, out, header, parts, stock, drafter, sizes, chosen)
    found = finish(result, save, out)
    return found | {"verdicts": {one["part"]: one["verdict"] for one in result["findings"]["targets"][1:]}}


def on_every_target(options, out, header, parts, stock, drafter, sizes, chosen):
    """(the joined result of all targets of a transfer, one measured after another; how it is saved)."""
    from decode.lab import arms, experiment

    own = arms.ksweep(stock, drafter, sizes, (), None)
    header |= registered(options, [f"{part} {arm.name}" for part in parts for arm in own])
    header |= {"targets": [], "agreement": []}
    save, earlier = storage(out, header, options.resume)
    results, answers = [], {}
    keep = lambda so_far: save(experiment.join(header, [*results, so_far]) | {"complete": False})
    for part, name in parts.items():
        target = open_variant(name, stock, options) if results else stock
        header["targets"].append({"part": part, **target.identity()})
        prompts = encoded(options, target, chosen)
        if results:
            header["agreement"] += compare(part, stock, target, prompts, answers)
        mine = arms.carried(target, drafter, options.drafter, options.alpha) if results else drafter
        compared = arms.within(part, arms.ksweep(target, mine, sizes, (), None))
        before = earlier and experiment.only(earlier, part)
        results.append(experiment.run(header, compared, prompts, timing_plan(options), named_bar(part), keep, before))
        answers = answers or {row["prompt"]: row["tokens"] for row in results[0]["rows"] if row["arm"] == "plain"}
    return experiment.join(header, results), save


def named_bar(part):
    """`progress` under the name of a part."""
    return lambda items, *, total, desc: progress(items, total=total, desc=f"{part} {desc}")


def open_variant(name, stock, options):
    """A variant, loaded; refused where its tokens do not mean what the stock target's mean."""
    from decode.lab import agreement
    from drafter import target as targets

    target = targets.load(name, dtype=options.dtype)
    agreement.refuse_tokenizer(stock, target)
    return target


def compare(part, stock, target, prompts, answers):
    """The agreement rows of one variant."""
    from decode.lab import agreement

    return [row | {"part": part} for row in agreement.on_answers(stock, target, prompts, answers)]


def add_context(parser, smoke):
    """context's options."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--lengths", type=several(2), default=(512, 2048), metavar="T,…", help="tokens in view (512,2048)")
    add("--block-sizes", type=several(2, BLOCK), metavar="B,…", help=f"of D's arms ({DRAFTED}, or as D was trained)")
    add(
        "--prompts", default="library", metavar="P", help="documents: a shipped set's name, or JSON Lines (%(default)s)"
    )
    add_plan(parser, "context", prompts=None, smoke=smoke, lengths=(24, 96))


def context(options, argv):
    """Time the same documents cut at several lengths, so that difficulty and length are not confounded."""
    from decode.lab import lengths

    out = place(options)
    target, drafter, identity = open_stock(options)
    count = options.limit or lengths.FEWEST
    chosen, found = lengths.documents(options.prompts, target, max(options.lengths), count)
    documents = lengths.cut(chosen, options.lengths, target, options.max_tokens)
    sizes, reason = sizes_for(options, drafter), "documents are continued as they stand"
    header = headed(options, argv, target, identity, block_sizes=sizes, prompts=found, raw_reason=reason)
    asked = f"{len(chosen)} of {found['name']}  sha256 {found['sha256'][:16]}…, at {options.lengths} tokens"
    lines = {
        "documents": asked,
        "plan": plan_line(options),
        "arms": f"mlx_lm and its twin, plain, the drafter at {sizes}",
    }
    show_card(identity_card(target, identity) | lines, sys.stdout)
    from decode.lab import arms

    plan = timing_plan(options)
    plan = dataclasses.replace(plan, warmup=plan.warmup * len(options.lengths))  # each length is warmed up
    compared = arms.ksweep(target, drafter, sizes, (), None)
    few = lengths.few(documents, lengths.STAGED)
    result, save = measured(options, out, header, compared, documents, plan=plan, instrumented=few)
    return finish(result, save, out) | {"documents": len(chosen)}


def add_controls(parser, smoke):
    """controls' options."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add(
        "--block-size",
        type=whole(2, BLOCK),
        metavar="B",
        help=f"of every drafting arm ({DRAFTED}, or as D was trained)",
    )
    add("--ngram", type=several(1), default=(2, 3), metavar="N,…", help="prompt lookup controls (2,3)")
    add_plan(parser, "controls", smoke=smoke)


def controls(options, argv):
    """Time a drafter beside its controls: untrained, shuffled, prompt lookup, and the baseline's own twin."""
    chosen, out = opened(options)
    target, drafter, identity = open_full(options)
    size = size_for(options, drafter)
    from decode.lab import controls as lab

    compared = lab.arms(target, drafter, size, options.ngram, options.seed)
    prompts = encoded(options, target, chosen)
    header = heading(options, argv, target, identity, chosen, block_size=size)
    show_card(card(options, target, identity, chosen) | {"arms": ", ".join(arm.name for arm in compared)}, sys.stdout)
    result, save = measured(options, out, header, compared, prompts)
    found = finish(result, save, out)
    twin = result["findings"]["floor"]
    return found | {"twin": twin and twin["ratio"]} | best(result)


def add_policies(parser, command, smoke):
    """The options of both commands that compare policies."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--block-sizes", type=several(2, BLOCK), metavar="B,…", help="fixed arms; policies use the largest (2,4,8,16)")
    add("--calibrate", type=whole(1), default=4, metavar="N", help="further prompts that set policies up (%(default)s)")
    add_plan(parser, command, smoke=smoke, calibrate=1, block_sizes=(2, 4))


def add_adaptive(parser, smoke):
    """adaptive's options."""
    add_policies(parser, "adaptive", smoke)


def adaptive(options, argv):
    """Time policies for the block size against fixed ones: entropy, survival, expected value, auto-off."""
    from decode.lab import policies

    return compare_policies(options, argv, policies.adaptive)


def add_confidence(parser, smoke):
    """confidence's options."""
    add_policies(parser, "confidence", smoke)
    parser.add_argument("--thresholds", type=shares, default=(0.1, 0.3, 0.6), metavar="X,…",
                        help="chance of acceptance at which a verify is cut (0.1,0.3,0.6)")  # fmt: skip


def confidence(options, argv):
    """Time verifies cut where the drafter's confidence ends against fixed block sizes; say how calibrated it is."""
    from decode.lab import policies

    return compare_policies(options, argv, functools.partial(policies.confidence, thresholds=options.thresholds))


def compare_policies(options, argv, build):
    """Set policies up on prompts of their own and compare them on the others; build: makes the arms."""
    chosen, own, out = opened_apart(options)
    target, drafter, identity = open_full(options, max(SIZES))
    sizes = swept(options, drafter)
    prompts, first = encoded(options, target, chosen), encoded(options, target, own)
    header = heading(options, argv, target, identity, chosen, block_sizes=sizes, set_up_on=[one.id for one in first])
    lines = {"set up on": f"{len(first)} other prompt(s)", "fixed arms": f"block sizes {sizes}"}
    show_card(card(options, target, identity, chosen) | lines, sys.stdout)
    setup = set_up(options, out, target, drafter, sizes, first)
    compared = build(target, drafter, sizes, setup)
    result, save = measured(options, out, header | {"setup": setup.record()}, compared, prompts)
    found = finish(result, save, out)
    ranked = [one for one in result["findings"]["policies"] if one["kind"] == "policy" and one["over_fixed"]]
    fastest = max(ranked, key=lambda one: one["over_fixed"]["ratio"], default=None)
    errors = {name: one["ece"] for name, one in result["findings"]["calibration"].items()}
    best = fastest and {"policy": fastest["arm"], "over_fixed": fastest["over_fixed"]["ratio"]}
    return found | {"fixed": result["findings"]["fixed"], "best": best, "ece": errors}


def set_up(options, out, target, drafter, sizes, prompts):
    """The policies' Setup: measured, or that of the run which is gone on with, whose rows were decoded under it."""
    from decode.lab import policies, record

    if not options.resume:
        return policies.prepare(target, drafter, sizes, prompts, timing_plan(options), progress)
    earlier = record.read(beside(out))
    if "setup" not in earlier:
        raise UserError(f"{beside(out)} is of {earlier['command']}, not of {options.command}; start afresh")
    return policies.recalled(earlier["setup"])


def add_staged(parser, smoke):
    """staged's options."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--drafted", type=whole(3), metavar="D", help="rows of a draft pass (as many as D was trained at)")
    add("--verified", type=several(2, BLOCK), default=(4, 8), metavar="V,…", help="rows of a verify (4,8)")
    add_plan(parser, "staged", smoke=smoke, drafted=5, verified=(2, 3))


def staged(options, argv):
    """Time blocks of which a part is verified at once: the rest thrown away, or offered in later cycles."""
    chosen, out = opened(options)
    target, drafter, identity = open_full(options, options.drafted or max(SIZES))
    drafted = size_within(options.drafted or drafter.config.block_size, drafter)
    if max(options.verified) >= drafted:
        raise UserError(
            f"--verified {max(options.verified)}: expected fewer rows than are drafted, {drafted}; lower it"
        )
    from decode.lab import staging

    compared = staging.arms(target, drafter, drafted, options.verified)
    prompts = encoded(options, target, chosen)
    header = heading(options, argv, target, identity, chosen, drafted=drafted)
    show_card(card(options, target, identity, chosen) | {"arms": ", ".join(arm.name for arm in compared)}, sys.stdout)
    result, save = measured(options, out, header, compared, prompts)
    found = finish(result, save, out)
    speeds = {one["arm"]: one["over"]["ratio"] for one in result["findings"] if one["over"]}
    return found | best(result) | {"over": speeds}


def add_decompose(parser, smoke):
    """decompose's options."""
    add_models(parser, omitted="an untrained control")
    add = parser.add_argument
    add("--variant", required=True, metavar="T", help="the other weights, such as make_variant.py's 4 bits")
    add(
        "--block-size", type=whole(2, BLOCK), metavar="B", help=f"where drafting is on ({DRAFTED}, or as D was trained)"
    )
    add_plan(parser, "decompose", smoke=smoke)


def decompose(options, argv):
    """Time weights and drafting as two factors: all four cells, interleaved, so that neither wins the other's share."""
    chosen, out = opened(options)
    parts = named((options.target, options.variant))
    target, drafter, identity = open_stock(options)
    size = size_for(options, drafter)
    variant = open_variant(options.variant, target, options)
    from decode.lab import arms, factors

    carried = arms.carried(variant, drafter, options.drafter, options.alpha)
    compared = factors.arms(target, variant, drafter, carried, size, list(parts))
    prompts = encoded(options, target, chosen)
    header = heading(options, argv, target, identity, chosen, block_size=size)
    cells = f"{' and '.join(parts)}, each by mlx_lm and its twin, plain and the drafter at {size}"
    show_card(card(options, target, identity, chosen) | {"cells": cells}, sys.stdout)
    targets = [{"part": part, **one.identity()} for part, one in zip(parts, (target, variant), strict=True)]
    result, save = measured(options, out, header | {"targets": targets}, compared, prompts)
    found = finish(result, save, out)
    effects = {name: one["value"] for name, one in (result["findings"]["effects"] or {}).items()}
    return found | {"log_speedup": effects, "shares": result["findings"]["shares"]}


# What transfer and decompose share.


def named(names):
    """{short name: the name given} of several targets. Raises UserError where two would be called the same."""
    parts = {}
    for name in names:
        short = pathlib.PurePath(str(name).partition("@")[0]).name
        if short in parts:
            raise UserError(f"targets {parts[short]} and {name} are both called {short}; rename one folder")
        parts[short] = name
    return parts


def refuse_shapes(names, stock, dtype):
    """Find every variant now, and refuse one of another shape, before an hour of measuring the others."""
    from drafter import manifest, sources
    from drafter import target as targets

    for name in names:
        folder = sources.locate(name, dtype=dtype or targets.default_dtype()).folder
        config = manifest.read_json(folder / "config.json")
        settings = config.get("text_config", config)
        for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
            found, expected = settings.get(key), stock.settings.get(key)
            if found != expected:
                raise UserError(
                    f"target {name}: its {key} is {found}, but {stock.source} has {expected}; a drafter carries over "
                    "within one shape, so train one for it"
                )


COMMANDS = {
    "adaptive": (add_adaptive, adaptive),
    "confidence": (add_confidence, confidence),
    "context": (add_context, context),
    "controls": (add_controls, controls),
    "decompose": (add_decompose, decompose),
    "staged": (add_staged, staged),
    "transfer": (add_transfer, transfer),
}  # in the order that --help lists: each command's options, and the command


def add_commands(commands, smoke):
    """Add the parsers of all evaluations to spec_decode.py's own."""
    for name, (add, run) in COMMANDS.items():
        add(commands.add_parser(name, help=HELP[name], description=run.__doc__), smoke)
