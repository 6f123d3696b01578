"""Pipeline stages that restore at once: how near their bound, and what boundary activations cost.

    make bench-stages                        virtual time, the real scheduler
    make bench-stages ARGS=--real            two processes over gloo on this machine

In virtual time every stage has compute and a link of its own, loading alone as long as recompute
alone. The bound is fluid and counts the activations' bytes on the link; what the grid allows is the
same where compute takes whole layers of whole tiles, none before its activation has come. The
speed-up is over one GPU that restores everything from both ends. ``--real`` measures recompute
alone and loads alone with all stages active, then restores from both ends, in turns.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, Final

from cacheflow.distributed import Mode, StageCosts, best_split, plan_stages, worth_storing
from cacheflow.simulation import Machine, load_machine
from cacheflow.testing.virtual_stages import Pipeline
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.testing.virtual_stages import StageResult
    from cacheflow.types import Tile

ITEM_BYTES: Final = 2
LEAST: Final = 0.98
"""Of the fluid bound, for the longer prefix."""
LEAST_POSSIBLE: Final = 0.99
"""Of what whole layers of whole tiles allow."""
MACHINE: Final = "h100:llama-3.1-8b"
LARGE: Final = ("h100:llama-3.1-70b", 25e9 / 8)
"""Model and bytes a second of each GPU's link for the table of many GPUs."""
STAGES: Final = (2, 4, 8)
TOKENS: Final = (32768, 65536)
"""With eight stages of four layers a cell is 2 % of the shorter restore, and an activation takes as
long as half of its tile's KV: the fluid limit is for the longer one, the other one for both."""


class Even(Machine):
    """A machine on which every token costs the same, wherever it stands: what the simple bound of
    ``(1 - r / 2) S`` is about, for activations of ``r`` times a stage's KV."""

    def block_seconds(self, tile: Tile, now: float = 0.0) -> float:
        whole = TileGrid().tile(3)
        return super().block_seconds(whole) * tile.width / whole.width


def machine_of(*, even: bool) -> Machine:
    """The GPU and the model of the first table."""
    found = load_machine(MACHINE, layers_per_block=1)
    return Even(found.device, found.model, layers_per_block=1) if even else found


def pipeline(machine: Machine, stages: int, gpus: int = 1) -> Pipeline:
    """``gpus``: tensor-parallel ranks of a stage, whose links add up: bytes of one of them."""
    model = machine.model
    hidden = model.query_heads * model.head_dim * ITEM_BYTES
    return Pipeline(
        stages,
        model.layers,
        machine.block_seconds,
        model.token_bytes // model.layers // gpus,
        hidden // gpus,
    )


def slowest(results: Sequence[StageResult]) -> float:
    """When the last stage is restored."""
    return max(each.seconds for each in results)


def at_balance(stages: int, tokens: int, *, even: bool) -> dict[str, Any]:
    """``stages`` stages whose links load as fast as they compute."""
    machine = machine_of(even=even)
    one, many = pipeline(machine, 1), pipeline(machine, stages)
    bandwidth = one.stage_bytes(tokens) / one.compute_seconds(tokens)
    single = one.restore(tokens, bandwidth)[0]
    own = many.restore(tokens, bandwidth)
    waiting = many.restore(tokens, bandwidth, Mode.DEPENDENT)
    bound = max(each.bound for each in own)
    possible = max(each.possible for each in own)
    behind = own[1:]
    planned = plan_stages(_costs(machine, stages, tokens, bandwidth))
    predicted = predicted_bytes(machine, stages, tokens, bandwidth)
    return {
        "stages": stages,
        "tokens": tokens,
        "even": even,
        "single_seconds": single.seconds,
        "bound_seconds": bound,
        "possible_seconds": possible,
        "seconds": slowest(own),
        "efficiency": bound / slowest(own),
        "of_possible": possible / slowest(own),
        "bound_speedup": single.bound / bound,
        "speedup": single.seconds / slowest(own),
        "without_activations_seconds": slowest(waiting),
        "planned_mode": planned.mode.value,
        "balance": planned.balance,
        "hidden_bytes": sum(each.hidden_bytes for each in behind) // len(behind),
        "predicted_hidden_bytes": predicted,
        "recomputed": min(each.recomputed for each in own),
    }


def _costs(machine: Machine, stages: int, tokens: int, bandwidth: float) -> list[StageCosts]:
    """What the planner is given: tile by tile."""
    model = machine.model
    tiles = TileGrid().split(0, tokens)
    layers = model.layers // stages
    compute = [layers * machine.block_seconds(tile) for tile in tiles]
    kv = [tile.width * model.token_bytes / stages / bandwidth for tile in tiles]
    size = model.query_heads * model.head_dim * ITEM_BYTES
    hidden = [tile.width * size / bandwidth for tile in tiles]
    first = StageCosts(compute, kv, [0.0] * len(tiles))
    return [first, *[StageCosts(compute, kv, hidden)] * (stages - 1)]


def predicted_bytes(machine: Machine, stages: int, tokens: int, bandwidth: float) -> int:
    """Activations that the planner expects a stage to load."""
    costs = _costs(machine, stages, tokens, bandwidth)[1]
    units = best_split(costs).units
    return round(sum(costs.hidden[:units]) * bandwidth)


