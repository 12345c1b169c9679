"""Many prompts answered at once by the target, with mlx-lm's continuous batching.

R rows of the running batch, V vocabulary.
"""

import collections
import contextlib
import dataclasses

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from drafter import rng
from drafter.prompts import Prompt

IDLE_SHARE = 8  # R/8 rows may idle before the batch is packed anew (assumed: half of that is lost, 6 % of the work)
PREFILL_SHARE = 4  # prompts are prefilled R/4 at a time (assumed; bounds the memory of the attention scores)


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt ready to be answered: its token ids and its temperature."""

    id: str
    prompt: Prompt
    tokens: list
    temperature: float


class Temperature:
    """A sampler that a batch can apply to all its rows at once; temperature 0 is greedy.

    Sampling is in float32: bfloat16 noise has too few values to draw from 49,000 tokens by.
    """

    def __init__(self, value, keys):
        self.value = value
        self.keys = keys

    def __call__(self, logits):
        """Token ids [R] from logits or log-probabilities [R, V]."""
        return draw_tokens(logits, None if self.value == 0 else mx.array([[self.value]] * len(logits)), self.keys)


def draw_tokens(logits, temperatures, keys):
    """Token ids [R] from logits [R, V]; temperatures [R, 1], 0 for greedy rows, or None when every row is greedy."""
    greedy = mx.argmax(logits, axis=-1)
    if temperatures is None:
        return greedy
    scaled = logits.astype(mx.float32) / mx.maximum(temperatures, 1e-6)
    return mx.where(temperatures[:, 0] > 0, mx.random.categorical(scaled, key=next(keys)), greedy)


class AnswerBatch(GenerationBatch):
    """mlx-lm's generation batch without the work that synthesis has no use for.

    Upstream splits every step's log-probabilities into R arrays (measured on a CPU: 20 ms a step at R = 1024), samples
    row by row when samplers differ, and copies every cache whenever one row finishes.
    Here a step takes the argmax of the raw logits or samples all rows in one call, and finished rows idle until R/8
    of them can be dropped together. `next` reports finished rows only: (uid, answer tokens, finish).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answers = [[] for _ in self.uids]
        self.finished = [False] * len(self.uids)
        self.eos_ids = frozenset()
        self.temperatures = None

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
        """Drop what upstream keeps for its responses; renew the rows' temperatures [R, 1]."""
        self._current_logprobs, self._next_logprobs = [], [None] * len(self.uids)
        values = [sampler.value for sampler in self.samplers]
        self.temperatures = mx.array(values)[:, None] if any(values) else None

    def _step(self):
        """Start the next step and return the tokens of this one."""
        self._current_tokens = self._next_tokens
        logits = self.model(self._current_tokens[:, None], cache=self.prompt_cache)[:, -1]
        self._next_tokens = draw_tokens(logits, self.temperatures, self.fallback_sampler.keys)
        mx.async_eval(self._next_tokens)
        return self._current_tokens.tolist()

    def next(self):
        done = []
        for row, token in enumerate(self._step() if self.uids else []):
            if self.finished[row]:
                continue
            self.answers[row].append(token)
            stopped = token in self.eos_ids
            if stopped or len(self.answers[row]) >= self.max_tokens[row]:
                self.finished[row] = True
                done.append((self.uids[row], self.answers[row], "stop" if stopped else "length"))
        idle = len(self.uids) - self.live
        if idle and idle * IDLE_SHARE >= len(self.uids):
            self.filter([row for row, finished in enumerate(self.finished) if not finished])
        return done


def make_generator(target, batch_size, keys):
    """mlx-lm's continuous batching over `batch_size` rows, with an AnswerBatch as its running batch; returns both."""
    generator = BatchGenerator(
        target.model,
        sampler=Temperature(0.0, keys),
        completion_batch_size=batch_size,
        prefill_batch_size=max(1, batch_size // PREFILL_SHARE),
    )
    running = AnswerBatch.empty(target.model, generator.sampler)
    running.eos_ids = frozenset(target.eos_ids)
    generator._generation_batch = running
    return generator, running


def random_keys(seed, stream):
    """An endless stream of sampling keys."""
    step = 0
    while True:
        yield rng.key(seed, stream, step)
        step += 1


def answer(target, jobs, *, batch_size, max_tokens, keys, feed=lambda: True, observe=lambda tokens: None):
    """Yield (job, answer tokens, finish) in the order in which answers finish.

    keys: sampling keys, one used a step. feed: called before prompts are added; False ends the run once the answers
    begun are finished (dropping those would favour short answers). observe: called after every step with the number
    of tokens it generated.
    """
    waiting, begun = collections.deque(jobs), {}
    samplers = {value: Temperature(value, keys) for value in {job.temperature for job in jobs}}
    generator, running = make_generator(target, batch_size, keys)
    with contextlib.closing(generator):
        while begun or waiting:
            if waiting and not feed():
                waiting.clear()
            fresh = [waiting.popleft() for _ in range(min(batch_size - len(begun), len(waiting)))]
            begun |= zip(insert(generator, fresh, samplers, max_tokens), fresh, strict=True)
            generated = running.live
            for uid, tokens, finish in generator.next()[1]:
                yield begun.pop(uid), tokens, finish
            observe(generated)


def insert(generator, jobs, samplers, max_tokens):
    """Queue jobs in a generator; returns their uids."""
    if not jobs:
        return []
    tokens = [job.tokens for job in jobs]
    return generator.insert(tokens, [max_tokens] * len(jobs), samplers=[samplers[job.temperature] for job in jobs])
