//! Matrix products with their epilogue.
//!
//! The linalg: one `linalg.matmul` per block of k, each from zero, and one elementwise `linalg.generic` that adds the blocks' sums in
//! ascending order to the accumulator (or to zero) and does the rest. The strategy ([`super::matmul_strategy`]) tiles the generic
//! and pulls the products into its register tiles.

use super::math::{self, Region};
use super::sink::{self, HYPER, SinkOperands};
use super::text::{Func, identity_map, parallel, tensor};
use super::{KernelSource, matmul_strategy, part};
use artifact::optimizer::HYPER_LEN;
use model::blocking::{Blocking, KBlock};
use model::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, MatMul};

/// Where the bias lies over C: along its columns.
const COLUMN_MAP: &str = "affine_map<(d0, d1) -> (d1)>";

pub fn source(kernel: &Kernel) -> KernelSource {
    let KernelOp::MatMul(matmul) = &kernel.op else { unreachable!("dispatched on the operation") };
    let tiles = kernel.tiles.expect("a matmul has tiles");
    let blocking = Blocking::new(matmul, &tiles);
    let mut func = Func::new(&kernel.name);
    func.input("a", &a_shape(matmul, matmul.k), "f32");
    func.input("b", &b_shape(matmul, matmul.k), "f32");
    let epilogue = EpilogueText::declare(&mut func, matmul, &blocking, kernel.dtype == Dtype::Bf16);
    products(&mut func, matmul, &blocking);
    epilogue.write(&mut func, &[matmul.m.into(), matmul.n.into()]);
    KernelSource {
        linalg: func.finish(),
        strategy: matmul_strategy::strategy(matmul, &tiles, &blocking, epilogue.inputs.len() + epilogue.outputs.len()),
    }
}

/// A's shape with `k` of k.
fn a_shape(matmul: &MatMul, k: u32) -> [u64; 2] {
    let (m, k) = (u64::from(matmul.m), u64::from(k));
    if matmul.form == Form::TN { [k, m] } else { [m, k] }
}

fn b_shape(matmul: &MatMul, k: u32) -> [u64; 2] {
    let (n, k) = (u64::from(matmul.n), u64::from(k));
    if matmul.form == Form::NT { [n, k] } else { [k, n] }
}

/// Writes the products `%part0`, `%part1` … of the blocks of k.
fn products(func: &mut Func, matmul: &MatMul, blocking: &Blocking) {
    let c = tensor(&[matmul.m.into(), matmul.n.into()], "f32");
    func.push(&format!("%none = tensor.empty() : {c}"));
    func.push("%zero = arith.constant 0.0 : f32");
    func.push(&format!("%zeros = linalg.fill ins(%zero : f32) outs(%none : {c}) -> {c}"));
    let a_map = if matmul.form == Form::TN { "(d2, d0)" } else { "(d0, d2)" };
    let b_map = if matmul.form == Form::NT { "(d1, d2)" } else { "(d2, d1)" };
    let dims = "affine_map<(d0, d1, d2) -> ";
    for (i, block) in blocking.k_blocks.iter().enumerate() {
        let k_first = (matmul.form == Form::TN, matmul.form != Form::NT);
        let (a, a_type) = slice(func, "a", i, block, a_shape(matmul, matmul.k), k_first.0);
        let (b, b_type) = slice(func, "b", i, block, b_shape(matmul, matmul.k), k_first.1);
        func.push(&format!(
            "%part{i} = linalg.matmul indexing_maps = [{dims}{a_map}>, {dims}{b_map}>, {dims}(d0, d1)>] {{block = {i} : index}} \
             ins({a}, {b} : {a_type}, {b_type}) outs(%zeros : {c}) -> {c}"
        ));
    }
}

/// The part of operand `name` in a block of k; gives its name and type.
fn slice(func: &mut Func, name: &str, i: usize, block: &KBlock, shape: [u64; 2], k_first: bool) -> (String, String) {
    let k = if k_first { 0 } else { 1 };
    let whole = tensor(&shape, "f32");
    if u64::from(block.len) == shape[k] {
        return (format!("%{name}"), whole);
    }
    let (mut offsets, mut sizes) = ([0, 0], shape);
    offsets[k] = block.start;
    sizes[k] = block.len.into();
    let part = tensor(&sizes, "f32");
    let result = format!("%{name}_{i}");
    let ([at0, at1], [size0, size1]) = (offsets, sizes);
    func.push(&format!(
        "{result} = tensor.extract_slice %{name}[{at0}, {at1}] [{size0}, {size1}] [1, 1] : {whole} to {part}"
    ));
    (result, part)
}

/// The elementwise operation after the product.
struct EpilogueText {
    /// Inputs: name, whether along columns only.
    inputs: Vec<(String, bool)>,
    outputs: Vec<String>,
    body: String,
    /// The element that each output gets.
    yields: Vec<String>,
}

