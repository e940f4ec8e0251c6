"""Making bundles of what FlashInfer has saved, and what can't be published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest

from fi_tunecache.bundle import MARK, Provenance, read_bundle, write_bundle
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.errors import FormatError
from fi_tunecache.managed_store import write_entries
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.recorded_lookups import read_questions
from fi_tunecache.source import read_source

DATA = Path(__file__).parent / "data"
OF_0_7_4 = DATA / "h200-flashinfer-0.7.4"
PROVENANCE = Provenance(created="2026-12-01", tool="test")


def test_a_real_v1_file() -> None:
    questions = read_questions((OF_0_7_4 / "gemm-a.lookups.json").read_bytes())
    source = read_source(OF_0_7_4 / "gemm-a.v1.json")
    (bundle,) = gather(source, PROVENANCE, default_raced=False, questions=questions)

    assert bundle.environment == source.sections[0].environment
    assert tuple(bundle.entries.values()) == source.sections[0].entries
    assert bundle.provenance == PROVENANCE
    assert bundle.policy == DEFAULT_POLICY
    assert bundle.default_raced is False
    assert len(bundle.lookups) == 90
    assert read_bundle(write_bundle(bundle)[0]) == bundle


def test_a_real_store_gives_a_bundle_for_each_policy() -> None:
    bundles = gather(read_source(OF_0_7_4 / "managed-store"), PROVENANCE, default_raced=True)

    assert sorted(str(bundle.policy) for bundle in bundles) == ["cuda_graph", "default", "eager"]
    assert [len(bundle.entries) for bundle in bundles] == [90, 90, 90]
    assert len({bundle.environment for bundle in bundles}) == 1
    assert all(read_bundle(write_bundle(bundle)[0]) == bundle for bundle in bundles)
    assert all(bundle.default_raced and bundle.lookups == () for bundle in bundles)


def test_one_environment_of_a_store() -> None:
    (bundle,) = gather(
        read_source(OF_0_7_4 / "managed-store" / "v2" / "429deefd17fea974"), PROVENANCE, default_raced=None
    )

    assert len(bundle.entries) == 90
    assert bundle.default_raced is None


def test_winners_of_the_same_run_are_checked() -> None:
    questions = read_questions((OF_0_7_4 / "fp8-8k.lookups.json").read_bytes())
    source = read_source(OF_0_7_4 / "fp8-8k.v1.json")
    wrong = [type(q)(q.custom_op, q.runners, q.shapes, q.bucketed, ("CublasFp8GemmRunner", 99)) for q in questions]

    with pytest.raises(FormatError, match="recorded CublasFp8GemmRunner 99 as its winner, the entries give"):
        gather(source, PROVENANCE, default_raced=False, questions=wrong)
    (bundle,) = gather(source, PROVENANCE, default_raced=False, questions=wrong, trust_winners=False)
    assert len(bundle.lookups) == 84


# --- what can't be published


def v1_file(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads((OF_0_7_4 / "fp8-8k.v1.json").read_bytes())
    change(document)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(document))
    return path


def first_key(document: dict[str, Any]) -> str:
    return min(key for key in document if key.startswith("("))


def mark_first(document: dict[str, Any]) -> None:
    document[first_key(document)][3][MARK] = "92e3198da296966e"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.pop("_metadata"), "can't be published: no _metadata", id="no metadata"),
        pytest.param(lambda d: d["_metadata"].update(gpu="*"), "gpu is the wildcard '*'", id="wildcard"),
        pytest.param(lambda d: d["_metadata"].update(gpu="unknown"), "can't be published: gpu not known", id="no GPU"),
        pytest.param(lambda d: d["_metadata"].pop("cuda_version"), "cuda_version not known", id="fact missing"),
        pytest.param(
            lambda d: [d.pop(key) for key in list(d) if key.startswith("(")],
            "can't be published: no entries",
            id="empty",
        ),
        pytest.param(
            lambda d: d[first_key(d)].__setitem__(0, "Other"),
            "1 entry with another runner than in the key",
            id="runner",
        ),
        pytest.param(
            lambda d: d.update({"('mm', 'Runner', ((1,),))": ["Runner", 0]}), "1 key without extras", id="old key"
        ),
        pytest.param(
            lambda d: d.update({made.key(made.CUDNN).text: [made.CUDNN, 3]}),
            "1 entry of cuDNN with a plan's position",
            id="cuDNN ordinal",
        ),
        pytest.param(
            lambda d: d["_metadata"].update({MARK: {}}),
            "a v1 file made by fi-tunecache can't be published",
            id="empty mark",
        ),
        pytest.param(
            lambda d: d["_metadata"].update({MARK: {"selection": "x"}}),
            "a v1 file made by fi-tunecache can't be published; name what FlashInfer saved",
            id="pulled",
        ),
        pytest.param(
            mark_first,
            "1 entry pulled, not tuned, e.g. ('fp8_gemm'",
            id="pulled, saved again by FlashInfer 0.7.4",
        ),
    ],
)
def test_a_v1_file_that_can_not_be_published(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = v1_file(tmp_path, change)

    with pytest.raises(FormatError) as caught:
        gather(read_source(path), PROVENANCE, default_raced=None)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.next_step


def test_a_bundle_can_not_be_published_again(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(write_bundle(made.bundle([made.entry(made.key(made.TINY))]))[0])

    with pytest.raises(FormatError, match=r"bundle\.json: a bundle can't be published; name what FlashInfer saved"):
        gather(read_source(tmp_path / "bundle.json"), PROVENANCE, default_raced=None)


def test_a_seeded_store_can_not_be_published(tmp_path: Path) -> None:
    entries = [made.entry(made.key(made.TINY)), made.entry(made.key(made.CUBLASLT))]
    write_entries(tmp_path, made.H200, DEFAULT_POLICY, entries[:1])
    write_entries(tmp_path, made.H200, DEFAULT_POLICY, entries[1:], mark="92e3198da296966e")

    with pytest.raises(FormatError, match=r"1 entry pulled, not tuned, e\.g\. .*Cublaslt.*; remove them, or tune"):
        gather(read_source(tmp_path), PROVENANCE, default_raced=True)


def test_a_store_with_a_damaged_entry(tmp_path: Path) -> None:
    report = write_entries(tmp_path, made.H200, DEFAULT_POLICY, [made.entry(made.key(made.TINY))])
    (report.path / "entries" / f"{'0' * 24}.json").write_bytes(b"{}")

    with pytest.raises(FormatError, match=r"can't be published: .*not an entry"):
        gather(read_source(tmp_path), PROVENANCE, default_raced=True)


def test_a_store_with_a_damaged_environment(tmp_path: Path) -> None:
    write_entries(tmp_path, made.H200, DEFAULT_POLICY, [made.entry(made.key(made.TINY))])
    (tmp_path / "v2" / "0123456789abcdef").mkdir()
    (tmp_path / "v2" / "0123456789abcdef" / "manifest.json").write_bytes(b"{")

    with pytest.raises(FormatError, match=r"0123456789abcdef/manifest\.json: not a JSON document"):
        gather(read_source(tmp_path), PROVENANCE, default_raced=True)


def test_a_store_of_two_machines(tmp_path: Path) -> None:
    h100 = Environment.from_metadata({**dict.fromkeys(FACTS, "1"), "gpu": "NVIDIA H100"})
    eager = MeasurementPolicy.from_execution_mode("eager")
    for environment, policy in [(made.H200, eager), (h100, DEFAULT_POLICY)]:
        write_entries(tmp_path, environment, policy, [made.entry(made.key(made.TINY))])
    bundles = gather(read_source(tmp_path), PROVENANCE, default_raced=True)

    assert {(bundle.environment.gpu, str(bundle.policy)) for bundle in bundles} == {
        ("NVIDIA H200", "eager"),
        ("NVIDIA H100", "default"),
    }
