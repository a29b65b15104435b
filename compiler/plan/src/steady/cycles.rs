//! How long a repetition takes by the slowest cycle of waits.
//!
//! # Meaning
//!
//! An instruction ends when the latest of those that it waits for has ended, plus costs. Each wait reaches back a fixed
//! number of repetitions (its *shift*; it may be negative when ranks' repetitions are skewed), so the instructions of
//! one period and their waits are a graph whose edges have a weight (time) and a shift. Times grow, in the long run, by
//! the largest ratio of weight to shift over the graph's cycles: a rank's own work is a cycle of shift 1, a chain
//! through other ranks and back another one. The ratio is found by policy iteration in integers: every instruction
//! picks the wait that decides, the cycles that this makes are evaluated, and picks are improved until none can be. A
//! cycle of shift 0 or less would be a deadlock, which `verify` excludes.

use crate::time::Costs;
use artifact::channel::{Channel, Waits, channels};
use artifact::stream::{Op, Program};
use artifact::verify::index::Kind;
use artifact::work;

/// Most improvements; policy iteration needs a few.
const ROUNDS_MAX: usize = 10_000;

/// The largest ratio, as a time and repetitions in lowest terms, and whether it is known to be the largest. None when
/// ranks wait for each other for ever, or the period is not whole.
pub fn slowest(program: &Program, costs: &Costs) -> Option<(u64, u64, bool)> {
    let graph = Graph::new(program, costs)?;
    let mut policy = Policy::new(&graph);
    let mut exact = false;
    for _ in 0..ROUNDS_MAX {
        policy.evaluate(&graph)?;
        if !policy.improve(&graph) {
            exact = true;
            break;
        }
    }
    let ratio = policy.ratios.iter().copied().max_by(|a, b| a.compare(*b))?;
    Some((u64::try_from(ratio.time).ok()?, u64::try_from(ratio.shift).ok()?, exact))
}

/// A wait for the end of instruction `from`, `shift` repetitions earlier.
#[derive(Clone, Copy, Debug)]
struct Edge {
    from: usize,
    time: i128,
    shift: i128,
}

/// The waits of each instruction of the period; the first one is that for the instruction before it on the rank.
struct Graph {
    waits: Vec<Vec<Edge>>,
}

impl Graph {
    fn new(program: &Program, costs: &Costs) -> Option<Graph> {
        // Every stream repeats with the same step.
        let step = program.streams.first()?.microbatches.max(1) as usize;
        let mut at = vec![None; program.rank_of_stage.len() * KINDS * step];
        let mut node = 0;
        for stream in &program.streams {
            for i in &stream.period {
                let residue = i.mb % stream.step(i.op).max(1);
                *at.get_mut(place(i.stage.index(), Kind::of(i.op), residue, step))? = Some((node, i.mb));
                node += 1;
            }
        }
        work::visit(2 * node);
        let finder = Finder { program, costs, channels: channels(program), waits: Waits::of(program), at, step };
        let mut waits = Vec::with_capacity(node);
        for stream in &program.streams {
            let begin = waits.len();
            for (position, i) in stream.period.iter().enumerate() {
                let time = i128::from(costs.of(i.op, i.stage));
                let before = match position {
                    0 => Edge { from: begin + stream.period.len() - 1, time, shift: 1 },
                    _ => Edge { from: begin + position - 1, time, shift: 0 },
                };
                let mut edges = vec![before];
                finder.transfers(i.op, i.stage.index(), i.mb, time, &mut edges)?;
                waits.push(edges);
            }
        }
        (!waits.is_empty()).then_some(Graph { waits })
    }
}

struct Finder<'a> {
    program: &'a Program,
    costs: &'a Costs,
    channels: Vec<Channel>,
    /// By stage.
    waits: Vec<Waits>,
    /// By [`place`]: the instruction's number and its micro-batch.
    at: Vec<Option<(usize, u32)>>,
    /// Micro-batches of a repetition.
    step: usize,
}

/// Kinds of instruction.
const KINDS: usize = Kind::ALL.len();

/// Where [`Finder::at`] has the instructions of a stage, by kind and residue; `step` is the largest number of residues.
fn place(stage: usize, kind: Kind, residue: u32, step: usize) -> usize {
    (stage * KINDS + kind as usize) * step + residue as usize
}

impl Finder<'_> {
    /// Adds an instruction's waits for transfers.
    fn transfers(&self, op: Op, s: usize, mb: u32, time: i128, edges: &mut Vec<Edge>) -> Option<()> {
        for wait in self.waits[s].before(op) {
            let Channel { from, to, freight } = self.channels[wait.channel()];
            let latency = if wait.arrives { self.costs.latency_ns(freight) } else { 0 };
            for side in [(from, Kind::of(freight.send())), (to, Kind::of(freight.receive()))] {
                edges.push(self.edge(side, mb, wait.back, time + i128::from(latency))?);
            }
        }
        Some(())
    }

    /// The wait of micro-batch `mb` for the instruction of `mb - back`.
    fn edge(&self, (stage, kind): (usize, Kind), mb: u32, back: u32, time: i128) -> Option<Edge> {
        let updates = self.step as i128 / i128::from(self.program.accumulate.max(1));
        let step = if kind.by_update() { updates.max(1) } else { self.step as i128 };
        let wanted = i128::from(mb) - i128::from(back);
        let (from, has) = (*self.at.get(place(stage, kind, wanted.rem_euclid(step) as u32, self.step))?)?;
        Some(Edge { from, time, shift: (i128::from(has) - wanted) / step })
    }
}

