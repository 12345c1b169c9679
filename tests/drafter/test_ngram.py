"""The byte n-gram baseline against dictionaries, and what any model of bytes must obey."""

import collections
import math

import pytest

from drafter import ngram
from kernels.errors import UserError

TRAINING = [b"abracadabra, abracadabra!", b"a rare cab", b"", b"dab a bad cab"]
TOLERANCE = 1e-12  # float64 sums in another order


def kneser_ney(training, order):
    """P(byte, context) of the module's formula, by dictionaries of byte strings; contexts are padded with zeros."""
    grams = collections.Counter()
    for document in training:
        padded = bytes(order) + document
        grams.update(padded[at : at + order + 1] for at in range(len(document)))
    tables = {order: grams}
    for length in range(order - 1, -1, -1):
        tables[length] = collections.Counter(gram[1:] for gram in tables[length + 1])

    def probability(byte, context):
        if context is None:
            return 1 / 256
        counts = tables[len(context)]
        shorter = probability(byte, context[1:] if context else None)
        once, twice = (sum(count == times for count in counts.values()) for times in (1, 2))
        discount = once / (once + 2 * twice)
        after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        if not after:
            return shorter
        total = sum(after.values())
        kept = max(after.get(byte, 0) - discount, 0)
        return kept / total + discount * len(after) / total * shorter

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_of_dictionaries(order):
    model, expected = ngram.fit(TRAINING, order), kneser_ney(TRAINING, order)
    text = b"a bad abracadabra\nzz cab"
    found = model.probabilities(text)
    padded = bytes(order) + text
    for at, byte in enumerate(text):
        assert abs(found[at] - expected(byte, padded[at : at + order])) <= TOLERANCE


@pytest.mark.parametrize("context", [b"", b"abra", b"zzzz", b"a"])
def test_probabilities_of_all_bytes_sum_to_one(context):
    model = ngram.fit(TRAINING, 3)
    total = sum(model.probabilities(context + bytes([byte]))[-1] for byte in range(256))
    assert abs(total - 1) <= 1e-9


def test_bits_are_pooled_over_documents_and_each_begins_anew():
    model = ngram.fit(TRAINING, 4)
    one, two = b"abra cab", b"dab"
    expected = [-math.log2(p) for document in (one, two) for p in model.probabilities(document)]
    assert abs(model.bits([one, two]) - sum(expected)) <= 1e-9
    assert model.bits([one, two]) != pytest.approx(model.bits([one + two]), abs=1e-3)


def test_text_like_the_training_text_costs_less_and_a_longer_context_helps():
    training = [b"the mill by the river, the miller by the mill. " * 9]
    held_out = [b"the river by the miller, the mill. "]
    bits = {order: ngram.fit(training, order).bits(held_out) for order in (1, 3)}
    assert bits[3] < bits[1] < 8 * len(held_out[0]) < ngram.fit(training, 3).bits([bytes(range(128, 163))])


def test_nothing_to_count_is_refused():
    with pytest.raises(UserError, match="no text to count"):
        ngram.fit([b"", b""], 2)
    for order in (0, 8):
        with pytest.raises(ValueError, match="expected 1 to 7"):
            ngram.fit(TRAINING, order)
