//! Estimates: published counts and formulas, agreement with what is built, and how they move with each setting.

use crate::programs::{flush, on_ranks, tied};
use artifact::program::Memory;
use artifact::stream::Program;
use dsl::spec::{Attention, Device, Dtype, Layer, Limits, Mlp, Norm, Position, Products, Recompute, Times, Variant};
use model::build::{self, build};
use model::cost::LayerWork;
use model::dims::Dims;
use model::estimate::{self, Input, Shape, held, memory, parameters_total, saved};
use model::kernel::{OptimizerKind, UpdateRule};
use model::limits::Bounds;
use model::rules::Rules;
use model::target::CpuClass;
use proptest::prelude::*;

const BLOCK: Layer = Layer::Block(0);

fn shape(dims: Dims) -> Shape {
    let Dims { layers, width, heads, context, vocab, microbatch, .. } = dims;
    Shape { layers, width, heads, context, vocab, microbatch, variant: Variant::reference(width, heads) }
}

fn with(shape: Shape, change: impl Fn(&mut Variant)) -> Shape {
    let mut variant = shape.variant;
    change(&mut variant);
    Shape { variant, ..shape }
}

fn llama(layers: u32, width: u32, hidden: u32, kv_heads: u32, vocab: u32) -> Shape {
    let dims =
        Dims { layers, width, heads: width / 128, context: 4096, vocab, microbatch: 1, dtype: Dtype::F32, tied: false };
    with(shape(dims), |v| {
        let mlp = Mlp::SwiGlu { hidden };
        (v.norm, v.position, v.bias, v.kv_heads, v.mlp) = (Norm::Rms, Position::Rotary, false, kv_heads, mlp);
    })
}

/// Under AdamW, with the update fused and one version of the weights.
fn estimated(shape: Shape, partition: &[Vec<Layer>], program: &Program) -> Vec<Memory> {
    let versions = vec![1; partition.len()];
    memory(&Input { shape, partition, program, fuse: true, states: [2; 3], versions: &versions })
}

/// Stages with the embedding on the first and the head on the last.
fn cut(layers: u32, stages: u32) -> Vec<Vec<Layer>> {
    let mut all: Vec<Layer> = (0..layers).map(Layer::Block).collect();
    all.insert(0, Layer::Embed);
    all.push(Layer::Head);
    let each = all.len().div_ceil(stages as usize);
    all.chunks(each).map(<[Layer]>::to_vec).collect()
}

#[test]
fn parameters_are_the_published_counts() {
    assert_eq!(parameters_total(&llama(32, 4096, 11008, 32, 32_000)), 6_738_415_616, "Llama 2 7B");
    assert_eq!(parameters_total(&llama(32, 4096, 14336, 8, 128_256)), 8_030_261_248, "Llama 3 8B");
    assert_eq!(parameters_total(&llama(80, 8192, 28672, 8, 32_000)), 68_976_648_192, "Llama 2 70B");
    let gpt2 = |layers, width, heads| {
        let dims =
            Dims { layers, width, heads, context: 1024, vocab: 50_257, microbatch: 1, dtype: Dtype::F32, tied: false };
        parameters_total(&with(shape(dims), |v| v.tied = true))
    };
    assert_eq!(gpt2(12, 768, 12), 124_439_808, "GPT-2");
    assert_eq!(gpt2(48, 1600, 25), 1_557_611_200, "GPT-2 XL");
}

/// Sums without the statistics, which the published formula leaves out.
fn published(shape: &Shape) -> u128 {
    let counted = saved(shape, BLOCK).into_iter().filter(|t| t.name != "statistics");
    counted.map(|t| t.bytes).sum()
}

#[test]
fn activations_of_a_block_are_the_published_formula() {
    let (s, b, h, a, t) = (2048u128, 4u128, 6144u128, 64u128, 8u128);
    let dims = Dims {
        layers: 48,
        width: 6144,
        heads: 64,
        context: 2048,
        vocab: 51_200,
        microbatch: 4,
        dtype: Dtype::F32,
        tied: false,
    };
    let megatron = with(shape(dims), |v| (v.dtype, v.attention, v.dropout) = (Dtype::Bf16, Attention::Stored, true));
    let score = 5 * a * s * s * b;
    assert_eq!(published(&megatron), 34 * s * b * h + score);
    let shared = with(megatron, |v| v.tensor_parallel = 8);
    assert_eq!(published(&shared), 10 * s * b * h + (24 * s * b * h + score) / t);
    let sequence = with(shared, |v| v.sequence_parallel = true);
    assert_eq!(published(&sequence), (34 * s * b * h + score) / t);
    assert_eq!(published(&with(megatron, |v| v.recompute = Recompute::Attention)), 34 * s * b * h);
    assert_eq!(published(&with(megatron, |v| v.recompute = Recompute::Full)), 2 * s * b * h);
    // Without dropout there are no masks, and the scores are kept once.
    assert_eq!(published(&with(megatron, |v| v.dropout = false)), 32 * s * b * h + 2 * a * s * s * b);
}

