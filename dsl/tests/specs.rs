//! Valid files and the specifications that they mean.

use dsl::Set;
use dsl::schedule::{Action, Backward, BinaryOp, CmpOp, Cond, Expr, PhaseKind, Update, Var};
use dsl::spec::{
    Attention, Cost, Costs, Dtype, Layer, LayerCosts, LearningRate, Mlp, Norm, Optimizer, Partition, Position,
    Recompute, Spec, Times, Variant,
};

const DESIGN: &str = "model gpt { layers = 8, width = 256, heads = 8, context = 128, vocab = 256 }

machine { ranks = 4, device = cpu, memory = 1 GiB }

pipeline {
  partition  = balanced            // or [[embed, block 0..2], [block 2..4], [block 4..6], [block 6..8, head]]
  schedule   = async_1f1b          // a name from the library, or a schedule defined in this file
  microbatch = 4                   // sequences
  accumulate = 4                   // micro-batches per optimizer update
}

staleness {
  weights = current                // PACI: backward reads the weights as they are; no copies
  drift  <= 1                      // proved, or it does not compile; `delay <=` likewise
}

optimizer = adamw { lr = cosine(1e-3, warmup = 20, total = 400), betas = (0.9, 0.95), decay = 0.1 }

require { memory <= 128 MiB, bubble <= 5 % }
";

pub fn load(text: &str, sets: &[&str]) -> Spec {
    let sets: Vec<Set> = sets.iter().map(|s| Set((*s).into())).collect();
    let (spec, found) = dsl::load(text, &sets);
    assert_eq!(found, [], "{text}");
    spec.expect("no diagnostics, so a spec")
}

pub fn small(rest: &str) -> String {
    format!("machine {{ ranks = 4 }}\npipeline {{ schedule = one_f_one_b, accumulate = 8 }}\n{rest}")
}

#[test]
fn the_design_s_example() {
    let spec = load(DESIGN, &[]);
    let model = spec.model.as_ref().expect("given");
    let sizes = [&model.layers, &model.width, &model.heads, &model.context, &model.vocab].map(|at| at.value);
    assert_eq!(sizes, [8, 256, 8, 128, 256]);
    assert_eq!(spec.machine.ranks.value, 4);
    assert_eq!(spec.machine.memory.as_ref().map(|m| m.of(3).value), Some(1 << 30));
    assert_eq!(spec.machine.cost, None);
    assert_eq!(spec.pipeline.partition.value, Partition::Balanced);
    assert_eq!((spec.pipeline.microbatch.value, spec.pipeline.accumulate.value), (4, 4));
    assert_eq!((spec.pipeline.boundary.clone(), spec.pipeline.fuse.value), (None, true));
    assert_eq!(spec.staleness.drift.as_ref().map(|at| at.value), Some(1));
    assert_eq!(spec.staleness.delay, None);
    let cosine = LearningRate::Cosine { peak: 1e-3, warmup: 20, total: 400, floor: 0.1 * 1e-3 };
    assert_eq!(spec.learning_rate.value, cosine);
    assert_eq!(spec.optimizer.value, Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 });
    assert_eq!(spec.require.memory.as_ref().map(|m| m.of(0).value), Some(128 << 20));
    assert_eq!(spec.require.bubble.as_ref().map(|at| at.value), Some(0.05));
    assert_eq!((spec.schedule.name.as_str(), spec.schedule.library), ("async_1f1b", true));
    assert_eq!(spec.stages(), 4);
    let text = |span: &std::ops::Range<usize>| &DESIGN[span.clone()];
    assert_eq!(text(&spec.require.memory.expect("given").of(0).span), "128 MiB");
    assert_eq!(text(&spec.pipeline.schedule.span), "async_1f1b");
    assert_eq!(text(&spec.learning_rate.span), "cosine(1e-3, warmup = 20, total = 400)");
}

