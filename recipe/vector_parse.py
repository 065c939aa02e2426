"""The check of one recorded parse: final body, event stream, and independence from the cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer.recipe.answer import AnswerIdentity, Event
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.difference import first_difference
from deepinfer.recipe.processor import StreamProcessor
from deepinfer.recipe.requests import convert_request
from deepinfer.recipe.tokenizer import RecipeTokenizer

PROMPT_TOKENS, CACHED_TOKENS, FINGERPRINT = 100, 64, "fp"
IDENTITY = AnswerIdentity("ID", "MODEL", clock=lambda: 0, random_id=lambda: "*")
USAGE_KEYS = ("usage",)


def check_parse(vector: dict[str, Any], tokenizer: RecipeTokenizer) -> str | None:
    """The first difference, or None."""
    request = convert_request(vector["api"], vector["request"])
    wanted = vector["expect"]
    padded = request.parsing.parse_json_output
    events, processor = replay(request, vector["chunks"], vector["finish"], tokenizer)
    body = processor.body()
    difference = first_difference(_trimmed(body, padded), _trimmed(wanted["final"], padded), "final")
    if difference:
        return difference
    found = {"stopped_early": processor.stopped_early, "sse_done": processor.done_line}
    difference = first_difference(found, {key: wanted[key] for key in found})
    if difference:
        return difference
    numbers = [event.data["sequence_number"] for event in events if "sequence_number" in event.data]
    if numbers != list(range(len(numbers))):
        return f"sequence numbers {numbers}"
    recorded = [Event(each["event"], each["data"]) for each in wanted["stream"]]
    difference = first_difference(merged(events, padded), merged(recorded, padded), "stream")
    return difference or _check_cuts(vector, request, tokenizer, body)


def replay(
    request: ConvertedRequest,
    chunks: Iterable[dict[str, Any]],
    finish: str | None,
    tokenizer: RecipeTokenizer | None,
    *,
    repair: bool = False,
) -> tuple[list[Event], StreamProcessor]:
    """All events of recorded chunks, and the processor after them."""
    processor = StreamProcessor(request, IDENTITY, tokenizer=tokenizer, repair=repair)
    events = processor.ready(PROMPT_TOKENS, CACHED_TOKENS, FINGERPRINT)
    for chunk in chunks:
        if "tokens" in chunk:
            logprobs = [(value, rivals) for value, rivals in chunk.get("logprobs", [])]
            events += processor.tokens(chunk["tokens"], logprobs)
        else:
            events += processor.text(chunk["text"], chunk.get("token_count", 0))
    events += processor.finish(finish) if finish is not None else processor.finish()
    return events, processor


def _check_cuts(
    vector: dict[str, Any], request: ConvertedRequest, tokenizer: RecipeTokenizer, body: dict[str, Any]
) -> str | None:
    """Every other cut of the same answer gives the same body, usage aside."""
    for name, chunks in _other_cuts(vector["chunks"]):
        _, processor = replay(request, chunks, vector["finish"], tokenizer)
        difference = first_difference(_without_usage(processor.body()), _without_usage(body), f"cut {name}")
        if difference:
            return difference
    return None


def _other_cuts(chunks: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    if any("tokens" in chunk for chunk in chunks):
        if any("logprobs" in chunk for chunk in chunks):
            return []
        return [("whole", [{"tokens": [token for chunk in chunks for token in chunk["tokens"]]}])]
    text = "".join(chunk["text"] for chunk in chunks)
    return [("whole", [{"text": text}]), ("chars", [{"text": letter} for letter in text])]


def _without_usage(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in USAGE_KEYS}


def _trimmed(body: dict[str, Any], padded: bool) -> dict[str, Any]:
    """In JSON mode the spaces around the JSON depend on the original's cut and are not compared."""
    if not padded:
        return body
    trimmed = dict(body)
    if "choices" in body:
        trimmed["choices"] = [
            {**each, "message": {**each["message"], "content": each["message"]["content"].strip(" ")}}
            for each in body["choices"]
        ]
    if "output" in body:
        trimmed["output"] = [_trimmed_item(item) for item in body["output"]]
    return trimmed


def _trimmed_item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") != "message":
        return item
    return {**item, "content": [{**part, "text": part["text"].strip(" ")} for part in item["content"]]}


def merged(events: Sequence[Event], padded: bool) -> list[dict[str, Any]]:
    """Events with neighbouring deltas of one kind joined: what remains is order, types and text."""
    joined: list[dict[str, Any]] = []
    for event in events:
        data = {key: value for key, value in event.data.items() if key != "sequence_number"}
        delta = _delta_of(event.name, data)
        if delta is None:
            joined.append({"event": event.name, "data": data})
            continue
        kind, text, logprobs = delta
        if joined and joined[-1].get("kind") == kind:
            joined[-1]["text"] += text
            joined[-1]["logprobs"] += logprobs
        else:
            joined.append({"kind": kind, "text": text, "logprobs": list(logprobs)})
    if padded:
        for each in joined:
            if "kind" in each:
                each["text"] = each["text"].strip(" ")
        joined = [each for each in joined if each.get("text", "+")]
    return joined


def _delta_of(name: str | None, data: dict[str, Any]) -> tuple[str, str, list[Any]] | None:
    """(kind, text, log-probabilities) of an event that only carries text on."""
    if name is None:
        return _chat_delta(data["choices"][0])
    if name == "content_block_delta":
        delta = data["delta"]
        text = next(value for key, value in delta.items() if key != "type")
        return f"{data['index']} {delta['type']}", text, []
    if name.endswith(".delta"):
        return f"{name} {data['item_id']} {data['output_index']}", data["delta"], data.get("logprobs", [])
    return None


def _chat_delta(choice: dict[str, Any]) -> tuple[str, str, list[Any]] | None:
    delta = choice["delta"]
    if "role" in delta or choice["finish_reason"] is not None:
        return None
    if "tool_calls" in delta:
        call = delta["tool_calls"][0]
        return None if "id" in call else (f"arguments {call['index']}", call["function"]["arguments"], [])
    shape = ",".join(f"{key}{'' if value is None else '!'}" for key, value in sorted(delta.items()))
    text = next((value for value in delta.values() if value is not None), "")
    logprobs = [entry for entries in (choice["logprobs"] or {}).values() for entry in entries]
    return shape, text, logprobs
