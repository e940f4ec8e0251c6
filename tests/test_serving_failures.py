"""Whatever goes wrong with us, a program has the results and the tuning of plain FlashInfer, in time, and a warning."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import NO_HUB, TOKENS
from hub_registry import FILE, PORTAL, REGISTRY
from hub_registry import publish as put
from hub_server import Fault, HubServer
from programs import Answer, Machine, Programs, bundles_of

from fi_tunecache.publish.directory import add_bundles

pytestmark = pytest.mark.slow

DEADLINE = 3.0
TUNES = f"""
fi_tunecache.enable(deadline={DEADLINE})
with autotune(True, cache="user.json"):
    result = [ask(lookup) for lookup in given]
result = [result, AutoTuner.__dict__["choose_one"] is STOCK["choose_one"]]
"""


@pytest.fixture
def here(hub: HubServer, programs: Callable[[str], Programs], tmp_path: Path) -> Machine:
    """A machine with nothing on it, which is told of a registry on the Hub."""
    bundles = bundles_of("0.7.4")
    put(hub, *bundles)
    folder = tmp_path / "machine"
    folder.mkdir()
    machine = Machine(programs("0.7.4"), folder, bundles, HF_ENDPOINT=hub.endpoint, FI_TUNECACHE_REGISTRY=REGISTRY)
    machine.lookups, machine.expected = machine.lookups[:20], machine.expected[:20]
    return machine


def plain(here: Machine) -> Answer:
    answer = here.run(TUNES, FI_TUNECACHE="off", FI_TUNECACHE_DIR=str(here.folder / "nothing"))
    (here.folder / "user.json").unlink()
    assert answer.profiles > 0
    return answer


def goes_on_as_without_us(answer: Answer, alone: Answer) -> str:
    """The one warning of a program that has nothing of ours."""
    assert answer.result == alone.result
    assert answer.profiles == alone.profiles
    assert answer.seconds < DEADLINE + 1.5
    assert answer.lines("INFO") == []
    (line,) = answer.lines("WARNING")
    assert line.startswith("fi-tunecache: ")
    assert line.isprintable()
    return line.removeprefix("fi-tunecache: ")


# --- the registry


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param(Fault(hang=math.inf), "no answer", id="it hangs"),
        pytest.param(Fault(FILE, hang=math.inf, cut=100), "no answer", id="it hangs in a download"),
        pytest.param(Fault(status=404, code="RepoNotFound"), "", id="not there"),
        pytest.param(Fault(status=401), "", id="not allowed"),
        pytest.param(Fault(status=500), "", id="out of order"),
        pytest.param(Fault(r"/resolve/.*[0-9a-f]{16}\.json", body=b"{}"), "", id="a poisoned bundle"),
        pytest.param(Fault(r"/resolve/.*manifest\.json", body=b"{}"), "", id="a poisoned manifest"),
        pytest.param(PORTAL(), "", id="a captive portal"),
    ],
)
def test_the_hub(here: Machine, hub: HubServer, fault: Fault, cause: str) -> None:
    alone = plain(here)
    hub.fault(fault)
    line = goes_on_as_without_us(here.run(TUNES), alone)
    assert cause in line
    assert REGISTRY in line
    assert line.endswith(f"FlashInfer goes on without it, `fi-tunecache resolve --registry {REGISTRY}` tells more")


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        pytest.param({"HF_ENDPOINT": NO_HUB}, "127.0.0.1|Connection refused|no answer in time", id="refused"),
        pytest.param({"HF_HUB_OFFLINE": "1"}, "offline", id="offline"),
        pytest.param({"FI_TUNECACHE_REGISTRY": "somewhere"}, "'somewhere'", id="a name that is none"),
        pytest.param({"FI_TUNECACHE_REGISTRY": "/nowhere"}, "/nowhere", id="a directory that is not there"),
        pytest.param({"FI_TUNECACHE_DIR": "relative"}, "FI_TUNECACHE_DIR", id="a cache that is nowhere"),
        pytest.param({"FI_TUNECACHE_MATCH": "nearly"}, "FI_TUNECACHE_MATCH", id="a match level that is none"),
    ],
)
def test_variables(here: Machine, environ: dict[str, str], cause: str) -> None:
    alone = plain(here)
    assert re.search(cause, goes_on_as_without_us(here.run(TUNES, **environ), alone))


def test_nothing_fits(here: Machine) -> None:
    """Another cuDNN than the registry's results were tuned with."""
    alone = plain(here)
    other = here.bundles[0].environment.with_facts({"cudnn_version": "92400"})
    here.bundles[0] = msgspec.structs.replace(here.bundles[0], environment=other)
    line = goes_on_as_without_us(here.run(TUNES), alone)
    assert re.search("nothing in .* fits NVIDIA H200, flashinfer 0.7.4 at match level exact .*cudnn_version", line)


