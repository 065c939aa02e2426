"""From the description of a form to a grammar that answers can start from, each compiled once and kept.

Compiling is bounded in time by the library's budgets (`LLParserLimits`) and in size by the length of a description
and of the cache. It needs no lock of the loop: whoever must not wait gives the work to `submit`.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from deepinfer.errors import RequestError
from deepinfer.runtime.structured.constraint import Constraint
from deepinfer.runtime.structured.options import WHERE, StructuredOutputs
from deepinfer.runtime.structured.places import faulty_place
from deepinfer.runtime.structured.vocabulary import grammar_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MOST_BLANKS = 8  # between two tokens of JSON: a model that only writes blanks would otherwise never end
JSON_BLANKS = rf"[ \n\r\t]{{0,{MOST_BLANKS}}}"
# what a schema must not change by itself, besides being strict about words the library does not know
JSON_RULES: JsonCompileOptions = {"whitespace_pattern": JSON_BLANKS, "item_separator": ",", "key_separator": ":",
                                  "lenient": False, "coerce_one_of": False}
_SCHEMA_WORDS = ("type, properties, required, additionalProperties, patternProperties, items, prefixItems, minItems, "
                 "maxItems, enum, const, anyOf, allOf, $ref, $defs, pattern, format, minLength, maxLength, minimum, "
                 "maximum, exclusiveMinimum, exclusiveMaximum, multipleOf")
_ALLOWED = {"json": _SCHEMA_WORDS, "json_object": _SCHEMA_WORDS, "regex": "Rust's syntax without look-around",
            "choice": "texts", "grammar": "Lark's syntax with the rule `start`, or GBNF with the rule `root`"}
_MOST_KEPT = 256  # grammars
_MOST_KEPT_TEXT = 16 << 20  # characters of their descriptions
_WORKERS = 1  # a second one would only take processors from the engine
_MOST_LEXER_STATES = 100_000  # 1 to 2 kB each
_OUT_OF_BUDGET = re.compile(  # how the library says so; a word alone may be one of the description
    r"too many (items|states|expressions)|too (big|large)|max is \d|(size|recursion) limit|fuel (exhausted|exceeded)",
    re.IGNORECASE)


class Grammar:
    """A compiled form of answers."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self._lock = Lock()

    def start(self, start_after: Iterable[int] = ()) -> Constraint:
        """A new answer's constraint."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return Constraint(matcher, self._vocabulary, self._ends, start_after)


class GrammarCompiler:
    """Compiles for one model. Every method may be called from any thread.

    Args:
        tokenizer_json: gives the content of the model's tokenizer.json; None: there is none.
        vocabulary: V. ``ends``: ids of the model's end tokens.
    """

    def __init__(self, tokenizer_json: Callable[[], str] | None, vocabulary: int, ends: Iterable[int]) -> None:
        self._json, self._vocabulary, self._ends = tokenizer_json, vocabulary, frozenset(ends)
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], Grammar | RequestError] = OrderedDict()
        self._kept_text = 0
        self._lock, self._tokens_lock = Lock(), Lock()
        self._workers: ThreadPoolExecutor | None = None
        self.hits = self.misses = 0

    @property
    def possible(self) -> bool:
        """Whether the model has what a form needs: a tokenizer.json and an end token."""
        return self._json is not None and bool(self._ends)

    def warm(self) -> LLTokenizer:
        """Read the vocabulary, which takes a second for 130,000 tokens; later calls return at once."""
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = grammar_tokens(self._json, self._vocabulary, self._ends)
            return self._tokens

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """The grammar of a form.

        Raises:
            RequestError: it cannot be compiled; the sentence names the place and what is allowed there.
        """
        wrong = [i for i in asked.start_after if i >= self._vocabulary]
        if wrong:
            raise RequestError("token id out of range", where=f"{WHERE}.start_after", found=wrong[0],
                               allowed=f"0..{self._vocabulary - 1}")
        key = (asked.kind, asked.text)
        found = self._look_up(key)
        if found is None:
            try:
                found = self._build(asked)
            except RequestError as error:
                found = error
            self._keep(key, found)
        if isinstance(found, RequestError):
            raise found
        return found

    def submit(self, asked: StructuredOutputs) -> Future[Grammar]:
        """`compile` on a thread of its own; a grammar that is kept is there at once."""
        done: Future[Grammar] = Future()
        found = self._look_up((asked.kind, asked.text), count=False)
        if isinstance(found, Grammar):
            done.set_result(found)
            return done
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        return self._workers.submit(self.compile, asked)

    def close(self) -> None:
        """End the threads; what waits for them is dropped."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=False, cancel_futures=True)

    # ---- inside -------------------------------------------------------------------------------------------------
    def _look_up(self, key: tuple[str, str], count: bool = True) -> Grammar | RequestError | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            if count:
                self.hits += found is not None
                self.misses += found is None
            return found

    def _keep(self, key: tuple[str, str], found: Grammar | RequestError) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept_text += len(key[1])
            self._kept[key] = found
            while len(self._kept) > _MOST_KEPT or self._kept_text > _MOST_KEPT_TEXT:
                old, _ = self._kept.popitem(last=False)
                self._kept_text -= len(old[1])

    def _build(self, asked: StructuredOutputs) -> Grammar:
        from llguidance import LLMatcher

        tokens, where = self.warm(), f"{WHERE}.{asked.kind}"
        if asked.kind in ("json", "json_object"):
            schema = parsed_schema(asked.text, where)
            try:
                text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_RULES)
            except ValueError as error:
                check_schema(schema, where)
                raise refused(asked.kind, where, str(error)) from None
        else:
            text = _library_text(asked, where)
        matcher = LLMatcher(tokens, text, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one is the slowest, and shows whether the budgets are enough
        if matcher.is_error():
            check_form(asked)  # which finds the place
            raise refused(asked.kind, where, matcher.get_error())
        return Grammar(matcher, self._vocabulary, self._ends)


def check_schema(schema: object, where: str) -> None:
    """Raise RequestError where a JSON schema cannot be enforced; no model is needed for that.

    ``where``: the schema's place in the request.
    """
    def error_of(part: object) -> str | None:
        try:
            return _checked(LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=JSON_RULES))
        except ValueError as error:
            return str(error)

    from llguidance import LLMatcher

    schema = _object(schema, where)
    found = error_of(schema)
    if found is not None:
        place, message = faulty_place(schema, error_of)
        raise refused("json", where + place, message or found)


