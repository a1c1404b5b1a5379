//! Conversations as training text: a record's messages, written by the model's chat template, and
//! the parts of it that are learned.
//!
//! A template is the Jinja program of a `tokenizer_config.json` or `chat_template.jinja`, which
//! transformers runs (`apply_chat_template`). It is run here with the same settings by the crate
//! `minijinja`. `strftime_now` is not defined: with it the data would depend on the day. Templates
//! that ask for it have a fixed date beside it.
//!
//! Answers are found in one of two ways. A template that marks them by `{% generation %}` says
//! where they are. Of another one, an answer is what the text of the conversation up to it has
//! more than the text that asks for it (`add_generation_prompt`). Where the second text does not
//! begin with the first, the place of the answer is not known, and that is an error.

use std::fmt::{self, Debug};
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use regex::Regex;
use serde_json::{Map, Value};

use crate::error::{DataError, Result};
use crate::tokenizer::Tokenizer;

/// The template of ChatML, under the name `chatml`: roles and contents between `<|im_start|>` and
/// `<|im_end|>`.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                          '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
                          {% endif %}";

/// The characters that stand for the ends of an answer while a template runs. They mean nothing in
/// Unicode.
const MARKS: [char; 2] = ['\u{10fff0}', '\u{10fff1}'];

/// The parts of a conversation that are targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossOn {
    /// The assistant's messages, with the token that ends its turn.
    Answers,
    /// The last of these.
    LastAnswer,
    /// Everything.
    All,
}

impl LossOn {
    /// The name that is part of a preparation's identity.
    pub(crate) fn name(self) -> &'static str {
        match self {
            LossOn::Answers => "answers",
            LossOn::LastAnswer => "last_answer",
            LossOn::All => "all",
        }
    }
}

/// How records become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatOptions {
    /// The template in Jinja; None where records need none (prompt and completion as texts).
    pub template: Option<String>,
    /// The part that is learned.
    pub loss_on: LossOn,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// All of it.
    pub text: String,
    /// The bytes of `text` that are learned, in order.
    pub learned: Vec<Range<usize>>,
    /// True if an end-of-text token belongs behind it, which is learned too. A template writes its
    /// own.
    pub wants_end: bool,
}

/// A chat template, ready to run.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// True if it marks answers itself.
    marks: bool,
    /// The tokens that it may name.
    names: Vec<(&'static str, String)>,
}

impl Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("marks", &self.marks).field("names", &self.names).finish()
    }
}

/// The name of the only template of an environment.
const NAME: &str = "chat template";

