"""Disks that refuse: one that is soon full, one that is read-only."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, options="size=128k"):
    """Make `folder` an empty file system of 128 KiB; skips the test where this process may not mount one."""
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def read_only_disk(folder):
    """Make `folder` an empty file system that nobody may write to, not even root."""
    return small_disk(folder, "ro")
