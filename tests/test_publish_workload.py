"""What a publisher may say of the workload, and the last guard over what leaves the machine."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.bundle import Workload, check_texts
from fi_tunecache.errors import UsageError
from fi_tunecache.publish.leaks import find_leaks, find_secrets
from fi_tunecache.publish.workload import parse_workload

TOKEN = "hf_" + "aB3" * 12
NAMES = ("gpu17.corp.example", "gpu17", "alice", "root", "bob")


@pytest.mark.parametrize(
    ("pairs", "workload"),
    [
        pytest.param([], Workload(), id="nothing"),
        pytest.param(
            ["model=meta-llama/Llama-3.1-8B-Instruct", "engine=vllm 0.33.0", "tensor_parallel=8", "expert_parallel=1"],
            Workload("meta-llama/Llama-3.1-8B-Instruct", "vllm 0.33.0", 8, 1),
            id="fields",
        ),
        pytest.param(
            ["note=(K, N) = (2048, 4096); M <= 256, bf16/fp8, ~3 s and 1.5 %; see https://example.org/a?b=c"],
            Workload(note="(K, N) = (2048, 4096); M <= 256, bf16/fp8, ~3 s and 1.5 %; see https://example.org/a?b=c"),
            id="a note",
        ),
        pytest.param(["note= as it is "], Workload(note="as it is"), id="spaces around it"),
        pytest.param(
            ["model=o/root-beer-7b", "note=bob, 1.2.3"],
            Workload("o/root-beer-7b", note="bob, 1.2.3"),
            id="names of nobody",
        ),
        pytest.param(["note=malice and gpu170"], Workload(note="malice and gpu170"), id="a name inside of a word"),
    ],
)
def test_a_workload(pairs: list[str], workload: Workload) -> None:
    assert parse_workload(pairs, names=NAMES) == workload


FIELDS = "the fields are model, engine, tensor_parallel, expert_parallel, note"
PATH = "holds a path of this machine"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        pytest.param(["modle=x"], f"--workload 'modle' is not a field; {FIELDS}", id="unknown field"),
        pytest.param(["llama"], f"--workload 'llama' is not a field; {FIELDS}", id="no field"),
        pytest.param(["model"], "--workload model has no value; write model=VALUE", id="no equals sign"),
        pytest.param(["model= "], "--workload model has no value; write model=VALUE", id="no value"),
        pytest.param(["note=a", "note=b"], "--workload names note twice; name it once", id="twice"),
        pytest.param(
            ["tensor_parallel=two"], "tensor_parallel=two is not a count; write a number like", id="no number"
        ),
        pytest.param(["tensor_parallel=0"], "tensor_parallel=0 is not a count", id="zero"),
        pytest.param(["expert_parallel=-1"], "expert_parallel=-1 is not a count", id="negative"),
        pytest.param(["expert_parallel=1.5"], "expert_parallel=1.5 is not a count", id="a fraction"),
        pytest.param(["tensor_parallel=9999999"], "tensor_parallel=9999999 is not a count", id="huge"),
        pytest.param(["tensor_parallel=\u0668"], "is not a count", id="another script's digit"),
        pytest.param(["model=/models/llama"], PATH, id="absolute path"),
        pytest.param(["model= /models/llama"], PATH, id="after a space"),
        pytest.param(["model=~/llama"], PATH, id="home"),
        pytest.param(["model=~alice/llama"], PATH, id="somebody's home"),
        pytest.param(["model=./llama"], PATH, id="relative path"),
        pytest.param(["model=../llama"], PATH, id="parent"),
        pytest.param(["model=.cache/llama"], PATH, id="hidden"),
        pytest.param(["model=C:/llama"], PATH, id="drive"),
        pytest.param(["model=llama\\8b"], PATH, id="backslash"),
        pytest.param(["note=tuned from /mnt/data/llama"], PATH, id="path in a note"),
        pytest.param(["note=model:/mnt/llama"], PATH, id="path after a colon"),
        pytest.param(["note=see ~/llama"], PATH, id="home in a note"),
        pytest.param(["note=at 'D:/llama'"], PATH, id="drive in a note"),
        pytest.param([f"note=with {TOKEN}"], "--workload is given what looks like a token; revoke it", id="token"),
        pytest.param([TOKEN], "--workload is given what looks like a token", id="token in the place of a field"),
        pytest.param(["note=ghp_0123456789abcdefABCDEF"], "looks like a token", id="GitHub's"),
        pytest.param(["note=eyJhbGciOiJIUzI1NiJ9x.eyJzdWIi"], "looks like a token", id="JWT"),
        pytest.param(["note=tuned by Alice"], "holds 'alice', the name of this host or user", id="user"),
        pytest.param(["model=alice/llama"], "holds 'alice'", id="user as an owner"),
        pytest.param(["note=on gpu17."], "holds 'gpu17'", id="host"),
        pytest.param(["engine=vllm@GPU17.corp.example"], "holds 'gpu17.corp.example'", id="host with its domain"),
        pytest.param(["note=two\nlines"], "note is no printable line of at most 500 characters", id="two lines"),
        pytest.param(["note=\x1b[31mred"], "note is no printable line", id="escape"),
        pytest.param([f"note={'x' * 501}"], "note is no printable line", id="long"),
    ],
)
def test_what_is_no_workload(pairs: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_workload(pairs, names=NAMES)
    assert message in str(caught.value)
    assert caught.value.next_step
    assert TOKEN not in str(caught.value)


@given(st.sampled_from(["model", "engine", "note", "tensor_parallel", "x"]), st.text(max_size=40))
def test_whatever_is_taken_may_stand_in_a_registry(field: str, value: str) -> None:
    try:
        workload = parse_workload([f"{field}={value}"])
    except UsageError:
        return
    document = msgspec.to_builtins(workload)
    check_texts(document)
    assert msgspec.convert(json.loads(json.dumps(document)), Workload) == workload


# --- the last guard

HOME = Path("/home/alice")


def test_what_is_looked_for() -> None:
    environ = {"HF_TOKEN": f" {TOKEN}\n", "HUGGING_FACE_HUB_TOKEN": "hf_other0123456789", "PATH": "/bin"}

    assert find_secrets(environ, home=HOME, stored_token="hf_stored0123456789") == {
        "HF_TOKEN": TOKEN,
        "HUGGING_FACE_HUB_TOKEN": "hf_other0123456789",
        "the token of `hf auth login`": "hf_stored0123456789",
        "the path of the home directory": "/home/alice",
    }


@pytest.mark.parametrize("home", [None, Path("/"), Path("relative")])
def test_what_tells_nothing_is_not_looked_for(home: Path | None) -> None:
    assert find_secrets({"HF_TOKEN": "1"}, home=home, stored_token="") == {}


@pytest.mark.parametrize(
    ("data", "secret", "found"),
    [
        pytest.param(f'{{"note":"{TOKEN}"}}', TOKEN, True, id="a token"),
        pytest.param(f'{{"note":"{TOKEN[:-1]}"}}', TOKEN, False, id="a part of it"),
        pytest.param('{"note":"/home/alice/models"}', "/home/alice", True, id="a path below the home"),
        pytest.param('{"note":"/home/alice"}', "/home/alice", True, id="the home"),
        pytest.param('{"note":"in=/home/alice"}', "/home/alice", True, id="after a sign"),
        pytest.param('{"note":"/home/alice2/x"}', "/home/alice", False, id="another home"),
        pytest.param('{"model":"org/data-7b"}', "/data", False, id="a name that has it inside"),
        pytest.param('{"model":"org/data"}', "/data", False, id="a name that ends with it"),
        pytest.param(json.dumps({"note": "/home/zoë/x"}), "/home/zoë", True, id="escaped"),
        pytest.param("/home/zoë/x", "/home/zoë", True, id="not escaped"),
        pytest.param(json.dumps({"note": 'a"b\\c01234'}), 'a"b\\c01234', True, id="quoted"),
    ],
)
def test_what_is_found(data: str, secret: str, found: bool) -> None:
    assert find_leaks(data.encode(), {"it": secret, "other": "not in there"}) == (("it",) if found else ())


def test_bytes_that_are_no_text() -> None:
    assert find_leaks(b"\xff\xfe" + TOKEN.encode() + b"\x00", {"HF_TOKEN": TOKEN}) == ("HF_TOKEN",)


@given(st.binary(max_size=20), st.text("abcXYZ09_-.", min_size=8, max_size=20), st.binary(max_size=20))
def test_a_token_is_found_wherever_it_is(before: bytes, token: str, after: bytes) -> None:
    assert find_leaks(before + token.encode() + after, {"token": token}) == ("token",)
