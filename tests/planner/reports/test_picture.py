"""The picture of a plan stands alone: an XML document of its own, with its colours and no rule of a page."""

from __future__ import annotations

import re
from xml.dom import minidom

import torch

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    RowWiseAdagrad,
    Topology,
    apply_optimizer_in_backward,
    get_default_sharders,
)
from shardwise.planner.reports.page import picture


def test_a_picture_has_all_that_it_refers_to() -> None:
    tables = [EmbeddingBagConfig(10_000 * 4**n, 64, f"t{n}", feature_names=[f"f{n}"]) for n in range(5)]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    machines = Topology(world_size=4, compute_device="cuda", card="h100")
    plan = EmbeddingShardingPlanner(machines, batch_size=65_536).plan(collection, get_default_sharders())
    drawn = picture(plan.explanation.planned)  # type: ignore[union-attr]
    root = minidom.parseString(drawn).documentElement
    assert root is not None and root.tagName == "svg" and root.getAttribute("xmlns") == "http://www.w3.org/2000/svg"
    texts = {text.firstChild.data for text in root.getElementsByTagName("text")}  # type: ignore[union-attr]
    assert {"rank", "bound"} <= texts and texts & {f"t{n}" for n in range(5)}
    style = re.findall(r"<style>(.*?)</style>", drawn, re.DOTALL)[0]
    assert set(re.findall(r"url\(#([\w-]+)\)", style)) <= set(re.findall(r'id="([\w-]+)"', drawn))
    assert set(re.findall(r"var\(--([\w-]+)\)", style)) <= set(re.findall(r"--([\w-]+):", style))
    assert not re.search(r"(^|\})(body|p|h1|table|\*|@media)", style)
