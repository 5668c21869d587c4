# SPDX-License-Identifier: MIT OR Apache-2.0
"""A hybrid model, Qwen3-Next, on several processes: with the losses and gradients of one.

    pip install ./python './python-hf[transformers]'
    torchrun --nproc-per-node 3 examples/python/qwen3_next.py

Three of its four layers have a convolution and the gated delta rule, which mix the tokens of whole documents. What such a layer
needs is in `gated_delta_net`: it brings its projections to heads, mixes document by document with its own heads, and brings the
result back to tokens. Heads divide nothing: 4 heads of v and 2 of q and k run on 3 processes. One process runs the documents one
by one with Transformers' own layers. Nothing is downloaded: the model is made from a config.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from cpattn_hf.transformers import ContextParallel


# >>> context parallelism
def gated_delta_net(layer, documents, hidden_states, **_):
    of = {"heads": layer.num_v_heads, "kv_heads": layer.num_k_heads}
    own, own_k = documents.own_heads("q", **of), documents.own_heads("k", **of)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    )
    qk = documents.to_heads(torch.cat([q[0], k[0]], -1), "k", **of)
    v, b, a = documents.to_heads(torch.cat([v[0], b[0, ..., None], a[0, ..., None]], -1), **of).split(
        [layer.head_v_dim, 1, 1], -1
    )
    weights = layer.conv1d.weight[:, 0].split([layer.key_dim, layer.key_dim, layer.value_dim])
    wq, wk, wv = (
        w.unflatten(0, (-1, dim)) for w, dim in zip(weights, [layer.head_k_dim, layer.head_k_dim, layer.head_v_dim])
    )
    weight = torch.cat([torch.cat([wq, wk], 1)[own_k].flatten(0, 1), wv[own].flatten(0, 1)])
    g = -layer.A_log[own].float().exp() * F.softplus(a[..., 0].float() + layer.dt_bias[own])
    of_v = (
        torch.arange(own.start, own.stop) * layer.num_k_heads // layer.num_v_heads - own_k.start
    )  # the q and k heads of v's
    out = []
    for begin, end in zip(documents.cu_seqlens, documents.cu_seqlens[1:]):
        mixed = torch.cat([qk[begin:end].flatten(1), v[begin:end].flatten(1)], 1)
        mixed = causal_conv1d_fn(mixed.T[None], weight, activation=layer.activation).transpose(1, 2)
        qk_, v_ = (
            x.unflatten(2, (-1, dim))
            for x, dim in zip(mixed.split([qk[0].numel(), v[0].numel()], 2), [qk.shape[2], v.shape[2]])
        )
        q, k = qk_[:, :, of_v].chunk(2, -1)
        out += torch_chunk_gated_delta_rule(
            q, k, v_, g=g[None, begin:end], beta=b[None, begin:end, :, 0].sigmoid(), use_qk_l2norm_in_kernel=True
        )[0]
    o = layer.norm(documents.to_tokens(torch.cat(out), **of).flatten(0, 1), z[0].flatten(0, 1))
    return layer.out_proj(o.view(1, -1, layer.value_dim))


# <<<


def build():
    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=36, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()


def batch(lengths):
    ids = torch.randint(96, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "labels": ids}


def alone(lengths):
    """Loss and gradients of one process."""
    model, total = build(), 0.0
    for ids in batch(lengths)["input_ids"].split(lengths, 1):
        total = total + F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    loss = total / (sum(lengths) - len(lengths))
    loss.backward()
    return loss.item(), gradients(model)


def together(lengths, **options):
    """The same of all processes."""
    model = build()
    cp = ContextParallel(model, gradients="sum", mixers={Qwen3NextGatedDeltaNet: gated_delta_net}, **options)
    loss = model(**batch(lengths)).loss
    loss.backward()
    total = gradients(model)
    dist.all_reduce(total)
    cp.close()
    return loss.item(), total


def gradients(model):
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def main():
    dist.init_process_group("gloo")
    lengths = [70, 1, 130, 33]
    (one, expected), (all_, total) = alone(lengths), together(lengths)
    if dist.get_rank() == 0:
        print(
            f"loss of one process {one:.7f}, of {dist.get_world_size()} {all_:.7f}; gradients apart {(total - expected).norm() / expected.norm():.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
