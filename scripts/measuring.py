"""How every evaluation runs: its prompts and block sizes, the head of its result, its saving, and its closing line."""

import dataclasses

from kernels.errors import UserError
from opening import default_out, identity_card, open_models, progress, refuse_unwritable

SIZES = (2, 4, 8, 16)  # block sizes of a sweep, and the fixed ones that policies are compared with
DRAFTED = 8  # rows of a block where none is asked for: what the shipped drafters are fastest at, or near it
UNRECORDED = ("command", "out", "resume", "criteria")  # options that are no part of what was measured


def opened(options):
    """(the prompt set, where the result goes), both checked before anything is loaded."""
    from decode.lab import prompts

    return prompts.join(prompts.load_each(options.prompts, options.limit)), place(options)


def opened_apart(options):
    """(the prompts to measure on, those to set up on, where the result goes): two PromptSets that share no prompt."""
    from decode.lab import prompts

    total = options.limit and options.limit + options.calibrate
    apart = []
    for whole in prompts.load_each(options.prompts, total):
        if len(whole.prompts) <= options.calibrate or (total and len(whole.prompts) < total):
            raise UserError(
                f"{whole.name} holds {whole.total} prompts; --limit {options.limit or 1} and --calibrate "
                f"{options.calibrate} need as many together: lower one of them, or give --prompts more"
            )
        own = prompts.spread(whole.prompts, options.calibrate)
        rest = [prompt for prompt in whole.prompts if prompt not in own]
        apart.append([dataclasses.replace(whole, prompts=tuple(some)) for some in (rest, own)])
    return *map(prompts.join, zip(*apart)), place(options)


def place(options):
    """Where the result goes, checked to be writable."""
    out = options.out or default_out(options.command, options.target)
    refuse_unwritable(out)
    return out


def open_stock(options, widest=DRAFTED):
    """open_models, the untrained control as wide as the widest block asked for, or `widest` where none was."""
    sizes = vars(options).get("block_sizes") or (vars(options).get("block_size") or widest,)
    kind = vars(options).get("untrained") or "dflash"
    return open_models(options, {"block_size": max(2, *sizes), "seed": options.seed, "kind": kind})


def open_full(options, widest=DRAFTED):
    """open_stock of a command that compares ways to use a full drafter. Raises UserError for a gated LoRA."""
    from drafter.dflash import DFlash

    target, drafter, identity = open_stock(options, widest)
    if not isinstance(drafter, DFlash):
        raise UserError(
            f"--drafter {options.drafter}: {options.command} takes a full drafter, and this is a gated LoRA; ksweep, "
            "ties, context, transfer and decompose take both"
        )
    return target, drafter, identity


def swept(options, drafter):
    """The block sizes asked for, else SIZES as far as the drafter was trained. Raises UserError."""
    from decode.lab import arms

    sizes = options.block_sizes or arms.fitting(drafter, SIZES)
    return tuple(size_within(size, drafter) for size in sizes)


def sizes_for(options, drafter):
    """The block sizes asked for, else DRAFTED or the most that the drafter was trained at."""
    return options.block_sizes or (min(DRAFTED, drafter.config.block_size),)


def size_for(options, drafter):
    """The block size asked for, else DRAFTED or the most that the drafter was trained at. Raises UserError."""
    return size_within(options.block_size or min(DRAFTED, drafter.config.block_size), drafter)


def size_within(size, drafter):
    """A block size, if the drafter can draft it. Raises UserError."""
    from decode.lab import arms
    from decode.schedule import Fixed

    return Fixed(size, least=arms.least_block(drafter), most=arms.most_block(drafter)).size


def timing_plan(options):
    """The timing.Plan that the options ask for."""
    from decode.lab import statistics, timing

    headline = statistics.EVERY if options.include_disturbed else statistics.QUIET
    return timing.Plan(options.max_tokens, options.repeats, options.warmup, headline)


def encoded(options, target, chosen):
    """The prompts, encoded by a target and checked against its context."""
    from decode.lab import experiment

    return experiment.encode(target, chosen.prompts, timing_plan(options), raw=options.raw)


