//! Staleness and optimizers in specs: policies of weights, recomputation, corrections, groups of parameters.

use crate::specs::{BIG, load, small};
use dsl::spec::*;

#[test]
fn groups_and_clipping() {
    let of = |text: &str| load(&small(&format!("optimizer = {text}")), &[]);
    let muon = of("muon { lr = linear(0.02, total = 9), group head = sgd { lr = 0.5 }, clip = per_stage(2) }");
    assert_eq!(muon.optimizer.value, Optimizer::Muon { momentum: 0.95, scale: MuonScale::MatchAdamW, decay: 0.1 });
    assert_eq!(muon.clip.expect("given").value, Clip::PerStage { max: 2.0 });
    let selectors = |g: &Group| g.selectors.iter().map(|s| s.value.clone()).collect::<Vec<_>>();
    let [head, rest] = &muon.groups[..] else { panic!("{:?}", muon.groups) };
    assert_eq!((selectors(head), head.implied), (vec![Selector::Kind(ParamKind::Head)], false));
    assert_eq!(head.learning_rate.value, LearningRate::Constant { lr: 0.5 });
    // What Muon leaves is AdamW's, at the same rate: steps are equally long.
    assert_eq!(selectors(rest), [ParamKind::Embedding, ParamKind::Vector].map(Selector::Kind));
    assert_eq!((rest.implied, &rest.learning_rate.value), (true, &muon.learning_rate.value));
    assert!(matches!(rest.optimizer.value, Optimizer::AdamW { .. }));
    let text = small(
        "optimizer = adamw {
  lr = 0.25
  group [vector, \"block.*.attn.*\"] = lion
  group \"head.weight\" = adamw { lr = 0.125 }
}",
    );
    let spec = load(&text, &[]);
    let [first, second] = &spec.groups[..] else { panic!("{:?}", spec.groups) };
    let pattern = |p: &str| Selector::Pattern(p.into());
    assert_eq!(selectors(first), [Selector::Kind(ParamKind::Vector), pattern("block.*.attn.*")]);
    assert_eq!(&text[first.selectors[1].span.clone()], "\"block.*.attn.*\"");
    assert_eq!(first.learning_rate.value, LearningRate::Constant { lr: 0.25 });
    assert_eq!(
        (selectors(second), &second.learning_rate.value),
        (vec![pattern("head.weight")], &LearningRate::Constant { lr: 0.125 })
    );
    let mars = of("mars");
    assert_eq!(
        mars.optimizer.value,
        Optimizer::Mars { beta1: 0.95, beta2: 0.99, eps: 1e-8, gamma: 0.025, decay: 0.01 }
    );
    assert_eq!(mars.groups.iter().flat_map(selectors).collect::<Vec<_>>(), [Selector::Kind(ParamKind::Vector)]);
    let normuon = of("normuon { betas = (0.9, 0.8), group [embedding, head, vector] = adamw }");
    assert_eq!(normuon.optimizer.value, Optimizer::NorMuon { momentum: 0.9, beta2: 0.8, decay: 0.1 });
    assert_eq!((normuon.groups.len(), normuon.groups[0].implied), (1, false));
    let soap = of("soap { frequency = 4, max_dim = 96 }");
    let (beta1, beta2, eps, decay) = (0.95, 0.95, 1e-8, 0.01);
    assert_eq!(soap.optimizer.value, Optimizer::Soap { beta1, beta2, eps, frequency: 4, max_dim: 96, decay });
    assert_eq!((soap.groups.len(), soap.groups[0].implied, soap.groups[0].selectors.len()), (1, true, 3));
    let set = load(&text, &["optimizer=muon { group embedding = sgd { lr = 1 } }"]);
    assert_eq!(set.groups.len(), 2);
}

