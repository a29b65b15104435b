//! Bundles for GPUs: what is compiled, what assembles, what is refused.

use crate::harness::{Project, licence};
use codegen::cuda::Generator;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const SPEC: &str = "
model gpt { layers = 2, width = 16, heads = 2, context = 8, vocab = 256 }
machine { ranks = 2 }
pipeline { schedule = one_f_one_b, microbatch = 2, accumulate = 2 }
optimizer = sgd { lr = 0.1 }
";

#[test]
fn a_bundle_for_a_gpu_is_made_and_verified_and_asks_for_a_driver() {
    let project = Project::new(SPEC);
    let said = project.output(&["compile", "spec.pace", "--target", "cuda:sm_90", "-o", "bundle"]);
    assert!(said.contains("cuda:sm_90"), "{said}");
    assert!(project.output(&["inspect", "bundle"]).contains("for cuda:sm_90 by LLVM"));
    project.output(&["verify", "bundle"]);
    let image = std::fs::read_to_string(project.path("bundle/stage-0.image")).expect("PTX is text");
    assert_eq!(image.matches(".target sm_90").count(), 1, "one module a stage");
    assert!(image.contains(".visible .entry embed_2x8x16_v256("), "{image}");
    let (status, _, stderr) = project.outcome(&["run", "bundle", "--data", "spec.pace", "--updates", "1"]);
    // A machine with a suitable GPU trains.
    if status != Some(0) {
        assert_eq!(status, Some(3), "{stderr}");
        let said = "compiled for `cuda:sm_90`, and this machine has no NVIDIA driver";
        assert!(stderr.contains(said) && stderr.lines().count() == 1, "{stderr}");
    }
}

#[test]
fn a_bundle_for_a_gpu_is_the_same_each_time() {
    let project = Project::new(SPEC);
    let image = |name: &str| {
        project.output(&["compile", "spec.pace", "--target", "cuda:sm_80", "-o", name]);
        std::fs::read(project.path(&format!("{name}/checksums"))).expect("checksums")
    };
    assert_eq!(image("one"), image("two"));
}

#[test]
fn what_makes_no_sense_is_told() {
    let project = Project::new(SPEC);
    let cases: [(&[&str], &str); 4] = [
        (&["--target", "cuda:sm_75"], "no such target; there are cpu, cuda:sm_80"),
        (&["--target", "x86-64-v3"], "no such target"),
        (&["--emit", "ptx"], "is a level of --target cuda:CHIP"),
        (&["--target", "cuda:sm_80", "--cpu", "x86-64-v3"], "--cpu names a class for --target cpu"),
    ];
    for (more, expected) in cases {
        let (status, _, stderr) = project.outcome(&[&["compile", "spec.pace", "-o", "bundle"], more].concat());
        assert_eq!(status, Some(2), "{more:?}: {stderr}");
        assert!(stderr.contains(expected), "{more:?}: {stderr}");
    }
}

/// LLVM ends the process for a chip that a PTX version does not know.
#[test]
fn an_abort_in_code_generation_is_a_diagnostic() {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_paceline"));
    let generator = Generator { program, arguments: vec!["device-code".into()] };
    let module = "module {\ngpu.module @device {\ngpu.func @kernel() kernel {\ngpu.return\n}\n}\n}\n";
    let mut child = generator.start().expect("it starts");
    child.assembly("kernel", module, ("sm_90", "+ptx78")).expect("PTX");
    let error = child.assembly("kernel", module, ("sm_90", "+ptx32")).expect_err("an abort");
    assert!(error.message.contains("LLVM ended the process") && error.message.contains("PTX"), "{error}");
    let error = generator.start().expect("it starts").assembly("kernel", "module {", ("sm_90", "+ptx78"));
    assert!(error.expect_err("a diagnostic").message.contains("parse"), "an error of MLIR stays one");
}

/// NVIDIA's tools that `make gpu-tools` installs.
struct Tools {
    ptxas: PathBuf,
    nvdisasm: PathBuf,
}

impl Tools {
    /// None, after a line that says so, where they are not installed.
    fn find() -> Option<Self> {
        let tool = |name: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".gpu-tools/nvidia/cu13/bin").join(name);
            path.exists().then_some(path)
        };
        let tools = tool("ptxas").zip(tool("nvdisasm")).map(|(ptxas, nvdisasm)| Self { ptxas, nvdisasm });
        if tools.is_none() {
            eprintln!("skipped: there is no ptxas or no nvdisasm; `make gpu-tools` installs both");
        }
        tools
    }
}

