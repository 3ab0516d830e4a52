"""How a command ends: one message and an exit code, never a traceback for what a person can mend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from distill.runs import Interrupted

# Lines are not cut to the terminal's width: a path must stay one word.
console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def talk(terminal: Console) -> None:
    """Sends the program's messages to the terminal, beside its progress bars."""
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=terminal, show_path=False)]
    )
    logging.raiseExceptions = False  # a full disk is told once, not with a traceback for each line of W&B's debug log


def table_console() -> Console:
    """Where tables go: as wide as the terminal; in a file or a pipe, where 80 columns would cut figures, wider."""
    out = Console()
    return out if out.is_terminal else Console(width=240)


def guarded(work: Callable[[], int], interrupted: str = "nothing was written") -> int:
    """Runs a command.

    Args:
        work: gives the exit code.
        interrupted: what is left after a signal.

    Returns:
        work's code; 2: bad input, or the machine failed (disk full, no such file); 130 or 143: SIGINT or SIGTERM.
    """
    try:
        return work()
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red")
        return 2
    except Interrupted as signal:
        console.print(f"interrupted; {interrupted}", style="bold red")
        return 128 + signal.signum
    except KeyboardInterrupt:
        console.print(f"interrupted; {interrupted}", style="bold red")
        return 130


@contextmanager
def whole(path: Path, what: str) -> Iterator[None]:
    """For work on a file that may be damaged or another program's: parts that are missing or of another type.

    Args:
        path: the file.
        what: it should be, such as "report".

    Raises:
        ValueError: naming the file and the part.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, StopIteration) as error:
        raise ValueError(f"{path}: not a whole {what} ({type(error).__name__}: {error}); make it again") from error
