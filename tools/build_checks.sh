#!/usr/bin/env bash
# This compiles the checks of kernels for the GPU of this machine: tests/cuda and native/kernels, without ggml.
#
#   tools/build_checks.sh FOLDER             FOLDER/kernel_check
#   tools/build_checks.sh FOLDER racecheck   FOLDER/kernel_check_racecheck, in which every lane arrives at the barriers of
#                                            rings (native/kernels/common/ring.cuh), and FOLDER/racecheck_ring, whose
#                                            rings show why (bench/racecheck_ring.cu). Objects of an earlier call are used
#                                            where the form makes no difference.
#   tools/build_checks.sh FOLDER chains      FOLDER/step_chains.so, of which bench/builds_by_turns.cu times two. Objects of
#                                            an earlier call are used.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:?say where} form=${2:-}
arch=${ARCH:-$(nvidia-smi -i 0 --query-gpu=compute_cap --format=csv,noheader | tr -d .)}
arch=${arch/#90/90a} # Only sm_90a has Hopper's own instructions.
plain=$folder/kernels objects=() all=(tests/cuda/*.cu)
to=$plain flags= program=$folder/kernel_check changed=common/ring.cuh
link=(-Xlinker --wrap=_ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE,--wrap=cudaLaunchKernelExC,--wrap=__cudaGetKernel,--wrap=__cudaRegisterFunction)
case $form in
racecheck) to=$folder/kernels-racecheck flags=-DLUCE_EVERY_LANE_ARRIVES program=$folder/kernel_check_racecheck ;;
chains) all=(bench/step_chains.cu) program=$folder/step_chains.so link=(-shared -Xlinker -Bsymbolic) changed=step_chains.cu ;;
esac
mkdir -p "$to" "$folder/forms"
shopt -s extglob
all+=(native/kernels/*/!(forms).cu)
while read -r known; do # Those of the product's kernel, which one file lists, are compiled side by side.
    source=$folder/forms/form_${known//, /_}.cu
    printf '#define ROWMM_FORM %s\n#include "matmul/forms.cu"\n' "$known" >"$source"
    all+=("$source")
done < <(sed -n 's/.*rowmm_kernel_of<\([0-9].*\)>.*/\1/p' native/kernels/matmul/forms.cu)
sources=()
for source in "${all[@]}"; do
    object=$plain/$(basename "$source").o
    if [[ -n $form && -e $object ]] && ! grep -q "$changed" "${object%.o}.d"; then
        objects+=("$object")
    else
        sources+=("$source")
        objects+=("$to/$(basename "$source").o")
    fi
done
# As many libraries of the same names as one likes can be in a process where names are hidden.
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} sh -c \
    'nvcc -std=c++17 -O3 -fmad=false -gencode "arch=compute_$3,code=sm_$3" $4 -Inative/kernels -Itests/cuda \
        -Xcompiler -fPIC,-fvisibility=hidden -MMD -MF "$2/$(basename "$1").d" -c "$1" -o "$2/$(basename "$1").o"' \
    _ {} "$to" "$arch" "$flags"
nvcc -o "$program" "${objects[@]}" -lcublasLt "${link[@]}"
[[ $form != racecheck ]] || nvcc -std=c++17 -O3 -gencode "arch=compute_$arch,code=sm_$arch" -Inative/kernels \
    -o "$folder/racecheck_ring" bench/racecheck_ring.cu
