//! Reads a configuration in layers: defaults, then the file, then each `--set`. Later layers win. A
//! preset belongs to the layer that names it, below that layer's other keys. So a file may change
//! keys of its preset, and `--set model.preset=...` replaces a file's shape. So it is with the keys
//! of a recipe.

use super::error::{Origin, Problems};
use super::mistaken;
use super::nearest::{distance, nearest};
use super::presets::{self, PRESETS};
use super::recipes::{self, RECIPES};
use super::{Config, ConfigError, Key};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};
use trainyard_data::place_of;

/// Keys of earlier versions that no longer exist, each with its replacement.
const GONE: [(&str, &str); 1] = [(
    "evaluation.batches_max",
    "is gone, since it counted micro-batches, so that another plan evaluated other text: write evaluation.tokens_max, \
     the most tokens that one evaluation predicts",
)];

/// One value to set, before its name is checked.
struct Entry {
    /// The path of the key: section and key, if it was written so.
    path: Vec<String>,
    value: Value,
    origin: Origin,
}

impl Config {
    /// Defaults, then the file, then each of `sets` (`section.key=value`).
    ///
    /// A value of `sets` is read as TOML, and as a string when it is not TOML.
    ///
    /// # Errors
    ///
    /// Every unknown key, with the nearest known one, and every value of a wrong type, all
    /// together.
    pub fn load(file: Option<&Path>, sets: &[String]) -> Result<Config, ConfigError> {
        let text = file.map(read).transpose().map_err(|message| {
            let mut problems = Problems::default();
            problems.add(Origin::Default, message);
            ConfigError { problems: problems.0 }
        })?;
        Config::from_layers(file.zip(text.as_deref()), sets)
    }

    /// As [`Config::load`], from text that is already read; `path` is for messages.
    pub fn parse(path: &Path, text: &str, sets: &[String]) -> Result<Config, ConfigError> {
        Config::from_layers(Some((path, text)), sets)
    }

