"""Conversations of one or more turns: what is asked next, what has become of every turn, and the rows that say so.

A turn is known by its place: (conversation, turn), the first turn being 1. It ends in one row: an answer, or the
reason why there is none.
"""

import collections
import dataclasses
import hashlib

from drafter import questions
from drafter.answers import Job
from drafter.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides a run's rows beside its target and prompts; a run is continued with the same recipe only.

    temperatures   of the answers, shared out evenly over the conversations by `seed`; 0 is greedy
    max_tokens     longest answer
    turns          of a conversation; from the second on the target writes the user's, too
    template_options  further keywords of the chat template
    asking         how user turns are written
    """

    seed: int = 0
    temperatures: tuple = (0.0,)
    max_tokens: int = 256
    turns: int = 1
    template_options: dict = dataclasses.field(default_factory=dict)
    asking: questions.Asking = dataclasses.field(default_factory=questions.Asking)


class Author:
    """Makes the jobs of conversations and reads what came of them."""

    def __init__(self, target, recipe, held):
        self.target, self.recipe, self.held = target, recipe, held

    def answer_job(self, prompt):
        """The Job that answers a prompt, at its conversation's temperature."""
        choice = hashlib.sha256(f"{self.recipe.seed}:temperature:{prompt.conversation}".encode()).hexdigest()
        temperature = self.recipe.temperatures[int(choice, 16) % len(self.recipe.temperatures)]
        tokens = list(self.target.encode(list(prompt.messages), options=self.recipe.template_options))
        return Job(prompt.id, prompt, tokens, temperature, self.recipe.max_tokens)

    def fault(self, job):
        """Why a prompt is not to be answered, or None."""
        if not job.subject.text.strip():
            return "no text"
        if self.held.holds(job.subject.text):
            return "evaluation prompt"
        return self.length_fault(job)

    def length_fault(self, job):
        """Why a job has no room in the target's context, or None."""
        longest = self.target.max_length
        return "longer than the context" if longest and len(job.tokens) + job.max_tokens > longest else None

    def read(self, job, tokens, finish):
        """(row, job) after a job was done: its row, if that was the turn's end, and the job that follows, if any."""
        prompt = job.subject
        if prompt.unwritten:
            return self.read_user(job, tokens, finish)
        if finish == "stop" and len(tokens) == 1:
            return ended(prompt, failed="empty answer"), None
        return make_row(self.target, job, tokens, finish), None

    def read_user(self, job, tokens, finish):
        """`read` of a user's turn: the job that answers it, or the row that says why it is not answered."""
        prompt, asking = job.subject, self.recipe.asking
        opened = self.open_turn(prompt)
        text, fault = questions.read_question(self.target, opened, tokens, finish, asking)
        if not fault:
            said = dataclasses.replace(prompt, messages=(*prompt.messages, {"role": "user", "content": text}))
            job = self.answer_job(said)
            fault = self.fault(job)
        return (ended(prompt, skipped=fault), None) if fault else (None, job)

    def open_turn(self, prompt):
        """The Opening of the user's turn after a prompt's messages."""
        return questions.opening(self.target, list(prompt.messages), self.recipe.template_options)

    def goes_on(self, row):
        """Whether a user's turn follows a row; none follows an answer that was cut."""
        return row.get("finish") == "stop" and row["turn"] < self.recipe.turns

    def follow(self, row):
        """(row, job) after a row that goes on: the job that writes the user's turn, or why there is no room for it."""
        messages = (*row["messages"], {"role": "assistant", "content": row["answer"]})
        prompt = Prompt(messages, row["source"], row["turn"] + 1, row["conversation"])
        name, opened = f"{prompt.conversation} user {prompt.turn}", self.open_turn(prompt)
        job = questions.question_job(self.target, name, prompt, opened, self.recipe.asking, self.recipe.seed)
        fault = self.length_fault(job)
        return (ended(prompt, skipped=fault), None) if fault else (None, job)


def ended(prompt, **reason):
    """The row of a turn without an answer: `skipped` or `failed`, and why."""
    place = {"conversation": prompt.conversation, "turn": prompt.turn}
    return {"id": f"{prompt.conversation}-{prompt.turn}"} | place | reason


def make_row(target, job, tokens, finish):
    """The row of an answer."""
    prompt = job.subject
    return {
        "id": job.id,
        "conversation": prompt.conversation,
        "turn": prompt.turn,
        "source": prompt.source,
        "messages": list(prompt.messages),
        "answer": target.tokenizer.decode(tokens[:-1] if finish == "stop" else tokens),
        "prompt_tokens": job.tokens,
        "answer_tokens": tokens,
        "finish": finish,
        "temperature": job.temperature,
    }


class Ledger:
    """What has become of every turn, from its rows in whatever order they come; `open` holds rows that go on."""

    def __init__(self, author, rows=()):
        self.author = author
        self.known, self.open = set(), {}
        self.written = self.answer_tokens = 0
        self.skipped, self.failed = collections.Counter(), collections.Counter()
        for row in rows:
            self.add(row)

    def add(self, row):
        """Count a row."""
        conversation, turn = place = row["conversation"], row["turn"]
        self.known.add(place)
        self.open.pop((conversation, turn - 1), None)
        if "answer_tokens" in row:
            self.written += 1
            self.answer_tokens += len(row["answer_tokens"])
            if self.author.goes_on(row) and (conversation, turn + 1) not in self.known:
                self.open[place] = row
        else:
            self.skipped.update([row["skipped"]] if "skipped" in row else [])
            self.failed.update([row["failed"]] if "failed" in row else [])

    def first_turns(self):
        """The conversations of which the first turn has ended."""
        return {conversation for conversation, turn in self.known if turn == 1}
