//! `paceline tune`: a bundle for emulated devices, whose library is played, from the command to a training with what it froze.

use crate::harness::{Project, licence};
use artifact::program::Manifest;
use artifact::tuning::Tuning;
use runtime::bundle_dir;

/// Products in all forms: with a bias, stored, and added to a sum.
const SPEC: &str = "
model gpt { layers = 1, width = 64, heads = 2, context = 32, vocab = 256 }
machine { ranks = 2 }
pipeline { partition = [[embed, block 0], [head]], schedule = async_1f1b, microbatch = 1, accumulate = 3 }
staleness { weights = current }
optimizer = adamw { lr = 3e-3 }
";

/// With a bundle for emulated devices in `bundle`, and what tuning it to `tuned` said.
fn tuned(spec: &str, more: &[&str]) -> (Project, String) {
    let project = Project::new(spec);
    project.output(&["compile", "spec.pace", "--target", "cuda-emulated", "-o", "bundle"]);
    let said = project.output(&[&["tune", "bundle", "-o", "tuned"], more].concat());
    (project, said)
}

fn manifest(project: &Project, bundle: &str) -> Manifest {
    bundle_dir::read(&project.path(bundle)).expect("a bundle").manifest
}

/// Puts a bundle beside the tuned one, whose tuning is another.
fn changed(project: &Project, change: impl Fn(&mut Tuning)) {
    let mut bundle = bundle_dir::read(&project.path("tuned")).expect("a bundle");
    change(bundle.manifest.tuning.as_mut().expect("tuned"));
    bundle_dir::write(&project.path("changed"), &bundle).expect("a writable folder");
}

#[test]
fn a_choice_is_measured_frozen_shown_and_run() {
    let (project, said) = tuned(SPEC, &[]);
    // As the played library's rule has it: large products, and one of many steps in two halves.
    let line = |times: &str, runs: &str, kernel: &str| format!("{times}  {runs:>7}  {kernel}\n");
    assert!(said.contains(&line("     33.8 us       20.3 us", "library", "matmul_nt_32x64x256")), "{said}");
    assert!(said.contains(&line("     25.6 us       20.3 us", "library", "matmul_nn_32x192x64_bias")), "{said}");
    assert!(said.contains(&line("      9.2 us       12.1 us", "kernel", "matmul_tn_64x64x32_grad_add")), "{said}");
    let summary = "by played cuBLASLt 13.0.0 on emulated device (compute capability 0.0, 1 multiprocessors)";
    assert!(said.contains(summary), "{said}");

    project.output(&["verify", "tuned"]);
    let shown = project.output(&["inspect", "tuned"]);
    assert!(shown.contains(summary) && shown.contains(" bytes of workspace for them, from byte "), "{shown}");
    assert!(shown.contains("library  matmul_nt_32x64x256: algorithm 1, tile 0, stages 0, split-k 2,"), "{shown}");
    assert!(shown.contains("kernel  matmul_tn_64x64x32_grad_add\n"), "{shown}");
    assert!(!project.output(&["inspect", "bundle"]).contains("cuBLASLt"));

    // The same each time, also from a bundle that is tuned.
    project.output(&["tune", "tuned", "-o", "again"]);
    let checksums = |name: &str| std::fs::read(project.path(name).join("checksums")).expect("a bundle");
    assert_eq!(checksums("again"), checksums("tuned"));

    let (before, after) = (manifest(&project, "bundle"), manifest(&project, "tuned"));
    let tuning = after.tuning.as_ref().expect("tuned");
    assert!(tuning.choices.iter().all(|choice| (choice.offered, choice.refused) == (2, 0)), "{tuning:?}");
    for (rank, (workspace, memory)) in tuning.workspaces.iter().zip(&after.memory).enumerate() {
        let old = before.memory[rank];
        assert_eq!(memory.total, if workspace.bytes == 0 { old.total } else { workspace.offset() + workspace.bytes });
        assert_eq!(memory.workspace - old.workspace, memory.total - old.total, "rank {rank}");
    }
    // The halves' sums of the largest product in two.
    assert_eq!(tuning.workspaces.iter().map(|w| w.bytes).collect::<Vec<_>>(), [4 * 32 * 64, 4 * 32 * 64]);

    let updates = 3;
    let (own, library) = (project.train("bundle", updates, &[]), project.train("tuned", updates, &[]));
    for (own, library) in own.losses.iter().zip(&library.losses) {
        assert!((own - library).abs() <= 1e-5 * own, "{library} with the library, {own} without");
    }
    assert_ne!(own.losses, library.losses, "the library sums in another order");
    assert_eq!(project.train("tuned", 2, &[]).losses, library.losses[..2], "a frozen choice gives the same bits");
    assert_eq!(own.summary["devices"], library.summary["devices"], "the same graphs");
    assert!(library.summary["devices"]["launched"].as_u64() > Some(0), "{}", library.summary);
    for (rank, memory) in after.memory.iter().enumerate() {
        assert_eq!(library.summary["ranks"][rank]["allocated_bytes"].as_u64(), Some(memory.total), "rank {rank}");
    }
}

