//! A resolved configuration as a file, and the documentation of every key.

use super::recipes::RECIPES;
use super::{Config, Origin, PRESETS, Resolved};
use std::fmt::Write;

impl Resolved {
    /// The configuration as TOML that can be used again. Requested keys and plain defaults are
    /// settings; derived keys and those of a preset are comments with their derivation.
    pub fn to_toml(&self) -> String {
        let mut text = String::from(
            "# As resolved. Commented values were derived, and are derived again when this file is used: uncomment to fix one.\n\
             # Every key is described in docs/config.md.\n",
        );
        for section in self.requested.sections() {
            let mut lines = String::new();
            for key in section.keys() {
                let name = format!("{}.{}", section.name(), key.name);
                let derived = self.derivations.iter().find(|d| d.key == name);
                // Writing to a String cannot fail.
                let _ = match (derived, section.get(key.name), self.requested.origin(&name)) {
                    (Some(d), _, _) => writeln!(lines, "# {} = {}  # {}", key.name, d.value, d.because),
                    (None, Some(value), Origin::Preset(preset)) => {
                        writeln!(lines, "# {} = {value}  # preset {preset}", key.name)
                    }
                    (None, Some(value), _) => writeln!(lines, "{} = {value}", key.name),
                    (None, None, _) => Ok(()),
                };
            }
            if !lines.is_empty() {
                let _ = write!(text, "\n[{}]\n{lines}", section.name());
            }
        }
        text
    }

    /// One line for each derived value: `key = value (because)`.
    pub fn explain(&self) -> String {
        let width = self.derivations.iter().map(|d| d.key.len() + d.value.len() + 3).max().unwrap_or(0);
        let line = |d: &super::Derivation| format!("{:width$}  {}\n", format!("{} = {}", d.key, d.value), d.because);
        self.derivations.iter().map(line).collect()
    }
}

/// `docs/config.md`: every section and key with its type, default and meaning.
pub fn documentation() -> String {
    let mut text = String::from(
        "# Configuration\n\n\
         <!-- Printed by `trainyard config docs` from crates/engine/src/config; a test fails when this file is stale. -->\n\n\
         After this page you can look up every key of a configuration. `trainyard config check FILE` prints\n\
         the resolved configuration of a file, every derived value with its derivation.\n\n\
         1. A configuration is a TOML file with sections.\n\
         2. Values come from the defaults, then the file, then each `--set section.key=value`, later ones\n   winning.\n\
         3. A key that is unset is derived; `\"auto\"` unsets one.\n\
         4. Unknown keys, keys that would have no effect, and combinations that cannot work are errors,\n   \
         reported together before anything is allocated.\n\
         5. Relative paths start in the folder where the command runs, not in the configuration's.\n\n\
         \"Elsewhere\" lists the names of a key in other programs. They are not accepted, but the error names\n\
         the right one. Given a JSON file of DeepSpeed's, the error has the lines that say the same.\n",
    );
    for section in Config::default().sections() {
        let _ = write!(text, "\n## [{}]\n\n{}\n", section.name(), filled(&paragraph(section.about()), ""));
        for key in section.keys() {
            let default = key.default.map_or("unset".to_owned(), |value| format!("`{value}`"));
            let _ = write!(text, "\n- **`{}`**: {}; default {default}.\n", key.name, key.expected);
            let _ = writeln!(text, "{}", filled(&paragraph(&key.about), "  "));
            if !key.elsewhere.is_empty() {
                let names: Vec<_> = key.elsewhere.iter().map(|name| format!("`{name}`")).collect();
                let _ = writeln!(text, "{}", filled(&format!("Elsewhere: {}.", names.join(", ")), "  "));
            }
        }
        if section.name() == "model" {
            text.push_str("\nPresets:\n\n");
            for preset in PRESETS {
                let keys = super::presets::find(preset).unwrap_or_default();
                let keys: Vec<_> = keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
                let _ = writeln!(text, "- **`{preset}`** sets\n{}", filled(&keys.join(", "), "  "));
            }
        }
        if section.name() == "training" {
            text.push_str("\nRecipes:\n\n");
            for recipe in &RECIPES {
                let keys = (recipe.keys)();
                let keys: Vec<_> = keys.iter().map(|(of, key, value)| format!("{of}.{key} = {value}")).collect();
                let about = format!("{}. Sets {}", recipe.about, keys.join(", "));
                let line = format!("- **`{}`**: {about}", recipe.name);
                let _ = writeln!(text, "{}", filled(&line, "  ").trim_start());
            }
        }
    }
    text
}

/// Breaks a paragraph into lines of at most 100 columns, each after `indent`.
fn filled(text: &str, indent: &str) -> String {
    const COLUMNS: usize = 100;
    let mut lines = vec![indent.to_owned()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
        let space = if line.len() > indent.len() { " " } else { "" };
        if line.chars().count() + space.len() + word.chars().count() > COLUMNS {
            lines.push(format!("{indent}{word}"));
        } else {
            *line += space;
            *line += word;
        }
    }
    lines.join("\n")
}

/// Joins the lines of a documentation comment.
fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
