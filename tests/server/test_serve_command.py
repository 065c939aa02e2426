"""`deepinfer serve` on a compiled engine: options and their origins, failures, the self check, answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from click.testing import CliRunner
from compiled import checkpoint_of, engine_of
from server.running import PATIENCE

from deepinfer import LLM, SamplingParams
from deepinfer.cli.serve import main
from deepinfer.cli.subject import resolve_subject
from deepinfer.codegen.package.manifest import read_manifest
from deepinfer.errors import ArtifactError, SpecError, ToolchainError
from deepinfer.runtime.server.self_check import check_against_record, weights_identity

CASE = "v41_a_f32"


@contextmanager
def serving(tmp_path: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with a free port, and its address once it listens."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DEEPINFER_")}
    env |= {"DEEPINFER_CACHE_DIR": str(tmp_path / "cache"), **environment}
    command = [sys.executable, "-m", "deepinfer", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    url = ""
    try:
        for line in process.stderr:
            if '"listening"' in line:
                url = json.loads(line)["url"]
            if '"vocabulary_ready"' in line:
                while httpx.get(f"{url}/ready", timeout=PATIENCE).status_code != 200:
                    time.sleep(0.05)  # until every front end is
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def test_a_compiled_engine_answers_over_http_as_it_does_in_python(tmp_path: Path) -> None:
    engine, checkpoint = engine_of(CASE), checkpoint_of(CASE)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    with LLM(engine, checkpoint, progress=False) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        expected = llm.generate(prompts, greedy, progress=False)
    with serving(tmp_path, str(engine), "--checkpoint", str(checkpoint), "--front-ends", "2") as (process, url):
        for prompt, known in zip(prompts, expected, strict=True):
            body = {"model": CASE, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True,
                    "logprobs": 0}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]
            values = [x[t].logprob for x, t in zip(known.outputs[0].logprobs or [], known.token_ids, strict=True)]
            np.testing.assert_array_equal(found["logprobs"]["token_logprobs"], values)
            assert found["finish_reason"] == "length"
        told = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        assert f'hash="{read_manifest(engine)["digest"]}"' in told
        assert f'deepinfer:kernel_compiles_total{{model_name="{CASE}"}} 0.0' in told
        refused = httpx.post(f"{url}/v1/chat/completions", json={"model": CASE, "messages": []}, timeout=PATIENCE)
        assert refused.status_code == 400 and "</think>" in refused.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    records = list((tmp_path / "cache" / "self-check").iterdir())
    assert len(records) == 1
    # a start that does not give the recorded answer does not serve
    record = json.loads(records[0].read_text())
    records[0].write_text(json.dumps(record | {"digest": "0" * 64}))
    with serving(tmp_path, str(engine), "--checkpoint", str(checkpoint)) as (process, _):
        assert process.wait(PATIENCE) == ArtifactError.exit_code


def test_an_engine_that_cannot_start_ends_the_command_with_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "deepinfer", "serve", str(engine_of(CASE)), "--checkpoint",
               str(tmp_path / "empty"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == ArtifactError.exit_code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "empty" in last and "Traceback" not in done.stderr


def test_a_model_that_cannot_be_compiled_ends_the_command_with_the_compilers_sentence(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "deepseek_v9", "architectures": ["V9"]}')
    command = [sys.executable, "-m", "deepinfer", "serve", str(tmp_path / "model"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False,
                          env={**os.environ, "DEEPINFER_CACHE_DIR": str(tmp_path)})
    assert done.returncode == SpecError.exit_code, done.stderr
    lines = done.stderr.splitlines()
    assert any("deepinfer-compile --target cpu" in line for line in lines)
    assert lines[-1].startswith("error: ") and "V9" in lines[-1] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_model_is_compiled_while_probes_are_answered_and_served_then(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "DEEPINFER_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "deepinfer", "serve", str(checkpoint_of(CASE)), "--port", "0", "--max-model-len",
               "64", "--max-num-seqs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        url = next(json.loads(line)["url"] for line in process.stderr if '"listening"' in line)
        assert httpx.get(f"{url}/health", timeout=PATIENCE).json() == {"status": "starting"}
        assert httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503
        next(line for line in process.stderr if '"vocabulary_ready"' in line)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"][0]["max_model_len"] == 64
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(PATIENCE) == 130
    [manifest] = (tmp_path / "engines").glob("engine_*/manifest.json")
    # the engine that was made finds its weights, as one of deepinfer-compile does
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    found = resolve_subject(str(manifest.parent), None, {"max_model_len": None, "max_num_seqs": None})
    assert found.checkpoint == str(checkpoint_of(CASE).resolve())


def printed(*arguments: str, **environment: str) -> dict[str, str]:
    found = CliRunner().invoke(main, ["engine", *arguments, "--print-config"], env=environment,
                               auto_envvar_prefix="DEEPINFER_SERVE")
    assert found.exit_code == 0, found.output
    return {line.removeprefix("# ").split(" = ")[0]: line.split(" = ", 1)[1] for line in found.output.splitlines()}


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    lines = ["max-queue = 1", "drain = 2.5", 'host = "::1"', 'served-model-name = ["a", "b"]',
             "repair_tool_calls = true"]
    file.write_text("\n".join(lines))
    found = printed("--config", str(file), "--max-queue", "3", DEEPINFER_SERVE_MAX_QUEUE="2", DEEPINFER_SERVE_HOST="h")
    assert found["max-queue"] == "3  # flag"
    assert found["host"] == '"h"  # environment DEEPINFER_SERVE_HOST'
    assert found["drain"] == "2.5  # file" and found["served-model-name"] == '["a", "b"]  # file'
    assert found["repair-tool-calls"] == "true  # file"
    assert found["port"] == "8000  # default" and found["seed"] == "unset  # default"


@pytest.mark.parametrize(("text", "named"), [
    ("max-que = 1", "did you mean max-queue"), ("[max-queue]\na = 1", "no table"), ("max-queue = ", "not a TOML file"),
    ("colour = 1", "see --help"), ('max-queue = "many"', "max-queue: not a value"), ("port = 70000", "port: not"),
    ('served-model-name = 3', "served-model-name: not"), ('log-level = "loud"', "log-level: not"),
])
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    done = CliRunner().invoke(main, ["engine", "--config", str(file), "--print-config"])
    assert done.exit_code == 2 and named in done.output and str(file) in done.output


@pytest.mark.parametrize(("arguments", "named"), [
    (["--max-model-len", "100000"], "--max-model-len"), (["--api-key-file", "nowhere"], "API keys"),
    (["--dialect", "v9"], "--dialect"),
])
def test_a_mistake_on_the_command_line_is_one_sentence(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(main, [str(engine_of(CASE)), "--port", "0", *arguments])
    assert done.exit_code in (2, 5) and named in done.output


def test_the_self_check_records_once_and_refuses_another_answer(tmp_path: Path) -> None:
    identity = {"engine": "e", "weights": "w"}
    assert check_against_record("a" * 64, tmp_path, identity)
    assert not check_against_record("a" * 64, tmp_path, identity)
    assert check_against_record("b" * 64, tmp_path, identity | {"weights": "other"})
    with pytest.raises(ArtifactError, match="no longer gives the answer"):
        check_against_record("b" * 64, tmp_path, identity)


def test_the_identity_of_weights_changes_with_their_files(tmp_path: Path) -> None:
    found: list[Any] = [weights_identity(None), weights_identity(checkpoint_of(CASE))]
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    found.append(weights_identity(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}more")
    found.append(weights_identity(tmp_path))
    assert len(set(found)) == 4


def test_without_the_servers_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("deepinfer.runtime.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    done = CliRunner().invoke(main, ["engine"])
    assert done.exit_code == ToolchainError.exit_code and "deepinfer-aot[server]" in done.output
