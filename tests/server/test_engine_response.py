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
    """An answer that ends with a failure or after so many tokens."""

    done_line = "[DONE]"

    def __init__(self, tokens: int = 1000) -> None:
        self._left = tokens

    def is_over(self) -> bool:
        return self._left <= 0

    def begin(self, cached: int) -> list[Any]:
        return []

    def push(self, update: Update) -> list[Any]:
        self._left -= len(update.tokens)
        return []

    def fail(self, message: str, *, overloaded: bool) -> list[Any]:
        self._left = 0
        return []


async def cut_after(turns: int, end: str | None, length: int = 1000) -> tuple[list[str], dict[str, Any], list[int]]:
    """Words for the cut, the log line, and aborts, where more than is kept comes at once, ``turns`` of the loop behind
    the first token; ``end``: how the engine ended the answer in the same moment."""
    cuts, notes, aborts = list[str](), dict[str, Any](), list[int]()
    ticket = Ticket(1, 3, KEPT, aborts.append)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    words: Any = Words(length)
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


def test_an_answer_that_was_read_to_its_end_is_not_cut() -> None:
    cuts, notes, _ = asyncio.run(asyncio.wait_for(cut_after(20, None, length=1), 60))
    assert cuts == [] and "cut" not in notes
