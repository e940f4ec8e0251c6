"""Do something with a module right after somebody imports it, without importing it oneself."""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

__all__ = ["after_import", "forget"]

_Action: TypeAlias = Callable[[ModuleType], None]

_lock = threading.Lock()
_waiting: dict[str, list[_Action]] = {}


def after_import(name: str, action: _Action) -> None:
    """Call ``action`` with the module of that name once it is imported: now, if it is.

    It runs in the thread that imports, and must not raise. It is called once. Where another thread is just importing
    the module, this waits for that.
    """
    with _lock:
        module = sys.modules.get(name)
        if module is None:
            _waiting.setdefault(name, []).append(action)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
    if module is not None:
        action(importlib.import_module(name))


def forget(action: _Action) -> None:
    """Do not call an action that was not called yet."""
    with _lock:
        for name, actions in list(_waiting.items()):
            _waiting[name] = [other for other in actions if other != action]
            if not _waiting[name]:
                del _waiting[name]
        _leave()


def _leave() -> None:
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what is waited for as the other finders do, and has its loader tell."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Stands in for a module's loader until the module is there."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        with _lock:
            actions = _waiting.pop(module.__name__, [])
            _leave()
        for action in actions:
            action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()
