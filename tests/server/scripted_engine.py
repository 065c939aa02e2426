
"""An engine whose model reads its answer from the prompt: `say:NAME` in the user's text picks a script.

Run as a program it is an engine process, with the project's own loop, scheduler and sampling around this engine.
Some scripts also misbehave: they wait for a file to vanish, end the process, or give numbers that are none.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
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
HELD_SUFFIX, START_SUFFIX = ".held", ".start"  # beside it: a held step has begun; while it is there no engine starts
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
REMEMBERED = 64  # prompts, of which a forked or restarted sequence may go on


@dataclass(frozen=True)
class Script:
    """What is said behind a prompt."""

    name: str
    prompt: list[int]
    answer: list[int]


class ScriptedEngine:
    """Fulfils `runtime.backend.Engine`. Its cache entries are the ids themselves, so a row reads what the blocks hold,
    whoever computed it: an adopted block of another conversation gives another answer."""

    def __init__(self, plan: EnginePlan, slots: int, blocks: int, checkpoint: Path) -> None:
        self.checkpoint: Path | None = checkpoint
        self._tokenizer = RecipeTokenizer.from_file(checkpoint)
        self._states: dict[str, NDArray[np.uint8]] = {
            s.name: np.zeros((max(slots, blocks), s.rows, s.record_bytes), np.uint8) for s in plan.states}
        self._entries = self._states["entries"].view(np.int64)[..., 0]  # [blocks, BLOCK]
        self._running: dict[int, tuple[int, Script]] = {}  # by slot: the next position, and what is being said
        self._said: deque[Script] = deque(maxlen=REMEMBERED)

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._states[name][unit]
        return found

    def close(self) -> None:
        pass

    def run(self, entry: str, batch: Batch, pins: Mapping[str, NDArray[np.int32]] | None = None) -> dict[str, Any]:
        rows, logits = 0, []
        for s in batch.sequences[: batch.count]:
            slot, first, count, floor = (int(s[name]) for name in ("slot", "c", "rows", "floor"))
            table = np.ctypeslib.as_array((ctypes.c_int32 * int(s["num_blocks"])).from_address(int(s["blocks"])))
            given = batch.token_ids[rows : rows + count]
            for at, token in enumerate(given.tolist(), first):
                if at >= floor:
                    self._entries[table[at // BLOCK], at % BLOCK] = token
            ids = self._entries[table[: -(-(first + count) // BLOCK)]].reshape(-1)[: first + count]
            assert (ids[first:] == given).all(), "the cache holds other ids than the row brings"
            rows += count
            if s["wanted"]:
                logits.append(self._logits(slot, first, ids.tolist(), int(s["wanted"])))
        shape = (0, VOCABULARY)
        return {"logits": np.concatenate(logits) if logits else np.zeros(shape, np.float32)}

    def _logits(self, slot: int, first: int, ids: list[int], wanted: int) -> NDArray[np.float32]:
        out = np.zeros((wanted, VOCABULARY), np.float32)
        expected, script = self._running.get(slot, (-1, None))
        # a chunk of another prompt may begin just where the sequence before it in this slot was given up
        if script is None or expected != first or ids[: len(script.prompt)] != script.prompt:
            script = self._script(ids)
        self._running[slot] = len(ids), script
        place = len(ids) - len(script.prompt)
        self._misbehave(script.name, place, out)
        out[-1, script.answer[min(place, len(script.answer) - 1)]] = PEAK
        for row in range(wanted - 1):  # prompt rows: the token that follows is the likely one
            out[row, ids[len(ids) - wanted + row + 1]] = PEAK / 2
        return out

    def _script(self, ids: list[int]) -> Script:
        """Of a prompt; or of one whose answer another slot has begun."""
        for known in self._said:
            said = ids[len(known.prompt):]
            if said and known.answer[: len(said)] == said and ids[: len(known.prompt)] == known.prompt:
                return known
        named = re.findall(r"say:(\w+)", self._tokenizer.decode(ids))
        name = named[-1] if named else "hello"
        reasoning, content = SCRIPTS[name]
        thinks = ids[-1] == self._tokenizer.special_id("<think>")
        text = (reasoning + THINK_END if thinks else "") + content + END
        answer: list[int] = []
        for piece in re.split(f"({THINK_END}|{DSML}|{END})", text):
            special = piece in (THINK_END, DSML, END)
            answer += [self._tokenizer.special_id(piece)] if special else self._tokenizer.encode(piece)
        self._said.append(Script(name, ids, answer))
        return self._said[-1]

    def _misbehave(self, name: str, place: int, out: NDArray[np.float32]) -> None:
        time.sleep(SLOW_SECONDS.get(name, 0))
        if name == "dies" and place == 2:
            os.abort()
        if name == "nan" and place == 2:
            out[:] = np.nan
        hold = os.environ.get(HOLD_VARIABLE, "")
        while name == "held" and place == 1 and hold and Path(hold).exists():
            Path(hold).with_suffix(HELD_SUFFIX).touch()
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
              placement: Any = None, progress: bool = True) -> ScriptedEngine:
        assert checkpoint is not None
        return ScriptedEngine(self.plan, slots, blocks, Path(checkpoint))


def build(settings: EngineSettings) -> LLM:
    hold = os.environ.get(HOLD_VARIABLE, "")
    while hold and Path(hold).with_suffix(START_SUFFIX).exists():
        time.sleep(0.01)
    return LLM(ScriptedPackage(), settings.checkpoint, max_num_seqs=settings.max_num_seqs, progress=False)


if __name__ == "__main__":
    main(build)
