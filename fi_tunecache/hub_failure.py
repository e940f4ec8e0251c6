"""What can go wrong with a Hub, in words: cause and next step, and the error that it is."""

from __future__ import annotations

import os
import re

from .errors import CacheError, FiTuneCacheError, RegistryError
from .hub_messages import Failure

__all__ = ["FAILURES", "hub_error", "without_tokens"]

_TOKEN = re.compile(r"\b(?:hf|api_org)_\w{4,}")

_NETWORK = "check the network, HF_ENDPOINT and proxies; --offline takes what is cached"
_LOGIN = "log in with `hf auth login` or set HF_TOKEN"

FAILURES: dict[str, tuple[str, str]] = {
    "crashed": ("the process that talks to the Hub ended", "run it again; report this if it happens again"),
    "deadline": ("the Hub gave no answer in time", f"try again with a longer --timeout, or {_NETWORK}"),
    "disk": ("the hub cache can't be used", "free space, fix its permissions, or set FI_TUNECACHE_DIR"),
    "endpoint": ("HF_ENDPOINT is no address", "write it like https://huggingface.co, or unset it"),
    "forbidden": ("the Hub refuses", f"{_LOGIN} with a token that may do this"),
    "garbled": (
        "what came of a file is not what was announced",
        "try again later, and check whether a proxy or a captive portal answers instead of the Hub",
    ),
    "gated": ("it is gated, and no access was granted", f"ask for access on its page, and {_LOGIN}"),
    "missing": ("the Hub has no such address", "check the name; a mirror may offer downloads only: see HF_ENDPOINT"),
    "no_client": ("huggingface_hub can't be used", "install huggingface_hub>=0.34,<3 where fi-tunecache runs"),
    "no_repository": ("it does not exist, or it is private and can't be seen", f"check the name, or {_LOGIN}"),
    "no_revision": ("it has no such branch, tag or commit", "check what follows the @"),
    "not_a_hub": (
        "what answers is not a Hub, or lacks what a client needs (such as X-Repo-Commit)",
        "check HF_ENDPOINT, and whether a proxy or a captive portal answers instead",
    ),
    "not_cached": ("this is not in the cache, and the Hub may not be asked", "pull once without --offline"),
    "rate": ("the Hub limits the number of requests", f"try again later, or {_LOGIN}: the limits are higher then"),
    "refused": ("the Hub refuses the request", "see what it says"),
    "server": ("the Hub has a fault of its own", "try again later"),
    "stale": ("somebody else has published meanwhile", "try again"),
    "token_file": ("the file that `hf auth login` wrote can't be read", "fix its permissions, or log in again"),
    "unauthorized": ("the Hub does not take the token", _LOGIN),
    "unreachable": ("the Hub can't be reached", _NETWORK),
}
"""By :attr:`~fi_tunecache.hub_messages.Failure.kind`: what is wrong, and what to do."""


def hub_error(name: str, failure: Failure) -> FiTuneCacheError:
    """The error for a failure: CacheError where it is this machine's disk, else RegistryError."""
    problem, next_step = FAILURES[failure.kind]
    known = [str(failure.status)] if failure.status else []
    if failure.detail:
        known.append(failure.detail)
    if failure.retry_after is not None:
        next_step = next_step.replace("later", f"in {failure.retry_after:.0f} s")
    line = f"{name}: {problem}" + (f" ({': '.join(known)})" if known else "")
    return CacheError(line, next_step) if failure.kind == "disk" else RegistryError(line, next_step)


def without_tokens(text: str) -> str:
    """Text of a library, without the tokens that the environment holds and whatever looks like one."""
    for secret in filter(None, (os.environ.get("HF_TOKEN"), os.environ.get("HUGGING_FACE_HUB_TOKEN"))):
        text = text.replace(secret, "***")
    return _TOKEN.sub("***", text)
