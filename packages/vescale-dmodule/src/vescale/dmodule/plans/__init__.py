"""Ready plans for Hugging Face model families."""

from ._families import FAMILIES, plan_for
from .gpt2 import gpt2
from .llama import llama
from .mixtral import mixtral

__all__ = ["FAMILIES", "gpt2", "llama", "mixtral", "plan_for"]
