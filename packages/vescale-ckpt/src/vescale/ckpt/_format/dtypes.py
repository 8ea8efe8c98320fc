"""The dtypes of a checkpoint: torch's names, the codes of the safetensors format and bytes per element."""

import torch

# torch name -> safetensors code (https://huggingface.co/docs/safetensors, "Format")
SAFETENSORS_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
ITEM_BYTES: dict[str, int] = {name: getattr(torch, name).itemsize for name in SAFETENSORS_CODES}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
