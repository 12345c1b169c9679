"""CUDA text to machine code by NVIDIA's run-time compiler, once for each machine: what was compiled stays on disk.

MLX remembers its own kernels, but compiles those of `mx.fast.cuda_kernel` again in every process, with its headers
about a second each: a target of forty would start a minute late every time.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import sysconfig
import tempfile

from kernels.blas import cache_folder
from kernels.errors import UserError

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
PACKAGED = "nvidia/*/lib/libnvrtc.so.1?"  # where the wheels that MLX's CUDA wheels ask for put it
LONGEST = 2000  # characters of the compiler's words that an error shows


def machine_code(name, source, architecture):
    """The machine code (bytes) of CUDA C++ text that includes nothing, for an architecture such as "sm_90".

    name: of the text, for its file. Raises RuntimeError with the compiler's words where the text does not compile,
    UserError where there is no compiler or the result cannot be kept.
    """
    key = hashlib.sha256("\0".join((source, architecture, *map(str, version()))).encode()).hexdigest()[:16]
    path = cache_folder() / f"cuda-{name}-{key}.cubin"
    if not path.exists():
        keep(path, compiled(name, source, architecture))
    return path.read_bytes()


def keep(path, code):
    """Write machine code under a temporary name, then under its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".cubin", delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(
            f"{path}: a kernel cannot be kept ({error}); set FOREDRAFT_CACHE to a writable folder"
        ) from None


def compiled(name, source, architecture):
    """The machine code of a text, compiled now. Raises as `machine_code`."""
    program, options = ctypes.c_void_p(), [f"--gpu-architecture={architecture}".encode()]
    ask("CreateProgram", ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        if library().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            words = told(program, "ProgramLog").decode(errors="replace").rstrip("\0").strip()
            raise RuntimeError(f"kernel {name}: its CUDA build for {architecture} failed:\n{words[:LONGEST]}")
        return told(program, "CUBIN")
    finally:
        ask("DestroyProgram", ctypes.byref(program))


def told(program, what):
    """The bytes that the compiler has of a program: its ProgramLog or its CUBIN."""
    size = ctypes.c_size_t()
    ask(f"Get{what}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    ask(f"Get{what}", program, content)
    return content.raw


def version():
    """(major, minor) of the compiler."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    ask("Version", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def ask(function, *arguments):
    """Call a function of the compiler that must not fail."""
    code = getattr(library(), f"nvrtc{function}")(*arguments)
    if code:
        raise RuntimeError(f"nvrtc{function} failed with code {code}")


@functools.cache
def library():
    """The compiler: the one that MLX has loaded, or the first that is found. Raises UserError where there is none."""
    for name, mode in [(name, os.RTLD_NOLOAD | os.RTLD_LAZY) for name in SONAMES] + [
        (name, 0) for name in candidates()
    ]:
        try:
            return ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
    raise UserError(
        f"kernels: no CUDA run-time compiler; expected {' or '.join(SONAMES)}; pip install nvidia-cuda-nvrtc, or set "
        "FOREDRAFT_KERNELS=off"
    )


def candidates():
    """Names and paths under which the compiler may be loaded."""
    site = pathlib.Path(sysconfig.get_path("purelib"))
    return [*SONAMES, *map(str, sorted(site.glob(PACKAGED), reverse=True))]
