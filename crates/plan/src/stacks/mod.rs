//! Stacks: the profiles of trainers. A profile contains the layouts that a trainer can run, and the
//! simulator's facts about its software, which price its steps.
//!
//! The built-in ones lie in `data/stacks/`, one TOML file each; `trainyard plan --stack FILE.toml`
//! reads others of the same form. [`Rules`] restrict the planner's space. The software is one that
//! the simulator knows, with some facts replaced. So a profile contains no prices.

mod rules;

pub use rules::{DataParallel, MicroBatches, Offloaded, Recomputation, Rules, ScheduleName, SplitAxis};

use crate::settings::Dialect;
use serde::Deserialize;
use trainyard_sim::{AttentionKind, Stack};

/// The profile of a trainer.
#[derive(Clone, PartialEq, Debug)]
pub struct StackProfile {
    /// The name, as for `--stack`.
    pub name: String,
    /// Other names of the same trainer.
    pub aliases: Vec<String>,
    /// The trainer's full name.
    pub title: String,
    /// Source of the facts.
    pub source: String,
    /// The form of its settings; None if they cannot be written.
    pub settings: Option<Dialect>,
    /// Things that its users know and this profile cannot express, in words.
    pub beyond: Vec<String>,
    /// The layouts that it can express.
    pub rules: Rules,
    /// The software as which its steps are priced.
    pub software: Stack,
    price: Price,
}

/// The file of a profile.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    title: String,
    source: String,
    settings: Option<Dialect>,
    #[serde(default)]
    beyond: Vec<String>,
    price: Price,
    rules: rules::Written,
}

/// The software of the simulator that a profile starts from, and the facts that differ.
#[derive(Clone, PartialEq, Debug, Deserialize)]
struct Price {
    like: String,
    #[serde(flatten)]
    changes: toml::Table,
}

impl Price {
    fn software(&self, name: &str, changes: &toml::Table) -> Result<Stack, String> {
        let mut all = self.changes.clone();
        all.extend(changes.clone());
        let software = Stack::like(&self.like, &all).map_err(|problem| format!("[price]: {problem}"))?;
        Ok(Stack { name: name.to_owned(), ..software })
    }
}

const BUILTIN: [&str; 6] = [
    include_str!("../../data/stacks/trainyard.toml"),
    include_str!("../../data/stacks/megatron.toml"),
    include_str!("../../data/stacks/nemo.toml"),
    include_str!("../../data/stacks/torchtitan.toml"),
    include_str!("../../data/stacks/deepspeed.toml"),
    include_str!("../../data/stacks/fsdp2.toml"),
];

impl StackProfile {
    /// The built-in profiles, Trainyard's first.
    pub fn builtin() -> Vec<StackProfile> {
        let parsed = BUILTIN.iter().map(|text| StackProfile::parse(text));
        parsed.map(|profile| profile.expect("built-in stacks are tested")).collect()
    }

    /// The built-in profile called `name`.
    ///
    /// # Errors
    ///
    /// An unknown name; the error lists the names that exist.
    pub fn named(name: &str) -> Result<StackProfile, String> {
        let all = StackProfile::builtin();
        let known: Vec<String> = all.iter().map(|profile| profile.name.clone()).collect();
        let found = all.into_iter().find(|profile| profile.name == name || profile.aliases.iter().any(|a| a == name));
        found.ok_or_else(|| {
            format!("no stack is called `{name}`: one of {}, or a file that ends in .toml", known.join(", "))
        })
    }

    /// Parses the file of a profile.
    ///
    /// # Errors
    ///
    /// Text that is not TOML, unknown keys, or values that a key does not accept.
    pub fn parse(text: &str) -> Result<StackProfile, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let File { name, aliases, title, source, settings, beyond, price, rules } = file;
        let software = price.software(&name, &toml::Table::new())?;
        let rules = rules.named(&name)?;
        Ok(StackProfile { name, aliases, title, source, settings, beyond, rules, software, price })
    }

    /// The software with some facts replaced, by the keys of `[price]`.
    ///
    /// # Errors
    ///
    /// An unknown key, or a value that it does not accept.
    pub fn changed(&self, changes: &toml::Table) -> Result<Stack, String> {
        self.price.software(&self.name, changes)
    }

    /// True if `other` can run the same layouts at the same prices.
    pub fn runs_like(&self, other: &StackProfile) -> bool {
        let rules = Rules { name: self.rules.name.clone(), ..other.rules.clone() };
        let (name, source) = (self.software.name.clone(), self.software.source.clone());
        rules == self.rules && Stack { name, source, ..other.software.clone() } == self.software
    }

    /// The way in which its steps are priced, in words.
    pub fn words(&self) -> String {
        let software = &self.software;
        let attention = match software.attention {
            AttentionKind::Unfused => "unfused attention",
            AttentionKind::Flash1 => "FlashAttention",
            AttentionKind::Flash2 => "FlashAttention-2",
            AttentionKind::Flash3 => "FlashAttention-3 or cuDNN attention",
        };
        let launched = match software.dispatch {
            trainyard_sim::Dispatch::Eager => "kernels launched one by one",
            trainyard_sim::Dispatch::Compiled => "compiled or fused kernels",
        };
        let reduced = match software.overlap_reduce {
            true => "gradients summed during backward",
            false => "gradients summed after backward",
        };
        let state = software.state;
        format!(
            "{attention}, {launched}, {reduced}, {} bytes of state a parameter{}",
            state.parameter + state.master + state.gradient + state.optimizer,
            if software.sequence_parallel { ", norms split with tensor parallelism" } else { "" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_say_what_they_rest_on() {
        let all = StackProfile::builtin();
        for profile in &all {
            assert!(!profile.source.is_empty() && !profile.rules.data_parallel.is_empty(), "{}", profile.name);
            assert_eq!(profile.software.name, profile.name);
            assert_eq!(StackProfile::named(&profile.name).as_ref(), Ok(profile));
        }
        assert_eq!(StackProfile::named("accelerate").unwrap().name, "fsdp2");
        assert!(StackProfile::named("caffe").unwrap_err().contains("torchtitan"));
    }

    #[test]
    fn profiles_with_mistakes_are_refused_in_words() {
        let text = BUILTIN[3];
        for (from, to, says) in [
            ("[price]", "[price]\noverlap = true", "overlap"),
            ("like = \"torchtitan\"", "like = \"caffe\"", "no software stack is called `caffe`"),
            ("[rules]", "[rules]\ntensormax = 4", "tensormax"),
            ("title", "titel", "titel"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            let error = StackProfile::parse(&changed).unwrap_err();
            assert!(error.contains(says), "{from}: {error}");
        }
    }
}
