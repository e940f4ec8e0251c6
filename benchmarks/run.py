"""Measure everything that the documentation says about speed, in one run.

usage: python benchmarks/run.py [--quick] [--json FILE] [--write [FOLDER]]

Prints a table. Needs the project installed into this Python's environment; torch, where `import
torch` is to be measured, and FI_TUNECACHE_TEST_FLASHINFER, a folder that holds 0.7.4/flashinfer,
where FlashInfer is. --quick measures little, to see that everything works; --json writes the
numbers, --write also results.md and results.json, here or into FOLDER.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import msgspec
from processes import measure_imports, measure_processes
from reading import measure_reading
from report import Report, as_markdown, as_text, describe_machine
from resolution_at_size import measure_resolution
from serving import measure_serving
from warm_pull import measure_warm_pull


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FOLDER", nargs="?", const=Path(__file__).parent)
    arguments = parser.parse_args()
    report = measure(quick=arguments.quick)
    print(as_text(report))
    numbers = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if arguments.json:
        arguments.json.write_bytes(numbers)
    if arguments.write:
        (arguments.write / "results.json").write_bytes(numbers)
        (arguments.write / "results.md").write_text(as_markdown(report))


def measure(*, quick: bool) -> Report:
    """All sections; ``quick`` is for seeing that they work, its numbers say nothing."""
    load = os.getloadavg()[0]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # whoever installs a package has its byte code cached
    processes, calls, large, bundles, entries = (1, 20, 1, 20, 20) if quick else (25, 2000, 5, 1000, 100)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sections = [
            measure_processes(scratch, processes),
            measure_warm_pull(scratch, calls),
            measure_imports(processes),
        ]
        resolution, selection = measure_resolution(scratch, large, bundles, entries)
        sections += [
            resolution,
            measure_reading(scratch, selection, large),
            measure_serving(scratch, selection, 3 if quick else 25),
        ]
    return Report(machine=describe_machine(load), quick=quick, sections=tuple(sections))


if __name__ == "__main__":
    main()
