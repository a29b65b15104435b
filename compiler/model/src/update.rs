//! The updates of a stage that no weight-gradient kernel can take in: kernel calls over the parameters' buffers and temporaries.
//!
//! Each parameter's accumulated gradient is clipped, prepared by its optimizer, and ends in [`KernelOp::Update`], the elementwise
//! step that fused updates run too. The gradient of a tied table is first the sum of both its ends'. What prepares it works in place on the accumulator, whose gradient is used up.
//!
//! # Muon
//!
//! With n the smaller and d the larger dimension, the iteration needs two matrices n x n and one n x d beside the accumulator, between
//! which and the accumulator X goes back and forth. The longer side is never multiplied with itself: A = X Xᵀ for wide matrices, XᵀX
//! for tall ones, so that nothing is transposed in memory. The factor of the step's length goes into the last product.
//!
//! # SOAP
//!
//! All calls are made at every update. Those that turn the bases come last, and read from the hyper-parameters how often: at most updates not
//! at all. Two matrices as large as the weight are needed beside the accumulator, and then, for a side of length d, d² + 4 d values.

use crate::gpt::ParamDecl;
use crate::kernel::{
    Dtype, Epilogue, Factor, Form, KernelOp, MatMul, OptimizerKind, Side, UpdatePart, UpdateRule, Writes,
};
use crate::rules::{Clip, GroupRule, MuonScale, Rules};

/// An argument of a kernel call, before it has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// The parameter's; where the newest version is left as it is, that and the next.
    Weight,
    Gradient,
    /// Of a tied table: the gradient of its other end.
    OtherEnd,
    State(usize),
    /// The bf16 copy of a parameter that has one.
    Copy,
    Hyper,
    /// The sum of the squares of the gradients up to this stage, and that of all stages: see [`artifact::program::StageIo`].
    Norm,
    Total,
    /// Index into [`UpdatePlan::temporaries`].
    Temporary(usize),
}

/// A kernel call for a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateStep {
    pub op: KernelOp,
    pub dtype: Dtype,
    /// Index into the stage's parameters.
    pub param: usize,
    pub args: Vec<Arg>,
}

/// A stage's unfused updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdatePlan {
    /// By parameter: why its last weight gradient does not take its update in; none if it does.
    pub unfused: Vec<Option<&'static str>>,
    pub steps: Vec<UpdateStep>,
    /// What adds the stage's gradients to a global norm, before any stage's `steps`.
    pub norm: Vec<UpdateStep>,
    /// Where the steps write weights without a copy: see [`UpdatePlan::writes`].
    writes: Writes,
    /// Bytes of each temporary.
    pub temporaries: Vec<u64>,
}

/// The tied table among a stage's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiedTable {
    /// Index into the stage's parameters.
    pub param: usize,
    /// Whether this stage makes its update: of two stages on one rank, which share the table, the first does.
    pub updated: bool,
}

/// Why a tied table is not updated in a weight gradient.
const TIED: &str = "the update of a tied table takes the gradients of both its ends";

/// Newton-Schulz iterations and their coefficients: X <- a X + (b A + c A A) X.
const ITERATIONS: u32 = 5;
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// RMS of AdamW's steps at rate 1, about.
const ADAMW_RMS: f64 = 0.2;

