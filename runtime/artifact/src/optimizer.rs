//! Optimizers: their formulas and the vector of hyper-parameters that an update's kernels read.
//!
//! Below, g is the update's gradient, t the update counted from 1, w a weight, and every other letter a state that starts at
//! zero. What an update subtracts is `u`. Weight decay is decoupled and applies to parameters of two or more dimensions only: for
//! the others `decay` is 0. `sign` of 0 is 0, and of NaN NaN, so that a run that diverged shows it.
//!
//! | kind | update | source |
//! |---|---|---|
//! | `AdamW` | m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²; u = lr/(1-b1^t) m / (sqrt(v/(1-b2^t)) + eps); w = (1 - lr decay) w - u | Loshchilov and Hutter 2019; `torch.optim.AdamW` |
//! | `Sgd` | m = momentum m + g; u = lr m; w = (1 - lr decay) w - u | `torch.optim.SGD` without dampening, decay decoupled |
//! | `Lion` | u = lr sign(b1 m + (1-b1) g); m = b2 m + (1-b2) g; w = (1 - lr decay) w - u | Chen et al. 2023 (arXiv 2302.06675), algorithm 2 |
//! | `Signum` | m = momentum m + (1-momentum) g; u = lr sign(m); w = (1 - lr decay) w - u | Bernstein et al. 2018 (arXiv 1802.04434), algorithm 2, decay decoupled |
//! | `NAdam` | m, v as `AdamW`; c_t = b1 (1 - 0.96^(t momentum_decay)/2), C_t = c_1 … c_t; u = lr (c_{t+1}/(1-C_{t+1}) m + (1-c_t)/(1-C_t) g) / (sqrt(v/(1-b2^t)) + eps); w = (1 - lr decay) w - u | Dozat 2016; `torch.optim.NAdam` with decoupled decay |
//! | `Adan` | e = g - g of the update before (0 at the first); m = b1 m + (1-b1) g; d = b2 d + (1-b2) e; v = b3 v + (1-b3) (g + b2 e)²; u = lr (m/(1-b1^t) + b2 d/(1-b2^t)) / (sqrt(v/(1-b3^t)) + eps); w = (w - u) / (1 + lr decay) | Xie et al. 2022 (arXiv 2208.06677) and the authors' code, its default (proximal) decay |
//! | `Muon` | m = b1 m + (1-b1) g; x = orthogonal((1-b1) g + b1 m); u = lr s x; w = (1 - lr decay) w - u | Jordan et al. 2024 (the Muon post and repository); `torch.optim.Muon` |
//! | `NorMuon` | x as `Muon`; v = b2 v + (1-b2) (mean over rows of x²), one value a column; y = x / (sqrt(v) + 1e-10); u = lr 0.2 sqrt(rows columns) y / norm(y); w = (1 - lr decay) w - u | Li et al. 2025 (arXiv 2510.05491), algorithm 1 |
//! | `Mars` | c = g + gamma b1/(1-b1) (g - the gradient before, 0 at first), divided by its norm if that is above 1; then `AdamW` with c for g | Yuan et al. 2024 (arXiv 2411.10438), MARS-AdamW as its authors run it: approximate, the gradient before is that of the batch and the weights before |
//! | `Soap` | x = m~ / (sqrt(v/(1-b2^t)) + eps) / (1-b1^t) as in `AdamW`, but in the bases Q, P: v of Qᵀ g P, m~ = Qᵀ m P, t from 0; u = lr Q x Pᵀ; w = (1 - lr decay) w - u; then L = b2 L + (1-b2) g gᵀ, R = b2 R + (1-b2) gᵀ g, and the bases may turn | Vyas et al. 2024 (arXiv 2409.11321), algorithm 3, and the authors' code |
//!
//! `Muon` and `NorMuon` are for matrices. orthogonal(G): X = G / (norm(G) + 1e-7), then five times A = X Xᵀ (Xᵀ X if there are more rows
//! than columns), X = 3.4445 X + (2.0315 A² - 4.7750 A) X (or X (…)). s is 0.2 sqrt(max(rows, columns)), with which steps are as long as
//! AdamW's, or the original sqrt(max(1, columns/rows)). Weights are `[in, out]`, the transposes of PyTorch's: what is
//! said of columns here is said of rows, the neurons, in the papers. A matrix is orthogonalised as the model stores it: `attn.qkv.weight` as one
//! matrix `[width, 3 width]`, not as three.
//!
//! Norms are Frobenius norms, with squares summed in f64.
//!
//! `Soap` is for matrices too. Its first update (t = 0) changes no weight, no m and no v: it makes L, R and the first bases, so that no gradient is measured in
//! a basis of its own making. After each update whose t is a multiple of `frequency` the bases turn towards the eigenvectors of L and R, as in the
//! authors' code: Q's columns are sorted by qᵀ L q, the largest first, v's rows with them, and Q becomes the Q of the QR decomposition
//! (by Householder's reflections) of L Q; the same for P with v's columns. Where we differ: the first bases are [`FIRST_TURNS`] such turns from the unit
//! matrix, where the authors' code takes the eigenvectors; m is kept in the weights' own basis, as in the paper, and the code's rotation of m
//! from basis to basis comes to the same; the corrections for t are `AdamW`'s (eps is outside of that of v); decay is on the weight
//! before the step. A side longer than `max_dim` is not rotated: it has no L and no Q. b2 is also that of L and R.
//!
//! A correction for the delay of gradients changes what is subtracted, not the optimizer's states. Decay stays outside:
//!
//! | correction | subtracted in place of u | source |
//! |---|---|---|
//! | `ErrorFeedback` | u + lambda D (u - u of the update before), D the delay of the update in updates: 0 for the first, for it has none before it | a step of the optimistic gradient method |
//! | `Nesterov` | (1-c) u + c a with a = c a + (1-c) u: then w is x + c (x - x of the update before), where x is what x = w - (1-c) u makes of it, without decay | Ajanthan et al. 2025 (arXiv 2505.01099) |
//! | `PipeMare`, anneal | u with lr / max(1, D)^(1 - min(t/anneal, 1)) for lr, t from 0 and D the stage's mean delay | Yang et al. 2021 (arXiv 1910.05124), technique 1 |
//! | `DelayCompensation` | u of g + lambda g² (w - w_f) for g, elementwise and for each micro-batch before gradients are summed, w_f the version that its forward pass read. Where gradients have no delay there is nothing of this | Zheng et al. 2017 (arXiv 1609.08326) |
//! | `Prediction` | u; the forward pass reads w - F u, a copy that the update writes beside w, F the stage's mean drift or what the spec gives. Where there is no drift there is nothing of this | Chen et al. 2018 (arXiv 1809.02839), with any optimizer's own step for the momentum |
//! | `PipeMare`, discrepancy | u; d = c d + (1-c) (what w has changed by), c = discrepancy^(1/F), F the stage's mean drift; the backward pass reads w - F d. Where F is 0 there is nothing of this | the same, technique 2 |
//!
//! `NAdam` looks ahead along its own momentum: under `Nesterov` its b1 is c, and there is no a.
//!
//! b1, b2, b3 decay an average and weigh its newest term by one minus themselves.

