"""The grammar of tool calls: what the renderer writes fits it, what breaks a strict schema does not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deepinfer.recipe import (
    DIALECTS,
    Conversation,
    ConversionError,
    Dialect,
    RecipeTokenizer,
    Tool,
    ToolCall,
    User,
    calls_grammar,
    packaged_tokenizer,
    render,
)
from deepinfer.recipe.conversation import Assistant
from deepinfer.recipe.dialect import DSML
from deepinfer.runtime.structured.compiler import JSON_BLANKS, Grammar, GrammarCompiler
from deepinfer.runtime.structured.constraint import allows
from deepinfer.runtime.structured.options import StructuredOutputs

V = 129_280
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "n": {"type": "integer"}, "unit": {"enum": ["C", "F", None]},
        "short": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "ref": {"$ref": "#/$defs/E"},
        "mail": {"type": "string", "format": "email"}, "path": {"type": "string", "pattern": "^a/b+$"},
        "inner": {"type": "string", "pattern": "x[0-9]"}, "list": {"type": "array", "items": {"$ref": "#/$defs/E"}},
        "two": {"type": ["string", "boolean"]}, "any": {}, "ip": {"type": "string", "format": "ipv6"},
    },
    "$defs": {"E": {"enum": ["x", "y"], "type": "string"}},
}
GOOD: dict[str, Any] = {"city": 'Zürich "West"\n</b> 2>&1', "n": -3, "unit": None, "short": "abc", "ref": "y",
                        "mail": "a.b@c.de", "path": "a/bb", "inner": "ax1b", "list": ["x"], "two": True,
                        "any": {"q": 1}, "ip": "fe80::1:2"}
TOOLS = (Tool("f", "d", SCHEMA, True), Tool("g", None, {}), Tool("h", None, {"type": "object", "properties": {}}, True))


@pytest.fixture(scope="module")
def tokenizer() -> RecipeTokenizer:
    return packaged_tokenizer("v4.1")


@pytest.fixture(scope="module")
def compiler(tokenizer: RecipeTokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer.source, V, [1])


def grammar_of(compiler: GrammarCompiler, tokenizer: RecipeTokenizer, dialect: Dialect, **options: Any) -> Grammar:
    text = calls_grammar(TOOLS, dialect, tokenizer.special_id(DSML), blanks=JSON_BLANKS, **options)
    return compiler.compile(StructuredOutputs(grammar=text))


def rendered(dialect: Dialect, *calls: tuple[str, Any]) -> str:
    """The block of calls as the renderer writes it, from the first character behind its first control token."""
    made = tuple(ToolCall(str(i), name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls))
    messages = (User(("hi",)), Assistant("", None, made), User(("x",)))
    text = "".join(span for _, span in render(Conversation(messages, False, None, TOOLS), dialect).spans())
    close = f"</{DSML}{dialect.calls_tag}>"
    begin = text.rindex(f"<{DSML}{dialect.calls_tag}>") + len(f"<{DSML}")
    return text[begin : text.rindex(close)] + close


def fits(grammar: Grammar, tokenizer: RecipeTokenizer, text: str) -> bool:
    constraint = grammar.start()
    for piece in re.split(f"({DSML})", text):
        for token in [tokenizer.special_id(DSML)] if piece == DSML else tokenizer.encode(piece):
            mask = constraint.mask()
            if mask is None or not allows(mask[0], token):
                return False
            constraint.accept([token])
    return constraint.over


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_what_the_renderer_writes_fits(compiler: GrammarCompiler, tokenizer: RecipeTokenizer, dialect: Dialect) -> None:
    grammar = grammar_of(compiler, tokenizer, dialect)
    assert fits(grammar, tokenizer, rendered(dialect, ("f", GOOD)))
    many = [("f", GOOD), ("g", {}), ("g", {"text": "t", "list": [1, {"a": None}]}), ("h", {})]
    assert fits(grammar, tokenizer, rendered(dialect, *many))
    opened = grammar_of(compiler, tokenizer, dialect, opened=True)
    assert fits(opened, tokenizer, rendered(dialect, *many).removeprefix(f"{dialect.calls_tag}>\n"))
    either = grammar_of(compiler, tokenizer, dialect, answer='"yes"')
    assert fits(either, tokenizer, "yes") and fits(either, tokenizer, f"\n\n<{DSML}" + rendered(dialect, *many))


@pytest.mark.parametrize("wrong", [
    {"n": "3"}, {"n": 1.5}, {"unit": "K"}, {"short": "abcd"}, {"ref": "z"}, {"mail": "ab"}, {"path": "xa/b"},
    {"path": "a/bc"}, {"inner": "x"}, {"list": ["z"]}, {"two": 3}, {"extra": 1}, {"n": ...}, {"ip": "12"},
])
def test_arguments_that_break_a_strict_schema_do_not_fit(compiler: GrammarCompiler, tokenizer: RecipeTokenizer,
                                                         wrong: dict[str, Any]) -> None:
    dialect = DIALECTS["v4.1"]
    arguments = {name: value for name, value in {**GOOD, **wrong}.items() if value is not ...}
    assert not fits(grammar_of(compiler, tokenizer, dialect), tokenizer, rendered(dialect, ("f", arguments)))


def test_only_declared_tools_can_be_called(compiler: GrammarCompiler, tokenizer: RecipeTokenizer) -> None:
    dialect = DIALECTS["v4.1"]
    assert not fits(grammar_of(compiler, tokenizer, dialect), tokenizer, rendered(dialect, ("nobody", {})))


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "string", "format": "colour"}, "unknown format 'colour'; allowed: email"),
    ({"$ref": "#/$defs/nowhere"}, "leads nowhere"), ({"$ref": "#/$defs/loop"}, "refers to itself"),
    ({"type": "string", "pattern": "^a|b$"}, "needs a group"), (False, "no value fits"),
])
def test_a_parameter_without_a_grammar_is_named(schema: Any, words: str) -> None:
    tool = Tool("f", None, {"type": "object", "properties": {"p": schema},
                            "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, True)
    with pytest.raises(ConversionError, match=re.escape(words)) as refused:
        calls_grammar([tool], DIALECTS["v4.1"], 5, blanks=JSON_BLANKS)
    assert refused.value.message.startswith("f: parameters.properties.p")