/// Those that are analysed only have no kernels, and gpt-1f1b has those of gpt-paci.
#[test]
fn every_kernel_of_the_examples_assembles_without_spills() {
    let Some(tools) = Tools::find() else { return };
    let examples = ["bench-gpt", "gpt-2bw", "gpt-paci"];
    let specs = examples.map(|name| format!("{}/examples/{name}.pace", env!("CARGO_MANIFEST_DIR")));
    for chip in ["sm_80", "sm_90"] {
        tools.assemble(&Project::new(SPEC), &specs, chip, &[]);
    }
}

/// Optimizers that no example has: those that look at whole matrices, and others' updates on their own, since gradients are clipped first.
const PARTS: &str = "
model gpt { layers = 1, width = 48, heads = 2, context = 16, vocab = 256, tied = on }
machine { ranks = 1 }
pipeline { schedule = gpipe, microbatch = 2, accumulate = 2 }
optimizer = nadam {
  lr = 1e-3
  clip = per_stage(1.0)
  group \"block.0.attn.qkv.weight\" = soap { lr = 1e-3 }
  group \"block.0.attn.out.weight\" = mars { lr = 1e-3 }
  group \"block.0.mlp.up.weight\"   = normuon { lr = 1e-3 }
  group \"block.0.mlp.down.weight\" = muon { lr = 1e-3 }
  group vector                      = adan { lr = 1e-3 }
  group \"embed.tok\"               = lion { lr = 1e-3 }
  group \"embed.pos\"               = signum { lr = 1e-3 }
}
";

/// Updates in the epilogues of weight gradients.
const FUSED: &str = "
model gpt { layers = 1, width = 48, heads = 2, context = 16, vocab = 256 }
machine { ranks = 1 }
pipeline { schedule = gpipe, microbatch = 2, accumulate = 2 }
optimizer = lion {
  lr = 1e-3
  group \"block.0.attn.qkv.weight\" = sgd { lr = 1e-3, momentum = 0.9 }
  group \"block.0.mlp.up.weight\"   = signum { lr = 1e-3 }
  group \"block.0.mlp.down.weight\" = nadam { lr = 1e-3 }
  group \"head.weight\"             = adan { lr = 1e-3 }
}
";

#[test]
fn every_optimizer_s_kernels_assemble_without_spills() {
    let Some(tools) = Tools::find() else { return };
    let project = Project::new(PARTS);
    std::fs::write(project.path("fused.pace"), FUSED).expect("a writable folder");
    for chip in ["sm_80", "sm_90"] {
        let functions = tools.assemble(&project, &["spec.pace".into(), "fused.pace".into()], chip, &[]);
        let kinds = [
            "turn_",
            "precondition_",
            "average_",
            "correct_",
            "columns_",
            "momentum_",
            "scale_",
            "sum_squares_",
            "add_",
        ];
        let starts = kinds.iter().filter(|kind| functions.iter().any(|(name, _)| name.starts_with(**kind)));
        assert_eq!(starts.count(), kinds.len(), "SOAP, MARS, NorMuon, Muon, clipping, a tied table");
        for kind in ["adamw", "nadam", "adan", "lion", "signum", "muon", "sgd"] {
            assert!(functions.iter().any(|(name, _)| name.contains(kind)), "{kind} on {chip}");
        }
    }
}

/// Every product in tf32 and in bf16 is made of tensor-core instructions.
#[test]
fn products_assemble_to_tensor_cores() {
    let Some(tools) = Tools::find() else { return };
    let spec = [format!("{}/examples/gpt-paci.pace", env!("CARGO_MANIFEST_DIR"))];
    for chip in ["sm_80", "sm_90"] {
        for (set, suffix, instruction) in [
            ("pipeline.matmul=tf32", "_tf32", "HMMA.1688.F32.TF32"),
            ("model.dtype=bf16", "_bf16", "HMMA.16816.F32.BF16"),
        ] {
            let functions = tools.assemble(&Project::new(SPEC), &spec, chip, &["--set", set]);
            let products: Vec<_> = functions.iter().filter(|(name, _)| name.starts_with("matmul_")).collect();
            assert!(products.len() > 10, "{chip}");
            for (name, code) in products {
                assert!(name.ends_with(suffix) && code.contains(instruction), "{name} on {chip}");
            }
        }
    }
}

