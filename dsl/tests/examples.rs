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

#[test]
fn the_reference_page_s_examples_are_valid() {
    let page = include_str!("../../docs/language.md");
    let mut blocks = page.split("```pace\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut next = || blocks.next().expect("a whole file, groups, three schedules");
    let (whole, groups, split, chunked, block) = (next(), next(), next(), next(), next());
    let around = |name: &str| format!("machine {{ ranks = 4 }}\npipeline {{ schedule = {name}, accumulate = 8 }}\n");
    let (split, chunked) =
        (format!("{split}{}", around("zb_like")), format!("{chunked}{}", around("interleaved_like")));
    let groups = format!("{groups}{}", around("gpipe"));
    let block = format!("{block}{}", around("v_min_like"));
    for text in [whole, &groups, &split, &chunked, &block] {
        let (spec, found) = dsl::load(text, &[]);
        assert!(spec.is_some() && found.is_empty(), "{}", report(text, &found));
    }
    assert_eq!(blocks.next(), None, "a new example is tested here");
}
