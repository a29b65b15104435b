//! Where the elements of matrices lie in the registers of a warp's lanes: the tables of the PTX ISA (sections on the matrix fragments
//! of `mma.m16n8k8` and `mma.m16n8k16`, and on `ldmatrix`), written out from their rules by hand. Each entry is lane:register or, where a register
//! has two elements of 16 bits, lane:element. What the emulator does is compared with them.

use crate::harness::with_context;
use codegen::cuda;
use emulated::{Launch, Memory, Module, Operand, Order};
use model::target::Chip;
use std::cell::Cell;

/// A of m16n8k8 in tf32: rows of A, columns are k.
const A_TF32: &str = "
 0:0  1:0  2:0  3:0  0:2  1:2  2:2  3:2
 4:0  5:0  6:0  7:0  4:2  5:2  6:2  7:2
 8:0  9:0 10:0 11:0  8:2  9:2 10:2 11:2
12:0 13:0 14:0 15:0 12:2 13:2 14:2 15:2
16:0 17:0 18:0 19:0 16:2 17:2 18:2 19:2
20:0 21:0 22:0 23:0 20:2 21:2 22:2 23:2
24:0 25:0 26:0 27:0 24:2 25:2 26:2 27:2
28:0 29:0 30:0 31:0 28:2 29:2 30:2 31:2
 0:1  1:1  2:1  3:1  0:3  1:3  2:3  3:3
 4:1  5:1  6:1  7:1  4:3  5:3  6:3  7:3
 8:1  9:1 10:1 11:1  8:3  9:3 10:3 11:3
12:1 13:1 14:1 15:1 12:3 13:3 14:3 15:3
16:1 17:1 18:1 19:1 16:3 17:3 18:3 19:3
20:1 21:1 22:1 23:1 20:3 21:3 22:3 23:3
24:1 25:1 26:1 27:1 24:3 25:3 26:3 27:3
28:1 29:1 30:1 31:1 28:3 29:3 30:3 31:3";

/// B of m16n8k8 in tf32: rows are k, columns of B.
const B_TF32: &str = "
 0:0  4:0  8:0 12:0 16:0 20:0 24:0 28:0
 1:0  5:0  9:0 13:0 17:0 21:0 25:0 29:0
 2:0  6:0 10:0 14:0 18:0 22:0 26:0 30:0
 3:0  7:0 11:0 15:0 19:0 23:0 27:0 31:0
 0:1  4:1  8:1 12:1 16:1 20:1 24:1 28:1
 1:1  5:1  9:1 13:1 17:1 21:1 25:1 29:1
 2:1  6:1 10:1 14:1 18:1 22:1 26:1 30:1
 3:1  7:1 11:1 15:1 19:1 23:1 27:1 31:1";

/// C and D of both.
const C: &str = "
 0:0  0:1  1:0  1:1  2:0  2:1  3:0  3:1
 4:0  4:1  5:0  5:1  6:0  6:1  7:0  7:1
 8:0  8:1  9:0  9:1 10:0 10:1 11:0 11:1
12:0 12:1 13:0 13:1 14:0 14:1 15:0 15:1
16:0 16:1 17:0 17:1 18:0 18:1 19:0 19:1
20:0 20:1 21:0 21:1 22:0 22:1 23:0 23:1
24:0 24:1 25:0 25:1 26:0 26:1 27:0 27:1
28:0 28:1 29:0 29:1 30:0 30:1 31:0 31:1
 0:2  0:3  1:2  1:3  2:2  2:3  3:2  3:3
 4:2  4:3  5:2  5:3  6:2  6:3  7:2  7:3
 8:2  8:3  9:2  9:3 10:2 10:3 11:2 11:3
12:2 12:3 13:2 13:3 14:2 14:3 15:2 15:3
16:2 16:3 17:2 17:3 18:2 18:3 19:2 19:3
20:2 20:3 21:2 21:3 22:2 22:3 23:2 23:3
24:2 24:3 25:2 25:3 26:2 26:3 27:2 27:3
28:2 28:3 29:2 29:3 30:2 30:3 31:2 31:3";

/// A of m16n8k16 in bf16: lane and element, two of which are a register.
const A_BF16: &str = "
 0:0  0:1  1:0  1:1  2:0  2:1  3:0  3:1  0:4  0:5  1:4  1:5  2:4  2:5  3:4  3:5
 4:0  4:1  5:0  5:1  6:0  6:1  7:0  7:1  4:4  4:5  5:4  5:5  6:4  6:5  7:4  7:5
 8:0  8:1  9:0  9:1 10:0 10:1 11:0 11:1  8:4  8:5  9:4  9:5 10:4 10:5 11:4 11:5