impl Tools {
    /// Assembles all kernels of some specs as one module and asserts that no function uses memory of a thread's own; gives each
    /// function's name and machine instructions.
    fn assemble(&self, project: &Project, specs: &[String], chip: &str, more: &[&str]) -> Vec<(String, String)> {
        let target = format!("cuda:{chip}");
        let kernels = specs.iter().map(|spec| {
            project.output(&[&["compile", spec, "--target", &target, "--emit", "ptx", "-o", "kernels"], more].concat());
            std::fs::read_to_string(project.path("kernels")).expect("PTX")
        });
        let (module, cubin) = (project.path("module.ptx"), project.path("module.cubin"));
        std::fs::write(&module, one_module(&kernels.collect::<String>())).expect("a writable folder");
        let mut command = Command::new(&self.ptxas);
        command.args(["-v", &format!("-arch={chip}")]).arg(&module).arg("-o").arg(&cubin);
        let done = command.output().expect("ptxas starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{chip}: {said}");
        no_spills(chip, &said);
        self.disassembled(&cubin)
    }

    fn disassembled(&self, cubin: &Path) -> Vec<(String, String)> {
        let done = Command::new(&self.nvdisasm).arg("-c").arg(cubin).output().expect("nvdisasm starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = String::from_utf8_lossy(&done.stdout);
        let of = |part: &str| part.split_once(',').map(|(name, code)| (name.trim().to_owned(), code.to_owned()));
        text.split(".section\t.text.").skip(1).filter_map(of).collect()
    }
}

/// Modules, each after a line of its own, as one, each function once: what stands before a module's functions is the same in all.
fn one_module(kernels: &str) -> String {
    let (mut module, mut seen) = (String::new(), HashSet::new());
    for kernel in kernels.split("// -----\n").skip(1).filter(|kernel| seen.insert(*kernel)) {
        let directive = kernel.find(".address_size").expect("a module of PTX");
        let functions = directive + kernel[directive..].find('\n').expect("the directive ends its line");
        module += if module.is_empty() { kernel } else { &kernel[functions..] };
    }
    module
}

/// Asserts by what ptxas says that no function spills.
fn no_spills(chip: &str, said: &str) {
    let mut entry = "";
    let mut checked = 0;
    for line in said.lines() {
        entry = line.split_once("entry function '").map_or(entry, |(_, rest)| rest.split('\'').next().unwrap_or(""));
        if line.contains("bytes stack frame") {
            checked += 1;
            let kept = line.trim().starts_with("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads");
            assert!(kept, "{entry} on {chip}: {line}");
        }
    }
    assert!(checked > 0, "{said}");
}

const SMALL: &str = "
model gpt { layers = 1, width = 64, heads = 2, context = 32, vocab = 256 }
machine { ranks = 2 }
pipeline { partition = [[embed, block 0], [head]], schedule = async_1f1b, microbatch = 1, accumulate = 2 }
staleness { weights = current }
optimizer = adamw { lr = 3e-3 }
";

/// The same runtime, a stage on each of two ranks, with device kernels. They sum rows in another order than the CPU's; the losses of
/// 20 updates differ by less than 1e-5 of their value, and a wrong kernel would move them by far more.
#[test]
fn device_kernels_train_as_the_cpu_does() {
    let project = Project::new(SMALL);
    let updates = 20;
    let cpu = project.train("spec.pace", updates, &[]);
    let device = project.train("spec.pace", updates, &["--target", "cuda-emulated"]);
    assert_eq!(device.losses.len(), updates as usize);
    for (update, (device, cpu)) in device.losses.iter().zip(&cpu.losses).enumerate() {
        assert!((device - cpu).abs() <= 1e-5 * cpu, "update {update}: {device} on the device, {cpu} on the CPU");
    }
    assert!(device.losses[19] < device.losses[0] - 0.5, "it learns: {:?}", device.losses);
}

/// What is exchanged once an update: a tied table's gradients, and the sums of a global norm.
#[test]
fn exchanges_before_updates_train_as_on_the_cpu() {
    let project = Project::new(&SMALL.replace("vocab = 256", "vocab = 256, tied = on"));
    let clip = "optimizer=sgd { lr = 0.5, momentum = 0.9, clip = global(0.5) }";
    let sets = ["--set", "pipeline.schedule=one_f_one_b", "--set", clip];
    let cpu = project.train("spec.pace", 5, &sets);
    let device = project.train("spec.pace", 5, &[&sets[..], &["--target", "cuda-emulated"]].concat());
    for (update, (device, cpu)) in device.losses.iter().zip(&cpu.losses).enumerate() {
        assert!((device - cpu).abs() <= 1e-5 * cpu, "update {update}: {device} on the device, {cpu} on the CPU");
    }
    let free = project.train("spec.pace", 5, &["--set", sets[1], "--set", &clip.replace("0.5)", "1e9)")]);
    assert!((free.losses[4] - cpu.losses[4]).abs() > 1e-3, "the norm is above the bound");
}

/// Rounding the operands of products to ten bits moves the losses, but not far.
#[test]
fn tf32_trains_close_to_f32() {
    let project = Project::new(SMALL);
    let cpu = project.train("spec.pace", 10, &[]);
    let device = project.train("spec.pace", 10, &["--target", "cuda-emulated", "--set", "pipeline.matmul=tf32"]);
    for (update, (device, cpu)) in device.losses.iter().zip(&cpu.losses).enumerate() {
        assert!((device - cpu).abs() <= 1e-3 * cpu, "update {update}: {device} on the device, {cpu} on the CPU");
    }
    assert!(device.losses != cpu.losses, "the operands were rounded");
}

/// In bf16 the device follows the CPU, which sums products in another order before they are rounded.
#[test]
fn bf16_trains_as_the_cpu_does_in_bf16() {
    let project = Project::new(&SMALL.replace("vocab = 256", "vocab = 256, dtype = bf16"));
    let bf16 = project.train("spec.pace", 20, &[]);
    let device = project.train("spec.pace", 20, &["--target", "cuda-emulated"]);
    for (update, (device, cpu)) in device.losses.iter().zip(&bf16.losses).enumerate() {
        assert!((device - cpu).abs() <= 1e-3 * cpu, "update {update}: {device} on the device, {cpu} on the CPU");
    }
    assert!(device.losses[19] < device.losses[0] - 0.5, "it learns: {:?}", device.losses);
    let f32 = project.train("spec.pace", 1, &["--set", "model.dtype=f32"]);
    assert!(device.losses[0] != f32.losses[0], "activations were rounded");
}

/// What differs from f32 in a pack's bundles.
const F32: (&str, &str) = ("f32", "pipeline.matmul=f32");
const TF32: (&str, &str) = ("tf32", "pipeline.matmul=tf32");
const BF16: (&str, &str) = ("bf16", "model.dtype=bf16");

/// A pack without its programs, made by its script's commands: kernels of each kind, a training on two ranks.
fn pack(chip: &str, kinds: &[(&str, &str)]) -> Project {
    let project = Project::new(SPEC);
    let target = if chip == "emulated" { "cuda-emulated".into() } else { format!("cuda:{chip}") };
    let compile = |folder: &str, ranks: &str, set: &str| {
        let folder = format!("pack/{folder}-{chip}");
        let set = ["--set", set, "--set", ranks];
        project.output(&[&["compile", "spec.pace", "--target", &target, "-o", &folder][..], &set].concat());
    };
    for (kind, set) in kinds {
        compile(&format!("kernels-{kind}"), "machine.ranks=1", set);
    }
    compile("train-two", "machine.ranks=2", F32.1);
    assert_eq!(project.train("spec.pace", 3, &[]).losses.len(), 3);
    std::fs::rename(project.path("metrics.jsonl"), project.path("pack/losses-two.jsonl")).expect("metrics");
    std::fs::copy(licence(), project.path("pack/text")).expect("a text");
    project
}

/// The check that runs on a GPU, with the emulator in its place.
#[test]
fn a_pack_is_checked_and_what_is_wrong_in_it_is_found() {
    let project = pack("emulated", &[F32, TF32, BF16]);
    for kind in ["f32", "tf32", "bf16"] {
        let (bundle, file) = (format!("pack/kernels-{kind}-emulated"), format!("pack/expected-{kind}"));
        project.output(&["gpu-expect", &bundle, "-o", &file]);
    }
    // A training in bf16 has its kernels.
    std::fs::rename(project.path("pack/kernels-bf16-emulated"), project.path("bf16")).expect("made above");
    for name in ["kernels", "train"] {
        copy(&project.path("bf16"), &project.path(&format!("pack/{name}-bf16-emulated")));
    }
    project.train("spec.pace", 3, &["--set", BF16.1]);
    std::fs::rename(project.path("metrics.jsonl"), project.path("pack/losses-bf16.jsonl")).expect("metrics");
    let said = project.output(&["gpu-check", "pack"]);
    assert_eq!(said.matches("have the emulator's bits, 0 are wrong").count(), 3, "{said}");
    assert!(said.contains("fine   training two for emulated: 2 ranks, 3 updates"), "{said}");
    assert!(said.contains("fine   training two for emulated, by the library: 2 ranks, 3 updates"), "{said}");
    assert!(said.contains(" library  matmul_nt_") && said.contains(", 0 of 2 algorithms refused\n"), "{said}");
    assert!(said.contains("fine   training bf16 for emulated: 1 ranks, 3 updates"), "{said}");
    assert!(said.ends_with("gpu-check: all as expected\n"), "{said}");

    // The largest number of an operand by 5e-5, in f32 and in tf32; one number of bf16 by a step, one by 2 or a half; and one loss.
    let more = |bytes: &mut [u8]| enlarge(bytes, 1.0 + 5e-5);
    let far = |bytes: &mut [u8]| bytes[1] ^= 1;
    alter(&project.path("pack/expected-f32"), "matmul_nn_16x48x16_bias/3", more);
    alter(&project.path("pack/expected-tf32"), "matmul_nn_16x48x16_bias_tf32/3", more);
    alter(&project.path("pack/expected-bf16"), "matmul_nn_16x48x16_bias_bf16/3", |bytes| bytes[0] ^= 1);
    alter(&project.path("pack/expected-bf16"), "layernorm_16x16_bf16/3", far);
    let losses = std::fs::read_to_string(project.path("pack/losses-two.jsonl")).expect("written above");
    std::fs::write(project.path("pack/losses-two.jsonl"), losses.replacen("\"loss\":5", "\"loss\":6", 1))
        .expect("writable");
    std::fs::remove_dir_all(project.path("pack/train-bf16-emulated")).expect("checked once");
    let (status, said, _) = project.outcome(&["gpu-check", "pack"]);
    assert_eq!(status, Some(1), "{said}");
    let judged =
        |name: &str| said.lines().find(|l| l.contains(&format!("  {name}: "))).map(|l| l.trim()[..5].to_owned());
    assert_eq!(judged("matmul_nn_16x48x16_bias").as_deref(), Some("WRONG"), "{said}");
    assert_eq!(judged("matmul_nn_16x48x16_bias_tf32").as_deref(), Some("close"), "{said}");
    assert_eq!(judged("matmul_nn_16x48x16_bias_bf16").as_deref(), Some("close"), "{said}");
    assert_eq!(judged("layernorm_16x16_bf16").as_deref(), Some("WRONG"), "{said}");
    assert!(said.contains("WRONG  training two"), "{said}");
    assert!(said.ends_with("gpu-check: 3 wrong\n"), "{said}");
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).expect("a writable folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, to.join(path.file_name().expect("a file"))).expect("a copy");
    }
}

