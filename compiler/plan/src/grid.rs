//! Streams as text: ranks as rows, time as columns.

use crate::time::{Costs, Timed, run, run_stuck};
use artifact::ids::{RankId, StageId};
use artifact::stream::{Instr, Op, Program};
use artifact::verify::execute::Waiting;
use artifact::verify::index::Kind;

/// Most columns that a grid shows.
const COLUMNS_MAX: usize = 240;
/// Most ranks and columns that a deadlock shows.
const STUCK_RANKS_MAX: usize = 8;
const STUCK_COLUMNS_MAX: usize = 32;

/// The instruction grid of a run that shows the prologue, as many periods as the first micro-batches need to get to the
/// last rank and back (at least one), and the epilogue. A column is the smallest cost. `|` stands where a rank's period
/// begins to repeat and where its epilogue (repetitions that skip some of these instructions) begins, `*` marks the
/// last weight gradient before an update, `-` goes on with what stands before it, `.` is idle. Where a rank has several
/// stages, `F1.3` is micro-batch 3 on the second of them.
pub fn grid(program: &Program, costs: &Costs) -> String {
    let repetition = u64::from(program.streams.first().map_or(1, |s| s.updates).max(1));
    let ranks = program.streams.len();
    let microbatches = program.streams.first().map_or(1, |s| s.microbatches).max(1) as usize;
    let complete = ranks.div_ceil(microbatches).max(1) as u64;
    let repetitions = (0..ranks).map(|r| incomplete(program, r, computes)).max().unwrap_or(0) + complete;
    let timed = run(program, costs, repetitions * repetition);
    let mut canvas = Canvas::new((0..ranks as u32).map(RankId).collect(), program, costs);
    let mut bar = vec![0; ranks];
    for event in &timed {
        let complete = repetitions - incomplete(program, event.rank.index(), computes);
        let part = u64::from(event.section > 0) + u64::from(event.section > complete);
        let begins = part > bar[event.rank.index()];
        bar[event.rank.index()] = bar[event.rank.index()].max(part);
        canvas.put(event, begins);
    }
    canvas.text(COLUMNS_MAX, false)
}

/// Repetitions at a run's end in which the rank skips some of the instructions `of`.
fn incomplete(program: &Program, rank: usize, of: fn(Op) -> bool) -> u64 {
    let stream = &program.streams[rank];
    let steps = |i: &Instr| u64::from(i.mb / stream.step(i.op).max(1));
    stream.period.iter().filter(|i| of(i.op)).map(steps).max().unwrap_or(0)
}

fn computes(op: Op) -> bool {
    !op.transfers()
}

/// What a rank performs in a run of `updates` updates from its first repetition with skipped instructions on, with
/// absolute micro-batches (absolute updates for `U`).
pub fn epilogue(program: &Program, rank: RankId, updates: u64) -> Vec<(Op, StageId, u64)> {
    let Some(stream) = program.streams.get(rank.index()) else { return Vec::new() };
    let repetitions = updates.div_ceil(u64::from(stream.updates.max(1)));
    let complete = repetitions.saturating_sub(incomplete(program, rank.index(), |_| true));
    let limit = updates.saturating_mul(u64::from(program.accumulate));
    let performed = |i: &&Instr| u64::from(i.mb) < if i.op.by_update() { updates } else { limit };
    let before = stream.prologue.iter().filter(performed).count() + complete as usize * stream.period.len();
    stream.segment(updates).skip(before).collect()
}

/// The grid of what ranks that wait for each other performed under unit costs, with what they wait to perform marked
/// `?`.
pub(crate) fn stuck(program: &Program, cycle: &[Waiting]) -> String {
    let costs = Costs::unit(program.rank_of_stage.len());
    let shown: Vec<RankId> = cycle.iter().map(|w| w.rank).take(STUCK_RANKS_MAX).collect();
    let mut canvas = Canvas::new(shown.clone(), program, &costs);
    run_stuck(program, &costs).iter().filter(|e| shown.contains(&e.rank)).for_each(|event| canvas.put(event, false));
    for waiting in cycle.iter().filter(|w| shown.contains(&w.rank)) {
        canvas.wait(waiting);
    }
    format!("what they ran before (`?` waits):\n{}", canvas.text(STUCK_COLUMNS_MAX, true))
}

