"""Texts that share words: near duplicates among prompts, and overlap with evaluation prompts.

Words are runs of letters and digits, case ignored; of scripts that put no spaces between words every character is one.
A text of fewer than n words has one n-gram, the whole of it.
"""

import collections
import fractions
import math
import re

# Assumed. Measured: no false alarm among 17,000 prompts of configs/data/general.yaml, the 3,300 of the shipped answers
# and 3,781 passages of code, the largest share being 0.38; 340 of 387 evaluation prompts are still found when 3 % of
# their words are dropped.
HELD_GRAM, HELD_SHARE = 8, 0.5
# Assumed: prompts are a dozen words long, of which a changed one spoils three trigrams.
NEAR_GRAM, NEAR_SHARE = 3, fractions.Fraction(3, 5)
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f]|[^\W_]+")  # kana, Han, Thai, Lao, Burmese


def words(text):
    """The words of a text, in order."""
    return WORD.findall(text.casefold())


def grams(text, n):
    """The set of n-grams of a text, as tuples of words; empty for a text without words."""
    found = words(text)
    return {tuple(found[start : start + n]) for start in range(max(1, len(found) - n + 1))} if found else set()


class HeldOut:
    """Evaluation prompts, for asking whether another text is one of them or shares much of one."""

    def __init__(self, texts):
        self.plain = {normalise(text) for text in texts}
        self.sizes, self.owners = [], collections.defaultdict(list)
        for number, found in enumerate(grams(text, HELD_GRAM) for text in texts):
            self.sizes.append(len(found))
            for gram in found:
                self.owners[gram].append(number)

    def holds(self, text):
        """Whether `text` is a held-out one, or has HELD_SHARE of the shorter one's n-grams in common with one."""
        if normalise(text) in self.plain:
            return True
        found = grams(text, HELD_GRAM)
        shared = collections.Counter(number for gram in found for number in self.owners.get(gram, ()))
        return any(count >= HELD_SHARE * min(len(found), self.sizes[number]) for number, count in shared.items())


def normalise(text):
    """Text as it is compared: case and white space do not count."""
    return " ".join(text.casefold().split())


def first_of_each(texts):
    """Which texts to keep so that no two are near duplicates: a bool for each, the earlier of two kept.

    Near duplicates have |A ∩ B| ≥ NEAR_SHARE·|A ∪ B| of their NEAR_GRAM-grams A, B. Exact: two sets that much alike
    share one of the rarest |A| − ⌈NEAR_SHARE·|A|⌉ + 1 grams of each, by any fixed order (prefix filtering), so only
    those are looked up. Whether a text is kept depends on earlier texts alone.
    """
    sets = [grams(text, NEAR_GRAM) for text in texts]
    frequency = collections.Counter(gram for found in sets for gram in found)
    kept, index = [], collections.defaultdict(list)
    for number, found in enumerate(sets):
        rare = sorted(found, key=lambda gram: (frequency[gram], gram))[: prefix(len(found))]
        rivals = {rival for gram in rare for rival in index[gram]}
        kept.append(not any(alike(found, sets[rival]) for rival in rivals))
        if kept[-1]:
            for gram in rare:
                index[gram].append(number)
    return kept


def prefix(size):
    """How many of the rarest of `size` grams must be looked up."""
    return size - math.ceil(NEAR_SHARE * size) + 1 if size else 0


def alike(one, other):
    """Whether two sets are near duplicates."""
    return len(one & other) >= NEAR_SHARE * len(one | other)
