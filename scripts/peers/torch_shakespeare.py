#!/usr/bin/env python3
"""PyTorch baseline of the small character-level recipe (nanoGPT's, for a CPU), on any text file.

    torch_shakespeare.py input.txt

4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps; AdamW with betas 0.9 and 0.99, weight decay 0.1,
clipping at 1, learning rate 1e-3 after 100 steps of warmup, cosine to 1e-4; no dropout; f32; the last tenth of the
text is the validation split. Prints one JSON line: step_s (median), stepping_s, total_s, and val_loss in nats per
character over the whole validation split, in windows of the context that do not overlap.
"""

import argparse
import math
import os
import statistics
import time

started = time.perf_counter()

import numpy as np
import torch
from gpt import GPT, Shape, adamw, compiled, peak_rss_bytes, report

CONTEXT, BATCH, WARMUP, LR_MAX, LR_MIN = 64, 12, 100, 1e-3, 1e-4


def learning_rate(step, steps):
    if step < WARMUP:
        return LR_MAX * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / (steps - WARMUP)
    return LR_MIN + 0.5 * (1 + math.cos(math.pi * progress)) * (LR_MAX - LR_MIN)


def split(path):
    """The characters as numbers: (training part, validation part, size of the vocabulary)."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.from_numpy(np.fromiter((alphabet[c] for c in text), dtype=np.int64, count=len(text)))
    cut = int(len(ids) * 0.9)
    return ids[:cut], ids[cut:], len(alphabet)


def batch(ids, generator):
    starts = torch.randint(len(ids) - CONTEXT, (BATCH, 1), generator=generator)
    window = ids[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def whole_split_loss(model, ids):
    windows = (len(ids) - 1) // CONTEXT
    inputs = ids[: windows * CONTEXT].view(windows, CONTEXT)
    targets = ids[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    total = sum(model(x, y).item() * x.numel() for x, y in zip(inputs.split(256), targets.split(256)))
    return total / (windows * CONTEXT)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("text")
    cli.add_argument("--steps", type=int, default=2000)
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    cli.add_argument("--mode", choices=["eager", "compile", "max-autotune"], default="eager")
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    cli.add_argument("--seed", type=int, default=1337)
    a = cli.parse_args()

    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    generator = torch.Generator().manual_seed(a.seed)
    train, validation, vocab = split(a.text)
    model = GPT(Shape(layers=4, heads=4, dim=128, vocab=vocab, context=CONTEXT, bias=False, gelu="none"))
    run = compiled(model, a.mode)
    optimizer = adamw(model, lr=LR_MAX, betas=(0.9, 0.99), weight_decay=0.1)

    times = []
    stepping = time.perf_counter()
    for step in range(a.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, a.steps)
        inputs, targets = batch(train, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
    stepping_s = time.perf_counter() - stepping

    report(
        steps=a.steps, dtype=a.dtype, mode=a.mode, threads=a.threads, step_s=statistics.median(times[len(times) // 10 :]),
        stepping_s=stepping_s, val_loss=whole_split_loss(model, validation), train_loss=loss.item(),
        tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""), total_s=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes())


if __name__ == "__main__":
    main()
