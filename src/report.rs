//! What `check` prints: a text for people, JSON for programs (the format is documented in docs/check-json.md).

use crate::driver::Analysed;
use crate::latency::Latency;
use crate::render::{Source, line_column};
use artifact::program::Memory;
use dsl::diag::{Diagnostic, Severity};
use dsl::spec::Layer;
use plan::facts::{Proof, RankFacts, StageFacts};
use serde::Serialize;
use std::fmt::Write;

/// Bytes with a binary unit, three digits or exact below 1 KiB.
pub fn bytes(n: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    for (size, unit) in UNITS {
        if n >= size {
            return format!("{:.2} {unit}", n as f64 / size as f64);
        }
    }
    format!("{n} B")
}

/// A fraction as a percentage.
pub fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

/// The report for people.
pub fn text(source: &Source, analysed: &Analysed) -> String {
    let mut out = String::new();
    let spec = &analysed.spec;
    let _ = writeln!(
        out,
        "{}: {} on {} ranks, {} micro-batches an update",
        source.name, spec.schedule.name, spec.machine.ranks.value, spec.pipeline.accumulate.value
    );
    if let Some(found) = &analysed.search {
        out.push_str(&crate::search::text(found));
    }
    out.push('\n');
    ranks_table(&mut out, analysed);
    if let Some(memory) = analysed.memory() {
        out.push('\n');
        let target = analysed.target.name();
        memory_table(&mut out, memory, if analysed.estimate.is_some() { "estimated" } else { &target });
        estimated(&mut out, analysed);
    }
    let _ = writeln!(
        out,
        "\nperiod {} micro-batches, {}; {} from start to end {}",
        microbatches(analysed),
        micros(analysed.facts.period_ns),
        updates(analysed.program.streams.first().map_or(1, |s| s.updates)),
        micros(analysed.facts.makespan_ns),
    );
    out.push('\n');
    for proof in &analysed.facts.proofs {
        let mark = if proof.holds { "proved " } else { "REFUTED" };
        let _ = writeln!(out, "{mark}  {}\n         {}", proof.claim, proof.by);
    }
    out
}

fn updates(count: u32) -> String {
    if count == 1 { "one update".to_owned() } else { format!("{count} updates") }
}

fn micros(ns: u64) -> String {
    format!("{:.0} us", ns as f64 / 1000.0)
}

fn ranks_table(out: &mut String, analysed: &Analysed) {
    let _ = writeln!(out, "rank  stage  in flight  bubble   drift max/mean  delay max/mean  weight copies  layers");
    for (rank, facts) in analysed.facts.ranks.iter().enumerate() {
        for stage in analysed.stages_of(rank) {
            let s = &analysed.facts.stages[stage];
            let _ = writeln!(
                out,
                "{rank:>4}  {stage:>5}  {:>9}  {:>6}  {:>14}  {:>14}  {:>13}  {}",
                facts.in_flight_max,
                percent(facts.bubble),
                staleness(s.drift),
                staleness(s.delay),
                s.versions_live,
                analysed.layers.as_ref().map_or_else(|| "-".to_owned(), |l| layers(&l[stage])),
            );
        }
    }
}

fn staleness(s: plan::facts::Staleness) -> String {
    format!("{} / {:.2}", s.max, s.mean)
}

/// Layers as the language writes them, runs of blocks folded: `embed, block 0..2`.
pub fn layers(list: &[Layer]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut run: Option<(u32, u32)> = None;
    let close = |run: &mut Option<(u32, u32)>, parts: &mut Vec<String>| {
        if let Some((from, to)) = run.take() {
            parts.push(if to == from + 1 { format!("block {from}") } else { format!("block {from}..{to}") });
        }
    };
    for layer in list {
        match (layer, &mut run) {
            (Layer::Block(b), Some((_, to))) if *b == *to => *to += 1,
            (Layer::Block(b), _) => {
                close(&mut run, &mut parts);
                run = Some((*b, b + 1));
            }
            (Layer::Embed, _) | (Layer::Head, _) => {
                close(&mut run, &mut parts);
                parts.push(if *layer == Layer::Embed { "embed" } else { "head" }.to_owned());
            }
        }
    }
    close(&mut run, &mut parts);
    parts.join(", ")
}

/// Says of an estimate that it is one, and why.
fn estimated(out: &mut String, analysed: &Analysed) {
    if analysed.estimate.is_none() {
        return;
    }
    let keys: Vec<&str> = analysed.spec.analysis_only().iter().map(|key| key.value).collect();
    let _ = writeln!(out, "\nmemory is estimated, per device: this spec is for analysis only ({})", keys.join(", "));
}

fn memory_table(out: &mut String, memory: &[Memory], by: &str) {
    let _ = writeln!(
        out,
        "rank      memory (bytes)     weights   optimizer   gradients       stash  activations  communication  workspace  \
         ({by})"
    );
    for (rank, m) in memory.iter().enumerate() {
        let _ = writeln!(
            out,
            "{rank:>4}  {:>18}  {:>10}  {:>10}  {:>10}  {:>10}  {:>11}  {:>13}  {:>9}",
            m.total,
            bytes(m.weights),
            bytes(m.optimizer),
            bytes(m.gradients),
            bytes(m.stash),
            bytes(m.activations),
            bytes(m.communication),
            bytes(m.workspace),
        );
    }
}

