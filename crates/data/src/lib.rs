//! Corpora, tokenizers, token files, packing and loaders.
