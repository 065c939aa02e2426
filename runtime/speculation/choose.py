"""The draft policy of an engine that starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.codegen.cache import cache_root
from deepinfer.runtime.backend import Engine
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.records import machine_identity
from deepinfer.runtime.speculation.cost import CostRecord, kept_curve
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts
from deepinfer.runtime.speculation.measure import measure_costs
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts


def draft_policy(plan: EnginePlan, engine: Engine, manifest: Mapping[str, Any], *, slots: int, blocks: int, limit: int,
                 threads: int | None, scheduled: bool) -> DraftPolicy:
    """Scheduled verification of up to ``limit`` drafts a sequence, or as many in every step.

    The first start of an engine on a machine measures its costs, which takes some seconds at most; later ones find
    them in the cache folder, as steps corrected them, and how many drafts stayed. ``manifest``: of the compiled engine;
    without a digest nothing is kept.
    """
    if not scheduled or limit == 0:
        return FixedDrafts(limit)
    digest = manifest.get("digest")
    identity = {"engine": str(digest), "machine": machine_identity(), "threads": str(threads), "slots": str(slots)}
    record = CostRecord(cache_root() / "costs" if digest else None, identity)
    curve = kept_curve(record, lambda: measure_costs(plan, engine, SequenceMemory(plan, engine, slots, blocks)))
    policy = ScheduledDrafts(curve, slots, plan.draft_tokens, limit,
                             keep=lambda curve, worth: record.write(curve, worth.record()))
    policy.worth.recall(record.read()[1])
    return policy
