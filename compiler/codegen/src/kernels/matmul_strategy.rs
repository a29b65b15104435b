//! How a matmul becomes loops and vectors: transform-dialect text for one shape.
//!
//! The loops are those of [`model::blocking`]. A loop that would go round once folds away and takes the handles on what is inside with
//! it, so the text names only the loops that exist. [`crate::forward`] comes between the two sequences on tensors.

use super::strategy;
use model::blocking::{Blocking, KBlock};
use model::kernel::{Form, MatMul, Tiles};

/// The handle type.
const OP: &str = "!transform.any_op";

/// The text; `epilogue_operands` is the number of tensors that the epilogue's operation reads and writes.
pub fn strategy(matmul: &MatMul, tiles: &Tiles, blocking: &Blocking, epilogue_operands: usize) -> String {
    let mut script = Script::default();
    script.open("__transform_main");
    let (epilogue, products) = tile(&mut script, tiles, blocking);
    let packing = Packing {
        tiles,
        blocking,
        transpose_a: matmul.form != Form::TN,
        transpose_b: matmul.form == Form::NT,
        partial: has_partial_tiles(matmul, tiles, blocking),
    };
    for (product, block) in products.iter().zip(&blocking.k_blocks) {
        packing.apply(&mut script, product, block);
    }
    script.patterns(&["tensor.fold_tensor_empty"]);
    if packing.partial {
        let zeros = vec!["0.0 : f32"; epilogue_operands].join(", ");
        let (mr, nr) = (tiles.mr, tiles.nr);
        script.step(
            &["%whole", "%pads", "%copies"],
            &format!(
                "structured.pad {epilogue} pad_to_multiple_of [{mr}, {nr}] \
                 {{padding_values = [{zeros}], padding_dimensions = [0, 1], copy_back_op = \"none\"}}"
            ),
            1,
        );
    }
    script.clean(&["canonicalization"]);
    script.close();
    vectorise(&mut script);
    script.0 + strategy::lower()
}

/// Whether the size of some register tile is not known to be whole: one sticks out of C, or the last panel is smaller.
fn has_partial_tiles(matmul: &MatMul, tiles: &Tiles, blocking: &Blocking) -> bool {
    let uneven = |size: u32, tile: u32, panels: bool, panel: u32| size % tile != 0 || (panels && size % panel != 0);
    uneven(matmul.m, tiles.mr, blocking.row_panels, blocking.mc)
        || uneven(matmul.n, tiles.nr, blocking.column_panels, blocking.nc)
}

/// Transform-dialect text in the making.
#[derive(Default)]
struct Script(String);

impl Script {
    fn line(&mut self, line: &str) {
        self.0 += &format!("  {line}\n");
    }

    fn open(&mut self, name: &str) {
        self.0 += &format!("transform.named_sequence @{name}(%module: {OP}) {{\n");
        self.line(&format!("%func = transform.structured.match ops{{[\"func.func\"]}} in %module : ({OP}) -> {OP}"));
    }

    fn close(&mut self) {
        self.line("transform.yield");
        self.0 += "}\n";
    }

    /// `handle` becomes the operations named `op` that have the attributes.
    fn find(&mut self, handle: &str, op: &str, attributes: &str) {
        self.line(&format!(
            "{handle} = transform.structured.match ops{{[\"{op}\"]}}{attributes} in %func : ({OP}) -> {OP}"
        ));
    }

    /// `results = transform.<what>`, with the given number of handles as operands.
    fn step(&mut self, results: &[&str], what: &str, operands: usize) {
        let types = |n| vec![OP; n].join(", ");
        let (from, to) = (types(operands), types(results.len()));
        self.line(&format!("{} = transform.{what} : ({from}) -> ({to})", results.join(", ")));
    }

    fn patterns(&mut self, patterns: &[&str]) {
        let list = patterns.iter().map(|p| format!("transform.apply_patterns.{p}")).collect::<Vec<_>>().join(" ");
        self.line(&format!("transform.apply_patterns to %func {{ {list} }} : {OP}"));
    }

    fn clean(&mut self, patterns: &[&str]) {
        self.patterns(patterns);
        self.line(&format!("transform.apply_cse to %func : {OP}"));
    }
}