    fn from_layers(file: Option<(&Path, &str)>, sets: &[String]) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        let mut problems = Problems::default();
        if let Some((path, text)) = file {
            let entries = read_file(path, text, &mut problems);
            config.apply(entries, &mut problems);
        }
        let entries = sets.iter().filter_map(|argument| read_set(argument, &mut problems)).collect();
        config.apply(entries, &mut problems);
        problems.into_result(config)
    }

    fn apply(&mut self, entries: Vec<Entry>, problems: &mut Problems) {
        let named = |section, key| match entries.iter().rev().find(|entry| entry.path == [section, key]) {
            Some(Entry { value: Value::String(name), origin, .. }) => Some((name, origin)),
            _ => None,
        };
        let of_preset = |origins: &BTreeMap<String, Origin>| {
            origins.iter().any(|(key, origin)| key.starts_with("model.") && matches!(origin, Origin::Preset(_)))
        };
        if let Some((name, origin)) = named("model", "preset") {
            match presets::find(name) {
                None if name == "auto" && !of_preset(&self.origins) => {}
                Some(keys) => {
                    self.model = Default::default();
                    self.origins.retain(|key, _| !key.starts_with("model."));
                    for (key, value) in keys {
                        let (path, origin) = (vec!["model".to_owned(), key], Origin::Preset(name.clone()));
                        self.set(Entry { path, value, origin }, problems);
                    }
                }
                None => {
                    let hint = nearest(name, PRESETS.iter().copied());
                    let hint = hint.map(|name| format!("; did you mean \"{name}\"?")).unwrap_or_default();
                    let known = PRESETS.join(", ");
                    let message = format!("model.preset \"{name}\" is unknown{hint}; known presets: {known}");
                    problems.add(origin.clone(), message);
                }
            }
        }
        if let Some((name, origin)) = named("training", "recipe") {
            match recipes::find(name) {
                None if name == "auto" && self.training.recipe.is_none() => {}
                Some(recipe) => {
                    for (section, key, value) in (recipe.keys)() {
                        let (path, origin) = (vec![section.to_owned(), key.to_owned()], Origin::Preset(name.clone()));
                        self.set(Entry { path, value, origin }, problems);
                    }
                }
                None => {
                    let known: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
                    let known = known.join(", ");
                    let message = format!("training.recipe \"{name}\" is unknown; known recipes: {known}");
                    problems.add(origin.clone(), message);
                }
            }
        }
        for entry in entries {
            self.set(entry, problems);
        }
    }

    fn set(&mut self, entry: Entry, problems: &mut Problems) {
        let Entry { path, value, origin } = entry;
        let Some((key, section)) = path.split_last().map(|(key, section)| (key, section.join("."))) else { return };
        if self.section(&section).is_none() {
            return problems.add(origin, self.unknown(&path));
        }
        let Some(target) = self.section_mut(&section) else { return };
        if !target.keys().iter().any(|known| known.name == key) {
            return problems.add(origin, self.unknown(&path));
        }
        match target.set(key, &value) {
            Ok(()) => {
                self.origins.insert(format!("{section}.{key}"), origin);
            }
            Err(why) => problems.add(origin, format!("{section}.{key} {why}")),
        }
    }

    /// The keys called `name`, here or in another program, with their sections.
    fn called(&self, name: &str) -> Vec<(&'static str, Key)> {
        let keys = self.sections().into_iter().flat_map(|section| {
            let name = section.name();
            section.keys().into_iter().map(move |key| (name, key))
        });
        keys.filter(|(_, key)| key.name == name || key.elsewhere.contains(&name)).collect()
    }

    /// The keys that correspond to an option `--NAME` of another program, as `section.key` with the
    /// type of each. Keys of exactly this name come before keys that another program calls so.
    pub fn keys_of_option(name: &str) -> Vec<(String, String)> {
        let mut keys = Config::default().called(name);
        if keys.iter().any(|(_, key)| key.name == name) {
            keys.retain(|(_, key)| key.name == name);
        }
        keys.into_iter().map(|(section, key)| (format!("{section}.{}", key.name), key.expected)).collect()
    }

    /// The message for a key that does not exist, with the keys that the user may have meant.
    fn unknown(&self, path: &[String]) -> String {
        let written = path.join(".");
        if self.section(&written).is_some() {
            return format!("`{written}` is a section: write its keys below [{written}]");
        }
        let sections: Vec<_> = self.sections().iter().map(|section| (section.name(), section.keys())).collect();
        let all = || sections.iter().flat_map(|(section, keys)| keys.iter().map(move |key| (*section, key)));
        if let Some((key, why)) = GONE.iter().find(|(key, _)| *key == written) {
            return format!("{key} {why}");
        }
        let did_you_mean = |name: String| format!("unknown key `{written}`; did you mean `{name}`?");

        let name = path.last().map(String::as_str).unwrap_or_default();
        let inside = path[..path.len().max(1) - 1].join(".");
        let inside = (path.len() >= 2).then_some(inside.as_str());
        let known_section = inside.and_then(|section| sections.iter().find(|(known, _)| *known == section));

        // Exact matches come before near ones, and keys of the section that was written before
        // others. One wrong letter there is likelier than another section.
        let mut exact = self.called(name);
        exact.sort_by_key(|(section, key)| (Some(*section) != inside, key.name != name));
        let is_here = exact.first().is_some_and(|(section, _)| Some(*section) == inside);
        if let Some((section, keys)) = known_section.filter(|_| !is_here)
            && let Some(key) = keys.iter().find(|key| distance(name, key.name) == 1)
        {
            return did_you_mean(format!("{section}.{}", key.name));
        }
        if let Some((section, key)) = exact.first() {
            return did_you_mean(format!("{section}.{}", key.name));
        }
        if let Some((section, keys)) = known_section {
            if let Some(key) = nearest(name, keys.iter().map(|key| key.name)) {
                return did_you_mean(format!("{section}.{key}"));
            }
            let keys: Vec<_> = keys.iter().map(|key| key.name).collect();
            return format!("unknown key `{written}`; [{section}] has {}", keys.join(", "));
        }
        let names = sections.iter().map(|(section, _)| *section);
        let of_sections = names.clone().filter(|_| path.len() == 1);
        if let Some(key) = nearest(name, of_sections.chain(all().map(|(_, key)| key.name))) {
            if names.clone().any(|section| section == key) {
                return format!("unknown section `{name}`; did you mean [{key}]?");
            }
            let section = all().find(|(_, known)| known.name == key).map(|(section, _)| section).unwrap_or_default();
            return did_you_mean(format!("{section}.{key}"));
        }
        let first = path.first().map(String::as_str).unwrap_or_default();
        if let Some(section) = nearest(first, names.clone()) {
            return format!("unknown section `{first}`; did you mean [{section}]?");
        }
        format!("unknown key `{written}`; the sections are {}", names.collect::<Vec<_>>().join(", "))
    }
}

