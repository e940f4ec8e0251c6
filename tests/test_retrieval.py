"""Getting the selection: hits, misses, damaged caches, several processes, hostile registries."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from made import CUDNN, CUTLASS, H200, POLICY, bundle, entry, key, lookup

from fi_tunecache.bundle import MARK
from fi_tunecache.entry import Entry
from fi_tunecache.errors import FormatError, IntegrityError, NoMatchError, RegistryError, UsageError
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.key import Key
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.materialisation import stamped
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.registry_tree import DirectoryTree, RegistryTree
from fi_tunecache.retrieval import pull, resolve
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache

ONE = bundle([entry(key(CUTLASS, m), m) for m in (1, 2, 4)], [lookup([CUTLASS], CUTLASS, m) for m in (1, 2, 4)])


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    return UserCache(tmp_path / "cache")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    add_bundles(tmp_path / "registry", "test", [ONE])
    return tmp_path / "registry"


def request_to(*registries: Path, **changes: object) -> Request:
    return Request(**{"environment": H200, "registries": tuple(map(str, registries)), **changes})  # type: ignore[arg-type]


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below a directory with inode, size and time of its last change."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.stat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


class CountingTree(DirectoryTree):
    """A tree that remembers what was read from it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def read(self, path: str, limit: int) -> bytes | None:
        self.reads.append(path)
        return super().read(path, limit)


