"""`deepinfer bench serve`: what it counts, on made timings and on a server."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from server.running import KEY, MODEL, Running

from deepinfer.cli.bench import draw, serve
from deepinfer.cli.serve import KEY_VARIABLE
from deepinfer.runtime.server.load_test import Load, Timing, summary


def test_latencies_count_from_the_arrival_and_goodput_needs_both_limits() -> None:
    load = Load(url="u", model="m", vocab_size=10, input_tokens=7, slo_ttft=1.0, slo_tpot=0.3, key="secret")
    timings = [
        Timing(due=0.0, first=0.5, last=1.5, tokens=5, gaps=[0.25] * 4),
        Timing(due=1.0, first=3.0, last=4.0, tokens=5, gaps=[0.25] * 4),  # the first token is late
        Timing(due=2.0, first=2.5, last=6.0, tokens=8, gaps=[0.5] * 7),  # the others are slow
        Timing(due=2.0, error="status 429: full"),
    ]
    found = summary(load, timings)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 1, ["status 429: full"])
    assert found["seconds"] == 6.0 and found["requests_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 18 / 6 and found["total_tokens_per_s"] == (18 + 21) / 6
    assert found["goodput_requests_per_s"] == pytest.approx(1 / 6)
    assert found["ttft"]["p50"] == 0.5 and found["ttft"]["mean"] == 1.0
    assert found["tpot"]["p50"] == 0.25 and found["e2e"]["mean"] == pytest.approx((1.5 + 3 + 4) / 3)
    assert "secret" not in json.dumps(found) and math.inf not in found["load"].values()


def test_a_server_is_measured_and_drawn(server: Running, tmp_path: Path) -> None:
    picture = tmp_path / "p.svg"
    server.wait_idle()
    before = server.samples()["vllm:generation_tokens_total"]
    done = CliRunner().invoke(serve, ["--url", server.url, "--num-prompts", "6", "--request-rate", "50", "--input-len",
                                      "20", "--output-len", "9", "--json", "--picture", str(picture)],
                              env={KEY_VARIABLE: KEY})
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["completed"] == 6 and found["load"]["model"] == MODEL and KEY not in done.output
    server.wait_idle()
    assert server.samples()["vllm:generation_tokens_total"] - before == 6 * 9
    assert found["output_tokens_per_s"] == pytest.approx(6 * 9 / found["seconds"])
    assert 0 < found["ttft"]["p50"] <= found["ttft"]["p99"] <= found["e2e"]["p99"]
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    again = CliRunner().invoke(serve, ["--url", f"{server.url}/v1/", "--num-prompts", "2", "--output-len", "3"],
                               env={KEY_VARIABLE: KEY})
    assert again.exit_code == 0 and "2 answered, 0 failed" in again.output and "tpot" in again.output


@pytest.mark.parametrize(("arguments", "named"), [
    (["--model", "another"], "does not have this model"), (["--url", "http://127.0.0.1:9"], "does not list its models"),
    (["--input-len", "5000", "--num-prompts", "1"], "maximum context length"),
])
def test_what_cannot_be_measured_is_one_sentence(server: Running, arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(serve, ["--url", server.url, *arguments], env={KEY_VARIABLE: KEY})
    assert done.exit_code == 6 and named in " ".join(done.output.split()) and "Traceback" not in done.output


def test_a_picture_of_nothing_is_still_one() -> None:
    assert ET.fromstring(draw({"a": [], "b": [1.0, 2.0]})).tag.endswith("svg")
