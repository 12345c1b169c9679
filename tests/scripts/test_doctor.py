"""Each finding against an environment made to deserve it, and the command as a person runs it."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import types

import doctor
import pytest

import edge
import traps
from kernels import backend, selfcheck, verdicts
from kernels.errors import UserError


@pytest.fixture
def site(tmp_path, monkeypatch):
    """install(name, version, **files): an imitation of an installed distribution, beside the real environment."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def install(name, version, commands=(), packages=()):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("\n".join(packages))
        (info / "entry_points.txt").write_text("[console_scripts]\n" + "".join(f"{c} = x:y\n" for c in commands))
        for package in packages:
            (folder / package).mkdir()
            (folder / package / "__init__.py").touch()

    return install


def versions(monkeypatch, **found):
    """Let the environment hold exactly these distributions (underscores for hyphens)."""
    found = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(backend, "version_of", found.get)


# --- traps


def test_front_and_backend_of_different_versions_are_bad(monkeypatch):
    versions(monkeypatch, mlx="0.32.4", mlx_cpu="0.32.3")
    found = traps.check_wheels()
    assert found.level == "bad"
    assert "0.32.4" in found.text and "mlx-cpu is 0.32.3" in found.text
    assert "mlx-cpu==0.32.4" in found.remedy


def test_two_backend_wheels_are_bad_and_the_serving_one_is_named(monkeypatch):
    versions(monkeypatch, mlx="0.32.4", mlx_cpu="0.32.4", mlx_cuda_13="0.32.4")
    monkeypatch.setattr(backend, "owns_libmlx", lambda wheel: wheel == "mlx-cuda-13")
    found = traps.check_wheels()
    assert (found.level, "mlx-cuda-13 lies over mlx-cpu" in found.text) == ("bad", True)


@pytest.mark.parametrize("found", [{"mlx": "0.32.4"}, {}], ids=["front alone", "nothing"])
def test_a_missing_backend_wheel_is_bad(monkeypatch, found):
    versions(monkeypatch, **found)
    assert traps.check_wheels().level == "bad"


def test_matching_wheels_are_fine(monkeypatch):
    versions(monkeypatch, mlx="0.32.4", mlx_metal="0.32.4")
    assert traps.check_wheels().level == "ok"


def test_a_command_offered_twice_names_both_distributions(site):
    site("dflash", "0.1.0", commands=["dflash-serve"])
    site("dflash-mlx", "0.1.8", commands=["dflash-serve", "dflash-bench"])
    found = traps.check_commands()
    assert found.level == "warn"
    assert "`dflash-serve` from dflash and dflash-mlx" in found.text
    assert "dflash-bench" not in found.text


@pytest.mark.parametrize("room", traps.ROOMS)
def test_another_distribution_that_owns_a_room_is_bad(site, monkeypatch, room):
    site("somebody-elses", "1.0", packages=[room])
    monkeypatch.setattr(sys, "path", [str(edge.ROOT), *sys.path])  # ours is imported, theirs is hidden
    found = traps.check_names()
    assert (found.level, f"`{room}` also belongs to somebody-elses" in found.text) == ("bad", True)


@pytest.mark.parametrize("room", traps.ROOMS)
def test_a_room_imported_from_elsewhere_is_bad(site, monkeypatch, room):
    monkeypatch.delitem(sys.modules, room, raising=False)
    site("somebody-elses", "1.0", packages=[room])
    found = traps.check_names()
    assert (found.level, f"`{room}` is imported from" in found.text) == ("bad", True)


def test_transformers_mistaking_our_kernels_is_bad(monkeypatch):
    from transformers.utils import import_utils

    assert traps.check_transformers().level == "ok"
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    assert traps.check_transformers().level == "bad"


# --- the target's architecture


@pytest.fixture
def model(tmp_path):
    """write(config): a folder whose config.json holds that text."""

    def write(config):
        (tmp_path / "config.json").write_text(config)
        return str(tmp_path)

    return write


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "mistral"])  # mistral: a name that mlx-lm maps to llama
def test_a_known_architecture_is_fine(model, kind):
    assert traps.check_target(model(json.dumps({"model_type": kind}))).level == "ok"


def test_an_architecture_unknown_to_everyone_says_newer_than_what_is_here(model):
    found = traps.check_target(model('{"model_type": "qwen17"}'))
    assert found.level == "bad"
    assert f"newer than {backend.version_of('mlx-lm')}" in found.remedy


def test_an_architecture_that_a_later_mlx_lm_has_names_the_version(model, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "qwen3_5" in name else real(name))
    found = traps.check_target(model('{"model_type": "qwen3_5"}'))
    assert (found.level, "0.30.7" in found.remedy) == ("bad", True)


def test_every_architecture_in_the_table_exists():
    assert [kind for kind in traps.KNOWN_SINCE if not importlib.util.find_spec(f"mlx_lm.models.{kind}")] == []


@pytest.mark.parametrize(("config", "words"), [("{", "not JSON"), ("[3]", "expected an object")])
def test_a_damaged_config_is_refused_by_name(model, config, words):
    with pytest.raises(UserError, match=words):
        traps.check_target(model(config))


def test_a_config_without_a_type_is_bad(model):
    assert traps.check_target(model("{}")).level == "bad"


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        traps.check_target(str(tmp_path))


# --- the rest


