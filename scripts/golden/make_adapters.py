#!/usr/bin/env python3
"""Trains LoRA adapters with PEFT on the tiny Llama of crates/model/tests/golden/llama, for crates/engine/tests/fine_tuning.rs.

    .venv-peers/bin/pip install peft
    .venv-peers/bin/python scripts/golden/make_adapters.py                 # writes adapter (LoRA) and dora in crates/engine/tests/golden
    .venv-peers/bin/python scripts/golden/make_adapters.py BASE ADAPTER MERGED TOKENS
        # compares the logits of PEFT with the adapter folder ADAPTER on BASE with those of the merged model MERGED, both
        # written by `trainyard export`, on a JSON list of tokens

The folder holds the adapter that both programs begin with (its B is not zero, so that every gradient is a number), the
batches, the losses of 20 steps of AdamW (magnitudes of DoRA do not decay, as gains of norms do not), the norms of the first step's gradients, and the norms of the last weights.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "crates/model/tests/golden/llama"
GOLDEN = ROOT / "crates/engine/tests/golden"
STEPS, ROWS, LENGTH = 20, 4, 8


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True)


def make(folder, dora):
    torch.manual_seed(1)
    model = get_peft_model(load(BASE), LoraConfig(
        r=4, lora_alpha=8, use_rslora=not dora, use_dora=dora, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
        if "magnitude" in name:
            p.data *= 1 + 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = BASE.name
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    vocabulary = model.config.vocab_size
    texts = torch.randint(0, vocabulary, (STEPS, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    matrices = [p for p in trained.values() if p.dim() > 1]
    vectors = [p for p in trained.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    plain = lambda name: name.replace("_vector.default.weight", "_vector").replace(".default", "")
    losses, gradients = [], {}
    for step, rows in enumerate(texts):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {plain(name): p.grad.double().norm().item() for name, p in trained.items()}
        optimizer.step()
        losses.append(loss.item())
    last = {plain(name): p.detach().double().norm().item() for name, p in trained.items()}
    result = {"tokens": texts.tolist(), "losses": losses, "gradients": gradients, "weights": last}
    (folder / "expected.json").write_text(json.dumps(result) + "\n")
    print(f"{losses[0]:.5f} to {losses[-1]:.5f}; {len(gradients)} tensors; peft", __import__("peft").__version__)


def compare(base, adapter, merged, tokens):
    tokens = torch.tensor([json.loads(tokens)])
    with torch.no_grad():
        with_adapter = PeftModel.from_pretrained(load(base), adapter).eval()(input_ids=tokens).logits.double()
        without = load(base).eval()(input_ids=tokens).logits.double()
        of_merged = load(merged).eval()(input_ids=tokens).logits.double()
    error = ((with_adapter - of_merged).norm() / with_adapter.norm()).item()
    moved = ((with_adapter - without).norm() / without.norm()).item()
    print(f"logits of the adapter and of the merged model differ by {error:.1e}; the adapter changes them by {moved:.1e}")
    assert error <= 1e-4 < moved


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        compare(*sys.argv[1:])
    else:
        make(GOLDEN / "adapter", dora=False)
        make(GOLDEN / "dora", dora=True)
