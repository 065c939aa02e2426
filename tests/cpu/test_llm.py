"""`LLM` from prompts to outputs, on a witness engine and the tokenizer of a golden case."""

from __future__ import annotations

import logging
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from witness import Reference, WitnessEngine, WitnessPackage, witness_plan

import deepinfer
from deepinfer import runtime
from deepinfer.accelerator import VARIABLE
from deepinfer.errors import ArtifactError, PlanError, RequestError
from deepinfer.runtime.checkpoint.checkpoint import LOCAL_VARIABLE
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams

CASE = Path(__file__).parents[1] / "golden" / "cases" / "v41_a_f32"
PLAN = witness_plan(window=8, block=16, drafts=3, vocab=336, seqs=4, step=32, wanted=16, max_len=120)


@pytest.fixture
def llm() -> LLM:
    return LLM(WitnessPackage(PLAN), CASE, seed=1, schedule_drafts=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CASE / "tokenizer.json"))


def greedy(ids: list[int], count: int) -> list[int]:
    reference, out = Reference(PLAN), list[int]()
    row = reference.feed(ids, None)[-1]
    for _ in range(count):
        out.append(int(row.argmax()))
        row = reference.feed(out[-1:], None)[-1]
    return out


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_texts_and_ids_are_prompts_and_results_keep_their_order(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = ["hello world", [5, 6, 7], "a", np.array([9, 9])]
    ids = [p if isinstance(p, list) else tokenizer.encode(p).ids if isinstance(p, str) else p.tolist() for p in prompts]
    outputs = llm.generate(prompts, GREEDY, progress=False)  # type: ignore[arg-type]
    assert [o.prompt_token_ids for o in outputs] == ids
    assert [o.prompt for o in outputs] == ["hello world", None, "a", None]
    assert [o.token_ids for o in outputs] == [greedy(i, 12) for i in ids]
    assert [o.text for o in outputs] == [tokenizer.decode(o.token_ids, skip_special_tokens=True) for o in outputs]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    alone = llm.generate("hello world", GREEDY, progress=False)
    assert alone[0].outputs[0].text == outputs[0].outputs[0].text


def test_several_answers_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    p = SamplingParams(n=3, temperature=1, seed=7, max_tokens=10, logprobs=2)
    first = llm.generate([[1, 2, 3] * 7], p, progress=False)[0]
    second = llm.generate([[4], [1, 2, 3] * 7], p, progress=False)[1]
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    for o in first.outputs:
        assert o.logprobs is not None and o.cumulative_logprob is not None
        chosen = [x[t] for x, t in zip(o.logprobs, o.token_ids, strict=True)]
        assert o.cumulative_logprob == pytest.approx(sum(x.logprob for x in chosen))
        assert all(isinstance(x.decoded_token, str) for x in chosen)


def test_unseeded_requests_repeat_with_the_seed_of_the_llm_and_differ_among_themselves() -> None:
    """Also for whatever number of drafts, which may follow from measured times."""
    p, prompts = SamplingParams(max_tokens=8), [[3, 4], [3, 4]]
    ways: list[dict[str, Any]] = [{}, {}, *({"schedule_drafts": False, "num_speculative_tokens": n} for n in range(4))]
    first, *again = (LLM(WitnessPackage(PLAN), CASE, seed=5, **way).generate(prompts, p, progress=False)
                     for way in ways)
    for second in again:
        assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert first[0].token_ids != first[1].token_ids
    other = LLM(WitnessPackage(PLAN), CASE).generate(prompts, p, progress=False)
    assert [o.token_ids for o in other] != [o.token_ids for o in first]


def test_a_stream_shows_whole_characters_as_they_come_and_joins_to_the_answer(llm: LLM) -> None:
    p = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    expected = llm.generate([[1, 2, 3], [4]], p, progress=False)
    deltas: dict[str, str] = {}
    last: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for o in llm.stream([[1, 2, 3], [4]], p):
        deltas[o.request_id] = deltas.get(o.request_id, "") + o.outputs[0].delta
        lengths.setdefault(o.request_id, []).append(len(o.outputs[0].token_ids))
        last[o.request_id] = o
    assert list(deltas.values()) == [o.text for o in expected]
    assert [o.token_ids for o in last.values()] == [o.token_ids for o in expected]
    assert all(o.finished for o in last.values())
    for found in lengths.values():  # a step brings a token and the drafts that were right
        steps = np.diff([0, *found])
        assert found[-1] == 40 and 1 <= steps.min() <= steps.max() <= PLAN.draft_tokens + 1


def test_a_closed_stream_gives_everything_back(llm: LLM) -> None:
    stream = llm.stream([[1] * 30, [2] * 20], GREEDY)
    next(stream)
    assert llm.core.memory.blocks.free < llm.core.memory.blocks.size
    stream.close()  # type: ignore[attr-defined]
    assert not llm.core.requests
    assert llm.core.memory.blocks.free + llm.core.prefix.evictable == llm.core.memory.blocks.size


def test_an_abort_inside_a_stream_ends_that_request_only(llm: LLM) -> None:
    seen: dict[str, Any] = {}
    for o in llm.stream([[1, 2], [3]], GREEDY):
        seen[o.request_id] = o
        if o.request_id == "0" and len(o.token_ids) == 3 and not o.finished:
            assert llm.abort("0") and not llm.abort("0")
    assert seen["0"].outputs[0].finish_reason == "abort" and seen["0"].token_ids == greedy([1, 2], 12)[:3]
    assert seen["1"].outputs[0].finish_reason == "length" and seen["1"].token_ids == greedy([3], 12)


def test_threads_share_an_engine(llm: LLM) -> None:
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([[i, i + 1]], GREEDY, progress=False)[0].token_ids
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {i: greedy([i, i + 1], 12) for i in range(6)}


# ---- stopping -----------------------------------------------------------------------------------------------------
def test_an_answer_stops_at_its_stop_text_wherever_the_tokens_cut_it(llm: LLM) -> None:
    p = SamplingParams(temperature=1, seed=9, max_tokens=40, ignore_eos=True)
    full = llm.generate([[1, 2, 3]], p, progress=False)[0].text
    for at in (0, 5, 11):
        stop = full[at: at + 3]
        for include in (False, True):
            q = SamplingParams(temperature=1, seed=9, max_tokens=40, ignore_eos=True, stop=["never said", stop],
                               include_stop_str_in_output=include)
            out = llm.generate([[1, 2, 3]], q, progress=False)[0].outputs[0]
            end = full.index(stop) + (len(stop) if include else 0)
            assert (out.text, out.finish_reason, out.stop_reason) == (full[:end], "stop", stop)


def test_an_answer_stops_at_ids_and_at_the_end_token(llm: LLM, tokenizer: Tokenizer) -> None:
    tokens = greedy([1, 2, 3], 12)
    first = tokens.index(tokens[6])
    by_id = SamplingParams(temperature=0, stop_token_ids=[tokens[6]])
    out = llm.generate([[1, 2, 3]], by_id, progress=False)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens[: first + 1], "stop", tokens[6])
    assert out.text == tokenizer.decode(tokens[:first])
    llm.core.ends = frozenset((tokens[6],))
    ended = llm.generate([[1, 2, 3]], SamplingParams(temperature=0), progress=False)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[: first + 1], "stop", None)
    longer = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, min_tokens=12, max_tokens=12), progress=False)[0]
    assert len(longer.token_ids) == 12 and tokens[6] not in longer.token_ids