/// Changes a tensor in a file of safetensors.
fn alter(file: &Path, tensor: &str, change: impl Fn(&mut [u8])) {
    let mut bytes = std::fs::read(file).expect("a file of the pack");
    let (length, rest) = bytes.split_first_chunk().expect("the header's length");
    let header = u64::from_le_bytes(*length) as usize;
    let names: serde_json::Value = serde_json::from_slice(&rest[..header]).expect("a header");
    let offset = |i: usize| names[tensor]["data_offsets"][i].as_u64().expect("the tensor is there") as usize;
    let (from, to) = (8 + header + offset(0), 8 + header + offset(1));
    change(&mut bytes[from..to]);
    std::fs::write(file, bytes).expect("writable");
}

/// Multiplies the largest of numbers of f32, all positive.
fn enlarge(bytes: &mut [u8], factor: f32) {
    let (numbers, _) = bytes.as_chunks_mut();
    let largest = numbers.iter_mut().max_by(|a, b| f32::from_le_bytes(**a).total_cmp(&f32::from_le_bytes(**b)));
    let largest = largest.expect("numbers");
    *largest = (f32::from_le_bytes(*largest) * factor).to_le_bytes();
}

#[test]
fn a_pack_on_a_machine_without_a_gpu_says_so() {
    let project = pack("sm_90", &[F32]);
    let (status, _, stderr) = project.outcome(&["gpu-check", "pack"]);
    // A machine with a GPU misses the file of expectations.
    let known = ["has no NVIDIA driver", "finds no GPU", "pack/expected"];
    assert_eq!(status, Some(3), "{stderr}");
    assert!(stderr.lines().count() == 1 && known.iter().any(|k| stderr.contains(k)), "{stderr}");
    let (status, _, stderr) = project.outcome(&["gpu-check", "."]);
    assert!(status == Some(3) && stderr.contains("is this a folder that `make gpu-pack` made?"), "{stderr}");
}

