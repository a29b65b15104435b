//! Balanced partitions against all possible ones.

use dsl::spec::{At, Dtype, Layer, Partition};
use model::dims::Dims;
use model::partition::{cut, partition};
use proptest::prelude::*;

/// Every way to cut `n` layers into `parts`, as ends.
fn all_cuts(n: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 1 {
        return vec![vec![n]];
    }
    let firsts = 1..=n - (parts - 1);
    let rest = |first: usize| all_cuts(n - first, parts - 1).into_iter().map(move |r| (first, r));
    firsts.flat_map(rest).map(|(f, r)| std::iter::once(f).chain(r.iter().map(|e| e + f)).collect()).collect()
}

/// What is minimised: the largest sum, then the sum of squares.
fn rate(weights: &[u64], ends: &[usize]) -> (u64, u64) {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let sums: Vec<u64> = starts.zip(ends).map(|(from, &to)| weights[from..to].iter().sum()).collect();
    (sums.iter().copied().max().unwrap(), sums.iter().map(|s| s * s).sum())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn no_cut_is_better(weights in prop::collection::vec(0u64..20, 1..9), seed in 0usize..100) {
        let parts = 1 + seed % weights.len();
        let found = cut(&weights, parts);
        prop_assert_eq!(found.len(), parts);
        prop_assert!(found.windows(2).all(|w| w[0] < w[1]) && found[0] > 0);
        let best = all_cuts(weights.len(), parts).into_iter().map(|c| rate(&weights, &c)).min().unwrap();
        prop_assert_eq!(rate(&weights, &found), best);
    }
}

fn balanced(layers: u32, vocab: u32, stages: u32) -> Vec<Vec<Layer>> {
    let dims =
        Dims { layers, width: 256, heads: 8, context: 128, vocab, microbatch: 4, dtype: Dtype::F32, tied: false };
    partition(&dims, &At { value: Partition::Balanced, span: 0..0 }, stages).unwrap()
}

#[test]
fn the_embedding_and_the_head_count() {
    let sizes = |p: Vec<Vec<Layer>>| p.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(balanced(8, 256, 4)), [3, 2, 2, 3]);
    assert_eq!(sizes(balanced(8, 256, 2)), [5, 5]);
    // A head that costs several blocks takes their place.
    assert_eq!(sizes(balanced(8, 20_000, 2)), [8, 2]);
    assert_eq!(balanced(2, 256, 4), [[Layer::Embed], [Layer::Block(0)], [Layer::Block(1)], [Layer::Head]]);
}

#[test]
fn too_many_stages_are_refused() {
    let dims =
        Dims { layers: 2, width: 16, heads: 2, context: 4, vocab: 11, microbatch: 1, dtype: Dtype::F32, tied: false };
    let error = partition(&dims, &At { value: Partition::Balanced, span: 3..5 }, 5).unwrap_err();
    assert_eq!((error.code, error.labels[0].span.clone()), ("P0222", 3..5));
    assert_eq!(error.help.as_deref(), Some("use at most 4 stages, or layers >= 3"));
    let explicit = Partition::Explicit(vec![vec![Layer::Embed, Layer::Block(0)], vec![Layer::Block(1), Layer::Head]]);
    assert_eq!(partition(&dims, &At { value: explicit, span: 0..1 }, 3).unwrap_err().code, "P0221");
}
