//! Faulty files, several faults at once, and what is said about them.

use crate::render::report;

fn shown(text: &str) -> String {
    report(text, &dsl::load(text, &[]).1)
}

/// Codes in the order of the text.
fn codes(text: &str) -> Vec<&'static str> {
    dsl::load(text, &[]).1.iter().map(|d| d.code).collect()
}

/// A file with one line of `pipeline` replaced.
fn with(pipeline: &str) -> String {
    format!(
        "model gpt {{ layers = 8, width = 64, heads = 4, context = 32, vocab = 256 }}\nmachine {{ ranks = 4 }}\n\
         pipeline {{ schedule = gpipe, microbatch = 2, accumulate = 4, {pipeline} }}\n"
    )
}

#[test]
fn many_faults_in_one_file() {
    insta::assert_snapshot!(shown(
        "model gpt { layers = 8, widht = 256, heads = 0, context = 128, vocab = 256k }

machine { ranks = 4 GiB, memory = 1, link = 100 GB }

pipeline {
  partition  = balanced,
  schedule   = one_step_delay
  microbatch = = 4
  acumulate  = 4
  fuse       = yes
}

staleness { weights = stash  drift < 2 }
optimizer = adamw { lr = cosine(1e-3, warmup = 20, totl = 400), betas = 0.9, decay = 1.5 }
require { memory <= 128 us, bubble <= 5 }
"
    ));
}

#[test]
fn a_schedule_full_of_faults() {
    insta::assert_snapshot!(shown(
        "schedule mine {
  place    wave
  backward splt
  flush    every update
  sequence F = groups(P) chunks ascending
  ordre { }
  order {
    warmup { F }
    warmup n + m { F0 }
    warmup 2 + { F }
    repeat 3 { F; Q; U when n > 1 }
    repeet { F B }
    drain  { }
  }
}
machine { ranks = 4 }
pipeline { schedule = mine, accumulate = 4 }
"
    ));
}