/// Answers as ptxas does, and "assembles" by copying.
const FAKE_PTXAS: &str = "#!/bin/sh
if [ \"$1\" = --version ]; then
  echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'
  echo 'Cuda compilation tools, release 13.0, V13.0.88'
else
  cp \"$2\" \"$4\"
fi
";

#[test]
fn machine_code_lies_beside_the_ptx_where_there_is_an_assembler() {
    let project = Project::new(SPEC);
    let fake = project.path("ptxas");
    std::fs::write(&fake, FAKE_PTXAS).expect("a writable folder");
    std::fs::set_permissions(&fake, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("executable");
    fn compile(ptxas: &str) -> [&str; 8] {
        ["compile", "spec.pace", "--target", "cuda:sm_90", "-o", "bundle", "--ptxas", ptxas]
    }
    project.output(&compile(fake.to_str().expect("UTF-8")));
    assert!(project.output(&["inspect", "bundle"]).contains(" by ptxas 13.0.88"));
    project.output(&["verify", "bundle"]);
    let bytes = |name: &str| std::fs::read(project.path(name)).expect("a file of the bundle");
    assert_eq!(bytes("bundle/stage-1.cubin"), bytes("bundle/stage-1.image"), "this assembler copies");
    std::fs::write(project.path("bundle/stage-1.cubin"), "x").expect("writable");
    let (status, _, stderr) = project.outcome(&["verify", "bundle"]);
    assert!(status == Some(3) && stderr.contains("`stage-1.cubin` was cut or altered"), "{stderr}");

    project.output(&compile("none"));
    assert!(!project.path("bundle/stage-0.cubin").exists() && project.path("bundle/stage-0.image").exists());
    let (status, _, stderr) = project.outcome(&compile("spec.pace"));
    assert!(status == Some(2) && stderr.contains("this is no ptxas"), "{stderr}");
}

/// With the real one.
#[test]
fn ptxas_assembles_the_stages_of_a_bundle() {
    let Some(tools) = Tools::find() else { return };
    let project = Project::new(SPEC);
    let ptxas = tools.ptxas.to_str().expect("UTF-8");
    project.output(&["compile", "spec.pace", "--target", "cuda:sm_80", "-o", "bundle", "--ptxas", ptxas]);
    let cubin = std::fs::read(project.path("bundle/stage-0.cubin")).expect("machine code");
    assert_eq!(&cubin[..4], b"\x7fELF");
    assert!(project.output(&["inspect", "bundle"]).contains(" by ptxas 13.0"));
}

#[test]
fn a_launcher_that_does_not_fit_the_bundle_is_told() {
    let project = Project::new(SPEC);
    project.output(&["compile", "spec.pace", "--target", "cuda:sm_90", "--ptxas", "none", "-o", "bundle"]);
    let said = |target: &str, variables: &[(&str, &str)]| {
        let mut command = project.command(&["run", target, "--data", "spec.pace", "--updates", "1", "--deadline", "1"]);
        let out = command.envs(variables.iter().copied()).output().expect("the program starts");
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let torchrun =
        |rank, ranks| [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];
    let cases = [
        ("bundle", torchrun("0", "4"), 2, "a launcher started 4 processes, and the pipeline has 2 ranks"),
        ("bundle", torchrun("2", "2"), 2, "this is rank 2 of 2"),
        ("spec.pace", torchrun("0", "2"), 2, "a launcher started 2 processes, and a run for"),
        // Nobody listens at this port.
        (
            "bundle",
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")],
            3,
            "can't reach rank 0",
        ),
    ];
    for (target, variables, status, expected) in cases {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let found = said(target, &[&variables[..], &[("MASTER_PORT", &port.to_string())]].concat());
        assert!(found.0 == Some(status) && found.1.contains(expected), "{variables:?}: {found:?}");
    }
}
