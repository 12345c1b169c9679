"""Tables from result files alone: nothing here runs a model, and every figure is computed from the rows again.

A result's stored `arms` are compared with what its rows give, so that a file edited by hand, or written by other
arithmetic, is noticed.
"""

import gzip
import json
import math
import pathlib

from decode.lab import controls, experiment, factors, forecast, lengths, policies, staging, statistics, transfer
from decode.lab.shown import fixed, ratio
from drafter import manifest
from kernels.errors import UserError

EVALUATIONS = {
    "adaptive": policies,
    "confidence": policies,
    "context": lengths,
    "controls": controls,
    "decompose": factors,
    "ksweep": forecast,
    "staged": staging,
    "transfer": transfer,
}  # by command: what else its rows say, and the tables of that
TOLERANCE = 1e-9  # relative; the same sums in the same order, but JSON read back on another machine


def read(path):
    """The result stored in a .json or .json.gz file. Raises UserError where it is not one."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: not found; name a result file, or a folder of them")
    try:
        data = path.read_bytes()
        result = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a result file ({error}); name a .json that ksweep wrote") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != experiment.SCHEMA:
        raise UserError(f"{path} has schema {found}; expected {experiment.SCHEMA}")
    missing = [key for key in ("arms", "rows", "config", "stages", "divergences") if key not in result]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it is cut short or not a result file")
    return result


def find(paths):
    """{path: result} of the files named, and of those lying in the folders named (other JSON there is passed over)."""
    found = {}
    for path in map(pathlib.Path, paths):
        inside = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])  # none where path is no folder
        files = [file for file in inside if is_result(file)] if path.is_dir() else [path]
        found |= {file: read(file) for file in files}
    if not found:
        raise UserError(f"no result file in {', '.join(map(str, paths))}; run spec_decode.py ksweep first")
    names = [stem(path) for path in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two results are called {twice}; their tables would share a file: report one at a time")
    return found


def is_result(path):
    """Whether a file holds a result."""
    try:
        read(path)
    except UserError:
        return False
    return True


def write(path, result, out):
    """Rebuild the tables of the result read from `path` into folder `out`, as .md and .txt.

    Returns the text, and the names of the arms whose stored figures differ from what the rows give.
    """
    arms = experiment.summarise(result)
    plain = text(result, arms)
    for suffix, content in ((".md", markdown(result, arms)), (".txt", plain)):
        with manifest.atomic(pathlib.Path(out) / f"{stem(path)}{suffix}", "w") as stream:
            stream.write(content)
    changed = [label(new) for new, old in zip(arms, result["arms"], strict=False) if not same(new, old)]
    kept = "findings" not in result or same(findings(result), result["findings"])  # an older result stores none
    return plain, changed + ([] if kept else ["the findings"])


def findings(result):
    """What a result's own evaluation finds in its rows; None for a command that has none."""
    evaluation = EVALUATIONS.get(result["command"])
    return evaluation.findings(result) if evaluation else None


def stem(path):
    """A result's name without .json or .json.gz."""
    return pathlib.Path(path).name.removesuffix(".gz").removesuffix(".json")


def same(one, other):
    """Whether two figures agree, numbers within TOLERANCE."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return one == other


HEADER = (
    "arm", "tok/s", "speedup", "[95 %]", "loop-free", "[95 %]", "τ pooled", "τ mean", "tok/fwd", "accept", "draft",
    "verify", "commit", "other", "cycle ms", "identical", "= mlx_lm", "tie/width/defect",
)  # fmt: skip


def label(arm):
    """An arm's name, with its part where there are several."""
    return f"{arm['part']} {arm['name']}" if "part" in arm else arm["name"]


def further(result):
    """The tables of a result's own evaluation, from its rows: [(title, header, rows, notes)]."""
    found = findings(result)
    return EVALUATIONS[result["command"]].tables(found) if found else []


