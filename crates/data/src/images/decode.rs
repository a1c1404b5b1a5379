//! Decodes JPEG, PNG and WebP to upright 8-bit RGB.
//!
//! The content decides the format, not the name. Greyscale, palettes, CMYK and 16-bit samples are
//! converted; transparent pixels keep their colour, as Pillow's `convert("RGB")` keeps it. The EXIF
//! orientation is applied. An image of more than [`PIXELS_MAX`] pixels is refused by its header,
//! before memory is taken for it.
//!
//! Colour profiles are ignored, and of an animation the first frame is taken.

use std::io::Cursor;

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Most pixels of an image. Pillow warns of decompression bombs at half of it.
pub const PIXELS_MAX: u64 = 178_956_970;

/// An image of 8-bit RGB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `[height, width, 3]`.
    pub data: Vec<u8>,
}

/// Decodes the bytes of a file.
///
/// # Errors
/// The words that complete "IMAGE …", with a fault in the bytes.
pub fn decode(bytes: &[u8]) -> Result<Rgb, String> {
    let (image, exif) = match bytes {
        [0xff, 0xd8, 0xff, ..] => jpeg(bytes)?,
        [0x89, b'P', b'N', b'G', ..] => png(bytes)?,
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => webp(bytes)?,
        [] => return Err("is empty".into()),
        _ => return Err("is neither JPEG, PNG nor WebP".into()),
    };
    Ok(upright(image, exif.as_deref().and_then(orientation).unwrap_or(1)))
}

/// An image as it is stored, and its EXIF data.
type Stored = (Rgb, Option<Vec<u8>>);

fn check_size(width: usize, height: usize) -> Result<(), String> {
    let pixels = (width as u64).saturating_mul(height as u64);
    match pixels {
        0 => Err(format!("has {width} x {height} pixels")),
        1..=PIXELS_MAX => Ok(()),
        _ => Err(format!("has {width} x {height} pixels, and at most {PIXELS_MAX} are decoded")),
    }
}

fn jpeg(bytes: &[u8]) -> Result<Stored, String> {
    match jpeg_with(bytes, true) {
        // Extra bytes between segments and the like are common. A file that was cut is not decoded:
        // without strictness its missing part would be grey.
        Err(_) if has_end_of_image(bytes) => jpeg_with(bytes, false),
        decoded => decoded,
    }
}

/// True if an end-of-image marker stands in the last bytes, behind which some writers put padding.
fn has_end_of_image(bytes: &[u8]) -> bool {
    const PADDING: usize = 4096;
    bytes[bytes.len().saturating_sub(PADDING)..].windows(2).any(|pair| pair == [0xff, 0xd9])
}

fn jpeg_with(bytes: &[u8], strict: bool) -> Result<Stored, String> {
    let fault = |error| match strict || has_end_of_image(bytes) {
        _ if !has_end_of_image(bytes) => format!("is truncated ({error})"),
        _ => format!("is a damaged JPEG file ({error})"),
    };
    // Sizes are checked below, with a message that names them.
    let options = DecoderOptions::default()
        .set_strict_mode(strict)
        .set_max_width(usize::MAX)
        .set_max_height(usize::MAX)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(fault)?;
    let (width, height) = decoder.dimensions().ok_or("is a JPEG file without a size")?;
    check_size(width, height)?;
    let data = decoder.decode().map_err(fault)?;
    if data.len() != width * height * 3 {
        return Err("is a JPEG file in colours that are not converted to RGB".into());
    }
    Ok((Rgb { width, height, data }, decoder.exif().cloned()))
}

fn png(bytes: &[u8]) -> Result<Stored, String> {
    let fault = |error: png::DecodingError| match error {
        png::DecodingError::IoError(_) => "is truncated".to_owned(),
        error => format!("is a damaged PNG file ({error})"),
    };
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let header = decoder.read_header_info().map_err(fault)?;
    let (width, height) = (header.width as usize, header.height as usize);
    check_size(width, height)?;
    let mut reader = decoder.read_info().map_err(fault)?;
    let mut samples = vec![0; reader.output_buffer_size().ok_or("has too many pixels")?];
    let frame = reader.next_frame(&mut samples).map_err(fault)?;
    samples.truncate(frame.buffer_size());
    let data = match frame.color_type.samples() {
        1 => samples.iter().flat_map(|&grey| [grey; 3]).collect(),
        2 => samples.chunks_exact(2).flat_map(|pixel| [pixel[0]; 3]).collect(),
        3 => samples,
        _ => without_alpha(&samples),
    };
    let exif = reader.info().exif_metadata.as_ref().map(|exif| exif.to_vec());
    Ok((Rgb { width, height, data }, exif))
}

fn webp(bytes: &[u8]) -> Result<Stored, String> {
    let fault = |error: image_webp::DecodingError| match error {
        image_webp::DecodingError::IoError(_) => "is truncated".to_owned(),
        error => format!("is a damaged WebP file ({error})"),
    };
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(bytes)).map_err(fault)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    check_size(width, height)?;
    decoder.set_memory_limit(PIXELS_MAX as usize * 4);
    let mut samples = vec![0; decoder.output_buffer_size().ok_or("has too many pixels")?];
    decoder.read_image(&mut samples).map_err(fault)?;
    let data = if decoder.has_alpha() { without_alpha(&samples) } else { samples };
    let exif = decoder.exif_metadata().map_err(fault)?;
    Ok((Rgb { width, height, data }, exif))
}

fn without_alpha(samples: &[u8]) -> Vec<u8> {
    samples.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect()
}

/// The orientation, 1 to 8, in the first directory of EXIF data (TIFF tag 274); `None` if there is
/// none.
fn orientation(exif: &[u8]) -> Option<u8> {
    const TAG: u16 = 274;
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let is_little = match exif.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let u16_at = |at: usize| {
        let bytes = [*exif.get(at)?, *exif.get(at + 1)?];
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let bytes: [u8; 4] = exif.get(4..8)?.try_into().ok()?;
    let directory = if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) } as usize;
    for entry in 0..usize::from(u16_at(directory)?) {
        let at = directory + 2 + 12 * entry;
        if u16_at(at)? == TAG {
            return u16_at(at + 8).and_then(|value| u8::try_from(value).ok()).filter(|value| (1..=8).contains(value));
        }
    }
    None
}

/// Turns and mirrors an image as its EXIF orientation says.
fn upright(image: Rgb, orientation: u8) -> Rgb {
    let Rgb { width, height, data } = image;
    if orientation == 1 {
        return Rgb { width, height, data };
    }
    let (out_width, out_height) = if orientation >= 5 { (height, width) } else { (width, height) };
    let mut out = Vec::with_capacity(data.len());
    for y in 0..out_height {
        for x in 0..out_width {
            let (from_x, from_y) = match orientation {
                2 => (width - 1 - x, y),
                3 => (width - 1 - x, height - 1 - y),
                4 => (x, height - 1 - y),
                5 => (y, x),
                6 => (y, height - 1 - x),
                7 => (width - 1 - y, height - 1 - x),
                _ => (width - 1 - y, x),
            };
            let at = (from_y * width + from_x) * 3;
            out.extend_from_slice(&data[at..at + 3]);
        }
    }
    Rgb { width: out_width, height: out_height, data: out }
}
