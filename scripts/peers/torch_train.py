#!/usr/bin/env python3
"""PyTorch baseline of the whole training step: forward, backward and AdamW of GPT-2 on random tokens.

    torch_train.py --dtype bf16 --mode max-autotune        # 124M parameters, 4 x 512 tokens
    torch_train.py --shape char --batch 12 --seq 64

PyTorch is up to 1.5 times faster here with tcmalloc; preload it (LD_PRELOAD) for a fair comparison.
Prints one JSON line: tokens_per_s, step_s (median), first_step_s (from process start, imports and compilation
included), peak_rss_bytes.
"""

import argparse
import os
import statistics
import time


def process_age_s():
    """Seconds since this process was started, from /proc: importing torch is part of the wait for the first step."""
    with open("/proc/self/stat") as stat:
        start_ticks = int(stat.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as uptime:
        return float(uptime.read().split()[0]) - start_ticks / os.sysconf("SC_CLK_TCK")


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", default="gpt2-124m")
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    cli.add_argument("--mode", choices=["eager", "compile", "max-autotune"], default="eager")
    cli.add_argument("--batch", type=int, default=4)
    cli.add_argument("--seq", type=int, default=512)
    cli.add_argument("--steps", type=int, default=5, help="timed steps")
    cli.add_argument("--warmup", type=int, default=2, help="steps before them")
    cli.add_argument("--clip", type=float, default=0.0, help="clip the gradient norm to this; 0 does not clip")
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a = cli.parse_args()

    import torch
    from gpt import GPT, SHAPES, adamw, compiled, peak_rss_bytes, report

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    shape = SHAPES[a.shape]
    model = GPT(shape)
    params = sum(p.numel() for p in model.parameters())
    run = compiled(model, a.mode)
    optimizer = adamw(model, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    times, first, losses = [], None, []
    for _ in range(a.warmup + a.steps):
        start = time.perf_counter()
        ids, targets = torch.randint(0, shape.vocab, (2, a.batch, a.seq)).unbind(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(ids, targets)
        loss.backward()
        if a.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        first = first or process_age_s()

    step_s = statistics.median(times[a.warmup:])
    tokens = a.batch * a.seq
    report(
        shape=a.shape, dtype=a.dtype, mode=a.mode, threads=a.threads, params=params, tokens_per_step=tokens,
        tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""), step_s=step_s, step_s_all=times,
        tokens_per_s=tokens / step_s, tflops=shape.flops_per_token(params, a.seq) * tokens / step_s / 1e12,
        first_step_s=first, peak_rss_bytes=peak_rss_bytes(), last_loss=losses[-1])


if __name__ == "__main__":
    main()
