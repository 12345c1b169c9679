"""The one direction of imports: kernels <- drafter <- decode <- decode/lab <- scripts, and inside a room upwards only.

`ROOMS` is the architecture: rooms from the bottom up, and in each room its modules in order. A module may import from
every room below its own and from the modules listed before it in its own. A new module takes its place here first.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

ROOMS = {
    "kernels": """errors blas backend nvrtc host portable verdicts exponential fused_loss fused_weights plain_delta
        cpu_delta fused_delta gated_delta causal_conv causal_attention fused_layer block_attention fused_rows
        small_matmul selfcheck""",
    "drafter": """losses limits config rng ranks manifest anchors fingerprint gguf sources watch recurrent_cache
        cpu_layers hybrid packed layers steps trial target shapes heads dflash drafting shared_prefix
        gated_lora formats documents corpus overlap prompts batched answers sanity questions conversations journal
        synthesis features checkpoint release turns objective gated_objective flat trainer pieces recipes
        library ngram scratch appraisal pretrain variants""",
    "decode": "transaction verify proposers schedule cycle stream",
    "decode.lab": """prompts sensors health intervals statistics shown ties census arms timing walk cost layouts
        walked plain_torch training_cost experiment agreement transfer lengths controls factors calibration policies
        staging forecast criteria record tables plots figures page report""",
    "scripts": """edge traps tracking session pretraining train opening measuring evaluate layouts walking spec_decode
        time_training synthesize make_variant manifest doctor""",
}
RANKS = {
    (room, module): (depth, place)
    for depth, (room, modules) in enumerate(ROOMS.items())
    for place, module in enumerate(modules.split())
}


def sources():
    """(room, path) of every module in the five rooms."""
    return [(room, path) for room in ROOMS for path in sorted((ROOT / room.replace(".", "/")).glob("*.py"))]


def imported(source, room):
    """The (room, module) pairs that Python source text imports; room "scripts" imports its neighbours by bare name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "rooms import by full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    if room == "scripts":
        names += [f"scripts.{name.split('.')[0]}" for name in names]
    return {found for name in names if (found := place_of(name))}


def place_of(name):
    """The (room, module) that a dotted name lies in; None when it is in none of our rooms."""
    parts = name.split(".")
    for length in (len(parts) - 1, len(parts) - 2):
        if length > 0 and (".".join(parts[:length]), parts[length]) in RANKS:
            return ".".join(parts[:length]), parts[length]
    return None


def wrong_edges(room, module, source):
    """The imports in `source`, as the text of room.module, that do not point down or up the list."""
    depth, place = RANKS[room, module]
    ranks = {found: RANKS[found] for found in imported(source, room)}
    return sorted(found for found, (d, p) in ranks.items() if d > depth or (d == depth and p >= place))


@pytest.mark.parametrize(("room", "path"), sources(), ids=lambda value: getattr(value, "stem", value))
def test_every_import_points_down(room, path):
    if path.stem == "__init__":
        assert not imported(path.read_text(), room), f"{path}: a room's __init__ imports nothing"
        return
    assert (room, path.stem) in RANKS, f"{room}/{path.name} has no place in ROOMS; give it one"
    assert not wrong_edges(room, path.stem, path.read_text())


@pytest.mark.parametrize(
    ("room", "module", "source"),
    [
        ("kernels", "backend", "from drafter import rng"),
        ("kernels", "blas", "from kernels.backend import load"),
        ("drafter", "manifest", "import drafter.target"),
        ("drafter", "target", "def f():\n    from decode.lab import walk"),
        ("decode", "stream", "from decode.lab.arms import Arm"),
        ("decode.lab", "health", "from decode.lab import report"),
        ("scripts", "edge", "import doctor"),
    ],
)
def test_an_import_that_points_up_is_found(room, module, source):
    assert wrong_edges(room, module, source)


@pytest.mark.parametrize(
    ("room", "module", "source"),
    [
        ("drafter", "manifest", "from kernels import backend\nfrom drafter import rng"),
        ("decode.lab", "walk", "from decode import stream\nfrom drafter.target import Target\nimport statistics"),
        (
            "scripts",
            "doctor",
            "import edge\nimport traps\nfrom drafter import manifest\nfrom decode.lab import prompts",
        ),
    ],
)
def test_an_import_that_points_down_passes(room, module, source):
    assert imported(source, room)
    assert not wrong_edges(room, module, source)


def test_nothing_is_called_utils_or_common():
    assert not [path for _, path in sources() if path.stem in {"utils", "util", "common", "helpers", "misc"}]
