"""The store of chunks and plans."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from vlmpipe.trainer.data.prepare.chunks.store import ChunkStore

MIB = 1 << 20
PLAN_MIB = 48  # that of 10 million records


def test_a_large_plan_is_fetched_piece_by_piece(memory: Path) -> None:
    store, plan, fetched = ChunkStore(str(memory / "store")), memory / "plan", memory / "fetched"
    (plan / "tokenizer").mkdir(parents=True)
    (plan / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (plan / "where.parquet").write_bytes(bytes(PLAN_MIB * MIB))
    store.put("name", plan)
    tracemalloc.start()
    try:
        assert store.get("name", fetched)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < PLAN_MIB * MIB // 2
    assert (fetched / "where.parquet").read_bytes() == bytes(PLAN_MIB * MIB)
    assert (fetched / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    assert not store.get("other", fetched)
