"""Probes, models, metrics, tokens, ids of requests, keep-alives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.running import MODEL, PATIENCE, Running, running
from server.scripted_engine import BLOCK, HELLO, LONGEST

import deepinfer


def test_models_are_listed_for_both_families_of_clients(openai_client: openai.OpenAI, anthropic_client: Any) -> None:
    card: Any = openai_client.models.list().data[0]
    assert (card.id, card.max_model_len, card.owned_by) == (MODEL, LONGEST, "deepinfer-aot")
    assert openai_client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("another")
    assert [m.id for m in anthropic_client.models.list()] == [MODEL]


def test_the_version_is_the_packages(server: Running) -> None:
    found = server.client.get("/version").json()
    assert found["version"] == deepinfer.__version__ and found["target"] == "cpu"
    assert found["fingerprint"] == server.client.get("/ready").json()["fingerprint"]


def test_metrics_have_the_usual_names_and_count_requests_and_tokens(server: Running) -> None:
    server.wait_idle()
    before = server.samples()
    usage = server.chat("hello").json()["usage"]
    server.wait_idle()
    grown = {name: value - before.get(name, 0) for name, value in server.samples().items()}
    assert grown["vllm:request_success_total"] == 1
    # the end token is chosen but is no token of the answer
    assert grown["vllm:generation_tokens_total"] == usage["completion_tokens"] + 1
    assert grown["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prompt_tokens", "request_generation_tokens", "request_prefill_time_seconds",
                 "request_decode_time_seconds"):
        assert grown[f"vllm:{name}_count"] == 1, name
    assert grown["vllm:inter_token_latency_seconds_count"] == usage["completion_tokens"]
    assert 'deepinfer:artifact_info{' in (shown := server.client.get("/metrics").text)
    assert f'artifact="scripted",block_tokens="{BLOCK}"' in shown
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.samples()[f"vllm:{name}"] == 0


ELSEWHERE = "https://chat.example"

# what operators of such servers look for, beside the names that vLLM's dashboards ask for
EXPECTED = {
    "vllm": """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
        time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
        request_time_per_output_token_seconds request_queue_time_seconds request_prefill_time_seconds
        request_decode_time_seconds request_inference_time_seconds request_prompt_tokens request_generation_tokens
        iteration_tokens_total prompt_tokens generation_tokens request_success num_preemptions spec_decode_num_drafts
        spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos""",
    "deepinfer": """kv_cache_used_ratio kv_cache_bytes prefix_hit_tokens step_cpu_seconds step_device_seconds
        spec_decode_num_draft_tokens_per_pos spec_decode_depth preemptions_spilled preemptions_restarted
        recomputed_tokens kernel_compiles artifact_info engine_restarts http_responses requests_refused answers_cut""",
}


def test_every_metric_that_operators_look_for_is_there(server: Running) -> None:
    server.chat("hello")
    server.wait_idle()
    families = {f.name: f for f in text_string_to_metric_families(server.client.get("/metrics").text)}
    wanted = {f"{owner}:{name}" for owner, names in EXPECTED.items() for name in names.split()}
    assert not wanted - {name.removesuffix("_total") for name in families} - set(families)
    labels = {name: set(f.samples[0].labels) - {"model_name", "le"} for name, f in families.items() if f.samples}
    assert labels["deepinfer:kv_cache_bytes"] == {"group", "tier"}
    assert labels["vllm:request_success"] == {"finished_reason"}
    assert {"hash", "target"} <= labels["deepinfer:artifact_info"]
    held = {s.labels["group"]: s.value for s in families["deepinfer:kv_cache_bytes"].samples}
    assert held["windows"] == held["preempted"] == 0 and set(held) == {"pages", "windows", "snapshots", "preempted"}
    assert families["deepinfer:kernel_compiles"].samples[0].value == 0
    steps = families["deepinfer:steps"].samples[0].value
    for name in ("deepinfer:step_cpu_seconds", "deepinfer:step_device_seconds"):
        found = {s.name: s.value for s in families[name].samples}
        assert found[f"{name}_count"] == steps and found[f"{name}_sum"] > 0


def test_the_dashboard_asks_for_metrics_that_there_are(server: Running, repository: Path) -> None:
    shown = server.client.get("/metrics").text
    panels = json.loads((repository / "docs" / "grafana.json").read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"(?:vllm|deepinfer):\w+", t["expr"])}
    assert len(asked) > 10
    for name in asked:
        assert f"# TYPE {name.removesuffix('_bucket')} " in shown, name


def test_tokens_of_a_text_and_of_a_conversation(server: Running) -> None:
    text = "Grüße </think> 你好"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == LONGEST
    assert 128822 not in found["tokens"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "say:hello"}]
    prompt = server.post("/tokenize", {"messages": messages}).json()
    usage = server.post("/v1/chat/completions", {"model": MODEL, "messages": messages}).json()["usage"]
    assert prompt["count"] == usage["prompt_tokens"]
    assert server.post("/detokenize", {"tokens": prompt["tokens"]}).json()["prompt"].endswith("<think>")


def test_the_id_of_a_request_is_kept_and_a_strange_one_replaced(server: Running) -> None:
    assert server.client.get("/version", headers={"X-Request-Id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    for strange in ("a b", "x" * 200, 'a"b'):
        made = server.client.get("/version", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert made.startswith("req-") and made != strange
    messages = [{"role": "user", "content": "say:hello"}]
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": messages},
                         **{"X-Request-Id": "find-me"})
    assert answer.headers["x-request-id"] == "find-me"
    line = server.wait_for(lambda: server.event("request", id="find-me"), "the log line")
    assert (line["status"], line["route"]) == (200, "/v1/chat/completions")
    assert line["tokens"] == answer.json()["usage"]["completion_tokens"]


def test_silence_is_filled_with_signs_of_life_in_the_documented_form(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, keep_alive=0.1) as server:
        server.hold.touch()
        fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "say:held"}],
                       "thinking": {"type": "disabled"}}
        with server.client.stream("POST", "/v1/chat/completions", json={**fields, "stream": True}) as stream:
            lines = stream.iter_lines()
            signs = 0
            while signs < 3:
                signs += next(lines) == ": keep-alive"
            server.hold.unlink()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and any("after" in line for line in rest)
        server.hold.touch()
        with server.client.stream("POST", "/v1/chat/completions", json=fields) as stream:
            pieces, silence = stream.iter_text(), ""
            while len(silence) < 2:
                silence += next(pieces)
            assert set(silence) == {"\n"}
            server.hold.unlink()
            text = "".join(pieces)
        assert json.loads(text)["choices"][0]["message"]["content"] == "before hold after"


def test_a_body_over_the_limit_is_a_413_and_the_address_is_local(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, max_body=10_000, max_model_len=100, names=["one", "two"]) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "access-control-allow-origin" not in server.client.get("/version", headers={"Origin": ELSEWHERE}).headers
        large: Any = {"model": "one", "messages": [{"role": "user", "content": "x" * 20_000}]}
        assert server.post("/v1/chat/completions", large).status_code == 413

        def pieces() -> Any:
            for _ in range(100):
                yield b" " * 1000

        chunked = server.client.post("/v1/messages", content=pieces())
        assert chunked.status_code == 413 and chunked.json()["error"]["type"] == "request_too_large"
        assert [m["max_model_len"] for m in server.client.get("/v1/models").json()["data"]] == [100, 100]
        messages = [{"role": "user", "content": "word " * 100}]
        refused = server.post("/v1/chat/completions", {"model": "two", "messages": messages})
        assert refused.status_code == 400 and "100 tokens" in refused.json()["error"]["message"]
        small = server.post("/v1/chat/completions", {"model": "two", "messages": [
            {"role": "user", "content": "say:hello"}]})
        assert small.json()["choices"][0]["message"]["content"] == HELLO


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's own functions, with node")
def test_the_page_draws_an_answer_at_any_moment_and_asks_for_a_key(server: Running) -> None:
    script = re.findall(r"<script>(.*?)</script>", server.client.get("/").text, re.S)[0]
    usage = {"completion_tokens": 3, "prompt_tokens": 8, "prompt_cache_hit_tokens": 4}
    # what the browser has: elements that remember their text, one refused request, no storage
    program = """
    const nodes = {}, shown = [];
    const node = () => ({append(x) { shown.push(x); }, replaceChildren() {}, value: "", style: {}});
    globalThis.document = {getElementById: id => nodes[id] ||= node(),
                           createElement() { const n = node(); return n; }, querySelectorAll: () => []};
    globalThis.sessionStorage = {getItem: () => null, setItem() {}};
    globalThis.fetch = async () => ({ok: false, status: 401});
    """ + script + f"""
    ;console.log(JSON.stringify(facts({{usage: {json.dumps(usage)}}})));
    setTimeout(() => console.log(JSON.stringify(shown.map(x => x.textContent))), 50);
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told, hint = map(json.loads, done.stdout.splitlines())
    assert told == ["3 tokens", "prompt 8, cached 4 (50 %)"]
    assert "An API key is needed" in hint


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(server: Running) -> None:
    page = server.client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("// ", "") and "innerHTML" not in page.text


