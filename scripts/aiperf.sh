#!/usr/bin/env bash
# NVIDIA's aiperf as a client of mtad serve: streamed completions at 1 to 16 connections, all tokens asked for answered.
#   scripts/aiperf.sh [PAIR]        default: the demo pair; results in build/aiperf
# aiperf gets an environment of its own (some 1.2 GB).
set -euo pipefail
source "$(dirname "$0")/environment.sh"
pair=$(realpath "${1:-build/demo-pair}") folder=build/aiperf port=${PORT:-8377}
if ! [ -x "$folder/venv/bin/aiperf" ]; then
    python -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
fi
mtad serve "$pair" --port "$port" --model demo --rows 16 &
server=$!
trap 'kill $server; wait $server' EXIT
until curl -sf "localhost:$port/health/ready" > /dev/null; do
    kill -0 $server
    sleep 0.2
done
for connections in 1 4 16; do
    # with these set, a tokenizer that is a folder is looked up on the hub
    env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE "$folder/venv/bin/aiperf" profile --model demo --url "localhost:$port" \
        --endpoint-type completions --streaming --tokenizer "$pair/target" --concurrency "$connections" \
        --request-count $((connections * 8)) --isl 64 --osl 64 --extra-inputs ignore_eos:true \
        --artifact-dir "$folder/$connections" --ui none
done
