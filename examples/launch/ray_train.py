"""The training of `two_nodes.py` on workers of a Ray cluster, which stand where torchrun's ranks do.

    python examples/launch/ray_train.py --workers 4 --checkpoint-dir /shared/run --steps 100

Ray starts the workers, joins them in a process group and sets LOCAL_WORLD_SIZE; when a worker or a node is lost it
starts all of them anew, and they go on from their last checkpoint. Every node has this checkout in the same place. It
needs `pip install 'ray[train]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def train_loop(config: dict[str, Any], report: Callable[[dict[str, float]], Any] | None = None) -> list[float]:
    """What each worker does, in a process group that is there already: trains, and reports the last loss."""
    sys.path.insert(0, str(HERE))
    import two_nodes

    args = two_nodes.parse(config["arguments"])
    losses = two_nodes.train(args)
    if report is not None:
        report({"loss": losses[-1], "steps": float(args.steps)})
    return losses


def on_worker(config: dict[str, Any]) -> None:
    """`train_loop` as Ray calls it."""
    import ray.train  # pyright: ignore[reportMissingImports]

    train_loop(config, ray.train.report)


def main(argv: list[str] | None = None) -> None:
    """Trains on the cluster that RAY_ADDRESS names, or on this machine."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="ranks of all nodes together")
    parser.add_argument("--max-failures", type=int, default=100, help="how often all workers may be started anew")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray").resolve(), help="of Ray's own records")
    args, of_training = parser.parse_known_args(argv)
    trainer = TorchTrainer(
        on_worker,
        train_loop_config={"arguments": of_training},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            storage_path=str(args.storage), failure_config=FailureConfig(max_failures=args.max_failures)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
