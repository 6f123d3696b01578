"""Would a faster link help? The scheduler in virtual time, on GPUs one does not own."""

from cacheflow.simulation import (
    Channel,
    Lengths,
    Scenario,
    Synthetic,
    load_link,
    load_machine,
    poisson,
    simulate,
    synthetic,
)

machine = load_machine("h100:llama-3.1-8b")
prompts = synthetic(100, Lengths("lognormal", (15000.0, 1.0)), chunk_tokens=512, seed=1)
workload = Synthetic("chat", poisson(prompts, mean_gap=0.3, seed=1))

for link in ("10gbps", "25gbps", "100gbps"):
    scenario = Scenario(machine, (Channel(load_link(link)),), gpus=2)
    for policy in ("load", "adaptive"):
        summary = simulate(scenario, workload, policy).summary
        ttft, used = summary.ttft, summary.utilisation
        print(
            f"{link:>8} {policy:<9} first token after {ttft.mean:6.3f} s, P99 {ttft.p99:6.3f} s; "
            f"GPU {used['compute']:.0%}, link {used[link]:.0%} used while restoring"
        )
