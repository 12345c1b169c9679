"""Let the target write the answers that a drafter is trained on.

    python scripts/synthesize.py --target smollm2 --prompts questions.jsonl --limit 2000 --out runs/synthesis/mine
    python scripts/synthesize.py --prompts configs/data/general.yaml --count 4000 --temperature 0,0.7 --minutes 8
    python scripts/synthesize.py --target MY/MODEL --self-prompts 20000 --turns 2 --out runs/synthesis/mine
    python scripts/synthesize.py --self-prompts 9000 --user-begins "" --user-begins "Write a Python function"

Prompts come from JSONL (`turns`, of which the first is asked, `prompt` or `question`), .txt (one a line), .yaml
templates, a dataset (hf:NAME[:SPLIT[:COLUMN[:SUBSET]]]), or from the target itself. The chat template is applied. The
run can be stopped at any time; the same command continues it. The same seed gives the same rows, in whatever batches
and after whatever stops, up to near ties of the arithmetic: batches of another shape round logits differently.
"""

import dataclasses
import functools
import json
import os
import pathlib
import time

import edge
from kernels.errors import UserError

EVALUATION = edge.ROOT / "decode" / "lab" / "prompts"


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="synthesize.py", description=__doc__)
    parser.add_argument("--target", default="smollm2", help="a configs/target name, a folder or a hub id (%(default)s)")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="FILE", help=".jsonl, .txt or .yaml files, or hf:…")
    parser.add_argument("--self-prompts", type=positive, default=0, metavar="N", help="let the target write N prompts")
    parser.add_argument("--count", type=positive, help="prompts to draw from each .yaml file")
    parser.add_argument("--limit", type=positive, help="answer at most this many given prompts, drawn by --seed")
    parser.add_argument("--system", help="a system turn put before every prompt")
    parser.add_argument(
        "--temperature",
        type=temperatures,
        default=(0.0,),
        metavar="T[,T]",
        help="0 is greedy; several are shared out evenly over the prompts (0)",
    )
    parser.add_argument(
        "--turns", type=positive, default=1, help="of a conversation; from the second the target writes the user's too"
    )
    parser.add_argument("--user-temperature", type=temperature, default=1.0, help="of user turns (%(default)s)")
    parser.add_argument("--user-tokens", type=positive, default=128, help="longest user turn (%(default)s)")
    parser.add_argument(
        "--user-begins",
        action="append",
        metavar="TEXT",
        help="first words of prompts that the target writes; several are shared out evenly (none)",
    )
    parser.add_argument("--script", help="the only script wanted in user turns, such as latin or cyrillic (any)")
    parser.add_argument(
        "--template-option",
        action="append",
        type=template_option,
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of the chat template, such as enable_thinking=false; may be repeated",
    )
    parser.add_argument("--max-tokens", type=positive, default=256, help="longest answer (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=64, help="answers written at once (%(default)s)")
    parser.add_argument("--minutes", type=minutes, help="start no answer after this long; the rest remains to be done")
    parser.add_argument("--seed", type=int, default=0, help="chooses prompts, temperatures and samples (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="compute dtype (the device's own)")
    parser.add_argument(
        "--held-out",
        nargs="*",
        type=pathlib.Path,
        metavar="FILE",
        help="prompt files never to answer (the shipped evaluation sets)",
    )
    parser.add_argument("--shard-rows", type=positive, default=10_000, help="answers to a file (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write or continue (runs/synthesis/TARGET)")
    options = parser.parse_args(argv)
    if not options.prompts and not options.self_prompts:
        parser.error("nothing to answer: give --prompts, or --self-prompts to let the target write them")
    return options


def positive(text):
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def minutes(text):
    """A number of minutes above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def temperatures(text):
    """Comma-separated temperatures, each 0 or above."""
    return tuple(map(temperature, text.split(",")))


def temperature(text):
    """A temperature, 0 or above."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def template_option(text):
    """(key, value) of a chat template's keyword; the value is read as JSON where it is JSON, else as text."""
    key, found, value = text.partition("=")
    if not found or not key.isidentifier():
        raise ValueError
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main(argv):
    """Synthesize; returns the closing figures."""
    options = parse(argv)
    prepare()
    from drafter import conversations, prompts, questions, synthesis, target

    sources = [read(prompts, name, options) for name in options.prompts]
    found = [prompt for source, _ in sources for prompt in source]
    chosen = prompts.sample(found, options.limit, options.seed)
    held_out = [turn for path in held_files(options.held_out) for turn in prompts.read_turns(path)]
    recipe = conversations.Recipe(
        seed=options.seed,
        temperatures=options.temperature,
        max_tokens=options.max_tokens,
        turns=options.turns,
        template_options=dict(options.template_option),
        asking=questions.Asking(
            options.user_temperature, options.user_tokens, options.script, tuple(options.user_begins or [""])
        ),
    )
    model = target.load(options.target, dtype=options.dtype)
    out = options.out or edge.ROOT / "runs" / "synthesis" / pathlib.PurePath(options.target).name
    thinking = synthesis.thinking(model, recipe.template_options)
    show_card(model, options, out, f"{len(chosen)} of {len(found)}", len(held_out), thinking)
    with Progress() as progress:
        counts = synthesis.run(
            model,
            chosen,
            out,
            recipe=recipe,
            data=[{"name": name, "sha256": digest} for name, (_, digest) in zip(map(short, options.prompts), sources)],
            argv=argv,
            batch_size=options.batch_size,
            self_prompts=options.self_prompts,
            system=options.system,
            held_out=held_out,
            minutes=options.minutes,
            shard_rows=options.shard_rows,
            progress=progress,
        )
    return {"status": "done", "out": str(out), "tok_s": progress.rate(), **dataclasses.asdict(counts)}


def prepare():
    """Ready this process for MLX: a BLAS on Linux CPU, and no cuDNN attention.

    cuDNN plans its attention anew for every cache length, about 60 ms a step in a growing batch (measured, H200).
    """
    os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")
    from kernels import backend

    backend.load()


def read(prompts, name, options):
    """(prompts, SHA-256) of one file or dataset, with this command's options."""
    from drafter.manifest import sha256_file

    if name.startswith(prompts.HUB):
        return prompts.read_dataset(name, system=options.system)
    found = prompts.read_prompts(name, system=options.system, seed=options.seed, count=options.count)
    return found, sha256_file(name)


def short(name):
    """What a manifest calls a source of prompts: no machine's folders."""
    return pathlib.PurePath(name).name


def held_files(given):
    """The evaluation files whose prompts are left out."""
    files = sorted(EVALUATION.glob("*.jsonl")) if given is None else given
    for path in files:
        if not path.is_file():
            raise UserError(f"--held-out {path}: not found; give prompt files, or leave the option out")
    return files


def show_card(model, options, out, chosen, held_out, thinking):
    """Print what is about to run, on what."""
    from kernels import backend

    machine = backend.describe()
    print(f"target       {model.source} {model.dtype}  fingerprint {model.fingerprint[:16]}…")
    print(f"device       {machine['device']} ({machine['reason']})")
    written = f", and {options.self_prompts} the target writes" if options.self_prompts else ""
    print(f"prompts      {chosen}{written}; {held_out} evaluation prompts are left out if met")
    print(
        f"answers      up to {options.max_tokens} tokens, temperature {', '.join(map(str, options.temperature))}, "
        f"{options.batch_size} at once, seed {options.seed}"
    )
    mode = f", thinking {thinking}" if thinking else ""
    given = "".join(f", {key}={json.dumps(value)}" for key, value in options.template_option)
    print(f"template     {model.raw_reason() or 'chat template applied'}{given}{mode}; {options.turns} turns")
    print(f"out          {out}", flush=True)


class Progress:
    """A bar over prompts being written, then one over answers, with tokens a second and the time left."""

    def __init__(self):
        import tqdm

        self.make_bar = functools.partial(tqdm.tqdm, dynamic_ncols=True, mininterval=1.0)
        self.bar, self.stage = None, None
        self.tokens, self.began, self.seconds = 0, None, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar:
            self.seconds = time.monotonic() - self.began
            self.bar.close()

    def __call__(self, stage, done, tokens, total):
        if stage != self.stage:
            self.__exit__()
            self.bar, self.stage = self.make_bar(total=total, initial=done, unit=f" {stage}"), stage
            self.began = self.began or time.monotonic()
        self.tokens += tokens
        rate = self.tokens / max(time.monotonic() - self.began, 1e-9)
        self.bar.set_postfix({"tok/s": f"{rate:,.0f}"}, refresh=False)
        self.bar.update(done - self.bar.n)

    def rate(self):
        """Tokens generated a second, prefill included; None when nothing was generated."""
        return round(self.tokens / self.seconds, 1) if self.tokens else None


if __name__ == "__main__":
    edge.run(main)
