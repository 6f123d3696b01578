#!/usr/bin/env bash
# Two replicas that share one store: what either has computed, the other restores.
# replicas.sh MODEL [FOLDER]; then ask ports 8001 and 8002 the same long question.
set -euo pipefail

here=$(dirname "$0")
model=${1:?a model, for example a folder of weights}
folder=${2:-/tmp/cacheflow-store}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
for port in 8001 8002; do
    "$here/serve.sh" "$model" "$folder" --port "$port" &
done
wait