#[test]
fn mixed_precision_adam_takes_18_bytes_a_parameter() {
    let shape = with(llama(4, 256, 512, 2, 512), |v| v.dtype = Dtype::Bf16);
    let m = estimated(shape, &cut(4, 1), &flush(1, 2, false))[0];
    let n = parameters_total(&shape);
    assert_eq!((m.weights, m.optimizer, m.gradients), (2 * n, 12 * n, 4 * n));
}

/// What is planned to the byte and what is estimated are one for the reference GPT: sizes are such that nothing is padded.
#[test]
fn estimates_are_what_is_built() {
    for tied in [false, true] {
        compare_with_what_is_built(Dtype::F32, tied);
        compare_with_what_is_built(Dtype::Bf16, tied);
    }
}

fn compare_with_what_is_built(dtype: Dtype, is_tied: bool) {
    let dims = Dims { layers: 4, width: 64, heads: 4, context: 32, vocab: 128, microbatch: 2, dtype, tied: is_tied };
    let folded = on_ranks(&[0, 1, 0], 2, 2, false);
    for (program, stages) in
        [(flush(1, 2, false), 1), (flush(2, 3, false), 2), (flush(3, 1, true), 3), (flush(2, 2, true), 2), (folded, 3)]
    {
        let program = if is_tied { tied(program) } else { program };
        let partition = cut(dims.layers, stages);
        let (rules, cpu) = (&Rules::uniform(UpdateRule::plain(OptimizerKind::AdamW)), CpuClass::X86V4);
        let (partition, program, recompute) = (&partition, &program, Recompute::None);
        let input = build::Input {
            dims,
            partition,
            fuse: true,
            rules,
            recompute,
            products: Products::F32,
            program,
            target: cpu.into(),
        };
        let built = build(&input).memory;
        let estimated = estimated(with(shape(dims), |v| (v.dtype, v.tied) = (dtype, is_tied)), partition, program);
        for (rank, (b, mut e)) in built.iter().zip(estimated).enumerate() {
            let slots = |s: &usize| u64::from(program.rings[*s].stash.max(1));
            let own = (0..partition.len()).filter(|&s| program.rank_of_stage[s].index() == rank);
            // Beside each slot's activations stands the version that F saw, padded.
            let versions: u64 = own.map(|s| 64 * slots(&s)).sum();
            if dtype == Dtype::Bf16 {
                // Estimated: bf16 and f32 of every parameter. What no product reads is there in f32 only.
                let of = |layer: &Layer| match layer {
                    // A tied head on the same rank reads the table.
                    Layer::Embed if is_tied && program.partner(0).is_none() => 32 * 64,
                    Layer::Embed => (128 + 32) * 64,
                    Layer::Block(_) => 13 * 64,
                    Layer::Head => 2 * 64,
                };
                let own = (0..partition.len()).filter(|&s| program.rank_of_stage[s].index() == rank);
                let unread: u64 = own.flat_map(|s| &partition[s]).map(of).sum();
                (e.weights, e.optimizer) = (e.weights + 2 * unread, e.optimizer - 4 * unread);
            }
            let parts = (e.weights, e.optimizer, e.gradients, e.stash + versions, e.communication);
            assert_eq!((b.weights, b.optimizer, b.gradients, b.stash, b.communication), parts, "rank {rank}");
            // Beside bf16 the estimate has f32 logits, which our loss does without.
            let near = dtype == Dtype::Bf16 || (e.activations as f64 / b.activations as f64 - 1.0).abs() < 0.5;
            assert!(near, "rank {rank}: {b:?} {e:?}");
        }
    }
}

