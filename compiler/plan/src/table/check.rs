//! What must hold of a table before it becomes a program.
//!
//! 1. Every stage has one row, every row a stage; stages count from 0 without gaps.
//! 2. No action is there twice.
//! 3. Every stage runs the same micro-batches, each forward once and backward once: whole, or input and weights.
//! 4. With sends and receives: each transfer between neighbours has both its sides, and there are no others.
//! 5. On a row, what an action needs comes before it: of its stage, and of a neighbouring stage on the same row.
//! 6. From one row to another, receives are in the order of sends.
//! 7. Updates, where there are some: each stage has all of them, each after the weight gradients of its K micro-batches
//!    and before any later one.

use super::{Action, Cell, Spot, Table, Verb};
use dsl::diag::Diagnostic;
use std::collections::{BTreeMap, HashMap};

/// Checks `rows`. None when something is wrong, which is reported.
pub fn check(mut rows: Vec<Vec<Cell>>, found: &mut Vec<Diagnostic>) -> Option<Table> {
    let before = found.len();
    let row_of_stage = homes(&rows, found)?;
    let sharded = rows.iter().flatten().any(|cell| cell.action.verb.is_sharding());
    let comms = sharded || rows.iter().flatten().any(|cell| cell.action.verb.is_transfer());
    sharding(&rows, found);
    rows.iter_mut().for_each(|row| row.retain(|cell| !cell.action.verb.is_sharding()));
    let spots = unique(&rows, found)?;
    let numbers = |update: bool| {
        let of = rows.iter().flatten().filter(move |cell| (cell.action.verb == Verb::U) == update);
        of.max_by_key(|cell| cell.action.number)
    };
    let most = numbers(false)?;
    let microbatches = most.action.number.checked_add(1).or_else(|| {
        found.push(Diagnostic::error(
            "P0601",
            most.spot.span.clone(),
            format!("{}: the number is too large", most.spot),
        ));
        None
    })?;
    let updates = numbers(true).map(|last| last.action.number.saturating_add(1));
    let table = Table { rows, row_of_stage, microbatches, updates, comms, spots };
    let checks: [fn(&Table, &mut Vec<Diagnostic>); 5] = [coverage, transfers, all_updates, order, sequences];
    for check in checks {
        check(&table, found);
        if found[before..].iter().any(Diagnostic::is_error) {
            return None;
        }
    }
    descending(&table, found);
    early_receive(&table, found);
    Some(table)
}

/// Lint for a receive between what is made and its send: the first of the table.
fn early_receive(table: &Table, found: &mut Vec<Diagnostic>) {
    for row in &table.rows {
        let mut receive: Option<&Cell> = None;
        for cell in row {
            match cell.action.verb {
                Verb::RecvF | Verb::RecvB => receive = receive.or(Some(cell)),
                Verb::SendF | Verb::SendB => {
                    let Some(receive) = receive else { continue };
                    let message = format!("{}: {} stands before a send that is ready", receive.spot, receive.action);
                    found.push(
                        Diagnostic::lint("P0623", receive.spot.span.clone(), message)
                            .and_at(cell.spot.span.clone(), format!("{} is at {}", cell.action, cell.spot))
                            .note("where transfers of a rank run one after another, the send waits until the receive is matched; here a posted receive holds nothing up")
                            .help("put each send right after the action that makes what it sends"),
                    );
                    return;
                }
                Verb::Unshard | Verb::Reshard | Verb::ReduceGrad => {}
                _ => receive = None,
            }
        }
    }
}

/// Lint for sums of gradients in another order than that of the micro-batches: the first of the table.
fn descending(table: &Table, found: &mut Vec<Diagnostic>) {
    for row in &table.rows {
        let mut last: HashMap<u32, &Cell> = HashMap::new();
        for cell in row.iter().filter(|cell| matches!(cell.action.verb, Verb::B | Verb::W)) {
            let before = last.insert(cell.action.stage, cell);
            let Some(before) = before.filter(|before| before.action.number > cell.action.number) else { continue };
            let message = format!(
                "{}: {} after {}: gradients are summed in another order",
                cell.spot, cell.action, before.action
            );
            found.push(
                Diagnostic::lint("P0622", cell.spot.span.clone(), message)
                    .and_at(before.spot.span.clone(), format!("{} is at {}", before.action, before.spot))
                    .help("losses are then equal to those of other schedules up to rounding, not to the bit; run weight gradients in ascending order for that"),
            );
            return;
        }
    }
}

