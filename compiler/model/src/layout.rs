//! The memory of a rank: one arena, every buffer with its offset.
//!
//! # Regions
//!
//! The arena holds, one after the other, each for all stages of the rank:
//!
//! | region | holds | how often |
//! |---|---|---|
//! | weights | parameters as passes read them: those with a bf16 copy that copy | each version that is kept: ring `weights`; a prediction |
//! | optimizer | f32 weights that have a copy; the optimizers' states | once |
//! | gradients | accumulators; a parameter has none where its every gradient goes straight into a fused update; a tied table has one for each end | once |
//! | stash | saved activations, what I holds for W, and the version F saw; one slot's buffers lie together | ring `stash` |
//! | communication | received and sent activations and gradients | rings `recv_f`, `send_f`, `recv_b`, `send_b`; where stages hand over, the reader's ring only; the gradient of a tied table's other end on another rank |
//! | activations | token ids (ring `recv_f`) and target ids (once; ring `recv_f` where the backward pass runs the loss again); temporaries of F, B, I, W and U, by liveness, shared by all bodies | |
//! | workspace | hyper-parameters, a version word for each version of the weights, loss; the sums of a global norm; the scratch of the kernel that needs most | once |
//!
//! # Invariants
//!
//! 1. Every buffer is 64-byte aligned and lies within the arena.
//! 2. No two buffers overlap, except temporaries that are never live at once and the one scratch buffer.
//! 3. An operand's place has exactly the bytes that its kernel reads or writes.
//! 4. The regions' sizes sum to the total.
//!
//! [`crate::verify`] checks them on the result.

use crate::arena::{Bump, Interval, align, first_fit, one};
use crate::gpt::ParamDecl;
use crate::graph::{Elem, ParamId, ValueId};
use crate::operands::HYPER_BYTES;
use crate::rules::Rules;
use crate::stage::{Home, StagePlan};
use crate::update::{Arg, UpdatePlan};
use artifact::program::{Memory, Param, Place, Selector, StageIo};
use artifact::stream::RingSizes;
use std::collections::HashMap;

/// What the layout of a stage depends on.
pub struct StageInput<'a> {
    pub plan: &'a StagePlan,
    pub rings: RingSizes,
    pub rules: &'a Rules,
    pub update: &'a UpdatePlan,
    /// Whether an update has several micro-batches, or may have: gradients are then accumulated in memory.
    pub sums: bool,
    /// Index, among the rank's stages, of the stage before and the one after, where they are on this rank: the stage hands over to them.
    pub before: Option<usize>,
    pub after: Option<usize>,
    pub table: Option<Table>,
}

/// Where the ends of the tied table are, of which the stage has one at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Both in this stage.
    Whole,
    /// The other end is on another rank: each has a copy.
    Apart,
    /// This is the first stage, and the stage of this index among the rank's has the other end: it has the table from here.
    Lent(usize),
    /// This is the last stage, which has the table from the stage of this index among the rank's.
    Borrowed(usize),
}

impl StageInput<'_> {
    /// Index of the tied table among the parameters.
    fn table_index(&self) -> Option<usize> {
        self.plan.forward_graph.table.filter(|_| self.table.is_some()).map(ParamId::index)
    }

    /// Whether parameter `i` has no storage here.
    fn borrows(&self, i: usize) -> bool {
        matches!(self.table, Some(Table::Borrowed(_))) && self.table_index() == Some(i)
    }
}

/// Where everything of one stage is.
pub struct StageLayout {
    /// All that the stage reads; what it borrows has no gradient of its other end.
    pub params: Vec<Param>,
    /// Index of the parameter that another stage of the rank owns.
    pub borrowed: Option<usize>,
    pub io: StageIo,
    /// Where the output and the input gradient go: what is sent from, or the ring of the stage that it is handed over to.
    output: Option<Place>,
    input_gradient: Option<Place>,
    /// Activations and gradients, by value.
    places: HashMap<ValueId, Place>,
    /// Of [`UpdatePlan::temporaries`].
    pub update_temporaries: Vec<Place>,
}

