//! `paceline timeline FILE -o x.svg`.

use crate::cli::Timeline;
use crate::driver;
use crate::failure::Failure;
use crate::picture;
use crate::report::percent;

pub fn run(args: &Timeline) -> Result<(), Failure> {
    if args.output.extension().is_none_or(|e| e != "svg") {
        return Err(Failure::Usage(format!("{}: the picture is an SVG; name it x.svg", args.output.display())));
    }
    let analysed = driver::accepted(&args.spec)?.1;
    let ranks = analysed.program.streams.len();
    let updates = args.updates.unwrap_or_else(|| updates_shown(ranks, analysed.program.accumulate));
    let events = plan::time::run(&analysed.program, &analysed.costs, updates);
    let spec = &analysed.spec;
    let worst = analysed.facts.ranks.iter().map(|r| r.bubble).fold(0.0, f64::max);
    let title = format!(
        "{}, {ranks} ranks, {} micro-batches an update, {updates} updates: steady bubble {}",
        spec.schedule.name,
        spec.pipeline.accumulate.value,
        percent(worst)
    );
    svg::save(&args.output, &picture::timeline(&title, ranks, &events))
        .map_err(|e| Failure::file("write", &args.output, e))
}

/// Enough to see the start, the steady state and the end.
fn updates_shown(ranks: usize, accumulate: u32) -> u64 {
    let microbatches = (3 * ranks as u64).max(12);
    microbatches.div_ceil(u64::from(accumulate)).max(2)
}
