"""The specs on the released configs: tensors to the byte, cache records, and what a wrong config is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from deepinfer.dsl import Config, EngineOptions, Model, Paged, Program, Window, trace
from deepinfer.dsl.model import expected_tensors
from deepinfer.dsl.parser import parse_graph
from deepinfer.dsl.printer import print_graph
from deepinfer.errors import SpecError
from deepinfer.model_specs import deepseek_v4, deepseek_v41_flash
from deepinfer.model_specs.registry import build_model, default_hub_id, find_spec, specs

FLASH, DSPARK, PRO, V41 = "DeepSeek-V4-Flash", "DeepSeek-V4-Flash-DSpark", "DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"
# Tensor count and bytes of the released index files, ignored tensors included.
RELEASED = {FLASH: (69_187, 159_609_485_896), DSPARK: (72_317, 166_878_536_440), PRO: (145_116, 864_704_792_696),
            V41: (96_085, 510_286_023_000)}
TEXT_KEYS = {FLASH: None, DSPARK: None, PRO: None, V41: "text_config"}
Raw = dict[str, Any]


def raw_config(repository: Path, name: str) -> Raw:
    loaded: Raw = json.loads((repository / "tests/golden/configs" / name / "config.json").read_text())
    return loaded


def text_part(raw: Raw, name: str) -> Raw:
    """The object of a config that holds the model's sizes."""
    key = TEXT_KEYS[name]
    part: Raw = raw if key is None else raw[key]
    return part


@pytest.fixture(scope="module")
def traced(repository: Path) -> Callable[[str], Program]:
    """The traced model of a released config; each is traced once."""
    made: dict[str, Program] = {}

    def get(name: str) -> Program:
        if name not in made:
            made[name] = trace(build_model(Config(raw_config(repository, name)), EngineOptions()))
        return made[name]

    return get


def refusal(raw: Mapping[str, Any]) -> str:
    """The sentence that a config is refused with."""
    with pytest.raises(SpecError) as e:
        trace(build_model(Config(raw), EngineOptions()))
    return str(e.value)


def changed(repository: Path, name: str, **keys: Any) -> Raw:
    raw = raw_config(repository, name)
    text_part(raw, name).update(keys)
    return raw


# ---- the released checkpoints --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RELEASED)
def test_tensors_of_a_released_checkpoint_match_in_count_and_bytes(traced: Callable[[str], Program], name: str) -> None:
    model = traced(name).model
    tensors = expected_tensors(model)
    for ignored in model.ignored:
        assert not [k for k in tensors if ignored.matches(k)]
        assert all(ignored.matches(k) for k in ignored.tensors)
        tensors |= ignored.tensors
    assert (len(tensors), sum(t.nbytes for t in tensors.values())) == RELEASED[name]


@pytest.mark.parametrize("name", RELEASED)
def test_printed_graphs_parse_back_to_the_same_graphs(traced: Callable[[str], Program], name: str) -> None:
    for graph in traced(name).graphs.values():
        again = parse_graph(print_graph(graph))
        assert print_graph(again) == print_graph(graph)
        assert again.digest() == graph.digest()


def cache_bytes(model: Model) -> Fraction:
    """Per token."""
    paged = [s for s in model.states if isinstance(s, Paged)]
    return sum((Fraction(s.record_bytes, s.tokens_per_entry) for s in paged), Fraction())


@pytest.mark.parametrize(("name", "per_token"), [
    (FLASH, "3514.25"), (DSPARK, "3514.25"), (PRO, "5031.4375"), (V41, "890")])
def test_the_cache_holds_the_stated_bytes_per_token(
        traced: Callable[[str], Program], name: str, per_token: str) -> None:
    assert cache_bytes(traced(name).model) == Fraction(per_token)


@pytest.mark.parametrize(("name", "window", "entry", "key"), [
    (FLASH, 584, 584, 68), (PRO, 584, 584, 68), (V41, 528, 288, 68)])
def test_cache_records_have_the_released_sizes(
        traced: Callable[[str], Program], name: str, window: int, entry: int, key: int) -> None:
    states = traced(name).model.states
    assert [states[k].record_bytes for k in ("win.0", "kv.2", "key.2")] == [window, entry, key]


