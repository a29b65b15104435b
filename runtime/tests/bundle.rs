//! Bundles: written and read back, damaged in every way, and as directories.

use crate::toy::{self, Schedule, toy};
use artifact::bundle::{Bundle, BundleError, CHECKSUMS, MANIFEST};
use artifact::ids::StageId;
use artifact::program::{Elem, Image, Launch};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;

type Files = BTreeMap<String, Vec<u8>>;

fn bundle() -> Bundle {
    let manifest = toy::manifest(toy(Schedule::Async, 2, 2));
    let exports: Vec<(u32, u64)> = (0..manifest.kernels.len() as u32).map(|k| (k, u64::from(k) * 8)).collect();
    let image =
        |s: u32| Image { stage: StageId(s), code: vec![0xc3 + s as u8; 64], exports: exports.clone(), cubin: None };
    Bundle { images: vec![image(0), image(1)], manifest }
}

fn files() -> Files {
    bundle().to_files().into_iter().collect()
}

fn read(files: &Files) -> Result<Bundle, BundleError> {
    Bundle::from_files(|name| files.get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into()))
}

/// The files with another manifest and checksums that fit it.
fn with_manifest(json: &Value) -> Files {
    let mut files = files();
    let bytes = serde_json::to_vec(json).unwrap();
    let old = blake3::hash(&files[MANIFEST]).to_hex().to_string();
    let list = String::from_utf8(files[CHECKSUMS].clone()).unwrap();
    files.insert(CHECKSUMS.into(), list.replace(&old, blake3::hash(&bytes).to_hex().as_str()).into_bytes());
    files.insert(MANIFEST.into(), bytes);
    files
}

fn json() -> Value {
    serde_json::from_slice(&files()[MANIFEST]).unwrap()
}

/// The message about a manifest in which the value at a JSON pointer is another one.
fn message(pointer: &str, value: impl Into<Value>) -> String {
    let mut json = json();
    *json.pointer_mut(pointer).unwrap() = value.into();
    read(&with_manifest(&json)).unwrap_err().to_string()
}

#[test]
fn reads_what_it_wrote_and_writes_the_same_bytes() {
    assert_eq!(read(&files()).unwrap(), bundle());
    assert_eq!(read(&files()).unwrap().to_files(), bundle().to_files());
    assert_eq!(files().into_keys().collect::<Vec<_>>(), [CHECKSUMS, MANIFEST, "stage-0.image", "stage-1.image"]);
}

#[test]
fn every_cut_and_every_changed_byte_is_noticed() {
    let good = files();
    for (name, bytes) in &good {
        // All positions of small files, every 97th of the manifest.
        let step = if bytes.len() > 2000 { 97 } else { 1 };
        for at in (0..bytes.len()).step_by(step).chain([bytes.len() - 1]) {
            let mut cut = good.clone();
            cut.insert(name.clone(), bytes[..at].to_vec());
            read(&cut).unwrap_err();
            for bit in 0..8 {
                let mut changed = good.clone();
                changed.get_mut(name).unwrap()[at] ^= 1 << bit;
                read(&changed).unwrap_err();
            }
        }
        let mut longer = good.clone();
        longer.get_mut(name).unwrap().push(b'\n');
        read(&longer).unwrap_err();
        let mut without = good.clone();
        without.remove(name);
        assert!(read(&without).unwrap_err().to_string().contains(name.as_str()));
    }
}

#[test]
fn messages_name_the_file_and_the_remedy() {
    let mut files = files();
    files.get_mut("stage-1.image").unwrap()[3] ^= 1;
    assert_eq!(
        read(&files).unwrap_err().to_string(),
        "`stage-1.image` was cut or altered: its checksum is not the one in `checksums`; copy or compile the bundle again"
    );
    assert_eq!(
        message("/format", 2),
        "`manifest.json` has format version 2, and this program reads version 1; compile the bundle again with this program"
    );
    assert!(message("/manifest/data", Value::Null).starts_with("`manifest.json` can't be read"));
}