def test_the_end_token_is_read_from_the_checkpoint(llm: LLM) -> None:
    assert llm.core.ends == {1}


@pytest.mark.parametrize("options", [{"loop": "plain"}, {"loop": "overlapped"}, {}, {"num_speculative_tokens": 1}])
def test_the_loop_and_the_drafts_that_are_asked_for_run_and_change_no_answer(options: dict[str, Any]) -> None:
    plan = witness_plan(window=8, block=16, drafts=3, lag=1, vocab=336, seqs=4, step=32, wanted=16, max_len=120)
    with LLM(WitnessPackage(plan), CASE, seed=1, schedule_drafts=False, **options) as llm:
        assert llm.core.loop.lag == (options.get("loop") != "plain")
        assert [o.token_ids for o in llm.generate([[1, 2], [3] * 40], GREEDY, progress=False)] == [
            greedy([1, 2], 12), greedy([3] * 40, 12)]
        proposed = set(llm.metrics.proposed_at.values)
        used = options.get("num_speculative_tokens", 3)
        assert {k for k in proposed if llm.metrics.proposed_at.values[k]} == {str(i) for i in range(used)}


def test_an_answer_tells_how_it_came_about(llm: LLM) -> None:
    prompts, p = [[5] * 70], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, replay=8)
    first, second = (llm.generate(prompts, p, progress=False)[0] for _ in range(2))
    assert [(r.axis, r.start) for r in first.debug[0].replay_log] == [("T_kept", 62)]
    assert (first.debug[0].cached_tokens, first.num_cached_tokens, first.debug[0].replayed_rows) == (0, 0, 0)
    assert second.num_cached_tokens == second.debug[0].cached_tokens == 64
    assert second.replay_log == second.debug[0].replay_log
    assert sum(second.debug[0].drafts_proposed) > 0 and second.debug[0].preemptions == 0
    assert llm.metrics.prefix_queries.value == 140 and llm.metrics.prefix_hits.value == 64


