"""Against another project's decoder: the published `dflash` 0.1.0 wheel on MLX, given the same drafter and prompts.

Needs the wheel unpacked somewhere of its own, where it disturbs nothing:

    pip install --no-deps --target FOLDER dflash==0.1.0
    FOREDRAFT_DFLASH_WHEEL=FOLDER pytest -m slow tests/decode/test_published_wheel.py

Compared are the proposals and the committed tokens, and so τ, of every cycle that has room for a whole block. Nearer
the cap the wheel drafts a shorter block, where this project drafts the trained one and uses its head.
"""

import json
import os
import subprocess
import sys

import mlx.core as mx
import pytest

from decode.cycle import decode
from decode.lab import prompts
from decode.proposers import DFlashProposer
from decode.schedule import Fixed
from drafter import checkpoint
from kernels import backend

WHEEL = os.environ.get("FOREDRAFT_DFLASH_WHEEL")
DRAFTER = "runs/smollm2-135m-dflash"
BLOCK, CAP = 8, 48

# Runs in a process of its own. The hub is the only thing replaced: the drafter's folder is here already. With `ordered`
# the wheel's sliding context is kept in order: as published, a cycle that commits one row leaves its ring buffer
# rotated, and the window is then cut by place in the buffer, not by position.
WHEEL_SIDE = """
import ctypes, json, sys
target, drafter, prompts, out, block, cap, blas, ordered = json.loads(sys.argv[1])
if blas:
    ctypes.CDLL(blas, mode=ctypes.RTLD_GLOBAL)
import mlx.core as mx
import dflash.model_mlx as wheel
wheel.snapshot_download = lambda path, **_: path
if ordered:
    class Ordered(wheel.RotatingKVCache):
        def update_and_fetch(self, keys, values):
            return self._update_concat(keys, values)
    wheel.RotatingKVCache = Ordered
model, tokenizer = wheel.load(target)
draft = wheel.load_draft(drafter)
proposed, compute = [], draft.compute_logits
def noting(hidden):
    logits = compute(hidden)
    proposed.append(mx.argmax(logits, axis=-1))
    return logits
draft.compute_logits = noting
result = []
for prompt in prompts:
    proposed.clear()
    stream = wheel.stream_generate(model, draft, tokenizer, mx.array(prompt), block_size=block, max_tokens=cap)
    steps = [list(response.tokens) for response in stream]
    result.append({"steps": [step for step in steps if step], "proposed": [row[0].tolist() for row in proposed]})
json.dump(result, open(out, "w"))
"""


class Noting(DFlashProposer):
    """Keeps what it proposed."""

    def propose(self, pending, count):
        proposal = super().propose(pending, count)
        self.noted.append(proposal.tokens.tolist())
        return proposal


def ours(target, drafter, tokens):
    """(tokens of each step, proposals of each cycle) of this project."""
    proposer = Noting(target, drafter, BLOCK)
    proposer.noted = []
    steps = decode(target, tokens, proposer, Fixed(BLOCK), max_tokens=CAP, eos_ids=target.eos_ids)
    return [list(step.tokens) for step in steps if step.tokens], proposer.noted


def theirs(target, folder, tokens, tmp_path, ordered):
    """The same of the wheel, for all prompts at once."""
    out = tmp_path / "wheel.json"
    arguments = [str(target.path), str(folder), tokens, str(out), BLOCK, CAP, backend.load().blas.path, ordered]
    environment = os.environ | {"PYTHONPATH": WHEEL}
    subprocess.run([sys.executable, "-c", WHEEL_SIDE, json.dumps(arguments)], env=environment, check=True)
    return [(row["steps"], row["proposed"]) for row in json.loads(out.read_text())]


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL, reason="FOREDRAFT_DFLASH_WHEEL names no folder with the dflash 0.1.0 wheel")
@pytest.mark.parametrize(
    ("sliding", "window", "ordered"),
    [(False, None, False), (True, 2048, False), (True, 48, True)],
    ids=["full attention", "one sliding layer", "one sliding layer, window shorter than the text"],
)
def test_the_published_decoder_proposes_and_commits_the_same(smollm2, tmp_path, sliding, window, ordered):
    trained = checkpoint.load_drafter(DRAFTER, smollm2).drafter
    checkpoint.save_drafter(tmp_path, trained)  # the wheel reads no quantised weights
    config = json.loads((tmp_path / "config.json").read_text())
    if sliding:
        config["layer_types"][2], config["sliding_window"] = "sliding_attention", window
        (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = checkpoint.load_drafter(tmp_path, smollm2, allow_mismatch=True).drafter
    assert all(value.dtype == mx.float32 for value in (drafter.fc.weight, drafter.norm.weight))
    texts = [*prompts.load("suite", limit=2).prompts, *prompts.load("gsm8k", limit=2).prompts]
    tokens = [smollm2.encode(prompt.text) for prompt in texts]
    answers = theirs(smollm2, tmp_path, tokens, tmp_path, ordered)
    for row, (their_steps, their_proposals) in zip(tokens, answers, strict=True):
        our_steps, our_proposals = ours(smollm2, drafter, row)
        whole = sum(len(proposal) == BLOCK - 1 for proposal in our_proposals)
        assert whole > 5
        assert our_proposals[:whole] == their_proposals[:whole]
        assert our_steps[: whole + 1] == their_steps[: whole + 1]  # the first is prefill's token
        assert sum(our_steps, []) == sum(their_steps, [])
