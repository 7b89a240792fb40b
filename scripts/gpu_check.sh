#!/usr/bin/env bash
# On a machine with a GPU: is everything right there, and how fast? Installs nothing; PYTHON says which python has torch.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m scripts.gpu "$@"