def test_an_answer_ends_where_the_engine_does(llm: LLM) -> None:
    out = llm.generate([[3] * 115], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), progress=False)[0]
    assert len(out.token_ids) == 5 and out.outputs[0].finish_reason == "length"


# ---- starting -----------------------------------------------------------------------------------------------------
def test_an_imported_engine_and_a_loaded_one_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def load_engine(path: Path) -> WitnessPackage:
        asked.append(path)
        return WitnessPackage(PLAN)
    monkeypatch.setitem(vars(runtime), "load_engine", load_engine)
    module = types.ModuleType("my_engine")
    module.__file__ = str(tmp_path / "my_engine" / "__init__.py")
    for engine in (module, tmp_path / "my_engine", str(tmp_path / "my_engine")):
        LLM(engine, CASE)
    assert [str(p) for p in asked] == [str(tmp_path / "my_engine")] * 3


def test_the_checkpoint_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_VARIABLE, str(CASE))
    assert LLM(WitnessPackage(PLAN)).generate("hello", GREEDY, progress=False)[0].text
    monkeypatch.delenv(LOCAL_VARIABLE)
    assert LLM(WitnessPackage(PLAN)).core.engine.checkpoint is None


def test_an_engine_for_another_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ascend")
    with pytest.raises(ArtifactError, match="witness: the engine is for another target"):
        LLM(WitnessPackage(PLAN), CASE)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"max_num_seqs": 5}, "max_num_seqs: the engine was compiled for another number of sequences; found 5; allowed 1"),
    ({"loop": "overlapped"}, "loop: the engine's rings have no room for a step that is planned before the one before "
                             "it has ended; found overlapped; allowed plain; compile with --host-lag 1"),
    ({"num_speculative_tokens": 4}, "num_speculative_tokens: the engine drafts fewer tokens at a time; found 4; "
                                    "allowed 0..3"),
    ({"decode_stretch": 1}, "decode_stretch: a step with prompt rows lasts longer than one without; found 1; allowed"),
    ({"num_blocks": 7}, "num_blocks: one sequence of full length does not fit; found 7; allowed >= 8"),
])
def test_sizes_beyond_the_plan_are_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(PlanError) as found:
        LLM(WitnessPackage(PLAN), CASE, **options)  # type: ignore[arg-type]
    assert str(found.value).startswith(sentence)


def test_cache_blocks_follow_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(WitnessPackage(PLAN), CASE)
    assert llm.core.memory.blocks.size == 4 * PLAN.blocks_per_sequence
    package = WitnessPackage(PLAN)
    one, fixed = package.memory(0, 1).total, package.memory(4, 0).total
    monkeypatch.setattr("deepinfer.runtime.llm.available_memory", lambda: 2 * (fixed + 20 * one))
    assert LLM(package, CASE).core.memory.blocks.size == 20
    monkeypatch.setattr("deepinfer.runtime.llm.available_memory", lambda: 2 * (fixed + 7 * one))
    with pytest.raises(PlanError, match="cache blocks: one sequence of full length does not fit into half"):
        LLM(package, CASE)


# ---- bad input ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("prompts", "params", "sentence"), [
    ([], None, "prompts: there is no prompt; send at least one token"),
    ([[]], None, "prompt: the prompt is empty"),
    (["a", ""], None, "prompts[1]: the prompt is empty"),
    ([[1], [336]], None, "prompts[1], position 0: token id out of range; found 336; allowed 0..335"),
    ([[1], [2] * 120], None, "prompts[1]: the prompt leaves no room for an answer; found 120 tokens"),
    (None, None, "prompts: a prompt is a text or a list of token ids; found NoneType"),
    (5, None, "prompts: a prompt is a text or a list of token ids; found int"),
    (b"abc", None, "prompts: a prompt is a text or a list of token ids; found bytes"),
    ({"prompt": "a"}, None, "prompts: a prompt is a text or a list of token ids; found dict"),
    ([b"abc"], None, "prompts[0]: a prompt is a text or a list of token ids; found bytes"),
    ([[1], [2, True]], None, "prompts[1]: a prompt is a text or a list of token ids; found list with bool"),
    ([True], None, "prompts[0]: a prompt is a text or a list of token ids; found bool"),
    (["a", "bc\ud800"], None, "prompts[1], character 2: the text holds a lone surrogate; found U+D800"),
    ([[1], 3.5], None, "prompts[1]: a prompt is a text or a list of token ids; found float"),
    ([[1], [2]], [SamplingParams()], "sampling_params: one of sampling_params for each prompt is needed; found 1"),
    ([[1]], ["hot"], "sampling_params[0]: SamplingParams are needed; found str"),
])
def test_nothing_runs_when_one_prompt_is_bad(llm: LLM, prompts: Any, params: Any, sentence: str) -> None:
    assert isinstance(llm.core.engine, WitnessEngine)
    before = llm.core.engine.runs
    with pytest.raises(RequestError) as found:
        llm.generate(prompts, params, progress=False)
    assert str(found.value).startswith(sentence) and llm.core.engine.runs == before


