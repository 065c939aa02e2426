"""The key of a cache block: one definition for the memory tier and for the store.

``key[b] = xxh3_128(key[b - 1] | ids of block b as little-endian int32 | digest of what else the block holds)`` and
``key[-1] = root_key(...)``: two blocks have one key iff everything before and in them is the same. xxh3 is fast and
not collision-resistant, so whoever adopts a block compares its ids as well; the root is a cryptographic digest, so
that nobody finds the keys of a tenant whose salt they do not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

KEY_BYTES = 16
KEYS = np.dtype("V16")  # a key in an array
Ids = NDArray[np.integer[Any]]

_ID = np.dtype("<i4")


def digest(*parts: bytes) -> bytes:
    """16 bytes of blake2b over the parts with their lengths: no two lists of parts run into each other."""
    state = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def root_key(weights: bytes, numerics: bytes, cache_plan: bytes, tenant_salt: bytes = b"") -> bytes:
    """[16] what the first block's key hangs on: whatever changes a cached byte, and the tenant's secret.

    Batch limits, tuning and compiler versions change no cached byte and do not belong here.
    """
    return digest(b"prefix root", weights, numerics, cache_plan, tenant_salt)


def chain_keys(salt: bytes, ids: Ids, block: int, parent: bytes | None = None,
               extra: Mapping[int, bytes] | None = None) -> NDArray[np.void]:
    """Keys of all full blocks of ``ids``.

    Args:
        salt: ``root_key``, the parent of block 0.
        ids: [t] token ids below 2^31; a tail shorter than a block has no key.
        block: positions of a block (B).
        parent: key of the block before ``ids[0]`` where these continue a longer sequence; else the salt.
        extra: digest of images by index of the block among these.

    Returns: V16 [t // B].
    """
    return np.frombuffer(b"".join(_keys(salt if parent is None else parent, ids, block, extra or {})), dtype=KEYS)


def _keys(key: bytes, ids: Ids, block: int, extra: Mapping[int, bytes]) -> Iterator[bytes]:
    """Keys of the full blocks of ``ids`` behind ``key``; see ``chain_keys``."""
    width, hashed = block * _ID.itemsize, xxhash.xxh3_128_digest
    data = np.ascontiguousarray(ids[: len(ids) // block * block], dtype=_ID).tobytes()
    for index, at in enumerate(range(0, len(data), width)):
        key = hashed(key + data[at : at + width] + extra.get(index, b""))
        yield key


class BlockChain:
    """The keys of a sequence that grows: each block is hashed once."""

    def __init__(self, salt: bytes, block: int) -> None:
        self.salt, self.block = salt, block
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> bytes:
        """[16] key of block ``index``; -1 is the last one's."""
        return self._keys[index]

    def parent(self, index: int) -> bytes:
        """[16] key of the block before block ``index``, the salt for block 0."""
        return self._keys[index - 1] if index else self.salt

    def array(self, first: int = 0, stop: int | None = None) -> NDArray[np.void]:
        """V16 [stop - first] keys as an array."""
        return np.frombuffer(b"".join(self._keys[first:stop]), dtype=KEYS)

    def extend(self, ids: Ids, extra: Mapping[int, bytes] | None = None) -> int:
        """Hash the blocks of ``ids`` that are full and not hashed yet.

        Args:
            ids: [t] the whole sequence from position 0.
            extra: digest of images by index of the block in the sequence.

        Returns: blocks that are new.
        """
        done = len(self._keys)
        self.append(0, ids, extra)
        return len(self._keys) - done

    def append(self, first: int, ids: Ids, extra: Mapping[int, bytes] | None = None) -> None:
        """The same from a part of the sequence: ``ids`` begin with block ``first`` and reach as far as is wanted."""
        done = len(self._keys)
        if done < first:
            raise ValueError(f"{done} blocks are hashed and ids begin with block {first}")
        part = ids[(done - first) * self.block:]
        if len(part) >= self.block:
            later = {index - done: value for index, value in (extra or {}).items() if index >= done}
            self._keys += _keys(self.parent(done), part, self.block, later)

    def truncate(self, blocks: int) -> None:
        """Forget all but the first ``blocks`` keys: the sequence was cut."""
        del self._keys[blocks:]

    def fork(self) -> BlockChain:
        """A chain of its own with the same keys."""
        other = BlockChain(self.salt, self.block)
        other._keys = self._keys.copy()
        return other
