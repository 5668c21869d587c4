# SPDX-License-Identifier: MIT OR Apache-2.0
"""Denoises with a small random Flux of Diffusers, on one process or over several, and shows that the results are the same.

    pip install ./python './python-hf[diffusers]' transformers accelerate
    torchrun --nproc-per-node 3 examples/python/diffusion.py

Each rank has a third of 187 image tokens and 17 words, and 3 heads. Rank 0 prints how far the result is from that of the model alone,
which each rank computes too. With a real model the pipeline does all this: `ContextParallel(pipe.transformer)`, then `pipe(…)` with
one seed on all ranks.
"""

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from cpattn_hf.diffusers import ContextParallel

HEIGHT, WIDTH, WORDS, STEPS = 11, 17, 17, 4


def denoise(model, inputs, latents):
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    for time in scheduler.timesteps:
        found = model(hidden_states=latents, timestep=time[None] / 1000, **inputs).sample
        latents = scheduler.step(found, time, latents).prev_sample
    return latents


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)  # the same weights and inputs on all ranks
    model = FluxTransformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(HEIGHT)), torch.arange(float(WIDTH)))
    inputs = {
        "encoder_hidden_states": torch.randn(1, WORDS, 32), "pooled_projections": torch.randn(1, 32), "img_ids": places,
        "txt_ids": torch.zeros(WORDS, 3),
    }  # fmt: skip
    noise = torch.randn(1, HEIGHT * WIDTH, 8)
    with torch.no_grad():
        alone = denoise(model, inputs, noise)
        cp = ContextParallel(model)
        found = denoise(model, inputs, noise)
    distance = ((found - alone).abs().max() / alone.square().mean().sqrt()).item()
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {STEPS} steps: the result of one process, at most {distance:.1e} of its root mean square apart"
        )
    assert distance < 1e-5
    dist.barrier()
    cp.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
