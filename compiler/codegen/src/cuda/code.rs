//! Writes the text of device functions: values, loops, memory. What the text means: see the parent module.

use crate::kernels::math::Region;
use crate::kernels::text::memref;
use model::kernel::{Dtype, Kernel};
use std::ops::{Deref, DerefMut};

/// Threads of a warp.
pub const WARP: u32 = 32;
/// Elements of a 16-byte access.
pub const WIDE: usize = 4;

/// Memory that a function reads and writes: an operand, or an array that the threads of a block share.
#[derive(Clone, Debug)]
pub struct Buffer {
    name: String,
    element: &'static str,
    shape: Vec<u64>,
    ty: String,
    /// Whether it may be where another such operand is.
    shares: bool,
}

impl Buffer {
    pub fn element(&self) -> &'static str {
        self.element
    }

    /// Bytes of an element of f32, or of bf16, which values have in memory only.
    fn bytes(&self) -> u64 {
        if self.is_bf16() { 2 } else { 4 }
    }

    pub fn is_bf16(&self) -> bool {
        self.element == BF16
    }

    /// Elements of 16 bytes, and the type of a vector of so many.
    pub fn piece(&self) -> u64 {
        16 / self.bytes()
    }

    pub fn piece_type(&self) -> &'static str {
        if self.is_bf16() { "vector<8xbf16>" } else { "vector<4xf32>" }
    }
}

/// The operations of one function, in order. Elementwise f32 operations and constants come from [`Region`].
pub struct Code {
    region: Region,
    shared: Vec<Buffer>,
}

impl Deref for Code {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

impl DerefMut for Code {
    fn deref_mut(&mut self) -> &mut Region {
        &mut self.region
    }
}

/// The element type of memory in bf16: loads extend to f32, stores round to nearest even.
const BF16: &str = "bf16";

/// A function's operands in order.
#[derive(Clone)]
pub struct Operands {
    list: Vec<Buffer>,
    activation: &'static str,
}

impl Operands {
    /// None yet of a kernel.
    pub fn of(kernel: &Kernel) -> Self {
        Self { list: Vec::new(), activation: if kernel.dtype == Dtype::Bf16 { BF16 } else { "f32" } }
    }

    /// None yet of a kernel that is in f32 whatever its model is in.
    pub fn in_f32() -> Self {
        Self { list: Vec::new(), activation: "f32" }
    }

    /// Adds an operand.
    pub fn add(&mut self, name: &str, shape: &[u64], element: &'static str) -> Buffer {
        let ty = memref(shape, element);
        let buffer = Buffer { name: format!("%{name}"), element, shape: shape.to_vec(), ty, shares: false };
        self.list.push(buffer.clone());
        buffer
    }

    pub fn f32(&mut self, name: &str, shape: &[u64]) -> Buffer {
        self.add(name, shape, "f32")
    }

    /// An operand with elements of the kernel's type.
    pub fn activation(&mut self, name: &str, shape: &[u64]) -> Buffer {
        self.add(name, shape, self.activation)
    }

    /// An operand in bf16.
    pub fn bf16(&mut self, name: &str, shape: &[u64]) -> Buffer {
        self.add(name, shape, BF16)
    }

