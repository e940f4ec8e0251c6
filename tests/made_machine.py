"""Made-up installations: folders of distributions and packages, shared libraries, and Pythons that see them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fi_tunecache.loader import Loader

TORCH_REQUIRES = (
    "filelock",
    'cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"',
)
"""From the METADATA of torch 2.11.0: what tells a build that takes NVIDIA's libraries from their wheels."""


def add_distribution(
    site: Path,
    name: str,
    version: str,
    *,
    requires: Iterable[str] = (),
    record: str | None = "a.py,sha256=aa,1\r\n",
    direct_url: str | None = None,
    folder: str | None = None,
) -> Path:
    info = site / (folder or f"{name.replace('-', '_')}-{version}.dist-info")
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{needs}\nName: not this\n", "utf-8"
    )
    for file, text in (("RECORD", record), ("direct_url.json", direct_url)):
        if text is not None:
            (info / file).write_bytes(text.encode())
    return info


def add_package(site: Path, name: str, **modules: str) -> Path:
    package = site / name
    package.mkdir(parents=True)
    for module, text in {"__init__": "", **modules}.items():
        (package / f"{module}.py").write_text(text, "utf-8")
    return package


def add_torch(site: Path, version: str, cuda: str | None, requires: Iterable[str] = TORCH_REQUIRES) -> Path:
    """torch as its wheels look; importing it fails, so that a test notices who does."""
    add_distribution(site, "torch", version, requires=requires)
    text = f"from typing import Optional\n\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    return add_package(site, "torch", __init__="raise SystemExit('torch was imported')", version=text)


def add_flashinfer(site: Path, version: str, build_meta: str | None = None) -> Path:
    add_distribution(site, "flashinfer-python", version)
    text = f'"""Build metadata."""\n__version__ = "{version}"\n__git_commit__ = "77039051"\n'
    return add_package(
        site, "flashinfer", __init__="raise SystemExit('flashinfer was imported')", _build_meta=build_meta or text
    )


def add_unknown_flashinfer(site: Path, autotuner: str) -> Path:
    """One from a bare source tree, whose version only FlashInfer itself could tell."""
    add_distribution(site, "flashinfer-python", "0.0.0+unknown")
    return add_package(site, "flashinfer", _build_meta='__version__ = "0.0.0+unknown"\n', autotuner=autotuner)


def add_library(folder: Path, real_name: str, *links: str) -> Path:
    """An empty file by its full name, and links to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / real_name).touch()
    for link in links:
        (folder / link).symlink_to(real_name)
    return folder


def cache_of(*folders: Path) -> tuple[tuple[str, str], ...]:
    """What ldconfig would list of these folders: the links, names in descending order."""
    paths = [path for folder in folders for path in folder.iterdir() if path.is_symlink()]
    return tuple((path.name, str(path)) for path in sorted(paths, key=lambda path: path.name, reverse=True))


def add_h200(site: Path, libraries: Path, flashinfer: str) -> Loader:
    """The machine that tests/data was tuned on, as far as files tell it."""
    add_flashinfer(site, flashinfer)
    add_torch(site, "2.11.0", "13.0")
    for name, version in (
        ("apache-tvm-ffi", "0.1.15.post2"),
        ("nvidia-cublas", "13.1.0.3"),
        ("nvidia-cudnn-cu13", "9.19.0.56"),
        ("nvidia-cudnn-frontend", "1.32.0"),
        ("nvidia-cutlass-dsl", "4.8.1"),
        ("nvidia-cutlass-dsl-libs-base", "4.8.1"),
        ("nvidia-cutlass-dsl-libs-core", "4.8.1"),
    ):
        add_distribution(site, name, version)
    return Loader(cache=cache_of(add_library(libraries, "libcublas.so.13.1.0.3", "libcublas.so.13", "libcublas.so")))


def compile_library(source: str, path: Path, soname: str) -> None:
    compiler = shutil.which("cc")
    assert compiler, "this test compiles a small shared library: install a C compiler, named cc"
    path.parent.mkdir(parents=True, exist_ok=True)
    source_file = path.with_suffix(".c")
    source_file.write_text(source, "utf-8")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(path), str(source_file)]
    subprocess.run(command, check=True)


def run_python(code: str, *path: Path, environ: Mapping[str, str] | None = None) -> Any:
    """Run ``code`` in a fresh Python that looks into ``path`` first; the JSON that it prints last."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **(environ or {})}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_nvml(folder: Path) -> None:
    """A driver library with an H200 and an H100 in MIG mode with two instances, in slots 0 and 2.

    ``FAKE_NVML_LOG`` names the file that calls are noted in, ``FAKE_NVML_FAILS`` (``init=9``) one
    call and the code it returns.
    """
    compile_library(_NVML, folder / "libnvidia-ml.so.1", "libnvidia-ml.so.1")


_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct gpu { int index; int slot; } *device;
static struct gpu gpus[2] = {{0, -1}, {1, -1}}, instances[3] = {{1, 0}, {1, 1}, {1, 2}};
static int answer(const char *call) {
    const char *fails = getenv("FAKE_NVML_FAILS"), *log = getenv("FAKE_NVML_LOG");
    FILE *file = fopen(log ? log : "/dev/null", "a");
    fprintf(file, "%s\n", call);
    fclose(file);
    size_t length = strlen(call);
    return fails && !strncmp(fails, call, length) && fails[length] == '=' ? atoi(fails + length + 1) : 0;
}
int nvmlInitWithFlags(unsigned flags) { return answer("init"); }
int nvmlShutdown(void) { return answer("shutdown"); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return answer("count"); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found) { *found = &gpus[index]; return answer("handle"); }
int nvmlDeviceGetName(device of, char *name, unsigned size) {
    const char *whole = of->index ? "NVIDIA H100 80GB HBM3" : "NVIDIA H200";
    snprintf(name, size, of->slot < 0 ? "%s" : "%s MIG 1g.10gb", whole);
    return answer("name");
}
int nvmlDeviceGetUUID(device of, char *uuid, unsigned size) {
    snprintf(uuid, size, of->slot < 0 ? "GPU-%d" : "MIG-%d-%d", of->index, of->slot);
    return answer("uuid");
}
int nvmlDeviceGetMigMode(device of, unsigned *now, unsigned *pending) {
    *now = *pending = of->index;
    return answer("mig");
}
int nvmlDeviceGetMaxMigDeviceCount(device of, unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(device of, unsigned slot, device *found) {
    *found = &instances[slot];
    return slot == 1 ? 6 : 0;
}
"""
