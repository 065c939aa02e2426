"""Window snapshots on disk: what a model without a licence for bounded replay needs to begin behind a hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled import checkpoint_of, engine_of
from cpu.test_prefix_engine import ids, params, told

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.store import StoreSettings
from deepinfer.runtime.store.layout import KIND_BLOCKS, KIND_WINDOWS
from deepinfer.runtime.store.segment import Superblock, read_superblock

CASE = "v4_mtp"


def start(place: Path | None = None, **options: Any) -> LLM:
    store = {} if place is None else {"prefix_store": StoreSettings(place / "store", index=place / "index")}
    engine = engine_of(CASE, profile="wide", max_num_seqs=2, max_num_batched_tokens=64, max_model_len=640)
    return LLM(engine, checkpoint_of(CASE), threads=1, progress=False, **store, **options)


def segments(place: Path) -> dict[str, tuple[Path, Superblock]]:
    """The segments of a folder by the kind of their records."""
    found = {}
    for path in (place / "store").rglob("*.seg"):
        block = read_superblock(path.read_bytes()[:4096])
        assert block is not None
        found[block.layout.kind] = path, block
    return found


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_windows_on_disk_serve_the_next_engine_and_damaged_ones_are_run_again(tmp_path: Path, damaged: bool) -> None:
    text = [i % 120 + 3 for i in ids(3, 400)]
    with start(prefix_cache=False) as llm:
        assert not llm.plan.licensed and llm.plan.resume_bytes
        expected = told(llm.generate([text], params("off"), progress=False)[0])
    with start(tmp_path) as llm:
        assert told(llm.generate([text], params("off"), progress=False)[0]) == expected
    found = segments(tmp_path)
    assert set(found) == {KIND_BLOCKS, KIND_WINDOWS}
    if damaged:
        path, block = found[KIND_WINDOWS]
        with path.open("r+b") as file:
            for slot in range(8):
                file.seek(block.offset(slot) + block.layout.offsets[0] + 100)
                file.write(b"rotten")
    with start(tmp_path) as llm:
        answer = llm.generate([text], params("off"), progress=False)[0]
        told_of = [line for line in llm.metrics.text().splitlines() if line.startswith("deepinfer:prefix_hits_total{")]
    assert told(answer) == expected and answer.num_cached_tokens > 0
    assert any('windows="snapshot"' in line for line in told_of) != damaged, told_of
