"""A model over three ranks, each loading its own heads: torchrun --nproc-per-node 3 this file.

(The model has nine query and three KV heads, so three ranks go and two do not.)
"""

import asyncio
import os
import tempfile
from pathlib import Path

from cacheflow import CacheFlow, Generation, Settings, TierSettings
from cacheflow.plugins.tensor_parallel import TensorParallelEngine
from cacheflow.plugins.transformers import prepare_smollm2


async def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    engine = await TensorParallelEngine.open_model(prepare_smollm2(), dtype="float32", device="cpu")
    text = Path(asyncio.__file__).with_name("base_events.py").read_text(encoding="utf-8")
    prompt = engine.tokenizer(text).input_ids[:1500]
    # Every rank has a disk of its own, and that of rank 1 is half as fast.
    store = {"path": str(folder / f"rank-{rank}")}
    link = {"inner": "nvme", "inner_options": store, "bandwidth": 4e6 if rank == 1 else 8e6}
    settings = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("example")
        for turn in ("first time", "resumed"):
            report = Generation()
            turns = session.generate(prompt, max_new_tokens=24, report=report)
            tokens = [token async for token in turns]
            done = report.restoration
            if done is not None:
                print(
                    f"{turn}, rank {rank} (KV heads {engine.shard.heads}): first token after "
                    f"{report.ttft_seconds:.2f} s, {done.recomputed_share:.0%} of "
                    f"{done.prefix_tokens} stored tokens recomputed: "
                    f"{engine.tokenizer.decode(tokens)[:40]!r}"
                )
            await flow.flush()
            await session.forget()
    await engine.aclose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