#[test]
fn contradictions_are_found() {
    let cases = [
        message("/manifest/stages/0/params/0/weight/offset", 1u64 << 40),
        message("/manifest/stages/0/params/0/weight/offset", 8),
        message(
            "/manifest/stages/0/params/0/weight/offset",
            json()["manifest"]["stages"][0]["io"]["hyper"]["offset"].clone(),
        ),
        message("/manifest/memory/0/total", u64::MAX - 7),
        message("/manifest/memory/0/workspace", u64::MAX),
        message("/manifest/stages/0/params/0/shape/0", 6),
        message("/manifest/stages/0/params/0/group", 1),
        message("/manifest/groups", json!([])),
        message(
            "/manifest/groups/0/optimizer",
            json!({"soap": {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "frequency": 0, "max_dim": 9, "decay": 0}}),
        ),
        message("/manifest/stages/0/io/send_f/bytes", 64),
        message("/manifest/stages/0/io/version_seen/slots", 1),
        message("/manifest/stages/1/bodies/f/0/kernel", 99),
        message("/manifest/stages/1/bodies/f/0/kernel", 0),
        message("/manifest/stages/1/params/1/name", "layer.0.w"),
        message("/manifest/program/accumulate", 3),
        message("/manifest/boundary", 0),
        message("/manifest/correction", json!({"error_feedback": {"lambda": 1, "delay": [1]}})),
        message("/manifest/correction", json!({"error_feedback": {"lambda": 1, "delay": [1, -1]}})),
        message("/manifest/correction", json!({"error_feedback": {"lambda": 1, "delay": [1, 0]}})),
        message("/manifest/correction", json!({"nesterov": {"momentum": [0.9, 1]}})),
        message("/manifest/correction", json!({"pipemare": {"anneal": 0, "delay": [1, 0], "drift": [1, 0]}})),
        message("/manifest/correction", json!({"pipemare": {"discrepancy": 1, "delay": [1, 0], "drift": [1, 0]}})),
        message("/manifest/correction", json!({"pipemare": {"discrepancy": 0.5, "delay": [1, 0], "drift": [1, 0]}})),
        message("/images/1/exports/7/1", 64),
        message("/images/1/exports/7/0", 6),
        message("/images/1/exports/7/0", 77),
    ];
    let texts = cases.map(|c| c.strip_suffix("; compile the bundle again with this program").unwrap().to_string());
    let expected = [
        "`manifest.json` contradicts itself: in stage 0, a weight at byte 1099511627776 ends outside the arena of",
        "`manifest.json` contradicts itself: in stage 0, a weight at byte 8 is not aligned to 64 bytes",
        "`manifest.json` contradicts itself: two buffers of rank 0 share byte",
        "`manifest.json` contradicts itself: rank 0 has an arena of 18446744073709551608 bytes, more than any",
        "`manifest.json` contradicts itself: 18446744073709551615 of the ",
        "`manifest.json` contradicts itself: in stage 0, a buffer of `layer.0.w` has 20 bytes, and its shape takes 24",
        "`manifest.json` contradicts itself: in stage 0, `layer.0.w` is in group 1, and there are 1",
        "`manifest.json` contradicts itself: there is no optimizer",
        "`manifest.json` contradicts itself: bases that turn every 0 updates",
        "`manifest.json` contradicts itself: stages 0 and 1 exchange buffers of different sizes",
        "`manifest.json` contradicts itself: in stage 0, the versions seen has 1 slots, unlike its ring",
        "`manifest.json` contradicts itself: in stage 1, kernel 99 is called, and there are 8",
        "`manifest.json` contradicts itself: in stage 1, `embed` is called with 3 arguments instead of 2",
        "`manifest.json` contradicts itself: two parameters are called `layer.0.w`",
        "`manifest.json` contradicts itself: rank 0 repeats 2 micro-batches for 1 updates of 3",
        "`manifest.json` contradicts itself: the boundary comes every 0 updates",
        "`manifest.json` contradicts itself: there are 2 stages and 1 corrections of them",
        "`manifest.json` contradicts itself: a stage is corrected by what is below 0 or not a number",
        "`manifest.json` contradicts itself: in stage 0, `layer.0.w` has 1 optimizer states instead of 2",
        "`manifest.json` contradicts itself: a momentum of 1 or more looks ahead without end",
        "`manifest.json` contradicts itself: learning rates are annealed over 0 updates",
        "`manifest.json` contradicts itself: of a mean change nothing or all is kept",
        "`manifest.json` contradicts itself: in stage 0, `layer.0.w` has 1 optimizer states instead of 3",
        "`stage-1.image` contradicts itself: kernel 7 starts at byte 64, outside the code",
        "`stage-1.image` contradicts itself: its kernels are not in ascending order",
        "`stage-1.image` contradicts itself: it exports kernel 77, which the manifest doesn't know",
    ];
    for (text, expected) in texts.iter().zip(expected) {
        assert!(text.starts_with(expected), "{text}\n  instead of {expected}");
    }
}

#[test]
fn streams_are_verified_again() {
    // The first stage's last send of the period goes missing.
    let mut json = json();
    json.pointer_mut("/manifest/program/streams/0/period").unwrap().as_array_mut().unwrap().remove(1);
    let text = read(&with_manifest(&json)).unwrap_err().to_string();
    assert!(text.starts_with("the instruction streams in `manifest.json` are not sound"), "{text}");
}