#[test]
fn defaults() {
    let text = small("");
    let spec = load(&text, &[]);
    assert_eq!(spec.optimizer.value, Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 });
    assert_eq!(spec.learning_rate.value, LearningRate::Constant { lr: 1e-3 });
    assert_eq!(spec.pipeline.microbatch.value, 1);
    let start = text.find("pipeline").expect("there");
    assert_eq!(spec.pipeline.fuse.span, start..start);
    assert_eq!(spec.pipeline.microbatch.span, start..start);
    assert_eq!(spec.model, None);
    let sgd = load(&small("optimizer = sgd { lr = constant(0.1), momentum = 0.9 }"), &[]);
    assert_eq!(sgd.optimizer.value, Optimizer::Sgd { momentum: 0.9, decay: 0.0 });
    let of = |text: &str| load(&small(&format!("optimizer = {text}")), &[]);
    let rate = |text: &str| of(&format!("sgd {{ lr = {text} }}")).learning_rate.value;
    let linear = LearningRate::Linear { peak: 0.5, warmup: 5, total: 50, floor: 0.0 };
    assert_eq!(rate("linear(0.5, 5, 50, 0)"), linear);
    let wsd = LearningRate::Wsd { peak: 0.5, warmup: 5, total: 50, decay: 10, floor: 0.05 };
    assert_eq!(rate("wsd(0.5, warmup = 5, total = 50, decay = 0.2)"), wsd);
    let lion = of("lion");
    assert_eq!(lion.optimizer.value, Optimizer::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1 });
    assert_eq!(lion.learning_rate.value, LearningRate::Constant { lr: 1e-4 });
    assert_eq!(of("signum { momentum = 0.5 }").optimizer.value, Optimizer::Signum { momentum: 0.5, decay: 0.0 });
    let nadam = Optimizer::NAdam { beta1: 0.9, beta2: 0.999, eps: 1e-8, momentum_decay: 0.004, decay: 0.2 };
    assert_eq!(of("nadam { decay = 0.2 }").optimizer.value, nadam);
    let adan = Optimizer::Adan { beta1: 0.5, beta2: 0.6, beta3: 0.7, eps: 1e-8, decay: 0.02 };
    assert_eq!(of("adan { betas = (0.5, 0.6, 0.7) }").optimizer.value, adan);
    assert_eq!(sgd.learning_rate.value, LearningRate::Constant { lr: 0.1 });
}

#[test]
fn layout_does_not_matter() {
    let tight = "pipeline{accumulate=8,schedule=one_f_one_b,}machine{ranks=4}";
    let loose =
        "\u{feff}machine\n{\nranks\n=\n4\n}\r\npipeline { // c\n\n schedule = one_f_one_b\n\n , accumulate = 8e0 }";
    for text in [tight, loose] {
        let spec = load(text, &[]);
        assert_eq!((spec.machine.ranks.value, spec.pipeline.accumulate.value), (4, 8), "{text}");
    }
}

fn stage_costs(spec: &Spec) -> Costs {
    match spec.machine.cost.as_ref().map(|at| &at.value) {
        Some(Cost::Stages(costs)) => costs.clone(),
        other => panic!("times of stages, not {other:?}"),
    }
}

