//! A bundle: a compiled training pipeline as a set of named files.
//!
//! # Files
//!
//! | file | content |
//! |---|---|
//! | `manifest.json` | [`FORMAT`], the [`Manifest`], and where each image's kernels start |
//! | `stage-N.image` | machine code of stage N, nothing else: `objdump -b binary` reads it |
//! | `stage-N.cubin` | the same code of stage N for one GPU architecture, if `stage-N.image` is PTX and an assembler was found |
//! | `checksums` | a line per file above, `BLAKE3 in hex, two spaces, name`, in that order: `b3sum --check` reads it |
//!
//! No time, path or host name goes in: the same input gives the same bytes.
//!
//! # Reading
//!
//! In this order, so that the first error is the one that explains the others: every file against its checksum, the format
//! version, the manifest's syntax, its structure ([`crate::structure`]), and the streams ([`crate::verify`]). Whatever the
//! bytes are, the answer is a bundle or a [`BundleError`]; nothing is allocated that the files' own sizes don't bound.

use crate::ids::StageId;
use crate::program::{Cubin, Image, Manifest};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::io;

/// Version of the format that this program writes and reads.
pub const FORMAT: u32 = 1;

/// Name of the file that lists the others.
pub const CHECKSUMS: &str = "checksums";
/// Name of the manifest's file.
pub const MANIFEST: &str = "manifest.json";

/// What a run needs: the manifest and an image for each stage, in stage order.
#[derive(Clone, Debug, PartialEq)]
pub struct Bundle {
    pub manifest: Manifest,
    pub images: Vec<Image>,
}

/// Why files are no bundle that can be run. Each message is one sentence that names the file and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error("can't read `{file}` of the bundle ({source}); is this a directory that `paceline compile` wrote?")]
    Read { file: String, source: io::Error },
    #[error("`checksums` of the bundle is damaged: {what}; copy or compile the bundle again")]
    Checksums { what: String },
    #[error(
        "`{file}` was cut or altered: its checksum is not the one in `checksums`; copy or compile the bundle again"
    )]
    Altered { file: String },
    #[error(
        "`manifest.json` has format version {found}, and this program reads version {FORMAT}; compile the bundle again with this program"
    )]
    Version { found: u32 },
    #[error("`manifest.json` can't be read ({what}); compile the bundle again with this program")]
    Syntax { what: String },
    #[error("`{file}` contradicts itself: {what}; compile the bundle again with this program")]
    Structure { file: String, what: String },
    #[error(
        "the instruction streams in `manifest.json` are not sound ({what}); compile the bundle again with this program"
    )]
    Streams { what: String },
}

/// What the reader needs before it knows that the rest can be read.
#[derive(Deserialize)]
struct Header {
    format: u32,
}

#[derive(Serialize)]
struct ManifestFileRef<'a> {
    format: u32,
    manifest: &'a Manifest,
    images: Vec<ImageRef<'a>>,
}

#[derive(Serialize)]
struct ImageRef<'a> {
    stage: StageId,
    exports: &'a [(u32, u64)],
    /// What assembled its cubin, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    assembler: Option<&'a str>,
}

impl<'a> ImageRef<'a> {
    fn new(image: &'a Image) -> ImageRef<'a> {
        let assembler = image.cubin.as_ref().map(|cubin| cubin.assembler.as_str());
        ImageRef { stage: image.stage, exports: &image.exports, assembler }
    }
}

#[derive(Deserialize)]
struct ManifestFile {
    manifest: Manifest,
    images: Vec<ImageEntry>,
}

#[derive(Deserialize)]
struct ImageEntry {
    stage: StageId,
    exports: Vec<(u32, u64)>,
    #[serde(default)]
    assembler: Option<String>,
}

/// Checks what a run relies on in a manifest, as far as it doesn't concern the images.
///
/// # Errors
/// The first thing that is wrong.
pub fn check_manifest(manifest: &Manifest) -> Result<(), BundleError> {
    crate::structure::manifest(manifest).map_err(|what| BundleError::Structure { file: MANIFEST.into(), what })?;
    streams(manifest)
}

fn streams(manifest: &Manifest) -> Result<(), BundleError> {
    crate::verify::verify(&manifest.program).map_err(|violations| {
        let what = violations.first().map_or_else(|| "unknown".into(), ToString::to_string);
        BundleError::Streams { what }
    })
}

/// Name of a stage's image file.
pub fn image_name(stage: StageId) -> String {
    format!("stage-{stage}.image")
}

/// Name of a stage's file with machine code of a GPU.
pub fn cubin_name(stage: StageId) -> String {
    format!("stage-{stage}.cubin")
}

impl Bundle {
    /// The bundle as (file name, bytes), the list of checksums last.
    pub fn to_files(&self) -> Vec<(String, Vec<u8>)> {
        let images = self.images.iter().map(ImageRef::new).collect();
        let file = ManifestFileRef { format: FORMAT, manifest: &self.manifest, images };
        let json = serde_json::to_vec(&file).expect("a manifest has string keys only");
        let mut files = vec![(MANIFEST.to_string(), json)];
        files.extend(self.images.iter().map(|i| (image_name(i.stage), i.code.clone())));
        let cubins = self.images.iter().filter_map(|i| Some((cubin_name(i.stage), i.cubin.as_ref()?.code.clone())));
        files.extend(cubins);
        let mut list = String::new();
        for (name, bytes) in &files {
            writeln!(list, "{}  {name}", blake3::hash(bytes).to_hex()).expect("a String takes any text");
        }
        files.push((CHECKSUMS.to_string(), list.into_bytes()));
        files
    }

