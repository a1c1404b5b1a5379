//! Settings under a name, for `training.recipe`: keys of several sections, each measured in
//! docs/training.md.

use toml::Value;

/// Settings under a name.
pub struct Recipe {
    /// The value of `training.recipe`.
    pub name: &'static str,
    /// Its purpose, in a line.
    pub about: &'static str,
    /// The keys that it sets.
    pub keys: fn() -> Vec<(&'static str, &'static str, Value)>,
}

/// All of them.
pub const RECIPES: [Recipe; 1] = [Recipe {
    name: "fast",
    about: "a loss in fewer steps: Muon, high rates, a linear decay to zero",
    keys: || {
        let text = |value: &str| Value::String(value.to_owned());
        vec![
            ("optimizer", "name", text("muon")),
            ("optimizer", "learning_rate", Value::Float(1e-2)),
            ("optimizer", "matrix_learning_rate", Value::Float(0.04)),
            ("schedule", "kind", text("linear")),
            ("schedule", "min_ratio", Value::Float(0.0)),
        ]
    },
}];

/// The recipe with this name.
pub fn find(name: &str) -> Option<&'static Recipe> {
    RECIPES.iter().find(|recipe| recipe.name == name)
}
