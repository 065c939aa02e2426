"""Made checkpoints: exactly the official names, shapes and formats, equal bytes for equal seeds, sane values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer.dsl import Config
from deepinfer.errors import ArtifactError, PlanError, SpecError
from deepinfer.model_specs.engram import classes_of, token_classes
from deepinfer.runtime.checkpoint import room
from deepinfer.runtime.checkpoint.declared import check_tensors
from deepinfer.runtime.checkpoint.headers import INDEX, SINGLE, read_headers, read_places
from deepinfer.runtime.checkpoint.mapping import Weights
from deepinfer.tools.make_checkpoint import make
from deepinfer.tools.make_checkpoint.codes import bf16_bits, e4m3_values
from deepinfer.tools.make_checkpoint.make import describe_tensors, make_checkpoint
from deepinfer.tools.make_checkpoint.shards import header_bytes, plan_shards
from deepinfer.tools.make_checkpoint.vocabulary import make_tokenizer

CASES = ("v41_a_f32", "v41_b_bf16", "v41_c_quant", "v4_case_a", "v4_case_b", "v4_case_d")
MB = 10**6


@pytest.fixture
def config(repository: Path, tmp_path: Path) -> Path:
    return config_of(repository, tmp_path, "v41_c_quant")


def config_of(repository: Path, folder: Path, case: str) -> Path:
    """config.json of a golden case without what only its harness reads."""
    raw = json.loads((repository / "tests" / "golden" / "cases" / case / "config.json").read_text())
    raw.pop("oracle", None)
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    return file


@pytest.mark.parametrize("case", ["v41_b_bf16", "v41_c_quant", "v4_case_b", "v4_case_d"])
def test_headers_are_those_of_the_golden_checkpoint(repository: Path, tmp_path: Path, case: str) -> None:
    golden = read_headers(repository / "tests" / "golden" / "cases" / case)
    made = make_checkpoint(config_of(repository, tmp_path, case), tmp_path / "out")
    assert read_headers(tmp_path / "out") == golden
    assert (made.tensors, made.bytes) == (len(golden), sum(t.nbytes for t in golden.values()))


def test_equal_seeds_give_equal_tensors_in_any_shards(config: Path, tmp_path: Path) -> None:
    def tensors(out: str, seed: int, shard: int) -> dict[str, bytes]:
        made = make_checkpoint(config, tmp_path / out, seed=seed, shard_bytes=shard)
        assert (tmp_path / out / (SINGLE if made.files == 1 else INDEX)).is_file()
        return {n: p.file.read_bytes()[p.start : p.stop] for n, p in read_places(tmp_path / out).items()}

    whole, cut, other = tensors("a", 3, 10**9), tensors("b", 3, MB), tensors("c", 4, MB)
    assert whole == cut
    assert whole.keys() == other.keys()
    assert sum(whole[n] != other[n] for n in whole) > 0.9 * len(whole)


def test_shards_stay_below_their_size_and_tensors_lie_aligned(config: Path, tmp_path: Path) -> None:
    make_checkpoint(config, tmp_path / "out", shard_bytes=MB)
    places = read_places(tmp_path / "out")
    for file in {p.file for p in places.values()}:
        data = sum(p.tensor.nbytes for p in places.values() if p.file == file)
        assert data <= MB or sum(p.file == file for p in places.values()) == 1
    width = {"F32": 4, "BF16": 2, "I64": 8}
    assert not [n for n, p in places.items() if p.start % width.get(p.tensor.dtype, 1)]


def test_the_safetensors_library_reads_the_files(config: Path, tmp_path: Path) -> None:
    make_checkpoint(config, tmp_path / "out")
    with safe_open(tmp_path / "out" / SINGLE, framework="numpy") as f:
        assert set(f.keys()) == set(read_headers(tmp_path / "out"))
        assert f.get_tensor("layers.0.hc_attn_fn").dtype == np.float32


def raw(out: Path, name: str, kind: type) -> np.ndarray:
    place = read_places(out)[name]
    return np.frombuffer(place.file.read_bytes()[place.start : place.stop], kind).reshape(place.tensor.shape)


def as_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_values_have_the_size_that_keeps_activations_at_one(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_checkpoint(config, out)
    head = as_f32(raw(out, "head.weight", np.uint16))
    assert head.std() == pytest.approx(head.shape[1] ** -0.5, rel=0.05)
    norm = as_f32(raw(out, "norm.weight", np.uint16))
    assert norm.mean() == pytest.approx(1, abs=0.05)
    assert 0.05 < norm.std() < 0.2
    codes = raw(out, "layers.0.attn.wq_b.weight", np.uint8)
    magnitude = e4m3_values()[codes & 0x7F]
    scale = np.ldexp(1.0, raw(out, "layers.0.attn.wq_b.scale", np.uint8).astype(int) - 127)
    value = magnitude * np.repeat(np.repeat(scale, 32, 0), 32, 1)[: codes.shape[0], : codes.shape[1]]
    assert np.sqrt((value**2).mean()) == pytest.approx(codes.shape[1] ** -0.5, rel=0.4)
    assert np.unique(scale).size > 1, "scales that are all equal would hide a wrong index"
    assert magnitude.max() > 224, "codes use the range of their format"
    fp4 = raw(out, "layers.0.ffn.experts.1.w1.weight", np.uint8)
    assert set(np.unique(fp4 & 7)) == set(range(8))
    assert set(np.unique(fp4 >> 4)) == set(range(16))


def test_bf16_bits_round_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.004], np.float32)
    assert bf16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF81]


@pytest.mark.parametrize(("storage", "dtypes"), [("bf16", {"BF16", "F32"}), ("f32", {"F32"})])
def test_plain_storage_has_no_scales_and_no_quantisation_in_its_config(config: Path, tmp_path: Path, storage: str,
                                                                        dtypes: set[str]) -> None:
    make_checkpoint(config, tmp_path / "out", storage=storage)
    headers = read_headers(tmp_path / "out")
    assert {t.dtype for t in headers.values()} == dtypes
    assert not [n for n in headers if n.endswith(".scale")]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("case", CASES[:3])
def test_the_tokenizer_has_the_classes_that_the_tables_ask_for(repository: Path, tmp_path: Path, case: str) -> None:
    file = config_of(repository, tmp_path, case)
    make_checkpoint(file, tmp_path / "out")
    classes = token_classes(tmp_path / "out", Config.load(file))
    text = json.loads(file.read_text())["text_config"]
    assert classes.max() + 1 == text["engram_compressed_vocab_size"]


def test_a_made_tokenizer_encodes_any_text_and_has_the_control_tokens() -> None:
    config = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "text_config": {}}
    tokenizer = Tokenizer.from_str(make_tokenizer(config, 3000, 2000))
    text = "Grüße, 世界 \n\t\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 3000
    assert int(classes_of(tokenizer).max()) + 1 == 2000
    assert tokenizer.id_to_token(1).startswith("<")
    assert sorted(tokenizer.get_vocab().values()) == list(range(3000))


def test_classes_that_no_tokenizer_can_have_are_refused() -> None:
    with pytest.raises(SpecError, match=r"found 300; allowed \d+\.\.\d+ for 280 ids"):
        make_tokenizer({}, 280, 300)
    with pytest.raises(SpecError, match="no room for the 256 byte tokens"):
        make_tokenizer({}, 200, 100)


def test_hash_routing_tables_hold_different_experts_in_range(repository: Path, tmp_path: Path) -> None:
    make_checkpoint(config_of(repository, tmp_path, "v4_case_d"), tmp_path / "out")
    [name] = [n for n in read_headers(tmp_path / "out") if n.endswith("layers.0.ffn.gate.tid2eid")]
    experts = json.loads((tmp_path / "config.json").read_text())["n_routed_experts"]
    table = raw(tmp_path / "out", name, np.int64)
    assert table.min() >= 0
    assert table.max() < experts
    assert all(len(set(row)) == len(row) for row in table.tolist())


def test_the_released_checkpoint_is_read_checked_and_mapped_at_its_real_size(
        repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All headers of the 510 GB checkpoint, over files whose data are holes."""
    raw = json.loads((repository / "tests" / "golden" / "configs" / "DeepSeek-V4.1-Flash" / "config.json").read_text())
    model, tensors = describe_tensors(raw, "official", None)
    shards = plan_shards({name: t.stored for name, t in tensors.items()}, 11 * 10**9)
    for shard in shards:
        head = header_bytes(shard)
        with (tmp_path / shard.file).open("wb") as f:
            f.write(head)
            f.truncate(len(head) + sum(t.nbytes for t in shard.tensors.values()))
    weight_map = {name: s.file for s in shards for name in s.tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    places = read_places(tmp_path)
    headers = {name: p.tensor for name, p in places.items()}
    assert (len(headers), sum(t.nbytes for t in headers.values())) == (96_085, 510_286_023_000)
    params = list(model.params.declared.values())
    ignored = check_tensors(headers, params, [(i.pattern, i.reason) for i in model.ignored], "released")
    assert sum(len(group.names) for group in ignored) == 309
    weights = Weights(places, params, {p.name: np.zeros(p.shape, np.int64) for p in params if p.derive})
    bound = [pair for tensors_of in weights.addresses() for pair in tensors_of]
    assert len({data for data, _ in bound}) == len(bound)
    assert weights.copied.tensors == 0
    monkeypatch.setattr(room, "free_disk", lambda _: 10**11)
    with pytest.raises(PlanError, match=r"released: .*found 510\.3 GB to fetch into .*; allowed 100\.0 GB free"):
        room.require_disk("released", sum(t.nbytes for t in headers.values()), tmp_path)


def test_nothing_is_written_where_something_is_or_does_not_fit(config: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="the folder holds something already"):
        make_checkpoint(config, tmp_path)
    monkeypatch.setattr(make, "free_disk", lambda _: 5 * MB)
    with pytest.raises(PlanError, match=r"does not fit on the disk; found 4\.2 MB; allowed 5\.0 MB free"):
        make_checkpoint(config, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_failure_half_way_leaves_nothing(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make, "sync", fail)
    with pytest.raises(OSError, match="No space"):
        make_checkpoint(config, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_the_command_line_teaches_and_reports(config: Path, tmp_path: Path, run_python) -> None:
    done = run_python("-m", "deepinfer.tools.make_checkpoint", "--help")
    assert "engram_compressed_vocab_size classes; the config is not changed" in " ".join(done.stdout.split())
    done = run_python("-m", "deepinfer.tools.make_checkpoint", "--config", str(config), "--out", str(tmp_path / "out"),
                      "--shard-size", "0")
    assert done.returncode == 2
    assert "'0' is no size; write 4GB, 500MB or a number of bytes" in done.stderr
    done = run_python("-m", "deepinfer.tools.make_checkpoint", "--config", str(config), "--out", str(tmp_path / "out"),
                      "--shard-size", "1MB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("made 738 tensors, 4191504 bytes, in 5 files")
