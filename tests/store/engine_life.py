"""The scenario of scenario.py with the blocks of a compiled engine, and what the engine says after it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cpu.test_prefix_engine import by_log
from numpy.typing import NDArray
from store.recording import Fault, Op, Recording, materialise
from store.reopening import damage_index
from store.scenario import BLOCKS, Cast, Life, promised
from store.witness_store import NOW, Chain

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.store import Flags, Status, Store, StoreSettings, Ticket
from deepinfer.runtime.store.points import Point

AFTER = 2 * 3600.0  # store time that passes before the engine comes back: leases have run out
_TAIL = 20  # ids of a prompt behind its last full block
_ANSWER = 3
_STORE = "deepinfer.runtime.store.opening.Store"


class EngineChain(Chain):
    """The blocks that an engine computed for a prompt."""

    def __init__(self, layout: Any, prompt: list[int], keys: list[bytes], payloads: list[NDArray[np.uint8]],
                 root: bytes) -> None:
        self.layout, self.root, self.blocks, self.prompt = layout, root, len(keys), prompt
        self.ids = np.array(prompt[: len(keys) * layout.block_tokens])
        self.keys, self._payloads = np.frombuffer(b"".join(keys), dtype="V16"), payloads

    def payload(self, i: int, flags: Flags = Flags.NONE) -> NDArray[np.uint8]:
        return self._payloads[i]


class Blocks:
    """A store that an engine publishes to, kept in memory."""

    made: Blocks | None = None

    def __init__(self, settings: StoreSettings, layout: Any, **_: Any) -> None:
        self.store = Store(settings, layout)
        self.layout, self.found = layout, dict[bytes, tuple[bytes, NDArray[np.uint8]]]()
        Blocks.made = self

    def publish(self, key: bytes, parent: bytes, number: int, ids: Any, payload: Any, **given: Any) -> Ticket:
        self.found[key] = parent, np.concatenate([np.frombuffer(p, np.uint8) for p in payload])
        ticket = Ticket(1)
        ticket.end(0, Status.OK)
        return ticket

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Patient(Store):
    """A store that is opened at ``wall``, as the scenario's clock has it, and waits until it knows what it has."""

    wall = NOW

    def __init__(self, settings: StoreSettings, layout: Any, **given: Any) -> None:
        wall = Patient.wall
        super().__init__(settings, layout, wall=lambda: wall, monotonic=lambda: 1000.0, **given)
        self.ready(60)


class Trial:
    """``start(prefix_store)`` opens the engine; ``cold`` is one without a cache. ``place``: a folder to work in."""

    def __init__(self, start: Callable[[StoreSettings], LLM], cold: LLM, place: Path) -> None:
        self.start, self.cold, self.place = start, cold, place
        self._known: dict[Any, list[int]] = {}

    @cached_property
    def cast(self) -> Cast:
        """Prompts of random ids, and their blocks as the engine stores them."""
        plan, rng = self.cold.plan, np.random.default_rng(7)
        prompts = [rng.integers(3, plan.vocab_size - 3, b * plan.block_tokens + _TAIL).tolist() for b in BLOCKS]
        with patch(_STORE, Blocks), self.start(self._settings("blocks")) as llm:
            llm.generate(prompts, self._params(1), progress=False)
        made = Blocks.made
        assert made is not None
        chains = []
        for prompt, blocks in zip(prompts, BLOCKS, strict=True):
            ids, names = np.array(prompt[: blocks * plan.block_tokens]), list[bytes]()
            for number in range(blocks):
                mine = ids[number * plan.block_tokens : (number + 1) * plan.block_tokens]
                names += [k for k, (parent, _) in made.found.items() if self._follows(made, k, parent, names, mine)]
            assert len(names) == blocks
            chains.append(EngineChain(made.layout, prompt, names, [made.found[n][1] for n in names],
                                      made.found[names[0]][0]))
        return Cast(*chains)

    @staticmethod
    def _follows(made: Blocks, key: bytes, parent: bytes, names: list[bytes], ids: NDArray[Any]) -> bool:
        from deepinfer.runtime.prefix.chain import chain_keys
        if parent != (names[-1] if names else parent):
            return False
        return bool(chain_keys(parent, ids, made.layout.block_tokens)[0].tobytes() == key)

    @cached_property
    def undisturbed(self) -> tuple[list[Op], Path]:
        place = self.place / "undisturbed"
        place.mkdir()
        files = Recording(place)
        assert Life(place, files, self.cast).run()
        return files.ops, place

    def places(self, point: Point) -> list[int]:
        """Operations of the undisturbed life at a point."""
        return [i for i, op in enumerate(self.undisturbed[0]) if op.point is point and op.kind != "note"]

    def check(self, at: int, fault: Fault, seed: int) -> int:
        """Break the life at an operation, then let the engine answer on what is left; blocks that it adopted.

        Tokens are those of a run without a store that replays where the answer's log says.
        """
        place = self.place / f"{at} {fault.name}"
        place.mkdir()
        files = Recording(place, at=at, fault=fault, seed=seed)
        life = Life(place, files, self.cast)
        life.run()
        life.vanish()
        assert files.hit
        if fault is Fault.POWER:
            shutil.rmtree(place)
            place.mkdir()
            materialise(files.ops, place, place, random.Random(seed))
        if seed % 3 == 0:
            damage_index(place, seed)
        sure = set() if fault in (Fault.FULL, Fault.IO) else promised(files.ops, fault is Fault.POWER)
        Patient.wall = life.clocks.wall + AFTER
        with patch(_STORE, Patient), self.start(self._settings(place.name)) as llm:
            adopted = self._answers(llm, sure)
        shutil.rmtree(place)
        return adopted

    def _answers(self, llm: LLM, sure: set[bytes]) -> int:
        adopted, block = 0, llm.plan.block_tokens
        found = llm.generate([chain.prompt for chain in self.cast], self._params(_ANSWER), progress=False)
        for chain, answer in zip(self.cast, found, strict=True):
            assert answer.token_ids == self._reference(chain.prompt, answer.replay_log, len(answer.token_ids))
            leading = next((i for i in range(chain.blocks) if chain.key(i) not in sure), chain.blocks)
            if leading * block > llm.plan.rerun:  # a hit that is no longer than what would run again is not adopted
                assert answer.num_cached_tokens >= leading * block
            adopted += answer.num_cached_tokens // block
        return adopted

    def _reference(self, prompt: list[int], log: Any, count: int) -> list[int]:
        key = tuple(prompt), tuple(log), count
        if key not in self._known:
            self._known[key] = by_log(self.cold, prompt, log, self.cold.plan.least_keep, count)
        return self._known[key]

    def _settings(self, name: str) -> StoreSettings:
        place = self.place / name
        return StoreSettings(place / "store", index=place / "index", segment_bytes=1 << 24)

    def _params(self, count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, replay=self.cold.plan.least_keep)