class TestAHit:
    def test_gives_what_the_miss_gave(self, cache: UserCache, registry: Path) -> None:
        first, second = pull(request_to(registry), cache=cache), pull(request_to(registry), cache=cache)
        assert (first.hit, second.hit) == (False, True)
        assert second.data == first.data
        assert second.selection == first.selection
        assert second.selection.entries == 3

    def test_writes_nothing(self, cache: UserCache, registry: Path) -> None:
        pull(request_to(registry), cache=cache)
        before = snapshot(cache.root)
        assert pull(request_to(registry), cache=cache).hit
        assert snapshot(cache.root) == before

    def test_takes_no_lock(self, cache: UserCache, registry: Path) -> None:
        pull(request_to(registry), cache=cache)
        with cache.lock(request_to(registry).selection_id) as held:
            assert held
            assert pull(request_to(registry), cache=cache).hit

    def test_reads_one_manifest_to_see_whether_it_is_current(self, cache: UserCache, registry: Path) -> None:
        tree = CountingTree(registry)
        pull(request_to(registry), cache=cache, opener=lambda name: tree)
        tree.reads.clear()
        assert pull(request_to(registry), cache=cache, opener=lambda name: tree).hit
        assert tree.reads == ["0.7.4/nvidia-h200/manifest.json"]

    def test_offline_asks_no_registry(self, cache: UserCache, registry: Path) -> None:
        pull(request_to(registry), cache=cache)

        def gone(name: str) -> RegistryTree:
            raise AssertionError("a registry was opened")

        assert pull(request_to(registry), cache=cache, opener=gone, offline=True).hit

    def test_imports_neither_what_a_miss_needs_nor_anything_heavy(self, cache: UserCache, registry: Path) -> None:
        pull(request_to(registry), cache=cache)
        code = textwrap.dedent(
            f"""
            import sys
            from pathlib import Path
            from fi_tunecache.environment import Environment
            from fi_tunecache.retrieval import pull
            from fi_tunecache.selection import Request
            from fi_tunecache.user_cache import UserCache
            here = Environment.from_metadata({H200.metadata()!r})
            request = Request(environment=here, registries=({str(registry)!r},))
            assert pull(request, cache=UserCache(Path({str(cache.root)!r}))).hit
            unwanted = {{"torch", "flashinfer", "huggingface_hub", "click", "rich", "filelock", "pynvml",
                        "fi_tunecache.resolution", "fi_tunecache.bundle", "fi_tunecache.publish"}}
            print(sorted(unwanted & set(sys.modules)))
            """
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestAMiss:
    def test_stores_selection_reasons_and_bundles(self, cache: UserCache, registry: Path) -> None:
        pulled = pull(request_to(registry), cache=cache)
        (used,) = pulled.selection.bundles
        kept = {str(path.relative_to(cache.root)) for path in cache.root.rglob("*") if path.suffix == ".json"}
        assert kept == {
            f"bundles/{used.sha256}.json",
            f"selections/{pulled.selection.id}.json",
            f"selections/{pulled.selection.id}.resolution.json",
        }
        assert cache.bundle_path(used.sha256).stat().st_mode & 0o777 == 0o444

    def test_a_changed_registry_is_noticed(self, cache: UserCache, registry: Path) -> None:
        assert pull(request_to(registry), cache=cache).selection.entries == 3
        add_bundles(registry, "test", [bundle([entry(key(CUTLASS, 8))])])
        pulled = pull(request_to(registry), cache=cache)
        assert (pulled.hit, pulled.selection.entries) == (False, 4)
        assert pull(request_to(registry), cache=cache).hit

    def test_bundles_that_are_cached_are_not_read_again(self, cache: UserCache, registry: Path) -> None:
        pull(request_to(registry), cache=cache)
        add_bundles(registry, "test", [bundle([entry(key(CUTLASS, 8))])])
        tree = CountingTree(registry)
        pull(request_to(registry), cache=cache, opener=lambda name: tree)
        assert len([path for path in tree.reads if not path.endswith(("manifest.json", "registry.json"))]) == 1

    def test_nothing_fits_and_nothing_is_stored(self, cache: UserCache, registry: Path) -> None:
        with pytest.raises(NoMatchError) as caught:
            pull(request_to(registry, environment=H200.with_facts({"cudnn_version": "92400"})), cache=cache)
        bundle_id = next((registry / "0.7.4/nvidia-h200").glob("????????????????.json")).stem
        assert str(caught.value) == (
            f"nothing in {registry} fits NVIDIA H200, flashinfer 0.7.4 at match level exact "
            f"(nearest: bundle {bundle_id}: cudnn_version); --match compatible would give 3 entries"
        )
        assert not list(cache.root.rglob("*.json"))

    @pytest.mark.parametrize(
        ("facts", "line"),
        [
            pytest.param({"gpu": "NVIDIA H200 NVL"}, r"nearest: bundle \w{16}: gpu\)", id="a look-alike GPU"),
            pytest.param(
                {"flashinfer_version": "0.7.4+cu130"},
                r"nearest: bundle \w{16}: flashinfer_version\)",
                id="a local version",
            ),
            pytest.param(
                {"gpu": "RTX A4000", "flashinfer_version": "0.9"}, "there is 0.7.4/nvidia-h200", id="nothing near"
            ),
        ],
    )
    def test_without_a_folder_the_neighbours_are_named_and_never_taken(
        self, cache: UserCache, registry: Path, facts: dict[str, str], line: str
    ) -> None:
        for level in MatchLevel:
            with pytest.raises(NoMatchError, match=line):
                pull(request_to(registry, environment=H200.with_facts(facts), level=level), cache=cache)

    def test_a_neighbour_is_told_with_the_entries_that_it_would_have(self, registry: Path) -> None:
        asked, other = resolve(request_to(registry, environment=H200.with_facts({"flashinfer_version": "0.7.2"})))
        (verdict,) = asked.verdicts
        assert str(verdict).endswith("rejected: flashinfer_version: registry 0.7.4, here 0.7.2: 3 entries lost")
        assert not asked.chosen
        assert not other.chosen

    def test_a_manifest_of_a_newer_format_is_refused_and_notices_are_said(
        self, cache: UserCache, registry: Path
    ) -> None:
        path = registry / "0.7.4/nvidia-h200/manifest.json"
        manifest = json.loads(path.read_bytes())
        path.write_text(json.dumps({**manifest, "notices": ["moved to another place"]}))
        pull(request_to(registry), cache=cache)
        assert cache.notices == [f"{registry}: moved to another place"]
        path.write_text(json.dumps({**manifest, "format": 9}))
        with pytest.raises(FormatError, match="upgrade fi-tunecache"):
            resolve(request_to(registry))

    def test_the_descriptor_is_not_read(self, cache: UserCache, registry: Path) -> None:
        """On a Hub it would cost two requests."""
        (registry / "registry.json").write_bytes(b"damaged")
        assert pull(request_to(registry), cache=cache).selection.entries == 3

    def test_the_other_level_is_told(self, cache: UserCache, registry: Path) -> None:
        add_bundles(
            registry,
            "test",
            [bundle([entry(key(CUTLASS, 8))], environment=H200.with_facts({"cuda_version": "12.9"}))],
        )
        other = pull(request_to(registry), cache=cache).selection.other_level
        assert (other.level, other.entries, other.bundles) == (MatchLevel.COMPATIBLE, 4, 2)

    def test_registries_in_order_of_precedence(self, cache: UserCache, registry: Path, tmp_path: Path) -> None:
        second = tmp_path / "second"
        add_bundles(second, "second", [bundle([entry(key(CUTLASS, m), 9) for m in (1, 8)])])
        pulled = pull(request_to(registry, second), cache=cache)
        assert [(item.registry, item.entries) for item in pulled.selection.bundles] == [
            (str(registry), 3),
            (str(second), 1),
        ]

    def test_a_bundle_of_two_registries_counts_once(self, cache: UserCache, registry: Path, tmp_path: Path) -> None:
        add_bundles(tmp_path / "copy", "copy", [ONE])
        asked, _ = resolve(request_to(registry, tmp_path / "copy"))
        assert [verdict.registry for verdict in asked.verdicts] == [str(registry)]


class TestTheSelectionId:
    base = Request(environment=H200, registries=("embedded",))

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"environment": H200.with_facts({"cudnn_version": "1"})}, id="a fact"),
            pytest.param({"registries": ("embedded", "./x")}, id="registries"),
            pytest.param({"registries": ("./x", "embedded")}, id="their order"),
            pytest.param({"level": MatchLevel.COMPATIBLE}, id="match level"),
            pytest.param({"policy": bundle([]).policy.from_execution_mode("eager")}, id="policy"),
            pytest.param({"skip_ops": frozenset({"bf16_gemm"})}, id="skip list"),
            pytest.param({"lock": "0" * 64}, id="lock"),
        ],
    )
    def test_differs_with(self, changes: dict[str, object]) -> None:
        fields = {name: getattr(self.base, name) for name in self.base.__struct_fields__}
        assert Request(**{**fields, **changes}).selection_id != self.base.selection_id

    def test_does_not_differ_with_the_path_of_a_virtual_environment(self) -> None:
        moved = H200.with_facts({"cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:ff;torch==2.11.0:00"})
        assert Request(environment=moved, registries=("embedded",)).selection_id == self.base.selection_id

    def test_differs_with_our_rules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self.base.selection_id
        monkeypatch.setattr("fi_tunecache.selection.rules_version", lambda: "other")
        assert self.base.selection_id != before


