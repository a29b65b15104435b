//! Weights as a safetensors file: f32 tensors under the parameters' names, the same for every partition. A tied table is there once.
//!
//! The file holds weights only. A run that starts from one begins with a fresh optimizer state and learning-rate schedule;
//! the metadata's `step` counts the updates that the weights have had, over all runs.

use crate::error::RunError;
use crate::rank::Rank;
use artifact::program::{Manifest, Param, Place, Stage};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Value of `format` in the metadata, as PyTorch's tools write and expect it.
const FORMAT: &str = "pt";

/// Names listed in an error before the rest is left out.
const NAMES_MAX: usize = 3;

/// Weights from a file, checked against a manifest.
#[derive(Debug)]
pub struct Weights {
    values: HashMap<String, Vec<f32>>,
    /// Updates that they have had; 0 when the file doesn't say.
    pub step: u64,
}

impl Weights {
    /// Reads a file that has exactly the manifest's parameters.
    ///
    /// # Errors
    /// A file that can't be read or is no safetensors file; a tensor that is missing, unknown, or of another shape or type.
    pub fn read(path: &Path, manifest: &Manifest) -> Result<Weights, RunError> {
        let error = |what: String| RunError::Weights { path: path.to_path_buf(), what };
        let bytes = std::fs::read(path).map_err(|e| error(format!("can't be read ({e})")))?;
        let invalid = |e| error(format!("is not a whole safetensors file ({e})"));
        let file = SafeTensors::deserialize(&bytes).map_err(invalid)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(invalid)?;
        let known: BTreeSet<&str> = params(manifest).map(|p| p.name.as_str()).collect();
        let there: BTreeSet<&str> = file.names().into_iter().collect();
        for (names, what) in [
            (known.difference(&there), "does not have what the model needs"),
            (there.difference(&known), "has what the model doesn't know"),
        ] {
            let names: Vec<&str> = names.copied().collect();
            if !names.is_empty() {
                return Err(error(format!("{what}: {}", listing(&names))));
            }
        }
        let values = params(manifest).map(|p| {
            let values = tensor(&file, p).map_err(error)?;
            Ok((p.name.clone(), values))
        });
        let values = values.collect::<Result<_, RunError>>()?;
        let step = metadata.metadata().as_ref().and_then(|m| m.get("step")).and_then(|s| s.parse().ok()).unwrap_or(0);
        Ok(Weights { values, step })
    }

    /// Copies a parameter's values.
    pub fn copy(&self, name: &str, out: &mut [f32]) {
        out.copy_from_slice(&self.values[name]);
    }
}

fn params(manifest: &Manifest) -> impl Iterator<Item = &Param> {
    manifest.stages.iter().flat_map(Stage::own_params)
}

fn listing(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(NAMES_MAX).map(|n| format!("`{n}`")).collect();
    let rest = names.len() - shown.len();
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    shown.join(", ") + &more
}

/// A parameter's values in a file that has a tensor of its name.
fn tensor(file: &SafeTensors<'_>, param: &Param) -> Result<Vec<f32>, String> {
    let name = &param.name;
    let view = file.tensor(name).map_err(|e| format!("`{name}` can't be read ({e})"))?;
    if view.dtype() != Dtype::F32 {
        return Err(format!("`{name}` is {:?}, and the model has F32", view.dtype()));
    }
    if !view.shape().iter().map(|&d| d as u64).eq(param.shape.iter().copied()) {
        return Err(format!("`{name}` has the shape {:?}, and the model's is {:?}", view.shape(), param.shape));
    }
    Ok(view.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
}

/// The slots that hold a parameter's weights when training starts.
pub fn filled_at_start(manifest: &Manifest, stage: &Stage, param: &Param) -> Vec<(Place, u64)> {
    let rule = manifest.rule(&manifest.groups[param.group as usize], stage.stage);
    let behind = param.state.last().filter(|_| rule.reads_behind()).map(|place| (*place, 0));
    let predicted = rule.predicts().then_some((param.weight, 1));
    [(param.weight, 0)].into_iter().chain(behind).chain(predicted).collect()
}

/// The same, and the slots that hold them in another type: all else in an arena is zero then.
pub fn held_at_start(manifest: &Manifest, stage: &Stage, param: &Param) -> Vec<(Place, u64)> {
    let copy = param.copy.map(|place| (place, 0));
    filled_at_start(manifest, stage, param).into_iter().chain(copy).collect()
}

/// The slot of a version of a stage's weights. A second slot that is no version holds a prediction.
pub fn slot(stage: &Stage, version: u64) -> u64 {
    version % u64::from(stage.rings.weights)
}

/// Whether a file can be made there; asked before training, when the answer still helps.
///
/// # Errors
/// When it can't.
pub fn check_place(path: &Path) -> Result<(), RunError> {
    let temporary = temporary(path);
    File::create(&temporary).and_then(|_| std::fs::remove_file(&temporary)).map_err(|e| unwritable(path, &e))
}

/// A name beside the file, on the same file system.
fn temporary(path: &Path) -> PathBuf {
    path.with_extension(format!("tmp-{}", std::process::id()))
}

fn unwritable(path: &Path, error: &std::io::Error) -> RunError {
    let what = format!("can't be written ({error}); choose another place with `--save`");
    RunError::Weights { path: path.to_path_buf(), what }
}

/// Writes all weights, stages in order, under a temporary name first: the path never holds half a file.
///
/// # Errors
/// When the file can't be written.
pub fn save(path: &Path, manifest: &Manifest, ranks: &[&Rank], step: u64) -> Result<(), RunError> {
    let temporary = temporary(path);
    let written = write(&temporary, manifest, ranks, step).and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        // Nothing to add to the first error should this fail too.
        let _ = std::fs::remove_file(&temporary);
    }
    written.map_err(|e| unwritable(path, &e))
}

fn write(path: &Path, manifest: &Manifest, ranks: &[&Rank], step: u64) -> std::io::Result<()> {
    let header = header(manifest, step);
    let mut out = BufWriter::new(File::create(path)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (index, stage) in manifest.stages.iter().enumerate() {
        let rank = &ranks[stage.rank.index()];
        let newest = rank.stages.iter().find(|s| s.index == index).map_or(0, |s| s.version);
        let slot = slot(stage, newest);
        for param in stage.own_params() {
            out.write_all(rank.arena.view::<u8>(&param.weight, slot))?;
        }
    }
    out.into_inner()?.sync_all()
}

/// The header, padded to 8 bytes; keys in a fixed order, so that equal weights give equal files.
fn header(manifest: &Manifest, step: u64) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": FORMAT, "step": step.to_string() }));
    let mut at = 0;
    for param in params(manifest) {
        let end = at + param.weight.bytes;
        let entry = json!({ "dtype": "F32", "shape": param.shape, "data_offsets": [at, end] });
        header.insert(param.name.clone(), entry);
        at = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    text
}
