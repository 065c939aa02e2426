"""What carries an answer to its reader, without a server: every order in which its tasks can come to their turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deepinfer.runtime.server.engine_response import EngineResponse
from deepinfer.runtime.server.ticket import Ticket
from deepinfer.runtime.server.wire import Update

KEPT = 4  # tokens for a slow reader


class Words:
    """An answer that never ends by itself."""

    done_line = "[DONE]"

    def is_over(self) -> bool:
        return False

    def begin(self, cached: int) -> list[Any]:
        return []

    def push(self, update: Update) -> list[Any]:
        return []

    def fail(self, message: str, *, overloaded: bool) -> list[Any]:
        return []


async def cut_after(turns: int, end: str | None) -> tuple[list[str], dict[str, Any], list[int]]:
    """Words for the cut, the log line, and aborts, where more than is kept comes at once, ``turns`` of the loop behind
    the first token; ``end``: how the engine ended the answer in the same moment."""
    cuts, notes, aborts = list[str](), dict[str, Any](), list[int]()
    ticket = Ticket(1, 3, KEPT, aborts.append)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    words: Any = Words()
    response = EngineResponse(ticket, words, stream=True, narrowing=(), path="/v1/chat/completions", request_id="r",
                              notes=notes, keep_alive=1e6, on_cut=cuts.append)
    running = asyncio.create_task(response({"type": "http"}, receive, send))
    for _ in range(10):
        await asyncio.sleep(0)
    ticket.push(Update(1, [7]))
    for _ in range(turns):
        await asyncio.sleep(0)
    ticket.push(Update(1, [7] * (KEPT + 1)))
    if end is not None:
        ticket.push(Update(1, [], finish=end, last=True))
    await running
    return cuts, notes, aborts


@pytest.mark.parametrize("end", [None, "abort"])
@pytest.mark.parametrize("turns", range(8))
def test_an_answer_that_nobody_reads_is_told_to_be_cut_whoever_notices_first(turns: int, end: str | None) -> None:
    cuts, notes, aborts = asyncio.run(asyncio.wait_for(cut_after(turns, end), 60))
    assert cuts == ["slow_reader"] == [notes.get("cut")] and set(aborts) == {1}
