//! The update fused into a gradient kernel gives the bits of the gradient kernel followed by the update.
//! (Weight gradients of matmuls: see `matmul`.)

use crate::harness::{Data, bits, random, run, targets};
use crate::optimizers;
use model::kernel::{CorrectionKind, Epilogue, Form, KernelOp, MatMul, Sink, Table, UpdateRule, Writes};
use model::operands::operands;
use model::target::Target;

/// A gradient kernel by its sink.
type Gradient = fn(Sink) -> KernelOp;

const BIAS: Gradient = |sink| KernelOp::BiasGrad { rows: 21, width: 37, sink };
const GAIN: Gradient = |sink| KernelOp::GainGrad { rows: 21, width: 37, sink };
const TOKEN: Gradient =
    |sink| KernelOp::EmbedGrad { table: Table::Token, sequences: 3, context: 7, width: 37, vocab: 11, sink };
const POSITION: Gradient =
    |sink| KernelOp::EmbedGrad { table: Table::Position, sequences: 3, context: 7, width: 37, vocab: 11, sink };

/// The kernel's inputs before those of its sink, which has one accumulator when it stores.
fn inputs(gradient: Gradient, seed: u64) -> Vec<Data> {
    let all = operands(&gradient(Sink::Store));
    let mut inputs = Vec::new();
    for (i, operand) in all[..all.len() - 1].iter().enumerate() {
        let len = operand.bytes as usize / 4;
        let tokens = i == 0 && matches!(gradient(Sink::Store), KernelOp::EmbedGrad { table: Table::Token, .. });
        inputs.push(if tokens {
            Data::U32((0..len as u32).map(|r| (r * 7 + seed as u32) % 5 * 2).collect())
        } else {
            Data::F32(random(seed + i as u64, len))
        });
    }
    inputs
}

fn call(op: KernelOp, target: Target, inputs: &[Data], sink: &[Data]) -> Vec<Data> {
    run(op, target, &[inputs, sink].concat()).split_off(inputs.len())
}

/// Weight and states at the start, and the hyper-parameters.
fn parameter(rule: UpdateRule, len: usize) -> (Vec<Data>, Data) {
    let parameter = optimizers::parameter(rule, len).into_iter().map(Data::F32).collect();
    (parameter, Data::F32(optimizers::hyper(rule)))
}

fn fused_equals_unfused(gradient: Gradient) {
    let len = operands(&gradient(Sink::Store)).last().expect("an accumulator").bytes as usize / 4;
    for target in targets() {
        for rule in optimizers::rules() {
            for accumulated in [false, true] {
                let (parameter, hyper) = parameter(rule, len);
                let first = inputs(gradient, 10);
                let stored = call(gradient(Sink::Store), target, &first, &[Data::unset(len)]);
                // Unfused: accumulate all, then update.
                let last = inputs(gradient, 50);
                let sum = if accumulated { call(gradient(Sink::Add), target, &last, &stored) } else { stored.clone() };
                let update = KernelOp::Update { len: len as u64, rule };
                let unfused = run(update, target, &[&sum[..], &parameter, &[hyper.clone()]].concat());
                let unfused = &unfused[1..1 + parameter.len()];
                // Fused into the last.
                let sink = Sink::Update { rule, accumulated };
                let accumulator = if accumulated { &stored[..] } else { &[] };
                let last = if accumulated { &last } else { &first };
                let fused = call(gradient(sink), target, last, &[accumulator, &[hyper], &parameter].concat());
                let fused = &fused[fused.len() - parameter.len()..];
                for (i, (f, u)) in fused.iter().zip(unfused).enumerate() {
                    assert_eq!(bits(f), bits(u), "{rule:?}, accumulated {accumulated}, output {i}, {target:?}");
                    assert_ne!(bits(f), bits(&parameter[i]), "nothing was updated");
                }
            }
        }
    }
}

#[test]
fn a_bias_has_equal_bits() {
    fused_equals_unfused(BIAS);
}

#[test]
fn a_gain_has_equal_bits() {
    fused_equals_unfused(GAIN);
}

#[test]
fn a_token_table_has_equal_bits() {
    fused_equals_unfused(TOKEN);
}

#[test]
fn a_position_table_has_equal_bits() {
    fused_equals_unfused(POSITION);
}

/// A matrix whose last register tiles stick out.
const WEIGHT: Gradient =
    |sink| KernelOp::MatMul(MatMul { m: 37, n: 61, k: 21, form: Form::TN, epilogue: Epilogue::Gradient(sink) });

/// A gradient on a CPU and on the emulated device.
fn on_two(gradient: Gradient) -> [(Gradient, Target); 2] {
    let all = targets();
    [all[0], all[all.len() - 1]].map(|target| (gradient, target))
}

