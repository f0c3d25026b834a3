# type: ignore  # torchrec is served at run time
"""Histories of random users, in each of which the next item follows from the last; some items masked, to be guessed."""

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MaskedSequences(Dataset):
    def __init__(self, users, items, max_len):
        generator = torch.Generator().manual_seed(3)
        first = torch.randint(items, (users, 1), generator=generator)
        seqs = (first + torch.arange(max_len) * 3) % items + 1
        masked = torch.rand(users, max_len, generator=generator) < 0.3
        masked[:, -1] = True
        # 0 pads, items + 1 masks
        self.seqs, self.labels = seqs.masked_fill(masked, items + 1), seqs.masked_fill(~masked, 0)

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, user):
        return self.seqs[user], self.labels[user]


def get_dataloader(rank, world_size, batch_size, users, items, max_len):
    sequences = MaskedSequences(users, items, max_len)
    sampler = DistributedSampler(sequences, num_replicas=world_size, rank=rank, shuffle=True, seed=1)
    return DataLoader(sequences, batch_size=batch_size, sampler=sampler)
