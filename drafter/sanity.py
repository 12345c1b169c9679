"""Whether a text that a model made up can stand as a prompt: length, characters, script, no loops.

No language is told from another here; scripts are, by the names that Unicode gives its characters.
"""

import collections
import functools
import re
import unicodedata

from drafter.overlap import words

FEWEST_WORDS = 3  # assumed
LETTERS = 0.5  # least share of letters and digits among visible characters: assumed; code reaches 0.6
SCRIPT = 0.7  # least share of one script among words: assumed; leaves room for formulas and foreign names
LOOP_GRAM, LOOP_SHARE = 8, 0.05  # looping text, by the rule that evaluation flags it with
LINE_SPACE = "\n\r\t"
EAST_ASIAN = {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"}  # mixed in one text as a rule
REFUSED = {"Cc", "Cs", "Co", "Cn"}  # control characters, halves of characters, private and unassigned ones


def fault(text, script=None):
    """Why a text is no prompt, in words, or None; script: the only one wanted, such as "latin"."""
    if len(words(text)) < FEWEST_WORDS:
        return "too short"
    if any(strange(character) for character in text):
        return "strange characters"
    if share(text, str.isspace, str.isalnum) < LETTERS:
        return "few letters"
    found, part = main_script(text)
    if part < SCRIPT:
        return "mixed scripts"
    if script and found != script.upper():
        return "another script"
    return "repeats itself" if loop_share(text) >= LOOP_SHARE else None


@functools.lru_cache(maxsize=1 << 16)
def strange(character):
    """Whether no text holds this character: U+FFFD stands for bytes that were none."""
    return character == "\ufffd" or unicodedata.category(character) in REFUSED and character not in LINE_SPACE


def share(text, left_out, counted):
    """The share of characters that are counted, among those not left out."""
    considered = [character for character in text if not left_out(character)]
    return sum(map(counted, considered)) / max(1, len(considered))


def main_script(text):
    """(script, share): that of most words of a text, East Asian ones as one; (None, 1) without letters."""
    found = collections.Counter(script_of(word[0]) for word in words(text) if word[0].isalpha())
    if not found:
        return None, 1.0
    script, count = found.most_common(1)[0]
    return script, count / found.total()


@functools.lru_cache(maxsize=1 << 16)
def script_of(letter):
    """The first word of a letter's Unicode name, which is its script."""
    script = re.split("[ -]", unicodedata.name(letter, "UNKNOWN"))[0]
    return "CJK" if script in EAST_ASIAN else script


def loop_share(text):
    """The share of a text's LOOP_GRAM-grams of words that it has said before."""
    found = words(text)
    grams = [tuple(found[start : start + LOOP_GRAM]) for start in range(len(found) - LOOP_GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
