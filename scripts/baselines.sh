#!/usr/bin/env bash
# The libraries that `mtad bench peers` and `mtad bench serving` compare with, each in a folder of its own:
#     scripts/baselines.sh [onnxruntime-genai] [openvino-genai] [llama.cpp]       by default, all of them
# Hugging Face, another baseline, is installed anyway.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
folder=build/baselines
mkdir -p "$folder"

# It asks for `onnxruntime`, whose files would overwrite those of onnxruntime-gpu. Without its dependencies it loads the
# library that is installed already. `mtad bench serving` wants the demo's target as its builder makes it.
install_onnxruntime-genai() {
    rm -rf "$folder"/onnxruntime_genai* "$folder/target" "$folder/cache"
    python -m pip install --quiet --no-deps --target "$folder" onnxruntime-genai==0.18.0
    PYTHONPATH="$folder" python -m onnxruntime_genai.models.builder \
        -i scripts/demo/pair/target -o "$folder/target" -c "$folder/cache" -p fp32 -e cpu
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
    rm -rf "${folder:?}/$name"
    python -m venv "$folder/$name"
    "$folder/$name/bin/python" -m pip install --quiet "$@"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1
[ $# -gt 0 ] || set -- onnxruntime-genai openvino-genai llama.cpp
for peer in "$@"; do
    declare -F "install_$peer" > /dev/null || { echo "$peer: unknown; see the head of $0" >&2; exit 2; }
    log="$folder/$peer.log"
    # In a shell of its own, so that an error ends it: `set -e` does not hold on the left of `||`.
    (set +e; (set -e; "install_$peer") > "$log" 2>&1; exit $?) || { tail -n 20 "$log" >&2; echo "$peer: cannot be installed, see $log" >&2; exit 1; }
    echo "$folder: $peer"
done
