"""One rank of a training that grows.

    python -m tests.ddp_script FOLDER RANK RANKS BATCHES

It writes what it has seen to FOLDER/RANK.pt. With one rank it trains on the whole
batches, without a process group. All is computed in float64, so that sums in another
order differ by little.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from esper.contracts.errors import EsperError
from esper.grower import Grower
from esper.growth.distributed import digest
from tests.growth.hosts import HOSTS, make_batch, make_host

ROWS, PER_DECISION = 32, 4
BY_HAND = {
    0: ("up->down#0", "widen_8", "AT_ONCE"),
    4: ("up->down#1", "widen_x2", "FAST"),
    8: ("norm#0", "residual_mlp", "AT_ONCE"),
}
"""What is planted before which batch; the second one trains in shadow passes."""


def data(rows: int, rng_seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_batch("sequence", rows, rng_seed=rng_seed)
    return x.double(), y


def train(rank: int, ranks: int, batches: int, folder: Path | None = None) -> dict:
    torch.manual_seed(100 + rank)  # what ranks draw may differ
    model = make_host("sequence").double()
    model.drop.p = 0.0
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), 3e-3)
    slots = HOSTS["sequence"].slots
    grower = Grower(
        wrapped, optimizer, slots, example=data(4)[0], controller="random",
        decisions=batches // PER_DECISION, tick=3, seeds_per_slot=2,
        logger=folder and folder / f"run{rank}",
    )  # fmt: skip
    seen: dict = {"hashes": [], "actions": [], "losses": []}
    for batch in range(batches):
        if batch in BY_HAND:
            slot, blueprint, tempo = BY_HAND[batch]
            if grower.model.stage(slot).name == "DORMANT":
                grower.plant(slot, blueprint, tempo=tempo)
        x, y = data(ROWS, rng_seed=batch)
        part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        x, y = x[part], y[part]
        if batch == 14 and rank == ranks - 1:  # on one rank only
            x = x * torch.nan
        loss = grower.loss(lambda x=x, y=y: nn.functional.cross_entropy(wrapped(x), y))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if batch % PER_DECISION == PER_DECISION - 1:
            # What other ranks would say does not count.
            decision = grower.step(metric=0.5 if rank == 0 else 0.9)
            seen["hashes"].append(digest(model))
            seen["actions"].append(decision.action)
            seen["losses"].append(decision.loss)
    seen["incidents"] = [i.split(" (")[0] for d in grower.history for i in d.incidents]
    seen["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    seen["seeds"] = [*grower.model.seeds]
    grower.detach()
    seen["refused"] = []
    if ranks > 1:
        for misuse in ("unwrapped", "different", "sharded", "parallel", "logged"):
            host = make_host("sequence").double()
            other = {
                "unwrapped": lambda module: module,
                "different": DistributedDataParallel,
                "sharded": lambda module: fully_shard(
                    module, mesh=init_device_mesh("cpu", (ranks,))
                ),
                "parallel": nn.DataParallel,
                "logged": DistributedDataParallel,
            }[misuse](host)
            try:
                again = Grower(
                    other, torch.optim.SGD(host.parameters(), 0.1), slots,
                    example=data(4)[0], controller="never",
                    logger=folder / "taken" if misuse == "logged" else None,
                )  # fmt: skip
                with torch.no_grad():
                    host.last.weight.add_(float(rank))
                again.step(metric=0.5)
            except EsperError as error:
                seen["refused"].append(str(error))
    return seen


def main() -> None:
    torch.set_num_threads(1)
    folder, (rank, ranks, batches) = Path(sys.argv[1]), map(int, sys.argv[2:])
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    torch.save(train(rank, ranks, batches, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
