# shellcheck shell=bash disable=SC2154
# These are the stages of tools/gpu_check.sh that measure, most of them beside llama.cpp. They use what that script has ahead
# of them.

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
    local at name
    for at in ${SWEEP_CTX:-0 4k,32k,100k}; do # At 0 alone the engine has one sequence, as luce generate has.
        name=sweep-${at//,/-}
        # A GPU that has reached its limit of power slows down: 16 rows took 7.4 ms behind other work, and 6.2 on a rested board.
        [[ $device == cpu || -e $work/done/$name ]] || sleep 3
        run $name 120 python3 -m luce bench sweep --gguf "$oracle" --device "$device" "${own_threads[@]}" \
            --ctx "$at" --rows "${SWEEP_ROWS:-1,2,4,8,16,32,64}" --gammas 1,3 --steps 12 \
            --commit "${COMMIT:-}" --save "$out" --quiet --md && table $name
    done
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
    g++ -std=c++17 -O2 -I native/src bench/lookup_cost.cpp native/src/engine/lookup.cpp -o "$work/lookup_cost" &&
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
stage_kl() {
    say "logits beside llama.cpp's, by their distance from the same weights in F32"
    have_peer
    PYTHONPATH=$PYTHONPATH:$PWD/tests/support run kl 120 python3 bench/kl.py luce/data/box.gguf --bin "$work/peer/bin" \
        --device "$device" --threads "$threads" --random "${KL_TYPES:-Q4_K_M,Q8_0}" --shape "${KL_SHAPE:-mid}" \
        --tokens 384 --commit "${COMMIT:-}" --save "$out" && table kl
}
stage_attention() {
    say "attention of a step beside ggml's"
    g++ -std=c++17 -O2 -I "$work"/cache/luce/ggml-*/ggml/include bench/attention_peer.cpp -o "$work/attention_peer" \
        -L luce/lib -lluce-ggml -lluce-ggml-base -Wl,-rpath,"$PWD/luce/lib",--allow-shlib-undefined &&
        run attention-own 60 "$work/kernel_check" time attention &&
        run attention-peer 120 "$work/attention_peer" "$out/attention-own.txt" && brief 30 <"$out/attention-peer.txt"
}
