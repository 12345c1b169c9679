"""What is remembered of a kernel, for how long, and who may overrule it."""

import json
import logging
import subprocess
import sys

import mlx.core as mx
import pytest

from kernels import verdicts
from kernels.errors import UserError

KERNEL, CASE = "gated_delta.step", "bfloat16 Dk128"


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """A cache folder of its own, and no word from the environment."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    verdicts.decided.cache_clear()
    yield
    verdicts.decided.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)


# --- what is remembered


def test_the_unknown_is_not_used(gpu):
    assert not verdicts.allowed(KERNEL, CASE)
    assert verdicts.state(KERNEL, CASE) is None


@pytest.mark.parametrize("verdict", ["use", "slow", "wrong", "hangs", "unbuilt"])
def test_only_a_kernel_measured_right_and_faster_is_used(gpu, verdict):
    assert not verdicts.allowed(KERNEL, CASE)  # the answer from before the measurement does not stay
    verdicts.record(KERNEL, CASE, verdict, "a reason", ratio=0.5, error=1e-6)
    assert verdicts.allowed(KERNEL, CASE) == (verdict == "use")
    found = verdicts.state(KERNEL, CASE)
    assert (found.verdict, found.reason, found.ratio, found.error) == (verdict, "a reason", 0.5, 1e-6)
    assert not verdicts.allowed(KERNEL, "another case")
    assert not verdicts.allowed("gated_delta.replay", CASE)


def test_a_later_process_knows_it(tmp_path):
    verdicts.record(KERNEL, CASE, "slow", "a reason")
    code = f"from kernels import verdicts; print(verdicts.state({KERNEL!r}, {CASE!r}).verdict)"
    done = subprocess.run([sys.executable, "-c", code], cwd=verdicts.FOLDER.parent, capture_output=True, text=True)
    assert done.stdout.split() == ["slow"], done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("device_name", lambda: "Another"), ("version_of", lambda name: "0.99"), ("source_digest", lambda name: "0" * 64)],
)
def test_another_device_version_or_source_knows_nothing_of_it(gpu, monkeypatch, name, value):
    verdicts.record(KERNEL, CASE, "use", "a reason")
    with monkeypatch.context() as change:
        change.setattr(verdicts, name, value)
        verdicts.decided.cache_clear()
        assert verdicts.state(KERNEL, CASE) is None
        assert not verdicts.allowed(KERNEL, CASE)
        verdicts.record(KERNEL, CASE, "wrong", "another reason")
    assert verdicts.state(KERNEL, CASE).verdict == "use"  # both are kept
    assert [found.verdict for found in verdicts.current().values()] == ["use"]


def test_what_is_forgotten_is_unknown_and_the_rest_stays():
    verdicts.record(KERNEL, CASE, "use", "a reason")
    verdicts.record(KERNEL, "other", "use", "a reason")
    verdicts.forget(KERNEL, CASE)
    assert list(verdicts.current()) == [(KERNEL, "other")]


def test_processes_that_record_at_once_lose_nothing(tmp_path):
    code = (
        "import sys; from kernels import verdicts\n"
        "for i in range(8): verdicts.record('gated_delta.step', f'{sys.argv[1]} {i}', 'use', 'r')"
    )
    command = [sys.executable, "-c", code]
    children = [subprocess.Popen([*command, str(i)], cwd=verdicts.FOLDER.parent) for i in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(verdicts.current()) == 24
    assert {path.name for path in verdicts.path().parent.iterdir()} == {"verdicts.json", "verdicts.lock"}


def holding(verdicts):
    """The file's text with these verdicts, as JSON."""
    return '{"schema": "foredraft.verdicts/1", "verdicts": ' + verdicts + "}"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": "another/9", "verdicts": {}}',
        '{"verdicts": 3}',
        *map(
            holding,
            [
                "3",
                "null",
                "[]",
                '{"a": 1}',
                '{"a": {}}',
                '{"a": {"kernel": 3, "case": "c", "verdict": "use", "reason": "r"}}',
            ],
        ),
    ],
)
def test_a_damaged_file_is_said_to_be_and_counts_as_empty(text, caplog):
    verdicts.path().parent.mkdir(parents=True)
    verdicts.path().write_text(text)
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert verdicts.current() == {}
    assert "verdicts.json cannot be read" in caplog.text
    verdicts.record(KERNEL, CASE, "use", "a reason")
    assert json.loads(verdicts.path().read_text())["schema"] == verdicts.SCHEMA


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"verdicts cannot be written .*FOREDRAFT_CACHE"):
        verdicts.record(KERNEL, CASE, "use", "a reason")


