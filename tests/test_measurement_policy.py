"""The measurement policy: the fields FlashInfer writes, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.measurement_policy import DEFAULT_POLICY, EXECUTION_MODES, MeasurementPolicy

DATA = Path(__file__).parent / "data"
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "measure_execution_mode": st.sampled_from(["eager", "cuda_graph"]),
        "measure_cold_l2": st.sampled_from(["True", "False"]),
        "measure_timer": st.sampled_from(["cupti", "events", "events_no_delay"]),
        "measure_graph_timing": st.sampled_from(["amortized", "individual"]),
    },
)


@pytest.mark.parametrize(
    ("mode", "fields", "text"),
    [
        pytest.param("auto", {}, "default", id="auto: FlashInfer's default, no field"),
        pytest.param("eager", {"measure_execution_mode": "eager"}, "eager", id="eager"),
        pytest.param("cuda_graph", {"measure_execution_mode": "cuda_graph"}, "cuda_graph", id="graph"),
    ],
)
def test_a_policy_by_its_execution_mode(mode: str, fields: dict[str, str], text: str) -> None:
    policy = MeasurementPolicy.from_execution_mode(mode)

    assert policy.manifest_fields() == fields
    assert policy == MeasurementPolicy.from_fields(fields)
    assert str(policy) == text


def test_the_execution_modes() -> None:
    policies = {MeasurementPolicy.from_execution_mode(mode) for mode in EXECUTION_MODES}

    assert len(policies) == len(EXECUTION_MODES) == 3
    assert MeasurementPolicy.from_execution_mode("auto") == DEFAULT_POLICY == MeasurementPolicy()


def test_the_policies_of_the_real_stores() -> None:
    manifests = [json.loads(path.read_bytes()) for path in DATA.glob("*/managed-store/v2/*/manifest.json")]
    policies = [
        MeasurementPolicy.from_fields({name: value for name, value in manifest.items() if name.startswith("measure_")})
        for manifest in manifests
    ]

    assert sorted(map(str, policies)) == ["cuda_graph", "default", "default", "eager"]


@given(FIELDS)
def test_from_fields_is_the_inverse_of_manifest_fields(fields: dict[str, str]) -> None:
    policy = MeasurementPolicy.from_fields(fields)

    assert policy.manifest_fields() == fields
    assert MeasurementPolicy.from_fields(policy.manifest_fields()) == policy
    assert MeasurementPolicy.from_fields(dict(reversed(fields.items()))) == policy
    assert (policy == DEFAULT_POLICY) == (not fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"measure_cold_l2": "True"}, "cold_l2=True", id="one"),
        pytest.param({"measure_timer": "cupti", "measure_cold_l2": "True"}, "cold_l2=True, timer=cupti", id="two"),
        pytest.param(
            {"measure_execution_mode": "eager", "measure_timer": "events"},
            "execution_mode=eager, timer=events",
            id="an execution mode among others",
        ),
    ],
)
def test_fields_in_one_line(fields: dict[str, str], text: str) -> None:
    assert str(MeasurementPolicy.from_fields(fields)) == text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        pytest.param({"measure_execution_mode": "auto"}, "measure_execution_mode = 'auto'", id="auto is no field"),
        pytest.param({"measure_execution_mode": "Eager"}, "measure_execution_mode = 'Eager'", id="capital"),
        pytest.param({"measure_cold_l2": True}, "measure_cold_l2 = 'True'", id="bool in place of a string"),
        pytest.param({"measure_cold_l2": None}, "measure_cold_l2 = 'None'", id="null"),
        pytest.param({"measure_timer": ["cupti"]}, "measure_timer = \"['cupti']\"", id="list"),
        pytest.param({"measure_clock": "x"}, "measure_clock = 'x'", id="a field that is not known"),
        pytest.param({"measure_timer": "x" * 9999}, f"measure_timer = '{'x' * 80}'", id="long value"),
        pytest.param({"m" * 9999: "x"}, f"{'m' * 80} = 'x'", id="long name"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, object], shown: str) -> None:
    with pytest.raises(FormatError) as caught:
        MeasurementPolicy.from_fields(fields)

    assert str(caught.value) == f"measurement policy: {shown} is not known; upgrade fi-tunecache"


@pytest.mark.parametrize("mode", ["", "graph", "EAGER", "default"])
def test_execution_modes_that_are_refused(mode: str) -> None:
    with pytest.raises(UsageError, match=rf"execution mode '{mode}' is not known; use one of auto, eager, cuda_graph"):
        MeasurementPolicy.from_execution_mode(mode)


_EVERY_POLICY = """
import itertools, json
from flashinfer.autotune_cache import MeasurementPolicy
fields = []
for mode, cold, timer, graph in itertools.product(
    ("auto", "eager", "cuda_graph"),
    (None, True, False),
    ("auto", "cupti", "events", "events_no_delay"),
    (None, "amortized", "individual"),
):
    given = {"execution_mode": mode, "cold_l2": cold, "_timer": timer, "graph_timing": graph}
    try:
        policy = MeasurementPolicy(**{name: value for name, value in given.items() if value is not None})
    except (TypeError, ValueError):  # a combination or a field that this release refuses
        continue
    fields.append(policy.manifest_fields())
print(json.dumps(fields))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("version", "count"), [("0.7.2", 33), ("0.7.2.post1", 33), ("0.7.4", 69)])
def test_every_policy_of_the_real_flashinfer_is_known(
    version: str, count: int, flashinfer_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    output = subprocess.run(
        [sys.executable, "-c", _EVERY_POLICY],
        env={
            **os.environ,
            "PYTHONPATH": str(flashinfer_folder(version)),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        },
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    policies = json.loads(output.splitlines()[-1])

    assert len(policies) == count
    for fields in policies:
        assert MeasurementPolicy.from_fields(fields).manifest_fields() == fields