impl ChatTemplate {
    /// Compiles `source` for texts of `tokenizer`.
    ///
    /// # Errors
    /// It is not Jinja.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        let (source, marks) = with_marks(source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |problem: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, problem))
        });
        environment.add_template_owned(NAME, source).map_err(|error| {
            let what = format!("its chat template cannot be read: {}", in_words(&error));
            DataError::tokenizer(tokenizer.kind(), what, "repair it, or give another one")
        })?;
        let named = ["bos_token", "eos_token", "unk_token", "pad_token"];
        let names = named.into_iter().filter_map(|key| Some((key, tokenizer.special(key)?))).collect();
        Ok(ChatTemplate { environment, marks, names })
    }

    /// The text of `messages`; with `asks`, up to where an answer begins.
    ///
    /// # Errors
    /// The template refuses these messages.
    pub fn render(&self, messages: &[Value], tools: Option<&Value>, asks: bool) -> Result<String, String> {
        let mut context: Vec<(&str, Jinja)> = vec![
            ("messages", Jinja::from(Serde(messages))),
            ("add_generation_prompt", asks.into()),
            ("tools", tools.map_or(Jinja::from(()), |tools| Jinja::from(Serde(tools)))),
        ];
        context.extend(self.names.iter().map(|(key, token)| (*key, Jinja::from(token.as_str()))));
        let template = self.environment.get_template(NAME).map_err(|error| in_words(&error))?;
        let text = template.render(Jinja::from_pairs(context));
        text.map_err(|error| format!("the chat template refuses it: {}", in_words(&error)))
    }

    /// The text that asks for an answer to one message of the user.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn prompt(&self, message: &str) -> Result<String, String> {
        let message = serde_json::json!({ "role": "user", "content": message });
        Ok(self.render(&[message], None, true)?.replace(MARKS, ""))
    }

    /// The special token that the template puts behind an answer; None if it puts something else.
    pub fn end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let say = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
        let whole = self.render(&[say("user", "a"), say("assistant", "\u{2042}")], None, false).ok()?;
        let behind = whole.rsplit('\u{2042}').next()?.replace(MARKS, "");
        tokenizer.encode(&behind).ok()?.first().copied().filter(|token| tokenizer.is_special(*token))
    }

    /// The text of a whole conversation, and where the answers after the first `given` messages
    /// are.
    fn conversation(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        given: usize,
        loss_on: LossOn,
    ) -> Result<Conversation, String> {
        let whole = self.render(messages, tools, false)?;
        let says = |message: &Value| message.get("role").and_then(Value::as_str) == Some("assistant");
        let mut answers: Vec<usize> = (given..messages.len()).filter(|at| says(&messages[*at])).collect();
        let (text, marked) = unmarked(&whole)?;
        if loss_on == LossOn::All {
            return Ok(Conversation { learned: std::iter::once(0..text.len()).collect(), text, wants_end: false });
        }
        if answers.is_empty() {
            return Err("has no answer: none of its messages is the assistant's".into());
        }
        if loss_on == LossOn::LastAnswer {
            answers.drain(..answers.len() - 1);
        }
        if self.marks {
            // Of the answers, those that come last count.
            let first = marked.len().checked_sub(answers.len()).filter(|_| !marked.is_empty());
            let first = first.ok_or("the chat template marks fewer answers than there are")?;
            return Ok(Conversation { learned: marked[first..].to_vec(), text, wants_end: false });
        }
        let mut learned = Vec::with_capacity(answers.len());
        for at in answers {
            let before = self.render(&messages[..at], tools, true)?;
            let after = match at + 1 == messages.len() {
                true => text.clone(),
                false => self.render(&messages[..=at], tools, false)?,
            };
            if !(after.starts_with(&before) && text.starts_with(&after)) {
                return Err(format!(
                    "message {} is rendered differently by the chat template with the generation prompt before it, or once \
                     others follow: learn the last answer alone (loss_on), or give a template with {{% generation %}}",
                    at + 1
                ));
            }
            learned.push(before.len()..after.len());
        }
        Ok(Conversation { text, learned, wants_end: false })
    }
}

/// A preparation's way from records to text.
#[derive(Debug)]
pub struct Chat {
    template: Option<ChatTemplate>,
    loss_on: LossOn,
}

impl Chat {
    /// Compiles the template of `options`.
    ///
    /// # Errors
    /// It is not Jinja.
    pub fn new(options: &ChatOptions, tokenizer: &Tokenizer) -> Result<Chat> {
        let template = options.template.as_ref().map(|source| ChatTemplate::new(source, tokenizer)).transpose()?;
        Ok(Chat { template, loss_on: options.loss_on })
    }

    /// The conversation in a JSON record:
    ///
    /// | fields | form |
    /// |---|---|
    /// | `messages`, perhaps `tools` | objects with `role` and `content` (OpenAI, Hugging Face) |
    /// | `conversations` | objects with `from` and `value` (ShareGPT) |
    /// | `prompt`, `completion` | texts, or lists of messages; the completion is learned |
    ///
    /// # Errors
    /// A record of another form; what the template says of it.
    pub fn read(&self, record: &str) -> Result<Conversation, String> {
        if record.contains(MARKS) {
            return Err(format!("contains U+{:X} or U+{:X}, which mean nothing", MARKS[0] as u32, MARKS[1] as u32));
        }
        let record: Value = serde_json::from_str(record).map_err(|error| format!("is not valid JSON ({error})"))?;
        let Value::Object(record) = record else { return Err("is not a JSON object".into()) };
        let tools = record.get("tools").filter(|tools| !tools.is_null());
        if let Some(messages) = record.get("messages") {
            return self.by_template(list("messages", messages)?, tools, 0);
        }
        if let Some(turns) = record.get("conversations") {
            let messages = list("conversations", turns)?.iter().map(of_share_gpt).collect::<Result<Vec<_>, _>>()?;
            return self.by_template(&messages, tools, 0);
        }
        match (record.get("prompt"), record.get("completion")) {
            (Some(Value::String(prompt)), Some(Value::String(completion))) => {
                let text = format!("{prompt}{completion}");
                let begin = if self.loss_on == LossOn::All { 0 } else { prompt.len() };
                if completion.is_empty() {
                    return Err("has an empty completion".into());
                }
                Ok(Conversation { learned: std::iter::once(begin..text.len()).collect(), text, wants_end: true })
            }
            (Some(prompt @ Value::Array(_)), Some(completion @ Value::Array(_))) => {
                let (prompt, completion) = (list("prompt", prompt)?, list("completion", completion)?);
                self.by_template(&[prompt, completion].concat(), tools, prompt.len())
            }
            (Some(_), Some(_)) => Err("has a prompt and a completion that are not both texts or both lists".into()),
            _ => Err(format!(
                "has no conversation: neither `messages`, nor `conversations`, nor `prompt` and `completion` (fields: {})",
                record.keys().take(10).cloned().collect::<Vec<_>>().join(", ")
            )),
        }
    }