def test_the_layer_schedules_follow_compress_ratios(traced: Callable[[str], Program]) -> None:
    """V4-Flash: 2 window-only layers, 21 CSA, 20 HCA. V4-Pro: 30 CSA, 31 HCA."""
    for name, csa, hca in ((FLASH, 21, 20), (DSPARK, 21, 20), (PRO, 30, 31)):
        step = traced(name).graphs["step"]
        kinds = [tuple(kind for kind, _, _ in n.attrs["sources"]) for n in step.of("attend")]
        assert kinds.count(("window", "selected")) == csa
        assert kinds.count(("window", "dense")) == hca
        assert len(step.of("index_score")) == csa


def test_the_first_layers_of_v4_look_their_experts_up(traced: Callable[[str], Program]) -> None:
    model = traced(PRO).model
    tables = {k: p for k, p in model.params.declared.items() if k.endswith("tid2eid")}
    assert sorted(tables) == [f"layers.{i}.ffn.gate.tid2eid" for i in range(3)]
    assert {(p.shape, p.below) for p in tables.values()} == {((129280, 6), 384)}
    assert "layers.2.ffn.gate.bias" not in model.params.declared
    assert "layers.3.ffn.gate.bias" in model.params.declared


def test_drafts_have_the_heads_their_configs_describe(traced: Callable[[str], Program]) -> None:
    assert [traced(n).model.draft_tokens for n in (FLASH, DSPARK, PRO, V41)] == [1, 5, 1, 5]
    assert traced(DSPARK).model.draft_filler == 128799
    contexts = [s.name for s in traced(DSPARK).model.states if s.name.startswith("draft.")]
    assert contexts == ["draft.0", "draft.1", "draft.2"]
    mtp = traced(FLASH).model.states["draft.0"]
    assert isinstance(mtp, Window) and mtp.first_position == 1
    for name in RELEASED:
        assert not traced(name).graphs["draft"].of("extend", "append")


def test_v4_pro_with_a_dspark_head_needs_no_new_line(repository: Path) -> None:
    raw = raw_config(repository, PRO)
    raw |= {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [58, 59, 60],
            "dspark_markov_rank": 512, "compress_ratios": [*raw["compress_ratios"][:61], 0, 0, 0]}
    model = trace(build_model(Config(raw), EngineOptions())).model
    assert len(expected_tensors(model)) == RELEASED[PRO][0] - 2_343 + 3 * 2_333 + 10


@pytest.mark.parametrize("name", RELEASED)
def test_every_key_of_a_config_is_read_or_ignored_with_a_reason(repository: Path, name: str) -> None:
    raw = raw_config(repository, name)
    text_part(raw, name)["a_setting_of_tomorrow"] = 7
    sentence = refusal(raw)
    assert "a_setting_of_tomorrow=7" in sentence and "hidden_size" in sentence and "config.json" in sentence


@pytest.mark.parametrize("nested", ["rope_scaling", "quantization_config"])
def test_an_unknown_key_inside_an_object_is_an_error_too(repository: Path, nested: str) -> None:
    raw = raw_config(repository, FLASH)
    raw[nested]["mscale"] = 0.7
    sentence = refusal(raw)
    assert "mscale=0.7" in sentence and f"config.json: {nested}" in sentence


# Keys that a config may leave out.
OPTIONAL = {"quantization_config", "rope_scaling", "expert_dtype", "attention_bias", "tie_word_embeddings",
            "candidate_source_layer_id", "engram_layer_ids", "num_nextn_predict_layers"}


@pytest.mark.parametrize("name", [DSPARK, V41])
def test_a_missing_key_is_named(repository: Path, name: str) -> None:
    spec = find_spec(Config(raw_config(repository, name)))
    for key in text_part(raw_config(repository, name), name):
        if key in spec.IGNORED_KEYS or key in OPTIONAL:
            continue
        raw = raw_config(repository, name)
        del text_part(raw, name)[key]
        assert f"the key {key} is missing" in refusal(raw)


def test_a_quantised_v4_checkpoint_says_how_its_experts_are_stored(repository: Path) -> None:
    raw = raw_config(repository, FLASH)
    del raw["expert_dtype"]
    assert "the key expert_dtype is missing" in refusal(raw)


