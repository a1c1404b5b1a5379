//! The programs shown in the documentation are those that the lowering makes.

#[allow(dead_code)]
#[path = "../examples/strategies.rs"]
mod strategies;

#[test]
fn the_programs_in_the_documentation_are_real() {
    let page = include_str!("../../../docs/parallelism.md");
    let sections = strategies::sections();
    assert!(page.contains(sections.trim_end()), "print them anew: cargo run -p trainyard-program --example strategies");
}
