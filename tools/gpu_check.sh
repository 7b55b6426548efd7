#!/usr/bin/env bash
# This runs everything that needs a GPU, on a machine without a network. Stages come in the order of what they are worth,
# each within a limit of its own. What has ended well is not run again, so a second call goes on where the first was cut.
#
#   tools/gpu_check.sh [STAGE ...]      (in the order given; default: all of them, in this order)
#   tools/gpu_check.sh together 'STAGE ...' 'STAGE ...'     (build, then the first stages on the first GPU, the second
#                                                            on the second, and so on, at the same time)
#   tools/gpu_check.sh share [STAGE ...]     (the same with the stages, by default all, shared out among the GPUs there
#                                             are, by what they take on an H200. Added up that is five minutes on
#                                             four and ten on two, and three for building where the kit has no libraries)
#   tools/gpu_check.sh shares N [STAGE ...]  (print the seconds and stages that `share` would give each of N GPUs)
#     build     the library, its kernels' checks, and llama.cpp where the kit has its source
#     oracle    the oracle model and its DFlash drafter, made beside the stages after this one, until one needs them
#     kernels   the kernels against double precision, a process for each part
#     suite     the tests that use the device, in slices; how far tokens and logits are from where they belong
#     peer      decoding beside llama.cpp: plain, with drafts, auto
#     auto      drafts of fixed length, then auto in a process of its own; how long an engine takes to open
#     part      what drafting among a part of the vocabulary gains, by costs and decoded
#     sampled   the same model sampled, beside greedy
#     sweep     what a step costs by rows and context
#     prefill   prompts beside llama.cpp, by length
#     dflash    blocks and trees of a DFlash drafter beside llama.cpp's blocks of the same file, greedy and sampled; and
#               what a lookup costs the host
#     nineb     8b-like files of Q8_0 and Q6_K beside llama.cpp: plain steps as a share of what memory allows
#     experts   a mixture of experts beside llama.cpp, then with the experts of some layers in host memory
#     zero      what auto costs where no draft is right
#     batch     several sequences beside llama.cpp, whose server has as many slots
#     serve     the servers beside each other
#     sanitize  the reduced kernel checks under memcheck, racecheck (in a build of its own) and synccheck, all at once
#     kl        how far logits are from the same weights in F32, beside llama.cpp's
#     gap       rows that change other rows' bits in ggml, by op
#     attention attention of a step beside ggml's, by context, sequences and rows
#
# It reads from GPU_KIT (default .gpu, git-ignored), which is packed where there is a network:
#   cache.tar.xz  luce's cache folder, as tools/fetch_ggml.py leaves it: `tar -C ~/.cache -cJf ... luce`
#   llamacpp.tar.xz  llama.cpp's source of the same archive, without ggml's; or, as it was built elsewhere,
#   peer.tar.xz   `peer/bin/` with llama-bench, llama-batched-bench and llama-server
#   *.whl         what the machine's Python lacks of luce[test]
# tools/gpu_kit.sh packs them.
# It writes results, logs and rows to OUT (default .gpu/out), and keeps what it made and what is done in GPU_WORK
# (default luce-gpu in the folder for temporary files). All of it takes at most WITHIN seconds; it tells of a stage that
# is cut or left out since too little is left. A slice of the suite takes SLICE seconds and runs in WORKERS processes.
# COMMIT goes into the rows where this is no checkout. GPU_DEVICE=cpu and GPU_SHAPE=mini try the stages that measure
# without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kit=$(realpath -m "${GPU_KIT:-.gpu}")
out=$(realpath -m "${OUT:-$kit/out}")
work=${GPU_WORK:-${TMPDIR:-/tmp}/luce-gpu}
device=${GPU_DEVICE:-cuda}
shape=${GPU_SHAPE:-27b}
zero_shapes=${ZERO_SHAPES:-0.8b 9b 27b} nineb_shape=${NINEB_SHAPE:-9b} experts_shape=${EXPERTS_SHAPE:-35b-a3b}
rounds=${ROUNDS:-2}
within=${WITHIN:-100000}
slice=${SLICE:-110}
workers=${WORKERS:-12} threads=${THREADS:-16}
own_threads=() # luce uses none with a model on a GPU.
[[ $device != cpu ]] || own_threads=(--threads "$threads")
all="build oracle kernels suite peer auto part sampled sweep prefill dflash nineb experts zero batch serve sanitize kl gap attention"
# They took so many seconds on an H200. Those of suite, serve, auto and sampled are reckoned from their parts, that of gap is a guess.
declare -A takes=([kernels]=40 [suite]=115 [peer]=65 [auto]=32 [part]=85 [sampled]=35 [sweep]=32 [prefill]=30 [dflash]=75
    [nineb]=75 [experts]=110 [zero]=90 [batch]=131 [serve]=115 [sanitize]=90 [kl]=60 [gap]=10 [attention]=20)
