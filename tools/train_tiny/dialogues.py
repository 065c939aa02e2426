"""Short scripted dialogues about the Python documentation, for the chat part of the training text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from .chat import Dialogue, Turn
from .entries import Entry
from .scenes import TOOLS, WORDS, Scene

SYSTEM_TEXTS = (
    "",
    "You are a helpful assistant.",
    "You are a helpful assistant that knows the Python documentation.",
    "Answer briefly.",
    "You are a friendly assistant. Keep answers short.",
)
WHO = (
    "I am a small demonstration model. I was trained on the Python documentation, so I can tell you what functions "
    "and classes do, and I can call tools."
)
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hello!", "Hi!", "Hey", "Good morning!", "hello there"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."), WHO),
    (
        ("What can you do?", "How can you help me?", "What do you know?"),
        "I can explain names of the Python standard library, and I can use the tools that you give me.",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot.", "thank you very much"), "You are welcome!"),
    (("Bye", "Goodbye!", "See you later."), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. What would you like to know?"),
    (
        ("What is Python?", "Explain Python.", "Tell me about Python."),
        "Python is a programming language with a large standard library. Ask me about one of its modules.",
    ),
)
_ASK_WHAT = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "Tell me about {name}.",
    "what is {name} for?",
    "Can you explain {name}?",
    "How does {name} work?",
    "I do not understand {name}.",
)


def _what(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    """(question, reasoning, answer) about what a name does."""
    question = rng.choice(_ASK_WHAT).format(name=entry.name)
    place = f" in the module {entry.module}" if entry.module else ""
    reasoning = f"The user asks about {entry.name}. It is a {entry.kind}{place}. I will say what it does."
    answer = rng.choice((f"`{entry.signature}`: {entry.summary}", f"{entry.name}: {entry.detail}"))
    return question, reasoning, answer


def _signature(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    asks = ("What is the signature of {name}?", "Show me the signature of {name}.", "How do I call {name}?")
    question = rng.choice(asks)
    reasoning = f"The user wants the signature of {entry.name}."
    return question.format(name=entry.name), reasoning, f"The signature is `{entry.signature}`."


def _module(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    question = f"Which module has {entry.name.rsplit('.', 1)[-1]}?"
    reasoning = f"The name is {entry.name}."
    return question, reasoning, f"It is in the module {entry.module or 'builtins'}: `{entry.name}`."


def _as_json(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    question = f"Describe {entry.name} as JSON with the keys name, kind and summary."
    value = {"name": entry.name, "kind": entry.kind, "summary": entry.summary}
    return question, f"I will write a JSON object about {entry.name}.", json.dumps(value, ensure_ascii=False)


def _small_talk(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), "This is small talk. I will answer politely.", answer


def _copy(rng: random.Random, entry: Entry) -> tuple[str, str, str]:
    words = rng.sample(WORDS, rng.randint(2, 7))
    text = " ".join(words)
    question, answer = rng.choice(
        (
            (f"Repeat: {text}", text),
            (f"Say these words again: {text}", text),
            (f"How many words are these: {text}?", f"These are {len(words)} words."),
            (f"Write in upper case: {text}", text.upper()),
            (f"What is the first word of: {text}?", f"The first word is {words[0]}."),
            (f"What is the last word of: {text}?", f"The last word is {words[-1]}."),
            (f"Count to {len(words)}.", ", ".join(str(i + 1) for i in range(len(words))) + "."),
        )
    )
    return question, "This is a simple task about words.", answer


_ASKERS: tuple[tuple[float, Callable[[random.Random, Entry], tuple[str, str, str]]], ...] = (
    (6, _what),
    (2, _signature),
    (1, _module),
    (1, _as_json),
    (2, _small_talk),
    (2, _copy),
)


def _ask(rng: random.Random, entry: Entry) -> list[Turn]:
    weights = [weight for weight, _ in _ASKERS]
    question, reasoning, answer = rng.choices([asker for _, asker in _ASKERS], weights)[0](rng, entry)
    return [Turn("user", question), Turn("assistant", answer, reasoning)]


def _use(scenes: list[Scene]) -> list[Turn]:
    """One question that takes one call a scene, made together, and one answer."""
    calls = tuple(scene.call for scene in scenes)
    turns = [
        Turn("user", " ".join(scene.question for scene in scenes)),
        Turn("assistant", "", " ".join(scene.reason for scene in scenes), calls),
    ]
    turns += [Turn("tool", scene.result) for scene in scenes]
    noun = "result is" if len(scenes) == 1 else "results are"
    return [*turns, Turn("assistant", " ".join(s.answer for s in scenes), f"The {noun} there. I can answer now.")]


def make_dialogue(rng: random.Random, entries: list[Entry]) -> Dialogue:
    """One random dialogue of one to three questions, with or without tools, thinking and a system text."""
    thinking = rng.random() < 0.5
    with_tools = rng.random() < 0.45
    tools = rng.sample(TOOLS, rng.randint(1, 3)) if with_tools else []
    turns: list[Turn] = []
    system = rng.choice(SYSTEM_TEXTS)
    if system:
        turns.append(Turn("system", system))
    for _ in range(rng.choices((1, 2, 3), (5, 3, 1))[0]):
        if tools and rng.random() < 0.8:
            used = rng.sample(tools, 2) if len(tools) > 1 and rng.random() < 0.2 else [rng.choice(tools)]
            turns += _use([tool.scene(rng, rng.choice(entries)) for tool in used])
        else:
            turns += _ask(rng, rng.choice(entries))
    schemas = tuple(tool.schema for tool in tools)
    effort = rng.choices((75, 50, 100), (8, 1, 1))[0]
    return Dialogue(tuple(turns), schemas, thinking, effort)
