"""What happens to a server: held steps, lost readers, a full queue, a dead engine, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server.running import KEY, MODEL, PATIENCE, Running, running
from server.scripted_engine import HELLO, LONGEST, SLOTS

from deepinfer.errors import PlanError
from deepinfer.runtime.server.run import open_socket

LONG_NAME = "a-long-name-" + "x" * 8000
CHAT_MODE: Any = {"thinking": {"type": "disabled"}}


def body(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"say:{script}"}], **CHAT_MODE, **fields}


@pytest.fixture
def held(server: Running) -> Iterator[threading.Thread]:
    """A request whose step does not end until the test does."""
    server.hold_steps()
    thread = threading.Thread(target=lambda: server.post("/v1/chat/completions", body("held")))
    thread.start()
    server.wait_held()
    yield thread
    server.hold.unlink(missing_ok=True)
    thread.join(PATIENCE)
    server.wait_idle()


def test_probes_answer_while_a_step_is_held(server: Running, held: threading.Thread) -> None:
    seconds = []
    for path in ("/health", "/metrics", "/v1/models", "/load", "/ready") * 4:
        began = time.monotonic()
        assert server.client.get(path).status_code == 200
        seconds.append(time.monotonic() - began)
    assert held.is_alive()
    print(f"slowest probe during a held step: {max(seconds) * 1000:.1f} ms")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_request(server: Running, stream: bool) -> None:
    before, made = server.wait_idle(), server.samples()["vllm:generation_tokens_total"]
    data = json.dumps(body("long", stream=stream)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        server.wait_for(lambda: server.load()["running"] == 1, "the request to run")
        if stream:
            assert b"200 OK" in connection.recv(1000)
        assert server.load()["free_blocks"] < before["blocks"]
    server.wait_for(lambda: server.event("request", cut="disconnected", stream=stream), "the log line")
    server.wait_idle()
    # an answer that nobody ends has all its tokens
    assert server.samples()["vllm:generation_tokens_total"] - made < LONGEST - 500


@pytest.fixture(scope="module")
def busy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a long queue that keeps little for slow readers."""
    names = [MODEL, LONG_NAME]
    with running(checkpoint, tmp_path_factory.mktemp("busy"), max_queue=100, stream_buffer=256, names=names,
                 send_buffer=1 << 16) as found:
        yield found


def test_a_slow_reader_is_cut_while_others_go_on(busy: Running) -> None:
    # every event repeats the model's name: more than the kernel keeps for a reader that does not read
    data = json.dumps(body("quick", stream=True, max_tokens=1900, model=LONG_NAME)).encode()
    host, port = busy.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                           + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        busy.wait_for(lambda: busy.load()["running"] == 1 or busy.event("request", cut="slow_reader"),
                      "the request to run")
        assert busy.chat("hello").json()["choices"][0]["message"]["content"] == HELLO
        line = busy.wait_for(lambda: busy.event("request", cut="slow_reader"), "the cut")
        assert line["tokens"] < 1900
        busy.wait_idle()


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Running, openai_client: openai.OpenAI) -> None:
    most = SLOTS + 4
    server.hold.touch()
    with ThreadPoolExecutor(most) as pool:
        waiting = [pool.submit(server.post, "/v1/chat/completions", body("held")) for _ in range(most)]
        server.wait_for(lambda: server.load()["open"] == most, "the queue to fill")
        refused = server.chat("hello")
        with pytest.raises(openai.RateLimitError):
            openai_client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "say:hello"}])
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        server.hold.unlink()
        assert [w.result().json()["choices"][0]["message"]["content"] for w in waiting] == ["before hold after"] * most
    server.wait_idle()
    assert server.chat("hello").status_code == 200


def test_one_requests_broken_numbers_end_no_other(server: Running) -> None:
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(server.post, "/v1/chat/completions", body("quick", max_tokens=60))
        broken = [pool.submit(server.post, path, fields).result() for path, fields in (
            ("/v1/chat/completions", body("nan")),
            ("/v1/messages", {**body("nan"), "max_tokens": 50}))]
        assert [b.status_code for b in broken] == [500, 500]
        assert "finite" in broken[0].json()["error"]["message"]
        assert broken[1].json()["error"]["type"] == "api_error"
        assert long.result().json()["usage"]["completion_tokens"] == 60
    with server.client.stream("POST", "/v1/chat/completions", json=body("nan", stream=True)) as stream:
        lines = list(stream.iter_lines())
    assert any("error" in line and "finite" in line for line in lines) and lines[-2] == "data: [DONE]"


