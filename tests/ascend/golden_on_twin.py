"""The golden cases as whole engines on the CPU twin; ``python tests/ascend/golden_on_twin.py`` writes the result.

Rows of each case's prompt are fed in one step, in chunks and token by token, and compared with the reference
interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["DEEPINFER_ASCEND_TWIN"] = "1"

import numpy as np
import torch
from compiled import checkpoint_of, engine_of
from golden.cases import V4, V41, load_case, row_errors
from golden.engines import LIMITS, fed

from deepinfer import LLM

RESULT = Path(__file__).with_name("golden_on_twin.json")
CHUNKS = (17, 1, 9)


def measured(name: str, rows: int) -> dict[str, object]:
    """Errors of rows of logits against the interpreter, whether chunks give the same bits, seconds of a decode."""
    case, engine = load_case(name), engine_of(name, target="ascend950", profile="wide", **LIMITS)
    llm = LLM(engine, checkpoint_of(name), threads=1, progress=False)
    ids = list(case.ids[:rows])
    whole = fed(llm, ids)
    errors = row_errors(torch.from_numpy(whole), case.session(torch.float32).feed(ids).float())
    with llm.session() as s:
        s.feed(ids[:-2])
        begun = time.process_time()
        last = np.concatenate([s.feed([token]) for token in ids[-2:]])
        seconds = (time.process_time() - begun) / 2
    return {"case": name, "rows": len(ids), "largest": float(errors.max()), "median": float(errors.median()),
            "chunks_are_bit_equal": bool(np.array_equal(fed(llm, ids, chunk=list(CHUNKS)), whole)),
            "decodes_are_bit_equal": bool(np.array_equal(last, whole[-2:])), "decode_cpu_seconds": round(seconds, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join([*V41, *V4]))
    parser.add_argument("--rows", type=int, default=27)
    asked = parser.parse_args()
    found = []
    for name in asked.cases.split(","):
        found.append(measured(name, asked.rows))
        print(json.dumps(found[-1]), flush=True)
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(f["chunks_are_bit_equal"] and f["decodes_are_bit_equal"] for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
