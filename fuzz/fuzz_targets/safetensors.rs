#![no_main]
//! Every tensor of an accepted file must be readable from its first to its last byte.

use libfuzzer_sys::fuzz_target;
use trainyard_model::weights::TensorFile;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("trainyard-fuzz-{}.safetensors", std::process::id()));
    std::fs::write(&path, bytes).expect("the temporary folder is writable");
    let Ok(file) = TensorFile::open(&path) else { return };
    for (name, tensor) in file.tensors() {
        let mut contents = vec![0; (tensor.range.end - tensor.range.start) as usize];
        file.read(tensor, 0, &mut contents).unwrap_or_else(|error| panic!("{name}: {error}"));
        if let Some(encoding) = tensor.encoding() {
            let (elements, bytes) = encoding.block();
            assert_eq!(contents.len(), tensor.shape.iter().product::<usize>() / elements * bytes);
        }
    }
});
