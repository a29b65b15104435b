//! Strategy text that several families share.

use model::target::CpuClass;

/// The usual `@lower`: multi-dimensional vectors become one-dimensional ones, masks become masked loads and stores.
pub fn lower() -> &'static str {
    r#"transform.named_sequence @lower(%m: !transform.any_op) {
  %f = transform.structured.match ops{["func.func"]} in %m : (!transform.any_op) -> !transform.any_op
  transform.apply_patterns to %f {
    transform.apply_patterns.vector.lower_masked_transfers
    transform.apply_patterns.vector.transfer_permutation_patterns
    transform.apply_patterns.vector.cast_away_vector_leading_one_dim
    transform.apply_patterns.canonicalization } : !transform.any_op
  transform.apply_patterns to %f {
    transform.apply_patterns.vector.lower_multi_reduction lowering_strategy = "innerreduction"
    transform.apply_patterns.vector.lower_contraction lowering_strategy = "outerproduct"
    transform.apply_patterns.vector.lower_outerproduct
    transform.apply_patterns.vector.lower_broadcast
    transform.apply_patterns.vector.lower_transpose lowering_strategy = "shuffle_1d"
  } : !transform.any_op
  transform.apply_patterns to %f {
    transform.apply_patterns.vector.transfer_to_scf max_transfer_rank = 1 full_unroll = true
    transform.apply_patterns.vector.lower_transfer max_transfer_rank = 1
    transform.apply_patterns.vector.lower_shape_cast
  } : !transform.any_op
  transform.yield
}
"#
}

/// As [`lower`], for reductions that go between vectors and not inside one, and for transposes of whole blocks of `lanes`.
pub fn lower_columns(lanes: u64) -> String {
    let text = lower().replace("innerreduction", "innerparallel");
    if lanes == 16 { text.replace("shuffle_1d", "shuffle_16x16") } else { text }
}

