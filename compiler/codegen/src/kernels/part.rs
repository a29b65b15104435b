//! Parts of updates that are not elementwise: sums of squares in f64, scaling by them, and what stands beside.

use super::sink::HYPER;
use super::text::{Func, identity_map, parallel, tensor};
use super::turn::{self, Turn};
use super::update::{AVERAGE, ROOT, SQUARE};
use super::{KernelSource, strategy};
use model::kernel::{Factor, UpdatePart};
use model::target::CpuClass;
use std::fmt::Write;

/// Lanes of the f64 vectors that sums are kept in, on every CPU class: the order of a sum must not depend on it.
pub const LANES: u64 = 8;
/// Vectors that are summed at once.
pub const VECTORS: u64 = 4;

pub fn source(name: &str, part: UpdatePart, cpu: CpuClass) -> KernelSource {
    match part {
        UpdatePart::SumSquares { len, add } => sum_squares(name, len, add),
        UpdatePart::Scale { len, factor } => scale(name, len, factor, cpu),
        UpdatePart::Add { len } => add(name, len, cpu),
        UpdatePart::Momentum { len } => momentum(name, len, cpu),
        UpdatePart::Correct { len } => correct(name, len, cpu),
        UpdatePart::Columns { rows, width } => columns(name, rows.into(), width.into()),
        UpdatePart::Average { len } => of_hyper(name, (len, cpu), &[0, 1], (&["g"], &["m"], &[]), AVERAGE),
        UpdatePart::Precondition { len } => {
            of_hyper(name, (len, cpu), &[2, 3, 4, 5], (&["g", "m"], &["v"], &["x"]), &precondition())
        }
        UpdatePart::Turn { rows, columns, side } => {
            let linalg = turn::host(name, &Turn::new(rows, columns, side), cpu);
            KernelSource { linalg, strategy: as_it_is() }
        }
    }
}

/// [`UpdatePart::Precondition`] of one element.
pub fn precondition() -> String {
    [SQUARE, ROOT, "%x_new = arith.divf %m_el, %v_safe : f32\n"].concat()
}

/// [`UpdatePart::Momentum`] of one element.
pub const MOMENTUM: &str = "\
%m_kept = arith.mulf %m_el, %h0 : f32
%m_part = arith.mulf %g_el, %h1 : f32
%m_new = arith.addf %m_kept, %m_part : f32
%way = arith.subf %m_new, %g_el : f32
%part = arith.mulf %way, %h0 : f32
%g_new = arith.addf %g_el, %part : f32
";
/// [`UpdatePart::Correct`] of one element. `%none` is 0: adding it changes no number, only the sign of a zero.
pub const CORRECT: &str = "\
%change = arith.subf %g_el, %before_el : f32
%part = arith.mulf %change, %h8 : f32
%g_new = arith.addf %g_el, %part : f32
%before_new = arith.addf %g_el, %none : f32
";

/// The strategy of what is written as vectors already.
fn as_it_is() -> String {
    format!(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {{\n  transform.yield\n}}\n{}",
        strategy::lower()
    )
}

/// Index constants `%c<n>`.
fn indices(func: &mut Func, values: &[u64]) {
    let mut values = values.to_vec();
    values.sort_unstable();
    values.dedup();
    values.iter().for_each(|v| func.push(&format!("%c{v} = arith.constant {v} : index")));
}

/// Hyper-parameter `i` as `%h<i>`.
pub fn load_hyper(func: &mut Func, indices: &[usize]) {
    let len = artifact::optimizer::HYPER_LEN;
    for i in indices {
        func.push(&format!("%hyper_at{i} = arith.constant {i} : index"));
        func.push(&format!("%h{i} = memref.load %{HYPER}_ref[%hyper_at{i}] : memref<{len}xf32>"));
    }
}