class TestADamagedCache:
    @pytest.mark.parametrize("damage", [b"", b"{", b"null", b"{}", b'{"_metadata":{"fi_tunecache":{}}}'])
    def test_a_selection_is_set_aside_reported_and_made_again(
        self, cache: UserCache, registry: Path, damage: bytes
    ) -> None:
        made = pull(request_to(registry), cache=cache)
        path = cache.selection_path(made.selection.id)
        path.write_bytes(damage)
        again = pull(request_to(registry), cache=cache)
        assert (again.hit, again.data) == (False, made.data)
        assert path.with_name(path.name + ".corrupt").read_bytes() == damage
        assert len(cache.notices) == 1
        assert f"{path} was damaged" in cache.notices[0]

    def test_one_changed_tactic_is_noticed(self, cache: UserCache, registry: Path) -> None:
        made = pull(request_to(registry), cache=cache)
        path = cache.selection_path(made.selection.id)
        changed = made.data.replace(b'"CutlassBf16GemmRunner",4', b'"CutlassBf16GemmRunner",5')
        assert changed != made.data
        path.write_bytes(changed)
        assert not pull(request_to(registry), cache=cache).hit
        assert path.read_bytes() == made.data

    def test_what_looks_like_our_digest_in_a_key_or_an_entry_stays_as_it_is(
        self, cache: UserCache, tmp_path: Path
    ) -> None:
        zeros = "0" * 64
        odd = Key("op", CUTLASS, ((1,),), (zeros, '"digest":"' + zeros + '"'))
        odd_entry = Entry(odd, CUTLASS, 1, POLICY, {"digest": zeros})
        add_bundles(tmp_path / "odd", "odd", [bundle([odd_entry])])
        made = pull(request_to(tmp_path / "odd"), cache=cache)
        assert pull(request_to(tmp_path / "odd"), cache=cache).hit
        (found,) = read_cache_file(made.data).entries
        assert found.key == odd
        assert (found.selection or {})["digest"] == zeros

    def test_a_selection_under_another_name_is_not_used(self, cache: UserCache, registry: Path) -> None:
        made = pull(request_to(registry), cache=cache)
        other = request_to(registry, level=MatchLevel.COMPATIBLE)
        cache.selection_path(other.selection_id).write_bytes(made.data)
        assert not pull(other, cache=cache).hit

    def test_a_bundle_is_fetched_again(self, cache: UserCache, registry: Path) -> None:
        made = pull(request_to(registry), cache=cache)
        path = cache.bundle_path(made.selection.bundles[0].sha256)
        path.chmod(0o644)
        path.write_bytes(b"{}")
        cache.selection_path(made.selection.id).unlink()
        assert pull(request_to(registry), cache=cache).data == made.data
        assert path.read_bytes() != b"{}"

    def test_a_cache_that_cannot_be_written_still_gives_the_selection(self, registry: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        pulled = pull(request_to(registry), cache=UserCache(tmp_path / "file" / "cache"))
        assert pulled.selection.entries == 3
        assert pulled.not_stored is not None
        assert "can't be written" in pulled.not_stored
        assert "FI_TUNECACHE_DIR" in pulled.not_stored

    def test_what_lies_where_a_selection_should_is_not_fatal(self, cache: UserCache, registry: Path) -> None:
        cache.selection_path(request_to(registry).selection_id).mkdir(parents=True)
        pulled = pull(request_to(registry), cache=cache)
        assert pulled.selection.entries == 3
        assert pulled.not_stored is not None


class TestAHostileRegistry:
    @pytest.fixture
    def row_file(self, registry: Path) -> Path:
        return next((registry / "0.7.4/nvidia-h200").glob("????????????????.json"))

    def test_changed_bytes_are_never_used(self, cache: UserCache, registry: Path, row_file: Path) -> None:
        data = row_file.read_bytes()
        row_file.chmod(0o644)
        row_file.write_bytes(data.replace(b'Runner",4', b'Runner",5'))
        with pytest.raises(IntegrityError, match="sha256 is"):
            pull(request_to(registry), cache=cache)
        assert not list(cache.root.rglob("*.json"))

    def test_two_bundles_of_one_short_name_are_not_confused(
        self, registry: Path, row_file: Path, tmp_path: Path
    ) -> None:
        """Whoever can make both may find two bundles whose hashes start alike."""
        second = tmp_path / "second"
        add_bundles(second, "second", [ONE])
        manifest = second / "0.7.4/nvidia-h200/manifest.json"
        document = json.loads(manifest.read_bytes())
        (row,) = document["bundles"]
        row.update(sha256=row_file.stem + "0" * 48, yanked={"reason": "so it is not fetched", "date": "2026-12-01"})
        manifest.write_text(json.dumps(document))
        with pytest.raises(IntegrityError, match="two bundles have the same first 16 digits"):
            resolve(request_to(registry, second))

    def test_a_missing_bundle(self, cache: UserCache, registry: Path, row_file: Path) -> None:
        row_file.unlink()
        with pytest.raises(IntegrityError, match="missing"):
            pull(request_to(registry), cache=cache)

    def test_a_manifest_of_a_newer_format(self, cache: UserCache, registry: Path) -> None:
        (registry / "0.7.4/nvidia-h200/manifest.json").write_bytes(b'{"format": 2, "bundles": "elsewhere"}')
        with pytest.raises(FormatError, match="upgrade fi-tunecache"):
            pull(request_to(registry), cache=cache)

    def test_no_registry_at_all(self, cache: UserCache, tmp_path: Path) -> None:
        with pytest.raises(RegistryError, match=r"has no registry\.json"):
            pull(request_to(tmp_path), cache=cache)


def test_eight_processes_make_one_selection(cache: UserCache, registry: Path) -> None:
    """All get the same bytes, whoever made them; nothing half-written is seen or left."""
    code = textwrap.dedent(
        f"""
        import hashlib
        from pathlib import Path
        from fi_tunecache.environment import Environment
        from fi_tunecache.retrieval import pull
        from fi_tunecache.selection import Request
        from fi_tunecache.user_cache import UserCache
        request = Request(environment=Environment.from_metadata({H200.metadata()!r}), registries=({str(registry)!r},))
        pulled = pull(request, cache=UserCache(Path({str(cache.root)!r})))
        print(pulled.hit, hashlib.sha256(pulled.data).hexdigest())
        """
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    outcomes = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert len({digest for _, digest in outcomes}) == 1
    assert [hit for hit, _ in outcomes].count("False") == 1
    assert not [path for path in cache.root.rglob("*") if path.name.endswith(".tmp")]


class TestAStampedFile:
    def test_holds_the_facts_the_entries_and_marks(self, cache: UserCache, registry: Path) -> None:
        made = pull(request_to(registry), cache=cache)
        file = read_cache_file(stamped(made.selection, made.data, H200))
        assert file.environment() == H200
        assert [item.tactic for item in file.entries] == [1, 2, 4]
        (used,) = made.selection.bundles
        assert all((item.selection or {})[MARK] == used.bundle_id for item in file.entries)
        assert file.metadata is not None
        assert file.metadata[MARK]["bundles"] == [f"{registry}: {used.sha256}"]

    def test_is_refused_where_a_fact_is_not_known(self, cache: UserCache, registry: Path) -> None:
        made = pull(request_to(registry), cache=cache)
        unknown = type(H200).from_metadata({**H200.metadata(), "cudnn_version": "unknown"})
        with pytest.raises(UsageError, match=r"cudnn_version not known; give it with --fact cudnn_version=VALUE"):
            stamped(made.selection, made.data, unknown)

    def test_an_entry_without_a_policy_keeps_its_two_elements(self, cache: UserCache, tmp_path: Path) -> None:
        plain = entry(key(CUDNN), (0, ()))
        plain = type(plain)(plain.key, plain.runner, plain.tactic)
        add_bundles(tmp_path / "old", "old", [bundle([plain])])
        made = pull(request_to(tmp_path / "old"), cache=cache)
        (found,) = read_cache_file(made.data).entries
        assert (found.policy, found.selection) == (None, None)
