//! Random numbers, initial weights and sampling against the independent implementation whose values are in tests/golden.

use artifact::program::DataShape;
use runtime::data::{Batches, Tokens};
use runtime::draw::Draws;
use serde_json::Value;
use std::path::Path;

fn golden() -> (Value, Vec<u8>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(root.join("tests/golden/random.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let data = std::fs::read(root.join(golden["data"].as_str().unwrap())).unwrap();
    (golden, data)
}

#[test]
fn draws_are_equal() {
    let (golden, _) = golden();
    for (name, values) in golden["draws"].as_object().unwrap() {
        let draws = Draws::new(golden["seed"].as_u64().unwrap(), name);
        for (i, value) in values.as_array().unwrap().iter().enumerate() {
            assert_eq!(format!("{:016x}", draws.at(i as u64)), value.as_str().unwrap(), "{name} {i}");
        }
    }
}

#[test]
fn initial_weights_are_equal() {
    let (golden, _) = golden();
    let layers = golden["model"]["layers"].as_f64().unwrap();
    for (name, std, len) in
        [("embed.tok", 0.02, 256 * 64), ("block.1.attn.out.weight", 0.02 / (2.0 * layers).sqrt(), 64 * 64)]
    {
        let draws = Draws::new(golden["seed"].as_u64().unwrap(), name);
        let weight = |e: u64| f64::from((draws.normal(e) * std) as f32);
        let expected = &golden["weights"][name];
        let close = |e: u64, v: &Value| {
            let v = v.as_f64().unwrap();
            assert!((weight(e) - v).abs() <= 1e-7 * v.abs(), "{name}[{e}]: {} instead of {v}", weight(e));
        };
        expected["first"].as_array().unwrap().iter().enumerate().for_each(|(e, v)| close(e as u64, v));
        close(len - 1, &expected["last"]);
    }
}

#[test]
fn sequences_start_at_the_same_tokens() {
    let (golden, data) = golden();
    assert_eq!(golden["tokens"].as_u64(), Some(data.len() as u64));
    let tokens = Tokens::U8(data.clone());
    for (context, starts) in golden["offsets"].as_object().unwrap() {
        let context: usize = context.parse().unwrap();
        let shape = DataShape { microbatch: 1, context: context as u32, vocab: 256 };
        let batches = Batches::sampled(&tokens, shape, golden["seed"].as_u64().unwrap());
        for (q, start) in starts.as_array().unwrap().iter().enumerate() {
            let start = start.as_u64().unwrap() as usize;
            let mut ids = vec![0; context];
            for shift in [0, 1] {
                batches.fill(q as u64, shift, &mut ids);
                let expected = &data[start + shift as usize..][..context];
                assert!(ids.iter().zip(expected).all(|(&id, &byte)| id == u32::from(byte)), "{context} {q} {shift}");
            }
        }
    }
}
