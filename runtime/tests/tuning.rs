//! Tuning with a library that is played: which of its algorithms are kept, what the manifest then says, and what does not run any more.

use crate::toy::{self, Log, Place as Folder, Schedule, toy};
use artifact::bundle::check_manifest;
use artifact::product::{Elements, Form, Product};
use artifact::program::{Call, Elem, KernelEntry, Launch, Manifest, Place};
use artifact::tuning::{Algorithm, Choice, Identity, Workspace};
use runtime::device::emulated::played::{Method, Played};
use runtime::device::emulated::{Emulation, World};
use runtime::device::library::tune::{FASTER_BY, Settings, tune};
use runtime::{Kernels, On, RunError};
use std::sync::Arc;
use std::time::Duration;

const M: usize = 3;
const N: usize = 5;
const K: usize = 7;
const PRODUCT: Product = Product {
    form: Form::Nt,
    m: M as u32,
    n: N as u32,
    k: K as u32,
    elements: Elements::F32,
    rounded: false,
    adds: true,
    bias: false,
};
const SETTINGS: Settings =
    Settings { workspace_bytes: 1 << 10, faster_by: FASTER_BY, deadline: Duration::from_secs(60) };

/// The kernel of the product: inout c += a b'.
unsafe extern "C-unwind" fn product(args: *const *mut u8) {
    let arg = |i, len| unsafe { std::slice::from_raw_parts_mut((*args.add(i)).cast::<f32>(), len) };
    let (a, b, c) = (arg(0, M * K), arg(1, N * K), arg(2, M * N));
    for (at, c) in c.iter_mut().enumerate() {
        *c += (0..K).fold(0.0, |sum, k| sum + a[at / N * K + k] * b[at % N * K + k]);
    }
}

/// The toy as if for devices, with a product at the end of its forward pass, over places that nothing else has.
fn manifest() -> Manifest {
    let mut manifest = toy::manifest(toy(Schedule::Gpipe, 1, 1));
    manifest.cpu = "cuda-emulated".into();
    let kernel = manifest.kernels.len() as u32;
    let product = Some(PRODUCT);
    manifest.kernels.push(KernelEntry { name: "product".into(), args: 3, product, ..KernelEntry::default() });
    for entry in &mut manifest.kernels {
        entry.launches = vec![Launch { entry: entry.name.clone(), grid: [1; 3], threads: 32 }];
        entry.elements = vec![Elem::F32; entry.args as usize];
    }
    let mut args = Vec::new();
    for bytes in PRODUCT.operand_bytes() {
        let offset = manifest.memory[0].total;
        args.push(Place { offset, bytes, stride: 0, slots: 1, by: Default::default() });
        manifest.memory[0].total = offset + bytes.next_multiple_of(64);
    }
    manifest.stages[0].bodies.f.push(Call { kernel, args });
    manifest
}

fn kernels() -> Arc<Kernels> {
    let mut table = toy::table();
    table.push(Some(product));
    // SAFETY: the kernels follow the sizes of the manifest.
    Arc::new(unsafe { Kernels::linked(vec![table]) })
}

fn world(manifest: &Manifest, library: Option<Played>) -> World {
    World::new(manifest, kernels(), Emulation::default()).with_library(library)
}

fn identity() -> Identity {
    Identity { library: "cuBLASLt".into(), version: 130_102, gpu: "toy".into(), capability: [9, 0], multiprocessors: 7 }
}

/// A library that takes so many hundredths of the kernel's time.
fn played<const HUNDREDTHS: u64>(methods: &[Method]) -> Played {
    let rule = |_: &Product, by: Option<&Algorithm>| Duration::from_micros(if by.is_some() { HUNDREDTHS } else { 100 });
    Played::new(identity(), methods.to_vec(), rule)
}

fn tuned(library: Played, settings: &Settings) -> (Manifest, Choice) {
    let (manifest, mut told) = (manifest(), Vec::new());
    let tuned = tune(&manifest, &world(&manifest, Some(library)), settings, &mut |choice| told.push(*choice)).unwrap();
    check_manifest(&tuned).unwrap();
    let tuning = tuned.tuning.as_ref().unwrap();
    assert_eq!((tuning.on.clone(), &tuning.choices), (identity(), &told));
    let choice = told[0];
    (tuned, choice)
}

