"""How many rows the next block has.

B block size: the pending token and B−1 slots. A schedule answers `block_size(remaining)` before each cycle and is told
each cycle's outcome by `observe`.
"""

from kernels.errors import UserError


class Fixed:
    """The same block size in every cycle, cut so that no cycle drafts past the last token wanted.

    block_size  B
    least       the smallest B the proposer can draft: 2 where slot 0 holds the pending token and predicts nothing
    most        the block size the drafter was trained at, or None where any will do
    Raises UserError for a B outside these.
    """

    def __init__(self, block_size, *, least=2, most=None):
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise UserError(f"block size {block_size!r}: expected a whole number, at least {least}")
        if block_size < least:
            raise UserError(
                f"block size {block_size}: a block holds the pending token and at least one proposal; "
                f"give {least} or more"
            )
        if most is not None and block_size > most:
            raise UserError(
                f"block size {block_size}: the drafter was trained at block size {most}; give {most} or less, "
                f"or train one at {block_size}"
            )
        self.size = block_size

    def block_size(self, remaining):
        """B of the next cycle when `remaining` ≥ 1 tokens can still be committed: a cycle commits at most B of them."""
        return min(self.size, remaining)

    def observe(self, cycle):
        """A fixed schedule learns nothing."""