# ---- values --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("key", "value", "allowed"), [
    ("scoring_func", "softmax", "sqrtsoftplus"), ("topk_method", "greedy", "noaux_tc"), ("hidden_act", "gelu", "silu"),
    ("norm_topk_prob", False, "True"), ("num_key_value_heads", 8, "1"), ("attention_bias", True, "False"),
    ("n_shared_experts", 2, "1"), ("tie_word_embeddings", True, "False"), ("hidden_size", "4096", "an integer >= 1"),
    ("rms_norm_eps", None, "a number"), ("expert_dtype", "int4", "'fp4', 'fp8'"), ("sliding_window", 0, ">= 1"),
    ("num_nextn_predict_layers", 2, "0, 1"), ("compress_ratios", [0, "4"], "a list of integers"),
    ("o_groups", 7, "a multiple of 7"), ("qk_rope_head_dim", 63, "even"), ("qk_rope_head_dim", 256, "even, <= 128"),
    ("num_hash_layers", 44, "<= 43"), ("num_experts_per_tok", 257, "<= 256"), ("head_dim", 500, "a multiple of 64"),
    ("index_head_dim", 96, "a power of two"), ("index_head_dim", 144, "a multiple of 32"),
])
def test_a_v4_value_that_is_not_computed_is_named(repository: Path, key: str, value: object, allowed: str) -> None:
    sentence = refusal(changed(repository, FLASH, **{key: value}))
    assert key in sentence and "; found " in sentence and allowed in sentence and sentence.startswith("config.json: ")


LENGTH = "compress_ratios must have one entry per layer and draft layer"
UNKNOWN_RATIO = "compress_ratios has an entry that this spec does not compute"


@pytest.mark.parametrize(("keys", "said"), [
    ({"compress_ratios": [0, 0, 4]}, f"{LENGTH}; found 3; allowed 44"),
    ({"num_hidden_layers": 42}, f"{LENGTH}; found 44; allowed 43"),
    ({"compress_ratios": [8] * 44}, f"{UNKNOWN_RATIO}; found 8; allowed 0, 4, 128"),
    ({"compress_ratios": [4] * 44}, "compress_ratios of draft layers must be 0; found 4; allowed 0"),
    ({"num_nextn_predict_layers": 0}, "found 44; allowed 43"),
])
def test_layer_lists_of_v4_that_contradict_each_other_are_refused(
        repository: Path, keys: Raw, said: str) -> None:
    assert said in refusal(changed(repository, FLASH, **keys))


@pytest.mark.parametrize(("keys", "said"), [
    ({"dspark_target_layer_ids": [41, 42, 43]},
     "dspark_target_layer_ids must be rising layer ids; found 41, 42, 43; allowed 0..42"),
    ({"dspark_target_layer_ids": [42, 41, 40]}, "rising"), ({"dspark_target_layer_ids": []}, "rising"),
    ({"dspark_target_layer_ids": [41, 42]}, "found 46; allowed 45"),
    ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id is not a token; found 129280; allowed 0..129279"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
])
def test_a_dspark_head_that_does_not_fit_its_backbone_is_refused(repository: Path, keys: Raw, said: str) -> None:
    assert said in refusal(changed(repository, DSPARK, **keys))


@pytest.mark.parametrize(("keys", "said"), [
    ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "kv_source_layer_ids names a layer without compression; found 1"),
    ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 and its key/value source have different compress_ratios"),
    ({"kv_source_layer_ids": [2, 8, 14, 21]}, "key/value source"),
    ({"index_source_layer_ids": [2, 8, 20]}, "a key/value source must choose its own entries; found 14"),
    ({"candidate_source_layer_id": 21}, "candidate_source_layer_id must be an index source; found 21"),
    ({"candidate_topk_blocks": 8}, "fewer entries than index_topk"),
    ({"compress_ratios": [0, 0, 2]}, f"{LENGTH}; found 3; allowed 43"),
    ({"engram_num_embeddings": [1, 2]}, "engram_num_embeddings"),
])
def test_layer_lists_of_v41_that_contradict_each_other_are_refused(repository: Path, keys: Raw, said: str) -> None:
    assert said in refusal(changed(repository, V41, **keys))


