//! Products by a library of matrix products, in the place of kernels: what it is asked, and whether it is the one that a bundle was tuned with.
//!
//! | | |
//! |---|---|
//! | [`descriptor`] | row-major products in the column-major terms of such libraries |
//! | [`tune`] | which kernels it is faster for, measured |

pub mod descriptor;
pub mod tune;

use crate::device::Command;
use artifact::product::Product;
use artifact::program::{Manifest, Place};
use artifact::tuning::{Algorithm, Identity};

/// A library of matrix products beside a device.
pub trait Library {
    /// # Errors
    /// In the words of the device.
    fn identity(&self) -> Result<Identity, String>;

    /// Ways to compute a product with a workspace of at most so many bytes, at most so many, the most promising first.
    ///
    /// # Errors
    /// In the library's words. That it knows none is no error.
    fn candidates(&mut self, product: &Product, workspace_bytes: u64, most: usize) -> Result<Vec<Algorithm>, String>;
}

/// What a call of a kernel enqueues: the library's product where the bundle was tuned so, else the kernel. `args` as in [`Command::Launch`].
pub fn command(manifest: &Manifest, stage: usize, kernel: u32, args: Vec<(u64, Place)>) -> Command {
    let chosen = manifest.tuning.as_ref().and_then(|tuning| {
        let workspace = tuning.workspaces[manifest.stages[stage].rank.index()];
        let product = manifest.kernels[kernel as usize].product?;
        Some((product, *tuning.algorithm(kernel)?, workspace.offset()))
    });
    match chosen {
        Some((product, algorithm, workspace)) => Command::Product { product, algorithm, args, workspace },
        None => Command::Launch { stage, kernel, args },
    }
}

/// Whether a bundle that may be tuned runs with what is found here.
///
/// # Errors
/// One sentence: how the library or the GPU differs, or that there is none, and what to do.
pub fn check(manifest: &Manifest, found: &Result<Identity, String>) -> Result<(), String> {
    let Some(tuning) = manifest.library() else { return Ok(()) };
    let (on, again) =
        (&tuning.on, "tune the bundle again here (`paceline tune`), or run the one that it was made from");
    let found = found.as_ref().map_err(|missing| {
        let name = on.name();
        format!("the bundle was tuned with {name}, and {missing}; install it, or run the bundle that it was made from")
    })?;
    if (&found.library, found.version) != (&on.library, on.version) {
        return Err(format!("the bundle was tuned with {}, and this machine has {}; {again}", on.name(), found.name()));
    }
    if (&found.gpu, found.capability, found.multiprocessors) != (&on.gpu, on.capability, on.multiprocessors) {
        return Err(format!("the bundle was tuned on {}, and this GPU is {}; {again}", on.device(), found.device()));
    }
    Ok(())
}