/// Pointers to all numbers of a JSON value.
fn numbers(value: &Value, at: &str, out: &mut Vec<String>) {
    match value {
        Value::Number(_) => out.push(at.to_string()),
        Value::Array(items) => items.iter().enumerate().for_each(|(i, v)| numbers(v, &format!("{at}/{i}"), out)),
        Value::Object(map) => map.iter().for_each(|(k, v)| numbers(v, &format!("{at}/{k}"), out)),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// A manifest with any number changed, checksums fitting, is read or refused: never a panic or an absurd allocation.
    #[test]
    fn any_number_in_the_manifest_is_survived(pick in any::<prop::sample::Index>(), value in prop_oneof![
        0u64..70, any::<u32>().prop_map(u64::from), any::<u64>(),
        Just(u64::MAX), Just(u64::from(u32::MAX)), Just(1u64 << 63), Just((1u64 << 63) - 64),
    ]) {
        let mut json = json();
        let mut all = Vec::new();
        numbers(&json, "", &mut all);
        *json.pointer_mut(&all[pick.index(all.len())]).unwrap() = value.into();
        if let Ok(bundle) = read(&with_manifest(&json)) {
            prop_assert_eq!(read(&bundle.to_files().into_iter().collect()).unwrap(), bundle);
        }
    }
}

#[test]
fn directories_appear_whole_and_replace_only_bundles() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("a/bundle");
    runtime::bundle_dir::write(&at, &bundle()).unwrap();
    assert_eq!(runtime::bundle_dir::read(&at).unwrap(), bundle());
    let mut other = bundle();
    other.manifest.source_name = "other.pace".into();
    runtime::bundle_dir::write(&at, &other).unwrap();
    assert_eq!(runtime::bundle_dir::read(&at).unwrap(), other);

    let precious = dir.path().join("precious");
    std::fs::create_dir(&precious).unwrap();
    runtime::bundle_dir::write(&precious, &bundle()).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("a")).unwrap().count(), 1, "nothing temporary is left");
    std::fs::remove_file(precious.join(CHECKSUMS)).unwrap();
    let error = runtime::bundle_dir::write(&precious, &bundle()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert!(precious.join(MANIFEST).is_file());
    let error = runtime::bundle_dir::read(&precious).unwrap_err().to_string();
    assert!(error.starts_with("can't read `checksums` of the bundle"), "{error}");
}

#[test]
fn a_bundle_for_another_cpu_is_refused() {
    let mut bundle = bundle();
    bundle.manifest.cpu = "x86-64-v9".into();
    let place = toy::Place::new();
    let error = {
        let options = place.options(1);
        let inputs = runtime::Inputs::read(&bundle.manifest, &options).unwrap();
        runtime::run(&bundle, &inputs, &options, &mut ()).unwrap_err()
    };
    let text = error.to_string();
    assert!(
        text.starts_with("the bundle was compiled for `x86-64-v9`, which is not known to this program; "),
        "{text}"
    );
    assert_eq!(error.exit_status(), 3);
}

/// The toy's bundle as one for a GPU: a launch for each kernel, in PTX.
fn on_a_gpu() -> Bundle {
    let mut bundle = bundle();
    bundle.manifest.cpu = "cuda:sm_80".into();
    for (i, kernel) in bundle.manifest.kernels.iter_mut().enumerate() {
        kernel.launches = vec![Launch { entry: format!("k{i}"), grid: [3, 2, 1], threads: 64 }];
        kernel.elements = vec![Elem::F32; kernel.args as usize];
    }
    for image in &mut bundle.images {
        image.code = b".version 7.0\n".to_vec();
        for (kernel, start) in &mut image.exports {
            *start = image.code.len() as u64;
            image.code.extend(format!(".visible .entry k{kernel}(\n)\n").bytes());
        }
    }
    bundle
}

/// What is wrong with the bundle for a GPU after a change of it.
fn damaged(change: impl FnOnce(&mut Bundle)) -> String {
    let mut bundle = on_a_gpu();
    change(&mut bundle);
    artifact::structure::check(&bundle).expect_err("it is damaged").to_string()
}

#[test]
fn launches_that_no_gpu_takes_are_found() {
    assert_eq!(artifact::structure::check(&on_a_gpu()).map_err(|e| e.to_string()), Ok(()));
    let launch = |change: fn(&mut Launch)| damaged(|b| change(&mut b.manifest.kernels[1].launches[0]));
    let cases = [
        (launch(|l| l.threads = 0), "in blocks of 0 threads"),
        (launch(|l| l.threads = 48), "in blocks of 48 threads"),
        (launch(|l| l.threads = 1056), "in blocks of 1056 threads"),
        (launch(|l| l.grid[1] = 0), "over 3 x 0 x 1 blocks"),
        (launch(|l| l.grid[2] = 65_536), "over 3 x 2 x 65536 blocks"),
        (launch(|l| l.entry = "k".into()), "launches `k`, which its code does not have"),
        // Another kernel's function.
        (launch(|l| l.entry = "k2".into()), "launches `k2`, which its code does not have"),
        (damaged(|b| b.manifest.kernels[1].launches.clear()), "launches nothing, and the images are for cuda:sm_80"),
        (damaged(|b| b.manifest.kernels[1].elements.truncate(2)), "has 3 operands, and elements of 2"),
        (damaged(|b| b.manifest.cpu = "x86-64-v3".into()), "launches functions of a GPU, and the images are for x86"),
        (damaged(|b| b.manifest.cpu = "cuda-emulated".into()), "launches `k"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "{found}");
    }
}
