#!/bin/bash
# Speculative prefill on a GPU: gaps and scores against transformers and a CPU, and the speed of reading a tenth.
# Scores on GPUs are switched on by a hook of the tests (op_run.score_on_gpus). About 60 s on one H200.
# For the speed: oracles of `luce bench oracle --save-models` (27b and 0.8b) in $ORACLES/27b.gguf and $ORACLES/0.8b.gguf,
# else they are made with tools/make_oracle.py, which takes longer.
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD:tests:tests/support:tools
timeout 150 python3 -m pytest -n 8 -q -m "" --luce-device cuda --tb=short -p no:cacheprovider \
    tests/core/engine/test_gaps.py tests/core/engine/test_scores.py 2>&1 | tail -${TAIL:-80}
timeout 200 python3 gpu/keep_speed.py "${ORACLES:-/tmp/oracles}" 2>&1 | tail -20