#[test]
fn corrections() {
    let correction = |text: &str| load(&small(&format!("staleness {{ {text} }}")), &[]).staleness.correction;
    assert_eq!(correction("weights = current"), None);
    for (text, lambda, tau) in [
        ("error_feedback", 1.0, None),
        ("error_feedback { }", 1.0, None),
        ("error_feedback { lambda = 0.5 }", 0.5, None),
        ("error_feedback { tau = 0.75, lambda = 10 }", 10.0, Some(0.75)),
    ] {
        let found = correction(&format!("correction = {text}")).expect("given");
        assert_eq!(found.value, Correction::ErrorFeedback { lambda, tau }, "{text}");
    }
    let nesterov = |momentum, by_stage| Correction::Nesterov { momentum, by_stage };
    for (text, optimizer, expected) in [
        ("nesterov", "sgd { lr = 1 }", nesterov(0.99, false)),
        ("nesterov { momentum = 0.5 }", "adamw { betas = (0, 0.95) }", nesterov(0.5, false)),
        ("nesterov { by_stage = on }", "nadam", nesterov(0.9, true)),
        ("nesterov { by_stage = on, momentum = 0.99 }", "nadam", nesterov(0.99, true)),
        ("pipemare { anneal = 1000 }", "adan", Correction::PipeMare { anneal: Some(1000), discrepancy: None }),
        ("pipemare { discrepancy = 0.135 }", "lion", Correction::PipeMare { anneal: None, discrepancy: Some(0.135) }),
    ] {
        let found = correction(&format!("correction = {text} }}\noptimizer = {optimizer}\nrequire {{"));
        assert_eq!(found.expect("given").value, expected, "{text}");
    }
    let set =
        load(&small("staleness { correction = error_feedback }"), &["staleness.correction=error_feedback { tau = 2 }"]);
    let corrected = set.staleness.correction.expect("given").value;
    assert_eq!(corrected, Correction::ErrorFeedback { lambda: 1.0, tau: Some(2.0) });
}

/// Which weights are read: as the spec says, else as the schedule is made for.
#[test]
fn weights_by_spec_and_by_schedule() {
    let with = |schedule: &str, staleness: &str| {
        let text =
            format!("machine {{ ranks = 4 }}\npipeline {{ schedule = {schedule}, accumulate = 4 }}\n{staleness}");
        let (spec, found) = dsl::load(&text, &[]);
        (spec.map(|s| s.staleness.weights.value), found.iter().map(|d| d.code).collect::<Vec<_>>())
    };
    let none: [&str; 0] = [];
    for (schedule, staleness, weights) in [
        ("async_1f1b", "", Weights::Current),
        ("async_1f1b", "staleness { weights = stash }", Weights::Stash),
        ("async_1f1b", "staleness { weights = double_buffer, drift <= 0 }", Weights::DoubleBuffer),
        ("pipedream", "", Weights::Stash),
        ("pipedream", "staleness { delay <= 3 }", Weights::Stash),
        ("pipedream", "staleness { weights = stash }", Weights::Stash),
        ("pipedream_2bw", "", Weights::DoubleBuffer),
        ("gpipe", "staleness { weights = current }", Weights::Current),
        ("async_1f1b", "staleness { weights = predict }", Weights::Predict { tau: None }),
        ("async_1f1b", "staleness { weights = predict(tau = 0.5) }", Weights::Predict { tau: Some(0.5) }),
        ("async_1f1b", "staleness { weights = predict(2) }", Weights::Predict { tau: Some(2.0) }),
    ] {
        assert_eq!(with(schedule, staleness), (Some(weights), none.to_vec()), "{schedule} {staleness}");
    }
    assert_eq!(with("gpipe", "staleness { weights = stash }"), (Some(Weights::Stash), vec!["P0240"]));
    for (schedule, weights) in [
        ("pipedream", "current"),
        ("pipedream", "predict"),
        ("pipedream_2bw", "stash"),
        ("gpipe", "double_buffer"),
        ("gpipe", "predict"),
    ] {
        let found = with(schedule, &format!("staleness {{ weights = {weights} }}"));
        assert_eq!(found, (None, vec!["P0219"]), "{schedule} {weights}");
    }
    for (schedule, weights, expected) in [
        ("async_1f1b", "stash", &none[..]),
        ("pipedream_2bw", "double_buffer", &none),
        ("async_1f1b", "current", &["P0225"]),
        ("async_1f1b", "predict", &["P0225"]),
        // Also the remark that one version is kept.
        ("gpipe", "stash", &["P0240", "P0225"]),
    ] {
        let (spec, found) = with(schedule, &format!("staleness {{ weights = {weights}, correction = dc_asgd }}"));
        assert_eq!((spec.is_some(), &found[..]), (expected.is_empty(), expected), "{schedule} {weights}");
    }
    // A prediction makes up for staleness by itself, in passes that run once.
    for correction in ["error_feedback", "nesterov", "pipemare { anneal = 9 }", "pipemare { discrepancy = 0.1 }"] {
        let found = with("async_1f1b", &format!("staleness {{ weights = predict, correction = {correction} }}"));
        assert_eq!(found, (None, vec!["P0225"]), "{correction}");
    }
    let again = "staleness { weights = predict }\npipeline { schedule = async_1f1b, accumulate = 4, recompute = full }";
    let (_, found) = dsl::load(&format!("machine {{ ranks = 4 }}\n{again}"), &[]);
    assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["P0211"]);
    for wrong in ["predict(tau = 0)", "predict(tau)", "predict(after = 1)", "predict()"] {
        assert_eq!(with("async_1f1b", &format!("staleness {{ weights = {wrong} }}")).0, None, "{wrong}");
    }
}

