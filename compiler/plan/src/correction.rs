//! Whether a correction has the delays that it corrects for, and a prediction the drift that it is made over.

use crate::analyse::Findings;
use crate::facts::Proof;
use crate::versions::{Measure, StageVersions};
use artifact::stream::Op;
use dsl::diag::{Diagnostic, Span};
use dsl::spec::{At, Correction};

/// Adds a proof of what the correction relies on, and a diagnostic where that does not hold.
pub(crate) fn check(
    asked: &At<Correction>,
    findings: &Findings,
    proofs: &mut Vec<Proof>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    if let Correction::ErrorFeedback { tau: None, .. } = asked.value {
        feedback(&asked.span, findings, proofs, diagnostics);
    }
    if let Correction::DelayCompensation { .. } = asked.value {
        diagnostics.extend(split(&asked.span, findings));
    }
    let name = match asked.value {
        Correction::ErrorFeedback { .. } => "error_feedback",
        Correction::PipeMare { .. } => "pipemare",
        Correction::DelayCompensation { .. } => "dc_asgd",
        Correction::Nesterov { by_stage: true, .. } => "by_stage",
        // A momentum is something without delays too.
        Correction::Nesterov { by_stage: false, .. } => return,
    };
    let none = |measure: fn(&StageVersions) -> Measure| findings.versions.iter().all(|v| measure(v).staleness.max == 0);
    let (message, note) = if none(|v| v.delay) {
        let note = "every gradient goes into an update of the weights that its forward pass read: proved";
        (format!("`{name}` has no delay to correct for"), note)
    } else if none(|v| v.drift) && matches!(asked.value, Correction::PipeMare { discrepancy: Some(_), .. }) {
        let note = "every backward pass reads the weights that its forward pass read: proved";
        ("`discrepancy` has no drift to correct for".into(), note)
    } else {
        return;
    };
    let found = Diagnostic::lint("P0331", asked.span.clone(), message).here("without effect").note(note);
    diagnostics.push(found.help("remove it, or use a schedule with `update local`, such as async_1f1b"));
}

/// `P0332`: W reads no weights, so an older version is kept until I only.
fn split(span: &Span, findings: &Findings) -> Option<Diagnostic> {
    let streams = findings.program.streams.iter();
    let splits = streams.flat_map(|s| s.prologue.iter().chain(&s.period)).any(|i| i.op == Op::I);
    let error = || {
        Diagnostic::error("P0332", span.clone(), "`dc_asgd` needs a backward pass in one piece")
            .note("it compares versions of the weights where W makes the gradient, and the older one is kept until I")
            .help("use a schedule with `backward whole`, such as async_1f1b, or another correction")
    };
    splits.then(error)
}

/// `P0331`: a prediction over no drift.
pub(crate) fn check_prediction(asked: &Span, findings: &Findings) -> Option<Diagnostic> {
    let none = findings.versions.iter().all(|v| v.drift.staleness.max == 0);
    let lint = || {
        Diagnostic::lint("P0331", asked.clone(), "`weights = predict` has no drift to predict over")
            .here("without effect")
            .note("every backward pass reads the weights that its forward pass read: proved")
            .help("remove it, or use a schedule with `update local` on several ranks, such as async_1f1b")
    };
    none.then(lint)
}

/// Error feedback for the proved delay needs all micro-batches of an update to have one.
fn feedback(span: &Span, findings: &Findings, proofs: &mut Vec<Proof>, diagnostics: &mut Vec<Diagnostic>) {
    let mixed = findings.versions.iter().enumerate().find(|(_, v)| v.delay_uniform.is_none());
    proofs.push(Proof {
        claim: "all micro-batches of an update have the same delay, on every stage".into(),
        holds: mixed.is_none(),
        by: "every micro-batch up to the steady state was compared with the update that it goes into".into(),
    });
    let Some((stage, versions)) = mixed else { return };
    let mean = versions.delay.staleness.mean;
    let message = format!("updates of stage {stage} mix gradients of different delays");
    let found = Diagnostic::error("P0330", span.clone(), message).here("has no one delay to correct for");
    let found = found.note(format!("the largest delay is {}, the mean {mean:.2}", versions.delay.staleness.max));
    diagnostics.push(found.help("give the delay to correct for, such as the mean: `error_feedback { tau = 0.5 }`"));
}
