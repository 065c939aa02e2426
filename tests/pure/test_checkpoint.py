"""Checkpoints: headers, names, shapes, mapping and the look at every weight; one sentence for each way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.dsl.types import bf16, f32, i64, mxfp4, mxfp8
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint.declared import check_tensors
from deepinfer.runtime.checkpoint.headers import INDEX, SINGLE, Place, read_headers, read_places
from deepinfer.runtime.checkpoint.mapping import Weights
from deepinfer.runtime.checkpoint.scan import has_non_finite, scan, scan_bytes, tables_left_out

Header = dict[str, Any]


def write(file: Path, header: Header | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(dtype: str, shape: list[int], start: int, stop: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def arrays() -> dict[str, np.ndarray]:
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int64),
            "c": np.arange(7, dtype=np.uint8)}


# ---- headers -----------------------------------------------------------------------------------------------------
def test_places_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    save_file(arrays(), tmp_path / SINGLE)
    raw = (tmp_path / SINGLE).read_bytes()
    places = read_places(tmp_path)
    assert {n: p.tensor.shape for n, p in places.items()} == {n: a.shape for n, a in arrays().items()}
    for name, a in arrays().items():
        assert raw[places[name].start : places[name].stop] == a.tobytes()


def test_shards_are_joined_through_the_index(tmp_path: Path) -> None:
    shards = {"x-1.safetensors": {"a": arrays()["a"]}, "x-2.safetensors": {"b": arrays()["b"]}}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}))
    assert read_headers(tmp_path) == {"a": StoredTensor("F32", (2, 3)), "b": StoredTensor("I64", (5,))}
    save_file({"b": arrays()["b"], "a": arrays()["a"]}, tmp_path / "x-2.safetensors")
    with pytest.raises(ArtifactError, match=r"a: a tensor lies in two shards; found x-1.safetensors and x-2"):
        read_headers(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    save_file({"a": arrays()["a"]}, tmp_path / "x-1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x-1.safetensors", "lost": "x-1.safetensors"}}))
    with pytest.raises(ArtifactError, match="index and the shards disagree about where tensors lie; found lost"):
        read_headers(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x-2.safetensors"}}))
    with pytest.raises(ArtifactError, match=r"x-2\.safetensors: a shard that the index names is missing"):
        read_headers(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 3}}'])
def test_a_bad_index_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ArtifactError, match="the index is not a JSON object with a weight_map"):
        read_headers(tmp_path)


def test_a_folder_with_a_config_only_has_no_headers(tmp_path: Path) -> None:
    assert read_headers(tmp_path) == {}


@pytest.mark.parametrize(("header", "data", "sentence"), [
    (b"", b"", "cannot be read"),
    (b"[1]", b"", "is not an object"),
    (b"{]", b"", "header of the file cannot be read"),
    (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}', b"x", "it names twice: a"),
    ({"a": {"dtype": "U8"}}, b"", "entry of the tensor a is damaged"),
    ({"a": entry("Q3", [1], 0, 1)}, b"x", "a is damaged; found dtype Q3"),
    ({"a": entry("U8", [-1], 0, 1)}, b"x", r"found shape \[-1\] at \[0, 1\]"),
    ({"a": entry("F32", [2], 0, 4)}, b"xxxx", r"found 4 bytes for F32 \[2\]; allowed 8 bytes"),
    ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"x" * 6, "overlap: a and b; found b from byte"),
    ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, b"x" * 10, "leave a hole: a and b"),
    ({"a": entry("U8", [4], 0, 4)}, b"x" * 3, r"the file is truncated; found \d+ bytes; allowed \d+ bytes"),
    ({"a": entry("U8", [4], 0, 4)}, b"x" * 5, "the file is longer than its header says"),
    ({"a": entry("U8", [1 << 60], 0, 1 << 60)}, b"x", "the file is truncated"),
])
def test_a_bad_header_is_one_sentence_with_the_file(tmp_path: Path, header: Header | bytes, data: bytes,
                                                    sentence: str) -> None:
    write(tmp_path / SINGLE, header, data)
    with pytest.raises(ArtifactError, match=sentence) as caught:
        read_headers(tmp_path)
    assert str(tmp_path / SINGLE) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"abc", (1 << 40).to_bytes(8, "little"), (999).to_bytes(8, "little") + b"{}"])
def test_a_file_cut_inside_its_header_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(ArtifactError, match="truncated inside its header or is no safetensors file"):
        read_headers(tmp_path)


# ---- names, shapes, dtypes ---------------------------------------------------------------------------------------
PARAMS = [ParamDecl("w.weight", (64, 96), mxfp8(32, 32)), ParamDecl("e.{e}.weight", (8, 64), mxfp4(1, 32), stack=2),
          ParamDecl("n.weight", (64,), bf16), ParamDecl("classes", (5,), i64, derive="classes")]
HEADERS = {"w.weight": StoredTensor("F8_E4M3", (64, 96)), "w.scale": StoredTensor("F8_E8M0", (2, 3)),
           "e.0.weight": StoredTensor("I8", (8, 32)), "e.1.weight": StoredTensor("I8", (8, 32)),
           "e.0.scale": StoredTensor("F8_E8M0", (8, 2)), "e.1.scale": StoredTensor("F8_E8M0", (8, 2)),
           "n.weight": StoredTensor("BF16", (64,))}


def refused(headers: Mapping[str, StoredTensor]) -> str:
    with pytest.raises(ArtifactError) as caught:
        check_tensors(headers, PARAMS, [("vision.*", "no vision")], "here")
    return str(caught.value)


def test_the_official_headers_fit_and_derived_parameters_need_no_tensor() -> None:
    assert check_tensors(HEADERS, PARAMS, [], "here") == []


def test_other_spellings_of_the_same_bytes_fit() -> None:
    other = HEADERS | {"e.0.weight": StoredTensor("U8", (8, 32)), "e.1.weight": StoredTensor("F4", (8, 64)),
                       "w.scale": StoredTensor("U8", (2, 3))}
    assert check_tensors(other, PARAMS, [], "here") == []


def test_ignored_tensors_are_told_with_reason_and_bytes() -> None:
    extra = {"vision.a": StoredTensor("BF16", (3, 5)), "vision.b": StoredTensor("F32", (2,))}
    [group] = check_tensors(HEADERS | extra, PARAMS, [("vision.*", "no vision")], "here")
    assert (group.reason, group.names, group.bytes) == ("no vision", ("vision.a", "vision.b"), 38)


def test_a_renamed_tensor_is_both_missing_and_unexpected() -> None:
    headers = dict(HEADERS)
    headers["w.wieght"] = headers.pop("w.weight")
    assert "1 missing: w.weight; 1 unexpected: w.wieght" in refused(headers)


def test_ten_names_of_each_kind_are_shown() -> None:
    extra = {f"x{i}": StoredTensor("BF16", (1,)) for i in range(13)}
    message = refused(HEADERS | extra)
    assert "13 unexpected: x0, x1, x2, x3, x4, x5, x6, x7, x8, x9 and 3 more" in message


def test_shape_and_dtype_are_told_with_both_values() -> None:
    message = refused(HEADERS | {"n.weight": StoredTensor("F32", (64,)), "w.scale": StoredTensor("F8_E8M0", (2, 2))})
    assert "1 of another shape: w.scale [2, 2] for [2, 3]" in message
    assert "1 of another dtype: n.weight F32 for BF16" in message
    assert "compile the engine again with this checkpoint" in message


def test_a_prefix_of_converted_checkpoints_is_recognised() -> None:
    assert "carry the prefix 'model.'" in refused({f"model.{n}": t for n, t in HEADERS.items()})


# ---- mapping and scan --------------------------------------------------------------------------------------------
def packed(folder: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], gap: int = 0) -> dict[str, Place]:
    """A file with tensors in this order; ``gap`` bytes of padding move them all."""
    header: Header = {}
    at = gap
    if gap:
        header["pad"] = entry("U8", [gap], 0, gap)
    for name, (dtype, shape, data) in tensors.items():
        header[name] = entry(dtype, shape, at, at + len(data))
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    write(folder / SINGLE, text, b"p" * gap + b"".join(data for *_, data in tensors.values()))
    return read_places(folder)


def stored(n: int = 64) -> dict[str, tuple[str, list[int], bytes]]:
    return {"f": ("F32", [n], np.linspace(-1, 1, n, dtype=np.float32).tobytes()),
            "t": ("I64", [n], np.arange(n).tobytes())}


DECLS = [ParamDecl("f", (64,), f32), ParamDecl("t", (64,), i64, below=64)]


def test_parameters_point_into_the_mapped_file(tmp_path: Path) -> None:
    weights = Weights(packed(tmp_path, stored()), DECLS, {})
    [[(data, scale)], _] = weights.addresses()
    assert data == weights.bytes_of("f").ctypes.data
    assert scale == 0
    assert (weights.copied.tensors, weights.copied.bytes) == (0, 0)
    assert not weights.bytes_of("f").flags.owndata


def test_misaligned_tensors_are_copied_and_counted(tmp_path: Path) -> None:
    weights = Weights(packed(tmp_path, stored(), gap=4), DECLS, {})
    assert (weights.copied.tensors, weights.copied.bytes) == (1, 512)
    [_, [(data, _)]] = weights.addresses()
    assert data % 8 == 0
    assert weights.bytes_of("t").view(np.int64).tolist() == list(range(64))


def test_a_derived_parameter_is_bound_to_what_was_made(tmp_path: Path) -> None:
    made = np.arange(5, dtype=np.int64)
    decl = ParamDecl("classes", (5,), i64, derive="classes")
    [[(data, _)]] = Weights({}, [decl], {"classes": made}).addresses()
    assert data == made.ctypes.data
    with pytest.raises(ArtifactError, match=r"classes: .*another shape or dtype.*found \[4\] int64; allowed \[5\] i64"):
        Weights({}, [decl], {"classes": made[:4]})


def nan_f32() -> bytes:
    values = np.zeros(3_000_000, np.float32)
    values[2_999_999] = -np.nan
    return values.tobytes()


@pytest.mark.parametrize(("dtype", "clean", "dirty"), [
    ("F32", np.array([-0.0, 3.4028234e38, -3.4028234e38], np.float32).tobytes(), nan_f32()),
    ("F32", b"\x00\x00\x7f\x7f", np.float32(np.inf).tobytes()), ("F32", b"", np.float32(-np.inf).tobytes()),
    ("BF16", b"\x7f\x7f\x7f\xff", b"\x80\x7f"), ("BF16", b"\x00\x80", b"\x80\xff"), ("BF16", b"", b"\xff\xff"),
    ("F8_E4M3", b"\x7e\xfe\x00\x80", b"\x00\xff"), ("F8_E4M3", b"\x7e", b"\x7f"),
    ("F8_E8M0", bytes(range(255)), b"\x00\xff"), ("I8", bytes(range(256)), b""),
])
def test_nan_and_infinity_are_found_in_every_stored_float(dtype: str, clean: bytes, dirty: bytes) -> None:
    assert not has_non_finite(np.frombuffer(clean, np.uint8), dtype)
    assert has_non_finite(np.frombuffer(dirty, np.uint8), dtype) == bool(dirty)


def with_data(name: str, change: Callable[[bytearray], None]) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = stored()
    dtype, shape, data = tensors[name]
    raw = bytearray(data)
    change(raw)
    return tensors | {name: (dtype, shape, bytes(raw))}


def poison(raw: bytearray) -> None:
    raw[8:12] = np.float32(np.nan).tobytes()


def out_of_range(raw: bytearray) -> None:
    raw[16:24] = np.int64(64).tobytes()


def test_a_bad_value_is_named_by_its_tensor(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="f: the tensor holds a NaN or an infinity"):
        scan(Weights(packed(tmp_path, with_data("f", poison)), DECLS, {}), threads=2)
    with pytest.raises(ArtifactError, match=r"t: the tensor holds an integer out of range; found 64; allowed 0\.\.63"):
        scan(Weights(packed(tmp_path, with_data("t", out_of_range)), DECLS, {}), depth="off")


def test_the_scan_tells_its_progress_and_leaves_out_what_it_is_told(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.runtime.checkpoint.scan.SMALL_TABLES", 131)
    codes = {"w.weight": ("F8_E4M3", [4, 32], b"\x7f" * 128), "w.scale": ("F8_E8M0", [4, 1], b"\x80" * 4),
             "e.weight": ("F8_E4M3", [4, 32], b"\x7f" * 128), "e.scale": ("F8_E8M0", [4, 1], b"\xff" * 4)}
    decls = [ParamDecl("w.weight", (4, 32), mxfp8(1, 32)), ParamDecl("e.weight", (4, 32), mxfp8(1, 32), table=True)]
    weights, seen = Weights(packed(tmp_path, codes), decls, {}), list[int]()
    scan(weights, depth="plain", advance=seen.append)
    assert sum(seen) == scan_bytes(weights, "plain") == 4
    assert (scan_bytes(weights), scan_bytes(weights, "off"), tables_left_out(weights)) == (132, 0, 132)
    with pytest.raises(ArtifactError, match=r"w\.weight: the tensor holds a NaN"):
        scan(weights)


@pytest.mark.parametrize(("code", "scale", "named"), [(b"\x7f", b"\x80", "weight"), (b"\xff", b"\x80", "weight"),
                                                      (b"\x7e", b"\xff", "scale")])
@pytest.mark.parametrize("table", [False, True])
def test_a_nan_code_of_fp8_weights_and_of_small_lookup_tables_is_named(tmp_path: Path, table: bool, code: bytes,
                                                                       scale: bytes, named: str) -> None:
    codes = {"e.weight": ("F8_E4M3", [4, 32], b"\x00" * 127 + code),
             "e.scale": ("F8_E8M0", [4, 1], b"\x80" * 3 + scale)}
    weights = Weights(packed(tmp_path, codes), [ParamDecl("e.weight", (4, 32), mxfp8(1, 32), table=table)], {})
    assert (scan_bytes(weights), tables_left_out(weights)) == (132, 0)
    with pytest.raises(ArtifactError, match=rf"e\.{named}: the tensor holds a NaN; fetch the file again"):
        scan(weights)
