//! Attention and its gradient against f64, at sizes that fill tiles and sizes that do not.

use crate::harness::{Data, assert_close, bits, random, run, targets};
use model::kernel::KernelOp;
use model::target::Target;

/// Sequences, context, width, heads.
type Sizes = (u32, u32, u32, u32);

const SIZES: [Sizes; 7] =
    [(2, 19, 20, 4), (1, 1, 5, 1), (2, 64, 64, 2), (1, 32, 64, 2), (1, 7, 48, 2), (1, 40, 130, 1), (1, 7, 2, 2)];

/// The f64 reference, by head: outputs, logs of sums, and the gradient of q, k, v for a given gradient of the outputs.
struct Reference {
    o: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

fn reference((sequences, context, width, heads): Sizes, qkv: &[f32], d_o: &[f32]) -> Reference {
    let [sequences, context, width, heads] = [sequences, context, width, heads].map(|x| x as usize);
    let rows = sequences * context;
    let mut r = Reference {
        o: vec![0.0; rows * width],
        lse: vec![0.0; sequences * heads * context],
        dqkv: vec![0.0; 3 * rows * width],
    };
    for s in 0..sequences {
        for h in 0..heads {
            one_head(&mut r, (s, h), (context, width, heads), qkv, d_o);
        }
    }
    r
}

fn one_head(
    r: &mut Reference,
    (s, h): (usize, usize),
    (context, width, heads): (usize, usize, usize),
    qkv: &[f32],
    d_o: &[f32],
) {
    let size = width / heads;
    let scale = 1.0 / (size as f64).sqrt();
    let at = |part: usize, t: usize, e: usize| (s * context + t) * 3 * width + part * width + h * size + e;
    let out = |t: usize, e: usize| (s * context + t) * width + h * size + e;
    let x = |part, t, e| f64::from(qkv[at(part, t, e)]);
    let g = |t, e| f64::from(d_o[out(t, e)]);
    let dot = |f: &dyn Fn(usize) -> f64| (0..size).map(f).sum::<f64>();
    for t in 0..context {
        let scores: Vec<_> = (0..=t).map(|u| dot(&|e| x(0, t, e) * x(1, u, e)) * scale).collect();
        let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = scores.iter().map(|v| (v - peak).exp()).sum::<f64>();
        r.lse[(s * heads + h) * context + t] = peak + sum.ln();
        let p: Vec<_> = scores.iter().map(|v| (v - peak).exp() / sum).collect();
        for e in 0..size {
            r.o[out(t, e)] = (0..=t).map(|u| p[u] * x(2, u, e)).sum();
        }
        let along = dot(&|e| g(t, e) * r.o[out(t, e)]);
        for (u, weight) in p.iter().enumerate() {
            let ds = weight * (dot(&|e| g(t, e) * x(2, u, e)) - along) * scale;
            for e in 0..size {
                r.dqkv[at(0, t, e)] += ds * x(1, u, e);
                r.dqkv[at(1, u, e)] += ds * x(0, t, e);
                r.dqkv[at(2, u, e)] += weight * g(t, e);
            }
        }
    }
}

fn inputs((sequences, context, width, _): Sizes) -> (Vec<f32>, Vec<f32>) {
    let len = (sequences * context * width) as usize;
    // Spread out, so that the softmax has peaks. Scores reach 15: their rounding is that of the weights, relative.
    (random(1, 3 * len).iter().map(|x| 3.0 * x).collect(), random(2, len))
}

fn operations((sequences, context, width, heads): Sizes) -> (KernelOp, KernelOp) {
    let forward = KernelOp::Attention { sequences, context, width, heads };
    (forward, KernelOp::AttentionGrad { sequences, context, width, heads })
}

/// o, lse and dqkv of the kernels.
fn computed(target: Target, sizes: Sizes, qkv: &[f32], d_o: &[f32]) -> [Data; 3] {
    let (sequences, context, _, heads) = sizes;
    let (forward, backward) = operations(sizes);
    let lse_len = (sequences * context * heads) as usize;
    let qkv = Data::F32(qkv.to_vec());
    let after = run(forward, target, &[qkv.clone(), Data::unset(d_o.len()), Data::unset(lse_len)]);
    let (o, lse) = (after[1].clone(), after[2].clone());
    let data = [qkv, o.clone(), lse.clone(), Data::F32(d_o.to_vec()), Data::unset(3 * d_o.len())];
    let dqkv = run(backward, target, &data).pop().expect("dqkv");
    [o, lse, dqkv]
}

#[test]
fn attention_and_its_gradient_are_right_at_every_size() {
    for target in targets() {
        for sizes in SIZES {
            let (qkv, d_o) = inputs(sizes);
            let expected = reference(sizes, &qkv, &d_o);
            let [o, lse, dqkv] = computed(target, sizes, &qkv, &d_o);
            assert_close(&format!("o {sizes:?} {target:?}"), o.f32(), &expected.o, 1e-5);
            assert_close(&format!("lse {sizes:?} {target:?}"), lse.f32(), &expected.lse, 3e-6);
            assert_close(&format!("dqkv {sizes:?} {target:?}"), dqkv.f32(), &expected.dqkv, 3e-5);
        }
    }
}

#[test]
fn a_query_does_not_see_later_keys() {
    let sizes = (1, 40, 24, 2);
    let (mut qkv, d_o) = inputs(sizes);
    for target in targets() {
        let [before, lse_before, _] = computed(target, sizes, &qkv, &d_o);
        // The last token's q, k and v.
        let last = qkv.len() - 72;
        qkv[last..].iter_mut().for_each(|x| *x = 1e3);
        let [after, lse_after, _] = computed(target, sizes, &qkv, &d_o);
        assert_eq!(bits(&before)[..39 * 24], bits(&after)[..39 * 24], "{target:?}");
        assert_ne!(bits(&before)[39 * 24..], bits(&after)[39 * 24..], "{target:?}");
        assert_eq!(bits(&lse_before)[..39], bits(&lse_after)[..39], "{target:?}");
        (qkv, _) = inputs(sizes);
    }
}

#[test]
fn sequences_do_not_touch_each_other() {
    let sizes = (3, 21, 24, 2);
    let (qkv, d_o) = inputs(sizes);
    for target in targets() {
        let [o, _, dqkv] = computed(target, sizes, &qkv, &d_o);
        let one = (1, 21, 24, 2);
        let [second, _, d_second] = computed(target, one, &qkv[21 * 72..42 * 72], &d_o[21 * 24..42 * 24]);
        assert_eq!(bits(&o)[21 * 24..42 * 24], bits(&second), "{target:?}");
        assert_eq!(bits(&dqkv)[21 * 72..42 * 72], bits(&d_second), "{target:?}");
    }
}
