"""What is compared: one way of decoding each, all asked the same question and stopped by the same rule.

    mlx_lm     mlx_lm.stream_generate, the baseline, always the first of a round
    X-twin     arm X again, elsewhere in the round: its ratio to X is the noise floor
    plain      this project's loop without a proposer
    ngram-N    the control that needs no model: prompt lookup of n-grams up to N
    dflash-B   a full drafter at block size B
    gated_lora-B          a gated LoRA at block size B
    gated_lora-B-CHANGE   the same, drafting another way: see CHANGES
    X-guardG   arm X under a tie guard of G ULPs

T prompt tokens, K proposals, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Callable

import mlx.core as mx
import mlx_lm

from decode import cycle, stream
from decode.lab.statistics import GUARD
from decode.lab.ties import Verify
from decode.proposers import DFlashProposer, GatedLoraProposer, PromptLookup, Proposer
from decode.schedule import Fixed
from drafter import checkpoint, dflash, gated_lora, hybrid, manifest
from drafter.config import AdapterConfig, DrafterConfig
from drafter.target import Target
from kernels.errors import UserError

DRAFTERS = ("dflash", "gated_lora")  # kinds of arms that a drafter has
CHANGES = {  # how else a gated LoRA can draft than by resending the pending row after one pass
    "keep": {"keep": True},
    "refine2": {"refinements": 1},
    "refine4": {"refinements": 3},
    "always_on": {"always_on": True},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One decode: ids emitted, cycles, seconds from the first emitted token to the last, and before the first."""

    tokens: tuple[int, ...]
    cycles: tuple[cycle.Cycle, ...]
    seconds: float
    prefill_seconds: float
    finish: str


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding; kind is mlx_lm, plain, ngram, dflash or gated_lora, and block_size None for the first two.

    part: which part of an evaluation it belongs to, where arms of several targets are compared side by side. policy:
    makes a fresh schedule for each text, in place of the fixed block size, which is then the largest. tie_guard: ULPs
    within which a block's token is decided by one row instead, or None.
    """

    name: str
    kind: str
    block_size: int | None
    target: Target
    proposer: Proposer | None = None
    part: str | None = None
    policy: Callable | None = None
    tie_guard: float | None = None

    def guarded(self, ulps):
        """The same arm under a tie guard. Raises UserError where its drafter cannot be guarded."""
        cycle.refuse_kept(ulps, self.proposer)
        return dataclasses.replace(self, name=f"{self.name}{GUARD}{ulps:g}", tie_guard=ulps)

    def run(self, tokens, max_tokens, clock=None):
        """Decode a prompt (T ids) as a caller would, timed where each emitted token reaches the caller. Returns Run.

        clock: seconds as a function; makes an instrumented run, whose cycles carry stage times (not for mlx_lm).
        """
        tokenizer = self.target.tokenizer
        if self.kind == "mlx_lm":
            with hybrid.detached(self.target.model) as model:
                return clocked(mlx_lm.stream_generate(model, tokenizer, list(tokens), max_tokens=max_tokens), [])
        cycles = []
        responses = stream.stream_generate(
            self.target, tokenizer, list(tokens), self.proposer,
            max_tokens=max_tokens, on_cycle=cycles.append, clock=clock, tie_guard=self.tie_guard, **self.sizing(),
        )  # fmt: skip
        return clocked(responses, cycles)

    def sizing(self):
        """The options of a decode that say how large its blocks are."""
        return {"schedule": self.policy()} if self.policy else {"block_size": self.block_size}

    def replay(self, tokens, max_tokens):
        """Run a drafting arm again, keeping what an audit needs: (emitted ids, one `ties.Verify` per cycle)."""
        noting, policy = Noting(self.proposer), self.sizing().get("schedule")
        schedule = policy or Fixed(self.block_size, least=self.proposer.least_block)
        options = {"max_tokens": max_tokens, "eos_ids": self.target.eos_ids, "tie_guard": self.tie_guard}
        steps = cycle.decode(self.target, list(tokens), noting, schedule, **options)
        emitted, verifies = [], []
        for step in steps:
            if step.cycle:
                mx.eval(step.logits)
                verifies += noting.verifies(emitted, step)
            noting.proposed = ()
            emitted += step.tokens
        return emitted, verifies


class Noting(Proposer):
    """Another proposer, its last proposals noted, and whether it left the pending row in the caches."""

    def __init__(self, proposer):
        self.proposer, self.proposed, self.kept = proposer, (), False
        self.taps, self.extra, self.keep = proposer.taps, proposer.extra, proposer.keep

    def share(self, cache, transaction):
        """As the other."""
        self.proposer.share(cache, transaction)

    def verifies(self, emitted, step):
        """The `ties.Verify`s of a step: of a kept pending row, the draft pass that decided it, and the rest.

        Which noise such a pass held is nothing to its first row; the pending token stands in for it.
        """
        start, pending = len(emitted), emitted[-1]
        rows = () if step.cycle.redecided else self.proposed[: step.cycle.proposed]
        if not (self.kept and rows):
            return [Verify(start, (pending, *rows), step.logits)]
        first, rest = step.logits[:1], step.logits[1:]
        return [Verify(start, (pending,) * len(rows), first), *([Verify(start + 1, rows, rest)] if len(rest) else [])]

    def begin(self, tokens, taps):
        """As the other."""
        self.proposer.begin(tokens, taps)

    def observe(self, tokens, taps):
        """As the other."""
        self.proposer.observe(tokens, taps)

    def propose(self, pending, count):
        """As the other; notes the ids."""
        proposal = self.proposer.propose(pending, count)
        self.proposed = tuple(mx.array(proposal.tokens, mx.uint32).tolist()) if len(proposal) else ()
        self.kept = proposal.decided is not None
        return proposal

    def state(self):
        """As the other."""
        return self.proposer.state()


def clocked(responses, cycles):
    """Drain a stream of responses into a Run; `cycles` is the list that the stream fills meanwhile."""
    tokens, moments, finish = [], [time.perf_counter()], None
    for response in responses:
        moments.append(time.perf_counter())
        tokens.append(response.token)
        finish = response.finish_reason
    return Run(tuple(tokens), tuple(cycles), moments[-1] - moments[1], moments[1] - moments[0], finish)


def references(target):
    """What every comparison begins with: the baseline, its identical twin, which is the noise floor, and plain."""
    return [
        Arm("mlx_lm", "mlx_lm", None, target),
        Arm("mlx_lm-twin", "mlx_lm", None, target),
        Arm("plain", "plain", None, target),
    ]


def ksweep(target, drafter, block_sizes, ngrams, ngram_block_size, changes=()):
    """The arms of a sweep over block sizes, baseline first. Raises UserError for a block size the drafter cannot draft.

    ngrams: longest n-gram of each prompt lookup control, all drafting blocks of `ngram_block_size` rows.
    changes: names of CHANGES, each an arm more at every block size of a gated LoRA.
    """
    return [
        *references(target),
        *(Arm(f"ngram-{n}", "ngram", ngram_block_size, target, PromptLookup(n)) for n in ngrams),
        *(arm for B in block_sizes for arm in drafting(target, drafter, B, changes)),
    ]


def fitting(drafter, block_sizes):
    """Those of the block sizes that a drafter can draft."""
    most = most_block(drafter)
    return tuple(size for size in block_sizes if most is None or size <= most)


def most_block(drafter):
    """The largest block size that a drafter can draft; None where any will do."""
    return None if isinstance(drafter, gated_lora.GatedLora) else drafter.config.block_size


def least_block(drafter):
    """The smallest block size that a drafter can draft."""
    return (GatedLoraProposer if isinstance(drafter, gated_lora.GatedLora) else DFlashProposer).least_block


def drafting(target, drafter, block_size, changes):
    """The arms of a drafter at one block size."""
    if not isinstance(drafter, gated_lora.GatedLora):
        if changes:
            raise UserError(f"{changes[0]}: only a gated LoRA can draft so; leave it out")
        proposer = DFlashProposer(target, drafter, block_size)
        Fixed(block_size, least=least_block(drafter), most=most_block(drafter))
        return [Arm(f"dflash-{block_size}", "dflash", block_size, target, proposer)]
    ways = {"": {}} | {f"-{change}": CHANGES[change] for change in changes}
    proposers = {way: GatedLoraProposer(target, drafter, block_size, **options) for way, options in ways.items()}
    return [
        Arm(f"gated_lora-{block_size}{way}", "gated_lora", block_size, target, proposer)
        for way, proposer in proposers.items()
    ]


def carried(target, drafter, path, alpha=None):
    """A drafter made for another target, for this one: loaded for it, or the same untrained control.

    Raises UserError where the target's shape does not take it.
    """
    return open_drafter(target, path, allow_mismatch=True, alpha=alpha)[0] if path else drafter


def within(part, compared):
    """The arms as arms of one part of an evaluation."""
    return [dataclasses.replace(arm, part=part) for arm in compared]


def guarded(compared, ulps, beside):
    """The arms with every speculative one under a tie guard, instead of the unguarded one or beside it."""
    under = [arm.guarded(ulps) for arm in compared if arm.block_size]
    return [arm for arm in compared if beside or not arm.block_size] + under


def open_drafter(target, path, *, allow_mismatch, alpha=None):
    """(drafter, what a result records of it) from a path; alpha: of an adapter that does not say its own."""
    loaded = checkpoint.load_drafter(path, target, allow_mismatch=allow_mismatch, alpha=alpha)
    folder = loaded.folder.resolve()
    identity = {
        "path": manifest.unplaced(str(folder)),
        "sha256": loaded.sha256,
        "kind": loaded.kind,
        "target_mismatch": loaded.mismatch,
    }
    if (folder / manifest.NAME).is_file():
        identity["trained_length"] = manifest.read(folder).extra.get("row_tokens")
    return loaded.drafter, identity


def untrained(target, *, block_size, seed, kind="dflash"):
    """(drafter, what a result records of it) of the control: the default shape for this target, never trained."""
    found = {"path": None, "sha256": None, "kind": "untrained", "seed": seed, "target_mismatch": None}
    if kind == gated_lora.KIND:
        shape = gated_lora.config_for(target, AdapterConfig(), block_size)
        return gated_lora.initialise(gated_lora.GatedLora(target, shape), seed), found
    shape = DrafterConfig(block_size=block_size, mask_token_id=0)  # which id masks is nothing to an untrained control
    drafter = dflash.initialise(dflash.DFlash(dflash.config_for(target, shape)), target, seed)
    drafter.set_dtype(getattr(mx, target.dtype))
    mx.eval(drafter.parameters())
    return drafter, found
