"""
LoRA: train two thin matrices beside each big one, and leave the big ones as they are.

    y = W x   ->   y = W x + (alpha / r) B A x        W (out, in) frozen,  A (r, in),  B (out, r)

    add           put adapters (of the package `peft`) into a model
    adapters_off  the model it was before: the reference policy, at no cost in memory
    merged        a stream of weights by name, with every B A added to its W: what samplers and folders get
    save          adapters alone, as a folder that peft loads

Hu et al. 2021, arXiv 2106.09685, Sec. 4.1. B starts at 0, so training starts at the model as it was. Gradients and
AdamW's two moments exist for A and B only: a model of n parameters in bfloat16 takes 2 n bytes in place of 16 n.

Part of model.py: read that first. Run it:

    python train.py --lora-rank 16 --lora-alpha 32 --lr 1e-3
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def check_installed() -> None:
    """raises ValueError, in one sentence, where peft is missing."""
    if find_spec("peft") is None:
        raise ValueError(
            "--lora-rank needs peft: pip install -r requirements.txt, or train all weights with --lora-rank 0"
        )


def add(lm, rank: int, alpha: float, seed: int, base: str) -> None:
    """Put an adapter beside every linear layer of a frozen Hugging Face model's blocks, in place.

    base   where the model came from: peft wants it written beside saved adapters
    """
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)  # of A, which is random; B is 0
        settings = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules="all-linear", base_model_name_or_path=base
        )
        inject_adapter_in_model(settings, lm)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):  # trained, so float32 (see model.freeze)
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def scale(lm) -> float:
    """alpha / r; 0 for a model without adapters."""
    settings = getattr(lm, "peft_config", None)
    return settings["default"].lora_alpha / settings["default"].r if settings else 0.0


@contextmanager
def adapters_off(module: nn.Module):
    """Inside, a module computes what it did before it had adapters. Nothing happens to one that has none."""
    # An adapter at scale 0 adds exactly 0. peft's own switch also changes which parameters want gradients, and
    # FSDP has planned its reductions by that.
    adapted = [layer for layer in module.modules() if hasattr(layer, "lora_A")]
    scales = [layer.scaling["default"] for layer in adapted]
    try:
        for layer in adapted:
            layer.scaling["default"] = 0.0
        yield
    finally:
        for layer, before in zip(adapted, scales, strict=True):
            layer.scaling["default"] = before


@torch.no_grad()
def merged(named: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """From the parameters of a model with adapters those of one without, by their plain names, one at a time.

    named  as `named_parameters` orders them, each W before its A, and that before its B:

        q_proj.base_layer.weight, q_proj.base_layer.bias, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
        q_proj.bias, q_proj.weight                                                           are what comes out
    """
    base = a = None
    for name, tensor in named:
        plain = name.replace(".base_layer.", ".")
        if name.endswith(".base_layer.weight"):
            base = plain, tensor
        elif ".lora_A." in name:
            a = tensor
        elif ".lora_B." in name:
            plain, weight = base
            # In float32 and rounded once, where a sum in bfloat16 would lose what a small adapter says.
            delta = scale * (tensor.float() @ a.float())  # (out, in)
            yield plain, (weight.float() + delta).to(weight.dtype)
            base = a = None
        else:
            yield plain, tensor
    assert base is None, f"{base[0]} has lost its adapter"


def save(folder: Path, lm, adapters: dict[str, Tensor]) -> None:
    """Write adapters, whole tensors by their names in `lm`, as PeftModel.from_pretrained(base, folder) reads them."""
    folder.mkdir()
    # In a file the adapter has no name, and the model stands inside peft's two wrappers.
    plain = {
        "base_model.model." + name.replace(".default.", "."): adapter.contiguous()
        for name, adapter in adapters.items()
    }
    save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lm.peft_config["default"].save_pretrained(folder)
