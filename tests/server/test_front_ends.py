"""Several front-end processes before one engine. `FRONT_ENDS=2 pytest tests/server` runs every other test on two."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from server.running import KEY, MODEL, PATIENCE, Running, running
from server.scripted_engine import HELLO, SLOTS


@contextmanager
def only_the_other(server: Running) -> Iterator[httpx.Client]:
    """A client whose connection the second front end has accepted: the first one sleeps meanwhile."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers={"Authorization": f"Bearer {KEY}"}) as client:
        server.process.send_signal(signal.SIGSTOP)
        try:
            server.wait_for(lambda: state_of(server.process.pid) == "T", "the first front end to sleep")
            assert client.get("/version").status_code == 200
        finally:
            server.process.send_signal(signal.SIGCONT)
        yield client


def state_of(pid: int) -> str:
    """One letter, as ps shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def asked(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"say:{script}"}],
            "thinking": {"type": "disabled"}, **fields}


def other(server: Running) -> int:
    return int(server.wait_for(lambda: server.event("front_end_listening"), "the other front end")["pid"])


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(checkpoint, tmp_path_factory.mktemp("pair"), front_ends=2, max_queue=0) as found:
        yield found


def test_each_front_end_serves_and_metrics_are_those_of_all(pair: Running) -> None:
    before = pair.samples()
    with only_the_other(pair) as client:
        for one in (pair.client, client):
            answer = one.post("/v1/chat/completions", json=asked("hello")).json()
            assert answer["choices"][0]["message"]["content"] == HELLO
        refused = client.post("/v1/chat/completions", json=asked("hello", temperature=-1))
        assert refused.status_code == 400
        pair.wait_idle()
        there = client.get("/metrics").text
    after = pair.samples()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:request_prompt_tokens_count"] == grown["vllm:request_success_total"] == 2
    assert f'route="/v1/chat/completions",status="200"}} {after_of(pair, "200")}' in there
    assert f'route="/v1/chat/completions",status="400"}} {after_of(pair, "400")}' in there
    assert pair.event("request", status=400) is not None


def test_all_front_ends_say_the_same_of_a_model(pair: Running) -> None:
    with only_the_other(pair) as client:
        cards = [one.get("/v1/models").json()["data"] for one in (pair.client, client)]
    assert cards[0] == cards[1]


def after_of(server: Running, status: str) -> str:
    line = next(line for line in server.client.get("/metrics").text.splitlines()
                if f'route="/v1/chat/completions",status="{status}"' in line)
    return line.rsplit(" ", 1)[1]


def test_the_limit_of_the_queue_counts_all_front_ends(pair: Running) -> None:
    with only_the_other(pair) as client, ExitStack() as stack:
        read = []
        for one in (pair.client, client, pair.client, client):
            stream = one.stream("POST", "/v1/chat/completions", json=asked("long", stream=True))
            read.append(stack.enter_context(stream).iter_lines())
            next(read[-1])
        assert pair.load()["open"] == SLOTS
        for one in (pair.client, client):
            assert one.post("/v1/chat/completions", json=asked("hello")).status_code == 429
    pair.wait_idle()


def test_a_killed_engine_is_told_by_every_front_end(pair: Running) -> None:
    with only_the_other(pair) as client:
        pair.no_start.touch()  # the next one is not there before both have told
        os.kill(pair.engine_pid(), signal.SIGKILL)
        for one in (client, pair.client):
            pair.wait_for(lambda c=one: c.get("/health").status_code == 503, "the front end to notice")
            assert "SIGKILL" in one.get("/health").json()["reason"]
        pair.no_start.unlink()
        pair.wait_ready()
        assert client.post("/v1/chat/completions", json=asked("hello")).status_code == 200


def test_a_front_end_that_dies_takes_its_requests_with_it_and_comes_back(pair: Running) -> None:
    first = other(pair)
    with only_the_other(pair) as client, pytest.raises(httpx.HTTPError), client.stream(
            "POST", "/v1/chat/completions", json=asked("long", stream=True)) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(first, signal.SIGKILL)
        list(lines)
    pair.wait_idle()
    assert pair.chat("hello").status_code == 200
    pair.wait_for(lambda: other(pair) != first, "another front end")
    pair.wait_ready()
    with only_the_other(pair) as client:
        assert client.post("/v1/chat/completions", json=asked("hello")).status_code == 200


def test_a_front_end_that_hangs_does_not_hold_up_the_end(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, front_ends=2, drain=0.2) as server:
        pid = other(server)
        with only_the_other(server) as client, client.stream(
                "POST", "/v1/chat/completions", json=asked("long", stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
        assert not Path(f"/proc/{pid}").exists()


def test_no_process_is_left_and_running_answers_end_in_order(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, front_ends=2) as server:
        pid = other(server)
        with only_the_other(server) as client, client.stream(
                "POST", "/v1/chat/completions", json=asked("quick", stream=True, max_tokens=300)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        assert not Path(f"/proc/{pid}").exists() and not list(tmp_path.glob("deepinfer-*"))
