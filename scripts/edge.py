"""Where a command meets a person: argument errors, exit codes and the closing JSON line.

A command is `main(argv) -> dict`; it returns its closing figures with a `status` of "done" or "failed". Everything
a person reads goes before that line; logs go to standard error.
"""

import argparse
import difflib
import errno
import json
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout runs without being installed, and its rooms come before anyone's namesakes

from kernels.errors import UserError, compiler_fault  # noqa: E402  (the path comes first)

EXIT = {"done": 0, "failed": 1, "refused": 2, "interrupted": 130}

REMEDY = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "name a folder",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "choose a place you may write to, or change its permissions",
    errno.EPERM: "choose a place you may write to, or change its permissions",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EROFS: "choose a place that is not read-only",
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UserErrors that name the nearest option."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message):
        found = re.search(r"unrecognized arguments: (-\S+)", message)
        near = difflib.get_close_matches(found[1].split("=")[0], options(self), 1) if found else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{self.prog}: {message}{hint} (see {self.prog} --help)")


def options(parser):
    """Every option of a parser and of its sub-commands: the top parser reports what theirs did not recognise."""
    names = [name for action in parser._actions for name in action.option_strings]
    subs = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return names + [name for parsers in subs for sub in parsers for name in options(sub)]


def run(main):
    """Run a command to its exit: print the closing JSON line and leave with DESIGN's exit code."""
    try:
        closing = main(sys.argv[1:])
    except UserError as error:
        closing = refused(str(error))
    except KeyboardInterrupt:
        closing = {"status": "interrupted"}
        print("interrupted", file=sys.stderr)
        print()  # the interrupt may have come in the middle of a line, and the closing one stands alone
    except BrokenPipeError:  # whoever read the output has gone: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT["interrupted"])
    except RuntimeError as error:
        if not (fault := compiler_fault(error)):
            raise
        closing = refused(fault)
    except OSError as error:
        if error.errno not in REMEDY:
            raise
        closing = refused(explain(error))
    print(json.dumps(closing), flush=True)
    sys.exit(EXIT[closing["status"]])


def refused(message):
    """The closing figures of a refused command; the line itself goes to standard error."""
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    return {"status": "refused", "error": line}


def explain(error):
    """One line for an operating system's refusal: the file, the reason, the next step."""
    return f"{error.filename or 'a file'}: {error.strerror.lower()}; {REMEDY[error.errno]}"
