//! Data, weights, metrics and bundle files, and what is said about bad ones.

use crate::toy::{self, Place, Schedule, saved, toy};
use runtime::RunError;
use runtime::metrics::Metrics;
use runtime::observe::Observer;
use runtime::progress::Progress;
use serde_json::Value;
use std::fs;

fn failure(place: &Place, data: &str) -> RunError {
    let mut options = place.options(1);
    options.data = vec![place.path(data)];
    toy::try_run(toy(Schedule::Gpipe, 1, 1), &options, &mut ()).unwrap_err()
}

#[test]
fn bad_data_is_named_with_its_place() {
    let place = Place::new();
    let message = |name: &str, bytes: &[u8]| {
        fs::write(place.path(name), bytes).unwrap();
        let text = failure(&place, name).to_string();
        text.replace(&*place.dir.path().to_string_lossy(), "DIR")
    };
    let cases = [
        message("latin1", b"caf\xe9 au lait"),
        message("odd.bin", &[1, 0, 2]),
        message("big.bin", &[1, 0, 2, 0, 0, 1]),
        message("big.u32.bin", &[1, 0, 0, 0, 0, 0, 0, 1]),
        message("short", b"abc"),
        failure(&place, "absent").to_string().replace(&*place.dir.path().to_string_lossy(), "DIR"),
    ];
    let expected = [
        "DIR/latin1: token 233 (number 3, at byte 3) is outside the model's vocabulary of 128",
        "DIR/odd.bin: 3 bytes are no whole number of 2-byte tokens",
        "DIR/big.bin: token 256 (number 2, at byte 4) is outside the model's vocabulary of 128",
        "DIR/big.u32.bin: token 16777216 (number 1, at byte 4) is outside the model's vocabulary of 128",
        "the training data has 3 tokens, and 4 are the least that can be used",
        "DIR/absent: can't be read (No such file or directory (os error 2))",
    ];
    assert_eq!(cases.each_ref().map(String::as_str), expected);
}

#[test]
fn wrong_requests_have_status_2() {
    let place = Place::new();
    let status = |change: fn(&mut runtime::RunOptions)| {
        let mut options = place.options(1);
        change(&mut options);
        toy::try_run(toy(Schedule::Gpipe, 1, 1), &options, &mut ()).unwrap_err().exit_status()
    };
    assert_eq!(status(|o| o.updates = 0), 2);
    assert_eq!(status(|o| o.updates = u64::MAX), 2);
    assert_eq!(status(|o| o.data.clear()), 2);
    assert_eq!(status(|o| o.holdout = Some(1.0)), 2);
    assert_eq!(status(|o| o.holdout = Some(f64::NAN)), 2);
    assert_eq!(status(|o| o.holdout = Some(0.99)), 3);
}

#[test]
fn tokens_of_every_width_and_split_files_are_the_same_data() {
    let place = Place::new();
    let text = toy::TEXT.as_bytes();
    let wide = |n: usize| text.iter().flat_map(|&b| [b, 0, 0, 0][..n].to_vec()).collect::<Vec<u8>>();
    fs::write(place.path("a.bin"), wide(2)).unwrap();
    fs::write(place.path("a.u32.bin"), wide(4)).unwrap();
    fs::write(place.path("head.u32.bin"), &wide(4)[..40]).unwrap();
    fs::write(place.path("rest"), &text[10..]).unwrap();
    let losses = |names: &[&str]| {
        let mut options = place.options(5);
        options.data = names.iter().map(|n| place.path(n)).collect();
        toy::run(toy(Schedule::Gpipe, 2, 2), &options).1.losses()
    };
    let expected = losses(&["text"]);
    for names in [&["a.bin"][..], &["a.u32.bin"], &["head.u32.bin", "rest"]] {
        assert_eq!(losses(names), expected, "{names:?}");
    }
}

#[test]
fn a_held_out_fraction_is_the_tail_of_each_file() {
    let place = Place::new();
    fs::write(place.path("a"), "aaaaaaaaaabbbbbbbbbb").unwrap();
    fs::write(place.path("c"), "ccccccccccdddddddddd").unwrap();
    let shape = artifact::program::DataShape { microbatch: 2, context: 3, vocab: 128 };
    let data = runtime::data::Data::read(&[place.path("a"), place.path("c")], &[], Some(0.5), shape).unwrap();
    assert_eq!(data.train, runtime::data::Tokens::U8(b"aaaaaaaaaacccccccccc".to_vec()));
    assert_eq!(data.eval, Some(runtime::data::Tokens::U8(b"bbbbbbbbbbdddddddddd".to_vec())));
}

