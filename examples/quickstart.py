"""A conversation's KV cache leaves memory and comes back from both ends at once."""

import asyncio
import inspect
import tempfile

from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings


async def main(store: str) -> None:
    print("loading SmolLM2-135M-Instruct (fetched and converted on first use) ...")
    engine = await TransformersEngine.open_model(prepare_smollm2(), dtype="float32")
    question = f"{inspect.getdoc(inspect)}\n{inspect.getsource(tempfile)[:4000]}\nWhat is it for?"
    chat = [{"role": "user", "content": question}]
    prompt = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]

    # A disk behind a link that is as slow, next to this CPU, as a network is next to a GPU.
    link = {"inner": "nvme", "inner_options": {"path": store}, "bandwidth": 10e6}
    settings = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("quickstart")
        for turn in ("first time", "resumed"):
            report = Generation()
            print(f"\n{turn}: ", end="")
            stop = {engine.tokenizer.eos_token_id}
            async for token in session.generate(prompt, stop_tokens=stop, report=report):
                print(engine.tokenizer.decode([token]), end="", flush=True)
            if report.restoration:
                share = f"{report.restoration.recomputed_share:.0%} of those recomputed"
                print(f"\n  {len(prompt)} tokens, {report.cached_tokens} of them stored, {share};")
                print(f"  first token of the answer after {report.ttft_seconds:.2f} s")
            await session.forget()  # the KV is gone from memory; what was stored stays
    await engine.aclose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
