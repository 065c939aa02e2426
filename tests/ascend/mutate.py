"""Runs mutants of generated kernels on the twin: ``python tests/ascend/mutate.py`` runs all and writes mutants.json."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from ascend.mutants import Mutant, mutants
from ascend.on_twin import launch, source_of, twin_of
from cpu.regions import regions_of
from cuda.arguments import Arguments, arguments
from golden.cases import load_case

from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.ascend950.twin.build import LIBRARY, build_twin
from deepinfer.backends.ascend950.twin.run import Twin
from deepinfer.codegen.cache import Cache

RESULT = Path(__file__).with_name("mutants.json")
CASE, PROMPT, ROWS = "v41_c_quant", 141, 6
SEED = 11


@dataclass
class Subject:
    """A kernel with the arguments of a real step, and what it gives on the twin."""

    title: str
    source: AscendSource
    made: Arguments
    blocks: int
    right: list[Any] = field(default_factory=list)

    def run(self, source: AscendSource, twin: Twin) -> tuple[str, list[Any]]:
        """What the twin says, and all memory after the launch."""
        values = [v.copy() if isinstance(v, np.ndarray) else v for v in self.made.values]
        wrong = launch(source, twin, Arguments(values, {}, self.made.rows), self.blocks)
        return wrong, values

    def caught(self, source: AscendSource, twin: Twin) -> str:
        """How a mutant shows: the twin's first sentence, or "other results"; "" if it does not."""
        wrong, values = self.run(source, twin)
        if wrong:
            return wrong.split("\n")[0].split(": ", 1)[-1]
        scratch = [p.where == ("scratch",) for p in source.parameters]
        same = all(np.array_equal(a, b) for a, b, s in zip(values, self.right, scratch, strict=True) if not s)
        return "" if same else "other results"


def subjects(wanted: Sequence[str], each: int = 1, blocks: int = 1) -> list[Subject]:
    """``each`` kernels of every family in ``wanted``, the ones with most tile ops, on one step of a golden case."""
    runner, kernels = regions_of(load_case(CASE), PROMPT, ROWS, keep=4, wanted=3)
    found = []
    for family in wanted:
        all_of = {k.spec.digest(): k for k in kernels if k.spec.family == family}.values()
        ranked = sorted(all_of, key=lambda k: (-sum(len(p) for _, p in k.spec.slots), k.spec.digest()))
        for k in ranked[:each]:
            seen: list[Subject] = []

            def take(spec: Any, step: Any, operands: Any, *, rows: str = "", seen: list[Subject] = seen,
                     **_: Any) -> dict[int, Any]:
                source = source_of(spec)
                made = arguments(spec, source, step, operands, rows)
                subject = Subject(f"{spec.family}: {spec.symbol}", source, made, blocks)
                wrong, subject.right = subject.run(source, twin_of([source]))
                assert not wrong, wrong
                seen.append(subject)
                launch(source, twin_of([source]), made, blocks)
                return made.outputs

            runner.launch = take
            runner.check(k)
            found += seen[:1]
    return found


@contextmanager
def built(subject: Subject, chosen: Sequence[Mutant]) -> Iterator[list[tuple[Mutant, AscendSource, Twin]]]:
    """One library of all mutants; those that the compiler refuses are left out."""
    from dataclasses import replace

    symbol, sources = subject.source.symbol, []
    for n, mutant in enumerate(chosen):
        stages = tuple(replace(s, function=s.function.replace(symbol, f"{symbol}_m{n}")) for s in subject.source.stages)
        sources.append(replace(subject.source, symbol=f"{symbol}_m{n}", stages=stages,
                               text=mutant.text.replace(symbol, f"{symbol}_m{n}")))
    with tempfile.TemporaryDirectory(prefix="di-mutants-") as folder:
        texts = {s.symbol: s.text for s in sources}
        stages_of = {s.symbol: [(t.function, t.kind) for t in s.stages] for s in sources}
        twin = Twin(build_twin(texts, stages_of, jobs=2, cache=Cache(Path(folder))).files[LIBRARY])
        yield [(m, s, twin) for m, s in zip(chosen, sources, strict=True)]


def survivors(subject: Subject, chosen: Sequence[Mutant]) -> tuple[list[Mutant], Counter[str], Counter[str]]:
    """Mutants that nothing showed; how many of each kind there were, and what showed them."""
    kinds: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    left = []
    with built(subject, chosen) as ready:
        for mutant, source, twin in ready:
            how = subject.caught(source, twin)
            kinds[mutant.kind] += 1
            shown["other results" if how == "other results" else "twin" if how else "nothing"] += 1
            if not how:
                left.append(mutant)
    return left, kinds, shown


def sample(subject: Subject, count: int, seed: int = SEED) -> list[Mutant]:
    """The same ``count`` mutants each time."""
    every = list(mutants(subject.source.text))
    return random.Random(seed).sample(every, min(count, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="rowwise,gemm,attend")
    parser.add_argument("--each", type=int, default=1, help="kernels of each family")
    parser.add_argument("--most", type=int, default=0, help="mutants of each kernel, 0: all")
    asked = parser.parse_args()
    report, lost = [], 0
    for subject in subjects(asked.families.split(","), asked.each):
        chosen = sample(subject, asked.most) if asked.most else list(mutants(subject.source.text))
        left, kinds, shown = survivors(subject, chosen)
        lost += len(left)
        report.append({"kernel": subject.title, "mutants": sum(kinds.values()), "kinds": dict(sorted(kinds.items())),
                       "shown_by": dict(sorted(shown.items())), "survivors": [str(m) for m in left]})
        print(json.dumps(report[-1], indent=1))
    total = sum(int(r["mutants"]) for r in report)
    print(f"mutants={total} caught={total - lost} survivors={lost}")
    RESULT.write_text(json.dumps({"mutants": total, "caught": total - lost, "kernels": report}, indent=1) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
