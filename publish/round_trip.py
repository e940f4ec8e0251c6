"""The round trip: what is about to be published is loaded and looked up as a serving machine will do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from fi_tunecache import __version__
from fi_tunecache.autotuner import Autotuner, LoadedEntry
from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.entry import Entry, Tactic
from fi_tunecache.errors import FormatError, HardwareError
from fi_tunecache.key import Key
from fi_tunecache.wheel_facts import find_wheels, flashinfer_version
from fi_tunecache.wording import count_entries, plural

__all__ = ["OurRules", "RoundTrip", "answer", "find_problem", "round_trip"]

_OURS = f"fi-tunecache {__version__}"
_FRESH = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fi_tunecache.publish.round_trip import answer; answer(sys.argv[2])"
)
"""The path is that of the calling process, whose FlashInfer was found there; ``-I`` keeps anything else out."""

_NOT_PASSED_ON = ("FLASHINFER_", "HF_", "HUGGING_FACE_")


class RoundTrip(Struct, frozen=True):
    """A round trip that went well.

    ``checked_with`` is what a manifest records: ``flashinfer 0.7.4``, or ``fi-tunecache 0.1.0`` where our own check
    took FlashInfer's place; ``notice`` then says in a line why.
    """

    checked_with: str
    notice: str = ""


def round_trip(
    data: bytes, *, python: str = sys.executable, search_path: Sequence[str] | None = None, deadline: float = 120.0
) -> RoundTrip:
    """Load a bundle's bytes in the real FlashInfer, and require that every entry is loaded and served.

    A fresh process imports FlashInfer, whose metadata function is replaced by the bundle's facts, loads
    the bytes by ``load_configs`` and asks ``search_cache`` for each key alone and for each recorded lookup, with
    all its runners in their order: each must be a hit with the entry's tactic. Needs no GPU and uses
    none; nothing is timed and no kernel runs, and a runner's own validator of tactics takes no part, since the
    runners are toys. FlashInfer's caches, settings and downloads are kept out of it.

    Where FlashInfer of the bundle's very version is not installed, or can't be used here (its import
    fails, crashes or hangs, or it has not the functions that are called), our own check applies the
    same rules as 0.7.1 to 0.7.4 have them.

    Parameters
    ----------
    data
        The bytes that will be uploaded.
    python
        The interpreter of the fresh process; it must be one for which ``search_path`` is made.
    search_path
        Where FlashInfer and all else is imported from; by default ``sys.path``.
    deadline
        Seconds until the fresh process is killed, with what it has started. Its imports take most of the time.

    Raises
    ------
    FormatError
        The bytes are no bundle or not its canonical ones; an entry is not loaded as it was written or not
        served, or a lookup is given something else than its winner; or FlashInfer, once imported, fails or
        hangs over them. The message counts what failed and names the first.
    """
    bundle = read_bundle(data)
    if write_bundle(bundle)[0] != data:
        raise FormatError("not the canonical bytes of this bundle", "let fi-tunecache write it")
    version = bundle.environment.flashinfer_version or ""
    path = list(sys.path if search_path is None else search_path)
    reason = _absence(version, path) or _ask(data, version, [python, "-I", "-c", _FRESH, json.dumps(path)], deadline)
    if reason is None:
        return RoundTrip(f"flashinfer {version}")
    if problem := find_problem(bundle, OurRules(bundle)):
        raise _refused(_OURS, problem)
    return RoundTrip(_OURS, f"FlashInfer {version} did not check the bundle, our own rules did: {reason}")


def _absence(version: str, search_path: Sequence[str]) -> str | None:
    try:
        found = flashinfer_version(search_path, find_wheels(search_path))
    except HardwareError as error:
        return error.problem
    return None if found == version else f"{found} is installed here"


def _ask(data: bytes, version: str, command: list[str], deadline: float) -> str | None:
    """Why FlashInfer could not be asked, None where it could; raises FormatError where it was and refuses."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        file = Path(scratch, "bundle.json")
        file.write_bytes(data)
        output, end = _run([*command, str(file)], scratch, deadline)
    try:
        answers = msgspec.json.Decoder(str).decode_lines(output)
    except msgspec.DecodeError:
        return f"the answer of its process can't be read; it {end}"
    match answers:
        case ["", ""]:
            return None
        case ["", problem]:
            raise _refused(f"flashinfer {version}", problem)
        case [""]:
            raise FormatError(
                f"round trip with flashinfer {version}: its process {end}", "try again; report this if it stays so"
            )
        case [reason]:
            return reason
        case _:
            return f"it could not be imported: its process {end}"


