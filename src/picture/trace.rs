//! A run in the Chrome trace format, which Perfetto opens: a process per schedule, a thread per rank.
//!
//! Numbers of processes and threads begin at 1: viewers take thread 0 for the process's main thread and draw it over
//! thread 1. Counters belong to a process, so they name no thread.

use super::scene::{Action, Scene, Unit};
use serde_json::{Value, json};

/// All scenes in one trace. Times are microseconds, as the format wants them.
pub fn trace(scenes: &[Scene]) -> String {
    let events: Vec<Value> = scenes.iter().enumerate().flat_map(|(i, scene)| process(i as u32 + 1, scene)).collect();
    json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
}

fn process(pid: u32, scene: &Scene) -> Vec<Value> {
    let about =
        |name: &str, tid: u32, args: Value| json!({ "ph": "M", "name": name, "pid": pid, "tid": tid, "args": args });
    let mut events = vec![
        about("process_name", 1, json!({ "name": format!("{}: {}", scene.file, scene.schedule) })),
        about("process_sort_index", 1, json!({ "sort_index": pid })),
    ];
    for (rank, lane) in scene.lanes.iter().enumerate() {
        let tid = thread(rank as u32);
        events.push(about("thread_name", tid, json!({ "name": format!("rank {rank}") })));
        events.push(about("thread_sort_index", tid, json!({ "sort_index": rank })));
        let (name, unit) = match lane.memory.unit {
            Unit::Bytes => ("memory", "bytes"),
            Unit::Microbatches => ("in flight", "micro-batches"),
        };
        let name = format!("{name}, rank {rank}");
        events.extend(
            lane.memory
                .points
                .iter()
                .map(|(us, value)| json!({ "ph": "C", "name": name, "pid": pid, "ts": us, "args": { unit: value } })),
        );
    }
    let mut critical = vec![false; scene.actions.len()];
    scene.path.iter().for_each(|step| critical[step.action] = true);
    events.extend(scene.actions.iter().zip(critical).map(|(action, critical)| slice(pid, action, critical)));
    events
}

fn thread(rank: u32) -> u32 {
    rank + 1
}

/// An action as a slice; an update that takes no time of its own as an instant.
fn slice(pid: u32, action: &Action, critical: bool) -> Value {
    let Action { rank, stage, op, mb, slot, version, start, end } = action;
    let mut args = json!({ "stage": stage, "version": version, "critical": critical });
    let which = if *op == "U" { "update" } else { "micro-batch" };
    args[which] = (*mb).into();
    if let Some(slot) = slot {
        args["slot"] = (*slot).into();
    }
    let mut event = json!({
        "name": format!("{op}{mb}"), "cat": op, "pid": pid, "tid": thread(*rank), "ts": start, "args": args,
    });
    if start == end {
        event["ph"] = "i".into();
        event["s"] = "t".into();
    } else {
        event["ph"] = "X".into();
        event["dur"] = (((end - start) * 1000.0).round() / 1000.0).into();
    }
    event
}
