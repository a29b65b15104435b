//! A part of `paceline gpu-check`: products by the library of a machine that has one.

use crate::failure::Failure;
use crate::output;
use artifact::bundle::Bundle;
use artifact::tuning::Choice;
use runtime::device::library::tune::{Settings, tune};
use std::time::Duration;

/// Memory that a product may use.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// A bundle all of whose products the library computes that it computes right, however fast. None where there is no library, or none is right; and how many kernels
/// it computed wrong with every algorithm that it ran.
pub fn tuned(what: &str, bundle: &Bundle, deadline: Duration) -> Result<(Option<Bundle>, usize), Failure> {
    let machine = match runtime::machine_to_tune(bundle, deadline) {
        Ok(Some(machine)) => machine,
        Ok(None) => return Ok((None, 0)),
        Err(error) => {
            output::write(&format!("skipped products of {what}: {error}\n"))?;
            return Ok((None, 0));
        }
    };
    let settings = Settings { workspace_bytes: WORKSPACE_BYTES, faster_by: f64::NEG_INFINITY, deadline };
    let mut choices: Vec<Choice> = Vec::new();
    let manifest = match tune(&bundle.manifest, &*machine, &settings, &mut |choice| choices.push(*choice)) {
        Ok(manifest) => manifest,
        Err(error) => {
            output::write(&format!("WRONG  products of {what}: {error}\n"))?;
            return Ok((None, 1));
        }
    };
    let on = manifest.tuning.as_ref().map_or_else(String::new, |tuning| tuning.on.name());
    let (mut wrong, mut lines) = (0, vec![format!("products of {what}, by the bundle's kernels and by {on}:")]);
    for choice in &choices {
        let bad = choice.offered > 0 && choice.refused == choice.offered;
        wrong += usize::from(bad);
        let judged = if bad { "WRONG" } else { "     " };
        let refused = format!("{} of {} algorithms refused", choice.refused, choice.offered);
        lines.push(format!("  {judged}{}, {refused}", super::tune::line(&manifest, choice)));
    }
    output::write(&(lines.join("\n") + "\n"))?;
    let library = manifest.library().is_some();
    Ok((library.then(|| Bundle { manifest, images: bundle.images.clone() }), wrong))
}