need_oracle="peer auto part sampled sweep prefill dflash batch serve"

# `shares N STAGE ..` prints each GPU's stages on a line of its own. The longest goes first, to the GPU that has least.
# Those that need the oracle come last, for it is being made meanwhile.
shares() {
    local n=$1 gpu least stage load=() early=() late=()
    shift
    for stage in $(for stage in "$@"; do echo "${takes[$stage]:-0} $stage"; done | sort -rn | sed -n 's/^[1-9][0-9]* //p'); do
        least=0
        for ((gpu = 1; gpu < n; gpu++)); do
            ((${load[gpu]:-0} >= ${load[least]:-0})) || least=$gpu
        done
        load[least]=$((${load[least]:-0} + takes[$stage]))
        if [[ " $need_oracle " == *" $stage "* ]]; then late[least]+=" $stage"; else early[least]+=" $stage"; fi
    done
    for ((gpu = 0; gpu < n; gpu++)); do
        [[ -z ${load[gpu]:-} ]] || echo "${load[gpu]}${early[gpu]:-}${late[gpu]:-}"
    done
}
known_stages() {
    for stage in "$@"; do
        [[ " $all " == *" $stage "* ]] || { echo "no stage $stage; there are $all" >&2; exit 2; }
    done
}
streams=()
case ${1:-} in
    share | shares)
        [[ $1 == shares ]] || set -- share "${GPUS:-$(nvidia-smi -L | grep -c .)}" "${@:2}"
        (($# > 2)) || set -- "$1" "${2:?say how many GPUs}" $all
        known_stages "${@:3}"
        mapfile -t streams < <(shares "${@:2}")
        [[ $1 == share ]] || { printf '%s\n' "${streams[@]}"; exit 0; }
        streams=("${streams[@]#* }")
        set --
        ;;
    together)
        streams=("${@:2}")
        set --
        ;;
esac
stages=${*:-$all}
known_stages $stages ${streams[*]}
mkdir -p "$out" "$work/done"
export PATH=/usr/local/cuda/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$work/cache
export LD_LIBRARY_PATH=/usr/local/cuda/lib64:$work/peer/bin:${LD_LIBRARY_PATH:-}
export PYTHONPATH=$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}
oracle=$XDG_CACHE_HOME/luce/oracle-$shape-0.8.gguf
draft_accept=${DRAFT_ACCEPT:-0.9033} # A round of a block of 16 gives 8.31 tokens by this chance of a draft.
drafter=$XDG_CACHE_HOME/luce/oracle-$shape-drafter-$draft_accept.gguf
bad=() waiting=()
making= making_drafter=

say() { printf '\n==== %s (%d s)\n' "$*" $SECONDS; }
left() { echo $((within - SECONDS)); }
brief() { cut -c1-"${2:-200}" | tail -n "$1"; }
table() { grep '^|' "$out/$1.txt" | grep -v '^| ---' | brief 40 230; }