    /// The named operands may be in one place.
    pub fn share(&mut self, names: &[&str]) {
        let named = |b: &&mut Buffer| names.contains(&&b.name[1..]);
        self.list.iter_mut().filter(named).for_each(|buffer| buffer.shares = true);
    }
}

/// A `func.func` of the same text, for a CPU: without threads, barriers and shared memory.
pub fn host_function(name: &str, operands: &Operands, body: impl FnOnce(&mut Code)) -> String {
    let mut code = Code { region: Region::new("v"), shared: Vec::new() };
    body(&mut code);
    assert!(code.shared.is_empty(), "no block shares memory");
    let args: Vec<_> = operands.list.iter().map(|b| format!("{}: {}", b.name, b.ty)).collect();
    format!("func.func @{name}({}) {{\n{}return\n}}\n", args.join(", "), code.region.finish())
}

/// A `gpu.func` of so many threads a block. Operands never overlap unless they share, and start at multiples of 16 bytes.
pub fn function(name: &str, operands: &Operands, threads: u32, body: impl FnOnce(&mut Code)) -> String {
    let mut code = Code { region: Region::new("v"), shared: Vec::new() };
    body(&mut code);
    let args = operands.list.iter().map(|b| {
        let alone = if b.shares { "" } else { "llvm.noalias, " };
        format!("{}: {} {{{alone}llvm.align = 16 : i64}}", b.name, b.ty)
    });
    let shared = code.shared.iter().map(|b| format!("{}: {} {{llvm.align = 16 : i64}}", b.name, b.ty));
    format!(
        "gpu.func @{name}({}) workgroup({}) kernel attributes {{known_block_size = array<i32: {threads}, 1, 1>}} {{\n{}gpu.return\n}}\n",
        args.collect::<Vec<_>>().join(", "),
        shared.collect::<Vec<_>>().join(", "),
        with_intrinsics(&code.region.finish()),
    )
}

/// The math dialect would become calls of a device library. What [`Region`] and the updates use of it are LLVM intrinsics, which
/// become one instruction of the exact operation.
fn with_intrinsics(text: &str) -> String {
    let mut rewritten = String::new();
    for line in text.lines() {
        rewritten += &intrinsic(line).unwrap_or_else(|| line.into());
        rewritten.push('\n');
    }
    rewritten
}

fn intrinsic(line: &str) -> Option<String> {
    let (result, operation) = line.split_once(" = math.")?;
    let (name, rest) = operation.split_once(' ')?;
    let (arguments, ty) = rest.rsplit_once(" : ")?;
    let types = vec![ty; arguments.split(", ").count()].join(", ");
    Some(format!("{result} = llvm.call_intrinsic \"llvm.{name}\"({arguments}) : ({types}) -> {ty}"))
}

/// Indices and conditions.
impl Code {
    pub fn index(&mut self, value: u64) -> String {
        self.op(&format!("arith.constant {value} : index"))
    }

    /// An operation of two indices: `arith.addi`.
    pub fn index_op(&mut self, name: &str, a: &str, b: &str) -> String {
        self.op(&format!("{name} {a}, {b} : index"))
    }

    pub fn plus(&mut self, a: &str, b: &str) -> String {
        self.index_op("arith.addi", a, b)
    }

    pub fn plus_const(&mut self, a: &str, b: u64) -> String {
        if b == 0 {
            return a.into();
        }
        let b = self.index(b);
        self.plus(a, &b)
    }

    /// a * b + c
    pub fn times_plus(&mut self, a: &str, b: u64, c: &str) -> String {
        let b = self.index(b);
        let product = self.index_op("arith.muli", a, &b);
        self.plus(&product, c)
    }

    pub fn times(&mut self, a: &str, b: u64) -> String {
        let b = self.index(b);
        self.index_op("arith.muli", a, &b)
    }

    /// Quotient and remainder.
    pub fn split(&mut self, a: &str, by: u64) -> (String, String) {
        let by = self.index(by);
        (self.index_op("arith.divui", a, &by), self.index_op("arith.remui", a, &by))
    }

    pub fn below(&mut self, a: &str, b: &str) -> String {
        self.op(&format!("arith.cmpi ult, {a}, {b} : index"))
    }

    pub fn below_const(&mut self, a: &str, b: u64) -> String {
        let b = self.index(b);
        self.below(a, &b)
    }

    pub fn both(&mut self, a: &str, b: &str) -> String {
        self.op(&format!("arith.andi {a}, {b} : i1"))
    }

    pub fn min(&mut self, a: &str, b: &str) -> String {
        self.index_op("arith.minui", a, b)
    }

    /// A condition that holds, for what needs none.
    pub fn always(&mut self) -> String {
        self.op("arith.constant true")
    }

    pub fn choose(&mut self, condition: &str, then: &str, otherwise: &str) -> String {
        self.op(&format!("arith.select {condition}, {then}, {otherwise} : f32"))
    }
}

/// Threads.
impl Code {
    pub fn thread(&mut self) -> String {
        self.op("gpu.thread_id x")
    }

    /// `axis` is `x`, `y` or `z`.
    pub fn block(&mut self, axis: &str) -> String {
        self.op(&format!("gpu.block_id {axis}"))
    }