use serde::{Deserialize, Serialize};

/// Floats of one hyper-parameter vector: 64 bytes. The kernels of an update read, by index:
///
/// | index | value |
/// |---|---|
/// | 0, 1 | b1 (`Sgd`, `Signum`: momentum), 1-b1 |
/// | 2, 3 | b2, 1-b2 |
/// | 4 | 1/(1-b2^t), what corrects v; `Adan`: 1/(1-b3^t) |
/// | 5 | eps |
/// | 6 | step along m (`Lion`, `Signum`: along the sign): lr with what corrects m, e.g. lr/(1-b1^t) |
/// | 7 | what remains of w: 1 - lr decay, or 1/(1 + lr decay) |
/// | 8 | step along g (`NAdam`) or along d (`Adan`); `Mars`: gamma b1/(1-b1); `Soap`: 1 at the first update, then 0 |
/// | 9, 10 | b3, 1-b3; `Soap`: b2, 1-b2 of L and R |
/// | 11 | 0 at the first update, then 1; `Soap`: how often the bases turn after this update |
/// | 12 | lambda D of `ErrorFeedback`; lambda of `DelayCompensation`; c of `Nesterov`, and of `PipeMare` |
/// | 13 | 1-c of the same |
/// | 14 | F of `PipeMare` and of `Prediction` |
///
/// Those that an optimizer does not use are 0. At `Soap`'s first update 0 to 3 and 6 are 0, and 7 is 1.
pub const HYPER_LEN: usize = 16;
/// Index of what remains of w, the one entry that differs between parameters with and without decay.
pub const HYPER_KEPT: usize = 7;
/// Index of the first of a correction's factors.
pub const HYPER_CORRECTION: usize = 12;
/// Turns of `Soap`'s bases at its first update.
pub const FIRST_TURNS: u32 = 10;

