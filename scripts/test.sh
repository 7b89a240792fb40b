#!/usr/bin/env bash
# Install, lint, type-check, test. Arguments go to pytest, which runs a file of tests on each of two cores.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
ruff check .
ruff format --check .
mypy
python -m pytest -n 2 --dist loadfile "$@"
