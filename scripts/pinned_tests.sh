#!/usr/bin/env bash
# The tests of export, engines and runtime under the versions that TensorRT-LLM 1.2.1 pins, as far as they install on a
# CPU, in an environment of their own (build/pinned). TORCH names the torch to install, PYTHON the interpreter; arguments
# are tests to run instead. TensorRT-LLM itself takes torch 2.9.1 and Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/pinned
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" "${TORCH:-torch==2.9.1}"
"${install[@]}" -c constraints-tensorrt-llm.txt -e . pytest scipy 'setuptools<80'
"$folder/bin/python" -m pip check
tests=(tests/test_pins.py tests/mtad tests/engines/test_{engines,memory,prefix_cache}.py tests/export/test_{export,families}.py
    tests/export/tensorrt_llm tests/runtime/test_{llm,schedules,async_llm}.py tests/runtime/decoder/test_compiled.py
    tests/runtime/{constraints,speculation,tuning,tensorrt_llm})
"$folder/bin/python" -m pytest -p no:cacheprovider "${@:-${tests[@]}}"
