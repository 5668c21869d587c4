# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small language models of Transformers, batches for them, and the results of one process, document by document."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

WORDS = 96

# Twelve architectures: 9 q heads over 3 kv heads, two or more layers, windows shorter than documents.
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", {"sliding_window": 9, **EXPERTS}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": KINDS}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"sliding_window": 11, "original_max_position_embeddings": 256}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 6, "layer_types": KINDS, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "layer_types": KINDS, "query_pre_attn_scalar": 8}),
    "cohere": ("cohere", {}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 6, "layer_types": KINDS, **EXPERTS}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 3, "rope_theta": 100000.0}),
}
# Models of masked words: one has windows on both sides, the other counts positions from padding_idx + 1.
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("modernbert", {"local_attention": 10, "layer_types": KINDS, "head_dim": 4}),
    "roberta": ("roberta", {"pad_token_id": 1, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}),
}


def build(name: str, **more: Any) -> Any:
    """The same model on every process."""
    kind, options = (MODELS | MASKED)[name]
    auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **options, **more})
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, biases and sinks: not all equal
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    return model.train()


def checkpointing(model: Any, reentrant: bool) -> None:
    """Gradient checkpointing, under its newer name or its older one (Transformers 5.20)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def batch(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """A pack, with some prompts without labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (1, sum(lengths)), generator=draw)
    labels = ids.clone()
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    for start in starts:
        labels[0, start : start + 2] = -100
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "labels": labels}


def rows(pack: dict[str, torch.Tensor], pad: int = 0) -> dict[str, torch.Tensor]:
    """The documents of a pack as rows with padding, at the right or at the left."""
    split = documents(pack)
    width = max(ids.shape[1] for ids, _ in split)
    made = {
        name: torch.full((len(split), width), fill)
        for name, fill in (("input_ids", pad), ("attention_mask", 0), ("labels", -100))
    }
    for row, (ids, labels) in enumerate(split):
        where = slice(None, ids.shape[1]) if row % 2 else slice(width - ids.shape[1], None)
        made["input_ids"][row, where], made["attention_mask"][row, where], made["labels"][row, where] = (
            ids[0],
            1,
            labels[0],
        )
    return made


def documents(pack: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    starts = [*(pack["position_ids"][0] == 0).nonzero().flatten().tolist(), pack["input_ids"].shape[1]]
    return [(pack["input_ids"][:, a:b], pack["labels"][:, a:b]) for a, b in zip(starts, starts[1:])]


def part(
    model: Any, pack: dict[str, torch.Tensor], masked: bool = False, types: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """The summed loss of a pack, by one process, document by document, with types of its tokens; of a model of masked words, the model's own
    loss."""
    total, at = torch.zeros(()), 0
    for ids, labels in documents(pack):
        mine = {name: every[:, at : at + ids.shape[1]] for name, every in (types or {}).items()}
        at += ids.shape[1]
        if masked:
            n = int((labels != -100).sum())
            total = total + (model(input_ids=ids, labels=labels).loss * n if n else 0)
            continue
        logits = model(input_ids=ids, use_cache=False, **mine).logits[0].float()
        total = total + F.cross_entropy(logits[:-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    return total


def count(pack: dict[str, torch.Tensor], masked: bool = False) -> int:
    return sum(int((labels[0, 0 if masked else 1 :] != -100).sum()) for _, labels in documents(pack))


def of_next(pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The pack for a model that does not shift its labels: those of the next tokens, as `shift_labels`."""
    end = torch.full((1, 1), -100)
    labels = torch.cat([torch.cat([of[:, 1:], end], dim=1) for _, of in documents(pack)], dim=1)
    return {**{name: value for name, value in pack.items() if name != "labels"}, "shift_labels": labels}


def alone(name: str, pack: dict[str, torch.Tensor], **more: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one process."""
    model = build(name, **more)
    loss = part(model, pack) / count(pack)
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten().double() for p in model.parameters()]
    )


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative distance (L2) of a to b."""
    return float((a - b).norm() / b.norm())


def tokenizer() -> Any:
    """A tokenizer of words w0, w1, ..., made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{n}": n for n in range(3, WORDS)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
