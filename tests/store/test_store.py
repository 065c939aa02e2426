"""A store as its tier: what is published comes back, and nothing else does."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.witness_store import (
    BLOCK,
    DAY,
    LAYOUT,
    PATIENCE,
    V41_LAYOUT,
    Chain,
    Clocks,
    open_store,
    ring_of,
    wait_for,
)

from deepinfer.errors import PlanError, RequestError, SpecError
from deepinfer.runtime.store import Flags, Layout, Status, Store, layout_of
from deepinfer.runtime.store.lease import Writer
from deepinfer.runtime.store.settings import HOUR, class_of, default_retention, parse_retention, parse_size
from deepinfer.runtime.store.writer import OpenSegment, Row

BACKENDS = ["inline", "threads", "threads, native", "io_uring, native"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_published_comes_back_and_survives_a_restart(tmp_path: Path, backend: str) -> None:
    chain = Chain(1, 11)
    native, backend = "native" in backend, backend.split(",")[0]
    given = {"backend": backend, "threads": 2, "background": backend != "inline", "native": native}
    store = open_store(tmp_path, **given)
    if backend == "io_uring":
        ring_of(store.native).close()
    assert store.ready(PATIENCE) and store.mover.name == backend and (store.native is not None) == native
    assert store.lookup(chain.keys) == 0
    assert chain.publish(store) == [Status.OK] * 11
    assert store.lookup(chain.keys) == 11 and chain.fetch(store) == [Status.OK] * 11
    store.close()
    again = open_store(tmp_path, **given)
    assert again.ready(PATIENCE) and not again.index.rebuilt
    assert again.lookup(chain.keys) == 11 and chain.fetch(again) == [Status.OK] * 11
    assert again.lookup(Chain(2, 11).keys) == 0 and again.lookup(Chain(2, 11, prefix=Chain(1, 4)).keys) == 4
    again.close()


def test_a_common_prefix_is_found_up_to_where_the_sequences_part(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 9)
    chain.publish(store)
    other = Chain(1, 9)
    other.ids[5 * 16 + 3] += 1
    assert store.lookup(Chain(1, 9).keys) == 9
    from deepinfer.runtime.prefix.chain import chain_keys
    other.keys = chain_keys(other.root, other.ids, 16)
    assert store.lookup(other.keys) == 5
    assert other.fetch(store) == [Status.OK] * 5 + [Status.MISS] * 4
    store.close()


def test_a_key_with_other_ids_is_a_miss(tmp_path: Path) -> None:
    """Two sequences with one key: the ids decide."""
    store, chain = open_store(tmp_path), Chain(1, 3)
    chain.publish(store)
    twin = Chain(1, 3)
    twin.ids[20] += 1
    assert store.lookup(twin.keys) == 3
    assert twin.fetch(store) == [Status.OK, Status.MISS, Status.OK]
    assert chain.fetch(store) == [Status.OK] * 3
    store.close()


def test_an_exact_block_replaces_a_replayed_one_and_nothing_replaces_it(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 2)
    assert chain.publish(store, flags=Flags.REPLAYED) == [Status.OK] * 2
    assert store.lookup(chain.keys) == 2 and store.lookup(chain.keys, exact=True) == 0
    assert chain.fetch(store, exact=True) == [Status.MISS] * 2
    assert chain.fetch(store) == [Status.OK] * 2
    chain.publish(store)
    assert store.lookup(chain.keys, exact=True) == 2
    assert chain.fetch(store, exact=True) == [Status.OK] * 2
    written = store.metrics().written_bytes.value
    chain.publish(store, flags=Flags.REPLAYED)
    chain.publish(store)
    assert store.metrics().written_bytes.value == written, "a block that is there was written again"
    store.close()


def test_another_namespace_sees_nothing(tmp_path: Path) -> None:
    """Other weights, numerics, sections or kinds of payload are other stores in one folder."""
    chain, store = Chain(1, 3), open_store(tmp_path)
    chain.publish(store)
    for layout in (Layout(b"other weights!!!", 16, LAYOUT.sections), Layout(LAYOUT.identity, 16, LAYOUT.sections[:2]),
                   Layout(LAYOUT.identity, 16, LAYOUT.sections, "windows")):
        other = open_store(tmp_path, layout=layout)
        assert other.lookup(chain.keys) == 0
        other.close()
    store.close()


def test_a_record_of_v4_1_fills_its_pages_without_waste() -> None:
    assert V41_LAYOUT.payload_bytes == 113_920
    assert V41_LAYOUT.record_bytes == V41_LAYOUT.stride == 114_688
    assert V41_LAYOUT.capacity(256 << 20) == 2_339


def test_two_processes_worth_of_writers_share_a_folder(tmp_path: Path) -> None:
    """Two hosts: indexes of their own, segments of their own, each sees the other's records."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a = open_store(tmp_path / "a", shared=tmp_path / "shared")
    b = open_store(tmp_path / "b", shared=tmp_path / "shared")
    one, two = Chain(1, 6), Chain(2, 6)
    one.publish(a)
    two.publish(b)
    a.upkeep.see()
    b.upkeep.see()
    for store in (a, b):
        assert one.fetch(store) == two.fetch(store) == [Status.OK] * 6
    names = [p.name for p in (tmp_path / "shared").rglob("*.seg")] + [p.name for p in tmp_path.rglob("*.open")]
    assert {name.split("-")[1] for name in names} == {a.leases.writer.name, b.leases.writer.name}
    a.close()
    b.close()


