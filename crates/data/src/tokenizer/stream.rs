//! Decodes token by token: text is returned as soon as no later token can change it.

use super::Tokenizer;

/// Decodes a growing sequence of tokens; see [`Tokenizer::stream_decoder`].
///
/// The pieces joined are the decoding of the whole. A token may end inside a character. If tokens
/// stand for bytes (bytes, byte-level BPE), the incomplete end is held back. Other decoders may
/// treat the first token of a text specially. A piece is then the difference of two decodings that
/// both begin with the same tokens, whose text was already returned.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
    /// Tokens of the last piece, as context, then those whose text was not returned yet.
    window: Vec<u32>,
    /// Number of tokens in the window that are context.
    context: usize,
}

impl StreamDecoder {
    /// Maximum number of tokens held back. A character has at most four bytes, each at most one
    /// token. If four tokens give no whole character, they are not text, and waiting longer would
    /// hold back everything behind them.
    const HELD_MAX: usize = 4;

    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), window: Vec::new(), context: 0 }
    }

    /// Takes the next token and returns the text that is now certain; often empty inside a
    /// character.
    pub fn push(&mut self, token: u32) -> String {
        if let Some(bytes) = self.tokenizer.token_bytes(token) {
            self.bytes.extend_from_slice(&bytes);
            return self.take_bytes();
        }
        self.window.push(token);
        let is_incomplete = self.window_text().ends_with('\u{FFFD}');
        if is_incomplete && self.window.len() - self.context < Self::HELD_MAX {
            return String::new();
        }
        self.take_window()
    }

    /// Returns the rest at the end of the sequence.
    pub fn finish(&mut self) -> String {
        let mut rest = String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned();
        rest.push_str(&self.take_window());
        self.window.clear();
        self.context = 0;
        rest
    }

    /// Takes all bytes except an incomplete character at their end. Bytes that can never become a
    /// character turn into U+FFFD.
    fn take_bytes(&mut self) -> String {
        let mut held = 0;
        let mut text = String::new();
        for chunk in self.bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            // Only the last chunk can be the beginning of a character rather than an error.
            let at_end = invalid.as_ptr_range().end == self.bytes.as_ptr_range().end;
            let is_beginning = |bytes| std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none());
            if at_end && is_beginning(invalid) {
                held = invalid.len();
            } else if !invalid.is_empty() {
                text.push('\u{FFFD}');
            }
        }
        self.bytes.drain(..self.bytes.len() - held);
        text
    }

    /// Text of the window without that of its context.
    fn window_text(&self) -> String {
        let context = self.tokenizer.decode(&self.window[..self.context]);
        let mut whole = self.tokenizer.decode(&self.window);
        let mut start = whole.bytes().zip(context.bytes()).take_while(|(a, b)| a == b).count();
        while !whole.is_char_boundary(start) {
            start -= 1;
        }
        whole.split_off(start)
    }

    fn take_window(&mut self) -> String {
        let text = self.window_text();
        self.window.drain(..self.context);
        self.context = self.window.len();
        text
    }
}