    /// The thread's number over all blocks of `threads` along x.
    pub fn global_thread(&mut self, threads: u32) -> String {
        let (block, thread) = (self.block("x"), self.thread());
        self.times_plus(&block, threads.into(), &thread)
    }

    pub fn barrier(&mut self) {
        self.line("gpu.barrier");
    }

    /// The value of the thread whose number in its warp differs in the bits of `distance`.
    pub fn exchange(&mut self, value: &str, distance: u32) -> String {
        let distance = self.op(&format!("arith.constant {distance} : i32"));
        let warp = self.op(&format!("arith.constant {WARP} : i32"));
        let both = self.values(2, &format!("gpu.shuffle xor {value}, {distance}, {warp} : f32"));
        format!("{both}#0")
    }

    /// An operation with `count` results, `<name>#0` and on.
    pub fn values(&mut self, count: usize, text: &str) -> String {
        let name = self.fresh();
        self.line(&format!("{name}:{count} = {text}"));
        name
    }
}

/// Control flow.
impl Code {
    /// A loop that carries values, given as (start, type); gives them as they are at the end.
    pub fn repeat(
        &mut self,
        (from, to, step): (&str, &str, &str),
        carried: &[(String, &str)],
        body: impl FnOnce(&mut Code, &str, &[String]) -> Vec<String>,
    ) -> Vec<String> {
        let at = self.fresh();
        let names: Vec<_> = carried.iter().map(|_| self.fresh()).collect();
        let types = carried.iter().map(|c| c.1).collect::<Vec<_>>().join(", ");
        let head = format!("scf.for {at} = {from} to {to} step {step}");
        if carried.is_empty() {
            self.line(&format!("{head} {{"));
            body(self, &at, &[]);
            self.line("}");
            return Vec::new();
        }
        let starts = names.iter().zip(carried).map(|(n, c)| format!("{n} = {}", c.0)).collect::<Vec<_>>().join(", ");
        let result = self.values(carried.len(), &format!("{head} iter_args({starts}) -> ({types}) {{"));
        let next = body(self, &at, &names);
        assert_eq!(next.len(), carried.len(), "a loop gives what it carries");
        self.line(&format!("scf.yield {} : {types}\n}}", next.join(", ")));
        (0..carried.len()).map(|i| format!("{result}#{i}")).collect()
    }

    pub fn when(&mut self, condition: &str, body: impl FnOnce(&mut Code)) {
        self.line(&format!("scf.if {condition} {{"));
        body(self);
        self.line("}");
    }

    /// The value of `body` where the condition holds, else `otherwise`.
    pub fn when_or(
        &mut self,
        condition: &str,
        (otherwise, ty): (&str, &str),
        body: impl FnOnce(&mut Code) -> String,
    ) -> String {
        let result = self.op(&format!("scf.if {condition} -> ({ty}) {{"));
        let value = body(self);
        self.line(&format!("scf.yield {value} : {ty}\n}} else {{\nscf.yield {otherwise} : {ty}\n}}"));
        result
    }
}

/// Memory.
impl Code {
    /// Memory of the block; its content is unknown at the start.
    pub fn shared(&mut self, shape: &[u64]) -> Buffer {
        self.shared_of(shape, "f32")
    }

    pub fn shared_of(&mut self, shape: &[u64], element: &'static str) -> Buffer {
        let ty = memref(shape, element).replace('>', ", #gpu.address_space<workgroup>>");
        let name = format!("%shared{}", self.shared.len());
        let buffer = Buffer { name, element, shape: shape.to_vec(), ty, shares: false };
        self.shared.push(buffer.clone());
        buffer
    }

    /// An element; of bf16 as f32.
    pub fn load(&mut self, from: &Buffer, at: &[&str]) -> String {
        let value = self.load_raw(from, at);
        if from.is_bf16() { self.op(&format!("arith.extf {value} : bf16 to f32")) } else { value }
    }

    /// An element in the memory's own type.
    pub fn load_raw(&mut self, from: &Buffer, at: &[&str]) -> String {
        self.op(&format!("memref.load {}[{}] : {}", from.name, at.join(", "), from.ty))
    }

