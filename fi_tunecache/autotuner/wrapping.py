"""Functions of ours around a function of FlashInfer's class, put there and taken away at run time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Around", "Wrapping", "wrapping_of"]

Around: TypeAlias = Callable[..., Any]
"""Is called with the next inner function, then with that one's own arguments, and gives what it returns."""


class Wrapping:
    """One function of a class. With nothing around it the class has its own function again.

    Where somebody else has wrapped it after us, theirs stays on top, and what is below passes everything on.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner = owner
        self._name = name
        self._original: Callable[..., Any] = owner.__dict__[name]
        self._around: tuple[Around, ...] = ()
        self._lock = threading.Lock()
        self._chain = self._original
        self._ours = self._dispatcher()

    def add(self, around: Around) -> None:
        """Put a function around what is there, outermost; one that is there already stays where it is."""
        with self._lock:
            if around in self._around:
                return
            if not self._around and self._owner.__dict__[self._name] is not self._ours:
                self._original = self._owner.__dict__[self._name]
                self._ours = self._dispatcher()
            self._compose((*self._around, around))
            if self._owner.__dict__[self._name] is self._original:
                setattr(self._owner, self._name, self._ours)

    def remove(self, around: Around) -> None:
        """Take a function away; does nothing where it is not there."""
        with self._lock:
            self._compose(tuple(other for other in self._around if other != around))
            if not self._around and self._owner.__dict__[self._name] is self._ours:
                setattr(self._owner, self._name, self._original)

    def _compose(self, around: tuple[Around, ...]) -> None:
        self._around = around
        self._chain = self._original
        for function in around:
            self._chain = functools.partial(function, self._chain)

    def _dispatcher(self) -> Callable[..., Any]:
        original = self._original

        @functools.wraps(original)
        def dispatch(*arguments: Any, **options: Any) -> Any:
            # One of ours that was left below somebody else's, which is now our original, must not come back to that.
            return (self._chain if self._ours is dispatch else original)(*arguments, **options)

        return dispatch


_wrappings: dict[tuple[type[Any], str], Wrapping] = {}
_lock = threading.Lock()


def wrapping_of(owner: type[Any], name: str) -> Wrapping:
    """The one wrapping of a function: with two of them the function could not be had back in every order."""
    with _lock:
        if (owner, name) not in _wrappings:
            _wrappings[owner, name] = Wrapping(owner, name)
        return _wrappings[owner, name]
