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
# Complex numbers are stored as their real and imaginary parts, in one more dim, as by ``torch.view_as_real``.
_PARTS = {"complex64": "float32", "complex128": "float64"}
ITEM_BYTES: dict[str, int] = {name: getattr(torch, name).itemsize for name in (*SAFETENSORS_CODES, *_PARTS)}


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the code of the safetensors format and the shape by which a tensor is stored."""
    return (SAFETENSORS_CODES[_PARTS[dtype]], (*shape, 2)) if dtype in _PARTS else (SAFETENSORS_CODES[dtype], shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
