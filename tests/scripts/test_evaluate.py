"""The evaluations at their edge: each runs on a small target, its result rebuilds, and it refuses in one line."""

import json
import sys

import pytest
import spec_decode

import edge
import opening
import tiny


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command as a shell would: (exit code, closing line, standard output before it, errors)."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["spec_decode.py", *map(str, argv)])
        with pytest.raises(SystemExit) as leaving:
            edge.run(spec_decode.main)
        out, err = capsys.readouterr()
        *before, last = out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before), err

    return call


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.folder("llama", tmp_path_factory.mktemp("target"), chat_template=True)


@pytest.fixture
def asked(tmp_path):
    """A prompt file of two prompts."""
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "the river ran"}\n{"prompt": "def add(first"}\n')
    return path


@pytest.fixture
def run(command, target, asked, tmp_path):
    """Run an evaluation at its smoke size: (closing line, the result, what was shown); its report must agree."""

    def run(name, *words):
        out = tmp_path / f"{name}.json"
        code, closing, shown, err = command(
            name, "--target", target, "--prompts", asked, "--smoke", "--out", out, *words
        )
        assert code == 0, err
        assert closing["status"] == "done" and closing["defects"] == 0 and "SMOKE" in shown
        again = command("report", out, "--out", tmp_path / "tables")
        assert again[0] == 0 and again[1]["changed"] == {}, again
        return closing, json.loads(out.read_text()), shown

    return run


def test_transfer_judges_every_variant(run, target, tmp_path):
    variants = tiny.folder("llama", tmp_path, seed=2, chat_template=True), tiny.quantised(target, tmp_path)
    closing, result, shown = run("transfer", "--variants", *variants, "--block-sizes", "2,3")
    assert set(closing["verdicts"]) == {path.name for path in variants}
    assert [one["part"] for one in result["targets"]] == [path.name for path in (target, *variants)]
    assert len({one["fingerprint"] for one in result["targets"]}) == 3
    names = ["mlx_lm", "plain", "dflash-2", "dflash-3"]
    assert [arm["name"] for arm in result["arms"]] == names * 3
    assert len(result["rows"]) == 4 * 3 * 2 and len(result["agreement"]) == 2 * 2
    assert all(arm["identical"] == 2 for arm in result["arms"])
    assert "top-1 agreement" in shown and "verdict" in shown


# arguments ("{…}" is filled in) -> words the one line must hold
BAD = {
    "transfer without variants": ("transfer", ["--variants"]),
    "a variant that is not there": ("transfer --target {target} --prompts {asked} --variants {tmp}/no", ["/no"]),
    "the same target twice": ("transfer --target {target} --prompts {asked} --variants {target}", ["both called"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_2_and_leaves_nothing(command, target, asked, tmp_path, monkeypatch, name):
    monkeypatch.setattr(opening, "RUNS", tmp_path / "runs")
    before = sorted(tmp_path.rglob("*"))
    line, words = BAD[name]
    argv = [word.format(tmp=tmp_path, target=target, asked=asked) for word in line.split()]
    code, closing, _, err = command(*argv)
    assert code == 2 and closing["status"] == "refused"
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert all(word in said for word in words), said
    assert "Traceback" not in err and sorted(tmp_path.rglob("*")) == before
