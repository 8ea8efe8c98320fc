"""Unmodified Hugging Face models with merged projections, constructed deferred, in interleaved tensor parallelism."""

import re

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from transformers.utils import logging

from vescale.dtensor import (
    InterleavedShard,
    Replicate,
    Shard,
    deferred_init,
    distribute_tensor,
    init_device_mesh,
    materialize,
)
from vescale_testing import keep_float64, ranks

logging.set_verbosity_error()

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {"vocab_size": 40, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 16}
GPT2 |= {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, **NONE}
PHI3 = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1, "num_attention_heads": 4}
PHI3 |= {"num_key_value_heads": 4, "max_position_embeddings": 16, **NONE}
MODELS = {
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "Phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, PHI3),
}
MERGED = {
    r"c_attn\.weight": InterleavedShard(1, 3),
    r"c_attn\.bias": InterleavedShard(0, 3),
    r"qkv_proj\.weight": InterleavedShard(0, 3),
    r"gate_up_proj\.weight": InterleavedShard(0, 2),
}
CHUNKED = {r"c_attn\.weight": Shard(1), r"c_attn\.bias|qkv_proj|gate_up_proj": Shard(0)}
OTHERS = {r"c_fc\.weight|o_proj|down_proj": Shard(1), r"c_fc\.bias|c_proj\.weight": Shard(0)}


def construct(family):
    cls, config_class, sizes = MODELS[family]
    config = config_class(**sizes)
    config._attn_implementation = "eager"
    return cls(config).train()


def one_pass(model, ids):
    with keep_float64():
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
    return output


def sharded_pass(family, mesh, merged):
    torch.manual_seed(0)
    with keep_float64():
        model = deferred_init(construct, family)

        def plan(name, _):
            found = [p for pattern, p in {**merged, **OTHERS}.items() if re.search(pattern, name)]
            return found[:1] or [Replicate()]

        materialize(model, mesh, plan)
    ids = distribute_tensor(tokens(), mesh, [Replicate()])
    with implicit_replication(), CommDebugMode() as comm:
        output = one_pass(model, ids)
    return model, output, comm.get_total_counts()


def tokens():
    return torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", MODELS)
def test_losses_logits_and_gradients(family):
    @ranks(2)
    def check():
        torch.manual_seed(0)
        with keep_float64():
            plain = construct(family)
        expected = one_pass(plain, tokens())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, output, num_merged = sharded_pass(family, mesh, MERGED)
        torch.testing.assert_close(output.loss.full_tensor(), expected.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(output.logits.full_tensor(), expected.logits, rtol=1e-11, atol=1e-11)
        for (name, param), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            assert torch.equal(sharded.detach().full_tensor(), param.detach()), name
            gradient = sharded.grad.full_tensor()
            torch.testing.assert_close(gradient, param.grad, rtol=1e-9, atol=1e-11, msg=name)
        _, _, num_chunked = sharded_pass(family, mesh, CHUNKED)
        assert num_merged < num_chunked, "interleaving saves the gathers around each split"

    check()