#[test]
fn work_is_that_of_the_graph() {
    let dims =
        Dims { layers: 4, width: 48, heads: 4, context: 33, vocab: 100, microbatch: 3, dtype: Dtype::F32, tied: false };
    let graph = LayerWork::new(&dims, Recompute::None);
    for layer in [Layer::Embed, BLOCK, Layer::Head] {
        let work = graph.of(layer);
        let expected = [work.forward, work.input, work.weight].map(u128::from);
        assert_eq!(estimate::work(&shape(dims), layer, false), expected, "{layer:?}");
    }
}

#[test]
fn times_follow_the_device() {
    let device = Device {
        name: "x".into(),
        memory_bytes: 1,
        flops_per_s: 1_000_000_000,
        link_bytes_per_s: 2_000_000_000,
        latency_ns: 7,
        span: 0..0,
    };
    let dims = Dims {
        layers: 1,
        width: 100,
        heads: 1,
        context: 10,
        vocab: 1000,
        microbatch: 1,
        dtype: Dtype::F32,
        tied: false,
    };
    let costs = estimate::costs(&shape(dims), Some(&device), false);
    // 2 x 10 x 100 x 1000 operations at one a nanosecond; 4000 bytes at two a nanosecond.
    assert_eq!((costs.head, costs.hop_ns), (Times { f_ns: 2_000_000, i_ns: 2_000_000, w_ns: 2_000_000 }, 2007));
    let full = with(shape(dims), |v| v.recompute = Recompute::Full);
    let [plain, again, split] =
        [(shape(dims), false), (full, false), (full, true)].map(|(shape, split)| estimate::work(&shape, BLOCK, split));
    assert_eq!(again, [plain[0], plain[1] + plain[0], plain[2]]);
    assert_eq!(split, [plain[0], plain[1] + plain[0], plain[2] + plain[0]]);
}

#[test]
fn a_tied_table_counts_once_on_one_rank_and_twice_on_two() {
    let dims =
        Dims { layers: 2, width: 64, heads: 4, context: 32, vocab: 128, microbatch: 1, dtype: Dtype::F32, tied: false };
    let (own, tied) = (shape(dims), with(shape(dims), |v| v.tied = true));
    let table = 128 * 64;
    let weights = |shape, partition: &[Vec<Layer>], program: &Program| -> u64 {
        estimated(shape, partition, program).iter().map(|m| m.weights / 4).sum()
    };
    let (one, two) = (flush(1, 2, false), flush(2, 2, false));
    assert_eq!(weights(own, &cut(2, 1), &one) - weights(tied, &cut(2, 1), &one), table);
    assert_eq!(weights(own, &cut(2, 2), &two), weights(tied, &cut(2, 2), &two));
    // First and last stage of a wave share a rank.
    let ends = vec![vec![Layer::Embed], vec![Layer::Block(0), Layer::Block(1)], vec![Layer::Head]];
    let wave = on_ranks(&[0, 1, 0], 2, 2, false);
    assert_eq!(weights(own, &ends, &wave) - weights(tied, &ends, &wave), table);
}

/// Memory grows with the micro-batches of an update under GPipe, and does not under 1F1B once the pipeline is full.
#[test]
fn memory_depends_on_accumulate_where_it_should() {
    let shape = with(llama(8, 256, 512, 2, 512), |v| v.dtype = Dtype::Bf16);
    let largest = |name: &str, k: u32| {
        let schedule = dsl::library::schedule(name).expect("a library schedule");
        let program = plan::expand(&schedule, plan::Shape::new(4, k)).expect("a sound schedule");
        estimated(shape, &cut(8, 4), &program).iter().map(|m| m.total).max()
    };
    assert!(largest("gpipe", 8) < largest("gpipe", 16));
    assert!(largest("one_f_one_b", 2) < largest("one_f_one_b", 4));
    assert_eq!(largest("one_f_one_b", 8), largest("one_f_one_b", 64));
    assert_eq!(largest("async_1f1b", 8), largest("async_1f1b", 64));
}

#[test]
fn the_microbatch_in_the_help_fits() {
    let shape = Shape { microbatch: 64, ..with(llama(4, 256, 512, 2, 512), |v| v.dtype = Dtype::Bf16) };
    let (partition, program) = (cut(4, 2), flush(2, 4, false));
    let input =
        Input { shape, partition: &partition, program: &program, fuse: true, states: [2; 3], versions: &[1, 1] };
    let total =
        |microbatch| memory(&Input { shape: Shape { microbatch, ..shape }, ..input }).iter().map(|m| m.total).max();
    let bound = total(17).expect("two ranks");
    let bounds = Bounds { machine: Limits::new(vec![dsl::spec::At { value: bound, span: 0..0 }]), require: None };
    let found = estimate::check_memory(&input, &memory(&input), &bounds, &(0..0));
    assert_eq!(found[0].code, "P0411");
    assert_eq!(found[0].help.as_deref(), Some("the largest micro-batch that fits is microbatch = 17"));
}

