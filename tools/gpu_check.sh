#!/usr/bin/env bash
# This runs everything that needs a GPU, on a machine without a network. Its stages (gpu_tests.sh, gpu_measures.sh) come in the
# order of what they are worth, each within a limit of its own. What has ended well is not run again, so a second call goes on
# where the first was cut.
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
#     gemma     of these tests those of Gemma 4: its goldens, rules, window pages, and that company, widths and cuts of
#               prompts change no bit
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
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
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
all="build oracle kernels suite gemma peer auto part sampled sweep prefill dflash nineb experts zero batch serve sanitize kl gap attention"
# They took so many seconds on an H200. Those of suite, serve, auto and sampled are reckoned from their parts, those of gap and gemma are guesses.
declare -A takes=([kernels]=40 [suite]=115 [gemma]=40 [peer]=65 [auto]=32 [part]=85 [sampled]=35 [sweep]=44 [prefill]=30 [dflash]=75
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

# shellcheck source=tools/gpu_tests.sh
source tools/gpu_tests.sh
# shellcheck source=tools/gpu_measures.sh
source tools/gpu_measures.sh

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
        python3 -c 'from luce.native import default as d; print(d().version, [x.description for x in d().devices()])' || exit 1
        told=yes
    fi
    "stage_$stage"
done
say "done; ${bad[*]:-nothing} failed or was cut"
((${#bad[@]} == 0))
