//! The best of the candidates.

use super::{Candidate, Figures};
use dsl::schedule::Update;

/// The smallest bubble; among those that a library schedule's span and bubble both do not beat, where there are some. Bubbles that
/// differ by rounding are the same, and then the shorter span decides, the shorter period, and less that is kept.
pub fn choose(candidates: Vec<Candidate>, library: &[(String, Result<Figures, String>)]) -> Option<Candidate> {
    let within = || library.iter().filter_map(|(_, figures)| figures.as_ref().ok());
    let bubble = within().map(|f| f.bubble).fold(f64::INFINITY, f64::min);
    let flushes: Vec<&Candidate> = candidates.iter().filter(|c| c.schedule.update == Update::Flush).collect();
    let names: Vec<&str> = flushes.iter().map(|c| c.name.as_str()).collect();
    let of_library = library.iter().filter(|(name, _)| names.contains(&name.as_str()));
    let span = of_library.filter_map(|(_, f)| f.as_ref().ok()).map(|f| f.bubble_span).fold(f64::INFINITY, f64::min);
    let unbeaten = |c: &Candidate| {
        let f = &c.figures;
        f.bubble <= bubble + ROUNDING && (c.schedule.update == Update::Local || f.bubble_span <= span + ROUNDING)
    };
    let any = candidates.iter().any(unbeaten);
    candidates.into_iter().filter(|c| !any || unbeaten(c)).min_by_key(key)
}

const ROUNDING: f64 = 1e-9;

fn key(candidate: &Candidate) -> (u64, bool, u64, u64, u32) {
    let f = &candidate.figures;
    let local = candidate.schedule.update == Update::Local;
    let rounded = |share: f64| (share.max(0.0) / ROUNDING).round() as u64;
    (rounded(f.bubble), local, rounded(f.bubble_span), f.period_ns, f.kept / f.chunks.max(1))
}
