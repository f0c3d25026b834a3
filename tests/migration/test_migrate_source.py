"""Which names of TorchRec are found in a program's source, and how its imports are rewritten."""

from __future__ import annotations

import codecs
import textwrap

import pytest

pytest.importorskip("libcst")

from shardwise.migration.source import Unreadable, Use, read_program


def rewritten(source: str) -> str:
    return read_program(textwrap.dedent(source).encode()).rewritten.decode()


def used(source: str) -> list[str]:
    """`line name` of each use."""
    return [f"{use.line} {use.name}" for use in read_program(textwrap.dedent(source).encode()).uses]


# what is imported, and a use of it -> the names
FORMS = {
    "import torchrec; torchrec.KeyedTensor": ["torchrec", "torchrec.KeyedTensor"],
    "import torchrec as t; t.optim.SGD(lr=1)": ["torchrec", "torchrec.optim.SGD"],
    "import torchrec.distributed as trd; trd.planner.Topology": [
        "torchrec.distributed", "torchrec.distributed.planner.Topology",
    ],
    "import torchrec.distributed; torchrec.optim.SGD": ["torchrec.distributed", "torchrec.optim.SGD"],
    "from torchrec import distributed as d; d.types.ShardingType.ROW_WISE.value": [
        "torchrec.distributed", "torchrec.distributed.types.ShardingType",
    ],
    "from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as K; K.empty().keys()": [
        "torchrec.sparse.jagged_tensor.KeyedJaggedTensor",
    ],
    "from torchrec.metrics.what import run; run.it()": ["torchrec.metrics.what.run"],
    "import torchrec.metrics.what as w; w.Metric.add": ["torchrec.metrics.what", "torchrec.metrics.what.Metric"],
    "from torchrec import *; EmbeddingBagCollection": ["torchrec.*"],
    "from fbgemm_gpu.config import Mystery; Mystery": ["fbgemm_gpu.config.Mystery"],
    "import torch; torch.ops.fbgemm.mystery(1)": ["torch.ops.fbgemm.mystery"],
    "import torch; torch.ops.aten.mystery(torch.optim.SGD)": [],
    "from shardwise.torchrec.optim import SGD": ["torchrec.optim.SGD"],
    "import shardwise.torchrec as torchrec; torchrec.install(); torchrec.KeyedTensor": [
        "torchrec", "torchrec.KeyedTensor",
    ],
    "import shardwise; shardwise.torchrec.optim.SGD, shardwise.KeyedTensor": ["torchrec.optim.SGD"],
    "from shardwise import KeyedTensor": [],
    "from .torchrec import KeyedTensor; from . import torchrec; torchrec.x": [],
    "import mytorchrec, torchrec_extra; torchrec_extra.distributed": [],
    "x = 'torchrec.KeyedTensor'; import importlib; importlib.import_module('torchrec.optim')": [],
}  # fmt: skip


@pytest.mark.parametrize("source", FORMS)
def test_every_form_of_an_import_gives_its_names(source: str) -> None:
    assert list(dict.fromkeys(use.name for use in read_program(source.encode()).uses)) == FORMS[source]


def test_a_use_has_the_line_where_it_stands() -> None:
    assert used("""\
        import torchrec
        from torchrec.distributed.types import (
            ModuleSharder,

            ShardingEnv as Env,
        )
        print(
            torchrec
            .KeyedTensor,
            Env.from_local,
        )
    """) == [
        "1 torchrec",
        "3 torchrec.distributed.types.ModuleSharder",
        "5 torchrec.distributed.types.ShardingEnv",
        "8 torchrec.KeyedTensor",
        "10 torchrec.distributed.types.ShardingEnv",
    ]