/// One elementwise `linalg.generic` over `len` elements: a loop of whole vectors, then one masked vector for the rest.
pub fn elementwise_1d(len: u64, cpu: CpuClass) -> String {
    let lanes = u64::from(cpu.lanes());
    let whole = len - len % lanes;
    let (loop_, rest) = ("%whole", "%rest");
    let split = match (whole, len - whole) {
        (0, _) => format!(
            "  {rest} = transform.structured.match ops{{[\"linalg.generic\"]}} in %f : (!transform.any_op) -> !transform.any_op\n"
        ),
        (_, 0) => format!(
            "  {loop_} = transform.structured.match ops{{[\"linalg.generic\"]}} in %f : (!transform.any_op) -> !transform.any_op\n"
        ),
        _ => format!(
            "  %all = transform.structured.match ops{{[\"linalg.generic\"]}} in %f : (!transform.any_op) -> !transform.any_op\n  \
             %parts = transform.structured.split %all after {whole} {{dimension = 0}} : !transform.any_op\n  \
             {loop_}, {rest} = transform.split_handle %parts : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n"
        ),
    };
    let mut text = format!(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {{\n  \
         %f = transform.structured.match ops{{[\"func.func\"]}} in %m : (!transform.any_op) -> !transform.any_op\n{split}"
    );
    if whole > 0 {
        text += &format!(
            "  %tile, %loop = transform.structured.tile_using_for {loop_} tile_sizes [{lanes}] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n  \
             transform.structured.vectorize %tile : !transform.any_op\n"
        );
    }
    if whole < len {
        text += &format!("  transform.structured.vectorize {rest} vector_sizes [{lanes}] : !transform.any_op\n");
    }
    text += "  transform.apply_patterns to %f {\n    \
             transform.apply_patterns.tensor.fold_tensor_subset_ops_into_vector_transfers\n    \
             transform.apply_patterns.canonicalization } : !transform.any_op\n  \
             transform.apply_cse to %f : !transform.any_op\n  transform.yield\n}\n";
    text + lower()
}

/// Folds what tiling and splitting left behind, so that shapes are static again.
pub const CLEAN: &str = "  transform.apply_patterns to %f {\n    \
     transform.apply_patterns.canonicalization\n    \
     transform.apply_patterns.scf.for_loop_canonicalization } : !transform.any_op\n  \
     transform.apply_cse to %f : !transform.any_op\n";

/// Vectorises every linalg operation (all of static shape) whole and keeps what a loop carries in registers.
pub const VECTORISE_ALL: &str = "  %ops = transform.structured.match interface{LinalgOp} in %f : (!transform.any_op) -> !transform.any_op\n  \
     transform.foreach %ops : !transform.any_op {\n  ^bb0(%op: !transform.any_op):\n    \
     transform.structured.vectorize %op : !transform.any_op\n  }\n  \
     transform.apply_patterns to %f {\n    \
     transform.apply_patterns.vector.transfer_permutation_patterns\n    \
     transform.apply_patterns.tensor.fold_tensor_subset_ops_into_vector_transfers\n    \
     transform.apply_patterns.canonicalization } : !transform.any_op\n  \
     transform.apply_cse to %f : !transform.any_op\n  \
     %loops = transform.structured.match ops{[\"scf.for\"]} in %f : (!transform.any_op) -> !transform.any_op\n  \
     transform.loop.hoist_loop_invariant_subsets %loops : !transform.any_op\n  \
     transform.apply_patterns to %f { transform.apply_patterns.canonicalization } : !transform.any_op\n  \
     transform.apply_cse to %f : !transform.any_op\n";

/// Tiles `handle` over dimension `dim` (of `rank`), which has `extent` elements, by `block`; the elements that fill no whole block
/// become an operation of their own. Every operation that results has a static shape after [`CLEAN`].
pub fn blocks(handle: &str, dim: usize, extent: u64, block: u64, rank: usize) -> String {
    let whole = extent - extent % block;
    let (whole_part, mut text) = match (whole, extent - whole) {
        (0, _) => return String::new(),
        (_, 0) => (handle.to_string(), String::new()),
        _ => (
            format!("{handle}_whole"),
            format!(
                "  {handle}_parts = transform.structured.split {handle} after {whole} {{dimension = {dim}}} : !transform.any_op\n  \
                 {handle}_whole, {handle}_rest = transform.split_handle {handle}_parts : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n"
            ),
        ),
    };
    let sizes = (0..rank).map(|d| if d == dim { block.to_string() } else { "0".into() }).collect::<Vec<_>>().join(", ");
    text += &format!(
        "  {handle}_tile, {handle}_loop = transform.structured.tile_using_for {whole_part} tile_sizes [{sizes}] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n"
    );
    text
}

/// Vectorises `handle`, vector by vector along its last dimension of `extent`, row by row along those of `outer`.
pub fn vectors(handle: &str, outer: &[u64], extent: u64, lanes: u64) -> String {
    let op = "!transform.any_op";
    let whole = extent - extent % lanes;
    let mut text = String::new();
    let mut parts = vec![(handle.to_string(), if whole > lanes { lanes } else { 0 })];
    if whole > 0 && whole < extent {
        text += &format!(
            "  {handle}_parts = transform.structured.split {handle} after {whole} {{dimension = {dim}}} : {op}\n  \
             {handle}_whole, {handle}_rest = transform.split_handle {handle}_parts : ({op}) -> ({op}, {op})\n",
            dim = outer.len(),
        );
        parts = vec![(format!("{handle}_whole"), parts[0].1), (format!("{handle}_rest"), 0)];
    }
    for (part, size) in parts {
        let sizes: Vec<_> = outer.iter().map(|n| u64::from(*n > 1)).chain([size]).collect();
        let loops = sizes.iter().filter(|s| **s > 0).count();
        let mut tile = part.clone();
        if loops > 0 {
            tile = format!("{part}_tile");
            let list = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            text += &format!(
                "  {tile}, {part}_loops:{loops} = transform.structured.tile_using_for {part} tile_sizes [{list}] : ({op}) -> ({types})\n",
                types = vec![op; loops + 1].join(", "),
            );
        }
        text += &format!("  transform.structured.vectorize {tile} : {op}\n");
    }
    text
}
