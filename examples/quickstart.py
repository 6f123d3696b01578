"""A conversation's KV cache leaves memory and comes back from both ends at once."""

import asyncio
import inspect
import tempfile

from cacheflow import CacheFlow, Generation, Settings, TierSettings
from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2


async def main(store: str) -> None:
    engine = await TransformersEngine.open_model(prepare_smollm2(), dtype="float32")
    question = inspect.getsource(tempfile)[:6000] + "\nIn one sentence, what does tempfile do?"
    chat = [{"role": "user", "content": question}]
    stop = {engine.tokenizer.eos_token_id}
    prompt = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    # A disk behind a link that is as slow, next to this CPU, as a network is next to a GPU.
    link = {"inner": "nvme", "inner_options": {"path": store}, "bandwidth": 10e6}
    settings = Settings(tiers=(TierSettings(name="disk", backend="throttled", options=link),))
    async with CacheFlow.open(settings, engine=engine) as flow:
        session = flow.session("quickstart")
        for turn in ("first time", "resumed"):
            report = Generation()
            print(f"\n{turn}: ", end="")
            async for token in session.generate(prompt, stop_tokens=stop, report=report):
                text = engine.tokenizer.decode([token], skip_special_tokens=True)
                print(text, end="", flush=True)
            used = report.usage
            print(f"\n  {used.prompt_tokens} tokens, {used.cached_tokens} of them stored:")
            new = used.prompt_tokens - used.cached_tokens
            print(f"  {used.loaded_tokens} loaded, {used.recomputed_tokens} recomputed, {new} new;")
            print(f"  first token of the answer after {report.ttft_seconds:.2f} s")
            await flow.flush()  # until all of it is stored
            await session.forget()  # the KV is gone from memory; what was stored stays
    await engine.aclose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
