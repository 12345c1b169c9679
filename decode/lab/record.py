"""Result files as they are read back: found, checked in every field that a table or plot computes from, gone on with.

A result is data from elsewhere: it may have been cut short, edited by hand or written by an older version. Whatever is
wrong with it is said in one line that names the file and the field, before anything is computed.
"""

import dataclasses
import gzip
import json
import math
import pathlib

from decode.lab import census, criteria, experiment, ties
from kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class Each:
    """The shape of an object whose every value has one shape."""

    shape: object


@dataclasses.dataclass(frozen=True)
class Maybe:
    """The shape of what may be missing or null."""

    shape: object


WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
    bool: "true or false",
}
ROW = {
    "arm": str,
    "prompt": str,
    "category": Maybe(str),
    "repeat": int,
    "tokens": [int],
    "seconds": float,
    "proposed_per_cycle": [int],
    "accepted_per_cycle": [int],
    "committed_per_cycle": [int],
    "loop_fraction": float,
    "disturbed": [str],
    "forwards_per_cycle": Maybe([int]),
    "redecided": Maybe(int),
    "part": Maybe(str),
    "confidence_per_cycle": Maybe([[float]]),
}
STAGE = {"arm": str, "prompt": str, "cycles": int, **dict.fromkeys(("seconds", "draft", "verify", "commit"), float)}
DIVERGENCE = {
    "arm": str,
    "prompt": str,
    "position": int,
    "class": str,
    "tokens": Maybe([int]),
    "gap_ulps": Maybe({"narrow": float, "wide": float}),
    "recorded_difference": Maybe(float),
}
COUNTED = {
    "width": int,
    "by_margin": [[int]],
    "kinds": {"tie": int, "width_sensitive": int},
    "largest_difference": float,
}
CONFIG = {"prompts": {"name": str, "total": int, "used": [str], "turns": str}, "repeats": int, "max_tokens": int}
MEASURED = {
    "arms": [{"name": str, "kind": str, "block_size": Maybe(int), "part": Maybe(str)}],
    "drafter": Maybe({"kind": Maybe(str)}),
    "rows": [ROW],
    "stages": [STAGE],
    "divergences": [DIVERGENCE],
    "config": CONFIG,
    "health": {"flagged_rows": [int], "rule": str, "headline": Maybe(str)},
    "criteria": Maybe({"sha256": str, "commit": Maybe(str), "rules": [dict]}),
    "census": Maybe([COUNTED]),
}
SETUP = {"setup": {"costs": Each(float), "best": int, "threshold": float, "lines": Each([float])}}
WALK = {
    "set": str,
    "prompt": str,
    "drafter": str,
    "block_size": int,
    "committed_per_cycle": [int],
    "loop_fraction": float,
}
AGREED = {"part": str, "prompt": str, "tokens": int, "agree": int, "kl": float}
OWN = {"adaptive": SETUP, "confidence": SETUP, "transfer": {"agreement": [AGREED]}}  # beside MEASURED, by command
TIMED = {"ms": float, "host_ms": float, "pipelined_ms": float, "spread_ms": [float]}
WIDTHS = ({"foredraft": {"1": TIMED}}, Each(Each(TIMED)))
COST = {"cost": {"context": int, "widths": WIDTHS, "contexts": Maybe(Each(Each(TIMED)))}}  # for MEASURED
WALKED = {"drafters": [{"name": str}], "walks": [WALK]}  # for MEASURED
RATES = ("step_ms", "utilisation", "first_step_s", "tokens_s", "block_tokens_s", "supervised_slots_s")
STEPS = {
    "arms": Each(dict.fromkeys(RATES, float)),
    "best": str,
    "over_best": Each({"median": float}),
    "parts_ms": Each(float),
    "flop_per_step": Each(float),
}
SHARES = ("step_seconds", "rows_per_second", "over_suffix", "peak_bytes")
LAYOUT = {"blocks": int, "supervised_rows": int} | dict.fromkeys(SHARES, float)
INSTEAD = {
    "cost": COST,
    "walk": WALKED,
    "training_cost": {"training_cost": STEPS},
    "layouts": {"layouts": Each(LAYOUT)},
}
HEAD = {"command": str, "config": dict, "target": {"source": str, "dtype": str}, "provenance": {"created": str}}
DAMAGE = (ValueError, OSError, EOFError, RecursionError)  # what reading something else can raise
SAME = ("command", "config", "target", "drafter", "criteria", "source code", "device")


def read(path):
    """The result stored in a .json or .json.gz file. Raises UserError where it is not one, or not whole."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: not found; name a result file, or a folder of them")
    try:
        result = load(path)
    except DAMAGE as error:
        raise UserError(f"{path} is not a result file ({error}); name a .json that ksweep wrote") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != experiment.SCHEMA:
        raise UserError(f"{path} has schema {found}; expected {experiment.SCHEMA}")
    shape = shape_of(result.get("command"))
    missing = [key for key, part in shape.items() if key not in result and not isinstance(part, Maybe)]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it is cut short or not a result file")
    wrong = fault(result, shape, "") or ("rows" in shape and inconsistency(result))
    wrong = wrong or ("walks" in shape and walks_fault(result))
    if wrong:
        raise UserError(f"{path}: {wrong}; it was edited or damaged: take the file as it was written")
    return result


def shape_of(command):
    """The shape of a command's results."""
    command = command if isinstance(command, str) else ""
    return HEAD | INSTEAD.get(command, MEASURED | OWN.get(command, {}))