def test_what_hides_an_import_is_not_a_use_of_it() -> None:
    assert used("""\
        import torchrec
        def other():
            torchrec = local()
            return torchrec.optim.SGD
        def again(torchrec, call):
            call(torchrec=torchrec.optim.Adam)
        def deep():
            from torchrec.optim import LAMB as torchrec
            return torchrec.step
        class C:
            rate = [torchrec for torchrec in range(3)]
            def m(self) -> "torchrec.KeyedTensor":
                self.torchrec.optim.Adagrad
                return torchrec.JaggedTensor
    """) == ["1 torchrec", "8 torchrec.optim.LAMB", "9 torchrec.optim.LAMB", "14 torchrec.JaggedTensor"]


# as it was -> as it is written
REWRITTEN = {
    "import torchrec": "import shardwise.torchrec as torchrec",
    "import torchrec as t": "import shardwise.torchrec as t",
    "import torchrec.distributed": "import shardwise.torchrec as torchrec",
    "import torchrec.distributed as trd": "import shardwise.torchrec.distributed as trd",
    "import os, torchrec.optim as o,torchrec": (
        "import os, shardwise.torchrec.optim as o,shardwise.torchrec as torchrec"
    ),
    # what we lack fails where it failed, for `except ImportError`
    "import torchrec.mystery": "import shardwise.torchrec.mystery",
    "from torchrec import EmbeddingBagCollection": "from shardwise import EmbeddingBagCollection",
    "from torchrec import distributed": "from shardwise.torchrec import distributed",
    "from torchrec.sparse.jagged_tensor import KeyedTensor as T, JaggedTensor": (
        "from shardwise import KeyedTensor as T, JaggedTensor"
    ),
    "from torchrec.optim.optimizers import SGD": "from shardwise.torchrec.optim.optimizers import SGD",
    "from torchrec.mystery import Thing": "from shardwise.torchrec.mystery import Thing",
    "from torchrec.optim import LAMB, SGD": "from shardwise import LAMB\nfrom shardwise.torchrec.optim import SGD",
    "if x:\n\tfrom torchrec.optim import (LAMB as L, \n SGD)": (
        "if x:\n\tfrom shardwise import LAMB as L\n\tfrom shardwise.torchrec.optim import SGD"
    ),
    # one line, or comments: one statement stays one
    "x = 1; from torchrec.optim import LAMB, SGD": "x = 1; from shardwise.torchrec.optim import LAMB, SGD",
    "if x: from torchrec.optim import LAMB, SGD": "if x: from shardwise.torchrec.optim import LAMB, SGD",
    "from torchrec.optim import (\n LAMB, # a\n SGD)": "from shardwise.torchrec.optim import (\n LAMB, # a\n SGD)",
    "from  torchrec.optim  import LAMB # noqa": "from  shardwise  import LAMB # noqa",
    "from torchrec.optim import (  # a\n  LAMB,\n  # b\n)  # c": "from shardwise import (  # a\n  LAMB,\n  # b\n)  # c",
    "from fbgemm_gpu.split_embedding_configs import EmbOptimType as E": (
        "from shardwise.embeddings.optim.fbgemm_types import EmbOptimType as E"
    ),
    "from fbgemm_gpu.split_embedding_configs import EmbOptimType, mystery": (
        "from shardwise.embeddings.optim.fbgemm_types import EmbOptimType\n"
        "from shardwise.fbgemm_gpu.split_embedding_configs import mystery"
    ),
    "import fbgemm_gpu  # noqa": "import shardwise.fbgemm_gpu as fbgemm_gpu  # noqa",
    "import fbgemm_gpu\ntorch.ops.fbgemm.mystery(1)": (
        "import shardwise.fbgemm_gpu as fbgemm_gpu\ntorch.ops.fbgemm.mystery(1)"
    ),
    # ops that came with torchrec
    "import torch\nfrom torchrec import PoolingType\nx = torch.ops.fbgemm.invert_permute(p)": (
        "import torch\nimport shardwise.fbgemm\nfrom shardwise import PoolingType\n"
        "x = torch.ops.fbgemm.invert_permute(p)"
    ),
    # left alone
    "from torchrec.optim import *": "from torchrec.optim import *",
    "from fbgemm_gpu.mystery import Thing": "from fbgemm_gpu.mystery import Thing",
    "from .torchrec import optim": "from .torchrec import optim",
    "import torchrecs\nx = 'import torchrec'  # import torchrec": (
        "import torchrecs\nx = 'import torchrec'  # import torchrec"
    ),
}


