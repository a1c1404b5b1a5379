//! Checks the table against the sources.

use trainyard_cuda::kernels::{ALL, File, Float, Rule};

/// Every entry point of every source stands in the table with its parameters, and the other way
/// round.
#[test]
fn the_table_says_what_the_sources_say() {
    for file in File::ALL {
        let float = Float::ALL.into_iter().rfind(|float| file.supports(*float)).unwrap();
        let text = file.source(float);
        let mut found: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("KERNEL(").or_else(|| line.strip_prefix("KERNEL_BOUNDS(")) else {
                continue;
            };
            let Some((head, parameters)) = rest.split_once(")(") else {
                panic!("{}: no parameters in {line:?}", file.name())
            };
            let name = head.split(',').next().unwrap();
            let (parameters, _) =
                parameters.split_once(") {").unwrap_or_else(|| panic!("{name}: parameters go over lines"));
            found.push((name.to_owned(), parameters.to_owned()));
        }
        found.sort();
        let mut listed: Vec<(String, String)> =
            file.kernels().map(|kernel| (kernel.name.to_owned(), kernel.signature.to_owned())).collect();
        listed.sort();
        assert_eq!(found, listed, "{}", file.name());
    }
}

#[test]
fn names_are_unique_and_parameters_are_understood() {
    let mut names: Vec<&str> = ALL.iter().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    for kernel in ALL {
        for (name, parameter) in kernel.parameters() {
            assert!(!name.is_empty() && !name.contains('*'), "{}: {name:?}", kernel.name);
            if let trainyard_cuda::kernels::Parameter::Pointer { element, .. } = parameter {
                let known = ["T", "float", "double", "int", "unsigned", "unsigned char", "bf16", "f16"];
                assert!(known.contains(&element), "{}: {element:?}", kernel.name);
            }
        }
    }
}

#[test]
fn launches_fit_the_limits_of_every_gpu() {
    let rules: Vec<Rule> = ALL.iter().map(|kernel| kernel.rule).collect();
    for rule in rules {
        for sizes in [[1, 1, 1], [1 << 20, 8192, 1], [3, 1 << 12, 700], [70_000, 64, 128]] {
            let Some(launch) = rule.launch(sizes) else { panic!("{rule:?} {sizes:?}: no launch") };
            assert!(
                launch.grid[1] <= 65_535 && launch.grid[2] <= 65_535 && launch.grid[0] < 1 << 31,
                "{rule:?} {launch:?}"
            );
            assert!(launch.block % 32 == 0 && launch.block <= 1024, "{rule:?} {launch:?}");
        }
        assert_eq!(rule.launch([0, 1, 1]), None);
    }
}