#[test]
fn the_library_gets_what_it_computes_faster() {
    for (library, kept) in [
        (played::<50>(&[Method::Descending]), true),
        (played::<96>(&[Method::Descending]), true),
        (played::<98>(&[Method::Descending]), false),
        (played::<150>(&[Method::Descending]), false),
    ] {
        let (tuned, choice) = tuned(library.clone(), &SETTINGS);
        let times = (choice.own_ns, choice.library_ns);
        assert_eq!(times, (100_000, Some((library.rule)(&PRODUCT, Some(&algorithm())).as_nanos() as u64)));
        assert_eq!((choice.algorithm.is_some(), choice.offered, choice.refused), (kept, 1, 0), "{times:?}");
        assert_eq!(tuned.library().is_some(), kept);
        assert_eq!(tuned.memory, manifest().memory, "it needs no workspace");
    }
    let always = Settings { faster_by: f64::NEG_INFINITY, ..SETTINGS };
    assert!(tuned(played::<900>(&[Method::Descending]), &always).1.algorithm.is_some());
}

/// Any one.
fn algorithm() -> Algorithm {
    Algorithm { words: [0; 8], workspace_bytes: 0, settings: Default::default() }
}

#[test]
fn what_computes_other_numbers_or_changing_ones_is_never_kept() {
    let (_, choice) = tuned(played::<10>(&[Method::Wrong, Method::Unsteady, Method::Descending]), &SETTINGS);
    assert_eq!((choice.offered, choice.refused), (3, 2));
    assert_eq!(choice.algorithm.unwrap().settings.id, Method::Descending as u32);
    let (_, choice) = tuned(played::<10>(&[Method::Unsteady, Method::Wrong]), &SETTINGS);
    assert_eq!((choice.offered, choice.refused, choice.library_ns, choice.algorithm), (2, 2, None, None));
    let (_, choice) = tuned(played::<10>(&[]), &SETTINGS);
    assert_eq!((choice.offered, choice.library_ns, choice.algorithm), (0, None, None));
}

#[test]
fn what_is_not_run_is_not_judged_and_a_broken_device_ends_the_tuning() {
    let (_, choice) = tuned(played::<10>(&[Method::Refused, Method::Wrong, Method::Descending]), &SETTINGS);
    assert_eq!((choice.offered, choice.refused), (2, 1));
    assert_eq!(choice.algorithm.unwrap().settings.id, Method::Descending as u32);
    let (_, choice) = tuned(played::<10>(&[Method::Refused]), &SETTINGS);
    assert_eq!((choice.offered, choice.refused, choice.algorithm), (0, 0, None));
    let (manifest, library) = (manifest(), played::<10>(&[Method::Descending, Method::Breaking]));
    let error = tune(&manifest, &world(&manifest, Some(library)), &SETTINGS, &mut |_| {}).unwrap_err();
    assert!(
        error.exit_status() == 3
            && error.to_string().ends_with("measuring the kernel `product` failed: the device is broken"),
        "{error}"
    );
}

#[test]
fn a_workspace_is_the_end_of_the_arena_and_bounded() {
    let library = played::<50>(&[Method::Split]);
    let (tuned, choice) = tuned(library.clone(), &SETTINGS);
    let (before, bytes) = (manifest().memory[0].total, (4 * M * N) as u64);
    assert_eq!(choice.algorithm.unwrap().workspace_bytes, bytes);
    assert_eq!(tuned.tuning.as_ref().unwrap().workspaces, [Workspace { before, bytes }]);
    let total = before.next_multiple_of(256) + bytes;
    assert_eq!((tuned.memory[0].total, tuned.memory[0].workspace), (total, total - before));
    let mut again = tuned.clone();
    again.untune();
    assert_eq!(again, manifest());
    let (_, choice) = self::tuned(library, &Settings { workspace_bytes: bytes - 1, ..SETTINGS });
    assert_eq!((choice.offered, choice.algorithm), (0, None));
}

#[test]
fn a_tuned_pipeline_trains_in_graphs_and_in_its_arena() {
    let (tuned, _) = tuned(played::<50>(&[Method::Split]), &SETTINGS);
    let train = |manifest: &Manifest| {
        let (folder, mut log) = (Folder::new(), Log::default());
        let world = world(manifest, Some(played::<50>(&[Method::Split])));
        let summary = runtime::run_on(manifest, On::Devices(&world), &folder.options(6), &mut log).unwrap();
        (log.losses(), summary)
    };
    let (expected, found) = (train(&manifest()), train(&tuned));
    assert_eq!(found.0, expected.0, "the product is nobody's operand");
    assert_eq!(found.1.devices, expected.1.devices, "the same graphs");
    assert!(found.1.devices.unwrap().launched > 0);
    assert_eq!(found.1.ranks[0].allocated_bytes, tuned.memory[0].total);
}

/// What a run of a tuned pipeline says where this is the library.
fn refusal(library: Option<Played>) -> String {
    let (tuned, _) = tuned(played::<50>(&[Method::Descending]), &SETTINGS);
    let (folder, world) = (Folder::new(), world(&tuned, library));
    let error = runtime::run_on(&tuned, On::Devices(&world), &folder.options(1), &mut Log::default()).unwrap_err();
    assert!(matches!(error, RunError::Device(_)) && error.exit_status() == 3, "{error}");
    error.to_string()
}