@pytest.mark.parametrize("source", REWRITTEN)
def test_imports_are_rewritten_and_nothing_else(source: str) -> None:
    around = '"""Doc: café."""\n\n\n{}\n\nprint( "ü" , torchrec )   # kept'
    assert rewritten(around.format(source)) == around.format(REWRITTEN[source])


@pytest.mark.parametrize("source", REWRITTEN)
def test_a_second_time_changes_nothing(source: str) -> None:
    assert rewritten(REWRITTEN[source]) == REWRITTEN[source]


def test_a_long_line_of_two_is_broken() -> None:
    names = ["EmbeddingBagCollection", "EmbeddingCollection", "EmbeddingBagConfig", "EmbeddingConfig", "KeyedTensor"]
    listed = "".join(f"        {name},\n" for name in names)
    assert rewritten(f"def f():\n    from torchrec import {', '.join(names)}, distributed\n") == (
        f"def f():\n    from shardwise import (\n{listed}    )\n    from shardwise.torchrec import distributed\n"
    )


def test_newlines_and_a_byte_order_mark_stay() -> None:
    source = codecs.BOM_UTF8 + b"# caf\xc3\xa9\r\nfrom torchrec.optim import LAMB, SGD\r\n\r\nx = 1"
    assert read_program(source).rewritten == codecs.BOM_UTF8 + (
        b"# caf\xc3\xa9\r\nfrom shardwise import LAMB\r\nfrom shardwise.torchrec.optim import SGD\r\n\r\nx = 1"
    )
    assert read_program(b"") == read_program(b"").__class__((), b"")


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (b"import torchrec\nif x:\ny = 3", 3, "no Python: expected an indented block"),
        (b"print 'torchrec'", 1, "no Python: "),
        (b"x = 1\ny = 'torchrec\n", 2, "no Python: "),
        (b"\x00\n", 1, "no Python: "),
        (b"import torchrec\n# caf\xe9\n", 2, "not UTF-8: byte 0xe9"),
        (b"x = " + b"+".join([b"a"] * 1500), 1, "an expression is nested too deeply"),
        # these ended the process: the parser has no limit of its own
        (b"\nx = " + b"(" * 3000 + b"1" + b")" * 3000, 2, "an expression is nested too deeply"),
        (b"x = " + b"-" * 50_000 + b"1", 1, "an expression is nested too deeply"),
        (b"x = " + b"not " * 50_000 + b"1", 1, "an expression is nested too deeply"),
    ],
)
def test_what_is_no_python_is_said_with_its_line(source: bytes, line: int, message: str) -> None:
    with pytest.raises(Unreadable, match=message) as caught:
        read_program(source)
    assert caught.value.line == line


