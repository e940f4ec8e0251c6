"""Facts of the environment that are read from installed distributions, without importing any of them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
from msgspec import Struct

from .errors import HardwareError

__all__ = [
    "FINGERPRINTS",
    "Wheel",
    "cuda_version",
    "cudnn_frontend_version",
    "cutlass_dsl_version",
    "dump_text",
    "find_package",
    "find_wheels",
    "flashinfer_version",
    "is_whole_fingerprint",
    "normalize",
]

_OF_INTEREST = re.compile(r"torch|apache-tvm-ffi|flashinfer-python|nvidia-(cublas|cudnn|cutlass-dsl).*|~.*")
"""Normalised names of the folders to open. ``~orch`` is what pip leaves of torch after a failed uninstall;
its metadata still says torch, so FlashInfer counts it."""


class Wheel(Struct, frozen=True):
    """One installed distribution.

    ``folder`` holds its metadata; ``folder_name`` is that folder's normalised name, by which
    :func:`importlib.metadata.version` finds it; ``name`` is what the metadata says, ``requires``
    are its Requires-Dist lines.
    """

    folder_name: str
    name: str
    version: str
    requires: tuple[str, ...]
    folder: Path

    def read_text(self, file: str) -> str | None:
        """A file beside the metadata, None where :mod:`importlib.metadata` would give None.

        Raises HardwareError where that would fail, and FlashInfer with it.
        """
        try:
            return _read_text(self.folder / file)
        except UnicodeDecodeError:
            raise HardwareError(f"{self.folder / file} is not UTF-8", "install that package again") from None


def find_wheels(search_path: Sequence[str]) -> tuple[Wheel, ...]:
    """The distributions along ``search_path`` that any fact depends on, duplicates included.

    Sorted by name; those of one name are in the order of the path. They are those that
    :func:`importlib.metadata.distributions` finds (tested against it), without its import, which
    costs a tenth of a warm start, and without reading the metadata of all others.
    """
    wheels = []
    for name, folder in sorted(_folders(search_path), key=lambda found: found[0]):
        headers = _read_headers(folder)
        if "Name" in headers:
            requires = tuple(headers.get("Requires-Dist", ()))
            wheels.append(Wheel(name, headers["Name"][0], headers.get("Version", ["None"])[0], requires, folder))
    return tuple(wheels)


def _folders(search_path: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for entry in search_path:
        with suppress(OSError):
            for child in os.listdir(entry or "."):  # noqa: PTH208 - as importlib.metadata lists, and in its order
                stem, dot, kind = child.rpartition(".")
                name = normalize(stem.partition("-")[0])
                if dot and kind.lower() in ("dist-info", "egg-info") and _OF_INTEREST.fullmatch(name):
                    yield name, Path(entry or ".", child)


def _read_headers(folder: Path) -> dict[str, list[str]]:
    """The metadata's headers; an old distribution may be a single file of them."""
    texts = (_read_text(path, errors="replace") for path in (folder / "METADATA", folder / "PKG-INFO", folder))
    headers: dict[str, list[str]] = {}
    for line in next(filter(None, texts), "").partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(":")
        if colon and not name[:1].isspace():
            headers.setdefault(name, []).append(value.strip())
    return headers


def _read_text(path: Path, errors: str = "strict") -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return None


