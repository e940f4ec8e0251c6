"""The objects of a git repository: written and read as loose objects, and kept in memory.

No process is started for them. ``git`` itself reads them too (clone, log, fsck), but must not pack them.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

__all__ = ["Node", "Objects", "object_id"]


@dataclass(frozen=True)
class Node:
    """A file, or a folder (no size), of a tree."""

    oid: str
    size: int | None = None


class Objects:
    """Objects below ``folder``. Reading is safe from many threads; who writes holds the repository's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, bytes] = {}

    def read(self, oid: str) -> bytes:
        """Raises FileNotFoundError where there is no such object."""
        if oid not in self._known:
            self._known[oid] = zlib.decompress(self._path(oid).read_bytes()).partition(b"\0")[2]
        return self._known[oid]

    def write(self, kind: str, data: bytes) -> str:
        oid, path = object_id(kind, data), self._path(object_id(kind, data))
        if oid not in self._known and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(zlib.compress(_framed(kind, data), 1))
        self._known[oid] = data
        return oid

    def walk(self, tree: str, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Every file and folder of a tree by its path, in git's order."""
        rest = self.read(tree)
        while rest:
            head, _, tail = rest.partition(b"\0")
            mode, name = head.decode().split(" ", 1)
            oid, rest = tail[:20].hex(), tail[20:]
            if mode == "40000":
                yield prefix + name, Node(oid)
                yield from self.walk(oid, f"{prefix}{name}/")
            else:
                yield prefix + name, Node(oid, len(self.read(oid)))

    def write_tree(self, files: Mapping[str, str]) -> str:
        """A tree, and those below it, of blobs by path. Raises ValueError where one path lies below another."""
        blobs: dict[str, str] = {}
        folders: dict[str, dict[str, str]] = defaultdict(dict)
        for path, oid in files.items():
            first, _, rest = path.partition("/")
            if rest:
                folders[first][rest] = oid
            else:
                blobs[first] = oid
        if clash := blobs.keys() & folders.keys():
            raise ValueError(f"both a file and a folder: {', '.join(sorted(clash))}")
        rows = [(name, "100644", oid) for name, oid in blobs.items()]
        rows += [(name + "/", "40000", self.write_tree(below)) for name, below in folders.items()]
        rows.sort(key=lambda row: row[0].encode())  # git sorts a folder as if its name ended with a slash
        lines = [f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(oid) for name, mode, oid in rows]
        return self.write("tree", b"".join(lines))

    def _path(self, oid: str) -> Path:
        return self._folder / oid[:2] / oid[2:]


def object_id(kind: str, data: bytes) -> str:
    return sha1(_framed(kind, data)).hexdigest()


def _framed(kind: str, data: bytes) -> bytes:
    return f"{kind} {len(data)}\0".encode() + data
