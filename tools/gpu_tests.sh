# shellcheck shell=bash disable=SC2154
# These are the stages of tools/gpu_check.sh that build luce and say whether it is right: they fail where it is not. They use
# what that script has ahead of them.

build_library() {
    cmake -G Ninja -S . -B "$work/build" -DLUCE_CUDA=ON &&
        cmake --build "$work/build" -j "$(nproc)" && cmake --install "$work/build" --prefix .
}
# bench/llamacpp.py has the same options. ggml's AMX buffers, which luce does not use, crashed on one machine.
build_peer() {
    local cuda
    cuda=$([[ $device == cpu ]] && echo OFF || echo ON)
    mkdir -p "$work/llamacpp" && tar -C "$work/llamacpp" -xJf "$kit/llamacpp.tar.xz" &&
        ln -sfn "$work"/cache/luce/ggml-*/ggml "$work/llamacpp/ggml" &&
        cmake -G Ninja -S "$work/llamacpp" -B "$work/llamacpp/build" -DCMAKE_BUILD_TYPE=Release -DGGML_CPU_REPACK=OFF \
            -DGGML_NATIVE=ON -DCMAKE_{C,CXX}_FLAGS=-mno-amx-tile\ -mno-amx-int8 -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
            -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DGGML_CUDA="$cuda" -DGGML_CUDA_NCCL=OFF &&
        cmake --build "$work/llamacpp/build" -j "$(nproc)" --target llama-bench llama-server llama-batched-bench &&
        mkdir -p "$work/peer" && cp -a "$work/llamacpp/build/bin" "$work/peer/"
}
export -f build_library build_peer
export work kit device
stage_build() {
    say "build"
    [[ ! -e $kit/llamacpp.tar.xz || -e $kit/peer.tar.xz ]] || run build-llamacpp 900 bash -c build_peer &
    [[ $device == cpu ]] || { run build-checks 900 tools/build_checks.sh "$work" &&
        { [[ " $stages ${streams[*]} " != *" sanitize "* ]] ||
            run build-racecheck 300 tools/build_checks.sh "$work" racecheck; }; } &
    run build-library 900 bash -c build_library || exit 1
    wait
    [[ $device == cpu || -e $work/done/build-checks ]] || exit 1
}
stage_oracle() {
    [[ -e $oracle ]] || { make_oracle & making=$!; }
    if [[ ! -e $drafter && " $stages ${streams[*]} " == *" dflash "* ]]; then
        make_drafter &
        making_drafter=$!
    fi
}