def normalize(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_package(name: str, search_path: Sequence[str]) -> Path | None:
    """The folder that ``import name`` would take along ``search_path``; None where there is none."""
    spec = PathFinder.find_spec(name, search_path)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def flashinfer_version(search_path: Sequence[str], wheels: Sequence[Wheel]) -> str:
    """``flashinfer.__version__``, which ``flashinfer/version.py`` takes from ``flashinfer/_build_meta.py``.

    Never the distribution's version: the two can differ, and FlashInfer stamps the former.

    Raises
    ------
    HardwareError
        FlashInfer is not installed, or has no such file and calls itself ``0.0.0+unknown``.
    """
    folder = find_package("flashinfer", search_path)
    installed = next((wheel.version for wheel in wheels if wheel.folder_name == "flashinfer-python"), None)
    if folder is None:
        problem = "FlashInfer is not installed for this Python"
        if installed is not None:
            problem = f"flashinfer-python {installed} is installed without a package on the search path, as if editable"
        raise HardwareError(problem, "install the flashinfer-python you will serve with")
    if not (folder / "_build_meta.py").is_file():
        beside = f"; the distribution's {installed} is not what it stamps" if installed else ""
        raise HardwareError(
            f"{folder} has no _build_meta.py, so FlashInfer calls itself 0.0.0+unknown{beside}",
            "install a built wheel of flashinfer-python",
        )
    version = _constant(folder / "_build_meta.py", "__version__")
    if not isinstance(version, str):
        raise HardwareError(f"{folder / '_build_meta.py'} computes __version__", "use --probe full")
    return version


def cuda_version(search_path: Sequence[str]) -> str:
    """``torch.version.cuda``. Raises HardwareError without torch, and for a build without CUDA."""
    folder = find_package("torch", search_path)
    if folder is None:
        raise HardwareError("torch is not installed for this Python", "install the torch you will serve with")
    version = _constant(folder / "version.py", "cuda")
    if not isinstance(version, str):
        raise HardwareError("the installed torch is a build without CUDA", "install one with CUDA")
    return version


def _constant(path: Path, name: str) -> object:
    """The literal that a module assigns to ``name`` at its top level; None where it assigns none."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise HardwareError(f"{path} can't be read: {error}", "use --probe full") from error
    value: object = None
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=literal)) if target == name:
                value = literal
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.Constant(value=literal)) if target == name:
                value = literal
    return value


def cudnn_frontend_version(wheels: Sequence[Wheel]) -> str:
    """``cudnn.__version__``, which is the version of its wheel. Raises HardwareError where it is not installed."""
    for wheel in wheels:
        if wheel.folder_name == "nvidia-cudnn-frontend":
            return wheel.version
    raise HardwareError("nvidia-cudnn-frontend is not installed", "install the one you will serve with")


def cutlass_dsl_version(flashinfer_version: str | None, wheels: Sequence[Wheel]) -> str:
    """The fingerprint of the CuTe-DSL stack, byte by byte as this version of FlashInfer computes it.

    Raises
    ------
    HardwareError
        It is not known how that version computes it, or it would print ``unknown``.
    """
    if flashinfer_version is None:
        raise HardwareError("the fingerprint is computed by FlashInfer, whose version is undetermined")
    fingerprint = FINGERPRINTS.get(flashinfer_version.partition("+")[0])
    if fingerprint is None:
        raise HardwareError(
            f"it is not known how FlashInfer {flashinfer_version} computes its fingerprint", "use --probe full"
        )
    return fingerprint(wheels)


def _names_and_versions(wheels: Sequence[Wheel]) -> str:
    stack = sorted(f"{w.name}=={w.version}" for w in wheels if w.name.lower().startswith("nvidia-cutlass-dsl"))
    if not stack:
        raise HardwareError("no nvidia-cutlass-dsl is installed", "install the one you will serve with")
    return ";".join(stack)


def _records(wheels: Sequence[Wheel]) -> str:
    stack = []
    for wheel in wheels:
        name = wheel.name.lower().replace("_", "-")
        if name in ("torch", "apache-tvm-ffi") or name.startswith("nvidia-cutlass-dsl"):
            digest = hashlib.sha256(b"[" + dump_text(wheel.read_text("RECORD")))
            digest.update(b", " + dump_text(wheel.read_text("direct_url.json")) + b"]")
            stack.append(f"{name}=={wheel.version}:{digest.hexdigest()}")
    return ";".join([str(sys.implementation.cache_tag), str(sysconfig.get_config_var("SOABI")), *sorted(stack)])


def dump_text(text: str | None) -> bytes:
    """``json.dumps(text)``, five times as fast for the megabyte of torch's RECORD."""
    if text is None or not text.isascii() or "\x7f" in text:
        return json.dumps(text).encode()
    return msgspec.json.encode(text)


FINGERPRINTS: Mapping[str, Callable[[Sequence[Wheel]], str]] = {
    **dict.fromkeys(("0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1"), _names_and_versions),
    "0.7.4": _records,
}
"""By public FlashInfer version. Read from ``_get_cute_dsl_version`` in ``flashinfer/jit/cute_dsl_core.py`` of
these wheels; the first five have one and the same function. There is no 0.7.3, and 0.6 has no such fact."""


def is_whole_fingerprint(flashinfer_version: str | None, fingerprint: str) -> bool:
    """False for a list of packages where that FlashInfer stamps hashes as well; True where the form is not known."""
    formula = FINGERPRINTS.get((flashinfer_version or "").partition("+")[0])
    return formula is not _records or ":" in fingerprint