def test_many_clients_at_once_get_their_own_answers(busy: Running) -> None:
    scripts = ["hello", "stops"] * 12
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda s: busy.post("/v1/chat/completions", body(s)).json(), scripts))
    texts = [a["choices"][0]["message"]["content"] for a in answers]
    assert texts == [HELLO, "one two three four five"] * 12
    busy.wait_idle()


def test_a_killed_engine_is_a_503_with_a_reason_and_comes_back_on_the_same_socket(
        checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path) as server, ThreadPoolExecutor(2) as pool:
        ipc = list(tmp_path.glob("deepinfer-*/engine.ipc"))
        assert [stat.S_IMODE(p.stat().st_mode) for p in ipc] == [0o600]
        assert stat.S_IMODE(ipc[0].parent.stat().st_mode) == 0o700
        first = server.engine_pid()
        whole = pool.submit(server.post, "/v1/chat/completions", body("long"))
        with server.client.stream("POST", "/v1/messages", json={**body("long", stream=True), "max_tokens": 900}) as s:
            lines = s.iter_lines()
            while "text_delta" not in next(lines):
                pass
            server.no_start.touch()  # the next one is not there before all was seen
            os.kill(first, signal.SIGKILL)
            began = time.monotonic()
            rest = list(lines)
        health = server.client.get("/health")
        print(f"noticed after {time.monotonic() - began:.2f} s")
        assert health.status_code == 503 and "SIGKILL" in health.json()["reason"]
        refused = server.chat("hello")
        assert refused.status_code == 503 and "SIGKILL" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert any("overloaded_error" in line for line in rest)
        assert whole.result().status_code == 503 and "SIGKILL" in whole.result().text
        server.no_start.unlink()
        server.wait_ready()
        assert server.engine_pid() != first
        assert server.chat("hello").json()["choices"][0]["message"]["reasoning_content"]
        assert server.client.get("/health").status_code == 200
        assert not Path(ipc[0]).exists()
        # the same again by a fault inside
        assert server.post("/v1/chat/completions", body("dies")).status_code == 503
        server.wait_ready()
        assert server.chat("hello").status_code == 200
        assert "deepinfer:engine_restarts_total" in server.client.get("/metrics").text


def test_sigterm_lets_answers_finish_and_takes_no_new_ones(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.hold.touch()
        running_answer = pool.submit(server.post, "/v1/chat/completions", body("held"))
        server.wait_for(lambda: server.load()["open"] == 1, "the request to run")
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.client.get("/ready").status_code == 503, "the drain")
        refused = server.chat("hello")
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        server.hold.unlink()
        assert running_answer.result().json()["choices"][0]["message"]["content"] == "before hold after"
        assert server.process.wait(PATIENCE) == 0
        server.wait_for(lambda: _has_ended(engine), "the engine's end")
        assert not list(tmp_path.glob("deepinfer-*"))


def test_answers_that_are_too_long_for_the_drain_end_with_an_error(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, drain=0.3) as server:
        with server.client.stream("POST", "/v1/chat/completions", json=body("long", stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert any("shutting down" in line for line in rest) and rest[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0


def test_an_engine_does_not_outlive_its_front_end(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path) as server:
        server.hold.touch()
        threading.Thread(target=lambda: _ignore(server), daemon=True).start()
        server.wait_for(lambda: server.load()["open"] == 1, "the request to run")
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait(PATIENCE)
        server.wait_for(lambda: _has_ended(engine), "the engine's end")


def _ignore(server: Running) -> None:
    try:
        server.post("/v1/chat/completions", body("held"))
    except Exception:  # the server is killed under it
        return


def _has_ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_taken_address_is_one_sentence() -> None:
    with open_socket("127.0.0.1", 0) as taken:
        assert taken.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's delay on
        with pytest.raises(PlanError, match="choose another --port"):
            open_socket("127.0.0.1", taken.getsockname()[1])
