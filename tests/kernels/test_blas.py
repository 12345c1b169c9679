"""The search for a BLAS: its order, what it refuses, the shim's values. Libraries to try are compiled on the spot."""

import ctypes
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kernels import blas
from kernels.errors import UserError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only a Linux CPU needs a BLAS put under MLX")
HEAD = "void cblas_dgemm(void) {} void cblas_cgemm(void) {}\n"
SGEMM = (
    "void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,"
    " const float *b, int ldb, float beta, float *c, int ldc)"
)
WRONG = HEAD + SGEMM + "{ for (int i = 0; i < m * n; i++) c[i] = 0; }\n"
CRASHING = HEAD + SGEMM + "{ __builtin_trap(); }\n"
RIGHT = HEAD + SGEMM + (
    "{ for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) { float sum = 0; for (int p = 0; p < k; p++)"
    " sum += (ta == 112 ? a[p * lda + i] : a[i * lda + p]) * (tb == 112 ? b[j * ldb + p] : b[p * ldb + j]);"
    " c[i * ldc + j] = sum; } }\n"
)  # fmt: skip
WIDE = RIGHT + 'const char *openblas_get_config(void) { return "OpenBLAS 0.3.9 USE64BITINT"; }\n'


@pytest.fixture
def build(tmp_path):
    """build(name, source): a shared library from C source text."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def compile_library(name, source):
        out = tmp_path / f"{name}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", out], input=source, text=True, check=True)
        return str(out)

    return compile_library


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder in place of the user's."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def openblas():
    """PyPI's OpenBLAS library file."""
    package = pytest.importorskip("scipy_openblas32")
    return pathlib.Path(package.__file__).parent / "lib" / "libscipy_openblas.so"


def candidate(path):
    return blas.Blas("BLAS", path, "a test names it")


# --- values


def faulty_sgemm(fault):
    """A float32 product by NumPy behind CBLAS's signature, with one mistake of the kind that real libraries made."""

    def sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        left, right = np.array(a, np.float32), np.array(b, np.float32)
        left = left.reshape(k, m).T if ta == 112 and fault != "left" else left.reshape(m, k)
        right = right.reshape(n, k).T if tb == 112 and fault != "right" else right.reshape(k, n)
        product = left[:, : k - 1] @ right[: k - 1] if fault == "depth" else left @ right
        if fault == "last column":
            product[:, -1] = 0
        elif fault == "adds to c":
            product += np.array(c, np.float32).reshape(m, n)
        elif fault == "one ulp":
            product[m // 2, n // 2] = np.nextafter(product[m // 2, n // 2], np.float32(np.inf))
        c[:] = product.ravel().tolist()

    return sgemm


def test_a_right_product_passes():
    assert blas.product_is_right(faulty_sgemm(None), 5, 7, 11)


@pytest.mark.parametrize("fault", ["left", "right", "depth", "last column", "adds to c", "one ulp"])
def test_a_wrong_product_is_seen(fault):
    assert not blas.product_is_right(faulty_sgemm(fault), 5, 7, 11)


# --- trying a library


@LINUX
def test_a_right_library_serves_and_becomes_global(build):
    path = build("right", RIGHT + "int foredraft_test_mark(void) { return 41; }\n")
    code = (  # in a process of its own: what is once global stays so
        "import ctypes, sys; from kernels import blas; blas.open_globally(blas.Blas('', sys.argv[1], ''))\n"
        "print(ctypes.CDLL(None).foredraft_test_mark())"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=blas.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "41"


@LINUX
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (WRONG, "wrong float32 product"),
        (CRASHING, "died of SIG"),
        (WIDE, "64-bit indices"),
        (HEAD, "exports no cblas_sgemm"),
    ],
    ids=["wrong", "crashing", "wide", "incomplete"],
)
def test_a_library_that_cannot_serve_is_refused_and_never_opened_here(build, source, why):
    path = build("bad", source + "int foredraft_bad_mark(void) { return 1; }\n")
    with pytest.raises(blas.Unusable, match=why):
        blas.open_globally(candidate(path))
    assert not hasattr(ctypes.CDLL(None), "foredraft_bad_mark")


@LINUX
def test_a_file_that_is_no_library_is_refused(tmp_path):
    file = tmp_path / "text.so"
    file.write_text("not a library")
    with pytest.raises(blas.Unusable, match=r"file too short|invalid ELF header"):
        blas.open_globally(candidate(str(file)))


# --- the order


def test_the_order_is_explicit_mkl_pypi_system():
    assert [source.__name__ for source in blas.SOURCES] == ["explicit", "mkl", "pypi_openblas", "system_openblas"]