#[derive(Serialize)]
struct Json<'a> {
    ok: bool,
    diagnostics: Vec<JsonDiagnostic<'a>>,
    ranks: Vec<JsonRank>,
    stages: Vec<JsonStage>,
    /// Micro-batches and microseconds of one steady period.
    period: Option<JsonPeriod>,
    makespan_us: Option<f64>,
    proofs: Vec<JsonProof<'a>>,
    work: Option<JsonWork>,
    /// Keys of the spec that can be analysed only; memory is estimated if there are any.
    analysis_only: Vec<&'static str>,
    latency: Option<Latency>,
    search: Option<crate::search::Json>,
}

/// How much there was to analyse, and how much was done.
#[derive(Serialize)]
struct JsonWork {
    instructions: usize,
    visited: u64,
}

#[derive(Serialize)]
struct JsonDiagnostic<'a> {
    code: &'a str,
    severity: &'a str,
    message: &'a str,
    file: String,
    line: usize,
    column: usize,
    help: Option<&'a str>,
}

#[derive(Serialize)]
struct JsonRank {
    rank: usize,
    stages: Vec<usize>,
    in_flight_max: u32,
    bubble: f64,
    bubble_span: f64,
    bubble_makespan: f64,
    busy_us: f64,
    span_us: f64,
    memory: Option<Memory>,
}

#[derive(Serialize)]
struct JsonStage {
    stage: usize,
    drift: JsonStaleness,
    delay: JsonStaleness,
    versions_live: u32,
}

#[derive(Serialize)]
struct JsonStaleness {
    max: u64,
    mean: f64,
}

#[derive(Serialize)]
struct JsonPeriod {
    microbatches: u32,
    us: f64,
}

#[derive(Serialize)]
struct JsonProof<'a> {
    claim: &'a str,
    holds: bool,
    by: &'a str,
}

/// The report for programs; `analysed` is absent when the spec is refused before its plan exists.
pub fn json(
    source: &Source,
    diagnostics: &[Diagnostic],
    analysed: Option<&Analysed>,
    latency: Option<Latency>,
) -> String {
    let facts = analysed.map(|a| &a.facts);
    let report = Json {
        ok: !diagnostics.iter().any(Diagnostic::is_error),
        diagnostics: diagnostics.iter().map(|d| json_diagnostic(source, d)).collect(),
        ranks: analysed.map_or_else(Vec::new, json_ranks),
        stages: facts.map_or_else(Vec::new, |f| f.stages.iter().enumerate().map(json_stage).collect()),
        period: analysed.map(|a| JsonPeriod { microbatches: microbatches(a), us: a.facts.period_ns as f64 / 1000.0 }),
        makespan_us: facts.map(|f| f.makespan_ns as f64 / 1000.0),
        proofs: facts.map_or_else(Vec::new, |f| f.proofs.iter().map(json_proof).collect()),
        work: analysed.map(|a| JsonWork { instructions: a.program.instructions(), visited: a.facts.work }),
        analysis_only: analysed.map_or_else(Vec::new, |a| a.spec.analysis_only().iter().map(|k| k.value).collect()),
        latency,
        search: analysed.and_then(|a| a.search.as_ref()).map(crate::search::Json::new),
    };
    serde_json::to_string_pretty(&report).expect("the report has string keys and finite numbers")
}

fn json_diagnostic<'a>(source: &Source, diagnostic: &'a Diagnostic) -> JsonDiagnostic<'a> {
    let label = diagnostic.labels.first();
    let (file, text) = match label.and_then(|l| l.library.as_deref()) {
        Some(name) => (format!("library/{name}.pace"), dsl::library::source(name).unwrap_or_default()),
        None => (source.name.clone(), source.text.as_str()),
    };
    let (line, column) = line_column(text, label.map_or(0, |l| l.span.start));
    JsonDiagnostic {
        code: diagnostic.code,
        severity: match diagnostic.severity {
            Severity::Error => "error",
            Severity::Lint => "lint",
        },
        message: &diagnostic.message,
        file,
        line,
        column,
        help: diagnostic.help.as_deref(),
    }
}

fn json_ranks(analysed: &Analysed) -> Vec<JsonRank> {
    let rank = |(rank, facts): (usize, &RankFacts)| JsonRank {
        rank,
        stages: analysed.stages_of(rank),
        in_flight_max: facts.in_flight_max,
        bubble: facts.bubble,
        bubble_span: facts.bubble_span,
        bubble_makespan: facts.bubble_makespan,
        busy_us: facts.busy_ns as f64 / 1000.0,
        span_us: facts.span_ns as f64 / 1000.0,
        memory: analysed.memory().map(|memory| memory[rank]),
    };
    analysed.facts.ranks.iter().enumerate().map(rank).collect()
}

fn json_stage((stage, facts): (usize, &StageFacts)) -> JsonStage {
    let staleness = |s: plan::facts::Staleness| JsonStaleness { max: s.max, mean: s.mean };
    JsonStage {
        stage,
        drift: staleness(facts.drift),
        delay: staleness(facts.delay),
        versions_live: facts.versions_live,
    }
}

fn json_proof(proof: &Proof) -> JsonProof<'_> {
    JsonProof { claim: &proof.claim, holds: proof.holds, by: &proof.by }
}

/// Micro-batches of a period, of all copies of the model.
pub fn microbatches(analysed: &Analysed) -> u32 {
    analysed.program.streams.first().map_or(0, |s| s.microbatches) * analysed.program.copies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_folded() {
        assert_eq!(layers(&[Layer::Embed, Layer::Block(0), Layer::Block(1)]), "embed, block 0..2");
        assert_eq!(layers(&[Layer::Block(7), Layer::Head]), "block 7, head");
    }

    #[test]
    fn byte_units() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3 << 19), "1.50 MiB");
    }
}
