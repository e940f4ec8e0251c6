"""After the import of a module, without importing it: before, after and during, once, and without a trace."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fi_tunecache import import_hook
from fi_tunecache.import_hook import after_import, forget

Make = Callable[[str], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes a package with a submodule of this source; gives the submodule's name."""
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    names: list[str] = []

    def write(source: str) -> str:
        package = f"made_package_{len(names)}"
        names.append(package)
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "part.py").write_text(source)
        importlib.invalidate_caches()
        return f"{package}.part"

    yield write
    for name in [name for name in sys.modules if name.startswith("made_package_")]:
        del sys.modules[name]
    assert sys.meta_path == finders, "nothing of ours stays"


class Seen:
    def __init__(self) -> None:
        self.modules: list[tuple[str, int]] = []

    def __call__(self, module: ModuleType) -> None:
        self.modules.append((module.__name__, module.VALUE))


def test_it_is_imported_later(make: Make) -> None:
    name, seen = make("VALUE = 7"), Seen()
    after_import(name, seen)
    assert name not in sys.modules
    assert seen.modules == []
    module = importlib.import_module(name)
    assert seen.modules == [(name, 7)]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    importlib.reload(module)
    assert len(seen.modules) == 1


def test_it_is_imported_already(make: Make) -> None:
    name, seen = make("VALUE = 7"), Seen()
    importlib.import_module(name)
    after_import(name, seen)
    assert seen.modules == [(name, 7)]


def test_several_wait(make: Make) -> None:
    name, one, other = make("VALUE = 7"), Seen(), Seen()
    after_import(name, one)
    after_import(name, other)
    importlib.import_module(name)
    assert one.modules == other.modules == [(name, 7)]


def test_who_is_forgotten_is_not_told(make: Make) -> None:
    name, one, other = make("VALUE = 7"), Seen(), Seen()
    after_import(name, one)
    after_import(name, other)
    forget(one)
    forget(Seen())
    importlib.import_module(name)
    assert (one.modules, other.modules) == ([], [(name, 7)])


def test_an_import_that_fails_is_waited_for_again(make: Make) -> None:
    name, seen = make("import os\nVALUE = int(os.environ['MADE_VALUE'])"), Seen()
    after_import(name, seen)
    with pytest.raises(KeyError, match="MADE_VALUE"):
        importlib.import_module(name)
    assert seen.modules == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MADE_VALUE", "7")
        importlib.import_module(name)
    assert seen.modules == [(name, 7)]


def test_another_thread_is_importing_it(make: Make) -> None:
    """Its finder has been asked already, so the end of its import is waited for."""
    name, seen = make("import sys\nsys.made_begun.set()\nsys.made_go_on.wait()\nVALUE = 7"), Seen()
    begun, go_on = threading.Event(), threading.Event()
    sys.made_begun, sys.made_go_on = begun, go_on  # type: ignore[attr-defined]
    importing = threading.Thread(target=importlib.import_module, args=(name,))
    importing.start()
    begun.wait()
    waiting = threading.Thread(target=after_import, args=(name, seen))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    go_on.set()
    importing.join()
    waiting.join()
    assert seen.modules == [(name, 7)]


def test_a_module_that_is_not_there(make: Make) -> None:
    make("")
    seen = Seen()
    after_import("made_package_0.nothing", seen)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("made_package_0.nothing")
    forget(seen)
    assert seen.modules == []
    assert import_hook._waiting == {}
