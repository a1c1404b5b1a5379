#!/usr/bin/env python3
"""PyTorch baseline on a GPU: single kernels, and whole training steps. Run by `cargo xtask gpu`, in turn with ours.

    trainyard bench gpu --json > ours.json; torch_gpu.py kernels ours.json
    torch_gpu.py train --preset gpt2-124m --rows 64 --length 1024 --vocab-size 50304

`kernels` runs the cases that ours printed: products in three forms (PyTorch's weight gradient stays in the case's type, ours accumulates into f32), causal
attention by the fastest of PyTorch's backends for each shape, and streaming kernels, compiled. `flops` and `bytes` come with the case, so that both sides
divide the same number. `train` compiles the model, keeps weights and AdamW's state in f32 and computes in bf16 by autocast, as ours does, with the fused
AdamW and the fastest backend of attention. Times of kernels are of CUDA events around several calls; of steps, of the host, with a synchronisation after
each. Prints one JSON line.
"""

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from gpt import GPT, SHAPES, adamw, report
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def seconds_of(run, budget_s):
    """Median seconds of a call, by events around so many calls that launching is hidden."""
    def sample(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    calls = max(1, min(10, math.ceil(2e-3 / max(sample(1), 1e-9))))
    samples, spent = [], 0.0
    while len(samples) < 3 or spent < budget_s:
        took = sample(calls)
        spent += took
        samples.append(took / calls)
    return statistics.median(samples)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def product(case, budget_s):
    tokens, inputs, outputs, dtype = case["tokens"], case["inputs"], case["outputs"], DTYPES[case["dtype"]]
    x, dy, w = randn(tokens, inputs, dtype=dtype), randn(tokens, outputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    run = {
        "forward": lambda: F.linear(x, w),
        "input-gradient": lambda: dy @ w,
        "weight-gradient": lambda: dy.t() @ x,
    }[case["form"]]
    return {"seconds": seconds_of(run, budget_s)}


def fastest_backend(run, budget_s):
    """Seconds and name of the fastest backend that takes the operands."""
    found = []
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                found.append((run(budget_s), backend))
        except RuntimeError:
            continue
    if not found:
        raise SystemExit("none of PyTorch's fused attentions takes these operands")
    return min(found, key=lambda pair: pair[0])


def attention(case, budget_s):
    b, t, d, dtype = case["batch"], case["seq"], case["head_dim"], DTYPES[case["dtype"]]
    backward = case["form"] == "backward"
    grouped = case["heads"] != case["kv_heads"]
    q, k, v = (randn(b, heads, t, d, dtype=dtype).requires_grad_(backward)
               for heads in (case["heads"], case["kv_heads"], case["kv_heads"]))

    def timed(budget_s):
        attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if not backward:
            return seconds_of(attend, budget_s)
        y = attend()
        dy = torch.randn_like(y)
        return seconds_of(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), budget_s)

    seconds, backend = fastest_backend(timed, budget_s)
    return {"seconds": seconds, "backend": backend.name}


def rotate(x, cos, sin):
    even, odd = x.float().chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


def gradient_of(function, inputs, dy):
    """The compiled backward of a compiled function."""
    inputs = [x.requires_grad_() for x in inputs]
    y = torch.compile(function)(*inputs)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def streaming_run(case):
    rows, dim, vocab, dtype = case["rows"], case["columns"], case["vocabulary"], DTYPES[case["dtype"]]
    form = case["form"]
    make = lambda width=dim, dtype=dtype: randn(rows, width, dtype=dtype)
    weight = lambda: randn(dim, dtype=dtype)
    rms = lambda x, w: F.rms_norm(x, (dim,), w, 1e-5)
    layer = lambda x, w, b: F.layer_norm(x, (dim,), w, b, 1e-5)
    gate = lambda gu: F.silu(gu[:, :gu.shape[1] // 2]) * gu[:, gu.shape[1] // 2:]
    gelu = lambda x: F.gelu(x, approximate="tanh")
    call = lambda function, *inputs: (lambda compiled=torch.compile(function): compiled(*inputs))
    if form == "rms_norm":
        return call(rms, make(), weight())
    if form == "rms_norm_backward":
        return gradient_of(rms, [make(), weight()], make())
    if form == "layer_norm":
        return call(layer, make(), weight(), weight())
    if form == "layer_norm_backward":
        return gradient_of(layer, [make(), weight(), weight()], make())
    if form == "swiglu":
        return call(gate, make(4 * dim))
    if form == "swiglu_backward":
        return gradient_of(gate, [make(4 * dim)], make(2 * dim))
    if form == "gelu":
        return call(gelu, make(4 * dim))
    if form == "gelu_backward":
        return gradient_of(gelu, [make(4 * dim)], make(4 * dim))
    if form == "add":
        return call(torch.add, make(), make())
    if form == "dropout_add":
        return call(lambda x, y: F.dropout(x, 0.1, training=True) + y, make(), make())
    if form == "rope":
        head = min(dim, 128)
        qkv = make(3 * dim).view(rows, 3 * dim // head, head)
        cos, sin = randn(rows, 1, head // 2), randn(rows, 1, head // 2)
        turned = 2 * dim // head
        return call(lambda x: torch.cat((rotate(x[:, :turned], cos, sin), x[:, turned:]), dim=1), qkv)
    if form == "embedding":
        table, tokens = randn(vocab, dim, dtype=dtype), torch.randint(0, vocab, (rows,), device="cuda")
        return lambda: F.embedding(tokens, table)
    if form == "embedding_backward":
        dy, tokens = make(), torch.randint(0, vocab, (rows,), device="cuda")
        return lambda: torch.ops.aten.embedding_dense_backward(dy, tokens, vocab, -1, False)
    if form == "cast":
        return call(lambda x: x.to(dtype), make(dtype=torch.float32))
    if form == "accumulate":
        total, x = make(dtype=torch.float32), make()
        return lambda: total.copy_(x)
    if form == "adamw":
        parameter = nn.Parameter(randn(case["parameters"]))
        parameter.grad = randn(case["parameters"])
        return torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True).step
    if form == "softmax":
        return call(lambda x: F.softmax(x, dim=-1), make())
    raise SystemExit(f"no peer of the streaming kernel {form}")


def kernels(a):
    with open(a.ours, encoding="utf-8") as file:
        ours = json.load(file)
    cases = []
    for case in ours["cases"]:
        if case["kind"] == "streaming":
            timed = {"seconds": seconds_of(streaming_run(case), a.seconds)}
        else:
            timed = {"product": product, "attention": attention}[case["kind"]](case, a.seconds)
        timed["tflops"] = case["flops"] / timed["seconds"] / 1e12
        peak = ours[f"{case['dtype']}_tflops"] if case["flops"] else ours["copy_gb_per_s"] / 1e3
        timed["peak_share"] = (case["flops"] or case["bytes"]) / timed["seconds"] / 1e12 / peak
        cases.append({"name": case["name"], "kind": case["kind"]} | timed)
        torch.cuda.empty_cache()
    report(device=torch.cuda.get_device_name(), cases=cases)


class RmsNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, inner):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm_1, self.norm_2 = RmsNorm(dim), RmsNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x_btd, cos, sin):
        b, t, d = x_btd.shape
        split = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv(self.norm_1(x_btd)).split(split, dim=-1)
        q, k, v = (x.view(b, t, -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x_btd = x_btd + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm_2(x_btd)).chunk(2, dim=-1)
        return x_btd + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The shape of Llama 3.2 1B, embeddings tied; positions without its long-context scaling, which costs nothing."""

    def __init__(self, vocab, length, dim=2048, layers=16, heads=32, kv_heads=8, inner=8192):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, inner) for _ in range(layers))
        self.norm = RmsNorm(dim)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(length), 500_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids_bt, targets_bt):
        x_btd = self.embedding(ids_bt)
        for block in self.blocks:
            x_btd = block(x_btd, self.cos, self.sin)
        logits = F.linear(self.norm(x_btd), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets_bt.flatten())


def choose_attention(rows, length, heads, kv_heads, head_dim):
    """Lets PyTorch use the backend alone that is fastest forward and backward at this shape."""
    case = {"batch": rows, "seq": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": "bf16",
            "form": "backward"}
    chosen = attention(case, 0.02)["backend"]
    torch.backends.cuda.enable_flash_sdp(chosen == SDPBackend.FLASH_ATTENTION.name)
    torch.backends.cuda.enable_cudnn_sdp(chosen == SDPBackend.CUDNN_ATTENTION.name)
    torch.backends.cuda.enable_mem_efficient_sdp(chosen == SDPBackend.EFFICIENT_ATTENTION.name)
    torch.backends.cuda.enable_math_sdp(False)
    return chosen


def train(a):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if a.preset == "gpt2-124m":
        shape = SHAPES[a.preset]
        backend = choose_attention(a.rows, a.length, shape.heads, shape.heads, shape.dim // shape.heads)
        model = GPT(shape).cuda()
    elif a.preset == "llama-1b":
        backend = choose_attention(a.rows, a.length, 32, 8, 64)
        model = Llama(a.vocab_size, a.length).cuda()
    else:
        raise SystemExit(f"no peer of the preset {a.preset}")
    run = torch.compile(model)
    optimizer = adamw(model, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for _ in range(a.warmup + a.steps):
        ids, targets = torch.randint(0, a.vocab_size, (2, a.rows, a.length), device="cuda").unbind(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[a.warmup:])
    # Tokens are random: a step that computes has a loss near the logarithm of the vocabulary.
    if abs(losses[-1] - math.log(a.vocab_size)) > 1.0:
        raise SystemExit(f"a loss of {losses[-1]} on random tokens of {a.vocab_size}: the peer computes something else")
    report(preset=a.preset, device=torch.cuda.get_device_name(), attention=backend, step_s=step_s, step_s_all=times,
           parameters=sum(p.numel() for p in model.parameters()), tokens_per_s=a.rows * a.length / step_s,
           peak_bytes=torch.cuda.max_memory_allocated(), loss=losses[-1])


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = cli.add_subparsers(required=True)
    one = commands.add_parser("kernels")
    one.add_argument("ours", help="file with the JSON object that ours printed")
    one.add_argument("--seconds", type=float, default=0.05, help="time for each case")
    one.set_defaults(run=kernels)
    other = commands.add_parser("train")
    other.add_argument("--preset", default="gpt2-124m")
    other.add_argument("--rows", type=int, default=64)
    other.add_argument("--length", type=int, default=1024)
    other.add_argument("--vocab-size", type=int, default=50304)
    other.add_argument("--steps", type=int, default=10, help="timed steps")
    other.add_argument("--warmup", type=int, default=3, help="steps before them")
    other.set_defaults(run=train)
    a = cli.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
