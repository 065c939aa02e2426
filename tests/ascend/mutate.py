"""Runs mutants of generated kernels on the twin: ``python tests/ascend/mutate.py`` runs all of five families and writes
mutants.json; ``--families draw`` adds those of draws."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from ascend.mutants import Mutant, mutants
from ascend.on_twin import launch, source_of, twin_of
from ascend.scenes import awkward, more_picks, pinned
from cpu.harness import Seq, Step
from cpu.regions import RegionRunner, regions_of
from cpu.test_kernels_draw import kinds_of_logits, spec_of
from cuda.arguments import Arguments, arguments
from cuda.draw_rows import GIVEN, words
from golden.cases import load_case

from deepinfer.backends.ascend950.families import draw, grouped_gemm
from deepinfer.backends.ascend950.source import AscendSource
from deepinfer.backends.ascend950.twin.build import LIBRARY, build_twin
from deepinfer.backends.ascend950.twin.run import Twin
from deepinfer.runtime.sampling_params import SamplingParams

RESULT = Path(__file__).with_name("mutants.json")
CASE = "v41_c_quant"
# Rows fed before, and rows of the step: so many products that every buffer comes round again; fewer entries than a
# selection has places; windows of one tile, of which one vector core has nothing, and of two.
SCENES = {"gemm": [(141, 136)], "attend": [(70, 6), (20, 6)], "rowwise": [(141, 6)],
          "score_select": [(141, 6), (20, 6)], "grouped_gemm": [(141, 6)]}
PIECE = 2  # pairs that the grouping of experts looks at in one step here, so that a launch takes several
MANY = 64  # blocks: one for each item
SEED = 11


@dataclass
class Scene:
    """Arguments of a step, as before the launch, and all memory after it."""

    made: Arguments
    right: list[Any] = field(default_factory=list)


@dataclass
class Subject:
    """A kernel, and what it gives on the twin on real steps."""

    title: str
    source: AscendSource
    scenes: list[Scene] = field(default_factory=list)

    def run(self, scene: Scene, source: AscendSource, twin: Twin, blocks: int = 1) -> tuple[str, list[Any]]:
        """What the twin says, and all memory after the launch."""
        values = copied(scene.made.values)
        wrong = launch(source, twin, Arguments(values, {}, scene.made.rows), blocks)
        return wrong, values

    def add(self, made: Arguments) -> None:
        scene = Scene(made)
        wrong, scene.right = self.run(scene, self.source, twin_of([self.source]))
        assert not wrong, wrong
        self.scenes.append(scene)

    def caught(self, source: AscendSource, twin: Twin) -> str:
        """How a mutant shows: the twin's first sentence, or "other results"; "" if it does not. In one block every
        buffer is used again, in many none holds what an earlier item left there."""
        scratch = [p.where == ("scratch",) for p in source.parameters]
        for scene in self.scenes:
            for blocks in (1, MANY):
                wrong, values = self.run(scene, source, twin, blocks)
                if wrong:
                    return wrong.split("\n")[0].split(": ", 1)[-1]
                if not all(same(a, b) for a, b, s in zip(values, scene.right, scratch, strict=True) if not s):
                    return "other results"
        return ""


def same(a: Any, b: Any) -> bool:
    """Bit by bit: what is no number is compared too."""
    if not isinstance(a, np.ndarray):
        return bool(a == b)
    return bool(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)))


def copied(values: Sequence[Any]) -> list[Any]:
    return [v.copy() if isinstance(v, np.ndarray) else v for v in values]


def subjects(wanted: Sequence[str], each: int = 1) -> list[Subject]:
    """``each`` kernels of every family in ``wanted``, the ones with most tile ops, on steps of a golden case."""
    return [subject for family in wanted
            for subject in ([_draw()] if family == "draw" else _of_family(family, each))]


def _draw() -> Subject:
    """A draw of rows with options of their own, in several pieces."""
    logits = kinds_of_logits(300)[:5]
    logits[3, 5] = np.nan
    options = ({"min_p": 0.05}, {"top_k": 7, "top_p": 0.8}, {"temperature": 0}, {})
    rows = [words(SamplingParams(**o), 5) for o in options]
    rows.append(words(SamplingParams(), 5, GIVEN, 17))
    with patch.object(draw, "_PIECE", 128):
        spec = spec_of(300)
        subject = Subject(f"draw: {spec.symbol}", source_of(spec))
    subject.add(arguments(spec, subject.source, Step([Seq(len(logits), 40)]), [logits, None],
                          draws=np.concatenate(rows)))
    return subject


def _of_family(family: str, each: int) -> list[Subject]:
    found: dict[str, Subject] = {}
    for prompt, rows in SCENES[family]:
        runner, kernels = regions_of(load_case(CASE), prompt, rows, keep=rows - 2, wanted=3)
        all_of = {k.spec.digest(): k for k in kernels if k.spec.family == family}.values()
        ranked = sorted(all_of, key=lambda k: (k.rows != "T", -sum(len(p) for _, p in k.spec.slots), k.spec.digest()))
        for k in ranked[:each]:

            def take(spec: Any, step: Any, operands: Any, *, rows: str = "", runner: RegionRunner = runner,
                     **_: Any) -> dict[int, Any]:
                harder = more_picks(spec)
                source = source_of(harder)
                made = arguments(spec, source, step, operands, rows)
                scene = Arguments(copied(made.values), {}, made.rows)
                awkward(harder, source, scene, runner)
                title = f"{spec.family}: {harder.symbol}"
                subject = found.setdefault(title, Subject(title, source))
                subject.add(scene)
                again = Arguments(copied(scene.values), {}, made.rows)
                if pinned(harder, source, again):
                    subject.add(again)
                return made.outputs

            runner.launch = take
            with patch.object(grouped_gemm, "PIECE", PIECE):
                runner.check(k)
    return list(found.values())


@contextmanager
def built(subject: Subject, chosen: Sequence[Mutant]) -> Iterator[list[tuple[Mutant, AscendSource, Twin]]]:
    """All mutants in two files: what they include is then read twice, not once for each."""
    symbol, sources = subject.source.symbol, []
    heads = [x for x in subject.source.text.split("\n") if x.startswith("#include")]
    texts = {f"mutants_{half}": "\n".join(heads) + "\n" for half in range(2)}
    stages_of: dict[str, list[tuple[str, str]]] = {name: [] for name in texts}
    for n, mutant in enumerate(chosen):
        stages = tuple(replace(s, function=s.function.replace(symbol, f"{symbol}_m{n}")) for s in subject.source.stages)
        sources.append(replace(subject.source, symbol=f"{symbol}_m{n}", stages=stages))
        file = f"mutants_{n % 2}"
        # Lines keep their numbers: complaints then name those of the kernel.
        body = "\n".join("" if x.startswith("#include") else x for x in mutant.text.split("\n"))
        texts[file] += f'#line 1 "{symbol}_m{n}"\n{body.replace(symbol, f"{symbol}_m{n}")}\n'
        stages_of[file] += [(s.function, s.kind) for s in stages]
    with tempfile.TemporaryDirectory(prefix="di-mutants-") as folder:
        twin = Twin(build_twin(texts, stages_of, jobs=2, throw_away=Path(folder), quick=True).files[LIBRARY])
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
    parser.add_argument("--families", default="rowwise,gemm,grouped_gemm,attend,score_select")
    parser.add_argument("--each", type=int, default=1, help="kernels of each family")
    parser.add_argument("--most", type=int, default=0, help="mutants of each kernel, 0: all")
    asked = parser.parse_args()
    families, lost = asked.families.split(","), 0
    known = json.loads(RESULT.read_text())["kernels"] if RESULT.exists() else []
    report = [r for r in known if r["kernel"].split(":")[0] not in families]
    for subject in subjects(families, asked.each):
        chosen = sample(subject, asked.most) if asked.most else list(mutants(subject.source.text))
        left, kinds, shown = survivors(subject, chosen)
        lost += len(left)
        report.append({"kernel": subject.title, "mutants": sum(kinds.values()), "kinds": dict(sorted(kinds.items())),
                       "shown_by": dict(sorted(shown.items())), "survivors": [str(m) for m in left]})
        print(json.dumps(report[-1], indent=1))
    total = sum(int(r["mutants"]) for r in report)
    left_over = sum(len(r["survivors"]) for r in report)
    print(f"mutants={total} caught={total - left_over} survivors={left_over}")
    report.sort(key=lambda r: str(r["kernel"]))
    RESULT.write_text(json.dumps({"mutants": total, "caught": total - left_over, "kernels": report}, indent=1) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
