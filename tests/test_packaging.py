"""The distribution, its names and its paperwork: what is declared is what is there."""

import ast
import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("drafter", "decode", "kernels")
NOTICES = (ROOT / "THIRD_PARTY.md").read_text()
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # SHA-256 of the text at apache.org

# Transformers takes a package called `kernels` for the hub's if it finds one of 0.18 or later.
PROBE = """
import importlib, json
for name in {order}:
    importlib.import_module(name)
from transformers.utils import is_kernels_available
import drafter, decode, kernels
rooms = (drafter, decode, kernels)
print(is_kernels_available(), any(hasattr(room, "__version__") for room in rooms), kernels.__file__)
"""


def installed():
    """Whether the distribution is installed here, as `make test` does; a bare checkout is fine too."""
    try:
        return bool(importlib.metadata.version("foredraft"))
    except importlib.metadata.PackageNotFoundError:
        return False


# --- names


@pytest.mark.parametrize("where", ["checkout", "installed"])
@pytest.mark.parametrize("first", [("mlx_lm", "transformers"), ROOMS], ids=["theirs first", "ours first"])
def test_transformers_and_mlx_lm_live_with_our_kernels(where, first, tmp_path):
    if where == "installed" and not installed():
        pytest.skip("foredraft is not installed in this environment")
    last = ROOMS if first != ROOMS else ("transformers", "mlx_lm")
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(order=(*first, *last))],
        cwd=ROOT if where == "checkout" else tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["False", "False"]
    assert pathlib.Path(done.stdout.split()[2]).parent == ROOT / "kernels"


def test_the_rooms_do_nothing_when_imported():
    for room in (*ROOMS, "decode/lab"):
        body = ast.parse((ROOT / room / "__init__.py").read_text()).body
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), room


def test_the_version_stays_below_the_one_transformers_looks_for():
    from transformers.utils import import_utils

    def numbers(version):
        return tuple(map(int, version.split(".")[:2]))

    assert PROJECT["project"]["name"] == "foredraft"
    assert numbers(PROJECT["project"]["version"]) < (0, 18)
    assert numbers(import_utils.KERNELS_MIN_VERSION) >= (0, 18)


# --- what is declared


def test_the_packages_declared_are_the_packages_there():
    there = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for r in ROOMS
        for path in ROOT.glob(f"{r}/**/__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == there


def requirement_names():
    """The distributions that pyproject.toml requires at run time."""
    return {re.match(r"[\w.-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]}


def test_every_library_imported_is_required():
    owners = importlib.metadata.packages_distributions()
    used = {}
    for path in (path for room in (*ROOMS, "scripts") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            used |= {module.split(".")[0]: path.relative_to(ROOT) for module in modules}
    ours = {*ROOMS, *(path.stem for path in (ROOT / "scripts").glob("*.py"))}
    libraries = set(used) - set(sys.stdlib_module_names) - ours
    extras = {"packaging": "dev", "matplotlib": "report"}  # doctor.py and report say themselves when one is missing
    for name, extra in extras.items():
        assert any(line.startswith(name) for line in PROJECT["project"]["optional-dependencies"][extra])
    declared = requirement_names() | set(extras) | {"torch"}  # time_training.py's, which says itself when it is missing
    undeclared = {
        name: str(used[name])
        for name in libraries
        if not declared & {owner.lower().replace("_", "-") for owner in owners.get(name, [name])}
    }
    assert undeclared == {}


def test_the_installed_versions_are_in_the_declared_ranges():
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    needed = [each for each in needed if each.marker is None or each.marker.evaluate()]
    versions = {each.name: importlib.metadata.version(each.name) for each in needed}
    assert {each.name: versions[each.name] for each in needed if versions[each.name] not in each.specifier} == {}


# --- paperwork


def test_the_licence_is_apache_2():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_every_required_library_is_listed_with_a_licence():
    rows = [line for line in NOTICES.splitlines() if line.startswith("|")]
    unlisted = [name for name in requirement_names() if not any(re.search(rf"\b{name}\b", row) for row in rows)]
    assert unlisted == []


@pytest.mark.parametrize("folder", ["decode/lab/prompts", "configs/target"])
def test_every_shipped_prompt_set_and_target_is_listed(folder):
    names = [path.stem for path in (ROOT / folder).iterdir() if path.suffix in {".jsonl", ".yaml"}]
    assert names
    assert [name for name in names if name.lower() not in NOTICES.lower()] == []


def test_every_paper_cited_in_the_code_is_listed():
    cited = {
        number
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for number in re.findall(r"arXiv[: ]+(\d{4}\.\d{5})", path.read_text())
    }
    assert {number for number in cited if number not in NOTICES} == set()


# --- commands


def make(*words):
    """What make would do, without doing it."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["quickstart", "test", "test-all", "lint"])
def test_every_target_makes_the_environment_when_it_is_missing(target):
    assert "scripts/venv.sh cuda12" in make(target, "BACKEND=cuda12")


def test_quickstart_trains_measures_and_closes_with_the_manifests():
    steps = [line for line in make("quickstart").splitlines() if "python scripts/" in line]
    assert [re.search(r"scripts/(\w+)\.py", step)[1] for step in steps] == [
        "train",
        "spec_decode",
        "spec_decode",
        "manifest",
    ]
    assert all("sed '$d'" in step for step in steps[:-1])
    assert steps[-1].endswith("manifest.py verify --all")


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("runs/quickstart/1/metrics.jsonl", True),
        ("runs/quickstart/1/step-5/model.safetensors", True),
        ("runs/quickstart/1/manifest.json", True),
        ("runs/smollm2-135m-dflash/model.safetensors", False),
        ("runs/synthesis/smollm2-135m/answers.jsonl.gz", False),
        ("runs/benchmarks/ksweep.json", False),
        (".venv/bin/python", True),
        (".device/site.tar.xz", True),
        ("kernels/__pycache__/blas.cpython-311.pyc", True),
        ("kernels/blas.py", False),
    ],
)
def test_git_keeps_results_and_leaves_outputs(path, ignored):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT)
    assert (done.returncode == 0) == ignored
