//! Kernels that work on whole rows: the loop over blocks of rows, the linalg of one block, and the strategy that both share.

use super::strategy;
use super::text::{Func, identity_map, tensor};
use model::target::CpuClass;
use std::fmt::Write;

/// Rows of a block. Their sums are independent, which hides the latency of additions.
pub const ROWS: u64 = 4;

/// How a tensor of a block lies over its rows and columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// [rows of the block, width]
    Wide,
    /// [rows of the block]
    PerRow,
    /// [width]
    PerColumn,
}

/// A tensor inside a block. `%<name>_el` is its element in a region.
#[derive(Clone)]
pub struct Value {
    name: String,
    kind: Kind,
    element: &'static str,
}

/// A per-column operand of the function.
pub fn column(name: &str) -> Value {
    Value { name: name.into(), kind: Kind::PerColumn, element: "f32" }
}

/// The linalg of one block of rows in the making.
pub struct Block {
    text: String,
    at: String,
    rows: u64,
    total: u64,
    width: u64,
    /// The newest tensor of each output, by operand name.
    outputs: Vec<(String, Kind, String)>,
}

impl Block {
    fn shape(&self, kind: Kind) -> Vec<u64> {
        match kind {
            Kind::Wide => vec![self.rows, self.width],
            Kind::PerRow => vec![self.rows],
            Kind::PerColumn => vec![self.width],
        }
    }