    /// Checks what a run relies on: the structure, then the streams.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), BundleError> {
        crate::structure::check(self)?;
        streams(&self.manifest)
    }

    /// Reads and checks a bundle; `read` gives the bytes of a file by name. See the module's text for the order of checks.
    ///
    /// # Errors
    /// The first thing that is wrong. Whether this machine's CPU can run the images is the runtime's question.
    pub fn from_files(mut read: impl FnMut(&str) -> io::Result<Vec<u8>>) -> Result<Bundle, BundleError> {
        let mut open = |file: &str| read(file).map_err(|source| BundleError::Read { file: file.to_string(), source });
        let listed = parse_checksums(&open(CHECKSUMS)?)?;
        let mut contents = Vec::with_capacity(listed.len());
        let stages = listed.iter().filter(|(name, _)| name.ends_with(".image")).count();
        for (name, hash) in listed {
            let bytes = open(&name)?;
            if blake3::hash(&bytes).to_hex().as_str() != hash {
                return Err(BundleError::Altered { file: name });
            }
            contents.push(bytes);
        }
        let mut contents = contents.into_iter();
        let json = contents.next().expect("parse_checksums puts the manifest first");
        let codes = contents.by_ref().take(stages).collect();
        let bundle = assemble(&json, codes, contents.collect())?;
        bundle.check()?;
        Ok(bundle)
    }
}

/// The list of checksums as (name, hash in hex): the manifest first, then `stage-0.image` and so on without a gap; then no cubin, or likewise one of each stage.
/// Only the exact text that [`Bundle::to_files`] writes is accepted.
fn parse_checksums(bytes: &[u8]) -> Result<Vec<(String, String)>, BundleError> {
    let wrong = |what: String| BundleError::Checksums { what };
    let text = std::str::from_utf8(bytes).map_err(|_| wrong("it is not text".into()))?;
    let body = text.strip_suffix('\n').ok_or_else(|| wrong("its last line was cut".into()))?;
    let mut listed: Vec<(String, String)> = Vec::new();
    // Images listed, once the first cubin has come.
    let mut stages = None;
    for (i, line) in body.split('\n').enumerate() {
        let (hash, name) =
            line.split_once("  ").ok_or_else(|| wrong(format!("line {} is not `checksum  name`", i + 1)))?;
        if i > 1 && name == cubin_name(StageId(0)) {
            stages.get_or_insert(i - 1);
        }
        let expected = match (i, stages) {
            (0, _) => MANIFEST.to_string(),
            (_, None) => image_name(StageId(i as u32 - 1)),
            (_, Some(stages)) => cubin_name(StageId((i - 1 - stages) as u32)),
        };
        if name != expected {
            return Err(wrong(format!("line {} should be about `{expected}`", i + 1)));
        }
        listed.push((expected, hash.to_string()));
    }
    if listed.len() < 2 {
        return Err(wrong("it lists no stage image".into()));
    }
    if stages.is_some_and(|stages| listed.len() != 1 + 2 * stages) {
        return Err(wrong("it does not list a cubin of every stage".into()));
    }
    Ok(listed)
}

/// The bundle of a manifest file, the code of its stages, and their cubins if there are any; in stage order.
fn assemble(json: &[u8], codes: Vec<Vec<u8>>, cubins: Vec<Vec<u8>>) -> Result<Bundle, BundleError> {
    let syntax = |e: serde_json::Error| BundleError::Syntax { what: e.to_string() };
    let header: Header = serde_json::from_slice(json).map_err(syntax)?;
    if header.format != FORMAT {
        return Err(BundleError::Version { found: header.format });
    }
    let file: ManifestFile = serde_json::from_slice(json).map_err(syntax)?;
    let structure = |what: String| BundleError::Structure { file: MANIFEST.into(), what };
    if file.images.len() != codes.len() {
        return Err(structure(format!("it describes {} images, and there are {}", file.images.len(), codes.len())));
    }
    if let Some((i, _)) = file.images.iter().enumerate().find(|(i, image)| image.stage.index() != *i) {
        return Err(structure(format!("image {i} is listed for another stage")));
    }
    if file.images.iter().filter(|image| image.assembler.is_some()).count() != cubins.len() {
        return Err(structure(format!("it does not describe the {} cubins that there are", cubins.len())));
    }
    let mut cubins = cubins.into_iter();
    let image = |(entry, code): (ImageEntry, _)| {
        let cubin = entry.assembler.and_then(|assembler| Some(Cubin { assembler, code: cubins.next()? }));
        Image { stage: entry.stage, code, exports: entry.exports, cubin }
    };
    let images = file.images.into_iter().zip(codes).map(image).collect();
    Ok(Bundle { manifest: file.manifest, images })
}
