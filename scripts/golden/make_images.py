"""Numbers of Pillow and torchvision for the tests of crates/data/src/images.

    python scripts/golden/make_images.py > crates/data/tests/golden/images.json

Needs torchvision, Pillow and numpy. The test makes the same image from the formula of `picture`.
"""

import io
import json

import numpy
import torchvision.transforms.v2.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import InterpolationMode


def picture(width, height):
    y, x, c = numpy.meshgrid(numpy.arange(height), numpy.arange(width), numpy.arange(3), indexing="ij")
    values = (x * x * 3 + y * 11 + x * y * (c + 1) + c * 70 + 9) % 256
    return Image.fromarray(values.astype(numpy.uint8), "RGB")


def flat(image):
    return numpy.asarray(image.convert("RGB")).tobytes().hex()


def operations():
    image = picture(9, 7)
    nearest = dict(interpolation=InterpolationMode.NEAREST, fill=None)
    affine = dict(angle=0.0, translate=[0, 0], scale=1.0, shear=[0.0, 0.0], center=[0, 0], **nearest)
    degrees = lambda slope: float(numpy.degrees(numpy.arctan(slope)))
    yield "ShearX", 0.21, F.affine(image, **{**affine, "shear": [degrees(0.21), 0.0]})
    yield "ShearX", -0.21, F.affine(image, **{**affine, "shear": [degrees(-0.21), 0.0]})
    yield "ShearY", 0.3, F.affine(image, **{**affine, "shear": [0.0, degrees(0.3)]})
    yield "TranslateX", 2.9, F.affine(image, **{**affine, "translate": [2, 0], "center": None})
    yield "TranslateY", -2.9, F.affine(image, **{**affine, "translate": [0, -2], "center": None})
    yield "Rotate", 27.0, F.rotate(image, 27.0, **nearest)
    yield "Rotate", -12.0, F.rotate(image, -12.0, **nearest)
    for strength in (0.63, -0.63):
        yield "Brightness", strength, ImageEnhance.Brightness(image).enhance(1 + strength)
        yield "Color", strength, ImageEnhance.Color(image).enhance(1 + strength)
        yield "Contrast", strength, ImageEnhance.Contrast(image).enhance(1 + strength)
        yield "Sharpness", strength, ImageEnhance.Sharpness(image).enhance(1 + strength)
    yield "Posterize", 5.0, ImageOps.posterize(image, 5)
    yield "Solarize", 178.5, ImageOps.solarize(image, 178.5)
    dim = ImageEnhance.Brightness(image).enhance(0.5)
    yield "AutoContrast", 0.0, ImageOps.autocontrast(dim)
    # Fewer than 255 pixels are left as they are.
    yield "Equalize", 0.0, ImageOps.equalize(dim)
    yield "Equalize", 0.0, ImageOps.equalize(ImageEnhance.Brightness(picture(24, 20)).enhance(0.5))


def resized():
    for (width, height), (left, top, w, h), (to_w, to_h) in [
        ((40, 30), (0, 0, 40, 30), (8, 8)),
        ((40, 30), (7, 5, 23, 19), (8, 8)),
        ((40, 30), (3, 2, 5, 4), (9, 9)),
        ((17, 29), (1, 0, 16, 29), (7, 5)),
    ]:
        image = F.resized_crop(picture(width, height), top, left, h, w, [to_h, to_w], antialias=True)
        yield {"size": [width, height], "window": [left, top, w, h], "to": [to_w, to_h], "pixels": flat(image)}


def evaluated():
    for size, shorter, square in [((40, 30), 10, 8), ((17, 29), 9, 8), ((30, 30), 11, 8), ((12, 31), 6, 8)]:
        image = F.center_crop(F.resize(picture(*size), [shorter], antialias=True), [square, square])
        yield {"size": size, "shorter": shorter, "square": square, "pixels": flat(image)}


def files():
    """Small files of every kind, and their pixels as Pillow has them."""
    y, x = numpy.meshgrid(numpy.arange(13), numpy.arange(18), indexing="ij")
    smooth = numpy.stack([x * 12 + 20, y * 16 + 10, 120 + x * 3 - y * 2], axis=-1).astype(numpy.uint8)
    rgb = Image.fromarray(smooth, "RGB")
    exif = Image.Exif()

    def file(name, image, kind, **options):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        pixels = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
        if pixels.mode == "I;16":
            # Pillow clips 16 bits at 255; the upper byte is what every other reader takes.
            pixels = Image.fromarray((numpy.asarray(pixels) >> 8).astype(numpy.uint8))
        pixels = pixels.convert("RGB")
        return {"name": name, "bytes": buffer.getvalue().hex(), "size": list(pixels.size), "pixels": flat(pixels)}

    yield file("baseline.jpg", rgb, "JPEG", quality=92)
    yield file("full_chroma.jpg", rgb, "JPEG", quality=92, subsampling=0)
    yield file("progressive.jpg", rgb, "JPEG", quality=92, progressive=True)
    yield file("grey.jpg", rgb.convert("L"), "JPEG", quality=92)
    yield file("cmyk.jpg", rgb.convert("CMYK"), "JPEG", quality=92)
    for orientation in range(2, 9):
        exif[274] = orientation
        yield file(f"turned_{orientation}.png", rgb.crop((0, 0, 5, 4)), "PNG", exif=exif)
    exif[274] = 6
    yield file("turned.jpg", rgb, "JPEG", quality=92, exif=exif)
    yield file("rgb.png", rgb, "PNG")
    yield file("alpha.png", Image.merge("RGBA", [*rgb.split(), rgb.convert("L")]), "PNG")
    yield file("grey.png", rgb.convert("L"), "PNG")
    yield file("grey_alpha.png", Image.merge("LA", [rgb.convert("L"), rgb.split()[0]]), "PNG")
    yield file("palette.png", rgb.quantize(16), "PNG")
    yield file("bits.png", rgb.convert("1"), "PNG")
    deep = Image.fromarray((smooth[:, :, 0].astype(numpy.uint16) << 8) + 77)
    yield file("sixteen_bit.png", deep, "PNG")
    yield file("lossless.webp", rgb, "WEBP", lossless=True)
    yield file("lossy.webp", rgb, "WEBP", quality=90)


def hues():
    image = picture(9, 7)
    for turn in (0.3, -0.2, 0.5):
        yield {"turn": turn, "pixels": flat(F.adjust_hue(image, turn))}


print(
    json.dumps(
        {
            "operations": [
                {"name": name, "strength": strength, "size": image.size, "pixels": flat(image)}
                for name, strength, image in operations()
            ],
            "resized": list(resized()),
            "evaluated": list(evaluated()),
            "hues": list(hues()),
            "files": list(files()),
        },
        separators=(",", ":"),
    )
)