/// An optimizer and its constants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimizer {
    #[serde(rename = "adamw")]
    AdamW {
        beta1: f64,
        beta2: f64,
        eps: f64,
        decay: f64,
    },
    Sgd {
        momentum: f64,
        decay: f64,
    },
    Lion {
        beta1: f64,
        beta2: f64,
        decay: f64,
    },
    Signum {
        momentum: f64,
        decay: f64,
    },
    #[serde(rename = "nadam")]
    NAdam {
        beta1: f64,
        beta2: f64,
        eps: f64,
        momentum_decay: f64,
        decay: f64,
    },
    Adan {
        beta1: f64,
        beta2: f64,
        beta3: f64,
        eps: f64,
        decay: f64,
    },
    Muon {
        momentum: f64,
        decay: f64,
    },
    #[serde(rename = "normuon")]
    NorMuon {
        momentum: f64,
        beta2: f64,
        decay: f64,
    },
    Mars {
        beta1: f64,
        beta2: f64,
        eps: f64,
        gamma: f64,
        decay: f64,
    },
    Soap {
        beta1: f64,
        beta2: f64,
        eps: f64,
        /// Updates from one turn of the bases to the next; at least 1.
        frequency: u64,
        max_dim: u32,
        decay: f64,
    },
}

impl Optimizer {
    pub fn kind(&self) -> OptimizerKind {
        match self {
            Optimizer::AdamW { .. } => OptimizerKind::AdamW,
            Optimizer::Sgd { .. } => OptimizerKind::Sgd,
            Optimizer::Lion { .. } => OptimizerKind::Lion,
            Optimizer::Signum { .. } => OptimizerKind::Signum,
            Optimizer::NAdam { .. } => OptimizerKind::NAdam,
            Optimizer::Adan { .. } => OptimizerKind::Adan,
            Optimizer::Muon { .. } => OptimizerKind::Muon,
            Optimizer::NorMuon { .. } => OptimizerKind::NorMuon,
            Optimizer::Mars { .. } => OptimizerKind::Mars,
            Optimizer::Soap { max_dim, .. } => OptimizerKind::Soap { max_dim: *max_dim },
        }
    }
}

/// What decides an update's kernels and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerKind {
    AdamW,
    Sgd,
    Lion,
    Signum,
    NAdam,
    Adan,
    Muon,
    NorMuon,
    Mars,
    /// `max_dim`: longer sides are not rotated.
    Soap {
        max_dim: u32,
    },
}

impl OptimizerKind {
    /// Those that end in different elementwise steps.
    pub const STEPS: [OptimizerKind; 7] = [
        OptimizerKind::AdamW,
        OptimizerKind::Sgd,
        OptimizerKind::Lion,
        OptimizerKind::Signum,
        OptimizerKind::NAdam,
        OptimizerKind::Adan,
        OptimizerKind::Muon,
    ];

