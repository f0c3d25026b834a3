"""TorchRec's constants, by its names and with its values: what its formulas assume of hardware that nobody measured.

Bandwidths are bytes per millisecond, where a GB is 1024**3 bytes, so that bytes over bandwidth are milliseconds.
"""

from __future__ import annotations

from .layout import TIERED_KERNELS

_KIB, _GIB = 1024, 1024**3

MAX_SIZE: int = (1 << 63) - 1
HUNDRED_GB: int = 100 * _GIB

# between ranks of a host, and between hosts
INTRA_NODE_BANDWIDTH: float = 600 * _GIB / 1000
CROSS_NODE_BANDWIDTH: float = 12.5 * _GIB / 1000
# memory of the device, of the host, between the two, and disk
HBM_MEM_BW: float = 897 * _GIB / 1000
DDR_MEM_BW: float = 51 * _GIB / 1000
HBM_TO_DDR_MEM_BW: float = 32 * _GIB / 1000
SSD_MEM_BW: float = 100 * _KIB**2 / 1000
# bytes of a rank
HBM_CAP: int = 32 * _GIB
DDR_CAP: int = 128 * _GIB
SSD_CAP: int = 2 * _KIB * _GIB

# where the user says nothing
BATCH_SIZE: int = 512
POOLING_FACTOR: float = 1.0
NUM_POOLINGS: float = 1.0
MIN_CW_DIM: int = 128
UVM_CACHING_RATIO: float = 0.2
KV_CACHING_RATIO: float = 0.2
MAX_PROPOSALS: int = 10_000
DEFAULT_PERF_ESTIMATOR: str = "default_estimator"

# bytes of an id
BIGINT_DTYPE: int = 8

# columns at which a lookup kernel's block is full, and how much slower it is below that and below half of it
FULL_BLOCK_EMB_DIM: int = 128
HALF_BLOCK_PENALTY: float = 1.15
QUARTER_BLOCK_PENALTY: float = 1.75
# backward over forward, the same for weighted tables on top, and the kernel of the weights' gradient over forward
BWD_COMPUTE_MULTIPLIER: float = 2
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER: float = 1
WEIGHTED_KERNEL_MULTIPLIER: float = 1.1
# the copies around an all-gather, and the optimizer of a replicated table, over one pass of the same bytes
BATCHED_COPY_PERF_FACTOR: float = 2.455
DP_ELEMENTWISE_KERNELS_PERF_FACTOR: float = 9.22


def kernel_bw_lookup(
    compute_device: str,
    compute_kernel: str,
    hbm_mem_bw: float,
    ddr_mem_bw: float,
    hbm_to_ddr_mem_bw: float,
    caching_ratio: float | None = None,
    prefetch_pipeline: bool = False,
    ssd_mem_bw: float = SSD_MEM_BW,
) -> float | None:
    """Bytes per millisecond at which a kernel reads its rows, None for a kernel that the device does not have.

    Args:
        caching_ratio: share of the rows that a cache in HBM holds; None is `UVM_CACHING_RATIO`.
        prefetch_pipeline: cached rows are there before they are read.
    """
    if compute_device in ("cpu", "mtia"):
        memory = ddr_mem_bw if compute_device == "cpu" else hbm_mem_bw
        return {"dense": 0.5 * memory, "fused": memory, "quant": memory}.get(compute_kernel)
    if compute_device != "cuda":
        return None
    ratio = UVM_CACHING_RATIO if caching_ratio is None else caching_ratio
    over_the_bus = hbm_to_ddr_mem_bw / 10
    cached = (ratio * hbm_mem_bw + (1 - ratio) * hbm_to_ddr_mem_bw) / 10
    return {
        "dense": 0.5 * hbm_mem_bw,
        "fused": hbm_mem_bw,
        "fused_triton": hbm_mem_bw,
        "fused_uvm": over_the_bus,
        "fused_uvm_caching": hbm_mem_bw if prefetch_pipeline else cached,
        "quant": hbm_mem_bw,
        "quant_uvm": over_the_bus,
        "quant_uvm_caching": cached,
        "key_value": ssd_mem_bw,
        "ssd_virtual_table": hbm_to_ddr_mem_bw,
        "dram_virtual_table": hbm_to_ddr_mem_bw,
        "dram_ssd_virtual_table": hbm_to_ddr_mem_bw,
    }.get(compute_kernel)


def tier_bw_lookup(compute_device: str, compute_kernel: str, ddr_mem_bw: float, ssd_mem_bw: float) -> float | None:
    """Bytes per millisecond at which a CPU reads rows of a kernel that TorchRec has on a GPU alone; else None."""
    if compute_device != "cpu" or compute_kernel not in TIERED_KERNELS:
        return None
    # below its device are the same memory, or files
    return ssd_mem_bw if compute_kernel == "key_value" else ddr_mem_bw
