//! Matrix products with their epilogue.
//!
//! In f32, on ordinary cores, the rule for sums is the CPU's: a block of k at a time, each from zero in fused multiply-adds ascending in k,
//! then added to the accumulator (or to zero). Equal operands give equal bits on every target.
//!
//! On tensor cores a block of k is summed from zero, too, in the order that the hardware takes. So a fused update still has the
//! bits of its parts.

use super::matmul_sums::{Sums, product};
use super::part;
use super::sink::SinkBuffers;
use super::{matmul_tensor, matmul_tiles};
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Buffer, Code, Operands};
use crate::kernels::math;
use crate::kernels::sink::HYPER;
use artifact::optimizer::HYPER_LEN;
use model::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, MatMul};

pub fn write(kernel: &Kernel) -> DeviceKernel {
    let KernelOp::MatMul(matmul) = &kernel.op else { unreachable!("dispatched on the operation") };
    let tiles = kernel.tiles.expect("a matmul has tiles");
    let [m, n, k] = [matmul.m, matmul.n, matmul.k].map(u64::from);
    let mut operands = Operands::of(kernel);
    let a = operands.activation("a", &if matmul.form == Form::TN { [k, m] } else { [m, k] });
    let b = operands.activation("b", &if matmul.form == Form::NT { [n, k] } else { [k, n] });
    let end = End::new(&mut operands, matmul, kernel.dtype == Dtype::Bf16);
    let mut device = DeviceKernel::new(kernel);
    // Blocks that run at the same time share rows of A: x goes along the columns.
    let grid = [n.div_ceil(tiles.nc.into()), m.div_ceil(tiles.mc.into()), 1];
    let on_tensor_cores = kernel.on_tensor_cores();
    let threads = if on_tensor_cores { matmul_tensor::threads(&tiles) } else { matmul_tiles::threads(&tiles) };
    device.launch(grid, threads, &operands, |code| {
        end.prepare(code);
        if on_tensor_cores {
            let block = matmul_tensor::Block::new(code, matmul, &tiles, [&a, &b]);
            product(code, &block, &end);
        } else {
            let block = matmul_tiles::Block::new(code, matmul, &tiles, [&a, &b]);
            product(code, &block, &end);
        }
    });
    device
}

/// The epilogue's operands.
pub struct End {
    epilogue: Epilogue,
    bias: Option<Buffer>,
    /// The residual, what GELU was taken of, or what is blended in.
    full: Option<Buffer>,
    outputs: Vec<Buffer>,
    sink: Option<SinkBuffers>,
    hyper: Option<Buffer>,
}

impl End {
    /// Declares the operands in the contract's order. `copied`: an update writes a copy of the weights in bf16.
    fn new(operands: &mut Operands, matmul: &MatMul, copied: bool) -> Self {
        let c = [u64::from(matmul.m), u64::from(matmul.n)];
        let epilogue = matmul.epilogue;
        let biased = matches!(epilogue, Epilogue::Bias | Epilogue::BiasResidual | Epilogue::BiasGelu);
        let bias = biased.then(|| operands.f32("bias", &c[1..]));
        let full = match epilogue {
            Epilogue::BiasResidual | Epilogue::Blend { .. } => Some(operands.activation("r", &c)),
            Epilogue::GeluGrad => Some(operands.activation("pre", &c)),
            _ => None,
        };
        let hyper = (epilogue == Epilogue::Average).then(|| operands.f32(HYPER, &[HYPER_LEN as u64]));
        let names: &[&str] = match epilogue {
            Epilogue::Gradient(_) => &[],
            Epilogue::BiasGelu => &["pre", "c"],
            _ => &["c"],
        };
        let outputs = names.iter().map(|name| match epilogue {
            Epilogue::Average => operands.f32(name, &c),
            _ => operands.activation(name, &c),
        });
        let outputs = outputs.collect();
        let sink = match epilogue {
            Epilogue::Gradient(sink) => Some(SinkBuffers::new(operands, sink, &c, copied)),
            _ => None,
        };
        Self { epilogue, bias, full, outputs, sink, hyper }
    }

    fn prepare(&self, code: &mut Code) {
        if let Some(sink) = &self.sink {
            sink.prepare(code);
        }
        if let Some(hyper) = &self.hyper {
            part::load_hyper(code, hyper, &[9, 10]);
        }
    }
}

impl Sums for End {
    fn start(&self, code: &mut Code, at: [&str; 2], count: usize) -> Vec<String> {
        match &self.sink {
            Some(sink) => sink.start(code, &at, count),
            None => vec![code.constant(0.0); count],
        }
    }

    fn finish(&self, code: &mut Code, at: [&str; 2], sums: &[String]) {
        if let Some(sink) = &self.sink {
            return sink.finish(code, &at, sums);
        }
        let count = sums.len();
        let bias = self.bias.as_ref().map(|bias| code.load_group(bias, &at[1..], count));
        let averaged = self.outputs.first().filter(|_| self.epilogue == Epilogue::Average);
        let full = self.full.as_ref().or(averaged).map(|full| code.load_group(full, &at, count));
        let mut results = vec![Vec::new(); self.outputs.len()];
        for (i, sum) in sums.iter().enumerate() {
            let given = [&bias, &full].map(|values| values.as_ref().map_or("", |v| v[i].as_str()));
            let values = element(code, self.epilogue, sum, given);
            results.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
        }
        for (output, values) in self.outputs.iter().zip(&results) {
            code.store_group(values, output, &at);
        }
    }
}

/// The outputs' elements, for what is not a weight gradient.
fn element(code: &mut Code, epilogue: Epilogue, sum: &str, [bias, full]: [&str; 2]) -> Vec<String> {
    match epilogue {
        Epilogue::Store | Epilogue::Gradient(_) => vec![sum.into()],
        Epilogue::Bias => vec![code.add(sum, bias)],
        Epilogue::BiasResidual => {
            let y = code.add(sum, bias);
            vec![code.add(&y, full)]
        }
        Epilogue::BiasGelu => {
            let pre = code.add(sum, bias);
            let act = math::gelu(code, &pre);
            vec![pre, act]
        }
        Epilogue::GeluGrad => {
            let slope = math::gelu_grad(code, full);
            vec![code.mul(sum, &slope)]
        }
        Epilogue::Blend { product_bits, other_bits } => {
            let [product, other] = [product_bits, other_bits].map(|bits| code.constant(f32::from_bits(bits)));
            let (product, other) = (code.mul(sum, &product), code.mul(full, &other));
            vec![code.add(&product, &other)]
        }
        Epilogue::Average => {
            let (product, before) = (code.mul(sum, "%h10"), code.mul(full, "%h9"));
            vec![code.add(&product, &before)]
        }
    }
}
