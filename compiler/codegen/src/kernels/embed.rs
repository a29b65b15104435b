//! Embedding, and the gradients of its two tables.

use super::sink::{self, SinkOperands};
use super::text::{Func, identity_map, tensor};
use super::{KernelSource, reduce, strategy};
use model::kernel::{Kernel, KernelOp, Sink, Table};
use model::target::CpuClass;

pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    match kernel.op {
        KernelOp::Embed { sequences, context, width, vocab } => {
            let sizes = [sequences, context, width, vocab].map(u64::from);
            KernelSource { linalg: forward(&kernel.name, sizes), strategy: row_strategy(sizes[2], cpu) }
        }
        KernelOp::EmbedGrad { table: Table::Token, sequences, context, width, vocab, sink } => {
            let (rows, width) = (u64::from(sequences) * u64::from(context), u64::from(width));
            KernelSource {
                linalg: token_gradient(&kernel.name, rows, width, vocab.into(), sink),
                strategy: row_strategy(width, cpu),
            }
        }
        // Sequences are rows of context * width columns.
        KernelOp::EmbedGrad { table: Table::Position, sequences, context, width, sink, .. } => {
            let columns = u64::from(context) * u64::from(width);
            reduce::column_sums(&kernel.name, sequences.into(), columns, sink, false, cpu)
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

/// x[s, c] = tok[tokens[s, c]] + pos[c]
fn forward(name: &str, [sequences, context, width, vocab]: [u64; 4]) -> String {
    let rows = sequences * context;
    let mut func = Func::new(name);
    func.input("tokens", &[rows], "i32");
    func.input("tok", &[vocab, width], "f32");
    func.input("pos", &[context, width], "f32");
    func.output("x", &[rows, width], "f32");
    let (x, row) = (tensor(&[rows, width], "f32"), tensor(&[width], "f32"));
    let map = identity_map(1);
    func.push(&format!(
        "%zero = arith.constant 0 : index\n\
         %one = arith.constant 1 : index\n\
         %sequences = arith.constant {sequences} : index\n\
         %context = arith.constant {context} : index\n\
         %done = scf.for %s = %zero to %sequences step %one iter_args(%outer = %x) -> ({x}) {{\n\
         %first = arith.muli %s, %context : index\n\
         %sequence = scf.for %c = %zero to %context step %one iter_args(%so_far = %outer) -> ({x}) {{\n\
         %at = arith.addi %first, %c : index\n\
         %token = tensor.extract %tokens[%at] : tensor<{rows}xi32>\n\
         %entry = arith.index_castui %token : i32 to index\n\
         %tok_row = tensor.extract_slice %tok[%entry, 0] [1, {width}] [1, 1] : {tok} to {row}\n\
         %pos_row = tensor.extract_slice %pos[%c, 0] [1, {width}] [1, 1] : {pos} to {row}\n\
         %x_row = tensor.extract_slice %so_far[%at, 0] [1, {width}] [1, 1] : {x} to {row}\n\
         %sum = linalg.generic {{indexing_maps = [{map}, {map}, {map}], iterator_types = [\"parallel\"]}} \
         ins(%tok_row, %pos_row : {row}, {row}) outs(%x_row : {row}) {{\n\
         ^bb0(%tok_el: f32, %pos_el: f32, %x_el: f32):\n\
         %v = arith.addf %tok_el, %pos_el : f32\n\
         linalg.yield %v : f32\n}} -> {row}\n\
         %with = tensor.insert_slice %sum into %so_far[%at, 0] [1, {width}] [1, 1] : {row} into {x}\n\
         scf.yield %with : {x}\n}}\n\
         scf.yield %sequence : {x}\n}}",
        tok = tensor(&[vocab, width], "f32"),
        pos = tensor(&[context, width], "f32"),
    ));
    func.result("x", "%done");
    func.finish()
}

/// For each table row: the sum of the rows of dx that used it, ascending from zero, then the sink. The rows of each token are in
/// a list that is made first, so the work is rows + vocab and not their product.
fn token_gradient(name: &str, rows: u64, width: u64, vocab: u64, sink: Sink) -> String {
    let mut func = Func::new(name);
    func.input("tokens", &[rows], "i32");
    func.input("dx", &[rows, width], "f32");
    let operands = SinkOperands::declare(&mut func, sink, &[vocab, width], false);
    func.push(&token_lists(rows, vocab));
    let table = tensor(&[vocab, width], "f32");
    let outputs = &operands.outputs;
    let list = |form: &dyn Fn(&str) -> String| outputs.iter().map(|o| form(o)).collect::<Vec<_>>().join(", ");
    let types = list(&|_| table.clone());
    let mut text = format!(
        "%sink_zero = arith.constant 0.0 : f32\n\
         %row_empty = tensor.empty() : {row}\n\
         %sunk:{n} = scf.for %entry = %zero to %vocab step %one iter_args({carried}) -> ({types}) {{\n",
        row = tensor(&[width], "f32"),
        n = outputs.len(),
        carried = list(&|o| format!("%{o}_so_far = %{o}")),
    );
    text += &row_sum(rows, width, vocab);
    text += &sink_row(sink, &operands, width, vocab);
    text += &format!("scf.yield {} : {types}\n}}", list(&|o| format!("%{o}_put")));
    func.push(&text);
    for (i, output) in outputs.iter().enumerate() {
        func.result(output, &format!("%sunk#{i}"));
    }
    func.finish()
}

/// `%heads` [vocab]: the first row of each token, `%nexts` [rows]: the next row of the same token; -1 ends a list.
fn token_lists(rows: u64, vocab: u64) -> String {
    let (per_token, per_row) = (tensor(&[vocab], "i32"), tensor(&[rows], "i32"));
    format!(
        "%zero = arith.constant 0 : index\n\
         %one = arith.constant 1 : index\n\
         %rows = arith.constant {rows} : index\n\
         %final_index = arith.constant {last} : index\n\
         %vocab = arith.constant {vocab} : index\n\
         %none = arith.constant -1 : i32\n\
         %heads_empty = tensor.empty() : {per_token}\n\
         %nexts_empty = tensor.empty() : {per_row}\n\
         %heads_start = scf.for %entry = %zero to %vocab step %one iter_args(%heads_so_far = %heads_empty) -> ({per_token}) {{\n\
         %heads_with = tensor.insert %none into %heads_so_far[%entry] : {per_token}\n\
         scf.yield %heads_with : {per_token}\n}}\n\
         %heads, %nexts = scf.for %back = %zero to %rows step %one \
         iter_args(%heads_so_far = %heads_start, %nexts_so_far = %nexts_empty) -> ({per_token}, {per_row}) {{\n\
         %at = arith.subi %final_index, %back : index\n\
         %token = tensor.extract %tokens[%at] : {per_row}\n\
         %entry = arith.index_castui %token : i32 to index\n\
         %after = tensor.extract %heads_so_far[%entry] : {per_token}\n\
         %nexts_with = tensor.insert %after into %nexts_so_far[%at] : {per_row}\n\
         %this = arith.index_cast %at : index to i32\n\
         %heads_with = tensor.insert %this into %heads_so_far[%entry] : {per_token}\n\
         scf.yield %heads_with, %nexts_with : {per_token}, {per_row}\n}}\n",
        last = rows - 1,
    )
}

/// `%part`: the sum over the list of token `%entry`.
fn row_sum(rows: u64, width: u64, vocab: u64) -> String {
    let (row, per_row) = (tensor(&[width], "f32"), tensor(&[rows], "i32"));
    let map = identity_map(1);
    format!(
        "%head = tensor.extract %heads[%entry] : tensor<{vocab}xi32>\n\
         %row_zeros = linalg.fill ins(%sink_zero : f32) outs(%row_empty : {row}) -> {row}\n\
         %end, %part = scf.while (%this = %head, %so_far = %row_zeros) : (i32, {row}) -> (i32, {row}) {{\n\
         %more = arith.cmpi ne, %this, %none : i32\n\
         scf.condition(%more) %this, %so_far : i32, {row}\n\
         }} do {{\n^bb0(%this: i32, %so_far: {row}):\n\
         %at = arith.index_castui %this : i32 to index\n\
         %dx_row = tensor.extract_slice %dx[%at, 0] [1, {width}] [1, 1] : tensor<{rows}x{width}xf32> to {row}\n\
         %with = linalg.generic {{indexing_maps = [{map}, {map}], iterator_types = [\"parallel\"]}} \
         ins(%dx_row : {row}) outs(%so_far : {row}) {{\n\
         ^bb0(%dx_el: f32, %sum_el: f32):\n\
         %longer = arith.addf %sum_el, %dx_el : f32\n\
         linalg.yield %longer : f32\n}} -> {row}\n\
         %next = tensor.extract %nexts[%at] : {per_row}\n\
         scf.yield %next, %with : i32, {row}\n}}\n"
    )
}

/// The sink of one row of the table; each output's new tensor is `%<output>_put`.
fn sink_row(kind: Sink, operands: &SinkOperands, width: u64, vocab: u64) -> String {
    let (inputs, outputs) = (&operands.inputs, &operands.outputs);
    let (table, row) = (tensor(&[vocab, width], "f32"), tensor(&[width], "f32"));
    let place = format!("[%entry, 0] [1, {width}] [1, 1]");
    let list = |form: &dyn Fn(&str) -> String| outputs.iter().map(|o| form(o)).collect::<Vec<_>>().join(", ");
    let mut text = String::new();
    for name in inputs {
        text += &format!("%{name}_row = tensor.extract_slice %{name}{place} : {table} to {row}\n");
    }
    for o in outputs {
        text += &format!("%{o}_row = tensor.extract_slice %{o}_so_far{place} : {table} to {row}\n");
    }
    let in_rows = inputs.iter().map(|name| format!(", %{name}_row")).collect::<String>();
    let in_args = inputs.iter().map(|name| format!("%{name}_el: f32, ")).collect::<String>();
    let in_types = vec![row.clone(); 1 + inputs.len()].join(", ");
    let maps = vec![identity_map(1); 1 + inputs.len() + outputs.len()].join(", ");
    let types = list(&|_| row.clone());
    text += &format!(
        "%rows_new:{n} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [\"parallel\"]}} ins(%part{in_rows} : {in_types}) outs({outs} : {types}) {{\n\
         ^bb0(%part_el: f32, {in_args}{args}):\n{body}linalg.yield {yields} : {elements}\n}} -> ({types})\n",
        n = outputs.len(),
        outs = list(&|o| format!("%{o}_row")),
        args = list(&|o| format!("%{o}_el: f32")),
        body = sink::body(kind, &["%part_el".into()]),
        yields = list(&sink::new_value),
        elements = list(&|_| "f32".into()),
    );
    for (i, o) in outputs.iter().enumerate() {
        text += &format!("%{o}_put = tensor.insert_slice %rows_new#{i} into %{o}_so_far{place} : {row} into {table}\n");
    }
    text
}

/// Every row vector by vector.
fn row_strategy(width: u64, cpu: CpuClass) -> String {
    let mut text = String::from(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {\n  \
         %f = transform.structured.match ops{[\"func.func\"]} in %m : (!transform.any_op) -> !transform.any_op\n  \
         %rows = transform.structured.match interface{LinalgOp} in %f : (!transform.any_op) -> !transform.any_op\n  \
         transform.foreach %rows : !transform.any_op {\n  ^bb0(%one: !transform.any_op):\n",
    );
    text += &strategy::blocks("%one", 0, width, cpu.lanes().into(), 1);
    text += "  }\n";
    text += strategy::CLEAN;
    text += strategy::VECTORISE_ALL;
    text += "  transform.yield\n}\n";
    text + strategy::lower()
}
