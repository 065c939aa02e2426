"""Every file in `examples/` runs, from another folder, and shows what it is for.

The compiled kernels and the example's engine stay in the cache of whoever runs the tests, as they do for a user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = {"offline_inference.py": ["--max-tokens", "6", "--seed", "3", "--max-model-len", "256"]}
Run = Callable[..., CompletedProcess[str]]


def test_every_example_is_run_here() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


def test_offline_inference_answers_its_prompts_and_says_what_it_used_and_what_is_next(run_python: Run) -> None:
    script = str(EXAMPLES / "offline_inference.py")
    first = run_python(script, *ARGUMENTS["offline_inference.py"])
    assert first.returncode == 0, first.stderr
    answers = first.stdout.splitlines()[:-1]
    assert len(answers) == 4 and all(" -> " in line for line in answers)
    found = re.fullmatch(r"(\d+) prompt tokens and (\d+) new tokens in [\d.]+ s: [\d.]+ tokens/s",
                         first.stdout.splitlines()[-1])
    assert found and 4 <= int(found[2]) <= 24
    said = " ".join(first.stderr.split())
    assert "target cpu: " in said and "no checkpoint named: " in said and "4/4" in said and "next: point " in said
    again = run_python(script, *ARGUMENTS["offline_inference.py"])
    assert again.stdout.splitlines()[:-1] == answers
    assert "using the engine in " in " ".join(again.stderr.split())


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--temperature", "-1"], "error: temperature: out of range; found -1.0; allowed >= 0"),
    (["--checkpoint", "/nowhere"], "error: /nowhere: there is no such folder"),
])
def test_a_mistake_is_one_sentence(run_python: Run, arguments: list[str], sentence: str) -> None:
    done = run_python(str(EXAMPLES / "offline_inference.py"), *arguments)
    assert done.returncode in (5, 6) and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(sentence) and "Traceback" not in done.stderr
