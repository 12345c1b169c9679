"""Text: `stream_generate` and `generate`, with mlx-lm's arguments and response fields.

V vocabulary. Greedy: every token is the argmax of the target's raw logits, whatever proposes. What greedy decoding
cannot honour is refused. A prompt given as text is encoded as it stands; `target.encode` applies the chat template.
"""

import dataclasses
import difflib
import inspect
import math
import time
import warnings

import mlx.core as mx
from mlx_lm.generate import GenerationResponse as MlxResponse
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from decode.cycle import Cycle, Loop, Quantization
from decode.proposers import as_proposer
from decode.schedule import Fixed
from drafter import hybrid
from drafter.target import Target
from kernels.errors import UserError

GREEDY = "decoding here is greedy (the argmax of raw logits); leave it out"
REFUSED = {
    "sampler": GREEDY,
    "logits_processors": GREEDY,
    "temp": GREEDY,
    "temperature": GREEDY,
    "top_p": GREEDY,
    "top_k": GREEDY,
    "min_p": GREEDY,
    "repetition_penalty": GREEDY,
    "logit_bias": GREEDY,
    "seed": GREEDY,
    "draft_model": "pass a DFlash drafter, a gated LoRA or a Proposer as drafter=",
    "num_draft_tokens": "pass block_size=, one more than the tokens to draft",
    "input_embeddings": "a prompt is text or token ids here",
}
PINNED = 4  # mlx-lm's make_prompt_cache
ZERO_IS_GREEDY = ("temp", "temperature")


@dataclasses.dataclass
class GenerationResponse(MlxResponse):
    """mlx-lm's response, and the cycle that the token came from (None for the prefill's token).

    `logprobs` [V] is normalised from the row's raw logits and computed only when it is read. A stop string is not part
    of `text`; text that may turn out to begin one is held back until it is known.
    """

    cycle: Cycle | None = None


