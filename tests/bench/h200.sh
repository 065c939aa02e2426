#!/bin/sh
# Every figure of docs/performance.md that is from an H200, on a machine with the device and the extra `cuda`:
#   tests/bench/h200.sh speed OUT      schedules, kernels, an engine at the released widths
#   tests/bench/h200.sh engines OUT    golden tests of compiled engines, memory, a long context
# Each takes less than ten minutes with 16 cores; OUT is a folder for the results (JSON) and what was compiled.
set -eu
cd "$(dirname "$0")/../.."
export DEEPINFER_ACCELERATOR=nvidia PYTHONPATH="$PWD"
out=${2:?a folder for the results}
model=tests/golden/configs/DeepSeek-V4.1-Flash
mkdir -p "$out"
case ${1:-} in
speed)
    python3 -m deepinfer tune --model "$model" --target sm90 --out "$out/sm90.json"
    export DEEPINFER_TUNING="$out/sm90.json"
    python3 -m deepinfer compile --target sm90 --model "$model" --layers 5 --max-num-seqs 64 \
        --max-num-batched-tokens 4096 --max-model-len 16384 --out "$out/flash5"
    python3 tests/bench/bench_h200.py prepare "$out/contractions.zip"
    python3 tests/cuda/kernels_bundle.py "$model" "$out/kernels.xz"
    python3 tests/bench/bench_h200.py run "$out/contractions.zip" "$out/h200_result.json"
    python3 tests/cuda/device_kernels.py "$out/kernels.xz" "$out/h200_kernels.json"
    python3 tests/bench/bench_h200_engine.py run "$out/flash5" "$out/h200_engine.json"
    ;;
engines)
    python3 tests/cuda/device_engines.py "$out/engines.json" "$out/engines" || echo "some golden tests fail"
    python3 tests/cuda/device_measure.py "$out/measure.json" "$out/engines"
    ;;
*)
    echo "usage: $0 speed|engines OUT" >&2
    exit 2
    ;;
esac
