#!/usr/bin/env bash
# On a machine with TensorRT-LLM 1.2.1 and a GPU: engines of the demo pair (or of --target, --auxiliary) are built and
# compared with torch. Runs in the environment that has the library, not in .venv: PYTHON says which one.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m scripts.gpu.tensorrt_llm_check "$@"
