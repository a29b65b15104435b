//! `paceline-studies NAME`: makes the runs of a study that its file lacks, then its plot and page.
//!
//! A study is a list of settings; each run of it is `paceline run` on a spec made of `gpt.pace` and overrides. When a run
//! ends its row is appended to `NAME.csv`, so an interrupted study goes on where it stopped; plot and page come from that file alone.

mod paceline;
mod plot;
mod rows;
mod setting;
mod stats;
mod study;
mod work;

use clap::{Parser, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use study::Study;
use work::Stop;

/// Makes the runs of a study that are still to be made, then its plot and page.
#[derive(Debug, Parser)]
#[command(name = "paceline-studies", version)]
struct Arguments {
    study: Name,
    /// The release build of the paceline command
    #[arg(long, default_value = "target/release/paceline")]
    paceline: PathBuf,
    /// Folder that scripts/corpus.sh wrote
    #[arg(long, default_value = "target/corpus")]
    corpus: PathBuf,
    /// Folder of the results
    #[arg(long, default_value = "docs/studies")]
    results: PathBuf,
    /// Folder for bundles and metrics
    #[arg(long, default_value = "target/studies")]
    scratch: PathBuf,
    /// Begin no run that would probably end later than this
    #[arg(long, value_name = "MINUTES")]
    budget_minutes: Option<f64>,
    /// Updates of each run, for trying a study out: results of another length are other results
    #[arg(long, requires = "results")]
    updates: Option<u64>,
    /// Make no runs, only plot and page of the results that are there
    #[arg(long)]
    report: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// PACI against flush on eight ranks
    Paci,
    /// Delay 0, 1, and 1 with error feedback, by optimizer
    Delay,
    /// Staleness growing with the ranks
    Staleness,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::from(3)
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let updates = arguments.updates.unwrap_or(setting::UPDATES);
    let study: Box<dyn Study> = match arguments.study {
        Name::Paci => Box::new(study::Paci { updates }),
        Name::Delay => Box::new(study::Delay { updates }),
        Name::Staleness => Box::new(study::Staleness { updates }),
    };
    let folder = &arguments.results;
    fs::create_dir_all(folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    if arguments.report {
        return report(study.as_ref(), &rows::Rows::open(folder, study.name(), None)?, folder);
    }
    let corpus = paceline::Corpus::read(&arguments.corpus)?;
    let mut rows = rows::Rows::open(folder, study.name(), Some(corpus.hash.clone()))?;
    rows.forget_unavailable()?;
    let mut paceline = paceline::Paceline::new(arguments.paceline.clone(), &arguments.scratch)?;
    let budget = arguments.budget_minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes.max(0.0)));
    let say = &mut |line: &str| eprintln!("{line}");
    let ended = work::work(study.as_ref(), &mut rows, &mut paceline, &corpus, budget, say);
    report(study.as_ref(), &rows, folder)?;
    let text = match ended? {
        Stop::Complete => "complete",
        Stop::Budget => "the time is used up; the same command goes on from here",
        Stop::Interrupted => "interrupted; the same command goes on from here",
    };
    eprintln!("{}: {text}", study.name());
    Ok(())
}

/// Writes plot and page.
fn report(study: &dyn Study, rows: &rows::Rows, folder: &Path) -> Result<(), String> {
    let write = |name: String, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    };
    let (name, figure) = (study.name(), study.figure(rows));
    let title = &figure.title;
    let picture = if figure.panels.is_empty() { String::new() } else { format!("![{title}]({name}.svg)\n\n") };
    let origin =
        format!("Written by `make study-{name}` from its results; [README.md](README.md) says how, and what came out.");
    write(format!("{name}.md"), format!("# {title}\n\n{origin}\n\n{picture}{}", study.page(rows)))?;
    write(format!("{name}.svg"), plot::draw(&figure).to_string() + "\n")
}
