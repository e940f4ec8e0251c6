"""One commit, whatever comes in between: an edit is in, or the error says how far it got."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_manifests import row, yanked
from memory_target import FAULT, Clock, Fault, MemoryTarget, fails_after, fails_before, limits

from fi_tunecache.errors import FormatError, RegistryError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, Manifest
from fi_tunecache.publish.commit import Outcome, commit
from fi_tunecache.publish.registry_edit import Edit
from fi_tunecache.publish.target import Target, Written

H200 = Folder("0.7.4", "nvidia-h200")
STALE = "memory let a stale write pass: what others had published is put back"
HARMLESS = "publish again: it does no harm"


def edit(*rows: BundleRow) -> Edit:
    return Edit({H200: rows}, {f"{H200}/{item.file}": item.file.encode() for item in rows})


def publish(target: Target, *numbers: int, clock: Clock | None = None, **options: bool) -> Outcome:
    clock = clock or Clock()
    return commit(target, edit(*map(row, numbers)), "A message", deadline=clock, sleep=clock.sleep, **options)


def failure(target: Target, *numbers: int, clock: Clock | None = None, **options: bool) -> str:
    with pytest.raises(RegistryError) as caught:
        publish(target, *numbers, clock=clock, **options)
    return str(caught.value)


def shown(target: MemoryTarget) -> Manifest:
    return Manifest() if target.head is None else target.manifests(target.head, [H200])[H200]


def holds(target: MemoryTarget, *numbers: int) -> bool:
    """Whether these rows, each once, are all, and all of their bundles are there."""
    assert target.head is not None
    files = {item.file for item in shown(target).bundles}
    assert {f"{H200}/{file}" for file in files} <= target.files(target.head).keys()
    return sorted(item.file for item in shown(target).bundles) == sorted(row(number).file for number in numbers)


@pytest.fixture
def target() -> MemoryTarget:
    """One that holds bundle 0."""
    target = MemoryTarget()
    publish(target, 0)
    return target


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def undisturbed(target: MemoryTarget) -> Iterator[None]:
    """For others, who must not meet the faults that wait for us."""
    faults, target.faults = target.faults, deque()
    yield
    target.faults = faults


def meanwhile(target: MemoryTarget, *edits: Callable[[], object]) -> None:
    """Let others do something before the next writes."""
    for other in edits:

        def fault(make: Callable[[], str], other: Callable[[], object] = other) -> str:
            with undisturbed(target):
                other()
            return make()

        target.faults.append(fault)


# --- what goes well


def test_a_new_registry() -> None:
    target = MemoryTarget()
    assert publish(target, 1, 2) == Outcome("1", changed=True, attempts=1)
    assert holds(target, 1, 2)


def test_what_is_there_already_is_not_written(target: MemoryTarget, clock: Clock) -> None:
    publish(target, 1)
    assert publish(target, 0, 1, clock=clock) == Outcome("2", changed=False, attempts=0)
    assert (len(target.main), clock.slept) == (2, [])


def test_one_commit_holds_all_of_it(target: MemoryTarget) -> None:
    publish(target, 1, 2, 3)
    assert len(target.main) == 2
    assert target.main[1].keys() - target.main[0].keys() == {f"{H200}/{row(number).file}" for number in (1, 2, 3)}


def test_a_pull_request(target: MemoryTarget) -> None:
    outcome = publish(target, 1, create_pr=True)
    assert outcome == Outcome("refs/pr/1", changed=True, attempts=1, pull_request="pull request 1")
    assert holds(target, 0)
    assert f"{H200}/{row(1).file}" in target.proposed[0]


# --- others, and limits


def test_somebody_else_was_faster(target: MemoryTarget, clock: Clock) -> None:
    meanwhile(target, lambda: publish(target, 7))
    assert publish(target, 1, clock=clock) == Outcome("3", changed=True, attempts=2)
    assert holds(target, 0, 1, 7)
    assert [0 <= pause <= 0.2 for pause in clock.slept] == [True]


def test_somebody_else_has_published_the_same(target: MemoryTarget) -> None:
    meanwhile(target, lambda: publish(target, 1))
    assert publish(target, 1) == Outcome("2", changed=False, attempts=1)


def test_others_are_faster_for_ever(target: MemoryTarget, clock: Clock) -> None:
    meanwhile(target, *[lambda number=number: publish(target, number) for number in range(100, 200)])
    assert failure(target, 1, clock=clock) == "somebody else has published meanwhile; try again"
    assert 10 < len(clock.slept) < 60
    assert max(clock.slept) <= 5
    assert not holds(target, 1)


def test_there_is_no_time_for_another_attempt(target: MemoryTarget, clock: Clock) -> None:
    """One that could not end would leave open whether it was written."""

    def slowly() -> None:
        publish(target, 7)
        clock.left -= 31

    meanwhile(target, slowly)
    assert failure(target, 1, clock=clock) == "somebody else has published meanwhile; try again"
    assert clock.slept == []
    assert holds(target, 0, 7)


@pytest.mark.parametrize(
    ("pause", "least"),
    [
        pytest.param(None, 0.0, id="no pause asked for"),
        pytest.param(0.0, 0.0, id="no pause needed"),
        pytest.param(7.0, 7.0, id="a pause that fits"),
    ],
)
def test_the_target_limits_the_rate(target: MemoryTarget, clock: Clock, pause: float | None, least: float) -> None:
    target.faults.append(limits(pause))
    assert publish(target, 1, clock=clock) == Outcome("2", changed=True, attempts=2)
    assert [least <= slept <= least + 0.2 for slept in clock.slept] == [True]


def test_a_pause_that_does_not_fit_is_not_made(target: MemoryTarget, clock: Clock) -> None:
    target.faults.append(limits(3600.0))
    assert failure(target, 1, clock=clock) == "the Hub limits the number of requests; wait"
    assert (clock.slept, len(target.main)) == ([], 1)


def test_a_limit_without_a_pause_is_not_run_against(target: MemoryTarget, clock: Clock) -> None:
    target.faults.extend([limits(0.0)] * 1000)
    assert failure(target, 1, clock=clock) == "the Hub limits the number of requests; wait"
    assert len(clock.slept) < 60


# --- it may have been written


def test_it_failed_and_was_written(target: MemoryTarget, clock: Clock) -> None:
    target.faults.append(fails_after)
    outcome = publish(target, 1, clock=clock)
    assert outcome == Outcome("2", changed=True, attempts=1, notices=("memory reported a failure, but had written",))
    assert holds(target, 0, 1)
    assert len(target.main) == 2


def test_it_failed_and_was_not_written(target: MemoryTarget) -> None:
    target.faults.append(fails_before)
    assert publish(target, 1) == Outcome("2", changed=True, attempts=2)
    assert holds(target, 0, 1)


def test_it_failed_and_was_written_and_others_have_built_on_it(target: MemoryTarget) -> None:
    def fail(make: Callable[[], str]) -> str:
        try:
            return fails_after(make)
        finally:
            publish(target, 7)

    target.faults.append(fail)
    assert publish(target, 1).revision == "3"
    assert holds(target, 0, 1, 7)


def test_it_fails_for_ever(target: MemoryTarget) -> None:
    target.faults.extend([fails_before] * 4)
    assert failure(target, 1) == f"the Hub has a fault; it may have written all the same; {HARMLESS}"
    assert not target.faults
    assert holds(target, 0)


def test_it_failed_and_there_is_no_time_to_look(target: MemoryTarget) -> None:
    target.faults.append(fails_after)
    said = failure(target, 1, clock=Clock(1e-9))
    assert said == f"the Hub has a fault; it may have written all the same; {HARMLESS}"
    assert publish(target, 1) == Outcome("2", changed=False, attempts=0)


def test_it_failed_and_can_not_be_looked_at(target: MemoryTarget) -> None:
    def fail(make: Callable[[], str]) -> str:
        target.step = refuse
        return fails_after(make)

    def refuse() -> None:
        raise RegistryError("the Hub can't be reached", "check the network")

    target.faults.append(fail)
    assert failure(target, 1) == f"the Hub can't be reached; it may have written all the same; {HARMLESS}"


def test_what_was_looked_up_is_no_longer_uncertain(target: MemoryTarget) -> None:
    target.faults.extend([fails_before, limits(3600.0)])
    assert failure(target, 1) == "the Hub limits the number of requests; wait"


def test_a_pull_request_is_not_opened_twice(target: MemoryTarget) -> None:
    target.faults.append(fails_after)
    said = failure(target, 1, create_pr=True)
    assert said == "the Hub has a fault; it may have written all the same; look for its pull request first"
    assert len(target.proposed) == 1


# --- what was written is read back


class Altering(MemoryTarget):
    """Takes a write and loses the manifest."""

    def write(self, files: dict[str, bytes], *arguments: object, **options: bool) -> Written:  # type: ignore[override]
        kept = {path: data for path, data in files.items() if not path.endswith("manifest.json")}
        return super().write(kept, *arguments, **options)  # type: ignore[arg-type]


def test_what_is_read_back_is_not_what_was_written() -> None:
    """It is written again a few times: on a careless server somebody else may have been in between."""
    said = failure(Altering(), 1)
    assert said == (
        "memory: what was written is not there when it is read back, at 4; publish again; tell whoever runs the Hub"
    )


def test_it_can_not_be_read_back(target: MemoryTarget) -> None:
    steps = iter([None, None, FAULT])

    def step() -> None:
        if error := next(steps):
            raise error

    target.step = step
    assert failure(target, 1) == f"the Hub has a fault; it was written, at 2, but not read back; {HARMLESS}"


def test_what_is_read_back_is_damaged(target: MemoryTarget) -> None:
    """Still an error of the registry: what was to be published is none that is malformed."""

    def spoil(make: Callable[[], str]) -> str:
        revision = make()
        target.main[-1][f"{H200}/manifest.json"] = b"{"
        return revision

    target.faults.append(spoil)
    said = failure(target, 1)
    assert said.startswith(f"memory/{H200}/manifest.json: not a JSON document")
    assert said.endswith(f"; it was written, at 2, but not read back; {HARMLESS}")


def test_errors_before_anything_was_written_are_left_alone(target: MemoryTarget) -> None:
    target.main[-1][f"{H200}/manifest.json"] = b"{"
    with pytest.raises(FormatError, match=r"^memory/0\.7\.4/nvidia-h200/manifest\.json: not a JSON document"):
        publish(target, 1)


# --- a target that lets a stale write pass


@pytest.fixture
def careless() -> MemoryTarget:
    target = MemoryTarget(checks_parent=False)
    publish(target, 0)
    return target


def test_what_a_stale_write_has_overwritten_is_put_back(careless: MemoryTarget) -> None:
    meanwhile(careless, lambda: publish(careless, 7))
    assert publish(careless, 1) == Outcome("4", changed=True, attempts=2, notices=(STALE,))
    assert holds(careless, 0, 1, 7)


def test_the_serial_goes_beyond_those_that_were_seen(careless: MemoryTarget) -> None:
    """Else who has pulled in between would take it for a registry that went back."""
    meanwhile(careless, lambda: [publish(careless, number) for number in (5, 6, 7)])
    publish(careless, 1)
    assert holds(careless, 0, 1, 5, 6, 7)
    assert shown(careless).serial == 5
    assert [careless.manifests(str(n), [H200])[H200].serial for n in (4, 5, 6)] == [4, 2, 5]


def test_the_serial_is_mended_where_no_row_is_missing(careless: MemoryTarget) -> None:
    meanwhile(careless, lambda: [publish(careless, number) for number in (5, 6)])
    assert publish(careless, 5, 6).notices == (STALE,)
    assert shown(careless).serial == 4


def test_a_yank_that_was_undone(careless: MemoryTarget) -> None:
    clock = Clock()
    yank = Edit({H200: (yanked(0),)})
    meanwhile(careless, lambda: commit(careless, yank, "Yank", deadline=clock, sleep=clock.sleep))
    assert publish(careless, 1).notices == (STALE,)
    assert shown(careless).bundles == (yanked(0), row(1))


def test_a_stale_write_that_seemed_to_have_failed(careless: MemoryTarget) -> None:
    def fail(make: Callable[[], str]) -> str:
        publish(careless, 7)
        return fails_after(make)

    careless.faults.append(fail)
    assert publish(careless, 1).notices == ("memory reported a failure, but had written", STALE)
    assert holds(careless, 0, 1, 7)


@pytest.mark.parametrize("then", [[], [fails_before]], ids=["well", "failed"])
def test_a_stale_write_that_seemed_to_have_failed_and_was_overwritten_itself(
    careless: MemoryTarget, then: list[Fault]
) -> None:
    """What is looked at then shows neither ours nor what it has overwritten."""

    def fail(make: Callable[[], str]) -> str:
        with undisturbed(careless):
            publish(careless, 7)
        try:
            return fails_after(make)
        finally:
            careless.main.append({**careless.main[-1], **careless.main[0]})

    careless.faults.extend([fail, *then])
    assert publish(careless, 1).notices == (STALE,)
    assert holds(careless, 0, 1, 7)


def test_what_was_not_in_the_commit_is_put_back_by_somebody_else(careless: MemoryTarget) -> None:
    """No failure was reported then, so none is told."""

    def lacks_ours(make: Callable[[], str]) -> str:
        made = make()
        careless.main[-1] = {**careless.main[-1], **careless.main[0]}
        with undisturbed(careless):
            publish(careless, 1)
        return made

    careless.faults.append(lacks_ours)
    assert publish(careless, 1) == Outcome("3", changed=True, attempts=1)
    assert holds(careless, 0, 1)


def test_others_put_it_back_themselves(careless: MemoryTarget) -> None:
    def again() -> None:
        if len(careless.main) == 3:  # ours has just overwritten theirs
            careless.step = lambda: None
            publish(careless, 7)

    meanwhile(careless, lambda: publish(careless, 7))
    careless.step = again
    assert publish(careless, 1) == Outcome("4", changed=True, attempts=1, notices=(STALE,))
    assert holds(careless, 0, 1, 7)


def test_what_puts_back_overwrites_again(careless: MemoryTarget) -> None:
    meanwhile(careless, lambda: publish(careless, 7), lambda: publish(careless, 8))
    assert publish(careless, 1) == Outcome("6", changed=True, attempts=3, notices=(STALE, STALE))
    assert holds(careless, 0, 1, 7, 8)


def test_others_that_lose_nothing_are_nobodys_business(careless: MemoryTarget) -> None:
    """A commit in between that writes other files: a write replaces no more than its own."""
    meanwhile(careless, lambda: careless.main.append({**careless.main[-1], "notes.txt": b"theirs"}))
    assert publish(careless, 1) == Outcome("3", changed=True, attempts=1)
    assert careless.main[-1]["notes.txt"] == b"theirs"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(limits(3600.0), id="limited"),
        pytest.param(fails_before, id="failed"),
        pytest.param(fails_after, id="failed, but written"),
        pytest.param(lambda make: make(), id="written, but not to be read"),
    ],
)
def test_what_may_not_be_put_back_is_told(careless: MemoryTarget, fault: Fault) -> None:
    clock = Clock()

    def refuse() -> None:
        raise FAULT

    def last(make: Callable[[], str]) -> str:
        clock.left = 0
        careless.step = refuse
        return fault(make)

    meanwhile(careless, lambda: publish(careless, 7))
    careless.faults.append(last)
    said = failure(careless, 1, clock=clock)
    assert said.endswith(
        "; what others had published meanwhile was overwritten, and may not be put back; "
        "let them publish again, and tell whoever runs the Hub that it ignores parent_commit"
    )


def test_a_history_that_can_not_be_read(target: MemoryTarget) -> None:
    steps = iter([None, None, None, FAULT])

    def step() -> None:
        if error := next(steps):
            raise error

    target.step = step
    outcome = publish(target, 1)
    said = "it can't be told whether others' rows were overwritten (the Hub has a fault; try again later)"
    assert outcome == Outcome("2", changed=True, attempts=1, notices=(said,))


# --- many at once


class Turns:
    """Threads of which one at a time makes a step; ``order`` says whose turn it is, over and over."""

    def __init__(self, order: list[int]) -> None:
        self._order = itertools.cycle(order)
        self._me = threading.local()
        self._control = threading.Semaphore(0)

    def run(self, works: list[Callable[[], None]]) -> None:
        waiting = {number: threading.Semaphore(0) for number in range(len(works))}

        def start(number: int, work: Callable[[], None]) -> None:
            self._me.turn = waiting[number]
            self._me.turn.acquire()
            try:
                work()
            finally:
                del waiting[number]
                self._control.release()

        threads = [threading.Thread(target=start, args=item) for item in enumerate(works)]
        for thread in threads:
            thread.start()
        while waiting:
            numbers = sorted(waiting)
            waiting[numbers[next(self._order) % len(numbers)]].release()
            self._control.acquire()
        for thread in threads:
            thread.join()

    def step(self) -> None:
        """The end of a turn, for who is in one."""
        if turn := getattr(self._me, "turn", None):
            self._control.release()
            turn.acquire()


ORDERS = st.lists(st.integers(0, 11), min_size=1, max_size=50)
FAULTS = st.lists(st.sampled_from([None, None, fails_before, fails_after, limits(None)]), max_size=6)


@pytest.mark.parametrize("checks_parent", [True, False], ids=["checks the parent", "lets stale writes pass"])
@settings(max_examples=150)
@given(order=ORDERS, publishers=st.integers(2, 4), commits=st.integers(1, 2), faults=FAULTS)
def test_whatever_comes_in_between_every_row_is_there_or_an_error_has_said_so(
    checks_parent: bool, order: list[int], publishers: int, commits: int, faults: list[Fault | None]
) -> None:
    target = MemoryTarget(checks_parent=checks_parent)
    target.faults.extend(faults)
    turns = Turns(order)
    target.step = turns.step

    published: set[int] = set()
    errors: dict[int, str] = {}

    def publisher(number: int) -> None:
        for bundle in range(10 * number, 10 * number + commits):
            try:
                publish(target, bundle)
            except RegistryError as error:
                errors[bundle] = str(error)
            else:
                published.add(bundle)

    turns.run([functools.partial(publisher, number) for number in range(publishers)])

    states = [target.manifests(str(number + 1), [H200])[H200] for number in range(len(target.main))]
    there = {item.file for item in states[-1].bundles} if states else set()
    lost = {number for number, error in errors.items() if "was overwritten, and may not be put back" in error}
    in_doubt = {number for number, error in errors.items() if "it may have written all the same" in error}
    assert there <= {row(number).file for number in published | in_doubt | lost}
    if not lost:
        assert {row(number).file for number in published} <= there
    if checks_parent:
        assert [state.serial for state in states] == list(range(1, len(there) + 1))
        assert len(published) + len(errors) == publishers * commits