#[test]
fn costs_by_layer() {
    let text = |cost: &str| {
        format!(
            "model gpt {{ layers = 2, width = 64, heads = 4, context = 32, vocab = 256 }}\n\
             machine {{ ranks = 2, cost {{ {cost} }} }}\npipeline {{ schedule = gpipe, microbatch = 1, accumulate = 1 }}"
        )
    };
    let layers = |cost: &str| match load(&text(cost), &[]).machine.cost.expect("given").value {
        Cost::Layers(costs) => costs,
        other => panic!("times of layers, not {other:?}"),
    };
    let costs = layers(
        "embed { F = 5 ns, B = 0 }, block { F = [1 ns, 2 ns], I = 3 ns, W = 4 ns }, head { F = 7 ns, B = 9 ns }, hop = 1 us",
    );
    let times = |f_ns, i_ns, w_ns| Times { f_ns, i_ns, w_ns };
    let blocks = vec![times(1, 3, 4), times(2, 3, 4)];
    assert_eq!(costs, LayerCosts { embed: times(5, 0, 0), blocks, head: times(7, 4, 5), hop_ns: 1000, u_ns: vec![] });
    let stages = costs.stages(&[vec![Layer::Embed], vec![Layer::Block(0), Layer::Block(1), Layer::Head]]);
    assert_eq!(stages, Costs { f_ns: vec![5, 10], i_ns: vec![1, 10], w_ns: vec![1, 13], hop_ns: 1000, u_ns: vec![] });
    let by_stage =
        layers("embed { F = 0, B = 0 }, block { F = 1 us, B = 1 us }, head { F = 1 us, B = 1 us }, U = [1 us, 0]");
    assert_eq!(by_stage.stages(&[vec![Layer::Embed], vec![Layer::Head]]).u_ns, [1000, 0]);
    let codes = |text: &str| dsl::load(text, &[]).1.iter().map(|d| d.code).collect::<Vec<_>>();
    assert_eq!(codes(&text("block { F = 1 us, B = 1 us }, head { F = 1 us }")), ["P0204", "P0204"]);
    let embed = "embed { F = 0, B = 0 }, head { F = 1 us, B = 1 us }";
    assert_eq!(codes(&text(&format!("{embed}, block {{ F = [1 us], B = 1 us }}"))), ["P0217"]);
    assert_eq!(codes(&text(&format!("{embed}, block {{ F = 1 us, B = 1 us }}, F = 2 us"))), ["P0218"]);
    let bare = text(&format!("{embed}, block {{ F = 1 us, B = 1 us }}"));
    assert_eq!(codes(bare.split_once('\n').expect("two lines").1), ["P0223"]);
}

#[test]
fn costs_of_a_profile() {
    let text =
        "machine { ranks = 2, cost = profile(\"measured/a b.csv\") }\npipeline { schedule = gpipe, accumulate = 1 }";
    let cost = load(text, &[]).machine.cost.expect("given").value;
    assert_eq!(cost, Cost::Profile("measured/a b.csv".into()));
    let set = load(&small(""), &["machine.cost=profile(\"x.csv\")"]);
    assert_eq!(set.machine.cost.expect("given").value, Cost::Profile("x.csv".into()));
    let block = text.replace("= profile(\"measured/a b.csv\")", "{ F = 1 us, B = 1 us }");
    let rewritten = dsl::with_sets(&block, &[Set("machine.cost=profile(\"x.csv\")".into())]);
    assert_eq!(load(&rewritten, &[]).machine.cost.expect("given").value, Cost::Profile("x.csv".into()), "{rewritten}");
    for wrong in ["profile()", "profile(x)", "profile(\"\")", "profile(\"a\", 2)", "profile"] {
        let (_, found) = dsl::load(&text.replace("profile(\"measured/a b.csv\")", wrong), &[]);
        assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["P0212"], "{wrong}");
    }
}

#[test]
fn costs_and_units() {
    let costs = |cost: &str| {
        let text =
            format!("machine {{ ranks = 2, cost {{ {cost} }} }}\npipeline {{ schedule = gpipe, accumulate = 1 }}");
        stage_costs(&load(&text, &[]))
    };
    let paper = costs("F = 18522 us, I = 18086 us, W = 9337 us, hop = 601 us");
    assert_eq!((&paper.f_ns[..], &paper.i_ns[..]), (&[18_522_000][..], &[18_086_000][..]));
    assert_eq!((&paper.w_ns[..], paper.hop_ns), (&[9_337_000][..], 601_000));
    let whole = costs("F = [1.5 ms, 0.25 s], B = 7 ns");
    assert_eq!((&whole.f_ns[..], whole.hop_ns), (&[1_500_000, 250_000_000][..], 0));
    assert_eq!((&whole.i_ns[..], &whole.w_ns[..]), (&[3][..], &[4][..]));
}

