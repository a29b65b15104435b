//! Probes in a file, so that another machine can compare its own: safetensors of bytes, `KERNEL/OPERAND` by name.

use crate::device::probe::Probe;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Writes what kernels changed.
///
/// # Errors
/// When the file can't be written.
pub fn write(path: &Path, probes: &[Probe]) -> io::Result<()> {
    let mut tensors = Vec::new();
    for probe in probes {
        for (operand, bytes) in &probe.changed {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes).map_err(io::Error::other)?;
            tensors.push((format!("{}/{operand}", probe.kernel), view));
        }
    }
    std::fs::write(path, serialize(tensors, None).map_err(io::Error::other)?)
}

/// Reads it: by kernel, what it changed.
///
/// # Errors
/// When the file can't be read or is another.
pub fn read(path: &Path) -> io::Result<BTreeMap<String, Probe>> {
    let bytes = std::fs::read(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(io::Error::other)?;
    let mut found: BTreeMap<String, Probe> = BTreeMap::new();
    for (name, view) in file.tensors() {
        let (kernel, operand) = name.rsplit_once('/').unwrap_or((&name, ""));
        let operand: usize = operand.parse().map_err(|_| io::Error::other(format!("`{name}` names no operand")))?;
        let new = || Probe { kernel: kernel.to_owned(), changed: BTreeMap::new(), time: Duration::ZERO };
        found.entry(kernel.to_owned()).or_insert_with(new).changed.insert(operand, view.data().to_vec());
    }
    Ok(found)
}
