//! The model's sizes, and which sizes this compiler takes.

use dsl::diag::Diagnostic;
use dsl::spec::{At, Dtype, Model};

/// Sizes of the reference GPT and of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Blocks.
    pub layers: u32,
    pub width: u32,
    pub heads: u32,
    /// Tokens of a sequence.
    pub context: u32,
    pub vocab: u32,
    /// Sequences of a micro-batch.
    pub microbatch: u32,
    /// Of activations and of the weights that matrix products read.
    pub dtype: Dtype,
    /// The head multiplies by the token embedding's table.
    pub tied: bool,
}

/// Tokens of a micro-batch; keeps every dimension in `u32`.
const ROWS_MAX: u64 = 1 << 24;
/// Operations of one layer's forward pass on a micro-batch; keeps sums and bytes in `u64`.
const LAYER_FLOPS_MAX: u128 = 1 << 58;

impl Dims {
    pub fn new(model: &Model, microbatch: u32) -> Dims {
        Dims {
            layers: model.layers.value,
            width: model.width.value,
            heads: model.heads.value,
            context: model.context.value,
            vocab: model.vocab.value,
            microbatch,
            dtype: model.variant.dtype,
            tied: model.variant.tied,
        }
    }

    /// Tokens of a micro-batch.
    pub fn rows(&self) -> u32 {
        self.microbatch * self.context
    }

    /// Columns of the MLP's hidden layer.
    pub fn hidden(&self) -> u32 {
        4 * self.width
    }
}

/// `P0401` when a micro-batch is too large for one kernel. Without it every other function of this crate works on these sizes; the
/// resolver has bounded each of them, and made sure that heads divide the width.
pub fn check_sizes(model: &Model, microbatch: &At<u32>) -> Vec<Diagnostic> {
    let dims = Dims::new(model, microbatch.value);
    let context = u64::from(dims.context);
    let by_work = u64::try_from(LAYER_FLOPS_MAX / token_flops_max(&dims)).unwrap_or(u64::MAX);
    let rows_max = ROWS_MAX.min(by_work);
    let rows = u64::from(dims.microbatch) * context;
    if rows <= rows_max {
        return Vec::new();
    }
    let message = format!("a micro-batch of {rows} tokens is too large");
    let error = Diagnostic::error("P0401", microbatch.span.clone(), message)
        .and_at(model.context.span.clone(), "tokens of a sequence")
        .note(format!("a kernel of this model takes at most {rows_max} tokens"));
    vec![error.help(match rows_max / context {
        0 => format!("use a context of at most {rows_max}"),
        most => format!("the largest that fits is microbatch = {most}"),
    })]
}

/// Operations per token of the layer that has most.
fn token_flops_max(dims: &Dims) -> u128 {
    let [width, context, vocab] = [dims.width, dims.context, dims.vocab].map(u128::from);
    (24 * width * width + 2 * width * (context + 1)).max(2 * width * vocab)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(context: u32, width: u32) -> Model {
        let at = |value| At { value, span: 0..0 };
        let (layers, heads, vocab) = (at(2), at(1), at(256));
        Model::reference([layers, at(width), heads, at(context), vocab], 0..0)
    }

    fn check(context: u32, width: u32, microbatch: u32) -> Vec<Diagnostic> {
        check_sizes(&model(context, width), &At { value: microbatch, span: 0..0 })
    }

    #[test]
    fn the_help_names_the_largest_microbatch_that_passes() {
        assert_eq!(check(1000, 256, 1 << 20)[0].help.as_deref(), Some("the largest that fits is microbatch = 16777"));
        assert!(check(1000, 256, 16777).is_empty());
        assert_eq!(check(1000, 256, 16778).len(), 1);
    }

    #[test]
    fn the_largest_sizes_that_the_language_takes_do_not_overflow() {
        assert_eq!(check(1 << 22, 1 << 17, u32::MAX).len(), 1);
        assert!(check(1 << 10, 1 << 17, 256).is_empty());
    }
}
