#!/usr/bin/env bash
# Install, lint, type-check, test. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
