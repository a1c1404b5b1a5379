#!/usr/bin/env python3
"""Computes with transformers what a real GGUF model says of a text, for a test that compares.

    .venv-peers/bin/python scripts/golden/check_gguf.py MODEL.gguf TEXT FOLDER [TOKENIZER]    (set up as make_gguf.py says)
    TRAINYARD_GGUF_REFERENCE=FOLDER cargo test --release -p trainyard-engine --test data -- --ignored gguf --nocapture

FOLDER gets reference.json (the model, the text, its tokens, the mean loss of each token but the first of a sequence) and
logits.f32, raw, [sequences, length, vocabulary]. For 2,000 tokens of Gemma 3 these are 2.1 GB. TOKENIZER is a Hugging
Face folder, for a file without one.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

LENGTH, SEQUENCES = 500, 4


def main():
    path, text, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).read_text(), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(*sys.argv[4:5], **({} if sys.argv[4:] else where))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][:LENGTH * SEQUENCES]
    assert len(tokens) == LENGTH * SEQUENCES, f"the text has only {len(tokens)} tokens"
    losses = []
    with (folder / "logits.f32").open("wb") as out, torch.no_grad():
        for ids in torch.tensor(tokens).view(SEQUENCES, 1, LENGTH):
            logits = model(input_ids=ids, use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits[:-1].double(), ids[0, 1:]).item())
            out.write(logits.contiguous().numpy().tobytes())
    loss = sum(losses) / SEQUENCES
    (folder / "reference.json").write_text(json.dumps(
        {"gguf": str(path), "text": text, "tokens": tokens, "length": LENGTH, "loss": loss}))
    print(f"loss {loss:.6f}, perplexity {torch.tensor(loss).exp():.4f}; transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
