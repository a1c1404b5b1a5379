#!/usr/bin/env python3
"""The largest model that PyTorch's FSDP2 trains on one GPU: Llama-shaped blocks, as many as fit. Run by `cargo xtask gpu`, after ours.

    trainyard bench largest --preset llama-8b ... --json > ours.json; torch_largest.py search ours.json

Both ways that FSDP2 has are tried, all on the GPU and with parameters, gradients and optimizer state on the host (`CPUOffloadPolicy`, without pinning, which would round sizes up); weights and AdamW's state are
in f32, computing is in bf16, blocks are checkpointed, as ours does it. Each number of blocks is tried in a process of its own, which makes two steps on random
tokens. The first guess is what 16 bytes a parameter leave of the memory that the way uses; from there tries go up or down by a twentieth until one fails
after one that did not, so what is printed is below the largest by a twentieth at most. A try that would leave the host less than 2 GiB ends itself. Prints
one JSON line.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time

import torch

BYTES_A_PARAMETER = 16
HOST_SPARE_BYTES = 2 << 30
TRIES_MAX = 8


def host_available_bytes():
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) << 10


def end_before_the_host_is_full():
    def watch():
        while host_available_bytes() > HOST_SPARE_BYTES:
            time.sleep(0.05)
        print("the host's memory is full", file=sys.stderr, flush=True)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def one(a):
    """Two steps with `a.layers` blocks; a failure is an answer too."""
    import torch.distributed as dist
    from gpt import report
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch_gpu import Llama, LlamaBlock

    end_before_the_host_is_full()
    gpu = a.device == "cuda"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("cuda:nccl,cpu:gloo" if gpu else "gloo", rank=0, world_size=1, store=dist.HashStore())
    if gpu:
        torch.cuda.set_device(0)
    mesh = dist.init_device_mesh(a.device, (1,))
    with torch.device("meta"):
        model = Llama(a.vocab_size, a.length, a.dim, a.layers, a.heads, a.kv_heads, a.inner)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaBlock))
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if a.offload else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    model.to_empty(device="cpu" if a.offload else a.device)
    half = a.dim // a.heads // 2
    angles = torch.outer(torch.arange(a.length), 500_000.0 ** (-torch.arange(half) / half)).to(a.device)
    model.cos, model.sin = angles.cos(), angles.sin()
    parameters = 0
    for p in model.parameters():
        parameters += p.numel()
        local = p.to_local()
        with torch.no_grad():
            local.normal_(std=0.02) if p.ndim == 2 else local.fill_(1.0)
    # Fused, it makes no temporaries; it takes distributed tensors in this version of PyTorch, or the try fails and says so.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        ids, targets = torch.randint(0, a.vocab_size, (2, 1, a.length), device=a.device).unbind(0)
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()
        times.append(time.perf_counter() - start)
    if abs(loss - math.log(a.vocab_size)) > 2.0:
        raise SystemExit(f"a loss of {loss} on random tokens of {a.vocab_size}: the peer computes something else")
    report(layers=a.layers, offload=a.offload, parameters=parameters, step_s=times[-1], loss=loss,
           peak_bytes=torch.cuda.max_memory_allocated() if gpu else 0)
    dist.destroy_process_group()


def parameters_of(a, layers):
    heads = (a.heads + 2 * a.kv_heads) * (a.dim // a.heads)
    block = a.dim * heads + a.dim * a.dim + 3 * a.dim * a.inner + 2 * a.dim
    return a.vocab_size * a.dim + a.dim + layers * block


def attempt(a, layers, offload, tries):
    command = [sys.executable, sys.argv[0], "one", f"--layers={layers}", f"--device={a.device}"]
    command += [f"--{key.replace('_', '-')}={getattr(a, key)}" for key in ("vocab_size", "length", "dim", "heads", "kv_heads", "inner")]
    ran = subprocess.run(command + (["--offload"] if offload else []), capture_output=True, text=True, check=False)
    ok = ran.returncode == 0
    why = None if ok else (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1][:300]
    tries.append({"layers": layers, "offload": offload, "trained": ok, "why": why})
    print(f"{layers} layers, offload {offload}: {'trains' if ok else why}", file=sys.stderr, flush=True)
    return json.loads(ran.stdout.strip().splitlines()[-1]) if ok else None


def largest_by(a, offload, room, tries):
    """The largest that trained, from a guess up or down; None where nothing did."""
    per_layer = parameters_of(a, 1) - parameters_of(a, 0)
    layers = max(1, int((room / BYTES_A_PARAMETER - parameters_of(a, 0)) / per_layer))
    best, failed = None, False
    for _ in range(a.tries):
        found = attempt(a, layers, offload, tries)
        step = max(1, layers // 20)
        if found is None:
            failed = True
            layers -= step
        else:
            best, layers = found, layers + step
        if layers < 1 or (best and failed):
            break
    return best


def search(a):
    from gpt import report
    with open(a.ours, encoding="utf-8") as file:
        ours = json.load(file)
    rooms = {True: host_available_bytes() - HOST_SPARE_BYTES,
             False: torch.cuda.mem_get_info()[0] if a.device == "cuda" else a.room}
    best, tries = None, []
    for offload in sorted(rooms, key=rooms.get, reverse=True):
        # A way whose guess is far below what the other has reached cannot come near it.
        if best and rooms[offload] / BYTES_A_PARAMETER < 0.8 * best["parameters"]:
            continue
        found = largest_by(a, offload, min(rooms[offload], a.room or rooms[offload]), tries)
        best = max((one for one in (best, found) if one), key=lambda one: one["parameters"], default=None)
    if best is None:
        raise SystemExit(f"nothing trained: {tries}")
    report(**best, tries=tries, ours_parameters=ours["parameters"])


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = cli.add_subparsers(required=True)
    for name, run in (("search", search), ("one", one)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
        command.add_argument("--vocab-size", type=int, default=32768)
        command.add_argument("--length", type=int, default=2048)
        command.add_argument("--dim", type=int, default=4096)
        command.add_argument("--heads", type=int, default=32)
        command.add_argument("--kv-heads", type=int, default=8)
        command.add_argument("--inner", type=int, default=14336)
        if name == "one":
            command.add_argument("--layers", type=int, required=True)
            command.add_argument("--offload", action="store_true")
        else:
            command.add_argument("ours", help="file with the JSON object that ours printed")
            command.add_argument("--room", type=int, default=0, help="bytes to guess from, instead of what there is")
            command.add_argument("--tries", type=int, default=TRIES_MAX, help="of each way")
    a = cli.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
