//! Embedding, and the gradients of its two tables.

use super::reduce;
use super::sink::SinkBuffers;
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Buffer, Code, Operands, WARP};
use model::kernel::{Kernel, KernelOp, Sink, Table};

const THREADS: u32 = 128;

pub fn write(kernel: &Kernel) -> DeviceKernel {
    match kernel.op {
        KernelOp::Embed { sequences, context, width, vocab } => {
            forward(kernel, [sequences, context, width, vocab].map(u64::from))
        }
        KernelOp::EmbedGrad { table: Table::Token, sequences, context, width, vocab, sink } => {
            token_gradient(kernel, u64::from(sequences) * u64::from(context), width.into(), vocab.into(), sink)
        }
        // Sequences are rows of context * width columns.
        KernelOp::EmbedGrad { table: Table::Position, sequences, context, width, sink, .. } => {
            let columns = u64::from(context) * u64::from(width);
            reduce::column_sums(kernel, sequences.into(), columns, sink, false)
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

/// x[s, c] = tok[tokens[s, c]] + pos[c]: a thread per element.
fn forward(kernel: &Kernel, [sequences, context, width, vocab]: [u64; 4]) -> DeviceKernel {
    let rows = sequences * context;
    let mut operands = Operands::of(kernel);
    let tokens = operands.add("tokens", &[rows], "i32");
    let (tok, pos) = (operands.f32("tok", &[vocab, width]), operands.f32("pos", &[context, width]));
    let x = operands.activation("x", &[rows, width]);
    let mut device = DeviceKernel::new(kernel);
    device.launch([(rows * width).div_ceil(THREADS.into()), 1, 1], THREADS, &operands, |code| {
        let at = code.global_thread(THREADS);
        let exists = code.below_const(&at, rows * width);
        code.when(&exists, |code| {
            let (row, column) = code.split(&at, width);
            let (_, position) = code.split(&row, context);
            let token = code.load_index(&tokens, &[&row]);
            let (tok, pos) = (code.load(&tok, &[&token, &column]), code.load(&pos, &[&position, &column]));
            let sum = code.add(&tok, &pos);
            code.store(&sum, &x, &[&row, &column]);
        });
    });
    device
}

/// A row of blocks per entry of the table, a thread per column: the rows of dx that used the entry are summed, ascending from zero.
fn token_gradient(kernel: &Kernel, rows: u64, width: u64, vocab: u64, sink: Sink) -> DeviceKernel {
    let mut operands = Operands::of(kernel);
    let tokens = operands.add("tokens", &[rows], "i32");
    let dx = operands.activation("dx", &[rows, width]);
    let sink = SinkBuffers::new(&mut operands, sink, &[vocab, width], false);
    let mut device = DeviceKernel::new(kernel);
    device.launch([vocab, width.div_ceil(THREADS.into()), 1], THREADS, &operands, |code| {
        sink.prepare(code);
        let (entry, thread, block) = (code.block("x"), code.thread(), code.block("y"));
        let column = code.times_plus(&block, THREADS.into(), &thread);
        let exists = code.below_const(&column, width);
        let (_, lane) = code.split(&thread, WARP.into());
        let (zero, end, step) = (code.index(0), code.index(rows), code.index(WARP.into()));
        let start = code.constant(0.0);
        let sum = code.repeat((&zero, &end, &step), &[(start, "f32")], |code, first, so_far| {
            let found = users(code, &tokens, rows, (first, &lane), &entry);
            vec![add_rows(code, &found, first, &so_far[0], |code, row, so_far| {
                code.when_or(&exists, (so_far, "f32"), |code| {
                    let dx = code.load(&dx, &[row, &column]);
                    code.add(so_far, &dx)
                })
            })]
        });
        code.when(&exists, |code| sink.take(code, &[&entry, &column], &sum));
    });
    device
}

/// Which of the 32 rows from `first` hold the token `entry`, as bits: each lane of the warp looks at one row.
fn users(code: &mut Code, tokens: &Buffer, rows: u64, (first, lane): (&str, &str), entry: &str) -> String {
    let row = code.plus(first, lane);
    let exists = code.below_const(&row, rows);
    let no = code.op("arith.constant false");
    let hit = code.when_or(&exists, (&no, "i1"), |code| {
        let token = code.load_index(tokens, &[&row]);
        code.op(&format!("arith.cmpi eq, {token}, {entry} : index"))
    });
    let all = code.op("arith.constant -1 : i32");
    code.op(&format!("nvvm.vote.sync ballot {all}, {hit} -> i32"))
}

/// Adds the rows whose bits are set, lowest first.
fn add_rows(
    code: &mut Code,
    bits: &str,
    first: &str,
    start: &str,
    add: impl FnOnce(&mut Code, &str, &str) -> String,
) -> String {
    let (left, sum) = (code.fresh(), code.fresh());
    let result = code.values(2, &format!("scf.while ({left} = {bits}, {sum} = {start}) : (i32, f32) -> (i32, f32) {{"));
    let none = code.op("arith.constant 0 : i32");
    let more = code.op(&format!("arith.cmpi ne, {left}, {none} : i32"));
    let (left_in, sum_in) = (code.fresh(), code.fresh());
    code.line(&format!(
        "scf.condition({more}) {left}, {sum} : i32, f32\n}} do {{\n^bb0({left_in}: i32, {sum_in}: f32):"
    ));
    let bit = code.op(&format!("\"llvm.intr.cttz\"({left_in}) <{{is_zero_poison = false}}> : (i32) -> i32"));
    let bit = code.op(&format!("arith.index_castui {bit} : i32 to index"));
    let row = code.plus(first, &bit);
    let next = add(code, &row, &sum_in);
    let one = code.op("arith.constant 1 : i32");
    let below = code.op(&format!("arith.subi {left_in}, {one} : i32"));
    let rest = code.op(&format!("arith.andi {left_in}, {below} : i32"));
    code.line(&format!("scf.yield {rest}, {next} : i32, f32\n}}"));
    format!("{result}#1")
}
