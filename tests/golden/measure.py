"""Measures how far the reference interpreter lies from the golden values where a gate cannot be derived from a dtype.

    PYTHONPATH=tests python tests/golden/measure.py

An engine is held to three times what this finds and writes into measured.json beside this file:

``bf16``   quantiles of the row errors between two runs of the prompt in f32 arithmetic with the golden selections
           pinned: with the rounding points of profile bf16, and without them (wide).
``f32``    V4.1: largest row error of an f32 run from golden tensors of a few rows each. Where caches and activations
           are quantised all of them stand behind the same stored values, and one that falls the other way moves all.
``last_bit`` no gate: what happens to the 99 % gate of the quantised case when every f32 weight moves by at most one
           step of its last bit. The least and the greatest 99 % quantile of ``SEEDS`` such runs in f32 against the
           golden logits, the largest row error of all, and the part of the runs within the gate.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from golden.cases import QUANTILES, V4, V41, Case, load_case, row_errors
from golden.gates import GATES
from torch import Tensor

SEEDS = 12


def bf16_distances(case: Case) -> dict[str, float]:
    wide, bf16 = (case.session(profile=p).feed(case.ids, pins=case.pins) for p in ("wide", "bf16"))
    errors = row_errors(bf16, wide)
    return {key: rounded(float(errors.quantile(q))) for key, q in QUANTILES.items()}


def f32_distances(case: Case) -> dict[str, float]:
    g = case.golden
    found: dict[str, Tensor] = {}
    session = case.session(narrowed=True)
    session.feed(case.ids)
    hit, anchor, cached = session.fork(), int(g["greedy.tokens"][0]), int(g["prefix.cached"])
    hit.adopt(cached)
    found["prefix.logits"] = hit.feed(case.ids[cached:])[-8:]
    drafted = session.draft(anchor).outputs
    found |= {"draft.logits0": drafted["draft_logits"][0], "draft.base_logits0": drafted["base_logits"][0]}
    found["greedy.logits"] = torch.cat([session.feed([t]) for t in g["greedy.tokens"].tolist()])
    for name in [k for k in g if k.startswith("replay") and k.endswith(".logits")]:
        keep = int(name.removeprefix("replay").removesuffix(".logits"))
        found[name] = case.session(narrowed=True).feed(case.ids, keep=keep)[-8:]
    return {name: rounded(float(row_errors(rows, g[name]).max())) for name, rows in sorted(found.items())}


def last_bit_distances(case: Case) -> dict[str, float]:
    rows, found = case.golden["logits.rows"].long(), []
    for seed in range(SEEDS):
        random, other = torch.Generator().manual_seed(seed), replace(case)
        for name, w in case.weights.items():
            if w.dtype == torch.float32:
                step = torch.randint(-1, 2, w.shape, generator=random)
                other.weights[name] = torch.where(step == 0, w, w.nextafter(step * torch.tensor(torch.inf)))
        found.append(row_errors(other.session().feed(case.ids)[rows], case.golden["logits"]))
    tails = [float(errors.quantile(0.99)) for errors in found]
    return {"quantile99_least": rounded(min(tails)), "quantile99_greatest": rounded(max(tails)),
            "largest": rounded(max(float(errors.max()) for errors in found)),
            "within_gate": rounded(sum(t <= GATES[case.name].quantile99 for t in tails) / SEEDS)}


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


if __name__ == "__main__":
    measured = {"bf16": {name: bf16_distances(load_case(name)) for name in (*V41, *V4)},
                "f32": {name: f32_distances(load_case(name)) for name in V41},
                "last_bit": {"v41_c_quant": last_bit_distances(load_case("v41_c_quant"))}}
    text = json.dumps(measured, indent=1) + "\n"
    print(text)
    Path(__file__).with_name("measured.json").write_text(text)
