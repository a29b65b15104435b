//! Where NVIDIA's assembler is: named, in a CUDA installation that the environment names, on PATH, or where `make gpu-tools` put it.

use crate::failure::Failure;
use codegen::cuda::Assembler;
use std::env;
use std::path::{Path, PathBuf};

/// Variables that name a CUDA installation.
const ROOTS: [&str; 3] = ["CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"];
/// Of `make gpu-tools`, in the folder where it ran.
const TOOLS: &str = ".gpu-tools/nvidia/cu13/bin/ptxas";

/// The assembler that `--ptxas` names (`none`: none), else the first that is found and answers.
pub fn find(named: Option<&Path>) -> Result<Option<Assembler>, Failure> {
    match named {
        Some(path) if path == Path::new("none") => Ok(None),
        Some(path) => Assembler::ask(path).map(Some).ok_or_else(|| {
            Failure::Usage(format!("--ptxas {}: this is no ptxas, or it does not start", path.display()))
        }),
        None => Ok(places().find(|path| path.is_file()).and_then(|path| Assembler::ask(&path))),
    }
}

fn places() -> impl Iterator<Item = PathBuf> {
    let roots = ROOTS.iter().filter_map(env::var_os).map(|root| Path::new(&root).join("bin/ptxas"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<PathBuf> = env::split_paths(&path).map(|folder| folder.join("ptxas")).collect();
    roots.chain(on_path).chain([PathBuf::from(TOOLS)])
}
