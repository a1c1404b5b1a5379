//! The tokenizer in a GGUF file, as the text of a `tokenizer.json`, and back.
//!
//! The file has the vocabulary with a type and perhaps a score of each token, perhaps the merges,
//! and names: of the kind of tokenizer (`tokenizer.ggml.model`) and of the pattern by which text is
//! cut beforehand (`tokenizer.ggml.pre`). Two kinds are read, `gpt2` (byte-level BPE) and `llama`
//! (SentencePiece), and turned into what transformers makes of them
//! (`integrations/gguf/gguf_tokenizer_mapping.py`).

use super::{MetaValue, Metadata};
use crate::spec::ModelSpec;
use serde_json::{Map, Value, json};
use std::cmp::Ordering;
use std::collections::HashMap;

/// Types of tokens.
const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;

/// SentencePiece's stand-in for a space.
const SPACE: &str = "\u{2581}";

/// The pattern of Llama 3 and of others with its name.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of Qwen2 and Qwen3.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// True if the file has a tokenizer.
pub(super) fn is_there(metadata: &Metadata) -> bool {
    metadata.text("tokenizer.ggml.model").is_some_and(|kind| kind != "no_vocab")
}

/// The tokenizer's description.
///
/// # Errors
/// A kind or a pattern that is not known, and a vocabulary that is damaged.
pub(super) fn describe(metadata: &Metadata) -> Result<Value, String> {
    let kind = metadata.text("tokenizer.ggml.model").ok_or("it has no tokenizer: set tokenizer.path")?;
    let tokens = metadata.texts("tokenizer.ggml.tokens").ok_or("its tokenizer has no list of tokens")?;
    let types = whole_numbers(metadata, "tokenizer.ggml.token_type").unwrap_or_default();
    let is_gemma = metadata.text("general.architecture").is_some_and(|name| name.starts_with("gemma"));
    // Gemma's files have runs of spaces as such, and its tokenizer looks for their stand-ins.
    let respell = |token: &String| match is_gemma && token.contains(' ') && token.trim().is_empty() {
        true => SPACE.repeat(token.chars().count()),
        false => token.clone(),
    };
    let vocabulary: Vec<String> = tokens.iter().map(respell).collect();
    let ids: HashMap<&str, usize> = vocabulary.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
    let pair =
        |merge: &String| merge.split_once(' ').map(owned).ok_or_else(|| format!("its merge `{merge}` is no pair"));
    let merges = match metadata.texts("tokenizer.ggml.merges") {
        Some(merges) => merges.iter().map(pair).collect::<Result<Vec<_>, _>>()?,
        None => merges_of(metadata, &vocabulary, &ids, is_gemma)?,
    };
    let parts = match (kind, is_gemma) {
        ("gpt2", _) => byte_level(metadata)?,
        ("llama", true) => json!({
            "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": SPACE },
            "pre_tokenizer": split(json!({ "String": " " }), "MergedWithPrevious"),
            "decoder": { "type": "Sequence", "decoders": pieces() },
        }),
        ("llama", false) => sentence_piece(metadata),
        _ => return Err(format!("its tokenizer is of kind `{kind}`, known are gpt2 and llama: set tokenizer.path")),
    };
    let added: Vec<Value> = tokens
        .iter()
        .zip(&types)
        .enumerate()
        .filter(|(_, (token, kind))| **kind == CONTROL || (**kind == USER_DEFINED && ids.contains_key(token.as_str())))
        .map(|(id, (token, kind))| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL,
            })
        })
        .collect();
    let in_order: Map<String, Value> =
        vocabulary.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let byte_fallback = kind == "llama";
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added,
        "normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": around(metadata, kind, &tokens)?,
        "decoder": parts["decoder"],
        "model": {
            "type": "BPE", "dropout": null, "unk_token": is_gemma.then_some("<unk>"),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback, "ignore_merges": false,
            "vocab": in_order, "merges": merges,
        },
    }))
}

fn owned((left, right): (&str, &str)) -> [String; 2] {
    [left.to_owned(), right.to_owned()]
}

fn whole_numbers(metadata: &Metadata, key: &str) -> Option<Vec<u64>> {
    let number = |value: &MetaValue| match value {
        MetaValue::Integer(n) => u64::try_from(*n).ok(),
        _ => None,
    };
    metadata.array(key)?.iter().map(number).collect()
}

