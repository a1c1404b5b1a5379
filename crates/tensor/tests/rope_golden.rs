//! Rotary frequencies and tables against those of transformers, for every scaling rule that configs
//! name.

use serde_json::Value;
use trainyard_tensor::cpu::rope::{RopeScaling, RopeTable, rope_frequencies};

fn scaling(rope: &Value) -> RopeScaling {
    let number = |name: &str| rope[name].as_f64();
    let factor = number("factor").unwrap_or(1.0);
    let original_context = rope["original_max_position_embeddings"].as_u64().unwrap_or(0) as usize;
    match rope["rope_type"].as_str() {
        Some("linear") => RopeScaling::Linear { factor },
        Some("llama3") => RopeScaling::Llama3 {
            factor,
            low_freq_factor: number("low_freq_factor").unwrap(),
            high_freq_factor: number("high_freq_factor").unwrap(),
            original_context,
        },
        Some("yarn") => RopeScaling::Yarn {
            factor,
            beta_fast: number("beta_fast").unwrap_or(32.0),
            beta_slow: number("beta_slow").unwrap_or(1.0),
            original_context,
            attention_factor: number("attention_factor"),
            mscale: number("mscale"),
            mscale_all_dim: number("mscale_all_dim"),
            truncate: rope["truncate"].as_bool().unwrap_or(true),
        },
        _ => RopeScaling::None,
    }
}

#[test]
fn every_scaling_rule_gives_transformers_frequencies() {
    let golden: Value = serde_json::from_str(include_str!("golden/rope.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (dim, theta) = (case["head_dim"].as_u64().unwrap() as usize, case["rope"]["rope_theta"].as_f64().unwrap());
        let scaling = scaling(&case["rope"]);
        let (frequencies, factor) = rope_frequencies(dim, theta, scaling).unwrap();
        assert!((factor - case["attention_factor"].as_f64().unwrap()).abs() < 1e-9, "{name}: factor {factor}");
        let wanted = case["inv_freq"].as_array().unwrap();
        assert_eq!(frequencies.len(), wanted.len());
        for (found, wanted) in frequencies.iter().zip(wanted) {
            let wanted = wanted.as_f64().unwrap();
            // Theirs are made in f32: a power, a division and a blend.
            assert!((found / wanted - 1.0).abs() < 2e-6, "{name}: frequency {found}, not {wanted}");
        }
        let positions: Vec<usize> =
            case["positions"].as_array().unwrap().iter().map(|p| p.as_u64().unwrap() as usize).collect();
        let table = RopeTable::new(dim, theta, scaling, positions.iter().max().unwrap() + 1).unwrap();
        for (at, position) in positions.iter().enumerate() {
            for pair in 0..dim / 2 {
                let (cos, sin) = (table.cos[position * dim / 2 + pair], table.sin[position * dim / 2 + pair]);
                let wanted = [&case["cos"], &case["sin"]].map(|table| table[at][pair].as_f64().unwrap());
                // The angle is a product of two f32 numbers in f32: off by three roundings, and by
                // those of their frequency.
                let slack = factor * (1e-7 + *position as f64 * frequencies[pair] * 2e-6);
                for (found, wanted) in [(cos, wanted[0]), (sin, wanted[1])] {
                    let off = (f64::from(found) - wanted).abs();
                    assert!(off <= slack, "{name}: position {position} pair {pair}: {found}, not {wanted}");
                }
            }
        }
    }
}
