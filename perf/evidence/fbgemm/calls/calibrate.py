"""Calls of histogram binning."""

from __future__ import annotations

import torch

from .draw import Call, Draw, calls


@calls(
    "histogram_binning_calibration",
    "histogram_binning_calibration_by_feature",
    "generic_histogram_binning_calibration_by_feature",
)
def _calibration(draw: Draw) -> Call:
    count, bins, segments = draw.below(20), draw.between(1, 12), draw.between(1, 4)
    by_feature, generic = draw.op.endswith("by_feature"), draw.op.startswith("generic")
    logit = draw.floats(count, draw.choice((torch.float32, torch.float32, torch.float16)), scale=4.0)
    given: list[object] = [draw.layout(logit)]
    if by_feature:
        lengths = draw.lengths(count, most=2, dtype=draw.index_dtype())
        values = draw.ints(int(lengths.sum()), 0, segments - 1, lengths.dtype)
        given += [draw.layout(values), draw.layout(lengths), segments]
    difference = ""
    size = bins * (segments + 1) if by_feature else bins
    examples = draw.ints(size, 0, 1000).double()
    positives = (examples * draw.floats(size, torch.float64, scale=1.0).abs()).floor()
    given += [draw.layout(examples), draw.layout(positives)]
    # FBGEMM adds its logarithm to fp16 logits in fp16, which at times is another bin
    weight = draw.choice((1.0, 0.4, 2.5) if logit.dtype == torch.float32 else (1.0,))
    if generic:
        borders = draw.floats(bins - 1, torch.float64, scale=1.0).abs().sort().values
        given += [draw.layout(borders), weight]
    else:
        low, high = draw.choice(((0.0, 1.0), (0.0, 1.25))) if draw.seed < 4 or draw.coin(0.7) else (0.1, 0.8)
        # FBGEMM counts bins from 0 and takes numbers behind the last one
        difference = "predictions beyond bounds of bins" if low > 0 else ""
        given += [*([bins] if by_feature else []), weight, low, high]
    given += [draw.choice((0, 10, 500)), draw.choice((1.0, 0.999, 0.5))]
    return Call(given, packed=True, difference=difference)