/// Where everything of one rank is.
pub struct RankLayout {
    /// In the order of the input.
    pub stages: Vec<StageLayout>,
    /// Start of the scratch buffer, the last of the arena.
    pub scratch_offset: u64,
    memory: Memory,
}

impl RankLayout {
    /// The regions, once the largest scratch of the rank's kernels is known.
    pub fn memory(&self, scratch_bytes: u64) -> Memory {
        let scratch = align(scratch_bytes);
        let mut memory = self.memory;
        memory.workspace = memory.workspace.saturating_add(scratch);
        memory.total = self.scratch_offset.saturating_add(scratch);
        memory
    }
}

/// Lays out a rank.
pub fn layout(stages: &[StageInput]) -> RankLayout {
    let mut bump = Bump::default();
    let mut memory = Memory::default();
    let region = |bump: &Bump, start: &mut u64| std::mem::replace(start, bump.at).abs_diff(bump.at);
    let mut start = 0;
    let read: Vec<Vec<Place>> = stages.iter().map(|s| read(s, &mut bump)).collect();
    memory.weights = region(&bump, &mut start);
    let mut weights: Vec<Vec<Weight>> = stages.iter().zip(read).map(|(s, read)| weights(s, read, &mut bump)).collect();
    let mut states: Vec<Vec<Vec<Place>>> = stages.iter().map(|s| states(s, &mut bump)).collect();
    borrow(stages, &mut weights, &mut states);
    memory.optimizer = region(&bump, &mut start);
    let gradients: Vec<Vec<Option<Place>>> = stages.iter().map(|s| accumulators(s, &mut bump)).collect();
    let at = |s: &StageInput, table| s.table == Some(table);
    let mut others: Vec<Option<Place>> =
        stages.iter().map(|s| at(s, Table::Whole).then(|| table_gradient(s, &mut bump))).collect();
    memory.gradients = region(&bump, &mut start);
    let mut places: Vec<HashMap<ValueId, Place>> = vec![HashMap::new(); stages.len()];
    let seen: Vec<Place> = stages.iter().zip(&mut places).map(|(s, p)| stash(s, &mut bump, p)).collect();
    memory.stash = region(&bump, &mut start);
    let mut ios: Vec<Io> = stages.iter().map(|s| communication(s, &mut bump)).collect();
    for (stage, other) in stages.iter().zip(&mut others) {
        match stage.table {
            Some(Table::Apart) => *other = Some(table_gradient(stage, &mut bump)),
            Some(Table::Lent(to)) => *other = stages[to].table_index().and_then(|i| gradients[to][i]),
            _ => {}
        }
    }
    memory.communication = region(&bump, &mut start);
    stages.iter().zip(&mut ios).for_each(|(s, io)| ids(s, &mut bump, io));
    let shared = stages.iter().zip(&mut places).map(|(s, p)| temporaries(s, bump.at, p)).max().unwrap_or(0);
    let mut for_updates: Vec<(Vec<Place>, u64)> =
        stages.iter().map(|s| update_temporaries(s.update, bump.at)).collect();
    let shared = for_updates.iter().map(|u| u.1).fold(shared, u64::max);
    bump.at = bump.at.saturating_add(shared);
    memory.activations = region(&bump, &mut start);
    let words: Vec<Words> = stages.iter().map(|s| words(s, &mut bump)).collect();
    let sums = sums(stages, &mut bump);
    memory.workspace = region(&bump, &mut start);
    let mut laid_out = Vec::with_capacity(stages.len());
    for (i, stage) in stages.iter().enumerate() {
        let mut params = params(stage, &weights[i], &states[i], &gradients[i]);
        let table = stage.table_index();
        if let Some(at) = table {
            params[at].other_end = others[i];
        }
        let borrowed = table.filter(|at| stage.borrows(*at));
        let output = ios[i].send_f.or_else(|| ios[stage.after?].recv_f);
        let input_gradient = ios[i].send_b.or_else(|| ios[stage.before?].recv_b);
        let io = io(&ios[i], &words[i], sums[i], seen[i]);
        let update_temporaries = std::mem::take(&mut for_updates[i].0);
        let places = std::mem::take(&mut places[i]);
        laid_out.push(StageLayout { params, borrowed, io, output, input_gradient, places, update_temporaries });
    }
    RankLayout { stages: laid_out, scratch_offset: bump.at, memory }
}

