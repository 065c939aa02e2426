"""The golden cases as whole engines on the CPU twin; ``python tests/ascend/golden_on_twin.py`` writes the result.

Each case runs its whole prompt in one step and in chunks, then its greedy continuation token by token with a draft in
front of each, and is held to the gates that the CPU engine is held to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["DEEPINFER_ASCEND_TWIN"] = "1"

import numpy as np
import torch
from compiled import checkpoint_of, engine_of
from golden.cases import V4, V41, Case, load_case, row_errors
from golden.engines import LIMITS, decoded, fed, stacked
from golden.gates import GATES, V4_GATE, check, check_drafts, check_few
from torch import Tensor

from deepinfer import LLM

RESULT = Path(__file__).with_name("golden_on_twin.json")
CHUNKS = (17, 1, 90)
MTP = "v4_mtp"
CASES = (*V41, *V4, MTP)
BUDGET = 900.0
MTP_PLACES = (0, 1, 17, 20, 41, 127, 148)


def near(found: Tensor, expected: Tensor) -> float:
    """The largest row error, which has to be within the gate of V4."""
    largest = float(row_errors(found, expected).max())
    assert largest < V4_GATE, largest
    return largest


def continued(llm: LLM, case: Case, whole: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The golden greedy tokens, one decode each, their logits and their drafts."""
    g = case.golden
    newer = "greedy.tokens" in g
    expected = g["greedy.tokens" if newer else "greedy_ids"].tolist()
    with llm.session() as s:
        s.feed(case.ids)
        begun = time.process_time()
        tokens, following, drafts = decoded(s, whole[-1], expected)
        seconds = (time.process_time() - begun) / len(expected)
    assert tokens == expected
    if newer:
        gates = GATES[case.name]
        check_few(following, "greedy.logits", g["greedy.logits"], case.name, gates)
        check_drafts(stacked(drafts, "tokens"), stacked(drafts, "logits"), stacked(drafts, "confidence"),
                     g["draft.tokens"].long(), g["draft.confidence"], gates)
    else:
        near(torch.cat((torch.from_numpy(whole[-1:]), following[:-1])), g["greedy_logits"])
    return {"greedy_tokens": len(tokens), "drafts": len(drafts), "decode_cpu_seconds": round(seconds, 3)}


def drafted(llm: LLM, case: Case) -> dict[str, Any]:
    """MTP drafts behind some rows of the prompt."""
    g = case.golden
    after = [*case.ids, int(g["mtp.next_ids"][-1])]
    for t in MTP_PLACES:
        with llm.session() as s:
            s.feed(case.ids[: t + 1])
            near(torch.from_numpy(s.draft(after[t + 1]).logits), g["mtp.logits"][t: t + 1])
    return {"drafts": len(MTP_PLACES)}


def blocks_drafted(llm: LLM, case: Case) -> None:
    """The golden draft blocks of a V4 model behind their anchors."""
    g = case.golden
    ids = [*case.ids, *g["greedy_ids"].tolist()]
    with llm.session() as s:
        for i, anchor in enumerate(g["dspark.anchor_positions"].tolist()):
            s.feed(ids[len(s): anchor])
            draft = s.draft(ids[anchor])
            assert draft.tokens.tolist() == g["dspark.tokens"][i].tolist()
            near(torch.from_numpy(draft.logits), g["dspark.logits"][i])


def measured(name: str) -> dict[str, Any]:
    """What was compared, and how near it came; AssertionError where a gate does not hold."""
    begun = time.process_time()
    case, engine = load_case(name), engine_of(name, target="ascend950", profile="wide", **LIMITS)
    llm = LLM(engine, checkpoint_of(name), threads=1, progress=False)
    whole = fed(llm, case.ids)
    rows = torch.from_numpy(whole)[case.golden["logits.rows"].long()] if name != MTP else torch.from_numpy(whole)
    errors = row_errors(rows, case.golden["logits"])
    if name in GATES:
        check(rows, case.golden["logits"], GATES[name])
    else:
        near(rows, case.golden["logits"])
    assert np.array_equal(fed(llm, case.ids, chunk=list(CHUNKS)), whole)
    if "dspark.tokens" in case.golden:
        blocks_drafted(llm, case)
    went_on = drafted(llm, case) if name == MTP else continued(llm, case, whole)
    return {"case": name, "prompt": len(case.ids), "rows_compared": len(rows), "largest": float(errors.max()),
            "median": float(errors.median()), "chunks_are_bit_equal": True, **went_on,
            "cpu_seconds": round(time.process_time() - begun, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--budget", type=float, default=BUDGET, help="processor seconds after which no case is begun")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    wrong = 0
    for name in asked.cases.split(","):
        if time.process_time() > asked.budget:
            found.append({"case": name, "skipped": "the budget is used up"})
        else:
            try:
                found.append(measured(name))
            except AssertionError as e:
                wrong += 1
                found.append({"case": name, "failed": str(e)[:300] or "a gate does not hold"})
        print(json.dumps(found[-1]), flush=True)
    if asked.cases == parser.get_default("cases"):
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
