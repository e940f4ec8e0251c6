"""Serve a Hub until interrupted: ``python -m tests.hub_server --create org/name``."""

from __future__ import annotations

import argparse
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from . import Account, HubServer, Request


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="a free one by default")
    parser.add_argument("--folder", type=Path, help="keep the repositories there; default: a temporary folder")
    parser.add_argument("--token", action="append", default=[], help="may do everything; then one is needed")
    parser.add_argument("--create", action="append", default=[], metavar="OWNER/NAME", help="a dataset to begin with")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        tokens = {token: Account() for token in options.token}
        hub = HubServer(
            options.folder or Path(temporary),
            port=options.port,
            tokens=tokens,
            require_token=bool(tokens),
            on_request=_print_request,
        )
        with suppress(KeyboardInterrupt), hub:
            for name in options.create:
                hub.create(name)
            print(f"export HF_ENDPOINT={hub.endpoint}", flush=True)
            threading.Event().wait()


def _print_request(request: Request) -> None:
    token = "with a token" if request.authorised else "without a token"
    print(f"{request.status} {request.method} {request.path} ({token})", flush=True)


if __name__ == "__main__":
    main()
