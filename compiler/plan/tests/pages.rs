//! Every code of this crate has a page whose example gives it, alone.

use crate::make::{async_1f1b, one_f_one_b};
use dsl::diag::Diagnostic;
use plan::time::Costs;
use plan::{Shape, Subject, analyse};
use std::collections::BTreeSet;

/// An error in the compiler itself has no example.
const INTERNAL: &str = "P0399";

/// Codes of this crate. One is found beside a spec, by the command line.
fn ours(code: &str) -> bool {
    code.starts_with("P03") || (code.starts_with("P06") && code != "P0611")
}

fn diagnosed(text: &str) -> Vec<Diagnostic> {
    let (spec, mut found) = dsl::load(text, &[]);
    let Some(spec) = spec else { return found };
    let subject = Subject::of(&spec);
    match plan::expand(&spec.schedule, subject.shape) {
        Ok(program) => found.extend(analyse(&program, &subject, &Costs::unit(program.rank_of_stage.len())).1),
        Err(wrong) => found.extend(wrong),
    }
    found
}

#[test]
fn every_page_has_an_example_that_gives_its_code() {
    for code in dsl::codes().filter(|c| c.starts_with("P03") && *c != INTERNAL) {
        let page = dsl::explain(code).unwrap();
        let example = page.split("```").nth(1).and_then(|block| block.strip_prefix("pace")).expect(code);
        let found: Vec<&str> = diagnosed(example).iter().map(|d| d.code).collect();
        assert_eq!(found, [code], "{example}");
    }
}

#[test]
fn every_code_has_a_page() {
    let mut used = BTreeSet::new();
    let mut folders = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    while let Some(folder) = folders.pop() {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(path).unwrap();
            used.extend(text.match_indices("\"P0").filter_map(|(at, _)| text.get(at + 1..at + 6)).map(String::from));
        }
    }
    assert!(used.iter().all(|code| dsl::explain(code).is_some()), "{used:?}");
    let listed: BTreeSet<String> = dsl::codes().filter(|c| ours(c)).map(String::from).collect();
    assert!(listed.is_subset(&used), "{listed:?} {used:?}");
}

/// The labels' spans lie in the right text: the file's, or the library schedule's.
#[test]
fn labels_point_at_the_bound_and_into_the_library() {
    let text = "machine { ranks = 8 }\npipeline { schedule = async_1f1b, accumulate = 4 }\nstaleness { drift <= 1 }\n";
    let found = diagnosed(text);
    let label = |n: usize| {
        let label = &found[0].labels[n];
        let source = label.library.as_deref().map_or(text, |name| dsl::library::source(name).unwrap());
        &source[label.span.clone()]
    };
    assert!(label(0).contains('1'), "{}", label(0));
    assert_eq!((label(1), label(2)), ("F", "B"));
}

/// `check` is quick on plans of usual size, whatever the bounds ask for.
#[test]
fn large_plans_are_analysed() {
    let chunked = || dsl::library::schedule("interleaved_1f1b").unwrap();
    for (schedule, ranks, accumulate) in
        [(async_1f1b(), 64, 1), (async_1f1b(), 32, 64), (one_f_one_b(), 16, 512), (chunked(), 32, 256)]
    {
        let shape = Shape::new(ranks, accumulate);
        let program = plan::expand(&schedule, shape).unwrap();
        let (facts, found) =
            analyse(&program, &Subject::new(&schedule, shape), &Costs::unit(program.rank_of_stage.len()));
        assert_eq!(found, []);
        assert!(facts.proofs.iter().all(|p| p.holds));
    }
}
