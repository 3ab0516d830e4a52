"""Damaged files of a checkpoint are one message, whatever the library that reads them raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from distill.convert import ModelUnavailable

# What transformers, huggingface_hub and safetensors raise for a damaged file.
READ_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, SafetensorError, StrictDataclassError),
)


@contextmanager
def reading(folder: str, what: str) -> Iterator[None]:
    """What the libraries raise while they read a checkpoint's files means that these are damaged.

    Args:
        folder: the checkpoint.
        what: is read, such as "weights".

    Raises:
        ModelUnavailable: it cannot be read.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # tokenizers tells any fault of its file by a bare Exception, whose subclasses are not meant by it.
        if not isinstance(error, READ_FAULTS) and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())[:300]
        raise ModelUnavailable(
            f"{folder}: its {what} cannot be read: {type(error).__name__}: {reason}; fetch or save the checkpoint again"
        ) from error
