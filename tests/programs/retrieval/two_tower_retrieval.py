# type: ignore  # torchrec is served at run time
"""Loads what two_tower_train.py saved into quantized towers around the index, and scores candidates of some users."""

import argparse

import torch
from known_weights import print_losses
from modules.two_tower import ExactIndex, TwoTowerRetrieval
from torchrec import inference as trec_infer
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def infer(num_embeddings, embedding_dim, layer_sizes, k, batch_size, load_dir):
    names = DEFAULT_RATINGS_COLUMN_NAMES[:2]
    collections = [
        EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature_name}",
                    embedding_dim=embedding_dim,
                    num_embeddings=num_embeddings,
                    feature_names=[feature_name],
                )
            ]
        )
        for feature_name in names
    ]
    index = ExactIndex()
    index.add(torch.load(f"{load_dir}/index.pt"))
    model = TwoTowerRetrieval(index, *collections, layer_sizes, k)
    model = trec_infer.modules.quantize_embeddings(model, dtype=torch.qint8, inplace=True)
    state = {
        name.replace("two_tower.ebc.", "query_ebc." if "userId" in name else "candidate_ebc.").replace(
            "two_tower.", ""
        ): tensor
        for name, tensor in torch.load(f"{load_dir}/model.pt").items()
    }
    model.load_state_dict(state)
    batch = KeyedJaggedTensor(
        keys=[names[0]],
        values=torch.arange(batch_size) * 7 % num_embeddings,
        lengths=torch.tensor([1] * batch_size),
    )
    with torch.no_grad():
        print_losses(scores=model(batch).tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load_dir", required=True)
    infer(400, 16, [16, 8], 1, 8, parser.parse_args().load_dir)