fn error(code: &'static str, spot: &Spot, message: impl std::fmt::Display) -> Diagnostic {
    Diagnostic::error(code, spot.span.clone(), format!("{spot}: {message}"))
}

/// By stage: its row.
fn homes(rows: &[Vec<Cell>], found: &mut Vec<Diagnostic>) -> Option<Vec<usize>> {
    let before = found.len();
    let mut homes: BTreeMap<u32, &Cell> = BTreeMap::new();
    for cell in rows.iter().flatten() {
        let home = *homes.entry(cell.action.stage).or_insert(cell);
        if home.spot.row != cell.spot.row {
            let message = format!("stage {} is also on row {}", cell.action.stage, home.spot.row + 1);
            found.push(
                error("P0604", &cell.spot, message)
                    .and_at(home.spot.span.clone(), format!("{} is at {}", home.action, home.spot))
                    .help("put all actions of a stage on the row of its rank; a send names the sending stage, a receive the receiving one"),
            );
        }
    }
    let gap = homes.iter().zip(0..).find(|((stage, _), expected)| *stage != expected);
    if let Some(((stage, cell), missing)) = gap {
        let message = format!("there is a stage {stage}, but no stage {missing}");
        found.push(error("P0605", &cell.spot, message).help("number the stages from 0 without gaps"));
    }
    for (row, cells) in rows.iter().enumerate() {
        if cells.is_empty() {
            let fault = Diagnostic::error("P0605", 0..0, format!("row {} runs nothing", row + 1));
            found.push(fault.help("each row is a rank with a stage: remove the row"));
        }
    }
    (found.len() == before).then(|| homes.values().map(|cell| cell.spot.row).collect())
}

/// Lints for dropped actions that mean something.
fn sharding(rows: &[Vec<Cell>], found: &mut Vec<Diagnostic>) {
    let later = |row: &[Cell], at: usize, of: &dyn Fn(Verb) -> bool| {
        let stage = row[at].action.stage;
        row[at..].iter().any(|cell| cell.action.stage == stage && of(cell.action.verb))
    };
    let first = |verb: Verb, of: &dyn Fn(Verb) -> bool| {
        rows.iter().find_map(|row| {
            let at = (0..row.len()).find(|at| row[*at].action.verb == verb && later(row, *at, of))?;
            Some(row[at].clone())
        })
    };
    if let Some(cell) = first(Verb::Reshard, &|verb| verb == Verb::Unshard) {
        let message = format!("{}: weights stay whole between RESHARD and UNSHARD", cell.spot);
        let lint = Diagnostic::lint("P0621", cell.spot.span, message);
        found.push(lint.help("both are dropped: the memory that is planned holds all weights of a rank all the time"));
    }
    if let Some(cell) = first(Verb::ReduceGrad, &|verb| matches!(verb, Verb::B | Verb::W)) {
        let message = format!("{}: gradients are not reduced before the stage's last one", cell.spot);
        let lint = Diagnostic::lint("P0621", cell.spot.span, message);
        found.push(lint.help("REDUCE_GRAD is dropped: gradients are summed and scaled once, at the update"));
    }
}

fn unique(rows: &[Vec<Cell>], found: &mut Vec<Diagnostic>) -> Option<HashMap<Action, Spot>> {
    let before = found.len();
    let mut spots: HashMap<Action, Spot> = HashMap::new();
    for cell in rows.iter().flatten() {
        match spots.get(&cell.action) {
            None => {
                spots.insert(cell.action, cell.spot.clone());
            }
            Some(first) => found.push(
                error("P0603", &cell.spot, format!("{} is there twice", cell.action))
                    .and_at(first.span.clone(), format!("the first is at {first}"))
                    .help("remove one of them"),
            ),
        }
    }
    (found.len() == before).then_some(spots)
}

impl Table {
    pub(super) fn spot(&self, stage: u32, verb: Verb, number: u32) -> Option<&Spot> {
        self.spots.get(&Action { stage, verb, number })
    }

    fn stages(&self) -> std::ops::Range<u32> {
        0..self.row_of_stage.len() as u32
    }

    /// Whether the stages lie on different ranks and both exist, so that something goes between them.
    fn linked(&self, a: u32, b: u32) -> bool {
        match (self.row_of_stage.get(a as usize), self.row_of_stage.get(b as usize)) {
            (Some(a), Some(b)) => a != b,
            _ => false,
        }
    }
}