impl UpdatePlan {
    /// The updates of `params`. `fuse`: run them in weight gradients where that can be. `first`: they are those of the model's first stage.
    pub fn new(
        params: &[ParamDecl],
        rules: &Rules,
        fuse: bool,
        writes: Writes,
        first: bool,
        table: Option<TiedTable>,
    ) -> Self {
        let tied = |i: usize| table.filter(|t| t.param == i).map(|_| TIED);
        let why = |(i, p): (usize, &ParamDecl)| match fuse {
            true => tied(i).or_else(|| rules.unfused(&p.name, &p.shape)),
            false => Some("`fuse = off`"),
        };
        let unfused = params.iter().enumerate().map(why).collect();
        let mut plan = UpdatePlan { unfused, steps: Vec::new(), norm: Vec::new(), writes, temporaries: Vec::new() };
        // What another stage of the rank updates.
        let foreign = table.filter(|t| !t.updated).map(|t| t.param);
        let own: Vec<(usize, &ParamDecl)> = params.iter().enumerate().filter(|(i, _)| Some(*i) != foreign).collect();
        if let Some(TiedTable { param, updated: true }) = table {
            let op = UpdatePart::Add { len: params[param].len() };
            plan.push(KernelOp::Part(op), param, &[Arg::OtherEnd, Arg::Gradient]);
        }
        match rules.clip {
            Some(Clip::PerStage { max }) => plan.clip_together(&own, max),
            Some(Clip::Global { max }) => plan.clip_all(&own, max, first, table),
            Some(Clip::PerTensor { .. }) | None => {}
        }
        for (i, param) in own.into_iter().filter(|(i, _)| plan.unfused[*i].is_some()).collect::<Vec<_>>() {
            let shape = &param.shape;
            let mut writer = Writer { plan: &mut plan, param: i, len: param.len(), copied: param.copied };
            if let Some(Clip::PerTensor { max }) = rules.clip {
                writer.at_most(max);
            }
            writer.update(rules.of(&param.name, shape), shape);
        }
        plan
    }

    /// Where a weight is written: [`Arg::Weight`] is one operand or two. Of a weight with a copy, that has the versions.
    pub fn writes(&self, copied: bool) -> Writes {
        if copied { Writes::InPlace } else { self.writes }
    }

    /// One norm for all parameters, summed in their order.
    fn clip_together(&mut self, params: &[(usize, &ParamDecl)], max: f64) {
        let sum = self.temporary(8);
        let lens: Vec<(usize, u64)> = params.iter().map(|(i, p)| (*i, p.len())).collect();
        for (n, &(param, len)) in lens.iter().enumerate() {
            let op = UpdatePart::SumSquares { len, add: n > 0 };
            self.push(KernelOp::Part(op), param, &[Arg::Gradient, sum]);
        }
        self.scale(lens, sum, max);
    }

    /// One norm for the parameters of all stages, summed in their order. A tied table counts where its first end is, which then has
    /// both ends' gradients before.
    fn clip_all(&mut self, params: &[(usize, &ParamDecl)], max: f64, first: bool, table: Option<TiedTable>) {
        if first {
            self.norm.append(&mut self.steps);
        }
        let lens: Vec<(usize, u64)> = params.iter().map(|(i, p)| (*i, p.len())).collect();
        let elsewhere = table.filter(|_| !first).map(|t| t.param);
        for (n, &(param, len)) in lens.iter().filter(|(param, _)| Some(*param) != elsewhere).enumerate() {
            let op = KernelOp::Part(UpdatePart::SumSquares { len, add: n > 0 || !first });
            self.norm.push(UpdateStep { op, dtype: Dtype::F32, param, args: vec![Arg::Gradient, Arg::Norm] });
        }
        self.scale(lens, Arg::Total, max);
    }

    /// Scales gradients of these lengths down to a norm, whose square is in `sum`.
    fn scale(&mut self, lens: Vec<(usize, u64)>, sum: Arg, max: f64) {
        let factor = Factor::AtMost { max_bits: max.to_bits() };
        for (param, len) in lens {
            self.push(KernelOp::Part(UpdatePart::Scale { len, factor }), param, &[sum, Arg::Gradient]);
        }
    }

    fn temporary(&mut self, bytes: u64) -> Arg {
        self.temporaries.push(bytes);
        Arg::Temporary(self.temporaries.len() - 1)
    }

    fn push(&mut self, op: KernelOp, param: usize, args: &[Arg]) {
        self.steps.push(UpdateStep { op, dtype: Dtype::F32, param, args: args.to_vec() });
    }
}

/// Writes the calls of one parameter.
struct Writer<'a> {
    plan: &'a mut UpdatePlan,
    param: usize,
    /// Elements.
    len: u64,
    /// Whether there is a bf16 copy.
    copied: bool,
}

