"""The training loop: phases one after the other, in legs that end on a clock and resume from a saved state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batches
from .draft import DraftHead, draft_loss
from .layers import Experts, Mode, enable_compile
from .model import Backbone
from .optimizer import make_optimizers, set_rate
from .schedule import Phase
from .shape import Shape

BALANCE_RATE = 1e-3
LOG_EVERY = 50
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
        if self.is_gpu:
            torch.backends.cuda.matmul.allow_tf32 = True
            enable_compile(True)

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
        self.batches.generator.set_state(state["generator"].cpu())
        if state["optimizers"] and self.progress.phase < len(self.plan):
            self._start_phase()
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    # Steps ------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.plan[self.progress.phase]

    def _start_phase(self) -> None:
        """Optimisers of the part that the phase trains: they live on from phase to phase of the backbone."""
        is_draft = self.phase.anchors > 0
        self.backbone.requires_grad_(not is_draft).train(not is_draft)
        self.draft.requires_grad_(is_draft).train(is_draft)
        self.optimizers = make_optimizers(self.draft if is_draft else self.backbone, self.phase.first_rate)

    def mode(self) -> Mode:
        phase = self.phase
        return Mode(
            dtype=torch.bfloat16 if self.is_gpu else torch.float32,
            quantised=phase.quantised,
            sparse=phase.sparse,
            draw_index_rows=0 if phase.anchors else phase.index_rows,
            kernel="flex" if self.is_gpu else "dense",
        )

    def _backbone_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        phase, mode = self.phase, self.mode()
        ids, targets = self.batches.draw(phase.batch, phase.length)
        segments = self.batches.segments(phase.batch, phase.length, phase.replay)
        out = self.backbone(ids, mode, segments)
        loss = self.backbone.loss(out.hidden, targets, mode).mean()
        index = torch.stack(out.index_losses).mean()
        return loss + index, {"loss": loss.detach(), "index": index.detach()}

    def _draft_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        phase, mode = self.phase, self.mode()
        ids, _ = self.batches.draw(phase.batch, phase.length)
        block = self.draft.shape.dspark_block_size
        anchors = self.batches.anchors(phase.batch, phase.length, phase.anchors, block)
        loss = draft_loss(self.draft, self.backbone, ids, anchors, mode)
        parts = {"cross_entropy": loss.cross_entropy, "overlap": loss.overlap, "confidence": loss.confidence}
        return loss.total, {name: value.detach() for name, value in parts.items()}

    def step(self) -> dict[str, Tensor]:
        """One optimiser step; returns what to log, still on the device."""
        phase = self.phase
        set_rate(self.optimizers, phase.rate(self.progress.step))
        total, parts = self._draft_loss() if phase.anchors else self._backbone_loss()
        total.backward()
        learner: nn.Module = self.draft if phase.anchors else self.backbone
        parts["norm"] = nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for module in learner.modules():
            if isinstance(module, Experts):
                module.balance(BALANCE_RATE)
        self.progress.step += 1
        self.progress.tokens += phase.batch * phase.length
        return parts

    def run(self, log: Path, seconds: float) -> bool:
        """Train until the plan is done (True) or ``seconds`` have passed (False); appends one JSON line a log step."""
        begin = time.monotonic()
        before = self.progress.seconds
        with log.open("a", encoding="utf-8") as file:
            while self.progress.phase < len(self.plan):
                if not self.optimizers:
                    self._start_phase()
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