def test_a_segment_that_came_in_the_same_tick_of_the_file_system_is_seen(tmp_path: Path) -> None:
    """Its folder has the time of change that it had when it was listed: once it was listed again a little later, the
    names are known, and until then it is listed each time."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    clocks = Clocks()
    a = open_store(tmp_path / "a", shared=tmp_path / "shared", clocks=clocks)
    b = open_store(tmp_path / "b", shared=tmp_path / "shared", clocks=clocks)
    one, two = Chain(1, 4), Chain(2, 4)
    one.publish(a)
    (folder,) = (tmp_path / "shared").rglob("chat")
    clocks.forward(100)
    b.upkeep.see()
    then = folder.stat()
    two.publish(a)
    os.utime(folder, ns=(then.st_atime_ns, then.st_mtime_ns))
    b.upkeep.see()
    assert two.fetch(b) == [Status.OK] * 4
    clocks.forward(0.2)
    b.upkeep.see()
    listed = []
    names = b.catalog.files.names
    b.catalog.files.names = lambda of: listed.append(of) or names(of)  # type: ignore[method-assign, func-returns-value]
    b.upkeep.see()
    assert folder not in listed
    a.close()
    b.close()


def test_classes_are_kept_for_as_long_as_they_say(tmp_path: Path) -> None:
    clocks = Clocks()
    store, agent, chat = open_store(tmp_path, clocks=clocks), Chain(1, 3), Chain(2, 3)
    agent.publish(store, cls="agent")
    chat.publish(store, cls="chat")
    store.writers.rotate(everything=True)
    for days, kept in ((2.99, (3, 3)), (3.5, (0, 3)), (6.99, (0, 3)), (7.5, (0, 0))):
        clocks.forward(days * 86_400 - (clocks.wall - Clocks().wall))
        assert (store.lookup(agent.keys), store.lookup(chat.keys)) == kept, days
        if days == 3.5:
            assert agent.fetch(store) == [Status.EXPIRED] * 3
        store.upkeep.expire()
        assert (store.lookup(agent.keys), store.lookup(chat.keys)) == kept, days
    assert agent.fetch(store) == [Status.MISS] * 3
    store.upkeep.everything()
    assert not list(tmp_path.rglob("*.seg"))
    assert store.metrics().evicted.values["expired"] == 2
    with pytest.raises(RequestError, match="agent, chat"):
        agent.publish(store, cls="week")
    store.close()


def test_a_request_with_tools_is_of_the_agent_class_and_a_header_says_otherwise() -> None:
    usual = default_retention()
    assert usual == {"agent": 3 * 86_400, "chat": 7 * 86_400}
    assert class_of(True, None, usual) == "agent" and class_of(False, None, usual) == "chat"
    assert class_of(True, "chat", usual) == "chat" and class_of(False, "nonsense", usual) == "chat"
    assert parse_retention("agent=12h, long=30d", "x") == {"agent": 43_200, "chat": 604_800, "long": 2_592_000}
    assert parse_size("64GiB", "x") == 64 << 30 and parse_size("1.5 MB", "x") == 1_500_000 and parse_size("7", "x") == 7
    for bad in ("agent", "agent=3", "=3d", f"agent={'9' * 5000}d"):
        with pytest.raises(SpecError, match="NUMBER"):
            parse_retention(bad, "x")
    for bad in ("many", "-1", f"{'9' * 400}TiB"):
        with pytest.raises(SpecError, match="TiB"):
            parse_size(bad, "x")


def test_the_quota_takes_what_ends_first_and_never_what_is_pinned(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota=3 * 60_000)
    old, new = Chain(1, 4), Chain(2, 4)
    old.publish(store, cls="agent")
    pin = store.pin(old.keys)
    new.publish(store)
    Chain(3, 4).publish(store)
    Chain(4, 4).publish(store)
    store.upkeep.keep_quota()
    assert store.upkeep.usage() <= store.settings.quota
    assert old.fetch(store) == [Status.OK] * 4 and new.fetch(store) == [Status.MISS] * 4
    pin.release()
    Chain(5, 4).publish(store)
    store.upkeep.keep_quota()
    assert old.fetch(store) == [Status.MISS] * 4
    assert store.metrics().evicted.values["quota"] == 2
    store.close()


@pytest.mark.parametrize("why", ["quota", "expired"])
def test_segments_that_another_model_left_are_given_up_like_ours(tmp_path: Path, why: str) -> None:
    clocks, layout = Clocks(), Layout(b"other weights", BLOCK, LAYOUT.sections)
    before = open_store(tmp_path, clocks=clocks, writer=Writer("dddddddddddd", "another host", "boot", 1, 1))
    Chain(1, 10).publish(before)
    before.leases.drop()  # it ends with two sealed segments and an open one
    clocks.forward(DAY)
    chain, size = Chain(2, 4, layout=layout), before.settings.segment_bytes
    store = open_store(tmp_path, layout=layout, clocks=clocks, quota=2 * size if why == "quota" else 64 << 20)
    chain.publish(store)
    clocks.forward(0 if why == "quota" else 6.5 * DAY)
    store.upkeep.everything()
    assert chain.fetch(store) == [Status.OK] * 4, "those that end first go, whoever wrote them"
    assert store.upkeep.usage() <= 2 * size and store.metrics().evicted.values[why] > 0
    left = {path.suffix for path in (tmp_path / "store" / LAYOUT.namespace.hex()).rglob("*.*")}
    assert not left or why == "quota", "nothing of the other model is left when its time is over"
    store.close()


@pytest.mark.parametrize("given", [{"retention": {"agent": HOUR, "chat": 10**13}}, {"retention": {"chat": HOUR}},
                                   {"retention": {"agent": HOUR, "chat": "7d"}}, {"retention": {}},
                                   {"retention": {"agent": HOUR, "chat": HOUR, "a b": HOUR}},
                                   {"retention": {"agent": HOUR, "chat": HOUR - 1}},
                                   {"quota": "64GiB"}, {"quota": 1}, {"quota": 1 << 61}, {"queue": -1},
                                   {"threads": 1.5}, {"threads": 0}, {"backend": "tape"}, {"arena_bytes": -1},
                                   {"segment_bytes": 0}, {"segment_bytes": 4096}, {"segment_bytes": 5000},
                                   {"timeout": -1.0}, {"timeout": 0}, {"timeout": float("nan")},
                                   {"sync_seconds": float("inf")}, {"sync_bytes": 0.5}, {"grace_seconds": -1},
                                   {"compact_below": 1.5}, {"bad_after": -1}], ids=str)
def test_a_setting_out_of_range_is_refused_at_the_start(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises((SpecError, PlanError), match=next(iter(given))) as refusal:
        open_store(tmp_path, **given)
    assert "allowed" in str(refusal.value)


def test_folder_and_shared_memory_are_the_owners_alone(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    old = os.umask(0)
    try:
        store = open_store(tmp_path)
        Chain(1, 6).publish(store)
        store.tenant_salt("somebody")
        store.upkeep.beat()
    finally:
        os.umask(old)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for top in ("store", "index") for p in (tmp_path / top).rglob("*")}
    assert {mode for p, mode in modes.items() if p.is_dir()} == {0o700}
    assert {mode for p, mode in modes.items() if p.is_file()} == {0o600}, modes
    assert set(os.listdir("/dev/shm")) == before, "shared memory has a name after it was registered"
    store.close()


def test_a_tenant_whose_salt_is_forgotten_is_purged(tmp_path: Path) -> None:
    from deepinfer.runtime.prefix.chain import root_key
    store = open_store(tmp_path)
    salt = store.tenant_salt("acme")
    assert len(salt) == 32 and salt == store.tenant_salt("acme") != store.tenant_salt("other")
    chain = Chain(1, 3, root=root_key(b"w", b"n", b"p", salt))
    chain.publish(store)
    assert chain.fetch(store) == [Status.OK] * 3
    assert store.salts.forget("acme") and not store.salts.forget("acme")
    again = Chain(1, 3, root=root_key(b"w", b"n", b"p", store.tenant_salt("acme")))
    assert store.lookup(again.keys) == 0
    store.close()


def test_a_callers_own_mistake_shows_in_its_call(tmp_path: Path) -> None:
    store, chain = open_store(tmp_path), Chain(1, 2)
    with pytest.raises(ValueError, match="4100"):
        store.publish(chain.key(0), chain.root, 0, chain.block_ids(0), [np.zeros(7, np.uint8)])
    with pytest.raises(ValueError, match="ids"):
        store.fetch(chain.keys, chain.ids[:16], [[np.zeros(4100, np.uint8)]] * 2)
    store.close()


def test_a_segment_smaller_than_a_record_is_refused() -> None:
    with pytest.raises(PlanError, match="smaller than one record"):
        V41_LAYOUT.capacity(65_536)


def test_every_state_of_a_plan_has_its_bytes_in_the_layout() -> None:
    from witness import witness_plan
    plan = witness_plan()
    assert layout_of(plan, bytes(16)).payload_bytes == sum(s.unit_bytes for s in plan.paged)
    assert dict(layout_of(plan, bytes(16)).sections) == {s.name: s.unit_bytes for s in plan.paged}
    windows = layout_of(plan, bytes(16), "windows")
    assert windows.payload_bytes == sum(s.unit_bytes for s in plan.rings)
    from dataclasses import replace
    many = replace(plan, states=tuple(replace(plan.paged[0], name=f"layer{i}") for i in range(43)))
    grouped = layout_of(many, bytes(16))
    assert len(grouped.sections) == 15 and grouped.sections[0][0] == "layer0..layer2"
    assert grouped.payload_bytes == sum(s.unit_bytes for s in many.paged)


def test_the_same_block_published_twice_at_once_is_written_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, backend="threads", threads=2, background=True)
    store.ready(PATIENCE)
    chain = Chain(1, 8)
    payloads = [chain.payload(i) for i in range(8)]
    tickets = [store.publish(chain.key(i), chain.parent(i), i, chain.block_ids(i), [payloads[i]])
               for _ in range(5) for i in range(8)]
    assert wait_for(lambda: all(t.done for t in tickets))
    assert {t.statuses[0] for t in tickets} == {Status.OK}
    assert store.metrics().written_bytes.value == 8 * LAYOUT.stride
    store.close()


def test_what_is_announced_together_stands_in_the_log_of_its_own_segment(tmp_path: Path) -> None:
    """Writes of several segments wait until they are announced; then logs and index are as if each had come alone."""
    store, chain = open_store(tmp_path, backend="threads", threads=3, background=True), Chain(1, 24)
    assert store.ready(PATIENCE)
    announce, may = store.writers.announce, threading.Event()
    groups: list[tuple[str, int]] = []

    def held(segment: OpenSegment, rows: list[Row]) -> None:
        assert may.wait(PATIENCE)
        groups.append((segment.segment.name.stem, len(rows)))
        announce(segment, rows)

    store.writers.announce = held  # type: ignore[method-assign]
    tickets = [store.publish(chain.key(i), chain.parent(i), i, chain.block_ids(i), [chain.payload(i)])
               for i in range(24)]
    assert wait_for(lambda: sum(s.next_slot - len(s.rows) for s in [*store.writers.current.values(),
                                                                    *store.writers.sealing]) == 24)
    assert wait_for(lambda: store.publisher._written.qsize() >= 4)
    assert not any(t.done for t in tickets) and store.lookup(chain.keys) == 0, "a block is stored when it is announced"
    may.set()
    assert wait_for(lambda: all(t.done for t in tickets)) and {t.statuses[0] for t in tickets} == {Status.OK}
    assert sum(count for _, count in groups) == 24 and len({stem for stem, _ in groups}) == 6
    store.close()
    again = open_store(tmp_path, index=tmp_path / "another index")
    assert chain.fetch(again) == [Status.OK] * 24, "the logs say where each record lies"
    again.close()


def test_the_store_of_another_process_on_this_host_is_seen(tmp_path: Path, run_python) -> None:
    """One index, two processes: what the other one publishes is found at once, while both run."""
    store = open_store(tmp_path)
    program = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from store.witness_store import *
store = open_store(Path(sys.argv[1]))
assert set(Chain(5, 6).publish(store)) == {Status.OK}
assert Chain(4, 3).fetch(store) == [Status.OK] * 3
import os; os._exit(0)
"""
    Chain(4, 3).publish(store)
    done = run_python("-c", program, str(tmp_path), str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    store.upkeep.see()
    assert Chain(5, 6).fetch(store) == [Status.OK] * 6
    store.close()


def test_a_store_is_a_tier(tmp_path: Path) -> None:
    from deepinfer.runtime.store import Tier
    store: Tier = open_store(tmp_path)
    assert store.block_tokens == 16 and store.sections == LAYOUT.sections
    assert isinstance(store, Store) and "deepinfer:store_fetched_blocks_total" in store.metrics().text()
    store.close()
