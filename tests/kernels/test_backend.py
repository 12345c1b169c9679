"""What load() decides in a fresh process, and how a device is recognised. Processes are real; wheels are imitations."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kernels import backend

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ON_CPU = sys.platform == "linux" and backend.serving_wheel() == "mlx-cpu"
LINUX = pytest.mark.skipif(not ON_CPU, reason="only a Linux CPU needs a BLAS put under MLX")
UNTOUCHED = "import sys; import kernels, kernels.backend; print(any(name.startswith('mlx') for name in sys.modules))"


def fresh(code, **variables):
    """Run code in a fresh interpreter at the checkout's root, FOREDRAFT_BLAS unset unless given."""
    environment = {key: value for key, value in os.environ.items() if key != "FOREDRAFT_BLAS"} | variables
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """install(name, version, libmlx=None): an imitation of an installed wheel, in an otherwise empty environment."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name, version, libmlx=None):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        library = tmp_path / "mlx" / "lib" / "libmlx.so"
        if libmlx is not None:
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(libmlx)
        (info / "RECORD").write_text(f"mlx/lib/libmlx.so,,{len(libmlx or b'')}\n")

    return install


def test_importing_the_room_loads_nothing():
    assert fresh(UNTOUCHED).stdout.strip() == "False"


@LINUX
def test_load_puts_its_library_in_front_before_mlx_and_says_which():
    done = fresh(
        "import ctypes, sys; from kernels import backend\n"
        "found = backend.load(); assert found is backend.load() is backend.check()\n"
        "assert 'mlx.core' not in sys.modules\n"
        "if not found.tuned: print('none'); sys.exit()\n"
        "mine = ctypes.CDLL(found.blas.path).cblas_sgemm; front = ctypes.CDLL(None).cblas_sgemm\n"
        "address = lambda function: ctypes.cast(function, ctypes.c_void_p).value\n"
        "print(address(mine) == address(front), found.blas.reason != '')"
    )
    assert not done.returncode, done.stderr
    if done.stdout.strip() == "none":
        pytest.skip("no tuned BLAS on this machine")
    assert done.stdout.strip() == "True True"


@LINUX
@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import mlx.core", ("mlx was imported first", "call kernels.backend.load() before importing mlx")),
        ("from kernels import blas; blas.SOURCES = ()", ("no tuned library", "pip install scipy-openblas32")),
        (
            "from kernels import blas\ndef source(): raise blas.Unusable('its shim cannot be written')\n"
            "blas.SOURCES = (source,)",
            ("no tuned library was found; its shim cannot be written;", "pip install scipy-openblas32"),
        ),
    ],
    ids=["mlx first", "none found", "passed over"],
)
def test_the_stock_blas_is_warned_of_once_with_the_remedy(before, words):
    after = "from kernels import backend; [backend.load() for _ in range(3)]; found = backend.load()"
    done = fresh(f"{before}\n{after}; print(found.blas.name, found.tuned)")
    assert done.stdout.split() == ["stock", "False"]
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words)


@LINUX
def test_the_stock_blas_by_choice_is_not_warned_of():
    done = fresh("from kernels import backend; print(backend.load().blas.name)", FOREDRAFT_BLAS="stock")
    assert (done.stdout.strip(), done.stderr) == ("stock", "")


@LINUX
def test_a_broken_choice_is_refused_by_name():
    done = fresh("from kernels import backend; backend.load()", FOREDRAFT_BLAS="/proc/version")
    assert done.returncode == 1
    assert "UserError: FOREDRAFT_BLAS=/proc/version" in done.stderr


def test_describe_is_plain_data_that_agrees_with_mlx():
    import mlx.core as mx

    seen = json.loads(json.dumps(backend.describe()))
    assert (seen["device"] == "cpu") == (mx.default_device().type == mx.DeviceType.cpu)
    assert set(seen) == {"device", "device_name", "reason", "blas", "tf32", "versions"}
    assert seen["versions"]["mlx"] == mx.__version__
    assert set(seen["blas"]) == {"name", "path", "reason"}


@pytest.mark.parametrize(
    ("device", "value", "state"),
    [("cuda", None, "on"), ("cuda", "1", "on"), ("cuda", "0", "off"), ("metal", "0", "off"), ("cpu", None, "unused")],
)
def test_tf32_is_on_unless_switched_off(monkeypatch, device, value, state):
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if value:
        monkeypatch.setenv("MLX_ENABLE_TF32", value)
    assert backend.tf32_state(device) == state


@LINUX
@pytest.mark.parametrize(
    ("wheel", "driver", "device"),
    [("mlx-cpu", True, "cpu"), ("mlx-cuda-13", True, "cuda"), ("mlx-cuda-12", False, "cpu")],
)
def test_the_device_follows_the_wheel_and_the_driver(site, monkeypatch, wheel, driver, device):
    site(wheel, "0.32.9")
    monkeypatch.setattr(backend, "has_nvidia_driver", lambda: driver)
    found, reason = backend.find_device()
    assert found == device
    assert f"{wheel} 0.32.9" in reason


@LINUX
def test_without_a_wheel_the_reason_says_so(site):
    assert backend.find_device() == ("cpu", "no MLX backend wheel is installed")


def test_of_two_wheels_the_one_whose_library_lies_there_counts(site):
    site("mlx-cpu", "0.32.9", b"cpu")
    site("mlx-cuda-13", "0.32.9", b"the cuda one")
    assert backend.installed_wheels() == ["mlx-cpu", "mlx-cuda-13"]
    assert backend.serving_wheel() == "mlx-cuda-13"
