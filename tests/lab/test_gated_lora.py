"""A gated LoRA in the lab: a walk promises what decoding commits, and a replay shows what each verify was given.

B block size. The adapter is fitted to the very texts, so that its proposals are often right; noise is the mask token,
so that a walk and a decode see the same.
"""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode import cycle, proposers, schedule
from decode.lab import arms, walk
from drafter import config as configuration
from drafter import corpus, gated_lora, gated_objective, trainer
from drafter import target as targets
from drafter.documents import Document
from kernels.errors import UserError

B, CAP, STEPS = 4, 17, 30
WIDTHS = 2e-4  # float32 logits of order 1: products of other widths


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def fitted(request, tmp_path_factory):
    """(target, adapter, texts)."""
    target = targets.load(str(tiny.folder(request.param, tmp_path_factory.getbasetemp())), dtype="float32")
    generator = np.random.default_rng(3)
    prompts = [generator.integers(5, tiny.VOCABULARY, length).tolist() for length in (3, 11, 7)]
    texts = walk.greedy_texts(target, prompts, CAP)
    config = gated_lora.GatedLoraConfig(8, 32.0, B, ("attention", "mlp"), 4, tiny.VOCABULARY, "mask")
    drafter = gated_lora.initialise(gated_lora.GatedLora(target, config), 0)
    documents = []
    for number, text in enumerate(texts, 1):
        ids = np.array(text.prompt + text.answer, np.int32)
        documents.append((number, Document(str(number), ids, np.arange(len(ids)) >= len(text.prompt))))
    rows = corpus.pack(documents, "train", 32, 0, ())
    blocks = gated_objective.Blocks(config, B, 8, "all", "prefix", 1)
    feed = gated_objective.Feed(rows, blocks, sizes=(B,), steps=STEPS, rows_per_step=len(rows))
    goal = gated_objective.PrefixObjective(target, "target_cross_entropy", B, weights="uniform", rows_per_chunk=64)
    options = configuration.OptimizerConfig(learning_rate=2e-2)
    loop = trainer.Trainer(drafter, goal, options, STEPS, "float32")
    losses = [loop.step(step, feed(step)).loss for step in range(STEPS)]
    assert losses[-1] < 0.7 * losses[0]
    return target, drafter, texts


def committed(target, drafter, text, size, keep=False):
    """Tokens committed by each cycle of a decode of the text's prompt, as long as the text."""
    proposer = proposers.GatedLoraProposer(target, drafter, size, keep=keep)
    steps = list(cycle.decode(target, list(text.prompt), proposer, schedule.Fixed(size, least=1),
                              max_tokens=len(text.answer)))  # fmt: skip
    assert [token for step in steps for token in step.tokens] == list(text.answer)
    return [step.cycle.committed for step in steps[1:]]


@pytest.mark.parametrize("size", [1, 2, B])
def test_a_walk_is_what_decoding_commits(fitted, size):
    target, drafter, texts = fitted
    accepted = walk.accepted_everywhere(target, drafter, texts, size)
    walked = [walk.walk(text, lengths) for text, lengths in zip(texts, accepted)]
    assert walked == [committed(target, drafter, text, size) for text in texts]
    if size == B:
        tau = walk.walked_tau(target, drafter, texts, size)
        assert tau.pooled > 2.5  # two tokens a cycle come from the target itself
        assert walk.forwards(drafter) == 2


@pytest.mark.parametrize("change", [(), ("keep",), ("refine2",), ("always_on",)])
def test_a_replay_shows_each_verify_and_each_pass_that_decided_a_kept_row(fitted, change):
    target, drafter, texts = fitted
    arm = arms.drafting(target, drafter, B, change)[-1]
    assert arm.name == "-".join([f"gated_lora-{B}", *change])
    tokens, verifies = arm.replay(texts[1].prompt, CAP)
    assert tuple(tokens) == arm.run(texts[1].prompt, CAP).tokens == texts[1].answer
    for verify in verifies:
        assert verify.rows[0] == tokens[verify.start - 1]
        text = [*texts[1].prompt, *tokens[: verify.start - 1], *verify.rows]
        expected = target.model(mx.array([text]))[0, -len(verify.rows) :][: len(verify.logits)]
        assert mx.abs(verify.logits - expected).max().item() < WIDTHS
    starts = [verify.start for verify in verifies]
    assert starts == sorted(set(starts))
    assert sum(len(verify.logits) for verify in verifies) == len(tokens) - 1


def test_an_adapter_drafts_at_any_block_size(fitted):
    target, drafter, _ = fitted
    assert arms.fitting(drafter, (1, 2, 4, 16)) == (1, 2, 4, 16)
    names = [arm.name for arm in arms.ksweep(target, drafter, (1, 16), (3,), 4, ("keep",))]
    assert names[4:] == ["gated_lora-1", "gated_lora-1-keep", "gated_lora-16", "gated_lora-16-keep"]


def test_the_untrained_control_adapts_nothing(fitted):
    target, *_ = fitted
    drafter, identity = arms.untrained(target, block_size=3, seed=4, kind="gated_lora")
    assert identity["kind"] == "untrained"
    tokens = mx.array([[5, 9, 11]])
    assert mx.array_equal(drafter.forward(tokens, (False, True, True)), target.forward(tokens).hidden)


def test_ways_of_a_gated_lora_are_refused_for_a_full_drafter(fitted):
    target, *_ = fitted
    drafter, _ = arms.untrained(target, block_size=4, seed=0)
    with pytest.raises(UserError, match="keep: only a gated LoRA"):
        arms.drafting(target, drafter, 4, ("keep",))
