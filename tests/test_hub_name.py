"""Names of registries on a Hub: what is one, and that nothing else ever gets into an address or a path."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.errors import UsageError
from fi_tunecache.hub_name import HubName

COMMIT = "4026f72e9dfe55605852972fe1feb1986fad52a6"


@pytest.mark.parametrize(
    ("name", "repository", "revision", "commit"),
    [
        pytest.param("hf://datasets/team/tuned", "team/tuned", None, None, id="main branch"),
        pytest.param("hf://datasets/team/tuned@v1.0", "team/tuned", "v1.0", None, id="tag"),
        pytest.param("hf://datasets/team/tuned@refs/pr/1", "team/tuned", "refs/pr/1", None, id="pull request"),
        pytest.param(f"hf://datasets/team/tuned@{COMMIT}", "team/tuned", COMMIT, COMMIT, id="commit"),
        pytest.param(f"hf://datasets/a/b@{COMMIT[:7]}", "a/b", COMMIT[:7], None, id="part of a commit"),
        pytest.param(f"hf://datasets/a/b@{COMMIT.upper()}", "a/b", COMMIT.upper(), None, id="upper case is no commit"),
        pytest.param("hf://datasets/A-1/b_.-c", "A-1/b_.-c", None, None, id="all kinds of characters"),
        pytest.param(f"hf://datasets/{'a' * 96}/{'b' * 96}", f"{'a' * 96}/{'b' * 96}", None, None, id="long"),
    ],
)
def test_a_name(name: str, repository: str, revision: str | None, commit: str | None) -> None:
    parsed = HubName.parse(name)
    assert (parsed.repository, parsed.revision, parsed.commit) == (repository, revision, commit)
    assert str(parsed) == name
    assert str(parsed.at(COMMIT)) == f"hf://datasets/{repository}@{COMMIT}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="nothing"),
        pytest.param("team/tuned", id="no scheme"),
        pytest.param("HF://datasets/team/tuned", id="scheme in upper case"),
        pytest.param("hf://team/tuned", id="a model"),
        pytest.param("hf://spaces/team/tuned", id="a space"),
        pytest.param("hf://datasets/tuned", id="no owner"),
        pytest.param("hf://datasets/", id="no repository"),
        pytest.param("hf://datasets//tuned", id="empty owner"),
        pytest.param("hf://datasets/team/", id="empty name"),
        pytest.param("hf://datasets/team/tuned/0.7.4", id="a path in it"),
        pytest.param("hf://datasets/../tuned", id="owner .."),
        pytest.param("hf://datasets/team/..", id="name .."),
        pytest.param("hf://datasets/team/a..b", id="two dots"),
        pytest.param("hf://datasets/te--am/tuned", id="two hyphens: they part owner and name in a cache"),
        pytest.param("hf://datasets/team/.tuned", id="hidden"),
        pytest.param("hf://datasets/team/-tuned", id="an option"),
        pytest.param("hf://datasets/team/tuned.", id="full stop"),
        pytest.param("hf://datasets/team-/tuned", id="hyphen at the end"),
        pytest.param("hf://datasets/team/tuned.git", id=".git"),
        pytest.param("hf://datasets/team/tuned?x=1", id="query"),
        pytest.param("hf://datasets/team/tuned#x", id="fragment"),
        pytest.param("hf://datasets/team/tuned%2fx", id="escape"),
        pytest.param("hf://datasets/team\\tuned", id="backslash"),
        pytest.param("hf://datasets/user:hf_x@team/tuned", id="credentials"),
        pytest.param("hf://datasets/team/tuned\n", id="newline"),
        pytest.param(" hf://datasets/team/tuned", id="space"),
        pytest.param("hf://datasets/team/tünéd", id="not ASCII"),
        pytest.param("hf://datasets/team/tuned\x00", id="NUL"),
        pytest.param(f"hf://datasets/team/{'a' * 97}", id="too long"),
        pytest.param("hf://datasets/" + "a/" * 100_000, id="far too long"),
    ],
)
def test_what_names_no_repository(name: str) -> None:
    with pytest.raises(UsageError, match=r"does not name a dataset repository; write it like hf://datasets/org") as it:
        HubName.parse(name)
    assert len(str(it.value)) < 250


@pytest.mark.parametrize(
    "revision",
    [
        pytest.param("", id="nothing"),
        pytest.param("../main", id=".."),
        pytest.param("a..b", id="two dots"),
        pytest.param("/main", id="leading slash"),
        pytest.param("main/", id="trailing slash"),
        pytest.param("a//b", id="two slashes"),
        pytest.param("main.", id="trailing dot"),
        pytest.param("main@v1", id="two revisions"),
        pytest.param("a b", id="space"),
        pytest.param("main?x", id="query"),
        pytest.param("main#x", id="fragment"),
        pytest.param("main%2e", id="escape"),
        pytest.param("main~1", id="git's ancestor"),
        pytest.param("main^", id="git's parent"),
        pytest.param("main:x", id="git's path"),
        pytest.param("main\n", id="newline"),
        pytest.param("mäin", id="not ASCII"),
        pytest.param("a" * 256, id="too long"),
    ],
)
def test_what_is_no_revision(revision: str) -> None:
    with pytest.raises(UsageError, match=r"is not a branch, tag or commit; write it like hf://datasets/a/b@main"):
        HubName.parse(f"hf://datasets/a/b@{revision}")


letters = string.ascii_letters + string.digits + "_"
part = st.from_regex(r"\A[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?\Z")
names = st.builds(
    HubName,
    st.builds("{}/{}".format, part, part).filter(
        lambda text: "--" not in text and ".." not in text and not text.endswith(".git")
    ),
    st.none() | st.lists(st.text(letters + "-", min_size=1), min_size=1, max_size=4).map("/".join),
)


@given(names)
def test_parse_and_str_are_inverse(name: HubName) -> None:
    assert HubName.parse(str(name)) == name


@given(st.text("adehfstm:/@.-_%?\\\n x") | st.text().map("hf://datasets/team/tuned@".__add__) | st.text())
def test_text_is_refused_or_kept_as_it_is(text: str) -> None:
    """And what is kept is harmless in an address and in a path."""
    try:
        name = HubName.parse(text)
    except UsageError:
        return
    assert str(name) == text
    assert not set(text) - set(letters + ":/@.-")
    assert ".." not in text
