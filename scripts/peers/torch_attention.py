#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the shapes of `cargo run --release --example bench_attention`.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 torch_attention.py --dtype bf16 --threads 2

Queries, keys and values are [segments, heads, len, head_dim], transposed views of one fused projection's output as GPT
implementations have them; backward gives gradients of all three. Prints one JSON line per shape: median
milliseconds of forward and of forward and backward together minus forward, and TFLOP/s over the unmasked pairs.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F

# name, heads, kv_heads, head_dim, segments, len
SHAPES = [
    ("shakespeare 12x64", 4, 4, 32, 12, 64),
    ("gpt2-124m 4x512", 12, 12, 64, 4, 512),
    ("gpt2-124m 2x1024", 12, 12, 64, 2, 1024),
    ("llama-1b 1x2048", 32, 8, 64, 1, 2048),
    ("long 1x4096", 12, 12, 64, 1, 4096),
    ("long 1x16384", 4, 4, 64, 1, 16384),
    ("head 128 1x4096", 8, 2, 128, 1, 4096),
]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def median_s(run, seconds):
    run()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(shape, dtype, seconds):
    name, heads, kv_heads, d, segments, length = shape
    fused = torch.randn(segments, length, (heads + 2 * kv_heads) * d, dtype=dtype)
    q, k, v = fused.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    split = lambda x, n: x.view(segments, length, n, d).transpose(1, 2).detach().requires_grad_()
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    dout = torch.randn(segments, heads, length, d, dtype=dtype)
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def forward():
        with torch.no_grad():
            attend()

    def both():
        q.grad = k.grad = v.grad = None
        attend().backward(dout)

    forward_s = median_s(forward, seconds)
    backward_s = median_s(both, seconds) - forward_s
    pairs = heads * segments * length * (length + 1) // 2
    return {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "forward_ms": round(forward_s * 1e3, 4),
        "backward_ms": round(backward_s * 1e3, 4),
        "forward_tflops": round(4 * d * pairs / forward_s * 1e-12, 3),
        "backward_tflops": round(10 * d * pairs / backward_s * 1e-12, 3),
        "torch": torch.__version__,
        "tcmalloc": "tcmalloc" in os.environ.get("LD_PRELOAD", ""),
    }


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--dtype", choices=DTYPES, default="bf16")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    cli.add_argument("--only", default="", help="a part of the names of the shapes to run")
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    for shape in SHAPES:
        if args.only in shape[0]:
            print(json.dumps(measure(shape, DTYPES[args.dtype], args.seconds)), flush=True)


if __name__ == "__main__":
    main()
