"""What a decoder must not change: texts by any proposals against `plain`, and `plain` against mlx-lm's own."""

import mlx_lm

from decode.cycle import decode
from decode.proposers import PromptLookup, Scripted
from decode.schedule import Fixed
from drafter import hybrid


def written(target, tokens, proposer, block_size, max_tokens):
    """Ids that decoding emits."""
    schedule = Fixed(block_size) if proposer else None
    steps = decode(target, tokens, proposer, schedule, max_tokens=max_tokens, eos_ids=target.eos_ids)
    return [token for step in steps for token in step.tokens]


def right_until(text, slot):
    """Right in the first `slot` slots of each block, wrong after."""

    def script(position, count):
        ahead = (text + [0] * count)[position : position + count]
        return [token if index < slot else token + 1 for index, token in enumerate(ahead)]

    return Scripted(script)


def check(target, tokens, blocks, slots, max_tokens):
    """Plain equals mlx-lm, and every proposer at every block size equals plain, for one prompt."""
    plain = written(target, tokens, None, None, max_tokens)
    with hybrid.detached(target.model):
        theirs = mlx_lm.stream_generate(target.model, target.tokenizer, tokens, max_tokens=max_tokens)
        assert plain == [response.token for response in theirs]
    assert len(set(plain)) > 4
    for block_size in blocks:
        assert written(target, tokens, PromptLookup(3), block_size, max_tokens) == plain
        for slot in slots(block_size):
            assert written(target, tokens, right_until(tokens + plain, slot), block_size, max_tokens) == plain


def few(block_size):
    """Slots at which proposals turn wrong: at once, half way, at the last."""
    return sorted({0, block_size // 2, block_size - 1})
