"""FlashInfer's rule for several runners, written down apart from the package: what resolution is checked against.

That the real ``search_cache`` follows it is checked in ``test_real_flashinfer_formats.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

__all__ = ["first_runner_with_an_entry"]


def first_runner_with_an_entry(texts: Iterable[str], entries: Container[str]) -> str | None:
    """The key by which a lookup is served, None where it misses.

    Parameters
    ----------
    texts
        Texts of the keys that FlashInfer looks for, one a runner, in the caller's order.
    entries
        The texts that have an entry. Recorded times play no part.
    """
    for text in texts:
        if text in entries:
            return text
    return None
