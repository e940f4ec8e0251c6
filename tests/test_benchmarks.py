"""The benchmarks run and measure everything; what is kept of them is what they would write now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

ROWS = {
    "A warm pull as a process": [
        "fi-tunecache pull --like 0.7.4/nvidia-h200",
        "fi-tunecache pull --device 'NVIDIA H200'",
        'python -c "pass"',
        "hf download, one cached file of a commit",
        'python -c "… hf_hub_download(…)", the same',
        'python -c "import torch"',
    ],
    "A warm pull in process": [
        "pull()",
        "pull(), 99th percentile",
        "pull(offline=True)",
        "pull(offline=True), 99th percentile",
        "json.loads() of the selection's file",
    ],
    "Import": [
        "import json",
        "import fi_tunecache",
        "import fi_tunecache.retrieval",
        "import fi_tunecache.cli.pull_command",
        "import huggingface_hub",
        "import torch",
    ],
    "Resolution and selection at {entries} entries": [
        "read and check the bundles",
        "choose(), exact",
        "choose(), compatible",
        "from disk to both resolutions",
        "materialise the selection",
        "choose(), compatible, another cuDNN",
        "json.loads() of the same bundles",
        "peak memory, modules imported",
        "peak memory, bundles read",
        "peak memory, resolved at both levels",
        "peak memory, selection materialised",
    ],
    "Reading a selection of {entries} entries": [
        "a hit: read_selection()",
        "in full: read_cache_file()",
        "json.loads() of the stamped file",
        "FlashInfer 0.7.4, load_configs() of the stamped file",
    ],
    "A lookup of FlashInfer's autotuner": [
        "choose_one(), a hit in a loaded file",
        "choose_one(), a hit of ours, the first of its key",
        "choose_one(), a hit of ours, a later one",
        "choose_one(), a hit of ours, a later one, recorded",
        "choose_one(), a miss, {entries} entries of ours",
        "choose_one(), a miss, {entries} entries of a loaded file",
        "the first lookup, 1,000 entries, without FlashInfer's own metadata call",
    ],
}


def rows_at(entries: str) -> dict[str, list[str]]:
    return {
        title.format(entries=entries): [row.format(entries=entries) for row in rows] for title, rows in ROWS.items()
    }


def names(report: dict[str, Any]) -> dict[str, list[str]]:
    return {section["title"]: [row["what"] for row in section["rows"]] for section in report["sections"]}


@pytest.mark.slow
def test_a_quick_run_measures_every_row(tmp_path: Path, flashinfer_folder: Callable[[str], Path]) -> None:
    variables = {**os.environ, "FI_TUNECACHE_TEST_FLASHINFER": str(flashinfer_folder("0.7.4").parent)}
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--write", str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "results.json").read_bytes())
    assert names(report) == rows_at("400")
    rows = [row for section in report["sections"] for row in section["rows"]]
    assert [row["what"] for row in rows if not row["value"]] == []
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# Benchmarks\n\n```\npython benchmarks/run.py --write\n```\n")
    for row in rows:
        assert f"\n| {row['what']} |" in page
        assert f"\n{row['what']} " in done.stdout


def test_the_kept_results_are_of_a_full_run() -> None:
    report = json.loads((BENCHMARKS / "results.json").read_bytes())
    assert report["quick"] is False
    assert names(report) == rows_at("100,000")
