"""Ways to a Hub: none, proxies, redirects, and how long anything may take."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from command_line import TOKENS, child, only_line
from hub_registry import (
    FILE,
    NAME,
    NETWORK,
    NO_HUB,
    PORTAL,
    REGISTRY,
    Machine,
    every_client,
    installed_and_every_client,
)
from hub_server import Fault, HubServer

# --- nobody answers


def unreachable(reason: str) -> str:
    return rf"{REGISTRY}(?:@\w{{40}})?: the Hub can't be reached \({reason}\); {NETWORK}"


@installed_and_every_client
def test_connection_refused(hub: HubServer, pulled_machine: Machine) -> None:
    before, commit = pulled_machine.state(), hub.commits(NAME)[0]
    hub.close()
    for registry in (REGISTRY, f"{REGISTRY}@{commit}"):
        started = time.monotonic()
        done = pulled_machine.pull("--registry", registry)
        assert time.monotonic() - started < 8, "the library alone would try for 23 seconds"
        assert (done.code, done.out) == (4, "")
        assert re.fullmatch(unreachable("Connection refused"), only_line(done.err)), done.err
    assert pulled_machine.state() == before
    assert pulled_machine.entries("--offline") == 1


@pytest.mark.parametrize(
    "endpoint",
    [
        pytest.param("ftp://127.0.0.1", id="another scheme"),
        pytest.param("127.0.0.1:1", id="no scheme"),
        pytest.param("http://", id="no host"),
    ],
)
def test_an_endpoint_that_is_none(pulled_machine: Machine, endpoint: str) -> None:
    done = pulled_machine.pull(HF_ENDPOINT=endpoint)
    assert (done.code, done.out) == (4, "")
    assert "HF_ENDPOINT" in only_line(done.err)


def test_an_interrupt_while_the_hub_hangs(hub: HubServer, pulled_machine: Machine) -> None:
    hub.fault(Fault(FILE, "GET", hang=math.inf))
    before = pulled_machine.state()
    command = [sys.executable, "-m", "fi_tunecache", "pull", "--environment", "facts.json"]
    with child(*command, cwd=pulled_machine.folder, env=pulled_machine.environ) as process:
        while not hub.requests(FILE, "GET"):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, err = process.communicate(timeout=10)
    assert time.monotonic() - started < 1.5
    assert (process.returncode, out) == (130, "")
    assert only_line(err.strip()) == "interrupted; nothing was half-written"
    assert pulled_machine.state() == before


def test_a_deadline_without_sense(pulled_machine: Machine) -> None:
    assert pulled_machine.entries("--timeout", "1e300") == 2
    for seconds in ("nan", "inf"):
        assert pulled_machine.pull("--timeout", seconds).code == 2


@every_client
def test_a_faster_way_that_is_not_installed(pulled_machine: Machine) -> None:
    """Images set this variable for other programs."""
    assert pulled_machine.entries(HF_HUB_ENABLE_HF_TRANSFER="1") == 2


# --- proxies


class _Forward(BaseHTTPRequestHandler):
    """A proxy that knows one host, and notes who asked for what."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Proxy)
        server.asked.append(f"{self.command} {self.path}")
        parts = urlsplit(self.path)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "proxy-connection"}
        request = Request(f"{server.target}{parts.path}?{parts.query}", headers=headers, method=self.command)
        with build_opener(ProxyHandler({})).open(request) as answer:
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Not on the standard error."""


class _Proxy(ThreadingHTTPServer):
    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target
        self.asked: list[str] = []


@contextlib.contextmanager
def proxy(target: str) -> Iterator[_Proxy]:
    with _Proxy(target) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy(hub: HubServer, pulled_machine: Machine, variable: str) -> None:
    """The only way to a host whose name nobody else knows."""
    with proxy(hub.endpoint) as server:
        there = {"HF_ENDPOINT": "http://hub.test", variable: f"http://127.0.0.1:{server.server_address[1]}"}
        assert pulled_machine.entries(**there) == 2
    assert len(server.asked) == len(hub.log) == 5
    assert all(" http://hub.test/" in asked for asked in server.asked)


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_a_proxy_that_does_not_answer(hub: HubServer, pulled_machine: Machine, variable: str) -> None:
    before = pulled_machine.state()
    there = {"HTTP_PROXY": "http://127.0.0.1:9"}
    done = pulled_machine.pull(**there)
    assert (done.code, done.out) == (4, "")
    assert re.fullmatch(unreachable("Connection refused"), only_line(done.err)), done.err
    assert hub.log == []
    assert pulled_machine.state() == before
    assert pulled_machine.entries(**there, **{variable: "127.0.0.1"}) == 2


# --- redirects


@installed_and_every_client
def test_files_from_another_origin(hub: HubServer, pulled_machine: Machine) -> None:
    with HubServer(hub.folder, host="127.0.0.2") as other:
        hub.fault(Fault(FILE, redirect=other.endpoint))
        assert pulled_machine.entries() == 2
        assert len(hub.log) >= 3
        assert all(request.authorised for request in hub.log)
        assert len(other.log) >= 2
        assert not any(request.authorised for request in other.log), "the token stays at home"
        assert not any(token in str(request.headers) for request in other.log for token in TOKENS)


@installed_and_every_client
def test_a_redirect_to_a_captive_portal(hub: HubServer, pulled_machine: Machine) -> None:
    """A network that leads every request to its own page."""
    with HubServer(hub.folder, host="127.0.0.2") as page:
        hub.fault(Fault(redirect=page.endpoint))
        page.fault(PORTAL())
        done = pulled_machine.pull()
        assert (done.code, done.out) == (4, "")
        assert re.fullmatch(rf"{REGISTRY}: {NO_HUB}", only_line(done.err))
        assert not any(request.authorised for request in page.log)
    assert pulled_machine.entries("--offline") == 1
