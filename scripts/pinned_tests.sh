#!/usr/bin/env bash
# The tests of export, engines and runtime under the versions that TensorRT-LLM 1.2.1 pins, as far as they install on a
# CPU, in an environment of their own (build/pinned). TORCH names the torch to install, PYTHON the interpreter; arguments
# are tests to run instead. TensorRT-LLM itself takes torch 2.9.1 and Python 3.12. With RELEASE=1.4, the tests of the
# worker for 1.4.0rc1, which comes with torch 2.14 and needs no constraints.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/pinned
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
tests=(tests/scripts/test_resolutions.py tests/mtad tests/engines/{cache,test_engines.py,test_memory.py} tests/export/test_{export,families}.py
    tests/export/tensorrt_llm tests/runtime/test_{llm,schedules,async_llm}.py
    tests/runtime/{constraints,speculation,tuning,tensorrt_llm})
torch=torch==2.9.1 constraints=constraints-tensorrt-llm.txt
if [ "${RELEASE:-1.2}" = 1.4 ]; then
    tests=(tests/scripts/test_resolutions.py tests/mtad tests/runtime/tensorrt_llm/test_worker.py) torch=torch==2.14.0 constraints=/dev/null
fi
"${install[@]}" "${TORCH:-$torch}"
"${install[@]}" -c "$constraints" -e . pytest scipy 'setuptools<80'
"$folder/bin/python" -m pip check
"$folder/bin/python" -m pytest -p no:cacheprovider "${@:-${tests[@]}}"
