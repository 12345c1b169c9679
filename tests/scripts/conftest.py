"""What the tests of several scripts share: a script run as a shell would, a small target, an undisturbed machine."""

import io
import json
import sys

import pytest

import edge
import tiny
from decode.lab import health


@pytest.fixture
def run_script(monkeypatch, capsys):
    """call(name, main, *argv, stdin=""): (exit code, closing line, standard output before it, errors) of a script."""

    def call(name, main, *argv, stdin=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as leaving:
            edge.run(main)
        out, err = capsys.readouterr()
        *before, last = out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before), err

    return call


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a small llama with a chat template."""
    return tiny.folder("llama", tmp_path_factory.mktemp("target"), chat_template=True)


@pytest.fixture
def quiet(monkeypatch):
    """A machine on which nothing disturbs a row, whatever else runs on this one."""
    monkeypatch.setattr(health, "disturbance", lambda before, after: [])
    monkeypatch.setattr(health, "ailments", lambda before, after: [])
