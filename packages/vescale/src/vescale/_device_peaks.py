"""Peak rates of devices for model FLOPs utilization, by the name that torch gives them.

The numbers are the makers' for dense matrix products of bfloat16 (float16 where a device has no bfloat16), without
sparsity, which doubles them in most data sheets. A run in float32 or TF32 has a lower peak, one in float8 a higher one:
pass `peak_flops_per_device` for these. Names are searched in order, the longer ones first.

| device | dense FLOP/s | source |
|---|---|---|
| B200 | 2.25e15 | NVIDIA Blackwell architecture technical brief, table of HGX B200 |
| GB200 | 2.5e15 | the same, table of GB200 |
| H200, H100, H800 | 989.4e12 | NVIDIA H100 and H200 tensor core GPU data sheets, SXM |
| H100 NVL | 835.5e12 | NVIDIA H100 tensor core GPU data sheet |
| H100 PCIe | 756e12 | NVIDIA H100 tensor core GPU architecture, table 2 |
| H20 | 148e12 | NVIDIA H20 data sheet |
| A100, A800 | 312e12 | NVIDIA A100 tensor core GPU data sheet |
| L40S | 362e12 | NVIDIA L40S data sheet |
| A40 | 149.7e12 | NVIDIA A40 data sheet |
| A30 | 165e12 | NVIDIA A30 data sheet |
| A10 | 125e12 | NVIDIA A10 data sheet |
| L4 | 121e12 | NVIDIA L4 data sheet |
| V100-SXM2 | 125e12 | NVIDIA V100 data sheet (float16) |
| V100-PCIE | 112e12 | the same |
| T4 | 65e12 | NVIDIA T4 data sheet (float16) |
| MI355X | 2.5e15 | AMD Instinct MI355X data sheet |
| MI300X, MI325X | 1307.4e12 | AMD Instinct MI300X and MI325X data sheets |
| MI250X | 383e12 | AMD Instinct MI250X data sheet |
"""

import re

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L4": 121e12,
    "V100-SXM2": 125e12,
    "V100-PCIE": 112e12,
    "T4": 65e12,
    "MI355X": 2.5e15,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}


def peak_flops(name: str) -> float | None:
    """Return the peak of a device with this name, or None if it is in no row of the table.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("NVIDIA A10G")
        (989400000000000.0, 756000000000000.0, None)
    """
    for device, flops in PEAK_FLOPS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(device)}(?![A-Za-z0-9])", name):
            return flops
    return None