# --- what it holds for


def test_the_digest_covers_the_module_what_it_is_made_of_and_the_prologues(monkeypatch, tmp_path):
    (tmp_path / "prologue").mkdir()
    files = {
        "one.py": "from kernels.errors import UserError\nfrom kernels.two import (\n    b,\n)\n",
        "two.py": "def f():\n    from kernels import (\n        errors,\n        three,\n    )\n",
        "three.py": "",
        "four.py": "",
        "errors.py": "",
        "prologue/host.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path)
    covered = set()
    for name, text in files.items():
        before = verdicts.source_digest.__wrapped__("one")
        (tmp_path / name).write_text(text + "\n# changed\n")
        if verdicts.source_digest.__wrapped__("one") != before:
            covered.add(name)
    assert covered == {"one.py", "two.py", "three.py", "prologue/host.h"}


def test_verdicts_on_modules_that_this_process_does_not_know_are_passed_over(monkeypatch, tmp_path):
    """Another process registered more, or another version had a module that is gone."""
    made = tmp_path / "upstairs.py"
    made.write_text("")
    with monkeypatch.context() as patch:
        patch.setitem(verdicts._above, "upstairs", (made,))
        verdicts.record("upstairs.cycle", CASE, "use", "a reason")
        assert verdicts.state("upstairs.cycle", CASE).verdict == "use"
    verdicts.record(KERNEL, CASE, "use", "a reason")
    assert verdicts.current().keys() == {(KERNEL, CASE)}
    assert verdicts.state("upstairs.cycle", CASE) is None


# --- what is forced


def test_on_a_cpu_nothing_is_used_even_when_forced():
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("the default device is a GPU")
    with verdicts.forced("on"):
        assert not verdicts.allowed(KERNEL, CASE)


@pytest.mark.parametrize(
    ("names", "step", "conv"),
    [
        ("on", True, True),
        ("off", False, False),
        ({"gated_delta"}, True, False),
        ({"gated_delta.step"}, True, False),
        ({"gated_delta.replay", "causal_conv"}, False, True),
        (set(), False, False),
    ],
)
def test_what_is_forced_overrules_what_was_measured(gpu, monkeypatch, names, step, conv):
    verdicts.record("causal_conv.fused", CASE, "use", "a reason")
    with verdicts.forced(names):
        assert verdicts.allowed("gated_delta.step", CASE) == step
        assert verdicts.allowed("causal_conv.fused", CASE) == conv
    assert not verdicts.allowed("gated_delta.step", CASE)
    assert verdicts.allowed("causal_conv.fused", CASE)


def test_forcing_nests_and_ends_with_an_exception(gpu):
    with pytest.raises(KeyError), verdicts.forced("on"):
        with verdicts.forced("off"):
            assert not verdicts.allowed(KERNEL, CASE)
        assert verdicts.allowed(KERNEL, CASE)
        raise KeyError
    assert not verdicts.allowed(KERNEL, CASE)


@pytest.fixture
def modules(monkeypatch):
    """Two modules that have kernels."""
    monkeypatch.setattr(verdicts, "kernel_modules", lambda: ["causal_conv", "gated_delta"])
    verdicts.from_environment.cache_clear()


def test_the_environment_forces_too(gpu, modules, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_KERNELS", "causal_conv, gated_delta.step")
    assert verdicts.allowed("gated_delta.step", CASE) and verdicts.allowed("causal_conv.fused", CASE)
    assert not verdicts.allowed("gated_delta.replay", CASE)
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    verdicts.decided.cache_clear()  # as in another process
    assert not verdicts.allowed("gated_delta.step", CASE)


def test_an_unknown_name_in_the_environment_is_refused(gpu, modules, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_KERNELS", "gated_delat")
    with pytest.raises(UserError, match="no kernel is called gated_delat; expected on, off, or some of causal_conv"):
        verdicts.allowed(KERNEL, CASE)
