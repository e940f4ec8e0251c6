"""The command line as a process: what it imports, signals, pipes, terminals, limits, and odd standard streams."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import made
import pytest
from command_line import LIKE, child, isolated, only_line, run_process, snapshot
from made_machine import add_h200, add_unknown_flashinfer, compile_nvml

from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.publish.directory import add_bundles

DATA = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
FAR_TOO_HEAVY = ("torch", "flashinfer", "huggingface_hub", "rich", "pynvml", "filelock")


def test_the_main_job(tmp_path: Path) -> None:
    for cached in (False, True):
        done = run_process("pull", *LIKE, "--to", "tuned.json", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0].endswith("(cached)") == cached
    assert read_cache_file((tmp_path / "tuned.json").read_bytes()).environment().gpu == "NVIDIA H200"


def test_the_console_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("fi-tunecache")
    done = subprocess.run([script, "list"], cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith(" bundles in embedded")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([*LIKE], id="of a described environment"),
        pytest.param(["--environment", "facts.json"], id="of a saved environment"),
        pytest.param(["--environment", "facts.json", "--to", "tuned.json"], id="into a file"),
    ],
)
def test_a_warm_pull_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    add_bundles(tmp_path / "registry", "made", [made.bundle([made.entry(made.key(made.CUTLASS))])])
    command = ["pull", *arguments, "--registry", "./registry"]
    code = (
        "import sys\n"
        "from fi_tunecache.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        f"print(*sorted(sys.modules.keys() & {set(FAR_TOO_HEAVY)}), file=sys.stderr)\n"
    )
    cold = run_process(*command, folder=tmp_path, code=code)
    warm = run_process(*command, folder=tmp_path, code=code)
    assert cold.returncode == warm.returncode == 0
    assert "(cached)" in warm.stdout
    assert (cold.stderr.split(), warm.stderr.split()) == (["filelock"], [])


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["cache", "dir"], ["pull", "--help"]])
def test_help_imports_nothing_heavy(tmp_path: Path, command: list[str]) -> None:
    code = (
        "import sys\n"
        "from fi_tunecache.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        f"assert not sys.modules.keys() & {set(FAR_TOO_HEAVY)}\n"
    )
    done = run_process(*command, folder=tmp_path, code=code)
    assert (done.returncode, done.stderr) == (0, "")


SLOW_DISK = """
import os, sys, time
def fsync(descriptor):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = fsync
from fi_tunecache.__main__ import run
run()
"""


@pytest.mark.parametrize("before", [pytest.param(False, id="cold"), pytest.param(True, id="into a file, warm")])
def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, before: bool) -> None:
    """It comes while the bytes are on their way to a disk that is made slow here."""
    if before:
        assert run_process("pull", *LIKE, "--to", "tuned.json", folder=tmp_path).returncode == 0
    files = snapshot(tmp_path)
    command = ["pull", *LIKE, *(["--to", "tuned.json"] if before else [])]
    with child(
        sys.executable, "-W", "error", "-c", SLOW_DISK, *command, cwd=tmp_path, env=isolated(tmp_path)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, "")
    assert only_line(err.strip()) == "interrupted; nothing was half-written"
    assert snapshot(tmp_path) == files
    assert run_process("pull", *LIKE, folder=tmp_path).returncode == 0


def test_an_interrupt_while_the_commands_are_imported(tmp_path: Path) -> None:
    """Of the console script: it comes where click would be looked for."""
    code = (
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from fi_tunecache.__main__ import run\n"
        "run()\n"
    )
    done = run_process("list", folder=tmp_path, code=code)
    assert (done.returncode, done.stdout) == (130, "")
    assert only_line(done.stderr) == "interrupted; nothing was half-written"


@pytest.mark.parametrize("arguments", [["list"], ["inspect", str(DATA / "managed-store"), "--all"], ["--help"]])
def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-W", "error", "-m", "fi_tunecache", *arguments]
    with child(*command, cwd=tmp_path, env=isolated(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 0


def test_a_head_of_the_output(tmp_path: Path) -> None:
    shell = f"set -o pipefail; {sys.executable} -m fi_tunecache list | head -1"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=isolated(tmp_path), capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["env", *LIKE], ["--help"]])
def test_output_that_can_not_be_written(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "fi_tunecache", *arguments],
            cwd=tmp_path,
            env=isolated(tmp_path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert only_line(done.stderr) == (
        "the output can't be written (No space left on device); free space, or name another file"
    )


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_standard_stream_that_is_closed(tmp_path: Path, stream: str) -> None:
    shell = f'{sys.executable} -W error -m fi_tunecache "$@" {stream}>&-'
    for arguments, code in ((["list"], 0), (["list", "9.9/none"], 3)):
        done = subprocess.run(
            ["bash", "-c", shell, "bash", *arguments], cwd=tmp_path, env=isolated(tmp_path), capture_output=True
        )
        assert done.returncode == code


def test_a_file_larger_than_the_limit(tmp_path: Path) -> None:
    """As on a full disk; and what was there stays."""
    (tmp_path / "tuned.json").write_text("old")
    done = run_process(
        "pull",
        *LIKE,
        "--to",
        "tuned.json",
        "--force",
        folder=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    not_kept, failed = done.stderr.splitlines()
    assert not_kept.startswith(f"fi-tunecache: not kept in the cache: {tmp_path}/cache/bundles/")
    assert failed == (
        f"fi-tunecache: {tmp_path}/tuned.json can't be written (File too large); choose another file with --to"
    )
    assert (tmp_path / "tuned.json").read_text() == "old"
    assert list(snapshot(tmp_path)) == ["tuned.json"]


def test_a_cache_larger_than_the_limit(tmp_path: Path) -> None:
    done = run_process(
        "pull",
        *LIKE,
        folder=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "can't be written (File too large); free space or fix its permissions" in only_line(done.stderr)
    assert snapshot(tmp_path) == {}


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, int]]:
    """(our end, the process's end) of a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def on_terminal(folder: Path, *arguments: str, columns: int, environ: dict[str, str] | None = None) -> str:
    with terminal(columns) as (ours, theirs):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "fi_tunecache", *arguments],
            cwd=folder,
            env=isolated(folder, {"TERM": "xterm-256color", **(environ or {})}),
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        os.close(theirs)
        read = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not piece:
                break
            read += piece
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(timeout=30) == 0
    return read.decode().replace("\r\n", "\n")


