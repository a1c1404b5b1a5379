"""Runs datatrove's MinHash deduplication and filters on a JSONL file, for comparison.

    pip install datatrove 'spacy' nltk regex tldextract xxhash
    python scripts/peers/datatrove_clean.py dedup|filter TEXT.jsonl OUT

dedup prints seconds and the number of documents kept; filter prints one line per document and rule:
number, rule, reason or "kept".
"""

import json
import shutil
import sys
import time
from pathlib import Path


def dedup(text, out):
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    shutil.rmtree(out, ignore_errors=True)
    config = MinhashConfig(n_grams=5, num_buckets=20, hashes_per_bucket=8)
    folder, name = str(Path(text).resolve().parent), Path(text).name
    reader = lambda: JsonlReader(folder, glob_pattern=name)
    steps = [
        ([reader(), MinhashDedupSignature(f"{out}/signatures", config=config)], 1),
        ([MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)], config.num_buckets),
        ([MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config=config)], 1),
        ([reader(), MinhashDedupFilter(f"{out}/remove"), JsonlWriter(f"{out}/kept", compression=None)], 1),
    ]
    begin = time.time()
    for number, (pipeline, tasks) in enumerate(steps):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{out}/logs{number}").run()
    seconds = time.time() - begin
    kept = sum(1 for file in Path(out, "kept").rglob("*.jsonl") for _ in open(file))
    print(json.dumps({"seconds": seconds, "kept": kept}))


def filter_(text):
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    rules = {
        "gopher-repetition": GopherRepetitionFilter(),
        "gopher-quality": GopherQualityFilter(),
        "c4": C4QualityFilter(),
        "fineweb": FineWebQualityFilter(),
    }
    for number, line in enumerate(open(text)):
        for name, rule in rules.items():
            document = Document(text=json.loads(line)["text"], id=str(number))
            try:
                result = rule.filter(document)
            except ZeroDivisionError:
                result = (False, "division by zero")
            print(number, name, "kept" if result is True else result[1] if isinstance(result, tuple) else "dropped")


if __name__ == "__main__":
    what, text, *out = sys.argv[1:]
    dedup(text, out[0]) if what == "dedup" else filter_(text)
