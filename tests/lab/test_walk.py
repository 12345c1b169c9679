"""Walked tau against a loop written by hand, and against what decoding commits on the same prompts.

K proposals, B block size.
"""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode import cycle, proposers, schedule
from decode.lab import walk
from drafter import config as configuration
from drafter import corpus, dflash, objective, trainer
from drafter import target as targets
from drafter.documents import Document

B, CAP = 5, 18


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.getbasetemp())), dtype="float32")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Its window of 11 is shorter than the texts below."""
    return targets.load(str(tiny.folder("gemma3_text", tmp_path_factory.getbasetemp())), dtype="float32")


@pytest.fixture(scope="module")
def prompts():
    """Five prompts of different lengths."""
    generator = np.random.default_rng(3)
    return [generator.integers(5, tiny.VOCABULARY, length).tolist() for length in (3, 17, 9, 5, 13)]


def untrained(target, **options):
    settings = configuration.DrafterConfig(num_hidden_layers=2, num_taps=2, block_size=B, **options)
    return dflash.initialise(dflash.DFlash(dflash.config_for(target, settings)), target, 0)


def fitted(target, texts, **options):
    """A drafter that has learnt the very texts it is walked over, so that its proposals are often right."""
    drafter = untrained(target, **options)
    documents = []
    for number, text in enumerate(texts, 1):
        ids = np.array(text.prompt + text.answer, np.int32)
        documents.append((number, Document(str(number), ids, np.arange(len(ids)) >= len(text.prompt))))
    rows = corpus.pack(documents, "train", 36, 0, ())
    feed = objective.Feed(rows, rows_per_step=len(rows), block_size=B, per_row=9, seed=1)
    goal = objective.Objective(target, "cross_entropy", B, rows_per_chunk=64)
    loop = trainer.Trainer(drafter, goal, configuration.OptimizerConfig(learning_rate=1e-2), 40, "float32")
    for step in range(40):
        loop.step(step, feed(step))
    return drafter


def greedy(target, prompt, cap, eos=()):
    """The target's greedy answer, the whole text run anew for each token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < cap:
        ids.append(mx.argmax(target.model(mx.array([ids]))[0, -1]).item())
        if ids[-1] in eos:
            break
    return tuple(ids[len(prompt) :])


def decoded(target, drafter, prompt, cap, eos=frozenset(), block_size=B):
    """(committed tokens of each cycle, all emitted ids) of a real decode."""
    proposer = proposers.DFlashProposer(target, drafter, block_size)
    steps = list(cycle.decode(target, list(prompt), proposer, schedule.Fixed(block_size), max_tokens=cap, eos_ids=eos))
    return [step.cycle.committed for step in steps[1:]], [token for step in steps for token in step.tokens]


def walked(target, drafter, texts, block_size=B):
    accepted = walk.accepted_everywhere(target, drafter, texts, block_size)
    return [walk.walk(text, lengths) for text, lengths in zip(texts, accepted, strict=True)]


def assert_walks_as_decoded(target, drafter, texts, cap, eos=frozenset(), block_size=B):
    """Each text's walk commits what decoding commits, cycle by cycle; returns all counts."""
    counts = []
    for text, found in zip(texts, walked(target, drafter, texts, block_size), strict=True):
        expected, emitted = decoded(target, drafter, text.prompt, cap, eos, block_size)
        assert tuple(emitted) == text.answer
        assert found == expected
        counts += found
    return counts


# By hand.


def test_a_walk_advances_by_accepted_and_one_to_the_texts_end():
    text = walk.Text((9, 9), tuple(range(10)))
    accepted = np.array([3, 9, 9, 9, 0, 2, 9, 9, 1])
    assert walk.walk(text, accepted) == [4, 1, 3, 1]  # pending 0, 4, 5, 8
    assert walk.walk(text, np.zeros(9, int)) == [1] * 9
    assert walk.walk(text, np.full(9, 7)) == [8, 1]
    assert walk.walk(walk.Text((1,), (4, 5)), np.array([1])) == [1]


