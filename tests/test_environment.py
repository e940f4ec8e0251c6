"""The environment: how facts are read, which of them are known, and what is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import environments

from fi_tunecache.device import Device
from fi_tunecache.environment import FACTS, Environment, reduce_fingerprint
from fi_tunecache.errors import FormatError, HardwareError, UsageError

DATA = Path(__file__).parent / "data"
FINGERPRINT_0_7_4: str = json.loads((DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json").read_bytes())["_metadata"][
    "cutlass_dsl_version"
]
FINGERPRINT_0_7_2_POST1: str = json.loads((DATA / "h200-flashinfer-0.7.2.post1" / "facts.json").read_bytes())[
    "metadata"
]["cutlass_dsl_version"]
DSL_4_8_1 = "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl-libs-core==4.8.1;nvidia-cutlass-dsl==4.8.1"

METADATA = {
    "flashinfer_version": "0.7.4",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91900",
    "cudnn_frontend_version": "1.32.0",
    "cutlass_dsl_version": FINGERPRINT_0_7_4,
    "gpu": "NVIDIA H200",
}
H200 = Environment.from_metadata(METADATA)


# --- reading


def test_metadata_of_a_real_file() -> None:
    metadata = json.loads((DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json").read_bytes())["_metadata"]
    environment = Environment.from_metadata(metadata)

    assert environment == H200
    assert environment.undetermined() == ()
    assert environment.metadata() == metadata
    assert environment.device == Device("NVIDIA H200")


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize(
    "value",
    [
        pytest.param("unknown", id="unknown"),
        pytest.param(None, id="null"),
        pytest.param("None", id="None as text"),
        pytest.param("", id="empty"),
        pytest.param("  ", id="blank"),
        pytest.param("0.0.0+unknown", id="version of a source tree"),
    ],
)
def test_an_undetermined_fact_is_none(fact: str, value: str | None) -> None:
    environment = Environment.from_metadata({**METADATA, fact: value})

    assert environment.undetermined() == (fact,)
    assert environment.raw(fact) is environment.fact(fact) is None
    assert environment.identity()[fact] is None
    assert fact not in environment.metadata()


def test_facts_that_are_missing_are_undetermined() -> None:
    assert Environment.from_metadata({}) == Environment()
    assert Environment().undetermined() == FACTS
    assert Environment.from_metadata({"gpu": "NVIDIA H200"}).undetermined() == FACTS[:-1]


@pytest.mark.parametrize(
    "version",
    ["0.7.4", "0.7.4+cu130", "0.7.2.post1", "0.7.5.dev20261201", "0.8.0rc1", "0.7.4+unknown", "0.7.4-local", "1!0.7"],
)
def test_a_version_is_kept_as_it_is(version: str) -> None:
    environment = Environment.from_metadata({**METADATA, "flashinfer_version": version})

    assert environment.flashinfer_version == environment.fact("flashinfer_version") == version
    assert environment != H200 or version == "0.7.4"


def test_spaces_around_a_fact_are_part_of_it() -> None:
    assert Environment.from_metadata({"cuda_version": " 13.0"}).cuda_version == " 13.0"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param(None, "metadata is a NoneType, not an object", id="null"),
        pytest.param("0.7.4", "metadata is a str, not an object", id="string"),
        pytest.param([["gpu", "NVIDIA H200"]], "metadata is a list, not an object", id="list"),
        pytest.param({"gpu": "*"}, "gpu is the wildcard '*'", id="wildcard"),
        pytest.param({"driver": "*"}, "driver is the wildcard '*'", id="wildcard in a fact that is not known"),
        pytest.param({"cudnn_version": 91900}, "cudnn_version is a int, not a string", id="number"),
        pytest.param({"cudnn_version": 10**5000}, "cudnn_version is a int, not a string", id="huge number"),
        pytest.param({"cuda_version": 13.0}, "cuda_version is a float, not a string", id="float"),
        pytest.param({"gpu": True}, "gpu is a bool, not a string", id="bool"),
        pytest.param({"gpu": {"name": "NVIDIA H200"}}, "gpu is a dict, not a string", id="object in a fact's place"),
        pytest.param({"gpu": ["NVIDIA H200"]}, "gpu is a list, not a string", id="list in a fact's place"),
        pytest.param({"sm_count": 132}, "sm_count is a int, not a string", id="number in a fact that is not known"),
        pytest.param({"gpu": "x" * 4097}, "gpu is not a fact: 'xxx", id="4097 characters"),
        pytest.param({"gpu": "x" * 100_000_000}, "gpu is not a fact: 'xxx", id="100 MB"),
        pytest.param({"gpu": "NVIDIA\nH200"}, r"gpu is not a fact: 'NVIDIA\nH200'", id="two lines"),
        pytest.param({"gpu": "\x1b[2JNVIDIA"}, r"gpu is not a fact: '\x1b[2JNVIDIA'", id="terminal escape"),
        pytest.param({"\x1b[2J": "x"}, r"'\x1b[2J' can't be the name of a fact", id="terminal escape in a name"),
        pytest.param({"": "x"}, "'' can't be the name of a fact", id="empty name"),
        pytest.param({"x" * 65: "x"}, "can't be the name of a fact", id="name of 65 characters"),
        pytest.param({"../x": "x"}, "'../x' can't be the name of a fact", id="path for a name"),
        pytest.param(
            {f"f{n}": "x" for n in range(33)}, "metadata has 33 facts that are not known", id="33 extra facts"
        ),
    ],
)
def test_what_is_refused(metadata: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        Environment.from_metadata(metadata, source="a.json")

    assert str(caught.value).startswith("a.json: ")
    assert message in caught.value.problem
    assert caught.value.next_step
    assert len(str(caught.value)) < 300


def test_the_limits_themselves_are_accepted() -> None:
    long = Environment.from_metadata({"gpu": "x" * 4096, **{f"{n:x>64}": "y" for n in range(32)}})

    assert (len(long.gpu or ""), len(long.other)) == (4096, 32)


def test_objects_and_lists_beside_the_facts_are_passed_over() -> None:
    assert Environment.from_metadata({**METADATA, "fi_tunecache": {"format": 1}, "history": [1, 2]}) == H200


def test_facts_of_a_newer_flashinfer_count_too() -> None:
    newer = Environment.from_metadata({"sm_clock": "1980", **METADATA, "arch_list": "9.0a", "extra": "unknown"})

    assert newer.other == (("arch_list", "9.0a"), ("sm_clock", "1980"))
    assert newer.names() == (*FACTS, "arch_list", "sm_clock")
    assert newer.fact("sm_clock") == newer.raw("sm_clock") == "1980"
    assert newer.raw("extra") is None
    assert newer.metadata() == {**METADATA, "arch_list": "9.0a", "sm_clock": "1980"}
    assert newer != H200


@given(environments)
def test_from_metadata_is_the_inverse_of_metadata(environment: Environment) -> None:
    assert Environment.from_metadata(environment.metadata()) == environment
    assert list(environment.metadata()) == list(FACTS)


fact_texts = st.text(st.characters(codec="utf-8"), max_size=40)


@given(
    st.dictionaries(st.sampled_from(FACTS) | st.from_regex(r"\A[a-z]{1,4}\Z"), st.none() | fact_texts | st.just("*"))
)
def test_whatever_is_accepted_comes_back(metadata: dict[str, Any]) -> None:
    try:
        environment = Environment.from_metadata(metadata)
    except FormatError:
        assert any(value == "*" or not value.isprintable() for value in metadata.values() if value is not None)
        return
    assert Environment.from_metadata(environment.metadata()) == environment
    assert set(environment.metadata().items()) <= set(metadata.items())


# --- changing single facts


def test_with_facts_replaces_single_facts() -> None:
    changed = H200.with_facts({"cudnn_version": "92400", "gpu": "unknown"})

    assert changed.metadata() == {**{k: v for k, v in METADATA.items() if k != "gpu"}, "cudnn_version": "92400"}
    assert H200.with_facts({}) == H200
    with_more = Environment.from_metadata({**METADATA, "arch_list": "9.0a"})
    assert with_more.with_facts({"gpu": "NVIDIA H100"}).other == with_more.other


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        pytest.param(
            {"cudnn": "1"}, "'cudnn' is not a fact; the facts are flashinfer_version, cuda_version", id="name"
        ),
        pytest.param({"x" * 1000: "1"}, "is not a fact", id="long name"),
        pytest.param({"gpu": "*"}, "gpu is the wildcard '*'; give the fact as FlashInfer prints it", id="wildcard"),
        pytest.param({"gpu": "a\nb"}, "gpu is not a fact", id="two lines"),
    ],
)
def test_facts_that_can_not_be_given(facts: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        H200.with_facts(facts)

    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


# --- what is compared


def test_the_gpu_may_be_missing() -> None:
    with pytest.raises(
        HardwareError, match=r"no GPU was found; name one with --device .* --environment FILE or --like"
    ):
        _ = Environment.from_metadata({**METADATA, "gpu": "unknown"}).device


def test_a_cublas_version_guessed_from_the_toolkit_is_undetermined_when_compared() -> None:
    guessed = Environment.from_metadata({**METADATA, "cublas_version": "cuda-toolkit-13.0"})

    assert guessed.fact("cublas_version") is None
    assert guessed.identity()["cublas_version"] is None
    assert guessed.raw("cublas_version") == guessed.metadata()["cublas_version"] == "cuda-toolkit-13.0"
    assert guessed.undetermined() == ()  # FlashInfer stamps it and takes it for known
    assert H200.with_facts({"cuda_version": "cuda-toolkit-13.0"}).fact("cuda_version") == "cuda-toolkit-13.0"


def test_the_identity_has_the_fingerprint_reduced() -> None:
    assert H200.identity() == {**METADATA, "cutlass_dsl_version": DSL_4_8_1}


@pytest.mark.parametrize(
    ("fingerprint", "reduced"),
    [
        pytest.param(FINGERPRINT_0_7_4, DSL_4_8_1, id="real, 0.7.4"),
        pytest.param(FINGERPRINT_0_7_2_POST1, DSL_4_8_1, id="real, 0.7.2.post1"),
        pytest.param("nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl==4.8.1", id="one package"),
        pytest.param("nvidia_cutlass_dsl==4.8.1:ab", "nvidia-cutlass-dsl==4.8.1", id="underscores, hash"),
        pytest.param("NVIDIA-Cutlass-DSL==4.8.1", "nvidia-cutlass-dsl==4.8.1", id="capitals"),
        pytest.param(
            "nvidia-cutlass-dsl==4.9.0.dev1+gabc:00", "nvidia-cutlass-dsl==4.9.0.dev1+gabc", id="development version"
        ),
        pytest.param("b;nvidia-cutlass-dsl==2:x;nvidia-cutlass-dsl==2:y", "nvidia-cutlass-dsl==2", id="listed twice"),
        pytest.param(
            "nvidia-cutlass-dsl==3;nvidia-cutlass-dsl==2",
            "nvidia-cutlass-dsl==2;nvidia-cutlass-dsl==3",
            id="two versions, in order",
        ),
        pytest.param("cpython-312;None;torch==2.11.0:ab", "none", id="0.7.4 without CuTe-DSL"),
        pytest.param("nvidia-cutlass-dsl", "nvidia-cutlass-dsl==", id="without a version"),
        pytest.param("5f3a90c1", "5f3a90c1", id="a form that is not known"),
    ],
)
def test_a_fingerprint_is_reduced_to_the_packages(fingerprint: str, reduced: str) -> None:
    assert reduce_fingerprint(fingerprint) == reduced
    assert reduce_fingerprint(reduced) == reduced


def _changed(old: str, new: str) -> str:
    assert old in FINGERPRINT_0_7_4
    return FINGERPRINT_0_7_4.replace(old, new)


@pytest.mark.parametrize(
    "fingerprint",
    [
        pytest.param(
            ";".join(
                f"{part.partition(':')[0]}:{'0' * 64}" if ":" in part else part for part in FINGERPRINT_0_7_4.split(";")
            ),
            id="another path: other hashes",
        ),
        pytest.param(_changed("cpython-312", "cpython-313"), id="another Python"),
        pytest.param(_changed("torch==2.11.0", "torch==2.12.0"), id="another torch"),
        pytest.param(_changed("apache-tvm-ffi==0.1.15.post2", "apache-tvm-ffi==0.2.0"), id="another TVM-FFI"),
        pytest.param(";".join(reversed(FINGERPRINT_0_7_4.split(";"))), id="another order"),
    ],
)
def test_what_a_kernel_does_not_depend_on_is_reduced_away(fingerprint: str) -> None:
    other = Environment.from_metadata({**METADATA, "cutlass_dsl_version": fingerprint})

    assert other != H200
    assert other.identity() == H200.identity()


@pytest.mark.parametrize(
    "fingerprint",
    [
        pytest.param(_changed("nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl==4.8.2"), id="another version"),
        pytest.param(_changed("libs-base==4.8.1", "libs-base==4.8.1.post1"), id="another version of its libraries"),
        pytest.param(FINGERPRINT_0_7_4 + ";nvidia-cutlass-dsl-libs-cu13==4.8.1:00", id="one package more"),
        pytest.param("cpython-312;torch==2.11.0:00", id="no such package"),
    ],
)
def test_what_a_kernel_depends_on_is_kept(fingerprint: str) -> None:
    other = Environment.from_metadata({**METADATA, "cutlass_dsl_version": fingerprint})

    assert other.identity() != H200.identity()


@given(st.text("nvidia-cutlass-dsl=_;:.4ab", max_size=60))
def test_reducing_twice_is_reducing_once(fingerprint: str) -> None:
    assert reduce_fingerprint(reduce_fingerprint(fingerprint)) == reduce_fingerprint(fingerprint)
