"""Many prompts answered at once by the target, with mlx-lm's continuous batching.

R rows of the running batch, V vocabulary.

Chance belongs to the row: token i of a job is drawn with the key (seed, job's id) + i. So which jobs share a batch, and
in which order they come, changes a row only where products of another shape round the logits differently.
"""

import contextlib
import dataclasses

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, StopSequences

from drafter import batched, rng
from kernels.errors import UserError

IDLE_SHARE = 8  # R/8 rows may idle before the batch is packed anew (assumed: half of that is lost, 6 % of the work)
PREFILL_SHARE = 4  # prompts are prefilled R/4 at a time (assumed; bounds the memory of the attention scores)
LOW = (1 << 32) - 1


@dataclasses.dataclass(frozen=True)
class Job:
    """Token ids to continue: at which temperature (0 is greedy), how far, and which sequences of ids end it.

    id names its stream of chance; subject is whatever the caller wants back; ends None stands for the target's own.
    """

    id: str
    subject: object
    tokens: list
    temperature: float
    max_tokens: int
    ends: tuple | None = None


class Draw:
    """How one job's tokens are drawn: a sampler, as mlx-lm calls it for the first token."""

    def __init__(self, temperature=0.0, number=0):
        self.temperature = temperature
        self.key = (number >> 32, number & LOW)

    def __call__(self, logits):
        """Token ids [R] from logits or log-probabilities [R, V]: the first of an answer."""
        if self.temperature == 0:
            return mx.argmax(logits, axis=-1)
        return draw_tokens(logits, (mx.array([0]), mx.array([[self.temperature]]), mx.array([self.key], mx.uint32)))


GREEDY = Draw()  # one object for all greedy rows: mlx-lm calls a sampler that rows share once


def draw_tokens(logits, sampled=None):
    """Token ids [R] from logits [R, V]: S of them sampled, each by its own key, the others the most probable.

    sampled: (rows [S], their temperatures [S, 1] above 0, their keys [S, 2] uint32), or None when every row is greedy.
    Sampling is in float32: bfloat16 noise has too few values to draw from 49,000 tokens by.
    """
    tokens = mx.argmax(logits, axis=-1)
    if sampled is not None:
        rows, temperatures, keys = sampled
        tokens[rows] = mx.vmap(categorical)(logits[rows].astype(mx.float32) / temperatures, keys)
    return tokens


def categorical(logits, key):
    """One draw from the distribution of logits [V]."""
    return mx.random.categorical(logits, key=key)


class AnswerBatch(GenerationBatch):
    """mlx-lm's generation batch without the work that synthesis has no use for.

    Upstream splits every step's log-probabilities into R arrays (measured on a CPU: 20 ms a step at R = 1024),
    samples row by row when samplers differ, and copies every cache whenever one row finishes. Here a step takes the
    argmax of the raw logits or samples rows in one call, attention takes together the heads that share keys, and
    finished rows idle until R/8 of them can be dropped together. `next` reports finished rows only: (uid, answer
    tokens, finish).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answers = [[] for _ in self.uids]
        self.finished = [False] * len(self.uids)
        self.sampled = self.temperatures = self.keys = None
        self.attention = batched.attention_modules(self.model)

    @property
    def live(self):
        """How many rows are still being answered."""
        return len(self.finished) - sum(self.finished)

    def extend(self, batch):
        super().extend(batch)
        self.answers += [[] for _ in batch.uids]
        self.finished += [False] * len(batch.uids)
        self._forget()

    def filter(self, keep):
        super().filter(keep)
        self.answers = [self.answers[row] for row in keep]
        self.finished = [self.finished[row] for row in keep]
        self._forget()

    def _forget(self):
        """Drop what upstream keeps for its responses; renew which rows are sampled, at what temperature and key."""
        self._current_logprobs, self._next_logprobs = [], [None] * len(self.uids)
        draws = {row: draw for row, draw in enumerate(self.samplers) if draw.temperature}
        self.sampled = list(draws)
        if draws:
            self.temperatures = mx.array([[draw.temperature] for draw in draws.values()])
            self.keys = mx.array([draw.key for draw in draws.values()], mx.uint32)

    def _draws(self):
        """What `draw_tokens` samples in this step: keys are a row's own plus its number of tokens (they may wrap)."""
        if not self.sampled:
            return None
        places = mx.array([[0, len(self.answers[row]) + 1] for row in self.sampled], mx.uint32)
        return mx.array(self.sampled), self.temperatures, self.keys + places

    def _step(self):
        """Start the next step and return the tokens of this one."""
        self._current_tokens = self._next_tokens
        with batched.grouped(self.attention):
            logits = self.model(self._current_tokens[:, None], cache=batched.lend(self.prompt_cache))[:, -1]
        self._next_tokens = draw_tokens(logits, self._draws())
        mx.async_eval(self._next_tokens)
        return self._current_tokens.tolist()

    def next(self):
        done = []
        for row, token in enumerate(self._step() if self.uids else []):
            if self.finished[row]:
                continue
            self.answers[row].append(token)
            stopped = self._matchers[row].advance(token)
            if stopped or len(self.answers[row]) >= self.max_tokens[row]:
                self.finished[row] = True
                done.append((self.uids[row], self.answers[row], "stop" if stopped else "length"))
        idle = len(self.uids) - self.live
        if idle and idle * IDLE_SHARE >= len(self.uids):
            self.filter([row for row, finished in enumerate(self.finished) if not finished])
        return done