def test_matches_are_counted_up_to_the_first_miss_or_the_texts_end():
    text = walk.Text((0,), (5, 6, 7, 8, 9))
    proposed = np.array([[6, 7, 8], [7, 0, 9], [0, 9, 9], [9, 0, 0]])
    assert walk.matched(text, proposed).tolist() == [3, 1, 0, 1]


def test_matches_and_walks_are_a_loop_over_random_proposals():
    generator = np.random.default_rng(6)
    for length in (2, 3, 8, 21):
        answer = tuple(generator.integers(0, 2, length).tolist())
        proposed = generator.integers(0, 2, (length - 1, 4))
        committed, at = [], 0
        while at < length - 1:
            run = 0
            while run < 4 and at + 1 + run < length and proposed[at][run] == answer[at + 1 + run]:
                run += 1
            committed.append(min(run + 1, length - 1 - at))
            at += committed[-1]
        text = walk.Text((1,), answer)
        assert walk.walk(text, walk.matched(text, proposed)) == committed


def test_tau_is_pooled_over_cycles_and_averaged_over_texts(monkeypatch):
    texts = [walk.Text((1,), tuple(range(7))), walk.Text((1,), tuple(range(3)))]
    lengths = [np.array([2, 0, 0, 2, 0, 0]), np.array([0, 0])]
    monkeypatch.setattr(walk, "accepted_everywhere", lambda *_: lengths)
    tau = walk.walked_tau(None, None, texts, B)
    assert (tau.pooled, tau.per_prompt, tau.cycles, tau.texts) == (8 / 4, (6 / 2 + 2 / 2) / 2, 4, 2)


# Against decoding.


@pytest.fixture(scope="module")
def texts(llama, prompts):
    return walk.greedy_texts(llama, prompts, CAP)


@pytest.fixture(scope="module")
def trained(llama, texts):
    """A drafter of full layers that knows the texts by heart, more or less."""
    return fitted(llama, texts)


def test_texts_are_the_targets_greedy_answers(llama, prompts, texts):
    assert [text.prompt for text in texts] == [tuple(prompt) for prompt in prompts]
    assert [text.answer for text in texts] == [greedy(llama, prompt, CAP) for prompt in prompts]


def test_an_untrained_drafter_walks_as_it_decodes(llama, texts):
    assert_walks_as_decoded(llama, untrained(llama), texts[:3], CAP)


def test_a_trained_drafter_walks_as_it_decodes(llama, texts, trained):
    counts = assert_walks_as_decoded(llama, trained, texts, CAP)
    assert len(set(counts)) >= 4  # blocks of many lengths, whole ones among them
    assert max(counts) == B


def test_a_drafter_with_heads_walks_as_it_decodes_and_knows_what_it_knows(llama, texts):
    drafter = fitted(llama, texts, markov_rank=8, confidence_head=True)
    counts = assert_walks_as_decoded(llama, drafter, texts, CAP)
    assert max(counts) == B
    offered = [offers(llama, drafter, text) for text in texts]
    sure, right = (np.concatenate(part) for part in zip(*offered))
    assert sure.shape == right.shape
    assert (~right).sum() >= 3
    assert sure[right].mean() > sure[~right].mean() + 0.05


def offers(target, drafter, text):
    """(confidence, whether accepted) of every proposal of a decode that is accepted or the first that is not."""
    proposer, sure, right = proposers.DFlashProposer(target, drafter), [], []
    propose = proposer.propose

    def noting(pending, count):
        proposal = propose(pending, count)
        sure.append(np.array(proposal.confidence))
        assert proposal.confidence.shape == (count,)
        return proposal

    proposer.propose = noting
    steps = cycle.decode(target, list(text.prompt), proposer, schedule.Fixed(B), max_tokens=CAP)
    cycles = [step.cycle for step in steps if step.cycle and step.cycle.proposed]
    for number, one in enumerate(cycles):
        judged = min(one.accepted + 1, one.proposed)
        sure[number] = sure[number][:judged]
        right.append(np.arange(judged) < one.accepted)
    return np.concatenate(sure), np.concatenate(right)


