"""Prompt sets: the shipped ones, a file of one's own, and the digest that names what was run.

A set is JSON Lines. Each line holds `turns` (a list of user turns, of which the first is asked) or `prompt` (one
string); `question_id` and `category` are optional. Shipped sets lie in the folder `prompts` beside this module.
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
import pathlib

from kernels.errors import UserError

FOLDER = pathlib.Path(__file__).resolve().parent / "prompts"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its id and category in the set, the text asked, and how many later turns were left out."""

    id: str
    category: str
    text: str
    turns_dropped: int = 0


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts to run, with the name and SHA-256 of the whole file and how many prompts it holds; see `join`."""

    name: str
    sha256: str
    total: int
    prompts: tuple[Prompt, ...]

    def identity(self) -> dict:
        """What a result file records about the set."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "total": self.total,
            "used": [prompt.id for prompt in self.prompts],
            "turns": "first turn only" if any(prompt.turns_dropped for prompt in self.prompts) else "single turn",
        }


def names() -> list[str]:
    """The shipped sets."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def load(source: str, limit: int | None = None) -> PromptSet:
    """The set called `source`, or the JSON Lines file at that path.

    limit: how many prompts to take, spread evenly over the file: sets are sorted by category, so their first lines
    are a biased sample.

    Raises UserError for an unknown name, a missing, unreadable or empty file, and for a bad line (naming it).
    """
    path = find(source)
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); prompts are JSON Lines in UTF-8") from None
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} holds no prompts; write one JSON object a line, with `turns` or `prompt`")
    prompts = [parse(path, number, line) for number, line in rows]
    refuse_duplicates(path, prompts)
    name = path.stem if path.parent == FOLDER else str(source)
    return PromptSet(name, hashlib.sha256(data).hexdigest(), len(prompts), tuple(spread(prompts, limit)))


def load_each(sources, limit=None) -> list[PromptSet]:
    """The sets of several sources, `limit` prompts of each. Raises UserError as `load` does and for one named twice."""
    sets = [load(source, limit) for source in sources]
    if len({one.name for one in sets}) < len(sets):
        raise UserError(f"--prompts {' '.join(sources)}: a set is named twice; name each once")
    return sets


def join(sets) -> PromptSet:
    """Several sets as one, their prompts in turns, so that no set has an hour of its own; one set as it is.

    A prompt's id is `set:id` and its category its set's name.
    """
    if len(sets) == 1:
        return sets[0]
    own = [[dataclasses.replace(each, id=f"{one.name}:{each.id}", category=one.name) for each in one.prompts]
           for one in sets]  # fmt: skip
    turns = (each for turn in itertools.zip_longest(*own) for each in turn if each)
    digest = hashlib.sha256("".join(one.sha256 for one in sets).encode()).hexdigest()
    return PromptSet(" + ".join(one.name for one in sets), digest, sum(one.total for one in sets), tuple(turns))


def find(source):
    """The file of a shipped set or of a path; a path wins only where no shipped set has that name."""
    if source in names():
        return FOLDER / f"{source}.jsonl"
    path = pathlib.Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"--prompts {source} is a folder; name a JSON Lines file in it")
    near = difflib.get_close_matches(source, names(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no prompt set or file called {source}; {hint}shipped sets: {', '.join(names())}")


def parse(path, number, line):
    """One line as a Prompt."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number} is not JSON ({error.msg} at column {error.colno}); mend that line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number} is not JSON that can be read ({error}); mend that line") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number} holds a {type(row).__name__}; expected an object with `turns` or `prompt`")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if turns is None:
        found = ", ".join(row) or "none"
        raise UserError(f"{path}:{number} has neither `turns` nor `prompt` (keys found: {found}); add one of them")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        key = "turns" if "turns" in row else "prompt"
        expected = "a list of non-empty strings" if key == "turns" else "a non-empty string"
        raise UserError(f"{path}:{number} `{key}` is {json.dumps(row[key])[:60]}; expected {expected}")
    return Prompt(str(row.get("question_id", number)), str(row.get("category", "none")), turns[0], len(turns) - 1)


def refuse_duplicates(path, prompts):
    """Results are keyed by prompt id, so an id may stand only once."""
    seen = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"{path} holds question_id {prompt.id} twice; give every prompt its own")
        seen.add(prompt.id)


def spread(items, limit):
    """`limit` items from the middles of equal stretches of a list; all of them where limit is None or not less."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[int((index + 0.5) * len(items) / limit)] for index in range(limit)]