/// Tiles the epilogue, panels first, then register tiles, and pulls the products and the zeros they start from into the
/// innermost loop. Gives the handles of the epilogue's register tile and of the products'.
///
/// Until the packing is hoisted the zeros must stay a slice of a large empty tensor: that slice is what puts the loops over C before
/// the one over k in the order in which `hoist_pad` builds the packing loops. It indexes the packed tiles in the order of nesting, so
/// it would store and read them differently otherwise.
fn tile(script: &mut Script, tiles: &Tiles, blocking: &Blocking) -> (String, Vec<String>) {
    let mut epilogue = "%epilogue".to_string();
    script.find(&epilogue, "linalg.generic", "");
    let mut products = (0..blocking.k_blocks.len()).map(|i| format!("%product{i}")).collect::<Vec<_>>();
    for (i, product) in products.iter().enumerate() {
        script.find(product, "linalg.matmul", &format!(" attributes {{block = {i} : index}}"));
    }
    let levels = [
        ("panel", (blocking.row_panels, blocking.mc), (blocking.column_panels, blocking.nc)),
        ("tile", (blocking.row_tiles, tiles.mr), (blocking.column_tiles, tiles.nr)),
    ];
    for (level, rows, columns) in levels {
        let loops = [(columns.0, format!("%columns_{level}")), (rows.0, format!("%rows_{level}"))];
        let loops = loops.into_iter().filter(|l| l.0).map(|l| l.1).collect::<Vec<_>>();
        let Some(mut innermost) = loops.last().cloned() else { continue };
        let size = |(exists, size): (bool, u32)| if exists { size } else { 0 };
        let sizes = [size(rows), size(columns)];
        let what = format!("structured.tile_using_for {epilogue} tile_sizes {sizes:?} interchange = [1, 0]");
        epilogue = format!("%epilogue_{level}");
        let mut results = vec![epilogue.as_str()];
        results.extend(loops.iter().map(String::as_str));
        script.step(&results, &what, 1);
        let mut zeros = format!("%zeros_{level}");
        script.find(&zeros, "linalg.fill", "");
        for producer in products.iter_mut().chain([&mut zeros]) {
            let (fused, around) = (format!("{producer}_{level}"), format!("{producer}_around_{level}"));
            script.step(
                &[&fused, &around],
                &format!("structured.fuse_into_containing_op {producer} into {innermost}"),
                2,
            );
            (*producer, innermost) = (fused, around);
        }
        script.clean(&["canonicalization", "tensor.merge_consecutive_insert_extract_slice"]);
    }
    (epilogue, products)
}

/// How the operands of the products are packed.
struct Packing<'a> {
    tiles: &'a Tiles,
    blocking: &'a Blocking,
    /// Whether an operand lies in memory across the order of its packed tiles: k outermost.
    transpose_a: bool,
    transpose_b: bool,
    /// See [`has_partial_tiles`].
    partial: bool,
}

impl Packing<'_> {
    /// Cuts k of a product's register tile into steps, pads its operands to whole tiles and moves the padding out of the loops that
    /// don't change them: that packs them.
    fn apply(&self, script: &mut Script, product: &str, block: &KBlock) {
        let Tiles { mr, nr, kr, .. } = self.tiles;
        let mut step = product.to_string();
        if block.steps {
            step = format!("{product}_step");
            script.step(
                &[&step, &format!("{product}_steps")],
                &format!("structured.tile_using_for {product} tile_sizes [0, 0, {kr}]"),
                1,
            );
        }
        let whole = format!("{product}_whole");
        script.step(
            &[&whole, &format!("{product}_pads"), &format!("{product}_copies")],
            &format!(
                "structured.pad {step} pad_to_multiple_of [{mr}, {nr}, {kr}] {{padding_values = [0.0 : f32, 0.0 : f32, 0.0 : f32], \
                 padding_dimensions = [0, 1, 2], nofold_flags = [1, 1, 0], copy_back_op = \"none\"}}"
            ),
            1,
        );
        if block.steps && self.partial {
            self.hoist(script, &whole, 2, 1, false);
        }
        // No canonicalisation before the packing is hoisted: see `tile`.
        script.patterns(&["tensor.merge_consecutive_insert_extract_slice"]);
        let Blocking { row_panels, column_tiles, row_tiles, .. } = *self.blocking;
        let inner = [block.steps, row_tiles, column_tiles].map(usize::from).iter().sum::<usize>();
        if self.blocking.packs_a(block) {
            self.hoist(script, &whole, 0, inner, self.transpose_a);
        }
        if self.blocking.packs_b(block) {
            self.hoist(script, &whole, 1, inner + usize::from(row_panels), self.transpose_b);
        }
    }

    /// Moves the padding of an operand out of the innermost loops.
    fn hoist(&self, script: &mut Script, product: &str, operand: usize, loops: usize, transpose: bool) {
        let (pad, hoisted) = (format!("{product}_pad{operand}"), format!("{product}_hoisted{operand}"));
        let transpose = if transpose { ", transpose by [1, 0]" } else { "" };
        script.line(&format!("{pad} = transform.get_producer_of_operand {product}[{operand}] : ({OP}) -> {OP}"));
        script.step(&[&hoisted], &format!("structured.hoist_pad {pad} by {loops} loops{transpose}"), 1);
    }
}

/// Register tiles become vectors, C's lives in registers across the steps of k.
fn vectorise(script: &mut Script) {
    script.open("vectorise");
    let ops = [
        ("%zeros", "linalg.fill", ""),
        ("%transposes", "linalg.transpose", ""),
        ("%products", "linalg.matmul", " {create_named_contraction}"),
        ("%epilogue", "linalg.generic", ""),
    ];
    for (handle, op, how) in ops {
        script.find(handle, op, "");
        script.line(&format!("transform.structured.vectorize {handle}{how} : {OP}"));
    }
    script.patterns(&["canonicalization", "scf.for_loop_canonicalization", "linalg.pad_vectorization"]);
    script.clean(&[
        "vector.transfer_permutation_patterns",
        "tensor.fold_tensor_subset_ops_into_vector_transfers",
        "canonicalization",
    ]);
    script.find("%loops", "scf.for", "");
    script.line(&format!("transform.loop.hoist_loop_invariant_subsets %loops : {OP}"));
    script.clean(&["linalg.pad_vectorization", "vector.reduction_to_contract", "canonicalization"]);
    script.close();
}
