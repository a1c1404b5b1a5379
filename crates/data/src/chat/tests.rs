//! Texts, ids and masks are those of transformers (`scripts/golden/make_chats.py`); answers of
//! templates that mark none; records that are refused.

use super::*;
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chats").join(name)
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&golden("tokenizer.json")).unwrap()
}

fn cases() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(golden("expected.json")).unwrap()).unwrap()
}

#[test]
fn templates_write_what_transformers_writes() {
    let tokenizer = tokenizer();
    for case in cases() {
        let text = |key: &str| case[key].as_str().unwrap().to_owned();
        let template = ChatTemplate::new(&text("template"), &tokenizer).unwrap();
        let record = &case["record"];
        let (messages, tools) = (record["messages"].as_array().unwrap(), record.get("tools"));
        let write = |asks: bool| unmarked(&template.render(messages, tools, asks).unwrap()).unwrap().0;
        assert_eq!(write(false), text("text"), "{}", case["name"]);
        assert_eq!(write(true), text("asks"), "{}", case["name"]);
        let loss_on = LossOn::Answers;
        let chat = Chat::new(&ChatOptions { template: Some(text("template")), loss_on }, &tokenizer).unwrap();
        let Ok(told) = chat.read(&record.to_string()) else {
            // Its generation prompt differs from the beginning of the answer.
            assert!(case["name"].as_str().unwrap().contains("tools"), "{}", case["name"]);
            continue;
        };
        let (ids, learned) = tokenizer.encode_learned(&told.text, &told.learned).unwrap();
        let wanted: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(ids, wanted, "{}", case["name"]);
        if let Some(mask) = case["mask"].as_array() {
            let mask: Vec<bool> = mask.iter().map(|bit| bit.as_u64() == Some(1)).collect();
            assert!(mask.contains(&true) && mask.contains(&false));
            assert_eq!(learned, mask, "{}", case["name"]);
        }
    }
}

/// The pieces of a conversation that are learned.
fn learned(template: &str, loss_on: LossOn, record: &str) -> Result<Vec<String>, String> {
    let chat = Chat::new(&ChatOptions { template: Some(template.into()), loss_on }, &tokenizer()).unwrap();
    let told = chat.read(record)?;
    Ok(told.learned.into_iter().map(|range| told.text[range].to_owned()).collect())
}

const TALK: &str = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;

#[test]
fn answers_are_found_with_and_without_marks() {
    let marked = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}.\
                  {% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}";
    let answers = learned(CHATML, LossOn::Answers, TALK).unwrap();
    assert_eq!(answers, ["b<|im_end|>\n", "d<|im_end|>\n"]);
    assert_eq!(learned(CHATML, LossOn::LastAnswer, TALK).unwrap(), answers[1..]);
    assert_eq!(learned(CHATML, LossOn::All, TALK).unwrap().concat().matches("<|im_start|>").count(), 4);
    assert_eq!(learned(marked, LossOn::Answers, TALK).unwrap(), ["b.", "d."]);
    assert_eq!(learned(marked, LossOn::LastAnswer, TALK).unwrap(), ["d."]);
    // Of a prompt that is a conversation, what it answers is given.
    let [prompt, completion] = [0..3, 3..4].map(|range| {
        let talk: Value = serde_json::from_str(TALK).unwrap();
        Value::from(talk["messages"].as_array().unwrap()[range].to_vec())
    });
    let record = serde_json::json!({ "prompt": prompt, "completion": completion }).to_string();
    for template in [CHATML, marked] {
        assert_eq!(learned(template, LossOn::Answers, &record).unwrap().len(), 1, "{template}");
    }
    let turns = r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#;
    assert_eq!(learned(CHATML, LossOn::Answers, turns).unwrap(), answers[..1]);
    let texts = r#"{"prompt": "1 + 1 =", "completion": " 2"}"#;
    assert_eq!(learned(CHATML, LossOn::Answers, texts).unwrap(), [" 2"]);
    assert_eq!(learned(CHATML, LossOn::All, texts).unwrap(), ["1 + 1 = 2"]);
}

#[test]
fn records_that_are_no_conversations_are_refused() {
    // The first message is written in another way once there are two.
    let changing = "{% for m in messages %}{{ messages | length }}{{ m.role }}{{ m.content }}{% endfor %}";
    for (template, record, says) in [
        (CHATML, "{}", "has no conversation: neither `messages`"),
        (CHATML, "[]", "is not a JSON object"),
        (CHATML, "{", "is not valid JSON"),
        (CHATML, r#"{"messages": []}"#, "has no messages"),
        (CHATML, r#"{"messages": "hi"}"#, "field `messages` is no list of messages"),
        (CHATML, r#"{"messages": [{"role": "user", "content": "a"}]}"#, "has no answer"),
        (CHATML, r#"{"messages": [{"role": "user"}]}"#, "the chat template refuses it"),
        (CHATML, r#"{"conversations": [{"value": "a"}]}"#, "a turn without `from`"),
        (CHATML, r#"{"prompt": "a", "completion": ""}"#, "an empty completion"),
        (CHATML, r#"{"prompt": "a", "completion": []}"#, "not both texts"),
        (CHATML, "{\"messages\": \"\u{10fff0}\"}", "U+10FFF0"),
        (changing, TALK, "message 2 is rendered differently"),
        ("{{ raise_exception('no') }}", TALK, "the chat template refuses it: line 1: no"),
    ] {
        let error = learned(template, LossOn::Answers, record).unwrap_err();
        assert!(error.contains(says), "{record}: {error}");
    }
    let error = ChatTemplate::new("{% for %}", &tokenizer()).unwrap_err().to_string();
    assert!(error.contains("its chat template cannot be read: line 1"), "{error}");
    let none = Chat::new(&ChatOptions { template: None, loss_on: LossOn::All }, &tokenizer()).unwrap();
    assert!(none.read(TALK).unwrap_err().contains("has no chat template"));
}