/// What is not there: `have` is, and needs it.
fn missing(have: &Cell, what: &str, help: &'static str) -> Diagnostic {
    error("P0605", &have.spot, format!("{} has no {what}", have.action)).help(help)
}

fn coverage(table: &Table, found: &mut Vec<Diagnostic>) {
    let has = |stage, verb, number| table.spot(stage, verb, number).is_some();
    for stage in table.stages() {
        // Every micro-batch below M is missing or a cell of the table, so this ends soon whatever M is.
        let Some(mb) = (0..table.microbatches).find(|mb| !has(stage, Verb::F, *mb)) else { continue };
        let other = table.rows.iter().flatten().find(|cell| cell.action.number == mb && cell.action.verb != Verb::U);
        let last = || table.rows.iter().flatten().max_by_key(|cell| cell.action.number);
        let Some(cell) = other.or_else(last) else { continue };
        let message = format!("stage {stage} never runs F of micro-batch {mb}, but {} is here", cell.action);
        found.push(error("P0605", &cell.spot, message).help("every stage runs every micro-batch, counted from 0"));
    }
    for cell in table.rows.iter().flatten() {
        let Action { stage, verb, number } = cell.action;
        let (b, i, w) = (has(stage, Verb::B, number), has(stage, Verb::I, number), has(stage, Verb::W, number));
        let whole = "B is the whole backward pass: leave out I and W, or B";
        let halves = "a split backward pass is I and W, both once";
        match verb {
            Verb::F if !b && !i && !w => found.push(missing(cell, "backward pass", "add B, or I and W")),
            Verb::I | Verb::W if b => {
                let message = format!("{} and {stage}B{number} are both there", cell.action);
                found.push(error("P0603", &cell.spot, message).help(whole));
            }
            Verb::I if !w => found.push(missing(cell, "W", halves)),
            Verb::W if !i => found.push(missing(cell, "I", halves)),
            _ => {}
        }
    }
}

/// What goes with a transfer: the other stage, and the other side.
fn partner(action: Action) -> Option<(Option<u32>, Verb)> {
    let (up, down) = (action.stage.checked_add(1), action.stage.checked_sub(1));
    match action.verb {
        Verb::SendF => Some((up, Verb::RecvF)),
        Verb::RecvF => Some((down, Verb::SendF)),
        Verb::SendB => Some((down, Verb::RecvB)),
        Verb::RecvB => Some((up, Verb::SendB)),
        _ => None,
    }
}

fn transfers(table: &Table, found: &mut Vec<Diagnostic>) {
    if !table.comms {
        return;
    }
    for cell in table.rows.iter().flatten() {
        let Action { stage, verb, number } = cell.action;
        if let Some((other, side)) = partner(cell.action) {
            match other.filter(|other| table.linked(stage, *other)) {
                None => found.push(
                    error(
                        "P0605",
                        &cell.spot,
                        format!("{} has no other side: there is no such neighbour", cell.action),
                    )
                    .help("the first stage sends no gradient, the last no activations"),
                ),
                Some(other) if table.spot(other, side, number).is_none() => {
                    let what = Action { stage: other, verb: side, number };
                    found.push(missing(cell, &what.to_string(), "add it on the other stage's row, or remove this one"));
                }
                Some(_) => {}
            }
        }
        let needed = match verb {
            Verb::F => [(stage.checked_sub(1), Verb::RecvF), (stage.checked_add(1), Verb::SendF)],
            Verb::B | Verb::I => [(stage.checked_add(1), Verb::RecvB), (stage.checked_sub(1), Verb::SendB)],
            _ => continue,
        };
        for (other, verb) in needed {
            let linked = other.is_some_and(|other| table.linked(stage, other));
            if linked && table.spot(stage, verb, number).is_none() {
                let what = Action { stage, verb, number };
                found.push(missing(cell, &what.to_string(), "add it, or leave all sends and receives to Paceline"));
            }
        }
    }
}