def check_form(form: StructuredOutputs, where: str | None = None) -> None:
    """Raise RequestError where a form cannot be enforced. ``where``: its place, if not `structured_outputs`."""
    where = f"{where or WHERE}.{form.kind}"
    if form.kind in ("json", "json_object"):
        check_schema(parsed_schema(form.text, where), where)
    else:
        found = _checked(_library_text(form, where))
        if found is not None:
            raise refused(form.kind, where, found)


def _checked(grammar: str) -> str | None:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return messages[0] if failed else None


def parsed_schema(text: str, where: str) -> dict[str, object]:
    """A JSON schema from its text. RequestError where it is none. ``where``: its place in the request."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("the schema is no JSON", where=where, found=str(error)) from None
    return _object(schema, where)


def _object(schema: object, where: str) -> dict[str, object]:
    """A schema in the form of an object, the only one that the library takes."""
    if schema is False:
        raise RequestError("no answer fits the schema false", where=where, next_step="give the answer a form")
    if schema is not True and not isinstance(schema, dict):
        raise RequestError("a JSON schema is an object", where=where, found=type(schema).__name__)
    return {} if schema is True else schema


def _library_text(form: StructuredOutputs, where: str) -> str:
    """Anything but a schema in the library's own words."""
    from llguidance import LLMatcher

    if form.kind == "regex":
        return LLMatcher.grammar_from_regex(form.text)
    if form.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in form.choice or ()))
    return LLMatcher.grammar_from_lark(_lark(form.text, where))


def refused(kind: str, where: str, message: str) -> RequestError:
    """The error for a description that the library refuses."""
    words = " ".join(message.split())
    if _OUT_OF_BUDGET.search(words):
        return RequestError("the form is too large to be compiled", where=where, found=words[:300],
                            next_step="make it smaller, or allow more in it")
    return RequestError("the form cannot be compiled", where=where, found=words[:300], allowed=_ALLOWED[kind])


def limits() -> LLParserLimits:
    """Budgets of one grammar: compiling stays below about a second (choices: 2 s at 50,000 texts), a mask below about
    20 ms. A grammar in which each part may be read in many ways takes longer (measured: up to 0.4 s);
    budgets that cut that short would refuse schemas of 10,000 properties."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)


def _lark(text: str, where: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises what its parser raises
        raise refused("grammar", where, str(error)) from None
