"""How fast a server answers probes while a step is held, and how soon it tells that its engine was killed.

    PYTHONPATH=tests python tests/bench/bench_server_probes.py --hold 20
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from server.running import MODEL, Running, running
from server.soak import write_checkpoint


def probes(server: Running, seconds: float) -> dict[str, np.ndarray]:
    """Milliseconds of each probe, one after another, while one request's step does not end."""
    server.hold.touch()
    messages = [{"role": "user", "content": "say:held"}]
    body = {"model": MODEL, "messages": messages, "thinking": {"type": "disabled"}}
    thread = threading.Thread(target=lambda: server.post("/v1/chat/completions", body))
    thread.start()
    server.wait_for(lambda: server.load()["open"] == 1, "the request to run")
    time.sleep(0.5)
    found: dict[str, list[float]] = {path: [] for path in ("/health", "/ready", "/metrics")}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path, times in found.items():
            began = time.monotonic()
            server.client.get(path).raise_for_status()
            times.append((time.monotonic() - began) * 1000)
        time.sleep(0.05)
    assert thread.is_alive()
    server.hold.unlink()
    thread.join()
    return {path: np.array(times) for path, times in found.items()}


def killed(server: Running) -> tuple[float, float]:
    """Seconds from the kill to the first 503, and to readiness again."""
    os.kill(server.engine_pid(), signal.SIGKILL)
    began = time.monotonic()
    while server.client.get("/health").status_code == 200:
        time.sleep(0.005)
    noticed = time.monotonic() - began
    server.wait_ready()
    return noticed, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hold", type=float, default=20, help="seconds that the step is held")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running(write_checkpoint(Path(name)), Path(name)) as server:
        print(f"{'probe':<10}{'count':>7}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
        for path, times in probes(server, given.hold).items():
            print(f"{path:<10}{len(times):>7}{np.percentile(times, 50):>9.2f}{np.percentile(times, 99):>9.2f}"
                  f"{times.max():>9.2f}")
        noticed, ready = killed(server)
        print(f"engine killed: 503 after {noticed * 1000:.0f} ms, ready again after {ready:.1f} s")


if __name__ == "__main__":
    main()
