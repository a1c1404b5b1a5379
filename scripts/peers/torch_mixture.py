#!/usr/bin/env python3
"""Times a training step of transformers' Mixtral: 13.5 million parameters, 4 x 256 tokens.

    .venv-peers/bin/pip install torch transformers
    .venv-peers/bin/python scripts/peers/torch_mixture.py [THREADS] [f32|autocast|bf16]

Prints the median step with AdamW in milliseconds, by two of transformers' implementations of
experts, plain and compiled. `autocast` keeps f32 weights and multiplies in bf16, as Trainyard does
with `precision.compute = "bf16"`; `bf16` has weights and moments in bf16 alone. `trainyard train` on the same shape is timed beside it (docs/experts.md).
"""

import statistics
import sys
import time

import torch
import transformers

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
PRECISION = sys.argv[2] if len(sys.argv) > 2 else "f32"
WARM_UP, STEPS, SECONDS_MAX = 4, 14, 70
SHAPE = dict(
    vocab_size=320, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    intermediate_size=512, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001,
    output_router_logits=True, max_position_embeddings=256, tie_word_embeddings=False, sliding_window=None,
)


def times(experts, is_compiled):
    """Seconds of each step."""
    torch._dynamo.reset()
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE))
    model.set_experts_implementation(experts)
    if PRECISION == "bf16":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    forward = torch.compile(model) if is_compiled else model
    tokens = torch.randint(0, SHAPE["vocab_size"], (4, 256))
    seconds, began = [], time.time()
    while len(seconds) < STEPS and time.time() - began < SECONDS_MAX:
        start = time.time()
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "autocast"):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.time() - start)
    return seconds


torch.set_num_threads(THREADS)
torch.manual_seed(0)
print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {THREADS} threads, {PRECISION}")
for experts in ("grouped_mm", "eager"):
    for is_compiled in (False, True):
        seconds = times(experts, is_compiled)
        median = 1e3 * statistics.median(seconds[WARM_UP:] or seconds)
        print(f"{experts} {'compiled' if is_compiled else 'plain'}: {median:.1f} ms, {len(seconds)} steps", flush=True)