@pytest.mark.parametrize("is_causal", [None, False])
def test_a_drafter_with_a_window_walks_as_it_decodes(llama, texts, is_causal):
    layers = {"layer_types": [dflash.SLIDING, dflash.FULL], "sliding_window": 6, "is_causal": is_causal}
    counts = assert_walks_as_decoded(llama, fitted(llama, texts, **layers), texts, CAP)
    assert max(counts) == B


def test_a_smaller_block_walks_as_it_decodes(llama, texts, trained):
    assert max(assert_walks_as_decoded(llama, trained, texts, CAP, block_size=3)) == 3


def test_a_target_with_windows_and_a_scaled_embedding_walks_as_it_decodes(gemma, prompts):
    texts = walk.greedy_texts(gemma, prompts[:3], CAP)
    counts = assert_walks_as_decoded(gemma, fitted(gemma, texts), texts, CAP)
    assert max(counts) > 2


def test_a_text_that_ends_inside_a_block_walks_as_it_decodes(llama, texts, trained):
    """EOS is planted at the first new token from the 7th on; what follows is neither walked nor decoded."""
    inside = 0
    for text in texts:
        eos = next((i for i in range(6, CAP) if text.answer[i] not in text.answer[:i]), None)
        if eos is not None:
            short = walk.Text(text.prompt, text.answer[: eos + 1])
            counts = assert_walks_as_decoded(llama, trained, [short], CAP, frozenset({text.answer[eos]}))
            inside += counts[-1] > 1
    assert inside >= 2


@pytest.mark.parametrize("cap", [2, 7, 12])
def test_a_text_cut_at_the_cap_walks_as_it_decodes(llama, texts, trained, cap):
    cut = [walk.Text(text.prompt, text.answer[:cap]) for text in texts]
    assert_walks_as_decoded(llama, trained, cut, cap)


def test_how_many_blocks_are_drafted_at_once_changes_nothing(llama, texts, trained, monkeypatch):
    whole = walked(llama, trained, texts)
    monkeypatch.setattr(walk, "BLOCKS_PER_PASS", 3 * len(texts))
    assert walked(llama, trained, texts) == whole


def test_texts_walked_together_are_walked_as_alone(llama, texts, trained):
    ragged = [walk.Text(text.prompt, text.answer[: 2 + 4 * i]) for i, text in enumerate(texts)]
    assert walked(llama, trained, ragged) == [walked(llama, trained, [text])[0] for text in ragged]


# Prompts.


def held_out(*documents):
    """Packed rows of (prompt length, answer length) documents whose token ids count up."""
    return corpus.pack(
        [
            (number, Document(str(number), np.arange(100 * number, 100 * number + a + b), np.arange(a + b) >= a))
            for number, (a, b) in enumerate(documents, 1)
        ],
        "validation", 50, 0, (),
    )  # fmt: skip


def test_prompts_are_what_stands_before_the_answers():
    found = walk.held_out_prompts(held_out((3, 4), (7, 2), (5, 9)), 9)
    assert sorted(found) == [list(range(100, 103)), list(range(200, 207)), list(range(300, 305))]


def test_plain_text_lends_its_beginning():
    found = walk.held_out_prompts(held_out((0, 45), (0, 6)), 9)
    assert sorted(map(len, found)) == [6, walk.TEXT_PROMPT]


def test_prompts_are_spread_over_the_rows_and_no_more_than_asked():
    rows = held_out(*[(2, 40)] * 12)
    assert len(walk.held_out_prompts(rows, 4)) == 4
    every = walk.held_out_prompts(rows, 99)
    assert walk.held_out_prompts(rows, 4) == every[::3]


def test_a_target_that_ends_every_answer_at_once_has_no_tau(llama, prompts, monkeypatch):
    """Nothing is left to walk; training once ended in a traceback at its first validation."""
    monkeypatch.setattr(walk.answers, "answer", lambda target, jobs, **_: [(job, [2], "stop") for job in jobs])
    texts = walk.greedy_texts(llama, prompts, CAP)
    assert walk.walked_tau(llama, untrained(llama), texts, B) == walk.Tau(0.0, 0.0, 0, 0)
