//! Bundles as directories.

use artifact::bundle::{Bundle, BundleError, CHECKSUMS, MANIFEST};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Reads and checks the bundle in a directory.
///
/// # Errors
/// See [`Bundle::from_files`].
pub fn read(dir: &Path) -> Result<Bundle, BundleError> {
    Bundle::from_files(|name| fs::read(dir.join(name)))
}

/// Whether a directory looks like a bundle, good or damaged.
pub fn is_bundle(dir: &Path) -> bool {
    dir.join(MANIFEST).is_file() && dir.join(CHECKSUMS).is_file()
}

/// Whether a bundle may be written in a directory: it is missing or empty, or a bundle, which is then replaced.
///
/// # Errors
/// When it may not.
pub fn check_free(dir: &Path) -> io::Result<()> {
    let occupied = fs::symlink_metadata(dir).is_ok();
    let empty = || fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    if occupied && !is_bundle(dir) && !empty() {
        let text = "something is there that is not a bundle; remove it or choose another directory";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    sibling(dir, "new").map(drop)
}

/// Writes a bundle as a directory that appears as a whole: under a temporary name first, then renamed. An older bundle there is
/// replaced.
///
/// # Errors
/// When the files can't be written, or when something else than a bundle or an empty directory is there.
pub fn write(dir: &Path, bundle: &Bundle) -> io::Result<()> {
    check_free(dir)?;
    let occupied = fs::symlink_metadata(dir).is_ok();
    let new = sibling(dir, "new")?;
    let written = write_files(&new, bundle).and_then(|()| replace(dir, &new, occupied));
    if written.is_err() {
        // Nothing to add to the first error should this fail too.
        let _ = fs::remove_dir_all(&new);
    }
    written
}

/// A name beside `dir`, on the same file system.
fn sibling(dir: &Path, purpose: &str) -> io::Result<PathBuf> {
    let name =
        dir.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "this is no directory name"))?;
    Ok(dir.with_file_name(format!(".{}.{purpose}-{}", name.to_string_lossy(), std::process::id())))
}

fn write_files(dir: &Path, bundle: &Bundle) -> io::Result<()> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::create_dir(dir)?;
    bundle.to_files().into_iter().try_for_each(|(name, bytes)| fs::write(dir.join(name), bytes))
}

fn replace(dir: &Path, new: &Path, occupied: bool) -> io::Result<()> {
    if !occupied {
        return fs::rename(new, dir);
    }
    let old = sibling(dir, "old")?;
    fs::rename(dir, &old)?;
    if let Err(error) = fs::rename(new, dir) {
        fs::rename(&old, dir)?;
        return Err(error);
    }
    fs::remove_dir_all(&old)
}