def heading(options, argv, target, identity, chosen, **found):
    """The head of a result over a prompt set: options as asked and as found."""
    found |= {"prompts": chosen.identity(), "raw_reason": target.raw_reason(options.raw)}
    return headed(options, argv, target, identity, **found)


def headed(options, argv, target, identity, **found):
    """The head of a result: options as asked and as found."""
    from decode.lab import experiment

    asked = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    return experiment.header(options.command, argv, asked | found, target, identity)


def card(options, target, identity, chosen):
    """The card's lines of an evaluation over prompts."""
    reason = target.raw_reason(options.raw)
    return {
        **identity_card(target, identity),
        "prompts": f"{len(chosen.prompts)} of {chosen.total} of {chosen.name}  sha256 {chosen.sha256[:16]}…  "
        f"({chosen.identity()['turns']}; {f'fed raw: {reason}' if reason else 'chat template applied'})",
        "plan": plan_line(options),
    }


def plan_line(options):
    """How often and how far each arm runs."""
    plan = timing_plan(options)
    smoke = "; SMOKE: nothing here is a measurement" if options.smoke else ""
    runs = f"{plan.repeats} repeat(s) after {plan.warmup} warm-up run(s) an arm"
    return f"at most {plan.max_tokens} tokens, {runs}{smoke}"


def measured(options, out, header, compared, prompts, *, plan=None, instrumented=None):
    """(the result of arms on encoded prompts, how it is saved): saved after every round, gone on with where asked."""
    from decode.lab import experiment

    header |= registered(options, [experiment.label(arm) for arm in experiment.listed(compared, prompts)])
    save, earlier = storage(out, header, options.resume)
    plan = plan or timing_plan(options)
    return experiment.run(header, compared, prompts, plan, progress, save, earlier, instrumented), save


def registered(options, names):
    """What a result's head records of the criteria, before anything is measured; names: of the run's arms."""
    from decode.lab import criteria

    return {"criteria": criteria.register(options.criteria, names)} if options.criteria else {}


def storage(out, header, resume):
    """(how an evaluation saves: its result so far beside `out`, the whole one in it; what it goes on with, or None).

    resume: raises UserError where it finds no run cut short there that is the same as this one.
    """
    from decode.lab import record
    from drafter import manifest

    partial = beside(out)
    earlier = record.unfinished(partial, header) if resume else None
    out.parent.mkdir(parents=True, exist_ok=True)

    def save(result):
        manifest.write_json(out if result["complete"] else partial, result)
        if result["complete"]:
            partial.unlink(missing_ok=True)

    return save, earlier


def beside(out):
    """Where the result so far lies."""
    from decode.lab import record

    return out.with_name(f"{record.stem(out)}.partial.json")


def finish(result, save, out):
    """Add the findings, save the whole result, print every table; returns the closing figures."""
    from decode.lab import criteria, report

    found = report.findings(result)
    result |= {"findings": found} if found is not None else {}
    save(result)
    print(report.text(result, result["arms"]), flush=True)
    defects = sum(arm["divergences"]["defect"] for arm in result["arms"] if arm["divergences"])
    flagged = len(result["health"]["flagged_rows"])
    closing = {"status": "failed" if defects else "done", "out": str(out), "defects": defects, "flagged_rows": flagged}
    if "criteria" in result:
        said = [one["verdict"] for one in criteria.judge(result["criteria"], result["arms"])]
        closing |= {"criteria": {verdict: said.count(verdict) for verdict in criteria.VERDICTS}}
    return closing


def best(result):
    """The drafter's fastest arm and its figures; {"best": None} where no arm of it has a speedup."""
    from decode.lab import arms

    drafted = [arm for arm in result["arms"] if arm["kind"] in arms.DRAFTERS and arm["speedup"]]
    if not drafted:
        return {"best": None}
    fastest = max(drafted, key=lambda arm: arm["speedup"]["ratio"])
    return {
        "best": fastest["name"],
        "speedup": fastest["speedup"]["ratio"],
        "interval": [fastest["speedup"]["low"], fastest["speedup"]["high"]],
        "tau": fastest["tau"] and fastest["tau"]["pooled"],
        "identical": fastest["identical"],
        "prompts": fastest["prompts"],
    }