12:0 12:1 13:0 13:1 14:0 14:1 15:0 15:1 12:4 12:5 13:4 13:5 14:4 14:5 15:4 15:5
16:0 16:1 17:0 17:1 18:0 18:1 19:0 19:1 16:4 16:5 17:4 17:5 18:4 18:5 19:4 19:5
20:0 20:1 21:0 21:1 22:0 22:1 23:0 23:1 20:4 20:5 21:4 21:5 22:4 22:5 23:4 23:5
24:0 24:1 25:0 25:1 26:0 26:1 27:0 27:1 24:4 24:5 25:4 25:5 26:4 26:5 27:4 27:5
28:0 28:1 29:0 29:1 30:0 30:1 31:0 31:1 28:4 28:5 29:4 29:5 30:4 30:5 31:4 31:5
 0:2  0:3  1:2  1:3  2:2  2:3  3:2  3:3  0:6  0:7  1:6  1:7  2:6  2:7  3:6  3:7
 4:2  4:3  5:2  5:3  6:2  6:3  7:2  7:3  4:6  4:7  5:6  5:7  6:6  6:7  7:6  7:7
 8:2  8:3  9:2  9:3 10:2 10:3 11:2 11:3  8:6  8:7  9:6  9:7 10:6 10:7 11:6 11:7
12:2 12:3 13:2 13:3 14:2 14:3 15:2 15:3 12:6 12:7 13:6 13:7 14:6 14:7 15:6 15:7
16:2 16:3 17:2 17:3 18:2 18:3 19:2 19:3 16:6 16:7 17:6 17:7 18:6 18:7 19:6 19:7
20:2 20:3 21:2 21:3 22:2 22:3 23:2 23:3 20:6 20:7 21:6 21:7 22:6 22:7 23:6 23:7
24:2 24:3 25:2 25:3 26:2 26:3 27:2 27:3 24:6 24:7 25:6 25:7 26:6 26:7 27:6 27:7
28:2 28:3 29:2 29:3 30:2 30:3 31:2 31:3 28:6 28:7 29:6 29:7 30:6 30:7 31:6 31:7";

/// B of m16n8k16 in bf16.
const B_BF16: &str = "
 0:0  4:0  8:0 12:0 16:0 20:0 24:0 28:0
 0:1  4:1  8:1 12:1 16:1 20:1 24:1 28:1
 1:0  5:0  9:0 13:0 17:0 21:0 25:0 29:0
 1:1  5:1  9:1 13:1 17:1 21:1 25:1 29:1
 2:0  6:0 10:0 14:0 18:0 22:0 26:0 30:0
 2:1  6:1 10:1 14:1 18:1 22:1 26:1 30:1
 3:0  7:0 11:0 15:0 19:0 23:0 27:0 31:0
 3:1  7:1 11:1 15:1 19:1 23:1 27:1 31:1
 0:2  4:2  8:2 12:2 16:2 20:2 24:2 28:2
 0:3  4:3  8:3 12:3 16:3 20:3 24:3 28:3
 1:2  5:2  9:2 13:2 17:2 21:2 25:2 29:2
 1:3  5:3  9:3 13:3 17:3 21:3 25:3 29:3
 2:2  6:2 10:2 14:2 18:2 22:2 26:2 30:2
 2:3  6:3 10:3 14:3 18:3 22:3 26:3 30:3
 3:2  7:2 11:2 15:2 19:2 23:2 27:2 31:2
 3:3  7:3 11:3 15:3 19:3 23:3 27:3 31:3";

/// A matrix of `ldmatrix`: lane and element of its register.
const LOADED: &str = "
 0:0  0:1  1:0  1:1  2:0  2:1  3:0  3:1
 4:0  4:1  5:0  5:1  6:0  6:1  7:0  7:1
 8:0  8:1  9:0  9:1 10:0 10:1 11:0 11:1
12:0 12:1 13:0 13:1 14:0 14:1 15:0 15:1
16:0 16:1 17:0 17:1 18:0 18:1 19:0 19:1
20:0 20:1 21:0 21:1 22:0 22:1 23:0 23:1
24:0 24:1 25:0 25:1 26:0 26:1 27:0 27:1
28:0 28:1 29:0 29:1 30:0 30:1 31:0 31:1";

