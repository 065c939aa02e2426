"""Servers in processes of their own, with the scripted engine behind them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families
from server.scripted_engine import HELD_SUFFIX, HOLD_VARIABLE, START_SUFFIX

MODEL = "scripted-model"
KEY = "a-key-of-the-tests"
FRONT_ENDS_VARIABLE = "FRONT_ENDS"  # of servers that tests start: all of them hold with several
PATIENCE = 180.0  # seconds for something that has to happen; a machine under load is slow
TESTS = Path(__file__).resolve().parents[1]

_PROGRAM = """
import json, socket, sys
from pathlib import Path
from deepinfer.runtime.server.engine_process import EngineSettings
from deepinfer.runtime.server.logs import start_logging
from deepinfer.runtime.server.run import ENGINE_COMMAND, open_socket, run_server
from deepinfer.runtime.server.service import ServerSettings
given = json.loads(sys.argv[1])
start_logging("info", as_json=True)
engine = EngineSettings(endpoint="", log_json=True, **given["engine"])
command = (sys.executable, given["process"]) if engine.engine == "scripted" else ENGINE_COMMAND
listening = open_socket("127.0.0.1", 0)
if given["send_buffer"]:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, given["send_buffer"])
sys.exit(run_server(ServerSettings(**given["server"]), engine, listening, command))
"""


class Running:
    """One server. ``log``: its log lines so far, of the front end and of the engine."""

    def __init__(self, process: subprocess.Popen[str], hold: Path) -> None:
        self.process, self.hold = process, hold
        self.no_start = hold.with_suffix(START_SUFFIX)  # while it is there an engine process does not become ready
        self.log: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = str(self.wait_for(lambda: self.event("listening"), "the server to listen")["url"])
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE,
                                   headers={"Authorization": f"Bearer {KEY}"})

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.raw.append(line)
            if line.startswith("{"):
                self.log.append(json.loads(line))

    def event(self, name: str, **values: Any) -> dict[str, Any] | None:
        """The latest log entry of an event with these values."""
        found = [e for e in self.log if e.get("event") == name and values.items() <= e.items()]
        return found[-1] if found else None

    def wait_for(self, ask: Callable[[], Any], what: str) -> Any:
        """The first true answer of ``ask``."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = ask()
            if found:
                return found
            if self.process.poll() is not None and "end" not in what:
                raise AssertionError(f"the server has ended: {''.join(self.raw)}")
            time.sleep(0.01)
        raise AssertionError(f"waited {PATIENCE} s for {what}: {''.join(self.raw[-30:])}")

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.client.get("/ready").status_code == 200, "readiness")

    def load(self) -> dict[str, int]:
        found: dict[str, int] = self.client.get("/load").json()
        return found

    def samples(self) -> dict[str, float]:
        """Metrics by name, summed over labels; each has the model's name."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for s in family.samples:
                assert s.labels["model_name"] == MODEL, s
                found[s.name] = found.get(s.name, 0) + s.value
        return found

    def wait_held(self) -> None:
        """Until the held step has begun."""
        self.wait_for(self.hold.with_suffix(HELD_SUFFIX).exists, "the step that is held")

    def hold_steps(self) -> None:
        """From now on a script that is held does not get beyond its second token."""
        self.hold.with_suffix(HELD_SUFFIX).unlink(missing_ok=True)
        self.hold.touch()

    def wait_idle(self) -> dict[str, int]:
        """Until the engine holds nothing."""
        def idle() -> dict[str, int] | None:
            found = self.load()
            return found if not found["open"] and found["free_blocks"] == found["blocks"] else None

        found: dict[str, int] = self.wait_for(idle, "an idle engine with all blocks free")
        return found

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def chat(self, script: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": f"Please say:{script} now."}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    def engine_pid(self) -> int:
        ready = self.event("engine_ready")
        assert ready is not None
        return int(ready["pid"])


@contextmanager
def running(checkpoint: Path, folder: Path, engine: Mapping[str, Any] = MappingProxyType({}),
            send_buffer: int = 0, **settings: Any) -> Iterator[Running]:
    """A server that answers, with fields of ServerSettings and EngineSettings; it ends with the block. The engine is
    the scripted one unless ``engine`` names another. ``send_buffer``: bytes that the kernel keeps for a reader; 0: as
    many as it likes."""
    hold = folder / "hold"
    front_ends = int(os.environ.get(FRONT_ENDS_VARIABLE, "1"))
    server = {"names": [MODEL], "keys": [KEY], "keep_alive": 10.0, "drain": PATIENCE,
              "front_ends": front_ends} | settings
    given = {"server": server, "engine": {"engine": "scripted", "checkpoint": str(checkpoint), **engine},
             "send_buffer": send_buffer, "process": str(Path(__file__).with_name("scripted_engine.py"))}
    env = {**os.environ, "PYTHONPATH": str(TESTS), HOLD_VARIABLE: str(hold), "TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(given)], stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True, env=env)
    try:
        found = Running(process, hold)
        found.wait_ready()
        yield found
        found.client.close()
    finally:
        hold.unlink(missing_ok=True)
        hold.with_suffix(START_SUFFIX).unlink(missing_ok=True)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
