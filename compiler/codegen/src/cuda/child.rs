//! Device code from a process of its own, so that LLVM, which ends the process where it meets what it can't select, ends only that one.
//!
//! The program starts itself with a hidden subcommand, which calls [`serve`]. Requests and answers are strings, each after its
//! length (u32, little-endian): a request is chip, features, name and module; an answer is `ok` or `error`, then PTX or what failed.

use super::lower;
use crate::context::CodegenContext;
use crate::error::CodegenError;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

/// The step that its errors name.
const STEP: &str = "device code";

/// How the program starts itself.
#[derive(Clone, Debug)]
pub struct Generator {
    pub program: PathBuf,
    pub arguments: Vec<String>,
}

/// A running child, which takes one kernel after the other.
pub struct Running {
    child: Child,
    /// What it says beside its answers: LLVM's last words.
    complaints: Option<JoinHandle<String>>,
}

impl Generator {
    pub fn start(&self) -> Result<Running, CodegenError> {
        let started = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let fail = |e: io::Error| CodegenError::new(self.program.display().to_string(), STEP, e.to_string());
        let mut child = started.map_err(fail)?;
        let mut stderr = child.stderr.take().expect("it is a pipe");
        let complaints = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before an error is worth showing.
            let _ = stderr.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(Running { child, complaints: Some(complaints) })
    }
}

impl Running {
    /// PTX of a module; see [`lower::assembly`].
    pub fn assembly(
        &mut self,
        name: &str,
        module: &str,
        (chip, features): (&str, &str),
    ) -> Result<String, CodegenError> {
        match self.exchange([chip, features, name, module]) {
            Ok([status, text]) if status == "ok" => Ok(text),
            Ok([_, text]) => Err(CodegenError::new(name, STEP, text)),
            Err(error) => Err(CodegenError::new(name, STEP, self.last_words(&error))),
        }
    }

    fn exchange(&mut self, request: [&str; 4]) -> io::Result<[String; 2]> {
        let (stdin, stdout) = (self.child.stdin.as_mut(), self.child.stdout.as_mut());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else { return Err(io::ErrorKind::BrokenPipe.into()) };
        for part in request {
            write(stdin, part)?;
        }
        stdin.flush()?;
        let mut next = || read(stdout)?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
        Ok([next()?, next()?])
    }

    /// How a child ended that gave no answer.
    fn last_words(&mut self, error: &io::Error) -> String {
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let words = self.complaints.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let first = words.lines().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        format!("LLVM ended the process that generates code ({error}; {status}): {first}")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It ends when its input does.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The child's side: answers requests until the input ends.
pub fn serve(input: &mut impl Read, output: &mut impl Write) -> io::Result<()> {
    let context = CodegenContext::new();
    while let Some(chip) = read(input)? {
        let mut next = || read(input)?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
        let (features, name, module) = (next()?, next()?, next()?);
        let result = context.as_ref().map_err(Clone::clone);
        let result = result.and_then(|c| lower::assembly(c, &name, &module, (&chip, &features)));
        let (status, text) = match result {
            Ok(ptx) => ("ok", ptx),
            Err(error) => ("error", format!("{}: {}", error.step, error.message)),
        };
        write(output, status)?;
        write(output, &text)?;
        output.flush()?;
    }
    Ok(())
}

fn write(to: &mut impl Write, text: &str) -> io::Result<()> {
    let length = u32::try_from(text.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(text.as_bytes())
}

/// The next string; none at the end of the input.
fn read(from: &mut impl Read) -> io::Result<Option<String>> {
    let mut length = [0; 4];
    match from.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut length[1..])?,
    }
    let mut text = String::new();
    let length = u64::from(u32::from_le_bytes(length));
    if from.take(length).read_to_string(&mut text)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_come_back_and_a_cut_one_is_an_error() {
        let mut bytes = Vec::new();
        write(&mut bytes, "one").unwrap();
        write(&mut bytes, "").unwrap();
        let mut input = bytes.as_slice();
        assert_eq!(read(&mut input).unwrap().as_deref(), Some("one"));
        assert_eq!(read(&mut input).unwrap().as_deref(), Some(""));
        assert_eq!(read(&mut input).unwrap(), None);
        assert!(read(&mut &bytes[..5]).is_err());
        assert!(read(&mut &bytes[..2]).is_err());
    }
}
