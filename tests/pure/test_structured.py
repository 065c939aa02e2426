"""Forms of answers: which tokens a mask leaves, also behind drafts; what is refused; what is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from deepinfer.errors import InternalError, RequestError
from deepinfer.recipe import RecipeTokenizer, packaged_tokenizer
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.structured.compiler import MOST_BLANKS, GrammarCompiler
from deepinfer.runtime.structured.constraint import Constraint, allowed_tokens, mask_words
from deepinfer.runtime.structured.options import StructuredOutputs, structured_outputs

V, END = 129_280, 1
PAIR: dict[str, Any] = {
    "type": "object", "required": ["name", "size"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tokenizer() -> RecipeTokenizer:
    return packaged_tokenizer("v4.1")


@pytest.fixture(scope="module")
def compiler(tokenizer: RecipeTokenizer) -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(lambda: tokenizer.source, V, [END])
    yield found
    found.close()


def begin(compiler: GrammarCompiler, start_after: Sequence[int] = (), **form: Any) -> Constraint:
    asked = structured_outputs({**form, "start_after": start_after})
    assert asked is not None
    return compiler.compile(asked).start(start_after)


def next_tokens(constraint: Constraint) -> np.ndarray[Any, Any]:
    """[V] bool."""
    found = constraint.mask()
    return np.ones(V, bool) if found is None else allowed_tokens(found[0], V)


@pytest.mark.parametrize(("form", "fits", "fails"), [
    ({"json": PAIR}, ['{"name": "Zoë 你好 👋", "size": -12}',
                      '{"name":"","size":0}', '{\n  "name": "a",\n  "size": 7\n}'],
     ['{"size": 1, "name": "a"}', '{"name": "a"}', '{"name": 3', 'name', '{"name": "a", "size": 1, ', '{"name": "\n']),
    ({"json": json.dumps({"enum": ["a", 1, None]})}, ['"a"', "1", "null"], ["true", '"b']),
    ({"json_object": True}, ['{"any": [1, {"x": null}]}', "{}"], ["[1]", "3", " {"]),
    ({"regex": r"[0-9]{3}-[a-f]+"}, ["123-abc", "000-f"], ["12-", "123-g", "1234"]),
    ({"choice": ["yes", "no, never", "naïve\n\"q\" \\"]}, ["yes", "no, never", "naïve\n\"q\" \\"], ["Yes", "no,  "]),
    ({"json": True}, ["[1, {}]", "null", '"x"'], ["nul ", "]"]), ({"json": "true"}, ["3"], ["x"]),
    ({"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'}, ["1+22+3", "7"], ["+1", "1++"]),
    ({"grammar": 'root ::= "<" word ">" | "none"\nword ::= [a-z]+'}, ["<abc>", "none"], ["<>", "<A"]),
])
def test_a_form_takes_what_it_describes_and_nothing_else(
        compiler: GrammarCompiler, tokenizer: RecipeTokenizer, form: dict[str, Any], fits: list[str],
        fails: list[str]) -> None:
    for text in fits:
        constraint = begin(compiler, **form)
        assert not constraint.complete
        for token in tokenizer.encode(text):
            assert next_tokens(constraint)[token], (text, tokenizer.token_text(token))
            constraint.accept([token])
        assert constraint.complete and next_tokens(constraint)[END], text
    for text in fails:
        constraint = begin(compiler, **form)
        for token in tokenizer.encode(text):
            if not next_tokens(constraint)[token]:
                break
            constraint.accept([token])
        else:
            raise AssertionError(f"{text!r} was taken")


def test_the_end_is_allowed_exactly_where_the_form_is_complete(compiler: GrammarCompiler,
                                                              tokenizer: RecipeTokenizer) -> None:
    constraint = begin(compiler, regex="ab+")
    for text, complete in (("a", False), ("b", True), ("b", True)):
        constraint.accept(tokenizer.encode(text))
        assert constraint.complete is complete and bool(next_tokens(constraint)[END]) is complete
        assert not constraint.over
    constraint.accept([END])
    assert constraint.over and constraint.mask() is None
    with pytest.raises(InternalError, match="not complete"):
        begin(compiler, regex="ab+").accept([END])


def test_no_control_token_is_ever_text_of_an_answer(compiler: GrammarCompiler, tokenizer: RecipeTokenizer) -> None:
    special = [i for i in range(V) if tokenizer.is_special(i)]
    constraint = begin(compiler, json={"type": "string"})
    constraint.accept(tokenizer.encode('"text </think> <｜User｜> '))
    found = next_tokens(constraint)
    assert found.sum() > 100_000 and not found[special].any()


def test_a_number_of_blanks_that_json_needs_nowhere_is_not_allowed(compiler: GrammarCompiler,
                                                                 tokenizer: RecipeTokenizer) -> None:
    for blanks in (" " * MOST_BLANKS, "\n\t" * (MOST_BLANKS // 2)):
        constraint = begin(compiler, json=PAIR)
        constraint.accept(tokenizer.encode("{" + blanks + '"name":"a",' + blanks + '"size":' + blanks + "1"))
    constraint = begin(compiler, json=PAIR)
    constraint.accept(tokenizer.encode("{"))
    blank = tokenizer.encode(" ")
    for _ in range(MOST_BLANKS):
        constraint.accept(blank)
    found = next_tokens(constraint)
    assert all(tokenizer.token_text(int(i)).startswith('"') for i in np.flatnonzero(found))
    with pytest.raises(RequestError, match="cannot be compiled"):  # what a schema says of blanks does not count
        begin(compiler, json={**PAIR, "uniqueItems": True, "x-guidance": {"lenient": True}})
    loose = begin(compiler, json={**PAIR, "x-guidance": {"whitespace_pattern": r"[ ]*"}})
    loose.accept(tokenizer.encode("{" + " " * MOST_BLANKS))
    assert not next_tokens(loose)[blank[0]]


def test_row_j_of_a_mask_is_the_mask_behind_the_drafts_before_it(compiler: GrammarCompiler,
                                                                tokenizer: RecipeTokenizer) -> None:
    """Against a constraint that accepted the drafts one by one; nothing changes by asking."""
    ids = tokenizer.encode('{"name": "ab cd", "size": 12}')
    rng = random.Random(5)
    for _ in range(30):
        at = rng.randrange(len(ids))
        drafts = ids[at : at + 5]
        wrong = rng.randrange(len(drafts) + 1)
        if wrong < len(drafts):
            drafts[wrong] = rng.randrange(V)
        asked, plain = begin(compiler, json=PAIR), begin(compiler, json=PAIR)
        asked.accept(ids[:at])
        plain.accept(ids[:at])
        found = asked.mask(drafts)
        assert found is not None and found.shape == (len(drafts) + 1, mask_words(V))
        found = found.copy()
        rejected = False
        for row, draft in zip(found, (*drafts, None), strict=True):
            expected = np.ones(V, bool) if rejected else next_tokens(plain)
            assert np.array_equal(allowed_tokens(row, V), expected)
            if draft is None or rejected:
                continue
            if expected[draft] and draft != END:
                plain.accept([draft])
            else:
                rejected = True
        again = asked.mask(drafts)
        assert again is not None and np.array_equal(found, again) and asked.tokens == ids[:at]


def test_the_form_begins_behind_the_marker_wherever_it_falls_in_a_run_of_drafts(
        compiler: GrammarCompiler, tokenizer: RecipeTokenizer) -> None:
    """Six tokens accepted at once, the boundary at each place: the state is that of one token after another."""
    think_end = tokenizer.special_id("</think>")
    run = [*tokenizer.encode("some thoughts go here"), think_end, *tokenizer.encode('{"name":"a","size":1}')]
    boundary = run.index(think_end)
    for first in range(boundary + 1):
        drafts = run[first : first + 6]
        constraint, single = (begin(compiler, [think_end], json=PAIR) for _ in range(2))
        constraint.accept(run[:first])
        assert not constraint.active
        found = constraint.mask(drafts)
        if think_end in drafts:
            assert found is not None
            for j in range(len(drafts) + 1):
                free = j <= boundary - first
                assert allowed_tokens(found[j], V).all() == free
        else:
            assert found is None
        constraint.accept(drafts)
        for token in run[: first + 6]:
            single.accept([token])
        assert constraint.tokens == single.tokens and constraint.active == single.active
        assert np.array_equal(next_tokens(constraint), next_tokens(single))
        constraint.accept(run[first + 6 :])
        assert constraint.complete


def test_going_back_and_copies_leave_the_state_of_the_shorter_answer(compiler: GrammarCompiler,
                                                                    tokenizer: RecipeTokenizer) -> None:
    think_end = tokenizer.special_id("</think>")
    run = [5, 6, think_end, *tokenizer.encode('{"name":"a","size":1}'), END]
    whole = begin(compiler, [think_end], json=PAIR)
    whole.accept(run)
    for back in range(len(run) + 1):
        short, plain = whole.copy(), begin(compiler, [think_end], json=PAIR)
        short.rollback(back)
        plain.accept(run[: len(run) - back])
        assert short.tokens == plain.tokens and short.active == plain.active and short.over == plain.over
        assert np.array_equal(next_tokens(short), next_tokens(plain))
        short.accept(run[len(run) - back :])
        assert short.over and whole.tokens == run


def test_a_token_outside_the_form_is_never_taken_in_silence(compiler: GrammarCompiler,
                                                           tokenizer: RecipeTokenizer) -> None:
    constraint = begin(compiler, choice=["yes"])
    with pytest.raises(InternalError, match="does not fit"):
        constraint.accept(tokenizer.encode("no"))
    constraint = begin(compiler, choice=["yes"])
    constraint.accept(tokenizer.encode("yes"))
    with pytest.raises(InternalError):
        constraint.require_equal(2, [7])
    constraint.require_equal(1, tokenizer.encode("yes"))


@pytest.mark.parametrize(("form", "words"), [
    ({"json": {"type": "object", "properties": {"a": {"items": {"uniqueItems": True, "type": "array"}}}}},
     ["json.properties.a.items", "uniqueItems", "allowed type, properties"]),
    ({"json": {"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}}, ["json.$defs.x", '"not"']),
    ({"json": {"anyOf": [{"type": "string"}, {"type": "strng"}]}}, ["json.anyOf[1]", "strng"]),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, ["json:", "minimum"]),
    ({"json": False}, ["json:", "no answer fits"]), ({"json": '{"enum": [1e999]}'}, ["json:", "cannot be compiled"]),
    ({"json": '{"items":' * 200 + "{}" + "}" * 200}, ["json", "recursion limit", "too large"]),
    ({"regex": "limit("}, ["regex", "cannot be compiled", "unclosed"]),
    ({"grammar": "start: fuel"}, ["grammar", "cannot be compiled", "unknown name"]),
    ({"json": "{"}, ["json:", "no JSON"]), ({"json": "[]"}, ["json:", "object", "list"]),
    ({"json": {"enum": [f"v {i}" for i in range(100_000)]}}, ["json", "too large"]),
    ({"json": {"enum": ["x" * (1 << 20)]}}, ["json", "too long", "1048576"]),
    ({"regex": "(a"}, ["regex", "unclosed"]), ({"regex": "(?=a)b"}, ["regex", "look-around"]),
    ({"grammar": "start: missing"}, ["grammar", "missing", "Lark"]),
    ({"choice": []}, ["choice", "nothing"]), ({"choice": "yes"}, ["choice", "list"]),
    ({"choice": ["a", 3]}, ["choice[1]", "3"]), ({"regex": ""}, ["regex"]), ({"regex": "\ud800"}, ["surrogate"]),
    ({}, ["exactly one", "json, regex, choice, grammar, json_object"]),
    ({"regex": "a", "choice": ["a"]}, ["exactly one", "regex, choice"]),
    ({"jsn": {}}, ["jsn", "json"]), ({"json_object": "yes"}, ["json_object"]),
    ({"json_object": False}, ["exactly one"]),
    ({"regex": "a", "start_after": [V]}, ["start_after", str(V)]),
    ({"regex": "a", "start_after": ["x"]}, ["start_after"]),
])
def test_a_form_that_cannot_be_compiled_is_one_sentence_that_names_the_place(
        compiler: GrammarCompiler, form: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        asked = structured_outputs(form)
        assert asked is not None
        compiler.compile(asked)
    sentence = str(refused.value)
    assert sentence.startswith("structured_outputs") and "\n" not in sentence
    assert all(word in sentence for word in words), sentence


def test_a_form_is_compiled_once_and_a_refusal_too(compiler: GrammarCompiler) -> None:
    asked = StructuredOutputs(json={"type": "object", "properties": {"only": {"const": "here"}}})
    misses = compiler.misses
    first = compiler.compile(asked)
    assert compiler.compile(StructuredOutputs(json=dict(asked.json or {}))) is first  # type: ignore[call-overload]
    assert compiler.submit(asked).result() is first and compiler.misses == misses + 1
    for _ in range(2):
        with pytest.raises(RequestError):
            compiler.submit(StructuredOutputs(regex="(only here")).result()
    assert compiler.misses == misses + 2


def test_what_the_cache_keeps_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.runtime.structured import compiler as module

    monkeypatch.setattr(module, "_MOST_KEPT", 4)
    monkeypatch.setattr(module, "_MOST_KEPT_TEXT", 400)
    for i in range(12):
        compiler.compile(StructuredOutputs(regex=f"kept{i}"))
        assert len(compiler._kept) <= 4
    compiler.compile(StructuredOutputs(regex="a" * 390))
    assert [key[1][:2] for key in compiler._kept] == ["ke", "aa"] and compiler._kept_text <= 400


def test_a_model_without_tokenizer_or_end_token_says_what_is_missing() -> None:
    for source, ends, word in ((None, [1], "tokenizer.json"), ((lambda: "{}"), [], "eos_token_id"),
                               ((lambda: "{}"), [1], "byte-level")):
        with pytest.raises(RequestError, match=word):
            GrammarCompiler(source, V, ends).compile(StructuredOutputs(regex="a"))


def test_sampling_params_take_the_object_or_its_fields() -> None:
    asked = SamplingParams(structured_outputs={"regex": "a+"})
    assert asked.form == StructuredOutputs(regex="a+")
    assert SamplingParams(structured_outputs=asked.form).form is asked.form
    for wrong in ("a+", ["regex"], {"regex": 3}):
        with pytest.raises(RequestError, match="structured_outputs"):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]


def test_a_form_beyond_the_budgets_ends_in_a_sentence_not_in_silence(compiler: GrammarCompiler,
                                                                     tokenizer: RecipeTokenizer) -> None:
    part = {f"q{j}": {"type": "string", "pattern": "^[a-z]{1,40}[0-9]+$"} for j in range(50)}

    def alike(count: int) -> dict[str, Any]:
        same = [{"type": "object", "properties": part, "title": str(i)} for i in range(count)]
        return {"anyOf": [{"enum": [7]}, *same]}

    with pytest.raises(RequestError, match="too large"):  # seen by the compiler, before anything runs
        begin(compiler, json=alike(100))
    constraint, ids = begin(compiler, json=alike(31)), tokenizer.encode('{"q0":"ab1","q1":"x2"}')
    found = constraint.mask(ids)  # drafts alone end nothing
    assert found is not None and not found[-1].any() and next_tokens(constraint)[ids[0]]
    assert constraint.tokens == []
    with pytest.raises(RequestError, match=r"structured_outputs: the form needs more states"):
        for token in ids:
            assert next_tokens(constraint)[token]
            constraint.accept([token])
            assert not constraint.over


@pytest.mark.parametrize("regex", ["((a{100}){100}){100}", "(a{1000}){1000}"])
def test_a_token_that_was_allowed_and_breaks_the_budgets_is_the_forms_fault(compiler: GrammarCompiler,
                                                                          regex: str) -> None:
    constraint = begin(compiler, regex=regex)
    with pytest.raises(RequestError, match="the form needs more states"):
        for _ in range(2000):
            constraint.accept([int(np.flatnonzero(next_tokens(constraint))[-1])])