#[derive(Clone, Default)]
struct Cell {
    text: String,
    bar: bool,
}

/// Rows of cells.
struct Canvas {
    ranks: Vec<RankId>,
    rows: Vec<Vec<Cell>>,
    column_ns: u64,
    /// By stage: what stands before the micro-batch, to tell a rank's stages apart.
    chunks: Vec<String>,
}

impl Canvas {
    fn new(mut ranks: Vec<RankId>, program: &Program, costs: &Costs) -> Self {
        let homes = &program.rank_of_stage;
        let several = homes.len() > program.streams.len();
        let chunk = |s: usize| homes[..s].iter().filter(|rank| **rank == homes[s]).count();
        let chunks = (0..homes.len()).map(|s| if several { format!("{}.", chunk(s)) } else { String::new() }).collect();
        ranks.sort_unstable();
        let all = costs.stages.iter().flat_map(|s| [s.f_ns, s.i_ns, s.w_ns]);
        let column_ns = all.filter(|ns| *ns > 0).min().unwrap_or(1);
        Canvas { rows: vec![Vec::new(); ranks.len()], ranks, column_ns, chunks }
    }

    fn row(&mut self, rank: RankId) -> &mut Vec<Cell> {
        let at = self.ranks.iter().position(|r| *r == rank).expect("only shown ranks are drawn");
        &mut self.rows[at]
    }

    fn put(&mut self, event: &Timed, bar: bool) {
        let (from, to) = (event.start_ns / self.column_ns, event.end_ns / self.column_ns);
        let text = format!("{}{}{}", Kind::of(event.op).name(), self.chunks[event.stage.index()], event.mb);
        let row = self.row(event.rank);
        if event.op == Op::U {
            if let Some(cell) = row.iter_mut().rev().find(|c| c.text.len() > 1) {
                // All of a rank's stages update here.
                if !cell.text.ends_with('*') {
                    cell.text.push('*');
                }
            }
            return;
        }
        if matches!(event.op, Op::N | Op::T) {
            return;
        }
        if to > COLUMNS_MAX as u64 * 16 {
            return;
        }
        row.resize(row.len().max(from as usize), Cell { text: ".".into(), bar: false });
        row.push(Cell { text, bar });
        row.resize(row.len().max(to as usize), Cell { text: "-".into(), bar: false });
    }

    fn wait(&mut self, waiting: &Waiting) {
        let longest = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let chunk = &self.chunks[waiting.stage.index()];
        let text = format!("{}{chunk}{}?", Kind::of(waiting.op).name(), waiting.mb);
        let row = self.row(waiting.rank);
        row.resize(longest, Cell { text: ".".into(), bar: false });
        row.push(Cell { text, bar: false });
    }

    /// At most `columns` of them: the first, or the last.
    fn text(&self, columns: usize, last: bool) -> String {
        let longest = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let range = match (longest > columns, last) {
            (false, _) => 0..longest,
            (true, false) => 0..columns,
            (true, true) => longest - columns..longest,
        };
        let shown = || self.rows.iter().flat_map(|row| row.iter().take(range.end).skip(range.start));
        let width = shown().map(|c| c.text.len()).max().unwrap_or(1);
        let digits = self.ranks.iter().max().map_or(1, |r| r.to_string().len());
        let mut text = String::new();
        for (rank, row) in self.ranks.iter().zip(&self.rows) {
            let mut line = format!("rank {rank:>digits$} ", rank = rank.0);
            for cell in row.iter().take(range.end).skip(range.start) {
                line.push(if cell.bar { '|' } else { ' ' });
                line.push_str(&format!("{:width$}", cell.text));
            }
            if row.len() > range.end {
                line.push_str(" …");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}
