//! What targets lack.

use dsl::spec::Spec;
use model::device::{HEAD_MAX, check};
use model::target::{Chip, CpuClass, Target};

const CPU: Target = Target::Cpu(CpuClass::X86V3);
const GPU: Target = Target::Cuda(Chip::Sm90);

fn load(text: &str) -> Spec {
    let (spec, found) = dsl::load(text, &[]);
    spec.unwrap_or_else(|| panic!("{found:?}"))
}

/// The spec of a page.
fn example(code: &str) -> Spec {
    let page = dsl::explain(code).expect("listed");
    let (_, rest) = page.split_once("```pace\n").expect("a page has an example");
    load(rest.split_once("```").expect("the example ends").0)
}

#[test]
fn the_pages_examples_give_their_codes_on_their_targets() {
    for (code, wrong, right) in [("P0242", GPU, CPU), ("P0242", Target::Emulated, CPU), ("P0243", CPU, GPU)] {
        let spec = example(code);
        let found = check(&spec, wrong);
        assert!(found.len() == 1 && found[0].code == code && found[0].help.is_some(), "{found:?}");
        assert_eq!(found[0].is_error(), code == "P0242");
        assert_eq!(check(&spec, right), []);
    }
}

#[test]
fn the_help_names_the_fewest_heads_that_fit() {
    let text = |width: u32, heads: u32| {
        format!(
            "model gpt {{ layers = 2, width = {width}, heads = {heads}, context = 8, vocab = 256 }}\n\
             machine {{ ranks = 1 }}\npipeline {{ schedule = gpipe, microbatch = 1, accumulate = 1 }}\n"
        )
    };
    assert_eq!(check(&load(&text(HEAD_MAX, 1)), GPU), []);
    let found = check(&load(&text(1131, 1)), GPU);
    assert!(found[0].help.as_ref().is_some_and(|help| help.contains("at least 13 heads")), "{found:?}");
    assert_eq!(check(&load(&text(1131, 13)), GPU), []);
}
