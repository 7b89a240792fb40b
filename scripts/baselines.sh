#!/usr/bin/env bash
# The outside baseline of `python -m scripts.bench serving`: onnxruntime-genai and the demo target as its builder makes it.
# Both live in build/baselines, outside the environment: the package asks for `onnxruntime`, whose files would overwrite
# those of onnxruntime-gpu. Without its dependencies it loads the library that is installed already.
# (Hugging Face, the other baseline, is installed anyway.)
set -euo pipefail
source "$(dirname "$0")/environment.sh"
version=0.18.0
folder=build/baselines
rm -rf "$folder"
mkdir -p "$folder"
python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "onnxruntime-genai==$version"
PYTHONPATH="$folder" python -m onnxruntime_genai.models.builder \
    -i scripts/demo/pair/target -o "$folder/target" -c "$folder/cache" -p fp32 -e cpu > "$folder/builder.log" 2>&1 \
    || { cat "$folder/builder.log" >&2; exit 1; }
echo "$folder"
