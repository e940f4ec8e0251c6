"""The few requests of a Hub that `hf download` of one file makes, answered from memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["COMMIT", "REPOSITORY", "serve_file"]

REPOSITORY = "example/tuned"
COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@contextmanager
def serve_file(name: str, data: bytes) -> Iterator[tuple[str, list[str]]]:
    """Serve one file of one commit of a dataset repository.

    Gives the endpoint for ``HF_ENDPOINT``, and the list to which each request's method and path is added.
    Whatever is asked below ``/api/`` is answered with the repository's information.
    """
    log: list[str] = []
    information = {"id": REPOSITORY, "sha": COMMIT, "private": False, "gated": False, "siblings": [{"rfilename": name}]}
    about = json.dumps(information).encode()
    resource = f"/datasets/{REPOSITORY}/resolve/{COMMIT}/{name}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            log.append(f"{self.command} {self.path}")
            body = about if self.path.startswith("/api/") else data if self.path == resource else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
