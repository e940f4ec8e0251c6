"""The process that talks to a Hub: whatever it does, who asks gets an answer or an error, in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from command_line import TOKENS, child, isolated
from hub_server import Fault, HubServer

from fi_tunecache.deadline import Deadline
from fi_tunecache.hub_messages import (
    AskFile,
    AskHead,
    AskHistory,
    AskTree,
    Committed,
    CreateRepository,
    Done,
    File,
    Head,
    History,
    MakeCommit,
    Prefetch,
    Tree,
    TreeFile,
)
from fi_tunecache.hub_process import HubError, HubProcess

PYTHON = sys.executable
COMMIT = "1" * 40
ANSWER, DONE = (msgspec.json.encode(answer) + b"\n" for answer in (Head(COMMIT), Done()))
HEAD = f"os.write(1, {ANSWER})"
READ = "import os, sys, time; line = sys.stdin.readline()"


def process(folder: Path, seconds: float = 30, *, offline: bool = False) -> HubProcess:
    return HubProcess("the registry", "team/tuned", folder / "hub", Deadline(seconds), offline=offline)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program in the place of the one that talks to the Hub."""

    def put(code: str) -> None:
        script = tmp_path / "stand-in"
        script.write_text(f"#!{PYTHON}\n{code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    return put


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a module in the place of huggingface_hub."""

    def put(code: str) -> None:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "huggingface_hub.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / "path")

    return put


# --- a process that works


def test_it_starts_at_the_first_question_and_answers_more(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(
        f"import os, sys\nfor line in sys.stdin:\n    open('{tmp_path}/pids', 'a').write(f'{{os.getpid()}}\\n'); {HEAD}"
    )
    asking = process(tmp_path)
    assert not (tmp_path / "pids").exists()
    for _ in range(3):
        assert asking.ask(AskHead(), Head) == Head(COMMIT)

    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    assert len(set(pids)) == 1
    del asking
    assert not Path(f"/proc/{pids[0]}").exists(), "it has ended, and was waited for"


def everything(hub: HubServer, asking: HubProcess) -> None:
    """Every question that there is."""
    assert asking.ask(CreateRepository(private=False), Done) == Done()
    assert asking.ask(CreateRepository(private=False), Done) == Done(), "where it is there, nothing happens"
    first = asking.ask(AskHead(), Head).commit
    assert first == hub.head("team/tuned")
    made = asking.ask(MakeCommit("main", first, {"a/b.json": b"{}", "c": b"\xff\x00"}, "Two files", False), Committed)
    assert made == Committed(hub.head("team/tuned"))
    assert asking.ask(AskHistory(made.commit), History) == History((made.commit, first))
    assert asking.ask(AskHead("main"), Head) == asking.ask(AskHead(made.commit), Head) == Head(made.commit)
    assert {file.path for file in asking.ask(AskTree(made.commit), Tree).files} == {".gitattributes", "a/b.json", "c"}
    assert asking.ask(Prefetch(made.commit, ("c", "a/b.json", "none")), Done) == Done()
    hub.clear_log()
    assert asking.ask(AskFile(made.commit, "c", 2), File) == File(b"\xff\x00")
    assert asking.ask(AskFile(made.commit, "c", 1), File) == File(None, too_large=True)
    assert hub.log == [], "they came before"
    assert asking.ask(AskFile(made.commit, "none", 9), File) == File(None)
    proposed = asking.ask(MakeCommit("main", made.commit, {"d": b"d"}, "Proposed", True), Committed)
    assert proposed.pull_request == f"{hub.endpoint}/datasets/team/tuned/discussions/1"
    assert hub.head("team/tuned") == made.commit
    with pytest.raises(HubError) as caught:
        asking.ask(MakeCommit("main", first, {"d": b"d"}, "Too late", False), Committed)
    assert (caught.value.failure.kind, caught.value.failure.status) == ("stale", 412)


def test_every_question(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    everything(hub, process(tmp_path))
    assert not (tmp_path / "hf").exists(), "the user's own cache is left alone"


def test_offline_it_answers_from_its_cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create("team/tuned")
    commit = hub.put("team/tuned", {"a": b"a", "b": b"b"})
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    process(tmp_path).ask(AskFile(commit, "a", 9), File)
    hub.clear_log()

    offline = process(tmp_path, offline=True)
    assert offline.ask(AskFile(commit, "a", 9), File) == File(b"a")
    assert offline.ask(AskTree(commit), Tree).files == (TreeFile("a", ""),)
    for question in (AskFile(commit, "b", 9), AskHead(), AskTree("0" * 40)):
        with pytest.raises(HubError, match=r"^the registry: this is not in the cache, and the Hub may not be asked"):
            offline.ask(question, Done)
    assert hub.log == []
    with pytest.raises(HubError, match="this is not in the cache"):
        process(tmp_path / "nowhere", offline=True).ask(AskFile(commit, "a", 9), File)
    assert not (tmp_path / "nowhere").exists()


def test_its_variables_are_its_own(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    before = dict(os.environ)
    stand_in(
        f"{READ}\nnames = sorted(name for name in os.environ if name.startswith('HF_HUB_'))\n"
        'print(\'{"type":"Failure","kind":"refused","detail":"\' + \' \'.join(names) + \'"}\')'
    )
    with pytest.raises(HubError) as caught:
        process(tmp_path, offline=True).ask(AskHead(), Head)
    assert caught.value.failure.detail.split() == [
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_SYMLINKS_WARNING",
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_DISABLE_XET",
        "HF_HUB_ENABLE_HF_TRANSFER",
        "HF_HUB_OFFLINE",
    ]
    assert dict(os.environ) == before


# --- a process that does not


CRASHED = "the registry: the process that talks to the Hub ended"


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        pytest.param("import os; os._exit(3)", "exit code 3", id="at once"),
        pytest.param(f"{READ}; os._exit(0)", "exit code 0", id="without an answer"),
        pytest.param(f"{READ}; os.kill(os.getpid(), 9)", "exit code -9", id="killed"),
        pytest.param(f"{READ}; os.kill(os.getpid(), 11)", "exit code -11", id="a segmentation fault"),
        pytest.param(f"{READ}; sys.exit('one\\ntwo\\n\\n')", "two", id="with its last words"),
        pytest.param(f"{READ}; os.write(1, b'{{'); sys.exit('half')", "half", id="in the middle of an answer"),
        pytest.param(f"{READ}; print('hello', flush=True); time.sleep(9)", "wrong answer", id="garbage"),
        pytest.param(f"{READ}; print(flush=True); time.sleep(9)", "wrong answer", id="an empty line"),
        pytest.param(f"{READ}; os.write(1, b'\\xff\\n'); time.sleep(9)", "wrong answer", id="no text"),
        pytest.param(f"{READ}; print('[' * 99_999, flush=True); time.sleep(9)", "wrong answer", id="deep"),
        pytest.param(f"{READ}; os.write(1, {ANSWER * 2}); time.sleep(9)", "wrong answer", id="two answers"),
        pytest.param(f"{READ}; os.write(1, {DONE})", "wrong answer", id="to another question"),
        pytest.param("import sys; sys.exit('x' * 9999)", "x" * 300, id="with many words"),
    ],
)
def test_a_process_that_misbehaves(tmp_path: Path, stand_in: Callable[[str], None], code: str, detail: str) -> None:
    stand_in(code)
    asking = process(tmp_path)
    with pytest.raises(HubError) as caught:
        asking.ask(AskHead(), Head)
    assert str(caught.value) == f"{CRASHED} ({detail}); run it again; report this if it happens again"
    stand_in(f"{READ}; {HEAD}")
    if str(DONE) not in code:  # that one goes on
        assert asking.ask(AskHead(), Head) == Head(COMMIT), "another one is started"


def test_a_process_that_can_not_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(HubError, match=r"the process that talks to the Hub ended \(FileNotFoundError\)"):
        process(tmp_path).ask(AskHead(), Head)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import time; time.sleep(60)", id="before it reads"),
        pytest.param(f"{READ}; time.sleep(60)", id="after it has read"),
        pytest.param(f"{READ}; print('{{', end='', flush=True); time.sleep(60)", id="in the middle of an answer"),
        pytest.param(f"{READ}\nwhile True: print('{{', end='', flush=True); time.sleep(0.01)", id="while it talks"),
        pytest.param(
            "import signal, time\nfor number in (1, 2, 13, 15): signal.signal(number, signal.SIG_IGN)\ntime.sleep(60)",
            id="and ignores signals",
        ),
    ],
)
@pytest.mark.parametrize("size", [pytest.param(1, id="small"), pytest.param(1 << 20, id="more than a pipe holds")])
def test_a_process_that_hangs_is_killed_at_the_deadline(
    tmp_path: Path, stand_in: Callable[[str], None], code: str, size: int
) -> None:
    stand_in(f"import os; open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n{code}")
    asking = process(tmp_path, 0.5)
    started = time.monotonic()
    with pytest.raises(HubError) as caught:
        asking.ask(MakeCommit("main", COMMIT, {"file": b"x" * size}, "", False), Committed)
    assert 0.45 < time.monotonic() - started < 0.9
    assert str(caught.value).startswith("the registry: the Hub gave no answer in time (0.5 s); try again with a longer")
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()

    started = time.monotonic()
    with pytest.raises(HubError, match="no answer in time"):
        asking.ask(AskHead(), Head)
    assert time.monotonic() - started < 0.3, "the deadline is for all questions together"


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        pytest.param("raise ModuleNotFoundError('not here')", "ModuleNotFoundError: not here", id="missing"),
        pytest.param("", "AttributeError: module 'huggingface_hub' has no attribute 'HfApi'", id="something else"),
        pytest.param(
            "class HfApi: pass", "AttributeError: module 'huggingface_hub' has no attribute 'errors'", id="too old"
        ),
        pytest.param("import fi_tunecache.none", "ModuleNotFoundError: No module named", id="lacks what it needs"),
        pytest.param("1 / 0", "ZeroDivisionError: division by zero", id="broken"),
        pytest.param("raise OSError('x' * 9999)", "OSError: xxxxxx", id="with many words"),
    ],
)
def test_a_library_that_can_not_be_used(tmp_path: Path, library: Callable[[str], None], code: str, detail: str) -> None:
    library(code)
    with pytest.raises(HubError) as caught:
        process(tmp_path).ask(AskHead(), Head)
    line = str(caught.value)
    assert line.startswith(f"the registry: huggingface_hub can't be used ({detail}")
    assert line.endswith("; install huggingface_hub>=0.34,<3 where fi-tunecache runs")
    assert len(line) < 500


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        pytest.param("import os; os._exit(7)", r"ended \(exit code 7\)", id="ends the process"),
        pytest.param("import sys; sys.exit('no')", r"ended \(no\)", id="raises SystemExit"),
        pytest.param("import time; time.sleep(60)", r"no answer in time", id="hangs"),
    ],
)
def test_a_library_that_takes_the_process_with_it(
    tmp_path: Path, library: Callable[[str], None], code: str, detail: str
) -> None:
    library(code)
    with pytest.raises(HubError, match=detail):
        process(tmp_path, 1).ask(AskHead(), Head)


def test_what_a_library_prints_is_no_answer(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Callable[[str], None]
) -> None:
    hub.create("team/tuned")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    library(
        "import os, sys, importlib\nprint('{}', flush=True)\nos.system('echo hello')\n"
        "sys.path.pop(0)\ndel sys.modules['huggingface_hub']\nimportlib.import_module('huggingface_hub')"
    )
    assert process(tmp_path).ask(AskHead(), Head) == Head(hub.head("team/tuned"))


# --- what it leaves behind


def test_an_interrupt_from_the_terminal_is_for_who_asks(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends it to the whole group of processes."""
    hub.create("team/tuned")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    before = children()
    asking = process(tmp_path)
    asking.ask(AskHead(), Head)
    (pid,) = children() - before
    os.kill(pid, signal.SIGINT)
    assert asking.ask(AskHead(), Head) == Head(hub.head("team/tuned"))
    assert pid in children()


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    (found,) = (path.read_text() for path in Path(f"/proc/{os.getpid()}/task/{os.getpid()}").glob("children"))
    return set(map(int, found.split()))


ASKING = """
import gc, os, sys
from pathlib import Path
from fi_tunecache.deadline import Deadline
from fi_tunecache.hub_messages import AskHead, Head
from fi_tunecache.hub_process import HubError, HubProcess
asking = HubProcess("x", "team/tuned", Path("hub"), Deadline(float(sys.argv[1])))
"""


@contextlib.contextmanager
def asked(folder: Path, hub: HubServer, code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process whose question hangs at the Hub, and the pid of the one that it has started for that."""
    hub.create("team/tuned")
    hub.fault(Fault(hang=60))
    environ = isolated(folder, {"HF_ENDPOINT": hub.endpoint})
    with child(sys.executable, "-c", ASKING + code, "30", cwd=folder, env=environ) as parent:
        while not hub.log:
            time.sleep(0.02)
        (pid,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        yield parent, int(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_does_not_outlive_who_asked(tmp_path: Path, hub: HubServer, number: int) -> None:
    """Also in the middle of a request."""
    with asked(tmp_path, hub, "asking.ask(AskHead(), Head)") as (parent, pid):
        assert alive(pid)
        parent.send_signal(number)
        parent.wait(5)
        assert ends(pid, 2)


def test_many_processes_leave_no_zombie_and_no_warning(tmp_path: Path, hub: HubServer) -> None:
    hub.create("team/tuned")
    script = tmp_path / "stand-in"
    script.write_text(f"#!{sys.executable}\n{READ}; time.sleep(60 if os.path.exists('hang') else 0)")
    script.chmod(0o755)
    code = f"""
assert asking.ask(AskHead(), Head).commit == {hub.head("team/tuned")!r}
executable, sys.executable = sys.executable, {str(script)!r}
for hang in (False, True):
    if hang:
        Path("hang").touch()
    asking = HubProcess("x", "team/tuned", Path("hub"), Deadline(0.5))
    try:
        asking.ask(AskHead(), Head)
    except HubError as error:
        print(error.failure.kind)
descriptors = len(os.listdir("/proc/self/fd"))
del asking
gc.collect()
print(Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split())
print(descriptors > len(os.listdir("/proc/self/fd")) == 4)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", ASKING + code, "30"],
        cwd=tmp_path,
        env=isolated(tmp_path, {"HF_ENDPOINT": hub.endpoint}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout.split("\n"), done.stderr) == (["crashed", "deadline", "[]", "True", ""], "")


def test_a_process_that_does_not_leave_is_killed(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(f"{READ}; {HEAD}; time.sleep(60)")
    before = children()
    asking = process(tmp_path)
    asking.ask(AskHead(), Head)
    (pid,) = children() - before
    started = time.monotonic()
    del asking
    assert time.monotonic() - started < 1
    assert not Path(f"/proc/{pid}").exists()


# --- the token


@pytest.mark.parametrize(
    ("variable", "token"),
    [
        pytest.param("HF_TOKEN", TOKENS[0], id="of a user"),
        pytest.param("HF_TOKEN", TOKENS[1], id="of an organisation"),
        pytest.param("HUGGING_FACE_HUB_TOKEN", "another kind: SECRET", id="of another kind"),
        pytest.param("NONE", TOKENS[0], id="from somewhere else"),
        pytest.param("NONE", TOKENS[1], id="of an organisation, from somewhere else"),
    ],
)
def test_a_token_in_its_last_words_is_not_told(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, variable: str, token: str
) -> None:
    monkeypatch.setenv(variable, token)
    monkeypatch.setenv("SOME_TOKEN", token)
    stand_in(f"{READ}; sys.exit(f'Authorization: Bearer {{os.environ[\"SOME_TOKEN\"]}} was refused')")
    with pytest.raises(HubError) as caught:
        process(tmp_path).ask(AskHead(), Head)
    assert "(Authorization: Bearer *** was refused)" in str(caught.value)
    shown = f"{caught.value!r} {caught.value.error!r} {caught.value.failure!r}"
    assert not re.search("secret", shown, re.IGNORECASE)


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_that_a_hub_sends_back_is_not_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(f"{token}\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    hub.fault(Fault(status=403, message=f"{token} may not do this"))
    with pytest.raises(HubError, match=r"the Hub refuses \(403: \*\*\* may not do this\)"):
        process(tmp_path).ask(AskHead(), Head)
