#!/usr/bin/env bash
# From a fresh clone to answers: environment, engines of the demo pair, a question, the methods side by side.
set -euo pipefail
extra=serve says="1.5 GB (PyTorch, ONNX Runtime, transformers, numba), 3 GB more where pip finds PyTorch with CUDA alone; some minutes"
source "$(dirname "$0")/environment.sh"
mtad export build/demo-pair --overwrite --target scripts/demo/pair/target --auxiliary scripts/demo/pair/auxiliary > /dev/null
python -m scripts.quickstart "$@"
