"""How far two targets agree on the same text: what no drafter made for the one could avoid losing on the other.

T tokens of a text, n answer positions, V vocabulary. Teacher-forced: both read the prompt and the first one's own
answer, and are asked at every answer position what comes next. A drafter that foretold the first target perfectly
would be accepted by the second where their argmaxes agree, and nowhere else.
"""

import mlx.core as mx

from drafter.target import Target
from kernels.errors import UserError

ROWS = 128  # positions scored at a time; bounds memory at ROWS × V of each target


def refuse_tokenizer(stock: Target, other: Target):
    """Raise UserError where an id does not mean the same text to both."""
    if stock.tokenizer_sha256 != other.tokenizer_sha256:
        raise UserError(
            f"targets {stock.source} and {other.source} have different tokenizers, so neither drafter nor text carries "
            "over; train a drafter for each"
        )


def compare(stock, other, prompt, answer):
    """Agreement on one text: {"tokens": n, "agree": positions with the same argmax, "kl": Σ KL(stock ‖ other), nats}.

    prompt, answer: token ids; the answer's tokens are what is asked for. KL is Σ_v p(v)·(log p(v) − log q(v)), in
    float32, of the two distributions at temperature 1.
    """
    ids, first = mx.array([[*prompt, *answer]]), len(prompt) - 1
    hidden = [target.forward(ids, target.make_cache()).hidden[0, first:-1] for target in (stock, other)]
    agree, divergence = 0, 0.0
    for start in range(0, len(answer), ROWS):
        one, two = (scored(target, rows[start : start + ROWS]) for target, rows in zip((stock, other), hidden))
        agree += mx.sum(mx.argmax(one, -1) == mx.argmax(two, -1)).item()
        divergence += mx.sum(mx.exp(one) * (one - two)).item()
    return {"tokens": len(answer), "agree": agree, "kl": divergence}


def scored(target, hidden):
    """Log-probabilities [n,V] in float32 of hidden rows [n,D]."""
    logits = target.score(hidden).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def on_answers(stock, other, prompts, answers):
    """`compare` over the prompts whose answer has a token: [{"prompt": id, …}]. answers: {prompt id: token ids}."""
    pairs = [(prompt, answers[prompt.id]) for prompt in prompts if answers[prompt.id]]
    return [{"prompt": prompt.id, **compare(stock, other, prompt.tokens, answer)} for prompt, answer in pairs]
