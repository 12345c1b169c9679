"""Where a command meets a person: exit codes, one line of error, the closing JSON, the nearest option."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import pytest

import edge
from kernels.errors import UserError


def leave(main, capsys, monkeypatch, *argv):
    """Run a command to its exit. Returns (exit code, the closing JSON, what went to standard error)."""
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    with pytest.raises(SystemExit) as exit_:
        edge.run(main)
    printed = capsys.readouterr()
    return exit_.value.code, json.loads(printed.out.splitlines()[-1]), printed.err


def raising(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1)])
def test_the_status_decides_the_exit_code_and_figures_close_the_output(capsys, monkeypatch, status, code):
    def main(argv):
        print("a table")
        return {"status": status, "out": argv[0], "tau": 2.5}

    assert leave(main, capsys, monkeypatch, "here") == (code, {"status": status, "out": "here", "tau": 2.5}, "")


def test_a_users_mistake_is_one_line_and_exit_2(capsys, monkeypatch):
    code, closing, shown = leave(raising(UserError("block size 1:\n  expected 2 or more")), capsys, monkeypatch)
    assert code == 2
    assert closing == {"status": "refused", "error": "block size 1: expected 2 or more"}
    assert shown == "error: block size 1: expected 2 or more\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EISDIR, errno.ENOTDIR])
def test_what_the_system_refuses_is_one_line_with_file_reason_and_remedy(capsys, monkeypatch, number):
    error = OSError(number, os.strerror(number), "runs/out.json")
    code, closing, shown = leave(raising(error), capsys, monkeypatch)
    assert code == 2
    assert len(shown.splitlines()) == 1
    assert shown.startswith(f"error: runs/out.json: {os.strerror(number).lower()}; ")
    assert shown.strip().endswith(edge.REMEDY[number])
    assert closing["status"] == "refused"


def test_an_interruption_in_the_middle_of_a_line_leaves_the_closing_line_alone(capsys, monkeypatch):
    def main(argv):
        print("half a sen", end="")
        raise KeyboardInterrupt

    assert leave(main, capsys, monkeypatch)[:2] == (130, {"status": "interrupted"})


def test_a_reader_that_leaves_ends_the_command_without_a_traceback():
    code = "import edge\nedge.run(lambda argv: [print('line ' * 9999, flush=True) for _ in range(99)])"
    where = pathlib.Path(edge.__file__).parent
    command = f'{sys.executable} -c "{code}" | head -c 5'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=where, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "line ", "")


def test_an_interruption_is_exit_130(capsys, monkeypatch):
    code, closing, _ = leave(raising(KeyboardInterrupt()), capsys, monkeypatch)
    assert (code, closing) == (130, {"status": "interrupted"})


@pytest.mark.parametrize("error", [RuntimeError("a defect"), OSError(errno.EIO, "a broken disk")])
def test_a_defect_of_ours_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(type(error)):
        edge.run(raising(error))


@pytest.mark.skipif(sys.platform != "linux", reason="g++ compiles MLX's passes on a Linux CPU")
@pytest.mark.parametrize("fault", ["compiler", "folder"])
def test_a_pass_that_cannot_be_compiled_is_one_line_with_the_remedy(tmp_path, fault):
    """A g++ that is there and does not work, and a temporary folder that is none; each where nothing was compiled."""
    (tmp_path / "g++").write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "g++: error: no cc1plus" >&2; exit 1; }\n')
    (tmp_path / "g++").chmod(0o755)
    code = (
        "import edge, mlx.core as mx\nmx.set_default_device(mx.cpu)\n"
        "edge.run(lambda argv: mx.eval(mx.compile(lambda x: mx.exp(x) * x)(mx.ones(3))))"
    )
    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} if fault == "compiler" else {"TMPDIR": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(edge.__file__).parent,
        env={**os.environ, "TMPDIR": str(tmp_path), **around},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ("no cc1plus" if fault == "compiler" else "temp_directory_path") in done.stderr
    assert "name another folder in TMPDIR" in done.stderr


def parser():
    """A parser with an option of its own and one in a sub-command."""
    top = edge.Parser(prog="spec_decode.py")
    top.add_argument("--verbose")
    top.add_subparsers(dest="command").add_parser("ksweep").add_argument("--block-sizes", type=int)
    return top


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--verbos=x", "ksweep"], "did you mean --verbose?"),
        (["ksweep", "--block-size=4"], "did you mean --block-sizes?"),
        (["ksweep", "--block-sizes", "two"], "invalid int value: 'two'"),
        (["sweep"], "invalid choice: 'sweep'"),
        (["ksweep", "--utterly-different"], "unrecognized arguments: --utterly-different (see"),
    ],
)
def test_a_wrong_argument_is_a_users_mistake_with_the_nearest_option(argv, words):
    with pytest.raises(UserError) as refused:
        parser().parse_args(argv)
    assert words in str(refused.value)


def test_an_option_cannot_be_abbreviated():
    with pytest.raises(UserError):
        parser().parse_args(["--verb", "x"])


def test_a_command_runs_from_any_folder_with_this_checkouts_rooms(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError('a namesake was imported')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import edge, kernels; print(kernels.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{edge.ROOT}"}
    command = [sys.executable, "-c", code, str(edge.ROOT / "scripts")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(edge.ROOT / "kernels" / "__init__.py"), done.stderr
