#!/usr/bin/env python3
"""Writes small tokenizers with every kind of post-processor, and the ids that transformers gives with them.

Rerun (a second; needs transformers, printed at the end):

    .venv-peers/bin/python scripts/golden/make_tokenizers.py

It writes, replacing what is there:

    crates/data/tests/golden/tokenizers/NAME/tokenizer.json, tokenizer_config.json
    crates/data/tests/golden/tokenizers/expected.json   NAME -> the ids of each text, as AutoTokenizer(text).input_ids
"""

import json
import shutil
from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

GOLDEN = Path(__file__).resolve().parents[2] / "crates/data/tests/golden/tokenizers"
TEXTS = ["a cat", "the cat sat on the mat", "mat"]
SPECIAL = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]"]
WORDS = ["a", "the", "cat", "sat", "on", "mat"]


def words():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    return tokenizer


def template(single, tokenizer):
    ids = [(t, tokenizer.token_to_id(t)) for t in single.split() if t != "$A"]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


def cases():
    """name -> (tokenizer, tokenizer_config)"""
    def case(tokenizer, post_processor, **config):
        if post_processor:
            tokenizer.post_processor = post_processor
        return tokenizer, dict(tokenizer_class="PreTrainedTokenizerFast") | config

    sentence = dict(bos_token="<s>", eos_token="</s>")
    plain, llama3 = words(), byte_level()
    return {
        "none": case(words(), None, **sentence),
        "template_begin": case(words(), template("<s> $A", plain), **sentence),
        "template_end": case(words(), template("$A </s>", plain), **sentence),
        "template_both": case(words(), template("<s> $A </s>", plain), **sentence),
        "bert": case(words(), processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3)), eos_token="[SEP]"),
        "roberta": case(words(), processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), **sentence),
        "byte_level": case(byte_level(), processors.ByteLevel(trim_offsets=False), eos_token="<|end|>"),
        "sequence": case(byte_level(), processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template("<|begin|> $A", llama3)]),
            bos_token="<|begin|>", eos_token="<|end|>"),
    }


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    expected = {}
    for name, (tokenizer, config) in cases().items():
        folder = GOLDEN / name
        folder.mkdir(parents=True)
        # On one line: what is compared are ids.
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        expected[name] = [loaded(text).input_ids for text in TEXTS]
    body = ",\n".join(f" {json.dumps(name)}: {json.dumps(ids)}" for name, ids in expected.items())
    (GOLDEN / "expected.json").write_text(f'{{"texts": {json.dumps(TEXTS)}, "ids": {{\n{body}\n}}}}\n')
    print(f"{len(expected)} tokenizers; transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")


if __name__ == "__main__":
    main()
