"""huggingface_hub in a process of its own, of any version: its settings are read from the environment at import.

Run as a program it is that process: a call on each line of stdin, its outcome on each line of stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ClientError", "HubClient"]


class ClientError(Exception):
    """The client raised ``name``; ``status`` is that of the answer it had, if any."""

    def __init__(self, name: str, status: int | None, message: str) -> None:
        super().__init__(f"{name} ({status}): {message}")
        self.name = name
        self.status = status


class HubClient:
    """``client.dataset_info(repo_id=...)`` calls that method of ``HfApi`` and returns its result as JSON.

    ``create_commit`` takes the texts of files by path as ``files`` (None deletes) instead of operations.
    """

    def __init__(self, python: str, endpoint: str, folder: Path, token: str | None = None, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"HF_TOKEN": token} if token else {}),
        }
        self._process = subprocess.Popen(
            [python, __file__],
            env={**kept, **settings, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda **arguments: self._call(method, arguments)

    def close(self) -> None:
        self._process.communicate()

    def _call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, arguments], default=str), file=self._process.stdin, flush=True)
        outcome = json.loads(self._process.stdout.readline())
        if "error" in outcome:
            raise ClientError(*outcome["error"])
        return outcome["result"]


def _serve() -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        if method == "create_commit":
            arguments["operations"] = [
                CommitOperationDelete(path) if text is None else CommitOperationAdd(path, text.encode())
                for path, text in arguments.pop("files").items()
            ]
        try:
            outcome = {"result": _plain(getattr(api, method)(**arguments))}
        except Exception as error:  # noqa: BLE001 - the test sees it
            status = getattr(getattr(error, "response", None), "status_code", None)
            outcome = {"error": [type(error).__name__, status, str(error)]}
        print(json.dumps(outcome, default=str), flush=True)


def _plain(result: Any) -> Any:
    if dataclasses.is_dataclass(result):
        return {field.name: _plain(getattr(result, field.name, None)) for field in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        return {name: _plain(value) for name, value in result.items()}
    if isinstance(result, str) or not hasattr(result, "__iter__"):
        return result
    return [_plain(item) for item in result]


if __name__ == "__main__":
    _serve()
