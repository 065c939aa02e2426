"""One server for all tests that do not harm it, and a checkpoint folder with the real V4.1 tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from server.running import KEY, PATIENCE, Running, running
from server.soak import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine needs beside weights: a tokenizer and the id that ends an answer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(checkpoint, tmp_path_factory.mktemp("server"), stream_buffer=512, max_queue=4) as found:
        yield found


@pytest.fixture
def openai_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)


@pytest.fixture
def anthropic_client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{server.url}/anthropic", api_key=KEY, max_retries=0, timeout=PATIENCE)


@pytest.fixture(autouse=True)
def server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the shared server logged during a test, shown when the test fails."""
    found: Running | None = request.getfixturevalue("server") if "server" in request.fixturenames else None
    first = len(found.raw) if found is not None else 0
    yield
    if found is not None:
        print("".join(found.raw[first:]))