#[test]
fn bytes_are_exact() {
    let bytes = |text: &str| {
        let text = format!("machine {{ ranks = 2, memory = {text} }}\npipeline {{ schedule = gpipe, accumulate = 1 }}");
        load(&text, &[]).machine.memory.expect("given").of(1).value
    };
    assert_eq!(bytes("1 TiB"), 1 << 40);
    assert_eq!(bytes("80 GB"), 80_000_000_000);
    assert_eq!(bytes("1.5KiB"), 1536);
    assert_eq!(bytes("1_000_000_000_000_001 B"), 1_000_000_000_000_001);
}

#[test]
fn bounds_on_memory_by_rank() {
    let text = "model gpt { layers = 8, width = 64, heads = 4, context = 32, vocab = 256 }
machine { ranks = 2, memory = [24 GiB, 16 GiB] }
pipeline { schedule = gpipe, microbatch = 1, accumulate = 1 }
require { memory <= [1 GiB, 512 MiB] }";
    let spec = load(text, &["require.memory=[2 GiB, 1 GiB]"]);
    let bytes = |limits: Option<dsl::spec::Limits>| limits.map(|l| [0, 1].map(|rank| l.of(rank).value >> 30));
    assert_eq!((bytes(spec.machine.memory), bytes(spec.require.memory)), (Some([24, 16]), Some([2, 1])));
    for (right, wrong) in [("[24 GiB, 16 GiB]", "[24 GiB]"), ("[1 GiB, 512 MiB]", "[]")] {
        let (spec, found) = dsl::load(&text.replace(right, wrong), &[]);
        assert_eq!((spec, found.iter().map(|d| d.code).collect()), (None, vec!["P0217"]));
    }
}

#[test]
fn explicit_partitions() {
    let partition = "[[embed, block 0], [block 1..4], [block 4..7], [block 7, head]]";
    let set = format!("pipeline.partition={partition}");
    let Partition::Explicit(stages) = load(DESIGN, &[&set]).pipeline.partition.value else { panic!("explicit") };
    let blocks = |range: std::ops::Range<u32>| range.map(Layer::Block).collect::<Vec<_>>();
    let last = vec![Layer::Block(7), Layer::Head];
    assert_eq!(stages, [vec![Layer::Embed, Layer::Block(0)], blocks(1..4), blocks(4..7), last]);
}

#[test]
fn boundaries() {
    for line in ["boundary = every 100 updates", "boundary every 100 updates"] {
        let text = format!("machine {{ ranks = 2 }}\npipeline {{ schedule = gpipe, accumulate = 1\n{line} }}");
        assert_eq!(load(&text, &[]).pipeline.boundary.expect("given").value, 100);
    }
}

#[test]
fn overrides() {
    let sets = ["pipeline.accumulate=8", "staleness.drift=3", "staleness.delay<=2", "optimizer.lr=constant(0.5)"];
    let spec = load(DESIGN, &sets);
    assert_eq!(spec.pipeline.accumulate.value, 8);
    assert_eq!(&DESIGN[spec.pipeline.accumulate.span], "4", "the place of the value that it replaces");
    assert_eq!(spec.staleness.drift.map(|at| at.value), Some(3));
    assert_eq!(spec.staleness.delay.map(|at| at.value), Some(2));
    assert_eq!(spec.learning_rate.value, LearningRate::Constant { lr: 0.5 });
    let more = ["optimizer=sgd { lr = 0.1 }", "optimizer.momentum=0.5", "machine.cost.F=1 ms", "machine.cost.B=2ms"];
    let spec = load(DESIGN, &more);
    assert_eq!(spec.optimizer.value, Optimizer::Sgd { momentum: 0.5, decay: 0.0 });
    assert_eq!(stage_costs(&spec).f_ns, [1_000_000]);
    let added = load(&small(""), &["require.bubble=0.1", "optimizer.lr=0.1", "pipeline.schedule=gpipe"]);
    assert_eq!(added.require.bubble.map(|at| at.value), Some(0.1));
    assert_eq!(added.learning_rate.value, LearningRate::Constant { lr: 0.1 });
    assert_eq!(added.schedule.name, "gpipe");
}