/// Time per repetition, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ratio {
    time: i128,
    shift: i128,
}

impl Ratio {
    fn new(time: i128, shift: i128) -> Ratio {
        let (mut a, mut b) = (time, shift);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Ratio { time: time / a.max(1), shift: shift / a.max(1) }
    }

    fn compare(self, other: Ratio) -> std::cmp::Ordering {
        (self.time * other.shift).cmp(&(other.time * self.shift))
    }

    /// How much later than by the ratio the edge's end is, in units of 1/shift.
    fn gain(self, edge: &Edge) -> i128 {
        edge.time * self.shift - self.time * edge.shift
    }
}

/// Repetitions that are timed for a first policy.
const TIMED: usize = 4;

/// The waits that decide after a few repetitions: most often those that decide for ever, so that little is left to
/// improve. None where a repetition waits for a later one.
fn first_picks(graph: &Graph) -> Option<Vec<usize>> {
    let count = graph.waits.len();
    let mut waiting = vec![0usize; count];
    let mut followers = vec![Vec::new(); count];
    for (node, edges) in graph.waits.iter().enumerate() {
        for edge in edges.iter().filter(|edge| edge.shift == 0) {
            waiting[node] += 1;
            followers[edge.from].push(node as u32);
        }
        if edges.iter().any(|edge| edge.shift < 0) {
            return None;
        }
    }
    let mut order: Vec<usize> = (0..count).filter(|node| waiting[*node] == 0).collect();
    let mut next = 0;
    while let Some(node) = order.get(next).copied() {
        next += 1;
        for follower in followers[node].iter().map(|f| *f as usize) {
            waiting[follower] -= 1;
            if waiting[follower] == 0 {
                order.push(follower);
            }
        }
    }
    if order.len() < count {
        return None;
    }
    let (mut ends, mut pick) = (vec![0i128; count], vec![0; count]);
    for _ in 0..TIMED {
        work::visit(count);
        let before = ends.clone();
        for node in &order {
            let end = |edge: &Edge| edge.time + if edge.shift == 0 { ends[edge.from] } else { before[edge.from] };
            let waits = graph.waits[*node].iter().map(end).enumerate();
            let (number, latest) = waits.rev().max_by_key(|(_, end)| *end).expect("a node waits for the one before");
            (pick[*node], ends[*node]) = (number, latest);
        }
    }
    Some(pick)
}

struct Policy {
    /// By instruction: which of its waits decides.
    pick: Vec<usize>,
    /// The ratio of the cycle that decides the instruction, and how much later than by that ratio it is.
    ratios: Vec<Ratio>,
    values: Vec<i128>,
}

impl Policy {
    fn new(graph: &Graph) -> Policy {
        let count = graph.waits.len();
        let pick = first_picks(graph).unwrap_or_else(|| vec![0; count]);
        Policy { pick, ratios: vec![Ratio { time: 0, shift: 1 }; count], values: vec![0; count] }
    }

    /// Follows the picks to their cycles. None at a cycle of no positive shift.
    fn evaluate(&mut self, graph: &Graph) -> Option<()> {
        const NEW: usize = usize::MAX;
        work::visit(graph.waits.len());
        let mut seen = vec![NEW; graph.waits.len()];
        for start in 0..graph.waits.len() {
            let mut path = Vec::new();
            let mut node = start;
            while seen[node] == NEW {
                seen[node] = start;
                path.push(node);
                node = graph.waits[node][self.pick[node]].from;
            }
            if seen[node] == start {
                let from = path.iter().position(|n| *n == node).expect("the walk came back to its own path");
                self.cycle(graph, &path[from..])?;
                // The first of a cycle keeps its value; the others follow from it.
                path.remove(from);
            }
            for node in path.into_iter().rev() {
                let edge = graph.waits[node][self.pick[node]];
                self.ratios[node] = self.ratios[edge.from];
                self.values[node] = self.values[edge.from] + self.ratios[node].gain(&edge);
            }
        }
        Some(())
    }

    fn cycle(&mut self, graph: &Graph, nodes: &[usize]) -> Option<()> {
        let edges = nodes.iter().map(|n| graph.waits[*n][self.pick[*n]]);
        let (time, shift) = edges.fold((0, 0), |(time, shift), e| (time + e.time, shift + e.shift));
        if shift <= 0 {
            return None;
        }
        self.ratios[nodes[0]] = Ratio::new(time, shift);
        Some(())
    }

    /// Picks waits that lead to a larger ratio, or if there are none, to a later end at the same one. Whether any
    /// changed.
    fn improve(&mut self, graph: &Graph) -> bool {
        let mut changed = false;
        work::visit(2 * graph.waits.len());
        for (node, edges) in graph.waits.iter().enumerate() {
            for (number, edge) in edges.iter().enumerate() {
                let chosen = graph.waits[node][self.pick[node]].from;
                if self.ratios[edge.from].compare(self.ratios[chosen]).is_gt() {
                    self.pick[node] = number;
                    changed = true;
                }
            }
        }
        if changed {
            return true;
        }
        for (node, edges) in graph.waits.iter().enumerate() {
            let mut best = self.values[node];
            for (number, edge) in edges.iter().enumerate() {
                let value = self.values[edge.from] + self.ratios[node].gain(edge);
                if self.ratios[edge.from] == self.ratios[node] && value > best {
                    (self.pick[node], best, changed) = (number, value, true);
                }
            }
        }
        changed
    }
}