    pub fn store(&mut self, value: &str, to: &Buffer, at: &[&str]) {
        let value = if to.is_bf16() { &self.op(&format!("arith.truncf {value} : f32 to bf16")) } else { value };
        self.line(&format!("memref.store {value}, {}[{}] : {}", to.name, at.join(", "), to.ty));
    }

    /// `lanes` neighbours as a vector; one as an element.
    pub fn load_lanes(&mut self, from: &Buffer, at: &[&str], lanes: u64) -> String {
        if lanes == 1 {
            return self.load(from, at);
        }
        let at = at.join(", ");
        self.op(&format!("vector.load {}[{at}] : {}, vector<{lanes}x{}>", from.name, from.ty, from.element))
    }

    pub fn store_lanes(&mut self, value: &str, to: &Buffer, at: &[&str], lanes: u64) {
        if lanes == 1 {
            return self.store(value, to, at);
        }
        let at = at.join(", ");
        let text = format!("vector.store {value}, {}[{at}] : {}, vector<{lanes}x{}>", to.name, to.ty, to.element);
        self.line(&text);
    }

    /// A piece of 16 bytes from an address that is a multiple of them, in the memory's own type.
    pub fn load_wide(&mut self, from: &Buffer, at: &[&str]) -> String {
        let (at, ty) = (at.join(", "), from.piece_type());
        self.op(&format!("vector.load {}[{at}] {{alignment = 16 : i64}} : {}, {ty}", from.name, from.ty))
    }

    pub fn store_wide(&mut self, value: &str, to: &Buffer, at: &[&str]) {
        let (at, ty) = (at.join(", "), to.piece_type());
        self.line(&format!("vector.store {value}, {}[{at}] {{alignment = 16 : i64}} : {}, {ty}", to.name, to.ty));
    }

    pub fn elements(&mut self, vector: &str) -> Vec<String> {
        self.elements_of(vector, WIDE)
    }

    fn elements_of(&mut self, vector: &str, count: usize) -> Vec<String> {
        (0..count).map(|i| self.op(&format!("vector.extract {vector}[{i}] : f32 from vector<{count}xf32>"))).collect()
    }

    pub fn vector(&mut self, elements: &[String]) -> String {
        self.op(&format!("vector.from_elements {} : vector<{}xf32>", elements.join(", "), elements.len()))
    }

    /// One element, or two or four neighbours from an address that is a multiple of their bytes.
    pub fn load_group(&mut self, from: &Buffer, at: &[&str], count: usize) -> Vec<String> {
        if count == 1 {
            return vec![self.load(from, at)];
        }
        let (at, bytes, element) = (at.join(", "), from.bytes() * count as u64, from.element);
        let access = format!("{}[{at}] {{alignment = {bytes} : i64}} : {}", from.name, from.ty);
        let mut vector = self.op(&format!("vector.load {access}, vector<{count}x{element}>"));
        if from.is_bf16() {
            vector = self.op(&format!("arith.extf {vector} : vector<{count}xbf16> to vector<{count}xf32>"));
        }
        self.elements_of(&vector, count)
    }

    pub fn store_group(&mut self, values: &[String], to: &Buffer, at: &[&str]) {
        if let [value] = values {
            return self.store(value, to, at);
        }
        let mut vector = self.vector(values);
        let (at, count, element) = (at.join(", "), values.len(), to.element);
        if to.is_bf16() {
            vector = self.op(&format!("arith.truncf {vector} : vector<{count}xf32> to vector<{count}xbf16>"));
        }
        let access = format!("{}[{at}] {{alignment = {} : i64}} : {}", to.name, to.bytes() * count as u64, to.ty);
        self.line(&format!("vector.store {vector}, {access}, vector<{count}x{element}>"));
    }

    /// A u32 element as an index.
    pub fn load_index(&mut self, from: &Buffer, at: &[&str]) -> String {
        assert_eq!(from.element, "i32", "tokens are 32-bit numbers");
        let value = self.load(from, at);
        self.op(&format!("arith.index_castui {value} : i32 to index"))
    }
}

/// Tensor cores.
impl Code {
    /// A `vector<4xf32>` rounded to tf32: to nearest, ties away from zero.
    pub fn rounded_to_tf32(&mut self, vector: &str) -> String {
        let elements = self.elements(vector);
        let round = |element: &String| {
            let bits = self.op(&format!("llvm.call_intrinsic \"llvm.nvvm.f2tf32.rna\"({element}) : (f32) -> i32"));
            self.op(&format!("arith.bitcast {bits} : i32 to f32"))
        };
        let rounded: Vec<_> = elements.iter().map(round).collect();
        self.vector(&rounded)
    }