@pytest.mark.parametrize("priority", [5, "a", ["first"], [True]])
def test_a_priority_that_is_no_number_is_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority: whole numbers, one for each prompt"):
        llm.generate([[1]], priority=priority, progress=False)


def test_a_closed_engine_says_so(llm: LLM) -> None:
    with llm, llm.session() as session:
        pass
    for call in (lambda: llm.generate("a", progress=False), lambda: llm.stream("a"), llm.session,
                 lambda: session.feed([1])):
        with pytest.raises(RequestError, match="the engine is closed"):
            call()


@pytest.mark.parametrize(("engine", "options", "kind", "sentence"), [
    (5, {}, RequestError, "engine: not an engine; found int; allowed"),
    (None, {"threads": 0}, PlanError, "threads: an engine runs on at least one thread; found 0; allowed >= 1"),
    (None, {"spill_bytes": -1}, PlanError, "spill_bytes: memory cannot be less than nothing; found -1"),
    (None, {"seed": "x"}, RequestError, "seed: a whole number is needed; found 'x'"),
    (None, {"seed": 1 << 64}, RequestError, "seed: out of range; found 18446744073709551616; allowed"),
    (None, {"prefix_cache": "no"}, RequestError, "prefix_cache: True or False is needed; found 'no'"),
    (None, {"schedule_drafts": None}, RequestError, "schedule_drafts: True or False is needed; found None"),
    (None, {"prefix_snapshots": 5, "prefix_cache": False}, PlanError, "prefix_snapshots: it is a part of the prefix"),
    (None, {"prefix_snapshots": 1 << 50}, PlanError, "prefix_snapshots: so many window snapshots do not fit into mem"),
    (None, {"checkpoint": 5}, RequestError, "checkpoint: a folder or a hub id is needed; found 5"),
    (None, {"threads": True}, RequestError, "threads: a whole number is needed; found True"),
    (None, {"num_blocks": "8"}, RequestError, "num_blocks: a whole number is needed; found '8'"),
])
def test_arguments_of_the_wrong_kind_are_refused(engine: Any, options: dict[str, Any], kind: type[Exception],
                                                 sentence: str) -> None:
    with pytest.raises(kind) as found:
        LLM(engine or WitnessPackage(PLAN), **{"checkpoint": CASE} | options)
    assert str(found.value).startswith(sentence)


def test_without_a_tokenizer_ids_in_ids_out(tmp_path: Path) -> None:
    llm = LLM(WitnessPackage(PLAN), tmp_path)
    assert llm.generate([[1, 2]], GREEDY, progress=False)[0].token_ids == greedy([1, 2], 12)
    with pytest.raises(RequestError, match="prompt: a text prompt needs a tokenizer"):
        llm.generate("text", progress=False)


def test_a_tokenizer_may_be_given_in_any_form(tokenizer: Tokenizer) -> None:
    class Foreign:
        def encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text).ids)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
    texts = {LLM(WitnessPackage(PLAN), CASE, tokenizer=t).generate("hello", GREEDY, progress=False)[0].text
             for t in (tokenizer, CASE, str(CASE / "tokenizer.json"), Foreign())}
    assert len(texts) == 1
    with pytest.raises(ArtifactError, match="tokenizer: not a tokenizer; found int"):
        LLM(WitnessPackage(PLAN), CASE, tokenizer=3)


# ---- what people look at ------------------------------------------------------------------------------------------
def test_progress_is_shown_on_standard_error_unless_switched_off(
        llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1]], GREEDY, progress=False)
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([[1]], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == "" and "1/1" in shown.err


def test_metrics_and_events_tell_what_happened(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        llm.generate([[1, 2, 3], [4] * 40], GREEDY, progress=False)
    finished = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request_finished")]
    assert len(finished) == 2 and "prompt_tokens=3 tokens=12 reason=length" in finished[0]
    text = llm.metrics.text()
    for line in ("vllm:prompt_tokens_total 43", "vllm:generation_tokens_total 24", "vllm:num_requests_running 0",
                 'vllm:request_success_total{finished_reason="length"} 2', "vllm:time_to_first_token_seconds_count 2",
                 "vllm:inter_token_latency_seconds_count 22", "vllm:kv_cache_usage_perc 0"):
        assert line in text.splitlines(), text


def test_the_package_offers_the_front_door() -> None:
    assert deepinfer.LLM is LLM and deepinfer.SamplingParams is SamplingParams