@pytest.mark.parametrize(("quant", "said"), [
    ({"quant_method": "modelopt"}, "quant_method='modelopt'"), ({"quant_method": "gguf"}, "quant_method='gguf'"),
    ({"scale_fmt": "float32"}, "scale_fmt"), ({"activation_scheme": "static"}, "activation_scheme"),
    ({"weight_block_size": [128]}, "weight_block_size"), ({"fmt": "e5m2"}, "fmt"),
])
def test_another_quantisation_is_refused_by_name(repository: Path, quant: Raw, said: str) -> None:
    raw = raw_config(repository, FLASH)
    raw["quantization_config"] |= quant
    assert said in refusal(raw)


# ---- options -------------------------------------------------------------------------------------------------------
def test_without_cache_quantisers_every_record_is_f32_and_nothing_is_spread(repository: Path) -> None:
    program = trace(build_model(Config(raw_config(repository, FLASH)), EngineOptions(cache_format="f32")))
    records = {str(s.record) for s in program.model.states}
    assert records == {"f32[512]", "f32[128]", "f32[2048]", "f32[1024]", "bf16[16384]"}
    assert not [n for n in program.graphs["step"].of("const") if n.attrs.get("make") == "hadamard"]


def test_without_activation_quantisers_no_linear_casts_its_input(repository: Path) -> None:
    program = trace(build_model(Config(raw_config(repository, FLASH)), EngineOptions(act_format="f32")))
    assert "mxfp8(1,128)" not in {n.attrs["dtype"] for g in program.graphs.values() for n in g.of("encode")}


def test_the_profile_without_rounding_keeps_the_turned_features_of_a_record_in_f32(repository: Path) -> None:
    model = build_model(Config(raw_config(repository, FLASH)), EngineOptions(profile="wide"))
    assert str(model.states["win.0"].record) == "mxfp8(1,64)[448]+f32[64]"


# ---- registry ------------------------------------------------------------------------------------------------------
def test_a_config_finds_its_spec_by_architecture_or_model_type() -> None:
    assert find_spec(Config({"architectures": ["DeepseekV4ForCausalLM"]})) is deepseek_v4
    assert find_spec(Config({"architectures": ["DeepseekV41ForCausalLM"]})) is deepseek_v41_flash
    assert find_spec(Config({"model_type": "deepseek_v4"})) is deepseek_v4
    assert find_spec(Config({"model_type": "deepseek_v41"})) is deepseek_v41_flash


def test_the_released_configs_find_their_specs(repository: Path) -> None:
    for name in (FLASH, DSPARK, PRO):
        assert find_spec(Config(raw_config(repository, name))) is deepseek_v4
    assert find_spec(Config(raw_config(repository, V41))) is deepseek_v41_flash


@pytest.mark.parametrize(("raw", "found"), [
    ({"architectures": ["MixtralForCausalLM"], "model_type": "deepseek_v4"}, "MixtralForCausalLM"),
    ({"model_type": "mamba"}, "'mamba'"), ({}, "None"),
])
def test_an_unknown_architecture_names_found_and_supported(raw: Raw, found: str) -> None:
    sentence = refusal(raw)
    assert found in sentence
    assert "DeepseekV41ForCausalLM" in sentence and "DeepseekV4ForCausalLM" in sentence


def test_the_default_checkpoint_is_the_newest_v41() -> None:
    assert default_hub_id() == "deepseek-ai/DeepSeek-V4.1-Flash-1017"
    assert all(s.HUB_IDS for s in specs())


DENSE: Raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
              "rope_theta": 10000, "tie_word_embeddings": True, "max_position_embeddings": 128}


def test_a_spec_of_ones_own_is_given_as_a_dotted_name() -> None:
    model = build_model(Config(DENSE), EngineOptions(), spec="specs.dense_gqa")
    assert model.name == "dense_gqa"
    assert len(expected_tensors(trace(model).model)) == 11


@pytest.mark.parametrize(("spec", "said"), [
    ("no.such_module", "there is no spec of this name; found no"),
    ("json", "json: the module is not a spec; found no ARCHITECTURE"),
])
def test_a_name_that_is_no_spec_is_refused(spec: str, said: str) -> None:
    with pytest.raises(SpecError) as e:
        build_model(Config(DENSE), EngineOptions(), spec=spec)
    assert said in str(e.value)
