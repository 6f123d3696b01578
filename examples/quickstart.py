"""A conversation's KV cache leaves memory and comes back from both ends: python examples/quickstart.py"""

import asyncio
import tempfile

from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings


async def main(store: str) -> None:
    print("loading SmolLM2-135M-Instruct (converted once) ...")
    model = await asyncio.to_thread(prepare_smollm2)
    engine = await TransformersEngine.open_model(model, dtype="float32")
    facts = "".join(f"Item {n} of the list is the number {n * n}. " for n in range(80))
    messages = [{"role": "user", "content": f"{facts}\nWhat is the capital of France?"}]
    chat = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    prompt, stop = chat["input_ids"], {engine.tokenizer.eos_token_id}

    # The disk, seen through a link of 10 MB/s: about as slow, next to a CPU, as a network is to a GPU.
    link = {"inner": "nvme", "inner_options": {"path": store}, "bandwidth": 10e6}
    settings = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("quickstart")
        for name in ("first time", "resumed"):
            report, answer = Generation(), []
            async for token in session.generate(prompt, stop_tokens=stop, report=report):
                answer.append(token)
            done = report.restoration
            print(f"{name}: first token after {report.ttft_seconds:.2f} s, of {len(prompt)} tokens "
                  f"{done.recomputed_share:.0%} of the prefix recomputed, the rest loaded")
            print(f"  {engine.tokenizer.decode(answer, skip_special_tokens=True)}")
            await session.forget()  # the KV is gone from memory; what was stored stays
    await engine.aclose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