def test_the_first_that_serves_is_taken_and_the_others_before_it_say_why(monkeypatch):
    def broken(blas_found):
        if blas_found.path in {"one", "two"}:
            raise blas.Unusable(f"no good ({blas_found.path})")
        return blas_found

    def absent():
        raise blas.Unusable("not installed")

    monkeypatch.setattr(blas, "open_globally", broken)
    two_bad, good, never = (lambda: iter(map(candidate, ["one", "two"]))), (lambda: [candidate("three")]), None
    monkeypatch.setattr(blas, "SOURCES", (two_bad, absent, good, never))
    found, passed_over = blas.open_blas()
    assert found.path == "three"
    assert passed_over == ("one: no good (one)", "two: no good (two)", "not installed")


def test_nothing_found_is_none(monkeypatch):
    monkeypatch.setattr(blas, "SOURCES", (lambda: [],))
    assert blas.open_blas() == (None, ())


@LINUX
def test_a_named_library_that_cannot_serve_is_an_error_not_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_BLAS", str(tmp_path / "absent.so"))
    with pytest.raises(UserError, match=r"FOREDRAFT_BLAS=.*absent\.so: cannot open .*; expected a BLAS exporting"):
        blas.open_blas()


def test_an_unnamed_library_is_not_looked_for(monkeypatch):
    monkeypatch.delenv("FOREDRAFT_BLAS", raising=False)
    assert list(blas.explicit()) == []


def test_mkl_is_found_in_the_environment_once_per_file(monkeypatch, tmp_path):
    library = tmp_path / "lib" / "libmkl_rt.so.2"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "lib" / "libmkl_rt.so").symlink_to(library)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert [found.path for found in blas.mkl()][:1] == [str(library)]
    assert [found.path for found in blas.mkl()].count(str(library)) == 1


def test_mkl_with_64_bit_indices_is_refused(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("MKL_INTERFACE_LAYER", "GNU,ILP64")
    with pytest.raises(blas.Unusable, match="64-bit indices"):
        list(blas.mkl())


# --- the shim


def product(function, dtype, left, right):
    """left @ right by a CBLAS function, row-major, the right factor stored transposed."""
    (m, k), n = left.shape, right.shape[1]
    stored = np.ascontiguousarray(right.T)
    out = np.full((m, n), 3, dtype)
    real = {np.float32: ctypes.c_float, np.float64: ctypes.c_double}.get(dtype)
    one, zero = np.ones(1, dtype), np.zeros(1, dtype)
    scalars = [real(1), real(0)] if real else [ctypes.c_void_p(value.ctypes.data) for value in (one, zero)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (left, stored, out)]
    function(101, 111, 112, m, n, k, scalars[0], pointers[0], k, pointers[1], k, scalars[1], pointers[2], n)
    return out


@LINUX
@pytest.mark.parametrize(
    ("name", "dtype"), [("cblas_sgemm", np.float32), ("cblas_dgemm", np.float64), ("cblas_cgemm", np.complex64)]
)
def test_the_shim_multiplies_in_each_type(cache, openblas, name, dtype):
    if blas.find_compiler() is None:
        pytest.skip("no C compiler")
    library = ctypes.CDLL(str(blas.build_shim(openblas, "1")))
    rng = np.random.default_rng(5)  # small whole numbers: exact in every type, in any order of summing
    left, right = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((3, 11), (11, 7)))
    if dtype is np.complex64:
        left, right = left + 1j * left[::-1], right - 2j * right[::-1]
    want = np.zeros((3, 7), dtype)
    for i, j, p in np.ndindex(3, 7, 11):
        want[i, j] += left[i, p] * right[p, j]
    np.testing.assert_array_equal(product(getattr(library, name), dtype, left, right), want)


@pytest.fixture
def shim(cache, openblas):
    """The whole shim, loaded."""
    if blas.find_compiler() is None:
        pytest.skip("no C compiler")
    return ctypes.CDLL(str(blas.build_shim(openblas, "1")))


def sgemm(library, left, right, *, alpha=1, beta=0, apart=0):
    """alpha · left [M,K] · right [N,K]ᵀ + beta · 7, each row `apart` numbers further than it is long."""
    (M, K), N = left.shape, len(right)
    spread = [np.pad(value, [(0, 0), (0, apart)], constant_values=np.nan) for value in (left, right)]
    out = np.full((M, N + apart), 7, np.float32)
    pointers = [ctypes.c_void_p(value.ctypes.data) for value in (*spread, out)]
    scalars = ctypes.c_float(alpha), ctypes.c_float(beta)
    a, b, c = pointers
    library.cblas_sgemm(101, 111, 112, M, N, K, scalars[0], a, K + apart, b, K + apart, scalars[1], c, N + apart)
    assert (out[:, N:] == 7).all(), "written beside the product"
    return out[:, :N]


@LINUX
@pytest.mark.parametrize("K", [1, 15, 16, 70, 576])
@pytest.mark.parametrize("N", [3, 4, 5, 97, 260])
def test_few_rows_are_multiplied_as_in_float64(shim, N, K):
    rng = np.random.default_rng(N * K)
    right = rng.normal(size=(N, K)).astype(np.float32)
    for M in (1, 2, 3, 4, 5, 11, 16, 17):
        left = rng.normal(size=(M, K)).astype(np.float32)
        want = left.astype(np.float64) @ right.astype(np.float64).T
        for apart in (0, 3):
            assert np.abs(sgemm(shim, left, right, apart=apart) - want).max() < 3e-6 * K**0.5


