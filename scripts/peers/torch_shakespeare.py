#!/usr/bin/env python3
"""PyTorch baseline of the small character-level recipe (nanoGPT's, for a CPU), on any text file.

    torch_shakespeare.py input.txt

4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps; AdamW with betas 0.9 and 0.99, weight decay 0.1,
clipping at 1, learning rate 1e-3 after 100 steps of warmup, cosine to 1e-4; no dropout; f32; the last tenth of the
text is the validation split. Prints one JSON line: step_s (median), stepping_s, total_s, and val_loss in nats per
character over the whole validation split, in windows of the context that do not overlap.
"""

import time

started = time.perf_counter()

import numpy as np
import torch
from gpt import GPT, Shape, adamw, compiled, peak_rss_bytes, report
from recipe import Recipe, arguments

RECIPE = Recipe(context=64, batch=12, warmup=100)


def split(path):
    """The characters as numbers: (training part, validation part, size of the vocabulary)."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.from_numpy(np.fromiter((alphabet[c] for c in text), dtype=np.int64, count=len(text)))
    cut = int(len(ids) * 0.9)
    return ids[:cut], ids[cut:], len(alphabet)


def main():
    a = arguments(__doc__, steps=2000)
    train, validation, vocab = split(a.text)
    model = GPT(Shape(layers=4, heads=4, dim=128, vocab=vocab, context=RECIPE.context, bias=False, gelu="none"))
    optimizer = adamw(model, lr=RECIPE.rate, betas=(0.9, 0.99), weight_decay=0.1)
    trained = RECIPE.train(compiled(model, a.mode), optimizer, train, a)
    val_loss = RECIPE.whole_split_loss(model, validation, rows=256)
    report(**trained, val_loss=val_loss, total_s=time.perf_counter() - started, peak_rss_bytes=peak_rss_bytes())


if __name__ == "__main__":
    main()