def test_a_profile_shows_steps_and_requests(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with running(checkpoint, tmp_path, engine={"profile_steps": 30, "profile": str(file)}) as server:
        while not file.exists():
            assert server.chat("stops").status_code == 200
    found = json.loads(file.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    spans = [(lanes[e["tid"]], e["name"]) for e in found if e["ph"] == "X"]
    assert spans.count(("engine", "step")) == spans.count(("loop", "step")) == 30
    inner = [e for e in found if e["ph"] == "X" and lanes[e["tid"]] == "engine"]
    outer = [e for e in found if e["ph"] == "X" and e["name"] == "step" and lanes[e["tid"]] == "loop"]
    for i, o in zip(inner, outer, strict=True):
        assert o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"]
    assert inner[0]["args"] == {"rows": next(e for e in found if e["ph"] == "b")["args"]["prompt_tokens"],
                                "sequences": 1}


def test_scripts_of_named_origins_may_read_answers_and_no_others(checkpoint: Path, tmp_path: Path) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with running(checkpoint, tmp_path, origins=[ELSEWHERE]) as server:
        allowed = server.client.options("/v1/chat/completions",
                                        headers={"Origin": ELSEWHERE, "Authorization": "", **asked})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ELSEWHERE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        stranger = server.client.options("/v1/chat/completions", headers={"Origin": "https://a.example", **asked})
        assert "access-control-allow-origin" not in stranger.headers
        read = server.client.get("/v1/models", headers={"Origin": ELSEWHERE})
        assert read.headers["access-control-allow-origin"] == ELSEWHERE
        keyless = server.client.get("/v1/models", headers={"Origin": ELSEWHERE, "Authorization": ""})
        assert keyless.status_code == 401
