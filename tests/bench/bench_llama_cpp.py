"""Decoding with llama.cpp on the same machine in the same run: bytes of weights a second, theirs and ours.

    python tests/bench/bench_llama_cpp.py --llama-bench PATH --threads 2 [--rounds 3] [--json FILE]

needs a ``llama-bench`` that was built on this machine (release, native instructions) and the package ``gguf``. It makes
a mixture of experts for llama.cpp (architecture qwen3moe, random weights) with the sizes of the mid config: as many
layers, experts and picks, the same expert matrices in the same format (MXFP4, 4.25 bits a weight), attention matrices
of as many bytes in its 8-bit format. Rounds alternate. The models are not the same: ours also has hyper-connections,
the index and n-gram tables; so what is compared is bytes of weights touched by a token, divided by its time, beside
what a plain loop reads on as many threads. Prompts of 512 tokens: multiply-adds with weights a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_cpu_engine import SLOTS, STEP_ROWS, Bench, Run

from deepinfer.codegen.cache import cache_root

CONTEXT, DECODED = 1024, 20


class Rival:
    """The model of llama.cpp: sizes of the mid config; ``touched``: bytes of weights that a token reads."""

    def __init__(self, config: dict[str, Any], file: Path) -> None:
        import gguf

        self.kinds = gguf.GGMLQuantizationType
        self.sizes = gguf.GGML_QUANT_SIZES
        self.file, self.c = file, config
        self.layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.inner, self.vocab = config["moe_intermediate_size"], config["vocab_size"]
        self.experts, self.picked = config["n_routed_experts"], config["num_experts_per_tok"]
        self.heads, self.dim = config["num_attention_heads"], config["head_dim"]
        self.rng = np.random.default_rng(0)
        self.touched = self.macs = 0
        self.writer = gguf.GGUFWriter(file, "qwen3moe")

    def make(self) -> None:
        w, c = self.writer, self.c
        w.add_context_length(8192)
        w.add_embedding_length(self.hidden)
        w.add_block_count(self.layers)
        w.add_feed_forward_length(self.inner)
        w.add_expert_feed_forward_length(self.inner)
        w.add_head_count(self.heads)
        w.add_head_count_kv(1)
        w.add_key_length(self.dim)
        w.add_value_length(self.dim)
        w.add_layer_norm_rms_eps(1e-6)
        w.add_expert_count(self.experts)
        w.add_expert_used_count(self.picked)
        w.add_rope_freq_base(float(c["rope_theta"]))
        w.add_vocab_size(self.vocab)
        w.add_tokenizer_model("none")
        self.matrix("token_embd", self.vocab, self.hidden, "BF16", reads=0)
        self.matrix("output", self.vocab, self.hidden, "BF16")
        self.vector("output_norm", self.hidden)
        for i in range(self.layers):
            self.layer(f"blk.{i}")
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file(progress=True)
        w.close()

    def layer(self, at: str) -> None:
        n, d = self.heads * self.dim, self.hidden
        self.vector(f"{at}.attn_norm", d)
        self.vector(f"{at}.ffn_norm", d)
        self.vector(f"{at}.attn_q_norm", self.dim)
        self.vector(f"{at}.attn_k_norm", self.dim)
        self.matrix(f"{at}.attn_q", n, d, "Q8_0")
        self.matrix(f"{at}.attn_k", self.dim, d, "Q8_0")
        self.matrix(f"{at}.attn_v", self.dim, d, "Q8_0")
        self.matrix(f"{at}.attn_output", d, n, "Q8_0")
        router = self.rng.standard_normal((self.experts, d), np.float32)
        self.writer.add_tensor(f"{at}.ffn_gate_inp.weight", router)
        self.touched += router.nbytes
        for name, rows, cols in (("gate", self.inner, d), ("up", self.inner, d), ("down", d, self.inner)):
            self.matrix(f"{at}.ffn_{name}_exps", rows, cols, "MXFP4", stack=self.experts, reads=self.picked)

    def vector(self, name: str, size: int) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def matrix(self, name: str, rows: int, cols: int, kind: str, stack: int = 0, reads: int = 1) -> None:
        """Random codes with moderate scales; ``reads``: matrices of the stack that a token multiplies with."""
        block, size = self.sizes[self.kinds[kind]]
        lead = (stack,) if stack else ()
        raw = self.rng.integers(0, 256, (*lead, rows, cols // block, size), np.uint8)
        if kind == "MXFP4":
            raw[..., 0] = 122  # e8m0: 2^-5
        elif kind == "Q8_0":
            raw[..., :2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
        else:  # bf16 of about 1/64
            raw[..., 1::2] = 0x3C
        data = raw.reshape(*lead, rows, cols // block * size)
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=self.kinds[kind])
        self.touched += data.nbytes // max(1, stack) * reads
        self.macs += rows * cols * reads


def theirs(program: Path, model: Path, threads: int, tokens: int, decode: bool) -> float:
    """Tokens a second of llama-bench, with its flash attention and a prompt before what is decoded."""
    work = ["-n", str(tokens), "-p", "0", "-d", str(CONTEXT)] if decode else ["-n", "0", "-p", str(tokens)]
    out = subprocess.run([str(program), "-m", str(model), "-t", str(threads), "-fa", "1", "-r", "3", "-o", "json",
                          "-ub", str(STEP_ROWS), *work], check=True, capture_output=True, text=True,
                         env={**os.environ, "LD_LIBRARY_PATH": str(program.parent)}).stdout
    return float(statistics.median(json.loads(out)[0]["samples_ts"]))


class Ours:
    """Our engine of the mid config."""

    def __init__(self, run: Run) -> None:
        self.run, self.k = run, run.config["num_experts_per_tok"]
        made, self.work = run.engine("engine", 4096)
        self.bench = Bench(made, run.checkpoint, SLOTS, 4096, run.given.threads)
        self.bench.fill_caches(self.work)
        self.bench.step([(0, 0, STEP_ROWS)])
        self.touched = self.work.weight_bytes([self.k] * len(self.bench.pinned))
        self.macs = self.work.multiply_adds({"T": 1, "T_kept": 1, "T_wanted": 1, "S": 1}, self.k)

    def decode(self) -> float:
        """Tokens a second."""
        pins = [self.bench.pins(1, self.run.config["n_routed_experts"]) for _ in range(DECODED)]
        self.bench.step([(0, CONTEXT, 1)], pins[0])
        return 1 / statistics.median(self.bench.step([(0, CONTEXT + 1 + i, 1)], p) for i, p in enumerate(pins))

    def prefill(self) -> float:
        return STEP_ROWS / min(self.bench.step([(1, 0, STEP_ROWS)]) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp and this engine, bytes of weights a second.")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--config", default="mid")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also writes all results to a file")
    given = parser.parse_args()
    run = Run(given)
    file = cache_root() / "bench" / "rival.gguf"
    rival = Rival(run.config, file)
    rival.make()
    ours = Ours(run)
    found: dict[str, list[float]] = {"ours_decode": [], "theirs_decode": [], "ours_prompt": [], "theirs_prompt": []}
    for _ in range(given.rounds):
        found["ours_decode"].append(ours.decode())
        found["theirs_decode"].append(theirs(given.llama_bench, file, given.threads, DECODED, True))
        found["ours_prompt"].append(ours.prefill())
        found["theirs_prompt"].append(theirs(given.llama_bench, file, given.threads, STEP_ROWS, False))
    for who, touched, macs in (("ours", ours.touched, ours.macs), ("theirs", rival.touched, rival.macs)):
        decode, prompt = max(found[f"{who}_decode"]), max(found[f"{who}_prompt"])
        run.show(who, MB_touched=round(touched / 1e6, 1), tokens_s=round(decode, 1),
                 GB_s=round(touched * decode / 1e9, 2), share_of_read=round(touched * decode / run.bandwidth, 3),
                 prompt_tokens_s=round(prompt, 1), prompt_GMAC_s=round(macs * prompt / 1e9, 1),
                 all_rounds={k: [round(x, 2) for x in v] for k, v in found.items() if k.startswith(who)})
    if given.json:
        given.json.write_text(json.dumps(run.results, indent=1))


if __name__ == "__main__":
    main()
