"""A folder that one process at a time may write into."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed or the process dies; None when another holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
