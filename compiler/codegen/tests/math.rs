//! The polynomials against f64, over their whole range.

use crate::harness::{Data, Runnable, runnable};
use codegen::kernels::math::{self, Region};
use codegen::kernels::text::{Func, identity_map, tensor};
use codegen::kernels::{KernelSource, strategy};
use model::kernel::{Dtype, Kernel, KernelOp, Products, Sink};
use model::target::CpuClass;

/// Writes a function's text.
type Function = fn(&mut Region, &str) -> String;

/// `function` of every x, as a vectorised kernel.
fn apply(function: Function, cpu: CpuClass, x: &[f32]) -> Vec<f32> {
    let len = x.len() as u64;
    // Any operation with one input and one output of equal lengths.
    let op = KernelOp::BiasGrad { rows: 1, width: x.len() as u32, sink: Sink::Store };
    let (dtype, products) = (Dtype::F32, Products::F32);
    let kernel = Kernel { name: "elementwise".into(), op, dtype, products, tiles: None, scratch_bytes: 0 };
    let mut func = Func::new(&kernel.name);
    let from = func.input("x", &[len], "f32");
    let to = func.output("y", &[len], "f32");
    let mut region = Region::new("t");
    let result = function(&mut region, "%x_el");
    let (t, map) = (tensor(&[len], "f32"), identity_map(1));
    func.push(&format!(
        "%done = linalg.generic {{indexing_maps = [{map}, {map}], iterator_types = [\"parallel\"]}} ins({from} : {t}) outs({to} : {t}) {{\n\
         ^bb0(%x_el: f32, %y_el: f32):\n{}linalg.yield {result} : f32\n}} -> {t}",
        region.finish()
    ));
    func.result("y", "%done");
    let source = KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) };
    let runnable = Runnable::of_source(kernel, source, cpu);
    runnable.call(&[Data::F32(x.to_vec()), Data::unset(x.len())])[1].f32().to_vec()
}

/// Values from `from` to `to`, both included.
fn grid(from: f64, to: f64, steps: u32) -> Vec<f32> {
    (0..=steps).map(|i| (from + (to - from) * f64::from(i) / f64::from(steps)) as f32).collect()
}

/// The distance between neighbours at a value.
fn ulp(value: f64) -> f64 {
    let near = (value.abs() as f32).max(f32::MIN_POSITIVE);
    f64::from(near.next_up()) - f64::from(near)
}

fn worst(x: &[f32], found: &[f32], expected: impl Fn(f64) -> f64, unit: impl Fn(f64) -> f64) -> f64 {
    let errors = x.iter().zip(found).map(|(x, f)| {
        let e = expected(f64::from(*x));
        let error = (f64::from(*f) - e).abs() / unit(e);
        if error.is_nan() { f64::INFINITY } else { error }
    });
    errors.fold(0.0, f64::max)
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    for cpu in runnable() {
        let x = grid(-87.3, 88.3, 200_003);
        let error = worst(&x, &apply(math::exp, cpu, &x), f64::exp, ulp);
        assert!(error <= 2.0, "{error} units, {cpu:?}");
        let special = [f32::NEG_INFINITY, -1e30, -88.0, 0.0, 89.0, 1e30, f32::INFINITY, f32::NAN];
        let found = apply(math::exp, cpu, &special);
        assert_eq!(found[..7], [0.0, 0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
        assert!(found[7].is_nan());
    }
}

#[test]
fn log_is_within_two_units_in_the_last_place_of_one() {
    for cpu in runnable() {
        let x: Vec<f32> = grid(-86.0, 88.0, 100_003).iter().map(|x| x.exp()).chain(grid(0.5, 2.0, 50_000)).collect();
        let unit = |e: f64| e.abs().max(1.0) * f64::from(f32::EPSILON);
        let error = worst(&x, &apply(math::log, cpu, &x), f64::ln, unit);
        assert!(error <= 1.0, "{error}, {cpu:?}");
    }
}

fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + u.tanh())
}

fn gelu_grad(x: f64) -> f64 {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044715 * x.powi(3))).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x)
}

#[test]
fn gelu_and_its_derivative_follow_the_tanh_form() {
    for cpu in runnable() {
        let x: Vec<f32> = grid(-12.0, 12.0, 100_003).into_iter().chain([-1e4, 1e4, 0.0]).collect();
        let unit = |e: f64| e.abs().max(1.0);
        let error = worst(&x, &apply(math::gelu, cpu, &x), gelu, unit);
        assert!(error <= 3e-7, "gelu {error}, {cpu:?}");
        let error = worst(&x, &apply(math::gelu_grad, cpu, &x), gelu_grad, unit);
        assert!(error <= 5e-7, "gelu' {error}, {cpu:?}");
    }
}
