"""Permissions that hold for the tests too, whoever runs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["unprivileged"]

_NOBODY = 65534


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root's right to read and write everything, where the tests run as root.

    What is touched inside must lie where everybody may go, and be imported already.
    """
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
