//! `device = cpu`, or `device = h100 { memory = 80 GiB, flops = 400 TFLOP/s, link = 50 GB/s }`: hardware that is not here.

use super::Context;
use super::section::{Keys, Section, assigned};
use crate::ast::{Entry, ValueKind};
use crate::spec::Device;

const DEVICE: Keys = Keys { block: "device", known: &["memory", "flops", "link", "latency"], later: &["bandwidth"] };

/// Time of an empty transfer where none is given.
const LATENCY_NS: u64 = 2_000;

/// `Some(None)`: this machine's CPU.
pub(super) fn device(cx: &mut Context, entry: &Entry) -> Option<Option<Device>> {
    let value = assigned(cx, entry)?;
    let ValueKind::Record(Some(name), body) = &value.kind else {
        cx.word(value, "device", &["cpu"], &["cuda", "gpu", "rocm", "metal"])?;
        return Some(None);
    };
    let section = Section::new(cx, &name.text, &name.span, body, &DEVICE);
    let memory = section.need(cx, "memory", "memory = 80 GiB").and_then(|v| cx.bytes(v, "memory"));
    let flops = section.need(cx, "flops", "flops = 400 TFLOP/s").and_then(|v| cx.flops_per_s(v, "flops"));
    let link = section.need(cx, "link", "link = 50 GB/s").and_then(|v| cx.bytes_per_s(v, "link"));
    let latency = section.value(cx, "latency").map_or(Some(LATENCY_NS), |v| cx.time_ns(v, "latency", 0));
    Some(Some(Device {
        name: name.text.clone(),
        memory_bytes: memory?.value,
        flops_per_s: flops?,
        link_bytes_per_s: link?,
        latency_ns: latency?,
        span: entry.key.span.start..value.span.end,
    }))
}
