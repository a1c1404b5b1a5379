"""Times in PyTorch the matrix products that `bench_gemm` times: same layers, forms, types and threads.

Prints a JSON list of {layer, tokens, form, dtype, seconds}: the median of at least three runs each.
The weight gradient is what autograd does: the result has the operands' type.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 python torch_gemm.py --dtype bf16 --tokens 1024
"""

import argparse
import json
import statistics
import time

import torch

LAYERS = [
    ("gpt2 qkv", 768, 2304),
    ("gpt2 out", 768, 768),
    ("gpt2 up", 768, 3072),
    ("gpt2 down", 3072, 768),
    ("gpt2 head", 768, 50304),
    ("llama qkv", 2048, 3072),
    ("llama out", 2048, 2048),
    ("llama gate-up", 2048, 16384),
    ("llama down", 8192, 2048),
]


def median_seconds(body, seconds):
    body()
    start, times = time.perf_counter(), []
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        body()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--layer", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[args.dtype]
    results = []
    for name, inputs, outputs in LAYERS:
        if args.layer not in name:
            continue
        x = torch.rand(args.tokens, inputs).sub(0.5).to(dtype)
        w = torch.rand(outputs, inputs).sub(0.5).to(dtype)
        dy = torch.rand(args.tokens, outputs).sub(0.5).to(dtype)
        forms = {
            "forward": lambda: torch.nn.functional.linear(x, w),
            "input-gradient": lambda: dy @ w,
            "weight-gradient": lambda: dy.t() @ x,
        }
        with torch.no_grad():
            for form, body in forms.items():
                seconds = median_seconds(body, args.seconds)
                results.append(
                    {"layer": name, "tokens": args.tokens, "form": form, "dtype": args.dtype, "seconds": seconds}
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
