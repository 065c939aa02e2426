"""What `/openapi.json` forbids is refused: bodies that break one of its rules, or several, at random."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

from server.running import MODEL, PATIENCE, Running

BODIES = 1000
GOOD: dict[str, Any] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "say:stops"}], "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "say:stops", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "say:stops"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "say:stops"}]},
    "/v1/completions": {"model": MODEL, "prompt": "say:stops", "max_tokens": 1},
    "/tokenize": {"prompt": "text"},
    "/detokenize": {"tokens": [1, 2]},
}
KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float),
                                      "array": (list,), "object": (dict,)}
STRANGERS: tuple[Any, ...] = ("words", "", 3, -3, 0.5, True, [], ["a"], [[]], {}, {"a": 1}, 2**70, -(2**70))


def fits(schema: Any, value: Any) -> bool:
    """Whether a value obeys the part of JSON Schema that the text uses."""
    if "oneOf" in schema:
        return any(fits(s, value) for s in schema["oneOf"])
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if kind == "string":
        return len(value) >= schema.get("minLength", 0) and value in schema.get("enum", [value])
    if kind in ("integer", "number"):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value)
                    and value > schema.get("exclusiveMinimum", value - 1))
    if kind == "array":
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
            fits(schema["items"], item) for item in value)
    return kind != "object" or (all(value.get(name) is not None for name in schema.get("required", ())) and all(
        fits(s, value[name]) for name, s in schema.get("properties", {}).items() if value.get(name) is not None))


def broken(schema: Any, good: Any) -> Iterator[Any]:
    """Values that a schema forbids: other kinds, beyond bounds, and each of its parts broken in ``good``."""
    tried = list(STRANGERS)
    for name, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
        if name in schema:
            tried.append(schema[name] + step)
    if "maxItems" in schema:
        tried.append(["a"] * (schema["maxItems"] + 1))
    yield from (value for value in tried if not fits(schema, value))
    for name in schema.get("required", ()):
        if isinstance(good, dict) and name in good:
            yield {k: v for k, v in good.items() if k != name}
            yield {**good, name: None}
    for name, part in schema.get("properties", {}).items():
        known = good if isinstance(good, dict) else {}
        for value in broken(part, known.get(name)):
            if value is not None:
                yield {**known, name: value}
    if schema.get("type") == "array" and isinstance(good, list) and good:
        for value in broken(schema["items"], good[0]):
            yield [*good, value]


def test_a_body_that_the_openapi_text_forbids_is_a_400_whatever_else_runs(server: Running) -> None:
    text = server.client.get("/openapi.json").json()
    seeded, bodies, taken = random.Random(5), list[tuple[str, Any]](), list[str]()
    schemas = {path: text["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
               for path in GOOD}
    for path, good in GOOD.items():
        schema = schemas[path]
        assert fits(schema, good), path
        assert server.post(path, good).status_code == 200, path
        found = [(path, body) for body in broken(schema, good)]
        assert all(not fits(schema, body) for _, body in found)
        bodies += found
    while len(bodies) < BODIES:
        path, one = seeded.choice(bodies)
        other = seeded.choice([b for p, b in bodies if p == path])
        if isinstance(one, dict) and isinstance(other, dict):
            bodies.append((path, {**other, **one}))
    bodies = [(path, body) for path, body in seeded.sample(bodies, BODIES) if not fits(schemas[path], body)]
    assert len(bodies) > 0.9 * BODIES
    answers: list[int] = []
    beside = threading.Thread(target=lambda: answers.append(server.chat("long", max_tokens=100).status_code))
    beside.start()
    for path, body in bodies:
        answer = server.client.post(path, content=json.dumps(body).encode())
        if answer.status_code != 400 or not answer.json()["error"]["message"]:
            taken.append(f"{answer.status_code} {path} {json.dumps(body)} {answer.text[:200]}")
    beside.join(PATIENCE)
    assert not taken, "\n".join(taken)
    assert answers == [200] and server.event("engine_down") is None
    server.wait_idle()
