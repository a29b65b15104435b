//! What CUDA asks of commands that are captured as a graph.

use crate::device::{Command, Stream};
use std::collections::{HashMap, HashSet};

/// A graph waits only for what was recorded inside, and the second stream has joined at its end.
pub fn check_capture(commands: &[Command]) -> Result<(), String> {
    let mut recorded = HashSet::new();
    // Whether the second stream was forked from the first, and has commands that nothing has joined.
    let (mut forked, mut open) = (false, false);
    let mut joins = HashMap::new();
    for command in commands {
        match command {
            Command::Record(stream, event) => {
                recorded.insert(*event);
                joins.insert(*event, *stream);
                if *stream == Stream::Transfers && !forked {
                    return Err("a graph records an event on a stream that is not part of it".into());
                }
            }
            Command::Wait(stream, event) => {
                if !recorded.contains(event) {
                    return Err("a graph waits for an event from outside of it".into());
                }
                match (stream, joins[event]) {
                    (Stream::Transfers, Stream::Compute) => forked = true,
                    (Stream::Compute, Stream::Transfers) => open = false,
                    _ => {}
                }
            }
            other if other.stream() == Stream::Transfers => {
                if !forked {
                    return Err("a graph has commands on a stream that is not part of it".into());
                }
                open = true;
            }
            _ => {}
        }
    }
    if open { Err("a graph ends while a stream in it has not joined the first".into()) } else { Ok(()) }
}
