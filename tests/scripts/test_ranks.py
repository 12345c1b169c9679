"""scripts/train.py on two ranks, for real: mlx.launch, the ring, and what a killed or stuck rank does to the other."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import train

import edge
import tiny
from drafter import checkpoint, ranks
from drafter import manifest as manifests
from kernels.errors import UserError

STEPS, RATE = 6, 6e-4
BOUND = 2e-5  # of a tensor's largest value, float32: sums run in another order (measured: 1.1e-5)
STRAY = 1e-3  # share of weights that may miss it, by a step: Adam takes the sign even of a gradient that is rounding
SETTINGS = {
    "name": "small", "drafter.num_hidden_layers": 1, "drafter.block_size": 4, "drafter.intermediate_size": 64,
    "data.kind": "text", "data.row_tokens": 32, "data.validation_fraction": 0.2, "loss.rows_per_chunk": 64,
    "optimizer.learning_rate": RATE, "trainer.steps": STEPS, "trainer.rows_per_step": 3,
    "trainer.anchors_per_row": 4, "trainer.validate_every": STEPS, "trainer.validation_rows": 2,
    "trainer.save_every": 2, "trainer.walk_documents": 1, "trainer.walk_tokens": 3,
}  # fmt: skip
# Tells where each rank is, and is scripts/train.py for the rest.
RANK = """
import os, pathlib, runpy, sys
pathlib.Path(sys.argv[1], os.environ["MLX_RANK"]).write_text(str(os.getpid()))
sys.argv[:2] = ["scripts/train.py"]
sys.path.insert(0, "scripts")
runpy.run_path("scripts/train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """make(run, **changes): the words of a small run, all below one folder."""
    folder = tmp_path_factory.mktemp("ranks")
    words = " ".join(tiny.TEXT).split()
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(1).choice(words, 300)))
    own = {"target.source": tiny.folder("llama", folder), "data.sources": f"[{folder / 'text.txt'}]", "out": folder}

    def make(run, **changes):
        every = SETTINGS | own | {"run": run} | {key.replace("__", "."): value for key, value in changes.items()}
        return [f"{key}={value}" for key, value in every.items()]

    make.folder = folder / "small"
    return make


@pytest.fixture(scope="module")
def alone(arguments):
    """The run of one process: its folder."""
    train.main(arguments("alone"))
    return arguments.folder / "alone"


@pytest.fixture
def launch(tmp_path):
    """launch(argv): scripts/train.py on two ranks, started: a Popen; rank_pid(rank) finds a rank."""
    started = []

    def start(argv):
        command = [pathlib.Path(sys.executable).parent / "mlx.launch", "-n", "2", "--backend", "ring"]
        command += ["--starting-port", str(free_port()), "--", sys.executable, "-c", RANK, tmp_path, *argv]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, cwd=edge.ROOT, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    for file in tmp_path.glob("[01]"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def rank_pid(tmp_path, rank):
    return int((tmp_path / str(rank)).read_text())


def free_port():
    """A port that is free, as is the next one, a moment ago."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            try:
                two.bind(("127.0.0.1", one.getsockname()[1] + 1))
            except (OSError, OverflowError):
                continue
            return one.getsockname()[1]


def wait_for(path, process, seconds=100):
    """Return when a path is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def closing(out):
    """The one closing line of a job's output."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert len(lines) == 1, out
    return json.loads(lines[0])


def metrics(run):
    """{step: loss} of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_close(run, expected, step, other=None):
    """Weights and moments of a step agree within BOUND of each tensor's largest value, but for a few stray weights."""
    places = run / f"step-{step}", expected / f"step-{other or step}"
    found, wanted = (checkpoint.load_training(place)[0] for place in places)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        value, got = np.array(value, np.float64), np.array(found[name], np.float64)
        close = np.abs(got - value) <= BOUND * np.abs(value).max()
        assert close.mean() >= (1 - STRAY if name.startswith("parameters") else 1), name
        np.testing.assert_allclose(got, value, atol=RATE, rtol=0, err_msg=name)


def test_two_ranks_take_the_steps_of_one_process(arguments, alone, launch):
    """Three rows a step, so the ranks hold one and two, and unlike weights."""
    process = launch(arguments("two"))
    out, err = process.communicate(timeout=200)
    run = arguments.folder / "two"
    assert closing(out)["steps"] == STEPS, err[-3000:]
    assert out.count("device ") == 1
    assert metrics(run) == pytest.approx(metrics(alone), rel=1e-6)
    assert len(metrics(run)) == STEPS
    assert_close(run, alone, STEPS)
    with pytest.raises(AssertionError):  # two steps are far more than the bound
        assert_close(run, alone, STEPS, other=STEPS - 2)
    assert manifests.verify(run / f"step-{STEPS}").extra["ranks"] == 2


def test_a_killed_rank_ends_the_job_with_a_message_and_a_checkpoint_to_resume(arguments, alone, launch, tmp_path):
    process, run = launch(arguments("killed")), arguments.folder / "killed"
    wait_for(run / "latest", process)
    os.kill(rank_pid(tmp_path, 1), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    found = closing(out)
    good = checkpoint.newest_whole(run)
    assert found["status"] == "refused"
    assert f"the last good checkpoint is {good}; continue with the same command" in found["error"]
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {found['error']}"]
    assert "Traceback" not in err
    assert int(good.name.removeprefix("step-")) < STEPS
    assert train.main(arguments("killed", resume="auto"))["steps"] == STEPS  # on another number of ranks
    assert_close(run, alone, STEPS)
    assert sorted(metrics(run)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_one_ranks_interrupt_stops_both_at_the_same_step(arguments, launch, tmp_path):
    process, run = launch(arguments("interrupted")), arguments.folder / "interrupted"
    wait_for(run / "latest", process)
    os.kill(rank_pid(tmp_path, 1), signal.SIGINT)
    out, err = process.communicate(timeout=100)
    found = closing(out)
    assert found["status"] == "interrupted", err[-3000:]
    assert os.readlink(run / "latest") == f"step-{found['steps']}"


@pytest.mark.slow
def test_two_ranks_train_from_a_store_that_one_of_them_filled(arguments, launch):
    process = launch(arguments("stored", features__mode="cached", trainer__steps=2))
    out, err = process.communicate(timeout=200)
    assert closing(out)["steps"] == 2, err[-3000:]
    assert "15 rows are read, 0 computed" in out
    assert manifests.verify(arguments.folder / "features").kind == "features"


STUCK = """
import sys, time
sys.path.insert(0, "scripts")
import pathlib, session, types
from drafter import ranks
session.GRACE_SECONDS = 0.3
run = types.SimpleNamespace(run=pathlib.Path(sys.argv[1]), stop=False)
with session.interruptible(run, ranks.Ranks(0, 2)):
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""


def test_a_rank_that_waits_for_a_dead_one_is_ended_soon_after_the_launchers_signal(tmp_path):
    """NCCL's reductions wait for ever; this one sleeps, and is as deaf to Python's handlers."""
    command = [sys.executable, "-c", STUCK, tmp_path / "one"]
    process = subprocess.Popen(command, cwd=edge.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == edge.EXIT["interrupted"]
    assert "still waiting for another rank after 0.3 s; the last good checkpoint is none" in closing(out)["error"]
    assert "run=one and resume=auto" in err


# Refusals.


def test_fewer_rows_than_ranks_are_refused(arguments, monkeypatch):
    monkeypatch.setattr(ranks, "join", lambda: ranks.Ranks(0, 4))
    with pytest.raises(UserError, match="a step has 3 rows for 4 ranks; raise trainer.rows_per_step"):
        train.main(arguments("few"))
    assert not (arguments.folder / "few").exists()


def test_a_target_from_scratch_is_refused_on_several_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "join", lambda: ranks.Ranks(0, 2))
    with pytest.raises(UserError, match="trains in one process, not 2"):
        train.main(["+experiment=reference_hybrid", f"out={tmp_path}"])