impl StageLayout {
    /// The parameters that the stage owns.
    pub fn own_params(&self) -> Vec<Param> {
        let own = self.params.iter().enumerate().filter(|(i, _)| Some(*i) != self.borrowed);
        own.map(|(_, p)| p.clone()).collect()
    }

    /// Where a value is.
    pub fn place(&self, plan: &StagePlan, value: ValueId) -> Place {
        let io = &self.io;
        let fixed = match plan.homes[&value] {
            Home::Tokens => io.tokens,
            Home::Targets => io.targets,
            Home::Loss => io.loss,
            Home::RecvF => io.recv_f,
            Home::SendF => self.output,
            Home::RecvB => io.recv_b,
            Home::SendB => self.input_gradient,
            Home::Param(id) => Some(self.params[id.index()].weight),
            Home::Stash | Home::Temporary => self.places.get(&plan.root(value)).copied(),
        };
        fixed.expect("every value with a home has a place")
    }

    /// The hyper-parameter vector of a parameter.
    pub fn hyper(&self, param: &Param) -> Place {
        let vector = HYPER_BYTES * (2 * u64::from(param.group) + u64::from(!param.decay));
        one(self.io.hyper.offset.saturating_add(vector), HYPER_BYTES)
    }
}

/// What passes read of each parameter: the versions that are kept, or the weights and, where their rule has one, a prediction.
fn read(stage: &StageInput, bump: &mut Bump) -> Vec<Place> {
    let elem = |p: &ParamDecl| if p.copied { Elem::Bf16 } else { Elem::F32 };
    let place = |(i, p): (usize, &ParamDecl)| {
        if stage.borrows(i) {
            return one(0, 0);
        }
        if stage.rules.of(&p.name, &p.shape).rule.predicts() {
            return bump.ring(elem(p).bytes() * p.len(), 2).selected(Selector::Here);
        }
        bump.ring(elem(p).bytes() * p.len(), stage.rings.weights)
    };
    stage.plan.forward_graph.params.iter().enumerate().map(place).collect()
}

/// As large as the tied table, in f32.
fn table_gradient(stage: &StageInput, bump: &mut Bump) -> Place {
    let index = stage.table_index().expect("asked of stages with an end of the table");
    bump.place(4 * stage.plan.forward_graph.params[index].len())
}

/// Places of what stages have from others.
fn borrow(stages: &[StageInput], weights: &mut [Vec<Weight>], states: &mut [Vec<Vec<Place>>]) {
    for (borrower, stage) in stages.iter().enumerate() {
        let Some(Table::Borrowed(from)) = stage.table else { continue };
        if let (Some(own), Some(there)) = (stage.table_index(), stages[from].table_index()) {
            weights[borrower][own] = weights[from][there];
            states[borrower][own] = states[from][there].clone();
        }
    }
}

/// A weight, and its copy.
type Weight = (Place, Option<Place>);

/// By parameter; what is read is the weight itself, or a copy beside which it is placed.
fn weights(stage: &StageInput, read: Vec<Place>, bump: &mut Bump) -> Vec<Weight> {
    let params = stage.plan.forward_graph.params.iter().enumerate().zip(read);
    let beside = |i: usize, p: &ParamDecl| p.copied && !stage.borrows(i);
    let weight = |((i, p), read): ((usize, &ParamDecl), Place)| match beside(i, p) {
        true => (bump.place(4 * p.len()), Some(read)),
        false => (read, None),
    };
    params.map(weight).collect()
}

/// By parameter. All parameters' first states lie together, then all second ones.
fn states(stage: &StageInput, bump: &mut Bump) -> Vec<Vec<Place>> {
    let params = &stage.plan.forward_graph.params;
    let of = |p: &ParamDecl| stage.rules.of(&p.name, &p.shape).rule.buffers(&p.shape);
    let kept = |(i, p): (usize, &ParamDecl)| if stage.borrows(i) { Vec::new() } else { of(p) };
    let wanted: Vec<Vec<(&str, u64)>> = params.iter().enumerate().map(kept).collect();
    let mut placed = vec![Vec::new(); params.len()];
    for i in 0..wanted.iter().map(Vec::len).max().unwrap_or(0) {
        for (places, wanted) in placed.iter_mut().zip(&wanted) {
            places.extend(wanted.get(i).map(|&(_, len)| bump.place(4 * len)));
        }
    }
    placed
}