@LINUX
def test_a_scaled_or_added_product_of_few_rows_is_forwarded(shim):
    rng = np.random.default_rng(2)
    left, right = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 33), (21, 33)))
    want = left.astype(np.float64) @ right.astype(np.float64).T
    np.testing.assert_allclose(sgemm(shim, left, right, alpha=2), 2 * want, atol=1e-5)
    np.testing.assert_allclose(sgemm(shim, left, right, beta=0.5), want + 3.5, atol=1e-5)


@LINUX
@pytest.mark.parametrize("K", [64, 70, 576])
def test_a_row_is_the_same_bits_however_many_are_multiplied_with_it(shim, K):
    if b"GOMP" not in pathlib.Path(shim._name).read_bytes():
        pytest.skip("this compiler made a shim that only forwards")
    rng = np.random.default_rng(K)
    left, right = (rng.normal(size=(rows, K)).astype(np.float32) for rows in (16, 1030))
    whole = sgemm(shim, left, right)
    for M in range(1, 16):
        np.testing.assert_array_equal(sgemm(shim, left[:M], right), whole[:M])
        np.testing.assert_array_equal(sgemm(shim, left[M : M + 1], right), whole[M : M + 1])


@LINUX
def test_numbers_that_are_none_stay_in_their_row(shim):
    left = np.ones((3, 40), np.float32)
    left[1, 5], right = np.nan, np.ones((9, 40), np.float32)
    found = sgemm(shim, left, right)
    assert np.isnan(found[1]).all() and (found[[0, 2]] == 40).all()


@LINUX
def test_a_compiler_that_cannot_do_few_rows_makes_a_shim_that_forwards(cache, openblas, monkeypatch):
    if blas.find_compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(blas, "FULL", ("-fno-such-option", "-DFEW_ROWS"))
    path = blas.build_shim(openblas, "1")
    assert b"GOMP" not in path.read_bytes()
    ones = np.ones((2, 5), np.float32)
    assert (sgemm(ctypes.CDLL(str(path)), ones, ones) == 5).all()


@LINUX
def test_another_processor_gets_a_shim_of_its_own(cache, openblas, monkeypatch):
    monkeypatch.setattr(blas, "compile_shim", lambda library, out: out.write_bytes(b"made"))
    first = blas.build_shim(openblas, "1")
    monkeypatch.setattr(blas, "processor", lambda: "flags: another")
    assert blas.build_shim(openblas, "1") != first


@LINUX
def test_the_shim_is_compiled_once_and_again_for_another_version(cache, openblas, monkeypatch):
    compiled = []
    monkeypatch.setattr(blas, "compile_shim", lambda library, out: (compiled.append(out), out.write_bytes(b"made")))
    first = blas.build_shim(openblas, "1")
    assert blas.build_shim(openblas, "1") == first
    assert blas.build_shim(openblas, "2") != first
    assert len(compiled) == 2
    assert sorted(path.read_bytes() for path in cache.iterdir()) == [b"made"] * 2, "nothing temporary may stay behind"


def test_a_failed_compilation_leaves_nothing(cache, openblas, tmp_path, monkeypatch):
    (tmp_path / "no.c").write_text("this is no C")
    monkeypatch.setattr(blas, "SHIM", tmp_path / "no.c")
    if blas.find_compiler() is None:
        pytest.skip("no C compiler")
    with pytest.raises(blas.Unusable, match="failed on its shim"):
        blas.build_shim(openblas, "1")
    assert list(cache.iterdir()) == []


def test_without_a_compiler_the_reason_names_it(cache, openblas, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(blas.Unusable, match="no C compiler"):
        blas.build_shim(openblas, "1")


def test_an_unwritable_cache_is_named_with_its_variable(openblas, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(blas.Unusable, match="set FOREDRAFT_CACHE"):
        blas.build_shim(openblas, "1")


def test_the_cache_folder_follows_its_variables(monkeypatch):
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert blas.cache_folder() == pathlib.Path("/x/foredraft")
    monkeypatch.setenv("FOREDRAFT_CACHE", "/y")
    assert blas.cache_folder() == pathlib.Path("/y")
    monkeypatch.setenv("FOREDRAFT_CACHE", "~/z")
    assert blas.cache_folder() == pathlib.Path.home() / "z"


def test_without_a_home_folder_the_variable_decides_or_is_asked_for(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("FOREDRAFT_CACHE", "/y")
    assert blas.cache_folder() == pathlib.Path("/y")
    monkeypatch.delenv("FOREDRAFT_CACHE")
    with pytest.raises(UserError, match="set FOREDRAFT_CACHE"):
        blas.cache_folder()
