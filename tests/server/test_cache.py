"""The prefix cache behind the routes: what usage says of it, and who shares with whom."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from server.running import KEY, MODEL, PATIENCE, Running, running
from server.scripted_engine import BLOCK, HELLO, SLOW_SECONDS

OTHER_KEY = "another-key-of-the-tests"
CHAT_MODE: Any = {"thinking": {"type": "disabled"}}


def long_talk(subject: str) -> list[dict[str, str]]:
    """A conversation of several blocks that begins as no other one does."""
    return [{"role": "user", "content": f"{subject}: " + "some words about it, " * 40},
            {"role": "assistant", "content": "I see."}, {"role": "user", "content": "say:hello"}]


def openai_of(server: Running, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def cached_by_chat(server: Running, talk: Any, key: str = KEY, **fields: Any) -> int:
    done: Any = openai_of(server, key).chat.completions.create(model=MODEL, messages=talk, extra_body=fields)
    assert done.choices[0].message.content == HELLO
    found: int = done.usage.prompt_tokens_details.cached_tokens
    return found


def test_a_conversation_hits_the_same_blocks_through_every_route(
        server: Running, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    talk: Any = long_talk("routes")
    before = server.samples()
    assert cached_by_chat(server, talk) == 0
    chat = openai_client.chat.completions.create(model=MODEL, messages=talk)
    usage: Any = chat.usage
    hit = usage.prompt_tokens_details.cached_tokens
    assert hit > 0 and hit % BLOCK == 0
    assert (usage.prompt_cache_hit_tokens, usage.prompt_cache_miss_tokens) == (hit, usage.prompt_tokens - hit)
    message = anthropic_client.messages.create(model=MODEL, messages=talk, max_tokens=200,
                                               thinking={"type": "enabled", "budget_tokens": 1024})
    assert message.usage.cache_read_input_tokens == hit
    assert message.usage.input_tokens + hit == usage.prompt_tokens
    response: Any = openai_client.responses.create(model=MODEL, input=talk)
    assert response.usage.input_tokens_details.cached_tokens == hit
    assert response.usage.input_tokens == usage.prompt_tokens and response.output_text == HELLO
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    ids = server.post("/tokenize", {"messages": talk}).json()["tokens"]
    completion: Any = openai_client.completions.create(model=MODEL, prompt=ids, max_tokens=9)
    assert completion.usage.prompt_tokens_details.cached_tokens == hit
    server.wait_idle()
    grown = {name: value - before.get(name, 0) for name, value in server.samples().items()}
    assert grown["vllm:prefix_cache_hits_total"] == 4 * hit
    assert grown["vllm:prompt_tokens_total"] >= 5 * usage.prompt_tokens - 4 * hit  # rows before a hit may run again


def test_streams_say_what_was_cached_before_the_first_text(server: Running, openai_client: openai.OpenAI,
                                                          anthropic_client: anthropic.Anthropic) -> None:
    talk: Any = long_talk("streams")
    cached_by_chat(server, talk)
    hit = cached_by_chat(server, talk)
    last: Any = list(openai_client.chat.completions.create(model=MODEL, messages=talk, stream=True))[-1]
    assert last.usage.prompt_tokens_details.cached_tokens == hit > 0
    events: list[Any] = list(anthropic_client.messages.create(
        model=MODEL, messages=talk, max_tokens=200, thinking={"type": "enabled", "budget_tokens": 1024}, stream=True))
    assert events[0].type == "message_start" and events[0].message.usage.cache_read_input_tokens == hit
    assert [e.usage.cache_read_input_tokens for e in events if e.type == "message_delta"] == [hit]
    ended: list[Any] = list(openai_client.responses.create(model=MODEL, input=talk, stream=True))
    assert ended[-1].response.usage.input_tokens_details.cached_tokens == hit


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of two tenants whose requests may have priorities."""
    folder = tmp_path_factory.mktemp("shared")
    with running(checkpoint, folder, keys=[KEY, OTHER_KEY], priorities=True, max_queue=50) as found:
        yield found


