"""Optimizers that run inside the backward: how one is chosen for a table, and what the kernel is told.

`apply_optimizer_in_backward` marks parameters; collections and `DistributedModelParallel` read the marks. Defaults of
absent hyper-parameters are those of FBGEMM's fused optimizers (lr 0.01, eps 1e-8), not those of the optimizer class.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.kernels import Rule, define_rule, rule_named
from shardwise.kernels.rule import row_mean, row_sum, sqrt, where

from ..tables.table_layout import OptimizerSpec
from .rule_optimizer import RuleOptimizer, step_each

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class WeightDecayMode(IntEnum):
    """How `weight_decay` enters a fused step: not at all, added to the gradient, or taken from the row by itself.

    FBGEMM has three more, which no rule takes.
    """

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


_DECAYS = {WeightDecayMode.NONE: "none", WeightDecayMode.L2: "l2", WeightDecayMode.DECOUPLE: "decoupled"}


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row, of the mean of the row's squared gradient.

    As a fused rule it is the usual choice for embedding tables; as an ordinary optimizer it trains any parameter with
    a dense gradient, each slice along dim 0 being a row. Formula: Mudigere et al. 2022 (arXiv:2104.05158), section 4.

    Raises:
        ValueError: a hyper-parameter is negative.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = RowWiseAdagrad([weight], lr=0.5)
        >>> weight[0].sum().backward()
        >>> optimizer.step()
        >>> weight[:, 0].tolist()
        [-0.5, 0.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps,
        }  # fmt: skip
        for what, value in defaults.items():
            if value < 0:
                words = {"lr": "learning rate", "eps": "epsilon value"}.get(what, f"{what} value")
                raise ValueError(f"Invalid {words}: {value}; {what} of RowWiseAdagrad must not be negative")
        super().__init__(params, {**defaults, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a state of their own from the start."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            # a scalar is a table of one row
            rows, start = p.shape[0] if p.dim() else 1, group["initial_accumulator_value"]
            total = torch.full((rows, 1), start, dtype=torch.float32, device=p.device)
            self.state[p] = {"step": torch.tensor(0.0), "sum": total}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step over every parameter that has a gradient.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return step_each(self, closure, self._step)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] += 1
        g = -grad if group["maximize"] else grad
        if group["weight_decay"]:
            g = g + group["weight_decay"] * p
        lr = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        rows = g.float().reshape(state["sum"].shape[0], -1)
        state["sum"] += rows.pow(2).mean(1, keepdim=True)
        scale = state["sum"].sqrt().add_(group["eps"])
        p.sub_((lr * rows / scale).reshape(p.shape).to(p.dtype))


@define_rule(total="row", accumulator="total")
def rowwise_adagrad_max_norm(
    w: Any, g: Any, total: Any, row: Any, lr: float = 0.01, eps: float = 1e-8, max_norm: float = 0.0
) -> Any:
    """Rowwise Adagrad, after which a row longer than `max_norm` is cut to that length, as FBGEMM does on a GPU."""
    total = total + row_mean(g * g, row)
    moved = w - lr / (sqrt(total) + eps) * g
    length = sqrt(row_sum(moved * moved, row))
    return where(length > max_norm, moved * (max_norm / length), moved), total


# optimizer class -> its rule, and how it means `weight_decay`
_RULES: dict[type[torch.optim.Optimizer], tuple[str, str]] = {
    torch.optim.SGD: ("sgd", "l2"),
    torch.optim.Adagrad: ("adagrad", "l2"),
    torch.optim.Adam: ("adam", "l2"),
    torch.optim.AdamW: ("adam", "decoupled"),
    torch.optim.SparseAdam: ("adam", "l2"),
    RowWiseAdagrad: ("rowwise_adagrad", "l2"),
}
# settings that every rule takes
_COMMON = ("gradient_clipping", "max_gradient", "stochastic_rounding", "seed", "weight_decay", "weight_decay_mode")


def optimizer_spec(
    optimizer_class: type[torch.optim.Optimizer], optimizer_kwargs: dict[str, Any], *, table: str
) -> OptimizerSpec:
    """The fused rule for an optimizer class and its keyword arguments.

    Besides the rule's hyper-parameters these may be `weight_decay` and `weight_decay_mode` (default: what the class
    means by it), `gradient_clipping=True` with `max_gradient` (default 1.0), `stochastic_rounding` (default True) and
    `seed`; of `RowWiseAdagrad` also `max_norm`, the length to which rows are cut when they are updated.

    Raises:
        ValueError: the class has no fused rule, an argument asks for something that the rule does not do, or a number
            is negative or not finite.
    """
    given = {"lr" if name == "learning_rate" else name: value for name, value in optimizer_kwargs.items()}
    rule, decay = _rule_of(optimizer_class, given, table)
    if optimizer_class is torch.optim.AdamW:
        given.setdefault("weight_decay", 0.01)
    betas = given.pop("betas", None)
    if betas is not None:
        if len(betas) != 2:
            raise ValueError(f"table {table!r}: betas must be two numbers, got {betas!r}")
        given.update(beta1=betas[0], beta2=betas[1])
    takes = (*rule.hyper, *_COMMON, *(("initial_accumulator_value",) if rule.accumulator else ()))
    chosen: dict[str, float] = {}
    for name, value in given.items():
        # never skip a setting silently: a zero, False or None asks for nothing
        if name not in takes and value:
            raise ValueError(f"table {table!r}: fused {optimizer_class.__name__} does not take {name}={value!r}")
        if name in takes and name != "weight_decay_mode" and value is not None:
            chosen[name] = _number(value, name, table)
    mode = given.get("weight_decay_mode")
    if mode is not None:
        decay = _DECAYS[_mode(mode, table)]
    others = tuple((name, chosen[name]) for name in rule.hyper if name in chosen and name != "lr")
    weight_decay = 0.0 if "weight_decay" in rule.hyper else chosen.get("weight_decay", 0.0)
    return OptimizerSpec(
        rule.name,
        chosen.get("lr", rule.hyper.get("lr", 0.0)),
        others,
        weight_decay,
        decay if weight_decay else "none",
        chosen.get("initial_accumulator_value", 0.0),
        chosen.get("max_gradient", 1.0) if chosen.get("gradient_clipping") else None,
        bool(chosen.get("stochastic_rounding", True)),
        int(chosen.get("seed", 0)),
    )


def _rule_of(optimizer_class: type[torch.optim.Optimizer], given: dict[str, Any], table: str) -> tuple[Rule, str]:
    if issubclass(optimizer_class, RuleOptimizer):
        return optimizer_class.rule, optimizer_class.decay
    if optimizer_class not in _RULES:
        known = ", ".join(c.__name__ for c in (*_RULES, *RuleOptimizer.__subclasses__()))
        raise ValueError(f"table {table!r}: {optimizer_class.__name__} has no fused rule; these do: {known}")
    name, decay = _RULES[optimizer_class]
    if name == "sgd" and given.get("momentum"):
        name = "momentum_sgd"
    if name == "rowwise_adagrad" and given.get("max_norm"):
        name = "rowwise_adagrad_max_norm"
    return rule_named(name), decay


def _mode(mode: Any, table: str) -> WeightDecayMode:
    # FBGEMM's own enum has the same names
    name = str(getattr(mode, "name", mode)).upper()
    if name not in [known.name for known in _DECAYS]:
        expected = ", ".join(known.name for known in _DECAYS)
        what = "is served by no rule" if name in WeightDecayMode.__members__ else "is unknown"
        raise ValueError(f"table {table!r}: weight_decay_mode {mode!r} {what}: expected one of {expected}")
    return WeightDecayMode[name]


def _number(value: Any, name: str, table: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"table {table!r}: {name} must be a number, got {value!r}") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"table {table!r}: {name} must be finite and not negative, got {value!r}")
    if name in ("beta1", "beta2") and number >= 1:
        raise ValueError(f"table {table!r}: {name} must be in [0, 1), got {value!r}")
    return number


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer], params: Iterable[nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Let the backward itself train `params`, with this optimizer and these keyword arguments.

    Tables of an `EmbeddingBagCollection` or `EmbeddingCollection` then take the fused update, on one device or
    sharded; call this before sharding. Any other parameter is stepped as soon as its gradient is complete. Either way
    no gradient is left for another optimizer.

    Raises:
        ValueError: a parameter already has an optimizer in the backward; none is marked then.
        TypeError: no optimizer class, or no parameters.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
        >>> weight = tables.embedding_bags["item"].weight
        >>> before = weight.detach().clone()
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([3, 7]), lengths=torch.tensor([2]))
        >>> tables(batch)["clicked"].sum().backward()
        >>> (weight != before).any(1).nonzero().flatten()
        tensor([3, 7])
        >>> weight.grad is None
        True
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"the optimizer must be a class such as torch.optim.Adagrad, got {optimizer_class!r}")
    params = list(params)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"parameters are wanted, as module.parameters() gives them, got {type(param).__name__}")
        before = optimizer_of(param)
        if before is not None:
            raise ValueError(
                f"this parameter {list(param.shape)} already has an optimizer in the backward, {before[0].__name__}:"
                " a table takes one, chosen before sharding; build the collection anew to choose another"
            )
    for param in params:
        mark_optimizer(param, optimizer_class, dict(optimizer_kwargs))
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_step_and_drop_gradient)  # type: ignore[no-untyped-call]


def mark_optimizer(
    param: nn.Parameter, optimizer_class: type[torch.optim.Optimizer], optimizer_kwargs: dict[str, Any]
) -> None:
    """Leave the marks that torch's own `_apply_optimizer_in_backward` leaves, for whoever reads those."""
    marks: Any = param
    marks._optimizer_classes = [optimizer_class]
    marks._optimizer_kwargs = [optimizer_kwargs]
    marks._in_backward_optimizers = []