/// The text of a configuration file, or a message that says why it cannot be read.
fn read(file: &Path) -> Result<String, String> {
    if let Some(message) = mistaken::in_place_of_a_configuration(file) {
        return Err(message);
    }
    std::fs::read_to_string(file).map_err(|error| {
        let place = place_of(file, &error);
        let begin = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "; `trainyard config print` prints a configuration to begin with, and `trainyard train --data FILES` needs none"
            }
            _ => "",
        };
        format!("cannot read {}{place}: {error}{begin}", file.display())
    })
}

/// The entries of a file, in its order, with the line of each key.
fn read_file(path: &Path, text: &str, problems: &mut Problems) -> Vec<Entry> {
    let values = match text.parse::<Table>() {
        Ok(values) => values,
        Err(error) => {
            let (line, message) = match super::json::problem(text) {
                Some(message) => (1, message),
                None => {
                    let line = error.span().map_or(1, |span| line_of(text, span.start));
                    (line, error.message().trim().replace('\n', ", "))
                }
            };
            problems.add(Origin::File { path: path.to_owned(), line }, message);
            return Vec::new();
        }
    };
    let mut lines = BTreeMap::new();
    if let Ok(table) = DeTable::parse(text) {
        for (name, value) in table.get_ref() {
            let at = |span: std::ops::Range<usize>| line_of(text, span.start);
            lines.insert((name.get_ref().to_string(), String::new()), at(name.span()));
            if let DeValue::Table(table) = value.get_ref() {
                for (key, value) in table {
                    lines.insert((name.get_ref().to_string(), key.get_ref().to_string()), at(key.span()));
                    let DeValue::Table(inner) = value.get_ref() else { continue };
                    let section = format!("{}.{}", name.get_ref(), key.get_ref());
                    for key in inner.keys() {
                        lines.insert((section.clone(), key.get_ref().to_string()), at(key.span()));
                    }
                }
            }
        }
    }
    let line = |section: &str, key: &str| lines.get(&(section.to_owned(), key.to_owned())).copied().unwrap_or(1);
    let entry = |path: Vec<String>, value: Value, file: PathBuf, line: usize| Entry {
        path,
        value,
        origin: Origin::File { path: file, line },
    };
    let mut entries = Vec::new();
    for (name, value) in values {
        match value {
            Value::Table(table) if table.is_empty() && !is_section(&name) => {
                let line = line(&name, "");
                entries.push(entry(vec![name], Value::Table(table), path.to_owned(), line));
            }
            Value::Table(table) => {
                for (key, value) in table {
                    let section = format!("{name}.{key}");
                    if let (Value::Table(inner), true) = (&value, is_section(&section)) {
                        for (inner_key, value) in inner {
                            let line = line(&section, inner_key);
                            let at = vec![name.clone(), key.clone(), inner_key.clone()];
                            entries.push(entry(at, value.clone(), path.to_owned(), line));
                        }
                        continue;
                    }
                    let line = line(&name, &key);
                    entries.push(entry(vec![name.clone(), key], value, path.to_owned(), line));
                }
            }
            value => {
                let line = line(&name, "");
                entries.push(entry(vec![name], value, path.to_owned(), line));
            }
        }
    }
    entries.sort_by_key(|entry| match entry.origin {
        Origin::File { line, .. } => line,
        _ => 0,
    });
    entries
}

fn is_section(name: &str) -> bool {
    Config::default().section(name).is_some()
}

/// The 1-based line of a byte offset.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// Reads one `section.key=value`.
fn read_set(argument: &str, problems: &mut Problems) -> Option<Entry> {
    let origin = Origin::Set(argument.to_owned());
    let Some((name, text)) = argument.split_once('=') else {
        problems.add(origin, "a setting is written section.key=value");
        return None;
    };
    // The key that is set most often on a command line has a short name there.
    let name = if name.trim() == "device" { "compute.device" } else { name.trim() };
    let path: Vec<_> = name.split('.').map(str::to_owned).collect();
    if path.iter().any(String::is_empty) {
        problems.add(origin, "a setting is written section.key=value");
        return None;
    }
    // Anything that is not a TOML value is a string: `optimizer.name=lion`,
    // `data.train=/data/a.txt`.
    let table = format!("value = {text}").parse::<Table>();
    let value = table.ok().filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    Some(Entry { path, value: value.unwrap_or_else(|| Value::String(text.to_owned())), origin })
}