/// Byte-level BPE, with the pattern that cuts text.
fn byte_level(metadata: &Metadata) -> Result<Value, String> {
    let name = metadata.text("tokenizer.ggml.pre").unwrap_or("default");
    let Some((_, pre_tokenizer)) = PATTERNS.iter().find(|(names, _)| names.contains(&name)) else {
        return Err(format!(
            "its tokenizer cuts text by the pattern `{name}`, which is not known: set tokenizer.path to the \
             model's tokenizer.json, or put that beside the file"
        ));
    };
    Ok(json!({ "normalizer": null, "pre_tokenizer": pre_tokenizer(), "decoder": bytes(true) }))
}

/// The names of a pattern, the first of which is written, and what cuts text by it.
type Pattern = (&'static [&'static str], fn() -> Value);

const PATTERNS: [Pattern; 4] = [
    (&["gpt-2", "default", "gpt2"], || bytes(true)),
    (&["llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"], || by_pattern(LLAMA3)),
    (&["qwen2", "deepseek-r1-qwen"], || by_pattern(QWEN2)),
    (&["smollm"], || in_sequence(json!({ "type": "Digits", "individual_digits": true }), bytes(true))),
];

fn bytes(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

fn in_sequence(first: Value, then: Value) -> Value {
    json!({ "type": "Sequence", "pretokenizers": [first, then] })
}

fn by_pattern(pattern: &str) -> Value {
    in_sequence(split(json!({ "Regex": pattern }), "Isolated"), bytes(false))
}

/// Adds the tokenizer that `text`, a `tokenizer.json`, describes. Rows of the embedding without a
/// token get one that no text has.
///
/// # Errors
/// A tokenizer that is not byte-level BPE, or cuts text by a pattern without a name.
pub(super) fn write(text: &str, spec: &ModelSpec, metadata: &mut Metadata) -> Result<(), String> {
    let json: Value = serde_json::from_str(text).map_err(|error| format!("its tokenizer is no JSON: {error}"))?;
    let refuse = |what: &str| {
        let instead = "export without a tokenizer (--no-tokenizer) and keep the model's tokenizer.json beside the file";
        Err(format!("its tokenizer {what}, and byte-level BPE is written: {instead}"))
    };
    let model = &json["model"];
    if model["type"] != "BPE" || model["byte_fallback"] == true {
        return refuse("is of another kind");
    }
    let pre = plain_bytes(json["pre_tokenizer"].clone());
    let Some((names, _)) = PATTERNS.iter().find(|(_, known)| plain_bytes(known()) == pre) else {
        return refuse("cuts text by a pattern that llama.cpp has no name for");
    };
    // llama.cpp leaves Qwen's texts as they are, too.
    if !(json["normalizer"].is_null() || names[0] == "qwen2" && json["normalizer"]["type"] == "NFC") {
        return refuse("changes texts before it cuts them");
    }
    let Some(vocabulary) = model["vocab"].as_object() else { return refuse("has no vocabulary") };
    let mut tokens: Vec<Option<(String, u64)>> = vec![None; spec.vocab_size];
    let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let special = |token: &Value| if token["special"] == true { CONTROL } else { USER_DEFINED };
    let of_vocabulary = vocabulary.iter().map(|(token, id)| (token.clone(), id.as_u64(), NORMAL));
    let of_added = added
        .iter()
        .filter_map(|token| Some((token["content"].as_str()?.to_owned(), token["id"].as_u64(), special(token))));
    for (token, id, kind) in of_vocabulary.chain(of_added) {
        match id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?)) {
            Some(place) => *place = Some((token, kind)),
            None => {
                return Err(format!("its tokenizer has more tokens than the model's {}: `{token}`", spec.vocab_size));
            }
        }
    }
    let tokens: Vec<(String, u64)> = tokens
        .into_iter()
        .enumerate()
        .map(|(id, token)| token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED)))
        .collect();
    let merges = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    let merge = |merge: &Value| match merge {
        Value::String(pair) => Some(pair.clone()),
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    let merges: Option<Vec<String>> = merges.iter().map(merge).collect();
    let Some(merges) = merges else { return refuse("has merges that are no pairs") };
    let texts = |values: Vec<String>| MetaValue::Array(values.into_iter().map(MetaValue::Text).collect());
    let (names_of, kinds): (Vec<String>, Vec<u64>) = tokens.into_iter().unzip();
    for (which, at, id) in [("bos", 0, spec.bos_token), ("eos", 2, spec.eos_tokens.first().copied())] {
        let around = around_in(&json["post_processor"], at);
        let is_own =
            around.is_none_or(|token| id.and_then(|id| names_of.get(id as usize)).is_some_and(|own| *own == token));
        if !is_own {
            return refuse("puts other tokens around texts than the model's first and last");
        }
        metadata.set(&format!("tokenizer.ggml.add_{which}_token"), MetaValue::Bool(around.is_some()));
    }
    metadata.set("tokenizer.ggml.model", MetaValue::Text("gpt2".into()));
    metadata.set("tokenizer.ggml.pre", MetaValue::Text(names[0].into()));
    metadata.set("tokenizer.ggml.tokens", texts(names_of));
    let kinds = kinds.into_iter().map(|kind| MetaValue::Integer(kind.into())).collect();
    metadata.set("tokenizer.ggml.token_type", MetaValue::Array(kinds));
    metadata.set("tokenizer.ggml.merges", texts(merges));
    Ok(())
}

