"""The middle of the compiler: traced program -> plan, one pass after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.backends.base import Backend
from deepinfer.codegen.dump import PassLog, PassTime, plan_texts, printed, regions_text
from deepinfer.codegen.passes.fetch import add_fetches
from deepinfer.codegen.passes.fuse import Region, fuse
from deepinfer.codegen.passes.narrow import Narrowing, narrow_model
from deepinfer.codegen.passes.numerics import drop_rounding
from deepinfer.codegen.passes.sampling import ENTRY as SAMPLE
from deepinfer.codegen.passes.sampling import sampling, without_draws
from deepinfer.codegen.plan.checks import check_table
from deepinfer.codegen.plan.sequence_state import SequenceState
from deepinfer.codegen.plan.table import Lowered, build_table
from deepinfer.dsl.graph import Graph
from deepinfer.dsl.model import Model, Program, trace
from deepinfer.dsl.printer import print_graph
from deepinfer.dsl.verifier import verify
from deepinfer.errors import PlanError

# Logits of a step stay in the arena; as many rows as fit here may be asked for at once.
_LOGITS_BYTES = 64 << 20


@dataclass
class Plan:
    """What ``lower`` returns: graphs after the last pass, regions, launch table with sources, and how it came about."""

    model: Model
    target: str
    graphs: dict[str, Graph]
    narrowing: dict[str, Narrowing]
    regions: dict[str, list[Region]]
    lowered: Lowered
    passes: list[PassTime] = field(default_factory=list)


def row_limits(model: Model) -> dict[str, int]:
    """Most rows of each axis of a step, from the options; raises PlanError when they contradict each other."""
    opt, verify_rows = model.options, model.draft_tokens + 1
    least = opt.max_num_seqs * verify_rows
    if opt.max_num_batched_tokens < least:
        raise PlanError("max_num_batched_tokens is too small for one verify of every sequence",
                        found=opt.max_num_batched_tokens, allowed=f">= max_num_seqs x {verify_rows} = {least}",
                        next_step="raise max_num_batched_tokens or lower max_num_seqs")
    if opt.max_model_len > model.max_positions:
        raise PlanError("max_model_len exceeds the positions of the model", found=opt.max_model_len,
                        allowed=f"<= {model.max_positions}", next_step="lower max_model_len")
    fitting = _LOGITS_BYTES // (4 * model.vocab_size)
    wanted = min(opt.max_num_batched_tokens, max(least, fitting))
    return {"step": opt.max_num_batched_tokens, "kept": opt.max_num_batched_tokens, "wanted": wanted,
            "seq": opt.max_num_seqs}


def lower(model: Model, backend: Backend, target: str, *, dump: Path | None = None,
          on_pass: Callable[[str], None] | None = None, workspace_bytes: int | None = None) -> Plan:
    """Trace, choose numerics, narrow rows, fuse and lay out: everything up to source text.

    ``dump``: folder for one numbered text file a pass; ``workspace_bytes``: see ``plan/row_loops.py``, None: as the
    target's capabilities say. Raises SpecError, PlanError.
    """
    log = PassLog(dump, on_pass)
    with log.run("trace") as text:
        program: Program = trace(model)
        graphs = program.graphs
        text += printed(graphs) if dump else [f"{sum(map(len, graphs.values()))} nodes"]
    if model.options.profile == "wide":
        with log.run("drop-rounding") as text:
            graphs = {k: drop_rounding(g) for k, g in graphs.items()}
            text += printed(graphs) if dump else [f"{sum(map(len, graphs.values()))} nodes"]
    with log.run("narrow-rows") as text:
        narrowed = {k: narrow_model(model, g) for k, g in graphs.items()}
        graphs, narrowing = {k: g for k, (g, _) in narrowed.items()}, {k: n for k, (_, n) in narrowed.items()}
        text.append(f"{narrowing['step'].step_share:.1%} of the matmul work runs for every new row")
        text += [n.table() for n in narrowing.values()]
        for g in graphs.values():
            verify(g)
        if dump:
            text += [print_graph(g) for g in graphs.values()]
    caps = backend.capabilities(target)
    if not caps.draws:
        graphs = {k: without_draws(g) for k, g in graphs.items()}
    elif (sample := sampling(graphs["step"])) is not None:
        graphs |= {SAMPLE: sample}
    if caps.fetches:
        graphs = {k: add_fetches(g, model.params.declared) for k, g in graphs.items()}
    with log.run("fuse") as text:
        regions = {k: fuse(g, caps) for k, g in graphs.items()}
        text.append(", ".join(f"{k} {len(r)} kernels" for k, r in regions.items()))
        text += [regions_text(r) for r in regions.values()] if dump else []
    with log.run("plan") as text:
        lowered = build_table(graphs, regions, model.params.declared, backend, limits=row_limits(model),
                              block_tokens=model.block_tokens, lookback=model.lookback_tokens,
                              workspace_bytes=caps.workspace_bytes if workspace_bytes is None else workspace_bytes)
        lowered.table.positions = model.options.max_model_len + model.draft_tokens
        if SAMPLE in graphs:
            drafts = model.draft_tokens if "draft" in graphs else 0
            lowered.table.sequence = SequenceState(model.vocab_size, drafts, model.draft_filler,
                                                           model.lookback_tokens)
        check_table(lowered.table, lowered.specs)
        text.append(f"{len(lowered.specs)} distinct kernels")
        text += plan_texts(lowered) if dump else []
    return Plan(model, target, graphs, narrowing, regions, lowered, log.times)

