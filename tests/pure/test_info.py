"""`deepinfer info`: what it prints for a config and for an engine, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepinfer.backends.base import Binary
from deepinfer.cli import main
from deepinfer.cli.info import gigabytes
from deepinfer.codegen.compile import describe_model, load_backend
from deepinfer.codegen.lower import lower
from deepinfer.codegen.package.contents import EngineContents
from deepinfer.codegen.package.manifest import NAME, seal
from deepinfer.dsl import EngineOptions
from deepinfer.runtime.checkpoint import open_checkpoint

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
FLASH = CONFIGS / "DeepSeek-V4.1-Flash"
CASE = Path(__file__).parents[1] / "golden" / "cases" / "v41_a_f32" / "config.json"


@pytest.fixture(autouse=True)
def only_one_target_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose step is planned; the others tell what follows from the model alone, which is the same for all."""
    monkeypatch.setattr("deepinfer.codegen.describe.built_targets", lambda: ["cpu"])


def info(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["info", *map(str, arguments)])


def data(*arguments: str | Path) -> dict[str, Any]:
    result = info(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: str | Path) -> tuple[int, str]:
    result = info(*arguments)
    (line,) = result.stderr.splitlines()
    return result.exit_code, line


def words(text: str) -> list[str]:
    """Lines with runs of blanks as one."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine as far as ``info`` reads it: the manifest of a lowered model, without kernels."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    config = json.loads(CASE.read_text())
    del config["oracle"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(checkpoint)
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=300, replay="exact")
    plan = lower(describe_model(opened, options), load_backend("cpu"), "cpu")
    folder = tmp_path_factory.mktemp("engine")
    manifest = EngineContents(plan, Binary({}, {}, 0, 0), opened).manifest("g++ 12")
    (folder / NAME).write_bytes(seal(manifest, folder))
    return folder


def test_a_config_gives_sizes_on_disk_and_in_memory() -> None:
    lines = words(info(FLASH, "--target", "ascend950").stdout)
    assert "total 96,085 510,286,023,000" in lines
    assert "510.3 GB on disk" in lines
    assert "mxfp8(1,32) 4 202,758,032,400 lookup tables" in lines
    assert "vision.* 259 823,685,120 ignored: the vision part is not built yet" in lines
    assert "vision_config the vision part is not built yet" in lines


def test_a_config_gives_the_cache_plan() -> None:
    lines = words(info(FLASH, "--target", "ascend950").stdout)
    assert "win.0-19 528 133 1,404,480 each sequence, from every row" in lines
    assert "win.20-39, draft.0-2 528 133 1,615,152 each sequence, from kept rows" in lines
    assert ("890 bytes a token; a block of 128 tokens is 113,920 bytes (114,048 as a page of whole records)") in lines
    assert "a resume point at a block edge is 1,351,680 bytes; a running sequence holds 3,105,648" in lines
    assert "replay keeps the last rows of a prompt: at least 128, and 2541 lose nothing; default all" in lines


def test_memory_is_for_the_sequences_asked_about() -> None:
    few = data(FLASH / "config.json", "--target", "ascend950")
    many = data(FLASH, "--target", "ascend950", "--max-num-seqs", "64", "--max-model-len", "32768")
    assert (few["memory"]["sequences"], few["memory"]["tokens"]) == (
        EngineOptions().max_num_seqs, EngineOptions().max_model_len)
    assert many["memory"]["slots"] == few["memory"]["slots"] // EngineOptions().max_num_seqs * 64
    assert many["memory"]["blocks"] == 64 * 257 * 113_920
    assert few["memory"]["arena"] is None  # a backend that is not built tells nothing


def test_a_target_that_is_built_tells_the_memory_of_a_step(engine: Path) -> None:
    model = json.loads((engine / NAME).read_text())["model"]
    again = engine.parent / "again"
    again.mkdir(exist_ok=True)
    (again / "config.json").write_text(json.dumps(model["config"]))
    options = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "300")
    assert data(again, "--target", "cpu", *options)["memory"] == data(engine)["memory"]
    assert data(engine)["memory"]["arena"] > 0


def test_lookup_tables_count_where_a_device_has_to_hold_them(engine: Path) -> None:
    lines, found = words(info(FLASH, "--target", "ascend950").stdout), data(FLASH, "--target", "ascend950")
    assert "lookup tables 202,758,032,400 on the device, as the weights" in lines
    known = ["weights", "tables", "slots", "blocks"]
    assert found["sums"]["total_bytes"] == sum(found["memory"][name] for name in known)
    here, host = words(info(engine).stdout), data(engine)
    sizes = host["sums"]
    assert here[-1].endswith("of lookup tables, in host memory or left on disk")
    assert (f"{gigabytes(sizes['disk_bytes'])} on disk; {gigabytes(sizes['disk_bytes'] - sizes['table_bytes'])} "
            "when the lookup tables stay on disk") in here
    known = ["weights", "slots", "blocks", "arena", "scratch", "drawing"]
    assert sizes["total_bytes"] == sum(host["memory"][name] for name in known)


def test_what_a_runner_of_a_device_lays_out_is_not_told_as_nothing(engine: Path, tmp_path: Path) -> None:
    manifest = json.loads((engine / NAME).read_text()) | {"target": "ascend950"}
    for key in ("digest", "files", "kind", "format"):
        del manifest[key]
    (tmp_path / NAME).write_bytes(seal(manifest, tmp_path))
    assert data(tmp_path)["memory"]["scratch"] is None
    lines = words(info(tmp_path).stdout)
    assert "scratch - of kernels on the device: known when the engine is opened" in lines
    assert any(line.endswith("token counts, drafts and their logits, in host memory") for line in lines)


def test_another_cache_format_takes_other_memory() -> None:
    plain = data(FLASH, "--target", "ascend950", "--cache-format", "f32")
    assert plain["sums"]["bytes_per_token"] == (3 / 2 + 1) * 4 * (512 + 128)


def test_an_engine_tells_what_it_was_compiled_with(engine: Path) -> None:
    found = data(engine)
    assert (found["target"], found["options"]["replay"], found["options"]["max_model_len"]) == ("cpu", "exact", 300)
    assert found["cache"]["clock"]["keep"] == found["cache"]["clock"]["exact_keep"]
    smaller = data(engine, "--max-num-seqs", "1", "--max-model-len", "100")
    assert smaller["memory"]["slots"] * 4 == found["memory"]["slots"]
    assert smaller["sums"]["total_bytes"] < found["sums"]["total_bytes"]
    assert words(info(engine).stdout)[0] == f"deepseek_v41_flash for cpu, from {engine}"


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (("--max-num-seqs", "5"), 3, "smaller max_num_seqs; found 5; allowed <= 4; compile again"),
    (("--max-model-len", "301"), 3, "smaller max_model_len; found 301; allowed <= 300"),
    (("--cache-format", "f32"), 2, "cache_format of an engine is what it was compiled with; found cache_format=f32"),
    (("--target", "ascend950"), 5, "compiled for another target; found cpu; allowed ascend950"),
])
def test_an_engine_is_not_asked_for_what_it_cannot_be(
        engine: Path, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    exit_code, line = refused(engine, *arguments)
    assert exit_code == code and sentence in line and str(engine) in line


@pytest.mark.parametrize("damage", ["sizes", "cache"])
def test_a_damaged_manifest_is_one_line(engine: Path, tmp_path: Path, damage: str) -> None:
    manifest = json.loads((engine / NAME).read_text())
    manifest["footprint"][damage] = {}
    for key in ("digest", "files", "kind", "format"):
        del manifest[key]
    (tmp_path / NAME).write_bytes(seal(manifest, tmp_path))
    exit_code, line = refused(tmp_path)
    assert exit_code == 5 and str(tmp_path) in line and "compile the engine again" in line


def _unknown_key(config: dict[str, Any]) -> None:
    config["text_config"]["no_such_key"] = 1


def _unknown_architecture(config: dict[str, Any]) -> None:
    config["architectures"] = ["OtherForCausalLM"]


@pytest.mark.parametrize(("change", "sentence"), [
    (_unknown_key, "found no_such_key=1"), (_unknown_architecture, "found OtherForCausalLM")])
def test_a_config_that_no_spec_describes_is_one_line(
        tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str) -> None:
    config = json.loads((FLASH / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    exit_code, line = refused(tmp_path, "--target", "ascend950")
    assert exit_code == 2 and sentence in line


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (("no/such/folder/here",), 5, "there is no such folder"),
    ((FLASH, "--max-num-seqs", "0"), 2, "--max-num-seqs"),
    ((FLASH, "--max-model-len", "1048577"), 3, "max_model_len exceeds the positions of the model"),
    ((FLASH, "--max-num-seqs", "100"), 3, "max_num_batched_tokens is too small"),
    ((FLASH, "--target", "sm80"), 2, "sm80"),
])
def test_what_cannot_be_planned_is_one_line(arguments: tuple[str | Path, ...], code: int, sentence: str) -> None:
    target = () if "--target" in arguments else ("--target", "ascend950")
    exit_code, line = refused(*arguments, *target)
    assert exit_code == code and sentence in line


def test_sizes_read_in_decimal_units() -> None:
    assert [gigabytes(n) for n in (12, 113_920, 1_351_680, 510_286_023_000)] == [
        "12 B", "113.9 kB", "1.4 MB", "510.3 GB"]
