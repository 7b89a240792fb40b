#!/usr/bin/env bash
# On a machine with TensorRT-LLM 1.2.1 and a GPU: builds two small engines, asks them what the library's sources say of
# it, compares them with torch, and writes one JSON. Runs in the environment that has the library: PYTHON says which.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m scripts.gpu.tensorrt_llm_check "$@"