# `run NAME LIMIT COMMAND..` runs it once, in at most LIMIT seconds and what is left. Its output goes to OUT/NAME.txt,
# which is given out again after an earlier call's success. Its status is COMMAND's, or 124 where it was cut.
run() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    if [[ -e $work/done/$name ]]; then
        echo "-- $name: done before"
        return 0
    fi
    (($(left) < limit)) && limit=$(left)
    if ((limit < 10)); then
        echo "-- $name: LEFT OUT, no time"
        bad+=("$name")
        return 125
    fi
    timeout --foreground -s INT -k 15 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
    if ((status == 0)); then
        touch "$work/done/$name"
        echo "-- $name: ok, $((SECONDS - begin)) s"
    else
        bad+=("$name")
        echo "-- $name: $( ((status == 124)) && echo CUT || echo "FAILED with $status"), $((SECONDS - begin)) s"
        brief "${show:-12}" <"$out/$name.txt"
    fi
    return "$status"
}

have_peer() { [[ -d $work/peer/bin ]] || [[ ! -e $kit/peer.tar.xz ]] || tar -C "$work" -xJf "$kit/peer.tar.xz"; }
hash_beside() { # It leaves FILE.sha256 for the rows of the stages behind, beside what runs meanwhile.
    (cd "${1%/*}" && nice sha256sum "${1##*/}" >"$1.sha256.part" && mv "$1.sha256.part" "$1.sha256") </dev/null >/dev/null 2>&1 &
}
# `make_once FILE LOG OPTIONS ..` makes a file of which another stream may have begun already, and then waits for it.
make_once() {
    local file=$1 log=$2
    shift 2
    mkdir -p "${file%/*}"
    (
        flock 9
        [[ ! -e $file ]] || exit 0
        nice python3 tools/make_oracle.py --shape "$shape" "$@" >"$out/$log.txt" 2>&1 || exit 1
        hash_beside "$file" 9>&-
    ) 9>"$file.lock"
}
make_oracle() { make_once "$oracle" oracle --accept 0.8 "$oracle"; }
make_drafter() { make_once "$drafter" drafter --drafter "$drafter" --draft-accept "$draft_accept"; }
have_oracle() {
    [[ -z $making ]] || { wait "$making"; making=; }
    [[ -e $oracle ]] || make_oracle || { brief 5 <"$out/oracle.txt"; exit 1; }
}
have_drafter() {
    [[ -z $making_drafter ]] || { wait "$making_drafter"; making_drafter=; }
    [[ -e $drafter ]] || make_drafter || { brief 5 <"$out/drafter.txt"; exit 1; }
}
# `bench NAME LIMIT OPTIONS..` runs luce's bench of the oracle model.
bench() {
    local name=$1 limit=$2
    shift 2
    run "$name" "$limit" python3 -m luce bench oracle --cache "$XDG_CACHE_HOME" --device "$device" "${own_threads[@]}" \
        --commit "${COMMIT:-}" --save "$out" --quiet --md "$@" && table "$name"
}
# `peer NAME LIMIT SCRIPT OPTIONS..` runs a script that measures llama.cpp beside luce.
peer() {
    local name=$1 limit=$2 script=$3
    shift 3
    run "$name" "$limit" python3 "bench/$script" "$oracle" --bin "$work/peer/bin" --device "$device" --threads "$threads" \
        --commit "${COMMIT:-}" --save "$out" "$@" && table "$name"
}
trap '[[ -z $making$making_drafter ]] || kill $making $making_drafter 2>/dev/null' EXIT

