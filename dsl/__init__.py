"""Describe a model, trace it, and get typed graphs.

Entry function of the stage: ``trace(model) -> Program``. Specs import everything they need from here.
"""

from deepinfer.dsl.build import scope
from deepinfer.dsl.config import Config
from deepinfer.dsl.functional import (
    Rope,
    Source,
    Yarn,
    absolute,
    argmax,
    attend,
    block_max,
    by_sequence,
    concat,
    const,
    contract,
    copysign,
    cos,
    draw,
    encode,
    eq,
    exp,
    expand,
    flatten,
    gather,
    group_positions,
    grouped_contract,
    hadamard_matrix,
    iadd,
    imod,
    imul,
    index_score,
    isub,
    ixor,
    le,
    lookback,
    lt,
    maximum,
    minimum,
    output,
    override_rows,
    positions,
    reduce,
    reshape,
    rms_norm,
    rope_frequencies,
    rounded,
    rsqrt,
    scan,
    sigmoid,
    silu,
    sin,
    slice_,
    softmax,
    softplus,
    sqrt,
    take,
    to_float,
    token_ids,
    top_k,
    total,
    where,
    within_blocks,
)
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.model import EngineOptions, Ignored, Model, Program, trace
from deepinfer.dsl.params import Params, Path, Storage, StoredTensor
from deepinfer.dsl.state import PREFIX, GroupTail, Paged, States, Window, backtrack, ring_slack
from deepinfer.dsl.types import DType, Rows, Type, bf16, f32, fp4_e4m3, i64, mxfp4, mxfp8

__all__ = [
    "PREFIX", "Config", "DType", "EngineOptions", "Graph", "GroupTail", "Ignored", "Model", "Node", "Paged",
    "Params", "Path", "Program", "Rope", "Rows", "Source", "States", "Storage", "StoredTensor", "Type",
    "Window", "Yarn", "absolute", "argmax", "attend", "backtrack", "bf16", "block_max", "by_sequence",
    "concat", "const", "contract", "copysign", "cos", "draw", "encode", "eq", "exp", "expand", "f32",
    "flatten", "fp4_e4m3", "gather", "group_positions", "grouped_contract", "hadamard_matrix", "i64", "iadd",
    "imod", "imul", "index_score", "isub", "ixor", "le", "lookback", "lt", "maximum", "minimum", "mxfp4",
    "mxfp8", "output", "override_rows", "positions", "reduce", "reshape", "ring_slack", "rms_norm",
    "rope_frequencies", "rounded", "rsqrt", "scan", "scope", "sigmoid", "silu", "sin", "slice_", "softmax",
    "softplus", "sqrt", "take", "to_float", "token_ids", "top_k", "total", "trace", "where", "within_blocks",
]
