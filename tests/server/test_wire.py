"""Messages between the processes, and the vocabulary that turns prompts into ids."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InternalError
from deepinfer.recipe import packaged_tokenizer
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.ticket import EngineGone, SlowReader, Ticket
from deepinfer.runtime.server.vocabulary import Vocabulary, read_vocabulary

MESSAGES = [
    wire.Hello("m", "cpu", 10, 20, 1, 2, 3, None, "fp", 0.5), wire.Failed("why", 5),
    wire.Step([wire.Update(1, [2, 3], [wire.TokenLogprob(-0.5, [(2, -0.5)])], [None], "stop", None,
                           wire.Times(0.1, None, 0.2))]),
    wire.Snapshot([wire.Metric("histogram", "n", "h", bounds=[1.0], counts=[1, 2], total=3.0)], 1, 2, 3),
]


def test_messages_come_back_as_they_were() -> None:
    for message in MESSAGES:
        assert wire.decode_from_engine(wire.encode(message)) == message  # type: ignore[arg-type]
    sampling: wire.Sampling = {"temperature": 0.5, "stop_token_ids": [1], "logit_bias": {3: 0.5}, "seed": None}
    for message in (wire.Submit(7, wire.pack_ids([1, 2, 129_279]), sampling), wire.Abort(7), wire.Stop()):
        assert wire.decode_to_engine(wire.encode(message)) == message
    assert wire.unpack_ids(wire.pack_ids([1, 2, 129_279])).tolist() == [1, 2, 129_279]


@given(st.binary(max_size=60))
def test_bytes_of_another_form_are_refused(data: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        try:
            found: Any = decode(data)
        except InternalError:
            continue
        assert isinstance(found, wire.Submit | wire.Abort | wire.Stop | wire.Failed | wire.Step)


def test_a_message_of_the_other_side_and_a_pickle_are_refused() -> None:
    for data in (wire.encode(MESSAGES[0]), pickle.dumps(MESSAGES[1]), b""):  # type: ignore[arg-type]
        with pytest.raises(InternalError, match="no valid message"):
            wire.decode_to_engine(data)
    with pytest.raises(InternalError, match="no valid message"):
        wire.decode_from_engine(wire.encode(wire.Stop()))


def test_a_ticket_gives_what_came_before_it_says_that_nothing_more_will() -> None:
    async def run() -> None:
        aborted: list[int] = []
        ticket = Ticket(5, 3, 10, aborted.append)
        assert await ticket.take(0.001) == []
        ticket.push(wire.Update(5, [1]))
        ticket.fail(EngineGone("it ended"))
        assert [u.tokens for u in await ticket.take(1)] == [[1]]
        with pytest.raises(EngineGone, match="it ended"):
            await ticket.take(1)
        ticket.close()
        assert aborted == []
        slow = Ticket(6, 3, 10, aborted.append)
        for _ in range(3):
            slow.push(wire.Update(6, [1] * 5))
        assert aborted == [6] and slow.failed.is_set()
        assert len(await slow.take(1)) == 3
        with pytest.raises(SlowReader):
            await slow.take(1)
        done = Ticket(7, 3, 10, aborted.append)
        done.push(wire.Update(7, [1], finish="stop", last=True))
        done.close()
        left = Ticket(8, 3, 10, aborted.append)
        left.close()
        assert aborted == [6, 8]

    asyncio.run(run())


@pytest.mark.parametrize("name", ["v4", "v4.1"])
def test_the_dialect_follows_from_the_tokenizer(name: str) -> None:
    assert Vocabulary(packaged_tokenizer(name)).conversation_dialect().name == name


def test_a_checkpoint_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert not read_vocabulary(tmp_path, None).has_text and not read_vocabulary(None, None).has_text