# `parts_at_once NAME LIMIT WHICH [SANITIZER OPTIONS ..]` runs parts of kernel_check, each as a process. It prints what
# failed, and a line for each part. One part's kernels wait for its reference on the CPU, so they share a GPU well.
declare -A of_part=([memcheck-capture]="--report-api-errors no") # Its checks make calls fail on purpose.
parts_at_once() {
    local name=$1 limit=$2 which=$3 part parts=$("$work/kernel_check" help | sed 's/.*parts: *//')
    shift 3
    (($(left) < limit)) && limit=$(left)
    ((limit > 10)) || { echo "-- $name: LEFT OUT, no time"; bad+=("$name"); return; }
    for part in $parts; do
        while (($(jobs -rp | wc -l) >= ${at_once:-100})); do sleep 0.1; done
        [[ -e $work/done/$name-$part ]] || (
            begin=$SECONDS status=0
            (($(left) < limit)) && limit=$(($(left) > 0 ? $(left) : 1))
            timeout -k 5 "$limit" nice "$@" ${of_part[$name-$part]:-} "$work/${checks:-kernel_check}" "$which" "$part" >"$out/$name-$part.txt" 2>&1 || status=$?
            ((status)) || touch "$work/done/$name-$part"
            echo "$name $part: $( ((status == 124)) && echo CUT || echo "status $status")," \
                "$(grep -hE 'checks, |SUMMARY' "$out/$name-$part.txt" | tr -s '\n=' ' ') $((SECONDS - begin)) s" \
                "$(grep -E '^FAILED|^CUDA error|=== (Error|Warning|Invalid|Barrier|Race)' "$out/$name-$part.txt" |
                    brief 5 | sed '1s/^/\n/')"
        ) &
        waiting+=($!)
    done
}
parts_done() { # It waits for all of parts_at_once; an oracle that is being made goes on.
    local name part
    ((${#waiting[@]} == 0)) || wait "${waiting[@]}"
    waiting=()
    for name in "$@"; do
        for part in $("$work/kernel_check" help | sed 's/.*parts: *//'); do
            [[ -e $work/done/$name-$part ]] || bad+=("$name-$part")
        done
    done
}
stage_kernels() {
    say "kernels"
    parts_at_once kernels "${KERNELS_LIMIT:-150}" check
    parts_done kernels
    run broken 60 "$work/kernel_check" broken
}

# These tests use the device. Two files of them count its memory, or fill it, and run by themselves. The third asks so much of
# the device that it waits for its turn where many processes share that, and runs behind the slices.
ALONE="tests/core/engine/test_resources.py tests/core/engine/test_faults.py tests/core/engine/test_company.py"
FIRST="tests/core/graph/test_goldens.py tests/core/graph/test_model.py tests/core/engine/test_mtp.py
       tests/core/engine/test_invariance.py tests/core/graph/test_head.py tests/core/engine/test_sequences.py
       tests/core/engine/test_checkpoint.py tests/decode/test_engine.py tests/core/engine/test_pages.py
       tests/core/engine/test_dflash.py"
tests() {
    local name=$1 limit=$2 show=1
    shift 2
    run "$name" "$limit" python3 -m pytest -v -m "" --hypothesis-profile deep -p no:cacheprovider -p no:benchmark --maxprocesses 64 --luce-device "$device" \
        --luce-device-only --tb=short -o junit_family=xunit1 --junitxml "$out/$name.xml" "$@"
    local status=$?
    sed -nE 's/^(\[gw[0-9]+\] \[ *[0-9]+%\] )?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (tests\/.*[^ ]) *$/\2 \3/p;
             s/^(tests\/.*[^ ]) (PASSED|FAILED|ERROR|SKIPPED|XFAIL).*$/\2 \1/p' "$out/$name.txt" >>"$work/tested.txt"
    return $status
}
stage_suite() {
    say "suite"
    local files=() file number before
    for file in $FIRST $(find tests -name "test_*.py" ! -path "tests/cuda/*" ! -path "*/browser/*" | sort); do
        [[ " $ALONE ${files[*]} " == *" $file "* ]] || files+=("$file")
    done
    [[ -s $work/tests.txt ]] || python3 -m pytest --collect-only -q -m "" -n 0 -p no:cacheprovider --luce-device "$device" \
        --luce-device-only ${TESTS:-"${files[@]}"} 2>"$out/collect.txt" | grep '::' >"$work/tests.txt"
    touch "$work/tested.txt"
    while :; do # Tests that a cut slice had not ended are in the next.
        sed 's/^[A-Z]* //' "$work/tested.txt" | grep -vxFf - "$work/tests.txt" >"$work/slice.txt"
        before=$(wc -l <"$work/slice.txt")
        ((before > 0)) || break
        number=$(find "$out" -name 'suite-*.txt' | wc -l)
        (($(left) > 15)) || break
        rm -f "$work/done/suite-$number"
        tests "suite-$number" "$slice" -n "$workers" "@$work/slice.txt"
        sed 's/^[A-Z]* //' "$work/tested.txt" | grep -vxFf - "$work/tests.txt" >"$work/slice.txt"
        (($(wc -l <"$work/slice.txt") < before)) || break # One of them hangs.
    done
    if [[ -z ${TESTS:-} ]]; then
        tests company "$slice" -n 5 --hypothesis-profile unshrunk tests/core/engine/test_company.py
        tests resources "$slice" -n 0 tests/core/engine/test_resources.py tests/core/engine/test_faults.py
    fi
    echo "tests: $(sort -u "$work/tested.txt" | cut -d' ' -f1 | sort | uniq -c | tr -s '\n ' ' '); not run:" \
        "$(wc -l <"$work/slice.txt")"
    grep -E '^(FAILED|ERROR)' "$work/tested.txt" | sort -u | brief 40 150
    head -n 5 "$work/slice.txt" | sed 's/^/not run: /'
    grep -hE '^E  +[^ ]' "$out"/suite-*.txt "$out"/{company,resources}.txt 2>/dev/null | sort | uniq -c | sort -rn | brief 12
    python3 bench/identity_report.py $(find "$out" -name 'suite-*.xml') $(find "$out" -name company.xml -o -name resources.xml) \
        --commit "${COMMIT:-}" --save "$out" --device "$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader 2>&1 || echo cpu)" \
        --against "$(ls bench/results/*-identity*.json | tail -n 1)" \
        2>"$out/identity.txt" >/dev/null || echo "token identity: no row, or more differences than were recorded"
    grep -E ' (all|test)$|_error of|, recorded' "$out/identity.txt" | brief 14 120
}
stage_gemma() {
    say "Gemma 4"
    tests gemma "$((3 * slice))" -n "$workers" -k "gemma or window_pages or sliding" tests/core
    grep -E '^(FAILED|ERROR) .*(gemma|window_pages|sliding)' "$work/tested.txt" | sort -u | brief 40 150
    grep -hE '^E  +[^ ]' "$out/gemma.txt" | sort | uniq -c | sort -rn | brief 12
}
stage_sanitize() {
    say "kernels under compute-sanitizer"
    run build-racecheck 300 tools/build_checks.sh "$work" racecheck || return
    local tool sanitizer checks at_once=8 # With more, each waits longer for its turn on the GPU.
    sanitizer=$(compgen -G "$work/site/nvidia/cu*/bin/compute-sanitizer" || echo compute-sanitizer)
    # Racecheck would take all cores. A block of attention has up to 20 barriers, but synccheck loses count of those that several
    # threads initialise at once where it is told of 64.
    for tool in "racecheck --racecheck-num-workers 2" memcheck "synccheck --num-cuda-barriers 1024"; do
        checks=kernel_check
        [[ $tool != racecheck* ]] || checks=kernel_check_racecheck
        parts_at_once "${tool%% *}" "${SANITIZE_LIMIT:-240}" few "$sanitizer" --tool $tool --error-exitcode 9 \
            --kernel-name kernel_substring=4luce
    done
    parts_done racecheck memcheck synccheck
    timeout 60 "$sanitizer" --tool racecheck "$work/racecheck_ring" >"$out/rings.txt" 2>&1
    echo "rings reported:" $(grep -oE '(one_lane|every_lane|one_waits|race|own_slot)(<[^>]*>)?\(' "$out/rings.txt" | sort -u)
    grep -qE ' race[<(]' "$out/rings.txt" && ! grep -qE ' every_lane[<(]' "$out/rings.txt" || bad+=(rings)
    "$sanitizer" --version | grep Version
    echo "kernels that no part launched:" $("$work/kernel_check" kernels | sort -u |
        comm -23 - <(cat "$out"/racecheck-*.txt | grep '^kernel ' | sort -u) | cut -d' ' -f2 | c++filt | sed 's/(luce.*//; s/.*:://')
}
stage_gap() {
    say "rows that change other rows' bits, by op"
    g++ -std=c++17 -O2 -I "$work"/cache/luce/ggml-*/ggml/include bench/row_gap.cpp -o "$work/row_gap" \
        -L luce/lib -lluce-ggml -lluce-ggml-base -lluce-ggml-cpu -Wl,-rpath,"$PWD/luce/lib",--allow-shlib-undefined &&
        run gap 60 "$work/row_gap" gpu && brief 30 <"$out/gap.txt"
}