@pytest.mark.parametrize("version", [None, "0.1"])
def test_a_missing_or_outdated_requirement_is_named_with_its_range(monkeypatch, version):
    real = backend.version_of
    monkeypatch.setattr(backend, "version_of", lambda name: version if name == "hydra-core" else real(name))
    found = doctor.check_requirements()
    assert found.level == "bad"
    assert f"hydra-core {version or 'missing'} (expected" in found.text


@pytest.mark.parametrize(("free", "level"), [(1 << 30, "warn"), (64 << 30, "ok"), (None, "ok")])
def test_little_memory_is_warned_of(monkeypatch, free, level):
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    assert doctor.check_memory().level == level


@pytest.mark.parametrize(("device", "value", "level"), [("cuda", "1", "warn"), ("cuda", "0", "ok"), ("cpu", "1", "ok")])
def test_tf32_left_on_is_warned_of_where_it_matters(monkeypatch, device, value, level):
    monkeypatch.setenv("MLX_ENABLE_TF32", value)
    seen = backend.Backend(device, "a test", backend.Blas("none", None, ""), True, backend.tf32_state(device))
    monkeypatch.setattr(backend, "load", lambda: seen)
    assert doctor.check_tf32().level == level


# --- kernels (that a refused kernel's reason is told is in tests/kernels/test_selfcheck.py)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU, with no verdict yet."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)


def test_a_slow_kernel_is_told_but_no_reason_to_warn(gpu):
    assert doctor.check_kernels().text == "none measured: loading a target does"
    verdicts.record("gated_delta.step", "float32", "use", "21 us, 52 us without it")
    verdicts.record("causal_conv.fused", "float32", "slow", "9 us, 8 us without it")
    found = doctor.check_kernels()
    assert (found.level, found.remedy) == ("ok", "")
    first, *rest = (line.strip() for line in found.text.splitlines())
    assert first.startswith("1 of 2 measured on ")
    assert rest == [
        "causal_conv.fused [float32] slow: 9 us, 8 us without it",
        "gated_delta.step [float32] use: 21 us, 52 us without it",
    ]


@pytest.mark.parametrize(("target", "sound"), [(None, True), ("a name", True), ("a name", False)])
def test_selfcheck_measures_again_at_the_shapes_asked_for(gpu, monkeypatch, target, sound):
    from drafter import steps, trial
    from drafter import target as targets

    seen, step = [], types.SimpleNamespace(sound=sound)
    loaded = types.SimpleNamespace(backbone=None)
    monkeypatch.setattr(targets, "load", lambda name: vars(loaded).update(model=(name, verdicts.chosen())) or loaded)
    monkeypatch.setattr(selfcheck, "dims_of", lambda model: model)
    monkeypatch.setattr(selfcheck, "run", lambda dims, again: seen.append((dims, again)))
    monkeypatch.setattr(steps, "for_model", lambda model, backbone: step)
    monkeypatch.setattr(trial, "judge", lambda target, step: seen.append((target, step)))
    doctor.measure_kernels(target)
    kernels = (target, {"off"}) if target else selfcheck.EXAMPLE  # nothing is measured while loading
    assert seen == [(kernels, True)] + [(loaded, step)] * bool(target and sound)


def test_selfcheck_on_a_cpu_has_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(verdicts, "on_gpu", lambda: False)
    monkeypatch.setattr(selfcheck, "run", None)
    doctor.measure_kernels(None)
    assert "kernels run on GPUs only" in capsys.readouterr().out


def test_every_check_runs_here_and_gives_a_remedy_unless_all_is_well():
    for name, check in doctor.CHECKS.items():
        found = check()
        assert found.level in {"ok", "warn", "bad"}, name
        assert bool(found.remedy) == (found.level != "ok"), name


@pytest.mark.parametrize(("level", "status"), [("warn", "done"), ("bad", "failed")])
def test_only_what_is_bad_fails(level, status):
    closing = doctor.close({"a": doctor.Finding("ok", "x"), "b": doctor.Finding(level, "y", "z")}, {}, None)
    assert (closing["status"], closing["ok"], closing[level]) == (status, 1, 1)


# --- the command


def doctor_run(*argv):
    command = [sys.executable, str(edge.ROOT / "scripts" / "doctor.py"), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done, json.loads(done.stdout.splitlines()[-1])


def test_the_command_reports_and_writes_the_same_findings(tmp_path):
    done, closing = doctor_run("--out", tmp_path / "doctor.json")
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert done.returncode == {"done": 0, "failed": 1}[closing["status"]]
    assert {key: written[key] for key in closing} == closing
    assert set(written["findings"]) == set(doctor.CHECKS)
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--bals",), "did you mean --blas?"),
        (("--target", "smollm3000"), "smollm3000"),
        (("--out", "/dev/null/doctor.json"), "/dev/null"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(argv, words):
    done, closing = doctor_run(*argv)
    assert (done.returncode, closing["status"]) == (2, "refused")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel brings a reference BLAS")
def test_the_product_is_at_least_15_times_faster_than_the_stock_wheels():
    _, closing = doctor_run("--blas")
    if not backend.load().tuned or backend.load().device != "cpu":
        pytest.skip("no tuned BLAS under MLX here")
    assert closing["shape"] == [64, 576, 49152]
    assert closing["ratio"] >= 15
    assert pathlib.Path(backend.load().blas.path).exists()
