"""A small Hugging Face Hub on the loopback interface, for tests and demonstrations.

Dataset repositories only. The standard library and the ``git`` command; one bare git repository for each of the Hub's.
It has a log of requests and faults on demand. To try something by hand: ``python -m tests.hub_server``.
"""

from .fault import Fault
from .hub import Account
from .server import HubServer, Request

__all__ = ["Account", "Fault", "HubServer", "Request"]
