"""Let the target write the answers that a drafter is trained on.

    python scripts/synthesize.py --target smollm2 --prompts questions.jsonl --limit 2000 --out runs/synthesis/mine
    python scripts/synthesize.py --prompts configs/data/general.yaml --count 4000 --temperature 0,0.7 --minutes 8

Prompts come from JSONL (`turns`, of which the first is asked, `prompt` or `question`), .txt (one a line), or .yaml
templates. The chat template is applied. The run can be stopped at any time; the same command continues it.
"""

import dataclasses
import os
import pathlib

import edge
from kernels.errors import UserError

EVALUATION = edge.ROOT / "decode" / "lab" / "prompts"


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="synthesize.py", description=__doc__)
    parser.add_argument("--target", default="smollm2", help="a configs/target name, a folder or a hub id (%(default)s)")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help=".jsonl, .txt or .yaml files")
    parser.add_argument("--count", type=positive, help="prompts to draw from each .yaml file")
    parser.add_argument("--limit", type=positive, help="answer at most this many prompts, drawn by --seed")
    parser.add_argument("--system", help="a system turn put before every prompt")
    parser.add_argument(
        "--temperature",
        type=temperatures,
        default=(0.0,),
        metavar="T[,T]",
        help="0 is greedy; several are shared out evenly over the prompts (0)",
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
    parser.add_argument("--out", type=pathlib.Path, help="folder to write or continue (runs/synthesis/TARGET)")
    return parser.parse_args(argv)


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
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError
    return values


def main(argv):
    """Synthesize; returns the closing figures."""
    options = parse(argv)
    prepare()
    from drafter import manifest, prompts, synthesis, target

    paths = [pathlib.Path(path) for path in options.prompts]
    found = [prompt for path in paths for prompt in read(prompts, path, options)]
    chosen = prompts.sample(found, options.limit, options.seed)
    held_out = [turn for path in held_files(options.held_out) for turn in prompts.read_turns(path)]
    model = target.load(options.target, dtype=options.dtype)
    out = options.out or edge.ROOT / "runs" / "synthesis" / pathlib.PurePath(options.target).name
    show_card(model, options, out, len(found), len(chosen), len(held_out))
    with Progress() as progress:
        counts = synthesis.run(
            model,
            chosen,
            out,
            data=[{"name": path.name, "sha256": manifest.sha256_file(path)} for path in paths],
            argv=argv,
            seed=options.seed,
            temperatures=options.temperature,
            max_tokens=options.max_tokens,
            batch_size=options.batch_size,
            held_out=held_out,
            minutes=options.minutes,
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


def read(prompts, path, options):
    """The prompts of one file, with this command's options."""
    return prompts.read_prompts(path, system=options.system, seed=options.seed, count=options.count)


def held_files(given):
    """The evaluation files whose prompts are left out."""
    files = sorted(EVALUATION.glob("*.jsonl")) if given is None else given
    for path in files:
        if not path.is_file():
            raise UserError(f"--held-out {path}: not found; give prompt files, or leave the option out")
    return files


def show_card(model, options, out, found, chosen, held_out):
    """Print what is about to run, on what."""
    from kernels import backend

    machine = backend.describe()
    print(f"target       {model.source} {model.dtype}  fingerprint {model.fingerprint[:16]}…")
    print(f"device       {machine['device']} ({machine['reason']})")
    print(f"prompts      {chosen} of {found}; {held_out} evaluation prompts are left out if met")
    print(
        f"answers      up to {options.max_tokens} tokens, temperature {', '.join(map(str, options.temperature))}, "
        f"{options.batch_size} at once, seed {options.seed}"
    )
    print(f"template     {model.raw_reason() or 'chat template applied'}")
    print(f"out          {out}", flush=True)


class Progress:
    """A bar over answers, with tokens a second and the time left."""

    def __init__(self):
        import tqdm

        self.bar = tqdm.tqdm(unit=" answers", dynamic_ncols=True, mininterval=1.0)
        self.tokens = 0
        self.seconds = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.seconds = self.bar.format_dict["elapsed"]
        self.bar.close()

    def __call__(self, answered, tokens, total):
        if self.bar.total is None:  # what an earlier run answered does not count towards the rate
            self.bar.reset(total)
            self.bar.initial = self.bar.n = answered
        self.tokens += tokens
        rate = self.tokens / max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix({"tok/s": f"{rate:,.0f}"}, refresh=False)
        self.bar.update(answered - self.bar.n)

    def rate(self):
        """Tokens generated a second, prefill included; None when nothing was generated."""
        return round(self.tokens / self.seconds, 1) if self.tokens else None


if __name__ == "__main__":
    edge.run(main)
