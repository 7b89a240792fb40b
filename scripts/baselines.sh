#!/usr/bin/env bash
# The libraries that `python -m scripts.bench peers` compares with, each in an environment of its own below build/baselines:
#     scripts/baselines.sh [onnxruntime-genai] [openvino-genai] [llama.cpp]       by default, all of them
# Hugging Face, another of them, is installed anyway.
set -euo pipefail
extra=dev says="what scripts/test.sh installs, since the comparison needs OpenVINO as well"
source "$(dirname "$0")/environment.sh"
folder=build/baselines
mkdir -p "$folder"

# Without its dependencies it loads the onnxruntime that is installed in our own environment, which it sees.
install_onnxruntime-genai() {
    environment onnxruntime-genai --no-deps onnxruntime-genai==0.18.0
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        > "$("$folder/onnxruntime-genai/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
}

# What converts checkpoints needs an older transformers. torchvision does not fit a torch for CPUs and is not needed;
# without openvino-telemetry, nothing is sent.
install_openvino-genai() {
    environment openvino-genai openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 torch==2.13.0 \
        transformers==5.5.4
    "$folder/openvino-genai/bin/python" -m pip uninstall --quiet --yes torchvision openvino-telemetry
}

install_llama.cpp() {
    environment llama.cpp xllamacpp==2026.10.11549 gguf==0.19.0 safetensors==0.8.0 numpy==2.4.6
}

environment() {
    local name="$1"
    shift
    python -m venv --clear "$folder/$name"
    "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

[ $# -gt 0 ] || set -- onnxruntime-genai openvino-genai llama.cpp
for peer in "$@"; do
    declare -F "install_$peer" > /dev/null || { echo "$peer: unknown; see the head of $0" >&2; exit 2; }
    "install_$peer"
    echo "$folder: $peer"
done
