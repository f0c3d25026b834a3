# type: ignore  # torchrec is served at run time
"""BERT over the items of a history: an EmbeddingCollection, positions, and blocks of self-attention."""

import math

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.inputs(self.norm1(x)).chunk(3, -1)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        shares = scores.masked_fill(mask == 0, -1e9).softmax(dim=-1)
        x = x + self.output((shares @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class HistoryArch(nn.Module):
    def __init__(self, vocab_size: int, history_len: int, emb_dim: int, device=None) -> None:
        super().__init__()
        self.history_len, self.emb_dim = history_len, emb_dim
        self.positional = nn.Parameter(torch.zeros(history_len, emb_dim, device=device))
        self.layernorm = nn.LayerNorm([history_len, emb_dim], device=device)
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="item_embedding",
                    embedding_dim=emb_dim,
                    num_embeddings=vocab_size,
                    feature_names=["item"],
                    weight_init_max=1.0,
                    weight_init_min=-1.0,
                )
            ],
            device=device,
        )

    def forward(self, id_list_features: KeyedJaggedTensor) -> torch.Tensor:
        by_name = self.ec(id_list_features)
        padded = [
            torch.ops.fbgemm.jagged_2d_to_dense(
                values=by_name[key].values(),
                offsets=by_name[key].offsets(),
                max_sequence_length=self.history_len,
            ).view(-1, self.history_len, self.emb_dim)
            for key in [*id_list_features.keys()]
        ]
        items = torch.cat(padded, dim=1)
        return self.layernorm(items + self.positional.unsqueeze(0).repeat(id_list_features.stride(), 1, 1))


class BERT4Rec(nn.Module):
    def __init__(self, vocab_size: int, max_len: int, emb_dim: int, nhead: int, num_layers: int, device=None) -> None:
        super().__init__()
        self.max_len = max_len
        self.history = HistoryArch(vocab_size, max_len, emb_dim, device=device)
        self.blocks = nn.ModuleList([Block(emb_dim, nhead) for _ in range(num_layers)])
        self.out = nn.Linear(emb_dim, vocab_size, device=device)

    def forward(self, input: KeyedJaggedTensor) -> torch.Tensor:
        ids = input["item"].to_padded_dense(desired_length=self.max_len)
        mask = (ids > 0).unsqueeze(1).repeat(1, ids.size(1), 1).unsqueeze(1)
        x = self.history(input)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x)