def generate(target, tokenizer, prompt, drafter=None, *, verbose=False, **options):
    """The whole answer as text. Arguments are `stream_generate`'s; verbose prints text and rates as mlx-lm does."""
    if verbose:
        print("=" * 10)
    text = ""
    for response in stream_generate(target, tokenizer, prompt, drafter, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print("", "=" * 10, sep="\n")
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def stream_generate(target, tokenizer, prompt, drafter=None, *, max_tokens=256, block_size=None, schedule=None, stop=(),
                    on_cycle=None, clock=None, prompt_cache=None, max_kv_size=None, prefill_step_size=2048,
                    kv_bits=None, kv_group_size=64, quantized_kv_start=5000, prompt_progress_callback=None,
                    tie_guard=None, **unknown):  # fmt: skip
    """Decode a prompt; an iterator of GenerationResponse, one per token.

    target     a drafter.target.Target
    tokenizer  mlx-lm's TokenizerWrapper or a transformers tokenizer; None for the target's own
    prompt     text, token ids or an mx.array [T] of them
    drafter    a DFlash drafter, a gated LoRA, a Proposer, or None for the plain width-1 loop
    max_tokens tokens at most, -1 for no cap; a text that reaches the target's context ends there ("length")
    block_size B; None for the drafter's own
    schedule   a decode.schedule policy of its own for this text, in place of one block size
    stop       a string or strings that end the text, also where they span tokens
    on_cycle   called with each Cycle once it is known where the text ends
    clock      seconds as a function: an instrumented pass, whose cycles carry stage times
    tie_guard  ULPs of the target's dtype: a token whose top two logits are no further apart is decided by a forward of
               one row, as plain decoding decides it, at the cost of that forward; None for no guard
    The rest is mlx-lm's and means the same. A `prompt_cache` handed in is advanced by the prompt and every token
    emitted, also when the iterator is closed early, as mlx-lm's own loop leaves it.
    Raises UserError, before anything runs, for what cannot be honoured.
    """
    refuse(unknown)
    check_target(target)
    tokenizer = wrap(tokenizer or target.tokenizer)
    proposer = as_proposer(target, drafter, block_size)
    check_schedule(block_size, schedule, proposer)
    check_guard(tie_guard, proposer)
    schedule = schedule or (proposer and fixed_schedule(proposer, block_size))
    check_counts(max_tokens, prefill_step_size, max_kv_size)
    tokens = encode(target, tokenizer, prompt)
    cache = open_cache(target, prompt_cache, max_kv_size, kv_bits)
    quantization = kv_bits and Quantization(kv_bits, kv_group_size, quantized_kv_start)
    if quantization:
        quantization.check()
    limit = fit(target, cache, len(tokens), max_tokens)
    loop = Loop(
        target, cache, proposer, schedule,
        max_tokens=limit, eos_ids=frozenset(tokenizer.eos_token_ids), prefill_step_size=prefill_step_size,
        quantization=quantization,
        progress=prompt_progress_callback, clock=clock, tie_guard=tie_guard,
    )  # fmt: skip
    writer = Writer(tokenizer.detokenizer, (stop,) if isinstance(stop, str) else tuple(stop))
    return respond(loop, tokens, writer, on_cycle, settle=prompt_cache is not None)


def respond(loop, tokens, writer, on_cycle, settle):
    """Run the loop and yield a GenerationResponse per token; however it ends, the caches fit what was yielded."""
    clock = Rates(len(tokens))
    handed = 0  # tokens of the running step that the caller has seen
    with wired_limit(loop.target.model):
        try:
            step = loop.prefill(tokens)
            clock.start()
            while True:
                pieces, reason = write(loop, step, writer)
                cycle = step.cycle and step.cycle.cut(len(pieces))
                for handed, text in enumerate(pieces, 1):
                    last = reason if handed == len(pieces) else None
                    yield response(step, handed - 1, text, last, cycle, clock)
                if cycle and on_cycle:
                    on_cycle(cycle)
                if reason:
                    return
                handed, step = 0, loop.cycle()
        finally:
            if handed:
                loop.cut(handed)
            if settle and loop.emitted:
                loop.settle()


def write(loop, step, writer):
    """The text of each token of a step up to the end of the text, and why it ends there (None: it goes on)."""
    pieces, reason = [], None
    for token in step.tokens:
        if token not in loop.eos_ids:
            text, reason = writer.add(token)
            pieces.append(text)
        if token in loop.eos_ids:
            pieces.append("")
            reason = "stop"
        if reason:
            break
    if reason and len(pieces) < len(step.tokens):
        loop.cut(len(pieces))
    if reason or loop.finished:
        rest, found = writer.finish()
        pieces[-1] += rest
        reason = reason or found or "length"
    return pieces, reason


def response(step, index, text, reason, cycle, clock):
    """The response for the index-th token of a step."""
    row = step.logits[index]
    clock.tokens += 1
    return GenerationResponse(
        text=text,
        token=step.tokens[index],
        logprobs=row - mx.logsumexp(row, keepdims=True),
        from_draft=cycle is not None and index < cycle.accepted,
        finish_reason=reason,
        cycle=cycle,
        **clock.figures(),
    )


class Rates:
    """Tokens and seconds as mlx-lm counts them: the prompt up to its first token, then generation."""

    def __init__(self, prompt_tokens):
        self.prompt_tokens, self.tokens = prompt_tokens, 0
        self.tic = time.perf_counter()

    def start(self):
        """The first token is there."""
        now = time.perf_counter()
        self.prompt_tps, self.tic = self.prompt_tokens / (now - self.tic), now

    def figures(self):
        """The counting fields of a response."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tps": self.prompt_tps,
            "generation_tokens": self.tokens,
            "generation_tps": self.tokens / (time.perf_counter() - self.tic),
            "peak_memory": mx.get_peak_memory() / 1e9,
        }


class Writer:
    """Turns tokens to text, holds back what may begin a stop string, and ends the text before one.

    Once ended, it gives out nothing more.
    """

    def __init__(self, detokenizer, stops):
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise UserError(f"stop {list(stops)!r}: expected non-empty strings")
        self.detokenizer, self.stops = detokenizer, stops
        self.held, self.ended = "", False

    def add(self, token):
        """(text to give out, "stop" or None) after one more token."""
        self.detokenizer.add_token(token)
        return self._release(len(self._opening()))

    def finish(self):
        """(the rest of the text, "stop" or None)."""
        if self.ended:
            return "", "stop"
        self.detokenizer.finalize()
        self._opening()
        return self._release(0)

    def _opening(self):
        """Take the new text in; the longest end of what is held that could begin a stop string."""
        self.held += self.detokenizer.last_segment
        sizes = range(min(len(self.held), max(map(len, self.stops), default=0)), 0, -1)
        ends = (self.held[-size:] for size in sizes)
        return next((end for end in ends if any(stop.startswith(end) for stop in self.stops)), "")

    def _release(self, holding):
        found = [self.held.find(stop) for stop in self.stops if stop in self.held]
        self.ended = bool(found)
        cut = min(found) if found else len(self.held) - holding
        text, self.held = self.held[:cut], "" if found else self.held[cut:]
        return text, "stop" if found else None


def refuse(unknown):
    """Raise for the first argument that is not ours: why, or the nearest name. None is mlx-lm's default for all."""
    known = [name for name in inspect.signature(stream_generate).parameters if name != "unknown"]
    for name, value in unknown.items():
        if name not in REFUSED:
            near = difflib.get_close_matches(name, [*known, *REFUSED], 1)
            raise UserError(f"{name}: unknown argument" + (f"; did you mean {near[0]}?" if near else ""))
        neutral = value is None or (name in ZERO_IS_GREEDY and value == 0)
        if not neutral:
            raise UserError(f"{name}: cannot be honoured; {REFUSED[name]}")


def check_target(target):
    """Raise when mlx-lm's model stands where a Target is expected."""
    if not isinstance(target, Target):
        raise UserError(f"target: expected a Target, found {type(target).__name__}; drafter.target.load makes one")


def check_schedule(block_size, schedule, proposer):
    """Raise where it is said twice how large blocks are, or said of none."""
    if schedule is not None and block_size is not None:
        raise UserError(f"block_size {block_size}: the schedule decides it; pass one of the two")
    if (block_size, schedule) != (None, None) and not proposer:
        given = "schedule" if block_size is None else f"block_size {block_size}"
        raise UserError(f"{given}: there is no drafter to use it; pass drafter= too")


def check_guard(tie_guard, proposer):
    """Raise for a tie guard that guards nothing."""
    if tie_guard is None:
        return
    if not isinstance(tie_guard, (int, float)) or not 0 <= tie_guard < math.inf:
        raise UserError(f"tie_guard {tie_guard!r}: expected ULPs, a number of at least 0, for example 1")
    if not proposer:
        raise UserError(f"tie_guard {tie_guard}: plain decoding has no block to doubt; pass drafter= too")


def check_counts(max_tokens, prefill_step_size, max_kv_size):
    """Raise for counts that mean nothing."""
    if max_tokens < 1 and max_tokens != -1:
        raise UserError(f"max_tokens {max_tokens}: expected 1 or more, or -1 for no cap")
    if prefill_step_size < 1:
        raise UserError(f"prefill_step_size {prefill_step_size}: expected 1 or more")
    if max_kv_size is not None and max_kv_size <= PINNED:
        raise UserError(f"max_kv_size {max_kv_size}: mlx-lm pins the first {PINNED} rows; give more than that")


def wrap(tokenizer):
    """The tokenizer with mlx-lm's streaming detokenizer."""
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


def fixed_schedule(proposer, block_size):
    """The schedule of one block size: the one asked for, else the proposer's own."""
    size = block_size if block_size is not None else proposer.block_size
    if size is None:
        raise UserError(f"block_size: {proposer.name} has none of its own; give one, for example block_size=8")
    return Fixed(size, least=proposer.least_block, most=proposer.most_block)


def encode(target, tokenizer, prompt):
    """Token ids (list) of a prompt; text is encoded as mlx-lm does, special tokens added unless it starts with BOS."""
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not begins)
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not tokens:
        raise UserError("prompt: empty; give at least one token")
    if not all(isinstance(token, int) for token in tokens):
        raise UserError("prompt: expected text or a flat list of token ids; encode messages with target.encode")
    outside = next((token for token in tokens if not 0 <= token < target.vocab_size), None)
    if outside is not None:
        raise UserError(f"prompt: token id {outside} is outside the target's vocabulary of {target.vocab_size}")
    return tokens


