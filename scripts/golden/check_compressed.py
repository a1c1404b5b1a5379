#!/usr/bin/env python3
"""Checks that transformers loads a folder of `trainyard quantize` or `prune` and computes what we compute.

    .venv-peers/bin/pip install compressed-tensors                     (set up as make_goldens.py says)
    trainyard eval FOLDER --data TEXT --length 512 --tokens-max 4096 --json
    .venv-peers/bin/python scripts/golden/check_compressed.py FOLDER TEXT 512 4096 LOSS

LOSS is what the first command printed. The text is cut as `trainyard eval` cuts it: rows one after another, each token but
the first is predicted once. Fails when a weight is missing or unexpected, or when the mean losses differ by more than 1e-3.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

TOLERANCE = 1e-3


def main():
    folder, text, length, most, ours = sys.argv[1], Path(sys.argv[2]).read_text(), *map(float, sys.argv[3:6])
    length, most = int(length), int(most)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
    tokens = tokenizer(text)["input_ids"][:most + 1]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True)
    complaints = {key: value for key, value in info.items() if value}
    assert not complaints, complaints
    model = model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            row = torch.tensor(tokens[start:start + length + 1])
            logits = model(input_ids=row[None, :-1], use_cache=False).logits[0]
            total += F.cross_entropy(logits.double(), row[1:], reduction="sum").item()
    loss = total / (len(tokens) - 1)
    print(f"{folder}: {len(tokens) - 1} tokens, loss {loss:.6f} by transformers {transformers.__version__}, {ours:.6f} here")
    assert abs(loss - ours) < TOLERANCE, f"they differ by {abs(loss - ours):.2e}"


if __name__ == "__main__":
    main()