#[test]
fn weights_move_between_partitions() {
    let place = Place::new();
    let path = place.path("w.safetensors");
    let mut options = place.options(6);
    options.save = Some(path.clone());
    toy::run(toy(Schedule::Async, 4, 2), &options);
    let first = fs::read(&path).unwrap();
    toy::run(toy(Schedule::Async, 4, 2), &options);
    assert_eq!(first, fs::read(&path).unwrap(), "the same run saves the same bytes");

    let continued = |ranks: usize| {
        let mut options = place.options(4);
        (options.load, options.save) = (Some(path.clone()), Some(place.path("next.safetensors")));
        let losses = toy::run(toy(Schedule::Gpipe, ranks, 2), &options).1.losses();
        (losses, fs::read(place.path("next.safetensors")).unwrap())
    };
    let one = continued(1);
    assert_eq!(continued(2), one);
    assert_eq!(continued(4), one);
    assert_ne!(saved(&path), saved(&place.path("next.safetensors")));
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&one.1).unwrap();
    let metadata = metadata.metadata().clone().unwrap();
    assert_eq!((metadata["format"].as_str(), metadata["step"].as_str()), ("pt", "10"));
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let place = Place::new();
    let path = place.path("w.safetensors");
    let mut options = place.options(1);
    options.save = Some(path.clone());
    toy::run(toy(Schedule::Gpipe, 2, 1), &options);
    let good = fs::read(&path).unwrap();
    (options.save, options.load) = (None, Some(path.clone()));
    let message = |bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        let error = toy::try_run(toy(Schedule::Gpipe, 4, 1), &options, &mut ()).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        error.to_string().replace(&*path.to_string_lossy(), "FILE")
    };
    let edited = |from: &str, to: &str| {
        let at = good.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    let renamed = message(edited("layer.3.w", "layer.9.w"));
    assert_eq!(renamed, "weights FILE: does not have what the model needs: `layer.3.w`");
    let shape = message(edited("\"shape\":[5]", "\"shape\":[ ]"));
    assert!(shape.starts_with("weights FILE: is not a whole safetensors file"), "{shape}");
    let cut = message(good[..good.len() - 1].to_vec());
    assert!(cut.starts_with("weights FILE: is not a whole safetensors file"), "{cut}");
}

#[test]
fn a_place_that_can_not_be_written_is_found_before_training() {
    let place = Place::new();
    let mut options = place.options(1 << 30);
    options.save = Some(place.path("absent/w.safetensors"));
    let error = toy::try_run(toy(Schedule::Gpipe, 1, 1), &options, &mut ()).unwrap_err().to_string();
    assert!(error.contains("absent/w.safetensors: can't be written (No such file or directory"), "{error}");
}

#[test]
fn metrics_are_json_lines_with_a_summary_at_the_end() {
    let place = Place::new();
    let mut options = place.options(3);
    options.holdout = Some(0.3);
    let (mut metrics, mut text) = (Vec::new(), Vec::new());
    {
        let mut all: Vec<Box<dyn Observer + '_>> =
            vec![Box::new(Metrics::new(&mut metrics)), Box::new(Progress::plain(&mut text))];
        toy::try_run(toy(Schedule::Async, 2, 2), &options, &mut all).unwrap();
    }
    let metrics = String::from_utf8(metrics).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    let shapes: Vec<String> = lines.iter().map(keys).collect();
    let update = "drift_max_seen elapsed_s loss tokens tokens_per_s update";
    let evaluation = "eval_loss eval_s eval_tokens updates";
    assert_eq!(shapes, [evaluation, update, update, update, evaluation, "summary"]);
    let rank = &lines[5]["summary"]["ranks"][1];
    for key in ["allocated_bytes", "busy_s", "wait_s", "bubble_replayed"] {
        assert!(rank[key].is_number(), "{key}: {rank}");
    }
    assert!(lines[5]["summary"]["stages"][1]["f_ns"].is_number(), "{}", lines[5]);
    assert_eq!(lines[3]["tokens"], 3 * 2 * toy::ROWS);
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("held-out loss after 0 updates: "), "{text}");
    assert!(text.contains("\nupdate 3/3  loss ") && text.contains("\ndone after 3 updates: 36 tokens in"), "{text}");
}