def fault(value, shape, where):
    """What is wrong with a value, in words that begin with where it stands; None where it has the shape.

    shape: a type (float takes every finite number), [shape] for a list of such, {key: shape} for an object with at
    least these keys, Each for one with any keys, Maybe for what may be missing, or a tuple of
    shapes that must all hold.
    """
    if isinstance(shape, tuple):
        return next((words for words in (fault(value, one, where) for one in shape) if words), None)
    if isinstance(shape, Maybe):
        return fault(value, shape.shape, where) if value is not None else None
    kind = shape if isinstance(shape, type) else dict if isinstance(shape, Each) else type(shape)
    if not fits(value, kind):
        return f"{where or 'it'} is {show(value)}; expected {WORDS[kind]}"
    return next((words for words in (fault(*part) for part in inside(value, shape, where)) if words), None)


def inside(value, shape, where):
    """The (value, shape, where) of every part of a value that its shape speaks of."""
    if isinstance(shape, list):
        return [(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(shape, type):
        return []
    keys = dict.fromkeys(value, shape.shape) if isinstance(shape, Each) else shape
    return [(value.get(key), part, f"{where}.{key}".lstrip(".")) for key, part in keys.items()]


def fits(value, kind):
    """Whether a value is of a JSON kind; true and false are no numbers, and neither is what is not finite."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def show(value):
    """A value in few words."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def inconsistency(result):
    """What in a measured result contradicts itself, in words, or None."""
    checks = [(row_fault, "rows"), (census_fault, "census"), (class_fault, "divergences")]
    found = (check(*one) for check, name in checks for one in numbered(result.get(name) or [], name))
    return next((words for words in found if words), None) or criteria_fault(result)


def walks_fault(result):
    """What in a result of walks contradicts itself, in words, or None."""
    names = {one["name"] for one in result["drafters"]}
    for where, one in numbered(result["walks"], "walks"):
        if one["drafter"] not in names:
            return f"{where}.drafter is {one['drafter']}; expected one of {', '.join(names) or 'none'}"
        if not one["committed_per_cycle"] or min(one["committed_per_cycle"]) < 1:
            return f"{where}.committed_per_cycle is {show(one['committed_per_cycle'])}; every cycle commits a token"
    return None if result["walks"] else "it holds no walk"


def numbered(records, name):
    """(where it stands, record) of a list's records."""
    return [(f"{name}[{index}]", record) for index, record in enumerate(records)]


def row_fault(where, row):
    """What in a row contradicts itself."""
    cycles = [row[f"{name}_per_cycle"] for name in ("proposed", "accepted", "committed")]
    if len(set(map(len, cycles))) > 1:
        return f"{where} counts {'/'.join(str(len(some)) for some in cycles)} cycles"
    if row["seconds"] <= 0 and len(row["tokens"]) > 1:
        return f"{where}.seconds is {row['seconds']} for {len(row['tokens'])} tokens"
    return None


def census_fault(where, row):
    """What in a census row is no count."""
    counts = row["by_margin"]
    sound = [len(pair) == 2 and 0 <= pair[1] <= pair[0] for pair in counts]
    if len(counts) == len(census.BOUNDS) and all(sound) and any(positions for positions, _ in counts):
        return None
    return f"{where}.by_margin is {show(counts)}; expected (positions, disagreements) of {len(census.BOUNDS)} margins"


def class_fault(where, case):
    """A divergence's class that is none."""
    return None if case["class"] in ties.CLASSES else f"{where} has class {show(case['class'])}"


def criteria_fault(result):
    """What is wrong with the criteria that a result registered."""
    names = [experiment.label(arm) for arm in result["arms"]]
    found = (criteria.fault(rule, names) for rule in (result.get("criteria") or {}).get("rules", []))
    return next((f"a criterion {words}" for words in found if words), None)


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
    """Whether a file calls itself a result: one that does and is damaged is refused by name, not passed over."""
    try:
        content = load(path)
    except DAMAGE:
        return False
    return isinstance(content, dict) and content.get("schema") == experiment.SCHEMA


def load(path):
    """The JSON of a file, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def stem(path):
    """A result's name without .json or .json.gz."""
    return pathlib.Path(path).name.removesuffix(".gz").removesuffix(".json")


def unfinished(path, header):
    """The result so far in `path`, to be gone on with. Raises UserError unless it is the same run, cut short.

    header: the new run's; command, config, target, drafter, source and device must be what they were.
    """
    earlier = read(path)
    if earlier.get("complete", True):
        raise UserError(f"{path} is complete: there is nothing to resume; name another --out")
    for key, before, now in zip(SAME, identity(earlier), identity(header), strict=True):
        if before != now:
            raise UserError(f"{path}: its {key} is not this run's, so its rows cannot be gone on with; start afresh")
    return earlier


def identity(header):
    """What must agree before rows of two runs stand in one result; JSON's own types, for one of them was stored."""
    made = header["provenance"]
    keys = [header.get(key) for key in ("command", "config", "target", "drafter", "criteria")]
    return json.loads(json.dumps([*keys, made.get("source_digest"), made.get("device")]))