    /// As in specs and in kernels' names.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::AdamW => "adamw",
            OptimizerKind::Sgd => "sgd",
            OptimizerKind::Lion => "lion",
            OptimizerKind::Signum => "signum",
            OptimizerKind::NAdam => "nadam",
            OptimizerKind::Adan => "adan",
            OptimizerKind::Muon => "muon",
            OptimizerKind::NorMuon => "normuon",
            OptimizerKind::Mars => "mars",
            OptimizerKind::Soap { .. } => "soap",
        }
    }

    /// The optimizer whose elementwise step ends this one's update: this one, unless a gradient is prepared for another's step.
    /// `Muon`'s subtracts lr times what it is given.
    pub fn step(self) -> OptimizerKind {
        match self {
            OptimizerKind::NorMuon | OptimizerKind::Soap { .. } => OptimizerKind::Muon,
            OptimizerKind::Mars => OptimizerKind::AdamW,
            other => other,
        }
    }

    /// Why the update can't be one elementwise step in the kernel that makes the gradient; none if it can.
    pub fn unfused(self) -> Option<&'static str> {
        match self {
            OptimizerKind::Muon => Some("Muon multiplies the whole momentum with itself"),
            OptimizerKind::NorMuon => Some("NorMuon multiplies the whole momentum with itself"),
            OptimizerKind::Mars => Some("MARS needs the norm of the whole gradient"),
            OptimizerKind::Soap { .. } => Some("SOAP rotates the whole gradient"),
            _ => None,
        }
    }

    /// Buffers that prepare a gradient for the step, with their elements; `shape` is the weight's. `Mars` keeps the gradient before; `Soap` L and Q of each
    /// side that is rotated (see [`OptimizerKind::rotates`]), the rows' first.
    pub fn prepared(self, shape: &[u64]) -> Vec<(&'static str, u64)> {
        let len = shape.iter().product();
        match self {
            OptimizerKind::Muon => vec![("momentum", len)],
            OptimizerKind::NorMuon => vec![("momentum", len), ("moment", *shape.last().unwrap_or(&1))],
            OptimizerKind::Mars => vec![("before", len)],
            OptimizerKind::Soap { .. } => {
                let sides = shape.iter().zip([["left", "left_basis"], ["right", "right_basis"]]);
                let rotated = sides.zip(self.rotates(shape)).filter(|(_, rotated)| *rotated);
                let squares = rotated.flat_map(|((dim, names), _)| names.map(|name| (name, dim * dim)));
                [("m", len), ("v", len)].into_iter().chain(squares).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the rows, and whether the columns, of a weight of `shape` get a basis of their own.
    pub fn rotates(self, shape: &[u64]) -> [bool; 2] {
        let OptimizerKind::Soap { max_dim } = self else { return [false; 2] };
        [0, 1].map(|side| shape.get(side).is_some_and(|&dim| dim <= u64::from(max_dim)))
    }

    /// States of the step, in the order of a parameter's buffers and of a kernel's operands; each has the weight's
    /// shape and is zero at the start. `diff` is d, `before` the negative of the last gradient.
    pub fn states(self) -> &'static [&'static str] {
        match self {
            OptimizerKind::Muon | OptimizerKind::NorMuon | OptimizerKind::Soap { .. } => &[],
            OptimizerKind::AdamW | OptimizerKind::NAdam | OptimizerKind::Mars => &["m", "v"],
            OptimizerKind::Sgd | OptimizerKind::Lion | OptimizerKind::Signum => &["m"],
            OptimizerKind::Adan => &["m", "diff", "v", "before"],
        }
    }
}

/// The whole rule of an update: the optimizer, and how its updates are corrected for their delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UpdateRule {
    pub kind: OptimizerKind,
    pub correction: Option<CorrectionKind>,
    pub writes: Writes,
}

/// Where an update puts the new weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writes {
    /// In the place of those that it reads.
    InPlace,
    /// Into another slot of their ring: those that it reads stay as they are.
    Next,
}

impl UpdateRule {
    pub const fn plain(kind: OptimizerKind) -> Self {
        UpdateRule { kind, correction: None, writes: Writes::InPlace }
    }

    /// The same, from the prepared gradient on: what [`OptimizerKind::step`] says. What a correction adds to gradients is in it by then.
    pub fn step(self) -> Self {
        let correction = self.correction.filter(|_| !self.compensates());
        UpdateRule { kind: self.kind.step(), correction, ..self }
    }

    /// All buffers beside a weight of `shape`, with their elements: what prepares the gradient, then the step's [`states`](Self::states).
    pub fn buffers(self, shape: &[u64]) -> Vec<(&'static str, u64)> {
        let len = shape.iter().product();
        self.kind.prepared(shape).into_iter().chain(self.states().into_iter().map(|name| (name, len))).collect()
    }

    /// The step's states: the optimizer's, then the correction's.
    pub fn states(self) -> Vec<&'static str> {
        let more = self.correction.map_or(&[][..], CorrectionKind::states);
        self.kind.states().iter().chain(more).copied().collect()
    }

    /// Whether gradients are corrected where they are made, by the difference between the weights now and those that the forward pass read.
    pub fn compensates(self) -> bool {
        self.correction == Some(CorrectionKind::DelayCompensation)
    }

    /// Whether the update writes a prediction beside the weights, for the forward pass to read.
    pub fn predicts(self) -> bool {
        self.correction == Some(CorrectionKind::Prediction)
    }

    /// Whether the backward pass reads the last of the states in the weights' place.
    pub fn reads_behind(self) -> bool {
        self.correction == Some(CorrectionKind::Discrepancy)
    }

    /// The rule on a stage whose backward passes do, or do not, meet newer weights than its forward passes.
    pub fn where_it_acts(self, drift: bool) -> Self {
        let for_drift = |c| c != CorrectionKind::ErrorFeedback && c != CorrectionKind::Nesterov;
        UpdateRule { correction: self.correction.filter(|&c| drift || !for_drift(c)), ..self }
    }

    /// As in kernels' names.
    pub fn name(self) -> String {
        let correction = self.correction.map_or("", CorrectionKind::suffix);
        let writes = match self.writes {
            Writes::InPlace => "",
            Writes::Next => "_next",
        };
        format!("{}{correction}{writes}", self.kind.name())
    }
}

