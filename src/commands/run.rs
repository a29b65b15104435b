//! `paceline run FILE|BUNDLE`: trains, and compares what was proved with what happened.

use crate::cli::Run;
use crate::failure::Failure;
use crate::launch::{self, Launch};
use crate::output;
use crate::report::percent;
use artifact::bundle::Bundle;
use artifact::ids::RankId;
use artifact::program::Manifest;
use runtime::device::pipeline::DeviceOptions;
use runtime::member::Member;
use runtime::metrics::Metrics;
use runtime::progress::Progress;
use runtime::store::Store;
use runtime::{Inputs, Observer, RunError, RunOptions, StopFlag, Summary};
use std::sync::Arc;
use std::time::Duration;

pub fn run(args: &Run) -> Result<(), Failure> {
    let launch = launch::read(|name| std::env::var(name).ok()).map_err(Failure::Usage)?;
    let (bundle, inputs, mut options) = prepare(args)?;
    let last = bundle.manifest.program.rank_of_stage.last();
    let reports = launch.as_ref().is_none_or(|launch| Some(&RankId(launch.rank)) == last);
    let mut observers: Vec<Box<dyn Observer>> = Vec::new();
    if reports {
        observers.push(Box::new(Progress::stderr()));
    }
    if let Some(path) = args.metrics.as_ref().filter(|_| reports) {
        observers.push(Box::new(Metrics::create(path).map_err(|e| Failure::file("write", path, e))?));
    }
    match launch {
        // Ctrl-C ends such a process at once, and the others are told.
        Some(launch) => options.member = Some(Arc::new(member(&launch, &bundle.manifest, options.device.deadline)?)),
        // From here on: while code is generated, Ctrl-C ends the program at once.
        None => {
            let watched = StopFlag::on_ctrl_c();
            options.stop = watched.map_err(|e| Failure::Outside(format!("cannot watch for Ctrl-C: {e}")))?;
        }
    }
    let summary = runtime::run(&bundle, &inputs, &options, &mut observers).map_err(failure)?;
    if reports { output::write(&closing(&summary)) } else { Ok(()) }
}

/// This process's part in a run that a launcher started.
fn member(launch: &Launch, manifest: &Manifest, deadline: Duration) -> Result<Member, Failure> {
    let (ranks, target) = (manifest.memory.len(), &manifest.cpu);
    if !runtime::cpu::is_gpu(target) {
        return Err(Failure::Usage(format!(
            "a launcher started {} processes, and a run for `{target}` has one: start it without the launcher",
            launch.ranks
        )));
    }
    if launch.ranks as usize != ranks {
        return Err(Failure::Usage(format!(
            "a launcher started {} processes, and the pipeline has {ranks} ranks: start {ranks}, or one without a launcher",
            launch.ranks
        )));
    }
    let rank = RankId(launch.rank);
    let store = Store::join(&launch.host, launch.port, rank, deadline).map_err(Failure::Outside)?;
    Ok(Member { rank, local: launch.local, store })
}

fn failure(error: RunError) -> Failure {
    match error.exit_status() {
        2 => Failure::Usage(error.to_string()),
        _ => Failure::Outside(error.to_string()),
    }
}

/// Reads a bundle, or makes one from a spec. What the run reads comes before the code is generated: a wrong request
/// is told at once.
fn prepare(args: &Run) -> Result<(Bundle, Inputs, RunOptions), Failure> {
    let path = &args.spec.file;
    if !path.is_dir() {
        return compiled(args);
    }
    if !args.spec.sets.is_empty() || args.spec.cpu.is_some() || args.spec.target.is_some() || args.spec.table.is_some()
    {
        let text = "--set, --cpu, --target and --table change a spec; a bundle is compiled already: give the .pace file instead";
        return Err(Failure::Usage(text.to_owned()));
    }
    let bundle = super::read_bundle(path)?;
    let options = options(args, &bundle.manifest)?;
    let inputs = Inputs::read(&bundle.manifest, &options).map_err(failure)?;
    Ok((bundle, inputs, options))
}