/// The lanes of [`VECTORS`] vectors, the vectors pairwise, the lanes in order, then the elements that fill no whole round.
fn sum_squares(name: &str, len: u64, add: bool) -> KernelSource {
    let mut func = Func::new(name);
    let (x, m) = (func.buffer("x", &[len], "f32"), format!("memref<{len}xf32>"));
    let sum = func.buffer("sum", &[1], "f64");
    let round = LANES * VECTORS;
    let whole = len - len % round;
    indices(&mut func, &[0, 1, 8, 16, 24, round, whole, len]);
    func.push(&format!("%zeros = arith.constant dense<0.0> : vector<{LANES}xf64>"));
    let vectors = 0..VECTORS;
    let list = |form: &dyn Fn(u64) -> String| vectors.clone().map(form).collect::<Vec<_>>().join(", ");
    let types = list(&|_| format!("vector<{LANES}xf64>"));
    let mut text = format!(
        "%lanes:{VECTORS} = scf.for %at = %c0 to %c{whole} step %c{round} iter_args({}) -> ({types}) {{\n",
        list(&|v| format!("%so_far{v} = %zeros"))
    );
    for v in vectors.clone() {
        write!(
            text,
            "%at{v} = arith.addi %at, %c{offset} : index\n\
             %x{v} = vector.load {x}[%at{v}] : {m}, vector<{LANES}xf32>\n\
             %wide{v} = arith.extf %x{v} : vector<{LANES}xf32> to vector<{LANES}xf64>\n\
             %square{v} = arith.mulf %wide{v}, %wide{v} : vector<{LANES}xf64>\n\
             %next{v} = arith.addf %so_far{v}, %square{v} : vector<{LANES}xf64>\n",
            offset = v * LANES,
        )
        .expect("writing to a String");
    }
    text += &format!(
        "scf.yield {} : {types}\n}}\n\
         %low = arith.addf %lanes#0, %lanes#1 : vector<{LANES}xf64>\n\
         %high = arith.addf %lanes#2, %lanes#3 : vector<{LANES}xf64>\n\
         %total = arith.addf %low, %high : vector<{LANES}xf64>\n\
         %upto0 = vector.extract %total[0] : f64 from vector<{LANES}xf64>\n",
        list(&|v| format!("%next{v}"))
    );
    for lane in 1..LANES {
        write!(
            text,
            "%lane{lane} = vector.extract %total[{lane}] : f64 from vector<{LANES}xf64>\n\
             %upto{lane} = arith.addf %upto{}, %lane{lane} : f64\n",
            lane - 1
        )
        .expect("writing to a String");
    }
    func.push(&text);
    func.push(&format!(
        "%rest = scf.for %at = %c{whole} to %c{len} step %c1 iter_args(%so_far = %upto{last}) -> (f64) {{\n\
         %x = memref.load {x}[%at] : {m}\n\
         %wide = arith.extf %x : f32 to f64\n\
         %square = arith.mulf %wide, %wide : f64\n\
         %next = arith.addf %so_far, %square : f64\n\
         scf.yield %next : f64\n}}",
        last = LANES - 1
    ));
    let mut result = "%rest";
    if add {
        func.push(&format!(
            "%before = memref.load {sum}[%c0] : memref<1xf64>\n%both = arith.addf %before, %rest : f64"
        ));
        result = "%both";
    }
    func.push(&format!("memref.store {result}, {sum}[%c0] : memref<1xf64>"));
    KernelSource { linalg: func.finish(), strategy: as_it_is() }
}

/// `%factor`, f32, from `%sum`.
pub fn factor(factor: Factor) -> String {
    let constant = |x: f64| format!("arith.constant 0x{:016X} : f64", x.to_bits());
    let over = |small: f64, what: &str| {
        format!(
            "%small = {}\n%safe = arith.addf %norm, %small : f64\n%above = {what}\n%wide = arith.divf %above, %safe : f64\n",
            constant(small)
        )
    };
    let body = match factor {
        Factor::Unit => over(1e-7, &constant(1.0)),
        Factor::To { target_bits } => over(1e-10, &constant(f64::from_bits(target_bits))),
        // NaN stays to be seen: it compares as not within.
        Factor::AtMost { max_bits } => format!(
            "%max = {}\n%one = {}\n%within = arith.cmpf ole, %norm, %max : f64\n%down = arith.divf %max, %norm : f64\n\
             %wide = arith.select %within, %one, %down : f64\n",
            constant(f64::from_bits(max_bits)),
            constant(1.0)
        ),
    };
    format!("%norm = math.sqrt %sum : f64\n{body}%factor = arith.truncf %wide : f64 to f32")
}

fn scale(name: &str, len: u64, by: Factor, cpu: CpuClass) -> KernelSource {
    let mut func = Func::new(name);
    let sum = func.buffer("sum", &[1], "f64");
    func.output("x", &[len], "f32");
    indices(&mut func, &[0]);
    func.push(&format!("%sum = memref.load {sum}[%c0] : memref<1xf64>"));
    func.push(&factor(by));
    elementwise(&mut func, len, (&[], &["x"]), "%x_new = arith.mulf %x_el, %factor : f32\n");
    KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) }
}

fn add(name: &str, len: u64, cpu: CpuClass) -> KernelSource {
    let mut func = Func::new(name);
    func.input("other", &[len], "f32");
    func.output("g", &[len], "f32");
    elementwise(&mut func, len, (&["other"], &["g"]), "%g_new = arith.addf %g_el, %other_el : f32\n");
    KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) }
}

fn momentum(name: &str, len: u64, cpu: CpuClass) -> KernelSource {
    of_hyper(name, (len, cpu), &[0, 1], (&[], &["g", "m"], &[]), MOMENTUM)
}

fn correct(name: &str, len: u64, cpu: CpuClass) -> KernelSource {
    of_hyper(name, (len, cpu), &[8], (&[], &["g", "before"], &[]), CORRECT)
}

/// hyper, then operands that are read, updated, and written: `body` defines `%<operand>_new` of the latter two from `%<operand>_el`.
fn of_hyper(
    name: &str,
    (len, cpu): (u64, CpuClass),
    hyper: &[usize],
    (read, updated, written): (&[&str], &[&str], &[&str]),
    body: &str,
) -> KernelSource {
    let mut func = Func::new(name);
    func.buffer(HYPER, &[artifact::optimizer::HYPER_LEN as u64], "f32");
    read.iter().for_each(|name| _ = func.input(name, &[len], "f32"));
    let outputs = [updated, written].concat();
    outputs.iter().for_each(|name| _ = func.output(name, &[len], "f32"));
    load_hyper(&mut func, hyper);
    func.push("%none = arith.constant 0.0 : f32");
    elementwise(&mut func, len, (read, &outputs), body);
    KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) }
}