fn accumulators(stage: &StageInput, bump: &mut Bump) -> Vec<Option<Place>> {
    let params = stage.plan.forward_graph.params.iter().zip(&stage.update.unfused);
    let place =
        |(p, unfused): (&ParamDecl, &Option<&str>)| (stage.sums || unfused.is_some()).then(|| bump.place(4 * p.len()));
    params.map(place).collect()
}

fn params(stage: &StageInput, weights: &[Weight], states: &[Vec<Place>], gradients: &[Option<Place>]) -> Vec<Param> {
    let declared = stage.plan.forward_graph.params.iter().enumerate();
    let param = |(i, p): (usize, &ParamDecl)| Param {
        name: p.name.clone(),
        group: stage.rules.group(&p.name, &p.shape) as u32,
        shape: p.shape.clone(),
        init: p.init,
        decay: p.shape.len() >= 2,
        weight: weights[i].0,
        copy: weights[i].1,
        state: states[i].clone(),
        gradient: gradients[i],
        other_end: None,
        unfused: stage.update.unfused[i].map(str::to_owned),
    };
    declared.map(param).collect()
}

/// Places the stash; returns the ring of versions seen.
fn stash(stage: &StageInput, bump: &mut Bump, places: &mut HashMap<ValueId, Place>) -> Place {
    let slots = stage.rings.stash.max(1);
    let base = bump.at;
    let mut slot = Bump::default();
    let graph = &stage.plan.derivative.graph;
    let inner: Vec<(Option<ValueId>, Place)> = std::iter::once((None, slot.place(8)))
        .chain(stage.plan.stash.iter().map(|&v| (Some(v), slot.place(graph.value(v).bytes()))))
        .collect();
    let stride = if slots > 1 { slot.at } else { 0 };
    let mut seen = None;
    for (value, within) in inner {
        let place = Place { stride, slots, ..one(base.saturating_add(within.offset), within.bytes) };
        match value {
            Some(value) => _ = places.insert(value, place),
            None => seen = Some(place),
        }
    }
    bump.at = base.saturating_add(slot.at.saturating_mul(slots.into()));
    seen.expect("the version is the slot's first word")
}

#[derive(Default)]
struct Io {
    tokens: Option<Place>,
    targets: Option<Place>,
    recv_f: Option<Place>,
    send_f: Option<Place>,
    recv_b: Option<Place>,
    send_b: Option<Place>,
}

fn communication(stage: &StageInput, bump: &mut Bump) -> Io {
    let StageInput { plan, rings, .. } = stage;
    let graph = &plan.derivative.graph;
    let mut ring = |value: Option<ValueId>, slots| value.map(|v| bump.ring(graph.value(v).bytes(), slots));
    Io {
        recv_f: ring(plan.forward_graph.input, rings.recv_f),
        send_f: ring(plan.forward_graph.output.filter(|_| stage.after.is_none()), rings.send_f),
        recv_b: ring(plan.derivative.output_gradient, rings.recv_b),
        send_b: ring(plan.derivative.input_gradient.filter(|_| stage.before.is_none()), rings.send_b),
        ..Io::default()
    }
}

fn ids(stage: &StageInput, bump: &mut Bump, io: &mut Io) {
    let bytes = 4 * stage.plan.forward_graph.graph.rows();
    io.tokens = stage.plan.forward_graph.input.is_none().then(|| bump.ring(bytes, stage.rings.recv_f));
    // A backward pass that runs the loss again reads the targets again.
    let reads = stage.plan.backward.iter().flat_map(|step| &step.inputs).any(|v| stage.plan.homes[v] == Home::Targets);
    let slots = if reads { stage.rings.recv_f } else { 1 };
    io.targets = stage.plan.forward_graph.logits_gradient.is_some().then(|| bump.ring(bytes, slots));
}

