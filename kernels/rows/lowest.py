import torch
from torch import Tensor


def lowest(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    picked = torch.full((capacity,), -1, dtype=torch.int64, device=keys.device)
    at = 0
    ends = borders.tolist()
    for t, count in enumerate(counts.tolist()):
        begin, end = ends[t], ends[t + 1]
        free = (held[begin:end] == 0).nonzero().squeeze(1)
        order = torch.sort(keys[begin:end][free], stable=True).indices[:count]
        chosen = free[order].sort().values + begin
        picked[at : at + chosen.numel()] = chosen
        at += count
    return picked
