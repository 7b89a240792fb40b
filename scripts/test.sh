#!/usr/bin/env bash
# Install, lint, type-check, test. With --fast first, only the daily tests: those not marked as slow. Other arguments go to
# pytest, which runs a file of tests in each of three processes: on two cores, one of them mostly waits. At the end pytest
# says which tests it skipped, and for what.
set -euo pipefail
extra=dev says="4 GB, with a GPU's driver 3 GB more, which takes some minutes: what scripts/quickstart.sh installs, tools and libraries of all tests
(Ray, TensorRT-RTX, Triton, OpenVINO, Model Optimizer, playwright) and, as root, Debian's chromium and bubblewrap"
source "$(dirname "$0")/environment.sh"
# beside mypy, which leaves a core free: the rules, for which the tests would wait, and what Python compiles of all libraries
python -c 'from runtime.decoder.host_runner import compile_rules; compile_rules()' &
python -m pytest --collect-only > /dev/null &
ruff check .
ruff format --check .
mypy
wait
if [ "${1:-}" = --fast ]; then
    set -- -m "not slow" "${@:2}"
fi
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