ESCAPES = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["list"], id="list"),
        pytest.param(["env", *LIKE], id="env"),
        pytest.param(["inspect", str(DATA / "gemm-a.v1.json")], id="inspect"),
        pytest.param(["inspect", str(DATA / "gemm-a.v1.json"), "--all"], id="inspect --all"),
        pytest.param(["cache", "list"], id="cache list"),
    ],
)
def test_tables_fit_a_terminal_of_80_columns(tmp_path: Path, arguments: list[str]) -> None:
    run_process("pull", *LIKE, folder=tmp_path)
    text = ESCAPES.sub("", on_terminal(tmp_path, *arguments, columns=80))
    unfolded = run_process(*arguments, folder=tmp_path).stdout
    plain = unfolded.splitlines()  # lines that are not of a table are left to the terminal
    assert [line for line in text.splitlines() if len(line) > 80 and line not in plain] == []
    assert sorted("".join(text.split())) == sorted("".join(unfolded.split())), "nothing is cut off"


def test_a_narrow_terminal_folds_what_is_wide_and_cuts_nothing(tmp_path: Path) -> None:
    text = ESCAPES.sub("", on_terminal(tmp_path, "env", *LIKE, columns=40))
    value = "".join(line[24:] for line in text.splitlines() if line.startswith(("cutlass", " " * 24)))
    assert value == (
        "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl-libs-core==4.8.1;nvidia-cutlass-dsl==4.8.1"
    )


def test_output_in_a_pipe_is_not_folded(tmp_path: Path) -> None:
    for environ in ({}, {"COLUMNS": "80"}):
        lines = run_process("env", *LIKE, folder=tmp_path, environ=environ).stdout.splitlines()
        assert max(map(len, lines)) > 100
        assert len(lines) == 10
        assert not any("\x1b" in line or line != line.rstrip() for line in lines)


def test_no_colour_anywhere(tmp_path: Path) -> None:
    """Bold headings are all there is, NO_COLOR or not; a terminal that can do nothing gets nothing."""
    for environ in ({}, {"NO_COLOR": "1"}):
        text = on_terminal(tmp_path, "list", columns=100, environ=environ)
        assert set(ESCAPES.findall(text)) == {"1", "0"}
    assert not ESCAPES.search(on_terminal(tmp_path, "list", columns=100, environ={"TERM": "dumb"}))


