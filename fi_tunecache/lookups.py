"""Recording: what this program asks FlashInfer's autotuner, who answers, and why nobody does.

Nothing is recorded unless asked. The program's results and its tuning are those that it has without.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .atomic_file import write_atomic
from .coverage import Report, coverage
from .errors import FiTuneCacheError, UsageError
from .import_hook import after_import, forget
from .recorded_lookup import RecordedLookup, write_lookups
from .serving import current
from .wording import plural
from .workload import Workload

if TYPE_CHECKING:
    from .autotuner.recording import Recorder

__all__ = ["Lookups", "record_lookups", "report"]

logger = logging.getLogger("fi_tunecache")

_last: Lookups | None = None


@contextlib.contextmanager
def record_lookups(workload: Workload | Mapping[str, str | int] | str | None = None) -> Iterator[Lookups]:
    """Record what this program asks FlashInfer's autotuner, in all threads, while the ``with`` lasts.

    It does not matter whether :func:`~fi_tunecache.serving.enable` was called, nor whether FlashInfer is imported:
    then recording begins with its import. A lookup takes about two microseconds longer. A fault of the recording
    ends it with a warning; nothing is raised into FlashInfer.

    Not seen are ops that tune by a protocol of their own (``choose_with_protocol``, FlashInfer 0.7.4), and the
    lookups that a CUDA graph has replaced.

    Parameters
    ----------
    workload
        What is served: a word, or parts such as ``{"model": "llama", "tp": "2"}``. Then the lookups are kept under
        that name, for :func:`~fi_tunecache.inquiry.autotune_needed`, provided that the ``with`` ends without an
        exception (an interrupt or exit is none) and all was recorded; else a warning says why not, and what was
        recorded before under that name is forgotten.

    Raises
    ------
    UsageError
        What can't name a workload.
    """
    kept = None if workload is None else Workload.of(workload)
    lookups = Lookups()
    lookups.start()
    try:
        yield lookups
    except (SystemExit, KeyboardInterrupt):  # as a server ends
        lookups.stop()
        if kept is not None:
            lookups.keep(kept)
        raise
    except BaseException:
        lookups.stop()
        if kept is not None:
            lookups.forget(kept, "the program has raised")
        raise
    lookups.stop()
    if kept is not None:
        lookups.keep(kept)


def report() -> Report:
    """Who has answered the lookups of what is being recorded in this process, or was last.

    Raises UsageError where nothing was.
    """
    if _last is None:
        raise UsageError("no lookups were recorded in this process", "use record_lookups()")
    return _last.report()


class Lookups:
    """The lookups of one recording: those so far, and after its end all of them."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._fault = ""
        self._final: tuple[tuple[RecordedLookup, ...], Report] | None = None

    def start(self) -> None:
        """Begin, now or when FlashInfer is imported. Raises nothing."""
        global _last
        _last = self
        after_import("flashinfer.autotuner", self._begin)

    def stop(self) -> None:
        """End: FlashInfer has its own functions again. Raises nothing."""
        forget(self._begin)
        try:
            if self._recorder is not None:
                self._recorder.stop()
            self._final = self._so_far()
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            self._fail(error)

    def recorded(self) -> tuple[RecordedLookup, ...]:
        """Each question with each outcome, in the order in which it was first seen."""
        return (self._final or self._so_far())[0]

    def report(self) -> Report:
        """Who has answered, by op and runner, and why nobody has where nobody has."""
        return (self._final or self._so_far())[1]

    def save(self, path: str | Path) -> None:
        """Write a file of recorded lookups, as ``fi-tunecache publish --lookups`` takes it.

        Raises
        ------
        CacheError
            It can't be written.
        FormatError
            An op has a key that FlashInfer could not read back from a file.
        """
        write_atomic(Path(path), write_lookups(self.recorded()), advice="choose another path")

    def keep(self, workload: Workload) -> None:
        """Keep them in the user cache, under the name of a workload. Raises nothing: a warning says why it can't be."""
        try:
            why_not = self._why_not_kept()
            if why_not:
                self.forget(workload, why_not)
                return
            from .autotuner import collect_metadata
            from .workload_record import keep_workload

            hook = current()
            serves = hook is not None and not hook.options.observe
            selection = self.report().selections[0] if serves and self.report().selections else None
            keep_workload(workload, self.recorded(), environment=collect_metadata(), selection=selection)
        except Exception as error:  # noqa: BLE001
            self.forget(workload, _said(error))

    def forget(self, workload: Workload, why: str) -> None:
        """They are not kept, so an older record must not go on answering for them. Raises nothing."""
        _warn(f"the lookups of {workload} are not kept: {why}")
        try:
            from .workload_record import forget_workload

            forget_workload(workload)
        except Exception as error:  # noqa: BLE001
            _warn(f"what was recorded of {workload} before can't be removed: {_said(error)}")

    def _why_not_kept(self) -> str:
        if self._fault:
            return self._fault
        if not self.recorded():
            return "there were none"
        if len(self.report().selections) > 1:
            return "several selections were in use, of which a record can name one"
        if self._recorder is not None and self._recorder.untold:
            return f"there were too many different ones, and {self._recorder.untold:,} are not told apart"
        return ""

    def _begin(self, module: ModuleType) -> None:
        if self._final is not None:  # it was stopped while the module was imported
            return
        try:
            from .autotuner.recording import Recorder

            self._recorder = Recorder(module, self._fail)
            self._recorder.start()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._recorder is not None:
            with contextlib.suppress(Exception):
                self._recorder.stop()
        self._fault = f"recording has stopped: {_said(error)}"
        _warn(f"{self._fault}; FlashInfer goes on")

    def _so_far(self) -> tuple[tuple[RecordedLookup, ...], Report]:
        if self._recorder is None:
            return (), coverage((), notes=self._notes())
        from .explanation import explain

        hook = current()
        in_use = () if hook is None else hook.in_use
        lookups = explain(self._recorder, in_use, observe=hook is not None and hook.options.observe)
        selections = {each.selection.id: each.selection for each in in_use}
        return lookups, coverage(lookups, selections.values(), self._notes())

    def _notes(self) -> list[str]:
        notes = [self._fault] if self._fault else []
        hook = current()
        notes += [] if hook is None else [f"enable(): {line}" for line in hook.warnings]
        if self._recorder is not None and self._recorder.untold:
            notes.append(f"{plural(self._recorder.untold, 'lookup')} more: too many different ones to tell apart")
        return notes


def _said(error: Exception) -> str:
    if isinstance(error, FiTuneCacheError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:200]}; this is a fault of fi-tunecache: please report it"


def _warn(line: str) -> None:
    logger.warning("fi-tunecache: %s", line)
