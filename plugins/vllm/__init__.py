"""CacheFlow inside vLLM, out of tree: a KV connector and a scheduler mixin.

Switched on with vLLM's own options (``docs/vllm.md``): the connector is
``cacheflow.plugins.vllm.connector.CacheFlowConnector``, the schedulers are in
``cacheflow.plugins.vllm.scheduler``. Only these two modules, ``halves``, ``messages``, ``metrics``
and ``compat`` touch vLLM; the rest is plain Python that is tested without it:

* ``desk``: the scheduler's side, decisions and block pins (engine-core process);
* ``depot``: the worker's side, tiers, loads and saves (worker process);
* ``records``: what the two tell each other once a step; ``agreement``: what the reports of several
  tensor-parallel workers come to; ``sources``: how each reads its heads, whoever stored them;
* ``planner``: how far compute should go next; ``identity``: what keys bind;
* ``jumps`` (scheduler) and ``overlaps`` (worker): passes that begin under their last loads.
"""
