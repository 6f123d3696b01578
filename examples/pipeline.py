"""A model in two stages, each restoring its own layers: torchrun --nproc-per-node 2 this file."""

import asyncio
import os
import tempfile
from pathlib import Path

from cacheflow import CacheFlow, Generation, Settings, TierSettings
from cacheflow.plugins.pipeline import PipelineEngine
from cacheflow.plugins.transformers import prepare_smollm2


async def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    engine = await PipelineEngine.open_model(prepare_smollm2(), dtype="float32")
    text = Path(asyncio.__file__).with_name("base_events.py").read_text(encoding="utf-8")
    prompt = engine.tokenizer(text).input_ids[:3000]
    # Every stage has a disk of its own behind a link as slow, next to a CPU, as a network to a GPU.
    store = {"path": str(folder / f"stage-{rank}")}
    link = {"inner": "nvme", "inner_options": store, "bandwidth": 20e6}
    settings = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("example")
        for turn in ("first time", "resumed"):
            report = Generation()
            turns = session.generate(prompt, max_new_tokens=24, report=report)
            tokens = [token async for token in turns]
            done = report.restoration
            if done is not None:
                layers = engine.shard.layers
                restored = (
                    f"{done.recomputed_share:.0%} of {done.prefix_tokens} stored tokens recomputed "
                    f"all the same, {done.hidden_chunks} activations loaded"
                    if done.prefix_tokens
                    else "nothing was stored"
                )
                print(
                    f"{turn}, stage {rank} (layers {layers.start}-{layers.stop - 1}): first token "
                    f"after {report.ttft_seconds:.2f} s, {restored}; the model goes on with the "
                    f"source it read: {engine.tokenizer.decode(tokens)[:40]!r}"
                )
            await flow.flush()
            await session.forget()
    await engine.aclose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
