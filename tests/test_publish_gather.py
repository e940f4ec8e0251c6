"""Making bundles of what FlashInfer has saved: what belongs together, what is left out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import made_sources
import msgspec
import pytest
from made_sources import PROVENANCE, gathered, lines, source

from fi_tunecache.bundle import MARK, Bundle, read_bundle, write_bundle
from fi_tunecache.entry import Entry
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.errors import FiTuneCacheError, FormatError, IntegrityError, UsageError
from fi_tunecache.key import Key
from fi_tunecache.managed_entry import ProtocolRecord
from fi_tunecache.managed_store import write_entries
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.left_out import LeftOut, Reason
from fi_tunecache.publish.recorded_lookups import Question, questions_of, read_questions
from fi_tunecache.recorded_lookup import RecordedLookup, Served, write_lookups
from fi_tunecache.source import SourceKind, read_source
from fi_tunecache.verdict import Rule

DATA = Path(__file__).parent / "data"
OF_0_7_4 = DATA / "h200-flashinfer-0.7.4"
GEMM_A, FP8_8K, STORE = OF_0_7_4 / "gemm-a.v1.json", OF_0_7_4 / "fp8-8k.v1.json", OF_0_7_4 / "managed-store"
EMBEDDED = Path(__file__).parent.parent / "manifests"
EAGER = MeasurementPolicy.from_execution_mode("eager")


def lookups(name: str) -> tuple[Question, ...]:
    return read_questions((OF_0_7_4 / f"{name}.lookups.json").read_bytes())


def bundle_of(*paths: Path, **how: Any) -> Bundle:
    bundle = gathered(*map(read_source, paths), **how).bundle
    assert bundle is not None
    assert read_bundle(write_bundle(bundle)[0]) == bundle
    return bundle


# --- real files


def test_a_real_v1_file_with_its_lookups() -> None:
    file = read_source(GEMM_A)
    bundle = bundle_of(GEMM_A, questions=lookups("gemm-a"), default_raced=False)

    (section,) = file.sections
    assert bundle.environment == section.environment
    assert bundle.entries == {entry.key.text: entry for entry in section.entries}
    assert bundle.policy == DEFAULT_POLICY
    assert bundle.default_raced is False
    assert len(bundle.lookups) == 90
    assert bundle.provenance == msgspec.structs.replace(
        PROVENANCE, source="v1 file saved by flashinfer.autotune", digests=(section.digest,)
    )


def test_a_real_v1_file_without_lookups_keeps_the_fastest_runner_of_a_shape() -> None:
    found = gathered(read_source(GEMM_A))

    assert found.bundle is not None
    assert len(found.bundle.entries) == 54
    assert (found.read, found.same) == (90, 0)
    assert lines(found.left_out) == [
        (Rule.NOT_FASTEST, made.CUBLASLT, 12),
        (Rule.NOT_FASTEST, made.CUDNN, 9),
        (Rule.NOT_FASTEST, made.TINY, 15),
    ]
    every = read_source(GEMM_A).sections[0].entries
    for kept in found.bundle.entries.values():
        rivals = [entry for entry in every if (entry.key.custom_op, entry.key.profile) == shape(kept)]
        assert kept.time_ms == min(entry.time_ms or 0 for entry in rivals)
    assert str(found.left_out[0]) == (
        "no recorded lookup tells the caller's order, so only the fastest runner of a shape is kept: "
        "12 entries of CublasltBf16GemmRunner left out (rivals: CudnnBf16GemmRunner, TinyGemmBf16GemmRunner)"
    )


def shape(entry: Entry) -> tuple[str, object]:
    return entry.key.custom_op, entry.key.profile


def test_a_real_store_gives_a_bundle_for_each_policy() -> None:
    found = gather([read_source(STORE)], PROVENANCE, questions=lookups("gemm-a"), trust_winners=False)

    assert [str(item.policy) for item in found] == ["default", "eager", "cuda_graph"]
    assert [len(item.bundle.entries) for item in found if item.bundle] == [90, 90, 90]
    assert all(item.bundle is not None and item.bundle.default_raced for item in found)
    assert len({item.bundle.provenance.digests for item in found if item.bundle}) == 3


def test_a_store_has_no_times_so_nothing_is_kept_where_runners_raced() -> None:
    found = gather([read_source(STORE)], PROVENANCE)

    assert [len(item.bundle.entries) for item in found if item.bundle] == [36, 36, 36]
    assert lines(found[0].left_out) == [
        (Rule.NO_TIMES, made.CUBLASLT, 18),
        (Rule.NO_TIMES, made.CUDNN, 18),
        (Rule.NO_TIMES, made.TINY, 18),
    ]


def test_one_environment_of_a_store() -> None:
    bundle = bundle_of(STORE / "v2" / "645f715d598ccd4e")

    assert bundle.policy == EAGER
    assert bundle.provenance.source == "managed store written by flashinfer.autotune_v2"


def test_winners_of_the_same_run_are_checked() -> None:
    wrong = [msgspec.structs.replace(question, winner=("CublasFp8GemmRunner", 99)) for question in lookups("fp8-8k")]

    with pytest.raises(FormatError, match="recorded CublasFp8GemmRunner 99 as its winner, the entries give"):
        gathered(read_source(FP8_8K), questions=wrong)
    assert len(bundle_of(FP8_8K, questions=wrong, trust_winners=False).lookups) == 84


def test_the_lookups_of_a_bundle_ask_what_it_answers() -> None:
    whole = bundle_of(GEMM_A, questions=lookups("gemm-a"))
    again = bundle_of(GEMM_A, questions=questions_of(whole.lookups))

    assert again.lookups == whole.lookups
    assert again.entries == whole.entries


# --- what belongs together


ONE, TWO = made.entry(made.key(made.CUDNN, 1), -1), made.entry(made.key(made.CUDNN, 2), -1)


def test_files_of_one_environment_and_policy_are_one_bundle() -> None:
    found = gathered(source("rank0.json", [ONE]), source("rank1.json", [TWO, ONE]))

    assert found.bundle is not None
    assert found.bundle.entries == {entry.key.text: entry for entry in (ONE, TWO)}
    assert len(found.bundle.provenance.digests) == 2
    assert found.sources == ("rank0.json", "rank1.json")
    assert (found.read, found.same, found.left_out, found.conflicts) == (3, 1, (), ())


def test_two_images_with_the_same_libraries_are_one_environment() -> None:
    elsewhere = made.H200.with_facts(
        {"cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:cc;torch==2.11.0:dd"}
    )
    sources = [source("a.json", [ONE], environment=elsewhere), source("b.json", [TWO])]
    found = gathered(*sources)

    assert found.bundle is not None
    assert len(found.bundle.entries) == 2
    assert found.environment == found.bundle.environment == made.H200  # whichever sorts first
    assert gathered(*reversed(sources)) == found


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"environment": made.H200.with_facts({"cudnn_version": "91800"})}, id="another fact"),
        pytest.param({"environment": made.H200.with_facts({"gpu": "NVIDIA H100"})}, id="another GPU"),
        pytest.param({"policy": EAGER}, id="another policy"),
    ],
)
def test_what_differs_in_a_fact_or_the_policy_is_apart(other: Any) -> None:
    found = gather([source("a.json", [ONE]), source("b.json", [ONE], **other)], PROVENANCE)

    assert sorted(item.sources for item in found) == [("a.json",), ("b.json",)]


def test_a_store_of_two_machines(tmp_path: Path) -> None:
    h100 = Environment.from_metadata({**dict.fromkeys(FACTS, "1"), "flashinfer_version": "0.7.4", "gpu": "H100"})
    for environment, policy in [(made.H200, EAGER), (h100, DEFAULT_POLICY)]:
        write_entries(tmp_path, environment, policy, [ONE])
    found = gather([read_source(tmp_path)], PROVENANCE)

    assert [(item.environment.gpu, str(item.policy)) for item in found] == [
        ("H100", "default"),
        ("NVIDIA H200", "eager"),
    ]


@pytest.mark.parametrize(
    ("kinds", "said", "raced"),
    [
        pytest.param([SourceKind.CACHE_FILE], None, None, id="v1: not known"),
        pytest.param([SourceKind.STORE], None, True, id="store: it raced"),
        pytest.param([SourceKind.STORE, SourceKind.STORE], None, True, id="two stores"),
        pytest.param([SourceKind.CACHE_FILE, SourceKind.STORE], None, None, id="mixed: not known"),
        pytest.param([SourceKind.CACHE_FILE], False, False, id="v1, said no"),
        pytest.param([SourceKind.CACHE_FILE, SourceKind.STORE], True, True, id="mixed, said yes"),
    ],
)
def test_whether_the_default_raced(kinds: list[SourceKind], said: bool | None, raced: bool | None) -> None:
    sources = [source(f"{number}", [ONE], kind=kind) for number, kind in enumerate(kinds)]
    bundle = gathered(*sources, default_raced=said).bundle

    assert bundle is not None
    assert bundle.default_raced is raced


NOT_RACED, RACED, MEMORY = (
    (Served.TUNED, ONE.tactic, False),
    (Served.TUNED, ONE.tactic, True),
    (Served.MEMORY, ONE.tactic, True),
)


@pytest.mark.parametrize(
    ("recorded", "kind", "said", "raced"),
    [
        pytest.param([RACED], SourceKind.CACHE_FILE, None, True, id="it raced"),
        pytest.param([NOT_RACED], SourceKind.CACHE_FILE, None, False, id="it did not"),
        pytest.param([MEMORY, RACED], SourceKind.CACHE_FILE, None, True, id="it raced, and was asked again"),
        pytest.param([MEMORY], SourceKind.CACHE_FILE, None, None, id="the race was not recorded"),
        pytest.param([RACED, NOT_RACED], SourceKind.CACHE_FILE, None, None, id="once it did, once it did not"),
        pytest.param([(Served.TUNED, 99, True)], SourceKind.CACHE_FILE, None, None, id="the race had another winner"),
        pytest.param([NOT_RACED], SourceKind.STORE, None, True, id="a store"),
        pytest.param([NOT_RACED], SourceKind.CACHE_FILE, True, True, id="it was said"),
    ],
)
def test_recorded_lookups_tell_whether_the_default_raced(
    recorded: list[tuple[Served, int, bool]], kind: SourceKind, said: bool | None, raced: bool | None
) -> None:
    file = write_lookups(
        RecordedLookup(keys=(ONE.key,), served=served, runner=ONE.runner, tactic=tactic, raced=with_default)
        for served, tactic, with_default in recorded
    )
    how = {"questions": read_questions(file), "trust_winners": False, "default_raced": said}
    alone, with_another = (gathered(source("a", entries, kind=kind), **how).bundle for entries in ([ONE], [ONE, TWO]))

    assert alone is not None
    assert with_another is not None
    assert alone.default_raced is raced
    if kind is SourceKind.CACHE_FILE and said is None:
        assert with_another.default_raced is None, "of the other entry it was not recorded"


def test_what_a_bundle_says_of_its_sources() -> None:
    bundle = gathered(source("/home/me/a.json", [ONE]), source("b", [TWO], kind=SourceKind.STORE)).bundle

    assert bundle is not None
    assert bundle.provenance.source == (
        "managed store written by flashinfer.autotune_v2 and v1 file saved by flashinfer.autotune"
    )
    assert b"home" not in write_bundle(bundle)[0]


# --- what is left out


def at(runner: str, time_ms: float | None, *, extra: int = 0) -> Entry:
    key = made.key(runner)
    return made.entry(Key(key.custom_op, key.runner, key.profile, (*key.extras, extra)), -1, time_ms)


@pytest.mark.parametrize(
    ("entries", "kept", "cause"),
    [
        pytest.param([at(made.CUDNN, None)], [0], None, id="one runner"),
        pytest.param([at(made.CUDNN, None), at(made.CUDNN, 1.0, extra=1)], [0, 1], None, id="one class, two extras"),
        pytest.param([at(made.CUDNN, 2.0), at(made.TINY, 1.0)], [1], Rule.NOT_FASTEST, id="the fastest"),
        pytest.param([at(made.CUDNN, 2.0), at(made.TINY, None)], [], Rule.NO_TIMES, id="a time is missing"),
        pytest.param(
            [at(made.CUDNN, 2.0), at(made.CUDNN, 0.5, extra=1), at(made.TINY, 1.0)],
            [1],
            Rule.NOT_FASTEST,
            id="of all extras the fastest",
        ),
    ],
)
def test_runners_at_a_shape_that_no_lookup_orders(entries: list[Entry], kept: list[int], cause: Rule | None) -> None:
    found = gathered(source("a.json", entries))

    assert (found.bundle.entries if found.bundle else {}) == {entries[i].key.text: entries[i] for i in kept}
    assert {line.cause for line in found.left_out} == ({cause} if cause else set())
    assert sum(line.entries for line in found.left_out) == len(entries) - len(kept)


def test_a_shape_with_a_recorded_lookup_is_kept_whole() -> None:
    entries = [made.entry(made.key(runner, m), -1) for runner in (made.CUDNN, made.TINY) for m in (1, 2)]
    asked = questions_of([made.lookup([made.TINY, made.CUDNN], made.TINY, 1)])
    found = gathered(source("a.json", entries), questions=asked)

    assert found.bundle is not None
    assert {(entry.runner, entry.key.profile[0][0]) for entry in found.bundle.entries.values()} == {
        (made.CUDNN, 1),
        (made.TINY, 1),
    }
    assert lines(found.left_out) == [(Rule.NO_TIMES, made.CUDNN, 1), (Rule.NO_TIMES, made.TINY, 1)]


def test_collective_ops_and_records_are_left_out(tmp_path: Path) -> None:
    collective = made.entry(made.key("PcieAllReduceRunner", op="flashinfer::pcie_ipc_all_reduce"))
    write_entries(tmp_path, made.H200, DEFAULT_POLICY, [ONE, collective], [ProtocolRecord("space", "key", 1)])
    found = gathered(read_source(tmp_path))

    assert found.bundle is not None
    assert list(found.bundle.entries.values()) == [ONE]
    assert lines(found.left_out) == [
        (Reason.RECORD, "", 1),
        (Rule.COLLECTIVE_OP, "PcieAllReduceRunner", 1),
    ]
    assert [str(line) for line in found.left_out] == [
        "it is the result of an operation that tunes itself, for which a bundle has no place: 1 record left out",
        "the op is collective: ranks must tune it together: 1 entry of PcieAllReduceRunner left out",
    ]


def test_nothing_remains() -> None:
    collective = made.entry(made.key("PcieAllReduceRunner", op="flashinfer::pcie_ipc_all_reduce"))
    found = gathered(source("a.json", [collective]))

    assert (found.bundle, found.read) == (None, 1)
    assert sum(line.entries for line in found.left_out) == 1


FIGURES = {"time_ms": 0.5, "runner_up_ms": 1, "margin": -0.25, "candidates": 3}


@pytest.mark.parametrize(
    ("selection", "published"),
    [
        pytest.param(FIGURES, FIGURES, id="FlashInfer's figures"),
        pytest.param({**FIGURES, "runner_up_ms": None, "margin": None}, None, id="a tactic without a rival"),
        pytest.param({**FIGURES, "host": "gpu17", "path": "/home/me"}, FIGURES, id="other fields"),
        pytest.param({"time_ms": "0.5 on gpu17", "candidates": 2.5, "margin": [1]}, {}, id="no numbers"),
        pytest.param({"time_ms": True, "candidates": False, "runner_up_ms": {"user": "me"}}, {}, id="booleans"),
        pytest.param({"time_ms": None, "candidates": None}, {}, id="null where FlashInfer writes none"),
        pytest.param({}, {}, id="empty"),
    ],
)
def test_of_a_selection_only_figures_are_published(selection: dict[str, Any], published: dict[str, Any] | None) -> None:
    entry = Entry(ONE.key, ONE.runner, -1, made.POLICY, selection)
    bundle = gathered(source("a.json", [entry])).bundle

    assert bundle is not None
    (kept,) = bundle.entries.values()
    assert (kept.selection or {}) == (selection if published is None else published)


# --- what is refused


def v1_file(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads(FP8_8K.read_bytes())
    change(document)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(document))
    return path


def first_key(document: dict[str, Any]) -> str:
    return min(key for key in document if key.startswith("("))


def set_fact(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["_metadata"].update({name: value})


FIRST = "('fp8_gemm', 'CublasFp8GemmRunner', ((1, 1, "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.pop("_metadata"), "no _metadata: FlashInfer accepts the file blindly", id="no facts"),
        pytest.param(set_fact("gpu", "*"), "gpu is the wildcard '*'; tune again where", id="wildcard"),
        pytest.param(set_fact("gpu", "unknown"), "gpu not known; tune again where", id="unknown"),
        pytest.param(set_fact("gpu", None), "gpu not known", id="null"),
        pytest.param(set_fact("gpu", "None"), "gpu not known", id="None"),
        pytest.param(lambda d: d["_metadata"].pop("cuda_version"), "cuda_version not known", id="missing"),
        pytest.param(set_fact("gpu", ["NVIDIA H200", "NVIDIA H100"]), "gpu is a list, not a string", id="two GPUs"),
        pytest.param(
            set_fact("flashinfer_version", "0.7.0"),
            "it was tuned with FlashInfer 0.7.0; tune again with FlashInfer 0.7.1 or newer",
            id="old FlashInfer",
        ),
        pytest.param(
            set_fact("flashinfer_version", "nightly"),
            "flashinfer_version 'nightly' is not a version",
            id="no version",
        ),
        pytest.param(
            lambda d: [d.pop(key) for key in list(d) if key.startswith("(")], "it holds no entries", id="empty"
        ),
        pytest.param(
            lambda d: d[first_key(d)].__setitem__(0, "Other"),
            f"1 entry of another runner than their key's, the first Other at {FIRST}",
            id="runner",
        ),
        pytest.param(
            lambda d: d.update({"('mm', 'Runner', ((1,),))": ["Runner", 0]}),
            "1 key without extras, the first ('mm', 'Runner', ((1,),)); tune again with FlashInfer 0.7.1 or newer",
            id="old key",
        ),
        pytest.param(
            lambda d: d.update({made.key(made.CUDNN).text: [made.CUDNN, 3]}),
            f"1 entry of cuDNN whose tactic is a plan's position, the first {made.CUDNN} at ('bf16_gemm', 'Cudnn",
            id="cuDNN ordinal",
        ),
    ],
)
def test_a_v1_file_that_can_not_be_published(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = v1_file(tmp_path, change)

    with pytest.raises(UsageError) as caught:
        gathered(read_source(path))
    assert message in str(caught.value)
    assert "nightly" in message or str(caught.value).startswith(f"{path} can't be published: ")
    assert caught.value.next_step


def test_two_devices_in_one_file(tmp_path: Path) -> None:
    """JSON takes the last of two equal names, silently."""
    facts = json.dumps({**made.H200.metadata(), "gpu": "NVIDIA H100"})
    data = made_sources.v1_file(tmp_path / "tuned.json", [ONE]).read_text()
    (tmp_path / "tuned.json").write_text(data.replace('{"', f'{{"_metadata":{facts},"', 1))

    with pytest.raises(UsageError, match=r"tuned\.json can't be published: _metadata stands there twice, and the last"):
        gathered(read_source(tmp_path / "tuned.json"))


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = v1_file(tmp_path, lambda _: None)
    key = json.dumps(first_key(json.loads(path.read_bytes())))
    path.write_text(path.read_text().replace("{", f'{{{key}: ["CublasFp8GemmRunner", 7], ', 1))

    with pytest.raises(
        UsageError, match=r"can't be published: \('fp8_gemm', .* stands there twice, and the last counts"
    ):
        gathered(read_source(path))


def test_a_bundled_module(tmp_path: Path) -> None:
    path = tmp_path / "v0_1_trtllm_fused_moe_NVIDIA_B200.py"
    path.write_text("best_configs = {\"('op', 'MoERunner', ((1, 7168),))\": (0, 5)}")

    with pytest.raises(UsageError, match=r"B200\.py can't be published: 1 key without extras, the first \('op'"):
        gathered(read_source(path))


def test_a_store_with_undetermined_facts() -> None:
    unknown = msgspec.structs.replace(made.H200, cudnn_version=None)
    with pytest.raises(UsageError, match=r"store \(store\) can't be published: cudnn_version not known"):
        gathered(source("store", [ONE], environment=unknown, kind=SourceKind.STORE))


def damage_entry(folder: Path) -> None:
    (folder / "entries" / f"{'0' * 24}.json").write_bytes(b"{}")


def move(folder: Path) -> None:
    folder.rename(folder.with_name("0123456789abcdef"))


def add_damaged_environment(folder: Path) -> None:
    (folder.with_name("0123456789abcdef")).mkdir()
    (folder.with_name("0123456789abcdef") / "manifest.json").write_bytes(b"{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(damage_entry, r"can't be published: .*/0{24}\.json: not an entry", id="an entry"),
        pytest.param(move, r"can't be published: .*its facts have the hash", id="under another hash"),
        pytest.param(add_damaged_environment, r"can't be published: .*manifest\.json: not a JSON", id="a manifest"),
    ],
)
def test_a_damaged_store(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(write_entries(tmp_path, made.H200, DEFAULT_POLICY, [ONE]).path)

    with pytest.raises(FormatError, match=message):
        gathered(read_source(tmp_path))


def test_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    with pytest.raises(UsageError, match="can't be published: it holds no environment; tune into it first"):
        gather([read_source(tmp_path)], PROVENANCE)


def test_an_empty_environment_of_a_store(tmp_path: Path) -> None:
    write_entries(tmp_path, made.H200, DEFAULT_POLICY, [])
    with pytest.raises(UsageError, match=r"\([0-9a-f]{16}\) can't be published: it holds no entries; leave it out"):
        gather([read_source(tmp_path)], PROVENANCE)


# --- bundles


def write(tmp_path: Path, bundle: Bundle, name: str | None = None) -> Path:
    data, sha256 = write_bundle(bundle)
    path = tmp_path / (name or f"{sha256[:16]}.json")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("path", sorted(EMBEDDED.glob("*/*/????????????????.json")), ids=lambda path: path.name)
def test_a_bundle_passes_through_as_it_is(path: Path) -> None:
    found = gathered(read_source(path))

    assert found.data == path.read_bytes()
    assert found.bundle == read_bundle(path.read_bytes())
    assert found.read == len(found.bundle.entries)


def test_a_bundle_is_no_part_of_what_is_gathered(tmp_path: Path) -> None:
    path = write(tmp_path, made.bundle([ONE]), "any-name.json")
    found = gather([read_source(path), source("a.json", [TWO]), read_source(path)], PROVENANCE)

    assert sorted(item.data is None for item in found) == [False, True]


def flip_date(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"2026-12-01", b"2026-12-02"))


def lay_out(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=2))


@pytest.mark.parametrize(
    ("change", "name", "kind", "message"),
    [
        pytest.param(flip_date, None, IntegrityError, r"its sha256 is [0-9a-f]{16}….*fetch it again", id="hash"),
        pytest.param(lay_out, "x.json", FormatError, "a bundle that was changed since it was written", id="layout"),
    ],
)
def test_a_bundle_that_was_changed(
    tmp_path: Path, change: Callable[[Path], None], name: str | None, kind: type[FiTuneCacheError], message: str
) -> None:
    path = write(tmp_path, made.bundle([ONE]), name)
    change(path)

    with pytest.raises(FormatError, match=message) as caught:
        gathered(read_source(path))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("entry", "environment", "message"),
    [
        pytest.param(made.entry(made.key(made.CUDNN), 3), made.H200, "a plan's position", id="cuDNN ordinal"),
        pytest.param(
            made.entry(made.key("Runner", op="flashinfer::pcie_ipc_all_reduce")),
            made.H200,
            "no bundle of ours holds an entry like",
            id="collective",
        ),
        pytest.param(
            Entry(ONE.key, ONE.runner, -1, made.POLICY, {"host": "gpu17"}), made.H200, "no bundle of ours", id="leak"
        ),
        pytest.param(
            Entry(ONE.key, ONE.runner, -1, made.POLICY, {MARK: "0" * 16}), made.H200, "no bundle of ours", id="mark"
        ),
        pytest.param(ONE, made.H200.with_facts({"flashinfer_version": "0.7.0"}), "FlashInfer 0.7.0", id="old"),
    ],
)
def test_a_bundle_with_what_must_not_be_published(
    tmp_path: Path, entry: Entry, environment: Environment, message: str
) -> None:
    path = write(tmp_path, made.bundle([entry], environment=environment))

    with pytest.raises(UsageError, match=message):
        gathered(read_source(path))


def test_a_line_of_what_is_left_out_in_json() -> None:
    line = LeftOut(Reason.PULLED, "op", "Runner", 2, bundles=("0" * 16, "1" * 16))
    assert line.builtins() == {
        "cause": "it was pulled from a registry, not tuned",
        "custom_op": "op",
        "runner": "Runner",
        "entries": 2,
        "rivals": [],
        "bundles": ["0" * 16, "1" * 16],
        "line": "it was pulled from a registry, not tuned: 2 entries of Runner left out "
        f"(bundles {'0' * 16}, {'1' * 16})",
    }
