#!/usr/bin/env python3
"""PyTorch baseline of a small Vision Transformer on a folder of digits (`digits.py` makes it).

    torch_vit.py FOLDER [SEED ...]

4 layers, 4 heads, width 64, patches of 2 x 2 pixels of images of 8 x 8; 600 steps of 64 images, no augmentation; AdamW
with betas 0.9 and 0.95, weight decay 0.05 on matrices and positions, clipping at 1, learning rate 1e-3 after 12 steps of
warmup, cosine to 1e-4; f32. Prints one JSON line for each seed: accuracy and loss on the validation images, and the
median time of a step.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

STEPS, BATCH, WARMUP, LR_MAX, LR_MIN, DECAY = 600, 64, 12, 1e-3, 1e-4, 0.05


def load(folder):
    images, classes = [], []
    for number, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for file in sorted((folder / name).iterdir()):
            pixels = np.asarray(Image.open(file).convert("RGB"), dtype=np.float32) / 255
            images.append((pixels.transpose(2, 0, 1) - 0.5) / 0.5)
            classes.append(number)
    return torch.from_numpy(np.stack(images)), torch.tensor(classes)


def learning_rate(step):
    if step < WARMUP:
        return LR_MAX * (step + 1) / WARMUP
    progress = (step + 1 - WARMUP) / (STEPS - WARMUP)
    return LR_MIN + 0.5 * (1 + math.cos(math.pi * progress)) * (LR_MAX - LR_MIN)


def main():
    folder = Path(sys.argv[1])
    (images, classes), (held_images, held_classes) = load(folder / "train"), load(folder / "validation")
    for seed in [int(seed) for seed in sys.argv[2:]] or [1, 2, 3]:
        torch.manual_seed(seed)
        config = ViTConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, image_size=8,
                           patch_size=2, num_channels=3, num_labels=10)
        model = ViTForImageClassification(config)
        decays = lambda name, p: (p.ndim >= 2 and "cls_token" not in name)
        named = list(model.named_parameters())
        groups = [{"params": [p for n, p in named if decays(n, p)], "weight_decay": DECAY},
                  {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR_MAX, betas=(0.9, 0.95), eps=1e-8)
        times, order = [], torch.empty(0, dtype=torch.long)
        for step in range(STEPS):
            if len(order) < BATCH:
                order = torch.cat([order, torch.randperm(len(images))])
            rows, order = order[:BATCH], order[BATCH:]
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss = F.cross_entropy(model(pixel_values=images[rows]).logits, classes[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            times.append(time.perf_counter() - began)
        model.eval()
        with torch.no_grad():
            logits = model(pixel_values=held_images).logits
        print(json.dumps({
            "seed": seed,
            "top1": (logits.argmax(1) == held_classes).float().mean().item(),
            "loss": F.cross_entropy(logits, held_classes).item(),
            "train_loss": loss.item(),
            "step_s": statistics.median(times),
        }))


if __name__ == "__main__":
    main()