#[test]
fn a_schedule_of_the_file() {
    let text = "schedule zb_like {
  place linear; backward split
  flush every accumulate
  order {
    warmup P - 1 - s { F }
    repeat           { F; I; W when P - 1 - s + n >= P - 1 }
    drain            { W }
  }
}
machine { ranks = 4 }
pipeline { schedule = zb_like, accumulate = 8 }";
    let schedule = load(text, &[]).schedule;
    assert_eq!((schedule.backward, schedule.update, schedule.library), (Backward::Split, Update::Flush, false));
    let sub = |a, b| Expr::Binary(BinaryOp::Sub, Box::new(a), Box::new(b));
    let ahead = sub(sub(Expr::Var(Var::P), Expr::Number(1)), Expr::Var(Var::S));
    assert_eq!(schedule.order[0].kind, PhaseKind::Warmup(ahead.clone()));
    assert_eq!(schedule.order[1].body.iter().map(|s| s.action).collect::<Vec<_>>(), [Action::F, Action::I, Action::W]);
    let left = Expr::Binary(BinaryOp::Add, Box::new(ahead), Box::new(Expr::Var(Var::N)));
    let right = sub(Expr::Var(Var::P), Expr::Number(1));
    assert_eq!(schedule.order[1].body[2].when, Some(Cond { left, op: CmpOp::Ge, right }));
    assert_eq!(schedule.order[2].kind, PhaseKind::Drain);
    assert_eq!(&text[schedule.order[1].body[2].span.clone()], "W when P - 1 - s + n >= P - 1");
}

#[test]
fn a_schedule_of_several_stages_a_rank() {
    let text = |pipeline: &str| {
        format!(
            "schedule mine {{
  place    loop(v)
  backward whole
  flush    every accumulate
  sequence F = groups(P) chunks ascending
  sequence B = groups(M / v) chunks descending
  order {{ warmup (v - 1) * P {{ F }}  repeat 3 {{ F; B }}  drain {{ F; B }} }}
}}
machine {{ ranks = 4 }}
pipeline {{ accumulate = 8, {pipeline} }}"
        )
    };
    let spec = load(&text("schedule = mine, chunks = 3"), &[]);
    assert_eq!(spec.stages(), 12);
    let [f, b] = &spec.schedule.sequences[..] else { panic!("two sequences") };
    assert_eq!((f.action, f.descending, &f.groups), (Action::F, false, &Expr::Var(Var::P)));
    assert_eq!((b.action, b.descending), (Action::B, true));
    assert_eq!(spec.schedule.order[1].kind, PhaseKind::Counted(Expr::Number(3)));
    assert_eq!(load(&text("schedule = mine"), &[]).stages(), 8, "two where the file does not say");
    for (name, stages) in [("gpipe", 4), ("zb_v", 8)] {
        let (spec, found) = dsl::load(&text(&format!("schedule = {name}, chunks = 3")), &[]);
        assert_eq!(spec.map(|spec| spec.stages()), Some(stages));
        assert_eq!(found.iter().map(|d| (d.code, d.is_error())).collect::<Vec<_>>(), [("P0240", false)]);
    }
}

/// One of three keys follows from the others; nothing is rounded.
#[test]
fn a_batch_is_microbatches_times_their_size() {
    let text = |pipeline: &str| format!("machine {{ ranks = 2 }}\npipeline {{ schedule = gpipe, {pipeline} }}");
    let sizes = |pipeline: &str| {
        let pipeline = load(&text(pipeline), &[]).pipeline;
        (pipeline.microbatch.value, pipeline.accumulate.value)
    };
    assert_eq!(sizes("batch = 8, accumulate = 4"), (2, 4));
    assert_eq!(sizes("batch = 8, microbatch = 2"), (2, 4));
    assert_eq!(sizes("batch = 8, microbatch = 2, accumulate = 4"), (2, 4));
    for (pipeline, code, piece) in [
        ("batch = 8, accumulate = 3", "P0229", "does not divide into 3 micro-batches"),
        ("batch = 8, microbatch = 3", "P0229", "does not divide into micro-batches of 3"),
        ("batch = 8, microbatch = 1, accumulate = 3", "P0229", "does not divide into 3 micro-batches"),
        ("batch = 8, microbatch = 1, accumulate = 4", "P0229", "is not 4 micro-batches of 1: these are 4"),
        ("batch = 8", "P0204", "`pipeline` has no `accumulate`"),
        ("batch = 1_000_000_000, microbatch = 1", "P0229", "does not divide"),
    ] {
        let (spec, found) = dsl::load(&text(pipeline), &[]);
        assert!(spec.is_none() && found[0].code == code && found[0].message.contains(piece), "{pipeline}: {found:?}");
    }
}

