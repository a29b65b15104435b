//! Every code has a page, and every page's example gives its code.

use crate::render::report;
use std::collections::BTreeSet;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The example of a page: its source, and the override after `pace --set` in the fence.
fn example(page: &str) -> (&str, Vec<dsl::Set>) {
    let (_, rest) = page.split_once("```pace").expect("a page has an example");
    let (info, rest) = rest.split_once('\n').expect("the fence ends its line");
    let (text, _) = rest.split_once("```").expect("the example ends");
    let sets = info.trim().strip_prefix("--set ").map(|set| dsl::Set(set.into()));
    (text, sets.into_iter().collect())
}

/// Codes of this crate; the others' examples need other crates, or a target.
fn ours(code: &str) -> bool {
    let of_targets = ["P0242", "P0243"].contains(&code);
    (code.starts_with("P01") || code.starts_with("P02")) && !of_targets
}

#[test]
fn every_page_is_listed() {
    let folder = Path::new(ROOT).join("../docs/diagnostics");
    let files = std::fs::read_dir(folder).expect("the pages are there").map(|f| f.expect("readable").file_name());
    let files: BTreeSet<String> = files.filter_map(|f| f.to_str()?.strip_suffix(".md").map(String::from)).collect();
    let listed: BTreeSet<String> = dsl::codes().map(String::from).collect();
    assert_eq!(files, listed);
    for code in &listed {
        let page = dsl::explain(code).expect("listed");
        assert!(page.starts_with(&format!("# {code}: ")), "{code}: the title names the code");
        assert!(page.contains("\n## Fix\n"), "{code}: the page says how to fix it");
    }
}

#[test]
fn every_code_has_a_page() {
    let mut used = BTreeSet::new();
    let mut folders = vec![Path::new(ROOT).join("src")];
    while let Some(folder) = folders.pop() {
        for file in std::fs::read_dir(folder).expect("readable") {
            let path = file.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(path).expect("readable");
            let quoted = text.match_indices("\"P0").filter_map(|(at, _)| text.get(at + 1..at + 6));
            used.extend(quoted.filter(|code| code[1..].bytes().all(|b| b.is_ascii_digit())).map(String::from));
        }
    }
    let listed: BTreeSet<String> = dsl::codes().filter(|c| ours(c)).map(String::from).collect();
    assert_eq!(used, listed);
}

#[test]
fn every_example_gives_its_code_alone() {
    for code in dsl::codes().filter(|c| ours(c)) {
        let (text, sets) = example(dsl::explain(code).expect("listed"));
        let (spec, found) = dsl::load(text, &sets);
        let shown = report(text, &found);
        assert!(!found.is_empty() && found.iter().all(|d| d.code == code), "{code}\n{shown}");
        assert_eq!(spec.is_none(), found[0].is_error(), "{code}\n{shown}");
        assert!(found.iter().all(|d| d.help.is_some()), "{code}: a help line\n{shown}");
    }
}

#[test]
fn every_example_of_ours_is_a_snapshot() {
    for code in dsl::codes().filter(|c| ours(c)) {
        let (text, sets) = example(dsl::explain(code).expect("listed"));
        insta::assert_snapshot!(code, report(text, &dsl::load(text, &sets).1));
    }
}