def make_generator(target, batch_size):
    """mlx-lm's continuous batching over `batch_size` rows, with an AnswerBatch as its running batch; returns both."""
    generator = BatchGenerator(
        target.model,
        sampler=GREEDY,
        completion_batch_size=batch_size,
        prefill_batch_size=max(1, batch_size // PREFILL_SHARE),
    )
    running = AnswerBatch.empty(target.model, generator.sampler)
    generator._generation_batch = running
    return generator, running


def answer(target, waiting, *, batch_size, seed, feed=lambda: True, observe=lambda tokens: None):
    """Yield (job, answer tokens, finish) in the order in which answers finish; finish is "stop" or "length".

    waiting: a deque of Jobs, emptied as they begin; the caller may add to it between answers. feed: called before jobs
    are begun; False ends the run once the answers begun are finished (dropping those would favour short answers).
    observe: called after every step with the number of tokens it generated.
    """
    begun, stops = {}, Stops(target)
    generator, running = make_generator(target, batch_size)
    with contextlib.closing(generator):
        while begun or waiting:
            if waiting and not feed():
                waiting.clear()
            fresh = [waiting.popleft() for _ in range(min(batch_size - len(begun), len(waiting)))]
            begun |= zip(insert(generator, fresh, stops, seed), fresh, strict=True)
            generated = running.live
            for uid, tokens, finish in advance(generator, batch_size):
                yield begun.pop(uid), tokens, finish
            observe(generated)


def advance(generator, batch_size):
    """One step of a generator: what finished. Raises UserError where MLX refuses a batch of this size.

    CUDA launches at most 65,535 groups along y or z, and some of MLX's kernels put rows × heads there; memory ends too.
    """
    try:
        return generator.next()[1]
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--batch-size {batch_size}: MLX refuses it ({reason}); what is written is kept, go on with a smaller one"
        ) from error


class Stops(dict):
    """mlx-lm's automaton for each set of ends, built once."""

    def __init__(self, target):
        super().__init__()
        self.own = tuple((token,) for token in sorted(target.eos_ids))

    def __missing__(self, ends):
        self[ends] = StopSequences(self.own if ends is None else ends)
        return self[ends]


def insert(generator, jobs, stops, seed):
    """Queue jobs in a generator; returns their uids."""
    if not jobs:
        return []
    return generator.insert(
        [job.tokens for job in jobs],
        [job.max_tokens for job in jobs],
        samplers=[make_draw(job, seed) for job in jobs],
        stop_sequences=[stops[job.ends] for job in jobs],
    )


def make_draw(job, seed):
    """A job's sampler."""
    return Draw(job.temperature, rng.key_number(seed, f"answer {job.id}", 0)) if job.temperature else GREEDY