/// A correction for the delay of gradients, with its constants; lists are by stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Correction {
    ErrorFeedback {
        lambda: f64,
        /// Of the stage's updates, in updates, once as many were made; proved, or given by the spec.
        delay: Vec<f64>,
    },
    Nesterov {
        momentum: Vec<f64>,
    },
    DelayCompensation {
        /// 0 on a stage whose gradients have no delay.
        lambda: Vec<f64>,
    },
    /// Of weights that are read under [`Policy::Predicted`](crate::stream::Policy::Predicted).
    Prediction {
        /// Updates that the copy is ahead; 0 on a stage without drift, which has none.
        ahead: Vec<f64>,
    },
    #[serde(rename = "pipemare")]
    PipeMare {
        /// Updates until learning rates are in full; none: they are from the start.
        anneal: Option<u64>,
        /// The proved mean.
        delay: Vec<f64>,
        /// What is left of an update in the mean change of the weights after as many as the drift; none: that is not kept.
        discrepancy: Option<f64>,
        /// The proved mean.
        drift: Vec<f64>,
    },
}

impl Correction {
    /// What it adds to an update with this optimizer, if anything; see [`UpdateRule::where_it_acts`].
    pub fn kind(&self, optimizer: OptimizerKind) -> Option<CorrectionKind> {
        match self {
            Correction::ErrorFeedback { .. } => Some(CorrectionKind::ErrorFeedback),
            Correction::Nesterov { .. } if optimizer == OptimizerKind::NAdam => None,
            Correction::Nesterov { .. } => Some(CorrectionKind::Nesterov),
            Correction::DelayCompensation { .. } => Some(CorrectionKind::DelayCompensation),
            Correction::Prediction { .. } => Some(CorrectionKind::Prediction),
            Correction::PipeMare { discrepancy, .. } => discrepancy.map(|_| CorrectionKind::Discrepancy),
        }
    }

    /// Whether there is anything on a stage that a correction of its reads keeps or writes something for: drift, or delay.
    pub fn acts_on(&self, stage: usize) -> bool {
        let (Correction::PipeMare { drift: by_stage, .. }
        | Correction::Prediction { ahead: by_stage }
        | Correction::DelayCompensation { lambda: by_stage }) = self
        else {
            return false;
        };
        by_stage.get(stage).is_some_and(|&x| x > 0.0)
    }

    /// Lists by stage of what is corrected for, or how strongly.
    pub fn by_stage(&self) -> Vec<&[f64]> {
        match self {
            Correction::ErrorFeedback { delay: values, .. }
            | Correction::Nesterov { momentum: values }
            | Correction::DelayCompensation { lambda: values }
            | Correction::Prediction { ahead: values } => vec![values],
            Correction::PipeMare { delay, drift, .. } => vec![delay, drift],
        }
    }
}

/// What a correction adds to an update's kernels and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CorrectionKind {
    ErrorFeedback,
    Nesterov,
    Discrepancy,
    Prediction,
    DelayCompensation,
}

impl CorrectionKind {
    /// Buffers beside the optimizer's states, as [`OptimizerKind::states`]. `last` is the u of the update before, `ahead` is a, `delta` is d and
    /// `behind` w - F d, what the backward pass reads: the last of the states, and a copy of the weights at the start. A prediction is a second
    /// slot of the weights.
    pub fn states(self) -> &'static [&'static str] {
        match self {
            CorrectionKind::ErrorFeedback => &["last"],
            CorrectionKind::Nesterov => &["ahead"],
            CorrectionKind::Discrepancy => &["delta", "behind"],
            CorrectionKind::Prediction | CorrectionKind::DelayCompensation => &[],
        }
    }

    /// At the end of kernels' names.
    pub fn suffix(self) -> &'static str {
        match self {
            CorrectionKind::ErrorFeedback => "_ef",
            CorrectionKind::Nesterov => "_nesterov",
            CorrectionKind::Discrepancy => "_behind",
            CorrectionKind::Prediction => "_predicted",
            CorrectionKind::DelayCompensation => "_compensated",
        }
    }
}
