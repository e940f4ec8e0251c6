"""Functions of ours around a function of FlashInfer's class, put there and taken away at run time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Around", "Function", "Maker", "Wrapping", "wrapping_of"]

Function: TypeAlias = Callable[..., Any]

Around: TypeAlias = Callable[..., Any]
"""Is called with the next inner function, then with that one's own arguments, and gives what it returns."""

Maker: TypeAlias = Callable[[Function], Function]
"""Is given the next inner function, and gives the one to put around it: a call costs less than with an Around."""


class Wrapping:
    """One function of a class. With nothing around it the class has its own function again.

    Where somebody else has put theirs around ours, what is below can't be taken away any more: after its removal
    a function must pass everything on. Get one with :func:`wrapping_of`.
    """

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner = owner
        self._name = name
        self._original: Function = owner.__dict__[name]
        self._ours = self._original
        self._around: dict[Around | Maker, Maker] = {}
        self._lock = threading.Lock()

    def add(self, around: Around) -> None:
        """Put a function around what is there, outermost; one that is there already stays where it is."""
        self.add_made(around, functools.partial(_passing, around))

    def add_made(self, around: Around | Maker, maker: Maker) -> None:
        """As :meth:`add`; it is made by ``maker``, and ``around`` is its name for :meth:`remove`."""
        with self._lock:
            there = self._owner.__dict__[self._name]
            if there is not self._ours:
                self._original, self._around = there, {}
            self._place({**self._around, around: self._around.get(around, maker)})

    def remove(self, around: Around | Maker) -> None:
        """Take a function away; does nothing where it is not there, or somebody else's is around it."""
        with self._lock:
            left = {other: maker for other, maker in self._around.items() if other != around}
            if self._owner.__dict__[self._name] is self._ours and around in self._around:
                self._place(left)
            self._around = left

    def _place(self, around: dict[Around | Maker, Maker]) -> None:
        self._around = around
        self._ours = self._original
        for maker in around.values():
            self._ours = maker(self._ours)
        setattr(self._owner, self._name, self._ours)


def _passing(around: Around, inner: Function) -> Function:
    @functools.wraps(inner)
    def function(*arguments: Any, **options: Any) -> Any:
        return around(inner, *arguments, **options)

    return function


_wrappings: dict[tuple[type[Any], str], Wrapping] = {}
_lock = threading.Lock()


def wrapping_of(owner: type[Any], name: str) -> Wrapping:
    """The one wrapping of a function: with two of them, the class would not get its own back in every order."""
    with _lock:
        if (owner, name) not in _wrappings:
            _wrappings[owner, name] = Wrapping(owner, name)
        return _wrappings[owner, name]
