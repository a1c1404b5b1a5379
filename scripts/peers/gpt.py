"""The GPT that both PyTorch baselines train: GPT-2's architecture, written the way PyTorch runs it fastest.

Fused scaled-dot-product attention, one product for query, key and value, tied embeddings, and the initialisation of GPT-2
(0.02, residual projections divided by sqrt(2 * layers)).
"""

import json
import math
import resource
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Shape:
    layers: int
    heads: int
    dim: int
    vocab: int
    context: int
    bias: bool = True
    gelu: str = "tanh"

    def flops_per_token(self, params, seq):
        """Model FLOPs of forward and backward: 6 per parameter and, causal or not, 12 * dim * seq per layer."""
        return 6 * params + 12 * self.layers * self.dim * seq


SHAPES = {
    "gpt2-124m": Shape(layers=12, heads=12, dim=768, vocab=50304, context=1024),
    "char": Shape(layers=4, heads=4, dim=128, vocab=65, context=64, bias=False, gelu="none"),
}


class Block(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.gelu = s.heads, s.gelu
        self.ln_1 = nn.LayerNorm(s.dim, bias=s.bias)
        self.attn = nn.Linear(s.dim, 3 * s.dim, bias=s.bias)
        self.attn_proj = nn.Linear(s.dim, s.dim, bias=s.bias)
        self.ln_2 = nn.LayerNorm(s.dim, bias=s.bias)
        self.fc = nn.Linear(s.dim, 4 * s.dim, bias=s.bias)
        self.fc_proj = nn.Linear(4 * s.dim, s.dim, bias=s.bias)

    def forward(self, x_btd):
        b, t, d = x_btd.shape
        qkv = self.attn(self.ln_1(x_btd)).view(b, t, 3, self.heads, d // self.heads)
        q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
        x_btd = x_btd + self.attn_proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x_btd + self.fc_proj(F.gelu(self.fc(self.ln_2(x_btd)), approximate=self.gelu))


class GPT(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(s.vocab, s.dim), nn.Embedding(s.context, s.dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.ln_f = nn.LayerNorm(s.dim, bias=s.bias)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if "_proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids_bt, targets_bt):
        """Mean cross-entropy in nats over all targets."""
        x_btd = self.wte(ids_bt) + self.wpe.weight[: ids_bt.shape[1]]
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv = F.linear(self.ln_f(x_btd), self.wte.weight)
        return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten())


def adamw(model, lr, betas, weight_decay):
    """Fused AdamW that decays matrices and leaves biases and norms alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def compiled(model, mode):
    """`eager` leaves the model as it is; `compile` and `max-autotune` go through inductor."""
    if mode == "eager":
        return model
    return torch.compile(model, mode="default" if mode == "compile" else mode)


def peak_rss_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(**fields):
    """One JSON object on a line of its own, the last of the output."""
    print(json.dumps({"peer": f"torch {torch.__version__}"} | fields), flush=True)
