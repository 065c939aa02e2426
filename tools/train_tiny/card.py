"""The model card and the calibration file of a trained checkpoint, from the reports of the other commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .checkpoint import parameter_count
from .evaluate import load
from .sources import SOURCES


def _numbers(values: list[float], digits: int = 2) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def _phases(log: Path) -> str:
    """One line a phase, and their sums: its last logged step, its tokens, its seconds.  Both count on from phase to
    phase within a run, and from zero where a run takes its first weights from a checkpoint."""
    phases: dict[str, dict[str, float]] = {}
    before = {"tokens": 0.0, "seconds": 0.0}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        at = phases.setdefault(entry["phase"], {"tokens": 0.0, "seconds": 0.0})
        at["step"] = entry["step"]
        for key, last in before.items():
            at[key] += entry[key] - last if entry[key] >= last else entry[key]
            before[key] = entry[key]
    total = {key: sum(at[key] for at in phases.values()) for key in ("step", "tokens", "seconds")}
    rows = [
        f"| {name} | {at['step']:,.0f} | {at['tokens'] / 1e6:,.0f} M | {at['seconds']:,.0f} |"
        for name, at in [*phases.items(), ("together", total)]
    ]
    return "\n".join(["| phase | steps | tokens | seconds on one H200 |", "|---|---|---|---|", *rows])


def _verdict(value: float, bound: float, at_least: bool) -> str:
    return "reached" if (value >= bound if at_least else value <= bound) else "**not reached**"


def _table(report: dict[str, Any], base: dict[str, float]) -> str:
    quantised, before = report["held_out_quantised"], report.get("held_out_before")
    drafts, replay = report["speculation"], report["replay"]
    gap = base["heldout_text"] - quantised["heldout_text"]
    ratio = replay["replay"] / replay["last_window_only"]
    rows = [
        ("5-gram baseline, held-out text", f"{base['heldout_text']:.3f} nats a token", ""),
        ("held-out text, as shipped", f"{quantised['heldout_text']:.3f}", ""),
        ("below the baseline", f"{gap:.3f} (wanted: 0.3)", _verdict(gap, 0.3, True)),
        ("held-out dialogues, baseline / as shipped",
         f"{base['heldout_dialogue']:.3f} / {quantised['heldout_dialogue']:.3f}", ""),
        ("mean accepted length, greedy, with the bonus token",
         f"{drafts['mean_accepted_length']:.2f} (wanted: 2.5)", _verdict(drafts["mean_accepted_length"], 2.5, True)),
        ("the same at temperature 1: behind its own samples / behind held-out text",
         f"{report['sampled']['own_samples']:.2f} / {report['sampled']['held_out_text']:.2f}", ""),
        ("confidence, area under the curve",
         f"{drafts['confidence_auc']:.3f} (wanted: 0.75)", _verdict(drafts["confidence_auc"], 0.75, True)),
        ("KL(exact, bounded replay)", f"{replay['replay']:.4f}", ""),
        ("KL(exact, last 128 tokens only)", f"{replay['last_window_only']:.4f}", ""),
        ("their ratio", f"{ratio:.3f} (wanted: 0.1)", _verdict(ratio, 0.1, False)),
        ("same next token after a bounded replay", f"{100 * replay['replay_same_argmax']:.0f} %", ""),
    ]
    if before is not None:
        rows.insert(2, ("held-out text, before quantisation", f"{before['heldout_text']:.3f}", ""))
    return "\n".join(["| figure | value | |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def _samples(report: dict[str, Any]) -> str:
    shown = []
    for sample in report["samples"]:
        shown.append(f"`{sample['prompt']!r}` continues:\n\n```text\n{sample['answer']}\n```")
    return "\n\n".join(shown)


def _data(corpus: dict[str, Any]) -> str:
    by_licence: dict[str, list[str]] = {}
    for source in SOURCES:
        by_licence.setdefault(source.licence, []).append(source.project)
    lines = [f"* {licence}: {', '.join(projects)}" for licence, projects in sorted(by_licence.items())]
    tokens = corpus["tokens"]
    head = (
        f"Text of Debian packages: {tokens['prose'] / 1e6:.1f} M tokens of documentation, "
        f"{tokens['code'] / 1e6:.1f} M of Python code; {tokens['dialogue'] / 1e6:.1f} M tokens of dialogues that a "
        f"script makes from the Python library reference. {corpus['documents']['held_out']} documents "
        f"({tokens['heldout_text'] / 1e3:.0f} k tokens) are held out."
    )
    return "\n".join([head, "", *lines])


def write_card(folder: Path, data: Path, baseline: Path, report: Path, log: Path, note: str) -> None:
    """README.md, draft_calibration.json and speculation.json, by which an engine can be judged, in ``folder``."""
    base, found, corpus = (
        json.loads(path.read_text(encoding="utf-8")) for path in (baseline, report, data / "corpus.json")
    )
    import torch

    backbone, draft = load(folder, torch.device("cpu"))
    shape, drafts, losses = backbone.shape, found["speculation"], found["held_out_quantised"]
    cells = {
        name: _numbers(drafts[name], digits).replace(" ", " | ")
        for name, digits in (
            ("acceptance_by_position", 2),
            ("calibration_error_before", 3),
            ("calibration_error_after", 3),
            ("temperatures", 2),
        )
    }
    positions = ", ".join(f"{key}: {value:.3f}" for key, value in losses["by_position"].items())
    kinds = ", ".join(f"{key}: {value:.2f}" for key, value in drafts["by_kind"].items())
    size = (folder / "model.safetensors").stat().st_size
    text = f"""# A small DeepSeek-V4.1 model