impl EpilogueText {
    /// Declares the epilogue's operands in the contract's order. `copied`: an update writes a bf16 copy of the weights.
    fn declare(func: &mut Func, matmul: &MatMul, blocking: &Blocking, copied: bool) -> Self {
        let (n, c) = ([u64::from(matmul.n)], [u64::from(matmul.m), u64::from(matmul.n)]);
        let (body, parts) = parts(blocking);
        let inputs = (0..parts.len()).map(|i| (format!("part{i}"), false)).collect();
        let mut text = Self { inputs, outputs: Vec::new(), body, yields: Vec::new() };
        if let Epilogue::Gradient(sink) = matmul.epilogue {
            let operands = SinkOperands::declare(func, sink, &c, copied);
            text.inputs.extend(operands.inputs.iter().map(|name| ((*name).to_string(), false)));
            text.outputs = operands.outputs.iter().map(|name| (*name).to_string()).collect();
            text.body += "%sink_zero = arith.constant 0.0 : f32\n";
            text.body += &sink::body(sink, &parts);
            text.yields = text.outputs.iter().map(|name| sink::new_value(name)).collect();
            return text;
        }
        let (inputs, outputs): (&[(&str, bool)], &[&str]) = match matmul.epilogue {
            Epilogue::Store | Epilogue::Gradient(_) => (&[], &["c"]),
            Epilogue::Bias => (&[("bias", true)], &["c"]),
            Epilogue::BiasResidual => (&[("bias", true), ("r", false)], &["c"]),
            Epilogue::BiasGelu => (&[("bias", true)], &["pre", "c"]),
            Epilogue::GeluGrad => (&[("pre", false)], &["c"]),
            Epilogue::Blend { .. } => (&[("r", false)], &["c"]),
            Epilogue::Average => {
                func.buffer(HYPER, &[HYPER_LEN as u64], "f32");
                part::load_hyper(func, &[9, 10]);
                (&[], &["c"])
            }
        };
        for &(name, along_columns) in inputs {
            func.input(name, if along_columns { &n } else { &c }, "f32");
            text.inputs.push((name.into(), along_columns));
        }
        for name in outputs {
            func.output(name, &c, "f32");
            text.outputs.push((*name).into());
        }
        let mut region = Region::new("e");
        text.yields = elements(&mut region, matmul.epilogue, &parts);
        text.body += &region.finish();
        text
    }

    /// Writes the operation and gives its results back to the outputs.
    fn write(&self, func: &mut Func, shape: &[u64]) {
        let c = tensor(shape, "f32");
        let ty = |along_columns| if along_columns { tensor(&shape[1..], "f32") } else { c.clone() };
        let join = |items: Vec<String>| items.join(", ");
        let count = self.outputs.len();
        let maps = self.inputs.iter().map(|i| if i.1 { COLUMN_MAP.into() } else { identity_map(2) });
        let maps = join(maps.chain(vec![identity_map(2); count]).collect());
        let names = || self.inputs.iter().map(|i| &i.0).chain(&self.outputs);
        func.push(&format!(
            "%result:{count} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} \
             ins({ins} : {in_types}) outs({outs} : {out_types}) {{\n^bb0({args}):\n{body}linalg.yield {yields} : {elements}\n\
             }} -> ({out_types})",
            iterators = parallel(2),
            ins = join(self.inputs.iter().map(|i| format!("%{}", i.0)).collect()),
            in_types = join(self.inputs.iter().map(|i| ty(i.1)).collect()),
            outs = join(self.outputs.iter().map(|o| format!("%{o}")).collect()),
            out_types = join(vec![c.clone(); count]),
            args = join(names().map(|name| format!("%{name}_el: f32")).collect()),
            body = self.body,
            yields = self.yields.join(", "),
            elements = join(vec!["f32".into(); count]),
        ));
        for (i, name) in self.outputs.iter().enumerate() {
            func.result(name, &format!("%result#{i}"));
        }
    }
}

/// The elements of the products' sums, and the region text that defines them.
///
/// Where a block of k is one step, its product becomes a single `vector.contract` from zero. MLIR takes `contract(a, b, 0) + x`
/// for `contract(a, b, x)`, which rounds differently. Giving the sum its own sign keeps the two apart; LLVM drops that again.
fn parts(blocking: &Blocking) -> (String, Vec<String>) {
    let mut body = String::new();
    let mut part = |(i, block): (usize, &KBlock)| {
        if block.steps {
            return format!("%part{i}_el");
        }
        body += &format!("%part{i}_sum = math.copysign %part{i}_el, %part{i}_el : f32\n");
        format!("%part{i}_sum")
    };
    let parts = blocking.k_blocks.iter().enumerate().map(&mut part).collect();
    (body, parts)
}

/// The outputs' elements, for what is not a weight gradient.
fn elements(r: &mut Region, epilogue: Epilogue, parts: &[String]) -> Vec<String> {
    let mut sum = r.constant(0.0);
    for part in parts {
        sum = r.add(&sum, part);
    }
    match epilogue {
        Epilogue::Store | Epilogue::Gradient(_) => vec![sum],
        Epilogue::Bias => vec![r.add(&sum, "%bias_el")],
        Epilogue::BiasResidual => {
            let y = r.add(&sum, "%bias_el");
            vec![r.add(&y, "%r_el")]
        }
        Epilogue::BiasGelu => {
            let pre = r.add(&sum, "%bias_el");
            let act = math::gelu(r, &pre);
            vec![pre, act]
        }
        Epilogue::GeluGrad => {
            let slope = math::gelu_grad(r, "%pre_el");
            vec![r.mul(&sum, &slope)]
        }
        Epilogue::Blend { product_bits, other_bits } => {
            let [product, other] = [product_bits, other_bits].map(|bits| r.constant(f32::from_bits(bits)));
            let (product, other) = (r.mul(&sum, &product), r.mul("%r_el", &other));
            vec![r.add(&product, &other)]
        }
        Epilogue::Average => {
            let (product, before) = (r.mul(&sum, "%h10"), r.mul("%c_el", "%h9"));
            vec![r.add(&product, &before)]
        }
    }
}