#[cfg(feature = "codegen")]
fn compiled(args: &Run) -> Result<(Bundle, Inputs, RunOptions), Failure> {
    let (source, analysed) = crate::driver::compilable(&args.spec)?;
    let manifest = crate::bundle::manifest(&source, &args.spec, &analysed);
    let options = options(args, &manifest)?;
    let inputs = Inputs::read(&manifest, &options).map_err(failure)?;
    Ok((crate::bundle::make(manifest, &analysed, None)?, inputs, options))
}

#[cfg(not(feature = "codegen"))]
fn compiled(args: &Run) -> Result<(Bundle, Inputs, RunOptions), Failure> {
    crate::driver::compilable(&args.spec)?;
    Err(super::no_codegen())
}

fn options(args: &Run, manifest: &Manifest) -> Result<RunOptions, Failure> {
    let updates = match (args.updates, manifest.updates_planned()) {
        (Some(updates), total) => {
            if let Some(total) = total.filter(|&total| total != updates) {
                eprintln!("lint: {}", mismatch(updates, total));
            }
            updates
        }
        (None, Some(total)) => total,
        (None, None) => {
            let text =
                "--updates N is needed: the learning rate is constant, so the spec doesn't say how long to train";
            return Err(Failure::Usage(text.to_owned()));
        }
    };
    Ok(RunOptions {
        updates,
        seed: args.seed,
        data: args.data.clone(),
        eval: args.eval.clone(),
        holdout: args.holdout,
        eval_sequences_max: None,
        load: args.load.clone(),
        save: args.save.clone(),
        stop: StopFlag::default(),
        device: DeviceOptions { deadline: Duration::from_secs(args.deadline_s) },
        member: None,
    })
}

/// What it means that a run is not as long as its learning-rate schedule.
fn mismatch(updates: u64, total: u64) -> String {
    let effect =
        if updates < total { "the rate never comes down to its floor" } else { "the rest trains at the floor" };
    format!("the learning-rate schedule is made for {total} updates and the run makes {updates}: {effect}")
}

/// What was proved beside what was counted, and what was predicted beside what was measured.
fn closing(summary: &Summary) -> String {
    let mut lines = vec![String::new()];
    lines.push("stage  drift proved  counted   delay proved  counted".to_owned());
    for (stage, s) in summary.stages.iter().enumerate() {
        lines.push(format!(
            "{stage:>5}  {:>12}  {:>7}   {:>12}  {:>7}",
            s.drift_max_proved, s.drift_max_seen, s.delay_max_proved, s.delay_max_seen
        ));
    }
    lines.push(String::new());
    lines.push("rank  memory computed  allocated   bubble predicted  replayed  measured   busy       wait".to_owned());
    for (rank, r) in summary.ranks.iter().enumerate() {
        lines.push(format!(
            "{rank:>4}  {:>15}  {:>9}   {:>16}  {:>8}  {:>8}   {:>9}  {:>7.2} s",
            r.computed_bytes,
            r.allocated_bytes,
            percent(r.bubble_predicted),
            r.bubble_replayed.map_or_else(|| "-".to_owned(), percent),
            r.bubble_measured.map_or_else(|| "-".to_owned(), percent),
            r.busy_s.map_or_else(|| "-".to_owned(), |s| format!("{s:.2} s")),
            r.wait_s
        ));
    }
    if summary.devices.is_none() && summary.ranks.iter().any(|r| r.bubble_measured.is_none()) {
        lines.push(
            "(more ranks than cores: the bubble is replayed from measured kernel times, not measured)".to_owned(),
        );
    }
    if let Some(d) = &summary.devices {
        lines.push(format!(
            "(times on devices are not measured; {} parts ran as {} graphs, {} command by command)",
            d.launched, d.graphs, d.enqueued
        ));
    }
    lines.push(String::new());
    if let (Some(first), Some(last)) = (summary.eval_loss_first, summary.eval_loss_last) {
        lines.push(format!("held-out loss {first:.4} -> {last:.4} nats a token"));
    }
    let stopped = if summary.stopped { " (stopped early, at an update's end)" } else { "" };
    lines.push(format!(
        "{} updates, {} tokens in {:.1} s, {:.0} tokens/s{stopped}",
        summary.updates, summary.tokens, summary.elapsed_s, summary.tokens_per_s
    ));
    lines.join("\n") + "\n"
}
