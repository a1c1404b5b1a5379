//! The keys of conversations in `[data]`.

use super::value::choices;

choices! {
    /// A form of text corpora.
    DataFormat {
        /// Documents.
        Text = "text",
        /// JSONL of conversations: `messages` (`role`, `content`), `conversations` (`from`,
        /// `value`), or `prompt` and `completion`.
        Chat = "chat",
        /// Images: a folder with a folder for each class, or WebDataset tar with `cls` or `json`.
        Images = "images",
    }
}

choices! {
    /// The part of a conversation that is learned.
    LossOnPart {
        /// Every message of the assistant, or the completion.
        Answers = "answers",
        /// The last of them.
        LastAnswer = "last_answer",
        /// Everything.
        All = "all",
    }
}
