"""Arms on a small real target: same text, honest clocks, and a replay that shows what each verify was given."""

import itertools

import mlx.core as mx
import pytest

import oracles
import tiny
from decode.lab import arms
from drafter import hybrid
from drafter import target as targets
from kernels.errors import UserError

CAP = 19
PROMPT = "the river ran past the old mill and the mill stood by the river while"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture(scope="module")
def compared(target):
    drafter, _ = arms.untrained(target, block_size=5, seed=3)
    return {arm.name: arm for arm in arms.ksweep(target, drafter, (2, 5), (2, 3), 4)}


@pytest.fixture(scope="module")
def prompt(target):
    return target.encode(PROMPT)


def greedy(target, prompt, count):
    """The oracle's text up to the first EOS, that one included."""
    text = oracles.greedy_uncached(target.model, prompt, count)
    ends = [index + 1 for index, token in enumerate(text) if token in target.eos_ids]
    return tuple(text[: min([*ends, count])])


def test_arms_are_named_baseline_first(compared):
    assert list(compared) == ["mlx_lm", "mlx_lm-twin", "plain", "ngram-2", "ngram-3", "dflash-2", "dflash-5"]
    kinds = [(arm.kind, arm.block_size) for arm in compared.values()]
    assert kinds == [
        *(("mlx_lm", None), ("mlx_lm", None), ("plain", None), ("ngram", 4), ("ngram", 4), ("dflash", 2), ("dflash", 5))
    ]


def test_every_arm_emits_the_greedy_text_of_the_target(compared, target, prompt):
    expected = greedy(target, prompt, CAP)
    assert len(expected) > 8
    for arm in compared.values():
        assert arm.run(prompt, CAP).tokens == expected, arm.name


def test_committed_tokens_are_all_but_the_one_from_prefill(compared, prompt):
    for name in ("ngram-2", "dflash-5"):
        run = compared[name].run(prompt, CAP)
        assert sum(cycle.committed for cycle in run.cycles) == len(run.tokens) - 1


def test_the_clock_starts_at_the_first_token_and_ends_at_the_last(monkeypatch):
    moments = itertools.count(10)  # one second a look
    monkeypatch.setattr(arms.time, "perf_counter", lambda: float(next(moments)))
    response = lambda token, reason=None: type("Response", (), {"token": token, "finish_reason": reason})
    run = arms.clocked([response(7), response(8), response(9, "stop")], [])
    assert (run.prefill_seconds, run.seconds) == (1.0, 2.0)
    assert run.tokens == (7, 8, 9) and run.finish == "stop"


def test_one_token_takes_no_decode_time(compared, prompt):
    run = compared["dflash-2"].run(prompt, 1)
    assert run.seconds == 0.0 and len(run.tokens) == 1 and run.finish == "length"


def test_an_instrumented_run_carries_stage_times(compared, prompt):
    ticks = itertools.count()
    run = compared["dflash-5"].run(prompt, CAP, clock=lambda: float(next(ticks)))
    assert all(set(cycle.seconds) == {"draft", "verify", "commit"} for cycle in run.cycles)


def test_a_replay_repeats_the_run_and_shows_each_verify(compared, target, prompt):
    arm = compared["dflash-5"]
    tokens, verifies = arm.replay(prompt, CAP)
    assert tuple(tokens) == arm.run(prompt, CAP).tokens
    for verify in verifies:
        assert verify.rows[0] == tokens[verify.start - 1]  # the pending token
        text = [*prompt, *tokens[: verify.start - 1], *verify.rows]
        expected = target.model(mx.array([text]))[0, -len(verify.rows) :][: len(verify.logits)]
        assert mx.allclose(verify.logits, expected, atol=2e-4).item()  # float32, widths differ
    assert any(len(verify.rows) == 5 for verify in verifies)


def test_the_untrained_control_is_drawn_by_its_seed(target):
    draw = lambda seed: arms.untrained(target, block_size=3, seed=seed)[0].fc.weight
    assert mx.array_equal(draw(4), draw(4)).item()
    assert not mx.array_equal(draw(4), draw(5)).item()


def test_a_block_wider_than_the_drafter_was_trained_at_is_refused(target):
    drafter, _ = arms.untrained(target, block_size=4, seed=0)
    with pytest.raises(UserError, match="block size 8.*trained at block size 4"):
        arms.ksweep(target, drafter, (2, 8), (3,), 4)


def test_on_a_hybrid_the_baseline_runs_mlx_lms_own_layers_and_every_arm_emits_its_text(tmp_path, prompt, monkeypatch):
    target = targets.load(str(tiny.folder("qwen3_5", tmp_path)), dtype="float32")
    drafter, _ = arms.untrained(target, block_size=5, seed=3)
    attached = []

    def noting(forward):
        return lambda *args, **options: attached.append(True) or forward(*args, **options)

    monkeypatch.setattr(hybrid, "forward", noting(hybrid.forward))
    texts = {}
    for arm in arms.ksweep(target, drafter, (2, 5), (2,), 4):
        attached.clear()
        texts[arm.name] = arm.run(prompt, CAP).tokens
        assert bool(attached) == (arm.kind != "mlx_lm"), arm.name
    assert len(texts["mlx_lm"]) > 8
    assert set(texts.values()) == {texts["mlx_lm"]}
    assert any(len(set(text)) > 5 for text in texts.values())
