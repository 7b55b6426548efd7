#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build for it, check the kernels, run the whole test suite on the
# device, measure the 27b oracle beside llama.cpp. Meant for a machine without a network.
#
#   tools/gpu_check.sh [build] [kernels] [tests] [oracle] [bench]     (default: all, in this order)
#
# Reads from GPU_KIT (default .gpu, git-ignored), packed where there is a network:
#   ggml.tar.xz   the ggml folder of the pinned source archive   (tools/fetch_ggml.py)
#   peer.tar.xz   llama.cpp of the same archive, or `peer/bin/llama-bench` already built
#   *.whl         cffi and gguf, where the machine's Python lacks them
# Writes results, logs and bench rows to OUT (default .gpu/out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kit=$(realpath "${GPU_KIT:-.gpu}")
out=${OUT:-$kit/out}
work=${GPU_WORK:-/var/tmp/luce-gpu}
shape=${GPU_SHAPE:-27b}
mkdir -p "$out" "$work"
stages=${*:-build kernels tests oracle bench}
export PATH=/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1

want() { [[ " $stages " == *" $1 "* ]]; }
say() { printf '\n==== %s (%d s)\n' "$*" $SECONDS; }

if compgen -G "$kit/*.whl" >/dev/null && [[ ! -d $work/site ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$kit"/*.whl
fi
export PYTHONPATH=$work/site:$PWD

if want build; then
    say "build"
    if [[ -f $kit/prebuilt.tar.xz ]]; then # for a quick second look only; records come from a build here
        tar -C luce -xJf "$kit/prebuilt.tar.xz"
    else
        [[ -d $work/ggml ]] || tar -C "$work" -xJf "$kit/ggml.tar.xz"
        LUCE_GGML_DIR=$work/ggml cmake -G Ninja -S . -B "$work/build" -DLUCE_CUDA=ON >"$out/cmake.log" 2>&1
        grep "luce:" "$out/cmake.log"
        cmake --build "$work/build" -j "$(nproc)" >"$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
        cmake --install "$work/build" --prefix . >/dev/null
    fi
    python3 -c 'from luce._native import default as d; print(d().version(), [x.description for x in d().devices()])'
fi

if want oracle; then
    say "oracle $shape"
    [[ -f $work/oracle-$shape.gguf ]] ||
        python3 tools/make_oracle.py --shape "$shape" "$work/oracle-$shape.gguf" 2>&1 | tail -n 1
fi

if want kernels; then
    say "kernels"
    nvcc -std=c++17 -O3 -fmad=false -gencode arch=compute_90a,code=sm_90a -Inative/include -Inative/src \
        -o "$work/kernel_check" tests/cuda/*.cu native/kernels/*.cu
    "$work/kernel_check" 2>&1 | tee "$out/kernels.txt"
fi

if want tests; then
    say "tests"
    python3 -m pytest -q -p no:cacheprovider -m "not sanitize" --luce-device cuda -x --deselect tests/test_fetch_ggml.py \
        -rA --tb=short 2>&1 | tee "$out/tests.txt" | grep -vE "^PASSED" | tail -n 40
fi

if want bench; then
    say "bench"
    if [[ ! -x $kit/peer/bin/llama-bench && ! -x $work/peer/bin/llama-bench ]]; then
        tar -C "$work" -xJf "$kit/peer.tar.xz"
    fi
    binary=$work/peer/bin/llama-bench
    [[ -x $binary ]] || binary=$kit/peer/bin/llama-bench
    python3 bench/beside_llamacpp.py "$work/oracle-$shape.gguf" --device cuda --threads 16 \
        --llama-bench "$binary" --commit "${COMMIT:-}" --save "$out" --rounds "${ROUNDS:-3}" | tee "$out/bench.txt"
fi
say "done"
