//! Whatever the bytes: no panic, and every span lies in the text and on characters.

use dsl::Set;
use proptest::prelude::*;
use std::sync::LazyLock;

/// The examples, the library and the pages' examples.
pub static SEEDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let files = std::fs::read_dir(folder).expect("the examples are there").map(|f| f.expect("readable").path());
    let mut files: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "pace")).collect();
    files.sort();
    let examples = files.iter().map(|p| std::fs::read_to_string(p).expect("readable"));
    let library = dsl::library::names().into_iter().filter_map(|n| dsl::library::source(n)).map(String::from);
    let pages = dsl::codes().filter_map(dsl::explain).map(String::from);
    examples.chain(library).chain(pages).collect()
});

/// Pieces of the language, and some that are not.
const PIECES: [&str; 56] = [
    "model",
    "gpt",
    "machine",
    "pipeline",
    "schedule",
    "order",
    "warmup",
    "repeat",
    "drain",
    "when",
    "optimizer",
    "adamw",
    "cosine",
    "block",
    "embed",
    "head",
    "every",
    "update",
    "F",
    "B",
    "I",
    "W",
    "P",
    "s",
    "n",
    "min",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "=",
    "<=",
    "<",
    "==",
    ",",
    ";",
    "..",
    ".",
    "+",
    "-",
    "*",
    "/",
    "%",
    "0",
    "-1",
    "1e308",
    "99999999999999999999",
    "MiB",
    "us",
    "\n",
    "//",
    "\"",
    "é",
    "\u{0}",
];

fn check(text: &str, sets: &[Set]) {
    let (spec, found) = dsl::load(text, sets);
    for diagnostic in &found {
        for label in diagnostic.labels.iter().filter(|l| l.library.is_none()) {
            let (start, end) = (label.span.start, label.span.end);
            assert!(start <= end && text.get(start..end).is_some(), "{diagnostic:?}\n{text}");
        }
    }
    assert_eq!(spec.is_none(), found.iter().any(|d| d.is_error()), "no spec without a reason: {found:?}\n{text}");
    if let Some(spec) = spec {
        assert!(text.get(spec.pipeline.accumulate.span).is_some());
        assert!(text.get(spec.machine.ranks.span).is_some());
    }
}

/// Cuts, doubles, replaces or inserts at some characters.
pub fn mutate(seed: &str, edits: &[(prop::sample::Index, u8, prop::sample::Index)]) -> String {
    let mut text: Vec<char> = seed.chars().collect();
    for (at, kind, what) in edits {
        let at = at.index(text.len() + 1);
        let end = (at + 1 + what.index(24)).min(text.len());
        let piece = PIECES[what.index(PIECES.len())].chars();
        match kind % 4 {
            0 => drop(text.drain(at..end)),
            1 => drop(text.splice(at..at, piece)),
            2 => drop(text.splice(at..end, piece)),
            _ => {
                let copy = text[at..end].to_vec();
                drop(text.splice(at..at, copy));
            }
        }
    }
    text.into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_examples(
        seed in any::<prop::sample::Index>(),
        edits in prop::collection::vec(any::<(prop::sample::Index, u8, prop::sample::Index)>(), 1..12),
    ) {
        check(&mutate(&SEEDS[seed.index(SEEDS.len())], &edits), &[]);
    }

    #[test]
    fn pieces_in_any_order(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..80)) {
        check(&pieces.join(" "), &[]);
    }

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&String::from_utf8_lossy(&bytes), &[]);
    }

    #[test]
    fn random_overrides(
        seed in any::<prop::sample::Index>(),
        key in prop::sample::select(vec![
            "pipeline.accumulate", "pipeline.partition", "machine.cost.F", "machine.ranks", "staleness.drift", "optimizer",
            "optimizer.lr", "require.memory", "model.width", "x", "",
        ]),
        value in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..6),
    ) {
        check(&SEEDS[seed.index(SEEDS.len())], &[Set(format!("{key}={}", value.join(" ")))]);
    }
}

#[test]
fn long_and_deep_inputs_end() {
    for piece in [
        "(",
        "[",
        "{",
        "a{",
        "a = [",
        "1 + ",
        "min(",
        "schedule x { order { warmup (",
        "F; ",
        "-",
        "é",
        "block 0..",
        "=",
        "}",
    ] {
        check(&piece.repeat(3000), &[]);
        let order = format!("schedule x {{ order {{ warmup {} {{ F }} }} }}", piece.repeat(3000));
        check(&order, &[]);
    }
}
