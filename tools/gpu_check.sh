#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build for it, check the kernels, run the whole test suite on the
# device, measure the 27b oracle alone and beside llama.cpp. Meant for a machine without a network.
#
#   tools/gpu_check.sh [build] [kernels] [oracle] [bench] [prefill] [batch] [sweep] [gap] [tests]
#                                                                          (default: all, in this order)
#
# Reads from GPU_KIT (default .gpu, git-ignored), packed where there is a network:
#   cache.tar.xz  luce's cache folder, as tools/fetch_ggml.py leaves it: `tar -C ~/.cache -cJf ... luce`
#   peer.tar.xz   `peer/bin/` with llama-bench, llama-batched-bench and llama-server of the same archive
#   *.whl         cffi and gguf, where the machine's Python lacks them
# Writes results, logs and bench rows to OUT (default .gpu/out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kit=$(realpath "${GPU_KIT:-.gpu}")
out=${OUT:-$kit/out}
work=${GPU_WORK:-/var/tmp/luce-gpu}
shape=${GPU_SHAPE:-27b}
mkdir -p "$out" "$work"
stages=${*:-build kernels oracle bench prefill batch sweep gap tests}
export PATH=/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH=/usr/local/cuda/lib64:$work/peer/bin:${LD_LIBRARY_PATH:-}

want() { [[ " $stages " == *" $1 "* ]]; }
say() { printf '\n==== %s (%d s)\n' "$*" $SECONDS; }

if compgen -G "$kit/*.whl" >/dev/null && [[ ! -d $work/site ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$kit"/*.whl
fi
export PYTHONPATH=$work/site:$PWD XDG_CACHE_HOME=$work/cache
if [[ ! -d $work/cache ]]; then
    mkdir "$work/cache"
    tar -C "$work/cache" -xJf "$kit/cache.tar.xz"
fi

if want build; then
    say "build"
    if [[ -f $kit/prebuilt.tar.xz ]]; then # for a quick second look only; records come from a build here
        tar -C luce -xJf "$kit/prebuilt.tar.xz"
    else
        cmake -G Ninja -S . -B "$work/build" -DLUCE_CUDA=ON >"$out/cmake.log" 2>&1
        grep "luce:" "$out/cmake.log"
        cmake --build "$work/build" -j "$(nproc)" >"$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
        cmake --install "$work/build" --prefix . >/dev/null
    fi
    python3 -c 'from luce._native import default as d; print(d().version, [x.description for x in d().devices()])'
fi

if want kernels; then
    say "kernels"
    mkdir -p "$work/kernels"
    arch=$(nvidia-smi -i 0 --query-gpu=compute_cap --format=csv,noheader | tr -d .)
    arch=${arch/#90/90a} # with Hopper's own instructions
    printf '%s\n' tests/cuda/*.cu native/kernels/*.cu | xargs -P "$(nproc)" -I{} sh -c \
        'nvcc -std=c++17 -O3 -fmad=false -gencode "arch=compute_$3,code=sm_$3" -Inative/kernels -c "$1" \
            -o "$2/$(basename "$1").o"' _ {} "$work/kernels" "$arch"
    nvcc -o "$work/kernel_check" "$work"/kernels/*.o -lcublas
    "$work/kernel_check" 2>&1 | tee "$out/kernels.txt"
fi

if want oracle; then # makes the model too, which the next stage measures
    say "oracle $shape"
    python3 -m luce bench oracle --shape "$shape" --accept 0.8 --cache "$XDG_CACHE_HOME" --device cuda --threads 16 \
        --modes plain,mtp:1,mtp:2,mtp:3,auto --rounds "${ROUNDS:-3}" --commit "${COMMIT:-}" --save "$out" --quiet --md |
        tee "$out/oracle.txt"
fi
if want bench; then
    say "beside llama.cpp"
    [[ -d $work/peer/bin ]] || tar -C "$work" -xJf "$kit/peer.tar.xz"
    python3 bench/peer_llamacpp.py "$XDG_CACHE_HOME/luce/oracle-$shape-0.8.gguf" --bin "$work/peer/bin" \
        --device cuda --threads 16 --modes plain,mtp:1,mtp:2,mtp:3 --synthetic "${SYNTHETIC:-2.9}" \
        --rounds "${ROUNDS:-3}" --commit "${COMMIT:-}" --save "$out" 2>&1 | tee "$out/bench.txt"
fi
if want prefill; then
    say "prefill beside llama.cpp"
    [[ -d $work/peer/bin ]] || tar -C "$work" -xJf "$kit/peer.tar.xz"
    python3 bench/peer_prefill.py "$XDG_CACHE_HOME/luce/oracle-$shape-0.8.gguf" --bin "$work/peer/bin" --device cuda \
        --threads 16 --rounds "${ROUNDS:-3}" --commit "${COMMIT:-}" --save "$out" 2>&1 | tee "$out/prefill.txt"
fi
if want batch; then
    say "several sequences beside llama.cpp"
    [[ -d $work/peer/bin ]] || tar -C "$work" -xJf "$kit/peer.tar.xz"
    python3 bench/peer_batch.py "$XDG_CACHE_HOME/luce/oracle-$shape-0.8.gguf" --bin "$work/peer/bin" --device cuda \
        --threads 16 --rounds "${ROUNDS:-3}" --commit "${COMMIT:-}" --save "$out" 2>&1 | tee "$out/batch.txt"
fi
if want sweep; then
    say "what a step costs, by rows and context"
    python3 -m luce bench sweep --gguf "$XDG_CACHE_HOME/luce/oracle-$shape-0.8.gguf" --device cuda --ctx 0,4k \
        --rows 1,2,3,4,6,8,16,32,64 --commit "${COMMIT:-}" --save "$out" --quiet --md | tee "$out/sweep.txt"
fi
if want gap; then
    say "rows that change other rows' bits, by op"
    g++ -std=c++17 -O2 -I "$work"/cache/luce/ggml-*/ggml/include bench/row_gap.cpp -o "$work/row_gap" \
        -L luce/lib -lluce-ggml -lluce-ggml-base -lluce-ggml-cpu -Wl,-rpath,"$PWD/luce/lib",--allow-shlib-undefined
    "$work/row_gap" gpu 2>/dev/null | tee "$out/row-gap.jsonl"
fi
if want tests; then
    say "tests"
    failed=0
    python3 -m pytest -q -n 0 -p no:cacheprovider --luce-device cuda --maxfail=30 --durations=8 \
        -o junit_family=xunit1 \
        --junitxml="$out/tests.xml" --tb=short 2>&1 | tee "$out/tests.txt" | tail -n 60 || failed=$?
    python3 bench/identity_report.py "$out/tests.xml" --commit "${COMMIT:-}" --save "$out" \
        --device "$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader)" >/dev/null ||
        echo "no row of token identity"
    ((failed == 0)) || exit "$failed"
fi

say "done"