/// And with `.trans`.
const LOADED_TRANSPOSED: &str = "
 0:0  4:0  8:0 12:0 16:0 20:0 24:0 28:0
 0:1  4:1  8:1 12:1 16:1 20:1 24:1 28:1
 1:0  5:0  9:0 13:0 17:0 21:0 25:0 29:0
 1:1  5:1  9:1 13:1 17:1 21:1 25:1 29:1
 2:0  6:0 10:0 14:0 18:0 22:0 26:0 30:0
 2:1  6:1 10:1 14:1 18:1 22:1 26:1 30:1
 3:0  7:0 11:0 15:0 19:0 23:0 27:0 31:0
 3:1  7:1 11:1 15:1 19:1 23:1 27:1 31:1";

/// Rows of (lane, register or element).
fn table(text: &str) -> Vec<Vec<(usize, usize)>> {
    let entry = |entry: &str| {
        let (lane, place) = entry.split_once(':').expect("lane:place");
        (lane.parse().expect("a lane"), place.parse().expect("a place"))
    };
    text.trim_matches('\n').lines().map(|line| line.split_whitespace().map(entry).collect()).collect()
}

/// Words of each operand, by lane: eight, of which the instruction takes as many as it has registers.
type Registers = [u32; 256];

#[repr(align(64))]
struct Aligned([u8; 1024]);

/// Runs `body` in one warp: operands `%a`, `%b` and `%c` have eight words for each lane, `%out` takes four f32 or i32; `%t` is the lane and
/// `%at` is where its words start. Gives `%out`.
fn run(body: &str, given: [&Registers; 3]) -> Vec<u32> {
    let types = "memref<256xi32> {llvm.noalias, llvm.align = 16 : i64}";
    let module = format!(
        "module {{\ngpu.module @device {{\n\
         gpu.func @kernel(%a: {types}, %b: {types}, %c: {types}, %out: {types}) \
         workgroup(%shared: memref<128xi32, #gpu.address_space<workgroup>> {{llvm.align = 16 : i64}}) \
         kernel attributes {{known_block_size = array<i32: 32, 1, 1>}} {{\n\
         %t = gpu.thread_id x\n%eight = arith.constant 8 : index\n%at = arith.muli %t, %eight : index\n\
         {body}\ngpu.return\n}}\n}}\n}}\n"
    );
    let object = with_context(|c| cuda::emulated_object(c, "kernel", &module, Chip::Sm80));
    let module = Module::load(&object.unwrap_or_else(|e| panic!("{e}"))).unwrap_or_else(|e| panic!("{e}"));
    let bytes = |words: &Registers| Aligned(words.map(u32::to_le_bytes).concat().try_into().expect("256 words"));
    let mut operands = [bytes(given[0]), bytes(given[1]), bytes(given[2]), Aligned([0; 1024])];
    let memory = operands.iter_mut().enumerate();
    let memory = memory
        .map(|(i, o)| Operand { bytes: Cell::from_mut(&mut o.0[..]).as_slice_of_cells(), initialised: i < 3 })
        .collect();
    let launch = Launch { entry: "kernel", grid: [1, 1, 1], threads: 32 };
    emulated::launch(&module, &launch, &mut Memory::new(memory), Order::Random(5)).unwrap_or_else(|f| panic!("{f}"));
    operands[3].0.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().expect("four bytes"))).collect()
}

/// Loads words `0 .. count` of a lane from an operand as `%<operand><word>`, of a type.
fn words(operand: &str, count: usize, ty: &str) -> String {
    let one = |i| {
        format!(
            "%i{operand}{i} = arith.constant {i} : index\n%j{operand}{i} = arith.addi %at, %i{operand}{i} : index\n\
             %w{operand}{i} = memref.load %{operand}[%j{operand}{i}] : memref<256xi32>\n\
             %{operand}{i} = arith.bitcast %w{operand}{i} : i32 to {ty}\n"
        )
    };
    (0..count).map(one).collect()
}

/// Writes the four fields of `%all` to the lane's words of `%out`.
fn results(ty: &str) -> String {
    let one = |i| {
        format!(
            "%r{i} = llvm.extractvalue %all[{i}] : !llvm.struct<({ty}, {ty}, {ty}, {ty})>\n\
             %v{i} = arith.bitcast %r{i} : {ty} to i32\n\
             %k{i} = arith.constant {i} : index\n%o{i} = arith.addi %at, %k{i} : index\n\
             memref.store %v{i}, %out[%o{i}] : memref<256xi32>\n"
        )
    };
    (0..4).map(one).collect()
}

/// Small whole numbers that differ along rows and columns: products and sums of them are exact in every type.
fn number(seed: usize, row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3 + seed) % 23) as f32 - 11.0
}