fn all_updates(table: &Table, found: &mut Vec<Diagnostic>) {
    let Some(updates) = table.updates else { return };
    let cells = || table.rows.iter().flatten().filter(|cell| cell.action.verb == Verb::U);
    let last = || cells().max_by_key(|cell| cell.action.number);
    for stage in table.stages() {
        let absent = (0..updates).find(|update| table.spot(stage, Verb::U, *update).is_none());
        if let (Some(update), Some(cell)) = (absent, last()) {
            let message = format!("stage {stage} never makes update {update}, but {} is here", cell.action);
            found.push(error("P0610", &cell.spot, message).help("every stage makes every update, counted from 0"));
        }
    }
    if let Some(cell) = last().filter(|_| table.microbatches % updates != 0) {
        let message = format!("{} micro-batches are not a multiple of {updates} updates", table.microbatches);
        let help = "every update takes the gradients of equally many micro-batches";
        found.push(error("P0610", &cell.spot, message).help(help));
    }
}

fn order(table: &Table, found: &mut Vec<Diagnostic>) {
    let k = table.accumulate();
    let mut wrong = |needed: Action, needs: Action| {
        let (Some(a), Some(b)) = (table.spots.get(&needed), table.spots.get(&needs)) else { return };
        if a.row != b.row || a.column < b.column || (a.column == b.column && !table.swapped(needed, needs)) {
            return;
        }
        found.push(
            error("P0606", b, format!("{needs} comes before {needed}"))
                .and_at(a.span.clone(), format!("{needed} is at {a}"))
                .help(format!("move {needed} before {needs}")),
        );
    };
    for stage in table.stages() {
        for number in 0..table.microbatches {
            let at = |verb| Action { stage, verb, number };
            let backward = at(table.backward(stage, number));
            wrong(at(Verb::F), backward);
            wrong(at(Verb::I), at(Verb::W));
            wrong(at(Verb::RecvF), at(Verb::F));
            wrong(at(Verb::F), at(Verb::SendF));
            wrong(at(Verb::RecvB), backward);
            wrong(backward, at(Verb::SendB));
            // Neighbours on one row hand over.
            wrong(at(Verb::F), Action { stage: stage + 1, ..at(Verb::F) });
            let next = table.backward(stage + 1, number);
            wrong(Action { stage: stage + 1, verb: next, number }, backward);
            if table.updates.is_some() {
                let weights = if backward.verb == Verb::B { backward } else { at(Verb::W) };
                let update = |number| Action { stage, verb: Verb::U, number };
                wrong(weights, update(number / k));
                if let Some(before) = (number / k).checked_sub(1) {
                    wrong(update(before), weights);
                }
            }
        }
    }
}

impl Table {
    /// What makes the stage's input gradient.
    fn backward(&self, stage: u32, number: u32) -> Verb {
        if self.spot(stage, Verb::B, number).is_some() { Verb::B } else { Verb::I }
    }

    /// Whether two actions of one cell are written in the wrong order.
    fn swapped(&self, first: Action, then: Action) -> bool {
        let row = &self.rows[self.row_of_stage[first.stage as usize]];
        let at = |action: Action| row.iter().position(|cell| cell.action == action);
        at(first) > at(then)
    }
}

/// Cells of the sends (or receives) between two rows, with what they transfer: lower stage, direction, micro-batch.
type Sequence<'a> = Vec<(&'a Cell, (u32, bool, u32))>;

fn sequences(table: &Table, found: &mut Vec<Diagnostic>) {
    let mut pairs: BTreeMap<(usize, usize), [Sequence; 2]> = BTreeMap::new();
    for cell in table.rows.iter().flatten() {
        let Some((Some(other), _)) = partner(cell.action) else { continue };
        let Action { stage, verb, number } = cell.action;
        let (here, there) = (cell.spot.row, table.row_of_stage[other as usize]);
        let send = matches!(verb, Verb::SendF | Verb::SendB);
        let forward = matches!(verb, Verb::SendF | Verb::RecvF);
        let pair = pairs.entry(if send { (here, there) } else { (there, here) }).or_default();
        pair[usize::from(!send)].push((cell, (stage.min(other), forward, number)));
    }
    for [sends, receives] in pairs.values() {
        let differ = sends.iter().zip(receives).find(|(send, receive)| send.1 != receive.1);
        if let Some(((send, _), (receive, _))) = differ {
            let message = format!("{} is received where {} is sent", receive.action, send.action);
            found.push(
                error("P0607", &receive.spot, message)
                    .and_at(send.spot.span.clone(), format!("{} is at {}", send.action, send.spot))
                    .note("transfers between two ranks carry no names: the first receive gets what was sent first")
                    .help("put sends and receives between two ranks in one order"),
            );
        }
    }
}