def many_gpus(tokens: int) -> list[dict[str, Any]]:
    """A large model on 1 to 64 GPUs, each with a link of its own."""
    preset, link = LARGE
    rows = []
    for stages, gpus in ((1, 1), (1, 8), (2, 1), (2, 8), (4, 1), (4, 8), (8, 1), (8, 8)):
        device, _, model = preset.partition(":")
        name = f"{device}x{gpus}" if gpus > 1 else device
        machine = load_machine(f"{name}:{model}", layers_per_block=1)
        line = pipeline(machine, stages, gpus)
        row: dict[str, Any] = {"stages": stages, "gpus": gpus * stages, "tokens": tokens}
        row["load"] = slowest(line.restore(tokens, link, policy="load"))
        own, waiting = line.restore(tokens, link), line.restore(tokens, link, Mode.DEPENDENT)
        row |= {"independent": slowest(own), "dependent": slowest(waiting)}
        row["bound"] = max(each.bound for each in own)
        rows.append(row)
    return rows


def does_not_pay(tokens: int) -> dict[str, Any]:
    """Where an activation is as large as the KV it saves, none is stored and none is loaded."""
    machine = load_machine(MACHINE, layers_per_block=1)
    stages = 16  # two layers each: 8 KiB of KV a token, and 8 KiB of hidden state
    line = pipeline(machine, stages)
    one = pipeline(machine, 1)
    bandwidth = one.stage_bytes(tokens) / one.compute_seconds(tokens)
    results = line.restore(tokens, bandwidth)
    costs = _costs(machine, stages, tokens, bandwidth)[1]
    return {
        "stages": stages,
        "worth_storing": worth_storing(costs),
        "hidden_bytes": sum(each.hidden_bytes for each in results),
        "kv_bytes": sum(each.kv_bytes for each in results),
    }


def tell(found: dict[str, Any]) -> None:
    """For people."""
    print(f"{MACHINE}, compute:I/O 1:1 on every stage; even: if all tokens cost the same\n")
    print(
        "| prefix | S | bound | reached | of bound | of what the grid allows | speed-up bound "
        "| speed-up | no activations | planner (balance) "
        "| activations MiB a stage (predicted) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in found["balance"]:
        print(
            f"| {row['tokens']}{' even' * row['even']} | {row['stages']} "
            f"| {row['bound_seconds']:.4f} s | {row['seconds']:.4f} s | {row['efficiency']:.3f} "
            f"| {row['of_possible']:.3f} | {row['bound_speedup']:.2f} | {row['speedup']:.2f} "
            f"| {row['without_activations_seconds']:.4f} s | {row['planned_mode']} "
            f"({row['balance']:.2f}) "
            f"| {row['hidden_bytes'] / 2**20:.0f} ({row['predicted_hidden_bytes'] / 2**20:.0f}) |"
        )
    print(
        f"\n{LARGE[0]}, {LARGE[1] * 8 / 1e9:g} Gbit/s a GPU, "
        f"prefix {found['gpus'][0]['tokens']}, seconds\n"
    )
    print("| GPUs | stages | loads alone | own activations | stage by stage | bound |")
    print("|---|---|---|---|---|---|")
    for row in found["gpus"]:
        print(
            f"| {row['gpus']} | {row['stages']} | {row['load']:.3f} | {row['independent']:.3f} "
            f"| {row['dependent']:.3f} | {row['bound']:.3f} |"
        )
    none = found["does_not_pay"]
    print(
        f"\n{none['stages']} stages of two layers: activations are as large as the KV; worth "
        f"storing: {none['worth_storing']} tiles, loaded: {none['hidden_bytes']} bytes beside "
        f"{none['kv_bytes'] / 2**20:.0f} MiB of KV"
    )


def main() -> int:
    """Print the tables; 1 if a figure is under its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    parser.add_argument("--real", action="store_true", help="two processes on this machine")
    parser.add_argument("--rounds", type=int, default=3, help="of --real")
    parser.add_argument("--real-tokens", type=int, default=4096, help="prefix of --real")
    parser.add_argument("--quick", action="store_true", help="a small random model for --real")
    parser.add_argument("--model", help="folder of a model for --real (default: SmolLM2-135M)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each rank")
    options = parser.parse_args()
    if options.real:
        from stages_real import measure, tell_real

        real = measure(options)
        print(json.dumps(real, indent=1)) if options.json else tell_real(real)
        return 0
    found: dict[str, Any] = {
        "balance": [
            at_balance(stages, tokens, even=even)
            for even, tokens in ((True, TOKENS[-1]), *((False, tokens) for tokens in TOKENS))
            for stages in STAGES
        ],
        "gpus": many_gpus(TOKENS[0]),
        "does_not_pay": does_not_pay(TOKENS[0]),
    }
    print(json.dumps(found, indent=1)) if options.json else tell(found)
    reached = min(row["efficiency"] for row in found["balance"] if row["tokens"] == TOKENS[-1])
    possible = min(row["of_possible"] for row in found["balance"])
    if reached < LEAST:
        print(f"error: {reached:.3f} of the bound is under {LEAST}")
    if possible < LEAST_POSSIBLE:
        print(f"error: {possible:.3f} of what the grid allows is under {LEAST_POSSIBLE}")
    return int(reached < LEAST or possible < LEAST_POSSIBLE)


if __name__ == "__main__":
    raise SystemExit(main())
