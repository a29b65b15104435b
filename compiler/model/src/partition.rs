//! Which layers each stage holds.

use crate::cost::LayerWork;
use crate::dims::Dims;
use dsl::diag::Diagnostic;
use dsl::spec::{At, Layer, Partition, Recompute};

/// The layers of each stage, in forward order; every stage has at least one. `balanced` is by arithmetic work: see [`partition_by`].
///
/// # Errors
/// As [`partition_by`].
pub fn partition(dims: &Dims, partition: &At<Partition>, stages: u32) -> Result<Vec<Vec<Layer>>, Box<Diagnostic>> {
    let work = LayerWork::new(dims, Recompute::None);
    let rows = u64::from(dims.rows());
    partition_by(dims.layers, partition, stages, &|layer| work.of(layer).total() / rows)
}

/// The layers of each stage of a model with `blocks` blocks.
///
/// `balanced` minimises the weight of the stage that has most, then the sum of the squares (so the rest is even too), then
/// puts fewer layers into the earlier stages (they hold more micro-batches in flight).
///
/// An explicit partition is a cut of the model: the resolver made sure.
///
/// # Errors
/// `P0222`: more stages than layers; `P0221`: an explicit partition with another number of stages. With a stage for each rank the
/// resolver has found both already.
pub fn partition_by(
    blocks: u32,
    partition: &At<Partition>,
    stages: u32,
    weight: &dyn Fn(Layer) -> u64,
) -> Result<Vec<Vec<Layer>>, Box<Diagnostic>> {
    match &partition.value {
        Partition::Balanced => balanced(blocks, partition, stages, weight),
        Partition::Explicit(layers) if layers.len() == stages as usize => Ok(layers.clone()),
        Partition::Explicit(layers) => {
            let message = format!("the partition has {} stages, the schedule places {stages}", layers.len());
            let fix = format!("write {stages} stages, or `partition = balanced`");
            Err(Box::new(Diagnostic::error("P0221", partition.span.clone(), message).help(fix)))
        }
    }
}

/// All layers, in forward order.
fn all(blocks: u32) -> Vec<Layer> {
    let blocks = (0..blocks).map(Layer::Block);
    std::iter::once(Layer::Embed).chain(blocks).chain([Layer::Head]).collect()
}

fn balanced(
    blocks: u32,
    at: &At<Partition>,
    stages: u32,
    weight: &dyn Fn(Layer) -> u64,
) -> Result<Vec<Vec<Layer>>, Box<Diagnostic>> {
    let layers = all(blocks);
    if stages as usize > layers.len() || stages == 0 {
        let count = layers.len();
        return Err(Box::new(
            Diagnostic::error("P0222", at.span.clone(), format!("{count} layers cannot fill {stages} stages"))
                .note(format!("the layers are the embedding, {blocks} blocks and the head"))
                .help(format!("use at most {count} stages, or layers >= {}", stages.saturating_sub(2))),
        ));
    }
    let weights: Vec<u64> = layers.iter().map(|&l| weight(l)).collect();
    let ends = cut(&weights, stages as usize);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    Ok(starts.zip(&ends).map(|(from, &to)| layers[from..to].to_vec()).collect())
}

/// Ends (exclusive) of `parts` consecutive parts of `weights` by the rule of [`partition`]; `1 <= parts <= weights.len()`.
pub fn cut(weights: &[u64], parts: usize) -> Vec<usize> {
    let sums: Vec<u128> = std::iter::once(0)
        .chain(weights.iter().scan(0u128, |sum, &w| {
            *sum += u128::from(w);
            Some(*sum)
        }))
        .collect();
    let limit = smallest_limit(weights, parts);
    let mut cutter = Cutter { sums: &sums, limit, best: Vec::new(), from: Vec::new() };
    let n = weights.len();
    // best[i]: least sum of squares of the first i layers in the parts so far.
    cutter.best = (0..=n).map(|i| if i == 0 { Some(0) } else { None }).collect();
    let mut froms = Vec::with_capacity(parts);
    for _ in 0..parts {
        let before = std::mem::replace(&mut cutter.best, vec![None; n + 1]);
        cutter.from = vec![0; n + 1];
        cutter.extend(&before, 1, n, 0, n - 1);
        froms.push(std::mem::take(&mut cutter.from));
    }
    let mut ends = vec![n];
    for from in froms.iter().skip(1).rev() {
        ends.push(from[*ends.last().expect("it starts with one")]);
    }
    ends.reverse();
    ends
}

/// The least possible work of the largest part.
fn smallest_limit(weights: &[u64], parts: usize) -> u128 {
    let fits = |limit: u128| {
        let (mut count, mut sum) = (1, 0u128);
        for &w in weights {
            if sum + u128::from(w) > limit {
                count += 1;
                sum = 0;
            }
            sum += u128::from(w);
        }
        count <= parts
    };
    let mut low = weights.iter().copied().max().map_or(0, u128::from);
    let mut high = weights.iter().map(|&w| u128::from(w)).sum();
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

/// Divide and conquer over the last cut: it moves right as the end does, because squares are convex.
struct Cutter<'a> {
    sums: &'a [u128],
    limit: u128,
    best: Vec<Option<u128>>,
    /// Start of the last part, for each end.
    from: Vec<usize>,
}

impl Cutter<'_> {
    /// Finds `best` and `from` for the ends `low..=high`, whose last cuts lie in `from_low..=from_high`.
    fn extend(&mut self, before: &[Option<u128>], low: usize, high: usize, from_low: usize, from_high: usize) {
        if low > high {
            return;
        }
        let end = low + (high - low) / 2;
        let mut at = None;
        let starts = before.iter().copied().enumerate().take(from_high.min(end - 1) + 1).skip(from_low);
        for (from, so_far) in starts {
            let work = self.sums[end] - self.sums[from];
            let Some(so_far) = so_far.filter(|_| work <= self.limit) else { continue };
            let sum = so_far + work * work;
            if self.best[end].is_none_or(|b| sum < b) {
                self.best[end] = Some(sum);
                at = Some(from);
            }
        }
        self.from[end] = at.unwrap_or(0);
        // An end that cannot be reached says nothing about its neighbours' cuts.
        let (left, right) = at.map_or((from_high, from_low), |from| (from, from));
        self.extend(before, low, end - 1, from_low, left);
        self.extend(before, end + 1, high, right, from_high);
    }
}
