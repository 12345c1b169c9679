"""The processes of one job: whose part of a batch is which, and the sums and facts they share.

`mlx.launch -n N scripts/train.py …` starts N ranks that hold the same weights. Each runs its part of a step's rows;
Σ w·loss, Σ w and their gradients are summed over ranks before the one is divided by the other, since ranks hold
different supervised weight (a mean of means would be another objective). All ranks then take the same step. Every rank
makes the same calls here in the same order; whatever depends on one machine alone (a clock, a folder, a signal) is
rank 0's, or agreed on.
"""

import dataclasses
import re

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from kernels.errors import UserError

TOLD = 4096  # bytes of a text that rank 0 tells (assumed: more than a path and a few digests)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self):
        """Whether this rank is the one that writes, prints and evaluates."""
        return self.rank == 0

    def part(self, count):
        """This rank's slice of `count` rows; parts differ by at most one row and follow each other."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def total(self, tree):
        """A tree of float32 arrays summed over ranks, in one reduction; tuples come back as lists."""
        if self.size == 1:
            return tree
        names, arrays = zip(*tree_flatten(tree))
        flat = mx.distributed.all_sum(mx.concatenate([array.reshape(-1) for array in arrays]))
        ends = np.cumsum([array.size for array in arrays])[:-1].tolist()
        pieces = (piece.reshape(array.shape) for piece, array in zip(mx.split(flat, ends), arrays))
        return tree_unflatten(list(zip(names, pieces)))

    def share(self, arrays):
        """{name: array} as rank 0 holds them; every rank gives the same names, shapes and dtypes."""
        if self.size == 1:
            return arrays
        shared = {}
        for name, array in arrays.items():
            shared[name] = mx.distributed.all_sum(array if self.writes else mx.zeros_like(array))
            mx.eval(shared[name])  # one at a time: what ranks sum must follow one order
        return shared

    def told(self, text):
        """The text that rank 0 gives, of at most TOLD bytes."""
        line = text.encode().ljust(TOLD, b"\0")
        found = self.share({"text": mx.array(np.frombuffer(line, np.uint8).astype(np.int32))})["text"]
        return bytes(np.array(found).astype(np.uint8)).rstrip(b"\0").decode()

    def check_same(self, what, value):
        """Raise UserError on a rank whose value (text) is not rank 0's."""
        expected = self.told(value)
        if value != expected:
            raise UserError(f"rank {self.rank} has {what} {value}, rank 0 {expected}; give every rank the same {what}")

    def any(self, flag):
        """Whether the flag is set on any rank: how all of them stop at one step."""
        return bool(flag) if self.size == 1 else mx.distributed.all_sum(mx.array(int(flag))).item() > 0

    def wait(self):
        """Return when every rank got here."""
        self.any(False)


ALONE = Ranks()


def join():
    """The Ranks that a launcher started this process among, or ALONE. Raises UserError where they cannot be reached."""
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise UserError(
            f"this rank cannot reach the others ({error}); where another job holds the ports, give mlx.launch another "
            "--starting-port or --nccl-port"
        ) from error
    return Ranks(group.rank(), group.size())


def lost(error):
    """Whether a RuntimeError is MLX's about another rank that is gone."""
    return re.match(r"\[(ring|nccl|jaccl|mpi)\]", str(error)) is not None
