"""`deepinfer chat` on the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from compiled import checkpoint_of, engine_of
from server.scripted_engine import HELLO, REASONING, ScriptedPackage

from deepinfer.cli import chat
from deepinfer.cli.subject import resolve_subject
from deepinfer.codegen import origin
from deepinfer.errors import RequestError
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.server.vocabulary import read_vocabulary


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(ScriptedPackage(), checkpoint, max_num_seqs=1, progress=False) as found:
        yield found


def conversation(llm: LLM, **options: Any) -> chat.Conversation:
    given: dict[str, Any] = {"system": None, "thinking": True, "temperature": None, "max_tokens": None} | options
    return chat.Conversation(llm, read_vocabulary(llm.core.engine.checkpoint, None), **given)


def test_a_pipe_gets_the_answer_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SimpleNamespace(engine=ScriptedPackage(), checkpoint=str(checkpoint), name="scripted", compile=None)
    monkeypatch.setattr(chat, "resolve_subject", lambda *_: subject)
    done = CliRunner().invoke(chat.main, ["scripted"], input="Please\nsay:hello\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == HELLO + "\n"
    assert REASONING in done.stderr and "tokens/s" in done.stderr


def test_the_next_turn_knows_the_answer_and_not_its_reasoning(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(llm, system="Be kind.")
    talk.say("say:hello")
    talk.say("say:stops")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[2]["content"] == HELLO and talk.messages[4]["content"] == "one two three four five"
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "Be kind."}]
    talk.command("/think")
    talk.say("say:hello")
    shown = capsys.readouterr()
    assert shown.err.count(REASONING) == 1 and "reasoning off" in shown.err


def test_an_interrupted_answer_is_kept_as_far_as_it_came(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, run, steps = conversation(llm, thinking=False), llm.core.engine.run, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(llm.core.engine, "run", interrupted)
    talk.say("say:quick")
    assert talk.messages[-1]["content"] == " word" * 4
    assert llm.core.memory.blocks.free + llm.core.prefix.evictable == llm.core.memory.blocks.size
    talk.say("say:hello")
    assert talk.messages[-1]["content"] == HELLO


def test_a_tokenizer_without_control_tokens_is_refused(llm: LLM) -> None:
    case = "v41_a_f32"
    done = CliRunner().invoke(chat.main, [str(engine_of(case)), "--checkpoint", str(checkpoint_of(case))], input="hi")
    assert done.exit_code == RequestError.exit_code and "lacks control tokens" in done.output


def test_a_prompt_that_is_too_long_is_one_sentence_and_changes_nothing(llm: LLM) -> None:
    talk = conversation(llm)
    with pytest.raises(RequestError, match="maximum context length"):
        talk.say("word " * 3000)
    assert talk.messages == []


def test_an_engine_finds_the_folder_that_it_was_compiled_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder = engine_of("v41_a_f32"), checkpoint_of("v41_a_f32")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    limits = {"max_model_len": None, "max_num_seqs": None}
    assert resolve_subject(str(engine), None, limits).checkpoint is None
    origin.remember(engine, str(folder))
    assert resolve_subject(str(engine), None, limits).checkpoint == str(folder.resolve())
    assert resolve_subject(str(engine), "another", limits).checkpoint == "another"
    with monkeypatch.context() as patched:
        patched.setenv("DEEPINFER_HF_MODEL_DIR", "elsewhere")
        assert resolve_subject(str(engine), None, limits).checkpoint is None
    done = CliRunner().invoke(chat.main, [str(engine)], input="hi")
    assert done.exit_code == RequestError.exit_code and "lacks control tokens" in done.output  # so it was opened
    # another engine in the same place knows nothing of it, and neither does one whose checkpoint is gone
    monkeypatch.setattr(origin, "read_manifest", lambda folder: {"digest": "another"})
    assert resolve_subject(str(engine), None, limits).checkpoint is None
    origin.remember(engine, "hub/id")
    assert origin.checkpoint_of(engine) is None