def test_keys_and_salts_share_only_with_themselves(shared: Running) -> None:
    talk = long_talk("tenants")
    assert cached_by_chat(shared, talk) == 0
    hit = cached_by_chat(shared, talk)
    assert hit > 0
    assert cached_by_chat(shared, talk, OTHER_KEY) == 0
    assert cached_by_chat(shared, talk, OTHER_KEY) == hit
    assert cached_by_chat(shared, talk, cache_salt="one") == 0
    assert cached_by_chat(shared, talk, cache_salt="two") == 0
    assert cached_by_chat(shared, talk, cache_salt="one") == hit
    assert cached_by_chat(shared, talk, OTHER_KEY, cache_salt="one") == 0
    # a salt that looks like another tenant with its salt is a salt
    tenants = shared.event("listening")
    assert tenants is not None
    first = str(tenants["tenants"]).split(",")[0]
    assert cached_by_chat(shared, talk, OTHER_KEY, cache_salt=first) == 0
    assert KEY not in "".join(shared.raw)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_debug_tells_how_an_answer_came_about_in_stream_and_body(server: Running, path: str) -> None:
    talk = long_talk(f"debug {path}")
    body: Any = {"model": MODEL, "max_tokens": 200, "debug": True,
                 "input" if path == "/v1/responses" else "messages": talk}
    first = server.post(path, body).json()["debug"]
    assert (first["cached_tokens"], first["preemptions"], first["inexact"]) == (0, 0, False)
    again = server.post(path, body).json()["debug"]
    hit = again["cached_tokens"]
    assert hit > 0 and again["replay_log"] == [{"axis": "T", "start": hit, "floor": hit}]
    with server.client.stream("POST", path, json={**body, "stream": True}) as stream:
        data = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    holders = [e.get("response", e) for e in data]
    assert [h["debug"]["cached_tokens"] for h in holders if "debug" in h] == [hit]
    del body["debug"]
    assert "debug" not in server.post(path, body).json()


def test_a_smaller_priority_goes_first(shared: Running) -> None:
    """Four requests run; one holds the step, and of four that wait the urgent one is not the one that is left over."""
    shared.wait_idle()
    finished = len(ended(shared))
    shared.hold_steps()
    threads = []
    for name, priority in (("held", 0), ("late", 0), ("later", 0), ("latest", 0), ("urgent", -5)):
        script = "held" if name == "held" else "stops"
        body: Any = {"model": MODEL, "messages": [{"role": "user", "content": f"say:{script}"}],
                     "priority": priority, **CHAT_MODE}
        threads.append(threading.Thread(target=shared.post, args=("/v1/chat/completions", body),
                                        kwargs={"X-Request-Id": name}))
        threads[-1].start()
        if name == "held":
            shared.wait_held()
        shared.wait_for(lambda: shared.load()["open"] == len(threads), f"{name} to be queued")
    shared.hold.unlink()
    for t in threads:
        t.join(PATIENCE)
    shared.wait_for(lambda: len(ended(shared)) == finished + len(threads), "the log lines")
    order = ended(shared)[finished:]
    lines = {name: shared.wait_for(lambda n=name: shared.event("request", id=n), "the log line")
             for name in ("urgent", "latest")}
    assert order.index(lines["urgent"]["engine_request"]) < order.index(lines["latest"]["engine_request"]), order


def test_the_summary_line_tells_the_hit_rate(shared: Running) -> None:
    talk = long_talk("summary")
    for _ in range(3):
        cached_by_chat(shared, talk)

    def line() -> bool:
        return any(0 < e.get("prefix_hits", 0) < 1 for e in shared.log if e.get("event") == "load")

    assert shared.wait_for(line, "the line of ten seconds")


def ended(server: Running) -> list[int]:
    """Requests in the order in which the engine ended them."""
    return [int(e["request"]) for e in server.log if e.get("event") == "request_finished" and e["request"].isdigit()]


def test_a_deadline_ends_an_answer_with_what_there_is(server: Running) -> None:
    deadline = 0.75
    while True:  # a slow machine may need longer for the first token
        done = server.chat("long", deadline=deadline, debug=True, **CHAT_MODE).json()
        assert done["choices"][0]["finish_reason"] == "length"
        assert done["usage"]["completion_tokens"] * SLOW_SECONDS["long"] < deadline + 1
        if done["usage"]["completion_tokens"]:
            break
        deadline *= 2
    assert set(done["choices"][0]["message"]["content"].split()) == {"word"}
    server.wait_idle()
    assert 'finished_reason="deadline"' in server.client.get("/metrics").text