/// The form of what cuts text, without what has no influence on tokens and with what older files
/// leave out.
fn plain_bytes(mut value: Value) -> Value {
    if let Some(parts) = value.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        parts.iter_mut().for_each(|part| *part = plain_bytes(part.take()));
    }
    if value["type"] == "ByteLevel"
        && let Some(keys) = value.as_object_mut()
    {
        keys.remove("trim_offsets");
        keys.entry("use_regex").or_insert(json!(true));
    }
    value
}

/// The token that a template puts before (0) or after (2) a text.
fn around_in(template: &Value, at: usize) -> Option<&str> {
    let parts = match template["type"].as_str()? {
        "TemplateProcessing" => template["single"].as_array()?,
        // Several processors, of which one is a template.
        _ => return template["processors"].as_array()?.iter().find_map(|inner| around_in(inner, at)),
    };
    let own = parts.iter().position(|part| part.get("Sequence").is_some())?;
    let part = if at == 0 { parts[..own].last() } else { parts.get(own + 1) };
    part?["SpecialToken"]["id"].as_str()
}

fn split(pattern: Value, behaviour: &str) -> Value {
    json!({ "type": "Split", "pattern": pattern, "behavior": behaviour, "invert": false })
}

/// The decoders of SentencePiece's tokens.
fn pieces() -> Vec<Value> {
    let replace = json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " });
    vec![replace, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })]
}

/// SentencePiece as Llama has it, and as Phi-3 has it: a space before the text, unless the file
/// says otherwise.
fn sentence_piece(metadata: &Metadata) -> Value {
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut decoders = pieces();
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let decoder = json!({ "type": "Sequence", "decoders": decoders });
    if metadata.text("general.architecture") == Some("phi3") {
        let normalizers = json!([
            { "type": "Prepend", "prepend": SPACE },
            { "type": "Replace", "pattern": { "String": " " }, "content": SPACE },
        ]);
        let normalizer = json!({ "type": "Sequence", "normalizers": normalizers });
        return json!({ "normalizer": normalizer, "pre_tokenizer": null, "decoder": decoder });
    }
    let scheme = if prefix { "first" } else { "never" };
    let pre = json!({ "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false });
    json!({ "normalizer": null, "pre_tokenizer": pre, "decoder": decoder })
}

/// The merges that a vocabulary without merges implies: every pair of tokens that make a token, the
/// best token first. That is the one with the highest score, and in Gemma's files, whose scores do
/// not follow the merges, the first one.
fn merges_of(
    metadata: &Metadata,
    vocabulary: &[String],
    ids: &HashMap<&str, usize>,
    is_gemma: bool,
) -> Result<Vec<[String; 2]>, String> {
    let score = |value: &MetaValue| match value {
        MetaValue::Float(x) => *x,
        MetaValue::Integer(n) => *n as f64,
        _ => f64::NAN,
    };
    let scores: Vec<f64> = match metadata.array("tokenizer.ggml.scores") {
        _ if is_gemma => (0..vocabulary.len()).map(|id| -(id as f64)).collect(),
        Some(scores) if scores.len() == vocabulary.len() => scores.iter().map(score).collect(),
        _ => return Err("its tokenizer has neither merges nor a score of each token".into()),
    };
    let mut merges: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
    for (token, score) in vocabulary.iter().zip(scores) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let first = merges.len();
        for (left, right) in cuts.filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right)) {
            merges.push((score, left.chars().count(), right.chars().count(), left, right));
        }
        merges[first..].sort_by_key(|merge| (ids[merge.3], ids[merge.4]));
    }
    let descending = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
    merges.sort_by(|a, b| descending(a.0, b.0).then(b.1.cmp(&a.1)).then(b.2.cmp(&a.2)));
    Ok(merges.into_iter().map(|(.., left, right)| owned((left, right))).collect())
}

