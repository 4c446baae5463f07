"""A Lightning training on two ranks; `python -m tests.lightning_script FOLDER`.

Lightning starts the second process. Every rank writes what it has seen to
FOLDER/RANK.json: of four epochs, and of the last two resumed from a checkpoint.
"""

import json
import sys
import warnings
from pathlib import Path

from esper.growth.distributed import digest
from tests.test_lightning import fit, growing

DDP = {"strategy": "ddp", "devices": 2, "gradient_clip_val": None}


def main(folder: Path) -> None:
    seen = []
    for name, checkpoint in (("whole", None), ("again", "whole/epoch=1.ckpt")):
        callback = growing("net", decisions=4)
        path = None if checkpoint is None else folder / checkpoint
        module = fit(folder / name, 4, callback, ckpt_path=path, **DDP)
        history = callback.grower.history
        seen.append(
            {
                "weights": digest(module),
                "actions": [decision.action for decision in history],
                "seeds": [*callback.grower.model.seeds],
            }
        )
    rank = module.trainer.global_rank
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