#[test]
fn schedules_of_several_stages_with_faults() {
    let cases = [
        ("loop", "", "repeat { F }  drain { B }"),
        ("loop(0)", "", "repeat { F }  drain { B }"),
        ("loop(P)", "", "repeat { F }  drain { B }"),
        ("loop(v", "", "repeat { F }  drain { B }"),
        ("wave(2)", "", "repeat { F }  drain { B }"),
        ("wave", "", "repeat { F; F0 }  drain { B0; B1 }"),
        ("wave", "", "repeat { F0; F2 }  drain { B0; B1 }"),
        ("wave", "", "repeat { F0; F1 }  drain { B0 }"),
        ("linear", "", "repeat { F1 }  drain { B }"),
        ("loop(v)", "", "repeat { F0; F1 }  drain { B0; B1 }"),
        ("loop(v)", "sequence F = groups(P) chunks ascending", "repeat { F }  drain { B }"),
        ("loop(2)", "sequence F = groups(P) chunks ascending", "repeat { F0; F1 }  drain { B0; B1 }"),
        ("loop(2)", "sequence F = groups(n) chunks ascending", "repeat { F }  drain { B0; B1 }"),
        ("loop(2)", "sequence W = groups(P) chunks ascending", "repeat { F0; F1 }  drain { B0; B1 }"),
        ("loop(2)", "sequence F = groups(P) chunks upwards", "repeat { F }  drain { B0; B1 }"),
        ("loop(2)", "sequence F0 = groups(P) chunks ascending", "repeat { F }  drain { B0; B1 }"),
        ("wave", "", "block { F0 at s; F1 at P; B1; B0 }"),
        ("wave", "", "block every n { F0 at s; F1 at P; B1; B0 }"),
        ("wave", "", "block every 6 { F0; F1 at P; B1 when n > 1; B0 at n }"),
        ("linear", "", "repeat { F at 1; B }"),
        ("loop(2)", "sequence F = P", "repeat { F }  drain { B0; B1 }"),
        (
            "loop(2)",
            "sequence F = groups(P) chunks ascending; sequence F = groups(2) chunks descending",
            "repeat { F }  drain { B0; B1 }",
        ),
    ];
    let mut out = String::new();
    for (place, sequence, order) in cases {
        let text = format!(
            "schedule mine {{\n  place {place}\n  backward whole\n  flush every accumulate\n  {sequence}\n  order {{ {order} }}\n}}
machine {{ ranks = 4 }}\npipeline {{ schedule = mine, accumulate = 8 }}"
        );
        out += &format!("{place}; {sequence}; {order}\n");
        let (spec, found) = dsl::load(&text, &[]);
        assert!(spec.is_none() && !found.is_empty(), "{text}");
        for found in found {
            let at = &text[found.labels[0].span.clone()];
            out += &format!("    {} {} at `{at}`; {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn reading_goes_on_after_unclosed_and_stray_brackets() {
    insta::assert_snapshot!(shown(
        "machine { ranks = 4
pipeline {
  partition = [[embed, block 0..4
  schedule = gpipe
  accumulate = 4 ]
}
)
staleness { drift <= one }
optimizer = sgd { lr = (0.1 }
require { bubble <= 200 % }
"
    ));
}

#[test]
fn an_empty_file_lacks_two_blocks() {
    assert_eq!(codes(""), ["P0204", "P0204"]);
    assert_eq!(codes("// nothing\n"), ["P0204", "P0204"]);
}

#[test]
fn partitions_that_lose_or_repeat_layers() {
    let partitions = [
        "[[embed, block 0..2], [block 2..4], [block 4..6], [block 6..8, head]]",
        "[[embed, block 0..2], [block 2..4], [block 4..6], [block 6, head]]",
        "[[embed, block 0..2], [block 2..5], [block 4..6], [block 6..8, head]]",
        "[[block 0..2], [block 2..4], [block 4..6], [block 6..8]]",
        "[[embed, block 2..4], [block 0..2], [block 4..6], [block 6..8, head]]",
        "[[embed], [block 0..8], [head], []]",
        "[[embed, block 0..9], [head]]",
        "[[embed, blok 0..8], block 3, [head, 4]]",
        "[[embed, block 4..4], [block 0..8, head], [tail], [block -1]]",
        "[]",
    ];
    let mut out = String::new();
    for partition in partitions {
        let text = with(&format!("partition = {partition}"));
        out += &format!("{partition}\n");
        for found in dsl::load(&text, &[]).1 {
            let at = &text[found.labels[0].span.clone()];
            out += &format!("    {} `{at}`: {}; help: {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn fewer_blocks_than_ranks_need_an_explicit_partition() {
    let text = |partition: &str| {
        format!(
            "model gpt {{ layers = 2, width = 64, heads = 4, context = 32, vocab = 256 }}\nmachine {{ ranks = 4 }}\n\
             pipeline {{ schedule = gpipe, microbatch = 2, accumulate = 4 {partition} }}"
        )
    };
    assert_eq!(codes(&text("")), ["P0222"]);
    assert_eq!(codes(&text(", partition = [[embed], [block 0], [block 1], [head]]")), [""; 0]);
}

#[test]
fn values_out_of_range() {
    let mut out = String::new();
    for line in [
        "boundary = every 0 updates",
        "boundary every 3 micro",
        "boundary = 3",
        "boundary <= every 3 updates",
        "microbatch = 3k",
        "fuse = maybe",
        "accumulate { 4 }",
        "chunks = 0",
    ] {
        for found in dsl::load(&with(line), &[]).1 {
            out += &format!("{line}: {} {}; {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    let machine = |line: &str| format!("machine {{ {line} }}\npipeline {{ schedule = gpipe, accumulate = 4000 }}");
    for line in [
        "ranks = 0",
        "ranks = 99999999999999999999",
        "ranks = -3",
        "ranks = 1000",
        "ranks = 4, memory = 9e30 TiB",
        "ranks = 4, memory = 0.1 B",
        "ranks = 4, memory = 5 %",
        "ranks = 4, cost { F = 0, B = 1 us }",
        "ranks = 4, cost { F = 1 us, B = 1 ns }",
        "ranks = 4, cost { F = 1 us }",
        "ranks = 4, cost { F = 1 us, I = 1 us, hop = 0 }",
        "ranks = 4, cost { F = 1 us, W = 1 us }",
        "ranks = 4, cost { F = 1 us, B = -1 us, hop = 1 hour }",
        "ranks = 2, cost { F = [1 us, 2], B = [] }",
        "ranks = 4, cost = 4",
    ] {
        for found in dsl::load(&machine(line), &[]).1 {
            out += &format!("{line}: {} {}; {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn corrections_with_faults() {
    let mut out = String::new();
    for value in [
        "error_feedbak",
        "dc_asgd { lambda = 0.04 }",
        "0.5",
        "feedback { lambda = 1 }",
        "error_feedback { lambda = 0 }",
        "error_feedback { lambda = 11, tau = -1 }",
        "error_feedback { tau = 1 us, kappa = 2 }",
        "error_feedback(1)",
        "nesterov { momentum = 1, by_stage = maybe }",
        "nesterov { momentum = 0.995, by_stage = on }",
        "nesterov }\noptimizer = adamw {",
        "nesterov }\noptimizer = sgd { lr = 1, momentum = 0.9",
        "nesterov }\noptimizer = adan {",
        "nesterov }\noptimizer = lion {",
        "nesterov }\noptimizer = signum {",
        "pipemare",
        "pipemare { anneal = 0, discrepancy = 1 }",
        "pipemare { discrepancy = 0.1 }, weights = double_buffer",
    ] {
        let line = format!("staleness {{ correction = {value} }}");
        let text = format!("machine {{ ranks = 2 }}\npipeline {{ schedule = gpipe, accumulate = 4 }}\n{line}\n");
        let found = dsl::load(&text, &[]).1;
        assert!(found.iter().any(|d| d.is_error()), "{line}");
        for found in found {
            out += &format!("{value}: {} {}; {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn optimizers_with_faults() {
    let mut out = String::new();
    for line in [
        "optimizer = adam { lr = 1e-3 }",
        "optimizer = adamm { lr = 1e-3 }",
        "optimizer = sgd",
        "optimizer = 4",
        "optimizer <= adamw",
        "optimizer { lr = 4 }",
        "optimizer = adamw { lr = 0 }",
        "optimizer = adamw { lr = 1e-3 us, eps = 0, momentum = 0.9, clip = 1.0 }",
        "optimizer = adamw { lr = linear(1e-3), betas = (0.9, 1) }",
        "optimizer = adamw { lr = linear(1e-3, warmup = 9, total = 9) }",
        "optimizer = adamw { lr = wsd(1e-3, warmup = 50, total = 100, decay = 0.6) }",
        "optimizer = adamw { lr = wsd(1e-3, total = 100, decay = 2) }",
        "optimizer = adamw { lr = step(1e-3) }",
        "optimizer = adamw { betas = (0.9, 0.95, 0.99) }",
        "optimizer = adan { betas = (0.9, 0.95) }",
        "optimizer = lion { eps = 1e-8 }",
        "optimizer = nadam { momentum_decay = 2 }",
        "optimizer = adamw { lr = cosine(1e-3, 20, 400, 1e-4, 5) }",
        "optimizer = adamw { lr = cosine(1e-3, total = 400, peak = 1e-3) }",
        "optimizer = adamw { lr = cosine(1e-3, total = 400, floor = 1) }",
        "optimizer = adamw { lr = cosin(1e-3) }",
        "optimizer = sgd { lr = constant() }",
        "optimizer = sgd { lr = warm }",
        "optimizer = muon { scale = torch, betas = (0.9, 0.95) }",
        "optimizer = muon { scale = original }",
        "optimizer = mars { gamma = 2 }",
        "optimizer = soap { frequency = 0, max_dim = 1.5 }",
        "optimizer = adamw { group = sgd { lr = 1 } }",
        "optimizer = adamw { group embeding = sgd { lr = 1 } }",
        "optimizer = adamw { group [] = lion, group 4 = lion }",
        "optimizer = adamw { group \"a = lion }",
        "optimizer = adamw { group head = lion { group vector = lion } }",
        "optimizer = adamw { group head = lion { clip = per_stage(1) } }",
        "optimizer = adamw { group head = 3 }",
        "optimizer = adamw { group head lion }",
        "optimizer = adamw { clip = 1.0 }",
        "optimizer = adamw { clip = global(0) }",
        "optimizer = adamw { clip = per_stages(1.0) }",
        "optimizer = adamw { clip = per_stage(0) }",
        "optimizer = adamw { clip = per_stage(max = 1), clip = per_tensor(1) }",
    ] {
        let text = format!("machine {{ ranks = 2 }}\npipeline {{ schedule = gpipe, accumulate = 4 }}\n{line}\n");
        let found = dsl::load(&text, &[]).1;
        assert!(found.iter().any(|d| d.is_error()), "{line}");
        for found in found {
            out += &format!("{line}: {} {}; {}\n", found.code, found.message, found.help.unwrap_or_default());
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn overrides_with_faults() {
    let text = with("partition = balanced");
    let mut out = String::new();
    for set in [
        "pipeline.accumulate=0",
        "pipeline.accumulate=8 us",
        "pipeline.accumulate=",
        "pipeline.accumulate=8, fuse = off",
        "pipeline.accumulate<8",
        "pipeline.acumulate=8",
        "accumulate=8",
        "pipelin.accumulate=8",
        "pipeline..accumulate=8",
        "pipeline.a.b=8",
        "pipeline.chunks=many",
        "staleness.drift=many",
        "machine.cost.F=1",
        "machine.cost.G=1 us",
        "machine.memory=80",
        "optimizer=lamb",
        "optimizer.lr=-1",
        "optimizer.momentum=0.9",
        "optimiser=sgd",
        "model.heads=5",
        "\u{1b}[31m=\"",
        "",
    ] {
        let found = dsl::load(&text, &[dsl::Set(set.into())]).1;
        assert!(found.iter().any(|d| d.is_error()), "{set}");
        for found in found {
            let notes = found.notes.join("; ");
            let help = found.help.unwrap_or_default();
            out += &format!(
                "{}: {} {}\n    help: {help}\n    note: {notes}\n",
                set.escape_debug(),
                found.code,
                found.message
            );
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn variants_and_devices_with_faults() {
    let text = |model: &str, device: &str| {
        format!(
            "model gpt {{ layers = 8, width = 64, heads = 8, context = 32, vocab = 256, {model} }}\n\
             machine {{ ranks = 4, device = {device} }}\npipeline {{ schedule = gpipe, microbatch = 2, accumulate = 4 }}\n"
        )
    };
    let mut out = String::new();
    for (model, device) in [
        ("dtype = fp8", "cpu"),
        ("dtype = f64, kv_heads = 3", "cpu"),
        ("kv_heads = 4, tensor_parallel = 8", "cpu"),
        ("mlp = swiglu { hidden = 100 }, tensor_parallel = 8", "cpu"),
        ("mlp = swiglu", "cpu"),
        ("mlp = swiglu { hiden = 4 }", "cpu"),
        ("mlp = moe { experts = 8 }", "cpu"),
        ("mlp = 4, norm = rsm, zero = 4, tied = true", "cpu"),
        ("zero = 1", "cpu"),
        ("sequence_parallel = on", "cpu"),
        ("recompute = attention", "cpu"),
        ("experts = 8", "cuda"),
        ("norm = rms", "h100 { memory = 80 GB, flops = 400 TFLOPS }"),
        ("norm = rms", "h100 { memory = 80, flops = 400 GB/s, link = 0 GB/s, latency = 1 B }"),
        ("norm = rms", "h100"),
    ] {
        for found in dsl::load(&text(model, device), &[]).1 {
            out += &format!(
                "{model}; {device}\n    {} {}; {}\n",
                found.code,
                found.message,
                found.help.unwrap_or_default()
            );
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn latency_that_can_not_be_covered() {
    let values = [
        "full",
        "partial(50)",
        "partial(50 %, 1)",
        "partial(share = 50 %)",
        "half(50 %)",
        "most",
        "0.5",
        "partial(0.5)",
    ];
    let cases = values.map(|value| shown(&with(&format!("cover_latency = {value}"))));
    insta::assert_snapshot!(cases.join("\n----\n"));
    assert_eq!(codes(&with("cover_latency = none")), [""; 0]);
    assert_eq!(codes(&with("cover_latency = full").replace("gpipe", "async_1f1b")), [""; 0]);
}

#[test]
fn searches_with_faults() {
    let limits = [
        "memory = 2x",
        "memory < 2x",
        "memory <= 2",
        "memory <= 0x",
        "memory <= 2y",
        "memory <= 40 GiB, memory <= 1x",
        "memry <= 2x",
        "speed <= 3",
        "2x",
        "in_flight <= 0",
        "drift <= 1.5",
        "place <= linear",
        "place = loop",
        "place = ring",
    ];
    let cases = limits.map(|limits| {
        let text = with("fuse = on").replace("schedule = gpipe", &format!("schedule = search({limits})"));
        let (text, found) = (text.lines().last().unwrap_or_default().to_owned(), dsl::load(&text, &[]).1);
        let found: Vec<String> = found
            .iter()
            .map(|d| format!("{} {} -> {}", d.code, d.message, d.help.clone().unwrap_or_default()))
            .collect();
        format!("{}\n  {}", &text[11..text.find(", microbatch").unwrap_or(text.len())], found.join("\n  "))
    });
    insta::assert_snapshot!(cases.join("\n"));
    let alone = "machine { ranks = 4 }\npipeline { schedule = SEARCH, accumulate = 8 }\n";
    let timed = alone.replace("4 }", "4, cost { F = 1 ms, B = 2 ms } }");
    for (text, search, expected) in [
        (alone, "search(memory <= 2x)", &["P0236"][..]),
        (&timed, "search(memory <= 1 GiB)", &["P0236"]),
        (&timed, "search", &["P0212"]),
        (&timed, "search { memory <= 2x }", &["P0212"]),
        (&timed, "search(memory <= 1.5x, in_flight <= 4, drift <= 1, delay <= 2, place = wave)", &[]),
    ] {
        assert_eq!(codes(&text.replace("SEARCH", search)), expected, "{search}");
    }
    assert_eq!(codes(&with("fuse = on").replace("gpipe", "search(memory <= 1 GiB)")), [""; 0]);
    assert_eq!(codes(&with("cover_latency = full").replace("gpipe", "search(drift <= 1)")), ["P0240"]);
}
