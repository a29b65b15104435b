//! `paceline timeline FILE -o x.svg|.html|.json`.

use crate::cli::Timeline;
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::picture::scene::Scene;
use crate::picture::{drawing, page, trace};
use crate::render::{self, Source};
use crate::report::percent;
use dsl::diag::Diagnostic;

/// Most instructions of a picture that is asked for; more are too many for a browser.
const ACTIONS_MAX: u64 = 1 << 18;
/// Most of one whose length is left open.
const ACTIONS_SHOWN: u64 = 1 << 16;

enum Kind {
    Svg,
    Html,
    Json,
}

pub fn run(args: &Timeline) -> Result<(), Failure> {
    let kind = kind(args)?;
    let source = driver::read(&args.spec)?;
    let (analysed, found) = driver::analyse(&source, &args.spec)?;
    render::print(&source, &found);
    let analysed = drawable(analysed)?;
    let updates = updates(args, &analysed)?;
    let text = match kind {
        Kind::Svg => drawing(&analysed, updates),
        Kind::Html => page::page(&scenes(args, &source, (&analysed, &found), updates)?),
        Kind::Json => trace::trace(&scenes(args, &source, (&analysed, &found), updates)?),
    };
    std::fs::write(&args.output, text).map_err(|e| Failure::file("write", &args.output, e))?;
    driver::refuse_on_error(&found)
}

/// A sound schedule that misses a bound is drawn: the picture shows why.
fn drawable(analysed: Option<Analysed>) -> Result<Analysed, Failure> {
    analysed.filter(|a| !a.facts.ranks.is_empty()).ok_or(Failure::Refused)
}

fn kind(args: &Timeline) -> Result<Kind, Failure> {
    let kind = match args.output.extension().and_then(|e| e.to_str()) {
        Some("svg") => Kind::Svg,
        Some("html") => Kind::Html,
        Some("json") => Kind::Json,
        _ => {
            let text = format!("{}: name the picture x.svg, x.html or x.json", args.output.display());
            return Err(Failure::Usage(text));
        }
    };
    if matches!(kind, Kind::Svg) && args.with.is_some() {
        return Err(Failure::Usage(
            "--with: an SVG shows one schedule; write .html or .json to compare two".to_owned(),
        ));
    }
    Ok(kind)
}

/// Those asked for, or enough to see the start, the steady state and the end, as far as they fit.
fn updates(args: &Timeline, analysed: &Analysed) -> Result<u64, Failure> {
    let (ranks, accumulate) = (analysed.program.streams.len() as u64, u64::from(analysed.program.accumulate));
    let stages = analysed.program.rank_of_stage.len() as u64;
    let within = |actions: u64| (actions / (2 * stages * accumulate)).max(1);
    let most = within(ACTIONS_MAX);
    let Some(updates) = args.updates else {
        return Ok((3 * ranks).max(12).div_ceil(accumulate).max(2).min(within(ACTIONS_SHOWN)));
    };
    if !(1..=most).contains(&updates) {
        return Err(Failure::Usage(format!("--updates {updates}: a picture shows 1 to {most} updates of this spec")));
    }
    Ok(updates)
}

fn drawing(analysed: &Analysed, updates: u64) -> String {
    let ranks = analysed.program.streams.len();
    let events = plan::time::run(&analysed.program, &analysed.costs, updates);
    let spec = &analysed.spec;
    let worst = analysed.facts.ranks.iter().map(|r| r.bubble).fold(0.0, f64::max);
    let title = format!(
        "{}, {ranks} ranks, {} micro-batches an update, {updates} updates: steady bubble {}",
        spec.schedule.name,
        spec.pipeline.accumulate.value,
        percent(worst)
    );
    drawing::timeline(&title, ranks, &events).to_string()
}

/// The spec's schedule, and the one of `--with`, whose missed bounds are told on the page only.
fn scenes(
    args: &Timeline,
    source: &Source,
    (analysed, found): (&Analysed, &[Diagnostic]),
    updates: u64,
) -> Result<Vec<Scene>, Failure> {
    let mut scenes = vec![Scene::new(&source.name, analysed, found, updates)];
    if let Some(name) = &args.with {
        let mut with = args.spec.with_schedule(name, &analysed.spec);
        with.cost_of_ranks = analysed.search.is_some();
        let (second, found) = driver::analyse(source, &with)?;
        let second = drawable(second).inspect_err(|_| render::print(source, &found))?;
        scenes.push(Scene::new(&source.name, &second, &found, updates));
    }
    Ok(scenes)
}
