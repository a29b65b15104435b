//! The toy's manifest: stage programs and arenas laid out by hand.

use super::kernels::*;
use super::streams::{rings, stream};
use super::{CONTEXT, DECAY, LAYERS, MICROBATCH, MOMENTUM, RATE, ROWS, Toy, VOCAB, WIDTH};
use artifact::ids::{RankId, StageId};
use artifact::program::*;
use artifact::stream::{Policy, Program};

/// Places one after the other.
#[derive(Default)]
struct Bump {
    end: u64,
}

impl Bump {
    fn ring(&mut self, bytes: usize, slots: u32) -> Place {
        let stride = (bytes as u64).next_multiple_of(64);
        let (bytes, by) = (bytes as u64, Selector::Microbatch);
        let place = Place { offset: self.end, bytes, stride: if slots == 1 { 0 } else { stride }, slots, by };
        self.end += stride * u64::from(slots);
        place
    }

    fn one(&mut self, bytes: usize) -> Place {
        self.ring(bytes, 1)
    }
}

const X_BYTES: usize = 4 * ROWS * WIDTH;

pub fn manifest(toy: Toy) -> Manifest {
    let built: Vec<(Stage, Memory)> = (0..toy.ranks).map(|rank| stage(toy, rank)).collect();
    let (stages, memory): (Vec<Stage>, Vec<Memory>) = built.into_iter().unzip();
    Manifest {
        source_name: "toy.pace".into(),
        source: format!("{toy:?}"),
        cpu: "x86-64-v3".into(),
        llvm: "none".into(),
        data: DataShape { microbatch: MICROBATCH as u32, context: CONTEXT as u32, vocab: VOCAB },
        groups: vec![Group { optimizer: Optimizer::Sgd { momentum: MOMENTUM, decay: DECAY }, learning_rate: RATE }],
        correction: None,
        boundary: toy.boundary,
        program: Program {
            streams: (0..toy.ranks).map(|rank| stream(toy, rank)).collect(),
            rank_of_stage: (0..toy.ranks).map(|rank| RankId(rank as u32)).collect(),
            rings: (0..toy.ranks).map(|rank| rings(toy, rank)).collect(),
            accumulate: toy.accumulate,
            policy: Policy::Current,
            copies: 1,
            tied: false,
            global_norm: false,
        },
        stages,
        memory,
        kernels: entries(),
        proved: Proved { drift_max: vec![0; toy.ranks], delay_max: vec![0; toy.ranks], bubble: vec![0.0; toy.ranks] },
        tuning: None,
    }
}

/// The activations and gradients around a stage's layers, and its parameters.
struct Parts {
    /// Input of each layer, and the output of the last one.
    x: Vec<Place>,
    /// Gradient of each of them; none for what nobody needs.
    dx: Vec<Option<Place>>,
    params: Vec<Param>,
    hyper: Place,
}

fn stage(toy: Toy, rank: usize) -> (Stage, Memory) {
    let (first, last) = (rank == 0, rank + 1 == toy.ranks);
    let r = rings(toy, rank);
    let layers = LAYERS / toy.ranks;
    let mut bump = Bump::default();
    let tokens = first.then(|| bump.ring(4 * ROWS, r.recv_f));
    let targets = last.then(|| bump.one(4 * ROWS));
    let loss = last.then(|| bump.one(8));
    let recv_f = (!first).then(|| bump.ring(X_BYTES, r.recv_f));
    let send_f = (!last).then(|| bump.ring(X_BYTES, r.send_f));
    let recv_b = (!last).then(|| bump.ring(X_BYTES, r.recv_b));
    let send_b = (!first).then(|| bump.ring(X_BYTES, r.send_b));
    let (hyper, version, version_seen) = (bump.one(128), bump.one(8), bump.ring(8, r.stash));
    let mut stash = || bump.ring(X_BYTES, r.stash);
    let mut x = vec![recv_f.unwrap_or_else(&mut stash)];
    (1..layers).for_each(|_| x.push(stash()));
    x.push(send_f.unwrap_or_else(&mut stash));
    let mut dx = vec![send_b];
    (1..layers).for_each(|_| dx.push(Some(stash())));
    dx.push(recv_b.or(Some(x[layers])));
    let params = (0..layers).map(|l| param(rank * layers + l, toy.accumulate, &mut bump)).collect();
    let parts = Parts { x, dx, params, hyper };
    let bodies = bodies(&parts, tokens, targets, loss);
    let (norm, total) = (None, None);
    let io =
        StageIo { tokens, targets, loss, recv_f, send_f, recv_b, send_b, norm, total, hyper, version, version_seen };
    let (stage, rank) = (StageId(rank as u32), RankId(rank as u32));
    let memory = Memory { total: bump.end, ..Memory::default() };
    (Stage { stage, rank, rings: r, params: parts.params, io, bodies }, memory)
}

fn param(layer: usize, accumulate: u32, bump: &mut Bump) -> Param {
    let bytes = 4 * WIDTH;
    Param {
        name: format!("layer.{layer}.w"),
        shape: vec![WIDTH as u64],
        init: Init::Normal { std: 0.3 },
        group: 0,
        decay: layer.is_multiple_of(2),
        weight: bump.one(bytes),
        copy: None,
        state: vec![bump.one(bytes)],
        gradient: (accumulate > 1).then(|| bump.one(bytes)),
        other_end: None,
        unfused: None,
    }
}

fn call(kernel: u32, args: impl Into<Vec<Place>>) -> Call {
    Call { kernel, args: args.into() }
}

fn bodies(p: &Parts, tokens: Option<Place>, targets: Option<Place>, loss: Option<Place>) -> Bodies {
    let mut b = Bodies::default();
    b.f.extend(tokens.map(|t| call(EMBED, [t, p.x[0]])));
    for (l, param) in p.params.iter().enumerate() {
        b.f.push(call(LAYER, [p.x[l], param.weight, p.x[l + 1]]));
    }
    b.f.extend(targets.zip(loss).map(|(t, loss)| call(LOSS, [t, *p.x.last().unwrap(), loss])));
    for (l, param) in p.params.iter().enumerate().rev() {
        let dy = p.dx[l + 1].unwrap();
        let input = p.dx[l].map(|dx| call(INPUT_GRADIENT, [dy, param.weight, dx]));
        b.i.extend(input.clone());
        for v in 0..4 {
            let weight = gradient(param, dy, p.x[l], p.hyper, v);
            b.b[v].extend(input.clone().into_iter().chain(weight.clone()));
            b.w[v].extend(weight);
        }
    }
    b
}

/// The weight-gradient call of a variant; none when the toy never has that variant.
fn gradient(param: &Param, dy: Place, x: Place, hyper: Place, variant: usize) -> Option<Call> {
    let hyper = Place { offset: hyper.offset + if param.decay { 0 } else { 64 }, bytes: 64, ..hyper };
    let (w, m) = (param.weight, param.state[0]);
    match (variant, param.gradient) {
        (0, Some(acc)) => Some(call(GRADIENT_ADD, [dy, x, acc])),
        (1, Some(acc)) => Some(call(GRADIENT_STORE, [dy, x, acc])),
        (2, Some(acc)) => Some(call(GRADIENT_UPDATE, [dy, x, acc, hyper, w, m])),
        (3, None) => Some(call(GRADIENT_UPDATE_ALONE, [dy, x, hyper, w, m])),
        _ => None,
    }
}