    /// D = A B + C, 16x8 of 8 tf32 or of 16 bf16: four, two and four registers of a lane; gives the four of D.
    pub fn mma(&mut self, bf16: bool, [a, b, c]: [&[String]; 3]) -> Vec<String> {
        let operands = [a, b, c].concat().join(", ");
        let types = "i32, i32, i32, i32, i32, i32, f32, f32, f32, f32";
        let shape = if bf16 { "m16n8k16.row.col.bf16" } else { "m16n8k8.row.col.tf32" };
        self.four(&format!("llvm.nvvm.mma.{shape}"), &operands, types, "f32")
    }

    /// A lane's part of four 8x8 matrices of 16-bit elements in shared memory, or of what they are with rows and columns exchanged; each
    /// lane gives where one row starts, at a multiple of 16 bytes.
    pub fn ldmatrix(&mut self, from: &Buffer, at: &[&str], transposed: bool) -> Vec<String> {
        let pointer = self.pointer(from, at);
        let trans = if transposed { ".trans" } else { "" };
        let intrinsic = format!("llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{trans}.b16");
        self.four(&intrinsic, &pointer, "!llvm.ptr<3>", "i32")
    }

    /// The address of an element in shared memory.
    fn pointer(&mut self, of: &Buffer, at: &[&str]) -> String {
        let mut offset = at[0].to_string();
        for (index, size) in at[1..].iter().zip(&of.shape[1..]) {
            offset = self.times_plus(&offset, *size, index);
        }
        let cast = format!("memref.extract_aligned_pointer_as_index {} : {} -> index", of.name, of.ty);
        let start = self.op(&cast);
        let address = self.times_plus(&offset, of.bytes(), &start);
        let address = self.op(&format!("arith.index_cast {address} : index to i64"));
        self.op(&format!("llvm.inttoptr {address} : i64 to !llvm.ptr<3>"))
    }

    /// An intrinsic with four results of one type.
    fn four(&mut self, intrinsic: &str, operands: &str, types: &str, result: &str) -> Vec<String> {
        let structure = format!("!llvm.struct<({result}, {result}, {result}, {result})>");
        let all = self.op(&format!("llvm.call_intrinsic \"{intrinsic}\"({operands}) : ({types}) -> {structure}"));
        (0..4).map(|i| self.op(&format!("llvm.extractvalue {all}[{i}] : {structure}"))).collect()
    }
}

/// Sums and maxima over threads.
impl Code {
    /// `combine` over the warp; every thread gets the same bits, since it is commutative.
    pub fn over_warp(&mut self, value: &str, from: u32, combine: &str) -> String {
        let mut distance = from;
        let mut so_far = value.to_string();
        while distance > 0 {
            let other = self.exchange(&so_far, distance);
            so_far = self.binary(combine, &so_far, &other);
            distance /= 2;
        }
        so_far
    }

    /// `combine` over all `threads` of the block, through shared memory of its own. All threads must come here.
    pub fn over_block(&mut self, value: &str, threads: u32, combine: &str) -> String {
        let own = self.over_warp(value, WARP / 2, combine);
        let warps = u64::from(threads / WARP);
        if warps == 1 {
            return own;
        }
        let parts = self.shared(&[warps]);
        let thread = self.thread();
        let (warp, lane) = self.split(&thread, WARP.into());
        let first = self.below_const(&lane, 1);
        self.when(&first, |code| code.store(&own, &parts, &[&warp]));
        self.barrier();
        let zero = self.index(0);
        let mut so_far = self.load(&parts, &[&zero]);
        for i in 1..warps {
            let at = self.index(i);
            let part = self.load(&parts, &[&at]);
            so_far = self.binary(combine, &so_far, &part);
        }
        so_far
    }
}
