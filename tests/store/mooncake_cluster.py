"""A stand-in for the cluster of a Mooncake store, with the calls of its client."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer.runtime.store.mooncake import CONFIG, MODULE


class Cluster:
    """Stand-in for ``mooncake.store.MooncakeDistributedStore``: objects by name, moved through registered memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.memory: list[tuple[int, int]] = []
        self.answers, self.raises = True, False
        self.told: tuple[object, ...] = ()

    def setup(self, local_hostname: str, metadata_server: str, global_segment_size: int, local_buffer_size: int,
              protocol: str, rdma_devices: str, master_server_addr: str) -> int:
        if not isinstance(local_hostname, str):
            raise TypeError("setup(): incompatible function arguments.\n  1. (local_hostname: str, ...)")
        self.told = local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices
        return 0 if self.answers and master_server_addr == "master:50051" else -1

    def _lives(self) -> None:
        if self.raises:
            raise RuntimeError("connection lost")

    def _inside(self, pointer: int, size: int) -> None:
        assert any(start <= pointer and pointer + size <= start + length for start, length in self.memory)

    def register_buffer(self, pointer: int, size: int) -> int:
        self.memory.append((pointer, size))
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        self.memory = [m for m in self.memory if m[0] != pointer]
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._lives()
        return [int(key in self.objects) for key in keys] if self.answers else [-1] * len(keys)

    def put_from(self, key: str, pointer: int, size: int) -> int:
        self._lives()
        self._inside(pointer, size)
        if not self.answers:
            return -1
        self.objects.setdefault(key, ctypes.string_at(pointer, size))
        return 0

    def get_into(self, key: str, pointer: int, size: int) -> int:
        self._lives()
        self._inside(pointer, size)
        if key not in self.objects or not self.answers:
            return -1
        data = self.objects[key][:size]
        ctypes.memmove(pointer, data, len(data))
        return len(data)

    def remove(self, key: str) -> int:
        return 0 if self.objects.pop(key, None) is not None else -1


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that the environment names, and whose client can be imported."""
    cluster, module, config = Cluster(), ModuleType(MODULE), folder / "mooncake.json"
    module.MooncakeDistributedStore = lambda: cluster  # type: ignore[attr-defined]
    config.write_text(json.dumps({"local_hostname": "me", "metadata_server": "P2PHANDSHAKE", "protocol": "rdma",
                                  "master_server_address": "master:50051"}))
    monkeypatch.setitem(sys.modules, MODULE.partition(".")[0], ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setenv(CONFIG, str(config))
    return cluster
