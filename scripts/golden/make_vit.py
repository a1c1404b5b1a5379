#!/usr/bin/env python3
"""Writes the golden data of Vision Transformers: logits, loss and gradients of transformers, in f32.

Rerun as `make_goldens.py`. It writes, replacing what is there:

    crates/model/tests/golden/vit/
        config.json, model.safetensors, preprocessor_config.json   as `save_pretrained` writes them
        golden.safetensors   patches f32 [3, 9, 48]: pixel_values cut into patches, each flattened as (channel, row,
                             column); labels i32 [3], second i32 [3], weight f32 [3]; logits f32 [3, 5]; loss f32 []
                             (mean cross-entropy) with `grad.NAME` for each parameter by its name in files; and
                             mixed_loss, mixed_grad.NAME of the mean of weight * CE(labels) + (1 - weight) * CE(second)
"""

import math
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[2] / "crates/model/tests/golden/vit"
SIZE, PATCH, CHANNELS, CLASSES, IMAGES, DIM = 12, 4, 3, 5, 3, 32


def initialise(model):
    """Wide, seeded weights, so that no gradient is near to zero."""
    g = torch.Generator().manual_seed(71)
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=g)
            if p.ndim == 2:
                p.copy_(draw * 1.2 / math.sqrt(p.shape[-1]))
            elif p.ndim == 4:
                p.copy_(draw / math.sqrt(p[0].numel()))
            elif p.ndim == 3:
                p.copy_(draw * 0.5)
            else:
                p.copy_((0.0 if name.endswith("bias") else 1.0) + draw * 0.2)


def name_in_files(name):
    """transformers 5 has short names in memory and the published ones in files."""
    name = re.sub(r"^vit\.layers\.", "vit.encoder.layer.", name)
    for short, long in [
        ("attention.q_proj", "attention.attention.query"), ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"), ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense"),
    ]:
        name = name.replace(short, long)
    return name


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    names = ["cat", "dog", "newt", "owl", "yak"]
    config = transformers.ViTConfig(
        hidden_size=DIM, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=SIZE,
        patch_size=PATCH, num_channels=CHANNELS, id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)})
    model = transformers.ViTForImageClassification._from_config(config, attn_implementation="eager")
    initialise(model)
    model.eval()
    model.save_pretrained(FOLDER)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, resample=2,
        image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.3]).save_pretrained(FOLDER)

    g = torch.Generator().manual_seed(72)
    pixels = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, generator=g)
    side = SIZE // PATCH
    patches = pixels.reshape(IMAGES, CHANNELS, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(IMAGES, side * side, CHANNELS * PATCH * PATCH).contiguous()
    labels, second = torch.tensor([3, 0, 4]), torch.tensor([1, 0, 2])
    weight = torch.tensor([0.3, 0.8, 1.0])

    out = {"patches": patches, "labels": labels.int(), "second": second.int(), "weight": weight}
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        stored = set(file.keys())

    def backward(prefix, loss):
        model.zero_grad()
        loss.backward()
        grads = {f"{prefix}grad.{name_in_files(name)}": p.grad.clone() for name, p in model.named_parameters()}
        assert {key.split("grad.")[1] for key in grads} == stored
        # A bias of keys shifts all scores of a query alike, which softmax does not see.
        quiet = [name for name, grad in grads.items() if grad.norm() < 1e-3 and not name.endswith("key.bias")]
        assert not quiet, quiet
        out.update(grads)
        out[f"{prefix}loss"] = loss.detach()

    logits = model(pixel_values=pixels).logits
    out["logits"] = logits.detach().contiguous()
    backward("", F.cross_entropy(logits, labels))
    logits = model(pixel_values=pixels).logits
    first, other = (F.cross_entropy(logits, of, reduction="none") for of in (labels, second))
    backward("mixed_", (weight * first + (1 - weight) * other).mean())
    save_file(out, FOLDER / "golden.safetensors", metadata={"transformers": transformers.__version__})
    print(f"vit: {sum(p.numel() for p in model.parameters())} parameters, loss {out['loss'].item():.6f}; "
          f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