def test_the_tutorials_imports_are_all_found() -> None:
    """The import forms of TorchRec's introduction, sharding tutorial and announcement of 1.0."""
    source = """\
        import os
        import torch
        import torchrec
        import torch.distributed as dist
        from typing import cast
        from torchrec import EmbeddingBagCollection
        from torchrec import KeyedJaggedTensor
        from torchrec import JaggedTensor
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.types import ShardingType
        from torchrec.distributed.types import ModuleSharder, ShardingEnv
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.inference.modules import (
            quantize_inference_model,
            shard_quant_model,
        )
        ebc = torchrec.EmbeddingBagCollection(
            device="meta",
            tables=[torchrec.EmbeddingBagConfig(name="t", pooling=torchrec.PoolingType.SUM)],
        )
        model = torchrec.distributed.DistributedModelParallel(ebc, device=torch.device("cuda"))
        sharder = cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())
    """
    names = {use.name for use in read_program(textwrap.dedent(source).encode()).uses}
    assert len(names) == 18
    assert {Use("torchrec.distributed.DistributedModelParallel", 24)} < {
        *read_program(textwrap.dedent(source).encode()).uses
    }
    # what the quantized modules import stays by itself, for `shardwise` has it elsewhere
    assert rewritten(source) == textwrap.dedent("""\
        import os
        import torch
        import shardwise.torchrec as torchrec
        import torch.distributed as dist
        from typing import cast
        from shardwise import (
            DistributedModelParallel,
            EmbeddingBagCollection,
            EmbeddingBagCollectionSharder,
            EmbeddingComputeKernel,
            EmbeddingShardingPlanner,
            JaggedTensor,
            KeyedJaggedTensor,
            ModuleSharder,
            ParameterConstraints,
            ShardingEnv,
            ShardingType,
            Topology,
        )
        from shardwise.torchrec.inference.modules import (
            quantize_inference_model,
            shard_quant_model,
        )
    """) + textwrap.dedent(source[source.index("        ebc =") :])


# of an import that shardwise has
A, B, C = (f"from torchrec import {name}\n" for name in ("EmbeddingBagCollection", "DataType", "PoolingType"))
IN_BACKWARD = "torchrec.optim.apply_optimizer_in_backward"
AB = "from shardwise import DataType, EmbeddingBagCollection\n"
A_ALONE, B_ALONE = ("from shardwise import EmbeddingBagCollection\n", "from shardwise import DataType\n")


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


