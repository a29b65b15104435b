//! Speed of the matmul kernels of `bench-gpt` and of the demo, as CSV. Pin it to one core:
//!
//! ```sh
//! taskset -c 1 cargo run --release -p paceline-codegen --example matmul_speed [x86-64-v3|x86-64-v4]
//! ```
//!
//! The best of many calls counts, so that a busy machine does little harm; what does not fit into the second-level cache still suffers
//! from its neighbours.
//!
//! `gflops` counts 2 m n k, whatever the epilogue does. For a fused update, `of_parts` is the time of the unfused gradient and update
//! kernels in the same run, divided by its own; for a kernel of bf16 it is the time of the f32 kernel.

#[path = "../../tests/call.rs"]
mod call;
#[path = "../../tests/harness.rs"]
#[allow(dead_code)]
mod harness;

use artifact::bf16;
use harness::{Data, Runnable, random};
use model::graph::Elem;
use model::kernel::{Dtype, Epilogue, Form, KernelOp, MatMul, OptimizerKind, Sink, UpdateRule};
use model::kernel_plan::plan_kernel_of;
use model::operands::operands_of;
use model::target::CpuClass;

/// Floating-point operations that a measurement makes in all, about.
const WORK: f64 = 2e10;

fn main() {
    let cpu = match std::env::args().nth(1) {
        Some(name) => CpuClass::from_name(&name).expect("a CPU class: x86-64-v3 or x86-64-v4"),
        None => *harness::runnable().last().expect("a CPU with AVX2 or AVX-512"),
    };
    println!("kernel,cpu,us,gflops,scratch_bytes,of_parts");
    for (form, m, n, k, epilogue) in forward_and_input_gradients() {
        let matmul = MatMul { m, n, k, form, epilogue };
        let time = report(&matmul, Dtype::F32, cpu, None);
        report(&matmul, Dtype::Bf16, cpu, Some(time));
    }
    for (m, n, k) in [(256, 768, 512), (256, 256, 512), (256, 1024, 512), (1024, 256, 512), (128, 512, 512)] {
        weight_gradients(m, n, k, cpu);
    }
}

/// A stage's products, forward and for the input's gradient: the benchmark's, then the demo's.
fn forward_and_input_gradients() -> Vec<(Form, u32, u32, u32, Epilogue)> {
    use Epilogue::{Bias, BiasGelu, BiasResidual, GeluGrad, Store};
    let mut list = Vec::new();
    for width in [256, 128] {
        list.extend([
            (Form::NN, 512, 3 * width, width, Bias),
            (Form::NN, 512, width, width, BiasResidual),
            (Form::NN, 512, 4 * width, width, BiasGelu),
            (Form::NN, 512, width, 4 * width, BiasResidual),
            (Form::NN, 512, 256, width, Store),
            (Form::NT, 512, width, 3 * width, Store),
            (Form::NT, 512, width, width, Store),
            (Form::NT, 512, width, 4 * width, Store),
            (Form::NT, 512, 4 * width, width, GeluGrad),
        ]);
    }
    list.push((Form::NN, 509, 251, 257, Bias));
    list
}

/// All sinks of one weight gradient.
fn weight_gradients(m: u32, n: u32, k: u32, cpu: CpuClass) {
    let gradient = |sink| MatMul { m, n, k, form: Form::TN, epilogue: Epilogue::Gradient(sink) };
    let stored = report(&gradient(Sink::Store), Dtype::F32, cpu, None);
    report(&gradient(Sink::Store), Dtype::Bf16, cpu, Some(stored));
    let added = report(&gradient(Sink::Add), Dtype::F32, cpu, None);
    for rule in OptimizerKind::STEPS.map(UpdateRule::plain) {
        let update = seconds(KernelOp::Update { len: u64::from(m * n), rule }, Dtype::F32, cpu).0;
        let fused = |accumulated| gradient(Sink::Update { rule, accumulated });
        let time = report(&fused(false), Dtype::F32, cpu, Some(stored + update));
        report(&fused(false), Dtype::Bf16, cpu, Some(time));
        report(&fused(true), Dtype::F32, cpu, Some(added + update));
    }
}

/// Prints a line; gives the seconds of a call.
fn report(matmul: &MatMul, dtype: Dtype, cpu: CpuClass, parts: Option<f64>) -> f64 {
    let flops = 2.0 * f64::from(matmul.m) * f64::from(matmul.n) * f64::from(matmul.k);
    let (time, kernel) = seconds(KernelOp::MatMul(matmul.clone()), dtype, cpu);
    let of_parts = parts.map_or(String::new(), |parts| format!("{:.3}", parts / time));
    println!(
        "{},{},{:.1},{:.1},{},{of_parts}",
        kernel.name,
        cpu.name(),
        time * 1e6,
        flops / time * 1e-9,
        kernel.scratch_bytes
    );
    time
}

/// Seconds of a call (the best of many) and the kernel.
fn seconds(op: KernelOp, dtype: Dtype, cpu: CpuClass) -> (f64, model::kernel::Kernel) {
    let data = operands_of(&op, dtype).into_iter().enumerate().map(|(i, operand)| {
        // Not negative, for second moments and hyper-parameters; small enough to stay finite in place.
        let values = random(i as u64, (operand.bytes / operand.elem.bytes()) as usize).into_iter().map(|x| x * x * 0.5);
        match operand.elem {
            Elem::Bf16 => Data::Bf16(values.map(bf16::round).collect()),
            _ => Data::F32(values.collect()),
        }
    });
    let data = data.collect::<Vec<_>>();
    let flops = match &op {
        KernelOp::MatMul(m) => 2.0 * f64::from(m.m) * f64::from(m.n) * f64::from(m.k),
        KernelOp::Update { len, .. } => 100.0 * *len as f64,
        _ => unreachable!("matmuls and updates are measured"),
    };
    let runnable = Runnable::of(plan_kernel_of(op, dtype, cpu), cpu);
    (runnable.seconds(&data, (WORK / flops).clamp(20.0, 2000.0) as u32), runnable.kernel)
}
