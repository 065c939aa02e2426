"""Where checkpoints come from: folders, the local copy that a variable names, a hub; variants refused by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer.errors import ArtifactError, PlanError, SpecError
from deepinfer.runtime.checkpoint import fetch_weights, open_checkpoint, room
from deepinfer.runtime.checkpoint.headers import INDEX, SINGLE
from deepinfer.runtime.checkpoint.room import Need, gigabytes, require_memory
from deepinfer.runtime.checkpoint.variants import refuse_variants

CONFIG = {"model_type": "toy", "hidden_size": 8}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(folder: Path, config: dict[str, Any] | None = None, weights: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    if weights:
        save_file({"a": np.arange(4, dtype=np.float32)}, folder / SINGLE)
    return folder


# ---- folders -----------------------------------------------------------------------------------------------------
def test_a_folder_and_its_config_file_are_the_same_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        found = open_checkpoint(name)
        assert (found.folder, found.config, found.revision) == (tmp_path, CONFIG, None)
        assert list(found.headers) == list(found.places) == ["a"]


def test_a_config_alone_is_enough_to_compile_and_not_to_run(tmp_path: Path) -> None:
    fill(tmp_path, weights=False)
    assert open_checkpoint(tmp_path).headers == {}
    with pytest.raises(ArtifactError, match="the folder has no weights"):
        fetch_weights(open_checkpoint(tmp_path))


@pytest.mark.parametrize(("name", "sentence"), [
    ("no-such-folder", "there is no such folder; allowed a checkpoint folder or a hub id"),
    ("./a/b/c", "there is no such folder"), ("", "there is no such folder|has no config.json")])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name: str, sentence: str, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=sentence):
        open_checkpoint(name)


def test_a_revision_of_a_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a revision belongs to a hub id"):
        open_checkpoint(fill(tmp_path), revision="main")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=r"config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["", "org/name", "name"])
def test_the_variable_stands_for_the_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    fill(tmp_path / place)
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))
    assert open_checkpoint("org/name").folder == tmp_path / place
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path / "absent"))
    with pytest.raises(ArtifactError, match="DEEPINFER_HF_MODEL_DIR: the folder holds no copy of the checkpoint"):
        open_checkpoint("org/name")


# ---- variants ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("quant", "name"), [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "an NVFP4 checkpoint"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "an NVFP4 checkpoint"),
    ({"quant_method": "ascend"}, "a ModelSlim checkpoint"), ({"quant_method": "gguf"}, "a GGUF checkpoint"),
    ({"quant_method": "gptq"}, "quantised in another way.*found quant_method=gptq"),
    ({"quant_algo": "W4A8"}, "quantised in another way.*found quant_algo=W4A8"),
])
def test_quantised_variants_are_refused_by_name(tmp_path: Path, quant: dict[str, str], name: str) -> None:
    fill(tmp_path, CONFIG | {"quantization_config": quant})
    with pytest.raises(SpecError, match=name) as caught:
        open_checkpoint(tmp_path)
    assert "use the official FP8/FP4 checkpoint" in str(caught.value)


def test_variants_without_a_word_in_the_config_are_recognised_by_their_files() -> None:
    for files, name in ((["quant_model_description_w8a8.json", SINGLE], "ModelSlim"), (["x.gguf"], "a GGUF file"),
                        (["pytorch_model.bin"], "pickled torch files")):
        with pytest.raises(SpecError, match=name):
            refuse_variants(CONFIG, files, "here")
    with pytest.raises(SpecError, match="NVFP4"):
        refuse_variants(CONFIG, [SINGLE], "here", json.dumps({"quantization": {"quant_algo": "NVFP4"}}))


def test_a_file_in_place_of_a_folder_is_named_for_what_it_is(tmp_path: Path) -> None:
    for name, kind, sentence in (("x.gguf", SpecError, "a GGUF file"), ("x.bin", SpecError, "pickled torch files"),
                                 ("x.safetensors", ArtifactError, "a checkpoint is a folder; found a file")):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(kind, match=sentence):
            open_checkpoint(tmp_path / name)


def test_the_official_variants_pass() -> None:
    for quant in ({"quantization_config": {"quant_method": "fp8"}}, {}):
        refuse_variants(CONFIG | quant, [SINGLE, "extra.gguf"], "here")


# ---- room --------------------------------------------------------------------------------------------------------
def test_sizes_read_well() -> None:
    assert (gigabytes(510_286_023_000), gigabytes(1_500_000)) == ("510.3 GB", "1.5 MB")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 24 * 10**9)
    need = Need(weights=307_500_000_000, tables=202_800_000_000, engine=10**9)
    with pytest.raises(PlanError, match=r"found 307\.5 GB of weights, 1\.0 GB for the engine, 202\.8 GB of lookup "
                                        r"tables stay on disk; allowed 24\.0 GB available; .*make_checkpoint"):
        fetch_weights(open_checkpoint(fill(tmp_path)), need)
    require_memory("x", Need(weights=20 * 10**9, tables=10**12))


def test_available_memory_is_what_the_machine_says() -> None:
    assert 0 < room.available_memory() < 1 << 50


# ---- the hub -----------------------------------------------------------------------------------------------------
class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download takes: model info, and files by commit with ranges."""

    folder: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        info = re.fullmatch(r"/api/models/org/toy(?:/revision/(.+))?", path)
        tree = re.fullmatch(rf"/api/models/org/toy/tree/(main|{COMMIT})", path)
        file = re.fullmatch(rf"/org/toy/resolve/(main|{COMMIT})/(.+)", path)
        if tree:
            files = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name}
                     for p in sorted(self.folder.iterdir())]
            self.send(json.dumps(files).encode(), body)
        elif info and info[1] in (None, "main", COMMIT):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.folder.iterdir())]
            self.send(json.dumps({"id": "org/toy", "sha": COMMIT, "siblings": files, "private": False}).encode(), body)
        elif info:
            self.missing("RevisionNotFound")
        elif file and (self.folder / file[2]).is_file():
            self.send((self.folder / file[2]).read_bytes(), body, {"ETag": f'"{file[2]}"', "X-Repo-Commit": COMMIT})
        else:
            self.missing("EntryNotFound" if path.startswith("/org/toy") else "RepoNotFound")

    def missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        total = len(data)
        if ranged:
            data = data[int(ranged[1]) : int(ranged[2] or total) + 1]
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {ranged[1]}-{int(ranged[1]) + len(data) - 1}/{total}")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[type[Hub], dict[str, str]]]:
    """A hub with the repository org/toy, and the environment in which a process uses it."""
    folder = fill(tmp_path / "repository", weights=False)
    weight_map = {}
    for i, name in enumerate(("a", "b"), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: np.arange(100_000 * i, dtype=np.float32)}, folder / file)
        weight_map[name] = file
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    handler = type("Handler", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
                   "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    yield handler, environment
    server.shutdown()
    server.server_close()


PROGRAM = """
import logging, sys
from deepinfer.errors import DeepInferError
from deepinfer.runtime.checkpoint import fetch_weights, open_checkpoint, room
from deepinfer.runtime.checkpoint.room import Need
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
try:
    found = open_checkpoint({name!r}, {arguments})
    {then}
except DeepInferError as error:
    print(type(error).__name__, error)
else:
    print({{n: (t.dtype, t.shape) for n, t in sorted(found.headers.items())}}, found.revision, sorted(found.places))
    print(*sorted(p.name for p in found.folder.iterdir()))
"""


def ask(run_python: Any, environment: dict[str, str], then: str = "pass", name: str = "org/toy",
        arguments: str = "") -> str:
    done = run_python("-c", PROGRAM.format(name=name, arguments=arguments, then=then), env=environment)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


FETCH = "found = fetch_weights(found)"
HEADERS = "{'a': ('F32', (100000,)), 'b': ('F32', (200000,))}"


def test_headers_of_a_hub_checkpoint_come_without_its_weights(hub: Any, run_python: Any) -> None:
    handler, environment = hub
    said = ask(run_python, environment)
    assert f"checkpoint_resolved model=org/toy asked=main revision={COMMIT}" in said
    assert f"{HEADERS} {COMMIT} []" in said
    assert said.splitlines()[-1] == f"config.json {INDEX} tokenizer.json"
    ranged = [line for line in handler.asked if ".safetensors" in line and INDEX not in line and line.startswith("GET")]
    assert ranged
    assert all("bytes=0-100000" in line for line in ranged)


def test_weights_are_fetched_when_asked_for_and_found_again_offline(hub: Any, run_python: Any) -> None:
    _, environment = hub
    said = ask(run_python, environment, FETCH)
    assert f"{HEADERS} {COMMIT} ['a', 'b']" in said
    environment |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    offline = ask(run_python, environment, FETCH)
    assert f"{HEADERS} {COMMIT} ['a', 'b']" in offline


def test_weights_that_do_not_fit_are_not_fetched(hub: Any, run_python: Any) -> None:
    handler, environment = hub
    said = ask(run_python, environment, "fetch_weights(found, Need(10**15))")
    assert "PlanError org/toy: the checkpoint does not fit into memory; found 1000000.0 GB of weights" in said
    said = ask(run_python, environment, "room.free_disk = lambda _: 10**6; fetch_weights(found)")
    assert "PlanError org/toy: the checkpoint does not fit on the disk; found 1.2 MB to fetch into" in said
    shards = [line for line in handler.asked if "-of-00002.safetensors" in line]
    assert all("bytes=0-100000" in line for line in shards), "headers only"


@pytest.mark.parametrize(("name", "arguments", "change", "sentence"), [
    ("org/absent", "", {}, "ArtifactError org/absent: the hub has no such repository, or this token may not see it"),
    ("org/toy", "revision='v9'", {}, "ArtifactError org/toy: the repository has no such revision; found v9"),
    ("org/toy", "", {"HF_HUB_OFFLINE": "1"}, "ArtifactError org/toy: the checkpoint is not in the local cache"),
    ("org/toy", "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "ArtifactError org/toy: the hub does not answer"),
])
def test_each_way_the_hub_can_fail_is_one_sentence(hub: Any, run_python: Any, name: str, arguments: str,
                                                   change: dict[str, str], sentence: str) -> None:
    _, environment = hub
    assert ask(run_python, environment | change, "pass", name, arguments).splitlines()[-1].startswith(sentence)
