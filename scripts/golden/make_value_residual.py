"""Loss and gradients of two tiny models with value residuals (Zhou et al. 2024), from PyTorch in f64.

    python scripts/golden/make_value_residual.py crates/model/tests/golden/value_residual.json

The models are written here from the papers. Parameters have the names, shapes and order of
`trainyard_model`, and values of a formula, so no weights are stored. Of each gradient the file has its
norm and its product with another formula's values, which a transposed or permuted gradient would
change.
"""

import json
import sys

import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, silu

TOKENS = [3, 9, 1, 30, 3, 12, 7, 5, 5, 22, 0, 17, 2]
TARGETS = [9, 1, 30, 3, 12, 7, 4, 5, 22, 0, 17, 2, 8]
LENGTHS = [7, 6]
DIM, LAYERS, HEADS, VOCABULARY, POSITIONS, WIDTH = 24, 3, 4, 31, 16, 40


def wave(count, phase):
    index = torch.arange(1, count + 1, dtype=torch.float64)
    return torch.sin(0.37 * index * index + phase)


class Values(dict):
    """Parameters in the order in which they are asked for."""

    def make(self, name, *shape):
        count = 1
        for size in shape:
            count *= size
        values = wave(count, len(self))
        if "norm" in name:
            values = 1 + 0.1 * values
        elif "value_residual" in name:
            values = 0.5 + 0.2 * values
        else:
            values = 0.3 * values
        self[name] = values.reshape(shape).requires_grad_()


def parameters(llama):
    values, head = Values(), DIM // HEADS
    kv = 2 * head if llama else DIM
    values.make("embedding.tokens.weight", VOCABULARY, DIM)
    if not llama:
        values.make("embedding.positions.weight", POSITIONS, DIM)
    for layer in range(LAYERS):
        name = f"block.{layer}."
        values.make(name + "norm1.weight", DIM)
        values.make(name + "attn.qkv.weight", DIM + 2 * kv, DIM)
        values.make(name + "attn.out.weight", DIM, DIM)
        values.make(name + "mlp.down.weight", DIM, WIDTH)
        values.make(name + "norm2.weight", DIM)
        values.make(name + "mlp.up.weight", 2 * WIDTH if llama else WIDTH, DIM)
        if layer > 0:
            values.make(name + "attn.value_residual", 2)
    values.make("head.norm.weight", DIM)
    if llama:
        values.make("head.lm.weight", VOCABULARY, DIM)
    return values


def norm(x, weight, llama):
    if llama:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    return layer_norm(x, (DIM,), weight, eps=1e-5)


def rotated(x, positions):
    """x [m, heads, c]: column j and column j + c / 2 are a pair."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(q, k, v):
    out = []
    for q, k, v in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS)):
        scores = torch.einsum("qhc,khc->hqk", q, k) / q.shape[-1] ** 0.5
        ahead = torch.ones(len(q), len(q)).triu(1).bool()
        out.append(torch.einsum("hqk,khc->qhc", scores.masked_fill(ahead, -torch.inf).softmax(-1), v))
    return torch.cat(out).flatten(1)


def loss(p, llama):
    tokens, positions = torch.tensor(TOKENS), torch.cat([torch.arange(n) for n in LENGTHS])
    x, head = p["embedding.tokens.weight"][tokens], DIM // HEADS
    if not llama:
        x = x + p["embedding.positions.weight"][positions]
    first = None
    for layer in range(LAYERS):
        name = f"block.{layer}."
        qkv = norm(x, p[name + "norm1.weight"], llama) @ p[name + "attn.qkv.weight"].T
        qkv = qkv.unflatten(1, (-1, head))
        q, k, v = qkv.split([HEADS, (qkv.shape[1] - HEADS) // 2, (qkv.shape[1] - HEADS) // 2], 1)
        if llama:
            q, k = rotated(q, positions), rotated(k, positions)
        if layer == 0:
            first = v
        else:
            a, b = p[name + "attn.value_residual"]
            v = a * v + b * first
        k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
        x = x + attention(q, k, v) @ p[name + "attn.out.weight"].T
        up = norm(x, p[name + "norm2.weight"], llama) @ p[name + "mlp.up.weight"].T
        h = silu(up[:, :WIDTH]) * up[:, WIDTH:] if llama else gelu(up, approximate="tanh")
        x = x + h @ p[name + "mlp.down.weight"].T
    table = p["head.lm.weight" if llama else "embedding.tokens.weight"]
    return cross_entropy(norm(x, p["head.norm.weight"], llama) @ table.T, torch.tensor(TARGETS))


def main():
    cases = {}
    for llama in (False, True):
        values = parameters(llama)
        value = loss(values, llama)
        value.backward()
        gradients = {}
        for index, (name, parameter) in enumerate(values.items()):
            gradient = parameter.grad.flatten()
            product = float(gradient @ wave(len(gradient), index + 0.5))
            gradients[name] = [float(gradient.norm()), product]
        cases["llama" if llama else "gpt2"] = {"loss": value.item(), "gradients": gradients}
    with open(sys.argv[1], "w") as file:
        json.dump(cases, file, indent=1)
        file.write("\n")


main()
