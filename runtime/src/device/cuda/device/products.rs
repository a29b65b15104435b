//! A rank's products by cuBLASLt.

use super::OnGpu;
use crate::device::cuda::blas::Blas;
use crate::device::{Command, Device, Stream, library};
use artifact::program::Manifest;
use std::collections::BTreeSet;

impl OnGpu {
    /// Takes cuBLASLt, and runs each product that the bundle gives to it once: zeros over zeros, since nothing is in the arena yet. The
    /// library then loads nothing later, in the middle of a captured graph.
    ///
    /// # Errors
    /// In words.
    pub fn use_library(&mut self, blas: Blas, manifest: &Manifest) -> Result<(), String> {
        self.queue.enter()?;
        self.blas = Some(blas);
        let (mut seen, rank) = (BTreeSet::new(), self.rank);
        for (index, stage) in manifest.stages.iter().enumerate().filter(|(_, s)| s.rank == rank) {
            for call in stage.bodies.calls() {
                let args = call.args.iter().map(|place| (place.at(0), *place)).collect();
                let command = library::command(manifest, index, call.kernel, args);
                let Command::Product { product, algorithm, .. } = &command else { continue };
                if seen.insert(call.kernel) {
                    let blas = self.blas.as_mut().ok_or("cuBLASLt is not open")?;
                    blas.check(product, algorithm)?;
                    self.product(&command)?;
                }
            }
        }
        self.queue.record(Stream::Compute as usize, 0)?;
        while !self.queue.happened(0)? {
            if self.started.elapsed() >= self.patience.deadline {
                self.queue.abandoned = true;
                return Err(format!(
                    "its first products were not done after {} s",
                    self.patience.deadline.as_secs_f64()
                ));
            }
            self.pause();
        }
        Ok(())
    }

    /// Enqueues a [`Command::Product`].
    pub(super) fn product(&mut self, command: &Command) -> Result<(), String> {
        let Command::Product { product, algorithm, args, workspace } = command else {
            return Err("this is no product".into());
        };
        let blas = self.blas.as_mut().ok_or("cuBLASLt is not open")?;
        self.addresses.clear();
        self.addresses.extend(args.iter().map(|(offset, place)| self.queue.address(*offset, place.bytes)));
        let workspace = match algorithm.workspace_bytes {
            0 => 0,
            bytes => self.queue.address(*workspace, bytes),
        };
        let stream = self.queue.stream(Stream::Compute as usize);
        blas.run(product, algorithm, &self.addresses, workspace, stream)
    }
}