fn elementwise(func: &mut Func, len: u64, (inputs, outputs): (&[&str], &[&str]), body: &str) {
    let t = tensor(&[len], "f32");
    let join =
        |names: &[&str], form: &dyn Fn(&str) -> String| names.iter().map(|o| form(o)).collect::<Vec<_>>().join(", ");
    let list = |form: &dyn Fn(&str) -> String| join(outputs, form);
    let ins = match inputs {
        [] => String::new(),
        _ => format!("ins({} : {}) ", join(inputs, &|o| format!("%{o}")), join(inputs, &|_| t.clone())),
    };
    let cells: Vec<&str> = inputs.iter().chain(outputs).copied().collect();
    func.push(&format!(
        "%updated:{n} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} {ins}outs({outs} : {types}) {{\n\
         ^bb0({args}):\n{body}linalg.yield {yields} : {elements}\n}} -> ({types})",
        n = outputs.len(),
        maps = vec![identity_map(1); cells.len()].join(", "),
        iterators = parallel(1),
        outs = list(&|o| format!("%{o}")),
        types = list(&|_| t.clone()),
        args = join(&cells, &|o| format!("%{o}_el: f32")),
        yields = list(&|o| format!("%{o}_new")),
        elements = list(&|_| "f32".into()),
    ));
    for (i, name) in outputs.iter().enumerate() {
        func.result(name, &format!("%updated#{i}"));
    }
}

/// Column by column, [`LANES`] at a time: squares summed over the rows in f64, ascending; v; then the division.
fn columns(name: &str, rows: u64, width: u64) -> KernelSource {
    let mut func = Func::new(name);
    func.buffer(HYPER, &[artifact::optimizer::HYPER_LEN as u64], "f32");
    let x = func.buffer("x", &[rows, width], "f32");
    let v = func.buffer("v", &[width], "f32");
    load_hyper(&mut func, &[2, 3]);
    let whole = width - width % LANES;
    indices(&mut func, &[0, 1, LANES, whole, width, rows]);
    for (from, to, lanes) in [(0, whole, LANES), (whole, width, 1)] {
        if from < to {
            func.push(&column_block(&x, &v, (rows, width), (from, to), lanes));
        }
    }
    KernelSource { linalg: func.finish(), strategy: as_it_is() }
}

fn column_block(x: &str, v: &str, (rows, width): (u64, u64), (from, to): (u64, u64), lanes: u64) -> String {
    let (narrow, wide) = (format!("vector<{lanes}xf32>"), format!("vector<{lanes}xf64>"));
    let (x_type, v_type) = (format!("memref<{rows}x{width}xf32>"), format!("memref<{width}xf32>"));
    let splat = |name: &str, value: &str| format!("%{name} = vector.broadcast {value} : f32 to {narrow}\n");
    format!(
        "scf.for %j = %c{from} to %c{to} step %c{lanes} {{\n\
         %none = arith.constant dense<0.0> : {wide}\n\
         %count = arith.constant dense<{rows}.0> : {wide}\n\
         %small = arith.constant dense<1.0e-10> : {narrow}\n\
         %one = arith.constant dense<1.0> : {narrow}\n\
         %total = scf.for %i = %c0 to %c{rows} step %c1 iter_args(%so_far = %none) -> ({wide}) {{\n\
         %x_el = vector.load {x}[%i, %j] : {x_type}, {narrow}\n\
         %x_wide = arith.extf %x_el : {narrow} to {wide}\n\
         %square = arith.mulf %x_wide, %x_wide : {wide}\n\
         %next = arith.addf %so_far, %square : {wide}\n\
         scf.yield %next : {wide}\n}}\n\
         %mean_wide = arith.divf %total, %count : {wide}\n\
         %mean = arith.truncf %mean_wide : {wide} to {narrow}\n\
         {kept}{part}\
         %v_el = vector.load {v}[%j] : {v_type}, {narrow}\n\
         %v_kept = arith.mulf %v_el, %kept : {narrow}\n\
         %v_part = arith.mulf %mean, %part : {narrow}\n\
         %v_new = arith.addf %v_kept, %v_part : {narrow}\n\
         vector.store %v_new, {v}[%j] : {v_type}, {narrow}\n\
         %root = math.sqrt %v_new : {narrow}\n\
         %safe = arith.addf %root, %small : {narrow}\n\
         %factor = arith.divf %one, %safe : {narrow}\n\
         scf.for %i = %c0 to %c{rows} step %c1 {{\n\
         %x_el = vector.load {x}[%i, %j] : {x_type}, {narrow}\n\
         %x_new = arith.mulf %x_el, %factor : {narrow}\n\
         vector.store %x_new, {x}[%i, %j] : {x_type}, {narrow}\n}}\n}}",
        kept = splat("kept", "%h2"),
        part = splat("part", "%h3"),
    )
}
