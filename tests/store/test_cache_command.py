"""`deepinfer cache`: what it shows is what is there, and what it takes away is gone."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from store.witness_store import LAYOUT, Chain, Clocks, open_store, settings

from deepinfer.cli import main
from deepinfer.runtime.store import Status
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.lease import Leases, Writer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path, clocks=Clocks(4_000_000_000.0))
    Chain(1, 6).publish(store)
    Chain(2, 3).publish(store, cls="agent")
    store.close()
    return tmp_path / "store"


def test_ls_and_stat_count_segments_and_records(folder: Path) -> None:
    rows = json.loads(run("ls", folder, "--json").output)
    assert [(r["class"], r["records"], r["state"]) for r in rows] == [("agent", 3, "seg"), ("chat", 4, "seg"),
                                                                      ("chat", 2, "seg")]
    assert {r["namespace"] for r in rows} == {LAYOUT.namespace.hex()} and rows[0]["expires"].startswith("2096-10-05")
    assert len(run("ls", folder, "--class", "agent").output.splitlines()) == 2
    (agent, chat) = json.loads(run("stat", folder, "--json").output)["parts"]
    assert (agent["records"], chat["records"], chat["segments"]) == (3, 6, 2)
    assert "96" in run("stat", folder).output  # tokens of 6 blocks
    (path,) = folder.rglob("agent/*.seg")
    path.rename(path.with_suffix(".dead"))
    assert len(json.loads(run("stat", folder, "--json").output)["parts"]) == 1, "what was given up does not count"


def test_stat_counts_tokens_beside_a_segment_whose_superblock_is_damaged(folder: Path) -> None:
    first = min(folder.rglob("chat/*.seg"))
    first.write_bytes(first.read_bytes()[:100])
    (chat,) = (p for p in json.loads(run("stat", folder, "--json").output)["parts"] if p["class"] == "chat")
    assert (chat["records"], chat["tokens"], chat["block_tokens"]) == (2, 2 * LAYOUT.block_tokens, LAYOUT.block_tokens)


@pytest.mark.parametrize("lease", ["[]", "null", '{"name": "w", "heartbeat": "x"}', '{"heartbeat": null}', "{torn"])
def test_stat_passes_over_a_lease_that_says_nothing(folder: Path, lease: str) -> None:
    (folder / "writers" / "w.lease").write_text(lease)
    done = run("stat", folder)
    assert done.exit_code == 0 and "writer" not in done.output


def test_verify_names_the_slots_that_are_damaged(folder: Path) -> None:
    done = run("verify", folder)
    assert done.exit_code == 0 and "9 records of 3 segments are whole, 0 are damaged" in done.output
    path = sorted(folder.rglob("chat/*.seg"))[0]
    with path.open("r+b") as file:
        file.seek(4096 + 2 * LAYOUT.stride + 500)
        file.write(b"rot")
    done = run("verify", folder)
    assert done.exit_code == 5 and f"{path}: damaged records in slots 2" in done.output
    assert "8 records of 3 segments are whole, 1 are damaged" in done.output


def test_purge_takes_away_what_was_named(folder: Path, tmp_path: Path) -> None:
    assert run("purge", folder).exit_code == 2
    assert "removed 1 segments with 3 records" in run("purge", folder, "--class", "agent").output
    assert "removed 0 segments" in run("purge", folder, "--expired").output
    store = open_store(tmp_path, clocks=Clocks(4_000_000_000.0))
    assert store.lookup(Chain(1, 6).keys) == 6 and store.lookup(Chain(2, 3).keys) == 0
    assert "removed 2 segments with 6 records" in run("purge", folder, "--all").output
    store.upkeep.see()
    assert Chain(1, 6).fetch(store) == [Status.MISS] * 6
    store.close()
    assert not list(folder.rglob("*.log"))


@pytest.mark.parametrize("how", ["purge", "removed folder"])
def test_a_store_that_runs_goes_on_in_a_new_segment_after_a_purge(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path)
    assert Chain(1, 3).publish(store) == [Status.OK] * 3
    if how == "purge":
        assert "removed 1 segments" in run("purge", tmp_path / "store", "--all").output
    else:
        shutil.rmtree(tmp_path / "store")
    store.upkeep.tick()
    assert Chain(2, 3).publish(store) == [Status.OK] * 3
    other = open_store(tmp_path / "other", shared=tmp_path / "store", index=tmp_path / "i")
    assert other.lookup(Chain(1, 3).keys) == 0 and Chain(2, 3).fetch(other) == [Status.OK] * 3
    other.close()
    store.close()
    assert len(list(tmp_path.rglob("*.seg"))) == 1 and not list(tmp_path.rglob("*.open"))


def test_a_segment_that_a_listing_missed_is_filled_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert Chain(1, 3).publish(store) == [Status.OK] * 3
    store.catalog.drop_all()  # as when its mount was away for a moment
    store.upkeep.tick()
    assert Chain(2, 3).publish(store) == [Status.OK] * 3
    assert Chain(1, 3).fetch(store) == Chain(2, 3).fetch(store) == [Status.OK] * 3
    assert len(list(tmp_path.rglob("*.open"))) == 1
    store.close()


def test_purge_of_a_tenant_forgets_its_salt(folder: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    salt = store.tenant_salt("acme")
    done = run("purge", folder, "--tenant", "acme")
    assert done.exit_code == 0 and "forgot the salt of acme" in done.output
    assert open_store(tmp_path / "other", shared=folder, index=tmp_path / "i").tenant_salt("acme") != salt
    assert run("purge", folder, "--tenant", "nobody").exit_code == 2
    run("purge", folder, "--all")
    store.tenant_salt("acme")
    assert "there are no segments here" in run("purge", folder, "--tenant", "acme").output
    store.close()


def test_gc_adopts_expires_and_keeps_a_quota(folder: Path, tmp_path: Path) -> None:
    dead = Writer("dddddddddddd", "another host", "boot", 1, 1)
    store = open_store(tmp_path, writer=dead, clocks=Clocks(1_700_000_000.0), index=tmp_path / "i")
    Chain(3, 2).publish(store)
    store.writers.current.clear()  # it dies with an open segment
    done = run("gc", folder)
    assert done.exit_code == 0, done.output
    assert "adopted 1" in done.output
    assert not list(folder.rglob("*.open"))
    before = len(list(folder.rglob("*.seg")))
    done = run("gc", folder, "--quota", "1B")
    assert done.exit_code == 2 and "at least one segment" in done.output
    assert len(list(folder.rglob("*.seg"))) == before
    done = run("gc", folder, "--quota", "50KiB")
    assert "removed: quota" in done.output and len(list(folder.rglob("*.seg"))) < before


def test_gc_of_a_folder_that_may_not_be_written_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)
    done = run("gc", folder, "--quota", "50KiB")
    assert done.exit_code == 5 and "may not be written" in done.output


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["purge", "--all"], ["gc"]], ids=" ".join)
def test_no_store_is_one_sentence(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "photos").mkdir()
    for folder in (tmp_path / "nothing", tmp_path):
        done = run(*command, folder)
        assert done.exit_code == 5 and done.output.startswith("error: ") and "no store here" in done.output
        assert len(done.output.splitlines()) == 1
    assert run(*command, tmp_path / "photos").exit_code == 0, "a store that nobody wrote to"


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["gc"], ["purge", "--all"]], ids=" ".join)
def test_what_is_no_segment_file_is_passed_by(folder: Path, command: list[str]) -> None:
    place = next(path.parent for path in folder.rglob("*.seg"))
    (place / "00499093-aaaaaaaaaaaa-000000.seg").mkdir()
    (place / "00499093-cccccccccccc-000000.seg").symlink_to("nowhere")
    (place / "notes").write_text("x")
    (folder / ("0" * 32)).touch()
    done = run(*command, folder)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("more", [["--tenant", "acme", "--class", "agent"], ["--all", "--class", "agent"],
                                  ["--all", "--expired"]], ids=" ".join)
def test_purge_refuses_choices_that_it_would_not_heed(folder: Path, more: list[str]) -> None:
    done = run("purge", folder, *more)
    assert done.exit_code == 2 and "goes with no other choice" in done.output
    assert len(list(folder.rglob("*.seg"))) == 3


@pytest.mark.parametrize("heartbeat", ["x", None, []])
def test_a_lease_whose_heartbeat_is_no_number_is_judged_by_its_age(folder: Path, heartbeat: object) -> None:
    leases = Leases(settings(folder.parent), Files(), Writer.mine())
    path = folder / "writers" / "w.lease"
    path.write_text(json.dumps(asdict(Writer("w", "another host", "boot", 1, 2)) | {"heartbeat": heartbeat}))
    written = path.stat().st_mtime
    assert not leases.dead("w", written + 10) and leases.dead("w", written + 10_000)
