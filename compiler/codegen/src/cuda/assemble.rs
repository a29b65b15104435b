//! PTX -> machine code of one GPU architecture, by NVIDIA's assembler where there is one.

use crate::error::CodegenError;
use artifact::program::Cubin;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A `ptxas` that answers.
#[derive(Clone, Debug)]
pub struct Assembler {
    program: PathBuf,
    /// `ptxas 13.0.88`.
    name: String,
}

impl Assembler {
    /// Asks a program whether it is ptxas; none if it isn't, or does not start.
    pub fn ask(program: &Path) -> Option<Assembler> {
        let said = Command::new(program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        // Other tools of CUDA have the same line of the version.
        if !text.starts_with("ptxas:") {
            return None;
        }
        // "Cuda compilation tools, release 13.0, V13.0.88"
        let version = text.lines().find_map(|line| line.rsplit_once(", V").map(|(_, version)| version.trim()))?;
        Some(Assembler { program: program.to_path_buf(), name: format!("ptxas {version}") })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Assembles a module for a chip such as `sm_90`.
    ///
    /// # Errors
    /// What the assembler says, or the system about its files.
    pub fn assemble(&self, what: &str, ptx: &[u8], chip: &str) -> Result<Cubin, CodegenError> {
        let error = |message: String| CodegenError::new(what, "assembling", message);
        let io = |e: std::io::Error| error(e.to_string());
        let folder = tempfile::tempdir().map_err(io)?;
        let (input, output) = (folder.path().join("module.ptx"), folder.path().join("module.cubin"));
        std::fs::write(&input, ptx).map_err(io)?;
        let mut command = Command::new(&self.program);
        let said = command.arg(format!("-arch={chip}")).arg(&input).arg("-o").arg(&output).output().map_err(io)?;
        if !said.status.success() {
            let text = String::from_utf8_lossy(&said.stderr).trim().replace('\n', "; ");
            return Err(error(format!("{} ended with {}: {text}", self.name, said.status)));
        }
        Ok(Cubin { assembler: self.name.clone(), code: std::fs::read(&output).map_err(io)? })
    }
}
