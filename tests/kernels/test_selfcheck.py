"""What selfcheck lets through and what it refuses, with the host build on a CPU standing for any device."""

import logging
import os
import pathlib

import bad_kernels
import mlx.core as mx
import mlx.nn as nn
import pytest

from kernels import selfcheck, verdicts
from kernels.verdicts import Check

MODULES, BODIES = ("bad_kernels",), pathlib.Path(bad_kernels.__file__)
SECONDS = 5  # for a check; a host build takes one on a busy machine


def place(name):
    return f"bad_kernels.{name}", "float32"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """{name: Verdict} of one real run over all bodies, each measured in a child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(verdicts._above, "bad_kernels", (BODIES,))
        found = selfcheck.run({"bodies": list(bad_kernels.BODIES)}, MODULES, timeout_s=SECONDS)
        assert set(found) == set(verdicts.current().values())
        yield {verdict.kernel.split(".")[1]: verdict for verdict in found}


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("right", "use", "without it; error 0.0e+00 of at most 1.0e-05"),
        ("close", "use", "of at most 1.0e-05"),
        ("wrong", "wrong", "its error is"),
        ("incomplete", "wrong", "its error is not a number"),
        ("slow", "slow", "without it"),
        ("hanging", "hangs", "no result after 5 s; it is never tried again"),
        ("crashing", "unbuilt", "died of SIGSEGV"),
        ("broken", "unbuilt", "RuntimeError: kernel broken: its host build failed"),
    ],
)
def test_a_kernel_is_used_only_if_right_faster_and_alive(measured, name, verdict, words):
    found = measured[name]
    assert (found.verdict, words in found.reason) == (verdict, True), found.reason


def test_ratio_and_error_are_recorded(measured):
    assert measured["right"].ratio < 1 < measured["slow"].ratio
    assert measured["right"].error == 0 < measured["close"].error <= 1e-5
    assert measured["hanging"].ratio is None


def test_the_doctor_tells_the_reason(measured):
    import doctor

    found = doctor.check_kernels()
    assert found.level == "warn"
    for name in bad_kernels.BODIES:
        verdict = measured[name]
        assert f"bad_kernels.{name} [float32] {verdict.verdict}: {verdict.reason}" in found.text
    assert "2 of 8 measured" in found.text
    assert "verdicts.json" in found.remedy


# --- what is tried, and when


class Scripted:
    """A child process that answers what it is told to; `tried` lists what was asked."""

    def __init__(self, answers, fault=None):
        self.answers, self.fault, self.tried, self.started = answers, fault, [], 0

    def __call__(self, dims, modules):
        self.started += 1
        self.ended = False
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def starts(self):
        return self.fault

    def ask(self, kernel, case, seconds):
        self.tried.append(kernel.split(".")[1])
        self.seen = verdicts.state(kernel, case)
        answer = self.answers.get(self.tried[-1], "use")
        if isinstance(answer, BaseException):
            raise answer
        self.ended = answer in {"hangs", "unbuilt"}
        return {"verdict": answer, "reason": "a reason"}


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """script(answers): the child processes that follow answer so."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setitem(verdicts._above, "bad_kernels", (BODIES,))

    def script(fault=None, **answers):
        child = Scripted(answers, fault)
        monkeypatch.setattr(selfcheck, "Child", child)
        return child

    return script


DIMS = {"bodies": ["right", "hanging", "slow"]}


def test_what_hung_is_never_tried_again(scripted):
    scripted(hanging="hangs", slow="slow")
    selfcheck.run(DIMS, MODULES)
    child = scripted()
    assert [found.kernel for found in selfcheck.run(DIMS, MODULES, again=True)] == [place("right")[0], place("slow")[0]]
    assert child.tried == ["right", "slow"]
    assert verdicts.state(*place("hanging")).verdict == "hangs"


def test_what_is_known_is_not_measured_again_unasked(scripted):
    scripted()
    selfcheck.run({"bodies": ["slow"]}, MODULES)
    child = scripted()
    assert len(selfcheck.run(DIMS, MODULES)) == 2
    assert child.tried == ["right", "hanging"]
    assert selfcheck.run(DIMS, MODULES) == []
    assert child.started == 1


def test_a_check_counts_as_hanging_until_it_ends(scripted):
    child = scripted()
    selfcheck.run({"bodies": ["right"]}, MODULES)
    assert (child.seen.verdict, "went down" in child.seen.reason) == ("hangs", True)
    assert verdicts.state(*place("right")).verdict == "use"