def optimizer_of(param: Tensor) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer class and arguments that mark `param`, of any shape, set by this module or by torch's own function.

    Raises:
        ValueError: more than one optimizer marks it.
    """
    classes = getattr(param, "_optimizer_classes", None)
    if not classes:
        return None
    if len(classes) != 1:
        raise ValueError(f"a parameter takes one optimizer in the backward, got {len(classes)}")
    kwargs: Any = getattr(param, "_optimizer_kwargs", [{}])
    return classes[0], dict(kwargs[0] if isinstance(kwargs, list) else kwargs)


def optimizer_in_backward(param: Tensor) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer that trains `param` in its backward before it is sharded.

    None where torch's own function was told `register_hook=False`: the gradient is then the caller's, until sharding
    takes the optimizer that marks the parameter.

    Raises:
        ValueError: more than one optimizer marks it.
    """
    # torch's two maps are there once its function was imported
    torchs: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if torchs is None or param not in torchs.param_to_acc_grad_map:
        return optimizer_of(param)
    return optimizer_of(param) if param in torchs.param_to_optim_hook_handle_map else None


def _step_and_drop_gradient(param: Tensor) -> None:
    marks: Any = param
    if not marks._in_backward_optimizers:
        # at the first gradient: a table that takes the fused path never allocates these states
        marks._in_backward_optimizers.append(marks._optimizer_classes[0]([param], **marks._optimizer_kwargs[0]))
    marks._in_backward_optimizers[0].step()
    param.grad = None