def test_a_terminal_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "facts-\N{GREEK SMALL LETTER MU}.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    arguments = ["env", "--environment", "facts-\N{GREEK SMALL LETTER MU}.json"]
    done = run_process(*arguments, folder=tmp_path, environ={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == r"Facts from facts-\u03bc.json"


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A made machine: an H200 and a GPU in MIG mode, and what is installed there as files."""
    site, libraries = tmp_path / "site", tmp_path / "lib"
    add_h200(site, libraries, "0.7.4")
    compile_nvml(libraries)
    return {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(libraries)}


def test_several_gpus_of_different_names(tmp_path: Path, machine: dict[str, str]) -> None:
    done = run_process("pull", folder=tmp_path, environ=machine)
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == (
        "there are several GPUs of different names: 0: NVIDIA H200, 1: NVIDIA H100 80GB HBM3 MIG 1g.10gb; "
        "pick one with --gpu INDEX"
    )


def test_the_machine_of_the_embedded_bundles_is_served(tmp_path: Path, machine: dict[str, str]) -> None:
    """Found by the light probe, at level exact: also where its paths, and so FlashInfer's hashes, are others."""
    done = run_process("pull", "--gpu", "0", "--to", "tuned.json", folder=tmp_path, environ=machine)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "entries for NVIDIA H200, flashinfer 0.7.4 (exact) from embedded@" in lines[0]
    assert lines[-1].startswith("Wrote tuned.json; load it with ")
    stamped = read_cache_file((tmp_path / "tuned.json").read_bytes()).environment()
    saved = json.loads(run_process("env", "--gpu", "0", "--json", folder=tmp_path, environ=machine).stdout)
    assert stamped.metadata() == saved["environment"]


def test_a_mig_instance_is_another_gpu(tmp_path: Path, machine: dict[str, str]) -> None:
    done = run_process("pull", folder=tmp_path, environ={**machine, "CUDA_VISIBLE_DEVICES": "MIG-1-0"})
    assert done.returncode == 3
    assert "nothing in embedded fits NVIDIA H100 80GB HBM3 MIG 1g.10gb, flashinfer 0.7.4" in only_line(done.stderr)


def test_a_gpu_that_is_not_there(tmp_path: Path, machine: dict[str, str]) -> None:
    done = run_process("env", "--gpu", "2", folder=tmp_path, environ=machine)
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == ("there is no GPU 2; the GPUs are 0: NVIDIA H200, 1: NVIDIA H100 80GB HBM3")


def test_no_gpu_that_is_visible(tmp_path: Path, machine: dict[str, str]) -> None:
    done = run_process("resolve", folder=tmp_path, environ={**machine, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == (
        "CUDA_VISIBLE_DEVICES='' shows none of 0: NVIDIA H200, 1: NVIDIA H100 80GB HBM3; "
        "name the GPU with --device 'NVIDIA H200', or bring all facts with --environment FILE or --like "
        "0.7.4/nvidia-h200"
    )


def test_where_a_driver_fails_the_reason_is_told(tmp_path: Path, machine: dict[str, str]) -> None:
    done = run_process("pull", folder=tmp_path, environ={**machine, "FAKE_NVML_FAILS": "init=9"})
    assert done.returncode == 2
    assert only_line(done.stderr).startswith("no GPU was found: the NVIDIA driver is installed but not loaded; ")


def test_flashinfer_itself_is_asked_for_what_the_light_probe_lacks(tmp_path: Path) -> None:
    site, libraries = tmp_path / "site", tmp_path / "lib"
    add_unknown_flashinfer(site, f"def _collect_metadata(): return {made.H200.metadata()}")
    compile_nvml(libraries)
    environ = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": "GPU-0"}
    done = run_process("env", "--json", folder=tmp_path, environ=environ)
    assert done.returncode == 0
    assert json.loads(done.stdout)["environment"] == made.H200.metadata()
    line = only_line(done.stderr)
    assert line.startswith("the light probe does not know ")
    assert line.endswith("; asking FlashInfer itself (--probe light prevents it)")


def test_what_flashinfer_prints_goes_beside_the_output(tmp_path: Path) -> None:
    site, libraries = tmp_path / "site", tmp_path / "lib"
    add_unknown_flashinfer(site, f"print('hello')\ndef _collect_metadata(): return {made.H200.metadata()}")
    compile_nvml(libraries)
    environ = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": "GPU-0"}
    done = run_process("env", "--probe", "full", "--json", folder=tmp_path, environ=environ)
    assert (done.returncode, done.stderr) == (0, "hello\n")
    assert json.loads(done.stdout)["environment"] == made.H200.metadata()
