"""A disk that is soon full."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder):
    """Make `folder` an empty file system of 128 KiB; skips the test where this process may not mount one."""
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
