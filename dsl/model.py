"""A described model, the options that change its text, and ``trace``: description -> graphs."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from deepinfer.dsl.build import tracing
from deepinfer.dsl.config import Config
from deepinfer.dsl.graph import Graph
from deepinfer.dsl.params import Params, StoredTensor
from deepinfer.dsl.state import States
from deepinfer.errors import SpecError


@dataclass(frozen=True)
class EngineOptions:
    """Choices made at compile time. All of them change numerics or layout, so all of them enter every hash.

    ``replay``: rows that the licensed part of a prompt keeps by default, ``off`` (all) | ``exact`` (the derived halo)
    | a number of rows. ``host_lag``: steps the host may lag behind the device (0: plain loop). ``ring_slack``
    overrides the derived slack of window rings. ``layers``: how many of the model's first layers the engine has; None:
    all.
    """

    profile: str = "bf16"
    cache_format: str = "spec"
    act_format: str = "spec"
    wo_a_input: str = "reference"
    replay: str = "off"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    host_lag: int = 0
    ring_slack: int | None = None
    layers: int | None = None

    ALLOWED: ClassVar[dict[str, tuple[str, ...]]] = {
        "profile": ("bf16", "wide"), "cache_format": ("spec", "f32"), "act_format": ("spec", "f32"),
               "wo_a_input": ("reference", "production")}

    def __post_init__(self) -> None:
        for key, allowed in self.ALLOWED.items():
            if getattr(self, key) not in allowed:
                raise SpecError(f"option {key} has a bad value", found=getattr(self, key), allowed=", ".join(allowed))
        if self.replay not in ("off", "exact") and not self.replay.isdigit():
            raise SpecError("option replay has a bad value", found=self.replay,
                            allowed="off, exact or a number of rows")
        for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, key) < 1:
                raise SpecError(f"option {key} must be at least 1", found=getattr(self, key))
        if self.layers is not None and self.layers < 1:
            raise SpecError("option layers must be at least 1", found=self.layers)
        if self.host_lag not in (0, 1):
            raise SpecError("option host_lag has a bad value", found=self.host_lag, allowed="0, 1")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ignored:
    """Checkpoint tensors (glob on the name) that the engine does not use, and why.

    ``tensors``: those of them that the official checkpoint holds, for totals and for made checkpoints.
    """

    pattern: str
    reason: str
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass
class Model:
    """What ``model_specs/<x>.build(cfg, options)`` returns.

    ``entries``: ``step`` (always), ``draft``, ``sample``: functions without arguments that build a graph by calling the
    DSL. ``draft_tokens``: tokens a draft proposes (m; 0 without a draft head);
    ``draft_filler``: token id of the block's rows after the anchor. ``replay``: ``trained`` (the spec's
    licence may be used) or ``exact_only``. ``block_tokens``: unit of the prefix cache. ``lookback_tokens``: ids
    before a
    row that it reads. ``derive``: name -> function(checkpoint folder) that makes a derived parameter at load time.
    ``hub_ids``: default checkpoints, the first is the default.
    """

    name: str
    config: Config
    options: EngineOptions
    states: States
    params: Params
    entries: Mapping[str, Callable[[], None]]
    vocab_size: int
    max_positions: int
    window: int
    block_tokens: int = 128
    draft_tokens: int = 0
    draft_filler: int = 0
    lookback_tokens: int = 0
    replay: str = "exact_only"
    ignored: tuple[Ignored, ...] = ()
    derive: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    hub_ids: tuple[str, ...] = ()
    spec: str = ""

    def fingerprint(self) -> str:
        """Canonical text of config and options, for hashes."""
        return json.dumps([self.config.raw, self.options.as_dict()], sort_keys=True, default=str)


@dataclass
class Program:
    """A traced model: one verified graph per entry."""

    model: Model
    graphs: dict[str, Graph]


BuildFunction = Callable[..., Model]


def trace(model: Model) -> Program:
    """Run each entry of the model once and verify the graphs it made.

    Raises SpecError naming spec file and line, op and the types found; also when the config holds a key that the spec
    neither read nor ignored.
    """
    from deepinfer.dsl.verifier import verify

    graphs: dict[str, Graph] = {}
    for name, entry in model.entries.items():
        with tracing(name) as b:
            entry()
        verify(b.graph)
        graphs[name] = b.graph
    model.config.finish()
    return Program(model, graphs)


def expected_tensors(model: Model) -> dict[str, StoredTensor]:
    """Every checkpoint tensor the traced model reads, scales included, as the official format stores it."""
    out: dict[str, StoredTensor] = {}
    for p in model.params.declared.values():
        if p.derive:
            continue
        out.update(dict.fromkeys(p.names, p.stored()))
        out.update(dict.fromkeys(p.scale_names, p.stored_scale() if p.scale_names else p.stored()))
    return out
