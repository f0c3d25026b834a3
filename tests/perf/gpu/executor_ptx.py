"""Small kernels in PTX for tests of the executor: a body, and buffers that its parameters point to."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.perf.gpu import Kernel, Launch, Memory

Array = np.ndarray[Any, Any]
WIDTHS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def kernel(body: str, parameters: int = 4, threads: int = 64) -> Kernel:
    """A kernel whose parameters are 64 bits each: %in0, %in1, ... hold them, %tid the thread, %rd0 8 * thread."""
    declared = ", ".join(f".param .u64 k_param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.b64 %in{i}, [k_param_{i}];" for i in range(parameters))
    return Kernel(f"""
        .version 8.7
        .target sm_90a
        .extern .shared .align 16 .b8 smem[];
        .visible .entry k({declared}) .reqntid {threads} {{
            .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %rd<32>;
            .reg .b64 %in<{parameters}>; .reg .b32 %tid;
            {loads}
            mov.u32 %tid, %tid.x;
            mul.wide.u32 %rd0, %tid, 8;
            {body}
        }}
    """)


def prepare(
    body: str,
    *buffers: Array,
    shared: int = 0,
    threads: int = 64,
    initialised: bool = True,
    shift: int = 0,
    **_: Any,
) -> tuple[Launch, list[int]]:
    """A launch of a body on copies of the buffers, and where those are; they may lie `shift` bytes off, or be empty."""
    memory = Memory()
    addresses = [memory.put(data, f"B{i}", shift, initialised=initialised) for i, data in enumerate(buffers)]
    made = kernel(body, len(buffers), threads)
    return Launch(made, memory, shared, addresses), addresses


def launch(
    body: str, *buffers: Array, grid: tuple[int, ...] = (1,), shuffle: int | None = None, **settings: Any
) -> tuple[Launch, list[Array]]:
    """Run a body; gives the launch and what the buffers hold after it."""
    made, addresses = prepare(body, *buffers, **settings)
    made.run(grid, shuffle=shuffle)
    return made, [made.memory.get(address) for address in addresses]


def compute(opcode: str, inputs: list[Array], output: Any, suffix: str = "") -> Array:
    """The opcode of arrays of equal length, one element a thread; inputs of one byte are predicates."""
    count = len(inputs[0])
    padded = -(-count // 32) * 32
    lines, names = [], []
    for i, data in enumerate(inputs):
        size = data.dtype.itemsize
        kind = WIDTHS[size]
        name = {"b16": "%h", "b32": "%r", "b64": "%rd"}[kind] + str(i + 1)
        lines += [
            f"mad.wide.u32 %rd20, %tid, {size}, %in{i};",
            f"ld.global.{'u8' if size == 1 else kind} {name}, [%rd20];",
        ]
        if size == 1:
            lines.append(f"setp.ne.b16 %p{i + 1}, {name}, 0;")
            name = f"%p{i + 1}"
        names.append(name)
    size = np.dtype(output).itemsize
    out = {2: "%h10", 4: "%r10", 8: "%rd10", 1: "%p10"}[size]
    lines.append(f"{opcode} {out}, {', '.join(names)}{suffix};")
    if size == 1:
        lines.append("selp.b32 %r10, 1, 0, %p10; cvt.u16.u32 %h10, %r10;")
    lines += [f"mad.wide.u32 %rd20, %tid, {size}, %in{len(inputs)};"]
    lines += [f"st.global.{'b8' if size == 1 else WIDTHS[size]} [%rd20], {'%h10' if size == 1 else out};", "ret;"]
    whole = [np.concatenate([data, data[:1].repeat(padded - count)]) for data in inputs]
    made, held = launch("\n".join(lines), *whole, np.zeros(padded, output), threads=padded)
    assert not made.faults
    return held[-1][:count]