def test_an_interrupt_leaves_nothing_behind(scripted):
    scripted(hanging=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        selfcheck.run(DIMS, MODULES)
    assert list(verdicts.current()) == [place("right")]


@pytest.mark.parametrize("failure", ["hangs", "unbuilt"])
def test_after_a_failure_a_fresh_process_does_the_rest(scripted, failure):
    child = scripted(hanging=failure)
    found = selfcheck.run(DIMS, MODULES)
    assert [each.verdict for each in found] == ["use", failure, "use"]
    assert child.started == 2


def test_a_device_that_does_not_answer_ends_the_run_and_blames_no_kernel(scripted, caplog):
    scripted(fault="the device gave no answer in 120 s")
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert selfcheck.run(DIMS, MODULES) == []
    assert verdicts.current() == {}
    assert "3 kernels stay unmeasured: the device gave no answer" in caplog.text


def test_a_process_that_cannot_start_says_why():
    with selfcheck.Child({"bodies": ["nothing"]}, MODULES) as child:
        assert "ended with code 1: KeyError: 'nothing'" in child.starts()


def test_a_hanging_process_is_ended_with_all_it_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    with selfcheck.Child({"bodies": ["hanging"]}, MODULES) as child:
        assert child.starts() is None
        assert child.ask(*place("hanging"), 0.5)["verdict"] == "hangs"
        assert child.process.poll() is not None
        with pytest.raises(ProcessLookupError):
            os.kill(child.process.pid, 0)


# --- first use


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)


def test_first_use_measures_once_and_says_so(scripted, gpu, caplog):
    child = scripted(slow="slow")
    with caplog.at_level(logging.WARNING, "foredraft"):
        selfcheck.ensure(DIMS, MODULES)
        selfcheck.ensure(DIMS, MODULES)
    assert child.tried == DIMS["bodies"]
    assert [record.getMessage()[:30] for record in caplog.records] == [
        "kernels: measuring 3 on this m",
        "kernels: 2 of 3 serve here; py",
    ]


def test_nothing_is_measured_on_a_cpu_or_when_forced(scripted, monkeypatch):
    child = scripted()
    monkeypatch.setattr(verdicts, "on_gpu", lambda: False)
    selfcheck.ensure(DIMS, MODULES)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)
    with verdicts.forced("off"):
        selfcheck.ensure(DIMS, MODULES)
    assert child.tried == []


def test_a_cache_that_cannot_be_written_costs_speed_only(scripted, gpu, tmp_path, monkeypatch, caplog):
    scripted()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "foredraft"):
        selfcheck.ensure(DIMS, MODULES)
    assert "kernels stay unused" in caplog.text


def test_every_module_with_kernels_states_checks_under_its_own_name():
    found = selfcheck.checks_for(selfcheck.EXAMPLE)
    places = [(check.kernel, check.case) for check in found]
    assert len(set(places)) == len(places)
    assert {f"kernels.{verdicts.module_of(check.kernel)}" for check in found} == set(selfcheck.MODULES)
    assert {"kernels.causal_conv", "kernels.fused_delta"} <= set(selfcheck.MODULES)


# --- comparing


def outputs_check(found, expected, tolerance=1e-3):
    return Check("a", "b", lambda: found, lambda: expected, lambda: (), tolerance)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([mx.array([1.0, 2.0])], [mx.array([1.0, 2.5])], 0.2),
        (mx.array([1.0, 2.0]), mx.array([1.0, 2.0]), 0.0),
        ([mx.array([0.0]), mx.array([3.0])], [mx.array([0.0]), mx.array([2.0])], 0.5),
        ([mx.array([1e-3])], [mx.array([0.0])], 1e-3),
        ([mx.array([1.0, float("nan")])], [mx.array([1.0, float("nan")])], float("inf")),
        ([mx.array([1.0])], [mx.array([1.0], mx.bfloat16)], float("inf")),
        ([mx.zeros((2, 3))], [mx.zeros((3, 2))], float("inf")),
        ([mx.zeros(2)], [mx.zeros(2), mx.zeros(2)], float("inf")),
    ],
    ids=["half", "equal", "second", "zero", "nan", "dtype", "shape", "count"],
)
def test_the_error_is_relative_to_the_largest_and_nothing_odd_passes(found, expected, error):
    assert selfcheck.largest_error(outputs_check(found, expected), 0) == pytest.approx(error, rel=1e-5)


# --- dims


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv_heads = 6, 3
        self.q_proj, self.k_proj = nn.Linear(64, 6 * 32, bias=False), nn.Linear(64, 3 * 32, bias=False)


class Delta(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.conv_kernel_size = 2, 4, 32, 48, 4
        self.out_proj = nn.Linear(192, 64, bias=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads = 6, 3  # as mlx-lm's models carry them too
        self.embed_tokens = nn.Embedding(96, 64)
        self.layers = [Attention(), Delta(), Attention()]


def test_the_dims_of_a_model_are_its_distinct_shapes():
    model = Model()
    model.set_dtype(mx.bfloat16)
    found = selfcheck.dims_of(model)
    assert sorted(found.pop("dense")) == [[64, 192], [96, 64], [192, 64]]
    assert found == {"dtype": "bfloat16", "quantised": [], "attention": [[6, 3, 32]], "delta": [[2, 4, 32, 48, 4]]}


def test_the_dims_of_a_quantised_model_count_unpacked_elements():
    model = Model()
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    found = selfcheck.dims_of(model)
    assert sorted(found["quantised"]) == [[64, 192, 4, 32], [96, 64, 4, 32], [192, 64, 4, 32]]
    assert (found["dense"], found["dtype"], found["attention"]) == ([], "float16", [[6, 3, 32]])