# --- the cache


def test_a_cache_that_can_not_be_written(here: Machine) -> None:
    """The entries are served all the same; there is a file in the place of its directory."""
    here.cache.write_bytes(b"")
    answer = here.run(TUNES)
    assert answer.result == [here.expected, True]
    (line,) = answer.lines("WARNING")
    assert line.startswith("fi-tunecache: not kept in the cache, so every start does it again: ")


def spoil(here: Machine, change: Callable[[bytes], bytes]) -> None:
    (path,) = [path for path in (here.cache / "selections").iterdir() if "resolution" not in path.name]
    path.write_bytes(change(path.read_bytes()))


DAMAGED = pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="cut"),
        pytest.param(lambda data: data.replace(b"Runner", b"Runner2", 1), id="changed"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"[" * 100_000, id="nested"),
    ],
)


@DAMAGED
def test_a_damaged_selection_is_fetched_again(here: Machine, change: Callable[[bytes], bytes]) -> None:
    here.run(TUNES)
    spoil(here, change)
    answer = here.run(TUNES)
    assert answer.result == [here.expected, True]
    (line,) = answer.lines("WARNING")
    assert "was damaged" in line


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(os.mkfifo, id="a pipe, at which a reader would wait"),
        pytest.param(lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**30), id="huge"),
        pytest.param(os.mkdir, id="a directory"),
    ],
)
def test_something_else_in_the_place_of_the_selection(here: Machine, make: Callable[[Path], None]) -> None:
    here.run(TUNES)
    (path,) = [path for path in (here.cache / "selections").iterdir() if "resolution" not in path.name]
    path.unlink()
    make(path)
    answer = here.run(TUNES)
    assert answer.result == [here.expected, True]
    assert answer.seconds < DEADLINE
    assert str(path) in answer.lines("WARNING")[0]


@pytest.mark.parametrize("executable", [None, "", "/usr/bin/uwsgi", "/opt/app/server"])
def test_a_program_that_is_no_python(here: Machine, executable: str | None) -> None:
    """Embedded or frozen, ``sys.executable`` names the program itself: it must not be started a second time."""
    alone = plain(here)
    line = goes_on_as_without_us(here.run(f"import sys; sys.executable = {executable!r}\n{TUNES}"), alone)
    assert "this program does not run in a Python that could start another" in line


def test_no_token_of_a_registrys_name_is_told(here: Machine) -> None:
    secret = TOKENS[0]
    answer = here.run(TUNES, FI_TUNECACHE_REGISTRY=f"hf://datasets/{secret}/name")  # Machine.run looks for tokens
    assert answer.lines("WARNING") != []


def test_a_damaged_selection_and_no_hub(here: Machine) -> None:
    alone = plain(here)
    here.run(TUNES)
    (here.folder / "user.json").unlink(missing_ok=True)
    spoil(here, lambda data: b"")
    answer = here.run(TUNES, HF_ENDPOINT=NO_HUB)
    assert (answer.result, answer.profiles) == (alone.result, alone.profiles)
    damaged, unreachable = answer.lines("WARNING")
    assert "was damaged" in damaged
    assert re.search("Connection refused|no answer in time", unreachable), "tried until shortly before the deadline"


def test_a_store_that_can_not_be_written(here: Machine) -> None:
    (here.folder / "store").write_bytes(b"")
    program = f"""
fi_tunecache.enable(deadline={DEADLINE})
with autotune_v2("replay", cache_root="store"):
    result = [ask(lookup) for lookup in given]
"""
    answer = here.run(program)
    assert answer.result == here.run(program, FI_TUNECACHE="off").result
    (line,) = answer.lines("WARNING")
    assert "store" in line


# --- FlashInfer


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        pytest.param(
            """
def choose_one(self, custom_op, runners, tuning_config, inputs, extra=None, **kwargs):
    return STOCK["choose_one"](self, custom_op, runners, tuning_config, inputs, **kwargs)
AutoTuner.choose_one = choose_one
""",
            "AutoTuner.choose_one takes self, custom_op, runners, tuning_config, inputs, extra, kwargs",
            id="another signature",
        ),
        pytest.param(
            "tuner(); import flashinfer.autotuner as a; del a._collect_metadata",
            "has no _collect_metadata",
            id="a name",
        ),
        pytest.param(
            "import collections; tuner()._file_configs = collections.OrderedDict()",
            "AutoTuner._file_configs is no plain dict",
            id="another table",
        ),
        pytest.param("del tuner()._dirty_seq", "AutoTuner has no _dirty_seq", id="an attribute"),
        pytest.param(
            "import flashinfer.autotuner as a; a._collect_metadata = lambda: 7", "returns no facts", id="no facts"
        ),
        pytest.param(
            "import flashinfer.autotuner as a\ndef fail(): raise OSError('no driver')\na._collect_metadata = fail",
            "FlashInfer can't tell its environment: OSError: no driver",
            id="facts that can't be had",
        ),
    ],
)
def test_an_unknown_flashinfer(here: Machine, change: str, cause: str) -> None:
    program = f"""
{change}
before = AutoTuner.__dict__["choose_one"]
fi_tunecache.enable()
result = [[ask(lookup) for lookup in given], AutoTuner.__dict__["choose_one"] is before]
"""
    alone = here.run(program, FI_TUNECACHE="off")
    assert cause in goes_on_as_without_us(here.run(program), alone)


