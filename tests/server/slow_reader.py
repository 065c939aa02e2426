"""What a reader that does not read costs the others: time per token of three streams beside a good and a slow reader.

    PYTHONPATH=tests python -m server.slow_reader --json tests/server/slow_reader_result.json
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from server.running import KEY, MODEL, PATIENCE, Running, running
from server.scripted_engine import LONGEST
from server.soak import write_checkpoint

READERS, TOKENS, BUFFER = 3, 1200, 256
LONG_NAME = "a-long-name-" + "x" * 8000  # in every chunk, so that the kernel's buffers fill too


def body(model: str, tokens: int) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "say:quick"}], "stream": True,
                       "thinking": {"type": "disabled"}, "max_tokens": tokens}).encode()


class Beside:
    """A fourth stream; a slow one takes the first bytes and no more."""

    def __init__(self, server: Running, slow: bool) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((host, int(port)))
        data = body(LONG_NAME, LONGEST - 100)
        self._socket.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                             + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        self._socket.recv(1000)
        self._reader = None if slow else threading.Thread(target=self._read)
        if self._reader is not None:
            self._reader.start()

    def _read(self) -> None:
        try:
            while self._socket.recv(1 << 16):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._reader is not None:
            self._reader.join(PATIENCE)


def seconds_per_token(server: Running) -> float:
    """Median over the readers, first token to last."""
    found: list[float] = []

    def read() -> None:
        with server.client.stream("POST", "/v1/chat/completions", content=body(MODEL, TOKENS)) as stream:
            times = [time.perf_counter() for line in stream.iter_lines() if line.startswith("data: {")]
        assert len(times) >= TOKENS
        found.append((times[-1] - times[1]) / (len(times) - 2))

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return statistics.median(found)


def measure(server: Running, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"good": [], "slow": []}
    for _ in range(rounds):
        for kind in times:
            beside = Beside(server, kind == "slow")
            times[kind].append(seconds_per_token(server))
            beside.close()
            server.wait_idle()
    cuts = [e for e in server.log if e.get("cut") == "slow_reader"]
    ratios = [slow / good for slow, good in zip(times["slow"], times["good"], strict=True)]
    return {"readers": READERS, "tokens": TOKENS, "stream_buffer": BUFFER, "rounds": rounds,
            "ms_per_token": {k: [round(1e3 * t, 3) for t in v] for k, v in times.items()},
            "slow_over_good": {"median": round(statistics.median(ratios), 3),
                               "best_over_best": round(min(times["slow"]) / min(times["good"]), 3)},
            "cut": len(cuts), "tokens_when_cut": [e["tokens"] for e in cuts]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(write_checkpoint(folder), folder, stream_buffer=BUFFER, names=[MODEL, LONG_NAME]) as server:
            text = json.dumps(measure(server, given.rounds), indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
