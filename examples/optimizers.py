"""Optimizers in the backward: built in, with settings, and one of your own in ten lines."""

from __future__ import annotations

from typing import Any

import torch

from shardwise import (
    FTRL,
    LAMB,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GradientCheckMode,
    KeyedJaggedTensor,
    LarsSGD,
    LookupPolicy,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    RuleOptimizer,
    WeightDecayMode,
    apply_optimizer_in_backward,
    define_optimizer,
)
from shardwise.kernels.rule import sign


@define_optimizer(momentum="element")
def Lion(w: Any, g: Any, momentum: Any, lr: float = 1e-4, beta1: float = 0.9, beta2: float = 0.99) -> Any:
    """Sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""
    w = w - lr * sign(beta1 * momentum + (1 - beta1) * g)
    return w, beta2 * momentum + (1 - beta2) * g


CHOICES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (Lion, {"lr": 0.02}),
    (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    (RowWiseAdagrad, {"lr": 0.2, "weight_decay": 0.01, "weight_decay_mode": WeightDecayMode.DECOUPLE}),
    (PartialRowWiseAdam, {"lr": 0.02, "gradient_clipping": True, "max_gradient": 0.5}),
    (LAMB, {"lr": 0.05}),
    (PartialRowWiseLAMB, {"lr": 0.05}),
    (LarsSGD, {"lr": 0.5, "eta": 0.1}),
    (FTRL, {"lr": 0.2, "l1": 0.001}),
]


def main() -> None:
    tables = [EmbeddingBagConfig(50, 8, "item", feature_names=["clicked"])]
    generator = torch.Generator().manual_seed(0)
    batch = KeyedJaggedTensor(
        ["clicked"], torch.randint(0, 50, (64,), generator=generator), lengths=torch.full((16,), 4)
    )
    wanted = torch.randn(16, 8, generator=generator)
    for kind, settings in CHOICES:
        torch.manual_seed(0)
        ebc = EmbeddingBagCollection(tables, policy=LookupPolicy(gradient_check=GradientCheckMode.SKIP))
        apply_optimizer_in_backward(kind, ebc.parameters(), settings)
        losses = []
        for _ in range(100):
            loss = (ebc(batch)["clicked"] - wanted).square().mean()
            loss.backward()
            losses.append(loss.item())
        own = " (a rule)" if issubclass(kind, RuleOptimizer) else ""
        print(f"{kind.__name__}{own}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
