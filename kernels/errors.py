"""The one exception that stands for a mistake the person at the keyboard can mend, and a fault of MLX's that is one."""

import os
import re

# What MLX says where g++ fails, or where it cannot write what g++ is to compile (it looks for a temporary folder).
UNCOMPILED = re.compile(r"\[Compile::eval_cpu\]|filesystem error: .*(temp_directory_path|/mlx/)")
FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # what names that folder, to C++
LONGEST = 200  # characters of a compiler's words that are kept


class UserError(ValueError):
    """One line: what is wrong, what was found, what was expected, and the next step.

    Commands print it without a traceback and exit with code 2; library callers may catch it as a ValueError.
    """


def compiler_fault(error):
    """One line for an error of MLX's that says it could not compile a pass for this CPU; None for any other."""
    text = str(error)
    if not UNCOMPILED.search(text):
        return None
    found = text.rsplit("the output is:", maxsplit=1)[-1].strip().splitlines() or ["no word"]
    words = next((line for line in found if "error" in line), found[-1])[:LONGEST]
    folder = next(filter(None, map(os.environ.get, FOLDERS)), "/tmp")
    return (
        f"MLX could not compile a pass for this CPU ({words}); see that g++ compiles C++ and that you may write to "
        f"{folder}/mlx, or name another folder in TMPDIR, or set MLX_DISABLE_COMPILE=1, which is slower"
    )
