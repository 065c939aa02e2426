"""The keys of blocks: what two blocks with one key have in common."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.runtime.prefix.chain import BlockChain, chain_keys, digest, root_key

SALT = root_key(b"weights", b"numerics", b"plan")
IDS = np.random.default_rng(1).integers(0, 129_280, 1000)


def as_bytes(keys: np.ndarray) -> list[bytes]:
    return [key.tobytes() for key in keys]


def test_a_key_depends_on_every_id_before_the_end_of_its_block_and_on_none_after() -> None:
    base = as_bytes(chain_keys(SALT, IDS, 128))
    assert len(base) == 7 and len(set(base)) == 7
    for changed in (0, 127, 128, 500, 895):
        ids = IDS.copy()
        ids[changed] += 1
        other = as_bytes(chain_keys(SALT, ids, 128))
        assert [a == b for a, b in zip(base, other, strict=True)] == [b < changed // 128 for b in range(7)]
    assert as_bytes(chain_keys(SALT, IDS[:895], 128)) == base[:6]


@pytest.mark.parametrize("part", range(4))
def test_weights_numerics_plan_and_salt_each_give_other_keys(part: int) -> None:
    parts = [b"weights", b"numerics", b"plan", b""]
    parts[part] += b"x"
    assert root_key(*parts) != SALT
    assert chain_keys(root_key(*parts), IDS, 128)[0] != chain_keys(SALT, IDS, 128)[0]


def test_digests_of_parts_that_run_together_differ() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc") != digest(b"abc")


def test_keys_are_the_same_for_every_width_of_ids() -> None:
    expected = as_bytes(chain_keys(SALT, IDS.astype(np.int32), 16))
    assert as_bytes(chain_keys(SALT, IDS.astype(np.int64), 16)) == expected
    assert as_bytes(chain_keys(SALT, np.repeat(IDS, 2)[::2], 16)) == expected


def test_the_known_key_of_a_known_block() -> None:
    """The format on disk: another value here orphans every store there is."""
    keys = chain_keys(bytes(16), np.arange(8), 4, extra={1: bytes(16)})
    assert [k.tobytes().hex() for k in keys] == ["361d40d624bc45847cb55c04878d9596", "21d422762f6d9f82dc2d219e25e97938"]


def test_a_growing_chain_has_the_keys_of_the_whole_sequence() -> None:
    extra = {0: b"i" * 16, 5: b"j" * 16}
    whole = as_bytes(chain_keys(SALT, IDS, 64, extra=extra))
    chain, new = BlockChain(SALT, 64), 0
    for stop in (1, 63, 64, 65, 200, 200, 999, 1000):
        new += chain.extend(IDS[:stop], extra)
        assert as_bytes(chain.array()) == whole[: stop // 64]
    assert new == len(chain) == 15 and chain.parent(0) == SALT and chain.parent(3) == whole[2]
    fork = chain.fork()
    chain.truncate(4)
    other = IDS.copy()
    other[300] += 1
    chain.extend(other, extra)
    assert as_bytes(chain.array())[:4] == whole[:4] and chain[4] != whole[4]
    assert as_bytes(fork.array(2, 6)) == whole[2:6]