#[test]
fn it_runs_with_the_library_and_the_gpu_that_it_was_measured_on_only() {
    let other = |change: fn(&mut Identity)| {
        let mut library = played::<50>(&[Method::Descending]);
        change(&mut library.identity);
        let said = refusal(Some(library));
        let end = "tune the bundle again here (`paceline tune`), or run the one that it was made from";
        assert!(said.ends_with(end), "{said}");
        said
    };
    let said = refusal(None);
    let end = "there is no library of matrix products; install it, or run the bundle that it was made from";
    assert_eq!(said, format!("the bundle was tuned with cuBLASLt 13.1.2, and {end}"));
    let said = other(|identity| identity.version = 130_200);
    assert!(
        said.starts_with("the bundle was tuned with cuBLASLt 13.1.2, and this machine has cuBLASLt 13.2.0;"),
        "{said}"
    );
    for change in [
        (|identity| identity.gpu = "another".into()) as fn(&mut Identity),
        |identity| identity.capability = [8, 0],
        |identity| identity.multiprocessors = 8,
    ] {
        let said = other(change);
        let start = "the bundle was tuned on toy (compute capability 9.0, 7 multiprocessors), and this GPU is ";
        assert!(said.starts_with(start), "{said}");
    }
    // Without a product of the library's, it runs anywhere.
    let (slow, _) = tuned(played::<150>(&[Method::Descending]), &SETTINGS);
    let world = world(&slow, None);
    runtime::run_on(&slow, On::Devices(&world), &Folder::new().options(1), &mut Log::default()).unwrap();
}

#[test]
fn a_pipeline_without_products_or_a_machine_without_a_library_is_told() {
    let mut none = manifest();
    none.kernels.last_mut().unwrap().product = None;
    let told = &mut |_: &Choice| {};
    let error = tune(&none, &world(&none, Some(Played::default())), &SETTINGS, told).unwrap_err();
    assert!(
        error.exit_status() == 2 && error.to_string().contains("no product that a library could compute"),
        "{error}"
    );
    let error = tune(&manifest(), &world(&manifest(), None), &SETTINGS, told).unwrap_err();
    assert!(error.exit_status() == 3 && error.to_string().contains("no library"), "{error}");
}

#[test]
fn a_tuning_that_contradicts_the_manifest_is_refused() {
    let (tuned, _) = tuned(played::<50>(&[Method::Split]), &SETTINGS);
    let said = |change: fn(&mut Manifest)| {
        let mut manifest = tuned.clone();
        change(&mut manifest);
        check_manifest(&manifest).unwrap_err().to_string()
    };
    fn tuning(m: &mut Manifest) -> &mut artifact::tuning::Tuning {
        m.tuning.as_mut().unwrap()
    }
    let cases: [(fn(&mut Manifest), &str); 10] = [
        (|m| m.cpu = "x86-64-v3".into(), "launches functions of a GPU"),
        (|m| tuning(m).workspaces.clear(), "it has 0 workspaces for 1 ranks"),
        (|m| tuning(m).workspaces[0].before += 256, "the workspace of rank 0 is not the end"),
        (|m| tuning(m).workspaces[0].bytes = u64::MAX, "the workspace of rank 0 is not the end"),
        (|m| m.memory[0].workspace = 0, "the workspace of rank 0 is not the end"),
        (|m| tuning(m).workspaces[0].before -= 256, "ends outside the arena"),
        (
            |m| tuning(m).choices[0].algorithm.as_mut().unwrap().workspace_bytes += 1,
            "needs a workspace of 61 bytes, and rank 0 has 60",
        ),
        (|m| tuning(m).choices[0].kernel = 0, "it is tuned for kernel 0, which is no product"),
        (|m| tuning(m).choices[0].kernel = 99, "it is tuned for kernel 99, which is no product"),
        (
            |m| {
                let choice = tuning(m).choices[0];
                tuning(m).choices.push(choice)
            },
            "not in ascending order",
        ),
    ];
    for (change, expected) in cases {
        assert!(said(change).contains(expected), "{} instead of {expected}", said(change));
    }
    let mut empty = tuned.clone();
    empty.kernels.last_mut().unwrap().product = Some(Product { k: 0, ..PRODUCT });
    assert!(check_manifest(&empty).unwrap_err().to_string().contains("`product` is an empty product"));
    let mut small = tuned.clone();
    small.stages[0].bodies.f.last_mut().unwrap().args[1].bytes -= 4;
    let said = check_manifest(&small).unwrap_err().to_string();
    assert!(said.contains("`product` is a product and gets 136 bytes where it takes 140"), "{said}");
}
