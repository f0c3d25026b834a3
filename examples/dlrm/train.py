"""Trains a DLRM on generated clicks, a MovieLens folder or a Criteo folder, on any number of ranks.

    python examples/dlrm/train.py
    torchrun --nproc_per_node=2 examples/dlrm/train.py --data <MovieLens folder>
    torchrun --standalone --nproc_per_node=2 --max-restarts=100 examples/dlrm/train.py --pipeline sparse_dist \
        --checkpoint-dir runs/1/checkpoints --checkpoint-every 1000 --resume --metrics runs/1/metrics.jsonl

Every rank takes its slice of the same global batches, so a run at one rank and a run at two are the same training, and
so is one that was killed and goes on from its last checkpoint. After each epoch it prints the area under the ROC curve
(AUC, higher is better) and the normalized entropy (NE, lower is better, 1 is what predicting the mean click rate
scores) on samples that are never trained on. It ends with the weights of the epoch whose test NE is the lowest, and
prints their AUC with the tables quantized to int8. `--export DIR` writes that model into a folder that serves it,
`--page FILE` the run as a page of HTML.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arguments import BadArguments, Options, parse
from terminal import Terminal

if TYPE_CHECKING:
    import torch
    from report import Tracker


def main(argv: Sequence[str] | None = None, trackers: Sequence[Tracker] = ()) -> dict[str, Any]:
    """Trains as the arguments say and returns what `--json` writes; rank 0 gives its metrics to `trackers` too."""
    args = parse((__doc__ or "").split("\n\n")[0], argv)
    with Terminal(active=os.environ.get("RANK", "0") == "0") as terminal:
        # torch takes seconds to import, and what is wrong with the arguments is told before
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        with terminal.doing(f"importing torch on {ranks} rank{'s' if ranks > 1 else ''}"):
            import torch.distributed as dist
            import training

            from shardwise import RankFailure
        started_here = not dist.is_initialized()
        with terminal.doing("waiting for all ranks"):
            args, device = start(args)
        # a process group that was there already knows better
        terminal.active = dist.get_rank() == 0
        try:
            return training.run(args, device, trackers, terminal)
        except RankFailure as failure:
            # the rank that is the cause has said more; torchrun starts all of them anew
            raise SystemExit(f"train.py: {failure}") from failure
        finally:
            if started_here:
                dist.destroy_process_group()


def start(args: Options) -> tuple[Options, torch.device]:
    """Joins the process group that torchrun describes, or makes one of this process alone.

    Returns the options with the kind of device that is chosen where none is given, and this rank's device.
    """
    import torch
    import torch.distributed as dist

    if args.device is None:
        args = replace(args, device="cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("train.py: --device cuda: torch finds no CUDA device here, pass --device cpu")
    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return args, device


def command() -> None:
    """What torchrun starts. Its report has the error of each rank: a traceback, or the text of those that have one."""
    faulthandler.enable()
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("train.py: interrupted") from None
    except ModuleNotFoundError as error:
        message = f"train.py: {error}. What it needs comes with shardwise: pip install . in a checkout of it"
        tell_torchrun(message)
        raise SystemExit(message) from None
    except SystemExit as error:
        message = error.message if isinstance(error, BadArguments) else str(error.code)
        # a peer that ends for the failure of another comes after it, also within one second
        tell_torchrun(message, later=error.__cause__ is not None)
        raise
    except Exception:
        tell_torchrun(traceback.format_exc())
        raise


def tell_torchrun(text: str, *, later: bool = False) -> None:
    """Have torchrun's report say this of this rank, as `torch.distributed.elastic`'s `record` has it say tracebacks."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        about = {"py_callstack": text.rstrip(), "timestamp": str(int(time.time()) + later)}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)


if __name__ == "__main__":
    command()
