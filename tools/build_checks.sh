#!/usr/bin/env bash
# This compiles the checks of kernels for the GPU of this machine: tests/cuda and native/kernels, without ggml.
#
#   tools/build_checks.sh FOLDER             FOLDER/kernel_check
#   tools/build_checks.sh FOLDER racecheck   FOLDER/kernel_check_racecheck, in which every lane arrives at the barriers of
#                                            rings (native/kernels/shared_ring.cuh), and FOLDER/racecheck_ring, whose
#                                            rings show why (bench/racecheck_ring.cu). Objects of an earlier call are used
#                                            where the form makes no difference.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:?say where} form=${2:-}
arch=${ARCH:-$(nvidia-smi -i 0 --query-gpu=compute_cap --format=csv,noheader | tr -d .)}
arch=${arch/#90/90a} # Only sm_90a has Hopper's own instructions.
plain=$folder/kernels objects=()
to=$plain flags= sources=(tests/cuda/*.cu native/kernels/*.cu) program=$folder/kernel_check
if [[ $form == racecheck ]]; then
    to=$folder/kernels-racecheck flags=-DLUCE_EVERY_LANE_ARRIVES program=$folder/kernel_check_racecheck
    all=("${sources[@]}") sources=()
    for source in "${all[@]}"; do
        object=$plain/$(basename "$source").o
        if [[ -e $object ]] && ! grep -q shared_ring.cuh "${object%.o}.d"; then
            objects+=("$object")
        else
            sources+=("$source")
        fi
    done
fi
mkdir -p "$to"
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} sh -c \
    'nvcc -std=c++17 -O3 -fmad=false -gencode "arch=compute_$3,code=sm_$3" $4 -Inative/kernels \
        -MMD -MF "$2/$(basename "$1").d" -c "$1" -o "$2/$(basename "$1").o"' _ {} "$to" "$arch" "$flags"
for source in "${sources[@]}"; do
    objects+=("$to/$(basename "$source").o")
done
nvcc -o "$program" "${objects[@]}" -lcublas -Xlinker \
    --wrap=cudaDeviceGetAttribute,--wrap=cudaLaunchKernelExC,--wrap=__cudaGetKernel,--wrap=__cudaRegisterFunction
[[ $form != racecheck ]] || nvcc -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Inative/kernels \
    -o "$folder/racecheck_ring" bench/racecheck_ring.cu
