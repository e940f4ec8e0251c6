"""The HTTP side, and what a test has in hand."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from . import api
from .answer import Answer, json_answer
from .api import Call
from .fault import Fault, Faults
from .hub import Account, Hub

__all__ = ["HubServer", "Request"]


@dataclass(frozen=True)
class Request:
    """A request and the status it was answered with; 0 where the answer is silence.

    ``headers`` have lower-case names and lack the authorisation, of which ``authorised`` says only that it was sent.
    """

    method: str
    path: str
    status: int
    authorised: bool
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class HubServer(Hub):
    """A loopback Hub: ``with HubServer(folder) as hub`` serves the repositories below ``folder``.

    Parameters
    ----------
    folder
        Where the bare repositories are, ``<folder>/<owner>/<name>.git``; made if need be, and may be served again.
    host, port
        Where to listen; port 0 takes a free one. ``127.0.0.2`` is another origin than ``127.0.0.1``.
    tokens, require_token
        As the attributes of ``Hub``, which may be changed later.
    on_request
        Called with each request as it is answered.

    Attributes
    ----------
    log
        The requests, oldest first; each is added before the first byte of its answer is sent.
    errors
        Tracebacks of what went wrong here; such requests were answered with 500.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: Mapping[str, Account] | None = None,
        require_token: bool = False,
        on_request: Callable[[Request], None] = lambda request: None,
    ) -> None:
        super().__init__(folder)
        self.tokens.update(tokens or {})
        self.require_token = require_token
        self.log: list[Request] = []
        self.errors: list[str] = []
        self.stopped = threading.Event()
        self.on_request = on_request
        self.faults = Faults()
        self._http = _Server((host, port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self.endpoint = f"http://{host}:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, once or again: connections are closed and new ones refused."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._http.shutdown()
            self._http.close_connections()
            self._http.server_close()
            self._thread.join()

    def clear_log(self) -> None:
        self.log.clear()

    def requests(self, path: str = "", method: str = ".*") -> list[Request]:
        """Those logged so far whose path and method match regular expressions, as those of a ``Fault`` do."""
        wanted = Fault(path, method)
        return [request for request in tuple(self.log) if wanted.matches(request.method, request.path)]

    def fault(self, fault: Fault) -> None:
        """Let it happen from now on."""
        self.faults.add(fault)

    def clear_faults(self) -> None:
        self.faults.clear()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 256  # many clients that start at once

    def __init__(self, address: tuple[str, int], hub: HubServer) -> None:
        self.hub = hub
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Wake the threads that wait for another request on a connection that is kept alive."""
        for connection in tuple(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may go: some are killed on purpose
            self.hub.errors.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # with the buffer, else 40 ms for each answer
    wbufsize = -1

    def answer(self) -> None:
        hub = self.server.hub
        length = int(self.headers.get("Content-Length", 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = Call(self.command, self.path, headers, self.rfile.read(length))
        if len(call.body) < length:
            raise ConnectionAbortedError("the client went while it sent a request")
        fault = hub.faults.of(self.command, self.path) or Fault()
        hub.stopped.wait(fault.delay)
        answer = fault.apply(Answer(200) if fault.replaces else self._true_answer(call), self.path)
        silent = fault.hang > 0 and fault.cut is None
        request = Request(
            self.command,
            self.path,
            0 if silent else answer.status,
            "authorization" in headers,
            {name: value for name, value in headers.items() if name != "authorization"},
            call.body,
        )
        hub.log.append(request)
        hub.on_request(request)
        if not silent:
            self._send(answer, fault)
        hub.stopped.wait(min(fault.hang, threading.TIMEOUT_MAX))
        self.close_connection |= silent or fault.cut is not None

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def _true_answer(self, call: Call) -> Answer:
        try:
            return api.answer(self.server.hub, call)
        except Exception:  # noqa: BLE001 - never a dropped connection: a client would take it for a fault
            self.server.hub.errors.append(f"{call.method} {call.path}\n{traceback.format_exc()}")
            return json_answer({"error": "Internal error of the loopback Hub"}, 500)

    def _send(self, answer: Answer, fault: Fault) -> None:
        body = b"" if self.command == "HEAD" else answer.body
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            if name not in fault.without:
                self.send_header(name, value)
        if body and "Content-Length" in fault.without:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        self.end_headers()
        self.wfile.write(body[: fault.cut])
        self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """``on_request`` does that."""
