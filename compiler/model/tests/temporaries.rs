//! The planner of temporaries against a byte map of every step.

use model::arena::{ALIGN, Interval, align, first_fit};
use proptest::prelude::*;

fn intervals() -> impl Strategy<Value = Vec<Interval>> {
    let one = (0usize..20, 0usize..8, 1u64..1000);
    prop::collection::vec(one.prop_map(|(first, length, bytes)| Interval { first, last: first + length, bytes }), 0..40)
}

proptest! {
    #[test]
    fn no_two_live_temporaries_share_a_byte(lives in intervals()) {
        let (offsets, total) = first_fit(&lives);
        prop_assert_eq!(offsets.len(), lives.len());
        let mut most = 0;
        for step in 0..30 {
            let mut owner = vec![None; total as usize];
            let mut live = 0;
            for (i, life) in lives.iter().enumerate().filter(|(_, l)| l.first <= step && step <= l.last) {
                prop_assert_eq!(offsets[i] % ALIGN, 0);
                live += align(life.bytes);
                for byte in &mut owner[offsets[i] as usize..(offsets[i] + life.bytes) as usize] {
                    prop_assert_eq!(byte.replace(i), None, "step {}", step);
                }
            }
            most = most.max(live);
        }
        // No plan can do with less than what is live at once; this one must not waste more than half.
        prop_assert!(total >= most && total <= 2 * most.max(1), "{} for {}", total, most);
    }
}

#[test]
fn a_gap_is_used() {
    let life = |first, last, bytes| Interval { first, last, bytes };
    let (offsets, total) = first_fit(&[life(0, 9, 128), life(0, 3, 64), life(4, 9, 64), life(0, 9, 64)]);
    assert_eq!((offsets, total), (vec![0, 128, 128, 192], 256));
}