A demonstration model: the text architecture of DeepSeek-V4.1-Flash in small, trained from nothing on the documentation
and code of Python projects, in the official checkpoint format. It shows that text, tools, drafts, bounded replay and
quantised weights work. It knows next to nothing and is wrong often; do not rely on what it says.

* Made by `tools/train_tiny`; `training_log.jsonl` is its log.
* {shape.num_hidden_layers} layers of {shape.hidden_size} features and {shape.num_nextn_predict_layers} draft blocks,
  {parameter_count(backbone) / 1e6:.2f} M + {parameter_count(draft) / 1e6:.2f} M parameters, {size / 1e6:.1f} MB: FP4
  experts, FP8 matrices, the rest BF16 and F32. Vocabulary {shape.vocab_size}, context {shape.max_position_embeddings}.
* Licence of the weights: Apache-2.0, like the project. Licences of the text: below.

## Figures

Text losses over {losses['tokens']:,} held-out tokens in chunks of 2,048, float32 arithmetic with
the released roundings.

{_table(found, base)}

Loss by position in the chunk: {positions}.

Drafts over {drafts['prompts']} held-out prompts of {drafts['prompt_tokens']} tokens with {drafts['answer_tokens']}
greedy tokens each, {drafts['steps']:,} steps; {kinds} tokens a step. A small model's greedy
text repeats itself, which makes it easy to guess. It repeats itself less at temperature 1, and text that people wrote
is harder still: the two figures below the greedy one, of drafts that are sampled too and kept by rejection sampling.

| drafted position | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|
| accepted, given the ones before | {cells['acceptance_by_position']} |
| calibration error of the running product, T = 1 | {cells['calibration_error_before']} |
| the same with the temperatures | {cells['calibration_error_after']} |
| temperature (`draft_calibration.json`) | {cells['temperatures']} |

## Training

{_phases(log)}
{f"{chr(10)}{note}{chr(10)}" if note else ""}
## Data

{_data(corpus)}

## Samples, greedy

{_samples(found)}
"""
    calibration = {"confidence_temperatures": drafts["temperatures"]}
    judged_by = ("mean_accepted_length", "answer_tokens", "steps_by_prompt", "tokens_by_prompt", "prompt_ids")
    judged = {key: drafts[key] for key in judged_by}
    contents = {
        "README.md": text,
        "draft_calibration.json": json.dumps(calibration) + "\n",
        "speculation.json": json.dumps(judged, separators=(",", ":")) + "\n",
        "training_log.jsonl": log.read_text(encoding="utf-8"),
    }
    for name, content in contents.items():
        aside = folder / f".{name}.new"
        aside.write_text(content, encoding="utf-8")
        os.replace(aside, folder / name)
