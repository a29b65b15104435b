//! The formatter: what it writes, that it changes no meaning, and that it is done after one pass.

use crate::fuzz::{SEEDS, mutate};
use proptest::prelude::*;

/// The tree without places: `3..7` left out.
fn meaning(text: &str) -> String {
    let (mut file, found) = dsl::parse(text);
    assert!(found.iter().all(|d| !d.is_error()), "{text}\n{found:?}");
    file.len = 0;
    let tree = format!("{file:?}");
    let place = |word: &&str| !(word.contains("..") && word.bytes().any(|b| b.is_ascii_digit()));
    tree.split([' ', '(', ')', ',']).filter(place).collect::<Vec<_>>().join(" ")
}

fn comments(text: &str) -> Vec<&str> {
    let mut found: Vec<&str> = text.lines().filter_map(|line| line.find("//").map(|at| line[at..].trim())).collect();
    found.sort_unstable();
    found
}

/// The formatted text; it means the same, keeps the comments and stays as it is when formatted again.
fn formatted(text: &str) -> String {
    let once = dsl::fmt(text).expect("it parses");
    assert_eq!(meaning(text), meaning(&once), "{text}\n---\n{once}");
    assert_eq!(comments(text), comments(&once), "{text}\n---\n{once}");
    let twice = dsl::fmt(&once).expect("it parses");
    assert_eq!(once, twice, "from\n{text}");
    once
}

#[test]
fn examples_library_and_pages_keep_their_meaning() {
    let mut formatted_seeds = 0;
    for seed in SEEDS.iter() {
        let blocks: Vec<&str> = match seed.contains("```pace") {
            true => seed
                .split("```pace")
                .skip(1)
                .filter_map(|rest| rest.split("```").next()?.split_once('\n'))
                .map(|b| b.1)
                .collect(),
            false => vec![seed],
        };
        for block in blocks.into_iter().filter(|block| dsl::fmt(block).is_ok()) {
            let out = formatted(block);
            assert_eq!(dsl::load(block, &[]).0.is_some(), dsl::load(&out, &[]).0.is_some());
            formatted_seeds += 1;
        }
    }
    assert!(formatted_seeds > 40, "{formatted_seeds}");
}

/// The design's own example is in the canonical layout.
#[test]
fn the_reference_page_is_formatted() {
    let page = include_str!("../../docs/language.md");
    let example = page.split("```pace\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    assert_eq!(formatted(example), example);
}

#[test]
fn text_with_faults_is_left_alone() {
    let found = dsl::fmt("machine { ranks = }").expect_err("no value");
    assert_eq!(found[0].code, "P0101");
}

/// A key that would begin a block where it begins a line.
#[test]
fn text_that_another_layout_would_change_stays() {
    let text = "schedule x { order { warmup 1 { F } model drain { B }\n} }";
    assert_eq!(formatted(text), text);
    // Behind a clause that is not known the parser skips the rest of the line.
    let text = "schedule x {\n  placed x { y\n  } backward whole\n  flush every accumulate\n}";
    assert_eq!(formatted(text), text);
}

#[test]
fn layouts() {
    let texts = [
        "machine{ranks=4,memory=1GiB}",
        "\u{feff}// head\r\n\r\n\r\n\r\nmachine {\r\n\r\nranks=4 // four\r\n\r\n\r\nmemory <= 1 GiB, device = cpu\r\n// last\r\n}\r\n",
        "pipeline { // cut\n partition = [ // by hand\n [embed,block 0..2], // first\n [block 2..4,head]]\n accumulate=8}",
        "pipeline { partition = [\n[embed, block 0..2], [block 2..4, head]] }",
        "optimizer = adamw { lr = cosine(1e-3, warmup = 20, total = 400), betas = (0.9, 0.95), decay = 0.1, eps = 1e-8, more = 12345 }",
        "a = // inside\n 4\nb\n= -5 %",
        "schedule x { place linear, backward split; flush every accumulate\norder{warmup -1 + (P-s)*2{F} repeat{F;I;W when P-1-s+n>=P-1,}drain { W }}}",
        "schedule x { order { repeat { F, B } drain { B } } }",
        "schedule x {\n place linear\n order {\n  warmup max(0,-1+s) { F\n I }\n  drain { W }\n }\n}\nmachine { ranks = 1 }\n// end",
        "machine {}\nmachine {\n}\nmachine { // only this\n}",
        ", // first\nmachine { , // in it\n ranks = 1 }",
        "// nothing else",
        "",
    ];
    let shown: Vec<String> = texts.iter().map(|text| format!("{text}\n-----\n{}", formatted(text))).collect();
    insta::assert_snapshot!(shown.join("\n=====\n"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Edited examples that still parse.
    #[test]
    fn edited_examples(
        seed in any::<prop::sample::Index>(),
        edits in prop::collection::vec(any::<(prop::sample::Index, u8, prop::sample::Index)>(), 0..4),
    ) {
        let text = mutate(&SEEDS[seed.index(SEEDS.len().min(24))], &edits);
        if dsl::fmt(&text).is_ok() {
            formatted(&text);
        }
    }

    /// White space between tokens, comments and line breaks where the language allows them.
    #[test]
    fn other_white_space(seed in any::<prop::sample::Index>(), choices in prop::collection::vec(0_u8..12, 200)) {
        let seed = &SEEDS[seed.index(SEEDS.len().min(24))];
        let mut text = String::new();
        for (at, piece) in seed.split_inclusive([' ', '\n']).enumerate() {
            text.push_str(piece);
            match choices[at % choices.len()] {
                0 if !seed.contains("//") => text.push_str("// remark\n"),
                1 => text.push_str("  "),
                2 if piece.ends_with('\n') => text.push_str("\n\n// own line\n"),
                3 if piece.ends_with('\n') => text.push('\n'),
                _ => {}
            }
        }
        if dsl::fmt(&text).is_ok() {
            formatted(&text);
        }
    }
}

/// As `paceline fmt --check` would have them.
#[test]
fn library_and_examples_are_in_the_layout() {
    for folder in ["library", "../examples"] {
        let mut seen = 0;
        for file in std::fs::read_dir(format!("{}/{folder}", env!("CARGO_MANIFEST_DIR"))).expect("the folder is there")
        {
            let path = file.expect("readable").path();
            if path.extension().is_some_and(|e| e == "pace") {
                let text = std::fs::read_to_string(&path).expect("readable");
                assert_eq!(dsl::fmt(&text).as_ref(), Ok(&text), "{}: run `paceline fmt` on it", path.display());
                seen += 1;
            }
        }
        assert!(seen >= 7, "{folder} has {seen} files");
    }
}
