//! The files in `examples/` mean what they should.

use crate::render::report;

#[test]
fn every_example_is_a_valid_spec() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut seen = 0;
    for file in std::fs::read_dir(folder).expect("the examples are there") {
        let path = file.expect("readable").path();
        if path.extension().is_some_and(|e| e == "pace") {
            let text = std::fs::read_to_string(&path).expect("readable");
            let (spec, found) = dsl::load(&text, &[]);
            assert!(spec.is_some() && found.is_empty(), "{}\n{}", path.display(), report(&text, &found));
            seen += 1;
        }
    }
    assert!(seen >= 6);
}
