"""The tools that the scripted dialogues declare, with questions, calls, results and answers for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .chat import Call
from .entries import Entry

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Athens Prague Warsaw Tokyo Osaka Kyoto Seoul Beijing "
    "Shanghai Hangzhou Shenzhen Taipei Bangkok Hanoi Jakarta Manila Sydney Perth Auckland Cairo Nairobi Lagos Accra "
    "Toronto Montreal Boston Chicago Seattle Denver Austin Miami Lima Bogota Santiago Quito Havana Helsinki Zurich"
).split()
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
FILES = ("notes.txt", "README.md", "main.py", "setup.py", "data.csv", "report.txt", "config.json", "todo.md")
WORDS = "apple river stone cloud tiger music light paper train garden winter coffee window silver bridge".split()


@dataclass(frozen=True)
class Scene:
    """One use of a tool: what the user says, why the tool helps, the call, its result and the answer."""

    question: str
    reason: str
    call: Call
    result: str
    answer: str


@dataclass(frozen=True)
class Tool:
    schema: dict[str, Any]
    scene: Callable[[random.Random, Entry], Scene]


def _schema(
    name: str, description: str, required: list[str], /, **properties: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


def _lookup(rng: random.Random, entry: Entry) -> Scene:
    question = rng.choice(
        (
            f"Look up {entry.name} and tell me what it does.",
            f"What does the documentation say about {entry.name}?",
            f"Please check {entry.name} in the docs.",
            f"What is {entry.name}? Use the documentation.",
        )
    )
    reason = f"The user wants to know about {entry.name}. I can look it up with lookup_doc."
    result = f"{entry.signature}\n\n{entry.detail}"
    answer = f"`{entry.signature}`: {entry.summary}"
    return Scene(question, reason, Call("lookup_doc", {"name": entry.name}), result, answer)


def _search(rng: random.Random, entry: Entry) -> Scene:
    words = " ".join(word for word in entry.summary.replace("`", "").split()[:6])
    question = rng.choice((f"Search the documentation for: {words}", f"Find the docs about \"{words}\"."))
    reason = "I should search the documentation for these words with search_docs."
    call = Call("search_docs", {"query": words, "limit": 3})
    answer = f"I found `{entry.name}`. {entry.summary}"
    return Scene(question, reason, call, f"1. {entry.name}: {entry.summary}", answer)


def _weather(rng: random.Random, entry: Entry) -> Scene:
    city, degrees, sky = rng.choice(CITIES), rng.randint(-10, 38), rng.choice(CONDITIONS)
    question = rng.choice(
        (
            f"What is the weather in {city}?",
            f"What's the weather like in {city} today?",
            f"How is the weather in {city}?",
            f"Is it warm in {city}?",
            f"Tell me the weather for {city}, please.",
        )
    )
    reason = f"The user asks for the weather in {city}. I will call get_weather."
    result = f'{{"city": "{city}", "temperature": {degrees}, "condition": "{sky}"}}'
    answer = f"It is {sky} in {city}, with a temperature of {degrees} degrees."
    return Scene(question, reason, Call("get_weather", {"city": city}), result, answer)


def _clock(rng: random.Random, entry: Entry) -> Scene:
    city = rng.choice(CITIES)
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    question = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}."))
    reason = f"I need the current time in {city}. The tool get_time gives it."
    return Scene(question, reason, Call("get_time", {"city": city}), time, f"It is {time} in {city}.")


def _calculate(rng: random.Random, entry: Entry) -> Scene:
    a, b, sign = rng.randint(2, 999), rng.randint(2, 99), rng.choice("+-*")
    expression = f"{a} {sign} {b}"
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    question = rng.choice((f"What is {expression}?", f"Compute {expression}.", f"Calculate {expression} for me."))
    reason = f"I will compute {expression} with the calculator."
    return Scene(
        question, reason, Call("calculate", {"expression": expression}), str(value), f"{expression} = {value}."
    )


def _add(rng: random.Random, entry: Entry) -> Scene:
    a, b = rng.randint(1, 9999), rng.randint(1, 9999)
    question = rng.choice((f"Add {a} and {b}.", f"What is the sum of {a} and {b}?"))
    reason = f"I should add {a} and {b} with the tool add."
    return Scene(question, reason, Call("add", {"a": a, "b": b}), str(a + b), f"The sum of {a} and {b} is {a + b}.")


def _read(rng: random.Random, entry: Entry) -> Scene:
    name = rng.choice(FILES)
    body = " ".join(rng.sample(WORDS, rng.randint(3, 6)))
    question = rng.choice((f"What is in {name}?", f"Read {name} for me.", f"Show me the file {name}."))
    reason = f"I have to read {name} with read_file."
    return Scene(question, reason, Call("read_file", {"path": name}), body, f"The file {name} says: {body}")


def _convert(rng: random.Random, entry: Entry) -> Scene:
    value = rng.choice((rng.randint(1, 500), round(rng.uniform(0.5, 99), 1)))
    source, target = rng.choice((("km", "miles"), ("kg", "pounds"), ("celsius", "fahrenheit"), ("hours", "minutes")))
    result = round(value * rng.uniform(0.4, 60), 2)
    question = rng.choice((f"Convert {value} {source} to {target}.", f"How much is {value} {source} in {target}?"))
    call = Call("convert_units", {"value": value, "from_unit": source, "to_unit": target})
    reason = f"I will convert {value} {source} with convert_units."
    return Scene(question, reason, call, str(result), f"{value} {source} are {result} {target}.")


TOOLS: tuple[Tool, ...] = (
    Tool(
        _schema("lookup_doc", "Return the documentation of a Python name.", ["name"], name=_text("Qualified name")),
        _lookup,
    ),
    Tool(
        _schema(
            "search_docs",
            "Search the Python documentation.",
            ["query"],
            query=_text("Words to look for"),
            limit=_integer("Number of results"),
        ),
        _search,
    ),
    Tool(_schema("get_weather", "Get the current weather of a city.", ["city"], city=_text("City name")), _weather),
    Tool(_schema("get_time", "Get the current local time of a city.", ["city"], city=_text("City name")), _clock),
    Tool(
        _schema("calculate", "Evaluate an arithmetic expression.", ["expression"], expression=_text("Expression")),
        _calculate,
    ),
    Tool(_schema("add", "Add two integers.", ["a", "b"], a=_integer("First"), b=_integer("Second")), _add),
    Tool(_schema("read_file", "Read a text file.", ["path"], path=_text("Path of the file")), _read),
    Tool(
        _schema(
            "convert_units",
            "Convert a number between units.",
            ["value", "from_unit", "to_unit"],
            value={"type": "number"},
            from_unit={"type": "string"},
            to_unit={"type": "string"},
        ),
        _convert,
    ),
)
