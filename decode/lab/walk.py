"""Walked tau: what a drafter would serve, measured over the target's own greedy text without decoding.

R rows, T tokens, N blocks, B block, D hidden. Every answer position is drafted from, batched; then each row is walked
from its first answer token by accepted + 1, as decoding would. Averaging over all positions instead overstates what is
served: a walk visits the hard positions more often, and loops inflate the average.
"""

import collections
import dataclasses

import mlx.core as mx
import numpy as np

from drafter import answers, rng, shared_prefix
from drafter.gated_lora import GatedLora

TEXT_PROMPT = 32  # tokens of plain text that a walk begins after (assumed)
BLOCKS_PER_PASS = 256  # anchors drafted from at once over all rows; bounds memory (assumed)


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it, as token ids; the answer holds its EOS when it finished."""

    prompt: tuple
    answer: tuple


@dataclasses.dataclass(frozen=True)
class Tau:
    """Walked tau, pooled over cycles and as the mean of per-text means, and how many of each there were."""

    pooled: float
    per_prompt: float
    cycles: int
    texts: int


def held_out_prompts(rows, count):
    """Token ids of up to `count` held-out documents' prompts, spread over the packed `corpus.Rows`.

    A prompt is what stands before a document's first supervised token; plain text lends its first 32 tokens.
    """
    prompts = []
    for tokens, loss_mask, documents in zip(rows.tokens, rows.loss_mask, rows.documents):
        for document in np.unique(documents[documents > 0]):
            own = documents == document
            before = int(np.argmax(loss_mask[own])) or TEXT_PROMPT
            prompts.append([int(token) for token in tokens[own][:before]])
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def greedy_texts(target, prompts, max_tokens, batch_size=16):
    """The target's own greedy answers to token-id prompts, cut at max_tokens; texts of one token are left out."""
    return texts_at(0.0, target, prompts, max_tokens, batch_size)


def texts_at(temperature, target, prompts, max_tokens, batch_size=16, seed=0):
    """`greedy_texts` at a temperature: samples, where it is above 0, drawn by `seed`."""
    asked = (answers.Job(str(i), None, list(ids), temperature, max_tokens) for i, ids in enumerate(prompts))
    written = answers.answer(target, collections.deque(asked), batch_size=batch_size, seed=seed)
    found = {int(job.id): Text(tuple(job.tokens), tuple(tokens)) for job, tokens, _ in written}
    return [found[i] for i in sorted(found) if len(found[i].answer) > 1]


def accepted_everywhere(target, drafter, texts, block_size):
    """For each text, how many proposals are accepted from a pending token at each answer position but the last.

    Returns a list of int arrays; entry i of one is for the pending answer token i, and is at most what remains.
    """
    T = max(len(text.prompt) + len(text.answer) for text in texts)
    tokens = np.zeros((len(texts), T), np.int32)
    documents = np.zeros((len(texts), T), np.int32)
    for row, text in enumerate(texts):
        ids = text.prompt + text.answer
        tokens[row, : len(ids)], documents[row, : len(ids)] = ids, 1
    prepare = adapter_proposals if isinstance(drafter, GatedLora) else dflash_proposals
    propose = prepare(target, drafter, tokens, documents, block_size)
    return [matched(text, proposed) for text, proposed in zip(texts, propose_everywhere(propose, tokens, texts))]


def propose_everywhere(propose, tokens, texts):
    """Proposals [len(answer)−1, K] of every text, one block for each pending answer token.

    propose: (pending tokens' positions [R,N], pass number) -> ids [R,N,K].
    """
    longest = max(len(text.answer) for text in texts) - 1
    starts = np.array([[len(text.prompt)] for text in texts])
    step = max(1, BLOCKS_PER_PASS // len(texts))
    parts = []
    for number, first in enumerate(range(0, longest, step)):
        positions = np.minimum(starts + first + np.arange(step), tokens.shape[1] - 2).astype(np.int32)
        parts.append(np.array(propose(positions, number)))
    everywhere = np.concatenate(parts, axis=1)
    return [everywhere[row, : len(text.answer) - 1] for row, text in enumerate(texts)]


def dflash_proposals(target, drafter, tokens, documents, block_size):
    """What `propose_everywhere` asks: B − 1 proposals of a full drafter."""
    forward = target.forward_packed(mx.array(tokens), mx.array(documents), drafter.config.target_layer_ids)
    context = drafter.fuse(forward.taps)
    mx.eval(context)

    def propose(positions, number):
        pending = np.take_along_axis(tokens, positions, axis=1)
        R, N = positions.shape
        rows = drafter.noise(target, mx.array(pending.reshape(R * N, 1)), block_size).reshape(R, N, block_size, -1)
        hidden = drafter.blocks(context, rows, mx.array(positions), mx.array(documents))
        return drafter.propose(target, hidden[:, :, 1:], mx.array(pending)).tokens

    return propose


def adapter_proposals(target, drafter, tokens, documents, block_size):
    """What `propose_everywhere` asks: B proposals of a gated LoRA, the first being the target's own."""
    prefix = shared_prefix.read(target, mx.array(tokens), mx.array(documents))
    mx.eval(prefix.hidden)

    def propose(positions, number):
        at = mx.array(positions)
        rows = prefix.hidden[mx.arange(len(at))[:, None], at][:, :, None]  # [R,N,1,D]
        if block_size > 1:
            noise = drafter.noise((*positions.shape, block_size - 1), rng.key(0, "walk", number))
            rows = mx.concatenate([rows, drafter.blocks(prefix, at + 1, noise)], axis=2)
        return mx.argmax(target.score(rows), axis=-1)

    return propose


def forwards(drafter):
    """Forwards of the target that a cycle takes: the verify, and a draft pass where the target itself drafts."""
    return 2 if isinstance(drafter, GatedLora) else 1


def matched(text, proposed):
    """Length of each row's run of proposals that equal the text that follows, cut where the text ends."""
    answer = np.array(text.answer)
    lengths = np.zeros(len(proposed), np.int64)
    for pending, row in enumerate(proposed):
        following = answer[pending + 1 :]
        count = min(len(row), len(following))
        misses = np.flatnonzero(row[:count] != following[:count])
        lengths[pending] = misses[0] if len(misses) else count
    return lengths


def walk(text, accepted):
    """Committed tokens of each cycle over one text: accepted + 1, and nothing past the text's end."""
    committed, pending, last = [], 0, len(text.answer) - 1
    while pending < last:
        committed.append(min(int(accepted[pending]) + 1, last - pending))
        pending += committed[-1]
    return committed


def walked_tau(target, drafter, texts, block_size):
    """Tau of a drafter walked over greedy texts at one block size. Returns Tau; all zeros where there is no text."""
    if not texts:  # a target that ends every answer at once must not end a training run
        return Tau(0.0, 0.0, 0, 0)
    accepted = accepted_everywhere(target, drafter, texts, block_size)
    walks = [walk(text, lengths) for text, lengths in zip(texts, accepted)]
    cycles = sum(map(len, walks))
    means = [sum(walked) / len(walked) for walked in walks]
    return Tau(sum(map(sum, walks)) / cycles, sum(means) / len(means), cycles, len(texts))
