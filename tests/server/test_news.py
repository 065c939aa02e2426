"""What an engine process sends: nothing is lost, doubled, out of order or for another front end, whichever way tokens
are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from null_executor import NullEngine, VirtualClock, VirtualExecutor, null_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.engine_loop import EngineLoop


class _Front:
    """Collects what two front ends would."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.packed = 0

    def send_multipart(self, frames: list[bytes]) -> None:
        to, message = frames
        found = wire.decode_from_engine(message)
        if not isinstance(found, wire.Step):
            return
        self.packed += len(found.keys) // 8
        for u in found.all():
            assert wire.front_end_of(u.id) == int(to)
            assert u.id not in self.finish, "news after the end"
            self.tokens.setdefault(u.id, []).extend(u.tokens)
            if u.last:
                assert u.finish is not None
                self.finish[u.id] = u.finish


def _key(request: int) -> int:
    return wire.first_key(request % 2) + request


def _run(drafts: int, lag: int, blocks: int) -> tuple[EngineLoop, _Front, dict[str, Any]]:
    plan = null_plan(seqs=8, drafts=drafts, lag=lag, block=16, vocab=1000)
    clock = VirtualClock()
    core = EngineCore(plan, NullEngine(), slots=8, blocks=blocks, ends=(7,), seed=1, lag=lag, now=clock,
                      executor=VirtualExecutor(plan, lambda decoding, prompt: 1e-3, now=clock))
    front, rng = _Front(), np.random.default_rng(drafts)
    loop = EngineLoop(core, front)  # type: ignore[arg-type]
    made: dict[str, Any] = {}
    for i in range(40):
        how: wire.Sampling = {"max_tokens": int(rng.integers(1, 300)), "n": 2 if i % 9 == 4 else 1}
        prompt = wire.pack_ids(rng.integers(8, 999, int(rng.integers(1, 100))))
        loop._submit(wire.Submit(_key(i), prompt, how, debug=i % 7 == 3))
        made.update(core.requests)
        for _ in range(int(rng.integers(1, 20))):
            core.step()
            loop._flush()
        if i % 5 == 2:
            core.abort(str(_key(int(rng.integers(0, i)))))
    while core.requests:
        core.step()
        loop._flush()
    loop._flush()
    return loop, front, made


@pytest.mark.parametrize(("drafts", "lag"), [(0, 0), (0, 1), (5, 1)])
@pytest.mark.parametrize("blocks", [400, 24])
def test_the_front_end_gets_every_token_once(drafts: int, lag: int, blocks: int) -> None:
    loop, front, made = _run(drafts, lag, blocks)
    assert not loop._open and not loop._single and not loop._news.gone()
    assert set(front.finish) == set(map(_key, range(40)))
    for key, r in made.items():
        expected = [t for out in r.outputs for t in out.token_ids[: -1 if out.finish_reason == "stop" else None]]
        assert sorted(front.tokens[int(key)]) == sorted(expected)
        if len(r.outputs) == 1:
            assert front.tokens[int(key)] == expected
    assert front.packed > 500
    assert (loop.core.metrics.preemptions.value > 0) == (blocks == 24)


def test_a_list_that_is_read_late_is_whole() -> None:
    plan = null_plan(seqs=2, drafts=5, lag=0, block=16, vocab=1000)
    clock = VirtualClock()
    core = EngineCore(plan, NullEngine(), slots=2, blocks=2000, seed=1, now=clock,
                      executor=VirtualExecutor(plan, lambda decoding, prompt: 1e-3, accept=1.0, now=clock))
    params = SamplingParams(max_tokens=3000, seed=4, ignore_eos=True)
    late, eager = (core.make(str(i), [9] * 20, params, stream=i == 1) for i in range(2))
    core.add(late)
    core.add(eager)
    while core.requests:
        core.step()
        eager.updates.clear()
    assert late.outputs[0].token_ids == eager.outputs[0].token_ids and len(late.outputs[0].token_ids) == 3000