# --- we ourselves


CALLED = """
import sys
called = set()
def look(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & 1  # and not the body of a class or a module
    if event == "call" and is_function and "/fi_tunecache/" in code.co_filename:
        called.add((frame.f_globals["__name__"], code.co_qualname if hasattr(code, "co_qualname") else code.co_name))
threading.setprofile(look)
sys.setprofile(look)
{program}
sys.setprofile(None)
result = sorted(called)
"""
PLANTED = """
import importlib
import sys
import fi_tunecache.hook
import fi_tunecache.serving
name, path = given["plant"]
owner = importlib.import_module(name)
*outer, last = path.split(".")
for part in outer:
    owner = getattr(owner, part)
def planted(*_, **__):
    raise RuntimeError("planted")
function = vars(owner)[last]
kind = type(function)
setattr(owner, last, kind(planted) if kind in (classmethod, staticmethod, property) else planted)
for module in [module for module in sys.modules.values() if module.__name__.startswith("fi_tunecache.")]:
    if vars(module).get(last) is function:  # as it was imported from there
        setattr(module, last, planted)
given = given["lookups"]
{program}
"""
GUARDS = {
    "enable",  # raises to its caller, who has called it
    "Hook._around",
    "Hook._around_save",
    "Wrapping._dispatcher",
    "ConfigLayer.__bool__",
    "ConfigLayer.__contains__",
    "ConfigLayer.__missing__",
    "ConfigLayer.__setitem__",
    "ConfigLayer.clear",
    "ConfigLayer.items",
    "ConfigLayer.pop",
    "PolicyLayer.get",
    "_WatchedStores.__setitem__",
    "_give_up",
    "_Loader.exec_module",
    "_Finder.find_spec",
}
"""What FlashInfer or Python calls: each calls on in a ``try``, or does what the dict of its place does."""

WAYS = {
    "files": 'with autotune(True, cache="user.json"): result = [ask(lookup) for lookup in given]',
    "store": 'with autotune_v2("replay", cache_root="store"): result = [ask(lookup) for lookup in given]',
}


@pytest.mark.parametrize("start", ["cold", "warm"])
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_in_every_one_of_our_functions(
    programs: Callable[[str], Programs], tmp_path: Path, way: str, start: str
) -> None:
    """Each that such a start calls, in turn. What is served is ours or FlashInfer's own, and nothing else happens."""
    bundles = bundles_of("0.7.4")
    add_bundles(tmp_path / "registry", "made", bundles)
    (tmp_path / "machine").mkdir()
    here = Machine(programs("0.7.4"), tmp_path / "machine", bundles, FI_TUNECACHE_REGISTRY=str(tmp_path / "registry"))
    lookups, expected = here.lookups[:6], here.expected[:6]
    program = f"fi_tunecache.enable(deadline={DEADLINE})\n{WAYS[way]}"
    if start == "warm":
        here.run(program, lookups)
        _remove(here, "user.json", "store")
    called = here.run(CALLED.format(program=program), lookups).result
    functions = [(name, path) for name, path in called if _can_be_planted(name, path)]
    assert len(functions) > 40
    _remove(here, "user.json", "store")
    alone = here.run(program, lookups, FI_TUNECACHE="off").result

    faults: dict[str, Any] = {}
    for plant in functions:
        _remove(here, "user.json", "store", *(["cache"] if start == "cold" else []))
        answer = here.run(PLANTED.format(program=program), {"plant": plant, "lookups": lookups})
        for given, ours, own in zip(answer.result, expected, alone, strict=True):
            if given not in (ours, own):
                faults[".".join(plant)] = (given, ours, own)
        says = plant[1] == "without_tokens"  # without which nothing is said
        if answer.result != expected and not answer.lines("WARNING") and not says:
            faults[".".join(plant)] = "silent"
        if answer.seconds > DEADLINE + 1:
            faults[".".join(plant)] = answer.seconds
    assert faults == {}


def _can_be_planted(name: str, path: str) -> bool:
    return "<" not in path and path not in GUARDS and name != "fi_tunecache"


def _remove(here: Machine, *names: str) -> None:
    for name in names:
        path = here.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
