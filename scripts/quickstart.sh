#!/usr/bin/env bash
# From a fresh clone to answers: environment, engines of the demo pair, a question, the methods side by side.
set -euo pipefail
[ $# = 0 ] || { echo "scripts/quickstart.sh takes no options, and was given: $*" >&2; exit 2; }
extra=serve says="1.5 GB (PyTorch, ONNX Runtime, transformers, numba), with a GPU's driver 3 GB more; the first answer comes
after a minute and a half on two cores, and what the download takes"
source "$(dirname "$0")/environment.sh"
# the rules, which takes as long as the export, on the other core
python -c 'from runtime.decoder.host_runner import compile_rules; compile_rules()' &
mtad export build/demo-pair --overwrite --target scripts/demo/pair/target --auxiliary scripts/demo/pair/auxiliary > /dev/null
wait $!
python -m scripts.quickstart
