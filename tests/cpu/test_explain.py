"""`deepinfer explain`, `deepinfer profile` and report.html on a compiled engine."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from compiled import checkpoint_of, engine_of

from deepinfer.cli import main

CASE = "v41_a_f32"
SPECS = Path(__file__).resolve().parents[2] / "deepinfer" / "model_specs"


@pytest.fixture(scope="module")
def engine() -> Path:
    return engine_of(CASE)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_layer_leads_to_spec_lines_reasons_bytes_and_sources_that_exist(engine: Path) -> None:
    text = run("explain", str(engine), "layer", "1").output
    sources = re.findall(r"^\s+source  (\S+)$", text, re.MULTILINE)
    assert sources
    assert all((engine / s).is_file() for s in sources)
    assert len(re.findall(r"^\s+spec    deepseek_v41_flash\.py:\d+", text, re.MULTILINE)) == len(sources)
    assert len(re.findall(r"^\s+ends    \S", text, re.MULTILINE)) == len(sources)
    assert "self.linear(x, p.wq_a" in text  # the line of the spec itself, not of a helper


def test_a_kernel_is_found_by_a_part_of_its_name_and_prints_its_source(engine: Path) -> None:
    kinds = json.loads((engine / "manifest.json").read_text())["kernels"]
    symbol = next(k["symbol"] for k in kinds if k["family"] == "attend")
    text = run("explain", str(engine), "kernel", symbol, "--source").output
    assert f"kernel        {symbol}" in text
    assert "ends because" in text
    assert (engine / f"src/{symbol}.cpp").read_text() in text


def test_a_part_of_several_names_explains_each_kernel_and_json_has_every_launch(engine: Path) -> None:
    explained = json.loads((engine / "explain.json").read_text())
    launches = [s for s in explained["entries"]["step"]["launches"] if "kernel" in s]
    symbols = [explained["kernels"][s["kernel"]]["symbol"] for s in launches]
    text = run("explain", str(engine), "kernel", "grouped_gemm").output
    shown = re.findall(r"^kernel        (\S+)$", text, re.MULTILINE)
    assert shown == sorted({s for s in symbols if "grouped_gemm" in s})
    assert len(shown) > 1
    lines = [json.loads(line) for line in run("explain", str(engine), "--json").output.splitlines()]
    assert [line["symbol"] for line in lines if "kernel" in line] == symbols
    assert [line["launch"] for line in lines] == list(range(len(lines)))


def test_an_engine_is_explained_by_the_spec_it_was_made_from(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = json.loads((engine / "explain.json").read_text())["texts"]
    for place, text in texts.items():
        file, _, line = place.rpartition(":")
        assert text == (SPECS / file).read_text().splitlines()[int(line) - 1].strip()
    before = run("explain", str(engine), "layer", "1").output
    read = Path.read_text

    def shifted(path: Path, *args: object, **kw: object) -> str:
        text: str = read(path, *args, **kw)  # type: ignore[arg-type]
        return "# a later comment\n" + text if path.parent == SPECS else text

    monkeypatch.setattr(Path, "read_text", shifted)
    assert run("explain", str(engine), "layer", "1").output == before


@pytest.mark.parametrize(("arguments", "said"), [
    (("layer", "99"), "has no such layer"),
    (("kernel", "warp"), "no kernel of step has that name; found warp; allowed a part of one of: di_attend"),
    (("layer", "1", "--source"), "--source: sources are printed of kernels, as text; found layer 1"),
    (("--source",), "--source: sources are printed of kernels, as text; found no kernel"),
    (("kernel", "gemm", "--json", "--source"), "found --json; allowed kernel SYMBOL --source"),
    (("color", "1"), "allowed layer N, kernel SYMBOL"),
    (("layer", "1", "--entry", "prefill"), "no such entry; found prefill; allowed step, draft"),
])
def test_what_cannot_be_explained_is_refused_with_what_can(engine: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run("explain", str(engine), *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_report_needs_nothing_from_elsewhere(engine: Path) -> None:
    page = (engine / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert not re.search(r"@import|url\(|fetch\(", page)
    assert "--out ENGINE" in page
    kinds = re.findall(r'data-layer="\d+" aria-selected', page)
    assert len(kinds) >= 4
    details = json.loads(re.search(r'id="details">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert all((engine / d["source"]).is_file() for d in details)


def test_a_profile_times_every_launch_and_draws_them(engine: Path, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    result = run("profile", str(engine), "--checkpoint", str(checkpoint_of(CASE)), "--decode", "1,2", "--prefill", "40",
                 "--context", "50", "--steps", "2", "--threads", "1", "--trace", str(trace), "--report", str(report))
    assert result.exit_code == 0, result.output
    events = json.loads(trace.read_text())["traceEvents"]
    explained = json.loads((engine / "explain.json").read_text())["entries"]["step"]["launches"]
    for pid in (1, 2, 3):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == 0]
        assert len(spans) == len(explained)
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(spans))
        assert sum(e["dur"] for e in spans) > 0
    page = report.read_text()
    assert page.count("measured</button>") == 3
    assert "of the roof" in page


@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_a_profile_is_refused_before_it_runs_where_its_files_have_no_folder(engine: Path, option: str,
                                                                            tmp_path: Path) -> None:
    result = run("profile", str(engine), "--checkpoint", str(checkpoint_of(CASE)), option,
                 str(tmp_path / "no" / "file"))
    assert result.exit_code == 5
    assert f"{option}: there is no such folder to write in; found {tmp_path / 'no'}" in result.output
    assert "in kernels" not in result.output


def test_a_profile_that_the_engine_cannot_hold_is_one_sentence(engine: Path) -> None:
    result = run("profile", str(engine), "--checkpoint", str(checkpoint_of(CASE)), "--decode", "4000")
    assert result.exit_code == 6
    assert "compiled for fewer sequences" in result.output