/// The tokens that come before and after each text.
fn around(metadata: &Metadata, kind: &str, tokens: &[String]) -> Result<Value, String> {
    let token = |name: &str| -> Result<Option<(&String, u64)>, String> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = metadata.integer(&key) else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        token.map(|token| Some((token, id))).ok_or_else(|| format!("its {key} = {id} is no token"))
    };
    let adds = |name: &str, usual: bool| metadata.flag(&format!("tokenizer.ggml.add_{name}_token")).unwrap_or(usual);
    // llama.cpp begins texts of a SentencePiece vocabulary with a token unless the file forbids it.
    let before = token("bos")?.filter(|_| adds("bos", kind == "llama"));
    let after = token("eos")?.filter(|_| adds("eos", false));
    if before.is_none() && after.is_none() {
        return Ok(Value::Null);
    }
    let special = |(token, _): &(&String, u64), part: u64| json!({ "SpecialToken": { "id": token, "type_id": part } });
    let text = |name: &str, part: u64| {
        let text = json!({ "Sequence": { "id": name, "type_id": part } });
        let [before, after] = [&before, &after].map(|token| token.as_ref().map(|token| special(token, part)));
        before.into_iter().chain([text]).chain(after).collect::<Vec<Value>>()
    };
    let used = [before, after].into_iter().flatten();
    let special_tokens: Map<String, Value> =
        used.map(|(token, id)| (token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] }))).collect();
    let pair = [text("A", 0), text("B", 1)].concat();
    Ok(json!({
        "type": "TemplateProcessing", "single": text("A", 0), "pair": pair, "special_tokens": special_tokens,
    }))
}

#[cfg(test)]
mod tests {
    use super::super::open;
    use super::*;
    use std::path::Path;

    fn golden(name: &str) -> Metadata {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf");
        open(&folder.join(format!("tokenizer_{name}.gguf"))).unwrap().0
    }

    /// A model with the special tokens of a file.
    fn model(metadata: &Metadata, rows: usize) -> ModelSpec {
        let id = |which: &str| metadata.integer(&format!("tokenizer.ggml.{which}_token_id")).map(|id| id as u32);
        let (bos_token, eos_tokens) = (id("bos"), id("eos").into_iter().collect());
        ModelSpec { bos_token, eos_tokens, ..ModelSpec::llama(rows, 32, 1, 1, 32, 32) }
    }

    #[test]
    fn byte_level_tokenizers_are_written_as_they_are_read() {
        for name in ["gpt2", "llama3", "qwen2"] {
            let theirs = golden(name);
            let expected = describe(&theirs).unwrap();
            let rows = theirs.array("tokenizer.ggml.tokens").unwrap().len();
            let mut ours = Metadata(
                theirs
                    .0
                    .iter()
                    .filter(|(key, _)| key.ends_with("_token_id"))
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect(),
            );
            write(&expected.to_string(), &model(&theirs, rows), &mut ours).unwrap();
            assert_eq!(describe(&ours).unwrap(), expected, "{name}");
            assert_eq!(ours.texts("tokenizer.ggml.tokens"), theirs.texts("tokenizer.ggml.tokens"), "{name}");
            // Rows of the embedding without a token have one that stands for nothing.
            write(&expected.to_string(), &model(&theirs, rows + 2), &mut ours).unwrap();
            assert_eq!(ours.texts("tokenizer.ggml.tokens").unwrap()[rows + 1], format!("[PAD{}]", rows + 1));
        }
    }

    #[test]
    fn tokenizers_without_a_form_are_refused() {
        let theirs = golden("gpt2");
        let text = describe(&theirs).unwrap();
        let rows = theirs.array("tokenizer.ggml.tokens").unwrap().len();
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut text = text.clone();
            change(&mut text);
            write(&text.to_string(), &model(&theirs, rows), &mut Metadata::default()).unwrap_err()
        };
        let template = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<|other|>" } }, { "Sequence": { "id": "A" } }],
        });
        for (error, words) in [
            (changed(&|text| text["model"]["type"] = json!("Unigram")), "is of another kind"),
            (changed(&|text| text["model"]["byte_fallback"] = json!(true)), "is of another kind"),
            (changed(&|text| text["pre_tokenizer"] = by_pattern("[a-z]+")), "a pattern that llama.cpp has no name for"),
            (changed(&|text| text["normalizer"] = json!({ "type": "Lowercase" })), "changes texts before it cuts them"),
            (changed(&|text| text["model"]["vocab"]["more"] = json!(rows)), "has more tokens than the model's"),
            (changed(&|text| text["model"]["merges"] = json!([1])), "has merges that are no pairs"),
            (changed(&|text| text["post_processor"] = template.clone()), "puts other tokens around texts"),
        ] {
            assert!(error.contains(words), "{error:?} does not say {words:?}");
        }
        let error =
            write(&describe(&golden("gemma3")).unwrap().to_string(), &model(&theirs, rows), &mut Metadata::default());
        assert!(error.unwrap_err().contains("--no-tokenizer"));
    }
}
