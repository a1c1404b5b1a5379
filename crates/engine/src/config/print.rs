//! A resolved configuration as a file, and the documentation of every key.

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
         A configuration is a TOML file with sections. Values come from the defaults, then the file, then each `--set section.key=value`,\n\
         later ones winning. A key that is unset is derived; `\"auto\"` unsets one. Unknown keys, keys that would have no effect, and\n\
         combinations that cannot work are errors, reported together before anything is allocated.\n\
         Relative paths start in the folder where the command runs, not in the configuration's.\n\
         `trainyard config check FILE` prints the resolved configuration with every derived value and its derivation.\n\n\
         \"Elsewhere\" lists what other programs call a key: those names are not accepted, but the error names the right one. Given a JSON file of DeepSpeed's, the error has the lines that say the same.\n",
    );
    for section in Config::default().sections() {
        let _ = write!(text, "\n## [{}]\n\n{}\n\n", section.name(), paragraph(section.about()));
        text.push_str("| key | takes | default | meaning |\n|---|---|---|---|\n");
        for key in section.keys() {
            let default = key.default.map_or("unset".to_owned(), |value| format!("`{value}`"));
            let mut about = paragraph(&key.about);
            if !key.elsewhere.is_empty() {
                let names: Vec<_> = key.elsewhere.iter().map(|name| format!("`{name}`")).collect();
                let _ = write!(about, " Elsewhere: {}.", names.join(", "));
            }
            let _ = writeln!(text, "| `{}` | {} | {default} | {about} |", key.name, key.expected);
        }
        if section.name() == "model" {
            text.push_str("\nPresets:\n\n| preset | sets |\n|---|---|\n");
            for preset in PRESETS {
                let keys = super::presets::find(preset).unwrap_or_default();
                let keys: Vec<_> = keys.iter().map(|(key, value)| format!("`{key} = {value}`")).collect();
                let _ = writeln!(text, "| `{preset}` | {} |", keys.join(", "));
            }
        }
    }
    text
}

/// Joins the lines of a documentation comment.
fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