/// Costs and partitions are by stage, not by rank.
#[test]
fn lists_have_an_entry_for_each_stage() {
    let text = |schedule: &str| {
        format!(
            "model gpt {{ layers = 4, width = 8, heads = 1, context = 8, vocab = 8 }}
machine {{ ranks = 2, cost {{ F = [1 us, 2 us, 3 us, 4 us], B = 2 us }} }}
pipeline {{ schedule = {schedule}, microbatch = 1, accumulate = 4
  partition = [[embed, block 0], [block 1], [block 2], [block 3, head]] }}"
        )
    };
    assert_eq!(load(&text("looped_bfs"), &[]).stages(), 4);
    let codes: Vec<&str> = dsl::load(&text("gpipe"), &[]).1.iter().map(|d| d.code).collect();
    assert_eq!(codes, ["P0217"]);
    let sets = ["pipeline.chunks=3", "machine.cost.F=1 us"].map(|set| dsl::Set(set.into()));
    let found = dsl::load(&text("looped_bfs"), &sets).1;
    assert_eq!(found[0].message, "the partition has 4 stages for 2 ranks of 3 stages");
}

#[test]
fn operators_bind_as_usual() {
    let count = |expr: &str| {
        let text = format!(
            "schedule x {{ place linear\nbackward whole\nflush every accumulate\norder {{ warmup {expr} {{ F }}\n\
             repeat {{ F; B }} }} }}\nmachine {{ ranks = 4 }}\npipeline {{ schedule = x, accumulate = 8 }}"
        );
        match load(&text, &[]).schedule.order.swap_remove(0).kind {
            PhaseKind::Warmup(count) => format!("{count:?}"),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(count("P + 2 * K"), count("P + (2 * K)"));
    assert_ne!(count("P + 2 * K"), count("(P + 2) * K"));
    assert_eq!(count("P - 1 - s"), count("(P - 1) - s"));
    assert_ne!(count("P - 1 - s"), count("P - (1 - s)"));
    assert_eq!(count("min(M, P - s)"), count("min(M, (P) - s)"));
    assert!(count("max(-1, P / 2)").contains("Number(-1)"));
}

/// A specification without its places.
fn meaning(mut spec: Spec) -> String {
    spec.schedule.span = 0..0;
    spec.schedule.order.iter_mut().for_each(|phase| {
        phase.span = 0..0;
        phase.body.iter_mut().for_each(|step| step.span = 0..0);
    });
    let text = format!("{spec:?}");
    let mut kept = String::new();
    for part in text.split("span: ") {
        let digits = |c: char| c.is_ascii_digit() || c == '.';
        kept += if kept.is_empty() { part } else { part.trim_start_matches(digits) };
    }
    kept
}

#[test]
fn a_text_with_overrides_means_the_same() {
    let bare = small("// the end");
    let word = small("optimizer = adamw");
    let sets = [
        "pipeline.accumulate=16",
        "pipeline.fuse=off",
        "staleness.drift=9",
        "staleness.delay<=3",
        "require.bubble=50 %",
        "optimizer.lr=0.5",
        "optimizer.eps=1e-6",
        "machine.cost.F=1 ms",
        "machine.cost.B=2 ms",
        "machine.memory=1 GiB",
        "pipeline.schedule=gpipe",
        "optimizer=sgd { lr = 0.1 }",
        "optimizer.momentum=0.5",
        "pipeline.boundary=every 5 updates",
        "machine.cost.F=3 ms",
    ];
    let model = ["layers=8", "width=64", "heads=4", "context=8", "vocab=9"].map(|m| format!("model.{m}"));
    for text in [DESIGN, &bare, &word] {
        for count in 1..=sets.len() {
            let mut some: Vec<Set> = sets[..count].iter().map(|s| Set((*s).into())).collect();
            if sets[..count].last() == Some(&"machine.cost.F=1 ms") {
                // Alone it is no cost.
                continue;
            }
            some.extend(model.iter().map(|m| Set(m.clone())));
            some.push(Set("pipeline.microbatch=2".into()));
            let rewritten = dsl::with_sets(text, &some);
            let (spec, found) = dsl::load(text, &some);
            assert_eq!(found, []);
            assert_eq!(meaning(load(&rewritten, &[])), meaning(spec.expect("valid")), "{rewritten}");
        }
    }
    assert_eq!(dsl::with_sets(&bare, &[Set("pipelin.accumulate=2".into()), Set("x".into())]), bare);
}

pub const BIG: &str = "model gpt {
  layers = 8, width = 256, heads = 8, context = 128, vocab = 256
  dtype = bf16, kv_heads = 4, mlp = swiglu { hidden = 688 }, norm = rms, position = rotary, bias = off, tied = on
  attention = stored, dropout = on, recompute = full
  tensor_parallel = 4, sequence_parallel = on, data_parallel = 8, zero = 1
}
machine { ranks = 4, device = h100 { memory = 80 GiB, flops = 0.4 PFLOP/s, link = 50 GB/s, latency = 5 us } }
pipeline { schedule = one_f_one_b, microbatch = 1, accumulate = 8 }
";

#[test]
fn models_and_devices_for_analysis_only() {
    let spec = load(BIG, &[]);
    let model = spec.model.as_ref().expect("given");
    let variant = Variant {
        dtype: Dtype::Bf16,
        kv_heads: 4,
        mlp: Mlp::SwiGlu { hidden: 688 },
        norm: Norm::Rms,
        position: Position::Rotary,
        bias: false,
        tied: true,
        attention: Attention::Stored,
        dropout: true,
        recompute: Recompute::Full,
        tensor_parallel: 4,
        sequence_parallel: true,
        data_parallel: 8,
        zero: 1,
    };
    assert_eq!(model.variant, variant);
    let device = spec.machine.device.as_ref().expect("given");
    assert_eq!((device.name.as_str(), device.memory_bytes, device.latency_ns), ("h100", 80 << 30, 5000));
    assert_eq!((device.flops_per_s, device.link_bytes_per_s), (400_000_000_000_000, 50_000_000_000));
    let keys = spec.analysis_only();
    assert_eq!(keys.len(), 13);
    assert!(keys.iter().all(|key| BIG[key.span.clone()].starts_with(key.value)), "{keys:?}");
}

#[test]
fn the_reference_written_out_can_be_run() {
    let text = "model gpt {
  layers = 8, width = 256, heads = 8, context = 128, vocab = 256
  dtype = f32, kv_heads = 8, mlp = gelu { hidden = 1024 }, norm = layer, position = learned, bias = on, tied = off
  attention = flash, dropout = off, recompute = none
  tensor_parallel = 1, sequence_parallel = off, data_parallel = 1, zero = 0
}
machine { ranks = 4, device = cpu }
pipeline { schedule = one_f_one_b, microbatch = 1, accumulate = 8 }";
    let spec = load(text, &[]);
    assert_eq!(spec.analysis_only(), []);
    assert_eq!(spec.model.expect("given").variant, Variant::reference(256, 8));
    let wider = load(text, &["model.mlp=gelu { hidden = 512 }"]);
    assert_eq!(wider.analysis_only().iter().map(|key| key.value).collect::<Vec<_>>(), ["mlp"]);
}
