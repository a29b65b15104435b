//! The emulator finds what a kernel does wrong.

use crate::harness::with_context;
use codegen::cuda;
use emulated::{Launch, Memory, Module, Operand, Order};
use model::target::Chip;
use std::cell::Cell;

const THREADS: u32 = 64;
const SHARED: &str = "memref<64xf32, #gpu.address_space<workgroup>>";

/// Runs `body` in two blocks of two warps, with operands of 128 elements: `%in` and `%out` (which may be written first). `%t` is the
/// thread, `%at` its number in the grid, `%v` the element of `%in` there, `%first` whether it is thread 0.
fn run(body: &str, order: Order) -> Result<Vec<f32>, String> {
    let module = format!(
        "module {{\ngpu.module @device {{\n\
         gpu.func @kernel(%in: memref<128xf32> {{llvm.noalias}}, %out: memref<128xf32> {{llvm.noalias}}) \
         workgroup(%shared: {SHARED}) kernel attributes {{known_block_size = array<i32: {THREADS}, 1, 1>}} {{\n\
         %t = gpu.thread_id x\n%block = gpu.block_id x\n%size = arith.constant {THREADS} : index\n\
         %one = arith.constant 1 : index\n%zero = arith.constant 0 : index\n\
         %start = arith.muli %block, %size : index\n%at = arith.addi %start, %t : index\n\
         %v = memref.load %in[%at] : memref<128xf32>\n\
         %first = arith.cmpi eq, %t, %zero : index\n\
         {body}\ngpu.return\n}}\n}}\n}}\n"
    );
    let object =
        with_context(|c| cuda::emulated_object(c, "kernel", &module, Chip::Sm80)).map_err(|e| e.to_string())?;
    let module = Module::load(&object)?;
    let bytes: Vec<u8> = (0..128u16).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let mut operands = [Aligned::new(&bytes), Aligned::new(&[0; 512])];
    let [input, output] = &mut operands;
    let mut memory = Memory::new(vec![
        Operand { bytes: Cell::from_mut(&mut input.0[..]).as_slice_of_cells(), initialised: true },
        Operand { bytes: Cell::from_mut(&mut output.0[..]).as_slice_of_cells(), initialised: false },
    ]);
    let launch = Launch { entry: "kernel", grid: [2, 1, 1], threads: THREADS };
    emulated::launch(&module, &launch, &mut memory, order).map_err(|fault| fault.to_string())?;
    Ok(operands[1].0.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().expect("four bytes"))).collect())
}

#[repr(align(64))]
struct Aligned([u8; 512]);

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        Self(bytes.try_into().expect("128 elements"))
    }
}

/// Asserts that every order of threads meets the fault.
fn refused(body: &str, expected: &str) {
    for order in [Order::Ascending, Order::Random(1), Order::Random(2)] {
        let fault = run(body, order).expect_err("a fault");
        assert!(fault.contains(expected), "{fault}");
    }
}

fn shared(op: &str, value: &str, at: &str) -> String {
    match op {
        "load" => format!("{value} = memref.load %shared[{at}] : {SHARED}\n"),
        _ => format!("memref.store {value}, %shared[{at}] : {SHARED}\n"),
    }
}

fn write(value: &str, at: &str) -> String {
    format!("memref.store {value}, %out[{at}] : memref<128xf32>\n")
}

/// Each thread's element from its neighbour, by way of shared memory.
fn neighbours(barrier: &str) -> String {
    let index = "%next = arith.xori %t, %one : index\n";
    [&shared("store", "%v", "%t"), barrier, index, &shared("load", "%r", "%next"), &write("%r", "%at")].concat()
}

