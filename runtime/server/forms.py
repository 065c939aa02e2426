"""The form that an answer must have, from what an API calls it to what the engine enforces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.recipe import (
    Assistant,
    Constraint,
    ConversionError,
    ConvertedRequest,
    InitialStage,
    RecipeTokenizer,
    Tool,
    calls_grammar,
)
from deepinfer.recipe.call_grammar import json_rule, slashed
from deepinfer.recipe.dialect import DIALECTS, DSML, THINK_END
from deepinfer.recipe.fields import Field
from deepinfer.recipe.schemas import strict_schema
from deepinfer.runtime.server.failures import HttpFailure
from deepinfer.runtime.structured.compiler import JSON_BLANKS, check_form, check_schema, parsed_schema
from deepinfer.runtime.structured.options import WHERE, structured_outputs

_FORMAT = {"chat": "response_format", "responses": "text.format", "messages": "output_config.format"}
_SCHEMA = {"chat": "json_schema.schema", "responses": "schema", "messages": "schema"}
_PARAMETERS = {"chat": "function.parameters", "responses": "parameters", "messages": "input_schema"}

Form = dict[str, Any]
"""Keyword arguments of StructuredOutputs."""


def form_of(request: ConvertedRequest, tokenizer: RecipeTokenizer) -> Form | None:
    """What a conversation asks of its answer; None: any text.

    Thinking is free: a format begins behind the end of the reasoning. Calls are held to their tools' schemas when one
    is forced, when one of the tools is `strict`, or where a format would otherwise forbid them.

    Raises:
        RequestError: a schema or pattern that cannot be enforced, with its place in the request.
    """
    constraint, tools = request.inference.constraint, request.conversation.tools
    if constraint is None:
        return None
    forced, is_format = constraint.kind == "tool_call_required", constraint.kind in ("json", "regex")
    strict = [tool for tool in tools if tool.strict]
    for tool in strict:
        check_schema(strict_schema(tool.parameters), f"tools.{tool.name}.{_PARAMETERS[request.api]}")
    if not is_format and not forced and not strict:
        return None
    if not is_format:
        begin = [] if forced else [tokenizer.special_id(DSML)]
        return {"grammar": _calls(request, tools, tokenizer, opened=forced), "start_after": begin}
    _refuse_prefix(request)
    form = _format(constraint, request)
    if tools:
        form = {"grammar": _calls(request, tools, tokenizer, answer=_rule(form))}
    return {**form, "start_after": reasoning_end(request, tokenizer)}


def asked_form(root: Field, start_after: Sequence[int] = ()) -> Form | None:
    """The extension field `structured_outputs`, under vLLM's names.

    ``start_after``: where the form begins unless the field says so itself.

    Raises:
        RequestError: it is no such object, or cannot be enforced.
    """
    field = root.optional(WHERE)
    if field is None:
        return None
    form = dict(field.object().value)
    if not form.get("start_after"):
        form["start_after"] = list(start_after)
    found = structured_outputs(form)
    assert found is not None
    check_form(found)
    return {found.kind: list(found.choice or ()) if found.kind == "choice" else found.text,
            "start_after": list(found.start_after)} if found.kind != "json_object" else {
                "json_object": True, "start_after": list(found.start_after)}


def reasoning_end(request: ConvertedRequest, tokenizer: RecipeTokenizer) -> list[int]:
    """The id behind which the answer proper begins; none where the prompt is past the reasoning."""
    stages = (InitialStage.REASONING_START, InitialStage.REASONING_CONTINUATION)
    return [tokenizer.special_id(THINK_END)] if request.parsing.initial_stage in stages else []


def _format(constraint: Constraint, request: ConvertedRequest) -> Form:
    where = _FORMAT[request.api]
    if constraint.kind == "regex":
        form: Form = {"regex": constraint.schema}
        found = structured_outputs(form)
        assert found is not None
        check_form(found, where)
        return form
    if not constraint.schema:
        return {"json_object": True}
    check_schema(json.loads(constraint.schema), f"{where}.{_SCHEMA[request.api]}")
    return {"json": constraint.schema}


def _rule(form: Form) -> str:
    """A form as the body of a rule."""
    if "regex" in form:
        return f"/{slashed(form['regex'])}/"
    return json_rule(parsed_schema(form["json"], WHERE) if "json" in form else {"type": "object"}, JSON_BLANKS)


def _calls(request: ConvertedRequest, tools: Sequence[Tool], tokenizer: RecipeTokenizer, *, opened: bool = False,
           answer: str | None = None) -> str:
    try:
        return calls_grammar(tools, DIALECTS[request.dialect], tokenizer.special_id(DSML), blanks=JSON_BLANKS,
                             opened=opened, answer=answer)
    except ConversionError as error:
        raise ConversionError(f"tools.{error.message}") from None


def _refuse_prefix(request: ConvertedRequest) -> None:
    last = request.conversation.messages[-1] if request.conversation.messages else None
    if isinstance(last, Assistant) and last.prefix and last.content:
        raise HttpFailure(400, f"{_FORMAT[request.api]} cannot be enforced behind a prefix: the form would have to "
                               "begin inside of it.", param=_FORMAT[request.api])
