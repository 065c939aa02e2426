"""Processor time that the front end spends on a streamed token, by API, and on a request: what one of it can carry.

    PYTHONPATH=tests python tests/bench/bench_front_end.py

Times are those of the process, so other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from server.running import MODEL, Running, running
from server.soak import write_checkpoint

STREAMS, TOKENS, REQUESTS = 4, 1500, 200
CHAT_MODE: Any = {"thinking": {"type": "disabled"}}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:quick"}], "max_tokens": TOKENS, **CHAT_MODE},
    "/v1/messages": {"messages": [{"role": "user", "content": "say:quick"}], "max_tokens": TOKENS, **CHAT_MODE},
    "/v1/responses": {"input": "say:quick", "max_output_tokens": TOKENS, "reasoning": {"effort": "none"}},
    "/v1/completions": {"prompt": "say:quick", "max_tokens": TOKENS},
}


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def microseconds_per_token(server: Running, path: str) -> float:
    """Of the front end, with several streams at a time."""
    def read() -> None:
        with server.client.stream("POST", path, json={"model": MODEL, "stream": True, **BODIES[path]}) as stream:
            assert stream.status_code == 200
            for _ in stream.iter_raw():
                pass

    before = processor_seconds(server.process.pid)
    threads = [threading.Thread(target=read) for _ in range(STREAMS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    server.wait_idle()
    return 1e6 * (processor_seconds(server.process.pid) - before) / (STREAMS * TOKENS)


def milliseconds_per_request(server: Running) -> float:
    """Of a short request whose answer is one token."""
    before = processor_seconds(server.process.pid)
    for _ in range(REQUESTS):
        assert server.chat("stops", max_tokens=1, **CHAT_MODE).status_code == 200
    return 1e3 * (processor_seconds(server.process.pid) - before) / REQUESTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running(write_checkpoint(Path(name)), Path(name)) as server:
        found = {path: round(min(microseconds_per_token(server, path) for _ in range(2)), 1) for path in BODIES}
        result = {"us_per_streamed_token": found, "ms_per_request": round(milliseconds_per_request(server), 2)}
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
