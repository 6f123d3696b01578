"""vLLM offline with CacheFlow: the second process finds what the first one computed.

.venv-vllm/bin/python examples/vllm/offline.py MODEL [FOLDER]
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams

PREFIX = "You answer questions about the following text. " + "All work and no play. " * 400


def main() -> None:
    model = sys.argv[1]
    folder = sys.argv[2] if len(sys.argv) > 2 else "/tmp/cacheflow-store"
    disk = {"name": "disk", "backend": "nvme", "options": {"path": folder}}
    llm = LLM(
        model=model,
        scheduler_cls="cacheflow.plugins.vllm.scheduler.CacheFlowScheduler",
        kv_transfer_config={
            "kv_connector": "CacheFlowConnector",
            "kv_connector_module_path": "cacheflow.plugins.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": [disk]},
        },
    )
    start = time.perf_counter()
    (output,) = llm.generate([PREFIX + "What is all this about?"], SamplingParams(max_tokens=16))
    seconds = time.perf_counter() - start
    print(f"{seconds:.2f} s, {output.num_cached_tokens} tokens from the cache")
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