# as it was -> as it is written
MERGED = {
    A + B: AB,
    A + B + "x = 1\n": AB + "x = 1\n",
    # the order of isort: constants, classes, functions; numbers by value, whatever the case
    f"from {IN_BACKWARD} import apply_optimizer_in_backward\n" + B + "from torchrec.optim import LAMB\n": (
        "from shardwise import LAMB, DataType, apply_optimizer_in_backward\n"
    ),
    # what is imported twice, and under another name
    A + "from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollection as E\n" + B: (
        "from shardwise import DataType, EmbeddingBagCollection, EmbeddingBagCollection as E\n"
    ),
    "import torchrec\nimport torchrec.optim\nimport torchrec as t\nimport torchrec.optim as o\n": (
        "import shardwise.torchrec as torchrec\nimport shardwise.torchrec as t\nimport shardwise.torchrec.optim as o\n"
    ),
    # of two modules
    "from torchrec.optim import LAMB, SGD\n" + B + "from torchrec.optim import Adam\n": (
        "from shardwise import LAMB, DataType\nfrom shardwise.torchrec.optim import SGD, Adam\n"
    ),
    # with what was there
    "from shardwise import PoolingType\n" + A: "from shardwise import EmbeddingBagCollection, PoolingType\n",
    "from shardwise import PoolingType\nfrom shardwise import Topology\n": (
        "from shardwise import PoolingType\nfrom shardwise import Topology\n"
    ),
    # across what does nothing to them, at the top alone
    A + "import os\nfrom torch import nn\n\n" + B + "\n\ndef f(): ...\n": (
        AB + "import os\nfrom torch import nn\n\n\ndef f(): ...\n"
    ),
    A + "import os\n\n" + B + "import torch\n": AB + "import os\n\nimport torch\n",
    A + "\n" + B + "\n" + C + "x = 1\n": (
        "from shardwise import DataType, EmbeddingBagCollection, PoolingType\n\nx = 1\n"
    ),
    A + "import mine\n" + B: A_ALONE + "import mine\n" + B_ALONE,
    A + "from . import mine\n" + B: A_ALONE + "from . import mine\n" + B_ALONE,
    A + "from torch import *\n" + B: A_ALONE + "from torch import *\n" + B_ALONE,
    A + "x = 1\n" + B: A_ALONE + "x = 1\n" + B_ALONE,
    A + "import os; os.x = 1\n" + B: A_ALONE + "import os; os.x = 1\n" + B_ALONE,
    # in a block only side by side
    "def f():\n" + indented(A + B + "return 1\n"): "def f():\n" + indented(AB + "return 1\n"),
    "def f():\n" + indented(A + "import os\n" + B): "def f():\n" + indented(A_ALONE + "import os\n" + B_ALONE),
    "if TYPE_CHECKING:\n" + indented(A + "\n" + B) + C: (
        "if TYPE_CHECKING:\n" + indented(AB) + "from shardwise import PoolingType\n"
    ),
    "try:\n" + indented(A + B) + "except ImportError:\n" + indented(C) + A: (
        "try:\n" + indented(AB) + "except ImportError:\n" + indented("from shardwise import PoolingType\n") + A_ALONE
    ),
    # what is missing raises where it did
    "try:\n" + indented(A + "from torchrec import mystery\n" + B) + "except ImportError: ...\n": (
        "try:\n"
        + indented(A_ALONE + "from shardwise.torchrec import mystery\n" + B_ALONE)
        + "except ImportError: ...\n"
    ),
    # comments
    A + B[:-1] + "  # noqa: F401\n" + C: (
        "from shardwise import EmbeddingBagCollection, PoolingType\nfrom shardwise import DataType  # noqa: F401\n"
    ),
    A + "# types\n" + B + C: A_ALONE + "# types\nfrom shardwise import DataType, PoolingType\n",
    A + B + "# isort: off\n" + C: A_ALONE + B_ALONE + "# isort: off\nfrom shardwise import PoolingType\n",
    A + "from torchrec import (\n    DataType,  # types\n)\n": (
        A_ALONE + "from shardwise import (\n    DataType,  # types\n)\n"
    ),
    # a name that two give a value: the last one keeps it
    A + "from torchrec.quant import EmbeddingBagCollection\n" + B + C: (
        A_ALONE + "from shardwise.torchrec.quant import EmbeddingBagCollection\n"
        "from shardwise import DataType, PoolingType\n"
    ),
    A + "from torch import nn as DataType\n" + B + C: (
        "from shardwise import EmbeddingBagCollection, PoolingType\nfrom torch import nn as DataType\n" + B_ALONE
    ),
    A
    + B[:-1]
    + ";\n"
    + C: "from shardwise import EmbeddingBagCollection, PoolingType\nfrom shardwise import DataType;\n",
    # the first line or the last
    A + B[:-1]: AB[:-1],
    A + "from torchrec import DataType, \\\n    PoolingType\n\n\n": (
        "from shardwise import DataType, EmbeddingBagCollection, PoolingType\n\n\n"
    ),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("source", MERGED)
def test_imports_of_one_module_become_one_where_nothing_between_can_notice(source: str, newline: str) -> None:
    wanted = MERGED[source].replace("\n", newline).encode()
    assert read_program(source.replace("\n", newline).encode()).rewritten == wanted
    assert read_program(wanted) == read_program(wanted).__class__(read_program(wanted).uses, wanted, 0)


def test_a_statement_that_changes_counts_once() -> None:
    source = A + B + "from torchrec.optim import SGD, LAMB\nimport torchrec, torchrec.optim as o\nimport torch\n"
    assert [read_program(text.encode()).imports for text in (source, "from torchrec import *\n", "")] == [4, 0, 0]


def test_a_merged_line_that_is_too_long_is_broken_with_the_indent_of_its_block() -> None:
    names = ["EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig", "KeyedTensor"]
    source = "".join(f"\t\tfrom torchrec import {name}\n" for name in reversed(names))
    listed = "".join(f"\t\t\t{name},\n" for name in names)
    around = "class C:\n\tdef f():\n{}\t\treturn KeyedTensor\n"
    assert rewritten(around.format(source)) == around.format(f"\t\tfrom shardwise import (\n{listed}\t\t)\n")
