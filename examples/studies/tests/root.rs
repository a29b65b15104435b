//! The runner against a command that stands for `paceline`: it refuses what has two versions of weights, diverges at one
//! rate, and notes what it was asked to do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const STAND_IN: &str = r#"#!/usr/bin/env bash
set -euo pipefail
here=$(dirname "$0")
case $1 in
check)
  case "$*" in
  *double_buffer*) echo '{"ok":false,"diagnostics":[{"code":"P0211","severity":"error","message":"not yet"}]}' ;;
  *) echo '{"ok":true,"makespan_us":2000,"period":{"microbatches":8,"us":1000},
       "stages":[{"drift":{"max":1,"mean":0.5},"delay":{"max":1,"mean":0.5}}]}' ;;
  esac ;;
compile)
  mkdir "${@: -1}"
  echo "$*" >"${@: -1}/spec" ;;
run)
  echo run >>"$here/calls"
  if grep -q 1e-2 "$2/spec"; then echo "error: the loss of update 3 is inf: training diverged; …" >&2; exit 3; fi
  while [ "$1" != --metrics ]; do shift; done
  for u in 0 1 2 3 4 5 6 7 8 9; do echo "{\"update\":$u,\"loss\":$((13 - u)).5}"; done >"$2"
  stopped=false
  [ ! -e "$here/stop" ] || stopped=true
  echo "{\"summary\":{\"tokens\":10240,\"elapsed_s\":1.5,\"eval_loss_last\":2.$4,\"stopped\":$stopped,\"ranks\":[],\"stages\":[]}}" >>"$2" ;;
esac
"#;

struct Bench {
    folder: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let command = folder.path().join("paceline");
        fs::write(&command, STAND_IN).unwrap();
        fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["train.txt", "heldout.txt"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        Bench { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn study(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline-studies"));
        let folder = |name: &str| self.path().join(name);
        command.args(arguments).args(["--updates", "10"]).arg("--paceline").arg(folder("paceline"));
        command.arg("--corpus").arg(self.path()).arg("--scratch").arg(folder("scratch"));
        command.arg("--results").arg(folder("results")).output().unwrap()
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.path().join("calls")).unwrap_or_default().lines().count()
    }

    fn result(&self, name: &str) -> String {
        fs::read_to_string(self.path().join("results").join(name)).unwrap_or_default()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_study_goes_on_where_it_stopped() {
    let bench = Bench::new();
    assert!(said(&bench.study(&["paci", "--budget-minutes", "0"])).contains("time is used up"));
    assert_eq!(bench.calls(), 0);
    fs::write(bench.path().join("stop"), "").unwrap();
    assert!(said(&bench.study(&["paci"])).contains("interrupted"), "a run that was stopped ends the study");
    assert_eq!((bench.calls(), bench.result("paci.csv").lines().count()), (1, 0), "and is no result");
    fs::remove_file(bench.path().join("stop")).unwrap();
    let output = bench.study(&["paci"]);
    assert!(output.status.success() && said(&output).contains("paci: complete"), "{}", said(&output));
    // Flush and PACI in four K at three rates with three seeds, and flush in three more K.
    let runs = bench.calls() - 1;
    assert_eq!((runs, bench.result("paci.csv").lines().count()), (3 * 5 * 3 + 3, 1 + runs));
    let page = bench.result("paci.md");
    assert!(page.contains("rate 1e-2: held-out loss diverged") && page.contains("rate 1e-3") && !page.contains("NaN"));
    assert!(page.contains("| 8 | 1 | 0.50 |") && bench.result("paci.svg").contains("<svg"), "{page}");
    assert!(said(&bench.study(&["paci"])).contains("complete"));
    assert_eq!(bench.calls(), runs + 1, "a complete study makes no runs");
}

#[test]
fn what_is_refused_is_a_row_of_its_own() {
    let bench = Bench::new();
    let output = bench.study(&["staleness"]);
    assert!(output.status.success(), "{}", said(&output));
    let page = bench.result("staleness.md");
    assert!(page.contains("`2bw` with `adamw`: P0211: not yet"), "{page}");
    assert!(page.contains("| 8 | 2BW, K = 8 |  |  | not available | not available |"), "{page}");
    let runs = bench.calls();
    let output = bench.study(&["delay"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(bench.result("delay.md").contains("| muon | 1e-3, the last one tried |"), "{}", bench.result("delay.md"));
    assert!(bench.calls() > runs);
    let made = bench.calls();
    bench.study(&["paci"]);
    let shared = 3 + 2 + 3; // the rates, the baseline's other seeds, PACI with eight micro-batches on eight ranks
    assert_eq!(bench.calls(), made + 3 * 5 * 3 + 3 - shared, "runs that another study made are copied");
}

#[test]
fn failures_that_are_no_results_are_errors() {
    let bench = Bench::new();
    fs::write(bench.path().join("paceline"), "#!/bin/sh\nexit 7\n").unwrap();
    let output = bench.study(&["paci"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).starts_with("error: paceline check reported no JSON"), "{}", said(&output));
    fs::remove_file(bench.path().join("train.txt")).unwrap();
    assert!(said(&bench.study(&["paci"])).contains("scripts/corpus.sh makes the corpus"));
}
