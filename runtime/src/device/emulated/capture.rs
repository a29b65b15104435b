//! What CUDA asks of commands that are captured as a graph.

use crate::device::{Command, Stream};
use std::collections::HashMap;

/// A graph waits only for what was recorded inside, and all commands of the second stream have joined the first at its end.
pub fn check_capture(commands: &[Command]) -> Result<(), String> {
    // By event: the stream that it was recorded on last, and the transfers' commands before it.
    let mut recorded: HashMap<usize, (Stream, usize)> = HashMap::new();
    // Whether the second stream was forked from the first; its commands, and how many of them the first has waited for.
    let (mut forked, mut begun, mut joined) = (false, 0, 0);
    for command in commands {
        match command {
            Command::Record(Stream::Transfers, _) if !forked => {
                return Err("a graph records an event on a stream that is not part of it".into());
            }
            Command::Record(stream, event) => {
                recorded.insert(*event, (*stream, begun));
            }
            Command::Wait(stream, event) => {
                let Some((on, before)) = recorded.get(event) else {
                    return Err("a graph waits for an event from outside of it".into());
                };
                match (stream, on) {
                    (Stream::Transfers, Stream::Compute) => forked = true,
                    (Stream::Compute, Stream::Transfers) => joined = joined.max(*before),
                    _ => {}
                }
            }
            other if other.stream() == Stream::Transfers => {
                if !forked {
                    return Err("a graph has commands on a stream that is not part of it".into());
                }
                begun += 1;
            }
            _ => {}
        }
    }
    if joined < begun { Err("a graph ends while a stream in it has not joined the first".into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_stream_joins_after_its_last_command() {
        let exchange = || Command::Exchange(Vec::new());
        let begin = [Command::Record(Stream::Compute, 0), Command::Wait(Stream::Transfers, 0), exchange()];
        let join = [Command::Record(Stream::Transfers, 1), Command::Wait(Stream::Compute, 1)];
        assert_eq!(check_capture(&[&begin[..], &join].concat()), Ok(()));
        let early = [&begin[..], &join[..1], &[exchange()], &join[1..]].concat();
        assert!(check_capture(&early).unwrap_err().contains("has not joined"));
        assert!(check_capture(&begin[1..]).unwrap_err().contains("from outside"));
        assert!(check_capture(&begin[2..]).unwrap_err().contains("not part of it"));
    }
}
