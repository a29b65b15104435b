//! Syntax tree to [`Spec`]: names looked up, units converted, defaults filled in, ranges checked.
//!
//! Every check reports and goes on, so that one pass finds all faults. A value that failed is `None` from then on, and
//! what depends on it is not reported again.

mod batch;
mod chunks;
mod correction;
mod cost;
mod cover;
mod device;
mod group;
mod model;
mod optimizer;
mod partition;
mod pipeline;
mod rate;
mod schedule;
mod search;
mod section;
mod set;
mod values;
mod variant;
mod weights;

pub use pipeline::recompute_of_split;
pub(crate) use schedule::lower;
pub use set::{Set, with_sets};

use crate::ast::{Block, Entry, File, Item};
use crate::diag::Diagnostic;
use crate::schedule::Schedule;
use crate::spec::{At, Machine, Model, Recompute, Spec, Staleness, Weights};
use crate::suggest::nearest;

/// Largest number of ranks.
const RANKS_MAX: u64 = 1024;
/// Largest number of micro-batches per update.
const ACCUMULATE_MAX: u64 = 16_384;
/// Most stages a rank.
const CHUNKS_MAX: u32 = 64;
/// Largest stages * accumulate: it bounds the size of a plan.
const GRID_MAX: u64 = 1 << 20;

/// Constructs of the language's design that this version has not: told apart from slips.
const ITEMS_LATER: [&str; 6] = ["search", "sequence", "prefer", "table", "data", "evaluate"];

/// The diagnostics so far.
#[derive(Default)]
pub(crate) struct Context {
    pub found: Vec<Diagnostic>,
}

impl Context {
    pub fn report(&mut self, found: Diagnostic) {
        self.found.push(found);
    }
}

/// Gives the specification of `file` with the overrides `sets`; none if there are errors.
pub fn resolve(file: &File, sets: &[Set]) -> (Option<Spec>, Vec<Diagnostic>) {
    let mut cx = Context::default();
    let mut file = file.clone();
    let origins = set::apply(&mut file, sets, &mut cx);
    let spec = spec(&mut cx, &file);
    set::note_origins(&mut cx.found, &origins);
    let spec = spec.filter(|_| !cx.found.iter().any(Diagnostic::is_error));
    (spec, cx.found)
}

/// The file's items, each at most once.
#[derive(Default)]
struct Items<'a> {
    model: Option<&'a Block>,
    machine: Option<&'a Block>,
    pipeline: Option<&'a Block>,
    staleness: Option<&'a Block>,
    require: Option<&'a Block>,
    optimizer: Option<&'a Entry>,
    schedules: Vec<Schedule>,
    /// Names of schedules with errors.
    broken: Vec<&'a str>,
}

fn spec(cx: &mut Context, file: &File) -> Option<Spec> {
    let items = gather(cx, file);
    for (keyword, missing, example) in [
        ("machine", items.machine.is_none(), "machine { ranks = 4 }"),
        ("pipeline", items.pipeline.is_none(), "pipeline { schedule = one_f_one_b, microbatch = 4, accumulate = 8 }"),
    ] {
        if missing && !file.broken {
            let found = Diagnostic::error("P0204", file.len..file.len, format!("the file has no `{keyword}` block"));
            cx.report(found.help(format!("add one, e.g. `{example}`")));
        }
    }
    let model = items.model.map(|block| model::model(cx, block));
    let chunks = items.pipeline.map_or(1, |block| pipeline::chunks(block, &items.schedules));
    let machine = items.machine.and_then(|block| model::machine(cx, block, model.as_ref().map(Option::as_ref), chunks));
    let outer = pipeline::Outer {
        model: model.as_ref().map(Option::as_ref),
        ranks: machine.as_ref().map(|m| &m.ranks),
        // A machine with errors may have had some.
        costs: machine.as_ref().is_none_or(|m| m.cost.is_some()),
        chunks,
        schedules: &items.schedules,
        broken: &items.broken,
    };
    let pipeline = items.pipeline.and_then(|block| pipeline::pipeline(cx, block, &outer));
    let staleness = pipeline::staleness(cx, items.staleness, pipeline.as_ref().map(|(_, schedule)| schedule));
    let optimizer = optimizer::optimizer(cx, items.optimizer);
    let require = pipeline::require(cx, items.require, model.is_some(), machine.as_ref().map(|m| &m.ranks));
    if let Some(staleness) = &staleness {
        let found = optimizer.iter().flat_map(|found| {
            let written = found.groups.iter().filter(|g| !g.implied).map(|g| &g.optimizer);
            written.chain([&found.optimizer])
        });
        correction::fits(cx, staleness, pipeline.as_ref().map(|(_, schedule)| schedule), found);
        if let Some(model) = model.as_ref().and_then(Option::as_ref) {
            correction::fits_elements(cx, staleness, model);
        }
        if let Some((pipeline, _)) = &pipeline {
            predicted(cx, staleness, &pipeline.recompute);
        }
    }
    let (pipeline, schedule) = pipeline?;
    let model = model.map(|found| found.map(|model| recomputed(model, pipeline.recompute.value)));
    let optimizer::Found { optimizer, learning_rate, groups, clip } = optimizer?;
    Some(Spec {
        model: match model {
            Some(found) => Some(found?),
            None => None,
        },
        machine: Machine { cost_of_ranks: pipeline.search.is_some(), ..machine? },
        pipeline,
        staleness: staleness?,
        optimizer,
        learning_rate,
        groups,
        clip,
        require: require?,
        schedule,
    })
}