def open_cache(target, prompt_cache, max_kv_size, kv_bits):
    """The caches to decode with: those handed in, else the target's own."""
    fresh = target.make_cache(max_kv_size)
    cache = fresh if prompt_cache is None else hybrid.adopt(target.model, prompt_cache)
    if len(cache) != len(fresh):
        raise UserError(f"prompt_cache: {len(cache)} entries for a target of {len(fresh)}; make one with make_cache()")
    if max_kv_size is not None and any(getattr(entry, "max_size", None) != max_kv_size for entry in cache):
        owner = "prompt_cache has its own sizes" if prompt_cache else f"target {target.source} makes its own caches"
        raise UserError(f"max_kv_size {max_kv_size}: {owner}; hand in RotatingKVCaches of that size as prompt_cache")
    if kv_bits and any(isinstance(entry, RotatingKVCache) for entry in cache):
        raise UserError(f"kv_bits {kv_bits}: mlx-lm cannot quantise a RotatingKVCache; leave out kv_bits or the window")
    return cache


def fit(target, cache, prompt_tokens, max_tokens):
    """Tokens that may be emitted: the cap, or what the target's context leaves room for (announced when it is less)."""
    wanted = math.inf if max_tokens == -1 else max_tokens
    if target.max_length is None:
        return wanted
    held = next((entry.offset for entry in cache if isinstance(getattr(entry, "offset", None), int)), 0)
    room = target.max_length - held - prompt_tokens
    before = f" after {held} tokens in prompt_cache" if held else ""
    if room < 1:
        raise UserError(
            f"prompt: {prompt_tokens} tokens{before} leave no room in the target's context of {target.max_length}; "
            "shorten it"
        )
    if room < wanted < math.inf:
        warnings.warn(
            f"prompt of {prompt_tokens} tokens{before}: the target's context of {target.max_length} ends the text "
            f"after {room} tokens, before max_tokens {max_tokens}",
            stacklevel=3,
        )
    return min(wanted, room)