impl Writer<'_> {
    fn push(&mut self, op: KernelOp, args: &[Arg]) {
        self.plan.push(op, self.param, args);
    }

    fn part(&mut self, part: UpdatePart, args: &[Arg]) {
        self.push(KernelOp::Part(part), args);
    }

    /// Multiplies `x` by a factor of its norm.
    fn by_norm(&mut self, x: Arg, factor: Factor) {
        let (sum, len) = (self.plan.temporary(8), self.len);
        self.part(UpdatePart::SumSquares { len, add: false }, &[x, sum]);
        self.part(UpdatePart::Scale { len, factor }, &[sum, x]);
    }

    fn at_most(&mut self, max: f64) {
        self.by_norm(Arg::Gradient, Factor::AtMost { max_bits: max.to_bits() });
    }

    fn update(&mut self, group: &GroupRule, shape: &[u64]) {
        let (rule, len) = (group.rule, self.len);
        let direction = match rule.kind {
            OptimizerKind::Muon => self.muon(shape, factor(group.scale, shape)),
            OptimizerKind::NorMuon => self.normuon(shape),
            OptimizerKind::Soap { .. } => self.soap(shape, rule.kind),
            OptimizerKind::Mars => {
                self.part(UpdatePart::Correct { len }, &[Arg::Hyper, Arg::Gradient, Arg::State(0)]);
                self.at_most(1.0);
                Arg::Gradient
            }
            _ => Arg::Gradient,
        };
        let first = rule.kind.prepared(shape).len();
        let states = (0..rule.states().len()).map(|i| Arg::State(first + i));
        let end = self.copied.then_some(Arg::Copy).into_iter().chain([Arg::Hyper]);
        let args: Vec<Arg> = [direction, Arg::Weight].into_iter().chain(states).chain(end).collect();
        let rule = UpdateRule { writes: self.plan.writes(self.copied), ..rule.step() };
        self.push(KernelOp::Update { len, rule }, &args);
        if let (true, Some(last)) = (self.copied, self.plan.steps.last_mut()) {
            last.dtype = Dtype::Bf16;
        }
        if let OptimizerKind::Soap { .. } = group.rule.kind {
            self.turns(shape, group.rule.kind);
        }
    }

    /// The momentum's look-ahead, made orthogonal and multiplied by `factor`; gives its place.
    fn muon(&mut self, shape: &[u64], factor: f64) -> Arg {
        let len = self.len;
        self.part(UpdatePart::Momentum { len }, &[Arg::Hyper, Arg::Gradient, Arg::State(0)]);
        self.by_norm(Arg::Gradient, Factor::Unit);
        let [rows, columns] = [0, 1].map(|i| shape[i] as u32);
        let (n, d) = (rows.min(columns), rows.max(columns));
        let square = 4 * u64::from(n) * u64::from(n);
        let [a, b] = [square, square].map(|bytes| self.plan.temporary(bytes));
        let mut x = [Arg::Gradient, self.plan.temporary(4 * len)];
        let [c0, c1, c2] = COEFFICIENTS;
        let blend = |product: f64, other: f64| {
            let [product_bits, other_bits] = [product, other].map(|x| (x as f32).to_bits());
            Epilogue::Blend { product_bits, other_bits }
        };
        for i in 1..=ITERATIONS {
            let scale = if i == ITERATIONS { factor } else { 1.0 };
            let tall = rows > columns;
            let form = if tall { Form::TN } else { Form::NT };
            self.matmul((n, n, d), form, Epilogue::Store, &[x[0], x[0], a]);
            self.matmul((n, n, n), Form::NN, blend(c2, c1), &[a, a, a, b]);
            let (shape, left, right) = if tall { ((d, n, n), x[0], b) } else { ((n, d, n), b, x[0]) };
            self.matmul(shape, Form::NN, blend(scale, scale * c0), &[left, right, x[0], x[1]]);
            x.swap(0, 1);
        }
        x[0]
    }

    /// The step in the bases of the rotated sides, rotated back; gives its place.
    fn soap(&mut self, shape: &[u64], kind: OptimizerKind) -> Arg {
        let (len, [m, v]) = (self.len, [0, 1].map(Arg::State));
        let (rows, columns) = (shape[0] as u32, shape[1] as u32);
        let sides = sides(kind.rotates(shape));
        let x = self.plan.temporary(4 * len);
        let y = if sides.iter().any(Option::is_some) { self.plan.temporary(4 * len) } else { x };
        let products = [((rows, rows, columns), Form::NT), ((columns, columns, rows), Form::TN)];
        for (side, (product, form)) in sides.into_iter().zip(products) {
            if let Some((moments, _)) = side {
                self.matmul(product, form, Epilogue::Average, &[Arg::Gradient, Arg::Gradient, Arg::Hyper, moments]);
            }
        }
        let bases = sides.map(|side| side.map(|(_, basis)| basis));
        let gradient = self.rotated((rows, columns), bases, Way::Into, [Arg::Gradient, x, y]);
        self.part(UpdatePart::Average { len }, &[Arg::Hyper, Arg::Gradient, m]);
        let momentum = self.rotated((rows, columns), bases, Way::Into, [m, x, Arg::Gradient]);
        self.part(UpdatePart::Precondition { len }, &[Arg::Hyper, gradient, momentum, v, x]);
        self.rotated((rows, columns), bases, Way::Back, [x, Arg::Gradient, y])
    }

    /// What follows a step of SOAP, if hyper-parameters say so.
    fn turns(&mut self, shape: &[u64], kind: OptimizerKind) {
        let (rows, columns) = (shape[0] as u32, shape[1] as u32);
        for (place, side) in sides(kind.rotates(shape)).into_iter().zip([Side::Rows, Side::Columns]) {
            let Some((moments, basis)) = place else { continue };
            let work = self.plan.temporary(UpdatePart::work_bytes(side.dim(rows, columns).into()));
            let turn = UpdatePart::Turn { rows, columns, side };
            self.part(turn, &[Arg::Hyper, moments, basis, Arg::State(1), work]);
        }
    }

    /// A matrix in the bases, or out of them: `from`, a place for what is between, and one for the result; gives where it is.
    fn rotated(
        &mut self,
        (rows, columns): (u32, u32),
        [left, right]: [Option<Arg>; 2],
        way: Way,
        [from, between, to]: [Arg; 3],
    ) -> Arg {
        let (left_form, right_form) = match way {
            Way::Into => (Form::TN, Form::NN),
            Way::Back => (Form::NN, Form::NT),
        };
        let mut at = from;
        if let Some(basis) = left {
            let result = if right.is_some() { between } else { to };
            self.matmul((rows, columns, rows), left_form, Epilogue::Store, &[basis, at, result]);
            at = result;
        }
        if let Some(basis) = right {
            self.matmul((rows, columns, columns), right_form, Epilogue::Store, &[at, basis, to]);
            at = to;
        }
        at
    }

    fn normuon(&mut self, shape: &[u64]) -> Arg {
        let x = self.muon(shape, 1.0);
        let [rows, width] = [0, 1].map(|i| shape[i] as u32);
        self.part(UpdatePart::Columns { rows, width }, &[Arg::Hyper, x, Arg::State(1)]);
        let target = ADAMW_RMS * (self.len as f64).sqrt();
        self.by_norm(x, Factor::To { target_bits: target.to_bits() });
        x
    }

    fn matmul(&mut self, (m, n, k): (u32, u32, u32), form: Form, epilogue: Epilogue, args: &[Arg]) {
        self.push(KernelOp::MatMul(MatMul { m, n, k, form, epilogue }), args);
    }
}

/// The moments and the basis of the rows and of the columns, where they are rotated: see [`OptimizerKind::prepared`].
fn sides([rows, columns]: [bool; 2]) -> [Option<(Arg, Arg)>; 2] {
    let at = |first: usize| (Arg::State(first), Arg::State(first + 1));
    [rows.then(|| at(2)), columns.then(|| at(if rows { 4 } else { 2 }))]
}

/// Which way a matrix is rotated.
#[derive(Clone, Copy)]
enum Way {
    Into,
    Back,
}

/// What an orthogonal matrix is multiplied by; weights are `[in, out]`.
fn factor(scale: MuonScale, shape: &[u64]) -> f64 {
    let [rows, columns] = [0, 1].map(|i| shape[i] as f64);
    match scale {
        MuonScale::MatchAdamW => ADAMW_RMS * rows.max(columns).sqrt(),
        MuonScale::Original => (columns / rows).max(1.0).sqrt(),
    }
}