    fn whole(&self, kind: Kind) -> Vec<u64> {
        match kind {
            Kind::Wide => vec![self.total, self.width],
            Kind::PerRow => vec![self.total],
            Kind::PerColumn => vec![self.width],
        }
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn place(&self, kind: Kind) -> String {
        match kind {
            Kind::Wide => format!("[{}, 0] [{}, {}] [1, 1]", self.at, self.rows, self.width),
            Kind::PerRow => format!("[{}] [{}] [1]", self.at, self.rows),
            Kind::PerColumn => unreachable!("a column vector belongs to no row"),
        }
    }

    /// The block's rows of an operand; of an output, what it holds so far.
    pub fn slice(&mut self, name: &str, kind: Kind, element: &'static str) -> Value {
        let from = self.outputs.iter().find(|o| o.0 == name).map_or(format!("%{name}"), |o| o.2.clone());
        let (whole, part) = (tensor(&self.whole(kind), element), tensor(&self.shape(kind), element));
        let place = self.place(kind);
        self.line(&format!("%{name}_rows = tensor.extract_slice {from}{place} : {whole} to {part}"));
        Value { name: format!("{name}_rows"), kind, element }
    }

    /// The `reduction` over columns, from `init`, of `term`, which `body` computes from the elements `%<operand>_el`. The operands' names
    /// are those that were given to [`Block::slice`], or results'.
    pub fn reduce(
        &mut self,
        name: &str,
        reduction: (&str, &str),
        operands: &[&Value],
        term: &str,
        body: &str,
    ) -> Value {
        let (reduction, init) = reduction;
        let t = tensor(&[self.rows], "f32");
        self.line(&format!("%{name}_empty = tensor.empty() : {t}"));
        self.line(&format!("%{name}_init = linalg.fill ins({init} : f32) outs(%{name}_empty : {t}) -> {t}"));
        let body = format!("{body}%total = {reduction} %out_el, {term} : f32\nlinalg.yield %total : f32\n");
        let init = Value { name: format!("{name}_init"), kind: Kind::PerRow, element: "f32" };
        self.generic(name, operands, &init, "[\"parallel\", \"reduction\"]", &body)
    }

    /// The sum over columns of `term`.
    pub fn sum(&mut self, name: &str, operands: &[&Value], term: &str, body: &str) -> Value {
        self.reduce(name, ("arith.addf", "%zero"), operands, term, body)
    }

    /// The elementwise `result`, which `body` computes from the elements `%<operand>_el` and `%out_el`, the element of `into`. It takes
    /// the place of `into`: what is read from there must be read as `%out_el`.
    pub fn map(&mut self, name: &str, operands: &[&Value], into: &Value, result: &str, body: &str) -> Value {
        let iterators = if into.kind == Kind::Wide { "[\"parallel\", \"parallel\"]" } else { "[\"parallel\"]" };
        self.generic(name, operands, into, iterators, &format!("{body}linalg.yield {result} : f32\n"))
    }

    fn generic(&mut self, name: &str, operands: &[&Value], into: &Value, iterators: &str, body: &str) -> Value {
        let wide = iterators.contains(',');
        let map = |v: &Value| match (wide, v.kind) {
            (false, _) => identity_map(1),
            (true, Kind::Wide) => identity_map(2),
            (true, Kind::PerRow) => "affine_map<(d0, d1) -> (d0)>".into(),
            (true, Kind::PerColumn) => "affine_map<(d0, d1) -> (d1)>".into(),
        };
        let all = operands.iter().copied().chain([into]);
        let maps = all.map(map).collect::<Vec<_>>().join(", ");
        let list = |f: &dyn Fn(&Value) -> String| operands.iter().map(|v| f(v)).collect::<Vec<_>>().join(", ");
        let type_of = |v: &Value| tensor(&self.shape(v.kind), v.element);
        let into_type = type_of(into);
        let mut text = String::new();
        writeln!(
            text,
            "%{name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} ins({} : {}) outs(%{} : {into_type}) {{",
            list(&|v| format!("%{}", v.name)),
            list(&type_of),
            into.name,
        )
        .expect("writing to a String");
        let args = list(&|v| format!("%{}_el: {}", v.name.trim_end_matches("_rows"), v.element));
        writeln!(text, "^bb0({args}, %out_el: f32):\n{body}}} -> {into_type}").expect("writing to a String");
        self.text += &text;
        Value { name: name.into(), kind: into.kind, element: "f32" }
    }

    /// Puts a value into the block's rows of an output.
    pub fn store(&mut self, output: &str, value: &Value) {
        let at = self.outputs.iter().position(|o| o.0 == output).expect("an output that was declared");
        let (part, whole) = (tensor(&self.shape(value.kind), "f32"), tensor(&self.whole(value.kind), "f32"));
        let place = self.place(value.kind);
        let (into, new) = (self.outputs[at].2.clone(), format!("%{output}_put"));
        self.line(&format!("{new} = tensor.insert_slice %{} into {into}{place} : {part} into {whole}", value.name));
        self.outputs[at].2 = new;
    }
}

/// Writes the loop over blocks of [`ROWS`] rows and one block for the rows that are left. `outputs` are tensors `%<name>`, carried
/// through; gives their final values.
pub fn blocks(
    func: &mut Func,
    rows: u64,
    width: u64,
    outputs: &[(&str, Kind)],
    block: impl Fn(&mut Block),
) -> Vec<String> {
    let looped = rows - rows % ROWS;
    let whole = |kind: Kind| match kind {
        Kind::Wide => tensor(&[rows, width], "f32"),
        _ => tensor(&[rows], "f32"),
    };
    let types = outputs.iter().map(|o| whole(o.1)).collect::<Vec<_>>().join(", ");
    let make = |at: &str, count: u64, current: Vec<String>| {
        let outputs = outputs.iter().zip(current).map(|(o, c)| (o.0.to_string(), o.1, c)).collect();
        let mut b = Block { text: String::new(), at: at.into(), rows: count, total: rows, width, outputs };
        block(&mut b);
        b
    };
    let mut current: Vec<String> = outputs.iter().map(|o| format!("%{}", o.0)).collect();
    if looped > 0 {
        let b = make("%row", ROWS, outputs.iter().map(|o| format!("%{}_so_far", o.0)).collect());
        let carried = outputs.iter().map(|o| format!("%{0}_so_far = %{0}", o.0)).collect::<Vec<_>>().join(", ");
        let yields = b.outputs.iter().map(|o| o.2.clone()).collect::<Vec<_>>().join(", ");
        func.push(&format!(
            "%first_row = arith.constant 0 : index\n%end_row = arith.constant {looped} : index\n%row_step = arith.constant {ROWS} : index\n\
             %blocks:{n} = scf.for %row = %first_row to %end_row step %row_step iter_args({carried}) -> ({types}) {{\n\
             {text}scf.yield {yields} : {types}\n}}",
            n = outputs.len(),
            text = b.text,
        ));
        current = (0..outputs.len()).map(|i| format!("%blocks#{i}")).collect();
    }
    if looped < rows {
        func.push(&format!("%last_row = arith.constant {looped} : index"));
        let b = make("%last_row", rows - looped, current);
        func.push(&b.text);
        current = b.outputs.into_iter().map(|o| o.2).collect();
    }
    current
}

/// Sums by lanes of one vector per row, then across the lanes; everything else vector by vector.
pub fn strategy(width: u64, cpu: CpuClass) -> String {
    let lanes = u64::from(cpu.lanes());
    let matched = |name: &str, kinds: &str| {
        format!(
            "  %{name} = transform.structured.match ops{{[\"linalg.generic\"]}} attributes {{iterator_types = [{kinds}]}} in %f : (!transform.any_op) -> !transform.any_op\n  \
             transform.foreach %{name} : !transform.any_op {{\n  ^bb0(%one: !transform.any_op):\n"
        )
    };
    let mut text = String::from(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {\n  \
         %f = transform.structured.match ops{[\"func.func\"]} in %m : (!transform.any_op) -> !transform.any_op\n",
    );
    if width > lanes {
        // First the elementwise ones: sums by lanes become elementwise too.
        text += &matched("maps", "#linalg.iterator_type<parallel>, #linalg.iterator_type<parallel>");
        text += &strategy::blocks("%one", 1, width, lanes, 2);
        text += "  }\n";
        text += &matched("sums", "#linalg.iterator_type<parallel>, #linalg.iterator_type<reduction>");
        let whole = width - width % lanes;
        let mut part = "%one";
        if whole < width {
            writeln!(
                text,
                "    %parts = transform.structured.split %one after {whole} {{dimension = 1}} : !transform.any_op\n    \
                 %whole, %rest = transform.split_handle %parts : (!transform.any_op) -> (!transform.any_op, !transform.any_op)"
            )
            .expect("writing to a String");
            part = "%whole";
        }
        if whole > lanes {
            writeln!(
                text,
                "    %start, %lanes, %across, %over = transform.structured.tile_reduction_using_for {part} by tile_sizes = [0, {lanes}] \
                 : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op, !transform.any_op)"
            )
            .expect("writing to a String");
        }
        text += "  }\n";
    }
    text += strategy::CLEAN;
    text += strategy::VECTORISE_ALL;
    text += "  transform.yield\n}\n";
    text + strategy::lower()
}
