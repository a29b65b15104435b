//! The command line as a test sees it: specs written to a folder of the test's own, runs, their metrics.

use assert_cmd::Command;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A temporary folder with a spec in it.
pub struct Project {
    dir: TempDir,
}

/// What a run wrote.
pub struct Trained {
    /// By update, the bits as written.
    pub losses: Vec<f64>,
    /// The last line's `summary`.
    pub summary: Value,
    /// The largest drift of the update lines.
    pub drift_max_seen: u64,
}

/// Text that never changes, as training data: the Apache licence.
pub fn licence() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("LICENSE-APACHE")
}

pub fn paceline() -> Command {
    Command::new(env!("CARGO_BIN_EXE_paceline"))
}

impl Project {
    /// With `spec` in `spec.pace`.
    pub fn new(spec: &str) -> Project {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(dir.path().join("spec.pace"), spec).expect("a writable folder");
        Project { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command with `args`, in the folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = paceline();
        command.current_dir(self.dir.path()).args(args);
        command
    }

    /// Standard output of a command that must succeed.
    pub fn output(&self, args: &[&str]) -> String {
        let out = self.command(args).assert().success().get_output().stdout.clone();
        String::from_utf8(out).expect("text")
    }

    /// Exit status, standard output and error of a command.
    pub fn outcome(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let out = self.command(args).output().expect("the program starts");
        (out.status.code(), String::from_utf8_lossy(&out.stdout).into(), String::from_utf8_lossy(&out.stderr).into())
    }

    /// Trains `what` (a spec or a bundle) on the licence.
    pub fn train(&self, what: &str, updates: u64, more: &[&str]) -> Trained {
        let (data, updates) = (licence(), updates.to_string());
        let mut args = vec!["run", what, "--data", data.to_str().expect("UTF-8"), "--updates", &updates];
        args.extend(["--metrics", "metrics.jsonl"]);
        args.extend(more);
        self.command(&args).assert().success();
        read_metrics(&self.path("metrics.jsonl"))
    }
}

fn read_metrics(path: &Path) -> Trained {
    let text = std::fs::read_to_string(path).expect("metrics were written");
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).expect("JSON lines")).collect();
    let updates: Vec<&Value> = lines.iter().filter(|l| l.get("loss").is_some()).collect();
    Trained {
        losses: updates.iter().map(|l| l["loss"].as_f64().expect("a number")).collect(),
        drift_max_seen: updates.iter().filter_map(|l| l["drift_max_seen"].as_u64()).max().unwrap_or(0),
        summary: lines.last().expect("a last line")["summary"].clone(),
    }
}
