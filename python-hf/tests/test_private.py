# SPDX-License-Identifier: MIT OR Apache-2.0
"""The private names of other packages that `cpattn` uses exist in the installed versions.

The test finds the names in the sources. Each one has a row here, which says where the name must be; a name without a row fails.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import unittest
from collections.abc import Iterator
from pathlib import Path

import cpattn
import cpattn_hf

# By the names: objects of which each must have the name, as module:attribute.
HAS = {
    "_C": ["torch:"],
    "_version": ["torch:Tensor"],
    "_register_atexit": ["threading:"],
    "_current_graph_task_id": ["torch._C:"],
    "_get_default_store": ["torch.distributed.distributed_c10d:"],
    "_get_default_group": ["torch.distributed.distributed_c10d:"],
    "_get_backend": ["torch.distributed:ProcessGroup"],
    "_get_fsdp_state": ["torch.distributed.fsdp:FSDPModule"],
    # Of `cpattn.torch.kernels`.
    "_scaled_dot_product_flash_attention_for_cpu": ["torch:ops.aten"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": ["torch:ops.aten"],
    "_flash_attention_forward": ["torch:ops.aten"],
    "_flash_attention_backward": ["torch:ops.aten"],
    "_cudnn_attention_forward": ["torch:ops.aten"],
    "_cudnn_attention_backward": ["torch:ops.aten"],
    "_efficient_attention_forward": ["torch:ops.aten"],
    "_efficient_attention_backward": ["torch:ops.aten"],
    "_lazy_imports": ["transformers.modeling_flash_attention_utils:"],
    "_attn": [
        "transformers.models.gptj.modeling_gptj:GPTJAttention",
        "transformers.models.codegen.modeling_codegen:CodeGenAttention",
        "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention",
    ],
    "_split_heads": ["transformers.models.falcon.modeling_falcon:FalconAttention"],
    "_reshape": ["transformers.models.bloom.modeling_bloom:BloomAttention"],
    "_short_conv": ["transformers.models.qwen4_exp.modeling_qwen4_exp:Qwen4ExpTextPLELayer"],
    "_rnn_scan": ["transformers.models.recurrent_gemma.modeling_recurrent_gemma:RecurrentGemmaRglru"],
    "_attn_implementation": ["transformers:PreTrainedConfig"],
    "_build_accelerator_args": ["transformers:Trainer"],
    "_precompute_ref_logps": ["trl:DPOTrainer"],
    "_prepare_cp": ["accelerate:Accelerator"],
    "_set_sync_gradients": ["accelerate.state:GradientState"],
    "_generate": ["trl:GRPOTrainer", "trl:RLOOTrainer"],
    "_generate_and_score_completions": ["trl:GRPOTrainer", "trl:RLOOTrainer"],
    "_get_per_token_logps_and_entropies": ["trl:GRPOTrainer", "trl:RLOOTrainer"],
    "_init_vllm": ["trl.generation.vllm_generation:VLLMGeneration"],
    "_iter_named_params": ["trl.generation.vllm_generation:VLLMGeneration"],
}
# By the names that instances get: a module whose source must have the name.
WRITTEN = {
    "_state_ctx": "torch.distributed.fsdp._fully_shard._fsdp_state",
    "_training_state": "torch.distributed.fsdp._fully_shard._fsdp_state",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_state",
    "_attn_implementation_internal": "transformers.configuration_utils",
    "_tp_size": "transformers.modeling_utils",
    "_gradient_checkpointing_func": "transformers.modeling_layers",
    "_hf_hook": "accelerate.hooks",
    "_dataloaders": "accelerate.accelerator",
    "_is_accelerate_prepared": "accelerate.accelerator",
    "_fsdp_flattened": "torch.distributed.fsdp._common_utils",
    "_is_flat_param": "torch.distributed.fsdp._flat_param",
    "_forward_pre_hooks": "torch.nn.modules.module",
    "_forward_pre_hooks_with_kwargs": "torch.nn.modules.module",
}
# Where only builds for CUDA have the class.
OF_CUDA = {name: ["torch.distributed:ProcessGroupNCCL"] for name in ("_comm_ptr", "_get_sequence_number_for_group")}
# Of DeepSpeed, where it is installed.
OF_DEEPSPEED = {
    "_get_sequence_parallel_world_size": ["deepspeed.utils.groups:"],
    "_get_model_parallel_world_size": ["deepspeed.utils.groups:"],
    "_TENSOR_MODEL_PARALLEL_GROUP": ["deepspeed.utils.groups:"],
    "_EXPERT_PARALLEL_GROUP": ["deepspeed.utils.groups:"],
}
# Of Diffusers, where it is installed.
OF_DIFFUSERS = {
    "_backends": ["diffusers.models.attention_dispatch:_AttentionBackendRegistry"],
    "_supported_arg_names": ["diffusers.models.attention_dispatch:_AttentionBackendRegistry"],
    "_cp_plan": ["diffusers:ModelMixin"],
    "_parallel_config": [
        "diffusers:ModelMixin",
        *(
            f"diffusers.models.transformers.transformer_{name}"
            for name in (
                "flux:FluxAttnProcessor", "flux:FluxIPAdapterAttnProcessor", "flux2:Flux2AttnProcessor", "flux2:Flux2ParallelSelfAttnProcessor",
                "qwenimage:QwenDoubleStreamAttnProcessor2_0", "wan:WanAttnProcessor", "ltx:LTXVideoAttnProcessor",
                "ltx2:LTX2AudioVideoAttnProcessor", "ltx2:LTX2PerturbedAttnProcessor", "helios:HeliosAttnProcessor",
                "minimax_h3:MiniMaxH3AttnProcessor", "chronoedit:WanAttnProcessor",
            )
        ),
    ],
    "_attention_backend": ["diffusers.models.transformers.transformer_flux:FluxAttnProcessor"],
}  # fmt: skip
INSIDE_DIFFUSERS = [
    "diffusers.models.attention_dispatch:AttentionBackendName",
    "diffusers.models._modeling_parallel:ContextParallelInput",
    "diffusers.models._modeling_parallel:ContextParallelOutput",
]
WRITTEN_OF_DIFFUSERS = {"_diffusers_hook": "diffusers.hooks.hooks"}
WRITTEN_OF_DEEPSPEED = {"_z3_leaf": "deepspeed.utils.z3_leaf_module", "_z3_optimizer": "deepspeed.runtime.zero.stage3"}
# Names that only some versions have, for which the code has another way.
EITHER = {"_fsdp_param_groups"}
MODULES = ["torch._library.effects", "torch.utils._python_dispatch", "torch._inductor.virtualized"]
# Public names inside modules that the documentation of Transformers and TRL does not list.
INSIDE = [
    "transformers.models.bloom.modeling_bloom:build_alibi_tensor",
    "transformers.models.bloom.modeling_bloom:dropout_add",
    "transformers.models.falcon.modeling_falcon:apply_rotary_pos_emb",
    "transformers.models.qwen3_next.modeling_qwen3_next:causal_conv1d_fn",
    "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule",
    "transformers.models.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention",
    "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan",
    "transformers.models.mamba.modeling_mamba:mamba_selective_scan",
    "transformers.masking_utils:AttentionMaskInterface",
    "accelerate.data_loader:prepare_data_loader",
    "accelerate.utils:recursively_apply",
    "accelerate.utils:send_to_device",
    "accelerate.big_modeling:_attach_context_parallel_hooks",
    "accelerate.utils:gather_object",
    "accelerate.utils:broadcast_object_list",
    "trl.trainer.grpo_trainer:VLLMGeneration",
    "trl.trainer.rloo_trainer:VLLMGeneration",
    "trl.generation.vllm_generation:gather_object",
    "trl.generation.vllm_generation:broadcast_object_list",
]
# Documented names of Python: of enums, named tuples, ctypes and os.
PYTHON = {
    "_name_",
    "_value_",
    "_fields",
    "_field_defaults",
    "_replace",
    "_asdict",
    "_type_",
    "_fields_",
    "_name",
    "_exit",
    "_is_protocol",
}


def used() -> Iterator[tuple[str, str]]:
    """The private names that the sources read or define in classes, with their places, without those that cpattn itself makes."""
    own, read = set(), []
    for path in (path for package in (cpattn, cpattn_hf) for path in Path(package.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute):
                if (
                    isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id in ("self", "cls")
                ):
                    own.add(node.attr)
                else:
                    read.append((node.attr, place))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
            ):
                read.append((str(node.args[1].value), place))
    for name, place in read:
        if name.startswith("_") and not name.startswith("__") and name not in own:
            yield name, place


def missing(name: str, where: str) -> str | None:
    """What is not there."""
    module, _, inside = where.partition(":")
    found = importlib.import_module(module)
    if name == "_attn" and hasattr(found, "ALL_ATTENTION_FUNCTIONS"):
        return None  # from Transformers 5.24 on GPT-J and CodeGen need no adapter
    for part in inside.split(".") if inside else ():
        if not hasattr(found, part):
            return f"{module} has no {part}"
        found = getattr(found, part)
    return None if not name or hasattr(found, name) else f"{where} has no {name}"


class Private(unittest.TestCase):
    def test_each_name_has_a_row(self) -> None:
        known = {
            *HAS,
            *WRITTEN,
            *OF_CUDA,
            *OF_DEEPSPEED,
            *WRITTEN_OF_DEEPSPEED,
            *OF_DIFFUSERS,
            *WRITTEN_OF_DIFFUSERS,
            *EITHER,
            *PYTHON,
        }
        self.assertEqual(
            [f"{name} at {place}" for name, place in used() if name not in known and not name.startswith("_cpattn")], []
        )

    def test_each_name_is_there(self) -> None:
        try:
            import accelerate  # noqa: F401
            import transformers
            import trl  # noqa: F401
        except ImportError as error:
            self.skipTest(str(error))
        import torch.distributed as dist

        rows = [(name, where) for name, every in HAS.items() for where in every] + [
            ("", where) for where in [*MODULES, *INSIDE]
        ]
        if hasattr(dist, "ProcessGroupNCCL"):
            rows += [(name, where) for name, every in OF_CUDA.items() for where in every]
        written = WRITTEN
        if importlib.util.find_spec("deepspeed"):
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            rows += [(name, where) for name, every in OF_DEEPSPEED.items() for where in every]
            written = WRITTEN | WRITTEN_OF_DEEPSPEED
        if importlib.util.find_spec("diffusers"):
            rows += [(name, where) for name, every in OF_DIFFUSERS.items() for where in every] + [
                ("", where) for where in INSIDE_DIFFUSERS
            ]
            written = written | WRITTEN_OF_DIFFUSERS
        gone = [said for name, where in rows if (said := missing(name, where))]
        for name, module in written.items():
            if name not in inspect.getsource(importlib.import_module(module)):
                gone.append(f"the source of {module} has no {name}")
        self.assertEqual(gone, [], f"Transformers {transformers.__version__}")


if __name__ == "__main__":
    unittest.main()