def cells(arm):
    """One arm's row of the main table."""
    tau, ms = arm["tau"] or {}, arm["ms"] or {}
    total = arm["prompts"]
    return [
        label(arm),
        fixed(arm["tok_s"], 1),
        *ratio(arm["speedup"]),
        *ratio(arm["speedup_loop_free"]),
        fixed(tau.get("pooled"), 2),
        fixed(tau.get("per_prompt"), 2),
        fixed(arm.get("tokens_per_forward"), 2),
        fixed(arm["acceptance_rate"], 3),
        *(fixed(ms.get(stage), 2) for stage in ("draft", "verify", "commit", "other", "cycle")),
        f"{arm['identical']}/{total}",
        f"{arm['identical_mlx_lm']}/{total}",
        "/".join(map(str, arm["divergences"].values())) if arm["divergences"] else "–",
    ]


def survival_table(arms):
    """Header and rows of the survival table, for the arms that proposed anything."""
    shown = [arm for arm in arms if arm["survival"]]
    width = max((len(arm["survival"]) for arm in shown), default=0)
    blank = lambda arm: [""] * (width - len(arm["survival"]))
    rows = [[label(arm), *(fixed(share, 2) for share in arm["survival"]), *blank(arm)] for arm in shown]
    return ["P(accepted ≥ j), j =", *map(str, range(1, width + 1))], rows


def notes(result, arms):
    """What has to be said under the table."""
    config, drafter, disturbed = result["config"], result["drafter"], result["health"]["flagged_rows"]
    prompts, used = config["prompts"], len(config["prompts"]["used"])
    few = used < statistics.FEWEST_PROMPTS
    loops = len(experiment.loops(result))
    synchronised = len({stage["prompt"] for stage in result["stages"]})
    defects = sum(arm["divergences"]["defect"] for arm in arms if arm["divergences"])
    said = {
        f"{used} of {prompts['total']} prompts of {prompts['name']} ({prompts['turns']}), {loops} looping; "
        f"{config['repeats']} repeat(s), at most {config['max_tokens']} tokens, for which τ holds": True,
        "speedup = mlx_lm's seconds per token ÷ the arm's, from the first emitted token to the last, prefill apart; "
        + ("too few prompts for an interval, so the range is given" if few else "95 % intervals over prompts"): True,
        f"stage times come from a separate synchronised pass over {synchronised} prompt(s)": True,
        f"prompts were fed raw: {config['raw_reason']}": config["raw_reason"],
        "the drafter is an untrained control: its arms show what drafting costs": drafter["kind"] == "untrained",
        "the drafter was made for another target (--allow-target-mismatch)": drafter["target_mismatch"],
        f"{len(disturbed)} of {len(result['rows'])} rows were disturbed: {result['health']['rule']}": disturbed,
        f"DEFECT: {defects} output(s) differ from plain for a reason that rounding does not explain": defects,
    }
    return [line + "." for line, holds in said.items() if holds]


def text(result, arms):
    """The tables for a terminal."""
    parts = [as_text(HEADER, map(cells, arms)), as_text(*survival_table(arms)), "\n".join(notes(result, arms))]
    for title, header, rows, said in further(result):
        parts += [title, as_text(header, rows), "\n".join(f"{line}." for line in said)]
    return "\n\n".join(parts) + "\n"


def markdown(result, arms):
    """The tables for a page, under a line that says what was run."""
    target, commit = result["target"], result["provenance"]["commit"]
    head = f"## {result['command']}: {target['source']}, {target['dtype']}"
    made = f"commit {commit}{' (dirty)' if result['provenance']['dirty'] else ''}, {result['provenance']['created']}"
    parts = [head, made, as_markdown(HEADER, map(cells, arms)), as_markdown(*survival_table(arms))]
    parts.append("\n".join(f"- {line}" for line in notes(result, arms)))
    for title, header, rows, said in further(result):
        parts += [f"### {title}", as_markdown(header, rows), "\n".join(f"- {line}." for line in said)]
    return "\n\n".join(parts) + "\n"


def as_text(header, rows):
    """A table in columns: the first to the left, the others to the right."""
    grid = [list(header), *rows]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    columns = [
        [cell.rjust(width) for cell in column] for column, width in zip(zip(*grid, strict=True), widths, strict=True)
    ]
    columns[0] = [row[0].ljust(widths[0]) for row in grid]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def as_markdown(header, rows):
    """A table in Markdown."""
    line = lambda row: "| " + " | ".join(row) + " |"
    rule = "|---" + "|--:" * (len(header) - 1) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
