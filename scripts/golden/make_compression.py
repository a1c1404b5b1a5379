#!/usr/bin/env python3
"""Computes with PyTorch what crates/compress has to find on one small layer.

    .venv-peers/bin/pip install numpy torch compressed-tensors
    .venv-peers/bin/python scripts/golden/make_compression.py

Writes crates/compress/tests/golden/layer.json. Weights and inputs follow from formulas that the test
repeats. SparseGPT follows `sparsegpt.py` of IST-DASLab/sparsegpt, GPTQ `gptq.py` of IST-DASLab/gptq
without blocks (so that every column sees all moves before it), AWQ `auto_scale.py` of mit-han-lab/llm-awq, Wanda and magnitude `lib/prune.py` of
locuslab/wanda; all in f64. Scales are those of compressed-tensors for symmetric groups, and the packed
words from its own function: they are printed, for the
test of crates/model/src/weights/packed.rs.
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

ROWS, COLUMNS, SAMPLES = 5, 160, 480
DAMPING, BLOCK = 0.01, 128


def weights():
    i, j = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    # The second summand keeps scores and halves of codes from being equal.
    return (((i * 7919 + j * 104729 + i * j * 31) % 2003).float().div(1001.5).sub(1.0)
            + ((i * 37 + j * 11) % 97).float() / 300000.0).double()


def inputs():
    i, j = torch.meshgrid(torch.arange(SAMPLES), torch.arange(COLUMNS), indexing="ij")
    raw = ((i * i * 31 + j * j * 17 + i * j * 7) % 1009).float().div(504.5).sub(1.0)
    # Columns of different norms, of which neighbours are correlated.
    scale = 0.1 + (j % 7).float() / 4
    mixed = raw.clone()
    mixed[:, 1:] += 0.5 * raw[:, :-1]
    return (mixed * scale).double()


def inverse_factor(x):
    h = x.T @ x
    h += DAMPING * h.diagonal().mean() * torch.eye(COLUMNS, dtype=h.dtype)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)


def sparsegpt(w, u, sparsity=None, keep=None, of=None):
    w, mask = w.clone(), None
    for start in range(0, COLUMNS, BLOCK):
        end = min(start + BLOCK, COLUMNS)
        part, errors = w[:, start:end].clone(), torch.zeros(ROWS, end - start, dtype=w.dtype)
        steps = u[start:end, start:end]
        if sparsity is not None:
            score = part ** 2 / steps.diagonal().reshape(1, -1) ** 2
            mask = score < score.flatten().sort()[0][int(score.numel() * sparsity)]
        else:
            mask = torch.zeros_like(part, dtype=torch.bool)
        for i in range(end - start):
            if of is not None and i % of == 0:
                score = part[:, i:i + of] ** 2 / steps.diagonal()[i:i + of].reshape(1, -1) ** 2
                mask.scatter_(1, i + torch.topk(score, of - keep, dim=1, largest=False)[1], True)
            q = part[:, i].clone()
            q[mask[:, i]] = 0
            error = (part[:, i] - q) / steps[i, i]
            part[:, i:] -= error.unsqueeze(1) @ steps[i, i:].unsqueeze(0)
            part[:, i] = q
            errors[:, i] = error
        w[:, start:end] = part
        w[:, end:] -= errors @ u[start:end, end:]
    return w


def grid(group, bits):
    return (group.abs().amax(dim=1).float() / ((2 ** bits - 1) / 2)).double()


def gptq(w, u, bits, group):
    w, codes, scales = w.clone(), torch.zeros(ROWS, COLUMNS, dtype=torch.int8), []
    for i in range(COLUMNS):
        if i % group == 0:
            scale = grid(w[:, i:i + group], bits)
            scales.append(scale)
        code = torch.clamp(torch.round(w[:, i] / scale), -2 ** (bits - 1), 2 ** (bits - 1) - 1)
        codes[:, i] = code.to(torch.int8)
        error = (w[:, i] - code * scale) / u[i, i]
        w[:, i + 1:] -= error.unsqueeze(1) @ u[i, i + 1:].unsqueeze(0)
    return {"bits": bits, "group": group, "codes": codes.tolist(),
            "scales": torch.stack(scales, 1).tolist()}


def nearest(w, bits, group):
    # In f32: the largest weight of a group lies halfway between two codes, and the quotient's rounding decides.
    w = w.float()
    scales = torch.stack([grid(w[:, i:i + group], bits) for i in range(0, COLUMNS, group)], 1).float()
    codes = torch.round(w / scales.repeat_interleave(group, 1)).clamp(-2 ** (bits - 1), 2 ** (bits - 1) - 1)
    return {"bits": bits, "group": group, "codes": codes.to(torch.int8).tolist(), "scales": scales.tolist()}


def awq(w, x, bits, group):
    """Lin et al. 2023, section 3.2, with the root mean square of inputs as their size."""
    sizes = x.pow(2).mean(0).sqrt().clamp(min=1e-4)
    found = None
    for step in range(20):
        scales = sizes ** (step / 20)
        scales = (scales / (scales.max() * scales.min()).sqrt()).float()
        coded = nearest(w.float() * scales, bits, group)
        steps = torch.tensor(coded["scales"]).repeat_interleave(group, 1)
        rounded = torch.tensor(coded["codes"]).float() * steps / scales
        error = ((rounded.double() - w) @ x.T).pow(2).sum().item()
        if found is None or error < found["error"]:
            found = {"bits": bits, "group": group, "error": error, "exponent": step / 20, "scales": scales.tolist()}
    return found


def smooth(w, x, exponent):
    """Xiao et al. 2023, equation 4, as `smoothquant/smooth.py` of mit-han-lab has it."""
    inputs, weights = x.abs().max(0)[0], w.abs().max(0)[0].clamp(min=1e-5)
    scales = (inputs.pow(exponent) / weights.pow(1 - exponent)).clamp(min=1e-5)
    return {"exponent": exponent, "scales": scales.tolist()}


def kept(mask):
    return ["".join("1" if on else "0" for on in row) for row in mask.tolist()]


def tensors():
    i = torch.arange(40)
    value = lambda m: ((i * 7919 + m * 2713 + i * m * 311 + i * i * 17) % 1013).float().div(506.5).sub(1.0)
    base = value(0)
    return base.double(), [(base + 0.3 * value(m)).double() for m in (1, 2, 3)]


def ties(base, models, weights, density, scale):
    """Yadav et al. 2023, section 3.2, with weights as mergekit has them."""
    changes = []
    for model in models:
        change = model - base
        keep = change.abs().topk(round(density * change.numel()))[1]
        changes.append(torch.zeros_like(change).scatter(0, keep, change[keep]))
    changes, weights = torch.stack(changes), torch.tensor(weights, dtype=base.dtype).reshape(-1, 1)
    sign = (changes * weights).sum(0).sign()
    agree = (changes.sign() == sign) & (changes != 0)
    total = (weights * agree).sum(0)
    mean = (changes * weights * agree).sum(0) / torch.where(total > 0, total, 1.0)
    return base + scale * mean


def slerp(a, b, t):
    angle = torch.arccos(torch.dot(a / a.norm(), b / b.norm()))
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def merges():
    base, models = tensors()
    weights = [1.0, 1.0, 0.5]
    return {
        "soup": ((models[0] + 2 * models[1] + models[2]) / 4).tolist(),
        "slerp": slerp(models[0], models[1], 0.3).tolist(),
        "task": (base + 0.7 * sum(w * (m - base) for w, m in zip(weights, models))).tolist(),
        "ties": ties(base, models, weights, density=0.4, scale=0.8).tolist(),
    }


def main():
    w, x = weights(), inputs()
    u = inverse_factor(x)
    score = w.abs() * x.norm(dim=0)
    by_row = torch.ones_like(w, dtype=torch.bool)
    by_row.scatter_(1, score.sort(dim=1, stable=True)[1][:, :COLUMNS // 2], False)
    by_four = torch.ones_like(w, dtype=torch.bool)
    for j in range(0, COLUMNS, 4):
        by_four.scatter_(1, j + torch.topk(score[:, j:j + 4], 2, dim=1, largest=False)[1], False)
    smallest = w.abs() >= w.abs().flatten().sort()[0][w.numel() // 2]
    for bits in (2, 3, 4, 8):
        codes = (torch.arange(80).reshape(2, 40) * 7 % 2 ** bits - 2 ** (bits - 1)).to(torch.int8)
        words = [word & 0xffffffff for word in pack_to_int32(codes, bits)[1].tolist()]
        print(f"{bits} bits:", " ".join(f"{word:#010x}" for word in words))
    results = {
        "wanda_half": kept(by_row),
        "wanda_2_4": kept(by_four),
        "magnitude_half": kept(smallest),
        "sparsegpt_half": sparsegpt(w, u, sparsity=0.5).tolist(),
        "sparsegpt_2_4": sparsegpt(w, u, keep=2, of=4).tolist(),
        "gptq": [gptq(w, u, 4, 32), gptq(w, u, 3, 160)],
        "merge": merges(),
        "awq": [awq(w, x, 4, 32), awq(w, x, 3, 160)],
        "smooth": [smooth(w, x, 0.5), smooth(w, x, 0.8)],
        "nearest": [nearest(w, 4, 32), nearest(w, 3, 160)],
    }
    folder = Path(__file__).parents[2] / "crates/compress/tests/golden"
    folder.mkdir(parents=True, exist_ok=True)
    short = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.7g}"))
    (folder / "layer.json").write_text(json.dumps(short) + "\n")
    print(f"{folder / 'layer.json'}: torch {torch.__version__}")


if __name__ == "__main__":
    main()
