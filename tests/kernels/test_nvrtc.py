"""What is compiled for CUDA is kept, found again, and refused in words where it cannot be."""

import ctypes
import os

import pytest

from kernels import nvrtc
from kernels.errors import UserError

GOOD = b"\x7fELF code\0of a kernel\0"


class Compiler:
    """A compiler of the given version that keeps count and refuses texts that say `bad`."""

    def __init__(self, version=(13, 0)):
        self.version, self.compiled, self.options, self.alive = version, 0, None, 0

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version

    def nvrtcCreateProgram(self, program, source, name, headers, texts, names):
        assert (headers, texts, names) == (0, None, None)
        self.source, self.name, self.alive = source, name, self.alive + 1

    def nvrtcCompileProgram(self, program, count, options):
        self.compiled, self.options = self.compiled + 1, options[:count]
        return 6 if b"bad" in self.source else 0

    def answer(self):
        return b"line 3: what is bad?\0" if b"bad" in self.source else GOOD

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.answer())

    def nvrtcGetProgramLog(self, program, content):
        ctypes.memmove(content, self.answer(), len(self.answer()))

    nvrtcGetCUBINSize, nvrtcGetCUBIN = nvrtcGetProgramLogSize, nvrtcGetProgramLog

    def nvrtcDestroyProgram(self, program):
        self.alive -= 1


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "library", lambda: compiler)
    return compiler


def test_a_text_is_compiled_for_its_architecture_and_released(compiler):
    assert nvrtc.machine_code("trial", "good", "sm_90") == GOOD
    assert compiler.options == [b"--gpu-architecture=sm_90"] and compiler.name == b"trial.cu" and compiler.alive == 0


def test_a_text_is_compiled_once(compiler, tmp_path):
    assert nvrtc.machine_code("trial", "good", "sm_90") == nvrtc.machine_code("trial", "good", "sm_90") == GOOD
    assert compiler.compiled == 1 and len(list(tmp_path.iterdir())) == 1


def test_another_text_architecture_or_compiler_is_compiled_again(compiler):
    for source, architecture, version in (
        ("a", "sm_90", 13),
        ("b", "sm_90", 13),
        ("b", "sm_80", 13),
        ("b", "sm_80", 12),
    ):
        compiler.version = version, 1
        nvrtc.machine_code("trial", source, architecture)
    assert compiler.compiled == 4


def test_a_text_that_does_not_compile_is_told_in_the_compilers_words_and_not_kept(compiler, tmp_path):
    with pytest.raises(RuntimeError, match="kernel trial: its CUDA build for sm_90 failed:\nline 3: what is bad\\?$"):
        nvrtc.machine_code("trial", "bad", "sm_90")
    assert list(tmp_path.iterdir()) == [] and compiler.alive == 0


def test_a_cache_that_cannot_be_written_is_one_line(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file.*cannot be kept.*FOREDRAFT_CACHE") as raised:
        nvrtc.machine_code("trial", "good", "sm_90")
    assert "\n" not in str(raised.value)


def test_the_compiler_that_is_loaded_already_is_preferred(monkeypatch):
    tried = []

    def load(name, mode):
        tried.append((name, mode))
        if name != "libnvrtc.so.12":
            raise OSError
        return name

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert nvrtc.library.__wrapped__() == "libnvrtc.so.12"
    assert tried == [(name, os.RTLD_NOLOAD | os.RTLD_LAZY) for name in ("libnvrtc.so.13", "libnvrtc.so.12")]


def test_a_machine_without_the_compiler_is_told_what_to_install(monkeypatch):
    def load(name, mode):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(UserError, match=r"libnvrtc\.so\.13.*pip install.*FOREDRAFT_KERNELS=off"):
        nvrtc.library.__wrapped__()
