"""The store of a server: its flags, and the retention class of a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer.cli import main
from deepinfer.errors import SpecError
from deepinfer.recipe.fields import Field
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.server.engine_process import EngineSettings, store_settings
from deepinfer.runtime.server.extensions import Caller, cache_extensions
from deepinfer.runtime.store.settings import parse_retention


@pytest.mark.parametrize(("tools", "header", "cls"), [(False, None, "chat"), (True, None, "agent"),
                                                      (True, "chat", "chat"), (False, "agent", "agent"),
                                                      (True, "a week", "agent"), (False, "", "chat"),
                                                      (True, "batch", "batch")])
def test_tools_make_a_request_an_agents_and_the_header_overrides(tools: bool, header: str | None, cls: str) -> None:
    body = Field({"tools": [{"type": "function"}]} if tools else {})
    retention = parse_retention("batch=30d", "--store-retention")
    sampling = cache_extensions(body, Caller(None, header), retention)
    assert sampling["cache_class"] == cls and SamplingParams(**sampling).cache_class == cls


def test_settings_reach_the_store(tmp_path: Path) -> None:
    assert store_settings(EngineSettings(endpoint="", engine="")) is None
    found = store_settings(EngineSettings(endpoint="", engine="", prefix_store=str(tmp_path), store_quota=1 << 40,
                                          store_retention={"agent": 7200, "chat": 3600}, store_backend="threads"))
    assert found is not None and (found.folder, found.quota, found.backend) == (tmp_path, 1 << 40, "threads")
    assert found.retention == {"agent": 7200, "chat": 3600}
    with pytest.raises(SpecError, match="quota"):
        store_settings(EngineSettings(endpoint="", engine="", prefix_store=str(tmp_path), store_quota=5))


@pytest.mark.parametrize(("flags", "words"), [(["--store-quota", "1GiB"], "name its folder with --prefix-store"),
                                              (["--prefix-store", "x", "--store-quota", "much"], "not a size"),
                                              (["--prefix-store", "/dev/null"], "not a folder"),
                                              (["--prefix-store", ""], "not a folder"),
                                              (["--prefix-store", "x", "--store-retention", "3d"], "not a retention"),
                                              (["--prefix-store", "x", "--store-retention", "chat=5m"], "an hour"),
                                              (["--prefix-store", "x", "--store-quota", "1MiB"], "one segment"),
                                              (["--prefix-store", "x", "--no-prefix-cache"], "leave one of them out")])
def test_a_wrong_flag_is_one_sentence_before_anything_starts(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(main, ["serve", str(tmp_path), "--port", "0", *flags])
    assert done.exit_code == 2 and words in done.output, done.output