#[test]
fn recomputation() {
    let text = |schedule: &str, recompute: &str| {
        format!(
            "machine {{ ranks = 4 }}\npipeline {{ schedule = {schedule}, accumulate = 4, recompute = {recompute} }}"
        )
    };
    for (word, recompute) in [("none", Recompute::None), ("attention", Recompute::Attention), ("full", Recompute::Full)]
    {
        assert_eq!(load(&text("gpipe", word), &[]).pipeline.recompute.value, recompute);
    }
    // What W reads would be kept from I on.
    assert_eq!(load(&text("zb_h1", "none"), &[]).pipeline.recompute.value, Recompute::None);
    for word in ["attention", "full"] {
        let (_, found) = dsl::load(&text("zb_h1", word), &[]);
        assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["P0241"]);
    }
    let (_, found) = dsl::load(&text("search(memory <= 2x)", "full"), &[]);
    let codes: Vec<_> = found.iter().map(|d| d.code).collect();
    assert!(
        codes.contains(&"P0211") && !codes.contains(&"P0241"),
        "its orders split, the library's need not: {codes:?}"
    );
    // A model for analysis only takes it as its own.
    let spec = load(BIG, &["model.recompute=none", "pipeline.recompute=full"]);
    assert_eq!(spec.model.expect("given").variant.recompute, Recompute::Full);
    // So does the reference GPT, which is estimated on a device that is not here.
    let model = "model gpt { layers = 4, width = 64, heads = 4, context = 32, vocab = 64 }\n";
    let spec =
        load(&(model.to_owned() + &text("gpipe", "full").replace("accumulate", "microbatch = 1, accumulate")), &[]);
    assert_eq!(spec.model.expect("given").variant.recompute, Recompute::Full);
}

#[test]
fn a_schedule_of_ones_own_says_its_weights() {
    let text = "machine { ranks = 4 }
pipeline { schedule = mine, accumulate = 4 }
schedule mine {
  place linear
  backward whole
  update local every accumulate
  weights WORD
  order { warmup P - 1 - s { F } repeat { F; B } drain { B } }
}";
    let spec = load(&text.replace("WORD", "stash"), &[]);
    assert_eq!((spec.schedule.weights, spec.staleness.weights.value), (Some(Weights::Stash), Weights::Stash));
    let (_, found) = dsl::load(&text.replace("WORD", "newest"), &[]);
    assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["P0212"]);
}
