"""A registry on the loopback Hub, and machines that pull from it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import Done, isolated, secret_free, snapshot
from hub_server import Fault, HubServer

from fi_tunecache.bundle import Bundle, bundle_file_name, write_bundle
from fi_tunecache.cli import main
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    Manifest,
    RegistryDescriptor,
    describe_bundle,
    read_manifest,
    write_descriptor,
    write_manifest,
)

__all__ = [
    "FILE",
    "FOLDER",
    "MANIFEST",
    "NAME",
    "NETWORK",
    "NEW",
    "NO_HUB",
    "PORTAL",
    "REGISTRY",
    "VERSIONS",
    "Machine",
    "Runner",
    "as_process",
    "every_client",
    "in_process",
    "installed_and_every_client",
    "one_bundle",
    "publish",
]

NAME = "team/tuned"
REGISTRY = f"hf://datasets/{NAME}"
FOLDER = "0.7.4/nvidia-h200"
MANIFEST = f"{FOLDER}/manifest.json"

FILE = "/resolve/"
"""Of the requests for files, as a fault's path."""
PORTAL = functools.partial(Fault, status=200, body=b"<html>Log in", headers={"Content-Type": "text/html"})
"""What a captive portal answers to everything."""
NETWORK = "check the network, HF_ENDPOINT and proxies; --offline takes what is cached"
NO_HUB = (
    r"what answers is not a Hub, or lacks what a client needs \(such as X-Repo-Commit\) \(\w+\); "
    "check HF_ENDPOINT, and whether a proxy or a captive portal answers instead"
)

VERSIONS = ("0.36.2", "1.33.0", "2.4.0")
_EACH_VERSION = [pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS]
every_client = pytest.mark.parametrize("pulled_machine", _EACH_VERSION, indirect=True)
"""Runs a test whose machine is the fixture ``pulled_machine`` with each version of huggingface_hub."""
installed_and_every_client = pytest.mark.parametrize(
    "pulled_machine", [pytest.param(None, id="installed"), *_EACH_VERSION], indirect=True
)
"""The same, and with the one that is installed here."""

Runner = Callable[[Sequence[str], Mapping[str, str], Path], Done]
"""Runs a command line with these variables, in that directory."""


def one_bundle(m: int = 1, **fields: object) -> Bundle:
    """A bundle of one entry, which differs with ``m``."""
    return made.bundle([made.entry(made.key(made.CUTLASS, m), m)], **fields)  # type: ignore[arg-type]


NEW = f"{FOLDER}/{bundle_file_name(write_bundle(one_bundle(2))[1])}"
"""The bundle that ``pulled_machine`` does not have yet."""


def publish(hub: HubServer, *bundles: Bundle, name: str = NAME, branch: str = "main") -> str:
    """Put bundles beside those that are there; returns the commit."""
    if hub.create(name):
        hub.put(name, {"registry.json": write_descriptor(RegistryDescriptor("tuned"))})
    changes: dict[str, bytes] = {}
    there = hub.files(name, branch)
    for bundle in bundles:
        data, sha256 = write_bundle(bundle)
        row = describe_bundle(bundle, data, sha256)
        folder = Folder.of(bundle.environment)
        path = f"{folder}/manifest.json"
        manifest = read_manifest(there[path], folder) if path in there else Manifest()
        there[path] = changes[path] = write_manifest(manifest.with_rows([row]))
        changes[f"{folder}/{row.file}"] = data
    return hub.put(name, changes, branch=branch)


def in_process(capsys: pytest.CaptureFixture[str]) -> Runner:
    """In this process; what talks to the Hub is a process anyway."""

    def run(arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> Done:
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - environ.keys():
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.chdir(folder)
            code = main(list(arguments))
        return secret_free(Done(code, *capsys.readouterr()))

    return run


def as_process(python: str = sys.executable) -> Runner:
    """In a process of a Python that has a version of huggingface_hub."""

    def run(arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> Done:
        command = [python, "-W", "error", "-m", "fi_tunecache", *arguments]
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=60)
        return secret_free(Done(done.returncode, done.stdout, done.stderr))

    return run


class Machine:
    """One that has nothing yet; its caches are below ``folder``. ``environ`` are further variables."""

    def __init__(self, folder: Path, endpoint: str, run: Runner, **environ: str) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.environ = {**isolated(folder), "HF_ENDPOINT": endpoint, "FI_TUNECACHE_REGISTRY": REGISTRY, **environ}
        self._run = run
        folder.mkdir()
        (folder / "facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")

    def __call__(self, *arguments: str, **environ: str) -> Done:
        return self._run(arguments, {**self.environ, **environ}, self.folder)

    def pull(self, *arguments: str, **environ: str) -> Done:
        """For the environment of the made bundles."""
        return self("pull", "--environment", "facts.json", *arguments, **environ)

    def json(self, *arguments: str, **environ: str) -> Any:
        """The document of a ``pull`` that succeeds without a word."""
        done = self.pull("--json", *arguments, **environ)
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    def entries(self, *arguments: str, **environ: str) -> int:
        """Their number, of a ``pull`` that succeeds without a word."""
        return int(self.json(*arguments, **environ)["entries"])

    def state(self) -> dict[str, tuple[int, int, int, int]]:
        """Every file but those of huggingface_hub's private cache, which it may fill while it fails."""
        return {name: status for name, status in snapshot(self.folder).items() if not name.startswith("cache/hub")}