/// An update that leaves the weights which it reads: the new ones, and the states, have the bits of one in place.
#[test]
fn an_update_out_of_place_has_the_bits_of_one_in_place() {
    for (gradient, target) in [BIAS, GAIN, TOKEN, POSITION, WEIGHT].into_iter().flat_map(on_two) {
        let len = operands(&gradient(Sink::Store)).last().expect("an accumulator").bytes as usize / 4;
        for (rule, accumulated) in [(optimizers::ADAMW, true), (optimizers::rules().pop().expect("some"), false)] {
            let (parameter, hyper) = parameter(rule, len);
            let before = if accumulated { vec![Data::F32(random(9, len)), hyper] } else { vec![hyper] };
            let with = |rule, weights: &[Data]| {
                let sink = [&before[..], weights, &parameter[1..]].concat();
                let after = call(gradient(Sink::Update { rule, accumulated }), target, &inputs(gradient, 10), &sink);
                after[before.len()..].to_vec()
            };
            let in_place = with(rule, &parameter[..1]);
            let rule = UpdateRule { writes: Writes::Next, ..rule };
            let next = with(rule, &[parameter[0].clone(), Data::unset(len)]);
            assert_eq!(bits(&next[0]), bits(&parameter[0]), "the weights that were read are changed");
            let name = gradient(Sink::Store);
            let same = next[1..].iter().map(bits).eq(in_place.iter().map(bits));
            assert!(same, "{rule:?} {name:?}");
        }
    }
}

#[test]
fn an_unfused_update_out_of_place_has_the_bits_of_one_in_place() {
    for target in targets() {
        for rule in optimizers::rules() {
            let len = 133;
            let (parameter, hyper) = parameter(rule, len);
            let update = |rule, weights: &[Data]| {
                let all =
                    [&[Data::F32(random(3, len))], weights, &parameter[1..], std::slice::from_ref(&hyper)].concat();
                run(KernelOp::Update { len: len as u64, rule }, target, &all)
            };
            let in_place = update(rule, &parameter[..1]);
            let next = update(UpdateRule { writes: Writes::Next, ..rule }, &[parameter[0].clone(), Data::unset(len)]);
            assert!(next[2..].iter().map(bits).eq(in_place[1..].iter().map(bits)), "{rule:?}");
        }
    }
}

/// A gradient that is compensated: stored and added it has the bits of the formula, one rounding an operation; an update that takes it in has
/// those of one that follows.
#[test]
fn a_compensated_gradient_follows_its_formula_fused_and_unfused() {
    let plain = optimizers::ADAMW;
    let rule = UpdateRule { correction: Some(CorrectionKind::DelayCompensation), writes: Writes::Next, ..plain };
    for (gradient, target) in [BIAS, GAIN, TOKEN, POSITION, WEIGHT].into_iter().flat_map(on_two) {
        let len = operands(&gradient(Sink::Store)).last().expect("an accumulator").bytes as usize / 4;
        let (parameter, _) = parameter(plain, len);
        let mut hyper = optimizers::hyper(plain);
        hyper[12] = 0.75;
        let (hyper, seen, acc) = (Data::F32(hyper), Data::F32(random(21, len)), Data::F32(random(22, len)));
        let inputs = inputs(gradient, 10);
        let with = |sink, operands: &[&[Data]]| call(gradient(sink), target, &inputs, &operands.concat());
        let stale = [hyper.clone(), parameter[0].clone(), seen.clone()];
        let raw = with(Sink::Store, &[&[Data::unset(len)]]);
        for (accumulator, add) in [(Data::unset(len), false), (acc, true)] {
            let found = with(Sink::Compensated { add }, &[&stale, std::slice::from_ref(&accumulator)]);
            let whole = (0..len).map(|i| {
                let g = raw[0].f32()[i];
                let whole = g + g * g * 0.75 * (parameter[0].f32()[i] - seen.f32()[i]);
                if add { accumulator.f32()[i] + whole } else { whole }
            });
            let whole = Data::F32(whole.collect());
            assert_eq!(bits(&found[3]), bits(&whole), "{:?} {target:?}", gradient(Sink::Store));
            // The update, with what was gathered before.
            let update = KernelOp::Update { len: len as u64, rule: rule.step() };
            let weights = [parameter[0].clone(), Data::unset(len)];
            let unfused = [&[whole], &weights[..], &parameter[1..], std::slice::from_ref(&hyper)].concat();
            let unfused = run(update, target, &unfused).split_off(2);
            let before = if add { vec![accumulator] } else { vec![] };
            let weights = [parameter[0].clone(), seen.clone(), Data::unset(len)];
            let sink = Sink::Update { rule, accumulated: add };
            let fused = with(sink, &[&before, std::slice::from_ref(&hyper), &weights, &parameter[1..]]);
            let fused = &fused[before.len() + 3..];
            assert!(fused.iter().map(bits).eq(unfused[..3].iter().map(bits)), "{:?} {target:?}", gradient(Sink::Store));
        }
    }
}
