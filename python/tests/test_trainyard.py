"""Tests of the module against the program that TRAINYARD names."""

import os
import struct
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import trainyard

TINY = """
[run]
name = 'tiny'
[model]
family = 'llama'
dim = 32
layers = 1
heads = 2
max_sequence_length = 32
[tokenizer]
kind = 'bytes'
[data]
train = ['text.txt']
[training]
steps = 4
micro_batch_size = 2
sequence_length = 32
[compute]
threads = 1
"""


class Folder(unittest.TestCase):
    """A test in a folder of its own, with a text and a configuration."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder.name)
        Path("text.txt").write_text("".join(f"{n * 7919 % 311} is a number.\n" for n in range(500)))
        Path("tiny.toml").write_text(TINY)


class Plans(unittest.TestCase):
    def test_a_plan_is_a_dictionary_and_options_are_keyword_arguments(self):
        answer = trainyard.plan(
            model="llama-1b", cluster="1x8xH100", global_batch=64, sequence_length=4096, stack="trainyard", top=2
        )
        self.assertEqual(answer["global_batch"], 64)
        self.assertLessEqual(len(answer["plans"]), 2)
        self.assertGreater(answer["plans"][0]["step_s"], 0.0)

    def test_what_the_program_says_is_the_error(self):
        with self.assertRaises(trainyard.TrainyardError) as caught:
            trainyard.plan(model="nobody-1b", cluster="1x8xH100", global_batch=64)
        self.assertTrue(str(caught.exception).startswith("no model is called `nobody-1b`"), caught.exception)
        self.assertNotEqual(caught.exception.code, 0)

    def test_a_program_that_is_not_there_is_named(self):
        with unittest.mock.patch.dict(os.environ, {"TRAINYARD": "/no/such/program"}):
            with self.assertRaisesRegex(FileNotFoundError, "/no/such/program"):
                trainyard.runs()


class Runs(Folder):
    def test_a_run_is_trained_read_resumed_and_used(self):
        run = trainyard.train("tiny.toml", settings={"training.seed": 3, "data.train": ["text.txt"]}, quiet=True)
        self.assertEqual((run.folder.name, run.config["training"]["seed"], run.model["dim"]), ("tiny", 3, 32))
        self.assertEqual([record["step"] for record in run.metrics()], [1, 2, 3, 4])
        # The text that was tokenized for it, by bytes.
        [prepared] = Path("runs/data-cache").glob("*.train.bin")
        self.assertIn(bytes(trainyard.TokenFile(prepared)[5:40]), Path("text.txt").read_bytes())
        run.resume(settings={"training.steps": 6}, quiet=True)
        self.assertEqual(run.metrics()[-1]["step"], 6)
        self.assertGreater(run.evaluate("text.txt", tokens_max=64)["loss"], 0.0)
        self.assertIn("run", run.doctor())
        self.assertTrue((run.export("out") / "config.json").is_file())
        self.assertEqual(run.generate("1", tokens=4, seed=0), run.generate("1", tokens=4, seed=0))
        self.assertEqual([one["name"] for one in trainyard.runs(where=["dim=32"])], ["tiny"])

    def test_a_folder_without_a_run_and_half_a_line(self):
        with self.assertRaises(FileNotFoundError):
            trainyard.Run(".")
        Path("config.toml").write_text("")
        Path("metrics.jsonl").write_text('{"step": 1}\n{"st')
        self.assertEqual(trainyard.Run(".").metrics(), [{"step": 1}])
        self.assertEqual(trainyard.Run(".").evaluations(), [])


def token_file(prefix, code, kind, documents):
    """Writes a token file by its specification."""
    tokens = [token for document in documents for token in document]
    Path(prefix + ".bin").write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    size = struct.calcsize(kind)
    starts = [sum(map(len, documents[:n])) * size for n in range(len(documents))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += struct.pack(f"<{len(documents)}i", *map(len, documents)) + struct.pack(f"<{len(documents)}q", *starts)
    Path(prefix + ".idx").write_bytes(index + struct.pack(f"<{len(documents) + 1}q", *range(len(documents) + 1)))


class Tokens(Folder):
    def test_every_type_of_token_is_read(self):
        for code, kind in [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]:
            token_file("data", code, kind, [[1, 2, 3], [], [4, 120]])
            tokens = trainyard.TokenFile("data.bin")
            self.assertEqual((len(tokens), tokens[0:9], tokens[4]), (5, [1, 2, 3, 4, 120], 120))
            self.assertEqual(tokens.documents, [range(0, 3), range(3, 3), range(3, 5)])

    def test_damaged_files_are_refused(self):
        token_file("data", 8, "H", [[1, 2, 3]])
        whole = Path("data.idx").read_bytes()
        for damaged in (b"", whole[:20], whole[:-1], b"x" + whole[1:], whole[:17] + b"\x63" + whole[18:]):
            Path("data.idx").write_bytes(damaged)
            with self.assertRaisesRegex(ValueError, "data.idx"):
                trainyard.TokenFile("data")
        Path("data.idx").write_bytes(whole)
        Path("data.bin").write_bytes(b"\0\0")
        with self.assertRaisesRegex(ValueError, "has 1 tokens, and its index says 3"):
            trainyard.TokenFile("data")

    def test_samples_follow_one_another(self):
        try:
            import torch
        except ImportError:
            self.skipTest("no PyTorch")
        token_file("data", 8, "H", [[n * 3 for n in range(70)]])
        samples = trainyard.TokenDataset("data", 32)
        self.assertEqual(len(samples), 2)
        self.assertEqual(samples[1]["input_ids"].tolist(), [n * 3 for n in range(32, 64)])
        self.assertEqual(samples[-1]["labels"].tolist(), [n * 3 for n in range(33, 65)])
        with self.assertRaises(IndexError):
            samples[2]
        batches = torch.utils.data.DataLoader(samples, batch_size=2, num_workers=1)
        self.assertEqual([batch["labels"].shape for batch in batches], [(2, 32)])


if __name__ == "__main__":
    unittest.main()
