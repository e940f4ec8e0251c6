"""The last guard: what must not be in any byte that leaves this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_leaks", "find_secrets", "stored_token"]

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_MIN_TOKEN = 8


def find_secrets(environ: Mapping[str, str], *, home: Path | None, stored_token: str | None = None) -> dict[str, str]:
    """What to look for, by a name that may be shown: tokens of the environment and of ``hf auth``, the home's path.

    A home that is the root of the disk, or a token too short to be one, tells nothing and is passed over.
    """
    tokens = {**{name: environ.get(name, "") for name in _TOKENS}, "the token of `hf auth login`": stored_token or ""}
    secrets = {name: value.strip() for name, value in tokens.items() if len(value.strip()) >= _MIN_TOKEN}
    if home is not None and home.is_absolute() and home != Path(home.anchor):
        secrets["the path of the home directory"] = str(home)
    return secrets


def find_leaks(data: bytes, secrets: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the secrets that are in the data, as they are or as JSON would write them. Never shows a value.

    A path counts where it stands by itself: ``/data`` is not in ``org/data-7b``.
    """
    text = data.decode("utf-8", "surrogateescape")
    return tuple(name for name, secret in secrets.items() if any(_stands(form, text) for form in _forms(secret)))


def _forms(secret: str) -> set[str]:
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}


def _stands(secret: str, text: str) -> bool:
    if not secret.startswith("/"):
        return secret in text
    return re.search(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", text) is not None


def stored_token(environ: Mapping[str, str]) -> str | None:
    """The token that ``hf auth login`` has stored, if any (``constants.py`` of huggingface_hub, 0.34 to 2.4)."""
    try:
        cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(environ.get("HF_HOME") or cache / "huggingface")
        return Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser().read_text(errors="replace").strip()
    except (OSError, RuntimeError):  # none was stored, it is nobody's business, or this user has no home
        return None
