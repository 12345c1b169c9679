"""spec_decode.py's walk: what drafters would serve over prompt sets, without timing anything."""

import pathlib
import sys

from kernels.errors import UserError
from measuring import SIZES, UNRECORDED, place
from opening import BLOCK, add_models, identity_card, progress, several, show_card, unsigned, whole


def add_options(parser, smoke=False):
    """walk's options."""
    add_models(parser)
    add = parser.add_argument
    add("--prompts", nargs="+", default=["suite"], metavar="P", help="shipped sets' names, or JSON Lines (suite)")
    add("--block-sizes", type=several(2, BLOCK), default=SIZES, metavar="B,…",
        help=f"as far as each drafter was trained ({','.join(map(str, SIZES))})")  # fmt: skip
    add(
        "--temperature",
        type=unsigned("a temperature, 0 for greedy answers or above"),
        default=0.0,
        metavar="T",
        help="of the answers walked over: above 0 they are samples, for targets whose greedy ones loop (%(default)s)",
    )
    add("--max-tokens", type=whole(2), default=128, metavar="N", help="cap of every answer (%(default)s)")
    add("--batch-size", type=whole(1), default=16, metavar="N", help="texts written or walked at once (%(default)s)")
    add("--out", type=pathlib.Path, metavar="FILE", help="result JSON (runs/walk/TARGET-TIME.json)")
    add("--smoke", action="store_true", help="sizes that only show that it runs; other options still win")
    if smoke:
        parser.set_defaults(limit=1, max_tokens=6, block_sizes=(2, 4))


def run(options, argv):
    """Walk drafters over the target's own answers to prompt sets: tokens a cycle, by block size."""
    from decode.lab import prompts

    chosen = prompts.load_each(options.prompts, options.limit)
    out = place(options)
    from decode.lab import experiment, report, walked
    from drafter import checkpoint, manifest
    from drafter import target as targets

    for path in options.drafters:  # before a target is loaded
        checkpoint.resolve(path)
    target = targets.load(options.target, dtype=options.dtype)
    drafters, identities = open_several(target, options)
    asked = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    asked |= {"prompts": [one.identity() for one in chosen], "raw_reason": target.raw_reason(options.raw)}
    header = experiment.header("walk", argv, asked, target, None) | {"drafters": identities}
    lines = {"prompts": ", ".join(f"{len(one.prompts)} of {one.total} of {one.name}" for one in chosen)}
    lines |= {"drafter": ", ".join(f"{one['name']} {one['sha256'][:16]}…" for one in identities)}
    show_card(identity_card(target, identities[0]) | lines, sys.stdout)
    encoded = [
        walked.Asked(one.name, prompt.id, tuple(prompt.tokens))
        for one in chosen
        for prompt in experiment.encode(target, one.prompts, options, raw=options.raw)
    ]
    written = options.max_tokens, options.batch_size, progress, options.temperature
    known = walked.texts(target, encoded, *written)
    if not known:
        raise UserError(f"target {target.source}: every answer ends at once, so there is nothing to walk; try --raw")
    walks = walked.measure(target, drafters, options.block_sizes, known, options.batch_size, progress)
    result = header | {"prompts_walked": len(known), "walks": walks}
    result["findings"] = report.findings(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(out, result)
    print(report.text(result), flush=True)
    return {"status": "done", "out": str(out), "prompts": len(known)} | best(result["findings"])


def open_several(target, options):
    """({name: drafter}, what a result records of each). A name is the folder's, numbered where two share one."""
    from decode.lab import arms

    drafters, identities = {}, []
    for path in options.drafters:
        drafter, found = arms.open_drafter(
            target, path, allow_mismatch=options.allow_target_mismatch, alpha=options.alpha
        )
        own = pathlib.PurePath(found["path"]).name
        name = own if own not in drafters else f"{own}-{len(drafters) + 1}"
        drafters[name] = drafter
        identities.append({"name": name} | found)
    return drafters, identities


def best(findings):
    """The closing figures: the best pooled τ over everything, and whose it is."""
    last = findings[-1]["set"]
    top = max((one for one in findings if one["set"] == last), key=lambda one: one["tau"]["value"])
    return {"best": top["drafter"], "block_size": top["block_size"], "tau": top["tau"]["value"]}