fn variants() -> impl Strategy<Value = Shape> {
    let sizes = (1u32..5, 1u32..5, 1u32..40, 1u32..200, 1u32..4);
    let kinds = (any::<[bool; 7]>(), 0u32..3);
    (sizes, kinds).prop_map(|((layers, heads, context, vocab, microbatch), (flags, recompute))| {
        let heads = 8 * heads;
        let dims =
            Dims { layers, width: 16 * heads, heads, context, vocab, microbatch, dtype: Dtype::F32, tied: false };
        let [bf16, swiglu, rms, rotary, bias, stored, dropout] = flags;
        with(shape(dims), |v| {
            v.dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
            v.mlp = if swiglu { Mlp::SwiGlu { hidden: 24 * heads } } else { v.mlp };
            v.norm = if rms { Norm::Rms } else { Norm::Layer };
            v.position = if rotary { Position::Rotary } else { Position::Learned };
            v.attention = if stored { Attention::Stored } else { Attention::Flash };
            (v.bias, v.dropout) = (bias, dropout);
            v.recompute = [Recompute::None, Recompute::Attention, Recompute::Full][recompute as usize];
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// ZeRO divides what it names and nothing else; tensor parallelism never adds, and divides all but what it leaves whole.
    #[test]
    fn divisors_divide(shape in variants(), stages in 1u32..4, split: bool, d in 2u32..9, power in 1u32..4) {
        let partition = cut(shape.layers, stages.min(shape.layers + 2));
        let program = flush(partition.len() as u32, 2, split);
        let of = |shape| estimated(shape, &partition, &program);
        let plain = of(with(shape, |v| v.data_parallel = d));
        let t = 1 << power;
        for (rank, m) in plain.iter().enumerate() {
            for zero in 1..4 {
                let z = of(with(shape, |v| (v.data_parallel, v.zero) = (d, zero)))[rank];
                let shared = |bytes: u64, from: u32| if zero >= from { bytes.div_ceil(d.into()) } else { bytes };
                prop_assert_eq!((z.optimizer, z.gradients), (shared(m.optimizer, 1), shared(m.gradients, 2)));
                prop_assert_eq!((z.weights, z.stash, z.communication), (shared(m.weights, 3), m.stash, m.communication));
            }
            let cut = of(with(shape, |v| (v.data_parallel, v.tensor_parallel) = (d, t)))[rank];
            let even = of(with(shape, |v| {
                (v.data_parallel, v.tensor_parallel, v.sequence_parallel) = (d, t, true);
            }))[rank];
            prop_assert!(cut.weights <= m.weights && cut.weights >= m.weights / u64::from(t));
            prop_assert!(cut.stash <= m.stash && even.stash <= cut.stash);
            // Rounded up, tensor by tensor.
            let rounding = 4 * 40 * u64::from(shape.layers + 2) * u64::from(shape.microbatch * shape.context + t);
            prop_assert!(even.stash >= m.stash / u64::from(t) && even.stash <= m.stash / u64::from(t) + rounding);
        }
    }

    /// Recomputation and narrower types never cost memory in flight; a split backward pass never saves any.
    #[test]
    fn choices_move_memory_one_way(shape in variants(), layer in 0u32..3) {
        let layer = [Layer::Embed, BLOCK, Layer::Head][layer as usize];
        let bytes = |shape: &Shape| saved(shape, layer).iter().map(|t| t.bytes).sum::<u128>();
        let at = |recompute| bytes(&with(shape, |v| v.recompute = recompute));
        prop_assert!(at(Recompute::Full) <= at(Recompute::Attention));
        prop_assert!(at(Recompute::Attention) <= at(Recompute::None));
        let of = |dtype| bytes(&with(shape, |v| v.dtype = dtype));
        prop_assert!(of(Dtype::Bf16) <= of(Dtype::F32));
        prop_assert!(held(&shape, layer).iter().all(|t| t.bytes > 0));
    }
}
