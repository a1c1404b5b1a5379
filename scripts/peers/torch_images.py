"""Images a second of PyTorch's DataLoader with torchvision, for `cargo xtask bench images`.

    python scripts/peers/torch_images.py make FOLDER     # 300 JPEGs of 500 x 400 in 3 classes
    python scripts/peers/torch_images.py run FOLDER --workers 2 --seconds 8

`run` prints one JSON object. The recipe is that of `trainyard data bench --images`: a random resized
crop to 224 pixels, a flip of every second image, normalisation.
"""

import argparse
import json
import pathlib
import time


def make(folder, images=300):
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    for number in range(images):
        # Smooth fields of several scales with noise, as photographs have.
        field = numpy.zeros((400, 500, 3), numpy.float32)
        for cells, weight in ((4, 70.0), (12, 35.0), (40, 18.0), (120, 8.0)):
            small = random.normal(size=(cells, cells, 3)).astype(numpy.float32)
            for channel in range(3):
                plane = Image.fromarray(small[:, :, channel]).resize((500, 400), Image.BICUBIC)
                field[:, :, channel] += weight * numpy.asarray(plane)
        field += random.normal(size=field.shape) * 5 + 120
        place = pathlib.Path(folder, f"class_{number % 3}", f"{number:04}.jpg")
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = numpy.clip(field, 0, 255).astype(numpy.uint8)
        Image.fromarray(pixels).save(place, quality=85 + number % 6)


def run(folder, workers, seconds, batch):
    import torch
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images = datasets.ImageFolder(folder, recipe)
    # One long epoch: starting workers again at the end of a short one would count against PyTorch.
    sampler = torch.utils.data.RandomSampler(images, replacement=True, num_samples=10**7)
    loader = torch.utils.data.DataLoader(images, batch, sampler=sampler, num_workers=workers, drop_last=True)
    batches = iter(loader)
    for _ in range(2 * workers + 1):
        next(batches)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        count += len(next(batches)[0])
    print(json.dumps({"images_per_second": count / (time.perf_counter() - begin), "workers": workers}))


parser = argparse.ArgumentParser()
parser.add_argument("action", choices=("make", "run"))
parser.add_argument("folder")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seconds", type=float, default=8.0)
parser.add_argument("--batch", type=int, default=32)
arguments = parser.parse_args()
if arguments.action == "make":
    make(arguments.folder)
else:
    run(arguments.folder, arguments.workers, arguments.seconds, arguments.batch)
