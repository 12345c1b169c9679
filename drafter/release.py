"""Folders to publish: the files that others need, a model card, and checksums that shasum accepts."""

import fnmatch
import json
import pathlib
import shutil

from drafter import checkpoint, gated_lora, manifest
from kernels.errors import UserError

CARD = "README.md"
PUBLISHED = {"checkpoint": ("config.json", "*.safetensors"), "synthesis": ("answers*.jsonl.gz", "settings.json")}
PUBLISHED["release"] = PUBLISHED["checkpoint"] + PUBLISHED["synthesis"]  # a released folder can be released again

DRAFTER_CARD = """\
---
library_name: mlx
tags: [speculative-decoding, dflash, foredraft]
---
# {title}

A DFlash drafter for **{source}**. It proposes up to {proposals} tokens in one pass; the target verifies them in one
forward and keeps those that it would have written itself, so the text stays the target's own. On another target, or
another version of it, loading is refused unless that is asked for by name.

    python scripts/spec_decode.py ksweep --target TARGET --drafter FOLDER --prompts suite
"""
ADAPTER_CARD = """\
---
library_name: mlx
tags: [speculative-decoding, lora, foredraft]
---
# {title}

A gated LoRA for **{source}**: the target drafts for itself, adapted in rows that hold noise. One pass proposes
{proposals} tokens, the first of them the target's own; the target without the adapter verifies them and keeps those
that it would have written itself, so the text stays its own. On another target, or another version of it, loading is
refused unless that is asked for by name.

    python scripts/spec_decode.py ksweep --target TARGET --adapter FOLDER --prompts suite
"""
ANSWERS_CARD = """\
# {title}

Answers written by **{source}** to given prompts, one JSON object a line: the text, and the token ids that
drafters are trained on. The content is a language model's: expect errors.
"""


def release(folder, out, *, argv, bits=None):
    """Copy what is to be published from `folder` into the new folder `out`; returns the names written.

    bits: store a drafter's matrices affine-quantised, or as bfloat16 where 16; loading expands them again.
    folder: a checkpoint or synthesis folder, whose manifest must verify. out: must not exist, or be empty. Files are
    gathered beside `out` and moved there at the end, so that a failure leaves nothing.
    """
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    record = manifest.verify(folder)
    names = published_names(record)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already there and not empty; release overwrites nothing, choose a new --out")
    gathered = out.with_name(f".{out.name}{manifest.PARTIAL}")
    shutil.rmtree(gathered, ignore_errors=True)
    gathered.mkdir(parents=True)
    try:
        for name in names:
            shutil.copyfile(folder / name, gathered / name)
        if bits == 16:
            checkpoint.save_narrowed(folder, gathered)
        elif bits:
            checkpoint.save_quantised(folder, gathered, bits)
        with manifest.atomic(gathered / CARD, "w") as stream:
            stream.write(model_card(record, out.name, names))
        made = {"kind": record.kind, "commit": record.commit, "created": record.created}
        made |= {"argv": manifest.unplaced(record.argv)}
        extra = {"released": made} | record.extra  # of a release released again, what it was made from
        shared = {"target": record.target, "data": record.data, "config_digest": record.config_digest}
        manifest.write(gathered, kind="release", argv=argv, extra=extra, **shared)
        written = write_sums(gathered)
        if out.exists():
            out.rmdir()
        gathered.rename(out)
    except OSError as error:
        error.filename, error.filename2 = str(out), None  # the disk that refused is that of `out`
        raise
    finally:
        shutil.rmtree(gathered, ignore_errors=True)
    return written


def published_names(record):
    """The listed files that belong in a release: weights and configuration, or answers; no optimizer state."""
    patterns = PUBLISHED.get(record.kind, ())
    top = [name for name in record.files if "/" not in name]  # not training/, the optimizer's state
    names = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not names:
        kinds = ", ".join(sorted(PUBLISHED))
        raise UserError(f"{record.folder}: nothing to publish in a folder of kind {record.kind!r}; expected {kinds}")
    return names


def write_sums(folder):
    """Write SHA256SUMS over every file of `folder`, in the form that `shasum -a 256 -c` reads; returns all names."""
    names = sorted(path.name for path in folder.iterdir())
    with manifest.atomic(folder / manifest.SUMS, "w") as stream:
        stream.writelines(f"{manifest.sha256_file(folder / name)}  {name}\n" for name in names)
    return [*names, manifest.SUMS]


def model_card(record, title, names):
    """The README of a release, in Markdown."""
    config = manifest.read_json(record.folder / "config.json") if "config.json" in names else None
    adapter = bool(config) and config.get("kind") == gated_lora.KIND
    lead = (ADAPTER_CARD if adapter else DRAFTER_CARD) if config else ANSWERS_CARD
    source = record.target.get("source")
    proposals = (block_size(config) - (not adapter)) if config else None
    parts = [
        lead.format(title=title, source=source, proposals=proposals),
        section("Target", record.target),
        section("Configuration", flat(config)) if config else "",
        section("Figures", flat({name: value for name, value in record.extra.items() if name != "released"})),
        section("Training metrics", last_metrics(record)),
        section("Data", {entry["name"]: entry["sha256"] for entry in record.data}),
        section("Made with", provenance_rows(record)),
        "## Check the files\n\n    shasum -a 256 -c SHA256SUMS\n",
    ]
    return "\n".join(part for part in parts if part)


def block_size(config):
    """B, from either place where released checkpoints keep it."""
    return config.get("block_size") or config.get("dflash_config", {}).get("block_size") or 0


def section(title, rows):
    """A Markdown section with a table of `rows`, or nothing when there are none."""
    if not rows:
        return ""
    lines = [f"| {name} | {show(value)} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines, ""])


def show(value):
    """A value as a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def flat(values, prefix=""):
    """Nested dicts as {dotted name: value}."""
    rows = {}
    for name, value in values.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return rows


def last_metrics(record):
    """The last numbers that the run's metrics.jsonl holds for this checkpoint's step; {} where there are none."""
    step = record.folder.resolve().name.removeprefix("step-")
    path = record.folder.resolve().parent / "metrics.jsonl"
    if not step.isdigit() or not path.is_file():
        return {}
    merged = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("step") == int(step):
            merged |= {name: value for name, value in flat(row).items() if isinstance(value, int | float)}
    return merged


def provenance_rows(record):
    """Where the released content came from."""
    state = {True: "changed", False: "clean", None: "outside a checkout"}[record.dirty]
    rows = {"commit": f"{record.commit} ({state})" if record.commit else "unknown"}
    rows |= {"source digest": record.source_digest, "config digest": record.config_digest or "none"}
    arguments = " ".join(record.extra.get("released", {}).get("argv") or manifest.unplaced(record.argv)) or "none"
    return rows | {"created": record.created, "arguments": arguments} | record.versions
