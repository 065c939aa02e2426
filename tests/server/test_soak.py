"""A slice of the soak: see `soak.py` for the whole of it."""

from __future__ import annotations

from server.running import Running
from server.soak import soak

BUDGET_SECONDS, CLIENTS = 4.0, 4


def test_many_clients_leave_nothing_behind(server: Running) -> None:
    found = soak(server, BUDGET_SECONDS, CLIENTS)
    assert not found.wrong, found.wrong[:3]
    assert sum(found.answers.values()) >= CLIENTS and found.free_blocks[0] == found.free_blocks[1]
    assert len(set(found.hits.values())) == 1 and found.hits["chat"] > 0 and 0 < found.hit_share < 1
    assert all(after <= before for before, after in found.descriptors.values())
