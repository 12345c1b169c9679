"""Prompts for the target to answer: read from files or datasets, or drawn from templates.

A template file is YAML:
    slots:     {name: [text]}                                  fillings that every family may use
    families:  {name: {weight, phrasings: [text with {slot}], slots}}   one kind of request and its own fillings
"""

import dataclasses
import hashlib
import json
import pathlib
import re

import numpy as np
import yaml

from drafter import rng
from drafter.documents import decode_text, load_table, records
from kernels.errors import UserError

HUB = "hf:"  # begins the name of a dataset
COLUMNS = ("prompt", "question", "instruction", "turns", "messages", "conversation", "text")  # in the order looked for


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation to be answered: `messages` end in a user turn, `source` names where they came from.

    Of a conversation in several turns, `turn` counts this one and `first` is the id of the first. Where the messages
    end in an answer, it is the user's turn, which is yet to be written.
    """

    messages: tuple
    source: str
    turn: int = 1
    first: str | None = None

    @property
    def id(self):
        """A digest of the messages: the same prompt has the same id in every run."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def conversation(self):
        """The id of the conversation: that of its first turn."""
        return self.first or self.id

    @property
    def text(self):
        """The last message, which is the user's once it is written."""
        return self.messages[-1]["content"]

    @property
    def unwritten(self):
        """Whether the user's turn is yet to be written."""
        return self.messages[-1]["role"] != "user"


def read_prompts(path, *, system=None, seed=0, count=None):
    """The prompts of one file: JSONL (`turns`, `prompt` or `question`; plain or .gz), .txt (one a line) or .yaml.

    Only the first turn of `turns` is used, since the later ones answer replies that are not given. A .yaml file holds
    templates, of which `count` prompts are drawn by `seed` (see `expand`).
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: prompt file not found; give a .jsonl, .txt or .yaml file")
    if path.suffix in (".yaml", ".yml"):
        texts = expand(read_templates(path), seed, count)
    elif path.suffix == ".txt":
        texts = [line.strip() for line in decode_text(path).splitlines() if line.strip()]
    else:
        texts = [turns(path, number, record)[0] for number, record in records(path)]
    if not texts:
        raise UserError(f"{path}: no prompts found; expected at least one")
    return [make_prompt(text, path.name.split(".")[0], system) for text in texts]


def make_prompt(text, source, system=None):
    """The Prompt of a user's text, behind a system turn if there is one."""
    return Prompt((*system_turn(system), {"role": "user", "content": text}), source)


def system_turn(system):
    """The messages before a first user turn."""
    return [{"role": "system", "content": system}] if system else []


def read_dataset(name, *, system=None):
    """The prompts of a dataset named hf:NAME[:SPLIT[:COLUMN[:SUBSET]]]: (prompts, SHA-256 of the column).

    NAME is whatever `datasets.load_dataset` takes; SPLIT may be a slice ("train[:1000]") and is "train" when left out;
    COLUMN holds text, a list of turns, or a conversation as a list of {"role", "content"}, and is the first of COLUMNS
    that the dataset has when left out. Of several turns the first of the user is asked. A row without text becomes a
    prompt without text, for the caller to skip and count.
    """
    parts = re.split(r":(?![^\[]*\])", name.removeprefix(HUB))  # the colon of a slice parts nothing
    if not parts[0] or len(parts) > 4:
        raise UserError(f"prompts {name}: expected {HUB}NAME[:SPLIT[:COLUMN[:SUBSET]]]")
    path, split, column, subset = (part or None for part in (*parts, *[None] * (4 - len(parts))))
    table = load_table(path, split or "train", subset)
    column = column or next((each for each in COLUMNS if each in table.column_names), None)
    if column not in table.column_names:
        found = ", ".join(table.column_names)
        raise UserError(f"prompts {name}: no column of prompts (found {found}); name one as {HUB}NAME:SPLIT:COLUMN")
    values, digest = table[column], hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
    source = path.rstrip("/").split("/")[-1]
    return [make_prompt(asked(value), source, system) for value in values], digest.hexdigest()


def asked(value):
    """The first text that a user says in a dataset's value, or an empty one."""
    if isinstance(value, list):
        users = (turn.get("content") if isinstance(turn, dict) else turn for turn in value if speaks(turn))
        value = next(users, None)
    return value.strip() if isinstance(value, str) else ""


def speaks(turn):
    """Whether a turn of a conversation is the user's; a turn that names no role is."""
    return not isinstance(turn, dict) or turn.get("role") == "user"


def turns(path, number, record):
    """The user turns of one JSONL record."""
    found = record.get("turns") or [record.get("prompt") or record.get("question")]
    if not isinstance(found, list) or not all(isinstance(turn, str) and turn.strip() for turn in found):
        raise UserError(f"{path} line {number}: no prompt found; expected `turns`, `prompt` or `question` with text")
    return found


def read_turns(path):
    """Every user turn of a JSONL prompt file: what an evaluation set holds out."""
    return [turn for number, record in records(path) for turn in turns(path, number, record)]


def read_templates(path):
    """The decoded YAML of a template file."""
    try:
        content = yaml.safe_load(decode_text(pathlib.Path(path)))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or not isinstance(content.get("families"), dict):
        raise UserError(f"{path}: found no `families`; expected families of `phrasings` and shared `slots`")
    return content


def expand(templates, seed, count):
    """`count` different prompts drawn from templates, the same for the same seed.

    templates: {"slots": {name: [text]}, "families": {name: {"weight", "phrasings": [text with {slot}], "slots"}}};
    a family's own slots come before the shared ones. Families take turns by weight, phrasings and fillings are drawn
    evenly. Raises UserError when the templates cannot make that many different prompts.
    """
    if count is None or count < 1:
        raise UserError(f"prompts from templates: found count={count}, expected at least 1; give --count")
    draw = rng.numpy_rng(seed, "prompts", 0)
    families = list(templates["families"].values())
    weights = np.array([family.get("weight", 1) for family in families], dtype=np.float64)
    chosen, tries = {}, 0  # a dict keeps the order drawn and refuses a second copy
    while len(chosen) < count:
        tries += 1
        if tries > 50 * count:
            raise UserError(f"templates: found {len(chosen)} different prompts, expected {count}; lower --count")
        family = families[draw.choice(len(families), p=weights / weights.sum())]
        chosen[fill(family, templates.get("slots", {}), draw)] = None
    return list(chosen)


def fill(family, shared, draw):
    """One phrasing of a family with its slots filled."""
    slots = shared | family.get("slots", {})
    text = family["phrasings"][draw.integers(len(family["phrasings"]))]
    for name, values in slots.items():
        if "{" + name + "}" in text:
            text = text.replace("{" + name + "}", str(values[draw.integers(len(values))]).strip())
    return text.strip()


def sample(prompts, limit, seed):
    """At most `limit` prompts in an order drawn by `seed`; a larger limit only adds to a smaller one's."""
    shuffled = sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest())
    return shuffled[:limit]
