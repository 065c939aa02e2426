"""The training loop: phases one after the other, in legs that end on a clock and resume from a saved state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint
from .batches import Batches
from .draft import DraftHead, draft_loss
from .layers import Experts, Mode, enable_compile
from .model import Backbone, Output
from .optimizer import make_optimizers, set_rate
from .pool import Pool, make_pool
from .schedule import Phase
from .shape import Shape

BALANCE_RATE = 1e-3
LOG_EVERY = 50
PLAIN_STEPS = 3
SEED = 20261130


@dataclass
class Progress:
    """Where a run stands: the phase, the step in it, tokens seen and seconds spent over all legs."""

    phase: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Model, optimisers and position in the plan; ``folder`` holds the token files."""

    def __init__(self, shape: Shape, classes: Tensor, folder: Path, plan: Sequence[Phase], device: torch.device):
        torch.manual_seed(SEED)
        self.device, self.plan = device, plan
        self.backbone = Backbone(shape, classes).to(device)
        self.draft = DraftHead(shape).to(device)
        self.batches = Batches(folder, device, SEED)
        self.progress = Progress()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.is_gpu = device.type == "cuda"
        self.target: Backbone | None = None  # what the draft head learns to guess
        self.pool: Pool | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._plain_steps = 0
        if self.is_gpu:
            torch.backends.cuda.matmul.allow_tf32 = True

    # State ------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Everything that a later leg needs; written aside and renamed, so that a stop never leaves half a file."""
        state = {
            "backbone": self.backbone.state_dict(),
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
            "generator": self.batches.generator.get_state(),
        }
        aside = path.with_suffix(".new")
        torch.save(state, aside)
        os.replace(aside, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.backbone.load_state_dict(state["backbone"])
        self.draft.load_state_dict(state["draft"])
        self.progress = Progress(**state["progress"])
        if self.progress.phase < len(self.plan):  # a finished model may be read on another device
            self.batches.generator.set_state(state["generator"].cpu())
        if state["optimizers"] and self.progress.phase < len(self.plan):
            self._start_phase()
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def begin_from(self, folder: Path) -> None:
        """Take the first weights from a checkpoint in the official format instead of random ones."""
        backbone, draft = checkpoint.read(folder, self.backbone.shape, self.backbone.classes)
        self.backbone.load_state_dict(backbone.state_dict())
        self.draft.load_state_dict(draft.state_dict())

    # Steps ------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.plan[self.progress.phase]

    def _start_phase(self) -> None:
        """Optimisers of the part that the phase trains: they live on from phase to phase of the backbone."""
        is_draft = self.phase.anchors > 0
        enable_compile(self.is_gpu and not is_draft)  # few rows a draft: compiling would take longer than it saves
        self.backbone.train(not is_draft)
        self.draft.train(is_draft)
        self.optimizers = make_optimizers(self.draft if is_draft else self.backbone, self.phase.first_rate)

    def _prepare_target(self) -> None:
        """Freeze the backbone and let it write; the same in every leg, so that the state need not hold it."""
        self.target = checkpoint.frozen(self.backbone)
        mode = replace(self.mode(), frozen=True, kernel="dense")
        writer = self.batches.fork(SEED + 1)
        begin = time.monotonic()
        self.pool = make_pool(self.target, writer, self.phase.pool, self.phase.length, mode)
        print(f"pool sequences={self.phase.pool} seconds={time.monotonic() - begin:.1f}", flush=True)

    def mode(self) -> Mode:
        phase = self.phase
        return Mode(
            dtype=torch.bfloat16 if self.is_gpu else torch.float32,
            quantised=phase.quantised,
            sparse=phase.sparse,
            kernel="flex" if self.is_gpu else "dense",
        )

    def _draw(self) -> dict[str, Tensor]:
        """The random inputs of one step."""
        phase = self.phase
        if phase.anchors:
            assert self.pool is not None
            block = self.draft.shape.dspark_block_size
            drawn = self.pool.pick(self.batches.members(phase.pool, phase.batch))
            drawn["anchors"] = self.batches.anchors(phase.batch, phase.length, phase.anchors, block)
            return drawn
        ids, targets = self.batches.draw(phase.batch, phase.length)
        drawn = {"ids": ids, "targets": targets, "rows": self.batches.rows(phase.length, phase.index_rows)}
        if phase.replay:
            drawn["segments"] = self.batches.segments(phase.batch, phase.length, phase.replay)
        return drawn

    def _loss(self, drawn: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mode = self.mode()
        if self.phase.anchors:
            assert self.target is not None
            out = Output(drawn["hidden"], drawn["features"], [])
            draft = draft_loss(self.draft, self.target, out, drawn["ids"], drawn["anchors"], mode)
            parts = {"cross_entropy": draft.cross_entropy, "overlap": draft.overlap, "confidence": draft.confidence}
            return draft.total, {name: value.detach() for name, value in parts.items()}
        out = self.backbone(drawn["ids"], mode, drawn.get("segments"), drawn["rows"])
        loss = self.backbone.loss(out.hidden, drawn["targets"], mode).mean()
        index = torch.stack(out.index_losses).mean()
        return loss + index, {"loss": loss.detach(), "index": index.detach()}

    def _update(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Forward, backward and the optimisers' step, without a read of the device: a graph can hold it."""
        learner: nn.Module = self.draft if self.phase.anchors else self.backbone
        total, parts = self._loss(drawn)
        total.backward()
        parts["norm"] = nn.utils.clip_grad_norm_(learner.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for module in learner.modules():
            if isinstance(module, Experts):
                module.balance(BALANCE_RATE)
        return parts

    def step(self) -> dict[str, Tensor]:
        """One optimiser step; returns what to log, still on the device.

        Launching a step's kernels one by one takes several times as long as running them, so on a GPU a phase's
        steps are captured as a graph after a few plain ones.
        """
        set_rate(self.optimizers, self.phase.rate(self.progress.step))
        drawn = self._draw()
        if not self.is_gpu:
            parts = self._update(drawn)
        elif self._plain_steps < PLAIN_STEPS:
            parts = self._plain_step(drawn)
        else:
            parts = self._replay(drawn)
        self.progress.step += 1
        self.progress.tokens += self.phase.batch * self.phase.length
        return parts

    def _plain_step(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        self._plain_steps += 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            parts = self._update(drawn)
        torch.cuda.current_stream().wait_stream(side)
        return parts

    def _replay(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            self._inputs = {name: value.clone() for name, value in drawn.items()}
            with torch.cuda.graph(graph):
                self._outputs = self._update(self._inputs)
            self._graph = graph
        for name, value in drawn.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        return self._outputs

    def _forget_graph(self) -> None:
        self._graph, self._inputs, self._outputs, self._plain_steps = None, {}, {}, 0

    def run(self, log: Path, seconds: float) -> bool:
        """Train until the plan is done (True) or ``seconds`` have passed (False); appends one JSON line a log step."""
        begin = time.monotonic()
        before = self.progress.seconds
        with log.open("a", encoding="utf-8") as file:
            while self.progress.phase < len(self.plan):
                if not self.optimizers:
                    self._start_phase()
                if self.phase.anchors and self.pool is None:
                    self._prepare_target()
                while self.progress.step < self.phase.steps:
                    parts = self.step()
                    is_last = self.progress.step == self.phase.steps
                    if self.progress.step % LOG_EVERY == 0 or is_last or self.progress.step == 1:
                        self.progress.seconds = before + time.monotonic() - begin
                        self._report(parts, file)
                    if time.monotonic() - begin > seconds:
                        self.progress.seconds = before + time.monotonic() - begin
                        return False
                self._end_phase()
        return True

    def _end_phase(self) -> None:
        was_draft = self.phase.anchors > 0
        self._forget_graph()
        self.progress.phase += 1
        self.progress.step = 0
        if self.progress.phase < len(self.plan) and (self.phase.anchors > 0) != was_draft:
            self.optimizers = []

    def _report(self, parts: dict[str, Tensor], file: Any) -> None:
        progress, phase = self.progress, self.phase
        line = {
            "phase": phase.name,
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
            "rate": round(phase.rate(progress.step - 1), 6),
            **{name: round(float(value), 4) for name, value in parts.items()},
        }
        file.write(json.dumps(line) + "\n")
        file.flush()
        shown = " ".join(f"{key}={value}" for key, value in line.items())
        print(f"step {shown} of={phase.steps}", flush=True)