if compgen -G "$kit/*.whl" >/dev/null && [[ ! -d $work/site ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$kit"/*.whl
fi
if [[ ! -d $work/cache ]]; then
    mkdir "$work/cache"
    [[ ! -e $kit/cache.tar.xz ]] || tar -C "$work/cache" -xJf "$kit/cache.tar.xz"
fi

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
}

# These tests use the device. Two files of them count its memory, or fill it, and run by themselves. The third asks so much of
# the device that it waits for its turn where many processes share that, and runs behind the slices.
ALONE="tests/test_resources.py tests/test_faults.py tests/test_company.py"
FIRST="tests/test_goldens.py tests/test_model.py tests/test_mtp.py tests/test_invariance.py tests/test_head.py
       tests/test_sequences.py tests/test_checkpoint.py tests/test_engine.py tests/test_pages.py tests/test_dflash.py"
tests() {
    local name=$1 limit=$2 show=1
    shift 2
    run "$name" "$limit" python3 -m pytest -v -p no:cacheprovider -p no:benchmark --maxprocesses 64 --luce-device "$device" \
        --luce-device-only --tb=short -o junit_family=xunit1 --junitxml "$out/$name.xml" "$@"
    local status=$?
    sed -nE 's/^(\[gw[0-9]+\] \[ *[0-9]+%\] )?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (tests\/.*[^ ]) *$/\2 \3/p;
             s/^(tests\/.*[^ ]) (PASSED|FAILED|ERROR|SKIPPED|XFAIL).*$/\2 \1/p' "$out/$name.txt" >>"$work/tested.txt"
    return $status
}
stage_suite() {
    say "suite"
    local files=() file number before
    for file in $FIRST tests/test_*.py; do
        [[ " $ALONE ${files[*]} " == *" $file "* ]] || files+=("$file")
    done
    [[ -s $work/tests.txt ]] || python3 -m pytest --collect-only -q -n 0 -p no:cacheprovider --luce-device "$device" \
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
        tests company "$slice" -n 5 --hypothesis-profile unshrunk tests/test_company.py
        tests resources "$slice" -n 0 tests/test_resources.py tests/test_faults.py
    fi
    echo "tests: $(sort -u "$work/tested.txt" | cut -d' ' -f1 | sort | uniq -c | tr -s '\n ' ' '); not run:" \
        "$(wc -l <"$work/slice.txt")"
    grep -E '^(FAILED|ERROR)' "$work/tested.txt" | sort -u | brief 40 150
    head -n 5 "$work/slice.txt" | sed 's/^/not run: /'
    grep -hE '^E  +[^ ]' "$out"/suite-*.txt "$out"/{company,resources}.txt 2>/dev/null | sort | uniq -c | sort -rn | brief 12
    python3 bench/identity_report.py $(find "$out" -name 'suite-*.xml') $(find "$out" -name company.xml) \
        --commit "${COMMIT:-}" --save "$out" --device "$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader 2>&1 || echo cpu)" \
        --against "$(ls bench/results/*-identity*.json | tail -n 1)" \
        2>"$out/identity.txt" >/dev/null || echo "token identity: no row, or more differences than were recorded"
    grep -E ' (all|test)$|_error of|, recorded' "$out/identity.txt" | brief 14 120
}
modes=plain,mtp:1,mtp:2,mtp:3,auto
greedy=(--shape "$shape" --accept 0.8)
stage_peer() {
    say "beside llama.cpp"
    have_oracle
    have_peer
    peer peer 220 peer_llamacpp.py --modes "$modes" --rounds "$rounds" ${SYNTHETIC:+--synthetic "$SYNTHETIC"}
}
stage_auto() {
    say "auto: beside drafts of fixed length, and in a process of its own"
    have_oracle
    # Which number of drafts is best for a text is a matter of luck too, so it takes several.
    bench fixed 90 "${greedy[@]}" --modes plain,mtp:3,mtp:5,mtp:6,mtp:7,auto --rounds 1 --prompts 3
    bench auto 60 "${greedy[@]}" --modes auto --rounds 1
    run opening 60 python3 bench/opening.py "$oracle" --device "$device" --runs 3 --commit "${COMMIT:-}" --save "$out" &&
        brief 20 <"$out/opening.txt"
}
stage_part() {
    say "drafting among a part of the vocabulary"
    have_oracle
    run part 60 python3 bench/draft_part.py "$oracle" --device "$device" "${own_threads[@]}" --commit "${COMMIT:-}" \
        --save "$out" && tr -d '\n' <"$out/part.txt" | grep -oE '"ms": \{[^}]*\}|"(share|coverage|gain)": [0-9.]+' | tr '\n' ' '
    local covered=("${greedy[@]}" --coverage 0.975 --rounds "$rounds" --prompts 2) part=${PART:-64k}
    covered+=(--modes "plain,mtp:3,mtp-part:3:$part,mtp:6,mtp-part:6:$part,auto")
    bench covered 120 "${covered[@]}"
    rm -f "$XDG_CACHE_HOME"/luce/oracle-"$shape"-0.8-covered-*.gguf # A small disk has no room for all.
}
stage_sampled() {
    say "sampled, and greedy"
    have_oracle
    # They take turns in one process: a host that is busier in one of two makes more of a difference.
    bench sampled 120 "${greedy[@]}" --modes plain,mtp:2,auto --rounds "$rounds" --prompts 2 --temp 0,0.7 \
        --top-k 20 --top-p 0.95
}
stage_sweep() {
    say "what a step costs, by rows and context"
    have_oracle
    run sweep 150 python3 -m luce bench sweep --gguf "$oracle" --device "$device" "${own_threads[@]}" \
        --ctx "${SWEEP_CTX:-0,4k,32k,100k}" --rows "${SWEEP_ROWS:-1,2,4,8,16,32,64}" --gammas 1,3 --steps 12 \
        --commit "${COMMIT:-}" --save "$out" --quiet --md && table sweep
}
stage_prefill() {
    say "prefill beside llama.cpp"
    have_oracle
    have_peer
    peer prefill 150 peer_prefill.py --lengths "${LENGTHS:-512,2048,8192}" --rounds "$rounds"
}
stage_dflash() {
    say "blocks and trees of DFlash beside llama.cpp, greedy and sampled"
    have_oracle
    have_drafter
    have_peer
    peer dflash 120 peer_llamacpp.py --draft "$drafter" --modes plain,dflash,dflash:22 --temp 0,0.7 --top-k 20 \
        --top-p 0.95 --prompt-tokens 128 --n-gen 256 --rounds "${DFLASH_ROUNDS:-1}" &&
        grep 'of its greedy' "$out/dflash.txt"
    g++ -std=c++17 -O2 -I native/src bench/lookup_cost.cpp native/src/lookup.cpp -o "$work/lookup_cost" &&
        run lookup 30 "$work/lookup_cost" && brief 4 <"$out/lookup.txt"
}
stage_nineb() {
    say "plain steps as a share of what the memory's speed allows"
    have_peer
    local type file rows=()
    if [[ ! -e $work/read-speed.json ]]; then # Where there is no GPU, it is made by hand.
        run read-speed 90 bash -c 'nvcc -O3 -arch=native -o "$1/read_speed" bench/read_speed.cu &&
            "$1/read_speed" >"$1/read-speed.part" && mv "$1/read-speed.part" "$1/read-speed.json"' _ "$work" || return
    fi
    mkdir -p "${oracle%/*}"
    for type in ${NINEB_TYPES:-Q8_0 Q6_K}; do
        file=$XDG_CACHE_HOME/luce/oracle-$nineb_shape-${type,,}-0.8.gguf
        [[ -e $file ]] || { run "make-$type" 120 python3 tools/make_oracle.py --shape "$nineb_shape" --type "$type" \
            "$file" && hash_beside "$file"; }
        oracle=$file peer "nineb-$type" 150 peer_llamacpp.py --modes plain --rounds "$rounds" &&
            rows+=("$(find "$out" -name "*-peer-$(basename "$file" .gguf)-*" | sort -V | tail -n 1)")
    done
    ((${#rows[@]} == 0)) || { run share 20 python3 bench/memory_share.py "${rows[@]}" \
        --read-speed "$work/read-speed.json" --save "$out" && table share; }
}
stage_experts() {
    say "a mixture of experts beside llama.cpp, then with the experts of some layers in host memory"
    have_peer
    local file=$XDG_CACHE_HOME/luce/oracle-$experts_shape-0.8.gguf
    mkdir -p "${oracle%/*}"
    [[ -e $file ]] || { run make-experts 150 python3 tools/make_oracle.py --shape "$experts_shape" --accept 0.8 "$file" &&
        hash_beside "$file"; }
    oracle=$file peer experts 150 peer_llamacpp.py --modes plain,mtp:1,mtp:2,mtp:3,mtp:4 --rounds "$rounds"
    oracle=$file peer experts-in-ram 150 peer_llamacpp.py --modes plain,mtp:2 --rounds 1 --n-gen 128 \
        --cpu-experts "${CPU_EXPERTS:-8}"
}
stage_zero() {
    local shape && say "no draft is right"
    for shape in $zero_shapes; do # where steps are short, the host's part weighs most
        bench "zero-$shape" 150 --shape "$shape" --accept 0 --modes plain,mtp:1,auto --rounds "$rounds"; done
}
stage_batch() {
    say "several sequences beside llama.cpp"
    have_oracle
    have_peer
    peer batch 240 peer_batch.py --counts "${COUNTS:-1,2,4,8,16}" --modes plain,mtp:2 --n-gen 96 --rounds 1
}
stage_serve() {
    say "servers"
    have_oracle
    have_peer
    run serve 400 python3 bench/peer_serve.py "$oracle" --bin "$work/peer/bin" --device "$device" --threads "$threads" \
        --modes auto --lengths "${SERVE_LENGTHS:-1k,8k,30000}" --counts "${COUNTS:-1,4,16}" --prompt-tokens 128 \
        --n-gen 128 --turns "${TURNS:-6}" --conversation "${CONVERSATION:-30000}" --commit "${COMMIT:-}" --save "$out" &&
        table serve
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
stage_kl() {
    say "logits beside llama.cpp's, by their distance from the same weights in F32"
    have_peer
    PYTHONPATH=$PYTHONPATH:$PWD/tests run kl 120 python3 bench/kl.py luce/data/box.gguf --bin "$work/peer/bin" \
        --device "$device" --threads "$threads" --random "${KL_TYPES:-Q4_K_M,Q8_0}" --shape "${KL_SHAPE:-mid}" \
        --tokens 384 --commit "${COMMIT:-}" --save "$out" && table kl
}
stage_gap() {
    say "rows that change other rows' bits, by op"
    g++ -std=c++17 -O2 -I "$work"/cache/luce/ggml-*/ggml/include bench/row_gap.cpp -o "$work/row_gap" \
        -L luce/lib -lluce-ggml -lluce-ggml-base -lluce-ggml-cpu -Wl,-rpath,"$PWD/luce/lib",--allow-shlib-undefined &&
        run gap 60 "$work/row_gap" gpu && brief 30 <"$out/gap.txt"
}
stage_attention() {
    say "attention of a step beside ggml's"
    g++ -std=c++17 -O2 -I "$work"/cache/luce/ggml-*/ggml/include bench/attention_peer.cpp -o "$work/attention_peer" \
        -L luce/lib -lluce-ggml -lluce-ggml-base -Wl,-rpath,"$PWD/luce/lib",--allow-shlib-undefined &&
        run attention-own 60 "$work/kernel_check" time attention &&
        run attention-peer 120 "$work/attention_peer" "$out/attention-own.txt" && brief 30 <"$out/attention-peer.txt"
}

# Each stream is a call of its own, which finds what is built and made.
together() {
    local stream n=0
    stage_build
    [[ " $* " != *\ @(${need_oracle// /|})\ * ]] || stage_oracle
    for stream in "$@"; do
        CUDA_VISIBLE_DEVICES=$n OUT=$out/$n WITHIN=$(left) "$0" $stream >"$out/$n.txt" 2>&1 &
        n=$((n + 1))
    done
    wait
    for ((n = 0; n < $#; n++)); do
        printf '\n######## %s\n' "${@:n+1:1}"
        brief 40 <"$out/$n.txt"
        grep -q '^==== done; nothing' "$out/$n.txt" || bad+=("stream $n")
    done
}
if ((${#streams[@]})); then
    stages=
    together "${streams[@]}"
fi
for stage in $stages; do
    if [[ $stage != build && -z ${told:-} ]]; then
        python3 -c 'from luce._native import default as d; print(d().version, [x.description for x in d().devices()])' || exit 1
        told=yes
    fi
    "stage_$stage"
done
say "done; ${bad[*]:-nothing} failed or was cut"
((${#bad[@]} == 0))