    fn by_template(&self, messages: &[Value], tools: Option<&Value>, given: usize) -> Result<Conversation, String> {
        let template = self.template.as_ref().ok_or("has messages, and the tokenizer has no chat template")?;
        if messages.is_empty() {
            return Err("has no messages".into());
        }
        template.conversation(messages, tools, given, self.loss_on)
    }
}

fn list<'v>(field: &str, value: &'v Value) -> Result<&'v [Value], String> {
    let objects = value.as_array().filter(|all| all.iter().all(Value::is_object));
    objects.map(Vec::as_slice).ok_or_else(|| format!("field `{field}` is no list of messages"))
}

/// A turn of ShareGPT's form as a message.
fn of_share_gpt(turn: &Value) -> Result<Value, String> {
    let (Some(from), Some(value)) = (turn.get("from").and_then(Value::as_str), turn.get("value")) else {
        return Err("has a turn without `from` and `value`".into());
    };
    let role = match from {
        "human" => "user",
        "gpt" | "chatgpt" | "model" => "assistant",
        other => other,
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), value.clone());
    Ok(Value::Object(message))
}

/// The template with marks where it says `{% generation %}`, and whether it does. A block with a
/// mark in it is trimmed as the tag would be.
fn with_marks(source: &str) -> (String, bool) {
    let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid pattern");
    let marks = tag.is_match(source);
    let replaced = tag.replace_all(source, |found: &regex::Captures<'_>| {
        let mark = MARKS[usize::from(found.get(2).is_some())];
        format!("{{%{} if true %}}{{{{ \"{mark}\" }}}}{{% endif {}%}}", &found[1], &found[3])
    });
    (replaced.into_owned(), marks)
}

/// The text without marks, and the ranges that they enclose.
fn unmarked(text: &str) -> Result<(String, Vec<Range<usize>>), String> {
    let (mut plain, mut ranges, mut begin) = (String::with_capacity(text.len()), Vec::new(), None);
    for part in text.split_inclusive(MARKS) {
        let mark = part.chars().next_back().filter(|last| MARKS.contains(last));
        plain.push_str(mark.map_or(part, |mark| &part[..part.len() - mark.len_utf8()]));
        match (mark, begin) {
            (None, _) => {}
            (Some(mark), None) if mark == MARKS[0] => begin = Some(plain.len()),
            (Some(mark), Some(from)) if mark == MARKS[1] => {
                ranges.push(from..plain.len());
                begin = None;
            }
            _ => return Err("the chat template's {% generation %} blocks are not one after the other".into()),
        }
    }
    Ok((plain, ranges))
}

/// JSON as transformers' `tojson` writes it: with spaces, without HTML's escapes, in the order
/// given.
fn to_json(value: &Jinja, options: minijinja::value::Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Those that change what is written are refused.
    for key in ["ensure_ascii", "sort_keys"] {
        if options.get::<Option<bool>>(key)? == Some(true) {
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson has no {key} here")));
        }
    }
    options.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, format!("no JSON: {error}")))?;
    let mut out = String::new();
    write_json(&value, indent, 0, &mut out);
    Ok(out)
}

/// Writes JSON as Python's `json.dumps` does.
fn write_json(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match value {
        Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (number, item) in items.iter().enumerate() {
                out.push_str(if number > 0 { comma } else { "" });
                line(depth + 1, out);
                write_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        Value::Object(fields) if !fields.is_empty() => {
            out.push('{');
            for (number, (key, item)) in fields.iter().enumerate() {
                out.push_str(if number > 0 { comma } else { "" });
                line(depth + 1, out);
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

/// An error of a template with its line.
fn in_words(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| detail.clone(), |line| format!("line {line}: {detail}"))
}

#[cfg(test)]
mod tests;
