"""What a process costs: a warm pull, Python itself, importing torch, a warm download from the Hub; and imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from loopback_hub import COMMIT, REPOSITORY, serve_file
from made_target import install_made_target
from measurement import Section, compare, missing

__all__ = ["measure_imports", "measure_processes"]

_LIKE = ("pull", "--like", "0.7.4/nvidia-h200")
_PROBED = ("pull", "--device", "NVIDIA H200")
_PULL = "fi-tunecache pull --like 0.7.4/nvidia-h200"
_PULL_PROBED = "fi-tunecache pull --device 'NVIDIA H200'"
_FILE = "3f9a1c0e52d77b10.json"
_TARGET_MS = 150

_PULL_AND_LIST_MODULES = """
import sys
from fi_tunecache.cli import main
code = main([*sys.argv[1:], "--json"])
sys.exit(code or " ".join({"torch", "flashinfer", "huggingface_hub"} & set(sys.modules)) or 0)
"""
_IMPORT = "import time; started = time.perf_counter(); import {}; print(time.perf_counter() - started)"


def measure_processes(scratch: Path, rounds: int) -> Section:
    """Warm processes from start to exit, their output thrown away."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("FI_TUNECACHE_", "HF_"))}
    like = {**plain, "FI_TUNECACHE_DIR": str(scratch / "cache")}
    probed = {**like, **install_made_target(scratch / "target")}
    pull = _script("fi-tunecache")
    for arguments, variables in ((_LIKE, like), (_PROBED, probed)):
        _run([*pull, *arguments], variables)
        _assert_light_hit(arguments, variables)

    python, hf = [sys.executable, "-c"], _script("hf")
    download = f"hf_hub_download({REPOSITORY!r}, {_FILE!r}, repo_type='dataset', revision={COMMIT!r})"
    commands: dict[str, tuple[list[str], Mapping[str, str]]] = {
        _PULL: ([*pull, *_LIKE], like),
        _PULL_PROBED: ([*pull, *_PROBED], probed),
        'python -c "pass"': ([*python, "pass"], plain),
    }
    with serve_file(_FILE, b"{}" * 20_000) as (endpoint, requests):
        hub = {
            **plain,
            "NO_PROXY": "127.0.0.1",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(scratch / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        commands["hf download, one cached file of a commit"] = (
            [*hf, "download", "--repo-type", "dataset", REPOSITORY, _FILE, "--revision", COMMIT],
            hub,
        )
        commands['python -c "… hf_hub_download(…)", the same'] = (
            [*python, f"from huggingface_hub import hf_hub_download; {download}"],
            hub,
        )
        torch = 'python -c "import torch"'
        if find_spec("torch"):
            commands[torch] = ([*python, "import torch"], plain)
        _run(*commands["hf download, one cached file of a commit"])
        requests.clear()
        actions = {name: partial(_run, command, variables) for name, (command, variables) in commands.items()}
        rows = compare(actions, rounds, _PULL, targets={_PULL: _TARGET_MS, _PULL_PROBED: _TARGET_MS})
        if requests:
            raise AssertionError(f"a warm download asked the Hub: {requests}")
    if not find_spec("torch"):
        rows.append(missing(torch, "torch is not installed"))
    return Section(
        "A warm pull as a process",
        "From start to exit; the ratio is to the first row. `--like` takes all facts from the embedded registry; with "
        "`--device` the light probe finds the software facts of what is installed (made up: the H200's). It was "
        "checked in this run that either is a hit and leaves neither torch, flashinfer nor huggingface_hub in "
        "`sys.modules`, and that the warm downloads made no request (their Hub is a server on this machine, their "
        "telemetry is off).",
        tuple(rows),
    )


def measure_imports(rounds: int) -> Section:
    """Import statements in a fresh process each, timed from inside it."""
    modules = ["json", "fi_tunecache", "fi_tunecache.retrieval", "fi_tunecache.cli.pull_command"]
    modules += [name for name in ("huggingface_hub", "torch") if find_spec(name)]
    rows = compare({f"import {name}": partial(_seconds_inside, name) for name in modules}, rounds, "import json")
    rows += [missing(f"import {name}", "it is not installed") for name in ("torch",) if not find_spec(name)]
    return Section(
        "Import",
        "In a fresh process each, timed from inside it; the ratio is to `import json`. fi_tunecache and "
        "huggingface_hub import their parts on first use.",
        tuple(rows),
    )


def _script(name: str) -> list[str]:
    """The console script beside this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        sys.exit(f"there is no {name} beside {Path(sys.executable).name}: install the project into this environment")
    return [str(path)]


def _run(command: Sequence[str], variables: Mapping[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, env=dict(variables), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return seconds


def _assert_light_hit(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    command = [sys.executable, "-c", _PULL_AND_LIST_MODULES, *arguments]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
    if done.returncode or not json.loads(done.stdout)["hit"]:
        raise AssertionError(f"{' '.join(arguments)} is no hit, or imports what is heavy: {done.stderr or done.stdout}")


def _seconds_inside(module: str) -> float:
    done = subprocess.run([sys.executable, "-c", _IMPORT.format(module)], capture_output=True, text=True, check=True)
    return float(done.stdout)
