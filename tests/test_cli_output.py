"""What commands show while they work."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import time

import pytest

from fi_tunecache.cli.output import progress


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line, without what could drive the terminal, and nothing is left of it."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress() as say:
            for line in ("asking for the commit", "fetching \x1b[31m\u202efile"):
                say(line)
                time.sleep(0.5)
    read = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while piece := os.read(ours, 65_536):
            read += piece
    os.close(ours)
    assert b"asking for the commit" in read
    assert "fetching \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}file".encode() in read
    assert b"\x1b[31m" not in read
    assert read.endswith(b"\x1b[2K"), "its line is cleared"


def test_progress_is_shown_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as say:
        say("asking for the commit")
    assert stream.getvalue() == ""