#[test]
fn what_is_right_runs() {
    for order in [Order::Ascending, Order::Random(1)] {
        let out = run(&neighbours("gpu.barrier\n"), order).unwrap();
        let expected: Vec<_> = (0..128u16).map(|i| f32::from(i ^ 1)).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn exchanges_and_votes_give_what_the_lanes_gave() {
    let body = "%d = arith.constant 5 : i32\n%w = arith.constant 32 : i32\n%s, %p = gpu.shuffle xor %v, %d, %w : f32\n\
                %all = arith.constant -1 : i32\n%three = arith.constant 3 : index\n%bits = arith.andi %t, %three : index\n\
                %odd = arith.cmpi eq, %bits, %one : index\n%b = nvvm.vote.sync ballot %all, %odd -> i32\n\
                %u = arith.uitofp %b : i32 to f32\n%sum = arith.addf %s, %u : f32\n";
    let out = run(&(body.to_owned() + &write("%sum", "%at")), Order::Random(3)).unwrap();
    for (i, found) in out.iter().enumerate() {
        assert_eq!(*found, (i ^ 5) as f32 + 0x2222_2222u32 as f32, "{i}");
    }
}

#[test]
fn a_missing_barrier_is_found() {
    let body = neighbours("");
    for order in [Order::Ascending, Order::Random(1), Order::Random(2)] {
        let fault = run(&body, order).expect_err("a fault");
        // Whoever comes first finds nothing written yet, or what nobody has agreed to read.
        assert!(
            fault.contains("no barrier between") || fault.contains("no thread of the block has written"),
            "{fault}"
        );
    }
}

#[test]
fn a_barrier_that_not_all_reach_is_found() {
    let body = format!("scf.if %first {{\ngpu.barrier\n}}\n{}", write("%v", "%at"));
    refused(&body, "not at the same barrier");
}

#[test]
fn an_exchange_that_not_all_lanes_reach_is_found() {
    let body = format!(
        "%d = arith.constant 1 : i32\n%w = arith.constant 32 : i32\n\
         %r = scf.if %first -> f32 {{\n%s, %p = gpu.shuffle xor %v, %d, %w : f32\nscf.yield %s : f32\n\
         }} else {{\nscf.yield %v : f32\n}}\n{}",
        write("%r", "%at")
    );
    refused(&body, "lanes are not together");
}

#[test]
fn an_access_outside_is_found() {
    let beyond = "%far = arith.addi %at, %one : index\n".to_owned() + &write("%v", "%far");
    refused(&beyond, "writes 4 bytes 0 bytes after operand 1");
    let before = "%two = arith.constant 2 : index\n%far = arith.subi %at, %two : index\n\
                  %r = memref.load %in[%far] : memref<128xf32>\n"
        .to_owned()
        + &write("%r", "%at");
    refused(&before, "bytes before operand");
    let body = format!(
        "%far = arith.addi %t, %one : index\n{}gpu.barrier\n{}{}",
        shared("store", "%v", "%far"),
        shared("load", "%r", "%t"),
        write("%r", "%at")
    );
    refused(&body, "outside of every shared array");
}

#[test]
fn what_nothing_has_written_is_found() {
    let body = "%c = arith.cmpi ne, %t, %zero : index\nscf.if %c {\n".to_owned()
        + &shared("store", "%v", "%t")
        + "}\ngpu.barrier\n"
        + &shared("load", "%r", "%t")
        + &write("%r", "%at");
    refused(&body, "no thread of the block has written");
    let body = "%r = memref.load %out[%at] : memref<128xf32>\n%s = arith.addf %r, %v : f32\n".to_owned();
    refused(&(body + &write("%s", "%at")), "which nothing has written");
}

#[test]
fn two_writers_of_one_place_are_found() {
    refused(&write("%v", "%t"), "another thread of the launch wrote");
    let body = shared("store", "%v", "%zero") + "gpu.barrier\n" + &shared("load", "%r", "%zero") + &write("%r", "%at");
    refused(&body, "no barrier between");
}

#[test]
fn an_access_across_its_alignment_is_found() {
    let body = "%second = arith.cmpi eq, %t, %one : index\nscf.if %second {\n\
                %wide = vector.load %in[%t] {alignment = 16 : i64} : memref<128xf32>, vector<4xf32>\n\
                vector.store %wide, %out[%zero] {alignment = 16 : i64} : memref<128xf32>, vector<4xf32>\n}\n";
    refused(body, "not a multiple of 16");
}
