//! The model's sizes, and which sizes this compiler takes.

use dsl::diag::{Diagnostic, Span};
use dsl::spec::{At, Model};

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
}

/// Largest values; with them every dimension fits `u32`, and the bytes and operations of a layer fit `u64`.
const LAYERS_MAX: u32 = 4096;
const WIDTH_MAX: u32 = 1 << 16;
const CONTEXT_MAX: u32 = 1 << 20;
const VOCAB_MAX: u32 = 1 << 20;
const ROWS_MAX: u64 = 1 << 24;

impl Dims {
    pub fn new(model: &Model, microbatch: u32) -> Dims {
        Dims {
            layers: model.layers.value,
            width: model.width.value,
            heads: model.heads.value,
            context: model.context.value,
            vocab: model.vocab.value,
            microbatch,
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

/// What is wrong with a model's sizes: `P0401` (a size out of range), `P0402` (heads that do not divide the width). With no
/// diagnostic every other function of this crate works on these sizes.
pub fn check_sizes(model: &Model, microbatch: &At<u32>) -> Vec<Diagnostic> {
    let bounds = [
        ("layers", &model.layers, LAYERS_MAX),
        ("width", &model.width, WIDTH_MAX),
        ("heads", &model.heads, WIDTH_MAX),
        ("context", &model.context, CONTEXT_MAX),
        ("vocab", &model.vocab, VOCAB_MAX),
        ("microbatch", microbatch, ROWS_MAX as u32),
    ];
    let mut found: Vec<Diagnostic> =
        bounds.into_iter().filter_map(|(name, at, max)| out_of_range(name, at.value, max, &at.span)).collect();
    let rows = u64::from(microbatch.value) * u64::from(model.context.value);
    if found.is_empty() && rows > ROWS_MAX {
        found.push(
            Diagnostic::error("P0401", microbatch.span.clone(), format!("a micro-batch of {rows} tokens is too large"))
                .note(format!("microbatch x context may be at most {ROWS_MAX}"))
                .help(format!(
                    "at context = {} use microbatch <= {}",
                    model.context.value,
                    ROWS_MAX / u64::from(model.context.value)
                )),
        );
    }
    let (width, heads) = (model.width.value, model.heads.value);
    if found.is_empty() && width % heads != 0 {
        found.push(
            Diagnostic::error(
                "P0402",
                model.heads.span.clone(),
                format!("{heads} heads do not divide the width {width}"),
            )
            .and_at(model.width.span.clone(), "the width")
            .help(format!("the nearest count that does is heads = {}", nearest_divisor(width, heads))),
        );
    }
    found
}

fn out_of_range(name: &str, value: u32, max: u32, span: &Span) -> Option<Diagnostic> {
    (value == 0 || value > max).then(|| {
        Diagnostic::error("P0401", span.clone(), format!("{name} = {value} is out of range"))
            .help(format!("give {name} a value from 1 to {max}"))
    })
}

/// The divisor of `n` nearest to `to`, the smaller of two equally near.
fn nearest_divisor(n: u32, to: u32) -> u32 {
    (1..=n).filter(|d| n % d == 0).min_by_key(|d| d.abs_diff(to)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_divisor_prefers_the_smaller() {
        assert_eq!(nearest_divisor(256, 7), 8);
        assert_eq!(nearest_divisor(12, 5), 4);
        assert_eq!(nearest_divisor(7, 4), 1);
    }
}
