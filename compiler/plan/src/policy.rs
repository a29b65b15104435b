//! How many versions of its weights a stage keeps, and why a policy is not possible.
//!
//! # Meaning
//!
//! `stash` keeps as many versions as the order needs: the fewest with which none is overwritten while a micro-batch between its F and its
//! B still reads it. `double_buffer` always keeps two, and what it reads is fixed by the micro-batch alone: where the order
//! runs F before the version that it reads is made, the policy is refused.

use crate::Shape;
use crate::expand::{origin, streams};
use crate::order::{ACTIONS_MAX, fault};
use artifact::ids::StageId;
use artifact::stream::{Policy, Program};
use artifact::verify::index::Places;
use artifact::verify::versions::{Missing, Versions};
use artifact::verify::{StageIndex, verify};
use dsl::diag::{Diagnostic, Label};
use dsl::schedule::{Action, Schedule};
use dsl::spec::{Recompute, Weights};

/// The policy of a spec: with the weights as they are, a stage that runs its forward pass again does so with those.
pub fn policy(weights: &Weights, recompute: Recompute) -> Policy {
    match weights {
        Weights::Current if recompute == Recompute::Full => Policy::Recomputed,
        Weights::Current => Policy::Current,
        Weights::Stash => Policy::Stash,
        Weights::DoubleBuffer => Policy::DoubleBuffer,
        Weights::Predict { .. } => Policy::Predicted,
    }
}

/// Puts a program under a policy: every stage gets the slots that it needs. Streams and the other rings stay as they are.
pub(crate) fn keep(program: &mut Program, policy: Policy) {
    program.policy = policy;
    let slots = match policy {
        Policy::Current | Policy::Recomputed | Policy::Predicted => vec![1; program.rings.len()],
        Policy::DoubleBuffer => vec![2; program.rings.len()],
        Policy::Stash => stashed(program),
    };
    program.rings.iter_mut().zip(slots).for_each(|(rings, slots)| rings.weights = slots);
}

/// By stage. A program without coverage has no versions: the verifier says so.
fn stashed(program: &Program) -> Vec<u32> {
    let Ok(places) = Places::new(program) else { return vec![1; program.rings.len()] };
    let stages: Vec<StageIndex> = (0..program.rings.len()).map(|s| StageIndex::new(program, &places, s)).collect();
    let versions = Versions::of(program, &stages);
    versions.iter().map(|v| u32::try_from(v.slots()).unwrap_or(u32::MAX)).collect()
}

/// Copies of a stage's weights that exist at once, one of them a prediction where there is drift to predict over.
pub(crate) fn copies(program: &Program, stage: usize, drifts: bool) -> u32 {
    program.rings[stage].weights + u32::from(program.policy == Policy::Predicted && drifts)
}

/// `P0340`: a micro-batch that reads a version which two copies do not hold.
pub(crate) fn refused(schedule: &Schedule, shape: &Shape, stage: StageId, missing: &Missing) -> Diagnostic {
    let Missing { mb, version, made, .. } = missing;
    let k = u64::from(shape.accumulate);
    let ahead = mb / k - made;
    let message = format!("with `{}` and accumulate = {k} two versions of the weights do not suffice", schedule.name);
    let mut found = fault(schedule, "P0340", &schedule.span, message);
    found.labels.clear();
    if let Some(span) = origin(schedule, shape, stage.0, Action::F, *mb) {
        let library = schedule.library.then(|| schedule.name.clone());
        let text = format!("for micro-batch {mb} on stage {stage} this reads version {version}, and {made} are made");
        found.labels.push(Label { span, text, library });
    }
    found
        .note(format!(
            "micro-batch {mb} goes into update {}, so under `double_buffer` its passes read version {version}; on stage {stage} its F runs {ahead} updates ahead, when the newest version is {made}",
            mb / k
        ))
        .help(solve(schedule, shape))
}

/// The smallest accumulate that the policy works with.
fn solve(schedule: &Schedule, shape: &Shape) -> String {
    let mut work = 0;
    let mut last = 0;
    for accumulate in 1..=shape.ranks.saturating_mul(4).max(16) {
        work += u64::from(accumulate) * u64::from(shape.ranks);
        if work > ACTIONS_MAX / 4 {
            break;
        }
        last = accumulate;
        let sound = |program: Program| verify(&program).is_ok();
        if streams(schedule, &Shape { accumulate, ..*shape }).is_ok_and(sound) {
            return format!(
                "the smallest accumulate for `double_buffer` is {accumulate} (it is {}); `weights = stash` keeps as many versions as it needs",
                shape.accumulate
            );
        }
    }
    format!("no accumulate up to {last} is enough; `weights = stash` keeps as many versions as it needs")
}
