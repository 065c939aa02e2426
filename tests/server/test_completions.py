"""Plain completions through the official client: text and ids, holes, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server.running import MODEL, Running

TEXT = "one two three four five"
PROMPT = "say:stops"


def test_a_text_is_continued_and_a_stream_says_the_same(openai_client: openai.OpenAI) -> None:
    done = openai_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=50)
    assert (done.choices[0].text, done.choices[0].finish_reason, done.object) == (TEXT, "stop", "text_completion")
    chunks = list(openai_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=50, stream=True,
                                                   stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == done.usage


def test_ids_are_a_prompt_like_the_text_they_spell(openai_client: openai.OpenAI, server: Running) -> None:
    ids = [0, *server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]]
    for prompt in (ids, [ids], [PROMPT]):
        done = openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=50)  # type: ignore[arg-type]
        assert done.choices[0].text == TEXT
        assert done.usage is not None and done.usage.prompt_tokens == len(ids)


def test_a_suffix_makes_a_hole_of_control_tokens(openai_client: openai.OpenAI, server: Running) -> None:
    done = openai_client.completions.create(model=MODEL, prompt=PROMPT, suffix=" the end", max_tokens=50)
    assert done.choices[0].text == TEXT
    plain = [len(server.post("/tokenize", {"prompt": p}).json()["tokens"]) for p in (PROMPT, " the end")]
    assert done.usage is not None and done.usage.prompt_tokens == sum(plain) + 4


def test_echo_with_logprobs_scores_the_prompt(openai_client: openai.OpenAI, server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    done = openai_client.completions.create(model=MODEL, prompt=[0, *ids], max_tokens=0, echo=True, logprobs=1)
    choice = done.choices[0]
    assert choice.logprobs is not None and choice.text.endswith(PROMPT) and choice.finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 0
    values: Any = choice.logprobs.token_logprobs
    assert values[0] is None and values[1:] == pytest.approx([0] * len(ids), abs=1e-6)
    assert "".join(choice.logprobs.tokens or []) == choice.text
    offsets: Any = choice.logprobs.text_offset
    assert [choice.text[i:].startswith(t) for i, t in zip(offsets, choice.logprobs.tokens or [], strict=True)]
    more = openai_client.completions.create(model=MODEL, prompt=[0, *ids], max_tokens=50, echo=True, logprobs=0)
    assert more.choices[0].text == choice.text + TEXT
    assert more.choices[0].logprobs is not None
    assert len(more.choices[0].logprobs.tokens or []) == 1 + len(ids) + (more.usage.completion_tokens  # type: ignore
                                                                         if more.usage else 0)


@pytest.mark.parametrize("prompt", ["a", "say:stops", "日本 🦀 x", ""])
def test_offsets_are_places_in_the_text_also_behind_a_token_of_the_server(server: Running, prompt: str) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1, "ignore_eos": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt) and offsets[:2] == [0, 0] and offsets == sorted(offsets)
    for token, offset in zip(tokens[1:], offsets[1:], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_is_cut_off(openai_client: openai.OpenAI, stream: bool) -> None:
    done: Any = openai_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=50, stop=["ree fo"],
                                                 stream=stream)
    text = "".join(c.choices[0].text for c in done) if stream else done.choices[0].text
    assert text == "one two th"


def test_tokens_can_be_favoured_allowed_and_banned(server: Running) -> None:
    first = server.post("/tokenize", {"prompt": TEXT}).json()["tokens"][0]

    def text(**fields: Any) -> str:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    other = server.post("/tokenize", {"prompt": "seven"}).json()["tokens"][0]
    assert text() == "one" and text(logit_bias={str(other): 70}) == "seven"
    assert text(logit_bias={str(first): -100}) != "one"
    assert text(allowed_token_ids=[other]) == "seven" and text(bad_words=["one"]) != "one"


@pytest.mark.parametrize(("fields", "named"), [
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "out of range"), ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed"), ({"n": 9}, "n must be"), ({"best_of": 3}, "best_of"),
    ({"prompt": ["a"] * 9}, "9 prompts"),
    ({"prompt": ["a", 5]}, "prompt[1]"), ({"prompt": ["a", []]}, "prompt[1]"), ({"logprobs": 50}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 100_000}, "context"), ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [999_999_999]}, "out of range"), ({"suffix": "x", "echo": True}, "echo"),
    ({"n": 2, "echo": True}, "echo and n"),
])
def test_what_cannot_be_served_is_refused_by_name(server: Running, fields: dict[str, Any], named: str) -> None:
    refused = server.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, **fields})
    assert refused.status_code == 400, refused.text
    assert named in refused.json()["error"]["message"]


def test_an_unknown_model_is_not_found(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        openai_client.completions.create(model="another", prompt=PROMPT)
