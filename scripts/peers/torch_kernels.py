#!/usr/bin/env python3
"""PyTorch baseline of single kernels: runs the cases that `trainyard bench kernels --json` printed.

    trainyard bench kernels --json > ours.json; torch_kernels.py ours.json

A `product` belongs to a linear layer y[tokens, outputs] = x[tokens, inputs] w[outputs, inputs]^T, in one of three forms:
forward, input-gradient (dy w) and weight-gradient (dy^T x; PyTorch's result stays in the case's type, ours
accumulates into f32). `attention` is causal scaled-dot-product attention, forward or backward. `flops` comes with the case, so that both
sides divide the same number. Prints one JSON line: `cases` with `name`, `seconds` (median) and `tflops`.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F
from gpt import report

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def product(case):
    tokens, inputs, outputs, dtype = case["tokens"], case["inputs"], case["outputs"], DTYPES[case["dtype"]]
    x, dy = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    w = torch.randn(outputs, inputs).to(dtype)
    return {
        "forward": lambda: F.linear(x, w),
        "input-gradient": lambda: dy @ w,
        "weight-gradient": lambda: dy.t() @ x,
    }[case["form"]]


def attention(case):
    b, t, d, dtype = case["batch"], case["seq"], case["head_dim"], DTYPES[case["dtype"]]
    backward = case["form"] == "backward"
    q, k, v = (torch.randn(b, heads, t, d).to(dtype).requires_grad_(backward)
               for heads in (case["heads"], case["kv_heads"], case["kv_heads"]))
    grouped = case["heads"] != case["kv_heads"]
    def run():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if not backward:
        return run
    y = run()
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)


def median_seconds(run, budget_s):
    """Runs for about `budget_s` after a warm-up, at least three times."""
    run()
    times, started = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - started < budget_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("ours", help="file with the JSON object that ours printed")
    cli.add_argument("--seconds", type=float, default=0.2, help="time for each case")
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a = cli.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    with open(a.ours, encoding="utf-8") as file:
        wanted = json.load(file)["cases"]
    cases = []
    for case in wanted:
        seconds = median_seconds({"product": product, "attention": attention}[case["kind"]](case), a.seconds)
        cases.append({"name": case["name"], "seconds": seconds, "tflops": case["flops"] / seconds / 1e12})
    report(threads=a.threads, tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""), cases=cases)


if __name__ == "__main__":
    main()
