
"""An engine whose model reads its answer from the prompt: `say:NAME` in the user's text picks a script.

Run as a program it is an engine process, with the project's own loop, scheduler and sampling around this engine.
Some scripts also misbehave: they wait for a file to vanish, end the process, or give numbers that are none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.recipe import RecipeTokenizer
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.plan import PAGED, EnginePlan, StatePlan
from deepinfer.runtime.server.engine_process import EngineSettings, main

HOLD_VARIABLE = "SCRIPTED_HOLD"  # a file; while it is there a held step does not end
VOCABULARY, SLOTS, BLOCK, LONGEST = 129_280, 4, 64, 2048
PEAK = 60.0  # of a logit, so that no draw at temperature 1 or 2 takes another token
THINK_END, DSML, END = "</think>", "｜DSML｜", "<｜end▁of▁sentence｜>"


def call(name: str, **arguments: str) -> str:
    """One call as the model writes it."""
    parameters = "".join(f'<{DSML} parameter name="{k}" string="true">{v}</{DSML} parameter>\n'
                         for k, v in arguments.items())
    return f'<{DSML} invoke name="{name}">\n{parameters}</{DSML} invoke>\n'


def calls(*inner: str) -> str:
    return f"\n\n<{DSML} calls>\n{''.join(inner)}</{DSML} calls>"


WEATHER = call("get_weather", city="Paris")
REASONING, HELLO = "The user greets me.", "Hello — grüß dich, 你好 👋!"
SCRIPTS = {
    "hello": (REASONING, HELLO),
    "weather": ("I need the weather.", "Let me look." + calls(WEATHER, call("get_weather", city='Zürich "West"'))),
    "inside": ("", f"{WEATHER}</{DSML} calls>"),  # the prompt has opened the block already
    "json": ("Some JSON.", '{"colour": "blue", "n": [1, 2]}'),
    "prose": ("Some prose.", "I would rather tell you a story."),
    "wrong": ("A call.", "Let me look." + calls(call("get_weather", town="Atlantis"))),
    "wrongs": ("", f"{call('get_weather', town='Atlantis')}</{DSML} calls>"),
    "stops": ("Count.", "one two three four five"),
    "held": ("", "before hold after"),
    "dies": ("", "some words and then nothing"),
    "nan": ("", "it breaks"),
    "long": ("", " word" * LONGEST),
    "quick": ("", " word" * LONGEST),
}
SLOW_SECONDS = {"long": 0.02}


class ScriptedEngine:
    """Fulfils `runtime.backend.Engine`; the ids of a sequence are kept by slot."""

    def __init__(self, plan: EnginePlan, slots: int, blocks: int, checkpoint: Path) -> None:
        self.checkpoint: Path | None = checkpoint
        self._tokenizer = RecipeTokenizer.from_file(checkpoint)
        self._states = {s.name: np.zeros((max(slots, blocks), s.rows, s.record_bytes), np.uint8) for s in plan.states}
        self._ids: dict[int, list[int]] = {}
        self._answers: dict[int, tuple[str, int, list[int]]] = {}

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return self._states[name][unit]

    def close(self) -> None:
        pass

    def run(self, entry: str, batch: Batch, pins: Mapping[str, NDArray[np.int32]] | None = None) -> dict[str, Any]:
        rows, logits = 0, []
        for s in batch.sequences[: batch.count]:
            slot, first, count = int(s["slot"]), int(s["c"]), int(s["rows"])
            ids = [] if first == 0 else self._ids[slot][:first]
            self._ids[slot] = ids + batch.token_ids[rows : rows + count].tolist()
            if first == 0:
                self._answers.pop(slot, None)
            rows += count
            if s["wanted"]:
                logits.append(self._logits(slot, int(s["wanted"])))
        shape = (0, VOCABULARY)
        return {"logits": np.concatenate(logits) if logits else np.zeros(shape, np.float32)}

    def _logits(self, slot: int, wanted: int) -> NDArray[np.float32]:
        ids, out = self._ids[slot], np.zeros((wanted, VOCABULARY), np.float32)
        if slot not in self._answers:
            self._answers[slot] = (*self._script(ids), )
        name, start, answer = self._answers[slot]
        place = len(ids) - start
        self._misbehave(name, place, out)
        out[-1, answer[min(place, len(answer) - 1)]] = PEAK
        for row in range(wanted - 1):  # prompt rows: the token that follows is the likely one
            out[row, ids[len(ids) - wanted + row + 1]] = PEAK / 2
        return out

    def _script(self, ids: list[int]) -> tuple[str, int, list[int]]:
        named = re.findall(r"say:(\w+)", self._tokenizer.decode(ids))
        name = named[-1] if named else "hello"
        reasoning, content = SCRIPTS[name]
        thinks = ids[-1] == self._tokenizer.special_id("<think>")
        text = (reasoning + THINK_END if thinks else "") + content + END
        answer: list[int] = []
        for piece in re.split(f"({THINK_END}|{DSML}|{END})", text):
            special = piece in (THINK_END, DSML, END)
            answer += [self._tokenizer.special_id(piece)] if special else self._tokenizer.encode(piece)
        return name, len(ids), answer

    def _misbehave(self, name: str, place: int, out: NDArray[np.float32]) -> None:
        time.sleep(SLOW_SECONDS.get(name, 0))
        if name == "dies" and place == 2:
            os.abort()
        if name == "nan" and place == 2:
            out[:] = np.nan
        hold = os.environ.get(HOLD_VARIABLE, "")
        while name == "held" and place == 1 and hold and Path(hold).exists():
            time.sleep(0.01)


class ScriptedPackage:
    """Fulfils `runtime.backend.Package`."""

    def __init__(self) -> None:
        states = (StatePlan("window", "ring", 8, 8, "T", reach=8), StatePlan("entries", PAGED, BLOCK, 8))
        self.plan = EnginePlan(
            model="scripted", target="cpu", vocab_size=VOCABULARY, max_model_len=LONGEST, max_num_seqs=SLOTS,
            limits={"step": 256, "kept": 256, "wanted": 64, "seq": SLOTS}, block_tokens=BLOCK, window=8,
            states=states, exact_keep=15, least_keep=8)

    def memory(self, slots: int, blocks: int) -> Any:
        return type("Need", (), {"total": (slots + blocks) * 1024})()

    def start(self, checkpoint: str | Path | None, *, slots: int, blocks: int, threads: int | None = None,
              progress: bool = True) -> ScriptedEngine:
        assert checkpoint is not None
        return ScriptedEngine(self.plan, slots, blocks, Path(checkpoint))


def build(settings: EngineSettings) -> LLM:
    return LLM(ScriptedPackage(), settings.checkpoint, max_num_seqs=settings.max_num_seqs, progress=False)


if __name__ == "__main__":
    main(build)
