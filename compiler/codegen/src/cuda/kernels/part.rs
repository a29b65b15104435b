//! Parts of updates that are not elementwise, in the operations and the order of the CPU's.

use super::sink::{call, formulas};
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Buffer, Code, Operands, WARP, WIDE};
use crate::kernels::part::{CORRECT, LANES, MOMENTUM, VECTORS, factor, precondition};
use crate::kernels::sink::HYPER;
use crate::kernels::turn::{Turn, Workers};
use crate::kernels::update::AVERAGE;
use artifact::optimizer::HYPER_LEN;
use model::kernel::{Kernel, UpdatePart};

const THREADS: u32 = 256;
/// Of a block that works along columns.
const COLUMNS: u32 = 64;

pub fn write(kernel: &Kernel, part: UpdatePart) -> DeviceKernel {
    let mut device = DeviceKernel::new(kernel);
    let mut operands = Operands::of(kernel);
    match part {
        UpdatePart::SumSquares { len, add } => {
            let (x, sum) = (operands.f32("x", &[len]), operands.add("sum", &[1], "f64"));
            device.launch([1, 1, 1], WARP, &operands, |code| sum_squares(code, len, add, [&x, &sum]));
        }
        UpdatePart::Scale { len, factor: by } => {
            let (squares, x) = (operands.add("squares", &[1], "f64"), operands.f32("x", &[len]));
            elementwise(&mut device, &operands, len, |code, at, group| {
                let zero = code.index(0);
                let sum = code.load(&squares, &[&zero]);
                code.line(&format!("%sum = arith.bitcast {sum} : f64 to f64"));
                code.line(&factor(by));
                let old = code.load_group(&x, &[at], group);
                let new: Vec<_> = old.iter().map(|x| code.mul(x, "%factor")).collect();
                code.store_group(&new, &x, &[at]);
            });
        }
        UpdatePart::Add { len } => {
            let (other, g) = (operands.f32("other", &[len]), operands.f32("g", &[len]));
            elementwise(&mut device, &operands, len, |code, at, group| {
                let [own, other] = [&g, &other].map(|cell| code.load_group(cell, &[at], group));
                let both: Vec<_> = own.iter().zip(&other).map(|(a, b)| code.add(a, b)).collect();
                code.store_group(&both, &g, &[at]);
            });
        }
        UpdatePart::Momentum { len } => {
            of_hyper(&mut device, operands, len, (&[0, 1], (&[], &["g", "m"], &[]), MOMENTUM));
        }
        UpdatePart::Correct { len } => {
            of_hyper(&mut device, operands, len, (&[8], (&[], &["g", "before"], &[]), CORRECT));
        }
        UpdatePart::Average { len } => {
            of_hyper(&mut device, operands, len, (&[0, 1], (&["g"], &["m"], &[]), AVERAGE));
        }
        UpdatePart::Precondition { len } => {
            let cells: Cells = (&["g", "m"], &["v"], &["x"]);
            of_hyper(&mut device, operands, len, (&[2, 3, 4, 5], cells, &precondition()));
        }
        UpdatePart::Turn { rows, columns, side } => {
            let turn = Turn::new(rows, columns, side);
            let workers = Workers::Block { threads: THREADS };
            device.launch([1, 1, 1], THREADS, turn.operands(), |code| turn.write(code, workers));
        }
        UpdatePart::Columns { rows, width } => {
            let (rows, width) = (u64::from(rows), u64::from(width));
            let hyper = operands.f32(HYPER, &[HYPER_LEN as u64]);
            let (x, v) = (operands.f32("x", &[rows, width]), operands.f32("v", &[width]));
            device.launch([width.div_ceil(COLUMNS.into()), 1, 1], COLUMNS, &operands, |code| {
                columns(code, (rows, width), [&hyper, &x, &v]);
            });
        }
    }
    device
}

/// A thread per group of neighbours; `body` gets the first one's index and how many they are.
fn elementwise(device: &mut DeviceKernel, operands: &Operands, len: u64, body: impl FnOnce(&mut Code, &str, usize)) {
    let group = if len.is_multiple_of(WIDE as u64) { WIDE } else { 1 };
    let blocks = len.div_ceil(u64::from(THREADS) * group as u64);
    device.launch([blocks, 1, 1], THREADS, operands, |code| {
        let at = code.global_thread(THREADS);
        let at = code.times(&at, group as u64);
        let exists = code.below_const(&at, len);
        code.when(&exists, |code| body(code, &at, group));
    });
}

