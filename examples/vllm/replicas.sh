#!/usr/bin/env bash
# Two replicas that share one store: what either has computed, the other restores.
# replicas.sh MODEL [FOLDER] [more options of vllm serve]; then ask ports 8001 and 8002 the same long
# question: the answer's usage says how many tokens were restored (cached_tokens).
set -euo pipefail

here=$(dirname "$0")
model=${1:?a model, for example a folder of weights}
folder=${2:-/tmp/cacheflow-store}
shift $(($# > 2 ? 2 : $#))

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
for port in 8001 8002; do
    "$here/serve.sh" "$model" "$folder" --port "$port" "$@" &
done
wait
