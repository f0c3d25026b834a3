"""The example of quantized tables runs as printed and shows every public name of `shardwise.quant`."""

from __future__ import annotations

import ast

from checkout import ROOT
from forked import run_script

from shardwise import quant


def test_the_example_quantizes_moves_prunes_and_converts() -> None:
    said = run_script("examples/quantize.py")
    assert "(user): QuantizedRows(5000 x 64, int4, float16 scales)" in said
    assert said.count("same") == said.count("same rows: True") + said.count("same again: True") == 2
    assert "through TorchRec's names: True" in said and "FUSED_NBIT [1000, 68] True" in said
    assert "behind maps: True KeyedTensor True\nbehind maps: True dict True" in said
    assert "5.8 times smaller, off by 0.000" in said and "quantized: [True, True, True]" in said
    assert "outputs: torch.float16 tables: ['INT8', 'INT8']" in said and "on cpu" in said
    assert "(item): QuantizedRows(1 for 1000 ids x 64, int8, float16 scales)" in said
    assert "rows of zeros: {'clicked': [True, True], 'bought': [True, False], 'user': [False, True]}" in said
    assert said.splitlines()[-2:] == [
        "72 16", "prepared: ['EmbeddingBagCollection', 'EmbeddingBagCollection', 'EmbeddingCollection']"
    ]  # fmt: skip


def test_every_name_of_quant_is_in_an_example() -> None:
    used = {
        node.attr
        for path in (ROOT / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quant"
    }
    assert set(quant.__all__) - used == set()