def _refused(checked_with: str, problem: str) -> FormatError:
    return FormatError(f"round trip with {checked_with}: {problem}", "leave them out, or tune again")


def _run(command: list[str], scratch: str, deadline: float) -> tuple[bytes, str]:
    """What the fresh process answers, and in words how it ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "FLASHINFER_AUTOTUNE_TIMER": "cuda_event",  # the other one may be compiled first
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",  # of its kernel packages, none of which is used
        "FLASHINFER_WORKSPACE_BASE": scratch,
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return b"", f"did not start ({error.strerror})"
        with process:
            try:
                output, _ = process.communicate(timeout=deadline)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.communicate()[0], f"did not finish within {deadline:g} s"
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()  # the context manager leaves that out where it was interrupted
                raise
        if process.returncode < 0:
            return output, f"was killed by signal {-process.returncode}"
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
        lines = errors.read().decode(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "nothing was printed")
        return output, f"ended with exit status {process.returncode} ({last[:200]})"


def answer(file: str) -> None:
    """The fresh process: asks the real FlashInfer about the bundle in ``file``. Of no use in any other process.

    Prints two lines, each a string in JSON: why FlashInfer can't be asked, and what it does not load or
    serve; empty where there is nothing to say. The second is missing where the first says something.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever FlashInfer prints must not look like an answer
    bundle = read_bundle(Path(file).read_bytes())
    try:
        autotuner = Autotuner(bundle.environment)
    except (FormatError, HardwareError) as error:
        print(json.dumps(error.problem), file=answers, flush=True)
        return
    print(json.dumps(""), file=answers, flush=True)
    autotuner.load(Path(file))
    print(json.dumps(find_problem(bundle, autotuner)), file=answers, flush=True)


class OurRules:
    """What FlashInfer 0.7.1 to 0.7.4 does with a bundle, by its source; checked against the real ones by a test."""

    def __init__(self, bundle: Bundle) -> None:
        self._entries = {text: entry for text, entry in bundle.entries.items() if not entry.is_cudnn_ordinal}

    def entries(self) -> Mapping[str, LoadedEntry]:
        return {text: _as_loaded(entry) for text, entry in self._entries.items()}

    def search(self, keys: Sequence[Key]) -> tuple[int, Tactic] | None:
        try:
            hash(tuple(key.extras for key in keys))
        except TypeError:
            return None
        found = ((index, self._entries[key.text].tactic) for index, key in enumerate(keys) if key.text in self._entries)
        return next(found, None)


def find_problem(bundle: Bundle, rules: Autotuner | OurRules) -> str:
    """What of a bundle is not loaded or not served by these rules: a line with the count and the first, or nothing."""
    loaded, entries = rules.entries(), bundle.entries
    lost = [text for text, entry in entries.items() if loaded.get(text) != _as_loaded(entry)]
    if lost:
        return f"{len(lost)} of {count_entries(len(entries))} not loaded as written, the first {lost[0][:200]}"
    missed = [text for text, entry in entries.items() if rules.search([entry.key]) != (0, entry.tactic)]
    if missed:
        return f"{len(missed)} of {count_entries(len(entries))} not served, the first {missed[0][:200]}"
    served = [(lookup, rules.search(lookup.keys)) for lookup in bundle.lookups]
    misled = [
        (lookup.winning_key.text, "nothing" if found is None else lookup.runners[found[0]])
        for lookup, found in served
        if found != (lookup.winner, entries[lookup.winning_key.text].tactic)
    ]
    if misled:
        winner, instead = misled[0]
        return (
            f"{len(misled)} of {plural(len(served), 'recorded lookup')} not answered by the winner, "
            f"the first by {instead} instead of {winner[:200]}"
        )
    return ""


def _as_loaded(entry: Entry) -> LoadedEntry:
    return entry.runner, entry.tactic, entry.policy