/// Operands of formulas, by what is done to them: read, updated, written.
type Cells<'a> = (&'a [&'static str], &'a [&'static str], &'a [&'static str]);

/// hyper, then the operands of formulas that define the new value of what they update or write.
fn of_hyper(
    device: &mut DeviceKernel,
    mut operands: Operands,
    len: u64,
    (hyper, (read, updated, written), body): (&[u64], Cells, &str),
) {
    let vector = operands.f32(HYPER, &[HYPER_LEN as u64]);
    let mut declare = |names: &[&'static str]| -> Vec<(&'static str, Buffer)> {
        names.iter().map(|&name| (name, operands.f32(name, &[len]))).collect()
    };
    let given = declare(&[read, updated].concat());
    let results: Vec<_> = given[read.len()..].iter().cloned().chain(declare(written)).collect();
    elementwise(device, &operands, len, |code, at, group| {
        load_hyper(code, &vector, hyper);
        let zero = code.constant(0.0);
        call(code, "none", &zero);
        let old: Vec<_> = given.iter().map(|(_, cell)| code.load_group(cell, &[at], group)).collect();
        let names: Vec<_> = results.iter().map(|(name, _)| *name).collect();
        let mut new = vec![Vec::new(); names.len()];
        for i in 0..group {
            let elements = given.iter().zip(&old).map(|((name, _), values)| (*name, values[i].as_str()));
            let values = formulas(code, elements, body, &names);
            new.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
        }
        for ((_, cell), values) in results.iter().zip(&new) {
            code.store_group(values, cell, &[at]);
        }
    });
}

/// Hyper-parameter `i` as `%h<i>`.
pub fn load_hyper(code: &mut Code, hyper: &Buffer, indices: &[u64]) {
    for i in indices {
        let index = code.index(*i);
        let value = code.load(hyper, &[&index]);
        call(code, &format!("h{i}"), &value);
    }
}

fn add64(code: &mut Code, a: &str, b: &str) -> String {
    code.op(&format!("arith.addf {a}, {b} : f64"))
}

/// The square of an element in f64, added to a sum.
fn add_square(code: &mut Code, x: &Buffer, at: &[&str], sum: &str) -> String {
    let element = code.load(x, at);
    let wide = code.op(&format!("arith.extf {element} : f32 to f64"));
    let square = code.op(&format!("arith.mulf {wide}, {wide} : f64"));
    add64(code, sum, &square)
}

/// A warp: each lane sums every 32nd element; then one lane takes the sums together as the CPU does its vectors' lanes.
fn sum_squares(code: &mut Code, len: u64, add: bool, [x, sum]: [&Buffer; 2]) {
    let round = LANES * VECTORS;
    assert_eq!(round, u64::from(WARP), "a lane of the CPU's vectors for each lane of the warp");
    let parts = code.shared_of(&[round], "f64");
    let lane = code.thread();
    let (zero, one) = (code.index(0), code.index(1));
    let (whole, end, step) = (code.index(len - len % round), code.index(len), code.index(round));
    let nothing = code.op("arith.constant 0.0 : f64");
    let own = code.repeat((&zero, &whole, &step), &[(nothing, "f64")], |code, first, so_far| {
        let at = code.plus(first, &lane);
        vec![add_square(code, x, &[&at], &so_far[0])]
    });
    code.store(&own[0], &parts, &[&lane]);
    code.barrier();
    let first = code.below_const(&lane, 1);
    code.when(&first, |code| {
        let mut total = None;
        for lane in 0..LANES {
            let at: Vec<_> = (0..VECTORS).map(|v| code.index(v * LANES + lane)).collect();
            let vectors: Vec<_> = at.iter().map(|at| code.load(&parts, &[at])).collect();
            let (low, high) = (add64(code, &vectors[0], &vectors[1]), add64(code, &vectors[2], &vectors[3]));
            let lane = add64(code, &low, &high);
            total = Some(total.map_or_else(|| lane.clone(), |total: String| add64(code, &total, &lane)));
        }
        let start = total.expect("there are lanes");
        let rest = code.repeat((&whole, &end, &one), &[(start, "f64")], |code, at, so_far| {
            vec![add_square(code, x, &[at], &so_far[0])]
        });
        let mut result = rest[0].clone();
        if add {
            let before = code.load(sum, &[&zero]);
            result = add64(code, &before, &result);
        }
        code.store(&result, sum, &[&zero]);
    });
}

/// A thread per column: squares summed over the rows in f64, ascending; v; then the division.
fn columns(code: &mut Code, (rows, width): (u64, u64), [hyper, x, v]: [&Buffer; 3]) {
    let column = code.global_thread(COLUMNS);
    let exists = code.below_const(&column, width);
    code.when(&exists, |code| {
        let (zero, end, one) = (code.index(0), code.index(rows), code.index(1));
        let nothing = code.op("arith.constant 0.0 : f64");
        let total = code.repeat((&zero, &end, &one), &[(nothing, "f64")], |code, row, so_far| {
            vec![add_square(code, x, &[row, &column], &so_far[0])]
        });
        let count = code.op(&format!("arith.constant {rows}.0 : f64"));
        let mean = code.op(&format!("arith.divf {}, {count} : f64", total[0]));
        let mean = code.op(&format!("arith.truncf {mean} : f64 to f32"));
        let [kept, part] = [2, 3].map(|i| {
            let at = code.index(i);
            code.load(hyper, &[&at])
        });
        let before = code.load(v, &[&column]);
        let (kept, part) = (code.mul(&before, &kept), code.mul(&mean, &part));
        let moment = code.add(&kept, &part);
        code.store(&moment, v, &[&column]);
        let root = code.op(&format!("math.sqrt {moment} : f32"));
        let (small, unit) = (code.constant(1e-10), code.constant(1.0));
        let safe = code.add(&root, &small);
        let factor = code.div(&unit, &safe);
        code.repeat((&zero, &end, &one), &[], |code, row, _| {
            let element = code.load(x, &[row, &column]);
            let scaled = code.mul(&element, &factor);
            code.store(&scaled, x, &[row, &column]);
            Vec::new()
        });
    });
}