/// Multiplies matrices that lie as the tables say, and looks for the product where they say it is.
fn multiplies(instruction: &str, [a, b]: [&str; 2], place: impl Fn(&mut Registers, (usize, usize), f32)) {
    let [a, b, c] = [a, b, C].map(table);
    let mut registers = [[0; 256]; 3];
    for (matrix, (seed, table)) in [(1, &a), (2, &b), (3, &c)].into_iter().enumerate() {
        for (row, line) in table.iter().enumerate() {
            for (column, &at) in line.iter().enumerate() {
                let value = number(seed, row, column);
                match matrix {
                    2 => registers[2][8 * at.0 + at.1] = value.to_bits(),
                    _ => place(&mut registers[matrix], at, value),
                }
            }
        }
    }
    let body = [
        words("a", 4, "i32"),
        words("b", 2, "i32"),
        words("c", 4, "f32"),
        format!(
            "%all = llvm.call_intrinsic \"{instruction}\"(%a0, %a1, %a2, %a3, %b0, %b1, %c0, %c1, %c2, %c3) : \
             (i32, i32, i32, i32, i32, i32, f32, f32, f32, f32) -> !llvm.struct<(f32, f32, f32, f32)>\n"
        ),
        results("f32"),
    ];
    let out = run(&body.concat(), registers.each_ref());
    for (row, line) in c.iter().enumerate() {
        for (column, &(lane, register)) in line.iter().enumerate() {
            let products = (0..b.len()).map(|k| number(1, row, k) * number(2, k, column));
            let expected = products.sum::<f32>() + number(3, row, column);
            let found = f32::from_bits(out[8 * lane + register]);
            assert_eq!(found, expected, "{instruction}, row {row}, column {column}");
        }
    }
}

#[test]
fn a_product_of_tf32_lies_as_the_isa_says() {
    multiplies("llvm.nvvm.mma.m16n8k8.row.col.tf32", [A_TF32, B_TF32], |registers, (lane, register), value| {
        // The low bits are ignored.
        registers[8 * lane + register] = value.to_bits() | 0x1fff;
    });
}

#[test]
fn a_product_of_bf16_lies_as_the_isa_says() {
    multiplies("llvm.nvvm.mma.m16n8k16.row.col.bf16", [A_BF16, B_BF16], |registers, (lane, element), value| {
        registers[8 * lane + element / 2] |= value.to_bits() >> 16 << (16 * (element % 2));
    });
}

/// Four matrices of numbered elements, each row of which is a lane's four words in `%a`.
#[test]
fn matrices_are_loaded_as_the_isa_says() {
    let element = |matrix: usize, row: usize, column: usize| (100 * matrix + 10 * row + column) as u32;
    let mut rows = [0; 256];
    for lane in 0..32 {
        for column in 0..8 {
            rows[8 * lane + column / 2] |= element(lane / 8, lane % 8, column) << (16 * (column % 2));
        }
    }
    for (name, lies) in [("", LOADED), (".trans", LOADED_TRANSPOSED)] {
        // The rows stand in shared memory in another order than that of the lanes that name them.
        let body = [
            words("a", 4, "i32"),
            "%last = arith.constant 31 : index\n%place = arith.xori %t, %last : index\n\
             %four = arith.constant 4 : index\n%start = arith.muli %place, %four : index\n"
                .into(),
            (0..4)
                .map(|i| {
                    format!(
                        "%s{i} = arith.addi %start, %ia{i} : index\n\
                         memref.store %a{i}, %shared[%s{i}] : memref<128xi32, #gpu.address_space<workgroup>>\n"
                    )
                })
                .collect(),
            format!(
                "gpu.barrier\n\
                 %base = memref.extract_aligned_pointer_as_index %shared : \
                 memref<128xi32, #gpu.address_space<workgroup>> -> index\n\
                 %bytes = arith.muli %start, %four : index\n%address = arith.addi %base, %bytes : index\n\
                 %integer = arith.index_cast %address : index to i64\n\
                 %pointer = llvm.inttoptr %integer : i64 to !llvm.ptr<3>\n\
                 %all = llvm.call_intrinsic \"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{name}.b16\"(%pointer) : \
                 (!llvm.ptr<3>) -> !llvm.struct<(i32, i32, i32, i32)>\n"
            ),
            results("i32"),
        ];
        let out = run(&body.concat(), [&rows, &rows, &rows]);
        for (row, line) in table(lies).iter().enumerate() {
            for (column, &(lane, half)) in line.iter().enumerate() {
                for matrix in 0..4 {
                    let found = out[8 * lane + matrix] >> (16 * half) & 0xffff;
                    assert_eq!(found, element(matrix, row, column), "{name} matrix {matrix}, {row}, {column}");
                }
            }
        }
    }
}