/// Where a backward pass runs the forward pass again it would have to predict, too.
fn predicted(cx: &mut Context, staleness: &Staleness, recompute: &At<Recompute>) {
    if matches!(staleness.weights.value, Weights::Predict { .. }) && recompute.value == Recompute::Full {
        let instead = "use `recompute = attention`, which reads no weights, or `weights = current`";
        not_yet(cx, &recompute.span, "`recompute = full` under `weights = predict`", instead);
    }
}

/// A model that is estimated recomputes as `pipeline` says, unless its own key does.
fn recomputed(mut model: Model, recompute: Recompute) -> Model {
    if model.variant.recompute == Recompute::None {
        model.variant.recompute = recompute;
    }
    model
}

fn gather<'a>(cx: &mut Context, file: &'a File) -> Items<'a> {
    let mut items = Items::default();
    for item in &file.items {
        match item {
            Item::Block(block) => gather_block(cx, &mut items, block),
            Item::Entry(entry) if entry.key.text == "optimizer" => match items.optimizer {
                Some(first) => twice(cx, "optimizer", &entry.key.span, &first.key.span),
                None => items.optimizer = Some(entry),
            },
            Item::Entry(entry) if crate::parse::ITEMS.contains(&entry.key.text.as_str()) => {
                let keyword = &entry.key.text;
                let found = Diagnostic::error("P0212", entry.key.span.clone(), format!("`{keyword}` is a block"));
                cx.report(found.help(format!("write `{keyword} {{ … }}`")));
            }
            Item::Entry(entry) => unknown_item(cx, &entry.key),
            Item::Schedule(written) => match lower(cx, written, false) {
                Some(schedule) => add_schedule(cx, &mut items.schedules, schedule, &written.name),
                None => items.broken.push(&written.name.text),
            },
        }
    }
    items
}

fn gather_block<'a>(cx: &mut Context, items: &mut Items<'a>, block: &'a Block) {
    let keyword = block.keyword.text.as_str();
    let place = match keyword {
        "model" => &mut items.model,
        "machine" => &mut items.machine,
        "pipeline" => &mut items.pipeline,
        "staleness" => &mut items.staleness,
        "require" => &mut items.require,
        "optimizer" | "schedule" => {
            let form = if keyword == "optimizer" { "optimizer = adamw { … }" } else { "schedule NAME { … }" };
            let found = Diagnostic::error("P0212", block.keyword.span.clone(), format!("`{keyword}` is not a block"));
            return cx.report(found.help(format!("write `{form}`")));
        }
        _ => return unknown_item(cx, &block.keyword),
    };
    match place {
        Some(first) => twice(cx, keyword, &block.keyword.span, &first.keyword.span),
        None => *place = Some(block),
    }
    if let Some(name) = &block.name
        && keyword != "model"
    {
        let found = Diagnostic::error("P0212", name.span.clone(), format!("a `{keyword}` block has no name"));
        cx.report(found.help(format!("write `{keyword} {{ … }}`")));
    }
}

fn add_schedule(cx: &mut Context, schedules: &mut Vec<Schedule>, schedule: Schedule, name: &crate::ast::Name) {
    if let Some(first) = schedules.iter().find(|s| s.name == schedule.name) {
        let span = first.span.clone();
        return twice(cx, &format!("schedule {}", schedule.name), &name.span, &span);
    }
    if crate::library::source(&name.text).is_some() {
        let message = format!("the library has a schedule named `{}`", name.text);
        let found = Diagnostic::error("P0216", name.span.clone(), message);
        let found = found.note("a name means one thing: which of the two would run could not be seen at its use");
        cx.report(found.help(format!("choose another name, e.g. `my_{}`", name.text)));
    }
    schedules.push(schedule);
}

/// A second item or key where one may stand.
fn twice(cx: &mut Context, what: &str, span: &crate::diag::Span, first: &crate::diag::Span) {
    let found = Diagnostic::error("P0203", span.clone(), format!("`{what}` is given twice"));
    cx.report(found.and_at(first.clone(), "first here").help("keep one of them"));
}

fn unknown_item(cx: &mut Context, key: &crate::ast::Name) {
    if ITEMS_LATER.contains(&key.text.as_str()) {
        return not_yet(cx, &key.span, &format!("`{}`", key.text), "");
    }
    let found = Diagnostic::error("P0201", key.span.clone(), format!("there is no block `{}`", key.text));
    let items = crate::parse::ITEMS;
    cx.report(match nearest(&key.text, items) {
        Some(name) => found.help(format!("did you mean `{name}`?")),
        None => found.help(format!("a file has {}", crate::suggest::either(&items).replace(" or ", " and "))),
    });
}

/// Something of the design that is not built.
fn not_yet(cx: &mut Context, span: &crate::diag::Span, what: &str, instead: &str) {
    let found = Diagnostic::error("P0211", span.clone(), format!("{what} is not supported yet"));
    cx.report(if instead.is_empty() { found.help("leave it out") } else { found.help(instead) });
}