/// Places the temporaries of a stage's bodies from `base` on; returns the bytes they take.
///
/// The backward pass is planned in the order of B. I and W are that order with steps left out, and no temporary of one is read by the
/// other, so what is apart in B is apart there.
fn temporaries(stage: &StageInput, base: u64, places: &mut HashMap<ValueId, Place>) -> u64 {
    let plan = stage.plan;
    let mut bytes = 0;
    for steps in [&plan.forward, &plan.backward] {
        let mut lives: Vec<(ValueId, Interval)> = Vec::new();
        let mut index: HashMap<ValueId, usize> = HashMap::new();
        for (at, step) in steps.iter().enumerate() {
            for value in step.operands().filter(|v| plan.homes[v] == Home::Temporary) {
                let value = plan.root(value);
                let i = *index.entry(value).or_insert_with(|| {
                    let bytes = plan.derivative.graph.value(value).bytes();
                    lives.push((value, Interval { first: at, last: at, bytes }));
                    lives.len() - 1
                });
                lives[i].1.last = at;
            }
        }
        let intervals: Vec<Interval> = lives.iter().map(|l| l.1).collect();
        let (offsets, total) = first_fit(&intervals);
        for ((value, life), offset) in lives.into_iter().zip(offsets) {
            places.insert(value, one(base.saturating_add(offset), life.bytes));
        }
        bytes = bytes.max(total);
    }
    bytes
}

/// Places the temporaries of a stage's update from `base` on; gives the bytes they take, too.
fn update_temporaries(update: &UpdatePlan, base: u64) -> (Vec<Place>, u64) {
    let mut lives: Vec<Interval> =
        update.temporaries.iter().map(|&bytes| Interval { first: usize::MAX, last: 0, bytes }).collect();
    for (at, step) in update.steps.iter().enumerate() {
        for arg in &step.args {
            if let Arg::Temporary(i) = *arg {
                (lives[i].first, lives[i].last) = (lives[i].first.min(at), at);
            }
        }
    }
    let (offsets, total) = first_fit(&lives);
    let place = |(life, offset): (&Interval, u64)| one(base.saturating_add(offset), life.bytes);
    (lives.iter().zip(offsets).map(place).collect(), total)
}

struct Words {
    hyper: Place,
    version: Place,
    loss: Option<Place>,
}

fn words(stage: &StageInput, bump: &mut Bump) -> Words {
    let last = stage.plan.forward_graph.logits_gradient.is_some();
    let version = |bump: &mut Bump| bump.ring(8, stage.rings.weights);
    let hyper = bump.place(2 * HYPER_BYTES * stage.rules.len() as u64);
    Words { hyper, version: version(bump), loss: last.then(|| bump.place(8)) }
}

/// By stage: where a global norm's sum and total are.
fn sums(stages: &[StageInput], bump: &mut Bump) -> Vec<Option<[Place; 2]>> {
    if stages.iter().all(|s| s.update.norm.is_empty()) {
        return vec![None; stages.len()];
    }
    let mut sums: Vec<Place> = Vec::with_capacity(stages.len());
    for stage in stages {
        sums.push(stage.before.map_or_else(|| bump.place(8), |before| sums[before]));
    }
    let mut totals = sums.clone();
    for (i, stage) in stages.iter().enumerate().rev() {
        let last = stage.plan.forward_graph.logits_gradient.is_some();
        totals[i] = match stage.after {
            Some(after) => totals[after],
            None if last => sums[i],
            None => bump.place(8),
        };
    }
    sums.into_iter().zip(totals).map(|(sum, total)| Some([sum, total])).collect()
}

fn io(io: &Io, words: &Words, sums: Option<[Place; 2]>, version_seen: Place) -> StageIo {
    StageIo {
        tokens: io.tokens,
        targets: io.targets,
        loss: words.loss,
        recv_f: io.recv_f,
        send_f: io.send_f,
        recv_b: io.recv_b,
        send_b: io.send_b,
        norm: sums.map(|[sum, _]| sum),
        total: sums.map(|[_, total]| total),
        hyper: words.hyper,
        version: words.version,
        version_seen,
    }
}