#[test]
fn a_product_keeps_to_the_workspace_that_is_given() {
    let (project, said) = tuned(SPEC, &["--workspace", "0"]);
    assert!(said.contains("with a workspace of at most 0 B a rank"), "{said}");
    assert_eq!(manifest(&project, "tuned").memory, manifest(&project, "bundle").memory);
}

#[test]
fn a_bound_of_the_spec_holds_with_the_workspace_too() {
    let (project, _) = tuned(SPEC, &[]);
    let total = |bundle: &str| manifest(&project, bundle).memory[0].total;
    let bound = format!("machine.memory={} B", (total("bundle") + total("tuned")) / 2);
    project.output(&["compile", "spec.pace", "--target", "cuda-emulated", "-o", "bounded", "--set", &bound]);
    let (status, _, stderr) = project.outcome(&["tune", "bounded", "-o", "nothing"]);
    assert!(
        status == Some(3) && stderr.contains("rank 0 would need") && stderr.contains("give --workspace less"),
        "{stderr}"
    );
    assert!(!project.path("nothing").exists());
    project.output(&["tune", "bounded", "-o", "nothing", "--workspace", "0"]);

    let mut older = bundle_dir::read(&project.path("bounded")).expect("a bundle");
    older.manifest.source.insert_str(0, "once ");
    bundle_dir::write(&project.path("older"), &older).expect("a writable folder");
    let (status, said, stderr) = project.outcome(&["tune", "older", "-o", "none"]);
    assert!(status == Some(3) && said.is_empty() && stderr.contains("the bundle's spec does not load"), "{stderr}");
}

/// In bf16 activations are rounded where they are stored, and gradients are not; tf32 rounds operands. The library's numbers are the kernels' in each.
#[test]
fn products_of_other_elements_are_the_kernels_too() {
    for set in ["model.dtype=bf16", "pipeline.matmul=tf32"] {
        let project = Project::new(SPEC);
        project.output(&["compile", "spec.pace", "--target", "cuda-emulated", "-o", "bundle", "--set", set]);
        project.output(&["tune", "bundle", "-o", "tuned"]);
        let choices = manifest(&project, "tuned").tuning.expect("tuned").choices;
        assert!(choices.iter().all(|choice| (choice.offered, choice.refused) == (2, 0)), "{set}: {choices:?}");
        assert!(choices.len() > 10 && choices.iter().filter(|choice| choice.algorithm.is_some()).count() > 5, "{set}");
    }
}

#[test]
fn what_a_tuned_bundle_does_not_fit_is_told() {
    let (project, _) = tuned(SPEC, &[]);
    let data = licence();
    let run =
        |bundle: &str| project.outcome(&["run", bundle, "--data", data.to_str().expect("UTF-8"), "--updates", "1"]);
    let again = "tune the bundle again here (`paceline tune`), or run the one that it was made from\n";
    changed(&project, |tuning| tuning.on.version = 120_804);
    let (status, _, stderr) = run("changed");
    let said = "tuned with played cuBLASLt 12.8.4, and this machine has played cuBLASLt 13.0.0; ";
    assert!(status == Some(3) && stderr.contains(said) && stderr.ends_with(again), "{stderr}");
    changed(&project, |tuning| tuning.on.gpu = "another".into());
    let (status, _, stderr) = run("changed");
    assert!(status == Some(3) && stderr.contains("tuned on another (") && stderr.ends_with(again), "{stderr}");
    changed(&project, |tuning| tuning.choices[0].kernel = 0);
    let (status, _, stderr) = run("changed");
    assert!(status == Some(3) && stderr.contains("kernel 0, which is no product"), "{stderr}");

    project.output(&["compile", "spec.pace", "-o", "cpu"]);
    let (status, _, stderr) = project.outcome(&["tune", "cpu", "-o", "nothing"]);
    assert!(status == Some(2) && stderr.contains("is no GPU: its products are the bundle's own"), "{stderr}");
    project.output(&["compile", "spec.pace", "--target", "cuda:sm_90", "--ptxas", "none", "-o", "gpu"]);
    let (status, _, stderr) = project.outcome(&["tune", "gpu", "-o", "nothing"]);
    // A machine with a GPU tunes.
    if status != Some(0) {
        assert_eq!((status, stderr.lines().count()), (Some(3), 1), "{stderr}");
        assert!(!project.path("nothing").exists(), "a failed tuning writes nothing");
    }
    let (status, said, stderr) = project.outcome(&["tune", "bundle", "-o", "."]);
    assert!(status == Some(3) && stderr.contains("cannot write") && said.is_empty(), "{said}{stderr}");
}
