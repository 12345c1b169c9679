"""What is compared: one way of decoding each, all asked the same question and stopped by the same rule.

    mlx_lm     mlx_lm.stream_generate, the baseline, always the first of a round
    X-twin     arm X again, elsewhere in the round: its ratio to X is the noise floor
    plain      this project's loop without a proposer
    ngram-N    the control that needs no model: prompt lookup of n-grams up to N
    dflash-B   the drafter at block size B
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
from decode.proposers import DFlashProposer, PromptLookup, Proposer
from decode.schedule import Fixed
from drafter import checkpoint, dflash, hybrid, manifest
from drafter.config import DrafterConfig
from drafter.target import Target


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
    """One way of decoding; kind is mlx_lm, plain, ngram or dflash, and block_size is None for the first two.

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
        """The same arm under a tie guard."""
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
        noting, schedule = Noting(self.proposer), self.sizing().get("schedule") or Fixed(self.block_size)
        options = {"max_tokens": max_tokens, "eos_ids": self.target.eos_ids, "tie_guard": self.tie_guard}
        steps = cycle.decode(self.target, list(tokens), noting, schedule, **options)
        emitted, verifies = [], []
        for step in steps:
            if step.cycle:
                proposed = () if step.cycle.redecided else noting.proposed[: step.cycle.proposed]
                rows = (emitted[-1], *proposed)
                mx.eval(step.logits)
                verifies.append(Verify(len(emitted), rows, step.logits))
            noting.proposed = ()
            emitted += step.tokens
        return emitted, verifies


class Noting(Proposer):
    """Another proposer, its last proposals noted."""

    def __init__(self, proposer):
        self.proposer, self.proposed = proposer, ()
        self.taps = proposer.taps

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


def ksweep(target, drafter, block_sizes, ngrams, ngram_block_size):
    """The arms of a sweep over block sizes, baseline first. Raises UserError for a block size the drafter cannot draft.

    ngrams: longest n-gram of each prompt lookup control, all drafting blocks of `ngram_block_size` rows.
    """
    trained = drafter.config.block_size
    for size in block_sizes:
        Fixed(size, most=trained)
    return [
        *references(target),
        *(Arm(f"ngram-{n}", "ngram", ngram_block_size, target, PromptLookup(n)) for n in ngrams),
        *(Arm(f"dflash-{B}", "dflash", B, target, DFlashProposer(target, drafter, B)) for B in block_sizes),
    ]


def carried(target, drafter, path):
    """A drafter made for another target, for this one: loaded for it, or the same untrained control.

    Raises UserError where the target's shape does not take it.
    """
    return open_drafter(target, path, allow_mismatch=True)[0] if path else drafter


def within(part, compared):
    """The arms as arms of one part of an evaluation."""
    return [dataclasses.replace(arm, part=part) for arm in compared]


def guarded(compared, ulps, beside):
    """The arms with every speculative one under a tie guard, instead of the unguarded one or beside it."""
    under = [arm.guarded(ulps) for arm in compared if arm.block_size]
    return [arm for arm in compared if beside or not arm.block_size] + under


def open_drafter(target, path, *, allow_mismatch):
    """(drafter, what a result records of it) from a checkpoint's path."""
    loaded = checkpoint.load_drafter(path, target, allow_mismatch=allow_mismatch)
    folder = loaded.folder.resolve()
    inside = folder.relative_to(manifest.ROOT) if folder.is_relative_to(manifest.ROOT) else folder
    identity = {"path": str(inside), "sha256": loaded.sha256, "kind": loaded.kind, "target_mismatch": loaded.mismatch}
    if (folder / manifest.NAME).is_file():
        identity["trained_length"] = manifest.read(folder).extra.get("row_tokens")
    return loaded.drafter, identity


def untrained(target, *, block_size, seed):
    """(drafter, what a result records of it) of the control: the default shape for this target, never trained."""
    shape = DrafterConfig(block_size=block_size, mask_token_id=0)  # which id masks is nothing to an untrained control
    drafter = dflash.initialise(dflash.DFlash(dflash.config_for(target, shape)), target, seed)
    drafter.set_dtype(getattr(mx, target.dtype))
    mx.eval(drafter.parameters())
    return drafter, {"path": None, "sha256": None, "kind": "untrained", "seed": seed, "target_mismatch": None}
